"""PyTorch: an output layer's scores a block of classes at a time; each row keeps its candidates.

A candidate is a class that may have a probability above 0. The threshold of some classes is a lower bound for that of all classes,
since more classes only raise it. So a score below it can be dropped. Each row appends its scores above the bound, block by block; after
1, 2, 4, 8, ... blocks, and when memory is full, the bound is computed again from these candidates. At the end they contain the support,
and the map of them is the map of the row.

The scores of the candidates are a function of features, weight and bias, whose gradient is a sparse product. The gradient of the gradient
holds all scores: it uses plain operations.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import array_api_compat.torch as xp
import torch

from .._array import wide_dtype
from ..autodiff.torch_adapter import operation
from ..functional.bounds import bound_of
from ..kernels import engine_of
from ..kernels.tasks import LAYER
from .job import Job
from .layer import Layer, dots
from .torch_blocks import GROUP, BlockSize, ScoreBlocks, logsumexp, sizes_of
from .torch_groups import runs_eagerly
from .torch_products import add_to_classes, added_to_rows, at_a_time

Tensor = torch.Tensor

Bound = Callable[[Tensor, Layer], Tensor]


def of_map(s: Tensor, layer: Layer) -> Tensor:
    """A lower bound [rows, 1] of the scores that may have a probability, from any scores of the rows."""
    return bound_of(layer.mapping, s, xp)


class Candidates(NamedTuple):
    """The candidates of each row: scores in fp32 or fp64, -inf where a row has fewer; the classes ascend, but for an added target."""

    value: Tensor  # [rows, width]
    index: Tensor  # [rows, width]
    at: Tensor | None  # [rows], the place of the target
    full: Tensor  # [rows], True if there were too many scores to keep: the row has no result
    others: Tensor | None = None  # [rows, 1], logsumexp of all scores but the target's, if requested

    def rows_at(self, rows: Tensor) -> Candidates:
        """The candidates of the rows with these indices."""
        return Candidates(*(None if a is None else a[rows] for a in self))  # type: ignore[arg-type]


class OfTarget(enum.Enum):
    """What is done with the target's score."""

    USED = enum.auto()  # it gives a bound, as any other
    LOWERED = enum.auto()  # a margin will lower it: no bound uses it, and it is the last candidate of its row
    APART = enum.auto()  # no bound uses it but the last, with logsumexp of all other scores, which is computed too


class Rule(NamedTuple):
    """Which classes are candidates."""

    blocks: BlockSize
    bound: Bound  # computes, from any scores of the rows, a bound [rows, 1] up to which scores can be dropped
    most: int  # how many scores a row may keep
    of_target: OfTarget


class _CandidateRows:
    """The candidates of some rows, in a buffer that grows up to a limit."""

    def __init__(self, rows: int, width: int, most: int, dtype: torch.dtype, device: torch.device) -> None:
        self.most = most
        self.value = torch.full((rows, width), -math.inf, dtype=dtype, device=device)
        self.index = torch.zeros((rows, width), dtype=torch.int32, device=device)
        self.count = torch.zeros(rows, dtype=torch.int64, device=device)
        self.full = torch.zeros(rows, dtype=torch.bool, device=device)
        self.lost = torch.zeros(rows, dtype=torch.bool, device=device)  # rows with NaN

    def append(self, row: Tensor, index: Tensor, value: Tensor) -> None:
        """Append entries, which are sorted by row."""
        more = torch.bincount(row, minlength=self.count.shape[0])
        place = torch.arange(row.shape[0], device=row.device) - (more.cumsum(0) - more - self.count)[row]
        width = int((self.count + more).max())
        if width > self.value.shape[1]:
            extra = max(width, min(2 * self.value.shape[1], self.most)) - self.value.shape[1]
            self.value = torch.nn.functional.pad(self.value, (0, extra), value=-math.inf)
            self.index = torch.nn.functional.pad(self.index, (0, extra))
        self.value[row, place] = value.to(self.value.dtype)
        self.index[row, place] = index.to(self.index.dtype)
        self.count += more

    def cut(self, bound: Tensor) -> None:
        """Drop all scores up to the bound; a row that still has too many is marked full and loses all."""
        stays = ~(self.value <= bound)
        count = stays.sum(1)
        self.full |= count > self.most
        stays &= ~self.full[:, None]
        row, place = stays.nonzero(as_tuple=True)
        value, index = self.value[row, place], self.index[row, place]
        self.value.fill_(-math.inf)
        self.count.zero_()
        self.append(row, index, value)

    def checked(self, bound: Tensor) -> Tensor:
        """The bound, +inf for rows with NaN and for full rows, which take no more scores."""
        self.lost |= bound.isnan()[:, 0]
        return torch.where((self.lost | self.full)[:, None], math.inf, bound)

    def tightened(self, low: Tensor, bound: Bound, layer: Layer) -> Tensor:
        """Cut by the bound that the candidates give, if it is above `low`; return the larger one."""
        low = self.checked(torch.maximum(low, bound(self.value, layer).to(self.value.dtype)))
        self.cut(low)
        return self.checked(low)

    def place(self, target: Tensor, value: Tensor, last: bool) -> Tensor:
        """The place of each row's target among the candidates; it is appended if it is not there, or if `last`."""
        there = (self.index == target[:, None]) & (self.value != -math.inf)
        there &= torch.arange(self.value.shape[1], device=target.device) < self.count[:, None]
        present = there.any(1) & (not last)
        at = torch.where(present, there.int().argmax(1), self.count)
        row = (~present).nonzero()[:, 0]
        if row.shape[0]:
            self.append(row, target[row], value[row])
        return at

    def result(self, at: Tensor | None, others: Tensor | None = None) -> Candidates:
        self.value[self.lost] = math.nan
        width = max(int(self.count.max()) if self.count.shape[0] else 0, 1)
        return Candidates(self.value[:, :width].contiguous(), self.index[:, :width].contiguous(), at, self.full, others)


def collect(layer: Layer, target: Tensor | None, rule: Rule) -> Candidates:
    """The candidates of each row."""
    parts = []
    for tile, part in layer.parts(rule.blocks.rows):
        parts.append(_collect(part, None if target is None else target[tile], rule))
    if len(parts) == 1:
        return parts[0]
    width = max(p.value.shape[1] for p in parts)
    pad = lambda a, fill: torch.nn.functional.pad(a, (0, width - a.shape[1]), value=fill)  # noqa: E731
    return Candidates(
        torch.cat([pad(p.value, -math.inf) for p in parts]),
        torch.cat([pad(p.index, 0) for p in parts]),
        None if target is None else torch.cat([p.at for p in parts if p.at is not None]),
        torch.cat([p.full for p in parts]),
        None if parts[0].others is None else torch.cat([p.others for p in parts if p.others is not None]),
    )


def _collect(layer: Layer, target: Tensor | None, rule: Rule) -> Candidates:
    """`collect` for a tile of rows, block by block."""
    blocks, bound, most, use = rule
    rows, device = layer.rows, layer.x.device
    dtype = wide_dtype(layer.x, torch)
    scores = ScoreBlocks(layer, blocks, target)
    candidates = _CandidateRows(rows, min(64, most), most, dtype, device)
    of_target = torch.full((rows,), -math.inf, dtype=dtype, device=device)
    low, sums, next_cut = torch.empty(0), [], 1
    for count, (a, b) in enumerate(blocks.parts(layer)):
        s = scores.block(a, b)
        if target is not None:
            row, _, place = scores.targets(a, b)
            of_target[row] = s[row, place].to(dtype)
            if use is not OfTarget.USED:
                s[row, place] = -math.inf
            if use is OfTarget.APART:
                sums.append(logsumexp(s, dtype))
                s[row, place] = of_target[row].to(s.dtype)
        if not count:
            low = bound(s, layer).to(dtype)
            if target is not None and use is not OfTarget.LOWERED:
                low = torch.fmax(low, bound(_below_target(layer, target, dtype), layer))
            low = candidates.checked(low)
        place = _above(s, _rounded_down(low, s.dtype))
        if place.shape[0]:
            row = place // (b - a)
            candidates.append(row, place - row * (b - a) + a, s.view(-1)[place])
        if count + 1 >= next_cut or candidates.value.shape[1] > most:
            next_cut = 2 * next_cut if count + 1 >= next_cut else next_cut
            low = candidates.tightened(low, bound, layer)
            if bool((candidates.full | candidates.lost).all()):
                break
    low = candidates.tightened(low, bound, layer)
    rest = torch.cat(sums, 1).logsumexp(1, keepdim=True) if use is OfTarget.APART else None
    if rest is not None:
        candidates.cut(candidates.checked(torch.maximum(low, bound(torch.cat([of_target[:, None], rest], 1), layer))))
    at = None if target is None else candidates.place(target, of_target, use is OfTarget.LOWERED)
    return candidates.result(at, rest)


def _below_target(layer: Layer, target: Tensor, dtype: torch.dtype) -> Tensor:
    """A lower bound of the target's score, [rows, 1], -inf if it is masked; in a trained model it is among the largest of its row."""
    score = torch.empty((layer.rows, 1), dtype=dtype, device=layer.x.device)
    size = torch.empty_like(score)
    step = max(1, sizes_of(layer.x).products // max(layer.x.shape[1], 1))
    for i in range(0, layer.rows, step):
        terms = layer.x[i : i + step].to(dtype) * layer.weight[target[i : i + step]]
        torch.sum(terms, 1, keepdim=True, out=score[i : i + step])
        torch.sum(terms.abs_(), 1, keepdim=True, out=size[i : i + step])
    if layer.bias is not None:
        bias = layer.bias[target].to(dtype)[:, None]
        score, size = score + bias, size + bias.abs()
    if layer.keep is not None:
        keep = layer.keep.expand(layer.rows, -1).gather(1, target[:, None])
        score = score.masked_fill(~keep, -math.inf)
    eps = torch.finfo(layer.x.dtype if layer.rounded_to is None else layer.rounded_to).eps
    return score - 4.0 * eps * (1.0 + size)


def _above(s: Tensor, low: Tensor) -> Tensor:
    """The places, ascending, of scores above the bound of their row, or NaN; groups of `GROUP` whose maximum is not above are skipped."""
    rows, n = s.shape
    if n % GROUP:
        return (~(s <= low)).view(-1).nonzero()[:, 0]
    by_group = s.view(rows, n // GROUP, GROUP)
    groups = (~(by_group.amax(2) <= low)).view(-1).nonzero()[:, 0]
    inside = ~(by_group.view(-1, GROUP)[groups] <= low[groups // (n // GROUP)])
    part, place = inside.nonzero(as_tuple=True)
    return groups[part] * GROUP + place


def _rounded_down(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype is dtype:
        return x
    y = x.to(dtype)
    return torch.where(y.to(x.dtype) > x, torch.nextafter(y, torch.full_like(y, -math.inf)), y)


def candidates_of(job: Job, bound: Bound = of_map, of_target: OfTarget = OfTarget.USED) -> Candidates:
    """The candidates of each row, without a gradient."""
    layer, n = job.layer, job.layer.classes
    most = n if layer.rows * n <= 1 << 18 else max(64, n * layer.x.element_size() // 160)
    with torch.no_grad():
        return collect(layer.constant(), job.target, Rule(BlockSize.of(layer, job.chunk), bound, most, of_target))


def scores_of(layer: Layer, candidates: Candidates, class_factors: Tensor | None) -> tuple[Tensor, Tensor]:
    """The scores of the candidates, with their gradient, and <all scores, class_factors>, the factors of label smoothing."""
    s, weighted_score = _scores(
        None, layer.x, layer.weight, layer.bias, candidates.index, class_factors, candidates.value
    )
    if layer.keep is not None or layer.bias is not None:  # a masked target is among them, and has no gradient
        s = s.masked_fill(candidates.value == -math.inf, -math.inf)
    return s, weighted_score


def gathered(layer: Layer, classes: Tensor) -> Tensor:
    """The scores of these classes of each row, [rows, width], fp32 or fp64."""
    free = layer.constant() if runs_eagerly(layer) else layer
    step = at_a_time(layer.x, classes.shape[1]) if free is not layer else max(1, layer.rows)
    value = torch.cat([dots(free.x[at], free.weight, free.bias, classes[at], xp) for at in free.groups(step)])
    value = layer.rounded(value, xp)
    if free is layer or not layer.recorded():
        return value
    return _scores(None, layer.x, layer.weight, layer.bias, classes, None, value)[0]


# -- the scores of the candidates, with their gradient ------------------------------------------------------------------------------------


def _forward(_: None, operands: Any, wants: Any) -> tuple[tuple[Tensor, Tensor], Any]:
    """The scores of the candidates, `value`, and <scores, class_factors>."""
    x, weight, bias, _, class_factors, value = operands
    weighted_score, mixed = weighted_scores(value, x, weight, bias, class_factors)
    return (value, weighted_score), (mixed,)


def _backward(_: None, operands: Any, kept: Any, grads: Any, wants: Any) -> Any:
    (x, weight, bias, index, class_factors), (mixed,), (g, g_weighted) = operands, kept, grads
    return *candidates_back(wants, g, g_weighted, index, x, weight, bias, class_factors, mixed), None, None, None


def candidates_back(
    wants: Any, g: Tensor | None, g_weighted: Tensor | None, index: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None,
    class_factors: Tensor | None, mixed: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients by x, weight and bias. g: that of the scores of the classes `index`, mostly 0; g_weighted: of the weighted score."""
    dx = None
    dw = torch.zeros_like(weight) if wants[1] else None
    db = torch.zeros(weight.shape[0], dtype=wide_dtype(x, torch), device=x.device) if wants[2] else None
    if class_factors is not None and mixed is not None and g_weighted is not None:
        dx = torch.outer(g_weighted, mixed) if wants[0] else None
        if dw is not None:
            _add_outer(dw, class_factors, g_weighted @ x.to(class_factors.dtype))
        if db is not None:
            db.addcmul_(class_factors, g_weighted.sum())
    if g is not None:
        row, place = (~(g == 0)).nonzero(as_tuple=True)
        value, cls = g[row, place], index[row, place].to(torch.int64)
        engine = engine_of(LAYER, (weight,), x)
        if db is not None:
            db.index_add_(0, cls, value.to(db.dtype))
        if wants[0]:
            dx = added_to_rows(dx, row, cls, value, x, weight, engine)
        if dw is not None:
            add_to_classes(dw, row, cls, value, x, engine)
    return None if dx is None else dx.to(x.dtype), dw, None if db is None or bias is None else db.to(bias.dtype)


def weighted_scores(
    value: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, class_factors: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """<scores, class_factors> of each row, and `class_factors @ weight`; an empty tensor and None without factors."""
    if class_factors is None:
        return value.new_zeros(0), None
    mixed = _mixed(weight, class_factors)
    weighted_score = x.to(mixed.dtype) @ mixed
    if bias is not None:
        weighted_score = (
            weighted_score + torch.where(class_factors == 0, 0, bias.to(class_factors.dtype)) @ class_factors
        )
    return weighted_score, mixed


def _mixed(weight: Tensor, class_factors: Tensor) -> Tensor:
    """`class_factors @ weight`, a part of the classes at a time if the weight is in half precision."""
    if weight.dtype == class_factors.dtype:
        return class_factors @ weight
    out = torch.zeros(weight.shape[1], dtype=class_factors.dtype, device=class_factors.device)
    step = at_a_time(weight)
    for a in range(0, weight.shape[0], step):
        out += class_factors[a : a + step] @ weight[a : a + step].to(class_factors.dtype)
    return out


def _add_outer(dw: Tensor, class_factors: Tensor, v: Tensor) -> None:
    if dw.dtype == class_factors.dtype:
        dw.addr_(class_factors, v)
        return
    step = at_a_time(dw)
    for a in range(0, dw.shape[0], step):
        dw[a : a + step] += torch.outer(class_factors[a : a + step], v).to(dw.dtype)


def _plain(_: None, operands: Any, kept: Any) -> tuple[Tensor, Tensor]:
    x, weight, bias, index, class_factors = operands
    dtype = wide_dtype(x, torch)
    index = index.to(torch.int64)
    x, weight = x.to(dtype), weight.to(dtype)
    value = (x[:, None, :] * weight[index]).sum(-1)
    value = value if bias is None else value + bias.to(dtype)[index]
    if class_factors is None:
        return value, value.new_zeros(0)
    weighted_score = x @ (class_factors @ weight)
    if bias is not None:
        weighted_score = weighted_score + (torch.where(class_factors == 0, 0, bias.to(dtype)) * class_factors).sum()
    return value, weighted_score


_scores = operation("CandidateScores", _forward, _backward, _plain, saves=5)
