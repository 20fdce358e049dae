"""The module `anymax.nn.LinearLoss`: an output layer with its loss."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn

from .. import linear
from .._core.mapping import Mapping
from .._core.options import check_keywords
from .._core.typing import SampleKeywords
from .base import OfMapping, check_sizes, class_weight_of, or_softmax

if TYPE_CHECKING:
    import typing_extensions

    Result = typing_extensions.TypeVar("Result", default=Tensor)
else:
    Result = TypeVar("Result")


_TEMPERED = "divide x by it; with a bias write anymax.linear_loss(..., transform=anymax.temperature(0.7))"


class LinearLoss(OfMapping, Generic[Result]):
    """An output layer with the loss of a map, computed in blocks of scores: `linear_loss` as a module with a weight.

    It is for training with many classes. Unlike `Linear` and `Loss`, it spends little memory on the scores and their gradient, and on
    a CPU a sparse map is faster. For softmax it is the cross-entropy; `Loss` is the Fenchel-Young loss, which differs for label
    smoothing and soft targets.

    It takes features [..., in_features] and targets, and returns the loss: one number, or [...] with `reduction="none"`; fp32 for half
    precision; with `return_predicted` it returns (loss, classes). To share the weight with an embedding, assign it: `head.weight =
    embedding.weight`.

    Parameters
    ----------
    in_features
        The number of features.
    num_classes
        The number of classes; each has a row of `weight`.
    mapping
        The map of the loss, or its name; softmax by default. A tensor in it becomes a buffer of the module, an
        `nn.Parameter` becomes its parameter.
    bias
        Whether to add a learned number to the scores of each class.
    weight
        One factor for each class, a tensor [classes]; the module stores it as `class_weight`.
    chunk
        For how many classes scores are computed at a time; None lets the library choose.
    least
        For softmax, classes with a probability below this number get no gradient; 0 leaves out none. See `linear_loss`.
    suppress, z_loss
        The factors of two further losses: of the classes that a sparse map gives probability 0, and of tau squared, for softmax
        logsumexp squared. See `linear_loss`.
    score_dtype, invariant
        The dtype of scores of half precision, and whether the loss of a row depends on no other row, bit for bit. See `linear_loss`.
        Neither does log p of all classes; over a support its last bits may depend on the widest row.
    return_predicted
        Whether to return the class with the largest score of each row, too, -1 for a row that is left out. See `linear_loss`.

    Examples
    --------
    >>> import torch
    >>> from anymax import Entmax, nn
    >>> head = nn.LinearLoss(8, 1000, Entmax(1.5))
    >>> x = torch.randn(4, 8)
    >>> head(x, torch.tensor([3, 1, 4, 1])).shape, head.scores(x).shape
    (torch.Size([]), torch.Size([4, 1000]))
    """

    prefix = "map_"  # the head itself has a `weight`
    class_weight: Tensor | None
    bias: nn.Parameter | None

    @overload
    def __init__(
        self: LinearLoss[Tensor], in_features: int, num_classes: int, mapping: Mapping | str | None = None, bias: bool = False, *,
        weight: Tensor | None = None, chunk: int | None = None, least: float = 0.0, suppress: float = 0.0, z_loss: float = 0.0,
        score_dtype: torch.dtype | str | None = None, invariant: bool = False, return_predicted: Literal[False] = False,
        learn: str | None = None, bounds: tuple[float, float] = (1.0, 2.0), device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None, **options: Unpack[SampleKeywords],
    ) -> None: ...  # fmt: skip

    @overload
    def __init__(
        self: LinearLoss[tuple[Tensor, Tensor]], in_features: int, num_classes: int, mapping: Mapping | str | None = None,
        bias: bool = False, *, weight: Tensor | None = None, chunk: int | None = None, least: float = 0.0, suppress: float = 0.0,
        z_loss: float = 0.0, score_dtype: torch.dtype | str | None = None, invariant: bool = False, return_predicted: Literal[True],
        learn: str | None = None, bounds: tuple[float, float] = (1.0, 2.0), device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None, **options: Unpack[SampleKeywords],
    ) -> None: ...  # fmt: skip

    @check_keywords(dict.fromkeys(("temperature", "tau", "T"), _TEMPERED))
    def __init__(
        self,
        in_features: int,
        num_classes: int,
        mapping: Mapping | str | None = None,
        bias: bool = False,
        *,
        weight: Tensor | None = None,
        chunk: int | None = None,
        least: float = 0.0,
        suppress: float = 0.0,
        z_loss: float = 0.0,
        score_dtype: torch.dtype | str | None = None,
        invariant: bool = False,
        return_predicted: bool = False,
        learn: str | None = None,
        bounds: tuple[float, float] = (1.0, 2.0),
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[SampleKeywords],
    ) -> None:
        check_sizes("LinearLoss", in_features=in_features, num_classes=num_classes)
        super().__init__(or_softmax(mapping), learn, bounds)
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(num_classes, in_features, **factory_kwargs))
        self.register_parameter("bias", nn.Parameter(torch.empty(num_classes, **factory_kwargs)) if bias else None)
        self.register_buffer("class_weight", class_weight_of(weight))
        self.chunk = chunk
        self.options: dict[str, Any] = {
            "least": least, "suppress": suppress, "z_loss": z_loss, "score_dtype": score_dtype, "invariant": invariant,
            "return_predicted": return_predicted, **options,
        }  # fmt: skip
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises the weights again, as `nn.Linear` does."""
        bound = 1.0 / math.sqrt(max(1, self.weight.shape[1]))
        for value in (self.weight, self.bias):
            if value is not None:
                nn.init.uniform_(value, -bound, bound)

    def scores(self, x: Tensor) -> Tensor:
        """The scores of all classes, [..., num_classes]: to predict for a few rows."""
        return nn.functional.linear(x, self.weight, self.bias)

    def log_prob(self, x: Tensor, target: Tensor, support: Any = None) -> Tensor:
        """log p of the classes `target`, by `linear_log_prob`."""
        return linear.linear_log_prob(
            x, self.weight, target, self.mapping, linear_bias=self.bias, support=support, chunk=self.chunk,
            score_dtype=self.options["score_dtype"], invariant=self.options["invariant"] and support is None,
        )  # fmt: skip

    def forward(self, x: Tensor, target: Tensor, mask: Tensor | None = None) -> Result:
        """The loss of features [..., in_features]; with `return_predicted` a tuple, (loss, classes).

        Parameters
        ----------
        target
            Class indices [...], or a distribution over the classes [..., num_classes].
        mask
            Boolean, broadcastable to the scores, True = keep; a masked class gets probability 0.
        """
        result: Any = linear.linear_loss(
            x, self.weight, target, self.mapping, linear_bias=self.bias, weight=self.class_weight, mask=mask, chunk=self.chunk,
            **self.options,
        )  # fmt: skip
        return result

    def extra_repr(self) -> str:
        classes, features = self.weight.shape
        return f"{features} -> {classes}, {super().extra_repr()}, bias={self.bias is not None}"

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, target: Tensor, mask: Tensor | None = None) -> Result: ...
