"""Statistics of tokens under a causal language model, from its hidden states: its logits are never made."""

from __future__ import annotations

import math
import sys
import weakref
from typing import Any, NamedTuple

import torch

from .. import linear
from .._array import is_array, shown
from .._core.mapping import Mapping
from .._core.options import check_options
from .._core.shards import sharded
from ..mappings import Softmax
from ..transforms import compose, softcap
from ..transforms import temperature as tempered

Tensor = torch.Tensor

_SOFTMAX = Softmax()
_OPTIONS = ("chunk", "mask", "support", "temperature", "transform")
_FACTORS = ("logit_scale", "lm_head_multiplier")  # numbers of a config that multiply the logits
_DIVISORS = ("logits_scaling",)  # and that divide them
_CHECKED: weakref.WeakSet[Any] = weakref.WeakSet()  # models whose logits were compared with what is computed here


class TokenStatistics(NamedTuple):
    """The result of `token_statistics`, a pair of tensors in fp32.

    Parameters
    ----------
    log_prob
        log p of each token.
    entropy
        The entropy of the distribution from which it was drawn.

    Examples
    --------
    >>> import torch
    >>> log_prob, entropy = anymax.hf.TokenStatistics(torch.zeros(1, 3), torch.ones(1, 3))
    """

    log_prob: Tensor
    entropy: Tensor


def token_statistics(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    mapping: Mapping | str = _SOFTMAX,
    last: int | None = None,
    inputs: dict[str, Any] | None = None,
    **options: Any,
) -> TokenStatistics:
    """log p and entropy of each token of a text under a causal model of transformers, with gradients; the logits are never made.

    Use it for the policy and the reference model of reinforcement learning, in place of `model(input_ids).logits` and what follows. The
    model's head is found from its config: tied weights, a bias, a soft cap, a factor of the logits. At the first call with a model its own
    logits of two tokens are compared with these.

    Parameters
    ----------
    model
        A causal model, such as one of `AutoModelForCausalLM`, also inside PEFT or `DistributedDataParallel`, or sharded by
        `fully_shard`.
    input_ids
        The tokens, [texts, length].
    attention_mask
        1 for tokens and 0 for padding, [texts, length]; what belongs to padding is 0.
    mapping
        The map from logits to probabilities, softmax by default.
    last
        How many tokens at the end of each text to compute, such as those of the completion; all but the first by default.
    inputs
        Further inputs of the model, such as `position_ids`.
    options
        `temperature`, `transform`, `support`, `mask` and `chunk`, as in `linear_log_prob_entropy`. A support counts the rows
        of the result, padding included.

    Returns
    -------
    TokenStatistics
        `log_prob` and `entropy`, [texts, length - 1] or [texts, last]: entry i is that of the token i + 1, given those before it.

    Examples
    --------
    >>> model = AutoModelForCausalLM.from_pretrained(name)  # doctest: +SKIP
    >>> log_prob, entropy = anymax.hf.token_statistics(model, input_ids, attention_mask)  # doctest: +SKIP
    """
    who = "token_statistics"
    check_options(who, _OPTIONS, options)
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or input_ids.is_floating_point():
        raise ValueError(f"{who}: input_ids must be tokens, integers [texts, length], got {shown(input_ids)}")
    length = input_ids.shape[1]
    if last is None:
        last = max(length - 1, 0)
    if type(last) is not int or not 0 <= last < max(length, 1):
        raise ValueError(f"{who}: last must be a number of tokens from 0 to {max(length - 1, 0)}, got {last!r}")
    if attention_mask is not None and tuple(attention_mask.shape) != tuple(input_ids.shape):
        raise ValueError(
            f"{who}: attention_mask of shape {tuple(attention_mask.shape)}: expected that of input_ids, {tuple(input_ids.shape)}"
        )
    inputs = inputs or {}
    if taken := {"input_ids", "attention_mask", "use_cache", "labels"} & set(inputs):
        raise TypeError(f"{who}: inputs has {', '.join(sorted(taken))}; give it as an argument, or leave it out")
    head = _Head.of(model)
    given = {"attention_mask": attention_mask, **inputs}
    head.check(input_ids[:1, :2], {k: v[:1, :2] for k, v in given.items() if isinstance(v, Tensor) and v.ndim == 2})
    hidden = head.hidden(input_ids, given)[:, -last - 1 : -1]
    target = input_ids[:, length - last :]
    if attention_mask is not None:
        target = torch.where(attention_mask[:, length - last :] == 0, -1, target)
    return TokenStatistics(*head.statistics(hidden, target, mapping, options))


class _Head(NamedTuple):
    """What a causal model computes after its last hidden state."""

    model: Any
    base: Any
    layer: Any  # with a weight and perhaps a bias
    factor: float
    cap: float | None

    @classmethod
    def of(cls, model: Any) -> _Head:
        given = model
        while True:
            if hasattr(model, "get_base_model"):  # PEFT
                model = model.get_base_model()
            elif isinstance(getattr(model, "module", None), torch.nn.Module) and not hasattr(model, "config"):  # DDP
                model = model.module
            else:
                break
        config = getattr(model, "config", None)
        layer = getattr(model, "get_output_embeddings", lambda: None)()
        base = getattr(model, "base_model", None)
        if (
            config is None
            or layer is None
            or base is None
            or base is model
            or getattr(config, "is_encoder_decoder", False)
        ):
            raise TypeError(
                f"token_statistics: expected a causal language model of transformers with an output layer, got {type(model).__name__}; "
                "give hidden states and the weight of a head to anymax.linear_log_prob_entropy"
            )
        more = [name for name, _ in layer.named_parameters() if name not in ("weight", "bias")]
        if more or getattr(getattr(given, "active_peft_config", None), "is_prompt_learning", False):
            what = f"its output layer has further parameters, {', '.join(more)}" if more else "it learns its prompt"
            raise TypeError(
                f"token_statistics: {type(given).__name__} has more than a linear layer at its end: {what}; merge an adapter first, or use "
                "anymax.log_prob_entropy with its logits"
            )
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        factor = math.prod(_number(text, name) or 1.0 for name in _FACTORS)
        factor /= math.prod(_number(text, name) or 1.0 for name in _DIVISORS)
        return cls(model, base, layer, factor, _number(text, "final_logit_softcapping"))

    def hidden(self, input_ids: Tensor, given: dict[str, Any]) -> Tensor:
        """The last hidden state of each token.

        If parameters are spread over devices, the whole model is called, since FSDP gathers them only then; it makes the logits of one
        token for each text.
        """
        if not _over_devices(self.model):
            return self.base(input_ids=input_ids, use_cache=False, **given).last_hidden_state
        states: list[Any] = []
        hook = self.base.register_forward_hook(lambda module, args, out: states.append(out.last_hidden_state))
        try:
            logits = self.model(input_ids=input_ids, use_cache=False, logits_to_keep=1, **given).logits
        finally:
            hook.remove()
        # the logits get a gradient of 0, since FSDP reduces the gradients of a model whose result has one
        return torch.where(torch.tensor(False, device=logits.device), _whole(logits).sum(), _whole(states[-1]))

    def scores(self, hidden: Tensor) -> Tensor:
        """The logits as they are understood here."""
        weight, bias = _whole(self.layer.weight), _whole(getattr(self.layer, "bias", None))
        s = torch.nn.functional.linear(_whole(hidden), weight, bias) * self.factor
        return s if self.cap is None else softcap(self.cap)(s)

    def check(self, input_ids: Tensor, given: dict[str, Tensor]) -> None:
        """Compare the model's own logits of a few tokens with `scores`; once for each model."""
        if self.model in _CHECKED or not input_ids.numel():
            return
        states: list[Tensor] = []
        hook = self.layer.register_forward_pre_hook(lambda module, args: states.append(args[0]))
        try:
            with torch.no_grad():
                logits = self.model(input_ids=input_ids, use_cache=False, **given).logits.float()
                ours = self.scores(states[-1]).float() if states else None
        finally:
            hook.remove()
        near = 2e-2 * max(float(logits.std(correction=0)), 1e-6)
        if ours is None or ours.shape != logits.shape or not torch.allclose(ours, logits, rtol=2e-2, atol=near):
            raise ValueError(
                f"token_statistics: {type(self.model).__name__} does not compute its logits in a way that is known here; use "
                "anymax.log_prob_entropy with its logits"
            )
        _CHECKED.add(self.model)

    def statistics(
        self, hidden: Tensor, target: Tensor, mapping: Any, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """log p and entropy of each row, 0 where the target is -1."""
        options = dict(options)
        if self.cap is not None:  # before the caller's temperature
            steps = [softcap(self.cap)]
            if (temperature := options.pop("temperature", None)) is not None:
                if is_array(temperature) and temperature.ndim:
                    raise ValueError(
                        "token_statistics: this model caps its logits before the temperature, which must be one number then"
                    )
                steps.append(tempered(temperature))
            if options.get("transform") is not None:
                steps.append(options["transform"])
            options["transform"] = compose(*steps)
        weight, bias = self.layer.weight, getattr(self.layer, "bias", None)
        if self.factor != 1.0:
            hidden, bias = hidden * self.factor, None if bias is None else bias * self.factor
        there = target >= 0
        hidden = torch.where(there[..., None], hidden, 0.0)  # padding may be NaN
        arrays = [*options.values(), *(mapping.params().values() if isinstance(mapping, Mapping) else ())]
        if bool(there.all()) or "support" in options or any(is_array(v) for v in arrays):
            terms = linear.linear_log_prob_entropy(hidden, weight, target, mapping, linear_bias=bias, **options)
            log_p, h = map(_whole, terms)
            return log_p, torch.where(there, h, 0.0)
        found = linear.linear_log_prob_entropy(
            hidden[there], weight, target[there], mapping, linear_bias=bias, **options
        )
        log_p, h = (value.new_zeros(target.shape).masked_scatter(there, value) for value in map(_whole, found))
        return log_p, h


def _over_devices(model: torch.nn.Module) -> bool:
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return any(isinstance(m, fsdp) for m in model.modules()) or any(map(sharded, model.parameters()))


def _whole(a: Any) -> Any:
    return a.full_tensor() if sharded(a) else a


def _number(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, (int, float)) else None
