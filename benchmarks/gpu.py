"""`python -m benchmarks --device cuda`: the GPU cases, their peers and their bars.

A contender is captured in a CUDA graph where it can be, so that the time of short rows is the device's and not Python's; its scores go
round a ring of buffers larger than the L2 cache, as a model's layers would.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import anymax

from .cases import OURS, Bar, Case, Workload, calls, check_forward, differs, engine, few, kept, rounding
from .gpu_attention import attention_cases, decoding_cases
from .gpu_clock import BUFFERS, DEVICE, RING, around

SHAPES = ((65536, 128), (4096, 1024), (4096, 8192), (4096, 32768), (4096, 50257), (4096, 128256), (32, 1_000_000))
FEW = ((1, 128_256), (16, 128_256), (64, 151_936))  # rows of a decoding model
TINY = ((6, 40), (3, 200))  # of a dry run
PEAKED = "normal x3"  # as the scores of a language model are
DTYPES = ("float32", "bfloat16")
SPARSE = ("sparsemax", "entmax15", "sparse_softmax")


def scores(shape: tuple[int, ...], dtype: str, count: int = 1) -> list[Any]:
    import torch

    generator, kind = DEVICE.generator(shape[-1]), getattr(torch, dtype)
    return [torch.randn(shape, generator=generator, device=DEVICE.kind).to(kind) for _ in range(count)]


def ring(case: Case) -> int:
    """How many buffers of scores a case goes round."""
    if DEVICE.dry:
        return 2
    bytes_each = case.size * (4 if case.dtype == "float32" else 2)
    return max(1, min(BUFFERS, -(-RING // bytes_each)))


def _moved(x: Any) -> int:
    return 2 * x.numel() * x.element_size()


def forward(case: Case) -> Workload:
    import torch

    xs = scores(case.shape, case.dtype, ring(case))
    for x in xs if case.distribution == PEAKED else ():
        x.mul_(3.0)
    outs = [torch.empty_like(x) for x in xs]
    function, mapping = calls(case.map, case.n)
    contenders: dict[str, Callable[[], Any]] = {
        OURS: around(lambda x, out: function(x, out=out), xs, outs),
        "copy": around(lambda x, out: out.copy_(x), xs, outs),
        "torch.softmax": around(lambda x, out: torch.softmax(x, -1, out=out), xs, outs),
    }
    if case.map == "softmax" and not DEVICE.dry:
        compiled = torch.compile(functools.partial(torch.softmax, dim=-1), dynamic=False)
        contenders["torch.compile(softmax)"] = around(compiled, xs)
    if case.map == "sparse_softmax":
        contenders["torch.topk"] = around(lambda x: torch.topk(x, kept(case.n), -1), xs)
    if case.map == "nucleus":
        contenders["torch.sort"] = around(lambda x: torch.sort(x, -1, descending=True), xs)
    check = check_forward(case, function, xs[0], lambda: function(xs[0], out=outs[0]))
    return Workload(contenders, check, engine("forward", mapping, xs[0]), _moved(xs[0]))


def backward(case: Case) -> Workload:
    import torch

    xs = [x.requires_grad_() for x in scores(case.shape, case.dtype, ring(case))]
    gs = [torch.randn_like(x) for x in xs]
    function, mapping = calls(case.map, case.n)
    ps, qs, frozen = [function(x) for x in xs], [torch.softmax(x, -1) for x in xs], [x.detach() for x in xs]
    outs = [torch.empty_like(x) for x in frozen]

    def gradient(p: Any, x: Any, g: Any) -> Any:
        return torch.autograd.grad(p, x, g, retain_graph=True)

    contenders = {
        OURS: around(gradient, ps, xs, gs),
        "torch.softmax": around(gradient, qs, xs, gs),
        "copy": around(lambda x, out: out.copy_(x), frozen, outs),
    }

    def check() -> str | None:
        pick = few(len(xs[0]))
        want = anymax.kernels.reference.ENGINE.vjp(mapping, frozen[0][pick], ps[0].detach()[pick], gs[0][pick])
        return differs(gradient(ps[0], xs[0], gs[0])[0][pick], want, case.dtype)

    return Workload(contenders, check, engine("vjp", mapping, frozen[0]), _moved(xs[0]))


def loss(case: Case) -> Workload:
    import torch

    xs = [x.requires_grad_() for x in scores(case.shape, case.dtype, ring(case))]
    t = torch.randint(case.n, case.shape[:1], device=DEVICE.kind)
    function, mapping = calls(case.map, case.n)
    frozen = [x.detach() for x in xs]
    outs = [torch.empty_like(x) for x in frozen]
    contenders = {
        OURS: around(lambda x: torch.autograd.grad(function(x, t), x), xs),
        "F.cross_entropy": around(lambda x: torch.autograd.grad(torch.nn.functional.cross_entropy(x, t), x), xs),
        "copy": around(lambda x, out: out.copy_(x), frozen, outs),
    }

    def check() -> str | None:
        pick = few(len(xs[0]))
        part = frozen[0][pick]
        with anymax.use("reference"):
            want = function(part, t[pick], reduction="none")
        return differs(function(frozen[0], t, reduction="none")[pick], want, case.dtype, rounding(part))

    return Workload(contenders, check, engine("index_loss", mapping, frozen[0]), _moved(xs[0]))


def call(case: Case) -> Workload:
    """A short row, whose kernels take less than the host needs to launch them."""
    import torch

    free = "backward" in case.note
    (x,) = scores(case.shape, case.dtype)
    x.requires_grad_(free)
    t = torch.zeros(case.shape[0], dtype=torch.int64, device=DEVICE.kind)
    function, mapping = calls(case.map, case.n)
    ours: Callable[[Any], Any] = (lambda x: function(x, t)) if case.bars[0].peer != "torch.softmax" else function
    peer: Callable[[Any], Any] = (
        (lambda x: torch.softmax(x, -1))
        if case.bars[0].peer == "torch.softmax"
        else (lambda x: torch.nn.functional.cross_entropy(x, t))
    )
    g = torch.ones_like(peer(x)).detach()

    def ways(f: Callable[[Any], Any]) -> Callable[[], Any]:
        return (lambda: torch.autograd.grad(f(x), x, g)) if free else lambda: f(x)

    return Workload(
        {OURS: ways(ours), case.bars[0].peer: ways(peer)},
        lambda: None,
        engine("forward", mapping, x),
        context=DEVICE.without_graphs(),
    )


def package(case: Case) -> Workload:
    """Against the one package that the case is noted with."""
    xs = scores(case.shape, case.dtype, ring(case))
    function, mapping = calls(case.map, case.n)
    contenders = {OURS: around(function, xs), case.bars[0].peer: around(_peer(case), xs)}
    check = check_forward(case, function, xs[0], lambda: function(xs[0]))
    return Workload(contenders, check, engine("forward", mapping, xs[0]), _moved(xs[0]))


def _peer(case: Case) -> Callable[[Any], Any]:
    if case.note == "entmax":
        import entmax

        f = entmax.sparsemax if case.map == "sparsemax" else entmax.entmax15
        return lambda x: f(x, -1)
    if case.note == "flashinfer":
        import torch
        from flashinfer import sampling

        return lambda x: sampling.top_p_renorm_probs(torch.softmax(x, -1, dtype=torch.float32), 0.9)
    if case.note == "adasplash":
        from adasplash import triton_entmax

        alpha = 2.0 if case.map == "sparsemax" else 1.5
        return lambda x: triton_entmax(x, alpha=alpha)
    from liger_kernel.transformers import functional

    f = functional.liger_sparsemax if case.map == "sparsemax" else functional.liger_softmax
    return f


def table() -> list[Case]:
    from .gpu_output_layers import layer_cases  # late: they import torch
    from .gpu_ragged import ragged_cases
    from .gpu_statistics import statistic_cases

    rows = [*_cases(), *nucleus_cases(), *call_cases()]
    return [*rows, *ragged_cases(), *layer_cases(), *statistic_cases(), *attention_cases(), *decoding_cases()]


def nucleus_cases() -> Iterator[Case]:
    """Sorting is what top-p does elsewhere; few long rows, as a decoding model has them."""
    make, bars = (
        functools.partial(Case, needs=("torch", "triton")),
        (Bar("torch.sort"), Bar("torch.softmax"), Bar("copy")),
    )
    for shape in TINY if DEVICE.dry else (*SHAPES[1:6], SHAPES[-1], *FEW):
        for dtype in DTYPES:
            for kind in ("normal", PEAKED):
                yield make("gpu forward", "nucleus", shape, forward, bars, kind, dtype=dtype)
        bar = Bar("flashinfer nucleus")
        yield Case(
            "gpu package", "nucleus", shape, package, (bar,), note="flashinfer", needs=("torch", "triton", "flashinfer")
        )
    for shape in TINY if DEVICE.dry else FEW:
        for name in ("softmax", *SPARSE):
            bars = Bar("torch.softmax"), Bar("copy"), *([Bar("torch.topk")] if name == "sparse_softmax" else [])
            yield make("gpu forward", name, shape, forward, bars, PEAKED, dtype="bfloat16")


def call_cases() -> Iterator[Case]:
    for name in ("softmax", "sparsemax", "entmax15", "sparse_softmax", "sparsemax_loss", "cross_entropy"):
        for note in ("", "forward and backward"):
            peer = "F.cross_entropy" if name in ("sparsemax_loss", "cross_entropy") else "torch.softmax"
            yield Case("gpu call", name, (8, 128), call, (Bar(peer),), note=note, needs=("torch", "triton"))


def _cases() -> Iterator[Case]:
    make = functools.partial(Case, needs=("torch", "triton"))
    for shape in TINY if DEVICE.dry else SHAPES:
        share = 0.9 if shape[-1] <= 32768 else 0.85
        for dtype in DTYPES:
            for name in ("softmax", *SPARSE, "entmax 1.25"):
                bars = [Bar("copy", at_least=0.7 if name == "entmax 1.25" else share), Bar("torch.softmax")]
                bars += [Bar("torch.compile(softmax)")] if name == "softmax" and not DEVICE.dry else []
                bars += [Bar("torch.topk")] if name == "sparse_softmax" else []
                yield make("gpu forward", name, shape, forward, tuple(bars), dtype=dtype)
            for name in SPARSE:
                yield make("gpu backward", name, shape, backward, (Bar("torch.softmax", at_least=1.5),), dtype=dtype)
            for name in ("sparsemax_loss", "entmax15_loss", "sparse_softmax_loss", "cross_entropy"):
                yield make("gpu loss", name, shape, loss, (Bar("F.cross_entropy", at_least=1.5),), dtype=dtype)
    for shape in TINY if DEVICE.dry else SHAPES:
        for name, packages in (
            ("softmax", ("liger_kernel",)),
            ("sparsemax", ("liger_kernel", "entmax", "adasplash")),
            ("entmax15", ("entmax", "adasplash")),
        ):
            for needed in packages:
                bar = Bar(f"{needed} {name}", at_least={"entmax": 10.0, "adasplash": 2.0}.get(needed))
                yield make("gpu package", name, shape, package, (bar,), note=needed, needs=("torch", "triton", needed))
