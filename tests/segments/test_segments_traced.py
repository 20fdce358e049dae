"""Ragged rows under jax.jit and jax.grad."""

import numpy as np
import pytest
from segment_cases import COUNT, LENGTHS, PTR, SHUFFLED, by_few, by_map, by_segment, its_own_warnings, scores, targets

import anymax
from anymax import (
    segment_apply,
    segment_entropy,
    segment_log_apply,
    segment_logsumexp,
    segment_loss,
    segment_sample,
    segment_support,
    segment_threshold,
)

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
jnp = jax.numpy

pytestmark = its_own_warnings


@pytest.mark.thin(6)
@by_map
def test_jax(mapping):
    x = scores(2)
    want = by_segment(x, SHUFFLED, lambda row: anymax.apply(mapping, row))
    got = segment_apply(mapping, jnp.asarray(x), index=jnp.asarray(SHUFFLED), num_segments=COUNT)
    np.testing.assert_allclose(got, want, atol=3e-6)


@pytest.mark.thin(3)
@by_few
def test_jit_and_gradients(mapping):
    x = scores(2)
    want = by_segment(x, SHUFFLED, lambda row: anymax.apply(mapping, row))
    index = jnp.asarray(SHUFFLED)
    f = lambda x, i: segment_apply(mapping, x, index=i, num_segments=COUNT)  # noqa: E731
    np.testing.assert_allclose(f(jnp.asarray(x), index), want, atol=3e-6)
    np.testing.assert_allclose(jax.jit(f)(jnp.asarray(x), index), want, atol=3e-6)
    w = jnp.asarray(scores(2, seed=4))
    slope = jax.grad(lambda x, i: (f(x, i) * w).sum())
    np.testing.assert_allclose(slope(jnp.asarray(x), index), jax.jit(slope)(jnp.asarray(x), index), atol=1e-5)
    t = torch.tensor(x, requires_grad=True)
    (g,) = torch.autograd.grad(
        segment_apply(mapping, t, index=SHUFFLED, num_segments=COUNT), t, torch.tensor(np.array(w))
    )
    np.testing.assert_allclose(slope(jnp.asarray(x), index), g, atol=2e-5)


@pytest.mark.thin(2)
@pytest.mark.parametrize("given", ["ptr", "lengths"])
def test_jit_of_bounds(given):
    x, value = jnp.asarray(scores()), jnp.asarray(PTR if given == "ptr" else LENGTHS)
    f = jax.jit(lambda x, v: segment_apply("sparsemax", x, **{given: v}))
    np.testing.assert_allclose(f(x, value), segment_apply("sparsemax", x, ptr=PTR), atol=1e-6)
    np.testing.assert_allclose(
        jax.vmap(lambda x: segment_apply("softmax", x, ptr=PTR), 1, 1)(jnp.asarray(scores(3))),
        segment_apply("softmax", scores(3), ptr=PTR),
        atol=1e-6,
    )


@pytest.mark.whole
def test_the_other_verbs_under_jit():
    x, index = jnp.asarray(scores(2)), jnp.asarray(SHUFFLED)
    given = {"index": SHUFFLED, "num_segments": COUNT}
    for verb in (
        segment_logsumexp,
        lambda x, **o: segment_threshold("entmax15", x, **o),
        lambda x, **o: segment_entropy(segment_apply("sparsemax", x, **o), **o),
        lambda x, **o: segment_support(segment_apply("sparsemax", x, **o), **o),
        lambda x, **o: segment_log_apply("softmax", x, **o),
        lambda x, **o: segment_sample("softmax", x, generator=jax.random.key(0), **o),
        lambda x, **o: segment_loss("sparsemax", x, jnp.asarray(targets(heads=(2,))), **o),
    ):
        got = jax.jit(lambda x, i, verb=verb: verb(x, index=i, num_segments=COUNT))(x, index)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, verb(x, **given))


@pytest.mark.parametrize("mapping", ["softmax", "sparsemax"])
def test_an_index_out_of_range_under_jit_is_nan(mapping):
    index = SHUFFLED.copy()
    index[3], index[7] = -1, COUNT
    f = jax.jit(lambda x, i: segment_apply(mapping, x, index=i, num_segments=COUNT))
    p = np.asarray(f(jnp.asarray(scores()), jnp.asarray(index)))
    assert np.nonzero(np.isnan(p))[0].tolist() == [3, 7]


def test_jit_asks_for_the_number_of_segments():
    with pytest.raises(TypeError, match="num_segments="):
        jax.jit(lambda x, i: segment_apply("softmax", x, index=i))(jnp.zeros(3), jnp.zeros(3, int))
