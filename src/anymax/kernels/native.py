"""The C++ engine (`anymax._engine`) for NumPy arrays and torch tensors on the CPU (JAX: the engine `xla`).

It takes arrays of any strides, with the classes along any axis; csrc/doors/python/ lays them out. This file has its refusals, the functions
that it calls in Python (memory, copies, threads), and the contract's operations, on rows whose classes are last.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from .._array import Array, ask_torch, is_jax, is_torch, modes, namespace, top, upcast
from .._core.mapping import Mapping
from . import choice, library
from ._memory import LARGE, SMALLEST, recycler
from .engine import BELOW, Engine, IndexLoss
from .library import get_num_threads as get_num_threads
from .library import pool
from .library import set_num_threads as set_num_threads
from .link import CODES, MAPS, MOST_CLASSES, NEED_SCORES, SPARSE, WITHOUT_LOG, WITHOUT_LOSS, Link, link_of

DTYPES = {"float32": 0, "float64": 1, "bfloat16": 2, "float16": 3}
_SIZES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "int32": 4, "int64": 8}
_MEMORY = {"bfloat16": "int16"}  # NumPy dtypes of the same size
_BY_CODE = (*DTYPES, "int32")  # in the order of the codes of csrc/doors/python/arrays.hpp
_SPARSE = frozenset(MAPS[kind] for kind in SPARSE)
_AXES = 32  # the most axes of an array


# -- the engine, and the functions that it calls in Python --------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def load() -> Any:
    """The engine, or a sentence that says why there is none."""
    engine = library.load()
    if not isinstance(engine, str):
        engine.bind({
            "link_of": link_of, "forced": choice.quickest(), "pool": pool, "result": _result, "room": _room, "copied": _copied,
            "store": _store, "bits": _bits, "ndarray": np.ndarray, "empty_like": np.empty_like, "smallest": SMALLEST,
        })  # fmt: skip
    return engine


def isa() -> str | None:
    """The instruction set that the engine uses on this machine: avx512, avx2, neon or baseline."""
    engine = load()
    return None if isinstance(engine, str) else engine.isa()


_knows_torch = False


def engine_for(x: Array) -> Any:
    """The engine, ready for arrays like x."""
    engine = load()
    if is_torch(x) and not _knows_torch:
        tell_of_torch(engine)
    return engine


def tell_of_torch(engine: Any) -> None:
    global _knows_torch
    torch = sys.modules["torch"]
    stack, included, before = ask_torch()
    kinds = {
        "f32": "float32",
        "f64": "float64",
        "bf16": "bfloat16",
        "f16": "float16",
        "i32": "int32",
        "i64": "int64",
        "boolean": "bool",
    }
    engine.bind({
        "parameter": torch.nn.Parameter, "torch_empty_like": torch.empty_like, "is_neg": torch.Tensor.is_neg,
        "modes": stack, "functions": torch._C._len_torch_function_stack, "included": included, "before": before,
        "tracing": torch._C._is_tracing, "forward_ad": vars(torch.autograd.forward_ad),
        "strided": torch.strided, **{code: getattr(torch, kind) for code, kind in kinds.items()},
        "exchange": getattr(torch.Tensor, "__dlpack_c_exchange_api__", None),  # since torch 2.10
        "tensor": torch.Tensor,
    })  # fmt: skip
    _knows_torch = True


# -- which maps, which arrays -------------------------------------------------------------------------------------------------------


def refuse_array(x: Any) -> str | None:
    """Why the library can't take arrays like x; None if it can."""
    lib = load()
    if isinstance(lib, str):
        return lib
    if is_jax(x):
        return "it takes NumPy and torch; JAX calls the same library through XLA, which is the engine xla"
    if getattr(x, "ndim", 0) > _AXES:
        return f"it takes arrays of up to {_AXES} axes, not {x.ndim}"
    if reason := refuse_width(x):
        return reason
    if is_torch(x):
        return refuse_tensor(x)
    if type(x) is not np.ndarray:
        return f"it takes arrays of NumPy, torch (CPU) and JAX, not {type(x).__module__}.{type(x).__name__}"
    if x.dtype.name not in DTYPES or not x.dtype.isnative:
        return f"it takes float32, float64, float16 and bfloat16 in the machine's byte order, not {x.dtype}"
    return None


def refuse_width(x: Any) -> str | None:
    """Why the library can't take rows with as many classes as x; None if it can."""
    classes = x.shape[-1] if getattr(x, "ndim", 0) else 1
    if isinstance(classes, int) and classes > MOST_CLASSES:
        return f"it takes rows of up to {MOST_CLASSES} classes, not {classes}"
    return None


def refuse_tensor(x: Any, device: str = "cpu", dtypes: Iterable[str] = DTYPES) -> str | None:
    """Why an engine for plain tensors on this kind of device can't take x; None if it can."""
    torch = sys.modules["torch"]
    if type(x) is not torch.Tensor and type(x) is not torch.nn.Parameter:
        return f"it takes plain tensors, not {type(x).__name__}"
    if (
        torch._C._are_functorch_transforms_active()
        or torch.compiler.is_compiling()
        or modes()
        or torch._C._get_tracing_state() is not None
    ):
        return "it takes eager calls; under a transform or while tracing, plain operations are to be seen"
    if x.device.type != device:
        return f"it takes tensors on the {device.upper()}, these are on {x.device}"
    if x.layout is not torch.strided:
        return f"it takes dense tensors, these are {x.layout}"
    if str(x.dtype)[6:] not in dtypes:
        return f"it takes {', '.join(dtypes)}, not {x.dtype}"
    try:
        lazy = x.is_neg() or (x.numel() and not x.data_ptr())
    except RuntimeError:  # for example a batch of torch.vmap
        lazy = True
    return "it takes tensors that own their numbers, not lazy ones" if lazy else None


# -- arrays of both kinds ------------------------------------------------------------------------------------------------------------


class _NumPy:
    empty_like = staticmethod(np.empty_like)
    broadcast = staticmethod(np.broadcast_to)

    @staticmethod
    def aligned(a: np.ndarray) -> bool:
        return a.flags.aligned

    @staticmethod
    def contiguous(a: np.ndarray) -> np.ndarray:
        a = np.ascontiguousarray(a)
        return a if a.flags.aligned else a.copy()

    @staticmethod
    def is_contiguous(a: np.ndarray) -> bool:
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
    def empty_like(a: Any) -> Any:
        return sys.modules["torch"].empty_like(a)

    @staticmethod
    def aligned(a: Any) -> bool:
        return a.data_ptr() % a.element_size() == 0

    @staticmethod
    def contiguous(a: Any) -> Any:
        a = a.contiguous()
        return a if a.data_ptr() % a.element_size() == 0 else a.clone()

    @staticmethod
    def broadcast(a: Any, shape: tuple[int, ...]) -> Any:
        return a.expand(shape)

    @staticmethod
    def is_contiguous(a: Any) -> bool:
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
    """The class of x's framework, NumPy or torch. Its `contiguous` gives arrays in C order at an address aligned for the dtype."""
    return _Torch if is_torch(x) else _NumPy


def room_in(world: Any, shape: tuple[int, ...], dtype: str) -> Array:
    """An uninitialized array; a large one uses recycled memory (`_memory`)."""
    size = math.prod(shape) * _SIZES[dtype]
    if size < SMALLEST:
        return world.empty(shape, dtype)
    return world.adopt(recycler.take(shape, _MEMORY.get(dtype, dtype), size), dtype)


def dtype_of(x: Array) -> str:
    return str(x.dtype)[6:] if is_torch(x) else x.dtype.name


def _copied(a: Array, shape: tuple[int, ...] | None) -> Array:
    """A copy in C order, broadcast to a shape."""
    if is_torch(a):
        a = a.detach()
        return (a if shape is None else a.expand(shape)).clone(memory_format=sys.modules["torch"].contiguous_format)
    return np.array(a if shape is None else np.broadcast_to(a, shape), order="C")


def _store(out: Array, a: Array) -> None:
    out[...] = a


def _bits(a: np.ndarray) -> np.ndarray | None:
    """A bfloat16 array as uint16, since NumPy's buffers have no code for bfloat16."""
    return a.view(np.uint16) if a.dtype.name == "bfloat16" and a.dtype.isnative else None


def _result(like: Array, code: int, zeros: bool) -> tuple[Array, int]:
    """Memory for a result, and whether its pages are newly allocated: 0 no, 1 most likely, 2 yes, and they hold zeros.

    Newly allocated memory costs more than the computation, so results up to LARGE bytes are recycled. For larger ones NumPy requests huge
    pages, which torch does only if configured to. Those of `np.zeros` hold zeros already, so a sparse map need not write its zeros.
    """
    world, dtype, shape = world_of(like), dtype_of(like), tuple(like.shape)
    fresh = math.prod(shape) * _SIZES[dtype] > LARGE
    if fresh and zeros and code in _SPARSE and world.is_contiguous(like) and shape[-1] > 2048:
        return world.adopt(np.zeros(shape, _MEMORY.get(dtype, dtype)), dtype), 2
    return empty_like(like), int(fresh)


def _room(x: Array, count: int, dtype: int) -> Array:
    return room_in(world_of(x), (count,), _BY_CODE[dtype])


def room_beside(x: Any, shape: tuple[int, ...]) -> Any:
    """An uninitialized tensor with the dtype and device of the tensor x."""
    kept_ = x.device.type == "cpu" and dtype_of(x) in DTYPES
    return room_in(_Torch, shape, dtype_of(x)) if kept_ else x.new_empty(shape)


def empty_like(x: Array) -> Array:
    """An uninitialized array like x, from recycled memory where possible."""
    world = world_of(x)
    if world.is_contiguous(x) and x.nbytes >= SMALLEST and (dtype := dtype_of(x)) in DTYPES:
        return world.adopt(recycler.take(x.shape, _MEMORY.get(dtype, dtype), x.nbytes), dtype)
    return world.empty_like(x)


# -- the engine's operations ------------------------------------------------------------------------------------------------------------


class Saved(NamedTuple):
    """The non-zeros of each row, for the backward of a sparse map: [rows, capacity] values and indices and [rows] counts in one array."""

    memory: Array  # int32
    rows: int
    words: int  # int32 numbers of a value: 2 for float64, else 1

    @property
    def capacity(self) -> int:
        return (self.memory.shape[0] // self.rows - 1) // (self.words + 1)

    @property
    def value(self) -> Array:
        part = self.memory[: self.rows * self.capacity * self.words]
        name = "float64" if self.words == 2 else "float32"
        part = part.view(getattr(sys.modules["torch"], name) if is_torch(part) else name)
        return part.reshape(self.rows, self.capacity)

    @property
    def index(self) -> Array:
        size = self.rows * self.capacity
        return self.memory[size * self.words : size * (self.words + 1)].reshape(self.rows, self.capacity)

    @property
    def count(self) -> Array:
        """The number of non-zeros; -1 where it exceeds the capacity."""
        return self.memory[self.rows * self.capacity * (self.words + 1) :]


def _link(mapping: Mapping, x: Array) -> Link:
    """The link, with its array of parameters broadcast to one per row, float64 and contiguous."""
    link = link_of(mapping)
    assert not isinstance(link, str), link
    if link.params is None:
        return link
    world = world_of(x)
    rows = world.broadcast(world.cast(link.params, "float64", x), (*x.shape[:-1], 1))
    return link._replace(params=world.contiguous(rows))


def wide(x: Array) -> str:
    """The dtype in which the engine returns one number per row."""
    return "float64" if dtype_of(x) == "float64" else "float32"


def _done(answer: Any, what: str, *arrays: Array | None) -> Any:
    """The engine's answer; an error if it is None, for arrays that `refuse` did not check."""
    if answer is None:
        words = ", ".join(f"{dtype_of(a)} {tuple(a.shape)}" for a in arrays if a is not None)
        raise RuntimeError(f"the native engine can't compute {what} on {words}")
    return answer


def saved_in(memory: Array, p: Array, axis: int) -> Saved:
    """The non-zeros of p, whose classes are along `axis`, from the engine's memory."""
    return Saved(memory, math.prod(p.shape) // p.shape[axis], 2 if wide(p) == "float64" else 1)


def _backward(op: str, mapping: Mapping, x: Array, p: Array, g: Array, saved: Saved | None) -> Array:
    link = _link(mapping, p)
    scores = x if link.kind in NEED_SCORES else None
    if p.shape != g.shape or (scores is not None and (x.shape != p.shape or x.dtype != p.dtype)):
        words = ", ".join(f"{n} {dtype_of(a)} {tuple(a.shape)}" for n, a in (("x", x), ("p", p), ("g", g)))
        raise ValueError(
            f"the backward of {mapping.name} takes x, p and g of one shape, and x and p of one dtype; got {words}"
        )
    g = world_of(p).cast(g, dtype_of(p), p) if dtype_of(g) != dtype_of(p) else g
    return _done(getattr(engine_for(p), op)(link, scores, p, g, -1, saved and saved.memory), op, scores, p, g)


REDUCTIONS = {"none": 0, "sum": 1, "mean": 2}
_SOFTMAX = Link("softmax", 0, 0.0, None, 0, 0)


def _numbers(link: Link, x: Array, what: str) -> Array:
    """tau of each row, [..., 1]."""
    tau = room_in(world_of(x), (*x.shape[:-1], 1), wide(x))
    _done(engine_for(x).threshold(link, x, tau), what, x)
    return tau


class Native(Engine):
    name = "native"
    ops = ("forward", "log_forward", "vjp", "log_vjp", "index_loss", "threshold")
    compiled = takes_mask = takes_strides = True

    def refuse(self, op: str, mapping: Mapping, x: Any) -> str | None:
        lib = load()
        if isinstance(lib, str):
            return lib
        if op not in self.ops:
            return self.lacks(op)
        link = link_of(mapping)
        if isinstance(link, str):
            return link
        if op in ("log_forward", "log_vjp") and link.kind in WITHOUT_LOG:
            return f"it has no log p of {link.kind}; log of p is used"
        if op in ("index_loss", "threshold") and link.kind in WITHOUT_LOSS:
            return f"{link.kind} has no such operation"
        return refuse_array(x) or (refuse_tensor(link.params) if is_torch(x) and is_torch(link.params) else None)

    def forward(self, mapping: Mapping, x: Array, mask: Array | None = None, out: Array | None = None) -> Array:
        return _done(engine_for(x).forward(_link(mapping, x), x, -1, mask, out), "p(x)", x, mask, out)

    def write(self, mapping: Mapping, x: Array, mask: Array | None, out: Any) -> bool:
        return engine_for(x).forward(_link(mapping, x), x, -1, mask, out) is not None

    def forward_saving(
        self, mapping: Mapping, x: Array, mask: Array | None = None, out: Array | None = None, capacity: int = -1
    ) -> tuple[Array, Saved | None]:
        """p(x), and up to `capacity` non-zeros a row; below 0 the engine chooses, and saves none for a dense map or a small call."""
        made = engine_for(x).forward_saving(_link(mapping, x), x, -1, mask, out, capacity)
        p, memory = _done(made, "p(x)", x, mask, out)
        return p, None if memory is None else saved_in(memory, p, -1)

    def log_forward(self, mapping: Mapping, x: Array) -> Array:
        return _done(engine_for(x).log_forward(_link(mapping, x), x, -1, None, None), "log p(x)", x)

    def vjp(self, mapping: Mapping, x: Array, p: Array, g: Array, saved: Saved | None = None) -> Array:
        return _backward("vjp", mapping, x, p, g, saved)

    def log_vjp(self, mapping: Mapping, x: Array, log_p: Array, g: Array) -> Array:
        return _backward("log_vjp", mapping, x, log_p, g, None)

    def index_loss(
        self,
        mapping: Mapping,
        x: Array,
        index: Array,
        *,
        save: bool,
        axis: int = -1,
        ignored: int = BELOW,
        reduction: str = "none",
    ) -> IndexLoss | None:
        if type(axis) is not int or not -x.ndim <= axis < x.ndim:
            return None
        if axis != -1 and link_of(mapping)[3] is not None:
            return None
        world = world_of(x)
        index = world.cast(index, "int64", x) if dtype_of(index) != "int64" else index
        shape = () if reduction != "none" else tuple(n for i, n in enumerate(x.shape) if i != axis % x.ndim)
        value = room_in(world, shape, wide(x))
        made = engine_for(x).loss(_link(mapping, x), x, index, value, axis, ignored, REDUCTIONS[reduction], save)
        return made and IndexLoss(value, made[1], made[0])

    def index_loss_grad(
        self,
        mapping: Mapping,
        x: Array,
        index: Array,
        scale: Array,
        saved: Array | None,
        *,
        axis: int = -1,
        ignored: int = BELOW,
        factor: float = 1.0,
    ) -> Array | None:
        scale = world_of(x).cast(scale, wide(x), x) if dtype_of(scale) != wide(x) else scale
        return engine_for(x).loss_grad(_link(mapping, x), x, index, scale, axis, factor, saved)

    def threshold(self, mapping: Mapping, x: Array) -> Array:
        return _numbers(_link(mapping, x), x, "a threshold")

    def logsumexp(self, x: Array) -> Array:
        tau = _numbers(_SOFTMAX, x, "logsumexp")
        xp = namespace(x)
        lost = xp.isnan(tau)
        return xp.where(lost, upcast(top(x, xp), xp), tau) if bool(xp.any(lost)) else tau

    def largest(self, x: Array, k: int) -> tuple[Array, Array]:
        """Equal scores are in the order of their positions."""
        world = world_of(x)
        batch, n = tuple(x.shape[:-1]), x.shape[-1]
        if not 1 <= k <= n:
            raise ValueError(f"k must be from 1 to the number of classes, {n}, got {k!r}")
        value, positions = room_in(world, (*batch, k), dtype_of(x)), room_in(world, (*batch, k), "int64")
        _done(engine_for(x).largest(world.contiguous(x), k, value, positions), "the largest scores", x)
        return value, positions

    def plan(self, op: str, mapping: Mapping, x: Array) -> str | None:
        """The plan and the instruction set, such as "tile avx512" (csrc/plan.hpp)."""
        return engine_for(x).plan(_link(mapping, x), x, CODES[op]) if math.prod(x.shape) else None


ENGINE = Native()
