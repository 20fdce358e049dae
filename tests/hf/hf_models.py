"""Small models of transformers, and the same with a map in softmax's place."""

from __future__ import annotations

import contextlib
import math

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import anymax as A
from anymax import Entmax, Softmax, Sparsemax, SparseSoftmax, Taylor, hf

hf.register()

# transformers' own
its_own_warnings = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:torch"
)


SMALL = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
MAPS = {
    "sparsemax": (Sparsemax(), {}), "entmax15": (Entmax(1.5), {}), "entmax": (Entmax(1.2), {"alpha": 1.2}), "taylor": (Taylor(2), {}),
    "softmax": (Softmax(), {}), "sparse_softmax": (SparseSoftmax(k=3), {"k": 3}),
}  # fmt: skip


def llama(**more):
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**SMALL, num_key_value_heads=2, **more)


def gpt2(**more):
    options = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return transformers.GPT2LMHeadModel, transformers.GPT2Config(**options, bos_token_id=1, eos_token_id=2, **more)


def bert(**more):
    return transformers.BertForMaskedLM, transformers.BertConfig(**SMALL, max_position_embeddings=64, **more)


def t5(**more):
    options = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration, transformers.T5Config(**options, decoder_start_token_id=0, **more)


def bart(**more):
    options = {
        "vocab_size": 50, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    }  # fmt: skip
    return transformers.BartForConditionalGeneration, transformers.BartConfig(**options, **more)


def gemma2(**more):
    """Soft-capped scores, and a sliding window in every second layer."""
    options = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 1.5}
    return transformers.Gemma2ForCausalLM, transformers.Gemma2Config(**SMALL, **options, **more)


def gpt_oss(**more):
    """A sink for each head."""
    options = {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "sliding_window": 4,
    }
    return transformers.GptOssForCausalLM, transformers.GptOssConfig(**SMALL, **options, **more)


def mistral(**more):
    options = {"num_key_value_heads": 2, "sliding_window": 4}
    return transformers.MistralForCausalLM, transformers.MistralConfig(**SMALL, **options, **more)


def qwen2(**more):
    options = {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    return transformers.Qwen2ForCausalLM, transformers.Qwen2Config(**SMALL, **options, **more)


def whisper(**more):
    """Of speech: no mask in its encoder, a causal one in its decoder."""
    options = {
        "vocab_size": 50, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8, "max_source_positions": 20,
        "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    }  # fmt: skip
    return transformers.WhisperForConditionalGeneration, transformers.WhisperConfig(**options, **more)


DECODERS = {"llama": llama, "gpt2": gpt2, "gemma2": gemma2, "gpt_oss": gpt_oss}
PAIRS = {"t5": t5, "bart": bart}
MODELS = {**DECODERS, **PAIRS, "bert": bert}
MORE = {"mistral": mistral, "qwen2": qwen2, "whisper": whisper}


def build(model, implementation, seed=0, **more):
    kind, config = {**MODELS, **MORE}[model](**more)
    torch.manual_seed(seed)
    made = kind._from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for name, parameter in made.named_parameters():  # scores large enough for the maps to differ
            if any(word in name for word in ("q_proj", "k_proj", "query", "key", "c_attn", ".q.", ".k.")):
                parameter.mul_(8.0)
            if "sinks" in name:
                parameter.normal_()
    return made.eval().double()  # so that what differs is a mistake, not rounding


@contextlib.contextmanager
def in_softmax(mapping):
    """The models' eager code with another map."""

    def plain(x, dim=-1, dtype=None, **_):
        hidden = x <= 0.5 * torch.finfo(x.dtype).min
        x = x.masked_fill(hidden, -math.inf)
        return A.apply(mapping, x if dtype is None else x.to(dtype), dim=dim)

    kept = torch.nn.functional.softmax
    torch.nn.functional.softmax = plain
    try:
        yield
    finally:
        torch.nn.functional.softmax = kept


def tokens(rows=2, n=9, seed=1):
    return torch.randint(3, 50, (rows, n), generator=torch.Generator().manual_seed(seed))


def padded(n=9):
    mask = torch.ones(2, n, dtype=torch.long)
    mask[0, :3] = 0
    return mask


def inputs(model):
    out = {"input_ids": tokens(), "attention_mask": padded() if model in DECODERS else padded().flip(-1)}
    if model in PAIRS:
        out["decoder_input_ids"] = tokens(n=6, seed=2)
    return out


def logits(model, given):
    with torch.no_grad():
        return model(**given).logits
