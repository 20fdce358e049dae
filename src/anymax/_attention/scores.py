"""From the products q k^T to the scores that a map sees: scale, cap, biases, masks, transforms, sink; whole or tile by tile.

Every array has the axes of the scores, [..., heads, queries, keys], with size 1 where it does not vary, so a tile of the scores needs
only the same tile of each array.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from .._array import (
    Array,
    Namespace,
    as_dtype,
    beside,
    check_scalar,
    device_of,
    dtype_name,
    fit_axes,
    is_array,
    is_floating,
    is_int,
    is_integer,
    is_number,
    is_torch,
    known,
    like,
    number,
    upcast,
)
from .._core.mapping import Mapping
from ..transforms import Composed, Transform
from ..transforms.base import put_through

MASKED = -math.inf
ADDED = ("bias", "additive")  # arrays that are added to the scores, in this order; the second is a mask of numbers


@dataclasses.dataclass(frozen=True)
class Scores:
    """Everything between q k^T and the map."""

    shape: tuple[int, ...]  # [..., heads, queries, keys], without the sink
    mapping: Mapping
    transform: Callable[[Array], Array] | None
    scale: float
    softcap: float | None
    causal: bool
    left: int | None  # how many keys before itself a query sees; None: no limit
    right: int | None
    offset: int  # the position of the first query among the keys (an array of offsets is in `arrays`)
    arrays: dict[str, Array]  # scale, ADDED, keep, slopes, sink, offset, lengths, q_lengths; see `prepare`
    first_key: int = 0  # of a tile, whose `offset` is the position of the tile's first query

    def of(self, products: Array, xp: Namespace) -> Array:
        """The scores, with -inf at masked keys and the sink as the last key."""
        s = products * self.scale
        if "scale" in self.arrays:
            s = s * self.arrays["scale"]
        if self.softcap is not None:
            s = self.softcap * xp.tanh(s / self.softcap)
        for term in self.added:
            s = s + term
        if "slopes" in self.arrays:
            i, j = self.positions(s, xp)
            s = s - self.arrays["slopes"] * xp.astype(xp.abs(i - j), s.dtype)
        keep = self.visible(s, xp)
        if keep is not None:
            s = xp.where(keep, s, MASKED * xp.ones_like(s))
        if self.transform is not None:
            s = put_through("attention", self.transform, s, own=True)
        if "sink" in self.arrays:
            sink = xp.broadcast_to(self.arrays["sink"], (*s.shape[:-1], 1))
            s = xp.concat([s, as_dtype(sink, s.dtype, xp)], axis=-1)
        return s

    def positions(self, near: Array, xp: Namespace) -> tuple[Array, Array]:
        """The positions of queries, [..., L, 1], and keys, [S], counted in keys."""
        place = device_of(near)
        rows, columns = self.shape[-2:]
        offset = self.arrays.get("offset", self.offset)
        return xp.arange(rows, **place)[:, None] + offset, xp.arange(columns, **place) + self.first_key

    def visible(self, near: Array, xp: Namespace) -> Array | None:
        """True where a query may attend, broadcastable to the scores; None if it may everywhere."""
        conditions: list[Array] = []
        if self.structured:
            i, j = self.positions(near, xp)
            if self.causal:
                conditions.append(j <= i)
            if self.left is not None:
                conditions.append(j >= i - self.left)
            if self.right is not None:
                conditions.append(j <= i + self.right)
            if "lengths" in self.arrays:
                conditions.append(j < self.arrays["lengths"])
            if "q_lengths" in self.arrays:
                conditions.append(i - self.arrays.get("offset", self.offset) < self.arrays["q_lengths"])
        if "keep" in self.arrays:
            conditions.append(self.arrays["keep"])
        out = None
        for condition in conditions:
            out = condition if out is None else out & condition
        return out

    def attended(self, near: Array, xp: Namespace) -> Array | None:
        """`visible`, without the keys that a bias or a mask of numbers sets to -inf."""
        out = self.visible(near, xp)
        for term in self.added:
            out = term != MASKED if out is None else out & (term != MASKED)
        return out

    @property
    def added(self) -> list[Array]:
        """The numbers that are added to the scores, in this order."""
        return [self.arrays[name] for name in ADDED if name in self.arrays]

    @property
    def structured(self) -> bool:
        """True where some keys are masked by their positions."""
        sides = self.causal or self.left is not None or self.right is not None
        return sides or "lengths" in self.arrays or "q_lengths" in self.arrays

    def seen(self, start: int, stop: int) -> tuple[int, int]:
        """A range that contains all keys that the queries start..stop may see by position; all keys if batches differ in offset."""
        if "offset" in self.arrays:
            return 0, self.shape[-1]
        low = 0 if self.left is None else start + self.offset - self.left
        high = self.shape[-1] if self.reach is None else stop + self.offset + self.reach
        low = min(max(low, 0), self.shape[-1])
        return low, max(low, min(high, self.shape[-1]))

    @property
    def reach(self) -> int | None:
        """How many keys after itself a query sees; None: no limit."""
        if not self.causal:
            return self.right
        return 0 if self.right is None else min(0, self.right)


# -- the options of a call ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of `attention` beside q, k and v, as the caller gave them."""

    mapping: Any = None
    mask: Any = None
    is_causal: Any = False
    scale: Any = None
    enable_gqa: Any = False
    bias: Any = None
    dropout_p: Any = 0.0
    generator: Any = None
    window: Any = None
    alibi: Any = None
    softcap: Any = None
    lengths: Any = None
    q_lengths: Any = None
    offset: Any = 0
    sink: Any = None
    transform: Any = None
    mix: Any = None
    need_weights: Any = False
    implementation: Any = None


def prepare(q: Array, shape: tuple[int, ...], mapping: Mapping, options: Options, xp: Namespace) -> Scores:
    """The options that make the scores, checked, their arrays with the axes of the scores."""
    arrays: dict[str, Array] = {}
    factor = 1.0
    scale, softcap, offset = (number(value) for value in (options.scale, options.softcap, options.offset))
    transform = options.transform
    if scale is None:
        factor = 1.0 / math.sqrt(q.shape[-1]) if q.shape[-1] else 1.0
    elif is_array(scale):
        arrays["scale"] = _real(scale, q, shape, "scale", xp)
    elif is_number(scale):
        factor = float(scale)
    else:
        raise TypeError(f"attention: scale must be a number or an array, got {scale!r}")
    if options.bias is not None:
        arrays["bias"] = _real(options.bias, q, shape, "bias", xp)
    if options.mask is not None:
        given = beside(options.mask, q, "mask", xp)
        if "bool" in dtype_name(given):
            same_device(given, q, "mask")
            arrays["keep"] = fit_axes(given, shape, "attention: mask")
        elif is_floating(given):
            arrays["additive"] = _real(given, q, shape, "mask", xp)
        else:
            raise TypeError(
                f"attention: mask must be boolean (True = keep) or real (added to the scores), got {dtype_name(given)}"
            )
    if options.alibi is not None and options.alibi is not False:
        place = device_of(q)
        slopes = xp.asarray(alibi_slopes(_heads(shape)), **place) if options.alibi is True else options.alibi
        arrays["slopes"] = _by_head(slopes, q, shape, "alibi", xp)
    if options.sink is not None:
        arrays["sink"] = _by_head(options.sink, q, shape, "sink", xp)
    for name, value in (("lengths", options.lengths), ("q_lengths", options.q_lengths)):
        if value is not None:
            arrays[name] = by_batch("attention", value, q, shape, name, xp)
            _in_range(name, arrays[name], shape, xp)
    if is_array(offset):
        arrays["offset"] = by_batch("attention", offset, q, shape, "offset", xp)
        offset = 0
    elif not is_int(offset):
        raise TypeError(f"attention: offset must be an integer or an array of integers, got {options.offset!r}")
    if softcap is not None:
        softcap = check_scalar("attention: softcap", softcap, lambda v: 0 < v < math.inf, "a finite number above 0")
    left, right = _window(options.window)
    if transform is not None and (not callable(transform) or isinstance(transform, (type, Mapping))):
        hint = "; a map is given as mapping=" if isinstance(transform, Mapping) else ""
        raise TypeError(
            f"attention: transform must be a function scores -> scores such as anymax.temperature(2.0), got {transform!r}{hint}"
        )
    for name, value in mapping.params().items():
        value = beside(value, q, name, xp)
        if value.ndim:  # torch accepts a single number from any device
            same_device(value, q, name)
        mapping.check_width(name, fit_axes(value, shape, f"attention: {mapping.name}: {name}"))
    return Scores(shape, mapping, transform, factor, softcap, bool(options.is_causal), left, right, int(offset), arrays)


def _window(window: Any) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    sides = (window, window) if not isinstance(window, (tuple, list)) else tuple(window)
    ok = len(sides) == 2 and all(s is None or (is_int(number(s)) and s >= 0) for s in sides)
    if not ok:
        raise ValueError(
            f"attention: window must be a number of keys or a pair (left, right) of such numbers, None for no limit, got {window!r}"
        )
    left, right = (None if s is None else int(s) for s in sides)
    return left, right


def _real(value: Any, q: Array, shape: tuple[int, ...], name: str, xp: Namespace) -> Array:
    value = beside(value, q, name, xp)
    if is_integer(value):
        value = xp.astype(value, q.dtype)
    if not is_floating(value):
        raise TypeError(f"attention: {name} must be real, got {dtype_name(value)}")
    same_device(value, q, name)
    return like(fit_axes(value, shape, f"attention: {name}"), upcast(q[..., :0], xp), xp)


def _by_head(value: Array, q: Array, shape: tuple[int, ...], name: str, xp: Namespace) -> Array:
    """One number per head, as [heads, 1, 1]."""
    value = beside(value, q, name, xp)
    if value.ndim > 1 or (value.ndim and value.shape[0] != 1 and value.shape[0] != _heads(shape)):
        raise ValueError(
            f"attention: {name} must have one number for each head, shape ({_heads(shape)},), got {tuple(value.shape)}"
        )
    return _real(
        xp.reshape(value, (*value.shape, 1, 1)) if len(shape) > 2 else xp.reshape(value, (1, 1)), q, shape, name, xp
    )


def by_batch(who: str, value: Any, q: Array, shape: tuple[int, ...], name: str, xp: Namespace) -> Array:
    """One integer for each batch, as [..., 1, 1, 1]."""
    value = beside(value, q, name, xp)
    if not is_integer(value):
        raise TypeError(f"{who}: {name} must be integers, got {dtype_name(value)}")
    same_device(value, q, name)
    batch = shape[:-3]
    given = tuple(value.shape)
    if len(given) > len(batch) or any(a != 1 and a != b for a, b in zip(given, batch[len(batch) - len(given) :])):
        raise ValueError(
            f"{who}: {name} must have one number for each batch, shape {batch}, or be a single one, got shape {given}"
        )
    tail = min(3, len(shape)) if given else len(shape)
    return fit_axes(xp.reshape(value, (*given, *(1,) * tail)), shape, f"attention: {name}")


def _in_range(name: str, value: Array, shape: tuple[int, ...], xp: Namespace) -> None:
    if not known(value) or not math.prod(value.shape):
        return
    most, whose = (shape[-1], "keys") if name == "lengths" else (shape[-2], "queries")
    low, high = int(xp.min(value)), int(xp.max(value))
    if low < 0 or high > most:
        raise ValueError(
            f"attention: {name} must be from 0 to {most}, the number of {whose}, got values from {low} to {high}"
        )


def same_device(value: Array, q: Array, name: str) -> None:
    if is_torch(value) and value.device != q.device:
        raise ValueError(f"attention: {name} is on {value.device} and q on {q.device}; move one of them")


def _heads(shape: tuple[int, ...]) -> int:
    return shape[-3] if len(shape) > 2 else 1


def alibi_slopes(heads: int) -> list[float]:
    """The slopes of Press, Smith and Lewis 2022: 2^(-8 h / n) for the power of two n <= heads; the rest are every second of 2n's."""

    def powers(n: int) -> list[float]:
        return [2.0 ** (-8.0 * (h + 1) / n) for h in range(n)]

    below = 2 ** int(math.log2(max(heads, 1)))
    return powers(below) + powers(2 * below)[0::2][: heads - below]


# -- tiles -------------------------------------------------------------------------------------------------------------------


def transforms_of(transform: Any) -> tuple[Transform, ...] | None:
    """The transforms of `anymax.transforms` that `transform` applies one after another; None for any other function."""
    parts: tuple[Any, ...] = () if transform is None else (transform,)
    parts = transform.transforms if isinstance(transform, Composed) else parts
    return parts if all(isinstance(t, Transform) for t in parts) else None


def refuse_tiles(scores: Scores) -> str | None:
    """Why the scores can't be computed tile by tile; None if they can."""
    parts = transforms_of(scores.transform)
    if parts is None:
        return "a transform that is not of anymax.transforms may need the whole matrix"
    for t in parts:
        if t.axis != -1:
            return f"{t!r} acts along another axis than the keys"
        if not t.by_rows:
            return f"{t!r} needs the whole matrix"
    return None


def outer(scores: Scores, q: Array, xp: Namespace) -> dict[str, Array]:
    """All arrays of the scores, with those of the mapping and the transforms, on the axes of the scores."""
    out = dict(scores.arrays)
    for name, value in scores.mapping.params().items():
        out[f"mapping.{name}"] = fit_axes(beside(value, q, name, xp), scores.shape, f"attention: {name}")
    for n, t in enumerate(transforms_of(scores.transform) or ()):
        for name, value in t.params:
            if is_array(value):
                out[f"transform.{n}.{name}"] = fit_axes(
                    beside(value, q, name, xp), scores.shape, f"attention: {t.name}: {name}"
                )
    return out


def tile(scores: Scores, arrays: dict[str, Array], shape: tuple[int, ...], row: int, key: int) -> Scores:
    """The scores of a tile of this shape from query `row` and key `key` on; `arrays` are the tile's part of `outer`."""
    parts = []
    for n, t in enumerate(transforms_of(scores.transform) or ()):
        parts.append(t.replace(**{k: arrays.get(f"transform.{n}.{k}", v) for k, v in t.params}))
    own = {k: v for k, v in arrays.items() if "." not in k}
    if "offset" in own:
        own["offset"] = own["offset"] + row
    if "q_lengths" in own:
        own["q_lengths"] = own["q_lengths"] - row
    return dataclasses.replace(
        scores,
        shape=shape,
        mapping=scores.mapping.replace(**{k[8:]: v for k, v in arrays.items() if k.startswith("mapping.")}),
        transform=Composed(tuple(parts)) if parts else None,
        offset=scores.offset + row,
        arrays=own,
        first_key=key,
    )
