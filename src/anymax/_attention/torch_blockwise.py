"""Attention of torch tensors in blocks of queries: neither pass holds the whole matrix of scores.

One matrix product gives a block of scores, which becomes probabilities in place and is then overwritten. Where few keys have weight, the
output and the gradients are sums over those keys. The backward pass recomputes all other blocks with autograd. Heads that share keys are
in one block, [g, R, rows, S'], without the keys that no query of the block may see.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import array_api_compat.torch as xp
import torch

from .. import kernels
from .._array import batched, modes, plain_backward, recorded, upcast
from .._core.mapping import Mapping
from ..autodiff.saving import hooked
from ..autodiff.torch import BRIDGE as bridge
from ..autodiff.torch_adapter import operation
from ..kernels.support import NonZeros
from ..thresholds import tau_of
from .call import AttentionCall, Result
from .scores import ADDED, BLOCK, Scores, outer, tile

Tensor = torch.Tensor

_ROWS = 32  # the fewest in a block: fewer would not be faster
_KEYS = 384  # the fewest in a block: of 320 and fewer the engine saves no support
_FEW = 8  # a block is sparse where each query keeps at most one key in 8
_PLAIN = {*ADDED, "keep", "lengths", "q_lengths", "offset"}  # added or masking, in place


@dataclasses.dataclass(frozen=True)
class _Job:
    """One call, with batches and heads of keys in one axis: q [G, R, L, D], k and v [G, S, D]."""

    scores: Scores
    lead: tuple[int, ...]  # batches and heads of keys, whose product is G
    groups: int
    names: tuple[str, ...]  # the names of the arrays
    dropout_p: float
    seed: int
    threshold: bool

    @property
    def follows_from_p(self) -> set[str]:
        """The names of the arrays in which the derivative follows from p."""
        return {f"mapping.{name}" for name in self.scores.mapping.learns}

    def blocks(self) -> list[_Block]:
        rows, keys = self.scores.shape[-2:]
        heads = math.prod(self.lead)
        whole = self.groups * rows * keys
        together = max(1, min(heads, BLOCK // max(whole, 1)))
        height = rows if whole <= BLOCK else max(_ROWS, BLOCK // (self.groups * keys))
        out = []
        for g, row in itertools.product(range(0, heads, together), range(0, rows, height)):
            stop = min(rows, row + height)
            low, high = self.scores.seen(row, stop)
            least = min(keys, max(_KEYS, self.scores.mapping.least_classes + 1))
            if high - low < least:
                low = max(0, min(low, keys - least))
                high = low + least
            out.append(_Block(len(out), slice(g, min(heads, g + together)), slice(row, stop), slice(low, high)))
        return out

    def size(self, block: _Block) -> int:
        """How many scores a block has."""
        heads, rows, keys = (part.stop - part.start for part in (block.heads, block.rows, block.keys))
        return int(heads * self.groups * rows * keys)


@dataclasses.dataclass(frozen=True)
class _Block:
    number: int
    heads: slice
    rows: slice
    keys: slice


def attend(call: AttentionCall, source: Any) -> Result:
    """The output, and the thresholds, of a call of `attention` that `_refuse_blocks` accepts."""
    scores = call.scores
    q, k, v = (upcast(a, xp) for a in (call.q, call.k, call.v))
    shape = scores.shape if len(scores.shape) > 2 else (1, *scores.shape)
    batch, heads = shape[:-3], shape[-3]
    shared = heads // call.groups
    lead = (*batch, shared)
    q = q.expand(*batch, heads, *q.shape[-2:]).reshape(-1, call.groups, *q.shape[-2:])
    k = k.expand(*lead, *k.shape[-2:]).reshape(-1, *k.shape[-2:])
    v = v.expand(*lead, *v.shape[-2:]).reshape(-1, *v.shape[-2:])
    arrays = {n: _split_heads(a, len(shape), call.groups) for n, a in outer(scores, call.q, xp).items()}
    seed = int(torch.randint(2**62, (), generator=source, device=source.device)) if call.dropout_p else 0
    job = _Job(
        dataclasses.replace(scores, shape=shape), lead, call.groups, tuple(arrays), call.dropout_p, seed, call.return_threshold
    )  # fmt: skip
    tensors = (q, k, v, *arrays.values())
    if recorded(*tensors):
        results = _attend(job, *tensors)
        out, *tau = results if job.threshold else (results,)
    else:
        (out, *tau), _ = _forward(job, q, k, v, tensors[3:], False)
    return Result(out.reshape(*scores.shape[:-1], -1), None, tau[0].reshape(scores.shape[:-1]) if tau else None)


def _split_heads(a: Tensor, rank: int, groups: int) -> Tensor:
    """[..., H, L, S] as [..., heads of keys, groups, L, S]."""
    a = a.reshape((1,) * (rank - a.ndim) + tuple(a.shape))
    if a.shape[-3] == 1:
        return a.unsqueeze(-3)
    return a.reshape(*a.shape[:-3], a.shape[-3] // groups, groups, *a.shape[-2:])


# -- a block's part of an array ---------------------------------------------------------------------------------------------------


def _places(a: Tensor, lead: tuple[int, ...], heads: slice) -> tuple[Any, ...]:
    """The indices of a block's heads in the leading axes of an array."""
    if heads.stop - heads.start == 1:
        at, rest = [], heads.start
        for n in reversed(lead):
            at.append(rest % n)
            rest //= n
        return tuple(slice(i, i + 1) if size > 1 else slice(0, 1) for i, size in zip(reversed(at), a.shape))
    index = torch.arange(heads.start, heads.stop, device=a.device)
    at = []
    for n in reversed(lead):
        at.append(index % n)
        index = index // n
    return tuple(i if size > 1 else torch.zeros_like(i) for i, size in zip(reversed(at), a.shape))


def _inner(a: Tensor, block: _Block) -> Tensor:
    rows = block.rows if a.shape[-2] > 1 else slice(None)
    keys = block.keys if a.shape[-1] > 1 else slice(None)
    return a[..., rows, keys]


def _pick(a: Tensor, job: _Job, block: _Block) -> Tensor:
    """A block's part of an array, [g, R or 1, rows or 1, S' or 1]; a view if the block has one head."""
    part = _inner(a, block)[_places(a, job.lead, block.heads)]
    return part.reshape(-1, *part.shape[-3:]) if part.ndim > 4 else part


def _put(gradient: Tensor, part: Tensor, job: _Job, block: _Block) -> None:
    """Adds a block's part of a gradient at the place that `_pick` reads."""
    at = _places(gradient, job.lead, block.heads)
    view = _inner(gradient, block)
    if block.heads.stop - block.heads.start == 1:
        view = view[at]
        view += part.reshape(view.shape)
    else:
        view.index_put_(at, part, accumulate=True)


def _tile(job: _Job, block: _Block, parts: dict[str, Tensor], like: Tensor) -> Scores:
    parts = {k: a.to(like.dtype) if a.is_floating_point() else a for k, a in parts.items()}
    shape = (block.heads.stop - block.heads.start, job.groups, block.rows.stop - block.rows.start)
    return tile(job.scores, parts, (*shape, block.keys.stop - block.keys.start), block.rows.start, block.keys.start)


# -- forward ----------------------------------------------------------------------------------------------------------------------


def _forward(
    job: _Job, q: Tensor, k: Tensor, v: Tensor, arrays: Sequence[Tensor], keep: bool
) -> tuple[tuple[Tensor, ...], list[tuple[Tensor, Tensor] | None]]:
    """The output and the thresholds, and with `keep` the non-zeros of each sparse block."""
    s = job.scores
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    tau = (q.new_empty(q.shape[:-1]),) if job.threshold else ()
    plain = set(job.names) <= _PLAIN | {n for n in job.names if n.startswith("mapping.")}
    plain = plain and s.softcap is None and s.transform is None
    scaled = q * s.scale if plain else q
    v = v.contiguous()
    few: list[tuple[Tensor, Tensor] | None] = []
    blocks = job.blocks()
    most = max((job.size(block) for block in blocks), default=0)
    buffer = q.new_empty(most)  # a buffer that grew with the blocks would scatter the heap
    for block in blocks:
        parts = {n: _pick(a, job, block) for n, a in zip(job.names, arrays)}
        t = _tile(job, block, parts, q)
        x = buffer[: job.size(block)].view(t.shape[0], -1, t.shape[3])
        rows = scaled[block.heads, :, block.rows].reshape(t.shape[0], -1, q.shape[-1])
        torch.bmm(rows, k[block.heads, block.keys].mT, out=x)
        x = x.view(t.shape)
        x = _plainly(x, t) if plain else t.of(x, xp)
        for one in tau:
            one[block.heads, :, block.rows] = tau_of(t.mapping, x, xp)[..., 0]
        p, support = _probabilities(t.mapping, x)
        pair = None if support is None or job.dropout_p or "sink" in job.names else _non_zeros(support, t.shape[3])
        if pair is None:
            p = _dropped(p[..., : t.shape[3]], job, block)
            o = torch.bmm(p.reshape(t.shape[0], -1, t.shape[3]), v[block.heads, block.keys])
        else:
            o = _weighted(pair, v, block)
        out[block.heads, :, block.rows] = o.view(*t.shape[:3], v.shape[-1])
        few.append(pair if keep else None)
    return (out, *tau), few


def _plainly(x: Tensor, t: Scores) -> Tensor:
    """`Scores.of` in place, for scaled scores with only biases and masks."""
    for term in t.added:
        x += term
    arrays = t.arrays.keys() & {"keep", "lengths", "q_lengths", "offset"}
    if t.left is None and not arrays and t.reach is not None:  # every query sees what the first one sees: mask the rest
        start = max(0, min(t.shape[-1], t.offset + t.reach + 1 - t.first_key))
        t = dataclasses.replace(t, first_key=t.first_key + start, shape=(*t.shape[:-1], t.shape[-1] - start))
        seen = t.visible(x, xp)
        if seen is not None and t.shape[-1]:
            x[..., start:].masked_fill_(~seen, -torch.inf)
        return x
    seen = t.visible(x, xp)
    return x if seen is None else x.masked_fill_(~seen, -torch.inf)


def _probabilities(mapping: Mapping, x: Tensor) -> tuple[Tensor, NonZeros | None]:
    """p(x), in place where an engine can, and the non-zeros where an engine has found them."""
    if modes():
        return bridge.apply(mapping, x), None
    return kernels.choose("forward", mapping, x).forward_non_zeros(mapping, x, x)


def _non_zeros(support: NonZeros, keys: int) -> tuple[Tensor, Tensor] | None:
    """(index, probability) of the non-zeros, [rows, most], padded with zeros; None where they are not few."""
    most, least = int(support.count.max()), int(support.count.min())
    if least < 0 or most * _FEW > keys:
        return None
    most = max(most, 1)
    absent = torch.arange(most, dtype=torch.int32) >= support.count[:, None]
    return support.index[:, :most].masked_fill(absent, 0), support.value[:, :most].masked_fill(absent, 0.0)


def _weighted(pair: tuple[Tensor, Tensor], v: Tensor, block: _Block) -> Tensor:
    """The sums `sum_j p_ij v_j` over the non-zeros, [rows, Dv]."""
    index, p = pair
    return torch.nn.functional.embedding_bag(
        _flat(index, v, block), _rows_of(v, block), per_sample_weights=p.to(v.dtype), mode="sum"
    )


def _rows_of(a: Tensor, block: _Block) -> Tensor:
    """The keys or values of the block's heads, stacked as rows."""
    if block.heads.stop - block.heads.start == 1:
        return a[block.heads.start, block.keys]
    return a[block.heads].reshape(-1, a.shape[-1])


def _flat(index: Tensor, a: Tensor, block: _Block) -> Tensor:
    """Indices of the block's keys as indices of `_rows_of`."""
    heads = block.heads.stop - block.heads.start
    if heads == 1:
        return index
    first = torch.arange(heads, dtype=index.dtype) * a.shape[1] + block.keys.start
    return index + first.repeat_interleave(len(index) // heads)[:, None]


def _dropped(p: Tensor, job: _Job, block: _Block) -> Tensor:
    """p with dropout; the block's number seeds it, so a recomputed block drops the same entries."""
    if not job.dropout_p:
        return p
    source = torch.Generator(p.device).manual_seed((job.seed + block.number) % 2**63)
    kept = torch.rand(p.shape, generator=source, dtype=p.dtype, device=p.device) >= job.dropout_p
    return p * (kept.to(p.dtype) / (1.0 - job.dropout_p))


# -- derivatives ------------------------------------------------------------------------------------------------------------------


def _recorded_forward(job: _Job, operands: Any, wants: Any) -> tuple[Any, Any]:
    """The results, and of each block the two tensors of its non-zeros, or None twice."""
    q, k, v, *arrays = operands
    # the sparse backward has gradients of q, k, v and of parameters whose derivative follows from p
    learned = [name for name, wanted in zip(job.names, wants[3:]) if wanted]
    sparse = set(learned) <= job.follows_from_p and not job.scores.mapping.needs_scores
    sparse = sparse and job.scores.softcap is None and job.scores.transform is None and "scale" not in job.names
    sparse = sparse and not job.scores.mapping.per_class and not hooked() and not job.threshold
    out, non_zeros = _forward(job, q, k, v, arrays, sparse)
    return out if job.threshold else out[0], list(itertools.chain(*(pair or (None, None) for pair in non_zeros)))


def _backward(job: _Job, tensors: Any, kept: Any, grads: Any, wants: Any) -> Any:
    some = [g for g in grads if g is not None]
    if job.dropout_p and any(map(batched, some)):
        raise RuntimeError(
            "attention: implementation 'blockwise' has no batch of gradients through dropout; ask for 'reference'"
        )
    if any(map(plain_backward, some)):
        return _again(job, tensors, grads, wants)
    out = [torch.zeros_like(t) if w else None for t, w in zip(tensors, wants)]
    for n, block in enumerate(job.blocks()):
        if kept[2 * n] is None:
            _dense_backward(job, block, tensors, grads, out)
        else:
            _sparse_backward(job, block, kept[2 * n : 2 * n + 2], tensors, grads[0], out)
    return out


_attend = operation("BlockwiseAttention", _recorded_forward, _backward)


def _dense_backward(
    job: _Job, block: _Block, tensors: Sequence[Tensor], grads: Sequence[Tensor], out: list[Tensor | None]
) -> None:
    """Recomputes the block with autograd and adds its gradients to `out`."""
    q, k, v, *arrays = tensors
    places = (
        (lambda a: a[block.heads, :, block.rows]), (lambda a: a[block.heads, block.keys]), (lambda a: a[block.heads, block.keys]),
    )  # fmt: skip
    with torch.enable_grad():
        own = [place(a).detach().requires_grad_(o is not None) for place, a, o in zip(places, (q, k, v), out)]
        parts = [_pick(a, job, block).detach().requires_grad_(o is not None) for a, o in zip(arrays, out[3:])]
        leaves = [*own, *parts]
        results = _block_results(job, block, own[0], own[1], own[2], dict(zip(job.names, parts)))
        wanted = [leaf for leaf, o in zip(leaves, out) if o is not None]
        of_block = [None if g is None else g[block.heads, :, block.rows] for g in grads]
        gradients = iter(_gradients(results, wanted, of_block, False))
    for n, o in enumerate(out):
        if o is None:
            continue
        gradient = next(gradients)
        if gradient is None:
            continue
        if n < 3:
            view = places[n](o)
            view += gradient
        else:
            _put(o, gradient, job, block)


def _block_results(job: _Job, block: _Block, q: Tensor, k: Tensor, v: Tensor, parts: dict[str, Tensor]) -> list[Tensor]:
    """The block's output, [g, R, rows, Dv], and its thresholds, by operations that autograd can differentiate."""
    t = _tile(job, block, parts, q)
    x = (q.reshape(t.shape[0], -1, q.shape[-1]) @ k.mT).view(t.shape)
    x = t.of(x, xp)
    p = _dropped(bridge.apply(t.mapping, x)[..., : t.shape[3]], job, block)
    out = (p.reshape(t.shape[0], -1, t.shape[3]) @ v).view(*t.shape[:3], v.shape[-1])
    return [out, tau_of(t.mapping, x, xp)[..., 0]] if job.threshold else [out]


def _gradients(
    results: list[Tensor], inputs: list[Tensor], grads: Sequence[Tensor | None], create_graph: bool
) -> tuple[Tensor | None, ...]:
    """Those of the results that have a gradient."""
    used = [(result, g) for result, g in zip(results, grads) if g is not None]
    return torch.autograd.grad(
        [result for result, _ in used], inputs, [g for _, g in used], create_graph=create_graph, allow_unused=True
    )


def _again(job: _Job, tensors: Sequence[Tensor], grads: Sequence[Tensor], wants: Sequence[bool]) -> list[Tensor | None]:
    """Gradients by plain operations, which autograd and vmap can pass through, a block at a time."""
    q, k, v, *arrays = tensors
    inputs = [t for t, w in zip(tensors, wants) if w]
    create_graph = torch.is_grad_enabled()
    total: list[Tensor | None] = [None] * len(inputs)
    for block in job.blocks():
        with torch.enable_grad():
            parts = {n: _pick(a, job, block) for n, a in zip(job.names, arrays)}
            results = _block_results(
                job, block, q[block.heads, :, block.rows], k[block.heads, block.keys], v[block.heads, block.keys], parts
            )
        # a batch of gradients can't be indexed as g[...]
        high, rows = results[0].shape[0], results[0].shape[2]
        of_block = [
            None if g is None else g.narrow(0, block.heads.start, high).narrow(2, block.rows.start, rows) for g in grads
        ]
        gradients_of_block = _gradients(results, inputs, of_block, create_graph)
        total = [b if a is None else a if b is None else a + b for a, b in zip(total, gradients_of_block)]
    gradients = iter(total)
    return [next(gradients) if w else None for w in wants]


def _sparse_backward(
    job: _Job,
    block: _Block,
    pair: Sequence[Tensor],
    tensors: Sequence[Tensor],
    g: Tensor,
    out: list[Tensor | None],
) -> None:
    """The gradients by sums over the non-zeros: ds = J dp with dp_ij = <g_i, v_j>."""
    q, k, v, *arrays = tensors
    index, p = pair
    p = p.to(q.dtype)
    g = g[block.heads, :, block.rows].reshape(len(index), -1)
    flat = _flat(index, k, block)
    if out[2] is not None:
        _scatter(out[2], flat, p[..., None] * g[:, None, :], block)
    if all(o is None for o in (*out[:2], *out[3:])):
        return
    dp = (_rows_of(v, block)[flat] @ g[:, :, None]).squeeze(-1)
    parts = {n: _pick(a, job, block) for n, a in zip(job.names, arrays)}
    t = _tile(job, block, parts, q)
    p, dp = (a.view(*t.shape[:3], -1) for a in (p, dp))
    for name, o in zip(job.names, out[3:]):
        if o is not None:
            slope = kernels.choose("slope", t.mapping, p).slope(t.mapping, name.removeprefix("mapping."), p, p, dp)
            _put(o, slope.sum_to_size(parts[name].shape).to(o.dtype), job, block)
    if out[0] is None and out[1] is None:
        return
    ds = kernels.choose("vjp", t.mapping, p).vjp(t.mapping, p, p, dp).view(len(index), -1) * job.scores.scale
    if out[0] is not None:
        dq = torch.nn.functional.embedding_bag(flat, _rows_of(k, block), per_sample_weights=ds, mode="sum")
        view = out[0][block.heads, :, block.rows]
        view += dq.view(view.shape)
    if out[1] is not None:
        rows = q[block.heads, :, block.rows].reshape(len(index), -1)
        _scatter(out[1], flat, ds[..., None] * rows[:, None, :], block)


def _scatter(out: Tensor, flat: Tensor, parts: Tensor, block: _Block) -> None:
    _rows_of(out, block).index_add_(0, flat.reshape(-1), parts.reshape(-1, parts.shape[-1]))
