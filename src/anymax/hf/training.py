"""The loss of a causal language model under any map, from its hidden states: its logits are never made."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers

from .. import linear
from .._array import ABOVE_0, is_array, is_integer, shown
from .._core.mapping import Mapping
from .._core.options import check_keywords, check_options
from .._core.typing import Reduction
from ..mappings import Softmax
from ..transforms.base import check_range
from .head import Head, whole
from .texts import Texts, by_rows

Tensor = torch.Tensor

_SOFTMAX = Softmax()
# of `linear_loss`, but what the model says; `ignore_index` and `reduction` are among our own
_OPTIONS = tuple(
    sorted(
        {p.name for p in inspect.signature(linear.linear_loss).parameters.values() if p.kind is p.KEYWORD_ONLY}
        - {"linear_bias", "ignore_index", "reduction", "return_predicted"}
    )
)


def loss(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    labels: Tensor | None = None,
    *,
    mapping: Mapping | str = _SOFTMAX,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    temperature: Any = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    inputs: dict[str, Any] | None = None,
    **options: Any,
) -> Tensor:
    """The loss of a causal model of transformers under any map, with gradients; the logits are never made.

    Use it in place of `model(input_ids, labels=labels).loss`, which is its value for softmax, to train a model with another map, or with a
    large vocabulary. The loss of a map is that of `linear_loss`. The model's head is found and checked as in `token_statistics`. The
    model runs as you give it, with its wrappers, so that DDP, FSDP and gradient accumulation work. If the model adds the loss of its
    routers (`output_router_logits`), so does this.

    Parameters
    ----------
    model
        A causal model, such as one of `AutoModelForCausalLM`, also inside PEFT or `DistributedDataParallel`, or sharded by
        `fully_shard`.
    input_ids
        The tokens, [texts, length].
    attention_mask
        1 for tokens and 0 for padding, [texts, length], on either side.
    labels
        The token at each position, [texts, length], or `ignore_index`; they are shifted here, as in transformers. By default those
        of `input_ids` that are not padding and are predicted from none.
    mapping
        The map from logits to probabilities, softmax by default.
    shift_labels
        In place of labels: the token after each position, as collators without padding give it.
    num_items_in_batch
        By how many tokens a sum is divided, in place of this batch's own: those of all batches before a step of the optimiser, as
        transformers' `Trainer` counts them.
    temperature
        Divides the logits, before the transform: a number above 0, or one value for each entry of the result with
        `reduction="none"`.
    ignore_index
        The label of positions that are left out.
    reduction
        "mean" over the tokens, their "sum", or "none" for one value for each.
    inputs
        Further inputs of the model, such as `position_ids`.
    options
        All others of `linear_loss`, such as `weight` and `chunk`, but its `linear_bias`.

    Returns
    -------
    Tensor
        The loss in fp32, or fp64 for a model in it. With `reduction="none"` [texts, length - 1], or with `shift_labels` [texts, length]; 0
        where a position is left out.

    Examples
    --------
    >>> model = AutoModelForCausalLM.from_pretrained(name)  # doctest: +SKIP
    >>> anymax.hf.loss(model, input_ids, labels=labels, mapping="entmax15").backward()  # doctest: +SKIP
    """
    who = "loss"
    check_options(who, _OPTIONS, options)
    texts = Texts.read(who, input_ids, attention_mask, inputs)
    if num_items_in_batch is not None and reduction != "mean":
        raise ValueError(f"{who}: num_items_in_batch divides a sum; leave reduction={reduction!r} out")
    if temperature is not None:
        check_range(who, "temperature", temperature, ABOVE_0)
    target = _targets(texts, labels, shift_labels, ignore_index)
    how = {"ignore_index": ignore_index, "reduction": reduction if num_items_in_batch is None else "sum"}
    head = Head.of(who, model)

    def compute(hidden: Tensor) -> tuple[Tensor, ...]:
        hidden = hidden[:, : target.shape[1]]
        return (_of_rows(head, hidden, target, mapping, options | {"temperature": temperature}, how),)

    (value,), output = texts.run(head, compute)
    if num_items_in_batch is not None:
        n = num_items_in_batch
        value = value / (n.to(value.device) if isinstance(n, Tensor) else n)
    routers = getattr(output, "aux_loss", None)
    if routers is not None and reduction != "none":
        value = value + head.router_factor * whole(routers).to(value.device)
    return value


def _targets(texts: Texts, labels: Any, shift_labels: Any, ignore_index: int) -> Tensor:
    """The token to predict at each position but the last, or with `shift_labels` at each, or `ignore_index`."""
    who, ids = texts.who, texts.input_ids
    if labels is not None and shift_labels is not None:
        raise TypeError(f"{who}: give labels or shift_labels, not both")
    if labels is None and shift_labels is None:
        there = texts.predicted(max(texts.length - 1, 0))
        return ids[:, 1:] if there is None else torch.where(there, ids[:, 1:], ignore_index)
    name, given = ("labels", labels) if shift_labels is None else ("shift_labels", shift_labels)
    if not isinstance(given, Tensor) or not is_integer(given) or given.shape != ids.shape:
        raise ValueError(
            f"{who}: {name} must be integers of the shape of input_ids, {tuple(ids.shape)}, got {shown(given)}"
        )
    return given if shift_labels is not None else given[:, 1:]


def _of_rows(
    head: Head, hidden: Tensor, target: Tensor, mapping: Any, options: dict[str, Any], how: dict[str, Any]
) -> Tensor:
    """The loss of the rows whose target is not ignored."""
    target = target.to(hidden.device)
    there = target != how["ignore_index"]
    options = head.after_the_cap(options)
    temperature = options.pop("temperature", None)
    hidden, weight, bias = head.operands(hidden)
    if temperature is not None:
        rows = is_array(temperature) and temperature.ndim
        if rows and bias is not None:
            raise ValueError(f"{head.who}: the head of this model has a bias, so the temperature must be one number")
        hidden = hidden / (temperature[..., None].to(hidden) if rows else temperature)
        bias = None if bias is None else bias / temperature
    each_row = by_rows(mapping, {k: v for k, v in options.items() if k != "weight"})
    hidden = torch.where(there[..., None], hidden, 0.0) if each_row else hidden[there]  # what is left out may be NaN
    value = linear.linear_loss(
        hidden, weight, target if each_row else target[there], mapping, linear_bias=bias, **options, **how
    )
    value = whole(value)
    if each_row or how["reduction"] != "none":
        return value
    return value.new_zeros(target.shape).masked_scatter(there, value)


@check_keywords({"": "it makes the method of a Trainer: compute_loss = anymax.hf.compute_loss()"})
def compute_loss(mapping: Mapping | str = _SOFTMAX, *, temperature: Any = None, **options: Any) -> Callable[..., Any]:
    """The method `compute_loss` of a `Trainer` of transformers that trains a causal model by `loss`.

    The Trainer does the rest as for a model's own loss: it counts the tokens of all batches of a step, over processes too. In an evaluation
    it gets no logits; without `compute_metrics` it needs none.

    Parameters
    ----------
    mapping
        The map from logits to probabilities, softmax by default.
    temperature
        Divides the logits: a number above 0.
    options
        Further options of `loss`.

    Returns
    -------
    Callable
        A function for the body of a class that is a Trainer.

    Examples
    --------
    >>> from transformers import Trainer  # doctest: +SKIP
    >>> class EntmaxTrainer(Trainer):  # doctest: +SKIP
    ...     compute_loss = anymax.hf.compute_loss("entmax15")
    """
    check_options("compute_loss", _OPTIONS, options)

    def method(
        self: Any, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        def answer(**inputs: Any) -> dict[str, Tensor]:
            ours = {name: inputs.pop(name) for name in _OURS if name in inputs}
            return {"loss": loss(model, **ours, inputs=inputs, mapping=mapping, temperature=temperature, **options)}

        trainer: Any = transformers.Trainer  # it calls what stands for the model here
        return trainer.compute_loss(self, answer, inputs, return_outputs, num_items_in_batch)

    method.__name__ = "compute_loss"
    return method


_OURS = ("input_ids", "attention_mask", "labels", "shift_labels", "num_items_in_batch")
