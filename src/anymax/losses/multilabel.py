"""A loss for several labels per row, based on softmax."""

from __future__ import annotations

import math
from typing import Any

from .. import _array
from .._array import Array, asarray, is_integer, known_any, namespace, quiet, stop_gradient, total, upcast
from .._core.rows import hide, prepare_axes
from .._core.shards import refuse as refuse_sharded
from .._core.typing import ArrayT, Axes, Mask, Numbers, Reduction, Target, Weight
from ..mappings import Softmax
from .options import LossOptions, class_weights, is_loss, result_dtype


@is_loss
def multilabel_softmax_loss(
    scores: ArrayT | Numbers,
    target: Target,
    weight: Weight = None,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    axis: Axes = None,
    dim: Axes = None,
    mask: Mask = None,
) -> ArrayT:
    """Softmax and cross-entropy for several labels, `log(1 + sum_neg exp(x_i)) + log(1 + sum_pos exp(-x_j))`.

    Use it for multi-label classification: predict the classes with a score above 0 (Su 2020; Su et al. 2022).

    Parameters
    ----------
    target
        1 for a label, 0 for no label, or a number in between; in the shape of the scores.
    weight
        One factor for each class, which multiplies its exp(x_i) or exp(-x_j).
    ignore_index
        The value in `target` of entries that are left out.

    Examples
    --------
    >>> anymax.multilabel_softmax_loss([[3.0, -2.0, 1.0]], [[1, 0, 1]]).round(3)
    np.float64(0.476)
    """
    refuse_sharded("multilabel_softmax_loss", scores)
    keywords = {"reduction": reduction, "axis": axis, "dim": dim, "mask": mask}
    options, x = LossOptions.read("multilabel_softmax_loss", weight, keywords), asarray(scores)
    call = prepare_axes(Softmax(), x, options.class_axis(x), options.mask)
    rows, xp = call.rows, namespace(call.rows)
    dtype, s = result_dtype(rows), upcast(rows, xp)
    t = _array.beside(target, rows, "target", xp)
    t = _array.counts(t, xp) if is_integer(t) else t
    if tuple(t.shape) != tuple(x.shape):
        raise ValueError(
            f"target of shape {tuple(t.shape)}: expected one number for each score, shape {tuple(x.shape)}, 1 for a label and 0 for none"
        )
    t = _array.to_last(t, call.axis, xp) if call.joined is None else call.joined.lay_out(t, "target")
    t = xp.astype(t, s.dtype)
    valid = t != ignore_index
    y = xp.where(valid, t, xp.zeros_like(s))
    if known_any((y < 0) | (y > 1), xp):
        raise ValueError("target: expected entries between 0 and 1 (1 for a label, 0 for none)")
    lift = 0.0 if weight is None else _array.log(class_weights(weight, s, xp), xp)
    with quiet(s):
        value = _log1p_sum_exp(s + lift, 1.0 - y, valid, xp) + _log1p_sum_exp(lift - s, y, valid, xp)
        value = xp.squeeze(value, axis=-1)
        return options.reduce(value, xp.ones_like(value), dtype, xp)


def _log1p_sum_exp(s: Array, factor: Array, valid: Array, xp: Any) -> Array:
    """log(1 + sum factor exp(s)), [..., 1]; entries with factor 0 do not count, whatever their score."""
    counts = valid & (factor > 0)
    s = hide(s + xp.log(xp.where(counts, factor, xp.ones_like(factor))), counts)
    high = _array.top(s, xp)
    anchor = stop_gradient(xp.where((high > 0) & (high < math.inf), high, xp.zeros_like(high)))
    seen = s != -math.inf
    e = xp.where(seen, xp.exp(xp.where(seen, s, xp.zeros_like(s)) - anchor), xp.zeros_like(s))
    return anchor + xp.log(xp.exp(-anchor) + total(e, xp))
