"""The cases of maps that a user writes, without a kernel: beside the kernel of the same map, and a few lines of torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import anymax

from .cases import OURS, Bar, Case, Workload, check_forward, engine, incoming, scores_of

KERNEL = "its kernel"
LINES = "six lines of torch"
SHAPES = ((4096, 256), (512, 1000), (64, 32000), (1, 500_000))  # threads share the last one's only row


@dataclasses.dataclass(frozen=True, eq=False)
class Squares(anymax.Separable):
    """Sparsemax, as the documentation of `Separable` writes it."""

    name = "squares"

    @property
    def facts(self) -> anymax.Facts:
        return anymax.Facts(monotone=True, shift_invariant=True, sparse=True, has_potential=True)

    def omega_terms(self, q: Any, xp: Any) -> Any:
        return 0.5 * q * q

    def link(self, t: Any, xp: Any) -> Any:
        return xp.where(t > 0, t, 0.0 * t)

    def slope(self, q: Any, xp: Any) -> Any:
        return q

    def curvature(self, q: Any, xp: Any) -> Any:
        return xp.ones_like(q)


@dataclasses.dataclass(frozen=True, eq=False)
class Exps(Squares):
    """Softmax, as a map of one's own."""

    name = "exps"

    @property
    def facts(self) -> anymax.Facts:
        return anymax.Facts(monotone=True, shift_invariant=True, sparse=False, has_potential=True)

    def omega_terms(self, q: Any, xp: Any) -> Any:
        return xp.where(q > 0, q * xp.log(xp.where(q > 0, q, 1.0 + 0.0 * q)), 0.0 * q)

    def link(self, t: Any, xp: Any) -> Any:
        return xp.exp(t)

    def slope(self, q: Any, xp: Any) -> Any:
        return xp.log(q)

    def curvature(self, q: Any, xp: Any) -> Any:
        return 1.0 / q


@dataclasses.dataclass(frozen=True, eq=False)
class Roots(Squares):
    """Entmax 1.5, as a map of one's own."""

    name = "roots"

    def omega_terms(self, q: Any, xp: Any) -> Any:
        return (q**1.5 - q) / 0.75

    def link(self, t: Any, xp: Any) -> Any:
        half = xp.where(t > 0, 0.5 * t, 0.0 * t)
        return half * half

    def slope(self, q: Any, xp: Any) -> Any:
        return 2.0 * q**0.5

    def curvature(self, q: Any, xp: Any) -> Any:
        return q**-0.5


@dataclasses.dataclass(frozen=True, eq=False)
class Gates(anymax.RatioMap):
    """Sigsoftmax, as a map of one's own."""

    name = "gates"

    @property
    def facts(self) -> anymax.Facts:
        return anymax.Facts(monotone=True, shift_invariant=False, sparse=False, has_potential=False)

    def weights(self, x: Any, keep: Any, xp: Any) -> tuple[Any, Any]:
        e = xp.exp(-x)
        u = 1.0 / (e * (1.0 + e))
        return u, u * (1.0 + e / (1.0 + e))


MAPS = {
    "sparsemax": (Squares(), anymax.Sparsemax()),
    "softmax": (Exps(), anymax.Softmax()),
    "entmax 1.5": (Roots(), anymax.Entmax(1.5)),
    "sigsoftmax": (Gates(), anymax.Sigsoftmax()),
}


def six_lines(x: Any) -> Any:
    """Sparsemax by a sort."""
    import torch

    z, _ = x.sort(-1, descending=True)
    sums = z.cumsum(-1)
    k = torch.arange(1, x.shape[-1] + 1)
    size = (1 + k * z > sums).sum(-1, keepdim=True)
    tau = (sums.gather(-1, size - 1) - 1) / size
    return (x - tau).clamp(min=0)


def own_forward(case: Case) -> Workload:
    x = scores_of(case)
    mapping, kernel = MAPS[case.map]

    def ours(x: Any = x, axis: int = -1) -> Any:
        return anymax.apply(mapping, x, axis)

    contenders: dict[str, Callable[[], Any]] = {OURS: ours, KERNEL: lambda: anymax.apply(kernel, x)}
    if case.map == "sparsemax":
        contenders[LINES] = lambda: six_lines(x)
    check = check_forward(case, ours, x, ours)
    return Workload(contenders, check, engine("forward", mapping, x), 2 * x.numel() * x.element_size())


def own_both(case: Case) -> Workload:
    import torch

    x, g = scores_of(case).clone().requires_grad_(), incoming(case.shape)
    mapping, kernel = MAPS[case.map]

    def ours(x: Any = x, axis: int = -1) -> Any:
        return anymax.apply(mapping, x, axis)

    contenders: dict[str, Callable[[], Any]] = {
        OURS: lambda: torch.autograd.grad(anymax.apply(mapping, x), x, g),
        KERNEL: lambda: torch.autograd.grad(anymax.apply(kernel, x), x, g),
    }
    if case.map == "sparsemax":
        contenders[LINES] = lambda: torch.autograd.grad(six_lines(x), x, g)
    frozen = x.detach()
    check = check_forward(case, ours, frozen, lambda: ours(frozen))
    return Workload(contenders, check, engine("vjp", mapping, frozen))


def own_map_cases() -> Iterator[Case]:
    for shape in SHAPES:
        for name in MAPS:
            kernel = Bar(KERNEL, at_most=4.0 if name == "sigsoftmax" else 10.0)
            bars = (kernel, Bar(LINES, at_most=0.5)) if name == "sparsemax" else (kernel,)
            yield Case("own map", name, shape, own_forward, bars)
            yield Case("own map", name, shape, own_both, bars, note="forward+backward")
