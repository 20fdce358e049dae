"""From words on the command line to maps: `entmax`, `entmax:alpha=1.2`, `square`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from collections.abc import Mapping as Dict
from typing import Any

from .._mapping import Mapping
from ..mappings import CATALOGUE, Ratio


def _bare(name: str) -> str:
    return name.strip().lower().replace("-", "").replace("_", "")


CLASSES: dict[str, type[Mapping]] = {cls.name: cls for cls in CATALOGUE}
TWO = ("budget", "sparse_softmax")  # shown with k = 2: their default would hide what they do, or there is none
RATIOS = {"square": Ratio.square, "sigmoid": Ratio.sigmoid, "relu": Ratio.relu}
SPELLINGS = {
    _bare(name): name for name in (*CLASSES, *RATIOS)
}  # sparse_softmax, sparse-softmax and SparseSoftmax are one
OPTIONS = ("alpha", "k", "p", "order", "noise")


def names() -> list[str]:
    return [*CLASSES, *RATIOS]


def make(name: str, given: Dict[str, Any], n: int = 2) -> Mapping:
    """The map of this name, for n classes, with those of the given parameters that it has; its usual parameters otherwise."""
    name = SPELLINGS.get(_bare(name), name)
    if name in RATIOS or name == Ratio.name:
        return RATIOS.get(name, Ratio.square)()
    if name not in CLASSES:
        raise ValueError(f"there is no map {name!r}; the maps are {', '.join(names())}")
    cls = CLASSES[name]
    fields = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    chosen = {key: value for key, value in given.items() if key in fields}
    return cls(**(chosen or ({"k": min(2, n)} if name in TWO else {})))


def parse(spec: str, given: Dict[str, Any], n: int = 2) -> Mapping:
    """`NAME` or `NAME:parameter=value,...`; what the spec says goes before the options."""
    name, _, rest = spec.partition(":")
    own: dict[str, Any] = {}
    for word in filter(None, rest.split(",")):
        key, equals, value = word.partition("=")
        if not equals or key not in OPTIONS:
            raise ValueError(
                f"{spec!r}: write NAME:parameter=value with one of {', '.join(OPTIONS)}, as in entmax:alpha=1.2"
            )
        own[key] = number(value)
    mapping = make(name, {**given, **own}, n)
    unused = [key for key in own if not hasattr(mapping, key)]
    if unused:
        raise ValueError(f"{spec!r}: {mapping.name} has no parameter {unused[0]!r}")
    return mapping


def number(word: str) -> int | float | str:
    """An integer or a float where the word is one, else the word itself."""
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def choose(specs: Iterable[str], given: Dict[str, Any], n: int = 2) -> list[Mapping]:
    """The maps that the specs name, or one of each family; an option that none of them has is an error."""
    maps = [parse(spec, given, n) for spec in list(specs) or CLASSES]
    for key in given:
        if not any(hasattr(mapping, key) for mapping in maps):
            raise ValueError(f"--{key}: {', '.join(m.name for m in maps)} has no such parameter")
    return maps


def parameters(mapping: Mapping) -> dict[str, Any]:
    """The parameters as JSON can hold them: functions by their names."""
    out: dict[str, Any] = {}
    for field in dataclasses.fields(mapping):  # type: ignore[arg-type]
        value = getattr(mapping, field.name)
        out[field.name] = value.__name__.lstrip("_") if callable(value) and hasattr(value, "__name__") else value
    return out
