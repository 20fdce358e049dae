"""Sparse softmax: softmax over the k largest scores, or over the nucleus of mass p; ties are broken by position."""

# pyright: reportAssignmentType=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# type checkers can't read the code that Triton traces

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .links import log1p
from .policy import aimed, class_of, finish, finish_empty, finish_gathered, lose, recall, remember, wanted
from .search import (
    LOWEST,
    chosen,
    cut,
    exceeded,
    expected,
    from_lanes,
    key,
    more_than,
    narrowed_by,
    near,
    pivot,
    probe,
    probe_three,
    select,
    unkey,
    weigh,
)
from .survey import (
    list_between,
    list_lanes,
    moments,
    moved,
    part_lanes,
    read_lanes,
    read_listed,
    settle_reads,
    survey,
    surveyed,
    surveyed_numbers,
)
from .tile import (
    AT_HAND,
    OUTSIDE,
    any_of,
    as_scalar,
    as_tile,
    fetch,
    fill,
    in_packs,
    lanes,
    largest,
    operand,
    output,
    parameter,
    per_lane,
    rows_of,
    scatter,
    total,
    wide,
)

SPREAD = tl.constexpr(0.05)  # deviations by which the guess of a longer row may be off


@triton.jit
def nucleus(whole, first, second, top, p):
    """(sum exp(x - top), guess, spread): where the nucleus of mass p ends in a row whose weights are normal around their mean score."""
    whole = tl.where(whole > 0.0, whole, 1.0)  # a row without a score
    share = 1.0 / whole.to(tl.float32)
    mean = first * share
    deviation = tl.sqrt(tl.maximum(second * share - mean * mean, 0.0))
    return whole, top + mean + deviation * exceeded(p), deviation


@triton.jit
def nucleus_of_parts(TOPS, row, top, p, PARTS: tl.constexpr, L: tl.constexpr):
    peaks, w0, w1, w2 = surveyed_numbers(TOPS, row, PARTS, 0, L)
    w0, w1, w2 = moved(w0, w1, w2, peaks - top)
    whole, guess, deviation = nucleus(wide(w0), total(w1), total(w2), top, p)
    return whole, guess, SPREAD * deviation


@triton.jit
def weigh_parts(X, M, PARAMS, TOPS, rows, n, span, d1, d2, x0, x1, x2, xc, m0, m1, m2, mc, param, PER_ROW: tl.constexpr,
                PARTS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Adds three numbers to each part in TOPS: what its scores weigh from each pivot on that is near the guess."""
    L: tl.constexpr = TILE.L
    mine = rows_of(X, X, rows, n, d1, d2, TILE)
    at = operand(mine, X, x0, x1, x2, xc, M, m0, m1, m2, mc, TILE)
    peaks, _, _, _ = surveyed_numbers(TOPS, mine.row, PARTS, 0, L)
    top = largest(peaks)
    top = tl.where((top > float("-inf")) & (top < float("inf")), top, 0.0)
    _, guess, spread = nucleus_of_parts(TOPS, mine.row, top, parameter(PARAMS, param, mine, PER_ROW), PARTS, L)
    a, b, c = near(guess, spread, at)
    first = tl.program_id(1) * span
    tops = part_lanes(TOPS, mine.row, PARTS, L)
    end = tl.minimum(first + span, at.n)
    from_a, from_b, from_c = probe_three(tops, top, unkey(a), unkey(b), unkey(c), first, end, at, "exp", TILE)
    to = TOPS + mine.row.to(tl.int64) * (PARTS * (L + 8)) + PARTS * L + tl.program_id(1) * 8 + 4
    tl.store(to, from_a.to(tl.float32))
    tl.store(to + 1, from_b.to(tl.float32))
    tl.store(to + 2, from_c.to(tl.float32))


class Kept(NamedTuple):
    """The scores that a row keeps."""

    top: Any
    edge: Any  # those above it, and those equal to it up to the class `last`
    last: Any
    share: Any  # 1 over their mass
    log_z: Any


@triton.jit
def emit(x, cols, row, LOGS: tl.constexpr):
    kept = chosen(x, cols, row.edge, row.last)
    if LOGS:
        return tl.where(kept, (x - row.top) - row.log_z, float("-inf"))
    else:
        return tl.where(kept, weigh(x, row.top), 0.0) * row.share


@triton.jit
def as_scalars(row):
    """The row beside a gathered tile."""
    return Kept(
        as_scalar(row.top), as_scalar(row.edge), as_scalar(row.last), as_scalar(row.share), as_scalar(row.log_z)
    )


@triton.jit
def settle(x, cols, tops, top, edge, tied, beyond, above, target, more, at, BY: tl.constexpr, L: tl.constexpr,
           TILE: tl.constexpr):  # fmt: skip
    """(edge, last, Z) from what `select` gives: the kept scores are those above the edge and those equal to it up to the class `last`; Z is
    their mass. A gathered tile has classes `cols`, in order within each L of the row, and `more` is the mass that it lacks."""
    last = (edge * 0.0).to(tl.int32) + at.n
    at_edge = weigh(edge, top).to(tl.float64)
    if BY == "count":
        room = target - above
    else:
        room = tl.maximum(tl.ceil(((target - above) / at_edge).to(tl.float32)), 1.0)
        room = tl.minimum(room, at.n)  # a weight of 0 at the edge
    # not from the search, whose first weight is that of the whole row
    z = more + probe(x, tops, top, tl.where(tied, beyond, edge), at, "exp", TILE)
    if any_of(tied):
        if cols is not None:
            room = tl.minimum(
                room, probe(x, tops, top, edge, at, "count", TILE) - probe(x, tops, top, beyond, at, "count", TILE)
            )
        ranked = tl.where(tied, room, 1.0).to(tl.int32)
        last = tl.where(tied, cut(x, cols, tops, edge, ranked, at, L, TILE), last)
        z += tl.where(tied, room.to(tl.float64) * at_edge, 0.0)
    return edge, last, tl.where(z > 0.0, z, 1.0)


@triton.jit
def in_steps(to, live, row, goal, at, MODE: tl.constexpr, LOGS: tl.constexpr, FEW: tl.constexpr, TILE: tl.constexpr):
    """Writes a longer row, or a part of it, without reading the lanes that keep no score."""
    for begin in range(goal.first, goal.end, TILE.K * TILE.L):
        v = fetch(at, begin, live, TILE, False, OUTSIDE, False)
        settle_reads(MODE, FEW)
        finish(to, begin, emit(v, lanes(begin, TILE.K, TILE.L), row, LOGS), goal, at, MODE, TILE)


@triton.jit
def truncated_rows(X, M, OUT, PARAMS, INDEX, SCALE, VALUE, STATE, LIST, COUNT, LISTED, TOPS, PTR, IDS,
                   rows, n, span, list_span, d1, d2, x0, x1, x2, xc, m0, m1, m2, mc, o0, o1, o2, oc, ignore, param, slots,
                   MODE: tl.constexpr, SAVE: tl.constexpr, EACH: tl.constexpr, BY: tl.constexpr, LOGS: tl.constexpr,
                   PER_ROW: tl.constexpr, FEW: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """`separable_rows` for sparse softmax, with MODE "log" too. BY "count" keeps `param` scores, BY "exp" the mass `param`. LOGS: write
    log p."""
    PARTS: tl.constexpr = FEW.PARTS
    L: tl.constexpr = TILE.L
    mine = rows_of(PTR, IDS, slots, n, d1, d2, TILE)
    row, valid = mine.row, mine.valid
    at = operand(mine, X, x0, x1, x2, xc, M, m0, m1, m2, mc, TILE)
    par = parameter(PARAMS, param, mine, PER_ROW)
    WRITES: tl.constexpr = MODE == "p" or MODE == "log"
    NOTHING: tl.constexpr = float("-inf") if LOGS else 0.0
    small: tl.constexpr = False
    if MODE == "grad" or MODE == "write":
        x = fetch(at, 0, True, TILE, False) if TILE.WHOLE else per_lane(0.0, TILE)
        tops = x
        if MODE == "write":
            tops = part_lanes(TOPS, row, PARTS, L)
        top, edge, last, z, bad = recall(STATE, row, valid)
        last = last.to(tl.int32, bitcast=True) + at.lead
        edge, last = tl.where(bad, float("inf"), edge), tl.where(bad, -1, last)  # keeps no score
        log_z = z
    else:
        if PARTS > 0:
            cells, tops, top, bad = surveyed(TOPS, row, PARTS, L)
            x = tops
        else:
            FILL: tl.constexpr = NOTHING if FEW.FEW > 0 and WRITES and not FEW.LATE else None
            to = output(mine, OUT, o0, o1, o2, oc, TILE)
            x, tops, top, bad, w0, w1, w2 = survey(at, to, FILL, BY == "exp", TILE)
            cells = tops
        bad = bad | (par != par)
        empty = top == float("-inf")
        live = (bad == 0) & (empty == 0)
        top = tl.where(live, top, 0.0)
        bound = top * 0.0 + LOWEST
        whole, ceiling, past, guess, spread = None, None, None, None, None
        if BY == "count":
            target = par
            if TILE.WHOLE:
                guess, spread = expected(x, top, target)
            else:
                bound, _ = from_lanes(cells, as_tile(top), as_tile(live.to(tl.int32)) > 0, as_tile(target), at)
                bound = as_tile(bound)
        else:
            if TILE.WHOLE:
                w, vw, vvw = moments(x - top)
                whole, guess, spread = nucleus(wide(w), total(vw), total(vvw), top, par)
                spread *= 0.125
            else:
                if PARTS > 0:
                    whole, guess, spread = nucleus_of_parts(TOPS, row, top, par, PARTS, L)
                else:
                    w0, w1, w2 = moved(w0, w1, w2, tops - top)
                    whole, guess, spread = nucleus(wide(w0), total(w1), total(w2), top, par)
                    spread *= SPREAD
            target = tl.where(par >= 1.0, float("inf"), par.to(tl.float64) * whole)
            # all scores below this bound together weigh less than the mass that is left out
            least = top + (tl.log(tl.maximum(1.0 - par, 1.2e-38) * whole.to(tl.float32) / mine.n) - 1e-3)
            bound = tl.where(live & (par < 1.0), tl.maximum(least, bound), bound)
            if PARTS > 0:
                a, b, c = near(guess, spread, at)
                from_a, from_b, from_c, _none = surveyed_numbers(TOPS, row, PARTS, 4, L)
                weights = wide(from_a), wide(from_b), wide(from_c)
                low_, whole, ceiling, past = narrowed_by(
                    pivot(bound, at),
                    whole,
                    pivot(bound, at) * 0 + 0x7FFFFFFF,
                    whole * 0.0,
                    a,
                    b,
                    c,
                    weights,
                    target,
                    live,
                )
                bound, guess, spread = unkey(low_), None, None
        if FEW.FEW > 0:
            held = (cells >= as_tile(bound)) & (cells > float("-inf"))
            count = list_lanes(held, LIST, COUNT, bad, FEW)
            small = count <= FEW.FEW
            edge, last, z = as_tile(top), as_tile(top).to(tl.int32), as_tile(top).to(tl.float64)
            low, aim, more = as_tile(bound), as_tile(target), z * 0.0
            begun, near_, off = None, None, None
            if BY == "exp":
                begun = as_tile(whole)
                if PARTS > 0:
                    near_, off = 0.5 * (low + as_tile(top)), 0.25 * (as_tile(top) - low)
                else:
                    near_, off = as_tile(guess), as_tile(spread)
            at_hand = small
            if small == 0:
                edge_, _few, tied_, beyond_, upto, above_ = select(
                    x, tops, top, live, bound, whole, ceiling, past, guess, spread, target, at, BY, FEW.MOST, TILE
                )
                at_hand = any_of(tied_ & (more_than(FEW.MOST, key(edge_), upto, above_, top, BY) == 0))
                if at_hand:
                    low, high = as_tile(edge_), as_tile(beyond_)
                    count = list_between(at, tops, as_scalar(edge_), as_scalar(beyond_), LISTED, FEW, TILE)
                    aim = as_tile(target - above_)
                    if BY == "exp":
                        begun, more = as_tile(upto - above_), as_tile(above_)
                        near_, off = 0.5 * (low + high), 0.25 * (high - low)
                    else:
                        more = as_tile(probe(x, tops, top, beyond_, at, "exp", TILE))
                else:
                    edge_, last_, z_ = settle(
                        x, None, tops, top, edge_, tied_, beyond_, above_, target, 0.0, at, BY, L, TILE
                    )
                    edge, last, z = as_tile(edge_), as_tile(last_), as_tile(z_)
            if at_hand:
                if small:
                    listed = LIST + tl.program_id(0).to(tl.int64) * FEW.FEW
                    tile, cols, _ok = read_lanes(at, listed, count, list_span, FEW, TILE)
                else:
                    tile, cols = read_listed(at, LISTED, count, FEW, TILE)
                best, peak, sane = tl.max(tile, 1, keep_dims=True), as_tile(top), as_tile(live.to(tl.int32)) > 0
                edge, _few, tied, beyond, _upto, above = select(
                    tile, best, peak, sane, low, begun, None, None, near_, off, aim, at, BY, 1.5, AT_HAND
                )
                edge, last, z = settle(tile, cols, best, peak, edge, tied, beyond, above, aim, more, at, BY, L, AT_HAND)
                edge, last, z = as_tile(edge), as_tile(last), as_tile(z)
        else:
            edge, _, tied, beyond, _, above = select(
                x, tops, top, live, bound, whole, ceiling, past, guess, spread, target, at, BY, 1.5, TILE
            )
            edge, last, z = settle(x, None, tops, top, edge, tied, beyond, above, target, 0.0, at, BY, L, TILE)
        log_z = log1p((z - 1.0).to(tl.float32))
        z = z.to(tl.float32)
    kept = Kept(top, edge, last, 1.0 / z, log_z)
    if WRITES or MODE == "grad" or MODE == "write":
        to = output(mine, OUT, o0, o1, o2, oc, TILE)
        goal = wanted(INDEX, SCALE, row, ignore, tl.program_id(1) * span, span, at, bad, MODE, EACH)
        if TILE.WHOLE:
            settle_reads(MODE, FEW)
            finish(to, 0, emit(x, lanes(0, TILE.K, TILE.L), kept, LOGS), goal, at, MODE, TILE)
        else:
            if FEW.FEW > 0 and (MODE == "grad" or MODE == "write"):
                count = tl.load(COUNT + tl.program_id(0))
                small = count <= FEW.FEW
            if small:
                if MODE != "write":
                    listed = LIST + tl.program_id(0).to(tl.int64) * FEW.FEW
                    tile, cols, ok = read_lanes(at, listed, count, list_span, FEW, TILE)
                    single = as_scalars(kept)
                    p = emit(tile, cols, single, LOGS)
                    if MODE == "grad":
                        settle_reads(MODE, FEW)
                        finish_empty(to, goal, at, TILE)
                        finish_gathered(to, cols, p, ok, goal, at, TILE)
                    else:  # the other classes are filled already, or are filled now
                        if FEW.LATE:
                            tl.debug_barrier()
                            for begin in range(0, at.n, TILE.K * TILE.L):
                                fill(to, begin, NOTHING, at, TILE)
                        scatter(to, cols, p, chosen(tile, cols, single.edge, single.last), at, TILE)
            elif not WRITES or PARTS == 0:
                if MODE == "grad":
                    reaching = tops == tops
                else:
                    reaching = in_packs(tops >= edge, at, TILE)
                in_steps(to, reaching, kept, goal, at, MODE, LOGS, FEW, TILE)
    if MODE == "loss":
        t = class_of(INDEX, row, ignore, at)
        aim = aimed(at, t, TILE)
        lose(VALUE, row, rows, log_z + (top - aim), aim, t, bad, at)
    if SAVE and (MODE == "loss" or WRITES):
        kept_ = (last - at.lead).to(tl.float32, bitcast=True)
        remember(STATE, row, valid, bad, top, edge, kept_, log_z if LOGS else z)
    if MODE == "tau":
        tau = tl.where(empty, float("-inf"), top + log_z)
        tl.store(VALUE + row, tl.where(bad, float("nan"), tau), mask=valid)
