"""Everything that wants a GPU, in calls of at most ten minutes on a borrowed machine.

    python tools/gpu.py FOLDER                       all stages, in the order of what one wants to know first
    python tools/gpu.py FOLDER --stages bench --only 'gpu forward'
    python tools/gpu.py --pack FOLDER                wheels of what such a machine lacks, to carry along: PYTHONPATH=FOLDER
    python tools/gpu.py FOLDER --dry                 the same from beginning to end without a GPU: interpreter, tiny shapes

Each case runs in a process of its own, forked from this one when all is imported, and leaves one line of JSON in FOLDER/cases.jsonl as soon
as it is done: a crash or a time limit loses that case and no other. What FOLDER has already is not run again, so that a call that was cut
off goes on where it stopped. The machine needs torch, Triton and NumPy (and pytest for the parity of every option).

smoke   every case of the table of `benchmarks`, once, on all cores at the same time: this compiles all kernels, and checks their results
parity  tests/rows_triton.py, tests/attention_triton.py, tests/test_cuda.py, in pieces, on all cores
bench   the cases again, one after the other, against their peers, on the device's clock
tune    a few plans for each kernel and shape
check   compute-sanitizer on small cases; ncu on the kernels of the bars, where they are installed
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "tests")]

WHEELS = ("array-api-compat", "entmax", "adasplash", "liger-kernel")  # pure Python: any version of it takes them
STAGES = ("smoke", "parity", "bench", "tune", "check")
SUITES = ("rows_triton.py", "attention_triton.py", "test_cuda.py")
PIECE = 12  # tests of one function that one process runs


class Job(NamedTuple):
    """A case: `call` returns what its line says beside name and time."""

    stage: str
    name: str
    call: Callable[[], dict[str, Any]]
    limit: float


# -- processes -------------------------------------------------------------------------------------------------------------------


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
    why = f"out of time ({one.job.limit:.0f} s)" if late else f"its process ended with {code}"
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
            if not line["ok"] or line["stage"] in ("bench", "tune", "check"):
                print(json.dumps(line), flush=True)


def seen(folder: Path) -> set[tuple[str, str]]:
    """What the folder has a line for."""
    file = folder / "cases.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {(line["stage"], line["case"]) for line in map(json.loads, lines)}


# -- the stages -------------------------------------------------------------------------------------------------------------------


def table(only: str) -> list[Any]:
    from benchmarks.gpu import table

    return [case for case in table() if re.search(only, case.key, re.IGNORECASE)]


def smoke(only: str) -> Iterator[Job]:
    from benchmarks.__main__ import missing
    from benchmarks.gpu import own_stream

    def once(case: Any) -> dict[str, Any]:
        import torch

        with own_stream():
            work = case.setup(case)
            wrong = work.check()
            for call in work.contenders.values():
                call()
            torch.cuda.synchronize()
        return {"ok": not wrong, **({"error": wrong} if wrong else {}), "engine": work.engine}

    for case in table(only):
        if missing(case) is None:
            yield Job("smoke", case.key, lambda case=case: once(case), 240)


def bench(only: str, budget: float) -> Iterator[Job]:
    import dataclasses

    from benchmarks.__main__ import run_case
    from benchmarks.measure import Plan

    def timed(case: Any) -> dict[str, Any]:
        rows = [dataclasses.asdict(r) for r in run_case(case, Plan(budget=budget, sample=0.002, least=7))]
        short = {
            r["peer"]: {
                k: r[k]
                for k in ("verdict", "ours_ms", "peer_ms", "ratio", "at_least", "at_most", "message")
                if r[k] not in (None, "")
            }
            for r in rows
        }
        first = rows[0]
        return {
            "ok": first["verdict"] not in ("error", "wrong"), "engine": first["engine"], "of_copy": first["of_copy"],
            "gb_per_s": first["gb_per_s"], "peers": short,
        }  # fmt: skip

    for case in table(only):
        yield Job("bench", case.key, lambda case=case: timed(case), 60)


def parity(only: str, folder: Path) -> Iterator[Job]:
    def collect() -> dict[str, Any]:
        import pytest

        ids: list[str] = []

        class Plugin:
            def pytest_collection_finish(self, session: Any) -> None:
                ids.extend(item.nodeid for item in session.items)

        files = [str(ROOT / "tests" / name) for name in SUITES]
        code = pytest.main(["-q", "--collect-only", "-p", "no:cacheprovider", f"--rootdir={ROOT}", *files], [Plugin()])
        return {"ok": int(code) == 0 and bool(ids), "tests": ids}

    def tests(ids: list[str]) -> dict[str, Any]:
        import pytest

        failed: dict[str, str] = {}
        count = {"passed": 0, "skipped": 0}

        class Plugin:
            def pytest_runtest_logreport(self, report: Any) -> None:
                if report.failed:
                    failed[report.nodeid] = str(report.longrepr).strip().splitlines()[-1][:300]
                elif report.when == "call" or report.skipped:
                    count[report.outcome] += 1

        pytest.main(["-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}", *(str(ROOT / i) for i in ids)], [Plugin()])
        return {"ok": not failed and bool(count["passed"] + count["skipped"]), **count, "failed": failed}

    one = begin(Job("parity", "collect", collect, 120), folder / "log.txt")
    found = finish(one, False)
    groups: dict[str, list[str]] = {}
    for name in found.get("tests", ()):
        if re.search(only, name):
            groups.setdefault(name.split("[")[0], []).append(name)
    if not found["ok"]:
        print(f"# no tests were collected: see {folder / 'log.txt'}", flush=True)
    for name, ids in groups.items():
        pieces = [ids[i : i + PIECE] for i in range(0, len(ids), PIECE)]
        for number, piece in enumerate(pieces):
            label = f"{name} {number + 1}/{len(pieces)}" if len(pieces) > 1 else name
            yield Job("parity", label, lambda piece=piece: tests(piece), 300)


def pack(folder: Path) -> None:
    """Pure wheels, unpacked: a folder for PYTHONPATH."""
    words = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-compile",
        "--target",
        str(folder),
        *WHEELS,
    ]
    subprocess.run(words, check=True)


def facts() -> dict[str, Any]:
    """The machine, without a word to the device in this process."""
    import torch
    import triton

    words = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu",
        "--format=csv,noheader",
    ]
    told = (
        subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
        if shutil.which(words[0])
        else "no GPU"
    )
    return {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0], "device": told}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--only", default="", help="cases whose name matches this regular expression")
    parser.add_argument("--seconds", type=float, default=570, help="for all of it")
    parser.add_argument("--budget", type=float, default=0.25, help="seconds of rounds for a case of bench")
    parser.add_argument("--pack", action="store_true")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.pack:
        pack(args.folder)
        return
    start = time.monotonic()
    stop = start + args.seconds
    import torch  # noqa: F401  (before the first fork)
    import triton  # noqa: F401

    import anymax  # noqa: F401
    import anymax.kernels.triton.launch  # noqa: F401

    print(json.dumps(facts()), flush=True)
    have, cores = seen(args.folder), os.cpu_count() or 1
    makers = {
        "smoke": lambda: smoke(args.only), "parity": lambda: parity(args.only, args.folder), "bench": lambda: bench(args.only, args.budget),
    }  # fmt: skip
    for stage in args.stages.split(","):
        if stage in makers:
            jobs = [job for job in makers[stage]() if (job.stage, job.name) not in have]
            before = time.monotonic()
            run(jobs, args.folder, 1 if stage in ("bench", "tune", "check") else cores, stop)
            print(f"# {stage}: {len(jobs)} cases in {time.monotonic() - before:.0f} s", flush=True)
    print(json.dumps(facts()), flush=True)


if __name__ == "__main__":
    main()
