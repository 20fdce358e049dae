"""Rows of scores: moving the axis of the classes last, operations along it, masked entries and poisoned rows."""

from __future__ import annotations

import math
import sys
from typing import Any, TypeVar

import numpy as np

from .convert import adopt, is_int, number, on_host, shown
from .dtypes import is_floating, without_autocast
from .kinds import Array, Namespace, device_of, is_array, is_jax, is_torch, namespace
from .places import descending, positions
from .tracing import at_least, compiling, decides, differentiates, known

_T = TypeVar("_T")
_MANY = 4096  # numbers from which on a look at them may pay
_LONG = 1024  # entries of a row from which on each row is listed alone


def check_axis(axis: Any, ndim: int) -> int:
    """The axis as a non-negative number, or an error that says what is allowed."""
    if not is_int(axis) and not is_int(number(axis)):
        hint = (
            "; to group scores by an index, write anymax.segment_apply(mapping, x, index=...)" if is_array(axis) else ""
        )
        if axis is None or isinstance(axis, (tuple, list)):
            hint = "; several axes, or None for all, have no meaning here: reshape them to one axis first"
        raise TypeError(f"axis: expected an integer, got {shown(axis)}{hint}")
    if not ndim:
        raise ValueError("scores: expected at least one dimension, the classes, got a 0-d array")
    if not -ndim <= axis < ndim:
        raise ValueError(f"axis {axis} is out of range for scores with {ndim} dimension(s); use {-ndim} to {ndim - 1}")
    return int(axis) % ndim


def fit_axes(value: Array, shape: tuple[int, ...], name: str, hint: str = "", to: str = "scores of shape ") -> Array:
    """`value` reshaped to as many axes as `shape`; an error, in which it is called `name`, if it does not broadcast to `shape`."""
    given = (1,) * (len(shape) - value.ndim) + tuple(value.shape)
    if len(given) > len(shape) or any(a != 1 and a != b for a, b in zip(given, shape, strict=True)):
        raise ValueError(f"{name} of shape {tuple(value.shape)} does not broadcast to {to}{shape}{hint}")
    return value if value.ndim == len(shape) else namespace(value).reshape(value, given)


def pick_axis(axis: _T, dim: _T | None, default: Any = -1) -> _T:
    """The axis, which may be given as `axis`, whose default is `default`, or as `dim`. None stays: it is every axis, as in SciPy."""
    if dim is None:
        return axis
    given = axis is not None if default is None else type(axis) is not int or axis != default
    if given and axis != dim:
        raise TypeError(f"axis={axis} and dim={dim} are two names of one argument; give only one")
    return dim


def axis_or_all(axis: Any, ndim: int) -> Any:
    """The axis, or all of them for None: the whole array is one row, as in `scipy.special.softmax` and `jax.nn.softmax`."""
    return axis if axis is not None else -1 if ndim < 2 else tuple(range(ndim))


def to_last(x: Array, axis: int, xp: Namespace) -> Array:
    """Move the axis last. This is a permutation, since torch.func.vmap has no rule for moveaxis."""
    axes = list(range(x.ndim))
    axes.append(axes.pop(axis))
    return x if axes[axis] == axis else xp.permute_dims(x, tuple(axes))


def from_last(x: Array, axis: int, xp: Namespace) -> Array:
    """Move the last axis back to where it came from."""
    axes = list(range(x.ndim))
    axes.insert(axis, axes.pop())
    return x if axes[-1] == x.ndim - 1 else xp.permute_dims(x, tuple(axes))


def wider(x: Array, size: int, fill: float, xp: Namespace) -> Array:
    """x with `size` entries along the last axis: those after its own are `fill`."""
    more = xp.full((*x.shape[:-1], size - x.shape[-1]), fill, dtype=x.dtype, **device_of(x))
    return xp.concat([x, more], axis=-1) if more.shape[-1] else x


def joined(parts: list[Array]) -> Array:
    """Concatenate along the last axis. torch can batch `cat` over gradients, but not `concat`."""
    if is_torch(parts[0]):
        with without_autocast(parts[0]):
            return sys.modules["torch"].cat(parts, -1)
    return namespace(parts[0]).concat(parts, axis=-1)


def sorts_quickly(x: Array) -> bool:
    """False for JAX: on a CPU XLA's sort takes a hundred times as long as a few passes over a row."""
    return not is_jax(x)


def running_sum(x: Array, xp: Namespace, dtype: Any = None, axis: int = -1) -> Array:
    """Cumulative sums, along each row by default. torch.compile would warn of array_api_compat's function. For a DTensor with its classes
    on several devices cumsum(-1) gives local sums, but cumsum(ndim - 1) gives the right ones (torch 2.13)."""
    dtype = x.dtype if dtype is None else dtype
    return (
        x.cumsum(axis % x.ndim, dtype=dtype)
        if is_torch(x)
        else xp.cumulative_sum(xp.astype(x, dtype), axis=axis, dtype=dtype)
    )


def running_dtype(x: Array, xp: Namespace) -> Any:
    """The dtype of running sums whose ends matter. NumPy adds one by one: fp64 keeps the rounding of 100,000 terms from moving an end."""
    return x.dtype if is_torch(x) or is_jax(x) else xp.float64


def total(x: Array, xp: Namespace) -> Array:
    """The sum over the classes, [..., 1]."""
    return xp.sum(x, axis=-1, keepdims=True)


def dot(a: Array, b: Array, xp: Namespace) -> Array:
    """<a, b> over the classes, [..., 1]; a 0 in a times an infinity or NaN counts as 0."""
    lost = (a == 0) & ~xp.isfinite(b)
    return total(a * xp.where(lost, xp.zeros_like(b), b), xp)


def top(x: Array, xp: Namespace) -> Array:
    """The maximum over the classes, [..., 1]."""
    if not x.shape[-1]:
        raise ValueError(f"scores of shape {tuple(x.shape)} have no classes along their axis; at least one is needed")
    high = xp.max(x, axis=-1, keepdims=True)
    if not is_jax(x) or not is_floating(x):
        return high
    # XLA's maximum of many rows loses NaN on a CPU (JAX 0.10, openxla/xla#21461)
    return poison(high, xp.any(xp.isnan(x), axis=-1, keepdims=True), xp)


def kth_largest(x: Array, k: int, xp: Namespace) -> Array:
    """The k-th largest entry of each row, [..., 1], by the framework's selection if it has one."""
    if k == 1:
        return top(x, xp)
    if is_torch(x):
        return x.topk(k, dim=-1).values[..., -1:]
    if is_jax(x):
        return sys.modules["jax"].lax.top_k(x, k)[0][..., -1:]
    if isinstance(x, np.ndarray):
        return np.partition(x, x.shape[-1] - k, axis=-1)[..., -k, None]
    return descending(x, xp)[..., k - 1 : k]


def exp_and_rest(s: Array, below: Array, keep: Array, xp: Namespace) -> tuple[Array, Array]:
    """(e, the sum of e less the 1 of the largest of s), where e is exp(below) of the kept entries and 0 elsewhere.

    below: 0 at the largest. log1p of this rest has digits that log of the sum would round away.
    """
    e = xp.where(keep, xp.exp(xp.where(keep, below, xp.zeros_like(below))), xp.zeros_like(below))
    first = xp.argmax(s, axis=-1, keepdims=True)
    return e, total(xp.where((positions(s, first.dtype, xp) == first) & keep, e - 1.0, e), xp)


def finite_scores(x: Array, xp: Namespace) -> tuple[Array, Array, Array]:
    """`(y, keep, poisoned)`: the scores without infinities and NaN, and where these were.

    `keep` is False at masked (-inf) entries. `poisoned`, [..., 1], is True for rows with a NaN or +inf. `y` equals `x` at kept
    entries of the other rows and is 0 elsewhere, so that arithmetic on it is safe.
    """
    poisoned = is_strange(x, xp)
    if all_finite(x, xp):
        return x, xp.ones_like(x, dtype=xp.bool), poisoned
    keep = x != -math.inf
    return xp.where(keep & ~poisoned, x, xp.zeros_like(x)), keep, poisoned


def is_strange(x: Array, xp: Namespace) -> Array:
    """True for a row with a NaN or +inf, [..., 1]."""
    high = top(x, xp)
    return xp.isnan(high) | (high == math.inf)


def all_finite(x: Array, xp: Namespace) -> bool:
    """True if x is known to have no infinities and NaN, so that their masks, which cost more than a formula, can be left out."""
    if not at_least(math.prod(x.shape), _MANY) or compiling() or not decides(x) or differentiates(x):
        return False
    return bool(xp.isfinite(xp.sum(x))) or bool(xp.all(xp.isfinite(x)))


def finish(p: Array, keep: Array, poisoned: Array, xp: Namespace, masked: float = 0.0) -> Array:
    """The last step of every map: masked entries get `masked`, poisoned rows get NaN."""
    p = xp.where(keep, p, masked * xp.ones_like(p) if masked else xp.zeros_like(p))
    return poison(p, poisoned, xp)


def poison(out: Array, where: Array, xp: Namespace) -> Array:
    """NaN where `where` is True. JAX gets a scalar: an array of NaNs would trigger its debug_nans for sound rows too."""
    return xp.where(where, math.nan if is_jax(out) else math.nan * xp.ones_like(out), out)


def listed(keep: Array, xp: Namespace) -> tuple[Array, Array]:
    """Where `keep` [rows, n] is True: the places, row after row, and where each row begins among them, [rows + 1]."""
    if known(keep) and keep.shape[-1] and not is_jax(keep):  # NumPy passes over what is False a word at a time
        host = on_host(keep)
        if keep.shape[-1] < _LONG:
            row, places = np.divmod(np.flatnonzero(host), keep.shape[-1])
            size = np.bincount(row, minlength=keep.shape[0])
        else:
            each = [np.flatnonzero(row) for row in host]
            places = np.concatenate([np.empty(0, np.int64), *each])
            size = np.array([part.size for part in each], np.int64)
        begins = np.concatenate([[0], np.cumsum(size)])
        return adopt(places, keep, xp), adopt(begins, keep, xp)
    places = xp.nonzero(keep)[1]
    size = xp.sum(xp.astype(keep, places.dtype), axis=-1, dtype=places.dtype)
    return places, xp.concat([xp.zeros((1,), dtype=places.dtype, **device_of(keep)), running_sum(size, xp)])
