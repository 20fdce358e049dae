"""What a lower layer needs from a higher one. `anymax/__init__.py` sets it at import, so that imports only point to lower layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _not_yet(*_: Any, **__: Any) -> Any:
    raise RuntimeError("this part of anymax works once `import anymax` is over")


catalogue: tuple[type[Any], ...] = ()  # the maps, for code that looks them up by name
call: Callable[..., Any] = _not_yet  # implements `Mapping.__call__`
notebook_page: Callable[[Any], str] = _not_yet  # the page that a notebook shows for a map
apply_to_ragged: Callable[..., Any] = _not_yet  # p of a nested or sparse tensor
over_devices: Callable[[], Any] = _not_yet  # returns the module that handles DTensors
# the parts of a bridge that live in higher rooms, by the name of the framework
segment_bridge: Callable[[str], Any] = _not_yet
layer_bridge: Callable[[str], Any] = _not_yet
softmax_terms: Callable[[str], Any] = _not_yet


def hand_down(**given: Any) -> None:
    """Set these names of this module; an unknown name is an error."""
    for name, value in given.items():
        if name not in globals():
            raise TypeError(f"there is no place for {name!r} in {__name__}")
        globals()[name] = value
