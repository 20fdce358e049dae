"""The device that the GPU cases run on, and its clock: CUDA graphs and events. In a dry run: the CPU, and Triton's interpreter."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from typing import Any

from .measure import Plan, Timing

RING = 192 * 2**20  # bytes of scores that go by before the same ones come again: several times any L2 cache
BUFFERS = 24  # at most: more of them would take longer to make than to read


class Device:
    """Where tensors are made: "cuda", or "cpu" in a dry run, which has tiny shapes. `graphs`: calls are captured in CUDA graphs."""

    kind = "cuda"
    graphs = True

    @property
    def dry(self) -> bool:
        return self.kind == "cpu"

    def generator(self, seed: int) -> Any:
        import torch

        return torch.Generator(self.kind).manual_seed(seed)

    def synchronize(self) -> None:
        import torch

        if not self.dry:
            torch.cuda.synchronize()

    @contextlib.contextmanager
    def without_graphs(self) -> Any:
        """Calls are made one by one: a short one then takes what it costs the host."""
        self.graphs = False
        try:
            yield
        finally:
            self.graphs = True

    @contextlib.contextmanager
    def own_stream(self) -> Any:
        """What a case is set up and measured in: the default stream can't be captured, nor a backward whose forward ran there."""
        import torch

        import anymax

        with anymax.use("triton") if self.dry else torch.cuda.stream(torch.cuda.Stream()):
            yield


DEVICE = Device()


def around(call: Callable[..., Any], *buffers: list[Any]) -> Callable[[], Any]:
    """A call that takes the next of the buffers each time."""
    turns = itertools.cycle(list(zip(*buffers)))
    return lambda: call(*next(turns))


def captured(call: Callable[[], Any], times: int) -> Callable[[], Any]:
    """So many calls as one CUDA graph; where they can't be captured, they are made one by one."""
    import torch

    def one_by_one() -> None:
        for _ in range(times):
            call()

    if DEVICE.dry or not DEVICE.graphs:
        return one_by_one
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            one_by_one()
    except Exception:  # it waits for the device, or takes memory in a way that a graph can't
        torch.cuda.synchronize()
        return one_by_one
    return graph.replay


def milliseconds(calls: list[Callable[[], Any]]) -> list[float]:
    """How long each took, one after the other, with one synchronisation at the end."""
    import torch

    if DEVICE.dry:
        times = [time.perf_counter()]
        for call in calls:
            call()
            times.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in itertools.pairwise(times)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
    marks[0].record()
    for call, mark in zip(calls, marks[1:]):
        call()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


def measure(contenders: dict[str, Callable[[], Any]], plan: Plan, context: Any = None) -> Timing:
    """As `measure.measure`, on the device's own clock: contenders take turns, one synchronisation a round."""
    inner, replays = {}, {}
    with context or contextlib.nullcontext():
        for name, call in contenders.items():
            for _ in range(1 if DEVICE.dry else 3):
                call()
            DEVICE.synchronize()
            start = time.perf_counter()
            call()
            DEVICE.synchronize()
            cost = time.perf_counter() - start
            inner[name] = max(1, min(4 * BUFFERS, round(plan.sample / max(cost, 1e-6))))
            replays[name] = captured(call, inner[name])
            replays[name]()
            DEVICE.synchronize()
        rows: list[list[float]] = []
        start = time.perf_counter()
        while len(rows) < plan.least or (time.perf_counter() - start < plan.budget and len(rows) < 100):
            taken = milliseconds(list(replays.values()))
            rows.append([max(ms, 1e-6) * 1e-3 / inner[name] for ms, name in zip(taken, replays)])
    return Timing(dict(zip(contenders, map(list, zip(*rows)))), 0, False, None)
