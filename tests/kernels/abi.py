"""The structures of csrc/anymax.h, for tests that call the C ABI itself."""

import ctypes


class View(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("outer", "inner", "cls"))]


class Support(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_void_p) for name in ("index", "value", "count")), ("capacity", ctypes.c_int64)]


class Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("op", "map", "dtype", "noise")),
        *((name, ctypes.c_int64) for name in ("outer", "inner", "n")),
        ("param", ctypes.c_double), ("params", ctypes.c_void_p), ("nodes", ctypes.c_int64),
        *((name, View) for name in ("x", "p", "g", "out", "mask")), ("support", Support),
        *((name, ctypes.c_void_p) for name in ("index", "scale", "value", "tau", "positions")),
        ("pool", ctypes.c_int32), ("fresh", ctypes.c_int32), *((name, ctypes.c_void_p) for name in ("starts", "sizes", "slope")),
        ("upper", View),
    ]  # fmt: skip
