"""Attention forward: the threshold of each query from blocks of keys, then the output; no matrix of scores.

One dense pass keeps the maximum of each lane, whose own root bounds the threshold, and lists the blocks that reach above the bound so
far. Newton's steps and the output pass run over that list, which each pass makes shorter. Softmax needs one pass, with a running maximum.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# what is traced by Triton is no Python to a type checker

from __future__ import annotations

import triton
import triton.language as tl

from .attention_tile import constants, fall, kept, parameter, scores, seen, shares, slope_of, span


@triton.jit
def any_of(condition):
    return tl.max(condition.to(tl.int32)) > 0


@triton.jit
def row_sum(v):
    return tl.sum(v, 1, keep_dims=True)


@triton.jit
def row_max(v):
    return tl.max(v, 1, keep_dims=True)


@triton.jit
def outwards(t, begin, mid):
    """The t-th block of keys: from `mid` down to `begin`, then up from `mid`."""
    return tl.where(t < mid - begin, mid - 1 - t, begin + t)


@triton.jit
def load_block(at, first, stride, count, width, N: tl.constexpr, D: tl.constexpr):
    """Rows first .. first + N - 1 of a matrix of one head, [N, D]; zeros beyond its ends."""
    i = first + tl.arange(0, N)[:, None]
    c = tl.arange(0, D)[None, :]
    return tl.load(at + i.to(tl.int64) * stride + c, mask=(i < count) & (c < width), other=0.0)


@triton.jit
def once_more(block, at, first, stride, count, width, here, N: tl.constexpr, D: tl.constexpr):
    """What `load_block` gave before a loop. Products of fp32 take numbers from registers, too many to hold from step to step: these are
    read again in each, as `here` asks, which is always true and which the compiler cannot know before the step."""
    if block.dtype == tl.float32:
        return load_block(at, first, stride, tl.where(here, count, 0), width, N, D)
    else:
        return block


@triton.jit
def with_sink(s0, s1, extra, top, row, LINK: tl.constexpr, P: tl.constexpr):
    value, rate = shares(extra, top, row, LINK, P)
    return s0 + value.to(tl.float64), s1 + rate.to(tl.float64)


@triton.jit
def lanes_bound(lanes, extra, top, c, LINK: tl.constexpr, P: tl.constexpr, SINK: tl.constexpr):
    """z of a lower bound of the threshold: four of Newton's steps on the lane maxima, which the other keys only add to."""
    z = top.to(tl.float64) * 0.0 + 1.0  # where the maximum alone has probability 1
    for _ in range(4):
        row = constants(top, z, c, LINK, P)
        value, rate = shares(lanes, top, row, LINK, P)
        s0, s1 = row_sum(value).to(tl.float64), row_sum(rate).to(tl.float64)
        if SINK:
            s0, s1 = with_sink(s0, s1, extra, top, row, LINK, P)
        z = tl.where(c > 1.0, z, z - fall(s0, s1, c, LINK, P))
    return z


@triton.jit
def asked(PARAM, i, pl, param, count, LINK: tl.constexpr, P: tl.constexpr, PER_ROW: tl.constexpr):
    """(alpha - 1, what the probabilities are to sum to, whether there is no such map) of each row."""
    c = parameter(PARAM, i, pl, param, count, LINK, P, PER_ROW)
    mass = tl.zeros_like(c) + 1.0
    unsound = c != c
    if LINK == "budget":
        mass = c
        unsound = unsound | (c <= 0.0)
    elif LINK == "mixed" or LINK == "any":
        unsound = unsound | (c <= -1.0)
        c = tl.where(unsound, 1.0, tl.where(tl.abs(c) < 1e-7, 1e-7, c))  # alpha = 1, but for 1e-8 of p
    return c, mass, unsound


@triton.jit
def first_guess(
    lanes, extra, top, lowest, number, mass, c, alive, LINK: tl.constexpr, P: tl.constexpr, SINK: tl.constexpr
):
    """(z, low, high, width, mass, c, unfinished) that `improved` starts from."""
    if LINK == "budget":  # tau is at most the maximum, and the lowest score - 1 at least
        full = number <= mass
        high = tl.where(alive & (number > 0.0), (top.to(tl.float64) - lowest) + 2.0, 1.0)
        z = tl.where(full, high, tl.minimum(high, 1.0))
        none = tl.zeros_like(c)
        return z, none, high, high, tl.where(full, number, mass), none + 1.0, alive & (full == 0)
    else:
        z = lanes_bound(lanes, extra, top, c, LINK, P, SINK)
        return z, tl.zeros_like(c), z, z, mass, c, alive


@triton.jit
def improved(z, low, high, width, s0, s1, mass, c, alive, enough, LINK: tl.constexpr, P: tl.constexpr):
    """(z, low, high, width, unfinished) after the sums at z: Newton on the r-norm where it is convex, else within brackets."""
    excess = s0 - mass
    go = alive & (tl.abs(excess) > enough * mass)
    if LINK == "power" or LINK == "any":
        return tl.where(alive, z - fall(s0, s1, c, LINK, P), z), low, high, width, go
    else:
        high = tl.where(excess >= 0.0, tl.minimum(high, z), high)
        low = tl.where(excess <= 0.0, tl.maximum(low, z), low)
        rate = s1 if LINK == "budget" else s1 / c
        target = z - excess / tl.where(rate > 0.0, rate, 1.0)
        good = (rate > 0.0) & (target > low) & (target < high) & (2.0 * tl.abs(target - z) <= width)
        target = tl.where(good, target, 0.5 * (low + high))
        if LINK == "mixed":
            steep = c > 1.0
            go = go & ((steep == 0) | (high - low > 1e-15 * high))
            target = tl.where(steep, tl.where(go, target, z), z - fall(s0, s1, c, LINK, P))
        else:
            go = go & (high - low > 1e-15 * high)
            target = tl.where(go, target, z)
        width = tl.where(go, tl.abs(target - z), width)
        return tl.where(alive, target, z), low, high, width, go


@triton.jit
def attention_forward(Q, K, V, OUT, STATE, LISTS, COUNTS, FLAGS, BIAS_, ADD_, KEEP_, PARAM, RANGES, HEADS, SEED,
                      heads, groups, rows, keys, d, e, qb, qh, qi, kb, kh, ki_, vb, vh, vi, bb, bh_, bi, bj, ab, ah, ai, aj,
                      mb, mh, mi, mj, pb, ph, pl, offset, left, right, scale, cap, param, drop, enough,
                      LINK: tl.constexpr, P: tl.constexpr, PER_ROW: tl.constexpr, CAUSAL: tl.constexpr, LEFT: tl.constexpr,
                      RIGHT: tl.constexpr, RANGED: tl.constexpr, CAP: tl.constexpr, ALIBI: tl.constexpr, SINK: tl.constexpr,
                      BIAS: tl.constexpr, ADD: tl.constexpr, KEEP: tl.constexpr, DROP: tl.constexpr, SAVE: tl.constexpr,
                      M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, E: tl.constexpr):  # fmt: skip
    """One program: M queries of one head. STATE [., rows, 2] takes (top, z) of each; LISTS and COUNTS the blocks of keys with a
    probability, for each block of queries, and FLAGS the same as a table of bytes, where SAVE."""
    tall = tl.cdiv(rows, M)
    wide = tl.cdiv(keys, N)
    m = tall - 1 - tl.program_id(0) % tall  # under a causal mask the longest first
    head = tl.program_id(0) // tall
    b, h = head // heads, head % heads
    i0 = m * M
    i = i0 + tl.arange(0, M)[:, None]
    at_q = Q + b.to(tl.int64) * qb + h.to(tl.int64) * qh
    at_k = K + b.to(tl.int64) * kb + (h // groups).to(tl.int64) * kh
    at_v = V + b.to(tl.int64) * vb + (h // groups).to(tl.int64) * vh
    arrays = (
        BIAS_ + b.to(tl.int64) * bb + h.to(tl.int64) * bh_, bi, bj, ADD_ + b.to(tl.int64) * ab + h.to(tl.int64) * ah, ai, aj,
        KEEP_ + b.to(tl.int64) * mb + h.to(tl.int64) * mh, mi, mj,
    )  # fmt: skip
    length, count, offset = span(RANGES, b, offset, rows, keys, RANGED)
    at = (length, count, offset, left, right)
    low, high = seen(i0, at, M, CAUSAL, LEFT, RIGHT)
    begin, end = low // N, tl.cdiv(high, N)
    slope = slope_of(HEADS, h, ALIBI)
    extra = tl.full([M, 1], float("-inf"), tl.float32)
    if SINK:
        extra = tl.where(i < count, tl.load(HEADS + h * 2 + 1), float("-inf"))
    seed = 0
    if DROP:
        seed = tl.load(SEED)
    c, mass, unsound = asked(PARAM + b.to(tl.int64) * pb + h.to(tl.int64) * ph, i, pl, param, rows, LINK, P, PER_ROW)
    q = load_block(at_q, i0, qi, rows, d, M, D)
    acc = tl.zeros([M, E], tl.float32)
    if LINK == "softmax":
        top = extra
        s0 = tl.where(extra > float("-inf"), 1.0, 0.0).to(tl.float64)
        for n in range(begin, end):
            j0 = n * N
            j = j0 + tl.arange(0, N)[None, :]
            k = load_block(at_k, j0, ki_, keys, d, N, D)
            q_now = once_more(q, at_q, i0, qi, rows, d, j0 < keys, M, D)
            x, _ = scores(tl.dot(q_now, tl.trans(k), input_precision="ieee"), i, j, i0, j0, at, arrays, scale, cap, slope,
                          M, N, CAUSAL, LEFT, RIGHT, CAP, ALIBI, BIAS, ADD, KEEP)  # fmt: skip
            now = tl.maximum(top, row_max(x))
            base = tl.where(now > float("-inf"), now, 0.0)
            fade = tl.exp(top - base)
            p = tl.exp(x - base)
            s0 = s0 * fade + row_sum(p)
            if DROP:
                p = tl.where(kept(i, j, head, seed, drop), p / (1.0 - drop), 0.0)
            v = load_block(at_v, j0, vi, keys, e, N, E)
            acc = tl.dot(p.to(v.dtype), v, acc * fade, input_precision="ieee")
            top = now
        alive = top > float("-inf")
        bad = (s0 != s0) | (s0 == float("inf"))
        top = tl.where(alive, top, 0.0)
        z = tl.where(bad, float("nan"), tl.log(tl.where(s0 > 0.0, s0, 1.0)))
    else:
        mine = LISTS + (head.to(tl.int64) * tall + m) * wide
        lanes = tl.full([M, N], float("-inf"), tl.float32)
        top = extra
        bound = tl.full([M, 1], float("-inf"), tl.float32)
        # so far below the maximum, nothing is supported
        reach = tl.where(c > 0.0, 1.0 / c, float("inf")).to(tl.float32) * 1.000001
        lowest = tl.zeros([M, 1], tl.float32) + float("inf")
        number = tl.zeros([M, 1], tl.float32)
        if LINK == "budget":
            lowest = tl.where(extra > float("-inf"), extra, float("inf"))
            number = tl.where(extra > float("-inf"), 1.0, 0.0)
        live = 0
        mid = tl.minimum(tl.maximum((i0 + M - 1 + offset) // N + 1, begin), tl.maximum(end, begin))
        for t in range(end - begin):
            n = outwards(t, begin, mid)
            j0 = n * N
            j = j0 + tl.arange(0, N)[None, :]
            k = load_block(at_k, j0, ki_, keys, d, N, D)
            q_now = once_more(q, at_q, i0, qi, rows, d, j0 < keys, M, D)
            x, _ = scores(tl.dot(q_now, tl.trans(k), input_precision="ieee"), i, j, i0, j0, at, arrays, scale, cap, slope,
                          M, N, CAUSAL, LEFT, RIGHT, CAP, ALIBI, BIAS, ADD, KEEP)  # fmt: skip
            lanes = tl.maximum(lanes, x, propagate_nan=tl.PropagateNan.ALL)
            high_x = row_max(x)
            top = tl.maximum(top, high_x)
            if LINK == "budget":
                here = x > float("-inf")
                lowest = tl.minimum(lowest, tl.min(tl.where(here, x, float("inf")), 1, keep_dims=True))
                number += row_sum(tl.where(here, 1.0, 0.0))
                matters = any_of(high_x > float("-inf"))
            else:
                bound = tl.maximum(bound, top - reach)
                matters = any_of((high_x >= bound) & (high_x > float("-inf")))
                turn = t + 1
                if (turn > 1) & ((turn & (turn - 1)) == 0):  # at blocks 2, 4, 8, ... what the lanes know by now
                    safe = tl.where(top > float("-inf"), top, 0.0)
                    z = lanes_bound(lanes, extra, safe, c, LINK, P, SINK)
                    below = (safe - z / c).to(tl.float32)
                    below -= 1e-6 * (1.0 + tl.abs(below) + tl.abs(safe))
                    bound = tl.where((c > 0.0) & (c <= 1.0), tl.maximum(bound, below), bound)
            tl.store(mine + live, n, mask=matters)
            live += matters.to(tl.int32)
        bad = row_max((((lanes == lanes) & (lanes < float("inf"))) == 0).to(tl.int32)) > 0
        bad = bad | (extra != extra) | (extra == float("inf"))
        alive = (top > float("-inf")) & (bad == 0) & (unsound == 0)
        top = tl.where(alive, top, 0.0)
        lanes = tl.where(alive, lanes, float("-inf"))
        extra = tl.where(alive, extra, float("-inf"))
        number = number.to(tl.float64)
        z, floor, ceiling, width, mass, c, go = first_guess(
            lanes, extra, top, lowest, number, mass, c, alive, LINK, P, SINK
        )
        turn = 0
        while any_of(go) & (turn < 80):
            tl.debug_barrier()  # the list of the pass before is whole
            row = constants(top, z, c, LINK, P)
            s0, s1 = tl.zeros([M, 1], tl.float64), tl.zeros([M, 1], tl.float64)
            if SINK:
                s0, s1 = with_sink(s0, s1, extra, top, row, LINK, P)
            were = live
            live = 0
            for t in range(were):
                n = tl.load(mine + t).to(tl.int32)
                j0 = n * N
                j = j0 + tl.arange(0, N)[None, :]
                k = load_block(at_k, j0, ki_, keys, d, N, D)
                q_now = once_more(q, at_q, i0, qi, rows, d, j0 < keys, M, D)
                x, _ = scores(tl.dot(q_now, tl.trans(k), input_precision="ieee"), i, j, i0, j0, at, arrays, scale, cap, slope,
                              M, N, CAUSAL, LEFT, RIGHT, CAP, ALIBI, BIAS, ADD, KEEP)  # fmt: skip
                value, rate = shares(x, top, row, LINK, P)
                s0 += row_sum(value).to(tl.float64)
                s1 += row_sum(rate).to(tl.float64)
                if LINK == "power" or LINK == "any":  # thresholds only rise: what is out stays out
                    matters = any_of(value > 0.0)
                    tl.store(mine + live, n, mask=matters)
                    live += matters.to(tl.int32)
                else:
                    live += 1
            z, floor, ceiling, width, go = improved(z, floor, ceiling, width, s0, s1, mass, c, go, enough, LINK, P)
            turn += 1
        tl.debug_barrier()
        row = constants(top, z, c, LINK, P)
        s0, s1 = tl.zeros([M, 1], tl.float64), tl.zeros([M, 1], tl.float64)
        if SINK:
            s0, s1 = with_sink(s0, s1, extra, top, row, LINK, P)
        were = live
        live = 0
        for t in range(were):
            n = tl.load(mine + t).to(tl.int32)
            j0 = n * N
            j = j0 + tl.arange(0, N)[None, :]
            k = load_block(at_k, j0, ki_, keys, d, N, D)
            q_now = once_more(q, at_q, i0, qi, rows, d, j0 < keys, M, D)
            x, _ = scores(tl.dot(q_now, tl.trans(k), input_precision="ieee"), i, j, i0, j0, at, arrays, scale, cap, slope,
                          M, N, CAUSAL, LEFT, RIGHT, CAP, ALIBI, BIAS, ADD, KEEP)  # fmt: skip
            value, rate = shares(x, top, row, LINK, P)
            matters = any_of(value > 0.0)
            if matters:
                s0 += row_sum(value).to(tl.float64)
                s1 += row_sum(rate).to(tl.float64)
                if DROP:
                    value = tl.where(kept(i, j, head, seed, drop), value / (1.0 - drop), 0.0)
                v = load_block(at_v, j0, vi, keys, e, N, E)
                acc = tl.dot(value.to(v.dtype), v, acc, input_precision="ieee")
            if SAVE:
                tl.store(FLAGS + (head.to(tl.int64) * tall + m) * wide + n, matters.to(tl.int8))
                tl.store(mine + live, n, mask=matters)
            live += matters.to(tl.int32)
        # what the last step left of 1 goes back to the level, by one more step of Newton
        left_over = (s0 - mass) / tl.where(s1 > 0.0, s1, 1.0) * c
        z = tl.where(alive & (s1 > 0.0) & (c <= 1.0) & (tl.abs(s0 - mass) < 0.01), z - left_over, z)
        bad = (bad | unsound) & (i < count)
        z = tl.where(bad, float("nan"), z)
        if SAVE:
            tl.store(COUNTS + head.to(tl.int64) * tall + m, live)
    norm = tl.where(s0 > 0.0, mass / tl.where(s0 > 0.0, s0, 1.0), 0.0).to(tl.float32)
    out = tl.where(bad, float("nan"), acc * norm)
    cols = tl.arange(0, E)[None, :]
    to = OUT + (head.to(tl.int64) * rows + i) * e + cols
    tl.store(to, out.to(OUT.dtype.element_ty), mask=(i < rows) & (cols < e))
    if SAVE:
        state = STATE + (head.to(tl.int64) * rows + i) * 2
        tl.store(state, top.to(tl.float64), mask=i < rows)
        tl.store(state + 1, z, mask=i < rows)
