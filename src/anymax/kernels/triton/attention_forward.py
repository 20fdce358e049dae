"""Attention forward: the threshold of each query from blocks of keys, then the output, without the matrix of scores.

A dense pass keeps the three highest scores of each lane, two columns of the blocks, and the root of these scores bounds the threshold. It
lists the blocks with a score above the current bound, and skips the product of a block whose centre and radius show that it has none. It
begins at the diagonal, where most models have high scores. Newton steps and the output pass run over the list, which each pass shortens.
Where the third scores have next to no probability, a fourth has none, so the output pass begins at once, and its sums say whether the
threshold was right. Softmax needs one pass, with a running maximum.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# type checkers can't read the code that Triton traces

from __future__ import annotations

import triton
import triton.language as tl

from .attention_operands import block_of, flags_of, head_of, load_block, matrix_of, once_more, seed_of, sink_of
from .attention_threshold import asked, first_guess, improved, lanes_reach, noticed, with_sink
from .attention_tile import (
    added,
    constants,
    dropped,
    fall,
    risen,
    row_max,
    row_sum,
    score_tile,
    seen,
    settled,
    shares,
    slope_of,
    units,
    whole_blocks,
)
from .tile import any_of

NEAR = tl.constexpr(4)  # blocks next to the diagonal, which give the first bound
SURE = tl.constexpr(0.06)  # the most probability of third scores with which the threshold of the lanes is tried


@triton.jit
def outwards(t, begin, mid):
    """The t-th block of keys: from `mid` down to `begin`, then up from `mid`."""
    return tl.where(t < mid - begin, mid - 1 - t, begin + t)


@triton.jit
def by_rows(v, M: tl.constexpr):
    """v [M, 1] of another layout. A thread then reads each row once; as a matrix it would read a row again for each column that it has."""
    return tl.expand_dims(tl.reshape(v, [M]), 1)


@triton.jit
def either(a, b):
    return a | b


@triton.jit
def list_entry(mine, t, size, over, begin):
    """Entry t of a list of `size` blocks; block begin + t if the list exceeded its limit (`over`) and means all blocks."""
    return tl.where(over, begin + t, tl.load(mine + t, mask=t < tl.where(over, 0, size), other=0).to(tl.int32))


@triton.jit
def shortened(mine, here, live, size, bits, over, begin, longest, FLAGS, tall, coarse, SAVE: tl.constexpr):
    """Of the `size` <= 32 entries of the list from `here` on, moves those whose bit is set in some row to position `live`, and returns the
    new end. The list holds the first `longest`. With SAVE, FLAGS is the column of the table of `attention_forward`."""
    t = tl.arange(0, 32)
    on = ((tl.reduce(bits, None, either) >> t) & 1).to(tl.int32)
    n = list_entry(mine, here + t, here + size, over, begin)
    tl.debug_barrier()  # all threads have read the entries that are now overwritten
    place = live + tl.cumsum(on, 0) - on
    tl.store(mine + place, n.to(mine.dtype.element_ty), mask=(on > 0) & (place < longest))
    if SAVE:
        bit = n // coarse
        tl.atomic_or(FLAGS + (bit // 32).to(tl.int64) * tall, on << (bit % 32), mask=on > 0, sem="relaxed")
    return live + tl.sum(on)


@triton.jit
def attention_centres(arrays, call, CENTRES, RADII, N: tl.constexpr, D: tl.constexpr):
    """The centre of each block of keys, in the dtype of keys, and the largest distance of its keys, plus a margin for rounding."""
    wide, shared = tl.cdiv(call.keys, N), call.heads // call.groups
    n = tl.program_id(0) % wide
    own = tl.program_id(0) // wide
    j0 = n * N
    inside = (j0 + tl.arange(0, N)[:, None]) < call.keys
    keys = matrix_of(arrays.k, call.steps.k, own // shared, own % shared, call.keys, call.d)
    k = load_block(keys, j0, N, D).to(tl.float32)
    centre = (tl.sum(k, 0, keep_dims=True) / tl.minimum(N, call.keys - j0)).to(CENTRES.dtype.element_ty)
    from_centre = tl.where(inside, k - centre.to(tl.float32), 0.0)
    radius = tl.sqrt(row_sum(from_centre * from_centre))
    radius = tl.max(tl.where(radius == radius, radius, float("inf")))
    size = tl.sqrt(tl.sum(centre.to(tl.float32) * centre.to(tl.float32)))
    at = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, D)[None, :]
    tl.store(CENTRES + at * call.d + cols, centre, mask=cols < call.d)
    tl.store(RADII + at, radius + 1e-4 * (radius + size))


@triton.jit
def output_of(q, own, i, i0, row, top, extra, mine, live, over, begin, longest, flags, tall, coarse, head, seed, drop,
              FORM: tl.constexpr, VIEW: tl.constexpr, SAVE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
              E: tl.constexpr, RATE: tl.constexpr):  # fmt: skip
    """(the sum of p v, the sums of p and of its rates, the new end of the list) of the `live` blocks of the list."""
    s0, lost, s1 = tl.zeros([M, 1], tl.float32), tl.zeros([M, 1], tl.float32), tl.zeros([M, 1], RATE)
    acc = tl.zeros([M, E], tl.float32)
    if VIEW.SINK:
        s0, s1 = with_sink(s0, s1, extra, top, row, FORM)
    kept = 0 if SAVE else live
    for begin_32 in range(0, live, 32):
        size = tl.minimum(32, live - begin_32)
        bits = tl.zeros([M, 1], tl.int32)
        for t in range(size):
            n = list_entry(mine, begin_32 + t, live, over, begin)
            j, _, x, _ = score_tile(q, own, n, i, i0, M, N, D, VIEW)
            value, rate = shares(x, top, row, FORM)
            sum_value = row_sum(value)
            s0, lost = added(s0, lost, sum_value)
            s1 += row_sum(rate).to(RATE)
            bits |= tl.where(sum_value > 0.0, tl.full([M, 1], 1, tl.int32) << t, 0)
            value = dropped(value, i, j, head, seed, drop, VIEW)
            v = load_block(own.v, n * N, N, E)
            acc = tl.dot(value.to(v.dtype), v, acc, input_precision="ieee")
        if SAVE:
            kept = shortened(mine, begin_32, kept, size, bits, over, begin, longest, flags, tall, coarse, True)
    return acc, s0.to(tl.float64) + lost, s1, kept


@triton.jit
def attention_forward(arrays, call, OUT, STATE, LISTS, COUNTS, FLAGS, CENTRES, RADII, enough, close, longest, coarse,
                      FORM: tl.constexpr, VIEW: tl.constexpr, SAVE: tl.constexpr, SKIP: tl.constexpr,
                      M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, E: tl.constexpr):  # fmt: skip
    """One program has M queries of one head. STATE [., rows, 2] takes (top, z) of each query, for `constants`. LISTS [., blocks of queries,
    longest + 32] lists blocks of keys: at first those that may have a probability, at the end the COUNTS blocks that have one. A list of
    more than `longest` means all blocks that the queries see. With SAVE, FLAGS [., words, blocks of queries] has a bit for each `coarse`
    blocks of keys. `enough`: the error of a sum with which a Newton step is the last; `close`: that with which none is needed."""
    tall, wide = tl.cdiv(call.rows, M), tl.cdiv(call.keys, N)
    m, b, h, head = block_of(call, M)
    i0 = m * M
    i = i0 + tl.arange(0, M)[:, None]
    unit, factor = units(call.scale, VIEW)
    own = head_of(arrays, call, b, h, factor, VIEW)
    at = own.at
    low, high = seen(i0, at, M, VIEW)
    begin, end = low // N, tl.cdiv(high, N)
    extra = sink_of(arrays, head, i < at.count, VIEW)
    seed = seed_of(arrays, VIEW)
    c, mass, unsound = asked(arrays, call, b, h, i, FORM)
    q = load_block(own.q, i0, M, D)
    acc = tl.zeros([M, E], tl.float32)
    end = tl.maximum(begin, end)
    first, last = whole_blocks(i0, at, begin, end, M, N, VIEW)
    if FORM.LINK == "softmax":
        top, level = extra, extra * unit
        s0 = tl.where(extra > float("-inf"), 1.0, 0.0)
        lost = tl.zeros([M, 1], tl.float32)
        for sweep in tl.static_range(2):  # the blocks without a masked key, then the others
            steps = last - first if sweep == 0 else (first - begin) + (end - last)
            for t in range(steps):
                n = first + t if sweep == 0 else tl.where(t < first - begin, begin + t, last + t - (first - begin))
                j, _, x, _ = score_tile(q, own, n, i, i0, M, N, D, VIEW, sweep == 0)
                p, fade, top, level, s0, lost = risen(x, top, level, s0, lost, unit)
                p = dropped(p, i, j, head, seed, call.drop, VIEW)
                v = load_block(own.v, n * N, N, E, sweep == 0)
                acc = tl.dot(p.to(v.dtype), v, acc * fade, input_precision="ieee")
        top, total = settled(top, level, s0, lost, unit, call.scale, VIEW)
        # a whole block masks no query, so those that do not exist have sums too
        there = i < at.count
        alive, bad = there & (top > float("-inf")), there & ((total != total) | (total == float("inf")))
        top, total, acc = tl.where(alive, top, 0.0), tl.where(there, total, 0.0), tl.where(there, acc, 0.0)
        z = tl.where(bad, float("nan"), tl.log(tl.where(total > 0.0, total, 1.0)))
    else:
        mine = LISTS + (head.to(tl.int64) * tall + m) * (longest + 32)
        slope = slope_of(c, call.scale, VIEW)
        first_of = tl.full([M, N // 2], float("-inf"), tl.float32)
        second_of, third_of = first_of, first_of
        top = extra
        bound = tl.where(i < at.count, float("-inf"), float("inf"))
        # scores so far below the maximum are never in the support
        reach = tl.where(c > 0.0, 1.0 / slope, float("inf")).to(tl.float32) * 1.000001
        lowest = tl.zeros([M, 1], tl.float32) + float("inf")
        number = tl.zeros([M, 1], tl.float32)
        if FORM.LINK == "budget":
            lowest = tl.where(extra > float("-inf"), extra, float("inf"))
            number = tl.where(extra > float("-inf"), 1.0, 0.0)
        mid = tl.minimum(tl.maximum((i0 + M - 1 + at.offset) // N + 1, first), last)
        cut = end - last + first - begin
        live = cut + tl.minimum(last - first, NEAR)
        for t in range(live):  # the blocks that a mask cuts, then some next to the diagonal
            n = tl.where(
                t < end - last, end - 1 - t, tl.where(t < cut, begin + t - (end - last), outwards(t - cut, first, mid))
            )
            tl.store(mine + t, n.to(LISTS.dtype.element_ty), mask=t < longest)
            _, _, x, _ = score_tile(q, own, n, i, i0, M, N, D, VIEW)
            first_of, second_of, third_of, lowest, number, _ = noticed(
                x, first_of, second_of, third_of, lowest, number, M, N, FORM
            )
        top = tl.maximum(top, row_max(first_of))
        if FORM.LINK != "budget":
            bound = lanes_reach((first_of, second_of), extra, top, bound, reach, c, slope, FORM, VIEW)
        wanted = tl.arange(0, 32)
        bit = tl.full([M, 1], 1, tl.int32)
        size_q = tl.zeros([M, 1], tl.float32)
        if SKIP:
            size_q = tl.sqrt(row_sum(q.to(tl.float32) * q.to(tl.float32))) * 1.0001
            if not VIEW.FOLD:
                size_q *= tl.abs(factor)
        for begin_32 in range(NEAR, last - first, 32):
            size = tl.minimum(32, last - first - begin_32)
            places = outwards(begin_32 + wanted, first, mid)
            new = mine + tl.minimum(live, longest)
            if SKIP:
                # no key of a block scores higher than its centre would if moved by the radius in the direction of q
                shared = b * (call.heads // call.groups) + h // call.groups
                at_places = shared.to(tl.int64) * wide + places
                cols = tl.arange(0, D)[None, :]
                some = (wanted[:, None] < size) & (cols < call.d)
                centre = tl.load(CENTRES + at_places[:, None] * call.d + cols, mask=some, other=0.0)
                radius = tl.load(RADII + at_places, mask=wanted < size, other=0.0)
                q_now = once_more(q, own.q, i0, size > 0, M, D)
                peak = tl.dot(q_now, tl.trans(centre), input_precision="ieee") * factor + size_q * radius[None, :]
                may = tl.max(tl.where(peak < bound, 0, 1), 0)
                may = tl.where(wanted < size, may, 0)
                tl.store(new + tl.cumsum(may, 0) - may, places.to(LISTS.dtype.element_ty), mask=may > 0)
                size = tl.sum(may)
            else:
                tl.store(new + wanted, places.to(LISTS.dtype.element_ty), mask=wanted < size)
            tl.debug_barrier()
            bits = tl.zeros([M, 1], tl.int32)
            # an entry is read one block ahead: its load then precedes the products, and the keys of the next block do not wait for it
            following = tl.load(new).to(tl.int32)
            for t in range(size):
                n = following
                following = tl.load(new + tl.minimum(t + 1, size - 1)).to(tl.int32)
                _, _, x, _ = score_tile(q, own, n, i, i0, M, N, D, VIEW, True)
                first_of, second_of, third_of, lowest, number, peak_of = noticed(
                    x, first_of, second_of, third_of, lowest, number, M, N, FORM
                )
                if FORM.LINK == "budget":
                    bits |= bit << t
                else:
                    bits |= tl.where(peak_of < bound, 0, bit << t)
            now = shortened(
                mine, tl.minimum(live, longest), live, size, bits, size < 0, 0, longest, FLAGS, tall, coarse, False
            )
            if FORM.LINK != "budget":  # noqa: SIM102
                if now > live:
                    top = tl.maximum(top, row_max(first_of))
                    bound = lanes_reach((first_of, second_of), extra, top, bound, reach, c, slope, FORM, VIEW)
            live = now
        top = tl.maximum(top, row_max(first_of))
        over = live > longest
        bad = row_max((((first_of == first_of) & (first_of < float("inf"))) == 0).to(tl.int32)) > 0
        bad = bad | (extra != extra) | (extra == float("inf"))
        alive = (top > float("-inf")) & (bad == 0) & (unsound == 0) & (i < at.count)
        top = tl.where(alive, top, 0.0)
        first_of = tl.where(alive, first_of, float("-inf"))
        extra = tl.where(alive, extra, float("-inf"))
        number = number.to(tl.float64)
        TRIED: tl.constexpr = FORM.LINK == "power" or FORM.LINK == "root"
        lanes = (first_of, second_of, third_of) if TRIED else (first_of, second_of)
        z, floor, ceiling, width, mass, c, go = first_guess(
            lanes, extra, top, lowest, number, mass, c, slope, alive, FORM, VIEW, 8 if TRIED else 4
        )
        if TRIED:
            last_of, _last_rate = shares(third_of, top, constants(top, z, c, slope, FORM), FORM)
            go = go & any_of(go & (row_sum(last_of) > SURE))
        top, z, alive, bad, go = by_rows(top, M), by_rows(z, M), by_rows(alive, M), by_rows(bad, M), by_rows(go, M)
        RATE: tl.constexpr = tl.float64 if FORM.LINK == "mixed" else tl.float32  # pyright: ignore[reportAssignmentType]  # above alpha = 2 rates have no bound
        flags = flags_of(FLAGS, call, head, coarse, M, N) + m
        due = begin == begin  # the output is to be computed
        total, rates = tl.zeros([M, 1], tl.float64), tl.zeros([M, 1], RATE)
        if TRIED:
            due = any_of(go)
            if due == 0:
                tl.debug_barrier()  # the list is complete
                acc, total, rates, live = output_of(q, own, i, i0, constants(top, z, c, slope, FORM), top, extra, mine,
                                              tl.where(over, end - begin, live), over, begin, longest, flags, tall, coarse, head, seed,
                                              call.drop, FORM, VIEW, SAVE, M, N, D, E, RATE)  # fmt: skip
                short = alive & (tl.abs(total - mass) > close)
                over = live > longest
                due = any_of(short)
                if due:
                    z = tl.where(short, z - fall(total, rates, c, FORM).to(tl.float64), z)
                    go = short & (total - mass > enough)
                    if SAVE:
                        tl.debug_barrier()  # all bits of this pass are set
                        for word in range(tl.cdiv(tl.cdiv(wide, coarse), 32)):
                            tl.store(flags + tall.to(tl.int64) * word, 0)
        turn = 0
        while any_of(go) & (turn < 80):
            tl.debug_barrier()  # the list of the previous pass is complete
            row = constants(top, z, c, slope, FORM)
            s0, lost, s1 = tl.zeros([M, 1], tl.float32), tl.zeros([M, 1], tl.float32), tl.zeros([M, 1], RATE)
            supported = tl.zeros([M, 1], tl.float32)
            if VIEW.SINK:
                s0, s1 = with_sink(s0, s1, extra, top, row, FORM)
                supported = tl.where(s1 > 0.0, 1.0, 0.0)
            were = tl.where(over, end - begin, live)
            live = 0
            for begin_32 in range(0, were, 32):
                size = tl.minimum(32, were - begin_32)
                bits = tl.zeros([M, 1], tl.int32)
                following = list_entry(mine, begin_32, were, over, begin)
                for t in range(size):
                    n = following
                    following = list_entry(mine, begin_32 + t + 1, were, over, begin)
                    _, _, x, _ = score_tile(q, own, n, i, i0, M, N, D, VIEW)
                    value, rate = shares(x, top, row, FORM)
                    sum_value = row_sum(value)
                    s0, lost = added(s0, lost, sum_value)
                    s1 += row_sum(rate).to(RATE)
                    if FORM.LINK == "power" and FORM.P == 2:
                        supported += row_sum(tl.minimum(rate * 1e30, 1.0))
                    bits |= tl.where(sum_value > 0.0, bit << t, 0)
                # thresholds only rise, so blocks stay out
                if FORM.LINK == "power" or FORM.LINK == "any" or FORM.LINK == "root":
                    live = shortened(mine, begin_32, live, size, bits, over, begin, longest, FLAGS, tall, coarse, False)
                else:
                    live += size
            over = live > longest
            s0 = s0.to(tl.float64) + lost
            z, floor, ceiling, width, go = improved(
                z, floor, ceiling, width, s0, s1, supported, mass, c, go, enough, FORM
            )
            turn += 1
        if due:
            tl.debug_barrier()
            acc, total, rates, live = output_of(q, own, i, i0, constants(top, z, c, slope, FORM), top, extra, mine,
                                          tl.where(over, end - begin, live), over, begin, longest, flags, tall, coarse, head, seed,
                                          call.drop, FORM, VIEW, SAVE, M, N, D, E, RATE)  # fmt: skip
        # one more Newton step takes the remaining error of the sum into the level
        left_over = (total - mass) / tl.where(rates > 0.0, rates, 1.0) * c
        z = tl.where(alive & (rates > 0.0) & (c <= 1.0) & (tl.abs(total - mass) < 0.01), z - left_over, z)
        bad = (bad | unsound) & (i < at.count)
        z = tl.where(bad, float("nan"), z)
        if SAVE:
            tl.store(COUNTS + head.to(tl.int64) * tall + m, live)
    norm = tl.where(total > 0.0, mass / tl.where(total > 0.0, total, 1.0), 0.0).to(tl.float32)
    out = tl.where(bad, float("nan"), acc * norm)
    cols = tl.arange(0, E)[None, :]
    row_at = head.to(tl.int64) * call.rows + i
    tl.store(OUT + row_at * call.e + cols, out.to(OUT.dtype.element_ty), mask=(i < call.rows) & (cols < call.e))
    if SAVE:
        tl.store(STATE + row_at * 2, top.to(tl.float64), mask=i < call.rows)
        tl.store(STATE + row_at * 2 + 1, z, mask=i < call.rows)
