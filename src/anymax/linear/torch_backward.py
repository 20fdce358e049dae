"""PyTorch: an output layer that never holds all scores, forward or backward.

Three ways, by the map:
- sparse separable maps and top-k: each row keeps a few scores (`torch_candidates`), which are a function of features and weight; its
  gradient is a product over the scores that have a gradient;
- softmax: the target's score, and logsumexp of all others, a block of classes at a time; the gradient computes each block again;
- any other map: a group of rows at a time, whose scores are computed again for the gradient (`torch_groups`).

The gradient of the gradient holds all scores: it uses plain operations.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import array_api_compat.torch as xp
import torch

from .._array import modes, plain_backward, recorded, transformed, wide_dtype
from ..autodiff.saving import save, saved
from ..autodiff.torch import KINDS, plain_grads
from ..kernels import triton
from ..mappings import Softmax
from .layer import Layer, dots
from .torch_candidates import Blocks, Bound, Kept, Scores, collect, logsumexp

Tensor = torch.Tensor

_SOFTMAX = Softmax()
_ROWS = {"cpu": 128}  # half-precision rows converted to fp32 at a time; a GPU converts a whole block
_PIECE = {"cpu": 1 << 18}  # features gathered at a time for a sparse product
_MANY = 1 << 25


def runs_eagerly(layer: Layer, *others: Any) -> bool:
    """True for eager calls on plain tensors, without tracing, if none of `others` requires a gradient."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or modes() or transformed():
        return False
    tensors = [a for a in (layer.x, layer.weight, layer.bias, layer.keep, *others) if a is not None]
    if any(type(a) not in KINDS or a.layout is not torch.strided or a.is_meta for a in tensors):
        return False
    return not recorded(*others)


def wants_gradient(layer: Layer) -> bool:
    return recorded(layer.x, layer.weight, layer.bias, *layer.mapping.params().values())


# -- scores that are kept ---------------------------------------------------------------------------------------------------------


class _Kept(torch.autograd.Function):
    """The kept scores as a function of features, weight and bias; and <scores, u> for a vector u over all classes."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, value: Tensor, index: Tensor, u: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        even, mean = _even(value, x, weight, bias, u)
        save(ctx, x, weight, bias, index, u, mean)
        return value, even

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        x, weight, bias, index, u, mean = saved(ctx)
        g, g_even = grads
        if plain_backward(*grads):
            return (
                *plain_grads(lambda x, w, b: _plain_kept(x, w, b, index, u), (x, weight, bias), grads),
                None,
                None,
                None,
            )
        return *_few_back(ctx.needs_input_grad, g, g_even, index, x, weight, bias, u, mean), None, None, None


def _few_back(
    wants: Any, g: Tensor | None, g_even: Tensor | None, index: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None,
    u: Tensor | None, mean: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of the scores of the classes `index`, and of <scores, u>, by x, weight and bias."""
    wide = wide_dtype(x, torch)
    dx = None
    dw = torch.zeros_like(weight) if wants[1] else None
    db = torch.zeros(weight.shape[0], dtype=wide, device=x.device) if wants[2] else None
    if u is not None and mean is not None and g_even is not None:
        dx = torch.outer(g_even, mean) if wants[0] else None
        if dw is not None:
            _add_outer(dw, u, g_even @ x.to(u.dtype))
        if db is not None:
            db.add_(u, alpha=float(g_even.sum()))
    if g is not None:
        dx = _sparse(g, index, x, weight, wants[0], dx, dw, db)
    return None if dx is None else dx.to(x.dtype), dw, None if db is None or bias is None else db.to(bias.dtype)


def _at_a_time(rows: Tensor, each: int = 1) -> int:
    """How many rows of features, or groups of `each` rows, to gather or compute at a time."""
    return max(1, _PIECE.get(rows.device.type, _MANY) // max(each * rows.shape[1], 1))


def _even(
    value: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, u: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """<scores, u> of each row, and `u @ weight`; an empty tensor and None if u is None."""
    if u is None:
        return value.new_zeros(0), None
    mean = _mixed(weight, u)
    even = x.to(mean.dtype) @ mean
    return even if bias is None else even + torch.where(u == 0, 0, bias.to(u.dtype)) @ u, mean


def _mixed(weight: Tensor, u: Tensor) -> Tensor:
    """`u @ weight`, a part of the classes at a time if the weight is in half precision."""
    if weight.dtype == u.dtype:
        return u @ weight
    out = torch.zeros(weight.shape[1], dtype=u.dtype, device=u.device)
    step = _at_a_time(weight)
    for a in range(0, weight.shape[0], step):
        out += u[a : a + step] @ weight[a : a + step].to(u.dtype)
    return out


def _add_outer(dw: Tensor, u: Tensor, v: Tensor) -> None:
    if dw.dtype == u.dtype:
        dw.addr_(u, v)
        return
    step = _at_a_time(dw)
    for a in range(0, dw.shape[0], step):
        dw[a : a + step] += torch.outer(u[a : a + step], v).to(dw.dtype)


def _sparse(
    g: Tensor,
    index: Tensor,
    x: Tensor,
    weight: Tensor,
    wants_x: bool,
    dx: Tensor | None,
    dw: Tensor | None,
    db: Tensor | None,
) -> Tensor | None:
    """Add the gradients g of the scores [rows, width] of the classes `index`, most of them 0, to dx, dw and db; return dx."""
    row, place = (~(g == 0)).nonzero(as_tuple=True)
    value, cls = g[row, place], index[row, place].to(torch.int64)
    if db is not None:
        db.index_add_(0, cls, value.to(db.dtype))
    gpu = triton.output_layer(x, weight)
    if gpu is not None and wants_x:
        dx = torch.zeros(x.shape, dtype=x.dtype, device=x.device) if dx is None else dx
        gpu.add_products(dx, _starts(row, g.shape[0]), cls, value, weight)
    elif wants_x:
        starts = torch.searchsorted(row, torch.arange(g.shape[0], device=row.device))
        own = _bags(weight, cls, starts, value)
        dx = own if dx is None else dx.add_(own)
    if dw is None:
        return dx
    order = cls.argsort(stable=True)
    row, cls, value = row[order], cls[order], value[order]
    if gpu is not None:
        gpu.add_products(dw, _starts(cls, dw.shape[0]), row, value, x)
        return dx
    for a, b in _whole(cls, _at_a_time(x)):
        if dw.dtype == value.dtype:
            dw.index_add_(0, cls[a:b], x[row[a:b]].mul_(value[a:b, None]))
        else:  # summed before rounding
            own, sizes = torch.unique_consecutive(cls[a:b], return_counts=True)
            dw[own] += _bags(x, row[a:b], sizes.cumsum(0) - sizes, value[a:b])
    return dx


def _starts(ordered: Tensor, count: int) -> Tensor:
    """Where each number from 0 to `count` begins in ascending numbers below `count`."""
    return torch.searchsorted(ordered, torch.arange(count + 1, device=ordered.device))


def _bags(rows: Tensor, index: Tensor, starts: Tensor, factor: Tensor) -> Tensor:
    """Sums of rows times factors, over the indices from each start to the next."""
    return torch.nn.functional.embedding_bag(index, rows, starts, mode="sum", per_sample_weights=factor.to(rows.dtype))


def _whole(cls: Tensor, step: int) -> list[tuple[int, int]]:
    """Pieces of ascending classes, about `step` long, that divide no class."""
    n = cls.shape[0]
    if n <= step:
        return [(0, n)] if n else []
    starts = torch.arange(step, n, step, device=cls.device)
    ends = torch.unique(torch.searchsorted(cls, cls[starts])).tolist()
    edges = [0, *(e for e in ends if e), n]
    return list(itertools.pairwise(edges))


def _plain_kept(
    x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, u: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`_Kept` in plain operations, for derivatives of any order."""
    wide = wide_dtype(x, torch)
    index = index.to(torch.int64)
    x, weight = x.to(wide), weight.to(wide)
    value = (x[:, None, :] * weight[index]).sum(-1)
    value = value if bias is None else value + bias.to(wide)[index]
    if u is None:
        return value, value.new_zeros(0)
    even = x @ (u @ weight)
    return value, even if bias is None else even + (torch.where(u == 0, 0, bias.to(wide)) * u).sum()


# -- softmax ------------------------------------------------------------------------------------------------------------------------


class _Others(torch.autograd.Function):
    """The target's score of each row and logsumexp of all others, [rows, 2]; and <scores, u> for a vector u over all classes."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Layer, target: Tensor, blocks: Blocks,
        u: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        layer = dataclasses.replace(layer, x=x, weight=weight, bias=bias)
        ctx.blocks = blocks
        ctx.set_materialize_grads(False)
        value = two_of(layer, target, blocks)
        even, _ = _even(value, x, weight, bias, u)
        save(ctx, x, weight, bias, layer.keep, target, value, u)
        return value, even

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        x, weight, bias, keep, target, value, u = saved(ctx)
        layer = Layer(x, weight, bias, keep, _SOFTMAX, (x.shape[0],), x.dtype)
        none = (None,) * 4
        if plain_backward(*grads):
            plain = lambda x, w, b: _plain_others(dataclasses.replace(layer, x=x, weight=w, bias=b), target, u)  # noqa: E731
            return *plain_grads(plain, (x, weight, bias), grads), *none
        g, g_even = grads
        g = torch.zeros_like(value) if g is None else g
        wants = ctx.needs_input_grad[:3]
        return *_others_back(layer, target, value, g, u, g_even, ctx.blocks, wants), *none


class _Likely(torch.autograd.Function):
    """`_Others` with a gradient for the kept classes only."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: Layer,
        target: Tensor,
        held: Kept,
        u: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        assert held.at is not None
        assert held.others is not None
        ctx.set_materialize_grads(False)
        two = torch.cat([held.value.gather(1, held.at[:, None]), held.others], 1)
        even, mean = _even(two, x, weight, bias, u)
        save(ctx, x, weight, bias, layer.keep, target, two, held.value, held.index, held.at, u, mean)
        return two, even

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        x, weight, bias, keep, target, two, value, index, at, u, mean = saved(ctx)
        g, g_even = grads
        none = (None,) * 4
        if plain_backward(*grads):
            layer = Layer(x, weight, bias, keep, _SOFTMAX, (x.shape[0],), x.dtype)
            plain = lambda x, w, b: _plain_others(dataclasses.replace(layer, x=x, weight=w, bias=b), target, u)  # noqa: E731
            return *plain_grads(plain, (x, weight, bias), grads), *none
        if g is not None:
            level = torch.where(two[:, 1:] == -math.inf, math.inf, two[:, 1:])
            g = ((value - level).exp_() * g[:, 1:]).scatter_(1, at[:, None], g[:, :1])
        return *_few_back(ctx.needs_input_grad, g, g_even, index, x, weight, bias, u, mean), *none


def two_of(layer: Layer, target: Tensor, blocks: Blocks) -> Tensor:
    """The target's score and logsumexp of all others of each row, fp32 or fp64."""
    if layer.rows and (gpu := triton.output_layer(layer.x, layer.weight, layer.bias)) is not None:
        return gpu.two_of(layer, target)
    wide = wide_dtype(layer.x, torch)
    value = torch.full((layer.rows, 2), -math.inf, dtype=wide, device=layer.x.device)
    for tile in blocks.tiles(layer):
        part, out = layer.part(tile), value[tile]
        scores = Scores(part, blocks, target[tile])
        sums = []
        for a, b in blocks.parts(part):
            s = scores.block(a, b)
            row, place = scores.targets(a, b)
            out[row, 0] = s[row, place].to(wide)
            s[row, place] = -math.inf
            sums.append(logsumexp(s, wide))
        out[:, 1] = torch.cat(sums, 1).logsumexp(1)
    return value


def _others_back(
    layer: Layer,
    target: Tensor,
    value: Tensor,
    g: Tensor,
    u: Tensor | None,
    g_even: Tensor | None,
    blocks: Blocks,
    wants: Any,
) -> list[Tensor | None]:
    x, weight, wide = layer.x, layer.weight, value.dtype
    half = x.dtype is not wide
    dx = torch.zeros(x.shape, dtype=wide, device=x.device) if wants[0] else None
    dw = torch.empty_like(weight) if wants[1] else None
    db = torch.zeros(weight.shape[0], dtype=wide, device=x.device) if wants[2] else None
    level = value[:, 1:]
    level = torch.where(level == -math.inf, math.inf, level)  # a row without other classes: exp is 0 everywhere
    every = list(blocks.tiles(layer))
    gpu = triton.output_layer(x, weight, layer.bias) if layer.rows else None
    scores = [Scores(layer.part(tile), blocks, target[tile] if gpu is None else None) for tile in every[:1]]
    for tile in every[1:]:  # all share one buffer
        scores.append(Scores(layer.part(tile), blocks, target[tile] if gpu is None else None))
        scores[-1].buffer = scores[0].buffer
    at_once = _ROWS.get(x.device.type, _MANY) if half else _MANY
    for a, b in blocks.parts(layer):
        sums = None
        for tile, of in zip(every, scores):
            if gpu is not None:
                even = None if g_even is None else g_even[tile]
                d = gpu.slopes(of.layer, target[tile], level[tile, 0], g[tile], u, even, a, b, of.buffer)
            else:
                d = of.block(a, b)
                row, place = of.targets(a, b)
                d[row, place] = -math.inf
                for part in _pieces(tile, at_once):
                    one = d[part.start - tile.start : part.stop - tile.start]
                    p = one.to(wide) if half else one
                    p.sub_(level[part]).exp_().mul_(g[part, 1:])
                    if u is not None and g_even is not None:
                        p.addr_(g_even[part], u[a:b])
                    if half:
                        one.copy_(p)
                d[row, place] += g[tile][row, 0].to(d.dtype)
            if db is not None:
                db[a:b] += d.sum(0, dtype=wide)
            if dx is not None and half:
                for part in _pieces(tile, at_once):
                    dx[part] += d[part.start - tile.start : part.stop - tile.start] @ weight[a:b]
            elif dx is not None:
                dx[tile].addmm_(d, weight[a:b])
            if dw is not None:
                if len(every) == 1:
                    torch.mm(d.t(), x, out=dw[a:b])
                elif sums is None:
                    sums = (d.t() @ x[tile]).to(wide)
                else:
                    sums += d.t() @ x[tile]
        if sums is not None and dw is not None:
            dw[a:b] = sums
    bias = layer.bias
    return [None if dx is None else dx.to(x.dtype), dw, None if db is None or bias is None else db.to(bias.dtype)]


def _pieces(tile: slice, step: int) -> Iterator[slice]:
    for i in range(tile.start, tile.stop, step):
        yield slice(i, min(i + step, tile.stop))


def _plain_others(layer: Layer, target: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor]:
    """`_Others` in plain operations, for derivatives of any order."""
    wide = wide_dtype(layer.x, torch)
    s = layer.scores().to(wide)
    own = s.gather(1, target[:, None])
    others = torch.scatter(s, 1, target[:, None], -math.inf).logsumexp(1, keepdim=True)
    even = s.new_zeros(0) if u is None else (torch.where(u == 0, 0, s) * u).sum(1)
    return torch.cat([own, others], 1), even


def gathered(layer: Layer, classes: Tensor) -> Tensor:
    """The scores of these classes of each row, [rows, width], fp32 or fp64."""
    free = layer.constant() if runs_eagerly(layer) else layer
    step = _at_a_time(layer.x, classes.shape[1]) if free is not layer else max(1, layer.rows)
    parts = [dots(free.part(slice(i, i + step)), classes[i : i + step], xp) for i in range(0, max(layer.rows, 1), step)]
    value = torch.cat(parts)
    if free is layer or not wants_gradient(layer):
        return value
    return _Kept.apply(layer.x, layer.weight, layer.bias, value, classes, None)[0]


# -- called by the verbs ---------------------------------------------------------------------------------------------------------------


def of_softmax(
    layer: Layer, target: Tensor, u: Tensor | None, chunk: int | None, least: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The target's score and logsumexp of all others, [rows, 2], and <scores, u>; classes below `least` may have no gradient."""
    if least and wants_gradient(layer):
        wide = wide_dtype(layer.x, torch)
        bound = lambda s, layer: logsumexp(s, wide) + (math.log(least) - 1e-4)  # noqa: E731
        held = kept(layer, target, bound, False, chunk, others=True)
        if not bool(held.full.any()):
            return _Likely.apply(layer.x, layer.weight, layer.bias, layer, target, held, u)
    return _Others.apply(layer.x, layer.weight, layer.bias, layer, target, Blocks.of(layer, chunk), u)


def kept(
    layer: Layer, target: Tensor | None, bound: Bound, without_target: bool, chunk: int | None, others: bool = False
) -> Kept:
    """The scores that each row keeps, without a gradient."""
    blocks, n = Blocks.of(layer, chunk), layer.classes
    most = n if layer.rows * n <= 1 << 18 else max(64, n * layer.x.element_size() // 160)
    with torch.no_grad():
        return collect(layer.constant(), blocks, bound, most, target, without_target, others)


def scores_of(layer: Layer, held: Kept, u: Tensor | None) -> tuple[Tensor, Tensor]:
    """The kept scores, with their gradient, and <scores, u>."""
    return _Kept.apply(layer.x, layer.weight, layer.bias, held.value, held.index, u)
