"""Attention backward from the saved (top, z) of each query: one kernel for the queries, one for keys and values, one for a bias.

With g_j = <dO, v_j> and s = 1 / omega''(p), the gradient of the scores is `s (g - delta)`, `delta = <s, g> / <s, 1>`. The kernel of the
queries subtracts an anchor from g, and finds the rest of delta in the same pass: with g' = g - anchor, dq = sum s g' k - rest sum s k.
Blocks without a probability are skipped. One program computes each sum, without atomics, so results are the same to the last bit.
"""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# type checkers can't read the code that Triton traces

from __future__ import annotations

import triton
import triton.language as tl

from .attention_forward import list_entry
from .attention_operands import Matrix, block_of, flags_of, head_of, load_block, once_more, seed_of, sink_of
from .attention_tile import (
    constants,
    dropped,
    lean,
    parameter,
    recalled,
    remembered,
    row_max,
    row_sum,
    score_tile,
    scores,
    seeing,
    seen,
    shares,
    slope_of,
    units,
)


@triton.jit
def level(c, FORM: tl.constexpr):
    """alpha - 1 as the forward used it."""
    if FORM.LINK == "budget":
        return tl.zeros_like(c) + 1.0
    elif FORM.LINK == "mixed" or FORM.LINK == "any":
        return tl.where((c != c) | (c <= -1.0), 1.0, tl.where(tl.abs(c) < 1e-7, 1e-7, c))
    else:
        return c


@triton.jit
def attention_queries(arrays, call, OUT, STATE, LISTS, COUNTS, G, DQ, ROWS, SUMS, plane, longest,
                      FORM: tl.constexpr, VIEW: tl.constexpr, LEARN: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
                      E: tl.constexpr):  # fmt: skip
    """Writes DQ, the numbers of each query for the other kernels to ROWS (see `remembered`), and with LEARN the gradients of the sink, the
    slope and the map's parameter to SUMS [., rows, 3]. Above alpha = 2 one s may be larger than all others by many orders of magnitude;
    its g is then the anchor, and a first sweep finds it."""
    rows, d, e = call.rows, call.d, call.e
    tall, wide = tl.cdiv(rows, M), tl.cdiv(call.keys, N)
    m, b, h, head = block_of(call, M)
    i0 = m * M
    i = i0 + tl.arange(0, M)[:, None]
    factor = units(call.scale, VIEW)[1]
    own = head_of(arrays, call, b, h, factor, VIEW)
    at = own.at
    seed = seed_of(arrays, VIEW)
    c = level(parameter(arrays, call, b, h, i, FORM), FORM)
    first_row = head.to(tl.int64) * rows
    state = STATE + (first_row + i) * 2
    top = tl.load(state, mask=i < rows, other=0.0).to(tl.float32)
    z = tl.load(state + 1, mask=i < rows, other=1.0)
    row = constants(top, z, c, slope_of(c, call.scale, VIEW), FORM)
    q = load_block(own.q, i0, M, D)
    pulls = Matrix(G + first_row * e, e, rows, e)
    g_out = load_block(pulls, i0, M, E)
    out = load_block(Matrix(OUT + first_row * e, e, rows, e), i0, M, E)
    anchor = row_sum(g_out.to(tl.float32) * out.to(tl.float32))
    rest = tl.zeros([M, 1], tl.float32)
    SWEEPS: tl.constexpr = 2 if FORM.LINK == "mixed" else 1
    begin, high = seen(i0, at, M, VIEW)
    begin = begin // N
    steps = tl.cdiv(high, N) - begin
    if FORM.LINK != "softmax":
        mine = LISTS + (head.to(tl.int64) * tall + m) * (longest + 32)
        listed = tl.load(COUNTS + head.to(tl.int64) * tall + m)
        over = listed > longest
        steps = tl.where(over, steps, listed)
    s0, s1 = tl.zeros([M, 1], tl.float32), tl.zeros([M, 1], tl.float32)  # sums of s and s g'
    h1 = tl.zeros([M, 1], tl.float32)  # sum of dp/dalpha times g
    l0, l1 = tl.zeros([M, 1], tl.float32), tl.zeros([M, 1], tl.float32)  # sums of s and s g' times the distance
    best = tl.zeros([M, 1], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    less = tl.zeros([M, D], tl.float32)
    if VIEW.SINK:
        extra = sink_of(arrays, head, i < at.count, VIEW)
        _, s0 = shares(extra, top, row, FORM)
        if SWEEPS == 2:
            best = s0
            anchor = tl.where(s0 > 0.0, 0.0, anchor)
        s1 = -s0 * anchor
    for sweep in tl.static_range(SWEEPS):
        for t in range(steps):
            n = begin + t
            if FORM.LINK != "softmax":
                # a hook on saved tensors may have changed the list, so its entries are clipped to the blocks that exist
                n = tl.minimum(tl.maximum(list_entry(mine, t, steps, over, begin), 0), wide - 1)
            j, k, x, rise = score_tile(q, own, n, i, i0, M, N, D, VIEW)
            p, s = shares(x, top, row, FORM)
            v = load_block(own.v, n * N, N, E)
            g_now = once_more(g_out, pulls, i0, n * N < call.keys, M, E)
            g = tl.dot(g_now, tl.trans(v), input_precision="ieee")
            g = dropped(g, i, j, head, seed, call.drop, VIEW)
            if SWEEPS == 2 and sweep == 0:
                most = row_max(s)
                first = tl.min(tl.where(s == most, j, 2147483647), 1, keep_dims=True)
                better = most > best
                to = tl.where(better, row_sum(tl.where(j == first, g, 0.0)), anchor)
                s1 += s0 * (anchor - to)
                anchor = to
                best = tl.maximum(best, most)
                s0 += row_sum(s)
                s1 += row_sum(tl.where(s == 0.0, 0.0, s * (g - anchor)))
            else:
                g -= anchor
                if SWEEPS == 2:
                    g -= rest
                pull = tl.where(s == 0.0, 0.0, s * g)
                if LEARN:
                    if FORM.LINK == "mixed":
                        bend = lean(p, s, row[5])
                        h1 += row_sum(tl.where(bend == 0.0, 0.0, bend * g))
                    if VIEW.ALIBI:
                        far = tl.abs(i + at.offset - j).to(tl.float32)
                        l1 += row_sum(pull * far)
                        if SWEEPS == 1 and FORM.LINK != "softmax":
                            l0 += row_sum(s * far)
                if SWEEPS == 1 and FORM.LINK != "softmax":
                    s0 += row_sum(s)
                    s1 += row_sum(pull)
                    if VIEW.CAP:
                        less = tl.dot((s * rise).to(k.dtype), k, less, input_precision="ieee")
                    else:
                        less = tl.dot(s.to(k.dtype), k, less, input_precision="ieee")
                if VIEW.CAP:
                    pull = pull * rise
                acc = tl.dot(pull.to(k.dtype), k, acc, input_precision="ieee")
        if SWEEPS == 2 and sweep == 0:
            rest = s1 / tl.where(s0 > 0.0, s0, 1.0)
    if SWEEPS == 1 and FORM.LINK != "softmax":
        rest = tl.where((s0 > 0.0) | (s0 != s0), s1 / tl.where(s0 > 0.0, s0, 1.0), 0.0)
        acc -= rest * less
    poisoned = (z != z) & (i < at.count)
    cols = tl.arange(0, D)[None, :]
    dq = tl.where(poisoned, float("nan"), acc * call.scale)
    tl.store(DQ + (first_row + i) * d + cols, dq.to(DQ.dtype.element_ty), mask=(i < rows) & (cols < d))
    EXACT: tl.constexpr = q.dtype == tl.float32
    remembered(ROWS + first_row, plane, i, rows, row, anchor, rest, FORM, EXACT)
    if LEARN:
        sums = SUMS + (first_row + i) * 3
        if VIEW.SINK:
            tl.store(sums, sink_pull(extra, top, row, anchor, rest, FORM), mask=i < rows)
        if VIEW.ALIBI:
            tl.store(sums + 1, rest * l0 - l1, mask=i < rows)
        if FORM.LINK == "mixed":
            if VIEW.SINK:
                sink_p, sink_s = shares(extra, top, row, FORM)
                h1 -= lean(sink_p, sink_s, row[5]) * (anchor + rest)
            tl.store(sums + 2, h1, mask=i < rows)
        if FORM.LINK == "budget":
            tl.store(sums + 2, tl.where(s0 > 0.0, anchor + rest, 0.0), mask=i < rows)


@triton.jit
def sink_pull(extra, top, row, anchor, rest, FORM: tl.constexpr):
    """The gradient of the sink's score; its g is 0, since its key has no value."""
    _, s = shares(extra, top, row, FORM)
    return tl.where(s == 0.0, 0.0, -s * (anchor + rest))


@triton.jit
def attention_keys(arrays, call, STATE, LISTS, FLAGS, G, DK, DV, ROWS, plane, coarse,
                   FORM: tl.constexpr, VIEW: tl.constexpr, M: tl.constexpr, N: tl.constexpr, T: tl.constexpr, SIZE: tl.constexpr,
                   D: tl.constexpr, E: tl.constexpr):  # fmt: skip
    """DK and DV of N keys: sums over the blocks of queries that FLAGS marks for them, in all heads that share the keys, T queries at a
    time. LISTS [programs, SIZE] takes SIZE of these blocks at a time."""
    rows, keys, d, e = call.rows, call.keys, call.d, call.e
    tall, wide = tl.cdiv(rows, M), tl.cdiv(keys, N)
    n = tl.program_id(0) % wide
    shared = tl.program_id(0) // wide  # the head of keys, counted over all batches
    b, h_k = shared // (call.heads // call.groups), shared % (call.heads // call.groups)
    j0 = n * N
    j = j0 + tl.arange(0, N)[:, None]
    factor = units(call.scale, VIEW)[1]
    own = head_of(arrays, call, b, h_k * call.groups, factor, VIEW)
    k, v = load_block(own.k, j0, N, D), load_block(own.v, j0, N, E)
    seed = seed_of(arrays, VIEW)
    dk = tl.zeros([N, D], tl.float32)
    dv = tl.zeros([N, E], tl.float32)
    for group in range(call.groups):
        h = h_k * call.groups + group
        head = b * call.heads + h
        own = head_of(arrays, call, b, h, factor, VIEW)
        first_row = head.to(tl.int64) * rows
        pulls = Matrix(G + first_row * e, e, rows, e)
        begin, high = seeing(j0, own.at, N, VIEW)
        end = tl.cdiv(high, M)
        mine = LISTS + tl.program_id(0).to(tl.int64) * SIZE
        bit = n // coarse
        flags = flags_of(FLAGS, call, head, coarse, M, N) + (bit // 32).to(tl.int64) * tall
        for first in range(begin // M, end, SIZE):
            steps = tl.minimum(SIZE, end - first)
            if FORM.LINK != "softmax":
                blocks = first + tl.arange(0, SIZE)
                live = (tl.load(flags + blocks, mask=blocks < end, other=0) >> (bit % 32)) & 1
                tl.debug_barrier()  # the previous list has been read
                tl.store(mine + tl.cumsum(live, 0) - live, blocks, mask=live > 0)
                steps = tl.sum(live)
                tl.debug_barrier()  # the list is complete
            for t in range(steps * (M // T)):
                m = first + t // (M // T)
                if FORM.LINK != "softmax":
                    m = tl.load(mine + t // (M // T))
                i0 = m * M + t % (M // T) * T
                i = i0 + tl.arange(0, T)[None, :]
                c = level(parameter(arrays, call, b, h, i, FORM), FORM)
                EXACT: tl.constexpr = k.dtype == tl.float32
                slope = slope_of(c, call.scale, VIEW)
                top, row, anchor, rest = recalled(
                    ROWS + first_row, plane, STATE + first_row * 2, i, rows, c, slope, FORM, EXACT
                )
                q, g_out = load_block(own.q, i0, T, D), load_block(pulls, i0, T, E)
                k_now = once_more(k, own.k, j0, i0 < rows, N, D)
                qk = tl.dot(k_now, tl.trans(q), input_precision="ieee")
                x, rise = scores(qk, i, j, i0, j0, own.at, own.terms, T, N, VIEW)
                p, s = shares(x, top, row, FORM)
                v_now = once_more(v, own.v, j0, i0 < rows, N, E)
                g = tl.dot(v_now, tl.trans(g_out), input_precision="ieee")
                p, g = dropped(p, i, j, head, seed, call.drop, VIEW), dropped(g, i, j, head, seed, call.drop, VIEW)
                dv = tl.dot(p.to(g_out.dtype), g_out, dv, input_precision="ieee")
                pull = tl.where(s == 0.0, 0.0, s * ((g - anchor) - rest))
                if VIEW.CAP:
                    pull = pull * rise
                dk = tl.dot(pull.to(q.dtype), q, dk, input_precision="ieee")
    cols = tl.arange(0, D)[None, :]
    first_key = shared.to(tl.int64) * keys
    tl.store(DK + (first_key + j) * d + cols, (dk * call.scale).to(DK.dtype.element_ty), mask=(j < keys) & (cols < d))
    cols = tl.arange(0, E)[None, :]
    tl.store(DV + (first_key + j) * e + cols, dv.to(DV.dtype.element_ty), mask=(j < keys) & (cols < e))


@triton.jit
def attention_bias(arrays, call, STATE, FLAGS, G, DB, ROWS, plane, batches, coarse, into,
                   ALL_B: tl.constexpr, ALL_H: tl.constexpr, ALL_I: tl.constexpr, ALL_J: tl.constexpr,
                   FORM: tl.constexpr, VIEW: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, E: tl.constexpr):  # fmt: skip
    """The gradient of an array that was added to the scores, with the steps `into`. The program sums over each axis of size 1 (ALL_...)."""
    rows, keys, heads, e = call.rows, call.keys, call.heads, call.e
    tall, wide = tl.cdiv(rows, M), tl.cdiv(keys, N)
    pid = tl.program_id(0)
    many_n = 1 if ALL_J else wide
    many_m = 1 if ALL_I else tall
    many_h = 1 if ALL_H else heads
    n_first = pid % many_n
    m_first = (pid // many_n) % many_m
    h_first = (pid // many_n // many_m) % many_h
    b_first = pid // many_n // many_m // many_h
    seed = seed_of(arrays, VIEW)
    acc = tl.zeros([M, N], tl.float32)
    nothing = (pid * 0).to(tl.int64)
    for b in range(b_first, batches if ALL_B else b_first + 1):
        for h in range(h_first, heads if ALL_H else h_first + 1):
            head = b * heads + h
            far_b, far_h = nothing + b, nothing + h
            factor = units(call.scale, VIEW)[1]
            own = head_of(arrays, call, far_b, far_h, factor, VIEW)
            first_row = (nothing + head) * rows
            pulls = Matrix(G + first_row * e, e, rows, e)
            for m in range(m_first, tall if ALL_I else m_first + 1):
                i0 = m * M
                i = i0 + tl.arange(0, M)[:, None]
                c = level(parameter(arrays, call, far_b, far_h, i, FORM), FORM)
                EXACT: tl.constexpr = arrays.q.dtype.element_ty == tl.float32
                slope = slope_of(c, call.scale, VIEW)
                top, row, anchor, rest = recalled(
                    ROWS + first_row, plane, STATE + first_row * 2, i, rows, c, slope, FORM, EXACT
                )
                low, high = seen(i0, own.at, M, VIEW)
                for n in range(n_first, wide if ALL_J else n_first + 1):
                    j0 = n * N
                    live = (j0 < high) & (j0 + N > low)
                    if FORM.LINK != "softmax":
                        bit = n // coarse
                        flags = flags_of(FLAGS, call, nothing + head, coarse, M, N) + (bit // 32) * tall + m
                        live = live & (((tl.load(flags) >> (bit % 32)) & 1) != 0)
                    if live:
                        q = load_block(own.q, i0, M, D)
                        j, _, x, _ = score_tile(q, own, n, i, i0, M, N, D, VIEW)
                        _, s = shares(x, top, row, FORM)
                        g_out, v = load_block(pulls, i0, M, E), load_block(own.v, j0, N, E)
                        g = tl.dot(g_out, tl.trans(v), input_precision="ieee")
                        g = dropped(g, i, j, head, seed, call.drop, VIEW)
                        pull = tl.where(s == 0.0, 0.0, s * ((g - anchor) - rest))
                        if ALL_I:
                            pull = tl.sum(pull, 0, keep_dims=True)
                        if ALL_J:
                            pull = row_sum(pull)
                        acc += pull
    i = (0 if ALL_I else m_first * M) + tl.arange(0, M)[:, None]
    j = (0 if ALL_J else n_first * N) + tl.arange(0, N)[None, :]
    to = DB + b_first.to(tl.int64) * into.b + h_first.to(tl.int64) * into.h
    to += i.to(tl.int64) * into.i + j.to(tl.int64) * into.j
    mask = (i < (1 if ALL_I else rows)) & (j < (1 if ALL_J else keys))
    tl.store(to, acc.to(DB.dtype.element_ty), mask=mask)
