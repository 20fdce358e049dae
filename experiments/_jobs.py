"""The runs of an experiment one after the other, or on several processes at once: `--jobs`."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

OPTION = {"type": int, "default": 1, "metavar": "N", "help": "processes; no figure but of seconds depends on it"}


@contextlib.contextmanager
def run_on(jobs: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """Gives map(run, work): what `run(*one)` returns for each of `work`, in its order, on one thread each.

    With one job a run begins when its result is asked for; with more, so many processes take them in their order.
    """
    one_thread()
    if jobs <= 1:
        yield lambda run, work: (run(*one) for one in work)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, initializer=one_thread) as pool:

        def on_pool(run: Callable[..., Any], work: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
            waiting = [pool.apply_async(run, one) for one in work]
            return (one.get() for one in waiting)

        yield on_pool


def one_thread() -> None:
    import torch  # late: listing the experiments needs no torch

    torch.set_num_threads(1)
