"""Transforms of single classes: penalties for classes that came before, and biases."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from .._array import (
    FINITE,
    POSITIVE,
    Array,
    Namespace,
    Range,
    Ranges,
    adopt,
    asarray,
    at_least,
    beside,
    counts,
    decides,
    device_of,
    dtype_name,
    in_blocks,
    is_array,
    is_int,
    is_integer,
    is_number,
    is_torch,
    known,
    known_any,
    namespace,
    number,
    on_host,
    pick_axis,
    positions,
    sums_at,
    takes_blocks,
)
from .._core.classes import PADDING
from .._core.rows import hide
from .._core.typing import Parameter
from .base import Transform, from_numpy, makes_transform, on_kept

_LONG = 16384  # classes of a row from which on a penalty of some of them takes these alone


@makes_transform
def repetition_penalty(
    tokens: Any,
    penalty: Parameter = 1.0,
    presence: Parameter = 0.0,
    frequency: Parameter = 0.0,
    *,
    axis: int = -1,
    dim: int | None = None,
) -> Transform:
    """Lower the scores of the classes that came before: a score s becomes `s / penalty`, or `s * penalty` if it is negative, minus
    `presence + frequency * count`.

    Use it against loops in generated text. It is the penalty of transformers (Keskar et al. 2019) and the three penalties of vLLM and
    llama.cpp; OpenAI has the last two. vLLM counts prompt and output for `penalty`, the output alone for the others: compose two of these.

    Parameters
    ----------
    tokens
        The classes that came before, integers [..., length] with the leading axes of the scores; -100, or -1, where a row
        has fewer. [length] gives all rows the same tokens.
    penalty
        A number above 0, or an array with one value per row: [..., 1]. 1 changes nothing, and values below 1 raise scores.
    presence
        What every class that came before loses; a number, or an array with one value per row.
    frequency
        What a class loses each time that it came; a number, or an array with one value per row.
    axis, dim
        The axis of the classes, the last by default. Tokens are always along their last axis.

    Examples
    --------
    >>> repetition_penalty([0, 2, 2], penalty=2.0, frequency=0.25)([1.0, 1.0, -1.0])
    array([ 0.25,  1.  , -2.5 ])
    """
    tokens = read_tokens("repetition_penalty", tokens)
    _RepetitionPenalty.check(penalty=penalty, presence=presence, frequency=frequency)
    params = (("tokens", tokens), ("penalty", penalty), ("presence", presence), ("frequency", frequency))
    return _RepetitionPenalty(params, pick_axis(axis, dim))


class _RepetitionPenalty(Transform):
    name = "repetition_penalty"
    aligned = ("penalty", "presence", "frequency")
    ranges: ClassVar[Ranges] = {"penalty": POSITIVE, "presence": FINITE, "frequency": FINITE}

    def rows(self, x: Array, xp: Namespace, tokens: Array, penalty: Any, presence: Any, frequency: Any) -> Array:
        def of_all(x: Array, tokens: Array, penalty: Any, presence: Any, frequency: Any) -> Array:
            count = xp.astype(sums_at(tokens, None, x.shape[-1], xp), x.dtype)
            seen = count > 0

            def move(y: Array) -> Array:
                weighed = xp.where(y > 0, y / penalty, y * penalty)
                return xp.where(seen, weighed - presence - frequency * count, y)

            return on_kept(x, move, xp)

        tokens = counts(tokens_beside("repetition_penalty", tokens, x, xp), xp)
        return at_classes(of_all, x, tokens, (penalty, presence, frequency), xp)


@makes_transform
def logit_bias(bias: Any, *, axis: int = -1, dim: int | None = None) -> Transform:
    """Add a bias to some or all of the scores.

    Use it to ban a class (-inf), or to make it more likely, as in OpenAI's API, vLLM and llama.cpp.

    Parameters
    ----------
    bias
        A dict class -> bias, or an array that broadcasts to the scores, such as [classes]. -inf masks a class.

    Examples
    --------
    >>> logit_bias({1: -float("inf"), 2: 0.5})([1.0, 3.0, 2.0])
    array([ 1. , -inf,  2.5])
    """
    if isinstance(bias, dict):
        bias = tuple((_index(c), _finite("logit_bias", v)) for c, v in bias.items())
    elif not isinstance(bias, (int, float)):
        bias = asarray(bias, "bias")
    if not isinstance(bias, tuple):
        _LogitBias.check(bias=bias)
    return _LogitBias((("bias", bias),), pick_axis(axis, dim))


class _LogitBias(Transform):
    name = "logit_bias"
    aligned = ("bias",)
    ranges: ClassVar[Ranges] = {"bias": Range(-math.inf, math.inf, "low")}

    def rows(self, x: Array, xp: Namespace, bias: Any) -> Array:
        if isinstance(bias, tuple):
            n = x.shape[-1]
            out = [c for c, _ in bias if not 0 <= c < n]
            if out:
                raise ValueError(
                    f"logit_bias: class {out[0]} is out of range for {n} classes; classes are 0 to {n - 1}"
                )
            classes = adopt(np.asarray([c for c, _ in bias], np.int64), x, xp)
            values = adopt(np.asarray([v for _, v in bias], np.float64), x, xp)
            bias = sums_at(counts(classes, xp), xp.astype(values, x.dtype), n, xp)
        return on_kept(x, lambda y: y + bias, xp)


@makes_transform
def sequence_bias(tokens: Any, bias: Any, *, axis: int = -1, dim: int | None = None) -> Transform:
    """Add a bias to the class that would complete a sequence: to its last class, where the tokens end with the classes before it.

    Use it to ban words of several tokens (-inf), or to make them more likely: the `bad_words_ids` and `sequence_bias` of transformers, and
    the `bad_words` of vLLM, which looks at the output alone. A sequence of one class acts everywhere, as in `logit_bias`.

    Parameters
    ----------
    tokens
        The classes that came before, in order: integers [..., length] with the leading axes of the scores; -100, or -1, where a row has
        fewer, at any place. [length] gives all rows the same tokens. A list with one list of classes for each row may have several lengths.
    bias
        A dict sequence -> bias, such as `{(3, 5): -inf, (7,): 1.5}`. Where several sequences end with the same class, their biases add up.
    axis, dim
        The axis of the classes, the last by default. Tokens are always along their last axis.

    Examples
    --------
    >>> ban = sequence_bias([[1, 2], [2, 1]], {(1, 2, 0): -float("inf"), (3,): 0.5})
    >>> ban([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    array([[-inf,  0. ,  0. ,  0.5],
           [ 0. ,  0. ,  0. ,  0.5]])
    """
    if not isinstance(bias, dict):
        raise TypeError(
            f"sequence_bias: bias must be a dict sequence -> bias, such as {{(3, 5): -math.inf}}, got {bias!r}"
        )
    sequences = tuple(as_sequence("sequence_bias", words) for words in bias)
    values = tuple(_finite("sequence_bias", v) for v in bias.values())
    return biased_sequences("sequence_bias", tokens, sequences, values, axis=pick_axis(axis, dim))


def as_sequence(who: str, words: Any) -> tuple[int, ...]:
    """A sequence of classes, at least one."""
    one = (words,) if is_int(number(words)) else words
    if not isinstance(one, (tuple, list)) or not one or not all(is_int(number(c)) and c >= 0 for c in one):
        raise TypeError(f"{who}: a sequence must be classes, integers from 0 on, such as (3, 5), got {words!r}")
    return tuple(int(c) for c in one)


def biased_sequences(
    who: str, tokens: Any, sequences: tuple[tuple[int, ...], ...], bias: Any, *, axis: int = -1
) -> Transform:
    """`sequence_bias` with the biases in the order of the sequences: a tuple, or an array [..., sequences] with the axes of the rows."""
    return _SequenceBias((("tokens", read_tokens(who, tokens)), ("sequences", sequences), ("bias", bias)), axis)


class _SequenceBias(Transform):
    name = "sequence_bias"

    def rows(self, x: Array, xp: Namespace, tokens: Array, sequences: tuple[tuple[int, ...], ...], bias: Any) -> Array:
        n = x.shape[-1]
        out = [c for words in sequences for c in words if c >= n]
        if out:
            raise ValueError(f"sequence_bias: class {out[0]} is out of range for {n} classes; classes are 0 to {n - 1}")
        if not sequences:
            return x
        tokens = counts(tokens_beside("sequence_bias", tokens, x, xp), xp)
        lead = tuple(x.shape[:-1])
        tokens = xp.broadcast_to(in_order(tokens, xp) if tokens.shape[-1] else tokens, (*lead, tokens.shape[-1]))
        before = max(map(len, sequences)) - 1
        short = max(before - tokens.shape[-1], 0)
        if short:
            tokens = xp.concat([-xp.ones((*lead, short), dtype=tokens.dtype, **device_of(x)), tokens], axis=-1)
        # [..., sequences, before]: the classes before the last one, and -2 where a shorter sequence has none
        first = np.asarray([(-2,) * (before + 1 - len(words)) + words[:-1] for words in sequences], np.int64)
        first = counts(adopt(first.reshape(len(sequences), before), x, xp), xp)
        end = tokens[..., tokens.shape[-1] - before :]
        matches = xp.all((xp.expand_dims(end, axis=-2) == first) | (first == -2), axis=-1)
        values = adopt(np.asarray(bias, np.float64), x, xp) if isinstance(bias, tuple) else from_numpy(bias, x, xp)
        values = xp.where(matches, xp.astype(values, x.dtype), xp.zeros(matches.shape, dtype=x.dtype, **device_of(x)))
        last = counts(adopt(np.asarray([words[-1] for words in sequences], np.int64), x, xp), xp)

        def of_all(x: Array, last: Array, values: Array) -> Array:
            added = sums_at(last, values, x.shape[-1], xp)
            return on_kept(x, lambda y: y + added, xp)

        return at_classes(of_all, x, xp.broadcast_to(last, matches.shape), (values,), xp)


def allowed(classes: Any) -> Transform:
    """-inf at all classes but those listed, integers [..., length] with the axes of the rows; -1 is none, and a row of -1 keeps all."""
    return _Allowed((("classes", read_tokens("allowed", classes)),))


class _Allowed(Transform):
    name = "allowed"

    def rows(self, x: Array, xp: Namespace, classes: Array) -> Array:
        classes = counts(tokens_beside("allowed", classes, x, xp), xp)
        listed = sums_at(classes, None, x.shape[-1], xp) > 0
        return hide(x, xp.broadcast_to(listed | ~xp.any(listed, axis=-1, keepdims=True), x.shape))


def _index(value: Any) -> int:
    if not is_int(number(value)):
        raise TypeError(f"logit_bias: the keys of bias must be classes, integers from 0 on, got {value!r}")
    return int(value)


def _finite(who: str, value: Any) -> float:
    value = number(value)
    if not is_number(value):
        raise TypeError(f"{who}: the values of bias must be numbers, got {value!r}")
    if not value < math.inf:
        raise ValueError(f"{who}: the values of bias must be below infinity, got {value}")
    return float(value)


def read_tokens(who: str, tokens: Any) -> Array:
    """The classes that came before, as an array of signed integers with at least one axis; lists of several lengths end with -1."""
    tokens = asarray(_padded(tokens), "tokens")
    if not is_integer(tokens) and tokens.shape != (0,):
        more = "" if tokens.ndim else f"; they come first, as in {who}(tokens, {tokens})"
        raise TypeError(f"{who}: tokens must be integers, the classes that came before, got {dtype_name(tokens)}{more}")
    if tokens.ndim == 0:
        raise ValueError(f"{who}: tokens must have an axis, the classes that came before, got a single number")
    return counts(tokens, namespace(tokens)) if is_integer(tokens) else tokens  # torch can't compare unsigned integers


def _padded(tokens: Any) -> Any:
    """Lists of classes, one list a row, as an array with -1 at the end of the shorter ones; anything else as it is."""
    if not isinstance(tokens, (list, tuple)) or not tokens or not all(isinstance(row, (list, tuple)) for row in tokens):
        return tokens
    longest = max(map(len, tokens))
    if longest and (
        all(len(row) == longest for row in tokens) or any(isinstance(c, (list, tuple)) for r in tokens for c in r)
    ):
        return tokens
    rows = [[*row, *[-1] * (longest - len(row))] for row in tokens]
    return np.asarray(rows, None if longest else np.int64)


def at_classes(
    function: Callable[..., Array], x: Array, classes: Array, values: tuple[Any, ...], xp: Namespace
) -> Array:
    """`function(x, classes, *values)`, which changes none but these classes [..., m]; a negative one is none. Others are not computed."""
    arrays = [k for k, v in enumerate(values) if is_array(v)]

    def of_block(rows: Array, classes: Array, *own: Array) -> Array:
        each = dict(zip(arrays, own, strict=True))
        return _at_classes(function, rows, classes, [each.get(k, v) for k, v in enumerate(values)], xp)

    own = [values[k] for k in arrays]
    if takes_blocks(x, *own) and known(classes):
        return in_blocks(of_block, x, classes, *own)
    return of_block(x, classes, *own) if at_least(x.shape[-1], _LONG) else function(x, classes, *values)


def _at_classes(function: Callable[..., Array], x: Any, classes: Array, values: list[Any], xp: Namespace) -> Array:
    few = at_least(x.shape[-1], _LONG) and decides(x) and known(classes) and (is_torch(x) or isinstance(x, np.ndarray))
    per_class = any(is_array(v) and v.ndim and v.shape[-1] == x.shape[-1] for v in values)
    there = np.unique(on_host(classes)) if few and not per_class else np.empty(0)
    there = there[np.searchsorted(there, 0) :]
    if not few or per_class or 2 * there.size > x.shape[-1]:
        return function(x, classes, *values)
    places = adopt(np.searchsorted(there, on_host(classes)) - (on_host(classes) < 0), x, xp)
    there = adopt(there, x, xp)
    rows: Any = x
    moved = function(xp.take(rows, there, axis=-1), places, *values)
    if is_torch(x):
        return rows.index_copy(-1, there, moved)
    out = rows.copy()
    out[..., there] = moved
    return out


def in_order(tokens: Array, xp: Namespace) -> Array:
    """The tokens of each row in their order, with all padding before them."""
    n = tokens.shape[-1]
    place = positions(tokens, tokens.dtype, xp)
    order = xp.argsort(xp.where(tokens < 0, place, place + n), axis=-1)
    return xp.take_along_axis(tokens, order, axis=-1)


def tokens_beside(who: str, tokens: Array, x: Array, xp: Namespace) -> Array:
    """The tokens as an array of the scores' kind and device, once they fit the rows and the classes of x."""
    n = x.shape[-1]
    tokens = beside(from_numpy(tokens, x, xp), x, "tokens", xp)
    lead, rows = tuple(tokens.shape[:-1]), tuple(x.shape[:-1])
    if len(lead) > len(rows) or any(a != 1 and a != b for a, b in zip(reversed(lead), reversed(rows), strict=False)):
        raise ValueError(
            f"{who}: tokens of shape {tuple(tokens.shape)} do not belong to rows of shape {tuple(x.shape)}; give [length], or "
            "[..., length] with the leading axes of the scores"
        )
    if known_any(((tokens < -1) & (tokens != PADDING)) | (tokens >= n), xp):
        raise ValueError(
            f"{who}: a token is out of range for {n} classes; tokens are 0 to {n - 1}, and {PADDING}, or -1, where a row has fewer"
        )
    return tokens
