"""torch modules that are output layers with their loss: `LinearLoss` and, on the sphere, `MarginHead`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import functional, losses, margins, output_layers, transforms
from ._array import asarray
from ._mapping import Mapping
from ._modules import _OfMapping
from ._typing import Reduction
from .mappings import Softmax as _Softmax

_MANY = 1 << 22  # cosines that are not held


class LinearLoss(_OfMapping):
    """The output layer and the loss of a map in one, whose scores are never all held: `linear_loss` with a weight of its own.

    To train with many classes: against `Linear` and `Loss`, the scores and their gradient take no memory, and a sparse map is quicker. It
    is the cross-entropy for softmax, where `Loss` is the Fenchel-Young loss, which label smoothing or soft targets make another one.

    in_features: the features.
    num_classes: the classes, each with a row of `weight`.
    mapping: the map whose loss it is, or its name; softmax by default. A tensor in it becomes a buffer of the module, an `nn.Parameter` a
        parameter of it.
    bias: whether a number is added to the scores of each class, which is learned.
    weight: one factor for each class, a tensor [classes]; the module keeps it as `class_weight`.
    ignore_index: a target that counts for nothing.
    reduction: "mean", "sum" or "none".
    label_smoothing: the share of each target that is spread evenly over all classes, from 0 to 1.
    chunk: how many classes are made at a time; None lets the library choose.
    least: for softmax, a probability below which a class gets no gradient; 0 leaves out none. See `linear_loss`.
    learn: the name of a number of the map, such as "alpha", that is learned inside `bounds`; see `Activation`.
    bounds: the interval (low, high) of the number that is learned.
    device, dtype: of the weights.

    Features [..., in_features] and targets in, the loss out: one number, or [...] with `reduction="none"`. To share the weight with an
    embedding, assign it: `head.weight = embedding.weight`.

    >>> import torch
    >>> from anymax import Entmax, nn
    >>> head = nn.LinearLoss(8, 1000, Entmax(1.5))
    >>> x = torch.randn(4, 8)
    >>> head(x, torch.tensor([3, 1, 4, 1])).shape, head.scores(x).shape
    (torch.Size([]), torch.Size([4, 1000]))
    """

    prefix = "map_"  # the head has a weight of its own
    class_weight: Tensor | None
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        mapping: Mapping | str | None = None,
        bias: bool = False,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        chunk: int | None = None,
        least: float = 0.0,
        learn: str | None = None,
        bounds: tuple[float, float] = (1.0, 2.0),
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_sizes("LinearLoss", in_features, num_classes)
        super().__init__(_Softmax() if mapping is None else mapping, learn, bounds)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(num_classes, in_features, **made))
        self.register_parameter("bias", nn.Parameter(torch.empty(num_classes, **made)) if bias else None)
        if weight is not None and not isinstance(weight, Tensor):
            weight = torch.as_tensor(asarray(weight, "weight"), dtype=torch.get_default_dtype())
        self.register_buffer("class_weight", weight)
        self.chunk = chunk
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing, "least": least,
        }  # fmt: skip
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew, as `nn.Linear` does at its start."""
        bound = 1.0 / math.sqrt(max(1, self.weight.shape[1]))
        for value in (self.weight, self.bias):
            if value is not None:
                nn.init.uniform_(value, -bound, bound)

    def scores(self, x: Tensor) -> Tensor:
        """All scores of features, [..., num_classes]: to predict with, for a few rows."""
        return nn.functional.linear(x, self.weight, self.bias)

    def log_prob(self, x: Tensor, target: Tensor, support: Any = None) -> Tensor:
        """log p of the classes `target`, as `linear_log_prob` gives it."""
        return output_layers.linear_log_prob(
            x, self.weight, target, self.mapping, linear_bias=self.bias, support=support, chunk=self.chunk
        )

    def forward(self, x: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        """The loss of features [..., in_features].

        target: class indices [...], or a distribution over the classes [..., num_classes].
        mask: boolean, broadcastable to the scores, True = keep; a class that is masked gets probability 0.
        """
        return output_layers.linear_loss(
            x, self.weight, target, self.mapping, linear_bias=self.bias, weight=self.class_weight, mask=mask, chunk=self.chunk,
            **self.options,
        )  # fmt: skip

    def extra_repr(self) -> str:
        classes, features = self.weight.shape
        return f"{features} -> {classes}, {super().extra_repr()}, bias={self.bias is not None}"

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor: ...


def _check_sizes(who: str, in_features: Any, num_classes: Any) -> None:
    for name, size in (("in_features", in_features), ("num_classes", num_classes)):
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{who}: {name} must be an integer, got {size!r}")


class MarginHead(_OfMapping):
    """A classifier on the sphere: cosines of embeddings and class centres, a margin for the target, the loss of a map.

    For embeddings that shall be compared by their angles (faces, speakers, products). Train with `head(embeddings, target)`, predict by the
    largest of `head.probabilities(embeddings)`, and keep the embeddings.

    in_features: the features of an embedding.
    num_classes: the classes; each has a centre, a row of `weight`.
    mapping: the map whose loss it is, or its name; softmax by default.
    margin: a number m, which means `margins.AM(m)`, or a margin such as `margins.ArcFace(0.5)`.
    scale: the factor of the cosines, since scores from -1 to 1 are too small for most maps.
    ignore_index: a target that counts for nothing.
    reduction: "mean", "sum" or "none".

    Embeddings [N, in_features] and class indices [N] in, the loss out: one number, or [N] with `reduction="none"`.

    >>> import torch
    >>> from anymax import Sparsemax, margins, nn
    >>> head = nn.MarginHead(8, 5, Sparsemax(), margin=margins.ArcFace(0.3), scale=4.0)
    >>> embeddings = torch.randn(2, 8)
    >>> head(embeddings, torch.tensor([0, 3])).shape, head.probabilities(embeddings).shape
    (torch.Size([]), torch.Size([2, 5]))
    """

    prefix = "map_"  # the head has a scale and a weight of its own

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        mapping: Mapping | str | None = None,
        margin: float | Callable[..., Any] = 0.35,
        scale: float = 30.0,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
    ) -> None:
        _check_sizes("MarginHead", in_features, num_classes)
        super().__init__(_Softmax() if mapping is None else mapping, None, (1.0, 2.0))
        self.margin = margins.as_margin(margin)
        self.scale = scale
        self.options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction}
        self.weight = nn.Parameter(torch.empty(num_classes, in_features))
        nn.init.normal_(self.weight, std=1.0 / math.sqrt(in_features))

    def cosines(self, embeddings: Tensor) -> Tensor:
        """The cosine of each embedding and each class centre, [N, num_classes], from -1 to 1; without the margin."""
        return transforms.cosine(self.weight)(embeddings)

    def scores(self, embeddings: Tensor) -> Tensor:
        """The cosines times the scale, [N, num_classes].

        Their order is that of the probabilities for a monotone map only (not for Taylor softmax and x^2).
        """
        return self.scale * self.cosines(embeddings)

    def probabilities(self, embeddings: Tensor) -> Tensor:
        """The map's probabilities of the classes, [N, num_classes], to predict with; without the margin."""
        return functional.apply(self.mapping, self.scores(embeddings))

    def forward(self, embeddings: Tensor, target: Tensor) -> Tensor:
        """The loss of embeddings [N, in_features] whose classes are `target` [N], with the margin; of many cosines without holding them."""
        if isinstance(self.margin, margins.Margin) and math.prod(embeddings.shape[:-1]) * self.weight.shape[0] >= _MANY:
            x, centres = (nn.functional.normalize(a, dim=-1, eps=1e-8) for a in (embeddings, self.weight))
            return output_layers.margin_linear_loss(
                x, centres, target, self.mapping, self.margin, self.scale, **self.options
            )
        cosines = self.cosines(embeddings)
        return losses.margin_loss(
            self.mapping, cosines, target, margin=self.margin, scale=self.scale, axis=-1, **self.options
        )

    def extra_repr(self) -> str:
        classes, features = self.weight.shape
        return f"{features} -> {classes}, {super().extra_repr()}, {self.margin}, scale={self.scale}"

    if TYPE_CHECKING:

        def __call__(self, embeddings: Tensor, target: Tensor) -> Tensor: ...
