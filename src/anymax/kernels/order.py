"""Soft ranks and soft sorting by the C++ engine (csrc/order/): NumPy arrays and torch tensors on the CPU."""

from __future__ import annotations

from typing import Any, NamedTuple

from .._array import Array, as_dtype, is_array, namespace, upcast
from .._core.mapping import Mapping
from .._core.rows import hide
from .arrays import arrays_of, dtype_of, empty_like, room_in
from .compiled import Compiled

# the kernels of this file, and whether they give the sorted scores rather than their ranks
KERNELS = {"ranks": False, "soft_sort": True}
_OPS = ("forward", "vjp")


class Order(NamedTuple):
    """The classes of each row in descending order, [..., n]; the sign bit is set at the first of each block."""

    memory: Array  # int32


def refuse(op: str, mapping: Mapping) -> str | None:
    """Why the library can't compute an operation of these maps, on arrays that it takes; None if it can."""
    if op not in _OPS:
        return f"it has {' and '.join(_OPS)} of {mapping.name}, not {op}"
    return "it takes one strength for all rows" if is_array(_options(mapping)[0]) else None


def _options(mapping: Any) -> tuple[Any, int]:
    """The strength, and the other options as the bits that csrc/doors/python/order.cpp reads."""
    by_rank = not KERNELS[mapping.kernel]
    descending = 2 if by_rank or mapping.descending else 0
    return mapping.strength, (0 if by_rank else 1) | descending | (4 if mapping.regularization == "kl" else 0)


def forward_saving(
    engine: Compiled, mapping: Mapping, x: Array, mask: Array | None = None, save: bool = True
) -> tuple[Array, Order | None]:
    xp = namespace(x)
    x = x if mask is None else hide(x, mask)
    arrays = arrays_of(x)
    rows = arrays.contiguous(upcast(x, xp))
    out = empty_like(rows)
    order = room_in(arrays, tuple(rows.shape), "int32") if save else None
    strength, how = _options(mapping)
    _done(engine.order(rows, out, order, float(strength), how), mapping, x)
    return as_dtype(out, x.dtype, xp), None if order is None else Order(order)


def vjp(engine: Compiled, mapping: Mapping, x: Array, p: Array, g: Array, saved: Order | None) -> Array:
    xp, dtype = namespace(p), p.dtype
    order = saved if saved is not None else forward_saving(engine, mapping, x)[1]
    assert order is not None
    arrays = arrays_of(p)
    x, p, g = (arrays.contiguous(a) for a in (upcast(x, xp), upcast(p, xp), upcast(g, xp)))
    out = empty_like(p)
    strength, how = _options(mapping)
    scores = x if KERNELS[str(mapping.kernel)] else None
    _done(engine.order_vjp(scores, p, g, arrays.contiguous(order.memory), out, float(strength), how), mapping, p, g)
    return as_dtype(out, dtype, xp)


def _done(answer: Any, mapping: Mapping, *arrays: Array) -> None:
    if answer is None:
        words = ", ".join(f"{dtype_of(a)} {tuple(a.shape)}" for a in arrays)
        raise RuntimeError(f"the native engine can't compute {mapping.name} on {words}")
