"""Jobs of a GPU machine, each in a process of its own: a crash or a time limit loses one job and no other."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ONE_BY_ONE = ("bench", "tune", "check")  # stages whose cases must not share the device


class Job(NamedTuple):
    """A case: `call` returns what its line says beside name and time."""

    stage: str
    name: str
    call: Callable[[], dict[str, Any]]
    limit: float


class Running(NamedTuple):
    job: Job
    pid: int
    pipe: int
    start: float


def begin(job: Job, log: Path) -> Running:
    """The case in a child; what it prints goes to the log, what it returns through a pipe."""
    read, write = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        os.close(write)
        return Running(job, pid, read, time.monotonic())
    os.setsid()  # what the child starts ends with it
    os.close(read)
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    try:
        line = job.call()
    except BaseException as error:  # its line says so; the traceback is in the log
        print(f"== {job.stage} {job.name}", flush=True)
        traceback.print_exc()
        line = {"ok": False, "error": f"{type(error).__name__}: {error}"[:600]}
    with os.fdopen(write, "w") as pipe:
        pipe.write(json.dumps(line))
    sys.stdout.flush()
    os._exit(0)


def finish(one: Running, late: bool) -> dict[str, Any]:
    """The line of a child that has ended, or is ended."""
    if late:
        os.killpg(one.pid, signal.SIGKILL)
    with os.fdopen(one.pipe) as pipe:
        text = "" if late else pipe.read()
    _, status = os.waitpid(one.pid, 0)
    line = {"stage": one.job.stage, "case": one.job.name, "seconds": round(time.monotonic() - one.start, 2)}
    if text:
        return {**line, **json.loads(text)}
    code = os.waitstatus_to_exitcode(status)
    why = f"out of time ({one.job.limit:g} s)" if late else f"its process ended with {code}"
    return {**line, "ok": False, "error": why}


def run(jobs: list[Job], folder: Path, width: int, stop: float) -> None:
    """The cases, `width` at a time, until `stop`; a line each as it ends."""
    waiting, under_way = list(jobs), {}
    while waiting or under_way:
        while waiting and len(under_way) < width and time.monotonic() < stop:
            one = begin(waiting.pop(0), folder / "log.txt")
            under_way[one.pipe] = one
        if not under_way:
            if waiting:
                print(f"# out of time: {len(waiting)} cases of {waiting[0].stage} are left", flush=True)
            return
        ready, _, _ = select.select(list(under_way), [], [], 0.2)
        now = time.monotonic()
        late = [
            pipe
            for pipe, one in under_way.items()
            if pipe not in ready and now > min(one.start + one.job.limit, stop + 5)
        ]
        for pipe in (*ready, *late):
            line = finish(under_way.pop(pipe), pipe in late)
            with (folder / "cases.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            if not line["ok"] or line["stage"] in ONE_BY_ONE:
                print(json.dumps({key: value for key, value in line.items() if key != "readings"}), flush=True)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """What the folder has."""
    file = folder / "cases.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
