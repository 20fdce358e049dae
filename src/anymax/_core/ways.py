"""How the threshold of a row follows from parts of it: blocks of an output layer, or shards of processes."""

from __future__ import annotations

import enum

from .._array import Array, Namespace
from .mapping import Mapping
from .separable import Separable


class Way(enum.Enum):
    """What a way needs of each part; it needs less than those below it."""

    SUMS = "the maximum and the sum of the exponentials"
    EACH = "nothing: p of a class follows from its score"
    WEIGHTS = "the largest weight, then the sum of the weights"
    NUCLEUS = "the sum of the exponentials, and the classes that may be in the nucleus"
    CANDIDATES = "the classes that have a probability among those of the part"
    LEVEL = "sums over the classes for each step of a search"
    ALL = "all classes"


def way_of(mapping: Mapping, rows: Array, xp: Namespace) -> Way:
    """The way that needs least, for rows like these."""
    parts = mapping.parts
    if mapping.is_softmax or parts.temperature is not None or parts.exponents is not None:
        return Way.SUMS
    if parts.each_alone:
        return Way.EACH
    if parts.by_weights:
        return Way.WEIGHTS
    if parts.nucleus is not None:
        return Way.NUCLEUS
    if parts.zeros_stay:
        return Way.CANDIDATES
    return Way.LEVEL if searchable(mapping, rows, xp) else Way.ALL


def searchable(mapping: Mapping, rows: Array, xp: Namespace) -> bool:
    """True if sums alone find the level of a separable map: no ceiling, no steep edge, no other kind of search."""
    return isinstance(mapping, Separable) and mapping.sums_suffice(rows, xp)
