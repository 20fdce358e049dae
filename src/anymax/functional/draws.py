"""The distribution of one draw from a row over all classes, by `Mapping.one_draw`: for samplers, likelihoods and distributions."""

from __future__ import annotations

from .._array import Array, Namespace, log, total
from .._core.mapping import Mapping, missing_mass
from ..autodiff import bridge


def p_of_draw(mapping: Mapping, rows: Array, xp: Namespace) -> Array:
    """The probability of each class in one draw, of rows in fp32 or fp64; 0 in a row without classes."""
    p = bridge(rows).apply(mapping, rows)
    return p / sum_of(p, xp) if mapping.one_draw == "share" else p


def log_p_of_draw(mapping: Mapping, rows: Array, xp: Namespace, *, none: bool = False) -> Array:
    """The logarithm of `p_of_draw`. none: and that of a draw of none of the classes, as the last entry, if there may be one."""
    log_p = bridge(rows).log_p(mapping, rows)
    kind = mapping.one_draw
    if kind == "share":
        log_p = log_p - xp.log(sum_of(xp.exp(log_p), xp))
    if none and kind == "rest":
        return xp.concat([log_p, log(missing_mass(total(xp.exp(log_p), xp), 1.0, xp), xp)], axis=-1)
    return log_p


def sum_of(p: Array, xp: Namespace) -> Array:
    """The sum of each row, [..., 1]; 1 where it is 0."""
    sums = total(p, xp)
    return xp.where(sums > 0, sums, xp.ones_like(sums))
