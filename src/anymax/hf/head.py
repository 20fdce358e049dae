"""The output layer of a causal model, and what else can be computed there while the model runs."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from .._array import is_array
from .._core.shards import sharded
from ..transforms import compose, softcap
from ..transforms import temperature as tempered

Tensor = torch.Tensor

_FACTORS = ("logit_scale", "lm_head_multiplier")  # numbers of a config that multiply the logits
_DIVISORS = ("logits_scaling",)  # and that divide them
# the functions for hidden states and for logits that do what a verb does for a model
_INSTEAD = {
    "token_statistics": ("linear_log_prob_entropy", "log_prob_entropy"),
    "loss": ("linear_loss", "fenchel_young"),
}
_CHECKED: weakref.WeakSet[Any] = weakref.WeakSet()  # models whose logits were compared with what is computed here


class Head(NamedTuple):
    """What a causal model computes after its last hidden state."""

    who: str  # the verb
    wrappers: tuple[Any, ...]  # the model as it was given, the one in it, ..., and at the end that of transformers
    layer: Any  # with a weight and perhaps a bias
    factor: float
    cap: float | None
    router_factor: float  # of the loss of a model's routers

    @classmethod
    def of(cls, who: str, given: Any) -> Head:
        # the replicas of DataParallel have no hooks
        wrappers = tuple(m for m in _unwrapped(given) if not isinstance(m, torch.nn.DataParallel))
        model = wrappers[-1]
        config = getattr(model, "config", None)
        layer = _active(getattr(model, "get_output_embeddings", lambda: None)())
        of_hidden, of_logits = _INSTEAD[who]
        if config is None or layer is None or getattr(config, "is_encoder_decoder", False):
            raise TypeError(
                f"{who}: expected a causal language model of transformers with an output layer, got {type(model).__name__}; "
                f"give hidden states and the weight of a head to anymax.{of_hidden}"
            )
        more = [name for name, _ in layer.named_parameters() if name not in ("weight", "bias")]
        adapters = (getattr(one, "active_peft_config", None) for one in wrappers)
        if more or any(getattr(a, "is_prompt_learning", False) for a in adapters):
            what = f"its output layer has further parameters, {', '.join(more)}" if more else "it learns its prompt"
            raise TypeError(
                f"{who}: {type(given).__name__} has more than a linear layer at its end: {what}; merge an adapter first (in PEFT by "
                f"merge_and_unload), or use anymax.{of_logits} with its logits"
            )
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        factor = math.prod(_number(text, name) or 1.0 for name in _FACTORS)
        factor /= math.prod(_number(text, name) or 1.0 for name in _DIVISORS)
        cap, router_factor = _number(text, "final_logit_softcapping"), _number(text, "router_aux_loss_coef") or 0.0
        return cls(who, wrappers, layer, factor, cap, router_factor)

    @property
    def weight(self) -> Tensor:
        return self.layer.weight

    @property
    def bias(self) -> Tensor | None:
        return getattr(self.layer, "bias", None)

    def operands(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """(hidden states, weight, bias) of the logits before the cap."""
        weight, bias = self.weight, self.bias
        if self.factor != 1.0:
            hidden, bias = hidden * self.factor, None if bias is None else bias * self.factor
        return hidden, weight, bias

    def after_the_cap(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options of a verb of output layers, which finds the cap in their transform, before the caller's temperature."""
        if self.cap is None:
            return options
        options, steps = dict(options), [softcap(self.cap)]
        if (temperature := options.pop("temperature", None)) is not None:
            if is_array(temperature) and temperature.ndim:
                raise ValueError(
                    f"{self.who}: this model caps its logits before the temperature, which must be one number then"
                )
            steps.append(tempered(temperature))
        if options.get("transform") is not None:
            steps.append(options["transform"])
        return options | {"transform": compose(*steps)}

    def scores(self, hidden: Tensor) -> Tensor:
        """The logits as they are understood here."""
        s = torch.nn.functional.linear(hidden, whole(self.weight), whole(self.bias)) * self.factor
        return s if self.cap is None else softcap(self.cap)(s)

    def run(self, compute: Callable[[Tensor], tuple[Tensor, ...]], **inputs: Any) -> tuple[tuple[Tensor, ...], Any]:
        """Call the model, and return what `compute` makes of the hidden states, [texts, length, features], that reach the output layer,
        and what else the model returns.

        It is computed within the forward pass of all wrappers: FSDP has gathered the weight by then, and what DDP and FSDP do with
        gradients is done with these. The logits are those of one token of each text; the first time they are compared with `scores`.
        """
        model = self.wrappers[-1]
        visit = _Visit(self, compute, tuple(inputs["input_ids"].shape), check=model not in _CHECKED)
        hooks = (
            self.layer.register_forward_pre_hook(visit.before),  # the last, after those of wrappers
            self.layer.register_forward_hook(visit.after, prepend=True),  # and the first
        )
        try:
            with _uncompiled(self.wrappers):
                output = self.wrappers[0](use_cache=False, **inputs)
        finally:
            for hook in hooks:
                hook.remove()
        if visit.error is not None:
            raise visit.error
        logits = output.logits
        if visit.count != 1 or not visit.agrees(logits):
            raise ValueError(
                f"{self.who}: {type(model).__name__} does not compute its logits in a way that is known here; use "
                f"anymax.{_INSTEAD[self.who][1]} with its logits"
            )
        if visit.own is not None:
            _CHECKED.add(model)
        return tuple(_after(value, logits) for value in visit.found), output


class _Visit:
    """The hooks of the output layer while a model runs once."""

    def __init__(
        self, head: Head, compute: Callable[[Tensor], tuple[Tensor, ...]], shape: tuple[int, ...], check: bool
    ) -> None:
        self.head, self.compute, self.shape, self.check = head, compute, shape, check
        self.count = 0  # of the times that the layer was called with the hidden states of all tokens
        self.hidden: Tensor | None = None
        self.found: tuple[Tensor, ...] = ()
        self.own: Tensor | None = None  # the logits that are expected
        self.error: Exception | None = None

    def before(self, layer: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """The output layer sees the last token of each text alone, without a gradient."""
        if not args or tuple(args[0].shape[:-1]) != self.shape:
            return None
        self.count += 1
        self.hidden = whole(args[0])
        return (args[0][:, -1:].detach(), *args[1:])

    def after(self, layer: Any, args: tuple[Any, ...], logits: Tensor) -> Tensor:
        if self.hidden is None:
            return logits
        try:
            self.found = self.compute(self.hidden)
            if self.check:
                self.own = self.head.scores(whole(args[0])).detach().float()
        except Exception as error:  # raised after the pass: FSDP can't begin another one if this does not end
            self.error = error
        self.hidden = None
        return _after(logits.detach(), *self.found)

    def agrees(self, logits: Tensor) -> bool:
        """Whether the logits of the model are those that are expected, where these are finite."""
        if self.own is None:
            return True
        ours, theirs = self.own, whole(logits).detach().float()
        if ours.shape != theirs.shape:
            return False
        fine = torch.isfinite(ours).all(-1)
        if not bool(fine.any()):
            self.own = None
            return True
        ours, theirs = ours[fine], theirs[fine]
        return torch.allclose(ours, theirs, rtol=2e-2, atol=2e-2 * max(float(theirs.std(correction=0)), 1e-6))


class _After(torch.autograd.Function):
    """A tensor as it is, made after others: they get a gradient of 0 from it, so that hooks on it run before their backward pass."""

    @staticmethod
    def forward(value: Tensor, *others: Tensor) -> Tensor:  # type: ignore[override]
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, *map(torch.zeros_like, ctx.saved_tensors)


def _after(value: Tensor, *others: Tensor) -> Tensor:
    return _After.apply(value, *others) if any(a.requires_grad for a in others) else value


def _unwrapped(model: Any) -> Iterator[Any]:
    """The model and those in it, from outside inwards."""
    yield model
    if hasattr(model, "_orig_mod"):  # torch.compile
        yield from _unwrapped(model._orig_mod)
    elif hasattr(model, "get_base_model"):  # PEFT
        yield from _unwrapped(model.get_base_model())
    elif "module" in getattr(model, "_modules", ()) and getattr(type(model), "get_output_embeddings", None) is None:
        yield from _unwrapped(model.module)  # DDP, DeepSpeed


def _active(layer: Any) -> Any:
    """The layer that runs; PEFT keeps a copy of one that it trains whole (`modules_to_save`) beside the original."""
    copies = getattr(layer, "modules_to_save", None)
    if copies is None:
        return layer
    return layer.original_module if layer.disable_adapters else copies[layer.active_adapters[0]]


def _uncompiled(models: tuple[Any, ...]) -> Any:
    """A context in which they run as they are written: a compiled model would be compiled again, with the hooks of each call."""
    compiled = any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in models)
    return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()


def whole(a: Any) -> Any:
    return a.full_tensor() if sharded(a) else a


def _number(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, (int, float)) else None
