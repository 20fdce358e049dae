"""What a row of scores says under softmax, in plain operations, which every framework differentiates: log p of given classes, its entropy,
and log p of all the other classes together."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .._array import Array, Namespace, is_jax, is_torch, poison, positions, quiet, stop_gradient, take, total, upcast
from .._core.mapping import row_top
from ..mappings import Softmax

_SOFTMAX = Softmax()


class Terms(NamedTuple):
    """Of each row, fp32 or fp64."""

    log_p: Array  # [..., m], of the classes asked for; -inf for one that is masked
    entropy: Array | None  # [..., 1]
    rest: Array | None  # [..., 1], log of what the classes that were not asked for have together


def plain(x: Array, index: Array, scale: float, entropy: bool, rest: bool, xp: Namespace) -> Terms:
    """The same in plain operations, of which every derivative is exact also where a probability is 0."""
    with quiet(x):
        s = upcast(x, xp)
        y, e, z, keep, poisoned = _SOFTMAX.shifted(s if scale == 1.0 else s * scale, xp)
        log_z, n = xp.log(z), x.shape[-1]
        at = xp.where(index < n, index, (n - 1) * xp.ones_like(index))
        log_p = take(xp.where(keep, y, -math.inf * xp.ones_like(y)), at, xp) - log_z
        out = [log_p, log_z - total(e * y, xp) / z if entropy else None, None]  # a sum of two that are not negative
        if rest:
            others = keep & ~named(index, x, xp)
            below = stop_gradient(row_top(y, others, xp))
            e = xp.where(others, xp.exp(xp.where(others, y - below, xp.zeros_like(y))), xp.zeros_like(y))
            some = total(e, xp) > 0
            log_e = xp.log(xp.where(some, total(e, xp), xp.ones_like(z)))
            out[2] = xp.where(some, below + log_e, -math.inf * xp.ones_like(z)) - log_z
        return Terms(*(None if part is None else poison(part, poisoned, xp) for part in out))


def named(index: Array, x: Array, xp: Namespace) -> Array:
    """True at the classes of an index [..., m]; n stands for none."""
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
    """What to index the leading axes of rows with to go through them, at most `limit` scores (or a row) at a time, without copies."""
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
