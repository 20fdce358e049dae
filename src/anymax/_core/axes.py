"""Rows of classes along several axes, as in `softmax(heatmaps, axis=(-2, -1))`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .._array import Array, asarray, axis_or_all, check_axis, fit_axes, is_array, namespace


class Joined(NamedTuple):
    """Scores with several axes moved last and joined into one, and the way back."""

    scores: Array
    order: tuple[int, ...]  # the original axes: first those that stay, then those that were joined
    shape: tuple[int, ...]  # of the original scores, in that order
    joined: int

    @classmethod
    def of(cls, x: Any, axes: tuple[int, ...] | list[int]) -> Joined:
        x = asarray(x)
        joined = tuple(check_axis(a, x.ndim) for a in axes)
        if not joined or len(set(joined)) < len(joined):
            raise ValueError(f"axis={tuple(axes)}: expected one axis or more, each of them once")
        order = (*(i for i in range(x.ndim) if i not in joined), *joined)
        return cls(_flat(x, order, len(joined)), order, tuple(x.shape[i] for i in order), len(joined))

    def lay_out(self, value: Any, name: str) -> Any:
        """An array that broadcasts to the scores, moved to their new layout; anything else is returned unchanged."""
        if not is_array(value):
            return value
        xp, ndim = namespace(value), len(self.order)
        full = tuple(self.shape[self.order.index(i)] for i in range(ndim))
        value = fit_axes(value, full, name)
        last = self.order[ndim - self.joined :]
        if any(value.shape[i] != 1 for i in last):
            value = xp.broadcast_to(value, tuple(full[i] if i in last else n for i, n in enumerate(value.shape)))
        return _flat(value, self.order, self.joined)

    def restore(self, p: Array, *, summed: bool = False) -> Array:
        """A result in the original layout of the scores; `summed` if it has one number per row."""
        xp, stay = namespace(p), len(self.order) - self.joined
        shape = (*self.shape[:stay], *(1,) * self.joined) if summed else self.shape
        back = tuple(self.order.index(i) for i in range(len(self.order)))
        return xp.permute_dims(xp.reshape(p, shape), back)


def on_one_axis(x: Array, axis: Any) -> tuple[Array, int]:
    """The scores, with several axes joined into the last, and the axis of the classes from 0 on."""
    axis = axis_or_all(axis, x.ndim) if axis is None else axis
    if isinstance(axis, (tuple, list)):
        x, axis = Joined.of(x, axis).scores, -1
    return x, check_axis(axis, x.ndim)


def _flat(x: Array, order: tuple[int, ...], joined: int) -> Array:
    xp = namespace(x)
    x = xp.permute_dims(x, order)
    stay = len(order) - joined
    return xp.reshape(x, (*x.shape[:stay], math.prod(x.shape[stay:])))
