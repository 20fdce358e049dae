"""The arguments of a call as one problem: matrices on the last two axes, what is kept of them, and the sums that they shall have."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .._array import (
    POSITIVE,
    Array,
    Namespace,
    as_dtype,
    asarray,
    beside,
    check_axis,
    fit_axes,
    floating,
    is_array,
    is_boolean,
    is_double,
    is_floating,
    known,
    known_any,
    like,
    namespace,
    nan_outside,
    on_constants,
    stop_gradient,
    upcast,
)
from .._core.rows import hide
from .._core.shards import refuse as refuse_sharded


class Given(NamedTuple):
    """A call: matrices [..., n, m] in the dtype to compute in, -inf where masked, and the sums that the caller asks for."""

    x: Array
    rows: Array | None  # [..., n], with the batch of x or broadcast to it; None: the default
    columns: Array | None  # [..., m]
    temperature: float = 1.0  # by which the scores are still to be divided


class Layout(NamedTuple):
    """Where the two axes of the caller's array are, and its dtype."""

    order: tuple[int, ...]
    dtype: Any

    def restore(self, p: Array, xp: Namespace) -> Array:
        back = tuple(self.order.index(i) for i in range(len(self.order)))
        p = p if back == tuple(range(len(back))) else xp.permute_dims(p, back)
        return as_dtype(p, self.dtype, xp)


def read(
    who: str, x: Any, axes: Any, rows: Any, columns: Any, mask: Any, temperature: Any = 1.0
) -> tuple[Given, Layout]:
    """The arguments of a call, checked. A temperature that is an array divides the scores here."""
    refuse_sharded(who, x)
    x = asarray(x)
    xp = namespace(x)
    x = floating(x, xp)
    if not isinstance(axes, (tuple, list)) or len(axes) != 2:
        raise TypeError(f"{who}: axes must be two axes, of the rows and of the columns, such as (-2, -1); got {axes!r}")
    if x.ndim < 2:
        raise ValueError(f"{who}: expected scores with two axes or more, rows and columns, got shape {tuple(x.shape)}")
    first, second = (check_axis(axis, x.ndim) for axis in axes)
    if first == second:
        raise ValueError(f"{who}: axes={tuple(axes)} name one axis twice; rows and columns lie along two")
    if not x.shape[first] or not x.shape[second]:
        raise ValueError(f"{who}: scores of shape {tuple(x.shape)} have no rows or no columns along axes={tuple(axes)}")
    dtype = x.dtype
    order = (*(i for i in range(x.ndim) if i not in (first, second)), first, second)
    if mask is not None:
        mask = beside(mask, x, "mask", xp)
        if not is_boolean(mask):
            raise TypeError(f"mask: expected a boolean array, True = keep, got {mask.dtype}")
        x = hide(x, fit_axes(mask, tuple(x.shape), "mask"))
    x = upcast(x, xp)
    if is_array(temperature):
        divisor = nan_outside(like(temperature, x, xp), POSITIVE)
        x = x / fit_axes(divisor, tuple(x.shape), "temperature")
        temperature = 1.0
    if order != tuple(range(x.ndim)):
        x = xp.permute_dims(x, order)
    batch = tuple(x.shape[:-2])
    rows = _sums(who, "rows", rows, x, (*batch, x.shape[-2]), xp)
    columns = _sums(who, "columns", columns, x, (*batch, x.shape[-1]), xp)
    return Given(x, rows, columns, temperature), Layout(order, dtype)


def _sums(who: str, name: str, value: Any, x: Array, shape: tuple[int, ...], xp: Namespace) -> Array | None:
    if value is None:
        return None
    value = beside(value, x, name, xp)
    value = value if is_floating(value) else floating(value, xp, name)
    if not value.ndim or value.shape[-1] != shape[-1]:
        raise ValueError(
            f"{who}: {name} must have one number for each of the {shape[-1]} {name}, [..., {shape[-1]}], got shape "
            f"{tuple(value.shape)}; leave it out for equal sums"
        )
    value = fit_axes(value, shape, name, to="one number for each, of shape ")
    value = like(value, x, xp)
    if known(value):
        with on_constants(value):  # its values may be read while JAX traces the scores
            held = stop_gradient(value)
            wrong = bool(xp.any((held < 0) | (held == math.inf)))
        if wrong:
            raise ValueError(f"{who}: {name} must be at least 0 and finite, got {value!r}")
    return value


class Problem(NamedTuple):
    """What the formulas take. The kept part has only rows and columns with an entry and with a sum above 0."""

    z: Array  # [..., n, m] scores less the largest of their row, 0 where not kept
    keep: Array  # [..., n, m]
    rows: Array  # [..., n, 1], 0 where the row has nothing kept
    columns: Array  # [..., 1, m]
    poisoned: Array  # [..., 1, 1]: a NaN or +inf makes the whole matrix NaN


def problem(given: Given, xp: Namespace, balanced: bool = False) -> Problem:
    """The problem of a call; with `balanced` the columns are scaled so that both totals are equal to the last digit."""
    x, temperature = given.x, given.temperature
    keep, bad, r, c = _kept(given, xp)
    in_rows, in_columns = _total(r, xp), _total(c, xp)
    if given.columns is None:
        c = c * (in_rows / _or_one(in_columns, xp))
    elif given.rows is None:
        r = r * (in_columns / _or_one(in_rows, xp))
    else:
        _check(in_rows, in_columns, bad, xp)
        if balanced:
            c = c * (in_rows / _or_one(in_columns, xp))
    kept = keep & ~bad
    y = xp.where(kept, x, xp.zeros_like(x))
    high = xp.max(xp.where(kept, stop_gradient(x), -math.inf * xp.ones_like(x)), axis=-1, keepdims=True)
    high = xp.where(high > -math.inf, high, xp.zeros_like(high))
    smallest, lowest = (1e-300, -1e300) if is_double(x) else (1e-37, -1e30)
    z = y - high if temperature == 1.0 else (y - high) / max(temperature, smallest)
    z = xp.where(z < lowest, lowest * xp.ones_like(z), z)
    z = xp.where(kept, z, xp.zeros_like(x))
    return Problem(z, kept, r, c, bad)


def _kept(given: Given, xp: Namespace) -> tuple[Array, Array, Array, Array]:
    """(keep, poisoned, rows, columns): which entries count, whether the matrix is NaN, and the sums of what has an entry, 1 by default."""
    x = given.x
    keep = x != -math.inf
    bad = _any(xp.isnan(x) | (x == math.inf), xp)
    rows = None if given.rows is None else xp.expand_dims(given.rows, axis=-1)
    columns = None if given.columns is None else xp.expand_dims(given.columns, axis=-2)
    for value in (rows, columns):
        if value is not None:
            bad = bad | _any(~(value >= 0) | (value == math.inf), xp)
            keep = keep & (value > 0)
    live = xp.any(keep, axis=-1, keepdims=True)
    there = xp.any(keep, axis=-2, keepdims=True)
    one = xp.ones_like(x[..., :1, :1])
    r = xp.where(live, one if rows is None else rows, xp.zeros_like(one))
    c = xp.where(there, one if columns is None else columns, xp.zeros_like(one))
    return keep, bad, r, c


def check_totals(given: Given, xp: Namespace) -> None:
    """An error where rows and columns of a matrix have sums of different totals, if they are given and can be read."""
    if given.rows is not None and given.columns is not None and known(given.x):
        _, bad, r, c = _kept(given, xp)
        _check(_total(r, xp), _total(c, xp), bad, xp)


def _any(condition: Array, xp: Namespace) -> Array:
    return xp.any(condition, axis=(-2, -1), keepdims=True)


def _total(a: Array, xp: Namespace) -> Array:
    return xp.sum(a, axis=(-2, -1), keepdims=True)


def _or_one(total: Array, xp: Namespace) -> Array:
    """The total, 1 where it is 0: a divisor."""
    return xp.where(total > 0, total, xp.ones_like(total))


def _check(in_rows: Array, in_columns: Array, bad: Array, xp: Namespace) -> None:
    a, b = stop_gradient(in_rows), stop_gradient(in_columns)
    share = 1e-6 if is_double(a) else 1e-4  # in fp64 the numbers may have been rounded to fp32
    near = xp.abs(a - b) <= share * xp.where(a > b, a, b)
    wrong = ~near & ~bad
    if known_any(wrong, xp):
        shape = tuple(wrong.shape)
        each = xp.reshape(xp.where(wrong, xp.ones_like(a), xp.zeros_like(a)), (-1,))
        at = int(xp.argmax(each))
        sums = [float(xp.reshape(xp.broadcast_to(v, shape), (-1,))[at]) for v in (a, b)]
        raise ValueError(
            f"Sinkhorn: the rows must have the same total as the columns, got {sums[0]:.9g} for rows and {sums[1]:.9g} for "
            "columns (of those with a kept entry); scale one of them"
        )
