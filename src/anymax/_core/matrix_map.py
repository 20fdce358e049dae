"""The contract of a map of matrices, such as `Sinkhorn`: it works along two axes at once, so it is not a `Mapping` of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from .options import check_fields

if TYPE_CHECKING:
    from typing import Self


class MatrixMap(ABC):
    """A map from matrices of scores to matrices of probabilities. Functions of rows refuse it and say how to call it."""

    __slots__ = ()

    def __new__(cls, *args: Any, **fields: Any) -> Self:
        if fields:
            check_fields(cls, fields)
        return object.__new__(cls)

    @abstractmethod
    def __call__(self, x: Any, axes: tuple[int, int] = (-2, -1)) -> Any:
        """The result for each matrix, whose rows and columns lie along `axes`."""
