"""Maps on the command line: options for their parameters, and usual parameters by default."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from collections.abc import Mapping as Dict
from typing import Any

from .. import losses
from .._core import names
from .._core.mapping import Mapping
from .._core.names import UnknownMap as UnknownMap
from .._core.names import fields, number, read

__all__ = ["UnknownMap", "choose", "fields", "is_map", "loss", "make", "number", "options", "parameters"]


def options() -> dict[str, list[str]]:
    """Every parameter, and the maps that have it; a map within another is named in its spec alone, as in sink:mapping=sparsemax."""
    out: dict[str, list[str]] = {}
    for name in names.classes():
        for key in fields(name):
            out.setdefault(key, []).append(name)
    return {key: having for key, having in out.items() if key != "mapping"}


def is_map(spec: str) -> bool:
    """True for `NAME` or `NAME:parameter=value,...` of a map."""
    try:
        read(spec)
    except ValueError:
        return False
    return True


def loss(name: str) -> str:
    """The short name of the map's loss, which takes no map; empty where there is none."""
    short = {"softmax": "cross_entropy", "taylor": "taylor_softmax_loss"}.get(name, f"{name}_loss")
    return short if short in losses.__all__ else ""


def make(name: str, values: Dict[str, Any], n: int = 2) -> Mapping:
    """The map of this name, for n classes, with the given parameters that it has; if there are none, with its usual parameters."""
    name = names.find(name)
    if name in names.ratios() or name == "ratio":
        return names.make("square" if name == "ratio" else name, {})
    chosen = {key: value for key, value in values.items() if key in fields(name)}
    kind = names.classes()[name]
    example = {key: min(v, n) if type(v) is int else v for key, v in kind.example.items()}
    needed = {key: example[key] for key in names.required(kind) if key in example and key not in chosen}
    return names.make(name, needed | chosen if chosen else example)


def _parsed(spec: str, values: Dict[str, Any], n: int) -> Mapping:
    """The map of `NAME` or `NAME:parameter=value,...`; a parameter in the spec overrides its option."""
    name, in_spec = read(spec)
    try:
        return make(name, {**values, **in_spec}, n)
    except (TypeError, ValueError) as error:
        options = [key for key in fields(name) if key in values and key not in in_spec]
        if not options:
            raise
        raise ValueError(f"{', '.join(f'--{key}' for key in options)}: {error}") from error


def choose(specs: Iterable[str], values: Dict[str, Any], n: int = 2) -> list[Mapping]:
    """The maps that the specs name, or one of each family; an option that none of them has is an error."""
    maps = [_parsed(spec, values, n) for spec in list(specs) or names.classes()]
    for key in values:
        if not any(key == field.name for mapping in maps for field in dataclasses.fields(mapping)):  # type: ignore[arg-type]
            raise ValueError(f"--{key}: {', '.join(dict.fromkeys(m.name for m in maps))} has no such parameter")
    return maps


def parameters(mapping: Mapping) -> dict[str, Any]:
    """The parameters in a form for JSON: functions as their names."""
    out: dict[str, Any] = {}
    for field in dataclasses.fields(mapping):  # type: ignore[arg-type]
        value = getattr(mapping, field.name)
        inner = repr(value) if isinstance(value, Mapping) else None
        out[field.name] = inner or (names.function_name(value) if callable(value) else value)
    return out
