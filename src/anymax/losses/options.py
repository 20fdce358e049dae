"""The options of every loss: documented for all of them, read and checked once, then passed on."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .. import _array
from .._array import Array, Namespace, as_dtype, as_scalar, autocast_dtype, namespace, quiet, upcast
from .._core.options import check_keywords
from .._core.tables import Function, read, rows, share_words
from .._core.typing import Axes, LossKeywords, LossKind, Mask, Reduction, Weight

_TABLE = rows(LossKeywords)
_HINTS = {
    "alpha": "it belongs to the map, as in anymax.Entmax(alpha=1.3)",
    "k": "it belongs to the map, as in anymax.SparseSoftmax(k=8)",
}


class LossOptions(NamedTuple):
    """The fields are the keywords of every loss. They are frozen; `_replace` returns changed options."""

    weight: Weight = None  # one factor for each class
    axis: Axes = None  # of the classes, one or several; None means 1, as in torch, or 0 for a vector of scores
    mask: Mask = None
    ignore_index: int = -100
    reduction: Reduction = "mean"
    smoothing: float = 0.0  # label_smoothing

    @classmethod
    def read(cls, who: str, weight: Any, keywords: dict[str, Any]) -> LossOptions:
        """The options from a caller's keywords, checked; an error begins with `who`."""
        if not keywords:
            return _USUAL if weight is None else cls(weight)
        options = read(_TABLE, who, keywords)
        axis = options.pop("axis", None)
        if "dim" in options:
            axis = _array.pick_axis(axis, options.pop("dim"), None)
        return cls(weight, axis, smoothing=options.pop("label_smoothing", 0.0), **options)

    def class_axis(self, x: Array) -> Any:
        """The axis of the classes of scores x, or the axes."""
        return self.axis if self.axis is not None else 1 if x.ndim > 1 else 0

    def keywords(self) -> dict[str, Any]:
        """The options as a caller gives them."""
        fields = self._asdict()
        fields["label_smoothing"] = fields.pop("smoothing")
        return fields

    def words(self) -> dict[str, Any]:
        """What processes must agree on, and how an error tells it: all fields but those of each process's own scores."""
        words = self.keywords()
        del words["axis"], words["mask"]
        return words | {"weight": "not given" if self.weight is None else "given", "reduction": repr(self.reduction)}

    def reduce(self, value: Array, norm: Array | None, dtype: Any, xp: Namespace) -> Array:
        """Apply the reduction to the losses of all samples. A mean divides by the sum of `norm`; None is 1 for each sample."""
        if self.reduction == "none":
            return cast(value, dtype)
        count, value = math.prod(value.shape), xp.sum(value)
        if self.reduction == "mean" and norm is None:
            value = value / max(count, 1)
        elif self.reduction == "mean":
            weight = xp.sum(norm)
            value = value / xp.where(weight == 0, xp.ones_like(weight), weight)
        return cast(value, dtype)


_USUAL = LossOptions()
EACH_ROW = LossOptions(axis=-1, reduction="none", ignore_index=-1)  # of rows whose targets have been read


def name_of_kind(kind: LossKind) -> str:
    """The public function that computes a kind of loss."""
    return "sparse_softmax_loss" if kind == "without_constant" else kind


def class_weights(weight: Any, rows: Array, xp: Namespace) -> Array:
    """The class weights in the dtype of the rows."""
    weight = _array.beside(weight, rows, "weight", xp)
    if tuple(weight.shape) != (rows.shape[-1],):
        hint = "" if weight.ndim else "; a parameter of the map is a keyword, as in alpha=1.5"
        raise ValueError(
            f"weight of shape {tuple(weight.shape)}: expected one factor for each of the {rows.shape[-1]} classes{hint}"
        )
    return as_dtype(weight, rows.dtype, xp)


def result_dtype(rows: Array) -> Any:
    """The dtype of the scores; under torch's autocast losses are fp32, as torch's own are."""
    return rows.dtype if autocast_dtype(rows) is None else upcast(rows, namespace(rows)).dtype


def cast(value: Array, dtype: Any) -> Array:
    """A loss as the caller gets it, in the dtype of the result; a loss above the largest number of fp16 becomes +inf."""
    if value.dtype != dtype:
        with quiet(value):
            value = namespace(value).astype(value, dtype)
    return as_scalar(value)


def is_loss(function: Function) -> Function:
    """Decorate a loss: its docstring gets the words that all losses share, and torch's and TensorFlow's names are taken, too."""
    names = function.__code__.co_varnames
    scores = names[names.index("target") - 1]
    hints = _HINTS if "mapping" in names else None
    function = check_keywords(hints, input=scores, logits=scores, labels="target")(function)
    share_words(function, LossKeywords)
    return function
