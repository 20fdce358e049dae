"""`python -m benchmarks --device cuda`: the GPU cases, their peers and their bars, timed with events of CUDA."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import anymax

from .cases import OURS, Bar, Case, Workload, calls, check_forward, differs, engine, few, rounding
from .gpu_attention import attention_cases, decoding_cases
from .measure import Plan, Timing

SHAPES = ((4096, 1024), (4096, 8192), (4096, 32768), (4096, 128256), (32, 1_000_000))
DTYPES = ("float32", "bfloat16")
SPARSE = ("sparsemax", "entmax15", "sparse_softmax")


@functools.lru_cache(maxsize=1)
def scores(shape: tuple[int, ...], dtype: str) -> Any:
    import torch

    generator = torch.Generator("cuda").manual_seed(shape[-1])
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32).to(getattr(torch, dtype))


def _moved(x: Any) -> int:
    return 2 * x.numel() * x.element_size()


def forward(case: Case) -> Workload:
    import torch

    x = scores(case.shape, case.dtype)
    function, mapping = calls(case.map, case.n)
    out = torch.empty_like(x)
    contenders: dict[str, Callable[[], Any]] = {
        OURS: lambda: function(x, out=out),
        "copy": lambda: out.copy_(x),
        "torch.softmax": lambda: torch.softmax(x, -1, out=out),
    }
    if case.map == "softmax":
        compiled = torch.compile(functools.partial(torch.softmax, dim=-1), dynamic=False)
        contenders["torch.compile(softmax)"] = lambda: compiled(x)
    if case.map == "sparse_softmax":
        contenders["torch.topk"] = lambda: torch.topk(x, 50, -1)
    return Workload(
        contenders, check_forward(case, function, x, contenders[OURS]), engine("forward", mapping, x), _moved(x)
    )


def backward(case: Case) -> Workload:
    import torch

    x = scores(case.shape, case.dtype).clone().requires_grad_()
    g = torch.randn_like(x)
    function, mapping = calls(case.map, case.n)
    p, q, frozen = function(x), torch.softmax(x, -1), x.detach()
    out = torch.empty_like(frozen)
    contenders = {
        OURS: lambda: torch.autograd.grad(p, x, g, retain_graph=True),
        "torch.softmax": lambda: torch.autograd.grad(q, x, g, retain_graph=True),
        "copy": lambda: out.copy_(frozen),
    }

    def check() -> str | None:
        pick = few(len(x))
        want = anymax.kernels.reference.vjp(mapping, frozen[pick], p.detach()[pick], g[pick])
        return differs(contenders[OURS]()[0][pick], want, case.dtype)

    return Workload(contenders, check, engine("vjp", mapping, frozen), _moved(x))


def loss(case: Case) -> Workload:
    import torch

    x = scores(case.shape, case.dtype).clone().requires_grad_()
    t = torch.randint(case.n, case.shape[:1], device="cuda")
    function, mapping = calls(case.map, case.n)
    frozen = x.detach()
    out = torch.empty_like(frozen)
    contenders = {
        OURS: lambda: torch.autograd.grad(function(x, t), x),
        "F.cross_entropy": lambda: torch.autograd.grad(torch.nn.functional.cross_entropy(x, t), x),
        "copy": lambda: out.copy_(frozen),
    }

    def check() -> str | None:
        pick = few(len(x))
        part = frozen[pick].requires_grad_()
        with anymax.use("reference"):
            want = function(part.detach(), t[pick], reduction="none")
        return differs(function(frozen, t, reduction="none")[pick], want, case.dtype, rounding(part.detach()))

    return Workload(contenders, check, engine("index_loss", mapping, frozen), _moved(x))


def package(case: Case) -> Workload:
    """Against the one package that the case is noted with."""
    x = scores(case.shape, case.dtype)
    function, mapping = calls(case.map, case.n)
    contenders = {OURS: lambda: function(x), case.bars[0].peer: _peer(case, x)}
    return Workload(
        contenders, check_forward(case, function, x, contenders[OURS]), engine("forward", mapping, x), _moved(x)
    )


def _peer(case: Case, x: Any) -> Callable[[], Any]:
    if case.note == "entmax":
        import entmax

        f = entmax.sparsemax if case.map == "sparsemax" else entmax.entmax15
        return lambda: f(x, -1)
    if case.note == "adasplash":
        from adasplash import triton_entmax

        alpha = 2.0 if case.map == "sparsemax" else 1.5
        return lambda: triton_entmax(x, alpha=alpha)
    from liger_kernel.transformers import functional

    f = functional.liger_sparsemax if case.map == "sparsemax" else functional.liger_softmax
    return lambda: f(x)


def table() -> list[Case]:
    return [*_cases(), *attention_cases(), *decoding_cases()]


def _cases() -> Iterator[Case]:
    make = functools.partial(Case, needs=("torch", "triton"))
    for shape in SHAPES:
        share = 0.9 if shape[-1] <= 32768 else 0.85
        for dtype in DTYPES:
            for name in ("softmax", *SPARSE, "entmax 1.25"):
                bars = [Bar("copy", at_least=0.7 if name == "entmax 1.25" else share), Bar("torch.softmax")]
                bars += [Bar("torch.compile(softmax)")] if name == "softmax" else []
                bars += [Bar("torch.topk")] if name == "sparse_softmax" else []
                yield make("gpu forward", name, shape, forward, tuple(bars), dtype=dtype)
            for name in SPARSE:
                yield make("gpu backward", name, shape, backward, (Bar("torch.softmax", at_least=1.5),), dtype=dtype)
            for name in ("sparsemax_loss", "entmax15_loss", "sparse_softmax_loss", "cross_entropy"):
                yield make("gpu loss", name, shape, loss, (Bar("F.cross_entropy", at_least=1.5),), dtype=dtype)
    for shape in SHAPES:
        for name, packages in (
            ("softmax", ("liger_kernel",)),
            ("sparsemax", ("liger_kernel", "entmax", "adasplash")),
            ("entmax15", ("entmax", "adasplash")),
        ):
            for needed in packages:
                bar = Bar(f"{needed} {name}", at_least={"entmax": 10.0, "adasplash": 2.0}.get(needed))
                yield make("gpu package", name, shape, package, (bar,), note=needed, needs=("torch", "triton", needed))


def measure(contenders: dict[str, Callable[[], Any]], plan: Plan, context: Any = None) -> Timing:
    """As `measure.measure`, on the device's own clock: contenders take turns, one synchronisation a round."""
    import torch

    inner = {}
    for name, call in contenders.items():
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        inner[name] = max(1, min(50, round(plan.sample / max(time.perf_counter() - start, 1e-6))))
    rows: list[list[float]] = []
    start = time.perf_counter()
    while len(rows) < plan.least or (time.perf_counter() - start < plan.budget and len(rows) < 100):
        marks = []
        for name, call in contenders.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(inner[name]):
                call()
            end.record()
            marks.append((begin, end, inner[name]))
        torch.cuda.synchronize()
        rows.append([max(begin.elapsed_time(end), 1e-6) * 1e-3 / count for begin, end, count in marks])
    return Timing(dict(zip(contenders, map(list, zip(*rows)))), 0, False, None)
