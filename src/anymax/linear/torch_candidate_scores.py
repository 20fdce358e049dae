"""PyTorch: the scores of the candidates as a function of features, weight and bias, whose gradient is a sparse product.

The gradient of the gradient holds all scores: it uses plain operations.
"""

from __future__ import annotations

import math
from typing import Any

import array_api_compat.torch as xp
import torch

from .._array import wide_dtype
from ..autodiff.torch_adapter import operation
from ..kernels import engine_of
from ..kernels.tasks import LAYER
from .job import Job
from .layer import Layer, dots
from .torch_candidates import BlockSize, Bound, Candidates, OfTarget, Rule, collect, of_map
from .torch_groups import runs_eagerly
from .torch_products import add_to_classes, added_to_rows, at_a_time

Tensor = torch.Tensor


def candidates_of(job: Job, bound: Bound = of_map, of_target: OfTarget = OfTarget.USED) -> Candidates:
    """The candidates of each row, without a gradient."""
    layer, n = job.layer, job.layer.classes
    most = n if layer.rows * n <= 1 << 18 else max(64, n * layer.x.element_size() // 160)
    with torch.no_grad():
        return collect(layer.constant(), job.target, Rule(BlockSize.of(layer, job.chunk), bound, most, of_target))


def scores_of(layer: Layer, candidates: Candidates, u: Tensor | None) -> tuple[Tensor, Tensor]:
    """The scores of the candidates, with their gradient, and <scores, u>."""
    s, even = _scores(None, layer.x, layer.weight, layer.bias, candidates.index, u, candidates.value)
    if layer.keep is not None or layer.bias is not None:  # a masked target is among them, and has no gradient
        s = s.masked_fill(candidates.value == -math.inf, -math.inf)
    return s, even


def gathered(layer: Layer, classes: Tensor) -> Tensor:
    """The scores of these classes of each row, [rows, width], fp32 or fp64."""
    free = layer.constant() if runs_eagerly(layer) else layer
    step = at_a_time(layer.x, classes.shape[1]) if free is not layer else max(1, layer.rows)
    value = torch.cat([dots(free.x[at], free.weight, free.bias, classes[at], xp) for at in free.groups(step)])
    if free is layer or not layer.recorded():
        return value
    return _scores(None, layer.x, layer.weight, layer.bias, classes, None, value)[0]


# -- the gradient ----------------------------------------------------------------------------------------------------------------------


def _forward(_: None, operands: Any, wants: Any) -> tuple[tuple[Tensor, Tensor], Any]:
    """The scores of the candidates, `value`, and <scores, u> for a vector u over all classes."""
    x, weight, bias, _, u, value = operands
    even, mean = weighted_scores(value, x, weight, bias, u)
    return (value, even), (mean,)


def _backward(_: None, operands: Any, kept: Any, grads: Any, wants: Any) -> Any:
    (x, weight, bias, index, u), (mean,), (g, g_even) = operands, kept, grads
    return *candidates_back(wants, g, g_even, index, x, weight, bias, u, mean), None, None, None


def candidates_back(
    wants: Any, g: Tensor | None, g_even: Tensor | None, index: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None,
    u: Tensor | None, mean: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients by x, weight and bias: g is that of the scores of the classes `index`, most of it 0, g_even that of <scores, u>."""
    dx = None
    dw = torch.zeros_like(weight) if wants[1] else None
    db = torch.zeros(weight.shape[0], dtype=wide_dtype(x, torch), device=x.device) if wants[2] else None
    if u is not None and mean is not None and g_even is not None:
        dx = torch.outer(g_even, mean) if wants[0] else None
        if dw is not None:
            _add_outer(dw, u, g_even @ x.to(u.dtype))
        if db is not None:
            db.addcmul_(u, g_even.sum())
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
    step = at_a_time(weight)
    for a in range(0, weight.shape[0], step):
        out += u[a : a + step] @ weight[a : a + step].to(u.dtype)
    return out


def _add_outer(dw: Tensor, u: Tensor, v: Tensor) -> None:
    if dw.dtype == u.dtype:
        dw.addr_(u, v)
        return
    step = at_a_time(dw)
    for a in range(0, dw.shape[0], step):
        dw[a : a + step] += torch.outer(u[a : a + step], v).to(dw.dtype)


def _plain(_: None, operands: Any, kept: Any) -> tuple[Tensor, Tensor]:
    x, weight, bias, index, u = operands
    dtype = wide_dtype(x, torch)
    index = index.to(torch.int64)
    x, weight = x.to(dtype), weight.to(dtype)
    value = (x[:, None, :] * weight[index]).sum(-1)
    value = value if bias is None else value + bias.to(dtype)[index]
    if u is None:
        return value, value.new_zeros(0)
    even = x @ (u @ weight)
    return value, even if bias is None else even + (torch.where(u == 0, 0, bias.to(dtype)) * u).sum()


_scores = operation("CandidateScores", _forward, _backward, _plain, saves=5)
