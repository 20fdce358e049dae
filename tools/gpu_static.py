"""What the compiler says of the GPU kernels: registers, stack, shared memory, barriers, instructions; no GPU is needed.

    python -m tools.gpu_static --only entmax15 --target sm_80,sm_100    a table of what these cases launch; nothing is written
    python -m tools.gpu_static --check                                  every kernel at its real plans, for all targets: the record in
                                                                        benchmarks/results/gpu-static.csv is brought up to date, with the
                                                                        page beside it; the exit status is 1 where a bar is missed
    python -m tools.gpu_static --check --triton FOLDER FOLDER           the same, and for sm_90 with the Tritons of these folders as
                                                                        well (pip install --no-deps --target FOLDER triton==3.4.0)

A launch is recorded in the place of the kernel and compiled ahead of time with what the runtime would have given the compiler; what the
record has of the same launch and the same source of its kernel is not compiled again.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.gpu_cases import Case, cases, launched
from tools.gpu_code import Figures, figures
from tools.gpu_launches import Launch, compiled

ROOT = Path(__file__).resolve().parent.parent

COLUMNS = (
    "case", "kernel", "plan [R, K, L]", "warps", "registers", "stack B", "shared", "barriers", "instructions", "fp64 in loops",
    "loads 128 / all", "programs",
)  # fmt: skip


def read(case: Case, target: str) -> list[tuple[Launch, Figures]]:
    """The kernels that a case launches, compiled."""
    return [(launch, figures(compiled(target, launch), target)) for launch in launched(case, target)]


def cells(*values: Any) -> str:
    return f"| {' | '.join(map(str, values))} |" + " |" * (len(COLUMNS) - len(values))


def tile(options: dict[str, Any]) -> str:
    """Of rows, of rows cut in parts, or of attention."""
    for names, between in ((("R", "K", "L"), ", "), (("K", "L"), ", "), (("M", "N"), " x ")):
        if all(name in options for name in names):
            return between.join(str(options[name]) for name in names)
    return ""


def lines(case: Case, found: Sequence[tuple[Launch, Any]]) -> list[str]:
    """Rows of the table; `found`: of each launch its `Figures`, or a row of the record."""
    out = []
    for launch, f in found:
        kernel = f"{launch.name} {launch.options.get('MODE', '')}".strip()
        out.append(
            cells(
                case.name, kernel, tile(launch.options), f.warps, f.registers, f.stack, f.shared, f.barriers, f.instructions,
                f.fp64_in_loops, f"{f.wide_loads} / {f.loads}", f.per_processor,
            )
        )  # fmt: skip
    return out


def _in_process(job: tuple[str, str]) -> list[str]:
    name, target = job
    case = next(c for c in cases() if c.name == name)
    try:
        return lines(case, read(case, target))
    except Exception as error:
        return [cells(name, f"**{type(error).__name__}: {str(error).splitlines()[0][:120]}**")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name matches this regular expression")
    parser.add_argument("--target", default="sm_90")
    parser.add_argument("--check", action="store_true", help="bring the record up to date and hold it to the bars")
    parser.add_argument("--triton", metavar="FOLDER", nargs="*", default=[], help="where other Tritons are installed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    import multiprocessing

    others = 0
    for folder in args.triton:  # Triton is loaded once in a process
        words = [sys.executable, "-m", "tools.gpu_static", "--check", "--jobs", str(args.jobs), "--only", args.only]
        path = os.pathsep.join([os.path.abspath(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        others |= subprocess.run(words, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, check=False).returncode

    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
            if args.check:
                from tools import gpu_record

                return gpu_record.check(pool, args.only) | others
            print("\n".join([cells(*COLUMNS), "|" + "---|" * len(COLUMNS)]), flush=True)
            jobs = [(c.name, t) for t in args.target.split(",") for c in cases() if re.search(args.only, c.name)]
            for block in pool.imap(_in_process, jobs):
                print("\n".join(block), flush=True)
    return 0


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "src")]
    sys.exit(main())
