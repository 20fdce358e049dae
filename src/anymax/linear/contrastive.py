"""The contrastive loss of pairs of embeddings, whose similarities are computed in blocks."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .. import _array
from .._array import Array, Namespace, as_dtype, device_of, namespace, upcast, without_autocast
from .._core.handed import handed
from .._core.mapping import Mapping
from .._core.names import as_mapping
from .._core.options import check_keywords
from .._core.shards import sharded
from .._core.typing import ArrayT, Numbers, Reduction
from ..autodiff import bridge
from ..autodiff.choose_group import as_group
from ..losses.options import LossOptions, cast
from ..mappings import Softmax
from ..transforms.base import check_range
from .layer import dtype_of_result, one_dtype
from .verbs import linear_loss

_SOFTMAX = Softmax()


@check_keywords({"tau": "say temperature=", "logit_scale": "say temperature=1 / logit_scale"})
def contrastive_loss(
    a: ArrayT | Numbers,
    b: Any,
    *,
    mapping: Mapping | str = _SOFTMAX,
    temperature: Any = 1.0,
    bidirectional: bool = True,
    reduction: Reduction = "mean",
    group: Any = None,
    axis_name: Any = None,
) -> ArrayT:
    """The loss of pairs of embeddings: `a[i]` should find `b[i]` among all of b by the scores `a @ b.T / temperature`, and the reverse.

    Use it to train embeddings of images and texts, or of queries and documents, with large batches. For softmax it is the loss of CLIP,
    InfoNCE. The scores are computed in blocks; on torch both directions of softmax share these, and hold at
    most 128 MB of them for the gradient.

    Parameters
    ----------
    a, b
        Embeddings [pairs, features]. They are not normalised: divide each row by its length first if the score is a cosine.
    mapping
        The map of each row of scores, such as `anymax.Entmax(1.5)`, or its name; its loss is that of `linear_loss`.
    temperature
        Divides the scores: a number above 0, or an array of one number, which may be learned.
    bidirectional
        False leaves out the second direction, in which `b[i]` finds `a[i]`; True returns the mean of both.
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
    """
    who = "contrastive_loss"
    options = LossOptions.read(who, None, {"reduction": reduction})
    mapping = as_mapping(mapping, who)
    if sharded(a) or sharded(b):
        if group is not None or axis_name is not None:
            raise TypeError(f"{who}: leave group= out; DTensors say over which devices their pairs are spread")
        given = {"bidirectional": bidirectional, "reduction": reduction}
        return handed.layers_over_devices().pairs(who, contrastive_loss, a, b, mapping, temperature, given)
    first, second = _pairs(who, a, b)
    check_range(who, "temperature", temperature, lambda v: v > 0, "above 0")
    xp, temperature = namespace(first), _array.number(temperature)
    if _array.is_array(temperature):
        if math.prod(temperature.shape) != 1:
            raise ValueError(
                f"{who}: temperature of shape {tuple(temperature.shape)}: expected one number for all pairs"
            )
        temperature = _array.beside(temperature, first, "temperature", xp)
        temperature = as_dtype(xp.reshape(temperature, ()), first.dtype, xp)
    loss = Pairs(mapping, bidirectional, options)
    with without_autocast(first):  # they have its dtype, and their quotient is not to be rounded
        if group is None and axis_name is None:
            return loss.here(first, second, temperature, xp)
        return loss.over(as_group(who, group, axis_name, first), first, second, temperature, xp)


class Pairs(NamedTuple):
    """How the loss of pairs is computed."""

    mapping: Mapping
    bidirectional: bool
    options: LossOptions

    def here(self, a: Array, b: Array, temperature: Any, xp: Namespace) -> Array:
        """The loss of pairs of which this process has all."""
        scaled, place = a / temperature, xp.arange(a.shape[0], **device_of(a))
        ways = bridge(a).layers.both_ways(scaled, b) if self.bidirectional and self.mapping.is_softmax else None
        if ways is not None:
            value = 0.5 * (ways[0] + ways[1])
            return self.options.reduce(value, xp.ones_like(value), dtype_of_result(a, xp), xp)
        return self.both(scaled, b, b, scaled, place, self.options.reduction)

    def both(self, a: Array, all_b: Array, b: Array, all_a: Array, place: Array, reduction: Reduction) -> Array:
        """The loss of the scores of a and all b, whose targets are `place`, and of the scores of b and all a: their mean, if it is both."""
        value = linear_loss(a, all_b, place, self.mapping, reduction=reduction)
        if self.bidirectional:
            value = 0.5 * (value + linear_loss(b, all_a, place, self.mapping, reduction=reduction))
        return value

    def over(self, group: Any, a: Array, b: Array, temperature: Any, xp: Namespace) -> Array:
        """The loss of pairs that are spread over the processes of a group."""
        n, features = a.shape
        if group.strict:
            sizes = group.gathered(xp.asarray([n, features], **device_of(a)))
            if bool(xp.any(sizes != sizes[:1])):
                raise ValueError(
                    f"contrastive_loss: each process must give the same number of pairs and features, got {sizes.tolist()}"
                )
        scaled, place = a / temperature, group.rank * n + xp.arange(n, **device_of(a))
        all_a, all_b = (xp.reshape(group.vary(group.stack(part)), (group.size * n, features)) for part in (scaled, b))
        reduction = self.options.reduction
        value = self.both(scaled, all_b, b, all_a, place, "none")
        if reduction == "none":
            return value
        value = xp.sum(group.stack(xp.sum(upcast(value, xp))))  # a sum may be above the largest number of fp16
        return cast(value / (group.size * n) if reduction == "mean" else value, dtype_of_result(a, xp))


def _pairs(who: str, a: Any, b: Any) -> tuple[Array, Array]:
    """The embeddings as floating-point arrays of one kind, dtype and shape."""
    a = _array.asarray(a, "a")
    xp = namespace(a)
    a = _array.floating(a, xp, "a")
    b = _array.floating(_array.beside(b, a, "b", xp), xp, "b")
    if a.ndim != 2 or tuple(a.shape) != tuple(b.shape) or not a.shape[0]:
        raise ValueError(
            f"{who}: expected two arrays of embeddings of one shape [pairs, features], got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    a, b = one_dtype(xp, a, b)
    return a, b
