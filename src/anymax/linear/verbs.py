"""Output layers: the loss, log p and threshold of scores `x @ linear_weight.T` that are never all held.

With a large vocabulary the scores and their gradient are the largest arrays of a training step. Here they are computed a part at a time.
A sparse map has a gradient p - y with few entries, so two of the step's three matrix products touch the support only. For softmax the
backward pass computes each block of scores again. `layer` reads the operands, and the bridge of their framework does the work.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .. import _array
from .._array import Array, Namespace, is_array, is_integer, namespace, quiet, upcast
from .._core.mapping import Mapping
from .._core.options import check_keywords, documented_like
from .._core.shards import refuse as refuse_sharded
from .._core.typing import ArrayT, Mask, Numbers, Reduction, Target, Weight
from ..autodiff import bridge
from ..likelihood.support import places_of, read_support
from ..likelihood.terms import terms_of
from ..losses.margins import as_margin
from ..losses.options import LossOptions, class_weights
from ..losses.targets import counted_weight, holds_indices, refuse_strays
from ..mappings import Softmax
from ..thresholds import Threshold
from ..transforms.applying import transforms_along
from ..transforms.base import Transform
from .job import Job
from .layer import Layer, check_chunk
from .per_row import PerRow, RowLogProb, RowLoss, Thresholds

_SOFTMAX = Softmax()
_HINTS = {
    "axis": "leave it out: the features of x are its last axis",
    "options": "say chunk=",
    "input": "say x=",
    "softcap": "give it as transform=, a function of the scores",
    "temperature": "divide x by it",
}


@check_keywords(_HINTS, bias="linear_bias")
def linear_loss(
    x: ArrayT | Numbers,
    linear_weight: Any,
    target: Target,
    mapping: Mapping | str = _SOFTMAX,
    *,
    linear_bias: Any = None,
    weight: Weight = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    mask: Mask = None,
    transform: Callable[[Any], Any] | None = None,
    chunk: int | None = None,
    least: float = 0.0,
) -> ArrayT:
    """The loss of a map on the scores `x @ linear_weight.T + linear_bias` of an output layer, which are never all held.

    Use it to train a classifier with many classes, such as a language model, in little more memory than its weights. The loss
    is the cross-entropy for softmax (also as `Entmax(1.0)`), as in `torch.nn.functional.linear_cross_entropy`;
    `sparse_softmax_loss` for sparse softmax; `nll` for a map without a Fenchel-Young loss; and `fenchel_young` for all others.
    Sparse maps, such as `Entmax(1.5)`, are also faster, since their gradient needs only the classes of the support.

    For second derivatives use `anymax.use("reference")` in JAX; torch then holds the scores.

    Parameters
    ----------
    x
        The features, [..., features].
    linear_weight
        The weight of the layer, [classes, features], as in `torch.nn.Linear`.
    target
        Class indices (integers, of the shape of x without its last axis), or distributions over the classes (floating
        point).
    mapping
        The map, such as `anymax.Entmax(1.5)`, or its name; its parameters are numbers or have one value per row.
    linear_bias
        One number per class, added to the scores.
    weight
        One factor for each class; a mean is then weighted by that of each sample's target, as in torch.
    reduction
        "mean" over the samples, their "sum", or "none" for one value per sample.
    ignore_index
        The class index of samples that are left out; a mean does not count them.
    label_smoothing
        The share of the target, from 0 to 1, that is spread evenly over the unmasked classes.
    mask
        Booleans that broadcast to the scores, [..., classes] or [classes], True = keep.
    transform
        A transform of the scores, such as `anymax.temperature(2.0)`. It gets all scores of a group of rows, so a random
        one, or one whose parameters differ between rows, is refused.
    chunk
        How many classes to compute at a time (in `anymax.distributed.linear_loss` it counts rows); for a map that needs all
        scores of a row, how many rows: as many as have the same number of scores. The default is a small part of all scores.
    least
        For softmax, a probability below which a class gets no gradient; 0, the default, keeps all. If no row has more than a
        few hundred classes above it, the backward pass is as fast as that of a sparse map: 0.004 helps, 1e-4 does not. The
        loss stays exact, and so does the gradient where there is nothing to gain, in JAX and under torch.compile.

    Returns
    -------
    Array
        The loss, one number of the kind and dtype of x; with `reduction="none"` one for each sample.

    Examples
    --------
    >>> x, weight = [[1.0, 0.0], [0.0, 2.0]], [[2.0, 0.0], [0.0, 2.0], [1.0, 1.0]]
    >>> anymax.linear_loss(x, weight, [0, 1], anymax.Sparsemax()), anymax.linear_loss(x, weight, [0, 1]).round(3)
    (np.float64(0.0), np.float64(0.275))
    """
    who = "linear_loss"
    layer = Layer.of(who, x, linear_weight, mapping, linear_bias, mask)
    given = {"reduction": reduction, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    options = LossOptions.read(who, weight, given)
    least = _array.check_scalar(f"{who}: least", least, lambda v: 0 <= v < 1, "a probability, from 0 to below 1")
    if least and not layer.mapping.is_softmax:
        raise ValueError(f"{who}: least= applies to softmax only; leave it out with {layer.mapping!r}")
    per_row = RowLoss(who, _transforms(who, transform), float(options.label_smoothing), least=float(least))
    return _loss(layer, target, options, per_row, check_chunk(who, chunk))


def margin_linear_loss(
    x: Array,
    centres: Array,
    target: Array,
    mapping: Mapping,
    margin: Any,
    scale: float,
    **given: Any,
) -> Array:
    """`margin_loss` of the cosines `x @ centres.T` of rows of length 1."""
    options = LossOptions.read("margin_loss", None, given)
    layer = Layer.of("margin_loss", scale * x, centres, mapping, None, None)
    per_row = RowLoss("margin_loss", margin=as_margin(margin), scale=scale)
    return _loss(layer, target, options, per_row, None)


@check_keywords(_HINTS, bias="linear_bias")
@documented_like(linear_loss)
def linear_log_prob(
    x: ArrayT | Numbers,
    linear_weight: Any,
    target: Any,
    mapping: Mapping | str = _SOFTMAX,
    *,
    linear_bias: Any = None,
    support: Any = None,
    mask: Mask = None,
    transform: Callable[[Any], Any] | None = None,
    chunk: int | None = None,
) -> ArrayT:
    """log p of given classes on the scores `x @ linear_weight.T + linear_bias` of an output layer, which are never all held.

    Use it for the tokens of a language model in training by policy gradients. If a sampler kept a few classes of each row, pass them as
    `support`; then no other rows of the weight are read, forward or backward. For scores that exist already use `anymax.log_prob`.

    Parameters
    ----------
    target
        The classes, integers of the shape of x without its last axis; -1 stands for none, whose log p is 0.
    support
        The classes of each row that count, as `(ids, offsets)`: those of row i, in C order, are `ids[offsets[i]:offsets[i +
        1]]`, as `sample(return_support=True)` gives them. All others are masked.

    Returns
    -------
    Array
        An array of the kind of x and of the shape of target; fp32 for half precision. -inf where p is 0, with the gradient
        of the map's loss, `e_y - p`.

    Examples
    --------
    >>> x, weight = [[1.0, 0.0], [0.0, 2.0]], [[2.0, 0.0], [0.0, 2.0], [1.0, 1.0]]
    >>> anymax.linear_log_prob(x, weight, [0, 2]).round(3)
    array([-0.408, -2.143])
    """
    who = "linear_log_prob"
    layer = Layer.of(who, x, linear_weight, mapping, linear_bias, mask)
    refuse_sharded(who, None, target=target)
    xp = namespace(layer.x)
    target = _array.beside(target, layer.x, "target", xp)
    if not is_integer(target):
        raise TypeError(f"{who}: target must be class indices (integers), got {target.dtype}")
    if tuple(target.shape) != layer.lead:
        raise ValueError(
            f"{who}: target of shape {tuple(target.shape)}: expected class indices (integers) of shape {layer.lead}"
        )
    index, none = _class_indices(who, target, layer, None, xp)
    per_row = RowLogProb(who, _transforms(who, transform))
    chunk = check_chunk(who, chunk)
    if support is not None:
        if per_row.transforms or mask is not None:
            raise ValueError(
                f"{who}: with a support neither mask nor transform has a meaning; give the classes that they leave"
            )
        return xp.reshape(_of_support(who, layer, index, support, xp), layer.lead)
    index = xp.where(none, -xp.ones_like(index), index)
    job = Job(layer, per_row, index, chunk=chunk)
    return xp.reshape(bridge(layer.x).layers.values(job, none), layer.lead)


@check_keywords(_HINTS, bias="linear_bias")
@documented_like(linear_loss)
def linear_threshold(
    x: ArrayT | Numbers,
    linear_weight: Any,
    mapping: Mapping | str = _SOFTMAX,
    *,
    linear_bias: Any = None,
    mask: Mask = None,
    chunk: int | None = None,
) -> Threshold[ArrayT]:
    """The threshold tau of each row of the scores `x @ linear_weight.T + linear_bias`, and how many classes have a probability above 0.

    With tau you can compute the probability of any class: `p_i = link(<x, linear_weight[i]> - tau)`. For softmax tau is logsumexp. For
    scores that exist already use `anymax.threshold`.

    Parameters
    ----------
    mapping
        A map that has a threshold: softmax, sparsemax, entmax, budget, normmax, sparse softmax, or one of your own.

    Returns
    -------
    Threshold[Array]
        A `Threshold`, the pair (tau, support): tau in the dtype of x, fp32 for half precision, support as integers. Neither
        has a gradient. For softmax on torch the support has every class that is not masked; elsewhere those whose probability a
        float can hold.

    Examples
    --------
    >>> tau, support = anymax.linear.linear_threshold([[1.0, 0.0]], [[2.0, 0.0], [0.0, 2.0], [1.5, 1.0]], anymax.Sparsemax())
    >>> tau, support
    (array([1.25]), array([2]))
    """
    who = "linear_threshold"
    layer = Layer.of(who, x, linear_weight, mapping, linear_bias, mask)
    if not layer.mapping.has_threshold:
        raise TypeError(layer.mapping.no_threshold())
    xp, job = namespace(layer.x), Job(layer.constant(), Thresholds(), chunk=check_chunk(who, chunk))
    tau, size = bridge(layer.x).layers.thresholds(job)
    return Threshold(xp.reshape(tau, layer.lead), xp.reshape(size, layer.lead))


# -- what the caller says ---------------------------------------------------------------------------------------------------------------


def _transforms(who: str, transform: Any) -> tuple[Callable[[Any], Any], ...]:
    parts = transforms_along(transform, 1, 2, who)
    for t in parts:
        if isinstance(t, Transform) and t.random:
            raise ValueError(
                f"{who}: {t!r} draws random numbers, which would differ when the scores are recomputed; compute the scores and use nll"
            )
        if isinstance(t, Transform) and any(
            is_array(v) and v.ndim > 1 and math.prod(v.shape[:-1]) > 1 for _, v in t.params
        ):
            raise ValueError(
                f"{who}: {t!r} has parameters that differ between rows, which can't be split; scale x, or give mask=, instead"
            )
    return parts


# -- the loss of all rows ------------------------------------------------------------------------------------------------------------


def _loss(layer: Layer, target: Any, options: LossOptions, per_row: PerRow, chunk: int | None) -> Any:
    who, xp, class_weight = per_row.who, namespace(layer.x), options.weight
    refuse_sharded(who, None, target=target)
    target = _array.beside(target, layer.x, "target", xp)
    one = upcast(layer.weight[:1, :1], xp)
    if class_weight is not None:
        class_weight = class_weights(class_weight, xp.broadcast_to(one, (1, layer.classes)), xp)
    with quiet(layer.x):
        if holds_indices(target, (*layer.lead, layer.classes), -1, f"{who}: target"):
            index, out = _class_indices(who, target, layer, options.ignore_index, xp)
            counted = xp.where(out, -xp.ones_like(index), index)
            value = bridge(layer.x).layers.values(Job(layer, per_row, counted, class_weight, chunk), out)
            norm = counted_weight(index, out, class_weight, value.dtype, xp)
        else:
            if per_row.margin is not None:
                raise TypeError(f"{who}: target: a margin needs class indices of an integer dtype, got {target.dtype}")
            y = xp.reshape(target, (layer.rows, layer.classes))
            value = bridge(layer.x).layers.by_rows(Job(layer, per_row, y, class_weight, chunk))
            norm = xp.ones_like(value)
    norm = xp.reshape(norm, layer.lead)
    return options.reduce(xp.reshape(value, layer.lead), norm, layer.dtype, xp)


def _class_indices(
    who: str, target: Array, layer: Layer, ignore_index: int | None, xp: Namespace
) -> tuple[Array, Array]:
    """(the classes [rows], True where a row has none); raise if an index is out of range."""
    index = xp.reshape(_array.counts(target, xp), (layer.rows,))
    refuse_strays(who, index, layer.classes, ignore_index, xp)
    return index, index == (-1 if ignore_index is None else ignore_index)


def _of_support(who: str, layer: Layer, index: Array, support: Any, xp: Namespace) -> Array:
    """log p of each row's class among those of its support."""
    ids, offsets = read_support(who, layer.x, layer.rows, layer.classes, support, xp)
    if not _array.eager(ids) or not _array.eager(offsets):
        raise TypeError(
            f"{who}: the sizes of a support must be known, and this one is traced; make the scores, and use log_prob"
        )
    classes, there, spot = places_of(who, (layer.rows,), layer.classes, index[:, None], ids, offsets, xp)
    with quiet(layer.x):
        s = bridge(layer.x).layers.gathered(layer, classes)
        s = xp.where(there, s, -math.inf * xp.ones_like(s))
        return terms_of(layer.mapping, s, spot, xp).log_p[:, 0]
