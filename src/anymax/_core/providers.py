"""Functions of higher rooms that lower ones call. `anymax/__init__.py` sets them, so that imports only point to lower rooms."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from .._array import Array

if TYPE_CHECKING:
    from .mapping import Mapping


class Providers:
    """Fields without a value until they are set; reading one before is an error."""

    catalogue: tuple[type[Mapping], ...]
    """All maps, for code that looks them up by name."""

    call: Callable[[str, Mapping, Any, Any, Any], Any]
    """Implements `Mapping.__call__`: (the name for errors, map, scores, axis, options)."""

    notebook_page: Callable[[Mapping], str]
    """The page that a notebook shows for a map."""

    public_names: Callable[[], dict[str, list[str]]]
    """The names of each public module that is loaded, for errors that say where a name is."""

    apply_to_ragged: Callable[[Mapping, Any, Any], Array]
    """p of a nested or sparse tensor: (map, scores, axis)."""

    over_devices: Callable[[], ModuleType]
    """Loads and returns the module that computes with DTensors."""

    layers_over_devices: Callable[[], ModuleType]
    """Loads and returns the module that computes output layers of DTensors."""

    segments_unpadded: Callable[[str], Any]
    """The operations of `segments`, by the name of the framework."""

    layer_bridge: Callable[[str], Any]
    """The bridge of `linear`, by the name of the framework."""

    softmax_terms: Callable[[str], Any]
    """The softmax of `likelihood`, by the name of the framework."""

    softmax_divergence: Callable[[str], Any]
    """The divergence of two softmaxes of `likelihood`, by the name of the framework."""

    noise_maker: Callable[[Array], Callable[[Array], Array] | None]
    """An engine's function from pairs of uniform numbers to Gumbel noise, for arrays like this one, or None."""

    torch_uniform: Callable[[tuple[int, ...], Any], Array | None]
    """What torch.rand draws in float32 on a CPU, by an engine: (shape, generator); None where there is none."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name not in type(self).__annotations__:
                raise AttributeError(f"{type(self).__name__} has no field {name!r}")
            raise RuntimeError(
                f"anymax: internal error: {name} is used before the end of anymax/__init__.py, which sets it"
            )

    def check(self) -> None:
        """An error if a field has no value."""
        missing = [name for name in type(self).__annotations__ if name not in self.__dict__]
        if missing:
            raise RuntimeError(
                f"anymax: internal error: anymax/__init__.py must set providers.{', providers.'.join(missing)}"
            )


providers = Providers()
