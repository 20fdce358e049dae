"""The short way into the C++ engine: builtin functions on plain arrays, made of addresses in the library.

A call of ctypes costs as much as the softmax of a short row: every argument is converted, and before that read from its array by
Python. The library has the bodies of two builtins instead, which read the arrays themselves (csrc/doors/python.cpp). They are
compiled without Python's headers: what they need of its stable ABI they are told by address, so that one library serves every Python.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from typing import Any

import numpy as np

from .._array import Array, ask_torch, torch_loaded
from .._mapping import Mapping
from . import native
from ._memory import MANY, SMALLEST, kept

# (code, param, x, out[, p, g, memory, capacity]) -> out, and for losses (code, param, x, value, index, None[, memory, capacity, factor])
# -> value and (code, param, x, out, index, scale[, memory, capacity, factor]) -> out, as csrc/anymax.h has it; or None where anything is
# out of the ordinary: a mode of torch, or tracing, is. None before `ready`, False where there will be none.
buffers: Any = None  # on arrays of NumPy
# On tensors of torch that shows its numbers by DLPack's exchange API, from 2.10 on; out=None: a new one.
tensors: Any = None

_FASTCALL = 0x80
_binding = threading.Lock()


class _Method(ctypes.Structure):  # PyMethodDef
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("body", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


class _Exchange(ctypes.Structure):  # DLPackExchangeAPI
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("from_object", ctypes.c_void_p),
        ("to_object", ctypes.c_void_p),
        ("view", ctypes.c_void_p),
    ]


class _Python(ctypes.Structure):  # anymax_python
    _fields_ = [
        (name, ctypes.c_int64 if name in ("before", "tracer", "many", "small", "large") else ctypes.c_void_p)
        for name in (
            "none", "keep", "drop", "ask", "integer", "real", "occurred", "clear", "leave", "enter", "buffer", "release", "tensor", "pool",
            "stack", "within", "before", "tracer", "modes", "included", "mode", "tracing", "like", "room", "many", "small", "large",
        )
    ]  # fmt: skip


_ABI = (
    "Py_IncRef", "Py_DecRef", "PyObject_CallFunctionObjArgs", "PyLong_AsLongLong", "PyFloat_AsDouble", "PyErr_Occurred", "PyErr_Clear",
    "PyEval_SaveThread", "PyEval_RestoreThread", "PyObject_GetBuffer", "PyBuffer_Release",
)  # fmt: skip


def ready() -> bool:
    """Makes the builtins; False where there is no library, or this Python is not CPython."""
    global buffers, tensors
    lib = native.load()
    if isinstance(lib, str) or sys.implementation.name != "cpython":
        return False
    with _binding:
        view = _view()
        address = [_address(getattr(ctypes.pythonapi, name)) for name in _ABI]
        said = _of_torch(sys.modules["torch"]) if view else (None, None, 0, 0, *(None,) * 6)
        _keep(native.pool)
        given = *address, view, id(native.pool), *said, MANY, native.SMALL, native.LARGE
        lib.free.anymax_python_bind(ctypes.byref(_Python(id(None), *given)))
        buffers = buffers or _builtin(lib.held.anymax_python_buffers)
        if view:
            tensors = tensors or _builtin(lib.held.anymax_python_tensors)
        elif torch_loaded():
            tensors = False
    return True


_NUMPY = {"torch.float32": np.float32, "torch.float64": np.float64, "torch.float16": np.float16}


def _room(x: Array) -> Array:
    """`native.empty_like` in fewer steps, for a tensor in C order on the CPU."""
    size, kind = x.nbytes, _NUMPY.get(str(x.dtype))
    if kind is None or size < SMALLEST:
        return native.empty_like(x)
    return sys.modules["torch"].from_numpy(kept.take(x.shape, kind, size))


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


def _view() -> int | None:
    """The function of torch that shows the numbers of a tensor, None where torch is not loaded or has none."""
    torch = torch_loaded()
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None) if torch else None
    if capsule is None:
        return None
    pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    exchange = _Exchange.from_address(pointer(capsule, b"dlpack_exchange_api"))
    return exchange.view if exchange.major == 1 else None


# How many modes are on, and whether dispatch has a key. torch's C++ says in a nanosecond what its Python says in seventy.
_STATES = (
    "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv",
    "_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE",
)


def _of_torch(torch: Any) -> tuple[int | None, ...]:
    """What the library asks of torch: by two functions of its C++ and two keys, if it has them, and by objects of Python."""
    try:
        lib = ctypes.CDLL(str(native.torch_library("c10")))
        states = [_address(getattr(lib, name)) for name in _STATES]
        states += [int(torch._C._parse_dispatch_key(name)) for name in ("PreDispatch", "Tracer")]
    except (OSError, AttributeError, TypeError, ValueError, RuntimeError):
        states = [None, None, 0, 0]
    objects = *ask_torch(), torch._C._get_tracing_state, torch.empty_like, _room
    for thing in objects:
        _keep(thing)
    return *states, *map(id, objects)


def _keep(thing: Any) -> None:
    """For good: what the library points to is wanted to the very end of the interpreter."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _builtin(body: Any) -> Any:
    method = _Method(b"rows", _address(body), _FASTCALL, None)
    _keep(method)
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(
        ("PyCFunction_NewEx", ctypes.pythonapi)
    )
    return make(ctypes.addressof(method), None, None)


@functools.lru_cache(maxsize=256)
def link(mapping: Mapping) -> tuple[Mapping, int, float] | None:
    """A mapping without arrays, with its code and number for the builtins; None where it takes more to say."""
    found = native.link_of(mapping)
    if isinstance(found, str) or found.params is not None or found.kind == "perturb_max":
        return None
    return mapping, found.code << 8, found.param
