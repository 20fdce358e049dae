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
    to_last,
    total,
    upcast,
)
from .._core.classes import PADDING
from .._core.mapping import Mapping
from .._core.options import check_keywords
from .._core.rows import prepare_axes
from .._core.shards import refuse as refuse_sharded
from .._core.tables import document
from .._core.typing import AnyArray, Axes, Numbers
from .._random.draws import at, check_k, invert, uniforms
from .._random.noises import with_noise
from ..functional.draws import log_p_of_draw
from ..kernels.selection import chosen
from ..likelihood.terms import read
from ..mappings import Softmax
from .results import Invalid, SampleOptions, check_invalid, validated


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
def topk_log_prob(
    mapping: Mapping | str,
    x: AnyArray | Numbers,
    k: int,
    transform: Callable[[Any], Any] | None = None,
    *,
    axis: Axes = -1,
    dim: Axes = None,
    mask: Any = None,
    invalid: Invalid = None,
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
    check_invalid("topk_log_prob", invalid)
    axes = pick_axis(axis, dim)
    log_p, place, xp = _log_p("topk_log_prob", mapping, x, transform, axes, mask)
    index = chosen(log_p, check_k("topk_log_prob", k, log_p.shape[-1]), xp)
    found = _with_log_p(index, log_p, place, xp)
    return _valid("topk_log_prob", found, mapping, x, axes, mask, invalid, xp)


@check_keywords(logits="x", key="generator")
def gumbel_topk(
    x: AnyArray | Numbers,
    k: int,
    *,
    mapping: Mapping | str | None = None,
    transform: Callable[[Any], Any] | None = None,
    generator: Any = None,
    axis: Axes = -1,
    dim: Axes = None,
    mask: Any = None,
    invalid: Invalid = None,
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
    check_invalid("gumbel_topk", invalid)
    mapping = Softmax() if mapping is None else mapping
    axes = pick_axis(axis, dim)
    log_p, place, xp = _log_p("gumbel_topk", mapping, x, transform, axes, mask)
    k, log_p = check_k("gumbel_topk", k, log_p.shape[-1]), stop_gradient(log_p)
    with quiet(log_p):
        index = with_noise(lambda rows, added: chosen(rows + added, k, xp), "gumbel", log_p, log_p.shape[-1], generator)
    return _valid("gumbel_topk", _with_log_p(index, log_p, place, xp), mapping, x, axes, mask, invalid, xp)


def _log_p(
    who: str, mapping: Mapping | str, x: Any, transform: Any, axis: Axes, mask: Any
) -> tuple[Array, int, Namespace]:
    """(log p of the transformed rows, classes last; the axis of the classes in a result; the namespace)."""
    given = read(who, mapping, x, axis, mask, transform)
    xp = namespace(given.rows)
    given = given.over_all(upcast(given.rows, xp))
    log_p = log_p_of_draw(given.mapping, given.rows, xp)
    return given.seen(log_p), given.axis, xp


def _with_log_p(index: Array, log_p: Array, axis: int, xp: Namespace) -> TopK:
    """The classes [..., k] and their log p."""
    found = at(log_p, index, xp)
    found = xp.where((index >= 0) | xp.isnan(found), found, -math.inf * xp.ones_like(found))
    index = xp.where(found > -math.inf, index, -xp.ones_like(index))  # NaN too
    return TopK(from_last(index, axis, xp), from_last(found, axis, xp))


def _valid(who: str, found: TopK, mapping: Any, x: Any, axis: Axes, mask: Any, invalid: Invalid, xp: Namespace) -> TopK:
    """What was found, with what `invalid` says in place of -1."""
    if invalid is None:
        return found
    given = prepare_axes(mapping, x, axis, mask)
    index = validated(who, to_last(found.index, given.axis, xp), given.rows, invalid, xp)
    return TopK(from_last(index, given.axis, xp), found.log_prob)


@check_keywords(key="generator")
def speculative_accept(
    p_draft: AnyArray | Numbers | None,
    p_target: AnyArray | Numbers,
    tokens: Any,
    *,
    generator: Any = None,
    invalid: Invalid = None,
) -> Accepted:
    """Accept the beginning of a draft and draw the next token, distributed exactly as if every token had been drawn from the target.

    For speculative decoding: a cheap model drafts a few tokens, and the target model checks all of them in one step. A token x is
    accepted with probability `min(1, p_target(x) / p_draft(x))`; in place of the first rejected token, one is drawn from
    `max(p_target - p_draft, 0)`, normalised. The probabilities may come from any maps, truncated or not, if the draft was drawn from
    `p_draft`. `recovered_tokens` draws the tokens in place of rejected ones alone. Leviathan et al. 2023; Chen et al. 2023.

    Parameters
    ----------
    p_draft
        The probabilities that each token of the draft was drawn from, [..., T, classes]; or None for a draft that was not drawn, such
        as one from n-grams of the prompt, whose tokens count as certain.
    p_target
        The target's probabilities at the same places, [..., T, classes]; or [..., T + 1, classes], with those after the
        draft.
    tokens
        The draft, integers [..., T]; -100, or -1, at the end of a row whose draft is shorter.
    generator
        A generator or key, an integer seed, or a list of these, one per row; by default the global one of NumPy or torch.
        Row i, in C order, takes T + 1 numbers from it, as `sample` does with `num_samples`.

    Returns
    -------
    Accepted
        A named tuple (count, token), integers [...]: `tokens[..., :count]` are accepted, and `token` follows them. `token`
        is -1 if the whole draft is accepted and p_target has no probabilities after it, whatever `invalid` says, or if these are NaN
        or all 0.

    Examples
    --------
    >>> import numpy as np
    >>> draft, target = np.array([[0.5, 0.5], [0.9, 0.1]]), np.array([[0.5, 0.5], [0.0, 1.0], [0.0, 1.0]])
    >>> speculative_accept(draft, target, [1, 0], generator=0)
    Accepted(count=np.int64(1), token=np.int64(1))
    """
    check_invalid("speculative_accept", invalid)
    q, p, tokens, xp = _draft("speculative_accept", p_draft, p_target, tokens, (0, 1))
    return _accept(q, p, tokens, generator, invalid, xp)


@check_keywords(key="generator")
def recovered_tokens(
    p_draft: AnyArray | Numbers | None,
    p_target: AnyArray | Numbers,
    tokens: Any,
    *,
    generator: Any = None,
    invalid: Invalid = None,
) -> Any:
    """The tokens that would take the places of rejected ones, one for each token of a draft: drawn from `max(p_target - p_draft, 0)`.

    For an engine that accepts and rejects by itself, such as vLLM's rejection sampler (`recovered_token_ids`). `speculative_accept` does
    both. A token that is accepted with probability `min(1, p_target / p_draft)` and otherwise replaced by the one of its place is
    distributed as the target. Leviathan et al. 2023; Chen et al. 2023.

    Parameters
    ----------
    p_draft
        The probabilities that each token of the draft was drawn from, [..., T, classes]; or None for a draft that was not drawn, such
        as one from n-grams of the prompt: then the drafted token itself is left out.
    p_target
        The target's probabilities at the same places, [..., T, classes].
    tokens
        The draft, integers [..., T]; -100, or -1, at the end of a row whose draft is shorter: there the token is drawn from p_target.
    generator
        A generator or key, an integer seed, or a list of these, one per row; by default the global one of NumPy or torch.
        Row i, in C order, takes T numbers from it.

    Returns
    -------
    Any
        Integers [..., T], an array of the kind of p_target. Where p_target is nowhere above p_draft, so that no token is rejected, the
        token is drawn from p_target; -1 where p_target is NaN or all 0.

    Examples
    --------
    >>> import numpy as np
    >>> draft, target = np.array([[0.5, 0.5, 0.0], [0.2, 0.2, 0.6]]), np.array([[0.3, 0.5, 0.2], [0.2, 0.4, 0.4]])
    >>> recovered_tokens(draft, target, [0, 2], generator=0)
    array([2, 1])
    >>> recovered_tokens(None, target, [1, 1], generator=0)
    array([2, 0])
    """
    check_invalid("recovered_tokens", invalid)
    q, p, tokens, xp = _draft("recovered_tokens", p_draft, p_target, tokens, (0,))
    length = tokens.shape[-1]
    u = uniforms(p[..., 0, :], length, generator, xp)
    rest = _rest(p, q, tokens, xp)
    token = invert(rest, xp.expand_dims(u, axis=-1), xp)
    return validated("recovered_tokens", token, p, invalid, xp)[..., 0]


def _draft(
    who: str, p_draft: Any, p_target: Any, tokens: Any, after: tuple[int, ...]
) -> tuple[Array | None, Array, Array, Namespace]:
    """(p_draft [..., T, n] or None, p_target [..., T, n], tokens [..., T], the namespace), checked; p_target has `after` more places."""
    refuse_sharded(who, None, p_draft=p_draft, p_target=p_target, tokens=tokens)
    p, xp = _table(who, p_target, "p_target")
    q = None if p_draft is None else _table(who, beside(p_draft, p, "p_draft", xp), "p_draft")[0]
    p = stop_gradient(upcast(p, xp))
    q = None if q is None else as_dtype(stop_gradient(upcast(q, xp)), p.dtype, xp)
    tokens = beside(tokens, p, "tokens", xp)
    if not is_integer(tokens):
        raise TypeError(f"{who}: tokens must be integers, the draft, got {tokens.dtype}")
    *lead, places, n = p.shape
    length = tokens.shape[-1] if tokens.ndim else 0
    fits = tuple(tokens.shape) == (*lead, length) and (q is None or tuple(q.shape) == (*lead, length, n))
    if not fits or places - length not in after or not length:
        target = "T or T + 1" if len(after) > 1 else "T"
        raise ValueError(
            f"{who}: p_draft [..., T, classes], p_target [..., {target}, classes] and tokens [..., T] must belong together, T at least 1; "
            f"got {None if q is None else tuple(q.shape)}, {tuple(p.shape)} and {tuple(tokens.shape)}"
        )
    if known_any(((tokens < -1) & (tokens != PADDING)) | (tokens >= n), xp):
        raise ValueError(
            f"{who}: a token is out of range for {n} classes; tokens are 0 to {n - 1}, and {PADDING}, or -1, where a draft is shorter"
        )
    return q, p, counts(tokens, xp), xp


def _accept(q: Array | None, p: Array, tokens: Array, generator: Any, invalid: Invalid, xp: Namespace) -> Accepted:
    """q [..., T, n] or None, p [..., T or T + 1, n], tokens [..., T]."""
    length = tokens.shape[-1]
    u = uniforms(p[..., 0, :], length + 1, generator, xp)
    drafted = tokens >= 0
    each = xp.expand_dims(tokens, axis=-1)
    target_p = at(p[..., :length, :], each, xp)[..., 0]
    draft_p = xp.ones_like(target_p) if q is None else at(q, each, xp)[..., 0]
    refused = ~(drafted & (u[..., :length] * xp.astype(draft_p, u.dtype) < xp.astype(target_p, u.dtype)))
    end = length * xp.ones_like(tokens)
    count = xp.min(xp.where(refused, positions(tokens, tokens.dtype, xp), end), axis=-1, keepdims=True)
    all_accepted = count == length
    last = count - xp.astype(all_accepted, count.dtype)  # a valid place in the draft
    target_row = _row(p, count if p.shape[-2] > length else last, xp)
    # after the end of the draft the token is drawn from the target's probabilities: no token of the draft is in its place
    drafted_there = xp.where(all_accepted, -xp.ones_like(count), xp.take_along_axis(tokens, last, axis=-1))
    rest = _rest(target_row, None if q is None else _row(q, last, xp), drafted_there[..., 0], xp)
    token = validated("speculative_accept", invert(rest, u[..., length:], xp), target_row, invalid, xp)
    if p.shape[-2] == length:
        token = xp.where(all_accepted, -xp.ones_like(token), token)
    return Accepted(as_scalar(count[..., 0]), as_scalar(token[..., 0]))


def _rest(p: Array, q: Array | None, tokens: Array, xp: Namespace) -> Array:
    """What a rejected token is drawn from, not divided by its sum: max(p - q, 0), or p where this is all 0 or the token is -1.

    p and q [..., n], tokens [...]; without q the token's own probability was 1.
    """
    token = xp.expand_dims(tokens, axis=-1)
    if q is None:
        q = xp.where(positions(p, tokens.dtype, xp) == token, p, xp.zeros_like(p))
    rest = p - xp.where(token < 0, xp.zeros_like(q), q)
    rest = xp.where(rest < 0, xp.zeros_like(rest), rest)
    return xp.where(total(rest, xp) == 0, p, rest)


def _row(table: Array, index: Array, xp: Namespace) -> Array:
    """table[..., index, :], for `index` [..., 1]."""
    wide = xp.broadcast_to(xp.expand_dims(index, axis=-1), (*index.shape[:-1], 1, table.shape[-1]))
    return xp.take_along_axis(table, wide, axis=-2)[..., 0, :]


def _table(who: str, p: Any, name: str) -> tuple[Array, Namespace]:
    p, xp = floats(p, name)
    if p.ndim < 2:
        raise ValueError(f"{who}: {name} must be [..., T, classes], got the shape {tuple(p.shape)}")
    if not p.shape[-1]:
        raise ValueError(f"{who}: {name} of shape {tuple(p.shape)} has no classes; at least one is needed")
    return p, xp


document(globals(), SampleOptions)
