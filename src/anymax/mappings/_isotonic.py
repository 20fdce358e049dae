"""Isotonic regression of rows in array-API code, and sums over the blocks that it finds.

The projection on the permutahedron of w is `z - v` for scores z in descending order, where v is the descending sequence nearest to
`z - w` in squares, or to `z - log w` in relative entropy. v is constant on blocks, and the blocks are all that is needed: within a
block z moves by its mean to that of w. So a map holds the blocks constant and has exact derivatives of every order.
"""

from __future__ import annotations

from .._array import Array, Namespace, counts, is_torch, positions, take, total
from .._core.solve import root


def starts_of_blocks(z: Array, w: Array, kept: Array, weights: Array | None, xp: Namespace) -> Array:
    """For each place of rows in descending order, the first place of its block, [..., n], in the dtype of z.

    Without `weights` v is nearest to z - w in squares. With them it is the descending v with the least `sum_i weights_i (exp(z_i - w_i -
    v_i) + v_i)`. Places that are not `kept` come last; each is a block.
    """
    lowest = -(float(xp.finfo(z.dtype).max) ** 0.75)
    v = xp.where(kept, z - w, lowest * xp.ones_like(z))
    v = xp.where(v > lowest, v, lowest * xp.ones_like(z))
    v = _merged(v, weights, xp)
    place = positions(v, v.dtype, xp) + xp.zeros_like(v)
    first = xp.concat([xp.ones_like(kept[..., :1]), (v[..., 1:] != v[..., :-1]) | ~kept[..., 1:]], axis=-1)
    return _running_maximum(xp.where(first, place, xp.zeros_like(v)), xp)


def _merged(v: Array, weights: Array | None, xp: Namespace) -> Array:
    """The descending regression of rows: of halves, of halves of halves, and so on, two neighbours at a time.

    Where the left part ends below the beginning of the right one, its end and that beginning become one block with the value m: the left
    values below m rise to it and the right ones above m fall to it, and m is such that the (weighted) sum stays.
    """
    n = int(v.shape[-1])
    lead, size = tuple(v.shape[:-1]), 1
    while size < n:
        size *= 2
    low = v[..., -1:]
    v = xp.concat([v, xp.broadcast_to(low, (*lead, size - n))], axis=-1) if size > n else v
    each = xp.ones_like(v) if weights is None else weights
    if size > n and weights is not None:
        each = xp.concat([each, xp.zeros_like(v[..., n:])], axis=-1)
    if size > n and weights is None:
        each = xp.where(positions(v, v.dtype, xp) < n, each, xp.zeros_like(v))
    width = 1
    while width < size:
        shape = (*lead, size // (2 * width), 2, width)
        parts, share = xp.reshape(v, shape), xp.reshape(each, shape)
        left, right = parts[..., 0, :], parts[..., 1, :]
        below, above = left[..., -1:], right[..., :1]

        def evaluate(
            level: Array, left: Array = left, right: Array = right, share: Array = share
        ) -> tuple[Array, Array]:
            rise, fall = level - left, right - level
            up, down = rise > 0, fall > 0
            rise, fall = (xp.where(c, a, xp.zeros_like(a)) for c, a in ((up, rise), (down, fall)))
            of_left, of_right = (xp.where(c, share[..., i, :], xp.zeros_like(rise)) for i, c in enumerate((up, down)))
            if weights is None:
                gain, pull, rates = of_left * rise, of_right * fall, (of_left, of_right)
            else:
                gain, pull = -of_left * xp.expm1(-rise), of_right * xp.expm1(fall)
                rates = of_left * xp.exp(-rise), of_right * xp.exp(fall)
            residual, rate = total(gain, xp) - total(pull, xp), total(rates[0], xp) + total(rates[1], xp)
            return residual, -residual / xp.where(rate > 0, rate, xp.ones_like(rate))

        level = root(evaluate, below, above, xp)
        pooled = below < above
        left = xp.where(pooled & (left < level), level, left)
        right = xp.where(pooled & (right > level), level, right)
        v = xp.reshape(xp.stack([left, right], axis=-2), (*lead, size))
        width *= 2
    return v[..., :n]


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
