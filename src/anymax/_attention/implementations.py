"""The implementations of `attention`, and the choice among them.

The first of `IMPLEMENTATIONS` that does not refuse a call and that pays computes it. The reference keeps the whole matrix and never
refuses. A refusal is a sentence; it is the error message where the caller named that implementation.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from .. import kernels
from .._array import (
    Array,
    Namespace,
    device_of,
    dtype_name,
    eager,
    is_array,
    is_torch,
    namespace,
    recorded,
    torch_exports,
    transformed,
    upcast,
)
from .._random.generators import global_source, torch_source, uniform
from ..functional import apply
from ..thresholds import tau_of
from .call import AttentionCall, Result
from .linear import linear_attention
from .linear import refuse as refuse_linear
from .scores import BLOCK, MASKED, Scores, refuse_tiles

_MATRIX = 1 << 24  # scores, 64 MB in float32: above it always in blocks
_FEW = 1 << 19  # scores: up to here never in blocks
# measured: from so many keys on, blocks are faster than the matrix, without and with a gradient
_KEYS, _TRACKED_KEYS = 512, 1024
# measured: up to so many keys, torch's gradients in half precision are slower than the matrix on a CPU
_HALF_KEYS = {"bfloat16": 128, "float16": math.inf}


class Implementation(NamedTuple):
    """`run(call)` returns the output and, where the call needs it, the matrix; `slow` is the sentence where `pays` is False.

    `pays` is asked first, also about calls that it refuses.
    """

    name: str
    refuse: Callable[[AttentionCall], str | None]
    pays: Callable[[AttentionCall], bool]
    run: Callable[[AttentionCall], Result]
    slow: str = "it would not be faster here"


def _reference(call: AttentionCall) -> Result:
    xp = namespace(call.q)
    q, k, v = (upcast(a, xp) for a in (call.q, call.k, call.v))  # scores in half precision overflow and lose digits
    p = _products(q, k, call.groups)
    s, tau = call.scores.of(p, xp), None
    if call.return_threshold:
        tau = (
            tau_of(call.scores.mapping, s, xp)[..., 0]
            if s.shape[-1]
            else xp.full(s.shape[:-1], -math.inf, dtype=s.dtype, **device_of(s))
        )
    if call.scores.shape[-1]:
        p = apply(call.scores.mapping, s)
        p = p[..., :-1] if "sink" in call.scores.arrays else p
    return Result(values(_dropped(p, call, xp), v, call.groups), p, tau)


def _products(q: Array, k: Array, groups: int) -> Array:
    """q k^T; the queries of heads that share keys are stacked as rows, so the keys need not be repeated."""
    xp = namespace(q)
    if groups == 1:
        return q @ xp.matrix_transpose(k)
    heads, rows = q.shape[-3:-1]
    s = xp.reshape(q, (*q.shape[:-3], heads // groups, groups * rows, q.shape[-1])) @ xp.matrix_transpose(k)
    return xp.reshape(s, (*s.shape[:-3], heads, rows, s.shape[-1]))


def values(p: Array, v: Array, groups: int) -> Array:
    xp = namespace(p)
    if groups == 1:
        return p @ v
    heads, rows = p.shape[-3:-1]
    out = xp.reshape(p, (*p.shape[:-3], heads // groups, groups * rows, p.shape[-1])) @ v
    return xp.reshape(out, (*out.shape[:-3], heads, rows, out.shape[-1]))


def _dropped(p: Array, call: AttentionCall, xp: Namespace) -> Array:
    if not call.dropout_p:
        return p
    if is_torch(p) and call.generator is None and sys.modules["torch"].compiler.is_compiling():
        # a compiler takes no generator, not even the global one
        return sys.modules["torch"].nn.functional.dropout(p, call.dropout_p)
    kept = uniform(tuple(p.shape), p, _source(call)) >= call.dropout_p
    return xp.where(kept, p / (1.0 - call.dropout_p), xp.zeros_like(p))


def _source(call: AttentionCall) -> Any:
    """The caller's generator; for torch without one, torch's global generator, as in its own functions."""
    return call.generator if call.generator is not None or not is_torch(call.q) else global_source(call.q.device)


def _refuse_sdpa(call: AttentionCall) -> str | None:
    s = call.scores
    if not s.mapping.is_softmax:
        return f"torch has attention with softmax, not with {s.mapping.name}"
    if not is_torch(call.q):
        return "it takes torch tensors"
    for what, there in (
        ("soft-capped scores", s.softcap is not None), ("a transform", s.transform is not None), ("a sink", "sink" in s.arrays),
        ("the weights", call.need_weights), ("the threshold", call.return_threshold),
        ("a generator", call.dropout_p and call.generator is not None),
        ("offsets for each batch", "offset" in s.arrays), ("an array as scale", "scale" in s.arrays),
        ("ALiBi without the whole matrix", "slopes" in s.arrays), ("lengths of queries", "q_lengths" in s.arrays),
    ):  # fmt: skip
        if there:
            return f"torch's attention does not support {what}"
    if call.q.ndim < 3 or not math.prod(call.q.shape):
        return "torch's attention needs heads, and arrays that are not empty"
    if transformed():
        return "torch's fused attention has no forward-mode derivative"
    if _window_of(s) and s.shape[-1] * s.shape[-2] > _MATRIX:
        return "torch's attention would need the window as a matrix"
    return None


def _sdpa_pays(call: AttentionCall) -> bool:
    """False on a CPU where a window hides most keys from a block of queries, as torch computes all scores under a mask of them all; and
    where torch's gradients in half precision take 1.4 to 7 times as long as those of the matrix."""
    s, q = call.scores, call.q
    if not is_torch(q) or not eager(q) or q.device.type != "cpu":
        return True
    rows, keys = s.shape[-2:]
    if keys <= _HALF_KEYS.get(dtype_name(q), 0) and not call.dropout_p and _tracked(call):
        return False
    right = 0 if s.causal else s.right
    if s.left is None or right is None:
        return True
    if call.groups * rows * keys <= BLOCK:
        return True
    seen = s.left + right + 1 + BLOCK // (call.groups * keys)  # keys that a block of queries sees
    return 2 * seen >= keys or _refuse_blocks(call) is not None  # measured: a score costs blocks 1.4 to 2 times as much


def _window_of(s: Scores) -> bool:
    """True where positions mask keys that `is_causal` of torch can't: torch multiplies the mask's -inf by the scale, which must be > 0."""
    further = s.causal and (s.offset != 0 or len(s.arrays) > 0 or not s.scale > 0)
    return s.left is not None or s.right is not None or further


def _sdpa(call: AttentionCall) -> Result:
    torch = sys.modules["torch"]
    s, q = call.scores, call.q
    xp = namespace(q)
    causal = s.causal and not _window_of(s)
    rest = dataclasses.replace(s, causal=s.causal and not causal)
    added = s.added
    keep = rest.visible(q, xp)
    mask = keep
    if added:
        mask = added[0] if len(added) == 1 else added[0] + added[1]
        if keep is not None:
            mask = torch.where(keep, mask, MASKED)
        if q.device.type != "cpu":  # elsewhere torch's kernels need it in the dtype of q
            mask = mask.to(q.dtype)
    out = torch.nn.functional.scaled_dot_product_attention(
        q, call.k, call.v, attn_mask=mask, dropout_p=call.dropout_p, is_causal=causal, scale=s.scale,
        enable_gqa=call.groups > 1,
    )  # fmt: skip
    return Result(out)


def _refuse_triton(call: AttentionCall) -> str | None:
    s, q = call.scores, call.q
    if not is_torch(q):
        return "it takes torch tensors on a GPU"
    if q.device.type != "cuda" and not (q.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return f"it takes tensors on a GPU (CUDA, ROCm), these are on {q.device}"
    if dtype_name(q) not in ("float32", "bfloat16", "float16"):
        return f"it takes float32, bfloat16 and float16, not {q.dtype}"
    if call.need_weights:
        return "the weights are the matrix that it never has"
    if call.return_threshold:
        return "its kernels keep the threshold in a form of their own"
    compiling = sys.modules["torch"].compiler.is_dynamo_compiling()
    if transformed() or not (eager(q) or compiling) or torch_exports():
        return "it takes eager calls and torch.compile; under a transform or export, plain operations are to be seen"
    if reason := kernels.triton.refuse_attention(s.mapping):
        return reason
    if any(is_array(a) and a.ndim and a.shape[-1] != 1 for a in s.mapping.params().values()):
        return "it takes one parameter of the map for all keys of a query"
    if s.transform is not None:
        return "it has no transforms of the scores"
    if "scale" in s.arrays:
        return "it takes a number as scale; multiply q by an array"
    if "sink" in s.arrays and any(n != 1 for n in s.arrays["sink"].shape[-2:]):
        return "it takes one sink for each head, not for each query"
    if not 0 < q.shape[-1] <= 256 or not 0 < call.v.shape[-1] <= 256:
        return f"it has heads of 1 to 256 features, not {q.shape[-1]} and {call.v.shape[-1]}"
    if compiling:
        return "a generator can't be traced" if call.dropout_p and call.generator is not None else None
    launch = kernels.triton.load()
    return launch if isinstance(launch, str) else None


def _triton(call: AttentionCall) -> Result:
    from . import torch_flash  # late: only where torch and Triton are loaded already

    if not call.dropout_p:
        return Result(torch_flash.attend(call, None))
    torch = sys.modules["torch"]
    if torch.compiler.is_dynamo_compiling():
        seed = torch.randint(2**62, (1,), device=call.q.device)
    else:
        source = torch_source(call.q, _source(call))
        seed = torch.randint(2**62, (1,), generator=source, device=source.device).to(call.q.device)
    return Result(torch_flash.attend(call, seed))


def _refuse_blocks(call: AttentionCall) -> str | None:
    if not is_torch(call.q):
        return "it takes torch tensors; XLA fuses the formula on its own, and NumPy has the reference"
    if call.need_weights:
        return "the weights are the matrix that it never has"
    if transformed() or not eager(call.q):
        return "it takes eager calls; under a transform or while tracing, plain operations are to be seen"
    return refuse_tiles(call.scores)


def _blocks(call: AttentionCall) -> Result:
    from . import torch_blockwise  # late: only where torch is loaded already

    return torch_blockwise.attend(call, torch_source(call.q, _source(call)) if call.dropout_p else None)


def _refuse_linear(call: AttentionCall) -> str | None:
    s = call.scores
    extra = sorted(set(s.arrays) - {"lengths"})
    if extra or s.softcap is not None or s.transform is not None or s.left is not None or s.right is not None:
        return "linear attention has scores q k^T alone, with a scale, a causal mask and lengths"
    if call.dropout_p or call.need_weights:
        return "linear attention has no matrix of probabilities to drop from or to return"
    if s.causal and s.offset:
        return "linear attention begins at the first key; carry on with the state of anymax.linear_attention"
    return refuse_linear(s.mapping)


def _linear(call: AttentionCall) -> Result:
    s, lengths = call.scores, call.scores.arrays.get("lengths")
    if lengths is not None:
        lengths = namespace(lengths).reshape(lengths, lengths.shape[:-3])
    gqa = call.groups > 1
    out = linear_attention(
        call.q, call.k, call.v, s.mapping, is_causal=s.causal, scale=s.scale, enable_gqa=gqa, lengths=lengths
    )
    return Result(out)


def _empty(call: AttentionCall) -> bool:
    """True where there are no scores: the output is empty or 0."""
    return 0 in call.scores.shape


def _always(call: AttentionCall) -> bool:
    return True


def _never(call: AttentionCall) -> bool:
    return False


def _tracked(call: AttentionCall) -> bool:
    return recorded(call.q, call.k, call.v, *call.scores.mapping.params().values())


def _fills_gpu(call: AttentionCall) -> bool:
    """False for few queries against a long cache with gradients: those kernels do not split the keys, so few processors would work,
    their matrix is small, and read by all."""
    if not is_torch(call.q) or not call.q.is_cuda:
        return False
    *batch, rows, keys = call.scores.shape
    small = rows <= 16 and math.prod(batch) < 128 and keys > 1024
    return not (small and _tracked(call) and math.prod(call.scores.shape) <= _MATRIX)


def _large(call: AttentionCall) -> bool:
    if not eager(call.q):  # a trace may have sizes that must not be compared
        return False
    count = math.prod(call.scores.shape)
    return count > _MATRIX or (count > _FEW and call.scores.shape[-1] >= (_TRACKED_KEYS if _tracked(call) else _KEYS))


REFERENCE = Implementation("reference", lambda call: None, _always, _reference)
IMPLEMENTATIONS: tuple[Implementation, ...] = (
    Implementation(
        "sdpa",
        _refuse_sdpa,
        _sdpa_pays,
        _sdpa,
        "it is slower here: on a CPU torch computes what a window hides, and its gradients in half precision take long",
    ),
    Implementation(
        "triton",
        _refuse_triton,
        _fills_gpu,
        _triton,
        "it is faster only on a GPU, and with gradients only for more than a few queries",
    ),
    Implementation("blockwise", _refuse_blocks, _large, _blocks, "so few scores are faster as one matrix"),
    Implementation("linear", _refuse_linear, _never, _linear, "it rounds differently; name it to use it"),
    REFERENCE,
)


def named(name: str | None) -> Implementation | None:
    if name is None:
        return None
    for one in IMPLEMENTATIONS:
        if one.name == name:
            return one
    raise ValueError(
        f"attention: there is no implementation {name!r}; there are {', '.join(i.name for i in IMPLEMENTATIONS)}"
    )


def choose(call: AttentionCall, asked: Implementation | None) -> Implementation:
    """The implementation that the caller named, or the first that pays and does not refuse.

    It is the reference where there are no scores, so no other handles that case, and within `anymax.use("reference")`.
    """
    if asked is not None:
        reason = asked.refuse(call)
        if reason is not None:
            raise ValueError(f"attention: implementation {asked.name!r} can't take this call: {reason}")
    chosen = asked or next(one for one in IMPLEMENTATIONS if one.pays(call) and one.refuse(call) is None)
    if chosen is REFERENCE or _empty(call) or (asked is None and eager(call.q) and kernels.asked() == "reference"):
        return REFERENCE
    return chosen


def explained(call: AttentionCall, asked: Implementation | None) -> tuple[Implementation, tuple[tuple[str, str], ...]]:
    """The choice of `choose`, and a pair (name, reason) for each implementation before it."""
    chosen = choose(call, asked)
    refusals = []
    for other in IMPLEMENTATIONS[: IMPLEMENTATIONS.index(chosen)]:
        reason = other.refuse(call) or ("there are no scores" if _empty(call) else None)
        reason = reason or (f"{chosen.name!r} was asked for" if other.pays(call) else other.slow)
        refusals.append((other.name, reason))
    return chosen, tuple(refusals)
