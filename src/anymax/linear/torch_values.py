"""torch: the results of an output layer, from the few scores that each row keeps, or from softmax's logsumexp."""

from __future__ import annotations

import functools
import math
from typing import Any

import array_api_compat.torch as xp
import torch

from .._array import known, wide_dtype
from .._core.mapping import Mapping
from .._core.separable import Separable
from ..autodiff.torch import BRIDGE
from ..likelihood.terms import terms_of
from ..losses.targets import weighted
from ..mappings import Softmax, SparseSoftmax
from ..thresholds import tau_and_support
from .layer import Layer
from .per_row import RowLoss, Thresholds, loss_of
from .torch_candidates import Bound, Kept
from .torch_groups import by_rows, runs_eagerly
from .torch_kept import kept, scores_of
from .torch_softmax import of_softmax

Tensor = torch.Tensor

_SOFTMAX = Softmax()


def values(
    layer: Layer, per_row: RowLoss, index: Tensor, out: Tensor, class_weight: Tensor | None, chunk: int | None
) -> Tensor | None:
    """One number for each row, 0 for rows in `out`; None if these ways do not apply, as when all scores of a row are needed at once."""
    if not runs_eagerly(layer, class_weight):
        return None
    of: Any = _of_softmax
    if not layer.mapping.is_softmax:
        bound = _bound(layer.mapping)
        if bound is None:
            return None
        of = functools.partial(_of_kept, bound)
    if per_row.smoothing and layer.keep is not None and layer.keep.shape[0] != 1:
        return None
    if not bool(out.any()):
        return of(layer, per_row, index, class_weight, chunk) if layer.rows else None
    rows = (~out).nonzero(as_tuple=True)[0]
    if not rows.shape[0]:
        return None
    value = of(layer.part(rows), per_row, index[rows], class_weight, chunk)
    return torch.zeros(layer.rows, dtype=value.dtype, device=value.device).index_copy(0, rows, value)


def thresholds(layer: Layer, chunk: int | None) -> tuple[Tensor, Tensor] | None:
    """(tau, the size of the support) of each row; None as in `values`."""
    if not runs_eagerly(layer) or not layer.rows:
        return None
    if layer.mapping.is_softmax:
        first = torch.zeros(layer.rows, dtype=torch.int64, device=layer.x.device)
        two = of_softmax(layer, first, None, chunk)[0]
        size = torch.full_like(first, layer.classes)
        keep = layer.kept_classes(xp)
        size = size if keep is None else keep.expand(layer.rows, -1).sum(1)
        return torch.logaddexp(two[:, 0], two[:, 1]), size
    bound = _bound(layer.mapping)
    if bound is None:
        return None
    held = kept(layer, None, bound, False, chunk)
    tau, size = tau_and_support(layer.mapping, held.value, xp)
    full = held.full.nonzero(as_tuple=True)[0]
    tau, size = tau[:, 0], size[:, 0]
    if full.shape[0]:
        tau[full], size[full] = by_rows(layer.part(full), Thresholds(), None, None, chunk)
    return tau, size


# -- softmax -------------------------------------------------------------------------------------------------------------------------


def _of_softmax(
    layer: Layer, per_row: RowLoss, index: Tensor, class_weight: Tensor | None, chunk: int | None
) -> Tensor:
    cross_entropy = loss_of(layer.mapping) == "nll"
    u = _spread(layer, class_weight if cross_entropy else None, per_row)
    two, even = of_softmax(layer, index, u, chunk, per_row.least)
    place = torch.zeros_like(index)
    if per_row.margin is not None:
        moved = _moved(two[:, :1], per_row)
        two = torch.cat([moved, two[:, 1:]], 1)
    if per_row.log_prob:
        return terms_of(_SOFTMAX, two, place[:, None], xp).log_p[:, 0]
    value = per_row.loss(_SOFTMAX, two, place)
    if u is None:
        return value if class_weight is None else weighted(value, class_weight[index], xp)
    if not cross_entropy:
        return _smoothed(layer, value, two[:, 0], even, index, class_weight, per_row)
    level = two[:, 0] + value  # logsumexp of the row
    share = 1.0 - per_row.smoothing if class_weight is None else (1.0 - per_row.smoothing) * class_weight[index]
    return share * value + per_row.smoothing * (u.sum() * level - even)


# -- sparse maps ---------------------------------------------------------------------------------------------------------------------


def _bound(mapping: Mapping) -> Bound | None:
    """A function that gives, from any scores of the rows, a lower bound [rows, 1] of the scores that may have p > 0; or None."""
    if isinstance(mapping, SparseSoftmax):
        return None if mapping.most_kept is None else _kth
    if not isinstance(mapping, Separable) or not mapping.facts.sparse or not mapping.sums_to_one:
        return None
    params = [p for p in mapping.params().values() if not known(p)]
    if params:  # on a GPU, where reading them would wait
        return None
    one = next((torch.ones_like(p) for p in mapping.params().values()), None)
    one = torch.ones(1) if one is None else one.detach()
    if mapping.ceiling(one, xp) is not None:
        return None
    reach = _reach(mapping, one)
    return _below_threshold if bool(((reach > 0) & (reach < math.inf)).all()) else None


def _reach(mapping: Mapping, one: Tensor) -> Tensor:
    """How far below the largest score of its row a class with p > 0 can be."""
    mapping = mapping.frozen()
    return mapping.slope(one, xp) - mapping.slope(0.0 * one, xp)  # type: ignore[attr-defined]


def _slack(x: Tensor) -> Tensor:
    """A margin for the rounding errors of a bound."""
    return 64.0 * float(torch.finfo(x.dtype).eps) * (1.0 + x.abs())


def _below_threshold(value: Tensor, layer: Layer) -> Tensor:
    """The threshold of these scores, less rounding: it is at most that of all classes, since more classes only raise it."""
    tau = BRIDGE.threshold(layer.mapping, value)
    return tau - _slack(tau)


def _kth(s: Tensor, layer: Layer) -> Tensor:
    """A bound just below the k-th largest, so that all scores equal to it stay: the map keeps the first of them."""
    k: Any = layer.mapping.most_kept
    if s.shape[1] < k:
        return torch.full((s.shape[0], 1), -math.inf, device=s.device)
    low = s.topk(k, dim=1).values[:, -1:]
    low = low if low.dtype == torch.float64 else low.to(torch.float32)
    return low - _slack(low)


def _of_kept(
    bound: Bound, layer: Layer, per_row: RowLoss, index: Tensor, class_weight: Tensor | None, chunk: int | None
) -> Tensor:
    held = kept(layer, index, bound, per_row.margin is not None, chunk)
    if not bool(held.full.any()):
        return _of_scores(layer, per_row, held, index, class_weight)
    full, rest = (part.nonzero(as_tuple=True)[0] for part in (held.full, ~held.full))
    dense = by_rows(layer.part(full), per_row, index[full], class_weight, chunk)
    if not rest.shape[0]:
        return dense
    sparse = _of_scores(layer.part(rest), per_row, held.part(rest), index[rest], class_weight)
    value = torch.zeros(layer.rows, dtype=sparse.dtype, device=sparse.device)
    return value.index_copy(0, full, dense).index_copy(0, rest, sparse)


def _of_scores(layer: Layer, per_row: RowLoss, held: Kept, index: Tensor, class_weight: Tensor | None) -> Tensor:
    assert held.at is not None
    u = _spread(layer, None, per_row)
    s, even = scores_of(layer, held, u)
    at = held.at[:, None]
    own = s.gather(1, at)
    if per_row.margin is not None:
        s = s.scatter(1, at, _moved(own, per_row))
    if per_row.log_prob:
        return terms_of(layer.mapping, s, at, xp).log_p[:, 0]
    value = per_row.loss(layer.mapping, s, held.at)
    if u is not None:
        return _smoothed(layer, value, own[:, 0], even, index, class_weight, per_row)
    return value if class_weight is None else weighted(value, class_weight[index], xp)


# -- helpers of both ---------------------------------------------------------------------------------------------------------------


def _moved(own: Tensor, per_row: RowLoss) -> Tensor:
    """The target's score with its margin."""
    margin: Any = per_row.margin
    cosines = own / per_row.scale
    return per_row.scale * margin(cosines, (cosines[:, 0] * 0).to(torch.int64), -1)


def _spread(layer: Layer, class_weight: Tensor | None, per_row: RowLoss) -> Tensor | None:
    """The share that label smoothing gives to each class, times the class weights."""
    if not per_row.smoothing:
        return None
    wide = wide_dtype(layer.x, xp)
    free = layer.kept_classes(xp)
    free = torch.ones(layer.classes, dtype=wide, device=layer.x.device) if free is None else free[0].to(wide)
    u = free / torch.where(free.sum() > 0, free.sum(), torch.ones_like(free[0]))
    return u if class_weight is None else u * class_weight


def _smoothed(
    layer: Layer, value: Tensor, own: Tensor, even: Tensor, index: Tensor, class_weight: Tensor | None, per_row: RowLoss
) -> Tensor:
    """The Fenchel-Young loss of the smoothed target from that of a class: <scores, y> is linear in y, and Omega has two kinds of terms."""
    e = per_row.smoothing
    value = value + e * (own - even)
    if not isinstance(layer.mapping, SparseSoftmax):
        free = layer.kept_classes(xp)
        n = layer.classes if free is None else int(free.sum())
        most, least = (torch.full_like(value[:, None], q) for q in (1.0 - e + e / max(n, 1), e / max(n, 1)))
        value = value + (layer.mapping.omega(most, xp) + (n - 1) * layer.mapping.omega(least, xp))[:, 0]
    value = value + torch.where(value < 0, -value, torch.zeros_like(value)).detach()
    return value if class_weight is None else weighted(value, class_weight[index], xp)
