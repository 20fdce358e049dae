"""Attention of few queries over many keys, as in decoding: the keys are cut in parts, with a program for each.

The queries of all heads that share keys are in one tile, or in as few as possible, so that keys are read once for them. Softmax takes one
pass and `attention_merge`. Threshold maps need all parts first: `attention_parts` stores the scores and the maximum of each block,
`attention_solve` finds the threshold of a query from the blocks that reach above it, and `attention_values` reads the values of only those.
Parts are summed in a fixed order, so results are the same to the last bit.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# type checkers can't read the code that Triton traces

from __future__ import annotations

import triton
import triton.language as tl

from .attention_operands import load_block, matrix_of, seed_of, sink_of, terms_of, window_of
from .attention_threshold import asked, first_guess, improved, with_sink
from .attention_tile import added, constants, dropped, risen, row_max, row_sum, scores, seen, settled, shares, units
from .tile import any_of

# the results of `attention_solve` for a query, in fp64: the threshold as (top, z), alpha - 1, the sum of the probabilities, the sink's part
# of it, and a status
TOP, LEVEL, POWER, MASS, SPARE, STANDS = (tl.constexpr(n) for n in range(6))
SOLVED = tl.constexpr(6)
NOTHING, FINE, BAD = (tl.constexpr(float(n)) for n in range(3))


@triton.jit
def packed(call, parts, M: tl.constexpr):
    """(part, batch, head of keys) of a program, (there, head, query) of each row of its tile, and its first query's index in the call."""
    groups, rows = call.groups, call.rows
    tall = tl.cdiv(groups * rows, M)
    part, own = tl.program_id(0) % parts, tl.program_id(0) // parts
    tile, own = own % tall, own // tall
    shared = call.heads // groups
    b, h_k = own // shared, own % shared
    r = tile * M + tl.arange(0, M)[:, None]
    there = r < groups * rows
    h = h_k * groups + tl.where(there, r // rows, 0)
    i = tl.where(there, r % rows, M)  # a row beyond the last query sees no key
    return part, b, h_k, there, h, i, (b * call.heads + h_k * groups).to(tl.int64) * rows + tile * M


@triton.jit
def attention_parts(arrays, call, SCORES, TOPS, SUMS, PARTIAL, parts, FORM: tl.constexpr, VIEW: tl.constexpr, M: tl.constexpr,
                    N: tl.constexpr, D: tl.constexpr, E: tl.constexpr):  # fmt: skip
    """One program has every `parts`-th block of the keys of one head. Softmax writes the maximum and the sum to SUMS [queries, parts, 2],
    the output to PARTIAL [queries, parts, e]. Other maps write the scores to SCORES [queries, blocks, N] and the maximum of each block,
    or +inf if one is NaN, to TOPS [queries, blocks]; a budget writes the lowest score and the number of scores to SUMS."""
    part, b, h_k, there, h, i, first_row = packed(call, parts, M)
    head = b * call.heads + h
    at_row = first_row + tl.arange(0, M)[:, None]
    keys = matrix_of(arrays.k, call.steps.k, b, h_k, call.keys, call.d)
    values = matrix_of(arrays.v, call.steps.v, b, h_k, call.keys, call.e)
    unit, factor = units(call.scale, VIEW)
    at = window_of(arrays, call, b, VIEW)
    terms = terms_of(arrays, call, b, h, factor, VIEW)
    wide = tl.cdiv(call.keys, N)
    i0 = part * 0
    low, high = seen(i0, at, M, VIEW)
    begin, end = low // N, tl.cdiv(high, N)
    seed = seed_of(arrays, VIEW)
    cols = tl.arange(0, D)[None, :]
    at_q = matrix_of(arrays.q, call.steps.q, b, h, call.rows, call.d).first + i.to(tl.int64) * call.steps.q.i
    q = tl.load(at_q + cols, mask=there & (cols < call.d), other=0.0)
    acc = tl.zeros([M, E], tl.float32)
    extreme = tl.full([M, 1], float("-inf"), tl.float32)  # the maximum; for a budget the lowest score
    # the sum; for a budget the number of scores
    amount, lost = tl.zeros([M, 1], tl.float32), tl.zeros([M, 1], tl.float32)
    if FORM.LINK == "budget":
        extreme = -extreme
    level = extreme
    for n in range(begin + part, end, parts):
        j0 = n * N
        j = j0 + tl.arange(0, N)[None, :]
        k = load_block(keys, j0, N, D)
        x, _ = scores(tl.dot(q, tl.trans(k), input_precision="ieee"), i, j, i0, j0, at, terms, M, N, VIEW)
        if FORM.LINK == "softmax":
            p, fade, extreme, level, amount, lost = risen(x, extreme, level, amount, lost, unit)
            p = dropped(p, i, j, head, seed, call.drop, VIEW)
            v = load_block(values, j0, N, E)
            acc = tl.dot(p.to(v.dtype), v, acc * fade, input_precision="ieee")
        else:
            tl.store(SCORES + at_row * (wide * N) + j, x, mask=there)
            tl.store(TOPS + at_row * wide + n, row_max(tl.where(x == x, x, float("inf"))), mask=there)
            if FORM.LINK == "budget":
                here = x > float("-inf")
                extreme = tl.minimum(extreme, tl.min(tl.where(here, x, float("inf")), 1, keep_dims=True))
                amount += row_sum(tl.where(here, 1.0, 0.0))
    at_part = at_row * parts + part
    whole = amount.to(tl.float64) + lost
    if FORM.LINK == "softmax":
        extreme, whole = settled(extreme, level, amount, lost, unit, call.scale, VIEW)
    if FORM.LINK == "softmax" or FORM.LINK == "budget":
        tl.store(SUMS + at_part * 2, extreme.to(tl.float64), mask=there)
        tl.store(SUMS + at_part * 2 + 1, whole, mask=there)
    if FORM.LINK == "softmax":
        cols = tl.arange(0, E)[None, :]
        tl.store(PARTIAL + at_part * call.e + cols, acc, mask=there & (cols < call.e))


@triton.jit
def attention_solve(arrays, call, SCORES, TOPS, SUMS, LISTS, STATE, parts, enough, FORM: tl.constexpr, VIEW: tl.constexpr,
                    M: tl.constexpr, N: tl.constexpr, W: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """One program finds the threshold of one query, from the maxima of its blocks, W at a time, and the scores of the blocks that reach
    above it, C at a time."""
    query = tl.program_id(0)
    head = query // call.rows
    b, h = head // call.heads, head % call.heads
    i = tl.zeros([1, 1], tl.int32) + query % call.rows
    wide = tl.cdiv(call.keys, N)
    tops = TOPS + query.to(tl.int64) * wide
    mine = LISTS + query.to(tl.int64) * (tl.cdiv(wide, parts) * parts)
    at_scores = SCORES + query.to(tl.int64) * (wide * N)
    at = window_of(arrays, call, b, VIEW)
    low, high = seen(query * 0, at, M, VIEW)
    begin, end = low // N, tl.cdiv(high, N)
    extra = sink_of(arrays, head, i < at.count, VIEW)
    c, mass, unsound = asked(arrays, call, b, h, i, FORM)
    lanes = tl.full([1, W], float("-inf"), tl.float32)
    for first in range(begin, end, W):
        n = first + tl.arange(0, W)[None, :]
        lanes = tl.maximum(lanes, tl.load(tops + n, mask=n < end, other=float("-inf")))
    top = row_max(lanes)
    bad = (top == float("inf")) | (extra != extra) | (extra == float("inf"))
    top = tl.maximum(top, extra)
    alive = (top > float("-inf")) & (bad == 0) & (unsound == 0)
    top = tl.where(alive, top, 0.0)
    lanes = tl.where(alive, lanes, float("-inf"))
    extra = tl.where(alive, extra, float("-inf"))
    lowest = tl.where(extra > float("-inf"), extra, float("inf"))
    number = tl.where(extra > float("-inf"), 1.0, 0.0).to(tl.float64)
    if FORM.LINK == "budget":
        for first in range(0, parts, W):
            part = first + tl.arange(0, W)[None, :]
            sums = SUMS + (query.to(tl.int64) * parts + part) * 2
            least = tl.load(sums, mask=part < parts, other=float("inf")).to(tl.float32)
            lowest = tl.minimum(lowest, tl.min(least, 1, keep_dims=True))
            number += row_sum(tl.load(sums + 1, mask=part < parts, other=0.0))
    z, floor, ceiling, width, mass, c, go = first_guess(
        (lanes,), extra, top, lowest, number, mass, c, c, alive, FORM, VIEW, 4
    )
    RATE: tl.constexpr = tl.float64 if FORM.LINK == "mixed" else tl.float32  # pyright: ignore[reportAssignmentType]
    turn = 0
    while any_of(go) & (turn < 80):
        # (in Triton 3.4, a name within a loop can't have two shapes)
        tl.debug_barrier()  # the list of the previous turn has been read
        row = constants(top, z, c, c, FORM)
        live = 0
        for first in range(begin, end, W):
            n = first + tl.arange(0, W)[None, :]
            value, _of_lane = shares(tl.load(tops + n, mask=n < end, other=float("-inf")), top, row, FORM)
            matters = (value > 0.0).to(tl.int32)
            tl.store(mine + live + tl.cumsum(matters, 1) - matters, n, mask=matters > 0)
            live += tl.sum(tl.sum(matters, 1), 0)
        tl.debug_barrier()  # the list is complete
        s0, lost, s1 = tl.zeros([1, 1], tl.float32), tl.zeros([1, 1], tl.float32), tl.zeros([1, 1], RATE)
        size = tl.zeros([1, 1], tl.float32)
        # scores in one row, like the maxima: another shape would have another layout and spill registers
        for first in range(0, live * N, C):
            t = first + tl.arange(0, C)[None, :]
            n = tl.load(mine + t // N, mask=t < live * N, other=0).to(tl.int64)
            x = tl.load(at_scores + n * N + t % N, mask=t < live * N, other=float("-inf"))
            value, rate = shares(x, top, row, FORM)
            s0, lost = added(s0, lost, row_sum(value))
            s1 += row_sum(rate).to(RATE)
            if FORM.LINK == "power" and FORM.P == 2:
                size += row_sum(tl.where(rate > 0.0, 1.0, 0.0))
        s0 = s0.to(tl.float64) + lost
        if VIEW.SINK:
            s0, s1 = with_sink(s0, s1, extra, top, row, FORM)
            sink_value, _of_sink = shares(extra, top, row, FORM)
            size += tl.where(sink_value > 0.0, 1.0, 0.0)
        z, floor, ceiling, width, go = improved(z, floor, ceiling, width, s0, s1, size, mass, c, go, enough, FORM)
        turn += 1
    spare = tl.zeros([1, 1], tl.float64)
    if VIEW.SINK:
        spare, _ = with_sink(spare, spare, extra, top, constants(top, z, c, c, FORM), FORM)
    state = STATE + query.to(tl.int64) * SOLVED + tl.zeros([1, 1], tl.int32)
    tl.store(state + TOP, top.to(tl.float64))
    tl.store(state + LEVEL, z)
    tl.store(state + POWER, c)
    tl.store(state + MASS, mass)
    tl.store(state + SPARE, spare)
    stands = tl.where((bad | unsound) & (i < at.count), BAD, tl.where(alive, FINE, NOTHING))
    tl.store(state + STANDS, stands.to(tl.float64))


@triton.jit
def attention_values(arrays, call, SCORES, TOPS, SUMS, LISTS, STATE, PARTIAL, parts, FORM: tl.constexpr, VIEW: tl.constexpr,
                     M: tl.constexpr, N: tl.constexpr, E: tl.constexpr, W: tl.constexpr):  # fmt: skip
    """One program computes the output from the blocks of its part in which some query of the tile has a probability. SUMS takes the sum of
    the probabilities, and whether there are any."""
    part, b, h_k, there, h, i, first_row = packed(call, parts, M)
    head = b * call.heads + h
    at_row = first_row + tl.arange(0, M)[:, None]
    wide = tl.cdiv(call.keys, N)
    each = tl.cdiv(wide, parts)
    mine = LISTS + first_row * (each * parts) + part * each
    values = matrix_of(arrays.v, call.steps.v, b, h_k, call.keys, call.e)
    low, high = seen(part * 0, window_of(arrays, call, b, VIEW), M, VIEW)
    begin, end = low // N, tl.cdiv(high, N)
    seed = seed_of(arrays, VIEW)
    state = STATE + at_row * SOLVED
    top = tl.load(state + TOP, mask=there, other=0.0).to(tl.float32)
    z = tl.load(state + LEVEL, mask=there, other=1.0)
    c = tl.load(state + POWER, mask=there, other=1.0)
    alive = tl.load(state + STANDS, mask=there, other=0.0) == FINE
    row = constants(top, z, c, c, FORM)
    live = 0
    for first in range(begin + part, end, parts * W):
        n = first + parts * tl.arange(0, W)[None, :]
        tops = tl.load(TOPS + at_row * wide + n, mask=alive & (n < end), other=float("-inf"))
        value, _ = shares(tops, top, row, FORM)
        matters = tl.max((alive & (value > 0.0)).to(tl.int32), 0, keep_dims=True)
        tl.store(mine + live + tl.cumsum(matters, 1) - matters, n, mask=matters > 0)
        live += tl.sum(tl.sum(matters, 1), 0)
    tl.debug_barrier()  # the list is complete
    acc = tl.zeros([M, E], tl.float32)
    s0, lost = tl.zeros([M, 1], tl.float32), tl.zeros([M, 1], tl.float32)
    for t in range(live):
        j0 = tl.load(mine + t) * N
        j = j0 + tl.arange(0, N)[None, :]
        x = tl.load(SCORES + at_row * (wide * N) + j, mask=alive, other=float("-inf"))
        value, _ = shares(x, top, row, FORM)
        value = tl.where(alive, value, 0.0)
        s0, lost = added(s0, lost, row_sum(value))
        value = dropped(value, i, j, head, seed, call.drop, VIEW)
        v = load_block(values, j0, N, E)
        acc = tl.dot(value.to(v.dtype), v, acc, input_precision="ieee")
    at_part = at_row * parts + part
    tl.store(SUMS + at_part * 2, s0.to(tl.float64) + lost, mask=there)
    tl.store(SUMS + at_part * 2 + 1, tl.where(alive & (live > 0), 1.0, 0.0).to(tl.float64), mask=there)
    if live > 0:
        cols = tl.arange(0, E)[None, :]
        tl.store(PARTIAL + at_part * call.e + cols, acc, mask=there & (cols < call.e))


@triton.jit
def attention_merge(arrays, call, SUMS, STATE, PARTIAL, OUT, parts, FORM: tl.constexpr, VIEW: tl.constexpr, E: tl.constexpr,
                    C: tl.constexpr):  # fmt: skip
    """One program computes the output of one query, C parts at a time."""
    query, e = tl.program_id(0), call.e
    head = query // call.rows
    cols = tl.arange(0, E)[None, :]
    at_sums = SUMS + query.to(tl.int64) * parts * 2
    at_partial = PARTIAL + query.to(tl.int64) * parts * e
    acc = tl.zeros([C, E], tl.float32)
    s0 = tl.zeros([C, 1], tl.float64)
    if FORM.LINK == "softmax":
        at = window_of(arrays, call, head // call.heads, VIEW)
        top = sink_of(arrays, head, tl.zeros([1, 1], tl.int32) + query % call.rows < at.count, VIEW)
        extra = top
        for first in range(0, parts, C):
            part = first + tl.arange(0, C)[:, None]
            own = tl.load(at_sums + part * 2, mask=part < parts, other=float("-inf")).to(tl.float32)
            top = tl.maximum(top, tl.max(own, 0, keep_dims=True))
        base = tl.where(top > float("-inf"), top, 0.0)
        for first in range(0, parts, C):
            part = first + tl.arange(0, C)[:, None]
            own = tl.load(at_sums + part * 2, mask=part < parts, other=float("-inf")).to(tl.float32)
            fade = tl.exp(own - base)
            s0 += fade * tl.load(at_sums + part * 2 + 1, mask=part < parts, other=0.0)
            acc += fade * tl.load(at_partial + part * e + cols, mask=(part < parts) & (cols < e), other=0.0)
        total = tl.sum(s0, 0, keep_dims=True)
        if VIEW.SINK:
            total += tl.exp(extra - base)
        bad = (total != total) | (total == float("inf"))
        mass = tl.zeros([1, 1], tl.float64) + 1.0
    else:
        state = STATE + query.to(tl.int64) * SOLVED + tl.zeros([1, 1], tl.int32)
        for first in range(0, parts, C):
            part = first + tl.arange(0, C)[:, None]
            s0 += tl.load(at_sums + part * 2, mask=part < parts, other=0.0)
            there = tl.load(at_sums + part * 2 + 1, mask=part < parts, other=0.0) > 0.0
            acc += tl.load(at_partial + part * e + cols, mask=there & (cols < e), other=0.0)
        total = tl.sum(s0, 0, keep_dims=True) + tl.load(state + SPARE)
        bad = tl.load(state + STANDS) == BAD
        mass = tl.load(state + MASS)
    norm = tl.where(total > 0.0, mass / tl.where(total > 0.0, total, 1.0), 0.0).to(tl.float32)
    out = tl.where(bad, float("nan"), tl.sum(acc, 0, keep_dims=True) * norm)
    tl.store(OUT + query.to(tl.int64) * e + cols, out.to(OUT.dtype.element_ty), mask=cols < e)
