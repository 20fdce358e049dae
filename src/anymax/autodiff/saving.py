"""Save tensors for a backward pass, and check them when the graph returns them.

Hooks (`torch.autograd.graph.saved_tensors_hooks`) may return a different tensor than they got, and `x.data = ...` changes a saved one.
Kernels read memory by address, so every tensor is checked first. A different floating dtype or different strides are corrected; any
other difference is an error. The library checks that indices lie within their row (csrc/doors/abi.cpp).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from .._core.mapping import Mapping

Tensor = torch.Tensor
_PLAIN = (Tensor, torch.nn.Parameter)


_c: Any = torch._C
# the hooks that get the saved tensors, or None. Then no support is saved: it holds floats among indices, and a hook may round them
hooked = functools.partial(getattr(_c._autograd, "_top_saved_tensors_default_hooks", lambda _: None), False)


class As(NamedTuple):
    """The properties of a tensor when it was saved."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device
    contiguous: bool = True
    kind: type = Tensor

    @classmethod
    def of(cls, t: Tensor) -> As:
        kind = Tensor if type(t) in _PLAIN else type(t)
        # this skips a Python call, in each call, for each tensor that is saved
        return tuple.__new__(cls, (t.dtype, t.shape, t.device, kind is Tensor and t.is_contiguous(), kind))


def params_of(mapping: Mapping) -> tuple[Tensor, ...]:
    """The parameters that are tensors. A backward pass reads them, so they are saved, and changing one in between is an error."""
    return tuple(value for value in mapping.params().values() if isinstance(value, Tensor))


def with_params(mapping: Mapping, params: Any) -> Mapping:
    """The map with the tensors of `params_of`, as the graph returned them."""
    if not params:
        return mapping
    tensors = {name: value for name, value in mapping.params().items() if isinstance(value, Tensor)}
    if all(a is b for a, b in zip(tensors.values(), params, strict=True)):
        return mapping
    return mapping.laid_out(**dict(zip(tensors, params, strict=True)))


def restored(t: Tensor, was: As) -> Tensor:
    """The tensor that the graph returned, as it was saved; an error if it is a different one."""
    kind = Tensor if type(t) in _PLAIN else type(t)
    floats = t.dtype == was.dtype or (t.dtype.is_floating_point and was.dtype.is_floating_point)
    if (
        kind is not was.kind
        or t.shape != was.shape
        or t.device != was.device
        or not floats
        or t.layout != torch.strided
    ):
        raise RuntimeError(
            f"backward: {_words(was.kind, was.dtype, was.shape, was.device)} was saved, and "
            f"{_words(kind, t.dtype, t.shape, t.device)}{'' if t.layout == torch.strided else f' ({t.layout})'} came back; a hook of saved "
            "tensors (or an assignment to .data) must leave kind, shape and device as they were, and may change only the dtype of "
            "floating-point tensors"
        )
    t = t if t.dtype == was.dtype else t.to(was.dtype)
    if kind is not Tensor:
        return t
    t = t.resolve_neg() if t.is_neg() else t
    return t.contiguous() if was.contiguous else t


def _words(kind: type, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> str:
    return f"a {kind.__name__} of {dtype}, shape {tuple(shape)}, on {device}"
