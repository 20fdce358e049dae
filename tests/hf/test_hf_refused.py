"""The words of `anymax.hf` to bad input: a row a mistake."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hf_models import build, inputs, its_own_warnings, llama, t5, tokens, torch, transformers
from refusals import each, refuses

import anymax as A
from anymax import Entmax, Sparsemax, Taylor, hf

pytestmark = its_own_warnings

# -- attention ----------------------------------------------------------------------------------------------------------------------

Q = torch.zeros(1, 2, 3, 4)


def ask(name="anymax_sparsemax", **options):
    """A call of attention by its name."""
    return hf.attend(name, torch.nn.Module(), Q, Q, Q, None, **options)


def run(name, anymax=None):
    """A model whose config has these parameters, called."""
    return build("llama", name, **({} if anymax is None else {"anymax": anymax}))(**inputs("llama"))


def longt5(**options):
    return transformers.LongT5Model._from_config(transformers.LongT5Config(d_model=32, num_layers=1), **options)


ATTENTION = {
    "a map in register": (lambda: hf.register("sparsemax"), TypeError, "takes no arguments, .*all maps for .*='anymax_sparsemax'"),
    "a name that is near": (lambda: hf.LogitProcessor, AttributeError, r"did you mean anymax\.hf\.LogitsProcessor\?"),
    **{
        f"the name {name}": (lambda name=name: ask(name), ValueError, f"'{name}' is not the name of a map for attention; the names are")
        for name in ("anymax_ranks", "anymax_bounded", "anymax_ratio", "sparsemax")
    },
    "a model's name": (lambda: build("llama", "anymax_sparsemaxx"), ValueError, "anymax_sparsemaxx"),
    "alpha of sparsemax": (lambda: run("anymax_sparsemax", {"alpha": 1.5}), TypeError, "the model's config has anymax=.*alpha"),
    "alpha of 0": (lambda: run("anymax_entmax", {"alpha": 0}), ValueError, "the model's config has anymax=.*alpha must be above 0"),
    "three heads": (lambda: run("anymax_entmax", {"alpha": [1.0, 1.5, 2.0]}), ValueError, "3 numbers in anymax for 4 heads"),
    "no k": (lambda: run("anymax_sparse_softmax"), ValueError, "how many keys to keep"),
    "a number": (lambda: run("anymax_entmax15", 5), TypeError, "anymax=5; it must be a dict of the map's parameters"),
    "scalable": (lambda: run("anymax_entmax15", {"scalable": 3}), TypeError, "scalable=3 in anymax; it must be True or a dict"),
    "temperature": (lambda: run("anymax_entmax15", {"temperature": "cold"}), TypeError, "temperature: T must be a number"),
    "local attention": (lambda: longt5(attn_implementation="anymax_softmax"), ValueError, "LongT5Model has attention code of its own"),
    "a paged cache": (lambda: ask(cache=object()), ValueError, "paged cache"),
    "blocks of keys": (lambda: ask(block_indices=Q), ValueError, "anymax_sparsemax: Module has blocks of keys, .* use 'eager'"),
    "two kinds of sinks": (lambda: ask(sinks=Q[..., :1], s_aux=torch.zeros(2)), ValueError, "sinks for each head and for each query"),
}  # fmt: skip


# -- decoding -----------------------------------------------------------------------------------------------------------------------


def generate(processor=None, draw=None, **options):
    more = {} if draw is None else {"custom_generate": draw}
    more |= {} if processor is None else {"logits_processor": [processor]}
    return build("gpt2", "eager").generate(tokens(1, 5), max_new_tokens=3, pad_token_id=0, **more, **options)


def minding_an_offset(**options):
    return generate(hf.LogitsProcessor(Taylor(2)), num_beams=2, **options)


class Streamer:
    def put(self, value): ...

    def end(self): ...


OFFSET, SEED = (
    r"Taylor.* changes with a common offset",
    r"generator: torch tensors need a torch\.Generator, or an integer seed",
)
DECODING = {
    **{
        f"{make.__name__}, {name}": (lambda make=make, given=given: make(*given[0], **given[1]), error, words)
        for make in (hf.LogitsProcessor, hf.sample)
        for name, given, error, words in (
            ("top_p", ((), {"top_p": 0.9}), TypeError, r"no option 'top_p' \(write transform=anymax\.topp\(0\.9\)\)"),
            ("no distribution", ((), {"mapping": A.Elementwise()}), ValueError, "gives each class a number of its own"),
            ("two maps", ((Sparsemax(), Entmax(1.5)), {}), TypeError, "got two maps"),
            ("a number", ((0.9,), {}), TypeError, r"transform must be a function scores -> scores such as anymax\.topp"),
            ("a verb", ((A.sparsemax,), {}), TypeError, "got the function sparsemax; give its map, by name: 'sparsemax'"),
            ("a class", ((Entmax,), {}), TypeError, r"got the class Entmax; add \(\): Entmax\(\)"),
            ("a list", (([A.topk(3), A.topp(0.9)],), {}), TypeError, r"several of them, as in anymax\.compose\(anymax\.topk"),
            ("a maker", ((A.topp,), {}), TypeError, r"the function topp, which makes a transform; call it: topp\(\.\.\.\)"),
            ("a name that comes first", (("sparsemax",), {}), TypeError, "the name of a map is mapping='sparsemax'"),
            ("no name of a map", ((A.topk(3), "sparsmax"), {}), ValueError, "did you mean 'sparsemax'"),
            ("no map", ((A.topk(3), 2), {}), TypeError, "expected a mapping such as"),
        )
    },
    "a sampler that is not made": (lambda: generate(draw=hf.sample), TypeError, r"custom_generate=anymax\.hf\.sample\(\.\.\.\)"),
    "beams": (lambda: generate(draw=hf.sample(), num_beams=3), ValueError, "draws one token at a time, not num_beams=3"),
    "no token": (lambda: generate(draw=hf.sample(lambda x: x - math.inf)), ValueError, "sequence 0 has no token to draw"),
    "an offset": (lambda: minding_an_offset(do_sample=False), ValueError, OFFSET),
    "an offset and a penalty": (lambda: minding_an_offset(repetition_penalty=1.3), ValueError, OFFSET),
    "an offset and a bias": (lambda: minding_an_offset(sequence_bias={(7,): 2.0}), ValueError, OFFSET),
    "an offset and draws": (lambda: minding_an_offset(do_sample=True, top_k=0), ValueError, OFFSET),
    **{
        f"the seed {seed}": (lambda seed=seed: generate(draw=hf.sample(generator=seed)), TypeError, SEED)
        for seed in ("seed", True, 7.0, np.random.default_rng(0), [1, "seed"])
    },
    "an assistant": (
        lambda: generate(draw=hf.sample(), assistant_model=build("gpt2", "eager")), ValueError,
        "draws one token at a time, and takes no drafts; leave assistant_model",
    ),
    "drafts of the prompt": (lambda: generate(draw=hf.sample(), prompt_lookup_num_tokens=2), ValueError, "takes no drafts"),
    "two streamers": (
        lambda: generate(draw=hf.sample(streamer=Streamer()), streamer=Streamer()), ValueError,
        "generate has a streamer and sample has one; give one of them",
    ),
}  # fmt: skip


# -- tokens -------------------------------------------------------------------------------------------------------------------------

TOKENS = tokens(2, 6)


def causal():
    kind, config = llama()
    return kind(config)


def with_more_logits():
    """A model whose logits are not those of its output layer alone."""
    kind, config = llama()

    class Other(kind):
        def forward(self, *args, **options):
            out = super().forward(*args, **options)
            out.logits = out.logits + 1.0
            return out

    return Other(config)


def with_an_adapted_head():
    class Adapted(torch.nn.Linear):
        def __init__(self, inner):
            super().__init__(inner.in_features, inner.out_features, bias=False)
            self.weight, self.down = inner.weight, torch.nn.Parameter(torch.zeros(2, inner.in_features))

    model = causal()
    model.set_output_embeddings(Adapted(model.get_output_embeddings()))
    return model


def statistics(*given, of=causal, **options):
    return hf.token_statistics(of(), *given, **options)


STATISTICS = {
    "one text": (lambda: statistics(TOKENS[0]), ValueError, r"integers \[texts, length\]"),
    "last": (lambda: statistics(TOKENS, last=6), ValueError, "last must be a number of tokens from 0 to 5"),
    "a mask": (lambda: statistics(TOKENS, torch.ones(1, 6)), ValueError, "attention_mask of shape"),
    "tau": (lambda: statistics(TOKENS, tau=1.0), TypeError, "no option 'tau'"),
    "a pair of models": (lambda: statistics(TOKENS, of=lambda: t5()[0](t5()[1])), TypeError, "expected a causal language model"),
    "other logits": (lambda: statistics(TOKENS, of=with_more_logits), ValueError, "in a way that is known here"),
    "an adapted head": (lambda: statistics(TOKENS, of=with_an_adapted_head), TypeError, "further parameters, down"),
    "inputs": (lambda: statistics(TOKENS, inputs={"use_cache": True}), TypeError, "inputs has use_cache"),
}  # fmt: skip


LOSS = {
    "labels and shifted ones": (lambda: hf.loss(causal(), TOKENS, labels=TOKENS, shift_labels=TOKENS), TypeError, "not both"),
    "labels of another shape": (
        lambda: hf.loss(causal(), TOKENS, labels=TOKENS[:, 1:]), ValueError,
        r"loss: labels must be integers of the shape of input_ids, \(2, 6\)",
    ),
    "labels that are p": (lambda: hf.loss(causal(), TOKENS, labels=TOKENS.float()), ValueError, "labels must be integers"),
    "a sum by items": (
        lambda: hf.loss(causal(), TOKENS, num_items_in_batch=3, reduction="none"), ValueError, "num_items_in_batch divides a sum",
    ),
    "a temperature of 0": (lambda: hf.loss(causal(), TOKENS, temperature=0.0), ValueError, "loss: temperature must be above 0"),
    "smoothing": (lambda: hf.loss(causal(), TOKENS, smoothing=0.1), TypeError, "no option 'smoothing'"),
    "in a trainer": (lambda: hf.compute_loss(smoothing=0.1), TypeError, "compute_loss has no option 'smoothing'"),
    "a model for a trainer": (lambda: hf.compute_loss(None, {}), TypeError, "makes the method of a Trainer: compute_loss = anymax"),
    "a bias": (lambda: hf.loss(causal(), TOKENS, linear_bias=TOKENS), TypeError, "no option 'linear_bias'"),
    "an encoder": (lambda: hf.loss(t5()[0](t5()[1]), TOKENS), TypeError, "loss: expected a causal .* to anymax.linear_loss"),
    "other logits, a loss": (lambda: hf.loss(with_more_logits(), TOKENS), ValueError, r"loss: .* use anymax\.fenchel_young with its"),
    "no model": (lambda: hf.loss(None, TOKENS), TypeError, "loss: expected a causal language model of transformers .* got NoneType"),
}  # fmt: skip


@each(ATTENTION | DECODING | STATISTICS | LOSS)
def test_refused(call, error, words):
    refuses(call, error, words)


@pytest.mark.parametrize("name", ["anymax_sparsemax", "anymax_softmax"])
def test_a_model_with_attention_code_of_its_own(name):
    """It would go on with softmax (DeBERTa), or add a boolean mask to its scores (Bloom)."""

    class Own(transformers.BertModel):
        @classmethod
        def _can_set_attn_implementation(cls):
            return False

    config = transformers.BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    with pytest.raises(ValueError, match=f"{name}: Own has attention code of its own; the models that work"):
        Own._from_config(config, attn_implementation=name)
    assert Own._from_config(config, attn_implementation="eager")(tokens())[0].shape == (2, 9, 32)
