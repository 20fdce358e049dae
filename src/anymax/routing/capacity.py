"""Experts with a limited number of places: which tokens get one."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .. import _array
from .._array import (
    Array,
    asarray,
    counts,
    device_of,
    is_floating,
    is_integer,
    namespace,
    running_sum,
    stop_gradient,
    sums_at,
)
from .._core.classes import known_index
from .._core.options import check_keywords


class Capacity(NamedTuple):
    """Which choices of tokens are kept by experts with a limited number of places."""

    keep: Any  # like index: True where the expert has a place for the token
    place: Any  # like index: the place, from 0 to capacity - 1; -1 where there is none
    dropped: Any  # without the last axis: True for a token that chose experts, and none has a place for it
    load: Any  # how many tokens chose each expert


@check_keywords()
def limit_capacity(index: Any, capacity: int, num_experts: int, *, priority: Any = None) -> Capacity:
    """Give each expert at most `capacity` tokens, in order; the others are named, so that the caller can pass them on unchanged.

    First choices come before second ones, and of equal choices the first token (GShard, Switch). All leading axes together are the tokens.

    Parameters
    ----------
    index
        The experts of each token, integers [..., k], -1 for none, as `route` gives them. Where values can't be read (on a GPU, in
        traced code) an index that is out of range counts as none; elsewhere it is an error.
    capacity
        How many tokens an expert takes, at least 0.
    priority
        One number for each token, [...]: tokens with a larger one come first, as in batch-prioritized routing (Riquelme et al. 2021).

    Returns
    -------
    Capacity
        A named tuple (keep, place, dropped, load). The row of token t in the input of its j-th expert is `place[t, j]`.

    Examples
    --------
    >>> import numpy as np
    >>> from anymax.routing import limit_capacity
    >>> limited = limit_capacity(np.array([[0], [0], [1], [0]]), capacity=2, num_experts=2)
    >>> limited.place[:, 0], limited.dropped, limited.load
    (array([ 0,  1,  0, -1]), array([False, False, False,  True]), array([3, 1]))
    """
    index = asarray(index, "index")
    xp = namespace(index)
    if not is_integer(index) or not index.ndim:
        raise TypeError(
            f"limit_capacity: index must be integers [..., k], the experts of each token, got {index.dtype} {tuple(index.shape)}"
        )
    for name, value, least in (("capacity", capacity, 0), ("num_experts", num_experts, 1)):
        if not _array.is_int(_array.number(value)) or value < least:
            raise ValueError(f"limit_capacity: {name} must be an integer of at least {least}, got {value!r}")
    index = counts(index, xp)
    index, _ = known_index("limit_capacity: index", index, num_experts, xp)
    *lead, k = index.shape
    tokens = math.prod(lead)
    flat = xp.reshape(index, (tokens, k))
    order = None
    if priority is not None:
        priority = stop_gradient(_array.beside(priority, index, "priority", xp))
        if tuple(priority.shape) != tuple(lead):
            raise ValueError(
                f"limit_capacity: priority must have the shape {tuple(lead)}, one number a token, got {tuple(priority.shape)}"
            )
        priority = xp.reshape(priority, (tokens,))
        # the negative of an integer may not exist
        order = _sorted(-priority if is_floating(priority) else ~counts(priority, xp), xp)
        flat = xp.take(flat, order, axis=0)
    by_choice = xp.reshape(xp.permute_dims(flat, (1, 0)), (-1,))  # all first choices, then all second ones
    place = xp.permute_dims(xp.reshape(_places(by_choice, num_experts, xp), (k, tokens)), (1, 0))
    if order is not None:
        place = xp.take(place, _sorted(order, xp), axis=0)
    place = xp.reshape(place, tuple(index.shape))
    keep = (index >= 0) & (place < capacity)
    dropped = xp.any(index >= 0, axis=-1) & ~xp.any(keep, axis=-1)
    load = sums_at(xp.reshape(index, (-1,)), None, num_experts, xp)
    return Capacity(keep, xp.where(keep, place, -xp.ones_like(place)), dropped, load)


def _sorted(a: Array, xp: Any) -> Array:
    """The order of a, equal numbers by their place."""
    return xp.argsort(a, axis=0, stable=True)


def _places(experts: Array, n: int, xp: Any) -> Array:
    """How many entries before each one have its expert."""
    order = _sorted(xp.where(experts < 0, n * xp.ones_like(experts), experts), xp)
    load = sums_at(experts, None, n, xp)
    starts = xp.concat([running_sum(load, xp) - load, xp.sum(load, keepdims=True)])
    ranked = xp.take(experts, order, axis=0)
    ranked = xp.where(ranked < 0, n * xp.ones_like(ranked), ranked)
    ranks = xp.arange(experts.shape[0], dtype=ranked.dtype, **device_of(experts)) - xp.astype(
        xp.take(starts, ranked, axis=0), ranked.dtype
    )
    return xp.take(ranks, _sorted(order, xp), axis=0)
