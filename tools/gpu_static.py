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
import contextlib
import dataclasses
import functools
import inspect
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
SHARED = {"sm_80": 164, "sm_90": 228, "sm_100": 228}  # KiB of a multiprocessor
POINTERS = {
    "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64", "int64": "i64", "int32": "i32", "int16": "i16",
    "int8": "i8", "uint8": "u8", "bool": "i1",
}  # fmt: skip
PROCESSORS = 132  # of an H100 SXM

ROWS = ((65536, 128), (4096, 1024), (4096, 8192), (4096, 32768), (4096, 128256), (32, 1_000_000))
ANYWHERE = ((4096, 1001), (4096, 50_257))  # rows that begin anywhere
KERNELS = {
    "launch": (
        "separable_rows", "truncated_rows", "dense_rows", "perturb_rows", "backward_rows", "backward_parts", "survey_parts", "dense_parts",
    ),
    "attention": (
        "attention_forward", "attention_queries", "attention_keys", "attention_bias", "attention_centres", "attention_parts",
        "attention_solve", "attention_values", "attention_merge",
    ),
    "layer": ("layer_sums", "layer_slopes", "layer_candidates", "layer_products"),
}  # fmt: skip


# -- what is launched --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Launch:
    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__


class Recorder:
    """In the place of a kernel: remembers with what it was launched."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel: Any = kernel.kernel if isinstance(kernel, Recorder) else kernel
        self.launches, self.fn = launches, kernel.fn

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(isinstance(side, int) and side > 0 for side in grid)
        return lambda *args, **options: self.launches.append(Launch(self.kernel, grid, args, options))


@contextlib.contextmanager
def recorded(wave: int = 32) -> Iterator[list[Launch]]:
    """The list that all launches of the engine go to meanwhile; `wave`: threads of a warp."""
    from anymax.kernels.triton import attention, launch, layer

    launches: list[Launch] = []
    before: list[tuple[Any, str, Any]] = [(launch, "_wave", launch._wave)]
    launch._wave = wave
    for module, names in ((launch, KERNELS["launch"]), (attention, KERNELS["attention"]), (layer, KERNELS["layer"])):
        for name in names:
            if (kernel := getattr(module, name, None)) is not None:
                before.append((module, name, kernel))
                setattr(module, name, Recorder(kernel, launches))
    try:
        yield launches
    finally:
        for module, name, kernel in before:
            setattr(module, name, kernel)


def described(launch: Launch) -> tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], list], dict[str, Any]]:
    """What the runtime would tell the compiler of this launch: types, constants, by what numbers can be divided, options."""
    import torch

    options = dict(launch.options)
    compiler = {name: options.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in options}
    names = list(inspect.signature(launch.kernel.fn).parameters)
    assert set(names) == {*names[: len(launch.args)], *options}
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    hints: dict[tuple[int], list] = {}
    for i, name in enumerate(names):
        value = launch.args[i] if i < len(launch.args) else options[name]
        if i >= len(launch.args) or (isinstance(value, int) and value == 1):
            signature[name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], hints[(i,)] = "*" + POINTERS[str(value.dtype)[6:]], [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                hints[(i,)] = [["tt.divisibility", 16]]
        else:
            assert isinstance(value, float), (name, value)
            signature[name] = "fp32"
    return signature, constants, hints, compiler


def compiled(target: str, launch: Launch) -> Any:
    """What the runtime would compile for this launch on that device."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, hints, options = described(launch)
    source = ASTSource(launch.kernel, signature=signature, constexprs=constants, attrs=hints)
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)


# -- what the compiler made of it ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Loop:
    """What is between a label and the branch back to it, without the loops inside."""

    fp64: int
    loads: int
    inner: bool  # it has a loop of its own

    @property
    def tiles(self) -> bool:
        """A loop over the tiles of a row, which reads memory; else a solver's."""
        return self.loads > 0 and not self.inner


@dataclasses.dataclass(frozen=True)
class Figures:
    kernel: str
    target: str
    warps: int
    registers: int
    stack: int  # bytes of a thread that do not fit its registers
    shared: int  # bytes of a program
    barriers: int
    instructions: int
    fp64_in_loops: int  # in those over tiles
    wide_loads: int  # of 128 bits and more
    loads: int

    @property
    def per_processor(self) -> int:
        """Programs that fit a multiprocessor at the same time."""
        granted = -(-max(self.registers, 1) * 32 // 256) * 256 * self.warps
        by_shared = SHARED[self.target] * 1024 // (self.shared + 1024)
        return max(1, min(65536 // granted, by_shared, 64 // self.warps, 32))


_FP64 = re.compile(r"\b(DADD|DMUL|DFMA|DSETP|DMNMX|F2F\.F64|F2F\.F32\.F64|I2F\.F64|F2I\.F64|MUFU\.\w*64H)")


def figures(made: Any, target: str) -> Figures:
    """Of a kernel compiled for an NVIDIA target."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(made.asm["cubin"])

        def tool(path: str, *words: str) -> str:
            return subprocess.run([path, *words, str(cubin)], capture_output=True, text=True, check=True).stdout

        usage = tool(knobs.nvidia.cuobjdump.path, "-res-usage")
        text = tool(knobs.nvidia.nvdisasm.path, "-c", "-ndf")  # without an analysis that nothing of this needs
    said = {name: int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK")}  # type: ignore[index]
    code, loops = listed(text)
    return Figures(
        made.metadata.name, target, made.metadata.num_warps, said["REG"], said["STACK"], made.metadata.shared, _count(r"\bBAR\.", code),
        len(code), sum(loop.fp64 for loop in loops if loop.tiles), _count(r"\bLDG\S*\.(128|256)", code), _count(r"\bLDG", code),
    )  # fmt: skip


def listed(text: str) -> tuple[list[str], tuple[Loop, ...]]:
    """The instructions of a kernel and its loops, of what nvdisasm prints."""
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in map(str.strip, text.splitlines()):
        if match := re.match(r"(\.L_\w+):", line):
            labels[match[1]] = len(code)
        elif re.match(r"/\*[0-9a-f]+\*/", line):
            code.append(re.sub(r"^/\*[0-9a-f]+\*/\s*", "", line))
    named = {at: name for name, at in labels.items()}  # the end of a kernel is a branch to itself, and padding
    while code and (code[-1].startswith("NOP") or f"({named.get(len(code) - 1)})" in code[-1]):
        code.pop()
    return code, loops_of(code, labels)


def loops_of(code: list[str], labels: dict[str, int]) -> tuple[Loop, ...]:
    ends: dict[int, int] = {}  # several branches back to one label are one loop
    for i, line in enumerate(code):
        match = re.search(r"\bBRA\b.*?(\.L_\w+)", line)
        if match and labels.get(match[1], i + 1) <= i and labels[match[1]] != i:
            ends[labels[match[1]]] = i + 1
    follow = flow(code, labels)
    spans = {(begin, end) for begin, end in ends.items() if not reached(follow, end - 1, begin)}
    loops = []
    for begin, end in sorted(spans):
        inside = [(b, e) for b, e in spans if (b, e) != (begin, end) and begin <= b and e <= end]
        own = [c for i, c in enumerate(code[begin:end], begin) if not any(b <= i < e for b, e in inside)]
        loops.append(Loop(_count(_FP64, own), _count(r"\bLDG", own), bool(inside)))
    return tuple(loops)


def flow(code: list[str], labels: dict[str, int]) -> list[list[int]]:
    """What may follow each instruction."""
    joins: dict[str, list[int]] = {}  # where the threads of a barrier meet again
    for line in code:
        if match := re.search(r"\bBSSY\S*\s+(B\d+),.*?(\.L_\w+)", line):
            joins.setdefault(match[1], []).append(labels[match[2]])
    follow = []
    for i, line in enumerate(code):
        to = [i + 1] if i + 1 < len(code) else []
        if re.match(r"(BRA(\.U)?\s+`|(EXIT|RET|BRX|JMP)\b)", line):  # without a condition of any kind
            to = []
        if (match := re.search(r"\b(BRA|CALL)\b.*?(\.L_\w+)", line)) and match[2] in labels:
            to.append(labels[match[2]])
        if match := re.search(r"\bBSYNC\S*\s+(B\d+)", line):
            to += joins.get(match[1], [])
        follow.append([t for t in to if t < len(code)])
    return follow


def reached(follow: list[list[int]], end: int, without: int) -> bool:
    """Whether an instruction can be come to around another: a branch back to that one is then no loop, but the way home from a block that
    the compiler has put behind all others because it is seldom wanted."""
    seen, waiting = {0, without}, [0] if without else []
    while waiting:
        i = waiting.pop()
        if i == end:
            return True
        new = [t for t in follow[i] if t not in seen]
        seen.update(new)
        waiting += new
    return False


def _count(pattern: str | re.Pattern[str], code: list[str]) -> int:
    return sum(bool(re.search(pattern, line)) for line in code)


# -- the cases ----------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    call: Callable[[], Any]  # launches the kernels
    everywhere: bool = True  # for every target and by every Triton; else by the newest for sm_90 alone


def row_cases() -> Iterator[Case]:
    import torch

    import anymax as am
    from anymax.kernels import triton as engine

    maps = {
        "softmax": am.Softmax(), "sparsemax": am.Sparsemax(), "entmax15": am.Entmax(1.5), "entmax 1.7": am.Entmax(1.7),
        "top-k": am.SparseSoftmax(k=50), "top-p": am.SparseSoftmax(p=0.9), "entmax 1.25": am.Entmax(1.25), "entmax 3": am.Entmax(3.0),
        "budget": am.Budget(50), "normmax": am.NormMax(2.0), "taylor": am.Taylor(2), "sigsoftmax": am.Sigsoftmax(),
        "perturb": am.PerturbMax("normal"),
    }  # fmt: skip
    main, both_ways = list(maps)[:6], ("softmax", "sparsemax", "entmax15", "top-k")
    for shape in (*ROWS, *ANYWHERE):
        for dtype in ("bfloat16",) if shape in ANYWHERE else ("bfloat16", "float32"):
            half = dtype == "bfloat16"
            make = functools.partial(torch.empty, shape, dtype=getattr(torch, dtype), device="meta")
            label = f"{'x'.join(map(str, shape))} {dtype}"
            # every kernel at every plan, and every link at a plan of each kind
            names = both_ways if shape in ANYWHERE else main if half else ("softmax", "entmax15")
            for name in maps if half and shape[-1] in (128, 8192, 128_256) else names:
                mapping = maps[name]

                def forward(mapping: Any = mapping, make: Any = make) -> None:
                    engine.ENGINE.forward(mapping, make(), None, make())

                def backward(mapping: Any = mapping, make: Any = make) -> None:
                    _, saved = engine.ENGINE.forward_saving(mapping, make())
                    engine.ENGINE.vjp(mapping, make(), make(), make(), saved)

                def loss(mapping: Any = mapping, make: Any = make, rows: int = shape[0]) -> None:
                    t = torch.empty(rows, dtype=torch.int64, device="meta")
                    x = make()
                    _, state, _ = engine.ENGINE.index_loss(mapping, x, t, save=True)
                    engine.ENGINE.index_loss_grad(mapping, x, t, torch.empty(rows, device="meta"), state)

                everywhere = half and name in both_ways
                yield Case(f"forward/{name} {label}", forward, everywhere)
                if name in both_ways or shape[-1] > 128:
                    yield Case(f"backward/{name} {label}", backward, everywhere)
                if (half and name in both_ways) or (name in main and shape[-1] == 8192):
                    yield Case(f"loss/{name} {label}", loss, name in ("softmax", "entmax15") and half)


def attention_cases() -> Iterator[Case]:
    import torch

    from anymax.kernels.triton import attention

    links = {
        "softmax": ("softmax", 1, 0.0),
        "entmax15": ("power", 2, 0.5),
        "sparsemax": ("power", 1, 1.0),
        "entmax 1.3": ("any", 1, 0.3),
    }
    for d in (64, 128):
        for name, (link, power, param) in links.items():
            job = attention.Job(link, power, param, d**-0.5, 0.0, True, -1, -1, 0, 0.0, False, False)
            make = functools.partial(torch.empty, dtype=torch.bfloat16, device="meta")

            def both(job: Any = job, make: Any = make, d: int = d) -> None:
                q, k, v = (make(1, 8, 8192, d) for _ in range(3))
                out, saved = attention.forward(job, q, k, v, {}, True)
                attention.backward(job, q, k, v, {}, out, saved, out, {"q", "k", "v"})

            def one(job: Any = job, make: Any = make, d: int = d) -> None:
                free = job._replace(causal=False)
                attention.forward(free, make(1, 32, 1, d), make(1, 8, 32768, d), make(1, 8, 32768, d), {}, False)

            yield Case(f"attention/{name} d{d}", both, everywhere=name in ("softmax", "entmax15"))
            yield Case(f"decoding/{name} d{d}", one, everywhere=name in ("softmax", "entmax15"))


def ragged_cases() -> Iterator[Case]:
    """Segments of the lengths that are launched together; what is beside a tile of scores does not depend on how many there are."""
    import numpy as np
    import torch

    import anymax as am
    from anymax.kernels.triton import ragged

    maps = {
        "softmax": am.Softmax(),
        "sparsemax": am.Sparsemax(),
        "entmax15": am.Entmax(1.5),
        "top-k": am.SparseSoftmax(k=5),
    }
    for longest in (16, 1024, 16_384, 40_000):
        lengths = np.full(80_000 // longest + 1, longest)
        for heads in (1, 8):
            for name, mapping in maps.items():

                def both(mapping: Any = mapping, lengths: Any = lengths, heads: int = heads) -> None:
                    rows = (am.Segments.of(lengths=lengths), 0)
                    x = torch.zeros((int(lengths.sum()), heads), dtype=torch.bfloat16)
                    ragged.RAGGED.forward(mapping, x, rows)
                    ragged.RAGGED.vjp(mapping, x, x, x, rows)

                everywhere = heads > 1 and name in ("softmax", "entmax15")
                yield Case(f"ragged/{name} up to {longest} x {heads} heads", both, everywhere=everywhere)


def layer_cases() -> Iterator[Case]:
    """Output layers of 4,096 rows and features and 128,256 classes."""
    import torch

    import anymax as am
    from anymax.kernels import triton as engine
    from anymax.kernels.triton import layer
    from anymax.linear.layer import Layer

    for dtype in (torch.bfloat16, torch.float32):
        make = functools.partial(torch.empty, dtype=dtype, device="meta")

        def operands(make: Any = make) -> tuple[Any, Any]:
            x, weight = make(4096, 4096), make(128_256, 4096)
            return Layer(x, weight, None, None, am.Softmax(), (4096,), x.dtype), make(4096, dtype=torch.int64)

        def softmax(make: Any = make, operands: Any = operands) -> None:
            of, t = operands()
            level, g = make(4096, dtype=torch.float32), make(4096, 2, dtype=torch.float32)
            layer.two_of(of, t)
            layer.slopes(of, t, level, g, None, None, 0, 2624, make(4096 * 2624))

        def products(make: Any = make, operands: Any = operands) -> None:
            of, _ = operands()
            index, value = make(80_000, dtype=torch.int64), make(80_000, dtype=torch.float32)
            layer.add_products(make(128_256, 4096), make(128_257, dtype=torch.int64), index, value, of.x)

        said = str(dtype)[6:]
        half = dtype == torch.bfloat16
        yield Case(f"layer/softmax {said}", softmax, everywhere=half)
        yield Case(f"layer/support {said}", products, everywhere=half)
        for name, mapping in (
            ("entmax15", am.Entmax(1.5)),
            ("sparsemax", am.Sparsemax()),
            ("entmax 1.7", am.Entmax(1.7)),
        ):

            def listed(mapping: Any = mapping, operands: Any = operands) -> None:
                known: Any = engine.link_of(mapping)
                found = layer.link_of(known)
                assert found is not None
                layer.candidates(operands()[0], found, operands()[1], None)

            yield Case(f"layer/{name} {said}", listed, everywhere=half)


def cases() -> Iterator[Case]:
    yield from row_cases()
    yield from ragged_cases()
    yield from layer_cases()
    yield from attention_cases()


def launched(case: Case, target: str) -> list[Launch]:
    """What a case launches on such a device."""
    from anymax.kernels.triton import attention, layer

    before = attention._processors, layer._processors
    attention._processors = layer._processors = lambda device: PROCESSORS  # of a device that is not there
    try:
        with recorded(TARGETS[target][2]) as launches:
            case.call()
    finally:
        attention._processors, layer._processors = before
    return launches


def read(case: Case, target: str) -> list[tuple[Launch, Figures]]:
    """The kernels that a case launches, compiled."""
    return [(launch, figures(compiled(target, launch), target)) for launch in launched(case, target)]


# -- the table ----------------------------------------------------------------------------------------------------------------------

COLUMNS = (
    "case", "kernel", "plan [R, K, L]", "warps", "registers", "stack B", "shared", "barriers", "instructions", "fp64 in loops",
    "loads 128 / all", "programs",
)  # fmt: skip


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
