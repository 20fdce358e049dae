"""`mix`: prior knowledge after the map."""

from __future__ import annotations

from typing import Any

from .._array import UNIT, as_dtype, asarray, floats, nan_outside, upcast
from .._core.typing import ArrayT, Numbers, Parameter
from .base import as_parameter, check_range


def mix(p: ArrayT | Numbers, prior: Any, weight: Parameter) -> ArrayT:
    """Prior knowledge after the map: `(1 - weight) p + weight prior`. `prior` uses it before the map.

    Use it for a lower bound on every probability, or to mix in a second distribution whatever the scores are.

    Parameters
    ----------
    p
        The probabilities from a map.
    prior
        Probabilities that broadcast to them.
    weight
        From 0 to 1, a number or an array with one value per row.

    Returns
    -------
    Array
        Probabilities, an array of the kind, shape and dtype of p.

    Examples
    --------
    >>> mix([0.75, 0.25], [0.5, 0.5], 0.5)
    array([0.625, 0.375])
    """
    probabilities, xp = floats(p, "p")
    check_range("mix", "weight", weight, UNIT)
    q = upcast(probabilities, xp)
    other = as_parameter(asarray(prior, "prior"), q, xp)
    share = nan_outside(as_parameter(weight, q, xp), UNIT)
    out = (1.0 - share) * q + share * other
    return as_dtype(out, probabilities.dtype, xp)
