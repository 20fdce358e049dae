"""Output layers of torch tensors on a GPU: launches the kernels of `layer_products` and `layer_scores`. The scores come from torch's
products."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton

from .layer_products import layer_products, layer_scaled
from .layer_scores import Read, layer_slopes, layer_terms
from .operands import on_device_of
from .plans import power_of_two

Tensor = torch.Tensor

_ENTRIES, _FEATURES = 16, 256  # the size of a tile in a sparse product
_LANES, _PROGRAMS = 4096, 1024
_AT_ONCE, _WARPS = 4096, 8  # the most scores of a row that a program reads at a time


def add_products(out: Tensor, starts: Tensor, index: Tensor, value: Tensor, rows: Tensor) -> None:
    """out[i] += sum of `value[e] rows[index[e]]` over e from starts[i] to starts[i + 1]."""
    if not (out.shape[0] and value.shape[0]):
        return
    features = min(_FEATURES, triton.next_power_of_2(max(out.shape[1], 1)))
    with on_device_of(out, value, index, starts, rows):
        layer_products[out.shape[0], triton.cdiv(out.shape[1], features)](
            value, index, starts, rows, out, out.shape[1], *rows.stride(), *out.stride(), E=_ENTRIES, F=features, num_warps=4,
        )  # fmt: skip


def scale(a: Tensor, g: Tensor) -> None:
    """a *= g, for a contiguous tensor and a number on the device, which costs next to nothing if the number is 1."""
    if a.numel():
        with on_device_of(a, g):
            layer_scaled[(min(triton.cdiv(a.numel(), _LANES), _PROGRAMS),)](a, g, a.numel(), L=_LANES, num_warps=8)


def terms(block: Any, weights: Tensor | None, entropy: bool, best: bool) -> tuple[Tensor, Tensor | None]:
    """(the `TERMS` of `layer_terms`, [rows, 4], the largest class of each row if it is wanted). block: a `ScoreBlock`."""
    rows = block.numbers.shape[0]
    out = torch.empty((rows, 4), dtype=torch.float32, device=block.numbers.device)
    bests = torch.empty(rows, dtype=torch.int64, device=out.device) if best else None
    laid = _Laid(block, weights)
    if rows:
        with on_device_of(out, block.numbers):
            layer_terms[(rows,)](
                *laid.tensors, out, out if bests is None else bests, *laid.sizes, *laid.last, ENTROPY=entropy,
                WEIGHTED=weights is not None, BESTS=best, READ=laid.read, num_warps=laid.warps,
            )  # fmt: skip
    return out, bests


def slopes(block: Any, out: Tensor, of_row: Tensor, weights: Tensor | None, mixed: bool) -> None:
    """Writes what `layer_slopes` writes. out: of the shape of the block, with its own memory or in that of the block's numbers."""
    numbers, laid = block.numbers, _Laid(block, weights)
    if numbers.shape[0]:
        narrowed = out.data_ptr() == numbers.data_ptr() and out.dtype is not numbers.dtype
        with on_device_of(out, numbers, of_row):
            layer_slopes[(numbers.shape[0],)](
                laid.tensors[0], out, *laid.tensors[1:], of_row, *laid.sizes, out.stride(0), *laid.last, MIXED=mixed,
                WEIGHTED=weights is not None, NARROWED=narrowed, READ=laid.read, num_warps=laid.warps,
            )  # fmt: skip


class _Laid:
    """A block of scores as the kernels take it; the plan depends on nothing but the number of classes and the dtype."""

    def __init__(self, block: Any, weights: Tensor | None) -> None:
        s, bias, keep, factor, index, first, cap = block
        assert s.stride(1) == 1
        assert index.is_contiguous()
        bias = None if bias is None else bias.to(torch.float32)  # numbers of one size have one layout
        if keep is not None and keep.shape[0] == 1:  # for the same reason a mask of classes is a bias
            bias = s.new_zeros(s.shape[1], dtype=torch.float32) if bias is None else bias
            bias, keep = bias.masked_fill(~keep[0], -math.inf), None
        n, pack = s.shape[1], 16 // s.element_size()
        self.warps = max(1, min(_WARPS, power_of_two(n) // (32 * pack)))
        width = 32 * pack * self.warps  # 16 bytes a thread
        depth = min(_AT_ONCE, power_of_two(n)) // width
        half = s.dtype is not torch.float32
        self.read = Read(max(1, depth), width, bias is not None, half, factor is not None, keep is not None, cap > 0.0)
        self.tensors = tuple(s if a is None else a for a in (s, bias, keep, factor, index, weights))
        self.sizes = n, s.stride(0)
        of_keep = (0, 0) if keep is None else (keep.stride(0) if keep.shape[0] > 1 else 0, keep.stride(1))
        self.last = (*of_keep, first, float(cap))
