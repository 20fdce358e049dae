"""How long the GPU kernels take, by a model: what the compiler made of each line of a kernel, times how often that line runs.

    python -m tools.gpu_time                the page benchmarks/results/gpu-times.md, with the measured times that there are beside it
    python -m tools.gpu_time --only entmax  these cases alone, printed

How often a line runs is counted in Triton's interpreter, on the scores that the benchmarks have: turns of solvers, blocks that are left out,
tiles that a mask cuts. Of rows and output layers a few programs are counted, of attention all of one head. What a line costs stands in the
listing of its instructions, which says of each from which line it came. A multiprocessor issues four instructions a cycle, one for each of
its schedulers, does four of MUFU's (exp, log, root) a scheduler in the time of 32, and multiplies 64 x N x 16 in N / 2 cycles; the longest
of the three counts, no shorter than the bytes at the device's copy speed. Waiting is not modelled, but for the factor STALL.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import functools
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

from tools import gpu_static
from tools.gpu_static import CLOCK, COPY, KERNELS, LAUNCH, PROCESSORS, ROOT, TARGETS, Figures, Launch

HOME = ROOT / "src" / "anymax" / "kernels" / "triton"
PAGE = ROOT / "benchmarks" / "results" / "gpu-times.md"
FEW = 4  # programs of a grid that are counted where all do the same
STALL = 1.0

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
        part = (min(grid[0], self.few), *(min(side, 2) for side in grid[1:])) if self.few else grid

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


def work(listing: gpu_static.Listing, hits: Hits) -> Work:
    inside: list[gpu_static.Loop | None] = [None] * len(listing.code)
    for loop in sorted(listing.loops, key=lambda loop: loop.depth):
        inside[loop.start : loop.end] = [loop] * (loop.end - loop.start)
    chains = [tuple(place(*at) for at in chain if (HOME / at[0]).name in FILES) for chain in listing.chains]
    rounds: dict[gpu_static.Loop, float] = {}
    for loop in listing.loops:
        votes: collections.Counter[tuple[Chain, Around]] = collections.Counter()
        files: dict[tuple[Chain, Around], str] = {}
        order: dict[tuple[Chain, Around], int] = {}
        for i in range(loop.start, loop.end):
            if inside[i] is loop:
                for rank, one in enumerate(candidates(chains[i])):
                    votes[one] += 1
                    order[one] = max(rank, order.get(one, 0))
                    files[one] = chains[i][len(one[0])][0]
        if votes:
            most = max(votes.values())
            best = max((one for one in votes if votes[one] >= 0.6 * most), key=lambda one: order[one])
            rounds[loop] = turns(files[best], *best, hits)
        else:
            rounds[loop] = 1.0
    issued = special = products = 0.0
    seen = {chain: run_by(chain, hits) for chain in set(chains)}
    for code, chain, loop in zip(listing.code, chains, inside):
        most = rounds[loop] if loop is not None else 1.0
        known = seen[chain]
        times = most if known is None else min(known, most)
        issued += times
        special += times * ("MUFU" in code)
        if match := re.search(r"\bHGMMA\.64x(\d+)x", code):
            products += times * int(match[1]) / 2
        elif re.search(r"\bHMMA\.16816", code):
            products += times * 4 * 2048 / 2048
    return Work(issued, special, products)


FILES = {path.name for path in HOME.glob("*.py")}


def kernel_seconds(programs: int, f: Figures, of: Work) -> float:
    """The model's time of a launch, without the bytes."""
    cycles = max(of.issued * f.warps / 4, of.special * 8 * f.warps / 4, of.products * f.warps / 4)
    resident = min(f.per_processor, -(-programs // PROCESSORS)) * f.warps / 4
    return programs / min(PROCESSORS, programs) * cycles * max(STALL, 2.0 / max(resident, 0.25)) / CLOCK + LAUNCH


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

    links = {
        "entmax15": ("power", 2, 0.5),
        "sparsemax": ("power", 1, 1.0),
        "softmax": ("softmax", 1, 0.0),
        "entmax 1.3": ("root", 1, 0.3),
    }
    for name, (link, power, param) in links.items():
        for d in (64, 128):
            for note in ("reach 1/2", "reach 1/8", "reach 1/32"):
                if (name == "softmax" and note != "reach 1/8") or (d == 128 and note == "reach 1/2"):
                    continue
                job = attention.Job(link, power, param, d**-0.5, 0.0, True, -1, -1, 0, 0.0, False, False)

                def forward(make: Make, job: Any = job, d: int = d, note: str = note, save: bool = False) -> Any:
                    q, k, v = make((1, 8, 8192, d), note)
                    return (q, k, v), attention.forward(job, q, k, v, {}, save)

                def both(make: Make, job: Any = job, forward: Any = forward) -> None:
                    (q, k, v), (out, saved) = forward(make, save=True)
                    attention.backward(job, q, k, v, {}, out, saved, torch.ones_like(out), {"q", "k", "v"})

                label = f"{name} 1x8x8192x{d} local bfloat16 {note}"
                yield Timed("gpu attention", label, forward, few=0)
                yield Timed("gpu attention", f"{label}, forward and backward", both, few=0)


def layer_cases() -> Iterator[Timed]:
    """The scores of an output layer, not its lists and products over the support."""
    import anymax as am
    from anymax._layer import Layer
    from anymax.kernels import triton as engine
    from anymax.kernels.triton import layer

    for name, mapping in (("entmax15", am.Entmax(1.5)), ("sparsemax", am.Sparsemax()), ("softmax", am.Softmax())):

        def scores(make: Make, mapping: Any = mapping) -> None:
            x, weight = make((4096, 4096), "bfloat16", 1 / 64), make((128_256, 4096), "bfloat16")
            of, t = Layer(x, weight, None, None, mapping, (4096,), x.dtype), make((4096,), "int64")
            if mapping.name == "softmax":
                layer.two_of(of, t)
            else:
                layer.candidates(of, layer.link_of(engine.link_of(mapping)), t, None)  # type: ignore[arg-type]

        yield Timed("gpu output layer", f"{name} 4096x128256 normal bfloat16 4096 features, scores", scores)


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


# -- all of it ------------------------------------------------------------------------------------------------------------------------


def without_memory(shape: Any, kind: str, scale: float = 1.0, host: bool = False) -> Any:
    import torch

    if kind.startswith("reach"):
        return tuple(torch.empty(shape, dtype=torch.bfloat16, device="meta") for _ in range(3))
    return (torch.zeros if host else torch.empty)(shape, dtype=getattr(torch, kind), device="cpu" if host else "meta")


def drawn(shape: Any, kind: str, scale: float = 1.0, host: bool = False) -> Any:
    import torch

    if kind.startswith("reach"):
        from benchmarks import gpu_attention, gpu_clock

        gpu_clock.DEVICE.kind = "cpu"
        return gpu_attention.heads((1, 1, *shape[2:]), gpu_attention.REACH[kind])
    if kind == "int64":
        return torch.zeros(shape, dtype=torch.int64)
    generator = torch.Generator().manual_seed(shape[-1])
    return torch.randn(shape, generator=generator, dtype=getattr(torch, kind)) * scale


def counted(case: Timed) -> list[dict[str, Any]]:
    """In the interpreter: the lines of each launch."""
    from anymax.kernels.triton import attention, launch, layer

    found: list[dict[str, Any]] = []
    launch._wave = lambda: TARGETS["sm_90"][2]
    attention._processors = layer._processors = lambda device: PROCESSORS
    for module, names in ((launch, KERNELS["launch"]), (attention, KERNELS["attention"]), (layer, KERNELS["layer"])):
        for name in names:
            if (kernel := getattr(module, name, None)) is not None:
                setattr(module, name, Counter(getattr(kernel, "kernel", kernel), found, case.few))
    case.call(drawn)
    return found


def count(only: str, folder: Path) -> None:
    """Counts what the folder does not have, in the interpreter: TRITON_INTERPRET=1 has to be set when Triton is imported."""
    for number, case in enumerate(cases()):
        path = folder / f"{number}.json"
        if re.search(only, f"{case.group}/{case.name}") and not path.exists():
            path.write_text(json.dumps(counted(case)), encoding="utf-8")
            print(f"# {case.name}: counted", flush=True)


def seconds(case: Timed, lines: list[dict[str, Any]]) -> tuple[float, list[tuple[Launch, Figures, Work, float]]]:
    """The model's time, and of each launch that it is made of."""
    launches = gpu_static.launched(gpu_static.Case(case.name, lambda: case.call(without_memory)), "sm_90")
    assert [launch.name for launch in launches] == [one["kernel"] for one in lines], (launches, lines)
    parts = []
    for launch, one in zip(launches, lines):
        if re.search(case.of, launch.name):
            hits = {tuple((file, line) for file, line in chain): n for chain, n in one["hits"]}
            figures, listing = gpu_static.disassembled(gpu_static.compiled("sm_90", launch), "sm_90")
            of = work(listing, hits)
            parts.append((launch, figures, of, kernel_seconds(launch.programs, figures, of)))
    return max(sum(part[-1] for part in parts), case.moved / COPY + LAUNCH), parts


def measured() -> dict[tuple[str, str], float]:
    """Seconds of the newest record of an H100."""
    newest = max((ROOT / "benchmarks" / "results").glob("*-nvidia-h100-*.json"))
    readings = json.loads(newest.read_text(encoding="utf-8"))["readings"]
    return {(r["group"], r["name"].split(", beside")[0]): r["ours_ms"] / 1e3 for r in readings if r.get("ours_ms")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose group/name matches this regular expression")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "gpu-lines", help="where the counted lines are kept"
    )
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if os.environ.get("TRITON_INTERPRET") == "1":
        count(args.only, args.folder)
        return
    words = [sys.executable, "-m", "tools.gpu_time", "--only", args.only, "--folder", str(args.folder)]
    subprocess.run(words, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, check=True)
    known = measured()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for number, case in enumerate(cases()):
            if re.search(args.only, f"{case.group}/{case.name}"):
                took, parts = seconds(case, json.loads((args.folder / f"{number}.json").read_text(encoding="utf-8")))
                truth = known.get((case.group, case.name))
                beside = f"measured {truth * 1e6:.1f}, {took / truth:.2f} of it" if truth else ""
                print(f"{case.group}/{case.name}: {took * 1e6:.1f} us {beside}", flush=True)
                for launch, figures, of, time in parts:
                    print(
                        f"    {launch.name} {launch.programs} programs x {figures.warps} warps, {figures.per_processor} at a time: issued {of.issued:.0f} special {of.special:.0f} products {of.products:.0f}: {time * 1e6:.1f} us",
                        flush=True,
                    )  # noqa: E501


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "src")]
    main()
