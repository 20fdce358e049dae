"""PyTorch: softmax's output layer: the targets' scores, and logsumexp and entropy of all others, a block of classes at a time.

The scores are held for the gradient if they take little memory beside the weight; else it computes each block again. The gradient of the
gradient holds all scores: it uses plain operations.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from .._array import wide_dtype
from ..autodiff.torch_adapter import operation
from ..likelihood.softmax_plain import LOWEST, at_classes
from ..mappings import Softmax
from .job import Job
from .layer import Layer
from .torch_blocks import BlockSize, ScoreBlocks, holds_scores, logsumexp, logsumexp_entropy, sizes_of
from .torch_candidates import OfTarget, candidates_back, candidates_of, weighted_scores

Tensor = torch.Tensor

_SOFTMAX = Softmax()


def of_softmax(
    job: Job, class_factors: Tensor | None, *, entropy: bool = False, min_probability: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """The targets' scores and logsumexp of all others, [rows, m + 1]; <scores, class_factors>; and on request the entropy of the others,
    [rows, 1]. class_factors: a factor for each class, those of label smoothing.

    Classes with a probability below `min_probability` may have no gradient.
    """
    layer, target = job.layer, job.target
    assert target is not None
    if min_probability and layer.recorded():
        dtype = wide_dtype(layer.x, torch)
        bound = lambda s, layer: logsumexp(s, dtype) + (math.log(min_probability) - 1e-4)  # noqa: E731
        value, index, at, full, others = candidates_of(job, bound, OfTarget.APART)
        if not bool(full.any()):
            target_and_rest, weighted_score = _likely(
                BlockSize.of(layer, job.chunk), *_operands(layer, target, class_factors), value, index, at, others
            )
            return target_and_rest, weighted_score, weighted_score
    target = target if target.ndim == 2 else target[:, None]
    holds = holds_scores(layer, job.chunk)
    return _others(_How(BlockSize.of(layer, job.chunk), entropy, holds), *_operands(layer, target, class_factors))


def _operands(layer: Layer, target: Tensor, class_factors: Tensor | None) -> tuple[Tensor | None, ...]:
    return layer.x, layer.weight, layer.bias, layer.keep, target, class_factors


class _How(NamedTuple):
    blocks: BlockSize
    entropy: bool
    holds: bool = False  # the scores, from the forward to the backward pass


def _others_forward(how: _How, operands: Any, wants: Any) -> tuple[tuple[Tensor, ...], Any]:
    """The scores of the targets of each row and logsumexp of all others, [rows, m + 1]; <scores, class_factors>; the
    entropy of the softmax of the others."""
    x, weight, bias, keep, target, class_factors = operands
    blocks, entropy, holds = how
    held = x.new_empty(x.shape[0] * weight.shape[0], dtype=blocks.dtype_of(x)) if holds and any(wants[:3]) else None
    value, h = others_of(_layer(x, weight, bias, keep, blocks), target, blocks, entropy, held)
    weighted_score, _ = weighted_scores(value, x, weight, bias, class_factors)
    return (value, weighted_score, h), (value, h, held)


def _others_backward(how: _How, operands: Any, kept: Any, grads: Any, wants: Any) -> Any:
    (x, weight, bias, keep, target, class_factors), (value, h, held), (g, g_weighted, g_h) = operands, kept, grads
    g = torch.zeros_like(value) if g is None else g.masked_fill(value == -math.inf, 0)  # a masked class has none
    if g_h is not None:  # the gradient of the entropy is -q (log q + entropy)
        g = torch.cat([g[:, :-1], g[:, -1:] - g_h * h], 1)
    gradient = _ScoreGradient(value, g, g_h, class_factors, g_weighted)
    return (
        *_others_back(_layer(x, weight, bias, keep, how.blocks), target, gradient, held, how.blocks, wants),
        None,
        None,
        None,
    )


def _others_plain(how: _How, operands: Any, kept: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _plain(*operands, how=how)


def _plain(
    x: Tensor, weight: Tensor, bias: Tensor | None, keep: Tensor | None, target: Tensor, class_factors: Tensor | None,
    how: _How,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    s = _layer(x, weight, bias, keep, how.blocks).scores().to(wide_dtype(x, torch))
    there = target >= 0
    of_target = torch.where(there, s.gather(1, target.clamp(min=0)), -math.inf)
    s = s.masked_fill(at_classes(torch.where(there, target, s.shape[1]), s, torch), -math.inf)
    level = s.logsumexp(1, keepdim=True)
    weighted_score = (
        s.new_zeros(0) if class_factors is None else (torch.where(class_factors == 0, 0, s) * class_factors).sum(1)
    )
    h = s.new_zeros((s.shape[0], 0))
    if how.entropy:
        below = (s - torch.where(level == -math.inf, math.inf, level)).clamp(min=LOWEST)
        h = -(below.exp() * below).sum(1, keepdim=True)
    return torch.cat([of_target, level], 1), weighted_score, h


_others = operation("SoftmaxOthers", _others_forward, _others_backward, _others_plain)


def _likely_forward(_: BlockSize, operands: Any, wants: Any) -> tuple[tuple[Tensor, Tensor], Any]:
    """`_others_forward` with a gradient for the candidates only."""
    x, weight, bias, _keep, _target, class_factors, value, _index, at, others = operands
    target_and_rest = torch.cat([value.gather(1, at[:, None]), others], 1)
    weighted_score, mixed = weighted_scores(target_and_rest, x, weight, bias, class_factors)
    return (target_and_rest, weighted_score), (target_and_rest, mixed)


def _likely_backward(_: BlockSize, operands: Any, kept: Any, grads: Any, wants: Any) -> Any:
    x, weight, bias, _keep, _target, class_factors, value, index, at = operands
    (target_and_rest, mixed), (g, g_weighted) = kept, grads
    if g is not None:
        g_target = g[:, :1].masked_fill(target_and_rest[:, :1] == -math.inf, 0)
        g = ((value - _level(target_and_rest)).exp_() * g[:, 1:]).scatter_(1, at[:, None], g_target)
    return *candidates_back(wants, g, g_weighted, index, x, weight, bias, class_factors, mixed), *(None,) * 7


def _likely_plain(blocks: BlockSize, operands: Any, kept: Any) -> tuple[Tensor, Tensor]:
    x, weight, bias, keep, target, class_factors, *_candidates = operands
    return _plain(x, weight, bias, keep, target[:, None], class_factors, _How(blocks, entropy=False))[:2]


_likely = operation("SoftmaxCandidates", _likely_forward, _likely_backward, _likely_plain, saves=9)


def others_of(
    layer: Layer, target: Tensor, blocks: BlockSize, entropy: bool, held: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The scores of the targets [rows, m] and logsumexp of all others of each row, [rows, m + 1], fp32 or fp64; and the entropy of the
    softmax of the others, [rows, 1], without columns if it is not requested.

    held: memory for all scores, which takes the blocks of each tile of rows; there those of the targets are -inf.
    """
    dtype, (rows, m) = wide_dtype(layer.x, torch), target.shape
    value = torch.full((rows, m + 1), -math.inf, dtype=dtype, device=layer.x.device)
    h = value.new_zeros((rows, int(entropy)))
    for tile, part in layer.parts(blocks.rows):
        out = value[tile]
        scores = ScoreBlocks(part, blocks, target[tile])
        levels, entropies = [], []
        for a, b in blocks.parts(part):
            s = scores.block(a, b, _part_of(held, tile, a, b, layer.classes))
            row, column, place = scores.targets(a, b)
            out[row, column] = s[row, place].to(dtype)
            s[row, place] = -math.inf
            if entropy:
                level, of_block = logsumexp_entropy(s, dtype)
                entropies.append(of_block)
            else:
                level = logsumexp(s, dtype)
            levels.append(level)
        of_blocks = torch.cat(levels, 1)
        out[:, -1] = of_blocks.logsumexp(1)
        if entropy:  # of the choice of a block, plus the mean of those of the blocks
            below = (of_blocks - _level(out)).clamp_(min=LOWEST)
            h[tile] = (below.exp() * (torch.cat(entropies, 1) - below)).sum(1, keepdim=True)
    return value, h


def _part_of(held: Tensor | None, tile: slice, a: int, b: int, n: int) -> Tensor | None:
    """The memory of the scores of some rows and the classes a to b of n, if they are held."""
    rows = tile.stop - tile.start
    return None if held is None else held[tile.start * n + rows * a : tile.start * n + rows * b].view(rows, b - a)


def _level(value: Tensor) -> Tensor:
    """logsumexp of the others, [rows, 1]; +inf for a row without others, so that exp is 0 everywhere."""
    level = value[:, -1:]
    return torch.where(level == -math.inf, math.inf, level)


class _ScoreGradient(NamedTuple):
    """What the gradient in the scores of some rows depends on: it is g for the targets, and q (g - mix log q) for the others."""

    value: Tensor  # the result of `_others`
    g: Tensor  # [rows, m + 1]
    mix: Tensor | None  # [rows, 1]
    class_factors: Tensor | None
    g_weighted: Tensor | None

    def rows_at(self, rows: slice) -> _ScoreGradient:
        """The part of these rows."""
        value, g, mix, class_factors, g_weighted = self
        mix, g_weighted = (None if a is None else a[rows] for a in (mix, g_weighted))
        return _ScoreGradient(value[rows], g[rows], mix, class_factors, g_weighted)

    def block(self, scores: ScoreBlocks, held: Tensor | None, a: int, b: int, step: int) -> Tensor:
        """The gradient in the scores of the classes a to b, in their dtype, `step` rows at a time. held: these scores."""
        row, column, place = scores.targets(a, b)
        d = s = scores.block(a, b) if held is None else held
        if held is None:
            d[row, place] = -math.inf
        else:
            d = scores.memory(a, b)
        for i in range(0, d.shape[0], step):
            rows = slice(i, i + step)
            self.rows_at(rows).write(d[rows], s[rows], a, b)
        d[row, place] += self.g[row, column].to(d.dtype)
        return d

    def write(self, d: Tensor, s: Tensor, a: int, b: int) -> None:
        """Write the gradient in the scores `s` of the classes a to b to `d`, which may be these scores."""
        level = _level(self.value)
        log_q = torch.sub(s, level, out=d) if d.dtype is level.dtype else s.to(level.dtype).sub_(level)
        if self.mix is None:
            q = log_q.exp_().mul_(self.g[:, -1:])
        else:
            q = log_q.exp()
            q.mul_(log_q.clamp_(min=LOWEST).mul_(-self.mix).add_(self.g[:, -1:]))
        if self.class_factors is not None and self.g_weighted is not None:
            q.addr_(self.g_weighted, self.class_factors[a:b])
        if q.data_ptr() != d.data_ptr():
            d.copy_(q)


def _others_back(
    layer: Layer, target: Tensor, of: _ScoreGradient, held: Tensor | None, blocks: BlockSize, wants: Any
) -> list[Tensor | None]:
    """The gradients of `_others` by x, weight and bias, a block of scores at a time. held: these, if they are held."""
    x, weight, bias, dtype = layer.x, layer.weight, layer.bias, of.value.dtype
    dx = torch.zeros(x.shape, dtype=dtype, device=x.device) if wants[0] else None
    dw = torch.empty_like(weight) if wants[1] else None
    db = torch.zeros(weight.shape[0], dtype=dtype, device=x.device) if wants[2] else None
    tiles = list(layer.parts(blocks.rows))
    buffer = blocks.buffer(layer)
    half, step = x.dtype is not dtype, max(layer.rows, 1)
    converted = step if buffer.dtype is dtype else sizes_of(x).converted
    scores = [ScoreBlocks(part, blocks, target[tile], buffer) for tile, part in tiles]
    parts = [of.rows_at(tile) for tile, _ in tiles]
    for a, b in blocks.parts(layer):
        sums = None
        for (tile, _), block, part in zip(tiles, scores, parts):
            d = part.block(block, _part_of(held, tile, a, b, layer.classes), a, b, converted)
            if db is not None:
                db[a:b] += d.sum(0, dtype=dtype)
            d = d.to(x.dtype)
            if dx is not None and half:
                for out, piece in zip(dx[tile].split(sizes_of(x).converted), d.split(sizes_of(x).converted)):
                    out += piece @ weight[a:b]
            elif dx is not None:
                dx[tile].addmm_(d, block.weight(a, b))
            if dw is not None:
                if len(tiles) == 1 and d.dtype is dw.dtype:
                    torch.mm(d.t(), block.layer.x, out=dw[a:b])
                elif sums is None:
                    sums = (d.t() @ block.layer.x).to(dtype)
                else:
                    sums += d.t() @ block.layer.x
        if sums is not None and dw is not None:
            dw[a:b] = sums
    return [None if dx is None else dx.to(x.dtype), dw, None if db is None or bias is None else db.to(bias.dtype)]


def _layer(x: Tensor, weight: Tensor, bias: Tensor | None, keep: Tensor | None, blocks: BlockSize) -> Layer:
    return Layer(x, weight, bias, keep, _SOFTMAX, (x.shape[0],), x.dtype, rounded_to=blocks.rounded_to)
