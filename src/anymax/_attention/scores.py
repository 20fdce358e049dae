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
    device_of,
    fit_axes,
    is_array,
)
from .._core.mapping import Mapping
from ..transforms import Composed, Transform
from ..transforms.base import put_through

MASKED = -math.inf
BLOCK = 1 << 20  # scores in a block of the blockwise implementation: 4 MB
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
    arrays: dict[str, Array]  # scale, ADDED, keep, slopes, sink, offset, lengths, q_lengths, as `call.py` reads them
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
        i, j = (xp.arange(n, **device_of(near)) for n in self.shape[-2:])
        return i[:, None] + self.arrays.get("offset", self.offset), j + self.first_key

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
        mapping=scores.mapping.laid_out(**{k[8:]: v for k, v in arrays.items() if k.startswith("mapping.")}),
        transform=Composed(tuple(parts)) if parts else None,
        offset=scores.offset + row,
        arrays=own,
        first_key=key,
    )
