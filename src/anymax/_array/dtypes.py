"""Dtypes by their bare names, and which dtype each computation uses."""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any

import numpy as np

from .kinds import Array, Namespace, is_jax, is_torch

_HALVES = ("float16", "bfloat16")
_FLOATS = ("float", "bfloat")
BELOW_1 = {"float16": 1.0 - 2.0**-11, "bfloat16": 1.0 - 2.0**-8}  # the largest number below 1
_DOUBLES = ("float64", "longdouble", "float96", "float128")  # the last two: NumPy's longdouble if it is wider


def dtype_name(x: Array) -> str:
    """The bare name of the dtype of `x`: 'float32', 'bfloat16', 'int64', ..."""
    return str(x.dtype).rsplit(".", 1)[-1].strip("'<>")


def is_floating(x: Array) -> bool:
    return dtype_name(x).startswith(_FLOATS)


def is_double(x: Array) -> bool:
    """True for float64 and wider floats; formulas are accurate to float64 then."""
    return dtype_name(x) in _DOUBLES


def is_integer(x: Array) -> bool:
    kind = x.dtype.kind if isinstance(x.dtype, np.dtype) else ""  # the name of NumPy's takes 3 us
    return kind in "iu" if kind in ("i", "u", "f") else dtype_name(x).startswith(("int", "uint"))


def is_boolean(x: Array) -> bool:
    return "bool" in dtype_name(x)


def default_float(xp: Namespace) -> Any:
    """The dtype to which integer scores are promoted: the default of the namespace."""
    return xp.asarray(0.0).dtype if not hasattr(xp, "get_default_dtype") else xp.get_default_dtype()


def floating(x: Array, xp: Namespace, name: str = "scores") -> Array:
    """`x` with a real floating dtype: integers are promoted, bool and complex are errors."""
    kind = dtype_name(x)
    if kind.startswith(_FLOATS):
        if kind.endswith("_x2"):
            raise TypeError(f"{name}: {kind} holds two numbers in each entry; unpack them to float32 first")
        return x
    if is_integer(x):
        return xp.astype(x, default_float(xp))
    how = "take their real part" if kind.startswith("complex") else "convert them to float32"
    how = "give numbers, not words" if kind.startswith(("U", "S", "StringDType")) else f"{how} first"
    raise TypeError(f"{name}: expected real floating-point (or integer) numbers, got {kind}; {how}")


def autocast_dtype(x: Any) -> Any:
    """The dtype to which torch's autocast converts a tensor beside `x`, None where it is off, and for other arrays."""
    if not is_torch(x):
        return None
    torch, kind = sys.modules["torch"], x.device.type
    # these have no autocast, and an error in its place; torch.compile before torch 2.12 does not trace `is_autocast_available`
    on = kind not in ("meta", "lazy", "vulkan") and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None


def autocast(x: Any) -> Any:
    """A tensor of up to 32 bits in the dtype of torch's autocast, as torch's own functions take it; anything else is returned unchanged."""
    dtype = autocast_dtype(x)
    return x if dtype is None or not x.is_floating_point() or is_double(x) else x.to(dtype)


def without_autocast(x: Any) -> contextlib.AbstractContextManager:
    """A context in which torch's autocast changes no tensor beside `x`: the operands have the dtypes that they are to have."""
    if autocast_dtype(x) is None:
        return contextlib.nullcontext()
    return sys.modules["torch"].autocast(x.device.type, enabled=False)


def as_written(x: Array) -> contextlib.AbstractContextManager:
    """A context in which operations on `x` mean what is written: torch's autocast is off, and JAX may promote ranks even if the user
    has forbidden it (jax_numpy_rank_promotion)."""
    return sys.modules["jax"].numpy_rank_promotion("allow") if is_jax(x) else without_autocast(x)


def widest(xp: Namespace, *arrays: Array) -> Any:
    """The dtype to which arrays are promoted. torch.compile does not trace `torch.result_type`, which the namespace calls for bf16."""
    if is_torch(arrays[0]):
        return functools.reduce(sys.modules["torch"].promote_types, (a.dtype for a in arrays))
    return xp.result_type(*arrays)


def asked_for(given: Any, x: Array, option: str = "dtype") -> Any:
    """The dtype of `x`'s framework that `given` means: a name, or a floating-point dtype of any framework."""
    if not isinstance(x, np.ndarray) and not is_torch(x) and not is_jax(x):
        return given
    kind = "" if isinstance(given, str) else type(given).__module__.partition(".")[0]
    try:
        if is_torch(x) and isinstance(given, str) and given == "bfloat16":
            name = given  # torch.compile does not trace the error of NumPy
        else:
            name = str(given).rsplit(".", 1)[-1] if kind == "torch" else np.dtype(given).name
    except TypeError:  # NumPy has no bfloat16 until ml_dtypes registers it
        name = given if isinstance(given, str) else ""
    if not name.startswith(_FLOATS):
        raise TypeError(f"{option}: expected a floating-point dtype such as 'float32', got {given!r}")
    if is_torch(x):
        found = getattr(sys.modules["torch"], name, None)
    else:
        try:
            found = np.dtype(name if kind in ("", "torch", "builtins") else given)
        except TypeError:
            found = None
    if found is None:
        raise TypeError(f"{option}: {'torch' if is_torch(x) else 'NumPy'} has no {given!r}")
    return found


def upcast(x: Array, xp: Namespace) -> Array:
    """fp16, bf16 and floats of at most 8 bits are cast to fp32 for the computation; other dtypes are returned unchanged."""
    return xp.astype(x, xp.float32) if dtype_name(x) in _HALVES or narrow(x) else x


def wide_name(x: Array) -> str:
    """The dtype, by name, in which entries of `x` are summed or compared: float64 for float64, float32 for any other."""
    return "float64" if dtype_name(x) == "float64" else "float32"


def wide_dtype(x: Array, xp: Namespace) -> Any:
    """The dtype that `wide_name` names, in the framework of `x`."""
    return xp.float64 if x.dtype == xp.float64 else xp.float32


def as_dtype(x: Array, dtype: Any, xp: Namespace) -> Array:
    """`x` in the dtype; unchanged if it has it."""
    return x if x.dtype == dtype else xp.astype(x, dtype)


def narrow(x: Array) -> bool:
    """True for floats of at most 8 bits. Many of these have no infinity, so nothing is masked or summed in them."""
    return getattr(x.dtype, "itemsize", 4) == 1 and is_floating(x)


def index_dtype(x: Array, xp: Namespace) -> Any:
    """The dtype of positions in x: int64, and int32 in JAX, which may have no other."""
    return xp.int32 if is_jax(x) else xp.int64


def sum_dtype(x: Array, xp: Namespace) -> Any:
    """The dtype for long sums whose differences count: float64, where the framework and the device have it."""
    return x.dtype if is_jax(x) or (is_torch(x) and x.device.type == "mps") else xp.float64


def counts(x: Array, xp: Namespace) -> Array:
    """`x` as int64, to count and index classes; JAX without x64 would warn of int64 and gets its widest integer.

    What is too large for that is the largest integer, which is no class: wrapped around it would be below 0, and a row to leave out.
    """
    out = xp.astype(x, sys.modules["jax"].dtypes.canonicalize_dtype("int64") if is_jax(x) else xp.int64)
    unsigned = x.dtype.kind == "u" if isinstance(x.dtype, np.dtype) else dtype_name(x).startswith("uint")
    if unsigned and xp.iinfo(x.dtype).bits >= xp.iinfo(out.dtype).bits:
        out = xp.where(out < 0, xp.iinfo(out.dtype).max * xp.ones_like(out), out)
    return out
