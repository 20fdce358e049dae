"""Types of signatures. A type checker sees that the result is of the caller's kind of array, and of NumPy's for lists of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, TypeVar


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
Draw = Literal["p", "share", "rest", "none"]  # `Mapping.one_draw` says what each means


class LogOptions(TypedDict, total=False):
    """Options of `log_apply` and of its shorthands."""

    dim: Axes
    mask: Mask
    dtype: DType


class ApplyOptions(LogOptions, total=False):
    """Options of `apply` and of its shorthands."""

    out: AnyArray | None


class _AxisKeywords(TypedDict, total=False):
    axis: Axes
    dim: Axes
    mask: Mask


class SampleKeywords(TypedDict, total=False):
    """Options of every loss but where the classes are."""

    ignore_index: int
    reduction: Reduction
    label_smoothing: float


class LossKeywords(_AxisKeywords, SampleKeywords, total=False):
    """Options of every loss."""
