"""The verbs of output layers, `x @ linear_weight.T`, whose classes are split over processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

from .._core.mapping import Mapping
from .._core.options import check_keywords
from .._core.tables import document, documented_like
from .._core.typing import ArrayT, Mask, Reduction, SampleKeywords
from ..likelihood.teacher import Direction, Tail
from ..linear.arguments import HINTS
from ..linear.divergences import HINTS_OF_TWO
from ..linear.divergences import linear_kl as linear_kl_of_one
from ..linear.likelihoods import linear_log_prob_entropy as linear_log_prob_entropy_of_one
from ..linear.likelihoods import linear_topk_kl as linear_topk_kl_of_one
from ..linear.verbs import linear_loss as linear_loss_of_one
from ..thresholds import Threshold
from . import layer
from .call import Arguments, ShardedLossKeywords, ShardKeywords, eagerly
from .layer import LayerOperands

_OF_ONE_PROCESS = {
    "score_dtype": "leave it out: over several processes scores of half precision are in fp32",
    "invariant": "leave it out: it is for a process with all classes",
}
_HINTS = (
    HINTS
    | _OF_ONE_PROCESS
    | {
        "return_predicted": "leave it out: it is for a process with all classes",
        "least": "leave it out: over several processes the gradient is always exact",
        "margin": "use anymax.nn.MarginHead with group=",
    }
)
_LOSS_HINTS = _HINTS | {
    "temperature": "write transform=anymax.temperature(0.7), or divide x by it",
    "support": "say mask=, this process's part of it, True = keep",
}


class _LossKeywords(SampleKeywords, ShardKeywords, total=False):
    pass


@check_keywords(_LOSS_HINTS, bias="linear_bias")
@documented_like(ShardedLossKeywords)
def linear_loss(
    x: ArrayT,
    linear_weight: Any,
    target: Any,
    mapping: Mapping | str = "softmax",
    *,
    linear_bias: Any = None,
    weight: Any = None,
    mask: Mask = None,
    transform: Callable[[Any], Any] | None = None,
    chunk: int | None = None,
    suppress: float = 0.0,
    z_loss: float = 0.0,
    **options: Unpack[_LossKeywords],
) -> ArrayT:
    """The loss of a map on the scores `x @ linear_weight.T` of an output layer whose classes are split over processes.

    Like `anymax.linear_loss`, for a vocabulary that is split over processes. Each process computes the scores of its classes for some
    rows at a time, and again for the gradient, so that it never holds all of them. The gradient is exact, so that there is no `least`.
    Nor are there `score_dtype`, `invariant` and `return_predicted`, which are for a process with all classes.

    Parameters
    ----------
    x
        The features, [..., features], the same on every process; their gradient is the sum over all processes.
    linear_weight
        This process's part of the weight of the layer, [classes of this process, features].
    mapping
        The map, such as `anymax.Entmax(1.5)`, or its name; the same on every process.
    linear_bias
        One number for each class of this process, added to the scores.
    mask
        Booleans that broadcast to this process's scores, [..., classes of this process], True = keep.
    transform
        A transform of the scores that changes each of them by itself, and all classes alike, the same on every process, such as
        `anymax.transforms.softcap(30.0)` or a temperature above 0. One that needs all scores of a row, such as `topk`, is refused,
        and so is a function of your own that is not a `Transform` with `elementwise = True`.
    chunk
        How many classes to compute at a time, as in `anymax.linear_loss`. Each process takes some whole rows instead, with as many
        scores in all as so many of its classes have; by default about 4 million.

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> x, weight = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [1.5, 1.0], [0.0, 2.0]])
    >>> anymax.distributed.linear_loss(x, weight, torch.tensor([0]), "sparsemax")
    tensor(0.0625)
    >>> dist.destroy_process_group()
    """
    given: dict[str, Any] = {**options}
    of_loss = {name: given.pop(name) for name in SampleKeywords.__annotations__ if name in given}
    arguments = Arguments.of("linear_loss", mapping, x, mask=mask, **given)
    of_layer = LayerOperands(linear_weight, linear_bias, chunk, transform)
    return eagerly(layer.linear_loss, arguments, of_layer, target, weight, z_loss, suppress, of_loss)


@check_keywords(_HINTS, bias="linear_bias")
def linear_threshold(
    x: ArrayT,
    linear_weight: Any,
    mapping: Mapping | str = "softmax",
    *,
    linear_bias: Any = None,
    mask: Mask = None,
    transform: Callable[[Any], Any] | None = None,
    chunk: int | None = None,
    **options: Unpack[ShardKeywords],
) -> Threshold[ArrayT]:
    """The threshold tau of each row of the scores `x @ linear_weight.T` of an output layer whose classes are split over processes.

    Like `anymax.linear.linear_threshold`, for a vocabulary that is split over processes. It has no `score_dtype` and no
    `invariant`, which are for a process with all classes.

    Returns
    -------
    Threshold[Array]
        A `Threshold`, the pair (tau, support), the same on every process; tau in fp32 for half precision. It has a gradient; in a
        backward pass every process must pass it the same one.

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> x, weight = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [1.5, 1.0], [0.0, 2.0]])
    >>> anymax.distributed.linear_threshold(x, weight, "sparsemax")
    Threshold(tau=tensor([1.2500]), support=tensor([2]))
    >>> dist.destroy_process_group()
    """
    arguments = Arguments.of("linear_threshold", mapping, x, mask=mask, **options)
    return eagerly(layer.threshold, arguments, LayerOperands(linear_weight, linear_bias, chunk, transform))


@check_keywords(_HINTS, bias="linear_bias")
def linear_log_prob(
    x: ArrayT,
    linear_weight: Any,
    target: Any,
    mapping: Mapping | str = "softmax",
    *,
    linear_bias: Any = None,
    support: Any = None,
    temperature: Any = None,
    mask: Mask = None,
    transform: Callable[[Any], Any] | None = None,
    chunk: int | None = None,
    **options: Unpack[ShardKeywords],
) -> ArrayT:
    """log p of given classes on the scores `x @ linear_weight.T` of an output layer whose classes are split over processes.

    Like `anymax.linear_log_prob`, for a vocabulary that is split over processes. Each process computes the scores of its classes for
    some rows at a time, and again for the gradient. It has no `score_dtype` and no
    `invariant`, which are for a process with all classes.

    Parameters
    ----------
    target
        The classes, counted over all processes and the same on each: integers of the shape of x without its last axis; for
        -100, which marks padding, and -1, none, log p is 0. With a `Sink` -1 is the sink.
    support
        The support of each row, the classes that count, in one of the forms of `anymax.linear_log_prob`, such as `(ids, offsets)`. They
        are counted over all processes and the same on each. All others are masked. Each process reads only those rows of its
        weight. In JAX the traced function must close over it, since its sizes must be known.
    temperature
        Divides the scores, before the transform: a number above 0, or one value for each row, in the shape of target.

    Returns
    -------
    Array
        log p, of the shape of target and the same on every process; fp32 for half precision. -inf where p is 0. In a backward
        pass every process must pass it the same gradient.

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> x, weight = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [1.5, 1.0], [0.0, 2.0]])
    >>> anymax.distributed.linear_log_prob(x, weight, torch.tensor([0]))
    tensor([-0.5550])
    >>> dist.destroy_process_group()
    """
    arguments = Arguments.of("linear_log_prob", mapping, x, mask=mask, **options)
    of_layer = LayerOperands(linear_weight, linear_bias, chunk, transform, temperature)
    return eagerly(layer.log_prob, arguments, of_layer, target, False, support)[0][0]


@check_keywords(_HINTS, bias="linear_bias")
def linear_log_prob_entropy(
    x: ArrayT,
    linear_weight: Any,
    target: Any,
    mapping: Mapping | str = "softmax",
    *,
    linear_bias: Any = None,
    support: Any = None,
    full: bool = False,
    temperature: Any = None,
    mask: Mask = None,
    transform: Callable[[Any], Any] | None = None,
    chunk: int | None = None,
    **options: Unpack[ShardKeywords],
) -> Any:
    """log p of given classes and the entropy of each row, for an output layer whose classes are split over processes.

    Like `anymax.linear_log_prob_entropy`, for a policy whose vocabulary is split. For softmax the processes exchange five numbers for
    each row, in one collective for the rows that are computed together. It has no `score_dtype` and no
    `invariant`, which are for a process with all classes.

    Returns
    -------
    tuple[Array, Array]
        (log_prob, entropy), the same on every process, each of the shape of target; fp32 for half precision. log_prob is -inf
        where p is 0, and the entropy is `-sum p log p`. Both have gradients; in a backward pass every process must pass them the
        same. With `full=True` a pair of such pairs: that of the support, and that of all classes.

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> x, weight = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [1.5, 1.0], [0.0, 2.0]])
    >>> anymax.distributed.linear_log_prob_entropy(x, weight, torch.tensor([0]))
    (tensor([-0.5550]), tensor([0.8845]))
    >>> dist.destroy_process_group()
    """
    arguments = Arguments.of("linear_log_prob_entropy", mapping, x, mask=mask, **options)
    of_layer = LayerOperands(linear_weight, linear_bias, chunk, transform, temperature)
    pairs = eagerly(layer.log_prob, arguments, of_layer, target, True, support, full)
    return tuple(pairs) if full else pairs[0]


@check_keywords(_HINTS, bias="linear_bias")
def linear_topk_kl(
    x: ArrayT,
    linear_weight: Any,
    ids: Any,
    teacher_log_p: Any,
    mapping: Mapping | str = "softmax",
    *,
    tail: Tail = "ignore",
    direction: Direction = "forward",
    linear_bias: Any = None,
    temperature: Any = None,
    mask: Mask = None,
    transform: Callable[[Any], Any] | None = None,
    chunk: int | None = None,
    **options: Unpack[ShardKeywords],
) -> ArrayT:
    """The divergence of a student from a teacher whose k largest log-probabilities are known, for classes that are split over processes.

    Like `anymax.linear_topk_kl`, for a student whose vocabulary is split.

    Parameters
    ----------
    ids
        The teacher's classes, integers [..., k], counted over all processes and the same on each; -1 where a row has fewer
        than k.
    teacher_log_p
        The teacher's log-probabilities of these classes, in the shape of ids and the same on every process: natural
        logarithms, normalised over all classes.
    temperature
        Divides the student's scores, before the transform: a number above 0, or one value for each row. The teacher's
        log-probabilities must be those at this temperature; the result is not multiplied by its square.

    Returns
    -------
    Array
        One number for each row, the same on every process; fp32 for half precision. +inf where the student's probability is 0
        for a class of the teacher, or in reverse the teacher's for a class of the student. In a backward pass every process must pass it
        the same gradient.

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> x, weight = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [0.5, 2.0], [0.0, 1.0], [0.0, 0.0]])
    >>> ids, log_p = torch.tensor([[0, 1]]), torch.tensor([[0.7, 0.2]]).log()
    >>> anymax.distributed.linear_topk_kl(x, weight, ids, log_p, tail="one class")
    tensor([0.0302])
    >>> dist.destroy_process_group()
    """
    arguments = Arguments.of("linear_topk_kl", mapping, x, mask=mask, **options)
    of_layer = LayerOperands(linear_weight, linear_bias, chunk, transform, temperature)
    return eagerly(layer.topk_kl, arguments, of_layer, ids, teacher_log_p, tail, direction)


@check_keywords(
    HINTS_OF_TWO | _OF_ONE_PROCESS, bias="linear_bias", bias_ref="linear_bias_ref", weight_ref="linear_weight_ref"
)
def linear_kl(
    x: ArrayT,
    linear_weight: Any,
    x_ref: Any,
    linear_weight_ref: Any,
    mapping: Mapping | str = "softmax",
    *,
    direction: Direction = "forward",
    beta: float | None = None,
    linear_bias: Any = None,
    linear_bias_ref: Any = None,
    where: Any = None,
    support: Any = None,
    temperature: Any = None,
    mask: Mask = None,
    transform: Callable[[Any], Any] | None = None,
    reduction: Reduction = "none",
    chunk: int | None = None,
    **options: Unpack[ShardKeywords],
) -> ArrayT:
    """The divergence between the distributions of two output layers whose classes are split over processes.

    Like `anymax.linear_kl`, for a vocabulary that is split in the same way in both layers. Each process computes both scores of its
    classes for some rows at a time, and again for the gradient. It has no `score_dtype` and no `invariant`, which are for a process with
    all classes.

    Parameters
    ----------
    x_ref
        The features of the reference, for the same rows, the same on every process.
    linear_weight_ref
        This process's part of the weight of the layer of the reference: its classes are those of `linear_weight`.
    linear_bias, linear_bias_ref
        One number for each class of this process, added to the scores of the layer.

    Returns
    -------
    Array
        One number for each row, or their sum or mean, the same on every process; fp32 for half precision, and infinite where
        `anymax.linear_kl` is. In a backward pass every process must pass it the same gradient.

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> x, weight = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [0.5, 2.0], [0.0, 1.0]])
    >>> x_ref, weight_ref = torch.tensor([[2.0]]), torch.tensor([[1.0], [0.5], [0.0]])
    >>> anymax.distributed.linear_kl(x, weight, x_ref, weight_ref)
    tensor([0.0211])
    >>> dist.destroy_process_group()
    """
    arguments = Arguments.of("linear_kl", mapping, x, mask=mask, **options)
    of_layer = LayerOperands(linear_weight, linear_bias, chunk, transform, temperature)
    of_reference = LayerOperands(linear_weight_ref, linear_bias_ref, None)
    more = (x_ref, of_reference, where, support, direction, beta, reduction)
    return eagerly(layer.kl, arguments, of_layer, *more)


document(
    globals(),
    linear_log_prob,
    linear_loss,
    linear_kl_of_one,
    linear_loss_of_one,
    linear_log_prob_entropy_of_one,
    linear_topk_kl_of_one,
    ShardKeywords,
)
