"""Who serves a call of attention, what is said of it, and what each gives beyond the table: dropout, second and batched derivatives."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math

import pytest
from attention_cases import ALPHA, BLOCKS, OPTIONS, PRIOR, SDPA_HAS_NOT, SINK, B, H, K, Q, S, V, call, in_blocks, torch

import anymax as A
from anymax import Budget, Entmax, NormMax, Softmax, Sparsemax, SparseSoftmax, Taylor
from anymax import transforms as T
from anymax._attention import torch_blockwise

implementations = importlib.import_module("anymax._attention.implementations")
every_block = pytest.mark.parametrize("blocks", BLOCKS)
both = pytest.mark.parametrize("implementation", ["blockwise", "reference"])


def leaves(*arrays):
    return [a.detach().clone().requires_grad_() for a in arrays]


def grads_of(outs, *inputs):
    """The gradients of the same function of each output."""
    g = torch.randn(outs[0].shape, generator=torch.Generator().manual_seed(1), dtype=outs[0].dtype)
    return [torch.autograd.grad(out, inputs, g) for out in outs]


# -- who serves -----------------------------------------------------------------------------------------------------------------


def told(*arrays, **options):
    """(who serves, the words of each that doesn't)."""
    ((op, chosen, refusals),) = A.explain_attention(*arrays, **options).rows
    assert op == "attention"
    return chosen, dict(refusals)


LONG = torch.zeros(1, 1024, 4)
NUMPY = [a.numpy() for a in (Q, K, V)]
SERVED = {  # name -> (arrays, options, who serves, the words of those who don't)
    "softmax": ((Q, K, V), {}, "sdpa", {}),
    "a small call": (
        (Q, K, V), {"mapping": Taylor(2), "is_causal": True}, "reference",
        {"sdpa": "torch has attention with softmax, not with taylor", "blockwise": "so few scores are faster as one matrix"},
    ),
    "a name": ((Q, K, V), {"implementation": "reference", "mix": (PRIOR, 0.5)}, "reference", {"sdpa": "'reference' was asked for"}),
    "a large call": ((LONG, LONG, LONG), {"mapping": Sparsemax()}, "blockwise", {}),
    "NumPy": (NUMPY, {}, "reference", {"sdpa": "it takes torch tensors"}),
}  # fmt: skip


@pytest.mark.parametrize("case", SERVED)
def test_explain_attention_names_who_serves(case):
    arrays, options, server, words = SERVED[case]
    chosen, said = told(*arrays, **options)
    assert chosen == server
    assert words.items() <= said.items()


LONGER = torch.zeros(1, 2048, 4)


@pytest.mark.parametrize(
    ("options", "server"),
    [
        ({"window": (128, 0)}, "blockwise"),
        ({"window": (128, 128)}, "blockwise"),
        ({"window": (256, 900), "is_causal": True}, "blockwise"),
        ({"window": (900, 0)}, "sdpa"),
        ({"window": (128, None)}, "sdpa"),
        ({"is_causal": True}, "sdpa"),
        ({"lengths": torch.tensor([100])}, "sdpa"),
        ({"window": (128, 0), "need_weights": True}, "reference"),
    ],
    ids=str,
)
def test_blocks_skip_what_a_window_hides(options, server):
    q = LONGER[None]
    assert told(q, q, q, **options)[0] == server
    if options == {"window": (128, 0)}:
        assert (
            told(q, q, q, **options)[1]["sdpa"]
            == "it is slower here: on a CPU torch computes what a window hides, and its gradients in half precision take long"
        )
        short = q[..., :1024, :]
        assert told(short, short, short, **options)[0] == "sdpa"


@pytest.mark.parametrize(
    ("dtype", "keys", "learns", "options", "server"),
    [
        ("bfloat16", 128, True, {}, "reference"),
        ("bfloat16", 129, True, {}, "sdpa"),
        ("bfloat16", 128, False, {}, "sdpa"),
        ("bfloat16", 128, True, {"dropout_p": 0.1}, "sdpa"),
        ("float16", 1024, True, {"is_causal": True}, "blockwise"),
        ("float32", 128, True, {}, "sdpa"),
    ],
)
def test_gradients_in_half_precision_leave_torch_where_it_is_slow(dtype, keys, learns, options, server):
    q = torch.zeros(1, keys, 4, dtype=getattr(torch, dtype), requires_grad=learns)
    assert told(q, q, q, **options)[0] == server


def test_a_window_in_blocks_is_that_of_torch():
    q, k, v = torch.randn(3, 1, 2, 2048, 8, generator=torch.Generator().manual_seed(0))
    own = A.attention(q, k, v, window=(100, 0))
    torch.testing.assert_close(own, A.attention(q, k, v, window=(100, 0), implementation="sdpa"), rtol=1e-5, atol=1e-6)


def test_linear_attention_serves_where_it_is_named():
    assert "name it to use it" in told(Q, K, V, mapping=Taylor(2), is_causal=True)[1]["linear"]


@pytest.mark.parametrize("option", OPTIONS)
def test_softmax_goes_to_torch_where_it_can(option, monkeypatch):
    called, own = [], torch.nn.functional.scaled_dot_product_attention
    spy = lambda *a, **o: called.append(1) or own(*a, **o)  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    call("softmax", {"q": Q, "k": K, "v": V, **OPTIONS[option]}, lambda a: a)
    assert bool(called) == (option not in SDPA_HAS_NOT)


@pytest.mark.parametrize(
    "options", [{}, {"need_weights": True}, {"softcap": 2.0}, {"is_causal": True, "dropout_p": 0.5}], ids=str
)
@pytest.mark.parametrize("mapping", [Softmax(), Sparsemax()], ids=repr)
def test_explain_attention_is_true(mapping, options, monkeypatch):
    """The implementation that it names is the one that runs, for few scores and for many."""
    ran = []

    def spy(one):
        return one._replace(run=lambda call: ran.append(one.name) or one.run(call))

    monkeypatch.setattr(implementations, "IMPLEMENTATIONS", tuple(spy(one) for one in implementations.IMPLEMENTATIONS))
    for n in (4, 1024):
        q = torch.randn(2, 1, n, 4, generator=torch.Generator().manual_seed(0))
        A.attention(q, q, q, mapping, **options)
        assert told(q, q, q, mapping=mapping, **options)[0] == ran.pop()


def test_use_reference_is_heard(monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", None)
    with A.use("reference"):
        A.attention(Q, K, V)
        assert told(LONG, LONG, LONG)[1]["sdpa"] == "'reference' was asked for"
    with pytest.raises(TypeError):
        A.attention(Q, K, V)


def test_large_calls_go_in_blocks_and_small_ones_do_not(monkeypatch):
    monkeypatch.setattr(implementations, "_MATRIX", 100)
    assert told(Q, K, V, mapping=Sparsemax())[0] == "blockwise"
    for options in ({"need_weights": True}, {"transform": lambda s: s * 2}):
        assert told(Q, K, V, mapping=Sparsemax(), **options)[0] == "reference"


def test_every_implementation_but_the_last_says_what_it_does_not_serve():
    assert implementations.IMPLEMENTATIONS[-1].name == "reference"
    for one in implementations.IMPLEMENTATIONS[:-1]:
        with pytest.raises(ValueError, match=f"implementation '{one.name}' can't take this call: ."):
            A.attention(*NUMPY, Entmax(1.5), transform=lambda s: s, implementation=one.name)
    assert dataclasses.is_dataclass(T.scalable())


# -- sparse blocks ----------------------------------------------------------------------------------------------------------------

SPARSE = {  # name -> (the map, a number that is learned)
    **{name: (lambda _, m=m: m, None) for name, m in {
        "sparsemax": Sparsemax(), "entmax1.5": Entmax(1.5), "entmax3": Entmax(3.0), "budget": Budget(2.0), "normmax": NormMax(2.0),
        "topk": SparseSoftmax(k=3),
    }.items()},
    **{f"entmax, learned {shape}": (Entmax, (1.6, 2.6, shape)) for shape in ((), (4, 1, 1), (2, 1, 1, 1), (1, 4, 150, 1))},
    "normmax, learned": (NormMax, (1.5, 4.0, (4, 1, 1))),
    "linear budget, learned": (lambda k: Budget(k, shape="linear"), (1.2, 3.5, (1, 4, 150, 1))),
}  # fmt: skip
BESIDE = {
    "plain": {},
    "causal": {"is_causal": True, "offset": 250},
    "window": {"window": (280, 280)},
    "bias": {"bias": None},
}


@pytest.mark.whole(lambda name, option: option != "causal" and name not in ("sparsemax", "entmax, learned (4, 1, 1)"))
@pytest.mark.parametrize("option", BESIDE)
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_blocks(name, option, monkeypatch):
    """Rows long enough for the non-zeros to be kept: the output and all gradients, also by a number of the map, are sums over them."""
    monkeypatch.setattr(torch_blockwise, "BLOCK", 3 * 400 * 128)
    seen, inner = [], torch_blockwise._sparse_backward
    monkeypatch.setattr(torch_blockwise, "_sparse_backward", lambda *a: (seen.append(1), inner(*a)))
    g = torch.Generator().manual_seed(1)
    arrays = leaves(
        *(2 * torch.randn(s, generator=g).double() for s in ((2, 4, 150, 8), (2, 2, 400, 8), (2, 2, 400, 5)))
    )
    make, number = SPARSE[name]
    learned = (
        [] if number is None else leaves(torch.linspace(*number[:2], math.prod(number[2])).double().reshape(number[2]))
    )
    options = {"bias": torch.randn(1, 4, 1, 400, generator=g).double()} if option == "bias" else BESIDE[option]
    run = functools.partial(A.attention, *arrays, make(*learned or [None]), enable_gqa=True, **options)
    outs = [run(implementation=one) for one in ("blockwise", "reference")]
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*grads_of(outs, *arrays, *learned))
    assert seen or name.startswith(("normmax", "budget"))
    for each in learned:  # alone, too
        torch.testing.assert_close(*grads_of([run(implementation=one) for one in ("blockwise", "reference")], each))


# -- derivatives ------------------------------------------------------------------------------------------------------------------


def small(*arrays, queries=3):
    return leaves(*(a[:1, :2, :queries] for a in arrays))


@every_block
@both
@pytest.mark.parametrize("option", ["plain", "dropout"])
@pytest.mark.whole(
    lambda implementation, blocks: (
        (implementation, blocks) not in (("blockwise", "tiny blocks"), ("reference", "one block"))
    )
)
def test_gradients_by_differences(option, implementation, blocks, monkeypatch):
    in_blocks(monkeypatch, BLOCKS[blocks])
    more = {"dropout_p": 0.3, "generator": 5} if option == "dropout" else {}
    f = lambda q, k, v, a: A.attention(q, k, v, Entmax(a), implementation=implementation, **more)  # noqa: E731
    assert torch.autograd.gradcheck(f, (*small(Q, K, V), *leaves(ALPHA[:2])), fast_mode=True)


@every_block
@both
@pytest.mark.whole(
    lambda implementation, blocks: (
        (implementation, blocks) not in (("blockwise", "small blocks"), ("reference", "one block"))
    )
)
def test_second_derivatives(implementation, blocks, monkeypatch):
    in_blocks(monkeypatch, BLOCKS[blocks])
    f = lambda q, k, v, a: A.attention(q, k, v, Entmax(a), is_causal=True, implementation=implementation)  # noqa: E731
    assert torch.autograd.gradgradcheck(f, (*small(Q, K, V), *leaves(ALPHA[:2])), fast_mode=True)


@pytest.mark.parametrize("vmap", [False, True], ids=["batched", "vmap"])
@pytest.mark.parametrize("server", ["sdpa", "linear", "reference", *BLOCKS])
@pytest.mark.whole(lambda server: server in ("tiny blocks", "one block"))
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch.vmap, for linear attention
def test_a_batch_of_gradients(server, vmap, monkeypatch):
    """Rows of a Jacobian in one backward pass, by `is_grads_batched` and by torch.vmap around it."""
    in_blocks(monkeypatch, BLOCKS.get(server, ()))
    q, k, v, alpha, sink = leaves(Q, K, V, ALPHA, SINK)
    if server in ("sdpa", "linear"):
        inputs, mapping, options = [q, k, v], Softmax() if server == "sdpa" else Taylor(2), {}
    else:
        inputs, mapping, options = [q, k, v, alpha, sink], Entmax(alpha), {"sink": sink, "softcap": 3.0}
    named = "blockwise" if server in BLOCKS else server
    out = A.attention(q, k, v, mapping, is_causal=True, implementation=named, **options)
    g = torch.randn(3, *out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(0))
    each = [torch.autograd.grad(out, inputs, one, retain_graph=True) for one in g]
    if vmap:
        found = torch.vmap(lambda one: torch.autograd.grad(out, inputs, one, retain_graph=True))(g)
    else:
        found = torch.autograd.grad(out, inputs, g, is_grads_batched=True)
    torch.testing.assert_close(found, tuple(torch.stack(rows) for rows in zip(*each)))


def test_no_batch_of_gradients_through_the_dropout_of_blocks():
    q, k, v = leaves(Q, K, V)
    out = A.attention(q, k, v, dropout_p=0.5, generator=1, implementation="blockwise")
    with pytest.raises(RuntimeError, match="no batch of gradients through dropout; ask for 'reference'"):
        torch.autograd.grad(out, (q, k, v), torch.stack([out, out]), is_grads_batched=True)


# -- dropout ----------------------------------------------------------------------------------------------------------------------


@every_block
@both
@pytest.mark.whole(
    lambda implementation, blocks: (
        (implementation, blocks) not in (("blockwise", "small blocks"), ("reference", "one block"))
    )
)
def test_dropout(implementation, blocks, monkeypatch):
    """The same seed drops the same, backward drops what forward dropped, and the mean is the output."""
    in_blocks(monkeypatch, BLOCKS[blocks])
    q, k, v, eye = leaves(Q, K, V, torch.eye(S).double().expand(B, H, S, S))
    run = functools.partial(A.attention, q, k, dropout_p=0.4, implementation=implementation)
    one = run(v, generator=3)
    torch.testing.assert_close(run(v, generator=3), one)
    assert (run(v, generator=4) != one).any()
    p = run(eye, generator=3)
    assert 0.2 < float((p == 0).double().mean()) < 0.6
    torch.testing.assert_close(one, p @ v)
    torch.testing.assert_close(torch.autograd.grad(one.sum(), v)[0], p.sum(-2)[..., None].expand(v.shape))
    with torch.no_grad():
        mean = torch.stack([run(v, generator=s) for s in range(100)]).mean(0)
        torch.testing.assert_close(mean, A.attention(q, k, v), atol=0.4, rtol=0)
        torch.manual_seed(0)
        once = run(v, Sparsemax())
        torch.manual_seed(0)
        torch.testing.assert_close(run(v, Sparsemax()), once)


# -- memory -----------------------------------------------------------------------------------------------------------------------


def test_memory_of_blocks_is_not_that_of_the_matrix():
    """Of 2048 x 2048 scores, 16 MB, no tensor of more than a block is ever made."""
    q, k, v = (torch.randn(1, 1, 2048, 8, requires_grad=True) for _ in range(3))
    largest, found = {}, {}
    for one in ("blockwise", "reference"):
        with torch.autograd.profiler.profile(profile_memory=True) as profile:
            out = A.attention(q, k, v, Sparsemax(), is_causal=True, implementation=one)
            out.pow(2).sum().backward()
        largest[one], found[one] = max(e.cpu_memory_usage for e in profile.function_events), out.detach()
    assert largest["blockwise"] <= 8 << 20 < 16 << 20 <= largest["reference"]
    torch.testing.assert_close(found["blockwise"], found["reference"])
