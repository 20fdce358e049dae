"""The cases of attention: our blocks and our linear form beside torch's fused softmax attention, in time and in memory."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import anymax

from .cases import OURS, WIDEST, Bar, Case, Workload, differs

MAPS = {
    "softmax": anymax.Softmax(),
    "sparsemax": anymax.Sparsemax(),
    "entmax15": anymax.Entmax(1.5),
    "entmax 1.25": anymax.Entmax(1.25),
    "taylor": anymax.Taylor(2),
}
SDPA = "torch SDPA, softmax"
MEGABYTES = 300
_PEAK = """
import resource, torch, anymax
q, k, v = (torch.randn({shape}, requires_grad={grad}) for _ in range(3))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
out = anymax.attention(q, k, v, {mapping})
out.sum().backward() if {grad} else None
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@functools.lru_cache(maxsize=1)
def heads(shape: tuple[int, ...], grad: bool = False, dtype: str = "float32") -> tuple[Any, Any, Any]:
    import torch

    generator = torch.Generator().manual_seed(shape[-2])
    given = (torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for _ in range(3))
    q, k, v = (a.requires_grad_(grad) for a in given)
    return q, k, v


def _options(case: Case) -> dict[str, Any]:
    causal = "causal" in case.note
    return {"is_causal": causal, "implementation": "linear" if "linear" in case.note else None}


def forward(case: Case) -> Workload:
    import torch

    q, k, v = heads(case.shape)
    mapping, options = MAPS[case.map], _options(case)
    causal = options["is_causal"]
    contenders = {
        OURS: lambda: anymax.attention(q, k, v, mapping, **options),
        SDPA: lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal),
    }

    def check() -> str | None:
        """The last queries against the reference."""
        got = contenders[OURS]()[..., -8:, :]
        last = {"is_causal": causal, "offset": case.shape[-2] - 8, "implementation": "reference"}
        want = anymax.attention(q[..., -8:, :], k, v, mapping, **last)
        return differs(got, want, case.dtype)

    return Workload(contenders, check, options["implementation"] or "blockwise", 0, torch.no_grad())


def both(case: Case) -> Workload:
    import torch

    q, k, v = heads(case.shape, True, case.dtype)
    g = torch.randn_like(q)
    mapping, options = MAPS[case.map], _options(case)
    causal = options["is_causal"]
    last = {"is_causal": causal, "offset": case.shape[-2] - 8, "implementation": "reference"}
    fused = torch.nn.functional.scaled_dot_product_attention
    contenders: dict[str, Callable[[], Any]] = {
        OURS: lambda: torch.autograd.grad(anymax.attention(q, k, v, mapping, **options), (q, k, v), g),
        SDPA: lambda: torch.autograd.grad(fused(q, k, v, is_causal=causal), (q, k, v), g),
    }

    def check() -> str | None:
        """The gradient of the queries needs no other query: a few of them against the reference."""
        got = contenders[OURS]()[0][..., -8:, :]
        part = q.detach()[..., -8:, :].clone().requires_grad_()
        out = anymax.attention(part, k, v, mapping, **last)
        return differs(got, torch.autograd.grad(out, part, g[..., -8:, :])[0], case.dtype)

    return Workload(
        contenders, check, options["implementation"] or ("blockwise" if case.shape[-2] > 256 else "reference")
    )


def memory(case: Case) -> Workload:
    """The time is that of `forward`; what is checked is the peak of the resident memory, in a process of its own."""
    work = forward(case)
    wrong = work.check

    def check() -> str | None:
        for grad in (False, True):
            code = _PEAK.format(shape=case.shape, mapping=f"anymax.{MAPS[case.map]!r}", grad=grad)
            peak = float(
                subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
            )
            if peak > MEGABYTES:
                return f"{peak:.0f} MB {'with gradients' if grad else 'forward'} where {MEGABYTES} are allowed"
        return wrong()

    work.check = check
    return work


def lengths(case: Case) -> Workload:
    """The same number of positions in sequences of two lengths: linear means that they cost the same."""
    import torch

    q, k, v = heads(case.shape)
    causal = "causal" in case.note
    short = 4096

    def pieces() -> None:
        for start in range(0, case.shape[-2], short):
            anymax.linear_attention(*(a[..., start : start + short, :] for a in (q, k, v)), is_causal=causal)

    contenders = {
        f"L={case.shape[-2]:,}": lambda: anymax.linear_attention(q, k, v, is_causal=causal),
        f"L={short:,}, {case.shape[-2] // short} times": pieces,
    }
    return Workload(contenders, lambda: None, "linear", 0, torch.no_grad())


def attention_cases() -> Iterator[Case]:
    for length in (1024, 4096):
        for name in ("entmax15", "sparsemax", "entmax 1.25"):
            for note in ("", "causal"):
                limit = 1.3 if (name, length, note) == ("entmax15", 4096, "") else None
                yield Case("attention", name, (1, 1, length, 64), forward, (Bar(SDPA, at_most=limit),), note=note)
        yield Case("attention", "entmax15", (1, 1, length, 64), both, (Bar(SDPA),), note="forward and backward")
    yield Case("attention", "entmax15", (8, 8, 256, 64), forward, (Bar(SDPA),))
    for shape in ((32, 12, 16, 32), (16, 12, 128, 64)):  # a small BERT on short sentences
        bar, way = (Bar(SDPA, at_most=1.0),), "forward and backward"
        yield Case("attention", "softmax", shape, both, bar, dtype="bfloat16", note=way)
    yield Case("attention", "entmax15", (1, 1, 16384, 64), memory, (Bar(SDPA),), note=f"peak below {MEGABYTES} MB")
    for length in (4096, 16384):
        for note in ("linear", "linear causal"):
            yield Case("attention", "taylor", (1, 1, length, 64), forward, (Bar(SDPA, at_most=1.0),), note=note)
            both_ways = f"{note}, forward and backward"
            yield Case("attention", "taylor", (1, 1, length, 64), both, (Bar(SDPA),), note=both_ways)
    yield Case(
        "attention", "taylor", (1, 1, 65536, 64), lengths, (Bar(WIDEST, at_most=1.25),), note="linear in the length"
    )
