"""Which plans of the row kernels are worth a device's time: those that are fast by the compiler's figures.

    python -m tools.gpu_plans --only entmax15 --target sm_90       what `tools/gpu.py` would measure, with the times of the model

A kernel's plan is compiled beside all that differ from it by a factor of two in one number or in two; what does not compile or spills more
than the plan in force is left out, and of the rest those stay whose predicted time (`gpu_static.seconds`) is shortest.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tools import gpu_static  # noqa: E402  (it is found there)

MOST = 7  # plans that are measured, the one in force among them
THREAD = (4, 128)  # scores of a thread, from and to


class Choice(NamedTuple):
    """A kernel at a shape: what is to be chosen."""

    kernel: str
    map: str
    shape: tuple[int, int]
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.kernel} {'x'.join(map(str, self.shape))} {self.dtype}"

    @property
    def size(self) -> int:
        return 4 if self.dtype == "float32" else 2

    def in_force(self) -> Any:
        from anymax.kernels.triton import plans

        return plans.plan(self.kernel, self.shape[0], self.shape[1], False, False, size=self.size)


def kernels(dtype: str) -> dict[str, str]:
    """Each kind of kernel -> the map that it is measured with. Threshold maps have another one where results are of half precision."""
    return {
        "dense": "softmax", "separable" if dtype == "float32" else "halves": "entmax15", "truncated": "top-k", "backward": "sparsemax",
    }  # fmt: skip


def mapping(name: str) -> Any:
    import anymax

    return {
        "softmax": anymax.Softmax(), "entmax15": anymax.Entmax(1.5), "top-k": anymax.SparseSoftmax(k=20), "sparsemax": anymax.Sparsemax(),
    }[name]  # fmt: skip


def candidates(plan: Any) -> list[Any]:
    """The plan, and those around it that serve the same rows: a tile of whole rows stays as wide as they are, steps are of one row."""
    ways = [{"warps": 2}, {"warps": 0.5}]
    if plan.whole:
        ways += [{"R": 2}, {"R": 0.5}, {"K": 2, "L": 0.5}, {"K": 0.5, "L": 2}]
    else:
        ways += [{"K": 2}, {"K": 0.5}, {"L": 2}, {"L": 0.5}]
    found = [plan]
    for several in itertools.chain(((way,) for way in ways), itertools.combinations(ways, 2)):
        numbers = {name: float(getattr(plan, name)) for name in ("R", "K", "L", "warps")}
        for way in several:
            numbers = {name: value * way.get(name, 1) for name, value in numbers.items()}
        one = dataclasses.replace(plan, **{name: int(value) for name, value in numbers.items()})
        threads = one.R * one.K * one.L / max(32 * one.warps, 1)
        if min(numbers.values()) >= 1 and one.warps <= 16 and THREAD[0] <= threads <= THREAD[1] and one not in found:
            found.append(one)
    return found


class Said(NamedTuple):
    """Of a kernel by a plan, in the order of what is preferred."""

    seconds: float
    issued: int  # instructions of all warps: where the bytes decide, the fewer the better
    stack: int  # bytes of a thread that do not fit its registers


def predicted(choice: Choice, plan: Any, target: str) -> Said:
    import torch

    from anymax.kernels import triton as engine
    from anymax.kernels.triton import plans

    x = torch.empty(choice.shape, dtype=getattr(torch, choice.dtype), device="meta")
    back = choice.kernel == "backward"

    def call() -> None:
        if back:
            engine.vjp(mapping(choice.map), x, x, x)
        else:
            engine.forward(mapping(choice.map), x, None, x)

    before = dict(plans.forced)
    try:
        plans.forced[choice.kernel] = plan
        case = gpu_static.Case(choice.name, call, (3 if back else 2) * x.numel() * choice.size, choice.shape[1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's
            found = gpu_static.read(case, target)
    finally:
        plans.forced.clear()
        plans.forced.update(before)
    tiles = 1 if plan.whole else -(-choice.shape[1] // (plan.K * plan.L))
    issued = sum(launch.programs * figures.warps * figures.issued(tiles) for launch, figures in found)
    return Said(gpu_static.seconds(case, found)[0], issued, max(figures.stack for _, figures in found))


def preselected(choice: Choice, target: str, most: int = MOST) -> list[tuple[Any, float | None]]:
    """(plan, predicted seconds): the one in force, and the fastest of the others by the model."""
    tried: dict[Any, Said] = {}
    first, *others = candidates(choice.in_force())
    for plan in (first, *others):
        # a plan that the compiler refuses is no candidate
        with contextlib.suppress(Exception):
            tried[plan] = predicted(choice, plan, target)
    if first not in tried:
        return [(first, None)]
    fit = [plan for plan in others if plan in tried and tried[plan].stack <= tried[first].stack]
    fit.sort(key=tried.__getitem__)
    return [(plan, tried[plan].seconds) for plan in (first, *fit[: most - 1])]


def choices(shapes: Iterable[tuple[tuple[int, int], str]]) -> Iterator[Choice]:
    """Of all kernels at these shapes and types."""
    for shape, dtype in shapes:
        for kernel, name in kernels(dtype).items():
            yield Choice(kernel, name, shape, dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="kernels at shapes that match this regular expression")
    parser.add_argument("--target", default="sm_90")
    args = parser.parse_args()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    for choice in choices(itertools.product(gpu_static.ROWS, ("bfloat16", "float32"))):
        if re.search(args.only, f"{choice.map} {choice.name}"):
            for i, (plan, time) in enumerate(preselected(choice, args.target)):
                print(
                    f"{choice.name:36} {'in force' if not i else '':9} {plan} {1e6 * (time or 0):8.1f} us", flush=True
                )


if __name__ == "__main__":
    main()
