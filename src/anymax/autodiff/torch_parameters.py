"""PyTorch: the parameters of a map that autograd records, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import array_api_compat.torch as xp
import torch

from .. import kernels
from .._array import batched, dot, known, modes, recorded, transformed, upcast
from .._core.mapping import Mapping
from ..kernels.choice import unlearned

Tensor = torch.Tensor


def learns(mapping: Mapping) -> bool:
    """True if autograd records operations on a parameter."""
    return recorded(*mapping.params().values())


def needs_plain(mapping: Mapping, x: Tensor, op: str = "forward") -> bool:
    """True if autograd must see plain operations: for a parameter whose derivative does not follow from p.

    It is an error if `anymax.use` asks for an engine, none of which has such a derivative.
    """
    if unlearned(op, mapping, x) is None:
        return False
    if kernels.asked() is not None:
        kernels.choose(op, mapping, x)
    return True


def traced(mapping: Mapping, x: Tensor, op: str = "forward") -> bool:
    """True if torch must see plain operations: under torch.compile, a mode, a transform, or for a parameter as in `needs_plain`."""
    return torch.compiler.is_compiling() or modes() or transformed() or needs_plain(mapping, x, op)


def gradients(
    mapping: Mapping, wanted: Iterable[bool], slope: Callable[[str], Tensor], g: Tensor | None = None
) -> list[Tensor | None]:
    """The gradients by the tensors of `params_of`: `slope` of a name, summed to the shape of its tensor; None where none is wanted.

    g: the gradient [..., n] or [..., 1] that each row's slope is of. A row of NaN whose g is 0 has a slope of 0.
    """
    tensors = ((name, value) for name, value in mapping.params().items() if isinstance(value, Tensor))
    return [
        _summed(slope(name), value, g) if want else None for (name, value), want in zip(tensors, wanted, strict=True)
    ]


def slope_from_vjp(mapping: Mapping, name: str, x: Tensor, by_scores: Tensor) -> Tensor:
    """`<g, dp / d parameter>` of each row, from J^T g, for a map that `scales_scores`."""
    change = mapping.score_change(name, upcast(x, xp), xp)
    assert change is not None, name
    return dot(by_scores, change, xp)


def _summed(slope: Tensor, value: Tensor, g: Tensor | None) -> Tensor:
    out = slope.sum_to_size(value.shape)
    if g is not None and (batched(g) or not known(out) or bool(out.isnan().any())):
        out = torch.where((g != 0).any(-1, keepdim=True), slope, torch.zeros_like(slope)).sum_to_size(value.shape)
    return out.to(dtype=value.dtype, device=value.device)
