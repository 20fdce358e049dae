"""The modules `anymax.nn.Activation` and `anymax.nn.Loss`: the probabilities of a map, and its loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from torch import Tensor

from .. import functional
from .._core.mapping import Mapping
from .._core.options import check_keywords
from .._core.typing import Axes, SampleKeywords
from ..losses.verbs import loss_of_kind
from .base import OfMapping, class_weight_of


class Activation(OfMapping):
    """The probabilities of a map as a module, like `nn.Softmax` for softmax.

    It is for gates, routers, pooling and other probabilities inside a model. To train a classifier use `Loss`, which takes the scores.

    It takes scores of any shape, and returns probabilities of the same shape and dtype.

    Parameters
    ----------
    mapping
        The map, such as `Sparsemax()`, or its name. A tensor in it becomes a buffer of the module, an `nn.Parameter` a
        parameter.
    dim
        The axis of the classes, the last by default (also for None); or several axes, which are treated as one.
    learn
        The name of a number of the map, such as "alpha", to learn inside `bounds`. It starts at its value in the map; a
        tensor, for example of shape (heads, 1, 1), is one number for each head.
    bounds
        The interval (low, high) of the learned number; its start must be strictly inside.

    Examples
    --------
    >>> import torch
    >>> from anymax import Entmax, nn
    >>> gate = torch.nn.Sequential(torch.nn.Linear(8, 4), nn.Activation(Entmax(1.5), learn="alpha"))
    >>> gate(torch.randn(2, 8)).shape
    torch.Size([2, 4])
    >>> gate[1].mapping.alpha.item()
    1.5
    """

    own = ("dim",)

    @check_keywords({"alpha": 'write Activation("entmax:alpha=1.5")'})
    def __init__(
        self,
        mapping: Mapping | str,
        dim: Axes = -1,
        *,
        learn: str | None = None,
        bounds: tuple[float, float] = (1.0, 2.0),
    ) -> None:
        super().__init__(mapping, learn, bounds)
        self.dim = -1 if dim is None else dim

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The probabilities of the scores x; `mask` is boolean, broadcastable to x, True = keep, and a masked class gets 0."""
        return functional.apply(self.mapping, x, self.dim, mask=mask)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dim={self.dim}"

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, mask: Tensor | None = None) -> Tensor: ...


class Loss(OfMapping):
    """The loss of a map as a module, like `nn.CrossEntropyLoss` for softmax, and with its arguments.

    It trains a classifier that predicts with the map: the Fenchel-Young loss where the map has one (its gradient is p - y), else `nll`. A
    Fenchel-Young loss is 0 where y = p(x). So for softmax with label smoothing, or with a distribution as target, it is the cross-entropy
    minus a constant, the entropy of the target; and a class weight multiplies the whole loss of a sample. For sparse softmax it is
    `sparse_softmax_loss`, which takes every target, even one that the map cannot reach.

    It takes scores [N, classes, ...] and targets, and returns the loss: one number, or [N, ...] with `reduction="none"`. The loss of
    entmax falls as alpha rises, whatever the scores: an alpha that is learned by this loss alone goes to its upper bound.

    Parameters
    ----------
    mapping
        The map, such as `Sparsemax()`, or its name. A tensor in it becomes a buffer of the module, an `nn.Parameter` a
        parameter.
    weight
        One factor for each class, a tensor [classes].
    dim
        The axis of the classes: by default 1, or 0 for a single row, as in torch.

    Examples
    --------
    >>> import torch
    >>> from anymax import Sparsemax, nn
    >>> loss = nn.Loss(Sparsemax())
    >>> loss(torch.tensor([[2.0, 0.0, 0.0], [0.5, 0.0, 0.0]]), torch.tensor([0, 0]))
    tensor(0.0417)
    """

    weight: Tensor | None
    own = ("weight", "options")

    @check_keywords({"alpha": 'write Loss("entmax:alpha=1.5")'})
    def __init__(
        self,
        mapping: Mapping | str,
        weight: Tensor | None = None,
        *,
        dim: Axes = None,
        learn: str | None = None,
        bounds: tuple[float, float] = (1.0, 2.0),
        **options: Unpack[SampleKeywords],
    ) -> None:
        super().__init__(mapping, learn, bounds)
        self.register_buffer("weight", class_weight_of(weight))
        self.options: dict[str, Any] = {"axis": dim, **options}

    def forward(self, scores: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        """The loss of scores [N, classes, ...].

        Parameters
        ----------
        target
            Class indices [N, ...], or a distribution over the classes in the shape of the scores.
        mask
            Boolean, broadcastable to the scores, True = keep; a masked class gets probability 0.
        """
        mapping = self.mapping
        return loss_of_kind(mapping.own_loss, mapping, scores, target, self.weight, mask=mask, **self.options)

    if TYPE_CHECKING:

        def __call__(self, scores: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor: ...
