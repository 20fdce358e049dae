"""Training for `partial_fit`, in small batches and without a learning rate to tune.

Distance over gradients (Ivgi, Hinder and Carmon 2023): the step size of a feature is the largest distance of its coefficients from
their start, over the root of its summed squared gradients. The result is an average of the points in which late points weigh more
(Shamir and Zhang 2013). Steps are taken in coordinates of centred features with variance 1, estimated from the rows seen so
far, so that neither units nor offsets of the features matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import sparse

from .losses import Loss

_FAR = 0.3  # the initial distance of a feature times the root of the number of features
_LATE = 8.0  # the larger, the more late points weigh in the average
_BATCH, _WIDE_BATCH, _WIDE = 32, 256, 512  # rows per step, which is expensive with many features


class Stream:
    """A linear model in training: the current point, and the statistics of the rows seen so far."""

    def __init__(self, start: np.ndarray, intercept: bool, weight: float) -> None:
        """start: W, [features, classes], plus a row for the intercepts; weight: the weight of the rows that gave it."""
        self.w, self.mean_w, self.intercept = start.astype(np.float64), start.astype(np.float64), intercept
        self.walked = np.zeros_like(self.w)  # the displacement from the start, in the coordinates of the steps
        self.d = len(start) - intercept
        rows = (len(start), 1)
        self.far, self.squared = np.full(rows, _FAR / max(self.d, 1) ** 0.5), np.zeros(rows)
        self.center, self.square = np.zeros(self.d), np.zeros(self.d)  # means of the features and of their squares
        self.weight, self.looked, self.steps = weight, 0.0, 0

    def go(
        self,
        x: Any,
        weights: np.ndarray,
        loss_of: Callable[[np.ndarray, np.ndarray], Loss],
        l2_of: Callable[[float], float],
        order: np.ndarray,
        seen: Callable[[np.ndarray, np.ndarray], Any] | None = None,
    ) -> None:
        """Visit the rows x once, in this order; `loss_of(rows, share)` is the loss of a batch, whose shares sum to 1.

        `l2_of` maps the weight of all rows so far to the penalty. `seen(rows, scores)` receives the scores of a batch before the step
        that learns from it.
        """
        size = _BATCH if self.d <= _WIDE else _WIDE_BATCH
        for at in range(0, len(order), size):
            rows = order[at : at + size]
            mass = float(weights[rows].sum())
            if mass > 0:
                share = weights[rows] / mass
                self.weight += mass
                z = self.step(x[rows], share, mass, loss_of(rows, share), l2_of(self.weight))
                if seen is not None:
                    seen(rows, z)

    def step(self, x: Any, share: np.ndarray, mass: float, loss: Loss, l2: float) -> np.ndarray:
        """Learn from a batch; return its scores before that."""
        self._look(x, share, mass)
        z = np.asarray(x @ self.mean_w[: self.d]) + (self.mean_w[self.d] if self.intercept else 0.0)
        _, residual = loss(np.asarray(x @ self.w[: self.d]) + (self.w[self.d] if self.intercept else 0.0))
        variance = self.square - self.center**2 if self.intercept else self.square
        low = 1e-12 * np.where(self.square > 0, self.square, 1.0)
        scale = np.where(variance > low, np.maximum(variance, low), np.inf) ** -0.5  # 0 for a constant feature
        together = residual.sum(axis=0)
        g = np.empty_like(self.w)
        g[: self.d] = x.T @ residual + l2 * self.w[: self.d]
        if self.intercept:
            g[: self.d] -= self.center[:, None] * together
            g[self.d] = together
        g[: self.d] *= scale[:, None]
        self.squared += (g * g).sum(axis=1, keepdims=True)
        move = -self.far * g / np.sqrt(np.where(self.squared > 0, self.squared, 1.0))
        self.walked += move
        self.far = np.maximum(self.far, np.sqrt((self.walked * self.walked).sum(axis=1, keepdims=True)))
        move[: self.d] *= scale[:, None]
        if self.intercept:
            move[self.d] -= self.center @ move[: self.d]
        self.w += move
        self.steps += 1
        self.mean_w += (1.0 + _LATE) / (self.steps + _LATE) * (self.w - self.mean_w)
        return z

    def _look(self, x: Any, share: np.ndarray, mass: float) -> None:
        """Update the running means of the features and of their squares."""
        self.looked += mass
        part = mass / self.looked
        self.center += part * (share @ x - self.center)
        self.square += part * (share @ (x.multiply(x) if sparse.issparse(x) else x * x) - self.square)
