"""Gumbel noise, and the numbers of torch's generator, by the C++ engine: what `_random` asks of `providers`."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

from .._array import Array, decides
from . import choice, native
from .arrays import arrays_of, dtype_of, room_in

_MANY = 4096  # numbers from which on to read the generator's state and to write it costs little


def noise_maker(like: Array) -> Callable[[Array], Array] | None:
    """What makes Gumbel noise of pairs of uniform numbers, [..., 2], for arrays like this one; None where there is none."""
    served = decides(like) and choice.asked() in (None, native.ENGINE.name) and native.refuse_array(like) is None
    return gumbel if served and dtype_of(like) == "float32" else None


def gumbel(pairs: Array) -> Array:
    """-log(-log(1 - u)) for u = pairs[..., 0] + 2^-24 pairs[..., 1], at least 2^-48 and at most 1 - 2^-24."""
    arrays = arrays_of(pairs)
    out = room_in(arrays, tuple(pairs.shape[:-1]), "float32")
    if native.engine_for(pairs).gumbel(arrays.contiguous(pairs), out) is None:
        raise native.not_computed("noise", pairs)
    return out


def torch_uniform(shape: tuple[int, ...], generator: Any) -> Array | None:
    """What torch.rand draws in float32 on a CPU, and the generator, which no other thread has, goes on as after it; None where it is
    to draw itself."""
    if math.prod(shape) < _MANY or choice.asked() not in (None, native.ENGINE.name) or not _draws_as_torch():
        return None
    return _drawn(shape, generator)


def _drawn(shape: tuple[int, ...], generator: Any) -> Any:
    torch = sys.modules["torch"]
    out = torch.empty(shape, dtype=torch.float32, device="cpu")
    return out if native.engine_for(out).torch_uniform(generator, out) else None


@functools.lru_cache(maxsize=1)
def _draws_as_torch() -> bool:
    """True if the engine's numbers are those of this torch."""
    if isinstance(native.load(), str):
        return False
    torch = sys.modules["torch"]
    ours, theirs = (torch.Generator().manual_seed(1) for _ in range(2))
    for size in (700, 1, 1300):
        drawn = _drawn((size,), ours)
        if drawn is None or not torch.equal(drawn, torch.rand(size, generator=theirs, dtype=torch.float32)):
            return False
    return torch.equal(ours.get_state(), theirs.get_state())
