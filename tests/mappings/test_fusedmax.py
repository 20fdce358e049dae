"""Fusedmax against the taut string in rational numbers, its conditions of optimality, its gradients and its losses."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import oracles
import pytest
from kinds import KINDS, back, every_kind, jax_in_the_whole_battery

import anymax as am
from anymax.kernels import fused, reference

INF = math.inf


def exact(x, strength):
    out = np.zeros(x.shape)
    for i, (row, price) in enumerate(zip(x, np.broadcast_to(strength, (len(x), 1)), strict=True)):
        keep = row > -INF
        if keep.any():
            out[i, keep] = [float(v) for v in oracles.fusedmax(float(price[0]))(row[keep])]
    return out


def rows(n=9, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 1, (20, n)) * rng.choice([0.3, 2.0], (20, 1))
    x[4:8] = np.round(2 * x[4:8]) / 2  # ties, between neighbours too
    x[0] = -INF
    x[1, 1:] = -INF
    x[2, ::3] = -INF  # the classes beside a masked one become neighbours
    x[3, :4] = -INF
    x[8] = 0.3
    return x


@jax_in_the_whole_battery
@every_kind
def test_p_is_that_of_the_taut_string(kind):
    c = KINDS[kind]
    each = np.linspace(0, 2, 20)[:, None]
    for dtype, atol in ((np.float64, 1e-14), (np.float32, 3e-6)):
        if kind == "jax" and dtype is np.float64:
            continue
        x = rows().astype(dtype)
        for strength in (0.0, 0.05, 0.4, 3.0):
            np.testing.assert_allclose(back(am.apply(am.Fusedmax(strength), c(x))), exact(x, strength), atol=atol)
        got = back(am.apply(am.Fusedmax(c(each.astype(dtype))), c(x)))
        np.testing.assert_allclose(got, exact(x, each.astype(dtype)), atol=atol)


def engine_or_skip():
    if am.choose("forward", am.Fusedmax(), np.zeros(2)).name != "fused":
        pytest.skip("the engine is not compiled")
    return fused.ENGINE


@pytest.mark.parametrize("n", [1, 2, 3, 17, 600])
@pytest.mark.parametrize("each", [False, True], ids=["one strength", "one a row"])
def test_the_engine_and_the_array_code_agree(n, each):
    engine = engine_or_skip()
    rng = np.random.default_rng(n)
    for dtype, atol in ((np.float64, 1e-12), (np.float32, 2e-6), (np.float16, 1e-3)):
        x = (rng.normal(size=(24, n)) * rng.choice([0.1, 1.0, 30.0], (24, 1))).astype(dtype)
        x[:6][rng.random((6, n)) < 0.3] = -INF
        x[6], x[7, n // 2], x[8, 0] = -INF, np.nan, INF
        g = rng.normal(size=x.shape).astype(dtype)
        mapping = am.Fusedmax(rng.choice([0.0, 0.03, 0.7, 40.0], (24, 1)) if each else 0.31)
        p, groups = engine.forward_saving(mapping, x)
        want = reference.ENGINE.forward(mapping, x)
        np.testing.assert_allclose(p, want, atol=atol)
        assert np.isnan(p[[7, 8]]).all()
        assert (p[6] == 0).all()
        assert groups.memory.shape == x.shape
        by_scores = reference.ENGINE.vjp(mapping, x, want, g)
        for saved in (groups, None):
            np.testing.assert_allclose(engine.vjp(mapping, x, p, g, saved), by_scores, atol=20 * atol)
        slope = engine.slope(mapping, "strength", x, p, g, groups)
        by_strength = reference.ENGINE.slope(mapping, "strength", x, want, g)
        np.testing.assert_allclose(slope, by_strength, rtol=1e-3 if dtype == np.float16 else 1e-5, atol=50 * n * atol)


def test_the_derivative_by_the_strength_is_that_of_differences():
    engine = engine_or_skip()
    rng = np.random.default_rng(0)
    x, g, h = rng.normal(size=(50, 13)), rng.normal(size=(50, 13)), 1e-7
    x[::3, 4:6] = -INF
    p = [engine.forward(am.Fusedmax(0.2 + step), x) for step in (-h, 0.0, h)]
    want = ((p[2] - p[0]) * g).sum(-1, keepdims=True) / (2 * h)
    np.testing.assert_allclose(engine.slope(am.Fusedmax(0.2), "strength", x, p[1], g), want, atol=1e-6)


def test_what_decides_for_the_engine():
    engine = engine_or_skip()
    x = np.zeros((2, 3))
    assert {op: am.choose(op, am.Fusedmax(), x).name for op in ("forward", "vjp", "loss", "slope")} == {
        "forward": "fused", "vjp": "fused", "loss": "reference", "slope": "fused",
    }  # fmt: skip
    assert engine.refuse("forward", am.Sparsemax(), x) == "its map is Fusedmax"
    torch = pytest.importorskip("torch")
    learned = am.Fusedmax(torch.tensor(0.1, requires_grad=True))
    assert am.choose("forward", learned, torch.zeros(2, 3)).name == "fused"
    assert "its strength: it takes" in engine.refuse("forward", am.Fusedmax(torch.tensor(0.1, device="meta")), x)


@pytest.mark.parametrize("shape", ["rising", "falling", "waves", "steps", "alternating"])
def test_long_rows_whose_hulls_are_long(shape):
    """Each place joins and leaves a hull once, and the sums stay exact enough."""
    engine_or_skip()
    n = 30_000
    t = np.arange(n) / n
    x = {
        "rising": t * t, "falling": -t * t, "waves": np.sin(40 * t) + 1e-3 * np.sin(7000 * t), "steps": np.floor(9 * t),
        "alternating": np.tile([0.0, 1.0], n // 2),
    }[shape]  # fmt: skip
    for strength in (1e-4, 0.3, 50.0):
        p = am.apply(am.Fusedmax(strength), x)
        np.testing.assert_allclose(p, am.apply(am.Fusedmax(strength), x[::-1])[::-1], atol=1e-12)
        np.testing.assert_allclose(p.sum(), 1.0, atol=1e-12)
        inside = p > 0
        rest = np.cumsum(np.where(inside, x - p, 0.0)) if inside.all() else None
        if rest is not None:  # x - p - tau is a difference of prices that are at most the strength
            price = rest - rest[-1] * np.arange(1, n + 1) / n
            assert np.abs(price).max() <= strength * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize("large", [1e4, 1e10, 1e14, 1e16])
def test_a_top_group_far_below_the_largest_score(large):
    """A strength as large as the scores: what is 1 beside the values of the groups is lost."""
    z = np.array([0, 4, 0, 4, 0, 4, 1, 3.5, 0]) * large
    p = am.apply(am.Fusedmax(large), z)
    np.testing.assert_allclose(p.sum(), 1.0, rtol=1e-12)
    with am.use("reference"):
        np.testing.assert_allclose(p, am.apply(am.Fusedmax(large), z), atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 40])
def test_the_queue_and_the_rounds_give_the_same(n):
    """Rows whose values can be read take a queue; under a compiler there are rounds over all rows."""
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(n).normal(size=(30, n))
    x[:5] = np.round(x[:5])
    traced = torch.func.vmap(lambda r: am.apply(am.Fusedmax(0.3), r))
    np.testing.assert_allclose(back(traced(torch.tensor(x))), am.apply(am.Fusedmax(0.3), x), atol=1e-14)
    jax = pytest.importorskip("jax")
    got = jax.jit(lambda v: am.apply(am.Fusedmax(0.3), v))(x.astype(np.float32))
    np.testing.assert_allclose(got, am.apply(am.Fusedmax(0.3), x), atol=2e-6)


def test_the_conditions_of_optimality_hold_for_long_rows():
    """x - p - tau is a difference of prices u_i in [-strength, strength], which are at the end where p rises or falls."""
    x, strength = np.random.default_rng(3).normal(0, 2, 3000).cumsum() * 0.02, 0.7
    p = am.apply(am.Fusedmax(strength), x)
    inside = p > 0
    assert 3 < len(np.unique(p[inside])) < inside.sum()
    edges = np.flatnonzero(np.diff(np.concatenate([[0], inside.astype(int), [0]])))
    for start, end in edges.reshape(-1, 2):  # each stretch of the support: tau and its prices
        step = np.sign(np.diff(p[max(start - 1, 0) : end + 1]))
        left = 0.0 if start == 0 else -strength
        right = 0.0 if end == len(x) else strength
        rest = x[start:end] - p[start:end]
        tau = (rest.sum() - (right - left)) / (end - start)
        u = left + np.cumsum(rest - tau)[:-1]
        assert (np.abs(u) <= strength + 1e-9).all()
        inner = (
            step[1:-1]
            if start and end < len(x)
            else step[:-1]
            if not start and end < len(x)
            else step[1:]
            if start
            else step
        )
        np.testing.assert_allclose(u[inner > 0], -strength, atol=1e-9)
        np.testing.assert_allclose(u[inner < 0], strength, atol=1e-9)


def test_derivatives_and_losses():
    torch = pytest.importorskip("torch")
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, 7, generator=draw).double()
    keep = torch.ones(3, 7, dtype=torch.bool)
    keep[1, 2], keep[2, :3] = False, False
    x.requires_grad_()
    strength = torch.tensor([[0.1], [0.3], [0.5]], dtype=torch.float64, requires_grad=True)
    f = lambda x, s: am.apply(am.Fusedmax(s), x, mask=keep)  # noqa: E731
    assert torch.autograd.gradcheck(f, (x, strength))
    assert torch.autograd.gradgradcheck(f, (x, strength))
    assert torch.autograd.gradcheck(lambda x: am.apply(am.Fusedmax(0.2), x, mask=keep), x)
    y = am.apply(am.Fusedmax(0.05), torch.randn(3, 7, generator=draw).double(), mask=keep)
    for target in (y, torch.tensor([3, 3, 4])):
        loss = lambda x, s: am.fenchel_young(am.Fusedmax(s), x, target, reduction="none", mask=keep)  # noqa: B023, E731
        assert (loss(x, strength) > 0).all()
        assert torch.autograd.gradcheck(loss, (x, strength))
        assert torch.autograd.gradgradcheck(loss, (x, strength))
    p = f(x, strength)
    zero = am.fenchel_young(am.Fusedmax(strength), x, p.detach(), reduction="none", mask=keep)
    assert float(zero.detach().abs().max()) < 1e-13


def test_the_loss_is_the_largest_difference_of_the_regularised_score():
    """Omega*(x) + Omega(y) - <x, y>, from its definition with p, over no other code."""
    x, y, strength = np.random.default_rng(6).normal(size=6), np.eye(6)[2], 0.3
    p = am.apply(am.Fusedmax(strength), x)
    omega = lambda q: 0.5 * q @ q + strength * np.abs(np.diff(q)).sum()  # noqa: E731
    want = (x @ p - omega(p)) - (x @ y - omega(y))
    np.testing.assert_allclose(am.fenchel_young(am.Fusedmax(strength), x, y), want, rtol=1e-13)
    np.testing.assert_allclose(am.fenchel_young(am.Fusedmax(strength), x, np.array(2)), want, rtol=1e-13)


@pytest.mark.whole
@pytest.mark.parametrize("strength", [0.2, 1.0])
def test_the_contract(strength):
    assert len(am.check_mapping(am.Fusedmax(strength))) >= 10


@pytest.mark.whole
def test_an_order_that_does_not_matter_is_no_fact():
    with pytest.raises(AssertionError, match=r"facts\.ordered"):
        am.check_mapping(_Unordered())


class _Unordered(am.Sparsemax):
    """It says that the order of its classes matters, which it does not."""

    @property
    def facts(self):
        return dataclasses.replace(super().facts, ordered=True)
