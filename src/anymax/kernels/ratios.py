"""u of a ratio map, and its derivative, as tables of cubics for the C++ engine (csrc/tabled/ratios.hpp).

`weights` may look at the whole row: it returns u up to a factor of the row, and may as well return something that no function of one score
gives. So u is taken beside one fixed score, in rows of two, and rows of many are held to it; a map that they don't agree with has no table.
A call asks again for a few weights: those of a function that reads what has changed since are other ones.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .._array import namespace
from .._core.ratio_map import RatioMap
from .cubics import NODES, through

PER = (8, 16, 32, 64)  # cells of a unit, where they are of equal width
OCTAVE = (16, 32, 64, 128, 256)  # cells of an octave, where u falls to 0 at 0
MOST = 4096  # cells of equal width on either side of 0: 64 KB
MOST_OCTAVES = 8192  # cells of octaves, of which few are used at once
FARTHEST = 128.0  # scores beyond this have no cell
NEAREST = 4.0  # a table that ends before this is not worth it
LEAST = (-24, -16, -12)  # the first octave: a smaller |x| above 0 has no cell
WEIGHT = 1.5e-7  # the largest relative error of u
SLOPE = 2e-7  # the largest error of u', relative to |u'| + |u| / 2
SMALLEST, LARGEST = 2.0**-100, 2.0**100  # the values of u that have a cell: their sums stay in the range of fp32
AGREED = 1e-9  # how far u in a row of many may be from u in a row of two, relative to u
_ANCHORS = (1.0, 0.5, 2.0, -1.0, 0.0, -2.0)  # the score beside which u is taken: the first that has a u above 0
_BETWEEN = np.array([0.0, 0.1, 0.26, 0.5, 0.63, 0.87, 0.999])
_AT_ONCE = 256  # cells that are made at once, up to the first that misses
_FAR = np.concatenate([np.linspace(0.1, 3.9, 12), np.geomspace(4.3, 0.99 * FARTHEST, 24)])
# the scores that each call asks for again: near 0, and up to the ends of a table
_ASKED = np.concatenate([-_FAR[::-1], _FAR])

Pair = tuple[np.ndarray, np.ndarray]


class WeightNumbers(NamedTuple):
    """The numbers of weights in the order of `anymax_weights` in csrc/anymax.h, which says what each is."""

    above: int
    low: float  # the lowest score that has a cell
    high: float
    lost: float
    gone: float
    per: float
    least: float
    shift: float
    at_zero: float
    slope_at_zero: float

    def packed(self) -> np.ndarray:
        return np.array(self, np.float64)


class Weights(NamedTuple):
    """u as csrc/anymax.h describes it in `anymax_weights`."""

    cells: np.ndarray  # float32 [cells, 4], of u
    slopes: np.ndarray | None  # float32 [cells, 4], of u', or None
    no_slopes: str  # why there are none
    numbers: np.ndarray  # `WeightNumbers.packed`
    said: np.ndarray  # `_said` of the map

    def stand(self, mapping: RatioMap) -> bool:
        """True if the map still says what it said when they were made."""
        return np.array_equal(_said(mapping), self.said, equal_nan=True)


def weights_of(mapping: RatioMap) -> Weights | str:
    """The tables of a map, or a sentence that says why it has none."""
    rows = _rows_of(mapping)
    anchor = next(
        (a for a in _ANCHORS if _sound(rows(np.array([[a]]))[0]) and rows(np.array([[a]]))[0][0, 0] > 0), None
    )
    if anchor is None:
        return f"its u is 0 or infinite at {', '.join(map(str, _ANCHORS))}"

    def beside(t: np.ndarray) -> Pair:
        """u and u' of numbers of any shape, as shares of u at the anchor."""
        flat = np.ravel(t)
        u, du = rows(np.stack([flat, np.full_like(flat, anchor)], -1))
        return (u[:, 0] / u[:, 1]).reshape(np.shape(t)), (du[:, 0] / u[:, 1]).reshape(np.shape(t))

    if reason := _looks_beyond(rows, beside):
        return reason
    slopes = not mapping.traced
    found: Any = None
    for way in (_even, _octaves):
        sides = way(beside, slopes)
        found = found or sides if isinstance(sides, str) else sides
        if not isinstance(found, str):
            break
    if isinstance(found, str):
        return f"a table of its u {found}"
    (above, beneath), (d_above, d_beneath), numbers = found
    at_zero = beside(np.zeros(1))
    if not _sound(at_zero[0]) or not (_sound(at_zero[1]) or not slopes):
        return "its u or its derivative is infinite at 0"
    cells = np.concatenate([above, beneath])
    tilted = np.concatenate([d_above, d_beneath]) if slopes else None
    why = "" if slopes else "it has no derivative of u, so that the framework differentiates u itself"
    (low, high, per, least, shift), gone = numbers, [_gone(beside, sign, slopes) for sign in (-1.0, 1.0)]
    packed = WeightNumbers(
        len(above), low, high, lost=min(-gone[0], low), gone=max(gone[1], high), per=per, least=least, shift=shift,
        at_zero=at_zero[0][0], slope_at_zero=at_zero[1][0],
    ).packed()  # fmt: skip
    return Weights(cells, tilted, why, packed, _said(mapping))


def _said(mapping: RatioMap) -> np.ndarray:
    """u and u' of a few scores, which stay what they are for the same map."""
    return np.concatenate(_rows_of(mapping)(_ASKED[None]))


def _rows_of(mapping: RatioMap) -> Callable[[np.ndarray], Pair]:
    """`weights` of float64 rows. A function that takes no arrays of NumPy is given tensors."""

    def of(x: Any) -> Pair:
        xp = namespace(x)
        weights = mapping.weights(x, xp.ones_like(x) > 0, xp)
        u, du = (np.broadcast_to(np.asarray(a, np.float64), np.shape(x)) for a in weights)
        return u, du

    def rows(x: np.ndarray) -> Pair:
        x = np.ascontiguousarray(x, np.float64)
        torch = sys.modules.get("torch")
        try:
            return of(x)
        except Exception:
            if torch is None:
                raise
        with torch.no_grad():
            return of(torch.from_numpy(x))

    return rows


def _sound(u: np.ndarray) -> bool:
    return bool(np.all(np.isfinite(u)))


def _looks_beyond(rows: Callable[[np.ndarray], Pair], beside: Callable[[np.ndarray], Pair]) -> str | None:
    """Why u is no function of one score, up to a factor of the row; None if rows of many agree with those of two."""
    draw = np.random.default_rng(0)
    for n, size, shift in (
        (2, 1.0, 0.0),
        (3, 1.0, 1.0),
        (7, 3.0, 0.0),
        (40, 2.0, -1.0),
        (40, 0.1, 3.0),
        (600, 4.0, 0.0),
        (5, 20.0, 0.0),
    ):
        x = np.round(draw.normal(size=(2, n)) * size + shift, 3)
        x[1, : n // 2] = x[1, 0]  # ties
        alone = [rows(row[None]) for row in x]
        u, du = (np.concatenate(a) for a in zip(*alone))
        want, slope = beside(x)
        at = np.argmax(np.where(np.isfinite(u), u, -np.inf), -1)[:, None]
        top, level = np.take_along_axis(u, at, -1), np.take_along_axis(want, at, -1)
        ok = (top > 0) & np.isfinite(top) & np.isfinite(want) & np.isfinite(slope) & (want >= 0)
        ok &= (want > SMALLEST) | (u == want)  # what underflows beside the largest is told by no row
        with np.errstate(all="ignore"):
            share, rise = u / top * level, du / top * level
        near = np.abs(share - want) <= AGREED * np.abs(want) + 1e-300
        near &= np.abs(rise - slope) <= AGREED * (np.abs(slope) + np.abs(want)) + 1e-300
        whole = [(a[:, ::-1], b) for a, b in zip(rows(x[:, ::-1]), (u, du))]  # turned round, and side by side
        near &= np.logical_and(*(np.isclose(a, b, rtol=AGREED, atol=1e-300, equal_nan=True) for a, b in whole))
        if not np.all(near | ~ok):
            return "its u looks at more than one score: in rows of many it is not what it is in rows of two"
    return None


# -- cells ------------------------------------------------------------------------------------------------------------------------


def _even(beside: Callable[[np.ndarray], Pair], slopes: bool) -> Any:
    """((cells above 0, below), (those of u'), numbers) with cells of equal width; a sentence if they miss u near 0."""
    worst, best = "", None
    for per in PER:
        count = int(min(MOST, FARTHEST * per))
        width = np.full((count, 1), 1.0 / per)
        sides = [_side(beside, sign, np.arange(count)[:, None] / per, width, slopes) for sign in (1.0, -1.0)]
        ends = [len(side.u) / per for side in sides]
        if min(ends) > (min(best[0]) if best else NEAREST - 1e-9):
            best = ends, sides, (float(per), 0.0, 0.0)
        if best and (min(ends) >= 16.0 or not any(side.missed for side in sides)):
            break
        worst = worst or next((side.missed for side in sides if side.missed and len(side.u) < NEAREST * per), "")
    return _laid(best) if best else worst or "ends too near to 0"


def _octaves(beside: Callable[[np.ndarray], Pair], slopes: bool) -> Any:
    """What `_even` gives, with cells whose width is a share of |x|, for a u that falls to 0 at 0."""
    worst, best = "", None
    for first in LEAST:
        for cells in OCTAVE:
            octaves = min(round(math.log2(FARTHEST)) - first, MOST_OCTAVES // cells)
            start = np.repeat(2.0 ** (first + np.arange(octaves)), cells)[:, None]
            begin = start * (1.0 + np.tile(np.arange(cells), octaves)[:, None] / cells)
            sides = [_side(beside, sign, begin, start / cells, slopes) for sign in (1.0, -1.0)]
            ends = [float(np.append(begin[:, 0], 2.0 * start[-1])[len(side.u)]) for side in sides]
            if min(ends) > (min(best[0]) if best else NEAREST - 1e-9):
                best = ends, sides, (0.0, 2.0**first, 23.0 - math.log2(cells))
            if best and (min(ends) >= 16.0 or not any(side.missed for side in sides)):
                return _laid(best)
            worst = worst or next((side.missed for side in sides if side.missed), "")
        if all(len(side.u) for side in sides):  # what it misses is not near 0
            break
    return _laid(best) if best else worst or "ends too near to 0"


def _gone(beside: Callable[[np.ndarray], Pair], sign: float, slopes: bool) -> float:
    """The |x| from which on u, and u', are 0; infinity where there is none. People mask with large numbers, too."""
    sizes = np.append(2.0 ** np.arange(1.0, 127.5, 0.5), float(np.finfo(np.float32).max))
    with np.errstate(all="ignore"):
        u, du = beside(sign * sizes)
    some = np.flatnonzero(~((u == 0.0) & ((du == 0.0) | (not slopes))))
    first = int(some[-1]) + 1 if some.size else 0
    return float(sizes[first]) if first < len(sizes) - 4 else math.inf


def _laid(best: Any) -> Any:
    (above, beneath), sides, (per, least, shift) = best
    return (*zip(*((side.u, side.du) for side in sides)), (-beneath, above, per, least, shift))


class _Side(NamedTuple):
    """The cells on one side of 0, up to the first that misses, and what is wrong with that."""

    u: np.ndarray
    du: np.ndarray
    missed: str


def _side(
    beside: Callable[[np.ndarray], Pair], sign: float, begin: np.ndarray, width: np.ndarray, slopes: bool
) -> _Side:
    u, du, missed = [], [], ""
    for i in range(0, len(begin), _AT_ONCE):
        cells, fine, given = _cells(beside, sign, begin[i : i + _AT_ONCE], width[i : i + _AT_ONCE], slopes)
        count = len(fine) if fine.all() else int(np.argmin(fine))
        u.append(cells[0][:count])
        du.append(cells[1][:count])
        if count < len(fine):
            place = f"{sign * float(begin[i + count, 0]):.3g}"
            if given[count]:
                missed = f"misses it near {place}, as at a kink or a steep edge"
            elif begin[i + count, 0] < NEAREST:
                missed = f"ends near {place}, where u is negative, or too small or large for fp32"
            break
    return _Side(np.concatenate(u), np.concatenate(du), missed)


def _cells(
    beside: Callable[[np.ndarray], Pair], sign: float, begin: np.ndarray, width: np.ndarray, slopes: bool
) -> tuple[Pair, np.ndarray, np.ndarray]:
    """The cubics of these cells for u and u', which of them are as near as they must be, and which miss a u that has a place in a table."""
    with np.errstate(all="ignore"):
        pair = beside(sign * (begin + width * NODES))
        cells = [np.ascontiguousarray(through(np.broadcast_to(NODES, f.shape), f), np.float32) for f in pair]
        at, (u, du) = _BETWEEN.astype(np.float32).astype(np.float64), beside(sign * (begin + width * _BETWEEN))
        miss = []
        for c, f in zip(cells, (u, du)):
            c = c.astype(np.float64)
            miss.append(np.abs(((c[:, 3:] * at + c[:, 2:3]) * at + c[:, 1:2]) * at + c[:, :1] - f))
        near = miss[0] <= WEIGHT * np.abs(u)
        if slopes:
            near &= miss[1] <= SLOPE * (np.abs(du) + 0.5 * np.abs(u))
        given = [(f == 0.0) | ((f >= SMALLEST) & (f <= LARGEST)) for f in (u, pair[0])]
        given = given[0].all(-1) & given[1].all(-1) & np.isfinite(du).all(-1)
    return (cells[0], cells[1]), near.all(-1) & given, given
