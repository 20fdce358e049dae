"""The loss of causal models of transformers under any map."""

from __future__ import annotations

import copy
import importlib.util
import types

import pytest
from hf_models import SMALL, its_own_warnings, torch, transformers
from laws import close
from processes import all_right
from test_hf_tokens import LEFT, MASK, MODELS, TOKENS, build

import anymax as A

pytestmark = its_own_warnings
LABELS = TOKENS.masked_fill(MASK == 0, -100).index_fill(1, torch.tensor([1]), -100)


def mixtral():
    sizes = {
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
    }
    return transformers.MixtralForCausalLM, transformers.MixtralConfig(**SMALL, **sizes)


def grads(value, model):
    weights = list(model.parameters())
    return torch.autograd.grad(value, weights, allow_unused=True)


def same(value, want, model, tolerance=1e-4):
    close(value.detach(), want.detach(), tolerance)
    for one, other in zip(grads(value, model), grads(want, model), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            close(one, other, 10 * tolerance)


@pytest.mark.whole(lambda name: name not in ("llama", "gemma2", "mixtral"))
@pytest.mark.parametrize("name", [*MODELS, "mixtral"])
def test_is_the_models_own_for_softmax(name, monkeypatch):
    monkeypatch.setitem(MODELS, "mixtral", mixtral)
    model = build(name)
    texts = {"input_ids": TOKENS, "attention_mask": MASK, "labels": LABELS}
    same(A.hf.loss(model, **texts), model(**texts).loss, model)
    for n in (7, torch.tensor(7)):
        own = model(**texts, num_items_in_batch=n).loss
        if name != "bert":  # it takes the number and means all the same
            same(A.hf.loss(model, **texts, num_items_in_batch=n), own, model)


OPTIONS = {
    "entmax": {"mapping": "entmax15"},
    "sums": {"reduction": "sum", "z_loss": 1e-2, "label_smoothing": 0.1},
    "each": {"reduction": "none", "mapping": "sparsemax"},
    "weights": {"weight": torch.linspace(0.5, 1.5, 50)},
    "a mask of classes": {"mask": torch.arange(50) != 40},
    "temperature": {"temperature": 0.7},
    "temperatures": {"temperature": torch.linspace(0.5, 2.0, 10).reshape(2, 5)},
    "a transform": {"transform": A.transforms.softcap(2.0), "temperature": 0.7},
    "alphas": {"mapping": A.Entmax(torch.linspace(1.1, 2.0, 10).reshape(2, 5, 1)), "reduction": "none"},
    "suppress": {"mapping": "sparsemax", "suppress": 0.5},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", ["llama", "gemma2", "bert"])
def test_the_options_are_those_of_linear_loss(name, options):
    model = build(name)
    if name != "llama" and isinstance(options.get("temperature"), torch.Tensor):
        why = {"gemma2": "this model caps its logits before", "bert": "the head of this model has a bias"}[name]
        with pytest.raises(ValueError, match=f"loss: {why}"):
            A.hf.loss(model, TOKENS, temperature=options["temperature"])
        return
    got = A.hf.loss(model, TOKENS, MASK, LABELS, **options)
    logits = model(input_ids=TOKENS, attention_mask=MASK).logits[:, :-1]
    given = dict(options)
    T = torch.as_tensor(given.pop("temperature", 1.0))
    logits = logits / (T[..., None] if T.ndim else T)
    # on the logits, whose output layer changes nothing
    want = A.linear_loss(logits, torch.eye(50), LABELS[:, 1:], given.pop("mapping", "softmax"), **given)
    if options.get("reduction") == "none":
        assert got.shape == (2, 5)
        assert not got[LABELS[:, 1:] == -100].any()
    same(got.sum(), want.sum(), model)


@pytest.mark.parametrize("mask", [None, MASK, LEFT], ids=["none", "right", "left"])
def test_labels_are_the_texts_own_tokens_by_default(mask):
    """But padding, and the first token after it."""
    model = build("llama")
    labels = TOKENS
    if mask is not None:
        labels = TOKENS.masked_fill((mask == 0) | (torch.nn.functional.pad(mask, (1, 0))[:, :-1] == 0), -100)
    assert torch.equal(A.hf.loss(model, TOKENS, mask), A.hf.loss(model, TOKENS, mask, labels))


def test_labels_that_are_shifted_already():
    model = build("llama")
    shifted = torch.nn.functional.pad(LABELS, (0, 1), value=-100)[:, 1:]
    assert torch.equal(A.hf.loss(model, TOKENS, shift_labels=shifted), A.hf.loss(model, TOKENS, labels=LABELS))
    each = A.hf.loss(model, TOKENS, shift_labels=TOKENS, reduction="none")
    assert each.shape == (2, 6)
    assert (each > 0).all()


@pytest.mark.parametrize("mapping", ["softmax", "entmax15", A.Entmax(torch.full((2, 5, 1), 1.5))], ids=str)
def test_texts_without_a_label_give_gradients_of_0(mapping):
    """To every parameter, so that processes that wait for them go on."""
    model = build("llama")
    for value in (
        A.hf.loss(model, TOKENS, labels=torch.full_like(TOKENS, -100), mapping=mapping),
        A.hf.loss(model, TOKENS, labels=torch.full_like(TOKENS, -100), mapping=mapping, reduction="none").sum(),
        sum(A.hf.token_statistics(model, TOKENS, torch.zeros_like(TOKENS), mapping=mapping)).sum(),
    ):
        assert value == 0
        for g in grads(value, model):
            assert g is not None
            assert not g.any()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_the_layers(reentrant):
    one = build("llama").train()
    model = copy.deepcopy(one)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for m in (one, model):
        A.hf.loss(m, TOKENS, labels=LABELS, mapping="entmax15").backward()
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_parts_of_a_batch_add_up_to_it():
    model = build("llama")
    n = (LABELS[:, 1:] != -100).sum()
    whole = A.hf.loss(model, TOKENS, MASK, LABELS)
    parts = [
        A.hf.loss(model, TOKENS[i : i + 1], MASK[i : i + 1], LABELS[i : i + 1], num_items_in_batch=n) for i in range(2)
    ]
    same(sum(parts), whole, model)


# -- PEFT ---------------------------------------------------------------------------------------------------------------------------


def adapted(**options):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = peft.get_peft_model(build("llama"), peft.LoraConfig(r=2, init_lora_weights=False, **options)).eval()
    if "modules_to_save" in options:
        with torch.no_grad():  # the copy differs from the original
            model.get_output_embeddings().modules_to_save["default"].weight.mul_(0.5)
    return model


@pytest.mark.parametrize(
    "options", [{}, {"modules_to_save": ["lm_head"]}, {"target_modules": ["embed_tokens", "v_proj"]}], ids=str
)
def test_of_a_model_with_adapters(options):
    model = adapted(**{"target_modules": ["q_proj"], **options})
    texts = {"input_ids": TOKENS, "attention_mask": MASK, "labels": LABELS}

    def check():
        learn = [p for p in model.parameters() if p.requires_grad]
        got, want = A.hf.loss(model, **texts), model(**texts).loss
        close(got.detach(), want.detach(), 1e-5)
        log_p, _ = A.hf.token_statistics(model, TOKENS, MASK)
        close(log_p[LABELS[:, 1:] != -100].mean().detach(), -want.detach(), 1e-5)
        for one, other in zip(*(torch.autograd.grad(v, learn, allow_unused=True) for v in (got, want)), strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                close(one, other, 1e-4)

    check()
    with model.disable_adapter():
        close(A.hf.loss(model, **texts).detach(), model(**texts).loss.detach(), 1e-5)


class Kept(torch.nn.Module):
    """As PEFT has a layer of `modules_to_save`."""

    def __init__(self, layer):
        super().__init__()
        self.original_module, self.modules_to_save = layer, torch.nn.ModuleDict({"default": copy.deepcopy(layer)})
        self.active_adapters, self.disable_adapters = ["default"], False
        with torch.no_grad():
            self.modules_to_save["default"].weight.mul_(0.5)

    def forward(self, x):
        return (self.original_module if self.disable_adapters else self.modules_to_save["default"])(x)


def test_a_head_with_a_copy_that_learns():
    model = build("llama")
    model.set_output_embeddings(Kept(model.get_output_embeddings()))
    for off in (False, True):
        model.get_output_embeddings().disable_adapters = off
        same(A.hf.loss(model, TOKENS, MASK, LABELS), model(TOKENS, attention_mask=MASK, labels=LABELS).loss, model)


def test_an_adapter_of_the_head_is_refused():
    model = adapted(target_modules=["lm_head"])
    for call in (A.hf.loss, A.hf.token_statistics):
        with pytest.raises(
            TypeError, match=r"further parameters, .*lora_A.*; merge an adapter first .*merge_and_unload"
        ):
            call(model, TOKENS)
    merged = model.merge_and_unload()
    close(A.hf.loss(merged, TOKENS).detach(), merged(TOKENS, labels=TOKENS).loss.detach(), 1e-5)


# -- the Trainer of transformers ----------------------------------------------------------------------------------------------------


def test_what_a_trainer_calls():
    """It passes what a batch has, and multiplies by the number of processes, since these average their gradients."""
    model, n = build("llama"), 5
    accelerator = types.SimpleNamespace(num_processes=2)
    args = types.SimpleNamespace(average_tokens_across_devices=True, n_gpu=1)
    trainer = types.SimpleNamespace(
        accelerator=accelerator, args=args, label_smoother=None, compute_loss_func=None, model_accepts_loss_kwargs=True,
        get_tp_size=lambda: 1, model=model,
    )  # fmt: skip
    batch = {"input_ids": TOKENS, "attention_mask": MASK, "labels": LABELS, "position_ids": torch.arange(6)[None] + 3}
    method = A.hf.compute_loss("entmax15", label_smoothing=0.1)
    options = {"mapping": "entmax15", "label_smoothing": 0.1, "num_items_in_batch": n}
    want = A.hf.loss(model, TOKENS, MASK, LABELS, inputs={"position_ids": batch["position_ids"]}, **options)
    assert torch.equal(method(trainer, model, batch, num_items_in_batch=n), 2 * want)
    value, outputs = method(trainer, model, batch, return_outputs=True, num_items_in_batch=n)
    assert torch.equal(value, 2 * want)
    assert [*outputs] == ["loss"]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_trainer_trains_as_with_the_models_own_loss(steps, tmp_path):
    pytest.importorskip("accelerate")

    class Ours(transformers.Trainer):
        compute_loss = A.hf.compute_loss()

    texts = [{"input_ids": t, "attention_mask": m, "labels": y} for t, m, y in zip(TOKENS, MASK, LABELS)]
    options = transformers.TrainingArguments(
        tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=steps, max_steps=2, report_to=[],
        use_cpu=True, save_strategy="no", optim="sgd", learning_rate=0.1, logging_steps=1,
    )  # fmt: skip
    found = []
    for kind in (Ours, transformers.Trainer):
        trainer = kind(build("llama"), options, train_dataset=texts, eval_dataset=texts)
        trainer.train()
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        found.append((losses, trainer.evaluate()["eval_loss"], [p.detach() for p in trainer.model.parameters()]))
    (losses, evaluated, ours), (want, own, theirs) = found
    assert len(losses) == 2
    assert losses == pytest.approx(want, rel=1e-5)
    assert evaluated == pytest.approx(own, rel=1e-5)
    for p, q in zip(ours, theirs, strict=True):
        close(p, q, 1e-4)


# -- several processes --------------------------------------------------------------------------------------------------------------

SPREAD = """
import copy, importlib.util
from hf_models import llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
import anymax as A
mesh = init_device_mesh("cpu", (size,))
torch.manual_seed(0)
texts, there = torch.randint(50, (2 * size, 6)), torch.ones(2 * size, 6, dtype=torch.int64)
there[0, :2] = there[3, 4:] = 0
mine = slice(2 * rank, 2 * rank + 2)  # each process has texts of its own
halves = slice(mine.start, mine.start + 1), slice(mine.start + 1, mine.stop)


def learned(model):
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def gradients(model, value, parts):
    # value: of some texts, summed; what the processes average is divided by their number here
    model.zero_grad()
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        if isinstance(model, DDP):
            model.require_backward_grad_sync = last  # as no_sync() does
        elif hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(last)
        value(model, part).backward()
    found = {name.removeprefix("module."): p.grad for name, p in learned(model)}
    assert all(g is not None for g in found.values()), [name for name, g in found.items() if g is None]
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in found.items()}


def fsdp(head):
    def wrap(model):
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        for layer in inner.model.layers:
            fully_shard(layer, mesh=mesh)
        if head:
            fully_shard([inner.model.norm, inner.lm_head], mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return wrap


def models():
    for tied in (False, True):
        kind, config = llama(tie_word_embeddings=tied)
        one = kind(config).double()
        yield one, [DDP, fsdp(False), *([] if tied else [fsdp(True)])]
        if not tied:
            one = copy.deepcopy(one)
            one.gradient_checkpointing_enable({"use_reentrant": False})
            one.train()
            yield one, [DDP, fsdp(False)]
    if importlib.util.find_spec("peft"):
        import peft
        for more in ({}, {"modules_to_save": ["lm_head"]}):
            kind, config = llama()
            options = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj"], **more)
            yield peft.get_peft_model(kind(config).double(), options).double(), [DDP, fsdp(False), fsdp(True)]


def losses(mapping, labels):
    n = (labels[:, 1:] != -100).sum()

    def value(model, part):
        return A.hf.loss(model, texts[part], there[part], labels[part], mapping=mapping, num_items_in_batch=n)
    return value


def statistics(mapping, there):
    def value(model, part):
        log_p, entropy = A.hf.token_statistics(model, texts[part], there[part], mapping=mapping)
        return (log_p - 0.1 * entropy).sum()
    return value


labels = texts.masked_fill(there == 0, -100)
one_rank = labels.clone()
one_rank[2:] = -100  # the second process has none
values = [losses(m, y) for m in ("softmax", "entmax15") for y in (labels, one_rank)]
none_there = there.clone()
none_there[2:] = 0
values += [statistics("softmax", there), statistics("softmax", none_there), statistics("entmax15", none_there)]
count = 0
for one, wrappings in models():
    for value in values:
        want = gradients(one, value, [slice(None)])
        for wrap in wrappings:
            model = wrap(copy.deepcopy(one))
            for parts in ([mine], halves, [mine]):
                got = gradients(model, value, parts)
                assert got.keys() == want.keys(), (got.keys() ^ want.keys())
                for name, g in got.items():
                    assert torch.allclose(size * g, want[name], atol=1e-12), (wrap, parts, name)
                count += 1
print("right")
dist.destroy_process_group()
"""


@pytest.mark.whole
@pytest.mark.long
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="no gloo")
def test_of_a_model_that_is_spread_over_processes():
    """By DDP and FSDP, with adapters, in parts of a batch, and where a process has no token: the gradients are those of one process."""
    all_right(2, SPREAD)


ZERO = """
import copy, os
stdout = os.dup(1)
os.dup2(2, 1)  # DeepSpeed prints
os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "DS_ACCELERATOR": "cpu"}
import deepspeed
from deepspeed.utils import safe_get_full_grad
from hf_models import gemma2, llama
import anymax as A
deepspeed.init_distributed(dist_backend="gloo", verbose=False)
torch.manual_seed(0)
texts = torch.randint(50, (2 * size, 6))
labels = texts.clone()
labels[2:] = -100  # the second process has none
n = (labels[:, 1:] != -100).sum()
mine = slice(2 * rank, 2 * rank + 2)
zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "contiguous_gradients": False, "overlap_comm": False}
config = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True, "zero_optimization": zero}


def value(model, part, mapping, chunk):
    y = labels[part]
    log_p, entropy = A.hf.token_statistics(model, texts[part], (y != -100).long(), mapping=mapping)
    more = 0.1 * (log_p + entropy).sum()
    return more + A.hf.loss(model, texts[part], labels=y, mapping=mapping, chunk=chunk, num_items_in_batch=n)


for kind, sizes in (llama(), llama(tie_word_embeddings=True), gemma2(final_logit_softcapping=0.5)):
    one = kind(sizes)
    model = copy.deepcopy(one)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimiser, config=config)
    for mapping, chunk in (("softmax", None), ("softmax", 16), ("entmax15", None)):
        one.zero_grad()
        value(one, slice(None), mapping, chunk).backward()
        engine.backward(size * value(engine, mine, mapping, chunk))  # it averages over the processes
        for p, q in zip(model.parameters(), one.parameters()):
            assert torch.allclose(safe_get_full_grad(p), q.grad, atol=1e-6), mapping
        engine.step()
os.write(stdout, b"right\\n")
dist.destroy_process_group()
os.dup2(stdout, 1)
"""


@pytest.mark.whole
@pytest.mark.long
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="no gloo")
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="no deepspeed")
def test_of_a_model_in_the_third_stage_of_zero():
    all_right(2, ZERO)
