"""The C++ engine's attention with Taylor softmax of order 2 in linear time (csrc/linear/): NumPy arrays and torch tensors on the CPU."""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np

from .._array import Array, is_torch
from . import native
from .arrays import arrays_of, dtype_of, room_in


class How(NamedTuple):
    """The options of a call."""

    groups: int  # heads of q for each head of k and v
    scale: float
    causal: bool
    lengths: np.ndarray | None  # how many keys of each head are real


def attend(q: Array, k: Array, v: Array, how: How, save: bool = False) -> tuple[Array, Array | None]:
    """The output for q [..., heads * groups, L, D], k and v [..., heads, S, D or Dv]; and with `save` the denominators, for `vjp`."""
    framework, dtype = arrays_of(q), dtype_of(q)
    shape = tuple(q.shape[:-1])
    out = room_in(framework, (*shape, v.shape[-1]), dtype)
    below = room_in(framework, shape, dtype) if save else None
    _run(how, q, k, v, out, below)
    return out, below


def vjp(
    q: Array, k: Array, v: Array, out: Array, below: Array, g: Array, how: How, wants_q: bool, wants_k: bool
) -> tuple[Array | None, Array | None, Array | None]:
    """The gradients of q, k and v from the results of `attend`; those of k and v are computed together."""
    framework = arrays_of(q)
    dq = framework.empty_like(framework.contiguous(q)) if wants_q else None
    dk, dv = (framework.empty_like(framework.contiguous(a)) if wants_k else None for a in (k, v))
    _run(how, q, k, v, out, below, framework.contiguous(g), dq, dk, dv)
    return dq, dk, dv


def _run(how: How, q: Array, k: Array, v: Array, out: Array, below: Array | None, *gradients: Array | None) -> None:
    engine, framework = native.engine_for(q), arrays_of(q)
    lengths = None
    if how.lengths is not None:
        lengths = np.ascontiguousarray(np.clip(how.lengths, 0, k.shape[-2]), np.int64)
    q, k, v = (framework.contiguous(a) for a in (q, k, v))
    g, dq, dk, dv = gradients or (None,) * 4
    threads = sys.modules["torch"].get_num_threads() if native.pool(is_torch(q)) else native.get_num_threads()
    made = engine.linear(q, k, v, out, lengths, below, g, dq, dk, dv, how.groups, how.causal, float(how.scale), threads)
    if made is None:
        raise RuntimeError(
            f"the native engine can't compute linear attention on {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
