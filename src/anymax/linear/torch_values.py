"""torch: the results of an output layer, from the few scores that each row keeps, or from softmax's logsumexp."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .._array import Array, Namespace, is_array, known, wide_dtype
from .._core.mapping import Mapping
from .._core.separable import Separable
from ..autodiff.torch import BRIDGE
from ..likelihood.terms import terms_of
from ..mappings import Softmax, SparseSoftmax
from ..thresholds import tau_and_support
from . import torch_backward
from .layer import Layer
from .per_row import Thresholds, loss_of
from .torch_groups import by_rows

_SOFTMAX = Softmax()


def values(
    layer: Layer, index: Array, out: Array, weight: Array | None, per_row: Any, chunk: int | None, xp: Namespace
) -> Array | None:
    """One number for each row, 0 for rows in `out`; None if these ways do not apply, as when all scores of a row are needed at once."""
    if not torch_backward.runs_eagerly(layer, weight):
        return None
    of = _of_softmax if layer.mapping.is_softmax else _of_kept if _bound(layer.mapping, xp) is not None else None
    if of is None:
        return None
    if per_row.smoothing and layer.keep is not None and layer.keep.shape[0] != 1:
        return None
    if not bool(out.any()):
        return of(layer, index, weight, per_row, chunk, xp) if layer.rows else None
    rows = xp.nonzero(~out)[0]
    if not rows.shape[0]:
        return None
    value = of(layer.part(rows), index[rows], weight, per_row, chunk, xp)
    return xp.zeros(layer.rows, dtype=value.dtype, device=value.device).index_copy(0, rows, value)


def thresholds(layer: Layer, chunk: int | None, xp: Namespace) -> tuple[Array, Array] | None:
    """(tau, the size of the support) of each row; None as in `values`."""
    if not torch_backward.runs_eagerly(layer) or not layer.rows:
        return None
    if layer.mapping.is_softmax:
        first = xp.zeros(layer.rows, dtype=xp.int64, device=layer.x.device)
        two = torch_backward.of_softmax(layer, first, None, chunk)[0]
        size = xp.full_like(first, layer.classes)
        keep = layer.kept_classes(xp)
        return xp.logaddexp(two[:, 0], two[:, 1]), size if keep is None else xp.sum(
            xp.broadcast_to(keep, (layer.rows, layer.classes)), axis=1
        )
    bound = _bound(layer.mapping, xp)
    if bound is None:
        return None
    held = torch_backward.kept(layer, None, bound, False, chunk)
    tau, size = tau_and_support(layer.mapping, held.value, xp)
    full = xp.nonzero(held.full)[0]
    tau, size = tau[:, 0], size[:, 0]
    if full.shape[0]:
        tau[full], size[full] = by_rows(layer.part(full), Thresholds(), None, None, chunk)
    return tau, size


# -- softmax -------------------------------------------------------------------------------------------------------------------------


def _of_softmax(
    layer: Layer, index: Array, weight: Array | None, per_row: Any, chunk: int | None, xp: Namespace
) -> Array:
    cross_entropy = loss_of(layer.mapping) == "nll"
    u = _spread(layer, weight if cross_entropy else None, per_row, xp)
    two, even = torch_backward.of_softmax(layer, index, u, chunk, per_row.least)
    place = xp.zeros_like(index)
    if per_row.margin is not None:
        moved = _moved(two[:, :1], per_row)
        two = xp.concat([moved, two[:, 1:]], axis=1)
    if per_row.log_prob:
        return terms_of(_SOFTMAX, two, place[:, None], xp).log_p[:, 0]
    value = per_row.loss(_SOFTMAX, two, place)
    if u is None:
        return value if weight is None else _times(value, weight[index], xp)
    if not cross_entropy:
        return _smoothed(layer, value, two[:, 0], even, index, weight, per_row, xp)
    level = two[:, 0] + value  # logsumexp of the row
    share = 1.0 - per_row.smoothing if weight is None else (1.0 - per_row.smoothing) * weight[index]
    return share * value + per_row.smoothing * (xp.sum(u) * level - even)


# -- sparse maps ---------------------------------------------------------------------------------------------------------------------


def _bound(mapping: Mapping, xp: Namespace) -> Callable[..., Array] | None:
    """A function that gives, from any scores of the rows, a lower bound [rows, 1] of the scores that may have p > 0; or None."""
    if isinstance(mapping, SparseSoftmax):
        return None if mapping.k is None or is_array(mapping.k) else _kth
    if not isinstance(mapping, Separable) or not mapping.facts.sparse or not mapping.sums_to_one:
        return None
    params = [p for p in mapping.params().values() if not known(p)]
    if params:  # on a GPU, where reading them would wait
        return None
    one = next((xp.ones_like(p) for p in mapping.params().values()), None)
    one = xp.ones(1) if one is None else one.detach()
    if mapping.ceiling(one, xp) is not None:
        return None
    reach = _reach(mapping, one, xp)
    return _below_threshold if bool(xp.all((reach > 0) & (reach < math.inf))) else None


def _reach(mapping: Mapping, one: Array, xp: Namespace) -> Array:
    """How far below the largest score of its row a class with p > 0 can be."""
    mapping = mapping.frozen()
    return mapping.slope(one, xp) - mapping.slope(0.0 * one, xp)  # type: ignore[attr-defined]


def _slack(x: Array, xp: Namespace) -> Array:
    """A margin for the rounding errors of a bound."""
    return 64.0 * float(xp.finfo(x.dtype).eps) * (1.0 + xp.abs(x))


def _below_threshold(value: Array, layer: Layer, xp: Namespace) -> Array:
    """The threshold of these scores, less rounding: it is at most that of all classes, since more classes only raise it."""
    tau = BRIDGE.threshold(layer.mapping, value)
    return tau - _slack(tau, xp)


def _kth(s: Array, layer: Layer, xp: Namespace) -> Array:
    """A bound just below the k-th largest, so that all scores equal to it stay: the map keeps the first of them."""
    k = layer.mapping.k  # type: ignore[attr-defined]
    if s.shape[1] < k:
        return xp.full((s.shape[0], 1), -math.inf, device=s.device)
    low = s.topk(k, dim=1).values[:, -1:]
    low = low if low.dtype == xp.float64 else xp.astype(low, xp.float32)
    return low - _slack(low, xp)


def _of_kept(layer: Layer, index: Array, weight: Array | None, per_row: Any, chunk: int | None, xp: Namespace) -> Array:
    bound = _bound(layer.mapping, xp)
    assert bound is not None
    held: Any = torch_backward.kept(layer, index, bound, per_row.margin is not None, chunk)
    if not bool(held.full.any()):
        return _of_scores(layer, held, index, weight, per_row, xp)
    full, rest = (xp.nonzero(part)[0] for part in (held.full, ~held.full))
    dense = by_rows(layer.part(full), per_row, index[full], weight, chunk)
    if not rest.shape[0]:
        return dense
    sparse_rows = type(held)(held.value[rest], held.index[rest], held.at[rest], held.full[rest])
    sparse = _of_scores(layer.part(rest), sparse_rows, index[rest], weight, per_row, xp)
    value = xp.zeros(layer.rows, dtype=sparse.dtype, device=sparse.device)
    return value.index_copy(0, full, dense).index_copy(0, rest, sparse)


def _of_scores(layer: Layer, held: Any, index: Array, weight: Array | None, per_row: Any, xp: Namespace) -> Array:
    u = _spread(layer, None, per_row, xp)
    s, even = torch_backward.scores_of(layer, held, u)
    at = held.at[:, None]
    own = s.gather(1, at)
    if per_row.margin is not None:
        s = s.scatter(1, at, _moved(own, per_row))
    if per_row.log_prob:
        return terms_of(layer.mapping, s, at, xp).log_p[:, 0]
    value = per_row.loss(layer.mapping, s, held.at)
    if u is not None:
        return _smoothed(layer, value, own[:, 0], even, index, weight, per_row, xp)
    return value if weight is None else _times(value, weight[index], xp)


# -- helpers of both ---------------------------------------------------------------------------------------------------------------


def _times(value: Array, factor: Array, xp: Namespace) -> Array:
    """value * factor; 0 where the factor is 0, even if the value is infinite."""
    return xp.where(factor == 0, xp.zeros_like(value), value * factor)


def _moved(own: Array, per_row: Any) -> Array:
    """The target's score with its margin."""
    cosines = own / per_row.scale
    return per_row.scale * per_row.margin(cosines, (cosines[:, 0] * 0).to(int), -1)


def _spread(layer: Layer, weight: Array | None, per_row: Any, xp: Namespace) -> Array | None:
    """The share that label smoothing gives to each class, times the class weights."""
    if not per_row.smoothing:
        return None
    wide = wide_dtype(layer.x, xp)
    free = layer.kept_classes(xp)
    free = xp.ones(layer.classes, dtype=wide, device=layer.x.device) if free is None else xp.astype(free[0], wide)
    u = free / xp.where(xp.sum(free) > 0, xp.sum(free), xp.ones_like(free[0]))
    return u if weight is None else u * weight


def _smoothed(
    layer: Layer, value: Array, own: Array, even: Array, index: Array, weight: Array | None, per_row: Any, xp: Namespace
) -> Array:
    """The Fenchel-Young loss of the smoothed target from that of a class: <scores, y> is linear in y, and Omega has two kinds of terms."""
    e = per_row.smoothing
    value = value + e * (own - even)
    if not isinstance(layer.mapping, SparseSoftmax):
        free = layer.kept_classes(xp)
        n = layer.classes if free is None else int(free.sum())
        most, least = (xp.full_like(value[:, None], q) for q in (1.0 - e + e / max(n, 1), e / max(n, 1)))
        value = value + (layer.mapping.omega(most, xp) + (n - 1) * layer.mapping.omega(least, xp))[:, 0]
    value = value + xp.where(value < 0, -value, xp.zeros_like(value)).detach()
    return value if weight is None else _times(value, weight[index], xp)
