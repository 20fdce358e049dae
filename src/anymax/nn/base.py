"""`OfMapping`, the base class of the modules of `anymax.nn`: the tensors of a mapping are its parameters and buffers."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import nn

from .._array import FINITE, asarray, is_int
from .._core.mapping import Mapping
from .._core.names import as_mapping
from ..kernels.reference import ENGINE as reference
from ..mappings import Softmax


class OfMapping(nn.Module):
    """A module that registers the tensors of a mapping.

    Parameters
    ----------
    dropout
        The share of the weights that is set to 0 in training.
    learn
        The name of a number of the map, such as "alpha", to learn inside `bounds`; see `Activation`.
    bounds
        The interval (low, high) of the learned number.
    device, dtype
        The device and dtype of the weights.
    """

    prefix = ""  # is put before the tensors' names
    place: ClassVar[str] = ""  # what an error says if a number stands where the map should be
    own: ClassVar[tuple[str, ...]] = ()  # names that the module uses itself, where there is no prefix

    def __init__(self, mapping: Mapping | str, learn: str | None, bounds: tuple[float, float]) -> None:
        super().__init__()
        mapping = as_mapping(mapping, type(self).__name__, self.place)
        self._kind = type(mapping)
        self._fixed = mapping if learn is None and not mapping.params() else None
        self._constants = mapping.constants()
        self._tensors = tuple(mapping.params())
        self.learn, self.bounds = learn, bounds
        taken = {*dir(self), *self.own}
        places = {name: self.prefix + name for name in mapping.params()}
        self._places = {name: f"map_{place}" if place in taken else place for name, place in places.items()}
        for name, value in mapping.params().items():
            if name == learn:
                continue
            if isinstance(value, nn.Parameter):
                self.register_parameter(self._places[name], value)
            else:
                self.register_buffer(self._places[name], torch.as_tensor(value))
        if learn is not None:
            self._make_learnable(mapping, learn, bounds)

    def _make_learnable(self, mapping: Mapping, learn: str, bounds: tuple[float, float]) -> None:
        if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
            raise TypeError(f"learn={learn!r}: bounds must be a pair (low, high), got {bounds!r}")
        low, high = bounds
        fields = {**mapping.constants(), **mapping.params()}
        start = fields.get(learn)
        if start is None or isinstance(start, (str, bool)):
            names = [name for name, value in fields.items() if not isinstance(value, (str, bool))]
            hint = f"; write learn={names[0]!r}" if names else "; it has no number that could be learned"
            raise ValueError(f"learn={learn!r}: {mapping!r} has no number of that name{hint}")
        _check_derivative(mapping, learn, start)
        start = torch.as_tensor(start, dtype=torch.get_default_dtype()).detach()
        if not (low < high and bool(((start > low) & (start < high)).all())):
            raise ValueError(
                f"learn={learn!r}: the start must lie strictly inside bounds={bounds}, got {start.tolist()}"
            )
        allowed = mapping.ranges.get(learn, FINITE)
        if not (allowed.low <= low and high <= allowed.high and math.isfinite(high - low)):
            finite = " and finite" if allowed.high == math.inf and "finite" not in allowed.words else ""
            raise ValueError(
                f"learn={learn!r}: bounds must leave {learn} in its range, {allowed.words}{finite}, got {bounds}"
            )
        self._open = (not allowed.has(low), not allowed.has(high))
        self._constants.pop(learn, None)
        self._tensors = tuple(t for t in self._tensors if t != learn)
        self.register_parameter(f"raw_{learn}", nn.Parameter(torch.logit((start - low) / (high - low))))

    @property
    def mapping(self) -> Mapping:
        """The map with the module's current tensors, for any function of anymax."""
        if self._fixed is not None:
            return self._fixed
        values = {name: getattr(self, self._places[name]) for name in self._tensors}
        if self.learn is not None:
            values[self.learn] = self._learned()
        return self._kind.rebuilt(self._constants | values)

    def _learned(self) -> torch.Tensor:
        """The learned number; where its sigmoid rounds to a bound that the map does not take, the number beside that bound."""
        (low, high), (above, below) = self.bounds, self._open
        value = low + (high - low) * torch.sigmoid(getattr(self, f"raw_{self.learn}"))
        if not (above or below):
            return value
        step = torch.finfo(value.dtype).eps * max(abs(low), abs(high))
        return value.clamp(low + step if above else None, high - step if below else None)

    def extra_repr(self) -> str:
        words = [f"{k}={v!r}" for k, v in self._constants.items()] + [f"{k}=<tensor>" for k in self._tensors]
        if self.learn is not None:
            words.append(f"{self.learn} learned in {self.bounds}")
        return f"{self._kind.__name__}({', '.join(words)})"


def _check_derivative(mapping: Mapping, learn: str, start: Any) -> None:
    """An error unless p has a derivative by the number to be learned."""
    with torch.enable_grad():
        leaf = torch.as_tensor(start, dtype=torch.float64).detach().clone().requires_grad_()
        try:
            trial = mapping.replace(**{learn: leaf})
        except (TypeError, ValueError):  # a number that takes no array
            smooth = False
        else:
            width = leaf.shape[-1] if leaf.ndim and leaf.shape[-1] > 1 else mapping.least_classes + 1
            smooth = reference.differentiable(trial, leaf.new_zeros((*leaf.shape[:-1], width))).requires_grad
    if not smooth:
        raise ValueError(f"learn={learn!r}: the probabilities of {mapping!r} have no derivative by {learn}")


def or_softmax(mapping: Mapping | str | None) -> Mapping | str:
    """The map of a module whose map is softmax by default."""
    return Softmax() if mapping is None else mapping


def class_weight_of(weight: Any) -> torch.Tensor | None:
    """A factor for each class as a tensor: a tensor as it is, numbers in torch's default dtype."""
    if weight is None or isinstance(weight, torch.Tensor):
        return weight
    return torch.as_tensor(asarray(weight, "weight"), dtype=torch.get_default_dtype())


def check_integer(who: str, name: str, size: Any) -> None:
    """An error in the name of `who` unless the size is an integer."""
    if not is_int(size):
        raise TypeError(f"{who}: {name} must be an integer, got {size!r}")


def check_sizes(who: str, **sizes: Any) -> None:
    """An error in the name of `who` for the first that is not an integer from 1 on."""
    for name, size in sizes.items():
        check_integer(who, name, size)
        if size < 1:
            raise ValueError(f"{who}: {name} must be at least 1, got {size}")
