"""The GPU cases of token statistics: log p and entropy, a teacher's top classes and pairs of embeddings, without their scores.

The peers compute all scores. Liger's fused loss is beside `linear_loss` of softmax, at the shape of its own figures.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

import anymax

from .cases import OURS, Bar, Case, Workload, differs
from .gpu_clock import DEVICE
from .gpu_output_layers import operands
from .output_layers import step
from .token_statistics import KEPT, SCORES, TEACHER, TWO, policy

LIGER = "Liger's fused loss"
SIZE, FEATURES, PAIRS = (4096, 128_256), 4096, (8192, 512)
TINY = (12, 90), 24, (20, 8)


def _features() -> int:
    return TINY[1] if DEVICE.dry else FEATURES


def log_p_and_entropy(case: Case) -> Workload:
    rows, classes = case.shape
    x, weight, y = operands(rows, _features(), classes, "trained", case.dtype)
    g = torch.randn(rows, generator=DEVICE.generator(0), device=DEVICE.kind)
    support = None
    if "support" in case.note:
        kept = min(KEPT, classes // 2)
        ahead = torch.randint(
            1, max(2, classes // kept), (rows, kept), generator=DEVICE.generator(1), device=DEVICE.kind
        )
        ids = (y[:, None] + ahead.cumsum(1)) % classes
        ids[:, 0] = y
        support = ids.flatten(), torch.arange(0, ids.numel() + 1, kept, device=DEVICE.kind)

    def ours(x: Any, weight: Any) -> Any:
        return anymax.linear_log_prob_entropy(x, weight, y, support=support)

    def all_scores(x: Any, weight: Any) -> Any:
        log_p = (x @ weight.T).float().log_softmax(1)
        return log_p.gather(1, y[: len(x), None])[:, 0], -(log_p.exp() * log_p).sum(1)

    def check() -> str | None:
        if support is not None:
            return None
        with torch.no_grad():
            pairs = zip(ours(x, weight), all_scores(x[:64], weight))
            return next((wrong for a, b in pairs if (wrong := differs(a[:64], b, case.dtype))), None)

    ways = {OURS: ours, SCORES: all_scores}
    return Workload({name: functools.partial(policy, way, x, weight, g) for name, way in ways.items()}, check, "triton")


def teacher(case: Case) -> Workload:
    rows, classes = case.shape
    x, weight, _ = operands(rows, _features(), classes, "trained", case.dtype)
    with torch.no_grad():
        log_p, ids = (x.flip(0) @ weight.T).float().log_softmax(1).topk(min(TEACHER, classes // 2), 1)

    def all_scores() -> Any:
        student = (x @ weight.T).float().log_softmax(1).gather(1, ids)
        return (log_p.exp() * (log_p - student)).sum()

    def ours() -> Any:
        return anymax.linear_topk_kl(x, weight, ids, log_p).sum()

    def check() -> str | None:
        with torch.no_grad():
            return differs(ours() / rows, all_scores() / rows, case.dtype)

    calls = {OURS: ours, SCORES: all_scores}
    return Workload({name: functools.partial(step, call, x, weight) for name, call in calls.items()}, check, "triton")


def pairs(case: Case) -> Workload:
    n, features = case.shape
    draw = functools.partial(torch.randn, n, features, generator=DEVICE.generator(n), device=DEVICE.kind)
    kind = getattr(torch, case.dtype)
    a, b = (functional.normalize(draw(), dim=1).to(kind).requires_grad_() for _ in range(2))
    place = torch.arange(n, device=DEVICE.kind)

    def two() -> Any:
        first, second = 20.0 * a @ b.T, 20.0 * b @ a.T
        return 0.5 * (functional.cross_entropy(first, place) + functional.cross_entropy(second, place))

    def ours() -> Any:
        return anymax.contrastive_loss(a, b, temperature=0.05)

    calls = {OURS: ours, TWO: two}
    contenders = {name: functools.partial(step, call, a, b) for name, call in calls.items()}
    return Workload(contenders, lambda: differs(ours(), two(), case.dtype), "triton")


def fused(case: Case) -> Workload:
    x, weight, y = operands(case.shape[0], _features(), case.shape[1], "trained", case.dtype)
    calls: dict[str, Callable[[], Any]] = {
        OURS: lambda: anymax.linear_loss(x, weight, y),
        LIGER: lambda: _liger()(x, weight, y),
        SCORES: lambda: functional.cross_entropy(x @ weight.T, y),
    }

    def check() -> str | None:
        with torch.no_grad():
            return differs(calls[OURS](), calls[SCORES](), case.dtype)

    return Workload({name: functools.partial(step, call, x, weight) for name, call in calls.items()}, check, "triton")


def _liger() -> Callable[..., Any]:
    from liger_kernel.transformers import functional as liger

    return liger.liger_fused_linear_cross_entropy


def statistic_cases() -> Iterator[Case]:
    size, _, sides = TINY if DEVICE.dry else (SIZE, FEATURES, PAIRS)
    make = functools.partial(Case, "gpu token statistics", "softmax", needs=("torch", "triton"))
    for dtype in ("bfloat16", "float32"):
        for note, setup, most in (
            ("log p and entropy", log_p_and_entropy, 1.0), (f"support of {KEPT}", log_p_and_entropy, 0.1),
            (f"KL from the top {TEACHER}", teacher, 1.0),
        ):  # fmt: skip
            yield make(size, setup, (Bar(SCORES, at_most=most),), dtype=dtype, note=note)
        yield make(sides, pairs, (Bar(TWO, at_most=0.6),), dtype=dtype, note="pairs, both directions")
    if not DEVICE.dry:
        bars = Bar(LIGER, at_most=1.0), Bar(SCORES, at_most=1.0)
        yield make(
            (8192, size[1]), fused, bars, dtype="bfloat16", note="loss", needs=("torch", "triton", "liger_kernel")
        )
