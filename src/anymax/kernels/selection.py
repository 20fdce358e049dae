"""The ids of the k largest scores of each row, the largest first: what decoders and routers choose."""

from __future__ import annotations

import math
from typing import NamedTuple

from .._array import Array, Namespace, compiling, decides, quiet, stop_gradient, top, upcast
from .._core.rows import hide
from .._random.draws import at, largest
from .._random.truncation import group_keep
from . import native, triton
from .arrays import arrays_of, room_in
from .choice import refuse_other


class Groups(NamedTuple):
    """Equal blocks of the classes: only the classes of the blocks with the largest sums are chosen from."""

    count: int
    keep: int  # how many of them are chosen from
    most: int  # the sum of a group is that of so many of its largest scores


_WHOLE = Groups(1, 1, 1)


def chosen(x: Array, k: int, xp: Namespace, groups: Groups | None = None) -> Array:
    """The ids of the k largest scores, [..., k], in descending order, without a derivative; equal scores by their place.

    Halves are compared in fp32. -1 stands where a row has fewer scores above -inf, and in all of a row with a NaN.
    """
    x = stop_gradient(x)
    if groups is not None and groups.keep == groups.count:
        groups = None
    if (index := _by_engine(x, k, groups)) is not None:
        return index
    x = upcast(x, xp)
    if groups is not None:
        x = hide(x, group_keep(x, groups.count, groups.keep, groups.most, xp))
    nan = xp.isnan(top(x, xp))
    index = largest(xp.where(nan, xp.zeros_like(x), x), k, xp)
    return xp.where(nan | (at(x, index, xp) == -math.inf), -xp.ones_like(index), index)


def masked_as(key: Array, rows: Array, xp: Namespace) -> Array:
    """Other scores to choose by: where the rows have infinities and NaN, these."""
    rows = stop_gradient(rows)
    with quiet(rows):
        if decides(rows) and bool(xp.isfinite(xp.sum(rows))):  # the usual case
            return key
        return xp.where(xp.isfinite(rows), key, rows)


def chosen_mask(x: Array, k: int, xp: Namespace, groups: Groups | None = None) -> Array | None:
    """True at the k largest scores, and in a row with a NaN at all above -inf; None where no engine computes it."""
    index = _by_engine(x, k, groups)
    if index is None:
        return None
    first = index[..., :1]
    mask = arrays_of(x).scattered(xp.where(index < 0, xp.where(first < 0, xp.zeros_like(first), first), index), x)
    return xp.where(first < 0, x != -math.inf, mask)


def _by_engine(x: Array, k: int, groups: Groups | None) -> Array | None:
    """The ids by the C++ engine or on a GPU by Triton; None where neither takes these arrays."""
    if compiling():
        return None
    gpu = triton.router_of(x)
    if gpu is not None and x.ndim and 1 <= k <= x.shape[-1] and gpu.takes(x, k, groups or _WHOLE):
        return gpu.choose(x, k, groups or _WHOLE)[0]
    if refuse_other(native.ENGINE.name) or native.refuse_array(x):
        return None
    if not x.ndim or not 1 <= k <= x.shape[-1]:
        return None
    arrays = arrays_of(x)
    index = room_in(arrays, (*x.shape[:-1], k), "int64")
    if not math.prod(x.shape):
        return index
    made = native.engine_for(x).choose(arrays.contiguous(x), k, *(groups or _WHOLE), index)
    return None if made is None else index


class Routed(NamedTuple):
    """Ids and weights, [..., k] each."""

    index: Array
    weight: Array


def routed(
    x: Array,
    k: int,
    groups: Groups | None,
    scoring: str,
    bias: Array | None,
    *,
    weights: bool,
    normalise: bool,
    factor: float,
) -> Routed | None:
    """A router in one kernel on a GPU, without a derivative; None where there is none for these scores.

    scoring: "sigmoid", "sqrtsoftplus" or "softmax". bias: one number for each class. weights: whether they are asked for.
    """
    if compiling() or (gpu := triton.router_of(x := stop_gradient(x))) is None:
        return None
    if scoring not in gpu.SCORINGS or not gpu.takes(x, k, groups or _WHOLE):
        return None
    return Routed(*gpu.choose(x, k, groups or _WHOLE, scoring, bias, weights, normalise, factor))
