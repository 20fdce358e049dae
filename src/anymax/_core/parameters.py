"""The parameters of a map: their ranges and their layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._array import Array, Namespace, check_number, is_array, poison, rows_out_of_range

if TYPE_CHECKING:
    from .mapping import Mapping


def check_ranges(mapping: Mapping, hint: str, *names: str) -> None:
    """An error for a parameter that is no number or real array, or is known to be out of its range; numbers become Python's.

    `__post_init__` of a map calls it. hint: what the parameters are, or what else to do.
    """
    for name in names:
        value = check_number(type(mapping).__name__, name, getattr(mapping, name), mapping.ranges[name], hint)
        object.__setattr__(mapping, name, value)


def lost_rows(mapping: Mapping) -> Array | None:
    """Where rows have a parameter out of its range, [..., 1] or of no dimension; None if it is known that none has."""
    values = mapping.params()
    return rows_out_of_range((values[name], allowed) for name, allowed in mapping.ranges.items() if name in values)


def sound(mapping: Mapping, x: Array, xp: Namespace) -> Array:
    """The rows, NaN where a parameter is out of its range, so that p, its derivatives and all that follows from it are NaN, too."""
    bad = lost_rows(mapping)
    return x if bad is None else poison(x, bad, xp)


def one_a_row(value: Any, name: str) -> Any:
    """`value`, in the layout of the rows, or an error if it varies along the classes."""
    if is_array(value) and value.ndim and value.shape[-1] != 1:
        raise ValueError(
            f"{name} of shape {tuple(value.shape)} (classes last) varies along the classes; it must have size 1 there, one value for "
            "each row"
        )
    return value
