"""PyTorch: an output layer's scores a block of classes at a time; each row keeps its candidates.

A candidate is a class that may have a probability above 0. The threshold of some classes is a lower bound for that of all classes,
since more classes only raise it. So a score below it can be dropped. Each row appends its scores above the bound, block by block; after
1, 2, 4, 8, ... blocks, and when memory is full, the bound is computed again from these candidates. At the end they contain the support,
and the map of them is the map of the row.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import array_api_compat.torch as xp
import torch

from .. import kernels
from .._array import wide_dtype
from ..functional.ways import bound_of
from ..kernels.tasks import DECODE
from ..likelihood.softmax_plain import LOWEST
from ..mappings import Softmax
from . import torch_sizes
from .layer import Layer

Tensor = torch.Tensor

_SOFTMAX = Softmax()

_GROUP = 64  # neighbouring scores that are skipped together if their maximum is below the bound


Bound = Callable[[Tensor, Layer], Tensor]


def of_map(s: Tensor, layer: Layer) -> Tensor:
    """A lower bound [rows, 1] of the scores that may have a probability, from any scores of the rows."""
    return bound_of(layer.mapping, s, xp)


class BlockSize(NamedTuple):
    """How many rows and classes a block of scores has."""

    rows: int
    classes: int

    @classmethod
    def of(cls, layer: Layer, chunk: int | None) -> BlockSize:
        rows, n, sizes = layer.rows, layer.classes, torch_sizes.sizes_of(layer.x)
        tile = min(rows, sizes.block_rows)
        if chunk is not None:
            return cls(max(tile, 1), min(chunk, n))
        if rows * n <= max(sizes.small, min(layer.weight.numel() // sizes.share, sizes.little)):
            return cls(
                max(rows, 1), n
            )  # each block makes threads wait for each other, which takes long on a busy machine
        wanted = min(rows * n // sizes.block_share, sizes.block) // tile
        return cls(tile, min(n, max(_GROUP, min(wanted // _GROUP * _GROUP, sizes.block_classes))))

    def tiles(self, layer: Layer) -> Iterator[slice]:
        for i in range(0, layer.rows, self.rows):
            yield slice(i, min(i + self.rows, layer.rows))

    def buffer(self, layer: Layer) -> Tensor:
        """Memory for one block of the layer's scores."""
        return layer.x.new_empty(min(layer.rows, self.rows) * self.classes, dtype=layer.x.dtype)

    def parts(self, layer: Layer) -> Iterator[tuple[int, int]]:
        for a in range(0, layer.classes, self.classes):
            yield a, min(a + self.classes, layer.classes)


class ScoreBlocks:
    """The scores of some rows, block by block, in a buffer that all blocks share.

    target: a class of each row, [rows], or several, [rows, m]; -1 means none.
    """

    def __init__(
        self, layer: Layer, blocks: BlockSize, target: Tensor | None = None, buffer: Tensor | None = None
    ) -> None:
        self.layer, self.buffer = layer, blocks.buffer(layer) if buffer is None else buffer
        self.converted = (
            (0, 0),
            layer.weight[:0],
        )  # the part of the weight that was last used, in the dtype of the product
        self.order = self.sorted = torch.empty(0)
        if target is not None:
            self.several = target.shape[1] if target.ndim > 1 else 1
            self.sorted, self.order = target.reshape(-1).sort()
            self.ends = dict(
                zip(
                    (edges := [0, *(b for _, b in blocks.parts(layer))]),
                    torch.searchsorted(self.sorted, torch.tensor(edges, device=target.device)).tolist(),
                )
            )

    def block(self, a: int, b: int, new: bool = False) -> Tensor:
        """The scores of the classes a to b, in the dtype of the product. new: in newly allocated memory, not in the buffer."""
        layer, size = self.layer, self.layer.rows * (b - a)
        s = (self.buffer.new_empty(size) if new else self.buffer[:size]).view(layer.rows, b - a)
        torch.mm(layer.x, self.weight(a, b).t(), out=s)
        if layer.bias is not None:
            s += layer.bias[a:b]
        if layer.keep is not None:
            s.masked_fill_(~layer.keep[:, a:b], -math.inf)
        return s

    def weight(self, a: int, b: int) -> Tensor:
        """The weight of the classes a to b, in the dtype of the product."""
        if self.converted[0] != (a, b):
            self.converted = (a, b), self.layer.weight[a:b].to(self.layer.x.dtype)
        return self.converted[1]

    def targets(self, a: int, b: int) -> tuple[Tensor, Tensor, Tensor]:
        """The rows that have a target among the classes a to b, which of their targets it is, and its place among these classes."""
        i, j = self.ends[a], self.ends[b]
        order = self.order[i:j]
        return order // self.several, order % self.several, self.sorted[i:j] - a


class Candidates(NamedTuple):
    """The candidates of each row: scores in fp32 or fp64, -inf where a row has fewer; the classes ascend, but for an added target."""

    value: Tensor  # [rows, width]
    index: Tensor  # [rows, width]
    at: Tensor | None  # [rows], the place of the target
    full: Tensor  # [rows], True if there were too many scores to keep: the row has no result
    others: Tensor | None = None  # [rows, 1], logsumexp of all scores but the target's, if requested

    def part(self, rows: Tensor) -> Candidates:
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
    for tile in rule.blocks.tiles(layer):
        parts.append(_collect(layer.part(tile), None if target is None else target[tile], rule))
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


def logsumexp_entropy(s: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """logsumexp of each row and the entropy of its softmax, [rows, 1]; 0 for a row without classes."""
    engine = kernels.engine_of(DECODE, _SOFTMAX, s)
    if engine is not None:
        result = engine.decode(_SOFTMAX, s, entropy=True, tau=True)
        return result.tau[:, None].to(dtype), result.entropy[:, None].to(dtype)
    s = s.to(dtype)
    level = s.logsumexp(1, keepdim=True)
    below = (s - torch.where(level == -math.inf, 0.0, level)).clamp_(min=LOWEST)
    return level, -(below.exp() * below).sum(1, keepdim=True)


def logsumexp(s: Tensor, dtype: torch.dtype) -> Tensor:
    """logsumexp of each row, [rows, 1]."""
    engine = kernels.compiled("threshold", _SOFTMAX, s)
    if engine is not None:
        return engine.threshold(_SOFTMAX, s).to(dtype)
    return s.to(dtype).logsumexp(1, keepdim=True)


def _below_target(layer: Layer, target: Tensor, dtype: torch.dtype) -> Tensor:
    """A lower bound of the target's score, [rows, 1], -inf if it is masked; in a trained model it is among the largest of its row."""
    score = torch.empty((layer.rows, 1), dtype=dtype, device=layer.x.device)
    size = torch.empty_like(score)
    step = max(1, torch_sizes.sizes_of(layer.x).products // max(layer.x.shape[1], 1))
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
    return score - 4.0 * torch.finfo(layer.x.dtype).eps * (1.0 + size)


def _above(s: Tensor, low: Tensor) -> Tensor:
    """The places, ascending, of scores above the bound of their row, or NaN; groups of `_GROUP` whose maximum is not above are skipped."""
    rows, n = s.shape
    if n % _GROUP:
        return (~(s <= low)).view(-1).nonzero()[:, 0]
    by_group = s.view(rows, n // _GROUP, _GROUP)
    groups = (~(by_group.amax(2) <= low)).view(-1).nonzero()[:, 0]
    inside = ~(by_group.view(-1, _GROUP)[groups] <= low[groups // (n // _GROUP)])
    part, place = inside.nonzero(as_tuple=True)
    return groups[part] * _GROUP + place


def _rounded_down(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype is dtype:
        return x
    y = x.to(dtype)
    return torch.where(y.to(x.dtype) > x, torch.nextafter(y, torch.full_like(y, -math.inf)), y)
