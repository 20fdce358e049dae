"""What `from_config` collects for the rows of a batch: transforms with one parameter for all rows, or with one for each.

It has the contract of a system too, and the steps that systems share.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .._array import adopt, namespace
from .base import Transform
from .tokens import as_sequence, biased_sequences, in_order, logit_bias, read_tokens, repetition_penalty
from .truncation import topk

TINY = 1e-30  # a mass that the largest class reaches alone
ENDS = "it ends the text"
TEXT = "it is about texts and words, not scores"
REPORT = "it says what is reported"
ENGINE = "it is about the engine"
MANY = "it says how many texts are drawn"
SEED = "give generator= to the sampler"
BEAMS = "it belongs to beam search, which looks at several texts at once"
PLACE = "it depends on the place in the text"
ENCODER = "it looks at the encoder's input"
DRAFT = "it is about drafts"
ALL = 2**31 - 1  # as many classes as a row can have
_NO_HISTORY = np.zeros(0, np.int64)


class Rows:
    """The configs of the rows, all fields set, and the transforms made from them so far."""

    def __init__(self, values: list[dict[str, Any]], tokens: Any, output: Any, generator: Any, leave: tuple[str, ...]):
        self.values, self.generator, self.leave = values, generator, leave
        self.given = {"tokens": tokens, "output": output}
        self.greedy = [False] * len(values)
        self.parts: list[Any] = []
        self.left: dict[str, str] = {}

    def column(self, name: str) -> list[Any]:
        return [row[name] for row in self.values]

    def any(self, name: str) -> bool:
        """True if some row has a value other than None, 0, False or an empty one."""
        return any(bool(v) for v in self.column(name))

    def history(self, what: str, field: str) -> Any:
        """The classes that came before, "tokens" or "output", which `field` looks at."""
        if self.given[what] is None:
            which = "all classes that came before" if what == "tokens" else "the classes of the output so far"
            raise ValueError(f"from_config: {field} looks at {which}; give {what}=, or say leave=({field!r},)")
        return read_tokens(f"from_config: {what}", self.given[what])

    def add(self, part: Transform) -> None:
        self.parts.append(part)

    def cut(
        self,
        make: Callable[..., Transform],
        key: str,
        field: str,
        off: Callable[[Any], bool],
        neutral: Any,
        *,
        sampled: bool = True,
        **options: Any,
    ) -> None:
        """The transform `make(key=...)` for the rows whose field is not off; `neutral` changes nothing in the other rows.

        `sampled`: it belongs to the draw, and greedy rows have none.
        """
        self.level(
            make, {key: (field, self.column(field), neutral)}, [off(v) for v in self.column(field)], sampled, options
        )

    def level(
        self,
        make: Callable[..., Transform],
        params: dict[str, tuple[str, list[Any], Any]],
        off: list[bool],
        sampled: bool = True,
        options: dict[str, Any] | None = None,
    ) -> None:
        """The transform `make(**params)` for the rows that are not `off`, as in `cut`.

        params: name -> (field, a value for each row, the value that changes nothing).
        """
        skip = [o or (g and sampled) for o, g in zip(off, self.greedy, strict=True)]
        if all(skip):
            return
        first = skip.index(False)
        checked, final = {}, {}
        for key, (_, values, neutral) in params.items():
            alike = all(v == values[first] for v in values) and not any(skip)
            # a value of the transform's own range where the row is off, then the neutral one, which can be outside of it
            checked[key] = (
                values[first]
                if alike
                else as_column([values[first] if s else v for v, s in zip(values, skip, strict=True)])
            )
            final[key] = (
                checked[key] if alike else as_column([neutral if s else v for v, s in zip(values, skip, strict=True)])
            )
        try:
            transform = make(**checked, **(options or {}))
        except (TypeError, ValueError) as error:
            names = ", ".join(dict.fromkeys(field for field, _, _ in params.values()))
            raise type(error)(f"from_config: {names}: {error}") from None
        self.add(dataclasses.replace(transform.replace(**final), with_neutral=True) if any(skip) else transform)

    def sequences(self, biases: list[dict[tuple[int, ...], float]]) -> tuple[tuple[tuple[int, ...], ...], Any]:
        """The sequences of all rows and their biases: a tuple if the rows agree; else an array [rows, sequences], 0 for none."""
        every = tuple(dict.fromkeys(words for row in biases for words in row))
        if all(row == biases[0] for row in biases):
            return every, tuple(biases[0][words] for words in every)
        return every, np.asarray([[row.get(words, 0.0) for words in every] for row in biases], np.float64)


def as_column(values: list[Any]) -> np.ndarray[Any, Any]:
    """Numbers as an array with one row for each, [rows, 1]."""
    return np.asarray(values)[:, None]


def below(tokens: Any, least: list[int], member: np.ndarray[Any, Any]) -> Any:
    """-inf where a row has fewer than `least` classes and `member` [rows, sequences] is True, else 0: [..., sequences]."""
    xp = namespace(tokens)
    count = xp.sum(xp.astype(tokens >= 0, tokens.dtype), axis=-1, keepdims=True)
    bound, belongs = (as_column(least), member) if len(least) > 1 else (np.asarray(least), member[0])
    short = (count < adopt(bound, tokens, xp)) & adopt(belongs, tokens, xp)
    return xp.where(short, adopt(np.asarray(-np.inf), tokens, xp), adopt(np.asarray(0.0), tokens, xp))


def last(tokens: Any, count: list[Any]) -> Any:
    """The last classes of a history, as many as each row's `count` says; -1 stands for all."""
    if all(c < 0 for c in count):
        return tokens
    xp = namespace(tokens)
    most = np.asarray([tokens.shape[-1] if c < 0 else c for c in count])
    tokens = in_order(tokens, xp)
    if all(c == count[0] for c in count):
        return tokens[..., max(tokens.shape[-1] - int(most[0]), 0) :]
    back = adopt(np.arange(tokens.shape[-1])[::-1] < most[:, None], tokens, xp)
    return xp.where(back, tokens, -xp.ones_like(tokens))


class System(NamedTuple):
    """One system's config. Each field has the value that it has if nobody sets it."""

    name: str
    does: dict[str, Any]
    # fields that change the draw in a way that a transform of scores can't, with the reason
    cannot: dict[str, tuple[Any, str]]
    elsewhere: dict[str, tuple[Any, str]]  # fields that are not about scores; without a reason: internal ones
    build: Callable[[Rows, list[dict[str, Any]]], None]
    aliases: dict[str, str]

    @property
    def known(self) -> dict[str, tuple[Any, str]]:
        return {**{name: (value, "") for name, value in self.does.items()}, **self.cannot, **self.elsewhere}

    def named(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields under their first names; an error if one is given under two."""
        out: dict[str, Any] = {}
        for name, value in fields.items():
            first = self.aliases.get(name, name)
            if first in out:
                raise ValueError(f"from_config: {first} is given twice, also as {name}")
            out[first] = value
        return out


def fields_of(**groups: tuple[str, dict[str, Any]]) -> dict[str, tuple[Any, str]]:
    return {name: (value, reason) for reason, fields in groups.values() for name, value in fields.items()}


def none(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names)


# -- steps that systems share ----------------------------------------------------------------------------------------------------


def biases(rows: Rows, field: str) -> None:
    """The bias of single classes, for all rows or for each."""
    if not rows.any(field):
        return
    each = [_bias(field, value) for value in rows.column(field)]
    if all(b == each[0] for b in each):
        rows.add(logit_bias(each[0]))
        return
    biased(rows, field, "tokens", [{(c,): v for c, v in b.items()} for b in each])


def biased(rows: Rows, field: str, what: str, each: list[dict[tuple[int, ...], float]]) -> None:
    """The biases of sequences, for each row; the history is read only for sequences of several classes."""
    sequences, values = rows.sequences(each)
    tokens = rows.history(what, field) if max(map(len, sequences)) > 1 else _NO_HISTORY
    rows.add(biased_sequences(f"from_config: {field}", tokens, sequences, values))


def _bias(field: str, value: Any) -> dict[int, float]:
    """A dict class -> bias; also from pairs, and from keys of JSON."""
    pairs = value.items() if isinstance(value, dict) else value or ()
    try:
        bias = {int(c): (-math.inf if v is False else float(v)) for c, v in pairs}
        logit_bias(bias)
    except (TypeError, ValueError) as error:
        raise ValueError(f"from_config: {field} must be a dict class -> bias, got {value!r} ({error})") from None
    return bias


def banned(rows: Rows, field: str, what: str, words: list[Any]) -> None:
    """Sequences of classes that must not be completed, one list for each row."""
    if not any(words):
        return
    biased(
        rows, field, what, [{as_sequence(f"from_config: {field}", w): -math.inf for w in row or ()} for row in words]
    )


def not_before(rows: Rows, field: str, what: str, ends: list[list[int]]) -> None:
    """The classes that end a text are masked while it has fewer classes than the field says."""
    least = rows.column(field)
    every = tuple(dict.fromkeys(c for row, n in zip(ends, least, strict=True) for c in row if n > 0))
    if every:
        member = np.asarray([[c in row for c in every] for row in ends])
        bias = below(rows.history(what, field), least, member)
        rows.add(biased_sequences(f"from_config: {field}", _NO_HISTORY, tuple((c,) for c in every), bias))


def penalties(rows: Rows, tokens: Callable[[str], Any], **fields: str) -> None:
    """A repetition penalty with the parameters given by name: parameter -> field."""
    neutral = {"penalty": 1.0, "presence": 0.0, "frequency": 0.0}
    columns = {key: rows.column(field) for key, field in fields.items()}
    on = [key for key in fields if any(v != neutral[key] for v in columns[key])]
    if on:
        params = {key: (fields[key], columns[key], neutral[key]) for key in on}
        options = {"tokens": tokens(fields[on[0]])}
        rows.level(repetition_penalty, params, [False] * len(rows.values), False, options)


def top_k(rows: Rows, off: Callable[[int], bool], first: list[bool] | None = None, **options: Any) -> None:
    """top-k where it is on, and 1 in rows of which the `first` of the largest scores is taken: by default the greedy ones."""
    first = rows.greedy if first is None else first
    k = [1 if one else v for v, one in zip(rows.column("top_k"), first, strict=True)]
    skip = [not one and (greedy or off(v)) for v, one, greedy in zip(k, first, rows.greedy, strict=True)]
    rows.level(topk, {"k": ("top_k", k, ALL)}, skip, False, options)


def classes(value: Any) -> list[int]:
    return [] if value is None else [int(value)] if isinstance(value, (int, np.integer)) else [int(c) for c in value]


def same(rows: Rows, field: str) -> Any:
    """The field's value, which a transform can't have for each row."""
    values = rows.column(field)
    if any(v != values[0] for v in values):
        raise ValueError(f"from_config: {field} must be the same in all rows, got {values}")
    return values[0]
