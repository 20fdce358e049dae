"""Attention with any map; the reference, which keeps the whole attention matrix."""

from __future__ import annotations

import math
from typing import Any

from ._array import Array, beside, is_array, is_jax, is_torch, like, namespace, number, upcast
from ._mapping import Mapping
from ._random import uniform
from .functional import apply
from .mappings import Softmax


def attention(
    q: Array,
    k: Array,
    v: Array,
    mapping: Mapping | None = None,
    mask: Array | None = None,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
    bias: Array | None = None,
    dropout_p: float = 0.0,
    generator: Any = None,
) -> Array:
    """`p(scale q k^T + bias) v` with any map p, in the shapes of `torch.nn.functional.scaled_dot_product_attention`.

    q: [..., H, L, D]; k, v: [..., H, S, D]; the map acts on the S scores of each query. mask: boolean, True = keep, or additive;
    `is_causal` keeps key j for query i where j <= i; `bias` is added to the scores (a prior in logarithms, ALiBi). A query with
    nothing to attend to gives zeros. `enable_gqa` lets several heads of q share one of k and v. Dropout takes its
    randomness from `generator` (an integer seed, or the framework's own).
    """
    if mapping is not None and not isinstance(mapping, Mapping):
        raise TypeError(f"attention: mapping must be a mapping such as anymax.Sparsemax(), got {mapping!r}")
    _check_shapes(q, k, v, enable_gqa)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"attention: dropout_p must be at least 0 and below 1, got {dropout_p!r}")
    xp = namespace(q)
    dtype = q.dtype
    q, k, v = (upcast(a, xp) for a in (q, k, v))  # scores in half precision overflow, and round before the map
    if enable_gqa:
        k, v = (xp.repeat(a, q.shape[-3] // a.shape[-3], axis=-3) for a in (k, v))
    scores = q @ xp.matrix_transpose(k) * (1.0 / math.sqrt(q.shape[-1]) if scale is None else number(scale))
    keep = _causal(scores, xp) if is_causal else None
    if bias is not None:
        scores = scores + like(beside(bias, scores, "bias", xp), scores, xp)
    if mask is not None:
        given: Array = beside(mask, scores, "mask", xp)
        if str(given.dtype).rsplit(".", 1)[-1].startswith("bool"):
            keep = given if keep is None else keep & given
        else:
            scores = scores + like(given, scores, xp)
    p = apply(Softmax() if mapping is None else mapping, scores, mask=keep)
    if dropout_p:
        kept = uniform(tuple(p.shape), p, generator) >= dropout_p
        p = xp.where(kept, p / (1.0 - dropout_p), xp.zeros_like(p))
    out = p @ v
    return out if out.dtype == dtype else xp.astype(out, dtype)


def _causal(scores: Array, xp: Any) -> Array:
    rows, columns = scores.shape[-2:]
    place = {"device": scores.device} if is_torch(scores) else {}
    return xp.arange(columns, **place)[None, :] <= xp.arange(rows, **place)[:, None]


def _check_shapes(q: Array, k: Array, v: Array, enable_gqa: bool) -> None:
    for name, a in (("q", q), ("k", k), ("v", v)):
        if not is_array(a):
            raise TypeError(f"attention: {name} must be an array, got {type(a).__name__}")
        if a.ndim < 2:
            raise ValueError(
                f"attention: {name} needs at least two dimensions, [..., length, features], got {tuple(a.shape)}"
            )
    if len({(is_torch(a), is_jax(a)) for a in (q, k, v)}) > 1:
        raise TypeError("attention: q, k and v must be of one framework")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"attention: q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"attention: q has {q.shape[-1]} features and k has {k.shape[-1]}; they must agree")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"attention: k has length {k.shape[-2]} and v has {v.shape[-2]}; they must agree")
    if enable_gqa and (q.ndim < 3 or q.shape[-3] % k.shape[-3] or k.shape[-3] != v.shape[-3]):
        raise ValueError(
            f"attention: with enable_gqa the heads of q must be a multiple of those of k and v, got "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
