"""The objective of a linear model: the mean loss of `x @ W` and `l2 / 2 ||W||^2`, dense or CSR, in the dtype of the data.

`W` is [features, classes], with one more row, not penalised, for the intercepts. L-BFGS walks in coordinates V with
`W = T V`, in which the objective is round: `T T^t` is near the inverse of `c x^t x / n + l2`, the bound of its Hessian that all
classes share (Boehning 1992). For CSR data, and for very many features, T is diagonal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import kernels
from ._array import quiet
from ._mapping import Mapping
from .functional import apply, log_apply, logsumexp, softmax
from .losses import fenchel_young, nll

_FULL = 512  # features up to which T is a matrix
_ROWS = 16  # times as many rows as features are enough to find it

Loss = Callable[[np.ndarray], tuple[float, np.ndarray]]  # scores -> mean loss, its gradient


# -- losses: the weights of the rows sum to 1 --------------------------------------------------------------------------------


def index_loss(mapping: Mapping, target: np.ndarray, weights: np.ndarray) -> Loss:
    """The map's own loss of class indices: Fenchel-Young where it has a potential, -log p where not."""
    wide = weights.astype(np.float64)

    def loss(z: np.ndarray) -> tuple[float, np.ndarray]:
        rows, residual = _by_index(mapping, z, target, weights)
        return float(rows @ wide), residual

    return loss


def binary_loss(mapping: Mapping, target: np.ndarray, weights: np.ndarray) -> Loss:
    """The same for two classes with the scores (0, z), one column of z."""
    both = index_loss(mapping, target, weights)

    def loss(z: np.ndarray) -> tuple[float, np.ndarray]:
        value, residual = both(pair(z))
        return value, np.ascontiguousarray(residual[:, 1:])

    return loss


def pair(z: np.ndarray) -> np.ndarray:
    """The scores (0, z) of two classes."""
    two = np.zeros((len(z), 2), z.dtype)
    two[:, 1] = z.reshape(-1)
    return two


def label_loss(mapping: Mapping, labels: Any, weights: np.ndarray) -> Loss:
    """The loss of the target that spreads its mass evenly over the labels of each row; `labels` is CSR, no row is empty.

    The loss is affine in the target but for the entropy of the target, so the loss of one label is mended where the labels are.
    """
    n, count = labels.shape[0], np.diff(labels.indptr)
    columns, rows = labels.indices, np.repeat(np.arange(n), count)
    first = columns[labels.indptr[:-1]].astype(np.int64)
    each = np.arange(n)
    share = (1.0 / count).astype(weights.dtype)
    part = (weights * share)[rows]
    wide = weights.astype(np.float64)
    constant = _entropies(mapping, count) @ wide

    if not mapping.facts.has_potential:
        target = np.zeros(labels.shape, weights.dtype)
        target[rows, columns] = share[rows]

        def plain(z: np.ndarray) -> tuple[float, np.ndarray]:
            value = nll(mapping, z, target, reduction="none", axis=-1)
            return float(value @ wide), _pull_log(mapping, z, target * weights[:, None])

        return plain

    def loss(z: np.ndarray) -> tuple[float, np.ndarray]:
        value, residual = _by_index(mapping, z, first, weights)
        chosen = np.add.reduceat(z[rows, columns], labels.indptr[:-1]) * share
        value = value + (z[each, first] - chosen)
        residual[each, first] += weights
        residual[rows, columns] -= part
        return float(value @ wide) + constant, residual

    return loss


def _entropies(mapping: Mapping, count: np.ndarray) -> np.ndarray:
    """Omega of the even distribution over so many labels."""
    if not mapping.facts.has_potential:
        return np.zeros(len(count))
    sizes, where = np.unique(count, return_inverse=True)
    values = [float(mapping.constant(np.full((1, k), 1.0 / k), np).item()) for k in sizes]
    return np.asarray(values)[where]


def sigmoid_loss(labels: Any, weights: np.ndarray) -> Loss:
    """A logistic regression for each label: the sum over labels of `log(1 + exp(z)) - y z`."""
    y, wide = _dense(labels, weights.dtype), weights.astype(np.float64)

    def loss(z: np.ndarray) -> tuple[float, np.ndarray]:
        value = np.logaddexp(0, z) - y * z
        return float(value.sum(axis=1) @ wide), (sigmoid(z) - y) * weights[:, None]

    return loss


def sigmoid(z: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * z))


def zlpr_loss(labels: Any, weights: np.ndarray) -> Loss:
    """`multilabel_softmax_loss` with its gradient: two softmaxes, each with a class of score 0 beside the labels'."""
    y, wide = _dense(labels, np.bool_), weights.astype(np.float64)

    def loss(z: np.ndarray) -> tuple[float, np.ndarray]:
        rest, own = np.where(y, -np.inf, z), np.where(y, -z, -np.inf)
        rest, own = (np.concatenate([np.zeros((len(z), 1), z.dtype), a], axis=1) for a in (rest, own))
        value = (logsumexp(rest, -1) + logsumexp(own, -1)) @ wide
        return float(value), (softmax(rest)[:, 1:] - softmax(own)[:, 1:]) * weights[:, None]

    return loss


def _dense(labels: Any, dtype: Any) -> np.ndarray:
    return labels.toarray().astype(dtype)


def _by_index(
    mapping: Mapping, z: np.ndarray, target: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The loss of each row, and `weights (p - y)`."""
    if not mapping.facts.has_potential:
        y = np.zeros_like(z)
        y[np.arange(len(z)), target] = weights
        return nll(mapping, z, target, reduction="none", axis=-1), _pull_log(mapping, z, y)
    engine = kernels.compiled("index_loss", mapping, z)
    if engine is not None:
        value, saved, tau = engine.index_loss(mapping, z, target, True)
        return value, engine.index_loss_grad(mapping, z, target, weights, saved, tau)
    value = fenchel_young(mapping, z, target, reduction="none", axis=-1)
    p = apply(mapping, z)
    p[np.arange(len(z)), target] -= 1
    return value, p * weights[:, None]


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
        self.x, self.loss, self.l2 = x, loss, l2
        self.d = x.shape[1]
        self.ones = np.ones(x.shape[0], x.dtype) if intercept else None
        self.round = _rounding(x, weights, curvature, l2, intercept)
        self.put(start)
        self.worst = np.inf

    def put(self, w: np.ndarray) -> None:
        """Go to W."""
        self.w, self.z = w, self.times(w)
        self.next = np.empty_like(self.z)
        self.size = self.square(w)
        mean, self.residual = self.loss(self.z)
        self.value = mean + 0.5 * self.l2 * self.size

    def times(self, w: np.ndarray) -> np.ndarray:
        """x @ W, with the intercepts."""
        z = np.asarray(self.x @ (w[: self.d] if w.shape[1] > 1 else w[: self.d, 0])).reshape(-1, w.shape[1])
        if self.ones is not None:
            z += w[self.d]
        return z

    def pull(self, r: np.ndarray) -> np.ndarray:
        """x^t @ R, with the intercepts."""
        k = r.shape[1]
        g = np.empty((self.d + (self.ones is not None), k), r.dtype)
        g[: self.d] = (self.x.T @ (r if k > 1 else r[:, 0])).reshape(-1, k)
        if self.ones is not None:
            g[self.d] = self.ones @ r
        return g

    def square(self, w: np.ndarray) -> float:
        flat = w[: self.d].reshape(-1)
        return float(np.dot(flat, flat))

    def slope(self) -> np.ndarray:
        """The gradient in W."""
        g = self.pull(self.residual)
        g[: self.d] += self.l2 * self.w[: self.d]
        self.worst = float(max(g.max(), -g.min()))
        return g

    def gradient(self) -> np.ndarray:
        return self.round(self.slope(), True).reshape(-1)

    def steepest(self) -> float:
        return self.worst

    def aim(self, direction: np.ndarray) -> None:
        self.dw = self.round(direction.reshape(self.w.shape), False)
        self.dz = self.times(self.dw)
        self.cross = float(np.dot(self.w[: self.d].reshape(-1), self.dw[: self.d].reshape(-1)))
        self.stride = self.square(self.dw)

    def look(self, step: float) -> tuple[float, float]:
        np.multiply(self.dz, self.dz.dtype.type(step), out=self.next)
        self.next += self.z
        mean, self.residual = self.loss(self.next)
        pull = float(np.dot(self.residual.reshape(-1), self.dz.reshape(-1)))
        size = self.size + step * (2.0 * self.cross + step * self.stride)
        self.there = mean + 0.5 * self.l2 * size, size
        return self.there[0], pull + self.l2 * (self.cross + step * self.stride)

    def move(self, step: float) -> None:
        self.z, self.next = self.next, self.z
        self.w += self.dw.dtype.type(step) * self.dw
        self.value, self.size = self.there


Rounding = Callable[[np.ndarray, bool], np.ndarray]


def _rounding(x: Any, weights: np.ndarray, curvature: float, l2: float, intercept: bool) -> Rounding:
    """`f(v, transposed)`: T v, or T^t v."""
    d, dense = x.shape[1] + intercept, isinstance(x, np.ndarray)
    if dense and d <= _FULL and d <= x.shape[0]:
        full = _matrix(x, weights, curvature, l2, intercept)
        if full is not None:
            return lambda v, transposed: (full.T if transposed else full) @ v
    square = np.einsum("ij,ij,i->j", x, x, weights) if dense else x.multiply(x).T @ weights
    scale = np.full((d, 1), curvature)
    scale[: x.shape[1], 0] = curvature * np.asarray(square).reshape(-1) + l2
    scale = np.where(scale > 0, scale, 1.0) ** -0.5
    scale = scale.astype(x.dtype)
    return lambda v, transposed: scale * v


def _matrix(x: np.ndarray, weights: np.ndarray, curvature: float, l2: float, intercept: bool) -> np.ndarray | None:
    n, d = x.shape
    rows = x[:: max(1, n // (_ROWS * (d + 1)))]
    share = weights[:: max(1, n // (_ROWS * (d + 1)))].astype(np.float64)
    share = share / max(share.sum(), np.finfo(np.float64).tiny)
    a = rows * np.sqrt(curvature * share)[:, None]
    if intercept:
        a = np.concatenate([a, np.sqrt(curvature * share)[:, None]], axis=1)
    gram = a.T @ a
    gram[range(d), range(d)] += l2
    ends = range(len(gram))
    gram[ends, ends] += 1e-7 * gram[ends, ends] + np.finfo(np.float64).tiny
    size = np.sqrt(np.diag(gram))
    try:
        low = np.linalg.cholesky(gram / np.outer(size, size))
        inverse = np.linalg.inv(low).T / size[:, None]
    except np.linalg.LinAlgError:
        return None
    return inverse.astype(x.dtype) if np.isfinite(inverse).all() else None
