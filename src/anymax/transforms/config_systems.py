"""The configs of transformers and vLLM: their fields, what is off, and the order of their transforms.

Read at transformers 5.24 (generation/utils.py, `_get_logits_processor`) and vLLM of 2026 (sampling_params.py, v1/sample/sampler.py).
"""

from __future__ import annotations

from typing import Any

from .adaptive import toph_of_transformers
from .config_rows import (
    BEAMS,
    DRAFT,
    ENCODER,
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
    banned,
    biased,
    biases,
    classes,
    fields_of,
    none,
    not_before,
    penalties,
    top_k,
)
from .scaling import temperature
from .tokens import allowed, as_sequence
from .truncation import epsilon_cutoff, eta, minp, topp, typical

# -- transformers ----------------------------------------------------------------------------------------------------------------


def _transformers(rows: Rows, fields: list[dict[str, Any]]) -> None:
    rows.greedy = [not v for v in rows.column("do_sample")]
    for row, greedy in zip(rows.values, rows.greedy, strict=True):
        for name in _SAMPLED if greedy else ():
            if row[name] != TRANSFORMERS.does[name]:
                rows.left[name] = "without do_sample, generate does not use it"
    if rows.any("sequence_bias"):
        biased(rows, "sequence_bias", "tokens", [_sequence_biases(v) for v in rows.column("sequence_bias")])
    penalties(rows, lambda field: rows.history("tokens", field), penalty="repetition_penalty")
    ends = [classes(f.get("eos_token_id")) for f in fields]
    words = [
        [w for w in v or () if list(w) not in [[e] for e in end]]
        for v, end in zip(rows.column("bad_words_ids"), ends, strict=True)
    ]
    banned(rows, "bad_words_ids", "tokens", words)
    not_before(rows, "min_length", "tokens", ends)
    not_before(rows, "min_new_tokens", "output", ends)
    banned(rows, "suppress_tokens", "tokens", [[[c] for c in classes(v)] for v in rows.column("suppress_tokens")])
    beams = [f.get("num_beams") or 1 for f in fields]
    least = max(2 if not end else len(end) + 1 for end in ends) if max(beams) > 1 else 1
    for row, greedy in zip(rows.values, rows.greedy, strict=True):
        if not greedy and not row["temperature"] > 0:
            raise ValueError(
                f"from_config: temperature must be above 0 in transformers, got {row['temperature']}; greedy decoding is do_sample=False"
            )
    if any(k < 0 for k in rows.column("top_k")):
        raise ValueError(
            f"from_config: top_k must be 0, for off, or at least 1 in transformers, got {rows.column('top_k')}"
        )
    rows.cut(temperature, "T", "temperature", lambda v: v == 1, 1.0)
    rows.cut(toph_of_transformers, "a", "top_h", lambda v: v is None, 2.0)
    first = [greedy and n == 1 for greedy, n in zip(rows.greedy, beams, strict=True)]
    top_k(rows, lambda v: v == 0, first, min_keep=least)
    for row in rows.values:
        row["top_p"] = TINY if row["top_p"] == 0 else row["top_p"]
    rows.cut(topp, "p", "top_p", lambda v: v >= 1, 1.0, min_keep=least)
    rows.cut(minp, "p", "min_p", lambda v: v == 0, 0.0, min_keep=least)
    rows.cut(typical, "mass", "typical_p", lambda v: v >= 1, 1.0, min_keep=least)
    for make, field in ((epsilon_cutoff, "epsilon_cutoff"), (eta, "eta_cutoff")):
        rows.cut(make, "epsilon", field, lambda v: not 0 < v < 1, 0.0, min_keep=least)


def _sequence_biases(value: Any) -> dict[tuple[int, ...], float]:
    pairs = value.items() if isinstance(value, dict) else value or ()
    return {as_sequence("from_config: sequence_bias", words): float(v) for words, v in pairs}


_SAMPLED = ("temperature", "top_h", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
TRANSFORMERS = System(
    "transformers",
    does={
        "do_sample": False, "sequence_bias": None, "repetition_penalty": 1.0, "bad_words_ids": None, "min_length": 0, "min_new_tokens": 0,
        "suppress_tokens": None, "temperature": 1.0, "top_h": None, "top_k": 50, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0,
        "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
    },
    cannot=fields_of(
        guidance=("it needs the model's scores without the prompt", {"guidance_scale": 1.0}),
        ngrams=("anymax has no ban of n-grams; transforms.dry lowers what repeats a sequence", {"no_repeat_ngram_size": 0}),
        encoder=(ENCODER, {"encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0}),
        place=(PLACE, none("forced_bos_token_id", "forced_eos_token_id", "begin_suppress_tokens", "exponential_decay_length_penalty")),
        invalid=("a row with NaN or +inf stays as it is; give invalid= to the sampler", {"remove_invalid_values": False}),
        mark=("a watermark looks at the last classes and a key", none("watermarking_config")),
        beams=(BEAMS, {"num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0, **none("constraints", "force_words_ids")}),
        search=("it needs the model's hidden states", {"penalty_alpha": None, "dola_layers": None}),
    ),
    elsewhere=fields_of(
        ends=(ENDS, {"max_length": 20, **none("max_new_tokens", "max_time", "stop_strings", "eos_token_id")}),
        beams=(BEAMS, {"early_stopping": False, "length_penalty": 1.0}),
        many=(MANY, {"num_return_sequences": 1}),
        text=(TEXT, none("pad_token_id", "bos_token_id", "decoder_start_token_id", "token_healing")),
        report=(REPORT, {
            "output_attentions": False, "output_hidden_states": False, "output_scores": False, "output_logits": False,
            "return_dict_in_generate": False,
        }),
        same=("it changes no probability", {"renormalize_logits": False}),
        drafts=(DRAFT, {
            "is_assistant": False, "num_assistant_tokens": 20, "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.4, "prompt_lookup_num_tokens": None, "max_matching_ngram_size": None,
            "assistant_early_exit": None, "assistant_lookbehind": 10, "target_lookbehind": 10, "assistant_ensemble_weight": None,
            "speculation_type": None, "use_mtp": None,
        }),
        engine=(ENGINE, {"use_cache": True, **none(
            "cache_implementation", "cache_config", "max_cache_len", "compile_config", "disable_compile", "continuous_batching_config",
            "low_memory", "prefill_chunk_size",
        )}),
        internal=("", none("transformers_version", "_from_model_config", "_commit_hash")),
    ),
    build=_transformers,
    aliases={},
)  # fmt: skip


# -- vLLM ------------------------------------------------------------------------------------------------------------------------


def _vllm(rows: Rows, fields: list[dict[str, Any]]) -> None:
    for row in rows.values:  # vLLM does this first, so that only 0 is greedy
        row["temperature"] = 0.01 if 0 < row["temperature"] < 0.01 else row["temperature"]
    rows.greedy = [v == 0 for v in rows.column("temperature")]
    if rows.any("allowed_token_ids"):
        each = [classes(v) for v in rows.column("allowed_token_ids")]
        rows.add(allowed(each[0] if all(e == each[0] for e in each) else each))
    words = [
        v if ids is None else ids
        for v, ids in zip(rows.column("bad_words"), rows.column("_bad_words_token_ids"), strict=True)
    ]
    if any(isinstance(w, str) for row in words for w in row or ()):
        raise ValueError(
            "from_config: bad_words are texts, which a tokenizer makes classes; give lists of classes, or say leave=('bad_words',)"
        )
    banned(rows, "bad_words", "output", words)
    ends = [
        list(
            dict.fromkeys(
                [
                    *classes(f.get("_eos_token_id")),
                    *classes(f.get("stop_token_ids")),
                    *classes(f.get("_all_stop_token_ids")),
                ]
            )
        )
        for f in fields
    ]
    if any(n > 0 and not end for n, end in zip(rows.column("min_tokens"), ends, strict=True)):
        raise ValueError(
            "from_config: min_tokens masks the classes that end a text; give stop_token_ids, or say leave=('min_tokens',)"
        )
    not_before(rows, "min_tokens", "output", ends)
    biases(rows, "logit_bias")
    penalties(rows, lambda field: rows.history("tokens", field), penalty="repetition_penalty")
    penalties(
        rows, lambda field: rows.history("output", field), presence="presence_penalty", frequency="frequency_penalty"
    )
    rows.cut(temperature, "T", "temperature", lambda v: v == 1, 1.0)
    rows.cut(minp, "p", "min_p", lambda v: v == 0, 0.0)
    top_k(rows, lambda v: v in (0, -1))
    rows.cut(topp, "p", "top_p", lambda v: v == 1, 1.0)


VLLM = System(
    "vllm",
    does={
        "allowed_token_ids": None, "bad_words": None, "_bad_words_token_ids": None, "min_tokens": 0, "logit_bias": None,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "temperature": 1.0, "min_p": 0.0, "top_k": 0,
        "top_p": 1.0,
    },
    cannot=fields_of(
        grammar=("a grammar looks at the text", none("structured_outputs", "guided_decoding")),
        processors=("they are functions of your own; compose them before it", none("logits_processors")),
        place=(PLACE, none("thinking_token_budget", "trace_decode_token_ids")),
        beams=(BEAMS, {"use_beam_search": False, "beam_width": None}),
    ),
    elsewhere=fields_of(
        many=(MANY, {"n": 1, "best_of": None}),
        seed=(SEED, none("seed")),
        ends=(ENDS, {"ignore_eos": False, "max_tokens": 16, **none("stop", "stop_token_ids", "repetition_detection")}),
        beams=(BEAMS, {"length_penalty": 1.0, "early_stopping": False}),
        report=(REPORT, {"flat_logprobs": False, **none(
            "logprobs", "prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids",
        )}),
        text=(TEXT, {
            "detokenize": True, "skip_special_tokens": True, "spaces_between_special_tokens": True, "include_stop_str_in_output": False,
        }),
        engine=(ENGINE, {
            "output_kind": "CUMULATIVE", "stream_interval": None, "skip_clone": False, "skip_reading_prefix_cache": False,
            "truncate_prompt_tokens": None, "routed_experts_prompt_start": 0,
        }),
        plugins=("it is for plugins", none("extra_args")),
        internal=("", {"output_text_buffer_length": 0, **none("_eos_token_id", "_all_stop_token_ids", "_real_n")}),
    ),
    build=_vllm,
    aliases={},
)  # fmt: skip
