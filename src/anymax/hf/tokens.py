"""Statistics of tokens under a causal language model, from its hidden states: its logits are never made."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import linear
from .._core.mapping import Mapping
from .._core.options import check_options
from ..mappings import Softmax
from .head import Head, whole
from .texts import Texts, by_rows

Tensor = torch.Tensor

_SOFTMAX = Softmax()
_OPTIONS = ("chunk", "mask", "support", "temperature", "transform")


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
    logits of the last tokens are compared with these. The model runs as you give it, with its wrappers, so that DDP and FSDP reduce the
    gradients as those of a loss.

    Parameters
    ----------
    model
        A causal model, such as one of `AutoModelForCausalLM`, also inside PEFT or `DistributedDataParallel`, or sharded by
        `fully_shard`.
    input_ids
        The tokens, [texts, length].
    attention_mask
        1 for tokens and 0 for padding, [texts, length], on either side. What belongs to padding is 0, and so is the first token after it,
        which is not predicted from a token.
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
    texts = Texts.read(who, input_ids, attention_mask, inputs)
    length = texts.length
    if last is None:
        last = max(length - 1, 0)
    if type(last) is not int or not 0 <= last < max(length, 1):
        raise ValueError(f"{who}: last must be a number of tokens from 0 to {max(length - 1, 0)}, got {last!r}")
    target, there = input_ids[:, length - last :], texts.predicted(last)
    head = Head.of(who, model)

    def compute(hidden: Tensor) -> tuple[Tensor, Tensor]:
        return _statistics(head, hidden[:, -last - 1 : -1], target, there, mapping, options)

    return TokenStatistics(*texts.run(head, compute)[0])


def _statistics(
    head: Head, hidden: Tensor, target: Tensor, there: Tensor | None, mapping: Any, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """log p and entropy of each row, 0 where it is not `there`."""
    options = head.after_the_cap(options)
    hidden, weight, bias = head.operands(hidden)

    def of(hidden: Tensor, target: Tensor) -> Any:
        return map(whole, linear.linear_log_prob_entropy(hidden, weight, target, mapping, linear_bias=bias, **options))

    if there is None or bool(there.all()):
        log_p, h = of(hidden, target)
        return log_p, h
    if by_rows(mapping, options):
        rows = of(torch.where(there[..., None], hidden, 0.0), target)  # padding may be NaN
        log_p, h = (torch.where(there, value, 0.0) for value in rows)
    else:
        log_p, h = (
            value.new_zeros(target.shape).masked_scatter(there, value) for value in of(hidden[there], target[there])
        )
    return log_p, h
