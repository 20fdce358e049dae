"""Output layers of torch tensors on a GPU: launches the kernels of `layer_scores`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from ..link import Link
from .launch import form_of
from .layer_plans import Panel, panel, parts_of
from .layer_scores import layer_candidates, layer_products, layer_slopes, layer_sums
from .operands import on_device_of

Tensor = torch.Tensor

_MOST = 256  # the most candidates of a row in one part of its classes
_ENTRIES, _FEATURES = 16, 256  # the size of a tile in a sparse product


class Lists(NamedTuple):
    """The candidates of each row: a list for each part of the classes, in the order of the classes."""

    value: Tensor  # [rows, parts, most], fp32; only the first `count` of a part are valid
    index: Tensor  # int32
    count: Tensor  # [rows, parts], int32: how many there were, listed or not
    floor: Tensor  # [rows, parts]: no lower score is listed; NaN for a row with NaN or +inf
    own: Tensor  # [rows]: the target's score


class _Operands:
    """Features, weight, bias and mask as the kernels take them, with the classes in parts to keep all processors busy."""

    def __init__(self, kind: str, layer: Any) -> None:
        x, w, b, keep = layer.x, layer.weight, layer.bias, layer.keep
        self.panel: Panel = panel(kind, x.element_size())
        self.rows, self.n = x.shape[0], w.shape[0]
        self.pointers = (x, w, x if b is None else b, x if keep is None else keep.view(torch.uint8))
        k0, k1 = (0, 0) if keep is None else ((keep.stride(0) if keep.shape[0] > 1 else 0), keep.stride(1))
        self.strides = (*x.stride(), *w.stride(), 0 if b is None else b.stride(0), k0, k1)
        p = self.panel
        self.options = {
            "BIAS": b is not None, "KEPT": keep is not None, "M": p.M, "N": p.N, "F": p.F, "num_warps": p.warps, "num_stages": p.stages,
        }  # fmt: skip
        self.tall = triton.cdiv(self.rows, p.M)
        self.parts, self.span = parts_of(p, self.tall, self.n, _processors(x.device))


def _processors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU; 4 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _launch(kernel: Any, like: Tensor, grid: tuple[int, int], *args: Any, **options: Any) -> None:
    with on_device_of(like):
        kernel[grid](*args, **options)


def candidate_form(link: Link) -> tuple[str, int, float, float] | None:
    """(LINK, P, slope, power) of a map that `layer_candidates` can take, or None."""
    if link.params is not None or link.kind not in ("sparsemax", "entmax"):
        return None
    form = form_of(link)
    if form.param <= 0.0:
        return None
    return "edge" if form.link == "any" else form.link, form.power, form.param, 1.0 / form.param


def two_of(layer: Any, target: Tensor, entropy: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """The target's score [rows], logsumexp of the other scores in each part of the classes [rows, parts], and if requested the entropy of
    their softmax, of the same shape; fp32."""
    of = _Operands("sums", layer)
    own = torch.full((of.rows,), -torch.inf, dtype=torch.float32, device=layer.x.device)  # of a row without a target
    level = own.new_empty((of.rows, of.parts))
    h = torch.empty_like(level) if entropy else level
    _launch(
        layer_sums, layer.x, (of.tall, of.parts), *of.pointers, target.contiguous(), own, level, h, of.rows, of.n, layer.x.shape[1],
        of.span, *of.strides, MIXED=entropy, **of.options,
    )  # fmt: skip
    return own, level, h


def slopes(
    layer: Any, target: Tensor, level: Tensor, g: Tensor, u: Tensor | None, g_even: Tensor | None, mix: Tensor | None, a: int,
    b: int, room: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient in the scores of the classes a to b, in the dtype of the features, written to `room`: g [rows, 2] are those of the
    target's score and of logsumexp of the others, g_even that of <x, u>, and mix [rows] that of the others' entropy."""
    of = _Operands("slopes", layer)
    out = room[: of.rows * (b - a)].view(of.rows, b - a)
    spread = u is not None and g_even is not None
    even = (g_even.float().contiguous(), u.float().contiguous()) if spread else (level, level)  # type: ignore[union-attr]
    _launch(
        layer_slopes, layer.x, (of.tall, triton.cdiv(b - a, of.panel.N)), *of.pointers, target.contiguous(), level.contiguous(),
        g.float().contiguous(), *even, level if mix is None else mix.float().contiguous(), out, of.rows, b, layer.x.shape[1], a,
        *of.strides, out.stride(0), SPREAD=spread, MIXED=mix is not None, **of.options,
    )  # fmt: skip
    return out


def candidates(layer: Any, link: tuple[str, int, float, float], target: Tensor | None, low: Tensor | None) -> Lists:
    """The scores of each row that may have a probability; `low` [rows]: lower scores have none."""
    of = _Operands("candidates", layer)
    name, power, c, r = link
    x = layer.x
    shape = (of.rows, of.parts)
    value = torch.empty((*shape, _MOST), dtype=torch.float32, device=x.device)
    index, count = torch.empty_like(value, dtype=torch.int32), torch.empty(shape, dtype=torch.int32, device=x.device)
    floor, own = torch.empty_like(count, dtype=torch.float32), torch.full_like(value[:, 0, 0], -torch.inf)
    target = torch.full_like(count[:, 0], -1, dtype=torch.int64) if target is None else target
    low = torch.full_like(own, -torch.inf) if low is None else low.float().contiguous()
    _launch(
        layer_candidates, x, (of.tall, of.parts), *of.pointers, target.contiguous(), low, own, value, index, count, floor, of.rows,
        of.n, x.shape[1], of.span, *of.strides, c, r, LINK=name, P=power, MOST=_MOST, **of.options,
    )  # fmt: skip
    return Lists(value, index, count, floor, own)


def add_products(out: Tensor, starts: Tensor, index: Tensor, value: Tensor, rows: Tensor) -> None:
    """out[i] += sum of `value[e] rows[index[e]]` over e from starts[i] to starts[i + 1]."""
    if not (out.shape[0] and value.shape[0]):
        return
    features = min(_FEATURES, triton.next_power_of_2(max(out.shape[1], 1)))
    _launch(
        layer_products, out, (out.shape[0], triton.cdiv(out.shape[1], features)), value, index, starts, rows, out, out.shape[1],
        *rows.stride(), *out.stride(), E=_ENTRIES, F=features, num_warps=4,
    )  # fmt: skip
