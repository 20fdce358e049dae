"""What the compiler says of the GPU kernels: registers, stack, spills, shared memory, instructions; no GPU is needed.

    python -m tools.gpu_static --only entmax15 --target sm_80    a table of what these cases launch; nothing is written
    python -m tools.gpu_static --check                           every kernel at its real plans for sm_90: benchmarks/results/gpu-static.csv
                                                                 is brought up to date; the exit status is 1 where a bar is missed
    python -m tools.gpu_static --check --triton FOLDER           the same by the Triton of this folder before
                                                                 (pip install --no-deps --target FOLDER triton==3.4.0)

A launch is recorded in the place of its kernel and compiled ahead of time with what the runtime would have told the compiler. A kernel that
the record has, of the same source and the same launch, is not compiled again. `tests/project/test_gpu_static.py` holds the record to the
bars and to the sources.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import hashlib
import importlib
import inspect
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
import tokenize
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tools.gpu_cases import Case, cases, launched
from tools.gpu_launches import Launch, compiled, described

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks" / "results" / "gpu-static.csv"
MAIN = "sm_90"  # the target of the record
OLDEST = "3.4"  # the oldest Triton that a supported torch brings: it compiles the cases that are for every Triton
SHARED = {"sm_80": 164, "sm_90": 228, "sm_100": 228}  # KiB of a multiprocessor


# -- the figures of a kernel ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Row:
    """A kernel as one launch has it compiled, for one target and by one Triton."""

    triton: str
    target: str
    key: str  # of its source and of what the compiler is told
    case: str  # the first that launches it
    kernel: str
    mode: str
    plan: str
    warps: int
    registers: int
    stack: int  # bytes of a thread that do not fit its registers
    spills: int  # instructions that read or write them
    shared: int  # bytes of a program
    barriers: int
    instructions: int
    wide_loads: int  # of 128 bits and more
    loads: int

    @property
    def name(self) -> str:
        """What exceptions are found by."""
        return f"{self.case} {self.kernel} {self.mode} {self.triton}"

    @property
    def programs(self) -> int:
        """Programs that fit a multiprocessor at the same time."""
        granted = -(-max(self.registers, 1) * 32 // 256) * 256 * self.warps
        by_shared = SHARED[self.target] * 1024 // (self.shared + 1024)
        return max(1, min(65536 // granted, by_shared, 64 // self.warps, 32))


FIELDS = tuple(f.name for f in dataclasses.fields(Row))


def instructions(text: str) -> list[str]:
    """Those of a kernel, of what nvdisasm prints, without the padding at its end."""
    code = [
        line.split("*/", 1)[1].strip()
        for line in map(str.strip, text.splitlines())
        if re.match(r"/\*[0-9a-f]+\*/", line)
    ]
    while code and code[-1].startswith(("NOP", "BRA")):
        code.pop()
    return code


def figures(made: Any) -> dict[str, int]:
    """Of a kernel compiled for an NVIDIA target."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(made.asm["cubin"])

        def tool(path: str, *words: str) -> str:
            return subprocess.run([path, *words, str(cubin)], capture_output=True, text=True, check=True).stdout

        usage = tool(knobs.nvidia.cuobjdump.path, "-res-usage")
        # without an analysis that nothing of this needs
        code = instructions(tool(knobs.nvidia.nvdisasm.path, "-c", "-ndf"))

    def used(name: str) -> int:
        return int(re.search(rf"{name}:(\d+)", usage)[1])  # type: ignore[index]

    def count(pattern: str) -> int:
        return sum(bool(re.search(pattern, line)) for line in code)

    return {
        "warps": made.metadata.num_warps, "registers": used("REG"), "stack": used("STACK"), "spills": count(r"\b(LDL|STL)\b"),
        "shared": made.metadata.shared, "barriers": count(r"\bBAR\."), "instructions": len(code),
        "wide_loads": count(r"\bLDG\S*\.(128|256)"), "loads": count(r"\bLDG"),
    }  # fmt: skip


def tile(options: dict[str, Any]) -> str:
    """Of rows (R, K, L), or of attention."""
    if "TILE" in options:
        return ", ".join(map(str, options["TILE"][-4:-1]))
    return f"{options['M']} x {options['N']}" if "M" in options and "N" in options else ""


@functools.lru_cache(maxsize=64)
def words(module: str) -> str:
    """The source of a module of kernels and of those that it imports from its package, without comments, docstrings and line breaks."""
    with tokenize.open(inspect.getfile(importlib.import_module(module))) as file:
        tokens = [t for t in tokenize.generate_tokens(file.readline) if t.type not in (tokenize.COMMENT, tokenize.NL)]
    ends = {tokenize.NEWLINE: ";", tokenize.INDENT: "{", tokenize.DEDENT: "}"}
    found, before, skip = [], tokenize.NEWLINE, False
    for token, following in itertools.pairwise(tokens):
        if token.type == tokenize.STRING and before in ends and following.type == tokenize.NEWLINE:
            skip = True  # a docstring, to the end of its line
        elif skip:
            skip = False
        else:
            found.append(ends.get(token.type, token.string))
            before = token.type
    text = " ".join(found)
    package = module.rpartition(".")[0]
    others = [words(f"{package}.{name}") for name in sorted(set(re.findall(r"from \. (\w+) import", text)))]
    return text + "".join(others)


def key_of(launch: Launch) -> str:
    """The same for the same kernel, by its source and by what the compiler is told."""
    said = f"{launch.name} {described(launch)} {words(launch.kernel.fn.__module__)}"
    return hashlib.sha256(said.encode()).hexdigest()[:12]


@functools.lru_cache(maxsize=1)
def all_cases() -> dict[str, Case]:
    return {case.name: case for case in cases()}


@functools.lru_cache(maxsize=512)
def launches(name: str) -> tuple[Launch, ...]:
    return tuple(launched(all_cases()[name], MAIN))  # the same on every NVIDIA GPU


def made_of(job: tuple[str, str, int]) -> Row | str:
    """The row of a job (target, case, place of the launch in it), or why there is none."""
    import warnings

    import triton

    target, name, place = job
    launch = launches(name)[place]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = figures(compiled(target, launch))
    except Exception as error:
        return f"{name} {launch.name} {target}: {type(error).__name__}: {str(error).strip()[:400]}"
    mode, key = str(launch.options.get("MODE", "")), key_of(launch)
    return Row(triton.__version__, target, key, name, launch.name, mode, tile(launch.options), **found)


# -- the bars ---------------------------------------------------------------------------------------------------------------------------


class Leave(NamedTuple):
    """The bytes of stack that some kernels may have, and why. No other kernel may have any, nor a spill."""

    name: str  # a regular expression
    stack: int
    why: str


LEAVE: tuple[Leave, ...] = (
    Leave(
        r" (32x1000000|16x128256) .* (separable|truncated)_rows p ",
        176,
        "one program solves a row from all lanes of its parts",
    ),
    Leave(
        r"/top-p 4096x128256 .* 3\.4\.", 136, "three pivots a pass, of which the oldest compiler keeps a part in memory"
    ),
    Leave(r" 4096x128256 .* (separable|truncated)_rows (p|loss) ", 64, "16 warps have 128 registers a thread"),
    Leave(r"/top-p 4096x8192 ", 64, "two rows in 128 registers a thread: 2.7 times as fast on an H200 as one"),
    Leave(r"^ragged/.* up to 40000 ", 48, "each score has an address of its own"),
    Leave(r"^attention/(entmax15|sparsemax) d64 ", 64, "168 registers are the most with which three programs fit"),
    Leave(r"^attention/entmax15 d128 ", 80, "128 features of queries and keys beside the scores"),
)


def allowed(row: Row) -> Leave | None:
    """The first exception that names the kernel."""
    return next((one for one in LEAVE if re.search(one.name, row.name)), None)


def fault(row: Row) -> str | None:
    """The bar that a kernel misses."""
    by = allowed(row)
    most = by.stack if by else 0
    if row.stack <= most and (by or not row.spills):
        return None
    return f"{row.name} [{row.plan}]: {row.stack} bytes of stack (allowed: {most}), {row.spills} spills"


def unused(rows: Iterable[Row]) -> list[Leave]:
    """Exceptions that no kernel needs."""
    needed = {by.name for row in rows if (row.stack or row.spills) and (by := allowed(row))}
    return [one for one in LEAVE if one.name not in needed]


# -- the record -------------------------------------------------------------------------------------------------------------------------


def load() -> list[Row]:
    if not RECORD.exists():
        return []
    kinds: dict[str, Any] = {f.name: int if f.type == "int" else str for f in dataclasses.fields(Row)}
    with RECORD.open(encoding="utf-8", newline="") as file:
        return [Row(**{name: kinds[name](value) for name, value in line.items()}) for line in csv.DictReader(file)]


def save(rows: Iterable[Row]) -> None:
    order = {name: i for i, name in enumerate(all_cases())}
    place = lambda r: (version(r.triton), order.get(r.case, len(order)), r.kernel, r.mode)  # noqa: E731
    with RECORD.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        writer.writerows(dataclasses.astuple(row) for row in sorted(rows, key=place))


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:3]))


def oldest(text: str) -> bool:
    return text.startswith(f"{OLDEST}.")


@functools.lru_cache(maxsize=2)
def wanted(everything: bool) -> dict[str, tuple[str, int]]:
    """Key -> (case, place of the launch in it): of all cases, or of those for every Triton."""
    found: dict[str, tuple[str, int]] = {}
    for name, case in all_cases().items():
        if everything or case.everywhere:
            for place, launch in enumerate(launches(name)):
                found.setdefault(key_of(launch), (name, place))
    return found


def stale(rows: list[Row]) -> list[str]:
    """What of the record is not of these sources."""
    found: dict[str, set[str]] = {}
    for row in rows:
        found.setdefault(row.triton, set()).add(row.key)
    out = [
        f"Triton {text}: {len(keys - have)} kernels are missing, {len(have - keys)} are of other sources"
        for text, have in sorted(found.items())
        if have != (keys := set(wanted(not oldest(text))))
    ]
    old = {oldest(text) for text in found}
    return out + [
        f"the {said} Triton is missing" for is_old, said in ((True, "oldest"), (False, "newest")) if is_old not in old
    ]


def check(pool: Any, only: str = "") -> int:
    """Compiles what the record lacks of the Triton at hand, writes it, and tells what misses a bar. `only`: a regular expression for the
    names of the cases that are compiled. A record has the oldest Triton and one other."""
    import triton

    text, start, now = triton.__version__, time.monotonic(), wanted(not oldest(triton.__version__))
    others = [row for row in load() if oldest(row.triton) != oldest(text)]
    rows = [row for row in load() if row.triton == text and row.key in now]
    have = {row.key for row in rows}
    jobs = [(MAIN, *at) for key, at in now.items() if key not in have and re.search(only, at[0])]
    wrong = 0
    for number, row in enumerate(pool.imap(made_of, jobs), 1):
        if isinstance(row, str):
            wrong += 1
            print(row, flush=True)
        else:
            rows.append(row)
        if number % 10 == 0:
            save([*others, *rows])
            print(f"# {number} of {len(jobs)} in {time.monotonic() - start:.0f} s", flush=True)
    save([*others, *rows])
    missed = [said for row in [*others, *rows] if (said := fault(row))]
    print(*missed, *(f"# {line}" for line in stale([*others, *rows])), sep="\n")
    print(*(f"# no kernel needs this exception any more: {one.name}" for one in unused([*others, *rows])), sep="\n")
    print(f"# Triton {text}: {len(jobs)} kernels compiled, {wrong} are refused, {len(missed)} bars are missed")
    return 1 if wrong or missed else 0


# -- the command line -------------------------------------------------------------------------------------------------------------------

COLUMNS = (
    "case",
    "kernel",
    "mode",
    "plan",
    "warps",
    "registers",
    "stack",
    "spills",
    "shared",
    "barriers",
    "instructions",
)


def cells(*values: Any) -> str:
    return f"| {' | '.join(map(str, values))} |"


def table(pool: Any, only: str, targets: Iterable[str]) -> None:
    print(cells(*COLUMNS, "loads 128 / all", "programs"), cells(*["---"] * (len(COLUMNS) + 2)), sep="\n", flush=True)
    names = [name for name in all_cases() if re.search(only, name)]
    for row in pool.imap(
        made_of, [(t, name, i) for t in targets for name in names for i in range(len(launches(name)))]
    ):
        if isinstance(row, str):
            print(row, flush=True)
        else:
            of = (getattr(row, name) for name in COLUMNS)
            print(cells(*of, f"{row.wide_loads} / {row.loads}", row.programs), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name matches this regular expression")
    parser.add_argument("--target", default=MAIN)
    parser.add_argument("--check", action="store_true", help="bring the record up to date and hold it to the bars")
    parser.add_argument("--triton", metavar="FOLDER", nargs="*", default=[], help="where other Tritons are installed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    import multiprocessing

    status = 0
    for folder in args.triton:  # Triton is loaded once in a process
        command = [sys.executable, "-m", "tools.gpu_static", "--check", "--jobs", str(args.jobs), "--only", args.only]
        path = os.pathsep.join([os.path.abspath(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        status |= subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, check=False).returncode
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
            if args.check:
                return check(pool, args.only) | status
            table(pool, args.only, args.target.split(","))
    return status


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "src")]
    sys.exit(main())
