"""PyTorch: softmax's output layer from short rows, the score of each row's class and logsumexp of all others; and by an engine's kernels,
which read a block of scores once for the short rows, and once for the gradient, which they write over the scores."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import array_api_compat.torch as xp
import torch

from .._array import wide_dtype
from ..kernels import engine_of
from ..kernels.engine import Engine
from ..kernels.tasks import SCORES, ScoreBlock
from ..likelihood.terms import terms_of
from ..losses.targets import counted_weight, weighted
from ..mappings import Softmax
from ..transforms.softcap import cap_of
from . import torch_blocks
from .job import Job, RowLoss, RowTerms, ShortRow, loss_of
from .layer import Layer

Tensor = torch.Tensor

_SOFTMAX = Softmax()


# -- short rows ----------------------------------------------------------------------------------------------------------------------


class ShortRows(NamedTuple):
    """What the result of each row follows from, in fp32 or fp64."""

    value: Tensor  # the scores of the targets, and logsumexp of all others, [rows, m + 1]
    weighted_score: Tensor  # <scores, class_factors>, [rows]; anything without factors
    entropy: Tensor | None  # of the softmax of the others, [rows, 1]; None or without columns if it is not wanted


class ClassFactors(NamedTuple):
    """What label smoothing needs of the classes, each [classes]; None without it."""

    unmasked: Tensor | None  # a 1 for each unmasked class, and 0 for the others
    factors: Tensor | None  # these times the class weights

    @classmethod
    def of(cls, job: Job) -> ClassFactors:
        per_row, layer = job.per_row, job.layer
        if not isinstance(per_row, RowLoss) or not per_row.options.smoothing:
            return NO_FACTORS
        free = torch.ones(layer.classes, dtype=wide_dtype(layer.x, torch), device=layer.x.device)
        if layer.bias is not None:
            free = free.masked_fill(layer.bias == -math.inf, 0)
        if layer.keep is not None:
            free = free * layer.keep[0]
        return cls(free, free if job.class_weight is None else free * job.class_weight)

    def short(self, at: Tensor, score: Tensor) -> ShortRow:
        """The short rows whose target is at the place `at`. score: <all scores, factors> of each row."""
        if self.factors is None or self.unmasked is None:
            return ShortRow(at, score)
        return ShortRow(at, score, self.factors.sum(), self.unmasked.sum())


NO_FACTORS = ClassFactors(None, None)


def result_of(job: Job, of: ShortRows, class_factors: ClassFactors) -> Tensor:
    """The result for each row of softmax's loss, or of its terms."""
    per_row, target = job.per_row, job.target
    assert target is not None
    if isinstance(per_row, RowTerms):
        return _terms(per_row, of, target)
    assert isinstance(per_row, RowLoss)
    short = class_factors.short(torch.zeros_like(target), of.weighted_score)
    return per_row(_SOFTMAX, of.value, target, job.class_weight, short)


def _terms(per_row: RowTerms, of: ShortRows, target: Tensor) -> Tensor:
    at = torch.where(target < 0, target, torch.arange(target.shape[1], device=target.device))
    terms = terms_of(_SOFTMAX, of.value, at, xp, entropy=per_row.entropy, rest=per_row.entropy or per_row.rest)
    # of the choice between targets and others, and among the others
    if terms.entropy is not None and terms.rest is not None and of.entropy is not None:
        terms = terms._replace(entropy=terms.entropy + torch.exp(terms.rest) * of.entropy)
    return (terms if per_row.rest else terms._replace(rest=None)).columns(xp)


class ShortGradient(NamedTuple):
    """What the gradient in the scores of some rows depends on: it is g for the targets, and q (g - mix log q) for the others."""

    value: Tensor  # of the short rows
    g: Tensor  # [rows, m + 1]
    mix: Tensor | None  # [rows, 1]
    class_factors: Tensor | None
    g_weighted: Tensor | None

    @classmethod
    def of(
        cls, value: Tensor, h: Tensor | None, factors: Tensor | None, g: Tensor | None, g_weighted: Any, g_h: Tensor | None
    ) -> ShortGradient:  # fmt: skip
        """By the short rows, of which h is the entropy, and the gradients in them."""
        g = torch.zeros_like(value) if g is None else g.masked_fill(value == -math.inf, 0)  # a masked class has none
        if g_h is not None and h is not None:  # the gradient of the entropy is -q (log q + entropy)
            g = torch.cat([g[:, :-1], g[:, -1:] - g_h * h], 1)
        return cls(value, g, g_h, factors, g_weighted)

    def rows_at(self, rows: slice) -> ShortGradient:
        """The part of these rows."""
        value, g, mix, class_factors, g_weighted = self
        mix, g_weighted = (None if a is None else a[rows] for a in (mix, g_weighted))
        return ShortGradient(value[rows], g[rows], mix, class_factors, g_weighted)

    def written(self, engine: Engine, block: ScoreBlock, memory: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradient in the numbers of a block, in `dtype`, written to memory of their shape and dtype, which may be theirs."""
        a, b = block.first, block.first + block.numbers.shape[1]
        mixed, weighted = self.mix is not None, self.class_factors is not None and self.g_weighted is not None
        none = self.g[:, :1]
        of_row = torch.cat(
            [
                level_of(self.value), self.g[:, -1:], self.g[:, :1], self.mix if self.mix is not None else none,
                self.g_weighted[:, None] if self.g_weighted is not None and weighted else none,
            ],
            1,
        )  # fmt: skip
        d = memory if memory.dtype is dtype else memory.view(dtype)[:, : b - a]
        weights = self.class_factors[a:b] if self.class_factors is not None and weighted else None
        engine.score_slopes(block, d, of_row.to(torch.float32), weights, mixed=mixed)
        return d


def level_of(value: Tensor) -> Tensor:
    """logsumexp of the others, [rows, 1]; +inf for a row without others, so that exp is 0 everywhere."""
    level = value[:, -1:]
    return torch.where(level == -math.inf, math.inf, level)


# -- by kernels ----------------------------------------------------------------------------------------------------------------------


def block_of(layer: Layer, numbers: Tensor, index: Tensor, first: int = 0, cap: float = 0.0) -> ScoreBlock:
    """The block of a layer's rows whose numbers are those of the classes from `first` on. index: the class of each row."""
    classes = slice(first, first + numbers.shape[1])
    bias = None if layer.bias is None else layer.bias[classes]
    keep = None if layer.keep is None else layer.keep[:, classes]
    return ScoreBlock(numbers, bias, keep, layer.factor, index.reshape(-1).contiguous(), first, cap)


def engine_of_blocks(layer: Layer) -> Engine | None:
    """The engine with kernels for blocks of scores, on a GPU."""
    return engine_of(SCORES, None, layer.x) if torch_blocks.on_gpu(layer.x) else None


def is_of_short_rows(job: Job) -> bool:
    """True for a job of softmax that follows from short rows of one class each, whose scores may be capped."""
    layer, per_row, target = job.layer, job.per_row, job.target
    if job.reference is not None or target is None or not layer.mapping.is_softmax or layer.mapping.params():
        return False
    if cap_of(per_row.transforms) is None:
        return False
    if isinstance(per_row, RowLoss):
        smoothing, of_rows = per_row.options.smoothing, layer.keep is not None and layer.keep.shape[0] > 1
        if target.ndim > 1 or per_row.margin is not None or per_row.sub_centers > 1 or per_row.penalties.suppress:
            return False
        return smoothing < 1.0 and not (smoothing and of_rows)
    return isinstance(per_row, RowTerms) and target.shape[1] == 1


@dataclasses.dataclass(frozen=True)
class WholeRows:
    """The rows of softmax's job, of which an engine has all numbers."""

    engine: Engine
    job: Job
    block: ScoreBlock
    class_factors: ClassFactors

    @classmethod
    def of(cls, engine: Engine, job: Job, numbers: Tensor) -> WholeRows:
        assert job.target is not None
        cap = cap_of(job.per_row.transforms)
        assert cap is not None
        return cls(engine, job, block_of(job.layer, numbers, job.target, cap=cap), ClassFactors.of(job))

    def _short(self) -> tuple[ShortRows, Tensor]:
        """The short rows, and the class with the largest score of each."""
        per_row, factors = self.job.per_row, self.class_factors.factors
        entropy = isinstance(per_row, RowTerms) and per_row.entropy
        predicts = isinstance(per_row, RowLoss) and per_row.predicts
        terms, best = self.engine.score_terms(self.block, factors, entropy=entropy, best=predicts)
        return ShortRows(terms[:, :2], terms[:, 3], terms[:, 2:3] if entropy else None), best

    def _result(self, rows: ShortRows, best: Tensor) -> Any:
        per_row, target = self.job.per_row, self.job.target
        assert target is not None
        if isinstance(per_row, RowTerms):
            return result_of(self.job, rows, self.class_factors)
        assert isinstance(per_row, RowLoss)
        one = dataclasses.replace(self.job, per_row=dataclasses.replace(per_row, predicts=False))
        value = result_of(one, rows, self.class_factors).masked_fill(target < 0, 0.0)
        return (value, best.masked_fill(target < 0, -1)) if per_row.predicts else value

    def result(self) -> Any:
        return self._result(*self._short())

    def gradient(self, g: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The gradient in the numbers, written over them; the sum of g times the results; and the results that have no gradient."""
        rows, best = self._short()
        with torch.enable_grad():
            rows = ShortRows(*(None if a is None else a.detach().requires_grad_() for a in rows))  # type: ignore[arg-type]
            value = self._result(rows, best)
            value, *constants = value if isinstance(value, tuple) else (value,)
            weighted = (g.to(value.dtype) * value).sum()
            free = [a for a in rows if a is not None]
            slopes = torch.autograd.grad(weighted, free, allow_unused=True)
        g_value, g_weighted, *g_h = slopes
        value, h = rows.value.detach(), None if rows.entropy is None else rows.entropy.detach()
        gradient = ShortGradient.of(value, h, self.class_factors.factors, g_value, g_weighted, g_h[0] if g_h else None)
        ds = gradient.written(self.engine, self.block, self.block.numbers, self.job.layer.x.dtype)
        return ds, weighted.detach(), constants


# -- a sparse map's own loss ---------------------------------------------------------------------------------------------------------


def is_own_loss(engine: Engine, job: Job) -> bool:
    """True for a sparse map's own loss whose gradient the engine writes over its scores."""
    layer, per_row, target = job.layer, job.per_row, job.target
    mapping = layer.mapping
    if job.reference is not None or target is None or target.ndim > 1 or not isinstance(per_row, RowLoss):
        return False
    if not mapping.facts.sparse or mapping.params() or not mapping.sums_to_one or loss_of(mapping) == "nll":
        return False
    if per_row.needs_all_scores(layer) or per_row.margin is not None or per_row.penalties or per_row.options.smoothing:
        return False
    return engine.refuse("index_loss", mapping, layer.x) is None


def own_loss_gradient(engine: Engine, job: Job, s: Tensor, g: Tensor, out: Tensor) -> Tensor:
    """The sum of g times the losses of rows with the scores s; their gradient is written to `out`, in the memory of the scores."""
    layer, target = job.layer, job.target
    assert target is not None
    loss = engine.index_loss(layer.mapping, s, target, save=True)
    assert loss is not None
    value, of_value = loss.value, g.to(loss.value.dtype).expand(target.shape)
    of_scores = of_value
    if job.class_weight is not None:
        factor = counted_weight(target, target < 0, job.class_weight, value.dtype, xp)
        value, of_scores = weighted(value, factor, xp), of_value * factor
    of_class = target.clamp(min=0)[:, None]
    masked = None if layer.keep is None else s.gather(1, of_class) == -math.inf
    engine.score_loss_grad(layer.mapping, s, target, of_scores, loss.saved, out)
    if masked is not None:  # such a class has no gradient, and an infinite loss
        out.scatter_(1, of_class, out.gather(1, of_class).masked_fill(masked, 0))
    return (of_value * value).sum()
