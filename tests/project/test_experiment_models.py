"""The models inside the experiments: each is held to something that shares no code with it."""

import gzip
import itertools
import json
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import anymax
from anymax import Entmax, Softmax, Sparsemax, SparseSoftmax
from experiments import _sentences, _transducer, conformal, length, longtail

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("one_thread")]


# -- sentences --------------------------------------------------------------------------------------------------------

SHAPE = _sentences.Shape(50, 24, 3, 4, 40, 16)


def sentences(rng, n=12, classes=4):
    tokens = [rng.integers(0, 50, size=rng.integers(2, 9)) for _ in range(n)]
    return _sentences.Sentences(tokens, np.arange(n) % classes)


def encoder(seed=0):
    torch.manual_seed(seed)
    out = _sentences.Encoder(SHAPE)
    for p in out.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return out.eval()


def test_the_encoder_is_bert():
    transformers = pytest.importorskip("transformers")
    names = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
        "max_position_embeddings",
    )  # fmt: skip
    theirs = transformers.BertModel(transformers.BertConfig(**{name: getattr(SHAPE, name) for name in names})).eval()
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.3)
    ours = _sentences.Encoder(SHAPE).eval()
    ours.load_state_dict(_sentences.renamed(theirs.state_dict()))
    tokens, lengths = _sentences.padded([np.arange(3, 10), np.arange(20, 23), np.arange(7, 12)])
    real = torch.arange(tokens.shape[1]) < lengths[:, None]
    with torch.no_grad():
        expected = theirs(input_ids=tokens, attention_mask=real.long()).last_hidden_state
        found = ours(tokens, lengths)
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-5)


def test_frozen_layers_are_read_once():
    """What the lower layers give, and the upper ones over it, are the whole encoder's."""
    rng, whole = np.random.default_rng(1), encoder()
    few = sentences(rng)
    model, read, _ = _sentences.start(whole, few, few, 4, 2, True, 0)
    model.eval()
    assert model.embeddings is None
    assert len(model.layers) == 2
    tokens, lengths = _sentences.padded(few.tokens)
    with torch.no_grad():
        vectors = whole(tokens, lengths)
        mean = torch.stack([v[:n].mean(0) for v, n in zip(vectors, lengths)])
        found = model(*_sentences.padded(read.tokens))
    torch.testing.assert_close(found, model.head(mean), rtol=1e-4, atol=1e-5)


def test_fine_tuning_leaves_the_encoder_alone():
    rng, whole = np.random.default_rng(2), encoder()
    before = {k: v.clone() for k, v in whole.state_dict().items()}
    few = sentences(rng)
    model, read, _ = _sentences.start(whole, few, few, 4, 1, True, 0)
    first = [p.clone() for p in model.parameters()]
    _sentences.fit(model, SparseSoftmax(k=2), read, _sentences.Recipe(1, 1e-2), 0)
    assert all(not torch.equal(a, b) for a, b in zip(first, model.parameters()))
    assert all(torch.equal(v, before[k]) for k, v in whole.state_dict().items())


def test_from_scratch_has_the_tokens_that_occur():
    rng = np.random.default_rng(3)
    train, test = sentences(rng, 8), sentences(rng, 5)
    model, a, b = _sentences.start(encoder(), train, test, 4, 2, False, 0)
    known = sorted({int(t) for one in (*train.tokens, *test.tokens) for t in one})
    assert model.embeddings.words.num_embeddings == len(known) < 50
    for ours, theirs in ((a, train), (b, test)):
        for new, old in zip(ours.tokens, theirs.tokens):
            assert [known[t] for t in new] == old.tolist()


def test_every_class_kept_is_softmax_and_one_is_not():
    rng = np.random.default_rng(4)
    few, ends, kept = sentences(rng), {}, {}
    for name, mapping in {"softmax": Softmax(), "all": SparseSoftmax(k=4), "one": SparseSoftmax(k=1)}.items():
        model, train, _ = _sentences.start(encoder(), few, few, 4, 1, False, 0)
        kept[name] = _sentences.fit(model, mapping, train, _sentences.Recipe(2, 1e-2, 4), 0)
        ends[name] = model.head.weight.detach()
    torch.testing.assert_close(ends["all"], ends["softmax"], rtol=1e-4, atol=1e-5)
    assert (ends["one"] - ends["softmax"]).abs().max() > 1e-3
    assert kept["softmax"] == kept["all"] == 1.0
    assert kept["one"] < 1.0


def test_which_sentences_are_right():
    rng = np.random.default_rng(5)
    some = sentences(rng, 30, 3)
    model, train, _ = _sentences.start(encoder(), some, some, 3, 1, False, 0)
    _sentences.fit(model, Softmax(), train, _sentences.Recipe(1, 1e-2), 0)
    model.train()  # asking ends it
    found = _sentences.right(model, train)
    right = [
        int(model(torch.as_tensor(t)[None], torch.tensor([len(t)])).argmax()) == c
        for t, c in zip(train.tokens, train.classes)
    ]
    assert found.tolist() == right
    assert found.any()


def test_readers_of_sentences(tmp_path):
    def tokens(texts):
        return [np.asarray([len(word) for word in text.split()]) for text in texts]

    for name, rows in (("train", 'a b c,second\n"one, two",first\n'), ("test", "x yy,first\n")):
        with gzip.open(tmp_path / f"{name}.csv.gz", "wt", encoding="utf-8") as file:
            file.write("text,category\n" + rows)
    task = _sentences.banking(tmp_path / "train.csv.gz", tmp_path / "test.csv.gz", tokens)
    assert task.classes == 2
    assert task.train.classes.tolist() == [1, 0]
    assert task.test.classes.tolist() == [0]
    assert task.train.tokens[1].tolist() == [4, 3]
    with gzip.open(tmp_path / "clinc.json.gz", "wt", encoding="utf-8") as file:
        json.dump({"train": [["a b", "z"], ["c", "y"]], "test": [["d", "z"]], "oos_test": [["e", "oos"]]}, file)
    task = _sentences.clinc(tmp_path / "clinc.json.gz", tokens)
    assert (task.train.classes.tolist(), task.test.classes.tolist(), len(task.test)) == ([1, 0], [1], 1)


# -- strings ----------------------------------------------------------------------------------------------------------


def transducer(attending, writing, seed, sharp=1.0):
    """With weights at random: three symbols that it can write, and the end."""
    torch.manual_seed(seed)
    source, target = _transducer.Alphabet(["xyz"]), _transducer.Alphabet(["abc"])
    model = _transducer.Transducer(len(source), len(target), _transducer.Size(6, 8, 0.0), attending, writing)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.7)
    torch.nn.init.normal_(model.out.weight, std=sharp)
    with torch.no_grad():
        model.out.bias[_transducer.END - _transducer.FIRST] = 3.0  # strings end
    return _transducer.Trained(model.eval(), source, target)


def every(trained, source, longest):
    """{string: probability} of all strings of at most `longest` symbols, one at a time, whole, without a beam."""
    read, lengths = _transducer.padded([trained.source.encode(source)])
    out = {}
    with torch.no_grad():
        vectors, state = trained.model.read(read, lengths)
        for n in range(longest + 1):
            for string in itertools.product("abc", repeat=n):
                symbols = trained.target.encode(string)
                scores, _, _ = trained.model.write(
                    torch.tensor([[_transducer.START, *symbols]]), state, vectors, lengths
                )
                p = anymax.apply(trained.model.writing, scores.double())[0]
                steps = [float(row[s - _transducer.FIRST]) for row, s in zip(p, [*symbols, _transducer.END])]
                out[string] = math.prod(steps)
    return out


@pytest.mark.parametrize("writing", [Softmax(), Entmax(1.5), Sparsemax()], ids=lambda m: m.name)
def test_search_against_all_strings(writing):
    longest, listed, proven = 3, 0, 0
    for seed, source in itertools.product(range(6), ("xyz", "y")):
        trained = transducer(Entmax(1.5), writing, seed, sharp=1.5)
        truth = every(trained, source, longest)
        pairs = _transducer.Pairs([tuple(source), tuple("zz")], [(), ()])
        whole = _transducer.search(trained, pairs, 3**longest, longest)[0]
        best = max(truth, key=truth.get)
        assert whole.best == best  # a beam that holds everything
        assert math.exp(whole.log_p) == pytest.approx(truth[best], rel=1e-4)
        assert whole.mass == pytest.approx(sum(truth.values()), rel=1e-4)
        for beam in (1, 3):
            found = _transducer.search(trained, pairs, beam, longest)[0]
            assert math.exp(found.log_p) == pytest.approx(truth.get(found.best, 0.0), rel=1e-4, abs=1e-12)
            assert found.mass <= 1 + 1e-5
            if found.proven:
                assert found.best == best
                proven += 1
            if found.exhausted:
                assert found.proven
                assert found.mass == pytest.approx(1.0, abs=1e-4)
                assert found.finished == sum(p > 0 for p in truth.values())
                listed += 1
    assert proven > 3
    assert (listed > 0) is (writing.name != "softmax")


def test_zeros_are_counted():
    trained = transducer(Sparsemax(), Sparsemax(), 1, sharp=3.0)
    pairs = _transducer.Pairs([tuple("xyz"), tuple("y")], [tuple("ab"), tuple("c")])
    found = _transducer.zeros(trained, pairs)
    rows = []
    for source, target in zip(pairs.sources, pairs.targets):
        read, lengths = _transducer.padded([trained.source.encode(source)])
        given = torch.tensor([[_transducer.START, *trained.target.encode(target)]])
        with torch.no_grad():
            vectors, state = trained.model.read(read, lengths)
            scores, _, weights = trained.model.write(given, state, vectors, lengths)
        rows += [(anymax.sparsemax(s), w) for s, w in zip(scores[0], weights[0])]
    assert len(rows) == 5
    assert found.output == pytest.approx(np.mean([float((p == 0).double().mean()) for p, _ in rows]))
    assert found.symbols == pytest.approx(np.mean([int((p > 0).sum()) for p, _ in rows]))
    assert found.attention == pytest.approx(np.mean([float((w == 0).double().mean()) for _, w in rows]))
    assert found.places == pytest.approx(np.mean([int((w > 0).sum()) for _, w in rows]))
    assert found.output > 0
    dense = _transducer.zeros(transducer(Softmax(), Softmax(), 1), pairs)
    assert (dense.output, dense.symbols, dense.attention) == (0.0, 4.0, 0.0)


def test_training_learns_to_copy():
    rng = np.random.default_rng(0)
    words = [tuple(rng.choice(list("abcd"), size=rng.integers(1, 4))) for _ in range(150)]
    pairs = _transducer.Pairs(words, words)
    language = _transducer.Language(pairs.take(range(100)), pairs.take(range(100, 125)), pairs.take(range(125, 150)))
    size, recipe = _transducer.Size(16, 32, 0.0), _transducer.Recipe(12, 2e-2, 16)
    trained = _transducer.train(language, Entmax(1.5), Entmax(1.5), size, recipe, 0)
    found = _transducer.search(trained, language.test, 5)
    assert _transducer.word_accuracy([one.best for one in found], language.test) > 0.7
    again = _transducer.train(language, Entmax(1.5), Entmax(1.5), size, recipe, 0)
    assert all(torch.equal(a, b) for a, b in zip(trained.model.parameters(), again.model.parameters()))
    written, weights = _transducer.weights_of(trained, words[0])
    assert written[-1] == "</s>"
    assert weights.shape == (len(written), len(words[0]))
    np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-5)


def test_distance_is_the_fewest_edits():
    def slow(a, b):
        if not a or not b:
            return len(a) + len(b)
        return min(slow(a[1:], b) + 1, slow(a, b[1:]) + 1, slow(a[1:], b[1:]) + (a[0] != b[0]))

    rng = np.random.default_rng(0)
    for _ in range(60):
        a, b = ("".join(rng.choice(list("ab"), size=rng.integers(0, 6))) for _ in range(2))
        assert _transducer.distance(a, b) == slow(a, b)
    pairs = _transducer.Pairs([("x",), ("y",)], [("a", "b"), ("c",)])
    assert _transducer.symbol_errors([("a",), ("c", "d")], pairs) == pytest.approx(2 / 3)
    assert _transducer.word_accuracy([("a", "b"), ("d",)], pairs) == 0.5


def test_readers_of_strings(tmp_path):
    for name, text in (("g2p", "adja\tɒ ɟː ɒ\n"), ("inflection", "ver\tvi\tV;PST;1\n")):
        with gzip.open(tmp_path / f"{name}.gz", "wt", encoding="utf-8") as file:
            file.write(text)
    sounds = _transducer.pronunciations(tmp_path / "g2p.gz")
    assert (sounds.sources, sounds.targets) == ([tuple("adja")], [("ɒ", "ɟː", "ɒ")])
    forms = _transducer.inflections(tmp_path / "inflection.gz")
    assert (forms.sources, forms.targets) == ([("V", "PST", "1", "v", "e", "r")], [("v", "i")])


# -- associative recall -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "queries"), [(32, 8), (64, 8), (1024, 32), (4096, 32)])
def test_a_query_asks_for_a_pair_of_the_context(tokens, queries):
    found, values = length.recall(np.random.default_rng(0), 3, tokens, queries)
    assert found.shape == (3, tokens)
    assert values.shape == (3, queries)
    places = set()
    for row, answers in zip(found.tolist(), values.tolist()):
        context, end = row[: tokens - 3 * queries], row[tokens - 3 * queries :]
        at = [i for i, t in enumerate(context) if length.FIRST_KEY <= t < length.FIRST_VALUE]
        known = {context[i]: context[i + 1] for i in at}
        assert len(known) == len(at) == min(int(0.8 * len(context)) // 3, length.KEYS)
        assert all(t >= length.FIRST_VALUE for t in known.values())
        assert all(context[i + 2] == length.SPACE for i in at)
        assert len(context) - 2 * len(at) == context.count(length.SPACE)
        asked = [end[3 * i : 3 * i + 3] for i in range(queries)]
        assert asked == [[length.ASK, k, known[k]] for _, k, _ in asked]
        assert answers == [v - length.FIRST_VALUE for _, _, v in asked]
        places.add(tuple(at))
    assert len(places) > 1 or tokens == 32


def plainly(model, name, code, tokens, queries):
    """The network position by position: whole matrices, rotations as complex numbers, scales on the queries."""
    x = model.embedding.weight[tokens]
    n, heads = tokens.shape[1], 4
    far = torch.arange(n)[:, None] - torch.arange(n)
    for layer in model.layers:
        h = layer.before(x)
        parts = [h @ w.T for w in (layer.query.weight, *layer.key_value.weight.split(64))]
        out = []
        for head in range(heads):
            q, k, v = (a[..., 16 * head : 16 * head + 16] for a in parts)
            if code == "RoPE":
                turn = torch.polar(torch.ones(n, 8), torch.arange(n)[:, None] * 10_000.0 ** (-torch.arange(8) / 8))
                q, k = (torch.complex(*a.split(8, -1)) * turn for a in (q, k))
                scores = (q @ k.conj().mT).real / 4.0
            else:
                scores = q @ k.mT / 4.0
            local = code == "NAPE" and head < 2
            if local:
                scores = scores - far / (head + 1)
            else:
                place = head - 2 * (code == "NAPE")
                grown = torch.log(torch.arange(1, n + 1.0))[:, None]
                if name == "scalable softmax":
                    scores = scores * layer.beta[place] * grown
                elif name.startswith("adaptive"):
                    raw = layer.adaptive.projection(h)
                    beta = torch.nn.functional.softplus(raw[..., place, None])
                    gamma = 2.0 * torch.tanh(raw[..., raw.shape[-1] // 2 + place, None])
                    scores = scores * (1.0 + beta * grown**gamma)
            scores = torch.where(far >= 0, scores, -torch.inf)
            # one key
            scores = torch.where(torch.arange(n)[:, None] == 0, torch.where(far == 0, 0.0, -torch.inf), scores)
            p = anymax.entmax15(scores) if name.endswith("entmax") else torch.softmax(scores, -1)
            out.append(p @ v)
        x = x + torch.cat(out, -1) @ layer.out.weight.T
        x = x + layer.narrow(torch.relu(layer.wide(layer.between(x))))
    return model.values(model.norm(x))[:, tokens.shape[1] - 3 * queries + 1 :: 3]


@pytest.mark.parametrize("code", length.CODES)
@pytest.mark.parametrize("name", length.MAPS)
def test_the_network_answers_as_when_written_out(name, code):
    torch.manual_seed(3)
    model = length.network(name, code)
    with torch.no_grad():
        for layer in model.layers:
            if layer.beta is not None:
                layer.beta.uniform_(0.2, 0.6)
        tokens = torch.from_numpy(length.recall(np.random.default_rng(1), 2, 48, 5)[0])
        got = model(tokens, 5)
        assert got.shape == (2, 5, length.VALUES)
        torch.testing.assert_close(got, plainly(model, name, code, tokens, 5), rtol=1e-4, atol=1e-5)


# -- conformal sets and a long tail -----------------------------------------------------------------------------------


def test_coverage_of_fifths_and_classes():
    confidence = np.array([0.9, 0.2, 0.8, 0.3, 0.7, 0.6, 0.5, 0.4, 0.95, 0.1])
    held = np.array([1, 0, 1, 1, 1, 1, 1, 1, 1, 1], bool)
    found = conformal.conditional(held, confidence, np.array([0, 0, 1, 1, 2, 2, 2, 5, 5, 5]), 0.9)
    assert found["unsure"] == 50.0  # of confidence .1 and .2
    assert found["sure"] == 100.0
    assert found["gap"] == pytest.approx((40 + 10 + 10 + 10) / 4)  # classes that no row has don't count


def test_a_prior_of_the_map_is_a_number_times_log_p():
    x = np.random.default_rng(0).normal(size=(1300, 5)).astype(np.float32)
    y = np.arange(1300) % 4
    task = longtail.long_tail((x, y), (x, y), 300, 2, 0)
    plan = {"hidden": 3, "epochs": 2, "batch": 16}
    z = np.zeros((2, 4))
    for way in ("after", "prior"):
        of_map, number = (longtail.Arm("entmax15", way, strength) for strength in ("entmax15", 0.5))  # 4 ** -0.5
        one, other = (longtail.trained(arm, task, 1e-2, arm.fixed, plan, 0)(x) for arm in (of_map, number))
        assert one == pytest.approx(other, abs=1e-6)
        moved = longtail.predicted(of_map, z, task, "entmax15")
        assert moved == pytest.approx(longtail.predicted(number, z, task, 0.5), abs=1e-12)
        assert moved == pytest.approx(np.broadcast_to(-0.5 * task.log_p if way == "after" else 0.0, (2, 4)), abs=1e-12)
