"""The laws as functions of an `apply`, so that `test_meta.py` can hold wrong maps against them and see each turn red.

`apply(x)` takes NumPy scores with the classes on the last axis, and the keywords of `anymax.apply` where a law says so.
Every law raises AssertionError where it is broken.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import oracles

SIZES = (1, 2, 63, 507)


def scores(*shape, sigma=1.0, seed=0, dtype=np.float64):
    return (sigma * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def check(condition, *said):
    if not np.all(condition):
        raise AssertionError(" ".join(str(s) for s in said))


def close(a, b, atol, *said):
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    check(a.shape == b.shape, a.shape, b.shape, *said)
    worst = np.max(np.abs(a - b), initial=0.0)
    check(worst <= atol, f"off by {worst:.3g}, allowed {atol:.3g}", *said)


def same(a, b, *said):
    """Bit for bit, NaN included."""
    check(np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True), "not bit for bit equal", *said)


# -- the simplex -----------------------------------------------------------------------------------------------------


def one(n):
    return 1.0, 1.0


def simplex(apply, sums=one, least=1, positive_row=False, single=2e-7):
    """p >= 0, and its sum is what `sums(n)` allows, at every size and spread; a distribution of one class is that class."""
    for dtype, atol in ((np.float32, single), (np.float64, 1e-14)):
        for n in SIZES:
            if n < least:
                continue
            for sigma in (0.02, 1.0, 30.0):
                x = scores(3, n, sigma=sigma, seed=n, dtype=dtype)
                if positive_row:
                    x[:, 0] = np.abs(x[:, 0]) + dtype(0.1)
                p = apply(x)
                check(p.shape == x.shape and p.dtype == x.dtype, p.shape, p.dtype)
                check(p >= 0, "negative", p.min())
                found, (low, high) = np.array([math.fsum(row) for row in p.astype(np.float64)]), sums(n)
                close(found, np.clip(found, low, high), atol * max(1.0, high), "sum", n, sigma, dtype.__name__)
    if least <= 1 and sums(1) == (1.0, 1.0):
        same(apply(np.array([[0.3], [2.0]])), [[1.0], [1.0]])


def masked(apply, least=2, atol=1e-14):
    """-inf is a masked class: 0 there, the map of the rest elsewhere; a fully masked row is zeros."""
    x = scores(4, 9, seed=1)
    x[:, 0] = np.abs(x[:, 0]) + 0.1
    x[1, [2, 5, 6]] = -math.inf
    x[2] = -math.inf
    x[3, least:] = -math.inf
    p = apply(x)
    check(np.isfinite(p), p)
    check(p[np.isneginf(x)] == 0, "mass on a masked class")
    keep = np.isfinite(x[1])
    close(p[1][keep], apply(x[1][keep]), atol, "a masked class changed the others")
    same(p[2], np.zeros(9), "a fully masked row")
    same(apply(x[2:3]), np.zeros((1, 9)))
    keep = np.isfinite(x)
    same(apply(np.where(keep, x, 7.0), mask=keep), p, "mask= is not -inf")


# -- symmetry --------------------------------------------------------------------------------------------------------


def permutation(apply):
    """p(Px) = P p(x)."""
    rng = np.random.default_rng(2)
    for n in (5, 63, 507):
        x = scores(3, n, seed=n)
        order = rng.permutation(n)
        close(apply(x[:, order]), apply(x)[:, order], 1e-13, n)


def monotone(apply):
    """x_i > x_j implies p_i >= p_j, down to the last bit or a few."""
    for sigma in (0.02, 1.0, 3.0):
        for seed in range(4):
            x = np.sort(scores(63, sigma=sigma, seed=seed) - 1.0)
            p = apply(x)
            check(np.diff(p) >= -1e-15, "x_i > x_j and p_i < p_j")


def shift(apply, atol=1e-12):
    """p(x + c) = p(x): exactly representable shifts, so that the scores do not change."""
    x = np.round(scores(4, 63) * 2**20) / 2**20
    for c in (1.0, -37.0, 2.0**14):
        close(apply(x + c), apply(x), atol, c)


# -- limits ----------------------------------------------------------------------------------------------------------


def cold(apply, mass=1.0):
    """As the temperature falls to 0, the largest score takes all; of a mass above 1 each of the largest takes 1."""
    x = scores(5, 31, seed=3)
    rank = np.argsort(np.argsort(-x, axis=-1), axis=-1)
    close(apply(x / 1e-6), np.clip(mass - rank, 0.0, 1.0), 1e-8)


def warm(apply, mass=1.0, atol=1e-6):
    """As the temperature grows, p becomes uniform."""
    x = scores(5, 31, seed=4)
    close(apply(x / 1e30), np.full_like(x, mass / 31), atol)


# -- KKT and accuracy ------------------------------------------------------------------------------------------------


def kkt(apply, residual, least=2):
    for n in (2, 5, 63, 507):
        if n < least:
            continue
        for sigma in (0.02, 0.3, 1.0, 8.0):
            x = scores(n, sigma=sigma, seed=n)
            worst = residual(x, apply(x))
            check(worst <= 4e-14 * max(1.0, np.abs(x).max()), f"KKT residual {worst:.3g}", n, sigma)


def accuracy(apply, oracle, ulps, ulps64, rows):
    """The largest error in ulps of the largest probability."""
    for dtype, most in ((np.float32, ulps), (np.float64, ulps64)):
        for row in rows:
            x = np.asarray(row).astype(dtype)
            worst = oracles.worst_ulps(apply(x), oracle(x))
            check(worst <= most, f"{worst:.2f} ulp, allowed {most}", dtype.__name__, x.size, np.ptp(x), x[:3])


# -- derivatives -----------------------------------------------------------------------------------------------------


def jacobian(apply, formula, rows, potential, invariant, atol=2e-7, kept=True):
    """The formula is the derivative of the map, symmetric and positive where p is a gradient, J1 = 0 where p(x + c) = p(x)."""
    for x in rows:
        j = formula(x)
        numeric = oracles.differences(apply, x)
        scale = max(1.0, np.abs(numeric).max())
        close(j / scale, numeric / scale, atol, "formula against differences at", x)
        if kept:
            close(j.sum(0) / scale, np.zeros(len(x)), 1e-12, "the sum is not kept")
        if potential:
            close(j / scale, j.T / scale, 1e-12, "not symmetric")
            check(np.linalg.eigvalsh((j + j.T) / 2).min() >= -1e-12 * scale, "not positive")
        if invariant:
            close(j.sum(1) / scale, np.zeros(len(x)), 1e-12, "J1")


# -- the loss --------------------------------------------------------------------------------------------------------


def loss_facts(apply, loss, targets, rows, soft=True):
    """>= 0; 0 where y = p(x) and nowhere else; the gradient is p - y; convex along segments. `loss(x, y)` of one row."""
    for x in rows:
        p = apply(x)
        for y in targets(len(x)):
            value = loss(x, y)
            check(value >= 0, "negative", value)
            gap = np.abs(p - y).max()
            if gap > 1e-3:
                check(value > 1e-9, "0 away from y = p(x)", value, gap)
            slope = oracles.differences(lambda v, y=y: np.asarray(loss(v, y)), x, h=1e-5)
            close(slope, p - y, 2e-7, "the gradient is not p - y")
        if soft:
            close(loss(x, p), 0.0, 1e-13 * max(1.0, np.abs(x).max()), "not 0 at y = p(x)")
    for a, b in itertools.pairwise(rows):
        for y in targets(len(a)) if len(a) == len(b) else ():
            ends = loss(a, y), loss(b, y)
            for t in (0.1, 0.5, 0.8):
                between = loss((1 - t) * a + t * b, y)
                check(between <= (1 - t) * ends[0] + t * ends[1] + 1e-12, "not convex")


# -- arrays ----------------------------------------------------------------------------------------------------------


def axes(apply):
    """Any axis, by its number from either end and under either name."""
    x = scores(3, 4, 5, 6, seed=5) + 0.5
    for axis in range(4):
        expected = np.moveaxis(apply(np.ascontiguousarray(np.moveaxis(x, axis, -1))), -1, axis)
        for options in ({"axis": axis}, {"axis": axis - 4}, {"dim": axis}):
            p = apply(x, **options)
            check(p.shape == x.shape, options)
            close(p, expected, 1e-15, options)


def views(apply):
    """Transposed, strided, reversed, Fortran-ordered, broadcast and read-only arrays give the same, and stay as they were."""
    x = scores(7, 6, seed=6) + 0.5
    wide = np.zeros((14, 18))
    wide[::2, ::3] = x
    frozen = x.copy()
    frozen.setflags(write=False)
    variants = {
        "transposed": np.ascontiguousarray(x.T).T,
        "strided": wide[::2, ::3],
        "reversed": np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1],
        "fortran": np.asfortranarray(x),
        "readonly": frozen,
    }
    expected = apply(x)
    for name, view in variants.items():
        before = view.copy()
        close(apply(view), expected, 1e-15, name)
        same(view, before, name, "was modified")
    row = np.broadcast_to(x[0], (3, 6))
    close(apply(row), np.broadcast_to(expected[0], (3, 6)), 1e-15, "broadcast")


def empty(apply):
    for shape in ((0, 5), (2, 0, 5), (0, 3, 5)):
        check(apply(np.zeros(shape)).shape == shape, shape)
    check(apply(np.zeros((0, 5)), axis=0 - 1).dtype == np.float64)


# -- poison ----------------------------------------------------------------------------------------------------------


def poison(apply):
    """NaN and +inf make their row NaN, and touch no other: bit for bit."""
    for dtype in (np.float32, np.float64):
        x = scores(5, 9, seed=7, dtype=dtype) + dtype(0.5)
        clean = apply(x)
        for bad in (math.nan, math.inf, -math.nan):
            for at in (0, 4, 8):
                y = x.copy()
                y[2, at] = bad
                if at:
                    y[2, 0] = -math.inf
                p = apply(y)
                check(np.isnan(p[2][np.isfinite(y[2])]), "a poisoned row gave numbers", p[2])
                others = [0, 1, 3, 4]
                same(p[others], clean[others], "the poison spread")


def extremes(apply, sums=one, positive_row=False):
    """Scores at the ends of the dtype: finite, and the sum is still one of those that `sums(n)` allows."""
    for dtype in (np.float32, np.float64):
        big, tiny = np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal
        rows = [
            [big, -big, 0, 1],
            [big, big, big, 1],
            [-big, -big, -big, big / 2],
            [1e30, -1e30, 1e30, 0],
            [tiny, 0, tiny, 3 * tiny],
            [big, 1, -1, -math.inf],
            [1, 1 + 1e-6, -big, -big],
        ]
        x = np.array(rows, dtype=dtype)
        p = apply(x)
        check(np.isfinite(p), "not finite", p)
        check(p >= 0, p)
        found = p.sum(-1)
        low, high = np.array([sums(count) for count in (x > -np.inf).sum(-1)]).T
        some = (x > 0).any(-1) | (not positive_row)
        close(found, np.clip(found, low * some, high * some), 1e-6 * max(1.0, high.max()), "sum", dtype.__name__, p)
