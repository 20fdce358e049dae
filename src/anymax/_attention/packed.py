"""`attention_varlen`: attention in packed sequences, which lie one after another without padding, as in FlashAttention's `varlen` calls.

Where the bounds are known, sequences of similar lengths are padded to one batch and passed to `attention`; on a CPU, long sequences share
a batch only with those of the same lengths. A compiler does not know the bounds: all sequences are then one batch, padded to
`max_seqlen_q` and `max_seqlen_k`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .._array import (
    Array,
    Namespace,
    asarray,
    beside,
    check_flag,
    device_of,
    eager,
    framework,
    in_memory,
    is_array,
    is_int,
    is_integer,
    namespace,
    number,
    on_cpu,
    on_host,
    shown,
)
from .._core.mapping import Mapping
from .._core.names import as_mapping
from .._core.options import check_keywords
from .._core.tables import document
from .._core.typing import AnyArray, ArrayT
from .._random.generators import independent
from ..mappings import Softmax
from ..segments.layout import Segments, along, read_one
from . import operands
from .call import AttentionOptions, ImplementationName
from .verb import attention

_ALONE = 1 << 14  # measured: from so many scores a head on, padding costs a CPU more than another call
_NO_MATRIX = (
    "their scores are no rectangle for it to lie on; say is_causal= or window=, or call attention for each sequence"
)
_WORDS = {
    "mask": _NO_MATRIX,
    "attn_mask": _NO_MATRIX,
    "bias": _NO_MATRIX,
    "attn_bias": _NO_MATRIX,
    "mix": "call attention for each sequence, since a prior has a number for each of its keys",
    "need_weights": "call attention for each sequence, since the weights are a matrix of another size for each",
    "return_attn_probs": "call attention for each sequence, since the weights are a matrix of another size for each",
    "lengths": "cu_seqlens_k has them",
    "q_lengths": "cu_seqlens_q has them",
    "seqused_k": "leave keys that don't count out of k and of cu_seqlens_k",
    "block_table": "gather the pages of k and v first",
    "window_size": "say window=(left, right), with None where FlashAttention has -1",
    "alpha": "it belongs to the map, as in mapping=anymax.Entmax(alpha=1.3)",
}


@check_keywords(_WORDS, query="q", key="k", value="v", cu_seq_q="cu_seqlens_q", cu_seq_k="cu_seqlens_k", max_q="max_seqlen_q",
           max_k="max_seqlen_k", causal="is_causal", softmax_scale="scale", alibi_slopes="alibi")  # fmt: skip
def attention_varlen(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    mapping: Mapping | str | None = None,
    is_causal: bool = False,
    scale: float | AnyArray | None = None,
    enable_gqa: bool = False,
    dropout_p: float = 0.0,
    generator: Any = None,
    *,
    window: int | tuple[int | None, int | None] | None = None,
    alibi: bool | AnyArray | None = None,
    softcap: float | None = None,
    offset: int | AnyArray | None = None,
    sink: AnyArray | None = None,
    transform: Callable[[Any], Any] | None = None,
    implementation: ImplementationName | None = None,
) -> ArrayT:
    """Attention with any map in packed sequences: each sequence attends to itself, and the caller pads nothing.

    It takes the arguments of FlashAttention's `flash_attn_varlen_func` and torch's `varlen_attn`, with their names (`causal`,
    `softmax_scale`) too, on NumPy, torch and JAX. `attention` is for sequences of one length.

    Parameters
    ----------
    q
        The queries of all sequences, one after another, [queries, heads, D].
    k
        The keys, [keys, heads, D], of the same kind and dtype.
    v
        The values, [keys, heads, Dv].
    cu_seqlens_q
        The bounds of the sequences in q, integers [sequences + 1] that ascend from 0 to the number of queries.
    cu_seqlens_k
        The bounds in k and v; by default those in q.
    max_seqlen_q
        The length of the longest sequence in q, or more. It is optional, except under `jax.jit` and `torch.compile` with
        traced bounds, where all sequences are padded to it.
    max_seqlen_k
        The same for k; by default max_seqlen_q where cu_seqlens_k is not given.
    mapping
        The map from the scores of a query to its weights, such as `Sparsemax()`, or its name; softmax by default. An alpha
        for each head has the shape [heads, 1, 1], one for each sequence [sequences, 1 or heads, 1, 1].
    scale
        The factor of q k^T, a number or an array of the shapes that alpha may have; 1 / sqrt(D) by default.
    generator
        The source of dropout's random numbers, as in `attention`.
    alibi
        True, or a slope for each head, [heads], or for each head of each sequence, [sequences, heads]: the slope times the
        distance between query and key is subtracted from the score.
    offset
        The position of a sequence's first query among its keys, a number or one for each sequence. By default the last
        query is at the last key, as in FlashAttention; the default of `attention` is 0.
    sink
        One extra score for each head, [heads], of a key without a value. The map `Sink` takes one for each sequence, too.
    transform
        A function of the masked scores, [sequences, heads, queries, keys] padded with -inf, such as `temperature(2.0)`.
    implementation
        As in `attention`, for each batch of sequences.

    Returns
    -------
    Array
        The output, [queries, heads, Dv], of the kind and dtype of q; it is 0 for the queries of a sequence without keys.

    Examples
    --------
    >>> import numpy as np
    >>> from anymax import attention_varlen
    >>> q, v = np.zeros((5, 1, 2)), np.arange(5.0).reshape(5, 1, 1)
    >>> attention_varlen(q, q, v, [0, 2, 5], mapping="sparsemax", is_causal=True).ravel()
    array([0. , 0.5, 2. , 2.5, 3. ])
    """
    q, k, v = (_operand(a, name) for a, name in ((q, "q"), (k, "k"), (v, "v")))
    operands.one_framework("attention_varlen", q, k, v)
    if k.shape[0] != v.shape[0]:
        raise ValueError(f"attention_varlen: k has {k.shape[0]} keys and v has {v.shape[0]}; they must agree")
    at_q = _bounds("cu_seqlens_q", cu_seqlens_q, q, "q")
    if cu_seqlens_k is None:
        cu_seqlens_k, max_seqlen_k = cu_seqlens_q, max_seqlen_q if max_seqlen_k is None else max_seqlen_k
    at_k = _bounds("cu_seqlens_k", cu_seqlens_k, k, "k")
    if at_q.num_segments != at_k.num_segments:
        raise ValueError(
            f"attention_varlen: cu_seqlens_q has {at_q.num_segments} sequences and cu_seqlens_k has {at_k.num_segments}; they must agree"
        )
    mapping = Softmax() if mapping is None else as_mapping(mapping, "attention_varlen")
    check_flag("attention_varlen", "is_causal", is_causal)
    offset = _offset(offset, at_q.num_segments)
    most = [_most(*given) for given in (("max_seqlen_q", max_seqlen_q, at_q), ("max_seqlen_k", max_seqlen_k, at_k))]
    known = at_q.known and at_k.known and (not is_array(offset) or eager(offset))
    job = _Job(q, k, v, at_q, at_k, mapping, bool(is_causal), scale, offset, alibi)
    batches, place = job.known() if known else job.traced(most)
    sources = independent(generator, q, len(batches)) if dropout_p else [None] * len(batches)
    outs = [
        attention(
            batch.q, batch.k, batch.v, batch.mapping, is_causal=is_causal, scale=batch.scale, enable_gqa=enable_gqa, dropout_p=dropout_p,
            generator=source, window=window, alibi=batch.alibi, softcap=softcap, lengths=batch.lengths, offset=batch.offset, sink=sink,
            transform=transform, implementation=implementation,
        )
        for batch, source in zip(batches, sources, strict=True)
    ]  # fmt: skip
    xp = namespace(q)
    flat = [xp.reshape(xp.permute_dims(out, (0, 2, 1, 3)), (-1, out.shape[1], out.shape[3])) for out in outs]
    out = flat[0] if len(flat) == 1 else xp.concat(flat, axis=0)
    return place(out)


@dataclasses.dataclass(frozen=True)
class _Batch:
    """The arguments of `attention` for one batch of sequences."""

    q: Array  # [sequences, heads, L, D]
    k: Array
    v: Array
    mapping: Mapping
    scale: Any
    lengths: Any  # how many keys are real; None where no query sees padding
    offset: Any
    alibi: Any


@dataclasses.dataclass(frozen=True)
class _Job:
    """The checked operands, and the arguments that may differ from sequence to sequence."""

    q: Array
    k: Array
    v: Array
    at_q: Segments
    at_k: Segments
    mapping: Mapping
    causal: bool
    scale: Any
    offset: Any  # None: the last query is at the last key
    alibi: Any

    # -- known bounds -------------------------------------------------------------------------------------------------------------

    def known(self) -> tuple[list[_Batch], Callable[[Array], Array]]:
        q_lengths, k_lengths = self.at_q.lengths, self.at_k.lengths
        if self.offset is None:
            offsets = k_lengths - q_lengths
        else:
            offsets = np.broadcast_to(on_host(self.offset).astype(np.int64), q_lengths.shape)
        batches, row, rows = [], np.zeros(self.at_q.num_entries, np.int64), 0
        # for JAX each new shape is expensive, and on a GPU each call
        many = framework(self.q) == "JAX" or not on_cpu(self.q)
        alone = (q_lengths * k_lengths >= _ALONE) & (not many)
        for ids in _alike(alone, q_lengths, k_lengths):
            width = int(q_lengths[ids].max())
            batches.append(self._batch(ids, width, k_lengths[ids], offsets[ids], q_lengths[ids]))
            at, valid = _places(self.at_q.ptr[ids], q_lengths[ids], width)
            row[at[valid]] = rows + np.arange(at.size).reshape(at.shape)[valid]
            rows += at.size
        if not batches:  # no query: `attention` still checks the shapes and options
            none = np.zeros(0, np.int64)
            batches = [self._batch(none, 0, none, none, none)]
        xp, n = namespace(self.q), self.at_q.num_entries
        if rows == n and bool((row == np.arange(n)).all()):
            return batches, lambda out: out
        index = beside(row, self.q, "row", xp)
        return batches, lambda out: xp.take(out, index, axis=0)

    def _batch(self, ids: np.ndarray, width: int, k_lengths: Any, offsets: Any, q_lengths: Any) -> _Batch:
        keys = int(k_lengths.max(initial=0))
        seen = self.causal and bool((q_lengths + offsets <= k_lengths).all())  # the causal mask hides all padding
        even = bool((k_lengths == keys).all())
        least = self.mapping.least_classes
        if 0 < keys < least:
            keys, even = least, False
        xp = namespace(self.q)
        one = offsets.size == 0 or bool((offsets == offsets[0]).all())
        offset: Any = (int(offsets[0]) if offsets.size else 0) if one else beside(offsets, self.q, "offset", xp)
        lengths = None if even or seen else beside(k_lengths, self.q, "lengths", xp)
        k, v = (self._rows(a, self.at_k.ptr[ids], k_lengths, keys, xp) for a in (self.k, self.v))
        q = self._rows(self.q, self.at_q.ptr[ids], q_lengths, width, xp)
        index = beside(ids, self.q, "index", xp)
        scale = self._of(self.scale, "scale", index, xp)
        return _Batch(q, k, v, self._mapping_of(index, xp), scale, lengths, offset, self._slopes_of(index, xp))

    @staticmethod
    def _rows(a: Array, starts: np.ndarray, lengths: np.ndarray, width: int, xp: Namespace) -> Array:
        """[entries, heads, D] as [sequences, heads, width, D], padded with zeros."""
        n, rest = len(starts), tuple(a.shape[1:])
        if bool((lengths == width).all()) and bool((starts[1:] == starts[:-1] + width).all()):
            start = int(starts[0]) if n else 0
            rows = xp.reshape(a[start : start + n * width, ...], (n, width, *rest))
        else:
            at, valid = _places(starts, lengths, width)
            at = np.where(valid, at, 0)
            rows = xp.reshape(xp.take(a, beside(at.reshape(-1), a, "index", xp), axis=0), (n, width, *rest))
            if not valid.all():
                there = beside(valid[:, :, None, None], a, "valid", xp)
                rows = xp.where(there, rows, xp.zeros_like(rows))
        return xp.permute_dims(rows, (0, 2, 1, 3))

    # -- traced bounds ------------------------------------------------------------------------------------------------------------

    def traced(self, most: list[int | None]) -> tuple[list[_Batch], Callable[[Array], Array]]:
        most_q, most_k = most
        if most_q is None or most_k is None:
            name = "max_seqlen_q" if most_q is None else "max_seqlen_k"
            raise TypeError(
                f"attention_varlen: under a compiler whose bounds are traced it needs {name}=, the length that is padded to"
            )
        xp = namespace(self.q)
        at_q, at_k = (beside(at.ptr, self.q, "cu_seqlens", xp) for at in (self.at_q, self.at_k))
        q_lengths, k_lengths = at_q[1:] - at_q[:-1], at_k[1:] - at_k[:-1]
        offset = k_lengths - q_lengths if self.offset is None else self.offset
        q = _gathered(self.q, at_q, q_lengths, most_q, xp)
        k, v = (_gathered(a, at_k, k_lengths, max(most_k, self.mapping.least_classes), xp) for a in (self.k, self.v))
        batch = _Batch(q, k, v, self.mapping, self.scale, k_lengths, offset, self.alibi)

        def place(out: Array) -> Array:
            each = xp.arange(self.q.shape[0], dtype=at_q.dtype, **device_of(out))
            owner = xp.searchsorted(at_q[1:], each, side="right")
            inside = owner < q_lengths.shape[0]
            owner = xp.where(inside, owner, xp.zeros_like(owner))
            rank = each - at_q[owner]
            fits = inside & (rank < most_q) & (k_lengths[owner] <= most_k)
            row = xp.where(fits, owner * most_q + rank, xp.zeros_like(rank))
            out = xp.take(out, row, axis=0)
            return xp.where(fits[:, None, None], out, xp.nan * xp.ones_like(out))

        return [batch], place

    # -- parameters that may differ from sequence to sequence -------------------------------------------------------------------------

    def _mapping_of(self, ids: Array, xp: Namespace) -> Mapping:
        name = self.mapping.name
        return self.mapping.laid_out(
            **{n: self._of(a, f"{name}: {n}", ids, xp) for n, a in self.mapping.params().items()}
        )

    def _slopes_of(self, ids: Array, xp: Namespace) -> Any:
        """The slopes of ALiBi for a batch of sequences."""
        alibi = asarray(self.alibi, "alibi") if isinstance(self.alibi, (list, tuple)) else self.alibi
        if not is_array(alibi) or alibi.ndim != 2 or alibi.shape[0] == 1:
            return alibi
        if alibi.shape[0] != self.at_q.num_segments:
            raise ValueError(
                f"attention_varlen: alibi must have one number for each head, shape ({self.q.shape[1]},), or for each head of each "
                f"sequence, shape {(self.at_q.num_segments, self.q.shape[1])}, got {tuple(alibi.shape)}"
            )
        return xp.take(beside(alibi, self.q, "alibi", xp), ids, axis=0)

    def _of(self, value: Any, name: str, ids: Array, xp: Namespace) -> Any:
        if not is_array(value) or not value.ndim:
            return value
        sequences = self.at_q.num_segments
        leading = value.shape[0] if value.ndim == 4 else 1
        if value.ndim > 4 or any(n != 1 for n in value.shape[-2:]) or leading not in (1, sequences):
            raise ValueError(
                f"attention_varlen: {name} of shape {tuple(value.shape)} must be a number, or have the shape [heads, 1, 1] or "
                f"[sequences, 1 or heads, 1, 1], with {sequences} sequences and {self.q.shape[1]} heads"
            )
        if leading == 1:
            return value
        return xp.take(beside(value, self.q, name, xp), ids, axis=0)


# -- checks of the arguments ----------------------------------------------------------------------------------------------------------


def _operand(a: Any, name: str) -> Array:
    instead = "give its values() and, as cu_seqlens, its offsets()"
    a = operands.dense_array("attention_varlen", name, in_memory(a, name), instead)
    if a.ndim != 3:
        raise ValueError(
            f"attention_varlen: {name} must have the shape [entries, heads, features], all sequences one after another, "
            f"got {tuple(a.shape)}"
        )
    return a


def _bounds(name: str, value: Any, a: Array, what: str) -> Segments:
    at = read_one("attention_varlen", name, value)
    if framework(at.ptr) == "JAX" != framework(a):
        raise TypeError(
            f"attention_varlen: {name} is traced by JAX, and {what} is of another framework; make {what} an array of JAX"
        )
    return along("attention_varlen", at, a.shape[0], what)


def _most(name: str, most: Any, at: Segments) -> int | None:
    most = number(most)
    if most is None:
        return None
    if is_array(most) and not most.ndim and is_integer(most) and eager(most):
        most = int(most)
    if not is_int(most) or most < 0:
        raise TypeError(f"attention_varlen: {name} must be an integer from 0 on, got {shown(most)}")
    if at.known and at.num_segments and most < at.lengths.max():
        raise ValueError(
            f"attention_varlen: {name} is {most}, and sequence {int(at.lengths.argmax())} has {int(at.lengths.max())} entries; leave it out"
        )
    return most


def _offset(offset: Any, sequences: int) -> Any:
    offset = number(offset)
    if offset is None or is_int(offset):
        return offset
    offset = np.asarray(offset) if isinstance(offset, (list, tuple)) else offset
    shape = tuple(offset.shape) if is_array(offset) and is_integer(offset) else None
    if shape not in ((), (1,), (sequences,)):
        raise TypeError(
            f"attention_varlen: offset must be an integer, or integers of the shape ({sequences},), got {shown(offset)}"
        )
    return offset


# -- rows and batches -------------------------------------------------------------------------------------------------------------------


def _alike(alone: np.ndarray, q_lengths: np.ndarray, k_lengths: np.ndarray) -> Iterator[np.ndarray]:
    """The indices of the sequences of each batch: `alone` ones have equal lengths, the others lengths with the same power of two above."""
    lengths = (np.where(alone, n, np.frexp(np.maximum(n, 1) - 0.5)[1]) for n in (q_lengths, k_lengths))
    keys = np.stack([alone, *lengths], axis=1)
    ids = np.nonzero(q_lengths > 0)[0]
    _, batch = np.unique(keys[ids], axis=0, return_inverse=True)
    for each in range(int(batch.max(initial=-1)) + 1):
        yield ids[batch.reshape(-1) == each]


def _places(starts: np.ndarray, lengths: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The index of the entry at each place of rows [sequences, width], and False where the place is padding."""
    at = np.arange(width)
    return starts[:, None] + at, at < lengths[:, None]


def _gathered(a: Array, starts: Array, lengths: Array, width: int, xp: Namespace) -> Array:
    """`_Job._rows` for traced bounds."""
    at = xp.arange(width, dtype=starts.dtype, **device_of(a))
    valid = at[None, :] < lengths[:, None]
    none = a.shape[0] * xp.ones_like(starts[:1])
    at = xp.where(valid, starts[:-1, None] + at[None, :], none)
    a = xp.concat([a, xp.zeros_like(xp.broadcast_to(xp.sum(a[:0], axis=0, keepdims=True), (1, *a.shape[1:])))], axis=0)
    rows = xp.reshape(xp.take(a, xp.reshape(at, (-1,)), axis=0), (*valid.shape, *a.shape[1:]))
    return xp.permute_dims(rows, (0, 2, 1, 3))


document(globals(), AttentionOptions)
