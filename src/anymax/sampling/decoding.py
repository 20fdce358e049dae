"""Decoding: several classes without replacement, the k most probable classes, and the verification of drafts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from .._array import (
    Array,
    Namespace,
    as_dtype,
    as_scalar,
    beside,
    check_axis,
    counts,
    floats,
    from_last,
    is_integer,
    known_any,
    namespace,
    pick_axis,
    positions,
    quiet,
    stop_gradient,
    total,
    upcast,
)
from .._core.mapping import Mapping
from .._core.options import check_keywords, documented_like
from .._core.shards import refuse as refuse_sharded
from .._core.typing import AnyArray, Numbers
from .._random.draws import at, check_k, invert, uniforms
from .._random.noises import draw
from ..kernels.selection import chosen
from ..likelihood.terms import log_p_rows, read
from ..mappings import Softmax
from .results import every_sampler


class TopK(NamedTuple):
    """k classes of each row and their log p; -1 and -inf where a row has fewer, -1 and NaN in a row with NaN or +inf.

    As in `log_prob` and `sample`, log p is that of one draw: for a map whose probabilities sum to k (`Budget`) it is log(p / k).
    """

    index: Any
    log_prob: Any


class Accepted(NamedTuple):
    """The number of accepted tokens of a draft, and the token that follows them."""

    count: Any
    token: Any


@check_keywords(logits="x")
@documented_like(every_sampler)
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
    """The k most probable classes of each row and their log p, after any transforms of the scores.

    Use it for a step of beam search, with any map; the caller adds up the log p of each beam.

    Parameters
    ----------
    k
        How many classes to return, from 1 to the number of classes.

    Returns
    -------
    TopK
        A named tuple (index, log_prob), both with k in place of the number of classes. The most probable class comes first,
        and among equal ones the one with the smaller index; -1 and -inf follow if fewer than k classes have a probability
        above 0. log_prob is that of one draw, as in `anymax.log_prob`; it is differentiable, and fp32 for scores in half
        precision.

    Examples
    --------
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


@check_keywords(logits="x", key="generator")
@documented_like(every_sampler)
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

    The result is distributed like sequential draws with the probabilities of a map, each without the classes drawn before. Use it for
    diverse candidates, or for sampled negatives. Vieira 2014; Kool et al. 2019.

    Parameters
    ----------
    k
        How many classes to draw, from 1 to the number of classes.
    mapping
        The map, or its name; softmax by default.
    transform
        is applied to the scores first, as in `sample`.

    Returns
    -------
    TopK
        A named tuple (index, log_prob), both with k in place of the number of classes, in the order of the draws: exactly k
        different classes, or -1 and -inf at the end if fewer have a probability above 0. log_prob is that of each class as
        the first draw, as in `anymax.log_prob`; it is a constant for differentiation, and fp32 for scores in half
        precision.

    Examples
    --------
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
    """(log p of the transformed rows, classes last; the axis of the classes in x; the namespace)."""
    rows, mapping = read(who, mapping, x, axis, mask, transform)
    xp = namespace(rows)
    return log_p_rows(mapping, upcast(rows, xp), xp), check_axis(axis, rows.ndim), xp


def _best(key: Array, log_p: Array, k: int, axis: int, xp: Namespace) -> TopK:
    """The classes with the k largest keys, and their log p."""
    index = chosen(key, k, xp)
    found = at(log_p, index, xp)
    found = xp.where((index >= 0) | xp.isnan(found), found, -math.inf * xp.ones_like(found))
    index = xp.where(found > -math.inf, index, -xp.ones_like(index))  # NaN too
    return TopK(from_last(index, axis, xp), from_last(found, axis, xp))


@check_keywords(key="generator")
def speculative_accept(
    p_draft: AnyArray | Numbers, p_target: AnyArray | Numbers, tokens: Any, *, generator: Any = None
) -> Accepted:
    """Accept the beginning of a draft and draw the next token, distributed exactly as if every token had been drawn from the target.

    For speculative decoding: a cheap model drafts a few tokens, and the target model checks all of them in one step. A token x is
    accepted with probability `min(1, p_target(x) / p_draft(x))`; in place of the first rejected token, one is drawn from
    `max(p_target - p_draft, 0)`, normalised. The probabilities may come from any maps, truncated or not, if the draft was drawn from
    `p_draft`. Leviathan et al. 2023; Chen et al. 2023.

    Parameters
    ----------
    p_draft
        The probabilities that each token of the draft was drawn from, [..., T, classes].
    p_target
        The target's probabilities at the same places, [..., T, classes]; or [..., T + 1, classes], with those after the
        draft.
    tokens
        The draft, integers [..., T]; -1 at the end of a row whose draft is shorter.
    generator
        A generator or key, an integer seed, or a list of these, one per row; by default the global one of NumPy or torch.
        Row i, in C order, takes T + 1 numbers from it, as `sample` does with `num_samples`.

    Returns
    -------
    Accepted
        A named tuple (count, token), integers [...]: `tokens[..., :count]` are accepted, and `token` follows them. `token`
        is -1 if the whole draft is accepted and p_target has no probabilities after it, or if these are NaN or all 0.

    Examples
    --------
    >>> import numpy as np
    >>> draft, target = np.array([[0.5, 0.5], [0.9, 0.1]]), np.array([[0.5, 0.5], [0.0, 1.0], [0.0, 1.0]])
    >>> speculative_accept(draft, target, [1, 0], generator=0)
    Accepted(count=np.int64(1), token=np.int64(1))
    """
    refuse_sharded("speculative_accept", None, p_draft=p_draft, p_target=p_target, tokens=tokens)
    p, xp = _table(p_target, "p_target")
    q, _ = _table(beside(p_draft, p, "p_draft", xp), "p_draft")
    p, q = (stop_gradient(upcast(a, xp)) for a in (p, q))
    q = as_dtype(q, p.dtype, xp)
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
    target_p = at(p[..., :length, :], each, xp)[..., 0]
    draft_p = at(q, each, xp)[..., 0]
    refused = ~(drafted & (u[..., :length] * xp.astype(draft_p, u.dtype) < xp.astype(target_p, u.dtype)))
    end = length * xp.ones_like(tokens)
    count = xp.min(xp.where(refused, positions(tokens, tokens.dtype, xp), end), axis=-1, keepdims=True)
    all_accepted = count == length
    last = count - xp.astype(all_accepted, count.dtype)  # a valid place in the draft
    target_row = _row(p, count if p.shape[-2] > length else last, xp)
    draft_row = _row(q, last, xp)
    # after the end of the draft the token is drawn from the target's probabilities: subtract nothing
    draft_row = xp.where(
        all_accepted | (xp.take_along_axis(tokens, last, axis=-1) < 0), xp.zeros_like(draft_row), draft_row
    )
    rest = target_row - draft_row
    rest = xp.where(rest < 0, xp.zeros_like(rest), rest)
    rest = xp.where(total(rest, xp) == 0, target_row, rest)
    token = invert(rest, u[..., length:], xp)
    if p.shape[-2] == length:
        token = xp.where(all_accepted, -xp.ones_like(token), token)
    return Accepted(as_scalar(count[..., 0]), as_scalar(token[..., 0]))


def _row(table: Array, index: Array, xp: Namespace) -> Array:
    """table[..., index, :], for `index` [..., 1]."""
    wide = xp.broadcast_to(xp.expand_dims(index, axis=-1), (*index.shape[:-1], 1, table.shape[-1]))
    return xp.take_along_axis(table, wide, axis=-2)[..., 0, :]


def _table(p: Any, name: str) -> tuple[Array, Namespace]:
    p, xp = floats(p, name)
    if p.ndim < 2:
        raise ValueError(f"speculative_accept: {name} must be [..., T, classes], got the shape {tuple(p.shape)}")
    if not p.shape[-1]:
        raise ValueError(f"speculative_accept: {name} of shape {tuple(p.shape)} has no classes; at least one is needed")
    return p, xp
