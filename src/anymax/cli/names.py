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
RATIOS = {"square": Ratio.square, "sigmoid": Ratio.sigmoid, "relu": Ratio.relu}
SPELLINGS = {
    _bare(name): name for name in (*CLASSES, *RATIOS)
}  # sparse_softmax, sparse-softmax and SparseSoftmax are one
ALIASES = {"entmax15": "entmax:alpha=1.5"}


class UnknownMap(ValueError):
    """No map has this name."""


def names() -> list[str]:
    """Every map once: `ratio` is `square`, so that its kinds stand for it."""
    return [name for cls in CLASSES for name in (RATIOS if cls == Ratio.name else (cls,))]


def find(name: str) -> str:
    """The name as the catalogue spells it."""
    found = SPELLINGS.get(_bare(name))
    if found is None:
        raise UnknownMap(f"there is no map {name!r}; the maps are {', '.join(names())}")
    return found


def fields(name: str) -> dict[str, dataclasses.Field[Any]]:
    """The parameters of a map that the command line can give: all but functions."""
    if name in RATIOS or name == Ratio.name:
        return {}
    return {f.name: f for f in dataclasses.fields(CLASSES[name]) if f.init and not callable(f.default)}  # type: ignore[arg-type]


def takes(name: str) -> list[str]:
    return list(fields(name))


def options() -> dict[str, list[str]]:
    """Every parameter, and the maps that have it."""
    out: dict[str, list[str]] = {}
    for name in CLASSES:
        for key in takes(name):
            out.setdefault(key, []).append(name)
    return out


def make(name: str, given: Dict[str, Any], n: int = 2) -> Mapping:
    """The map of this name, for n classes, with those of the given parameters that it has; its usual parameters otherwise."""
    name = find(name)
    if name in RATIOS or name == Ratio.name:
        return RATIOS.get(name, Ratio.square)()
    kind = CLASSES[name]
    chosen = {key: value for key, value in given.items() if key in takes(name)}
    chosen = chosen or {key: min(v, n) if type(v) is int else v for key, v in kind.example.items()}
    missing = [
        k for k, f in fields(name).items() if f.default is f.default_factory is dataclasses.MISSING and k not in chosen
    ]
    if missing:
        raise ValueError(
            f"{name} needs {' and '.join(missing)}; write {name}:{','.join(f'{key}=...' for key in missing)}"
        )
    return kind(**chosen)


def parse(spec: str, given: Dict[str, Any], n: int = 2) -> Mapping:
    """`NAME` or `NAME:parameter=value,...`; what the spec says goes before the options."""
    name, _, rest = spec.partition(":")
    if _bare(name) in ALIASES:
        full = ALIASES[_bare(name)]
        if rest:
            raise ValueError(f"{spec!r}: {name} is {full} and takes no parameters")
        name, _, rest = full.partition(":")
    name = find(name)
    own: dict[str, Any] = {}
    for word in filter(None, rest.split(",")):
        key, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"{spec!r}: write NAME:parameter=value, as in entmax:alpha=1.2")
        if key not in takes(name):
            raise ValueError(
                f"{spec!r}: {name} has no parameter {key!r}; it takes {' or '.join(takes(name)) or 'none'}"
            )
        own[key] = number(value)
    try:
        return make(name, {**given, **own}, n)
    except (TypeError, ValueError) as error:
        options = [key for key in takes(name) if key in given and key not in own]
        if not options:
            raise
        raise ValueError(f"{', '.join(f'--{key}' for key in options)}: {error}") from error


def number(word: str) -> int | float | bool | str:
    """An integer, a float, true or false where the word is one, else the word itself."""
    if word in ("true", "false"):
        return word == "true"
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
        if not any(key == field.name for mapping in maps for field in dataclasses.fields(mapping)):  # type: ignore[arg-type]
            raise ValueError(f"--{key}: {', '.join(dict.fromkeys(m.name for m in maps))} has no such parameter")
    return maps


def parameters(mapping: Mapping) -> dict[str, Any]:
    """The parameters as JSON can hold them: functions by their names."""
    out: dict[str, Any] = {}
    for field in dataclasses.fields(mapping):  # type: ignore[arg-type]
        value = getattr(mapping, field.name)
        out[field.name] = value.__name__.lstrip("_") if callable(value) and hasattr(value, "__name__") else value
    return out
