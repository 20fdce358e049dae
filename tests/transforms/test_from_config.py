"""`from_config`: configs of transformers and vLLM, rows with their own, off values, and what is left. llama.cpp is in test_llama_cpp.py."""

import contextlib
import dataclasses
import enum
import math

import numpy as np
import pytest
from kinds import KINDS, back, every_kind, jax_in_the_whole_battery
from refusals import refuses

import anymax as am
from anymax.transforms import compose, from_config, logit_bias, repetition_penalty, sequence_bias

INF = math.inf
RNG = np.random.default_rng(0)
X = RNG.normal(0, 3, (6, 50))
TOKENS = RNG.integers(0, 20, (6, 12))
OUTPUT = [[1, 2, 3], [4], [], [2, 2, 2, 5], [7, 8], [3, 2]]


class Kind(enum.Enum):
    CUMULATIVE = 0
    DELTA = 1


@dataclasses.dataclass
class SamplingParams:
    """The fields of vLLM's class that matter here, with its defaults."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list | None = dataclasses.field(default_factory=list)
    stop_token_ids: list | None = dataclasses.field(default_factory=list)
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    detokenize: bool = True
    output_kind: Kind = Kind.CUMULATIVE
    logit_bias: dict | None = None
    allowed_token_ids: list | None = None
    bad_words: list | None = dataclasses.field(default_factory=list)
    _bad_words_token_ids: list | None = None
    _all_stop_token_ids: set = dataclasses.field(default_factory=set)
    structured_outputs: object = None


def same(got, want, rtol=1e-12):
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol)


# -- off ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "fields"),
    [
        ("vllm", {}),
        ("vllm", {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0, "repetition_penalty": 1.0, "logit_bias": {}}),
        ("vllm", {"top_k": -1, "top_p": 1, "min_p": None, "bad_words": [], "min_tokens": 0}),
        ("transformers", {"do_sample": True, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0}),
        ("transformers", {"do_sample": True, "top_k": 0, "eta_cutoff": 1.0, "repetition_penalty": 1.0, "guidance_scale": 1.0}),
        ("llama.cpp", {"samplers": ""}),
        ("llama.cpp", {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temp": 1.0}),
        ("llama.cpp", {"top_k": -1, "top_p": 2.0, "min_p": -1.0, "temp": 1.0, "top_n_sigma": 0.0, "typ_p": 1.0, "xtc_threshold": 0.6}),
        ("llama.cpp", {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temp": 1.0, "penalty_repeat": 2.0, "penalty_last_n": 0}),
        ("llama.cpp", {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temp": 1.0, "dry_multiplier": 1.0, "dry_base": 0.5}),
    ],
)  # fmt: skip
def test_off_values(order, fields):
    made = from_config(fields, order=order)
    assert made.transforms == ()
    assert made.left == {}


def test_the_defaults_are_those_of_the_system():
    assert from_config({}) == compose()
    assert from_config({}, order="transformers") == compose(am.topk(1))  # greedy
    assert from_config({"do_sample": True}, order="transformers") == compose(am.topk(50))
    want = compose(am.topk(40), am.topp(0.95), am.minp(0.05), am.temperature(0.8))
    assert from_config({}, order="llama.cpp") == want


# -- transformers ------------------------------------------------------------------------------------------------------------------

CONFIGS = {
    "greedy": {"repetition_penalty": 1.3},
    "sampled": {"do_sample": True},
    "all": {
        "do_sample": True, "repetition_penalty": 1.2, "temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.9,
        "epsilon_cutoff": 3e-3, "eta_cutoff": 2e-2, "sequence_bias": [[[3], 1.5], [[4, 5], -2.0]],
    },
    "top-H": {"do_sample": True, "top_h": 0.6, "top_k": 0},
    "top-H of few": {"do_sample": True, "top_h": 0.05, "top_p": 0.9, "temperature": 0.5},
    "words": {"do_sample": True, "bad_words_ids": [[3], [2], [8, 9], [11, 5, 7]], "top_k": 0},
    "beams": {"do_sample": True, "num_beams": 3, "top_k": 1, "top_p": 0.1},
    "nothing but the first": {"do_sample": True, "top_p": 0.0},
    "ends": {"do_sample": True, "min_length": 30, "suppress_tokens": [5, 6], "top_k": 0},
    "new": {"do_sample": True, "min_new_tokens": 2, "top_k": 0, "temperature": 0.3},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers(name):
    """What `generate` does, in the order in which it does it."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.GenerationConfig(**CONFIGS[name], eos_token_id=2, pad_token_id=0)
    config._eos_token_tensor = torch.tensor([2])
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=200, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
            )
        )
    draw = torch.Generator().manual_seed(0)
    x, tokens = 2 * torch.randn(50, 200, generator=draw), torch.randint(12, (50, 20), generator=draw)
    tokens[:9, -2:] = torch.tensor([11, 5])
    tokens[9:15, -1] = 8
    x = x.double()
    filled = transformers.GenerationConfig(
        **{**transformers.GenerationConfig._get_default_generation_params(), **config.to_diff_dict()}
    )
    filled._eos_token_tensor = config._eos_token_tensor
    theirs = model._get_logits_processor(filled, input_ids_seq_length=19, device="cpu")(tokens, x.clone())
    made = from_config(config, tokens=tokens, output=tokens[:, 19:], leave=("num_beams",))
    got = made(x)
    if not config.do_sample:
        assert torch.equal(got.argmax(-1), theirs.argmax(-1))
        assert bool(((got > -INF).sum(-1) == 1).all())
        return
    assert torch.equal(torch.isneginf(got), torch.isneginf(theirs))
    torch.testing.assert_close(got, theirs)
    assert made.left == {"eos_token_id": "it ends the text", "pad_token_id": made.left["pad_token_id"]} | (
        {"num_beams": "it is left to others"} if "num_beams" in CONFIGS[name] else {}
    )


def test_rows_of_transformers():
    """Rows with levels of their own are as rows alone, more than 100 classes left where `top_h` is off."""
    jobs = [
        {}, {"do_sample": True, "top_h": 0.5}, {"do_sample": True, "top_k": 0}, {"do_sample": True, "epsilon_cutoff": 0.01, "min_p": 0.1},
        {"do_sample": True, "eta_cutoff": 0.05, "typical_p": 0.8, "top_k": 0},
        {"do_sample": True, "bad_words_ids": [[7], [3, 2]], "top_k": 0},
    ]  # fmt: skip
    x, tokens = np.random.default_rng(2).normal(0, 2, (6, 300)), TOKENS.copy()
    tokens[5, -1] = 3
    got = from_config(jobs, order="transformers", tokens=tokens)(x)
    for row, job, y, t in zip(got, jobs, x, tokens):
        same(row, from_config(job, order="transformers", tokens=t)(y))
    assert (got > -INF).sum(-1)[[0, 2, 5]].tolist() == [1, 300, 298]


def test_without_do_sample_the_levels_are_left():
    made = from_config({"temperature": 0.5, "top_p": 0.9, "top_k": 5}, order="transformers")
    assert made == compose(am.topk(1))
    assert made.left == dict.fromkeys(["temperature", "top_k", "top_p"], "without do_sample, generate does not use it")


# -- vLLM --------------------------------------------------------------------------------------------------------------------------


def vllm_row(x, c, tokens, output):
    """One row as in v1/sample/sampler.py; a greedy one has its argmax alone."""
    x, n = x.copy(), len(x)
    if c.allowed_token_ids:
        x[[i for i in range(n) if i not in c.allowed_token_ids]] = -INF
    for word in c._bad_words_token_ids or ():
        if len(word) <= len(output) + 1 and list(output[len(output) - len(word) + 1 :]) == word[:-1]:
            x[word[-1]] = -INF
    if len(output) < c.min_tokens:
        x[sorted({*c.stop_token_ids, *c._all_stop_token_ids})] = -INF
    for i, b in (c.logit_bias or {}).items():
        x[i] += b
    for i in set(tokens):
        x[i] = x[i] / c.repetition_penalty if x[i] > 0 else x[i] * c.repetition_penalty
    for i in set(output):
        x[i] -= c.frequency_penalty * list(output).count(i) + c.presence_penalty
    if c.temperature == 0:  # SamplingParams lifts others to 0.01 before it asks which are greedy
        out = np.full(n, -INF)
        out[np.argmax(x)] = x.max()
        return out
    x = x / max(c.temperature, 0.01)
    p = np.exp(x - x.max())
    x[p < c.min_p] = -INF
    order = np.argsort(-x, kind="stable")
    if c.top_k > 0:
        x[order[c.top_k :]] = -INF
    p = np.exp(x - x.max())
    before = np.cumsum(p[order]) - p[order]
    x[order[before >= c.top_p * p.sum()]] = -INF if c.top_p < 1 else x[order[before >= c.top_p * p.sum()]]
    return x


REQUESTS = [
    SamplingParams(temperature=0.0, top_p=1.0, logit_bias={3: 2.0}),
    SamplingParams(temperature=0.5, top_k=7, top_p=0.9, repetition_penalty=1.4, seed=3),
    SamplingParams(
        min_p=0.05, temperature=1.7, allowed_token_ids=[1, 2, 3, 40, 41, 42], min_tokens=1, stop_token_ids=[40]
    ),
    SamplingParams(
        top_k=-1, top_p=0.5, presence_penalty=0.6, _bad_words_token_ids=[[9], [2, 5, 6], [1, 1]], bad_words=["a"]
    ),
    SamplingParams(frequency_penalty=0.5, logit_bias={3: -1.0, 4: 1.0}, _all_stop_token_ids={5, 6}, min_tokens=4),
    SamplingParams(
        top_k=1000,
        min_p=1.0,
        temperature=0.001,
        _bad_words_token_ids=[[3, 2, 8]],
        bad_words=["b"],
        min_tokens=2,
        stop_token_ids=[int(X[5].argmax())],
    ),
]


@jax_in_the_whole_battery
@every_kind
def test_a_batch_of_vllm(kind):
    """Rows with k, p, min-p, temperature, penalties, biases and bans of their own, one of them greedy."""
    tokens = [[*t.tolist(), *o] for t, o in zip(TOKENS, OUTPUT)]
    want = np.stack([vllm_row(*row) for row in zip(X, REQUESTS, tokens, OUTPUT)])
    made = from_config(REQUESTS, tokens=tokens, output=OUTPUT)
    tolerance = 1e-5 if kind == "jax" else 1e-12  # fp32
    same(back(made(KINDS[kind](X))).astype(np.float64), want, tolerance)
    assert made.left == {"seed": "give generator= to the sampler", "stop_token_ids": "it ends the text"}
    # each row is a program of its own there
    for x, c, t, o, row in zip(X, REQUESTS, tokens, OUTPUT, want) if kind != "jax" else ():
        same(back(from_config(c, tokens=t, output=o)(KINDS[kind](x))).astype(np.float64), row, tolerance)


LEVELS = [
    {"temperature": 0}, {"temperature": 0.5, "top_k": 3, "top_p": 0.9}, {"min_p": 0.2, "temperature": 2.0}, {"top_k": -1, "top_p": 0.5},
    {"top_k": 0}, {"top_k": 1000, "min_p": 0.01, "top_p": 0.99},
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("engine", [None, "reference"])
def test_a_batch_in_torch(dtype, engine):
    torch = pytest.importorskip("torch")
    x, made = torch.tensor(X).to(getattr(torch, dtype)), from_config(LEVELS)
    with am.use(engine) if engine else contextlib.nullcontext():
        want = torch.stack([from_config(c)(row) for c, row in zip(LEVELS, x)])
        assert torch.equal(made(x), want)
        seeds = [5, 6, 7, 8, 9, 10]
        each = [
            int(am.sample("softmax", row, transform=from_config(c), generator=s)) for row, c, s in zip(x, LEVELS, seeds)
        ]
        drawn = am.sample("softmax", x, transform=made, generator=seeds, return_log_prob=True)
        assert drawn.index.tolist() == each
        assert drawn.log_prob[0] == 0


@pytest.mark.whole
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_batch_compiles(dtype):
    torch = pytest.importorskip("torch")
    x, made = torch.tensor(X).to(getattr(torch, dtype)), from_config(LEVELS)
    torch.testing.assert_close(torch.compile(made, fullgraph=True, backend="aot_eager")(x), made(x))


@pytest.mark.whole
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_batch_under_jit(dtype):
    jax = pytest.importorskip("jax")
    x, made = jax.numpy.asarray(X).astype(dtype), from_config(LEVELS)
    same(np.asarray(jax.jit(made)(x), np.float64), np.asarray(made(x), np.float64), 1e-6)


def test_greedy_is_the_first_of_the_largest():
    x = np.array([[1.0, 3.0, 3.0, 2.0], [1.0, 3.0, 3.0, 2.0]])
    both = [{"temperature": 0, "logit_bias": {3: 2.0}}, {"temperature": 0.0}]
    assert from_config(both)(x).argmax(-1).tolist() == [3, 1]
    assert am.sample("softmax", x, transform=from_config(both), generator=0, num_samples=9).tolist() == [[3, 1]] * 9
    assert from_config({"temperature": 0})(x[0]).tolist() == [-INF, 3.0, -INF, -INF]
    jobs = [{"do_sample": True, "top_k": 2}, {}]
    assert from_config(jobs, order="transformers")(x).tolist() == [[-INF, 3.0, 3.0, -INF], [-INF, 3.0, -INF, -INF]]


def test_rows_that_agree_have_one_parameter():
    one = {"temperature": 0.5, "top_k": 3, "logit_bias": {"2": 1}}
    assert from_config([one, one, dict(one)]) == from_config(one)
    assert from_config(one) == compose(logit_bias({2: 1.0}), am.temperature(0.5), am.topk(3))


def test_other_objects_and_subclasses():
    class Mine(SamplingParams):
        pass

    plain = type("SamplingParams", (), {})()
    plain.temperature, plain.top_k, plain.stop = 0.5, 3, ["."]
    struct = type(
        "SamplingParams", (), {"__struct_fields__": ("temperature", "top_k"), "temperature": 0.5, "top_k": 3}
    )()
    want = compose(am.temperature(0.5), am.topk(3))
    for config in (Mine(temperature=0.5, top_k=3), plain, struct):
        assert from_config(config) == want
    assert from_config(plain).left == {"stop": "it ends the text"}

    @dataclasses.dataclass
    class Other:
        temperature: float = 0.5
        top_k: int = 3

    assert from_config(Other(), order="vllm") == want
    with pytest.raises(TypeError, match="say order=, whose config Other is"):
        from_config(Other())


# -- what is left ------------------------------------------------------------------------------------------------------------------


def test_what_is_left_has_reasons():
    config = SamplingParams(n=4, max_tokens=7, stop=["x"], logprobs=2, output_kind=Kind.DELTA, detokenize=False)
    made = from_config(config)
    assert made == compose()
    assert set(made.left) == {"n", "max_tokens", "stop", "logprobs", "output_kind", "detokenize"}
    assert all(made.left.values())


def test_a_newer_field_of_an_object_is_left_and_of_a_dict_an_error():
    @dataclasses.dataclass
    class SamplingParams:
        temperature: float = 0.5
        frobnicate: float = 2.0

    assert from_config(SamplingParams()).left == {"frobnicate": "anymax does not know this field"}
    with pytest.raises(TypeError, match="'temprature' is no field of vllm; did you mean 'temperature'"):
        from_config({"temprature": 0.5})
    with pytest.raises(
        TypeError, match=r"'do_sample' is no field of vllm; it is one of transformers, order='transformers'"
    ):
        from_config({"do_sample": True})


def test_what_others_do():
    made = from_config(
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "top_k": 4},
        leave=("repetition_penalty", "presence_penalty"),
    )
    assert made == compose(am.topk(4))
    assert made.left == dict.fromkeys(["repetition_penalty", "presence_penalty"], "it is left to others")
    assert from_config({"num_beams": 2}, order="transformers", leave="num_beams") == compose()


@pytest.mark.parametrize(
    ("config", "options", "error", "words"),
    [
        ({"repetition_penalty": 1.2}, {}, ValueError, r"repetition_penalty looks at all classes that came before; give tokens="),
        ({"presence_penalty": 1.2}, {"tokens": [1]}, ValueError, "presence_penalty looks at the classes of the output so far"),
        ({"bad_words": ["no"]}, {}, ValueError, "bad_words are texts, which a tokenizer makes classes"),
        ({"bad_words": [[1, 2]]}, {}, ValueError, "bad_words looks at the classes of the output"),
        ({"min_tokens": 3}, {}, ValueError, "min_tokens masks the classes that end a text; give stop_token_ids"),
        ({"structured_outputs": {"regex": "a"}}, {}, ValueError, "can't be done by a transform: a grammar looks at the text"),
        ({"top_k": -2}, {}, ValueError, "from_config: top_k: topk: k must be at least 1, got -2"),
        ({"top_k": 2.5}, {}, TypeError, "from_config: top_k: topk: k must be an integer"),
        ({"top_p": 0}, {}, ValueError, "from_config: top_p: topp: p must be above 0 and at most 1"),
        ({"min_p": 1.5}, {}, ValueError, "from_config: min_p: minp: p must be above 0 and at most 1"),
        ({"temperature": -1}, {}, ValueError, "from_config: temperature: temperature: T must be at least 0"),
        ({"temperature": "hot"}, {}, TypeError, "temperature must be a number"),
        ({"logit_bias": {1: INF}}, {}, ValueError, "logit_bias must be a dict class -> bias"),
        ([{"top_k": 2}, {"top_k": -5}], {}, ValueError, "from_config: top_k: topk: k must be at least 1"),
        ([], {}, ValueError, "the list of configs is empty"),
        ({}, {"order": "tgi"}, ValueError, "order must be 'transformers', 'vllm', 'llama.cpp', got 'tgi'"),
        ({}, {"leave": ("tmperature",)}, ValueError, "leave='tmperature' is no field of vllm; did you mean 'temperature'"),
        (3.5, {}, TypeError, "config must be a GenerationConfig of transformers"),
        ({"guidance_scale": 2.0}, {"order": "transformers"}, ValueError, "it needs the model's scores without the prompt"),
        ({"num_beams": 2}, {"order": "transformers"}, ValueError, "it belongs to beam search"),
        ({"do_sample": True, "top_h": 1.4}, {"order": "transformers"}, ValueError, "top_h: .* a must be above 0 and at most 1"),
        ({"no_repeat_ngram_size": 2}, {"order": "transformers"}, ValueError, "no ban of n-grams"),
        ({"do_sample": True, "temperature": 0.0}, {"order": "transformers"}, ValueError, "temperature must be above 0 in transformers"),
        ({"do_sample": True, "top_k": -1}, {"order": "transformers"}, ValueError, "top_k must be 0, for off, or at least 1"),
    ],
)  # fmt: skip
def test_errors(config, options, error, words):
    refuses(lambda: from_config(config, **options), error, words)


def test_configs_of_two_systems():
    generation = type("GenerationConfig", (), {"to_dict": lambda self: {}})()
    with pytest.raises(ValueError, match="the configs are of vllm and transformers, whose orders differ"):
        from_config([SamplingParams(), generation])


# -- penalties and sequences ---------------------------------------------------------------------------------------------------------


def test_histories_of_several_lengths():
    """As transformers' processor, which ignores the padding before each prompt, and as rows alone."""
    ragged = [[3, 3, 4], [], [1], [5, 6, 7, 8], [2, 2], [9, 0, 9]]
    got = repetition_penalty(ragged, 1.3, 0.2, 0.1)(X)
    for x, tokens, row in zip(X, ragged, got):
        same(row, repetition_penalty(np.array(tokens, np.int64), 1.3, 0.2, 0.1)(x))
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    padded = torch.tensor([[0] * (4 - len(r)) + r for r in ragged])
    theirs = process.RepetitionPenaltyLogitsProcessor(1.3, torch.tensor([4 - len(r) for r in ragged]))
    torch.testing.assert_close(repetition_penalty(ragged, 1.3)(torch.tensor(X)), theirs(padded, torch.tensor(X)))


WORDS = [
    {(3,): -INF}, {(3, 4): -INF, (5, 3, 4): -1.5, (3,): 0.5}, {(4, 4): -INF}, {(1, 2, 3, 4, 5, 6): -INF, (6, 6): 2.0},
    {(0, 0): -INF, (0,): -1.0},
]  # fmt: skip


@jax_in_the_whole_battery
@every_kind
@pytest.mark.parametrize("case", range(len(WORDS)))
def test_sequences(case, kind):
    ends = [[], [3], [5, 3], [1, 2, 3, 4, 5], [4], [0, 6]]
    got = back(sequence_bias(ends, WORDS[case])(KINDS[kind](X)))
    want = X.copy()
    for row, end in zip(want, ends):
        for word, bias in WORDS[case].items():
            if tuple(end[len(end) - len(word) + 1 :]) == word[:-1] and len(end) >= len(word) - 1:
                row[word[-1]] += bias
    same(got.astype(np.float64), want, 1e-5 if kind == "jax" else 1e-12)


@pytest.mark.parametrize("case", range(len(WORDS)))
def test_sequences_of_transformers(case):
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    tokens = torch.tensor([[1, 3], [5, 3], [4, 4], [0, 0], [6, 6], [2, 1]])
    theirs = process.SequenceBiasLogitsProcessor([[list(w), b] for w, b in WORDS[case].items()])(
        tokens, torch.tensor(X)
    )
    torch.testing.assert_close(sequence_bias(tokens, WORDS[case])(torch.tensor(X)), theirs)
    words = [list(w) for w in WORDS[case]]
    theirs = process.NoBadWordsLogitsProcessor(words, eos_token_id=2)(tokens, torch.tensor(X))
    ours = sequence_bias(tokens, {tuple(w): -INF for w in words})(torch.tensor(X))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("bias", "error", "words"),
    [
        ([(1, 2)], TypeError, "bias must be a dict sequence -> bias"),
        ({(): 1.0}, TypeError, "a sequence must be classes, integers from 0 on"),
        ({(1, -1): 1.0}, TypeError, "a sequence must be classes"),
        ({"ab": 1.0}, TypeError, "a sequence must be classes"),
        ({(1, 2): INF}, ValueError, "below infinity"),
        ({(1, 2): "x"}, TypeError, "values of bias must be numbers"),
        ({(1, 50): 1.0}, ValueError, "class 50 is out of range for 50 classes"),
    ],
)
def test_errors_of_sequences(bias, error, words):
    refuses(lambda: sequence_bias([1], bias)(X), error, words)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"temperature": 10**400}, None),
        ([{"temperature": 10**30}, {"temperature": 2}], None),
        ([{"top_p": 1e-320}, {"top_p": 0.5}], None),
        ({"seed": 10**400}, None),
        ({"top_k": 10**400}, TypeError),
        ({"repetition_penalty": 10**400}, ValueError),
    ],
    ids=lambda v: str(v)[:20],
)
def test_numbers_beyond_those_of_arrays(config, error):
    with pytest.raises(error, match="from_config: ") if error else contextlib.nullcontext():
        y = from_config(config, tokens=TOKENS[:2])(X[:2])
        assert np.isfinite(y).any(-1).all()


@pytest.mark.parametrize("samplers", ["k" * 65, ["top_k"] * 65, "top_k;" * 70])
def test_a_chain_of_samplers_has_an_end(samplers):
    with pytest.raises(ValueError, match="a chain has at most 64 names"):
        from_config({"samplers": samplers}, order="llama.cpp")
