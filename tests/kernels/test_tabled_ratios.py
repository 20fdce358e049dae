"""Ratio maps without a kernel: u as a table in the C++ engine, against 40 digits, the reference in fp64 and central differences."""

from __future__ import annotations

import dataclasses

import mpmath as mp
import numpy as np
import pytest
from engine_state import instructions

import anymax as am
from anymax import kernels
from anymax.kernels import native, ratios, tabled, tables
from anymax.kernels.reference import ENGINE as plain

if isinstance(native.load(), str):
    pytest.skip(f"no compiled library: {native.load()}", allow_module_level=True)

ENGINE = tabled.ENGINE
EPS = 2.0**-23
FACTS = am.Facts(monotone=True, shift_invariant=False, sparse=False, has_potential=False)


@dataclasses.dataclass(frozen=True, eq=False)
class Softplus(am.RatioMap):
    """u = log(1 + exp(k x)) / k, less a factor of the row, as the contract allows."""

    k: float = 1.0

    name = "softplus"
    facts = FACTS

    def weights(self, x, keep, xp):
        size = 0.3 + xp.max(xp.abs(x), axis=-1, keepdims=True)
        e = xp.exp(-xp.abs(self.k * x))
        high = xp.where(x > 0, x, 0.0 * x)
        return (high + xp.log1p(e) / self.k) / size, xp.where(x > 0, 1.0 + 0.0 * x, e) / (1.0 + e) / size


def _positive(x):
    return np.maximum(x, 0.0)


# of numbers of mpmath, and of arrays with their derivatives; the scores at which they bend
SERVED = {
    "softplus": (lambda x: mp.log1p(mp.exp(x)), Softplus(), ()),
    "square": (lambda x: x * x, am.Ratio.square(), ()),
    "sigmoid": (lambda x: 1 / (1 + mp.exp(-x)), am.Ratio.sigmoid(), ()),
    "stablemax": (lambda x: x + 1 if x > 0 else 1 / (1 - x), am.Ratio.stablemax(), (0.0,)),
    "fourth power": (lambda x: x**4, am.Ratio(lambda x: x**4, lambda x: 4 * x**3), ()),
    "eighth power": (lambda x: x**8, am.Ratio(lambda x: x**8, lambda x: 8 * x**7), ()),
    "exp": (mp.exp, am.Ratio(np.exp, np.exp), ()),
    "squared relu": (lambda x: max(x, 0) ** 2, am.Ratio(lambda x: _positive(x) ** 2, lambda x: 2 * _positive(x)), ()),
    "absolute": (abs, am.Ratio(np.abs, np.sign), (0.0,)),
    "gauss": (lambda x: mp.exp(-x * x / 2), am.Ratio(lambda x: np.exp(-x * x / 2), lambda x: -x * np.exp(-x * x / 2)), ()),
    "bent at 6": (
        lambda x: min(max(x, 0), 6) + mp.mpf("0.5"),
        am.Ratio(lambda x: np.clip(x, 0.0, 6.0) + 0.5, lambda x: 1.0 * ((x > 0) & (x < 6))),
        (0.0, 6.0),
    ),
    "wave": (lambda x: 2 + mp.sin(x), am.Ratio(lambda x: 2 + np.sin(x), np.cos), ()),
}  # fmt: skip
served = pytest.mark.parametrize("name", SERVED)


def scores(n, rows=6, sigma=2.0, seed=0, dtype=np.float32):
    return (np.random.default_rng([seed, n]).normal(size=(rows, n)) * sigma).astype(dtype)


def by_tables(mapping, x):
    with am.use("tabled"):
        return am.apply(mapping, x)


def left(mapping, x):
    """Which rows the engine leaves to the reference."""
    w, out = tables.tables_of(mapping), np.empty(len(x), bool)
    assert isinstance(w, ratios.Weights), w
    assert native.engine_for(x).ratio(w.cells, w.slopes, w.numbers, x, None, np.empty_like(x), out)
    return out


# -- p and its gradient ------------------------------------------------------------------------------------------------


@served
@pytest.mark.parametrize("n", [1, 2, 7, 40])
def test_p_to_forty_digits(name, n):
    u, mapping, _ = SERVED[name]
    x = scores(n, rows=3)
    p = by_tables(mapping, x)
    assert not left(mapping, x).any()
    with mp.workdps(40):
        for row, got in zip(x, p, strict=True):
            weights = [mp.mpf(1) * u(mp.mpf(float(v))) for v in row]
            whole = mp.fsum(weights) or 1
            want = np.array([float(w / whole) for w in weights])
            np.testing.assert_allclose(got, want, rtol=1e-6 if name != "gauss" else 4e-6)


@served
@pytest.mark.parametrize("sigma", [0.01, 1.0, 2.5])
@pytest.mark.parametrize("n", [3, 16, 33, 301, 5003])
def test_p_is_the_references(name, n, sigma):
    mapping, x = SERVED[name][1], scores(n, sigma=sigma)
    with am.use("reference"):
        want = am.apply(mapping, x.astype(np.float64))
    # of the gaussian the rounding of x alone has 30 eps at 10 deviations
    np.testing.assert_allclose(by_tables(mapping, x), want, rtol=1e-6 if name != "gauss" else 4e-6, atol=1e-33)


@served
@pytest.mark.parametrize("n", [4, 37])
def test_the_gradient_by_central_differences(name, n):
    _, mapping, bends = SERVED[name]
    x = scores(n, rows=4)
    for bend in bends:
        x[np.abs(x - bend) < 1e-3] += 0.01
    p, g, h = by_tables(mapping, x), scores(n, rows=4, seed=1), 1e-6
    got, wide = ENGINE.vjp(mapping, x, p, g), x.astype(np.float64)
    want = np.zeros_like(wide)
    for i in range(n):
        step = h * np.eye(n)[i]
        rise = plain.forward(mapping, wide + step) - plain.forward(mapping, wide - step)
        want[:, i] = (rise * g).sum(-1) / (2 * h)
    np.testing.assert_allclose(got, want, atol=2e-6 * np.abs(g).max() * np.abs(want).max())
    exact = plain.vjp(mapping, wide, plain.forward(mapping, wide), g.astype(np.float64))
    np.testing.assert_allclose(got, exact, atol=8 * EPS * np.abs(g).max() * np.abs(exact).max())


@pytest.mark.parametrize("name", ["softplus", "square"])
@pytest.mark.parametrize("isa", native.load().isas())
def test_every_instruction_set(name, isa):
    mapping, x, g = SERVED[name][1], scores(301), scores(301, seed=1)
    with instructions(isa):
        p = by_tables(mapping, x)
        np.testing.assert_allclose(p, plain.forward(mapping, x.astype(np.float64)), rtol=1e-6)
        want = plain.vjp(mapping, x, p, g)
        np.testing.assert_allclose(ENGINE.vjp(mapping, x, p, g), want, atol=8 * EPS * np.abs(want).max())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_and_autograd(dtype):
    torch = pytest.importorskip("torch")
    mapping, x = Softplus(0.7), torch.tensor(scores(300)).to(getattr(torch, dtype)).requires_grad_()
    assert kernels.choose("forward", mapping, torch.zeros(64, 300)) is ENGINE
    with am.use("tabled"):
        p = am.apply(mapping, x)
        (got,) = torch.autograd.grad(p, x, torch.ones_like(p) * torch.arange(300))
    assert p.dtype == got.dtype == x.dtype
    wide = x.detach().double().requires_grad_()
    with am.use("reference"):
        want = am.apply(mapping, wide)
        (slope,) = torch.autograd.grad(want, wide, torch.ones_like(want) * torch.arange(300))
    eps = torch.finfo(x.dtype).eps
    assert float(((p.double() - want) / want).detach().abs().max()) <= eps
    assert float((got.double() - slope).abs().max()) <= 4 * eps * float(slope.abs().max())


# -- scores beyond the cells, masked and strange ones ------------------------------------------------------------------


@served
def test_strange_scores(name):
    mapping, x = SERVED[name][1], scores(50, rows=9)
    x[0, ::3] = -np.inf
    x[1] = -np.inf
    x[2, 7], x[3, 7] = np.nan, np.inf
    x[4, :9], x[4, 9] = 0.0, -0.0
    x[5, 4:] = -1e9  # as people mask
    x[6, 3] = 300.0  # beyond the cells
    x[7, 3] = 1e-30  # so near to 0 that cells of octaves have none
    x[8] = 6.0
    g = scores(50, rows=9, seed=1)
    with np.errstate(all="ignore"):
        p, want = by_tables(mapping, x), plain.forward(mapping, x)
        np.testing.assert_allclose(p, want, rtol=3e-6, atol=1e-37)
        assert (p[0, ::3] == 0).all()
        assert not p[1].any()
        assert np.isnan(p[2]).all()
        assert np.isnan(p[3]).all()
        got, slope = ENGINE.vjp(mapping, x, p, g), plain.vjp(mapping, x, want, g)
    size = np.nanmax(np.abs(slope), -1, keepdims=True, initial=1e-30, where=np.isfinite(slope))
    np.testing.assert_allclose(got / size, slope / size, atol=16 * EPS * np.abs(g).max())
    found = left(mapping, x)
    assert found[[2, 3]].all()
    assert not found[[0, 1, 4, 8]].any()
    gone = ratios.WeightNumbers(*tables.tables_of(mapping).numbers).lost != -np.inf
    assert found[5] != gone, "where u is 0 far below, no row is left for a mask of a large number"


def test_a_row_in_which_every_u_is_zero():
    mapping, x = SERVED["squared relu"][1], -np.abs(scores(40)) - 1.0
    assert not by_tables(mapping, x).any()
    assert not ENGINE.vjp(mapping, x, np.zeros_like(x), scores(40, seed=1)).any()


def test_rows_beyond_the_cells_are_the_references():
    mapping, x = Softplus(), scores(33, rows=200)
    x[::3, 5] = -300.0
    x[1::3, 5] = 500.0
    want, p = plain.forward(mapping, x), by_tables(mapping, x)
    assert left(mapping, x).tolist() == [i % 3 != 2 for i in range(200)]
    np.testing.assert_allclose(p, want, rtol=1e-6)
    torch = pytest.importorskip("torch")
    np.testing.assert_allclose(by_tables(mapping, torch.tensor(x)), want, rtol=1e-6)


# -- which maps --------------------------------------------------------------------------------------------------------


def _own(**space):
    kind = type("Own", (am.RatioMap,), {"name": "own", "facts": FACTS, "weights": Softplus.weights, "k": 1.0, **space})
    return dataclasses.dataclass(frozen=True, eq=False)(kind)()


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        (am.Ratio(lambda x: np.exp(x - x.mean(-1, keepdims=True)) + 0.1, np.exp), "looks at more than one score"),
        (am.Ratio(lambda x: 1.0 + x.argsort(-1).argsort(-1), np.zeros_like), "looks at more than one score"),
        (am.Ratio(lambda x: np.exp(x) * (1 + (x.shape[-1] > 500) * (x > 0)), np.exp), "looks at more than one score"),
        (am.Ratio(lambda x: np.exp(x) + x[::-1] ** 2, np.exp), "looks at more than one score"),
        (am.Ratio(np.exp, lambda x: np.exp(x) * np.arange(x.shape[-1])), "looks at more than one score"),
        (am.Ratio(lambda x: np.abs(x - 0.3) + 0.1, lambda x: np.sign(x - 0.3)), "misses it near"),
        (am.Ratio(lambda x: np.where(x > 1, 2.0, 1.0) * np.exp(x + 0.01), np.exp), "misses it near"),
        (am.Ratio(lambda x: x**3, lambda x: 3 * x * x), "ValueError: Ratio: u returned a negative value"),
        (am.Ratio(lambda x: 0.0 * x, lambda x: 0.0 * x), "its u is 0 or infinite at"),
        (am.Ratio(lambda x: np.where(np.abs(x) < 2, 1 + x * x, 1e40), lambda x: 2 * x), "ends near 2"),
        (_own(forward=lambda self, x, xp: x), "has its own forward"),
        (_own(vjp=lambda self, x, p, g, xp: g), "has its own vjp"),
        (am.Sigsoftmax(), "maps without a kernel"),
        (Softplus(np.ones((6, 1))), "parameters are numbers, and k is not"),
    ],
    ids=range(14),
)
def test_maps_without_a_table(mapping, words):
    x = scores(900, rows=300)
    assert words in ENGINE.refuse("forward", mapping, x)
    assert kernels.choose("forward", mapping, x) is not ENGINE


def test_functions_get_a_table_in_a_large_call():
    """People write them in the call itself, each time a new one."""
    mapping, x = am.Ratio(lambda x: np.cosh(x), np.sinh), scores(512, rows=tabled.FIRST // 512)
    assert f"call of at least {tabled.FIRST} scores" in ENGINE.refuse("forward", mapping, x[:-1])
    assert ENGINE.refuse("forward", mapping, x) is None
    assert ENGINE.refuse("forward", mapping, x[:16]) is None
    again = dataclasses.replace(mapping)
    assert ENGINE.refuse("forward", again, x) is None
    assert tables.tables_of(again) is tables.tables_of(mapping)


def test_a_function_that_reads_what_changes_has_no_table_that_stands():
    k = np.array(1.0)
    mapping, x = am.Ratio(lambda x: np.exp(k * x), lambda x: k * np.exp(k * x)), scores(40)
    want = [plain.forward(mapping, x)]
    np.testing.assert_allclose(by_tables(mapping, x), want[0], rtol=1e-6)
    k[...] = 0.5
    with am.use("tabled"), pytest.raises(RuntimeError, match="no longer what it was"):
        am.apply(mapping, x)
    np.testing.assert_array_equal(am.apply(mapping, x), plain.forward(mapping, x))
    with am.use("tabled"), pytest.raises(RuntimeError, match="no longer what it was"):
        am.apply(dataclasses.replace(mapping), x)


def test_a_function_of_tensors():
    torch = pytest.importorskip("torch")
    mapping = am.Ratio(torch.nn.functional.softplus, torch.sigmoid)
    x = torch.tensor(scores(64))
    with am.use("tabled"):
        p = am.apply(mapping, x)
    np.testing.assert_allclose(p, plain.forward(Softplus(), x.double().numpy()), rtol=1e-6)


def test_explain_says_so():
    text = str(am.explain(Softplus(1.5), np.zeros((64, 512), np.float32)))
    assert "  p                     tabled: " in text
    assert " cells, for scores from -" in text


@pytest.mark.parametrize("knee", [5.0, 9.0, 40.0])
def test_a_function_that_changes_far_from_0_has_no_old_table(knee):
    x = np.random.default_rng(0).normal(size=(512, 600)).astype("float32") * 4
    ends = [100.0]
    mapping = am.Ratio(lambda x: np.where(np.abs(x) < ends[0], 1.0 + x * x, 1.0 + ends[0] ** 2))
    before = am.apply(mapping, x)
    ends[0] = knee
    with am.use("reference"):
        want = am.apply(mapping, x.astype("float64"))
    np.testing.assert_allclose(am.apply(mapping, x), want, rtol=2e-6, atol=1e-9)
    assert (abs(before - want).max() > 1e-4) == (knee < 20.0)


def test_a_function_without_a_derivative_has_a_table_where_torch_records_nothing():
    torch = pytest.importorskip("torch")
    x = torch.randn(512, 600, generator=torch.Generator().manual_seed(0))
    factor = torch.tensor(0.5, requires_grad=True)
    plain, held = am.Ratio(lambda x: x.cosh()), am.Ratio(lambda x: 1.0 + factor * x * x)
    am.apply(plain, x)
    assert plain._tables is not None
    assert am.apply(held, x).requires_grad
    with torch.no_grad():
        assert not am.apply(held, x).requires_grad
    assert am.explain(plain, x).rows[0][1] == "tabled"
    assert am.explain(plain, x.requires_grad_()).rows[0][1] == "reference"
    with am.use("tabled"), pytest.raises(RuntimeError, match="no derivative of its own"):
        am.apply(plain, x)
