"""The edges of attention: no queries, keys or heads, infinities and NaN, mistakes; by torch's own attention or by the definition."""

from __future__ import annotations

import math
import sys
import warnings

import numpy as np
import pytest
from engine_state import in_a_child
from kinds import KINDS, back, every_kind, jax_in_the_whole_battery

import anymax as A
from anymax import Budget, Entmax, Softmax, Sparsemax, SparseSoftmax, Taylor
from anymax import transforms as T

torch = pytest.importorskip("torch")
sdpa = torch.nn.functional.scaled_dot_product_attention

MAPS = {
    "softmax": Softmax(), "sparsemax": Sparsemax(), "entmax": Entmax(1.5), "budget": Budget(2), "taylor": Taylor(2),
    "sparse_softmax": SparseSoftmax(k=2),
}  # fmt: skip
every_map = pytest.mark.parametrize("name", MAPS)
SERVERS = ("sdpa", "blockwise", "linear", "reference")


def servers(*arrays, **options):
    """The implementations that serve a call."""
    out = [None]
    for name in SERVERS:
        try:
            A.explain_attention(*arrays, implementation=name, **options)
            out.append(name)
        except ValueError as error:
            if "can't take this call" not in str(error):
                raise
    return out


# -- nothing there ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(0, 4), (3, 0), (0, 0), (1, 1)])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (0, 3), (2, 0)], ids=str)
@every_map
@pytest.mark.whole(lambda name: name not in ("softmax", "entmax", "budget"))
def test_no_queries_no_keys_no_heads(name, lead, lengths):
    """As torch: as many outputs as queries, and zeros without a key."""
    mapping, (rows, keys) = MAPS[name], lengths
    if keys == 1 and name == "budget":
        mapping = Budget(1)
    q, k, v = (
        torch.randn(*lead, *s, dtype=torch.float64, requires_grad=True) for s in ((rows, 5), (keys, 5), (keys, 2))
    )
    for implementation in servers(q, k, v, mapping=mapping):
        out = A.attention(q, k, v, mapping, implementation=implementation)
        assert out.shape == (*lead, rows, 2)
        torch.testing.assert_close(out, sdpa(q, k, v))
        grads = torch.autograd.grad(out.sum(), (q, k, v), allow_unused=True)
        assert all(g is None or not g.any() for g in grads) or keys == 1
    out, p = A.attention(q, k, v, mapping, need_weights=True, sink=torch.zeros(lead[-1:]), is_causal=True)
    assert (out.shape, p.shape) == ((*lead, rows, 2), (*lead, rows, keys))
    assert keys or not out.any()
    told = A.explain_attention(q, k, v, mapping, implementation="reference")
    if 0 in (*lead, *lengths):
        assert A.explain_attention(q, k, v, mapping).rows[0][1] == "reference"
        assert all(reason for _, reason in told.rows[0][2])


@every_kind
def test_no_keys_on_any_array(kind):
    make = KINDS[kind]
    q, k = make(np.ones((2, 3, 4))), make(np.ones((2, 0, 4)))
    out = back(A.attention(q, k, k, Entmax(1.5), alibi=True, window=1, softcap=2.0))
    assert out.shape == (2, 3, 4)
    assert not out.any()
    assert back(A.attention(make(np.ones((2, 0, 4))), q, q, Entmax(1.5))).shape == (2, 0, 4)


@every_map
def test_no_features(name):
    """All scores are equal: every key has the same weight, but where a map chooses some."""
    q, k, v = torch.randn(3, 0), torch.randn(4, 0), torch.randn(4, 2)
    want = v[:2].mean(0) if name == "sparse_softmax" else v.mean(0) * (2 if name == "budget" else 1)
    torch.testing.assert_close(A.attention(q, k, v, MAPS[name]), want.expand(3, 2))


# -- infinities -----------------------------------------------------------------------------------------------------------------------


@every_kind
@every_map
def test_minus_infinity_hides_from_mix_too(name, kind):
    """A key that a mask of numbers or a bias hides has no weight, neither from the map nor from a prior."""
    if kind in ("jax", "strict") and name != "entmax":
        pytest.skip("numpy and torch share the formula")
    make = KINDS[kind]
    g = np.random.default_rng(0)
    q, k, v = (g.normal(size=(2, n, 4)) for n in (5, 7, 7))
    hidden = g.uniform(size=(5, 7)) < 0.5
    hidden[:, :3] = False
    hidden[2] = True
    prior = np.full((5, 7), 1 / 7)
    numbers = np.where(hidden, -np.inf, 0.0)
    want = None
    for given in ({"mask": ~hidden}, {"mask": numbers}, {"bias": numbers}, {"mask": numbers, "bias": numbers}):
        made = {name: make(a) for name, a in given.items()}
        out, p = A.attention(*map(make, (q, k, v)), MAPS[name], mix=(make(prior), 0.25), need_weights=True, **made)
        assert not back(p)[:, hidden].any()
        want = back(out) if want is None else want
        np.testing.assert_allclose(back(out), want, atol=1e-6)
        assert not back(out)[:, 2].any()


@every_map
def test_nan_stays_in_its_row(name):
    q, k, v = (torch.randn(2, 3, n, 4, dtype=torch.float64, requires_grad=True) for n in (6, 8, 8))
    broken = q.detach().clone()
    broken[0, 1, 2] = math.nan
    broken.requires_grad_()
    others = torch.ones(2, 3, 6, dtype=torch.bool)
    others[0, 1, 2] = False
    for implementation in servers(q, k, v, mapping=MAPS[name]):
        want = A.attention(q, k, v, MAPS[name], implementation=implementation)
        got = A.attention(broken, k, v, MAPS[name], implementation=implementation)
        assert got[~others].isnan().all()
        torch.testing.assert_close(got[others], want[others])
        (g,) = torch.autograd.grad(got[others].sum(), broken)
        (wanted,) = torch.autograd.grad(want[others].sum(), q)
        torch.testing.assert_close(g[others], wanted[others])


def test_dropout_of_numpy():
    q, k, v = np.random.default_rng(0).normal(size=(3, 6, 5))
    run = lambda seed: A.attention(q, k, v, dropout_p=0.3, generator=seed)  # noqa: E731
    np.testing.assert_array_equal(run(0), run(0))
    assert (run(0) != run(1)).any()
    np.testing.assert_allclose(np.mean([run(seed) for seed in range(500)], 0), A.attention(q, k, v), atol=0.2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_bias_in_floats_is_not_rounded_to_half_precision(dtype):
    """Numbers some thousands from 0, as biases of positions may be, are units apart there."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 9, 8, generator=g).to(dtype).requires_grad_() for _ in range(3))
    bias = (-3.3 * torch.arange(9.0) - 2000.7 + torch.zeros(9, 1)).requires_grad_()
    want = A.attention(q.double(), k.double(), v.double(), bias=bias.double(), implementation="reference")
    for options in ({"bias": bias}, {"mask": bias}, {"bias": bias, "is_causal": True, "offset": 8}):
        out = A.attention(q, k, v, **options, implementation="sdpa")
        torch.testing.assert_close(out.double(), want, atol=0.02, rtol=0)
        (found,) = torch.autograd.grad(out.float().square().sum(), bias)
        torch.testing.assert_close(
            found, torch.autograd.grad(want.square().sum(), bias, retain_graph=True)[0], atol=0.05, rtol=0.05
        )


@pytest.mark.parametrize("lengths", [(3, 5), (5, 3), (4, 4)], ids=str)
@pytest.mark.filterwarnings("ignore:Lower right causal bias")  # of torch, for more queries than keys
def test_torchs_causal_biases(lengths):
    """Tensors that hold nothing: what they mean is in their sizes. Two heads, to which what they hold would broadcast."""
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    rows, keys = lengths
    q, k, v = (torch.randn(1, 2, n, 4, dtype=torch.float64) for n in (rows, keys, keys))
    for make, first in ((causal_lower_right, keys - rows), (causal_upper_left, 0)):
        keep = torch.ones(rows, keys, dtype=torch.bool).tril(first)
        for mapping in (Softmax(), Entmax(1.5)):
            for implementation in servers(q, k, v, mapping=mapping, mask=make(rows, keys)):
                out = A.attention(q, k, v, mapping, make(rows, keys), implementation=implementation)
                torch.testing.assert_close(out, A.attention(q, k, v, mapping, keep, implementation="reference"))
            for options in ({"window": 1, "offset": 1}, {"alibi": True}, {"is_causal": True, "offset": -1}):
                out = A.attention(q, k, v, mapping, make(rows, keys), **options)
                torch.testing.assert_close(out, A.attention(q, k, v, mapping, keep, **options))
    with pytest.raises(
        ValueError, match=rf"a causal bias for 7 queries and {keys} keys, and there are {rows} and {keys}"
    ):
        A.attention(q, k, v, mask=causal_upper_left(7, keys))


def test_a_learned_number_of_a_transform_is_shown_without_a_warning():
    beta = torch.tensor(0.5, requires_grad=True)
    q = torch.randn(5, 4, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert repr(T.scalable(beta=beta)).startswith("scalable(beta=0.5")
        for implementation in ("blockwise", "reference"):
            out = A.attention(q, q, q, Sparsemax(), transform=T.scalable(beta=beta), implementation=implementation)
            assert torch.autograd.grad(out.square().sum(), beta)[0].isfinite()


@pytest.mark.whole
@pytest.mark.parametrize("options", [{"dropout_p": 0.5}, {"alibi": True}], ids=str)
def test_compile(options):
    """What needs something made at each call: random numbers, slopes."""
    torch._dynamo.reset()
    f = lambda v: A.attention(torch.ones(1, 2, 9, 4), torch.ones(1, 2, 9, 4), v, Sparsemax(), **options)  # noqa: E731
    eye = torch.eye(9).expand(1, 2, 9, 9)
    p = torch.compile(f, backend="aot_eager", fullgraph=True)(eye)
    if "alibi" in options:
        torch.testing.assert_close(p, f(eye))
    else:
        assert set(p.unique().tolist()) == {0.0, float(torch.tensor(1 / 9) / 0.5)}


@pytest.mark.whole
def test_compile_with_any_size():
    torch._dynamo.reset()
    f = lambda q, n: A.attention(q, q, q, Entmax(1.5), lengths=n, window=3, alibi=True, sink=torch.zeros(2))  # noqa: E731
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=True)
    for keys in (5, 9):
        q, n = torch.randn(2, 2, keys, 4), torch.tensor([keys - 2, keys])
        torch.testing.assert_close(compiled(q, n), f(q, n))


# -- what a caller may write ------------------------------------------------------------------------------------------------------------


PLAIN = [
    ("alibi", [0.5, 0.25, 0.125]),
    ("alibi", 0.5),
    ("sink", [0.0, 1.0, 2.0]),
    ("sink", 1.0),
    ("bias", 0.5),
    ("lengths", [3, 6]),
]


@jax_in_the_whole_battery
@every_kind
@pytest.mark.parametrize(("name", "value"), PLAIN, ids=str)
def test_numbers_and_lists_beside_arrays(name, value, kind):
    make, g = KINDS[kind], np.random.default_rng(0)
    q, k, v = (make(g.normal(size=(2, 3, n, 4))) for n in (5, 6, 6))
    got, want = (A.attention(q, k, v, Sparsemax(), **{name: each}) for each in (value, make(np.asarray(value))))
    np.testing.assert_array_equal(back(got), back(want))


MEMORY = """
import torch, anymax
torch.set_num_threads(1)

def kilobytes(word):
    return int(next(line for line in open("/proc/self/status") if line.startswith(word)).split()[1])

def attend(heads, n):
    q, k, v = (torch.randn(1, heads, n, 64, requires_grad=True) for _ in range(3))
    open("/proc/self/clear_refs", "w").write("5")
    before = kilobytes("VmRSS")
    out = anymax.attention(q, k, v, "sparsemax", is_causal=True, implementation="blockwise")
    return (kilobytes("VmHWM") - before) / 1024

attend(1, 512)
print(attend(1, 16384))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_blocks_that_grow_do_not_scatter_the_heap():
    """Causal blocks see more and more keys; with a buffer of its own for each the peak was 120 to 150 MB."""
    assert float(in_a_child(MEMORY)) < 90
