"""The operands of the row kernels: tensors on as few row axes as possible, and numbers for each row. Nothing here waits for the device."""

from __future__ import annotations

import contextlib
import math
from typing import Any, NamedTuple

import torch
import triton

from .._rows import merged
from .plans import packed

Tensor = torch.Tensor

_AXES = 3  # the row strides that a kernel takes


class Laid:
    """The tensors of a call by name, "x" among them, and their strides as the kernels take them."""

    held: dict[str, Tensor]
    strides: dict[str, tuple[int, ...]]  # three of the rows, then that of the classes
    sizes: tuple[int, int]  # of the second and third row axes
    count: int  # rows to compute
    all: int  # rows that the kernels see
    n: int  # classes in units
    unit: int  # what divides the classes and the row strides
    columns: int  # classes that a plan is for
    shift: int  # whether unaligned rows are read in aligned packs of 16 bytes: see `PlainRows`
    long_offsets: bool  # True if an offset within a row exceeds 32 bits
    sideways: bool  # True if neighbours in memory are of different rows
    bounds: tuple[Tensor, Tensor]  # of segments; placeholders otherwise

    def tensor(self, name: str) -> Tensor:
        """An operand; x, which no kernel then reads, where there is none."""
        return self.held.get(name, self.held["x"])

    def steps(self, *names: str) -> tuple[int, ...]:
        """The strides of these operands, one after another."""
        return tuple(step for name in names for step in self.strides.get(name, self.strides["x"]))

    def finish(self) -> None:
        """To be called after the kernels."""


class PlainRows(Laid):
    """Operands of one shape as the kernels take them: as few row axes as possible, the classes last. n and the row strides are in units,
    so that the compiler knows a divisor of them."""

    def __init__(self, x: Tensor, **operands: Tensor) -> None:
        n = x.shape[-1]
        batch = tuple(x.shape[:-1])
        self.count = self.all = math.prod(batch)
        self.held = {"x": x, **operands}
        self.back: Tensor | None = None  # the output, where a kernel writes to a contiguous copy
        axes = self._merge(batch)
        if len(axes) > _AXES:  # more strides than a kernel takes: contiguous copies
            for key, a in self.held.items():
                if len(merged(batch, [a.stride()[:-1]])) > 1:
                    if key == "out":
                        self.back = a
                        self.held[key] = torch.empty_like(a, memory_format=torch.contiguous_format)
                    else:
                        self.held[key] = a.contiguous()
            axes = self._merge(batch)
        inner = max(0, len(axes) - 1)
        axes = axes + [(1, (0,) * len(self.held))] * (_AXES - len(axes))
        self.sizes = (axes[1][0], axes[2][0])
        steps = [step for _, steps in axes for step in steps]
        self.unit = math.gcd(n, *steps, 16)
        pack = 16 // x.element_size()
        self.shift = self._shift(axes, pack) if self.unit % pack else 0
        self.n = n // self.unit
        self.columns = n + (pack - 1 if self.shift else 0)
        self.strides = {
            key: (*(steps[i] // self.unit for _, steps in axes), a.stride(-1))
            for i, (key, a) in enumerate(self.held.items())
        }
        self.bounds = (x, x)
        self.long_offsets = any((n - 1) * abs(s[-1]) >= 2**31 for s in self.strides.values())
        self.sideways = n > 1 and any(
            a.stride(-1) != 1 and axes[inner][1][i] == 1 for i, a in enumerate(self.held.values())
        )

    def _merge(self, batch: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
        return merged(batch, [a.stride()[:-1] for a in self.held.values()])

    def _shift(self, axes: list[tuple[int, tuple[int, ...]]], pack: int) -> int:
        """Whether unaligned rows are read in aligned packs of 16 bytes: 0 no, 1 yes, 2 yes except for the last row, since the memory may
        end within its last pack."""
        n, size, open_ = self.held["x"].shape[-1], self.held["x"].element_size(), False
        if not packed(n, pack):
            return 0
        first = None
        for i, (key, a) in enumerate(self.held.items()):
            if key == "mask":  # it is read without packs
                continue
            steps = [step[i] for _, step in axes]
            places = [step % pack for step in steps]
            first = first or places
            if places != first or a.stride(-1) != 1 or a.element_size() != size or a.data_ptr() % 16:
                return 0
            if open_ended(a):
                if any(count > 1 and step < pack for (count, _), step in zip(axes, steps)):
                    return 0
                open_ = True
        return 2 if open_ else 1

    def finish(self) -> None:
        if self.back is not None:
            self.back.copy_(self.held["out"])


def open_ended(a: Tensor) -> bool:
    """Whether the memory of rows with neighbouring classes ends within the last 16 bytes of the last row."""
    *batch, n = a.shape
    last = a.storage_offset() + n
    for count, step in zip(batch, a.stride()):
        last += (count - 1) * step
    return -(-last * a.element_size() // 16) * 16 > a.untyped_storage().nbytes()


class Cut(NamedTuple):
    """Segments of about the same length; the entries of all segments lie one after another."""

    ptr: Tensor  # int64 [all segments + 1], the bounds
    ids: Tensor  # int32, the indices of these segments
    longest: int

    @property
    def padded(self) -> int:
        """The classes of a row: a power of two, so that few kernels are compiled."""
        return triton.next_power_of_2(max(self.longest, 1))


class RaggedRows(Laid):
    """Operands [entries, heads]: a row is one head of a segment, which begins anywhere. Otherwise the kernels see `all` rows,
    with the heads of a segment side by side, and compute `count` of them."""

    def __init__(self, cut: Cut, x: Tensor, **operands: Tensor) -> None:
        heads = x.shape[1]
        self.count, self.all = cut.ids.shape[0] * heads, (cut.ptr.shape[0] - 1) * heads
        self.held = {"x": x, **operands}
        self.sizes, self.unit, self.shift, self.bounds = (1, heads), 1, 0, (cut.ptr, cut.ids)
        self.n = self.columns = cut.padded
        self.strides = {key: (0, 0, a.stride(1), a.stride(0)) for key, a in self.held.items()}
        self.long_offsets = any(self.n * abs(s[-1]) >= 2**31 for s in self.strides.values())
        self.sideways = False  # the heads of a segment are in one program or in the next ones, so the cache has them


def lay_out(cut: Cut | None, x: Tensor, **operands: Tensor | None) -> Laid:
    """The operands that are given, as rows or, with `cut`, as segments; a mask is broadcast to x."""
    if (mask := operands.get("mask")) is not None:
        operands["mask"] = mask.expand(x.shape).view(torch.uint8)
    given = {name: a for name, a in operands.items() if a is not None}
    return PlainRows(x, **given) if cut is None else RaggedRows(cut, x, **given)


def on_device_of(x: Tensor, *others: Any) -> contextlib.AbstractContextManager:
    """The device of x, on which a kernel is launched that reads x and the tensors among `others`."""
    for a in others:
        if isinstance(a, torch.Tensor) and a.device != x.device:
            raise ValueError(f"a kernel on {x.device} can't read a tensor on {a.device}; move one of them")
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


# -- parameters -------------------------------------------------------------------------------------------------------------------

_numbers: dict[Any, Tensor] = {}  # parameters from the host, copied to the device, by device and contents
_captured: dict[Any, Tensor] = {}  # those that a captured graph reads, which are never freed


def _capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def per_row(value: Any, x: Tensor, less: float = 0.0, cut: Cut | None = None) -> Tensor:
    """value - less, computed in fp64, as one fp32 number per row; for segments (`cut`) value is [segments, heads]."""
    if isinstance(value, torch.Tensor) and value.device == x.device:
        if value.dtype in (torch.float32, torch.bfloat16, torch.float16):  # whose difference fp32 rounds as well
            value = value.detach().to(torch.float32)
            value = value - less if less else value
        else:
            value = (value.detach().to(torch.float64) - less).to(torch.float32)
    else:  # copies are cached: a copy waits for the device, and a graph can't capture it
        host = torch.as_tensor(value).detach().to(torch.float64) - less
        if host.numel() == 1:
            value = torch.full((1,), float(host), dtype=torch.float32, device=x.device)
        else:
            key = (x.device, tuple(host.shape), host.numpy().tobytes())
            if key not in _numbers:
                if len(_numbers) >= 64:
                    _numbers.clear()
                _numbers[key] = _captured[key] if key in _captured else host.to(torch.float32).to(x.device)
            value = _numbers[key]
            if _capturing(x):
                _captured[key] = value
            elif x.is_cuda:  # the allocator must not reuse a dropped copy that a kernel on another stream still reads
                value.record_stream(torch.cuda.current_stream(x.device))
    value = value.expand(*x.shape[:-1], 1) if cut is None else value
    return value.reshape(-1).contiguous()
