"""The transform `softcap`: scores that can't leave an interval."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from .._array import POSITIVE, Array, Namespace, Ranges, is_number, pick_axis
from .._core.typing import Parameter
from .base import Transform, makes_transform, on_kept


@makes_transform
def softcap(cap: Parameter, *, axis: int = -1, dim: int | None = None) -> Transform:
    """`cap * tanh(x / cap)`: scores far below `cap` are nearly unchanged, and none is above `cap` or below `-cap`.

    Gemma 2 has it with 30 in its output layer; give it to `linear_loss` and the other functions of output layers as `transform=`.
    `anymax.attention` has an option of that name.

    Parameters
    ----------
    cap
        A number above 0, or an array with one value per row: [..., 1].

    Examples
    --------
    >>> softcap(30.0)([0.0, 15.0, 300.0, -math.inf]).round(3)
    array([ 0.   , 13.864, 30.   ,   -inf])
    """
    _Softcap.check(cap=cap)
    return _Softcap((("cap", cap),), pick_axis(axis, dim))


class _Softcap(Transform):
    name = "softcap"
    ranges: ClassVar[Ranges] = {"cap": POSITIVE}
    elementwise = True
    aligned = ("cap",)

    def rows(self, x: Array, xp: Namespace, cap: Any) -> Array:
        capped = on_kept(x, lambda y: cap * xp.tanh(y / cap), xp)
        return xp.where(x == math.inf, x, capped)  # a row with +inf stays one that is lost


def cap_of(transforms: tuple[Any, ...]) -> float | None:
    """The cap if the transforms are one `softcap` by a number, 0 if there are none, else None."""
    if not transforms:
        return 0.0
    cap = dict(transforms[0].params)["cap"] if len(transforms) == 1 and isinstance(transforms[0], _Softcap) else None
    return float(cap) if is_number(cap) else None
