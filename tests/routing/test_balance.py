"""The biases that `balance` finds: even loads, counted by NumPy, with groups, masks and experts that are not there; DeepSeek's rule."""

from __future__ import annotations

import math

import numpy as np
import pytest
from kinds import KINDS, back, every_kind

from anymax.routing import balance

TOKENS, EXPERTS = 2048, 32
VALUES = {
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "softmax": lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True),
}
GROUPS = {
    "no groups": ("sigmoid", 4, {}),
    "deepseek-v3": ("sigmoid", 4, {"groups": 4, "keep_groups": 2}),
    "deepseek-v2": ("softmax", 4, {"groups": 4, "keep_groups": 2, "group_by": "max"}),
    "mistral": ("softmax", 4, {"groups": 4, "keep_groups": 2, "group_by": 2}),
    "one group": ("sigmoid", 2, {"groups": 8, "keep_groups": 1, "group_by": 1}),
    "sums of four": ("sigmoid", 4, {"groups": 4, "keep_groups": 2, "group_by": 4}),
    "all groups": ("sigmoid", 3, {"groups": 4, "keep_groups": 4, "group_by": 3}),
}
METHODS = {
    "quantile": [{"iterations": 30}],
    "sign": [{"method": "sign", "step": 0.02 * 0.96**i} for i in range(160)],
}


def skewed(seed=0, tokens=TOKENS, experts=EXPERTS):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(tokens, experts)) + rng.normal(size=experts)).astype(np.float32)


def loads(x, k, b, scoring, groups=1, keep_groups=1, group_by=2):
    """How many tokens choose each expert, by sorting; -inf is no expert, and a token with NaN chooses none."""
    x = x[~np.isnan(x).any(-1)].astype(np.float64)
    key = np.where(x > -math.inf, VALUES[scoring](x) + b, -math.inf)
    blocks = key.reshape(len(x), groups, -1)
    most = np.sort(blocks, -1)[..., ::-1][..., : 1 if group_by == "max" else group_by]
    rank = (-np.where(most > -math.inf, most, 0).sum(-1)).argsort(-1).argsort(-1)
    key = np.where((rank < keep_groups)[..., None], blocks, -math.inf).reshape(key.shape)
    best = (-key).argsort(-1)[:, :k]
    there = np.take_along_axis(key, best, -1) > -math.inf
    return np.bincount(best[there], minlength=x.shape[1])


def unevenness(load):
    return np.abs(load / load.mean() - 1).max()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", GROUPS)
def test_the_loads_are_even(name, method):
    scoring, k, groups = GROUPS[name]
    x, b = skewed(), np.zeros(EXPERTS, np.float32)
    before = unevenness(loads(x, k, b, scoring, **groups))
    for options in METHODS[method]:
        b = balance(x, k, b, scoring, **groups, **options)
    assert before > 1.0
    assert unevenness(loads(x, k, b, scoring, **groups)) < 0.03


@pytest.mark.parametrize("name", GROUPS)
def test_the_sign_rule_is_that_of_deepseek(name):
    scoring, k, groups = GROUPS[name]
    x, b, by_hand = skewed(1, 300), np.zeros(EXPERTS, np.float32), np.zeros(EXPERTS)
    for _ in range(10):
        load = loads(x, k, by_hand, scoring, **groups)
        by_hand = by_hand + 0.01 * np.sign(load.mean() - load)
        b = balance(x, k, b, scoring, **groups, method="sign", step=0.01)
    np.testing.assert_allclose(b, by_hand, atol=1e-6)


# -- experts that are not there ---------------------------------------------------------------------------------------------------


def with_gaps(kind_of_gap):
    """(scores, mask): an expert that no token may go to, one for 50 tokens alone, padding of 100 tokens, and a token with NaN."""
    x, keep = skewed(2), np.ones((TOKENS, EXPERTS), bool)
    keep[:, 3] = keep[50:, 7] = keep[-100:] = False
    x[200, 5] = np.nan
    return (np.where(keep, x, -np.inf), None) if kind_of_gap == "-inf" else (x, keep)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("gap", ["-inf", "mask"])
@pytest.mark.parametrize("name", ["no groups", "deepseek-v3"])
def test_experts_that_are_not_there_have_no_share(name, gap, method):
    scoring, k, groups = GROUPS[name]
    x, mask = with_gaps(gap)
    b = np.linspace(-0.1, 0.1, EXPERTS).astype(np.float32)
    for options in METHODS[method]:
        b = balance(x, k, b, scoring, mask=mask, **groups, **options)
    load = loads(with_gaps("-inf")[0], k, b, scoring, **groups)
    assert load.sum() == k * (TOKENS - 101)
    assert load[3] == 0
    assert load[7] >= (45 if method == "quantile" else 20)  # a step at a time it takes long
    assert unevenness(np.delete(load, [3, 7])) < 0.03
    assert b[3] == np.linspace(-0.1, 0.1, EXPERTS).astype(np.float32)[3]


def test_the_zeros_of_a_sparse_map_are_no_choice():
    x = np.log(np.array([[0.5, 0.3, 0.1, 0.1]])) + np.zeros((60, 1))
    x[:, 2:] -= 9.0  # 0 in sparsemax, whatever their bias
    b = np.array([0.0, 0.0, 5.0, 5.0])
    assert balance(x, 1, b, "sparsemax", method="sign", step=0.5).tolist() == [-0.5, 0.5, 5.0, 5.0]
    assert balance(x, 1, b, "sparsemax")[2:].tolist() == [5.0, 5.0]


@every_kind
def test_every_framework_finds_the_same(kind):
    c, (x, mask) = KINDS[kind], with_gaps("mask")
    x, mask, b = x[:1000], mask[:1000], np.linspace(-0.1, 0.1, EXPERTS).astype(np.float32)
    for options in ({}, {"method": "sign"}):
        words = {"groups": 4, "keep_groups": 2, **options}
        want = balance(x, 4, b, "sigmoid", mask=mask, **words)
        np.testing.assert_allclose(back(balance(c(x), 4, c(b), "sigmoid", mask=c(mask), **words)), want, atol=1e-6)


def test_traced_values():
    jax, torch = pytest.importorskip("jax"), pytest.importorskip("torch")
    x, _ = with_gaps("-inf")
    f = lambda x: balance(x, 4, None, "sigmoid", groups=4, keep_groups=2)  # noqa: E731
    want = f(x[:300])
    np.testing.assert_allclose(jax.jit(f)(x[:300]), want, atol=1e-6)
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    np.testing.assert_allclose(compiled(torch.tensor(x[:300])), want, atol=1e-6)


def test_without_tokens_the_bias_stays():
    for x in (np.zeros((0, 4)), np.full((3, 4), -np.inf), np.full((3, 4), np.nan)):
        for method in METHODS:
            assert balance(x, 2, np.arange(4.0), "sigmoid", method=method).tolist() == [0.0, 1.0, 2.0, 3.0]


# -- processes --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_the_bias_of_two_processes_is_that_of_all_tokens(method):
    torch = pytest.importorskip("torch")
    from processes import together

    x, _ = with_gaps("-inf")
    x = torch.tensor(x[:700])
    words = {"groups": 4, "keep_groups": 2, "method": method, "iterations": 3}
    want = balance(x, 4, None, "sigmoid", **words)
    parts = (x[:300], x[300:], x[:0])  # uneven, and one without tokens
    for got in together(3, lambda g: balance(parts[g.rank], 4, None, "sigmoid", group=g, **words)):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


DIFFERENT = {
    "k": ({"k": 3}, "k is 2 on process 0, 3 on process 1"),
    "experts": ({"experts": 6}, "experts is 8 on process 0, 6 on process 1"),
    "dtype": ({"dtype": "float64"}, "dtype is torch.float32 on process 0, torch.float64 on process 1"),
    "scoring": ({"scoring": "softmax"}, "scoring is sigmoid on process 0, softmax on process 1"),
    "the map": ({"scoring": "entmax15"}, r"map is softmax\(\) on process 0, entmax"),
    "groups": ({"groups": 2, "keep_groups": 1}, "groups is None on process 0, Groups"),
    "iterations": ({"iterations": 2}, "iterations is 1 on process 0, 2 on process 1"),
    "step": ({"step": 0.5}, "step is 0.001 on process 0, 0.5 on process 1"),
    "method": ({"method": "quantile"}, "method is sign on process 0, quantile on process 1"),
    "bias": ({"bias": 1.0}, "bias must be the same on every process; its entry 1 is 0 on process 0, 1 on process 1"),
    "an error": ({"iterations": 0}, "process 1: balance: iterations must be an integer of at least 1"),
}


def call(group, torch, k=2, experts=8, dtype="float32", scoring="sigmoid", bias=0.0, **options):
    x = torch.randn(5, experts, dtype=getattr(torch, dtype))
    b = bias * torch.arange(experts, dtype=x.dtype)
    balance(x, k, b, scoring, group=group, **{"method": "sign", **options})


@pytest.mark.parametrize("difference", DIFFERENT)
def test_processes_compare_their_calls(difference):
    torch = pytest.importorskip("torch")
    from processes import together

    options, said = DIFFERENT[difference]

    def error(group):
        with pytest.raises((RuntimeError, ValueError), match="anymax.routing.balance: .*" + said) as caught:
            call(group, torch, **options if group.rank else {})
        return str(caught.value)

    first, second = together(2, error)
    assert first == second


REAL = """
import anymax, test_balance
for options, said in test_balance.DIFFERENT.values():
    try:
        test_balance.call(dist.group.WORLD, torch, **options if rank else {})
    except (RuntimeError, ValueError) as error:
        assert "anymax.routing.balance" in str(error), error
    else:
        raise AssertionError(said)
router = anymax.nn.Router(4, 8, 2, "sigmoid", correction=True, groups=4, keep_groups=2)
router.balance(torch.randn(9, 4), group=dist.group.WORLD)
router.k += rank
try:
    router.balance(torch.randn(9, 4), group=dist.group.WORLD)
except RuntimeError as error:
    assert "k is 2 on process 0, 3 on process 1" in str(error), error
    print("right")
"""


def test_two_gloo_processes_compare_their_calls():
    pytest.importorskip("torch")
    from processes import all_right

    all_right(2, REAL)
