"""torch: the results of an output layer, from the candidates of each row, or from softmax's logsumexp."""

from __future__ import annotations

import dataclasses

import array_api_compat.torch as xp
import torch

from ..mappings import Softmax
from ..thresholds import tau_of
from .job import Job, RowLoss, RowTerms, Thresholds
from .torch_candidates import Candidates, OfTarget, candidates_of, scores_of
from .torch_groups import by_rows
from .torch_methods import LayerMethod, choose
from .torch_scores import ClassFactors, result_of
from .torch_softmax import of_softmax

Tensor = torch.Tensor

_SOFTMAX = Softmax()


def values(job: Job) -> Tensor:
    """The result for each row of an eager call."""
    method = choose(job)
    if method is LayerMethod.GROUPS:
        return by_rows(job)
    if method is LayerMethod.CANDIDATES:
        return _of_candidates(job)
    return _of_softmax(job, method)


def thresholds(job: Job) -> tuple[Tensor, Tensor] | None:
    """(tau, the size of the support) of each row; None if all scores are needed."""
    layer, method = job.layer, choose(job)
    if method is LayerMethod.GROUPS:
        return None
    if method is LayerMethod.SOFTMAX:
        first = torch.zeros(layer.rows, dtype=torch.int64, device=layer.x.device)
        s = of_softmax(dataclasses.replace(job, target=first), None)[0]
        size = torch.full_like(first, layer.seen_classes)
        keep = layer.unmasked_classes(xp)
        size = size if keep is None else keep[:, : layer.seen_classes].expand(layer.rows, -1).sum(1)
        return tau_of(_SOFTMAX, s, xp)[:, 0], size
    assert isinstance(job.per_row, Thresholds)
    candidates = candidates_of(job)
    s = scores_of(layer, candidates, None)[0] if layer.recorded() else candidates.value
    tau, size = job.per_row.of_candidates(layer.mapping, s, candidates.at)
    full = candidates.full.nonzero(as_tuple=True)[0]
    if full.shape[0]:
        of_full = by_rows(job.rows_at(full))
        tau, size = (a.index_copy(0, full, b) for a, b in zip((tau, size), of_full))
    return tau, size


# -- softmax -------------------------------------------------------------------------------------------------------------------------


def _of_softmax(job: Job, method: LayerMethod) -> Tensor:
    class_factors = ClassFactors.of(job)
    likely = method is LayerMethod.LIKELY and isinstance(job.per_row, RowLoss)
    least = job.per_row.min_probability if likely and isinstance(job.per_row, RowLoss) else 0.0
    entropy = isinstance(job.per_row, RowTerms) and job.per_row.entropy
    rows = of_softmax(job, class_factors.factors, entropy=entropy, min_probability=least)
    return result_of(job, rows, class_factors)


# -- sparse maps ---------------------------------------------------------------------------------------------------------------------


def _of_candidates(job: Job) -> Tensor:
    per_class, of_target = job, OfTarget.USED
    if isinstance(job.per_row, RowTerms):
        assert job.target is not None
        per_class = dataclasses.replace(job, target=job.target[:, 0].clamp(min=0))
    elif isinstance(job.per_row, RowLoss) and job.per_row.margin is not None:
        of_target = OfTarget.LOWERED
    candidates = candidates_of(per_class, of_target=of_target)
    if not bool(candidates.full.any()):
        return _of_scores(job, candidates)
    full, rest = (part.nonzero(as_tuple=True)[0] for part in (candidates.full, ~candidates.full))
    dense = by_rows(job.rows_at(full))
    if not rest.shape[0]:
        return dense
    sparse = _of_scores(job.rows_at(rest), candidates.rows_at(rest))
    value = sparse.new_zeros((job.layer.rows, *sparse.shape[1:]))
    return value.index_copy(0, full, dense).index_copy(0, rest, sparse)


def _of_scores(job: Job, candidates: Candidates) -> Tensor:
    layer, per_row, at = job.layer, job.per_row, candidates.at
    assert at is not None
    if isinstance(per_row, RowTerms):
        assert job.target is not None
        s, _ = scores_of(layer, candidates, None)
        return per_row.of_candidates(layer.mapping, s, torch.where(job.target < 0, -1, at[:, None]))
    assert isinstance(per_row, RowLoss)
    class_factors = ClassFactors.of(dataclasses.replace(job, class_weight=None))
    s, score = scores_of(layer, candidates, class_factors.factors)
    return per_row(layer.mapping, s, job.target, job.class_weight, class_factors.short(at, score))
