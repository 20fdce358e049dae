"""Attention with Taylor softmax of order 2, in linear time.

`1 + <q,k> + <q,k>^2/2 = <phi(q), phi(k)>`, so the sum over the keys can be taken first. It is a matrix of 1 + d + d(d+1)/2 rows (each pair
of features once) and a column for each feature of v, whatever the length (Katharopoulos et al. 2020; order 2: Arora et al. 2024, "Based").
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .. import kernels
from .._array import (
    Array,
    Namespace,
    as_dtype,
    beside,
    check_flag,
    device_of,
    eager,
    in_memory,
    is_array,
    is_integer,
    is_jax,
    is_torch,
    like,
    modes,
    namespace,
    number,
    recorded,
    transformed,
    upcast,
)
from .._core.mapping import Mapping
from .._core.names import as_mapping
from .._core.options import check_keywords
from .._core.tables import document
from .._core.typing import AnyArray, ArrayT
from ..kernels import arrays
from ..kernels.tasks import LINEAR_ATTENTION, LinearAttention
from ..mappings import Taylor
from .call import AttentionOptions
from .operands import Fitting, check, same_features, same_length

_CHUNK, _LEAST = 256, 32  # the most and fewest queries or keys of a chunk
_FEATURES = 1 << 20  # numbers in a chunk's features, all heads together, so that they fit in the cache


def taylor_features(x: Array) -> Array:
    """phi(x) [..., 1 + d + d(d+1)/2] with `<phi(q), phi(k)> = 1 + <q,k> + <q,k>^2 / 2`, for x [..., d].

    Examples
    --------
    >>> taylor_features(np.array([2.0, 3.0])).round(4)
    array([1.    , 2.    , 3.    , 2.8284, 6.364 , 6.    ])
    """
    xp = namespace(x)
    if x.ndim == 1:
        return _features(x[:, None], xp)[:, 0]
    return xp.matrix_transpose(_features(xp.matrix_transpose(x), xp))


def _features(x: Array, xp: Namespace, scratch: list[Array] | None = None) -> Array:
    """phi of the columns of x, [..., d, n] -> [..., F, n]: 1, x, the squares over sqrt(2), and each pair of rows once.

    Pairs are ordered by their distance around the circle of rows, so one product of two views gives them all, without a gather.
    scratch: the previous chunk's memory, which is overwritten (torch only); allocating it would cost more than the arithmetic.
    """
    lead, (d, n) = tuple(x.shape[:-2]), x.shape[-2:]
    x = x.contiguous() if is_torch(x) else x
    pairs = [(x * math.sqrt(0.5), x)]
    if d > 2:
        pairs.append((_rotated(x, (d - 1) // 2, xp), x[..., None, :, :]))
    if d % 2 == 0:  # each pair half the circle apart, once
        pairs.append((x[..., : d // 2, :], x[..., d // 2 :, :]))
    if scratch is None:
        products = [xp.reshape(a * b, (*lead, math.prod(a.shape[len(lead) : -1]), n)) for a, b in pairs]
        ones = xp.ones_like(xp.sum(x, axis=-2, keepdims=True))  # d may be 0
        return xp.concat([ones, x, *products], axis=-2)
    shape = (*lead, 1 + d + d * (d + 1) // 2, n)
    if not scratch or scratch[0].shape != shape:
        scratch[:] = [arrays.room_beside(x, shape)]
    out = scratch[0]
    out[..., :1, :] = 1.0
    out[..., 1 : 1 + d, :] = x
    at = 1 + d
    for a, b in pairs:
        rows = a.shape[len(lead) : -1]
        part = out[..., at : at + math.prod(rows), :]
        sys.modules["torch"].mul(a, b, out=part.unflatten(-2, rows) if len(rows) > 1 else part)
        at += math.prod(rows)
    return out


def _rotated(x: Array, most: int, xp: Namespace) -> Array:
    """[..., most, d, n]: the d rows of x rotated by 1, 2, ..., `most`; views, except in JAX."""
    d, n = x.shape[-2:]
    if not is_torch(x) and not isinstance(x, np.ndarray):
        index = (np.arange(1, most + 1)[:, None] + np.arange(d)) % d
        return xp.reshape(xp.take(x, xp.asarray(index.ravel()), axis=-2), (*x.shape[:-2], most, d, n))
    twice = xp.concat([x[..., 1:, :], x[..., :most, :]], axis=-2)
    windows = twice.unfold(-2, d, 1) if is_torch(x) else np.lib.stride_tricks.sliding_window_view(twice, d, axis=-2)
    return xp.matrix_transpose(windows)


def _unobserved(x: Array) -> bool:
    """True where none of torch's modes, tracers and forward derivatives is active."""
    return not is_torch(x) or (eager(x) and not modes() and not transformed())


def _scratch(*arrays: Array) -> list[Array] | None:
    """An empty list for scratch memory; None where a mode, a tracer or a derivative must see plain operations, or x is not torch's."""
    return [] if is_torch(arrays[0]) and _unobserved(arrays[0]) and not recorded(*arrays) else None


class LinearState(NamedTuple):
    """The keys and values of Taylor attention of order 2, summed in constant memory: for decoding token by token.

    Use it where a cache of keys would grow without end. A state is a tuple of arrays (for JAX a pytree), and no method changes it:
    each returns a new one. Begin with `LinearState.of`, then `out, state = state.step(q, k, v)` for each new token.

    Parameters
    ----------
    memory
        [..., H, Dv + 1, 1 + D + D (D + 1) / 2], the sum over the keys of (v, 1) times the features of k.
    scale
        The factor of the scores.

    Examples
    --------
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 5, 4))
    >>> state, rows = LinearState.of(k[:2], v[:2]), []
    >>> for t in range(2, 5):
    ...     out, state = state.step(q[t : t + 1], k[t : t + 1], v[t : t + 1])
    ...     rows.append(out)
    >>> bool(np.allclose(np.concatenate(rows), linear_attention(q, k, v, is_causal=True)[2:]))
    True
    """

    memory: Array
    scale: Any

    @classmethod
    def of(
        cls, k: AnyArray, v: AnyArray, scale: float | AnyArray | None = None, lengths: AnyArray | None = None
    ) -> LinearState:
        """The state after these keys and values.

        Parameters
        ----------
        k
            The keys, [..., H, S, D]; S may be 0, for an empty state.
        v
            The values, [..., H, S, Dv], of the same kind and dtype.
        scale
            The factor of the scores, a number or an array; 1 / sqrt(D) by default.
        lengths
            How many keys of each batch are real, as integers; the others are padding.
        """
        xp = namespace(k)
        k, values = _keys(k, v, lengths, xp)
        memory = _nothing(k, values, xp)
        scale = _scale(k) if scale is None else like(number(scale), k, xp)
        return cls(_remember(memory, k, values, xp), scale)

    def extend(self, k: AnyArray, v: AnyArray) -> LinearState:
        """The state with the keys k [..., H, S, D] and the values v [..., H, S, Dv] added."""
        xp = namespace(k)
        k, values = _keys(k, v, None, xp)
        return LinearState(_remember(self.memory, k, values, xp), self.scale)

    def attend(self, q: ArrayT) -> ArrayT:
        """The output [..., H, L, Dv] for queries q [..., H, L, D], each of which sees every key of the state.

        q may have several times as many heads as the keys; groups of heads then share the keys.
        """
        xp = namespace(q)
        grouped = _grouped(upcast(q, xp) * self.scale, self.memory, xp)
        rows = _stacked(grouped, xp)
        scratch = _scratch(self.memory, rows)
        body = lambda memory, q: (memory, _recall(memory, q, xp, scratch))  # noqa: E731
        _, out = _fold(body, self.memory, (rows,), _chunk(self.memory), xp)
        return as_dtype(_by_head(_unstacked(_divided(out, xp), grouped.shape[-3], xp), xp), q.dtype, xp)

    def step(self, q: ArrayT, k: ArrayT, v: ArrayT) -> tuple[ArrayT, LinearState]:
        """A pair: the output for new tokens, and the state after them.

        Parameters
        ----------
        q, k, v
            The queries, keys and values of the new tokens, [..., H, L, D] (and Dv); usually L = 1. Each query sees the keys of
            the state and the new keys up to its own.
        """
        xp = namespace(q)
        same_features("linear_attention", q, k)
        keys, values = _keys(k, v, None, xp)
        out, memory = _causal(self.memory, upcast(q, xp) * self.scale, keys, values, xp)
        return as_dtype(out, q.dtype, xp), LinearState(memory, self.scale)


@check_keywords(query="q", key="k", value="v")
def linear_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    mapping: Mapping | str | None = None,
    *,
    is_causal: bool = False,
    scale: float | AnyArray | None = None,
    enable_gqa: bool = False,
    lengths: AnyArray | None = None,
) -> ArrayT:
    """`attention(q, k, v, Taylor(2))` at a cost that is linear in the length, not quadratic.

    It is for long sequences: a key costs about 2 Dv D^2 operations, which pays from about 2,000 keys on at D = 64 and from about 200 at
    D = 16. The result differs from that of `attention` by rounding: a score s far below |q| |k| is a difference of large features, and
    its relative error is about |q|^2 |k|^2 scale^2 / s^2 times that of the dtype. For decoding use `LinearState`.

    Parameters
    ----------
    mapping
        `Taylor(2)`, the only map with finitely many features, and the default.
    is_causal
        Query i attends to the keys up to i only.

    Returns
    -------
    Array
        The output, [..., H, L, Dv], of the kind and dtype of q; it is 0 for a query without a key.

    Examples
    --------
    >>> from anymax import attention
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 100, 4))
    >>> out = linear_attention(q, k, v, is_causal=True)
    >>> out.shape, bool(np.allclose(out, attention(q, k, v, Taylor(2), is_causal=True, implementation="reference")))
    ((100, 4), True)
    """
    mapping = Taylor(2) if mapping is None else as_mapping(mapping, "linear_attention")
    reason = refuse(mapping)
    if reason is not None:
        raise ValueError(f"linear_attention: {reason}")
    enable_gqa, is_causal = (
        check_flag("linear_attention", n, f) for n, f in (("enable_gqa", enable_gqa), ("is_causal", is_causal))
    )
    q, k, v = (in_memory(a, name) for a, name in ((q, "q"), (k, "k"), (v, "v")))
    groups, shape = check("linear_attention", q, k, v, enable_gqa)
    xp = namespace(q)
    if lengths is not None:
        real = Fitting("linear_attention", q, shape).by_batch(lengths, "lengths")
        lengths = xp.reshape(real, real.shape[:-3])
    if scale is not None and not is_array(scale) and not isinstance(number(scale), (int, float)):
        raise TypeError(f"linear_attention: scale must be a number or an array, got {scale!r}")
    scale = _scale(q) if scale is None else like(number(scale), upcast(q[..., :0], xp), xp)  # type: ignore[index]
    out = _compiled(q, k, v, scale, is_causal, groups, shape, lengths, xp)
    if out is not None:
        return out
    return _plain(q, k, v, scale, is_causal, lengths, xp)


def _plain(q: Array, k: Array, v: Array, scale: Any, causal: bool, lengths: Array | None, xp: Namespace) -> Array:
    """The output by plain operations."""
    if not causal:
        return LinearState.of(k, v, scale, lengths).attend(q)
    keys, values = _keys(k, v, lengths, xp)
    out, _ = _causal(_nothing(keys, values, xp), upcast(q, xp) * scale, keys, values, xp)
    return as_dtype(out, q.dtype, xp)


def _scale(q: Array) -> float:
    return 1.0 / math.sqrt(q.shape[-1]) if q.shape[-1] else 1.0


def _compiled(
    q: Array,
    k: Array,
    v: Array,
    scale: Any,
    causal: bool,
    groups: int,
    shape: tuple[int, ...],
    lengths: Array | None,
    xp: Namespace,
) -> Array | None:
    """The output by the compiled engine; None where it can't compute it: tracers, forward derivatives, GPUs, JAX."""
    engine = kernels.engine_of(LINEAR_ATTENTION, (k, v), q) if _unobserved(q) else None
    if engine is None:
        return None
    dtype, q, k, v = q.dtype, *(upcast(a, xp) for a in (q, k, v))
    if is_array(scale):
        scaled = q * scale
        if scaled.shape != q.shape:
            return None
        q, scale = scaled, 1.0
    heads = shape[:-2]
    own = heads if groups == 1 else (*heads[:-1], heads[-1] // groups)
    each = None
    if lengths is not None:
        lengths = xp.asarray(lengths, copy=True)  # the backward pass reads them after the caller may have changed them
        counts = np.asarray(lengths)  # one for each batch; its heads share it
        each = np.broadcast_to(counts[..., None] if own else counts, own)
    task = LinearAttention(groups, float(scale), causal, each)
    q, k, v = (xp.broadcast_to(a, (*lead, *a.shape[-2:])) for a, lead in ((q, heads), (k, own), (v, own)))
    if recorded(q, k, v):
        from . import torch_linear  # late: only where torch is loaded already

        plain = functools.partial(_plain, scale=scale, causal=causal, lengths=lengths, xp=xp)
        out = torch_linear.attend(engine, task, q, k, v, plain)
    else:
        out, _ = engine.linear_attention(task, q, k, v)
    return as_dtype(out, dtype, xp)


def refuse(mapping: Mapping) -> str | None:
    """Why a map has no linear attention; None if it has."""
    if not isinstance(mapping, Taylor) or mapping.kernel is None:
        return f"only Taylor softmax of order 2 has features of finite size, not {mapping.name}"
    return None if mapping.order == 2 else f"only order 2 of Taylor softmax is supported, not {mapping.order}"


# -- chunks ----------------------------------------------------------------------------------------------------------------------


def _keys(k: Array, v: Array, lengths: Any, xp: Namespace) -> tuple[Array, Array]:
    """The keys, and (v, 1), whose last column sums to the denominator; both are 0 at padding."""
    same_length("linear_attention", k, v)
    k, v = upcast(k, xp), upcast(v, xp)
    values = xp.concat([v, xp.ones_like(v[..., :1])], axis=-1)
    if lengths is None:
        return k, values
    lengths = beside(lengths, k, "lengths", xp)
    if not is_integer(lengths):
        raise TypeError(f"linear_attention: lengths must be integers, got {lengths.dtype}")
    there = xp.arange(k.shape[-2], **device_of(k))[:, None] < xp.reshape(
        lengths, (*lengths.shape, *(1,) * min(3, k.ndim))
    )
    return xp.where(there, k, xp.zeros_like(k)), xp.where(there, values, xp.zeros_like(values))


def _nothing(k: Array, values: Array, xp: Namespace) -> Array:
    """An empty memory."""
    d = k.shape[-1]
    return xp.zeros((*k.shape[:-2], values.shape[-1], 1 + d + d * (d + 1) // 2), dtype=k.dtype, **device_of(k))


def _chunk(memory: Array) -> int:
    heads = math.prod(memory.shape[:-2])
    return max(_LEAST, min(_CHUNK, _FEATURES // max(1, heads * memory.shape[-1])))


def _grouped(q: Array, memory: Array, xp: Namespace) -> Array:
    """The queries as [..., heads of the memory, groups, L, D]: the heads of a group share a memory."""
    heads, own = (a.shape[-3] if q.ndim > 2 and memory.ndim > 2 else 1 for a in (q, memory))
    if own in (1, heads):
        return xp.reshape(q, (*q.shape[:-2], 1, *q.shape[-2:]))
    if heads % own:
        raise ValueError(f"linear_attention: {heads} heads of queries can't share {own} heads of keys")
    return xp.reshape(q, (*q.shape[:-3], own, heads // own, *q.shape[-2:]))


def _stacked(q: Array, xp: Namespace) -> Array:
    """[..., groups, L, D] as [..., groups * L, D]."""
    return xp.reshape(q, (*q.shape[:-3], q.shape[-3] * q.shape[-2], q.shape[-1]))


def _unstacked(out: Array, groups: int, xp: Namespace) -> Array:
    """[..., groups * L, D] as [..., groups, L, D]."""
    return xp.reshape(out, (*out.shape[:-2], groups, out.shape[-2] // groups, out.shape[-1]))


def _by_head(out: Array, xp: Namespace) -> Array:
    """[..., heads of the memory, groups, L, D] as [..., heads, L, D]."""
    groups = out.shape[-3]
    if groups == 1:
        return out[..., 0, :, :]
    return xp.reshape(out, (*out.shape[:-4], out.shape[-4] * groups, *out.shape[-2:]))


def _divided(sums: Array, xp: Namespace) -> Array:
    """Numerator over denominator, 0 where there was no key."""
    below = sums[..., -1:]
    return sums[..., :-1] / xp.where(below > 0, below, xp.ones_like(below))


def _remember(memory: Array, k: Array, values: Array, xp: Namespace) -> Array:
    scratch = _scratch(memory, k, values)
    body = lambda memory, k, values: (_added(memory, k, values, xp, scratch), None)  # noqa: E731
    return _fold(body, memory, (k, values), _chunk(memory), xp)[0]


def _added(memory: Array, k: Array, values: Array, xp: Namespace, scratch: list[Array] | None) -> Array:
    """The memory with these keys added."""
    features = _features(xp.matrix_transpose(k), xp, scratch)
    return memory + xp.matrix_transpose(values) @ xp.matrix_transpose(features)


def _recall(memory: Array, q: Array, xp: Namespace, scratch: list[Array] | None = None) -> Array:
    return xp.matrix_transpose(memory @ _features(xp.matrix_transpose(q), xp, scratch))


def _causal(memory: Array, q: Array, k: Array, values: Array, xp: Namespace) -> tuple[Array, Array]:
    """(output, memory): keys of a query's own chunk by the matrix of scores, earlier keys by the memory."""
    scratch = _scratch(memory, q, k, values)
    rows, both = q.shape[-2], min(q.shape[-2], k.shape[-2])
    q = _grouped(q, memory, xp)
    groups = q.shape[-3]

    def body(memory: Array, q: Array, k: Array, values: Array) -> tuple[Array, Array]:
        n, q = k.shape[-2], _stacked(q, xp)
        s = q @ xp.matrix_transpose(k)
        at = xp.arange(n, **device_of(k))
        seen = xp.reshape(xp.broadcast_to(at[None, :] <= at[:, None], (groups, n, n)), (groups * n, n))
        near = xp.where(seen, 1.0 + s * (1.0 + 0.5 * s), xp.zeros_like(s)) @ values
        sums = near + _recall(memory, q, xp, scratch)
        return _added(memory, k, values, xp, scratch), _unstacked(sums, groups, xp)

    parts = []
    if both:
        inside = (q[..., :both, :], k[..., :both, :], values[..., :both, :])
        memory, sums = _fold(body, memory, inside, _chunk(memory), xp)
        parts.append(sums)
    if rows > both or not rows:  # queries after the last key see them all
        parts.append(_unstacked(_recall(memory, _stacked(q[..., both:, :], xp), xp), groups, xp))
    out = _divided(parts[0] if len(parts) == 1 else xp.concat(parts, axis=-2), xp)
    return _by_head(out, xp), memory


def _fold(
    body: Callable[..., tuple[Array, Any]], memory: Array, arrays: tuple[Array, ...], chunk: int, xp: Namespace
) -> tuple[Array, Any]:
    """`memory, out = body(memory, *chunks)` along the second-to-last axis; the outs are concatenated, or None if `body` returns None.

    The gradient recomputes a chunk's features, since saving them would take F numbers a position.
    """
    n = arrays[0].shape[-2]
    if is_jax(arrays[0]):
        return _scan(body, memory, arrays, chunk, xp)
    outs = []
    for start in range(0, n, chunk):
        memory, out = _again(body, memory, *(a[..., start : min(n, start + chunk), :] for a in arrays))
        outs.append(out)
    if not outs or outs[0] is None:
        return memory, None if outs else xp.zeros_like(_recall(memory, arrays[0], xp))
    return memory, outs[0] if len(outs) == 1 else xp.concat(outs, axis=-2)


def _again(body: Callable[..., Any], *arrays: Array) -> Any:
    """body(...), which autograd recomputes instead of saving its intermediates."""
    if is_torch(arrays[0]):
        torch = sys.modules["torch"]
        if recorded(*arrays) and eager(arrays[0]) and not transformed():
            return torch.utils.checkpoint.checkpoint(body, *arrays, use_reentrant=False, preserve_rng_state=False)
    return body(*arrays)


def _scan(
    body: Callable[..., tuple[Array, Any]], memory: Array, arrays: tuple[Array, ...], chunk: int, xp: Namespace
) -> tuple[Array, Any]:
    """`_fold` in JAX, which traces one chunk. The last one is padded with zeros, which add nothing, since their (v, 1) is 0."""
    jax = sys.modules["jax"]
    n = arrays[0].shape[-2]
    if n <= chunk:
        return body(memory, *arrays)
    count = -(-n // chunk)

    def split(a: Array) -> Array:
        pad = [(0, 0)] * (a.ndim - 2) + [(0, count * chunk - n), (0, 0)]
        a = xp.reshape(xp.pad(a, pad), (*a.shape[:-2], count, chunk, a.shape[-1]))
        return xp.moveaxis(a, -3, 0)

    again = jax.checkpoint(lambda memory, parts: body(memory, *parts))
    memory, outs = jax.lax.scan(again, memory, tuple(split(a) for a in arrays))
    if outs is None:
        return memory, None
    outs = xp.moveaxis(outs, 0, -3)
    return memory, xp.reshape(outs, (*outs.shape[:-3], count * chunk, outs.shape[-1]))[..., :n, :]


document(globals(), AttentionOptions)
