"""What a request asks for, as data that a server can carry: names and parameters of transforms, and of a map."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

from .. import transforms
from .._array import is_int, number, shown
from .._core import names
from .._core.mapping import Mapping
from .._core.spelling import bare, nearest
from ..functional.draws import check_draw
from ..transforms.base import Transform

# the transforms whose parameters are numbers and words, and those that need the request's tokens
MAKERS: dict[str, Callable[..., Transform]] = {
    maker.__name__: maker
    for maker in (
        transforms.temperature, transforms.topk, transforms.topp, transforms.minp, transforms.topnsigma, transforms.typical,
        transforms.epsilon_cutoff, transforms.eta, transforms.xtc, transforms.pless, transforms.toph, transforms.mink,
        transforms.dynamic_temperature, transforms.softcap, transforms.normalize, transforms.noise, transforms.logit_bias,
        transforms.sequence_bias, transforms.repetition_penalty, transforms.dry,
    )
}  # fmt: skip
_SPELLED = {"typicalp": "typical"}  # as samplers call it
_NOT_SAID = ("axis", "dim", "by", "groups", "keep_groups", "group_by")  # what belongs to no request
TOKENS = ("all", "prompt", "output")
# what a request may ask for at most: a stranger's token is to take no longer than another's
MOST_PARTS = 32  # transforms, and the map
MOST_CLASSES = 1000  # in one parameter
MOST_NODES = 256  # of a quadrature
_EXAMPLE = '["temperature:T=0.7", "topp:p=0.9", "entmax:alpha=1.5"]'


@dataclasses.dataclass(frozen=True)
class Part:
    """A transform by its name, with the parameters that were given."""

    name: str
    given: tuple[tuple[str, Any], ...]

    @property
    def takes(self) -> tuple[str, ...]:
        return parameters_of(self.name)

    @property
    def tokens(self) -> str | None:
        """Which tokens of the request it needs: "all", "prompt" or "output"; None if it needs none."""
        return dict(self.given).get("tokens", TOKENS[0]) if "tokens" in self.takes else None

    @property
    def classes(self) -> tuple[int, ...]:
        """The classes that its parameters name."""
        given = dict(self.given)
        bias = given.get("bias")
        keys = [key for key, _ in bias] if isinstance(bias, tuple) else []
        named = [key if isinstance(key, tuple) else (key,) for key in keys]
        return (*(c for key in named for c in key), *given.get("sequence_breakers", ()))

    def make(self, **changes: Any) -> Transform:
        """The transform, with other values in the place of some parameters."""
        given = {**dict(self.given), **changes}
        if isinstance(given.get("bias"), tuple):
            given["bias"] = dict(given["bias"])
        return MAKERS[self.name](**given)


@dataclasses.dataclass(frozen=True)
class Spec:
    """The transforms of a request, from first to last, and its map; without a map the scores go on as scores."""

    parts: tuple[Part, ...]
    mapping: Mapping | None = None

    def shown(self) -> str:
        """What was asked for, shortly: the names, and the map."""
        words = [part.name for part in self.parts] + ([] if self.mapping is None else [repr(self.mapping)])
        return ", ".join(words)

    def check(self, n: int) -> None:
        """A ValueError if this can't be done to scores of n classes."""
        for part in self.parts:
            for c in part.classes:
                if c >= n:
                    raise ValueError(f"anymax: {part.name}: class {c} is out of range for {n} classes")
        if self.mapping is not None:
            self.mapping.check(n)


def parameters_of(name: str) -> tuple[str, ...]:
    return tuple(p for p in inspect.signature(MAKERS[name]).parameters if p not in _NOT_SAID)


def read(given: Any) -> Spec:
    """What `extra_args["anymax"]` of a request means; a ValueError if it means nothing.

    Parameters
    ----------
    given
        Names with parameters, "NAME:parameter=value,...", in a list or in one string with semicolons between them: transforms of
        `anymax.transforms` from first to last, then at most one map. Instead of a string, an entry may be a dict with the `name` and the
        parameters, which `logit_bias`, `sequence_bias` and `dry` need for their classes.

    Examples
    --------
    >>> read("temperature:T=0.7; top_p:p=0.9; entmax:alpha=1.5").mapping
    Entmax(alpha=1.5)
    >>> read([{"name": "logit_bias", "bias": {"7": -1.0}}]).parts[0].make()
    logit_bias(bias=((7, -1.0),))
    """
    entries = given.split(";", MOST_PARTS) if isinstance(given, str) else [given] if isinstance(given, dict) else given
    if not isinstance(entries, (list, tuple)):
        raise ValueError(f"anymax: expected a list of transforms and a map, such as {_EXAMPLE}, got {_said(given)}")
    if len(entries) > MOST_PARTS:
        raise ValueError(f"anymax: a request names at most {MOST_PARTS} transforms and maps, got more")
    parts: list[Part] = []
    mapping = None
    for entry in entries:
        if isinstance(entry, str) and not entry.strip():
            continue
        if mapping is not None:
            raise ValueError(f"anymax: a map comes last, and {_said(entry)} follows {mapping!r}")
        try:
            found = _part(entry)
            mapping = found if isinstance(found, Mapping) else None
            if mapping is not None:
                check_draw(mapping, "anymax")
        except TypeError as error:
            raise ValueError(f"anymax: {_said(entry)}: {error}") from None
        if isinstance(found, Part):
            parts.append(found)
    return Spec(tuple(parts), mapping)


def _part(entry: Any) -> Part | Mapping:
    if isinstance(entry, str):
        names.check_length(entry)
        name, _, words = entry.strip().partition(":")
        found = _transform(name)
        if found is None:
            return _affordable(_map(entry, name))
        takes = parameters_of(found)
        return _checked(entry, found, names.parameters(entry, words, found, takes, "topp:p=0.9"))
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise ValueError(f"anymax: expected a string such as 'topp:p=0.9' or a dict with a name, got {_said(entry)}")
    given = {str(key): _plain(entry, value) for key, value in entry.items() if key != "name"}
    names.check_length(entry["name"])
    found = _transform(entry["name"])
    if found is None:
        name, taken = names.find(entry["name"]), names.fields(names.find(entry["name"]))
        _refuse_unknown(entry, name, given, taken)
        return _affordable(names.make(name, given))
    _refuse_unknown(entry, found, given, parameters_of(found))
    return _checked(entry, found, given)


def _said(value: Any) -> str:
    """How an error shows what a request has: a number or a word if it is short, else its kind."""
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        return f"{{'name': {_said(value['name'])}, ...}}"
    if isinstance(value, str):
        return repr(value if len(value) <= names.LONGEST_SPEC else value[:20] + "...")
    return shown(value) if isinstance(value, (int, float)) else f"a value of the type {type(value).__name__}"


def _plain(entry: Any, value: Any) -> Any:
    """A JSON value, if it is a number, a word, or a list or dict of these, and not too many."""
    if not isinstance(value, (list, tuple, dict)):
        return _word(entry, value)
    if len(value) > MOST_CLASSES:
        raise ValueError(f"{_said(entry)}: a parameter has at most {MOST_CLASSES} values, got {len(value)}")
    if not isinstance(value, dict):
        return [_word(entry, v) for v in value]
    keys = [tuple(_word(entry, c) for c in key) if isinstance(key, tuple) else _word(entry, key) for key in value]
    return dict(zip(keys, (_word(entry, v) for v in value.values()), strict=True))


def _word(entry: Any, value: Any) -> Any:
    value = number(value)
    if isinstance(value, str):
        names.check_length(value)
    elif not (value is None or isinstance(value, (int, float))):
        raise ValueError(
            f"{_said(entry)}: a parameter is a number, a word, or a list or dict of these, got {_said(value)}"
        )
    return names.in_64_bits(value)


def _affordable(mapping: Mapping) -> Mapping:
    """The map, unless it takes too long for a token."""
    nodes = max((n for key, n in mapping.constants().items() if key.endswith("nodes") and n), default=0)
    if nodes > MOST_NODES:
        raise ValueError(f"anymax: {mapping!r}: a request's map has at most {MOST_NODES} nodes, got {nodes}")
    return mapping


def _refuse_unknown(entry: Any, name: str, given: Iterable[str], takes: Iterable[str]) -> None:
    for key in given:
        if key not in takes:
            raise ValueError(
                f"{_said(entry)}: {name} has no parameter {key[:40]!r}; it takes {' or '.join(takes) or 'none'}"
            )


def _map(entry: str, name: str) -> Mapping:
    try:
        return names.named(entry.strip())
    except names.UnknownMap as error:
        word, equals, value = entry.strip().partition("=")
        known = _transform(word) if equals else None
        if known is not None:
            raise ValueError(
                f"anymax: {entry!r}: write {word}:{names.parameter_of(value, parameters_of(known))}={value}"
            ) from None
        near = nearest(name, MAKERS)
        hint = f"; the transform {near!r} is near" if near else f"; the transforms are {', '.join(MAKERS)}"
        raise ValueError(f"anymax: no transform has this name, and {error}{hint}") from None


def _transform(name: str) -> str | None:
    """The transform with a name, whatever its case and its dashes."""
    given = bare(name)
    return next((known for known in MAKERS if bare(known) == given), _SPELLED.get(given))


def _checked(entry: Any, name: str, given: dict[str, Any]) -> Part:
    """The part, if a transform can be made of it."""
    if "tokens" in given and given["tokens"] not in TOKENS:
        raise ValueError(
            f"{_said(entry)}: tokens must be one of {', '.join(map(repr, TOKENS))}, got {given['tokens']!r}"
        )
    generator = given.get("generator")
    if generator is not None and not (is_int(generator) and 0 <= generator < 2**63):
        raise ValueError(f"{_said(entry)}: generator must be a seed, an integer from 0 to 2**63 - 1, got {generator!r}")
    part = Part(name, tuple(sorted((key, _frozen(name, value)) for key, value in given.items())))
    part.make(**({"tokens": [0]} if part.tokens else {}))
    if not all(0 <= c < 2**31 for c in part.classes) or len(part.classes) > MOST_CLASSES:
        raise ValueError(f"{_said(entry)}: expected at most {MOST_CLASSES} classes, integers from 0 to {2**31 - 1}")
    return part


def _frozen(name: str, value: Any) -> Any:
    """A value that can be compared and hashed: a dict of biases as pairs, a list as a tuple."""
    if isinstance(value, dict):
        pairs = {_classes(name, key): v for key, v in value.items()}
        if len(pairs) < len(value):
            raise ValueError(f"{name}: a class is given twice, as in '7' and ' 7'; give it once")
        return tuple(pairs.items())
    return tuple(value) if isinstance(value, list) else value


def _classes(name: str, key: Any) -> Any:
    """The keys of a JSON object are strings; they mean a class, "7", or for `sequence_bias` several, "7, 8"."""
    words = key.split(",") if isinstance(key, str) else []
    if not words or not all(re.fullmatch(r"\s*-?[0-9]+\s*", word) for word in words):
        return key
    return tuple(map(int, words)) if name == "sequence_bias" else int(key) if len(words) == 1 else key
