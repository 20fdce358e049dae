"""The arguments of one call of `attention`, checked; torch's autocast and causal biases are translated here."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from typing import Any, NamedTuple

from .._array import Array, in_memory, is_array, is_jax, is_torch, namespace, number, quiet, torch_loaded
from .._core.names import as_mapping
from ..mappings import Softmax
from . import operands
from .scores import Options, Scores, prepare


class AttentionCall(NamedTuple):
    """The checked arguments of one call of `attention`."""

    q: Array
    k: Array
    v: Array
    scores: Scores
    groups: int  # heads of q for each head of k
    dropout_p: float
    generator: Any
    need_weights: bool


def checked(q: Array, k: Array, v: Array, options: Options) -> tuple[AttentionCall, Any]:
    """The checked call, and the context manager to run it in."""
    if is_array(options.mapping):
        raise TypeError("attention: after q, k and v comes the map; give a mask as mask=")
    mapping = Softmax() if options.mapping is None else as_mapping(options.mapping, "attention")
    for name in ("is_causal", "enable_gqa", "need_weights"):
        operands.flag("attention", name, getattr(options, name))
    dropout_p = operands.check_dropout("attention", "dropout_p", number(options.dropout_p))
    q, k, v, plain = _lower(*(in_memory(a, name) for a, name in ((q, "q"), (k, "k"), (v, "v"))))
    groups, shape = operands.check("attention", q, k, v, options.enable_gqa)
    if is_causal_bias(options.mask):
        options = _without_causal_bias(options, q, shape)
    scores = prepare(q, shape, mapping, options, namespace(q))
    if shape[-1]:
        mapping.check(shape[-1] + (options.sink is not None))
    return AttentionCall(q, k, v, scores, groups, float(dropout_p), options.generator, options.need_weights), plain


# -- torch's causal biases and autocast -------------------------------------------------------------------------------------


def is_causal_bias(mask: Any) -> bool:
    """True for torch's `causal_lower_right` and `causal_upper_left`: only their sizes count, their elements are not a mask."""
    bias = sys.modules.get("torch.nn.attention.bias")
    return bias is not None and isinstance(mask, bias.CausalBias)


def offset_of(mask: Any) -> int:
    """The position of a causal bias's first query among its keys."""
    return mask.seq_len_kv - mask.seq_len_q if mask.variant.name == "LOWER_RIGHT" else 0


def kept_by(mask: Any, device: Any) -> Array:
    """The causal bias as a boolean mask, True = keep."""
    torch = sys.modules["torch"]
    seen = torch.ones(mask.seq_len_q, mask.seq_len_kv, dtype=torch.bool, device=device)
    return seen.tril(offset_of(mask))


def _without_causal_bias(options: Options, q: Array, shape: tuple[int, ...]) -> Options:
    """The options without the causal bias: other options, or a boolean mask, do what it does."""
    mask = options.mask
    rows, keys = mask.seq_len_q, mask.seq_len_kv
    if (rows, keys) != shape[-2:]:
        raise ValueError(
            f"attention: the mask is a causal bias for {rows} queries and {keys} keys, and there are {shape[-2]} and {shape[-1]}"
        )
    if not options.is_causal and options.window is None and options.alibi in (None, False):
        return dataclasses.replace(options, mask=None, is_causal=True, offset=offset_of(mask))
    # a mask, since the caller's window or ALiBi counts positions from the caller's offset
    return dataclasses.replace(options, mask=kept_by(mask, q.device))


def _lower(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array, Any]:
    """q, k, v in autocast's dtype, as in torch's own attention, and a context that turns autocast off. For JAX see `quiet`."""
    torch = torch_loaded()
    if torch is None or not all(is_torch(a) for a in (q, k, v)):
        return q, k, v, quiet(q) if is_jax(q) else contextlib.nullcontext()
    kind = q.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return q, k, v, contextlib.nullcontext()
    dtype = torch.get_autocast_dtype(kind)
    q, k, v = (a.to(dtype) if a.is_floating_point() and a.dtype != torch.float64 else a for a in (q, k, v))
    return q, k, v, torch.autocast(kind, enabled=False)
