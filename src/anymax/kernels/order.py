"""The engine for soft ranks and soft sorting: the C++ engine (csrc/order/), for NumPy arrays and torch tensors on the CPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .._array import Array, as_dtype, is_array, namespace, on_host, upcast
from .._core.mapping import Mapping
from . import native
from .arrays import arrays_of, empty_like, room_in
from .engine import Engine

# the kernels of this engine, and whether they give the sorted scores rather than their ranks
KERNELS = {"ranks": False, "soft_sort": True}
_ENGINE = "the engine of soft order"


class Order(NamedTuple):
    """The classes of each row in descending order, [..., n]; the sign bit is set at the first of each block."""

    memory: Array  # int32


class SoftOrder(Engine):
    name = "order"
    ops = ("forward", "vjp")
    compiled = True

    def refuse(self, op: str, mapping: Mapping, x: Any) -> str | None:
        if mapping.kernel not in KERNELS:
            return "its maps are soft ranks and soft sorting"
        if op not in self.ops:
            return self.lacks(op)
        return refuse_strength(mapping) or native.refuse_array(x)

    def forward(self, mapping: Mapping, x: Array, mask: Array | None = None, out: Array | None = None) -> Array:
        return _forward(mapping, x, None)

    def forward_saving(
        self, mapping: Mapping, x: Array, mask: Array | None = None, out: Array | None = None
    ) -> tuple[Array, Order]:
        """The ranks, or the scores in soft order, and the order of the scores."""
        order = Order(room_in(arrays_of(x), tuple(x.shape), "int32"))
        return _forward(mapping, x, order), order

    def vjp(self, mapping: Mapping, x: Array, p: Array, g: Array, saved: Order | None = None) -> Array:
        order = saved if saved is not None else self.forward_saving(mapping, x)[1]
        xp, arrays = namespace(p), arrays_of(p)
        x, p, g, dtype = (*(arrays.contiguous(upcast(a, xp)) for a in (x, p, g)), p.dtype)
        out = empty_like(p)
        scores = x if KERNELS[str(mapping.kernel)] else None
        engine = native.engine_for(p)
        answer = engine.order_vjp(scores, p, g, arrays.contiguous(order.memory), out, *_options(mapping, p))
        if answer is None:
            raise native.not_computed(mapping.name, p, g, engine=_ENGINE)
        return as_dtype(out, dtype, xp)

    def plan(self, op: str, mapping: Mapping, x: Array) -> str | None:
        return "sorts each row, and averages neighbours that are out of order"


def how(kind: type[Mapping], fields: dict[str, Any]) -> int:
    """The options of a map as the bits that csrc/doors/python/order.cpp reads."""
    by_rank = not KERNELS[str(kind.kernel)]
    descending = 2 if by_rank or fields["descending"] else 0
    return (0 if by_rank else 1) | descending | (4 if fields["regularization"] == "kl" else 0)


def _options(mapping: Any, x: Array) -> tuple[np.ndarray, int]:
    """The strength of the map, and its other options."""
    return one_a_row(mapping.strength, x), how(type(mapping), mapping.constants())


def _forward(mapping: Mapping, x: Array, order: Order | None) -> Array:
    """The result, and the order written to `order`."""
    xp = namespace(x)
    rows = arrays_of(x).contiguous(upcast(x, xp))
    out = empty_like(rows)
    answer = native.engine_for(x).order(rows, out, order and order.memory, *_options(mapping, x))
    if answer is None:
        raise native.not_computed(mapping.name, x, engine=_ENGINE)
    return as_dtype(out, x.dtype, xp)


def refuse_strength(mapping: Any) -> str | None:
    """Why the library can't take the strength of a map, a number or an array; None if it can."""
    reason = native.refuse_array(mapping.strength) if is_array(mapping.strength) else None
    return reason and f"its strength: {reason}"


def one_a_row(strength: Any, x: Array) -> np.ndarray:
    """A parameter as float64: one number, or one for each row of x."""
    if is_array(strength):
        strength = np.broadcast_to(on_host(strength), (*x.shape[:-1], 1)).reshape(-1)
    return np.array(strength, np.float64, ndmin=1, order="C")


ENGINE = SoftOrder()
