"""What a user of attention may ask for: each option by a loop over queries, then every implementation held to the reference."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import math

import numpy as np
import plainly
import pytest
from kinds import KINDS, back, every_kind

import anymax as A
from anymax import Budget, Entmax, NormMax, PerturbMax, Ratio, Sigsoftmax, Softmax, Sparsemax, SparseSoftmax, Taylor
from anymax import transforms as T

MAPS = {
    "softmax": (Softmax(), plainly.softmax),
    "sparsemax": (Sparsemax(), lambda x: plainly.entmax(x, 2.0)),
    "entmax1.5": (Entmax(1.5), lambda x: plainly.entmax(x, 1.5)),
    "taylor": (Taylor(2), plainly.taylor),
}
B, H, L, S, D, DV = 2, 4, 5, 7, 3, 6
RNG = np.random.default_rng(0)
Q, K, V = (RNG.normal(size=s) for s in ((B, H, L, D), (B, H, S, D), (B, H, S, DV)))
BIAS, KEEP = RNG.normal(size=(H, L, S)), RNG.uniform(size=(B, 1, L, S)) < 0.7
SLOPES, SINK = np.array([0.5, 0.25, 0.1, 0.0]), np.array([0.3, -1.0, 2.0, 0.0])
SLOPES_OF_BATCHES = np.array([[0.5, 0.25, 0.1, 0.0], [0.0, 1.0, 0.3, 0.7]])
PRIOR = np.abs(RNG.normal(size=(L, S)))
PRIOR /= PRIOR.sum(-1, keepdims=True)
LENGTHS, Q_LENGTHS, OFFSETS = np.array([4, 7]), np.array([5, 3]), np.array([2, 0])
BETA = np.array([0.5, 1.0, 2.0, 0.0]).reshape(4, 1, 1)


def alone(p_of, b, h, i, *, causal=False, left=None, right=None, offset=0, lengths=None, q_lengths=None, slopes=None,
          softcap=None, sink=None, keep=None, bias=None, beta=None, mix=None, scale=D**-0.5):  # fmt: skip
    """The output of one query, from the definitions."""
    at = i + (offset[b] if isinstance(offset, np.ndarray) else offset)
    scores, keys = [], []
    for j in range(S):
        s = scale * (Q[b, h, i] @ K[b, h, j])
        s = s if softcap is None else softcap * math.tanh(s / softcap)
        s += 0.0 if bias is None else bias[h, i, j]
        s -= 0.0 if slopes is None else np.broadcast_to(slopes, (B, H))[b, h] * abs(at - j)
        hidden = [
            causal and j > at, left is not None and j < at - left, right is not None and j > at + right,
            lengths is not None and j >= lengths[b], q_lengths is not None and i >= q_lengths[b],
            keep is not None and not keep[b, 0, i, j],
        ]  # fmt: skip
        if not any(hidden):
            scores.append(s)
            keys.append(j)
    if not keys:
        return np.zeros(DV)
    scores = np.array(scores)
    if beta is not None:
        scores = scores * beta[h, 0, 0] * math.log(len(scores))
    if sink is not None:
        scores = np.append(scores, sink[h])
    p = p_of(scores)[: len(keys)]
    if mix is not None:
        p = (1 - mix[1]) * p + mix[1] * mix[0][i, keys]
    return p @ V[b, h, keys]


# name -> (options of attention, options of `alone`)
OPTIONS = {
    "plain": ({}, {}),
    "causal": ({"is_causal": True}, {"causal": True}),
    "causal at the end": ({"is_causal": True, "offset": S - L}, {"causal": True, "offset": S - L}),
    "offsets": ({"is_causal": True, "offset": OFFSETS}, {"causal": True, "offset": OFFSETS}),
    "window": ({"window": 1}, {"left": 1, "right": 1}),
    "window left": ({"window": (2, None), "is_causal": True}, {"causal": True, "left": 2}),
    "window right": ({"window": (0, 2), "offset": 1}, {"left": 0, "right": 2, "offset": 1}),
    "beyond the keys": ({"window": (0, 0), "offset": 4}, {"left": 0, "right": 0, "offset": 4}),
    "lengths": ({"lengths": LENGTHS}, {"lengths": LENGTHS}),
    "both lengths": (
        {"lengths": LENGTHS, "q_lengths": Q_LENGTHS, "is_causal": True},
        {"lengths": LENGTHS, "q_lengths": Q_LENGTHS, "causal": True},
    ),
    "alibi": ({"alibi": SLOPES, "is_causal": True}, {"slopes": SLOPES, "causal": True}),
    "alibi of batches": ({"alibi": SLOPES_OF_BATCHES, "offset": 2}, {"slopes": SLOPES_OF_BATCHES, "offset": 2}),
    "softcap": ({"softcap": 0.7, "bias": BIAS}, {"softcap": 0.7, "bias": BIAS}),
    "sink": ({"sink": SINK}, {"sink": SINK}),
    "sink, causal, mask": ({"sink": SINK, "is_causal": True, "mask": KEEP}, {"sink": SINK, "causal": True, "keep": KEEP}),
    "mask and bias": ({"mask": KEEP, "bias": BIAS}, {"keep": KEEP, "bias": BIAS}),
    "scale": ({"scale": 0.3, "window": 2}, {"scale": 0.3, "left": 2, "right": 2}),
    "scalable": ({"transform": ("scalable", BETA), "is_causal": True}, {"beta": BETA, "causal": True}),
    "mix": ({"mix": (PRIOR, 0.3), "is_causal": True}, {"mix": (PRIOR, 0.3), "causal": True}),
}  # fmt: skip


def given(options, make):
    out = {}
    for name, value in options.items():
        if name == "transform":
            out[name] = T.scalable(beta=make(value[1]))
        elif name == "mix":
            out[name] = (make(value[0]), value[1])
        else:
            out[name] = make(value) if isinstance(value, np.ndarray) else value
    return out


@functools.cache
def oracle(option, name):
    plain = OPTIONS[option][1]
    out = np.zeros((B, H, L, DV))
    for b, h, i in np.ndindex(B, H, L):
        out[b, h, i] = alone(MAPS[name][1], b, h, i, **plain)
    return out


@every_kind
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_is_its_definition(option, name, kind):
    if kind in ("jax", "strict") and name != "entmax1.5":
        pytest.skip("numpy and torch share the formula")
    make, tol = KINDS[kind], 5e-6 if kind == "jax" else 1e-10
    out = A.attention(make(Q), make(K), make(V), MAPS[name][0], **given(OPTIONS[option][0], make))
    assert type(out) is type(make(Q))
    np.testing.assert_allclose(back(out), oracle(option, name), atol=tol)


def test_alibi_slopes_are_those_of_the_paper():
    from anymax._attention.scores import alibi_slopes

    assert alibi_slopes(8) == [2.0**-h for h in range(1, 9)]
    np.testing.assert_allclose(alibi_slopes(3), [2**-4, 2**-8, 2**-2])
    make = np.asarray
    a = A.attention(Q, K, V, alibi=True)
    np.testing.assert_array_equal(a, A.attention(Q, K, V, alibi=make(alibi_slopes(H))))


@every_kind
def test_weights_are_what_the_output_is_made_of(kind):
    make = KINDS[kind]
    options = given(OPTIONS["sink, causal, mask"][0], make)
    out, p = A.attention(make(Q), make(K), make(V), Sparsemax(), need_weights=True, **options)
    assert tuple(p.shape) == (B, H, L, S)
    np.testing.assert_allclose(back(p) @ V, back(out), atol=1e-5)
    assert not back(p)[~np.broadcast_to(KEEP & np.tril(np.ones((L, S), bool)), p.shape)].any()
    assert (back(p).sum(-1) < 1 + 1e-6).all()
    _, mixed = A.attention(make(Q), make(K), make(V), mix=(make(PRIOR), 0.5), need_weights=True)
    np.testing.assert_allclose(back(mixed).sum(-1), 1.0, atol=1e-6)


def test_decoding_with_a_cache_is_the_last_rows():
    full = A.attention(K, K, V, Entmax(1.5), is_causal=True)
    for start in (S - 1, S - 3):
        part = A.attention(K[:, :, start:], K, V, Entmax(1.5), is_causal=True, offset=start)
        np.testing.assert_allclose(part, full[:, :, start:], atol=1e-12)


@every_kind
def test_grouped_queries_are_repeated_keys(kind):
    make = KINDS[kind]
    k, v = K[:, :2], V[:, :2]
    out = A.attention(make(Q), make(k), make(v), Sparsemax(), enable_gqa=True, is_causal=True, alibi=make(SLOPES))
    again = A.attention(Q, np.repeat(k, 2, 1), np.repeat(v, 2, 1), Sparsemax(), is_causal=True, alibi=SLOPES)
    np.testing.assert_allclose(back(out), again, atol=1e-6)


@pytest.mark.parametrize("option", OPTIONS)
def test_gradients_in_jax_are_those_of_torch(option):
    jax = pytest.importorskip("jax")
    torch = pytest.importorskip("torch")
    if option in ("window", "scale", "beyond the keys", "window right"):
        pytest.skip("window left has it all")
    own = given(OPTIONS[option][0], jax.numpy.asarray)

    def loss(q, k, v):
        return (A.attention(q, k, v, Entmax(1.5), **own) ** 2).sum()

    leaves = [torch.tensor(a, requires_grad=True) for a in (Q, K, V)]
    out = A.attention(*leaves, Entmax(1.5), **given(OPTIONS[option][0], torch.tensor))
    want = torch.autograd.grad(out.pow(2).sum(), leaves)
    got = jax.jit(jax.grad(loss, (0, 1, 2)))(*(jax.numpy.asarray(a) for a in (Q, K, V)))
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, atol=2e-4)


def test_a_picture_of_the_weights():
    pytest.importorskip("matplotlib")
    torch = pytest.importorskip("torch")
    import matplotlib.pyplot as plt

    q, k, v = (torch.tensor(a[0], requires_grad=True) for a in (Q, K, V))
    _, p = A.attention(q, k, v, Sparsemax(), need_weights=True)
    axes = A.plot.attention(p)
    assert axes.size >= H
    share = float((p[0] == 0).double().mean())
    assert axes.flat[0].figure is not None
    assert A.plot.attention(p[0]).get_title() == f"{share:.0%} exact zeros"
    plt.close("all")


# -- torch: every implementation is the reference --------------------------------------------------------------------------------

torch = pytest.importorskip("torch")

from anymax._attention import torch_blockwise

EVERY = {
    **MAPS, "entmax1.25": (Entmax(1.25), None), "entmax3": (Entmax(3.0), None), "budget": (Budget(2.0), None),
    "normmax": (NormMax(2.0), None), "sigsoftmax": (Sigsoftmax(), None), "topk": (SparseSoftmax(k=3), None),
    "topp": (SparseSoftmax(p=0.8), None), "perturb_max": (PerturbMax(nodes=64), None), "ratio": (Ratio.square(), None),
    "traced": (Ratio(lambda x: x * x + 1), None),
}  # fmt: skip


def tensors(*arrays, dtype=torch.float64):
    return [torch.tensor(a, dtype=dtype, requires_grad=True) for a in arrays]


@pytest.fixture(params=[(8, 1, 1), (70, 2, 3), (10**6, 32, 256)], ids=["tiny blocks", "small blocks", "one block"])
def blocks(request, monkeypatch):
    for name, value in zip(("_BLOCK", "_ROWS", "_KEYS"), request.param):
        monkeypatch.setattr(torch_blockwise, name, value)


def leaves_of(options):
    """The tensors of the options that can have a gradient."""
    out = [v for v in options.values() if isinstance(v, torch.Tensor) and v.is_floating_point()]
    for t in [options["transform"]] if "transform" in options else []:
        out += [v for _, v in t.params if isinstance(v, torch.Tensor)]
    return [v.requires_grad_() for v in out]


def both(mapping, arrays, options, groups=False, learn=()):
    """(outputs, gradients) of the blocks and of the reference."""
    results = []
    for implementation in ("blockwise", "reference"):
        leaves = tensors(*arrays)
        own = given(options, lambda a: torch.tensor(a))
        own.pop("mix", None)
        extra = leaves_of(own)
        out = A.attention(*leaves, mapping, enable_gqa=groups, implementation=implementation, **own)
        g = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
        grads = torch.autograd.grad(out, [*leaves, *extra, *learn], g, allow_unused=True)
        results.append((out, grads))
    return results


@pytest.mark.parametrize("name", EVERY)
def test_blocks_of_every_map(name, blocks):
    (a, ga), (b, gb) = both(EVERY[name][0], (Q, K, V), {"is_causal": True})
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(ga, gb)


@pytest.mark.parametrize("option", OPTIONS)
def test_blocks_of_every_option(option, blocks):
    for mapping in (Entmax(1.5), Softmax()):
        (a, ga), (b, gb) = both(mapping, (Q, K, V), OPTIONS[option][0])
        torch.testing.assert_close(a, b)
        for one, other in zip(ga, gb):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "option", ["plain", "alibi", "alibi of batches", "sink", "softcap", "scalable", "window left", "offsets"]
)
def test_blocks_of_grouped_queries(option, blocks):
    (a, ga), (b, gb) = both(Sparsemax(), (Q, K[:, :2], V[:, :2]), OPTIONS[option][0], groups=True)
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(ga, gb)


def test_blocks_of_broadcast_arrays(blocks):
    """One batch of keys for two of queries, one head of values for four, a mask for each batch, no heads at all."""
    (a, ga), (b, gb) = both(Entmax(1.5), (Q, K[:1], V[:, :1]), {"mask": KEEP})
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(ga, gb)
    (a, ga), (b, gb) = both(Entmax(1.5), (Q[0, 0], K[0, 0], V[0, 0]), {"bias": BIAS[0]})
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(ga, gb)


@pytest.mark.parametrize("shape", [(4, 1, 1), (), (2, 4, 5, 1)])
def test_blocks_of_a_learned_alpha(shape, blocks):
    alpha = torch.linspace(1.1, 2.4, math.prod(shape), dtype=torch.float64).reshape(shape).requires_grad_()
    (a, ga), (b, gb) = both(Entmax(alpha), (Q, K, V), {"window": (3, 1)}, learn=[alpha])
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(ga, gb)


@pytest.mark.parametrize("name", ["sparsemax", "entmax1.5", "entmax3", "budget", "normmax", "topk"])
def test_sparse_blocks(name, monkeypatch):
    """Rows long enough for the non-zeros to be kept: the output and all gradients are sums over them."""
    monkeypatch.setattr(torch_blockwise, "_BLOCK", 3 * 300 * 128)
    seen = []
    inner = torch_blockwise._sparse_backward
    monkeypatch.setattr(torch_blockwise, "_sparse_backward", lambda *a: (seen.append(1), inner(*a)))
    g = np.random.default_rng(1)
    arrays = [g.normal(size=s) * 2 for s in ((2, 4, 150, 8), (2, 2, 300, 8), (2, 2, 300, 5))]
    for options in ({}, {"is_causal": True, "offset": 150}, {"window": (280, 280)}):
        (a, ga), (b, gb) = both(EVERY[name][0], arrays, options, groups=True)
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(ga, gb)
    assert seen or name in ("normmax", "budget")


# name -> (mapping of an array, the first and the last number of that array)
LEARNED = {
    "entmax": (Entmax, 1.6, 2.6), "near softmax": (Entmax, 1.0, 1.01), "normmax": (NormMax, 1.5, 4.0), "budget": (Budget, 1.2, 3.5),
    "linear budget": (lambda k: Budget(k, shape="linear"), 1.2, 3.5),
}  # fmt: skip


@pytest.mark.parametrize("name", ["entmax", "normmax", "linear budget"])
@pytest.mark.parametrize("shape", [(), (4, 1, 1), (2, 1, 1, 1), (1, 4, 150, 1)])
def test_sparse_blocks_of_a_learned_parameter(name, shape, monkeypatch):
    """The derivative by the parameter is a sum over the non-zeros, too, with the others and alone."""
    monkeypatch.setattr(torch_blockwise, "_BLOCK", 3 * 300 * 128)
    seen = []
    inner = torch_blockwise._sparse_backward
    monkeypatch.setattr(torch_blockwise, "_sparse_backward", lambda *a: (seen.append(1), inner(*a)))
    g = np.random.default_rng(1)
    arrays = [g.normal(size=s) * 2 for s in ((2, 4, 150, 8), (2, 2, 300, 8), (2, 2, 300, 5))]
    kind, low, high = LEARNED[name]
    parameter = torch.linspace(low, high, math.prod(shape), dtype=torch.float64).reshape(shape).requires_grad_()
    for options in ({}, {"is_causal": True, "offset": 150}, {"bias": g.normal(size=(1, 4, 1, 300))}):
        (a, ga), (b, gb) = both(kind(parameter), arrays, options, groups=True, learn=[parameter])
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(ga, gb)
    assert seen or name == "normmax"
    q, k, v = (torch.tensor(a) for a in arrays)
    run = functools.partial(A.attention, q, k, v, kind(parameter), enable_gqa=True)
    found = [
        torch.autograd.grad(run(implementation=i).square().sum(), parameter)[0] for i in ("blockwise", "reference")
    ]
    torch.testing.assert_close(*found)


# name -> options of attention, beside which the derivative by a parameter must hold
BESIDE = {
    "plain": {}, "causal": {"is_causal": True, "offset": S - L}, "mask": {"mask": KEEP}, "bias": {"bias": BIAS}, "sink": {"sink": SINK},
    "softcap": {"softcap": 2.0}, "window": {"window": (3, 2), "offset": 1}, "dropout": {"dropout_p": 0.3, "generator": 5},
    "queries that share keys": {"enable_gqa": True},
}  # fmt: skip


@pytest.mark.parametrize("option", BESIDE)
@pytest.mark.parametrize("implementation", ["blockwise", "reference"])
def test_gradient_by_a_parameter(option, implementation, blocks):
    """Central differences, for a number of all heads and for one of each head."""
    q, k, v = tensors(Q, K[:, :2], V[:, :2]) if "share" in option else tensors(Q, K, V)
    options = given(BESIDE[option], torch.tensor)
    for shape in ((), (4, 1, 1)):
        alpha = torch.linspace(1.3, 1.9, math.prod(shape), dtype=torch.float64).reshape(shape).requires_grad_()
        f = lambda a: A.attention(q, k, v, Entmax(a), implementation=implementation, **options)  # noqa: E731
        assert torch.autograd.gradcheck(f, (alpha,), fast_mode=True)


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("implementation", ["blockwise", "reference"])
def test_gradients_by_q_k_v_and_a_parameter(name, implementation, blocks):
    kind, low, high = LEARNED[name]
    leaves = [torch.tensor(a[:1, :2, :4], requires_grad=True) for a in (Q, K, V)]
    parameter = torch.linspace(low + 0.005, high, 2, dtype=torch.float64).reshape(2, 1, 1).requires_grad_()
    f = lambda q, k, v, a: A.attention(q, k, v, kind(a), implementation=implementation)  # noqa: E731
    assert torch.autograd.gradcheck(f, (*leaves, parameter), fast_mode=True)


@pytest.mark.parametrize("implementation", ["blockwise", "reference"])
def test_second_derivatives_by_a_parameter(implementation, blocks):
    q, k, v = (torch.tensor(a[:1, :2, :3], requires_grad=True) for a in (Q, K, V))
    alpha = torch.tensor([1.3, 1.8], dtype=torch.float64).reshape(2, 1, 1).requires_grad_()
    f = lambda q, v, a: A.attention(q, k, v, Entmax(a), is_causal=True, implementation=implementation)  # noqa: E731
    assert torch.autograd.gradgradcheck(f, (q, v, alpha), fast_mode=True)


def test_second_derivatives_of_blocks(blocks):
    leaves = [torch.tensor(a[:1, :1, :3], requires_grad=True) for a in (Q, K, V)]
    f = lambda *a: A.attention(*a, Entmax(1.5), is_causal=True, implementation="blockwise")  # noqa: E731
    assert torch.autograd.gradgradcheck(f, leaves)


@pytest.mark.thin(3)
@pytest.mark.parametrize("implementation", ["sdpa", "linear", "blockwise", "reference"])
@pytest.mark.parametrize("vmap", [False, True])
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch.vmap, for linear attention
def test_a_batch_of_gradients(implementation, vmap, blocks):
    """Rows of a Jacobian in one backward pass, by `is_grads_batched` and by torch.vmap around it."""
    q, k, v = tensors(Q, K, V)
    alpha, sink = (
        torch.linspace(1.2, 1.9, H).double().reshape(H, 1, 1).requires_grad_(),
        torch.ones(H).double().requires_grad_(),
    )
    leaves, mapping, options = (
        [q, k, v],
        {"sdpa": Softmax(), "linear": Taylor(2)}.get(implementation, Entmax(alpha)),
        {},
    )
    if isinstance(mapping, Entmax):
        leaves, options = [*leaves, alpha, sink], {"sink": sink, "softcap": 3.0}
    out = A.attention(q, k, v, mapping, is_causal=True, implementation=implementation, **options)
    g = torch.randn(3, *out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(0))
    each = [torch.autograd.grad(out, leaves, one, retain_graph=True) for one in g]
    if vmap:
        found = torch.vmap(lambda one: torch.autograd.grad(out, leaves, one, retain_graph=True))(g)
    else:
        found = torch.autograd.grad(out, leaves, g, is_grads_batched=True)
    torch.testing.assert_close(found, tuple(torch.stack(rows) for rows in zip(*each)))
    if implementation == "blockwise":
        out = A.attention(q, k, v, mapping, dropout_p=0.5, generator=1, implementation=implementation)
        with pytest.raises(RuntimeError, match="no batch of gradients through dropout; ask for 'reference'"):
            torch.autograd.grad(out, leaves[:3], torch.stack([out, out]), is_grads_batched=True)


def test_half_precision_blocks():
    q, k, v = (torch.tensor(a).bfloat16().requires_grad_() for a in (Q, K, V))
    a, b = (A.attention(q, k, v, Sparsemax(), implementation=i) for i in ("blockwise", "reference"))
    assert a.dtype == torch.bfloat16
    torch.testing.assert_close(a, b)
    ga, gb = (torch.autograd.grad(x.float().pow(2).sum(), (q, k, v)) for x in (a, b))
    torch.testing.assert_close(ga, gb)


@pytest.mark.parametrize("implementation", ["blockwise", "reference"])
def test_dropout(implementation, blocks):
    """The same seed drops the same, backward drops what forward dropped, and the mean is the output."""
    q, k, v = tensors(Q, K, V)
    f = lambda seed, p=0.4: A.attention(q, k, v, Softmax(), dropout_p=p, generator=seed, implementation=implementation)  # noqa: E731
    torch.testing.assert_close(f(3), f(3))
    assert (f(3) != f(4)).any()
    eye = torch.eye(S, dtype=torch.float64).expand(B, H, S, S).clone().requires_grad_()
    p = A.attention(q, k, eye, Softmax(), dropout_p=0.4, generator=3, implementation=implementation)
    assert 0.2 < float((p == 0).double().mean()) < 0.6
    torch.testing.assert_close(f(3), p @ v)
    torch.testing.assert_close(torch.autograd.grad(f(3).sum(), v)[0], p.sum(-2)[..., None].expand(v.shape))
    with torch.no_grad():
        mean = torch.stack([f(s) for s in range(300)]).mean(0)
        torch.testing.assert_close(mean, A.attention(q, k, v), atol=0.25, rtol=0)
        torch.manual_seed(0)
        a = A.attention(q, k, v, Sparsemax(), dropout_p=0.5, implementation=implementation)
        torch.manual_seed(0)
        torch.testing.assert_close(A.attention(q, k, v, Sparsemax(), dropout_p=0.5, implementation=implementation), a)


@pytest.mark.parametrize("option", OPTIONS)
def test_softmax_goes_to_torch_where_it_can(option, monkeypatch):
    called = []
    inner = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **o: (called.append(1), inner(*a, **o))[1]
    )
    q, k, v = tensors(Q, K, V)
    own = given(OPTIONS[option][0], lambda a: torch.tensor(a))
    out = A.attention(q, k, v, **own)
    refused = {
        "offsets",
        "both lengths",
        "alibi",
        "alibi of batches",
        "softcap",
        "sink",
        "sink, causal, mask",
        "scalable",
    }
    assert bool(called) == (option not in refused)
    torch.testing.assert_close(out, A.attention(q, k, v, implementation="reference", **own))
    got, want = (
        torch.autograd.grad(A.attention(q, k, v, implementation=i, **own).pow(2).sum(), (q, k, v)) for i in (None, "reference")
    )  # fmt: skip
    torch.testing.assert_close(got, want)


def test_use_reference_is_heard(monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", None)
    q, k, v = tensors(Q, K, V)
    with A.use("reference"):
        A.attention(q, k, v)
    with pytest.raises(TypeError):
        A.attention(q, k, v)


def test_large_calls_go_in_blocks_and_small_ones_do_not(monkeypatch):
    from anymax import kernels  # noqa: F401

    seen = []
    inner = torch_blockwise.attend
    monkeypatch.setattr(torch_blockwise, "attend", lambda *a: (seen.append(1), inner(*a))[1])
    q, k, v = tensors(Q, K, V)
    A.attention(q, k, v, Sparsemax())
    assert not seen
    monkeypatch.setattr(__import__("sys").modules["anymax._attention.implementations"], "_MATRIX", 100)
    A.attention(q, k, v, Sparsemax())
    assert seen
    seen.clear()
    A.attention(q, k, v, Sparsemax(), need_weights=True)
    A.attention(q, k, v, Sparsemax(), transform=lambda s: s * 2)
    assert not seen


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)  # torch's own, in forward mode
def test_vmap_and_forward_mode():
    q, k, v = (torch.tensor(a) for a in (Q, K, V))
    for mapping in (Softmax(), Entmax(1.5)):
        f = lambda q, mapping=mapping: A.attention(q, k[0], v[0], mapping, is_causal=True)  # noqa: E731
        torch.testing.assert_close(torch.func.vmap(f)(q), A.attention(q, k[:1], v[:1], mapping, is_causal=True))
        tangent = torch.ones_like(q[0])
        _, jvp = torch.func.jvp(f, (q[0],), (tangent,))
        step = (f(q[0] + 1e-6 * tangent) - f(q[0] - 1e-6 * tangent)) / 2e-6
        torch.testing.assert_close(jvp, step, atol=1e-6, rtol=1e-5)


def test_autocast_is_that_of_torch():
    q, k, v = (torch.tensor(a, dtype=torch.float32) for a in (Q, K, V))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        for implementation in ("sdpa", "blockwise", "reference"):
            out = A.attention(q, k.bfloat16(), v, implementation=implementation)
            assert out.dtype == want.dtype == torch.bfloat16
            torch.testing.assert_close(out, want, atol=2e-2, rtol=2e-2)


def test_memory_of_blocks_is_not_that_of_the_matrix():
    """Of 4096 x 4096 scores, 64 MB, no tensor of more than a block is ever made."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for one in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(one, torch.Tensor):
                    largest = max(largest, one.untyped_storage().nbytes())
            return out

    q, k, v = (torch.randn(1, 1, 4096, 8, requires_grad=True) for _ in range(3))
    with contextlib.ExitStack() as stack:
        stack.enter_context(Watch())
        out = A.attention(q, k, v, Sparsemax(), is_causal=True, implementation="reference")
        assert largest >= 4096 * 4096 * 4
        largest = 0
    call = torch.autograd.profiler.profile(profile_memory=True)
    with call:
        A.attention(q, k, v, Sparsemax(), is_causal=True).pow(2).sum().backward()
    assert max(e.cpu_memory_usage for e in call.function_events) < 24e6
    torch.testing.assert_close(A.attention(q, k, v, Sparsemax(), is_causal=True), out)


# -- errors ---------------------------------------------------------------------------------------------------------------------

t = torch.tensor
WRONG = {
    "implementation": (lambda: A.attention(Q, K, V, implementation="flash"), ValueError, "no implementation 'flash'; there are sdpa,"),
    "refused": (lambda: A.attention(Q, K, V, Sparsemax(), implementation="sdpa"), ValueError, "torch has attention with softmax"),
    "blocks of numpy": (lambda: A.attention(Q, K, V, implementation="blockwise"), ValueError, "it takes torch tensors"),
    "blocks, weights": (
        lambda: A.attention(t(Q), t(K), t(V), implementation="blockwise", need_weights=True), ValueError, "the matrix that it never has"),
    "linear": (lambda: A.attention(Q, K, V, implementation="linear"), ValueError, "only Taylor softmax of order 2"),
    "linear mask": (lambda: A.attention(Q, K, V, Taylor(), mask=KEEP, implementation="linear"), ValueError, r"scores q k\^T alone"),
    "mask dtype": (lambda: A.attention(Q, K, V, mask=np.ones((L, S), int)), TypeError, "mask must be boolean .* got int64"),
    "mask shape": (lambda: A.attention(Q, K, V, mask=np.ones((3, L, S), bool)), ValueError, "mask of shape .* does not broadcast"),
    "bias shape": (lambda: A.attention(Q, K, V, bias=np.ones((L, 1, S))), ValueError, "bias of shape"),
    "alpha shape": (lambda: A.attention(Q, K, V, Entmax(np.ones(3) * 1.5)), ValueError, "entmax: alpha of shape"),
    "heads": (lambda: A.attention(Q, K[:, :2], V[:, :2]), ValueError, "say enable_gqa=True"),
    "values": (lambda: A.attention(Q, K, V[:, :3]), ValueError, "v of shape"),
    "window": (lambda: A.attention(Q, K, V, window=(1, -2)), ValueError, "window must be"),
    "window float": (lambda: A.attention(Q, K, V, window=1.5), ValueError, "window must be"),
    "alibi": (lambda: A.attention(Q, K, V, alibi=np.ones(3)), ValueError, r"alibi must have one number for each head, shape \(4,\)"),
    "alibi of batches": (lambda: A.attention(Q, K, V, alibi=np.ones((3, 4))), ValueError, r"each head of each batch, shape \(2, 4\)"),
    "sink": (lambda: A.attention(Q, K, V, sink=np.ones((4, 2))), ValueError, "sink must have one number for each head"),
    "lengths": (lambda: A.attention(Q, K, V, lengths=np.ones(3, int)), ValueError, "lengths must have one number for each batch"),
    "lengths beyond": (lambda: A.attention(Q, K, V, lengths=[S + 1, 3]), ValueError, rf"lengths must be from 0 to {S}, .* 3 to {S + 1}"),
    "lengths below": (lambda: A.attention(t(Q), t(K), t(V), q_lengths=[-1, 3]), ValueError, f"q_lengths must be from 0 to {L}"),
    "lengths real": (lambda: A.attention(Q, K, V, lengths=np.ones(2)), TypeError, "lengths must be integers"),
    "offset": (lambda: A.attention(Q, K, V, offset=1.0), TypeError, "offset must be an integer"),
    "softcap": (lambda: A.attention(Q, K, V, softcap=-1.0), ValueError, "softcap must be a finite number above 0"),
    "scale": (lambda: A.attention(Q, K, V, scale="big"), TypeError, "scale must be a number"),
    "transform": (lambda: A.attention(Q, K, V, transform=3), TypeError, "transform must be a function"),
    "mix": (lambda: A.attention(Q, K, V, mix=PRIOR), TypeError, r"mix must be a pair \(prior, weight\), got ndarray$"),
    "mix shape": (lambda: A.attention(Q, K, V, mix=(PRIOR.T, 0.5)), ValueError, "the prior of mix of shape"),
    "integers": (lambda: A.attention(*(a.astype(int) for a in (Q, K, V))), TypeError, "must be real floating-point"),
    "device": (lambda: A.attention(t(Q), t(K), t(V).to("meta")), ValueError, "on one device, got cpu, cpu and meta"),
    "mask device": (lambda: A.attention(t(Q), t(K), t(V), bias=t(BIAS).to("meta")), ValueError, "bias is on meta"),
    "budget": (lambda: A.attention(Q, K, V, Budget(9)), ValueError, "9"),
    "generator": (lambda: A.attention(Q, K, V, dropout_p=0.1, generator="0"), TypeError, "generator: NumPy arrays need"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_errors(case):
    call, error, words = WRONG[case]
    with pytest.raises(error, match=words):
        call()


def test_a_refusal_is_a_sentence():
    """Every implementation but the last has something that it does not serve, and says so."""
    IMPLEMENTATIONS = importlib.import_module("anymax._attention.implementations").IMPLEMENTATIONS

    assert IMPLEMENTATIONS[-1].name == "reference"
    for one in IMPLEMENTATIONS[:-1]:
        with pytest.raises(ValueError, match=f"implementation '{one.name}' can't take this call: ."):
            A.attention(Q, K, V, Entmax(1.5), transform=lambda s: s, implementation=one.name)
    assert dataclasses.is_dataclass(T.scalable())


def refused(told):
    (row,) = told.rows
    op, chosen, refusals = row
    assert op == "attention"
    return chosen, dict(refusals)


def test_explain_attention_names_who_serves():
    q, k, v = t(Q), t(K), t(V)
    assert refused(A.explain_attention(q, k, v)) == ("sdpa", {})
    chosen, why = refused(A.explain_attention(q, k, v, Taylor(2), is_causal=True))
    assert chosen == "reference"
    assert why["sdpa"] == "torch has attention with softmax, not with taylor"
    assert why["blockwise"] == "so few scores are faster as one matrix"
    assert "name it to use it" in why["linear"]
    chosen, why = refused(A.explain_attention(q, k, v, implementation="reference", mix=(t(PRIOR), 0.5)))
    assert (chosen, why["sdpa"]) == ("reference", "'reference' was asked for")
    long = torch.zeros(1, 1024, 4)
    assert refused(A.explain_attention(long, long, long, Sparsemax()))[0] == "blockwise"
    with A.use("reference"):
        chosen, why = refused(A.explain_attention(long, long, long))
        assert (chosen, why["sdpa"]) == ("reference", "'reference' was asked for")
    assert refused(A.explain_attention(Q, K, V))[1]["sdpa"] == "it takes torch tensors"


@pytest.mark.parametrize(
    "options", [{}, {"need_weights": True}, {"softcap": 2.0}, {"is_causal": True, "dropout_p": 0.5}]
)
@pytest.mark.parametrize("mapping", [Softmax(), Sparsemax()])
def test_explain_attention_is_true(mapping, options, monkeypatch):
    """The implementation that it names is the one that runs."""
    module = importlib.import_module("anymax._attention.implementations")
    ran = []

    def spy(one):
        return one._replace(run=lambda call: ran.append(one.name) or one.run(call))

    monkeypatch.setattr(module, "IMPLEMENTATIONS", tuple(spy(one) for one in module.IMPLEMENTATIONS))
    for n in (4, 1024):
        q = torch.randn(2, 1, n, 4, generator=torch.Generator().manual_seed(0))
        A.attention(q, q, q, mapping, **options)
        assert refused(A.explain_attention(q, q, q, mapping, **options))[0] == ran.pop()


def test_explain_attention_refuses_what_attention_refuses():
    with pytest.raises(ValueError, match="can't take this call: torch has attention with softmax"):
        A.explain_attention(t(Q), t(K), t(V), Sparsemax(), implementation="sdpa")
    with pytest.raises(ValueError, match="there is no map 'softmin'"):
        A.explain_attention(Q, K, V, "softmin")
    with pytest.raises(TypeError, match="casual"):
        A.explain_attention(Q, K, V, casual=True)
