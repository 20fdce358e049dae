"""Losses: Fenchel-Young and its kin, for every map, with the signature and the manners of `torch.nn.functional.cross_entropy`.

Once for all of them: `target` is class indices or a distribution over the classes; `weight` holds one factor for each class;
`ignore_index` marks samples to leave out; `label_smoothing` mixes the target with the uniform distribution over the unmasked
classes (epsilon over the n - 1 others alone is `label_smoothing=epsilon * n / (n - 1)`); `reduction` is "mean", "sum" or "none". The
classes are axis 1 (axis 0 of a vector), as in torch, where maps take the last axis; `axis` is another, and along a tuple of axes classes
are counted as a reshape of these would, in the order given. Class indices for scores of shape (N, T, C) with T = C would fit classes along
either axis: unless `axis` is given, that is a warning, once. A masked class (-inf) that is not the target changes nothing; a masked target
gives +inf. A mean over nothing is 0.
"""

from __future__ import annotations

import math
from typing import Any, Unpack

from . import _array
from ._array import (
    Array,
    asarray,
    dot,
    is_array,
    is_integer,
    is_torch,
    known,
    known_any,
    namespace,
    quiet,
    stop_gradient,
    total,
    upcast,
)
from ._mapping import Mapping
from ._names import as_mapping
from ._options import answering
from ._rows import prepare
from ._targets import (
    Batch,
    ask_for_axis,
    cast,
    check_reduction,
    class_axis,
    class_weights,
    one_axis,
    reduced,
    result_dtype,
)
from ._typing import ArrayT, LossOptions, Numbers, Reduction
from .autodiff import bridge
from .functional import log_rows
from .mappings import Entmax, NormMax, PerturbMax, Softmax, Sparsemax, SparseSoftmax, Taylor
from .margins import as_margin

_SOFTMAX, _SPARSEMAX, _ENTMAX15 = Softmax(), Sparsemax(), Entmax(1.5)


def fenchel_young(
    mapping: Mapping, scores: ArrayT | Numbers, target: Any, weight: Any = None, **options: Unpack[LossOptions]
) -> ArrayT:
    """`Omega*(x) + Omega(y) - <x, y>`: convex, >= 0, 0 exactly where y = p(x); its gradient in the scores is p - y.

    For a map with a potential; others say which loss to use instead. Blondel, Martins and Niculae 2020.
    """
    return _fenchel_young(as_mapping(mapping, "fenchel_young"), scores, target, weight, True, options)


def nll(
    mapping: Mapping, scores: ArrayT | Numbers, target: Any, weight: Any = None, **options: Unpack[LossOptions]
) -> ArrayT:
    """`-sum_i y_i log p_i`, for any map; +inf where a target has probability exactly 0."""
    mapping, scores, target = one_axis(as_mapping(mapping, "nll"), scores, target, options)
    if mapping.kernel == Softmax.kernel:  # for class indices it is the same loss
        out = _by_index(mapping, scores, target, weight, options)
        if out is not None:
            return out
    batch = Batch.of(mapping, scores, target, weight, options)
    xp = batch.xp
    with quiet(batch.rows):
        log_p = log_rows(batch.mapping, batch.rows)
        factor = batch.y if batch.class_weight is None else batch.y * batch.class_weight
        asked = (factor != 0) | (log_p > -math.inf)  # the derivative in y is -log p also where y is 0
        value = -total(xp.where(asked, factor * xp.where(asked, log_p, xp.zeros_like(log_p)), xp.zeros_like(log_p)), xp)
        return batch.reduce(value, weighted=True)


def smoothed_nll(
    mapping: Mapping,
    scores: ArrayT | Numbers,
    target: Any,
    weight: Any = None,
    *,
    epsilon: float = 1e-6,
    **options: Unpack[LossOptions],
) -> ArrayT:
    """`-log((p_t + epsilon) / (1 + n epsilon))`, the cross-entropy made finite for sparse outputs.

    Not convex, and nearly without gradient where p_t is 0: `fenchel_young` is the better loss. n counts the unmasked classes.
    """
    epsilon = _array.number(epsilon)
    if isinstance(epsilon, bool) or not isinstance(epsilon, (int, float)) or not 0 < epsilon < math.inf:
        raise ValueError(f"smoothed_nll: epsilon must be a positive number, got {epsilon!r}")
    batch = Batch.of(mapping, scores, target, weight, options)
    xp = batch.xp
    with quiet(batch.rows):
        p = bridge(batch.rows).apply(batch.mapping, batch.rows)
        n = total(xp.astype(batch.keep, p.dtype), xp)
        per_class = -xp.log((p + epsilon) / (1.0 + n * epsilon))
        per_class = xp.where(batch.keep, per_class, math.inf * xp.ones_like(per_class))
        factor = batch.y if batch.class_weight is None else batch.y * batch.class_weight
        asked = (factor != 0) | batch.keep
        value = total(xp.where(asked, factor * xp.where(asked, per_class, xp.zeros_like(p)), xp.zeros_like(p)), xp)
        return batch.reduce(value, weighted=True)


def accuracy_loss(
    mapping: Mapping, scores: ArrayT | Numbers, target: Any, weight: Any = None, **options: Unpack[LossOptions]
) -> ArrayT:
    """`-p_t`, minus the smooth accuracy: in [-1, 0]; its gradient vanishes far from the answer, so fine-tune with it."""
    batch = Batch.of(mapping, scores, target, weight, options)
    p = bridge(batch.rows).apply(batch.mapping, batch.rows)
    return batch.reduce(-dot(batch.y, p, batch.xp))


def stop_gradient_loss(
    mapping: Mapping, scores: ArrayT | Numbers, target: Any, weight: Any = None, **options: Unpack[LossOptions]
) -> ArrayT:
    """`<stop_gradient(p - y), x>`: the gradient p - y for any map, also one without a potential.

    The value means nothing: it may have either sign, and a smaller one is not better. Watch `nll` or the accuracy instead.
    """
    batch = Batch.of(mapping, scores, target, weight, options)
    xp = batch.xp
    p = stop_gradient(bridge(batch.rows).apply(batch.mapping, stop_gradient(batch.rows)))
    x = xp.where(batch.keep, batch.rows, xp.zeros_like(batch.rows))
    return batch.reduce(dot(p - batch.y, x, xp))


def margin_loss(
    mapping: Mapping,
    cosines: ArrayT | Numbers,
    target: Any,
    weight: Any = None,
    *,
    margin: Any = 0.35,
    scale: Any = 30.0,
    **options: Unpack[LossOptions],
) -> ArrayT:
    """The map's loss on `scale * margin(cosines, target)`: AM/CosFace for a number, or any margin of `anymax.margins`.

    The Fenchel-Young loss where the map has one, else `nll`. `target` is class indices; cosines come from `transforms.cosine`.
    """
    mapping, cosines = as_mapping(mapping, "margin_loss"), asarray(cosines, "cosines")
    given: Any = options
    said = given.pop("axis", None), given.pop("dim", None)
    axis = class_axis(cosines, *said)
    xp = namespace(cosines)
    cosines = _array.floating(cosines, xp, "cosines")
    dtype, wide = result_dtype(cosines), upcast(cosines, xp)  # no rounding between the margin and the loss
    target = _array.beside(target, wide, "target", xp)
    ask_for_axis(cosines, target, *said)
    ignored = options.get("ignore_index", -100)
    counted = _array.counts(target, xp) if is_integer(target) else target
    counted = xp.where(counted == ignored, -xp.ones_like(counted), counted)
    scale = _array.number(scale)
    if not is_array(scale) and (isinstance(scale, bool) or not isinstance(scale, (int, float))):
        raise TypeError(f"margin_loss: scale must be a number or an array, got {_array.shown(scale)}")
    scores = as_margin(margin)(wide, counted, axis) * _array.like(scale, wide, xp)
    loss = fenchel_young if mapping.facts.has_potential else nll
    out = loss(mapping, scores, target, weight, axis=axis, **given)
    return cast(out, dtype, xp)


@answering()
def multilabel_softmax_loss(
    scores: ArrayT | Numbers,
    target: Any,
    weight: Any = None,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    axis: int | None = None,
    dim: int | None = None,
    mask: Any = None,
) -> ArrayT:
    """`log(1 + sum_neg exp(x_i)) + log(1 + sum_pos exp(-x_j))`: softmax and cross-entropy for many labels, with threshold 0.

    target: 1 for a label, 0 for none, or anything between; an entry of `ignore_index` is left out. Su 2020; Su et al. 2022.
    """
    x = asarray(scores)
    x, rows, _, axis = prepare(Softmax(), x, class_axis(x, axis, dim), mask, None)
    xp = namespace(rows)
    dtype, s = result_dtype(rows), upcast(rows, xp)
    t = _array.beside(target, rows, "target", xp)
    t = _array.counts(t, xp) if is_integer(t) else t
    if tuple(t.shape) != tuple(x.shape):
        raise ValueError(
            f"target of shape {tuple(t.shape)}: expected one number for each score, shape {tuple(x.shape)}, 1 for a label and 0 for none"
        )
    t = _array.to_last(t, axis, xp)
    valid = t != ignore_index
    y = xp.where(valid, xp.astype(t, s.dtype), xp.zeros_like(s))
    if known_any((y < 0) | (y > 1), xp):
        raise ValueError("target: expected entries between 0 and 1 (1 for a label, 0 for none)")
    lift = 0.0 if weight is None else _array.log(class_weights(weight, s, xp), xp)
    with quiet(s):
        value = _log1p_sum_exp(s + lift, 1.0 - y, valid, xp) + _log1p_sum_exp(lift - s, y, valid, xp)
        value = xp.squeeze(value, axis=-1)
        return reduced(value, xp.ones_like(value), reduction, dtype, xp)


def _log1p_sum_exp(s: Array, factor: Array, valid: Array, xp: Any) -> Array:
    """log(1 + sum factor exp(s)), [..., 1]; entries with factor 0 don't count, whatever their score."""
    counts = valid & (factor > 0)
    s = xp.where(counts, s + xp.log(xp.where(counts, factor, xp.ones_like(factor))), -math.inf * xp.ones_like(s))
    high = _array.top(s, xp)
    anchor = stop_gradient(xp.where((high > 0) & (high < math.inf), high, xp.zeros_like(high)))
    seen = s != -math.inf
    e = xp.where(seen, xp.exp(xp.where(seen, s, xp.zeros_like(s)) - anchor), xp.zeros_like(s))
    return anchor + xp.log(xp.exp(-anchor) + total(e, xp))


# -- sugar -------------------------------------------------------------------------------------------------------------------


def cross_entropy(scores: ArrayT | Numbers, target: Any, weight: Any = None, **options: Unpack[LossOptions]) -> ArrayT:
    """`logsumexp(x) - <x, y>`, as `torch.nn.functional.cross_entropy`."""
    return nll(_SOFTMAX, scores, target, weight, **options)


def sparsemax_loss(scores: ArrayT | Numbers, target: Any, weight: Any = None, **options: Unpack[LossOptions]) -> ArrayT:
    """The Fenchel-Young loss of sparsemax; the modified Huber loss for two classes."""
    return fenchel_young(_SPARSEMAX, scores, target, weight, **options)


def entmax_loss(
    scores: ArrayT | Numbers, target: Any, weight: Any = None, *, alpha: Any = 1.5, **options: Unpack[LossOptions]
) -> ArrayT:
    """The Fenchel-Young loss of alpha-entmax, with an exact gradient in alpha."""
    return fenchel_young(Entmax(alpha), scores, target, weight, **options)


def entmax15_loss(scores: ArrayT | Numbers, target: Any, weight: Any = None, **options: Unpack[LossOptions]) -> ArrayT:
    """The Fenchel-Young loss of 1.5-entmax."""
    return fenchel_young(_ENTMAX15, scores, target, weight, **options)


def sparse_softmax_loss(
    scores: ArrayT | Numbers,
    target: Any,
    weight: Any = None,
    *,
    k: int | None = None,
    p: Any = None,
    **options: Unpack[LossOptions],
) -> ArrayT:
    """`logsumexp over the kept classes - <x, y>`; finite, with a full gradient, also when the target is not kept."""
    return _fenchel_young(SparseSoftmax(k=k, p=p), scores, target, weight, False, options)


def taylor_softmax_loss(
    scores: ArrayT | Numbers, target: Any, weight: Any = None, *, order: int = 2, **options: Unpack[LossOptions]
) -> ArrayT:
    """`-log p_t` of Taylor softmax."""
    return nll(Taylor(order), scores, target, weight, **options)


def normmax_loss(
    scores: ArrayT | Numbers, target: Any, weight: Any = None, *, alpha: Any = 2.0, **options: Unpack[LossOptions]
) -> ArrayT:
    """The Fenchel-Young loss of normmax."""
    return fenchel_young(NormMax(alpha), scores, target, weight, **options)


def perturb_max_loss(
    scores: ArrayT | Numbers,
    target: Any,
    weight: Any = None,
    *,
    noise: Any = "normal",
    nodes: int | None = None,
    scale: Any = 1.0,
    **options: Unpack[LossOptions],
) -> ArrayT:
    """`E max(x + noise) - x_t`, less the mean of the noise: the Fenchel-Young loss of perturb-max."""
    return fenchel_young(PerturbMax(noise, nodes=nodes, scale=scale), scores, target, weight, **options)


# -- the one implementation -------------------------------------------------------------------------------------------------------


def _fenchel_young(mapping: Mapping, scores: Any, target: Any, weight: Any, with_constant: bool, options: Any) -> Array:
    if not mapping.facts.has_potential:
        raise TypeError(mapping.no_potential())
    mapping, scores, target = one_axis(mapping, scores, target, options)
    out = _by_index(mapping, scores, target, weight, options)
    if out is not None:
        return out
    batch = Batch.of(mapping, scores, target, weight, options)
    if with_constant and batch.smoothing and isinstance(mapping, SparseSoftmax) and mapping.k is not None:
        raise ValueError(
            f"label_smoothing gives every class some mass, which no {mapping!r} can reach: its Fenchel-Young loss would be "
            "infinite; use sparse_softmax_loss, which leaves that constant out"
        )
    xp, y = batch.xp, batch.y
    batch.check_mass()
    value = bridge(batch.rows).loss(batch.mapping, batch.rows, y)
    with quiet(batch.rows):
        if with_constant and batch.soft:
            value = value + batch.mapping.constant(y, xp)
        masked = xp.any((y > 0) & ~batch.keep, axis=-1, keepdims=True)
        value = _not_below_zero(batch, value, masked)
        value = value + xp.where(masked, math.inf * xp.ones_like(value), xp.zeros_like(value))
        return batch.reduce(value)


def _not_below_zero(batch: Batch, value: Array, masked: Array) -> Array:
    """0 for what rounding has made negative; more than that is a fault of the map's formulas: an error, or where no value may be
    asked for, left to be seen."""
    xp, below = batch.xp, value < 0
    if _array.known(below) and not bool(xp.any(below)):
        return value
    wrong = (value < -batch.rounding()) & ~masked & ~batch.poisoned & (batch.counted != 0)
    if known_any(wrong, xp):
        raise ValueError(
            f"{batch.mapping!r}: its Fenchel-Young loss is {float(xp.min(stop_gradient(value))):g}, and no such loss is below 0: either "
            "its omega() is not the regulariser of its forward() (anymax.check_mapping tells), or the target is out of the map's range"
        )
    return value + stop_gradient(xp.where(below & ~wrong, -value, xp.zeros_like(value)))


def _by_index(mapping: Mapping, scores: Any, target: Any, weight: Any, options: Any) -> Array | None:
    """The loss of class indices by an engine that has it in one pass; None where it is to be composed, or refused with a sentence."""
    if not is_array(scores) or not is_array(target) or not is_integer(target) or is_torch(scores) != is_torch(target):
        return None
    if options.keys() - {"axis", "dim", "mask", "ignore_index", "reduction"} and (
        options.keys() - {"axis", "dim", "mask", "ignore_index", "reduction", "label_smoothing"}
        or options["label_smoothing"] != 0
    ):
        return None
    mass = getattr(mapping, "mass", 1.0)
    if is_array(mass) or mass != 1.0 or type(options.get("ignore_index", -100)) is not int:
        return None
    reduction = options.get("reduction", "mean")
    check_reduction(reduction)
    mask, ignored = options.get("mask"), options.get("ignore_index", -100)
    if scores.ndim > 2:
        ask_for_axis(scores, target, options.get("axis"), options.get("dim"))
    axis = class_axis(scores, options.get("axis"), options.get("dim"))
    call = ignored, reduction
    if weight is None and mask is None:
        value = bridge(scores).reduced_loss(mapping, scores, target, axis, *call)
        if value is not None:
            return cast(value, result_dtype(scores), namespace(scores))
    _, rows, mapping, axis = prepare(mapping, scores, axis, mask, None)
    leaf, xp = bridge(rows), namespace(rows)
    if tuple(target.shape) != tuple(rows.shape[:-1]) or (is_torch(rows) and target.device != rows.device):
        return None
    if weight is None:
        value = leaf.reduced_loss(mapping, rows, target, -1, *call)
        if value is not None:
            return cast(value, result_dtype(rows), xp)
    n, index = rows.shape[-1], _array.counts(_array.beside(target, rows, "target", xp), xp)
    ignored = index == ignored
    traced = not known(index)  # or on a GPU, which is not waited for
    if not traced and not known_any(ignored, xp):
        ignored = None
    stray = (index < 0) | (index >= n)
    stray = stray if ignored is None else stray & ~ignored
    if known_any(stray, xp):
        return None
    if traced:  # an index above all classes makes the loss NaN
        index = xp.where(stray, n * xp.ones_like(index), index)
    if ignored is not None:
        index = xp.where(ignored, -xp.ones_like(index), index)
    value = leaf.index_loss(mapping, rows, index)
    if value is None:
        return None
    norm = None
    if weight is not None:
        class_weight = class_weights(weight, upcast(rows[..., :1], xp) if n == 1 else upcast(rows, xp), xp)
        norm = class_weight[xp.where(index < 0, xp.zeros_like(index), index)]
        norm = norm if ignored is None else xp.where(ignored, xp.zeros_like(norm), norm)
        with quiet(value):
            value = xp.where(norm == 0, xp.zeros_like(value), value * norm)
    elif ignored is not None:
        norm = xp.astype(~ignored, value.dtype)
    dtype = result_dtype(rows)
    if norm is not None:
        return reduced(value, norm, reduction, dtype, xp)
    out = (
        xp.mean(value)
        if reduction == "mean" and math.prod(value.shape)
        else xp.sum(value)
        if reduction != "none"
        else value
    )
    return cast(out, dtype, xp)
