"""What signatures say to a type checker: an array comes back as the kind that was given, a list of numbers as an array of NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict

Reduction = Literal["mean", "sum", "none"]
Axes = int | tuple[int, ...] | list[int] | None
Numbers = Sequence[float] | Sequence[Sequence[float]] | Sequence[Sequence[Sequence[float]]]


class AnyArray(Protocol):
    """What arrays of NumPy, torch and JAX have in common."""

    @property
    def ndim(self) -> int: ...
    @property
    def shape(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...


Number = float | AnyArray  # a parameter: a number, or an array of them that broadcasts


class LogOptions(TypedDict, total=False):
    """Options of `log_apply`, and of its sugar."""

    dim: Axes
    mask: Any
    dtype: Any


class ApplyOptions(LogOptions, total=False):
    """Options of `apply`, and of its sugar."""

    out: Any


class LossOptions(TypedDict, total=False):
    """Options of every loss."""

    axis: Axes
    dim: Axes
    mask: Any
    ignore_index: int
    reduction: Reduction
    label_smoothing: float


if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import TypeVar

    ArrayT = TypeVar("ArrayT", bound=AnyArray, default=np.ndarray[Any, Any])
else:
    ArrayT = Any
