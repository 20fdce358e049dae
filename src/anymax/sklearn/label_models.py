"""From the scores z of labels to their loss and their probabilities: a map, or one of two baselines that have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .._array import quiet
from .._core.mapping import Mapping
from ..functional import apply, log_apply
from . import losses


class MapModel:
    """A map; with `none` its first class is "none", the empty set, whose score is 0."""

    def __init__(self, mapping: Mapping, none: bool) -> None:
        self.mapping, self.none = mapping, none

    def loss(self, labels: Any, share: np.ndarray) -> losses.Loss:
        """The loss of label sets; the weights `share` of the rows sum to 1."""
        loss = losses.SharesLoss(self.mapping, losses.evenly(labels, self.none), share)
        return losses.ZeroFirst(loss) if self.none else loss

    def curvature(self, k: int) -> float:
        """The largest curvature of the loss at equal scores of k labels."""
        return losses.bend(self.mapping, self.outcomes(k))

    def outcomes(self, k: int) -> int:
        """The number of outcomes among which smoothing spreads its weight."""
        return k + self.none

    def of_labels(self, f: Callable[[np.ndarray], np.ndarray], z: np.ndarray) -> np.ndarray:
        """f of the scores, for the labels alone: a class "none" is added before f, and dropped after it."""
        return f(losses.zero_first(z))[:, 1:] if self.none else f(z)

    def p(self, z: np.ndarray) -> np.ndarray:
        return self.of_labels(lambda z: apply(self.mapping, z), z)

    def log_p(self, z: np.ndarray) -> np.ndarray:
        with quiet(z):
            return self.of_labels(lambda z: log_apply(self.mapping, z), z)

    def empty(self, z: np.ndarray) -> np.ndarray:
        """True where "none" is the most probable class, [rows, 1]."""
        if not self.none:
            return np.zeros((len(z), 1), np.bool_)
        if self.mapping.facts.monotone:
            return z.max(axis=1, keepdims=True) <= 0.0
        p = self.p(z)
        return p.max(axis=1, keepdims=True) <= 1.0 - p.sum(axis=1, keepdims=True)


class SigmoidModel:
    """A logistic regression for each label."""

    def loss(self, labels: Any, share: np.ndarray) -> losses.Loss:
        return losses.SigmoidLoss(labels, share)

    def curvature(self, k: int) -> float:
        return 0.25

    def outcomes(self, k: int) -> int:
        return 2

    def p(self, z: np.ndarray) -> np.ndarray:
        return losses.sigmoid(z)

    def log_p(self, z: np.ndarray) -> np.ndarray:
        return -np.logaddexp(0, -z)

    def empty(self, z: np.ndarray) -> np.ndarray:
        return np.zeros((len(z), 1), np.bool_)


class ZlprModel(SigmoidModel):
    """`anymax.multilabel_softmax_loss`, with the sigmoid of each score."""

    def loss(self, labels: Any, share: np.ndarray) -> losses.Loss:
        return losses.ZlprLoss(labels, share)

    def curvature(self, k: int) -> float:
        return 1.0 / (k + 1)


BASELINES = {"sigmoid": SigmoidModel(), "zlpr": ZlprModel()}
