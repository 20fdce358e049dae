"""What a transform is: a frozen function on rows with its parameters, lined up with the scores; and several of them in a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from ._array import (
    Array,
    Namespace,
    adopt,
    asarray,
    check_axis,
    dtype_name,
    eager,
    floating,
    from_last,
    is_array,
    known_any,
    like,
    namespace,
    narrow,
    number,
    quiet,
    stop_gradient,
    to_last,
    upcast,
)

_BROADCAST = (
    "T", "keep", "log_p", "scale", "p", "n", "beta", "gamma", "delta",
)  # the parameters that line up with the scores  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Transform:
    """A function on rows, `rows(x, xp, **params)` with the classes last, and its parameters."""

    rows: Callable[..., Array]
    params: tuple[tuple[str, Any], ...]
    axis: int = -1
    whole: bool = False  # True: a part of the rows does not get what it gets among all

    def __call__(self, x: Array) -> Array:
        x = asarray(x)
        xp = namespace(x)
        axis = check_axis(self.axis, x.ndim)
        x = floating(x, xp)
        y = upcast(x, xp)
        y = to_last(y, axis, xp)
        params = {k: _align(k, v, y, axis, xp) if k in _BROADCAST else v for k, v in self.params}
        with quiet(x):
            y = self.rows(y, xp, **params)
        y = y if y.dtype == x.dtype or narrow(x) else xp.astype(y, x.dtype)
        return from_last(y, axis, xp)

    def __repr__(self) -> str:
        given = [f"{k}={brief(v)}" for k, v in self.params if v is not None]
        given += [f"axis={self.axis}"] if self.axis != -1 else []
        return f"{self.name}({', '.join(given)})"

    @property
    def name(self) -> str:
        return self.rows.__name__.strip("_")

    @property
    def by_rows(self) -> bool:
        """True where a part of the rows can be had on its own, from its part of the parameters."""
        return not self.whole and all(k in _BROADCAST or not is_array(v) for k, v in self.params)

    def _key(self) -> tuple:
        return self.rows, self.axis, tuple((k, id(v) if is_array(v) else v) for k, v in self.params)

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Transform) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())


@dataclasses.dataclass(frozen=True, repr=False)
class Composed:
    """Transforms one after the other, left to right."""

    transforms: tuple[Callable[[Array], Array], ...]

    def __call__(self, x: Array) -> Array:
        x = asarray(x)
        xp = namespace(x)
        x = floating(x, xp)
        y = upcast(x, xp)  # once: no rounding to half precision in between
        for transform in self.transforms:
            y = transform(y)
        return y if y.dtype == x.dtype or narrow(x) else xp.astype(y, x.dtype)

    def __repr__(self) -> str:
        return f"compose({', '.join(map(repr, self.transforms))})"


# -- the transforms of a verb --------------------------------------------------------------------------------------------------


def transforms_of(transform: Any, axis: int, ndim: int, who: str) -> tuple[Callable[[Array], Array], ...]:
    """The transforms that a verb applies, one after the other, each along the axis of its classes."""
    if transform is not None and (not callable(transform) or isinstance(transform, type)):
        raise TypeError(
            f"{who}: transform must be a function scores -> scores such as anymax.topk(50), or several of them, as in "
            f"anymax.compose(anymax.temperature(0.7), anymax.topk(50)); got {transform!r}"
        )
    parts = () if transform is None else transform.transforms if isinstance(transform, Composed) else (transform,)
    return tuple(_along(t, axis, ndim, who) for t in parts)


def _along(t: Any, axis: int, ndim: int, who: str) -> Callable[[Array], Array]:
    if not isinstance(t, Transform) or t.axis in (axis, axis - ndim):
        return t
    if t.axis != -1:
        raise ValueError(f"{who}: {t!r} goes along axis {t.axis} and the classes are axis {axis}; leave its axis out")
    return dataclasses.replace(t, axis=axis)


# -- parameters ------------------------------------------------------------------------------------------------------------


def cast(value: Any, x: Array, xp: Namespace) -> Any:
    """A parameter as an array of the kind, device and dtype of `x`; numbers as they are."""
    return like(native(value, x, xp), x, xp)


def native(value: Any, x: Array, xp: Namespace) -> Any:
    """A NumPy parameter as an array of the kind and device of `x`."""
    if isinstance(value, (np.ndarray, np.generic)) and not isinstance(x, np.ndarray):
        return adopt(value, x, xp)
    return value


def _align(name: str, value: Any, x: Array, axis: int, xp: Namespace) -> Any:
    """A parameter lined up with scores whose class axis has been moved last."""
    if value is None or isinstance(value, (int, float)):
        return value
    value = native(value, x, xp) if name == "keep" else cast(value, x, xp)
    if value.ndim < 2 or axis == x.ndim - 1:
        return value
    if value.ndim > x.ndim:
        raise ValueError(
            f"a parameter of shape {tuple(value.shape)} does not broadcast to scores with {x.ndim} dimensions"
        )
    return to_last(xp.reshape(value, (1,) * (x.ndim - value.ndim) + tuple(value.shape)), axis, xp)


def check_range(who: str, name: str, value: Any, allowed: Callable[[Any], Any], words: str) -> None:
    """A parameter is a number or a real array, and in its range as far as its values may be asked for."""
    value = number(value)
    if isinstance(value, bool) or not (isinstance(value, (int, float)) or is_array(value)):
        raise TypeError(f"{who}: {name} must be a number or an array, {words}; got {value!r}")
    if is_array(value):
        xp = namespace(value)
        value = floating(value, xp, name)
        ok = not known_any(~allowed(value), xp)
    else:
        ok = bool(allowed(value))
    if not ok:
        raise ValueError(f"{who}: {name} must be {words}; got {brief(value)}")


def brief(value: Any) -> str:
    if not is_array(value):
        return repr(value)
    if value.ndim == 0 and eager(value) and "key" not in dtype_name(value):
        return f"{float(stop_gradient(value)):g}"
    return f"{dtype_name(value)}{list(value.shape)}"
