"""Maps by name: "sparsemax", "entmax:alpha=1.3", "square". Every function that takes a map reads its name here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

from .._array import compiling, is_array, is_int, is_number, shown
from .mapping import Mapping
from .matrix_map import MatrixMap
from .options import place_of_map
from .providers import providers
from .spelling import LONGEST, bare, nearest

ALIASES = {"entmax15": "entmax:alpha=1.5", "taylor_softmax": "taylor"}
LONGEST_SPEC = 1000  # characters of a name with its parameters
DEEPEST = 4  # maps in each other, as the two of "sink:mapping=sparsemax"

# names that people try as a map, and what does it here
_MAPS_ELSEWHERE = {
    **dict.fromkeys(("topk", "topksoftmax"), "'sparse_softmax:k=50'"),
    **dict.fromkeys(("topp", "nucleus"), "'sparse_softmax:p=0.9'"),
    **dict.fromkeys(("argmax", "hardmax"), "anymax.softmax(anymax.temperature(0)(x))"),
}


class UnknownMap(ValueError):
    """No map has this name."""


def as_mapping(mapping: Any, who: str = "", place: str = "") -> Mapping:
    """The map itself, or the map that a name means; for anything else an error that begins with `who`.

    Parameters
    ----------
    place
        The hint to give if an array stands where the map should be; by default where the map of `who` stands.
    """
    if isinstance(mapping, Mapping):
        return mapping
    if isinstance(mapping, str):
        return named(mapping)
    begin, got = f"{who}: " if who else "", not_map(mapping, place or place_of_map(who))
    raise TypeError(f"{begin}expected a mapping such as anymax.Sparsemax(), or a name such as 'sparsemax', got {got}")


def not_map(thing: Any, place: str = "") -> str:
    """What stands where the map should be, and what to write, for an error."""
    if isinstance(thing, type) and issubclass(thing, Mapping):
        needed = required(thing)
        return f"the class {thing.__name__}; add (): {thing.__name__}({', '.join(f'{key}=...' for key in needed)})"
    if isinstance(thing, MatrixMap):
        return (
            f"{shown(thing)}, a map of matrices, along two axes; call it: {type(thing).__name__}(...)(x, axes=(-2, -1))"
        )
    if is_array(thing):
        return f"{shown(thing)}; {place or 'the mapping comes first, the scores after it'}"
    if is_number(thing) and place:
        return f"{thing!r}; {place}"
    transforms = __name__.replace("_core.names", "transforms")
    if type(thing).__module__.startswith(transforms):
        return (
            f"{shown(thing)}, a transform, which goes before a map: say transform=, or put the scores through it first"
        )
    name = getattr(thing, "__name__", None)
    if callable(thing) and isinstance(name, str) and not isinstance(thing, type):
        map_name = _spelled(ALIASES.get(name, name).partition(":")[0])
        if map_name is not None:
            return f"the function {name}; give its map, by name: {name!r}"
        if name == "mix":
            return "the function mix, which goes after a map: mix(p, prior, weight)"
        if thing.__module__.startswith(transforms):
            return (
                f"the function {name}, which makes a transform; that goes before a map: say transform={name}(...), or put the scores "
                f"through it first, as in {name}(...)(x)"
            )
        return f"the function {name}; a function u of your own, u(x) >= 0, is the map anymax.Ratio(u)"
    return shown(thing)


def function_name(function: Callable[..., Any]) -> str:
    """How pictures, tables and pages call a function, such as the u of `Ratio(u)`.

    Examples
    --------
    >>> function_name(abs)
    'abs'
    """
    return getattr(function, "__name__", type(function).__name__).lstrip("_")


def classes() -> dict[str, type[Mapping]]:
    """The classes of the catalogue by name."""
    return {kind.name: kind for kind in providers.catalogue}


def ratios() -> dict[str, Callable[[], Mapping]]:
    """The predefined ratio maps by name."""
    ratio: Any = classes()["ratio"]
    return {"square": ratio.square, "sigmoid": ratio.sigmoid, "relu": ratio.relu, "stablemax": ratio.stablemax}


def names() -> list[str]:
    """The name of every map, with the predefined ratio maps instead of `ratio`."""
    kinds = ratios()
    return [name for each in classes() for name in (kinds if each == "ratio" else (each,))]


def _spelled(name: str) -> str | None:
    """The name as the catalogue spells it; sparse_softmax, sparse-softmax and SparseSoftmax are the same."""
    return next((known for known in (*classes(), *ratios()) if bare(known) == bare(name)), None)


def find(name: str) -> str:
    """The name as the catalogue spells it, or an error with the nearest one."""
    if len(name) > LONGEST:
        raise UnknownMap(f"a map's name has at most {LONGEST} characters, got {len(name)}: {name[:20]!r}...")
    spelling = _spelled(name)
    if spelling is None:
        raise UnknownMap(f"there is no map {name!r}{_advice(name)}; the maps are {', '.join(names())}")
    return spelling


def _advice(name: str) -> str:
    """What to write for a name that no map has: the map with a parameter behind a colon, or the nearest name."""
    import re  # late: for a name that is wrong

    call = re.fullmatch(r"([a-z_ -]+?)[ _(-]*(?:(\w+) ?= ?)?(\d[\d.]*)\)?", name.strip().lower())
    kind = call and _spelled(call[1])
    takes = list(fields(kind)) if kind else []
    if call and takes:
        return f" (write '{kind}:{call[2] or takes[0]}={call[3]}')"
    if bare(name) in _MAPS_ELSEWHERE:
        return f" (write {_MAPS_ELSEWHERE[bare(name)]})"
    near = nearest(name, (*names(), *ALIASES))
    return f" (did you mean {near!r}?)" if near else ""


def fields(name: str) -> dict[str, dataclasses.Field[Any]]:
    """The parameters of a map that a string can set: all but functions."""
    if name in ratios() or name == "ratio":
        return {}
    return {f.name: f for f in _fields(classes()[name]) if f.init and not callable(f.default)}


def required(kind: type[Mapping]) -> list[str]:
    """The parameters of a map that have no default."""
    none = dataclasses.MISSING
    return [f.name for f in _fields(kind) if f.init and f.default is none and f.default_factory is none]


def _fields(kind: type[Mapping]) -> list[dataclasses.Field[Any]]:
    """Like dataclasses.fields, which torch.compile can't trace when given a class."""
    return [f for f in kind.__dataclass_fields__.values() if "ClassVar" not in str(f.type)]  # type: ignore[attr-defined]


def check_length(spec: str) -> None:
    if len(spec) > LONGEST_SPEC:
        raise ValueError(
            f"a name with its parameters has at most {LONGEST_SPEC} characters, got {len(spec)}: {spec[:20]!r}..."
        )


def read(spec: str) -> tuple[str, dict[str, Any]]:
    """The name and the parameters in `NAME` or `NAME:parameter=value,...`."""
    check_length(spec)
    if spec.count(":") > DEEPEST:
        raise ValueError(f"{spec[:20]!r}...: at most {DEEPEST} maps stand in each other by name; give the map itself")
    name, _, rest = spec.partition(":")
    full = next((meant for alias, meant in ALIASES.items() if bare(alias) == bare(name)), name)
    if rest and ":" in full:
        raise ValueError(f"{spec!r}: {name} is {full} and takes no parameters")
    head, _, tail = full.partition(":")
    name = find(head)
    return name, parameters(spec, tail or rest, name, fields(name), "entmax:alpha=1.2")


def parameters(spec: str, words: str, name: str, takes: Iterable[str], example: str) -> dict[str, Any]:
    """The parameters in `parameter=value,...`, behind the name and the colon in `spec`, of something that `takes` these."""
    values: dict[str, Any] = {}
    for word in filter(None, words.split(",")):
        key, equals, value = (part.strip() for part in word.partition("="))
        if not equals:
            first = None if "," in words else parameter_of(key, takes)
            how = f"{spec.partition(':')[0]}:{first}={key}" if first else f"NAME:parameter=value, as in {example}"
            raise ValueError(f"{spec!r}: write {how}")
        if key not in takes:
            known = " or ".join(takes) or "none"
            raise ValueError(f"{spec!r}: {name} has no parameter {key!r}; it takes {known}")
        if key in values:
            raise ValueError(f"{spec!r}: {key} is given twice; give it once")
        values[key] = number(value)
    return values


def parameter_of(word: str, takes: Iterable[str]) -> str | None:
    """The parameter that a value without a name probably is: the first that may be a number or a word, whichever it is."""
    others = ("tokens",) if isinstance(number(word), str) else ("tokens", "mapping")
    return next((name for name in takes if name not in others), None)


def number(word: str) -> int | float | bool | str:
    """The word as a bool, an int or a float if it is one, else the word itself."""
    if word in ("true", "false"):
        return word == "true"
    for kind in (int, float):
        try:
            return in_64_bits(kind(word))
        except ValueError:
            continue
    return word


def in_64_bits(value: Any) -> Any:
    """A number that arrays can hold: an integer beyond 64 bits as a float, infinite if it is beyond these too; all else unchanged."""
    if not is_int(value) or -(2**63) <= value < 2**63:
        return value
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def make(name: str, values: dict[str, Any]) -> Mapping:
    """The map with a name that `find` returned and these parameters."""
    kinds = ratios()
    if name in kinds:
        return kinds[name]()
    if name == "ratio":
        raise ValueError(f"ratio needs a function; choose one of {', '.join(kinds)}, or give anymax.Ratio(u, du)")
    kind = classes()[name]
    missing = [key for key in required(kind) if key not in values]
    if missing:
        words = ",".join(f"{key}=..." for key in missing)
        raise ValueError(f"{name} needs {' and '.join(missing)}; write {name}:{words}")
    try:
        return kind(**values)
    except TypeError:
        if values:
            raise
        words = ",".join(f"{key}={value}" for key, value in kind.example.items())
        raise ValueError(f"{name} needs a parameter, as in {name}:{words}") from None


_by_spec: dict[str, Mapping] = {}  # a cache, since calls repeat the same strings
_MOST = 256


def named(spec: str) -> Mapping:
    """The map that a string such as "entmax:alpha=1.3" means."""
    if compiling():
        return make(*read(spec))
    mapping = _by_spec.get(spec)
    if mapping is None:
        mapping = make(*read(spec))
        if len(_by_spec) >= _MOST:
            _by_spec.clear()
        _by_spec[spec] = mapping
    return mapping
