"""Randomness is an argument: generators, seeds and keys, and one number a row."""

from __future__ import annotations

import math

import numpy as np
import pytest
from kinds import KINDS, back, every_kind, generator
from refusals import each, one_sentence, said
from sampling_cases import CUT, INF, X, vocabulary

import anymax as am
from anymax._array import namespace
from anymax._random import generators
from anymax._random.draws import invert
from anymax.mappings import Entmax, Softmax, Sparsemax, SparseSoftmax
from anymax.sampling.samplers import gumbel_max, gumbel_softmax, perturb_argmax, sample
from anymax.transforms import compose, cosine, noise, topk

VERBS = {
    "gumbel_max": gumbel_max,
    "perturb_argmax": lambda x, **k: perturb_argmax(x, "normal", **k),
    "gumbel_softmax": gumbel_softmax,
    "sample": lambda x, **k: sample(Softmax(), x, **k),
}


@every_kind
@pytest.mark.parametrize("verb", VERBS)
def test_generators(kind, verb):
    draw, x = VERBS[verb], KINDS[kind](np.zeros(1000, np.float32))
    assert np.array_equal(back(draw(x, generator=3)), back(draw(x, generator=np.int64(3))))
    assert not np.array_equal(back(draw(x, generator=3)), back(draw(x, generator=4)))
    assert np.array_equal(back(draw(x, generator=generator(kind))), back(draw(x, generator=generator(kind))))
    moving = generator(kind)
    assert np.array_equal(back(draw(x, generator=moving)), back(draw(x, generator=moving))) == (kind == "jax")
    if kind != "jax":
        assert draw(x) is not None
    words = {"numpy": "numpy.random.default_rng", "torch": "torch.Generator", "jax": "jax.random.key"}
    others = [generator(k) for k in KINDS if k != kind and {k, kind} != {"numpy", "strict"}]
    for wrong in (True, 1.5, np.random, *others, *([None] if kind == "jax" else [])):
        with pytest.raises(TypeError, match=words.get(kind, "numpy.random.Generator")):
            draw(x, generator=wrong)
    assert np.array_equal(back(x), np.zeros(1000))


@every_kind
def test_a_seed_is_an_integer_of_one_range_for_all_frameworks(kind):
    x = KINDS[kind](np.zeros((2, 30), np.float32))
    for seed in (-1, np.int64(-7), 2**63, np.uint64(2**63), 2**70, [3, -1]):
        with pytest.raises(ValueError, match=r"generator: a seed must be an integer from 0 to 2\*\*63 - 1, got "):
            sample(Softmax(), x, generator=seed)
    assert back(sample(Softmax(), x, generator=2**63 - 1)).min() >= 0


def test_seeds_on_the_meta_device():
    torch = pytest.importorskip("torch")
    x = torch.zeros(2, 5, device="meta")
    drawn = sample(Softmax(), x, transform=compose(topk(2), noise(generator=1)), generator=[0, 1], return_log_prob=True)
    assert [tuple(v.shape) for v in drawn[:3]] == [(2,), (2,), (2,)]
    assert drawn.index.device.type == "meta"
    assert am.attention(x, x, x, Sparsemax(), dropout_p=0.5, generator=0).shape == (2, 5)


WRONG = said(
    TypeError,
    (lambda: gumbel_max([True, False], generator=0), "scores…bool"),
    (lambda: gumbel_max([0.0], generator=0, num_samples=1.5), "num_samples…got 1.5"),
    (lambda: gumbel_max([0.0], generator=0, num_samples=-1), "num_samples…got -1"),
    (lambda: perturb_argmax([0.0], scale="1", generator=0), "number"),
    (lambda: sample(Softmax(), [True], generator=0), "bool"),
) | said(
    ValueError,
    (lambda: gumbel_max([0.0], generator=0, axis=1), "out of range"),
    (lambda: perturb_argmax([0.0], "cauchy", generator=0), "gumbel, normal"),
    (lambda: perturb_argmax([0.0], scale=-1, generator=0), "scale…at least 0"),
    (lambda: gumbel_softmax([0.0], -1.0, generator=0), "temperature…at least 0"),
    (
        lambda: sample(Softmax(), np.zeros((2, 3)), transform=cosine(np.eye(5, 3))),
        "got, (2, 3) of float64, but gave ndarray of float64 (2, 5)",
    ),
)


@each(WRONG)
def test_what_is_refused(call, error, words):
    one_sentence(call, error, words)


def test_integer_scores_and_lists():
    assert gumbel_max([0, 100], generator=0) == 1
    assert sample(Softmax(), np.array([0, 100]), generator=0) == 1


@pytest.mark.whole
@pytest.mark.parametrize("verb", VERBS)
def test_jit_and_vmap(verb):
    jax = pytest.importorskip("jax")
    draw = VERBS[verb]
    x = jax.numpy.asarray(np.random.default_rng(0).normal(size=(3, 5)), dtype="float32")
    key = jax.random.key(0)
    got = jax.jit(lambda x, key: draw(x, generator=key))(x, key)
    np.testing.assert_allclose(got, draw(x, generator=key), rtol=1e-5)
    if verb in ("gumbel_max", "sample"):
        keys = jax.random.split(key, 3)
        one = jax.jit(lambda x, key: draw(x, generator=key))
        rows = jax.jit(jax.vmap(lambda x, key: draw(x, generator=key)))(x, keys)
        assert np.array_equal(rows, np.stack([one(r, k) for r, k in zip(x, keys)]))


def test_jax_gradient():
    jax = pytest.importorskip("jax")
    x = jax.numpy.asarray(X[0])
    w = jax.numpy.arange(5.0)
    value = lambda v, h: w @ gumbel_softmax(v, 0.7, hard=h, generator=5)  # noqa: E731
    soft, hard = (jax.jit(jax.grad(value), static_argnums=1)(x, h) for h in (False, True))
    np.testing.assert_allclose(soft, hard, rtol=1e-6)
    assert np.isfinite(soft).all()


@every_kind
@pytest.mark.parametrize("bad", [math.nan, INF])
def test_a_row_with_some_strange_probabilities_has_no_class(kind, bad):
    """Its last class has a probability, which a search in sums that no number is above comes to."""
    p = KINDS[kind](np.array([[0.5, bad, 0.5]]))
    xp = namespace(p)
    assert back(invert(p, 0.3 * xp.ones_like(p[..., :1]), xp)).tolist() == [[-1]]


@every_kind
def test_the_inverse_at_its_ends(kind):
    """u = 0 and u = 1 - ulp give the first and the last class with mass, whatever lies outside."""
    c = KINDS[kind]
    p = np.zeros((3, 9), np.float32)
    p[0, [2, 5]] = 0.3, 0.7
    p[1, 4] = 1.0
    p[2, [1, 2, 7]] = 0.1, 1e-45, 1 / 3
    ulp = 2.0**-24 if kind == "jax" else 2.0**-53
    u = np.tile(np.array([0.0, 1 - ulp]), (3, 1)).astype(np.float32 if kind == "jax" else np.float64)
    index = back(invert(c(p), c(u), namespace(c(p))))
    assert index.tolist() == [[2, 5], [4, 4], [1, 7]]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "jax"])
@pytest.mark.parametrize("count", [1, 3])
def test_the_number_of_a_row_is_the_generators_own(kind, count):
    """What an engine that draws has to keep: fp64, rows in C order, the first class whose cumulative probability exceeds it."""
    x = vocabulary().reshape(2, 3, 40)
    if kind == "torch":
        import torch

        u = torch.rand(6 * count, dtype=torch.float64, generator=torch.Generator().manual_seed(8)).numpy()
    else:
        u = np.random.default_rng(8).random(6 * count)
    p = back(am.apply(Softmax(), CUT(KINDS[kind](x)))).reshape(6, 40).astype(np.float64)
    upto = np.cumsum(p, axis=-1)
    want = [[np.searchsorted(c, v * c[-1], side="right") for v in vs] for c, vs in zip(upto, u.reshape(6, count))]
    got = back(sample(Softmax(), KINDS[kind](x), transform=CUT, generator=8, num_samples=count))
    assert got.tolist() == np.array(want).T.reshape(count, 2, 3).tolist()


@every_kind
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_number_does_not_mind_how_many_follow(kind, dtype):
    like = KINDS[kind](np.zeros(1, dtype))
    many, few = (back(generators.uniform((n, 3), like, generator(kind))) for n in (50, 7))
    assert np.array_equal(many[:7], few)
    assert len(np.unique(many)) == 150


@pytest.mark.whole(lambda kind: kind == "jax")
@every_kind
@pytest.mark.parametrize("mapping", [Softmax(), Sparsemax(), Entmax(1.5), SparseSoftmax(k=4)], ids=lambda m: m.name)
def test_a_row_does_not_mind_its_neighbours(kind, mapping):
    """From one seed row i has the i-th number, however many follow; from a list its own, whatever stands before it."""
    if kind == "jax" and mapping.name in ("sparsemax", "sparse_softmax"):
        pytest.skip("drawn as entmax is, and each program takes a while to compile")
    c, x = KINDS[kind], vocabulary()
    whole = back(sample(mapping, c(x), transform=CUT, generator=5))
    few = back(sample(mapping, c(x[:2]), transform=CUT, generator=5))
    assert np.array_equal(whole[:2], few)
    many = back(sample(mapping, c(x), transform=CUT, generator=5, num_samples=7))
    assert np.array_equal(many[:, :2], back(sample(mapping, c(x[:2]), transform=CUT, generator=5, num_samples=7)))
    seeds = [7, 1, 7, 3, 2, 9]
    for count in (None, 5):
        rows = back(sample(mapping, c(x), transform=CUT, generator=seeds, num_samples=count))
        alone = [back(sample(mapping, c(r), transform=CUT, generator=s, num_samples=count)) for r, s in zip(x, seeds)]
        assert np.array_equal(rows, np.stack(alone, axis=-1))
    drawn = back(sample(mapping, c(np.zeros((6, 1000), np.float32)), generator=[1, 1, 2, 2, 3, 3]))
    assert (drawn[::2] == drawn[1::2]).all()
    assert len(set(drawn.tolist())) > 1


@every_kind
@pytest.mark.parametrize("verb", VERBS)
def test_generators_a_row(kind, verb):
    draw, c, x = VERBS[verb], KINDS[kind], np.random.default_rng(1).normal(size=(2, 2, 30)).astype(np.float32)
    rows = back(draw(c(x), generator=[generator(kind, s) for s in (4, 5, 6, 7)]))
    for i, seed in enumerate((4, 5, 6, 7)):
        assert np.array_equal(
            rows.reshape(4, -1)[i], back(draw(c(x.reshape(4, 30)[i]), generator=generator(kind, seed))).ravel()
        )
    moved = back(draw(c(np.moveaxis(x, -1, 0)), generator=(4, 5, 6, 7), axis=0))
    straight = back(draw(c(x), generator=[4, 5, 6, 7]))
    assert np.array_equal(moved if verb != "gumbel_softmax" else np.moveaxis(moved, 0, -1), straight)
    with pytest.raises(ValueError, match="got 3 for 4 rows; give one for each row, or one for all"):
        draw(c(x), generator=[1, 2, 3])


@pytest.mark.whole
def test_keys_a_row():
    jax = pytest.importorskip("jax")
    x = jax.numpy.asarray(vocabulary())
    keys = jax.random.split(jax.random.key(0), 6)
    got = jax.jit(lambda x, keys: sample(Softmax(), x, transform=CUT, generator=keys))(x, keys)
    assert np.array_equal(got, sample(Softmax(), x, transform=CUT, generator=list(keys)))
    each = jax.vmap(lambda r, k: sample(Softmax(), r, transform=CUT, generator=k))(x, keys)
    assert np.array_equal(got, each)


def test_the_global_generators():
    torch = pytest.importorskip("torch")
    x = vocabulary()
    for c, seed in ((np.asarray, np.random.seed), (torch.tensor, torch.manual_seed)):
        drawn = []
        for _ in range(2):
            seed(3)
            drawn.append(np.stack([back(sample(Softmax(), c(x))) for _ in range(5)]))
        assert np.array_equal(*drawn)
        assert len(np.unique(drawn[0], axis=0)) > 1
    x = torch.tensor(x)
    torch.manual_seed(0)
    first = sample(Softmax(), x)
    assert torch.equal(first, sample(Softmax(), x, generator=torch.Generator().manual_seed(0)))


def test_a_generator_of_another_device():
    """Asked of scores without data, since a machine may have one device only."""
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"generator: it is on cpu and the scores are on meta; use torch\.Generator"):
        generators.uniform((3, 1), torch.zeros(3, device="meta"), torch.Generator())
