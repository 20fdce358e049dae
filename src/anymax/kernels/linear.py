"""The C++ engine's attention with Taylor softmax of order 2 in linear time (csrc/linear/): NumPy arrays and torch tensors on the CPU."""

from __future__ import annotations

import ctypes
import math
import sys
from typing import NamedTuple

import numpy as np

from .._array import Array, is_torch
from . import native


class _Call(ctypes.Structure):  # anymax_linear_call
    _fields_ = [
        ("dtype", ctypes.c_int32), ("causal", ctypes.c_int32), ("pool", ctypes.c_int32), ("threads", ctypes.c_int32),
        ("heads", ctypes.c_int64), ("groups", ctypes.c_int64), ("queries", ctypes.c_int64), ("keys", ctypes.c_int64),
        ("d", ctypes.c_int64), ("dv", ctypes.c_int64), ("scale", ctypes.c_double),
        ("q", ctypes.c_void_p), ("k", ctypes.c_void_p), ("v", ctypes.c_void_p), ("out", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p), ("below", ctypes.c_void_p), ("g", ctypes.c_void_p),
        ("dq", ctypes.c_void_p), ("dk", ctypes.c_void_p), ("dv_", ctypes.c_void_p),
    ]  # fmt: skip


class How(NamedTuple):
    """What a call asks for beside its operands."""

    groups: int  # of heads of q that share one of k and v
    scale: float
    causal: bool
    lengths: np.ndarray | None  # of each head's keys


def attend(q: Array, k: Array, v: Array, how: How, save: bool = False) -> tuple[Array, Array | None]:
    """The output for q [..., heads * groups, L, D], k and v [..., heads, S, D or Dv]; and, to save, what the gradient asks for."""
    world, dtype = native.world_of(q), native.dtype_of(q)
    shape = tuple(q.shape[:-1])
    out = native.room_in(world, (*shape, v.shape[-1]), dtype)
    below = native.room_in(world, shape, dtype) if save else None
    _run("anymax_linear", how, q, k, v, {"out": out} | ({} if below is None else {"below": below}))
    return out, below


def vjp(
    q: Array, k: Array, v: Array, out: Array, below: Array, g: Array, how: How, wants_q: bool, wants_k: bool
) -> tuple[Array | None, Array | None, Array | None]:
    """The gradients of q, k and v, from what `attend` has made; those of k and v come together."""
    world = native.world_of(q)
    dq = world.empty_like(world.contiguous(q)) if wants_q else None
    dk, dv = (world.empty_like(world.contiguous(a)) if wants_k else None for a in (k, v))
    written = {name: a for name, a in (("dq", dq), ("dk", dk), ("dv_", dv)) if a is not None}
    _run("anymax_linear_vjp", how, q, k, v, {"out": out, "below": below, "g": world.contiguous(g), **written})
    return dq, dk, dv


def _run(function: str, how: How, q: Array, k: Array, v: Array, others: dict[str, Array]) -> None:
    lib = native.load()
    assert not isinstance(lib, str)
    world, call = native.world_of(q), _Call()
    operands = {"q": world.contiguous(q), "k": world.contiguous(k), "v": world.contiguous(v), **others}
    for name, a in operands.items():
        setattr(call, name, world.pointer(a))
    if how.lengths is not None:
        lengths = np.ascontiguousarray(np.clip(how.lengths, 0, k.shape[-2]), np.int64)
        call.lengths = lengths.ctypes.data
    call.dtype, call.causal, call.pool = native.DTYPES[native.dtype_of(q)], how.causal, native.pool(is_torch(q))
    call.threads = sys.modules["torch"].get_num_threads() if call.pool else native.get_num_threads()
    call.heads, call.groups, call.queries, call.keys = math.prod(k.shape[:-2]), how.groups, q.shape[-2], k.shape[-2]
    call.d, call.dv, call.scale = q.shape[-1], v.shape[-1], how.scale
    if code := getattr(lib.free, function)(ctypes.byref(call)):
        raise native.failure(code, lib, "linear attention", f"heads of {q.shape[-1]} features")
