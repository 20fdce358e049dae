"""log p and entropy of tokens under causal models of transformers."""

from __future__ import annotations

import copy

import pytest
from hf_models import SMALL, gemma2, gpt2, its_own_warnings, llama, torch, transformers
from laws import close
from processes import all_right
from torch.nn.parallel import DistributedDataParallel as DDP

import anymax as A

TOKENS = torch.tensor([[5, 7, 11, 2, 9, 4], [3, 8, 8, 1, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])


def cohere(**more):
    options = {"num_key_value_heads": 2, "logit_scale": 0.25, "pad_token_id": 0}
    return transformers.CohereForCausalLM, transformers.CohereConfig(**SMALL, **options, **more)


def granite(**more):
    return transformers.GraniteForCausalLM, transformers.GraniteConfig(
        **SMALL, num_key_value_heads=2, logits_scaling=3.0, **more
    )


def opt(**more):
    """Its model calls the decoder within its base model."""
    options = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48}
    return transformers.OPTForCausalLM, transformers.OPTConfig(**options, word_embed_proj_dim=16, dropout=0.0, **more)


def bert(**more):
    """It has a layer between its base model and its output layer."""
    config = transformers.BertConfig(**SMALL, is_decoder=True, max_position_embeddings=64, hidden_act="relu", **more)
    return transformers.BertLMHeadModel, config


MODELS = {
    "opt": opt, "bert": bert,
    "llama": llama, "tied": lambda: llama(tie_word_embeddings=True), "gpt2": gpt2, "cohere": cohere, "granite": granite,
    "gemma2": lambda: gemma2(final_logit_softcapping=0.5),
}  # fmt: skip


def build(name):
    torch.manual_seed(0)
    kind, config = MODELS[name]()
    model = kind(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4.0)  # so that the logits differ
    return model


@its_own_warnings
@pytest.mark.whole(lambda name: name not in ("llama", "gemma2", "bert"))
@pytest.mark.parametrize("name", MODELS)
def test_are_those_of_the_logits(name):
    model = build(name)
    for mapping, temperature in (("softmax", None), ("softmax", 0.7), ("entmax15", 0.7)):
        got = A.hf.token_statistics(model, TOKENS, MASK, mapping=mapping, temperature=temperature)
        logits = model(input_ids=TOKENS, attention_mask=MASK).logits[:, :-1] / (temperature or 1.0)
        want = A.log_prob_entropy(mapping, logits, TOKENS[:, 1:])
        there = MASK[:, 1:] == 1
        for one, other in zip(got, want):
            close(one.detach()[there].exp(), other.detach()[there].exp(), 1e-4)
            assert not one[~there].any()
        if mapping == "softmax":
            weights = list(model.parameters())
            grads = torch.autograd.grad(got.log_prob.sum() + got.entropy.sum(), weights, allow_unused=True)
            sums = (want[0][there].sum() + want[1][there].sum(), weights)
            for one, other in zip(grads, torch.autograd.grad(*sums, allow_unused=True)):
                assert (one is None) == (other is None)
                if one is not None:
                    close(one, other, 1e-3)


SUPPORT = torch.arange(50).repeat(10), torch.arange(0, 501, 50)  # all classes of ten rows
LEFT = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])


@its_own_warnings
@pytest.mark.parametrize(
    "mask", [MASK, LEFT, LEFT.bool(), torch.zeros_like(MASK)], ids=["right", "left", "boolean", "all"]
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mapping": A.Sink("softmax", torch.tensor(0.2))},
        {"mapping": A.Entmax(torch.full((2, 5, 1), 1.5))},
        {"mask": torch.arange(50) > 4},
        {"temperature": torch.full((2, 5), 0.7)},
        {"support": SUPPORT},
    ],
    ids=["plain", "sink", "alpha", "mask", "temperature", "support"],
)
def test_padding_has_no_statistics(options, mask):
    """Nor has the first token after padding, which has none before it."""
    model = build("llama")
    got = A.hf.token_statistics(model, TOKENS, mask, **options)
    logits = model(input_ids=TOKENS, attention_mask=mask).logits[:, :-1].detach()
    given = dict(options)
    logits = logits / given.pop("temperature", torch.ones(1))[..., None]
    want = A.log_prob_entropy(given.pop("mapping", "softmax"), logits, TOKENS[:, 1:], **given)
    there = mask.bool()[:, 1:] & mask.bool()[:, :-1]
    for one, other in zip(got, want):
        close(one.detach()[there].exp(), other[there].exp(), 1e-4)
        assert not one[~there].any()
    sum(got).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@its_own_warnings
def test_the_support_of_a_sampler_under_a_soft_cap():
    model = build("gemma2")
    logits = model(input_ids=TOKENS, attention_mask=MASK).logits[:, :-1].detach()
    kept = A.compose(A.temperature(0.7), A.topk(12))
    support = A.sample("softmax", logits, transform=kept, return_support=True, generator=0).support
    got = A.hf.token_statistics(model, TOKENS, MASK, support=support, temperature=0.7)
    there = MASK[:, 1:] == 1
    target = torch.where(there, TOKENS[:, 1:], -1)
    log_p, h = A.log_prob_entropy("softmax", logits, target, support=support, temperature=0.7)
    assert (log_p[there] > -torch.inf).any()
    close(got.log_prob.detach().exp(), log_p.exp(), 1e-4)
    close(got.entropy.detach()[there], h[there], 1e-4)


@its_own_warnings
def test_the_last_tokens_and_wrapped_models():
    model = build("llama")
    whole = A.hf.token_statistics(model, TOKENS, MASK)
    for wrapped in (model, torch.nn.DataParallel(model)):
        part = A.hf.token_statistics(wrapped, TOKENS, MASK, last=3)
        for one, other in zip(part, whole):
            close(one.detach(), other[:, -3:].detach(), 1e-6)
    assert A.hf.token_statistics(model, TOKENS, last=0).log_prob.shape == (2, 0)


@its_own_warnings
def test_a_support_of_the_sampler():
    model = build("llama")
    ids = torch.stack([TOKENS[:, 1:].flatten(), (TOKENS[:, 1:].flatten() + 3) % 50], 1)
    support = ids.flatten(), torch.arange(0, ids.numel() + 1, 2)
    got = A.hf.token_statistics(model, TOKENS, support=support)
    logits = model(input_ids=TOKENS).logits[:, :-1].reshape(10, 50)
    want = A.log_prob_entropy("softmax", logits, TOKENS[:, 1:].flatten(), support=support)
    for one, other in zip(got, want):
        close(one.detach().flatten(), other.detach(), 1e-4)


class Adapter(torch.nn.Module):
    """As PEFT wraps a model: it calls the forward method of the model in it, and most parameters are frozen."""

    def __init__(self, model):
        super().__init__()
        self.base_model = model
        for name, p in model.named_parameters():
            p.requires_grad_("q_proj" in name)

    def get_base_model(self):
        return self.base_model

    def forward(self, *args, **options):
        return self.base_model.forward(*args, **options)


@pytest.fixture(scope="module")
def group():
    """A process group of this process, in which nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def halved(state, bucket):
    out = torch.futures.Future()
    out.set_result(bucket.buffer() / 2)
    return out


@its_own_warnings
@pytest.mark.parametrize(
    "options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=lambda o: next(iter(o), "plain")
)
@pytest.mark.parametrize("name", ["llama", "tied", "adapter"])
def test_ddp_reduces_the_gradients(name, options, group):
    """Where it reduces them, it halves them here."""
    one = build(name if name in MODELS else "llama")
    one = Adapter(one) if name == "adapter" else one

    def grads(model):
        model.zero_grad()
        log_p, entropy = A.hf.token_statistics(model, TOKENS, LEFT)
        (log_p - 0.1 * entropy).sum().backward()
        return [p.grad for p in model.parameters() if p.requires_grad]

    model = DDP(copy.deepcopy(one), **options)
    model.register_comm_hook(None, halved)
    want = grads(one)
    for _ in range(2):
        for got, g in zip(grads(model), want, strict=True):
            assert torch.equal(2 * got, g)
    if "static_graph" not in options:
        with model.no_sync():
            assert all(map(torch.equal, grads(model), want))


@its_own_warnings
def test_a_compiled_model_is_not_compiled_again():
    from torch._dynamo.testing import CompileCounter

    graphs = CompileCounter()
    model, one = torch.compile(build("llama"), backend=graphs), build("llama")
    model(TOKENS)
    compiled = graphs.frame_count
    for got, want in zip(A.hf.token_statistics(model, TOKENS), A.hf.token_statistics(one, TOKENS)):
        assert torch.equal(got, want)
    assert graphs.frame_count == compiled > 0


SPREAD = """
import copy
from hf_models import llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
import anymax as A
from test_hf_tokens import Adapter
mesh = init_device_mesh("cpu", (size,))
torch.manual_seed(0)
texts, there = torch.randint(50, (2 * size, 6)), torch.ones(2 * size, 6)
there[0, :2] = there[3, 4:] = 0
mine = slice(2 * rank, 2 * rank + 2)  # each process has texts of its own


def grads(model, *parts):
    model.zero_grad()
    for part in parts[:-1]:
        with model.no_sync():
            loss(model, part).backward()
    loss(model, parts[-1]).backward()
    found = [p.grad for p in model.parameters() if p.requires_grad]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in found]


def loss(model, part):
    log_p, entropy = A.hf.token_statistics(model, texts[part], there[part])
    return (log_p - 0.1 * entropy).sum()


def layers(model):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)


def layers_and_head(model):
    layers(model)
    fully_shard([model.model.norm, model.lm_head], mesh=mesh)


def close(got, want):
    for g, h in zip(got, want, strict=True):
        assert torch.allclose(g, h, atol=1e-12)


for tied in (False, True):
    kind, config = llama(tie_word_embeddings=tied)
    one = kind(config).double()
    want = [g / size for g in grads(one, slice(None))]
    for parts in (lambda model: None, layers) if tied else (lambda model: None, layers, layers_and_head):
        model = copy.deepcopy(one)
        parts(model)
        fully_shard(model, mesh=mesh)
        for _ in range(2):
            close(grads(model, mine), want)
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        model = DDP(copy.deepcopy(one), **options)
        for _ in range(2):
            close(grads(model, mine), want)
        if "static_graph" not in options:
            close(grads(model, slice(mine.start, mine.start + 1), slice(mine.start + 1, mine.stop)), want)
    adapted = Adapter(copy.deepcopy(one))
    close(grads(DDP(copy.deepcopy(adapted)), mine), [g / size for g in grads(adapted, slice(None))])
kind, config = llama()
one = kind(config).double()
model = copy.deepcopy(one)
parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})
same = torch.arange(12).reshape(2, 6)
model.zero_grad(), one.zero_grad()
for mask in (None, torch.tensor([[1] * 6, [1] * 4 + [0] * 2])):
    got, want = (A.hf.token_statistics(m, same, mask) for m in (model, one))
    for a, b in zip(got, want):
        assert type(a) is torch.Tensor
        assert torch.allclose(a, b)
for r in (got, want):
    (r.log_prob.sum() + r.entropy.sum()).backward()
assert model.lm_head.weight.placements == (Shard(0),)
for p, q in zip(model.parameters(), one.parameters()):
    g = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
    assert torch.allclose(g, q.grad, atol=1e-12)
print("right")
dist.destroy_process_group()
"""


@pytest.mark.whole
@pytest.mark.long
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="no gloo")
def test_of_a_model_that_is_spread_over_processes():
    """By DDP and by FSDP, and with a head whose vocabulary is split: the gradients are those of one process with all texts."""
    all_right(2, SPREAD)
