"""Isotonic regression of rows in array-API code, and sums over the blocks that it finds.

The projection on the permutahedron of w is `z - v` for scores z in descending order, where v is the descending sequence nearest to
`z - w` in squares, or to `z - log w` in relative entropy. v is constant on blocks, and the blocks are all that is needed: within a
block z moves by its mean to that of w. So a map holds the blocks constant and has exact derivatives of every order.
"""

from __future__ import annotations

import math

from .._array import Array, Namespace, counts, is_torch, positions, take, total
from .._core.solve import root


def starts_of_blocks(z: Array, w: Array, kept: Array, entropic: bool, xp: Namespace) -> Array:
    """For each place of rows in descending order, the first place of its block, [..., n], in the dtype of z.

    v is nearest to z - w in squares, or if `entropic` the descending v with the least `sum_i exp(w_i) (exp(z_i - w_i - v_i) + v_i)`. Places
    that are not `kept` come last; each is a block.
    """
    lowest = -(float(xp.finfo(z.dtype).max) ** 0.75)
    v = xp.where(kept, z - w, lowest * xp.ones_like(z))
    v = xp.where(v > lowest, v, lowest * xp.ones_like(z))
    v = _merged(v, w if entropic else None, xp)
    place = positions(v, v.dtype, xp) + xp.zeros_like(v)
    first = xp.concat([xp.ones_like(kept[..., :1]), (v[..., 1:] != v[..., :-1]) | ~kept[..., 1:]], axis=-1)
    return _running_maximum(xp.where(first, place, xp.zeros_like(v)), xp)


def _merged(v: Array, weights: Array | None, xp: Namespace) -> Array:
    """The descending regression of rows: of halves, of halves of halves, and so on, two neighbours at a time.

    Where the left part ends below the beginning of the right one, its end and that beginning become one block with the value m: the left
    values below m rise to it and the right ones above m fall to it, and m is their mean, or if there are `weights`, in logarithms, the
    logarithm of the weighted mean of their exponentials.
    """
    n = int(v.shape[-1])
    lead, size = tuple(v.shape[:-1]), 1
    while size < n:
        size *= 2
    each = xp.zeros_like(v) if weights is None else weights
    if size > n:
        more = (*lead, size - n)
        v = xp.concat([v, xp.broadcast_to(v[..., -1:], more)], axis=-1)
        each = xp.concat([each, xp.broadcast_to(-math.inf * xp.ones_like(each[..., -1:]), more)], axis=-1)
    width = 1
    while width < size:
        shape = (*lead, size // (2 * width), 2, width)
        parts, share = xp.reshape(v, shape), xp.reshape(each, shape)
        left, right = parts[..., 0, :], parts[..., 1, :]
        below, above = left[..., -1:], right[..., :1]

        def evaluate(
            level: Array, left: Array = left, right: Array = right, share: Array = share
        ) -> tuple[Array, Array]:
            gap = xp.concat([left - level, right - level], axis=-1)
            share = xp.reshape(share, gap.shape)
            moved = xp.concat([left < level, right > level], axis=-1) & (share > -math.inf)
            if weights is None:
                count = total(xp.astype(moved, gap.dtype), xp)
                step = total(xp.where(moved, gap, xp.zeros_like(gap)), xp) / xp.where(
                    count > 0, count, xp.ones_like(count)
                )
            else:
                share = xp.where(moved, share, -math.inf * xp.ones_like(gap))
                step = _log_sum(share + gap, xp) - _log_sum(share, xp)
            return -step, step

        level = root(evaluate, below, above, xp)
        pooled = below < above
        left = xp.where(pooled & (left < level), level, left)
        right = xp.where(pooled & (right > level), level, right)
        v = xp.reshape(xp.stack([left, right], axis=-2), (*lead, size))
        width *= 2
    return v[..., :n]


def _log_sum(a: Array, xp: Namespace) -> Array:
    """The logarithm of the sum of exponentials; 0 where there are none."""
    top = xp.max(a, axis=-1, keepdims=True)
    top = xp.where(top == -math.inf, xp.zeros_like(top), top)
    sums = total(xp.exp(a - top), xp)
    return top + xp.log(xp.where(sums > 0, sums, xp.ones_like(sums)))


def _running_maximum(a: Array, xp: Namespace) -> Array:
    n, step = int(a.shape[-1]), 1
    while step < n:
        before = xp.concat([a[..., :step], a[..., :-step]], axis=-1)
        a = xp.where(before > a, before, a)
        step *= 2
    return a


def of_block(a: Array, block: Array, xp: Namespace) -> Array:
    """For each entry the sum of `a` over its block, [..., n]; entries with equal numbers, from 0 to n - 1, in `block` are one block."""
    index = counts(block, xp)
    if is_torch(a):
        return xp.zeros_like(a).scatter_add(-1, index, a).gather(-1, index)
    order = xp.argsort(index, axis=-1)
    return take(_sums_of_runs(take(a, order, xp), take(index, order, xp), xp), xp.argsort(order, axis=-1), xp)


def _sums_of_runs(a: Array, block: Array, xp: Namespace) -> Array:
    """`of_block` where the entries of a block lie side by side: sums up to each entry, by steps of 1, 2, 4, ..., and of them the last."""
    left = xp.ones_like(block)  # entries of the block from here on
    n, step = a.shape[-1], 1
    while step < n:
        same = block[..., step:] == block[..., :-step]
        gap, none = xp.zeros_like(a[..., :step]), xp.zeros_like(left[..., :step])
        a = a + xp.concat([gap, xp.where(same, a[..., :-step], xp.zeros_like(a[..., step:]))], axis=-1)
        left = left + xp.concat([xp.where(same, left[..., step:], xp.zeros_like(left[..., step:])), none], axis=-1)
        step *= 2
    return take(a, positions(left, left.dtype, xp) + left - 1, xp)
