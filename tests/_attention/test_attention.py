"""Attention: every option, map and layout by whoever serves it, beside one oracle; calls at random; what torch's own gives."""

from __future__ import annotations

import importlib
import inspect
import random
import typing

import numpy as np
import pytest
from attention_cases import (
    BLOCKS,
    LAYOUTS,
    MAPS,
    OPTIONS,
    SERVERS,
    SLOPES,
    TOLERANCE,
    H,
    K,
    Q,
    V,
    at_random,
    by_jax,
    by_torch,
    call,
    filled,
    held,
    in_blocks,
    near,
    of_table,
    torch,
)
from kinds import KINDS

import anymax as A
from anymax import Entmax, Softmax, Sparsemax

sdpa = torch.nn.functional.scaled_dot_product_attention
IN_JAX = [f"entmax1.5, {o}" for o in ("alibi of batches", "both lengths", "sink, causal, mask")]


def arrays_of(kind):
    return lambda a: KINDS[kind](a.numpy()) if isinstance(a, torch.Tensor) else a


@pytest.mark.whole(
    lambda case, server: (
        (server == "jax" and case not in IN_JAX) or (server == "tiny blocks" and "entmax1.5" not in case)
    )
)
@pytest.mark.parametrize(("case", "server"), filled())
def test_a_case_of_the_table(case, server, monkeypatch):
    kind, implementation, blocks, tolerance = SERVERS[server]
    name, arrays, options, said = of_table(case)
    in_blocks(monkeypatch, blocks)
    if kind == "torch":
        held(by_torch(name, arrays, options, said[2], implementation), said, tolerance)
    elif kind == "jax":
        held(by_jax(name, arrays, options, said[2]), said, tolerance)
    else:
        out = call(name, {**arrays, **options}, arrays_of(kind))
        assert type(out) is type(KINDS[kind](0.0))
        near(out, said[0], tolerance, "output")


@pytest.mark.parametrize(("case", "kind"), [(case, server) for case, server in filled() if server in KINDS])
@pytest.mark.whole(lambda case, kind: kind == "jax" and case != IN_JAX[2])
def test_weights_of_the_table(case, kind):
    name, arrays, options, said = of_table(case)
    _, p = call(name, {**arrays, **options}, arrays_of(kind), need_weights=True)
    near(p, said[1], SERVERS[kind].tolerance, "weights")


def test_every_value_of_an_axis_has_cells():
    cells = filled()
    for server in SERVERS:
        cases = {case for case, other in cells if other == server}
        assert {f"softmax, {option}" for option in OPTIONS} & cases or {f"entmax1.5, {o}" for o in OPTIONS} <= cases
    named = [of_table(case)[0] for case, server in cells if server == "reference"]
    assert set(named) == set(MAPS)
    assert all(any(layout in case for case, _ in cells) for layout in LAYOUTS if layout != "heads")


# -- at random ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", [None, "blockwise", "reference"])
@pytest.mark.parametrize("seed", range(50))
def test_torch_at_random(seed, implementation, monkeypatch):
    r = random.Random(seed)
    in_blocks(monkeypatch, r.choice(list(BLOCKS.values())))
    dtype = r.choice(["float64", "float64", "float32", "bfloat16", "float16"])
    name, arrays, options, said = at_random(seed)
    still = [key for key in ("k", "q", "v", *options) if r.random() > 0.8]
    result = by_torch(name, arrays, options, said[2], implementation, getattr(torch, dtype), still)
    held(result, said, TOLERANCE[dtype])


@pytest.mark.whole(lambda seed, kind: kind == "jax" or seed % 3)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "torch"])
@pytest.mark.parametrize("seed", range(100, 112))
def test_other_arrays_at_random(seed, kind):
    if kind == "jax" and seed > 103:
        pytest.skip("each shape is compiled")
    name, arrays, options, said = at_random(seed)
    out, p = call(name, {**arrays, **options}, arrays_of(kind), need_weights=True)
    near(out, said[0], SERVERS[kind].tolerance, "output")
    near(p, said[1], SERVERS[kind].tolerance, "weights")
    if kind == "jax":
        held(by_jax(name, arrays, options, said[2]), said, SERVERS[kind].tolerance)


@pytest.mark.whole(lambda option: option != "alibi")
@pytest.mark.parametrize("option", ["alibi", "sink, causal, mask", "lengths"])
def test_gradients_of_a_compiled_program_of_jax(option):
    jax = pytest.importorskip("jax")
    name, arrays, options, (_, _, g, grads) = of_table(f"entmax1.5, {option}")
    make = lambda a: a if isinstance(a, jax.Array) else KINDS["jax"](a.numpy())  # noqa: E731
    run = jax.jit(jax.grad(lambda arrays: (call(name, {**options, **arrays}, make) * make(g)).sum()))
    for key, grad in run({key: make(a) for key, a in arrays.items()}).items():
        near(grad, grads[key], 1e-4, key)


# -- what torch gives -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["plain", "causal", "scale", "mask", "mask of numbers", "shared heads"])
@pytest.mark.parametrize("lengths", [(4, 6), (6, 4), (5, 5), (1, 7)], ids=str)
def test_softmax_is_torchs(option, lengths):
    g = torch.Generator().manual_seed(0)
    heads = 1 if option == "shared heads" else 3
    q, k, v = (
        torch.randn(2, h, n, 5, generator=g).double().requires_grad_()
        for h, n in zip((3, heads, heads), (lengths[0], *lengths[1:] * 2))
    )
    keep = torch.rand(2, 3, *lengths, generator=g) < 0.6
    keep[..., 0] = True
    given, mask = {
        "plain": ({}, None), "causal": ({"is_causal": True}, None), "scale": ({"scale": 0.3}, None), "mask": ({}, keep),
        "mask of numbers": ({}, torch.where(keep, 0.3, -torch.inf).double()), "shared heads": ({"enable_gqa": True}, None),
    }[option]  # fmt: skip
    want, got = sdpa(q, k, v, attn_mask=mask, **given), A.attention(q, k, v, mask=mask, **given)
    torch.testing.assert_close(got, want)
    grads = (torch.autograd.grad(out.pow(2).sum(), (q, k, v)) for out in (got, want))
    torch.testing.assert_close(*grads)


def test_autocast_is_that_of_torch():
    q, k, v = (a.float() for a in (Q, K, V))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = sdpa(q, k, v)
        for implementation in ("sdpa", "blockwise", "reference"):
            out = A.attention(q, k.bfloat16(), v, implementation=implementation)
            assert out.dtype == want.dtype == torch.bfloat16
            torch.testing.assert_close(out, want, atol=2e-2, rtol=2e-2)


# -- what follows of other calls ------------------------------------------------------------------------------------------------


def test_alibi_slopes_are_those_of_the_paper():
    from anymax._attention.scores import alibi_slopes

    assert alibi_slopes(8) == [2.0**-h for h in range(1, 9)]
    np.testing.assert_allclose(alibi_slopes(3), [2**-4, 2**-8, 2**-2])
    named = A.attention(Q, K, V, alibi=torch.tensor(alibi_slopes(H), dtype=torch.float64))
    assert torch.equal(A.attention(Q, K, V, alibi=True), named)


# torch's own, in forward mode
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("mapping", [Softmax(), Entmax(1.5)], ids=repr)
def test_vmap_and_forward_mode(mapping):
    f = lambda q: A.attention(q, K[0], V[0], mapping, is_causal=True)  # noqa: E731
    torch.testing.assert_close(torch.func.vmap(f)(Q), A.attention(Q, K[:1], V[:1], mapping, is_causal=True))
    tangent = torch.ones_like(Q[0])
    _, slope = torch.func.jvp(f, (Q[0],), (tangent,))
    step = (f(Q[0] + 1e-6 * tangent) - f(Q[0] - 1e-6 * tangent)) / 2e-6
    torch.testing.assert_close(slope, step, atol=1e-6, rtol=1e-5)


def test_a_picture_of_the_weights():
    plt = pytest.importorskip("matplotlib.pyplot")
    q, k, v = (a[0].requires_grad_() for a in (Q.clone(), K.clone(), V.clone()))
    _, p = A.attention(q, k, v, Sparsemax(), need_weights=True, alibi=SLOPES)
    axes = A.plot.attention(p)
    assert axes.size >= H
    assert axes.flat[0].figure is not None
    assert A.plot.attention(p[0]).get_title() == f"{float((p[0] == 0).double().mean()):.0%} exact zeros"
    plt.close("all")


# -- thresholds, and what is made of `bias` ------------------------------------------------------------------------------------


THRESHOLDS = [
    Softmax(),
    Entmax(1.3),
    Sparsemax(),
    A.Budget(2.0),
    A.NormMax(2.0),
    A.SparseSoftmax(k=3),
    A.Sink("entmax15", 0.4),
]


@pytest.mark.parametrize("kind", [*KINDS, "blockwise"])
@pytest.mark.parametrize("mapping", THRESHOLDS, ids=repr)
def test_thresholds_are_those_of_the_scores(mapping, kind, monkeypatch):
    in_blocks(monkeypatch, (32, 2, 2))
    at = K.shape[2] - Q.shape[2]
    seen = torch.ones(Q.shape[2], K.shape[2], dtype=torch.bool).tril(at)
    s = (Q @ K.mT * 0.7).masked_fill(~seen, -torch.inf)
    options = {"is_causal": True, "offset": at, "scale": 0.7, "return_threshold": True}
    if kind != "blockwise":
        q, k, v = (KINDS[kind](a.numpy()) for a in (Q, K, V))
        p_of = A.apply(mapping, s)
        out, p, tau = A.attention(q, k, v, mapping, need_weights=True, **options)
        bound = 1e-6 if kind == "jax" else 1e-12  # in fp32
        near(out, p_of @ V, bound, mapping)
        near(p, p_of, bound, mapping)
        near(tau, A.threshold(mapping, s).tau, bound, mapping)
        return
    leaves = [a.clone().requires_grad_() for a in (Q, K, V)]
    g = torch.randn(s.shape[:-1], generator=torch.Generator().manual_seed(0), dtype=s.dtype)
    found = []
    for implementation in ("blockwise", "reference"):
        out, tau = A.attention(*leaves, mapping, implementation=implementation, **options)
        both = torch.autograd.grad((tau * g).sum() + out.square().sum(), leaves, retain_graph=True)
        alone = torch.autograd.grad((tau * g).sum(), leaves, allow_unused=True, retain_graph=True)
        again = torch.autograd.grad((tau * g).sum(), leaves[:2], create_graph=True)
        twice = torch.autograd.grad(sum(a.square().sum() for a in again), leaves[:2])
        found.append((out, tau, *both, *alone[:2], *twice))
        assert alone[2] is None or not alone[2].any()
    for one, other in zip(*found):
        near(one, other, 1e-10, mapping)
    near(found[0][1], A.threshold(mapping, s).tau, 1e-12, mapping)


def test_attention_over_parts_of_the_keys_is_merged_by_thresholds():
    parts = [
        A.attention(Q, K[:, :, at], V[:, :, at], return_threshold=True)
        for at in (slice(2), slice(2, None), slice(0, 0))
    ]
    out, tau = (torch.stack(a) for a in zip(*parts))
    assert (tau[2] == -torch.inf).all()
    near((out * tau.softmax(0)[..., None]).sum(0), A.attention(Q, K, V), 1e-12, "merged")
    assert A.attention(Q.bfloat16(), K.bfloat16(), V.bfloat16(), return_threshold=True)[1].dtype == torch.float32
    assert A.attention(Q, K[:, :, :0], V[:, :, :0], A.Sink(score=0.7), return_threshold=True)[1].unique().tolist() == [
        0.7
    ]


@pytest.mark.parametrize("implementation", ["blockwise", "reference"])
@pytest.mark.parametrize("name", MAPS)
def test_a_forget_gate_is_a_bias(name, implementation):
    """The Forgetting Transformer: what stands between a query and a key fades the key."""
    mapping = MAPS[name][0](torch.tensor(1.4, dtype=K.dtype) if name == "entmax" else None)
    forget = torch.randn(*K.shape[:3], generator=torch.Generator().manual_seed(0), dtype=K.dtype)
    total = torch.nn.functional.logsigmoid(forget).cumsum(-1)
    bias = total[..., :, None] - total[..., None, :]
    got = A.attention(K, K, V, mapping, is_causal=True, bias=bias, implementation=implementation)
    for i in range(1, K.shape[2]):
        s = K[:, :, i : i + 1] @ K[:, :, : i + 1].mT / K.shape[3] ** 0.5
        for j in range(i + 1):
            s[..., 0, j] += torch.log(torch.sigmoid(forget[..., j + 1 : i + 1]).prod(-1))
        near(got[:, :, i : i + 1], A.apply(mapping, s) @ V[:, :, : i + 1], 1e-10, (name, i))


# -- types ----------------------------------------------------------------------------------------------------------------------


def test_the_types_name_every_implementation_and_every_option():
    parts = (importlib.import_module(f"anymax._attention.{part}") for part in ("call", "implementations"))
    typed, implementations = parts
    assert list(typing.get_args(typed.ImplementationName)) == [i.name for i in implementations.IMPLEMENTATIONS]
    parameters = inspect.signature(A.attention).parameters
    by_name = {name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert set(typed.AttentionOptions.__annotations__) == by_name - {"need_weights", "return_threshold"}
    assert inspect.signature(A.explain_attention).parameters == parameters
    for choice in typing.get_overloads(inspect.unwrap(A.attention)):
        own = inspect.signature(choice).parameters
        beside = ("need_weights", "return_threshold", "options")
        assert list(own) == [*(name for name in parameters if name not in by_name), *beside]
