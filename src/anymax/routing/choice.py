"""Which experts each token goes to, and with which weights."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, TypedDict

from .. import _array, kernels
from .._array import (
    Array,
    Namespace,
    decides,
    differentiates,
    eager,
    namespace,
    pick_axis,
    poison,
    stop_gradient,
    top,
    upcast,
)
from .._core.mapping import Mapping
from .._core.options import check_keywords
from .._core.rows import Rows, hide, prepare
from .._core.shards import refuse as refuse_sharded
from .._core.tables import Default, document
from .._core.typing import AnyArray, Numbers
from .._random.draws import at, check_k, largest
from ..kernels.selection import chosen, masked_as
from ..kernels.tasks import ROUTE, WHOLE
from ..sampling.most_probable import read_index
from ..sampling.results import Invalid, check_invalid, support_of, validated
from ..transforms.truncation import check_groups, fit_groups
from .scoring import Scoring


class Routes(NamedTuple):
    """The experts of each token, or the tokens of each expert, and their weights; -1 and 0 where there are fewer."""

    index: Any
    weight: Any


class SupportRoutes(NamedTuple):
    """The experts of token i, `ids[offsets[i]:offsets[i + 1]]` in ascending order, and their weights."""

    ids: Any
    offsets: Any
    weight: Any


class RouterOptions(TypedDict, total=False):
    """The options that routers share.

    Parameters
    ----------
    scores
        The outputs of the gate (logits), [..., experts]; -inf marks an expert that is not there.
    k
        How many experts each token goes to; not needed with `index`.
    scoring
        What makes values of the scores: "sigmoid" or "sqrtsoftplus" of each score by itself, or a map of the row by its name or as
        such, for example "softmax" or `anymax.Entmax(1.5)`.
    bias
        One number for each expert, or an array that broadcasts to the scores. It is added to the values for the choice alone, not
        for the weights, and has no gradient.
    axis, dim
        The axis of the experts, the last by default.
    mask
        Boolean, broadcastable to the scores, True = keep: an expert that is not kept is not chosen.
    routed_scaling_factor
        The weights are multiplied by this number.
    """

    bias: Any
    axis: Annotated[int, Default(-1)]
    dim: int | None
    mask: Any
    routed_scaling_factor: Annotated[float, Default(1.0)]


@check_keywords()
def route(
    scores: AnyArray | Numbers,
    k: int | None = None,
    scoring: Mapping | str = "softmax",
    *,
    bias: Any = None,
    by: Any = None,
    groups: int | None = None,
    keep_groups: int | None = None,
    group_by: int | str = 2,
    norm_topk_prob: bool = False,
    routed_scaling_factor: float = 1.0,
    index: Any = None,
    axis: int = -1,
    dim: int | None = None,
    mask: Any = None,
    invalid: Invalid = None,
) -> Routes:
    """The k experts of each token and their weights: the router of DeepSeek-V3, Mixtral, Qwen3, GLM, gpt-oss and others.

    The page "Routers" has the arguments for each model. The experts are those with the k largest values, plus the bias; the weights are
    their values without the bias. The value of an expert is `scoring` of the scores.

    Parameters
    ----------
    by
        Other numbers to choose by, in place of the values plus the bias; they broadcast to the scores.
    groups, keep_groups, group_by
        Split the experts into so many groups of equal size, and choose only from the `keep_groups` groups with the largest sums: of
        the `group_by` largest values (plus the bias) of each, 2 as in DeepSeek-V3, or "max" as in DeepSeek-V2. The experts of
        other groups are never chosen, also where the values that are left are below 0.
    norm_topk_prob
        Divide the weights by their sum. For softmax they are then the softmax of the chosen scores, as in Mixtral and gpt-oss.
    index
        Experts to use instead of a choice, integers [..., k] and -1 for none: to replay the choice of another model, or of the
        rollout of a policy. The weights are those of these scores and have their gradient.
    invalid
        What to give where a token has fewer than k experts, or NaN: None gives -1. "argmax" gives other experts with the weight 0,
        those with the largest scores, so that the k experts of each token differ and can be looked up at once; a row with NaN, such
        as one of padding, gets the experts 0 to k - 1, weights of 0 and no gradient. "raise" is an error, and is not possible
        in traced code.

    Returns
    -------
    Routes
        A named tuple (index, weight), both with k in the place of the experts, the expert with the largest value (plus the bias)
        first. -1 and 0 follow where a token has fewer than k: the others are masked, or `scoring` gives them exactly 0. In
        a row with NaN the experts are -1 and the weights NaN, and so they are in one with +inf where `scoring` is a map. The weights are
        fp32 for scores in half precision.

    Examples
    --------
    >>> import numpy as np
    >>> from anymax.routing import route
    >>> scores = np.array([[0.0, 2.0, 1.0, 1.0]])
    >>> route(scores, 2, norm_topk_prob=True).weight.round(3)
    array([[0.731, 0.269]])

    With a bias for the second expert of all, which is not part of its weight:

    >>> index, weight = route(scores, 2, "sigmoid", bias=np.array([1.0, 0.0, 0.0, 0.0]))
    >>> index, weight.round(3)
    (array([[0, 1]]), array([[0.5  , 0.881]]))
    """
    check_invalid("route", invalid)
    read, call, xp = read_router("route", scores, scoring, axis, dim, mask)
    if invalid == "argmax":
        call = call._replace(rows=read.sound(call.rows, xp))
    rows = upcast(call.rows, xp)
    n = rows.shape[-1]
    split = fit_groups("route", check_groups("route", groups, keep_groups, group_by), n)
    if index is None:
        if k is None:
            raise TypeError("route: give k, how many experts each token goes to, or index=, the experts")
        k = check_k("route", k, n)
        if by is not None and bias is not None:
            raise ValueError("route: give bias= or by=, which are two ways to choose; by takes values plus bias")
        routes = _in_one_kernel(call, read, k, split, bias, by, norm_topk_prob, routed_scaling_factor, xp)
        if routes is None:
            place = chosen(_compared(call, rows, read, bias, by, split, xp), k, xp, split)
            routes = _weighed(rows, place, read, True, norm_topk_prob, routed_scaling_factor, xp)
        if invalid is not None:
            routes = _with_others(*routes, rows, invalid, xp)
    else:
        for name, value in (("bias", bias), ("by", by), ("groups", split), ("invalid", invalid)):
            if value is not None:
                raise ValueError(f"route: {name}= is about the choice of experts, and index= gives them; leave one out")
        place, stray = read_index("route", index, rows, call.axis, k, xp)
        routes = _weighed(rows, place, read, False, norm_topk_prob, routed_scaling_factor, xp)
        routes = routes if stray is None else routes._replace(weight=poison(routes.weight, stray, xp))
    return Routes(*(_array.from_last(a, call.axis, xp) for a in routes))


def _compared(call: Rows, rows: Array, scoring: Scoring, bias: Any, by: Any, split: Any, xp: Namespace) -> Array:
    """What experts are chosen by, [..., experts]."""
    if by is None and bias is None and scoring.in_order and (split is None or split.most == 1):
        return rows
    values = scoring.constants(rows, xp) if by is None or scoring.gives_zeros else None
    zero = values == 0 if scoring.gives_zeros else None
    if by is not None:
        key = per_expert(call, by, "by", xp)
    elif bias is not None:
        key = plus_bias(values, per_expert(call, bias, "bias", xp))
    else:
        key = values
    return eligible(key, zero, rows, xp)


def eligible(key: Any, zero: Array | None, rows: Array, xp: Namespace) -> Array:
    """Numbers to choose experts by: -inf where `scoring` gives exactly `zero`, and where the scores have infinities and NaN these."""
    return masked_as(key if zero is None else hide(key, ~zero), rows, xp)


def _with_others(place: Array, weight: Array, rows: Array, invalid: Invalid, xp: Namespace) -> Routes:
    """The experts [..., k] with what `invalid` says in place of each -1, which come last, and the weight 0 there."""
    none = place < 0
    if invalid == "raise":
        return Routes(validated("route", place, rows, invalid, xp), weight)
    if decides(none) and not bool(xp.any(none)):
        return Routes(place, weight)
    k, ids = place.shape[-1], _array.positions(rows, place.dtype, xp)
    taken = xp.any(xp.expand_dims(place, axis=-1) == xp.expand_dims(ids, axis=-2), axis=-2)
    scores = stop_gradient(rows)
    # for those that are masked, which come before those that are taken
    low = xp.finfo(rows.dtype).min * xp.ones_like(scores)
    left = largest(hide(xp.where(scores > low, scores, low), ~taken), k, xp)
    at_left = _array.positions(place, place.dtype, xp) - xp.sum(xp.astype(~none, place.dtype), axis=-1, keepdims=True)
    others = at(left, at_left, xp)
    return Routes(xp.where(none, xp.astype(others, place.dtype), place), xp.where(none, xp.zeros_like(weight), weight))


def _in_one_kernel(
    call: Rows, scoring: Scoring, k: int, split: Any, bias: Any, by: Any, normalise: bool, factor: float, xp: Namespace
) -> Routes | None:
    """On a GPU: the experts by one kernel, and the weights too where no derivative is taken."""
    if by is not None:
        return None
    task = k, split or WHOLE
    engine = kernels.engine_of(ROUTE, task, call.rows)
    if engine is None:
        return None
    if bias is not None:
        bias = per_expert(call, bias, "bias", xp)
        if any(size > 1 and step for size, step in zip(bias.shape[:-1], bias.stride())):
            return None  # it differs between tokens
        bias = bias.reshape(-1, bias.shape[-1])[0].contiguous() if call.rows.numel() else None
    alone = not differentiates(call.rows)
    rows = stop_gradient(call.rows)
    routes = engine.route(task, rows, scoring.name, bias, weights=alone, normalise=normalise, factor=factor)
    if routes is None:
        return None
    index, weight = routes
    if alone:
        return Routes(index, weight)
    return _weighed(upcast(call.rows, xp), index, scoring, True, normalise, factor, xp)


def _weighed(
    rows: Array, place: Array, scoring: Scoring, choice: bool, normalise: bool, factor: float, xp: Namespace
) -> Routes:
    """The experts and their weights; an expert that was chosen and has no value is none."""
    weight = scoring.at(rows, place, xp, normalise)
    weight = weight if factor == 1.0 else weight * factor
    if choice:
        none = place[..., :1] < 0
        if not decides(none) or bool(xp.any(none)):
            weight = poison(weight, none & xp.isnan(top(rows, xp)), xp)
        lost = xp.isnan(weight) | (weight == 0) if scoring.gives_zeros else xp.isnan(weight)
        place = xp.where(lost, -xp.ones_like(place), place)
    return Routes(place, weight)


def read_router(who: str, scores: Any, scoring: Any, axis: Any, dim: Any, mask: Any) -> tuple[Scoring, Rows, Namespace]:
    """(what makes values of the scores, with parameters aligned to the rows; the rows; the namespace)."""
    refuse_sharded(who, scores)
    read = Scoring.read(who, scoring)
    call = prepare(read.mapping, scores, pick_axis(axis, dim), mask)
    return read._replace(mapping=call.mapping), call, namespace(call.rows)


def per_expert(call: Rows, value: Any, name: str, xp: Namespace) -> Array:
    """Numbers that broadcast to the scores, [..., experts], in fp32 or fp64; a vector has one for each expert."""
    rows = upcast(call.rows, xp)
    value = _array.like(_array.beside(value, rows, name, xp), rows, xp)
    value = stop_gradient(value)
    if value.ndim > 1:
        shape = list(rows.shape)
        shape.insert(call.axis, shape.pop())
        return xp.broadcast_to(_array.to_last(_array.fit_axes(value, tuple(shape), name), call.axis, xp), rows.shape)
    if value.ndim == 1 and value.shape[0] != rows.shape[-1]:
        raise ValueError(f"{name} has {value.shape[0]} numbers and the scores have {rows.shape[-1]} experts")
    return xp.broadcast_to(xp.reshape(value, (1,) * (rows.ndim - value.ndim) + tuple(value.shape)), rows.shape)


def plus_bias(values: Any, bias: Array) -> Array:
    """The values, an array that nobody else has, plus the bias."""
    if not decides(values):
        return values + bias
    values += bias  # in place, without an array more
    return values


@check_keywords()
def expert_choice(
    scores: AnyArray | Numbers,
    capacity: int,
    scoring: Mapping | str = "softmax",
    *,
    bias: Any = None,
    routed_scaling_factor: float = 1.0,
    axis: int = -1,
    dim: int | None = None,
    mask: Any = None,
) -> Routes:
    """The tokens that each expert takes: the `capacity` tokens with the largest values. Zhou et al. 2022.

    Every expert has the same load, and a token goes to any number of experts. The choice depends on all tokens of the sequence,
    so it is for encoders and training, not for generation.

    Parameters
    ----------
    scores
        The outputs of the gate, [..., tokens, experts].
    capacity
        How many tokens each expert takes, at most their number.

    Returns
    -------
    Routes
        A named tuple (index, weight), [..., experts, capacity]: the tokens of each expert, the largest value first, and their
        weights; -1 and 0 follow where an expert finds fewer tokens with a value above 0. Where a token has NaN for an expert, this
        expert has -1 and NaN.

    Examples
    --------
    >>> import numpy as np
    >>> from anymax.routing import expert_choice
    >>> scores = np.array([[2.0, 0.0], [1.0, 0.0], [0.0, 3.0]])
    >>> expert_choice(scores, 1).index
    array([[0],
           [2]])
    """
    read, call, xp = read_router("expert_choice", scores, scoring, axis, dim, mask)
    rows = upcast(call.rows, xp)
    if rows.ndim < 2:
        raise ValueError(f"expert_choice: scores must be [..., tokens, experts], got the shape {tuple(rows.shape)}")
    values = read.values(rows, xp)
    key = stop_gradient(values)
    zero = ~(key > 0) & ~xp.isnan(key)
    if bias is not None:
        key = key + per_expert(call, bias, "bias", xp)  # the values are weights too
    turned, key = (_array.to_last(a, a.ndim - 2, xp) for a in (values, eligible(key, zero, rows, xp)))
    place = chosen(key, check_k("expert_choice", capacity, rows.shape[-2]), xp)
    none = place < 0
    weight = xp.where(none, xp.zeros_like(key[..., :1]), at(turned, place, xp))
    weight = poison(weight, xp.isnan(top(key, xp)), xp)
    weight = weight if routed_scaling_factor == 1.0 else weight * routed_scaling_factor
    return Routes(xp.where(none, -xp.ones_like(place), place), weight)


@check_keywords({"k": "leave it out, or use route, which takes k: the scores say how many experts there are"})
def route_support(
    scores: AnyArray | Numbers,
    scoring: Mapping | str = "entmax15",
    *,
    routed_scaling_factor: float = 1.0,
    axis: int = -1,
    dim: int | None = None,
    mask: Any = None,
) -> SupportRoutes:
    """The support of each token, all experts that a sparse map gives a weight, as ragged rows (CSR): as many as the token needs.

    `route(scores, k, "entmax15")` has at most k experts in arrays of one shape, for programs that are compiled.

    Returns
    -------
    SupportRoutes
        A named tuple (ids, offsets, weight): the experts of token i, in C order, are `ids[offsets[i]:offsets[i + 1]]`, in ascending
        order, and the weights, which sum to 1 for each token, are at the same places. The weights have gradients.

    Examples
    --------
    >>> from anymax.routing import route_support
    >>> ids, offsets, weight = route_support([[2.0, 1.5, -1.0], [0.0, 3.0, 0.0]], "sparsemax")
    >>> ids, offsets, weight
    (array([0, 1, 1]), array([0, 2, 3]), array([0.75, 0.25, 1.  ]))
    """
    read, call, xp = read_router("route_support", scores, scoring, axis, dim, mask)
    rows = upcast(call.rows, xp)
    if not eager(rows):
        raise TypeError(
            "route_support: how many experts there are depends on the scores; where they are traced (jit) use "
            "route(scores, k, scoring), which has at most k"
        )
    values = read.values(rows, xp)
    support = support_of(stop_gradient(values), xp)
    flat = xp.nonzero(xp.reshape(stop_gradient(values) > 0, (-1,)))[0]
    weight = xp.take(xp.reshape(values, (-1,)), flat, axis=0)
    weight = weight if routed_scaling_factor == 1.0 else weight * routed_scaling_factor
    return SupportRoutes(support.ids, support.offsets, weight)


document(globals(), RouterOptions)
