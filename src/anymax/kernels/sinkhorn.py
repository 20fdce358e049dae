"""Sinkhorn's iteration and its gradient by compiled engines: in C++ for NumPy arrays and torch tensors on the CPU, in Triton on a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .._array import Array, is_torch, namespace
from . import native
from .arrays import arrays_of, dtype_of, empty_like
from .choice import asked, refuse_other
from .triton import sinkhorn as on_gpu

_DTYPES = ("float32", "float64")


class Call(NamedTuple):
    """Matrices [..., n, m], the sums that are asked for [..., n] and [..., m] (None: equal shares), and how often to iterate."""

    x: Array
    rows: Array | None
    columns: Array | None
    iterations: int
    temperature: float


def refuse(call: Call) -> str | None:
    """Why no engine takes these matrices; None if one does."""
    x = call.x
    if is_torch(x) and x.is_cuda:
        return on_gpu.refuse(x, call.rows, call.columns, asked())
    if reason := refuse_other(native.ENGINE.name) or native.refuse_array(x):
        return reason
    return None if dtype_of(x) in _DTYPES else f"it takes {' and '.join(_DTYPES)}, not {x.dtype}"


def forward(call: Call) -> Array:
    """P; `refuse` must not refuse the call."""
    return _run(call, None)


def vjp(call: Call, g: Array) -> Array:
    """The gradient of the scores from that of P, with which P is iterated once more."""
    return _run(call, g)


def converge(call: Call, tolerance: float) -> tuple[Array, np.ndarray]:
    """P once the sums of all rows are within the tolerance, or the iterations are over; and for each matrix what they lack, [...].

    Not on a GPU.
    """
    left = np.zeros(tuple(call.x.shape[:-2]), np.float64)
    return _run(call, None, tolerance, left), left


def _run(call: Call, g: Array | None, tolerance: float = 0.0, left: np.ndarray | None = None) -> Array:
    x: Any = call.x.detach() if is_torch(call.x) else call.x
    if is_torch(x) and x.is_cuda:
        return on_gpu.run(x, g, call.iterations, call.temperature)
    framework = arrays_of(x)
    x = framework.contiguous(x)
    g = None if g is None else framework.contiguous(g)
    out = empty_like(x)
    if 0 not in x.shape:
        rows, columns = (_sums(value, x) for value in (call.rows, call.columns))
        numbers = call.iterations, float(call.temperature), tolerance
        if native.engine_for(x).sinkhorn(x, rows, columns, g, out, *numbers, left) is None:
            raise RuntimeError(f"the native engine can't compute Sinkhorn of {dtype_of(x)} {tuple(x.shape)}")
    return out


def _sums(value: Array | None, x: Array) -> Array | None:
    """The sums of all matrices, [n] where they have the same, or of each, in C order."""
    if value is None:
        return None
    held: Any = value.detach() if is_torch(value) else value
    framework, size = arrays_of(x), held.shape[-1]
    if all(n == 1 for n in held.shape[:-1]):
        return framework.contiguous(namespace(held).reshape(held, (size,)))
    return framework.contiguous(framework.broadcast(held, (*x.shape[:-2], size)))
