"""The objective of a linear model: the mean loss of `x @ W` plus `l2 / 2 ||W||^2`, for dense or CSR x, in the dtype of x.

`W` is [features, classes], plus a row for the intercepts, which are not penalised. L-BFGS works in coordinates V with
`W = T V`, a preconditioner: `T T^t` is close to the inverse of `c x^t x / n + l2`, where c is the curvature of the loss. At first
c is the curvature at equal scores, the same for all classes (Boehning 1992); later it is that of each class at the current
point. With many features T is diagonal, and a matrix only if that turns out to be slow.

W and the scores are stored by columns for dense x and by rows for CSR x, so that products with x and x^t are fast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import linalg

from .losses import NARROW, Loss

_FULL = 512  # up to this many features T is a matrix
_LATE = 1536  # up to this many T becomes a matrix if two diagonals were not enough
_BLOCK = 1 << 17  # scores whose loss is computed at a time
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
        self.x, self.loss, self.l2, self.weights = x, loss, l2, weights
        self.parts = _parts(loss, x.shape[0], start.shape[1])
        self.dense = isinstance(x, np.ndarray)
        self.order: Any = "F" if self.dense else "C"
        self.d = x.shape[1]
        self.ones = np.ones(x.shape[0], x.dtype) if intercept else None
        self.precondition = first_preconditioner(x, weights, curvature, l2, intercept)
        self.put(start)
        self.worst, self.refits = np.inf, 0

    def put(self, w: np.ndarray) -> None:
        """Set the point to W."""
        self.w = np.array(w, order=self.order)
        self.z = self.times(self.w) if w.any() else np.zeros((self.x.shape[0], w.shape[1]), w.dtype, order=self.order)
        self.dz = np.empty((0, 0), w.dtype)
        self.residual = np.empty_like(self.z)
        self.next = np.empty_like(self.z) if len(self.parts) == 1 else None
        self.size = self.product(self.w, self.w)
        self.value = self.losses(None) + 0.5 * self.l2 * self.size

    def losses(self, step: float | None) -> float:
        """The mean loss at the point, or at a step on the line; its gradient is written to `residual`."""
        mean = 0.0
        for rows, loss in self.parts:
            value, residual = loss(self.z[rows] if step is None else self.there_of(rows, step))
            mean += value
            if len(self.parts) == 1:
                self.residual = np.asarray(residual, order=self.order)
            else:
                self.residual[rows] = residual
        return mean

    def there_of(self, rows: slice, step: float) -> np.ndarray:
        """Some rows of the scores at a step on the line; all of them are kept in `next`, which costs less than new memory."""
        z = np.multiply(self.dz[rows], self.dz.dtype.type(step), out=self.next)
        z += self.z[rows]
        return z

    def times(self, w: np.ndarray) -> np.ndarray:
        """x @ W, with the intercepts."""
        body = w[: self.d]
        if w.shape[1] == 1:
            z = (self.x @ body[:, 0])[:, None]
        else:
            z = (body.T @ self.x.T).T if self.dense else self.x @ body
        if self.ones is not None:
            z += w[self.d]
        return z

    def pull(self, r: np.ndarray) -> np.ndarray:
        """x^t @ R, with the intercepts."""
        k = r.shape[1]
        g = np.empty((self.d + (self.ones is not None), k), r.dtype, order=self.order)
        if k == 1:
            g[: self.d, 0] = self.x.T @ r[:, 0]
        elif self.dense:
            g[: self.d] = (r.T @ self.x).T
        else:
            g[: self.d] = self.x.T @ r
        if self.ones is not None:
            g[self.d] = self.ones @ r
        return g

    def product(self, a: np.ndarray, b: np.ndarray) -> float:
        """The inner product without the intercepts."""
        flat = float(np.dot(_flat(a), _flat(b)))
        return flat if self.ones is None else flat - float(np.dot(a[self.d], b[self.d]))

    def slope(self) -> np.ndarray:
        """The gradient in W."""
        g = self.pull(self.residual)
        g[: self.d] += self.l2 * self.w[: self.d]
        self.worst = float(max(g.max(), -g.min()))
        return g

    def gradient(self) -> np.ndarray:
        return _flat(np.asarray(self.precondition(self.slope(), True), order=self.order))

    def steepest(self) -> float:
        return self.worst

    def aim(self, direction: np.ndarray) -> None:
        direction = direction.reshape(self.w.shape, order=self.order)
        self.dw = np.asarray(self.precondition(direction, False), order=self.order)
        self.dz = self.times(self.dw)
        self.cross, self.stride = self.product(self.w, self.dw), self.product(self.dw, self.dw)

    def look(self, step: float) -> tuple[float, float]:
        mean = self.losses(step)
        pull = float(np.dot(_flat(self.residual), _flat(self.dz)))
        size = self.size + step * (2.0 * self.cross + step * self.stride)
        self.there = mean + 0.5 * self.l2 * size, size
        return self.there[0], pull + self.l2 * (self.cross + step * self.stride)

    def move(self, step: float) -> None:
        if self.next is not None:
            self.z, self.next = self.next, self.z
        else:
            for rows, _ in self.parts:
                self.z[rows] = self.there_of(rows, step)
        self.dw *= self.dw.dtype.type(step)
        self.w += self.dw
        self.value, self.size = self.there

    def refit(self) -> bool:
        if self.w.dtype == np.float32:
            self.put(self.w)  # compute the scores again, without the rounding errors of the updates
        self.refits += 1
        self.dz = np.empty((0, 0), self.z.dtype)  # the next line has another
        curvature = np.empty_like(self.z)
        for rows, loss in self.parts:
            curvature[rows] = loss.curvature(self.z[rows])
        if self.refits > 1 and _FULL < self.d + (self.ones is not None) <= _LATE:
            found = late_preconditioner(self.x, self.weights, curvature, self.l2, self.ones is not None)
        else:
            found = second_preconditioner(self.x, self.weights, curvature, self.l2, self.ones is not None)
        if found is None:
            return False
        self.precondition = found
        return True


def _parts(loss: Loss, n: int, k: int) -> list[tuple[slice, Loss]]:
    """The rows in blocks, and the loss of each; one block where there are many classes, or the loss can't be parted."""
    step = max(1, _BLOCK // k)
    if k > NARROW or n < 2 * step or loss.of_rows(slice(0, step)) is None:
        return [(slice(0, n), loss)]
    blocks = [slice(i, min(i + step, n)) for i in range(0, n, step)]
    return [(rows, part) for rows in blocks if (part := loss.of_rows(rows)) is not None]


def _flat(a: np.ndarray) -> np.ndarray:
    """The numbers in memory order."""
    return a.T.reshape(-1) if a.flags.f_contiguous else a.reshape(-1)


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
            return lambda v, transposed: (v.T @ (full if transposed else full.T)).T
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
    all_full = [_whiten(rows, parts[:, j], l2, intercept) for j in range(k)]
    if any(full is None for full in all_full):
        return None
    stack = np.stack(all_full)  # type: ignore[arg-type]
    transposes = np.ascontiguousarray(stack.transpose(0, 2, 1))
    return lambda v, transposed: np.matmul(transposes if transposed else stack, v.T[:, :, None])[:, :, 0].T


def late_preconditioner(
    x: Any, weights: np.ndarray, curvature: np.ndarray, l2: float, intercept: bool
) -> Preconditioner | None:
    """One matrix T for all classes, from the mean of their curvatures."""
    step = max(1, x.shape[0] // (_ROWS * (x.shape[1] + intercept)))
    share = (weights * curvature.mean(axis=1))[::step].astype(np.float64)
    share *= float(weights.sum() / weights[::step].sum())
    full = _whiten(x[::step], share, l2, intercept)
    return None if full is None else lambda v, transposed: (v.T @ (full if transposed else full.T)).T


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
    scale = np.asarray(scale, x.dtype, order="F" if isinstance(x, np.ndarray) else "C")
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
