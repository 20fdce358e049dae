"""Decoding: transformers' own warpers, the k best, beams, draws without replacement, drafts. Whole configs: test_from_config.py."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from kinds import KINDS, back, every_kind, generator, jax_in_the_whole_battery
from refusals import each, refuses
from sampling_cases import agrees
from scipy.special import log_softmax as scipy_log_softmax
from scipy.special import softmax as scipy_softmax

import anymax as am
from anymax import Entmax, Softmax, Sparsemax, SparseSoftmax, compose, transforms
from anymax.sampling import gumbel_topk, speculative_accept, topk_log_prob

INF = math.inf


# -- transformers' warpers on random rows ----------------------------------------------------------------------------------------

WARPERS = {
    "TemperatureLogitsWarper": [((0.7,), {}, am.temperature(0.7))],
    "TopKLogitsWarper": [((7,), {}, am.topk(7)), ((2,), {"min_tokens_to_keep": 5}, am.topk(2, min_keep=5))],
    "TopPLogitsWarper": [((0.1,), {}, am.topp(0.1)), ((0.9,), {}, am.topp(0.9)), ((0.3,), {"min_tokens_to_keep": 9}, am.topp(0.3, 9))],
    "MinPLogitsWarper": [((0.05,), {}, am.minp(0.05)), ((0.6,), {"min_tokens_to_keep": 6}, am.minp(0.6, 6))],
    "TypicalLogitsWarper": [((m,), {}, transforms.typical(m)) for m in (0.1, 0.5, 0.95)]
    + [((0.2,), {"min_tokens_to_keep": 8}, transforms.typical(0.2, 8))],
    "EpsilonLogitsWarper": [((0.02,), {}, transforms.epsilon_cutoff(0.02)), ((0.2,), {"min_tokens_to_keep": 3},
    transforms.epsilon_cutoff(0.2, 3))],
    "EtaLogitsWarper": [((0.02,), {}, transforms.eta(0.02)), ((0.4,), {"min_tokens_to_keep": 3}, transforms.eta(0.4, 3))],
}  # fmt: skip


@pytest.mark.parametrize("name", WARPERS)
@pytest.mark.parametrize("sigma", [0.3, 2.0, 8.0])
def test_transformers_warpers(name, sigma):
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    x = torch.randn(300, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * sigma
    x[::3, ::7] = -INF  # as other processors leave them
    for args, options, ours in WARPERS[name]:
        theirs = getattr(process, name)(*args, **options)(None, x)
        assert torch.equal(torch.isneginf(ours(x)), torch.isneginf(theirs))
        torch.testing.assert_close(ours(x), theirs)
        assert torch.equal(torch.isneginf(ours(x.half())), torch.isneginf(ours(x.half().float())))


def test_a_composition_is_data():
    cut = compose(
        am.temperature(0.7),
        compose(am.topk(50), am.topp(0.95, min_keep=2)),
        transforms.xtc(0.1, 0.5, generator=[1, 2]),
    )
    assert [(t.name, dict(t.params), t.axis) for t in cut.transforms] == [
        ("temperature", {"T": 0.7}, -1),
        ("topk", {"k": 50}, -1),
        ("topp", {"p": 0.95, "min_keep": 2}, -1),
        ("xtc", {"threshold": 0.1, "probability": 0.5, "generator": (1, 2)}, -1),
    ]
    assert [t.truncates for t in cut.transforms] == [False, True, True, True]
    assert am.transforms.noise().name == "noise"
    assert hash(cut) == hash(compose(*cut.transforms))


# -- the k best ------------------------------------------------------------------------------------------------------------------


@jax_in_the_whole_battery
@every_kind
@pytest.mark.parametrize("mapping", [Softmax(), Sparsemax(), Entmax(1.5), SparseSoftmax(p=0.8)], ids=lambda m: m.name)
def test_topk_log_prob(kind, mapping):
    c = KINDS[kind]
    x = np.random.default_rng(0).integers(-3, 4, (20, 9)).astype(np.float32) / 2  # with ties
    x[:, 2], x[3], x[4, 1] = -INF, -INF, math.nan
    transform = compose(am.temperature(0.8), am.topk(6))
    with np.errstate(divide="ignore"):
        log_p = np.asarray(am.log_apply(mapping, transform(x.astype(np.float64))))
    for k in (1, 4, 9):
        best = topk_log_prob(mapping, c(x), k, transform)
        index, found = back(best.index), back(best.log_prob)
        assert index.shape == found.shape == (20, k)
        for i, row in enumerate(log_p):
            if i == 4:
                assert (index[i] == -1).all()
                assert np.isnan(found[i]).all()
                continue
            order = sorted(range(9), key=lambda j: (-row[j], j))[:k]
            np.testing.assert_allclose(found[i], row[order], atol=3e-6)
            assert index[i].tolist() == [j if row[j] > -INF else -1 for j in order]
    moved = topk_log_prob(mapping, c(x.T), 4, transform, axis=0)
    assert np.array_equal(back(moved.index).T, back(topk_log_prob(mapping, c(x), 4, transform).index))


@jax_in_the_whole_battery
@every_kind
def test_log_p_is_that_of_a_draw_in_every_verb(kind):
    """A map whose probabilities sum to 2 draws one class with half of each."""
    x, budget = KINDS[kind](np.array([[0.9, 0.7, 0.2, -3.0]], np.float32)), am.Budget(2)
    p = back(am.apply(budget, x))
    drawn = gumbel_topk(x, 3, mapping=budget, generator=generator(kind))
    for index, log_p in (topk_log_prob(budget, x, 3), drawn):
        want = np.log(np.take_along_axis(p, back(index), -1) / 2)
        np.testing.assert_allclose(back(log_p), want, rtol=1e-6)
    one = am.sample(budget, x, generator=generator(kind), return_log_prob=True)
    np.testing.assert_allclose(back(one.log_prob), np.log(p[0, back(one.index)] / 2), rtol=1e-6)


def test_topk_log_prob_has_a_gradient():
    torch = pytest.importorskip("torch")
    x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for mapping in (Softmax(), Entmax(1.5)):
        assert torch.autograd.gradcheck(lambda v, m=mapping: topk_log_prob(m, v, 2, am.temperature(0.7)).log_prob, x)
    best = topk_log_prob(Softmax(), x.detach().half(), 2)
    assert best.log_prob.dtype == torch.float32


def test_maps_by_their_names():
    x = np.random.default_rng(0).normal(size=(3, 6))
    for a, b in zip(topk_log_prob("sparsemax", x, 3), topk_log_prob(Sparsemax(), x, 3)):
        assert np.array_equal(a, b)
    drawn = gumbel_topk(x, 2, mapping="entmax:alpha=1.3", generator=0)
    assert np.array_equal(drawn.index, gumbel_topk(x, 2, mapping=Entmax(1.3), generator=0).index)
    assert np.array_equal(am.sample("sparsemax", x, generator=1), am.sample(Sparsemax(), x, generator=1))


@jax_in_the_whole_battery
@every_kind
def test_a_beam_search(kind):
    """All sequences of three classes with the best sums, by exhaustion."""
    rng = np.random.default_rng(3)
    first, after = rng.normal(size=5).astype(np.float32), rng.normal(size=(5, 5)).astype(np.float32)
    beams, sums = [[]], np.zeros(1)
    for _ in range(3):
        rows = np.stack([after[b[-1]] if b else first for b in beams])
        best = topk_log_prob(Softmax(), KINDS[kind](rows), 5)
        each = sums[:, None] + back(best.log_prob)
        flat = np.argsort(-each.ravel(), kind="stable")[:25]
        beams = [[*beams[i // 5], int(back(best.index).ravel()[i])] for i in flat]
        sums = each.ravel()[flat]
    lp, la = scipy_log_softmax(first), scipy_log_softmax(after, axis=-1)
    every = sorted((-(lp[a] + la[a, b] + la[b, d]), [a, b, d]) for a, b, d in itertools.product(range(5), repeat=3))
    assert beams[0] == every[0][1]
    np.testing.assert_allclose(sums[0], -every[0][0], rtol=1e-5)


# -- without replacement -----------------------------------------------------------------------------------------------------------


@jax_in_the_whole_battery
@every_kind
def test_gumbel_topk_is_drawing_one_after_the_other(kind):
    """Frequencies of ordered pairs: p_i p_j / (1 - p_i)."""
    x = np.array([0.5, -0.2, 1.0, -INF, 0.0], np.float32)
    p = scipy_softmax(x.astype(np.float64))
    drawn = gumbel_topk(KINDS[kind](np.tile(x, (20_000, 1))), 2, generator=generator(kind))
    pairs = back(drawn.index)
    want = np.array([[p[i] * p[j] / (1 - p[i]) if i != j else 0.0 for j in range(5)] for i in range(5)])
    agrees(5 * pairs[:, 0] + pairs[:, 1], want.ravel())
    np.testing.assert_allclose(back(drawn.log_prob), np.log(p[pairs]), atol=1e-6)


@jax_in_the_whole_battery
@every_kind
def test_gumbel_topk_gives_k_different_classes(kind):
    c, x = KINDS[kind], np.random.default_rng(0).normal(size=(8, 30)).astype(np.float32)
    x[:, 4] = -INF
    for k in (1, 7, 29):
        index = back(gumbel_topk(c(x), k, generator=1).index)
        assert index.shape == (8, k)
        assert all(len(set(row)) == k and 4 not in row and min(row) >= 0 for row in index.tolist())
    short = gumbel_topk(c(x), 5, transform=am.topk(3), generator=1)
    assert (back(short.index)[:, 3:] == -1).all()
    assert (back(short.index)[:, :3] >= 0).all()
    assert np.isneginf(back(short.log_prob)[:, 3:]).all()
    sparse = back(gumbel_topk(c(x), 30, mapping=Sparsemax(), generator=1).index)
    p = np.asarray(am.sparsemax(x.astype(np.float64)))
    assert all(set(row) - {-1} == set(np.flatnonzero(q)) for row, q in zip(sparse.tolist(), p))
    x[2], x[5, 0] = -INF, math.nan
    strange = gumbel_topk(c(x), 2, generator=1)
    assert (back(strange.index)[[2, 5]] == -1).all()
    assert np.isneginf(back(strange.log_prob)[2]).all()
    assert np.isnan(back(strange.log_prob)[5]).all()
    seeds = list(range(8))
    rows = back(gumbel_topk(c(x), 3, generator=seeds).index)
    assert np.array_equal(rows, np.stack([back(gumbel_topk(c(r), 3, generator=s).index) for r, s in zip(x, seeds)]))
    moved = back(gumbel_topk(c(x.T), 3, generator=seeds, axis=0).index)
    assert np.array_equal(moved.T, rows)


# -- drafts ------------------------------------------------------------------------------------------------------------------------

DRAFT, TARGET = (
    np.array([[0.5, 0.3, 0.2, 0.0], [0.1, 0.1, 0.1, 0.7], [0.25, 0.25, 0.25, 0.25]]),
    np.array([[0.2, 0.3, 0.4, 0.1], [0.4, 0.0, 0.0, 0.6], [0.0, 0.0, 0.5, 0.5], [0.7, 0.1, 0.1, 0.1]]),
)


@every_kind
@pytest.mark.parametrize("after", [True, False])
def test_what_follows_a_draft_is_distributed_as_the_target(kind, after):
    rng = np.random.default_rng(0)
    size = 20_000
    tokens = np.stack([rng.choice(4, size, p=q) for q in DRAFT], -1)
    p = TARGET if after else TARGET[:3]
    c = KINDS[kind]
    q, p = (np.broadcast_to(a, (size, *a.shape)).astype(np.float32) for a in (DRAFT, p))
    count, token = map(back, speculative_accept(c(q), c(p), c(tokens), generator=generator(kind)))
    out = np.concatenate([tokens, np.full((size, 1), -1)], -1)
    out[np.arange(size), count] = token
    for place in range(4 if after else 3):
        reached = count >= place
        assert reached.sum() > 3000
        agrees(out[reached, place], TARGET[place])  # whatever came before, as the target
    # the joint law of the first two, where both are there
    both = count >= 1
    joint = np.outer(TARGET[0], TARGET[1])
    pairs = 4 * out[both, 0] + out[both, 1]
    accepted = np.minimum(TARGET[0], DRAFT[0])  # the first is accepted with this mass
    agrees(pairs, (joint / TARGET[0][:, None] * accepted[:, None] / accepted.sum()).ravel())
    assert abs(both.mean() - accepted.sum()) < 5 / math.sqrt(size)
    if not after:
        assert (token[count == 3] == -1).all()


@jax_in_the_whole_battery
@every_kind
def test_drafts_of_any_maps(kind):
    """Sparse targets, a draft that equals the target, one that the target rules out."""
    c = KINDS[kind]
    x = np.random.default_rng(0).normal(0, 2, (50, 3, 20)).astype(np.float32)
    p = am.sparsemax(x)
    tokens = back(am.sample(Sparsemax(), c(x), generator=0))
    count, token = map(back, speculative_accept(c(p), c(p), c(tokens), generator=1))
    assert (count == 3).all()
    assert (token == -1).all()
    q = np.where(p > 0, 0, 1).astype(np.float32)
    q /= q.sum(-1, keepdims=True)
    tokens = q.argmax(-1)
    count, token = map(back, speculative_accept(c(q), c(p), tokens, generator=1))
    assert (count == 0).all()
    assert (np.take_along_axis(p[:, 0], token[:, None], -1) > 0).all()


@jax_in_the_whole_battery
@every_kind
def test_short_drafts_strange_rows_and_seeds_a_row(kind):
    c = KINDS[kind]
    q, p = (np.broadcast_to(a, (4000, *a.shape)).astype(np.float32).copy() for a in (DRAFT, TARGET))
    tokens = np.tile([2, -1, -1], (4000, 1))  # the target likes the first more than the draft
    count, token = map(back, speculative_accept(c(q), c(p), c(tokens), generator=generator(kind)))
    assert (count == 1).all()
    agrees(token, TARGET[1])
    q, p, tokens = q[:5], p[:5], np.tile([2, 3, 2], (5, 1))
    p[1, 0], p[2, 1], q[3, 0] = math.nan, 0.0, math.nan
    count, token = map(back, speculative_accept(c(q), c(p), c(tokens), generator=2))
    assert count[1] == 0
    assert token[1] == -1
    assert count[2] == 1
    assert token[2] == -1
    assert count[3] == 0
    assert token[3] == -1
    sound = map(back, speculative_accept(c(q[:1]), c(p[:1]), c(tokens[:1]), generator=2))
    assert [count[0], token[0]] == [int(v[0]) for v in sound]
    seeds = [5, 6, 7, 8, 9]
    rows = [back(a) for a in speculative_accept(c(q), c(p), c(tokens), generator=seeds)]
    alone = [speculative_accept(c(q[i]), c(p[i]), c(tokens[i]), generator=s) for i, s in enumerate(seeds)]
    assert [r.tolist() for r in rows] == [[int(a[j]) for a in alone] for j in (0, 1)]


def test_a_draft_where_some_of_the_targets_probabilities_are_nan():
    target = np.array([[0.1, math.nan, 0.5]])
    count, token = speculative_accept(np.full((1, 3), 1 / 3), target, [1], generator=0)
    assert (int(count), int(token)) == (0, -1)


@pytest.mark.whole
def test_drafts_under_jit():
    jax = pytest.importorskip("jax")
    q, p = (jax.numpy.asarray(np.broadcast_to(a, (50, *a.shape)), dtype="float32") for a in (DRAFT, TARGET))
    tokens = jax.numpy.asarray(np.random.default_rng(0).integers(4, size=(50, 3)))
    key = jax.random.key(0)
    got = jax.jit(lambda *a: speculative_accept(*a, generator=key))(q, p, tokens)
    for a, b in zip(got, speculative_accept(q, p, tokens, generator=key)):
        assert np.array_equal(a, b)
    drawn = jax.jit(lambda x: gumbel_topk(x, 3, generator=key))(jax.numpy.log(p[:, 0]))
    assert np.array_equal(drawn.index, gumbel_topk(jax.numpy.log(p[:, 0]), 3, generator=key).index)


@pytest.mark.whole
def test_under_torch_compile():
    torch = pytest.importorskip("torch")
    x = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    cut = compose(
        transforms.logit_bias({3: 1.0}),
        transforms.repetition_penalty([1, 2], 1.2),
        am.temperature(0.7),
        am.topk(9),
        am.topp(0.9),
    )
    torch._dynamo.reset()
    draw = torch.compile(
        lambda x: am.sample(Softmax(), x, transform=cut, return_log_prob=True)[:3], fullgraph=True, backend="eager"
    )
    torch.manual_seed(0)
    got = draw(x)
    torch.manual_seed(0)
    for a, b in zip(got, am.sample(Softmax(), x, transform=cut, return_log_prob=True)[:3]):
        torch.testing.assert_close(a, b)
    best = torch.compile(lambda x: topk_log_prob(Entmax(1.5), x, 4, cut), fullgraph=True, backend="eager")(x)
    torch.testing.assert_close(best, topk_log_prob(Entmax(1.5), x, 4, cut))


def test_draws_of_another_number_of_rows_under_torch_compile():
    """The second size makes sizes symbolic, for uniform and for normal numbers."""
    torch = pytest.importorskip("torch")

    def draws(x):
        policy = am.nn.Categorical(am.Sparsemax(), x, validate_args=False).sample((2,))
        return am.gumbel_softmax(x), am.sampling.perturb_argmax(x, "normal"), policy

    torch._dynamo.reset()
    quick = torch.compile(draws, fullgraph=True, backend="eager")
    for rows in (3, 5):
        x, got = torch.randn(rows, 4), []
        for f in (draws, quick):
            torch.manual_seed(0)
            got.append(f(x))
        torch.testing.assert_close(got[1], got[0])


X, P = np.zeros((2, 5)), np.full((2, 3, 5), 0.2)
T = np.zeros((2, 3), int)


REFUSED = {
    "k of 0": (lambda: topk_log_prob(Softmax(), X, 0), ValueError, "k must be from 1 to the number of classes, 5; got 0"),
    "k of 6": (lambda: topk_log_prob(Softmax(), X, 6), ValueError, "k must be from 1 to the number of classes, 5; got 6"),
    "a fraction of k": (lambda: topk_log_prob(Softmax(), X, 2.0), TypeError, "k must be an integer"),
    "scores for a map": (lambda: topk_log_prob(X, X, 2), TypeError, "expected a mapping"),
    "a number for a transform": (lambda: topk_log_prob(Softmax(), X, 2, 0.7), TypeError, "transform must be a function"),
    "no classes": (lambda: topk_log_prob(Softmax(), np.zeros((2, 0)), 1), ValueError, "no classes"),
    "draws: k of 0": (lambda: gumbel_topk(X, 0), ValueError, "k must be from 1"),
    "draws: a boolean k": (lambda: gumbel_topk(X, True), TypeError, "k must be an integer"),
    "draws: a fraction for a generator": (lambda: gumbel_topk(X, 2, generator=0.5), TypeError, "generator: NumPy arrays need"),
    "draws: one seed of two": (lambda: gumbel_topk(X, 2, generator=[1]), ValueError, "got 1 for 2 rows"),
    "tokens that are too few": (lambda: speculative_accept(P, P, T[:, :2]), ValueError, r"got \(2, 3, 5\), \(2, 3, 5\) and \(2, 2\)"),
    "targets that are too few": (lambda: speculative_accept(P, P[:, :2], T), ValueError, "must belong together"),
    "targets of fewer classes": (lambda: speculative_accept(P, P[..., :4], T), ValueError, "must belong together"),
    "no draft": (lambda: speculative_accept(P[:, :0], P[:, :1], T[:, :0]), ValueError, "T at least 1"),
    "fractions for tokens": (lambda: speculative_accept(P, P, T + 0.5), TypeError, "tokens must be integers"),
    "a token too high": (lambda: speculative_accept(P, P, T + 5), ValueError, "out of range for 5 classes; tokens are 0 to 4"),
    "a token below -1": (lambda: speculative_accept(P, P, T - 2), ValueError, "out of range for 5 classes; tokens are 0 to 4"),
    "a draft of one row": (lambda: speculative_accept(P[0, 0], P, T), ValueError, "p_draft must be"),
    "a target of one row": (lambda: speculative_accept(P, P[0, 0], T), ValueError, "p_target must be"),
    "a draft without classes": (lambda: speculative_accept(P[..., :0], P[..., :0], T - 1), ValueError, r"\(2, 3, 0\) has no classes"),
    "words for a generator": (lambda: speculative_accept(P, P, T, generator="0"), TypeError, "generator: NumPy arrays need"),
}  # fmt: skip


@each(REFUSED)
def test_what_is_refused(call, error, words):
    refuses(call, error, words)
