"""Attention with any map: what a caller may ask for, and who serves it.

`IMPLEMENTATIONS` is walked from the left: the first that does not refuse and that pays serves the call. The reference keeps the
whole matrix and never refuses. Each refusal is a sentence, and asking for an implementation that refuses is an error with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from . import _operands, _scores, kernels
from ._array import (
    Array,
    Namespace,
    beside,
    eager,
    in_memory,
    is_array,
    is_jax,
    is_torch,
    like,
    namespace,
    number,
    quiet,
    torch_loaded,
    upcast,
)
from ._mapping import Mapping
from ._random import torch_source, uniform
from .functional import apply
from .linear_attention import linear_attention
from .linear_attention import refuse as refuse_linear
from .mappings import Softmax

_MATRIX = 1 << 24  # scores, 64 MB: more go in blocks in any case
_FEW = 1 << 19  # scores; fewer never do
_KEYS, _TRACKED_KEYS = (
    512,
    1024,
)  # keys from which blocks are faster than the matrix, forward and with a gradient: as measured


class Call(NamedTuple):
    """One call of `attention`, checked."""

    q: Array
    k: Array
    v: Array
    scores: _scores.Scores
    groups: int  # queries' heads that share one of the keys
    dropout_p: float
    generator: Any
    need_weights: bool


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
    *,
    window: int | tuple[int | None, int | None] | None = None,
    alibi: Any = None,
    softcap: float | None = None,
    lengths: Array | None = None,
    q_lengths: Array | None = None,
    offset: Any = 0,
    sink: Array | None = None,
    transform: Callable[[Array], Array] | None = None,
    mix: tuple[Array, Any] | None = None,
    need_weights: bool = False,
    implementation: str | None = None,
) -> Any:
    """`p(scale q k^T + bias) v` with any map p, in the shapes of `torch.nn.functional.scaled_dot_product_attention`.

    q: [..., H, L, D]; k, v: [..., H, S, D]; the map acts on the S scores of each query. A query with nothing to attend to gives
    zeros. `enable_gqa` lets several heads of q share one of k and v. An alpha for each head has shape [H, 1, 1]; it may be learned.

    mask: boolean, True = keep, or real and added to the scores. bias: added to the scores (a prior in logarithms, say).
    is_causal: query i attends to keys up to offset + i. offset: where the first query stands among the keys, S - L for new queries
    at the end of a cache; one for all or one for each batch. window: keys up to so many places to the (left, right) of the query.
    lengths, q_lengths: how many keys and queries of each batch are real; the others are masked, and give zeros.
    alibi: True, or a slope for each head, times the distance of query and key, taken from the scores.
    softcap: c tanh(scores / c), before bias and mask. sink: one more score for each head, of a key without a value.
    transform: of the masked scores, such as `transforms.scalable()`, `temperature(T)`, `prior(scale=...)` or `topk(8)`.
    mix: (prior, weight), mixed into p after the map where a query may attend: `(1 - weight) p + weight prior`.
    dropout_p: of the probabilities, from `generator`: an integer seed or the framework's own (torch: its global one by default).
    need_weights: return (output, p), with p [..., H, L, S] as the map and `mix` gave it, before dropout, without the sink.
    implementation: "sdpa" (torch's own), "triton" (a GPU's kernels for softmax, sparsemax, entmax and budget), "blockwise" (never the
    whole matrix), "linear" (Taylor(2) in linear time, see `linear_attention`) or "reference"; by default the first that serves the call.

    Second derivatives of a softmax that torch's own attention served do not exist; ask for "blockwise" or "reference".

    The order is: scale, softcap, bias, alibi, mask, transform, sink, map, mix, dropout.

    >>> import numpy as np
    >>> from anymax import Sparsemax, attention
    >>> q, k, v = np.eye(2), np.array([[3.0, 0.0], [0.0, 1.0]]), np.array([[1.0], [5.0]])
    >>> attention(q, k, v, Sparsemax(), scale=1.0)
    array([[1.],
           [5.]])
    """
    asked = _named(implementation)
    call, plain = _checked(
        q, k, v, mapping, mask=mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, bias=bias, dropout_p=dropout_p,
        generator=generator, window=window, alibi=alibi, softcap=softcap, lengths=lengths, q_lengths=q_lengths, offset=offset,
        sink=sink, transform=transform, need_weights=need_weights,
    )  # fmt: skip
    xp, dtype = namespace(call.q), call.q.dtype
    with plain:
        out, p = _choose(call, asked).run(call)
        if mix is not None:
            out, p = _mixed(call, out, p, mix, xp)
    out = out if out.dtype == dtype else xp.astype(out, dtype)
    if not need_weights:
        return out
    return out, p if p.dtype == dtype else xp.astype(p, dtype)


def explain_attention(q: Array, k: Array, v: Array, *args: Any, **options: Any) -> kernels.Explanation:
    """Which implementation serves this call of `attention`, with its arguments, and why not those before it. Print it to read it.

    Nothing is computed: only what the implementations say of the call is collected.

    >>> import numpy as np
    >>> from anymax import Sparsemax, explain_attention
    >>> q = np.zeros((2, 3, 4))
    >>> explain_attention(q, q, q, Sparsemax(), is_causal=True)
    Sparsemax()
      attention   reference
                  (sdpa refuses: torch has attention with softmax, not with sparsemax)
                  (triton refuses: it serves torch tensors on a GPU)
                  (blockwise refuses: it serves torch tensors; XLA fuses the formula on its own, and NumPy has the reference)
                  (linear refuses: only Taylor softmax of order 2 has features of finite size, not sparsemax)
    """
    given = inspect.signature(attention).bind(q, k, v, *args, **options)
    given.apply_defaults()
    asked = _named(given.arguments.pop("implementation"))
    del given.arguments["mix"]  # whoever serves, it is mixed in afterwards
    call, plain = _checked(**given.arguments)
    with plain:
        chosen = _choose(call, asked)
        refusals = []
        for other in IMPLEMENTATIONS[: IMPLEMENTATIONS.index(chosen)]:
            reason = other.refuse(call) or ("there are no scores" if _empty(call) else None)
            reason = reason or (f"{chosen.name!r} was asked for" if other.pays(call) else other.dear)
            refusals.append((other.name, reason))
    return kernels.Explanation(call.scores.mapping, (("attention", chosen.name, tuple(refusals)),))


def _checked(
    q: Array, k: Array, v: Array, mapping: Any, *, enable_gqa: bool, dropout_p: float, generator: Any, need_weights: bool,
    **options: Any,
) -> tuple[Call, Any]:  # fmt: skip
    """The call, and the context to run it in."""
    mapping = Softmax() if mapping is None else mapping
    if not isinstance(mapping, Mapping):
        raise TypeError(f"attention: mapping must be a mapping such as anymax.Sparsemax(), got {mapping!r}")
    for name, value in (
        ("is_causal", options["is_causal"]),
        ("enable_gqa", enable_gqa),
        ("need_weights", need_weights),
    ):
        _operands.flag("attention", name, value)
    dropout_p = number(dropout_p)
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)) or not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"attention: dropout_p must be a number of at least 0 and below 1, got {dropout_p!r}")
    q, k, v, plain = _autocast(*(in_memory(a, name) for a, name in ((q, "q"), (k, "k"), (v, "v"))))
    groups, shape = _operands.check("attention", q, k, v, enable_gqa)
    if is_causal_bias(options["mask"]):
        options |= _of_causal_bias(options, q, shape)
    scores = _scores.prepare(q, shape, mapping, xp=namespace(q), **options)
    if shape[-1]:
        mapping.check(shape[-1] + (options["sink"] is not None))
    return Call(q, k, v, scores, groups, float(dropout_p), generator, need_weights), plain


def _mixed(call: Call, out: Array, p: Any, mix: Any, xp: Namespace) -> tuple[Array, Any]:
    """The prior after the map: p enters the output linearly, so that no implementation need know of it."""
    if not isinstance(mix, (tuple, list)) or len(mix) != 2:
        raise TypeError(f"attention: mix must be a pair (prior, weight), got {type(mix).__name__}")
    prior = beside(mix[0], call.q, "mix", xp)
    _scores.same_device(prior, call.q, "the prior of mix")
    prior = _scores.lie(prior, call.scores.shape, "the prior of mix")
    v = upcast(call.v, xp)
    prior = xp.broadcast_to(like(prior, v, xp), call.scores.shape)
    keep = call.scores.attended(prior, xp)
    prior = prior if keep is None else xp.where(keep, prior, xp.zeros_like(prior))
    weight = number(mix[1])
    if is_array(weight):
        weight = beside(weight, call.q, "mix", xp)
        _scores.same_device(weight, call.q, "the weight of mix")
        weight = like(_scores.lie(weight, (*call.scores.shape[:-1], 1), "the weight of mix"), v, xp)
    elif isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight <= 1:
        raise ValueError(f"attention: the weight of mix must be a number from 0 to 1 or an array, got {weight!r}")
    out = (1.0 - weight) * upcast(out, xp) + weight * _values(prior, v, call.groups)
    return out, None if p is None else (1.0 - weight) * upcast(p, xp) + weight * prior


# -- the implementations -------------------------------------------------------------------------------------------------------


class Implementation(NamedTuple):
    """`run(call)` gives the output and, where the call needs it, the matrix; `dear` says why it may not pay."""

    name: str
    refuse: Callable[[Call], str | None]
    pays: Callable[[Call], bool]
    run: Callable[[Call], tuple[Array, Any]]
    dear: str = "it would not be faster here"


def _reference(call: Call) -> tuple[Array, Any]:
    xp = namespace(call.q)
    q, k, v = (upcast(a, xp) for a in (call.q, call.k, call.v))  # scores in half precision overflow, and round
    p = _products(q, k, call.groups)
    if call.scores.shape[-1]:
        p = apply(call.scores.mapping, call.scores.of(p, xp))
        p = p[..., :-1] if "sink" in call.scores.arrays else p
    return _values(_dropped(p, call, xp), v, call.groups), p


def _products(q: Array, k: Array, groups: int) -> Array:
    """q k^T; the heads that share keys lie one below the other, so that the keys need not be repeated."""
    xp = namespace(q)
    if groups == 1:
        return q @ xp.matrix_transpose(k)
    heads, rows = q.shape[-3:-1]
    s = xp.reshape(q, (*q.shape[:-3], heads // groups, groups * rows, q.shape[-1])) @ xp.matrix_transpose(k)
    return xp.reshape(s, (*s.shape[:-3], heads, rows, s.shape[-1]))


def _values(p: Array, v: Array, groups: int) -> Array:
    xp = namespace(p)
    if groups == 1:
        return p @ v
    heads, rows = p.shape[-3:-1]
    out = xp.reshape(p, (*p.shape[:-3], heads // groups, groups * rows, p.shape[-1])) @ v
    return xp.reshape(out, (*out.shape[:-3], heads, rows, out.shape[-1]))


def _dropped(p: Array, call: Call, xp: Namespace) -> Array:
    if not call.dropout_p:
        return p
    if is_torch(p) and call.generator is None and sys.modules["torch"].compiler.is_compiling():
        # a compiler takes no generator, not even the global one
        return sys.modules["torch"].nn.functional.dropout(p, call.dropout_p)
    kept = uniform(tuple(p.shape), p, _source(call)) >= call.dropout_p
    return xp.where(kept, p / (1.0 - call.dropout_p), xp.zeros_like(p))


def _source(call: Call) -> Any:
    """The generator; torch's global one where a torch caller gave none, as its own functions have it."""
    if call.generator is not None or not is_torch(call.q):
        return call.generator
    torch = sys.modules["torch"]
    device = call.q.device
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


def _refuse_sdpa(call: Call) -> str | None:
    s = call.scores
    if s.mapping.kernel != "softmax":
        return f"torch has attention with softmax, not with {s.mapping.name}"
    if not is_torch(call.q):
        return "it serves torch tensors"
    for what, there in (
        ("soft-capped scores", s.softcap is not None), ("a transform", s.transform is not None), ("a sink", "sink" in s.arrays),
        ("the weights", call.need_weights), ("a generator", call.dropout_p and call.generator is not None),
        ("offsets for each batch", "offset" in s.arrays), ("an array as scale", "scale" in s.arrays),
        ("ALiBi without the whole matrix", "slopes" in s.arrays), ("lengths of queries", "q_lengths" in s.arrays),
    ):  # fmt: skip
        if there:
            return f"torch's attention has not {what}"
    if call.q.ndim < 3 or not math.prod(call.q.shape):
        return "torch's attention wants heads, and some numbers"
    if _transformed(call.q):
        return "torch's fused attention has no forward-mode derivative"
    if _window_of(s) and s.shape[-1] * s.shape[-2] > 4 * _MATRIX:
        return "torch's attention would want the window as a matrix"
    return None


def _window_of(s: _scores.Scores) -> bool:
    """True where positions mask more than torch's own causal mask does, which multiplies its -inf by the scale and needs one above 0."""
    further = s.causal and (s.offset != 0 or len(s.arrays) > 0 or not s.scale > 0)
    return s.left is not None or s.right is not None or further


def _sdpa(call: Call) -> tuple[Array, Any]:
    torch = sys.modules["torch"]
    s, q = call.scores, call.q
    xp = namespace(q)
    causal = s.causal and not _window_of(s)
    rest = dataclasses.replace(s, causal=s.causal and not causal)
    added = [a for a in (s.arrays.get("bias"), s.arrays.get("additive")) if a is not None]
    keep = rest.kept(q, xp)
    mask = keep
    if added:
        mask = added[0] if len(added) == 1 else added[0] + added[1]
        if keep is not None:
            mask = torch.where(keep, mask, _scores.MASKED)
        if q.device.type != "cpu":  # elsewhere torch's kernels want it in the dtype of q
            mask = mask.to(q.dtype)
    out = torch.nn.functional.scaled_dot_product_attention(
        q, call.k, call.v, attn_mask=mask, dropout_p=call.dropout_p, is_causal=causal, scale=s.scale,
        enable_gqa=call.groups > 1,
    )  # fmt: skip
    return out, None


def _refuse_triton(call: Call) -> str | None:
    s, q = call.scores, call.q
    if not is_torch(q):
        return "it serves torch tensors on a GPU"
    if q.device.type != "cuda" and not (q.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return f"it serves tensors on a GPU (CUDA, ROCm), these are on {q.device}"
    if str(q.dtype)[6:] not in ("float32", "bfloat16", "float16"):
        return f"it serves float32, bfloat16 and float16, not {q.dtype}"
    if call.need_weights:
        return "the weights are the matrix that it never has"
    compiling = sys.modules["torch"].compiler.is_dynamo_compiling()
    if _transformed(q) or not (eager(q) or compiling) or sys.modules["torch"].compiler.is_exporting():
        return "it serves eager calls and torch.compile; under a transform or export, plain operations are to be seen"
    if s.mapping.kernel not in ("softmax", "sparsemax", "entmax", "budget"):
        return f"it has no kernel for {s.mapping.name}, but for softmax, sparsemax, entmax and budget"
    if any(is_array(a) and a.ndim and a.shape[-1] != 1 for a in s.mapping.params().values()):
        return "it takes one parameter of the map for all keys of a query"
    if s.transform is not None:
        return "it has no transforms of the scores"
    if "scale" in s.arrays:
        return "it takes a number as scale; multiply q by an array"
    if not 0 < q.shape[-1] <= 256 or not 0 < call.v.shape[-1] <= 256:
        return f"it has heads of 1 to 256 features, not {q.shape[-1]} and {call.v.shape[-1]}"
    if compiling:
        return "a generator can't be traced" if call.dropout_p and call.generator is not None else None
    launch = kernels.triton.load()
    return launch if isinstance(launch, str) else None


def _triton(call: Call) -> tuple[Array, Any]:
    from .autodiff import flash  # late: only where torch and Triton are loaded already

    if not call.dropout_p:
        return flash.attend(call, None), None
    torch = sys.modules["torch"]
    if torch.compiler.is_dynamo_compiling():
        seed = torch.randint(2**62, (1,), device=call.q.device)
    else:
        source = torch_source(call.q, _source(call))
        seed = torch.randint(2**62, (1,), generator=source, device=source.device).to(call.q.device)
    return flash.attend(call, seed), None


def _refuse_blocks(call: Call) -> str | None:
    if not is_torch(call.q):
        return "it serves torch tensors; XLA fuses the formula on its own, and NumPy has the reference"
    if call.need_weights:
        return "the weights are the matrix that it never has"
    if _transformed(call.q) or not eager(call.q):
        return "it serves eager calls; under a transform or while tracing, plain operations are to be seen"
    return _scores.refuse_tiles(call.scores)


def _blocks(call: Call) -> tuple[Array, Any]:
    from .autodiff import blockwise  # late: only where torch is loaded already

    return blockwise.attend(call, torch_source(call.q, _source(call)) if call.dropout_p else None), None


def _refuse_linear(call: Call) -> str | None:
    s = call.scores
    extra = sorted(set(s.arrays) - {"lengths"})
    if extra or s.softcap is not None or s.transform is not None or s.left is not None or s.right is not None:
        return "linear attention has scores q k^T alone, with a scale, a causal mask and lengths"
    if call.dropout_p or call.need_weights:
        return "linear attention has no matrix of probabilities to drop from or to return"
    if s.causal and s.offset:
        return "linear attention begins at the first key; carry on with the state of anymax.linear_attention"
    return refuse_linear(s.mapping)


def _linear(call: Call) -> tuple[Array, Any]:
    s, lengths = call.scores, call.scores.arrays.get("lengths")
    if lengths is not None:
        lengths = namespace(lengths).reshape(lengths, lengths.shape[:-3])
    gqa = call.groups > 1
    out = linear_attention(
        call.q, call.k, call.v, s.mapping, is_causal=s.causal, scale=s.scale, enable_gqa=gqa, lengths=lengths
    )
    return out, None


def _empty(call: Call) -> bool:
    """True where there is no query or no key: the output has no numbers, or zeros."""
    return any(n == 0 for n in call.scores.shape)


def _always(call: Call) -> bool:
    return True


def _never(call: Call) -> bool:
    return False


def _tracked(call: Call) -> bool:
    return sys.modules["torch"].is_grad_enabled() and any(a.requires_grad for a in (call.q, call.k, call.v))


def _fills_gpu(call: Call) -> bool:
    """A few queries against a long cache, as in decoding, keep few of its processors busy with gradients, where keys are not cut in parts:
    their matrix is small, and read by all."""
    *batch, rows, keys = call.scores.shape
    few = rows <= 16 and math.prod(batch) < 128 and keys > 1024
    return call.q.device.type == "cuda" and not (few and _tracked(call) and math.prod(call.scores.shape) <= _MATRIX)


def _large(call: Call) -> bool:
    count = math.prod(call.scores.shape)
    return count > _MATRIX or (count > _FEW and call.scores.shape[-1] >= (_TRACKED_KEYS if _tracked(call) else _KEYS))


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    Implementation("sdpa", _refuse_sdpa, _always, _sdpa),
    Implementation(
        "triton",
        _refuse_triton,
        _fills_gpu,
        _triton,
        "it pays on a GPU alone, with gradients for more than a few queries",
    ),
    Implementation("blockwise", _refuse_blocks, _large, _blocks, "so few scores are faster as one matrix"),
    Implementation("linear", _refuse_linear, _never, _linear, "it rounds otherwise, and serves where it is asked for"),
    Implementation("reference", lambda call: None, _always, _reference),
)


def _named(name: str | None) -> Implementation | None:
    if name is None:
        return None
    for one in IMPLEMENTATIONS:
        if one.name == name:
            return one
    raise ValueError(
        f"attention: there is no implementation {name!r}; there are {', '.join(i.name for i in IMPLEMENTATIONS)}"
    )


def _choose(call: Call, asked: Implementation | None) -> Implementation:
    """The one asked for; else the first that pays and does not refuse; the reference alone where `anymax.use` asks for it.

    Where there are no scores it is the reference too, so that nobody else need think of it.
    """
    if asked is not None:
        reason = asked.refuse(call)
        if reason is not None:
            raise ValueError(f"attention: implementation {asked.name!r} can't serve this call: {reason}")
    if _empty(call) or (asked is None and eager(call.q) and kernels.asked() == "reference"):
        return IMPLEMENTATIONS[-1]
    if asked is not None:
        return asked
    return next(one for one in IMPLEMENTATIONS if one.refuse(call) is None and one.pays(call))


# -- arguments -----------------------------------------------------------------------------------------------------------------


def _transformed(q: Array) -> bool:
    """True under torch.func's transforms and in forward mode."""
    torch = sys.modules["torch"]
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


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


def _autocast(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array, Any]:
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
