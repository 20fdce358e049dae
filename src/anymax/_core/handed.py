"""What a lower floor needs of a higher one. `anymax/__init__.py` hands it down once, when it is imported, so that imports run downhill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _not_yet(*_: Any, **__: Any) -> Any:
    raise RuntimeError("this part of anymax works once `import anymax` is over")


catalogue: tuple[type[Any], ...] = ()  # the maps, for what goes by their names
call: Callable[..., Any] = _not_yet  # `apply` under the name of a map: what calling a map does
notebook_page: Callable[[Any], str] = _not_yet  # the page that a notebook shows for a map
apply_to_ragged: Callable[..., Any] = _not_yet  # p of a tensor that knows its own segments
over_devices: Callable[[], Any] = _not_yet  # the module that serves DTensors
# the parts of a bridge that belong to rooms above, by the name of its framework
segment_bridge: Callable[[str], Any] = _not_yet
layer_bridge: Callable[[str], Any] = _not_yet
softmax_terms: Callable[[str], Any] = _not_yet


def hand_down(**given: Any) -> None:
    """Sets what is given by name; a name that is not above is an error."""
    for name, value in given.items():
        if name not in globals():
            raise TypeError(f"there is no place for {name!r} in {__name__}")
        globals()[name] = value
