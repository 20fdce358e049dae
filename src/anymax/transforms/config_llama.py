"""llama.cpp's chain of samplers as a config: its names, letters, defaults, and what is off.

Read at llama.cpp of 2026 (common/common.h, common/sampling.cpp, src/llama-sampler.cpp).
"""

from __future__ import annotations

import math
from typing import Any

from .._array import Array, Namespace
from .base import Transform
from .config_rows import ALL as EVERY
from .config_rows import (
    ENDS,
    ENGINE,
    MANY,
    PLACE,
    REPORT,
    SEED,
    TEXT,
    TINY,
    Rows,
    System,
    biases,
    fields_of,
    last,
    none,
    penalties,
    same,
    top_k,
)
from .dry import dry
from .dynamic_temperature import dynamic_temperature
from .scaling import temperature
from .truncation import minp, topk, topnsigma, topp, typical, xtc

_LONGEST = 64  # names in a chain
_HUGE = 1e30  # deviations that no score is away
_LOW, _EDGE = -1e30, -1e20  # a score without a chance, and what is above all such scores
LETTERS = {
    "e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p", "m": "min_p", "x": "xtc",
    "t": "temperature", "i": "infill", "a": "adaptive_p",
}  # fmt: skip
_OTHER_NAMES = {"nucleus": "top_p", "typical_p": "typ_p", "typical": "typ_p", "typ": "typ_p", "temp": "temperature"}
_INFILL = "it looks at the texts of the classes"
_ADAPTIVE = "its target follows the classes that were drawn before, and it draws by itself"


class _Counted(Transform):
    """A masked class counts as a candidate, with a score that has no chance: llama.cpp's dynamic temperature divides by log(candidates)."""

    name = "counted"

    def rows(self, x: Array, xp: Namespace) -> Array:
        return xp.where(x == -math.inf, _LOW * xp.ones_like(x), x)


class _Uncounted(Transform):
    """Such classes are masked again."""

    name = "uncounted"

    def rows(self, x: Array, xp: Namespace) -> Array:
        return xp.where(x < _EDGE, -math.inf * xp.ones_like(x), x)


class _CountedSigma(Transform):
    """`topnsigma` that leaves the others as candidates without a chance, as llama.cpp does; its other samplers remove them."""

    name = "top_n_sigma_counted"
    aligned = ("n",)

    def rows(self, x: Array, xp: Namespace, n: Any) -> Array:
        kept = topnsigma(n)(_Uncounted()(x))
        return xp.where(x == -math.inf, x, _Counted()(kept))


def _counted_sigma(n: Any) -> Transform:
    topnsigma(n)  # checks it
    return _CountedSigma((("n", n),))


def _sigma(rows: Rows) -> None:
    make = _counted_sigma if _counts_masked(rows) else topnsigma
    rows.cut(make, "n", "top_n_sigma", lambda v: v <= 0, _HUGE)


def _counts_masked(rows: Rows) -> bool:
    """True if the number of candidates, those that are masked but not removed among them, changes a temperature."""
    return any(d > 0 for d in rows.column("dynatemp_range"))


def samplers(value: Any) -> tuple[str, ...]:
    """The names of a chain: from names, names with ";" between them, or letters."""
    if isinstance(value, str):
        names = value.split(";") if ";" in value else [value] if value in LETTERS.values() else list(value)
    else:
        names = list(value)
    if len(names) > _LONGEST:
        raise ValueError(f"from_config: samplers: a chain has at most {_LONGEST} names, got {len(names)}")
    out = []
    for name in names:
        plain = str(name).strip().replace("-", "_")
        known = LETTERS.get(plain, _OTHER_NAMES.get(plain, plain))
        if known not in LETTERS.values():
            raise ValueError(
                f"from_config: samplers={value!r}: {name!r} is no sampler of llama.cpp; these are "
                f"{', '.join(f'{n} ({c})' for c, n in LETTERS.items())}"
            )
        out.append(known)
    return tuple(out)


def _build(rows: Rows, fields: list[dict[str, Any]]) -> None:
    chains = [samplers(f.get("samplers", row["samplers"])) for f, row in zip(fields, rows.values, strict=True)]
    if any(chain != chains[0] for chain in chains):
        raise ValueError("from_config: the samplers of the rows differ; one chain serves a batch")
    biases(rows, "logit_bias")
    counts = "temperature" in chains[0] and "temperature" not in rows.leave and _counts_masked(rows)
    if counts:
        rows.add(_Counted())
    target = [v for v in rows.column("adaptive_target") if v >= 0]
    if target and "adaptive_p" not in chains[0]:
        rows.left["adaptive_target"] = "the samplers have no adaptive_p"
    for name in chains[0]:
        if name in rows.leave:
            rows.left[name] = "it is left to others"
        elif name == "infill" or (name == "adaptive_p" and target):
            reason = _INFILL if name == "infill" else _ADAPTIVE
            raise ValueError(
                f"from_config: the sampler {name} can't be done by a transform: {reason}; do it elsewhere and say leave=({name!r},)"
            )
        elif name != "adaptive_p":  # with a negative target it does nothing
            _STEPS[name](rows)
    if counts:
        rows.add(_Uncounted())


def _least(rows: Rows) -> int:
    return max(int(same(rows, "min_keep")), 1)


def _penalties(rows: Rows) -> None:
    for row in rows.values:
        if row["penalty_last_n"] == 0:
            row.update(penalty_repeat=1.0, penalty_freq=0.0, penalty_present=0.0)
    penalties(
        rows,
        lambda field: last(rows.history("tokens", field), rows.column("penalty_last_n")),
        penalty="penalty_repeat",
        presence="penalty_present",
        frequency="penalty_freq",
    )


def _dry(rows: Rows) -> None:
    off = [
        m == 0 or b < 1 or n == 0
        for m, b, n in zip(*map(rows.column, ("dry_multiplier", "dry_base", "dry_penalty_last_n")), strict=True)
    ]
    if all(off):
        return
    breakers = same(rows, "dry_sequence_breakers")
    if "dry_sequence_breakers" in rows.leave:
        breakers = ()
    elif any(isinstance(b, str) for b in breakers):
        raise ValueError(
            "from_config: dry_sequence_breakers are texts in llama.cpp, by default a new line, ':', '\"' and '*'; give their classes as "
            "integers, [] for none, or say leave=('dry_sequence_breakers',)"
        )
    params = {
        "multiplier": ("dry_multiplier", rows.column("dry_multiplier"), 0.0),
        "base": ("dry_base", rows.column("dry_base"), 1.0),
    }
    options = {
        "tokens": last(rows.history("tokens", "dry_multiplier"), rows.column("dry_penalty_last_n")),
        "allowed_length": same(rows, "dry_allowed_length"),
        "sequence_breakers": breakers,
    }
    rows.level(dry, params, off, False, options)


def _xtc(rows: Rows) -> None:
    chance, threshold = rows.column("xtc_probability"), rows.column("xtc_threshold")
    off = [p <= 0 or t > 0.5 for p, t in zip(chance, threshold, strict=True)]
    if all(off):
        return
    if _least(rows) > 1:
        raise ValueError("from_config: xtc has no min_keep here; set min_keep=0, or xtc_probability=0")
    params = {"threshold": ("xtc_threshold", threshold, 1.0), "probability": ("xtc_probability", chance, 0.0)}
    rows.level(xtc, params, off, False, {"generator": rows.generator})


def _temperature(rows: Rows) -> None:
    T, spread = rows.column("temp"), rows.column("dynatemp_range")
    if any(d > 0 for d in spread):
        # a temperature below 0 is that of the largest
        greedy = [t + max(d, 0.0) <= 0 for t, d in zip(T, spread, strict=True)]
        params = {
            "low": ("temp", [max(0.0, t - max(d, 0.0)) for t, d in zip(T, spread, strict=True)], 1.0),
            "high": ("dynatemp_range", [t + max(d, 0.0) for t, d in zip(T, spread, strict=True)], 1.0),
            "exponent": ("dynatemp_exponent", rows.column("dynatemp_exponent"), 1.0),
        }
        rows.level(dynamic_temperature, params, greedy, False)
    else:
        greedy = [t <= 0 for t in T]
        rows.level(temperature, {"T": ("temp", T, 1.0)}, [g or t == 1 for g, t in zip(greedy, T, strict=True)], False)
    rows.level(topk, {"k": ("temp", [1] * len(T), EVERY)}, [not g for g in greedy], False)


def _min_p(rows: Rows) -> None:
    most = rows.column("min_p")
    rows.cut(minp, "p", "min_p", lambda v: v <= 0 or v > 1, 0.0, min_keep=_least(rows))
    rows.level(topk, {"k": ("min_p", [_least(rows)] * len(most), EVERY)}, [p <= 1 for p in most], False)


def _top_p(rows: Rows) -> None:
    for row in rows.values:
        row["top_p"] = max(row["top_p"], TINY)
    rows.cut(topp, "p", "top_p", lambda v: v >= 1, 1.0, min_keep=_least(rows))


def _typical(rows: Rows) -> None:
    for row in rows.values:
        row["typ_p"] = max(row["typ_p"], TINY)
    rows.cut(typical, "mass", "typ_p", lambda v: v >= 1, 1.0, min_keep=_least(rows))


_STEPS = {
    "penalties": _penalties,
    "dry": _dry,
    "top_n_sigma": _sigma,
    "top_k": lambda rows: top_k(rows, lambda v: v <= 0),
    "typ_p": _typical,
    "top_p": _top_p,
    "min_p": _min_p,
    "xtc": _xtc,
    "temperature": _temperature,
}
LLAMA_CPP = System(
    "llama.cpp",
    does={
        "samplers": "edskypmxt", "logit_bias": None, "penalty_last_n": 64, "penalty_repeat": 1.0, "penalty_freq": 0.0,
        "penalty_present": 0.0, "dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1,
        "dry_sequence_breakers": ("\n", ":", '"', "*"), "top_n_sigma": -1.0, "top_k": 40, "typ_p": 1.0, "top_p": 0.95, "min_p": 0.05,
        "xtc_probability": 0.0, "xtc_threshold": 0.1, "temp": 0.8, "dynatemp_range": 0.0, "dynatemp_exponent": 1.0, "min_keep": 0,
        "adaptive_target": -1.0,
    },
    cannot=fields_of(
        mirostat=("it draws by itself, and its level follows the classes that were drawn before", {"mirostat": 0}),
        infill=(_INFILL, none("infill")),
        adaptive=(_ADAPTIVE, none("adaptive_p")),
        grammar=("a grammar looks at the text", none("grammar", "grammar_lazy", "grammar_triggers", "json_schema")),
        place=(PLACE, {"reasoning_budget_tokens": -1}),
        eos=("give the classes that end a text in logit_bias, as in {2: -inf}", {"ignore_eos": False}),
    ),
    elsewhere=fields_of(
        mirostat=("it belongs to mirostat", {"mirostat_tau": 5.0, "mirostat_eta": 0.1}),
        adaptive=("it belongs to adaptive_p", {"adaptive_decay": 0.9}),
        seed=(SEED, {"seed": -1}),
        ends=(ENDS, {"n_predict": -1, **none("stop", "t_max_predict_ms", "n_indent")}),
        many=(MANY, {"n_cmpl": 1}),
        report=(REPORT, {"n_probs": 0, "post_sampling_probs": False, "timing_per_token": False, "timings_per_token": False}),
        text=(TEXT, none("prompt", "reasoning_budget_start", "reasoning_budget_end", "reasoning_budget_forced")),
        engine=(ENGINE, {
            "n_prev": 64, "no_perf": False, "cache_prompt": True, "stream": False, "backend_sampling": False, "n_keep": 0, "id_slot": -1,
        }),
    ),
    build=_build,
    aliases={
        "temperature": "temp", "typical_p": "typ_p", "repeat_penalty": "penalty_repeat", "repeat_last_n": "penalty_last_n",
        "presence_penalty": "penalty_present", "frequency_penalty": "penalty_freq",
    },
)  # fmt: skip
