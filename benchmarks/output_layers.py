"""The cases of output layers: the loss of a large vocabulary and its gradients in features and weight, without the scores.

`python -m benchmarks.output_layers` says of each where the time goes, beside the one matrix product that is left, and what memory it takes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import anymax
from anymax import Entmax, Mapping, Softmax, Sparsemax

from .cases import OURS, Bar, Case, Workload, differs

SCORES = "x @ W.T and F.cross_entropy"
LINEAR = "F.linear_cross_entropy"
ROWS, FEATURES = 512, 1024
MOST = 0.1  # of the memory of the scores, above that of weight and gradients; twice that is an error: the system counts pages
FEW = 1 << 24  # scores that may take as much memory as the weight
HELD = 0.5  # of the memory of the weight, for softmax in fp32, whose gradient the forward pass computes, and for few scores
LEAST = 2.0**-8  # the probability below which a class has no gradient, in the cases that say so
MAPS: dict[str, Mapping] = {
    "entmax15": Entmax(1.5), "sparsemax": Sparsemax(), "softmax": Softmax(), "softmax, the likely": Softmax(),
}  # fmt: skip
DISTRIBUTIONS = ("normal", "trained")


@functools.lru_cache(maxsize=1)
def operands(classes: int, distribution: str, dtype: str) -> tuple[Any, Any, Any]:
    """Features, weight N(0, 1 / sqrt(d)) and targets. Trained: the features have more or less of the target's row of the weight, so that
    softmax gives it half on the average; some rows are sure of it and some are lost. Beginning: scores that are close to each other, as in
    the first steps of a training, so that hundreds of classes are in the support."""
    import torch

    generator = torch.Generator().manual_seed(classes)
    weight = torch.randn(classes, FEATURES, generator=generator).div_(FEATURES**0.5)
    y = torch.randint(classes, (ROWS,), generator=generator)
    x = torch.randn(ROWS, FEATURES, generator=generator)
    if distribution == "trained":
        ahead = torch.linspace(0.0, 2.0 * math.log(classes), ROWS)
        x = 0.5 * x + ahead[:, None] * weight[y]
    elif distribution == "beginning":
        x = 0.2 * x
    kind = getattr(torch, dtype)
    return x.to(kind).requires_grad_(), weight.to(kind).requires_grad_(), y


def step(loss: Callable[[], Any], *free: Any) -> Any:
    import torch

    return torch.autograd.grad(loss(), free)


def ours(case: Case, x: Any, weight: Any, y: Any) -> Any:
    return anymax.linear_loss(x, weight, y, MAPS[case.map], least=LEAST if "likely" in case.map else 0.0)


def layer(case: Case) -> Workload:
    import torch
    from torch.nn import functional

    x, weight, y = operands(case.shape[1], case.distribution, case.dtype)
    mapping = MAPS[case.map]
    losses: dict[str, Callable[[], Any]] = {
        OURS: functools.partial(ours, case, x, weight, y),
        SCORES: lambda: functional.cross_entropy(x @ weight.T, y),
        LINEAR: lambda: functional.linear_cross_entropy(x, weight, y),
    }
    work = Workload({name: functools.partial(step, loss, x, weight) for name, loss in losses.items()}, lambda: None)

    def check() -> str | None:
        share = memory(losses[OURS], x, weight)
        if share is not None:
            work.engine = f"{share:.0%} memory"
            held = max(HELD * FEATURES / ROWS, FEW / math.prod(case.shape)) if case.dtype == "float32" else 0.0
            if share > 2.0 * MOST + held:
                return f"{share:.2f} of the memory of the scores, where {MOST} is allowed"
        got = work.contenders[OURS]()
        scores = (x @ weight.T).float()
        want = step(
            lambda: (
                functional.cross_entropy(scores, y)
                if mapping.name == "softmax"
                else anymax.fenchel_young(mapping, scores, y)
            ),
            scores,
        )
        d = want[0]
        d = torch.where((d > 0) & (d * ROWS < LEAST), 0, d) if "likely" in case.map else d
        d = d.to(x.dtype)
        with torch.no_grad():
            some = torch.cat([torch.arange(2048), y])  # some classes, those of the targets among them
            pairs = [(got[0], d @ weight), (got[1][some], d[:, some].T @ x)]
        return next((wrong for a, b in pairs if (wrong := differs(a, b, case.dtype))), None)

    work.check = check
    return work


def memory(loss: Callable[[], Any], x: Any, weight: Any) -> float | None:
    """The peak of a step above what stays, the gradients, as a share of the memory of the scores; None where the system does not say."""
    if sys.platform != "linux":
        return None
    step(loss, x, weight)  # what the library of matrix products keeps for itself is there already
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        before = _pages("VmRSS")
        step(loss, x, weight)
        return (_pages("VmHWM") - before - x.nbytes - weight.nbytes) / (x.element_size() * x.shape[0] * weight.shape[0])
    return None


def _pages(name: str) -> int:
    with open("/proc/self/status") as file:
        return 1024 * int(next(line for line in file if line.startswith(name)).split()[1])


def layer_cases() -> Iterator[Case]:
    for classes in (32_000, 128_256):
        for dtype in ("float32", "bfloat16"):
            for distribution in DISTRIBUTIONS:
                for name, mapping in MAPS.items():
                    if "likely" in name and distribution == "normal":  # where no class is
                        continue
                    most = 1.0 if mapping.name == "softmax" else 0.5
                    bars = (Bar(SCORES, at_most=most), Bar(LINEAR, at_most=most))
                    yield Case(
                        "output layer", name, (ROWS, classes), layer, bars, distribution, dtype, note=f"{FEATURES} features",
                        full=classes > 100_000,
                    )  # fmt: skip
    bars = (Bar(SCORES, at_most=1.2), Bar(LINEAR, at_most=1.2))
    note = f"{FEATURES} features, hundreds of classes in the support"
    yield Case("output layer", "entmax15", (ROWS, 12_000), layer, bars, "beginning", "float32", note=note)


# -- where the time goes -------------------------------------------------------------------------------------------------------------


def parts(case: Case) -> dict[str, float]:
    """Milliseconds: of the product of all scores in blocks, of what else the forward pass does, of the gradient; the bound, one product."""
    import torch

    from anymax.linear.layer import Layer
    from anymax.linear.torch_blocks import BlockSize, ScoreBlocks

    x, weight, y = operands(case.shape[1], case.distribution, case.dtype)
    of = Layer.of("benchmark", x.detach(), weight.detach(), MAPS[case.map], None, None)
    blocks = BlockSize.of(of, None)
    scores = ScoreBlocks(of, blocks)

    def product() -> None:
        for a, b in blocks.parts(of):
            scores.block(a, b)

    def forward() -> Any:
        return ours(case, x, weight, y)

    with torch.no_grad():
        bound, blocked = _best(lambda: x @ weight.T), _best(product)
    ahead, both = _best(forward), _best(lambda: step(forward, x, weight))
    return {
        "product": blocked,
        "candidates": ahead - blocked,
        "gradient": both - ahead,
        "all": both,
        "one product": bound,
    }


def _best(call: Callable[[], Any], rounds: int = 3) -> float:
    call()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="A step of each output layer on this machine, and where its time goes."
    )
    parser.add_argument("--full", action="store_true", help="the large cases too")
    full = parser.parse_args().full
    for case in layer_cases():
        if case.full and not full:
            continue
        x, weight, y = operands(case.shape[1], case.distribution, case.dtype)
        share = memory(functools.partial(ours, case, x, weight, y), x, weight)
        said = ", ".join(f"{name} {ms:.0f}" for name, ms in parts(case).items())
        print(
            f"{case.name:60} ms: {said}; memory {'unknown' if share is None else f'{share:.3f}'} of the scores",
            flush=True,
        )


if __name__ == "__main__":
    main()
