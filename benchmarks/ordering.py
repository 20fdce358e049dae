"""The cases of soft ranks and soft sorting, forward and backward, beside torchsort; and of Fusedmax beside torch.softmax."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import anymax

from .cases import OURS, Bar, Case, Workload, differs

PEER, SOFTMAX = "torchsort", "torch.softmax"
STRENGTH = 1.0
OURS_OF = {"soft_rank": anymax.soft_rank, "soft_sort": anymax.soft_sort}


def both_ways(case: Case) -> Workload:
    import torch
    import torchsort

    verb, regularization = case.map.split()
    theirs = getattr(torchsort, verb)
    generator = torch.Generator().manual_seed(case.n)
    x, g = (torch.randn(case.shape, generator=generator) for _ in range(2))

    def step(function: Callable[..., Any]) -> Any:
        a = x.clone().requires_grad_()
        function(a, regularization, STRENGTH).backward(g)
        return a.grad

    contenders: dict[str, Callable[[], Any]] = {OURS: lambda: step(OURS_OF[verb]), PEER: lambda: step(theirs)}

    def check() -> str | None:
        return differs(OURS_OF[verb](x, regularization, STRENGTH), theirs(x, regularization, STRENGTH), case.dtype)

    return Workload(contenders, check, "native", 4 * x.nbytes)


def fusedmax(case: Case) -> Workload:
    import torch

    generator = torch.Generator().manual_seed(case.n)
    x, g = (torch.randn(case.shape, generator=generator) for _ in range(2))
    x = (3 * x).requires_grad_()
    mapping = anymax.Fusedmax(float(case.map.split()[1]))
    contenders: dict[str, Callable[[], Any]] = {
        OURS: lambda: torch.autograd.grad(anymax.apply(mapping, x), x, g),
        SOFTMAX: lambda: torch.autograd.grad(torch.softmax(x, -1), x, g),
    }

    def check() -> str | None:
        p = anymax.apply(mapping, x.detach())
        with anymax.use("reference"):
            return differs(p, anymax.apply(mapping, x.detach()), case.dtype)

    return Workload(contenders, check, "fused", 4 * x.nbytes)


def ordering_cases() -> Iterator[Case]:
    for verb in OURS_OF:
        for regularization, most in (("l2", 0.2), ("kl", 0.25)):
            bars = (Bar(PEER, at_most=most),)
            yield Case("ordering", f"{verb} {regularization}", (512, 1000), both_ways, bars, needs=("torch", PEER))
    for shape, strength in (((512, 1000), 0.1), ((1, 100_000), 0.1), ((512, 1000), 1.0)):
        yield Case("ordering", f"fusedmax {strength}", shape, fusedmax, (Bar(SOFTMAX, at_most=20.0),), needs=("torch",))
