"""Types of signatures. A type checker sees that the result is of the caller's kind of array, and of NumPy's for lists of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypedDict, TypeVar

from .tables import Between, Default, Integer, OneOf


class AnyArray(Protocol):
    """The attributes that arrays of NumPy, torch and JAX share."""

    @property
    def ndim(self) -> int: ...
    @property
    def shape(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...


if TYPE_CHECKING:
    import numpy as np
    import typing_extensions

    ArrayT = typing_extensions.TypeVar("ArrayT", bound=AnyArray, default=np.ndarray[Any, Any])
else:
    ArrayT = TypeVar("ArrayT")

Numbers = Sequence[float] | Sequence[Sequence[float]] | Sequence[Sequence[Sequence[float]]]
Parameter = float | AnyArray  # of a map: a number, or an array that broadcasts to the rows
Target = int | AnyArray | Numbers  # class indices, or a distribution
Weight = AnyArray | Sequence[float] | None
Mask = AnyArray | Sequence[bool] | Sequence[Sequence[bool]] | Sequence[Sequence[Sequence[bool]]] | None
Axes = int | tuple[int, ...] | list[int] | None
DType = Any  # each framework has its own class
Reduction = Literal["mean", "sum", "none"]
# "without_constant" is the Fenchel-Young loss without Omega(y), the constant of the target
LossKind = Literal["fenchel_young", "without_constant", "nll"]
Entropy = Literal["shannon", "renyi", "renyi2", "tsallis"]
Draw = Literal["p", "share", "rest", "none"]  # `functional.draws.one_draw` says what each means


class ApplyOptions(TypedDict, total=False):
    """Options of `apply` and of its shorthands.

    Parameters
    ----------
    mapping
        The map, such as `anymax.Entmax(alpha=1.3)`, or its name, such as "entmax:alpha=1.3".
    x
        The scores, an array of NumPy, torch or JAX, or lists of numbers. -inf marks a masked class; a row with NaN or +inf
        becomes NaN.
    axis, dim
        The axis of the classes, the last one by default; a tuple of axes is treated as one axis, and `axis=None`, as in SciPy,
        stands for all axes.
    mask
        Booleans that broadcast to x, True = keep. A masked class gets 0; if all classes of a row are masked, all get 0.
    out
        A NumPy array or torch tensor to write the result to, with the shape and dtype of the result; allows no gradient.
    dtype
        The floating-point dtype to which the scores are cast first, as in `torch.softmax`.

    Returns
    -------
    Array
        p, an array of the shape, kind and dtype of x, empty if x has no classes; integers become floats, and lists become
        NumPy arrays.
    """

    dim: Axes
    mask: Mask
    out: AnyArray | None
    dtype: DType


class LogOptions(TypedDict, total=False):
    """Options of `log_apply` and of its shorthand; the other words are those of `ApplyOptions`.

    Parameters
    ----------
    mask
        Booleans that broadcast to x, True = keep; a masked class gets -inf.

    Returns
    -------
    Array
        log p, an array of the shape, kind and dtype of x; integers become floats, and lists become NumPy arrays.
    """

    dim: Axes
    mask: Mask
    dtype: DType


class _AxisKeywords(TypedDict, total=False):
    axis: Axes
    dim: Axes
    mask: Mask


class SampleKeywords(TypedDict, total=False):
    """Options of every loss but where the classes are."""

    ignore_index: Annotated[int, Default(-100), Integer("which marks samples to leave out")]
    reduction: Annotated[Reduction, Default("mean"), OneOf("mean", "sum", "none", elementwise_mean="mean")]
    label_smoothing: Annotated[float, Default(0.0), Between(0, 1)]


class LossKeywords(_AxisKeywords, SampleKeywords, total=False):
    """Options of the losses of scores.

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
