"""What to compute from the scores of each row of an output layer: a loss, log p, or a threshold."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from .._array import Array, is_array, namespace, upcast
from .._core.mapping import Mapping
from ..likelihood.terms import terms_of
from ..losses.options import LossKind
from ..losses.verbs import fenchel_young, nll, sparse_softmax_loss
from ..mappings import Softmax, SparseSoftmax
from ..thresholds import tau_and_support
from ..transforms.base import Transform, put_through
from .layer import Layer

_SOFTMAX = Softmax()


class PerRow(ABC):
    """Computes one number for each row, or a tuple of such numbers; hashable, so that a program is compiled once."""

    transforms: tuple[Callable[[Any], Any], ...] = ()  # of the scores

    @abstractmethod
    def __call__(self, layer: Layer, scores: Array, target: Array | None, class_weight: Array | None) -> Any:
        """Compute them from all scores of the rows; a class index of -1 means no class."""

    def transformed(self, s: Array) -> Array:
        """The scores after the transforms."""
        return s

    def arrays(self) -> list[Array]:
        """The arrays among the parameters of the transforms; those of a user's function are not known."""
        return []

    def with_arrays(self, arrays: list[Array]) -> PerRow:
        """A copy with these arrays in place of those that `arrays` returns."""
        return self


@dataclasses.dataclass(frozen=True)
class RowLoss(PerRow):
    """The loss of each row, or log p of its target."""

    who: str
    smoothing: float = 0.0
    transforms: tuple[Callable[[Any], Any], ...] = ()
    log_prob: bool = False
    margin: Callable[..., Any] | None = None
    scale: float = 1.0
    least: float = 0.0  # softmax may leave out the gradient of classes below this probability

    def __call__(self, layer: Layer, scores: Array, target: Any, class_weight: Array | None) -> Array:
        xp = namespace(scores)
        s = self.transformed(upcast(scores, xp))
        if self.margin is not None:
            s = self.scale * self.margin(s / self.scale, target, -1)
        if self.log_prob:
            return terms_of(layer.mapping, s, target[:, None], xp).log_p[:, 0]
        return self.loss(layer.mapping, s, target, class_weight, self.smoothing)

    def transformed(self, s: Array) -> Array:
        for t in self.transforms:
            s = put_through(self.who, t, s, own=True)
        return s

    def arrays(self) -> list[Array]:
        return [v for t in self.transforms if isinstance(t, Transform) for _, v in t.params if is_array(v)]

    def with_arrays(self, arrays: list[Array]) -> RowLoss:
        if not arrays:
            return self
        left = iter(arrays)
        transforms = tuple(
            t.replace(**{k: next(left) for k, v in t.params if is_array(v)}) if isinstance(t, Transform) else t
            for t in self.transforms
        )
        return dataclasses.replace(self, transforms=transforms)

    def loss(
        self, mapping: Mapping, s: Array, target: Array, class_weight: Array | None = None, smoothing: float = 0.0
    ) -> Array:
        """The loss of each row."""
        options: dict[str, Any] = {
            "axis": -1, "reduction": "none", "ignore_index": -1, "label_smoothing": smoothing,
        }  # fmt: skip
        kind = loss_of(mapping)
        if kind == "without_constant":
            return sparse_softmax_loss(s, target, class_weight, k=mapping.k, p=mapping.p, **options)  # type: ignore[attr-defined]
        return (fenchel_young if kind == "fenchel_young" else nll)(mapping, s, target, class_weight, **options)


def loss_of(mapping: Mapping) -> LossKind:
    """The loss that an output layer uses for a map."""
    if isinstance(mapping, SparseSoftmax):
        return "without_constant"
    return "fenchel_young" if mapping.facts.has_potential and not isinstance(mapping, Softmax) else "nll"


@dataclasses.dataclass(frozen=True)
class Thresholds(PerRow):
    """Computes tau and the size of the support for each row of scores."""

    def __call__(self, layer: Layer, scores: Array, target: Any, class_weight: Any) -> tuple[Array, Array]:
        xp = namespace(scores)
        tau, size = tau_and_support(layer.mapping, upcast(scores, xp), xp)
        return tau[:, 0], size[:, 0]
