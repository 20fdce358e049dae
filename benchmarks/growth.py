"""How time and memory grow: each verb at a small, a middle and a large size, beside a peer, each in a process of its own."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .report import RESULTS, slug

SIZES = ("small", "middle", "large")
_SECONDS = 900  # for one process


@dataclasses.dataclass(frozen=True)
class Verb:
    """A verb and its peer. `setup(*size)` returns the two calls and the arrays that they read."""

    name: str
    peer: str
    sizes: tuple[tuple[int, ...], ...]
    setup: Callable[..., tuple[Callable[[], Any], Callable[[], Any], tuple[Any, ...]]]


@dataclasses.dataclass(frozen=True)
class Grown:
    """What one process measured."""

    verb: str
    peer: str
    size: tuple[int, ...]
    ours_ms: float
    peer_ms: float
    ratio: float  # the median of the rounds
    memory: float | None  # (inputs + the call's peak) / (inputs + results); None where the system does not say
    peer_memory: float | None
    noisy: bool = False


# -- the verbs --------------------------------------------------------------------------------------------------------------------------

_ROWS = ((16, 1_000), (16, 100_000), (16, 1_000_000))
_VOCABULARY = ((16, 1_000), (16, 30_000), (16, 300_000))
_BATCH = ((64, 1_000), (1_000, 1_000), (16_000, 1_000))


def _scores(*size: int) -> Any:
    import torch

    return 3.0 * torch.randn(size, generator=torch.Generator().manual_seed(0))


def _of_scores(call: Callable[[Any], Any]) -> Callable[..., Any]:
    """A verb of scores beside `torch.softmax`."""

    def setup(*size: int) -> Any:
        import torch

        x = _scores(*size)
        return lambda: call(x), lambda: torch.softmax(x, -1), (x,)

    return setup


def _both_ways(call: Callable[[Any], Any]) -> Callable[..., Any]:
    def setup(*size: int) -> Any:
        import torch

        x, g = _scores(*size).requires_grad_(), _scores(*size)
        both = lambda f: torch.autograd.grad(f(x), x, g)  # noqa: E731
        return lambda: both(call), lambda: both(lambda x: torch.softmax(x, -1)), (x, g)

    return setup


def _loss(call: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def setup(rows: int, classes: int) -> Any:
        import torch

        x, y = _scores(rows, classes).requires_grad_(), torch.arange(rows) % classes
        both = lambda f: torch.autograd.grad(f(x, y), x)  # noqa: E731
        return lambda: both(call), lambda: both(torch.nn.functional.cross_entropy), (x, y)

    return setup


def _attention(mapping: str) -> Callable[..., Any]:
    def setup(length: int) -> Any:
        import torch

        import anymax

        q, k, v = (_scores(1, 2, length, 64).requires_grad_() for _ in range(3))
        fused = torch.nn.functional.scaled_dot_product_attention
        both = lambda out: torch.autograd.grad(out.sum(), (q, k, v))  # noqa: E731
        ours = lambda: both(anymax.attention(q, k, v, mapping, is_causal=True))  # noqa: E731
        return ours, lambda: both(fused(q, k, v, is_causal=True)), (q, k, v)

    return setup


def _linear_loss(mapping: str) -> Callable[..., Any]:
    def setup(rows: int, classes: int) -> Any:
        import torch

        import anymax

        x, w = _scores(rows, 128).requires_grad_(), (0.02 * _scores(classes, 128)).requires_grad_()
        y = torch.arange(rows) % classes
        dense = lambda: torch.nn.functional.cross_entropy(x @ w.T, y)  # noqa: E731
        both = lambda loss: torch.autograd.grad(loss, (x, w))  # noqa: E731
        return lambda: both(anymax.linear_loss(x, w, y, mapping)), lambda: both(dense()), (x, w, y)

    return setup


def _segments(mapping: str) -> Callable[..., Any]:
    def setup(entries: int) -> Any:
        import torch

        import anymax

        x, even = _scores(entries), 10
        index = torch.randint(entries // even, (entries,), generator=torch.Generator().manual_seed(1)).sort().values
        return (
            lambda: anymax.segment_apply(mapping, x, index=index),
            lambda: torch.softmax(x.view(-1, even), -1),
            (x, index),
        )

    return setup


def _fit(mapping: str) -> Callable[..., Any]:
    def setup(samples: int, classes: int) -> Any:
        import warnings

        import numpy as np
        from sklearn.linear_model import LogisticRegression

        from anymax.sklearn import MappingClassifier

        rng = np.random.default_rng(0)
        x = rng.normal(size=(samples, 20))
        y = np.argmax(x @ rng.normal(size=(20, classes)) + rng.gumbel(size=(samples, classes)), axis=1)

        def fit(model: Any) -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of iterations that are over
                model.fit(x, y)
            return model.coef_

        return lambda: fit(MappingClassifier(mapping)), lambda: fit(LogisticRegression()), (x, y)

    return setup


def verbs() -> tuple[Verb, ...]:
    import anymax
    from anymax import sampling
    from anymax import transforms as t

    chain = t.compose(t.temperature(0.7), t.topk(50), t.topp(0.95))

    def sampled(x: Any) -> Any:
        return anymax.sample("softmax", x, generator=0, transform=chain, return_log_prob=True, return_support=True)

    def drawn(mapping: str) -> Callable[[Any], Any]:
        return lambda x: anymax.sample(mapping, x, generator=0, return_support=True)

    maps = (
        "softmax",
        "sparsemax",
        "entmax15",
        "sparse_softmax:p=0.9",
        "budget:k=3",
        "taylor",
        "perturb_max",
        "softpick",
    )
    of_rows = {f"p of {name}": _of_scores(lambda x, name=name: anymax.apply(name, x)) for name in maps}
    gradients = {
        f"p of {name} and its gradient": _both_ways(lambda x, name=name: anymax.apply(name, x))
        for name in ("softmax", "sparsemax", "entmax15", "sparse_softmax:p=0.9", "taylor")
    }
    decoding = {
        "`topk`, `topp` and a draw": _of_scores(lambda x: anymax.sample("softmax", x, generator=0, transform=chain)),
        "the same with log p and support": _of_scores(sampled),
        "a draw of entmax15 with its support": _of_scores(drawn("entmax15")),
        "a draw of a nucleus with its support": _of_scores(drawn("sparse_softmax:p=0.9")),
        "`toph`": _of_scores(t.toph()),
        "`mink`": _of_scores(t.mink()),
        "`typical`": _of_scores(t.typical()),
        "`dynamic_temperature`": _of_scores(t.dynamic_temperature(0.5, 1.5)),
        "`repetition_penalty` of 500 tokens": _of_scores(t.repetition_penalty([*range(500)], 1.2)),
        "`gumbel_max`": _of_scores(lambda x: anymax.gumbel_max(x, generator=0)),
        "`gumbel_topk`": _of_scores(lambda x: sampling.gumbel_topk(x, 5, generator=0)),
    }
    losses = {
        "cross-entropy and its gradient": _loss(lambda x, y: anymax.fenchel_young("softmax", x, y)),
        "loss of sparsemax and its gradient": _loss(lambda x, y: anymax.fenchel_young("sparsemax", x, y)),
        "loss of entmax15 and its gradient": _loss(lambda x, y: anymax.fenchel_young("entmax15", x, y)),
        "`nll` of taylor and its gradient": _loss(lambda x, y: anymax.nll("taylor", x, y)),
    }
    softmax, layers = "`torch.softmax`", ((64, 1_000), (500, 16_000), (4_000, 32_000))
    return (
        *(Verb(name, softmax, _ROWS, setup) for name, setup in of_rows.items()),
        *(Verb(name, softmax, _ROWS, setup) for name, setup in gradients.items()),
        *(Verb(name, softmax, _VOCABULARY, setup) for name, setup in decoding.items()),
        *(Verb(name, "`F.cross_entropy`", _BATCH, setup) for name, setup in losses.items()),
        Verb("causal attention of sparsemax and its gradient", "torch's SDPA", ((256,), (1_024,), (4_096,)), _attention("sparsemax")),
        Verb("`linear_loss` of softmax and its gradient", "a dense layer", layers, _linear_loss("softmax")),
        Verb("`linear_loss` of entmax15 and its gradient", "a dense layer", layers, _linear_loss("entmax15")),
        Verb("sparsemax of segments", "softmax of even rows", ((1_000,), (100_000,), (3_000_000,)), _segments("sparsemax")),
        Verb("a fit of `MappingClassifier`", "LogisticRegression", ((1_000, 5), (10_000, 5), (100_000, 5)), _fit("softmax")),
        Verb("a fit of it with sparsemax", "LogisticRegression", ((1_000, 5), (10_000, 5), (100_000, 5)), _fit("sparsemax")),
    )  # fmt: skip


# -- one process ------------------------------------------------------------------------------------------------------------------------


def _kilobytes(word: str) -> int:
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith(word)).split()[1])


def _bytes(result: Any) -> int:
    if isinstance(result, (tuple, list)):
        return sum(map(_bytes, result))
    return int(getattr(result, "nbytes", 0))


def memory_of(call: Callable[[], Any], inputs: tuple[Any, ...]) -> float | None:
    """(inputs + the peak of the call) / (inputs + results)."""
    if sys.platform != "linux":
        return None
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = _kilobytes("VmRSS")
    result = call()
    peak = (_kilobytes("VmHWM") - before) * 1024
    return (_bytes(inputs) + peak) / (_bytes(inputs) + _bytes(result))


def measured(name: str, size: tuple[int, ...], budget: float) -> Grown:
    """What this process measures of a verb at a size: first the memory, in fresh memory, then the time."""
    from .measure import Plan, measure

    verb = next(v for v in verbs() if v.name == name)
    for call in verb.setup(*verb.sizes[0])[:2]:  # what is loaded at a first call does not count
        call()
    ours, peer, inputs = verb.setup(*size)
    memory, peer_memory = memory_of(ours, inputs), memory_of(peer, inputs)
    timing = measure({"ours": ours, "peer": peer}, Plan(budget=budget, least=3))
    ratio, _, _ = timing.ratio("ours", "peer")
    return Grown(
        name, verb.peer, size, timing.median("ours") * 1e3, timing.median("peer") * 1e3, ratio, memory, peer_memory, timing.noisy
    )  # fmt: skip


def child(text: str) -> None:
    """The process of one verb at one size: a line of JSON."""
    asked = json.loads(text)
    print(json.dumps(dataclasses.asdict(measured(asked["name"], tuple(asked["size"]), asked["budget"]))))


# -- all of them ------------------------------------------------------------------------------------------------------------------------


def run(patterns: list[str], budget: float, quick: bool) -> Iterator[list[Grown]]:
    """For each verb what was measured at its sizes."""
    import re

    # memory that is freed goes back to the system, so that a peak is of what is held
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    for verb in verbs():
        if patterns and not any(re.search(p, verb.name, re.IGNORECASE) for p in patterns):
            continue
        rows = []
        for size in verb.sizes[: 2 if quick else 3]:
            asked = json.dumps({"name": verb.name, "size": size, "budget": budget})
            command = [sys.executable, "-m", "benchmarks", "--growth-child", asked]
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=_SECONDS, env=environment
            )
            if done.returncode:
                print(f"{verb.name} {size}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
                continue
            row = json.loads(done.stdout.splitlines()[-1])
            rows.append(Grown(**{**row, "size": tuple(row["size"])}))
        yield rows


def exponent(rows: list[Grown]) -> float | None:
    """The slope of log time over log size, from the smallest to the largest."""
    if len(rows) < 2:
        return None
    small, large = rows[0], rows[-1]
    return math.log(large.ours_ms / small.ours_ms) / math.log(math.prod(large.size) / math.prod(small.size))


def line(rows: list[Grown]) -> str:
    """A line of the table that the command prints."""
    ratios = " / ".join(f"{row.ratio:.2g}{'?' if row.noisy else ''}" for row in rows)
    held = " / ".join("-" if row.memory is None else f"{row.memory:.2f}" for row in rows)
    slope = exponent(rows)
    return f"{rows[0].verb:48s} {'' if slope is None else f'{slope:.2f}':5s} {ratios:26s} {held}"


def save(known: dict[str, Any], rows: list[Grown]) -> Path:
    folder = RESULTS / "growth"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{known['date']}-{slug(known['hardware']['cpu'])}-{known['threads']}t.json"
    body = [
        {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in dataclasses.asdict(row).items()}
        for row in rows
    ]
    path.write_text(json.dumps({**known, "growth": body}, indent=1) + "\n")
    return path
