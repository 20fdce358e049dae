"""The biases that `balance` finds: even loads, counted by NumPy, with groups, masks and experts that are not there; DeepSeek's rule."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from kinds import KINDS, back, every_kind, jax_in_the_whole_battery
from routing_cases import VALUES, loads

from anymax.routing import balance

TOKENS, EXPERTS = 2048, 32
GROUPS = {
    "no groups": ("sigmoid", 4, {}),
    "deepseek-v3": ("sigmoid", 4, {"groups": 4, "keep_groups": 2}),
    "deepseek-v2": ("softmax", 4, {"groups": 4, "keep_groups": 2, "group_by": "max"}),
    "mistral": ("softmax", 4, {"groups": 4, "keep_groups": 2, "group_by": 2}),
    "one group": ("sigmoid", 2, {"groups": 8, "keep_groups": 1, "group_by": 1}),
    "sums of four": ("sigmoid", 4, {"groups": 4, "keep_groups": 2, "group_by": 4}),
    "all groups": ("sigmoid", 3, {"groups": 4, "keep_groups": 4, "group_by": 3}),
}
METHODS = {"quantile": [{"iterations": 30}], "sign": [{"method": "sign", "step": 0.02 * 0.96**i} for i in range(160)]}


def skewed(seed=0, tokens=TOKENS, experts=EXPERTS, spread=1.0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(tokens, experts)) + spread * rng.normal(size=experts)).astype(np.float32)


def unevenness(load):
    return np.abs(load / load.mean() - 1).max()


@pytest.mark.whole(lambda name, method: method == "sign" and name not in ("deepseek-v3", "one group"))
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


@jax_in_the_whole_battery
@pytest.mark.parametrize("method", METHODS)
@every_kind
def test_every_framework_finds_the_same(kind, method):
    c, (x, mask) = KINDS[kind], with_gaps("mask")
    x, mask, b = x[:1000], mask[:1000], np.linspace(-0.1, 0.1, EXPERTS).astype(np.float32)
    words = {"groups": 4, "keep_groups": 2, "method": method}
    want = balance(x, 4, b, "sigmoid", mask=mask, **words)
    np.testing.assert_allclose(back(balance(c(x), 4, c(b), "sigmoid", mask=c(mask), **words)), want, atol=1e-6)


@pytest.mark.whole(lambda framework: framework == "torch")
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_traced_values(framework):
    module, x = pytest.importorskip(framework), with_gaps("-inf")[0][:300]
    traced = (
        module.jit if framework == "jax" else functools.partial(module.compile, backend="aot_eager", fullgraph=True)
    )
    f = lambda x: balance(x, 4, None, "sigmoid", groups=4, keep_groups=2)  # noqa: E731
    np.testing.assert_allclose(traced(f)(KINDS[framework](x)), f(x), atol=1e-6)


@pytest.mark.whole(lambda kind: kind in ("jax", "strict"))
@every_kind
def test_a_turn_is_that_of_the_definition(kind):
    c, k = KINDS[kind], 3
    x, b = skewed(0, 60, 12, 2.0), np.linspace(-0.1, 0.1, 12).astype(np.float32)
    s = VALUES["sigmoid"](x.astype(np.float64))
    ranked = -np.sort(-(s + b), axis=-1)
    above = s - 0.5 * (ranked[:, k - 1] + ranked[:, k])[:, None]
    level = -np.sort(-above, axis=0)
    want = -0.5 * (level[14] + level[15])  # 60 * 3 / 12 = 15 tokens each
    np.testing.assert_allclose(back(balance(c(x), k, c(b), "sigmoid")), want - want.mean(), atol=2e-6)
    load = loads(x, k, b, "sigmoid")
    want = b + 0.5 * np.sign(load.mean() - load)
    np.testing.assert_allclose(back(balance(c(x), k, c(b), "sigmoid", method="sign", step=0.5)), want, atol=1e-6)


def test_quantiles_balance_in_a_few_turns():
    """The largest load is near the mean; the sign rule is far from it after as many steps, whatever its step."""
    x, k, zero = skewed(0, 2000, 32, 2.0), 4, np.zeros(32, np.float32)
    error = lambda b: unevenness(loads(x, k, b, "sigmoid"))  # noqa: E731
    by_quantiles, by_sign = zero, dict.fromkeys((0.001, 0.01, 0.1), zero)
    for _ in range(8):
        by_quantiles = balance(x, k, by_quantiles, "sigmoid")
        by_sign = {step: balance(x, k, b, "sigmoid", method="sign", step=step) for step, b in by_sign.items()}
    assert error(zero) > 1.0
    assert error(by_quantiles) < 0.5 * min(map(error, by_sign.values()))
    assert error(by_quantiles) < 0.06
    assert abs(by_quantiles.mean()) < 1e-6
    np.testing.assert_allclose(balance(x, k, None, "sigmoid", iterations=8), by_quantiles, atol=1e-6)


def test_balance_without_a_choice():
    assert balance(np.ones((3, 2)), 2).tolist() == [0.0, 0.0]
    assert balance(np.zeros((0, 3)), 1, np.ones(3)).tolist() == [1.0] * 3


def test_without_tokens_the_bias_stays():
    for x in (np.zeros((0, 4)), np.full((3, 4), -np.inf), np.full((3, 4), np.nan)):
        for method in METHODS:
            assert balance(x, 2, np.arange(4.0), "sigmoid", method=method).tolist() == [0.0, 1.0, 2.0, 3.0]


# -- processes --------------------------------------------------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("tokens", "tolerance"), [(256, 1e-5), (2000, 2e-2)])
def test_a_bias_of_all_devices_of_jax(tokens, tolerance, method):
    """Over two devices' worth of tokens, by vmap with a named axis: it is that of all tokens together."""
    jax = pytest.importorskip("jax")
    x, words = skewed(0, 2 * tokens, 32, 2.0), {"method": method, **({"step": 0.01} if method == "sign" else {})}
    f = lambda x: balance(x, 4, None, "sigmoid", axis_name="tokens", **words)  # noqa: E731
    got = back(jax.vmap(f, axis_name="tokens")(x.reshape(2, tokens, 32)))
    np.testing.assert_array_equal(got[0], got[1])
    want = balance(x, 4, None, "sigmoid", **words)
    np.testing.assert_allclose(got[0], want, atol=tolerance if method == "quantile" else 1e-6)


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


@pytest.mark.whole
def test_two_gloo_processes_compare_their_calls():
    pytest.importorskip("torch")
    from processes import all_right

    all_right(2, REAL)
