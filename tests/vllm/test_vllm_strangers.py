"""What strangers send to `anymax.vllm`: every made-up request is refused when it is read, or runs alone and beside any others."""

import contextlib
import math
import random
import re
import time

import pytest

torch = pytest.importorskip("torch")

import vllm_stand_in as stand_in

from anymax import Entmax, compose
from anymax._core import names
from anymax.vllm import batch, processor, spec

PROCESSOR = processor.over((stand_in.ForV2, stand_in.ForV1))
N = 7  # classes

# words and JSON values that a parameter may get
NUMBERS = (
    "0 1 2 3 0.5 0.9 1.5 -1 -0 -0.0 1e-45 1e-320 1e-38 1e-30 1e30 1e38 1e39 1e308 1e400 nan inf -inf Infinity NaN 7 8 9 63 64 1000 "
    "1000000 2147483647 2147483648 4294967296 9223372036854775807 9223372036854775808 -9223372036854775808 1_0 ١ 0x10 1e 1. .5 +3 "
    "true false True None l1 all output prompt gumbel normal standard x"
).split() + ["1" + "0" * 30, "1" + "0" * 400, "0." + "0" * 400 + "1", "", " 2 ", "9" * 5000]
VALUES = [
    0, 1, 2, 3, -1, 0.5, 0.9, 1.5, 1e-320, 1e-45, 1e30, 1e39, 1e308, math.nan, math.inf, -math.inf, 10**30, 10**400, 2**31, 2**63, -(2**70),
    True, False, None, "l1", "all", "output", "gumbel", "x", "1", [], [1], [0.5, 2], [[1]], {}, {"a": 1}, {"7": 1}, {"0": -1.0},
]  # fmt: skip
CLASSES = ["0", "1", "6", "7", "-1", "99999999999999999999", "1, 2", "1,,2", "x", "", "3,3", "6,7", "1" * 400, "²"]
MAPS = [*names.names(), "entmax15", "ratio", "Entmax", "sparse-max", "no map"]
FIELDS = "alpha k p order noise scale nodes mapping score upper tau strength shape u".split()


def made_up(choose):
    """The specs of one request, as a string, a list, or dicts."""
    parts = [one(choose) for _ in range(choose.choice((1, 1, 1, 2, 3)))]
    if choose.random() < 0.1:
        parts = parts * choose.choice((2, 5, 40))
    if choose.random() < 0.3 and all(isinstance(part, str) for part in parts):
        return ";".join(parts)
    return (
        parts
        if choose.random() < 0.97
        else choose.choice((parts[0], None, 5, [parts], "x" * 2000, {"name": 3}, "sink:mapping=" * 330))
    )


def one(choose):
    if choose.random() < 0.65:
        name = choose.choice(list(spec.MAKERS))
        takes = list(spec.parameters_of(name))
    else:
        name = choose.choice(MAPS)
        takes = list(names.fields(name)) if name in names.names() else FIELDS
    keys = [key for key in takes if choose.random() < 0.7] or takes[:1]
    keys += choose.sample(FIELDS, 1) if choose.random() < 0.05 else []
    if choose.random() < 0.6:
        if choose.random() < 0.03:
            keys = keys * 2
        return name + ":" * bool(keys) + ",".join(f"{key}={word(choose, key)}" for key in keys)
    return {"name": name, **{key: value(choose, key) for key in keys}}


def word(choose, key):
    if key == "mapping":
        return choose.choice(
            (*MAPS, "budget:k=2", "budget:k=9", "sink:mapping=sink", "entmax:alpha=1.3", "elementwise:mapping=sigmoid")
        )
    return choose.choice(NUMBERS[:8] if choose.random() < 0.5 else NUMBERS)


def value(choose, key):
    if key in ("bias", "sequence_breakers") and choose.random() < 0.9:
        if key == "sequence_breakers":
            return [
                choose.choice([0, 1, 6, 7, -1, 10**30, "1", 2.0, True]) if choose.random() < 0.3 else 1
                for _ in range(3)
            ]
        keys = choose.sample(CLASSES, choose.randrange(4)) if choose.random() < 0.4 else choose.sample(CLASSES[:3], 2)
        return {k: choose.choice(VALUES) if choose.random() < 0.4 else -1.5 for k in keys}
    return word(choose, key) if key == "mapping" else choose.choice(VALUES[:8] if choose.random() < 0.6 else VALUES)


@pytest.fixture
def knowing(monkeypatch):
    """The processor in a process that knows the vocabulary."""
    monkeypatch.setattr(PROCESSOR, "vocabulary", N)
    return PROCESSOR


def params(given, seed=None):
    return stand_in.SamplingParams(seed=seed, extra_args={"anymax": given})


def served(given, rows=None, seeds=None):
    """The rows after these requests, one each, and the processor."""
    ours = PROCESSOR(None, "cpu", False)
    seeds = range(len(given)) if seeds is None else seeds
    added = [
        (i, params(each, seed), [1, 2, 1, 2], [3, 1, 2])
        for i, (each, seed) in enumerate(zip(given, seeds, strict=True))
    ]
    ours.update_state(stand_in.BatchUpdate(len(given), [], added, []))
    return ours.apply(ROW.repeat(len(given), 1) if rows is None else rows), ours


ROW = torch.linspace(-2.0, 3.0, N)


@pytest.mark.whole(lambda part: part > 0)
@pytest.mark.parametrize("part", range(5))
def test_a_made_up_request_is_refused_or_runs_alone_and_beside_others(part, knowing, caplog):
    choose, taken = random.Random(part), []
    for _ in range(2000):
        given = made_up(choose)
        with contextlib.suppress(ValueError):
            knowing.validate_params(params(given))
            taken.append(given)
    assert len(taken) > 200
    alone = [served([given], seeds=[i % 40])[0][0] for i, given in enumerate(taken)]
    for start in range(0, len(taken), 40):
        together, _ = served(taken[start : start + 40])
        for i, row in enumerate(together, start):
            torch.testing.assert_close(
                row, alone[i], atol=1e-5, rtol=1e-4, equal_nan=True, msg=lambda m, i=i: f"{taken[i]}: {m}"
            )
    assert not caplog.records, caplog.text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("budget:k=1000000", "k must be at most the number of classes"),
        ("sink:mapping=budget:k=5000", "k must be at most the number of classes"),
        ("entmax:alpha=1" + "0" * 400, "alpha must be above 0 and finite"),
        ("topk:k=1" + "0" * 30, "k must be an integer"),
        ([{"name": "logit_bias", "bias": {"7": 1}}], "class 7 is out of range for 7 classes"),
        ([{"name": "logit_bias", "bias": {"-1": 1}}], "integers from 0 to 2147483647"),
        ([{"name": "sequence_bias", "bias": {"1, 9": 1}}], "class 9 is out of range"),
        ([{"name": "dry", "sequence_breakers": [1, 10**30]}], "integers from 0"),
        ([{"name": "logit_bias", "bias": {"7": 1, " 7": 2}}], "a class is given twice"),
        ([{"name": "logit_bias", "bias": {str(c): 1 for c in range(2000)}}], "at most 1000 values, got 2000"),
        ([{"name": "sequence_bias", "bias": {f"{c}" + ",1" * 400: 1 for c in range(5)}}], "at most 1000 classes"),
        ([{"name": "logit_bias", "bias": {"1": [[[1]]]}}], "or a list or dict of these, got a value of the type list"),
        ([{"name": "entmax", "alpha": {1: set()}}], "got a value of the type set"),
        ("topp:p=.9,p=.8", "p is given twice"),
        ("entmax:alpha=1.3,alpha=1.4", "alpha is given twice"),
        ("perturb_max:nodes=1000000", "from 8 to 10000"),
        ("sink:mapping=perturb_max:nodes=5000", "at most 256 nodes, got 5000"),
        ("sink:mapping=" * 330, "at most 1000 characters"),
        ("sink:mapping=" * 70, "at most 4 maps stand in each other"),
        ("a" * 40_000, "at most 1000 characters, got 40000"),
        ("_" * 900 + "!", "a map's name has at most 64 characters"),
        (["temperature:T=1"] * 33, "at most 32"),
        ("temperature:T=1;" * 40_000, "at most 32"),
        ({"name": "a" * 40_000}, "at most 1000 characters"),
        ({"name": "topk", "k" * 40_000: 1}, "topk has no parameter 'kkkk"),
    ],
    ids=lambda v: str(v)[:24],
)  # fmt: skip
def test_what_would_end_or_slow_the_engine_is_refused(given, words, knowing):
    started = time.perf_counter()
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        knowing.validate_params(params(given))
    assert time.perf_counter() - started < 1.0
    assert len(str(error.value)) < 4000


@pytest.mark.parametrize(
    "given", ["temperature:T=1" + "0" * 30, "topp:p=1e-320", "typical:mass=1e-320", "topk:k=4000000000"]
)
def test_a_number_beyond_the_dtype_of_the_scores_runs_beside_another(given, knowing, caplog):
    name = given.partition("=")[0]
    knowing.validate_params(params(given))
    alone, (row, _) = served([given])[0][0], served([given, f"{name}={1 if 'k' in name else 0.5}"])[0]
    assert torch.equal(row, alone)
    assert not row.isnan().any()
    assert (row > -math.inf).any()
    assert not caplog.records


def test_a_request_beyond_the_vocabulary_leaves_its_rows_and_says_so_once(caplog):
    """Where the process that reads requests does not know the vocabulary, the engine finds out."""
    PROCESSOR.validate_params(params("budget:k=5000"))
    given = ["entmax15", "budget:k=5000", [{"name": "logit_bias", "bias": {"9": 1}}], "entmax15"]
    rows, ours = served(given)
    assert torch.equal(rows[1], ROW)
    assert torch.equal(rows[2], ROW)
    want = served(["entmax15"])[0][0]
    assert torch.equal(rows[0], want)
    assert torch.equal(rows[3], want)
    ours.apply(rows)
    said = [record.getMessage() for record in caplog.records]
    assert [record.name for record in caplog.records] == ["vllm.anymax"] * 2
    assert "Budget(k=5000" in said[0]
    assert "class 9 is out of range for 7 classes" in said[1]
    assert all("its logits stay as they are" in words for words in said)


@pytest.mark.parametrize("alone_too", [True, False])
def test_an_error_of_one_request_never_hurts_another_of_its_group(alone_too, monkeypatch, caplog):
    own, failing = batch._scores, torch.full((N,), 5.0)

    def fails(x, *rest):
        if (x == failing).all(-1).any() and (alone_too or len(x) > 1):
            raise RuntimeError("not today")
        return own(x, *rest)

    monkeypatch.setattr(batch, "_scores", fails)
    rows = torch.stack([ROW, failing, ROW])
    got, ours = served(["entmax15"] * 3, rows.clone())
    want = own(ROW[None], compose(), Entmax(1.5))[0]
    assert torch.equal(got[0], want)
    assert torch.equal(got[2], want)
    assert torch.equal(got[1], failing) == alone_too
    assert len(caplog.records) == alone_too
    ours.apply(rows)
    assert len(caplog.records) == alone_too


def test_a_request_that_nobody_has_validated_asks_for_nothing(caplog):
    rows, _ = served(["no map", "entmax15"])
    assert torch.equal(rows[0], ROW)
    assert not torch.equal(rows[1], ROW)
    assert "no transform has this name" in caplog.text


def test_an_engine_says_the_vocabulary_to_its_process():
    class Config:
        class model_config:
            get_vocab_size = staticmethod(lambda: 11)

    kind = processor.over((stand_in.ForV2, stand_in.ForV1))
    assert kind.vocabulary is None
    kind(Config, "cpu", False)
    with pytest.raises(ValueError, match="class 11 is out of range for 11 classes"):
        kind.validate_params(params([{"name": "logit_bias", "bias": {"11": 1}}]))
    kind(None, stand_in.LogitsProcRequestState(None, 1, 12, None, None, None, None))
    kind.validate_params(params([{"name": "logit_bias", "bias": {"11": 1}}]))
