"""Gradients of log p, entropies and divergences, and the memory that they take."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from distribution_cases import INF, MAPS, every_map, probabilities, scores, slopes
from kinds import KINDS, back, jax_in_the_whole_battery

import anymax as A
from anymax import Softmax, Sparsemax

of_torch_and_jax = pytest.mark.parametrize("kind", [k for k in ("torch", "jax") if k in KINDS])


def torch_scores(name, seed=0):
    torch = pytest.importorskip("torch")
    x = torch.tensor(scores(4, 6, seed, 0.3) + (0.5 if name == "relu" else 0.0))
    return torch, x, A.apply(MAPS[name], x).argmax(-1)


@pytest.mark.whole(lambda name: name not in ("softmax", "sparsemax", "topp", "taylor", "normal"))
@every_map
def test_gradients_of_both(name):
    torch, x, y = torch_scores(name)
    x.requires_grad_()
    both = lambda x: A.log_prob_entropy(MAPS[name], x, y)  # noqa: E731
    assert torch.autograd.gradcheck(both, x)
    assert torch.autograd.gradcheck(lambda x: A.log_prob(MAPS[name], x, y), x)
    if name not in ("normal", "normmax"):  # whose second derivatives finite differences of 1e-6 do not see
        assert torch.autograd.gradgradcheck(both, x)


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.5}, {"transform": "topk"}, {"support": True}, {"temperature": 2.0, "transform": "topk"}],
)
@pytest.mark.parametrize("name", ["softmax", "entmax15"])
def test_gradients_through_the_options(name, options):
    torch, x, y = torch_scores(name)
    options = dict(options)
    if "transform" in options:
        options["transform"] = A.topk(4)
    if "support" in options:
        ids = torch.stack([y, (y + 1) % 6, (y + 3) % 6], -1)
        options["support"] = (ids.flatten(), torch.arange(5) * 3)
    x.requires_grad_()
    both = lambda x: A.log_prob_entropy(MAPS[name], x, y, **options)  # noqa: E731
    assert torch.autograd.gradcheck(both, x)
    assert torch.autograd.gradgradcheck(both, x)


@pytest.mark.parametrize("tail", ["ignore", "one class"])
def test_gradients_of_topk_kl(tail):
    torch = pytest.importorskip("torch")
    x = torch.tensor(scores(4, 9)).requires_grad_()
    ids = torch.tensor([[0, 1], [8, 2], [3, -1], [4, 7]])
    t = torch.log(torch.tensor([[0.5, 0.2], [0.1, 0.1], [0.9, 0.3], [0.3, 0.4]], dtype=torch.double)).requires_grad_()
    value = lambda x, t: A.topk_kl(x, ids, t, tail=tail, temperature=1.5)  # noqa: E731
    assert torch.autograd.gradcheck(value, (x, t))
    assert torch.autograd.gradgradcheck(value, (x, t))


@pytest.mark.parametrize("names", [("softmax", "softmax"), ("sparsemax", "softmax"), ("topk", "sigsoftmax")])
def test_gradients_of_kl(names):
    torch, x, _ = torch_scores(names[0])
    y = torch_scores(names[1], 1)[1]
    value = lambda x, y: A.likelihood.kl(MAPS[names[0]], x, MAPS[names[1]], y)  # noqa: E731
    assert torch.autograd.gradcheck(value, (x.requires_grad_(), y.requires_grad_()))


@jax_in_the_whole_battery
@of_torch_and_jax
def test_the_entropys_gradient_where_p_is_0(kind):
    """-p (log p + H) exactly, masked and underflowed classes included."""
    x = np.array([[0.0, 1.0, -INF, -2000.0, 0.5], [0.0, -INF, -INF, -INF, -INF], [-INF] * 5, [3.0] * 5])
    p = probabilities(Softmax(), x)
    with np.errstate(divide="ignore"):
        log_p = np.where(p > 0, np.log(np.where(p > 0, p, 1)), 0)
    h = -(p * log_p).sum(-1, keepdims=True)
    want, y = -p * (log_p + h), np.zeros(4, int)
    got = slopes(kind, lambda x: A.log_prob_entropy(Softmax(), x, KINDS[kind](y))[1], x)[1]
    np.testing.assert_allclose(got, want, atol=1e-6 if kind == "jax" else 1e-14)


@jax_in_the_whole_battery
@of_torch_and_jax
@pytest.mark.parametrize("name", ["softmax", "sparsemax", "entmax15", "topk", "relu", "taylor", "normal"])
def test_off_the_support_the_gradient_is_that_of_the_loss(name, kind):
    """-inf, and e_y - p: of a class that the map leaves out, and of one that is masked, which itself has none."""
    x = np.array([[2.0, 1.9, -3.0, 1.8, 1.7], [2.0, 1.9, -INF, 1.8, 1.7]])
    y = np.array([2, 2])
    if name in ("softmax", "taylor", "normal"):
        x, y = x[1:], y[1:]
    p = probabilities(MAPS[name], x)
    want = (np.arange(5) == 2) * (x > -INF) - p
    verbs = [lambda x: A.log_prob(MAPS[name], x, KINDS[kind](y))]
    if kind == "torch":
        verbs.append(lambda x: A.log_prob_entropy(MAPS[name], x, KINDS[kind](y))[0])
    for verb in verbs:
        value, got = slopes(kind, verb, x)
        assert (value == -INF).all()
        np.testing.assert_allclose(got, want, atol=2e-6)


@of_torch_and_jax
def test_where_nothing_was_drawn_there_is_no_gradient(kind):
    x, y = np.array([[0.3, 0.2], [-INF, -INF], [math.nan, 1.0], [0.1, 0.2]], np.float32), np.array([-1, -1, -1, 1])
    got = slopes(kind, lambda x: A.log_prob(Softmax(), x, KINDS[kind](y)), x)[1]
    assert (got[:2] == 0).all()
    np.testing.assert_allclose(got[3], [-0.4750208, 0.4750208], rtol=1e-5)


@jax_in_the_whole_battery
@of_torch_and_jax
def test_an_infinite_divergence_has_a_gradient(kind):
    """Of the second side that of the log p that are lost: `sum p (q - e)` over the lost classes."""
    x, y = np.array([[1.0, 0.5, 0.0]]), np.array([[3.0, 0.0, -INF]])
    p, q = probabilities(Softmax(), x), probabilities(Sparsemax(), y)
    want = p[:, 1:].sum() * q - p * np.array([[0.0, 1.0, 0.0]])
    value, ga, gb = slopes(kind, lambda a, b: A.likelihood.kl(Softmax(), a, Sparsemax(), b), x, y)
    assert (value == INF).all()
    assert np.isfinite(ga).all()
    np.testing.assert_allclose(gb, want, atol=1e-6)


@pytest.mark.whole(lambda name: name != "softmax")
@pytest.mark.parametrize("name", ["softmax", "entmax15", "taylor"])
def test_jax_agrees_with_torch(name):
    jax = pytest.importorskip("jax")
    torch, x, y = torch_scores(name)
    leaf = x.clone().requires_grad_()
    log_p, h = A.log_prob_entropy(MAPS[name], leaf, y)
    want = torch.autograd.grad((log_p + 0.5 * h).sum(), leaf)[0]

    def value(x):
        log_p, h = A.log_prob_entropy(MAPS[name], x, np.asarray(y))
        return (log_p + 0.5 * h).sum()

    given = jax.numpy.asarray(x.numpy(), dtype="float32")
    for grad in (jax.grad(value), jax.jit(jax.grad(value))):
        np.testing.assert_allclose(back(grad(given)), want, atol=2e-5)
    each = jax.vmap(lambda x, y: A.log_prob_entropy(MAPS[name], x, y)[1])(given, jax.numpy.asarray(y.numpy()))
    np.testing.assert_allclose(back(each), back(h), atol=2e-5)


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile's own making
@pytest.mark.parametrize("name", ["softmax", "entmax15"])
def test_compiled(name):
    torch, x, y = torch_scores(name)
    both = lambda x, y: A.log_prob_entropy(MAPS[name], x, y)  # noqa: E731
    for a, b in zip(torch.compile(both, backend="aot_eager", fullgraph=True)(x, y), both(x, y), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.func's own making
@pytest.mark.parametrize("name", ["softmax", "entmax15"])
def test_transforms_of_torch(name):
    torch, x, y = torch_scores(name)
    mapping = MAPS[name]
    both = lambda x, y: A.log_prob_entropy(mapping, x, y)  # noqa: E731
    for a, b in zip(torch.func.vmap(both)(x, y), both(x, y), strict=True):
        torch.testing.assert_close(a, b)
    one = lambda x, y: sum(both(x, y))  # noqa: E731
    leaf = x.clone().requires_grad_()
    gradient = torch.autograd.grad(one(leaf, y).sum(), leaf)[0]
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(one))(x, y), gradient)
    direction = torch.tensor(scores(4, 6, 5))
    change = torch.func.jvp(lambda x: one(x, y), (x,), (direction,))[1]
    torch.testing.assert_close(change, (gradient * direction).sum(-1))


def test_memory_of_softmax():
    """Forward no array like the scores, backward one, whatever the allocator does: sizes of the storages that live at once."""
    torch = pytest.importorskip("torch")
    x = torch.randn(64, 20_000, requires_grad=True)
    y = torch.zeros(64, dtype=torch.long)
    size = x.numel() * 4

    def peak(f):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
            out = f()
        held = most = 0
        for event in seen.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                most = max(most, held)
        return out, most

    A.log_prob_entropy(Softmax(), x, y)
    (log_p, h), forward = peak(lambda: A.log_prob_entropy(Softmax(), x, y))
    assert forward < 0.7 * size
    _, backward = peak(lambda: torch.autograd.grad((log_p + h).sum(), x))
    assert backward < 1.7 * size
    _, whole = peak(lambda: torch.autograd.grad(torch.distributions.Categorical(logits=x).entropy().sum(), x))
    assert whole > 3 * size, "the measure sees what it should"


def test_memory_of_numpy():
    x, y = np.random.default_rng(0).normal(size=(64, 20_000)).astype(np.float32), np.zeros(64, int)
    A.log_prob_entropy(Softmax(), x[:2], y[:2])
    tracemalloc.start()
    A.log_prob_entropy(Softmax(), x, y)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2 * x.nbytes
