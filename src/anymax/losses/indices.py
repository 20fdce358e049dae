"""The loss of class indices by an engine, in one pass over the scores, without a one-hot target."""

from __future__ import annotations

from typing import Any

from .. import _array
from .._array import Array, is_array, is_integer, is_torch, known, namespace, quiet, upcast
from .._core.classes import class_indices
from .._core.mapping import Mapping
from .._core.rows import prepare
from ..autodiff import bridge
from ..kernels.link import WITHOUT_LOSS
from ..kernels.linked import link_of
from .options import LossOptions, cast, class_weights, result_dtype
from .targets import ask_for_axis, counted_weight, weighted


def index_loss(mapping: Mapping, scores: Any, target: Any, options: LossOptions) -> Array | None:
    """The Fenchel-Young loss; None if the general formula must compute it, or must report a wrong target."""
    link = link_of(mapping)
    if isinstance(link, str) or link.kind in WITHOUT_LOSS or options.smoothing or not mapping.sums_to_one:
        return None
    of_torch = is_torch(scores)
    if of_torch != is_torch(target) or not (of_torch or (is_array(scores) and is_array(target))):
        return None
    if not is_integer(target):
        return None
    if scores.ndim > 2:
        ask_for_axis(scores, target, options.axis)
    framework, axis = bridge(scores), options.class_axis(scores)
    ignored, reduction = options.ignore_index, options.reduction
    plain = options.weight is None and ignored < 0
    if plain and options.mask is None and (link.params is None or not link.params.ndim) and framework.reduces(scores):
        value = framework.index_loss(mapping, scores, target, axis, ignored, reduction)  # without moving the axis
        return value if value is None or value.dtype == result_dtype(scores) else cast(value, result_dtype(scores))
    call = prepare(mapping, scores, axis, options.mask)
    rows, mapping = call.rows, call.mapping
    if tuple(target.shape) != tuple(rows.shape[:-1]) or (of_torch and target.device != rows.device):
        return None
    if plain and framework.reduces(rows):
        value = framework.index_loss(mapping, rows, target, -1, ignored, reduction)
        return value if value is None else cast(value, result_dtype(rows))
    return _each_row(mapping, rows, target, options)


def loss_of_rows(mapping: Mapping, rows: Array, index: Array) -> Array | None:
    """The loss of each row by an engine, in fp32 or fp64 whatever the dtype of the scores; None as in `index_loss`.

    index: a class of each row that has been checked; -1 means none.
    """
    if isinstance(link_of(mapping), str) or not mapping.sums_to_one:
        return None
    return bridge(rows).index_loss(mapping, rows, index)


def _each_row(mapping: Mapping, rows: Array, target: Array, options: LossOptions) -> Array | None:
    """`index_loss` from the loss of each row, weighted and reduced here."""
    xp, dtype = namespace(rows), result_dtype(rows)
    index = _array.counts(_array.beside(target, rows, "target", xp), xp)
    index, left_out = class_indices("target", index, rows.shape[-1], options.ignore_index, xp)
    value = bridge(rows).index_loss(mapping, rows, index)
    if value is None:
        return None
    class_weight = None if options.weight is None else class_weights(options.weight, upcast(rows, xp), xp)
    every = class_weight is None and known(left_out) and not bool(xp.any(left_out))
    norm = None if every else counted_weight(index, index < 0, class_weight, value.dtype, xp)
    if class_weight is not None:
        with quiet(value):
            value = weighted(value, norm, xp)
    return options.reduce(value, norm, dtype, xp)
