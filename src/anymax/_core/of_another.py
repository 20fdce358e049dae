"""`OfAnother`: a map made of another one, whose parameters are also its own."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from .._array import Array, Ranges, is_array
from .mapping import Mapping
from .parameters import one_a_row

if TYPE_CHECKING:
    from typing import Self

_INNER = "mapping_"  # before the names of the inner map's parameters


class OfAnother(Mapping):
    """A map with a field `mapping`, the inner map; its further fields have one value per row. See `Sink` and `Elementwise`."""

    mapping: Mapping | str
    own_ranges: ClassVar[Ranges] = {}

    @property
    def inner(self) -> Mapping:
        assert isinstance(self.mapping, Mapping)
        return self.mapping

    def _own(self) -> dict[str, Any]:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return {f.name: getattr(self, f.name) for f in fields if f.name != "mapping"}

    @property
    def ranges(self) -> Ranges:  # type: ignore[override]
        return self.own_ranges | {_INNER + name: allowed for name, allowed in self.inner.ranges.items()}

    def params(self) -> dict[str, Array]:
        arrays = {name: value for name, value in self._own().items() if is_array(value)}
        return arrays | {_INNER + name: value for name, value in self.inner.params().items()}

    def constants(self) -> dict[str, Any]:
        own = {name: value for name, value in self._own().items() if not is_array(value)}
        inner = {_INNER + name: value for name, value in self.inner.constants().items()}
        return own | {"mapping": type(self.inner)} | inner

    @classmethod
    def rebuilt(cls, fields: dict[str, Any]) -> Self:
        own = {name: value for name, value in fields.items() if not name.startswith(_INNER)}
        inner = {name.removeprefix(_INNER): value for name, value in fields.items() if name.startswith(_INNER)}
        return cls(**own | {"mapping": own["mapping"].rebuilt(inner)})

    def replace(self, **changes: Any) -> Self:
        inner = {name.removeprefix(_INNER): changes.pop(name) for name in list(changes) if name.startswith(_INNER)}
        if inner:
            changes["mapping"] = self.inner.replace(**inner)
        return super().replace(**changes)

    def check_width(self, name: str, value: Array) -> None:
        if name.startswith(_INNER):
            self.inner.check_width(name.removeprefix(_INNER), value)
        else:
            one_a_row(value, f"{self.name}: {name}")
