"""Tiles: rows of any strides as [R, K, L] in fp32, with R rows, and class k * L + l in lane l.

The maximum of each lane is then a reduction within a thread.

A row that fits on chip is one tile, read once (WHOLE). A longer row is read in steps of K * L classes. Once the maximum of each lane is
known, only lanes that reach above a bound are read again; if they are few, as one tile (`gather`), from which the row is solved.

RAGGED rows are segments of one array, with different lengths. PTR has the entry at which each begins. IDS lists the segments of a launch,
which have about the same length; the heads of a segment lie side by side. n is then one number per row.

Few rows of very many classes are cut in PARTS of `span` classes, with a program for each. A first kernel finds the maxima of the lanes of
each part (`survey_parts`), one program a row solves it from those, and then the parts are written.
"""

# pyright: reportAssignmentType=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# type checkers can't read the code that Triton traces

from __future__ import annotations

import triton
import triton.language as tl

OUTSIDE = tl.constexpr(float("-inf"))
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def total(v):
    return tl.sum(tl.sum(v, 1, keep_dims=True), 2, keep_dims=True)


@triton.jit
def wide(v):
    """`total` of many numbers: in fp32 within a thread, then in fp64."""
    return tl.sum(tl.sum(v, 1, keep_dims=True).to(tl.float64), 2, keep_dims=True)


@triton.jit
def largest(v):
    return tl.max(tl.max(v, 1, keep_dims=True), 2, keep_dims=True)


@triton.jit
def higher(a, b):
    """The larger of two numbers, NaN if one is NaN, by one instruction."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def highest(v, AXIS: tl.constexpr):
    """The largest along an axis, NaN if one is NaN: it finds invalid rows at one instruction an element."""
    if INTERPRETED:  # the interpreter reduces by a function one element at a time
        strange = tl.max((v != v).to(tl.int32), AXIS, keep_dims=True)
        return tl.where(strange > 0, float("nan"), tl.max(tl.where(v == v, v, float("-inf")), AXIS, keep_dims=True))
    else:
        return tl.reduce(v, AXIS, higher, keep_dims=True)


@triton.jit
def poisoned(top):
    """True for a row with NaN or +inf, by its `highest` score."""
    return (top < float("inf")) == 0


@triton.jit
def smallest(v):
    return tl.min(tl.min(v, 1, keep_dims=True), 2, keep_dims=True)


@triton.jit
def any_of(condition):
    """True if the condition holds for any row of the program."""
    return tl.max(condition.to(tl.int32)) > 0


@triton.jit
def place(row, D1, D2, s0, s1, s2, UNIT: tl.constexpr):
    """The offset of each row; rows have up to three axes, the inner two of the sizes D1 and D2.

    The strides and the number of classes are in UNITs: the compiler then knows that offsets are multiples of UNIT, and loads are wide.
    """
    inner = row % D2
    outer = row // D2
    far = (outer // D1).to(tl.int64) * s0 + (outer % D1).to(tl.int64) * s1 + inner.to(tl.int64) * s2
    return far * UNIT


@triton.jit
def rows_of(PTR, IDS, slots, n, heads, RAGGED: tl.constexpr, UNIT: tl.constexpr, R: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """(index, whether it exists, length, first entry of its segment) of each row of a program; the first entry is 0 unless RAGGED. A row
    in steps is alone in its program, so its length is a scalar, which can bound a loop."""
    if RAGGED:
        if WHOLE:
            slot = tl.program_id(0) * R + tl.arange(0, R)[:, None, None]
        else:
            slot = tl.program_id(0)
        segment = tl.load(IDS + slot // heads, mask=slot < slots, other=0)
        start = tl.load(PTR + segment)
        length = (tl.load(PTR + segment + 1) - start).to(tl.int32)
        row = segment * heads + slot % heads + tl.arange(0, 1)[:, None, None]
        return row, slot + tl.arange(0, 1)[:, None, None] < slots, length, start
    else:
        row = tl.program_id(0) * R + tl.arange(0, R)[:, None, None]
        return row, row < slots, n * UNIT, 0


@triton.jit
def first_of(row, start, D1, D2, s0, s1, s2, sc, RAGGED: tl.constexpr, UNIT: tl.constexpr):
    """The offset of each row: that of a segment's head, or that of `place`."""
    if RAGGED:
        return start * sc + (row % D2).to(tl.int64) * s2
    else:
        return place(row, D1, D2, s0, s1, s2, UNIT)


@triton.jit
def step(cols, stride, INT64: tl.constexpr):
    """The offset of each class within its row; INT64: it may exceed 2^31, so it is computed in 64 bits."""
    if INT64:
        return cols.to(tl.int64) * stride
    else:
        return cols * stride


@triton.jit
def lanes(begin, K: tl.constexpr, L: tl.constexpr):
    """The classes of a tile, [1, K, L]."""
    return begin + tl.arange(0, K)[None, :, None] * L + tl.arange(0, L)[None, None, :]


@triton.jit
def aligned(X, offset, SHIFT: tl.constexpr):
    """The offset, which SHIFT rounds down to 16 bytes."""
    if SHIFT:
        PACK: tl.constexpr = 128 // X.dtype.element_ty.primitive_bitwidth
        return offset // PACK * PACK
    else:
        return offset


@triton.jit
def operand(X, xo, xc, M, mo, mc, n, valid, SHIFT: tl.constexpr, WHOLE: tl.constexpr):
    """The tuple that the kernels call `at`: scores, offset of the row, stride; the same for a mask; the column after the last class;
    whether the row exists. With SHIFT, for unaligned rows, also the column of the first class, twice if the last row is open (see
    `fetch_one`). The length of the tuple tells the compiler how to read it, since a flag in it would not be a constant. A row in steps is
    alone in its program, so its columns are scalars."""
    if SHIFT:
        PACK: tl.constexpr = 128 // X.dtype.element_ty.primitive_bitwidth
        lead = (xo % PACK).to(tl.int32)
        if not WHOLE:
            lead = as_scalar(lead)
        if SHIFT == 2:
            return (X, aligned(X, xo, SHIFT), xc, M, mo - lead * mc, mc, n + lead, valid, lead, lead)
        else:
            return (X, aligned(X, xo, SHIFT), xc, M, mo - lead * mc, mc, n + lead, valid, lead)
    else:
        return (X, xo, xc, M, mo, mc, n, valid)


@triton.jit
def lead_of(at):
    """The column of the first class."""
    if len(at) > 8:
        return at[8]
    else:
        return 0


@triton.jit
def there(at, cols):
    """Which columns are classes."""
    if len(at) > 8:
        return (cols >= at[8]) & (cols < at[6]) & at[7]
    else:
        return (cols < at[6]) & at[7]


@triton.jit
def joined(low, high):
    """[R, 2 K, L] from two tiles [R, K, L]; no number leaves its thread."""
    R: tl.constexpr = low.shape[0]
    K: tl.constexpr = low.shape[1]
    L: tl.constexpr = low.shape[2]
    return tl.reshape(tl.permute(tl.join(low, high), (0, 3, 1, 2)), (R, 2 * K, L))


@triton.jit
def halves(v):
    """The inverse of `joined`."""
    R: tl.constexpr = v.shape[0]
    K: tl.constexpr = v.shape[1] // 2
    L: tl.constexpr = v.shape[2]
    return tl.split(tl.permute(tl.reshape(v, (R, 2, K, L)), (0, 2, 3, 1)))


@triton.jit
def both(live, K: tl.constexpr):
    """The live lanes for the two halves of K tiles; `live` has one set for each tile, or one for all."""
    if live.shape[1] == K:
        return halves(live)
    else:
        return live, live


@triton.jit
def fetch_one(
    at, begin, live, MASKED: tl.constexpr, INT64: tl.constexpr, K: tl.constexpr, L: tl.constexpr, AGAIN: tl.constexpr,
    OTHER: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """`fetch` by one load. It calls few functions, since a function in a loop is inlined only if calls are not nested deeply.

    Unaligned rows are read in whole packs of 16 bytes. These contain numbers of neighbouring rows, which ALONE replaces by OTHER.
    The last row is read number by number if the memory may end within a pack."""
    X, xo, xc, M, mo, mc, n, valid = at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7]
    EVICT: tl.constexpr = "evict_last" if AGAIN else ""
    cols = lanes(begin, K, L)
    of = X + xo + step(cols, xc, INT64)
    if len(at) > 8:
        lead = at[8]
        PACK: tl.constexpr = 128 // X.dtype.element_ty.primitive_bitwidth
        packs = live & (cols < (n + (PACK - 1)) // PACK * PACK) & valid
        if len(at) > 9:
            if tl.program_id(0) == tl.num_programs(0) - 1:
                x = tl.load(of, mask=live & (cols >= lead) & (cols < n) & valid, other=OTHER, eviction_policy=EVICT)
            else:
                x = tl.load(of, mask=packs, other=OTHER, eviction_policy=EVICT)
        else:
            x = tl.load(of, mask=packs, other=OTHER, eviction_policy=EVICT)
        if ALONE and len(lead.shape) > 0:  # rows that are read whole
            x = tl.where((cols >= lead) & (cols < n), x, OTHER)
        elif ALONE:  # noqa: SIM102  (this is known to the compiler, the next is not)
            if (begin < lead) | (begin + K * L > n):  # the first step of a row, or the last one
                x = tl.where((cols >= lead) & (cols < n), x, OTHER)
        x = x.to(tl.float32)
    else:
        x = tl.load(of, mask=live & (cols < n) & valid, other=OTHER, eviction_policy=EVICT).to(tl.float32)
    if MASKED:
        inside = live & (cols < n) & valid
        if len(at) > 8:
            inside = inside & (cols >= at[8])
        keep = tl.load(M + mo + step(cols, mc, INT64), mask=inside, other=0)
        x = tl.where(keep != 0, x, OTHER)
    return x


@triton.jit
def fetch_two(
    at, begin, live, MASKED: tl.constexpr, INT64: tl.constexpr, L: tl.constexpr, AGAIN: tl.constexpr, OTHER: tl.constexpr,
    ALONE: tl.constexpr,
):  # fmt: skip
    low, high = both(live, 2)
    low = fetch_one(at, begin, low, MASKED, INT64, 1, L, AGAIN, OTHER, ALONE)
    return joined(low, fetch_one(at, begin + L, high, MASKED, INT64, 1, L, AGAIN, OTHER, ALONE))


@triton.jit
def fetch_four(
    at, begin, live, MASKED: tl.constexpr, INT64: tl.constexpr, L: tl.constexpr, AGAIN: tl.constexpr, OTHER: tl.constexpr,
    ALONE: tl.constexpr,
):  # fmt: skip
    low, high = both(live, 4)
    low = fetch_two(at, begin, low, MASKED, INT64, L, AGAIN, OTHER, ALONE)
    return joined(low, fetch_two(at, begin + 2 * L, high, MASKED, INT64, L, AGAIN, OTHER, ALONE))


@triton.jit
def fetch(
    at, begin, live, MASKED: tl.constexpr, INT64: tl.constexpr, K: tl.constexpr, L: tl.constexpr, AGAIN: tl.constexpr,
    OTHER: tl.constexpr = OUTSIDE, ALONE: tl.constexpr = True,
):  # fmt: skip
    """Scores of the live lanes in fp32, OTHER elsewhere; AGAIN: the cache should keep them.

    With several rows each of the K is a separate load. The threads of a warp then lie along L and along rows, and all numbers of a thread
    are of one row. In one load of [R, K, L], Triton 3.7 and later would spread threads along K before R."""
    several: tl.constexpr = at[7].shape[0] > 1
    if several and K == 2:
        return fetch_two(at, begin, live & at[7], MASKED, INT64, L, AGAIN, OTHER, ALONE)
    elif several and K == 4:
        return fetch_four(at, begin, live & at[7], MASKED, INT64, L, AGAIN, OTHER, ALONE)
    elif several and K == 8:
        low, high = both(live & at[7], 8)
        low = fetch_four(at, begin, low, MASKED, INT64, L, AGAIN, OTHER, ALONE)
        return joined(low, fetch_four(at, begin + 4 * L, high, MASKED, INT64, L, AGAIN, OTHER, ALONE))
    else:
        return fetch_one(at, begin, live, MASKED, INT64, K, L, AGAIN, OTHER, ALONE)


@triton.jit
def put_one(OUT, oo, oc, begin, v, at, INT64: tl.constexpr, K: tl.constexpr, L: tl.constexpr):
    n, valid = at[6], at[7]
    cols = lanes(begin, K, L)
    to = OUT + oo + step(cols, oc, INT64)
    v = v.to(OUT.dtype.element_ty)
    if len(at) > 8:
        lead = at[8]
        PACK: tl.constexpr = 128 // OUT.dtype.element_ty.primitive_bitwidth
        first = (lead + (PACK - 1)) // PACK * PACK
        last = n // PACK * PACK
        tl.store(to, v, mask=(cols >= first) & (cols < last) & valid)
        if len(lead.shape) > 0:
            tl.store(to, v, mask=(cols >= lead) & (cols < n) & valid & ((cols < first) | (cols >= last)))
        else:
            if (begin < lead) | (begin + K * L > last):
                tl.store(to, v, mask=(cols >= lead) & (cols < n) & valid & ((cols < first) | (cols >= last)))
    else:
        tl.store(to, v, mask=(cols < n) & valid)


@triton.jit
def put_two(OUT, oo, oc, begin, v, at, INT64: tl.constexpr, L: tl.constexpr):
    low, high = halves(v)
    put_one(OUT, oo, oc, begin, low, at, INT64, 1, L)
    put_one(OUT, oo, oc, begin + L, high, at, INT64, 1, L)


@triton.jit
def put_four(OUT, oo, oc, begin, v, at, INT64: tl.constexpr, L: tl.constexpr):
    low, high = halves(v)
    put_two(OUT, oo, oc, begin, low, at, INT64, L)
    put_two(OUT, oo, oc, begin + 2 * L, high, at, INT64, L)


@triton.jit
def put(OUT, oo, oc, begin, v, at, INT64: tl.constexpr, K: tl.constexpr, L: tl.constexpr):
    """Writes a tile, of several rows as `fetch` reads it. For unaligned rows it writes the packs of 16 bytes within the row, then the
    numbers at both ends."""
    several: tl.constexpr = at[7].shape[0] > 1
    if several and K == 2:
        put_two(OUT, oo, oc, begin, v, at, INT64, L)
    elif several and K == 4:
        put_four(OUT, oo, oc, begin, v, at, INT64, L)
    elif several and K == 8:
        low, high = halves(v)
        put_four(OUT, oo, oc, begin, low, at, INT64, L)
        put_four(OUT, oo, oc, begin + 4 * L, high, at, INT64, L)
    else:
        put_one(OUT, oo, oc, begin, v, at, INT64, K, L)


@triton.jit
def survey(at, ot, FILL: tl.constexpr, MASKED: tl.constexpr, INT64: tl.constexpr, R: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
           WHOLE: tl.constexpr):  # fmt: skip
    """(tile, maximum of each lane, maximum, poisoned), by one read of the row. The maximum of a poisoned row is NaN or +inf.

    FILL: a number to write to a longer row's output, ot = (OUT, offset, stride), since most classes keep it; None: write nothing.
    """
    if WHOLE:
        x = fetch(at, 0, True, MASKED, INT64, K, L, False)
        tops = highest(x, 1)
    else:
        tops = tl.full([R, 1, L], float("-inf"), tl.float32)
        for begin in range(0, at[6], K * L):
            tops = higher(tops, highest(fetch(at, begin, True, MASKED, INT64, K, L, True), 1))
            fill(at, ot, begin, FILL, INT64, R, K, L)
        x = tops
    top = highest(tops, 2)
    return x, tops, top, poisoned(top)


@triton.jit
def fill(at, ot, begin, FILL: tl.constexpr, INT64: tl.constexpr, R: tl.constexpr, K: tl.constexpr, L: tl.constexpr):
    if FILL is not None:
        put(ot[0], ot[1], ot[2], begin, tl.full([R, K, L], FILL, tl.float32), at, INT64, K, L)


@triton.jit
def survey_parts(X, M, OUT, TOPS, rows, n, span, d1, d2, x0, x1, x2, xc, m0, m1, m2, mc, o0, o1, o2, oc,
                 FILL: tl.constexpr, MASKED: tl.constexpr, INT64: tl.constexpr, UNIT: tl.constexpr, SHIFT: tl.constexpr,
                 PARTS: tl.constexpr, K: tl.constexpr, L: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Writes TOPS [rows, PARTS, L]: the maximum of each lane of each part, NaN if a score of the lane is NaN. WIDE: how many numbers are
    read side by side, a multiple of L. FILL: as in `survey`."""
    n = n * UNIT
    row = tl.program_id(0) + tl.arange(0, 1)[:, None, None]
    valid = row < rows
    xo, mo = place(row, d1, d2, x0, x1, x2, UNIT), place(row, d1, d2, m0, m1, m2, UNIT)
    at = operand(X, xo, xc, M, mo, mc, n, valid, SHIFT, False)
    ot = (OUT, aligned(OUT, place(row, d1, d2, o0, o1, o2, UNIT), SHIFT), oc)
    first = tl.program_id(1) * span
    tops = tl.full([1, 1, WIDE], float("-inf"), tl.float32)
    HIGH: tl.constexpr = K * L // WIDE
    for begin in range(first, tl.minimum(first + span, at[6]), K * L):
        tops = higher(tops, highest(fetch(at, begin, True, MASKED, INT64, HIGH, WIDE, True), 1))
        fill(at, ot, begin, FILL, INT64, 1, HIGH, WIDE)
    lane = tl.arange(0, L)[None, None, :]
    folded = highest(tl.reshape(tops, [1, WIDE // L, L]), 1)
    tl.store(TOPS + (row.to(tl.int64) * PARTS + tl.program_id(1)) * L + lane, folded)


@triton.jit
def surveyed(TOPS, row, PARTS: tl.constexpr, L: tl.constexpr):
    """(lane maxima of all parts [1, 1, PARTS L], lane maxima of the row, maximum, poisoned), from the TOPS of `survey_parts`."""
    part = tl.arange(0, PARTS)[None, :, None] * L + tl.arange(0, L)[None, None, :]
    found = tl.load(TOPS + row.to(tl.int64) * PARTS * L + part)
    tops = highest(found, 1)
    top = highest(tops, 2)
    return tl.reshape(found, [1, 1, PARTS * L]), tops, top, poisoned(top)


@triton.jit
def as_scalar(v):
    """The number of a single row as a scalar, to be used beside a gathered tile.

    Two tensors of one operation have one layout. A tensor in the layout of the row's own tile would force that layout on the gathered
    tile, back to its loads: each thread would then load and compute many copies of it. A scalar has no layout."""
    return tl.sum(v)


@triton.jit
def as_tile(v):
    """`as_scalar` as a new tensor of one number, which takes the layout of the gathered tile."""
    return tl.full([1, 1, 1], 0, v.dtype) + as_scalar(v)


@triton.jit
def read_lanes(
    at,
    mine,
    count,
    span,
    FEW: tl.constexpr,
    DEPTH: tl.constexpr,
    MASKED: tl.constexpr,
    INT64: tl.constexpr,
    L: tl.constexpr,
):
    """(tile, classes, which of them exist): the scores of the `count` lanes listed at `mine` as a tile [1, DEPTH, FEW]. Lane l + i L is
    lane l of the i-th part of the row, and a part has `span` classes."""
    X, xo, xc, M, mo, mc = at[0], at[1], at[2], at[3], at[4], at[5]
    slots = tl.arange(0, FEW)[None, None, :]
    lane = tl.load(mine + slots, mask=slots < count, other=0)
    within = tl.arange(0, DEPTH)[None, :, None] * L + lane % L
    cols = (lane // L) * span + within
    # a hook may have changed a list that was saved
    ok = (slots < count) & (within < span) & (cols >= 0) & there(at, cols)
    x = tl.load(X + xo + step(cols, xc, INT64), mask=ok, other=float("-inf")).to(tl.float32)
    if MASKED:
        keep = tl.load(M + mo + step(cols, mc, INT64), mask=ok, other=0)
        x = tl.where(keep != 0, x, float("-inf"))
    return x, cols, ok


@triton.jit
def gather(at, live, LIST, span, FEW: tl.constexpr, DEPTH: tl.constexpr, MASKED: tl.constexpr, INT64: tl.constexpr, L: tl.constexpr,
           LIVE: tl.constexpr):  # fmt: skip
    """(tile, classes, number of live lanes): the scores of up to FEW of LIVE lanes as a tile, for a row in steps or in parts.

    The lanes are listed in LIST, where each program has its own memory. If more than FEW are live, the tile must not be used.
    """
    mine = LIST + tl.program_id(0).to(tl.int64) * FEW
    slot = tl.cumsum(live.to(tl.int32), 2) - 1
    tl.store(mine + slot, tl.arange(0, LIVE)[None, None, :], mask=live & (slot < FEW))
    tl.debug_barrier()
    count = tl.sum(live.to(tl.int32))
    x, cols, _ = read_lanes(at, mine, count, span, FEW, DEPTH, MASKED, INT64, L)
    return x, cols, count


@triton.jit
def scatter(OUT, oo, oc, cols, v, keep, at, INT64: tl.constexpr):
    """Writes the entries of a gathered tile where `keep` is True, after all threads have written the rest of the row."""
    tl.debug_barrier()
    tl.store(OUT + oo + step(cols, oc, INT64), v.to(OUT.dtype.element_ty), mask=keep & (cols < at[6]) & at[7])
