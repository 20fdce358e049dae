"""What the gates of transformers do, in the words of `anymax.routing.route`. They are known by the names of their classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

Words = dict[str, Any]


class Gate(NamedTuple):
    """The words of a gate, and its tensors under the names that `anymax.nn.Router` has for them."""

    words: Words
    tensors: dict[str, Tensor]


def _of_sigmoids_in_groups(gate: Any) -> Words:
    words = {"scoring": "sigmoid", "norm_topk_prob": gate.norm_topk_prob}
    return words if gate.num_group is None else words | {"groups": gate.num_group, "keep_groups": gate.topk_group}


def _scaled(words: Callable[[Any], Words]) -> Callable[[Any], Words]:
    return lambda gate: words(gate) | {"routed_scaling_factor": gate.routed_scaling_factor}


def _of_the_chosen(gate: Any) -> Words:
    return {"norm_topk_prob": True}


def _of_all(gate: Any) -> Words:
    return {}


def _of_all_or_chosen(gate: Any) -> Words:
    return {"norm_topk_prob": gate.norm_topk_prob}


def _of_sigmoids(gate: Any) -> Words:
    return {"scoring": "sigmoid", "norm_topk_prob": True}


def _of_sigmoids_alone(gate: Any) -> Words:
    return {"scoring": "sigmoid"}


def _of_sigmoids_under_a_cap(gate: Any) -> Words:
    if gate.router_logit_softcapping > 0.0:
        raise ValueError(
            "Router: the gate caps its scores, and a Router does not; give anymax.transforms.softcap(c)(scores) to anymax.routing.route"
        )
    return _of_sigmoids(gate)


def _sigmoids_or_softmax(gate: Any) -> Words:
    if gate.expert_selection_fn == "softmax":
        return _of_the_chosen(gate)
    return {"scoring": "sigmoid", "norm_topk_prob": gate.norm_topk_prob}


def _of_softmax_in_groups_by_largest(gate: Any) -> Words:
    if gate.topk_method == "greedy":
        return {}
    return {"groups": gate.num_group, "keep_groups": gate.topk_group, "group_by": "max"}


def _softmax_in_groups(gate: Any, normalised: bool) -> Words:
    return {"groups": gate.num_group, "keep_groups": gate.topk_group, "norm_topk_prob": normalised}


def _named_function(gate: Any) -> Words:
    """The activation is a module or function of transformers, known by its name."""
    name = str(getattr(gate.score_fn, "__name__", type(gate.score_fn).__name__)).lower()
    if name not in _FUNCTIONS:
        raise ValueError(
            f"Router: the gate {type(gate).__name__} has the activation {name}; known are {', '.join(_FUNCTIONS)}"
        )
    return {"scoring": _FUNCTIONS[name], "norm_topk_prob": True}


_FUNCTIONS = {"sigmoid": "sigmoid", "sqrtsoftplus": "sqrtsoftplus", "sqrtsoftplusactivation": "sqrtsoftplus"}


def _each(names: str, words: Callable[[Any], Words], ending: str = "TopKRouter") -> dict[str, Callable[[Any], Words]]:
    return dict.fromkeys((name + ending for name in names.split()), words)


GATES: dict[str, Callable[[Any], Words]] = {
    **_each(
        "AXK1 AXK2 BailingHybrid DeepseekV3 DeepseekV32 Dots1 Dots3NoteText ExaoneMoe Glm4Moe Glm4MoeLite Glm4vMoeText Glm5NextText "
        "GlmMoeDsa HYV4 HYV4VL KimiLinear MiMoV2Flash NemotronH SolarOpen",
        _scaled(_of_sigmoids_in_groups), "TopkRouter",
    ),
    **_each("Beam", _of_sigmoids_in_groups),
    **_each("DeepseekV2 DeepseekOcr2Text UnlimitedOcrText", _scaled(_of_softmax_in_groups_by_largest), "TopkRouter"),
    **_each("Mistral4", _scaled(lambda gate: _softmax_in_groups(gate, gate.norm_topk_prob)), "TopkRouter"),
    **_each("MistralLarge4Text", _scaled(lambda gate: _softmax_in_groups(gate, True)), "TopkRouter"),
    **_each(
        "Mixtral MiniMax GptOss GraniteMoe GraniteMoeSWA GraniteMoeHybrid GraniteMoeShared AriaText Qwen3_5Moe Qwen3OmniMoeText "
        "Qwen3VLMoeText Ernie4_5_Moe Ernie4_5_VLMoeMoe",
        _of_the_chosen,
    ),
    "HunYuanMoEV1Gate": _of_the_chosen,
    **_each("OpenAIPrivacyFilter", lambda gate: {"norm_topk_prob": True, "routed_scaling_factor": 1.0 / gate.top_k}),
    **_each(
        "FlexOlmo Mellum Olmoe Qwen2Moe Qwen3Moe Qwen3Next Qwen3OmniMoeThinkerText Qwen3OmniMoeTalkerText Qwen4ExpText LaraMini",
        _of_all_or_chosen,
    ),
    **_each("Jamba", _of_all),
    **_each("LongcatFlash", _scaled(_of_all), "TopkRouter"),
    **_each("Flint", lambda gate: {"scoring": "sigmoid", "norm_topk_prob": gate.norm_topk_prob}),
    **_each("Lfm2Moe", _scaled(lambda gate: {"scoring": "sigmoid", "norm_topk_prob": gate.norm_topk_prob})),
    **_each("MiniMaxM2 MiniMaxM3VL Step3p7", _of_sigmoids),
    **_each("HYV3 Dots3NoteVision", lambda gate: _of_sigmoids(gate) | {"routed_scaling_factor": gate.router_scaling_factor}),
    **_each("MuseSpark", _scaled(lambda gate: _of_sigmoids(gate) | {"score_factor": gate.output_multiplier}), "TopkRouter"),
    "AfmoeTokenChoiceRouter": lambda gate: _of_sigmoids(gate) | {"routed_scaling_factor": gate.route_scale},
    **_each("DeepseekV4 Inkling2 Inkling2Loop", _scaled(_named_function)),
    **_each("Laguna", _of_sigmoids_under_a_cap),
    **_each("Cohere2Moe", _sigmoids_or_softmax),
    "Llama4Router": _of_sigmoids_alone,
}  # fmt: skip
# their correction is not a tensor of the gate: its layer hands it over in each call
APART = (
    "HYV3TopKRouter",
    "Dots3NoteVisionTopKRouter",
    "MiniMaxM2TopKRouter",
    "Lfm2MoeTopKRouter",
    "AfmoeTokenChoiceRouter",
)
# what they call the tensors
NAMES = {
    **dict.fromkeys(("gate.weight", "classifier.weight", "wg.weight", "layer.weight"), "weight"),
    **dict.fromkeys(("moe_statics.e_score_correction_bias", "expert_bias"), "e_score_correction_bias"),
}


def read_gate(gate: nn.Module) -> Gate:
    """What a gate of transformers does, and its tensors."""
    name = type(gate).__name__
    if name not in GATES:
        raise TypeError(
            f"Router.from_gate: the gate {name} is not known; make a Router(...) with the arguments that do the same, and load its state "
            f"dict. Known are {', '.join(sorted(GATES))}"
        )
    tensors = renamed(gate.state_dict())
    if name == "LongcatFlashTopkRouter":
        tensors.pop("classifier.bias", None)  # it does not use it
    if name in APART:
        tensors["e_score_correction_bias"] = tensors["weight"].new_zeros(len(tensors["weight"]))
    given: Any = gate
    return Gate({"k": given.top_k, **GATES[name](given)}, tensors)


def renamed(tensors: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A state dict with the names of `anymax.nn.Router`."""
    out = {}
    for name, value in tensors.items():
        ours = NAMES.get(name.removeprefix(prefix)) if name.startswith(prefix) else None
        out[name if ours is None else prefix + ours] = value.reshape(-1) if ours == "e_score_correction_bias" else value
    return out
