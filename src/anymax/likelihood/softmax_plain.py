"""log p of given classes under softmax, the entropy, and log p of all other classes together, in plain operations that every framework
differentiates. NumPy computes a few rows at a time."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .._array import (
    Array,
    Namespace,
    is_jax,
    is_torch,
    namespace,
    poison,
    positions,
    quiet,
    stop_gradient,
    take,
    total,
    upcast,
)
from .._core.mapping import row_top
from .._core.rows import hide
from ..mappings import Softmax

_SOFTMAX = Softmax()
LOWEST = -1e4  # in place of log 0, so that 0 log 0 is 0
_BLOCK = 1 << 18  # scores at a time in NumPy, so that temporaries stay in the cache


class Terms(NamedTuple):
    """The terms of each row, fp32 or fp64."""

    log_p: Array  # [..., m], of the given classes; -inf if masked
    entropy: Array | None  # [..., 1]
    rest: Array | None  # [..., 1], log p of all other classes together

    def columns(self, xp: Namespace) -> Array:
        """All terms that there are, side by side."""
        return xp.concat([part for part in self if part is not None], axis=-1)


def plain(x: Array, index: Array, xp: Namespace, *, scale: float, entropy: bool, rest: bool) -> Terms:
    """The terms of softmax(scale x) for classes [..., m], where n means no class; every derivative is exact, also where p is 0."""
    with quiet(x):
        s = upcast(x, xp)
        y, e, z, keep, poisoned = _SOFTMAX.shifted(s if scale == 1.0 else s * scale, xp)
        log_z, n = xp.log(z), x.shape[-1]
        at = xp.where(index < n, index, (n - 1) * xp.ones_like(index))
        log_p = take(hide(y, keep), at, xp) - log_z
        h = log_z - total(e * y, xp) / z if entropy else None  # a sum of two that are not negative
        log_rest = None
        if rest:
            others = keep & ~at_classes(index, x, xp)
            below = stop_gradient(row_top(y, others, xp))
            e = xp.where(others, xp.exp(xp.where(others, y - below, xp.zeros_like(y))), xp.zeros_like(y))
            nonempty = total(e, xp) > 0
            log_e = xp.log(xp.where(nonempty, total(e, xp), xp.ones_like(z)))
            log_rest = hide(below + log_e, nonempty) - log_z
        return Terms(*(None if part is None else poison(part, poisoned, xp) for part in (log_p, h, log_rest)))


def terms(x: Array, index: Array, *, scale: float, entropy: bool, rest: bool) -> Terms:
    """`plain`, a few rows at a time in NumPy."""
    xp = namespace(x)
    parts = list(blocks(tuple(x.shape[:-1]), x.shape[-1], _BLOCK)) if isinstance(x, np.ndarray) else [()]
    if len(parts) == 1:
        return plain(x, index, xp, scale=scale, entropy=entropy, rest=rest)
    kind = upcast(x[..., :1], xp).dtype
    sizes = (index.shape[-1], 1 if entropy else 0, 1 if rest else 0)
    out = [np.empty((*x.shape[:-1], size), kind) for size in sizes]
    for part in parts:
        for whole, piece in zip(out, plain(x[part], index[part], xp, scale=scale, entropy=entropy, rest=rest)):
            if piece is not None:
                whole[part] = piece
    return Terms(out[0], out[1] if entropy else None, out[2] if rest else None)


def at_classes(index: Array, x: Array, xp: Namespace) -> Array:
    """True at the classes of an index [..., m]; n means no class."""
    n = x.shape[-1]
    shape = (*x.shape[:-1], n + 1)
    if is_torch(x):
        torch = sys.modules["torch"]
        return torch.zeros(shape, dtype=torch.bool, device=x.device).scatter(-1, index, True)[..., :n]
    if is_jax(x):
        return xp.put_along_axis(xp.zeros(shape, dtype=bool), index, True, axis=-1, inplace=False)[..., :n]
    if isinstance(x, np.ndarray):
        out = np.zeros(shape, bool)
        np.put_along_axis(out, index, True, axis=-1)
        return out[..., :n]
    out, place = xp.zeros(x.shape, dtype=xp.bool), positions(x, index.dtype, xp)
    for i in range(index.shape[-1]):
        out = out | (place == index[..., i : i + 1])
    return out


def blocks(lead: tuple[int, ...], n: int, limit: int) -> Iterator[tuple[Any, ...]]:
    """Indices of the leading axes that split rows into views of at most `limit` scores, or of one row."""
    if not lead or math.prod(lead) * n <= limit:
        yield ()
        return
    inner = math.prod(lead[1:]) * n
    if inner > limit:
        for i in range(lead[0]):
            for part in blocks(lead[1:], n, limit):
                yield i, *part
        return
    step = limit // inner
    for i in range(0, lead[0], step):
        yield (slice(i, i + step),)
