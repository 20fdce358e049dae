"""torch modules, generic over maps: `Activation`, `Loss`, `MarginHead`.

A tensor in a mapping becomes a buffer of the module, an `nn.Parameter` a parameter of it: `Activation(Entmax(alpha=nn.Parameter(...)))`
learns alpha. `learn="alpha"` does so inside `bounds`, whatever the optimiser does.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from . import functional, losses, margins, transforms
from ._mapping import Mapping
from .mappings import Softmax as _Softmax

__all__ = ["Activation", "Loss", "MarginHead"]


def __dir__() -> list[str]:
    return __all__


class _OfMapping(nn.Module):
    """A module that owns the tensors of a mapping."""

    prefix = ""  # of the tensors' names

    def __init__(self, mapping: Mapping, learn: str | None, bounds: tuple[float, float]) -> None:
        super().__init__()
        if not isinstance(mapping, Mapping):
            raise TypeError(f"expected a mapping such as anymax.Sparsemax(), got {mapping!r}")
        self._kind = type(mapping)
        self._constants = mapping.constants()
        self._tensors = tuple(mapping.params())
        self.learn, self.bounds = learn, bounds
        for name, value in mapping.params().items():
            if name == learn:
                continue
            if isinstance(value, nn.Parameter):
                self.register_parameter(self.prefix + name, value)
            else:
                self.register_buffer(self.prefix + name, torch.as_tensor(value))
        if learn is not None:
            self._make_learnable(mapping, learn, bounds)

    def _make_learnable(self, mapping: Mapping, learn: str, bounds: tuple[float, float]) -> None:
        low, high = bounds
        start = getattr(mapping, learn, None)
        if start is None or isinstance(start, (str, bool)):
            raise ValueError(f"learn={learn!r}: {mapping!r} has no number of that name")
        start = torch.as_tensor(start, dtype=torch.get_default_dtype()).detach()
        if not (low < high and bool(((start > low) & (start < high)).all())):
            raise ValueError(
                f"learn={learn!r}: the start must lie strictly inside bounds={bounds}, got {start.tolist()}"
            )
        self._constants.pop(learn, None)
        self._tensors = tuple(t for t in self._tensors if t != learn)
        self.register_parameter(f"raw_{learn}", nn.Parameter(torch.logit((start - low) / (high - low))))

    @property
    def mapping(self) -> Mapping:
        """The mapping with the module's current tensors."""
        values = {name: getattr(self, self.prefix + name) for name in self._tensors}
        if self.learn is not None:
            low, high = self.bounds
            values[self.learn] = low + (high - low) * torch.sigmoid(getattr(self, f"raw_{self.learn}"))
        return self._kind(**self._constants, **values)

    def extra_repr(self) -> str:
        words = [f"{k}={v!r}" for k, v in self._constants.items()] + [f"{k}=<tensor>" for k in self._tensors]
        if self.learn is not None:
            words.append(f"{self.learn} learned in {self.bounds}")
        return f"{self._kind.__name__}({', '.join(words)})"


class Activation(_OfMapping):
    """p(x) along `dim`.

    learn: the name of a parameter ("alpha") to learn inside `bounds` by a sigmoid; give the mapping a tensor, say of shape
    (heads, 1, 1), for one value a head.
    """

    def __init__(
        self, mapping: Mapping, dim: int = -1, *, learn: str | None = None, bounds: tuple[float, float] = (1.0, 2.0)
    ) -> None:
        super().__init__(mapping, learn, bounds)
        self.dim = dim

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return functional.apply(self.mapping, x, self.dim, mask=mask)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dim={self.dim}"


class Loss(_OfMapping):
    """The map's loss: Fenchel-Young where it has a potential, else `nll`. Options as in `nn.CrossEntropyLoss`.

    A Fenchel-Young loss is 0 where y = p(x): with label smoothing or a distribution as target it lies below the cross-entropy
    by a constant, the entropy of the target, and a class weight multiplies the whole loss of a sample.
    """

    weight: Tensor | None

    def __init__(
        self,
        mapping: Mapping,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        dim: int | None = None,
        learn: str | None = None,
        bounds: tuple[float, float] = (1.0, 2.0),
    ) -> None:
        super().__init__(mapping, learn, bounds)
        self.register_buffer("weight", weight)
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "reduction": reduction,
            "label_smoothing": label_smoothing,
            "axis": dim,
        }

    def forward(self, scores: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        mapping = self.mapping
        loss = losses.fenchel_young if mapping.facts.has_potential else losses.nll
        return loss(mapping, scores, target, self.weight, mask=mask, **self.options)


class MarginHead(_OfMapping):
    """A classifier on the sphere: cosines of embeddings and class centres, a margin for the target, the map's loss.

    `forward(embeddings, target)` is the loss to train with; predict by the largest of `probabilities(embeddings)`. `scores(embeddings)`
    are the scaled cosines; their order is that of the probabilities for monotone maps only (not for Taylor and x^2).
    """

    prefix = "map_"  # the head has a scale and a weight of its own

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        mapping: Mapping | None = None,
        margin: Any = 0.35,
        scale: float = 30.0,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__(_Softmax() if mapping is None else mapping, None, (1.0, 2.0))
        self.margin = margins.as_margin(margin)
        self.scale = scale
        self.options = {"ignore_index": ignore_index, "reduction": reduction}
        self.weight = nn.Parameter(torch.empty(num_classes, in_features))
        nn.init.normal_(self.weight, std=1.0 / math.sqrt(in_features))

    def cosines(self, embeddings: Tensor) -> Tensor:
        return transforms.cosine(self.weight)(embeddings)

    def scores(self, embeddings: Tensor) -> Tensor:
        return self.scale * self.cosines(embeddings)

    def probabilities(self, embeddings: Tensor) -> Tensor:
        return functional.apply(self.mapping, self.scores(embeddings))

    def forward(self, embeddings: Tensor, target: Tensor) -> Tensor:
        cosines = self.cosines(embeddings)
        return losses.margin_loss(
            self.mapping, cosines, target, margin=self.margin, scale=self.scale, axis=-1, **self.options
        )

    def extra_repr(self) -> str:
        classes, features = self.weight.shape
        return f"{features} -> {classes}, {super().extra_repr()}, {self.margin}, scale={self.scale}"
