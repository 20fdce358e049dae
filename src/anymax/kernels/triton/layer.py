"""Output layers of torch tensors on a GPU: launches the kernels of `layer_products`. The scores come from torch's products."""

from __future__ import annotations

import torch
import triton

from .layer_products import layer_products, layer_scaled
from .operands import on_device_of

Tensor = torch.Tensor

_ENTRIES, _FEATURES = 16, 256  # the size of a tile in a sparse product
_LANES, _PROGRAMS = 4096, 1024


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
