"""Plans beside those around them: each kernel at each shape, and tiles of attention, on the device's clock.

`plans` compiles every plan, on all cores at the same time; `tune` then times the plans of a shape in turns, in one process.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tools.gpu_jobs import Job

ROW_SHAPES = ((65536, 128), (4096, 1024), (4096, 8192), (4096, 50257), (4096, 128256))


class Trial(NamedTuple):
    """The plans of one call; the first is in force. `force` makes a plan the one that is taken, `call` sets the call up."""

    name: str
    plans: tuple[Any, ...]
    force: Callable[[Any], Any]
    call: Callable[[], Callable[[], Any]]


def row_kernels(size: int) -> dict[str, Any]:
    """Each kind of kernel -> the map that it is measured with. Threshold maps have another one where results are of half precision."""
    import anymax

    return {
        "dense": anymax.Softmax(), "separable" if size > 2 else "halves": anymax.Entmax(1.5), "truncated": anymax.SparseSoftmax(k=50),
        "nucleus": anymax.SparseSoftmax(p=0.9), "backward": anymax.Sparsemax(),
    }  # fmt: skip


def around_rows(plan: Any) -> Iterator[Any]:
    """Plans that differ from this one by a factor of two and serve the same rows: a tile of whole rows stays as wide as they are, steps
    are of one row. A thread has 4 to 128 scores."""
    ways: list[dict[str, float]] = [{"warps": 2}, {"warps": 0.5}]
    if plan.whole:
        ways += [{"R": 2}, {"R": 0.5}, {"K": 2, "L": 0.5}, {"K": 0.5, "L": 2}, {"R": 0.5, "warps": 0.5}]
    else:
        ways += [{"K": 2}, {"K": 0.5}, {"L": 2}, {"L": 0.5}, {"L": 0.5, "warps": 0.5}]
    for way in ways:
        one = dataclasses.replace(plan, **{name: int(getattr(plan, name) * by) for name, by in way.items()})
        if (
            min(one.R, one.K, one.L, one.warps) >= 1
            and one.warps <= 16
            and 4 <= one.R * one.K * one.L / (32 * one.warps) <= 128
        ):
            yield one


def neighbours(plan: Any, names: tuple[str, ...]) -> Iterator[Any]:
    """Plans that differ from this one by a factor of two in one number."""
    for name in names:
        now = getattr(plan, name)
        for other in (now * 2, now // 2):
            if other >= 1:
                yield dataclasses.replace(plan, **{name: other})


def rows(only: str) -> Iterator[Trial]:
    import torch

    from anymax.kernels import triton as engine
    from anymax.kernels.triton import plans
    from benchmarks.gpu import FEW, TINY, scores
    from benchmarks.gpu_clock import BUFFERS, DEVICE, RING, around

    def call(kernel: str, mapping: Any, shape: tuple[int, int], dtype: str, size: int) -> Callable[[], Any]:
        count = 2 if DEVICE.dry else max(1, min(BUFFERS, -(-RING // (shape[0] * shape[1] * size))))
        xs = scores(shape, dtype, count)
        outs = [torch.empty_like(x) for x in xs]
        if kernel == "backward":
            ps = [engine.ENGINE.forward(mapping, x) for x in xs]
            return around(lambda x, p, g: engine.ENGINE.vjp(mapping, x, p, g), xs, ps, outs[::-1])
        return around(lambda x, out: engine.ENGINE.forward(mapping, x, None, out), xs, outs)

    for shape in TINY if DEVICE.dry else (*ROW_SHAPES, *FEW):
        for dtype, size in (("bfloat16", 2), ("float32", 4)):
            for kernel, mapping in row_kernels(size).items():
                now = plans.plan(kernel, shape[0], shape[1], False, False, size=size)
                others = around_rows(now)
                if shape in FEW:  # beside one program a row: parts, as longer rows have them
                    cut = plans.plan(kernel, shape[0], 10 * plans.VERY_LONG, False, False, size=size, cut=True)
                    others = (dataclasses.replace(cut, parts=parts) for parts in (8, 16, 32))
                yield Trial(
                    f"rows {kernel} {'x'.join(map(str, shape))} {dtype}", (now, *others),
                    lambda plan, kernel=kernel: plans.forced.update({kernel: plan}),
                    functools.partial(call, kernel, mapping, shape, dtype, size),
                )  # fmt: skip


def attention_tiles(cases: list[Any]) -> Iterator[Trial]:
    """Attention: its cases of the benchmark."""
    from anymax.kernels.triton import attention_plans

    for case in cases:
        if case.group == "gpu attention" and "beside" not in case.note and case.map in ("entmax15", "softmax"):
            now = attention_plans.blocks(case.shape[-1], 2, case.shape[-2], False, False)
            yield Trial(
                f"attention {case.name}", (now, *neighbours(now, ("M", "N", "warps", "stages"))),
                attention_plans.forced_blocks.append, lambda case=case: case.setup(case).contenders["anymax"],
            )  # fmt: skip


def trials(args: argparse.Namespace, cases: list[Any]) -> Iterator[Trial]:
    yield from (
        trial
        for trial in (*rows(args.only), *attention_tiles(cases))
        if re.search(args.only, trial.name, re.IGNORECASE)
    )


def compiled(args: argparse.Namespace, cases: list[Any]) -> Iterator[Job]:
    """Each plan called once: a plan that does not compile or does not fit is a line with an error."""
    from benchmarks.gpu_clock import DEVICE

    def once(trial: Trial, plan: Any) -> dict[str, Any]:
        with DEVICE.own_stream():
            trial.force(plan)
            trial.call()()
            DEVICE.synchronize()
        return {"ok": True}

    for trial in trials(args, cases):
        for plan in trial.plans:
            yield Job("plans", f"{trial.name} {plan}", functools.partial(once, trial, plan), 90)


def tune(args: argparse.Namespace, cases: list[Any], have: dict[str, bool]) -> Iterator[Job]:
    """Those of the plans that `plans` has called, or all of them."""
    from benchmarks.gpu_clock import DEVICE, measure
    from benchmarks.measure import Plan

    def timed(trial: Trial) -> dict[str, Any]:
        def forced(plan: Any, call: Callable[[], Any]) -> Callable[[], Any]:
            def one() -> Any:
                trial.force(plan)
                return call()

            return one

        plans = [plan for plan in trial.plans if have.get(f"{trial.name} {plan}", True)]
        with DEVICE.own_stream():
            call = trial.call()
            timing = measure(
                {str(plan): forced(plan, call) for plan in plans}, Plan(budget=args.budget, sample=0.001, least=5)
            )
        return {"ok": True, "ms": {str(plan): round(1e3 * timing.median(str(plan)), 5) for plan in plans}}

    for trial in trials(args, cases):
        yield Job("tune", trial.name, functools.partial(timed, trial), 120)
