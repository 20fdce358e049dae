"""Sparse softmax: softmax over the k largest scores, or over the nucleus of mass p; ties are broken by position."""

# pyright: reportAssignmentType=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# type checkers can't read the code that Triton traces

from __future__ import annotations

import triton
import triton.language as tl

from .links import log1p, quick_exp
from .policy import aimed, class_of, finish, finish_empty, finish_gathered, lose, recall, remember, wanted
from .search import LOWEST, chosen, cut, exceeded, expected, from_lanes, probe, select, weigh
from .tile import (
    OUTSIDE,
    aligned,
    any_of,
    as_scalar,
    as_tile,
    fetch,
    fill,
    first_of,
    gather,
    lanes,
    lead_of,
    operand,
    read_lanes,
    rows_of,
    scatter,
    survey,
    surveyed,
    total,
    wide,
)


@triton.jit
def moments(v):
    """exp(v), v exp(v), v^2 exp(v)."""
    v = tl.maximum(v, -1e4)  # for a masked score, -inf times 0 would be NaN
    w = quick_exp(v)
    return w, v * w, v * v * w


@triton.jit
def mass(x, top, p, at, MASKED: tl.constexpr, INT64: tl.constexpr, R: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
         WHOLE: tl.constexpr):  # fmt: skip
    """(sum exp(x - top), guess, spread): where the nucleus of mass p ends in a row whose weights are normal around their mean score."""
    if WHOLE:
        w, vw, vvw = moments(x - top)
        whole, first, second = wide(w), total(vw), total(vvw)
    else:
        acc = tl.zeros([R, 1, L], tl.float64)
        first_ = tl.zeros([R, 1, L], tl.float32)
        second_ = tl.zeros([R, 1, L], tl.float32)
        for begin in range(0, at[6], K * L):
            w, vw, vvw = moments(fetch(at, begin, True, MASKED, INT64, K, L, True) - top)
            acc += tl.sum(w, 1, keep_dims=True).to(tl.float64)
            first_ += tl.sum(vw, 1, keep_dims=True)
            second_ += tl.sum(vvw, 1, keep_dims=True)
        whole, first, second = total(acc), total(first_), total(second_)
    whole = tl.where(whole > 0.0, whole, 1.0)  # a row without a score
    share = 1.0 / whole.to(tl.float32)
    mean = first * share
    deviation = tl.sqrt(tl.maximum(second * share - mean * mean, 0.0))
    return whole, top + mean + deviation * exceeded(p), 0.125 * deviation


@triton.jit
def emit(x, cols, top, edge, last, share, log_z, LOGS: tl.constexpr):
    kept = chosen(x, cols, edge, last)
    if LOGS:
        return tl.where(kept, (x - top) - log_z, float("-inf"))
    else:
        return tl.where(kept, weigh(x, top), 0.0) * share


@triton.jit
def find(x, cols, tops, top, live, bound, start, guess, spread, target, at, span, BY: tl.constexpr, PARTS: tl.constexpr,
         MASKED: tl.constexpr, INT64: tl.constexpr, R: tl.constexpr, K: tl.constexpr, L: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """(edge, last, Z): the kept scores are those above the edge and those equal to it up to the class `last`; Z is their mass.
    The arguments are those of `select` and `cut`."""
    edge, _, tied, beyond, above = select(
        x, tops, top, live, bound, start, guess, spread, target, at, BY, MASKED, INT64, R, K, L, WHOLE
    )
    last = (edge * 0.0).to(tl.int32) + at[6]
    at_edge = weigh(edge, top).to(tl.float64)
    if BY == "count":
        room = target - above
    else:
        room = tl.maximum(tl.ceil(((target - above) / at_edge).to(tl.float32)), 1.0)
        room = tl.minimum(room, at[6])  # a weight of 0 at the edge
    # not from the search, whose first weight is that of the whole row
    z = probe(x, tops, top, tl.where(tied, beyond, edge), at, "exp", MASKED, INT64, R, K, L, WHOLE)
    if any_of(tied):
        ranked = tl.where(tied, room, 1.0).to(tl.int32)
        last = tl.where(tied, cut(x, cols, tops, edge, ranked, at, span, PARTS, MASKED, INT64, R, K, L, WHOLE), last)
        z += tl.where(tied, room.to(tl.float64) * at_edge, 0.0)
    return edge, last, tl.where(z > 0.0, z, 1.0)


@triton.jit
def in_steps(OUT, oo, oc, first, span, live, top, edge, last, share, log_z, t, scale, at, MODE: tl.constexpr, LOGS: tl.constexpr,
             MASKED: tl.constexpr, INT64: tl.constexpr, K: tl.constexpr, L: tl.constexpr):  # fmt: skip
    """Writes a longer row, or a part of it, without reading the lanes that keep no score."""
    for begin in range(first, tl.minimum(first + span, at[6]), K * L):
        v = fetch(at, begin, live, MASKED, INT64, K, L, False, OUTSIDE, False)
        p = emit(v, lanes(begin, K, L), top, edge, last, share, log_z, LOGS)
        finish(OUT, oo, oc, begin, p, t, scale, at, MODE, INT64, K, L)


@triton.jit
def truncated_rows(X, M, OUT, PARAMS, INDEX, SCALE, VALUE, STATE, LIST, COUNT, TOPS, PTR, IDS,
                   rows, n, span, list_span, d1, d2, x0, x1, x2, xc, m0, m1, m2, mc, o0, o1, o2, oc, ignore, param, slots,
                   MODE: tl.constexpr, BY: tl.constexpr, PER_ROW: tl.constexpr, MASKED: tl.constexpr, SAVE: tl.constexpr,
                   EACH: tl.constexpr, INT64: tl.constexpr, FEW: tl.constexpr, DEPTH: tl.constexpr, LATE: tl.constexpr,
                   KEEP: tl.constexpr, LANES: tl.constexpr, PARTS: tl.constexpr, LOGS: tl.constexpr, RAGGED: tl.constexpr,
                   UNIT: tl.constexpr, SHIFT: tl.constexpr, R: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
                   WHOLE: tl.constexpr):  # fmt: skip
    """`separable_rows` for sparse softmax, with MODE "log" too. BY "count" keeps `param` scores, BY "exp" the mass `param`. LOGS: write
    log p."""
    row, valid, n, start = rows_of(PTR, IDS, slots, n, d2, RAGGED, UNIT, R, WHOLE)
    xo = first_of(row, start, d1, d2, x0, x1, x2, xc, RAGGED, UNIT)
    mo = first_of(row, start, d1, d2, m0, m1, m2, mc, RAGGED, UNIT)
    at = operand(X, xo, xc, M, mo, mc, n, valid, SHIFT, WHOLE)
    if PER_ROW:
        par = tl.load(PARAMS + row, mask=valid, other=1.0)
    else:
        par = tl.zeros([R, 1, 1], tl.float32) + param
    first = tl.program_id(1) * span
    NOTHING: tl.constexpr = float("-inf") if LOGS else 0.0
    if MODE == "grad" or MODE == "write":
        x = fetch(at, 0, True, MASKED, INT64, K, L, False) if WHOLE else tl.zeros([R, 1, L], tl.float32)
        tops = x
        if MODE == "write":
            tops = tl.load(TOPS + (row.to(tl.int64) * PARTS + tl.program_id(1)) * L + tl.arange(0, L)[None, None, :])
        top, edge, last, z, bad = recall(STATE, row, valid)
        last = last.to(tl.int32, bitcast=True) + lead_of(at)
        edge, last = tl.where(bad, float("inf"), edge), tl.where(bad, -1, last)  # keeps no score
        empty = bad
        small = False
        log_z = z
    else:
        if PARTS > 0:
            cells, tops, top, bad = surveyed(TOPS, row, PARTS, L)
            x = tops
        else:
            ot = (OUT, aligned(OUT, first_of(row, start, d1, d2, o0, o1, o2, oc, RAGGED, UNIT), SHIFT), oc)
            FILL: tl.constexpr = NOTHING if FEW > 0 and (MODE == "p" or MODE == "log") and not LATE else None
            x, tops, top, bad = survey(at, ot, FILL, MASKED, INT64, R, K, L, WHOLE)
            cells = tops
        bad = bad | (par != par)
        empty = top == float("-inf")
        live = (bad == 0) & (empty == 0)
        top = tl.where(live, top, 0.0)
        lowest = top * 0.0 + LOWEST
        bound = lowest
        LIVE: tl.constexpr = L * PARTS if PARTS > 0 else L
        whole, guess, spread = None, None, None
        if BY == "count":
            target = par
            if WHOLE:
                guess, spread = expected(x, top, target)
            else:
                bound = from_lanes(cells, top, live, target, at, MASKED, INT64, R, LIVE)
        else:
            whole, guess, spread = mass(x, top, par, at, MASKED, INT64, R, K, L, WHOLE)
            target = tl.where(par >= 1.0, float("inf"), par.to(tl.float64) * whole)
            # all scores below this bound together weigh less than the mass that is left out
            bound = top + (tl.log(tl.maximum(1.0 - par, 1.2e-38) * whole.to(tl.float32) / n) - 1e-3)
            bound = tl.where(live & (par < 1.0), tl.maximum(bound, lowest), lowest)
        if FEW > 0:
            held = (cells >= bound) & (cells > float("-inf"))
            tile, cols, count = gather(at, held, LIST, list_span, FEW, DEPTH, MASKED, INT64, L, LIVE)
            count += any_of(bad) * (FEW + 1)  # a poisoned row has NaN in all lanes
            small = count <= FEW
            if KEEP or PARTS > 0:
                tl.store(COUNT + tl.program_id(0), count)
            if small:
                best = tl.max(tile, 1, keep_dims=True)
                peak, sane, low, goal = as_tile(top), as_tile(live.to(tl.int32)) > 0, as_tile(bound), as_tile(target)
                begun, near, off = whole, guess, spread
                if BY == "exp":
                    begun, near, off = as_tile(whole), as_tile(guess), as_tile(spread)
                edge, last, z = find(tile, cols, best, peak, sane, low, begun, near, off, goal, at, list_span,
                                     BY, PARTS, MASKED, INT64, R, DEPTH, FEW, True)  # fmt: skip
                edge, last, z = as_tile(edge), as_tile(last), as_tile(z)
            else:
                edge, last, z = find(x, None, tops, top, live, bound, whole, guess, spread, target, at, list_span,
                                     BY, PARTS, MASKED, INT64, R, K, L, WHOLE)  # fmt: skip
        else:
            edge, last, z = find(x, None, tops, top, live, bound, whole, guess, spread, target, at, list_span,
                                 BY, PARTS, MASKED, INT64, R, K, L, WHOLE)  # fmt: skip
        log_z = log1p((z - 1.0).to(tl.float32))
        z = z.to(tl.float32)
    share = 1.0 / z
    if MODE == "p" or MODE == "log" or MODE == "grad" or MODE == "write":
        oo = aligned(OUT, first_of(row, start, d1, d2, o0, o1, o2, oc, RAGGED, UNIT), SHIFT)
        t, scale = wanted(INDEX, SCALE, row, ignore, at, bad, MODE, EACH)
        reaching = tops >= edge if MODE != "grad" else tops == tops
        if WHOLE:
            p = emit(x, lanes(0, K, L), top, edge, last, share, log_z, LOGS)
            finish(OUT, oo, oc, 0, p, t, scale, at, MODE, INT64, K, L)
        elif FEW > 0 and (MODE == "p" or MODE == "log"):
            if small:  # the other classes are filled already, or are filled now
                if LATE:
                    tl.debug_barrier()
                    for begin in range(0, at[6], K * L):
                        fill(at, (OUT, oo, oc), begin, NOTHING, INT64, R, K, L)
                p = emit(
                    tile,
                    cols,
                    as_scalar(top),
                    as_scalar(edge),
                    as_scalar(last),
                    as_scalar(share),
                    as_scalar(log_z),
                    LOGS,
                )
                scatter(OUT, oo, oc, cols, p, chosen(tile, cols, as_scalar(edge), as_scalar(last)), at, INT64)
            elif PARTS == 0:
                in_steps(OUT, oo, oc, first, span, reaching, top, edge, last, share, log_z, t, scale, at,
                         MODE, LOGS, MASKED, INT64, K, L)  # fmt: skip
        elif MODE == "grad" and FEW > 0:
            few = tl.load(COUNT + tl.program_id(0))
            if few <= FEW:
                mine = LIST + tl.program_id(0).to(tl.int64) * FEW
                tile, cols, ok = read_lanes(at, mine, few, list_span, FEW, DEPTH, MASKED, INT64, LANES)
                finish_empty(OUT, oo, oc, first, span, t, scale, at, INT64, R, K, L)
                p = emit(
                    tile,
                    cols,
                    as_scalar(top),
                    as_scalar(edge),
                    as_scalar(last),
                    as_scalar(share),
                    as_scalar(log_z),
                    LOGS,
                )
                finish_gathered(OUT, oo, oc, first, span, cols, p, ok, t, scale, at, INT64)
            else:
                in_steps(OUT, oo, oc, first, span, reaching, top, edge, last, share, log_z, t, scale, at,
                         MODE, LOGS, MASKED, INT64, K, L)  # fmt: skip
        elif MODE == "write" and FEW > 0:
            if tl.load(COUNT + tl.program_id(0)) > FEW:  # else the row is written already
                in_steps(OUT, oo, oc, first, span, reaching, top, edge, last, share, log_z, t, scale, at,
                         MODE, LOGS, MASKED, INT64, K, L)  # fmt: skip
        elif MODE == "write" or PARTS == 0:
            in_steps(OUT, oo, oc, first, span, reaching, top, edge, last, share, log_z, t, scale, at,
                     MODE, LOGS, MASKED, INT64, K, L)  # fmt: skip
    if MODE == "loss":
        t = class_of(INDEX, row, ignore, at)
        aim = aimed(at, t, MASKED)
        lose(VALUE, row, rows, log_z + (top - aim), aim, t, bad, at)
    if SAVE and (MODE == "loss" or MODE == "p" or MODE == "log"):
        kept_ = (last - lead_of(at)).to(tl.float32, bitcast=True)
        remember(STATE, row, valid, bad, top, edge, kept_, log_z if LOGS else z)
    if MODE == "tau":
        tau = tl.where(empty, float("-inf"), top + log_z)
        tl.store(VALUE + row, tl.where(bad, float("nan"), tau), mask=valid)
