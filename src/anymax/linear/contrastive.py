"""The contrastive loss of pairs of embeddings, whose similarities are computed in blocks."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .. import _array
from .._array import (
    Array,
    Namespace,
    as_dtype,
    check_flag,
    device_of,
    namespace,
    on_cpu,
    upcast,
    without_autocast,
)
from .._core.mapping import Mapping
from .._core.names import as_mapping
from .._core.options import check_keywords
from .._core.providers import providers
from .._core.shards import refuse as refuse_sharded
from .._core.shards import sharded
from .._core.typing import ArrayT, Mask, Numbers, Reduction
from ..autodiff import bridge
from ..autodiff.agreement import Agreement, described, fail_together
from ..autodiff.choose_group import as_group
from ..autodiff.group import Group
from ..losses.options import LossOptions, cast
from ..mappings import Softmax
from ..transforms.base import check_range
from .layer import dtype_of_result, one_dtype
from .verbs import linear_loss

_SOFTMAX = Softmax()
_WHO = "contrastive_loss"


@check_keywords({"logit_scale": "say temperature=1 / logit_scale"})
def contrastive_loss(
    a: ArrayT | Numbers,
    b: Any,
    *,
    mapping: Mapping | str = _SOFTMAX,
    temperature: Any = 1.0,
    bidirectional: bool = True,
    mask: Mask = None,
    reduction: Reduction = "mean",
    group: Any = None,
    axis_name: Any = None,
) -> ArrayT:
    """The loss of pairs of embeddings: `a[i]` should find `b[i]` among all of b by the scores `a @ b.T / temperature`, and the reverse.

    Use it to train embeddings of images and texts, or of queries and documents, with large batches. For softmax it is the loss of CLIP,
    InfoNCE, and with `bidirectional=False` the multiple negatives ranking loss. The scores are computed in blocks; on torch both
    directions of softmax share these, and hold at most 128 MB of them for the gradient.

    Parameters
    ----------
    a
        Embeddings [pairs, features]. They are not normalised: divide each row by its length first if the score is a cosine.
    b
        The same of their partners, `b[i]` of `a[i]`. Rows after these, as in [pairs + negatives, features], are hard negatives: they are
        negatives of every `a[i]`, and look for no partner themselves.
    mapping
        The map of each row of scores, such as `anymax.Entmax(1.5)`, or its name; its loss is that of `linear_loss`.
    temperature
        Divides the scores: a number above 0, or an array of one number, which may be learned.
    bidirectional
        False leaves out the second direction, in which `b[i]` of each pair finds `a[i]` among all of a; True returns the mean of both.
    mask
        Booleans that broadcast to the scores, [pairs, rows of b], True = keep. A False takes a pair `a[i]`, `b[j]` out of the
        negatives, in both directions: one that belongs together too, as in GIST. The pairs themselves always count. With a group it has
        the rows of this process and the columns of all, [pairs, rows of b on all processes], in the order of the processes.
    reduction
        "mean" over the pairs, their "sum", or "none" for one value per pair.
    group
        For torch, the processes over which the pairs are spread, a `ProcessGroup` or a `DeviceMesh`: each gives the same
        number of pairs, and all find their partners among those of all. The mean or the sum is that of all pairs, the same on each
        process. The gradients of embeddings and of a learned temperature are this process's part: `DistributedDataParallel` adds
        them up and divides them by the number of processes, so multiply the loss by that number.
    axis_name
        The same for JAX: the axis of the mesh along which the pairs lie, inside `jax.shard_map`. DTensors of torch need neither: their
        pairs may be split along a dimension of their mesh, and their gradients are complete.

    Returns
    -------
    Array
        The loss, an array of the kind of a, in its dtype; fp32 for half precision.

    Examples
    --------
    >>> import numpy as np
    >>> a = np.eye(3)
    >>> anymax.contrastive_loss(a, a, temperature=0.5).round(4)
    np.float64(0.2395)
    >>> anymax.contrastive_loss(a, a, temperature=0.5, mapping="sparsemax")
    np.float64(0.0)
    >>> hard = np.array([[0.9, 0.1, 0.0]])
    >>> anymax.contrastive_loss(a, np.concatenate([a, hard]), temperature=0.5, bidirectional=False).round(4)
    np.float64(0.4798)
    """
    arguments = Arguments(a, b, mapping, temperature, bidirectional, mask, reduction)
    if sharded(a) or sharded(b):
        if group is not None or axis_name is not None:
            raise TypeError(f"{_WHO}: leave group= out; DTensors say over which devices their pairs are spread")
        return providers.layers_over_devices().pairs(_WHO, loss_of_pairs, arguments)
    return loss_of_pairs(arguments, group, axis_name)


class Arguments(NamedTuple):
    """The arguments of `contrastive_loss`, not yet checked."""

    a: Any
    b: Any
    mapping: Any
    temperature: Any
    bidirectional: Any
    mask: Any
    reduction: Any
    negatives: Any = None  # further rows of b, the same on each process


def loss_of_pairs(arguments: Arguments, group: Any = None, axis_name: Any = None) -> Any:
    """The loss of pairs that this process has, or of those of all processes of a group."""
    a = _array.asarray(arguments.a, "a")
    with without_autocast(a):  # the embeddings have its dtype, and their quotient is not to be rounded
        if group is None and axis_name is None:
            return Pairs.read(arguments).here()
        return bridge(a).layers.outside_graphs(_together, arguments, a, group, axis_name)


def _together(arguments: Arguments, a: Array, group: Any, axis_name: Any) -> Any:
    """The loss of the pairs of all processes, which compare their calls first; if one fails, all do."""
    shared = as_group(_WHO, group, axis_name, a)
    agreement = Agreement(_WHO, shared, a, room="")
    return fail_together(agreement, lambda: Pairs.read(arguments, shared.size).over(agreement))


class Pairs(NamedTuple):
    """Pairs of embeddings, and how their loss is computed."""

    mapping: Mapping
    bidirectional: bool
    options: LossOptions
    a: Array  # [pairs, features]
    scaled: Array  # a / temperature
    b: Array  # [pairs, features]
    negatives: Array | None  # [negatives, features]
    same_negatives: bool  # every process has the same
    keep: Array | None  # [pairs, columns], the partners of a process before its negatives
    temperature: Any
    xp: Namespace

    @classmethod
    def read(cls, arguments: Arguments, processes: int = 1) -> Pairs:
        """The arguments, checked."""
        options = LossOptions.read(_WHO, None, {"reduction": arguments.reduction})
        mapping = as_mapping(arguments.mapping, _WHO)
        bidirectional = check_flag(_WHO, "bidirectional", arguments.bidirectional)
        a, b = _embeddings(arguments.a, arguments.b)
        xp, n, negatives = namespace(a), a.shape[0], arguments.negatives
        if negatives is None and b.shape[0] > n:
            b, negatives = b[:n, :], b[n:, :]
        check_range(_WHO, "temperature", arguments.temperature, _array.ABOVE_0)
        t = _array.number(arguments.temperature)
        features = upcast(a, xp)
        if _array.is_array(t):
            if math.prod(t.shape) != 1:
                raise ValueError(f"{_WHO}: temperature of shape {tuple(t.shape)}: expected one number for all pairs")
            t = _array.nan_outside(_array.beside(t, a, "temperature", xp), _array.ABOVE_0)
            t = as_dtype(xp.reshape(t, ()), features.dtype, xp)
        scaled = features / t
        if not on_cpu(a):  # there products of half precision are computed in fp32
            scaled = as_dtype(scaled, a.dtype, xp)
        more = 0 if negatives is None else negatives.shape[0]
        apart = processes if arguments.negatives is None else 1  # the processes that have negatives of their own
        keep = None if arguments.mask is None else _mask(arguments.mask, a, processes * n, apart * more, apart, xp)
        same = arguments.negatives is not None
        return cls(mapping, bidirectional, options, a, scaled, b, negatives, same, keep, t, xp)

    def here(self) -> Array:
        """The loss of pairs of which this process has all."""
        xp, place = self.xp, self.xp.arange(self.a.shape[0], **device_of(self.a))
        all_b, keep = self._with_negatives(self.b), self._with_pairs(place)
        both = self.bidirectional and self.mapping.is_softmax
        ways = bridge(self.a).layers.both_ways(self.scaled, all_b, keep) if both else None
        if ways is not None:
            value = 0.5 * (ways[0] + ways[1])
            return self.options.reduce(value, xp.ones_like(value), dtype_of_result(self.a, xp), xp)
        back = None if keep is None else keep[:, : self.a.shape[0]].T
        return self._both(all_b, self.scaled, place, keep, back, self.options.reduction)

    def _with_negatives(self, b: Array) -> Array:
        return b if self.negatives is None else self.xp.concat([b, self.negatives])

    def _with_pairs(self, place: Array) -> Array | None:
        """The mask, which leaves each row of a its partner."""
        keep = self.keep
        return None if keep is None else keep | (_array.positions(keep, place.dtype, self.xp) == place[:, None])

    def _both(
        self, all_b: Array, all_a: Array, place: Array, keep: Array | None, back: Array | None, reduction: Reduction
    ) -> Array:
        """The loss of the scores of a and all b, whose targets are `place`, and of the scores of b and all a: their mean, if it is both."""
        value = linear_loss(self.scaled, all_b, place, self.mapping, mask=keep, reduction=reduction)
        if self.bidirectional:
            value = 0.5 * (value + linear_loss(self.b, all_a, place, self.mapping, mask=back, reduction=reduction))
        return value

    def over(self, agreement: Agreement) -> Array:
        """The loss of pairs that are spread over the processes of a group."""
        group, xp, n, reduction = agreement.group, self.xp, self.a.shape[0], self.options.reduction
        self._compare(agreement)
        place = group.rank * n + xp.arange(n, **device_of(self.a))
        all_a, all_b = (group.vary(group.stack(part)) for part in (self.scaled, self.b))
        all_a, all_b = (xp.reshape(part, (group.size * n, -1)) for part in (all_a, all_b))
        negatives = self.negatives
        if negatives is not None:
            if not self.same_negatives:
                negatives = xp.reshape(group.vary(group.stack(negatives)), (-1, negatives.shape[1]))
            all_b = xp.concat([all_b, negatives])
        keep = self._with_pairs(place)
        back = None if keep is None or not self.bidirectional else self._masks_of_others(group, keep)
        value = self._both(all_b, all_a, place, keep, back, "none")
        if reduction == "none":
            return value
        value = xp.sum(group.stack(xp.sum(upcast(value, xp))))  # a sum may be above the largest number of fp16
        return cast(value / (group.size * n) if reduction == "mean" else value, dtype_of_result(self.a, xp))

    def _compare(self, agreement: Agreement) -> None:
        """Compare the calls of the processes."""
        agreement.say_mapping(self.mapping)
        agreement.same |= {f"{name} of {self.mapping.name}": v for name, v in self.mapping.params().items()}
        if _array.is_array(self.temperature):
            agreement.same["temperature"] = self.temperature
        negatives = 0 if self.negatives is None else self.negatives.shape[0]
        agreement.say(
            temperature=described(self.temperature), bidirectional=self.bidirectional, reduction=self.options.reduction,
            a=described(self.a), b=f"{described(self.b)} with {negatives} negatives", dtype=str(self.a.dtype),
            mask="not given" if self.keep is None else "given",
        )  # fmt: skip
        agreement.settle()

    def _masks_of_others(self, group: Group, keep: Array) -> Array:
        """The mask of this process's b and all a, [pairs, pairs of all processes]. Each process gives its rows of it."""
        xp, n = self.xp, self.a.shape[0]
        mine = xp.zeros((group.size, n, n), dtype=xp.uint8, **device_of(keep))
        for rank in range(group.size):  # one at a time, since all of them are the masks of all processes
            part = group.stack(xp.astype(keep[:, rank * n : rank * n + n], xp.uint8))
            mine = xp.where(xp.asarray(group.rank == rank, **device_of(keep)), part, mine)
        return xp.reshape(mine, (group.size * n, n)).T > 0


def _embeddings(a: Any, b: Any) -> tuple[Array, Array]:
    """The embeddings as floating-point arrays of one kind and dtype, whose shapes fit each other."""
    a = _array.asarray(a, "a")
    xp = namespace(a)
    a = _array.floating(a, xp, "a")
    b = _array.floating(_array.beside(b, a, "b", xp), xp, "b")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or b.shape[0] < a.shape[0] or not a.shape[0]:
        raise ValueError(
            f"{_WHO}: expected embeddings a [pairs, features] and b [pairs, features], or [pairs + negatives, features], got "
            f"{tuple(a.shape)} and {tuple(b.shape)}"
        )
    a, b = one_dtype(xp, a, b)
    return a, b


def _mask(mask: Any, a: Array, pairs: int, negatives: int, processes: int, xp: Namespace) -> Array:
    """The mask as [pairs of this process, columns], with the columns of all `pairs` before those of all `negatives`.

    processes: how many of them have columns of both kinds, which the caller gives process by process.
    """
    refuse_sharded(_WHO, None, mask=mask)
    keep, shape = _array.beside(mask, a, "mask", xp), (a.shape[0], pairs + negatives)
    if not _array.is_boolean(keep):
        raise TypeError(f"{_WHO}: mask must be booleans, True = keep, got {keep.dtype}")
    keep = xp.broadcast_to(_array.fit_axes(keep, shape, f"{_WHO}: mask"), shape)
    if processes == 1 or not negatives:
        return keep
    by_process = xp.reshape(keep, (a.shape[0], processes, -1))
    parts = by_process[:, :, : pairs // processes], by_process[:, :, pairs // processes :]
    return xp.concat([xp.reshape(part, (a.shape[0], -1)) for part in parts], axis=1)
