"""Kinds of arrays: whose they are, and their array-API namespace. Imports no framework.

A framework is found through `sys.modules`: an array of torch can only exist where torch is loaded.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

Array = Any  # an array of any kind: NumPy, torch, JAX, or of the array-API standard
Namespace = Any


def torch_loaded() -> Any:
    """The module torch. None if it is not loaded, or if another thread is still importing it: `compiler` is the last part that we use."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "compiler") else None


def is_torch(x: Any) -> bool:
    torch = torch_loaded()
    return torch is not None and isinstance(x, torch.Tensor)


def is_ragged(x: Any) -> bool:
    """True for torch's nested and sparse tensors."""
    return is_torch(x) and (x.is_nested or x.layout is not sys.modules["torch"].strided)


def is_jax(x: Any) -> bool:
    # while another thread is importing jax the module is incomplete, and x can not be one of its arrays
    return isinstance(x, getattr(sys.modules.get("jax"), "Array", ()))


def is_array(x: Any) -> bool:
    """True for an array with a dtype and a shape, False for numbers (NumPy's scalars too), lists and None."""
    if isinstance(x, (int, float, str)):  # first, since numbers are symbols under torch.compile(dynamic=True)
        return False
    return is_torch(x) or (hasattr(x, "dtype") and hasattr(x, "shape") and not isinstance(x, np.generic))


def namespace(x: Array) -> Namespace:
    """The array-API namespace of `x`."""
    if is_torch(x):
        import array_api_compat.torch as xp  # late: torch is loaded already, since x is a tensor

        return xp
    if is_jax(x):
        return sys.modules["jax"].numpy
    if isinstance(x, np.ndarray):  # array_namespace would first look into modules that may be half imported
        import array_api_compat.numpy as xp  # late: not at `import anymax`

        return xp
    from array_api_compat import array_namespace  # late: as above

    return array_namespace(x)
