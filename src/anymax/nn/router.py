"""The module `anymax.nn.Router`: the gate of a mixture of experts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from .._core.mapping import Mapping
from .._core.options import check_keywords
from ..mappings import Softmax
from ..routing import Routes, balance, route
from ..routing.scoring import EACH
from ..transforms.truncation import check_groups, fit_groups
from .base import OfMapping, check_sizes
from .router_gates import read_gate, renamed


class Router(OfMapping):
    """The gate of a mixture of experts: features in, the experts of each token and their weights out, by `anymax.routing.route`.

    It has the tensors of a gate of transformers, under the same names, so that `load_state_dict` reads its state dict; `from_gate`
    makes the module that does what a gate does. The scores are computed in fp32 whatever the dtype of the features, also under autocast.

    Parameters
    ----------
    in_features
        The number of features.
    num_experts
        The number of experts.
    k, scoring, groups, keep_groups, group_by, norm_topk_prob, routed_scaling_factor, invalid
        As in `anymax.routing.route`. A tensor in a map becomes a buffer of the module, an `nn.Parameter` its parameter.
    bias
        Whether to add a learned number to the scores of each expert.
    correction
        Whether to add a number to the values of each expert for the choice alone: the buffer `e_score_correction_bias`, which
        `balance` sets.
    score_factor
        The scores are multiplied by this number.

    Examples
    --------
    >>> import torch
    >>> from anymax import nn
    >>> router = nn.Router(16, 8, k=2, scoring="sigmoid", norm_topk_prob=True, correction=True)
    >>> x = torch.randn(5, 16)
    >>> index, weight = router(x)
    >>> index.shape, weight.shape
    (torch.Size([5, 2]), torch.Size([5, 2]))
    >>> router.balance(x)  # after a step of training
    """

    prefix = "map_"  # the gate itself has a `weight`
    bias: nn.Parameter | None
    e_score_correction_bias: Tensor | None

    @check_keywords()
    def __init__(
        self,
        in_features: int,
        num_experts: int,
        k: int,
        scoring: Mapping | str = "softmax",
        bias: bool = False,
        *,
        correction: bool = False,
        groups: int | None = None,
        keep_groups: int | None = None,
        group_by: int | str = 2,
        norm_topk_prob: bool = False,
        routed_scaling_factor: float = 1.0,
        score_factor: float = 1.0,
        invalid: Literal["argmax", "raise"] | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_sizes("Router", in_features=in_features, num_experts=num_experts, k=k)
        if k > num_experts:
            raise ValueError(f"Router: k must be at most num_experts, {num_experts}, got {k}")
        each = isinstance(scoring, str) and scoring in EACH
        super().__init__(Softmax() if each else scoring, None, (1.0, 2.0))
        fit_groups("Router", check_groups("Router", groups, keep_groups, group_by), num_experts)
        self.each = scoring if each else None
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(num_experts, in_features, **factory_kwargs))
        self.register_parameter("bias", nn.Parameter(torch.empty(num_experts, **factory_kwargs)) if bias else None)
        corrected = torch.zeros(num_experts, device=device, dtype=torch.float32) if correction else None
        self.register_buffer("e_score_correction_bias", corrected)
        self.k, self.score_factor = k, score_factor
        self.options: dict[str, Any] = {
            "groups": groups, "keep_groups": keep_groups, "group_by": group_by, "norm_topk_prob": norm_topk_prob,
            "routed_scaling_factor": routed_scaling_factor, "invalid": invalid,
        }  # fmt: skip
        self.reset_parameters()

    @classmethod
    def from_gate(cls, gate: nn.Module) -> Router:
        """The router that does what a gate of transformers does, with a copy of its tensors.

        Parameters
        ----------
        gate
            A module such as `DeepseekV3TopkRouter`, `MixtralTopKRouter`, `Qwen3MoeTopKRouter` or `GptOssTopKRouter`. An error names the
            gates that are known.
        """
        words, tensors = read_gate(gate)
        weight = tensors["weight"]
        made = cls(
            weight.shape[1], weight.shape[0], bias="bias" in tensors, correction="e_score_correction_bias" in tensors,
            device=weight.device, dtype=weight.dtype, **words,
        )  # fmt: skip
        made.load_state_dict(tensors)
        return made

    def reset_parameters(self) -> None:
        """Initialises the weights again, as `nn.Linear` does, and the correction with zeros."""
        bound = 1.0 / math.sqrt(max(1, self.weight.shape[1]))
        for value in (self.weight, self.bias):
            if value is not None:
                nn.init.uniform_(value, -bound, bound)
        if self.e_score_correction_bias is not None:
            self.e_score_correction_bias.zero_()

    @property
    def scoring(self) -> Mapping | str:
        """What makes values of the scores, for any function of `anymax.routing`."""
        return self.mapping if self.each is None else self.each

    def scores(self, x: Tensor) -> Tensor:
        """The scores of all experts, [..., num_experts], in fp32 or fp64."""
        wide = torch.float64 if torch.float64 in (x.dtype, self.weight.dtype) else torch.float32
        with torch.autocast(x.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(wide)
            made = nn.functional.linear(x.to(wide), self.weight.to(wide), bias)
        return made if self.score_factor == 1.0 else made * self.score_factor

    def forward(self, x: Tensor, index: Tensor | None = None, mask: Tensor | None = None) -> Routes:
        """The experts of features [..., in_features] and their weights, [..., k] each.

        Parameters
        ----------
        index
            Experts to use instead of a choice, integers [..., k]; -1 for none.
        mask
            Boolean, broadcastable to the scores, True = keep; an expert that is not kept is not chosen.
        """
        scores = self.scores(x)
        if index is not None:
            words = {name: self.options[name] for name in ("norm_topk_prob", "routed_scaling_factor")}
            return route(scores, None, self.scoring, index=index, mask=mask, **words)
        return route(scores, self.k, self.scoring, bias=self.e_score_correction_bias, mask=mask, **self.options)

    @torch.no_grad()
    def balance(self, x: Tensor, **options: Any) -> None:
        """Sets the correction by `anymax.routing.balance` for the tokens of these features.

        Parameters
        ----------
        options
            Those of that function: `mask`, `method`, `iterations`, `step`, `group`. It knows the router's own, groups among them.
        """
        if self.e_score_correction_bias is None:
            raise ValueError("Router: it has no correction to set; make it with correction=True")
        words = {name: self.options[name] for name in ("groups", "keep_groups", "group_by")}
        made = balance(self.scores(x), self.k, self.e_score_correction_bias, self.scoring, **words, **options)
        self.e_score_correction_bias.copy_(made)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        named = renamed(state_dict, prefix)
        state_dict.clear()
        state_dict.update(named)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        experts, features = self.weight.shape
        words = [f"{features} -> {experts}", f"k={self.k}", f"scoring={self.each or super().extra_repr()}"]
        words += [f"{name}={value!r}" for name, value in self.options.items() if value not in (None, False, 1.0)]
        return ", ".join(words)

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, index: Tensor | None = None, mask: Tensor | None = None) -> Routes: ...
