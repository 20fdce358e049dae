"""Intervals of 95 % and what they say about a claim. Nothing here knows of files or experiments."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

CONFIDENCE = 0.95
CONFIRMED, CONTRADICTED, UNDECIDED, NOT_TESTED = "confirmed", "contradicted", "undecided", "not tested"
MOST_FIGURES = 200  # of a mean that are saved with it
_MINUS = re.compile(r"(?:^|(?<=[\s(|\[]))-(?=\s|\d|log)|(?<=\bn)-(?=1\b)|(?<=\))-(?=\d)")


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval, and how that was found. One seed tells no spread: its interval is the whole line.

    `figures` are what the mean is of, one a seed; of a comparison, those of both sides.
    """

    mean: float
    low: float
    high: float
    n: int
    method: str
    figures: tuple[tuple[float, ...], ...] = dataclasses.field(default=(), repr=False)

    def __str__(self) -> str:
        """The mean with two digits of half the interval where that is symmetric, else with two digits of all of it."""
        width = self.high - self.low
        if width <= 1e-12 * abs(self.mean):
            return number(self.mean)
        if not math.isfinite(width):
            return f"{number(self.mean)} (no interval)"
        if self.method.startswith("t over"):
            half = self.high - self.mean
            return f"{number(self.mean, half)} ± {number(half, half)}"
        mean, low, high = (number(end, width) for end in (self.mean, self.low, self.high))
        return f"{mean} [{low}, {high}]"

    def as_json(self) -> dict[str, Any]:
        ends = {k: v if math.isfinite(v) else None for k, v in (("low", self.low), ("high", self.high))}
        figures = {"figures": [list(side) for side in self.figures]} if self.figures else {}
        return {"mean": self.mean, **ends, "n": self.n, "method": self.method, **figures}


def from_json(known: Mapping[str, Any]) -> Interval:
    """The interval that `as_json` has written."""
    low, high = (end if known[k] is None else known[k] for k, end in (("low", -math.inf), ("high", math.inf)))
    figures = tuple(tuple(side) for side in known.get("figures", ()))
    return Interval(known["mean"], low, high, known["n"], known["method"], figures)


def interval(cell: Interval | Mapping[str, Any]) -> Interval:
    """A cell of a table as a run has it, or as a JSON file does."""
    return cell if isinstance(cell, Interval) else from_json(cell)


def exact(value: float) -> Interval:
    """A figure without chance in it: the same data, the same split, a convex objective."""
    return Interval(float(value), float(value), float(value), 1, "one value, no chance in it")


def over_seeds(values: Sequence[float]) -> Interval:
    """Student's t interval of the mean over seeds."""
    return over(values, "seeds")


def over(values: Sequence[float], of: str) -> Interval:
    """Student's t interval of the mean over whatever the figures are `of`."""
    mean, half, n = _student(np.asarray(values, dtype=float))
    return Interval(mean, mean - half, mean + half, n, f"t over {n} {of}", _figures(values))


def difference(ours: Sequence[float], theirs: Sequence[float], of: str = "seeds") -> Interval:
    """The mean of ours - theirs, paired by seed, or by whatever else the figures are `of`."""
    a, b = _paired(ours, theirs)
    mean, half, n = _student(a - b)
    return Interval(mean, mean - half, mean + half, n, f"t over {n} {of}, paired", _figures(a, b))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """The geometric mean of ours / theirs, paired by seed; the interval is Student's t of the logarithms."""
    a, b = _paired(ours, theirs)
    if not (np.all(a > 0) and np.all(b > 0)):
        raise ValueError("ratio: expected positive numbers only; use difference() where a figure may be 0 or negative")
    mean, half, n = _student(np.log(a) - np.log(b))
    ends = (math.exp(mean - half), math.exp(mean + half))
    return Interval(math.exp(mean), *ends, n, f"t of logarithms over {n} seeds, paired", _figures(a, b))


def bootstrap(statistic: Callable[..., float], *rows: np.ndarray, draws: int = 1000, seed: int = 0) -> Interval:
    """The percentile interval of `statistic(*rows)` when the rows of all arrays are drawn again together, with replacement.

    For one trained model: it holds the chance in the test set, not that of training. Draws where the statistic is NaN don't count.
    """
    n = len(rows[0])
    if any(len(r) != n for r in rows):
        raise ValueError(f"bootstrap: arrays of {[len(r) for r in rows]} rows; expected the same number in each")
    rng = np.random.default_rng(seed)
    indices = (rng.integers(0, n, size=n) for _ in range(draws))
    drawn = [statistic(*(r[index] for r in rows)) for index in indices]
    return from_draws(float(statistic(*rows)), drawn, n)


def from_draws(value: float, drawn: Any, n: int) -> Interval:
    """The percentile interval of a bootstrap over `n` test rows, from the statistic of each draw."""
    tail = 50.0 * (1.0 - CONFIDENCE)
    low, high = np.nanpercentile(np.asarray(drawn, dtype=float), (tail, 100.0 - tail))
    return Interval(value, float(low), float(high), n, f"bootstrap over {n} test rows")


def verdict(interval: Interval, *, at_most: float | None = None, at_least: float | None = None) -> str:
    """Confirmed where the whole interval keeps the bound, contradicted where none of it does, else undecided."""
    if (at_most is None) == (at_least is None):
        raise ValueError("verdict: give exactly one of at_most and at_least")
    low, high, bound = interval.low, interval.high, at_most
    if bound is None:
        assert at_least is not None
        low, high, bound = -interval.high, -interval.low, -at_least
    if math.isnan(low) or math.isnan(high):
        return UNDECIDED
    return CONFIRMED if high <= bound else CONTRADICTED if low > bound else UNDECIDED


def all_of(verdicts: Sequence[str]) -> str:
    """The verdict on a claim with several tests: one contradiction contradicts it, all must confirm it."""
    if CONTRADICTED in verdicts:
        return CONTRADICTED
    return CONFIRMED if verdicts and set(verdicts) == {CONFIRMED} else UNDECIDED


def _student(values: np.ndarray) -> tuple[float, float, int]:
    from scipy.stats import t  # late: listing the experiments needs no scipy

    n = len(values)
    if n == 0:
        raise ValueError("an interval of no values: expected the figure of at least one seed")
    half = t.ppf(0.5 + CONFIDENCE / 2, n - 1) * values.std(ddof=1) / math.sqrt(n) if n > 1 else math.inf
    return float(values.mean()), float(half), n


def _figures(*sides: Any) -> tuple[tuple[float, ...], ...]:
    """Those of each side, where they are few: a seed has one, and thousands of test rows are in no page."""
    return tuple(tuple(float(v) for v in side) for side in sides) if len(sides[0]) <= MOST_FIGURES else ()


def _paired(ours: Sequence[float], theirs: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.asarray(ours, dtype=float), np.asarray(theirs, dtype=float)
    if a.shape != b.shape or a.ndim != 1:
        raise ValueError(f"expected two lists with one figure a seed, got shapes {a.shape} and {b.shape}")
    return a, b


def number(value: float, spread: float | None = None) -> str:
    """A figure as pages show it: with the decimals that two digits of its spread have, or with four digits of its own."""
    if spread is None:
        text = f"{value:,.0f}" if value == round(value) and abs(value) >= 1000 else f"{value:.4g}"
        return signs(re.sub(r"(e[+-])0", r"\1", text))
    decimals = 1 - int(f"{spread:.1e}".partition("e")[2])
    rounded = round(value * (1 + 1e-12), decimals)  # 1.45 to 1.5, as people round
    return signs(f"{rounded:z,.{max(0, decimals)}f}")


def signs(words: str) -> str:
    """The words with each hyphen that means minus as a minus; code stays as it is."""
    parts = words.split("`")
    parts[::2] = [_MINUS.sub("\N{MINUS SIGN}", part) for part in parts[::2]]
    return "`".join(parts)
