"""The divergence between two output layers, a student's and that of a reference, whose scores are computed a part at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from .. import _array
from .._array import Array, Namespace, counts, device_of, namespace, quiet, upcast
from .._core.mapping import Mapping
from .._core.options import check_keywords
from .._core.shards import layer_over_devices
from .._core.shards import refuse as refuse_sharded
from .._core.tables import document
from .._core.typing import ArrayT, DType, Mask, Numbers, Reduction
from ..autodiff import bridge
from ..likelihood.divergence import divergence_rows, read_beta
from ..likelihood.support import padded, sized_support
from ..likelihood.teacher import Direction
from ..losses.options import LossOptions
from ..mappings import Softmax
from .arguments import HINTS, LayerArguments, check_support
from .job import Job, RowDivergence
from .layer import Layer
from .likelihoods import linear_log_prob, read_layer, scores_of_support
from .verbs import LossJob, linear_loss, reduced

_SOFTMAX = Softmax()
HINTS_OF_TWO = HINTS | {
    "target": "a divergence has none; rows that don't count are False in where=, as in where=labels != -100",
    "labels": "say which rows count: where=labels != -100",
    "ignore_index": "say which rows count: where=labels != -100",
    "": "the options of both layers have names, as in linear_bias= and linear_bias_ref=",
}


@check_keywords(HINTS_OF_TWO, bias="linear_bias", bias_ref="linear_bias_ref", weight_ref="linear_weight_ref")
@layer_over_devices("x_ref", "where")
def linear_kl(
    x: ArrayT | Numbers,
    linear_weight: Any,
    x_ref: Any,
    linear_weight_ref: Any,
    mapping: Mapping | str = _SOFTMAX,
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
    score_dtype: DType = None,
    invariant: bool = False,
) -> ArrayT:
    """The divergence between the distributions of two output layers, from the hidden states and the weight of each.

    Use it to distil a teacher with the same vocabulary into a language model, or to keep a policy near a reference. The scores of both
    are computed a part at a time, and in torch a sum or a mean gets its gradient in the forward pass. If only the teacher's largest
    log-probabilities are known, use `linear_topk_kl`; for scores that exist already `anymax.likelihood.kl`.

    With the student S, of `x`, the teacher T, of `x_ref`, and `M = (1 - beta) S + beta T`:

    - `beta=0`, or `direction="forward"`: `KL(T || S) = sum t (log t - log s)`, which covers the teacher's classes;
    - `beta=1`, or `direction="reverse"`: `KL(S || T) = sum s (log s - log t)`, which draws the student to the likeliest ones;
    - between: the generalised Jensen-Shannon divergence `beta KL(T || M) + (1 - beta) KL(S || M)`, at most log 2, which tends to 0 at
      both ends; so beta 0 and 1 are not its limits, but these divided by beta, or by 1 - beta.

    This is the beta of TRL and Liger. Both sides have gradients where they require them: give a teacher's as constants, in torch
    detached or under `no_grad`, to compute none for it.

    Parameters
    ----------
    x
        The student's features, [..., features].
    linear_weight
        The weight of its layer, [classes, features].
    x_ref
        The features of the reference, such as a teacher, for the same rows. They may be of another number than the student's.
    linear_weight_ref
        The weight of the layer of the reference, with the same classes.
    mapping
        The map of both, such as `anymax.Entmax(1.5)`, or its name; its parameters are numbers or have one value per row.
    direction
        "forward", from teacher to student, or "reverse"; leave it out with `beta`.
    beta
        A number from 0 to 1, the teacher's share of the mixture.
    linear_bias, linear_bias_ref
        One number per class, added to the scores of the layer.
    where
        Booleans of the shape of x without its last axis: False for rows that don't count, such as padding, as in `where=labels !=
        -100`. They have the value 0 and no gradient, whatever their features, and a mean leaves them out.
    support
        The classes of each row that count, for both, as in `anymax.linear_log_prob`; no other rows of the weights are read.
    temperature
        Divides the scores of both, before the transform: a number of at least 0, or one value above 0 for each row. The result is not
        multiplied by its square.
    mask, transform
        Those of `anymax.linear_loss`, applied to the scores of both.
    reduction
        "none" for one number per row, their "sum", or their "mean" over the rows that count.
    score_dtype
        The dtype of the scores of both, or its name, as in `anymax.linear_loss`.

    Returns
    -------
    Array
        One number for each row, or their sum or mean, an array of the kind of x; fp32 for half precision. With beta 0 or 1 it is +inf
        in a row where the second distribution has probability 0 for a class of the first, as with sparse maps, or a class that one
        layer alone masks; the gradient by the second's scores is finite there. Between 0 and 1 it is always finite.

    Examples
    --------
    >>> x, weight, weight_ref = [[1.0, 0.0]], [[2.0, 0.0], [0.5, 2.0], [0.0, 1.0]], [[1.0], [0.5], [0.0]]
    >>> anymax.linear_kl(x, weight, [[2.0]], weight_ref).round(4)
    array([0.0211])
    >>> anymax.linear_kl(x, weight, [[2.0]], weight_ref, beta=0.5).round(4)
    array([0.005])
    """
    who = "linear_kl"
    if isinstance(x_ref, (str, Mapping)):
        raise TypeError(
            f"{who}: expected the features x_ref of the reference, got {x_ref!r}; the mapping comes after linear_weight_ref"
        )
    arguments = LayerArguments(
        who, x, linear_weight, mapping, linear_bias, mask, transform, chunk, temperature, score_dtype, invariant
    )
    of_reference = arguments._replace(
        who=f"{who}, of the reference", x=x_ref, linear_weight=linear_weight_ref, linear_bias=linear_bias_ref
    )
    check_support(who, support, mask, transform, invariant)
    beta, options = read_beta(who, direction, beta), LossOptions.read(who, None, {"reduction": reduction})
    pair = Pair.of(arguments, of_reference, where, beta)
    return pair.all(options) if support is None else pair.over(support, options)


class Pair(NamedTuple):
    """Two layers over the same rows and classes, the student's and that of the reference."""

    job: Job
    counts: Array | None  # [rows], True for those that count; None for all

    @classmethod
    def of(cls, arguments: LayerArguments, of_reference: LayerArguments, where: Any, beta: float) -> Pair:
        who, layer = arguments.who, arguments.layer()
        xp = namespace(layer.x)
        refuse_sharded(who, None, x_ref=of_reference.x, linear_weight_ref=of_reference.linear_weight)
        reference = of_reference._replace(x=_array.beside(of_reference.x, layer.x, "x_ref", xp)).layer()
        check_pair(who, layer, reference)
        there = rows_that_count(who, where, layer, xp)
        if there is not None:  # before a temperature, whose gradient they would reach
            layer, reference = (each.with_rows(there, xp) for each in (layer, reference))
        (layer, transforms), (reference, _) = read_layer(arguments, layer), read_layer(of_reference, reference)
        reference = dataclasses.replace(reference, mapping=layer.mapping)
        per_row = RowDivergence(who, transforms, beta=beta)
        return cls(arguments.job(layer, per_row, reference=reference), there)

    def all(self, options: LossOptions) -> Any:
        x = self.job.layer.x
        xp = namespace(x)
        with quiet(x):
            there = self._there(xp)
            job = dataclasses.replace(self.job, target=counts(xp.astype(there, xp.int32), xp) - 1)
            return reduced(LossJob(job, ~there, self._counted(there, xp)), options)

    def over(self, support: Any, options: LossOptions) -> Any:
        """Over the classes of each row's support; no other rows of the weights are read."""
        layer = self.job.layer
        layer.refuse_with_sink(self.job.per_row.who, support=support)
        return bridge(layer.x).layers.outside_graphs(self._of_support, support, options)

    def _of_support(self, support: Any, options: LossOptions) -> Any:
        layer, per_row = self.job.layer, self.job.per_row
        assert isinstance(per_row, RowDivergence)
        who, xp = per_row.who, namespace(layer.x)
        ids, offsets = sized_support(who, layer.x, layer.rows, layer.classes, support, xp)
        classes, there = padded(who, (layer.rows,), layer.classes, ids, offsets, xp)
        with quiet(layer.x):
            s, t = (scores_of_support(each, per_row, classes, there, xp) for each in self.job.layers)
            value = divergence_rows(layer.mapping, s, t, per_row.beta, xp)
            counted = self._there(xp)
            value = xp.where(counted, value, xp.zeros_like(value))
            value, norm = (xp.reshape(a, layer.lead) for a in (value, self._counted(counted, xp)))
            return options.reduce(value, norm, layer.dtype, xp)

    def _there(self, xp: Namespace) -> Array:
        """[rows], True for those that count."""
        if self.counts is not None:
            return self.counts
        layer = self.job.layer
        return xp.ones((layer.rows,), dtype=xp.bool, **device_of(layer.x))

    def _counted(self, there: Array, xp: Namespace) -> Array:
        return xp.astype(there, upcast(self.job.layer.x[:1, :1], xp).dtype)


def check_pair(who: str, layer: Layer, reference: Layer) -> None:
    """Refuse layers whose rows or classes are not the same."""
    if reference.lead != layer.lead:
        raise ValueError(
            f"{who}: x has rows of shape {layer.lead} and x_ref {reference.lead}, without the features: give both for the same rows"
        )
    if reference.classes != layer.classes:
        n, m = layer.seen_classes, reference.seen_classes
        raise ValueError(
            f"{who}: linear_weight has {n} classes and linear_weight_ref {m}: both layers must have the same classes, in the same order; "
            "if one vocabulary is longer by padding, give its first rows, as in linear_weight_ref[:n]"
        )


def rows_that_count(who: str, where: Any, layer: Layer, xp: Namespace) -> Array | None:
    """`where` as booleans [rows]."""
    if where is None:
        return None
    refuse_sharded(who, None, where=where)
    where = _array.beside(where, layer.x, "where", xp)
    if not _array.is_boolean(where):
        raise TypeError(
            f"{who}: where must be booleans, True for the rows that count, got {where.dtype}; of labels write where=labels != -100"
        )
    if tuple(where.shape) != layer.lead:
        raise ValueError(
            f"{who}: where of shape {tuple(where.shape)}: expected a boolean for each row, of shape {layer.lead}"
        )
    return xp.reshape(where, (layer.rows,))


document(globals(), linear_loss, linear_log_prob)
