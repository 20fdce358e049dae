"""The objective of a linear model: the mean loss of `x @ W` plus `l2 / 2 ||W||^2`, for dense or CSR x, in the dtype of x.

`W` is [features, classes], plus a row for the intercepts, which are not penalised. L-BFGS works in coordinates V with
`W = T V`, a preconditioner: `T T^t` is close to the inverse of `c x^t x / n + l2`, where c is the curvature of the loss. At first
c is the curvature at equal scores, the same for all classes (Boehning 1992); later it is that of each class at the current
point. With many features T is diagonal, and a matrix only if that turns out to be slow.

With few dense features the products are cheap beside the loss: the scores are computed at each look along a line. Others are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import linalg

from .losses import Loss

_FULL = 512  # up to this many features T is a matrix
_LATE = 1536  # up to this many T becomes a matrix if two diagonals were not enough
_BLOCK, _LEAST = 1 << 17, 256  # scores whose loss is computed at a time, and the fewest rows
_CHEAP = 64  # up to this many dense features a product costs no more than the loss
_ROWS = 16  # this many rows per feature are enough to find T


class Linear:
    """The objective at a point W, as `lbfgs.Problem`."""

    def __init__(
        self,
        x: Any,
        loss: Loss,
        l2: float,
        start: np.ndarray,
        intercept: bool,
        curvature: float,
        weights: np.ndarray,
    ) -> None:
        self.x, self.l2, self.weights = x, l2, weights
        self.d, self.intercept = x.shape[1], intercept
        self.precondition = first_preconditioner(x, weights, curvature, l2, intercept)
        cheap = isinstance(x, np.ndarray) and x.shape[1] <= _CHEAP
        self.mean = (_MeanInBlocks if cheap else _MeanOfScores)(x, loss, start.shape[1], intercept)
        self.put(start)
        self.worst, self.refits = np.inf, 0

    def put(self, w: np.ndarray) -> None:
        """Set the point to W."""
        self.w = np.array(w, order="C")
        self.size = self.product(self.w, self.w)
        self.value = self.mean.put(self.w) + 0.5 * self.l2 * self.size

    def product(self, a: np.ndarray, b: np.ndarray) -> float:
        """The inner product without the intercepts."""
        return float(np.dot(a[: self.d].reshape(-1), b[: self.d].reshape(-1)))

    def slope(self) -> np.ndarray:
        """The gradient in W."""
        g = self.mean.gradient()
        g[: self.d] += self.l2 * self.w[: self.d]
        self.worst = float(max(g.max(), -g.min()))
        return g

    def gradient(self) -> np.ndarray:
        return np.ascontiguousarray(self.precondition(self.slope(), True)).reshape(-1)

    def steepest(self) -> float:
        return self.worst

    def aim(self, direction: np.ndarray) -> None:
        self.dw = np.ascontiguousarray(self.precondition(direction.reshape(self.w.shape), False))
        self.mean.aim(self.w, self.dw)
        self.cross, self.stride = self.product(self.w, self.dw), self.product(self.dw, self.dw)

    def look(self, step: float) -> tuple[float, float]:
        mean, pull = self.mean.look(step)
        size = self.size + step * (2.0 * self.cross + step * self.stride)
        self.there = mean + 0.5 * self.l2 * size, size
        return self.there[0], pull + self.l2 * (self.cross + step * self.stride)

    def move(self, step: float) -> None:
        self.mean.move(step)
        self.dw *= self.dw.dtype.type(step)
        self.w += self.dw
        self.value, self.size = self.there

    def refit(self) -> bool:
        if self.w.dtype == np.float32:
            self.put(self.w)  # compute the scores again, without the rounding errors of the updates
        self.refits += 1
        curvature = self.mean.curvature(self.w)
        if self.refits > 1 and _FULL < self.d + self.intercept <= _LATE:
            found = late_preconditioner(self.x, self.weights, curvature, self.l2, self.intercept)
        else:
            found = second_preconditioner(self.x, self.weights, curvature, self.l2, self.intercept)
        if found is None:
            return False
        self.precondition = found
        return True


class _MeanInBlocks:
    """The mean loss of rows with few features, whose scores are computed at each look, in blocks that a cache holds."""

    def __init__(self, x: np.ndarray, loss: Loss, columns: int, intercept: bool) -> None:
        self.n, self.intercept = len(x), intercept
        self.parts = [(x[rows], rows, part) for rows, part in _parts(loss, len(x), max(x.shape[1], columns))]

    def at(self, w: np.ndarray) -> tuple[float, np.ndarray]:
        """The mean and its gradient."""
        mean, g = 0.0, np.zeros_like(w)
        for x, _, loss in self.parts:
            value, residual = loss(_times(x, w, self.intercept))
            mean += value
            _pull(x, residual, self.intercept, g)
        return mean, g

    def put(self, w: np.ndarray) -> float:
        mean, self.g = self.at(w)
        return mean

    def gradient(self) -> np.ndarray:
        return self.g.copy()

    def aim(self, w: np.ndarray, dw: np.ndarray) -> None:
        self.w, self.dw = w, dw

    def look(self, step: float) -> tuple[float, float]:
        mean, self.there = self.at(self.w + self.dw * self.dw.dtype.type(step))
        return mean, float(np.dot(self.there.reshape(-1), self.dw.reshape(-1)))

    def move(self, step: float) -> None:
        self.g = self.there

    def curvature(self, w: np.ndarray) -> np.ndarray:
        out = np.empty((self.n, w.shape[1]), w.dtype)
        for x, rows, loss in self.parts:
            out[rows] = loss.curvature(_times(x, w, self.intercept))
        return out


class _MeanOfScores:
    """The mean loss of scores that are kept, for x whose products are expensive: a line costs one, and a look none."""

    def __init__(self, x: Any, loss: Loss, columns: int, intercept: bool) -> None:
        self.x, self.parts, self.intercept = x, _parts(loss, x.shape[0], columns), intercept

    def put(self, w: np.ndarray) -> float:
        self.z = _times(self.x, w, self.intercept) if w.any() else np.zeros((self.x.shape[0], w.shape[1]), w.dtype)
        self.dz, self.residual = np.zeros_like(self.z), np.empty_like(self.z)
        return self.look(0.0)[0]

    def gradient(self) -> np.ndarray:
        g = np.zeros((self.x.shape[1] + self.intercept, self.z.shape[1]), self.z.dtype)
        _pull(self.x, self.residual, self.intercept, g)
        return g

    def aim(self, w: np.ndarray, dw: np.ndarray) -> None:
        self.dz = np.empty((0, 0), self.z.dtype)  # the last line's, which the new one need not wait for
        self.dz = _times(self.x, dw, self.intercept)

    def look(self, step: float) -> tuple[float, float]:
        mean, pull = 0.0, 0.0
        for rows, loss in self.parts:
            z = self.dz[rows] * self.dz.dtype.type(step)
            z += self.z[rows]
            value, self.residual[rows] = loss(z)
            mean += value
            pull += float(np.vdot(self.residual[rows], self.dz[rows]))
        return mean, pull

    def move(self, step: float) -> None:
        self.dz *= self.dz.dtype.type(step)
        self.z += self.dz

    def curvature(self, w: np.ndarray) -> np.ndarray:
        self.dz = out = np.empty_like(self.z)  # the next line has another
        for rows, loss in self.parts:
            out[rows] = loss.curvature(self.z[rows])
        return out


def _times(x: Any, w: np.ndarray, intercept: bool) -> np.ndarray:
    """x @ W, with the intercepts."""
    d = x.shape[1]
    z = x @ w[:d]
    if intercept:
        z += w[d]
    return z


def _pull(x: Any, r: np.ndarray, intercept: bool, g: np.ndarray) -> None:
    """Add x^t @ R to g, with the intercepts."""
    d = x.shape[1]
    g[:d] += x.T @ r
    if intercept:
        g[d] += np.ones(len(r), r.dtype) @ r


def _parts(loss: Loss, n: int, wide: int) -> list[tuple[slice, Loss]]:
    """The rows in blocks, and the loss of each, where they have `wide` numbers; one block where the loss can't be parted."""
    step = max(_LEAST, _BLOCK // wide)
    if n < 2 * step or loss.of_rows(slice(0, step)) is None:
        return [(slice(0, n), loss)]
    blocks = [slice(i, min(i + step, n)) for i in range(0, n, step)]
    return [(rows, part) for rows in blocks if (part := loss.of_rows(rows)) is not None]


Preconditioner = Callable[[np.ndarray, bool], np.ndarray]  # `f(v, transposed)`: T v, or T^t v


def first_preconditioner(x: Any, weights: np.ndarray, curvature: float, l2: float, intercept: bool) -> Preconditioner:
    """One T for all classes, from the curvature at equal scores."""
    n, d = x.shape[0], x.shape[1] + intercept
    if d <= _FULL:
        step = max(1, n // (_ROWS * d))
        share = weights[::step].astype(np.float64)
        share *= curvature / max(share.sum(), np.finfo(np.float64).tiny)
        full = _whiten(x[::step], share, l2, intercept)
        if full is not None:
            return lambda v, transposed: (full.T if transposed else full) @ v
    return _scaling(x, (curvature * weights)[:, None], l2, intercept)


def second_preconditioner(
    x: Any, weights: np.ndarray, curvature: np.ndarray, l2: float, intercept: bool
) -> Preconditioner | None:
    """One T for each class, from its curvature at the current point, which is overwritten; None where that is too expensive or fails."""
    n, d, k = x.shape[0], x.shape[1] + intercept, curvature.shape[1]
    curvature *= weights[:, None]
    if d > _FULL:
        return _scaling(x, curvature, l2, intercept)
    count = min(n, _ROWS * d, 20 * n // d)  # as expensive as ten iterations
    if count < min(2 * d, n) or k * d * d > 4_000_000:
        return None
    mass = curvature.sum(axis=1)
    pick = np.sort(np.argpartition(-mass, count - 1)[:count])
    picked_mass = float(mass[pick].sum())
    factor = float(mass.sum()) / picked_mass if picked_mass > 0 else 1.0
    rows, parts = x[pick], (factor * curvature[pick]).astype(np.float64)
    stack = np.empty((k, d, d), x.dtype)
    for j in range(k):
        full = _whiten(rows, parts[:, j], l2, intercept)
        if full is None:
            return None
        stack[j] = full
    flipped = stack.transpose(0, 2, 1)
    return lambda v, transposed: np.matmul(flipped if transposed else stack, v.T[:, :, None])[:, :, 0].T


def late_preconditioner(
    x: Any, weights: np.ndarray, curvature: np.ndarray, l2: float, intercept: bool
) -> Preconditioner | None:
    """One matrix T for all classes, from the mean of their curvatures."""
    step = max(1, x.shape[0] // (_ROWS * (x.shape[1] + intercept)))
    share = (weights * curvature.mean(axis=1))[::step].astype(np.float64)
    share *= float(weights.sum() / weights[::step].sum())
    full = _whiten(x[::step], share, l2, intercept)
    return None if full is None else lambda v, transposed: (full.T if transposed else full) @ v


def _scaling(x: Any, curvature: np.ndarray, l2: float, intercept: bool) -> Preconditioner:
    """A diagonal T, from the diagonal of `x^t curvature x + l2` for each column of curvature."""
    d = x.shape[1]
    square = (x * x if isinstance(x, np.ndarray) else x.multiply(x)).T @ curvature
    scale = np.empty((d + intercept, curvature.shape[1]))
    scale[:d] = square + l2
    if intercept:
        scale[d] = curvature.sum(axis=0)
    low = 1e-12 * scale.max(axis=0)
    scale = np.where(scale > low, scale, np.where(low > 0, low, 1.0)) ** -0.5
    scale = scale.astype(x.dtype)
    return lambda v, transposed: scale * v


def _whiten(x: np.ndarray, weights: np.ndarray, l2: float, intercept: bool) -> np.ndarray | None:
    """T such that `T T^t` is the inverse of `x^t weights x + l2`; None if it has none."""
    d = x.shape[1]
    gram = np.empty((d + intercept, d + intercept))
    if isinstance(x, np.ndarray):
        a = x * np.sqrt(weights)[:, None]
        gram[:d, :d] = a.T @ a
    else:
        a = x.copy()
        a.data = a.data * np.repeat(weights, np.diff(x.indptr))
        gram[:d, :d] = (x.T @ a).toarray()
    if intercept:
        gram[d, :d] = gram[:d, d] = x.T @ weights
        gram[d, d] = weights.sum()
    gram[range(d), range(d)] += l2
    ends = np.diag(gram)
    size = np.sqrt(np.where(ends > 0, ends, 1.0))  # 1 for a feature that is 0 in all rows
    gram /= np.outer(size, size)
    gram[range(len(size)), range(len(size))] = 1 + 1e-7
    try:
        low = linalg.cholesky(gram, lower=True, overwrite_a=True, check_finite=False)
    except linalg.LinAlgError:
        return None
    (inverted,) = linalg.get_lapack_funcs(("trtri",), (low,))
    inverse = inverted(low, lower=True)[0].T / size[:, None]
    return inverse.astype(x.dtype) if np.isfinite(inverse).all() else None
