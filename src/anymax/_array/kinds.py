"""Finds the framework of an array and its array-API namespace. Imports no framework.

A framework is looked up in `sys.modules`: an array of torch can only exist if torch is loaded.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

Array = Any  # an array of NumPy, torch, JAX or another library that follows the array-API standard
Namespace = Any


def torch_loaded() -> Any:
    """torch, or None if it is not loaded, or another thread is still importing it: `compiler` is the last attribute that we need."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "compiler") else None


def is_torch(x: Any) -> bool:
    return isinstance(x, getattr(sys.modules.get("torch"), "Tensor", ()))


def is_ragged(x: Any) -> bool:
    """True for torch's nested and sparse tensors."""
    return is_torch(x) and (x.is_nested or x.layout is not sys.modules["torch"].strided)


def is_jax(x: Any) -> bool:
    # while another thread is importing jax, the module may lack `Array`; then x cannot be a JAX array
    return isinstance(x, getattr(sys.modules.get("jax"), "Array", ()))


def framework(x: Any) -> str:
    """The framework of an array, for errors and to compare: "torch", "JAX", "NumPy", or the package of another library."""
    if is_torch(x):
        return "torch"
    if is_jax(x):
        return "JAX"
    return "NumPy" if isinstance(x, np.ndarray) else type(x).__module__.partition(".")[0]


def is_array(x: Any) -> bool:
    """True for an array with a dtype and a shape, False for numbers (NumPy's scalars too), lists and None."""
    if isinstance(x, (int, float, str)):  # first, since torch.compile(dynamic=True) turns numbers into symbols
        return False
    return is_torch(x) or (hasattr(x, "dtype") and hasattr(x, "shape") and not isinstance(x, np.generic))


def device_of(x: Array) -> dict[str, Any]:
    """Keywords that create an array beside `x`. Only torch has to be told: NumPy has one device, and JAX moves what is not committed."""
    return {"device": x.device} if is_torch(x) else {}


def namespace(x: Array) -> Namespace:
    """The array-API namespace of `x`."""
    if is_torch(x):
        import array_api_compat.torch as xp  # late: torch is loaded already, since x is a tensor

        return xp
    if is_jax(x):
        return sys.modules["jax"].numpy
    if isinstance(x, np.ndarray):  # array_namespace would first query modules that another thread may be importing
        import array_api_compat.numpy as xp  # late: not at `import anymax`

        return xp
    from array_api_compat import array_namespace  # late: as above

    return array_namespace(x)
