"""Ragged rows: parameters of a segment, log p, thresholds, samples and losses, against a loop over the segments."""

import contextlib

import numpy as np
import pytest
from segment_cases import (
    COUNT,
    ENTRIES,
    JAX,
    LENGTHS,
    MAPS,
    PTR,
    SHUFFLED,
    SORTED,
    by_few,
    by_map,
    by_segment,
    each_segment,
    its_own_warnings,
    scores,
    targets,
)

import anymax
from anymax import (
    Budget,
    Entmax,
    PerturbMax,
    Segments,
    SparseSoftmax,
    segment_apply,
    segment_entropy,
    segment_log_apply,
    segment_logsumexp,
    segment_loss,
    segment_sample,
    segment_support,
    segment_threshold,
)
from anymax.kernels import native

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
jnp = jax.numpy

pytestmark = its_own_warnings


# -- a value for each segment -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["numpy", "padded", "torch", JAX])
@pytest.mark.parametrize("shape", ["segments", "segments and heads", "heads"])
@pytest.mark.parametrize("map_of", [Entmax, lambda scale: PerturbMax("logistic", scale=scale)], ids=["alpha", "scale"])
def test_a_parameter_of_each_segment(map_of, kind, shape):
    x = scores(2, dtype="float64")
    size = {"segments": (COUNT, 1), "segments and heads": (COUNT, 2), "heads": (1, 2)}[shape]
    alpha = np.random.default_rng(3).uniform(1.1, 2.5, size)
    place = {"numpy": np.asarray, "padded": np.asarray, "torch": torch.tensor, "jax": jnp.asarray}[kind]
    with anymax.use("reference") if kind == "padded" else contextlib.nullcontext():
        got = np.asarray(segment_apply(map_of(place(alpha)), place(x), index=place(SHUFFLED), num_segments=COUNT))
    full = np.broadcast_to(alpha, (COUNT, 2))
    for s in range(COUNT):
        for h in range(2):
            own = np.nonzero(s == SHUFFLED)[0]
            if len(own):
                want = anymax.apply(map_of(np.array([full[s, h]])), np.ascontiguousarray(x[own, h]))
                np.testing.assert_allclose(got[own, h], want, atol=1e-12 if kind != "jax" else 2e-6)


def test_a_budget_of_each_segment():
    k = np.array([2.0, 1.0, 3.5, 1.0, 2.0, 10.0, 4.0])
    p = segment_apply(Budget(k), scores(), ptr=PTR)
    np.testing.assert_allclose(np.add.reduceat(p, PTR[[0, 2, 3, 4, 5]]), [2.0, 3.5, 1.0, 2.0, 10.0], rtol=1e-5)
    # more than there are entries: each gets 1
    for engine in ("native", "reference"):
        if engine == "reference" or not isinstance(native.load(), str):
            with anymax.use(engine):
                assert segment_apply(Budget(3), [1.0, 0.0, 2.0, 5.0, 4.0, 0.0], lengths=[2, 4])[:2].tolist() == [
                    1.0,
                    1.0,
                ]


def test_a_learned_parameter_of_each_segment():
    alpha = torch.full((COUNT,), 1.5, dtype=torch.float64, requires_grad=True)
    x = torch.tensor(scores(dtype="float64"))
    assert torch.autograd.gradcheck(lambda a: segment_apply(Entmax(a), x, ptr=PTR), (alpha,))


def test_a_temperature_of_each_segment():
    rows, t = Segments.of(SHUFFLED, num_segments=COUNT), np.linspace(0.5, 2.0, COUNT)
    x = scores(dtype="float64")
    want = each_segment(x, SHUFFLED, anymax.logsumexp, -np.inf)
    np.testing.assert_allclose(segment_logsumexp(x, index=rows), want)
    warm = t * segment_logsumexp(x / rows.spread(t), index=rows)
    np.testing.assert_allclose(segment_logsumexp(x, index=rows, temperature=t), warm)
    assert rows.spread(torch.tensor(t)).shape == (ENTRIES,)


# -- the other verbs --------------------------------------------------------------------------------------------------------------------


@by_map
def test_log_p(mapping):
    x = scores(2, dtype="float64")
    want = by_segment(x, SHUFFLED, lambda row: anymax.log_apply(mapping, row))
    for engine in (None, "reference"):
        with anymax.use(engine or "reference") if engine else np.errstate():
            got = segment_log_apply(mapping, x, index=SHUFFLED, num_segments=COUNT)
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)
    got = segment_log_apply(mapping, torch.tensor(x), index=SHUFFLED, num_segments=COUNT)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mapping", [m for m in MAPS if m.has_threshold], ids=repr)
def test_thresholds(mapping):
    x = scores(2, dtype="float64")
    want = each_segment(x, SHUFFLED, lambda row: anymax.threshold(mapping, row).tau, -np.inf)
    size = each_segment(x, SHUFFLED, lambda row: anymax.threshold(mapping, row).support, 0, int)
    for make in (np.asarray, torch.tensor):
        tau, support = segment_threshold(mapping, make(x), index=SHUFFLED, num_segments=COUNT)
        np.testing.assert_allclose(tau, want, rtol=1e-9)
        np.testing.assert_array_equal(support, size)
    p = segment_apply(mapping, x, index=SHUFFLED, num_segments=COUNT)
    np.testing.assert_array_equal(segment_support(p, index=SHUFFLED, num_segments=COUNT), size)


def test_logsumexp():
    x = scores(2)
    x[PTR[2], 0], x[PTR[4], 1], x[PTR[0] : PTR[1], 0] = np.nan, np.inf, -np.inf
    want = each_segment(x, SORTED, anymax.logsumexp, -np.inf)
    for make in (np.asarray, torch.tensor):
        np.testing.assert_allclose(segment_logsumexp(make(x), ptr=PTR), want, rtol=1e-6)
    t = torch.tensor(scores(), requires_grad=True)
    segment_logsumexp(t, ptr=PTR)[torch.tensor(LENGTHS) > 0].sum().backward()
    np.testing.assert_allclose(t.grad, segment_apply("softmax", t.detach(), ptr=PTR), atol=1e-6)


@pytest.mark.parametrize(("kind", "alpha"), [("shannon", None), ("renyi", 3.0), ("renyi2", None), ("tsallis", 1.5)])
def test_entropy(kind, alpha):
    p = segment_apply("sparsemax", scores(2, dtype="float64"), index=SHUFFLED, num_segments=COUNT)
    want = each_segment(p, SHUFFLED, lambda row: anymax.entropy(row, kind, alpha), 0.0)
    for make in (np.asarray, torch.tensor):
        got = segment_entropy(make(p), kind, alpha, index=SHUFFLED, num_segments=COUNT)
        np.testing.assert_allclose(got, want, atol=1e-12)
    if alpha is not None:
        each = np.linspace(1.2, 3.0, COUNT)[:, None]
        got = segment_entropy(p, kind, each, index=SHUFFLED, num_segments=COUNT)
        want = [anymax.entropy(p[SHUFFLED == 5, 1], kind, float(each[5, 0]))]
        np.testing.assert_allclose(got[5, 1], want[0])


@pytest.mark.parametrize("kind", ["numpy", "torch", JAX])
def test_samples(kind):
    x = {"numpy": np.asarray, "torch": torch.tensor, "jax": jnp.asarray}[kind](scores(2))
    p = np.asarray(segment_apply("sparsemax", x, index=SHUFFLED, num_segments=COUNT))
    drawn = np.asarray(
        segment_sample("sparsemax", x, index=SHUFFLED, num_segments=COUNT, generator=0, num_samples=4000)
    )
    assert drawn.shape == (4000, COUNT, 2)
    for s in range(COUNT):
        for h in range(2):
            own = np.nonzero(s == SHUFFLED)[0]
            found = drawn[:, s, h]
            if not len(own):
                assert (found == -1).all()
                continue
            share = np.array([(found == e).mean() for e in own])
            assert share.sum() == pytest.approx(1.0)
            assert (share[p[own, h] == 0] == 0).all()
            np.testing.assert_allclose(share, p[own, h], atol=0.04)
    one = segment_sample("sparsemax", x, index=SHUFFLED, num_segments=COUNT, generator=0)
    assert tuple(one.shape) == (COUNT, 2)


@pytest.mark.parametrize("mapping", [m for m in MAPS if m.facts.has_potential], ids=repr)
def test_losses_of_entries(mapping):
    x, t = scores(2, dtype="float64"), targets(heads=(2,))
    want = np.zeros((COUNT, 2))
    for s in range(COUNT):
        for h in range(2):
            own = np.nonzero(s == SHUFFLED)[0]
            if len(own):
                place = int(np.nonzero(own == t[s, h])[0][0])
                want[s, h] = anymax.fenchel_young(mapping, x[own, h], place, axis=0)
    given = {"index": SHUFFLED, "num_segments": COUNT}
    for make in (np.asarray, torch.tensor):
        got = segment_loss(mapping, make(x), make(t), reduction="none", **given)
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-11)
    with anymax.use("reference"):
        got = segment_loss(mapping, x, t, reduction="none", **given)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-11)
    hot = np.zeros_like(x)
    hot[t[LENGTHS_ABOVE_0], [[0, 1]]] = 1.0
    if not isinstance(mapping, SparseSoftmax):
        got = segment_loss(mapping, x, hot, reduction="none", **given)
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)
        assert segment_loss(mapping, x, hot, **given) == pytest.approx(want.sum() / np.count_nonzero(t != -100))
    count = np.count_nonzero(t != -100)
    assert segment_loss(mapping, x, t, **given) == pytest.approx(want.sum() / count)
    assert segment_loss(mapping, x, t, reduction="sum", **given) == pytest.approx(want.sum())


LENGTHS_ABOVE_0 = np.array(LENGTHS) > 0


@by_few
def test_the_gradient_of_a_loss(mapping):
    x = torch.tensor(scores(2, dtype="float64"), requires_grad=True)
    t = torch.tensor(targets(heads=(2,)))
    given = {"index": SHUFFLED, "num_segments": COUNT}
    loss = lambda x: segment_loss(mapping, x, t, **given)  # noqa: E731
    (got,) = torch.autograd.grad(loss(x), x)
    y = torch.zeros_like(x).scatter_(0, t[t[:, 0] >= 0], 1.0)
    p = segment_apply(mapping, x.detach(), **given)
    torch.testing.assert_close(got, (p - y) / int((t >= 0).sum()))
    assert torch.autograd.gradgradcheck(loss, (x,))


@pytest.mark.whole
def test_the_gradient_of_a_loss_in_jax():
    x, t, given = scores(2), targets(heads=(2,)), {"index": SHUFFLED, "num_segments": COUNT}
    free = torch.tensor(x, requires_grad=True)
    (want,) = torch.autograd.grad(segment_loss("sparsemax", free, torch.tensor(t), **given), free)
    got = jax.grad(lambda x: segment_loss("sparsemax", x, jnp.asarray(t), **given))(jnp.asarray(x))
    np.testing.assert_allclose(got, want, atol=1e-6)
