"""Transformers with any map in their attention, token for token beside the models' own eager code."""

from __future__ import annotations

import contextlib
import inspect
import sys

import pytest
from hf_models import (
    DECODERS,
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


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("model", [m for m in MODELS if m != "gpt_oss"])  # whose router calls softmax too
def test_logits_are_those_of_the_plain_model(model, name):
    mapping, parameters = MAPS[name]
    ours = build(model, f"anymax_{name}", anymax=parameters)
    plain = build(model, "eager")
    given = inputs(model)
    real = given["attention_mask"].bool() if model not in PAIRS else slice(None)
    with torch.no_grad():
        got = ours(**given).logits
        with in_softmax(mapping):
            want = plain(**given).logits
        with in_softmax(Softmax()):
            other = plain(**given).logits
    torch.testing.assert_close(got[real], want[real], atol=2e-5, rtol=1e-4)
    assert name == "softmax" or (got[real] - other[real]).abs().max() > 1e-4


def test_sinks_are_those_of_the_model():
    ours, plain = (build("gpt_oss", name).float() for name in ("anymax_softmax", "eager"))
    given = inputs("gpt_oss")
    real = given["attention_mask"].bool()
    with torch.no_grad():
        torch.testing.assert_close(ours(**given).logits[real], plain(**given).logits[real], atol=2e-5, rtol=1e-4)


@pytest.mark.thin(4)
@pytest.mark.parametrize("name", ["sparsemax", "entmax15", "taylor"])
@pytest.mark.parametrize("model", [m for m in MODELS if m not in ("bert", "gpt_oss")])
def test_generation_with_a_cache_token_for_token(model, name):
    ours, plain = build(model, f"anymax_{name}"), build(model, "eager")
    given = {"input_ids": tokens(n=7), "attention_mask": padded(7) if model in DECODERS else padded(7).flip(-1)}
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    cached = ours.generate(**given, use_cache=True, **options)
    torch.testing.assert_close(cached, ours.generate(**given, use_cache=False, **options))
    with in_softmax(MAPS[name][0]):
        torch.testing.assert_close(cached, plain.generate(**given, use_cache=True, **options))


def test_generation_with_a_static_cache_and_beams():
    model = build("llama", "anymax_entmax15")
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}
    given = {"input_ids": tokens(n=7), "attention_mask": padded(7)}
    want = model.generate(**given, do_sample=False, **options)
    torch.testing.assert_close(
        model.generate(**given, do_sample=False, cache_implementation="static", disable_compile=True, **options), want
    )
    assert model.generate(**given, num_beams=3, **options).shape == (2, 13)


@pytest.mark.parametrize("padding", ["left", "right", None])
@pytest.mark.parametrize("model", MORE)
def test_windows_padding_and_speech(model, padding):
    """Sliding windows with either padding and with none; and a name that is set when the model is there already is the same."""
    given: dict = {"input_ids": tokens()}
    if model == "whisper":
        if padding is not None:
            pytest.skip("it has no mask")
        sound = torch.randn(2, 8, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        given = {"input_features": sound, "decoder_input_ids": tokens(n=6)}
    elif padding is not None:
        given["attention_mask"] = padded() if padding == "left" else padded().flip(-1)
    real = given["attention_mask"].bool() if "attention_mask" in given else slice(None)
    got = logits(build(model, "anymax_sparsemax"), given)
    with in_softmax(Sparsemax()):
        want = logits(build(model, "eager"), given)
    torch.testing.assert_close(got[real], want[real], atol=2e-5, rtol=1e-4)
    late = build(model, "eager")
    late.set_attn_implementation("anymax_sparsemax")
    torch.testing.assert_close(logits(late, given), got, atol=0, rtol=0)
    late.set_attn_implementation("eager")
    with in_softmax(Softmax()):
        assert (logits(late, given)[real] - want[real]).abs().max() > 1e-4


@pytest.mark.thin(2)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("model", ["mistral", "gemma2", "gpt2"])
def test_caches_token_for_token(model, cache):
    given = {"input_ids": tokens(n=7), "attention_mask": padded(7)}
    options = {
        "max_new_tokens": 5,
        "min_new_tokens": 5,
        "do_sample": False,
        "pad_token_id": 0,
        "cache_implementation": cache,
    }
    options |= {"disable_compile": True, "return_dict_in_generate": True, "output_scores": True}
    got = build(model, "anymax_entmax15").generate(**given, **options)
    with in_softmax(Entmax(1.5)):
        want = build(model, "eager").generate(**given, **options)
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(got.scores, want.scores):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


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


def test_a_first_guess_is_answered():
    with pytest.raises(
        TypeError, match="it registers all maps for attention; name one as attn_implementation='anymax_sparsemax'"
    ):
        hf.register("sparsemax")  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match=r"did you mean anymax\.hf\.LogitsProcessor\?"):
        _ = hf.LogitProcessor  # type: ignore[attr-defined]


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


@pytest.mark.skipif(not hasattr(transformers, "DeepseekV32Config"), reason="a model of later transformers")
def test_a_model_that_chooses_its_keys():
    """DeepSeek-V3.2 tells other implementations than its own which keys each query may see, beside the mask."""

    def make():
        heads = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
        experts = {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
        }
        index = {"index_topk": 3, "index_n_heads": 2, "index_head_dim": 8}
        config = transformers.DeepseekV32Config(
            **SMALL, **heads, **experts, **index, num_key_value_heads=4, first_k_dense_replace=1
        )
        return transformers.DeepseekV32ForCausalLM, config

    same_as_eager(make, lambda model: model(tokens()).logits)


@pytest.mark.skipif(not hasattr(transformers, "Gemma4TextConfig"), reason="a model of later transformers")
def test_a_model_that_leaves_out_queries_late():
    """Gemma 4 keeps the last queries alone in the layers that share keys, after the masks are made."""

    def make():
        sizes = {"num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 8}
        more = {
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 4,
        }
        options = (
            SMALL | sizes | more | {"num_hidden_layers": 4, "vocab_size_per_layer_input": 50, "eos_token_id": None}
        )
        return transformers.Gemma4ForCausalLM, transformers.Gemma4TextConfig(**options)

    def run(model):
        static = {
            "cache_implementation": "static",
            "disable_compile": True,
            "output_logits": True,
            "return_dict_in_generate": True,
        }
        found = model.generate(tokens(), max_new_tokens=4, do_sample=False, **static)
        return [model(tokens(), logits_to_keep=3).logits, torch.stack(found.logits)]

    same_as_eager(make, run)


def test_a_model_that_does_not_say_which_layers_are_causal():
    """NLLB-MoE supports no attention but its own by its flags: its layers' `is_causal` is never set, so that it needs every mask."""
    sizes = {
        f"{side}_{what}": n
        for side in ("encoder", "decoder")
        for what, n in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 48))
    }
    config = transformers.NllbMoeConfig(vocab_size=50, d_model=32, num_experts=2, **sizes)
    make = lambda: (transformers.NllbMoeForConditionalGeneration, config)  # noqa: E731
    same_as_eager(make, lambda model: model(tokens(), decoder_input_ids=tokens(n=6, seed=2)).logits)


def test_names_and_errors():
    assert {"anymax_sparsemax", "anymax_entmax15", "anymax_entmax", "anymax_taylor", "anymax_normmax"} <= set(
        hf.register()
    )
    for name in ("anymax_ranks", "anymax_bounded", "anymax_ratio", "sparsemax"):  # no weights of keys, and no name
        assert name not in transformers.AttentionInterface().valid_keys()
        with pytest.raises(
            ValueError, match=f"'{name}' is not the name of a map for attention; the names are anymax_budget"
        ):
            hf.attend(name, torch.nn.Module(), *[torch.zeros(1, 2, 3, 4)] * 3, None)
    with pytest.raises(ValueError, match="anymax_sparsemaxx"):
        build("llama", "anymax_sparsemaxx")
    with pytest.raises(TypeError, match=r"anymax_sparsemax: the model's config has anymax=.*alpha"):
        build("llama", "anymax_sparsemax", anymax={"alpha": 1.5})(**inputs("llama"))
    with pytest.raises(ValueError, match="3 numbers in anymax for 4 heads"):
        build("llama", "anymax_entmax", anymax={"alpha": [1.0, 1.5, 2.0]})(**inputs("llama"))
    with pytest.raises(ValueError, match="how many keys to keep"):
        build("llama", "anymax_sparse_softmax")(**inputs("llama"))
    for given, words in (
        (5, r"anymax=5; it must be a dict of the map's parameters"),
        ({"scalable": 3}, "scalable=3 in anymax; it must be True or a dict"),
        ({"temperature": "cold"}, "temperature: T must be a number"),
    ):
        with pytest.raises(TypeError, match=words):
            build("llama", "anymax_entmax15", anymax=given)(**inputs("llama"))
    plain = logits(build("llama", "anymax_entmax15"), inputs("llama"))
    off = logits(build("llama", "anymax_entmax15", anymax={"scalable": False, "temperature": None}), inputs("llama"))
    torch.testing.assert_close(off, plain, atol=0, rtol=0, equal_nan=True)
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="paged cache"):
        hf.attend("anymax_sparsemax", torch.nn.Module(), q, q, q, None, cache=object())
    with pytest.raises(
        ValueError, match="anymax_sparsemax: Module has blocks of keys, which anymax does not support; use 'eager'"
    ):
        hf.attend("anymax_sparsemax", torch.nn.Module(), q, q, q, None, block_indices=q)
    with pytest.raises(ValueError, match="sinks for each head and for each query; give one of them"):
        hf.attend("anymax_sparsemax", torch.nn.Module(), q, q, q, None, sinks=q[..., :1], s_aux=torch.zeros(2))


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


def test_models_with_attention_code_of_their_own_are_an_error():
    """They would go on with softmax (DeBERTa), or add a boolean mask to its scores (Bloom)."""

    class Own(transformers.BertModel):
        @classmethod
        def _can_set_attn_implementation(cls):
            return False

    config = transformers.BertConfig(**SMALL)
    for name in ("anymax_sparsemax", "anymax_softmax"):
        refused(Own, config, name)
    assert Own._from_config(config, attn_implementation="eager")(tokens())[0].shape == (2, 9, 32)
    refused(
        transformers.LongT5Model, transformers.LongT5Config(d_model=32, num_layers=1)
    )  # its encoder's local attention
