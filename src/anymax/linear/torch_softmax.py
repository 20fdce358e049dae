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
from ..kernels.engine import Engine
from ..likelihood.softmax_plain import LOWEST, at_classes
from ..mappings import Softmax
from .job import Job
from .layer import Layer
from .torch_blocks import BlockSize, ScoreBlocks, holds_scores, logsumexp, logsumexp_entropy, sizes_of
from .torch_candidates import OfTarget, candidates_back, candidates_of, weighted_scores
from .torch_scores import ShortGradient, ShortRows, block_of, engine_of_blocks, level_of

Tensor = torch.Tensor

_SOFTMAX = Softmax()


def of_softmax(
    job: Job, class_factors: Tensor | None, *, entropy: bool = False, min_probability: float = 0.0
) -> ShortRows:
    """The short rows, on request with the entropy. class_factors: a factor for each class, those of label smoothing.

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
            return ShortRows(target_and_rest, weighted_score, None)
    target = target if target.ndim == 2 else target[:, None]
    holds, engine = holds_scores(layer, job.chunk), engine_of_blocks(layer) if target.shape[1] == 1 else None
    how = _How(BlockSize.of(layer, job.chunk), entropy, holds, engine)
    return ShortRows(*_others(how, *_operands(layer, target, class_factors), layer.factor))


def _operands(layer: Layer, target: Tensor, class_factors: Tensor | None) -> tuple[Tensor | None, ...]:
    return layer.x, layer.weight, layer.bias, layer.keep, target, class_factors


class _How(NamedTuple):
    blocks: BlockSize
    entropy: bool
    holds: bool = False  # the scores, from the forward to the backward pass; or what an engine takes in their place
    engine: Engine | None = None


def _others_forward(how: _How, operands: Any, wants: Any) -> tuple[tuple[Tensor, ...], Any]:
    """The short rows."""
    x, weight, bias, keep, target, class_factors, factor = operands
    blocks, entropy, holds, engine = how
    held = x.new_empty(x.shape[0] * weight.shape[0], dtype=blocks.dtype_of(x)) if holds and any(wants[:3]) else None
    layer = _layer(x, weight, bias, keep, blocks, factor)
    value, h = others_of(layer, target, blocks, entropy, held, engine)
    weighted_score, _ = weighted_scores(value, x, weight, bias, class_factors)
    return (value, weighted_score, h), (value, h, held)


def _others_backward(how: _How, operands: Any, kept: Any, grads: Any, wants: Any) -> Any:
    (x, weight, bias, keep, target, class_factors, factor), (value, h, held), (g, g_weighted, g_h) = (
        operands,
        kept,
        grads,
    )
    gradient = ShortGradient.of(value, h, class_factors, g, g_weighted, g_h)
    layer = _layer(x, weight, bias, keep, how.blocks, factor)
    return *_others_back(layer, target, gradient, held, how, wants), *(None,) * 4


def _others_plain(how: _How, operands: Any, kept: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _plain(*operands, how=how)


def _plain(
    x: Tensor, weight: Tensor, bias: Tensor | None, keep: Tensor | None, target: Tensor, class_factors: Tensor | None,
    factor: Tensor | None, how: _How,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    s = _layer(x, weight, bias, keep, how.blocks, factor).scores().to(wide_dtype(x, torch))
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
        g = ((value - level_of(target_and_rest)).exp_() * g[:, 1:]).scatter_(1, at[:, None], g_target)
    return *candidates_back(wants, g, g_weighted, index, x, weight, bias, class_factors, mixed), *(None,) * 7


def _likely_plain(blocks: BlockSize, operands: Any, kept: Any) -> tuple[Tensor, Tensor]:
    x, weight, bias, keep, target, class_factors, *_candidates = operands
    return _plain(x, weight, bias, keep, target[:, None], class_factors, None, _How(blocks, entropy=False))[:2]


_likely = operation("SoftmaxCandidates", _likely_forward, _likely_backward, _likely_plain, saves=9)


def others_of(
    layer: Layer,
    target: Tensor,
    blocks: BlockSize,
    entropy: bool,
    held: Tensor | None = None,
    engine: Engine | None = None,
) -> tuple[Tensor, Tensor]:
    """The scores of the targets [rows, m] and logsumexp of all others of each row, [rows, m + 1], fp32 or fp64; and the entropy of the
    softmax of the others, [rows, 1], without columns if it is not requested.

    held: memory for all scores, which takes the blocks of each tile of rows; there those of the targets are -inf. engine: it reads each
    block once, and `held` takes numbers, before a bias and a mask.
    """
    dtype, (rows, m) = wide_dtype(layer.x, torch), target.shape
    value = torch.full((rows, m + 1), -math.inf, dtype=dtype, device=layer.x.device)
    h = value.new_zeros((rows, int(entropy)))
    for tile, part in layer.parts(blocks.rows):
        out = value[tile]
        scores = ScoreBlocks(part, blocks, None if engine is not None else target[tile])
        levels, entropies = [], []
        for a, b in blocks.parts(part):
            memory = _part_of(held, tile, a, b, layer.classes)
            if engine is not None:
                block = block_of(part, scores.numbers(a, b, memory), target[tile], a)
                terms, _ = engine.score_terms(block, None, entropy=entropy, best=False)
                torch.maximum(out[:, :1], terms[:, :1], out=out[:, :1])
                levels.append(terms[:, 1:2])
                entropies.append(terms[:, 2:3])
                continue
            s = scores.block(a, b, memory)
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
            below = (of_blocks - level_of(out)).clamp_(min=LOWEST)
            h[tile] = (below.exp() * (torch.cat(entropies, 1) - below)).sum(1, keepdim=True)
    return value, h


def _part_of(held: Tensor | None, tile: slice, a: int, b: int, n: int) -> Tensor | None:
    """The memory of the scores of some rows and the classes a to b of n, if they are held."""
    rows = tile.stop - tile.start
    return None if held is None else held[tile.start * n + rows * a : tile.start * n + rows * b].view(rows, b - a)


class _BlockGradient(NamedTuple):
    """The gradient in the scores of some rows, a block of classes at a time."""

    of: ShortGradient
    scores: ScoreBlocks
    target: Tensor  # of the rows
    engine: Engine | None

    def block(self, held: Tensor | None, a: int, b: int, step: int) -> Tensor:
        """The gradient in the numbers of the classes a to b, in their dtype or that of the features, `step` rows at a time. held: these
        scores, or numbers for the engine."""
        scores, of, layer = self.scores, self.of, self.scores.layer
        if self.engine is not None:
            numbers = scores.numbers(a, b) if held is None else held
            block = block_of(layer, numbers, self.target, a)
            return of.written(self.engine, block, scores.memory(a, b), layer.x.dtype)
        row, column, place = scores.targets(a, b)
        d = s = scores.block(a, b) if held is None else held
        if held is None:
            d[row, place] = -math.inf
        else:
            d = scores.memory(a, b)
        for i in range(0, d.shape[0], step):
            rows = slice(i, i + step)
            _write(of.rows_at(rows), d[rows], s[rows], a, b)
        d[row, place] += of.g[row, column].to(d.dtype)
        return d if layer.factor is None else d.mul_(layer.factor)


def _write(of: ShortGradient, d: Tensor, s: Tensor, a: int, b: int) -> None:
    """Write the gradient in the scores `s` of the classes a to b to `d`, which may be these scores."""
    level = level_of(of.value)
    log_q = torch.sub(s, level, out=d) if d.dtype is level.dtype else s.to(level.dtype).sub_(level)
    if of.mix is None:
        q = log_q.exp_().mul_(of.g[:, -1:])
    else:
        q = log_q.exp()
        q.mul_(log_q.clamp_(min=LOWEST).mul_(-of.mix).add_(of.g[:, -1:]))
    if of.class_factors is not None and of.g_weighted is not None:
        q.addr_(of.g_weighted, of.class_factors[a:b])
    if q.data_ptr() != d.data_ptr():
        d.copy_(q)


def _others_back(
    layer: Layer, target: Tensor, of: ShortGradient, held: Tensor | None, how: _How, wants: Any
) -> list[Tensor | None]:
    """The gradients of `_others` by x, weight and bias, a block of scores at a time. held: these, if they are held."""
    x, weight, bias, dtype, blocks = layer.x, layer.weight, layer.bias, of.value.dtype, how.blocks
    dx = torch.zeros(x.shape, dtype=dtype, device=x.device) if wants[0] else None
    dw = torch.empty_like(weight) if wants[1] else None
    db = torch.zeros(weight.shape[0], dtype=dtype, device=x.device) if wants[2] else None
    tiles = list(layer.parts(blocks.rows))
    buffer = blocks.buffer(layer)
    half, step = x.dtype is not dtype, max(layer.rows, 1)
    converted = step if buffer.dtype is dtype else sizes_of(x).converted
    parts = [
        _BlockGradient(
            of.rows_at(tile), ScoreBlocks(part, blocks, None if how.engine else target[tile], buffer), target[tile], how.engine
        )
        for tile, part in tiles
    ]  # fmt: skip
    for a, b in blocks.parts(layer):
        sums = None
        for (tile, _), part in zip(tiles, parts):
            block = part.scores
            d = part.block(_part_of(held, tile, a, b, layer.classes), a, b, converted)
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


def _layer(
    x: Tensor, weight: Tensor, bias: Tensor | None, keep: Tensor | None, blocks: BlockSize, factor: Tensor | None
) -> Layer:
    dtype = blocks.rounded_to
    return Layer(x, weight, bias, keep, _SOFTMAX, (x.shape[0],), x.dtype, rounded_to=dtype, factor=factor)
