"""The distribution of one draw from a row over all classes, `one_draw`: for samplers, likelihoods and distributions."""

from __future__ import annotations

import math

from .._array import Array, Namespace, is_array, log, take, total
from .._core.mapping import Mapping, missing_mass, over_all
from .._core.typing import Draw
from ..autodiff import bridge


def one_draw(mapping: Mapping) -> Draw:
    """How p gives the distribution of one draw from a row. What draws, and what has log p of a draw, follows it.

    "p": by itself. "share": divided by its sum, which the scores do not change. "rest": by itself, and what it leaves of 1 is the
    probability of none of the classes. "none": not at all, as `check_draw` says. For a map that hides a class it is said of p of
    all classes, those of `over_all`; a draw of the hidden one is a draw of none.
    """
    whole = over_all(mapping)
    if whole.sums_to_one:
        return "p"
    lowest, highest = whole.sums(None, None)  # type: ignore[arg-type]  # without rows there is nothing to compute
    if lowest is highest:
        return "share"
    return "none" if is_array(highest) or highest > 1.0 else "rest"


def may_draw_none(mapping: Mapping) -> bool:
    """True if one draw from a row with classes may be none of them."""
    return mapping.hidden is not None or one_draw(mapping) == "rest"


def check_draw(mapping: Mapping, who: str) -> None:
    """Raise an error if p is not the distribution of one draw."""
    if not mapping.sums_to_one and one_draw(mapping) == "none":
        raise ValueError(
            f"{who}: {mapping!r} gives each class a number of its own, and a row no distribution, so there is no single draw; where each "
            "number is a probability, draw each class by itself, as in random(p.shape) < p"
        )


def p_of_draw(mapping: Mapping, rows: Array, xp: Namespace) -> Array:
    """The probability of each class in one draw, of rows in fp32 or fp64; 0 in a row without classes."""
    p = bridge(rows).apply(mapping, rows)
    return p / sum_of(p, xp) if one_draw(mapping) == "share" else p


def log_p_of_draw(mapping: Mapping, rows: Array, xp: Namespace, *, none: bool = False) -> Array:
    """The logarithm of `p_of_draw`. none: and that of a draw of none of the classes, as the last entry, if there may be one."""
    log_p = bridge(rows).log_p(mapping, rows)
    kind = one_draw(mapping)
    if kind == "share":
        counted = xp.where(
            log_p == log_p, log_p, xp.full_like(log_p, -math.inf)
        )  # else a gradient of 0 comes back as NaN
        log_p = log_p - xp.log(sum_of(xp.exp(counted), xp))
    if none and kind == "rest":
        return xp.concat([log_p, log(missing_mass(total(xp.exp(log_p), xp), 1.0, xp), xp)], axis=-1)
    return log_p


def log_p_of_draw_at(mapping: Mapping, rows: Array, place: Array, xp: Namespace) -> Array:
    """`log_p_of_draw` of the classes at the places [..., m]."""
    if one_draw(mapping) == "share":
        return take(log_p_of_draw(mapping, rows, xp), place, xp)
    log_p = bridge(rows).log(mapping, rows)
    return log(take(bridge(rows).apply(mapping, rows), place, xp), xp) if log_p is None else take(log_p, place, xp)


def sum_of(p: Array, xp: Namespace) -> Array:
    """The sum of each row, [..., 1]; 1 where it is 0."""
    sums = total(p, xp)
    return xp.where(sums > 0, sums, xp.ones_like(sums))
