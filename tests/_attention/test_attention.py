"""Attention: torch's own for softmax, and loops over queries for any map."""

from __future__ import annotations

import importlib
import inspect
import math
import typing

import numpy as np
import plainly
import pytest
from kinds import KINDS, back, every_kind

import anymax as A
from anymax import Entmax, NormMax, Softmax, Sparsemax, SparseSoftmax, Taylor

torch = pytest.importorskip("torch")
sdpa = torch.nn.functional.scaled_dot_product_attention

MAPS = {
    "softmax": (Softmax(), plainly.softmax),
    "sparsemax": (Sparsemax(), lambda x: plainly.entmax(x, 2.0)),
    "entmax1.5": (Entmax(1.5), lambda x: plainly.entmax(x, 1.5)),
    "entmax3": (Entmax(3.0), lambda x: plainly.entmax(x, 3.0)),
    "normmax": (NormMax(2.0), lambda x: plainly.normmax(x, 2.0)),
    "taylor": (Taylor(2), plainly.taylor),
    "sparse_softmax": (SparseSoftmax(k=2), lambda x: plainly.topk_softmax(x, 2)),
}


def arrays(q=(2, 3, 4, 5), k=None, v=None, seed=0):
    g = np.random.default_rng(seed)
    k = k or (*q[:-2], 6, q[-1])
    v = v or (*k[:-1], 7)
    return tuple(g.normal(size=s) for s in (q, k, v))


def loops(p_of, q, k, v, scale=None, keep=None, bias=None):
    """One query at a time, the masked keys left out."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    shape = np.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    q, k, v = (np.broadcast_to(a, (*shape, *a.shape[-2:])) for a in (q, k, v))
    full = (*shape, q.shape[-2], k.shape[-2])
    keep = np.broadcast_to(True if keep is None else keep, full)
    bias = np.broadcast_to(0.0 if bias is None else bias, full)
    out = np.zeros((*shape, q.shape[-2], v.shape[-1]))
    for i in np.ndindex(*full[:-1]):
        b, inside = i[:-1], keep[i]
        if inside.any():
            s = scale * (k[b][inside] @ q[i]) + bias[i][inside]
            out[i] = p_of(s) @ v[b][inside]
    return out


OPTIONS = {
    "plain": {}, "scale": {"scale": 0.3}, "causal": {"is_causal": True}, "mask": {"mask": "bool"}, "additive": {"mask": "float"},
    "broadcast mask": {"mask": "row"},
}  # fmt: skip


def masks(name, shape, seed=3):
    g = np.random.default_rng(seed)
    keep = g.uniform(size=shape) < 0.6
    keep[..., 0] = True
    return {"bool": keep, "row": keep[0, 0], "float": np.where(keep, g.normal(size=shape), -np.inf)}[name]


# -- softmax is torch's -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("lengths", [(4, 6), (6, 4), (5, 5), (1, 7)])
def test_softmax_is_torchs(option, lengths):
    given = dict(OPTIONS[option])
    q, k, v = (torch.tensor(a) for a in arrays((2, 3, lengths[0], 5), (2, 3, lengths[1], 5)))
    mask = masks(given.pop("mask"), (2, 3, *lengths)) if "mask" in given else None
    mask = None if mask is None else torch.tensor(mask)
    leaves = [[a.clone().requires_grad_() for a in (q, k, v)] for _ in range(2)]
    want = sdpa(*leaves[0], attn_mask=mask, **given)
    got = A.attention(*leaves[1], mask=mask, **given)
    torch.testing.assert_close(got, want)
    want.pow(2).sum().backward()
    got.pow(2).sum().backward()
    for a, b in zip(*leaves):
        torch.testing.assert_close(b.grad, a.grad)


def test_grouped_queries_are_torchs():
    q, k, v = (torch.tensor(a) for a in arrays((2, 6, 4, 5), (2, 2, 7, 5)))
    torch.testing.assert_close(A.attention(q, k, v, enable_gqa=True), sdpa(q, k, v, enable_gqa=True))
    torch.testing.assert_close(
        A.attention(q, k, v, enable_gqa=True, is_causal=True), sdpa(q, k, v, enable_gqa=True, is_causal=True)
    )


def test_bias_adds_to_the_scores():
    q, k, v = (torch.tensor(a) for a in arrays())
    bias = torch.randn(3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(A.attention(q, k, v, bias=bias), sdpa(q, k, v, attn_mask=bias.expand(2, 3, 4, 6)))
    keep = torch.tensor(masks("bool", (2, 3, 4, 6)))
    want = sdpa(q, k, v, attn_mask=torch.where(keep, bias, -torch.inf))
    torch.testing.assert_close(A.attention(q, k, v, bias=bias, mask=keep), want)


# -- any map is a loop ------------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("name", MAPS)
def test_any_map_by_loops(name, kind):
    if kind in ("jax", "strict") and name not in ("softmax", "entmax1.5"):
        pytest.skip("numpy and torch share the formula")
    mapping, p_of = MAPS[name]
    q, k, v = arrays()
    make, tol = KINDS[kind], 5e-6 if kind == "jax" else 1e-10
    keep = masks("bool", (2, 3, 4, 6))
    bias = np.random.default_rng(5).normal(size=(4, 6))
    causal = np.tril(np.ones((4, 6), bool))
    cases = [
        ({}, {}), ({"scale": 2.0}, {"scale": 2.0}), ({"is_causal": True}, {"keep": causal}), ({"mask": make(keep)}, {"keep": keep}),
        ({"mask": make(keep), "is_causal": True, "bias": make(bias)}, {"keep": keep & causal, "bias": bias}),
    ]  # fmt: skip
    for given, plain in cases:
        got = A.attention(make(q), make(k), make(v), mapping, **given)
        assert type(got) is type(make(q))
        np.testing.assert_allclose(back(got), loops(p_of, q, k, v, **plain), atol=tol, err_msg=str(plain.keys()))


@every_kind
@pytest.mark.parametrize("name", ["softmax", "entmax1.5", "taylor"])
def test_a_query_with_nothing_to_attend_to_gives_zeros(name, kind):
    q, k, v = arrays()
    keep = np.ones((4, 6), bool)
    keep[2] = False
    make = KINDS[kind]
    out = back(A.attention(make(q), make(k), make(v), MAPS[name][0], mask=make(keep)))
    assert not out[:, :, 2].any()
    assert np.isfinite(out).all()
    np.testing.assert_allclose(
        out[:, :, [0, 1, 3]], back(A.attention(make(q), make(k), make(v), MAPS[name][0]))[:, :, [0, 1, 3]], atol=1e-6
    )


@pytest.mark.parametrize("name", MAPS)
def test_gradients(name):
    leaves = [torch.tensor(a, requires_grad=True) for a in arrays((1, 2, 3, 4), (1, 2, 4, 4))]
    keep = torch.tensor([[True, False, True, True], [False] * 4, [True] * 4])
    assert torch.autograd.gradcheck(lambda q, k, v: A.attention(q, k, v, MAPS[name][0], mask=keep), leaves)


def test_gradient_in_an_alpha_for_each_head():
    q, k, v = (torch.tensor(a) for a in arrays())
    alpha = torch.tensor([1.0, 1.5, 2.5], dtype=torch.float64).reshape(3, 1, 1).requires_grad_()
    assert torch.autograd.gradcheck(lambda a: A.attention(q, k, v, Entmax(a)), (alpha,))


def test_gradients_in_jax():
    jax = pytest.importorskip("jax")
    q, k, v = arrays()
    leaves = [torch.tensor(a, requires_grad=True) for a in (q, k, v)]
    A.attention(*leaves, Entmax(1.5)).pow(2).sum().backward()
    f = jax.jit(jax.grad(lambda *a: (A.attention(*a, Entmax(1.5)) ** 2).sum(), argnums=(0, 1, 2)))
    for got, leaf in zip(f(*(jax.numpy.asarray(a) for a in (q, k, v))), leaves):
        np.testing.assert_allclose(got, leaf.grad, atol=1e-4)


def test_dtype_dropout_and_shapes():
    q, k, v = (torch.tensor(a).bfloat16() for a in arrays())
    assert A.attention(q, k, v, Entmax(1.5)).dtype == torch.bfloat16
    q, k, v = arrays((4, 5), (6, 5))
    assert A.attention(q, k, v, Sparsemax()).shape == (4, 7)
    a, b, c = (A.attention(q, k, v, dropout_p=0.5, generator=s) for s in (0, 0, 1))
    np.testing.assert_array_equal(a, b)
    assert (a != c).any()
    many = np.mean([A.attention(q, k, v, dropout_p=0.3, generator=s) for s in range(2000)], 0)
    np.testing.assert_allclose(many, A.attention(q, k, v), atol=0.15)


Q, K, V = (np.zeros(s) for s in ((2, 4, 5), (2, 6, 5), (2, 6, 3)))
WRONG = {
    "list": (lambda: A.attention([[1.0]], K, V), TypeError, "q must be an array, got list"),
    "vector": (lambda: A.attention(Q[0, 0], K, V), ValueError, "q needs at least two dimensions"),
    "features": (lambda: A.attention(Q[..., :4], K, V), ValueError, "q has 4 features and k has 5"),
    "length": (lambda: A.attention(Q, K, V[:, :5]), ValueError, "k has length 6 and v has 5"),
    "dtype": (lambda: A.attention(Q, K.astype(np.float32), V), TypeError, "must have one dtype"),
    "framework": (
        lambda: A.attention(torch.tensor(Q), K, V),
        TypeError,
        "of one framework, got arrays of torch, NumPy and NumPy",
    ),
    "mapping": (lambda: A.attention(Q, K, V, 2), TypeError, "expected a mapping such as"),
    "heads": (lambda: A.attention(np.zeros((3, 4, 5)), K, V, enable_gqa=True), ValueError, "must be a multiple"),
    "dropout": (lambda: A.attention(Q, K, V, dropout_p=1.0), ValueError, "at least 0 and below 1, got 1.0"),
    "mask shape": (lambda: A.attention(Q, K, V, mask=np.ones((4, 5), bool)), ValueError, "does not broadcast"),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors(case):
    call, error, words = WRONG[case]
    with pytest.raises(error, match=words):
        call()


# -- types ------------------------------------------------------------------------------------------------------------------------


def test_the_types_name_every_implementation_and_every_option():
    call, implementations = (
        importlib.import_module(f"anymax._attention.{part}") for part in ("call", "implementations")
    )
    assert list(typing.get_args(call.ImplementationName)) == [i.name for i in implementations.IMPLEMENTATIONS]
    parameters = inspect.signature(A.attention).parameters
    by_name = {name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert set(call.AttentionOptions.__annotations__) == by_name - {"need_weights"}
    assert inspect.signature(A.explain_attention).parameters == parameters
    for choice in typing.get_overloads(inspect.unwrap(A.attention)):
        own = inspect.signature(choice).parameters
        assert list(own) == [*(name for name in parameters if name not in by_name), "need_weights", "options"]
