"""Converts what a caller gives into arrays and numbers, or raises an error that says what to give instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import numpy as np

from .dtypes import as_dtype, counts, floating
from .kinds import Array, Namespace, is_array, is_jax, is_ragged, is_torch, namespace
from .tracing import compiling


def _foreign(x: Any) -> bool:
    """True for an object with a dtype and a shape that is not an array: a column of pandas or polars, a DataArray of xarray."""
    if is_torch(x) or is_jax(x):
        return False
    from array_api_compat import is_array_api_obj  # late: not at `import anymax`

    return not is_array_api_obj(x)


def in_memory(x: Any, name: str) -> Any:
    """A plain view of a memory-mapped array, which joblib makes from large arguments; anything else is returned unchanged."""
    if type(x) is np.ndarray or not isinstance(x, np.ndarray):
        return x
    if isinstance(x, np.matrix):
        raise TypeError(f"{name}: a numpy.matrix is not read, since its rows are matrices again; give numpy.asarray(x)")
    return x.view(np.ndarray) if isinstance(x, np.memmap) else x


def asarray(x: Any, name: str = "scores") -> Array:
    """`x` if it is an array; lists, numbers and columns of pandas become NumPy arrays. NumPy arrays get the native byte order."""
    if type(x) is not np.ndarray and isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{name}: a masked array is not read; give its data, and mask=~numpy.ma.getmaskarray(x), True = keep"
        )
    x = in_memory(x, name)
    if isinstance(x, np.ndarray):
        return x if compiling() or x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))
    if is_array(x) and not _foreign(x):
        return dense(x, name)
    try:
        out = np.asarray(x)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a list of tensors that require a gradient
        out = None
    if out is None or out.dtype.kind not in "fiub" or _of_tensors(x):
        if x is None and name == "scores":
            raise TypeError("the scores are missing (None): give an array or a list of numbers")
        raise TypeError(f"{name}: expected an array or a list of numbers, got {_said(x)}")
    return out


_PADDING = "pad it, and say mask=, or use a verb on segments such as anymax.segment_log_apply"


def duplicate(x: Array, xp: Namespace) -> Array:
    """A copy of `x` that may be changed in place and passes gradients on. JAX's arrays are immutable and returned unchanged."""
    if is_jax(x):
        return x
    return x.clone() if is_torch(x) else xp.asarray(x, copy=True)


def floats(x: Any, name: str = "scores") -> tuple[Array, Namespace]:
    """`x` as an array of real floating-point numbers, and its namespace."""
    x = asarray(x, name)
    xp = namespace(x)
    return floating(x, xp, name), xp


def dense(a: Array, name: str, padding: str = _PADDING) -> Array:
    """`a`, or an error if it is a sparse or nested tensor of torch; `padding` is the advice for a nested one."""
    if is_ragged(a):
        kind, remedy = ("nested", padding) if a.is_nested else ("sparse", "call its to_dense()")
        raise TypeError(f"{name} must be a dense tensor, got a {kind} one; {remedy}")
    return a


def _of_tensors(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and any(is_torch(v) or _of_tensors(v) for v in x[:1])


def _said(x: Any) -> str:
    """Words for an error: what was given instead of numbers, and what to do about it."""
    if is_array(x):
        hint = "; call its toarray()" if type(x).__module__.startswith("scipy.sparse") else ""
        return f"{shown(x)} and dtype {x.dtype}{hint}"
    if isinstance(x, (list, tuple)):
        if _of_tensors(x):
            return f"a {type(x).__name__} of tensors; make one of them: torch.stack(x)"
        lengths = sorted({len(v) if isinstance(v, (list, tuple)) or is_array(v) else 0 for v in x})
        if len(lengths) > 1:
            return f"rows of different lengths, from {lengths[0]} to {lengths[-1]}; pad them, and say mask="
        flat = x
        while isinstance(flat, (list, tuple)) and flat and isinstance(flat[0], (list, tuple)):
            flat = flat[0]
        for v in flat:
            if is_int(v):
                if abs(v) >= 2**63:
                    return f"a {type(x).__name__} with an integer beyond 64 bits; convert it to float"
            elif not isinstance(v, (float, np.generic)):
                return f"a {type(x).__name__} with {shown(v)} in it"
    if type(x).__name__ == "DataFrame":
        return "a DataFrame whose columns NumPy has no numbers for; if they hold numbers, pass its astype(float)"
    if isinstance(x, dict) and x:
        return f"a {type(x).__name__}; give the numbers in it, as in x[{next(iter(x))!r}]"
    if isinstance(x, (set, frozenset, Iterator)):
        return f"a {type(x).__name__}, which has no order or length; make a list of it"
    if callable(x) and not isinstance(x, type):
        return f"{shown(x)}, which is called to give numbers; give what it returns"
    return shown(x)


def adopt(value: Any, x: Array, xp: Namespace) -> Array:
    """A NumPy array converted to the framework and device of `x`. torch warns of read-only arrays and rejects negative strides."""
    if not is_torch(x):
        return xp.asarray(value)
    if isinstance(value, np.ndarray) and not compiling():
        value = value if value.flags.writeable and all(s >= 0 for s in value.strides) else value.copy()
    return xp.asarray(value, device=x.device)


def on_host(x: Any) -> np.ndarray:
    """The values of any array, on any device, as NumPy's; those of half precision that NumPy lacks in fp32."""
    if is_torch(x):
        x = x.detach().cpu()
        x = x.float() if x.is_floating_point() and x.element_size() < 4 else x
    return np.asarray(x)


def like(value: Any, x: Array, xp: Namespace) -> Any:
    """A parameter in the dtype of `x`: arrays are cast, Python numbers stay, since they adopt any dtype."""
    if not is_array(value):
        return value
    if not is_torch(x) and is_torch(value):
        raise TypeError(f"a torch parameter needs torch scores, got scores of {type(x).__name__}")
    if (is_torch(x) and not is_torch(value)) or (is_jax(x) and not is_jax(value)):
        value = adopt(value, x, xp)
    return as_dtype(value, x.dtype, xp)


_BY_TORCH = (list, tuple, int, float, np.ndarray)  # what torch makes a tensor of while it compiles


def beside(value: Any, rows: Array, name: str, xp: Namespace) -> Array:
    """A target, weight or mask as an array of the scores' framework, on their device.

    A tensor on another device is an error, before a kernel reads its address; one number in the CPU's memory is moved, as torch does.
    """
    if is_torch(rows) and isinstance(value, _BY_TORCH) and compiling():  # torch.compile can't trace NumPy's dtypes
        return xp.asarray(value, device=rows.device)
    value = asarray(value, name)
    if is_torch(value) and not is_torch(rows):
        raise TypeError(f"{name}: got a torch tensor for scores of another framework; convert one of them")
    if is_jax(value) and is_torch(rows):
        raise TypeError(f"{name}: got a JAX array for scores of torch; convert one of them")
    if is_torch(value):
        if value.device == rows.device:
            return value
        if value.ndim or not value.is_cpu:
            raise ValueError(
                f"{name} is on {value.device}, the call's other arrays are on {rows.device}; move one of them"
            )
        return value.to(rows.device)
    if type(value) is type(rows):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind == "u":
        value = counts(value, namespace(value))  # torch can't compare unsigned integers
    return adopt(value, rows, xp)


def number(value: Any) -> Any:
    """NumPy's scalars as Python's, which adopt the dtype of any array; anything else is returned unchanged."""
    return value.item() if isinstance(value, np.generic) else value


def as_scalar(out: Any) -> Any:
    """A result for the caller: one number of NumPy as a scalar, as NumPy's own reductions give it; anything else unchanged."""
    return out[()] if type(out) is np.ndarray and not out.ndim else out


def is_number(value: Any) -> TypeGuard[float]:
    """True for a Python int or float, not for a bool. Give `number(value)` where NumPy's scalars count too."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_int(value: Any) -> TypeGuard[int]:
    """True for a Python int, not for a bool. Give `number(value)` where NumPy's scalars count too."""
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """How an error shows a value: its repr if that is short, else its type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if is_array(value):
        return f"{type(value).__name__} of shape {tuple(value.shape)}"
    said = repr(value)
    if "\n" not in said and len(said) <= 60 and " object at 0x" not in said:
        return said
    return f"a value of the type {type(value).__qualname__}"


def check_scalar(subject: str, value: Any, allowed: Callable[[float], bool], words: str) -> Any:
    """The value as a number of Python, if it is a number that is allowed; else an error that says what it must be."""
    value = number(value)
    if not is_number(value) or not allowed(value):
        raise ValueError(f"{subject} must be {words}, got {value!r}")
    return value


def check_flag(who: str, name: str, value: Any, hint: str = "") -> bool:
    """The option as a bool of Python; anything that is not a boolean is an error, also 1 and None."""
    if value is True or value is False:
        return value
    found = number(value)
    if not isinstance(found, bool):
        raise TypeError(f"{who}: {name} must be True or False, got {shown(value)}{hint}")
    return found


def check_integer(owner: str, name: str, value: Any, hint: str) -> int:
    """The parameter as a Python integer; anything else is an error, also 2.0 and True."""
    found = number(value)
    if not is_int(found):
        raise TypeError(f"{owner}({name}={value!r}): {name} must be {hint}")
    return int(found)
