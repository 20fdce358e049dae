"""Tables of options: a `TypedDict` says the name, type, default and check of each, and its docstring has the words.

A function takes a table by `**options: Unpack[Table]`, which completes its signature and docstring; where it spells its options out, it
shares the words. `document`, at the end of a module, does both for all of its functions. A row is a line such as

    label_smoothing: Annotated[float, Default(0.0), Between(0, 1)]
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from .._array import check_integer, check_scalar

Function = TypeVar("Function", bound=Callable[..., Any])


# -- the rows ------------------------------------------------------------------------------------------------------------------


class Default(NamedTuple):
    """The default of an option; it stands first in its `Annotated[...]`. Other options have None."""

    value: Any


class OneOf:
    """One of these values; `elsewhere`: the names that other libraries use for them."""

    def __init__(self, *values: str, **elsewhere: str) -> None:
        self.values, self.elsewhere = values, elsewhere

    def __call__(self, who: str, name: str, value: Any) -> Any:
        if value in self.values:
            return value
        *others, last = map(repr, self.values)
        ours = self.elsewhere.get(value) if isinstance(value, str) else None
        hint = f"; it is called {ours!r} here" if ours else ""
        raise ValueError(f"{who}: {name} must be {', '.join(others)} or {last}, got {value!r}{hint}")


class Integer:
    """An integer; `what` it is for."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __call__(self, who: str, name: str, value: Any) -> int:
        return value if type(value) is int else check_integer(who, name, value, f"an integer, {self.what}")


class Between:
    """A number from `low` to `high`."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high

    def __call__(self, who: str, name: str, value: Any) -> Any:
        words = f"a number from {self.low} to {self.high}"
        return check_scalar(f"{who}: {name}", value, lambda v: self.low <= v <= self.high, words)


class Row(NamedTuple):
    """An option of a table."""

    type: str  # as it is written
    default: Any = None
    checks: tuple[Callable[[str, str, Any], Any], ...] = ()


@functools.cache
def rows(table: Any) -> dict[str, Row]:
    """The options of a table, by their names.

    Examples
    --------
    >>> from anymax._core.typing import LossKeywords
    >>> rows(LossKeywords)["ignore_index"][:2]
    ('int', -100)
    """
    written = {name: hint.__forward_arg__ for name, hint in table.__annotations__.items()}
    out = {name: Row(text) for name, text in written.items()}
    if marked := [name for name, text in written.items() if text.startswith("Annotated[")]:
        hints = typing.get_type_hints(table, include_extras=True)
        for name in marked:
            default, *checks = hints[name].__metadata__
            kind = written[name].removeprefix("Annotated[").partition(", Default(")[0]
            out[name] = Row(kind, default.value, tuple(checks))
    return out


def read(table: Mapping[str, Row], who: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, each checked as its row says."""
    out = dict(options)
    for name, value in options.items():
        row = table[name]
        if type(value) is not type(row.default) or value != row.default:
            for check in row.checks:
                out[name] = check(who, name, out[name])
    return out


# -- signatures ----------------------------------------------------------------------------------------------------------------


def table_of(function: Callable[..., Any]) -> Any:
    """The table behind `**options: Unpack[Table]`; None if there is none."""
    written = "" if inspect.isclass(function) else function.__annotations__.get("options", "")
    name = written.removeprefix("Unpack[").removesuffix("]")
    return None if name == written else inspect.unwrap(function).__globals__[name]


def show_options(function: Callable[..., Any], home: Any = None) -> None:
    """Put the options of its table into the signature of a function, in place of `**options`; without a table those of `home`.

    Examples
    --------
    >>> from anymax._core.typing import LogOptions
    >>> def halved(x, **options: Unpack[LogOptions]): ...
    >>> show_options(halved)
    >>> list(inspect.signature(halved).parameters)
    ['x', 'dim', 'mask', 'dtype']
    """
    home = table_of(function) or home
    if home is not None and "__signature__" not in function.__dict__:
        signature = inspect.signature(function)
        mine = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        theirs = [p for p in _parameters(home) if p.name not in signature.parameters]
        if len(mine) < len(signature.parameters):
            function.__signature__ = signature.replace(parameters=[*mine, *theirs])  # type: ignore[attr-defined]


def _signature(thing: Any) -> inspect.Signature:
    return thing.__dict__.get("__signature__") or inspect.signature(thing)


def _parameters(home: Any) -> list[inspect.Parameter]:
    """The options of a table or of a function."""
    if typing.is_typeddict(home):
        of = functools.partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
        return [of(name, default=row.default, annotation=row.type) for name, row in rows(home).items()]
    return [p for p in inspect.signature(home).parameters.values() if p.kind is p.KEYWORD_ONLY]


# -- docstrings ----------------------------------------------------------------------------------------------------------------


def document(room: dict[str, Any], *homes: Any) -> None:
    """Complete the help of the functions and classes of a module, `globals()`.

    Each function shows the options of its table. A docstring that has sections gets the words of that table, and then those of the `homes`
    (tables, functions or classes), on the parameters that it does not describe, and on what is returned.
    """
    for name, thing in tuple(room.items()):
        if getattr(thing, "__module__", "") != room["__name__"] or name.startswith("_") or typing.is_typeddict(thing):
            continue
        if inspect.isfunction(thing) or inspect.isclass(thing):
            show_options(thing)
            if len(sections(thing.__doc__ or "")) > 1:
                share_words(thing, *homes)


def documented_like(home: Any) -> Callable[[Function], Function]:
    """Decorate a function with the words of another one, `home`, which go before those of its module.

    Examples
    --------
    >>> @documented_like(anymax.log_apply)
    ... def halved(mask):
    ...     "Half of log p."
    >>> print(halved.__doc__.partition("Returns")[0].rstrip())
    Half of log p.
    <BLANKLINE>
    Parameters
    ----------
    mask
        Booleans that broadcast to x, True = keep; a masked class gets -inf.
    """

    def decorate(function: Function) -> Function:
        show_options(function, home)
        share_words(function, home)
        return function

    return decorate


def share_words(thing: Any, *homes: Any) -> None:
    """Complete the help of one function or class; see `document`. It stays the same object, so a call costs nothing more."""
    show_options(thing)
    texts = [home.__doc__ for home in (table_of(thing), *homes) if home not in (None, thing) and home.__doc__]
    if thing.__doc__ and texts:  # `python -OO` has none
        described, returns = _words(thing.__doc__)
        for words, result in map(_words, texts):
            described = {**words, **described}
            returns = returns or (() if inspect.isclass(thing) else result)
        doc = sections(thing.__doc__)
        texts = [described[name] for name in _signature(thing).parameters if name in described]
        parts = {"": doc[""], "Parameters": dict.fromkeys(texts), "Returns": returns}  # a text of two names stands once
        thing.__doc__ = "\n\n".join(
            _section(title, lines) for title, lines in {**parts, **doc, **parts}.items() if lines
        )


def _section(title: str, lines: Iterable[str]) -> str:
    text = "\n".join(lines).strip("\n")
    return f"{title}\n{'-' * len(title)}\n{text}" if title else text


@functools.cache
def _words(text: str) -> tuple[dict[str, str], Iterable[str]]:
    """What a docstring says of each parameter, and of what is returned."""
    said = sections(text)
    return entries(said.get("Parameters", ())), said.get("Returns", ())


@functools.cache
def sections(text: str) -> dict[str, list[str]]:
    """The lines of a docstring in NumPy's style by the titles of its sections; what stands before the first has the title ""."""
    lines = inspect.cleandoc(text).split("\n")
    now: list[str] = []
    by_title = {"": now}
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if line and below == "-" * len(line):
            now = by_title[line] = []
        elif line.strip("-") or not line:
            now.append(line)
    return by_title


def entries(lines: Iterable[str]) -> dict[str, str]:
    """The text of each parameter by its name, in a section of them; parameters that share a line share their text."""
    blocks: list[list[str]] = []
    for line in filter(None, lines):
        if line[0] == " ":
            blocks[-1].append(line)
        else:
            blocks.append([line])
    return {name: "\n".join(block) for block in blocks for name in block[0].partition(" : ")[0].split(", ")}
