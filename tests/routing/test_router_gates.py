"""`anymax.nn.Router` does what each gate of the installed transformers does, with its state dict."""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import re
import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from anymax import Entmax, nn
from anymax.nn.router_gates import APART, GATES
from anymax.routing import limit_capacity, route

MODELS = pathlib.Path(importlib.util.find_spec("transformers").origin).parent / "models"
GATE = re.compile(r"^class (\w*(?:Router|MoEV1Gate|TopKGating))\(", flags=re.M)
OTHERS = {  # gates that are more than a choice of experts, and what they do besides
    "DbrxRouter": "gives scores, from which its layer chooses",
    "DeepseekV4HashRouter": "takes the experts from a table of tokens: route(scores, index=table[tokens])",
    "DiffusionGemmaTextRouter": "normalises its features, and multiplies by a number of each expert",
    "Gemma4TextRouter": "normalises its features, and multiplies by a number of each expert",
    "GraniteDoclingDensityRouter": "routes no tokens",
    "InklingTopkRouter": "divides by the sum over the shared experts too",
    "JetMoeTopKGating": "sorts the tokens by their experts",
    "Kolibri1TopKRouter": "adds its bias to the scores: route(scores, k, 'sigmoid', by=scores + bias)",
    "NllbMoeTop2Router": "drops what is above a capacity",
    "PhimoeTopKRouter": "draws its experts in training",
    "SwitchTransformersTop1Router": "drops what is above a capacity",
    "ZayaRouter": "has layers of its own",
}
SHORT = ("DeepseekV3TopkRouter", "MixtralTopKRouter", "Qwen3MoeTopKRouter", "GptOssTopKRouter", "Glm4MoeTopkRouter")


def installed():
    """The name of each gate and its module, from the texts: to import all models takes minutes."""
    found = {}
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        for name in GATE.findall(path.read_text()):
            found[name] = f"transformers.models.{path.parent.name}.{path.stem}"
    return found


FOUND = installed()
HERE = [name for name in GATES if name in FOUND]


def config(**changes):
    """Every name that a gate reads."""
    every = {
        "num_experts_per_tok": 4, "moe_topk": 4, "num_local_experts": 32, "num_experts": 32, "n_routed_experts": 32,
        "moe_num_experts": 32, "hidden_size": 16, "routed_scaling_factor": 2.5, "route_scale": 1.5, "router_scaling_factor": 1.7,
        "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "output_multiplier": 0.5, "scoring_func": "sqrtsoftplus",
        "topk_method": "group_limited_greedy", "moe_norm_min": 1e-12, "expert_selection_fn": "sigmoid", "zero_expert_num": 0,
        "use_expert_bias": True, "moe_router_logit_softcapping": 0.0, "expert_capacity": 3, "router_bias": False,
        "router_jitter_noise": 0.0, "router_ignore_padding_tokens": False, "router_dtype": "float32",
    }  # fmt: skip
    return types.SimpleNamespace(**every | changes)


def gate_of(name, seed=0, **changes):
    gate = getattr(importlib.import_module(FOUND[name]), name)(config(**changes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, value in gate.state_dict().items():
            value.copy_(torch.randn(value.shape, generator=generator) * (0.1 if "correction" in key else 1.0))
    return gate


def test_every_gate_is_known_or_said_to_be_something_else():
    missing = sorted(set(FOUND) - set(GATES) - set(OTHERS))
    assert not missing, "say in nn/router_gates.py what these do, or here why they are none"


VARIANTS = {
    "DeepseekV3TopkRouter": {"norm_topk_prob": False}, "Qwen3MoeTopKRouter": {"norm_topk_prob": False},
    "DeepseekV2TopkRouter": {"topk_method": "greedy"}, "Cohere2MoeTopKRouter": {"expert_selection_fn": "softmax"},
    "DeepseekV4TopKRouter": {"scoring_func": "sigmoid"}, "AXK2TopkRouter": {"n_group": None},
}  # fmt: skip


CASES = {name: (name, 0, {}) for name in HERE} | {f"{n}, {v}": (n, 1, v) for n, v in VARIANTS.items() if n in HERE}


@pytest.mark.whole(lambda case: CASES[case][0] not in SHORT)
@pytest.mark.parametrize("case", CASES)
def test_a_router_does_what_the_gate_does(case):
    name, seed, changes = CASES[case]
    gate = gate_of(name, seed, **changes)
    router = nn.Router.from_gate(gate)
    x = torch.randn(200, 16, generator=torch.Generator().manual_seed(seed + 10))
    given = x.reshape(4, 50, 16) if name == "AfmoeTokenChoiceRouter" else x
    more = ()
    if name in APART:
        router.e_score_correction_bias.copy_(0.1 * torch.randn(32, generator=torch.Generator().manual_seed(3)))
        more = (router.e_score_correction_bias,)
    index, weight = router(x)
    if name == "Llama4Router":  # its weights are dense
        torch.testing.assert_close(torch.zeros(200, 32).scatter(1, index, weight), gate(given)[0].detach())
        return
    scores, theirs, experts = gate(given, *more)
    torch.testing.assert_close(scores.detach(), router.scores(x).detach())
    ours, other = index.sort(-1), experts.reshape(200, 4).sort(-1)
    assert torch.equal(ours.values, other.values)
    found, want = weight.gather(-1, ours.indices), theirs.reshape(200, 4).gather(-1, other.indices)
    torch.testing.assert_close(found, want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", SHORT)
def test_the_gradients_are_those_of_the_gate(name):
    gate = gate_of(name)
    router = nn.Router.from_gate(gate)
    x = torch.randn(50, 16, generator=torch.Generator().manual_seed(1))
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    router(a).weight.square().sum().backward()
    gate(b)[1].square().sum().backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(router.weight.grad, gate.weight.grad, rtol=1e-5, atol=1e-5)


GROUPED = ("DeepseekV3TopkRouter", "DeepseekV2TopkRouter", "Mistral4TopkRouter")  # one of each rule


@pytest.mark.whole(lambda name: name not in GROUPED)
@pytest.mark.parametrize("name", [name for name in HERE if name not in ("Llama4Router", "AfmoeTokenChoiceRouter")])
def test_the_loads_of_the_gate_are_even(name):
    """As the gate itself chooses where it has a correction; the sign rule is DeepSeek's, by hand from the gate's own loads."""
    gate = gate_of(name, 3)
    router, x = nn.Router.from_gate(gate), 0.25 * torch.randn(2048, 16, generator=torch.Generator().manual_seed(4))
    if router.e_score_correction_bias is None:
        router.register_buffer("e_score_correction_bias", torch.zeros(32))
    theirs = [b for key, b in gate.state_dict().items() if key.endswith(("correction_bias", "expert_bias"))]
    more = (router.e_score_correction_bias,) if name in APART else ()

    def load():
        if not theirs and not more:
            return torch.bincount(router(x).index.flatten(), minlength=32)
        for b in theirs:
            b.copy_(router.e_score_correction_bias)
        return torch.bincount(gate(x, *more)[2].flatten(), minlength=32)

    router.e_score_correction_bias.zero_()
    by_hand = torch.zeros(32)
    for _ in range(5):
        count = load().float()
        by_hand += 0.01 * (count.mean() - count).sign()
        router.balance(x, method="sign", step=0.01)
        torch.testing.assert_close(router.e_score_correction_bias, by_hand)
    router.balance(x, iterations=30)
    assert (load() / 256 - 1).abs().max() < 0.03
    router.e_score_correction_bias.zero_()
    for i in range(120):
        router.balance(x, method="sign", step=0.04 * 0.95**i)
    assert (load() / 256 - 1).abs().max() < 0.03


@pytest.mark.skipif("SwitchTransformersTop1Router" not in FOUND, reason="this transformers has no Switch")
def test_switch_is_a_route_and_a_capacity():
    gate = gate_of("SwitchTransformersTop1Router")
    x = torch.randn(1, 40, 16, generator=torch.Generator().manual_seed(2))
    mask, p, scores = gate(x)
    index, weight = route(scores.detach(), 1)
    torch.testing.assert_close(weight, p.detach())
    kept = limit_capacity(index, 3, 32).keep
    assert torch.equal(torch.where(kept, index, -1)[0, :, 0], torch.where(mask.any(-1), mask.argmax(-1), -1)[0])
    assert not bool(kept.all())


def test_state_dicts_under_the_names_of_the_gates():
    for theirs in ("weight", "gate.weight", "classifier.weight", "wg.weight", "layer.weight"):
        router = torch.nn.Sequential(nn.Router(3, 4, 2, "sigmoid", correction=True))
        weight, b = torch.randn(4, 3), torch.randn(1, 4)
        router.load_state_dict({f"0.{theirs}": weight, "0.moe_statics.e_score_correction_bias": b})
        assert torch.equal(router[0].weight, weight)
        assert torch.equal(router[0].e_score_correction_bias, b[0])
    with pytest.raises(RuntimeError, match="e_score_correction_bias"):
        router.load_state_dict({"0.weight": weight})
    assert set(nn.Router(3, 4, 2, bias=True).state_dict()) == {"weight", "bias"}


def test_a_router_of_ones_own():
    torch.manual_seed(0)
    router = nn.Router(6, 8, 2, Entmax(torch.nn.Parameter(torch.tensor(1.5))), groups=2, keep_groups=1)
    index, weight = router(torch.randn(5, 6).bfloat16())
    assert weight.dtype == torch.float32
    assert index.shape == (5, 2)
    weight.sum().backward()
    assert router.map_alpha.grad is not None
    replayed = router(torch.randn(5, 6), index=index).weight
    assert replayed.shape == (5, 2)
    masked = router(torch.randn(5, 6), mask=torch.arange(8) > 6).index
    assert set(masked.unique().tolist()) <= {-1, 7}
    with torch.autocast("cpu", torch.bfloat16):
        assert router.scores(torch.randn(5, 6)).dtype == torch.float32
    assert "k=2" in repr(router)
    assert "groups=2" in repr(router)


def test_the_correction_balances():
    torch.manual_seed(0)
    router, x = nn.Router(8, 16, 2, "sigmoid", correction=True, norm_topk_prob=True), torch.randn(800, 8) + 1.0
    load = lambda: torch.bincount(router(x).index.flatten(), minlength=16)  # noqa: E731
    before = load()
    for _ in range(6):
        router.balance(x)
    assert load().max() < 0.5 * before.max()
    assert abs(load().max() / 100 - 1) < 0.1
