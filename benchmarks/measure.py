"""Timing: contenders take turns, rounds in which the process lost the CPU are dropped, ratios are taken in a round."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

# share of the machine that others may use while cases are timed whose rounds can't be judged one by one
_CROWDED = 0.08
_SETTLED = 0.003  # the standard error of a ratio at which a case has been measured well enough
_SHORT = 0.03  # seconds; what takes longer goes through more memory than caches hold
_ROUNDS = 400
_TOLD = os.path.exists("/proc/self/schedstat")


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long to measure a case."""

    budget: float = 1.5  # seconds of rounds
    sample: float = 0.002  # seconds that one sample should take: short calls are repeated
    least: int = 7  # clean rounds, however long they take
    patience: float = 3.0  # how many budgets to go on for while rounds are lost
    lost: float | None = 0.05  # drop rounds in which more than this share was waiting for a CPU; None: keep them all

    def rounds(self, cost: float) -> int:
        """The least number of rounds that cost so many seconds each."""
        return self.least if cost < self.budget else min(3, self.least) if cost < 10.0 else 1


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds a call, one entry for each round, of each contender."""

    seconds: dict[str, list[float]]
    dropped: int
    noisy: bool  # too few clean rounds: these are the disturbed ones as well
    others: float | None  # CPUs that other processes used meanwhile

    @property
    def rounds(self) -> int:
        return len(next(iter(self.seconds.values())))

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def best(self, name: str) -> float:
        return min(self.seconds[name])

    def ratio(self, over: str, under: str) -> tuple[float, float, float]:
        """The median of the ratios of the rounds, and their quartiles."""
        return _quartiles([a / b for a, b in zip(self.seconds[over], self.seconds[under])])


def measure(contenders: dict[str, Callable[[], Any]], plan: Plan, context: Any = None) -> Timing:
    """Time the contenders in turn, A B C A B C ..., until the ratios have settled or the budget is spent."""
    with context or contextlib.nullcontext(), _no_collection():
        cost = {name: _warm_up(call) for name, call in contenders.items()}
        inner = {name: max(1, math.ceil(plan.sample / t)) for name, t in cost.items()}
        least = plan.rounds(sum(cost[name] * inner[name] for name in cost))
        clean: list[list[float]] = []
        disturbed: list[list[float]] = []
        start, before = time.perf_counter(), busy()
        while True:
            row, lost = _round(contenders, inner, cost)
            (clean if plan.lost is None or lost <= plan.lost else disturbed).append(row)
            spent = time.perf_counter() - start
            done = len(clean) >= least and (spent > plan.budget or _settled(clean))
            gave_up = len(clean) + len(disturbed) >= least and spent > plan.patience * plan.budget
            if done or gave_up or len(clean) >= _ROUNDS:
                break
        after = busy()
    others = (
        max(0.0, (after - before) / (time.perf_counter() - start)) if before is not None and after is not None else None
    )
    few = len(clean) < least
    crowded = plan.lost is None and others is not None and others > _CROWDED * (os.cpu_count() or 1)
    rows = clean + disturbed if few else clean
    return Timing(dict(zip(contenders, map(list, zip(*rows)))), 0 if few else len(disturbed), few or crowded, others)


def _round(
    contenders: dict[str, Callable[[], Any]], inner: dict[str, int], cost: dict[str, float]
) -> tuple[list[float], float]:
    """Seconds a call of each contender, and the largest share of a sample that its threads spent waiting for a CPU."""
    row, share = [], 0.0
    for name, call in contenders.items():
        repeat = itertools.repeat(None, inner[name])
        if cost[name] < _SHORT:
            for _ in range(-(-inner[name] // 4)):
                call()  # not timed: the caches are then this contender's own; one call does not fill the last of them
        before = waited()
        start = time.perf_counter_ns()
        for _ in repeat:
            call()
        wall = time.perf_counter_ns() - start
        share = max(share, (waited() - before) / max(wall, 1))
        row.append(max(wall, 1) * 1e-9 / inner[name])
    return row, share


def waited() -> int:
    """Nanoseconds that the threads of this process have been ready to run, but not running."""
    if not _TOLD:
        return _switched() * 1_000_000
    total = 0
    for task in os.listdir("/proc/self/task"):
        path = f"/proc/self/task/{task}/schedstat"
        with contextlib.suppress(OSError), open(path) as file:  # unless the thread has just ended
            total += int(file.read().split()[1])
    return total


def _switched() -> int:
    """Involuntary context switches, where the kernel doesn't tell waiting times."""
    try:
        import resource
    except ImportError:  # Windows: no round is dropped
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _warm_up(call: Callable[[], Any]) -> float:
    """An estimate of the seconds a call takes, after at least one call that doesn't count."""
    best = math.inf
    for _ in range(4):
        start = time.perf_counter()
        call()
        took = max(time.perf_counter() - start, 1e-7)
        best = min(best, took)
        if took > 0.5:
            break
    return best


def _settled(rows: list[list[float]]) -> bool:
    if len(rows) < 20 or len(rows) % 5:
        return False
    for column in range(1, len(rows[0])):
        middle, low, high = _quartiles([row[0] / row[column] for row in rows])
        if (high - low) > _SETTLED * middle * math.sqrt(len(rows)):
            return False
    return True


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def busy() -> float | None:
    """Seconds of CPU that all other processes have used; None where the kernel doesn't say."""
    ticks = _ticks()
    if ticks is None:
        return None
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf(
        "SC_CLK_TCK"
    ) - time.process_time()  # less idle, less our own


def others(seconds: float = 0.3) -> float:
    """How many CPUs other processes keep busy while this one sleeps."""
    before = busy()
    time.sleep(seconds)
    after = busy()
    return (after - before) / seconds if before is not None and after is not None else 0.0


def stolen() -> int:
    """Clock ticks that the host of a virtual machine took from it."""
    ticks = _ticks()
    return ticks[7] if ticks else 0


def _ticks() -> list[int] | None:
    """user, nice, system, idle, iowait, irq, softirq, steal"""
    with contextlib.suppress(OSError, ValueError), open("/proc/stat") as file:
        return [int(word) for word in file.readline().split()[1:9]]
    return None
