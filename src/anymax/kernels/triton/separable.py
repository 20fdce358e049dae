"""Threshold maps: sparsemax, entmax, budget, normmax. One row is searched for one number, and written from it.

All in fp32. The search starts on the lane maxima, whose own root is a bound of the row's and nearly exact, so that one or two steps over
the row are left. For fp32 results (EXACT) a last pass sums in fp64 at the number found; what is missing from 1 goes back to first order
along the rates. For half-precision results the last step of the search is as good.

A row is written from four numbers: (top, z or q, lost, 1 / sum of the rates for normmax), (edge, z, lost, 0) for a budget, (near, rest, lost,
1 / sum of the rates) for normmax above alpha = 2, and (anchor, q, lost, 0) above alpha = 2. See `links` for what they mean.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# what is traced by Triton is no Python to a type checker

from __future__ import annotations

import triton
import triton.language as tl

from .links import bent, expm1, ground, log1p, share_of, steep
from .policy import aimed, class_of, finish, lose, recall, remember, wanted
from .search import kth
from .tile import apart, fetch, gather, largest, one, place, scatter, smallest, some, survey, surveyed, total, wide


@triton.jit
def fitted(top, b, c, r, LINK: tl.constexpr):
    """k of `share_of` from b: the slope over the r-th root of q."""
    if LINK == "any":
        return c * tl.exp2(-tl.log2(b) / r)
    else:
        return b


@triton.jit
def sums(x, tops, a, b, k, r, at, LINK: tl.constexpr, P: tl.constexpr, SLOPE: tl.constexpr, MASKED: tl.constexpr, FAR: tl.constexpr,
         K: tl.constexpr, L: tl.constexpr, WHOLE: tl.constexpr, FINE: tl.constexpr):  # fmt: skip
    """Sums of value and rate over the row, in fp32 or (FINE) in fp64."""
    if WHOLE:
        value, rate = share_of(x, a, b, k, r, LINK, P, SLOPE, FINE)
        if FINE:
            s0, s1 = wide(value), wide(rate)
        else:
            s0, s1 = total(value), total(rate)
    else:
        live, _ = share_of(tops, a, b, k, r, LINK, P, SLOPE, FINE)
        live = live > 0.0
        t0 = tl.zeros_like(tops)
        t1 = tl.zeros_like(tops)
        if FINE:
            t0, t1 = t0.to(tl.float64), t1.to(tl.float64)
        for begin in range(0, at[6], K * L):
            value, rate = share_of(
                fetch(at, begin, live, MASKED, FAR, K, L, True), a, b, k, r, LINK, P, SLOPE, FINE
            )
            t0 += tl.sum(value, 1, keep_dims=True).to(t0.dtype)
            t1 += tl.sum(rate, 1, keep_dims=True).to(t1.dtype)
        s0, s1 = total(t0), total(t1)
    return s0, s1


@triton.jit
def over(a, b):
    """a / b, 0 where b is not positive."""
    return tl.where(b > 0.0, a / tl.where(b > 0.0, b, 1.0), 0.0)


@triton.jit
def moved(b, s0, s1, r, LINK: tl.constexpr, P: tl.constexpr):
    """A step of Newton on the r-norm of u, which is convex: from a b that is too large (a threshold too low) it never overshoots."""
    by = over(bent(s0, r, LINK, P), s1)
    if LINK == "any":
        return b * tl.exp(r * log1p(-tl.minimum(by, 0.999)))
    else:
        return b - by


@triton.jit
def descent(tops, a, top, c, r, LINK: tl.constexpr, P: tl.constexpr, SLOPE: tl.constexpr):
    """Four steps on the lane maxima, which the whole row only adds to: a b that is not below the row's."""
    b = top * 0.0 + 1.0  # where the maximum alone has probability 1
    for _ in range(4):
        value, rate = share_of(tops, a, b, fitted(top, b, c, r, LINK), r, LINK, P, SLOPE, False)
        b = moved(b, total(value), total(rate), r, LINK, P)
    return b


@triton.jit
def newton(x, tops, a, top, go, c, r, at, LINK: tl.constexpr, P: tl.constexpr, SLOPE: tl.constexpr, EXACT: tl.constexpr,
           MASKED: tl.constexpr, FAR: tl.constexpr, K: tl.constexpr, L: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """(b, lost, sum of the rates): p = value - lost rate. `a` is the maximum, or 0 where it has been subtracted from the scores.

    What a step leaves is its square, but where the rate jumps at the edge of the support: then the search goes on to the end.
    """
    if (K > 1) | (not WHOLE):
        b = descent(tops, a, top, c, r, LINK, P, SLOPE)
    else:
        b = top * 0.0 + 1.0
    if EXACT:
        enough = 2e-6 if LINK == "power" and P == 1 else 2e-4
    else:
        enough = 5e-4 if LINK == "power" and P == 1 else 1e-2
    turn = 0
    while some(go) & (turn < 50):
        s0, s1 = sums(
            x, tops, a, b, fitted(top, b, c, r, LINK), r, at, LINK, P, SLOPE, MASKED, FAR, K, L, WHOLE, False
        )
        b = tl.where(go, moved(b, s0, s1, r, LINK, P), b)
        go = go & (tl.abs(s0 - 1.0) > enough)
        turn += 1
    lost, norm = top * 0.0, top * 0.0
    if EXACT:
        s0, s1 = sums(
            x, tops, a, b, fitted(top, b, c, r, LINK), r, at, LINK, P, SLOPE, MASKED, FAR, K, L, WHOLE, True
        )
        norm = s1.to(tl.float32)
        lost = over((s0 - 1.0).to(tl.float32), norm)
    return b, lost, norm


@triton.jit
def edged(x, tops, top, live, r, at, MASKED: tl.constexpr, FAR: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
          WHOLE: tl.constexpr):  # fmt: skip
    """(near, rest, lost, sum of the rates) for normmax above alpha = 2, infinitely steep at the edge: tau in two fp32 numbers."""
    z = top.to(tl.float64) * 0.0 + 1.0
    go = live
    turn = 0
    while some(go) & (turn < 50):
        near, rest = ground(top, z, 1.0)
        s0, s1 = sums(x, tops, near, rest, rest, r, at, "edge", 1, 1.0, MASKED, FAR, K, L, WHOLE, False)
        z = tl.where(go, z - over(bent(s0, r, "edge", 1), s1).to(tl.float64), z)
        go = go & (tl.abs(s0 - 1.0) > 2e-6)
        turn += 1
    near, rest = ground(top, z, 1.0)
    s0, s1 = sums(x, tops, near, rest, rest, r, at, "edge", 1, 1.0, MASKED, FAR, K, L, WHOLE, True)
    norm = s1.to(tl.float32)
    return near, rest, over((s0 - 1.0).to(tl.float32), norm), norm


@triton.jit
def bracketed(x, tops, top, live, k, at, MASKED: tl.constexpr, FAR: tl.constexpr, R: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
              WHOLE: tl.constexpr):  # fmt: skip
    """(edge, z, lost) of the budget k: tau is between the ceil(k)-th largest score and one below it.

    All classes are full where the row has no more than k.
    """
    edge, few = kth(x, tops, top, live, tl.ceil(k), at, MASKED, FAR, R, K, L, WHOLE)
    low = edge * 0.0
    high = low + 1.0
    z = high
    width = high
    go = live & (few == 0)
    turn = 0
    while some(go) & (turn < 80):
        s0, s1 = sums(x, tops, edge, z, z, k, at, "budget", 1, 1.0, MASKED, FAR, K, L, WHOLE, False)
        excess = s0 - k
        high = tl.where(excess >= 0.0, tl.minimum(high, z), high)
        low = tl.where(excess <= 0.0, tl.maximum(low, z), low)
        target = z - over(excess, s1)
        good = (s1 > 0.0) & (target >= low) & (target <= high) & (2.0 * tl.abs(target - z) <= width)
        target = tl.where(good, target, 0.5 * (low + high))
        width = tl.where(go, tl.abs(target - z), width)
        z = tl.where(go, target, z)
        go = go & (tl.abs(excess) > 1e-6 * k) & (width > 3e-8)
        turn += 1
    z = tl.where(few, 1e30, z)
    s0, s1 = sums(x, tops, edge, z, z, k, at, "budget", 1, 1.0, MASKED, FAR, K, L, WHOLE, True)
    lost = over((s0 - k.to(tl.float64)).to(tl.float32), s1.to(tl.float32))
    return edge, z, tl.where(few, 0.0, lost)


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
               WHOLE: tl.constexpr, FINE: tl.constexpr):  # fmt: skip
    """Sums of p, of dp/dq, and of the support."""
    if WHOLE:
        p, rate = steep(x, anchor, base, q, c, r)
        size = total(tl.where(x >= anchor, 1.0, 0.0))
        if FINE:
            s0, s1 = wide(p), wide(rate)
        else:
            s0, s1 = total(p), total(rate)
    else:
        live = tops >= anchor
        t0 = tl.zeros_like(tops)
        t1 = tl.zeros_like(tops)
        count = tl.zeros_like(tops)
        if FINE:
            t0, t1 = t0.to(tl.float64), t1.to(tl.float64)
        for begin in range(0, at[6], K * L):
            v = fetch(at, begin, live, MASKED, FAR, K, L, True)
            p, rate = steep(v, anchor, base, q, c, r)
            t0 += tl.sum(p, 1, keep_dims=True).to(t0.dtype)
            t1 += tl.sum(rate, 1, keep_dims=True).to(t1.dtype)
            count += tl.sum(tl.where(v >= anchor, 1.0, 0.0), 1, keep_dims=True)
        s0, s1, size = total(t0), total(t1), total(count)
    return s0, s1, size


@triton.jit
def raised(q, c):
    """q^c, 0 for 0."""
    return tl.exp2(c * tl.log2(tl.maximum(q, 1.2e-38)))


@triton.jit
def anchored(x, tops, top, live, c, at, MASKED: tl.constexpr, FAR: tl.constexpr, R: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
             WHOLE: tl.constexpr):  # fmt: skip
    """(anchor, q, lost): the smallest supported score and its probability. A score is supported if those above it would not fill the row
    with the threshold there; the candidates lie within 1/c of the maximum."""
    r = 1.0 / c
    anchor = top
    low = anchor - r
    next_ = anchor
    go = live
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
    _, _, size = steep_sums(x, tops, anchor, anchor * 0.0, anchor * 0.0, c, r, at, MASKED, FAR, K, L, WHOLE, False)
    q = 1.0 / tl.maximum(size, 1.0)
    go = live
    turn = 0
    while some(go) & (turn < 60):
        s0, s1, _ = steep_sums(x, tops, anchor, raised(q, c), q, c, r, at, MASKED, FAR, K, L, WHOLE, False)
        excess = s0 - 1.0
        q = tl.where(go, q - tl.minimum(over(excess, s1), 0.999 * q), q)
        go = go & (tl.abs(excess) > 1e-6) & (q > 1e-30)
        turn += 1
    s0, s1, _ = steep_sums(x, tops, anchor, raised(q, c), q, c, r, at, MASKED, FAR, K, L, WHOLE, True)
    return anchor, q, over((s0 - 1.0).to(tl.float32), s1.to(tl.float32))


# -- from the numbers of a row to its probabilities -----------------------------------------------------------------------------------


@triton.jit
def emit(x, a, s0, s1, s2, s3, c, r, LINK: tl.constexpr, P: tl.constexpr, SLOPE: tl.constexpr, NORM: tl.constexpr,
         EXACT: tl.constexpr):  # fmt: skip
    """p of a tile from the four numbers of its rows; `a` is s0, or 0 where it has been subtracted from the scores."""
    if LINK == "steep":
        p, rate = steep(x, a, raised(s1, c), s1, c, 1.0 / c)
    else:
        p, rate = share_of(x, a, s1, fitted(s0, s1, c, r, LINK), r, LINK, P, SLOPE, EXACT)
    if NORM:
        return rate * s3
    elif EXACT:
        return tl.maximum(p - s2 * rate, 0.0)
    else:
        return p


@triton.jit
def solve(x, tops, a, top, live, param, at, LINK: tl.constexpr, P: tl.constexpr, SLOPE: tl.constexpr, NORM: tl.constexpr,
          EXACT: tl.constexpr, MASKED: tl.constexpr, FAR: tl.constexpr, R: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
          WHOLE: tl.constexpr):  # fmt: skip
    """The four numbers of a row. `live`: rows that are to be solved."""
    c, r = slope_and_power(param, LINK, P, NORM)
    if LINK == "budget":
        s0, s1, s2 = bracketed(x, tops, top, live, param, at, MASKED, FAR, R, K, L, WHOLE)
        s3 = s2 * 0.0
    elif LINK == "steep":
        s0, s1, s2 = anchored(x, tops, top, live, param, at, MASKED, FAR, R, K, L, WHOLE)
        s3 = s2 * 0.0
    elif LINK == "edge":
        s0, s1, s2, norm = edged(x, tops, top, live, r, at, MASKED, FAR, K, L, WHOLE)
        s3 = over(1.0, norm)
    else:
        s0 = top
        s1, s2, norm = newton(
            x, tops, a, top, live, c, r, at, LINK, P, SLOPE, EXACT | NORM, MASKED, FAR, K, L, WHOLE
        )
        s3 = over(1.0, norm)
    return s0, s1, s2, s3


@triton.jit
def slope_and_power(param, LINK: tl.constexpr, P: tl.constexpr, NORM: tl.constexpr):
    """Of u = slope (x - tau) and u^power: entmax has alpha - 1 and 1 / (alpha - 1), normmax 1 and alpha / (alpha - 1)."""
    if NORM:
        return param * 0.0 + 1.0, (param + 1.0) / param
    else:
        c = tl.where(tl.abs(param) < 1e-7, 1e-7, param)  # alpha = 1, but for 1e-8 of p
        return c, 1.0 / c


@triton.jit
def height(top, s0, s1, s2, c, r, LINK: tl.constexpr, NORM: tl.constexpr):
    """How far the maximum is above tau."""
    if LINK == "edge":
        return (top - s0) + (s1 - s2 / r)
    elif LINK == "budget":
        return (top - s0) + (s1 - s2)
    elif LINK == "steep":
        return (top - s0) + raised(s1, c) / c
    elif LINK == "any":
        z = tl.exp2(tl.log2(s1 * (1.0 - s2)) / r)
        return z if NORM else z / c
    else:
        z = s1 - s2 / r
        return z if NORM else z / c


@triton.jit
def potential(top, s0, s1, s2, c, r, dot, LINK: tl.constexpr, NORM: tl.constexpr):
    """What Omega* is above the maximum, from dot = sum p (x - top): `(1 - 1/alpha) dot + zeta / alpha`, where p_top = (1 - c zeta)^(1/c).
    No large numbers cancel."""
    if NORM:  # tau is the potential
        return 1.0 - height(top, s0, s1, s2, c, r, LINK, NORM)
    else:
        if LINK == "any":
            zeta = -expm1(c * log1p((s1 - 1.0) - s1 * s2)) / c
        elif LINK == "steep":
            zeta = (1.0 - (raised(s1, c) + c * (top - s0))) / c
        else:
            zeta = ((1.0 - s1) + s2 / r) / c
        return (c * dot + zeta) / (1.0 + c)


# -- the kernel --------------------------------------------------------------------------------------------------------------------------


@triton.jit
def separable_rows(X, M, OUT, PARAMS, INDEX, SCALE, VALUE, STATE, LIST, COUNT, TOPS,
                   rows, n, span, d1, d2, x0, x1, x2, xc, m0, m1, m2, mc, o0, o1, o2, oc, ignore, param,
                   MODE: tl.constexpr, LINK: tl.constexpr, P: tl.constexpr, SLOPE: tl.constexpr, NORM: tl.constexpr,
                   PER_ROW: tl.constexpr, EXACT: tl.constexpr, MASKED: tl.constexpr, SAVE: tl.constexpr, EACH: tl.constexpr, FAR: tl.constexpr,
                   FEW: tl.constexpr, DEPTH: tl.constexpr, KEEP: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr,
                   R: tl.constexpr, K: tl.constexpr, L: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """MODE "p": probabilities, and "loss": VALUE, both with the row's numbers if SAVE; "grad": scale (p - y) from those; "tau": the
    threshold; "write": probabilities of what has not been written by "p", from the numbers.

    EXACT: to fp32's last digits. FEW: a longer row is solved from so many live lanes, DEPTH classes each, where no more are live; 0: always
    in steps. KEEP: their number goes to COUNT, and the list is for the backward. PARTS > 0: `survey_parts` has been over the row, and "p"
    writes it where the lanes were few.

    `param` is alpha - 1, or the budget; PER_ROW: one a row, in PARAMS, of either side of alpha = 2. UNIT: see `place`.
    """
    n = n * UNIT
    row = tl.program_id(0) * R + tl.arange(0, R)[:, None, None]
    valid = row < rows
    at = (X, place(row, d1, d2, x0, x1, x2, UNIT), xc, M, place(row, d1, d2, m0, m1, m2, UNIT), mc, n, valid)
    if PER_ROW:
        par = tl.load(PARAMS + row, mask=valid, other=1.0)
    else:
        par = tl.zeros([R, 1, 1], tl.float32) + param
    sound = par == par
    if PER_ROW and not NORM and LINK != "budget":
        sound = par > -1.0
        par = tl.where(sound, par, 1.0)
    high = some(par > 1.0)  # PER_ROW has one row a program
    first = tl.program_id(1) * span
    CENTRED: tl.constexpr = WHOLE and not PER_ROW and (LINK == "power" or LINK == "any")
    if MODE == "grad" or MODE == "write":
        x = fetch(at, 0, True, MASKED, FAR, K, L, False) if WHOLE else tl.zeros([R, 1, L], tl.float32)
        s0, s1, s2, s3, bad = recall(STATE, row, valid)
        top, tops, a = s0, x, s0
        if MODE == "write":
            tops = tl.load(TOPS + (row.to(tl.int64) * PARTS + tl.program_id(1)) * L + tl.arange(0, L)[None, None, :])
        small = False
    else:
        if PARTS > 0:
            cells, tops, top, bad = surveyed(TOPS, row, PARTS, L)
            x = tops
        else:
            ot = (OUT, place(row, d1, d2, o0, o1, o2, UNIT), oc)
            FILL: tl.constexpr = 0.0 if FEW > 0 and MODE == "p" else None
            x, tops, top, bad = survey(at, ot, FILL, MASKED, FAR, R, K, L, WHOLE)
            cells = tops
        bad = bad | (sound == 0)
        empty = top == float("-inf")
        live = (bad == 0) & (empty == 0)
        top = tl.where(empty, 0.0, top)
        a = top
        if CENTRED:
            x -= top
            tops -= top
            a = 0.0
        if PER_ROW and LINK == "any":
            if high:
                s0, s1, s2, s3 = solve(
                    x, tops, a, top, live, par, at, "steep", P, SLOPE, NORM, EXACT, MASKED, FAR, R, K, L, WHOLE
                )
            else:
                s0, s1, s2, s3 = solve(
                    x, tops, a, top, live, par, at, LINK, P, SLOPE, NORM, EXACT, MASKED, FAR, R, K, L, WHOLE
                )
        elif FEW > 0:
            LIVE: tl.constexpr = L * PARTS if PARTS > 0 else L
            wanted_ = matters(cells, top, live, par, at, LINK, P, SLOPE, NORM, MASKED, FAR, R, LIVE)
            tile, cols, count = gather(at, wanted_, LIST, span, FEW, DEPTH, MASKED, FAR, L, LIVE)
            count += some(bad) * (FEW + 1)  # all lanes of a poisoned row
            small = count <= FEW
            if KEEP or PARTS > 0:
                tl.store(COUNT + tl.program_id(0), count)
            if small:
                best = tl.max(tile, 1, keep_dims=True)
                peak, sane, asked = apart(top), apart(live.to(tl.int32)) > 0, apart(par)
                s0, s1, s2, s3 = solve(
                    tile, best, peak, peak, sane, asked, at, LINK, P, SLOPE, NORM, EXACT, MASKED, FAR, R, DEPTH, FEW, True
                )
                s0, s1, s2, s3 = apart(s0), apart(s1), apart(s2), apart(s3)
            else:
                s0, s1, s2, s3 = solve(
                    x, tops, a, top, live, par, at, LINK, P, SLOPE, NORM, EXACT, MASKED, FAR, R, K, L, WHOLE
                )
        else:
            s0, s1, s2, s3 = solve(
                x, tops, a, top, live, par, at, LINK, P, SLOPE, NORM, EXACT, MASKED, FAR, R, K, L, WHOLE
            )
        if CENTRED == 0:
            a = s0
    c, r = slope_and_power(par, LINK, P, NORM)
    if MODE == "p" or MODE == "grad" or MODE == "write":
        oo = place(row, d1, d2, o0, o1, o2, UNIT)
        t, scale = wanted(INDEX, SCALE, row, ignore, at, bad, MODE, EACH)
        if WHOLE:
            p = shares(x, a, s0, s1, s2, s3, c, r, high, LINK, P, SLOPE, NORM, EXACT, PER_ROW)
            finish(OUT, oo, oc, 0, p, t, scale, bad, n, valid, MODE, FAR, K, L)
        elif FEW > 0 and MODE == "p":
            if small:  # over the zeros
                p = emit(tile, one(s0), one(s0), one(s1), one(s2), one(s3), one(c), one(r), LINK, P, SLOPE, NORM, EXACT)
                scatter(OUT, oo, oc, cols, p, p > 0.0, n, valid, FAR)
            elif PARTS == 0:
                in_steps(OUT, oo, oc, first, span, tops, s0, s1, s2, s3, c, r, high, t, scale, bad, at,
                         MODE, LINK, P, SLOPE, NORM, EXACT, PER_ROW, MASKED, FAR, R, K, L)  # fmt: skip
        elif MODE == "write" and FEW > 0:
            if tl.load(COUNT + tl.program_id(0)) > FEW:  # else it is written
                in_steps(OUT, oo, oc, first, span, tops, s0, s1, s2, s3, c, r, high, t, scale, bad, at,
                         MODE, LINK, P, SLOPE, NORM, EXACT, PER_ROW, MASKED, FAR, R, K, L)  # fmt: skip
        elif MODE == "write" or PARTS == 0:
            in_steps(OUT, oo, oc, first, span, tops, s0, s1, s2, s3, c, r, high, t, scale, bad, at,
                     MODE, LINK, P, SLOPE, NORM, EXACT, PER_ROW, MASKED, FAR, R, K, L)  # fmt: skip
    if MODE == "loss":
        t = class_of(INDEX, row, ignore, at)
        aim = aimed(at, t, MASKED)
        dot = top * 0.0
        if not NORM:
            origin = 0.0 if CENTRED else top
            if WHOLE:
                p = shares(x, a, s0, s1, s2, s3, c, r, high, LINK, P, SLOPE, NORM, EXACT, PER_ROW)
                dot = wide(tl.where(p > 0.0, p * (x - origin), 0.0)).to(tl.float32)
            elif FEW > 0:
                if small:
                    p = emit(tile, one(s0), one(s0), one(s1), one(s2), one(s3), one(c), one(r), LINK, P, SLOPE, NORM, EXACT)
                    dot = wide(tl.where(p > 0.0, p * (tile - one(top)), 0.0)).to(tl.float32)
                else:
                    dot = dot_in_steps(tops, top, s0, s1, s2, s3, c, r, high, at,
                                       LINK, P, SLOPE, NORM, EXACT, PER_ROW, MASKED, FAR, R, K, L)  # fmt: skip
            else:
                dot = dot_in_steps(tops, top, s0, s1, s2, s3, c, r, high, at,
                                   LINK, P, SLOPE, NORM, EXACT, PER_ROW, MASKED, FAR, R, K, L)  # fmt: skip
        if PER_ROW and LINK == "any":
            if high:
                above = potential(top, s0, s1, s2, c, r, dot, "steep", NORM)
            else:
                above = potential(top, s0, s1, s2, c, r, dot, LINK, NORM)
        else:
            above = potential(top, s0, s1, s2, c, r, dot, LINK, NORM)
        lose(VALUE, row, rows, tl.maximum((top - aim) + above, 0.0), aim, t, bad, at)
    if SAVE and (MODE == "loss" or MODE == "p"):
        remember(STATE, row, valid, bad, s0, s1, s2, s3)
    if MODE == "tau":
        tau = top - height(top, s0, s1, s2, c, r, LINK, NORM)
        tau = tl.where(bad, float("nan"), tl.where(empty, float("-inf"), tau))
        tl.store(VALUE + row, tau, mask=valid)


@triton.jit
def shares(x, a, s0, s1, s2, s3, c, r, high, LINK: tl.constexpr, P: tl.constexpr, SLOPE: tl.constexpr, NORM: tl.constexpr,
           EXACT: tl.constexpr, PER_ROW: tl.constexpr):  # fmt: skip
    """p; with one alpha a row, by the form of its side of 2."""
    if PER_ROW and LINK == "any":
        if high:
            p = emit(x, a, s0, s1, s2, s3, c, r, "steep", P, SLOPE, NORM, EXACT)
        else:
            p = emit(x, a, s0, s1, s2, s3, c, r, LINK, P, SLOPE, NORM, EXACT)
        return p
    else:
        return emit(x, a, s0, s1, s2, s3, c, r, LINK, P, SLOPE, NORM, EXACT)


@triton.jit
def in_steps(OUT, oo, oc, first, span, tops, s0, s1, s2, s3, c, r, high, t, scale, bad, at, MODE: tl.constexpr, LINK: tl.constexpr,
             P: tl.constexpr, SLOPE: tl.constexpr, NORM: tl.constexpr, EXACT: tl.constexpr, PER_ROW: tl.constexpr,
             MASKED: tl.constexpr, FAR: tl.constexpr, R: tl.constexpr, K: tl.constexpr, L: tl.constexpr):  # fmt: skip
    """Writes a longer row, or a part of it; a lane that has no probability is not read again."""
    n, valid = at[6], at[7]
    live = tl.full([R, 1, L], 1, tl.int1)
    if MODE != "grad":
        live = shares(tops, s0, s0, s1, s2, s3, c, r, high, LINK, P, SLOPE, NORM, EXACT, PER_ROW) > 0.0
    for begin in range(first, tl.minimum(first + span, n), K * L):
        v = fetch(at, begin, live, MASKED, FAR, K, L, False)
        p = shares(v, s0, s0, s1, s2, s3, c, r, high, LINK, P, SLOPE, NORM, EXACT, PER_ROW)
        finish(OUT, oo, oc, begin, p, t, scale, bad, n, valid, MODE, FAR, K, L)


@triton.jit
def dot_in_steps(tops, top, s0, s1, s2, s3, c, r, high, at, LINK: tl.constexpr, P: tl.constexpr, SLOPE: tl.constexpr,
                 NORM: tl.constexpr, EXACT: tl.constexpr, PER_ROW: tl.constexpr, MASKED: tl.constexpr, FAR: tl.constexpr,
                 R: tl.constexpr, K: tl.constexpr, L: tl.constexpr):  # fmt: skip
    """sum p (x - top) over a longer row."""
    live = shares(tops, s0, s0, s1, s2, s3, c, r, high, LINK, P, SLOPE, NORM, EXACT, PER_ROW) > 0.0
    acc = tl.zeros([R, 1, L], tl.float64)
    for begin in range(0, at[6], K * L):
        v = fetch(at, begin, live, MASKED, FAR, K, L, False)
        p = shares(v, s0, s0, s1, s2, s3, c, r, high, LINK, P, SLOPE, NORM, EXACT, PER_ROW)
        acc += tl.sum(tl.where(p > 0.0, p * (v - top), 0.0), 1, keep_dims=True).to(tl.float64)
    return total(acc).to(tl.float32)


@triton.jit
def matters(tops, top, live, param, at, LINK: tl.constexpr, P: tl.constexpr, SLOPE: tl.constexpr, NORM: tl.constexpr,
            MASKED: tl.constexpr, FAR: tl.constexpr, R: tl.constexpr, L: tl.constexpr):  # fmt: skip
    """The lanes that may have some of the support, by a bound of the threshold from the lane maxima."""
    if LINK == "budget":  # tau is at most 1 below the ceil(k)-th largest score
        edge, _ = kth(tops, tops, top, live, tl.ceil(param), at, MASKED, FAR, R, 1, L, True)
        held = tops >= edge - 1.0
    elif LINK == "steep":
        held = tops >= top - 1.0 / param
    else:
        c, r = slope_and_power(param, LINK, P, NORM)
        if LINK == "edge":
            held = tops >= top - 1.0
        else:
            b = descent(tops, top, top, c, r, LINK, P, SLOPE)
            b += 1e-6 * b  # more than rounding has taken off
            value, _ = share_of(tops, top, b, fitted(top, b, c, r, LINK), r, LINK, P, SLOPE, False)
            held = value > 0.0
    return held & (tops > float("-inf"))
