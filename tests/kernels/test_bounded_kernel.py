"""The kernel of Bounded: against array code, optimality and central differences; layouts, masks, dtypes, refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest

import anymax as am
from anymax import kernels
from anymax.kernels import native
from anymax.kernels.engine import SegmentsAlong

pytestmark = pytest.mark.skipif(isinstance(native.load(), str), reason="the library was not compiled")

INF = math.inf
ALPHAS = (1.0, 1.01, 1.3, 4 / 3, 1.5, 1.8, 2.0)
LENGTHS = (1, 2, 5, 31, 64, 200, 512, 5000)
UPPER = ("number", "small number", "class", "row", "zeros", "one a row", "short", "whole", "above")


def bounds(kind, rows, n, rng):
    each = rng.uniform(0.0, 1.0, (rows, n)) * rng.choice([0.1, 1.0, 2.0], (rows, 1))
    if kind in ("short", "whole", "above"):  # sums below 1, of 1, and just above it
        each = each + 0.01
        return each / each.sum(-1, keepdims=True) * {"short": 0.9, "whole": 1.0, "above": 1.001}[kind]
    return {
        "number": 0.3, "small number": 1.5 / n, "class": each[0], "row": each, "zeros": each * rng.choice([0.0, 1.0], (rows, n)),
        "one a row": each[:, :1],
    }[kind]  # fmt: skip


def scores(rows, n, rng):
    x = rng.normal(0, 1, (rows, n)) * rng.choice([0.01, 1.0, 30.0], (rows, 1))
    x[0] = 0.25  # ties
    x[1] = np.round(x[1])
    x[2, ::2] = -INF
    x[3, : n // 2 + 1] += 1000.0  # all of the mass that is left is far below the first ones
    return x


def reference(mapping, x):
    with am.use("reference"):
        return am.apply(mapping, x)


@pytest.mark.whole(lambda alpha, kind: (ALPHAS.index(alpha) + UPPER.index(kind)) % 2)
@pytest.mark.parametrize("kind", UPPER)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_p_is_that_of_the_array_code(alpha, kind):
    rng = np.random.default_rng(int(alpha * 100) + UPPER.index(kind))
    for n in LENGTHS:
        x = scores(6, n, rng)
        u = bounds(kind, 6, n, rng)
        for dtype, atol in ((np.float64, 4e-14), (np.float32, 6e-7)):
            y, v = x.astype(dtype), u if isinstance(u, float) else u.astype(dtype)
            with am.use("native"):
                p = am.apply(am.Bounded(v, alpha), y)
            assert p.dtype == dtype
            wide = am.Bounded(v if isinstance(v, float) else v.astype(np.float64), alpha)
            np.testing.assert_allclose(p, reference(wide, y.astype(np.float64)), atol=atol, err_msg=f"{n} {dtype}")
            assert (p <= np.asarray(v, dtype)).all()


@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_optimality_conditions(alpha):
    """Of free classes x - omega'(p) is tau, of full ones no less, and what is 0 lies below; sums are 1 where the bounds allow it."""
    rng = np.random.default_rng(11)
    slope = lambda q: np.log(q) if alpha == 1 else q ** (alpha - 1) / (alpha - 1)  # noqa: E731
    for n in (5, 64, 512, 5000):
        x, u = rng.normal(0, 2, (40, n)), rng.uniform(0.0, 4.0 / n, (40, n))
        p = am.apply(am.Bounded(u, alpha), x)
        np.testing.assert_allclose(p.sum(-1), np.minimum(u.sum(-1), 1.0), atol=1e-13)
        for row, most, q in zip(x, u, p, strict=True):
            free, full = (q > 0) & (q < most), (q == most) & (most > 0)
            if not free.any():
                continue
            tau = row[free] - slope(q[free])
            large = q[free] > 1e-6
            assert np.ptp(tau[large]) < 1e-7
            tau = np.median(tau)
            assert (row[full] - slope(most[full]) >= tau - 1e-7).all()
            if alpha > 1:
                assert (row[q == 0] <= tau + 1e-7)[most[q == 0] > 0].all()


def test_bounds_that_are_hit_exactly_and_large_scores():
    with am.use("native"):
        assert am.apply(am.Bounded(0.5), [3.0, 1.0, 0.5]).tolist() == [0.5, 0.5, 0.0]
        assert am.apply(am.Bounded(0.25), [1.0] * 4).tolist() == [0.25] * 4
        assert am.apply(am.Bounded(0.2), [9.0, 3.0]).tolist() == [0.2, 0.2]
        for alpha in ALPHAS:
            for dtype, tol in ((np.float32, 2e-6), (np.float64, 1e-13)):
                for far in (1e3, 1e6, 1e30):
                    x = np.array([far, 1.0, 0.5, -far, 0.0], dtype)
                    p = am.apply(am.Bounded(0.4, alpha), x)
                    assert p[0] == dtype(0.4), (alpha, far)
                    np.testing.assert_allclose(p.sum(), 1.0, atol=tol)
                    assert (np.diff(p[[1, 2, 4, 3]]) <= 0).all()


@pytest.mark.parametrize("alpha", ALPHAS[1:])
@pytest.mark.parametrize("size", [1e15, 1e300, 1.7e308])
def test_scores_up_to_the_end_of_the_dtype_fill_the_largest_classes(alpha, size):
    rng = np.random.default_rng(3)
    x, upper = rng.normal(size=(3, 300)), rng.uniform(0.0, 0.1, 300)
    x *= size / np.abs(x).max()  # so far apart that all but one are full or 0
    with am.use("native"):
        p = am.apply(am.Bounded(upper, alpha=alpha), x)
    for row, scores in zip(p, x):
        order = np.argsort(-scores)
        full = np.minimum(upper[order], np.maximum(1.0 - np.concatenate([[0.0], np.cumsum(upper[order])[:-1]]), 0.0))
        np.testing.assert_allclose(row[order], full, atol=1e-12)


def test_rows_that_are_lost():
    x = np.array([[1.0, 2.0, np.nan], [1.0, INF, 0.0], [-INF] * 3, [1.0, 2.0, 3.0]], np.float32)
    for alpha in (1.0, 1.3, 2.0):
        with am.use("native"):
            p = am.apply(am.Bounded(0.5, alpha), x)
            np.testing.assert_array_equal(np.isnan(p).all(-1), [True, True, False, False])
            assert (p[2] == 0).all()
            assert (am.apply(am.Bounded(0.0, alpha), x)[2:] == 0).all()


def test_a_parameter_out_of_range_loses_its_row():
    torch = pytest.importorskip("torch")
    x = torch.randn(3, 8)
    u = torch.full((3, 8), 0.3)
    mapping = am.Bounded(u, torch.full((3, 1), 1.5))
    u[0, 2], u[1, 5] = -0.1, math.nan  # after its check
    mapping.alpha[2] = 2.5
    with am.use("native"):
        assert am.apply(mapping, x).isnan().all()
    u.fill_(0.3)
    with am.use("native"):
        assert am.apply(mapping, x).isnan().all(-1).tolist() == [False, False, True]


@pytest.mark.parametrize("alpha", [1.0, 1.3, 2.0])
def test_layouts(alpha):
    """Any axis and strides of the scores, the mask and the bounds; an alpha for each row; results in place."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(4, 6, 40)).astype(np.float32)
    keep = rng.random((4, 1, 40)) > 0.2
    for u in (
        0.2,
        rng.uniform(0, 0.2, 40),
        rng.uniform(0, 0.2, (6, 40)),
        rng.uniform(0, 0.2, (4, 1, 40)),
        rng.uniform(0, 0.2, (4, 6, 1)),
    ):
        u = u if isinstance(u, float) else u.astype(np.float32)
        want = reference(am.Bounded(u, alpha), np.where(keep, x, -np.float32(INF)))
        with am.use("native"):
            got = am.apply(am.Bounded(u, alpha), x, mask=keep)
            np.testing.assert_allclose(got, want, atol=1e-6)
            turned = u if isinstance(u, float) or u.ndim == 0 else np.broadcast_to(u, (4, 6, 40)).transpose(2, 0, 1)
            got = am.apply(am.Bounded(turned, alpha), x.transpose(2, 0, 1), axis=0, mask=keep.transpose(2, 0, 1))
            np.testing.assert_allclose(got.transpose(1, 2, 0), want, atol=1e-6)
            strided = np.repeat(x, 2, -1)[..., ::2]
            np.testing.assert_allclose(am.apply(am.Bounded(u, alpha), strided, mask=keep), want, atol=1e-6)
            out = np.where(keep, x, -np.float32(INF))
            am.apply(am.Bounded(u, alpha), out, out=out)
            np.testing.assert_allclose(out, want, atol=1e-6)
    each = np.where(rng.random((4, 6, 1)) < 0.5, alpha, 1.5)
    want = reference(am.Bounded(0.2, each), x)
    with am.use("native"):
        np.testing.assert_allclose(am.apply(am.Bounded(0.2, each), x), want, atol=1e-6)


@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0])
@pytest.mark.parametrize("kind", ["number", "class", "row", "zeros", "short"])
def test_the_gradient_is_that_of_central_differences(alpha, kind):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(7)
    n, h = 40, 1e-6
    x, u, v, w = rng.normal(0, 1, (8, n)), bounds(kind, 8, n, rng), rng.normal(size=(8, n)), rng.normal(size=(8, n))
    mapping = am.Bounded(u if isinstance(u, float) else torch.tensor(u), alpha)
    y = torch.tensor(x, requires_grad=True)
    with am.use("native"):
        (g,) = torch.autograd.grad((am.apply(mapping, y) * torch.tensor(w)).sum(), y)
    numeric = am.Bounded(u, alpha)
    up, down = (reference(numeric, x + s * h * v) for s in (1, -1))
    np.testing.assert_allclose((g.numpy() * v).sum(-1), ((up - down) * w).sum(-1) / (2 * h), atol=2e-7)


@pytest.mark.parametrize("alpha", [1.0, 1.3, 2.0])
@pytest.mark.parametrize("kind", ["number", "row"])
def test_the_gradient_of_every_dtype(alpha, kind):
    """Long rows save their support, short ones are read again, and rows in half precision are solved again."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(8)
    for n in (40, 600):
        x, w = rng.normal(0, 1, (64, n)), rng.normal(size=(64, n))
        u = 0.1 if kind == "number" else torch.tensor(rng.uniform(0, 0.3, (64, n)), dtype=torch.float32)
        for dtype, tol in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 4e-3)):
            y = torch.tensor(x).to(dtype).requires_grad_()
            with am.use("native"):
                (got,) = torch.autograd.grad(am.apply(am.Bounded(u, alpha), y), y, torch.tensor(w).to(dtype))
            z = y.detach().double().requires_grad_()
            with am.use("reference"):
                exact = am.Bounded(float(np.float32(u)) if kind == "number" else u.double(), alpha)
                (want,) = torch.autograd.grad(am.apply(exact, z), z, torch.tensor(w).to(dtype).double())
            torch.testing.assert_close(got.double(), want, atol=tol, rtol=tol)


LEARNED = ("number", "class", "row", "zeros", "one a row", "short")


@pytest.mark.parametrize("kind", LEARNED)
@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0])
def test_the_derivatives_by_bounds_and_alpha_are_those_of_central_differences(alpha, kind):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(17)
    for n in (40, 400):  # of the longer ones a support is saved, but for alpha 1 and 1.3
        rows, h = 48, 1e-6
        x, w = rng.normal(0, 1, (rows, n)), rng.normal(size=(rows, n))
        u = np.asarray(bounds(kind, rows, n, rng))
        v = rng.normal(size=u.shape) * (u > 0.0)  # a bound of 0 has a derivative on one side only
        v = v / n if kind == "one a row" else v  # many full classes move together, and others would become free
        a = np.full((rows, 1), alpha if 1.0 < alpha < 2.0 else 1.5)
        upper, each = torch.tensor(u, requires_grad=True), torch.tensor(a, requires_grad=True)
        with am.use("native"):
            y = am.apply(am.Bounded(upper, alpha), torch.tensor(x))
            (by_upper,) = torch.autograd.grad((y * torch.tensor(w)).sum(), upper)
            y = am.apply(am.Bounded(upper, each), torch.tensor(x))
            both = torch.autograd.grad((y * torch.tensor(w)).sum(), (upper, each))
        assert by_upper.shape == upper.shape
        up, down = (reference(am.Bounded(u + s * h * v, alpha), x) for s in (1, -1))
        np.testing.assert_allclose((by_upper.numpy() * v).sum(), ((up - down) * w).sum() / (2 * h), atol=2e-6)
        up, down = (reference(am.Bounded(u, a + s * h), x) for s in (1, -1))
        np.testing.assert_allclose(both[1].numpy()[:, 0], ((up - down) * w).sum(-1) / (2 * h), atol=2e-7)
        up, down = (reference(am.Bounded(u + s * h * v, a), x) for s in (1, -1))
        np.testing.assert_allclose((both[0].numpy() * v).sum(), ((up - down) * w).sum() / (2 * h), atol=2e-6)


@pytest.mark.whole(lambda alpha: alpha != 1.3)
@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0])
@pytest.mark.parametrize("kind", LEARNED)
def test_the_derivatives_by_bounds_and_alpha_in_every_dtype(alpha, kind):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(18)
    for n in (1, 40, 600):
        x, w, u = rng.normal(0, 1, (64, n)), rng.normal(size=(64, n)), np.asarray(bounds(kind, 64, n, rng), np.float32)
        a = np.full((64, 1), alpha, np.float32)
        for dtype, tol in (
            (torch.float64, 1e-10),
            (torch.float32, 2e-5),
            (torch.bfloat16, 1e-4),
            (torch.float16, 1e-4),
        ):
            y, g = torch.tensor(x).to(dtype), torch.tensor(w).to(dtype)
            kept = torch.float64 if dtype == torch.float64 else torch.float32
            given = [torch.tensor(t).to(kept).requires_grad_() for t in (u, a)]
            with am.use("native"):
                got = torch.autograd.grad(am.apply(am.Bounded(*given), y), given, g)
            exact = [t.detach().double().requires_grad_() for t in given]
            with am.use("reference"):
                want = torch.autograd.grad(am.apply(am.Bounded(*exact), y.double()), exact, g.double())
            for one, other in zip(got, want, strict=True):
                torch.testing.assert_close(one.double(), other, atol=tol * 8, rtol=tol)


def test_the_derivatives_of_rows_that_are_lost_and_of_bounds_that_are_none():
    x = np.array([[1.0, 2.0, np.nan], [-INF] * 3, [9.0, 0.0, 0.0], [1.0, 2.0, 3.0]], np.float32)
    g = np.array([[1.0, 2.0, 4.0]] * 4, np.float32)
    for alpha in (1.0, 1.3, 2.0):
        mapping = am.Bounded(np.array([7.0, 0.25, 0.25], np.float32), alpha)
        p = native.ENGINE.forward(mapping, x)
        by_upper, by_alpha = (native.ENGINE.slope(mapping, name, x, p, g) for name in ("upper", "alpha"))
        assert np.isnan(by_upper[0]).all()
        assert np.isnan(by_alpha[0]).all()
        assert not by_upper[1].any()
        assert not by_alpha[1].any()
        # the first class takes what the others leave
        np.testing.assert_allclose(by_upper[3], [0.0, 1.0, 3.0], atol=1e-6)
        if alpha == 2.0:
            assert p[2].tolist() == [1.0, 0.0, 0.0]
            assert not by_upper[2].any()


def test_bounds_that_have_a_gradient():
    torch = pytest.importorskip("torch")
    x = torch.randn(4, 9, requires_grad=True)
    u = torch.full((9,), 0.3, requires_grad=True)
    gx, gu = torch.autograd.grad((am.apply(am.Bounded(u), x) ** 2).sum(), (x, u))
    held = torch.autograd.grad((am.apply(am.Bounded(u.detach()), x) ** 2).sum(), x)[0]
    torch.testing.assert_close(gx, held)
    assert gu.any()


def test_bounds_that_were_changed_before_the_gradient_are_an_error():
    torch = pytest.importorskip("torch")
    x, u = torch.randn(4, 9, requires_grad=True), torch.full((9,), 0.3)
    p = am.apply(am.Bounded(u), x)
    u += 0.1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        p.sum().backward()


def test_which_engine_serves():
    x = np.zeros((3, 8), np.float32)
    for upper in (0.3, np.full(8, 0.3), np.full((3, 1), 0.3)):
        for alpha in (1.0, 1.5, 2.0, np.full((3, 1), 1.5)):
            mapping = am.Bounded(upper, alpha)
            assert {op: kernels.choose(op, mapping, x).name for op in ("forward", "vjp", "slope", "loss")} == {
                "forward": "native", "vjp": "native", "slope": "native", "loss": "reference",
            }  # fmt: skip
    assert dict(am.explain(am.Bounded(0.3), x).rows[1][2])["native"] == "it has no log p of bounded; log of p is used"


@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_other_engines_say_that_they_have_no_kernel(kind):
    pytest.importorskip(kind)
    refuse = kernels.triton.refuse_map if kind == "torch" else None
    if refuse is not None:
        assert refuse("forward", am.Bounded(0.3)) == "it has no kernel for bounded"
        return
    import jax.numpy as jnp

    assert kernels.xla.ENGINE.refuse("forward", am.Bounded(0.3), jnp.zeros((3, 8))) == "it has no kernel for bounded"


def test_segments_have_no_kernel_of_their_own():
    x = np.array([3.0, 1.0, 0.5, 2.0, 2.0])
    engine = kernels.ragged.NativeSegments(SegmentsAlong(am.Segments.of(lengths=[3, 2]), 0))
    assert engine.refuse("forward", am.Bounded(0.6), x) == "it takes no segments of maps with upper bounds"
