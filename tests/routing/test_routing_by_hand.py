"""Routers against a brute force, token by token: ties, masks, groups, all dtypes; any integer as an index; rows without an expert."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
from kinds import KINDS, back, every_kind

import anymax as A
from anymax.routing import expert_choice, limit_capacity, load_balancing_loss, route, route_support

INF = math.inf


def softmax(x):
    e = np.exp(x - max(x.max(), -1e300))
    return e / max(e.sum(), 1e-300)


def sparsemax(x):
    z = np.sort(x[x > -INF])[::-1]
    if not z.size:
        return np.zeros_like(x)
    size = max(i for i in range(1, len(z) + 1) if 1 + i * z[i - 1] > z[:i].sum())
    return np.maximum(x - (z[:size].sum() - 1) / size, 0)


VALUES = {
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "sqrtsoftplus": lambda x: np.sqrt(np.logaddexp(0, x)),
    "softmax": softmax,
    "sparsemax": sparsemax,
}


def one_token(x, k, scoring, bias=0.0, by=None, groups=1, keep_groups=1, group_by=2, norm_topk_prob=False):
    """(the experts, their weights) of the scores of one token; -1 and 0 where there are fewer than k."""
    v, size = VALUES[scoring](x), len(x) // groups
    key = np.broadcast_to(v + bias if by is None else by, x.shape)
    open_ = [e for e in range(len(x)) if x[e] > -INF and (scoring != "sparsemax" or v[e] > 0)]
    best = {}
    for e in sorted(open_, key=lambda e: -key[e]):
        best.setdefault(e // size, []).append(key[e])
    most = 1 if group_by == "max" else group_by
    kept = sorted(best, key=lambda g: (-sum(best[g][:most]), g))[:keep_groups]
    found = sorted((e for e in open_ if e // size in kept), key=lambda e: (-key[e], e))[:k]
    weight = v[found] / (sum(v[found]) or 1.0) if norm_topk_prob else v[found]
    none = k - len(found)
    return [*found, *[-1] * none], [*weight, *[0.0] * none]


BIAS = np.round(4 * np.random.default_rng(1).normal(size=12)) / 8
BY = np.round(4 * np.random.default_rng(2).normal(size=(40, 12))) / 8
WORDS = {
    "k of all": {},
    "bias": {"bias": BIAS},
    "by": {"by": BY},
    "groups": {"groups": 4, "keep_groups": 2, "norm_topk_prob": True},
    "bias in groups": {"bias": BIAS, "groups": 4, "keep_groups": 2, "group_by": 3},
    "largest of groups": {"bias": BIAS, "groups": 3, "keep_groups": 1, "group_by": "max", "norm_topk_prob": True},
    "by in groups": {"by": BY, "groups": 6, "keep_groups": 5, "group_by": 2},
}
DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "int64")


def scores(dtype):
    """With ties that halves hold exactly, and masked experts where the dtype has -inf."""
    rng = np.random.default_rng(4)
    x = np.round(4 * rng.normal(size=(40, 12))) / 2
    if "int" in dtype:
        return np.round(x)
    x[rng.random(x.shape) < 0.3] = -INF
    x[7] = -INF
    return x


@pytest.mark.parametrize("scoring", VALUES)
@pytest.mark.parametrize("words", WORDS)
def test_routes_token_by_token(words, scoring):
    torch = pytest.importorskip("torch")
    for dtype in DTYPES:
        x = scores(dtype)
        given = [{k: v[t] if k == "by" else v for k, v in WORDS[words].items()} for t in range(len(x))]
        want = [one_token(row, 5, scoring, **more) for row, more in zip(x, given, strict=True)]
        index, weight = (np.array(a) for a in zip(*want, strict=True))
        kinds = {"torch": torch.tensor(x).to(getattr(torch, dtype))}
        if dtype != "bfloat16":
            kinds["numpy"] = x.astype(dtype)
        if dtype == "float64":
            kinds["strict"] = KINDS["strict"](x)
        for kind, a in kinds.items():
            more = {k: KINDS[kind](v) if isinstance(v, np.ndarray) else v for k, v in WORDS[words].items()}
            for engine in (None, "reference"):
                with A.use(engine) if engine else contextlib.nullcontext():
                    got = route(a, 5, scoring, **more)
                np.testing.assert_array_equal(back(got.index), index, f"{kind} {dtype} {engine}")
                np.testing.assert_allclose(back(got.weight), weight, rtol=3e-6, atol=1e-7)


def test_routes_token_by_token_in_jax():
    jax = pytest.importorskip("jax")
    x = scores("float32").astype(np.float32)
    for words, scoring in (("bias in groups", "softmax"), ("by in groups", "sparsemax")):
        more = {k: jax.numpy.asarray(v) if isinstance(v, np.ndarray) else v for k, v in WORDS[words].items()}
        got = jax.jit(lambda x, s=scoring, m=more: route(x, 5, s, **m))(x)
        given = [{k: v[t] if k == "by" else v for k, v in WORDS[words].items()} for t in range(len(x))]
        want = [one_token(row, 5, scoring, **m)[0] for row, m in zip(x.astype(np.float64), given, strict=True)]
        np.testing.assert_array_equal(got.index, want)


@pytest.mark.parametrize("scoring", VALUES)
@every_kind
def test_experts_and_supports_by_hand(kind, scoring):
    c, x = KINDS[kind], np.where(scores("float64") > -INF, BY + 0.1 * np.sin(np.arange(480.0).reshape(40, 12)), -INF)
    x = x.reshape(2, 20, 12).astype(np.float32)
    v = np.apply_along_axis(VALUES[scoring], -1, x.astype(np.float64))
    for bias in (None, BIAS):
        key = np.where((x > -INF) & (v > 0), v if bias is None else v + bias, -INF)
        order = np.argsort(-key, axis=1, kind="stable")[:, :15]
        there = np.take_along_axis(key, order, 1) > -INF
        got = expert_choice(c(x), 15, scoring, bias=None if bias is None else c(bias))
        np.testing.assert_array_equal(back(got.index), np.swapaxes(np.where(there, order, -1), 1, 2))
        weight = np.where(there, np.take_along_axis(v, order, 1), 0)
        np.testing.assert_allclose(back(got.weight), np.swapaxes(weight, 1, 2), rtol=3e-6, atol=1e-7)
    ids, offsets, weight = (back(a) for a in route_support(c(x), scoring))
    np.testing.assert_array_equal(ids, np.nonzero(v)[2])
    np.testing.assert_array_equal(np.diff(offsets), (v > 0).sum(-1).ravel())
    np.testing.assert_allclose(weight, v[v > 0], rtol=3e-6, atol=1e-7)


@every_kind
def test_experts_of_a_sequence_with_a_nan(kind):
    x = np.array([[1.0, 0.0], [math.nan, 2.0], [0.0, 1.0]])
    index, weight = (back(a) for a in expert_choice(KINDS[kind](x), 2, "sigmoid"))
    assert index.tolist() == [[-1, -1], [1, 2]]
    assert np.isnan(weight).tolist() == [[True, True], [False, False]]


# -- indices ----------------------------------------------------------------------------------------------------------------------

INTEGERS = ("uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


@pytest.mark.parametrize("dtype", INTEGERS)
@every_kind
def test_every_integer_is_an_index(kind, dtype):
    c, rng = KINDS[kind], np.random.default_rng(4)
    x, index = rng.normal(size=(4, 100, 4)).astype(np.float32), rng.integers(0, 4, (4, 100, 2))
    priority = rng.permutation(400).reshape(4, 100) % 120
    f = np.stack([np.bincount(i.ravel(), minlength=4) for i in index]) / 100
    p = np.apply_along_axis(softmax, -1, x.astype(np.float64)).mean(1)
    given = c(index.astype(dtype))
    np.testing.assert_allclose(load_balancing_loss(c(x), given), 4 * (f.mean(0) * p.mean(0)).sum(), rtol=1e-5)
    np.testing.assert_allclose(load_balancing_loss(c(x), given, per="sequence"), 2 * (f * p).sum(-1).mean(), rtol=1e-5)
    got = limit_capacity(given, 30, 4, priority=c(priority.astype(dtype)))
    want = limit_capacity(index, 30, 4, priority=priority.astype(np.float64))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(back(a), b)


@pytest.mark.parametrize("stray", [4, -7])
@every_kind
def test_stray_indices_are_refused(kind, stray):
    c, index = KINDS[kind], np.zeros((2, 3, 2), int)
    x, index[1, 2, 0] = c(np.zeros((2, 3, 4))), stray
    for call in (
        lambda: load_balancing_loss(x, c(index)),
        lambda: load_balancing_loss(x, c(index), per="sequence"),
        lambda: limit_capacity(c(index), 2, 4),
        lambda: route(x, index=c(index)),
    ):
        with pytest.raises(IndexError, match="index: class indices must be from 0 to 3, or -1 for none"):
            call()
    padding = c(np.arange(6).reshape(2, 3) < 5)
    assert np.isfinite(back(load_balancing_loss(x, c(index), mask=padding)))


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_stray_indices_in_programs(framework):
    module, c = pytest.importorskip(framework), KINDS[framework]
    traced = module.jit if framework == "jax" else lambda f: module.compile(f, backend="aot_eager", fullgraph=True)
    x, index = c(np.zeros((2, 3, 4), np.float32)), np.zeros((2, 3, 2), int)
    index[1, 2, 0], index[0, 0, 1] = 9, -1
    f = traced(
        lambda x, i: (
            load_balancing_loss(x, i), load_balancing_loss(x, i, per="sequence"), route(x, index=i).weight, limit_capacity(i, 9, 4)
        )
    )  # fmt: skip
    batch, sequence, weight, limited = f(x, c(index))
    assert np.isnan([float(batch), float(sequence)]).all()
    assert np.argwhere(np.isnan(back(weight))).tolist() == [[1, 2, 0]]
    assert back(limited.load).tolist() == [10, 0, 0, 0]
    assert np.isfinite([float(a) for a in f(x, c(index % 4))[:2]]).all()


@every_kind
def test_the_loss_of_given_shares_and_counts(kind):
    """As TransformerEngine and Megatron-LM have it: experts / (k tokens^2) times the sum of counts times sums of shares, here times k."""
    c, rng = KINDS[kind], np.random.default_rng(5)
    x, index = rng.normal(size=(60, 4)).astype(np.float32), rng.integers(0, 4, (60, 2))
    p, counts = np.apply_along_axis(softmax, -1, x.astype(np.float64)), np.bincount(index.ravel(), minlength=4)
    theirs = 4 / (2 * 60**2) * (p.sum(0) * counts).sum()
    want = load_balancing_loss(x, index)
    np.testing.assert_allclose(want, 2 * theirs, rtol=1e-6)
    for got in (
        load_balancing_loss(c(x), counts=c(counts)),
        load_balancing_loss(c(p.astype(np.float32)), None, None, counts=c(3 * counts), tokens=180),
    ):
        np.testing.assert_allclose(back(got), want, rtol=1e-6)
    by_sequence = c(np.stack([counts, counts[::-1]]).astype(np.float32))
    got = load_balancing_loss(c(np.stack([x, x[:, ::-1]])), counts=by_sequence, per="sequence")
    np.testing.assert_allclose(back(got), theirs, rtol=1e-6)
    for bad in ({}, {"index": c(index), "counts": c(counts)}, {"index": c(index), "tokens": 60}):
        with pytest.raises(TypeError, match="give index, the experts of each token, or counts="):
            load_balancing_loss(c(x), **bad)
    with pytest.raises(ValueError, match=r"counts must have the shape \(4,\)"):
        load_balancing_loss(c(x), counts=by_sequence)


# -- rows without experts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [{}, {"bias": True}, {"groups": 2, "keep_groups": 1}])
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax", "sparsemax"])
@every_kind
def test_what_is_given_where_there_is_no_expert(kind, scoring, words):
    """Distinct experts with the weight 0, as vLLM gives to padding; other rows are what they are."""
    c = KINDS[kind]
    x = np.array(
        [[0.5, 0.4, 0.3, 0.2], [1.0, math.nan, 0.0, 2.0], [-INF] * 4, [-INF, -INF, -INF, 1.0], [9.0, 8.9, 0.0, 3.0]]
    )
    words = {**words, "bias": c(np.array([0.0, 0.1, 0.0, 0.0]))} if "bias" in words else words
    plain, filled = (route(c(x), 3, scoring, invalid=i, **words) for i in (None, "argmax"))
    index, weight = back(filled.index), back(filled.weight)
    was, there = back(plain.index), back(plain.index) >= 0
    assert all(len(set(row)) == 3 for row in index.tolist())
    assert ((index >= 0) & (index < 4)).all()
    np.testing.assert_array_equal(index[there], was[there])
    np.testing.assert_array_equal(weight, np.where(there, back(plain.weight), 0))
    assert index[1].tolist() == index[2].tolist() == [0, 1, 2]
    assert (was[1] == -1).all()
    with pytest.raises(ValueError, match=r"route: row [01], in C order, has no class to give"):
        route(c(x), 3, scoring, invalid="raise", **words)
    assert back(route(c(x[:1]), 2, "softmax", invalid="raise").index).tolist() == [[0, 1]]


def test_padding_has_no_gradient():
    torch = pytest.importorskip("torch")
    from anymax import nn

    router = nn.Router(3, 4, 2, norm_topk_prob=True, invalid="argmax")
    x = torch.randn(5, 3)
    x[1] = math.nan
    index = router(x).index
    assert index[1].tolist() == [0, 1]
    rows = torch.randn(5, 4, requires_grad=True)
    hole = torch.where(torch.arange(5)[:, None] == 1, math.nan, rows)
    (g,) = torch.autograd.grad(route(hole, 2, norm_topk_prob=True, invalid="argmax").weight[:, 0].sum(), rows)
    assert g.isfinite().all()
    assert not g[1].any()
    assert g[0].any()
    compiled = torch.compile(lambda x: route(x, 2, invalid="argmax"), backend="aot_eager", fullgraph=True)(
        hole.detach()
    )
    assert torch.equal(compiled.index, route(hole, 2, invalid="argmax").index)
    for bad, said in (
        ({"invalid": "drop"}, "invalid must be None"),
        ({"invalid": "argmax", "index": index}, "leave one out"),
    ):
        with pytest.raises(ValueError, match=said):
            route(rows, None if "index" in bad else 2, **bad)
