"""From the scores of labels to a set that training rows have, `decision="sets"`.

A set is worth the sum of its labels' scores above a threshold, plus `lift` times the logarithm of how many times as often it occurs as
its labels would meet by chance. The labels above the threshold are the set that is worth most without a lift, but perhaps no row has
it: a known set replaces them if it is worth at most `slack` less. Threshold, lift and slack are tuned together, on rows that the model
did not see; the known sets are then those of the rows that it did see.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from .losses import sigmoid

WEIGHTS = {"auto": (1.0, 1 / 3), "f1_micro": (1.0, 0.0), "accuracy": (0.0, 1.0)}  # of micro-F1 and of equal sets
_MOST = 2048  # the known sets; beyond, the commonest
_LIFTS = (0.0, 0.5)
_SLACKS = np.linspace(-10.0, 20.0, 61)
_THRESHOLDS = 16
_BLOCK, _CHUNK = 1 << 16, 1 << 15  # numbers computed at a time: for each set, and for each size or label
_SAMPLE = 1 << 17  # scores among which thresholds are looked for


class KnownSets:
    """The sets of some rows, the smallest first; the commonest `most` of them."""

    def __init__(self, labels: Any, most: int) -> None:
        n, k = labels.shape
        names = labels @ np.random.default_rng(0).integers(1 << 62, size=k)  # a number for each set
        _, first, count = np.unique(names, return_index=True, return_counts=True)
        common = np.argsort(-count, kind="stable")[: min(most, _MOST)]
        first, count = first[common], count[common]
        by_size = np.argsort(np.diff(labels.indptr)[first], kind="stable")
        self.sets = labels[first[by_size]].astype(np.float32)
        self.sizes, self.starts = np.unique(np.diff(self.sets.indptr), return_index=True)
        share = (np.asarray(labels.sum(axis=0)).reshape(-1) + 0.5) / (n + 1)
        chance = self.sets @ np.log(share / (1 - share)) + np.log1p(-share).sum()
        self.lifts = (np.log(count[by_size] / n) - chance).astype(np.float32)

    def blocks(self, n: int) -> Iterator[slice]:
        """Rows for which a number for each set, or each label, is computed at a time."""
        step = max(1, _BLOCK // max(self.sets.shape))
        return (slice(at, min(at + step, n)) for at in range(0, n, step))

    def best(self, worth: np.ndarray, lift: float) -> tuple[np.ndarray, np.ndarray]:
        """Of each size and row the best set and its worth; `worth`, at the threshold 0 without a lift, is [sets, rows]."""
        if lift:
            worth = worth + worth.dtype.type(lift) * self.lifts[:, None]
        ends, every = [*self.starts[1:], len(worth)], np.arange(worth.shape[1])
        at = np.stack([low + worth[low:high].argmax(axis=0) for low, high in zip(self.starts, ends)])
        return at, worth[at, every]


class SetRule:
    """The decision, once it is tuned."""

    def __init__(self, known: KnownSets, threshold: float, lift: float, slack: float) -> None:
        self.known, self.threshold, self.lift, self.slack = known, threshold, lift, slack

    def chosen(self, z: np.ndarray) -> np.ndarray:
        """True at the labels that the scores select."""
        out = z > self.threshold
        if self.slack == -np.inf:
            return out
        for rows in self.known.blocks(len(z)):
            part, every = z[rows], np.arange(rows.stop - rows.start)
            at, worth = self.known.best(self.known.sets @ part.T, self.lift)
            worth = worth - self.threshold * self.known.sizes[:, None]
            top = worth.argmax(axis=0)
            swapped = np.flatnonzero(worth_above(part, self.threshold) - worth[top, every] <= self.slack)
            out[rows.start + swapped] = self.known.sets[at[top, every][swapped]].toarray() > 0
        return out


def worth_above(z: np.ndarray, threshold: float) -> np.ndarray:
    return np.maximum(z - z.dtype.type(threshold), 0).sum(axis=1)


def thresholds(parts: list[np.ndarray], wanted: int) -> np.ndarray:
    """Thresholds that choose from 0.4 to 3 times as many labels as are right, and the one that chooses what is likelier than not."""
    step = 1 + sum(part.size for part in parts) // _SAMPLE
    z = np.concatenate([part.reshape(-1)[::step] for part in parts])
    np.negative(z, out=z)
    wanted //= step
    counts = np.geomspace(max(0.4 * wanted, 1.0), max(min(3.0 * wanted, len(z)), 1.0), _THRESHOLDS)
    counts = np.unique(np.minimum(counts.astype(int), len(z)) - 1)
    z.partition(counts)
    return np.unique(np.append(-z[counts].astype(np.float64), 0.0))


def tuned(
    folds: Iterable[tuple[np.ndarray, Any, KnownSets]], levels: np.ndarray, score_weights: tuple[float, float]
) -> tuple[tuple[float, float, float], np.ndarray]:
    """Threshold, lift and slack with the best score, and the best score of each threshold; of a fold: scores, labels, known sets."""
    # sums over rows of (right labels, chosen labels, equal sets): of the labels above a threshold, and what sets with a slack change
    plain = np.zeros((len(levels), 3))
    change = np.zeros((len(_LIFTS), len(levels), len(_SLACKS) + 1, 3))
    rows_of_all, wanted_of_all = 0, 0.0
    for z, labels, known in folds:
        rows_of_all += len(z)
        wanted_of_all += labels.nnz
        step = max(1, _CHUNK // max(z.shape[1], len(known.sizes)))
        for at in range(0, len(z), step):
            _count(z[at : at + step], labels[at : at + step], known, levels, plain, change)
    sums = plain[None, :, None] + np.concatenate([np.zeros_like(change[:, :, :1]), change.cumsum(axis=2)], axis=2)
    micro, equal = score_weights  # of micro-F1 and of equal sets
    score = micro * 2 * sums[..., 0] / np.maximum(sums[..., 1] + wanted_of_all, 1) + equal * sums[..., 2] / rows_of_all
    lift, level, slack = np.unravel_index(int(score.argmax()), score.shape)
    slacks = np.r_[-np.inf, _SLACKS, np.inf]
    return (float(levels[level]), _LIFTS[lift], float(slacks[slack])), score.max(axis=(0, 2))


def _count(
    z: np.ndarray, labels: Any, known: KnownSets, levels: np.ndarray, plain: np.ndarray, change: np.ndarray
) -> None:
    truth, wanted, sizes, every = labels.toarray() > 0, np.diff(labels.indptr), known.sizes, np.arange(len(z))
    best = [(np.empty((len(sizes), len(z)), z.dtype), np.empty((len(sizes), len(z)), np.float32)) for _ in _LIFTS]
    for rows in known.blocks(len(z)):
        worths, hits = known.sets @ z[rows].T, known.sets @ truth[rows].T.astype(np.float32)
        for lift, (worth, right) in zip(_LIFTS, best):
            at, worth[:, rows] = known.best(worths, lift)
            right[:, rows] = hits[at, every[: hits.shape[1]]]
    for i, level in enumerate(levels):
        above = z > level
        right, count = (above & truth).sum(axis=1), above.sum(axis=1)
        equal = (right == wanted) & (count == wanted)
        plain[i] += right.sum(), count.sum(), equal.sum()
        own = worth_above(z, level)
        for j, (worth, set_right) in enumerate(best):
            worth = worth - (level * sizes[:, None]).astype(worth.dtype)
            top = worth.argmax(axis=0)
            right_of, count_of = set_right[top, every], sizes[top]
            equal_of = (right_of == wanted) & (count_of == wanted)
            place = np.searchsorted(_SLACKS, own - worth[top, every])
            for m, gain in enumerate((right_of - right, count_of - count, equal_of.astype(np.float64) - equal)):
                change[j, i, :, m] += np.bincount(place, gain, minlength=len(_SLACKS) + 1)


def probability(level: float) -> float:
    return float(sigmoid(np.asarray(level)))


def score_of(probability: float) -> float:
    """The score of a label with this probability."""
    return float(np.log(probability) - np.log1p(-probability))
