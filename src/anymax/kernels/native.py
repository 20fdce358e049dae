"""The C++ engine: one shared library, bound with ctypes, for NumPy arrays and torch tensors on the CPU (JAX: the engine `xla`).

Rows come as views with the classes last, of any strides. What can be said with two strides for the rows and one for the
classes goes to the library as it is; anything else is copied once.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._array import Array, is_array, is_jax, is_torch, modes, torch_loaded
from .._mapping import Mapping
from ._locate import library_path
from ._memory import LARGE, SMALLEST, kept
from ._rows import merged

name = "native"

FORWARD, LOG, VJP, LOG_VJP, LOSS, LOSS_GRAD, THRESHOLD, LARGEST = range(8)
_OPS = {
    "forward": FORWARD,
    "log_forward": LOG,
    "vjp": VJP,
    "log_vjp": LOG_VJP,
    "index_loss": LOSS,
    "threshold": THRESHOLD,
}
DTYPES = {"float32": 0, "float64": 1, "bfloat16": 2, "float16": 3}
_SIZES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "int32": 4, "int64": 8}
_MEMORY = {"bfloat16": "int16"}  # what NumPy has in its place
_MAPS = {
    "softmax": 0, "sparsemax": 1, "entmax": 2, "budget": 3, "normmax": 4, "topk": 5, "topp": 6,
    "taylor": 7, "sigsoftmax": 8, "perturb_max": 9, "relu": 10,
}  # fmt: skip
_PARAMETERS = {"entmax": "alpha", "budget": "k", "normmax": "alpha", "topk": "k", "topp": "p", "taylor": "order"}
# what the library takes of each parameter (csrc/doors/abi.cpp checks it too); beyond, the reference serves
_RANGES = {  # below a budget of 1e-6 the rounding of 1, to which thresholds are found, is too coarse
    "entmax": (1e-300, 1e300), "budget": (1e-6, 1e300), "normmax": (1.0, 9e299), "topk": (1, 9e15), "topp": (1e-300, 1.0),
    "perturb_max": (1e-300, 1e300), "taylor": (2, 64),
}  # fmt: skip
_NODES = 4096
_NOISES = {"normal": 0, "logistic": 1, "uniform": 2, "laplace": 3, "gumbel": 4}
_NEED_SCORES = ("taylor", "sigsoftmax", "perturb_max", "relu")
_WITHOUT_LOG = ("sparsemax", "entmax", "budget", "normmax", "taylor", "perturb_max", "relu")
_WITHOUT_LOSS = ("taylor", "sigsoftmax", "relu")
SMALL = 4096  # elements of a call that is over before another thread would have had the interpreter


# -- the library ------------------------------------------------------------------------------------------------------------


class _View(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("outer", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("cls", ctypes.c_int64),
    ]


class _Support(ctypes.Structure):
    _fields_ = [
        ("index", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("capacity", ctypes.c_int64),
    ]


class _Call(ctypes.Structure):
    _fields_ = [
        ("op", ctypes.c_int32), ("map", ctypes.c_int32), ("dtype", ctypes.c_int32), ("noise", ctypes.c_int32),
        ("outer", ctypes.c_int64), ("inner", ctypes.c_int64), ("n", ctypes.c_int64),
        ("param", ctypes.c_double), ("params", ctypes.c_void_p), ("nodes", ctypes.c_int64),
        ("x", _View), ("p", _View), ("g", _View), ("out", _View), ("mask", _View),
        ("support", _Support),
        ("index", ctypes.c_void_p), ("scale", ctypes.c_void_p), ("value", ctypes.c_void_p), ("tau", ctypes.c_void_p),
        ("positions", ctypes.c_void_p), ("pool", ctypes.c_int32), ("fresh", ctypes.c_int32),
    ]  # fmt: skip


ABI = 6


class _Library(NamedTuple):
    free: ctypes.CDLL  # lets other threads of Python run meanwhile
    held: ctypes.CDLL  # does not: cheaper for the smallest calls
    path: Path


@functools.lru_cache(maxsize=1)
def load() -> _Library | str:
    """The library, or the sentence that says why there is none."""
    path = library_path()
    if path is None:
        return "it was not compiled when anymax was installed (no C++ compiler was found), so the reference serves"
    try:
        free, held = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        found = free.anymax_abi()
    except (OSError, AttributeError) as error:
        return f"its library {path} can't be loaded ({error})"
    if found != ABI:
        return f"its library {path} speaks version {found} of the interface, this package version {ABI}; install anymax again"
    for lib in (free, held):
        lib.anymax_run.argtypes = [ctypes.c_void_p]
        lib.anymax_python_bind.argtypes = [ctypes.c_void_p]
        lib.anymax_error.restype = lib.anymax_isa.restype = lib.anymax_isas.restype = ctypes.c_char_p
        lib.anymax_set_isa.argtypes = [ctypes.c_char_p]
        lib.anymax_set_parallel.argtypes = [ctypes.c_void_p]
    asked = os.environ.get("ANYMAX_ISA")
    if asked and asked.encode() != free.anymax_isa():
        have = free.anymax_isas().decode().replace(",", ", ")
        return f"ANYMAX_ISA asks for {asked!r}, and this library has {have} on this machine"
    _be_seen_by_threadpoolctl(path)
    return _Library(free, held, path)


def isa() -> str | None:
    """The instruction set that the library runs with here: avx512, avx2, neon or baseline."""
    lib = load()
    return None if isinstance(lib, str) else lib.free.anymax_isa().decode()


def get_num_threads() -> int:
    lib = load()
    return 1 if isinstance(lib, str) else lib.free.anymax_get_num_threads()


def set_num_threads(count: int) -> None:
    """The threads of the library's own pool, which serves all but torch tensors (OMP_NUM_THREADS sets it at the start)."""
    lib = load()
    if not isinstance(lib, str):
        lib.free.anymax_set_num_threads(int(count))


def _be_seen_by_threadpoolctl(path: Path) -> None:
    """`threadpoolctl.threadpool_limits` (of scikit-learn and joblib) then limits this pool like any other."""
    try:
        import threadpoolctl  # late: not a dependency, and only of use with this library
    except ImportError:
        return
    if not hasattr(threadpoolctl, "register"):  # before 3.2
        return

    class Controller(threadpoolctl.LibController):
        user_api = "anymax"
        internal_api = "anymax"
        filename_prefixes = (path.resolve().name.split(".")[0].lower(),)  # as it looks for them
        check_symbols = ("anymax_get_num_threads",)

        def get_num_threads(self) -> int:
            return self.dynlib.anymax_get_num_threads()

        def set_num_threads(self, num_threads: int) -> None:
            self.dynlib.anymax_set_num_threads(num_threads)

        def get_version(self) -> str:
            return str(self.dynlib.anymax_abi())

    threadpoolctl.register(Controller)


# -- threads: torch's own pool for its tensors --------------------------------------------------------------------------------

# 1: torch's pool was handed to the library; 0: it has none to lend; None: torch is not loaded yet.
_lent: int | None = None
_forked = False
_lending = threading.Lock()


def pool(tensors: bool = True) -> int:
    """Which pool serves a call: torch's (1) or the library's own (0).

    Arrays of NumPy are served by our own although torch is there: the threads of torch's pool wait awake for a while,
    and beside them a product of matrices (BLAS has a pool of its own) can take twenty times as long.
    """
    if _forked:  # torch's pool does not survive a fork, ours is made anew; a DataLoader's worker has one thread
        torch = torch_loaded()
        if torch is not None:
            set_num_threads(min(torch.get_num_threads(), get_num_threads()))
        return 0
    if not tensors:
        return 0
    if _lent is None and torch_loaded():
        _borrow()
    return _lent or 0


def _borrow() -> None:
    global _lent
    lib = load()
    assert not isinstance(lib, str)
    torch = sys.modules["torch"]
    with _lending:
        try:
            run = ctypes.CDLL(str(torch_library("torch_cpu"))).torch_parallel_for  # since torch 2.10
        except (OSError, AttributeError):
            lib.free.anymax_set_num_threads(torch.get_num_threads())
            _lent = 0
            return
        lib.free.anymax_set_parallel(ctypes.cast(run, ctypes.c_void_p))
        _lent = 1


def torch_library(stem: str) -> Path:
    """One of the libraries that torch is made of, if this platform has it."""
    prefix, suffix = {"win32": ("", ".dll"), "darwin": ("lib", ".dylib")}.get(sys.platform, ("lib", ".so"))
    return Path(sys.modules["torch"].__file__ or "").parent / "lib" / f"{prefix}{stem}{suffix}"


def _after_fork() -> None:
    global _forked, _lending
    _forked, _lending = True, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# -- which maps, which arrays -----------------------------------------------------------------------------------------------------


class Link(NamedTuple):
    """A mapping in the library's words."""

    kind: str
    code: int
    param: float
    params: Array | None  # one a row
    noise: int
    nodes: int  # 0: as many as the dtype wants


def link_of(mapping: Mapping) -> Link | str:
    """The mapping in the library's words, or the sentence that says why it has none."""
    kind = mapping.kernel
    if kind == "sparse_softmax":
        kind = "topp" if getattr(mapping, "p", None) is not None else "topk"
    if kind not in _MAPS:
        return f"it has no kernel for {mapping.name}"
    if kind == "perturb_max":
        noise, nodes, scale = (getattr(mapping, a) for a in ("noise", "nodes", "scale"))
        if not isinstance(noise, str) or noise not in _NOISES:
            return f"it has no kernel for the noise {noise!r}; it knows {', '.join(_NOISES)}"
        if is_array(scale):
            return "it takes one scale of the noise for all rows"
        if (nodes or 0) > _NODES:
            return f"it takes up to {_NODES} nodes, not {nodes}"
        if reason := _out_of_range(kind, "scale", scale):
            return reason
        return Link(kind, _MAPS[kind], float(scale), None, _NOISES[noise], nodes or 0)
    attribute = _PARAMETERS.get(kind)
    value = getattr(mapping, attribute) if attribute else 0.0
    if not is_array(value):
        if attribute and (reason := _out_of_range(kind, attribute, value)):
            return reason
        return Link(kind, _MAPS[kind], float(value), None, 0, 0)
    return Link(kind, _MAPS[kind], 0.0, value, 0, 0)


def _out_of_range(kind: str, attribute: str, value: float) -> str | None:
    low, high = _RANGES[kind]
    return None if low <= value <= high else f"it takes {attribute} of {kind} from {low:g} to {high:g}, not {value:g}"


def refuse(op: str, mapping: Mapping, x: Any) -> str | None:
    lib = load()
    if isinstance(lib, str):
        return lib
    if op not in _OPS:
        return f"it has {', '.join(_OPS)}, not {op}"
    link = link_of(mapping)
    if isinstance(link, str):
        return link
    if (
        op in ("log_forward", "log_vjp")
        and link.kind in _WITHOUT_LOG
        and not (link.kind == "entmax" and link.param == 1.0)
    ):
        return f"it takes log p of {link.kind} from p"
    if op in ("index_loss", "threshold") and link.kind in _WITHOUT_LOSS:
        return f"{link.kind} has no such operation"
    return refuse_array(x) or (refuse_tensor(link.params) if is_torch(x) and is_torch(link.params) else None)


def refuse_array(x: Any) -> str | None:
    """Why the library doesn't serve arrays like x; None where it does."""
    lib = load()
    if isinstance(lib, str):
        return lib
    if is_jax(x):
        return "it serves NumPy and torch; JAX calls the same library through XLA, which is the engine xla"
    if is_torch(x):
        return refuse_tensor(x)
    if type(x) is not np.ndarray:
        return f"it serves arrays of NumPy, torch (CPU) and JAX, not {type(x).__module__}.{type(x).__name__}"
    if x.dtype.name not in DTYPES or not x.dtype.isnative:
        return f"it serves float32, float64, float16 and bfloat16 in the machine's byte order, not {x.dtype}"
    return None


def refuse_tensor(x: Any, device: str = "cpu", dtypes: Iterable[str] = DTYPES) -> str | None:
    """Why an engine for plain tensors on this kind of device doesn't serve x; None where it does."""
    torch = sys.modules["torch"]
    if type(x) is not torch.Tensor and type(x) is not torch.nn.Parameter:
        return f"it serves plain tensors, not {type(x).__name__}"
    if (
        torch._C._are_functorch_transforms_active()
        or torch.compiler.is_compiling()
        or modes()
        or torch._C._get_tracing_state() is not None
    ):
        return "it serves eager calls; under a transform or while tracing, plain operations are to be seen"
    if x.device.type != device:
        return f"it serves tensors on the {device.upper()}, these are on {x.device}"
    if x.layout is not torch.strided:
        return f"it serves dense tensors, these are {x.layout}"
    if str(x.dtype)[6:] not in dtypes:
        return f"it serves {', '.join(dtypes)}, not {x.dtype}"
    try:
        lazy = x.is_neg() or (x.numel() and not x.data_ptr())
    except RuntimeError:  # a batch of torch.vmap, say
        lazy = True
    return "it serves tensors that own their numbers, not lazy ones" if lazy else None


# -- arrays as the library sees them -----------------------------------------------------------------------------------------------------


class _NumPy:
    @staticmethod
    def strides(a: np.ndarray) -> tuple[int, ...] | None:
        size = a.itemsize
        if any(s % size for s in a.strides) or a.ctypes.data % size:
            return None
        return tuple(s // size for s in a.strides)

    @staticmethod
    def pointer(a: np.ndarray) -> int:
        return a.ctypes.data

    @staticmethod
    def dense(a: np.ndarray) -> bool:
        return a.flags.c_contiguous and a.flags.aligned

    empty_like = staticmethod(np.empty_like)
    contiguous = staticmethod(np.ascontiguousarray)
    broadcast = staticmethod(np.broadcast_to)

    @staticmethod
    def plain(a: np.ndarray) -> bool:
        return type(a) is np.ndarray and a.flags.c_contiguous

    empty = staticmethod(np.empty)

    @staticmethod
    def adopt(memory: np.ndarray, dtype: str) -> np.ndarray:
        return memory.view(dtype)

    @staticmethod
    def cast(a: Any, dtype: str, like: np.ndarray) -> np.ndarray:
        return np.asarray(a, dtype)


class _Torch:
    @staticmethod
    def strides(a: Any) -> tuple[int, ...]:
        return a.stride()

    @staticmethod
    def pointer(a: Any) -> int:
        return a.data_ptr()

    @staticmethod
    def dense(a: Any) -> bool:
        return a.is_contiguous()

    @staticmethod
    def empty_like(a: Any) -> Any:
        return sys.modules["torch"].empty_like(a)

    @staticmethod
    def contiguous(a: Any) -> Any:
        return a.contiguous()

    @staticmethod
    def broadcast(a: Any, shape: tuple[int, ...]) -> Any:
        return a.expand(shape)

    @staticmethod
    def plain(a: Any) -> bool:
        torch = sys.modules["torch"]
        kinds = torch.Tensor, torch.nn.Parameter
        return type(a) in kinds and a.is_cpu and a.layout is torch.strided and a.is_contiguous()

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: str) -> Any:
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")

    @staticmethod
    def adopt(memory: np.ndarray, dtype: str) -> Any:
        torch = sys.modules["torch"]
        tensor = torch.from_numpy(memory)
        if dtype != "bfloat16":
            return tensor
        return torch.empty(0, dtype=torch.bfloat16, device="cpu").set_(
            tensor.untyped_storage(), 0, tensor.shape, tensor.stride()
        )

    @staticmethod
    def cast(a: Any, dtype: str, like: Any) -> Any:
        torch = sys.modules["torch"]
        return torch.as_tensor(a, device=like.device).detach().to(getattr(torch, dtype))


def world_of(x: Array) -> Any:
    return _Torch if is_torch(x) else _NumPy


def room_in(world: Any, shape: tuple[int, ...], dtype: str) -> Array:
    """An array for numbers to come; a large one of memory that is kept."""
    size = math.prod(shape) * _SIZES[dtype]
    if size < SMALLEST:
        return world.empty(shape, dtype)
    return world.adopt(kept.take(shape, _MEMORY.get(dtype, dtype), size), dtype)


def dtype_of(x: Array) -> str:
    return str(x.dtype)[6:] if is_torch(x) else x.dtype.name


class _Operand(NamedTuple):
    array: Array  # kept alive until the call is over
    pointer: int
    strides: tuple[int, ...]  # of each axis, the classes last


def _run(
    op: int,
    link: Link,
    x: Array,
    views: dict[str, Array],
    *,
    fields: dict[str, Any] | None = None,
    saved: Saved | None = None,
    fresh: int = 0,
) -> None:
    """One call on operands of the shape of x: `views` by name; `out` is written to, but for zeros where it is fresh and has them."""
    lib = load()
    assert not isinstance(lib, str)
    world, n = world_of(x), x.shape[-1]
    batch = tuple(x.shape[:-1])
    if link.kind != "perturb_max" and link.params is None and all(map(world.dense, views.values())):
        _run_dense(lib, world, op, link, math.prod(batch), n, DTYPES[dtype_of(x)], views, fields or {}, saved, fresh)
        return
    out = views.get("out")
    result = out
    held = dict(views)
    for attempt in range(3):
        strides = {k: world.strides(a) for k, a in held.items()}
        for key in [k for k, s in strides.items() if s is None]:
            held[key] = world.empty_like(held[key]) if key == "out" else held[key].copy()
            strides[key] = world.strides(held[key])
        axes = merged(batch, [s[:-1] for s in strides.values()])
        if len(axes) <= 2:
            break
        for key, a in held.items():  # more than two strides: rows one after another
            if len(merged(batch, [strides[key][:-1]])) > (1 if attempt else 2):
                if key == "out":
                    held[key] = room_in(world, tuple(a.shape), dtype_of(a))
                else:
                    held[key] = world.contiguous(a)
    axes = [(1, (0,) * len(held))] * (2 - len(axes)) + axes
    (outer, outer_steps), (inner, inner_steps) = axes
    if inner == 1 or (outer == 1 and inner > 1):
        outer, inner, outer_steps, inner_steps = inner * outer, 1, inner_steps, (0,) * len(held)
        sideways = any(strides[k][-1] != 1 and s == 1 for k, s in zip(held, outer_steps)) and n > 1
        if sideways:  # rows side by side are turned in groups
            outer, inner, outer_steps, inner_steps = 1, outer, (0,) * len(held), outer_steps
    call = _Call()
    call.op, call.map, call.noise, call.nodes = op, link.code, link.noise, link.nodes
    dtype = dtype_of(x)
    call.dtype = DTYPES[dtype]
    if link.kind == "perturb_max" and not link.nodes:
        call.nodes = 64 if dtype == "float64" else 32
    call.outer, call.inner, call.n = outer, inner, n
    call.param = link.param
    if link.params is not None:
        rows = world.contiguous(world.broadcast(world.cast(link.params, "float64", x), (*batch, 1)))
        call.params = world.pointer(rows)
    for (key, a), o, i in zip(held.items(), outer_steps, inner_steps):
        setattr(call, key, _View(world.pointer(a), o, i, strides[key][-1] if n > 1 else 1))
    for key, value in (fields or {}).items():
        setattr(call, key, world.pointer(value))
    if saved is not None:
        call.support = _Support(*saved.support(world.pointer(saved.memory)))
    call.pool, call.fresh = pool(world is _Torch), fresh if held.get("out") is out else 0
    code = (lib.held if outer * inner * n <= SMALL else lib.free).anymax_run(ctypes.byref(call))
    if code:
        raise failure(code, lib, f"op {op} of {link.kind}", f"rows of {n} classes")
    if result is not None and held["out"] is not result:
        result[...] = held["out"]


def failure(code: int, lib: _Library, what: str, on: str) -> Exception:
    """The error for a code that is not 0."""
    words = lib.free.anymax_error(code).decode()
    if "memory" in words:
        return MemoryError(f"the native engine ran out of memory on {on}")
    return RuntimeError(f"the native engine refused {what}: {words}")


_whole_call = struct.Struct("=iiiiqqqdQq" + 5 * "Qqqq" + "QQQqQQQQQii")  # anymax_call
assert _whole_call.size == ctypes.sizeof(_Call)


def _run_dense(
    lib: _Library,
    world: Any,
    op: int,
    link: Link,
    rows: int,
    n: int,
    dtype: int,
    views: dict[str, Array],
    fields: dict[str, Array],
    saved: Saved | None,
    fresh: int,
) -> None:
    """The same on operands that lie row after row, said in one piece of memory: ctypes takes its time for each field."""
    at = world.pointer
    operands: list[int] = []
    for key in ("x", "p", "g", "out", "mask"):
        operands += (at(views[key]), n, 0, 1) if key in views else (0, 0, 0, 0)
    operands += (0, 0, 0, 0) if saved is None else saved.support(at(saved.memory))
    operands += [at(fields[key]) if key in fields else 0 for key in ("index", "scale", "value", "tau", "positions")]
    call = _whole_call.pack(
        op, link.code, dtype, link.noise, rows, 1, n, link.param, 0, link.nodes, *operands, pool(world is _Torch), fresh
    )
    code = (lib.held if rows * n <= SMALL else lib.free).anymax_run(call)
    if code:
        raise failure(code, lib, f"op {op} of {link.kind}", f"rows of {n} classes")


# -- the engine's operations ------------------------------------------------------------------------------------------------------------


class Saved(NamedTuple):
    """The non-zeros of each row, for the backward of a sparse map: in one piece, [rows, capacity] values and indices and [rows] counts."""

    memory: Array  # int32
    rows: int
    capacity: int
    words: int  # of a value: 2 for float64

    def support(self, at: int) -> tuple[int, int, int, int]:
        """The pointers to the indices, values and counts, of a memory that begins at `at`; and the capacity."""
        size = self.rows * self.capacity * 4
        index = at + size * self.words
        return index, at, index + size, self.capacity

    def _part(self, begin: int, size: int) -> Array:
        return self.memory[begin : begin + size]

    @property
    def value(self) -> Array:
        part = self._part(0, self.rows * self.capacity * self.words)
        return self._typed(part).reshape(self.rows, self.capacity)

    def _typed(self, part: Array) -> Array:
        name = "float64" if self.words == 2 else "float32"
        return part.view(getattr(sys.modules["torch"], name) if is_torch(part) else name)

    @property
    def index(self) -> Array:
        size = self.rows * self.capacity
        return self._part(size * self.words, size).reshape(self.rows, self.capacity)

    @property
    def count(self) -> Array:
        """-1 where there were more than the capacity."""
        return self._part(self.rows * self.capacity * (self.words + 1), self.rows)


def sparse(kind: int) -> bool:
    """True where a map of this kind has zeros, and its non-zeros are all that the backward wants of it."""
    return 1 <= kind <= 6


def capacity(kind: int, param: float, rows: int, n: int) -> int:
    """How many non-zeros of each row are saved for the backward; 0 where that doesn't pay: not sparse enough, or too small a call."""
    if not sparse(kind) or rows * n < 16384 or (kind == 2 and param < 1.22):
        return 0
    # of 1,000 normal scores entmax 1.25 leaves 230, 4/3 75 and 3/2 18
    wide, wider = kind == 2 and param < 1.45, kind == 2 and param < 1.3
    if n < (4096 if wider else 768 if wide else 256):
        return 0
    size = max(n // 24, min(n // 8, 1024)) if wider else max(n // 32, min(n // 8, 256))
    return 0 if (kind == 5 and param * 16 > n) or (kind == 3 and param * 2.4 > size) else size


def loss_capacity(n: int) -> int:
    """The same for the gradient of a loss, which would have to solve the row anew."""
    return min(n, max(128, n // 32))


def saving(rows: int, size: int, words: int, room: Callable[[int], Array]) -> Saved:
    """`room` of so many int32 for `size` non-zeros of each row, each of so many words."""
    return Saved(room(saved_size(rows, size, words)), rows, size, words)


def saved_size(rows: int, size: int, words: int) -> int:
    """The int32 of the memory of a `Saved`."""
    return rows * (size * (words + 1) + 1)


def _link(mapping: Mapping) -> Link:
    link = link_of(mapping)
    assert not isinstance(link, str), link
    return link


def _wide(x: Array) -> str:
    return "float64" if dtype_of(x) == "float64" else "float32"


def forward(mapping: Mapping, x: Array, mask: Array | None = None, out: Array | None = None) -> Array:
    """p(x); `mask` (boolean, broadcast to x) leaves classes out, `out` takes the result."""
    return _forward(FORWARD, mapping, x, mask, out, None)


def _forward(op: int, mapping: Mapping, x: Array, mask: Array | None, out: Array | None, saved: Saved | None) -> Array:
    world = world_of(x)
    p, fresh = _result(x, _link(mapping), op == FORWARD) if out is None else (out, 0)
    views = {"x": x, "out": p}
    if mask is not None:
        views["mask"] = world.broadcast(mask.view(np.uint8) if world is _NumPy else mask, tuple(x.shape))
    if math.prod(x.shape):
        _run(op, _link(mapping), x, views, saved=saved, fresh=fresh)
    return p


def _result(like: Array, link: Link, zeros: bool = True) -> tuple[Array, int]:
    """Room for a result, and whether its pages come fresh from the system: 0 no, 1 most likely, 2 yes, and they hold zeros.

    Memory that comes from the system afresh costs more than what is computed in it. Up to LARGE bytes what is kept serves instead. Beyond,
    NumPy asks for huge pages, which torch does only where it is told to, and those of `np.zeros` are zeros already, which a sparse map
    leaves as they are.
    """
    world, dtype, shape = world_of(like), dtype_of(like), tuple(like.shape)
    fresh = math.prod(shape) * _SIZES[dtype] > LARGE
    if fresh and zeros and sparse(link.code) and world.plain(like) and shape[-1] > 2048:
        return world.adopt(np.zeros(shape, _MEMORY.get(dtype, dtype)), dtype), 2
    return empty_like(like), int(fresh)


def room_beside(x: Any, shape: tuple[int, ...]) -> Any:
    """Room for numbers of the kind of x, a tensor of torch."""
    kept_ = x.device.type == "cpu" and dtype_of(x) in DTYPES
    return room_in(_Torch, shape, dtype_of(x)) if kept_ else x.new_empty(shape)


def empty_like(x: Array) -> Array:
    """Room for a result like x, whatever x is."""
    world = world_of(x)
    if world.plain(x) and x.nbytes >= SMALLEST and (dtype := dtype_of(x)) in DTYPES:
        return world.adopt(kept.take(x.shape, _MEMORY.get(dtype, dtype), x.nbytes), dtype)
    return world.empty_like(x)


def forward_saving(
    mapping: Mapping, x: Array, mask: Array | None = None, out: Array | None = None
) -> tuple[Array, Saved | None]:
    """p(x), and its non-zeros where the map is sparse and the call large enough for them to pay."""
    rows, n = math.prod(x.shape[:-1]), x.shape[-1]
    link = _link(mapping)
    param = link.param if link.params is None else 1.5  # rows with a parameter each: as those of entmax 3/2
    size = capacity(link.code, param, rows, n)
    saved = _saved(x, rows, size) if size else None
    return _forward(FORWARD, mapping, x, mask, out, saved), saved


def _saved(x: Array, rows: int, size: int) -> Saved:
    world = world_of(x)
    return saving(rows, size, 2 if _wide(x) == "float64" else 1, lambda count: room_in(world, (count,), "int32"))


def log_forward(mapping: Mapping, x: Array) -> Array:
    return _forward(LOG, mapping, x, None, None, None)


def vjp(mapping: Mapping, x: Array, p: Array, g: Array, saved: Saved | None = None) -> Array:
    """J^T g."""
    return _backward(VJP, mapping, x, p, g, saved)


def log_vjp(mapping: Mapping, x: Array, log_p: Array, g: Array) -> Array:
    """The same for log p: `g - p sum g` on the classes that have a probability."""
    return _backward(LOG_VJP, mapping, x, log_p, g, None)


def _backward(op: int, mapping: Mapping, x: Array, p: Array, g: Array, saved: Saved | None) -> Array:
    link, world = _link(mapping), world_of(p)
    scores = link.kind in _NEED_SCORES
    if p.shape != g.shape or (scores and (x.shape != p.shape or x.dtype != p.dtype)):
        words = ", ".join(f"{n} {dtype_of(a)} {tuple(a.shape)}" for n, a in (("x", x), ("p", p), ("g", g)))
        raise ValueError(
            f"the backward of {mapping.name} takes x, p and g of one shape, and x and p of one dtype; got {words}"
        )
    out, fresh = _result(p, link, op == VJP)
    views = {"p": p, "g": world.cast(g, dtype_of(p), p) if dtype_of(g) != dtype_of(p) else g, "out": out}
    if scores:
        views["x"] = x
    if math.prod(p.shape):
        _run(op, link, p, views, saved=saved, fresh=fresh)
    return out


def few(mapping: Mapping, n: int) -> bool:
    """True where the gradient of a loss is as quick to find anew as from what was saved: few classes (csrc/shapes/few.hpp)."""
    link = _link(mapping)
    return n <= 128 and (
        link.kind in ("softmax", "sparsemax") or (link.kind == "entmax" and link.param in (1.0, 1.5, 2.0))
    )


def index_loss(mapping: Mapping, x: Array, index: Array, save: bool) -> tuple[Array, Saved | None, Array | None]:
    """The loss of each row for a class index (below 0: 0), float or double; with what `index_loss_grad` wants of it."""
    link, world = _link(mapping), world_of(x)
    batch, n = tuple(x.shape[:-1]), x.shape[-1]
    rows = math.prod(batch)
    value = room_in(world, batch, _wide(x))
    index = world.contiguous(index)
    fields, saved, tau = {"index": index, "value": value}, None, None
    save = save and not few(mapping, n)
    if save and sparse(link.code):
        saved = _saved(x, rows, loss_capacity(n))
    elif save and link.code == 0:
        tau = fields["tau"] = room_in(world, batch, _wide(x))
    if rows:
        _run(LOSS, link, x, {"x": x}, fields=fields, saved=saved)
    return value, saved, tau


def index_loss_grad(
    mapping: Mapping, x: Array, index: Array, scale: Array, saved: Saved | None, tau: Array | None
) -> Array:
    """`scale (p - y)`, scale one a row."""
    link, world = _link(mapping), world_of(x)
    out, fresh = _result(x, link)
    scale = world.contiguous(world.cast(scale, _wide(x), x))
    fields = {"index": world.contiguous(index), "scale": scale}
    if tau is not None:
        fields["tau"] = tau
    if math.prod(x.shape):
        _run(LOSS_GRAD, link, x, {"x": x, "out": out}, fields=fields, saved=saved, fresh=fresh)
    return out


def threshold(mapping: Mapping, x: Array) -> Array:
    """tau of each row, [..., 1], float or double; logsumexp for softmax."""
    world = world_of(x)
    batch = tuple(x.shape[:-1])
    tau = room_in(world, (*batch, 1), _wide(x))
    if math.prod(batch):
        _run(THRESHOLD, _link(mapping), x, {"x": x}, fields={"tau": tau})
    return tau


def largest(x: Array, k: int) -> tuple[Array, Array]:
    """The k largest scores of each row, the largest first, and their indices; equal scores by position."""
    world = world_of(x)
    batch, n = tuple(x.shape[:-1]), x.shape[-1]
    if not 1 <= k <= n:
        raise ValueError(f"k must be from 1 to the number of classes, {n}, got {k!r}")
    x = world.contiguous(x)
    value = room_in(world, (*batch, k), dtype_of(x))
    positions = room_in(world, (*batch, k), "int64")
    if math.prod(batch):
        lib = load()
        assert not isinstance(lib, str)
        call = _Call()
        call.op, call.map, call.dtype, call.param = LARGEST, _MAPS["topk"], DTYPES[dtype_of(x)], float(k)
        call.outer, call.inner, call.n = math.prod(batch), 1, n
        call.x = _View(world.pointer(x), n, 0, 1)
        call.out = _View(world.pointer(value), k, 0, 1)
        call.positions, call.pool = world.pointer(positions), pool(world is _Torch)
        if code := lib.free.anymax_run(ctypes.byref(call)):
            raise failure(code, lib, "the largest scores", f"rows of {n} classes")
    return value, positions
