"""The short way into the C++ engine: builtin functions on plain arrays, made of addresses in the library.

A call of ctypes costs as much as the softmax of a short row: every argument is converted, and before that read from its array by
Python. The library has the bodies of two builtins instead, which read the arrays themselves (csrc/python.cpp). They are
compiled without Python's headers: what they need of its stable ABI they are told by address, so that one library serves every Python.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from typing import Any

from .._mapping import Mapping
from . import native

# (code, param, x, out[, p, g, memory, capacity]) -> out, for losses (code, param, x, value, index, None) -> value and
# (code, param, x, out, index, scale) -> out, or None where anything is out of the ordinary.
# None before `ready`, False where there will be none.
buffers: Any = None  # on arrays of NumPy
tensors: Any = None  # on tensors of torch that shows its numbers by DLPack's exchange API, from 2.10 on

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
    _fields_ = [(name, ctypes.c_void_p) for name in (
        "none", "keep", "drop", "ask", "integer", "real", "occurred", "clear", "leave", "enter", "buffer", "release", "tensor",
        "pool",
    )] + [("small", ctypes.c_int64), ("large", ctypes.c_int64)]  # fmt: skip


_ABI = (
    "Py_IncRef", "Py_DecRef", "PyObject_CallNoArgs", "PyLong_AsLongLong", "PyFloat_AsDouble", "PyErr_Occurred", "PyErr_Clear",
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
        _keep(native.pool)
        lib.free.anymax_python_bind(
            ctypes.byref(_Python(id(None), *address, view, id(native.pool), native.SMALL, native.LARGE))
        )
        buffers = buffers or _builtin(lib.held.anymax_python_buffers)
        if view:
            tensors = tensors or _builtin(lib.held.anymax_python_tensors)
        elif hasattr(sys.modules.get("torch"), "get_num_threads"):  # imported to its end
            tensors = False
    return True


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


def _view() -> int | None:
    """The function of torch that shows the numbers of a tensor, None where torch is not loaded or has none."""
    capsule = getattr(getattr(sys.modules.get("torch"), "Tensor", None), "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    exchange = _Exchange.from_address(pointer(capsule, b"dlpack_exchange_api"))
    return exchange.view if exchange.major == 1 else None


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
