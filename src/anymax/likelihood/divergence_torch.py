"""PyTorch: the divergence of two softmaxes, whose gradients in both scores are computed with it.

`S (log S - log M - KL(S || M))` times 1 - beta is the gradient of the Jensen-Shannon divergence in the student's scores, since M is
where its sum is least; those of KL(T || S) are `S - T` and `T (log T - log S - KL(T || S))`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .. import kernels
from .._array import recorded
from ..autodiff.torch import KINDS, traced
from ..autodiff.torch_adapter import operation
from ..mappings import Softmax
from .divergence import plain

Tensor = torch.Tensor

_SOFTMAX = Softmax()
_NONE = -1e30  # in place of the logarithm of 0: its products with 0 are 0


def divergence(s: Tensor, t: Tensor, beta: float) -> Tensor:
    for x in (s, t):
        if type(x) not in KINDS or x.layout is not torch.strided or traced(_SOFTMAX, x):
            return plain(s, t, beta)
    return _divergence(beta, s, t) if recorded(s, t) else _of(beta, s, t, (False, False))[0]


def _forward(beta: float, operands: Any, wants: Any) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    s, t = operands
    value, by_s, by_t = _of(beta, s, t, wants)
    return value, (by_s, by_t)


def _backward(beta: float, operands: Any, kept: Any, grads: Any, wants: Any) -> tuple[Tensor | None, ...]:
    return tuple(None if slope is None else slope * grads[0][..., None] for slope in kept)


def _plain(beta: float, operands: Any, kept: Any) -> Tensor:
    s, t = operands
    return plain(s, t, beta)


_divergence = operation("SoftmaxDivergence", _forward, _backward, _plain)


def _of(beta: float, s: Tensor, t: Tensor, wants: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(the divergence, its gradients in s and t where they are wanted)."""
    log_s, log_t = _log_softmax(s.detach()), _log_softmax(t.detach())
    if 0.0 < beta < 1.0:
        return _mixed(beta, log_s, log_t, wants)
    if beta:
        return _kl(log_s, log_t, wants)
    value, by_t, by_s = _kl(log_t, log_s, (wants[1], wants[0]))
    return value, by_s, by_t


def _log_softmax(s: Tensor) -> Tensor:
    log_p = kernels.choose("log_forward", _SOFTMAX, s).log_forward(_SOFTMAX, s)
    assert log_p is not None
    return log_p


def _kl(log_p: Tensor, log_q: Tensor, wants: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """KL(p || q) and its gradients in the scores of p and q; it may overwrite the logarithms."""
    lost = None
    if _has_none(log_p) or _has_none(log_q):
        lost = (log_q == -math.inf) & (log_p != -math.inf)
        log_p.clamp_(min=_NONE)
        log_q.clamp_(min=_NONE)
    p = log_p.exp()
    # of a class that q lost there remains p log p, whose derivative is finite, as in `kl_rows`
    d = log_p.sub_(log_q if lost is None else log_q.masked_fill(lost, 0.0))
    value = (p * d).sum(-1)
    by_q = None
    if wants[1]:
        by_q = log_q.exp_()
        if lost is None:
            by_q.sub_(p)
        else:  # p may have no classes, and a class that q masks has no gradient
            by_q.mul_(p.sum(-1, keepdim=True)).sub_(p).masked_fill_(lost, 0.0)
    by_p = d.sub_(value[..., None]).mul_(p) if wants[0] else None
    return value if lost is None else torch.where(lost.any(-1), math.inf, value), by_p, by_q


def _mixed(beta: float, log_s: Tensor, log_t: Tensor, wants: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    s, t = log_s.exp(), log_t.exp()
    for a in (log_s, log_t):
        if _has_none(a):
            a.clamp_(min=_NONE)
    log_m = torch.lerp(s, t, beta).clamp_(min=torch.finfo(s.dtype).tiny).log_()
    total, slopes = 0.0, []
    for p, log_p, share, want in ((s, log_s, 1.0 - beta, wants[0]), (t, log_t, beta, wants[1])):
        d = log_p.sub_(log_m)
        value = (p * d).sum(-1)
        total = total + share * value
        slopes.append(d.sub_(value[..., None]).mul_(p).mul_(share) if want else None)
    assert isinstance(total, Tensor)
    return total, slopes[0], slopes[1]


def _has_none(log_p: Tensor) -> bool:
    """True if a logarithm may be -inf; to look at it on a GPU would wait."""
    return log_p.device.type != "cpu" or not log_p.numel() or bool(log_p.amin() == -math.inf)
