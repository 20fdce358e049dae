"""Turns what a caller gives into rows: axes, masks, dtypes and parameters, once for every verb."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from .. import _array
from .._array import (
    Array,
    as_scalar,
    asarray,
    axis_or_all,
    check_axis,
    fit_axes,
    floating,
    from_last,
    is_array,
    is_boolean,
    namespace,
    to_last,
    upcast,
    wider,
)
from .axes import Joined
from .mapping import Mapping
from .names import as_mapping
from .parameters import one_a_row
from .shards import refuse as refuse_sharded


def join(mapping: Mapping | str, x: Any, axes: Any, mask: Any) -> tuple[Joined, Mapping, Any]:
    """The scores, the mapping and the mask with several axes joined into the last."""
    mapping = as_mapping(mapping)
    joined = Joined.of(x, axes)
    params = {name: joined.lay_out(v, f"{mapping.name}: {name}") for name, v in mapping.params().items() if v.ndim}
    mapping = mapping.laid_out(**params) if params else mapping
    return joined, mapping, None if mask is None else joined.lay_out(asarray(mask, "mask"), "mask")


class Rows(NamedTuple):
    """The scores of a call as rows, and the way back to their layout."""

    scores: Array  # of the caller; several axes are joined
    rows: Array  # [..., n], -inf where masked
    mapping: Mapping  # aligned to the rows
    axis: int  # of the classes of `scores`, from 0 on
    joined: Joined | None = None  # if the classes were along several axes
    # the caller's map, if it hides the last class of `rows`; `mapping` is then the map of all classes
    caller: Mapping | None = None

    @property
    def hides(self) -> bool:
        """True if the caller's map hides a class, for which an index of -1 stands. After `over_all` it is the last of `rows`."""
        return self.caller is not None or self.mapping.hidden is not None

    def over_all(self, rows: Array | None = None) -> Rows:
        """These rows over all classes: one that the map hides becomes the last. Bridges take no map that hides one.

        rows: the scores of the classes that the caller sees, if they have changed.
        """
        rows = self.rows if rows is None else rows
        caller = self.mapping
        if caller.hidden is None:
            return self if rows is self.rows else self._replace(rows=rows)
        mapping, rows = caller.hidden.join(caller, rows, namespace(rows))
        return self._replace(rows=rows, mapping=mapping, caller=caller)

    def seen(self, of_all: Array) -> Array:
        """A result [..., n] over the classes of `rows` without the class that the caller's map hides."""
        return of_all if self.caller is None else of_all[..., :-1]

    def parameter(self, value: Any, name: str) -> Any:
        """A number, or an array with one value per row, aligned to the rows."""
        value = value if self.joined is None else self.joined.lay_out(value, name)
        return one_a_row(aligned(value, self.rows, self.axis, name), name)

    def with_a_class(self) -> Rows:
        """The same rows; if they have no classes, one masked class each, so that they count as rows whose classes are all masked."""
        return self if self.rows.shape[-1] else self._replace(rows=with_a_class(self.rows))

    def restore(self, out: Array) -> Array:
        """A result [..., n] in the layout of the scores, and in their dtype if it has 8 bits."""
        out = out if self.caller is None else self.seen(out)
        out = like_scores(from_last(out, self.axis, namespace(out)), self.scores)
        return out if self.joined is None else self.joined.restore(out)

    def restore_one(self, out: Array, keepdims: bool) -> Array:
        """One number per row, [..., 1], in the layout of the scores, with or without the axis of the classes."""
        if not keepdims:
            return as_scalar(namespace(out).squeeze(out, axis=-1))
        out = restore_axis(out, self.axis)
        return out if self.joined is None else self.joined.restore(out, summed=True)


def prepare(mapping: Mapping | str, x: Any, axis: int, mask: Any = None, dtype: Any = None, *, least: int = 1) -> Rows:
    """The rows of a call whose classes are along one axis. least: how many classes there must be."""
    x, rows, mapping, axis, keep = split(mapping, x, axis, mask, dtype, least=least)
    return Rows(x, rows if keep is None else hide(rows, keep), mapping, axis)


def prepare_axes(
    mapping: Mapping | str, x: Any, axis: Any, mask: Any = None, dtype: Any = None, *, least: int = 1
) -> Rows:
    """The rows of a call whose classes are along one axis or several."""
    if axis is None:
        x = asarray(x)
        axis = axis_or_all(axis, x.ndim)
    if not isinstance(axis, (tuple, list)):
        return prepare(mapping, x, axis, mask, dtype, least=least)
    joined, mapping, mask = join(mapping, x, axis, mask)
    return prepare(mapping, joined.scores, -1, mask, dtype, least=least)._replace(joined=joined)


def as_one_class(x: Any, axis: Any) -> Array | None:
    """A number, or an array without axes, as a row of one class, as torch.softmax and SciPy take it; None for other arrays."""
    x = asarray(x)
    if x.ndim or isinstance(axis, (tuple, list)):
        return None
    check_axis(axis, 1)
    return namespace(x).reshape(x, (1,))


def split(
    mapping: Mapping | str, x: Any, axis: int, mask: Any, dtype: Any, *, least: int = 1
) -> tuple[Array, Array, Mapping, int, Array | None]:
    """(scores, rows, the mapping aligned to them, axis >= 0, the mask): the mask broadcasts to the rows and is not applied to them.

    least: 0 where the caller has an answer for rows without a class.
    """
    mapping = as_mapping(mapping)
    refuse_sharded("a function of rows", x)  # most verbs refuse DTensors earlier, in their own name
    x = asarray(x)
    xp = namespace(x)
    if dtype is not None:
        x = xp.astype(x, _array.asked_for(dtype, x))
    x = floating(x, xp)
    if x.ndim == 0:
        raise ValueError("scores: expected at least one dimension, the classes, got a 0-d array")
    axis = check_axis(axis, x.ndim)
    n = x.shape[axis]
    if n < least:
        raise ValueError(f"scores of shape {tuple(x.shape)} have no classes along axis {axis}; at least one is needed")
    mapping.check(n)
    rows = to_last(upcast(x, xp) if _array.narrow(x) else x, axis, xp)
    keep = None
    if mask is not None:
        keep = align_mask(rows, _array.beside(mask, x, "mask", xp), axis, xp)
    params = mapping.params()
    if params:
        mapping = mapping.laid_out(**{k: aligned(v, rows, axis, f"{mapping.name}: {k}") for k, v in params.items()})
        for k, v in mapping.params().items():
            mapping.check_width(k, v)
    return x, rows, mapping, axis, keep


def align_mask(rows: Array, mask: Array, axis: int, xp: Any) -> Array:
    if not is_boolean(mask):
        raise TypeError(
            f"mask: expected a boolean array, True = keep, got {mask.dtype}; for additive masks, add them to the scores"
        )
    return _to_rows(mask, rows, axis, "mask", xp)


def with_a_class(rows: Array) -> Array:
    """The rows, or where they have no class [..., 1] of -inf, a class that is masked."""
    return rows if rows.shape[-1] else wider(rows, 1, -math.inf, namespace(rows))


def hide(rows: Array, keep: Array) -> Array:
    """-inf where not `keep`."""
    xp = namespace(rows)
    return xp.where(keep, rows, -xp.inf * xp.ones_like(rows))


def aligned(value: Any, rows: Array, axis: int, name: str) -> Any:
    """A parameter in the layout and dtype of the rows."""
    if not is_array(value):
        return value
    if value.ndim == 0:  # NumPy's become Python numbers; a 0-d array of torch or JAX adopts any dtype
        return value.item() if isinstance(value, np.ndarray) else value
    xp = namespace(rows)
    value = _array.like(value, upcast(rows[..., :1], xp), xp)  # not in half precision
    return _to_rows(value, rows, axis, name, xp)


def _to_rows(value: Array, rows: Array, axis: int, name: str, xp: Any) -> Array:
    """`value`, broadcastable against the scores, with the class axis moved to the end as in the rows."""
    shape = list(rows.shape)
    shape.insert(axis, shape.pop())
    hint = "" if value.ndim != 1 else f"; one value for each row has shape {(*value.shape, 1)}"
    return to_last(fit_axes(value, tuple(shape), name, hint), axis, xp)


def restore_axis(rows: Array, axis: int) -> Array:
    return from_last(rows, axis, namespace(rows))


def like_scores(out: Array, x: Array) -> Array:
    """`out` in the dtype of the scores: rows of 8-bit floats are computed in fp32 and rounded once, here."""
    return namespace(x).astype(out, x.dtype) if _array.narrow(x) else out
