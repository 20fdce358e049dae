"""The cases of `anymax.vllm`, beside vLLM's own functions for CPUs, of an installed vLLM or of a copy of its source.

`ANYMAX_VLLM=/path/to/vllm python -m benchmarks --only vLLM` takes them from the folder of vLLM's source, without the rest of vLLM.
"""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .cases import OURS, Bar, Case, Workload

SOURCE = "ANYMAX_VLLM"
FILE = "vllm/v1/sample/ops/topk_topp_sampler.py"
TRUNCATED, DRAWN = "apply_top_k_top_p_pytorch", "it, softmax and random_sample"
FUNCTIONS = (
    TRUNCATED,
    "apply_top_k_only",
    "random_sample",
    "empty_exponential_noise_like",
    "sample_with_exponential_noise",
)
N = 151_936


@functools.cache
def theirs() -> dict[str, Any]:
    """The functions by their names."""
    import torch

    folder = os.environ.get(SOURCE)
    if not folder:
        import importlib

        module = importlib.import_module(FILE.removesuffix(".py").replace("/", "."))
        return {name: vars(module)[name] for name in FUNCTIONS}
    found: dict[str, Any] = {"torch": torch}
    for node in ast.parse((Path(folder) / FILE).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS:
            exec(compile(ast.Module([node], []), FILE, "exec"), found)
    return found


def asked(name: str, rows: int) -> tuple[Any, Any]:
    """k and p of each row."""
    import torch

    of_k = {"k": [50], "k, p": [50], "k, p, mixed": [50, N, 1, 1000]}
    of_p = {"p": [0.9], "k, p": [0.95], "k, p, mixed": [0.9, 0.95, 1.0, 0.5, 0.8]}
    k, p = ([v[i % len(v)] for i in range(rows)] if (v := of.get(name)) else None for of in (of_k, of_p))
    return None if k is None else torch.tensor(k), None if p is None else torch.tensor(p)


def run(case: Case) -> Workload:
    import torch

    from anymax import vllm

    from .decoding import scores

    x, (k, p), functions = scores(case.shape, case.distribution, case.dtype), asked(case.map, case.shape[0]), theirs()
    room = torch.empty_like(x)
    generators = {row: torch.Generator().manual_seed(row) for row in range(0, case.shape[0], 2)}

    def fresh() -> Any:
        return room.copy_(x)  # both write over it; the copy is part of both times

    def truncated() -> Any:
        return functions[TRUNCATED](fresh(), None if k is None else k.clone(), p, allow_cpu_sync=True)

    def drawn() -> Any:
        return functions["random_sample"](truncated().softmax(-1, dtype=torch.float32), generators)

    draws = case.note.endswith("draw")
    contenders: dict[str, Callable[[], Any]] = (
        {OURS: lambda: vllm.sample(fresh(), k, p, generators), DRAWN: drawn}
        if draws
        else {OURS: lambda: vllm.apply_top_k_top_p(fresh(), k, p), TRUNCATED: truncated}
    )

    def check() -> str | None:
        """We keep the same classes, but for ties and the edge of the mass, and draw only these."""
        given = None if k is None else k.clone()
        # in half precision its sums are far off
        kept = functions[TRUNCATED](x.float(), given, p, allow_cpu_sync=True) > -torch.inf
        ours = vllm.apply_top_k_top_p(x.clone(), k, p) > -torch.inf
        edge = x.masked_fill(~ours, torch.inf).amin(-1, keepdim=True)  # of equal scores there, vLLM keeps all with k
        wrong = int(((kept != ours) & (x != edge)).sum())
        if wrong > max(kept.sum() // 100, 0 if case.dtype == "float32" else 3 * case.shape[0]):
            return f"{wrong} classes differ of {int(kept.sum())}"
        return None if not draws or ours.gather(-1, contenders[OURS]()[:, None]).all() else "a draw is not kept"

    return Workload(contenders, check, "native", 2 * x.nbytes)


def serving_cases() -> Iterator[Case]:
    needs = ("torch",) if os.environ.get(SOURCE) else ("torch", "vllm")
    make = functools.partial(Case, "decoding", setup=run, needs=needs)
    for rows in (1, 8, 64):
        for name in ("k", "p", "k, p", "k, p, mixed"):
            # with k alone, vLLM does not sort
            bar = Bar(TRUNCATED) if name == "k" else Bar(TRUNCATED, at_most=0.1)
            for distribution, dtype in (("normal", "float32"), ("flat", "float32"), ("normal", "bfloat16")):
                yield make(name, (rows, N), bars=(bar,), distribution=distribution, dtype=dtype, note="vLLM")
        for name in ("p", "k, p, mixed"):
            yield make(name, (rows, N), bars=(Bar(DRAWN, at_most=0.1),), note="vLLM, draw")
