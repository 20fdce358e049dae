"""Maps without a kernel: the engine of tables, and the reference in blocks of rows, against 50 digits and the plain reference."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import mpmath as mp
import numpy as np
import oracles
import own_maps
import pytest
from engine_state import by_threads, instructions, threads
from own_maps import WITH_A_TABLE, WITHOUT_ONE, Caps, Exps, Powers, Sigmoids, Squares

import anymax as am
from anymax import kernels
from anymax._array import blocks
from anymax.kernels import native, tabled, tables
from anymax.kernels.reference import ENGINE as plain

if isinstance(native.load(), str):
    pytest.skip(f"no compiled library: {native.load()}", allow_module_level=True)

ENGINE = tabled.ENGINE
EPS = 2.0**-23
served = pytest.mark.parametrize("mapping", WITH_A_TABLE, ids=repr)
every = pytest.mark.parametrize("mapping", WITH_A_TABLE + WITHOUT_ONE, ids=repr)


def scores(n, rows=5, sigma=2.0, seed=0, dtype=np.float32):
    return (np.random.default_rng([seed, n]).normal(size=(rows, n)) * sigma).astype(dtype)


def reference(mapping, x):
    with am.use("reference"):
        return am.apply(mapping, np.asarray(x, np.float64))


def by_tables(mapping, x, *axis, **options):
    with am.use("tabled"):
        return am.apply(mapping, x, *axis, **options)


def near(p, want, ulps=4.0):
    """Within so many ulps of the largest probability of each row."""
    error = np.abs(np.asarray(p, np.float64) - want).max(-1)
    assert (error <= ulps * EPS * np.abs(want).max(-1)).all(), error / EPS / np.abs(want).max(-1)


def exactly(mapping, row):
    """`link(x - tau)` at 50 digits, by bisection on tau."""
    with mp.workdps(50):
        x = [mp.mpf(float(v)) for v in row]
        mass = mp.mpf(float(mapping.mass))
        if mapping.ceiling(row, np) is not None and mapping.ceiling(row, np) * len(x) <= mapping.mass:
            return np.full(len(x), mapping.ceiling(row, np))
        share = float(mapping.slope(np.array([mapping.mass / len(x)]), np)[0])
        low, high = share - max(x) - mp.mpf(1e-6), share - min(x) + mp.mpf(1e-6)
        if mapping.ceiling(row, np) is None:
            high = min(high, float(mapping.slope(np.array([mapping.mass]), np)[0]) - max(x))
        level = oracles.bisect(lambda t: mp.fsum(mapping.exact(v + t) for v in x) - mass, low, high, 400)
        return np.array([float(mapping.exact(v + level)) for v in x])


# -- p ------------------------------------------------------------------------------------------------------------------------------

ROWS = {
    "normal": lambda g, n: g.normal(size=n) * 2.0,
    "nearly flat": lambda g, n: g.normal(size=n) * 1e-3,
    "wide": lambda g, n: g.normal(size=n) * 30.0,
    "ties": lambda g, n: np.round(g.normal(size=n)),
    "far from 0": lambda g, n: g.normal(size=n) + 1000.0,
    "farther from 0": lambda g, n: g.normal(size=n) * 3.0 + 4e5,
}


SOON = {"normal": 7, "nearly flat": 40, "wide": 2, "ties": 7, "far from 0": 40, "farther from 0": 7}  # classes


@pytest.mark.whole(lambda kind, n: SOON[kind] != n)
@every
@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("n", [1, 2, 7, 40])
def test_p_to_fifty_digits(mapping, kind, n):
    x = ROWS[kind](np.random.default_rng(n), n).astype(np.float32)
    want = exactly(mapping, x)
    # as many as make the engine take them, and a tail after whole vectors
    rows = np.broadcast_to(x, (-(-tabled.LEAST // n), n))
    p = am.apply(mapping, rows)
    assert p.dtype == np.float32
    assert (p == p[:1]).all()
    near(p[0], want)


@pytest.mark.whole(lambda n, sigma: n not in {0.02: (33, 1000), 2.0: (3, 5003), 300.0: (16, 256)}[sigma])
@served
@pytest.mark.parametrize("sigma", [0.02, 2.0, 300.0])
@pytest.mark.parametrize("n", [3, 16, 33, 256, 1000, 5003])
def test_p_is_the_references(mapping, n, sigma):
    x = scores(n, sigma=sigma)
    p = by_tables(mapping, x)
    want = reference(mapping, x)
    near(p, want)
    if not mapping.facts.sparse and sigma < 300.0:  # far below the largest, too
        np.testing.assert_allclose(p[want > 1e-36], want[want > 1e-36], rtol=2e-4)


@pytest.mark.parametrize("mapping", [m for m in WITH_A_TABLE if not m.facts.sparse], ids=repr)
def test_the_tail_of_a_dense_map(mapping):
    x = -np.linspace(0.0, 80.0, 200, dtype=np.float32)[None]
    p = by_tables(mapping, x)
    want = reference(mapping, x)
    assert want.min() < 2e-4
    np.testing.assert_allclose(p, want, rtol=2e-4)


@served
@pytest.mark.parametrize("isa", native.load().isas())
def test_every_instruction_set(mapping, isa):
    x, g = scores(301), scores(301, seed=1)
    with instructions(isa):
        p = by_tables(mapping, x)
        near(p, reference(mapping, x))
        got, want = ENGINE.vjp(mapping, x, p, g), plain.vjp(mapping, x, p, g)
        np.testing.assert_allclose(got, want, rtol=0, atol=8 * EPS * np.abs(want).max())


@served
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves(mapping, dtype):
    torch = pytest.importorskip("torch")
    x = torch.tensor(scores(300)).to(getattr(torch, dtype))
    p = by_tables(mapping, x)
    assert p.dtype == x.dtype
    want = torch.tensor(reference(mapping, x.double().numpy()))
    assert torch.equal(p, want.to(p.dtype)) or float((p.double() - want).abs().max()) <= torch.finfo(p.dtype).eps


@served
def test_strange_rows_touch_no_other(mapping):
    x = scores(300, rows=8)
    want, y = by_tables(mapping, x), x.copy()
    y[1, 5], y[3, 299], y[5] = np.nan, np.inf, -np.inf
    p = by_tables(mapping, y)
    assert np.isnan(p[[1, 3]]).all()
    assert not p[5].any()
    np.testing.assert_array_equal(p[[0, 2, 4, 6, 7]], want[[0, 2, 4, 6, 7]])


@served
def test_masks_axes_and_layouts(mapping):
    x = scores(60, rows=70).reshape(7, 10, 60)
    keep = np.random.default_rng(1).random((10, 60)) < 0.5
    keep[4], keep[5, 3:] = False, False
    p, out = by_tables(mapping, x, mask=keep), np.empty_like(x)
    first = by_tables(mapping, np.moveaxis(x, -1, 0), 0, mask=np.moveaxis(np.broadcast_to(keep, x.shape), -1, 0))
    strided = by_tables(mapping, np.repeat(x, 2, -1)[..., ::2], mask=keep)
    assert by_tables(mapping, x, mask=keep, out=out) is out
    near(p.reshape(70, 60), reference(mapping, np.where(keep, x, -np.inf)).reshape(70, 60))
    assert not p[:, 4].any()
    assert not p[:, ~keep].any()
    for other in (np.moveaxis(first, 0, -1), strided, out):
        np.testing.assert_array_equal(other, p)


@served
def test_huge_tiny_and_equal_scores(mapping):
    big, tiny = float(np.finfo(np.float32).max), 1e-45
    for row in (
        [big, -big, 0.0, -1.0], [2.9e33], [big] * 4, [tiny, -tiny, 0.0], [-big] * 3, [1e4, 1e4 - 1, 1e4 - 2, 5.0],
        [1e6, 1.0, 2.0, 3.0, 4.0, 2.5], [big, 1.0, 2.0, 3.0, 4.0, 2.5], [-1e9, -1e9, 64 - 1e9, 5.0], [1e9, 1e9, 0.0, 1.0, 2.0],
    ):  # fmt: skip
        x = np.array([row], np.float32)
        near(by_tables(mapping, x), reference(mapping, x))


@served
def test_threads_that_share_a_long_row_change_nothing(mapping):
    for shape in ((1, 200_000), (2, 300_000)):
        x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        found = by_threads((1, 2, 3), lambda x=x: tabled.ENGINE.forward(mapping, x))
        assert all(np.array_equal(found[0], other) for other in found[1:])
        near(found[0], reference(mapping, x))


@served
def test_a_row_does_not_depend_on_the_others(mapping):
    """Nor on the threads that share the rows."""
    x = scores(256, rows=700)
    with threads(3):
        p = am.apply(mapping, x)
    order = np.random.default_rng(0).permutation(700)
    np.testing.assert_array_equal(am.apply(mapping, x[order]), p[order])
    np.testing.assert_array_equal(np.concatenate([by_tables(mapping, x[i : i + 1]) for i in range(40)]), p[:40])


@pytest.mark.whole(lambda mapping: not isinstance(mapping, Squares))
@pytest.mark.parametrize("mapping", [Squares(), Exps(), Powers(1.5), Sigmoids(1000.0)], ids=repr)
def test_a_long_row(mapping):
    x = scores(300_001, rows=2)
    near(am.apply(mapping, x), reference(mapping, x))


# -- gradients and thresholds --------------------------------------------------------------------------------------------------------


@served
def test_the_vjp_and_the_threshold_are_the_references(mapping):
    x, g = scores(500, rows=9), scores(500, rows=9, seed=1)
    x[1, ::3], x[2] = -np.inf, -np.inf
    with am.use("tabled"):
        p = am.apply(mapping, x)
        tau = am.threshold(mapping, x).tau
    got, want = ENGINE.vjp(mapping, x, p, g), plain.vjp(mapping, x, p, g)
    np.testing.assert_allclose(got, want, rtol=0, atol=8 * EPS * np.abs(want).max())
    assert not got[p == 0].any()
    with am.use("reference"):
        exact = am.threshold(mapping, x.astype(float)).tau
    # not where some classes are full and none between
    unique = ((p > 0) & (p < mapping.mass)).any(-1) & ~((p == 0) | (p == 1)).all(-1)
    unique[2] = True
    np.testing.assert_allclose(tau[unique], exact[unique], rtol=4 * EPS, atol=4 * EPS)
    assert unique.sum() >= 7
    p[3, 7] = np.nan
    assert np.isnan(ENGINE.vjp(mapping, x, p, g)[3, p[3] != 0]).all()


def test_rows_at_their_ceilings():
    x = scores(3, rows=2000)
    for mapping, tau in ((Sigmoids(3.0), -np.inf), (Caps(3.0), x.min(-1) - 1.0), (Caps(4.0), x.min(-1) - 1.0)):
        with am.use("tabled"):
            assert (am.apply(mapping, x) == 1.0).all()
            np.testing.assert_allclose(am.threshold(mapping, x).tau, tau, rtol=1e-6)


@served
def test_derivatives_in_torch(mapping):
    torch = pytest.importorskip("torch")
    x, g = torch.tensor(scores(50, rows=100, sigma=1.0)), torch.tensor(scores(50, rows=100, seed=1))
    assert am.choose("forward", mapping, x).name == am.choose("vjp", mapping, x).name == "tabled"

    def derivatives(scores):
        free = scores.clone().requires_grad_()
        (first,) = torch.autograd.grad(am.apply(mapping, free), free, g.to(scores.dtype), create_graph=True)
        return first.detach(), torch.autograd.grad(first.sin().sum(), free)[0]

    with am.use("reference"):
        want = derivatives(x.double())
    for got, other in zip(derivatives(x), want):
        assert float((got.double() - other).abs().max()) <= 2e-5 * max(float(other.abs().max()), 1.0)
    jacobian = torch.func.vmap(torch.func.jacrev(lambda v: am.apply(mapping, v)))(x[:3])
    assert float((jacobian.sum(-1)).abs().max()) <= 1e-5


# -- what the engine takes -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class OwnSolve(Exps):
    name = "own_solve"

    def solve(self, x, keep, xp):
        return super().solve(x, keep, xp)


@dataclasses.dataclass(frozen=True, eq=False)
class Doubled(Exps):
    """Its derivative is not that of its p."""

    name = "doubled"

    def vjp(self, x, p, g, xp):
        return 2.0 * super().vjp(x, p, g, xp)


@dataclasses.dataclass(frozen=True, eq=False)
class Broken(Exps):
    name = "broken"

    def link(self, t, xp):
        raise ZeroDivisionError("of all things")


@dataclasses.dataclass(frozen=True, eq=False)
class Lifted(Squares):
    """Below its edge the link is not 0."""

    name = "lifted"

    def link(self, t, xp):
        return xp.where(t > -2, xp.where(t > 0, t, 0.0 * t), 1e-3 + 0.0 * t)


@pytest.mark.parametrize(
    ("mapping", "why"),
    [
        (am.Sparsemax(), "has one"),
        (am.NormMax(), "neither a Separable"),
        (OwnSolve(), "has its own solve"),
        (Powers(np.full((90, 1), 1.5)), "alpha is not one"),
        (Sigmoids(np.full((90, 1), 2.0)), "k is not one"),
        (Caps(3.0, np.full(60, 0.5)), "most is not one"),
        (Powers(3.0), "steep edge"),
        (own_maps.Bent(), "misses it by .* near 0.3"),
        (Broken(), "ZeroDivisionError: of all things"),
        (Lifted(), "0 below its slope at 0"),
    ],
    ids=lambda v: v if isinstance(v, str) else type(v).__name__,
)
def test_what_it_refuses_with_a_reason(mapping, why):
    x = scores(60, rows=90)
    assert re.search(why, ENGINE.refuse("forward", mapping, x))
    assert re.search(why, str(kernels.explain(mapping, x, verbose=True))) or mapping.kernel is not None
    if not isinstance(mapping, (Broken, Lifted)):
        near(am.apply(mapping, x), reference(mapping, x), 8.0 if isinstance(mapping, Powers) else 4.0)


def test_the_arrays_that_it_takes():
    x = scores(60, rows=90)
    assert ENGINE.refuse("forward", Exps(), x) is None
    assert "own vjp" in ENGINE.refuse("vjp", Doubled(), x)
    assert ENGINE.refuse("forward", Doubled(), x) is None
    with am.use("reference"):
        assert am.choose("forward", Exps(), x).name == "reference"
    limits = (Path(__file__).parents[2] / "csrc/limits.hpp").read_text()
    assert "TABLED_CLASSES = 1 << 20;" in limits
    assert tabled.LONGEST == 1 << 20


def test_explain_says_how():
    text = str(kernels.explain(Exps(), scores(60, rows=90), verbose=True))
    assert re.search(r"\n  p +tabled: \d+ cells \(\w+\)\n", text)
    assert "not native" in text


def test_equal_maps_share_their_tables():
    assert tables.tables_of(Powers(1.7)) is tables.tables_of(Powers(1.7))
    assert tables.tables_of(Powers(1.7)) is not tables.tables_of(Powers(1.6))
    listed = dataclasses.make_dataclass("Listed", [("u", list)], bases=(Exps,), frozen=True, eq=False)([1.0])
    assert "u is not one" in tables.tables_of(listed)


def test_budgets_without_a_kernel_profit():
    x = scores(256, rows=64)
    for shape in ("sigmoid", "laplace"):
        mapping = am.Budget(5.0, shape=shape)
        assert am.choose("forward", mapping, x).name == "tabled"
        near(am.apply(mapping, x), reference(mapping, x))


def test_a_table_out_of_range_is_refused_by_the_library():
    link, x = tables.tables_of(Exps()).link, scores(16)
    engine, p = native.load(), np.empty_like(x)
    assert engine.tabled(link.cells, link.numbers, x, None, p, None)
    assert engine.tabled(link.cells.astype(float), link.numbers, x, None, p, None) is None
    with pytest.raises(RuntimeError, match="parameter is out of range"):
        engine.tabled(link.cells[:-1].copy(), link.numbers, x, None, p, None)
    wrong = {"shift": 3.0, "sign": 0.0, "low": -1.0, "high": np.inf, "mass": np.nan, "most": 0.0, "scale": 0.0}
    for name, value in wrong.items():
        numbers = tables.TableNumbers(*link.numbers)._replace(**{name: value}).packed()
        with pytest.raises(RuntimeError, match="parameter is out of range"):
            engine.tabled(link.cells, numbers, x, None, p, None)


# -- the reference in blocks of rows -----------------------------------------------------------------------------------------------


@pytest.mark.whole(lambda kind, dtype: (kind, dtype) != ("numpy", "float64"))
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_blocks_of_rows_are_the_whole(kind, dtype, monkeypatch):
    make = np.asarray if kind == "numpy" else pytest.importorskip("torch").from_numpy
    g = np.random.default_rng(0)
    x = make(g.normal(size=(7, 70, 300)).astype(dtype))
    alpha, k = make(1.0 + g.random((70, 1))), make(1.0 + g.random((7, 1, 1)).astype(dtype))
    maps = Exps(), am.Entmax(alpha), am.Budget(k, shape="sigmoid"), Powers(1.3)
    with am.use("reference"):
        in_parts = [am.apply(m, x) for m in maps]
        assert plain.forward.__module__  # the engine itself, not a stand-in
        monkeypatch.setattr(blocks, "BLOCK", 1 << 40)
        for mapping, p in zip(maps, in_parts):
            want = np.asarray(am.apply(mapping, x))
            np.testing.assert_allclose(np.asarray(p), want, rtol=0, atol=4 * np.finfo(dtype).eps)


def test_blocks_take_no_part_in_derivatives():
    torch = pytest.importorskip("torch")
    x = torch.randn(600, 300, dtype=torch.float64)
    free = x.clone().requires_grad_()
    assert not kernels.reference._takes_blocks(Exps(), free)
    assert kernels.reference._takes_blocks(Exps(), x)
    with torch.no_grad():
        assert kernels.reference._takes_blocks(Exps(), free)
    alpha = torch.full((600, 1), 1.5, dtype=torch.float64, requires_grad=True)
    assert not kernels.reference._takes_blocks(am.Entmax(alpha), x)
    with am.use("reference"):
        (grad,) = torch.autograd.grad(am.apply(am.Entmax(alpha), x)[:, 0].sum(), alpha)
    assert bool(grad.any())
