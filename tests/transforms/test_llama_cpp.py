"""llama.cpp's chain of samplers from a config, held to its definitions (src/llama-sampler.cpp, common/sampling.cpp)."""

import contextlib
import math

import numpy as np
import pytest
from kinds import KINDS, back, every_kind, jax_in_the_whole_battery

import anymax as am
from anymax.transforms import compose, from_config, topk

INF = math.inf
N = 40
DEFAULTS = {
    "penalty_last_n": 64, "penalty_repeat": 1.0, "penalty_freq": 0.0, "penalty_present": 0.0, "dry_multiplier": 0.0, "dry_base": 1.75,
    "dry_allowed_length": 2, "dry_penalty_last_n": -1, "dry_sequence_breakers": [], "top_n_sigma": -1.0, "top_k": 40, "typ_p": 1.0,
    "top_p": 0.95, "min_p": 0.05, "xtc_probability": 0.0, "xtc_threshold": 0.1, "temp": 0.8, "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0, "min_keep": 0, "logit_bias": {},
}  # fmt: skip
DEFAULT_ORDER = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]


# -- the oracle: candidates [class, logit], as the C++ code has them -----------------------------------------------------------------


def probabilities(cur):
    e = [math.exp(s - max(s for _, s in cur)) for _, s in cur]
    return [v / sum(e) for v in e]


def falling(cur):
    return sorted(cur, key=lambda c: -c[1])


def penalties(cur, c, tokens, chance):
    last = tokens[-c["penalty_last_n"] :] if c["penalty_last_n"] > 0 else tokens if c["penalty_last_n"] < 0 else []
    out = []
    for i, s in cur:
        if count := last.count(i):
            s = s * c["penalty_repeat"] if s <= 0 else s / c["penalty_repeat"]
            s -= count * c["penalty_freq"] + c["penalty_present"]
        out.append((i, s))
    return out


def dry(cur, c, tokens, chance):
    if c["dry_multiplier"] == 0 or c["dry_base"] < 1 or c["dry_penalty_last_n"] == 0:
        return cur
    last = tokens if c["dry_penalty_last_n"] < 0 else tokens[-c["dry_penalty_last_n"] :]
    breakers, n = c["dry_sequence_breakers"], len(last)
    limit = next((back for back in range(n) if last[n - 1 - back] in breakers), n)
    longest = {}
    for place in range(n - 1):  # the sequence that ends at `place` repeats the end
        length = 0
        while length < min(place + 1, limit) and last[place - length] == last[n - 1 - length]:
            length += 1
        if length >= c["dry_allowed_length"]:
            longest[last[place + 1]] = max(longest.get(last[place + 1], 0), length)
    power = {
        i: c["dry_multiplier"] * c["dry_base"] ** (n - c["dry_allowed_length"])
        for i, n in longest.items()
        if i not in breakers
    }
    return [(i, s - power.get(i, 0.0)) for i, s in cur]


def top_n_sigma(cur, c, tokens, chance):
    s = np.array([s for _, s in cur if s > -INF])
    if c["top_n_sigma"] <= 0:
        return cur
    # masked, and still a candidate
    return [(i, v if v >= s.max() - c["top_n_sigma"] * s.std() else -INF) for i, v in cur]


def top_k(cur, c, tokens, chance):
    return falling(cur)[: c["top_k"]] if c["top_k"] > 0 else cur


def typ_p(cur, c, tokens, chance):
    if c["typ_p"] >= 1:
        return cur
    cur = [v for v in falling(cur) if v[1] > -INF]
    p = probabilities(cur)
    entropy = -sum(v * math.log(v) for v in p)
    kept, mass = [], 0.0
    for i in sorted(range(len(p)), key=lambda i: abs(-math.log(p[i]) - entropy)):
        kept.append(cur[i])
        mass += p[i]
        if mass > c["typ_p"] and len(kept) >= c["min_keep"]:
            break
    return kept


def top_p(cur, c, tokens, chance):
    if c["top_p"] >= 1:
        return cur
    cur, mass, kept = falling(cur), 0.0, []
    for v, p in zip(cur, probabilities(cur)):
        kept.append(v)
        mass += p
        if mass >= c["top_p"] and len(kept) >= c["min_keep"]:
            break
    return kept


def min_p(cur, c, tokens, chance):
    if c["min_p"] <= 0:
        return cur
    cur = falling(cur)
    return [v for i, v in enumerate(cur) if v[1] >= cur[0][1] + math.log(c["min_p"]) or i < max(c["min_keep"], 1)]


def xtc(cur, c, tokens, chance):
    if c["xtc_probability"] <= 0 or c["xtc_threshold"] > 0.5 or len(cur) < 2 or chance > c["xtc_probability"]:
        return cur
    cur = falling(cur)
    return cur[max([i for i, p in enumerate(probabilities(cur)) if p >= c["xtc_threshold"]], default=0) :]


def temperature(cur, c, tokens, chance):
    T = c["temp"]
    if c["dynatemp_range"] > 0:
        if len(cur) < 2:
            return cur
        low, high = max(0.0, T - c["dynatemp_range"]), T + c["dynatemp_range"]
        entropy = -sum(v * math.log(v) for v in probabilities(cur) if v > 0) / math.log(len(cur))
        T = low + (high - low) * entropy ** c["dynatemp_exponent"]
    if T <= 0:
        best = max(s for _, s in cur)
        return [min(v for v in cur if v[1] == best)]
    return [(i, s / T) for i, s in cur]


ORACLE = {f.__name__: f for f in (penalties, dry, top_n_sigma, top_k, typ_p, top_p, min_p, xtc, temperature)}


def chain(x, config, tokens, chance=1.0, order=None):
    c = DEFAULTS | config
    cur = [(i, s + c["logit_bias"].get(i, 0.0)) for i, s in enumerate(x.tolist())]
    letters = {"s": "top_n_sigma", "k": "top_k", "p": "top_p", "t": "temperature"}
    named = [letters[c] for c in config["samplers"]] if "samplers" in config else DEFAULT_ORDER
    for name in named if order is None else order:
        cur = ORACLE[name](cur, c, list(tokens), chance)
    out = np.full(len(x), -INF)
    for i, s in cur:
        out[i] = s
    return out


# -- the cases -----------------------------------------------------------------------------------------------------------------------

rng = np.random.default_rng(3)
X = rng.normal(0, 2.5, (30, N))
TOKENS = rng.integers(0, 6, (30, 70))
CASES = {
    "defaults": {},
    "no truncation": {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "penalties": {"penalty_repeat": 1.2, "penalty_freq": 0.1, "penalty_present": 0.3},
    "penalties of few": {"penalty_repeat": 1.5, "penalty_last_n": 3, "top_k": 0},
    "penalties of all": {"penalty_freq": 0.05, "penalty_last_n": -1, "top_p": 1.0},
    "dry": {"dry_multiplier": 0.8, "min_p": 0.0, "top_p": 1.0},
    "dry of few": {"dry_multiplier": 0.5, "dry_base": 1.3, "dry_allowed_length": 1, "dry_penalty_last_n": 20, "top_p": 1.0, "top_k": 0},
    "dry with breakers": {"dry_multiplier": 0.5, "dry_allowed_length": 1, "dry_sequence_breakers": [1, 4], "min_p": 0.0, "top_p": 1.0},
    "sigma": {"top_n_sigma": 1.1, "top_p": 1.0, "min_p": 0.0},
    "typical": {"typ_p": 0.7, "top_p": 1.0, "min_p": 0.0},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.08},
    "greedy": {"temp": 0.0, "logit_bias": {3: 2.0, 5: -INF}},
    "greedy after xtc": {"temp": -1.0, "xtc_probability": 0.5},
    "dynamic": {"dynatemp_range": 0.5, "dynatemp_exponent": 1.5},
    "dynamic from 0": {"temp": 0.2, "dynatemp_range": 0.4},
    "dynamic below 0": {"temp": -1.0, "dynatemp_range": 0.5},
    "dynamic after sigma": {"samplers": "st", "top_n_sigma": 1.0, "temp": 1.0, "dynatemp_range": 0.5},
    "dynamic after sigma and k": {"samplers": "kst", "top_k": 9, "top_n_sigma": 1.0, "dynatemp_range": 0.5, "logit_bias": {2: -INF}},
    "dynamic after sigma and p": {"samplers": "spt", "top_p": 0.9, "top_n_sigma": 1.5, "dynatemp_range": 0.5},
    "min_p above 1": {"min_p": 1.5, "top_p": 1.0},
    "keep": {"min_keep": 4, "top_p": 0.1, "min_p": 0.9, "typ_p": 0.2},
    "first alone": {"top_p": 0.0},
    "everything": {
        "penalty_repeat": 1.1, "penalty_freq": 0.1, "dry_multiplier": 0.4, "top_n_sigma": 2.0, "top_k": 12, "typ_p": 0.97, "top_p": 0.9,
        "min_p": 0.02, "xtc_probability": 0.5, "temp": 0.7, "logit_bias": {1: 0.5},
    },
}  # fmt: skip
SEEDS = list(range(30))
CHANCES = [np.random.default_rng(s).random() for s in SEEDS]


def same(got, want, rtol=1e-9):
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol)


def given(config):
    return {"dry_sequence_breakers": [], **config}


@pytest.mark.parametrize("engine", [None, "reference"])
@pytest.mark.parametrize("case", CASES)
def test_the_default_chain(case, engine):
    made = from_config(given(CASES[case]), order="llama.cpp", tokens=TOKENS, generator=SEEDS)
    with am.use(engine) if engine else contextlib.nullcontext():
        got = made(X)
    want = np.stack([chain(x, CASES[case], t, u) for x, t, u in zip(X, TOKENS.tolist(), CHANCES)])
    # llama.cpp leaves the score of a single class as it is, and ours is divided by the lowest temperature
    if "dynamic" in case:
        got, want = (np.where(np.isneginf(a), a, a - a.max(-1, keepdims=True)) for a in (got, want))
    same(got, want)


@pytest.mark.parametrize(
    "order",
    [
        "kpt",
        "tkp",
        "top_k;top_p;temperature",
        ["temperature", "min_p", "typ_p"],
        "mxt",
        "",
        "ypsk",
        "edt",
        ["xtc", "penalties", "top-k"],
    ],
)
def test_other_chains(order):
    names = {
        "e": "penalties",
        "d": "dry",
        "s": "top_n_sigma",
        "k": "top_k",
        "y": "typ_p",
        "p": "top_p",
        "m": "min_p",
        "x": "xtc",
    }
    names |= {"t": "temperature"}
    listed = order.split(";") if ";" in order else [names.get(c, c.replace("-", "_")) for c in order]
    config = {**CASES["everything"], "temp": 0.5}
    made = from_config({**given(config), "samplers": order}, order="llama.cpp", tokens=TOKENS, generator=SEEDS)
    same(made(X), np.stack([chain(x, config, t, u, listed) for x, t, u in zip(X, TOKENS.tolist(), CHANCES)]))


@jax_in_the_whole_battery
@every_kind
def test_rows_of_their_own(kind):
    """Each row with another case, one of them greedy; XTC is left out, whose numbers depend on the row."""
    cases = [
        c
        for name, c in CASES.items()
        if "xtc" not in name and name not in ("everything", "keep") and "dry" not in name and "samplers" not in c
    ]
    cases.append({"dry_multiplier": 0.8, "penalty_last_n": 5, "penalty_present": 0.2})
    x, tokens = X[: len(cases)], TOKENS[: len(cases)]
    made = from_config([given(c) for c in cases], order="llama.cpp", tokens=tokens)
    want = np.stack([chain(*row) for row in zip(x, cases, tokens.tolist())])
    same(back(made(KINDS[kind](x))).astype(np.float64), want, 2e-5 if kind == "jax" else 1e-9)


def test_names_of_the_server():
    theirs = {"temperature": 0.6, "typical_p": 0.9, "repeat_penalty": 1.2, "repeat_last_n": 9, "frequency_penalty": 0.1}
    ours = {"temp": 0.6, "typ_p": 0.9, "penalty_repeat": 1.2, "penalty_last_n": 9, "penalty_freq": 0.1}
    one, other = (from_config(c, order="llama.cpp", tokens=TOKENS) for c in (theirs, ours))
    np.testing.assert_array_equal(one(X), other(X))
    with pytest.raises(ValueError, match="temp is given twice, also as temperature"):
        from_config({"temp": 0.6, "temperature": 0.6}, order="llama.cpp")
    pairs = from_config({"samplers": "k", "logit_bias": [[3, 1.5], [4, False]]}, order="llama.cpp")
    assert dict(pairs.transforms[0].params)["bias"] == ((3, 1.5), (4, -INF))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"mirostat": 2}, "mirostat=2 can't be done by a transform: it draws by itself"),
        ({"samplers": "kia"}, "the sampler infill can't be done by a transform: it looks at the texts"),
        (
            {"samplers": "ka", "adaptive_target": 0.3},
            "the sampler adaptive_p can't be done by a transform: its target follows",
        ),
        ({"samplers": "kz"}, "'z' is no sampler of llama.cpp"),
        ({"samplers": ["top_k", "tail_free"]}, "'tail_free' is no sampler of llama.cpp"),
        ({"dry_multiplier": 0.8}, "dry_sequence_breakers are texts in llama.cpp"),
        ({"dry_multiplier": 0.8, "dry_sequence_breakers": ["\n"]}, "dry_sequence_breakers are texts in llama.cpp"),
        ({"dry_multiplier": 0.8, "dry_sequence_breakers": []}, "dry_multiplier looks at all classes that came before"),
        ({"penalty_repeat": 1.1}, "penalty_repeat looks at all classes that came before"),
        ({"grammar": "root ::= a"}, "a grammar looks at the text"),
        ({"ignore_eos": True}, "give the classes that end a text in logit_bias"),
        ({"min_keep": 3, "xtc_probability": 0.5}, "xtc has no min_keep here"),
        ({"reasoning_budget_tokens": 5}, "it depends on the place in the text"),
        ([{"samplers": "k"}, {"samplers": "kp"}], "the samplers of the rows differ"),
        ([{"min_keep": 1}, {"min_keep": 2}], "min_keep must be the same in all rows"),
    ],
)
def test_what_it_cannot(config, words):
    with pytest.raises(ValueError, match=words):
        from_config(config, order="llama.cpp")


def test_what_is_left():
    config = {"samplers": "kiat", "top_k": 5, "temp": 1.0, "seed": 7, "n_probs": 3, "mirostat_tau": 4.0}
    made = from_config(config, order="llama.cpp", leave=["infill"])
    assert made == compose(topk(5))
    assert set(made.left) == {"infill", "seed", "n_probs", "mirostat_tau"}
    assert from_config({"samplers": "k", "adaptive_target": 0.3}, order="llama.cpp").left == {
        "adaptive_target": "the samplers have no adaptive_p"
    }
    with_dry = {"dry_multiplier": 0.8}
    made = from_config(with_dry, order="llama.cpp", tokens=TOKENS, leave="dry_sequence_breakers")
    same(made(X), np.stack([chain(x, with_dry, t) for x, t in zip(X, TOKENS.tolist())]))
