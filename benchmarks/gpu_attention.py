"""The GPU cases of attention: our kernels beside FlashAttention-2 through torch and beside AdaSplash, on scores of the same sparsity.

Local scores: queries and keys are waves of their place, so that a query sees the keys around its own; the share of the sequence that it
reaches is the same at every length, and with it the share of blocks without any probability. Scores everywhere: queries and keys are
random, no block is empty, and no kernel has anything to skip. Decoding is the last query against all keys.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import anymax

from .cases import OURS, TOLERANCE, Bar, Case, Workload, differs
from .gpu_clock import DEVICE

MAPS = {
    "softmax": anymax.Softmax(),
    "entmax15": anymax.Entmax(1.5),
    "sparsemax": anymax.Sparsemax(),
    "entmax 1.3": anymax.Entmax(1.3),
}
LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
FLASH, ADASPLASH, FLEX = "torch SDPA, FlashAttention-2", "adasplash", "FlexAttention"
SDPA, WHOLE = "torch SDPA, softmax", "keys in one part"
CACHES = (4096, 32768, 131072)
REACH = {"reach 1/2": 0.5, "reach 1/8": 0.125, "reach 1/32": 0.03125}
EVERYWHERE = "scores everywhere"
SPREAD = 2.0  # the standard deviation of scores everywhere


@functools.lru_cache(maxsize=1)
def heads(shape: tuple[int, ...], reach: float | None) -> tuple[Any, Any, Any]:
    """Queries, keys and values; `reach` None: scores everywhere."""
    import torch

    draw = functools.partial(torch.randn, generator=DEVICE.generator(shape[-2]), device=DEVICE.kind)
    if reach is None:
        return tuple((scale * draw(shape)).to(torch.bfloat16) for scale in (SPREAD, 1.0, 1.0))  # type: ignore[return-value]
    length, d = shape[-2:]
    place = torch.arange(length, device=DEVICE.kind, dtype=torch.float64)[:, None]
    phase = place * torch.linspace(0, math.pi / (reach * length), d // 2, device=DEVICE.kind, dtype=torch.float64)
    waves = torch.cat([phase.cos(), phase.sin()], -1).float()
    # a score of 16 at a query's own place
    q, k = (waves * math.sqrt(16 * d**0.5 / (d // 2)) + 0.1 * draw(shape) for _ in range(2))
    return tuple(a.to(torch.bfloat16) for a in (q, k, draw(shape)))  # type: ignore[return-value]


def _reach(case: Case) -> float | None:
    return REACH.get(case.note.split(", ")[0])


def empty_blocks(case: Case) -> float:
    """The share of blocks under the causal mask that have no probability."""
    from anymax.kernels.triton import attention, triton_link

    q, k, v = heads(case.shape, _reach(case))
    form = attention.attention_form(triton_link(MAPS[case.map]))
    job = attention.Job(*form, case.shape[-1] ** -0.5, 0.0, True, -1, -1, 0, 0.0, False, False)
    _, saved = attention.forward(job, q, k, v, {}, True)
    plan, _ = attention.sizes(job, q, k, v, True)
    tall, wide = saved.counts.shape[-1], -(-case.shape[-2] // plan.N)
    seen = sum(min(wide, -(-(m + 1) * plan.M // plan.N)) for m in range(tall))
    return 1.0 - float(saved.counts.sum(-1).double().mean()) / seen


def _last(case: Case, q: Any, k: Any, v: Any) -> Any:
    """The last queries by the reference."""
    options = {"is_causal": True, "offset": case.shape[-2] - 8, "implementation": "reference"}
    return anymax.attention(q[..., -8:, :].float(), k.float(), v.float(), MAPS[case.map], **options)


def _contenders(case: Case, q: Any, k: Any, v: Any) -> dict[str, Callable[[], Any]]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def flash() -> Any:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    out: dict[str, Callable[[], Any]] = {
        OURS: lambda: anymax.attention(q, k, v, MAPS[case.map], is_causal=True, implementation="triton"),
        FLASH: flash,
    }
    if FLEX in case.note:
        out[FLEX] = _flex(case, q, k, v)
    if ADASPLASH in case.needs:
        adasplash = importlib.import_module("adasplash").adasplash
        out[ADASPLASH] = lambda: adasplash(q, k, v, alpha=1.5, is_causal=True)
    return out


def _flex(case: Case, q: Any, k: Any, v: Any) -> Callable[[], Any]:
    """FlexAttention, compiled, with a block mask of causal order."""
    import torch
    from torch.nn.attention import flex_attention as flex

    length = case.shape[-2]
    mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=DEVICE.kind)
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=mask)


def forward(case: Case) -> Workload:
    import torch

    q, k, v = heads(case.shape, _reach(case))
    contenders = _contenders(case, q, k, v)

    def check() -> str | None:
        if case.map != "softmax":
            print(f"# {case.name}: {empty_blocks(case):.0%} of the blocks are empty", flush=True)
        return differs(contenders[OURS]()[..., -8:, :], _last(case, q, k, v), case.dtype)

    return Workload(contenders, check, "triton", 0, torch.no_grad())


def both(case: Case) -> Workload:
    import torch

    q, k, v = (a.clone().requires_grad_() for a in heads(case.shape, _reach(case)))
    g = torch.randn_like(q)
    forwards = _contenders(case, q, k, v)
    contenders = {
        name: functools.partial(lambda f: torch.autograd.grad(f(), (q, k, v), g), f) for name, f in forwards.items()
    }

    def check() -> str | None:
        """The gradient of the queries needs no other query."""
        got = contenders[OURS]()[0][..., -8:, :]
        part = q.detach()[..., -8:, :].float().requires_grad_()
        want = torch.autograd.grad(_last(case, part, k.detach(), v), part, g[..., -8:, :].float())[0]
        # a difference of two sums of rounded products: twice what a value is allowed
        return differs(got, want, case.dtype, TOLERANCE[case.dtype] * float(want.abs().max()))

    return Workload(contenders, check, "triton")


def cache(case: Case) -> tuple[Any, Any, Any]:
    """The last query of every head, and the keys and values of as many heads as the note says."""
    q, k, v = heads(case.shape, _reach(case))
    shared = int(case.note.split(", ")[1].split()[0])
    return q[..., -1:, :].contiguous(), k[:, :shared].contiguous(), v[:, :shared].contiguous()


def decoding(case: Case) -> Workload:
    import torch

    from anymax.kernels.triton import attention_plans as plans

    q, k, v = cache(case)

    def ours() -> Any:
        return anymax.attention(q, k, v, MAPS[case.map], enable_gqa=True, implementation="triton")

    def whole() -> Any:
        plans.forced_split.append(None)
        try:
            return ours()
        finally:
            plans.forced_split.pop()

    def sdpa() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    contenders = {OURS: ours, WHOLE: whole, SDPA: sdpa}

    def check() -> str | None:
        exact = (a.float() for a in (q, k, v))
        want = anymax.attention(*exact, MAPS[case.map], enable_gqa=True, implementation="reference")
        return differs(contenders[OURS](), want, case.dtype) or differs(contenders[WHOLE](), want, case.dtype)

    return Workload(contenders, check, "triton", 0, torch.no_grad())


def decoding_cases() -> Iterator[Case]:
    make = functools.partial(
        Case, "gpu decoding", dtype="bfloat16", distribution="local", needs=("torch", "triton"), setup=decoding
    )
    for length in (1024,) if DEVICE.dry else CACHES:
        for count, shared in ((8, 8), (32, 8), (32, 32)):
            for d in (64, 128):
                both = (count, d) == (32, 128)
                for name in ("entmax15", "sparsemax", "softmax") if both else ("entmax15",):
                    bars = (Bar(SDPA), Bar(WHOLE, at_least=1.0 if length > 4096 else None))
                    note = f"reach 1/8, {shared} heads of keys"
                    yield make(map=name, shape=(1, count, length, d), bars=bars, note=note)


def everywhere_cases() -> Iterator[Case]:
    """Softmax too, whose blocks are never empty; FlexAttention at one length, since each shape takes it some time to compile."""
    make = functools.partial(Case, "gpu attention", dtype="bfloat16", distribution="normal", needs=("torch", "triton"))
    for length in (64,) if DEVICE.dry else (4096, 16384):
        for name in ("softmax", "entmax15", "sparsemax"):
            for what, setup in (("", forward), (", forward and backward", both)):
                for d in (64, 128):
                    yield make(
                        map=name, shape=(1, 8, length, d), setup=setup, bars=(Bar(FLASH),), note=EVERYWHERE + what
                    )
                if length == 4096 and name != "sparsemax":
                    note = f"{EVERYWHERE}{what}, beside {FLEX}"
                    yield make(map=name, shape=(1, 8, length, 64), setup=setup, bars=(Bar(FLEX),), note=note)


def attention_cases() -> Iterator[Case]:
    yield from everywhere_cases()
    make = functools.partial(Case, "gpu attention", dtype="bfloat16", distribution="local")
    for length in (64,) if DEVICE.dry else LENGTHS:
        shape = (1, 8, length, 64)
        for reach, share in REACH.items():
            faster = 1.0 if share <= 0.125 else None  # 60 % of the blocks are empty, and more
            peers = {"entmax15": (None, ADASPLASH), "sparsemax": (None,), "entmax 1.3": (None,)}
            for name, packages in peers.items():
                for package in packages:
                    needs = ("torch", "triton", *([package] if package else []))
                    beside = f", beside {package}" if package else ""
                    for what, setup, least in (("", forward, 1.3), (", forward and backward", both, 1.0)):
                        bar = Bar(package, at_least=least) if package else Bar(FLASH, at_least=faster)
                        yield make(
                            map=name, shape=shape, setup=setup, bars=(bar,), note=reach + what + beside, needs=needs
                        )
