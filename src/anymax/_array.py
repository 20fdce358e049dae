"""Arrays of any kind: namespace, dtypes, axes, masks and safe powers. Imports no framework.

A framework is found through `sys.modules`: an array of torch can only exist where torch is loaded.
"""

from __future__ import annotations

import contextlib
import math
import sys
from typing import Any, TypeVar

import numpy as np

Array = Any  # an array of any kind: NumPy, torch, JAX, or of the array-API standard
Namespace = Any
_T = TypeVar("_T")

_HALVES = ("float16", "bfloat16")


def torch_loaded() -> Any:
    """torch, None where it is not loaded, or is still being imported by another thread: `compiler` comes last of what we ask for."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "compiler") else None


def is_torch(x: Any) -> bool:
    torch = torch_loaded()
    return torch is not None and isinstance(x, torch.Tensor)


def is_jax(x: Any) -> bool:
    # while another thread is importing jax, half of the module is there: then x is none of its arrays
    return isinstance(x, getattr(sys.modules.get("jax"), "Array", ()))


def is_array(x: Any) -> bool:
    """True for an array with a dtype and a shape, False for numbers (NumPy's scalars too), lists and None."""
    if isinstance(x, (int, float, str)):  # said first, for torch.compile(dynamic=True), which makes symbols of numbers
        return False
    return is_torch(x) or (hasattr(x, "dtype") and hasattr(x, "shape") and not isinstance(x, np.generic))


def namespace(x: Array) -> Namespace:
    """The array-API namespace of `x`."""
    if is_torch(x):
        import array_api_compat.torch as xp  # late: torch is loaded already, since x is a tensor

        return xp
    if is_jax(x):
        return sys.modules["jax"].numpy
    if isinstance(
        x, np.ndarray
    ):  # which array_namespace knows only after it has asked modules that may be half imported
        import array_api_compat.numpy as xp  # late: not at `import anymax`

        return xp
    from array_api_compat import array_namespace  # late: as above

    return array_namespace(x)


def compiling() -> bool:
    """True while torch.compile traces: it looks through a cache and warns of it, and NumPy's arrays are tensors without strides."""
    torch = torch_loaded()
    return torch is not None and torch.compiler.is_compiling()


def _is_column(x: Any) -> bool:
    pandas = sys.modules.get("pandas")
    return isinstance(x, (getattr(pandas, "Series", ()), getattr(pandas, "Index", ())))


def in_memory(x: Any, name: str) -> Any:
    """A memory-mapped array (joblib makes such of large arguments) as a plain view of its memory; anything else as it is."""
    if type(x) is np.ndarray or not isinstance(x, np.ndarray):
        return x
    if isinstance(x, np.matrix):
        raise TypeError(f"{name}: a numpy.matrix is not read, since its rows are matrices again; give numpy.asarray(x)")
    return x.view(np.ndarray) if isinstance(x, np.memmap) else x


def asarray(x: Any, name: str = "scores") -> Array:
    """`x` itself where it is an array; lists, numbers and columns of pandas become NumPy arrays, in the byte order of this machine."""
    if type(x) is not np.ndarray and isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{name}: a masked array is not read; give its data, and mask=~numpy.ma.getmaskarray(x), True = keep"
        )
    x = in_memory(x, name)
    if is_array(x) and not _is_column(x):
        plain = not isinstance(x, np.ndarray) or compiling() or x.dtype.isnative
        return x if plain else x.astype(x.dtype.newbyteorder("="))
    try:
        out = np.asarray(x)
    except ValueError as error:
        raise TypeError(f"{name}: expected an array or a list of numbers, got {type(x).__name__} ({error})") from None
    if out.dtype.kind not in "fiub":
        raise TypeError(f"{name}: expected an array or a list of numbers, got {type(x).__name__} of {out.dtype}")
    return out


def dtype_name(x: Array) -> str:
    """The bare name of the dtype of `x`: 'float32', 'bfloat16', 'int64', ..."""
    return str(x.dtype).rsplit(".", 1)[-1].strip("'<>")


def is_floating(x: Array) -> bool:
    return dtype_name(x).startswith(("float", "bfloat"))


def is_integer(x: Array) -> bool:
    return dtype_name(x).startswith(("int", "uint"))


def default_float(xp: Namespace) -> Any:
    """The dtype to which integer scores are promoted: the namespace's own default."""
    return xp.asarray(0.0).dtype if not hasattr(xp, "get_default_dtype") else xp.get_default_dtype()


def floating(x: Array, xp: Namespace, name: str = "scores") -> Array:
    """`x` with a real floating dtype: integers are promoted, bool and complex are errors."""
    if is_floating(x):
        return x
    if is_integer(x):
        return xp.astype(x, default_float(xp))
    raise TypeError(
        f"{name}: expected real floating-point (or integer) numbers, got {dtype_name(x)}; convert them to float32 first"
    )


def upcast(x: Array, xp: Namespace) -> Array:
    """fp16, bf16 and the floats of 8 bits and fewer as fp32, in which they are computed; other dtypes as they are."""
    return xp.astype(x, xp.float32) if dtype_name(x) in _HALVES or narrow(x) else x


def narrow(x: Array) -> bool:
    """True for floats of 8 bits and fewer, many of which have no infinity: nothing is masked or added up in them."""
    return getattr(x.dtype, "itemsize", 4) == 1 and is_floating(x)


def adopt(value: Any, x: Array, xp: Namespace) -> Array:
    """A NumPy array as one of the framework of `x`, on its device. torch warns of read-only arrays and takes no negative strides."""
    if not is_torch(x):
        return xp.asarray(value)
    if isinstance(value, np.ndarray) and not compiling():
        value = value if value.flags.writeable and all(s >= 0 for s in value.strides) else value.copy()
    return xp.asarray(value, device=x.device)


def like(value: Any, x: Array, xp: Namespace) -> Any:
    """A parameter in the dtype of `x`: arrays are cast, Python numbers stay (they adopt any dtype)."""
    if not is_array(value):
        return value
    if not is_torch(x) and is_torch(value):
        raise TypeError(f"a torch parameter needs torch scores, got scores of {type(x).__name__}")
    if (is_torch(x) and not is_torch(value)) or (is_jax(x) and not is_jax(value)):
        value = adopt(value, x, xp)
    return value if value.dtype == x.dtype else xp.astype(value, x.dtype)


def counts(x: Array, xp: Namespace) -> Array:
    """Integers that can count and index classes: int64, or what JAX has without x64, where asking for more is a warning."""
    return xp.astype(x, sys.modules["jax"].dtypes.canonicalize_dtype("int64") if is_jax(x) else xp.int64)


def beside(value: Any, rows: Array, name: str, xp: Namespace) -> Array:
    """A target, a weight or a mask as an array of the scores' framework, on their device."""
    value = asarray(value, name)
    if is_torch(value) and not is_torch(rows):
        raise TypeError(f"{name}: got a torch tensor for scores of another framework; convert one of them")
    if is_jax(value) and is_torch(rows):
        raise TypeError(f"{name}: got a JAX array for scores of torch; convert one of them")
    if is_torch(value) or type(value) is type(rows):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind == "u":
        value = value.astype(np.int64)  # torch can't compare unsigned integers
    return adopt(value, rows, xp)


def stop_gradient(x: Any) -> Any:
    """`x` as a constant of differentiation."""
    if is_torch(x):
        return x.detach()
    if is_jax(x):
        return sys.modules["jax"].lax.stop_gradient(x)
    return x


def differentiates(x: Array) -> bool:
    """True where a derivative may be asked for later."""
    if not is_torch(x):
        return is_jax(x)
    return x.requires_grad or not eager(x) or sys.modules["torch"].autograd.forward_ad._current_level >= 0


def check_axis(axis: Any, ndim: int) -> int:
    """The axis as a non-negative number, or an error that says what is allowed."""
    if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
        raise TypeError(f"axis: expected an integer, got {axis!r}")
    if not ndim:
        raise ValueError("scores: expected at least one dimension, the classes, got a 0-d array")
    if not -ndim <= axis < ndim:
        raise ValueError(f"axis {axis} is out of range for scores with {ndim} dimension(s); use {-ndim} to {ndim - 1}")
    return int(axis) % ndim


def pick_axis(axis: _T | None, dim: _T | None, default: int = -1) -> _T | int:
    """`axis` and `dim` are one keyword under two names."""
    if dim is None:
        return default if axis is None else axis
    if axis is not None and axis != dim:
        raise TypeError(f"axis={axis} and dim={dim} are two names of one argument; give only one")
    return dim


def quiet(x: Array) -> contextlib.AbstractContextManager:
    """For formulas of ours: NumPy's floating-point warnings off, since infinities are part of our contract, and arrays of
    fewer axes allowed where JAX has been told to forbid them (jax_numpy_rank_promotion)."""
    if is_torch(x):
        return contextlib.nullcontext()
    return sys.modules["jax"].numpy_rank_promotion("allow") if is_jax(x) else np.errstate(all="ignore")


def exporting(x: Array) -> bool:
    """True under torch.export, where the sizes of an array may be symbols that must stay free."""
    return is_torch(x) and sys.modules["torch"].compiler.is_exporting()


def eager(x: Array) -> bool:
    """True where a value of `x` may be asked for: no tracing, no functional transform."""
    if is_torch(x):
        torch = sys.modules["torch"]
        if torch.compiler.is_compiling() or torch.compiler.is_exporting():
            return False
        active = getattr(torch._C, "_are_functorch_transforms_active", None)
        if active is not None and active():
            return False
        return type(x) in (torch.Tensor, torch.nn.Parameter) and not x.is_meta
    if is_jax(x):
        return not isinstance(x, sys.modules["jax"].core.Tracer)
    return True


_asked_of_torch: tuple[Any, Any, Any] | None = None


def modes() -> bool:
    """True where a dispatch mode of torch is on: of fake tensors, make_fx (before dispatch too), a counter of operations.

    Only where torch is loaded. Every call of a torch tensor asks this, so the functions that answer it are looked up once.
    """
    stack, included, before = _asked_of_torch or ask_torch()
    return stack() > 0 or included(before)


def ask_torch() -> tuple[Any, Any, Any]:
    """What `modes` asks of torch: the number of modes on, whether dispatch has a key, and the key of a trace before dispatch."""
    global _asked_of_torch
    c = sys.modules["torch"]._C
    _asked_of_torch = c._len_torch_dispatch_stack, c._dispatch_tls_is_dispatch_key_included, c.DispatchKey.PreDispatch
    return _asked_of_torch


def loop(cond: Any, body: Any, state: tuple, limit: int, traced: int) -> tuple:
    """Repeat `state = body(state)` while `cond(state)` holds for any row, at most `limit` times.

    Under JAX's tracing this is one `while_loop`; under torch's, where no value can be asked for, `traced` rounds.
    `body` must leave a row that has converged as it is.
    """
    x = state[0]
    if is_jax(x):
        jax = sys.modules["jax"]
        counted = (jax.numpy.asarray(0), _together(state, jax))
        return jax.lax.while_loop(
            lambda s: (s[0] < limit) & jax.numpy.any(cond(s[1])), lambda s: (s[0] + 1, body(s[1])), counted
        )[1]
    if not eager(x):
        for _ in range(traced):
            state = body(state)
        return state
    xp = namespace(x)
    for _ in range(limit):
        if not bool(xp.any(cond(state))):
            break
        state = body(state)
    return state


def _together(state: tuple, jax: Any) -> tuple:
    """The state, all of it varying over the devices of shard_map where a part is: before JAX 0.8 what is made inside does not by itself."""
    if hasattr(jax.lax, "pcast"):
        return state
    axes = [getattr(jax.typeof(a), "vma", frozenset()) for a in state]
    every = frozenset().union(*axes)
    return tuple(jax.lax.pvary(a, tuple(every - own)) if every - own else a for a, own in zip(state, axes))


def known(x: Array) -> bool:
    """True where a value of x may be asked for at no cost: not while tracing, nor where it would wait for a GPU."""
    return eager(x) and not (is_torch(x) and (x.device.type != "cpu" or modes()))


def known_any(condition: Array, xp: Namespace) -> bool:
    """True where some entry is known to be True."""
    return known(condition) and bool(xp.any(condition))


def number(value: Any) -> Any:
    """NumPy's scalars as Python's, which adopt the dtype of any array; everything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def safe(x: Array, keep: Array, fill: float, xp: Namespace) -> Array:
    """`x` where `keep`, else the harmless `fill`: the inner half of a double `where`, so that no derivative is NaN."""
    return xp.where(keep, x, fill * xp.ones_like(x))


def power(x: Array, exponent: Any, xp: Namespace) -> Array:
    """x^exponent for x > 0 and exactly 0 elsewhere, with derivatives that are 0 there too."""
    keep = x > 0
    return xp.where(keep, safe(x, keep, 1.0, xp) ** exponent, xp.zeros_like(x))


def log(x: Array, xp: Namespace) -> Array:
    """log(x), -inf where x <= 0, with derivatives that are 0 there; NaN stays NaN."""
    zero = x <= 0
    return xp.where(zero, -math.inf * xp.ones_like(x), xp.log(safe(x, ~zero, 1.0, xp)))


def xlogx(x: Array, xp: Namespace) -> Array:
    """x log(x), 0 at 0."""
    keep = x > 0
    y = safe(x, keep, 1.0, xp)
    return xp.where(keep, y * xp.log(y), xp.zeros_like(x))


def total(x: Array, xp: Namespace) -> Array:
    """Sum over the classes (the last axis), kept as an axis of one."""
    return xp.sum(x, axis=-1, keepdims=True)


def dot(a: Array, b: Array, xp: Namespace) -> Array:
    """<a, b> over the classes, kept as an axis of one; 0 times an infinity counts as 0."""
    lost = (a == 0) & ~xp.isfinite(b)
    return total(a * xp.where(lost, xp.zeros_like(b), b), xp)


def top(x: Array, xp: Namespace) -> Array:
    """The maximum over the classes, kept as an axis of one."""
    return xp.max(x, axis=-1, keepdims=True)


def finite_scores(x: Array, xp: Namespace) -> tuple[Array, Array, Array]:
    """Rows made harmless: `(y, keep, poisoned)`.

    `keep` is False at masked (-inf) entries, `poisoned` is True [..., 1] for rows with a NaN or +inf; `y` equals `x`
    where the row is sound and the entry kept, and 0 elsewhere, so that no arithmetic on it can go wrong.
    """
    keep = x != -math.inf
    high = top(x, xp)
    poisoned = xp.isnan(high) | (high == math.inf)
    return xp.where(keep & ~poisoned, x, xp.zeros_like(x)), keep, poisoned


def finish(p: Array, keep: Array, poisoned: Array, xp: Namespace, masked: float = 0.0) -> Array:
    """The policy of the house at the end of every map: masked entries get `masked`, poisoned rows are NaN."""
    p = xp.where(keep, p, masked * xp.ones_like(p) if masked else xp.zeros_like(p))
    return poison(p, poisoned, xp)


def poison(out: Array, where: Array, xp: Namespace) -> Array:
    """NaN where a row is poisoned. JAX gets the bare number: an array of NaNs trips its debug_nans in sound rows too."""
    return xp.where(where, math.nan if is_jax(out) else math.nan * xp.ones_like(out), out)


def to_last(x: Array, axis: int, xp: Namespace) -> Array:
    """The axis moved last. A permutation, since torch.func.vmap has no rule for moveaxis."""
    axes = list(range(x.ndim))
    axes.append(axes.pop(axis))
    return x if axes[axis] == axis else xp.permute_dims(x, tuple(axes))


def from_last(x: Array, axis: int, xp: Namespace) -> Array:
    """The last axis moved back to where it came from."""
    axes = list(range(x.ndim))
    axes.insert(axis, axes.pop())
    return x if axes[-1] == x.ndim - 1 else xp.permute_dims(x, tuple(axes))


def descending(x: Array, xp: Namespace) -> Array:
    """Each row sorted, the largest first."""
    if is_torch(x):
        return x.sort(-1, descending=True).values  # the standard's stable sort can't be exported to ONNX
    return xp.flip(xp.sort(x, axis=-1), axis=-1)


def running_sum(x: Array, xp: Namespace, dtype: Any = None) -> Array:
    """Sums up to each entry of the row. array_api_compat's own can't be traced by torch.compile without a warning."""
    dtype = x.dtype if dtype is None else dtype
    return x.cumsum(-1, dtype=dtype) if is_torch(x) else xp.cumulative_sum(xp.astype(x, dtype), axis=-1, dtype=dtype)


def positions(x: Array, dtype: Any, xp: Namespace) -> Array:
    """0, 1, ... along the last axis, [1, ..., n]: of the rank of `x`, since JAX can be told to add no axes by itself."""
    n = x.shape[-1]
    place = {"device": x.device} if is_torch(x) else {}
    return xp.reshape(xp.arange(n, dtype=dtype, **place), (1,) * (x.ndim - 1) + (n,))


def take(x: Array, index: Array, xp: Namespace) -> Array:
    """x[..., index], one entry a row: index is [..., 1], with the leading axes of x."""
    if is_torch(x):
        return x.gather(-1, index)  # torch.take_along_dim pins the sizes of an exported graph
    return xp.take_along_axis(x, index, axis=-1)


def check_number(owner: str, name: str, value: Any, above: float, hint: str) -> Any:
    """The parameter, if it is a finite number above a bound or an array; the values of an array are looked at in NumPy only.

    NumPy's scalars become Python's, which adopt the dtype of any scores.
    """
    if is_array(value):
        value = asarray(value, name)
        if not (is_floating(value) or is_integer(value)):
            raise TypeError(f"{owner}({name}=...): expected a real array, got one of {dtype_name(value)}")
        if isinstance(value, np.ndarray) and not bool(np.all(value > above)):
            raise ValueError(f"{owner}({name}=...): every entry must be above {above:g} ({hint}), got {value!r}")
        return value
    value = number(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{owner}({name}=...): expected a number or an array, got {value!r}")
    if not (value > above and math.isfinite(value)):
        raise ValueError(f"{owner}({name}={value!r}): {name} must be finite and above {above:g} ({hint})")
    return value


def check_integer(owner: str, name: str, value: Any, hint: str) -> int:
    """The parameter as a Python integer; anything that is not one is an error, 2.0 and True included."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{owner}({name}={value!r}): {name} must be {hint}")
    return int(value)


# Coefficients of log(1+w)/w and (exp(w)-1)/w; twelve terms reach 1e-17 for |w| < 1/32.
_LOG1P = tuple((-1.0) ** k / (k + 1) for k in range(12))
_EXPM1 = tuple(1.0 / math.factorial(k + 1) for k in range(12))
_NEAR = 1.0 / 32.0


def _series(w: Array, coefficients: tuple[float, ...]) -> Array:
    out = coefficients[-1] + 0.0 * w
    for a in reversed(coefficients[:-1]):
        out = out * w + a
    return out


def log1p_over(c: Any, t: Array, xp: Namespace) -> Array:
    """log(1 + c t) / c, which is t at c = 0; as a series near 0, where the derivative in c would cancel."""
    return _over(xp.log1p, _LOG1P, c, t, xp)


def expm1_over(c: Any, t: Array, xp: Namespace) -> Array:
    """(exp(c t) - 1) / c, which is t at c = 0; the inverse of `log1p_over`."""
    return _over(xp.expm1, _EXPM1, c, t, xp)


def _over(function: Any, coefficients: tuple[float, ...], c: Any, t: Array, xp: Namespace) -> Array:
    w = c * t
    if not is_array(c):
        return function(w) / c if c else t
    near = xp.abs(w) < _NEAR
    series = t * _series(xp.where(near, w, xp.zeros_like(w)), coefficients)
    away = function(xp.where(near, xp.ones_like(w), w)) / xp.where(near, xp.ones_like(w), c + xp.zeros_like(w))
    return xp.where(near, series, away)
