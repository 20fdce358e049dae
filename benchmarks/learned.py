"""The cases of a learned parameter, forward and backward: beside the same call with a number, and beside the package entmax."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import anymax

from .attention import heads
from .cases import OURS, Bar, Case, Workload, differs, engine, few, incoming, scores_of

FIXED, BISECTION, BUDGET = "a fixed number", "entmax.entmax_bisect, learned", "anymax.Budget(3)"
MAPS: dict[str, tuple[Callable[[Any], anymax.Mapping], float]] = {
    "entmax 1.3": (anymax.Entmax, 1.3),
    "entmax 1.5": (anymax.Entmax, 1.5),
    "normmax 2": (anymax.NormMax, 2.0),
    "budget 3": (anymax.Budget, 3.0),
}
SHAPES = ((4096, 512), (256, 32_000), (64, 64))
HEADS = ((24, 4, 96, 96), (2, 8, 256, 32))
EACH_HEAD = "an alpha a head"


def _tensor(value: float, shape: tuple[int, ...] = (), wide: bool = False) -> Any:
    import torch

    return torch.full(shape, value, dtype=torch.float64 if wide else torch.float32).requires_grad_()


def _gradients(out: Any, wanted: Sequence[Any], g: Any) -> Any:
    import torch

    return torch.autograd.grad(out, wanted, g)


def _checked(got: Callable[[], Sequence[Any]], want: Callable[[], Sequence[Any]]) -> Callable[[], str | None]:
    """Holds gradients of a few rows to those of the reference in float64."""

    def check() -> str | None:
        with anymax.use("reference"):
            wanted = want()
        found = [differs(a, b.float(), "float32") for a, b in zip(got(), wanted, strict=True)]
        return next((one for one in found if one), None)

    return check


# -- rows and losses ----------------------------------------------------------------------------------------------------------


def _of_rows(case: Case, call: Callable[[anymax.Mapping, Any, Any], Any], g: Any, y: Any) -> Workload:
    kind, value = MAPS[case.map]
    x, a = scores_of(case).clone().requires_grad_(), _tensor(value)
    contenders = {
        OURS: lambda: _gradients(call(kind(a), x, y), (x, a), g),
        FIXED: lambda: _gradients(call(kind(value), x, y), (x,), g),
    }
    pick = few(len(x))
    rows, to, part = x.detach()[pick], None if y is None else y[pick], None if g is None else g[pick]

    def some(wide: bool) -> Any:
        leaf = rows.to(_tensor(value, wide=wide).dtype).requires_grad_()
        own = _tensor(value, wide=wide)
        return _gradients(call(kind(own), leaf, to), (leaf, own), part if part is None else part.to(leaf.dtype))

    return Workload(contenders, _checked(lambda: some(False), lambda: some(True)), engine("vjp", kind(value), rows))


def rows(case: Case) -> Workload:
    work = _of_rows(case, lambda mapping, x, y: anymax.apply(mapping, x), incoming(case.shape), None)
    if "package" in case.note:
        import entmax

        x, a, g = scores_of(case).clone().requires_grad_(), _tensor(MAPS[case.map][1]), incoming(case.shape)
        del work.contenders[FIXED]
        work.contenders[BISECTION] = lambda: _gradients(entmax.entmax_bisect(x, alpha=a), (x, a), g)
    return work


def losses(case: Case) -> Workload:
    import torch

    y = torch.randint(case.n, case.shape[:1], generator=torch.Generator().manual_seed(1))
    return _of_rows(case, anymax.fenchel_young, None, y)


# -- attention ----------------------------------------------------------------------------------------------------------------


def _parameter_shape(case: Case) -> tuple[int, ...]:
    return (case.shape[1], 1, 1) if EACH_HEAD in case.note else ()


def attention(case: Case) -> Workload:
    kind, value = MAPS[case.map]
    (q, k, v), g, shape = heads(case.shape, grad=True), incoming(case.shape), _parameter_shape(case)
    a = _tensor(value, shape)
    contenders = {
        OURS: lambda: _gradients(anymax.attention(q, k, v, kind(a)), (q, k, v, a), g),
        FIXED: lambda: _gradients(anymax.attention(q, k, v, kind(value)), (q, k, v), g),
    }

    def some(wide: bool) -> Any:
        own = _tensor(value, shape, wide)
        q1, k1, v1 = (t.detach()[:1].to(own.dtype).requires_grad_() for t in (q, k, v))
        return _gradients(anymax.attention(q1, k1, v1, kind(own)), (q1, k1, v1, own), g[:1].to(own.dtype))

    used = anymax.explain_attention(q, k, v, kind(a)).rows[0][1]
    return Workload(contenders, _checked(lambda: some(False), lambda: some(True)), used)


# -- JAX ----------------------------------------------------------------------------------------------------------------------


def _on_jax(
    case: Case, call: Callable[[anymax.Mapping, tuple[Any, ...]], Any], tensors: Sequence[Any], first: Sequence[Any], shape: tuple[int, ...]
) -> Workload:  # fmt: skip
    """Gradients of `sum(call * g)` by the arrays, with the parameter and without; `first` are those of the check."""
    import jax
    import jax.numpy as jnp

    kind, value = MAPS[case.map]
    learned = jax.jit(jax.grad(lambda arrays, a, g: jnp.sum(call(kind(a), arrays) * g), (0, 1)))
    fixed = jax.jit(jax.grad(lambda arrays, g: jnp.sum(call(kind(value), arrays) * g)))
    arrays, some = (tuple(jnp.asarray(t.detach().numpy()) for t in every) for every in (tensors, first))
    g, a = incoming(case.shape), jnp.full(shape, value, jnp.float32)
    on_jax, part = jnp.asarray(g.numpy()), g[: len(first[0])]
    contenders = {
        OURS: lambda: jax.block_until_ready(learned(arrays, a, on_jax)),
        FIXED: lambda: jax.block_until_ready(fixed(arrays, on_jax)),
    }

    def got() -> Any:
        by_arrays, by_parameter = learned(some, a, jnp.asarray(part.numpy()))
        return (*by_arrays, by_parameter)

    def want() -> Any:
        leaves, own = tuple(t.detach().double().requires_grad_() for t in first), _tensor(value, shape, wide=True)
        return _gradients(call(kind(own), leaves), (*leaves, own), part.double())

    return Workload(contenders, _checked(got, want), "xla")


def rows_on_jax(case: Case) -> Workload:
    x = scores_of(case)
    return _on_jax(case, lambda mapping, arrays: anymax.apply(mapping, arrays[0]), (x,), (x[:3],), ())


def attention_on_jax(case: Case) -> Workload:
    qkv = heads(case.shape)
    first = [a[:1] for a in qkv]

    def call(mapping: anymax.Mapping, arrays: tuple[Any, ...]) -> Any:
        q, k, v = arrays
        return anymax.attention(q, k, v, mapping)

    return _on_jax(case, call, qkv, first, _parameter_shape(case))


# -- bounds, scales, a model ---------------------------------------------------------------------------------------------------


def bounded(case: Case) -> Workload:
    import torch

    x, g = scores_of(case).clone().requires_grad_(), incoming(case.shape)
    upper = torch.full(case.shape[-1:], 0.3).requires_grad_()
    by_class = "class" in case.note
    mapping = anymax.Bounded(upper if by_class else 0.3)
    contenders = {
        OURS: lambda: _gradients(mapping(x), (x, upper) if by_class else (x,), g),
        BUDGET: lambda: _gradients(anymax.apply(anymax.Budget(3), x), (x,), g),
    }
    pick = few(len(x))

    def some(wide: bool) -> Any:
        leaf = x.detach()[pick].to(torch.float64 if wide else torch.float32).requires_grad_()
        own = anymax.Bounded(upper.detach().to(leaf.dtype) if by_class else 0.3)
        return _gradients(own(leaf), (leaf,), g[pick].to(leaf.dtype))

    return Workload(
        contenders, _checked(lambda: some(False), lambda: some(True)), engine("vjp", mapping.frozen(), x.detach())
    )


def perturbed(case: Case) -> Workload:
    import torch

    x, g = scores_of(case).clone().requires_grad_(), incoming(case.shape)
    scale = torch.linspace(0.8, 1.2, len(x)).unsqueeze(-1).requires_grad_("learned" in case.note)
    wanted = (x, scale) if scale.requires_grad else (x,)
    mapping, number = anymax.PerturbMax(nodes=32, scale=scale), anymax.PerturbMax(nodes=32)
    contenders = {
        OURS: lambda: _gradients(mapping(x), wanted, g),
        FIXED: lambda: _gradients(number(x), (x,), g),
    }
    pick = few(len(x))

    def some(wide: bool) -> Any:
        leaf = x.detach()[pick].to(torch.float64 if wide else torch.float32).requires_grad_()
        own = anymax.PerturbMax(nodes=32, scale=scale.detach()[pick].to(leaf.dtype))
        return _gradients(own(leaf), (leaf,), g[pick].to(leaf.dtype))

    return Workload(
        contenders, _checked(lambda: some(False), lambda: some(True)), engine("vjp", mapping.frozen(), x.detach())
    )


def model_step(case: Case) -> Workload:
    """The loss of a small Llama of random weights and its gradients: an alpha for each head of each layer, or 1.5."""
    import torch
    import transformers

    from anymax import hf

    hf.register()

    def model(learned: bool) -> Any:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, vocab_size=500,
        )  # fmt: skip
        config.anymax = {"alpha": 1.5}
        made: Any = transformers.LlamaForCausalLM._from_config(config, attn_implementation="anymax_entmax")
        if learned:
            for layer in made.model.layers:
                each_head = anymax.Entmax(torch.full((4, 1, 1), 1.5))
                layer.self_attn.anymax = anymax.nn.Activation(each_head, learn="alpha")
        return made

    tokens = torch.randint(500, case.shape, generator=torch.Generator().manual_seed(0))
    learned, fixed = model(True), model(False)

    def step(one: Any) -> Any:
        one.zero_grad()
        loss = one(tokens, labels=tokens).loss
        loss.backward()
        return loss

    def check() -> str | None:
        wrong = differs(step(learned), step(fixed), "float32")
        shared = dict(learned.named_parameters())
        for name, weight in fixed.named_parameters():
            wrong = wrong or differs(shared[name].grad, weight.grad, "float32")
        return wrong

    return Workload({OURS: lambda: step(learned), FIXED: lambda: step(fixed)}, check, "native")


# -- the table ----------------------------------------------------------------------------------------------------------------


def _bar(most: float, peer: str = FIXED) -> tuple[Bar, ...]:
    return (Bar(peer, at_most=most),)


def learned_cases() -> Iterator[Case]:
    for shape in SHAPES:
        for name in ("entmax 1.3", "normmax 2", "budget 3"):
            yield Case("learned", name, shape, rows, _bar(1.5))
        for name in ("entmax 1.3", "normmax 2"):
            yield Case("learned", name, shape, losses, _bar(1.5), note="loss")
        bars, needs = _bar(0.02, BISECTION), ("torch", "entmax")
        slow = shape == (256, 32_000)
        yield Case("learned", "entmax 1.3", shape, rows, bars, note="package", needs=needs, full=slow)
        yield Case("jax", "entmax 1.3", shape, rows_on_jax, _bar(2.0), note="learned", needs=("jax", "torch"))
    for shape in HEADS:
        for note in ("one alpha", EACH_HEAD):
            for name in ("entmax 1.3", "entmax 1.5"):
                yield Case("learned", name, shape, attention, _bar(2.0), note=f"attention, {note}")
            needs = ("jax", "torch")
            yield Case("jax", "entmax 1.5", shape, attention_on_jax, _bar(2.0), note=f"learned, {note}", needs=needs)
    for note in ("a bound", "a learned bound a class"):
        yield Case("learned", "bounded", (2048, 512), bounded, _bar(2.0, BUDGET), note=note)
    for note in ("a scale a row", "a learned scale a row"):
        yield Case("learned", "perturb_max", (2048, 512), perturbed, _bar(1.3), note=note)
    needs = ("torch", "transformers")
    yield Case("learned", "Llama", (4, 64), model_step, _bar(2.0), note="a step, an alpha a head", needs=needs)
