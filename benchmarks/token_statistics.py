"""The cases of token statistics: log p, entropy and divergences from hidden states, pairs of embeddings, the losses that go with them.

The functions of verl and TRL come from the installed packages, read from their files, so that their other dependencies are not needed.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import anymax

from .cases import OURS, Bar, Case, Workload, differs
from .output_layers import memory, step

VERL, TRL, SCORES = "verl's head in chunks", "TRL's functions in chunks", "all scores"
VOCABULARY_CHUNKS, OTHERWISE = "chunks of the vocabulary, as in TRL", "the same without invariant="
TWO = "two F.cross_entropy"
PRODUCTS = "its four matrix products alone"
ENTMAX = "all scores and the package entmax"
ROWS, FEATURES, VOCABULARY, CHUNK = 512, 1024, 151_936, 256
KEPT, TEACHER = 50, 64
MOST = 0.05  # of the memory of the scores, above that of weight, gradients and what is held; twice that is an error


def functions_of(package: str, file: str, *names: str, **scope: Any) -> list[Any]:
    """Functions and classes from a file of an installed package, run with these names in scope and nothing else of the package."""
    import torch

    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.submodule_search_locations
    path = pathlib.Path(found.submodule_search_locations[0]) / file
    tree = ast.parse(path.read_text())
    body = [n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name in names]
    future = ast.parse("from __future__ import annotations").body
    place = {"torch": torch, "F": torch.nn.functional, **scope}
    exec(compile(ast.Module([*future, *body], []), str(path), "exec"), place)
    return [place[name] for name in names]


@functools.lru_cache(maxsize=1)
def operands(rows: int, features: int, classes: int, dtype: str) -> tuple[Any, Any, Any, Any]:
    """Hidden states, the weight of a head, tokens, and a gradient for each of these."""
    import torch

    generator = torch.Generator().manual_seed(classes)
    weight = torch.randn(classes, features, generator=generator).div_(features**0.5)
    x = torch.randn(rows, features, generator=generator)
    y = torch.randint(classes, (rows,), generator=generator)
    kind = getattr(torch, dtype)
    return x.to(kind).requires_grad_(), weight.to(kind).requires_grad_(), y, torch.randn(rows, generator=generator)


def policy(terms: Callable[[Any, Any], tuple[Any, Any]], x: Any, weight: Any, g: Any) -> Any:
    """The gradients of a loss of log p and entropy."""
    return step(lambda: _policy_loss(*terms(x, weight), g), x, weight)


def _policy_loss(log_p: Any, entropy: Any, g: Any) -> Any:
    return (log_p * g).sum() - 0.01 * entropy.float().sum()


def log_p_and_entropy(case: Case) -> Workload:
    import torch

    rows, classes = case.shape
    x, weight, y, g = operands(rows, FEATURES, classes, case.dtype)
    few = "support" in case.note
    support = None
    if few:
        generator = torch.Generator().manual_seed(0)
        ids = (y[:, None] + torch.randint(1, classes, (1, KEPT), generator=generator).cumsum(1)) % classes
        support = (ids.sort(1).values.flatten(), torch.arange(0, ids.numel() + 1, KEPT))
    (verl,) = functions_of(
        "verl", "utils/experimental/torch_functional.py", "FusedLinearForPPOFunction", **_parts_of_verl()
    )
    log_softmax, entropy_of = functions_of(
        "trl", "trainer/utils.py", "selective_log_softmax", "entropy_from_logits", is_triton_available=lambda: False
    )

    def ours(x: Any, weight: Any) -> Any:
        return anymax.linear_log_prob_entropy(x, weight, y, support=support)

    def of_trl(x: Any, weight: Any) -> Any:
        parts = [(x[i : i + CHUNK] @ weight.T, y[i : i + CHUNK]) for i in range(0, rows, CHUNK)]
        return torch.cat([log_softmax(s, t) for s, t in parts]), torch.cat([entropy_of(s) for s, _ in parts])

    ways = {OURS: ours, VERL: lambda x, weight: verl.apply(x, weight, y, 1.0, 512), TRL: of_trl}
    contenders: dict[str, Any] = {name: functools.partial(policy, way, x, weight, g) for name, way in ways.items()}
    work = Workload(contenders, lambda: None)

    def check() -> str | None:
        share = memory(lambda: _policy_loss(*ours(x, weight), g), x, weight)
        if share is not None:
            work.engine = f"{share:.1%} memory"
            held = 0.0 if few else 4.0 / x.element_size()  # in fp32, until the backward pass
            if share > 2.0 * MOST + held:
                return f"{share:.2f} of the memory of the scores, where {MOST + held} is allowed"
        with torch.no_grad():
            got = anymax.linear_log_prob_entropy(x, weight, y)
            s = (x[:8].float() @ weight.float().T).double()
            log_p = s.log_softmax(1)
            want = log_p.gather(1, y[:8, None])[:, 0], -(log_p.exp() * log_p).sum(1)
        return next((wrong for a, b in zip(got, want) if (wrong := differs(a[:8], b, case.dtype))), None)

    if few:
        del contenders[TRL]
    work.check = check
    return work


def in_chunks_of_the_vocabulary(x: Any, weight: Any, y: Any, chunk: int = 8192) -> tuple[Any, Any]:
    """log p and entropy by the algorithm of TRL's `_ChunkedLogProbFunction`, whose backward pass computes the scores again."""
    import torch

    def scores(x: Any, weight: Any, a: int) -> tuple[Any, Any, Any]:
        s = (x @ weight[a : a + chunk].T).float()
        row = ((y >= a) & (y < a + chunk)).nonzero()[:, 0]
        return s, row, y[row] - a

    class Chunked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:  # type: ignore[override]
            largest = torch.full((len(x),), -torch.inf)
            total, mean, of_target = (torch.zeros(len(x)) for _ in range(3))
            for a in range(0, len(weight), chunk):
                s, row, place = scores(x, weight, a)
                now = torch.maximum(largest, s.amax(1))
                shrunk, q = (largest - now).exp(), (s - now[:, None]).exp()
                total, mean, largest = total * shrunk + q.sum(1), mean * shrunk + (q * s).sum(1), now
                of_target[row] = s[row, place]
            level = largest + total.log()
            entropy = level - mean / total
            ctx.save_for_backward(x, weight, level, entropy)
            return of_target - level, entropy

        @staticmethod
        def backward(ctx: Any, g: Any, g_entropy: Any) -> Any:  # type: ignore[override]
            x, weight, level, entropy = ctx.saved_tensors
            dx, dw = torch.zeros(x.shape), torch.empty_like(weight)
            for a in range(0, len(weight), chunk):
                s, row, place = scores(x, weight, a)
                log_p = s - level[:, None]
                p = log_p.exp()
                d = -g[:, None] * p - g_entropy[:, None] * p * (log_p + entropy[:, None])
                d[row, place] += g[row]
                dx += d @ weight[a : a + chunk].float()
                dw[a : a + chunk] = (d.T @ x.float()).to(dw.dtype)
            return dx.to(x.dtype), dw

    return Chunked.apply(x, weight)  # type: ignore[no-any-return, no-untyped-call]


def both_ways(case: Case) -> Workload:
    """log p and entropy with their gradients, held once or computed twice; or in rows that depend on no other."""
    import torch

    rows, classes = case.shape
    x, weight, y, g = operands(rows, FEATURES, classes, case.dtype)

    def ours(x: Any, weight: Any) -> Any:
        return anymax.linear_log_prob_entropy(x, weight, y, invariant=case.note == "invariant")

    def all_scores(x: Any, weight: Any) -> Any:
        s = x @ weight.T
        log_p = (s if s.dtype is torch.float64 else s.float()).log_softmax(1)
        return log_p.gather(1, y[: len(x), None])[:, 0], -(log_p.exp() * log_p).sum(1)

    ways: dict[str, Any] = {OURS: ours}
    if case.note == "invariant":
        ways[OTHERWISE] = lambda x, weight: anymax.linear_log_prob_entropy(x, weight, y)
    else:
        ways |= {SCORES: all_scores, VOCABULARY_CHUNKS: lambda x, w: in_chunks_of_the_vocabulary(x, w, y)}

    def check() -> str | None:
        with torch.no_grad():
            got, want = ours(x, weight), all_scores(x[:8].double(), weight.double())
        return next((wrong for a, b in zip(got, want) if (wrong := differs(a[:8], b, "float32"))), None)

    return Workload({name: functools.partial(policy, way, x, weight, g) for name, way in ways.items()}, check)


def _parts_of_verl() -> dict[str, Any]:
    from typing import Optional

    names = "_fused_linear_for_ppo_fwd", "_fused_linear_for_ppo_bwd"
    off = {"_FLASH_ATTN_CROSS_ENTROPY_AVAILABLE": False}
    parts = functions_of("verl", "utils/experimental/torch_functional.py", *names, Optional=Optional, **off)
    return dict(zip(names, parts), Optional=Optional)


def teacher(case: Case) -> Workload:
    import torch

    rows, classes = case.shape
    x, weight, _, _ = operands(rows, FEATURES, classes, case.dtype)
    chunked, divergence = functions_of(
        "verl", "trainer/distillation/fsdp/losses.py", "_chunked_topk_log_probs", "kl_divergence"
    )
    with torch.no_grad():
        log_p, ids = (x[torch.randperm(rows)] @ weight.T).float().log_softmax(1).topk(TEACHER, 1)

    def all_scores() -> Any:
        student = chunked((x @ weight.T)[None], ids[None])[0]
        return divergence(log_q=student.float(), log_p=log_p).sum()

    def ours() -> Any:
        return anymax.linear_topk_kl(x, weight, ids, log_p).sum()

    calls = {OURS: ours, SCORES: all_scores}

    def check() -> str | None:
        with torch.no_grad():
            return differs(ours() / rows, all_scores() / rows, case.dtype)

    return Workload({name: functools.partial(step, call, x, weight) for name, call in calls.items()}, check)


def two_heads(case: Case) -> Workload:
    """A frozen teacher's head beside that of the student. The note says beta."""
    import torch
    from torch.nn import functional

    rows, classes = case.shape
    x, weight, _, _ = operands(rows, FEATURES, classes, case.dtype)
    beta = float(case.note.split()[-1])
    with torch.no_grad():
        of_teacher = x[torch.randperm(rows)], weight[torch.randperm(classes)]

    def all_scores() -> Any:
        s, t = ((a @ w.T).log_softmax(1) for a, w in ((x, weight), of_teacher))
        kl = lambda p, q: functional.kl_div(q, p, reduction="none", log_target=True).sum(1).mean()  # noqa: E731
        if beta in (0.0, 1.0):
            return kl(s, t) if beta else kl(t, s)
        m = torch.logaddexp(s + math.log(1 - beta), t + math.log(beta))
        return beta * kl(t, m) + (1 - beta) * kl(s, m)

    def ours() -> Any:
        return anymax.linear_kl(x, weight, *of_teacher, beta=beta, reduction="mean")

    def products() -> Any:
        with torch.no_grad():
            s, _ = x @ weight.T, of_teacher[0] @ of_teacher[1].T
            return s @ weight, s.T @ x

    def check() -> str | None:
        got, want = step(ours, x, weight), step(all_scores, x, weight)
        size = max(float(b.abs().max()) for b in want)
        wrong = differs(ours(), all_scores(), case.dtype)
        return wrong or next((w for a, b in zip(got, want) if (w := differs(a / size, b / size, case.dtype))), None)

    calls = {OURS: ours, SCORES: all_scores}
    contenders = {name: functools.partial(step, call, x, weight) for name, call in calls.items()}
    return Workload({**contenders, PRODUCTS: products}, check)


def pairs(case: Case) -> Workload:
    import torch
    from torch.nn import functional

    n, features = case.shape
    generator = torch.Generator().manual_seed(n)
    a, b = (functional.normalize(torch.randn(n, features, generator=generator), dim=1) for _ in range(2))
    a, b, place = a.requires_grad_(), b.requires_grad_(), torch.arange(n)

    def two() -> Any:
        first, second = 20.0 * a @ b.T, 20.0 * b @ a.T
        return 0.5 * (functional.cross_entropy(first, place) + functional.cross_entropy(second, place))

    def ours() -> Any:
        return anymax.contrastive_loss(a, b, temperature=0.05)

    def check() -> str | None:
        wrong = differs(ours(), two(), "float32")
        return wrong or next(
            (w for p, q in zip(step(ours, a, b), step(two, a, b)) if (w := differs(p, q, "float32"))), None
        )

    return Workload({OURS: functools.partial(step, ours, a, b), TWO: functools.partial(step, two, a, b)}, check)


def suppressed(case: Case) -> Workload:
    import entmax
    import torch

    rows, classes = case.shape
    x, weight, y, _ = operands(rows, FEATURES, classes, case.dtype)

    def package() -> Any:
        s = x @ weight.T
        p, q = entmax.sparsemax(s, dim=1), s.softmax(1)
        zeros = (p == 0).scatter(1, y[:, None], False)
        share = q.gather(1, y[:, None])[:, 0].detach()
        second = (1 - share) * -torch.log1p(-(q * zeros).sum(1))
        return (entmax.sparsemax_loss(s, y) + 0.5 * second).mean()

    def ours() -> Any:
        return anymax.linear_loss(x, weight, y, "sparsemax", suppress=0.5)

    calls = {OURS: ours, ENTMAX: package}
    contenders = {name: functools.partial(step, call, x, weight) for name, call in calls.items()}
    return Workload(contenders, lambda: differs(ours(), package(), case.dtype))


def held(case: Case) -> Workload:
    """A loss whose scores would fit in memory."""
    from torch.nn import functional

    rows, classes = case.shape
    x, weight, y, _ = operands(rows, int(case.note.split()[0]), classes, case.dtype)
    calls: dict[str, Any] = {
        OURS: lambda: anymax.linear_loss(x, weight, y, case.map),
        SCORES: lambda: functional.cross_entropy(x @ weight.T, y),
    }

    def check() -> str | None:
        if case.map != "softmax":
            return differs(calls[OURS](), anymax.entmax15_loss((x @ weight.T).double(), y), case.dtype)
        return differs(calls[OURS](), calls[SCORES](), case.dtype)

    return Workload({name: functools.partial(step, call, x, weight) for name, call in calls.items()}, check)


def token_cases() -> Iterator[Case]:
    group, size = "token statistics", (ROWS, VOCABULARY)
    for dtype in ("float32", "bfloat16"):
        for note, peers, most in (("log p and entropy", (VERL, TRL), 0.5), (f"support of {KEPT}", (VERL,), 0.1)):
            bars = tuple(Bar(peer, at_most=most) for peer in peers)
            yield Case(
                group, "softmax", size, log_p_and_entropy, bars, dtype=dtype, note=note, needs=("torch", "verl", "trl"),
                full=dtype != "float32",
            )  # fmt: skip
        yield Case(
            group, "softmax", size, teacher, (Bar(SCORES, at_most=0.3),), dtype=dtype, note=f"KL from the top {TEACHER}",
            needs=("torch", "verl"), full=dtype != "float32",
        )  # fmt: skip
    for beta in (0.0, 0.5, 1.0):
        yield Case(
            group, "softmax", (ROWS, 32_000), two_heads, (Bar(SCORES, at_most=0.95), Bar(PRODUCTS, at_most=1.1)),
            note=f"two heads, beta {beta}",
        )  # fmt: skip
    for dtype in ("float32", "bfloat16"):
        # 3 products in place of 4, which take 0.77 of all scores and 0.67 of chunks if nothing else takes time
        bars = Bar(SCORES, at_most=0.82), Bar(VOCABULARY_CHUNKS, at_most=0.72)
        yield Case(group, "softmax", size, both_ways, bars, dtype=dtype, note="both ways", full=dtype != "float32")
    yield Case(group, "softmax", size, both_ways, (Bar(OTHERWISE, at_most=1.6),), note="invariant")
    yield Case(group, "softmax", (8192, 512), pairs, (Bar(TWO, at_most=0.6),), note="pairs, both directions")
    yield Case(
        group, "sparsemax", size, suppressed, (Bar(ENTMAX, at_most=0.05),), note="suppressed", needs=("torch", "entmax")
    )
    for rows, features, classes in ((64, 128, 50_000), (256, 128, 50_000), (512, 1024, 32_000)):
        for name in ("softmax", "entmax15"):
            most = 0.9 if name == "entmax15" else 1.0 if rows >= 256 else None
            yield Case(
                group, name, (rows, classes), held, (Bar(SCORES, at_most=most),), note=f"{features} features, loss"
            )
