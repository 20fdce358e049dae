"""The record of what the compiler made of every GPU kernel at its real plans, and the bars that it is held to.

`python -m tools.gpu_static --check` makes it, benchmarks/results/gpu-static.csv, and the page beside it, gpu-static.md;
tests/test_gpu_static.py holds it to the bars and to the sources. A row is a kernel as one launch has it compiled, for one target, by one
Triton; its key says of which source and which constants.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import hashlib
import importlib
import inspect
import itertools
import re
import time
import tokenize
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from tools.gpu_cases import Case, cases, launched
from tools.gpu_code import Figures, figures
from tools.gpu_launches import Launch, compiled, described
from tools.gpu_static import COLUMNS, ROOT, cells
from tools.gpu_static import lines as lines_of
from tools.gpu_static import tile as tile_of

RECORD = ROOT / "benchmarks" / "results" / "gpu-static.csv"
PAGE = RECORD.with_suffix(".md")
MAIN = "sm_90"  # the target that has all cases
TARGETS = (MAIN, "sm_80", "sm_100")  # of the newest Triton
OLDER = {"3.4": "the oldest that a supported torch brings", "3.6": "the one of most GPU images"}  # for MAIN alone


@dataclasses.dataclass(frozen=True)
class Row(Figures):
    triton: str
    key: str
    case: str  # the first that launches it
    mode: str
    plan: str
    vectors: int  # loads of 128 bits in which a thread can read its tile; 0: it has none that is aligned

    @property
    def name(self) -> str:
        """What exceptions are found by."""
        return f"{self.case} {self.kernel} {self.mode} {self.target} {self.triton}"


FIELDS = ("triton", "target", "key", "case", "kernel", "mode", "plan") + tuple(
    f.name for f in dataclasses.fields(Figures) if f.name not in ("kernel", "target")
) + ("vectors",)  # fmt: skip


# -- what a row is of ---------------------------------------------------------------------------------------------------------------


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


def vectors_of(launch: Launch) -> int:
    """See `Row.vectors`."""
    options = launch.options
    solves = (
        options.get("PARTS") and options.get("MODE") != "write" and launch.name.endswith("_rows")
    )  # a row from its parts
    if not {"K", "L"} <= set(options) or options.get("RAGGED") or solves or launch.name == "perturb_rows":
        return 0
    size = launch.args[0].element_size()
    bits = options.get("R", 1) * options["K"] * options["L"] * size * 8
    return max(1, bits // (128 * 32 * options["num_warps"])) * (2 if launch.name == "backward_rows" else 1)


@functools.lru_cache(maxsize=1)
def all_cases() -> dict[str, Case]:
    return {case.name: case for case in cases()}


@functools.lru_cache(maxsize=512)
def launches(name: str) -> tuple[Launch, ...]:
    return tuple(launched(all_cases()[name], MAIN))  # the same on every NVIDIA GPU


@functools.lru_cache(maxsize=2)
def wanted(everything: bool) -> dict[str, tuple[str, int]]:
    """Key -> (case, place of the launch in it)."""
    found: dict[str, tuple[str, int]] = {}
    for name, case in all_cases().items():
        if everything or case.everywhere:
            for place, launch in enumerate(launches(name)):
                found.setdefault(key_of(launch), (name, place))
    return found


def named(row: Row, case: str, place: int) -> Row:
    """The same row by the names that its first launch has now."""
    launch = launches(case)[place]
    mode = str(launch.options.get("MODE", ""))
    return dataclasses.replace(row, case=case, mode=mode, plan=tile_of(launch.options), vectors=vectors_of(launch))


def made_of(job: tuple[str, str, str, int]) -> Row | str:
    """The row of a job (target, key, case, place), or why there is none."""
    import warnings

    import triton

    target, key, name, place = job
    launch = launches(name)[place]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = figures(compiled(target, launch), target)
    except Exception as error:
        return f"{name} {launch.name} {target}: {type(error).__name__}: {str(error).strip()[:400]}"
    said = {f.name: getattr(found, f.name) for f in dataclasses.fields(Figures)}
    return named(Row(**said, triton=triton.__version__, key=key, case="", mode="", plan="", vectors=0), name, place)


# -- the record ---------------------------------------------------------------------------------------------------------------------


def load() -> list[Row]:
    if not RECORD.exists():
        return []
    kinds: dict[str, Any] = {f.name: int if f.type == "int" else str for f in dataclasses.fields(Row)}
    with RECORD.open(encoding="utf-8", newline="") as file:
        return [Row(**{name: kinds[name](value) for name, value in line.items()}) for line in csv.DictReader(file)]


def save(rows: Iterable[Row]) -> None:
    order = {key: i for i, key in enumerate(wanted(True))}
    targets = {target: i for i, target in enumerate(TARGETS)}
    place = lambda r: (version(r.triton), targets[r.target], order.get(r.key, len(order)))  # noqa: E731
    with RECORD.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        writer.writerows([getattr(row, name) for name in FIELDS] for row in sorted(rows, key=place))


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:3]))


def older(text: str) -> bool:
    """True for a Triton that compiles for one target alone."""
    return ".".join(text.split(".")[:2]) in OLDER


def expected(rows: Iterable[Row]) -> dict[tuple[str, str], set[str]]:
    """The keys that the record has to have of each (Triton, target) that is in it."""
    out = {}
    for text in {row.triton for row in rows}:
        for target in (MAIN,) if older(text) else TARGETS:
            out[text, target] = set(wanted(target == MAIN and not older(text)))
    return out


def stale(rows: list[Row]) -> list[str]:
    """What of the record is not of these sources."""
    have: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        have.setdefault((row.triton, row.target), set()).add(row.key)
    out = []
    for (text, target), keys in sorted(expected(rows).items()):
        found = have.get((text, target), set())
        if found != keys:
            missing, other = len(keys - found), len(found - keys)
            out.append(f"Triton {text}, {target}: {missing} kernels are missing, {other} are of other sources")
    said = {".".join(row.triton.split(".")[:2]) for row in rows}
    out += [f"Triton {text}, {why}, is missing" for text, why in OLDER.items() if text not in said]
    return out if said - set(OLDER) else [*out, "the newest Triton is missing"]


# -- the bars -----------------------------------------------------------------------------------------------------------------------


class Leave(NamedTuple):
    """What some kernels are allowed, and why; a row takes the first that its name matches for each of the four."""

    name: str  # a regular expression
    why: str
    stack: int | None = None  # bytes of a thread, at most
    programs: int | None = None  # of a multiprocessor, at least
    fp64: int | None = None  # instructions within loops over tiles, at most
    narrow: bool | None = None  # its tile need not be read in loads of 128 bits


BARS = {"stack": 0, "programs": 2, "fp64": 0, "narrow": False}
LONG = r"^(forward|backward|loss)/.*x(32768|50257|128256|1000000) "
LEAVE: tuple[Leave, ...] = (
    Leave(
        r"^(ragged/.* up to 40000 |layer/|attention/).* 3\.[46]\.\d+$",
        "what older compilers keep in memory where the newest does not",
        stack=416,
        fp64=128,
    ),
    # the plans are those of an H100; what other targets keep in memory with them
    Leave(r"^(attention|decoding)/.* sm_(80|100) ", "tiles that are planned for an H100", stack=536, fp64=11),
    Leave(r"layer_(sums|candidates) .*sm_(80|100) ", "a tile that is planned for an H100", stack=272),
    Leave(r"^backward/sparsemax 4096x8192 .* sm_80 ", "more registers than an H100 takes", programs=1),
    # tiles of products
    Leave(r"layer_candidates ", "the lists of a tile beside its scores", stack=24),
    Leave(r"^attention/.* d128 ", "128 features of queries and keys beside the scores", stack=80),
    Leave(r"^decoding/.* d128 .*sm_90 3\.7", "two registers more than fit, by Triton 3.7 alone", stack=8),
    Leave(
        r"^(attention|decoding)/entmax 1\.3 ",
        "a power for each score, and the sum over parts in fp64",
        stack=72,
        fp64=10,
    ),
    # more than two programs, as the plan has it
    Leave(
        r"^attention/(entmax15|sparsemax) d64 attention_(forward|keys) ",
        "what 168 registers leave out, the most with which three programs fit",
        stack=64,
        programs=3,
    ),
    # rows
    Leave(
        r" 32x1000000 .* (separable|truncated|dense)_rows (p|loss) ",
        "one program solves a row from all lanes of its parts",
        stack=3500,
        programs=1,
    ),
    Leave(r" 32x1000000 .*_rows write ", "a part of 512 lanes is two scores a thread", narrow=True),
    Leave(LONG, "16 warps, or 8 that hold the row, are one program", programs=1),
    Leave(LONG, "what 32,768 classes take of a thread's registers; sums over steps in fp64", stack=288, fp64=80),
    Leave(
        r"/(entmax (1\.7|3)|top-p|normmax) 4096x8192 ",
        "a power or a mass for each of the 32 scores of a thread",
        programs=1,
    ),
    Leave(r"perturb_rows", "a sum over the nodes, in fp64", stack=16, fp64=80),
    Leave(r"^ragged/.* up to (16384|40000) ", "each score has an address of its own", stack=96, programs=1, fp64=32),
    # tiles of products
    Leave(r"layer_(sums|slopes|candidates) ", "a tile of 128 x 128 scores fills a processor", programs=1),
    Leave(r"attention_solve ", "one query's threshold by 16 warps; there are few queries", programs=1),
    Leave(r"attention_merge ", "a sum over parts, of which there are few, in fp64", fp64=11),
)


def leave(row: Row) -> dict[str, tuple[Any, Leave | None]]:
    """What the row may have of each figure, and which exception says so."""
    allowed: dict[str, tuple[Any, Leave | None]] = {name: (bar, None) for name, bar in BARS.items()}
    for one in LEAVE:
        if re.search(one.name, row.name):
            for field, (_, by) in allowed.items():
                if by is None and getattr(one, field) is not None:
                    allowed[field] = (getattr(one, field), one)
    return allowed


def faults(row: Row) -> list[str]:
    """The bars that a kernel misses."""
    may = {field: value for field, (value, _) in leave(row).items()}
    said = []
    if row.stack > may["stack"]:
        said.append(f"{row.stack} bytes of a thread do not fit its registers (allowed: {may['stack']})")
    if row.per_processor < may["programs"]:
        said.append(f"a multiprocessor holds {row.per_processor} programs (at least: {may['programs']})")
    if row.fp64_in_loops > may["fp64"]:
        said.append(f"{row.fp64_in_loops} fp64 instructions in loops over tiles (allowed: {may['fp64']})")
    if row.wide_loads < row.vectors and not may["narrow"]:
        said.append(f"{row.wide_loads} loads of 128 bits (at least: {row.vectors})")
    return [f"{row.name} [{row.plan}]: {words}" for words in said]


def unused(rows: Iterable[Row]) -> list[Leave]:
    """Exceptions that no row needs."""
    needed = set()
    for row in rows:
        may = leave(row)
        bare = {
            "stack": row.stack > 0, "programs": row.per_processor < 2 or (may["programs"][0] > 2), "fp64": row.fp64_in_loops > 0,
            "narrow": row.wide_loads < row.vectors,
        }  # fmt: skip
        needed |= {by.name for field, (_, by) in may.items() if by is not None and bare[field]}
    return [one for one in LEAVE if one.name not in needed]


# -- the page -----------------------------------------------------------------------------------------------------------------------


HOLDS = (lambda r: r.stack == 0, lambda r: r.per_processor > 1, lambda r: not r.fp64_in_loops)


def page(rows: list[Row]) -> Iterator[str]:
    newest = max((row.triton for row in rows), key=version)
    yield "# The GPU kernels by the compiler's figures\n"
    yield "Made by `python -m tools.gpu_static --check`.\n"
    yield "| Triton | target | kernels | stack 0 | two programs and more a multiprocessor | no fp64 in loops over tiles |"
    yield "|---|---|---|---|---|---|"
    for text, target in sorted(expected(rows), key=lambda pair: (version(pair[0]), TARGETS.index(pair[1]))):
        own = [row for row in rows if (row.triton, row.target) == (text, target)]
        stack, programs, fp64 = (sum(map(holds, own)) for holds in HOLDS)
        yield f"| {text} | {target} | {len(own)} | {stack} | {programs} | {fp64} |"
    yield "\n## Exceptions\n"
    yield "A kernel that is not named here has stack 0, two programs a multiprocessor and no fp64 in loops over tiles, and reads aligned rows in loads of 128 bits.\n"  # noqa: E501
    yield "| kernels | stack B | programs | fp64 | why |\n|---|---|---|---|---|"
    for one in LEAVE:
        numbers = ("" if n is None else str(n) for n in (one.stack, one.programs, one.fp64))
        pattern = one.name.replace("|", "\\|")
        yield f"| `{pattern}` | {' | '.join(numbers)} | {one.why}{'; narrow loads' * bool(one.narrow)} |"
    yield f"\n## {MAIN}, Triton {newest}\n"
    yield cells(*COLUMNS)
    yield "|" + "---|" * len(COLUMNS)
    of = {row.key: row for row in rows if (row.triton, row.target) == (newest, MAIN)}
    for name, case in all_cases().items():
        yield from lines_of(case, [(launch, of[key_of(launch)]) for launch in launches(name)])


# -- all of it ----------------------------------------------------------------------------------------------------------------------


def check(pool: Any, only: str = "") -> int:
    """Compiles what the record lacks of the Triton at hand, writes it and the page, and tells what misses a bar. `only`: a regular
    expression for the names of the cases that are compiled."""
    import triton

    text, start, rows = triton.__version__, time.monotonic(), load()
    newest = max((row.triton for row in rows), key=version, default=text)
    if not older(text) and version(text) < version(newest):
        print(f"the record is of Triton {newest}, {' and '.join(OLDER)}; this is Triton {text}")
        return 2
    targets = (MAIN,) if older(text) else TARGETS
    rows = [r for r in rows if older(r.triton) or older(text) or r.triton == text]
    have = {(r.triton, r.target, r.key) for r in rows}
    now = {target: wanted(target == MAIN and not older(text)) for target in targets}
    rows = [r for r in rows if r.triton != text or r.key in now[r.target]]
    rows = [named(r, *wanted(True)[r.key]) if r.key in wanted(True) else r for r in rows]
    jobs = [
        (target, key, *at)
        for target in targets
        for key, at in now[target].items()
        if (text, target, key) not in have and re.search(only, at[0])
    ]
    wrong = []
    for number, row in enumerate(pool.imap(made_of, jobs), 1):
        if isinstance(row, str):
            wrong.append(row)
            print(row, flush=True)
        else:
            rows.append(row)
            for line in faults(row):
                print(line, flush=True)
        if number % 20 == 0:
            save(rows)
            print(f"# {number} of {len(jobs)} in {time.monotonic() - start:.0f} s", flush=True)
    save(rows)
    print(f"# Triton {text}: {len(jobs)} kernels compiled in {time.monotonic() - start:.0f} s", flush=True)
    if not wrong and not (stale_ones := stale(rows)):
        PAGE.write_text("\n".join([*page(load()), ""]), encoding="utf-8")
    elif not wrong:
        print("# the page is written when all of the record is of these sources:", *stale_ones, sep="\n# ")
    for one in unused(rows):
        print(f"# no kernel needs this exception any more: {one.name}")
    missed = sum(len(faults(row)) for row in rows)
    print(f"# {len(wrong)} kernels do not compile, {missed} bars are missed")
    return 1 if wrong or missed else 0
