"""The transform `dry`: a penalty for the classes that would go on with a sequence that came before."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from .._array import (
    NOT_NEGATIVE,
    Array,
    Namespace,
    Range,
    Ranges,
    counts,
    decides,
    is_array,
    is_int,
    largest_at,
    number,
    pick_axis,
)
from .._core.typing import Parameter
from .base import Transform, makes_transform, on_kept
from .tokens import at_classes, in_order, read_tokens, tokens_beside

_LONGEST = 50  # as in text-generation-webui: more would only make a power overflow


@makes_transform
def dry(
    tokens: Any,
    multiplier: Parameter = 0.8,
    base: Parameter = 1.75,
    allowed_length: int = 2,
    sequence_breakers: Any = (),
    *,
    axis: int = -1,
    dim: int | None = None,
) -> Transform:
    """Lower the scores of the classes that would repeat a sequence: by `multiplier * base^(l - allowed_length)`, where l is the length of
    the longest sequence that ends the tokens and that this class has followed before.

    Use it against loops of whole phrases, where `repetition_penalty` lowers single classes. "Don't repeat yourself" (p-e-w, 2024), as in
    text-generation-webui and llama.cpp.

    Parameters
    ----------
    tokens
        The classes that came before, in order: integers [..., length] with the leading axes of the scores; -100, or -1, where a row has
        fewer, at any place. [length] gives all rows the same tokens. To look at the last 1,000 alone, give `tokens[..., -1000:]`.
    multiplier
        The penalty of a sequence of the allowed length, at least 0; a number, or an array with one value per row: [..., 1].
    base
        The factor for each further token, at least 1; a number, or an array with one value per row. Sequences longer than 50 count as 50.
    allowed_length
        The length from which on a repetition costs, an integer of at least 1.
    sequence_breakers
        Classes at which a sequence ends, such as those of a new line, a colon and a quotation mark: no sequence contains one, and none
        of them gets a penalty.
    axis, dim
        The axis of the classes, the last by default. Tokens are always along their last axis.

    Examples
    --------
    >>> dry([1, 2, 3, 1, 2])([0.0, 0.0, 0.0, 0.0])  # 3 came after "1, 2"
    array([ 0. ,  0. ,  0. , -0.8])
    """
    tokens = read_tokens("dry", tokens)
    _Dry.check(multiplier=multiplier, base=base)
    if not is_int(number(allowed_length)) or allowed_length < 1:
        raise ValueError(f"dry: allowed_length must be an integer of at least 1, got {allowed_length!r}")
    listed = sequence_breakers.tolist() if is_array(sequence_breakers) else sequence_breakers
    breakers = tuple(map(number, listed)) if isinstance(listed, (list, tuple, set, frozenset, range)) else None
    if breakers is None or not all(is_int(b) and b >= 0 for b in breakers):
        raise TypeError(
            f"dry: sequence_breakers must be a list of classes, integers from 0 on, got {sequence_breakers!r}"
        )
    params = (
        ("tokens", tokens),
        ("multiplier", multiplier),
        ("base", base),
        ("allowed_length", int(allowed_length)),
        ("sequence_breakers", tuple(int(b) for b in breakers)),
    )
    return _Dry(params, pick_axis(axis, dim))


class _Dry(Transform):
    name = "dry"
    aligned = ("multiplier", "base")
    ranges: ClassVar[Ranges] = {"multiplier": NOT_NEGATIVE, "base": Range(1.0, math.inf, "low")}

    def rows(
        self,
        x: Array,
        xp: Namespace,
        tokens: Array,
        multiplier: Any,
        base: Any,
        allowed_length: int,
        sequence_breakers: tuple[int, ...],
    ) -> Array:
        tokens = counts(tokens_beside("dry", tokens, x, xp), xp)
        if tokens.shape[-1] < 2 or allowed_length > _LONGEST:
            return x
        tokens = in_order(tokens, xp)
        length = _repeated(tokens, sequence_breakers, xp)
        follows = tokens[..., 1:]
        for b in sequence_breakers:
            follows = xp.where(follows == b, -xp.ones_like(follows), follows)

        def of_all(x: Array, follows: Array, length: Array, multiplier: Any, base: Any) -> Array:
            most = largest_at(follows, length, x.shape[-1], xp)
            costs = most >= allowed_length
            over = xp.where(costs, most - allowed_length, xp.zeros_like(most))
            most_power = 0.5 * math.log(float(xp.finfo(x.dtype).max))  # a penalty is finite, and does not mask

            def move(y: Array) -> Array:
                power = over * (xp.log(base) if is_array(base) else math.log(base))
                power = xp.where(power < most_power, power, most_power * xp.ones_like(power))
                return xp.where(costs, y - multiplier * xp.exp(power), y)

            return on_kept(x, move, xp)

        return at_classes(of_all, x, follows, (xp.astype(length, x.dtype), multiplier, base), xp)


def _repeated(tokens: Array, breakers: tuple[int, ...], xp: Namespace) -> Array:
    """How many tokens up to each place but the last, [..., length - 1], are the same as those at the end of the row."""
    n = tokens.shape[-1]
    sound = tokens >= 0
    for b in breakers:
        sound = sound & (tokens != b)
    alike, length = xp.ones_like(tokens[..., 1:]) > 0, xp.zeros_like(tokens[..., 1:])
    for back in range(min(n - 1, _LONGEST)):
        end, whole = tokens[..., n - 1 - back : n - back], sound[..., n - 1 - back : n - back]
        same = (tokens[..., : n - 1 - back] == end) & whole
        if back:
            same = xp.concat([xp.zeros_like(tokens[..., :back]) > 0, same], axis=-1)
        alike = alike & same
        if decides(alike) and not bool(xp.any(alike)):
            break
        length = length + xp.astype(alike, length.dtype)
    return length
