"""The GPU cases of ragged rows: our kernels beside torch's composition of scatters, and beside our own dense rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

import anymax

from .cases import OURS, Bar, Case, Workload, calls, differs
from .gpu_clock import DEVICE, around
from .ragged import DENSE, LENGTHS, SCATTER, data, scatter_softmax

SHAPES = ((1_000_000, 100_000, 8), (1_300_000, 60_000, 1))
TINY = ((60, 9, 2),)
BUFFERS = 4


@functools.lru_cache(maxsize=1)
def operands(shape: tuple[int, ...], lengths: str, dtype: str) -> tuple[Any, Any, Any]:
    """Buffers of scores, the segments, and the segment of each entry on the device."""
    d = data(shape, lengths, False)
    xs = [torch.randn_like(d.x).to(DEVICE.kind, getattr(torch, dtype)) for _ in range(BUFFERS)]
    return xs, anymax.Segments.of(ptr=d.ptr), d.index.to(DEVICE.kind)


def run(case: Case) -> Workload:
    xs, rows, index = operands(case.shape, case.distribution, case.dtype)
    _, mapping = calls(case.map, 3)
    both = case.note == "both ways"
    xs = [x.detach().requires_grad_(both) for x in xs]
    mean = max(1, xs[0].numel() // (rows.num_segments * case.shape[2]))
    count = xs[0].numel() // mean * mean
    dense = [x.detach().view(-1)[:count].view(-1, mean).requires_grad_(both) for x in xs]
    gs, dense_gs = [torch.randn_like(x) for x in xs], [torch.randn_like(x) for x in dense]

    def ways(function: Callable[[Any], Any], xs: list[Any], gs: list[Any]) -> Callable[[], Any]:
        return around(lambda x, g: torch.autograd.grad(function(x), x, g)[0] if both else function(x), xs, gs)

    ours = functools.partial(anymax.segment_apply, mapping, index=rows)
    contenders = {
        OURS: ways(lambda x: ours(x), xs, gs),
        SCATTER: ways(lambda x: scatter_softmax(x, index, rows.num_segments), xs, gs),
        DENSE: ways(lambda x: anymax.apply(mapping, x), dense, dense_gs),
    }

    def check() -> str | None:
        last = rows.num_segments - 50 if rows.num_segments > 50 else 0  # the last segments, by the reference
        start = int(rows.ptr[last])
        lengths = rows.lengths[last:]
        part = xs[0].detach()[start:].double().requires_grad_(both)
        with anymax.use("reference"):
            want = anymax.segment_apply(mapping, part, lengths=lengths)
            if both:
                want = torch.autograd.grad(want, part, gs[0][start:].double())[0]
        if both:
            return differs(torch.autograd.grad(ours(xs[0]), xs[0], gs[0])[0][start:], want, case.dtype)
        return differs(ours(xs[0])[start:], want, case.dtype)

    return Workload(contenders, check, "triton", 2 * xs[0].numel() * xs[0].element_size())


def ragged_cases() -> Iterator[Case]:
    for shape in TINY if DEVICE.dry else SHAPES:
        lengths = LENGTHS[1] if shape[-1] == 1 else LENGTHS[0]
        for dtype in ("float32", "bfloat16"):
            for name in ("softmax", "sparsemax", "entmax15"):
                for note in ("", "both ways"):
                    bars = (Bar(SCATTER, at_most=0.15), Bar(DENSE, at_most=2.0))
                    yield Case(
                        "gpu ragged", name, shape, run, bars, lengths, dtype, note=note, needs=("torch", "triton")
                    )
