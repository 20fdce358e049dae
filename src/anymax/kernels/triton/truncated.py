"""Sparse softmax: softmax over the k largest scores, or over the nucleus of mass p; ties are broken by position."""

# pyright: reportAssignmentType=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# type checkers can't read the code that Triton traces

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .links import log1p, quick_exp
from .policy import aimed, class_of, finish, finish_empty, finish_gathered, lose, recall, remember, wanted
from .search import LOWEST, chosen, cut, exceeded, expected, from_lanes, probe, select, weigh
from .tile import (
    AT_HAND,
    OUTSIDE,
    any_of,
    as_scalar,
    as_tile,
    fetch,
    fill,
    gather,
    in_packs,
    lanes,
    operand,
    output,
    parameter,
    per_lane,
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
def mass(x, top, p, at, TILE: tl.constexpr):
    """(sum exp(x - top), guess, spread): where the nucleus of mass p ends in a row whose weights are normal around their mean score."""
    if TILE.WHOLE:
        w, vw, vvw = moments(x - top)
        whole, first, second = wide(w), total(vw), total(vvw)
    else:
        acc = per_lane(0.0, TILE, tl.float64)
        first_ = per_lane(0.0, TILE)
        second_ = per_lane(0.0, TILE)
        for begin in range(0, at.n, TILE.K * TILE.L):
            w, vw, vvw = moments(fetch(at, begin, True, TILE, True) - top)
            acc += tl.sum(w, 1, keep_dims=True).to(tl.float64)
            first_ += tl.sum(vw, 1, keep_dims=True)
            second_ += tl.sum(vvw, 1, keep_dims=True)
        whole, first, second = total(acc), total(first_), total(second_)
    whole = tl.where(whole > 0.0, whole, 1.0)  # a row without a score
    share = 1.0 / whole.to(tl.float32)
    mean = first * share
    deviation = tl.sqrt(tl.maximum(second * share - mean * mean, 0.0))
    return whole, top + mean + deviation * exceeded(p), 0.125 * deviation


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
def find(x, cols, tops, top, live, bound, start, guess, spread, target, at, span, BY: tl.constexpr, FEW: tl.constexpr,
         TILE: tl.constexpr):  # fmt: skip
    """(edge, last, Z): the kept scores are those above the edge and those equal to it up to the class `last`; Z is their mass.
    The arguments are those of `select` and `cut`."""
    edge, _, tied, beyond, above = select(x, tops, top, live, bound, start, guess, spread, target, at, BY, TILE)
    last = (edge * 0.0).to(tl.int32) + at.n
    at_edge = weigh(edge, top).to(tl.float64)
    if BY == "count":
        room = target - above
    else:
        room = tl.maximum(tl.ceil(((target - above) / at_edge).to(tl.float32)), 1.0)
        room = tl.minimum(room, at.n)  # a weight of 0 at the edge
    # not from the search, whose first weight is that of the whole row
    z = probe(x, tops, top, tl.where(tied, beyond, edge), at, "exp", TILE)
    if any_of(tied):
        ranked = tl.where(tied, room, 1.0).to(tl.int32)
        last = tl.where(tied, cut(x, cols, tops, edge, ranked, at, span, FEW.PARTS, TILE), last)
        z += tl.where(tied, room.to(tl.float64) * at_edge, 0.0)
    return edge, last, tl.where(z > 0.0, z, 1.0)


@triton.jit
def in_steps(to, live, row, goal, at, MODE: tl.constexpr, LOGS: tl.constexpr, TILE: tl.constexpr):
    """Writes a longer row, or a part of it, without reading the lanes that keep no score."""
    for begin in range(goal.first, goal.end, TILE.K * TILE.L):
        v = fetch(at, begin, live, TILE, False, OUTSIDE, False)
        finish(to, begin, emit(v, lanes(begin, TILE.K, TILE.L), row, LOGS), goal, at, MODE, TILE)


@triton.jit
def truncated_rows(X, M, OUT, PARAMS, INDEX, SCALE, VALUE, STATE, LIST, COUNT, TOPS, PTR, IDS,
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
            tops = tl.load(TOPS + (row.to(tl.int64) * PARTS + tl.program_id(1)) * L + tl.arange(0, L)[None, None, :])
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
            x, tops, top, bad = survey(at, output(mine, OUT, o0, o1, o2, oc, TILE), FILL, TILE)
            cells = tops
        bad = bad | (par != par)
        empty = top == float("-inf")
        live = (bad == 0) & (empty == 0)
        top = tl.where(live, top, 0.0)
        bound = top * 0.0 + LOWEST
        whole, guess, spread = None, None, None
        if BY == "count":
            target = par
            if TILE.WHOLE:
                guess, spread = expected(x, top, target)
            else:
                bound, _ = from_lanes(cells, as_tile(top), as_tile(live.to(tl.int32)) > 0, as_tile(target), at)
                bound = as_tile(bound)
        else:
            whole, guess, spread = mass(x, top, par, at, TILE)
            target = tl.where(par >= 1.0, float("inf"), par.to(tl.float64) * whole)
            # all scores below this bound together weigh less than the mass that is left out
            least = top + (tl.log(tl.maximum(1.0 - par, 1.2e-38) * whole.to(tl.float32) / mine.n) - 1e-3)
            bound = tl.where(live & (par < 1.0), tl.maximum(least, bound), bound)
        if FEW.FEW > 0:
            held = (cells >= as_tile(bound)) & (cells > float("-inf"))
            tile, cols, small = gather(at, held, LIST, COUNT, bad, list_span, FEW, TILE)
        if small:
            best = tl.max(tile, 1, keep_dims=True)
            peak, sane, low, aim = as_tile(top), as_tile(live.to(tl.int32)) > 0, as_tile(bound), as_tile(target)
            begun, near, off = whole, guess, spread
            if BY == "exp":
                begun, near, off = as_tile(whole), as_tile(guess), as_tile(spread)
            edge, last, z = find(
                tile, cols, best, peak, sane, low, begun, near, off, aim, at, list_span, BY, FEW, AT_HAND
            )
            edge, last, z = as_tile(edge), as_tile(last), as_tile(z)
        else:
            edge, last, z = find(
                x, None, tops, top, live, bound, whole, guess, spread, target, at, list_span, BY, FEW, TILE
            )
        log_z = log1p((z - 1.0).to(tl.float32))
        z = z.to(tl.float32)
    kept = Kept(top, edge, last, 1.0 / z, log_z)
    if WRITES or MODE == "grad" or MODE == "write":
        to = output(mine, OUT, o0, o1, o2, oc, TILE)
        goal = wanted(INDEX, SCALE, row, ignore, tl.program_id(1) * span, span, at, bad, MODE, EACH)
        if TILE.WHOLE:
            finish(to, 0, emit(x, lanes(0, TILE.K, TILE.L), kept, LOGS), goal, at, MODE, TILE)
        else:
            if FEW.FEW > 0 and not WRITES:
                few = tl.load(COUNT + tl.program_id(0))
                small = few <= FEW.FEW
            if small:
                single = as_scalars(kept)
                if WRITES:  # the other classes are filled already, or are filled now
                    if FEW.LATE:
                        tl.debug_barrier()
                        for begin in range(0, at.n, TILE.K * TILE.L):
                            fill(to, begin, NOTHING, at, TILE)
                    p = emit(tile, cols, single, LOGS)
                    scatter(to, cols, p, chosen(tile, cols, single.edge, single.last), at, TILE)
                elif MODE == "grad":
                    listed = LIST + tl.program_id(0).to(tl.int64) * FEW.FEW
                    tile, cols, ok = read_lanes(at, listed, few, list_span, FEW, TILE)
                    finish_empty(to, goal, at, TILE)
                    finish_gathered(to, cols, emit(tile, cols, single, LOGS), ok, goal, at, TILE)
            elif not WRITES or PARTS == 0:
                if MODE == "grad":
                    reaching = tops == tops
                else:
                    reaching = in_packs(tops >= edge, at, TILE)
                in_steps(to, reaching, kept, goal, at, MODE, LOGS, TILE)
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
