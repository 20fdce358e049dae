"""The GPU cases of output layers: the loss of a large vocabulary and its gradients, beside the same from all scores.

The bars: in half precision no map takes longer than softmax from all scores; in fp32, where a product is expensive, sparse maps take half.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

import anymax
from anymax.linear import torch_scores

from .cases import OURS, Bar, Case, Workload, differs
from .gpu_clock import DEVICE
from .output_layers import DISTRIBUTIONS, MAPS, SCORES, step

ROWS, FEATURES, CLASSES = 4096, 4096, (32_000, 128_256)
TINY = (12, 24, (90,))


@functools.lru_cache(maxsize=1)
def operands(rows: int, features: int, classes: int, distribution: str, dtype: str) -> tuple[Any, Any, Any]:
    """As those on the CPU, of another size and on the device."""
    draw = functools.partial(torch.randn, generator=DEVICE.generator(classes), device=DEVICE.kind)
    weight = draw(classes, features).div_(features**0.5)
    y = torch.randint(classes, (rows,), generator=DEVICE.generator(rows), device=DEVICE.kind)
    x = draw(rows, features)
    if distribution == "trained":
        ahead = torch.linspace(0.0, 2.0 * math.log(classes), rows, device=DEVICE.kind)
        x = 0.5 * x + ahead[:, None] * weight[y]
    kind = getattr(torch, dtype)
    return x.to(kind).requires_grad_(), weight.to(kind).requires_grad_(), y


def run(case: Case) -> Workload:
    features = int(case.note.split()[0])
    x, weight, y = operands(case.shape[0], features, case.shape[1], case.distribution, case.dtype)
    mapping = MAPS[case.map]
    losses: dict[str, Callable[[], Any]] = {
        OURS: lambda: anymax.linear_loss(x, weight, y, mapping),
        SCORES: lambda: functional.cross_entropy(x @ weight.T, y),
    }
    contenders = {name: functools.partial(step, loss, x, weight) for name, loss in losses.items()}

    def check() -> str | None:
        """The loss of a few rows and its gradient in their features, from all their scores in fp64."""
        some = slice(0, min(64, len(x)))
        part, t = x.detach()[some].requires_grad_(), y[some]
        value = anymax.linear_loss(part, weight.detach(), t, mapping, reduction="sum")
        got = value.detach()[None], torch.autograd.grad(value, part)[0]
        scores = (part.detach() @ weight.detach().T).double().requires_grad_()
        with anymax.use("reference"):
            loss = anymax.nll if mapping.name == "softmax" else anymax.fenchel_young
            want = loss(mapping, scores, t, reduction="sum")
        slope = torch.autograd.grad(want, scores)[0].to(part.dtype) @ weight.detach()
        pairs = zip(got, (want.detach()[None], slope))
        return next((wrong for a, b in pairs if (wrong := differs(a, b, case.dtype))), None)

    return Workload(contenders, check, "triton")


OPERATIONS = "a block of scores by torch's operations"
TOUCHED: dict[str, Callable[..., Any]] = {  # what two kernels do with a block of scores in place of many operations
    "a mean": lambda x, w, y: anymax.linear_loss(x, w, y),
    "a mean, capped and smoothed": lambda x, w, y: anymax.linear_loss(
        x, w, y, transform=anymax.transforms.softcap(30.0), label_smoothing=0.1
    ),
    "each row": lambda x, w, y: anymax.linear_loss(x, w, y, reduction="none").sum(),
    "log p and entropy": lambda x, w, y: torch.stack(anymax.linear_log_prob_entropy(x, w, y, temperature=0.7)).sum(),
    "sparsemax": lambda x, w, y: anymax.linear_loss(x, w, y, anymax.Sparsemax()),
}


def by_operations(call: Callable[[], Any]) -> Any:
    """A call without the kernels for blocks of scores."""
    found = torch_scores.engine_of
    torch_scores.engine_of = lambda *given: None
    try:
        return call()
    finally:
        torch_scores.engine_of = found


def touched(case: Case) -> Workload:
    """A step by kernels and by operations, with the same products."""
    features, said = case.note.split(" features: ")
    x, weight, y = operands(case.shape[0], int(features), case.shape[1], case.distribution, case.dtype)
    call = functools.partial(step, functools.partial(TOUCHED[said], x, weight, y), x, weight)
    ways = {OURS: call, OPERATIONS: functools.partial(by_operations, call)}

    def check() -> str | None:
        pairs = zip(ways[OURS](), ways[OPERATIONS]())
        return next((wrong for a, b in pairs if (wrong := differs(a, b.double(), case.dtype))), None)

    return Workload(ways, check, "triton")


def layer_cases() -> Iterator[Case]:
    rows, features, sizes = TINY if DEVICE.dry else (ROWS, FEATURES, CLASSES)
    for said in TOUCHED:
        yield Case(
            "gpu output layer", "sparsemax" if said == "sparsemax" else "softmax", (rows, sizes[-1]), touched,
            (Bar(OPERATIONS, at_most=1.0),), "trained", "bfloat16", note=f"{features} features: {said}", needs=("torch", "triton"),
        )  # fmt: skip
    for classes in sizes:
        for dtype in ("bfloat16", "float32"):
            for distribution in DISTRIBUTIONS:
                for name in ("entmax15", "sparsemax", "softmax"):
                    bars = (Bar(SCORES, at_most=0.5 if dtype == "float32" and name != "softmax" else 1.0),)
                    note = f"{features} features"
                    yield Case(
                        "gpu output layer", name, (rows, classes), run, bars, distribution, dtype, note=note, needs=("torch", "triton")
                    )  # fmt: skip
