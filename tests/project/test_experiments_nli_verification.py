"""What the experiments on sentence pairs and on verification measure with, held to other code and to plain counting."""

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")
pytest.importorskip("scipy")

import anymax
from experiments import _characters, _entailment, _report, nli, verification
from experiments._statistics import CONFIRMED, CONTRADICTED, NOT_TESTED

pytestmark = pytest.mark.whole

# -- verification: curves and drawings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [7, 10**9])
def test_curve_is_that_of_scikit_learn(levels):
    """With few levels nearly all scores are tied."""
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(levels)
    true = rng.random(600) < 0.2
    scores = np.floor(levels * (rng.random(600) + 0.4 * true)) / levels
    far, tar, _ = metrics.roc_curve(true, scores, drop_intermediate=False)
    ours = verification.curve(scores, true)
    for rate in (0.0, 0.01, 0.05, 0.3, 1.0):
        assert ours.tar_at(rate) == pytest.approx(tar[far <= rate].max())
    gaps = far - (1 - tar)
    after = int(np.flatnonzero(gaps >= 0)[0])
    assert min(far[after - 1], 1 - tar[after]) - 1e-12 <= ours.eer <= max(far[after], 1 - tar[after - 1]) + 1e-12
    assert ours.eer == pytest.approx(np.interp(0.0, gaps, far))


def test_equal_error_rate_by_hand():
    assert verification.curve(np.array([4.0, 3.0, 2.0, 1.0]), np.array([1, 1, 0, 0], dtype=bool)).eer == 0.0
    assert verification.curve(np.array([4.0, 3.0, 2.0, 1.0]), np.array([0, 0, 1, 1], dtype=bool)).eer == 1.0
    assert verification.curve(np.array([4.0, 3.0, 2.0, 1.0]), np.array([1, 0, 1, 0], dtype=bool)).eer == 0.5
    assert verification.curve(np.ones(10), np.arange(10) < 5).eer == pytest.approx(0.5)


def test_pairs_are_counted_once():
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(12, 3))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    characters = np.repeat([0, 1, 2], 4)
    found = [(float(a @ b), p == q) for (a, p), (b, q) in itertools.combinations(zip(vectors, characters), 2)]
    best = max(score for score, same in found if not same)
    expected = np.mean([score > best for score, same in found if same])
    assert verification.pairs(vectors, characters).tar_at(0.0) == pytest.approx(expected)


def test_drawings():
    all_of = _characters.invented(("a", "b"), characters=3, drawers=2)
    one = all_of.of(("b",))
    assert len(all_of.images) == 12
    assert one.characters.tolist() == [0, 0, 1, 1, 2, 2]
    assert torch.equal(one.images, all_of.images[6:])
    turned = one.turned()
    assert turned.classes == 12
    assert sorted(np.bincount(turned.characters)) == [2] * 12
    assert torch.equal(turned.images[6 + 1, 0], one.images[1, 0].T.flip(0))
    assert turned.characters[6 + 1] != one.characters[1]


@pytest.mark.parametrize("name", verification.METHODS)
def test_every_loss_trains(name):
    """Four characters of very few drawings: after training, drawings of one character are nearer than those of two."""
    drawings = _characters.invented(("a",), characters=4, drawers=6)
    method = verification.METHODS[name]
    setting = method.setting(method.start, min(verification.FIRST, method.margins[-1]))
    net = _characters.train(drawings, *setting, epochs=12, seed=0)
    vectors = _characters.embed(net, drawings)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-5)
    assert verification.pairs(vectors, drawings.characters).eer < 0.1


@pytest.mark.parametrize(
    ("without", "lacking"),
    [
        ((), set()),
        (("AM softmax",), {"am", "am_margin", "own", "entmax"}),
        (("ArcFace",), {"arc", "arc_margin"}),
        (("AM entmax 1.5",), {"entmax"}),
    ],
    ids=["all", "no AM", "no ArcFace", "no AM entmax"],
)
def test_no_margin_is_not_tested(tmp_path, without, lacking):
    """A loss to which tuning gave no margin, be it in one half only, says nothing of margins."""
    rng = np.random.default_rng(0)

    def tested():
        true = rng.random(60) < 0.5
        one = verification.curve(rng.normal(size=60) + true, true)
        return verification.Tested(one, {a: float(rng.random()) for a in "abcd"})

    results = {name: [[tested(), tested()] for _ in range(3)] for name in verification.METHODS}
    chosen = {
        name: [method.setting(method.start, margin if len(method.margins) > 1 else 0.0) for margin in (0.4, 0.1)]
        for name, method in verification.METHODS.items()
    }
    for name in without:
        chosen[name][1] = verification.METHODS[name].setting(8.0, 0.0)
    found = _report.Findings("verification", verification.EXPERIMENT.claims, tmp_path)
    verification._tell(found, results, chosen, [])
    said = found.verdicts()
    assert {key for key, verdict in said.items() if verdict == NOT_TESTED} == lacking
    for key, names in verification.CHOSEN.items():
        assert said[key] == (CONTRADICTED if {*names} & {*without} else CONFIRMED)
    assert {one["claim"] for one in found.tests} == {*verification.EXPERIMENT.claims}


# -- sentence pairs -----------------------------------------------------------------------------------------------------------


PAIRS = _entailment.invented(40, 0)
VOCABULARY = _entailment.Vocabulary(PAIRS)
MODELS = [_entailment.Reader, _entailment.Aligner]


def made(model, kind):
    torch.manual_seed(0)
    return model(len(VOCABULARY), nli.kinds()[kind]).eval()


def test_words():
    assert _entailment.words("Two dogs' owners, in N.Y. , don't run . ") == (
        "two", "dogs'", "owners", ",", "in", "n", ".", "y", ".", ",", "don't", "run",
    )  # fmt: skip


def test_vocabulary_and_batches_lose_no_pair():
    pairs = [*PAIRS, *PAIRS, _entailment.pair("neutral", "a zebra by the river", "the dog is old")]
    vocabulary = _entailment.Vocabulary(pairs)
    assert "zebra" not in vocabulary.numbers
    names = {number: word for word, number in vocabulary.numbers.items()}
    for generator in (None, torch.Generator().manual_seed(0)):
        seen = []
        for _, premises, hypotheses, labels in vocabulary.batches(pairs, generator):
            for p, h, y in zip(premises.tolist(), hypotheses.tolist(), labels.tolist()):
                seen.append((y, *(tuple(names.get(i, "zebra") for i in s if i) for s in (p, h))))
        assert sorted(seen) == sorted(map(tuple, pairs))


def test_no_premise_on_both_sides():
    pairs = [_entailment.Pair(0, (str(i // 3),), (str(i),)) for i in range(60)]
    rest, held = _entailment.by_premise(pairs, 10)
    assert not {p.premise for p in rest} & {p.premise for p in held}
    assert 10 <= len(held) < 13
    assert sorted(rest + held) == sorted(pairs)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", nli.kinds())
def test_padding_changes_nothing(model, kind):
    """A pair alone, and beside the longest pair."""
    net = made(model, kind)
    one = _entailment.pair("neutral", "a red dog", "the dog")
    long = max(PAIRS, key=lambda p: len(p.premise))
    alone, weights = net(VOCABULARY.rows([one.premise]), VOCABULARY.rows([one.hypothesis]))
    both, padded = net(VOCABULARY.rows([one.premise, long.premise]), VOCABULARY.rows([one.hypothesis, long.hypothesis]))
    torch.testing.assert_close(both[:1], alone)
    for p, q in zip(weights, padded):
        torch.testing.assert_close(q[:1, : p.shape[1], : p.shape[2]], p)
        assert (q[:1, :, p.shape[2] :] == 0).all()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ["soft", "entmax", "sparse", "learned"])
def test_weights_are_the_map_of_the_scores(model, kind):
    net, one = made(model, kind), PAIRS[0]
    weights = _entailment.weights(net, VOCABULARY, one)
    np.testing.assert_allclose(weights.sum(axis=-1), 1.0, rtol=1e-5)
    assert _entailment.keep(VOCABULARY, one).tolist() == [True] * weights.shape[-1]
    premise, hypothesis = VOCABULARY.rows([one.premise]), VOCABULARY.rows([one.hypothesis])
    with torch.no_grad():
        if model is _entailment.Reader:
            states, last = net.premise(net.embedding(premise))
            query = net.hypothesis(net.embedding(hypothesis), last)[1][0]
            scores = (torch.tanh(net.keys(states[0]) + net.query(query)) @ net.score.weight.T).T
        else:
            q, k = net.align(net.embedding(hypothesis)[0]), net.align(net.embedding(premise)[0])
            scores = q @ k.T / _entailment.SIZE**0.5
        expected = {"soft": anymax.softmax, "sparse": anymax.sparsemax}.get(kind, anymax.entmax15)(scores.double())
    np.testing.assert_allclose(weights, expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_measure_counts_real_words_only(model):
    net = made(model, "sparse")
    pairs = [*PAIRS, *(p._replace(premise=p.premise[:6], hypothesis=p.hypothesis[:2]) for p in PAIRS[:5])]
    got = _entailment.measure(net, VOCABULARY, pairs)
    right = zeros = count = 0
    for one in pairs:
        scores, weights = net(VOCABULARY.rows([one.premise]), VOCABULARY.rows([one.hypothesis]))
        right += int(scores.argmax()) == one.label
        zeros += sum(int((p == 0).sum()) for p in weights)
        count += sum(p.numel() for p in weights)
    assert got.accuracy == pytest.approx(right / len(pairs))
    assert got.zeros == pytest.approx(zeros / count)
    assert np.isnan(_entailment.measure(made(model, "none"), VOCABULARY, PAIRS).zeros)


@pytest.mark.parametrize("model", MODELS)
def test_training_keeps_the_best_epoch_and_learns_alpha(model):
    """The held-out pairs have the labels that training contradicts, so that the best epoch is not the last."""
    held = [p._replace(label=(p.label + 1) % 3) for p in PAIRS]
    said = []
    net = _entailment.train(
        model, nli.kinds()["learned"], VOCABULARY, PAIRS * 4, held, epochs=5, seed=0, say=said.append
    )
    reached = [float(line.split(": ")[1].split(" %")[0]) for line in said]
    assert len(reached) == 5
    assert max(reached) > reached[-1]
    assert 100 * _entailment.measure(net, VOCABULARY, held).accuracy == pytest.approx(max(reached), abs=0.05)
    assert float(net.activation.mapping.alpha.detach()) != 1.5
