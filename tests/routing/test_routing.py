"""Routers: the definition by NumPy in fp64, the known mistakes, losses of the load, capacity and the balancing bias."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from kinds import KINDS, back, every_kind

import anymax as A
from anymax.routing import (
    balance,
    expert_choice,
    limit_capacity,
    load_balancing_loss,
    route,
    route_support,
    router_z_loss,
)

INF = math.inf
RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 24)).astype(np.float32)
BIAS = RNG.normal(size=24).astype(np.float32) * 0.2
SCORINGS = {
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "sqrtsoftplus": lambda x: np.sqrt(np.logaddexp(0.0, x)),
    "softmax": lambda x: (
        np.exp(x - x.max(-1, keepdims=True)) / np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)
    ),
}


def defined(x, k, scoring, bias=0.0, groups=None, keep_groups=None, group_by=2, norm=False, factor=1.0):
    """One token at a time, as the papers say it."""
    index, weight = [], []
    for s in SCORINGS[scoring](np.asarray(x, np.float64)):
        key = s + bias
        if groups:
            blocks = key.reshape(groups, -1)
            sums = blocks.max(-1) if group_by == "max" else np.sort(blocks, -1)[:, -group_by:].sum(-1)
            inside = np.isin(np.arange(groups), np.argsort(-sums, kind="stable")[:keep_groups])
            key = np.where(np.repeat(inside, blocks.shape[1]), key, -INF)
        best = np.argsort(-key, kind="stable")[:k]
        w = s[best]
        index.append(best)
        weight.append(factor * (w / w.sum() if norm else w))
    return np.array(index), np.array(weight)


CASES = {
    "deepseek-v3": {"scoring": "sigmoid", "bias": BIAS, "groups": 4, "keep_groups": 2, "norm": True, "factor": 2.5},
    "deepseek-v2": {"scoring": "softmax", "groups": 4, "keep_groups": 2, "group_by": "max", "factor": 16.0},
    "three of a group": {"scoring": "sqrtsoftplus", "groups": 3, "keep_groups": 2, "group_by": 3},
    "deepseek-v4": {"scoring": "sqrtsoftplus", "bias": BIAS, "norm": True, "factor": 1.5},
    "mixtral": {"scoring": "softmax", "norm": True},
    "jamba": {"scoring": "softmax"},
    "ernie": {"scoring": "softmax", "bias": BIAS * 0.1, "norm": True},
    "llama 4": {"scoring": "sigmoid"},
}


def words(case):
    names = {"norm": "norm_topk_prob", "factor": "routed_scaling_factor"}
    return {names.get(name, name): value for name, value in CASES[case].items()}


@pytest.mark.parametrize("case", CASES)
@every_kind
def test_routes_are_those_of_the_definition(kind, case):
    c = KINDS[kind]
    index, weight = defined(X, 5, **CASES[case])
    given = {name: c(value) if name == "bias" else value for name, value in words(case).items()}
    got = route(c(X), 5, **given)
    np.testing.assert_array_equal(back(got.index), index)
    np.testing.assert_allclose(back(got.weight), weight, rtol=2e-6)
    across = route(c(X.T), 5, axis=0, **given)
    np.testing.assert_array_equal(back(across.index).T, index)
    np.testing.assert_array_equal(back(across.weight).T, back(got.weight))
    with A.use("reference"):
        again = route(c(X), 5, **given)
    np.testing.assert_array_equal(back(again.index), index)
    replayed = route(c(X), scoring=given["scoring"], index=got.index, **{
        name: given[name] for name in ("norm_topk_prob", "routed_scaling_factor") if name in given
    })  # fmt: skip
    np.testing.assert_allclose(back(replayed.weight), back(got.weight), rtol=1e-6)


# -- mistakes that others have made -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [None, "reference"])
@every_kind
def test_dropped_groups_are_not_filled_with_zeros(kind, engine):
    """With a bias below all values, a dropped expert of 0 would win over those that are left."""
    x, bias = np.zeros((1, 4)), np.array([-0.7, -0.8, -2.0, -2.0])
    c = KINDS[kind]
    with A.use(engine) if engine else warnings.catch_warnings():
        got = route(c(x), 2, "sigmoid", bias=c(bias), groups=2, keep_groups=1)
    assert back(got.index).tolist() == [[0, 1]]


def test_halves_choose_the_experts_of_fp32():
    """The sum of value and bias, rounded to bf16, would tie; so would the values themselves."""
    torch = pytest.importorskip("torch")
    x = torch.tensor([[3.0, 3.015625, 2.984375, -4.0]]).bfloat16()
    bias = torch.tensor([0.0, 0.001, 0.004, 0.0])
    got, want = (route(a, 2, "sigmoid", bias=bias) for a in (x, x.float()))
    assert torch.equal(got.index, want.index)
    assert torch.equal(got.weight, want.weight)
    assert got.weight.dtype == torch.float32
    key = (x.sigmoid() + bias.bfloat16()).float()
    assert key[0, :3].unique().numel() < 3  # what the halves would have compared


@pytest.mark.parametrize("size", [33, 64, 200])
@every_kind
def test_more_than_32_experts_in_a_group(kind, size):
    x = np.random.default_rng(size).normal(size=(9, 4 * size)).astype(np.float32)
    index, _ = defined(x, 8, "sigmoid", groups=4, keep_groups=2)
    assert back(route(KINDS[kind](x), 8, "sigmoid", groups=4, keep_groups=2).index).tolist() == index.tolist()


@every_kind
def test_the_two_rules_of_groups_differ(kind):
    x = KINDS[kind](np.array([[3.0, -3.0, 2.0, 2.0]]))
    chosen = {
        by: back(route(x, 1, "sigmoid", groups=2, keep_groups=1, group_by=by).index).tolist() for by in (2, "max")
    }
    assert chosen == {2: [[2]], "max": [[0]]}


def test_replayed_experts_keep_their_gradient():
    """The experts of another model: one that these scores would not choose has a weight and a gradient, and -1 has none."""
    torch = pytest.importorskip("torch")
    x = torch.tensor(X[:3], dtype=torch.float64, requires_grad=True)
    index = torch.tensor([[23, 0, -1], [1, 2, 3], [-1, -1, -1]])
    for scoring, norm in (("sigmoid", True), ("softmax", True), ("softmax", False), ("entmax15", False)):
        weight = route(x, scoring=scoring, index=index, norm_topk_prob=norm).weight
        assert (weight[index < 0] == 0).all()
        (g,) = torch.autograd.grad((weight * torch.arange(3.0)).sum(), x)
        assert g.isfinite().all()
        assert not g[2].any()
        if scoring != "entmax15":
            assert g[1, [1, 2, 3]].abs().min() > 0
            assert (weight[1] > 0).all()
        assert torch.autograd.gradcheck(
            lambda x, s=scoring, n=norm: route(x, scoring=s, index=index, norm_topk_prob=n).weight, x
        )


@pytest.mark.parametrize(("scoring", "slope"), [("sigmoid", 0.25), ("sqrtsoftplus", 0.25 / math.sqrt(math.log(2.0)))])
def test_the_slopes_at_a_score_of_0(scoring, slope):
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    x = torch.zeros(1, 2, requires_grad=True)
    (g,) = torch.autograd.grad(route(x, 1, scoring).weight.sum(), x)
    assert g.tolist() == [[pytest.approx(slope), 0.0]]
    g = jax.grad(lambda x: route(x, 1, scoring).weight.sum())(jax.numpy.zeros((1, 2)))
    assert back(g).tolist() == [[pytest.approx(slope), 0.0]]


def test_the_bias_has_no_gradient_and_no_part_in_the_weights():
    torch = pytest.importorskip("torch")
    x, b = torch.tensor(X, requires_grad=True), torch.tensor(BIAS, requires_grad=True)
    index, weight = route(x, 4, "sigmoid", bias=b)
    assert torch.equal(weight, x.sigmoid().gather(-1, index))
    assert torch.autograd.grad(weight.sum(), b, allow_unused=True)[0] is None
    assert torch.equal(route(x, 4, "sigmoid", by=x.sigmoid() + b).index, index)


# -- masks, strange rows, derivatives ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@every_kind
def test_masked_experts_and_strange_rows(kind, case):
    c = KINDS[kind]
    x = X[:5].copy()
    mask = np.ones((5, 24), bool)
    mask[:, ::2] = False
    mask[1, 3:], mask[2] = False, False
    x[3, 1], x[4, 3] = math.nan, -INF
    given = {name: c(value) if name == "bias" else value for name, value in words(case).items()}
    index, weight = (back(a) for a in route(c(x), 5, mask=c(mask), **given))
    live = index >= 0
    assert (index[live] % 2 == 1).all()
    assert (np.sort(index[1])[-1], (index[1] >= 0).sum()) == (1, 1)
    assert (index[2] == -1).all()
    assert (weight[2] == 0).all()
    assert (index[3] == -1).all()
    assert np.isnan(weight[3]).any()
    assert 3 not in index[4]
    assert (weight[[0, 1, 2, 4]][index[[0, 1, 2, 4]] < 0] == 0).all()


@pytest.mark.parametrize("case", CASES)
def test_derivatives_of_routes(case):
    torch = pytest.importorskip("torch")
    x = torch.tensor(X[:4], dtype=torch.float64, requires_grad=True)
    given = {name: torch.tensor(value) if name == "bias" else value for name, value in words(case).items()}
    f = lambda x: route(x, 3, **given).weight  # noqa: E731
    assert torch.autograd.gradcheck(f, x)
    assert torch.autograd.gradgradcheck(f, x)
    assert torch.allclose(torch.vmap(f)(x.detach()), f(x.detach()))
    x = torch.tensor(X, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = torch.compile(lambda x: route(x, 3, **given), backend="aot_eager", fullgraph=True)(x)
    want = route(x, 3, **given)
    assert torch.equal(got.index, want.index)
    torch.testing.assert_close(got.weight, want.weight)
    grads = [torch.autograd.grad(a.weight.square().sum(), x)[0] for a in (got, want)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("case", ["deepseek-v3", "mixtral", "jamba"])
def test_routes_in_jax(case):
    jax = pytest.importorskip("jax")
    torch = pytest.importorskip("torch")
    of = lambda c: {name: c(value) if name == "bias" else value for name, value in words(case).items()}  # noqa: E731
    f = lambda x: route(x, 5, **of(jax.numpy.asarray))  # noqa: E731
    got, g = jax.jit(f)(X), jax.jit(jax.grad(lambda x: (f(x).weight ** 2).sum()))(X)
    x = torch.tensor(X, requires_grad=True)
    want = route(x, 5, **of(torch.tensor))
    want.weight.square().sum().backward()
    np.testing.assert_array_equal(got.index, want.index)
    np.testing.assert_allclose(got.weight, back(want.weight), rtol=2e-6)
    np.testing.assert_allclose(g, back(x.grad), atol=2e-6)
    np.testing.assert_array_equal(jax.vmap(f)(X.reshape(4, 10, 24)).index.reshape(40, 5), got.index)


# -- other routers ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sparsemax", "entmax15"])
@every_kind
def test_sparse_routers(kind, name):
    c = KINDS[kind]
    p = A.apply(name, X)
    ids, offsets, weight = (back(a) for a in route_support(c(X), name))
    for row in range(len(X)):
        mine = slice(offsets[row], offsets[row + 1])
        assert ids[mine].tolist() == np.nonzero(p[row])[0].tolist()
        np.testing.assert_allclose(weight[mine], p[row][p[row] > 0], rtol=1e-5, atol=1e-7)
    index, compact = (back(a) for a in route(c(X), 6, name))
    assert ((index >= 0).sum(-1) == np.minimum((p > 0).sum(-1), 6)).all()
    assert ((compact > 0) == (index >= 0)).all()


def test_sparse_routes_have_gradients_and_no_shape_under_jit():
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    x = torch.tensor(X[:5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: route_support(x, "entmax15").weight, x)
    with pytest.raises(TypeError, match="route_support: how many experts there are depends on the scores"):
        jax.jit(route_support)(X)


@every_kind
def test_experts_choose_tokens(kind):
    x = KINDS[kind](np.stack([X[:12], X[12:24]]))
    index, weight = (back(a) for a in expert_choice(x, 3))
    p = SCORINGS["softmax"](back(x).astype(np.float64))
    want = np.argsort(-np.swapaxes(p, -1, -2), axis=-1, kind="stable")[..., :3]
    np.testing.assert_array_equal(index, want)
    np.testing.assert_allclose(weight, np.take_along_axis(np.swapaxes(p, -1, -2), want, -1), rtol=1e-5)
    with pytest.raises(ValueError, match="from 1 to the number of classes, 12"):
        expert_choice(x, 13)


@every_kind
def test_capacity(kind):
    """First choices come first, then the tokens' order; with priorities the more important tokens."""
    c = KINDS[kind]
    index = np.array([[0, 1], [0, 1], [1, 0], [0, -1], [-1, -1]])
    got = limit_capacity(c(index), 2, 3)
    place = {}
    want = np.full(index.shape, -1)
    for j in range(2):
        for t in range(5):
            e = index[t, j]
            if e >= 0:
                place[e] = place.get(e, 0) + 1
                want[t, j] = place[e] - 1 if place[e] <= 2 else -1
    np.testing.assert_array_equal(back(got.place), want)
    np.testing.assert_array_equal(back(got.keep), want >= 0)
    assert back(got.dropped).tolist() == [False, False, False, True, False]
    assert back(got.load).tolist() == [4, 3, 0]
    first = limit_capacity(c(index), 1, 3, priority=c(np.array([0.0, 1.0, 2.0, 5.0, 9.0])))
    assert back(first.place).tolist() == [[-1, -1], [-1, -1], [0, -1], [0, -1], [-1, -1]]
    assert back(first.dropped).tolist() == [True, True, False, False, False]


def test_capacity_in_a_program():
    jax = pytest.importorskip("jax")
    index = np.random.default_rng(1).integers(-1, 6, (30, 2))
    got, want = jax.jit(lambda i: limit_capacity(i, 4, 6))(index), limit_capacity(index, 4, 6)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(IndexError, match="from 0 to 1"):
        limit_capacity(np.array([[2]]), 1, 2)


# -- losses -----------------------------------------------------------------------------------------------------------------------


@every_kind
def test_losses_of_the_load(kind):
    c, mask = KINDS[kind], np.arange(40) % 3 > 0
    index = defined(X, 4, "softmax")[0]
    p = SCORINGS["softmax"](X.astype(np.float64))
    for keep, given in ((np.ones(40, bool), {}), (mask, {"mask": c(mask)})):
        f = np.bincount(index[keep].ravel(), minlength=24) / keep.sum()
        want = 24 * (f * p[keep].mean(0)).sum()
        np.testing.assert_allclose(back(load_balancing_loss(c(X), c(index), **given)), want, rtol=1e-5)
        z = np.log(np.exp(X.astype(np.float64)).sum(-1))[keep]
        np.testing.assert_allclose(back(router_z_loss(c(X), **given)), (z**2).mean(), rtol=1e-5)
    s = SCORINGS["sigmoid"](X.astype(np.float64)).reshape(4, 10, 24)
    by_sequence = []
    for t, i in zip(s / s.sum(-1, keepdims=True), index.reshape(4, 10, 4), strict=True):
        f = np.bincount(i.ravel(), minlength=24) * 24 / (4 * 10)
        by_sequence.append((f * t.mean(0)).sum())
    got = load_balancing_loss(c(X.reshape(4, 10, 24)), c(index.reshape(4, 10, 4)), "sigmoid", per="sequence")
    np.testing.assert_allclose(back(got), np.mean(by_sequence), rtol=1e-5)


def test_the_loss_is_that_of_transformers():
    torch = pytest.importorskip("torch")
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    layers = [torch.randn(30, 8, generator=torch.Generator().manual_seed(i), requires_grad=True) for i in range(3)]
    index = torch.cat([route(x, 2).index for x in layers])
    got, want = load_balancing_loss(torch.cat(layers), index), mixtral.load_balancing_loss_func(tuple(layers), 8, 2)
    torch.testing.assert_close(got, want)
    for a, b in zip(torch.autograd.grad(got, layers), torch.autograd.grad(want, layers), strict=True):
        torch.testing.assert_close(a, b)
    x = layers[0].detach().double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: load_balancing_loss(x, index[:30]) + router_z_loss(x), x)


# -- balance ----------------------------------------------------------------------------------------------------------------------


def skewed(tokens=2000, experts=32, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(tokens, experts)) + 2.0 * rng.normal(size=experts)).astype(np.float32)


def error(x, k, bias):
    load = np.bincount(back(route(x, k, "sigmoid", bias=bias).index).ravel(), minlength=x.shape[-1])
    return np.abs(load / load.mean() - 1).max()


def test_quantiles_balance_in_a_few_turns():
    """The largest load is near the mean; the sign rule is far from it after as many steps, whatever its step."""
    x, k = skewed(), 4
    zero = np.zeros(32, np.float32)
    by_quantiles, by_sign = zero, dict.fromkeys((0.001, 0.01, 0.1), zero)
    for _ in range(8):
        by_quantiles = balance(x, k, by_quantiles, "sigmoid")
        by_sign = {step: balance(x, k, b, "sigmoid", method="sign", step=step) for step, b in by_sign.items()}
    assert error(x, k, zero) > 1.0
    assert error(x, k, by_quantiles) < 0.5 * min(error(x, k, b) for b in by_sign.values())
    assert error(x, k, by_quantiles) < 0.06
    assert abs(by_quantiles.mean()) < 1e-6
    np.testing.assert_allclose(balance(x, k, None, "sigmoid", iterations=8), by_quantiles, atol=1e-6)


@every_kind
def test_a_turn_is_that_of_the_definition(kind):
    c, k = KINDS[kind], 3
    x, b = skewed(60, 12), np.linspace(-0.1, 0.1, 12).astype(np.float32)
    s = SCORINGS["sigmoid"](x.astype(np.float64))
    ranked = -np.sort(-(s + b), axis=-1)
    above = s - 0.5 * (ranked[:, k - 1] + ranked[:, k])[:, None]
    level = -np.sort(-above, axis=0)
    want = -0.5 * (level[14] + level[15])  # 60 * 3 / 12 = 15 tokens each
    np.testing.assert_allclose(back(balance(c(x), k, c(b), "sigmoid")), want - want.mean(), atol=2e-6)
    load = np.bincount(np.argsort(-(s + b), kind="stable")[:, :k].ravel(), minlength=12)
    want = b + 0.5 * np.sign(load.mean() - load)
    np.testing.assert_allclose(back(balance(c(x), k, c(b), "sigmoid", method="sign", step=0.5)), want, atol=1e-6)


def test_balance_without_a_choice_and_refusals():
    assert balance(np.ones((3, 2)), 2).tolist() == [0.0, 0.0]
    assert balance(np.zeros((0, 3)), 1, np.ones(3)).tolist() == [1.0] * 3
    for bad, error_, said in [
        (lambda: balance(X, 2, method="median"), ValueError, "'quantile' or 'sign'"),
        (lambda: balance(X, 2, step=0.1), ValueError, "quantiles need none"),
        (lambda: balance(X, 2, np.ones(3)), ValueError, "one number for each of 24 experts"),
        (lambda: balance(X, 2, iterations=0), ValueError, "at least 1"),
        (lambda: balance(X, 2, group="a group"), TypeError, "torch tensor with group="),
        (lambda: route(X), TypeError, "give k, how many experts"),
        (lambda: route(X, 2, bias=BIAS, by=X), ValueError, "two ways to choose"),
        (lambda: route(X, 2, bias=BIAS, index=np.zeros((40, 2), int)), ValueError, "bias= is about the choice"),
        (lambda: route(X, 2, groups=5, keep_groups=1), ValueError, "24 classes can't be split into 5 groups"),
        (lambda: route(X, 2, "sigmoidal"), ValueError, "there is no map 'sigmoidal'"),
        (lambda: route(X, top_k=2), TypeError, "say k="),
        (lambda: load_balancing_loss(X, np.zeros((3, 2), int)), ValueError, "index must be integers"),
        (lambda: load_balancing_loss(X, np.zeros((40, 2), int), per="token"), ValueError, "'batch' or 'sequence'"),
        (lambda: limit_capacity(np.zeros((4, 2)), 1, 2), TypeError, "index must be integers"),
        (lambda: limit_capacity(np.zeros((4, 2), int), -1, 2), ValueError, "capacity must be an integer of at least 0"),
        (lambda: expert_choice(np.ones(3), 1), ValueError, "tokens, experts"),
    ]:  # fmt: skip
        with pytest.raises(error_, match=said):
            bad()


def test_a_bias_of_all_processes():
    """In JAX over two devices' worth of tokens, by vmap with a named axis: it is that of all tokens together."""
    jax = pytest.importorskip("jax")
    k = 4
    for tokens, tolerance in ((256, 1e-5), (2000, 2e-2)):
        x = skewed(2 * tokens)
        parts = x.reshape(2, tokens, 32)
        for method in ("quantile", "sign"):
            step = {"step": 0.01} if method == "sign" else {}
            f = lambda x, k=k, m=method, s=step: balance(x, k, None, "sigmoid", method=m, axis_name="tokens", **s)  # noqa: E731
            got = back(jax.vmap(f, axis_name="tokens")(parts))
            np.testing.assert_array_equal(got[0], got[1])
            want = balance(x, k, None, "sigmoid", method=method, **step)
            np.testing.assert_allclose(got[0], want, atol=tolerance if method == "quantile" else 1e-6)
        settled = balance(x, k, None, "sigmoid", iterations=6)
        assert error(x, k, settled) < 0.1
