"""PyTorch: log p of given classes, entropy and the rest of rows under softmax, in one pass forward and one backward.

A few rows at a time, so that no array like the scores is made forward, and one, the gradient, backward. With c = g_log_p, summed, plus
g_rest, and q softmax over the other classes: `dx = e_y g_log_p - p (c + g_entropy (log p + H)) + g_rest q`, which is 0 where p is.
"""

from __future__ import annotations

import math
from typing import Any

import array_api_compat.torch as xp
import torch

from ..mappings import Softmax
from .saving import save, saved
from .softmax_terms import Terms, blocks, named, plain
from .torch import KINDS, _traced

Tensor = torch.Tensor

_SOFTMAX = Softmax()
_LIMITS = {"cpu": 1 << 18}  # scores at a time, which stay in the cache; elsewhere as many as keep a GPU busy
_MANY = 1 << 26
_LOWEST = -1e4  # of a log p whose p is 0, so that 0 log 0 is 0


def terms(x: Tensor, index: Tensor, scale: float, entropy: bool, rest: bool) -> Terms:
    if type(x) not in KINDS or x.layout is not torch.strided or _traced(_SOFTMAX):
        return plain(x, index, scale, entropy, rest, xp)
    if torch.is_grad_enabled() and x.requires_grad:
        log_p, *others = _Terms.apply(x, index, scale, entropy, rest)
    else:
        _, _, log_p, *others = _forward(x.detach(), index, scale, entropy, rest)
    return Terms(log_p, others[0] if entropy else None, others[1] if rest else None)


class _Terms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, scale: float, entropy: bool, rest: bool) -> tuple[Tensor, ...]:
        ctx.call = scale, entropy, rest
        ctx.set_materialize_grads(False)
        high, log_z, *out = _forward(x, index, scale, entropy, rest)
        save(ctx, x, index, high, log_z, *out)
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (x, index, *held), none = saved(ctx), (None,) * 4
        if all(g is None for g in grads):
            return None, *none
        if torch.is_grad_enabled():  # the backward pass is itself to be differentiated
            with torch.enable_grad():
                free = x if x.requires_grad else x.detach().requires_grad_()
                scale, entropy, rest = ctx.call
                out = plain(free, index, scale, entropy, rest, xp)
            pairs = [(a, g) for a, g in zip(out, grads) if a is not None and g is not None]
            values, given = [a for a, _ in pairs], [g for _, g in pairs]
            return torch.autograd.grad(values, free, given, create_graph=True)[0], *none
        return _backward(x, index, held, grads, ctx.call[0]), *none


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _parts(x: Tensor) -> Any:
    return blocks(tuple(x.shape[:-1]), x.shape[-1], _LIMITS.get(x.device.type, _MANY))


def _scores(x: Tensor, part: Any, scale: float) -> Tensor:
    """A few rows, in the dtype to compute in; not to be changed in place."""
    s = x[part].to(_wide(x))
    return s if scale == 1.0 else s * scale


def _forward(x: Tensor, index: Tensor, scale: float, entropy: bool, rest: bool) -> list[Tensor]:
    """The maximum, log of the sum of the exponentials below it, and the terms; what was not asked for has no columns."""
    lead, n = tuple(x.shape[:-1]), x.shape[-1]
    sizes = (1, 1, index.shape[-1], int(entropy), int(rest))
    out = [torch.empty((*lead, size), dtype=_wide(x), device=x.device) for size in sizes]
    for part in _parts(x):
        s, i = _scores(x, part, scale), index[part]
        high = s.amax(-1, keepdim=True)
        high = torch.where(high == -math.inf, 0.0, high)
        y = (s - high).clamp_(min=_LOWEST)
        e = y.exp()
        z = e.sum(-1, keepdim=True)
        z = torch.where(z == 0, 1.0, z)
        log_z = z.log()
        values: list[Tensor | None] = [high, log_z, s.gather(-1, i.clamp(max=n - 1)) - high - log_z]
        values.append(log_z - y.mul_(e).sum(-1, keepdim=True) / z if entropy else None)
        if rest:
            t = s.masked_fill(named(i, s, xp), -math.inf)
            top = t.amax(-1, keepdim=True)
            top = torch.where(top == -math.inf, 0.0, top)
            values.append((top - high) + t.sub_(top).exp_().sum(-1, keepdim=True).log() - log_z)
        for whole, piece in zip(out, values):
            if piece is not None:
                whole[part] = piece
    return out


def _backward(x: Tensor, index: Tensor, held: list[Tensor], grads: tuple[Tensor | None, ...], scale: float) -> Tensor:
    (high, log_z, log_p, entropy, rest), (g_log_p, g_entropy, g_rest) = held, grads
    n = x.shape[-1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    direct = out.dtype is _wide(x)
    g_entropy = g_entropy if entropy.shape[-1] else None
    g_rest = g_rest if rest.shape[-1] else None
    for part in _parts(x):
        s = _scores(x, part, scale)
        y = torch.sub(s, high[part], out=out[part]) if direct else s - high[part]
        y.sub_(log_z[part]).clamp_(min=_LOWEST)
        p = y.exp()
        others = None
        if g_rest is not None:
            share = rest[part]
            others = (y - torch.where(share == -math.inf, 0.0, share)).exp_()
            others.masked_fill_(named(index[part], s, xp), 0.0).mul_(g_rest[part])
        common = 0.0 if g_log_p is None else g_log_p[part].sum(-1, keepdim=True)
        common = common if g_rest is None else common + g_rest[part]
        if g_entropy is not None:
            y.add_(entropy[part]).mul_(g_entropy[part]).add_(common).mul_(p).neg_()
        else:
            torch.mul(p, -common if isinstance(common, Tensor) else 0.0, out=y)
        if others is not None:
            y.add_(others)
        if g_log_p is not None:
            given = torch.where(log_p[part] == -math.inf, 0.0, g_log_p[part])  # a masked class has no gradient
            y.scatter_add_(-1, index[part].clamp(max=n - 1), given)
        if scale != 1.0:
            y.mul_(scale)
        if not direct:
            out[part] = y
    return out
