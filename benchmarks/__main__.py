"""`python -m benchmarks`: measure, print, save. `python -m benchmarks --help` has the options."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cases import Case
    from .report import Reading

_QUICK_SIZE = 4_200_000  # scores
_APART = "jax"  # this group has a process of its own: the threads of two frameworks disturb each other
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "ANYMAX_NUM_THREADS")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="shapes of up to 4 million scores, and a short look at each"
    )
    parser.add_argument("--full", action="store_true", help="also the cases that take minutes")
    parser.add_argument(
        "--only", action="append", metavar="PATTERN", help="cases whose group/name matches (regular expression)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="which table of cases (default cpu)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads, for all libraries (default: theirs)")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="time for the rounds of one case")
    parser.add_argument("--wait", type=float, default=10.0, metavar="SECONDS",
                        help="after a disturbed case, wait up to so long for a quiet machine (default 10)")  # fmt: skip
    parser.add_argument("--save", action=argparse.BooleanOptionalAction, default=None,
                        help="write benchmarks/results/*.json (default: of a whole run)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON, and the table to standard error")
    parser.add_argument("--list", action="store_true", help="list the cases and their bars, measure nothing")
    parser.add_argument(
        "--render", action="store_true", help="write benchmarks/results/README.md anew, measure nothing"
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 where a bar is missed or a result is wrong")
    parser.add_argument(
        "--growth", action="store_true", help="how time and memory of each verb grow, in processes of their own"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--growth-child", help=argparse.SUPPRESS)
    return parser.parse_args()


def set_environment(threads: int | None) -> None:
    """Start again with the variables that must be there before torch is loaded."""
    wanted = dict.fromkeys(_THREADS, str(threads)) if threads else {}
    if sys.platform == "linux":
        wanted["THP_MEM_ALLOC_ENABLE"] = os.environ.get("THP_MEM_ALLOC_ENABLE", "1")
    if any(os.environ.get(key) != value for key, value in wanted.items()):
        if sys.platform == "linux":
            os.execve(sys.executable, sys.orig_argv, {**os.environ, **wanted})
        os.environ.update(wanted)  # nothing is loaded yet: good enough elsewhere


def select(args: argparse.Namespace) -> list[Case]:
    if args.device == "cuda":
        from .gpu import table
    else:
        from .table import table
    cases = table()
    if args.quick:
        cases = [c for c in cases if c.size <= _QUICK_SIZE]
    if not args.full:
        cases = [c for c in cases if not c.full]
    if args.only:
        cases = [c for c in cases if any(re.search(pattern, c.key, re.IGNORECASE) for pattern in args.only)]
    return cases


def missing(case: Case) -> str | None:
    absent = [name for name in case.needs if importlib.util.find_spec(name) is None]
    return f"{', '.join(absent)} not installed: pip install {' '.join(absent)}" if absent else None


def run_case(case: Case, plan: Any) -> list[Reading]:
    """Set up, check, time. What goes wrong is a line of the table, not a crash."""
    if case.group.startswith("gpu"):
        from .gpu_clock import DEVICE, measure

        place = DEVICE.own_stream
    else:
        from .measure import measure

        place = contextlib.nullcontext
    from .report import readings, without_time

    absent = missing(case)
    if absent:
        return without_time(case, "skipped", absent)
    try:
        with place():
            work = case.setup(case)
            wrong = work.check()
            if wrong:
                return without_time(case, "wrong", f"differs from the reference ({work.engine}): {wrong}")
            return readings(case, work, measure(work.contenders, plan, work.context))
    except Exception as error:
        return without_time(case, "error", f"{type(error).__name__}: {error}".splitlines()[0][:200])


def run_apart(cases: list[Case], args: argparse.Namespace) -> Any:
    """The readings of these cases, one after the other, from a process of their own."""
    import json

    from .report import Reading, without_time

    words = ["--child", *(w for case in cases for w in ("--only", f"^{re.escape(case.key)}$"))]
    words += ["--full"] * args.full + ["--quick"] * args.quick
    words += ["--budget", str(args.budget)] if args.budget else []
    words += ["--threads", str(args.threads)] if args.threads else []
    command = [sys.executable, "-m", "benchmarks", *words, "--wait", str(args.wait)]
    left = {case.name: case for case in cases}
    environment = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", **os.environ}  # huge pages, as in the other groups
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        for line in child.stdout:
            reading = Reading(**json.loads(line))
            left.pop(reading.name, None)
            yield reading
    for case in left.values():
        yield from without_time(case, "error", f"its process ended with {child.returncode}")


def run(cases: list[Case], args: argparse.Namespace) -> Any:
    """The readings of the cases, as they come."""
    from .measure import Plan, others

    plan = Plan(budget=0.15, sample=0.001, least=3) if args.quick else Plan()
    if args.device == "cuda":
        plan = Plan(budget=0.3, sample=0.002, least=7)
    plan = dataclasses.replace(plan, budget=args.budget or plan.budget)
    if args.child:  # the threads of XLA wait for one another: waiting tells nothing
        plan = dataclasses.replace(plan, lost=None)
    apart = [] if args.child else [c for c in cases if c.group == _APART and not missing(c)]
    for case in cases:
        if case in apart:
            if case is apart[0]:
                yield from run_apart(apart, args)
            continue
        rows = run_case(case, plan)
        yield from rows
        if args.device == "cpu" and any(r.noisy or r.dropped > r.rounds for r in rows):
            give_up = time.monotonic() + args.wait
            while time.monotonic() < give_up and others() > 0.2:
                pass


def child(args: argparse.Namespace) -> None:
    """The process of one group: a line of JSON for each reading."""
    import json

    if args.threads and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    for reading in run(select(args), args):
        print(json.dumps(dataclasses.asdict(reading)), flush=True)


def grow(args: argparse.Namespace) -> int:
    """Measure how time and memory grow; a whole run is saved."""
    from . import growth, report

    with contextlib.suppress(ImportError):
        import torch  # noqa: F401  (its threads and instruction set are in the header)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    known = report.facts(args.threads or usable)
    print(report.header(known), f"\n\n{'verb':48s} slope {'time / the peer':26s} memory", sep="", flush=True)
    rows = []
    for of_verb in growth.run(args.only or [], args.budget or (0.2 if args.quick else 1.0), args.quick):
        rows += of_verb
        if of_verb:
            print(growth.line(of_verb), flush=True)
    whole = not (args.quick or args.only or args.budget)
    if rows and (whole if args.save is None else args.save):
        print(f"saved to {growth.save(known, rows)}")
    return 0


def main() -> int:
    args = arguments()
    if args.render:
        from .report import render

        print(render())
        return 0
    set_environment(args.threads)
    if args.child:
        child(args)
        return 0
    if args.growth_child:
        from .growth import child as growth_child

        growth_child(args.growth_child)
        return 0
    if args.growth:
        return grow(args)
    from . import report
    from .measure import stolen

    cases = select(args)
    if args.list:
        for case in cases:
            bars = "; ".join(f"{report.show_bar(b.at_most, b.at_least) or 'figure'} {b.peer}" for b in case.bars)
            print(f"{case.key:58} {bars}")
        return 0
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401  (its threads and instruction set are in the header)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    known = report.facts(args.threads or usable)
    say = (
        (lambda *words: print(*words, file=sys.stderr, flush=True)) if args.json else (lambda *w: print(*w, flush=True))
    )
    say(report.header(known))
    start, ticks = time.monotonic(), stolen()
    rows: list[Reading] = []
    complete = True
    group = ""
    try:
        for reading in run(cases, args):
            if reading.group != group:
                group = reading.group
                say(report.titles(group))
            rows.append(reading)
            say(report.line(reading))
    except KeyboardInterrupt:
        complete = False
        say("\ninterrupted")
    known["seconds"] = round(time.monotonic() - start)
    known["stolen_ticks"] = stolen() - ticks
    say(report.summary(rows))
    if args.json:
        print(report.as_json(known, rows))
    whole = not (args.quick or args.only or args.budget) and complete
    if rows and (whole if args.save is None else args.save):
        part = "-".join(["cuda"] * (args.device == "cuda") + ["quick"] * args.quick + (args.only or []))
        say(f"saved to {report.save(known, rows, part)}; `python -m benchmarks --render` writes the Markdown")
    failed = any(r.verdict in ("miss", "wrong", "error") for r in rows)
    return 1 if args.strict and failed else 0


if __name__ == "__main__":
    sys.exit(main())
