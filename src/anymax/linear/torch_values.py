"""torch: the results of an output layer, from the candidates of each row, or from softmax's logsumexp."""

from __future__ import annotations

import dataclasses

import array_api_compat.torch as xp
import torch

from .._array import wide_dtype
from ..likelihood.terms import terms_of
from ..mappings import Softmax
from ..thresholds import tau_of
from .job import Job, RowLoss, RowTerms, ShortRow, Thresholds
from .layer import Layer
from .torch_candidates import Candidates, OfTarget, candidates_of, scores_of
from .torch_groups import by_rows
from .torch_methods import LayerMethod, choose
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
    if isinstance(job.per_row, RowTerms):
        return _terms_of_softmax(job, job.per_row)
    assert isinstance(job.per_row, RowLoss)
    return _loss_of_softmax(job, job.per_row, job.per_row.min_probability if method is LayerMethod.LIKELY else 0.0)


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


def _loss_of_softmax(job: Job, per_row: RowLoss, min_probability: float) -> Tensor:
    assert job.target is not None
    unmasked = _unmasked(job.layer, per_row)
    class_factors = unmasked if unmasked is None or job.class_weight is None else unmasked * job.class_weight
    s, score, _ = of_softmax(job, class_factors, min_probability=min_probability)
    short = _short(torch.zeros_like(job.target), score, class_factors, unmasked)
    return per_row(_SOFTMAX, s, job.target, job.class_weight, short)


def _terms_of_softmax(job: Job, per_row: RowTerms) -> Tensor:
    target = job.target
    assert target is not None
    value, _, of_others = of_softmax(job, None, entropy=per_row.entropy)
    at = torch.where(target < 0, target, torch.arange(target.shape[1], device=target.device))
    terms = terms_of(_SOFTMAX, value, at, xp, entropy=per_row.entropy, rest=per_row.entropy or per_row.rest)
    # of the choice between targets and others, and among the others
    if terms.entropy is not None and terms.rest is not None:
        terms = terms._replace(entropy=terms.entropy + torch.exp(terms.rest) * of_others)
    return (terms if per_row.rest else terms._replace(rest=None)).columns(xp)


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
    unmasked = _unmasked(layer, per_row)
    s, score = scores_of(layer, candidates, unmasked)
    return per_row(layer.mapping, s, job.target, job.class_weight, _short(at, score, unmasked, unmasked))


# -- both ----------------------------------------------------------------------------------------------------------------------------


def _short(at: Tensor, score: Tensor, class_factors: Tensor | None, unmasked: Tensor | None) -> ShortRow:
    """The short rows whose target is at the place `at`. score: <all scores, class_factors> of each row."""
    if class_factors is None or unmasked is None:
        return ShortRow(at, score)
    return ShortRow(at, score, class_factors.sum(), unmasked.sum())


def _unmasked(layer: Layer, per_row: RowLoss) -> Tensor | None:
    """A 1 for each unmasked class, and 0 for the others; None without label smoothing."""
    if not per_row.options.smoothing:
        return None
    free = layer.unmasked_classes(xp)
    dtype = wide_dtype(layer.x, xp)
    return torch.ones(layer.classes, dtype=dtype, device=layer.x.device) if free is None else free[0].to(dtype)
