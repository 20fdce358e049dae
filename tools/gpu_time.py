"""How long the GPU kernels take, by a model: what the compiler made of each line of a kernel, times how often that line runs.

    python -m tools.gpu_time                    the record benchmarks/results/gpu-times.csv is brought up to date, with the page beside
                                                it, which has the measured times that there are as well; half an hour of one core
    python -m tools.gpu_time --only attention   these cases alone

How often a line runs is counted in Triton's interpreter, on the scores that the benchmarks have: turns of solvers, blocks left out,
tiles that a mask cuts. Of rows and output layers a few programs are counted, of attention all of one head. What a line costs stands in
the listing of its instructions, which says of each from which line it came. A multiprocessor issues four instructions a cycle, one for
each of its schedulers, takes eight cycles for one of MUFU's (exp, log, root), and multiplies 64 x N x 16 in N / 2 cycles; the longest of
the three counts, no shorter than the bytes at the device's copy speed. Few warps, which hide no latency, issue every other cycle at best;
beyond that, waiting is not in the model. It takes a Triton whose listings say where functions were called, as 3.9's do and 3.6's don't.
"""

from __future__ import annotations

import argparse
import ast
import collections
import csv
import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tools import gpu_record, gpu_static
from tools.gpu_static import CLOCK, COPY, KERNELS, LAUNCH, PROCESSORS, ROOT, TARGETS, Figures, Launch

HOME = ROOT / "src" / "anymax" / "kernels" / "triton"
RECORD = ROOT / "benchmarks" / "results" / "gpu-times.csv"
PAGE = RECORD.with_suffix(".md")
TARGET = "sm_90"
FEW = 4  # programs of a grid that are counted where all do the same

Place = tuple[str, int]  # a file of kernels, and the line on which a statement begins
Chain = tuple[Place, ...]  # from the kernel inwards: where each function was called, and the statement
Hits = dict[Chain, float]  # how often a program came there


# -- lines of the sources -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Around:
    """A loop of the source: its line, those of its body, and where the statements of its body begin."""

    line: int
    lines: range
    body: tuple[int, ...]


@functools.cache
def source(file: str) -> tuple[dict[int, int], tuple[Around, ...], dict[int, str]]:
    """(line -> where its statement begins, loops, line -> its function) of a file of kernels."""
    tree = ast.parse((HOME / file).read_text(encoding="utf-8"))
    begins: dict[int, int] = {}
    loops: list[Around] = []
    functions: dict[int, str] = {}
    for node in ast.walk(tree):  # outer ones first, so that inner ones have the last word
        if isinstance(node, ast.stmt):
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                begins[line] = node.lineno
                if isinstance(node, ast.FunctionDef):
                    functions[line] = node.name
        if isinstance(node, (ast.For, ast.While)):
            last = node.body[-1].end_lineno or node.body[-1].lineno
            loops.append(Around(node.lineno, range(node.body[0].lineno, last + 1), tuple(b.lineno for b in node.body)))
    return begins, tuple(loops), functions


def place(path: str, line: int) -> Place:
    file = Path(path).name
    return file, source(file)[0].get(line, line)


# -- how often: in the interpreter ----------------------------------------------------------------------------------------------------


class Counter:
    """In the place of a kernel: runs some programs of each launch and counts the lines they come to."""

    def __init__(self, kernel: Any, counted: list[dict[str, Any]], few: int) -> None:
        self.kernel, self.fn, self.counted, self.few = kernel, kernel.fn, counted, few

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        part = (min(grid[0], self.few), *(min(side, self.few, 2) for side in grid[1:])) if self.few else grid

        def run(*args: Any, **options: Any) -> None:
            hits: collections.Counter[Chain] = collections.Counter()
            sys.settrace(follower(hits))
            try:
                self.kernel[part](*args, **options)
            finally:
                sys.settrace(None)
            mean = [[list(chain), count / math.prod(part)] for chain, count in hits.items()]
            self.counted.append({"kernel": self.fn.__name__, "hits": mean})

        return run


def follower(hits: collections.Counter[Chain]) -> Callable[..., Any]:
    """A trace function that counts the statements which functions of kernels come to."""
    chains: dict[int, Chain] = {}  # of the frames that are open: where they were called
    now: dict[int, Place] = {}
    home = str(HOME) + os.sep

    def called(frame: Any, event: str, arg: Any) -> Any:
        if event != "call" or not frame.f_code.co_filename.startswith(home):
            return None
        caller = frame.f_back
        while caller is not None and id(caller) not in now:
            caller = caller.f_back
        own = id(frame)
        chains[own] = (*chains[id(caller)], now[id(caller)]) if caller is not None else ()
        now[own] = place(frame.f_code.co_filename, frame.f_lineno)

        def within(frame: Any, event: str, arg: Any) -> Any:
            if event == "line":
                at = place(frame.f_code.co_filename, frame.f_lineno)
                if at != now[own]:  # not the next line of the same statement
                    now[own] = at
                    hits[(*chains[own], at)] += 1
            elif event == "return":
                del now[own], chains[own]
            return within

        return within

    return called


# -- what each line costs: in the listing ----------------------------------------------------------------------------------------------


def candidates(chain: Chain) -> Iterator[tuple[Chain, Around]]:
    """The loops of the sources in which a statement lies, outermost first, each with the chain of calls that leads to its function."""
    for depth, (file, line) in enumerate(chain):
        for loop in sorted(source(file)[1], key=lambda loop: loop.line):
            if line in loop.lines:
                yield chain[:depth], loop


def turns(file: str, calls: Chain, loop: Around, hits: Hits) -> float:
    """How often a program goes round a loop: its statements are come to once a turn, or more often where they take several lines."""
    return min((n for line in loop.body if (n := hits.get((*calls, (file, line)), 0.0))), default=0.0)


def run_by(chain: Chain, hits: Hits) -> float | None:
    """How often a program comes to a statement; None: the interpreter cannot say."""
    if chain in hits:
        return hits[chain]
    if not chain:
        return None
    file, line = chain[-1]
    name = source(file)[2].get(line)
    entered = any(
        other[:-1] == chain[:-1] and other[-1][0] == file and source(file)[2].get(other[-1][1]) == name
        for other in hits
    )
    return 0.0 if entered else run_by(chain[:-1], hits)


@dataclasses.dataclass(frozen=True)
class Work:
    """Of one warp: instructions issued, and of these MUFU's; cycles of the products of four warps."""

    issued: float
    special: float
    products: float


def rounds(listing: gpu_static.Listing, chains: list[Chain], hits: Hits) -> list[float]:
    """How often a program goes round the loop in which each instruction stands; 1: it stands in none. A loop of the listing is the
    innermost one of the sources that most of its own instructions came from."""
    inside: list[gpu_static.Loop | None] = [None] * len(chains)
    for loop in sorted(listing.loops, key=lambda loop: loop.depth):
        inside[loop.start : loop.end] = [loop] * (loop.end - loop.start)
    times = {None: 1.0}
    for loop in listing.loops:
        votes: collections.Counter[tuple[str, Chain, Around]] = collections.Counter()
        rank: dict[tuple[str, Chain, Around], int] = {}
        for i in range(loop.start, loop.end):
            if inside[i] is loop:
                for deep, (calls, around) in enumerate(candidates(chains[i])):
                    one = (chains[i][len(calls)][0], calls, around)
                    votes[one] += 1
                    rank[one] = max(deep, rank.get(one, 0))
        enough = 0.6 * max(votes.values(), default=0)
        best = max((one for one in votes if votes[one] >= enough), key=lambda one: rank[one], default=None)
        times[loop] = turns(*best, hits) if best else 1.0
    return [times[loop] for loop in inside]


def weights(listing: gpu_static.Listing, hits: Hits) -> list[float]:
    """How often a program comes to each instruction."""
    ours = {path.name for path in HOME.glob("*.py")}
    chains = [tuple(place(*at) for at in chain if at[0] in ours) for chain in listing.chains]
    known = {chain: run_by(chain, hits) for chain in set(chains)}
    most = rounds(listing, chains, hits)
    return [n if (own := known[chain]) is None else min(own, n) for n, chain in zip(most, chains)]


def work(listing: gpu_static.Listing, hits: Hits) -> Work:
    issued = special = products = 0.0
    for code, times in zip(listing.code, weights(listing, hits)):
        issued += times
        special += times * ("MUFU" in code)
        if match := re.search(r"\bHGMMA\.64x(\d+)x", code):
            products += times * int(match[1]) / 2
        elif re.search(r"\bHMMA\.16816", code):
            products += times * 4  # 16 x 8 x 16 of each of four warps
    return Work(issued, special, products)


def kernel_seconds(programs: int, f: Figures, of: Work) -> float:
    """The model's time of a launch, without the bytes."""
    cycles = max(of.issued * f.warps / 4, of.special * 8 * f.warps / 4, of.products * f.warps / 4)
    resident = min(f.per_processor, -(-programs // PROCESSORS)) * f.warps / 4
    return programs / min(PROCESSORS, programs) * cycles * max(1.0, 2.0 / max(resident, 0.25)) / CLOCK + LAUNCH


# -- the cases ------------------------------------------------------------------------------------------------------------------------

Make = Callable[
    ..., Any
]  # (shape, dtype) -> scores: without memory where launches are recorded, drawn where lines are counted


@dataclasses.dataclass(frozen=True)
class Timed:
    group: str  # these two as the benchmarks' records have them
    name: str
    call: Callable[[Make], Any]
    moved: int = 0  # bytes that have to be read and written
    of: str = ""  # the kernels whose time it is, a regular expression
    few: int = FEW  # programs of a launch that are counted; 0: all
    counts: str = ""  # the name that its lines are counted under, where another case has the same


def row_cases() -> Iterator[Timed]:
    import torch

    import anymax as am
    from anymax.kernels import triton as engine

    maps = {
        "softmax": am.Softmax(), "sparsemax": am.Sparsemax(), "entmax15": am.Entmax(1.5), "sparse_softmax": am.SparseSoftmax(k=50),
        "nucleus": am.SparseSoftmax(p=0.9), "entmax 1.7": am.Entmax(1.7),
    }  # fmt: skip
    shapes = ((65536, 128), (4096, 1024), (4096, 8192), (4096, 32768), (4096, 50257), (4096, 128256))
    for shape in shapes:
        for dtype in ("bfloat16", "float32"):
            size = math.prod(shape) * getattr(torch, dtype).itemsize
            label = f"{'x'.join(map(str, shape))} normal{' bfloat16' if dtype == 'bfloat16' else ''}"
            for name, mapping in maps.items():
                if dtype == "float32" and name not in ("sparsemax", "entmax15"):
                    continue

                def forward(make: Make, mapping: Any = mapping, shape: Any = shape, dtype: str = dtype) -> None:
                    x = make(shape, dtype)
                    engine.forward(mapping, x, None, torch.empty_like(x))

                def both(make: Make, mapping: Any = mapping, shape: Any = shape, dtype: str = dtype) -> None:
                    x = make(shape, dtype)
                    p, saved = engine.forward_saving(mapping, x)
                    engine.vjp(mapping, x, p, make(shape, dtype), saved)

                def loss(make: Make, mapping: Any = mapping, shape: Any = shape, dtype: str = dtype) -> None:
                    x, t = make(shape, dtype), make(shape[:1], "int64")
                    _, _, state = engine.index_loss(mapping, x, t, True)
                    engine.index_loss_grad(mapping, x, t, make(shape[:1], "float32"), None, state)

                yield Timed("gpu forward", f"{name} {label}", forward, 2 * size)
                if dtype == "bfloat16" and name in ("sparsemax", "entmax15"):
                    yield Timed("gpu backward", f"{name} {label}", both, 3 * size, "backward")
                if dtype == "bfloat16" and name in ("softmax", "entmax15"):
                    said = {"softmax": "cross_entropy"}.get(name, f"{name}_loss")
                    yield Timed("gpu loss", f"{said} {label}", loss, 3 * size)


def attention_cases() -> Iterator[Timed]:
    import torch

    from anymax.kernels.triton import attention

    for d, note in ((64, "reach 1/8"), (64, "reach 1/32"), (128, "reach 1/8"), (64, "reach 1/2")):
        job = attention.Job("power", 2, 0.5, d**-0.5, 0.0, True, -1, -1, 0, 0.0, False, False)

        def both(make: Make, job: Any = job, d: int = d, note: str = note) -> None:
            q, k, v = make((1, 8, 8192, d), note)
            out, saved = attention.forward(job, q, k, v, {}, True)
            attention.backward(job, q, k, v, {}, out, saved, torch.ones_like(out), {"q", "k", "v"})

        label = f"entmax15 1x8x8192x{d} local bfloat16 {note}"
        first = "attention_(centres|forward)"
        yield Timed("gpu attention", label, both, 8 * 8192 * d * 8, first, 0, label)
        yield Timed("gpu attention", f"{label}, forward and backward", both, 8 * 8192 * d * 22, "", 0, label)


def layer_cases() -> Iterator[Timed]:
    """The scores of an output layer, not its lists and products over the support."""
    import anymax as am
    from anymax._layer import Layer
    from anymax.kernels import triton as engine
    from anymax.kernels.triton import layer

    for name, mapping in (("entmax15", am.Entmax(1.5)), ("sparsemax", am.Sparsemax()), ("softmax", am.Softmax())):

        def scores(make: Make, mapping: Any = mapping) -> None:
            x, weight = make((4096, 4096), "bfloat16") / 64, make((16_384, 4096), "bfloat16")
            of, t = Layer(x, weight, None, None, mapping, (4096,), x.dtype), make((4096,), "int64")
            if mapping.name == "softmax":
                layer.two_of(of, t)
            else:
                layer.candidates(of, layer.link_of(engine.link_of(mapping)), t, None)  # type: ignore[arg-type]

        yield Timed("gpu output layer", f"{name} 4096x16384 normal bfloat16 4096 features, scores", scores, few=1)


def ragged_cases() -> Iterator[Timed]:
    import numpy as np

    import anymax as am
    from anymax.kernels.triton import ragged

    for longest in (16, 1024):
        for name, mapping in (("softmax", am.Softmax()), ("sparsemax", am.Sparsemax()), ("entmax15", am.Entmax(1.5))):

            def both(make: Make, mapping: Any = mapping, longest: int = longest) -> None:
                rows = (am.segments(lengths=np.full(2**20 // longest, longest)), 0)
                x = make((2**20, 1), "bfloat16", host=True)
                p = ragged.forward(mapping, x, rows)
                ragged.vjp(mapping, x, p, x, rows)

            yield Timed(
                "gpu ragged", f"{name} {2**20 // longest} segments of {longest} bfloat16 both ways", both, 5 * 2**21
            )


def cases() -> list[Timed]:
    return [*row_cases(), *attention_cases(), *layer_cases(), *ragged_cases()]


# -- scores, and what they launch --------------------------------------------------------------------------------------------------


def without_memory(shape: Any, kind: str, host: bool = False) -> Any:
    import torch

    if kind.startswith("reach"):
        return tuple(torch.empty(shape, dtype=torch.bfloat16, device="meta") for _ in range(3))
    return (torch.zeros if host else torch.empty)(shape, dtype=getattr(torch, kind), device="cpu" if host else "meta")


def drawn(shape: Any, kind: str, host: bool = False) -> Any:
    """The first rows of such scores; one head of an attention."""
    import torch

    if kind.startswith("reach"):
        from benchmarks import gpu_attention, gpu_clock

        gpu_clock.DEVICE.kind = "cpu"
        return gpu_attention.heads((1, 1, *shape[2:]), gpu_attention.REACH[kind])
    out = torch.zeros(shape, dtype=getattr(torch, kind))
    if out.is_floating_point():
        some = out[: 2**20 // out[0].numel() * 4 + 64]
        some.copy_(torch.randn(some.shape, generator=torch.Generator().manual_seed(shape[-1])))
    return out


def launches(case: Timed) -> list[Launch]:
    return gpu_static.launched(gpu_static.Case(case.name, lambda: case.call(without_memory)), TARGET)


def key(case: Timed) -> str:
    """The same for the same kernels."""
    return hashlib.sha256("".join(map(gpu_record.key_of, launches(case))).encode()).hexdigest()[:12]


def counted(case: Timed) -> list[dict[str, Any]]:
    """In the interpreter: the lines of each launch."""
    from anymax.kernels.triton import attention, launch, layer

    found: list[dict[str, Any]] = []
    before: list[tuple[Any, str, Any]] = [(launch, "_wave", launch._wave)]
    before += [(module, "_processors", module._processors) for module in (attention, layer)]
    launch._wave = lambda: TARGETS[TARGET][2]
    attention._processors = layer._processors = lambda device: PROCESSORS
    for module, names in ((launch, KERNELS["launch"]), (attention, KERNELS["attention"]), (layer, KERNELS["layer"])):
        for name in names:
            if (kernel := getattr(module, name, None)) is not None:
                before.append((module, name, kernel))
                setattr(module, name, Counter(kernel, found, case.few))
    try:
        case.call(drawn)
    finally:
        for module, name, kernel in before:
            setattr(module, name, kernel)
    return found


def lines_of(case: Timed, folder: Path) -> Path:
    return folder / f"{re.sub('[^a-zA-Z0-9.]+', '-', case.counts or f'{case.group} {case.name}')}-{key(case)}.json"


def seconds(case: Timed, lines: list[dict[str, Any]]) -> tuple[float, list[tuple[Launch, Figures, Work, float]]]:
    """The model's time, and of each launch that it is made of."""
    own = launches(case)
    assert [launch.name for launch in own] == [one["kernel"] for one in lines], (own, lines)
    parts = []
    for launch, one in zip(own, lines):
        if re.search(case.of, launch.name):
            hits = {tuple((file, line) for file, line in chain): n for chain, n in one["hits"]}
            figures, listing = gpu_static.disassembled(gpu_static.compiled(TARGET, launch), TARGET)
            of = work(listing, hits)
            parts.append((launch, figures, of, kernel_seconds(launch.programs, figures, of)))
    return max(sum(part[-1] for part in parts), case.moved / COPY + LAUNCH), parts


# -- the record -----------------------------------------------------------------------------------------------------------------------

FIELDS = ("triton", "group", "name", "key", "microseconds")
Row = dict[str, str]


def load() -> list[Row]:
    if not RECORD.exists():
        return []
    with RECORD.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def save(rows: list[Row]) -> None:
    order = {(case.group, case.name): i for i, case in enumerate(cases())}
    rows = [row for row in rows if (row["group"], row["name"]) in order]
    rows.sort(key=lambda row: order[row["group"], row["name"]])
    with RECORD.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def measured() -> tuple[str, dict[tuple[str, str], float]]:
    """(which it is, microseconds) of the newest record of an H100."""
    newest = max((ROOT / "benchmarks" / "results").glob("*-nvidia-h100-*.json"))
    run = json.loads(newest.read_text(encoding="utf-8"))
    versions = run["versions"]
    found = {
        (r["group"], r["name"].split(", beside")[0]): 1e3 * r["ours_ms"] for r in run["readings"] if r.get("ours_ms")
    }
    return f"{run['hardware']['cpu']}, commit {versions['commit']}, Triton {versions['triton']}, {run['date']}", found


def page(rows: list[Row]) -> Iterator[str]:
    which, known = measured()
    took = {(row["group"], row["name"]): row for row in rows}
    yield "# The times of the GPU kernels, predicted\n"
    yield "Made by `python -m tools.gpu_time`: a model's times for an H100 in microseconds, and where there is one the measured time. The"
    yield "head of that file says what the model is. Between the two lie what has changed in the kernels since, the compiler, what a call"
    yield "launches beside them, and all waiting.\n"
    by = ", ".join(sorted({row["triton"] for row in rows}))
    yield f"Predicted: Triton {by}. Measured: {which}. A star: of sources that have changed since.\n"
    ratios: dict[str, list[float]] = {}
    for group in dict.fromkeys(case.group for case in cases()):
        yield f"## {group}\n"
        yield "| | predicted | measured |\n|---|---:|---:|"
        for case in cases():
            if case.group == group and (row := took.get((group, case.name))):
                truth, time = known.get((group, case.name)), float(row["microseconds"])
                if truth:
                    ratios.setdefault(group, []).append(time / truth)
                said = f"{truth:.1f}" if truth else ""
                yield f"| {case.name} | {time:.1f}{'*' * (row['key'] != key(case))} | {said} |"
        yield ""
    yield "## How near\n"
    yield "The predicted over the measured time: geometric mean, smallest and largest.\n"
    yield "| | cases | mean | smallest | largest |\n|---|---:|---:|---:|---:|"
    for group, own in ratios.items():
        mean = math.exp(sum(map(math.log, own)) / len(own))
        yield f"| {group} | {len(own)} | {mean:.2f} | {min(own):.2f} | {max(own):.2f} |"


# -- all of it ------------------------------------------------------------------------------------------------------------------------


def count(only: str, folder: Path) -> None:
    """Counts what the folder does not have, in the interpreter: TRITON_INTERPRET=1 has to be set when Triton is imported."""
    for case in cases():
        if re.search(only, f"{case.group}/{case.name}") and not (path := lines_of(case, folder)).exists():
            path.write_text(json.dumps(counted(case)), encoding="utf-8")
            print(f"# {case.name}: counted", flush=True)


def predict(only: str, folder: Path) -> None:
    """Brings the record of the Triton at hand up to date."""
    import triton

    rows = load()
    have = {(row["triton"], row["group"], row["name"]): row["key"] for row in rows}
    for case in cases():
        at = (triton.__version__, case.group, case.name)
        if re.search(only, f"{case.group}/{case.name}") and have.get(at) != (now := key(case)):
            took, parts = seconds(case, json.loads(lines_of(case, folder).read_text(encoding="utf-8")))
            rows = [row for row in rows if (row["group"], row["name"]) != at[1:]]
            rows.append(dict(zip(FIELDS, (*at, now, f"{took * 1e6:.2f}"))))
            print(f"{case.group}/{case.name}: {took * 1e6:.1f} us by Triton {triton.__version__}", flush=True)
            for launch, figures, of, time in parts:
                each = f"{of.issued:.0f} instructions a warp, {of.special:.0f} of MUFU, {of.products:.0f} cycles of products"
                grid = f"{launch.programs} programs of {figures.warps} warps, {figures.per_processor} at a time"
                print(f"    {launch.name}: {grid}, {each}: {time * 1e6:.1f} us", flush=True)
            save(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose group/name matches this regular expression")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "gpu-lines", help="where the counted lines are kept"
    )
    parser.add_argument("--part", choices=("count", "predict"), help="one step alone, of the Triton at hand")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.part:
        with tempfile.TemporaryDirectory() as cache:
            os.environ["TRITON_CACHE_DIR"] = cache
            (count if args.part == "count" else predict)(args.only, args.folder)
        return
    words = [sys.executable, "-m", "tools.gpu_time", "--only", args.only, "--folder", str(args.folder), "--part"]
    subprocess.run([*words, "count"], cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, check=True)
    subprocess.run([*words, "predict"], cwd=ROOT, check=True)
    PAGE.write_text("\n".join([*page(load()), ""]), encoding="utf-8")


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "src")]
    main()
