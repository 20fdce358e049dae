"""From scores to sets of labels: the best level above which a label is chosen, among all levels that change a decision.

A label is chosen if its rank exceeds the level. If the level is a threshold, the rank is the label's probability; if it is a scale,
the rank is the scale of the scores up to which the label is in the support. One sort of all ranks and a few running sums give
the F1 of every level.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse
from sklearn.metrics import accuracy_score, f1_score, precision_score, recall_score

from .._core.mapping import Mapping
from ..functional import apply
from .losses import exponent_of

_MOST = 200  # levels tried with a user's function, and levels kept in `cv_results_`
_CHUNK = 1 << 16  # differences between scores computed at a time, few enough for a cache


def entering(c: float, z: np.ndarray) -> np.ndarray:
    """The temperature above which the class of each score is in the support of entmax(z / T), alpha = 1 + c; 0 for the largest score.

    Class j is in the support if `sum_i (c (z_i - z_j)_+ / T)^(1/c) < 1`: with the threshold at z_j, the classes above j have a mass
    below 1. This is T > c times the (1/c)-norm of the leads over j. A score of -inf never enters, but scores equal to the largest
    have 0, also if they are +inf or all scores of the row are -inf.
    """
    z = z.astype(np.float64)
    endless = np.isposinf(z).any(axis=1, keepdims=True)
    z = np.where(endless, np.where(np.isposinf(z), 0.0, -np.inf), z)
    high, below = z.max(axis=1, keepdims=True), np.isneginf(z)
    with np.errstate(invalid="ignore"):
        lead = np.where(below, 0.0, high - z)  # of the largest score over each class, exact far from 0 too
    if c == 1.0:
        order = np.argsort(np.where(below, np.inf, lead), axis=1, kind="stable")
        fall = np.take_along_axis(lead, order, 1)
        out = np.empty_like(lead)
        np.put_along_axis(out, order, np.arange(1, z.shape[1] + 1) * fall - np.cumsum(fall, axis=1), 1)
    else:
        out, unit = np.empty_like(lead), np.where(lead > 0, lead, 1.0)
        step = max(1, _CHUNK // z.shape[1] ** 2)
        for at in range(0, len(z), step):
            part, one, gone = lead[at : at + step], unit[at : at + step], below[at : at + step]
            over = np.maximum(part[:, :, None] - part[:, None, :], 0.0)  # the lead of i over j: [j, i]
            leads = np.where(gone[:, None, :], 0.0, over)
            out[at : at + step] = c * one * ((leads / one[:, :, None]) ** (1.0 / c)).sum(axis=2) ** c
    out[below] = np.inf
    out[z == high] = 0.0
    return out


def lasting(mapping: Mapping, z: np.ndarray) -> np.ndarray:
    """The scale up to which the class of each score is in the support of `map(scale * z)`; inf for the largest score.

    For maps other than entmax, 64 scales from 0.1 to 100 are tried.
    """
    c = exponent_of(mapping)
    if c is not None and c > 0:
        with np.errstate(divide="ignore"):
            return 1.0 / entering(c, z)
    z = z.astype(np.float64)
    scales, out = np.geomspace(0.1, 100.0, 64), np.zeros(z.shape)
    for scale in scales:
        out = np.where(apply(mapping, z * scale) > 0, scale * (1 + 1e-9), out)
    out[z == z.max(axis=1, keepdims=True)] = np.inf
    return out


def best(
    ranks: np.ndarray, truth: np.ndarray, scoring: Any, to_try: list[float] | None, scales: bool
) -> tuple[float, dict[str, np.ndarray]]:
    """The level with the best score, and the levels tried. `to_try`: the levels to try, None for all that change a decision."""
    score: Callable[[Any, Any], Any] = scoring if callable(scoring) else SCORES[scoring].score
    if to_try is None:
        cuts = Cuts(ranks, scales)
        if not callable(scoring):
            scores = SCORES[scoring].along(truth, cuts.order)
            scores[~cuts.possible] = -np.inf
            top = int(np.argmax(scores))
            shown = np.unique(np.r_[cuts.some(), top])
            return float(cuts.levels(np.array([top]))[0]), {"level": cuts.levels(shown), "score": scores[shown]}
        to_try = list(cuts.levels(cuts.some()))
    exact = sparse.csr_matrix(truth.astype(np.int64))
    scores = [float(score(exact, sparse.csr_matrix((ranks > level).astype(np.int64)))) for level in to_try]
    return to_try[int(np.argmax(scores))], {"level": np.asarray(to_try), "score": np.asarray(scores)}


class Cuts:
    """The levels that change a decision, each known by the number of labels that it chooses."""

    def __init__(self, ranks: np.ndarray, scales: bool) -> None:
        self.ranks, self.scales = np.asarray(ranks, np.float64).reshape(-1), scales
        self.order = np.argsort(-self.ranks, kind="stable")  # in which labels are chosen
        fall = self.ranks[self.order]
        self.always, self.most = int(np.isposinf(fall).sum()), int((fall > 0).sum())
        self.possible = np.zeros(len(fall) + 1, np.bool_)  # the numbers of chosen labels
        self.possible[self.always : self.most] = True
        self.possible[1:-1] &= fall[:-1] > fall[1:]
        self.possible[[self.always, self.most]] = True

    def some(self) -> np.ndarray:
        """Some of the numbers, evenly spread."""
        counts = np.flatnonzero(self.possible)
        return counts[np.unique(np.linspace(0, len(counts) - 1, min(len(counts), _MOST)).round().astype(int))]

    def levels(self, counts: np.ndarray) -> np.ndarray:
        """The levels that choose so many labels: between two ranks, or beyond the first or the last that depends on the level."""
        if self.always == self.most:
            return np.full(len(counts), 1.0 if self.scales else 0.5)
        inner = np.clip(counts, self.always + 1, self.most - 1)
        high, low = self.ranks[self.order[inner - 1]], self.ranks[self.order[np.minimum(inner, self.most - 1)]]
        between = np.sqrt(high * low) if self.scales else 0.5 * (high + low)
        between = np.where(between < high, between, low)  # where rounding gave the upper neighbour
        first, last = self.ranks[self.order[[self.always, self.most - 1]]]
        top = 2.0 * first if self.scales else min(0.5 * (1.0 + first), 1.0)
        return np.where(counts == self.always, top, np.where(counts == self.most, 0.5 * last, between))


class _Score(NamedTuple):
    """A score of sets of labels."""

    score: Callable[[Any, Any], float]  # of two indicator matrices
    # of (truth, order), after each label that is chosen in this order
    along: Callable[[np.ndarray, np.ndarray], np.ndarray]


def _running(truth: np.ndarray, order: np.ndarray, axis: int) -> tuple[Any, Any, Any, Any]:
    """After each chosen label, counts in its group (its column or its row): correct, chosen and true labels; then the group."""
    right = truth.reshape(-1)[order].astype(np.float64)
    group = order % truth.shape[1] if axis == 1 else order // truth.shape[1]
    by = np.argsort(group, kind="stable")
    sums, starts = np.cumsum(right[by]), np.searchsorted(group[by], np.arange(truth.shape[axis]))
    before = (sums - right[by])[starts]
    hits, count = np.empty(len(by)), np.empty(len(by))
    hits[by] = sums - before[group[by]]
    count[by] = np.arange(1, len(by) + 1) - starts[group[by]]
    return hits, count, truth.sum(axis=1 - axis)[group].astype(np.float64), group


def _mean(truth: np.ndarray, order: np.ndarray, axis: int, each: Callable[[Any, Any, Any], Any]) -> np.ndarray:
    """The mean over the groups of `each(right, chosen, wanted)`, before the first label and after each."""
    hits, count, wanted, group = _running(truth, order, axis)
    value = each(hits, count, wanted)
    at_first = float(np.mean(each(0.0, 0.0, truth.sum(axis=1 - axis))))
    before = each(hits - truth.reshape(-1)[order], count - 1, wanted)
    return at_first + np.r_[0.0, np.cumsum(value - before) / (group.max() + 1)]


def _micro(truth: np.ndarray, order: np.ndarray) -> np.ndarray:
    """F1 over all labels, before the first and after each; a few at a time."""
    right, out, hits = truth.reshape(-1)[order], np.zeros(len(order) + 1), 0
    wanted = right.sum()
    for at in range(0, len(order), _CHUNK):
        after = hits + np.cumsum(right[at : at + _CHUNK])
        hits = after[-1]
        out[at + 1 : at + 1 + len(after)] = _f1_of(after, np.arange(at + 1, at + 1 + len(after)), wanted)
    return out


def _f1_of(hits: Any, count: Any, wanted: Any) -> Any:
    return 2 * hits / np.maximum(count + wanted, 1)


def _equal(hits: Any, count: Any, wanted: Any) -> Any:
    return ((hits == wanted) & (count == wanted)).astype(np.float64)


def _means(truth: np.ndarray, order: np.ndarray) -> np.ndarray:
    precision = _mean(truth, order, 1, lambda hits, count, wanted: hits / np.maximum(count, 1))
    recall = _mean(truth, order, 1, lambda hits, count, wanted: hits / np.maximum(wanted, 1))
    both = precision + recall
    return 2 * precision * recall / np.where(both > 0, both, 1.0)


_SILENT: dict[str, Any] = {"zero_division": 0}


def _f1(average: str) -> Callable[[Any, Any], float]:
    return lambda truth, found: f1_score(truth, found, average=average, **_SILENT)


def _f1_of_means(truth: Any, found: Any) -> float:
    precision = precision_score(truth, found, average="macro", **_SILENT)
    recall = recall_score(truth, found, average="macro", **_SILENT)
    return 2 * precision * recall / (precision + recall) if precision + recall > 0 else 0.0


SCORES = {
    "f1_micro": _Score(_f1("micro"), _micro),
    "f1_macro": _Score(_f1("macro"), lambda truth, order: _mean(truth, order, 1, _f1_of)),
    "f1_samples": _Score(_f1("samples"), lambda truth, order: _mean(truth, order, 0, _f1_of)),
    "f1_of_means": _Score(_f1_of_means, _means),
    "accuracy": _Score(accuracy_score, lambda truth, order: _mean(truth, order, 0, _equal)),
}
