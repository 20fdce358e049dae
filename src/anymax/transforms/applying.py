"""How verbs apply the transforms that a caller gives: along the axis of the classes, and as steps of the engine where it has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from .._array import Array, Namespace, from_last, namespace, stop_gradient, to_last, upcast
from .._random.generators import going_on
from ..kernels import decode, engine_of
from ..kernels.engine import Engine
from ..kernels.tasks import DECODE
from .base import Composed, Transform, is_function, not_transform, put_through


def transforms_along(transform: Any, axis: int, ndim: int, who: str) -> tuple[Callable[[Array], Array], ...]:
    """The transforms that a verb applies in sequence, each along the axis of the verb's classes."""
    if transform is not None and not is_function(transform):
        raise TypeError(
            f"{who}: transform must be a function scores -> scores such as anymax.topk(50), or several of them, as in "
            f"anymax.compose(anymax.temperature(0.7), anymax.topk(50)); got {not_transform(transform)}"
        )
    parts = () if transform is None else transform.transforms if isinstance(transform, Composed) else (transform,)
    return tuple(_along(t, axis, ndim, who) for t in parts)


def transformed(who: str, transform: Any, rows: Array, axis: int, xp: Namespace) -> Array:
    """Rows, classes last, after the transforms that a verb applies to scores with the classes along `axis`."""
    y = from_last(upcast(rows, xp), axis, xp)
    for t in transforms_along(transform, axis, rows.ndim, who):
        y = put_through(who, t, y)
    return to_last(y, axis, xp)


def _along(t: Any, axis: int, ndim: int, who: str) -> Callable[[Array], Array]:
    if not isinstance(t, Transform) or t.axis in (axis, axis - ndim):
        return t
    if t.axis != -1:
        raise ValueError(f"{who}: {t!r} goes along axis {t.axis} and the classes are axis {axis}; leave its axis out")
    return dataclasses.replace(t, axis=axis)


class Pass(NamedTuple):
    """The transforms to call, and the ones after them as pairs (step of the engine, whether it truncates)."""

    engine: Engine
    parts: tuple[Any, ...]
    steps: tuple[tuple[decode.Step, bool], ...]


def read_steps(parts: tuple[Any, ...], rows: Array, axis: int, mapping: Any) -> Pass | None:
    """What an engine does of the transforms, and which; None if there is no engine for these rows."""
    engine = engine_of(DECODE, mapping, rows)
    if engine is None:
        return None
    xp = namespace(rows)
    one, readable = upcast(rows[..., :1], xp), []
    for t in reversed(parts[-decode.MOST :]):
        params = t.align(one, axis, xp) if isinstance(t, Transform) else {}
        if not isinstance(t, Transform) or not t.is_step(one, params):
            break
        readable.insert(0, (t, params))
    steps = tuple((t.as_step(one, params), t.truncates) for t, params in readable)
    return Pass(engine, parts[: len(parts) - len(readable)], steps)


def cut_and_full(who: str, parts: tuple[Any, ...], rows: Array, axis: int, both: bool) -> tuple[Array, Array]:
    """Rows after all transforms, and with `both` also after all but the truncations, with the same random numbers.

    They are constants for differentiation, and one array if no transform truncates. The classes were at `axis` and are last.
    """
    xp = namespace(rows)
    cut = full = from_last(rows, axis, xp)
    for t in parts:
        if both and isinstance(t, Transform) and t.truncates:
            cut = put_through(who, t, cut)
        elif cut is full:
            cut = full = put_through(who, t, full)
        elif isinstance(t, Transform) and t.random:
            added = put_through(who, t, xp.zeros_like(cut))
            cut, full = cut + added, full + added
        else:
            cut, full = put_through(who, t, cut), put_through(who, t, full)
    kept = stop_gradient(to_last(cut, axis, xp))
    return kept, kept if full is cut else stop_gradient(to_last(full, axis, xp))


def unseeded(transform: Any, like: Array) -> Any:
    """The transform with a generator of torch instead of each seed, so that each call gets new random numbers."""
    if isinstance(transform, Composed):
        return Composed(tuple(unseeded(t, like) for t in transform.transforms))
    if not isinstance(transform, Transform):
        return transform
    return transform.replace(**{k: going_on(v, like) for k, v in transform.params if k == "generator"})
