"""Longer rows: their lanes, from one read (`survey`), and the few lanes or scores from which such a row is solved, as one tile.

Once the maximum of each lane is known, only lanes that reach above a bound are read again. A row in parts has a program for each part of
`span` classes, which finds the maxima of its lanes (`survey_parts`); one program then solves the row from those.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# type checkers can't read the code that Triton traces

from __future__ import annotations

import triton
import triton.language as tl

from .links import quick_exp
from .tile import (
    any_of,
    fetch,
    fill,
    higher,
    highest,
    in_packs,
    lanes,
    operand,
    output,
    per_lane,
    poisoned,
    rows_of,
    step,
    there,
    total,
)  # fmt: skip


@triton.jit
def moments(v):
    """exp(v), v exp(v), v^2 exp(v)."""
    v = tl.maximum(v, -1e4)  # for a masked score, -inf times 0 would be NaN
    w = quick_exp(v)
    return w, v * w, v * v * w


@triton.jit
def moved(w0, w1, w2, by):
    """The sums of `moments` of lower numbers v + by, from those of v."""
    by = tl.maximum(by, -1e4)
    less = quick_exp(by)
    return less * w0, less * (w1 + by * w0), less * (w2 + by * (2.0 * w1 + by * w0))


@triton.jit
def survey_lanes(at, to, first, end, FILL: tl.constexpr, WEIGH: tl.constexpr, TILE: tl.constexpr):
    """The maximum of each lane, and with WEIGH the sums of `moments` of its scores less that maximum."""
    tops, w0 = per_lane(float("-inf"), TILE), per_lane(0.0, TILE)
    w1, w2 = w0, w0
    for begin in range(first, end, TILE.K * TILE.L):
        x = fetch(at, begin, True, TILE, True)
        now = higher(tops, highest(x, 1))
        if WEIGH:
            base = tl.where((now > float("-inf")) & (now < float("inf")), now, 0.0)
            w0, w1, w2 = moved(w0, w1, w2, tops - base)
            w, vw, vvw = moments(x - base)
            w0 += tl.sum(w, 1, keep_dims=True)
            w1 += tl.sum(vw, 1, keep_dims=True)
            w2 += tl.sum(vvw, 1, keep_dims=True)
        tops = now
        fill(to, begin, FILL, at, TILE)
    return tops, w0, w1, w2


@triton.jit
def survey(at, to, FILL: tl.constexpr, WEIGH: tl.constexpr, TILE: tl.constexpr):
    """(tile, maximum of each lane, maximum, poisoned, `moments`), by one read of the row. The maximum of a poisoned row is NaN or +inf.
    FILL: a number to write to a longer row's output, since most classes keep it; None: write nothing."""
    if TILE.WHOLE:
        x = fetch(at, 0, True, TILE, False)
        tops = highest(x, 1)
        w0, w1, w2 = tops, tops, tops
    else:
        tops, w0, w1, w2 = survey_lanes(at, to, 0, at.n, FILL, WEIGH, TILE)
        x = tops
    top = highest(tops, 2)
    return x, tops, top, poisoned(top), w0, w1, w2


@triton.jit
def survey_parts(X, M, OUT, TOPS, rows, n, span, d1, d2, x0, x1, x2, xc, m0, m1, m2, mc, o0, o1, o2, oc, FILL: tl.constexpr,
                 PARTS: tl.constexpr, LANES: tl.constexpr, WEIGH: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Writes TOPS [rows, PARTS (LANES + 8)]: first the maximum of each lane of each part, NaN if a score of the lane is NaN. The numbers
    that TILE reads side by side are a multiple of LANES. With WEIGH then four numbers of each part: its maximum, and the sums of `moments`
    of its scores less that. FILL: as in `survey`."""
    mine = rows_of(X, X, rows, n, d1, d2, TILE)
    at, to = operand(mine, X, x0, x1, x2, xc, M, m0, m1, m2, mc, TILE), output(mine, OUT, o0, o1, o2, oc, TILE)
    first = tl.program_id(1) * span
    tops, w0, w1, w2 = survey_lanes(at, to, first, tl.minimum(first + span, at.n), FILL, WEIGH, TILE)
    AGO: tl.constexpr = TILE.L // LANES
    folded = highest(tl.reshape(tops, [1, AGO, LANES]), 1)
    lane = tl.arange(0, LANES)[None, None, :]
    parts = TOPS + mine.row.to(tl.int64) * (PARTS * (LANES + 8))
    tl.store(parts + tl.program_id(1) * LANES + lane, folded)
    if WEIGH:
        top = highest(tops, 2)
        w0, w1, w2 = moved(w0, w1, w2, tops - tl.where(top > float("-inf"), top, 0.0))
        parts += PARTS * LANES + tl.program_id(1) * 8
        tl.store(parts, top)
        tl.store(parts + 1, total(w0))
        tl.store(parts + 2, total(w1))
        tl.store(parts + 3, total(w2))


@triton.jit
def surveyed(TOPS, row, PARTS: tl.constexpr, L: tl.constexpr):
    """(lane maxima of all parts [1, 1, PARTS L], lane maxima of the row, maximum, poisoned), from the TOPS of `survey_parts`."""
    mine = TOPS + row.to(tl.int64) * (PARTS * (L + 8))
    cells = tl.load(mine + tl.arange(0, PARTS * L)[None, None, :])
    tops = highest(tl.load(mine + lanes(0, PARTS, L)), 1)  # to reshape the cells would spread the numbers of a thread
    top = highest(tops, 2)
    return cells, tops, top, poisoned(top)


@triton.jit
def surveyed_numbers(TOPS, row, PARTS: tl.constexpr, FIRST: tl.constexpr, L: tl.constexpr):
    """The numbers of each part, [1, 1, PARTS], from the FIRST on."""
    of = TOPS + row.to(tl.int64) * (PARTS * (L + 8)) + PARTS * L + tl.arange(0, PARTS)[None, None, :] * 8 + FIRST
    return tl.load(of), tl.load(of + 1), tl.load(of + 2), tl.load(of + 3)


@triton.jit
def part_lanes(TOPS, row, PARTS: tl.constexpr, L: tl.constexpr):
    """The lane maxima of the program's part."""
    mine = TOPS + row.to(tl.int64) * (PARTS * (L + 8)) + tl.program_id(1) * L
    return tl.load(mine + tl.arange(0, L)[None, None, :])


@triton.jit
def read_lanes(at, mine, count, span, FEW: tl.constexpr, TILE: tl.constexpr):
    """(tile, classes, which of them exist): the scores of the `count` lanes listed at `mine` as a tile [1, DEPTH, FEW]. Lane l + i LANES is
    lane l of the i-th part of the row, and a part has `span` classes."""
    slots = tl.arange(0, FEW.FEW)[None, None, :]
    lane = tl.load(mine + slots, mask=slots < count, other=0)
    within = tl.arange(0, FEW.DEPTH)[None, :, None] * FEW.LANES + lane % FEW.LANES
    cols = (lane // FEW.LANES) * span + within
    # a hook may have changed a list that was saved
    ok = (slots < count) & (within < span) & (cols >= 0) & there(at, cols, TILE.SHIFT)
    return read_classes(at, cols, ok, TILE), cols, ok


@triton.jit
def settle_reads(MODE: tl.constexpr, FEW: tl.constexpr):
    """Before a gradient is written to the memory of the scores, whose numbers may be wider: what other threads read is within it."""
    if FEW.LATE and MODE == "grad":
        tl.debug_barrier()


@triton.jit
def read_classes(at, cols, ok, TILE: tl.constexpr):
    x = tl.load(at.X + at.xo + step(cols, at.xc, TILE.INT64), mask=ok, other=float("-inf")).to(tl.float32)
    if TILE.MASKED:
        keep = tl.load(at.M + at.mo + step(cols, at.mc, TILE.INT64), mask=ok, other=0)
        x = tl.where(keep != 0, x, float("-inf"))
    return x


@triton.jit
def list_lanes(live, LIST, COUNT, bad, FEW: tl.constexpr):
    """The number of live lanes, which LIST takes, where each program has its own memory; COUNT takes the number. A poisoned row has NaN in
    all lanes, and more than FEW."""
    mine = LIST + tl.program_id(0).to(tl.int64) * FEW.FEW
    slot = tl.cumsum(live.to(tl.int32), 2) - 1
    tl.store(mine + slot, tl.arange(0, live.shape[2])[None, None, :], mask=live & (slot < FEW.FEW))
    tl.debug_barrier()
    count = tl.sum(live.to(tl.int32)) + any_of(bad) * (FEW.FEW + 1)
    if FEW.KEEP or FEW.PARTS > 0:
        tl.store(COUNT + tl.program_id(0), count)
    return count


@triton.jit
def gather(at, live, LIST, COUNT, bad, span, FEW: tl.constexpr, TILE: tl.constexpr):
    """(tile, classes, whether it has all live lanes): the scores of up to FEW of the lanes as a tile, for a row in steps or in parts."""
    count = list_lanes(live, LIST, COUNT, bad, FEW)
    x, cols, _ = read_lanes(at, LIST + tl.program_id(0).to(tl.int64) * FEW.FEW, count, span, FEW, TILE)
    return x, cols, count <= FEW.FEW


@triton.jit
def list_between(at, tops, low, high, LISTED, FEW: tl.constexpr, TILE: tl.constexpr):
    """How many classes of a longer row have scores in [low, high), by one read; LISTED takes FEW.MOST, in order within each L classes.
    A lane notes its scores as bits, so that one sum over the lanes gives each score its place in the list."""
    L: tl.constexpr = TILE.L
    mine = LISTED + tl.program_id(0).to(tl.int64) * FEW.MOST
    live = in_packs(tops >= low, at, TILE)
    lane = lanes(0, 1, L)
    count = tl.sum(tl.zeros([1], tl.int32))
    for first in range(0, at.n, 32 * L):
        bits = per_lane(0, TILE, tl.int32)
        for begin in range(first, tl.minimum(first + 32 * L, at.n), TILE.K * L):
            v = fetch(at, begin, live, TILE, True)
            place_ = tl.arange(0, TILE.K)[None, :, None] + (begin - first) // L
            bits |= tl.sum(((v >= low) & (v < high)).to(tl.int32) << place_, 1, keep_dims=True)
        number = bits - ((bits >> 1) & 0x55555555)
        number = (number & 0x33333333) + ((number >> 2) & 0x33333333)
        number = (((number + (number >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24
        slot = count + tl.cumsum(number, 2) - number
        for _ in range(tl.max(number)):
            lowest = bits & -bits
            at_bit = ((lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 255) - 127
            tl.store(mine + slot, first + at_bit * L + lane, mask=(bits != 0) & (slot < FEW.MOST))
            slot += (bits != 0).to(tl.int32)
            bits ^= lowest
        count += tl.sum(number)
    tl.debug_barrier()
    return count


@triton.jit
def read_listed(at, LISTED, count, FEW: tl.constexpr, TILE: tl.constexpr):
    """(tile, classes) of what `list_between` has listed, as large as that of `read_lanes`."""
    slots = lanes(0, FEW.DEPTH, FEW.FEW)
    ok = slots < tl.minimum(count, FEW.MOST)
    cols = tl.load(LISTED + tl.program_id(0).to(tl.int64) * FEW.MOST + slots, mask=ok, other=0)
    return read_classes(at, cols, ok, TILE), cols
