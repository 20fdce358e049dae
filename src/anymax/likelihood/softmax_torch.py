"""PyTorch: log p of given classes, entropy and the rest of rows under softmax, in one pass forward and one backward.

It works on a few rows at a time, so the forward pass allocates no array as large as the scores, and the backward pass only the gradient.
With c the sum of g_log_p plus g_rest, and q softmax over the other classes, `dx = e_y g_log_p - p (c + g_entropy (log p + H)) + g_rest q`,
which is 0 where p is 0.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import array_api_compat.torch as xp
import torch

from .. import kernels
from .._array import recorded, wide_dtype
from ..autodiff.torch import KINDS, traced
from ..autodiff.torch_adapter import operation
from ..kernels import decode
from ..kernels.engine import Engine
from ..kernels.tasks import DECODE
from ..mappings import Softmax
from .softmax_plain import LOWEST, Terms, at_classes, blocks, plain

Tensor = torch.Tensor

_SOFTMAX = Softmax()
_LIMITS = {"cpu": 1 << 18}  # scores at a time: on a CPU they stay in the cache, elsewhere they keep a GPU busy
_MANY = 1 << 26


def terms(x: Tensor, index: Tensor, *, scale: float, entropy: bool, rest: bool) -> Terms:
    if type(x) not in KINDS or x.layout is not torch.strided or traced(_SOFTMAX, x):
        return plain(x, index, xp, scale=scale, entropy=entropy, rest=rest)
    if recorded(x):
        log_p, h, others = _terms((scale, entropy, rest), x, index)
    else:
        _, _, log_p, h, others = _forward(x.detach(), index, scale, entropy, rest)
    return Terms(log_p, h if entropy else None, others if rest else None)


class _RowTerms(NamedTuple):
    """What the forward pass computes for each row, and saves; a term that was not requested has no columns."""

    high: Tensor  # [..., 1], the maximum
    log_z: Tensor  # [..., 1], log sum exp(s - high)
    log_p: Tensor  # [..., m]
    entropy: Tensor  # [..., 1]
    rest: Tensor  # [..., 1]


def _terms_forward(how: Any, operands: Any, wants: Any) -> tuple[tuple[Tensor, ...], _RowTerms]:
    (x, index), (scale, entropy, rest) = operands, how
    out = _forward(x, index, scale, entropy, rest)
    return (out.log_p, out.entropy, out.rest), out


def _terms_backward(how: Any, operands: Any, kept: Any, grads: Any, wants: Any) -> tuple[Tensor, None]:
    x, index = operands
    return _backward(x, index, _RowTerms(*kept), grads, how[0]), None


def _terms_plain(how: Any, operands: Any, kept: Any) -> Terms:
    (x, index), (scale, entropy, rest) = operands, how
    return plain(x, index, xp, scale=scale, entropy=entropy, rest=rest)


_terms = operation("SoftmaxTerms", _terms_forward, _terms_backward, _terms_plain)


def _parts(x: Tensor) -> Any:
    return () if not x.numel() else blocks(tuple(x.shape[:-1]), x.shape[-1], _LIMITS.get(x.device.type, _MANY))


def _scores(x: Tensor, part: Any, scale: float) -> Tensor:
    """One part of the rows in the dtype of the computation; do not change it in place."""
    s = x[part].to(wide_dtype(x, torch))
    return s if scale == 1.0 else s * scale


def _softmax(s: Tensor) -> Tensor:
    return kernels.choose("forward", _SOFTMAX, s).forward(_SOFTMAX, s)


def _levels(s: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum of each row and `log sum exp(s - max)`; both 0 if all classes are masked."""
    engine = kernels.compiled("index_loss", _SOFTMAX, s)
    high, place = (engine and engine.largest(s, 1)) or s.max(-1, keepdim=True)
    loss = engine and engine.index_loss(_SOFTMAX, s, place[..., 0], save=False)
    log_z = None if loss is None else loss.value[..., None]
    none = high == -math.inf
    high = torch.where(none, 0.0, high.to(wide_dtype(s, torch)))
    log_z = (s - high).exp_().sum(-1, keepdim=True).log() if log_z is None else log_z
    return high, torch.where(none, 0.0, log_z)


def _others(s: Tensor, index: Tensor) -> Tensor:
    return s.masked_fill(at_classes(index, s, xp), -math.inf)


def _in_one_pass(engine: Engine, x: Tensor, index: Tensor, scale: float, entropy: bool) -> _RowTerms:
    """By the engine in one pass."""
    dtype, steps = wide_dtype(x, torch), () if scale == 1.0 else (decode.Step("temperature", 1.0 / scale),)
    result = engine.decode(_SOFTMAX, x, steps, given=index.clamp(max=x.shape[-1] - 1), entropy=entropy, tau=True)
    tau = result.tau[..., None]
    none = tau == -math.inf
    high = torch.where(none, 0.0, tau).to(dtype)
    log_z = torch.where(none, 0.0, tau - high).to(dtype)
    columns = result.entropy[..., None].to(dtype) if entropy else log_z[..., :0]
    return _RowTerms(high, log_z, result.log_p.to(dtype), columns, log_z[..., :0])


def _forward(x: Tensor, index: Tensor, scale: float, entropy: bool, rest: bool) -> _RowTerms:
    lead, n = tuple(x.shape[:-1]), x.shape[-1]
    sizes = (1, 1, index.shape[-1], int(entropy), int(rest))
    engine = kernels.engine_of(DECODE, _SOFTMAX, x) if not rest and scale > 0.0 else None
    if engine is not None:
        return _in_one_pass(engine, x, index, scale, entropy)
    out = _RowTerms(*(torch.empty((*lead, size), dtype=wide_dtype(x, torch), device=x.device) for size in sizes))
    at_once = scale == 1.0 and x.is_contiguous() and kernels.compiled("index_loss", _SOFTMAX, x) is not None
    levels = _levels(x) if at_once and x.numel() else None
    if levels is not None and not entropy and not rest:
        log_p = x.gather(-1, index.clamp(max=n - 1)) - levels[0] - levels[1]
        return _RowTerms(*levels, log_p, out.entropy, out.rest)
    y = torch.empty(0)
    for part in _parts(x):
        s, i = _scores(x, part, scale), index[part]
        high, log_z = _levels(s) if levels is None else (level[part] for level in levels)
        out.high[part], out.log_z[part] = high, log_z
        out.log_p[part] = s.gather(-1, i.clamp(max=n - 1)) - high - log_z
        if entropy:
            y = y if y.shape == s.shape else torch.empty_like(s)
            below = torch.sub(s, high, out=y).clamp_(min=LOWEST)
            # a sum of two that are not negative
            out.entropy[part] = log_z - below.mul_(_softmax(s)).sum(-1, keepdim=True)
        if rest:
            top, log_e = _levels(t := _others(s, i))
            none = (t == -math.inf).all(-1, keepdim=True)
            out.rest[part] = torch.where(none, -math.inf, (top - high) + log_e - log_z)
    return out


def _backward(x: Tensor, index: Tensor, saved: _RowTerms, grads: tuple[Tensor | None, ...], scale: float) -> Tensor:
    (high, log_z, log_p, entropy, rest), (g_log_p, g_entropy, g_rest) = saved, grads
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    direct = out.dtype is wide_dtype(x, torch)
    g_entropy = g_entropy if entropy.shape[-1] else None
    g_rest = g_rest if rest.shape[-1] else None
    for part in _parts(x):
        s = _scores(x, part, scale)
        y = out[part] if direct else torch.empty_like(s)
        common = torch.zeros_like(high[part]) if g_log_p is None else g_log_p[part].sum(-1, keepdim=True)
        common = common if g_rest is None else common + g_rest[part]
        if g_entropy is None:
            torch.mul(_softmax(s), -common, out=y)
        else:
            g = g_entropy[part]
            torch.sub(s, high[part], out=y).clamp_(min=LOWEST).mul_(-g)
            y.sub_(common + g * (entropy[part] - log_z[part])).mul_(_softmax(s))
        if g_rest is not None:
            y.addcmul_(_softmax(_others(s, index[part])), g_rest[part])
        if g_log_p is not None:
            g_there = torch.where(log_p[part] == -math.inf, 0.0, g_log_p[part])  # a masked class has no gradient
            y.scatter_add_(-1, index[part].clamp(max=x.shape[-1] - 1), g_there)
        if scale != 1.0:
            y.mul_(scale)
        if not direct:
            out[part] = y
    return out
