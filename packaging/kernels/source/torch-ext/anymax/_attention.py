"""Attention whose weights come from any of four maps, without the matrix of scores: forward, and all gradients."""

from __future__ import annotations

import math
from typing import Any

import torch

from ._kernels.triton import attention as kernels
from ._kernels.triton import limits
from ._links import check, check_classes, link_of, words_of
from ._ops import add_op_namespace_prefix, ops
from .rows import once

Tensor = torch.Tensor

_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor[] arrays, str names, str link, int power, float param, float scale, float softcap, "
    "bool causal, SymInt left, SymInt right, SymInt offset, float dropout_p, bool alibi, bool sink"
)


@torch.library.custom_op(
    add_op_namespace_prefix("attention"),
    mutates_args=(),
    schema=f"({_CALL}, bool save) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _attention(q: Tensor, k: Tensor, v: Tensor, arrays: Any, names: str, *rest: Any) -> Any:
    *job, save = rest
    out, saved = kernels.forward(kernels.Job(*job), q, k, v, _named(names, arrays), save)
    return (out, *saved)


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, arrays: Any, names: str, *rest: Any) -> Any:
    *job, save = rest
    _, parts = kernels.sizes(kernels.Job(*job), q, k, v, save)
    saved = (torch.empty(shape, dtype=dtype, device=q.device) for shape, dtype in parts.values())
    return (q.new_empty((*q.shape[:-1], v.shape[-1])), *saved)


@torch.library.custom_op(
    add_op_namespace_prefix("attention_grad"),
    mutates_args=(),
    schema=f"({_CALL}, Tensor out, Tensor state, Tensor lists, Tensor counts, Tensor flags, Tensor g, str wants) -> Tensor[]",
)
def _attention_grad(q: Tensor, k: Tensor, v: Tensor, arrays: Any, names: str, *rest: Any) -> Any:
    *job, out, state, lists, counts, flags, g, wants = rest
    saved = kernels.Saved(state, lists, counts, flags)
    found = kernels.backward(kernels.Job(*job), q, k, v, _named(names, arrays), out, saved, g, set(wants.split()))
    return [found[name] for name in wants.split()]


@_attention_grad.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, arrays: Any, names: str, *rest: Any) -> Any:
    given = {"q": q, "k": k, "v": v, **_named(names, arrays)}
    return [torch.empty_like(given[name], memory_format=torch.contiguous_format) for name in rest[-1].split()]


def _named(names: str, arrays: Any) -> dict[str, Tensor]:
    return dict(zip(names.split(), arrays))


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: Any, names: str, q: Tensor, k: Tensor, v: Tensor, *arrays: Tensor) -> Tensor:
        out, saved = kernels.forward(job, q, k, v, _named(names, arrays), True)
        ctx.job, ctx.names = job, names
        ctx.save_for_backward(q, k, v, *arrays, out, *saved)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        once()
        q, k, v, *rest = ctx.saved_tensors
        arrays, (out, *saved) = _named(ctx.names, rest[:-5]), rest[-5:]
        names = ("q", "k", "v", *arrays)
        wants = {name for name, needed in zip(names, ctx.needs_input_grad[2:]) if needed}
        found = kernels.backward(ctx.job, q, k, v, arrays, out, kernels.Saved(*saved), grads[0], wants)
        return (None, None, *(found[name] if name in wants else None for name in names))


class _Opaque(torch.autograd.Function):
    @staticmethod
    def forward(job: Any, names: str, q: Tensor, k: Tensor, v: Tensor, *arrays: Tensor) -> Any:
        return ops.attention(q, k, v, arrays, names, *job, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.job, ctx.names, *tensors = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, *rest = ctx.saved_tensors
        arrays, saved = rest[:-5], rest[-5:]
        names = ("q", "k", "v", *ctx.names.split())
        wants = [name for name, needed in zip(names, ctx.needs_input_grad[2:]) if needed]
        found = ops.attention_grad(q, k, v, arrays, ctx.names, *ctx.job, *saved, grads[0].contiguous(), " ".join(wants))
        found = dict(zip(wants, found))
        return (None, None, *(found.get(name) for name in names))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    map: str = "softmax",
    *,
    alpha: float | None = None,
    k: float | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    window: tuple[int | None, int | None] = (None, None),
    offset: int = 0,
    alibi: Tensor | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """map(scale query key^T) value, for query [B, H, L, D], key [B, H', S, D] and value [B, H', S, E], where H' divides H.

    map: "softmax", "sparsemax", "entmax" (alpha) or "budget" (k). mask: boolean, True where a query may see a key, and bias: added to
    the scores, both broadcast to [B, H, L, S]. is_causal: query i sees keys up to i + offset. window: how many keys to the left and to the
    right of its place a query sees. softcap: scores are softcap tanh(score / softcap). alibi: slopes [H], times the distance. sink: [H],
    the score of one more key without a value. Gradients go to query, key, value, bias, alibi and sink.
    """
    words = words_of("attention", "forward", map, alpha=alpha, k=k)
    if words.kind not in limits.ATTENTION:
        raise ValueError(f"attention: map is one of {', '.join(limits.ATTENTION)}, not {map!r}")
    check("attention", query, key, value, mask, bias, alibi, sink, dtypes=(*limits.DTYPES, "bool"))
    shape = _shape(query, key, value)
    check_classes("attention", words, shape[-1])
    features = value.shape[-1]
    q, k_, v = kernels.even(query), kernels.even(key), kernels.even(value)
    arrays = {}
    if bias is not None:
        arrays["bias"] = _four(bias, shape, "bias")
    if mask is not None:
        if mask.dtype != torch.bool:
            raise TypeError(f"attention: mask has booleans, not {mask.dtype}; numbers to add are a bias")
        arrays["keep"] = _four(mask, shape, "mask")
    if alibi is not None or sink is not None:
        zeros = query.new_zeros(shape[1], dtype=torch.float32)
        arrays["heads"] = torch.stack(
            [zeros if a is None else a.float().reshape(-1).expand(shape[1]) for a in (alibi, sink)], -1
        )
    left, right = (-1 if side is None else int(side) for side in window)
    link, power, param = kernels.attention_form(link_of(words))
    job = kernels.Job(
        link, power, param, 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale), float(softcap), is_causal, left, right,
        offset, 0.0, alibi is not None, sink is not None,
    )  # fmt: skip
    names, tensors = " ".join(arrays), tuple(arrays.values())
    learns = torch.is_grad_enabled() and any(a.requires_grad for a in (q, k_, v, *tensors))
    if torch.compiler.is_compiling():
        out = (
            _Opaque.apply(job, names, q, k_, v, *tensors)[0]
            if learns
            else ops.attention(q, k_, v, tensors, names, *job, False)[0]
        )
    elif learns:
        out = _Eager.apply(job, names, q, k_, v, *tensors)
    else:
        out, _ = kernels.forward(job, q, k_, v, arrays, False)
    return out if out.shape[-1] == features else out[..., :features].contiguous()


def _shape(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    right = q.ndim == k.ndim == v.ndim == 4
    right = right and q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1] == v.shape[1] and k.shape[2] == v.shape[2]
    if not right or q.shape[3] != k.shape[3] or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(
            "attention: query [B, H, L, D], key [B, H', S, D] and value [B, H', S, E], where H' divides H, not "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype or not 0 < q.shape[3] <= 256 or not 0 < v.shape[3] <= 256:
        raise ValueError("attention: query, key and value have one dtype and 1 to 256 features")
    return (*q.shape[:3], k.shape[2])


def _four(a: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    a = a.reshape((1,) * (4 - a.ndim) + tuple(a.shape))
    if a.ndim != 4 or any(n not in (1, m) for n, m in zip(a.shape, shape)):
        raise ValueError(f"attention: {name} broadcasts to {tuple(shape)}, not {tuple(a.shape)}")
    return a
