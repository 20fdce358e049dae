"""The NumPyro face: what NumPyro asks of a distribution, against its own categorical."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

jax = pytest.importorskip("jax")
pytest.importorskip("numpyro")

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

from anymax import Budget, Entmax, Softmax, Sparsemax, topk
from anymax.numpyro import Categorical

MAPS = {"softmax": Softmax(), "sparsemax": Sparsemax(), "entmax": Entmax(1.5), "budget": Budget(2)}


def scores(shape=(3, 2, 5), seed=0):
    return np.random.default_rng(seed).normal(0.3, 0.7, shape).astype(np.float32)


@pytest.mark.whole
@pytest.mark.parametrize("name", MAPS)
def test_it_is_consistent(name):
    d = Categorical(MAPS[name], scores(), validate_args=True)
    assert d.batch_shape == (3, 2)
    assert d.event_shape == ()
    assert d.is_discrete
    np.testing.assert_allclose(d.probs.sum(-1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(jnp.exp(d.logits), d.probs, atol=1e-6)
    values = d.enumerate_support()
    assert values.shape == (5, 3, 2)
    assert d.enumerate_support(expand=False).shape == (5, 1, 1)
    np.testing.assert_allclose(jnp.moveaxis(d.log_prob(values), 0, -1), d.logits, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(d.entropy(), scipy.stats.entropy(np.asarray(d.probs), axis=-1), rtol=1e-5)
    assert jnp.isnan(d.mean).all()
    for shape in ((), (4,), (2, 3)):
        drawn = d.sample(jax.random.key(0), shape)
        assert drawn.shape == (*shape, 3, 2)
        assert (d.log_prob(drawn) > -math.inf).all()
    wide = d.expand((4, 3, 2))
    assert wide.sample(jax.random.key(1)).shape == (4, 3, 2)
    assert d.support(values).all()


@pytest.mark.whole
def test_softmax_is_numpyros_own():
    ours, theirs = Categorical(Softmax(), scores((4, 5))), dist.Categorical(logits=scores((4, 5)))
    for shape in ((), (4,), (7, 4)):
        value = np.random.default_rng(0).integers(0, 5, shape)
        np.testing.assert_allclose(ours.log_prob(value), theirs.log_prob(value), rtol=1e-5)
    np.testing.assert_allclose(ours.entropy(), theirs.entropy(), rtol=1e-5)
    other = dist.Categorical(logits=scores((4, 5), 1))
    mine = Categorical(Softmax(), scores((4, 5), 1))
    want = scipy.stats.entropy(np.asarray(theirs.probs), np.asarray(other.probs), axis=-1)
    for p, q in ((ours, mine), (ours, other), (theirs, mine)):
        np.testing.assert_allclose(dist.kl_divergence(p, q), want, rtol=1e-4)
    sparse = Categorical(Sparsemax(), scores((4, 5), 1))
    assert jnp.isinf(dist.kl_divergence(theirs, sparse)).any()
    by_probs = dist.kl_divergence(sparse, dist.Categorical(probs=sparse.probs))
    np.testing.assert_allclose(by_probs, 0.0, atol=1e-6)
    with pytest.raises(ValueError, match="5 and 4 classes"):
        dist.kl_divergence(ours, Categorical(Softmax(), scores((4, 4))))


def test_it_draws_with_its_probabilities():
    d = Categorical(Sparsemax(), scores((5,)))
    drawn, p = np.asarray(d.sample(jax.random.key(0), (20_000,))), np.asarray(d.probs, np.float64)
    counts = np.bincount(drawn, minlength=5)
    assert counts[p == 0].sum() == 0
    assert scipy.stats.chisquare(counts[p > 0], 20_000 * p[p > 0] / p.sum()).pvalue > 1e-4


@pytest.mark.whole
def test_masks_transforms_and_rows_without_classes():
    keep = np.array([[True, False, True, True, False], [False] * 5])
    d = Categorical(Softmax(), scores((2, 5)), mask=keep, transform=topk(2), validate_args=True)
    assert ((d.probs > 0).sum(-1) == np.array([2, 0])).all()
    assert (d.sample(jax.random.key(0), (50,))[:, 1] == -1).all()
    assert d.log_prob(jnp.array([0, -1]))[1] == 0.0
    with pytest.warns(UserWarning, match="Out-of-support"):
        d.log_prob(jnp.array([-1, -1]))
    assert d.entropy()[1] == 0.0
    with pytest.raises(ValueError, match="invalid scores"):
        Categorical(Softmax(), np.array([0.0, math.nan]), validate_args=True)
    with pytest.raises(TypeError, match="expected a mapping"):
        Categorical(scores(), scores())


def test_a_number_that_is_no_class_has_no_probability():
    """NaN, as NumPyro's own distributions give; -1 is no class, and says so."""
    d = Categorical(Sparsemax(), scores((5,)), validate_args=False)
    for log_prob in (d.log_prob, jax.jit(d.log_prob)):
        assert np.isnan(log_prob(jnp.array([5, -2, -1, 0]))).tolist() == [True, True, False, False]
    assert d.log_prob(-1) == 0.0


@pytest.mark.whole
def test_a_batch_without_rows():
    d = Categorical(Softmax(), np.zeros((2, 0, 5)), validate_args=True)
    drawn = d.sample(jax.random.key(0), (3,))
    assert drawn.shape == d.log_prob(drawn).shape == (3, 2, 0)
    assert d.entropy().shape == dist.kl_divergence(d, d).shape == d.log_prob(drawn[0]).shape == (2, 0)


@pytest.mark.whole
def test_it_goes_through_jax():
    """A pytree: jit, vmap and grad take the distribution itself, with the map's parameters among its leaves."""
    x, alpha, y = scores((4, 5)), jnp.array([[1.2], [1.5], [1.8], [2.0]]), np.array([0, 1, 2, 3])
    d = Categorical(Entmax(alpha), x)
    want = d.log_prob(y)
    np.testing.assert_allclose(jax.jit(lambda d, y: d.log_prob(y))(d, y), want, rtol=1e-5)
    each = jax.vmap(lambda x, y: Categorical(Sparsemax(), x).log_prob(y))(x, y)
    np.testing.assert_allclose(each, Categorical(Sparsemax(), x).log_prob(y), rtol=1e-5)
    assert sorted(leaf.shape for leaf in jax.tree.leaves(d)) == [(4, 1), (4, 5)]
    slopes = jax.grad(lambda d: d.entropy().sum())(d)
    torch = pytest.importorskip("torch")
    from anymax import nn  # late: torch need not be there

    leaf = torch.tensor(np.asarray(alpha), dtype=torch.double, requires_grad=True)
    nn.Categorical(Entmax(leaf), torch.tensor(x, dtype=torch.double)).entropy().sum().backward()
    np.testing.assert_allclose(slopes.mapping.alpha, leaf.grad, rtol=1e-3)


@pytest.mark.whole
def test_a_model_with_it():
    """A trace, its density, and what it conditions on."""
    x, place = scores((3,)), jnp.array([-1.0, 0.0, 2.0])

    def model(y):
        k = numpyro.sample("k", Categorical(Entmax(1.5), x))
        numpyro.sample("y", dist.Normal(place[k], 0.5), obs=y)

    seeded = numpyro.handlers.seed(model, jax.random.key(0))
    drawn = numpyro.handlers.trace(seeded).get_trace(0.3)
    assert drawn["k"]["value"].shape == ()
    for k in range(3):
        density, _ = numpyro.infer.util.log_density(model, (0.3,), {}, {"k": jnp.array(k)})
        want = Categorical(Entmax(1.5), x).logits[k] + dist.Normal(place[k], 0.5).log_prob(0.3)
        np.testing.assert_allclose(density, want, rtol=1e-5)
