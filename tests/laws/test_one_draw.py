"""The distribution of one draw: all samplers and likelihoods of a map have the same one, or refuse the map by the same sentence."""

from __future__ import annotations

import importlib.util
import math

import numpy as np
import pytest
from kinds import KINDS, back, generator
from processes import together
from scipy import special, stats

import anymax as A
from anymax import Bounded, Budget, Elementwise, Ranks, Sink, Softmax, Softpick, sampling
from anymax.functional.draws import may_draw_none

D, INF, DRAWS = A.distributed, math.inf, 2000
NONE = "gives each class a number of its own, and a row no distribution, so there is no single draw"
X = np.random.default_rng(5).normal(0.3, 1.0, (4, 6))
X[1, [1, 2, 4, 5]] = X[2, 5] = -INF
CUT = np.where(np.sort(X)[:, -2:-1] <= X, X, -INF)
KEEP, FLAT = CUT > -INF, np.where(CUT > -INF, 0.0, -INF)
CLASSES, GIVEN = np.tile(np.arange(6)[:, None], (1, 4)), np.tile([0, 3], (4, 1))
OTHER = np.random.default_rng(6).normal(size=(4, 4))  # features of another layer, with the same classes
FEATURES, WEIGHT = np.eye(4), np.where(X > -INF, X, 0.0).T.copy()

SEEN = np.where(X > -INF, OTHER @ WEIGHT.T, -INF)

# -- the outcomes [rows, n + 1] of one draw from scores, of which the last is none of the classes --------------------------------------


def whole(mapping):
    """p, divided by its sum."""
    return mapping, lambda x: np.pad(p := A.apply(mapping, x), [(0, 0), (0, 1)]) / p.sum(-1, keepdims=True)


def sunk(inner, score=0.2):
    return Sink(inner, score), lambda x: whole(inner)[1](np.pad(x, [(0, 0), (0, 1)], constant_values=score))[:, :-1]


def rest(mapping):
    return mapping, lambda x: np.concatenate([p := A.apply(mapping, x), 1 - p.sum(-1, keepdims=True)], -1)


MAPS = {
    "softmax": whole(Softmax()), "sparsemax": whole(A.Sparsemax()), "taylor": whole(A.Taylor()), "budget": whole(Budget(2)),
    "sigmoids": whole(Budget(1.5, shape="sigmoid")), "budget a row": whole(Budget(np.array([[1.0], [2.5], [3.0], [0.5]]))),
    "short": whole(Bounded(0.1)), "short if masked": whole(Bounded(0.3, 1.5)),
    "bound a row": whole(Bounded(np.array([[0.1], [0.6], [0.4], [0.2]]))),
    "bound a class": whole(Bounded(np.array([0.1, 0.3, 0.05, 0.4, 0.2, 0.1]))), "bounds below 1": whole(Bounded(np.full(6, 0.1), 1.0)),
    "softpick": rest(Softpick()), "sink": sunk(Softmax()), "sparse sink": sunk(A.Sparsemax()), "sink of budget": sunk(Budget(2)),
    "sink of short": sunk(Bounded(0.1)), "sigmoid": (Elementwise(), None), "relu": (Elementwise("relu"), None), "ranks": (Ranks(), None),
    "ranks, kl": (Ranks(0.5, "kl"), None),
}  # fmt: skip
BY_CLASS = ("bound a class", "bounds below 1")
SOFT, PICK = MAPS["softmax"][1], MAPS["softpick"][1]

# -- what is asked, and what it should be ----------------------------------------------------------------------------------------------


def logs(q):
    with np.errstate(divide="ignore"):
        return np.log(q)


def of_classes(q):
    return logs(q[:, :-1]).T


def of_found(found):
    """log p of every class, [n, rows], from those of k classes."""
    out = np.full((4, 7), -INF)
    index = back(found.index)
    np.put_along_axis(out, np.where(index < 0, 6, index), back(found.log_prob), -1)
    return out[:, :-1].T


def smoothed(f, m):
    return -np.log((f(X)[:, 0] + 0.1) / (1 + 0.1 * ((X > -INF).sum(-1) + (m.hidden is not None))))


def divergence(p, q):
    return special.rel_entr(p, q).sum(-1)


def jensen_shannon(p, q):
    m = 0.5 * (p + q)
    return 0.5 * (divergence(p, m) + divergence(q, m))


TEACHER = np.log(np.array([[0.6, 0.3]] * 4))


def from_teacher(q):
    some = np.take_along_axis(q, GIVEN, -1)
    with np.errstate(divide="ignore"):
        return divergence(np.array([0.6, 0.3, 0.1]), np.concatenate([some, 1 - some.sum(-1, keepdims=True)], -1))


def source(c):
    return generator(next(kind for kind, maker in KINDS.items() if maker is c))


def layer(verb, m, c, *target, **options):
    """A verb of output layers whose scores are X."""
    return verb(c(FEATURES), c(WEIGHT), *(c(a) for a in target), m, mask=c(X > -INF), **options)


def apart(verb, m, c, *target, linear=False, **options):
    """A verb over two processes."""

    def one(group):
        here = slice(4 * group.rank, 4 + 2 * group.rank)
        mine = m.replace(**{k: v[..., here] if v.shape[-1] == 6 else v for k, v in m.params().items()})
        arrays = [c(a) for a in target]
        if linear:
            arrays = [a[here] if a is not arrays[0] and verb is D.linear_kl else a for a in arrays]
            keep = c(X > -INF)[:, here]
            return verb(c(FEATURES), c(WEIGHT)[here], *arrays, mine, mask=keep, group=group, **options)
        return verb(mine, c(X)[:, here], *arrays, group=group, axis=-1, **options)

    return together(2, one)[1]


def numpyro_or_torch(m, c):
    if c is KINDS["torch"]:
        return A.nn.Categorical(m, c(X))
    import anymax.numpyro

    return anymax.numpyro.Categorical(m, c(X))


# verb -> (what it gives for a map and a maker of arrays; the same from the outcomes of scores)
VERBS = {
    "log_prob": (lambda m, c: A.log_prob(m, c(X), c(CLASSES)), lambda f, m: of_classes(f(X))),
    "log_prob, cut": (lambda m, c: A.log_prob(m, c(X), c(CLASSES), transform=A.topk(2)), lambda f, m: of_classes(f(CUT))),
    "log_prob, masked": (lambda m, c: A.log_prob(m, c(0 * WEIGHT.T), c(CLASSES), mask=c(KEEP)), lambda f, m: of_classes(f(FLAT))),
    "log_prob_entropy": (lambda m, c: A.log_prob_entropy(m, c(X), c(CLASSES))[1], lambda f, m: stats.entropy(f(X), axis=-1)),
    "nll": (lambda m, c: A.nll(m, c(X), c(CLASSES[0]), reduction="none"), lambda f, m: -of_classes(f(X))[0]),
    "smoothed_nll": (lambda m, c: A.smoothed_nll(m, c(X), c(CLASSES[0]), reduction="none", epsilon=0.1), smoothed),
    "kl": (lambda m, c: A.likelihood.kl(m, c(X), Softmax(), c(X)), lambda f, m: divergence(f(X), SOFT(X))),
    "kl of softmax": (lambda m, c: A.likelihood.kl(Softmax(), c(X), m, c(X)), lambda f, m: divergence(SOFT(X), f(X))),
    "kl of softpick": (lambda m, c: A.likelihood.kl(Softpick(), c(X), m, c(X)), lambda f, m: divergence(PICK(X), f(X))),
    "topk_log_prob": (lambda m, c: of_found(sampling.topk_log_prob(m, c(X), 6)), lambda f, m: of_classes(f(X))),
    "gumbel_topk": (lambda m, c: of_found(sampling.gumbel_topk(c(X), 6, mapping=m, generator=source(c))), lambda f, m: of_classes(f(X))),
    "linear_kl": (lambda m, c: layer(A.linear_kl, m, c, OTHER, WEIGHT, beta=0.5), lambda f, m: jensen_shannon(f(X), f(SEEN))),
    "linear_kl, forward": (lambda m, c: layer(A.linear_kl, m, c, OTHER, WEIGHT), lambda f, m: divergence(f(SEEN), f(X))),
    "linear_log_prob": (lambda m, c: layer(A.linear_log_prob, m, c, CLASSES[0]), lambda f, m: of_classes(f(X))[0]),
    "linear_log_prob_entropy": (
        lambda m, c: layer(A.linear_log_prob_entropy, m, c, CLASSES[0])[1],
        lambda f, m: stats.entropy(f(X), axis=-1),
    ),
    "linear_topk_kl": (lambda m, c: layer(A.linear_topk_kl, m, c, GIVEN, TEACHER, tail="one class"), lambda f, m: from_teacher(f(X))),
}  # fmt: skip
TORCH = {
    "distributed.log_prob": (lambda m, c: apart(D.log_prob_entropy, m, c, CLASSES)[0], lambda f, m: of_classes(f(X))),
    "distributed.entropy": (lambda m, c: apart(D.log_prob_entropy, m, c, CLASSES)[1], lambda f, m: stats.entropy(f(X), axis=-1)),
    "distributed.nll": (lambda m, c: apart(D.nll, m, c, CLASSES[0], reduction="none"), lambda f, m: -of_classes(f(X))[0]),
    "distributed.linear_log_prob_entropy": (
        lambda m, c: apart(D.linear_log_prob_entropy, m, c, CLASSES[0], linear=True)[1],
        lambda f, m: stats.entropy(f(X), axis=-1),
    ),
    "distributed.linear_kl": (
        lambda m, c: apart(D.linear_kl, m, c, OTHER, WEIGHT, linear=True, beta=0.5), lambda f, m: jensen_shannon(f(X), f(SEEN)),
    ),
    "distributed.linear_topk_kl": (
        lambda m, c: apart(D.linear_topk_kl, m, c, GIVEN, TEACHER, linear=True, tail="one class"),
        lambda f, m: from_teacher(f(X)),
    ),
}  # fmt: skip
CATEGORICAL = {
    "Categorical.probs": (lambda m, c: numpyro_or_torch(m, c).probs, lambda f, m: f(X)[:, :-1]),
    "Categorical.logits": (lambda m, c: numpyro_or_torch(m, c).logits, lambda f, m: of_classes(f(X)).T),
    "Categorical.log_prob": (lambda m, c: numpyro_or_torch(m, c).log_prob(c(CLASSES)), lambda f, m: of_classes(f(X))),
    "Categorical.entropy": (lambda m, c: numpyro_or_torch(m, c).entropy(), lambda f, m: stats.entropy(f(X), axis=-1)),
}  # fmt: skip
HAVE_NUMPYRO = importlib.util.find_spec("numpyro") is not None
ROWS = [(kind, verb) for verb in VERBS for kind in KINDS]
ROWS += [("torch", verb) for verb in TORCH | CATEGORICAL] + [("jax", verb) for verb in CATEGORICAL if HAVE_NUMPYRO]
VERBS |= TORCH | CATEGORICAL


def asked(verb, ask, name, c):
    """What a verb gives for a map; None if it gives the error that it should."""
    mapping, outcomes = MAPS[name]
    call = lambda: ask(mapping.replace(**{k: c(v) for k, v in mapping.params().items()}), c)  # noqa: E731
    words = NONE if outcomes is None else None
    if words is None and verb.startswith("Categorical") and may_draw_none(mapping):
        words = "gives the classes no distribution: a draw may be none of them"
    if words is None:
        return call()
    with pytest.raises(ValueError, match=words):
        call()
    return None


@pytest.mark.whole(lambda kind: kind in ("jax", "strict"))
@pytest.mark.parametrize(("kind", "verb"), ROWS)
def test_likelihoods_are_those_of_one_draw(kind, verb):
    for name, (mapping, outcomes) in MAPS.items():
        if "linear" in verb and name in BY_CLASS:
            continue  # an output layer takes parameters of rows
        found = asked(verb, VERBS[verb][0], name, KINDS[kind])
        if found is not None:
            close = {"atol": 2e-5, "rtol": 2e-4} if kind == "jax" else {"atol": 1e-11}
            np.testing.assert_allclose(back(found), VERBS[verb][1](outcomes, mapping), **close, err_msg=name)


# -- draws -----------------------------------------------------------------------------------------------------------------------------


def in_segments(m, c):
    """Draws from the rows as segments, as classes; a parameter of rows is one of segments."""
    m = m.replace(**{k: v[:, 0] for k, v in m.params().items()})
    index = back(A.segment_sample(m, c(X.ravel()), lengths=[6] * 4, generator=source(c), num_samples=DRAWS))
    return np.where(index < 0, -1, index - 6 * np.arange(4))


def of_categorical(m, c):
    if c is KINDS["torch"]:
        return numpyro_or_torch(m, c).sample((DRAWS,), generator=source(c))
    return numpyro_or_torch(m, c).sample(source(c), (DRAWS,))


SAMPLERS = {
    "sample": lambda m, c: A.sample(m, c(X), generator=source(c), num_samples=DRAWS),
    "sample with log p": lambda m, c: A.sample(m, c(X), generator=source(c), num_samples=DRAWS, return_log_prob=True),
    "segment_sample": in_segments,
}
OF_TORCH = {
    "distributed.sample": lambda m, c: apart(D.sample, m, c, generator=0, num_samples=DRAWS // 10),
    "Categorical.sample": of_categorical,
}  # fmt: skip
DRAWN = [(kind, verb) for verb in SAMPLERS for kind in KINDS if kind != "strict"] + [
    ("torch", verb) for verb in OF_TORCH
]
DRAWN += [("jax", "Categorical.sample")] if HAVE_NUMPYRO else []
SAMPLERS |= OF_TORCH


@pytest.mark.whole(lambda kind: kind == "jax")
@pytest.mark.parametrize(("kind", "verb"), DRAWN)
def test_draws_are_those_of_one_draw(kind, verb):
    """Frequencies within 5 standard deviations, and log p of what was drawn."""
    for name, (_, outcomes) in MAPS.items():
        if verb == "segment_sample" and name in BY_CLASS:
            continue  # a segment takes parameters of segments
        found = asked(verb, SAMPLERS[verb], name, KINDS[kind])
        if found is None:
            continue
        q = outcomes(X)
        index = back(found.index if verb == "sample with log p" else found)
        found_q = (np.where(index < 0, 6, index)[..., None] == np.arange(7)).mean(0)
        assert (np.abs(found_q - q) <= 5 * np.sqrt(q * (1 - q) / len(index)) + 1e-9).all(), name
        if verb == "sample with log p":
            of_each = np.take_along_axis(logs(q), np.where(index < 0, 6, index).T, -1).T
            for log_p in (found.log_prob, found.full_log_prob):
                np.testing.assert_allclose(back(log_p), of_each, atol=1e-4 if kind == "jax" else 1e-11, err_msg=name)


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (Bounded, [0.1, 0.2, 0.05, 0.3, 0.1, 0.15]), (lambda u: Bounded(u, 1.5), 0.12), (Budget, 2.5), (lambda k: Sink(Budget(k)), 1.5),
        (lambda s: Softpick(), 0.0),
    ],
)  # fmt: skip
def test_gradients_are_those_of_one_draw(make, value):
    """In the scores and in a learned bound or mass, of the entropy, a divergence and a loss."""
    import torch

    x = torch.tensor(X[[0, 2, 3]], dtype=torch.float64).clamp(min=-3.0).requires_grad_()
    v = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([2, 0, 3])

    def f(x, v):
        m = make(v)
        d = A.likelihood.kl(m, x, Sink(), torch.zeros_like(x))
        return A.log_prob_entropy(m, x, y)[1], d, A.smoothed_nll(m, x, y, epsilon=0.1, reduction="none")

    assert torch.autograd.gradcheck(f, (x, v))
