"""Everything that wants a GPU, in calls of at most ten minutes on a borrowed machine.

    python tools/gpu.py FOLDER                       all stages, in the order of what one wants to know first
    python tools/gpu.py FOLDER --stages bench --only 'gpu forward'
    python tools/gpu.py FOLDER --pack                wheels of what such a machine lacks, to carry along: PYTHONPATH=FOLDER
    python tools/gpu.py FOLDER --keep                what the folder has measured, as a record in benchmarks/results
    python tools/gpu.py FOLDER --dry                 the same from beginning to end without a GPU: interpreter, tiny shapes

Each case runs in a process of its own, forked from this one when all is imported, and leaves one line of JSON in FOLDER/cases.jsonl as soon
as it is done: a crash or a time limit loses that case and no other. What FOLDER has already is not run again, so that a call that was cut
off goes on where it stopped. The machine needs torch, Triton and NumPy (and pytest for the parity of every option).

smoke   every case of the table of `benchmarks`, once, on all cores at the same time: this compiles all kernels, and checks their results
parity  tests/kernels/*_triton.py and tests/kernels/test_cuda.py, in pieces, on all cores
bench   the cases again, one after the other, against their peers, on the device's clock
plans   the plans of each kernel and shape, tiles of attention, and those around them, once, on all cores
tune    these plans against each other, a shape at a time, on the device's clock
check   compute-sanitizer on small cases; ncu on the kernels of the bars, where they are installed
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "tests" / "kernels"), str(ROOT / "tests" / "laws")]

from tools import gpu_tune  # noqa: E402
from tools.gpu_jobs import ONE_BY_ONE, Job, begin, finish, lines_of, run  # noqa: E402

WHEELS = ("array-api-compat", "entmax", "adasplash", "liger-kernel")  # pure Python: any version of it takes them
STAGES = ("smoke", "parity", "bench", "plans", "tune", "check")
SUITES = (
    "rows_triton.py",
    "ragged_triton.py",
    "layer_triton.py",
    "replay_triton.py",
    "router_triton.py",
    "sinkhorn_triton.py",
    "attention_triton.py",
    "test_cuda.py",
)
PIECE = 12  # tests of one function that one process runs


# -- the stages -------------------------------------------------------------------------------------------------------------------


def table(only: str) -> list[Any]:
    """Cases of the benchmark whose packages are here; those that compile longest come first."""
    from benchmarks import gpu
    from benchmarks.__main__ import missing

    cases = [case for case in gpu.table() if re.search(only, case.key, re.IGNORECASE) and missing(case) is None]
    return sorted(cases, key=lambda case: ("adasplash" not in case.key, not case.group.endswith("attention")))


def smoke(args: argparse.Namespace) -> Iterator[Job]:
    from benchmarks.gpu_clock import DEVICE

    def once(case: Any) -> dict[str, Any]:
        with DEVICE.own_stream():
            work = case.setup(case)
            wrong = work.check()
            with work.context or contextlib.nullcontext():
                for call in work.contenders.values():
                    call()
            DEVICE.synchronize()
        return {"ok": not wrong, **({"error": wrong} if wrong else {}), "engine": work.engine}

    for case in table(args.only):
        yield Job("smoke", case.key, lambda case=case: once(case), 300)


def bench(args: argparse.Namespace) -> Iterator[Job]:
    import dataclasses

    from benchmarks.__main__ import run_case
    from benchmarks.measure import Plan

    told = ("verdict", "ours_ms", "peer_ms", "ratio", "at_least", "at_most", "message")

    def timed(case: Any) -> dict[str, Any]:
        rows = [dataclasses.asdict(r) for r in run_case(case, Plan(budget=args.budget, sample=0.002, least=5))]
        first = rows[0]
        return {
            "ok": first["verdict"] not in ("error", "wrong"), "engine": first["engine"], "of_copy": first["of_copy"],
            "gb_per_s": first["gb_per_s"], "peers": {r["peer"]: {k: r[k] for k in told if r[k] not in (None, "")} for r in rows},
            "readings": rows,
        }  # fmt: skip

    for case in table(args.only):
        yield Job("bench", case.key, lambda case=case: timed(case), 90)


SANITIZED = {  # (tool, file of tests) -> which of them
    ("memcheck", "rows"): "sparsemax and (layouts or halves or parts)",
    ("racecheck", "rows"): "normmax-2 and (lanes or steps)",
    ("memcheck", "attention"): "entmax-1.25 and a_map",
    ("memcheck", "ragged"): "entmax-1.5 and (rows or steps)",
    ("memcheck", "layer"): "entmax-1.5 and gradients",
    ("memcheck", "replay"): "layouts or top-k and second_call",
    ("memcheck", "router"): "deepseek-v3 and float32",
}
NCU = "gpu__time_duration.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed,sm__inst_issued.avg.pct_of_peak_sustained_active,sm__warps_active.avg.pct_of_peak_sustained_active"  # noqa: E501
PROFILED = """
import torch, anymax
for shape in ((65536, 128), (4096, 8192), (4096, 128256)):
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    for f in (anymax.softmax, anymax.sparsemax, anymax.entmax15, lambda x: anymax.sparse_softmax(x, k=50)):
        f(x), f(x)
torch.cuda.synchronize()
"""


def check(args: argparse.Namespace) -> Iterator[Job]:
    """The tools of the CUDA toolkit, where they are installed."""

    def outside(words: list[str], told: str) -> dict[str, Any]:
        path = os.pathsep.join(sys.path)
        # torch's cache would hide a fault
        free = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if "sanitizer" in words[0] else {}
        done = subprocess.run(
            words, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **free, "PYTHONPATH": path}, check=False
        )
        print(done.stdout, done.stderr, flush=True)
        return {"ok": done.returncode == 0, "said": re.findall(told, done.stdout)[-40:]}

    sanitizer, ncu = shutil.which("compute-sanitizer"), shutil.which("ncu")
    summary = r"(?m)^=+ .*|.* passed.*|.*ERROR SUMMARY.*"
    pytest = [sys.executable, *"-m pytest -q -x -p no:cacheprovider".split()]
    for (tool, file), words in SANITIZED.items() if sanitizer else ():
        how = [str(sanitizer), *f"--tool {tool} --error-exitcode 9 --target-processes all".split()]
        command = [*how, *pytest, f"tests/kernels/{file}_triton.py", "-k", words]
        yield Job("check", f"{tool} {file} {words}", functools.partial(outside, command, summary), 200)
    if ncu:
        how = [ncu, *f"--clock-control none --csv --metrics {NCU} -k regex:_rows".split()]
        command = [*how, sys.executable, "-c", PROFILED]
        yield Job("check", "ncu", functools.partial(outside, command, r'(?m)^"\d+".*$'), 120)
    if args.dry:  # the crash that a dry run plants: the others go on
        yield Job("check", "crash", lambda: os.abort(), 10)


def parity(args: argparse.Namespace) -> Iterator[Job]:
    """The tests of every option, in pieces."""

    def collect() -> dict[str, Any]:
        import pytest

        ids: list[str] = []

        class Plugin:
            def pytest_collection_finish(self, session: Any) -> None:
                ids.extend(item.nodeid for item in session.items)

        files = [str(ROOT / "tests" / "kernels" / name) for name in SUITES]
        code = pytest.main(["-q", "--collect-only", "-p", "no:cacheprovider", f"--rootdir={ROOT}", *files], [Plugin()])
        return {"ok": int(code) == 0 and bool(ids), "tests": ids}

    def tests(ids: list[str]) -> dict[str, Any]:
        import pytest

        failed: dict[str, str] = {}
        count = {"passed": 0, "skipped": 0}

        class Plugin:
            def pytest_runtest_logreport(self, report: Any) -> None:
                if report.failed:
                    crash = getattr(report.longrepr, "reprcrash", None)
                    failed[report.nodeid] = str(crash.message if crash else report.longrepr).strip()[:400]
                elif report.when == "call" or report.skipped:
                    count[report.outcome] += 1

        # that machine's torch has warnings of its own
        words = ["-q", "-p", "no:cacheprovider", "-W", "default", f"--rootdir={ROOT}"]
        pytest.main([*words, *(str(ROOT / i) for i in ids)], [Plugin()])
        return {"ok": not failed and bool(count["passed"] + count["skipped"]), **count, "failed": failed}

    one = begin(Job("parity", "collect", collect, 120), args.folder / "log.txt")
    found = finish(one, False)
    groups: dict[str, list[str]] = {}
    for name in found.get("tests", ()):
        if re.search(args.only, name):
            groups.setdefault(name.split("[")[0], []).append(name)
    if not found["ok"]:
        print(f"# no tests were collected: see {args.folder / 'log.txt'}", flush=True)
    for name, ids in groups.items():
        pieces = [ids[i : i + PIECE] for i in range(0, len(ids), PIECE)]
        for number, piece in enumerate(pieces):
            label = f"{name} {number + 1}/{len(pieces)}" if len(pieces) > 1 else name
            yield Job("parity", label, lambda piece=piece: tests(piece), 300)


def called(folder: Path) -> dict[str, bool]:
    """Whether a plan could be called, by its name."""
    return {line["case"]: line["ok"] for line in lines_of(folder) if line["stage"] == "plans"}


def pack(folder: Path) -> None:
    """Pure wheels, unpacked: a folder for PYTHONPATH."""
    words = "-m pip install --quiet --no-deps --no-compile --target".split()
    subprocess.run([sys.executable, *words, str(folder), *WHEELS], check=True)


def machine() -> dict[str, Any]:
    """What a record of the benchmarks says of the machine, without a word to the device in this process."""
    from benchmarks import report

    known = report.facts(os.cpu_count() or 1)
    told = asked_of_the_device("name,driver_version,memory.total")
    name, driver, memory = (told.splitlines()[0].split(", ") if told else ("no GPU", "", ""))[:3]
    known["hardware"] |= {"host": known["hardware"]["cpu"], "cpu": name, "driver": driver, "gpu_memory": memory}
    return known


def state() -> str:
    """Clocks, power and temperature as they are."""
    return asked_of_the_device("clocks.sm,clocks.mem,power.draw,temperature.gpu")


def asked_of_the_device(what: str) -> str:
    """The answer of nvidia-smi, a line for each GPU; "" where there is none."""
    words = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    known = shutil.which(words[0])
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() if known else ""


def keep(folder: Path) -> None:
    """The readings of a folder as a record of the benchmarks, benchmarks/results/*.json, and the tables of all records anew."""
    from benchmarks import report

    known = json.loads((folder / "machine.json").read_text())
    rows = [report.Reading(**reading) for line in lines_of(folder) for reading in line.get("readings", ())]
    order = {group: i for i, group in enumerate(report.GROUPS)}
    print(report.save(known, sorted(rows, key=lambda r: order[r.group])), report.render())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stages", default=",".join(STAGES), help="of these, in this order: %(default)s")
    parser.add_argument("--only", default="", help="cases whose name matches this regular expression")
    parser.add_argument("--seconds", type=float, default=570, help="for all of it (default %(default)s)")
    parser.add_argument(
        "--budget", type=float, default=0.15, help="seconds of rounds for a case of bench (default %(default)s)"
    )
    parser.add_argument(
        "--cores", type=int, default=os.cpu_count() or 1, help="processes that compile at the same time"
    )
    parser.add_argument("--pack", action="store_true", help="put the wheels that such a machine lacks into the folder")
    parser.add_argument("--keep", action="store_true", help="write what the folder has measured to benchmarks/results")
    parser.add_argument("--dry", action="store_true", help="without a GPU: tiny shapes in Triton's interpreter")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.pack:
        pack(args.folder)
        return
    if args.keep:
        keep(args.folder)
        return
    # what a peer's tuning found in one process serves in the next
    os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if args.dry:
        os.environ["TRITON_INTERPRET"] = "1"
    stop = time.monotonic() + args.seconds
    import torch  # noqa: F401  (before the first fork)
    import triton

    import anymax.kernels.triton.attention
    import anymax.kernels.triton.launch  # noqa: F401
    from benchmarks.gpu_clock import DEVICE

    DEVICE.kind = "cpu" if args.dry else "cuda"
    known = machine()
    (args.folder / "machine.json").write_text(json.dumps(known))
    print(
        f"# {known['hardware']['cpu']}, torch {known['versions']['torch']}, Triton {triton.__version__}, {state()}",
        flush=True,
    )
    have = {(line["stage"], line["case"]) for line in lines_of(args.folder)}
    makers = {
        "smoke": smoke, "parity": parity, "bench": bench, "plans": lambda args: gpu_tune.compiled(args, table("")),
        "tune": lambda args: gpu_tune.tune(args, table(""), called(args.folder)), "check": check,
    }  # fmt: skip
    for stage in args.stages.split(","):
        jobs = [job for job in makers[stage](args) if (job.stage, job.name) not in have]
        before = time.monotonic()
        run(jobs, args.folder, 1 if stage in ONE_BY_ONE else args.cores, stop)
        print(f"# {stage}: {len(jobs)} cases in {time.monotonic() - before:.0f} s", flush=True)
    print(f"# {state()}", flush=True)


if __name__ == "__main__":
    main()
