"""PyTorch: the parameters of a map that autograd records, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import array_api_compat.torch as xp
import torch

from .. import kernels
from .._array import dot, modes, recorded, transformed, upcast
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


def gradients(mapping: Mapping, wanted: Iterable[bool], slope: Callable[[str], Tensor]) -> list[Tensor | None]:
    """The gradients by the tensors of `params_of`: `slope` of a name, summed to the shape of its tensor; None where none is wanted."""
    tensors = ((name, value) for name, value in mapping.params().items() if isinstance(value, Tensor))
    return [_summed(slope(name), value) if want else None for (name, value), want in zip(tensors, wanted, strict=True)]


def slope_from_vjp(mapping: Mapping, name: str, x: Tensor, by_scores: Tensor) -> Tensor:
    """`<g, dp / d parameter>` of each row, from J^T g, for a map that `scales_scores`."""
    change = mapping.score_change(name, upcast(x, xp), xp)
    assert change is not None, name
    return dot(by_scores, change, xp)


def _summed(slope: Tensor, value: Tensor) -> Tensor:
    return slope.sum_to_size(value.shape).to(dtype=value.dtype, device=value.device)
