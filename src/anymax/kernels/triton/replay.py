"""Calls that repeat: the launches of a call are kept, and made again for other tensors of the same layout.

A short kernel takes 3 us. To lay out its rows, to choose its plan, and for Triton to look at its 70 arguments takes the host 100 us; to
launch a kernel that is known, with known numbers and other addresses, takes 10.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from .operands import open_ended

Tensor = torch.Tensor

MOST = 2048  # calls that are kept
_known: dict[Hashable, Any] = {}
_now = threading.local()  # `recording`, while a call is made whose launches are kept


def empty(numbers: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for a kernel, which a call that is made again takes anew."""
    memory = torch.empty(numbers, dtype=dtype, device=device)
    recording = getattr(_now, "recording", None)
    if recording is not None:
        recording.made.append(memory)
    return memory


def launch(function: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Runs a kernel of Triton on the current device."""
    kernel = function[grid](*args, **options)
    recording = getattr(_now, "recording", None)
    if recording is not None:
        recording.add(function, kernel, grid, args, options)


def layout(t: Tensor) -> Hashable:
    """What the launches of a call depend on, but for the numbers of a tensor and where they lie."""
    shape, stride = t.shape, t.stride()
    same = shape, stride, t.dtype, t.device, t.data_ptr() % 16
    if shape and functools.reduce(operator.or_, stride[:-1], shape[-1]) * t.element_size() % 16:
        # the length of a row or the step to the next one is no multiple of 16 bytes
        return *same, open_ended(t)
    return same


def repeated(key: Hashable, given: tuple[Tensor | None, ...], call: Callable[[], Any]) -> Any:
    """`call()`, or the launches that it made before with tensors of the same layout.

    key: what the launches depend on beside `given`, which must have a first tensor; call: launches kernels that read and write `given`
    and memory from `empty`, and returns None or a named tuple whose field `memory` is such memory. A tensor on another device than the
    first is an error: a kernel would read its address in the wrong memory.
    """
    places: list[int] = []
    layouts: list[Hashable] = []
    for t in given:
        places.append(0 if t is None else t.data_ptr())
        layouts.append(None if t is None else layout(t))
    key = key, *layouts, *map(places.index, places)
    kept = _known.get(key)
    if kept is not None:
        return kept.again(places)
    if kept is None and key in _known:  # this call can't be kept
        return call()
    if getattr(_now, "recording", None) is not None:
        return call()
    _now.recording = recording = _Recording(given)
    try:
        result = call()
    finally:
        _now.recording = None
    if len(_known) >= MOST:
        _known.clear()
    _known[key] = recording.kept(result)
    return result


def _span(t: Tensor) -> int:
    """The bytes from the first number of a tensor to behind its last."""
    return (
        t.element_size() * (1 + sum(step * (size - 1) for size, step in zip(t.shape, t.stride()))) if t.numel() else 0
    )


class _Launch(NamedTuple):
    run: Callable[..., None]  # launches the compiled kernel with these arguments
    args: list[Any]  # None for addresses
    # for each address its argument, the tensor of the call, and bytes from its beginning
    addresses: tuple[tuple[int, int, int], ...]
    # the same for each argument that is a tuple of addresses
    tuples: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]


class _Kept(NamedTuple):
    launches: tuple[_Launch, ...]
    memory: tuple[tuple[int, torch.dtype], ...]  # taken in the call, after the tensors that are given
    result: Any
    returned: int  # the memory that the result has, or -1
    device: torch.device

    def again(self, starts: list[int]) -> Any:
        """starts: the addresses of the tensors that are given."""
        device, made = self.device, []
        for numbers, dtype in self.memory:
            made.append(torch.empty(numbers, dtype=dtype, device=device))
            starts.append(made[-1].data_ptr())
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            self._launch(starts)
        else:
            with torch.cuda.device(device):
                self._launch(starts)
        return self.result if self.returned < 0 else self.result._replace(memory=made[self.returned])

    def _launch(self, starts: list[int]) -> None:
        for run, args, addresses, tuples in self.launches:
            args = args.copy()
            for at, tensor, offset in addresses:
                args[at] = starts[tensor] + offset
            for at, places in tuples:
                args[at] = tuple([starts[tensor] + offset for tensor, offset in places])
            run(*args)


def runner(function: Any, kernel: Any, grid: tuple[int, ...]) -> Callable[..., None] | None:
    """What launches a compiled kernel with all arguments of its function, in their order, addresses as numbers; None if nothing does."""
    return None if kernel is None else kernel[(*grid, 1, 1)[:3]]


class _Recording:
    """The launches of a call, as they are made."""

    def __init__(self, given: tuple[Tensor | None, ...]) -> None:
        self.given = given
        self.made: list[Tensor] = []
        self.launches: list[_Launch] | None = []

    def add(
        self, function: Any, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        run = runner(function, kernel, grid)
        if self.launches is None or run is None:
            self.launches = None
            return
        values, addresses, tuples = [*args, *map(options.get, function.arg_names[len(args) :])], [], []
        for at, value in enumerate(values):
            several = value if isinstance(value, tuple) else (value,)
            if isinstance(several[0], Tensor):
                places = [place for t in several if (place := self._place(t)) is not None]
                if len(places) < len(several):  # a copy, or a parameter: the call is not kept
                    self.launches = None
                    return
                if several is value:
                    tuples.append((at, tuple(places)))
                else:
                    addresses.append((at, *places[0]))
                values[at] = None
        self.launches.append(_Launch(run, values, tuple(addresses), tuple(tuples)))

    def _place(self, t: Tensor) -> tuple[int, int] | None:
        """(the tensor of the call that t is a part of, bytes from its beginning)."""
        at, best = t.data_ptr(), None
        for i, whole in enumerate((*self.given, *self.made)):
            if whole is None or t.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
                continue
            offset = at - whole.data_ptr()
            if not offset:
                return i, 0
            if 0 < offset < _span(whole):  # another may lie elsewhere in a later call
                best = best or (i, offset)
        return best

    def kept(self, result: Any) -> _Kept | None:
        if self.launches is None:
            return None
        returned = -1
        if result is not None:
            returned = next((i for i, t in enumerate(self.made) if t is result.memory), -1)
            if returned < 0:
                return None
            result = result._replace(memory=None)
        first = self.given[0]
        assert first is not None
        memory = tuple((t.numel(), t.dtype) for t in self.made)
        return _Kept(tuple(self.launches), memory, result, returned, first.device)
