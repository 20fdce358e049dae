"""The score at which a running sum over the scores in descending order reaches a target: top-k counts them, top-p adds their weights.

Nothing is sorted. The search narrows an interval of scores by pivots: a pass over the row counts or weighs the scores from each pivot on.
The first pivots are where a row of normally distributed scores would have its edge; the next ones are interpolated, and every third is
half-way in the order of the floats, so that any row takes a bounded number of passes. It stops when the scores from the pivot on are
those wanted or when only equal scores are left to decide on; `cut` then takes the first of these by position, with one cumulative sum.

A row on chip takes one pivot a pass, whose arithmetic is what a pass costs. A row in steps, which each pass reads again, takes three; and
the search stops as soon as few scores are left, which one more pass gathers to a tile. Every fourth pass instead finds the lowest and the
highest score of the interval, which ends a search among ties.

For top-p and bf16 a pass of three pivots has 268 instructions for 16 scores of a thread, of which 48 compare scores with pivots. To compare
two packed bf16 at once would spare 24 of them, or 1.1 times; the sums must be in fp32, so nothing else of a pass can be packed. A radix
search of top-k would read a row in steps twice for its two digits of 8 bits, and four times in fp32; the lane maxima bound the k-th score
so closely that k = 50 reads the row once and 2,000 once or twice more.
"""

# pyright: reportAssignmentType=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# type checkers can't read the code that Triton traces

from __future__ import annotations

import triton
import triton.language as tl

from .links import quick_exp
from .tile import AT_HAND, any_of, as_scalar, fetch, in_packs, lanes, largest, per_lane, smallest, total, wide

LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def key(x):
    """Integers in the order of the floats, the same for both zeros."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unkey(k):
    return (k ^ ((k >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def pivot(m, at):
    """The key of a score, or of the next lower number of its dtype: only such keys are pivots."""
    if at.X.dtype.element_ty == tl.bfloat16:
        return key(m) & -65536
    elif at.X.dtype.element_ty == tl.float16:
        return key(m) & -8192
    else:
        return key(m)


@triton.jit
def near(guess, spread, at):
    """Three pivots around a guess."""
    return pivot(guess - spread, at), pivot(guess, at), pivot(guess + spread, at)


@triton.jit
def weigh(x, top):
    """exp(x - top) for a finite maximum."""
    return quick_exp(x - top)


@triton.jit
def chosen(x, cols, edge, last):
    """True for the scores above the edge, and for those equal to it up to the class `last`."""
    return (x > edge) | ((x == edge) & (cols <= last))


@triton.jit
def exceeded(q):
    """The number that a standard normal variable exceeds with probability q, to three digits (Abramowitz and Stegun, 26.2.23)."""
    tail = tl.maximum(tl.minimum(q, 1.0 - q), 1e-30)
    t = tl.sqrt(-2.0 * tl.log(tail))
    z = t - (2.515517 + t * (0.802853 + t * 0.010328)) / (1.0 + t * (1.432788 + t * (0.189269 + t * 0.001308)))
    return tl.where(q < 0.5, z, -z)


@triton.jit
def expected(x, top, k):
    """(guess, spread): where the k-th largest score of a tile would be if its scores were normal, and by how much it may be off."""
    finite = x > float("-inf")
    below = tl.where(finite, x - top, 0.0)
    number = tl.maximum(total(tl.where(finite, 1.0, 0.0)), 1.0)
    mean = total(below) / number
    deviation = tl.sqrt(tl.maximum(total(below * below) / number - mean * mean, 0.0))
    z = exceeded((k - 0.5) / number)
    return top + mean + deviation * z, deviation * (z - exceeded((k + 2.0 * tl.sqrt(k)) / number))


@triton.jit
def worth(x, top, m, BY: tl.constexpr):
    """What a score >= m adds to the running sum, else 0: 1 for BY "count", exp(x - top) for "exp"."""
    if BY == "count":
        return tl.where(x >= m, 1.0, 0.0)
    else:
        return tl.where(x >= m, weigh(x, top), 0.0)


@triton.jit
def probe(x, tops, top, m, at, BY: tl.constexpr, TILE: tl.constexpr):
    """The weight of the scores >= m, which is their number for BY "count"."""
    if TILE.WHOLE:
        if BY == "count":
            return total(worth(x, top, m, BY))
        else:
            return wide(worth(x, top, m, BY))
    else:
        live = in_packs(tops >= m, at, TILE)
        acc = per_lane(0.0, TILE, tl.float64 if BY == "exp" else tl.float32)
        for begin in range(0, at.n, TILE.K * TILE.L):
            v = fetch(at, begin, live, TILE, True)
            acc += tl.sum(worth(v, top, m, BY), 1, keep_dims=True).to(acc.dtype)
        return total(acc)


@triton.jit
def probe_three(tops, top, a, b, c, first, end, at, BY: tl.constexpr, TILE: tl.constexpr):
    """`probe` at the pivots a <= b <= c of a row in steps, or of its part [first, end), in one pass. A lane sums its scores in fp32."""
    live = in_packs(tops >= a, at, TILE)
    from_a = per_lane(0.0, TILE)
    from_b, from_c = from_a, from_a
    for begin in range(first, end, TILE.K * TILE.L):
        v = fetch(at, begin, live, TILE, True)
        from_a += tl.sum(worth(v, top, a, BY), 1, keep_dims=True)
        from_b += tl.sum(worth(v, top, b, BY), 1, keep_dims=True)
        from_c += tl.sum(worth(v, top, c, BY), 1, keep_dims=True)
    if BY == "count":
        return total(from_a), total(from_b), total(from_c)
    else:
        return wide(from_a), wide(from_b), wide(from_c)


@triton.jit
def narrowed(low, weight_low, high, weight_high, m, weight, target, go):
    """The interval [low, high) of keys and the weights from its ends on, after a probe at m."""
    up = go & (weight >= target) & (m > low)
    down = go & (weight < target) & (m < high)
    low, weight_low = tl.where(up, m, low), tl.where(up, weight, weight_low)
    return low, weight_low, tl.where(down, m, high), tl.where(down, weight, weight_high)


@triton.jit
def narrowed_by(low, weight_low, high, weight_high, a, b, c, weights, target, go):
    """`narrowed` by three probes."""
    from_a, from_b, from_c = weights
    low, weight_low, high, weight_high = narrowed(low, weight_low, high, weight_high, a, from_a, target, go)
    low, weight_low, high, weight_high = narrowed(low, weight_low, high, weight_high, c, from_c, target, go)
    return narrowed(low, weight_low, high, weight_high, b, from_b, target, go)


@triton.jit
def more_than(number, low, weight_low, weight_high, top, BY: tl.constexpr):
    """Whether an interval may have more scores than that: each has at least the weight of its lower end."""
    if BY == "count":
        return weight_low - weight_high > number
    else:
        return weight_low - weight_high > number * weigh(unkey(low), top)


@triton.jit
def ends(tops, a, b, at, TILE: tl.constexpr):
    """(lowest score >= a, highest score < b) of a row in steps."""
    live = in_packs(tops >= a, at, TILE)
    lowest, most = per_lane(float("inf"), TILE), per_lane(float("-inf"), TILE)
    for begin in range(0, at.n, TILE.K * TILE.L):
        v = fetch(at, begin, live, TILE, True)
        lowest = tl.minimum(lowest, tl.min(tl.where(v >= a, v, float("inf")), 1, keep_dims=True))
        most = tl.maximum(most, tl.max(tl.where(v < b, v, float("-inf")), 1, keep_dims=True))
    return smallest(lowest), largest(most)


@triton.jit
def select(x, tops, top, live, bound, start, ceiling, beyond, guess, spread, target, at, BY: tl.constexpr, MOST: tl.constexpr,
           TILE: tl.constexpr):  # fmt: skip
    """(edge, few, tied, beyond, weight from the edge on, weight beyond): the scores >= the edge weigh at least `target`, and less without
    their lowest value. few: the whole row weighs less, and all of it is kept; tied: several scores equal the edge, and not all of them are
    needed; those >= `beyond` are needed in any case.

    `bound`: a score such that those >= it surely weigh enough, or LOWEST. `start`: their weight or more; None: it is not known.
    `ceiling`: a key such that the scores from it on weigh too little, `beyond`; or None.
    `guess`: where the edge may be, within about `spread`, or None. MOST: the search stops where so few scores are from the edge to `beyond`
    (then the edge is below that of the row); 1.5: none but equal ones are.
    """
    GRAIN: tl.constexpr = (  # the distance between the keys of neighbouring numbers
        65536 if at.X.dtype.element_ty == tl.bfloat16 else (8192 if at.X.dtype.element_ty == tl.float16 else 1)
    )
    low, high = pivot(bound, at), pivot(tl.maximum(top, bound), at) + GRAIN  # above every score
    if start is None:
        weight_low = probe(x, tops, top, unkey(low), at, BY, TILE)
    else:
        weight_low = start
    weight_high = weight_low * 0.0
    if ceiling is not None:
        high, weight_high = tl.minimum(high, ceiling), beyond
    few = live & (weight_low < target)
    go = live & (few == 0) & (weight_low > target) & (low + GRAIN < high)
    if not TILE.WHOLE:
        go = go & more_than(MOST, low, weight_low, weight_high, top, BY)
    floor = 0.5 * tl.minimum(target, 1.0)  # less than the maximum weighs
    distance = 2.0
    turn = 0
    while any_of(go) & (turn < 100):
        a, b = unkey(low), unkey(high)
        # the weight from a score on falls about exponentially with the score
        part = tl.log((weight_low / target).to(tl.float32))
        part = part / tl.log((weight_low / tl.maximum(weight_high, floor)).to(tl.float32))
        bounded = a > 0.99 * LOWEST
        m = tl.where(bounded, a + (b - a) * part, top - distance)
        beside = tl.where(bounded, 0.125 * (b - a), distance)
        if guess is not None:
            if TILE.WHOLE:  # first below the guess; then above it, or far below
                second = tl.where(weight_high > 0.0, guess - 4.0 * spread, guess + spread)
                m = tl.where(turn == 0, guess - spread, tl.where(turn == 1, second, m))
            else:
                m, beside = tl.where(turn == 0, guess, m), tl.where(turn == 0, spread, beside)
        half = (low & high) + ((low ^ high) >> 1)
        middle = tl.where(turn % 3 == 2, half, key(m)) & -GRAIN
        middle = tl.minimum(tl.maximum(middle, low + GRAIN), high - GRAIN)
        if TILE.WHOLE:
            weight = probe(x, tops, top, unkey(middle), at, BY, TILE)
            low, weight_low, high, weight_high = narrowed(
                low, weight_low, high, weight_high, middle, weight, target, go
            )
        elif turn % 4 == 3:  # many ties: there is nothing between them
            a, b = ends(tops, a, b, at, TILE)
            low = tl.where(go & (a < float("inf")), tl.maximum(pivot(a, at), low), low)
            high = tl.where(go & (b > float("-inf")), tl.minimum(pivot(b, at) + GRAIN, high), high)
        else:
            m = unkey(middle)
            under = tl.maximum(tl.minimum(pivot(m - beside, at), middle - GRAIN), low + GRAIN)
            over = tl.minimum(tl.maximum(pivot(m + beside, at), middle + GRAIN), high - GRAIN)
            weights = probe_three(tops, top, unkey(under), m, unkey(over), 0, at.n, at, BY, TILE)
            low, weight_low, high, weight_high = narrowed_by(
                low, weight_low, high, weight_high, under, middle, over, weights, target, go
            )
        go = go & (weight_low > target) & (low + GRAIN < high)
        go = go & more_than(MOST, low, weight_low, weight_high, top, BY)
        distance *= 4.0
        turn += 1
    tied = live & (few == 0) & (weight_low > target) & more_than(1.5, low, weight_low, weight_high, top, BY)
    # the keys of negative halves end in ones
    edge = unkey(tl.where(low < 0, low | (GRAIN - 1), low))
    return tl.where(few, LOWEST, edge), few, tied, unkey(high), weight_low, weight_high


@triton.jit
def from_lanes(tops, top, live, k, at):
    """(a number that k numbers of a tile, and those equal to the lowest of them, reach; few): LOWEST where the tile has fewer. Of lane
    maxima: at least k scores reach it."""
    guess, spread = expected(tops, top, k)
    bound = top * 0.0 + LOWEST
    edge, few, _, _, _, _ = select(
        tops, tops, top, live, bound, None, None, None, guess, spread, k, at, "count", 1.5, AT_HAND
    )
    return tl.where(live, edge, LOWEST), few


@triton.jit
def kth(x, tops, top, live, k, at, TILE: tl.constexpr):
    """(the k-th largest score, few); the lowest score where the row has fewer than k."""
    if TILE.WHOLE:
        edge, few = from_lanes(x, top, live, k, at)
    else:
        bound, _ = from_lanes(tops, top, live, k, at)
        edge, few, _, _, _, _ = select(
            x, tops, top, live, bound, None, None, None, None, None, k, at, "count", 1.5, TILE
        )
    return lowest_from(x, tops, edge, at, TILE), few


@triton.jit
def lowest_from(x, tops, m, at, TILE: tl.constexpr):
    """The lowest score >= m; m where there is none."""
    if TILE.WHOLE:
        found = smallest(tl.where(x >= m, x, float("inf")))
    else:
        live = in_packs(tops >= m, at, TILE)
        found_ = per_lane(float("inf"), TILE)
        for begin in range(0, at.n, TILE.K * TILE.L):
            v = fetch(at, begin, live, TILE, True)
            found_ = tl.minimum(found_, tl.min(tl.where(v >= m, v, float("inf")), 1, keep_dims=True))
        found = smallest(found_)
    return tl.where(found < float("inf"), found, m)


@triton.jit
def nth(ties, room):
    """The place k L + l in a tile of the `room`-th entry of each row where `ties` is 1; beyond the tile where it has fewer."""
    K: tl.constexpr = ties.shape[1]
    L: tl.constexpr = ties.shape[2]
    index = tl.arange(0, K)[None, :, None]
    each = tl.sum(ties, 2, keep_dims=True)
    k, before, count = room * 0, room * 0, room * 0
    for i in range(K):  # a scan of few numbers along this axis stops the compiler of Triton 3.4
        count += tl.sum(tl.where(index == i, each, 0), 1, keep_dims=True)
        k, before = tl.where(count < room, i + 1, k), tl.where(count < room, count, before)
    mine = tl.sum(tl.where(index == k, ties, 0), 1, keep_dims=True)
    rank = tl.cumsum(mine, 2)
    return k * L + tl.sum((rank < room - before).to(tl.int32), 2, keep_dims=True)


@triton.jit
def cut(x, cols, tops, edge, room, at, L: tl.constexpr, TILE: tl.constexpr):
    """The class of the `room`-th score that equals the edge: ties are broken by position. `cols`: the classes of a gathered tile, which are
    in order within each L classes of the row; or None."""
    if TILE.WHOLE:
        ties = (x == edge).to(tl.int32)
        if cols is None:
            return nth(ties, room)
        else:
            first, last = 0, at.n // L  # of so many classes each
            while first < last:
                middle = (first + last) // 2
                enough = any_of(total(tl.where(cols < (middle + 1) * L, ties, 0)) >= room)
                first, last = tl.where(enough, first, middle + 1), tl.where(enough, middle, last)
            room -= total(tl.where(cols < first * L, ties, 0))
            ties = tl.where(cols // L == first, ties, 0)
            found = nth(ties, room)
            return largest(tl.where((ties > 0) & (lanes(0, ties.shape[1], ties.shape[2]) <= found), cols, -1))
    else:  # find the step, then the place in it
        live = in_packs(tops >= edge, at, TILE)
        count, before, where = room * 0, room * 0, room * 0
        for begin in range(0, at.n, TILE.K * TILE.L):
            upto = count + total((fetch(at, begin, live, TILE, True) == edge).to(tl.int32))
            here = (count < room) & (upto >= room)
            where, before = tl.where(here, begin, where), tl.where(here, count, before)
            count = upto
        v = fetch(at, as_scalar(where), live, TILE, True)
        return where + nth((v == edge).to(tl.int32), room - before)
