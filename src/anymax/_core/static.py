"""`Static`: the part of a map that a compiled program of JAX depends on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .._array import Array, unchecked
from .mapping import Mapping


class Static:
    """A mapping without its arrays: the part that a compiled program depends on."""

    def __init__(self, mapping: Mapping, *more: Any) -> None:
        self.kind, self.constants, self.names = type(mapping), mapping.constants(), tuple(mapping.params())
        self.key = (self.kind, self.names, *more, *self.constants.items())

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self.key == other.key

    def mapping(self, params: dict[str, Array]) -> Mapping:
        with unchecked():  # the arrays were checked when the map was made, or are derivatives by them
            return self.kind.rebuilt(self.constants | params)

    def mapping_of(self, values: Iterable[Array]) -> Mapping:
        """The mapping with arrays in the order of `names`."""
        return self.mapping(dict(zip(self.names, values)))
