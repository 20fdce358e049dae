"""Routers beside one oracle: as papers have them, with ties, masks and all dtypes; the known mistakes; derivatives; other routers."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings

import numpy as np
import pytest
from kinds import KINDS, back, every_kind, jax_in_the_whole_battery
from routing_cases import BIAS, BY, DTYPES, INF, OF_12, PAPERS, TIED, VALUES, X, made, routes, tied

import anymax as A
from anymax.routing import expert_choice, route, route_support

every_paper = pytest.mark.parametrize("case", PAPERS)


def is_route(got, want, rtol=2e-6):
    np.testing.assert_array_equal(back(got[0]), want[0])
    np.testing.assert_allclose(back(got[1]), want[1], rtol=rtol, atol=1e-7)


def of_columns(*args, **words):
    index, weight = route(args[0].T, *args[1:], axis=0, **words)
    return index.T, weight.T


def by_reference(*args, **words):
    with A.use("reference"):
        return route(*args, **words)


def replayed(x, k, **words):
    """The weights of experts that are given."""
    index = route(x, k, **words).index
    return index, route(
        x, index=index, **{n: v for n, v in words.items() if n not in ("bias", "groups", "keep_groups", "group_by")}
    ).weight


WAYS = {"rows": route, "columns": of_columns, "reference": by_reference, "replayed": replayed}


@jax_in_the_whole_battery
@pytest.mark.parametrize("way", WAYS)
@every_paper
@every_kind
def test_routes_are_those_of_the_papers(kind, case, way):
    is_route(WAYS[way](KINDS[kind](X), 5, **made(PAPERS[case], KINDS[kind])), routes(X, 5, **PAPERS[case]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scoring", VALUES)
@pytest.mark.parametrize("words", TIED)
def test_routes_with_ties_and_masks(words, scoring, dtype):
    torch = pytest.importorskip("torch")
    x = tied(dtype)
    want = routes(x, 5, scoring, **TIED[words])
    kinds = {"torch": torch.tensor(x).to(getattr(torch, dtype))}
    kinds |= {"numpy": x.astype(dtype)} if dtype != "bfloat16" else {}
    kinds |= {"strict": KINDS["strict"](x)} if dtype == "float64" else {}
    for kind, a in kinds.items():
        for run in (route, by_reference):
            is_route(run(a, 5, scoring, **made(TIED[words], KINDS[kind])), want, rtol=3e-6)


@pytest.mark.parametrize(("words", "scoring"), [("bias in groups", "softmax"), ("by in groups", "sparsemax")])
def test_routes_with_ties_in_jax(words, scoring):
    jax = pytest.importorskip("jax")
    x = tied("float32").astype(np.float32)
    got = jax.jit(lambda x: route(x, 5, scoring, **made(TIED[words], jax.numpy.asarray)))(x)
    np.testing.assert_array_equal(got.index, routes(x, 5, scoring, **TIED[words])[0])


# -- mistakes that others have made -----------------------------------------------------------------------------------------------


@jax_in_the_whole_battery
@pytest.mark.parametrize("engine", [None, "reference"])
@every_kind
def test_dropped_groups_are_not_filled_with_zeros(kind, engine):
    """With a bias below all values, a dropped expert of 0 would win over those that are left."""
    x, bias = np.zeros((1, 4)), np.array([-0.7, -0.8, -2.0, -2.0])
    c = KINDS[kind]
    with A.use(engine) if engine else contextlib.nullcontext():
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


@jax_in_the_whole_battery
@pytest.mark.parametrize("size", [33, 64, 200])
@every_kind
def test_more_than_32_experts_in_a_group(kind, size):
    x = np.random.default_rng(size).normal(size=(9, 4 * size)).astype(np.float32)
    words = {"scoring": "sigmoid", "groups": 4, "keep_groups": 2}
    np.testing.assert_array_equal(back(route(KINDS[kind](x), 8, **words).index), routes(x, 8, **words)[0])


@jax_in_the_whole_battery
@pytest.mark.parametrize(("by", "chosen"), [(2, 2), ("max", 0)])
@every_kind
def test_the_two_rules_of_groups_differ(kind, by, chosen):
    x = KINDS[kind](np.array([[3.0, -3.0, 2.0, 2.0]]))
    assert back(route(x, 1, "sigmoid", groups=2, keep_groups=1, group_by=by).index).tolist() == [[chosen]]


# -- masks, strange rows, rows without an expert ------------------------------------------------------------------------------------


@jax_in_the_whole_battery
@every_paper
@every_kind
def test_masked_experts_and_strange_rows(kind, case):
    c, x, mask = KINDS[kind], X[:5].copy(), np.ones((5, 24), bool)
    mask[:, ::2] = False
    mask[1, 3:], mask[2] = False, False
    x[3, 1], x[4, 3] = math.nan, -INF
    index, weight = (back(a) for a in route(c(x), 5, mask=c(mask), **made(PAPERS[case], c)))
    want, shares = routes(np.where(mask, x, -INF), 5, **PAPERS[case])
    np.testing.assert_array_equal(index, want)
    assert (index[2] == -1).all()
    assert (index[3] == -1).all()
    assert np.isnan(weight[3]).any()
    np.testing.assert_allclose(np.delete(weight, 3, 0), np.delete(shares, 3, 0), rtol=2e-6, atol=1e-7)


STRANGE = np.array(
    [[0.5, 0.4, 0.3, 0.2], [1.0, math.nan, 0.0, 2.0], [-INF] * 4, [-INF, -INF, -INF, 1.0], [9.0, 8.9, 0.0, 3.0]]
)


@jax_in_the_whole_battery
@pytest.mark.parametrize(
    "words", [{}, {"bias": np.array([0.0, 0.1, 0.0, 0.0])}, {"groups": 2, "keep_groups": 1}], ids="-".join
)
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax", "sparsemax"])
@every_kind
def test_what_is_given_where_there_is_no_expert(kind, scoring, words):
    """Distinct experts with the weight 0, as vLLM gives to padding; other rows are what they are."""
    c, words = KINDS[kind], made(words, KINDS[kind])
    plain, filled = (route(c(STRANGE), 3, scoring, invalid=i, **words) for i in (None, "argmax"))
    index, weight = back(filled.index), back(filled.weight)
    was, there = back(plain.index), back(plain.index) >= 0
    assert all(len(set(row)) == 3 for row in index.tolist())
    assert ((index >= 0) & (index < 4)).all()
    np.testing.assert_array_equal(index[there], was[there])
    np.testing.assert_array_equal(weight, np.where(there, back(plain.weight), 0))
    assert index[1].tolist() == index[2].tolist() == [0, 1, 2]
    assert (was[1] == -1).all()
    with pytest.raises(ValueError, match=r"route: row [01], in C order, has no class to give"):
        route(c(STRANGE), 3, scoring, invalid="raise", **words)
    assert back(route(c(STRANGE[:1]), 2, "softmax", invalid="raise").index).tolist() == [[0, 1]]


def test_padding_has_no_gradient():
    torch = pytest.importorskip("torch")
    from anymax import nn

    router = nn.Router(3, 4, 2, norm_topk_prob=True, invalid="argmax")
    x = torch.randn(5, 3)
    x[1] = math.nan
    assert router(x).index[1].tolist() == [0, 1]
    rows = torch.randn(5, 4, requires_grad=True)
    hole = torch.where(torch.arange(5)[:, None] == 1, math.nan, rows)
    (g,) = torch.autograd.grad(route(hole, 2, norm_topk_prob=True, invalid="argmax").weight[:, 0].sum(), rows)
    assert g.isfinite().all()
    assert not g[1].any()
    assert g[0].any()


# -- derivatives ------------------------------------------------------------------------------------------------------------------


def words_in_torch(case):
    torch = pytest.importorskip("torch")
    return torch, functools.partial(route, **made(PAPERS[case], torch.tensor))


@every_paper
def test_derivatives_of_routes(case):
    torch, run = words_in_torch(case)
    x = torch.tensor(X[:4], dtype=torch.float64, requires_grad=True)
    f = lambda x: run(x, 3).weight  # noqa: E731
    assert torch.autograd.gradcheck(f, x, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, x, fast_mode=True)
    assert torch.allclose(torch.vmap(f)(x.detach()), f(x.detach()))


@pytest.mark.whole
@pytest.mark.parametrize("case", [*PAPERS, "padding"])
def test_compiled_routes(case):
    torch, run = words_in_torch("mixtral" if case == "padding" else case)
    x = torch.tensor(X, requires_grad=True)
    if case == "padding":
        run = functools.partial(run, invalid="argmax")
        x = torch.where(torch.arange(40)[:, None] == 1, math.nan, x)
    torch.compiler.reset()  # the programs of other cases count against a limit
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = torch.compile(lambda x: run(x, 3), backend="aot_eager", fullgraph=True)(x)
    want = run(x, 3)
    assert torch.equal(got.index, want.index)
    torch.testing.assert_close(got.weight, want.weight)
    torch.testing.assert_close(
        *(torch.autograd.grad(a.weight.square().sum(), x)[0] for a in (got, want)), equal_nan=True
    )


@pytest.mark.whole
@pytest.mark.parametrize("case", ["deepseek-v3", "mixtral", "jamba"])
def test_routes_in_jax(case):
    jax = pytest.importorskip("jax")
    torch, run = words_in_torch(case)
    f = lambda x: route(x, 5, **made(PAPERS[case], jax.numpy.asarray))  # noqa: E731
    got, g = jax.jit(f)(X), jax.jit(jax.grad(lambda x: (f(x).weight ** 2).sum()))(X)
    x = torch.tensor(X, requires_grad=True)
    run(x, 5).weight.square().sum().backward()
    is_route(got, routes(X, 5, **PAPERS[case]))
    np.testing.assert_allclose(g, back(x.grad), atol=2e-6)
    np.testing.assert_array_equal(jax.vmap(f)(X.reshape(4, 10, 24)).index.reshape(40, 5), got.index)


REPLAYED = [("sigmoid", True), ("softmax", True), ("softmax", False), ("entmax15", False)]


@pytest.mark.parametrize(("scoring", "norm"), REPLAYED)
def test_replayed_experts_keep_their_gradient(scoring, norm):
    """The experts of another model: one that these scores would not choose has a weight and a gradient, and -1 has none."""
    torch = pytest.importorskip("torch")
    x = torch.tensor(X[:3], dtype=torch.float64, requires_grad=True)
    index = torch.tensor([[23, 0, -1], [1, 2, 3], [-1, -1, -1]])
    f = lambda x: route(x, scoring=scoring, index=index, norm_topk_prob=norm).weight  # noqa: E731
    weight = f(x)
    assert (weight[index < 0] == 0).all()
    (g,) = torch.autograd.grad((weight * torch.arange(3.0)).sum(), x)
    assert g.isfinite().all()
    assert not g[2].any()
    if scoring != "entmax15":
        assert g[1, [1, 2, 3]].abs().min() > 0
        assert (weight[1] > 0).all()
    assert torch.autograd.gradcheck(f, x)


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


# -- other routers ----------------------------------------------------------------------------------------------------------------

UNTIED = np.where(tied("float64") > -INF, BY + 0.1 * np.sin(np.arange(480.0).reshape(40, 12)), -INF).astype(np.float32)


def values(x, scoring):
    return VALUES[scoring](x.astype(np.float64)) if scoring in VALUES else A.apply(scoring, x.astype(np.float64))


@pytest.mark.whole(lambda kind, scoring: kind == "jax" and scoring != "softmax")
@pytest.mark.parametrize("bias", [None, OF_12], ids=["no bias", "bias"])
@pytest.mark.parametrize("scoring", VALUES)
@every_kind
def test_experts_choose_tokens(kind, scoring, bias):
    c, x = KINDS[kind], UNTIED.reshape(2, 20, 12)
    v = values(x, scoring)
    key = np.where((x > -INF) & (v > 0), v if bias is None else v + bias, -INF)
    order = np.argsort(-key, axis=1, kind="stable")[:, :15]
    there = np.take_along_axis(key, order, 1) > -INF
    weight = np.where(there, np.take_along_axis(v, order, 1), 0)
    got = expert_choice(c(x), 15, scoring, bias=None if bias is None else c(bias))
    is_route(got, (np.swapaxes(np.where(there, order, -1), 1, 2), np.swapaxes(weight, 1, 2)), rtol=3e-6)


@jax_in_the_whole_battery
@pytest.mark.parametrize("scoring", [*VALUES, "entmax15"])
@every_kind
def test_supports(kind, scoring):
    v = values(UNTIED, scoring)
    ids, offsets, weight = (back(a) for a in route_support(KINDS[kind](UNTIED.reshape(2, 20, 12)), scoring))
    np.testing.assert_array_equal(ids, np.nonzero(v)[1])
    np.testing.assert_array_equal(np.diff(offsets), (v > 0).sum(-1))
    np.testing.assert_allclose(weight, v[v > 0], rtol=3e-6, atol=1e-7)
    index, compact = (back(a) for a in route(KINDS[kind](UNTIED), 6, scoring))
    assert ((compact > 0) == (index >= 0)).all()
    assert ((index >= 0).sum(-1) == np.minimum((v > 0).sum(-1), 6)).all()


@jax_in_the_whole_battery
@every_kind
def test_experts_of_a_sequence_with_a_nan(kind):
    x = np.array([[1.0, 0.0], [math.nan, 2.0], [0.0, 1.0]])
    index, weight = (back(a) for a in expert_choice(KINDS[kind](x), 2, "sigmoid"))
    assert index.tolist() == [[-1, -1], [1, 2]]
    assert np.isnan(weight).tolist() == [[True, True], [False, False]]


def test_sparse_routes_have_gradients_and_no_shape_under_jit():
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    x = torch.tensor(X[:5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: route_support(x, "entmax15").weight, x)
    with pytest.raises(TypeError, match="route_support: how many experts there are depends on the scores"):
        jax.jit(route_support)(X)
