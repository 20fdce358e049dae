"""The verbs on segments: `apply`, `logsumexp` and others for rows of unequal length."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, TypedDict, Unpack

from .. import _array
from .._array import Array, as_dtype, is_array, is_ragged, namespace, stop_gradient, sum_dtype, upcast
from .._core.mapping import Mapping, no_threshold, with_missing_mass
from .._core.options import check_keywords
from .._core.rows import Rows
from .._core.tables import Default, document
from .._core.typing import ArrayT, Entropy, Numbers, Parameter
from .._random.draws import count_of, invert
from .._random.generators import uniform
from ..autodiff import bridge
from ..functional import apply
from ..functional.draws import check_draw, may_draw_none, one_draw
from ..inspection import entropy
from ..mappings import Softmax
from ..thresholds import Threshold, logsumexp, threshold
from . import tensors
from .call import SegmentCall
from .layout import Segments
from .padded import Bucket, bucket_mapping, bucket_rows, bucket_values, each_row, formula, join_segments, padded_rows


class SegmentOptions(TypedDict, total=False):
    """The options that say which entries belong together; the same for every verb on segments.

    Parameters
    ----------
    mapping
        The map, such as `anymax.Sparsemax()`, or its name. A parameter that is an array, such as alpha, has one value per
        segment: it broadcasts to x with segments in place of entries.
    x
        The scores, an array of NumPy, torch or JAX, or a list of numbers: entries along `axis`, and independent heads or
        features along the others. -inf marks a masked entry; NaN or +inf makes its segment NaN, and no other. Also a nested
        (jagged) or sparse (COO, CSR; rows along the last axis) tensor of torch, which contains its segments.
    index
        The segment of each entry, integers from 0 on, in any order; or a `Segments`.
    ptr
        The bounds, integers [num_segments + 1] that ascend from 0 to the number of entries.
    lengths
        How many entries each segment has, integers [num_segments]; the entries lie one segment after another.
    num_segments
        How many segments there are, by default the largest index plus one. An index under `jax.jit` needs it.
    axis, dim
        The axis of the entries, the first one by default.

    Returns
    -------
    Array
        p, an array of the shape, kind and dtype of x: its sum over each segment is 1.
    """

    index: Any
    ptr: Any
    lengths: Any
    num_segments: int | None
    axis: Annotated[int, Default(0)]
    dim: int | None


_SOFTMAX = Softmax()
HINTS = {
    "mask": "give the scores of entries to leave out as -inf",
    "batch": "say index=",
    "segment_ids": "say index=",
    "src": "the scores come first, without a name",
}


@check_keywords(HINTS)
def segment_apply(mapping: Mapping | str, x: ArrayT | Numbers, **options: Unpack[SegmentOptions]) -> ArrayT:
    """The probabilities p(x) of each segment: a map over rows of unequal length, without padding.

    Use it for attention over a node's neighbours, choices from baskets, or packed sequences; `apply` is for rows of one length. Give
    exactly one of index, ptr and lengths.

    Examples
    --------
    >>> anymax.segment_apply("sparsemax", [2.0, 1.5, 0.3, 0.0, 0.0], lengths=[3, 0, 2])
    array([0.75, 0.25, 0.  , 0.5 , 0.5 ])
    >>> anymax.segment_apply("softmax", [0.0, 5.0, 0.0], index=[1, 0, 1])
    array([0.5, 1. , 0.5])
    """
    if is_ragged(x):
        return tensors.apply("segment_apply", segment_apply, mapping, x, **options)
    call = SegmentCall.of("segment_apply", mapping, x, **options)
    return as_dtype(_probabilities(call), call.x.dtype, call.xp)


def apply_tensor(mapping: Mapping, x: Array, axis: int) -> Array:
    """`apply` for a nested or sparse tensor."""
    return tensors.rows("apply", segment_apply, apply, mapping, x, axis)


def _probabilities(call: SegmentCall) -> Array:
    """p, of the shape of the scores."""
    out = call.unpadded("forward")
    return formula(call.along, call.mapping, apply, call.scores) if out is None else out


@check_keywords(HINTS)
def segment_log_apply(mapping: Mapping | str, x: ArrayT | Numbers, **options: Unpack[SegmentOptions]) -> ArrayT:
    """The logarithms of the probabilities of each segment, -inf where p is exactly 0.

    More accurate than the logarithm of `segment_apply` where p is tiny.

    Returns
    -------
    Array
        log p, an array of the shape, kind and dtype of x.

    Examples
    --------
    >>> anymax.segment_log_apply("softmax", [0.0, -1000.0, 3.0], lengths=[2, 1])
    array([    0., -1000.,     0.])
    """
    if is_ragged(x):
        return tensors.apply("segment_log_apply", segment_log_apply, mapping, x, **options)
    call = SegmentCall.of("segment_log_apply", mapping, x, **options)
    out = call.unpadded("log_forward")
    if out is None:

        def log_p(mapping: Mapping, rows: Array) -> Array:
            over_all = Rows(rows, rows, mapping, rows.ndim - 1).over_all()
            return over_all.seen(bridge(call.x).log_p(over_all.mapping, over_all.rows))

        out = formula(call.along, call.mapping, log_p, upcast(call.x, call.xp))
    return as_dtype(out, call.x.dtype, call.xp)


@check_keywords(HINTS)
def segment_logsumexp(
    x: ArrayT | Numbers, *, temperature: Parameter = 1.0, **options: Unpack[SegmentOptions]
) -> ArrayT:
    """The smooth maximum `T log sum_i exp(x_i / T)` of each segment, -inf for an empty one.

    Use it to normalise log-probabilities, or as a maximum with a gradient, which is the softmax of each segment.

    Parameters
    ----------
    temperature
        T, a number of at least 0, or an array with one value per segment; 0 gives the maximum.

    Returns
    -------
    Array
        One number for each segment, as an array of the kind and dtype of x, with segments in place of entries.

    Examples
    --------
    >>> anymax.segment_logsumexp([2.0, 1.0, -1.0], lengths=[2, 0, 1]).round(3)
    array([ 2.313,   -inf, -1.   ])
    """
    call = SegmentCall.of("segment_logsumexp", _SOFTMAX, x, **options)
    t: Any = call.one_each(_array.number(temperature), "temperature")
    plain = not is_array(t) and t == 1 and type(t) is not bool and not _array.differentiates(call.x)
    out = call.unpadded("threshold") if plain else None
    if out is not None and not bool(call.xp.any(call.xp.isnan(out))):
        return call.back(out)

    def verb(bucket: Bucket, rows: Array) -> Array:
        return logsumexp(rows, temperature=bucket_values(t, bucket))

    return call.back(each_row(call.segments, call.rows, verb, -math.inf))


@check_keywords(HINTS)
def segment_threshold(
    mapping: Mapping | str, x: ArrayT | Numbers, **options: Unpack[SegmentOptions]
) -> Threshold[ArrayT]:
    """The threshold tau of each segment, and how many of its entries have a probability above 0.

    `anymax.threshold` defines tau for each map. It is -inf for a segment without entries.

    Parameters
    ----------
    mapping
        A map that has a threshold: softmax, sparsemax, entmax, budget, normmax, sparse softmax, or one of your own.

    Returns
    -------
    Threshold[Array]
        A `Threshold`, the pair (tau, support), with segments in place of entries. tau has a gradient, that of `anymax.threshold`.

    Examples
    --------
    >>> tau, support = anymax.segment_threshold("sparsemax", [2.0, 1.5, -1.0, 9.0], lengths=[3, 1])
    >>> tau, support
    (array([1.25, 8.  ]), array([2, 1]))
    """
    call = SegmentCall.of("segment_threshold", mapping, x, **options)
    if not call.mapping.has_threshold:
        raise TypeError(no_threshold(call.mapping))
    moves = any(_array.differentiates(a) for a in (call.x, *call.mapping.params().values()))
    out = None if moves else call.unpadded("threshold")
    if out is None:

        def verb(bucket: Bucket, rows: Array) -> Array:
            return threshold(bucket_mapping(call.mapping, bucket), rows).tau

        out = each_row(call.segments, call.rows, verb, -math.inf, least=call.mapping.least_classes)
    p = _array.to_last(_probabilities(call.constant()), call.axis, call.xp)
    return Threshold(call.back(out), _array.from_last(_counted(call.segments, p), call.axis, call.xp))


def _counted(segments: Segments, p: Array) -> Array:
    """How many of p [..., entries] are above 0, [..., segments]."""
    xp = namespace(p)

    def verb(bucket: Bucket, rows: Array) -> Array:
        return xp.sum(_array.counts(rows > 0, xp), axis=-1)

    return each_row(segments, p, verb, 0, fill=0.0)


@check_keywords(HINTS)
def segment_support(p: ArrayT | Numbers, **options: Unpack[SegmentOptions]) -> ArrayT:
    """The size of each segment's support: how many of its entries have a probability above 0.

    Use it to see how many neighbours a sparse map keeps; `anymax.support(p)` gives the entries themselves.

    Parameters
    ----------
    p
        Probabilities by entry, as `segment_apply` returns them.

    Returns
    -------
    Array
        Integers, an array of the kind of p with segments in place of entries.

    Examples
    --------
    >>> p = anymax.segment_apply("sparsemax", [2.0, 1.5, -1.0, 9.0], lengths=[3, 1])
    >>> anymax.segment_support(p, lengths=[3, 1])
    array([2, 1])
    """
    call = SegmentCall.of("segment_support", _SOFTMAX, p, **options)
    return _array.from_last(_counted(call.segments, stop_gradient(call.rows)), call.axis, call.xp)


@check_keywords(HINTS)
def segment_entropy(
    p: ArrayT | Numbers,
    kind: Entropy = "shannon",
    alpha: Parameter | None = None,
    **options: Unpack[SegmentOptions],
) -> ArrayT:
    """The entropy of the distribution over each segment, by Shannon, Renyi or Tsallis; 0 for an empty one.

    Use it to see how sure attention is; `anymax.entropy` defines each kind.

    Parameters
    ----------
    p
        Probabilities by entry, as `segment_apply` returns them.
    kind
        "shannon", "renyi", "renyi2" or "tsallis".
    alpha
        The order of "renyi" (2 by default) and "tsallis" (1.5), a number above 0 or an array with one value per segment.

    Returns
    -------
    Array
        One number for each segment, as an array of the kind and dtype of p, with segments in place of entries.

    Examples
    --------
    >>> anymax.segment_entropy([0.5, 0.5, 1.0], lengths=[2, 1]).round(4)
    array([0.6931, 0.    ])
    """
    call = SegmentCall.of("segment_entropy", _SOFTMAX, p, **options)
    order = call.one_each(alpha, "alpha")

    def verb(bucket: Bucket, rows: Array) -> Array:
        return entropy(rows, kind, bucket_values(order, bucket))

    return call.back(each_row(call.segments, call.rows, verb, 0.0, fill=0.0))


@check_keywords(HINTS, key="generator", seed="generator")
def segment_sample(
    mapping: Mapping | str,
    x: ArrayT | Numbers,
    *,
    generator: Any = None,
    num_samples: int | None = None,
    **options: Unpack[SegmentOptions],
) -> ArrayT:
    """An entry of each segment, drawn with the probabilities of a map.

    Use it to choose a neighbour to walk to, or an item of a basket. An entry of probability exactly 0 is never drawn. With one generator,
    segment i uses the i-th number, in C order, or with `num_samples` = S the S numbers from i * S on.

    Parameters
    ----------
    generator
        A generator or key, an integer seed, or a list of these, one per segment; by default NumPy's or torch's global one.
    num_samples
        How many to draw from each segment, independently, as a new first axis.

    Returns
    -------
    Array
        Integers, the indices of entries along `axis`, with segments in place of entries; -1 where a segment has none to
        draw, or where the sink of `Sink` is drawn.

    Examples
    --------
    >>> anymax.segment_sample("sparsemax", [2.0, 1.5, -1.0, 9.0], lengths=[3, 0, 1], generator=0)
    array([ 0, -1,  3])
    """
    size = count_of(num_samples)
    call = SegmentCall.of("segment_sample", mapping, x, **options).constant()
    xp = call.xp
    check_draw(call.mapping, "segment_sample")
    call = dataclasses.replace(call, x=upcast(call.x, xp))
    p = _array.to_last(_probabilities(call), call.axis, xp)  # [..., entries]
    like = xp.astype(p, sum_dtype(p, xp))
    u = uniform((*p.shape[:-1], call.segments.num_segments, size), like[..., :0], generator)
    rows = padded_rows(call.segments, p)
    drawn = [_drawn(call, p, u, bucket) for bucket in rows.buckets]
    out = join_segments(
        rows, [_array.to_last(part, part.ndim - 2, xp) for part in drawn], -1
    )  # [..., samples, segments]
    out = _array.to_last(out, out.ndim - 2, xp)  # [..., segments, samples]
    last = out.ndim - 1
    if num_samples is None:
        return _array.from_last(out[..., 0], call.axis, xp)
    return _array.from_last(xp.permute_dims(out, (last, *range(last))), call.axis + 1, xp)


def _drawn(call: SegmentCall, p: Array, u: Array, bucket: Bucket) -> Array:
    """The entries that u [..., segments, samples] draws from p [..., entries], [..., rows, samples]; -1 for none of them."""
    xp, mapping = call.xp, call.mapping
    row = bucket_rows(p, bucket, 0.0)  # [..., rows, width]
    if may_draw_none(mapping):
        row = _with_none(call, bucket) if one_draw(mapping) == "share" else with_missing_mass(row, 1.0, xp)
    drawn = invert(row, xp.take(u, bucket.ids, axis=-2), xp)  # [..., rows, samples]
    drawn = xp.where(drawn >= bucket.width, -xp.ones_like(drawn), drawn)  # none of the entries
    table = xp.broadcast_to(xp.reshape(bucket.entry, (-1, bucket.width)), (*drawn.shape[:-1], bucket.width))
    entries = xp.take_along_axis(table, xp.where(drawn < 0, xp.zeros_like(drawn), drawn), axis=-1)
    return xp.where(drawn < 0, -xp.ones_like(entries), entries)


def _with_none(call: SegmentCall, bucket: Bucket) -> Array:
    """p of rows over all classes, where the entries don't say what the sum is."""
    scores = bucket_rows(call.rows, bucket, -math.inf, call.mapping.least_classes)
    over_all = Rows(scores, scores, bucket_mapping(call.mapping, bucket), scores.ndim - 1).over_all()
    return apply(over_all.mapping, over_all.rows)


document(globals())
