"""Attention of torch tensors by the Triton kernels: in eager calls, and as opaque operations under torch.compile.

Plain operations pack the arguments that vary into a few arrays, and autograd differentiates the packing: slope and sink of each head
of each batch in one array, lengths and offset of each batch in another. Second derivatives go through `torch_blockwise`, in plain
operations.
"""

from __future__ import annotations

import math
from typing import Any

import array_api_compat.torch as xp
import torch

from .._array import beside, fit_axes, modes, recorded
from ..autodiff.saving import As, restored
from ..autodiff.torch_adapter import opaque, operation, traced_operation
from ..kernels import triton as engine
from ..kernels.triton import attention as kernels
from . import torch_blockwise
from .call import AttentionCall
from .scores import ADDED, Scores

Tensor = torch.Tensor


def _named(names: str, arrays: Any) -> dict[str, Tensor]:
    return dict(zip(names.split(), arrays))


def _attention(q: Tensor, k: Tensor, v: Tensor, arrays: list[Tensor], names: str, *rest: Any) -> tuple[Tensor, ...]:
    *job, save = rest
    out, saved = kernels.forward(kernels.Job(*job), q, k, v, _named(names, arrays), save)
    return out, *saved


def _attention_fake(
    q: Tensor, k: Tensor, v: Tensor, arrays: list[Tensor], names: str, *rest: Any
) -> tuple[Tensor, ...]:
    *job, save = rest
    _, parts = kernels.sizes(kernels.Job(*job), q, k, v, save)
    saved = (torch.empty(shape, dtype=dtype, device=q.device) for shape, dtype in parts.values())
    return q.new_empty((*q.shape[:-1], v.shape[-1])), *saved


def _backward(q: Tensor, k: Tensor, v: Tensor, arrays: list[Tensor], names: str, *rest: Any) -> list[Tensor]:
    *call, out, state, lists, counts, flags, g, wants = rest
    job = kernels.Job(*call)
    saved = _restored(job, q, k, v, state, lists, counts, flags)
    gradients = kernels.backward(job, q, k, v, _named(names, arrays), out, saved, g, set(wants.split()))
    return [gradients[n] for n in wants.split()]


def _restored(job: kernels.Job, q: Tensor, k: Tensor, v: Tensor, *parts: Tensor) -> kernels.Saved:
    """The tensors that the forward pass saved, checked, since kernels read them by address; the kernels check the block numbers."""
    _, sizes = kernels.sizes(job, q, k, v, True)
    return kernels.Saved(*(restored(a, As(dtype, shape, q.device)) for a, (shape, dtype) in zip(parts, sizes.values())))


def _backward_fake(q: Tensor, k: Tensor, v: Tensor, arrays: list[Tensor], names: str, *rest: Any) -> list[Tensor]:
    inputs = {"q": q, "k": k, "v": v, **_named(names, arrays)}
    return [torch.empty_like(inputs[n], memory_format=torch.contiguous_format) for n in rest[-1].split()]


_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor[] arrays, str names, str link, int power, float param, float scale, float softcap, "
    "bool causal, SymInt left, SymInt right, SymInt offset, float dropout_p, bool alibi, bool sink"
)
_SAVED = "Tensor out, Tensor state, Tensor lists, Tensor counts, Tensor flags"
opaque(f"attention({_CALL}, bool save) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", _attention, _attention_fake)
opaque(f"attention_backward({_CALL}, {_SAVED}, Tensor g, str wants) -> Tensor[]", _backward, _backward_fake)


# -- derivatives ------------------------------------------------------------------------------------------------------------------


def _eager_forward(how: Any, operands: Any, wants: Any) -> tuple[Tensor, Any]:
    (job, _, names), (q, k, v, *arrays) = how, operands
    out, saved = kernels.forward(job, q, k, v, _named(names, arrays), True)
    return out, (out, *saved)


def _eager_backward(how: Any, operands: Any, kept: Any, grads: Any, wants: Any) -> Any:
    (job, _, names), (q, k, v, *arrays), (out, *saved) = how, operands, kept
    inputs = ("q", "k", "v", *names.split())
    wanted = {n for n, want in zip(inputs, wants) if want}
    saved = _restored(job, q, k, v, *saved)
    gradients = kernels.backward(job, q, k, v, _named(names, arrays), out, saved, grads[0], wanted)
    return [gradients[n] if n in wanted else None for n in inputs]


def _eager_plain(how: Any, operands: Any, kept: Any) -> Tensor:
    job, mapping, names = how
    if job.dropout_p:
        raise RuntimeError(
            "attention: there is no second derivative through the dropout of implementation 'triton', and no batch of gradients; "
            "ask for 'reference'"
        )
    return _plainly(job, mapping, dict(zip(("q", "k", "v", *names.split()), operands)))


_eager = operation("Attention", _eager_forward, _eager_backward, _eager_plain)


def _traced_run(how: Any, q: Tensor, k: Tensor, v: Tensor, *arrays: Tensor) -> tuple[Tensor, ...]:
    job, names = how
    return torch.ops.anymax.attention(q, k, v, arrays, names, *job, True)


def _traced_save(how: Any, tensors: Any, result: Any) -> Any:
    return *tensors, *result


def _traced_backward(how: Any, saved: Any, g: Tensor, wants: Any) -> Any:
    (job, names), (q, k, v, *rest) = how, saved
    inputs = ("q", "k", "v", *names.split())
    wanted = [n for n, want in zip(inputs, wants) if want]
    gradients = torch.ops.anymax.attention_backward(
        q, k, v, rest[:-5], names, *job, *rest[-5:], g.contiguous(), " ".join(wanted)
    )
    gradients = dict(zip(wanted, gradients))
    return [gradients.get(n) for n in inputs]


_traced = traced_operation("TracedAttention", _traced_run, _traced_backward, _traced_save)


def _plainly(job: Any, mapping: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The output by plain operations."""
    q, k, v = (inputs[n] for n in "qkv")
    arrays = {n: inputs[n] for n in (*ADDED, "keep") if n in inputs}
    if "heads" in inputs:
        slopes, sink = inputs["heads"].unbind(-1)
        arrays |= {"slopes": slopes[..., None, None]} if job.alibi else {}
        arrays |= {"sink": sink[..., None, None]} if job.sink else {}
    if "ranges" in inputs:
        own = inputs["ranges"].long()[:, :, None, None, None].unbind(1)
        arrays |= dict(zip(("lengths", "q_lengths", "offset"), own))
    if "param" in inputs:
        mapping = mapping.laid_out(**dict.fromkeys(mapping.params(), inputs["param"][..., None]))
    left, right = (None if n < 0 else n for n in (job.left, job.right))
    shape = (*q.shape[:-1], k.shape[-2])
    scores = Scores(shape, mapping, None, job.scale, job.softcap or None, job.causal, left, right, job.offset, arrays)
    call = AttentionCall(q, k, v, scores, q.shape[1] // k.shape[1], 0.0, None, False, False)
    return torch_blockwise.attend(call, None).out


# -- a call ------------------------------------------------------------------------------------------------------------------------


def _four(a: Tensor, batch: tuple[int, ...]) -> Tensor:
    """[..., heads, queries, keys] with one batch axis, of size 1 where all batches are the same."""
    a = a.reshape((1,) * (len(batch) + 3 - a.ndim) + tuple(a.shape))
    if any(n != 1 for n in a.shape[: len(batch)]):
        a = a.expand(*batch, *a.shape[-3:])
        return a.reshape(math.prod(batch), *a.shape[-3:])
    return a.reshape(1, *a.shape[-3:])


def _packed(s: Scores, q: Tensor, batch: tuple[int, ...], heads: int, count: int) -> dict[str, Tensor]:
    arrays = {n: _four(s.arrays[n], batch) for n in (*ADDED, "keep") if n in s.arrays}
    if "slopes" in s.arrays or "sink" in s.arrays:
        each = [
            _four(s.arrays[n], batch)[..., 0, 0].float().expand(count, heads)
            if n in s.arrays
            else q.new_zeros(count, heads, dtype=torch.float32)
            for n in ("slopes", "sink")
        ]
        arrays["heads"] = torch.stack(each, -1)
    if any(n in s.arrays for n in ("lengths", "q_lengths", "offset")):
        otherwise = {"lengths": s.shape[-1], "q_lengths": s.shape[-2], "offset": s.offset}
        each = [
            _four(s.arrays[n], batch).reshape(-1).to(torch.int32).expand(count) if n in s.arrays
            else torch.full((count,), value, dtype=torch.int32, device=q.device) for n, value in otherwise.items()
        ]  # fmt: skip
        arrays["ranges"] = torch.stack(each, -1)
    for name, value in s.mapping.params().items():
        value = _four(fit_axes(beside(value, q, name, xp), s.shape, f"attention: {name}"), batch)[..., 0]
        arrays["param"] = value if value.is_floating_point() else value.float()
    return arrays


def attend(call: AttentionCall, seed: Tensor | None) -> Tensor:
    """The output of a call of `attention` that `_refuse_triton` accepts."""
    s = call.scores
    shape = s.shape if len(s.shape) > 2 else (1, *s.shape)
    batch, heads = shape[:-3], shape[-3]
    shared = heads // call.groups
    count = math.prod(batch)
    q, k, v = (
        a if a.shape[:-2] == (count, own) else a.expand(*batch, own, *a.shape[-2:]).reshape(count, own, *a.shape[-2:])
        for a, own in ((call.q, heads), (call.k, shared), (call.v, shared))
    )
    features = v.shape[-1]
    q, k, v = kernels.even(q), kernels.even(k), kernels.even(v)
    arrays = _packed(s, q, batch, heads, count)
    if seed is not None:
        arrays["seed"] = seed
    link, power, param = kernels.attention_form(engine.triton_link(s.mapping))
    job = kernels.Job(
        link, power, param, s.scale, s.softcap or 0.0, s.causal, -1 if s.left is None else s.left,
        -1 if s.right is None else s.right, s.offset, call.dropout_p, "slopes" in s.arrays, "sink" in s.arrays,
    )  # fmt: skip
    names, tensors = " ".join(arrays), tuple(arrays.values())
    traced = torch.compiler.is_compiling() or modes()
    wants = recorded(q, k, v, *tensors)
    if traced and wants:
        out = _traced((job, names), q, k, v, *tensors)[0]
    elif traced:
        out = torch.ops.anymax.attention(q, k, v, tensors, names, *job, False)[0]
    elif wants:
        out = _eager((job, s.mapping, names), q, k, v, *tensors)
    else:
        out, _ = kernels.forward(job, q, k, v, arrays, False)
    out = out if v.shape[-1] == features else out[..., :features].contiguous()
    return out if out.shape[:-1] == s.shape[:-1] else out.reshape(*s.shape[:-1], features)
