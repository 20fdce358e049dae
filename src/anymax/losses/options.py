"""The options of every loss: documented for all of them, read and checked once, then passed on."""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import _array
from .._array import Array, Namespace, as_dtype, as_scalar, namespace, quiet
from .._core.options import Function, check_keywords, check_options, documented_like
from .._core.typing import Axes, LossKeywords, LossKind, Mask, Reduction, Weight

_NAMES = "weight", *LossKeywords.__annotations__
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
    def read(cls, who: str, weight: Any, given: dict[str, Any], own: tuple[str, ...] = ()) -> LossOptions:
        """The options from a caller's keywords, checked; an error for an unknown one begins with `who`, and lists its `own` too."""
        if not given:
            return _USUAL if weight is None else cls(weight)
        check_options(who, (*own, *_NAMES), given, _HINTS)
        reduction = given.get("reduction", "mean")
        if reduction not in ("mean", "sum", "none"):
            hint = "; it is called 'mean' here" if reduction == "elementwise_mean" else ""
            raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}{hint}")
        ignored = given.get("ignore_index", -100)
        if type(ignored) is not int:
            what = "an integer, which marks samples to leave out"
            ignored = _array.check_integer(who, "ignore_index", ignored, what)
        smoothing = given.get("label_smoothing", 0.0)
        smoothing = _array.check_scalar("label_smoothing", smoothing, lambda v: 0 <= v <= 1, "a number from 0 to 1")
        neither: Any = None
        axis = _array.pick_axis(given.get("axis"), given.get("dim"), neither)
        return cls(weight, axis, given.get("mask"), ignored, reduction, smoothing)

    def class_axis(self, x: Array) -> Any:
        """The axis of the classes of scores x, or the axes."""
        return self.axis if self.axis is not None else 1 if x.ndim > 1 else 0

    def keywords(self) -> dict[str, Any]:
        """The options as a caller gives them."""
        fields = self._asdict()
        return fields | {"label_smoothing": fields.pop("smoothing")}

    def words(self) -> dict[str, Any]:
        """What processes must agree on, and how an error tells it."""
        weight = "not given" if self.weight is None else "given"
        return {
            "weight": weight, "ignore_index": self.ignore_index, "reduction": repr(self.reduction), "label_smoothing": self.smoothing,
        }  # fmt: skip

    def reduce(self, value: Array, norm: Array, dtype: Any, xp: Namespace) -> Array:
        """Apply the reduction to the losses of all samples; a mean divides by the sum of `norm`."""
        if self.reduction == "mean":
            weight = xp.sum(norm)
            value = xp.sum(value) / xp.where(weight == 0, xp.ones_like(weight), weight)
        elif self.reduction == "sum":
            value = xp.sum(value)
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


def cast(value: Array, dtype: Any) -> Array:
    """A loss as the caller gets it, in the dtype of the result; a loss above the largest number of fp16 becomes +inf."""
    if value.dtype != dtype:
        with quiet(value):
            value = namespace(value).astype(value, dtype)
    return as_scalar(value)


def every_loss(
    mapping: Any,
    scores: Any,
    target: Any,
    weight: Any = None,
    *,
    axis: Axes = None,
    dim: Axes = None,
    mask: Mask = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> None:
    """The parameters of every loss. `documented_like` reads this docstring; the function is never called.

    Parameters
    ----------
    mapping
        The map, such as `anymax.Entmax(alpha=1.3)`, or its name, such as "entmax:alpha=1.3".
    scores
        The scores, an array of NumPy, torch or JAX, or lists of numbers; -inf marks a masked class.
    target
        Class indices (integers, of the shape of the scores without the axis of the classes), or distributions over the
        classes (floating point, of the shape of the scores).
    weight
        One factor for each class, as in torch: a mean then weights each sample by the factor of its target.
    axis, dim
        The axis of the classes: by default (None) 1, as in torch, and 0 for a vector of scores; a tuple of axes is treated as
        one axis.
    mask
        Booleans that broadcast to the scores, True = keep. A masked class has probability 0; if it is the target, a loss
        without an upper bound is +inf.
    ignore_index
        The class index of samples that are left out; a mean does not count them.
    reduction
        "mean" over the samples, their "sum", or "none" for one value per sample. A mean over no samples is 0, and so are its
        gradients; torch's is NaN.
    label_smoothing
        The share of the target, from 0 to 1, that is taken from it and spread evenly over the unmasked classes. As in torch,
        each gets `label_smoothing / n` also where a soft target of `nll` or `cross_entropy` does not sum to 1.

    Returns
    -------
    Array
        The loss, one number of the kind and dtype of the scores; with `reduction="none"` one for each sample.
    """


def is_loss(function: Function) -> Function:
    """Decorate a loss: its docstring gets the options that all losses share, and torch's and TensorFlow's names are taken, too."""
    names = function.__code__.co_varnames
    scores = names[names.index("target") - 1]
    return documented_like(every_loss)(check_keywords(input=scores, logits=scores, labels="target")(function))
