"""The load of routers: losses, capacity, any integer as an index; and the words to bad input of the whole room."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from kinds import KINDS, back, every_kind, jax_in_the_whole_battery
from refusals import each, refuses
from routing_cases import BIAS, VALUES, X, routes

import anymax
from anymax.routing import balance, expert_choice, limit_capacity, load_balancing_loss, route, router_z_loss

INDEX = routes(X, 4)[0]


def wide(x, scoring="softmax"):
    return VALUES[scoring](x.astype(np.float64))


# -- losses -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@jax_in_the_whole_battery
@every_kind
def test_losses_of_the_load(kind, masked):
    c, keep = KINDS[kind], np.arange(40) % 3 > 0 if masked else np.ones(40, bool)
    given = {"mask": c(keep)} if masked else {}
    f = np.bincount(INDEX[keep].ravel(), minlength=24) / keep.sum()
    want = 24 * (f * wide(X)[keep].mean(0)).sum()
    np.testing.assert_allclose(back(load_balancing_loss(c(X), c(INDEX), **given)), want, rtol=1e-5)
    z = np.log(np.exp(X.astype(np.float64)).sum(-1))[keep]
    np.testing.assert_allclose(back(router_z_loss(c(X), **given)), (z**2).mean(), rtol=1e-5)


@jax_in_the_whole_battery
@every_kind
def test_the_loss_of_each_sequence(kind):
    c, s = KINDS[kind], wide(X, "sigmoid").reshape(4, 10, 24)
    by_sequence = []
    for t, i in zip(s / s.sum(-1, keepdims=True), INDEX.reshape(4, 10, 4), strict=True):
        f = np.bincount(i.ravel(), minlength=24) * 24 / (4 * 10)
        by_sequence.append((f * t.mean(0)).sum())
    got = load_balancing_loss(c(X.reshape(4, 10, 24)), c(INDEX.reshape(4, 10, 4)), "sigmoid", per="sequence")
    np.testing.assert_allclose(back(got), np.mean(by_sequence), rtol=1e-5)


def test_the_loss_is_that_of_transformers():
    torch = pytest.importorskip("torch")
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    layers = [torch.randn(30, 8, generator=torch.Generator().manual_seed(i), requires_grad=True) for i in range(3)]
    index = torch.cat([route(x, 2).index for x in layers])
    got, want = load_balancing_loss(torch.cat(layers), index), mixtral.load_balancing_loss_func(tuple(layers), 8, 2)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(loss, layers) for loss in (got, want)))
    x = layers[0].detach().double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: load_balancing_loss(x, index[:30]) + router_z_loss(x), x, fast_mode=True)


@jax_in_the_whole_battery
@every_kind
def test_the_loss_of_given_shares_and_counts(kind):
    """As TransformerEngine and Megatron-LM have it: experts / (k tokens^2) times the sum of counts times sums of shares, here times k."""
    c, rng = KINDS[kind], np.random.default_rng(5)
    x, index = rng.normal(size=(60, 4)).astype(np.float32), rng.integers(0, 4, (60, 2))
    p, counts = wide(x), np.bincount(index.ravel(), minlength=4)
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


# -- capacity ---------------------------------------------------------------------------------------------------------------------


@jax_in_the_whole_battery
@every_kind
def test_capacity(kind):
    """First choices come first, then the tokens' order; with priorities the more important tokens."""
    c = KINDS[kind]
    index = np.array([[0, 1], [0, 1], [1, 0], [0, -1], [-1, -1]])
    got = limit_capacity(c(index), 2, 3)
    taken, want = dict.fromkeys(range(3), 0), np.full(index.shape, -1)
    for j, t in np.ndindex(2, 5):
        if (e := index[t, j]) >= 0:
            want[t, j] = taken[e] if taken[e] < 2 else -1
            taken[e] += 1
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


# -- indices ----------------------------------------------------------------------------------------------------------------------

INTEGERS = ("uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


@jax_in_the_whole_battery
@pytest.mark.parametrize("dtype", INTEGERS)
@every_kind
def test_every_integer_is_an_index(kind, dtype):
    c, rng = KINDS[kind], np.random.default_rng(4)
    x, index = rng.normal(size=(4, 100, 4)).astype(np.float32), rng.integers(0, 4, (4, 100, 2))
    priority = rng.permutation(400).reshape(4, 100) % 120
    f = np.stack([np.bincount(i.ravel(), minlength=4) for i in index]) / 100
    p = wide(x).mean(1)
    given = c(index.astype(dtype))
    np.testing.assert_allclose(load_balancing_loss(c(x), given), 4 * (f.mean(0) * p.mean(0)).sum(), rtol=1e-5)
    np.testing.assert_allclose(load_balancing_loss(c(x), given, per="sequence"), 2 * (f * p).sum(-1).mean(), rtol=1e-5)
    got = limit_capacity(given, 30, 4, priority=c(priority.astype(dtype)))
    want = limit_capacity(index, 30, 4, priority=priority.astype(np.float64))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(back(a), b)


STRAY = {
    "loss": lambda x, index: load_balancing_loss(x, index),
    "loss of sequences": lambda x, index: load_balancing_loss(x, index, per="sequence"),
    "capacity": lambda x, index: limit_capacity(index, 2, 4),
    "replay": lambda x, index: route(x, index=index),
}


@jax_in_the_whole_battery
@pytest.mark.parametrize("stray", [4, -7])
@pytest.mark.parametrize("call", STRAY)
@every_kind
def test_stray_indices_are_refused(kind, call, stray):
    c, index = KINDS[kind], np.zeros((2, 3, 2), int)
    x, index[1, 2, 0] = c(np.zeros((2, 3, 4))), stray
    with pytest.raises(IndexError, match="index: class indices must be from 0 to 3, or -1 for none"):
        STRAY[call](x, c(index))
    padding = c(np.arange(6).reshape(2, 3) < 5)
    assert np.isfinite(back(load_balancing_loss(x, c(index), mask=padding)))


@pytest.mark.whole(lambda framework: framework == "torch")
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_stray_indices_in_programs(framework):
    module, c = pytest.importorskip(framework), KINDS[framework]
    traced = (
        module.jit if framework == "jax" else functools.partial(module.compile, backend="aot_eager", fullgraph=True)
    )
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


# -- words ------------------------------------------------------------------------------------------------------------------------

NONE = np.zeros((40, 2), int)
COUNTS = "give index, the experts of each token, or counts="
WRONG = {
    "method": (lambda: balance(X, 2, method="median"), ValueError, "'quantile' or 'sign'"),
    "step of quantiles": (lambda: balance(X, 2, step=0.1), ValueError, "quantiles need none"),
    "bias of balance": (lambda: balance(X, 2, np.ones(3)), ValueError, "one number for each of 24 experts"),
    "iterations": (lambda: balance(X, 2, iterations=0), ValueError, "at least 1"),
    "group": (lambda: balance(X, 2, group="a group"), TypeError, "torch tensor with group="),
    "k": (lambda: route(X), TypeError, "give k, how many experts"),
    "bias and by": (lambda: route(X, 2, bias=BIAS, by=X), ValueError, "two ways to choose"),
    "bias and index": (lambda: route(X, 2, bias=BIAS, index=NONE), ValueError, "bias= is about the choice"),
    "index and invalid": (lambda: route(X, invalid="argmax", index=NONE), ValueError, "leave one out"),
    "invalid": (lambda: route(X, 2, invalid="drop"), ValueError, "invalid must be None"),
    "groups": (lambda: route(X, 2, groups=5, keep_groups=1), ValueError, "24 classes can't be split into 5 groups"),
    "scoring": (lambda: route(X, 2, "sigmoidal"), ValueError, "there is no map 'sigmoidal'"),
    "top_k": (lambda: route(X, top_k=2), TypeError, "say k="),
    "index of a loss": (lambda: load_balancing_loss(X, NONE[:3]), ValueError, "index must be integers"),
    "per": (lambda: load_balancing_loss(X, NONE, per="token"), ValueError, "'batch' or 'sequence'"),
    "neither index nor counts": (lambda: load_balancing_loss(X), TypeError, COUNTS),
    "index and counts": (lambda: load_balancing_loss(X, index=NONE, counts=BIAS), TypeError, COUNTS),
    "index and tokens": (lambda: load_balancing_loss(X, index=NONE, tokens=40), TypeError, COUNTS),
    "counts": (
        lambda: load_balancing_loss(X, counts=np.ones((2, 24))),
        ValueError,
        r"counts must have the shape \(24,\)",
    ),
    "index of a capacity": (lambda: limit_capacity(np.zeros((4, 2)), 1, 2), TypeError, "index must be integers"),
    "capacity": (lambda: limit_capacity(NONE, -1, 2), ValueError, "capacity must be an integer of at least 0"),
    "an expert too many": (lambda: limit_capacity(np.array([[2]]), 1, 2), IndexError, "from 0 to 1"),
    "no tokens": (lambda: expert_choice(np.ones(3), 1), ValueError, "tokens, experts"),
    "many tokens": (lambda: expert_choice(X, 41), ValueError, "from 1 to the number of classes, 40"),
}


def router(*args, **options):
    pytest.importorskip("torch")
    return anymax.nn.Router(*args, **options)


ROUTER = {
    "no correction": (lambda: router(8, 16, 2).balance(KINDS["torch"](X[:, :8])), ValueError, "correction=True"),
    "few experts": (lambda: router(8, 2, 3), ValueError, "at most num_experts"),
    "a layer": (
        lambda: anymax.nn.Router.from_gate(pytest.importorskip("torch").nn.Linear(3, 4)),
        TypeError,
        r"the gate Linear is not known.*MixtralTopKRouter",
    ),
}


@each(WRONG | ROUTER)
def test_words(call, error, words):
    refuses(call, error, words)
