"""Threshold maps: sparsemax, entmax, budget, normmax. One row is searched for one number, and written from it.

The search starts on the lane maxima, whose own root is a bound of the row's and nearly exact, so that one or two steps over the row are
left. A last pass sums in fp64 at the threshold found; what is then missing from 1 goes back to first order along the rates.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# what is traced by Triton is no Python to a type checker

from __future__ import annotations

import triton
import triton.language as tl

from .links import bend, expm1, ground, steep, terms
from .policy import aimed, finish, lose, recall, remember, wanted
from .search import of_lanes, select
from .tile import fetch, gather, largest, one, place, scatter, smallest, some, survey, surveyed, total


@triton.jit
def abcd(top, z, c, r, LINK: tl.constexpr, SLOPE: tl.constexpr):
    if LINK == "any":
        return bend(top, z, c, r)
    else:
        a, b = ground(top, z, SLOPE)
        return a, b, r.to(tl.float32), b


@triton.jit
def sums(x, tops, top, z, c, r, at, LINK: tl.constexpr, P: tl.constexpr, SLOPE: tl.constexpr, MASKED: tl.constexpr, FAR: tl.constexpr,
         K: tl.constexpr, L: tl.constexpr, WHOLE: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """Sums of value and rate over the row."""
    a, b, e, d = abcd(top, z, c, r, LINK, SLOPE)
    if WHOLE:
        value, rate = terms(x, top, a, b, e, d, LINK, P)
        s0, s1 = total(value.to(DTYPE)), total(rate.to(DTYPE))
    else:
        live, _ = terms(tops, top, a, b, e, d, LINK, P)
        live = live > 0.0
        t0 = tl.zeros_like(tops).to(DTYPE)
        t1 = tl.zeros_like(tops).to(DTYPE)
        for begin in range(0, at[6], K * L):
            value, rate = terms(fetch(at, begin, live, MASKED, FAR, K, L, True), top, a, b, e, d, LINK, P)
            t0 += tl.sum(value.to(DTYPE), 1, keep_dims=True)
            t1 += tl.sum(rate.to(DTYPE), 1, keep_dims=True)
        s0, s1 = total(t0), total(t1)
    return s0.to(tl.float64), s1.to(tl.float64)


@triton.jit
def fall(s0, s1, r):
    return tl.where(
        (s0 > 0.0) & (s1 > 0.0),
        s0 * (1.0 - tl.exp(-tl.log(tl.maximum(s0, 1e-300)) / r)) / tl.where(s1 > 0.0, s1, 1.0),
        0.0,
    )


@triton.jit
def newton(x, tops, top, c, r, at, LINK: tl.constexpr, P: tl.constexpr, SLOPE: tl.constexpr, NORM: tl.constexpr,
           MASKED: tl.constexpr, FAR: tl.constexpr, K: tl.constexpr, L: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """(z, lost): u = slope (x - top) + z, and p = value - lost rate."""
    if (K > 1) | (not WHOLE):
        z = descent(tops, top, c, r, LINK, P, SLOPE)
    else:
        z = top.to(tl.float64) * 0.0 + 1.0
    # what a step leaves is its square, but where the rate jumps at the edge of the support, or nothing is given back: then to the end
    enough = 2e-6 if NORM or (LINK == "power" and P == 1) else 2e-4
    go = largest(tops) > float("-inf")
    turn = 0
    while some(go) & (turn < 50):
        s0, s1 = sums(x, tops, top, z, c, r, at, LINK, P, SLOPE, MASKED, FAR, K, L, WHOLE, tl.float32)
        z = tl.where(go, z - fall(s0, s1, r), z)
        go = go & (tl.abs(s0 - 1.0) > enough)
        turn += 1
    s0, s1 = sums(x, tops, top, z, c, r, at, LINK, P, SLOPE, MASKED, FAR, K, L, WHOLE, tl.float64)
    return z, tl.where(s1 > 0.0, (s0 - 1.0) / tl.where(s1 > 0.0, s1, 1.0), 0.0), s0, s1


@triton.jit
def bracketed(x, tops, top, k, at, MASKED: tl.constexpr, FAR: tl.constexpr, R: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
              WHOLE: tl.constexpr):  # fmt: skip
    """(anchor, z, lost) of the budget k: tau is between the ceil(k)-th largest score and one below it.

    All classes are full where the row has no more than k.
    """
    edge, few = select(x, tops, top, top, tl.ceil(k), at, "count", MASKED, FAR, R, K, L, WHOLE)
    low = edge.to(tl.float64) * 0.0
    high = low + 1.0
    z = high
    width = high
    go = (top > float("-inf")) & (few == 0)
    turn = 0
    while some(go) & (turn < 80):
        s0, s1 = sums(x, tops, edge, z, k, k, at, "budget", 1, 1.0, MASKED, FAR, K, L, WHOLE, tl.float32)
        excess = s0 - k
        high = tl.where(excess >= 0.0, tl.minimum(high, z), high)
        low = tl.where(excess <= 0.0, tl.maximum(low, z), low)
        target = z - excess / tl.where(s1 > 0.0, s1, 1.0)
        good = (s1 > 0.0) & (target >= low) & (target <= high) & (2.0 * tl.abs(target - z) <= width)
        target = tl.where(good, target, 0.5 * (low + high))
        width = tl.where(go, tl.abs(target - z), width)
        z = tl.where(go, target, z)
        go = go & (tl.abs(excess) > 1e-6 * k) & (width > 1e-9)
        turn += 1
    z = tl.where(few != 0, 1e30, z)
    s0, s1 = sums(x, tops, edge, z, k, k, at, "budget", 1, 1.0, MASKED, FAR, K, L, WHOLE, tl.float64)
    lost = tl.where((s1 > 0.0) & (few == 0), (s0 - k) / tl.where(s1 > 0.0, s1, 1.0), 0.0)
    return edge, z, lost


# -- above alpha = 2 ---------------------------------------------------------------------------------------------------------------


@triton.jit
def reach_terms(x, m, c, r):
    from_m = x - m
    u = c * from_m
    inside = from_m > 0.0
    return tl.where(inside, tl.exp2(r * tl.log2(tl.where(inside, u, 1.0))), 0.0)


@triton.jit
def reach(x, tops, m, low, c, r, at, MASKED: tl.constexpr, FAR: tl.constexpr, R: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
          WHOLE: tl.constexpr):  # fmt: skip
    """The mass that the scores above m would have with the threshold at m; the lowest of those from m on, and the highest below."""
    if WHOLE:
        return (
            total(reach_terms(x, m, c, r)),
            smallest(tl.where(x >= m, x, float("inf"))),
            largest(tl.where(x < m, x, float("-inf"))),
        )
    else:
        live = tops >= low
        mass = tl.zeros_like(tops)
        above = tl.full([R, 1, L], float("inf"), tl.float32)
        below = tl.full([R, 1, L], float("-inf"), tl.float32)
        for begin in range(0, at[6], K * L):
            v = fetch(at, begin, live, MASKED, FAR, K, L, True)
            mass += tl.sum(reach_terms(v, m, c, r), 1, keep_dims=True)
            above = tl.minimum(above, tl.min(tl.where(v >= m, v, float("inf")), 1, keep_dims=True))
            below = tl.maximum(below, tl.max(tl.where(v < m, v, float("-inf")), 1, keep_dims=True))
        return total(mass), smallest(above), largest(below)


@triton.jit
def steep_sums(x, tops, anchor, base, q, c, r, at, MASKED: tl.constexpr, FAR: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
               WHOLE: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """Sums of p, of dp/dq, and of the support."""
    if WHOLE:
        p, rate = steep(x, anchor, base, q, c, r)
        s0, s1, size = total(p.to(DTYPE)), total(rate.to(DTYPE)), total(tl.where(x >= anchor, 1.0, 0.0))
    else:
        live = tops >= anchor
        t0 = tl.zeros_like(tops).to(DTYPE)
        t1 = tl.zeros_like(tops).to(DTYPE)
        count = tl.zeros_like(tops)
        for begin in range(0, at[6], K * L):
            v = fetch(at, begin, live, MASKED, FAR, K, L, True)
            p, rate = steep(v, anchor, base, q, c, r)
            t0 += tl.sum(p.to(DTYPE), 1, keep_dims=True)
            t1 += tl.sum(rate.to(DTYPE), 1, keep_dims=True)
            count += tl.sum(tl.where(v >= anchor, 1.0, 0.0), 1, keep_dims=True)
        s0, s1, size = total(t0), total(t1), total(count)
    return s0.to(tl.float64), s1.to(tl.float64), size.to(tl.float64)


@triton.jit
def anchored(x, tops, top, c64, at, MASKED: tl.constexpr, FAR: tl.constexpr, R: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
             WHOLE: tl.constexpr):  # fmt: skip
    """(anchor, q, lost): the smallest supported score and its probability. A score is supported if those above it would not fill the row
    with the threshold there; the candidates lie within 1/c of the maximum."""
    c, r = c64.to(tl.float32), (1.0 / c64).to(tl.float32)
    anchor = tl.where(top > float("-inf"), top, 0.0)
    low = anchor - r
    next_ = anchor
    go = top > float("-inf")
    turn = 0
    while some(go) & (turn < 120):
        middle = 0.5 * low + 0.5 * next_
        m = tl.where((turn % 2 == 0) & (middle > low) & (middle < next_), middle, next_)
        mass, above, below = reach(x, tops, m, low, c, r, at, MASKED, FAR, R, K, L, WHOLE)
        inside = mass < 1.0
        anchor = tl.where(go & inside, above, anchor)
        next_ = tl.where(go & inside, below, next_)
        low = tl.where(go & (inside == 0), m, low)
        go = go & (next_ > low)
        turn += 1
    _, _, size = steep_sums(x, tops, anchor, anchor * 0.0, anchor * 0.0, c, r, at, MASKED, FAR, K, L, WHOLE, tl.float32)
    q = 1.0 / tl.maximum(size, 1.0)
    go = top > float("-inf")
    turn = 0
    while some(go) & (turn < 60):
        base = tl.exp(c64 * tl.log(tl.maximum(q, 1e-300))).to(tl.float32)
        s0, s1, _ = steep_sums(x, tops, anchor, base, q.to(tl.float32), c, r, at, MASKED, FAR, K, L, WHOLE, tl.float32)
        excess = s0 - 1.0
        moved = tl.where(s1 > 0.0, excess / tl.where(s1 > 0.0, s1, 1.0), 0.0)
        moved = tl.where(moved < 0.999 * q, moved, 0.999 * q)
        q = tl.where(go, q - moved, q)
        go = go & (tl.abs(excess) > 1e-6) & (q > 1e-30)
        turn += 1
    base = tl.exp(c64 * tl.log(tl.maximum(q, 1e-300))).to(tl.float32)
    s0, s1, _ = steep_sums(x, tops, anchor, base, q.to(tl.float32), c, r, at, MASKED, FAR, K, L, WHOLE, tl.float64)
    return anchor, q, tl.where(s1 > 0.0, (s0 - 1.0) / tl.where(s1 > 0.0, s1, 1.0), 0.0)


# -- from the number of a row to its probabilities ------------------------------------------------------------------------------------


@triton.jit
def emit(x, s0, s1, s2, s3, c64, r64, LINK: tl.constexpr, P: tl.constexpr, SLOPE: tl.constexpr):
    """p of a tile from the four numbers that `solve` found."""
    if LINK == "steep":
        anchor, q = s0.to(tl.float32), s1.to(tl.float32)
        base = tl.exp(c64 * tl.log(tl.maximum(s1, 1e-300))).to(tl.float32)
        p, rate = steep(x, anchor, base, q, c64.to(tl.float32), (1.0 / c64).to(tl.float32))
        return tl.maximum(p - s2.to(tl.float32) * rate, 0.0)
    else:
        top = s0.to(tl.float32)
        a, b, e, d = abcd(top, s1, c64, r64, LINK, SLOPE)
        value, rate = terms(x, top, a, b, e, d, LINK, P)
        norm = s3.to(tl.float32)
        return tl.where(norm > 0.0, rate * norm, tl.maximum(value - s2.to(tl.float32) * rate, 0.0))


@triton.jit
def solve(x, tops, top, param, at, LINK: tl.constexpr, P: tl.constexpr, SLOPE: tl.constexpr, NORM: tl.constexpr, MASKED: tl.constexpr,
          FAR: tl.constexpr, R: tl.constexpr, K: tl.constexpr, L: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """The four numbers of a row, fp64: (top, z, lost, 1 / sum of the rates for normmax), (edge, z, lost, 0) for a budget, or
    (anchor, q, lost, 0) above alpha = 2."""
    zero = top.to(tl.float64) * 0.0
    safe = tl.where(top > float("-inf"), top, 0.0)
    if LINK == "budget":
        edge, z, lost = bracketed(x, tops, top, param, at, MASKED, FAR, R, K, L, WHOLE)
        return edge.to(tl.float64), z, lost, zero
    elif LINK == "steep":
        anchor, q, lost = anchored(x, tops, top, param, at, MASKED, FAR, R, K, L, WHOLE)
        return anchor.to(tl.float64), q, lost, zero
    else:
        c, r = slope_and_power(param, LINK, P, NORM)
        z, lost, _, s1 = newton(x, tops, safe, c, r, at, LINK, P, SLOPE, NORM, MASKED, FAR, K, L, WHOLE)
        norm = zero
        if NORM:
            norm = tl.where(s1 > 0.0, 1.0 / tl.where(s1 > 0.0, s1, 1.0), 0.0)
        return safe.to(tl.float64), z, lost, norm


@triton.jit
def slope_and_power(param, LINK: tl.constexpr, P: tl.constexpr, NORM: tl.constexpr):
    """Of u = slope (x - tau) and u^power: entmax has alpha - 1 and 1 / (alpha - 1), normmax 1 and alpha / (alpha - 1)."""
    if NORM:
        return param * 0.0 + 1.0, (param + 1.0) / param
    else:
        c = tl.where(tl.abs(param) < 1e-7, 1e-7, param)  # alpha = 1, but for 1e-8 of p
        return c, 1.0 / c


# -- the kernel --------------------------------------------------------------------------------------------------------------------------


@triton.jit
def separable_rows(X, M, OUT, PARAMS, INDEX, SCALE, VALUE, STATE, LIST, COUNT, TOPS,
                   rows, n, span, d1, d2, x0, x1, x2, xc, m0, m1, m2, mc, o0, o1, o2, oc, param,
                   MODE: tl.constexpr, LINK: tl.constexpr, P: tl.constexpr, SLOPE: tl.constexpr, NORM: tl.constexpr,
                   PER_ROW: tl.constexpr, MASKED: tl.constexpr, SAVE: tl.constexpr, FAR: tl.constexpr,
                   FEW: tl.constexpr, DEPTH: tl.constexpr, KEEP: tl.constexpr, PARTS: tl.constexpr,
                   R: tl.constexpr, K: tl.constexpr, L: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """MODE "p": probabilities; "loss": VALUE and, if SAVE, the row's numbers; "grad": scale (p - y) from those; "tau": the threshold;
    "state": the numbers alone; "write": probabilities from those.

    FEW: a longer row is solved from so many live lanes, DEPTH classes each, where no more are live; 0: always in steps. KEEP: their number
    goes to COUNT, and the list is for the backward. PARTS > 0: `survey_parts` has been over the row.

    `param` is alpha - 1, or the budget; PER_ROW: one a row, in PARAMS, of either side of alpha = 2.
    """
    row = tl.program_id(0) * R + tl.arange(0, R)[:, None, None]
    valid = row < rows
    at = (X, place(row, d1, d2, x0, x1, x2), xc, M, place(row, d1, d2, m0, m1, m2), mc, n, valid)
    if PER_ROW:
        par = tl.load(PARAMS + row, mask=valid, other=1.0)
    else:
        par = tl.zeros([R, 1, 1], tl.float64) + param
    sound = par == par
    if PER_ROW and not NORM and LINK != "budget":
        sound = par > -1.0
        par = tl.where(sound, par, 1.0)
    over = some(par > 1.0)  # PER_ROW has one row a program
    first = tl.program_id(1) * span
    if MODE == "grad" or MODE == "write":
        x = fetch(at, 0, True, MASKED, FAR, K, L, False) if WHOLE else tl.zeros([R, 1, L], tl.float32)
        s0, s1, s2, s3, bad = recall(STATE, row, valid)
        tops = x
        if MODE == "write":
            tops = tl.load(TOPS + (row.to(tl.int64) * PARTS + tl.program_id(1)) * L + tl.arange(0, L)[None, None, :])
        empty = tl.zeros([R, 1, 1], tl.int1)
        small = False
    else:
        if PARTS > 0:
            cells, tops, top, bad = surveyed(TOPS, row, PARTS, L)
            x = tops
        else:
            x, tops, top, bad = survey(at, MASKED, FAR, R, K, L, WHOLE)
            cells = tops
        bad = bad | (sound == 0)
        empty = top == float("-inf")
        if PER_ROW and LINK == "any":
            if over:
                s0, s1, s2, s3 = solve(x, tops, top, par, at, "steep", P, SLOPE, NORM, MASKED, FAR, R, K, L, WHOLE)
            else:
                s0, s1, s2, s3 = solve(x, tops, top, par, at, LINK, P, SLOPE, NORM, MASKED, FAR, R, K, L, WHOLE)
        elif FEW > 0:
            LIVE: tl.constexpr = L * PARTS if PARTS > 0 else L
            live = matters(cells, top, par, LINK, P, SLOPE, NORM, R, LIVE)
            tile, cols, count = gather(at, live, LIST, span, FEW, DEPTH, MASKED, FAR, L, LIVE)
            small = count <= FEW
            if KEEP:
                tl.store(COUNT + tl.program_id(0), count + some(bad) * (FEW + 1))  # all of a poisoned row
            if small:
                best = tl.max(tile, 1, keep_dims=True)
                s0, s1, s2, s3 = solve(tile, best, top, par, at, LINK, P, SLOPE, NORM, MASKED, FAR, R, DEPTH, FEW, True)
            else:
                s0, s1, s2, s3 = solve(x, tops, top, par, at, LINK, P, SLOPE, NORM, MASKED, FAR, R, K, L, WHOLE)
        else:
            s0, s1, s2, s3 = solve(x, tops, top, par, at, LINK, P, SLOPE, NORM, MASKED, FAR, R, K, L, WHOLE)
    c, r = slope_and_power(par, LINK, P, NORM)
    if MODE == "p" or MODE == "grad" or MODE == "write":
        oo = place(row, d1, d2, o0, o1, o2)
        t, scale = wanted(INDEX, SCALE, row, valid, MODE)
        if WHOLE:
            p = shares(x, s0, s1, s2, s3, c, r, over, LINK, P, SLOPE, PER_ROW)
            finish(OUT, oo, oc, 0, p, t, scale, bad, n, valid, MODE, FAR, K, L)
        elif FEW > 0 and MODE == "p":
            if small:  # zeros, and over them what is not
                nothing = tl.zeros([R, K, L], tl.float32)
                for begin in range(0, n, K * L):
                    finish(OUT, oo, oc, begin, nothing, t, scale, bad, n, valid, MODE, FAR, K, L)
                p = emit(tile, one(s0), one(s1), one(s2), one(s3), one(c), one(r), LINK, P, SLOPE)
                scatter(OUT, oo, oc, cols, p, (p > 0.0) & (bad == 0), n, valid, FAR)
            else:
                in_steps(OUT, oo, oc, first, span, tops, s0, s1, s2, s3, c, r, over, t, scale, bad, at,
                         MODE, LINK, P, SLOPE, PER_ROW, MASKED, FAR, R, K, L)  # fmt: skip
        else:
            in_steps(OUT, oo, oc, first, span, tops, s0, s1, s2, s3, c, r, over, t, scale, bad, at,
                     MODE, LINK, P, SLOPE, PER_ROW, MASKED, FAR, R, K, L)  # fmt: skip
    if MODE == "loss":
        t = tl.load(INDEX + row, mask=valid, other=-1)
        aim = aimed(at, t, MASKED)
        gap = top.to(tl.float64) - aim.to(tl.float64)
        if NORM:  # tau is the potential
            value = gap + (1.0 - (s1 - s2 / r))
        else:
            if WHOLE:
                p = shares(x, s0, s1, s2, s3, c, r, over, LINK, P, SLOPE, PER_ROW)
                value = gap + total(loss_terms(x, top, p, par.to(tl.float32)).to(tl.float64))
            elif FEW > 0:
                if small:
                    p = emit(tile, one(s0), one(s1), one(s2), one(s3), one(c), one(r), LINK, P, SLOPE)
                    value = gap + tl.sum(loss_terms(tile, one(top), p, one(par).to(tl.float32)).to(tl.float64))
                else:
                    value = gap + loss_in_steps(tops, top, s0, s1, s2, s3, c, r, over, par, at,
                                                LINK, P, SLOPE, PER_ROW, MASKED, FAR, R, K, L)  # fmt: skip
            else:
                value = gap + loss_in_steps(tops, top, s0, s1, s2, s3, c, r, over, par, at,
                                            LINK, P, SLOPE, PER_ROW, MASKED, FAR, R, K, L)  # fmt: skip
        lose(VALUE, row, tl.maximum(value, 0.0), aim, t, bad, at)
    if SAVE and (MODE == "loss" or MODE == "state"):
        remember(STATE, row, valid, bad, s0, s1, s2, s3)
    if MODE == "tau":
        if LINK == "steep":
            tau = s0 - tl.exp(par * tl.log(tl.maximum(s1, 1e-300))) / par
        else:
            tau = s0 - (s1 - s2 / r) / c if LINK != "budget" else s0 - (s1 - s2)
        tau = tl.where(bad, float("nan"), tl.where(empty, float("-inf"), tau))
        tl.store(VALUE + row, tau.to(tl.float32), mask=valid)


@triton.jit
def shares(
    x, s0, s1, s2, s3, c, r, over, LINK: tl.constexpr, P: tl.constexpr, SLOPE: tl.constexpr, PER_ROW: tl.constexpr
):
    """p; with one alpha a row, by the form of its side of 2."""
    if PER_ROW and LINK == "any":
        if over:
            p = emit(x, s0, s1, s2, s3, c, r, "steep", P, SLOPE)
        else:
            p = emit(x, s0, s1, s2, s3, c, r, LINK, P, SLOPE)
        return p
    else:
        return emit(x, s0, s1, s2, s3, c, r, LINK, P, SLOPE)


@triton.jit
def in_steps(OUT, oo, oc, first, span, tops, s0, s1, s2, s3, c, r, over, t, scale, bad, at, MODE: tl.constexpr, LINK: tl.constexpr,
             P: tl.constexpr, SLOPE: tl.constexpr, PER_ROW: tl.constexpr, MASKED: tl.constexpr, FAR: tl.constexpr, R: tl.constexpr,
             K: tl.constexpr, L: tl.constexpr):  # fmt: skip
    """Writes a longer row, or a part of it; a lane that has no probability is not read again."""
    n, valid = at[6], at[7]
    live = tl.full([R, 1, L], 1, tl.int1)
    if MODE != "grad":
        live = shares(tops, s0, s1, s2, s3, c, r, over, LINK, P, SLOPE, PER_ROW) > 0.0
    for begin in range(first, tl.minimum(first + span, n), K * L):
        v = fetch(at, begin, live, MASKED, FAR, K, L, False)
        p = shares(v, s0, s1, s2, s3, c, r, over, LINK, P, SLOPE, PER_ROW)
        finish(OUT, oo, oc, begin, p, t, scale, bad, n, valid, MODE, FAR, K, L)


@triton.jit
def loss_in_steps(tops, top, s0, s1, s2, s3, c, r, over, par, at, LINK: tl.constexpr, P: tl.constexpr, SLOPE: tl.constexpr,
                  PER_ROW: tl.constexpr, MASKED: tl.constexpr, FAR: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
                  L: tl.constexpr):  # fmt: skip
    """The sum of `loss_terms` over a longer row."""
    live = shares(tops, s0, s1, s2, s3, c, r, over, LINK, P, SLOPE, PER_ROW) > 0.0
    acc = tl.zeros([R, 1, L], tl.float64)
    for begin in range(0, at[6], K * L):
        v = fetch(at, begin, live, MASKED, FAR, K, L, False)
        p = shares(v, s0, s1, s2, s3, c, r, over, LINK, P, SLOPE, PER_ROW)
        acc += tl.sum(loss_terms(v, top, p, par.to(tl.float32)).to(tl.float64), 1, keep_dims=True)
    return total(acc)


@triton.jit
def matters(tops, top, param, LINK: tl.constexpr, P: tl.constexpr, SLOPE: tl.constexpr, NORM: tl.constexpr, R: tl.constexpr,
            L: tl.constexpr):  # fmt: skip
    """The lanes that may have some of the support, by a bound of the threshold from the lane maxima."""
    anchor = tl.where(top > float("-inf"), top, 0.0)
    if LINK == "budget":  # tau is at most 1 below the ceil(k)-th largest score
        live = tops > of_lanes(tops, top, tl.ceil(param), R, L) - 1.0
    elif LINK == "steep":
        live = tops >= anchor - (1.0 / param).to(tl.float32)
    else:
        c, r = slope_and_power(param, LINK, P, NORM)
        z = descent(tops, anchor, c, r, LINK, P, SLOPE)
        a, b, e, d = abcd(anchor, z, c, r, LINK, SLOPE)
        value, _ = terms(tops, anchor, a, b, e, d, LINK, P)
        live = value > 0.0
    return live & (tops > float("-inf"))


@triton.jit
def descent(tops, top, c, r, LINK: tl.constexpr, P: tl.constexpr, SLOPE: tl.constexpr):
    """Four of Newton's steps on the lane maxima, which the whole row only adds to: a z that is not below the row's."""
    z = top.to(tl.float64) * 0.0 + 1.0  # where the maximum alone has probability 1
    for _ in range(4):
        a, b, e, d = abcd(top, z, c, r, LINK, SLOPE)
        value, rate = terms(tops, top, a, b, e, d, LINK, P)
        z -= fall(total(value).to(tl.float64), total(rate).to(tl.float64), r)
    return z


@triton.jit
def loss_terms(x, top, p, c):
    """`p (x - top) + p (1 - p^c) / (c alpha)`, whose sum, with max(x) - x_t, is the loss of class t: no large numbers cancel."""
    inside = p > 0.0
    log_p = tl.log(tl.where(inside, p, 1.0))
    y = tl.where(inside, x - top, 0.0)
    c = tl.where(tl.abs(c) < 1e-7, 1e-7, c)
    bent = tl.where(c > 0.0, expm1(tl.where(c > 0.0, c, 0.0) * log_p), tl.exp(c * log_p) - 1.0)
    return tl.where(inside, p * (y - bent / (c * (c + 1.0))), 0.0)
