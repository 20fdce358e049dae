"""The Fenchel-Young loss of each segment."""

from __future__ import annotations

from typing import Any, Unpack

from .. import _array
from .._array import Array, counts, is_integer, known_any, upcast
from .._core.mapping import Mapping, no_potential
from .._core.options import check_keywords
from .._core.tables import document
from .._core.typing import ArrayT, Numbers, Reduction
from ..kernels.link import LEFT_OUT
from ..losses.formulas import fenchel_young
from ..losses.options import EACH_ROW, LossOptions, result_dtype
from .call import SegmentCall
from .padded import Bucket, bucket_mapping, each_formula, each_row
from .verbs import HINTS, SegmentOptions


@check_keywords(
    HINTS
    | {
        "weight": "weigh the losses that reduction='none' gives",
        "label_smoothing": "give the target as a distribution, smoothed",
    }
)
def segment_loss(
    mapping: Mapping | str,
    x: ArrayT | Numbers,
    target: Any,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    **options: Unpack[SegmentOptions],
) -> ArrayT:
    """The Fenchel-Young loss of each segment: which of its entries is the right one, or how they share.

    To train a choice among sets of different sizes. `fenchel_young` is for rows of one length, and says which maps have this loss.

    Parameters
    ----------
    target
        The right entry of each segment, integers that number the entries along `axis` (not within the segment), with the
        segments in the place of the entries; or a distribution over each segment, floating point numbers of the shape of x,
        one-hot for example.
    ignore_index
        The target of segments that are left out; a mean does not count them. A segment without entries has to be one of
        them; of targets that are distributions it is left out anyway.
    reduction
        "mean" over the segments, their "sum", or "none" for one value per segment.

    Returns
    -------
    Array
        The loss, one number of the kind and dtype of x; with `reduction="none"` one for each segment.

    Examples
    --------
    >>> anymax.segment_loss("sparsemax", [2.0, 1.5, -1.0, 3.0, 0.0], [0, 4], lengths=[3, 2], reduction="none")
    array([0.0625, 3.    ])
    """
    keywords = {"ignore_index": ignore_index, "reduction": reduction}
    wanted = LossOptions.read("segment_loss", None, keywords)
    call = SegmentCall.of("segment_loss", mapping, x, **options)
    if not call.mapping.facts.has_potential:
        raise TypeError(no_potential(call.mapping))
    target = _array.beside(target, call.x, "target", call.xp)
    dtype = result_dtype(call.x)
    if is_integer(target):
        value, counted = _of_entries(call, counts(target, call.xp), wanted.ignore_index)
    else:
        value, counted = _of_distributions(call, target)
    return wanted.reduce(value, counted, dtype, call.xp)


def _of_entries(call: SegmentCall, target: Array, ignore_index: int) -> tuple[Array, Array]:
    """(the loss of each segment, whether it counts), with the segments at their axis."""
    xp, axis = call.xp, call.axis
    if tuple(target.shape) != call.shape:
        raise ValueError(
            f"segment_loss: target of shape {tuple(target.shape)}: expected an entry for each segment, of shape {call.shape}, "
            f"or a distribution (floating point) of shape {tuple(call.x.shape)}"
        )
    ignored = target == ignore_index
    target_rank, stray = _target_rank(call, target, ignored)
    target_rank = _array.to_last(target_rank, axis, xp)
    value = call.unpadded("index_loss", target_rank) if call.mapping.sums_to_one else None
    value = _array.from_last(_by_rows(call, target_rank) if value is None else value, axis, xp)
    value = _array.poison(value, stray, xp) if not _array.known(stray) else value
    return value, xp.astype(~ignored, value.dtype)


def _target_rank(call: SegmentCall, target: Array, ignored: Array) -> tuple[Array, Array]:
    """(the rank of each target, its place within its segment; True where a target is no entry of its segment).

    The rank is `LEFT_OUT` for one that is ignored, and -1 for the class that the map hides.
    """
    xp, segments, axis = call.xp, call.segments, call.axis
    n = segments.num_entries
    none = ignored | (target == -1) if call.mapping.hidden is not None else ignored
    stray = ~none & ((target < 0) | (target >= n))
    _refuse(stray, target, f"the entries are 0 to {n - 1}" if n else "there are no entries", xp, axis)
    owner = rank = xp.zeros_like(target)
    if n:
        flat = xp.reshape(xp.where(none | stray, xp.zeros_like(target), target), (-1,))
        owner, rank = (
            xp.reshape(xp.take(of_entries, flat, axis=0), target.shape)
            for of_entries in (segments.index_of(target), segments.rank_of(target))
        )
    segment = xp.arange(segments.num_segments, dtype=target.dtype, **_array.device_of(target))
    apart = ~none & (owner != _at_axis(segment, axis, target.ndim, xp))
    _refuse(apart, target, "it is an entry of another segment", xp, axis)
    left = LEFT_OUT * xp.ones_like(target)
    left = left if none is ignored else xp.where(ignored, left, -xp.ones_like(target))
    return xp.where(none, left, counts(rank, xp)), stray | apart


def _at_axis(each: Array, axis: int, ndim: int, xp: Any) -> Array:
    """One number for each segment, [segments], with the segments at an axis of ndim."""
    return xp.reshape(each, tuple(-1 if i == axis else 1 for i in range(ndim)))


def _refuse(wrong: Array, target: Array, why: str, xp: Any, axis: int) -> None:
    if known_any(wrong, xp):
        at = tuple(int(i[0]) for i in xp.nonzero(wrong))
        said = ", ".join(map(str, at))
        raise IndexError(f"segment_loss: target[{said}] is {int(target[at])}, for segment {at[axis]}: {why}")


def _by_rows(call: SegmentCall, target_rank: Array) -> Array:
    """The loss of each segment, [..., segments]."""
    xp = call.xp
    options = EACH_ROW._replace(ignore_index=LEFT_OUT)

    def verb(bucket: Bucket, rows: Array) -> Array:
        each = xp.take(target_rank, bucket.ids, axis=-1)
        return fenchel_young(bucket_mapping(call.mapping, bucket), rows, each, options)

    return each_row(call.segments, upcast(call.rows, xp), verb, 0.0, least=call.mapping.least_classes)


def _of_distributions(call: SegmentCall, target: Array) -> tuple[Array, Array]:
    xp = call.xp
    if not _array.is_floating(target) or tuple(target.shape) != tuple(call.x.shape):
        raise ValueError(
            f"segment_loss: target of {target.dtype} and shape {tuple(target.shape)}: expected the number of an entry for each segment "
            f"(integers of shape {call.shape}), or a distribution (floating point) of shape {tuple(call.x.shape)}"
        )
    x = upcast(call.x, xp)
    of_rows = lambda mapping, rows, y: fenchel_young(mapping, rows, y, EACH_ROW)[..., None]  # noqa: E731
    value = each_formula(call.along, call.mapping, of_rows, x, _array.as_dtype(target, x.dtype, xp))
    value = _array.from_last(value, call.axis, xp)
    full = call.segments.lengths_of(value) > 0
    full = _at_axis(xp.astype(full, value.dtype), call.axis, value.ndim, xp)
    return value, xp.broadcast_to(full, value.shape)


document(globals())
