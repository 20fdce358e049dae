"""The link of a separable map as a table of cubics, for the C++ engine (csrc/tabled/).

The width of a cell is a fixed share of its distance from the start of the table: the edge of the support for a sparse link, and the
argument of the largest p for a dense one, whose tail, of any length, then takes few cells. Each table is checked against the link between
its nodes; a link that it misses (a kink inside, an infinite slope at the edge) has no table.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .._array import is_number, namespace, quiet
from .._core.mapping import Mapping
from .._core.ratio_map import RatioMap
from .._core.separable import Separable
from .cubics import NODES, through
from .ratios import Weights, weights_of

CELLS = (32, 64, 128, 256, 512)  # in each octave; more are tried where fewer miss
MOST = 8192  # cells of a table: 128 KB, which fit into a second-level cache
SHARE = 2.0**-20  # of the mass: the share of each class in the longest row, if all are equal
EXACT = 2e-8  # the largest relative error of a link's table where p is above `SHARE`
TAIL = 1e-4  # the same where p is below it
SLOPE = 1e-7  # the largest relative error of a table of slopes
SMALLEST = 2.0**-126  # the smallest normal number of fp32
_BETWEEN = np.array([0.0, 0.1, 0.26, 0.5, 0.63, 0.87, 1.0])

Function = Callable[[np.ndarray], np.ndarray]


class TableNumbers(NamedTuple):
    """The numbers of a table in the order of `anymax_table` in csrc/anymax.h, which says what each is."""

    shift: int
    sign: int
    offset: float
    low: float
    high: float
    below: float
    above: float
    end: float
    mass: float
    most: float
    scale: float

    def packed(self) -> np.ndarray:
        return np.array(self, np.float64)


class Table(NamedTuple):
    """A function as csrc/anymax.h describes it in `anymax_table`."""

    cells: np.ndarray  # float32 [count, 4]
    numbers: np.ndarray  # `TableNumbers.packed`


class Tables(NamedTuple):
    """What replaces a map in the engine: its link, and `1 / omega''` as a function of p or a sentence that says why there is none."""

    link: Table
    slopes: Table | str


def tables_of(mapping: Mapping) -> Tables | Weights | str:
    """The tables of a map, or a sentence that says why it has none. They are made once for equal maps."""
    try:
        return mapping._tables
    except AttributeError:
        try:
            tables = _made_once(mapping)
        except TypeError:  # a field that is not hashable
            tables = _made(mapping)
        object.__setattr__(mapping, "_tables", tables)
        return tables


def made(mapping: Mapping) -> bool:
    """True if the map has asked for its tables before."""
    try:
        return mapping._tables is not None
    except AttributeError:
        return False


def forget(mapping: Mapping, why: str) -> None:
    """Leaves the map without tables."""
    object.__setattr__(mapping, "_tables", why)


# a map that overrides one of these is not solved as a table is
_KEEP_THE_SOLVER = ("forward", "at", "rate", "remainder", "solve", "search", "threshold")


def _own_method(mapping: Mapping) -> str | None:
    """The name of a method of the map that no table can replace; None if it has none."""
    kind = type(mapping)
    if isinstance(mapping, Separable):
        own = (name for name in _KEEP_THE_SOLVER if getattr(kind, name) is not getattr(Separable, name))
    else:  # those of the library do what RatioMap does
        own = (name for name in ("forward", "vjp") if not getattr(kind, name).__module__.startswith("anymax."))
    return next(own, None)


def refuse_map(mapping: Mapping) -> str | None:
    """Why no table can replace a map, as far as its fields and methods tell; None if one may."""
    if not isinstance(mapping, (Separable, RatioMap)):
        return f"{mapping.name} is neither a Separable, whose p is a link of x - tau, nor a RatioMap, whose p is a share of u(x)"
    if mapping.kernel is not None:
        return f"it is for maps without a kernel, and {mapping.name} has one"
    separable = isinstance(mapping, Separable)
    if (own := _own_method(mapping)) is not None:
        return f"{type(mapping).__name__} has its own {own}, which a table of {'the link' if separable else 'u'} can't replace"
    for name, value in (*mapping.params().items(), *mapping.constants().items()):
        number = value is None or is_number(value) or isinstance(value, (str, bool))
        if not number and (separable or not callable(value)):
            return f"it takes maps whose parameters are numbers, and {name} is not one"
    return "it takes one mass for all rows" if isinstance(mapping, Separable) and not is_number(mapping.mass) else None


@functools.lru_cache(maxsize=64)
def _made_once(mapping: Mapping) -> Tables | Weights | str:
    return _made(mapping)


def _made(mapping: Mapping) -> Tables | Weights | str:
    if (reason := refuse_map(mapping)) is not None:
        return reason
    try:
        with quiet(np.zeros(1)):
            if isinstance(mapping, RatioMap):
                return weights_of(mapping)
            assert isinstance(mapping, Separable), mapping
            return _tables(mapping)
    except Exception as error:
        what = "link" if isinstance(mapping, Separable) else "u"
        return f"its {what} can't be put into a table: {type(error).__name__}: {error}"


def _of_numbers(method: Any) -> Function:
    """A method of a map on float64 numbers of any shape."""

    def function(t: np.ndarray) -> np.ndarray:
        row = np.ascontiguousarray(t, np.float64).reshape(1, -1)
        out = np.asarray(method(row, namespace(row)), np.float64)
        return np.broadcast_to(out, row.shape).reshape(np.shape(t))

    return function


def _tables(mapping: Separable) -> Tables | str:
    zero = np.zeros((1, 3))
    most: Any = mapping.ceiling(zero, namespace(zero))
    if most is not None and np.size(most) != 1:
        return "it takes one ceiling for all classes"
    mass = float(mapping.mass)
    most = math.inf if most is None else float(np.reshape(most, ()))
    largest = min(mass, most)
    if not (0.0 < largest < math.inf and mass < math.inf):
        return f"it takes a mass and a ceiling above 0, not {mass:g} and {most:g}"
    link, slope = _of_numbers(mapping.link), _of_numbers(mapping.slope)
    edge, half, end = (float(v) for v in slope(np.array([0.0, 0.5 * largest, largest])))
    opened = end == math.inf and largest == most  # a ceiling that is reached in the limit alone
    if opened:
        end = float(slope(np.array([largest * (1.0 - 2.0**-26)]))[0])
    if not (math.isfinite(end) and math.isfinite(half) and edge < half < end):
        return f"its slope must rise from 0 to {largest:g}, and is {edge:g}, {half:g} and {end:g} at 0, half of that and there"
    if edge > -math.inf:
        beneath = edge - (end - edge) * np.array([1e-9, 1e-3, 1.0, 100.0])
        if np.any(link(beneath) != 0.0):
            return "its link must be 0 below its slope at 0"
        found = _rising(link, edge, end, mass, most)
    else:
        found = _falling(link, half, end, mass, most)
    if isinstance(found, str):
        return f"a table of its link {found}"
    if opened:
        found = found._replace(numbers=TableNumbers(*found.numbers)._replace(end=math.inf).packed())
    return Tables(found, _slopes(mapping, mass, most))


def _slopes(mapping: Separable, mass: float, most: float) -> Table | str:
    if mapping.steep:
        return "its slope is infinite at the edge of the support"
    if type(mapping).vjp is not Separable.vjp:
        return f"{type(mapping).__name__} has its own vjp"
    given, largest = _of_numbers(mapping.sensitivity), min(mass, most)

    def sensitivity(q: np.ndarray) -> np.ndarray:  # at a ceiling it jumps to 0
        return given(np.minimum(q, largest * (1.0 - 2.0**-52)))

    usual = sensitivity(np.geomspace(largest * SHARE, largest, 100))
    allowed = SLOPE * 1e-6 * float(np.max(usual))
    low = 2.0 ** math.floor(math.log2(largest * 2.0**-60))
    above = float(given(np.array([largest]))[0])

    def error(value: np.ndarray, miss: np.ndarray) -> np.ndarray:
        return miss / (SLOPE * np.abs(value) + allowed)

    worst = ""
    for cells in CELLS[:3]:
        found = _fitted(sensitivity, 1, 0.0, low, largest, cells, error)
        if not isinstance(found, str):
            numbers = TableNumbers(
                _shift(cells), 1, offset=0.0, low=low, high=largest, below=0.0, above=above, end=largest, mass=mass, most=most, scale=1.0
            )  # fmt: skip
            return Table(found, numbers.packed())
        worst = found
    return f"a table of its 1 / omega'' {worst}"


def _rising(link: Function, edge: float, end: float, mass: float, most: float) -> Table | str:
    """From a finite edge of the support up: v = t - edge + low."""
    span, floor, largest, worst = end - edge, mass * SHARE, min(mass, most), ""

    def error(value: np.ndarray, miss: np.ndarray) -> np.ndarray:
        return miss / (EXACT * np.maximum(np.abs(value), floor))

    for octaves in (2, 10, 20, 36):
        low = 2.0 ** (math.floor(math.log2(span)) - octaves)
        for cells in CELLS:
            if (octaves + 1) * cells > MOST:
                break
            offset = low - edge
            found = _fitted(link, 1, offset, low, low + span, cells, error)
            if not isinstance(found, str):
                scale = largest / _steepest(found, low, cells)
                numbers = TableNumbers(
                    _shift(cells), 1, offset, low, low + span, below=0.0, above=largest, end=end, mass=mass, most=most, scale=scale
                )  # fmt: skip
                return Table(found, numbers.packed())
            worst = found
    return worst


def _falling(link: Function, half: float, end: float, mass: float, most: float) -> Table | str:
    """From the largest argument down, as far as there are normal floats: v = offset - t."""
    floor, largest, worst = mass * SHARE, min(mass, most), ""

    def error(value: np.ndarray, miss: np.ndarray) -> np.ndarray:
        return miss / np.maximum(EXACT * floor, np.where(value > floor, EXACT, TAIL) * value)

    def error_far(value: np.ndarray, miss: np.ndarray) -> np.ndarray:
        return np.where(value > SMALLEST, np.maximum(error(value, miss), miss / (TAIL * value)), error(value, miss))

    for wider in (0, -2, -4, 2):
        low = 2.0 ** (math.floor(math.log2(end - half)) + wider)
        # an offset on the coarsest grid that it may have, so that t = 0, where links may bend, is a node
        step = 2.0 ** (math.floor(math.log2(max(abs(low + end), low))) - 4)
        offset = math.ceil((low + end) / step) * step
        low = offset - end
        places = low * 2.0 ** np.arange(0.0, 120.0, 0.25)
        below = np.flatnonzero(link(offset - places) < SMALLEST)
        if not below.size:
            return "would need too many cells, since it falls too slowly"
        high = float(places[below[0]])
        for cells in CELLS:
            if (math.log2(high / low) + 2) * cells > MOST:
                break
            found = _fitted(link, -1, offset, low, high, cells, error_far)
            if not isinstance(found, str):
                scale = largest / _steepest(found, low, cells)
                numbers = TableNumbers(
                    _shift(cells), -1, offset, low, high, below=largest, above=0.0, end=end, mass=mass, most=most, scale=scale
                )  # fmt: skip
                return Table(found, numbers.packed())
            worst = found
    return worst


def _shift(cells: int) -> int:
    return 23 - (cells.bit_length() - 1)


def _steepest(cubics: np.ndarray, low: float, cells: int) -> float:
    """The largest slope at the beginning of a cell."""
    places = (np.arange(len(cubics)) + (np.float32(low).view(np.int32) >> _shift(cells))) << _shift(cells)
    octaves = 2.0 ** np.floor(np.log2(places.astype(np.int32).view(np.float32).astype(np.float64)))
    return float(np.max(np.abs(cubics[:, 1]) * cells / octaves))


def _fitted(
    function: Function, sign: int, offset: float, low: float, high: float, cells: int,
    error: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> np.ndarray | str:  # fmt: skip
    """The cubics through the values at Chebyshev's nodes of each cell between low and high, or how far they miss.

    `error(value, miss)` is at most 1 where the miss may be as large as that.
    """
    shift = _shift(cells)
    bits = np.array([low, high], np.float32).view(np.int32)
    first, last = int(bits[0]) >> shift, (int(bits[1]) - 1) >> shift
    starts = (np.arange(first, last + 2, dtype=np.int64) << shift).astype(np.int32).view(np.float32).astype(np.float64)
    start, width = starts[:-1, None], np.diff(starts)[:, None]
    # of the first and last cell only a part is used
    begin, end = np.maximum(start, low), np.minimum(start + width, high)

    def values(at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        v = begin + (end - begin) * at
        return (v - start) / width, function(sign * (v - offset))

    u, f = values(NODES)
    if not np.all(np.isfinite(f)):
        return "is impossible, since it is not finite everywhere"
    c = through(u, f)
    u, f = values(_BETWEEN)
    miss = np.abs(((c[:, 3:] * u + c[:, 2:3]) * u + c[:, 1:2]) * u + c[:, :1] - f)
    wrong = error(f, miss)
    if not np.all(wrong <= 1.0):
        at = np.unravel_index(int(np.argmax(np.where(np.isnan(wrong), np.inf, wrong))), wrong.shape)
        place = sign * (float((begin + (end - begin) * _BETWEEN)[at]) - offset)
        return (
            f"misses it by {float(miss[at]):.1g} of {float(f[at]):.1g} near {place:.3g}, as at a kink or a steep edge"
        )
    return np.ascontiguousarray(c, dtype=np.float32)
