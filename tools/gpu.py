"""Everything that wants a GPU, in one call of ten minutes: tests, tuning, measurements. `python tools/gpu.py [folder for the results]`;
attention is a call of its own, `python tools/gpu.py --attention [folder]`, and so is decoding, `--decoding`.

The steps have a time limit each, write their whole output to the folder, and leave one line for the table that is printed last.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START = time.monotonic()
TOTAL = 570  # seconds

PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--maxfail=20"]
BENCH = [sys.executable, "-m", "benchmarks", "--device", "cuda", "--json", "--no-save"]
SHAPES = ((4096, 1024), (4096, 8192), (4096, 32768), (4096, 128256), (32, 1_000_000))


def left() -> float:
    return max(5.0, TOTAL - (time.monotonic() - START))


def step(folder: Path, name: str, words: list[str], limit: float) -> str:
    """The last line that a command printed; its output goes to a file."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    log = folder / f"{name}.log"
    begin = time.monotonic()
    with log.open("w") as file:
        try:
            code = subprocess.run(
                words,
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=min(limit, left()),
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = "out of time"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{name:9} {time.monotonic() - begin:4.0f} s  [{code}] {lines[-1][:150] if lines else ''}"


def tune() -> None:
    """The fastest plan of each kernel at each shape: lines of JSON, the plan that is in force first."""
    import torch

    import anymax
    from anymax.kernels import triton as engine
    from anymax.kernels.triton import plans

    def seconds(call, repeat: int = 5) -> float:
        for _ in range(2):
            call()
        times = []
        for _ in range(repeat):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3)
        return sorted(times)[repeat // 2]

    def candidates(n: int):
        block = 1 << (n - 1).bit_length()
        for warps in (4, 8, 16, 32):
            for vector in (2, 4, 8):
                lanes = warps * 32 * vector
                if block <= 65536 and lanes <= block and block // (warps * 32) <= 64:
                    yield plans.Plan(1, block // lanes, lanes, True, warps)
                if n > 4096 and warps > 4:
                    for k in (2, 4, 8):
                        if k * vector <= 32:
                            yield plans.Plan(1, k, lanes, False, warps)
        if block <= 2048:
            for rows in (2, 4, 8):
                yield plans.Plan(rows, 1, block, True, max(1, min(8, rows * block // 256)))

    jobs = {
        "dense": ("forward", anymax.Softmax()), "separable": ("forward", anymax.Entmax(1.5)),
        "truncated": ("forward", anymax.SparseSoftmax(k=50)), "backward": ("vjp", anymax.Sparsemax()),
    }  # fmt: skip
    stop = time.monotonic() + float(os.environ["TUNE_SECONDS"])
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(shape, device="cuda", dtype=dtype)
            out, g = torch.empty_like(x), torch.randn_like(x)
            p = engine.forward(anymax.Sparsemax(), x)
            copy = seconds(lambda x=x, out=out: out.copy_(x))
            for kernel, (op, mapping) in jobs.items():
                if time.monotonic() > stop:
                    print("out of time: the last lines are missing")
                    return
                if op == "forward":
                    call = lambda m=mapping, x=x, out=out: engine.forward(m, x, None, out)  # noqa: E731
                else:
                    call = lambda m=mapping, x=x, p=p, g=g: engine.vjp(m, x, p, g)  # noqa: E731
                now = seconds(call)
                tried = {}
                for plan in candidates(shape[-1]):
                    plans.forced[kernel] = plan
                    try:
                        tried[plan] = seconds(call, 3)
                    except Exception as error:  # out of registers or shared memory: not a plan
                        print(f"# {kernel} {plan}: {type(error).__name__}")
                    finally:
                        plans.forced.clear()
                    if time.monotonic() > stop:
                        break
                best = min(tried, key=tried.__getitem__) if tried else None
                print(
                    json.dumps(
                        {
                            "kernel": kernel, "shape": shape, "dtype": str(dtype)[6:], "copy_ms": copy * 1e3,
                            "now_of_copy": round(copy / now, 3),
                            "best_of_copy": round(copy / tried[best], 3) if best else None, "best": str(best),
                        }
                    ),
                    flush=True,
                )  # fmt: skip


def milliseconds(call: Callable[[], object], times: int) -> float:
    """Of one call, after one that is not timed."""
    import torch

    call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / times


def tune_blocks() -> None:
    """The fastest tiles of attention for heads of each width: lines of JSON, the tile that is in force first."""
    import itertools

    import torch

    import anymax
    from anymax.kernels.triton import plans
    from benchmarks.gpu_attention import heads

    stop = time.monotonic() + float(os.environ["TUNE_SECONDS"])
    for d in (64, 128, 256):
        q, k, v = (a.clone().requires_grad_() for a in heads((1, 8, 16384, d), 0.125))
        g = torch.randn_like(q)
        call = functools.partial(anymax.attention, q, k, v, anymax.Entmax(1.5), is_causal=True, implementation="triton")
        now = plans.blocks(d, 2, 16384, False, False)
        others = (plans.Blocks(*b) for b in itertools.product((64, 128), (32, 64, 128), (4, 8), (1, 2, 3)))
        for tile in (now, *others):
            if time.monotonic() > stop:
                print("out of time: the last lines are missing")
                return
            plans.forced_blocks.append(tile)
            try:
                with torch.no_grad():
                    alone = milliseconds(call, 3)
                line = {
                    "d": d,
                    "tile": str(tile),
                    "now": tile == now,
                    "forward_ms": alone,
                    "both_ms": milliseconds(lambda c=call, i=(q, k, v), g=g: torch.autograd.grad(c(), i, g), 3),
                }
                print(json.dumps(line), flush=True)
            except Exception as error:  # out of registers or shared memory: not a tile
                print(f"# {d} {tile}: {type(error).__name__}")
            finally:
                plans.forced_blocks.clear()


def tune_parts() -> None:
    """The fastest way to cut the keys in decoding: lines of JSON, the way that is in force first."""
    import dataclasses
    import itertools

    import torch

    import anymax
    from anymax.kernels.triton import plans
    from benchmarks.gpu_attention import graphed, heads

    stop = time.monotonic() + float(os.environ["TUNE_SECONDS"])
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for d, length in itertools.product((64, 128), (8192, 131072)):
        q, k, v = heads((1, 32, length, d), 0.125)
        q, k, v = q[..., -1:, :].contiguous(), k[:, :8].contiguous(), v[:, :8].contiguous()
        for name, mapping in (("entmax15", anymax.Entmax(1.5)), ("softmax", anymax.Softmax())):
            call = functools.partial(anymax.attention, q, k, v, mapping, enable_gqa=True, implementation="triton")
            now = plans.split(d, 2, 8, 4, 1, length, processors, False, name == "softmax")
            assert now is not None
            choices = itertools.product((32, 64, 128), (8, 16, 32, 64, 128), (2, 4, 8), (2, 3, 4))
            others = (dataclasses.replace(now, **dict(zip(("N", "parts", "warps", "stages"), c))) for c in choices)
            for cut in (now, *others):
                if time.monotonic() > stop:
                    print("out of time: the last lines are missing")
                    return
                plans.forced_split.append(cut)
                try:
                    with torch.no_grad():
                        line = {
                            "d": d,
                            "keys": length,
                            "map": name,
                            "cut": str(cut),
                            "now": cut == now,
                            "ms": milliseconds(graphed(call), 10),
                        }
                    print(json.dumps(line), flush=True)
                except Exception as error:  # out of registers or shared memory: not a way
                    print(f"# {d} {cut}: {type(error).__name__}")
                finally:
                    plans.forced_split.clear()


def table(folder: Path, name: str = "bench") -> list[str]:
    """One line a case of the benchmark: our time, its share of a copy, each bar."""
    lines = []
    try:
        text = (folder / f"{name}.log").read_text()
        rows = json.JSONDecoder().raw_decode(text[text.index("\n{\n") + 1 :])[0]["readings"]
    except (ValueError, KeyError, OSError):
        return [f"no measurements: see {name}.log"]
    for r in rows:
        share = f"{r['of_copy']:.0%} of copy" if r.get("of_copy") else ""
        ratio = f"{1 / r['ratio']:.2f}x {r['peer']}" if r.get("ratio") else r.get("message", "")
        lines.append(f"{r['verdict']:7} {r['group'][4:]:9} {r['name']:44} {share:12} {ratio}")
    return lines


def sanitize(folder: Path, file: str, words: str) -> str:
    """A few of the tests under compute-sanitizer: out-of-bounds and misaligned accesses, without torch's cache, which would hide them."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return f"{'sanitize':9} skipped: compute-sanitizer (of the CUDA toolkit) is not on this machine"
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    try:
        checked = [tool, "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all"]
        return step(folder, "sanitize", [*checked, *PYTEST, file, "-k", words], 100)
    finally:
        del os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"]


def rows(folder: Path) -> None:
    said = [
        step(folder, "parity", [*PYTEST, "tests/rows_triton.py"], 200),
        step(folder, "cuda", [*PYTEST, "tests/test_cuda.py", "-k", "not attention"], 100),
        sanitize(folder, "tests/rows_triton.py", "sparsemax and (layouts or lanes or parts)"),
        step(folder, "bench", [*BENCH, "--only", "gpu (forward|backward|loss|package)"], 200),
    ]
    os.environ["TUNE_SECONDS"] = str(max(20.0, left() - 40))
    said.append(step(folder, "tune", [sys.executable, __file__, "--tune"], left()))
    print("\n".join(table(folder)))
    tuned = [line for line in (folder / "tune.log").read_text().splitlines() if line.startswith("{")]
    for line in tuned:
        r = json.loads(line)
        shape, best = "x".join(map(str, r["shape"])), f"{r['best_of_copy'] or 0:.0%}"
        print(f"plan {r['kernel']:9} {shape:12} {r['dtype']:8} now {r['now_of_copy']:.0%} best {best} {r['best']}")
    print("\n".join(said))


DECODE = [*BENCH, "--only", "gpu decoding", "--budget", "0.3"]


def attention(folder: Path) -> None:
    said = [
        step(folder, "parity", [*PYTEST, "tests/attention_triton.py", "-k", "not keys_in_parts"], 150),
        step(folder, "cuda", [*PYTEST, "tests/test_cuda.py", "-k", "attention and not one_query"], 80),
        sanitize(folder, "tests/attention_triton.py", "sparsemax and not keys_in_parts"),
        step(folder, "decode", DECODE, 80),
        step(folder, "bench", [*BENCH, "--only", "gpu attention", "--budget", "0.5"], 180),
    ]
    os.environ["TUNE_SECONDS"] = str(max(20.0, left() - 30))
    said.append(step(folder, "tune", [sys.executable, __file__, "--tune-attention"], left()))
    print("\n".join(table(folder, "decode") + table(folder)))
    for d, tuned in groups(folder, "tune", "d"):
        for what in ("forward_ms", "both_ms"):
            now = next(r[what] for r in tuned if r["now"])
            best = min(tuned, key=lambda r: r[what])
            print(f"tile d = {d[0]:3} {what:10} now {now:.3f} best {best[what]:.3f} {best['tile']}")
    print("\n".join(said))


def decoding(folder: Path) -> None:
    said = [
        step(folder, "parity", [*PYTEST, "tests/attention_triton.py", "-k", "keys_in_parts"], 200),
        step(folder, "cuda", [*PYTEST, "tests/test_cuda.py", "-k", "one_query"], 60),
        sanitize(folder, "tests/attention_triton.py", "keys_in_parts and sparsemax"),
        step(folder, "decode", DECODE, 100),
    ]
    os.environ["TUNE_SECONDS"] = str(max(20.0, left() - 20))
    said.append(step(folder, "parts", [sys.executable, __file__, "--tune-parts"], left()))
    print("\n".join(table(folder, "decode")))
    for (d, keys, name), tuned in groups(folder, "parts", "d", "keys", "map"):
        now, best = next(r["ms"] for r in tuned if r["now"]), min(tuned, key=lambda r: r["ms"])
        print(f"parts d = {d:3} {keys:6} {name:8} now {now:.4f} best {best['ms']:.4f} {best['cut']}")
    print("\n".join(said))


def groups(folder: Path, name: str, *keys: str) -> list[tuple[tuple, list[dict]]]:
    """The lines of JSON that a step printed, by these of their entries; what is in force was measured in each."""
    found: dict[tuple, list[dict]] = {}
    for line in (folder / f"{name}.log").read_text().splitlines():
        if line.startswith("{"):
            r = json.loads(line)
            found.setdefault(tuple(r[k] for k in keys), []).append(r)
    return [(key, rows) for key, rows in sorted(found.items()) if any(r["now"] for r in rows)]


def main() -> None:
    words = sys.argv[1:]
    tuners = {"--tune": tune, "--tune-attention": tune_blocks, "--tune-parts": tune_parts}
    if len(words) == 1 and words[0] in tuners:
        tuners[words[0]]()
        return
    calls = {"--attention": attention, "--decoding": decoding}
    what = next((calls[word] for word in words if word in calls), rows)
    words = [word for word in words if word not in calls]
    folder = Path(words[0] if words else os.environ.get("OUT", ROOT / "benchmarks" / "results" / "gpu"))
    folder.mkdir(parents=True, exist_ok=True)
    what(folder)


if __name__ == "__main__":
    main()
