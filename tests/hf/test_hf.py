"""Transformers with any map in their attention, token for token beside the models' own eager code."""

from __future__ import annotations

import contextlib
import inspect
import sys

import pytest
from hf_models import (
    MAPS,
    MODELS,
    MORE,
    PAIRS,
    SMALL,
    build,
    in_softmax,
    inputs,
    its_own_warnings,
    logits,
    padded,
    tokens,
)

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import anymax as A
from anymax import Entmax, Softmax, Sparsemax, Taylor, hf

pytestmark = its_own_warnings


def real(given, model):
    """Which logits are of tokens that are there."""
    return given["attention_mask"].bool() if "attention_mask" in given and model not in PAIRS else slice(None)


def given_to(model, padding):
    if model == "whisper":
        sound = torch.randn(2, 8, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        return {"input_features": sound, "decoder_input_ids": tokens(n=6)}
    masks = {"none": {}, "left": {"attention_mask": padded()}, "right": {"attention_mask": padded().flip(-1)}}
    return inputs(model) if padding == "usual" else {"input_ids": tokens(), **masks[padding]}


# model, map, padding; sliding windows with either padding and with none
# whose router calls softmax too
LOGITS = [(model, name, "usual") for model in MODELS if model != "gpt_oss" for name in MAPS]
LOGITS += [(model, "sparsemax", padding) for model in ("mistral", "qwen2") for padding in ("left", "right", "none")]
LOGITS += [("whisper", "sparsemax", "none")]
LOGITS_IN_SHORT = [
    ("llama", "entmax", "usual"), ("gpt2", "sparsemax", "usual"), ("gemma2", "taylor", "usual"), ("t5", "entmax15", "usual"),
    ("bart", "sparse_softmax", "usual"), ("bert", "softmax", "usual"), ("bert", "sparsemax", "usual"), ("mistral", "sparsemax", "left"),
    ("qwen2", "sparsemax", "none"), ("whisper", "sparsemax", "none"),
]  # fmt: skip


@pytest.mark.whole(lambda model, name, padding: (model, name, padding) not in LOGITS_IN_SHORT)
@pytest.mark.parametrize(("model", "name", "padding"), LOGITS)
def test_logits_are_those_of_the_plain_model(model, name, padding):
    mapping, parameters = MAPS[name]
    given = given_to(model, padding)
    plain, seen = build(model, "eager"), real(given, model)
    got = logits(build(model, f"anymax_{name}", anymax=parameters), given)[seen]
    with in_softmax(mapping):
        want = logits(plain, given)[seen]
    with in_softmax(Softmax()):
        other = logits(plain, given)[seen]
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
    assert name == "softmax" or (got - other).abs().max() > 1e-4


def test_sinks_are_those_of_the_model():
    ours, plain = (build("gpt_oss", name).float() for name in ("anymax_softmax", "eager"))
    given = inputs("gpt_oss")
    got, want = (logits(model, given)[real(given, "gpt_oss")] for model in (ours, plain))
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


@pytest.mark.whole(lambda model: model != "mistral")
@pytest.mark.parametrize("model", MORE)
def test_a_name_that_is_set_when_the_model_is_there(model):
    given, late = given_to(model, "none"), build(model, "eager")
    late.set_attn_implementation("anymax_sparsemax")
    torch.testing.assert_close(logits(late, given), logits(build(model, "anymax_sparsemax"), given), atol=0, rtol=0)
    late.set_attn_implementation("eager")
    assert (logits(late, given) - logits(build(model, "anymax_sparsemax"), given)).abs().max() > 1e-4


# -- generation -------------------------------------------------------------------------------------------------------------------

CACHES = {
    "usual": {}, "none": {"use_cache": False}, "dynamic": {"cache_implementation": "dynamic"},
    "static": {"cache_implementation": "static", "disable_compile": True},
}  # fmt: skip
STEPS = {"min_new_tokens": 6, "max_new_tokens": 6, "pad_token_id": 0}
# model, map, cache
GENERATED = [
    (m, n, c)
    for m in (*PAIRS, "llama", "gpt2", "gemma2")
    for n in ("sparsemax", "entmax15", "taylor")
    for c in ("usual", "none")
]
GENERATED += [(m, "entmax15", c) for m in ("mistral", "gemma2", "gpt2", "llama") for c in ("dynamic", "static")]
GENERATED_IN_SHORT = [
    ("llama", "sparsemax", "usual"), ("gpt2", "taylor", "none"), ("t5", "entmax15", "usual"), ("bart", "sparsemax", "none"),
    ("mistral", "entmax15", "static"), ("gemma2", "entmax15", "dynamic"), ("llama", "entmax15", "static"),
]  # fmt: skip


@pytest.mark.whole(lambda model, name, cache: (model, name, cache) not in GENERATED_IN_SHORT)
@pytest.mark.parametrize(("model", "name", "cache"), GENERATED)
def test_generation_token_for_token(model, name, cache):
    given = {"input_ids": tokens(n=7), "attention_mask": padded(7).flip(-1) if model in PAIRS else padded(7)}
    options = {**STEPS, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    got = build(model, f"anymax_{name}").generate(**given, **options, **CACHES[cache])
    with in_softmax(MAPS[name][0]):
        want = build(model, "eager").generate(**given, **options, **(CACHES[cache] if cache == "static" else {}))
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(got.scores, want.scores, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_generation_with_beams():
    given = {"input_ids": tokens(n=7), "attention_mask": padded(7)}
    assert build("llama", "anymax_entmax15").generate(**given, num_beams=3, **STEPS).shape == (2, 13)


def test_a_prompt_in_pieces():
    """Several new queries against a cache, without a mask of the caller's."""
    model = build("mistral", "anymax_entmax15")
    whole = logits(model, {"input_ids": tokens()})
    with torch.no_grad():
        first = model(tokens()[:, :5], use_cache=True)
        rest = model(tokens()[:, 5:], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), whole)


@pytest.mark.whole
def test_compile_and_half_precision():
    model, given = "llama", inputs("llama")
    ours = build(model, "anymax_entmax15")
    want = logits(ours, given)
    torch._dynamo.reset()
    torch.testing.assert_close(logits(torch.compile(ours, backend="aot_eager"), given), want)
    for dtype in (torch.bfloat16, torch.float16):
        low = logits(build(model, "anymax_entmax15").to(dtype), given)
        assert low.dtype == dtype
        assert low.isfinite().all()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert logits(ours.float(), given).isfinite().all()


@pytest.mark.whole(lambda model: model not in ("llama", "t5"))
@pytest.mark.parametrize("model", ["llama", "bert", "gpt2", "t5"])
def test_training_with_and_without_checkpointing(model):
    given = inputs(model)
    labels = given["decoder_input_ids"] if model in PAIRS else given["input_ids"]
    results = []
    for implementation, checkpointing in (("anymax_sparsemax", False), ("anymax_sparsemax", True), ("eager", False)):
        made = build(model, implementation)
        made.train()
        for part in made.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0
            elif isinstance(getattr(part, "dropout", None), float):
                part.dropout = 0.0
        if checkpointing:
            made.gradient_checkpointing_enable()
        with in_softmax(Sparsemax()) if implementation == "eager" else contextlib.nullcontext():
            made(**given, labels=labels).loss.backward()
        results.append({n: p.grad for n, p in made.named_parameters() if p.grad is not None})
    for other in results[1:]:
        assert other.keys() == results[0].keys()
        for n, g in results[0].items():
            torch.testing.assert_close(other[n], g, atol=2e-5, rtol=1e-3, msg=n)


def test_dropout_trains():
    made = build("bert", "anymax_entmax15", attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0)
    made.train()
    torch.manual_seed(0)
    a = made(**inputs("bert")).logits
    b = made(**inputs("bert")).logits
    assert (a != b).any()
    torch.manual_seed(0)
    torch.testing.assert_close(made(**inputs("bert")).logits, a)


def test_weights_are_given_where_asked_for():
    made = build("bert", "anymax_sparsemax")
    with torch.no_grad():
        out = made(**inputs("bert"), output_attentions=True)
    assert len(out.attentions) == 2
    for p in out.attentions:
        assert p.shape == (2, 4, 9, 9)
        torch.testing.assert_close(p.sum(-1), torch.ones_like(p[..., 0]))
        assert (p == 0).float().mean() > 0.2


def test_the_map_comes_from_the_config(tmp_path):
    given = inputs("llama")
    real = given["attention_mask"].bool()

    def logits(implementation, **more):
        with torch.no_grad():
            return build("llama", implementation, **more)(**given).logits[real]

    torch.testing.assert_close(logits("anymax_entmax", anymax={"alpha": 1.5}), logits("anymax_entmax15"))
    torch.testing.assert_close(
        logits("anymax_entmax", anymax={"alpha": [2.0] * 4}), logits("anymax_sparsemax"), atol=1e-4, rtol=1e-3
    )
    assert (
        logits("anymax_entmax", anymax={"alpha": [2.0, 1.2, 1.5, 3.0]}) - logits("anymax_entmax15")
    ).abs().max() > 1e-3
    cold = logits("anymax_softmax", anymax={"temperature": 0.5})
    assert (cold - logits("anymax_softmax")).abs().max() > 1e-3
    longer = logits("anymax_softmax", anymax={"scalable": {"beta": [0.5, 1.0, 1.5, 2.0]}})
    assert (longer - logits("anymax_softmax")).abs().max() > 1e-3
    model = build("llama", "anymax_entmax", anymax={"alpha": [2.0, 1.2, 1.5, 3.0]})
    model.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="anymax_entmax").eval().double()
    with torch.no_grad():
        torch.testing.assert_close(again(**given).logits, model(**given).logits)


def test_a_layer_may_learn_its_alpha():
    model = build("llama", "anymax_entmax")
    for layer in model.model.layers:
        layer.self_attn.anymax = A.nn.Activation(Entmax(torch.full((4, 1, 1), 1.4)), learn="alpha")
    given = inputs("llama")
    model(**given, labels=given["input_ids"]).loss.backward()
    for layer in model.model.layers:
        assert layer.self_attn.anymax.raw_alpha.grad.any()


def test_a_mask_of_the_users_own():
    """[B, 1, L, S] in numbers, with the lowest number where it hides, as eager models take it."""
    ours, plain = build("llama", "anymax_taylor"), build("llama", "eager")
    mask = torch.zeros(2, 1, 9, 9, dtype=torch.float64)
    mask.masked_fill_(torch.ones(9, 9, dtype=torch.bool).triu(1), torch.finfo(torch.float64).min)
    mask[1, :, :, 0] = -0.5
    with torch.no_grad():
        got = ours(tokens(), attention_mask=mask).logits
        with in_softmax(Taylor(2)):
            want = plain(tokens(), attention_mask=mask).logits
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


def same_as_eager(make, run):
    """anymax_softmax and the model's own eager code, by the same weights."""
    found = []
    for implementation in ("eager", "anymax_softmax"):
        torch.manual_seed(0)
        kind, config = make()
        model = kind._from_config(config, attn_implementation=implementation).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "q_" in name or "k_" in name or "kv_" in name:
                    parameter.mul_(8.0)
            found.append(run(model))
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)


def with_static_cache(model):
    found = model.generate(
        tokens(), **STEPS, do_sample=False, output_logits=True, return_dict_in_generate=True, **CACHES["static"]
    )
    return [model(tokens(), logits_to_keep=3).logits, torch.stack(found.logits)]


NLLB = {
    f"{side}_{what}": n
    for side in ("encoder", "decoder")
    for what, n in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 48))
}
ODD = {  # what is odd -> (model, its config, what is compared)
    # DeepSeek-V3.2 tells other implementations than its own which keys each query may see, beside the mask
    "it chooses its keys": (
        "DeepseekV32ForCausalLM", "DeepseekV32Config",
        SMALL | {
            "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16, "index_topk": 3, "index_n_heads": 2,
            "index_head_dim": 8, "num_key_value_heads": 4, "first_k_dense_replace": 1,
        },
        lambda model: model(tokens()).logits,
    ),
    # Gemma 4 keeps the last queries alone in the layers that share keys, after the masks are made
    "it leaves out queries late": (
        "Gemma4ForCausalLM", "Gemma4TextConfig",
        SMALL | {
            "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4, "num_hidden_layers": 4,
            "vocab_size_per_layer_input": 50, "eos_token_id": None,
        },
        with_static_cache,
    ),
    # NLLB-MoE supports no attention but its own by its flags: its layers' `is_causal` is never set, so that it needs every mask
    "it does not say which layers are causal": (
        "NllbMoeForConditionalGeneration", "NllbMoeConfig", {"vocab_size": 50, "d_model": 32, "num_experts": 2, **NLLB},
        lambda model: model(tokens(), decoder_input_ids=tokens(n=6, seed=2)).logits,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ODD)
def test_a_model_that_is_odd(what):
    kind, config, options, run = ODD[what]
    if not hasattr(transformers, config):
        pytest.skip("a model of later transformers")
    made = getattr(transformers, kind), getattr(transformers, config)(**options)
    same_as_eager(lambda: made, run)


def test_names():
    names = {"anymax_sparsemax", "anymax_entmax15", "anymax_entmax", "anymax_taylor", "anymax_normmax"}
    assert names <= set(hf.register())
    for name in NO_NAMES:
        assert name not in transformers.AttentionInterface().valid_keys()


def test_options_that_are_off_change_nothing():
    plain = logits(build("llama", "anymax_entmax15"), inputs("llama"))
    off = logits(build("llama", "anymax_entmax15", anymax={"scalable": False, "temperature": None}), inputs("llama"))
    torch.testing.assert_close(off, plain, atol=0, rtol=0, equal_nan=True)


def test_sinks_for_each_query_are_those_of_the_model():
    """As transformers computes them in its own code for Inkling 2: one more score for each query, whose weight is dropped."""
    q, k, v = (torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(s)) for s in range(3))
    sinks = torch.randn(2, 3, 5, 1, generator=torch.Generator().manual_seed(3)).requires_grad_()
    out, weights = hf.attend(
        "anymax_softmax", torch.nn.Module(), q, k, v, None, sinks=sinks, is_causal=False, output_attentions=True
    )
    scores = torch.cat([q @ k.mT / 2, sinks], -1)
    want = scores.softmax(-1)[..., :-1]
    torch.testing.assert_close(weights, want)
    torch.testing.assert_close(out, (want @ v).transpose(1, 2))
    got = torch.autograd.grad(out.square().sum(), sinks, retain_graph=True)[0]
    torch.testing.assert_close(got, torch.autograd.grad((want @ v).square().sum(), sinks)[0])


NO_NAMES = ("anymax_ranks", "anymax_bounded", "anymax_ratio", "sparsemax")  # no weights of keys, and no name
TRIED = {
    "Bloom": {"n_layer": 1}, "Deberta": {"num_hidden_layers": 1, "intermediate_size": 48},
    "GPTJ": {"rotary_dim": 4, "n_layer": 1, "bos_token_id": 1, "eos_token_id": 2},
}  # fmt: skip


def refused(kind, config, name="anymax_softmax"):
    words = rf"{name}: {kind.__name__} has attention code of its own; the models that work"
    with pytest.raises(ValueError, match=words):
        kind._from_config(config, attn_implementation=name)


@pytest.mark.parametrize("model", TRIED)
def test_a_model_is_served_or_refused(model):
    """transformers moves models to its attention interface from version to version: its source says whose attention goes through it."""
    kind, config = getattr(transformers, f"{model}Model"), getattr(transformers, f"{model}Config")
    config = config(vocab_size=50, hidden_size=32, num_attention_heads=4, **TRIED[model])
    if "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(sys.modules[kind.__module__]):
        same_as_eager(lambda: (kind, config), lambda made: made(tokens())[0])
    else:
        refused(kind, config)
