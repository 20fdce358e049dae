"""The maps by plain formulas in fp64, which share no code with the kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor


def root(sum_at: Callable[[Tensor], Tensor], goal: float, low: Tensor, high: Tensor) -> Tensor:
    """tau between low and high with sum_at(tau) = goal, where the sum falls as tau rises."""
    for _ in range(200):
        middle = 0.5 * (low + high)
        above = sum_at(middle) > goal
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return 0.5 * (low + high)


def entmax(x: Tensor, alpha: float) -> Tensor:
    y, r = (alpha - 1.0) * x, 1.0 / (alpha - 1.0)
    top = y.max(-1, keepdim=True).values
    tau = root(lambda t: ((y - t).clamp(min=0) ** r).sum(-1, keepdim=True), 1.0, top - 1.0, top)
    return (y - tau).clamp(min=0) ** r


def budget(x: Tensor, k: float) -> Tensor:
    tau = root(
        lambda t: (x - t).clamp(0, 1).sum(-1, keepdim=True),
        k,
        x.min(-1, keepdim=True).values - 1.0,
        x.max(-1, keepdim=True).values,
    )
    return (x - tau).clamp(0, 1)


def normmax(x: Tensor, alpha: float) -> Tensor:
    top = x.max(-1, keepdim=True).values
    tau = root(lambda t: ((x - t).clamp(min=0) ** (alpha / (alpha - 1))).sum(-1, keepdim=True), 1.0, top - 1.0, top)
    p = (x - tau).clamp(min=0) ** (1 / (alpha - 1))
    return p / p.sum(-1, keepdim=True)


def topk(x: Tensor, k: int) -> Tensor:
    keep = torch.zeros_like(x, dtype=torch.bool).scatter_(-1, x.topk(k).indices, True)
    return x.masked_fill(~keep, -math.inf).softmax(-1)


def topp(x: Tensor, p: float) -> Tensor:
    values, index = x.softmax(-1).sort(-1, descending=True)
    keep = values.cumsum(-1) - values < p
    return x.masked_fill(~torch.zeros_like(keep).scatter_(-1, index, keep), -math.inf).softmax(-1)


def ratio(u: Tensor) -> Tensor:
    return u / u.sum(-1, keepdim=True)


def taylor(x: Tensor, order: int) -> Tensor:
    return ratio(sum(x**i / math.factorial(i) for i in range(order + 1)))


def perturb(x: Tensor, noise: str) -> Tensor:
    """The chance that a class has the highest score under independent noise: the integral over the highest one."""
    u = torch.linspace(-40.0, 40.0, 20_001, dtype=x.dtype)[:, None]
    z = (u - x[..., None, :]).clamp(-30, 30)
    if noise == "normal":
        below, density = 0.5 * torch.erfc(-z / math.sqrt(2)), torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    else:
        below, density = z.sigmoid(), z.sigmoid() * (-z).sigmoid()
    others = below.prod(-1, keepdim=True) / below.clamp(min=1e-300)
    return ratio((density * others).sum(-2))


# name of the test -> (map, its number, p in fp64)
MAPS: dict[str, tuple[str, dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "softmax": ("softmax", {}, lambda x: x.softmax(-1)),
    "sparsemax": ("sparsemax", {}, lambda x: entmax(x, 2.0)),
    "entmax-1.5": ("entmax", {"alpha": 1.5}, lambda x: entmax(x, 1.5)),
    "entmax-1.3": ("entmax", {"alpha": 1.3}, lambda x: entmax(x, 1.3)),
    "budget": ("budget", {"k": 2.5}, lambda x: budget(x, 2.5)),
    "normmax": ("normmax", {"alpha": 2.0}, lambda x: normmax(x, 2.0)),
    "topk": ("topk", {"k": 3}, lambda x: topk(x, 3)),
    "topp": ("topp", {"p": 0.8}, lambda x: topp(x, 0.8)),
    "taylor": ("taylor", {"order": 4}, lambda x: taylor(x, 4)),
    "sigsoftmax": ("sigsoftmax", {}, lambda x: ratio(x.exp() * x.sigmoid())),
    "perturb-normal": ("perturb_max", {"noise": "normal"}, lambda x: perturb(x, "normal")),
    "perturb-logistic": ("perturb_max", {"noise": "logistic"}, lambda x: perturb(x, "logistic")),
}


def slopes(f: Callable[[Tensor], Tensor], x: Tensor, g: Tensor, step: float = 1e-5) -> Tensor:
    """The gradient of <g, f(x)> of each row by central differences."""
    out = torch.zeros_like(x)
    for i in range(x.shape[-1]):
        e = torch.zeros_like(x)
        e[..., i] = step
        out[..., i] = ((f(x + e) - f(x - e)) * g).sum(-1) / (2 * step)
    return out


def scores(*shape: int, seed: int = 0, scale: float = 1.5) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
