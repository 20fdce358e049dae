"""PyTorch: softmax's output layer: the target's score, and logsumexp of all others, a block of classes at a time.

The gradient computes each block of scores again. The gradient of the gradient holds all scores: it uses plain operations.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from .._array import plain_backward, wide_dtype
from ..autodiff.saving import save, saved
from ..autodiff.torch import plain_grads
from ..kernels import triton
from ..mappings import Softmax
from .job import Job
from .layer import Layer
from .torch_candidate_scores import candidates_of, few_back, weighted_scores
from .torch_candidates import BlockSize, Candidates, OfTarget, ScoreBlocks, logsumexp

Tensor = torch.Tensor

_SOFTMAX = Softmax()
_ROWS = {"cpu": 128}  # half-precision rows converted to fp32 at a time; a GPU converts a whole block
_MANY = 1 << 25


def of_softmax(job: Job, u: Tensor | None) -> tuple[Tensor, Tensor]:
    """The target's score and logsumexp of all others, [rows, 2], and <scores, u>; classes below `least` may have no gradient."""
    layer, target, least = job.layer, job.target, job.per_row.least
    if least and layer.recorded():
        wide = wide_dtype(layer.x, torch)
        bound = lambda s, layer: logsumexp(s, wide) + (math.log(least) - 1e-4)  # noqa: E731
        held = candidates_of(job, bound, OfTarget.APART)
        if not bool(held.full.any()):
            return _Likely.apply(layer.x, layer.weight, layer.bias, layer, target, held, u)
    return _Others.apply(layer.x, layer.weight, layer.bias, layer, target, BlockSize.of(layer, job.chunk), u)


class _Others(torch.autograd.Function):
    """The target's score of each row and logsumexp of all others, [rows, 2]; and <scores, u> for a vector u over all classes."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Layer, target: Tensor, blocks: BlockSize,
        u: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        layer = dataclasses.replace(layer, x=x, weight=weight, bias=bias)
        ctx.blocks = blocks
        ctx.set_materialize_grads(False)
        value = two_of(layer, target, blocks)
        even, _ = weighted_scores(value, x, weight, bias, u)
        save(ctx, x, weight, bias, layer.keep, target, value, u)
        return value, even

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (x, weight, bias, keep, target, value, u), none = saved(ctx), (None,) * 4
        if plain_backward(*grads):
            return *_plain_gradient(x, weight, bias, keep, target, u, grads), *none
        layer, (g, g_even), wants = _layer(x, weight, bias, keep), grads, ctx.needs_input_grad[:3]
        g = torch.zeros_like(value) if g is None else g
        return *_others_back(layer, target, value, g, u, g_even, ctx.blocks, wants), *none


class _Likely(torch.autograd.Function):
    """`_Others` with a gradient for the candidates only."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Layer, target: Tensor, held: Candidates, u: Tensor | None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert held.at is not None
        assert held.others is not None
        ctx.set_materialize_grads(False)
        two = torch.cat([held.value.gather(1, held.at[:, None]), held.others], 1)
        even, mean = weighted_scores(two, x, weight, bias, u)
        save(ctx, x, weight, bias, layer.keep, target, two, held.value, held.index, held.at, u, mean)
        return two, even

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (x, weight, bias, keep, target, two, value, index, at, u, mean), none = saved(ctx), (None,) * 4
        if plain_backward(*grads):
            return *_plain_gradient(x, weight, bias, keep, target, u, grads), *none
        g, g_even = grads
        if g is not None:
            g = ((value - _level(two)).exp_() * g[:, 1:]).scatter_(1, at[:, None], g[:, :1])
        return *few_back(ctx.needs_input_grad, g, g_even, index, x, weight, bias, u, mean), *none


def two_of(layer: Layer, target: Tensor, blocks: BlockSize) -> Tensor:
    """The target's score and logsumexp of all others of each row, fp32 or fp64."""
    if layer.rows and (gpu := triton.output_layer(layer.x, layer.weight, layer.bias)) is not None:
        return gpu.two_of(layer, target)
    wide = wide_dtype(layer.x, torch)
    value = torch.full((layer.rows, 2), -math.inf, dtype=wide, device=layer.x.device)
    for tile in blocks.tiles(layer):
        part, out = layer.part(tile), value[tile]
        scores = ScoreBlocks(part, blocks, target[tile])
        sums = []
        for a, b in blocks.parts(part):
            s = scores.block(a, b)
            row, place = scores.targets(a, b)
            out[row, 0] = s[row, place].to(wide)
            s[row, place] = -math.inf
            sums.append(logsumexp(s, wide))
        out[:, 1] = torch.cat(sums, 1).logsumexp(1)
    return value


def _level(two: Tensor) -> Tensor:
    """logsumexp of the others, [rows, 1]; +inf for a row without others, so that exp is 0 everywhere."""
    level = two[:, 1:]
    return torch.where(level == -math.inf, math.inf, level)


def _others_back(
    layer: Layer, target: Tensor, value: Tensor, g: Tensor, u: Tensor | None, g_even: Tensor | None, blocks: BlockSize, wants: Any
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of `_Others` by x, weight and bias, a block of scores at a time; u and g_even are those of <scores, u>."""
    x, weight, bias, wide = layer.x, layer.weight, layer.bias, value.dtype
    half = x.dtype is not wide
    dx = torch.zeros(x.shape, dtype=wide, device=x.device) if wants[0] else None
    dw = torch.empty_like(weight) if wants[1] else None
    db = torch.zeros(weight.shape[0], dtype=wide, device=x.device) if wants[2] else None
    level = _level(value)
    gpu = triton.output_layer(x, weight, bias) if layer.rows else None
    step = _ROWS.get(x.device.type, _MANY) if half else _MANY
    tiles = list(blocks.tiles(layer))
    buffer = blocks.buffer(layer)
    scores = [ScoreBlocks(layer.part(tile), blocks, target[tile] if gpu is None else None, buffer) for tile in tiles]
    for a, b in blocks.parts(layer):
        sums = None
        for tile, of in zip(tiles, scores):
            even = None if g_even is None else g_even[tile]
            if gpu is not None:
                d = gpu.slopes(of.layer, target[tile], level[tile, 0], g[tile], u, even, a, b, of.buffer)
            else:
                d = _slopes(of, level[tile], g[tile], u, even, a, b, step)
            if db is not None:
                db[a:b] += d.sum(0, dtype=wide)
            if dx is not None and half:
                for out, some in zip(dx[tile].split(step), d.split(step)):
                    out += some @ weight[a:b]
            elif dx is not None:
                dx[tile].addmm_(d, weight[a:b])
            if dw is not None:
                if len(tiles) == 1:
                    torch.mm(d.t(), x, out=dw[a:b])
                elif sums is None:
                    sums = (d.t() @ x[tile]).to(wide)
                else:
                    sums += d.t() @ x[tile]
        if sums is not None and dw is not None:
            dw[a:b] = sums
    return [None if dx is None else dx.to(x.dtype), dw, None if db is None or bias is None else db.to(bias.dtype)]


def _slopes(
    scores: ScoreBlocks, level: Tensor, g: Tensor, u: Tensor | None, g_even: Tensor | None, a: int, b: int, step: int
) -> Tensor:
    """The gradient in the scores of the classes a to b, in the dtype of the product, `step` rows at a time."""
    d = scores.block(a, b)
    row, place = scores.targets(a, b)
    d[row, place] = -math.inf
    for i in range(0, d.shape[0], step):
        some = slice(i, i + step)
        p = d[some].to(level.dtype)
        p.sub_(level[some]).exp_().mul_(g[some, 1:])
        if u is not None and g_even is not None:
            p.addr_(g_even[some], u[a:b])
        if p.dtype is not d.dtype:
            d[some] = p
    d[row, place] += g[row, 0].to(d.dtype)
    return d


def _plain_gradient(
    x: Tensor, weight: Tensor, bias: Tensor | None, keep: Tensor | None, target: Tensor, u: Tensor | None, grads: Any
) -> list[Tensor | None]:
    """The gradients of `of_softmax` by x, weight and bias in plain operations, which can be differentiated again."""

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        s = _layer(x, weight, bias, keep).scores().to(wide_dtype(x, torch))
        own = s.gather(1, target[:, None])
        others = torch.scatter(s, 1, target[:, None], -math.inf).logsumexp(1, keepdim=True)
        even = s.new_zeros(0) if u is None else (torch.where(u == 0, 0, s) * u).sum(1)
        return torch.cat([own, others], 1), even

    return plain_grads(plain, (x, weight, bias), grads)


def _layer(x: Tensor, weight: Tensor, bias: Tensor | None, keep: Tensor | None) -> Layer:
    return Layer(x, weight, bias, keep, _SOFTMAX, (x.shape[0],), x.dtype)
