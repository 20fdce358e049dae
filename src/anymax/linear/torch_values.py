"""torch: the results of an output layer, from the candidates of each row, or from softmax's logsumexp."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import array_api_compat.torch as xp
import torch

from .._array import wide_dtype
from .._core.mapping import Mapping
from ..likelihood.terms import terms_of
from ..losses.targets import smoothed, weighted
from ..mappings import Softmax
from ..thresholds import tau_of
from .job import Job, PerRow, RowLoss, RowTerms
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
        return _terms_of_softmax(job)
    return _of_softmax(job, job.per_row.least if method is LayerMethod.LIKELY else 0.0)


def thresholds(job: Job) -> tuple[Tensor, Tensor] | None:
    """(tau, the size of the support) of each row; None if all scores are needed."""
    layer, method = job.layer, choose(job)
    if method is LayerMethod.GROUPS:
        return None
    if method is LayerMethod.SOFTMAX:
        first = torch.zeros(layer.rows, dtype=torch.int64, device=layer.x.device)
        two = of_softmax(dataclasses.replace(job, target=first), None)[0]
        size = torch.full_like(first, layer.classes)
        keep = layer.unmasked_classes(xp)
        size = size if keep is None else keep.expand(layer.rows, -1).sum(1)
        return tau_of(_SOFTMAX, two, xp)[:, 0], size
    candidates = candidates_of(job)
    s = scores_of(layer, candidates, None)[0] if layer.recorded() else candidates.value
    tau, size = job.per_row.of_candidates(layer.mapping, s, None)
    full = candidates.full.nonzero(as_tuple=True)[0]
    if full.shape[0]:
        of_full = by_rows(job.part(full))
        tau, size = (a.index_copy(0, full, b) for a, b in zip((tau, size), of_full))
    return tau, size


# -- softmax -------------------------------------------------------------------------------------------------------------------------


def _of_softmax(job: Job, least: float) -> Tensor:
    assert job.target is not None
    free = _unmasked(job)
    u = free if free is None or job.class_weight is None else free * job.class_weight
    two, even, _ = of_softmax(job, u, least=least)
    return _loss(job, _SOFTMAX, two, torch.zeros_like(job.target), _Even(even, free, u))


def _terms_of_softmax(job: Job) -> Tensor:
    per_row, target = job.per_row, job.target
    assert isinstance(per_row, RowTerms)
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
    per_class = job
    if isinstance(job.per_row, RowTerms):
        assert job.target is not None
        per_class = dataclasses.replace(job, target=job.target[:, 0].clamp(min=0))
    candidates = candidates_of(per_class, of_target=OfTarget.USED if job.per_row.margin is None else OfTarget.LOWERED)
    if not bool(candidates.full.any()):
        return _of_scores(job, candidates)
    full, rest = (part.nonzero(as_tuple=True)[0] for part in (candidates.full, ~candidates.full))
    dense = by_rows(job.part(full))
    if not rest.shape[0]:
        return dense
    sparse = _of_scores(job.part(rest), candidates.part(rest))
    value = sparse.new_zeros((job.layer.rows, *sparse.shape[1:]))
    return value.index_copy(0, full, dense).index_copy(0, rest, sparse)


def _of_scores(job: Job, candidates: Candidates) -> Tensor:
    assert candidates.at is not None
    mapping, free = job.layer.mapping, _unmasked(job)
    s, even = scores_of(job.layer, candidates, free)
    if isinstance(job.per_row, RowTerms):
        assert job.target is not None
        return job.per_row.of_candidates(mapping, s, torch.where(job.target < 0, -1, candidates.at[:, None]))
    return _loss(job, mapping, s, candidates.at, _Even(even, free, free))


# -- the loss of a short row -----------------------------------------------------------------------------------------------------------


class _Even(NamedTuple):
    """The even part of a smoothed target."""

    scores: Tensor  # <scores, u> of each row
    free: Tensor | None  # a 1 for each unmasked class, and 0 for the others; None without label smoothing
    u: Tensor | None  # `free`, times the class weights where these are inside the loss


def _loss(job: Job, mapping: Mapping, s: Tensor, at: Tensor, even: _Even) -> Tensor:
    """The loss of each row from a short row `s`, whose map is that of all scores: the candidates, or softmax's target and logsumexp of the
    others. at: the place of the target. `choose` leaves out `suppress`."""
    per_row, target, class_weight, place = job.per_row, job.target, job.class_weight, at[:, None]
    assert target is not None
    assert isinstance(per_row, RowLoss)
    of_target = s.gather(1, place)
    if per_row.margin is not None:
        s = s.scatter(1, place, _with_margin(of_target, per_row))
    value, tau = per_row.of_candidates(mapping, s, at), lambda: tau_of(mapping, s, xp)[:, 0]
    inside = mapping.is_softmax  # the class weights are inside -<y, log p>, and multiply other losses
    if even.free is not None and not inside:
        value = _smoothed(job, value, of_target[:, 0], even.scores, even.free.sum())
    if class_weight is not None:
        value = weighted(value, class_weight[target], xp)
    if even.free is not None and even.u is not None and inside:
        level = tau()  # not from the target's loss, which is infinite for a masked class
        of_all = even.u.sum() * torch.where(level == -math.inf, 0, level) - even.scores
        value = smoothed(per_row.options, mapping, value, of_all, even.free.sum(), 1.0, xp)
    return value + per_row.more(target, class_weight, tau) if per_row.further else value


def _with_margin(score: Tensor, per_row: PerRow) -> Tensor:
    """The target's score with its margin."""
    margin: Any = per_row.margin
    cosines = score / per_row.scale
    return per_row.scale * margin(cosines, (cosines[:, 0] * 0).to(torch.int64), -1)


def _unmasked(job: Job) -> Tensor | None:
    """A 1 for each unmasked class, and 0 for the others; None without label smoothing."""
    layer = job.layer
    if not job.per_row.options.smoothing:
        return None
    free = layer.unmasked_classes(xp)
    dtype = wide_dtype(layer.x, xp)
    return torch.ones(layer.classes, dtype=dtype, device=layer.x.device) if free is None else free[0].to(dtype)


def _smoothed(job: Job, value: Tensor, score: Tensor, even: Tensor, n: Tensor) -> Tensor:
    """The Fenchel-Young loss of the smoothed target from that of a class: <scores, y> is linear in y, and Omega has two kinds of terms.

    even: the sum of the scores of the n unmasked classes.
    """
    options, mapping = job.per_row.options, job.layer.mapping
    score = torch.where(score == -math.inf, 0, score)  # a masked target's loss is infinite already
    value = value + smoothed(options, mapping, 0.0, n * score - even, n, 1.0, xp)
    if mapping.own_loss == "fenchel_young":
        most, least = (smoothed(options, mapping, q, torch.ones_like(value[:, None]), n, 1.0, xp) for q in (1.0, 0.0))
        value = value + (mapping.omega(most, xp) + (n - 1) * mapping.omega(least, xp))[:, 0]
    return value + torch.where(value < 0, -value, torch.zeros_like(value)).detach()
