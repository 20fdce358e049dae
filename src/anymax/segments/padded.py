"""Segments as padded rows of a few lengths: for every map, verb and framework, with all derivatives.

If the bounds are known, a bucket has segments whose lengths differ by less than a factor of 2, padded to the longest. Under a compiler
the bounds are unknown: then each bucket has as many rows as are possible, `entries / length`, so that the work is that of dense rows
times the number of buckets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .._array import (
    Array,
    device_of,
    fit_axes,
    from_last,
    is_array,
    joined,
    namespace,
    running_sum,
    to_last,
    wider,
)
from .._core.mapping import Mapping
from ..kernels.engine import SegmentsAlong
from .layout import Segments

_STEP = 2  # under a compiler each bucket is 2 ** _STEP times as wide as the one before


class Bucket(NamedTuple):
    """Segments of similar length, padded to rows of one length."""

    ids: Any  # [rows]: the segment; any for an unused row
    entry: Any  # [rows * width]: the entry; any for an unused slot
    valid: Any  # [rows, width]: whether the slot has an entry
    width: int


class PaddedRows(NamedTuple):
    """All segments as rows of a few lengths, and the indices that lead back."""

    buckets: tuple[Bucket, ...]
    slot_of_entry: Any  # [entries]: in the concatenated buckets
    row_of_segment: Any  # [segments]: in the concatenated buckets; one past the last if empty


def padded_rows(segments: Segments, x: Array) -> PaddedRows:
    """The rows, as arrays of x's kind on its device."""
    return segments.cached("rows", x, lambda: _known(segments) if segments.known else _traced(segments))


def _known(segments: Segments) -> PaddedRows:
    lengths, ptr = segments.lengths, segments.ptr
    slot = np.zeros(segments.num_entries, np.int64)
    row = np.zeros(segments.num_segments, np.int64)
    exponent = np.frexp(np.maximum(lengths, 1) - 0.5)[1]  # of the least power of two that is not below the length
    buckets, slots, rows = [], 0, 0
    for each in np.unique(exponent[lengths > 0]):
        ids = np.nonzero((exponent == each) & (lengths > 0))[0]
        width = int(lengths[ids].max())
        at = np.arange(width)
        valid = at < lengths[ids][:, None]
        entry = np.where(valid, ptr[ids][:, None] + at, 0)
        entry = entry if segments.order is None else np.where(valid, segments.order[entry], 0)
        slot[entry[valid]] = slots + np.arange(entry.size).reshape(entry.shape)[valid]
        row[ids] = rows + np.arange(ids.size)
        buckets.append(Bucket(ids, entry.reshape(-1), valid, width))
        slots, rows = slots + entry.size, rows + ids.size
    row[lengths == 0] = rows
    return PaddedRows(tuple(buckets) or (_no_rows(slot, row),), slot, row)


def _no_rows(entry: Any, ids: Any) -> Bucket:
    """A bucket without rows, so that empty results have the right dtype and a gradient."""
    none = entry[:0]
    return Bucket(ids[:0], none, none[:, None] > 0, 1)


def _traced(segments: Segments) -> PaddedRows:
    ptr, n, count = segments.ptr, segments.num_entries, segments.num_segments
    xp = namespace(ptr)
    lengths, each = ptr[1:] - ptr[:-1], _upto(n, ptr)  # [segments], [entries]
    # of the sorted entries, [entries]: the segment, whether there is one, the place within it
    owner = xp.searchsorted(ptr[1:], each, side="right")
    inside = (each >= ptr[0]) & (owner < count)
    owner = xp.where(inside, owner, xp.zeros_like(owner))
    rank = each - ptr[owner]
    slot, row = xp.zeros_like(each), xp.zeros_like(ptr[1:])  # [entries], [segments]: as in `PaddedRows`
    buckets, slots, rows = [], 0, 0  # how many slots and rows the buckets have so far
    for least, width, most in _widths(n, count):
        mine = (lengths >= least) & (lengths <= width)  # [segments]: in this bucket
        within = running_sum(mine, xp, ptr.dtype) - 1  # [segments]: the row in this bucket
        buckets.append(_traced_bucket(segments, mine, width, most))
        slot = xp.where(mine[owner], slots + within[owner] * width + rank, slot)
        row = xp.where(mine, rows + within, row)
        slots, rows = slots + most * width, rows + most
    slot = xp.where(inside, slot, slots * xp.ones_like(slot))  # past the last slot: without a segment
    row = xp.where(lengths > 0, row, rows * xp.ones_like(row))
    buckets = tuple(buckets) or (_no_rows(slot, row),)
    return PaddedRows(buckets, slot if segments.order is None else slot[segments.inverse], row)


def _widths(n: int, count: int) -> list[tuple[int, int, int]]:
    """The buckets of n entries in unknown segments: (the least length, the greatest one, how many rows are possible)."""
    out, least, width = [], 1, 1
    while count and n:
        out.append((least, width, min(count, n // least)))
        if width >= n:
            break
        least, width = width + 1, min(width << _STEP, n)
    return out


def _traced_bucket(segments: Segments, mine: Array, width: int, most: int) -> Bucket:
    """The segments where `mine`, [segments], is True, as `most` rows; those past the last segment are unused."""
    ptr, count = segments.ptr, segments.num_segments
    xp = namespace(ptr)
    ids = xp.sort(xp.where(mine, _upto(count, ptr), count * xp.ones_like(ptr[1:])))[:most]  # [rows]
    used = ids < count
    ids = xp.where(used, ids, xp.zeros_like(ids))
    at = _upto(width, ptr)
    valid = used[:, None] & (at[None, :] < (ptr[1:] - ptr[:-1])[ids][:, None])  # [rows, width]
    entry = xp.where(valid, ptr[ids][:, None] + at[None, :], xp.zeros_like(ptr[:1]))
    entry = xp.reshape(entry, (-1,))  # [rows * width]
    return Bucket(ids, entry if segments.order is None else segments.order[entry], valid, width)


def _upto(size: int, ptr: Array) -> Array:
    return namespace(ptr).arange(size, dtype=ptr.dtype, **device_of(ptr))


# -- entries to rows, and back -----------------------------------------------------------------------------------------------------


def bucket_rows(x: Array, bucket: Bucket, fill: float, least: int = 1) -> Array:
    """[..., entries] as rows [..., rows, width], `fill` where a row has no entry; at least `least` wide."""
    xp, entry, valid = namespace(x), bucket.entry, bucket.valid
    if bucket.width < least:
        entry = xp.reshape(wider(xp.reshape(entry, valid.shape), least, 0, xp), (-1,))
        valid = wider(valid, least, False, xp)
    rows = xp.reshape(_take(x, entry), (*x.shape[:-1], *valid.shape))
    return xp.where(valid, rows, fill * xp.ones_like(rows) if fill else xp.zeros_like(rows))


def _take(x: Array, index: Array) -> Array:
    return namespace(x).take(x, index, axis=-1)


def _first(rows: Array, width: int) -> Array:
    """The first entries of rows, without a full slice, which torch.vmap can't batch over gradients."""
    return rows if rows.shape[-1] == width else rows[..., :width]


def join_entries(rows: PaddedRows, parts: list[Array], x: Array, traced: bool) -> Array:
    """Rows [..., rows, width] of each bucket as entries [..., entries]; NaN for an entry without a segment."""
    xp = namespace(x)
    flat = [
        xp.reshape(_first(part, bucket.width), (*x.shape[:-1], bucket.entry.shape[0]))
        for part, bucket in zip(parts, rows.buckets, strict=True)
    ]
    if traced:
        flat.append(math.nan * xp.ones_like(flat[0][..., :1]))
    return _take(joined(flat) if len(flat) > 1 else flat[0], rows.slot_of_entry)


def join_segments(rows: PaddedRows, parts: list[Array], empty: Any) -> Array:
    """Numbers [..., rows] of each bucket as [..., segments]; `empty` for a segment without entries."""
    one, xp = parts[0], namespace(parts[0])
    none = xp.full((*one.shape[:-1], 1), empty, dtype=one.dtype, **device_of(one))
    return _take(joined([*parts, none]), rows.row_of_segment)


def segments_last(value: Any, rows_axis: int, shape: tuple[int, ...], name: str) -> Any:
    """A value that broadcasts to `shape`, which has the segments along `rows_axis`, with the segments moved last."""
    if not is_array(value) or not value.ndim:
        return value
    value = fit_axes(value, shape, name, f", one value for each segment along axis {rows_axis}", "")
    return to_last(value, rows_axis, namespace(value))


def bucket_values(value: Any, bucket: Bucket) -> Any:
    """The numbers for a bucket's rows, [..., rows, 1], of one with the segments last; a single number is returned unchanged."""
    if not is_array(value) or not value.ndim:
        return value
    return namespace(value).expand_dims(value if value.shape[-1] == 1 else _take(value, bucket.ids), axis=-1)


def bucket_mapping(mapping: Mapping, bucket: Bucket) -> Mapping:
    """The mapping with parameters for the rows of a bucket."""
    return mapping.laid_out(**{name: bucket_values(value, bucket) for name, value in mapping.params().items()})


def each_row(
    segments: Segments,
    x: Array,
    verb: Callable[[Bucket, Array], Array],
    empty: Any,
    fill: float = -math.inf,
    least: int = 1,
) -> Array:
    """Apply verb(bucket, rows) -> [..., rows] to x [..., entries]; the result is [..., segments]."""
    rows = padded_rows(segments, x)
    parts = [verb(bucket, bucket_rows(x, bucket, fill, least)) for bucket in rows.buckets]
    return join_segments(rows, parts, empty)


def formula(along: SegmentsAlong, mapping: Mapping, function: Any, *arrays: Array) -> Array:
    """Apply function(mapping, *rows) to arrays with the entries along an axis: scores, padded with -inf, and others, padded with 0."""
    x, rows, parts = _by_rows(along, mapping, function, arrays)
    return from_last(join_entries(rows, parts, x, not along.segments.known), along.axis, namespace(x))


def each_formula(along: SegmentsAlong, mapping: Mapping, function: Any, *arrays: Array) -> Array:
    """`formula` for a function whose result is a number for each row, or several to add up: [..., segments], 0 for an empty segment."""
    x, rows, parts = _by_rows(along, mapping, function, arrays)
    return join_segments(rows, [namespace(x).sum(part, axis=-1) for part in parts], 0.0)


def _by_rows(
    along: SegmentsAlong, mapping: Mapping, function: Any, arrays: tuple[Array, ...]
) -> tuple[Array, PaddedRows, list[Array]]:
    """(the first array, the entries last; the rows; the results of the function on those of each bucket)."""
    x, *others = (to_last(a, along.axis, namespace(a)) for a in arrays)
    rows, least = padded_rows(along.segments, x), mapping.least_classes
    parts = [
        function(
            bucket_mapping(mapping, bucket),
            bucket_rows(x, bucket, -math.inf, least),
            *(bucket_rows(a, bucket, 0.0, least) for a in others),
        )
        for bucket in rows.buckets
    ]
    return x, rows, parts
