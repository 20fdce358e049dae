"""The objective of a linear model: the mean loss of `x @ W` and `l2 / 2 ||W||^2`, dense or CSR, in the dtype of the data.

`W` is [features, classes], with one more row, not penalised, for the intercepts. L-BFGS walks in coordinates V with
`W = T V`, in which the objective is round: `T T^t` is near the inverse of `c x^t x / n + l2`, c the curvature of the loss: at
first where all scores are equal, the same for all classes (Boehning 1992), later that of each class at the point reached.
For many features T is diagonal.

Arrays of dense data have their columns one after another, those of CSR data their rows: so both kinds of product are quick.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from . import kernels
from ._array import quiet
from ._mapping import Mapping
from .functional import apply, log_apply, logsumexp, softmax
from .losses import fenchel_young, nll
from .mappings import Entmax, Softmax, Sparsemax

_FULL = 512  # features up to which T is a matrix
_ROWS = 16  # times as many rows as features are enough to find it
_NARROW = 64  # classes up to which a loss is quicker from p than in one pass


class Loss(Protocol):
    """A loss of scores [rows, classes]; the weights of the rows sum to 1."""

    def __call__(self, z: np.ndarray) -> tuple[float, np.ndarray]:
        """The mean loss and its gradient."""
        ...

    def curvature(self, z: np.ndarray) -> np.ndarray:
        """About the second derivatives in each score, without the weights."""
        ...


# -- losses ------------------------------------------------------------------------------------------------------------------


class IndexLoss:
    """The map's own loss of class indices: Fenchel-Young where it has a potential, -log p where not."""

    def __init__(self, mapping: Mapping, target: np.ndarray, weights: np.ndarray) -> None:
        self.mapping, self.target, self.weights = mapping, target, weights
        self.wide, self.each = weights.astype(np.float64), np.arange(len(target))
        self.z = self.p = np.empty((0, 0))  # kept: fresh pages cost more than what is computed in them

    def __call__(self, z: np.ndarray) -> tuple[float, np.ndarray]:
        found = self.total(z) if z.dtype == np.float64 and 1 < z.shape[1] <= _NARROW else None
        if found is not None:
            return found
        rows, residual = self.rows(z)
        return float(rows @ self.wide), residual

    def total(self, z: np.ndarray) -> tuple[float, np.ndarray] | None:
        """The mean of the losses at once, L = <p, x> - x_t + (1 - sum p^alpha) / (alpha c) of entmax, -log p_t of softmax.

        In doubles, where what cancels is below what a mean is known to. None for other maps, and where p_t is too small to be told from 0.
        """
        c = _exponent(self.mapping)
        if c not in (0.0, 0.5, 1.0):
            return None
        if self.p.shape != z.shape:
            self.z, self.p = np.empty(z.shape), np.empty(z.shape)
        if not z.flags.c_contiguous:
            self.z[:] = z
            z = self.z
        p, at = apply(self.mapping, z, out=self.p), self.each * z.shape[1] + self.target
        residual = p * self.wide[:, None]
        if c == 0:
            likely = p.reshape(-1)[at]
            if not likely.min() > 1e-300:
                return None
            value = -(self.wide @ np.log(likely))
        else:
            gap = np.vdot(residual, z) - self.wide @ z.reshape(-1)[at]
            value = gap + (self.wide.sum() - np.vdot(residual, p if c == 1 else np.sqrt(p, out=p))) / (c * (1 + c))
        residual.reshape(-1)[at] -= self.wide
        return float(value), residual

    def rows(self, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The loss of each row, and `weights (p - y)`."""
        mapping, target, weights = self.mapping, self.target, self.weights
        if not mapping.facts.has_potential:
            y = np.zeros_like(z)
            y[self.each, target] = weights
            return nll(mapping, z, target, reduction="none", axis=-1), _pull_log(mapping, z, y)
        c = _exponent(mapping)
        if c is not None and z.shape[1] <= _NARROW:
            return self.from_p(z, c)
        engine = kernels.compiled("index_loss", mapping, z)
        if engine is not None:
            value, saved, tau = engine.index_loss(mapping, z, target, True)
            return value, engine.index_loss_grad(mapping, z, target, weights, saved, tau)
        p = apply(mapping, z)
        p[self.each, target] -= 1
        return fenchel_young(mapping, z, target, reduction="none", axis=-1), p * weights[:, None]

    def from_p(self, z: np.ndarray, c: float) -> tuple[np.ndarray, np.ndarray]:
        """The loss of entmax, alpha = 1 + c, from p and the largest entries alone, u = x - max x:

        sum p^alpha = c <p, x - tau> and max p = (c (max x - tau))^(1/c) in L = <p, x> - x_t + (1 - sum p^alpha) / (alpha c).
        """
        rows_first = z.flags.c_contiguous and z.shape[1] > 1
        z = np.asfortranarray(z)
        p = apply(self.mapping, z)
        u = z - z.max(axis=1)[:, None]
        top = p.max(axis=1)
        rest = -np.log(top) if c == 0 else (1 - top**c) / c
        value = rest if c == 0 else (c * np.einsum("ij,ij->i", p, u) + rest) / (1 + c)
        value = value - u[self.each, self.target]
        p[self.each, self.target] -= 1
        p *= self.weights[:, None]
        return value, np.ascontiguousarray(p) if rows_first else p

    def curvature(self, z: np.ndarray) -> np.ndarray:
        return bends(z)


def _exponent(mapping: Mapping) -> float | None:
    """alpha - 1 of the maps that are entmax."""
    if type(mapping) is Entmax:
        return mapping.alpha - 1.0
    return {Softmax: 0.0, Sparsemax: 1.0}.get(type(mapping))


def bends(z: np.ndarray) -> np.ndarray:
    """Where the loss of any map bends: the diagonal of softmax's Jacobian.

    That of a sparse map is 0 for most rows at first sight, but not where the next steps lead.
    """
    p = softmax(z)
    return p * (1 - p)


class BinaryLoss:
    """The same for two classes with the scores (0, z), one column of z."""

    def __init__(self, mapping: Mapping, target: np.ndarray, weights: np.ndarray) -> None:
        self.both = IndexLoss(mapping, target, weights)

    def __call__(self, z: np.ndarray) -> tuple[float, np.ndarray]:
        value, residual = self.both(pair(z))
        return value, residual[:, 1:]

    def curvature(self, z: np.ndarray) -> np.ndarray:
        return self.both.curvature(pair(z))[:, 1:]


def pair(z: np.ndarray) -> np.ndarray:
    """The scores (0, z) of two classes."""
    two = np.zeros((len(z), 2), z.dtype, order="F")
    two[:, 1] = z.reshape(-1)
    return two


class LabelLoss:
    """The loss of the target that spreads its mass evenly over the labels of each row; `labels` is CSR, no row is empty.

    A Fenchel-Young loss is affine in the target but for the entropy of the target: the loss of one label is mended at the others.
    """

    def __init__(self, mapping: Mapping, labels: Any, weights: np.ndarray) -> None:
        n, count = labels.shape[0], np.diff(labels.indptr)
        self.columns, self.rows = labels.indices, np.repeat(np.arange(n), count)
        self.starts = labels.indptr[:-1]
        self.first = self.columns[self.starts].astype(np.int64)
        self.share = (1.0 / count).astype(weights.dtype)
        self.part = (weights * self.share)[self.rows]
        self.one = IndexLoss(mapping, self.first, weights)
        self.mapping, self.wide = mapping, self.one.wide
        self.weights = weights
        self.constant = float(_entropies(mapping, count) @ self.wide)
        self.shape = labels.shape

    def __call__(self, z: np.ndarray) -> tuple[float, np.ndarray]:
        if not self.mapping.facts.has_potential:
            target = np.zeros(self.shape, z.dtype)
            target[self.rows, self.columns] = self.share[self.rows]
            value = nll(self.mapping, z, target, reduction="none", axis=-1)
            return float(value @ self.wide), _pull_log(self.mapping, z, target * self.weights[:, None])
        value, residual = self.one.rows(z)
        chosen = np.add.reduceat(z[self.rows, self.columns], self.starts) * self.share
        value = value + (z[self.one.each, self.first] - chosen)
        residual[self.one.each, self.first] += self.weights
        residual[self.rows, self.columns] -= self.part
        return float(value @ self.wide) + self.constant, residual

    def curvature(self, z: np.ndarray) -> np.ndarray:
        return bends(z)


def _entropies(mapping: Mapping, count: np.ndarray) -> np.ndarray:
    """Omega of the even distribution over so many labels."""
    if not mapping.facts.has_potential:
        return np.zeros(len(count))
    sizes, where = np.unique(count, return_inverse=True)
    values = [float(mapping.constant(np.full((1, k), 1.0 / k), np).item()) for k in sizes]
    return np.asarray(values)[where]


class SigmoidLoss:
    """A logistic regression for each label: the sum over labels of `log(1 + exp(z)) - y z`."""

    def __init__(self, labels: Any, weights: np.ndarray) -> None:
        self.y, self.weights = np.asfortranarray(labels.toarray().astype(weights.dtype)), weights
        self.wide = weights.astype(np.float64)

    def __call__(self, z: np.ndarray) -> tuple[float, np.ndarray]:
        value = np.logaddexp(0, z) - self.y * z
        return float(value.sum(axis=1) @ self.wide), (sigmoid(z) - self.y) * self.weights[:, None]

    def curvature(self, z: np.ndarray) -> np.ndarray:
        p = sigmoid(z)
        return p * (1 - p)


def sigmoid(z: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * z))


class ZlprLoss:
    """`multilabel_softmax_loss` with its gradient: two softmaxes, each with a class of score 0 beside the labels'."""

    def __init__(self, labels: Any, weights: np.ndarray) -> None:
        self.y, self.weights = labels.toarray().astype(np.bool_), weights
        self.wide = weights.astype(np.float64)

    def sides(self, z: np.ndarray) -> list[np.ndarray]:
        sides = np.where(self.y, -np.inf, z), np.where(self.y, -z, -np.inf)
        return [np.concatenate([np.zeros((len(z), 1), z.dtype), a], axis=1) for a in sides]

    def __call__(self, z: np.ndarray) -> tuple[float, np.ndarray]:
        rest, own = self.sides(z)
        value = (logsumexp(rest, -1) + logsumexp(own, -1)) @ self.wide
        return float(value), (softmax(rest)[:, 1:] - softmax(own)[:, 1:]) * self.weights[:, None]

    def curvature(self, z: np.ndarray) -> np.ndarray:
        rest, own = (softmax(side)[:, 1:] for side in self.sides(z))
        p = rest + own
        return p * (1 - p)


def _pull_log(mapping: Mapping, z: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The gradient of `-<y, log p(z)>`."""
    p = apply(mapping, z)
    with quiet(p):
        g = np.where(y > 0, -y * np.exp(-log_apply(mapping, z)), 0)
    return kernels.choose("vjp", mapping, z).vjp(mapping, z, p, g.astype(z.dtype))


def bend(mapping: Mapping, n: int) -> float:
    """The largest curvature of the map's loss where all scores are equal."""
    z = np.zeros((1, n))
    p = apply(mapping, z)
    g = np.zeros_like(z)
    g[0, int(np.argmax(p))] = 1.0
    top = float(np.max(np.abs(kernels.choose("vjp", mapping, z).vjp(mapping, z, p, g))))
    return min(max(top * (n / (n - 1) if n > 2 else 1.0), 1e-3), 1.0)


# -- the objective --------------------------------------------------------------------------------------------------------------


class Linear:
    """The objective at a point W, as `_lbfgs.Problem`."""

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
        self.dense = isinstance(x, np.ndarray)
        self.order: Any = "F" if self.dense else "C"
        self.d = x.shape[1]
        self.ones = np.ones(x.shape[0], x.dtype) if intercept else None
        self.round = first_rounding(x, weights, curvature, l2, intercept)
        self.put(start)
        self.worst = np.inf

    def put(self, w: np.ndarray) -> None:
        """Go to W."""
        self.w = np.array(w, order=self.order)
        self.z = self.times(self.w) if w.any() else np.zeros((self.x.shape[0], w.shape[1]), w.dtype, order=self.order)
        self.next = np.empty_like(self.z)
        self.size = self.product(self.w, self.w)
        mean, self.residual = self.losses(self.z)
        self.value = mean + 0.5 * self.l2 * self.size

    def losses(self, z: np.ndarray) -> tuple[float, np.ndarray]:
        """The mean loss, and its gradient with the numbers lying as those of z do."""
        mean, residual = self.loss(z)
        return mean, np.asarray(residual, order=self.order)

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
        """The inner product of what is penalised."""
        flat = float(np.dot(_flat(a), _flat(b)))
        return flat if self.ones is None else flat - float(np.dot(a[self.d], b[self.d]))

    def slope(self) -> np.ndarray:
        """The gradient in W."""
        g = self.pull(self.residual)
        g[: self.d] += self.l2 * self.w[: self.d]
        self.worst = float(max(g.max(), -g.min()))
        return g

    def gradient(self) -> np.ndarray:
        return _flat(np.asarray(self.round(self.slope(), True), order=self.order))

    def steepest(self) -> float:
        return self.worst

    def aim(self, direction: np.ndarray) -> None:
        direction = direction.reshape(self.w.shape, order=self.order)
        self.dw = np.asarray(self.round(direction, False), order=self.order)
        self.dz = self.times(self.dw)
        self.cross, self.stride = self.product(self.w, self.dw), self.product(self.dw, self.dw)

    def look(self, step: float) -> tuple[float, float]:
        np.multiply(self.dz, self.dz.dtype.type(step), out=self.next)
        self.next += self.z
        mean, self.residual = self.losses(self.next)
        pull = float(np.dot(_flat(self.residual), _flat(self.dz)))
        size = self.size + step * (2.0 * self.cross + step * self.stride)
        self.there = mean + 0.5 * self.l2 * size, size
        return self.there[0], pull + self.l2 * (self.cross + step * self.stride)

    def move(self, step: float) -> None:
        self.z, self.next = self.next, self.z
        self.dw *= self.dw.dtype.type(step)
        self.w += self.dw
        self.value, self.size = self.there

    def refit(self) -> bool:
        if self.w.dtype == np.float32:
            self.put(self.w)  # free of what rounding has added to the scores on the way
        found = second_rounding(self.x, self.weights, self.loss.curvature(self.z), self.l2, self.ones is not None)
        if found is None:
            return False
        self.round = found
        return True


def _flat(a: np.ndarray) -> np.ndarray:
    """The numbers in the order in which they lie."""
    return a.T.reshape(-1) if a.flags.f_contiguous else a.reshape(-1)


Rounding = Callable[[np.ndarray, bool], np.ndarray]  # `f(v, transposed)`: T v, or T^t v


def first_rounding(x: Any, weights: np.ndarray, curvature: float, l2: float, intercept: bool) -> Rounding:
    """The same for all classes."""
    n, d = x.shape[0], x.shape[1] + intercept
    if d <= _FULL:
        step = max(1, n // (_ROWS * d))
        share = weights[::step].astype(np.float64)
        share *= curvature / max(share.sum(), np.finfo(np.float64).tiny)
        full = _whiten(x[::step], share, l2, intercept)
        if full is not None:
            return lambda v, transposed: (v.T @ (full if transposed else full.T)).T
    return _scaling(x, (curvature * weights)[:, None], l2, intercept)


def second_rounding(x: Any, weights: np.ndarray, curvature: np.ndarray, l2: float, intercept: bool) -> Rounding | None:
    """One for each class."""
    n, d, k = x.shape[0], x.shape[1] + intercept, curvature.shape[1]
    curvature = curvature * weights[:, None]
    if d > _FULL:
        return _scaling(x, curvature, l2, intercept)
    count = min(n, _ROWS * d, 20 * n // d)  # ten iterations cost as much
    if count < min(2 * d, n) or k * d * d > 4_000_000:
        return None
    mass = curvature.sum(axis=1)
    pick = np.sort(np.argpartition(-mass, count - 1)[:count])
    kept = float(mass[pick].sum())
    factor = float(mass.sum()) / kept if kept > 0 else 1.0
    rows, parts = x[pick], (factor * curvature[pick]).astype(np.float64)
    all_full = [_whiten(rows, parts[:, j], l2, intercept) for j in range(k)]
    if any(full is None for full in all_full):
        return None
    stack = np.stack(all_full)  # type: ignore[arg-type]
    turned = np.ascontiguousarray(stack.transpose(0, 2, 1))
    return lambda v, transposed: np.matmul(turned if transposed else stack, v.T[:, :, None])[:, :, 0].T


def _scaling(x: Any, curvature: np.ndarray, l2: float, intercept: bool) -> Rounding:
    """The diagonal of `x^t curvature x + l2`, for each column of curvature."""
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
    """T with `T T^t` the inverse of `x^t weights x + l2`."""
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
    size = np.sqrt(np.where(ends > 0, ends, 1.0))  # of a feature that is 0 in all rows: 1
    gram /= np.outer(size, size)
    gram[range(len(size)), range(len(size))] = 1 + 1e-7
    try:
        low = np.linalg.cholesky(gram)
        inverse = np.linalg.inv(low).T / size[:, None]
    except np.linalg.LinAlgError:
        return None
    return inverse.astype(x.dtype) if np.isfinite(inverse).all() else None
