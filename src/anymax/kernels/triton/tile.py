"""Tiles: rows of any strides as [R, K, L] in fp32, with R rows, and class k * L + l in lane l: its maximum is found within a thread.

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

from typing import Any, NamedTuple

import triton
import triton.language as tl

OUTSIDE = tl.constexpr(float("-inf"))
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class Tile(NamedTuple):
    """How a kernel reads its rows, as the compiler knows it. Where a number of it is part of a shape, it needs a name of its own."""

    MASKED: bool = False
    INT64: bool = False  # an offset within a row may exceed 2^31
    SHIFT: int = 0  # unaligned rows are read in packs of 16 bytes (1), but for the last row (2): see `fetch_one`
    UNIT: int = 1  # what divides the classes and the strides of rows: see `place`
    RAGGED: bool = False
    R: int = 1
    K: int = 1
    L: int = 1
    WHOLE: bool = True


class Few(NamedTuple):  # the live lanes of a longer row, where they are gathered to one tile
    FEW: int = 0  # the most lanes; 0: a row is always read in steps
    DEPTH: int = 1  # classes of a lane
    LANES: int = 1  # lanes of a part of the list
    PARTS: int = 0  # > 0: programs that share a row, which another kernel has read
    MOST: int = 0  # scores of an interval that are gathered to a tile of the same size
    KEEP: bool = False  # the list and the number of lanes are for the backward
    LATE: bool = False  # the output is in the memory of x, so it is written after the row is read, not meanwhile


# the tile of numbers that are in registers already
AT_HAND: Any = Tile() if INTERPRETED.value else tl.constexpr(Tile())


class Rows(NamedTuple):  # of a program
    row: Any
    valid: Any  # whether it exists
    n: Any  # classes
    start: Any  # the first entry of its segment, 0 unless RAGGED
    d1: Any  # the sizes of the inner two axes of rows
    d2: Any


class Operand(
    NamedTuple
):  # scores, and where they lie; a row in steps is alone in its program, so its columns are scalars
    X: Any
    xo: Any  # the offset of the row
    xc: Any  # the stride of classes
    M: Any  # the same for a mask
    mo: Any
    mc: Any
    n: Any  # the column after the last class
    valid: Any  # whether the row exists
    lead: Any  # the column of the first class, 0 unless SHIFT


class Output(NamedTuple):  # where a row is written
    X: Any
    xo: Any
    xc: Any


@triton.jit
def total(v):
    return tl.sum(tl.sum(v, 1, keep_dims=True), 2, keep_dims=True)


@triton.jit
def wide(v):
    """`total` of many numbers: in fp32 along K, then in fp64."""
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
    """The offset of each row; rows have up to three axes, the inner two of the sizes D1 and D2. The strides and the number of classes are
    in UNITs: the compiler then knows that offsets are multiples of UNIT, and loads are wide."""
    inner = row % D2
    outer = row // D2
    far = (outer // D1).to(tl.int64) * s0 + (outer % D1).to(tl.int64) * s1 + inner.to(tl.int64) * s2
    return far * UNIT


@triton.jit
def rows_of(PTR, IDS, slots, n, d1, d2, TILE: tl.constexpr):
    """The rows of a program. A row in steps is alone in its program, so the length of a segment is a scalar, which can bound a loop."""
    R: tl.constexpr = TILE.R
    if TILE.RAGGED:
        if TILE.WHOLE:
            slot = tl.program_id(0) * R + tl.arange(0, R)[:, None, None]
        else:
            slot = tl.program_id(0)
        segment = tl.load(IDS + slot // d2, mask=slot < slots, other=0)
        start = tl.load(PTR + segment)
        length = (tl.load(PTR + segment + 1) - start).to(tl.int32)
        row = segment * d2 + slot % d2 + tl.arange(0, 1)[:, None, None]
        return Rows(row, slot + tl.arange(0, 1)[:, None, None] < slots, length, start, d1, d2)
    else:
        row = tl.program_id(0) * R + tl.arange(0, R)[:, None, None]
        return Rows(row, row < slots, n * TILE.UNIT, 0, d1, d2)


@triton.jit
def first_of(rows, s0, s1, s2, sc, TILE: tl.constexpr):
    """The offset of each row: that of a segment's head, or that of `place`."""
    if TILE.RAGGED:
        return rows.start * sc + (rows.row % rows.d2).to(tl.int64) * s2
    else:
        return place(rows.row, rows.d1, rows.d2, s0, s1, s2, TILE.UNIT)


@triton.jit
def parameter(PARAMS, param, rows, PER_ROW: tl.constexpr):
    """The parameter of each row: `param`, or its own."""
    if PER_ROW:
        return tl.load(PARAMS + rows.row, mask=rows.valid, other=1.0)
    else:
        return tl.zeros(rows.row.shape, tl.float32) + param


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
def operand(rows, X, x0, x1, x2, xc, M, m0, m1, m2, mc, TILE: tl.constexpr):
    """The scores X and a mask M of these rows."""
    xo, mo = first_of(rows, x0, x1, x2, xc, TILE), first_of(rows, m0, m1, m2, mc, TILE)
    if TILE.SHIFT:
        PACK: tl.constexpr = 128 // X.dtype.element_ty.primitive_bitwidth
        lead = (xo % PACK).to(tl.int32)
        if not TILE.WHOLE:
            lead = as_scalar(lead)
        return Operand(X, aligned(X, xo, TILE.SHIFT), xc, M, mo - lead * mc, mc, rows.n + lead, rows.valid, lead)
    else:
        return Operand(X, xo, xc, M, mo, mc, rows.n, rows.valid, 0)


@triton.jit
def alone(rows, X, x0, x1, x2, xc, TILE: tl.constexpr):
    return operand(rows, X, x0, x1, x2, xc, X, 0, 0, 0, xc, TILE)


@triton.jit
def output(rows, OUT, o0, o1, o2, oc, TILE: tl.constexpr):
    return Output(OUT, aligned(OUT, first_of(rows, o0, o1, o2, oc, TILE), TILE.SHIFT), oc)


@triton.jit
def per_lane(value, TILE: tl.constexpr, DTYPE: tl.constexpr = tl.float32):
    """A number for each lane, [R, 1, L]."""
    R: tl.constexpr = TILE.R
    L: tl.constexpr = TILE.L
    return tl.full([R, 1, L], value, DTYPE)


@triton.jit
def per_class(value, TILE: tl.constexpr):
    """A tile of equal numbers, [R, K, L]."""
    R: tl.constexpr = TILE.R
    K: tl.constexpr = TILE.K
    L: tl.constexpr = TILE.L
    return tl.full([R, K, L], value, tl.float32)


@triton.jit
def there(at, cols, SHIFT: tl.constexpr):
    """Which columns are classes."""
    if SHIFT:
        return (cols >= at.lead) & (cols < at.n) & at.valid
    else:
        return (cols < at.n) & at.valid


@triton.jit
def joined(low, high):
    """[R, 2 K, L] from two tiles [R, K, L]; no number leaves its thread."""
    R: tl.constexpr = low.shape[0]
    K: tl.constexpr = low.shape[1]
    L: tl.constexpr = low.shape[2]
    return tl.reshape(tl.permute(tl.join(low, high), (0, 3, 1, 2)), (R, 2 * K, L))


@triton.jit
def halves(v):
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
def in_packs(live, at, TILE: tl.constexpr):
    """The live lanes and their neighbours in 16 bytes: a load of some numbers of a pack takes one instruction for each."""
    PACK: tl.constexpr = 128 // at.X.dtype.element_ty.primitive_bitwidth
    K: tl.constexpr = live.shape[1]
    L: tl.constexpr = live.shape[2]
    if TILE.RAGGED or L < PACK:
        return live
    else:
        each = tl.reshape(live.to(tl.int32), [1, K, L // PACK, PACK])
        any_ = tl.broadcast_to(tl.max(each, 3, keep_dims=True), [1, K, L // PACK, PACK])
        return tl.max_constancy(tl.reshape(any_, [1, K, L]) > 0, [1, 1, PACK])


@triton.jit
def fetch_one(at, begin, live, TILE: tl.constexpr, K: tl.constexpr, AGAIN: tl.constexpr, OTHER: tl.constexpr,
              ALONE: tl.constexpr):  # fmt: skip
    """`fetch` by one load. It calls few functions, since a function in a loop is inlined only if calls are not nested deeply.
    Unaligned rows are read in whole packs of 16 bytes. These contain numbers of neighbouring rows, which ALONE replaces by OTHER.
    The last row is read number by number if the memory may end within a pack."""
    EVICT: tl.constexpr = "evict_last" if AGAIN else ""
    n, valid, lead = at.n, at.valid, at.lead
    cols = lanes(begin, K, TILE.L)
    of = at.X + at.xo + step(cols, at.xc, TILE.INT64)
    if TILE.SHIFT:
        PACK: tl.constexpr = 128 // at.X.dtype.element_ty.primitive_bitwidth
        packs = live & (cols < (n + (PACK - 1)) // PACK * PACK) & valid
        if TILE.SHIFT == 2:
            if tl.program_id(0) == tl.num_programs(0) - 1:
                x = tl.load(of, mask=live & (cols >= lead) & (cols < n) & valid, other=OTHER, eviction_policy=EVICT)
            else:
                x = tl.load(of, mask=packs, other=OTHER, eviction_policy=EVICT)
        else:
            x = tl.load(of, mask=packs, other=OTHER, eviction_policy=EVICT)
        if ALONE and TILE.WHOLE:
            x = tl.where((cols >= lead) & (cols < n), x, OTHER)
        elif ALONE:  # noqa: SIM102  (this is known to the compiler, the next is not)
            if (begin < lead) | (begin + K * TILE.L > n):  # the first step of a row, or the last one
                x = tl.where((cols >= lead) & (cols < n), x, OTHER)
        x = x.to(tl.float32)
    else:
        x = tl.load(of, mask=live & (cols < n) & valid, other=OTHER, eviction_policy=EVICT).to(tl.float32)
    if TILE.MASKED:
        inside = live & (cols < n) & valid
        if TILE.SHIFT:
            inside = inside & (cols >= lead)
        keep = tl.load(at.M + at.mo + step(cols, at.mc, TILE.INT64), mask=inside, other=0)
        x = tl.where(keep != 0, x, OTHER)
    return x


@triton.jit
def fetch_two(at, begin, live, TILE: tl.constexpr, AGAIN: tl.constexpr, OTHER: tl.constexpr, ALONE: tl.constexpr):
    low, high = both(live, 2)
    low = fetch_one(at, begin, low, TILE, 1, AGAIN, OTHER, ALONE)
    return joined(low, fetch_one(at, begin + TILE.L, high, TILE, 1, AGAIN, OTHER, ALONE))


@triton.jit
def fetch_four(at, begin, live, TILE: tl.constexpr, AGAIN: tl.constexpr, OTHER: tl.constexpr, ALONE: tl.constexpr):
    low, high = both(live, 4)
    low = fetch_two(at, begin, low, TILE, AGAIN, OTHER, ALONE)
    return joined(low, fetch_two(at, begin + 2 * TILE.L, high, TILE, AGAIN, OTHER, ALONE))


@triton.jit
def fetch(at, begin, live, TILE: tl.constexpr, AGAIN: tl.constexpr, OTHER: tl.constexpr = OUTSIDE, ALONE: tl.constexpr = True):  # fmt: skip
    """Scores of the live lanes in fp32, OTHER elsewhere; AGAIN: the cache should keep them.
    With several rows each of the K is a separate load. The threads of a warp then lie along L and along rows, and all numbers of a thread
    are of one row. In one load of [R, K, L], Triton 3.7 and later would spread threads along K before R."""
    several: tl.constexpr = at.valid.shape[0] > 1
    if several and TILE.K == 2:
        return fetch_two(at, begin, live & at.valid, TILE, AGAIN, OTHER, ALONE)
    elif several and TILE.K == 4:
        return fetch_four(at, begin, live & at.valid, TILE, AGAIN, OTHER, ALONE)
    elif several and TILE.K == 8:
        low, high = both(live & at.valid, 8)
        low = fetch_four(at, begin, low, TILE, AGAIN, OTHER, ALONE)
        return joined(low, fetch_four(at, begin + 4 * TILE.L, high, TILE, AGAIN, OTHER, ALONE))
    else:
        return fetch_one(at, begin, live, TILE, TILE.K, AGAIN, OTHER, ALONE)


@triton.jit
def put_one(to, begin, v, at, TILE: tl.constexpr, K: tl.constexpr):
    n, valid, lead = at.n, at.valid, at.lead
    cols = lanes(begin, K, TILE.L)
    place_ = to.X + to.xo + step(cols, to.xc, TILE.INT64)
    v = v.to(to.X.dtype.element_ty)
    if TILE.SHIFT:
        PACK: tl.constexpr = 128 // to.X.dtype.element_ty.primitive_bitwidth
        first = (lead + (PACK - 1)) // PACK * PACK
        last = n // PACK * PACK
        tl.store(place_, v, mask=(cols >= first) & (cols < last) & valid)
        ends = (cols >= lead) & (cols < n) & valid & ((cols < first) | (cols >= last))
        if TILE.WHOLE:
            tl.store(place_, v, mask=ends)
        else:
            if (begin < lead) | (begin + K * TILE.L > last):
                tl.store(place_, v, mask=ends)
    else:
        tl.store(place_, v, mask=(cols < n) & valid)


@triton.jit
def put_two(to, begin, v, at, TILE: tl.constexpr):
    low, high = halves(v)
    put_one(to, begin, low, at, TILE, 1)
    put_one(to, begin + TILE.L, high, at, TILE, 1)


@triton.jit
def put_four(to, begin, v, at, TILE: tl.constexpr):
    low, high = halves(v)
    put_two(to, begin, low, at, TILE)
    put_two(to, begin + 2 * TILE.L, high, at, TILE)


@triton.jit
def put(to, begin, v, at, TILE: tl.constexpr):
    """Writes a tile, of several rows as `fetch` reads it. For unaligned rows it writes the packs of 16 bytes within the row, then the
    numbers at both ends."""
    several: tl.constexpr = at.valid.shape[0] > 1
    if several and TILE.K == 2:
        put_two(to, begin, v, at, TILE)
    elif several and TILE.K == 4:
        put_four(to, begin, v, at, TILE)
    elif several and TILE.K == 8:
        low, high = halves(v)
        put_four(to, begin, low, at, TILE)
        put_four(to, begin + 4 * TILE.L, high, at, TILE)
    else:
        put_one(to, begin, v, at, TILE, TILE.K)


@triton.jit
def fill(to, begin, FILL: tl.constexpr, at, TILE: tl.constexpr):
    if FILL is not None:
        put(to, begin, per_class(FILL, TILE), at, TILE)


@triton.jit
def as_scalar(v):
    """The number of a single row as a scalar, to be used beside a gathered tile: a tensor would force the layout of the row's own tile on
    the gathered one, back to its loads, and each thread would load and compute many copies of it. A scalar has no layout."""
    return tl.sum(v)


@triton.jit
def as_tile(v):
    """`as_scalar` as a new tensor of one number, which takes the layout of the gathered tile."""
    return tl.full([1, 1, 1], 0, v.dtype) + as_scalar(v)


@triton.jit
def scatter(to, cols, v, keep, at, TILE: tl.constexpr):
    """Writes the entries of a gathered tile where `keep` is True, after all threads have written the rest of the row."""
    tl.debug_barrier()
    tl.store(to.X + to.xo + step(cols, to.xc, TILE.INT64), v.to(to.X.dtype.element_ty), mask=keep & (cols < at.n) & at.valid)  # fmt: skip
