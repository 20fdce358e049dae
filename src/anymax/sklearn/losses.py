"""The losses that train a linear model: the mean over the rows and its gradient by the scores."""

from __future__ import annotations

import copy
import functools
from typing import Any, Protocol

import numpy as np
from scipy import sparse

from .. import kernels
from .._array import quiet
from .._core.mapping import Mapping
from ..functional import apply, log_apply, softmax
from ..kernels.linked import link_of
from ..losses.verbs import fenchel_young, nll
from ..thresholds import logsumexp

NARROW = 64  # up to this many classes a loss is faster from p than in one pass
_ENTRIES = 1 << 22  # entries of targets that are made dense at a time


class Loss(Protocol):
    """A loss of scores [rows, classes]; the weights of the rows sum to 1."""

    def __call__(self, z: np.ndarray) -> tuple[float, np.ndarray]:
        """The mean loss and its gradient."""
        ...

    def curvature(self, z: np.ndarray) -> np.ndarray:
        """Approximate second derivatives by each score, without the weights."""
        ...

    def of_rows(self, rows: slice) -> Loss | None:
        """The part of the mean that some rows are; None where there is none."""
        ...


class IndexLoss:
    """The map's own loss of class indices."""

    def __init__(self, mapping: Mapping, target: np.ndarray, weights: np.ndarray) -> None:
        self.mapping, self.target, self.weights = mapping, target, weights
        self.wide = np.asarray(weights, np.float64)

    @property
    def each(self) -> np.ndarray:
        return np.arange(len(self.target))

    def __call__(self, z: np.ndarray) -> tuple[float, np.ndarray]:
        found = self.total(z) if z.dtype == np.float64 and 1 < z.shape[1] <= NARROW else None
        if found is not None:
            return found
        rows, residual = self.rows(z)
        return float(rows @ self.wide), residual

    def total(self, z: np.ndarray) -> tuple[float, np.ndarray] | None:
        """The mean of L = <p, x> - x_t + (1 - sum p^alpha) / (alpha c) for entmax, of -log p_t for softmax, without the loss of each row.

        For fp64 only, where the cancellation stays below the error of a mean. None unless alpha is 1, 1.5 or 2, and where p_t underflows.
        """
        c = exponent_of(self.mapping)
        if c not in (0.0, 0.5, 1.0):
            return None
        z = np.ascontiguousarray(z)
        p, at = apply(self.mapping, z), self.each * z.shape[1] + self.target
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
        if mapping.own_loss == "nll":
            y = np.zeros_like(z)
            y[self.each, target] = weights
            return nll(mapping, z, target, reduction="none", axis=-1), _pull_log(mapping, z, y)
        c = exponent_of(mapping)
        if c is not None and z.shape[1] <= NARROW:
            return self.from_p(z, c)
        engine = kernels.compiled("index_loss", mapping, z)
        found = engine.index_loss(mapping, z, target, save=True) if engine else None
        if engine and found is not None:
            gradient = engine.index_loss_grad(mapping, z, target, weights, found.saved)
            if gradient is not None:
                return found.value, gradient
        p = apply(mapping, z)
        p[self.each, target] -= 1
        return fenchel_young(mapping, z, target, reduction="none", axis=-1), p * weights[:, None]

    def from_p(self, z: np.ndarray, c: float) -> tuple[np.ndarray, np.ndarray]:
        """The loss of entmax, alpha = 1 + c, and its gradient from p, max p and u = x - max x alone.

        Insert sum p^alpha = c <p, x - tau> and max p = (c (max x - tau))^(1/c) in L = <p, x> - x_t + (1 - sum p^alpha) / (alpha c).
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

    def of_rows(self, rows: slice) -> IndexLoss:
        return IndexLoss(self.mapping, self.target[rows], self.weights[rows])


def exponent_of(mapping: Mapping) -> float | None:
    """alpha - 1 for entmax, with softmax and sparsemax; None for other maps."""
    link = link_of(mapping)
    if isinstance(link, str):
        return None
    own = link.param if link.params is None else link.params
    alpha = {"softmax": 1.0, "sparsemax": 2.0, "entmax": own}.get(link.kind)
    return None if alpha is None else alpha - 1.0


def bends(z: np.ndarray) -> np.ndarray:
    """The curvature for any map, approximated by the diagonal of softmax's Jacobian.

    The curvature of a sparse map can be 0 for most rows at this point, but not where the next steps lead.
    """
    p = softmax(z)
    return p * (1 - p)


class ZeroFirst:
    """A loss as a function of all scores but the first, which is 0 in all rows."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss

    def __call__(self, z: np.ndarray) -> tuple[float, np.ndarray]:
        value, residual = self.loss(zero_first(z))
        return value, residual[:, 1:]

    def curvature(self, z: np.ndarray) -> np.ndarray:
        return self.loss.curvature(zero_first(z))[:, 1:]

    def of_rows(self, rows: slice) -> ZeroFirst | None:
        part = self.loss.of_rows(rows)
        return None if part is None else ZeroFirst(part)


def zero_first(z: np.ndarray) -> np.ndarray:
    """The scores (0, z_1, ..., z_n), in the memory order of z."""
    out = np.zeros((len(z), z.shape[1] + 1), z.dtype, order="F" if z.flags.f_contiguous else "C")
    out[:, 1:] = z
    return out


class SharesLoss:
    """The loss of targets that are distributions; `shares` is CSR, its rows sum to 1 and none is empty.

    Apart from the target's entropy, a Fenchel-Young loss is affine in the target: take the loss of one label and correct it.
    """

    def __init__(self, mapping: Mapping, shares: Any, weights: np.ndarray) -> None:
        self.mapping, self.shares, self.weights = mapping, shares, weights

    @functools.cached_property
    def first(self) -> np.ndarray:
        """The first label of each row."""
        return self.shares.indices[self.shares.indptr[:-1]].astype(np.int64)

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """The row of each share."""
        return np.repeat(np.arange(self.shares.shape[0], dtype=np.int32), np.diff(self.shares.indptr))

    @functools.cached_property
    def share(self) -> np.ndarray:
        return self.shares.data.astype(self.weights.dtype, copy=False)

    @functools.cached_property
    def part(self) -> np.ndarray:
        return self.weights[self.rows] * self.share

    @functools.cached_property
    def one(self) -> IndexLoss:
        return IndexLoss(self.mapping, self.first, self.weights)

    @functools.cached_property
    def constant(self) -> float:
        return float(_entropies(self.mapping, self.shares) @ self.one.wide)

    def __call__(self, z: np.ndarray) -> tuple[float, np.ndarray]:
        if self.mapping.own_loss == "nll":
            target = np.zeros(z.shape, z.dtype)
            target[self.rows, self.shares.indices] = self.share
            value = nll(self.mapping, z, target, reduction="none", axis=-1)
            return float(value @ self.one.wide), _pull_log(self.mapping, z, target * self.weights[:, None])
        mean, residual = self.one(z)
        chosen = np.add.reduceat(z[self.rows, self.shares.indices] * self.share, self.shares.indptr[:-1])
        mean += float((z[self.one.each, self.first] - chosen) @ self.one.wide) + self.constant
        residual[self.one.each, self.first] += self.weights
        residual[self.rows, self.shares.indices] -= self.part
        return mean, residual

    def curvature(self, z: np.ndarray) -> np.ndarray:
        return bends(z)

    def of_rows(self, rows: slice) -> SharesLoss:
        return SharesLoss(self.mapping, self.shares[rows], self.weights[rows])


def evenly(labels: Any, none: bool) -> Any:
    """Equal shares for the labels of each row; `none` adds a first column, which has the share 1 in rows without labels."""
    count = np.diff(labels.indptr)
    if none:
        empty = sparse.csr_matrix((count == 0).astype(labels.dtype)[:, None])
        labels = sparse.hstack([empty, labels], "csr")
        count = np.maximum(count, 1)
    return sparse.csr_matrix((np.repeat(1.0 / count, count), labels.indices, labels.indptr), labels.shape)


def _entropies(mapping: Mapping, shares: Any) -> np.ndarray:
    """Omega of each row, 0 where the map's loss leaves it out; rows with equal shares of the same number of labels have the same value."""
    n, out = shares.shape[0], np.zeros(shares.shape[0])
    if mapping.own_loss != "fenchel_young":
        return out
    count = np.diff(shares.indptr)
    rows = np.repeat(np.arange(n), count)
    uneven = np.zeros(n, np.bool_)
    uneven[rows[np.abs(shares.data * count[rows] - 1) > 1e-12]] = True
    sizes, where = np.unique(count, return_inverse=True)
    out = np.asarray([float(mapping.constant(np.full((1, k), 1.0 / k), np).item()) for k in sizes])[where]
    for part in np.array_split(np.flatnonzero(uneven), 1 + uneven.sum() * shares.shape[1] // _ENTRIES):
        if len(part):
            out[part] = mapping.constant(shares[part].toarray().astype(np.float64), np)[:, 0]
    return out


class SigmoidLoss:
    """A logistic regression for each label: the sum over labels of `log(1 + exp(z)) - y z`."""

    def __init__(self, labels: Any, weights: np.ndarray) -> None:
        self.y, self.weights = np.asfortranarray(labels.toarray().astype(weights.dtype)), weights
        self.wide = np.asarray(weights, np.float64)

    def __call__(self, z: np.ndarray) -> tuple[float, np.ndarray]:
        far = np.exp(-np.abs(z))  # at most 1; exp and log are many times as fast as logaddexp
        value = np.maximum(z, 0) + np.log(1 + far) - self.y * z
        residual = np.where(z > 0, 1, far) / (1 + far) - self.y
        return float(value.sum(axis=1) @ self.wide), residual * self.weights[:, None]

    def curvature(self, z: np.ndarray) -> np.ndarray:
        p = sigmoid(z)
        return p * (1 - p)

    def of_rows(self, rows: slice) -> SigmoidLoss:
        out = copy.copy(self)
        out.y, out.weights, out.wide = self.y[rows], self.weights[rows], self.wide[rows]
        return out


def sigmoid(z: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * z))


class ZlprLoss:
    """`multilabel_softmax_loss` with its gradient: two softmaxes, each with the labels and a class of score 0."""

    def __init__(self, labels: Any, weights: np.ndarray) -> None:
        self.y, self.weights = labels.toarray().astype(np.bool_), weights
        self.wide = np.asarray(weights, np.float64)

    def sides(self, z: np.ndarray) -> list[np.ndarray]:
        return [zero_first(side) for side in (np.where(self.y, -np.inf, z), np.where(self.y, -z, -np.inf))]

    def __call__(self, z: np.ndarray) -> tuple[float, np.ndarray]:
        others, labels = self.sides(z)
        value = (logsumexp(others, -1) + logsumexp(labels, -1)) @ self.wide
        return float(value), (softmax(others)[:, 1:] - softmax(labels)[:, 1:]) * self.weights[:, None]

    def curvature(self, z: np.ndarray) -> np.ndarray:
        others, labels = (softmax(side)[:, 1:] for side in self.sides(z))
        p = others + labels
        return p * (1 - p)

    def of_rows(self, rows: slice) -> ZlprLoss:
        out = copy.copy(self)
        out.y, out.weights, out.wide = self.y[rows], self.weights[rows], self.wide[rows]
        return out


class LossOfSomeRows:
    """The loss of the rows that are True in `counted`; the other rows have the loss 0."""

    def __init__(self, counted: np.ndarray, loss: Loss) -> None:
        self.counted, self.loss = counted, loss

    def __call__(self, z: np.ndarray) -> tuple[float, np.ndarray]:
        value, part = self.loss(z[self.counted])
        residual = np.zeros_like(z)
        residual[self.counted] = part
        return value, residual

    def curvature(self, z: np.ndarray) -> np.ndarray:
        out = np.zeros_like(z)
        out[self.counted] = self.loss.curvature(z[self.counted])
        return out

    def of_rows(self, rows: slice) -> None:
        return None


def _pull_log(mapping: Mapping, z: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The gradient of `-<y, log p(z)>` by z."""
    p = apply(mapping, z)
    with quiet(p):
        g = np.where(y > 0, -y * np.exp(-log_apply(mapping, z)), 0)
    return kernels.choose("vjp", mapping, z).vjp(mapping, z, p, g.astype(z.dtype))


def bend(mapping: Mapping, n: int) -> float:
    """An estimate of the largest curvature of the map's loss at equal scores, from 0.001 to 1."""
    z = np.zeros((1, n))
    p = apply(mapping, z)
    g = np.zeros_like(z)
    g[0, int(np.argmax(p))] = 1.0
    top = float(np.max(np.abs(kernels.choose("vjp", mapping, z).vjp(mapping, z, p, g))))
    return min(max(top * (n / (n - 1) if n > 2 else 1.0), 1e-3), 1.0)
