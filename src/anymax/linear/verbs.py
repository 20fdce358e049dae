"""Output layers: the loss and threshold of scores `x @ linear_weight.T` that are computed a part at a time.

With a large vocabulary the scores and their gradient are the largest arrays of a training step. A sparse map has a gradient p - y with few
entries, so two of the step's three matrix products need to touch the support only. For softmax some rows of scores become their gradient
in the forward pass, or the backward pass computes each block again. `layer` reads the operands, and the bridge of their framework does
the work.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Unpack, overload

from .. import _array
from .._array import Array, Namespace, device_of, namespace, quiet, upcast
from .._core.mapping import Mapping, no_threshold
from .._core.options import check_keywords, check_options
from .._core.shards import layer_over_devices
from .._core.shards import refuse as refuse_sharded
from .._core.tables import document, documented_like
from .._core.typing import ArrayT, DType, LossKeywords, Mask, Numbers, Reduction, SampleKeywords, Target, Weight
from ..autodiff import bridge
from ..losses.margins import as_margin
from ..losses.options import EACH_ROW, LossOptions, cast, class_weights
from ..losses.penalties import RowPenalties
from ..losses.targets import complete_target, counted_weight, holds_indices
from ..mappings import Softmax
from ..thresholds import Threshold
from .arguments import HINTS, LayerArguments, class_of_each_row, row_transforms
from .job import Job, RowLoss, Thresholds
from .layer import Layer

_SOFTMAX = Softmax()
_HINTS = HINTS | {
    "temperature": "divide x by it",
    "lse_square_scale": "say z_loss=",
}


@overload
def linear_loss(
    x: ArrayT | Numbers, linear_weight: Any, target: Target, mapping: Mapping | str = ..., *, linear_bias: Any = None,
    weight: Weight = None, mask: Mask = None, transform: Callable[[Any], Any] | None = None, chunk: int | None = None,
    least: float = 0.0, suppress: float = 0.0, z_loss: float = 0.0, score_dtype: DType = None, invariant: bool = False,
    return_predicted: Literal[True], **options: Unpack[SampleKeywords],
) -> tuple[ArrayT, ArrayT]: ...  # fmt: skip


@overload
def linear_loss(
    x: ArrayT | Numbers, linear_weight: Any, target: Target, mapping: Mapping | str = ..., *, linear_bias: Any = None,
    weight: Weight = None, mask: Mask = None, transform: Callable[[Any], Any] | None = None, chunk: int | None = None,
    least: float = 0.0, suppress: float = 0.0, z_loss: float = 0.0, score_dtype: DType = None, invariant: bool = False,
    return_predicted: Literal[False] = False, **options: Unpack[SampleKeywords],
) -> ArrayT: ...  # fmt: skip


@check_keywords(_HINTS, bias="linear_bias")
@layer_over_devices("target")
def linear_loss(
    x: ArrayT | Numbers,
    linear_weight: Any,
    target: Target,
    mapping: Mapping | str = _SOFTMAX,
    *,
    linear_bias: Any = None,
    weight: Weight = None,
    mask: Mask = None,
    transform: Callable[[Any], Any] | None = None,
    chunk: int | None = None,
    least: float = 0.0,
    suppress: float = 0.0,
    z_loss: float = 0.0,
    score_dtype: DType = None,
    invariant: bool = False,
    return_predicted: bool = False,
    **options: Unpack[SampleKeywords],
) -> Any:
    """The loss of a map on the scores `x @ linear_weight.T + linear_bias` of an output layer, computed in blocks of scores.

    Use it to train a classifier with many classes, such as a language model, in little more memory than its weights. The loss
    is the cross-entropy for softmax (also as `Entmax(1.0)` and inside of a `Sink`), as in `torch.nn.functional.linear_cross_entropy`;
    `sparse_softmax_loss` for sparse softmax; `nll` for a map without a Fenchel-Young loss; and `fenchel_young` for all others.
    Sparse maps, such as `Entmax(1.5)`, are also faster on a CPU, and in fp32 on a GPU: their gradient needs only the classes of
    the support. Where it has more than about 1 class in 50, as at the beginning of a training, they take about as long as softmax.

    In torch, second derivatives hold all scores; in JAX they need `anymax.use("reference")`.

    Parameters
    ----------
    x
        The features, [..., features].
    linear_weight
        The weight of the layer, [classes, features], as in `torch.nn.Linear`. Its dtype may differ from that of x: the product is
        computed in the wider of the two, and each gets its gradient in its own dtype. Under torch's autocast its dtype counts.
    target
        Class indices (integers, of the shape of x without its last axis), or distributions over the classes (floating
        point).
    mapping
        The map, such as `anymax.Entmax(1.5)`, or its name; its parameters are numbers or have one value per row.
    linear_bias
        One number per class, added to the scores.
    weight
        One factor for each class, as in torch: a mean then weights each sample by the factor of its target.
    mask
        Booleans that broadcast to the scores, [..., classes] or [classes], True = keep.
    transform
        A transform of the scores, such as `anymax.temperature(2.0)` or `anymax.transforms.softcap(30.0)`. It is applied to a group of
        rows at a time, so it must not be random, and its parameters must not differ between rows.
    chunk
        How many classes to compute at a time. A map that needs all scores of a row takes whole rows instead, with as many
        scores in all. By default the call chooses a size, and softmax keeps rows of scores in at most the memory of the
        weight (on a GPU 128 MB, if that is more), to compute them only once.
        `linear.explain_linear_loss` says what a call does.
    least
        For softmax, a probability below which a class gets no gradient; 0, the default, keeps all. The loss stays exact. With
        0.004, which at most 250 classes of a row can reach, the backward pass is as fast as that of a sparse map; a much lower
        value saves no time. The gradient stays exact, too, in JAX, under torch.compile, and in half precision on a GPU.
    suppress
        For a sparse map, the factor of a second loss that lowers the scores of the classes with probability 0, as in
        Sparsemax+: `(1 - s_t) * -log(1 - s_0)`, where s is the softmax of the scores, s_t the share of the target, held
        constant, and s_0 that of all classes with probability 0 but the target. Its gradient reaches all classes. It needs
        class indices, and a map without a sink, whose score it would lower as well.
    z_loss
        The factor of tau squared, which is added to the loss of each row and keeps the scores from drifting. tau is the threshold of
        the map, for softmax logsumexp. Class weights apply to it, and to `suppress`, as to the loss.
    score_dtype
        The dtype of the scores, or its name. By default a product of half precision is summed and returned in fp32; "bfloat16" rounds the
        scores of a product in bf16, which takes less memory on a GPU, and makes a ratio of probabilities wrong by up to some percent.
    invariant
        True makes the result of a row independent of the others, bit for bit: of how many there are, of their order, of padding and of
        `chunk`. The scores are then computed in tiles of 64 rows (fewer where a library of products demands it), the last one filled up.
        It holds for one device, number of threads, and version of the libraries, and not for gradients, whose last bits may differ.
    return_predicted
        True returns the class with the largest score of each row, too: (loss, classes). It is -1 for a row that is left out, so
        `(classes == target).sum()` is the number of right ones, unless -1 marks padding. The classes have no gradient.

    Returns
    -------
    Array
        The loss, one number of the kind of x, in the dtype of the product; fp32 for half precision. With `reduction="none"` one for
        each sample. With `return_predicted` a tuple, (loss, classes), the classes in the shape of x without its last axis.

    Examples
    --------
    >>> x, weight = [[1.0, 0.0], [0.0, 2.0]], [[2.0, 0.0], [0.0, 2.0], [1.0, 1.0]]
    >>> anymax.linear_loss(x, weight, [0, 1], anymax.Sparsemax()), anymax.linear_loss(x, weight, [0, 1]).round(3)
    (np.float64(0.0), np.float64(0.275))
    """
    arguments = LayerArguments(
        "linear_loss", x, linear_weight, mapping, linear_bias, mask, transform, chunk, None, score_dtype, invariant
    )
    layer, read, per_row = _read(arguments, weight, least, suppress, z_loss, return_predicted, options)
    return _loss(arguments.job(layer, per_row), target, read)


@check_keywords(_HINTS, bias="linear_bias")
@documented_like(linear_loss)
def explain_linear_loss(
    x: ArrayT | Numbers,
    linear_weight: Any,
    target: Target,
    mapping: Mapping | str = _SOFTMAX,
    **options: Any,
) -> str:
    """How `linear_loss` computes a call: which scores it holds at a time, and when it computes the gradient.

    Use it if a step takes longer, or more memory, than you expect. It computes no loss.

    Parameters
    ----------
    options
        Those of `linear_loss`.

    Returns
    -------
    str
        A line to read.

    Examples
    --------
    >>> x, weight = [[1.0, 0.0], [0.0, 2.0]], [[2.0, 0.0], [0.0, 2.0], [1.0, 1.0]]
    >>> anymax.linear.explain_linear_loss(x, weight, [0, 1], anymax.Sparsemax())
    'all 3 scores of 2 rows at a time'
    """
    who, parameters = "explain_linear_loss", inspect.signature(linear_loss).parameters.values()
    allowed = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    options = allowed | check_options(who, tuple(allowed), options)
    bias, mask, transform, chunk = (options.pop(name) for name in ("linear_bias", "mask", "transform", "chunk"))
    score_dtype, invariant = (options.pop(name) for name in ("score_dtype", "invariant"))
    weight, least, suppress, z_loss = (options.pop(name) for name in ("weight", "least", "suppress", "z_loss"))
    predicts = options.pop("return_predicted")
    arguments = LayerArguments(
        who, x, linear_weight, mapping, bias, mask, transform, chunk, None, score_dtype, invariant
    )
    layer, read, per_row = _read(arguments, weight, least, suppress, z_loss, predicts, options)
    loss = _loss_job(arguments.job(layer, per_row), target, read)
    indices = loss.without_class is not None
    return bridge(layer.x).layers.plan(loss.job, indices=indices, total=read.reduction != "none")


def _read(
    arguments: LayerArguments, weight: Any, least: Any, suppress: Any, z_loss: Any, return_predicted: Any, keywords: Any
) -> tuple[Layer, LossOptions, RowLoss]:
    """The layer, and what to compute, from the arguments of `linear_loss`."""
    who, transform, layer = arguments.who, arguments.transform, arguments.layer()
    layer.refuse_with_sink(who, transform=transform, weight=weight)
    options = LossOptions.read(who, weight, keywords)
    if type(least) is not float or least:
        least = _array.check_scalar(f"{who}: least", least, lambda v: 0 <= v < 1, "a probability, from 0 to below 1")
    if least and not layer.mapping.is_softmax:
        raise ValueError(f"{who}: least= applies to softmax only; leave it out with {layer.mapping!r}")
    penalties = RowPenalties.read(who, layer.mapping, layer.hides, z_loss, suppress)
    each = EACH_ROW._replace(smoothing=float(options.smoothing)) if options.smoothing else EACH_ROW
    predicts = _array.check_flag(who, "return_predicted", return_predicted)
    per_row = RowLoss(
        who, row_transforms(who, transform), each, min_probability=float(least), penalties=penalties, predicts=predicts
    )
    return layer, options, per_row


def margin_linear_loss(
    x: Array,
    centres: Array,
    target: Array,
    mapping: Mapping,
    margin: Any,
    scale: float,
    sub_centers: int = 1,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Array:
    """`margin_loss` of the cosines `x @ centres.T` of rows of length 1, of which each class has `sub_centers`."""
    options = LossOptions.read("margin_loss", None, {"ignore_index": ignore_index, "reduction": reduction})
    layer = Layer.of("margin_loss", scale * x, centres, mapping, None, None)
    layer.refuse_with_sink("margin_loss", margin=margin)
    per_row = RowLoss("margin_loss", margin=as_margin(margin), scale=scale, sub_centers=sub_centers)
    return _loss(Job(layer, per_row), target, options)


@check_keywords(_HINTS, bias="linear_bias")
def linear_threshold(
    x: ArrayT | Numbers,
    linear_weight: Any,
    mapping: Mapping | str = _SOFTMAX,
    *,
    linear_bias: Any = None,
    mask: Mask = None,
    transform: Callable[[Any], Any] | None = None,
    chunk: int | None = None,
    score_dtype: DType = None,
    invariant: bool = False,
) -> Threshold[ArrayT]:
    """The threshold tau of each row of the scores `x @ linear_weight.T + linear_bias`, and how many classes have a probability above 0.

    With tau you can compute the probability of any class: `p_i = link(<x, linear_weight[i]> - tau)`. For softmax tau is logsumexp. Its
    gradient in the features is a mean of the rows of the weight: weighed by p for softmax. For scores that exist already use
    `anymax.threshold`.

    Parameters
    ----------
    mapping
        A map that has a threshold: softmax, sparsemax, entmax, budget, normmax, sparse softmax, or one of your own.

    Returns
    -------
    Threshold[Array]
        A `Threshold`, the pair (tau, support): tau in the dtype of the scores, fp32 for half precision, support as integers. tau
        has the gradient of `anymax.threshold`. For softmax on torch, without `invariant`, the support has every class that is not
        masked; elsewhere those whose probability a float can hold.

    Examples
    --------
    >>> tau, support = anymax.linear.linear_threshold([[1.0, 0.0]], [[2.0, 0.0], [0.0, 2.0], [1.5, 1.0]], anymax.Sparsemax())
    >>> tau, support
    (array([1.25]), array([2]))
    """
    who = "linear_threshold"
    arguments = LayerArguments(
        who, x, linear_weight, mapping, linear_bias, mask, transform, chunk, None, score_dtype, invariant
    )
    layer = arguments.layer()
    if not layer.mapping.has_threshold:
        raise TypeError(no_threshold(layer.mapping))
    layer.refuse_with_sink(who, transform=transform)
    xp, per_row = namespace(layer.x), Thresholds(who, row_transforms(who, transform))
    job = arguments.job(layer, per_row, layer.hidden_class(xp))
    tau, size = bridge(layer.x).layers.thresholds(job)
    return Threshold(layer.as_given(tau, xp), layer.as_given(size, xp))


# -- the loss of all rows ------------------------------------------------------------------------------------------------------------


class LossJob(NamedTuple):
    """The job of a loss, and what its targets say of the rows."""

    job: Job
    # [rows], True where the class index is to be left out; None if the targets are distributions
    without_class: Array | None
    counted: Array  # [rows], what each row counts in a mean


def _loss(job: Job, target: Any, options: LossOptions) -> Any:
    with quiet(job.layer.x):
        return reduced(_loss_job(job, target, options), options)


def reduced(loss: LossJob, options: LossOptions) -> Any:
    """The results of all rows, reduced; with the classes that they predict, if they do."""
    job, without_class, counted = loss
    layer = job.layer
    xp, layers = namespace(layer.x), bridge(layer.x).layers
    if without_class is None:
        value = layers.by_rows(job)
    else:
        if options.reduction != "none":
            factor = options.reduce(xp.ones_like(counted[:1]), counted, counted.dtype, xp)
            total = layers.total(job, without_class, factor)
            if isinstance(total, tuple):
                return cast(total[0], layer.dtype), _classes(layer, total[1], xp)
            if total is not None:
                return cast(total, layer.dtype)
        value = layers.values(job, without_class)
    value, *predicted = value if isinstance(value, tuple) else (value,)
    value = options.reduce(xp.reshape(value, layer.lead), xp.reshape(counted, layer.lead), layer.dtype, xp)
    return (value, _classes(layer, predicted[0], xp)) if predicted else value


def _classes(layer: Layer, predicted: Array, xp: Namespace) -> Array:
    """Predicted classes as the caller sees them: a class that the map hides is -1."""
    if layer.hides:
        predicted = xp.where(predicted == layer.seen_classes, -xp.ones_like(predicted), predicted)
    return layer.as_given(predicted, xp)


def _loss_job(job: Job, target: Any, options: LossOptions) -> LossJob:
    layer, per_row = job.layer, job.per_row
    assert isinstance(per_row, RowLoss)
    who, xp, class_weight = per_row.who, namespace(layer.x), options.weight
    refuse_sharded(who, None, target=target)
    target = _array.beside(target, layer.x, "target", xp)
    if per_row.sub_centers > 1:  # below, the layer stands for its classes
        layer = layer.with_operands(layer.x, layer.weight[:: per_row.sub_centers, ...], None)
    wide_like = upcast(layer.weight[:1, :1], xp)
    if class_weight is not None:
        class_weight = class_weights(class_weight, xp.broadcast_to(wide_like, (1, layer.classes)), xp)
    if holds_indices(target, (*layer.lead, layer.seen_classes), -1, f"{who}: target"):
        index, without_class = class_of_each_row(who, target, layer, options.ignore_index, xp)
        counted = counted_weight(index, without_class, class_weight, wide_like.dtype, xp)
        return LossJob(dataclasses.replace(job, target=index, class_weight=class_weight), without_class, counted)
    per_row.penalties.need_indices(who, target)
    if per_row.margin is not None:
        raise TypeError(f"{who}: target: a margin needs class indices of an integer dtype, got {target.dtype}")
    y = xp.reshape(target, (layer.rows, layer.seen_classes))
    if layer.hides:
        _, most = layer.mapping.sums(None, xp)
        y = complete_target(y, (0.0, most), xp)
    counted = xp.ones((layer.rows,), dtype=wide_like.dtype, **device_of(wide_like))
    return LossJob(dataclasses.replace(job, target=y, class_weight=class_weight), None, counted)


document(globals(), linear_loss, LossKeywords)
