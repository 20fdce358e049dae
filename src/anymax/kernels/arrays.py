"""Arrays of NumPy and torch as the compiled library takes them: dtypes, memory, and what it refuses."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import numpy as np

from .._array import Array, is_torch, modes
from .._array.memory import SMALLEST, recycler
from .link import MOST_CLASSES

DTYPES = {"float32": 0, "float64": 1, "bfloat16": 2, "float16": 3}
SIZES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "int32": 4, "int64": 8}
MEMORY = {"bfloat16": "int16"}  # NumPy dtypes of the same size


class Arrays(ABC):
    """What the library needs of a framework's arrays."""

    @staticmethod
    @abstractmethod
    def empty(shape: tuple[int, ...], dtype: str) -> Any:
        """An uninitialized array on the CPU."""

    @staticmethod
    @abstractmethod
    def empty_like(a: Any) -> Any:
        """An uninitialized array of the shape and dtype of a."""

    @staticmethod
    @abstractmethod
    def adopt(memory: np.ndarray, dtype: str) -> Any:
        """The memory of a NumPy array as an array of this framework; `dtype` has numbers of the same size."""

    @staticmethod
    @abstractmethod
    def cast(a: Any, dtype: str, like: Any) -> Any:
        """Numbers as an array on the device of `like`."""

    @staticmethod
    @abstractmethod
    def broadcast(a: Any, shape: tuple[int, ...]) -> Any:
        """A view of a with this shape."""

    @staticmethod
    @abstractmethod
    def aligned(a: Any) -> bool:
        """True if the address of a is a multiple of the size of its numbers."""

    @staticmethod
    @abstractmethod
    def strides(a: Any) -> tuple[int, ...]:
        """How far apart entries lie along each axis, in bytes or in entries."""

    @staticmethod
    @abstractmethod
    def contiguous(a: Any) -> Any:
        """a in C order at an aligned address."""

    @staticmethod
    @abstractmethod
    def is_contiguous(a: Any) -> bool:
        """True for a plain array in C order on the CPU."""

    @staticmethod
    @abstractmethod
    def copied(a: Any, shape: tuple[int, ...] | None) -> Any:
        """A copy in C order, broadcast to a shape."""

    @staticmethod
    @abstractmethod
    def viewed(a: Any, dtype: str) -> Any:
        """The bytes of a as numbers of another dtype."""

    @staticmethod
    @abstractmethod
    def scattered(index: Any, like: Any) -> Any:
        """Booleans in the shape of `like`, True at index [..., k] of its last axis."""


class NumPyArrays(Arrays):
    @staticmethod
    def empty(shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return np.empty(shape, dtype)

    @staticmethod
    def empty_like(a: np.ndarray) -> np.ndarray:
        return np.empty_like(a)

    @staticmethod
    def adopt(memory: np.ndarray, dtype: str) -> np.ndarray:
        return memory.view(dtype)

    @staticmethod
    def cast(a: Any, dtype: str, like: np.ndarray) -> np.ndarray:
        return np.asarray(a, dtype)

    @staticmethod
    def broadcast(a: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return np.broadcast_to(a, shape)

    @staticmethod
    def aligned(a: np.ndarray) -> bool:
        return a.flags.aligned

    @staticmethod
    def strides(a: np.ndarray) -> tuple[int, ...]:
        return a.strides

    @staticmethod
    def contiguous(a: np.ndarray) -> np.ndarray:
        a = np.ascontiguousarray(a)
        return a if a.flags.aligned else a.copy()

    @staticmethod
    def is_contiguous(a: np.ndarray) -> bool:
        return type(a) is np.ndarray and a.flags.c_contiguous

    @staticmethod
    def copied(a: np.ndarray, shape: tuple[int, ...] | None) -> np.ndarray:
        return np.array(a if shape is None else np.broadcast_to(a, shape), order="C")

    @staticmethod
    def viewed(a: np.ndarray, dtype: str) -> np.ndarray:
        return a.view(dtype)

    @staticmethod
    def scattered(index: np.ndarray, like: np.ndarray) -> np.ndarray:
        out = np.zeros(like.shape, bool)
        np.put_along_axis(out, index, True, -1)
        return out


class TorchArrays(Arrays):
    @staticmethod
    def empty(shape: tuple[int, ...], dtype: str) -> Any:
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")

    @staticmethod
    def empty_like(a: Any) -> Any:
        return sys.modules["torch"].empty_like(a)

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

    @staticmethod
    def broadcast(a: Any, shape: tuple[int, ...]) -> Any:
        return a.expand(shape)

    @staticmethod
    def aligned(a: Any) -> bool:
        return a.data_ptr() % a.element_size() == 0

    @staticmethod
    def strides(a: Any) -> tuple[int, ...]:
        return a.stride()

    @staticmethod
    def contiguous(a: Any) -> Any:
        a = a.contiguous()
        return a if TorchArrays.aligned(a) else a.clone()

    @staticmethod
    def is_contiguous(a: Any) -> bool:
        torch = sys.modules["torch"]
        kinds = torch.Tensor, torch.nn.Parameter
        return type(a) in kinds and a.is_cpu and a.layout is torch.strided and a.is_contiguous()

    @staticmethod
    def copied(a: Any, shape: tuple[int, ...] | None) -> Any:
        a = a.detach()
        return (a if shape is None else a.expand(shape)).clone(memory_format=sys.modules["torch"].contiguous_format)

    @staticmethod
    def viewed(a: Any, dtype: str) -> Any:
        return a.view(getattr(sys.modules["torch"], dtype))

    @staticmethod
    def scattered(index: Any, like: Any) -> Any:
        torch = sys.modules["torch"]
        return torch.zeros(like.shape, dtype=torch.bool, device=like.device).scatter_(-1, index, True)


def arrays_of(x: Array) -> type[Arrays]:
    """The operations of x's framework, NumPy or torch."""
    return TorchArrays if is_torch(x) else NumPyArrays


def dtype_of(x: Array) -> str:
    return str(x.dtype)[6:] if is_torch(x) else x.dtype.name


def wide(x: Array) -> str:
    """The dtype in which the engine returns one number per row."""
    return "float64" if dtype_of(x) == "float64" else "float32"


# -- memory -------------------------------------------------------------------------------------------------------------------


def room_in(arrays: type[Arrays], shape: tuple[int, ...], dtype: str) -> Array:
    """An uninitialized array; a large one uses recycled memory (`_array/memory.py`)."""
    size = math.prod(shape) * SIZES[dtype]
    if size < SMALLEST:
        return arrays.empty(shape, dtype)
    return arrays.adopt(recycler.take(shape, MEMORY.get(dtype, dtype), size), dtype)


def room_beside(x: Any, shape: tuple[int, ...]) -> Any:
    """An uninitialized tensor with the dtype and device of the tensor x."""
    recycled = x.device.type == "cpu" and dtype_of(x) in DTYPES
    return room_in(TorchArrays, shape, dtype_of(x)) if recycled else x.new_empty(shape)


def empty_like(x: Array) -> Array:
    """An uninitialized array like x, from recycled memory where possible."""
    arrays = arrays_of(x)
    if arrays.is_contiguous(x) and x.nbytes >= SMALLEST and (dtype := dtype_of(x)) in DTYPES:
        return arrays.adopt(recycler.take(x.shape, MEMORY.get(dtype, dtype), x.nbytes), dtype)
    return arrays.empty_like(x)


# -- which arrays --------------------------------------------------------------------------------------------------------------


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
