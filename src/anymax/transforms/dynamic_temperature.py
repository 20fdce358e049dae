"""The transform `dynamic_temperature`: a temperature that grows with the entropy of the row."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from .._array import (
    NOT_NEGATIVE,
    POSITIVE,
    Array,
    Namespace,
    Ranges,
    is_strange,
    pick_axis,
    power,
    total,
)
from .._core.typing import Parameter
from .base import Transform, makes_transform
from .entropy import softmax_entropy
from .scaling import divided


@makes_transform
def dynamic_temperature(
    low: Parameter, high: Parameter, exponent: Parameter = 1.0, *, axis: int = -1, dim: int | None = None
) -> Transform:
    """`x / T` with `T = low + (high - low) (H / log n)^exponent`, where H is the entropy of softmax and n the number of classes that are
    not masked.

    A row of which the model is sure gets the temperature `low`, a flat one `high`. It is llama.cpp's: its options `temp` and
    `dynatemp_range` are the middle and half the width of the interval.

    Parameters
    ----------
    low
        The temperature of a row without entropy, at least 0; a row with one class has it too. A number, or an array with one value per
        row: [..., 1]. What temperature 0 does is said at `temperature`.
    high
        The temperature of equal scores, at least 0, a number or an array. It may be below `low`.
    exponent
        A number above 0 or an array: above 1, only flat rows get near `high`.

    Examples
    --------
    >>> import numpy as np
    >>> cut = dynamic_temperature(0.5, 1.5)
    >>> cut([0.0, 0.0])  # H = log n
    array([0., 0.])
    >>> cut(np.log([0.9, 0.1])).round(3)  # H / log n is 0.469, T is 0.969
    array([-0.109, -2.376])
    """
    _DynamicTemperature.check(low=low, high=high, exponent=exponent)
    params = (("low", low), ("high", high), ("exponent", exponent))
    return _DynamicTemperature(params, pick_axis(axis, dim))


class _DynamicTemperature(Transform):
    name = "dynamic_temperature"
    aligned = ("low", "high", "exponent")
    ranges: ClassVar[Ranges] = {"low": NOT_NEGATIVE, "high": NOT_NEGATIVE, "exponent": POSITIVE}

    def rows(self, x: Array, xp: Namespace, low: Any, high: Any, exponent: Any) -> Array:
        T = low + (high - low) * power(_flatness(x, xp), exponent, xp)
        return divided(x, T, xp)


def _flatness(x: Array, xp: Namespace) -> Array:
    """The entropy of each row, [..., 1], from 0 to 1, as a share of the largest that it could have; 1 in a row with a NaN or +inf."""
    n = total(xp.astype(x != -math.inf, x.dtype), xp)
    two = n > 1
    share = xp.astype(softmax_entropy(x, xp), x.dtype) / xp.log(xp.where(two, n, 2.0 * xp.ones_like(n)))
    share = xp.where(is_strange(x, xp), xp.ones_like(share), share)
    return xp.where(two, share, xp.zeros_like(share))
