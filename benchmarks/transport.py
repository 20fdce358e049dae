"""The cases of Sinkhorn: many small matrices, a few large ones, and the limit beside the package POT."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import anymax

from .cases import OURS, Bar, Case, Workload, differs

STEPS, POT = "the same steps in torch", "POT"
ITERATIONS = 20
LIMIT = "limit"


def steps(x: Any) -> Any:
    """Rows and then columns divided by their sums, as in published hyper-connections."""
    p = x.softmax(-1)
    p = p / p.sum(-2, keepdim=True)
    for _ in range(ITERATIONS - 1):
        p = p / p.sum(-1, keepdim=True)
        p = p / p.sum(-2, keepdim=True)
    return p


def run(case: Case) -> Workload:
    import torch

    generator = torch.Generator().manual_seed(0)
    both = case.note.endswith("both ways")
    x = torch.randn(case.shape, generator=generator).requires_grad_(both)
    g = torch.randn(case.shape, generator=generator)
    ours = anymax.Sinkhorn(ITERATIONS)

    def way(function: Callable[[Any], Any]) -> Callable[[], Any]:
        return (lambda: torch.autograd.grad(function(x), x, g)[0]) if both else lambda: function(x)

    contenders = {OURS: way(ours), STEPS: way(steps)}

    def check() -> str | None:
        """Against the steps in float64, for the first matrices."""
        few = x.detach()[:64].double().requires_grad_(both)
        want = torch.autograd.grad(steps(few), few, g[:64].double())[0] if both else steps(few)
        return differs(contenders[OURS]()[:64], want.float(), case.dtype)

    return Workload(contenders, check, "native", 2 * x.numel() * x.element_size())


def limit(case: Case) -> Workload:
    import numpy as np
    import ot

    costs = np.random.default_rng(0).uniform(size=case.shape)
    n, m = case.shape
    a, b = np.full(n, 1 / n), np.full(m, 1 / m)
    ours = anymax.Sinkhorn(None, 0.05)
    contenders: dict[str, Callable[[], Any]] = {
        OURS: lambda: ours(-costs, rows=a, columns=b),
        POT: lambda: ot.sinkhorn(a, b, costs, 0.05, stopThr=1e-12, numItermax=100_000),
    }

    def check() -> str | None:
        return differs(contenders[OURS](), contenders[POT](), case.dtype)

    return Workload(contenders, check, "array code", 2 * costs.nbytes)


def transport_cases() -> Iterator[Case]:
    for way in ("forward", "both ways"):
        note = f"{ITERATIONS} iterations, {way}"
        for shape, full in (
            ((100_000, 4, 4), False),
            ((1_000_000, 4, 4), True),
            ((20_000, 8, 8), False),
            ((4, 512, 512), False),
            ((1, 1024, 1024), False),  # shared by threads: row by row, then by columns
        ):
            bars = (Bar(STEPS, at_most=0.2 if shape[-1] == 4 else 1.0),)
            yield Case("transport", "sinkhorn", shape, run, bars, note=note, full=full)
    yield Case(
        "transport", "sinkhorn", (500, 500), limit, (Bar(POT),), "uniform", "float64", note=LIMIT, needs=("torch", "ot")
    )
