"""One call of `attention`: its arguments, checked, and what torch's autocast and causal biases make of them."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, NamedTuple

from .._array import Array, in_memory, is_array, is_jax, is_torch, namespace, number, quiet, torch_loaded
from .._core.names import as_mapping
from ..mappings import Softmax
from . import operands
from .scores import Scores, prepare


class AttentionCall(NamedTuple):
    """One call of `attention`, checked."""

    q: Array
    k: Array
    v: Array
    scores: Scores
    groups: int  # queries' heads that share one of the keys
    dropout_p: float
    generator: Any
    need_weights: bool


def checked(
    q: Array, k: Array, v: Array, mapping: Any, *, enable_gqa: bool, dropout_p: float, generator: Any, need_weights: bool,
    **options: Any,
) -> tuple[AttentionCall, Any]:  # fmt: skip
    """The call, and the context to run it in."""
    if is_array(mapping):
        raise TypeError("attention: after q, k and v comes the map; give a mask as mask=")
    mapping = Softmax() if mapping is None else as_mapping(mapping, "attention")
    for name, value in (
        ("is_causal", options["is_causal"]),
        ("enable_gqa", enable_gqa),
        ("need_weights", need_weights),
    ):
        operands.flag("attention", name, value)
    dropout_p = operands.check_dropout("attention", "dropout_p", number(dropout_p))
    q, k, v, plain = _lower(*(in_memory(a, name) for a, name in ((q, "q"), (k, "k"), (v, "v"))))
    groups, shape = operands.check("attention", q, k, v, enable_gqa)
    if is_causal_bias(options["mask"]):
        options |= _of_causal_bias(options, q, shape)
    scores = prepare(q, shape, mapping, xp=namespace(q), **options)
    if shape[-1]:
        mapping.check(shape[-1] + (options["sink"] is not None))
    return AttentionCall(q, k, v, scores, groups, float(dropout_p), generator, need_weights), plain


# -- what torch says of a call ----------------------------------------------------------------------------------------------


def is_causal_bias(mask: Any) -> bool:
    """True for torch's `causal_lower_right` and its like: only their sizes say anything, what they hold is not a mask."""
    bias = sys.modules.get("torch.nn.attention.bias")
    return bias is not None and isinstance(mask, bias.CausalBias)


def offset_of(mask: Any) -> int:
    """Where the first query of a causal bias stands among its keys."""
    return mask.seq_len_kv - mask.seq_len_q if mask.variant.name == "LOWER_RIGHT" else 0


def kept_by(mask: Any, device: Any) -> Array:
    """A causal bias as a mask, True = keep."""
    torch = sys.modules["torch"]
    seen = torch.ones(mask.seq_len_q, mask.seq_len_kv, dtype=torch.bool, device=device)
    return seen.tril(offset_of(mask))


def _of_causal_bias(options: dict[str, Any], q: Array, shape: tuple[int, ...]) -> dict[str, Any]:
    """A causal bias as options."""
    mask = options["mask"]
    rows, keys = mask.seq_len_q, mask.seq_len_kv
    if (rows, keys) != shape[-2:]:
        raise ValueError(
            f"attention: the mask is a causal bias for {rows} queries and {keys} keys, and there are {shape[-2]} and {shape[-1]}"
        )
    if not options["is_causal"] and options["window"] is None and options["alibi"] in (None, False):
        return {"mask": None, "is_causal": True, "offset": offset_of(mask)}
    return {"mask": kept_by(mask, q.device)}  # positions are counted from another offset: that of the caller


def _lower(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array, Any]:
    """torch's autocast as its own attention has it: q, k and v in the lower dtype, and none of it inside. For JAX see `quiet`."""
    torch = torch_loaded()
    if torch is None or not all(is_torch(a) for a in (q, k, v)):
        return q, k, v, quiet(q) if is_jax(q) else contextlib.nullcontext()
    kind = q.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return q, k, v, contextlib.nullcontext()
    dtype = torch.get_autocast_dtype(kind)
    q, k, v = (a.to(dtype) if a.is_floating_point() and a.dtype != torch.float64 else a for a in (q, k, v))
    return q, k, v, torch.autocast(kind, enabled=False)
