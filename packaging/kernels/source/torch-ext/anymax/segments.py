"""Ragged rows: p of segments of one tensor, without padding."""

from __future__ import annotations

from typing import Any

import torch

from ._kernels.link import NEED_SCORES
from ._kernels.triton import segments
from ._kernels.triton.segments import Entries, Layout
from ._links import Words, check, link_of, words_of
from .rows import _axis, once

Tensor = torch.Tensor


def segment_layout(lengths: Any, device: Any = "cuda") -> Layout:
    """Segments that lie one after another, from their lengths (a list, or an integer tensor). It may be used for many calls."""
    lengths = torch.as_tensor(lengths, device="cpu").to(torch.int64).reshape(-1)
    if bool((lengths < 0).any()):
        raise ValueError("segment_layout: lengths are 0 or more")
    ptr = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    groups = tuple(segments.Launch(ids.to(device), longest) for ids, longest in segments.launches(ptr))
    return Layout(len(lengths), ptr.to(device), groups)


def _entries(words: Words, x: Tensor, layout: Layout, dim: int) -> Entries:
    link = link_of(words)
    if link.params is not None:  # the kernels take the segments last
        lead = [n for i, n in enumerate(x.shape) if i != dim]
        link = link._replace(params=torch.as_tensor(link.params).expand((layout.count, *lead)).movedim(0, -1))
    return Entries(link, x, layout, dim)


class _Segments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, words: Words, layout: Layout, dim: int) -> Tensor:
        p = _entries(words, x, layout, dim).forward("p", x)
        ctx.call = words, layout, dim
        ctx.save_for_backward(p, x if words.kind in NEED_SCORES else None)
        return p

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        once()
        p, x = ctx.saved_tensors
        words, layout, dim = ctx.call
        return _entries(words, p, layout, dim).backward(False, x, p, grads[0]), None, None, None


def segment_apply(
    x: Tensor,
    layout: Layout,
    map: str = "softmax",
    *,
    alpha: Any = None,
    k: Any = None,
    p: Any = None,
    order: int | None = None,
    dim: int = 0,
) -> Tensor:
    """The probabilities of each segment of the entries along `dim`, for each index of the other axes, with their gradient.

    layout: from `segment_layout`, on the device of x. map and its number: as in `apply`, but for "perturb_max"; an alpha for each segment
    is a tensor [segments, other axes ...] or one that broadcasts to it. Eager calls only.
    """
    words = words_of("segment_apply", "forward", map, alpha=alpha, k=k, p=p, order=order)
    if words.kind == "perturb_max":
        raise ValueError("segment_apply: there is no kernel for segments of perturb_max")
    check("segment_apply", x, layout.ptr, dtypes=("float32", "bfloat16", "float16", "int64"))
    dim = _axis("segment_apply", x, dim)
    if x.requires_grad and torch.is_grad_enabled():
        return _Segments.apply(x, words, layout, dim)
    return _entries(words, x, layout, dim).forward("p", x)
