"""The cases of routers: scores to experts and weights, the loss of their load, the bias that evens it out; beside transformers."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import anymax
from anymax.routing import balance, load_balancing_loss, route

from .cases import OURS, Bar, Case, Workload, differs

DEEPSEEK, MIXTRAL = "transformers' DeepSeek-V3", "transformers' Mixtral"
TOPK, SIGN = "softmax, torch.topk", "the sign rule"
TOKENS, EXPERTS, K, GROUPS, KEPT = 4096, 256, 8, 8, 4


@functools.lru_cache(maxsize=1)
def scores(tokens: int, experts: int) -> tuple[Any, Any]:
    """The scores of a gate, and a bias."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randn(tokens, experts, generator=generator), 0.1 * torch.randn(experts, generator=generator)


def theirs(name: str, bias: Any) -> Callable[[Any], tuple[Any, Any]]:
    """The router of transformers from scores on: (weights, experts). Its linear layer is the identity."""
    import torch
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    config: Any = types.SimpleNamespace(
        num_experts_per_tok=K, num_local_experts=EXPERTS, hidden_size=1, routed_scaling_factor=2.5, n_group=GROUPS,
        topk_group=KEPT, norm_topk_prob=True,
    )  # fmt: skip
    gate: Any = DeepseekV3TopkRouter(config) if name == DEEPSEEK else MixtralTopKRouter(config)
    if name == DEEPSEEK:
        gate.e_score_correction_bias.copy_(bias)
    place = gate.forward.__func__.__globals__
    features = torch.empty(TOKENS, 1)

    def call(x: Any) -> tuple[Any, Any]:
        before = place["F"]
        place["F"] = types.SimpleNamespace(linear=lambda *given: x)  # what is measured begins at the scores
        try:
            return gate(features)[1:]
        finally:
            place["F"] = before

    return call


def ways(name: str, bias: Any) -> dict[str, Callable[[Any], tuple[Any, Any]]]:
    other = theirs(name, bias)
    words: dict[str, Any] = {"norm_topk_prob": True}
    if name == DEEPSEEK:
        words |= {
            "scoring": "sigmoid",
            "bias": bias,
            "groups": GROUPS,
            "keep_groups": KEPT,
            "routed_scaling_factor": 2.5,
        }
    return {OURS: lambda x: route(x, K, **words), name: lambda x: other(x)[::-1]}


def routed(case: Case) -> Workload:
    x, bias = scores(*case.shape)
    calls = ways(case.bars[0].peer, bias)

    def check() -> str | None:
        import torch

        (index, weight), (experts, want) = calls[OURS](x), calls[case.bars[0].peer](x)
        a, b = index.sort(-1), experts.sort(-1)
        if not torch.equal(a.values, b.values):
            return "other experts"
        return differs(weight.gather(-1, a.indices), want.gather(-1, b.indices), case.dtype)

    both = "both" in case.note
    return Workload(
        {name: functools.partial(step if both else forward, call, x) for name, call in calls.items()}, check
    )


def forward(call: Callable[[Any], Any], x: Any) -> Any:
    return call(x)


def step(call: Callable[[Any], Any], x: Any) -> Any:
    """The gradient of a loss of the weights."""
    leaf = x.clone().requires_grad_()
    call(leaf)[1].square().sum().backward()
    return leaf.grad


def compact(case: Case) -> Workload:
    import torch

    x, _ = scores(*case.shape)
    contenders: dict[str, Callable[[], Any]] = {
        OURS: lambda: anymax.sampling.top("softmax", x, K).p,
        TOPK: lambda: torch.softmax(x, -1).topk(K).values,
    }
    return Workload(contenders, lambda: differs(contenders[OURS](), contenders[TOPK](), case.dtype))


def load(case: Case) -> Workload:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    x, _ = scores(*case.shape)
    index = route(x, K).index

    def of(loss: Callable[[Any], Any]) -> Any:
        leaf = x.clone().requires_grad_()
        loss(leaf).backward()
        return leaf.grad

    losses = {
        OURS: lambda x: load_balancing_loss(x, index),
        MIXTRAL: lambda x: load_balancing_loss_func((x,), EXPERTS, K),
    }
    contenders: dict[str, Callable[[], Any]] = {name: functools.partial(of, loss) for name, loss in losses.items()}
    return Workload(
        contenders, lambda: differs(contenders[OURS]() * TOKENS, contenders[MIXTRAL]() * TOKENS, case.dtype)
    )


STEPS, WORST = 10, 0.5  # turns of each rule; the error of the load by quantiles over that by signs


def balanced(case: Case) -> Workload:
    """The time of a turn; the check compares the errors of the loads after equal turns, on scores whose experts differ in popularity."""
    import torch

    x, _ = scores(*case.shape)
    skewed = x + 2.0 * torch.randn(EXPERTS, generator=torch.Generator().manual_seed(1))

    def error(method: str) -> float:
        words: dict[str, Any] = {"method": method} | ({"step": 0.01} if method == "sign" else {})
        bias = torch.zeros(EXPERTS)
        for _ in range(STEPS):
            bias = balance(skewed, K, bias, "sigmoid", **words)
        counts = torch.bincount(route(skewed, K, "sigmoid", bias=bias).index.flatten(), minlength=EXPERTS).double()
        return float((counts / counts.mean() - 1.0).abs().max())

    contenders: dict[str, Callable[[], Any]] = {
        OURS: lambda: balance(x, K, None, "sigmoid"),
        SIGN: lambda: balance(x, K, None, "sigmoid", method="sign"),
    }
    work = Workload(contenders, lambda: None)

    def check() -> str | None:
        ratio = error("quantile") / error("sign")
        work.engine = f"{ratio:.2f} of the error"
        return None if ratio <= WORST else f"{ratio:.2f} of the error of the sign rule, where {WORST} is allowed"

    work.check = check
    return work


def routing_cases() -> Iterator[Case]:
    shape, needs = (TOKENS, EXPERTS), ("torch", "transformers")
    grouped = f"k {K}, groups {GROUPS} of {KEPT}"
    for note, deepseek, mixtral in (("forward", 0.25, 0.35), ("both ways", 0.4, None)):
        yield Case(
            "routing", grouped, shape, routed, (Bar(DEEPSEEK, at_most=deepseek),), note=f"sigmoid, {note}", needs=needs
        )
        yield Case(
            "routing", f"k {K}", shape, routed, (Bar(MIXTRAL, at_most=mixtral),), note=f"softmax, {note}", needs=needs
        )
    yield Case("routing", f"top {K}", shape, compact, (Bar(TOPK),), note="softmax, forward")
    yield Case(
        "routing", "load balancing loss", shape, load, (Bar(MIXTRAL, at_most=0.5),), note="both ways", needs=needs
    )
    yield Case("routing", "balance", shape, balanced, (Bar(SIGN),), note="a turn")
