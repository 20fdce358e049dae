"""Training that sees its rows a few at a time: the step of `partial_fit`, which has no rate to be tuned.

Distance over gradients (Ivgi, Hinder and Carmon 2023): the step of a feature is the largest distance that its coefficients have come
from their start, over the root of the sum of its squared gradients; the average of the points, the late ones weighing more, is
the outcome (Shamir and Zhang 2013). The coordinates are those of centred features of variance 1, by the means and squares of
the rows seen so far, and so neither units nor offsets of the features matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import sparse

from .losses import Loss

_FAR = 0.3  # the first distance of a feature, over the root of the number of features
_LATE = 8.0  # how much more late points weigh in the average
_BATCH, _WIDE_BATCH, _WIDE = 32, 256, 512  # rows a step; with so many features a step costs more than its rows


class Stream:
    """A linear model on the way: where it stands, and what its steps need to know of the rows seen so far."""

    def __init__(self, start: np.ndarray, intercept: bool, weight: float) -> None:
        """start: W, [features, classes], with one more row for the intercepts; weight: of the rows that it is the outcome of."""
        self.w, self.mean_w, self.intercept = start.astype(np.float64), start.astype(np.float64), intercept
        self.walked = np.zeros_like(self.w)  # from the start, in the coordinates of the steps
        self.d = len(start) - intercept
        rows = (len(start), 1)
        self.far, self.squared = np.full(rows, _FAR / max(self.d, 1) ** 0.5), np.zeros(rows)
        self.center, self.square = np.zeros(self.d), np.zeros(self.d)  # of the features
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
        """Visit the rows x once, in this order; `loss_of(rows, share)` is the loss of some of them, their shares summing to 1.

        `l2_of` gives the penalty from the weight of all rows so far. `seen(rows, scores)` is told the scores of rows before the step
        that learns from them.
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
        """Learn from a few rows; their scores before that."""
        self._look(x, share, mass)
        z = np.asarray(x @ self.mean_w[: self.d]) + (self.mean_w[self.d] if self.intercept else 0.0)
        _, residual = loss(np.asarray(x @ self.w[: self.d]) + (self.w[self.d] if self.intercept else 0.0))
        variance = self.square - self.center**2 if self.intercept else self.square
        low = 1e-12 * np.where(self.square > 0, self.square, 1.0)
        scale = np.where(variance > low, np.maximum(variance, low), np.inf) ** -0.5  # 0 for a feature that is constant
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
        """The running means of the features and of their squares."""
        self.looked += mass
        part = mass / self.looked
        self.center += part * (share @ x - self.center)
        self.square += part * (share @ (x.multiply(x) if sparse.issparse(x) else x * x) - self.square)
