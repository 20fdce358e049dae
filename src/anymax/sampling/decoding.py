"""Decoding: draws without replacement, the k best classes, and speculative decoding."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from .._array import (
    Array,
    Namespace,
    asarray,
    beside,
    counts,
    floating,
    from_last,
    is_integer,
    known_any,
    namespace,
    pick_axis,
    positions,
    quiet,
    stop_gradient,
    to_last,
    top,
    total,
    upcast,
)
from .._core.mapping import Mapping
from .._core.names import as_mapping
from .._core.options import answering
from .._core.rows import prepare
from .._core.shards import refuse as refuse_sharded
from .._core.typing import AnyArray, Numbers
from .._random.draws import at, check_k, invert, largest, uniforms
from .._random.noises import draw
from ..likelihood.terms import log_p_rows
from ..mappings import Softmax
from ..transforms.base import put_through, transforms_of


class TopK(NamedTuple):
    """Classes of each row, and their log p. A row with fewer classes is filled with -1 and -inf, a row with NaN or +inf with -1 and NaN.

    log p is that of a draw, as `log_prob` and `sample` give it: of a map whose probabilities sum to k (`Budget`) it is log(p / k).
    """

    index: Any
    log_prob: Any


class Accepted(NamedTuple):
    """How many tokens of a draft were accepted, and the token that follows these."""

    count: Any
    token: Any


@answering(logits="x")
def topk_log_prob(
    mapping: Mapping | str,
    x: AnyArray | Numbers,
    k: int,
    transform: Callable[[Any], Any] | None = None,
    *,
    axis: int | None = None,
    dim: int | None = None,
    mask: Any = None,
) -> TopK:
    """The k most probable classes of each row and log p of them, after any transforms of the scores.

    For a step of beam search, with any map; a beam's sum of log p is the caller's to keep.

    mapping: the map, such as `Softmax()`, or its name, such as "softmax".
    x: the scores; -inf masks a class.
    k: how many classes to give, from 1 to the number of classes.
    transform: what the scores go through first: one of `anymax.transforms`, several in `compose(...)`, or a function of your own.
        Those of `anymax.transforms` go along `axis`, whichever it is.
    axis: the axis of the classes, the last by default; `dim` is another name of it.
    mask: boolean, broadcastable to x, True = keep; before the transforms.

    Returns a named tuple (index, log_prob), both with k in the place of the classes, the most probable first and of equal ones the
    first; -1 and -inf where fewer than k have a probability. log_prob is that of a draw, as `log_prob` gives it; it is differentiable,
    and fp32 for scores of half precision.

    >>> import numpy as np
    >>> from anymax import Softmax, Sparsemax
    >>> best = topk_log_prob(Softmax(), np.log([[0.1, 0.6, 0.3]]), k=2)
    >>> best.index, np.exp(best.log_prob).round(3)
    (array([[1, 2]]), array([[0.6, 0.3]]))
    >>> topk_log_prob(Sparsemax(), [3.0, 1.0, 0.0], k=2)
    TopK(index=array([ 0, -1]), log_prob=array([  0., -inf]))
    """
    log_p, axis, xp = _log_p("topk_log_prob", mapping, x, transform, pick_axis(axis, dim), mask)
    return _best(log_p, log_p, check_k("topk_log_prob", k, log_p.shape[-1]), axis, xp)


@answering(logits="x", key="generator")
def gumbel_topk(
    x: AnyArray | Numbers,
    k: int,
    *,
    mapping: Mapping | str | None = None,
    transform: Callable[[Any], Any] | None = None,
    generator: Any = None,
    axis: int | None = None,
    dim: int | None = None,
    mask: Any = None,
) -> TopK:
    """k distinct classes of each row, drawn without replacement: the k largest of `log p + Gumbel noise`.

    As if drawn one after the other with the probabilities of a map, each time without those that were drawn before, in that order.
    For diverse candidates, or for sampled negatives. Vieira 2014; Kool et al. 2019.

    x: the scores; -inf masks a class.
    k: how many classes to draw, from 1 to the number of classes.
    mapping: the map, or its name; softmax by default.
    transform: what the scores go through first, as for `sample`.
    generator: a generator or key, an integer seed, or a list of these, one a row; by default NumPy's or torch's global one.
    axis: the axis of the classes, the last by default; `dim` is another name of it.
    mask: boolean, broadcastable to x, True = keep; before the transforms.

    Returns a named tuple (index, log_prob), both with k in the place of the classes, the first drawn first: exactly k different classes,
    or -1 and -inf at the end where fewer have a probability. log_prob is that of each class as the first draw, as `log_prob` gives it,
    a constant of differentiation, and fp32 for scores of half precision.

    >>> drawn = gumbel_topk([0.0, 1.0, 2.0, -float("inf")], k=3, generator=0)
    >>> drawn.index, drawn.log_prob.round(3)
    (array([2, 1, 0]), array([-0.408, -1.408, -2.408]))
    """
    mapping = Softmax() if mapping is None else mapping
    log_p, axis, xp = _log_p("gumbel_topk", mapping, x, transform, pick_axis(axis, dim), mask)
    k, log_p = check_k("gumbel_topk", k, log_p.shape[-1]), stop_gradient(log_p)
    with quiet(log_p):
        z = log_p + draw("gumbel", tuple(log_p.shape), log_p, generator)
    return _best(z, log_p, k, axis, xp)


def _log_p(
    who: str, mapping: Mapping | str, x: Any, transform: Any, axis: int, mask: Any
) -> tuple[Array, int, Namespace]:
    """(log p of the transformed rows, classes last; the axis of the classes in the scores; the namespace)."""
    mapping = as_mapping(mapping, who)
    refuse_sharded(who, x)
    scores, rows, mapping, axis = prepare(mapping, x, axis, mask, None)
    xp = namespace(rows)
    y = from_last(upcast(rows, xp), axis, xp)
    for t in transforms_of(transform, axis, scores.ndim, who):
        y = put_through(who, t, y)
    return log_p_rows(mapping, to_last(y, axis, xp), xp), axis, xp


def _best(key: Array, log_p: Array, k: int, axis: int, xp: Namespace) -> TopK:
    """The classes with the k largest keys and log p of them."""
    high = top(stop_gradient(key), xp)
    strange = xp.isnan(high) | (high == math.inf)
    index = largest(xp.where(strange, xp.zeros_like(key), key), k, xp)
    found = at(log_p, index, xp)
    index = xp.where(found > -math.inf, index, -xp.ones_like(index))  # NaN too
    return TopK(from_last(index, axis, xp), from_last(found, axis, xp))


@answering(key="generator")
def speculative_accept(
    p_draft: AnyArray | Numbers, p_target: AnyArray | Numbers, tokens: Any, *, generator: Any = None
) -> Accepted:
    """How much of a draft stands, and the token after it: exactly as if every token had been drawn from the target.

    Speculative decoding: a cheap model drafts a few tokens, the target looks at all of them in one step. A token x is accepted with
    probability `min(1, p_target(x) / p_draft(x))`; at the first that is not, one is drawn from `max(p_target - p_draft, 0)`, normalised.
    Leviathan et al. 2023; Chen et al. 2023. The probabilities may be those of any maps, truncated or not, so long as the draft was drawn
    from `p_draft`.

    p_draft: the probabilities that each token of the draft was drawn from, [..., T, classes].
    p_target: those of the target at the same places, [..., T, classes]; or [..., T + 1, classes], with those after the whole draft.
    tokens: the draft, integers [..., T]; -1 at the end of a row whose draft is shorter.
    generator: a generator or key, an integer seed, or a list of these, one a row; by default NumPy's or torch's global one.
        Row i, in C order, takes T + 1 numbers of it, as `sample` does with `num_samples`.

    Returns a named tuple (count, token), integers [...]: `tokens[..., :count]` are accepted and `token` follows them. It is -1 after a
    draft that is accepted as a whole where p_target has no probabilities after it, and where they are NaN or all 0.

    >>> import numpy as np
    >>> draft, target = np.array([[0.5, 0.5], [0.9, 0.1]]), np.array([[0.5, 0.5], [0.0, 1.0], [0.0, 1.0]])
    >>> speculative_accept(draft, target, [1, 0], generator=0)
    Accepted(count=array(1), token=array(1))
    """
    refuse_sharded("speculative_accept", None, p_draft=p_draft, p_target=p_target, tokens=tokens)
    p, xp = _table(p_target, "p_target")
    q, _ = _table(beside(p_draft, p, "p_draft", xp), "p_draft")
    p, q = (stop_gradient(upcast(a, xp)) for a in (p, q))
    q = q if q.dtype == p.dtype else xp.astype(q, p.dtype)
    tokens = beside(tokens, p, "tokens", xp)
    if not is_integer(tokens):
        raise TypeError(f"speculative_accept: tokens must be integers, the draft, got {tokens.dtype}")
    *lead, length, n = q.shape
    after = p.shape[-2] - length
    if (
        tuple(tokens.shape) != (*lead, length)
        or tuple(p.shape) != (*lead, length + after, n)
        or after not in (0, 1)
        or not length
    ):
        raise ValueError(
            "speculative_accept: p_draft [..., T, classes], p_target [..., T or T + 1, classes] and tokens [..., T] must belong "
            f"together, T at least 1; got {tuple(q.shape)}, {tuple(p.shape)} and {tuple(tokens.shape)}"
        )
    if known_any((tokens < -1) | (tokens >= n), xp):
        raise ValueError(
            f"speculative_accept: a token is out of range for {n} classes; tokens are 0 to {n - 1}, and -1 where a draft is shorter"
        )
    return _accept(q, p, counts(tokens, xp), generator, xp)


def _accept(q: Array, p: Array, tokens: Array, generator: Any, xp: Namespace) -> Accepted:
    """q [..., T, n], p [..., T or T + 1, n], tokens [..., T]."""
    length = tokens.shape[-1]
    u = uniforms(p[..., 0, :], length + 1, generator, xp)
    drafted = tokens >= 0
    each = xp.expand_dims(tokens, axis=-1)
    here = at(p[..., :length, :], each, xp)[..., 0]
    there = at(q, each, xp)[..., 0]
    refused = ~(drafted & (u[..., :length] * xp.astype(there, u.dtype) < xp.astype(here, u.dtype)))
    end = length * xp.ones_like(tokens)
    count = xp.min(xp.where(refused, positions(tokens, tokens.dtype, xp), end), axis=-1, keepdims=True)
    stood = count == length
    last = count - xp.astype(stood, count.dtype)  # a place that is in the draft
    wanted = _row(p, count if p.shape[-2] > length else last, xp)
    had = _row(q, last, xp)
    # nothing was drafted after the end of the draft, where the target's own probabilities serve
    had = xp.where(stood | (xp.take_along_axis(tokens, last, axis=-1) < 0), xp.zeros_like(had), had)
    rest = wanted - had
    rest = xp.where(rest < 0, xp.zeros_like(rest), rest)
    rest = xp.where(total(rest, xp) == 0, wanted, rest)
    token = invert(rest, u[..., length:], xp)
    if p.shape[-2] == length:
        token = xp.where(stood, -xp.ones_like(token), token)
    return Accepted(count[..., 0], token[..., 0])


def _row(table: Array, place: Array, xp: Namespace) -> Array:
    """table[..., place, :], for a place [..., 1]."""
    index = xp.broadcast_to(xp.expand_dims(place, axis=-1), (*place.shape[:-1], 1, table.shape[-1]))
    return xp.take_along_axis(table, index, axis=-2)[..., 0, :]


def _table(p: Any, name: str) -> tuple[Array, Namespace]:
    p = asarray(p, name)
    xp = namespace(p)
    if p.ndim < 2:
        raise ValueError(f"speculative_accept: {name} must be [..., T, classes], got the shape {tuple(p.shape)}")
    if not p.shape[-1]:
        raise ValueError(f"speculative_accept: {name} of shape {tuple(p.shape)} has no classes; at least one is needed")
    return floating(p, xp, name), xp
