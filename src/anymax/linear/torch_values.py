"""torch: the results of an output layer, from the candidates of each row, or from softmax's logsumexp."""

from __future__ import annotations

import dataclasses
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
from ..mappings import Softmax
from ..thresholds import logsumexp
from .job import Job
from .layer import Layer
from .per_row import PerRow, RowLoss, RowTerms
from .torch_candidate_scores import candidates_of, scores_of
from .torch_candidates import Bound, Candidates, OfTarget
from .torch_groups import by_rows, runs_eagerly
from .torch_softmax import of_softmax

Tensor = torch.Tensor

_SOFTMAX = Softmax()


def values(job: Job, out: Tensor) -> Tensor | None:
    """The result for each row, 0 for rows in `out`; None if these ways do not apply, as when all scores of a row are needed at once."""
    layer, terms = job.layer, isinstance(job.per_row, RowTerms)
    if not runs_eagerly(layer, job.class_weight):
        return None
    if job.per_row.suppress:
        return None
    of: Any = _terms_of_softmax if terms else _of_softmax
    if not layer.mapping.is_softmax:
        bound = _bound(layer.mapping)
        if bound is None or (terms and job.target is not None and job.target.shape[1] > 1):
            return None
        of = functools.partial(_of_candidates, bound)
    if _smooths_each_row(job):
        return None
    if not bool(out.any()):
        return of(job) if layer.rows else None
    rows = (~out).nonzero(as_tuple=True)[0]
    if not rows.shape[0]:
        return None
    value = of(job.part(rows))
    return value.new_zeros((layer.rows, *value.shape[1:])).index_copy(0, rows, value)


def _smooths_each_row(job: Job) -> bool:
    """True if label smoothing spreads over other classes in each row."""
    keep = job.layer.keep
    return bool(job.per_row.smoothing) and keep is not None and keep.shape[0] != 1


def by_blocks(job: Job) -> bool:
    """True if `values` computes the loss from a few scores of each row, or softmax's in blocks that are not held."""
    layer = job.layer
    if job.per_row.transforms or job.per_row.suppress or not runs_eagerly(layer, job.class_weight):
        return False
    if _smooths_each_row(job):
        return False
    if layer.mapping.is_softmax:
        return job.per_row.least > 0 or layer.x.device.type != "cpu" or layer.x.dtype is not wide_dtype(layer.x, xp)
    return _bound(layer.mapping) is not None


def thresholds(job: Job) -> tuple[Tensor, Tensor] | None:
    """(tau, the size of the support) of each row; None as in `values`."""
    layer = job.layer
    if not runs_eagerly(layer) or not layer.rows:
        return None
    if layer.mapping.is_softmax:
        first = torch.zeros(layer.rows, dtype=torch.int64, device=layer.x.device)
        two = of_softmax(dataclasses.replace(job, target=first), None)[0]
        size = torch.full_like(first, layer.classes)
        keep = layer.unmasked_classes(xp)
        size = size if keep is None else keep.expand(layer.rows, -1).sum(1)
        return torch.logaddexp(two[:, 0], two[:, 1]), size
    bound = _bound(layer.mapping)
    if bound is None:
        return None
    held = candidates_of(job, bound)
    tau, size = job.per_row.of_candidates(layer.mapping, held.value, None)
    full = held.full.nonzero(as_tuple=True)[0]
    if full.shape[0]:
        tau[full], size[full] = by_rows(job.part(full))
    return tau, size


# -- softmax -------------------------------------------------------------------------------------------------------------------------


def _of_softmax(job: Job) -> Tensor:
    assert job.target is not None
    per_row, class_weight = job.per_row, job.class_weight
    u = _spread(job)
    u = u if u is None or class_weight is None else u * class_weight
    two, even, _ = of_softmax(job, u)
    if per_row.margin is not None:
        two = torch.cat([_moved(two[:, :1], per_row), two[:, 1:]], 1)
    value = per_row.of_candidates(_SOFTMAX, two, torch.zeros_like(job.target))
    z_term: Any = 0.0
    if isinstance(per_row, RowLoss) and per_row.z_loss:
        z_term = per_row.z_term(logsumexp(two), job.target)
        z_term = z_term if class_weight is None else per_row.weighted(z_term, job.target, class_weight)
    if u is None:
        return _weighted(job, value) + z_term
    level = two[:, 0] + value  # logsumexp of the row
    share = 1.0 - per_row.smoothing if class_weight is None else (1.0 - per_row.smoothing) * class_weight[job.target]
    return share * value + per_row.smoothing * (u.sum() * level - even) + z_term


def _terms_of_softmax(job: Job) -> Tensor:
    per_row, target = job.per_row, job.target
    assert isinstance(per_row, RowTerms)
    assert target is not None
    value, _, of_others = of_softmax(job, None, per_row.entropy)
    at = torch.where(target < 0, target, torch.arange(target.shape[1], device=target.device))
    log_p, h, rest = terms_of(_SOFTMAX, value, at, xp, entropy=per_row.entropy, rest=per_row.entropy or per_row.rest)
    columns = [log_p]
    if (
        h is not None and rest is not None
    ):  # the entropy of the choice between the targets and the others, and of that among the others
        columns.append(h + torch.exp(rest) * of_others)
    if rest is not None and per_row.rest:
        columns.append(rest)
    return torch.cat(columns, 1)


# -- sparse maps ---------------------------------------------------------------------------------------------------------------------


def _bound(mapping: Mapping) -> Bound | None:
    """A function that gives, from any scores of the rows, a lower bound [rows, 1] of the scores that may have p > 0; or None."""
    if mapping.most_kept is not None:
        return _kth
    separable = mapping.as_separable()
    if separable is None or not mapping.facts.sparse or not mapping.sums_to_one:
        return None
    params = [p for p in mapping.params().values() if not known(p)]
    if params:  # on a GPU, where reading them would wait
        return None
    one = next((torch.ones_like(p) for p in mapping.params().values()), None)
    one = torch.ones(1) if one is None else one.detach()
    if mapping.ceiling(one, xp) is not None:
        return None
    reach = _reach(separable, one)
    return _below_threshold if bool(((reach > 0) & (reach < math.inf)).all()) else None


def _reach(mapping: Separable, one: Tensor) -> Tensor:
    """How far below the largest score of its row a class with p > 0 can be."""
    mapping = mapping.frozen()
    return mapping.slope(one, xp) - mapping.slope(0.0 * one, xp)


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


def _of_candidates(bound: Bound, job: Job) -> Tensor:
    per_class = job
    if isinstance(job.per_row, RowTerms):
        assert job.target is not None
        per_class = dataclasses.replace(job, target=job.target[:, 0].clamp(min=0))
    held = candidates_of(per_class, bound, OfTarget.USED if job.per_row.margin is None else OfTarget.LOWERED)
    if not bool(held.full.any()):
        return _of_scores(job, held)
    full, rest = (part.nonzero(as_tuple=True)[0] for part in (held.full, ~held.full))
    dense = by_rows(job.part(full))
    if not rest.shape[0]:
        return dense
    sparse = _of_scores(job.part(rest), held.part(rest))
    value = sparse.new_zeros((job.layer.rows, *sparse.shape[1:]))
    return value.index_copy(0, full, dense).index_copy(0, rest, sparse)


def _of_scores(job: Job, held: Candidates) -> Tensor:
    assert held.at is not None
    per_row, u = job.per_row, _spread(job)
    s, even = scores_of(job.layer, held, u)
    at = held.at[:, None]
    if isinstance(per_row, RowTerms):
        assert job.target is not None
        return per_row.of_candidates(job.layer.mapping, s, torch.where(job.target < 0, -1, at))
    own = s.gather(1, at)
    if per_row.margin is not None:
        s = s.scatter(1, at, _moved(own, per_row))
    value = per_row.of_candidates(job.layer.mapping, s, held.at)
    return _weighted(job, value if u is None else _smoothed(job, value, own[:, 0], even))


# -- helpers of both ---------------------------------------------------------------------------------------------------------------


def _weighted(job: Job, value: Tensor) -> Tensor:
    """The value times the class weight of its target."""
    return value if job.class_weight is None else weighted(value, job.class_weight[job.target], xp)


def _moved(own: Tensor, per_row: PerRow) -> Tensor:
    """The target's score with its margin."""
    margin: Any = per_row.margin
    cosines = own / per_row.scale
    return per_row.scale * margin(cosines, (cosines[:, 0] * 0).to(torch.int64), -1)


def _spread(job: Job) -> Tensor | None:
    """The share of each class in what label smoothing spreads; None without smoothing."""
    layer = job.layer
    if not job.per_row.smoothing:
        return None
    wide = wide_dtype(layer.x, xp)
    free = layer.unmasked_classes(xp)
    free = torch.ones(layer.classes, dtype=wide, device=layer.x.device) if free is None else free[0].to(wide)
    return free / torch.where(free.sum() > 0, free.sum(), torch.ones_like(free[0]))


def _smoothed(job: Job, value: Tensor, own: Tensor, even: Tensor) -> Tensor:
    """The Fenchel-Young loss of the smoothed target from that of a class: <scores, y> is linear in y, and Omega has two kinds of terms."""
    layer, e = job.layer, job.per_row.smoothing
    value = value + e * (own - even)
    if layer.mapping.own_loss == "fenchel_young":
        free = layer.unmasked_classes(xp)
        n = layer.classes if free is None else int(free.sum())
        most, least = (torch.full_like(value[:, None], q) for q in (1.0 - e + e / max(n, 1), e / max(n, 1)))
        value = value + (layer.mapping.omega(most, xp) + (n - 1) * layer.mapping.omega(least, xp))[:, 0]
    return value + torch.where(value < 0, -value, torch.zeros_like(value)).detach()
