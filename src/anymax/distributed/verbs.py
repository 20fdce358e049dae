"""The verbs of `anymax.distributed` but those of output layers (`layer_verbs`), and how the files of this room work together.

A call goes this way: `call` reads its arguments, and gives one process the class that a map hides; `methods` chooses a `Method` for the
map (those that gather no class are in `sums`); in the first collective each process sends what the method and the verb need, and
`agreement` compares the calls; the method then gives a `Solution` (in `sums`, `gathered` and `search`), from which the verb takes its
result (`losses`, `per_row`, `layer`). Both contracts are in `solution`. `autodiff/group.py` has the two operations that communicate.
"""

from __future__ import annotations

from typing import Any, Unpack

from .._array import Array
from .._core.mapping import Mapping
from .._core.options import check_keywords, check_options
from .._core.tables import document
from .._core.typing import ArrayT, LossKind, SampleKeywords
from ..autodiff.agreement import Agreement
from ..losses.options import name_of_kind
from ..thresholds import Threshold
from . import losses, per_row
from .call import Arguments, ScoresKeywords, ShardedLossKeywords, ShardKeywords, eagerly
from .methods import solve

_LOSS = tuple(SampleKeywords.__annotations__)


def apply(
    mapping: Mapping | str,
    x: ArrayT,
    axis: int | None = None,
    **options: Unpack[ScoresKeywords],
) -> ArrayT:
    """The probabilities of this process's classes, from the scores of all processes.

    Like `anymax.apply`, for scores that are split along the classes. Softmax exchanges two numbers per row, a sparse map its few
    candidates.

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun does this for many
    >>> anymax.distributed.apply("sparsemax", torch.tensor([2.0, 1.5, -1.0]))
    tensor([0.7500, 0.2500, 0.0000])
    >>> dist.destroy_process_group()
    """
    arguments = Arguments.of("apply", mapping, x, axis=axis, **options)
    return eagerly(_probabilities, arguments, False)


def log_apply(
    mapping: Mapping | str,
    x: ArrayT,
    axis: int | None = None,
    **options: Unpack[ScoresKeywords],
) -> ArrayT:
    """The logarithms of the probabilities of this process's classes, -inf where p is exactly 0.

    Like `anymax.log_apply`, for scores that are split along the classes. For the likelihood of a target use `nll`, which sends less.

    Returns
    -------
    Array
        log p of this process's classes, with the shape and dtype of x.

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> anymax.distributed.log_apply("softmax", torch.tensor([0.0, -1000.0]))
    tensor([    0., -1000.])
    >>> dist.destroy_process_group()
    """
    return eagerly(_probabilities, Arguments.of("log_apply", mapping, x, axis=axis, **options), True)


def threshold(
    mapping: Mapping | str,
    x: ArrayT,
    axis: int | None = None,
    *,
    keepdims: bool = False,
    **options: Unpack[ScoresKeywords],
) -> Threshold[ArrayT]:
    """The threshold tau of each row over the classes of all processes, and how many of these classes have a probability above 0.

    Like `anymax.threshold`. With tau alone a process can compute its p, as `p_i = link(x_i - tau)`.

    Parameters
    ----------
    keepdims
        True to keep the axis of the classes, with size 1.

    Returns
    -------
    Threshold[Array]
        A `Threshold`, the pair (tau, support), the same on every process. tau has a gradient; in a backward pass every process
        must pass it the same one.

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> anymax.distributed.threshold("sparsemax", torch.tensor([2.0, 1.5, -1.0]))
    Threshold(tau=tensor(1.2500), support=tensor(2))
    >>> dist.destroy_process_group()
    """
    return eagerly(per_row.threshold, Arguments.of("threshold", mapping, x, axis=axis, **options), keepdims)


def logsumexp(
    x: ArrayT,
    axis: int | None = None,
    *,
    temperature: Any = 1.0,
    keepdims: bool = False,
    **options: Unpack[ScoresKeywords],
) -> ArrayT:
    """The smooth maximum `T log sum_i exp(x_i / T)` over the classes of all processes.

    Like `anymax.logsumexp`. Its gradient, softmax(x / T), needs no communication.

    Parameters
    ----------
    temperature
        T, a number of at least 0 or an array with one value per row; 0 gives the maximum itself.

    Returns
    -------
    Array
        One number for each row, in the dtype of x, the same on every process. In a backward pass every process must pass it
        the same gradient, as for a loss.

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> anymax.distributed.logsumexp(torch.tensor([2.0, 1.0, -1.0]))
    tensor(2.3490)
    >>> dist.destroy_process_group()
    """
    arguments = Arguments.of("logsumexp", "softmax", x, axis=axis, **options)
    return eagerly(per_row.logsumexp, arguments, temperature, keepdims)


def fenchel_young(
    mapping: Mapping | str,
    scores: ArrayT,
    target: Any,
    weight: Any = None,
    **options: Unpack[ShardedLossKeywords],
) -> ArrayT:
    """The Fenchel-Young loss of a map, `Omega*(x) + Omega(y) - <x, y>`, over the classes of all processes.

    Like `anymax.fenchel_young`. The gradient by a process's scores is p - y of its classes, and needs no communication.

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> anymax.distributed.fenchel_young("sparsemax", torch.tensor([[2.0, 1.5, -1.0]]), torch.tensor([0]))
    tensor(0.0625)
    >>> dist.destroy_process_group()
    """
    return loss_of_kind("fenchel_young", mapping, scores, target, weight, **options)


def nll(
    mapping: Mapping | str, scores: ArrayT, target: Any, weight: Any = None, **options: Unpack[ShardedLossKeywords]
) -> ArrayT:
    """The negative log-likelihood of a map, `-log p_t` of the target, over the classes of all processes.

    Like `anymax.nll`; with softmax it is the cross-entropy, which needs one collective.

    Parameters
    ----------
    mapping
        The map, such as `anymax.Softmax()`, or its name; the same on every process.

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> anymax.distributed.nll("softmax", torch.tensor([[2.0, 1.0, -1.0]]), torch.tensor([0]))
    tensor(0.3490)
    >>> dist.destroy_process_group()
    """
    return loss_of_kind("nll", mapping, scores, target, weight, **options)


@check_keywords(y="target")
def log_prob_entropy(
    mapping: Mapping | str,
    x: ArrayT,
    target: Any,
    *,
    axis: int | None = None,
    **options: Unpack[ScoresKeywords],
) -> tuple[ArrayT, ArrayT]:
    """log p of given classes and the entropy of each row, over the classes of all processes.

    Like `anymax.log_prob_entropy`, for a policy whose vocabulary is split.

    Parameters
    ----------
    target
        Class indices, counted over all processes and the same on each: integers with the shape of x without the class axis,
        or with more axes before it; -100, which marks padding, and -1, none, have log p 0. With a `Sink` -1 is the sink.

    Returns
    -------
    tuple[Array, Array]
        (log_prob, entropy), the same on every process: log_prob of the shape of target, -inf where p is 0, and the entropy `-sum
        p log p` of each row; fp32 for scores of half precision.

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> anymax.distributed.log_prob_entropy("softmax", torch.tensor([[0.0, 0.0, -torch.inf]]), torch.tensor([0]))
    (tensor([-0.6931]), tensor([0.6931]))
    >>> dist.destroy_process_group()
    """
    return eagerly(per_row.log_prob, Arguments.of("log_prob_entropy", mapping, x, axis=axis, **options), target, True)


def sample(
    mapping: Mapping | str,
    x: ArrayT,
    *,
    generator: Any = None,
    num_samples: int | None = None,
    axis: int | None = None,
    **options: Unpack[ScoresKeywords],
) -> ArrayT:
    """Classes drawn with the probabilities of a map, over the classes of all processes.

    Like `anymax.sample`, without transforms; for a temperature divide the scores. The draws are those of one process with the same
    generator.

    Parameters
    ----------
    generator
        A generator or key, an integer seed, or a list of these, one per row; by default torch's global one. The random
        numbers of the first process are used, so the generators of the others do not matter.
    num_samples
        How many to draw from each row, independently, as a new first axis.

    Returns
    -------
    Array
        Class indices, counted over all processes and the same on each, with the shape of x without the class axis; -1 where
        a row has no class, and for a draw of the sink.

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> anymax.distributed.sample("sparsemax", torch.tensor([3.0, 1.5, -1.0]), generator=0)
    tensor(0)
    >>> dist.destroy_process_group()
    """
    arguments = Arguments.of("sample", mapping, x, axis=axis, **options)
    return eagerly(per_row.sample, arguments, generator, num_samples)


def log_prob(mapping: Any, x: Any, target: Any, **options: Unpack[ScoresKeywords]) -> Any:
    """`log_prob_entropy` without the entropy; for DTensors."""
    return eagerly(per_row.log_prob, Arguments.of("log_prob", mapping, x, **options), target, False)[0]


def loss_of_kind(
    kind: LossKind,
    mapping: Any,
    scores: Any,
    target: Any,
    /,
    weight: Any = None,
    **options: Unpack[ShardedLossKeywords],
) -> Any:
    """The loss of a kind, such as `mapping.own_loss`."""
    who = name_of_kind(kind)
    keywords = check_options(who, (*_LOSS, *Arguments._fields[3:]), options)
    of_loss = {name: keywords.pop(name) for name in _LOSS if name in keywords}
    return eagerly(losses.loss, Arguments.of(who, mapping, scores, **keywords), kind, target, weight, of_loss)


def _probabilities(arguments: Arguments, agreement: Agreement, logs: bool) -> Any:
    def each(out: Any, _: Any) -> Array:
        shard = out.shards.shard
        return shard.per_class(out.log_p()) if logs else shard.probabilities(out.p())

    return solve(arguments.call(agreement), each)


document(globals(), threshold, ScoresKeywords, ShardKeywords)
