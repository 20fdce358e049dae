"""The verbs of output layers, `x @ linear_weight.T`, whose classes are split over processes."""

from __future__ import annotations

from typing import Any, Unpack

from .._core.mapping import Mapping
from .._core.options import documented_like
from .._core.typing import ArrayT, Mask, Reduction
from ..likelihood.teacher import Direction, Tail
from ..linear.likelihoods import linear_topk_kl as linear_topk_kl_of_one
from . import layer
from .call import Arguments, ShardKeywords, every_verb
from .choose_group import eagerly
from .verbs import fenchel_young


@documented_like(fenchel_young)
@documented_like(every_verb)
def linear_loss(
    x: ArrayT,
    linear_weight: Any,
    target: Any,
    mapping: Mapping | str = "softmax",
    *,
    linear_bias: Any = None,
    weight: Any = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    mask: Mask = None,
    chunk: int | None = None,
    **options: Unpack[ShardKeywords],
) -> ArrayT:
    """The loss of a map on the scores `x @ linear_weight.T` of an output layer whose classes are split over processes.

    Like `anymax.linear_loss`, for a vocabulary that is split over processes. Each process computes the scores of its classes for some
    rows at a time, and again for the gradient, so that it never holds all of them.

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
    chunk
        How many rows to compute at a time (in `anymax.linear_loss` it counts classes); by default as many as have 4 million
        scores per process.

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> x, weight = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [1.5, 1.0], [0.0, 2.0]])
    >>> anymax.distributed.linear_loss(x, weight, torch.tensor([0]), "sparsemax")
    tensor(0.0625)
    >>> dist.destroy_process_group()
    """
    arguments = Arguments.of("linear_loss", mapping, x, mask=mask, **options)
    given = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    return eagerly(layer.linear_loss, arguments, linear_weight, linear_bias, chunk, target, weight, given)


@documented_like(linear_loss)
@documented_like(every_verb)
def linear_log_prob(
    x: ArrayT,
    linear_weight: Any,
    target: Any,
    mapping: Mapping | str = "softmax",
    *,
    linear_bias: Any = None,
    temperature: Any = None,
    mask: Mask = None,
    chunk: int | None = None,
    **options: Unpack[ShardKeywords],
) -> ArrayT:
    """log p of given classes on the scores `x @ linear_weight.T` of an output layer whose classes are split over processes.

    Like `anymax.linear_log_prob`, for a vocabulary that is split over processes. Each process computes the scores of its classes for
    some rows at a time, and again for the gradient.

    Parameters
    ----------
    target
        The classes, counted over all processes and the same on each: integers of the shape of x without its last axis; -1
        stands for none, whose log p is 0.
    temperature
        Divides the scores: a number above 0, or one value for each row, in the shape of target.

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
    return eagerly(layer.log_prob, arguments, linear_weight, linear_bias, chunk, temperature, target, False)[0]


@documented_like(linear_log_prob)
@documented_like(every_verb)
def linear_log_prob_entropy(
    x: ArrayT,
    linear_weight: Any,
    target: Any,
    mapping: Mapping | str = "softmax",
    *,
    linear_bias: Any = None,
    temperature: Any = None,
    mask: Mask = None,
    chunk: int | None = None,
    **options: Unpack[ShardKeywords],
) -> tuple[ArrayT, ArrayT]:
    """log p of given classes and the entropy of each row, for an output layer whose classes are split over processes.

    Like `anymax.linear_log_prob_entropy`, for a policy whose vocabulary is split. For softmax the processes exchange five numbers for
    each row, in one collective for the rows that are computed together.

    Returns
    -------
    tuple[Array, Array]
        (log_prob, entropy), the same on every process, each of the shape of target; fp32 for half precision. log_prob is -inf
        where p is 0, and the entropy is `-sum p log p`. Both have gradients; in a backward pass every process must pass them the same.

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
    return eagerly(layer.log_prob, arguments, linear_weight, linear_bias, chunk, temperature, target, True)


@documented_like(linear_topk_kl_of_one)
@documented_like(linear_log_prob)
@documented_like(every_verb)
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
        Divides the student's scores: a number above 0, or one value for each row. The teacher's log-probabilities must be
        those at this temperature; the result is not multiplied by its square.

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
    given = (ids, teacher_log_p, tail, direction)
    return eagerly(layer.topk_kl, arguments, linear_weight, linear_bias, chunk, temperature, *given)
