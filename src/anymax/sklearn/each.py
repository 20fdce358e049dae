"""A logistic regression for each label, trained for a few labels at a time.

L-BFGS runs on the labels side by side: a product with the data serves all of them, but each has its own pairs, steps and end, and leaves
when it is done. All share one decomposition of the features, from which the preconditioner of each label follows: its curvature is close
to that where every row has the label's mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .blocks import Blocks
from .solvers import complaint_of

_FEW, _MANY, _WIDE, _MOST = 1 << 14, 1 << 17, 16, 32  # scores and labels at a time
_FULL, _LATE = 512, 1536  # up to this many features the decomposition is cheap, or pays off with many labels
_ROWS = 16  # this many rows per feature are enough for it
_FLOOR = 1e-9
_MEMORY, _LOOKS = 8, 20
_ARMIJO, _CURVATURE = 1e-4, 0.5
_CLEAR = 0.75  # the labels that are done leave when no more than this share is left


class Features:
    """The second moments of the features: their directions and sizes, or sizes alone where there are many features."""

    @np.errstate(over="ignore", invalid="ignore")
    def __init__(self, x: Any, weights: np.ndarray, k: int, intercept: bool) -> None:
        n, d = x.shape
        self.directions: np.ndarray | None = None
        self.mean: np.ndarray | None = None
        if d > _FULL and (d > _LATE or d * d > 10 * n * k):
            squares = x * x if isinstance(x, np.ndarray) else x.multiply(x)
            self.size = _finite(np.asarray(squares.T @ (weights / weights.sum()), np.float64), x.dtype)
            return
        step = max(1, n // (_ROWS * (d + 1)))
        x, share = x[::step], weights[::step].astype(np.float64)
        share = share / max(share.sum(), np.finfo(np.float64).tiny)
        weighted = x * share[:, None] if isinstance(x, np.ndarray) else x.multiply(share[:, None]).tocsr()
        moments = x.T @ weighted
        moments = np.asarray(moments if isinstance(moments, np.ndarray) else moments.toarray(), np.float64)
        if intercept:
            self.mean = np.asarray(x.T @ share, np.float64)
            moments -= np.outer(self.mean, self.mean)
        size, directions = np.linalg.eigh(_finite(moments, x.dtype))
        self.size, self.directions = np.maximum(size, 0.0), directions.astype(x.dtype)

    def scale(self, curvature: np.ndarray, l2: float, intercept: bool) -> np.ndarray:
        """The scale of each direction and label, where the labels have these curvatures."""
        inverse = np.multiply.outer(self.size, curvature) + l2
        inverse = np.maximum(inverse, np.maximum(_FLOOR * inverse.max(axis=0), np.finfo(np.float32).tiny))
        return (np.concatenate([inverse, curvature[None]]) if intercept else inverse) ** -0.5

    def forth(self, scaled: np.ndarray) -> np.ndarray:
        """W from its scaled coordinates."""
        if self.directions is None:
            return scaled
        d, out = len(self.size), scaled.copy()
        out[:d] = self.directions @ scaled[:d]
        if self.mean is not None:
            out[d] -= self.mean.astype(out.dtype) @ out[:d]
        return out

    def back(self, g: np.ndarray) -> np.ndarray:
        """The gradient in the scaled coordinates, without the scale."""
        if self.directions is None:
            return g
        d, out = len(self.size), g.copy()
        if self.mean is not None:
            out[:d] -= np.multiply.outer(self.mean.astype(g.dtype), g[d])
        out[:d] = self.directions.T @ out[:d]
        return out


def _finite(moments: np.ndarray, dtype: Any) -> np.ndarray:
    if not np.isfinite(moments).all():
        raise ValueError(
            f"squares of the features overflow in {np.dtype(dtype).name}; scale them (sklearn.preprocessing.StandardScaler)"
        )
    return moments


class _Some:
    """Some labels in training."""

    def __init__(
        self, x: Any, y: np.ndarray, share: np.ndarray, l2: float, w: np.ndarray, scale: np.ndarray, features: Features
    ) -> None:
        self.x, self.y, self.share, self.l2, self.w, self.scale, self.features = x, y, share, l2, w, scale, features
        self.d, self.active, self.intercept = x.shape[1], np.arange(y.shape[1]), len(w) > x.shape[1]
        self.out, self.worst = w.copy(), np.full(y.shape[1], np.inf)
        self.values = np.zeros(y.shape[1])
        self.z = self.times(w)
        self.s: list[np.ndarray] = []
        self.g_of: list[np.ndarray] = []
        self.rho: list[np.ndarray] = []

    def times(self, w: np.ndarray) -> np.ndarray:
        z = self.x @ w[: self.d]
        if self.intercept:
            z += w[self.d]
        return z

    def loss(self, z: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The loss of each label without the penalty, and its gradient by the scores."""
        far = np.abs(z)
        np.exp(np.negative(far, out=far), out=far)
        over = 1 + far
        residual = np.where(z > 0, 1, far)
        residual /= over
        residual -= y
        residual *= self.share[:, None]
        value = np.log(over, out=over)
        value += np.maximum(z, 0, out=far)
        value -= np.multiply(y, z, out=far)
        return self.share @ value, residual

    def gradient(self, residual: np.ndarray) -> np.ndarray:
        """In the scaled coordinates; the largest entry of each label's own is kept."""
        g = np.empty_like(self.w)
        g[: self.d] = self.x.T @ residual
        g[: self.d] += self.l2 * self.w[: self.d]
        if self.intercept:
            g[self.d] = residual.sum(axis=0)
        self.worst[self.active] = np.maximum(g.max(axis=0), -g.min(axis=0))
        return self.features.back(g) * self.scale

    def direction(self, g: np.ndarray) -> np.ndarray:
        q, a = -g, []
        for s, y, rho in zip(self.s[::-1], self.g_of[::-1], self.rho[::-1]):
            a.append(rho * np.einsum("ij,ij->j", s, q))
            q -= a[-1] * y
        if self.s:
            square = np.einsum("ij,ij->j", self.g_of[-1], self.g_of[-1])
            safe = (self.rho[-1] > 0) & (square > 0)
            q *= np.where(safe, 1 / (np.where(safe, self.rho[-1], 1) * np.where(safe, square, 1)), 1).astype(q.dtype)
        for s, y, rho in zip(self.s, self.g_of, self.rho):
            q += (a.pop() - rho * np.einsum("ij,ij->j", y, q)) * s
        return q

    def add(self, s: np.ndarray, y: np.ndarray) -> None:
        along = np.einsum("ij,ij->j", s, y)
        self.s.append(s)
        self.g_of.append(y)
        self.rho.append(np.where(along > 0, 1 / np.where(along > 0, along, 1), 0).astype(s.dtype))
        if len(self.s) > _MEMORY:
            for oldest in (self.s, self.g_of, self.rho):
                oldest.pop(0)

    def search(
        self,
        left: np.ndarray,
        value: np.ndarray,
        residual: np.ndarray,
        slope: np.ndarray,
        dz: np.ndarray,
        dw: np.ndarray,
    ) -> np.ndarray:
        """The steps of the labels `left`, 0 where none lowers the value; `value` and `residual` become those there."""
        k, dtype = len(slope), self.z.dtype
        cross, stride = (self.l2 * np.einsum("ij,ij->j", a[: self.d], dw[: self.d]) for a in (self.w, dw))
        low, high, step = np.zeros(k), np.full(k, np.inf), np.ones(k)
        slope_low, slope_high = slope.copy(), np.full(k, np.nan)
        at, first = np.zeros(k), value.copy()
        eps = 4 * float(np.finfo(dtype).eps)
        for _ in range(_LOOKS):
            t = step[left]
            some = slice(None) if len(left) == k else left
            z = dz[:, some] * t.astype(dtype)
            z += self.z[:, some]
            loss, r = self.loss(z, self.y[:, some])
            f = loss + self.start_size[left] + t * (cross[left] + 0.5 * t * stride[left])
            d = np.einsum("ij,ij->j", r, dz[:, some]) + cross[left] + t * stride[left]
            lower = f <= first[left] + _ARMIJO * t * slope[left] + eps * np.abs(first[left])
            good = lower & (np.abs(d) <= -_CURVATURE * slope[left])
            keep = left[lower]  # the best so far, should no step be flat enough
            at[keep], value[keep], residual[:, keep] = t[lower], f[lower], r[:, lower]
            short = lower & (d < 0)
            before, slope_before = low[left], slope_low[left]
            low[left], slope_low[left] = np.where(short, t, before), np.where(short, d, slope_before)
            high[left], slope_high[left] = np.where(short, high[left], t), np.where(short, slope_high[left], d)
            with np.errstate(all="ignore"):
                bend = (d - slope_before) / (t - before)
                ahead = np.clip(np.where(bend > 0, t - d / bend, np.inf), 2 * t, 10 * t)
                width = high[left] - low[left]
                inside = low[left] - slope_low[left] * width / (slope_high[left] - slope_low[left])
                inside = np.clip(
                    np.where(slope_high[left] > 0, inside, low[left] + 0.3 * width),
                    low[left] + 0.1 * width,
                    high[left] - 0.1 * width,
                )
            step[left] = np.where(np.isinf(high[left]), ahead, inside)
            left = left[~good]
            if not len(left):
                break
        return at

    def leave(self, stay: np.ndarray) -> None:
        """Keep the labels where `stay` is True."""
        self.out[:, self.active[~stay]] = self.w[:, ~stay]
        self.active = self.active[stay]
        for name in ("w", "scale", "y", "z"):
            setattr(self, name, np.ascontiguousarray(getattr(self, name)[:, stay]))
        self.s, self.g_of = [a[:, stay] for a in self.s], [a[:, stay] for a in self.g_of]
        self.rho = [a[stay] for a in self.rho]

    def minimize(
        self, tol: float, max_iter: int, least: float, report: Callable[[int, float, float], Any] | None
    ) -> tuple[int, bool]:
        """Until no entry of the gradient exceeds `tol`, nor the expected decrease `tol` times the mean value of the labels, or `least`.

        The number of iterations, and whether rounding stopped some labels.
        """
        loss, residual = self.loss(self.z, self.y)
        self.start_size = 0.5 * self.l2 * np.einsum("ij,ij->j", self.w[: self.d], self.w[: self.d])
        value, g, stuck = loss + self.start_size, self.gradient(residual), False
        done = np.zeros(len(value), np.bool_)
        for k in range(max_iter + 1):
            direction = self.direction(g)
            slope = np.einsum("ij,ij->j", g, direction)
            if report is not None:
                report(k, float(value.sum()), float(self.worst.max()))
            self.values[self.active] = value
            near = (self.worst[self.active] <= tol) & (-0.5 * slope <= tol * max(float(self.values.mean()), least))
            lost = ~near & ~(slope < 0) & ~done
            stuck = stuck or bool(lost.any())
            done |= near | lost
            if done.all() or k == max_iter:
                break
            if (~done).sum() <= _CLEAR * len(done):
                stay = ~done
                self.leave(stay)
                value, slope, done = value[stay], slope[stay], done[stay]
                g, direction, residual = g[:, stay], direction[:, stay], residual[:, stay]
                self.start_size = self.start_size[stay]
            direction = np.where(done, 0, direction).astype(g.dtype)
            dw = self.features.forth(direction * self.scale)
            dz = self.times(dw)
            at = self.search(np.flatnonzero(~done), value, residual, slope, dz, dw)
            failed = (at == 0) & ~done
            stuck, done = stuck or bool(failed.any()), done | failed
            t = at.astype(g.dtype)
            self.w += t * dw
            self.z += t * dz
            self.start_size = 0.5 * self.l2 * np.einsum("ij,ij->j", self.w[: self.d], self.w[: self.d])
            last, g = g, self.gradient(residual)
            self.add(t * direction, g - last)
        self.out[:, self.active] = self.w
        return k, stuck


def fit_each(
    x: Any,
    labels: Any,
    share: np.ndarray,
    l2: float,
    w: np.ndarray,
    cold: bool,
    features: Features,
    tol: float,
    max_iter: int,
    report: Callable[[int, float, float], Any] | None,
) -> tuple[np.ndarray, int, str | None]:
    """W, the most iterations of a label, and a warning if one did not converge; a cold start begins at the labels' shares."""
    (n, k), d = labels.shape, x.shape[1]
    mean = np.asarray(labels.T @ share, np.float64).reshape(-1)
    mean = np.clip(mean, 0.5 / n, 1 - 0.5 / n)
    if cold and len(w) > d:
        w[d] = np.log(mean / (1 - mean))
    # few, or many where the features take more memory
    count = k if isinstance(x, Blocks) else min(max(_FEW // n, min(d // _WIDE, _MANY // n), 1), _MOST)
    order, labels = np.argsort(-mean, kind="stable"), labels.tocsc()
    most, worst, stuck, total = 0, 0.0, False, 0.0
    for at in range(0, k, count):
        some = order[at : at + count]
        scale = features.scale(mean[some] * (1 - mean[some]), l2, len(w) > d).astype(x.dtype)
        y = labels[:, some].toarray().astype(x.dtype)
        model = _Some(x, y, share, l2, np.ascontiguousarray(w[:, some]), scale, features)
        iterations, rounding = model.minimize(tol, max_iter, max(total / max(at, 1), tol), report)
        w[:, some] = model.out
        total += float(model.values.sum())
        most, worst, stuck = max(most, iterations), max(worst, float(model.worst.max())), stuck or rounding
    converged = worst <= tol and most < max_iter
    return w, most, None if converged else complaint_of(most, stuck, worst, tol, x.dtype)
