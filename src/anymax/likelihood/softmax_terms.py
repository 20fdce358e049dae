"""What a row of scores says under softmax, by the framework of the scores.

NumPy goes a few rows at a time, JAX compiles one program, torch has a pass of its own, forward and backward (`softmax_torch`).
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np

from .._array import Array, Namespace, is_jax, is_torch, upcast
from .softmax_plain import Terms, blocks, plain

_BLOCK = 1 << 18  # scores at a time: what is made of them stays in the cache


def terms(x: Array, index: Array, scale: float, entropy: bool, rest: bool, xp: Namespace) -> Terms:
    """The terms of softmax(scale x) for classes [..., m], of which those that are no class are n, and mean nothing."""
    if is_torch(x):
        from . import softmax_torch as leaf  # late: only where torch is loaded already

        return leaf.terms(x, index, scale, entropy, rest)
    if is_jax(x):
        return _compiled()(x, index, scale, entropy, rest)
    if not isinstance(x, np.ndarray):
        return plain(x, index, scale, entropy, rest, xp)
    parts = list(blocks(tuple(x.shape[:-1]), x.shape[-1], _BLOCK))
    if len(parts) == 1:
        return plain(x, index, scale, entropy, rest, xp)
    kind = upcast(x[..., :1], xp).dtype
    sizes = (index.shape[-1], 1 if entropy else 0, 1 if rest else 0)
    out = [np.empty((*x.shape[:-1], size), kind) for size in sizes]
    for part in parts:
        for whole, piece in zip(out, plain(x[part], index[part], scale, entropy, rest, xp)):
            if piece is not None:
                whole[part] = piece
    return Terms(out[0], out[1] if entropy else None, out[2] if rest else None)


@functools.lru_cache(maxsize=1)
def _compiled() -> Any:
    """`plain` for JAX, as one program, of which XLA keeps what does not have to be an array."""
    jax = sys.modules["jax"]
    return jax.jit(functools.partial(plain, xp=jax.numpy), static_argnums=(2, 3, 4))
