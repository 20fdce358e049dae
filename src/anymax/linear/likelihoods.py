"""Output layers: log p, entropy and divergences of scores `x @ linear_weight.T` that are computed a part at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, overload

from .._array import Array, Namespace, eager, namespace, quiet, take
from .._core.classes import PADDING
from .._core.mapping import Mapping
from .._core.options import check_keywords
from .._core.shards import layer_over_devices
from .._core.shards import refuse as refuse_sharded
from .._core.tables import document
from .._core.typing import ArrayT, DType, Mask, Numbers
from ..autodiff import bridge
from ..functional.draws import check_draw
from ..likelihood.support import places_of, sized_support
from ..likelihood.teacher import Direction, Tail, Teacher
from ..likelihood.terms import terms_of
from ..mappings import Softmax
from .arguments import (
    FULL_WITHOUT_SUPPORT,
    HINTS,
    LayerArguments,
    check_support,
    class_of_each_row,
    indices_of_rows,
    row_transforms,
    with_temperature,
)
from .job import Job, PerRow, RowTerms
from .layer import Layer
from .verbs import linear_loss

_SOFTMAX = Softmax()


@check_keywords(HINTS, bias="linear_bias")
@layer_over_devices("target")
def linear_log_prob(
    x: ArrayT | Numbers,
    linear_weight: Any,
    target: Any,
    mapping: Mapping | str = _SOFTMAX,
    *,
    linear_bias: Any = None,
    support: Any = None,
    temperature: Any = None,
    mask: Mask = None,
    transform: Callable[[Any], Any] | None = None,
    chunk: int | None = None,
    score_dtype: DType = None,
    invariant: bool = False,
) -> ArrayT:
    """log p of given classes on the scores `x @ linear_weight.T + linear_bias` of an output layer, computed a part at a time.

    Use it for the tokens of a language model in training by policy gradients. If a sampler kept a few classes of each row, pass them as
    `support`; then no other rows of the weight are read, forward or backward. For scores that exist already use `anymax.log_prob`.

    Parameters
    ----------
    target
        The classes, integers of the shape of x without its last axis. For -100, which marks padding, log p and entropy are 0, without a
        gradient. For -1, none, log p is 0; with a `Sink` -1 is the sink.
    support
        The support of each row, the classes that count, as `(ids, offsets)`: those of row i, in C order, are `ids[offsets[i]:offsets[i +
        1]]`, as vLLM and `sample(return_support=True)` return them; or a list with a list of ids for each row; or integers [..., k], with
        -1 where a row has fewer than k. All other classes are masked. A transform must then change each score by itself, as `softcap`
        does. Under `jax.jit` the sizes must be known: let the traced function close over the support, or give integers [..., k].
    temperature
        Divides the scores, before the transform: a number of at least 0, or one value above 0 for each row, in the shape of
        target.

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
    check_support(who, support, mask, transform, invariant)
    arguments = LayerArguments(
        who, x, linear_weight, mapping, linear_bias, mask, transform, chunk, temperature, score_dtype, invariant
    )
    tokens = _Tokens.of(arguments, target, support, entropy=False)
    return tokens.all()[0] if support is None else tokens.over(support)[0]


@overload
def linear_log_prob_entropy(
    x: ArrayT | Numbers, linear_weight: Any, target: Any, mapping: Mapping | str = ..., *,
    support: Any = None, full: Literal[False] = False,
    temperature: Any = None, linear_bias: Any = None, transform: Callable[[Any], Any] | None = None, mask: Mask = None,
    chunk: int | None = None, score_dtype: DType = None, invariant: bool = False,
) -> tuple[ArrayT, ArrayT]: ...  # fmt: skip


@overload
def linear_log_prob_entropy(
    x: ArrayT | Numbers, linear_weight: Any, target: Any, mapping: Mapping | str = ..., *,
    support: Any = None, full: Literal[True],
    temperature: Any = None, linear_bias: Any = None, transform: Callable[[Any], Any] | None = None, mask: Mask = None,
    chunk: int | None = None, score_dtype: DType = None, invariant: bool = False,
) -> tuple[tuple[ArrayT, ArrayT], tuple[ArrayT, ArrayT]]: ...  # fmt: skip


@overload
def linear_log_prob_entropy(
    x: ArrayT | Numbers, linear_weight: Any, target: Any, mapping: Mapping | str = ..., *,
    support: Any = None, full: bool,
    temperature: Any = None, linear_bias: Any = None, transform: Callable[[Any], Any] | None = None, mask: Mask = None,
    chunk: int | None = None, score_dtype: DType = None, invariant: bool = False,
) -> tuple[ArrayT, ArrayT] | tuple[tuple[ArrayT, ArrayT], tuple[ArrayT, ArrayT]]: ...  # fmt: skip


@check_keywords(HINTS, bias="linear_bias")
@layer_over_devices("target")
def linear_log_prob_entropy(
    x: ArrayT | Numbers,
    linear_weight: Any,
    target: Any,
    mapping: Mapping | str = _SOFTMAX,
    *,
    support: Any = None,
    full: bool = False,
    temperature: Any = None,
    linear_bias: Any = None,
    transform: Callable[[Any], Any] | None = None,
    mask: Mask = None,
    chunk: int | None = None,
    score_dtype: DType = None,
    invariant: bool = False,
) -> tuple[ArrayT, ArrayT] | tuple[tuple[ArrayT, ArrayT], tuple[ArrayT, ArrayT]]:
    """log p of given classes and the entropy of each row, from hidden states and the weight of an output layer, in one sweep of the weight.

    Use it for the tokens of a language model in reinforcement learning: the ratio of policies needs the one, an entropy bonus the other.
    Both have gradients. The scores are computed a part at a time; for scores that exist already use `anymax.log_prob_entropy`.

    Parameters
    ----------
    full
        With a `support`, True returns the values over all classes too.

    Returns
    -------
    tuple[Array, Array]
        (log_prob, entropy), each of the shape of target; fp32 for half precision. log_prob is that of `linear_log_prob`;
        entropy is `-sum p log p` over the classes that are not masked, or over those of the support. Its gradient is exact where p is 0,
        and that of a row without classes is 0. With `full=True` a pair of such pairs: that of the support, and that of all classes.

    Examples
    --------
    >>> x, weight = [[1.0, 0.0], [0.0, 2.0]], [[2.0, 0.0], [0.0, 2.0], [1.0, 1.0]]
    >>> log_p, entropy = anymax.linear_log_prob_entropy(x, weight, [0, 2])
    >>> log_p.round(3), entropy.round(3)
    (array([-0.408, -2.143]), array([0.832, 0.441]))
    """
    who = "linear_log_prob_entropy"
    if full and support is None:
        raise ValueError(f"{who}: {FULL_WITHOUT_SUPPORT}")
    check_support(who, support, mask, transform, invariant)
    arguments = LayerArguments(
        who, x, linear_weight, mapping, linear_bias, mask, transform, chunk, temperature, score_dtype, invariant
    )
    tokens = _Tokens.of(arguments, target, support, entropy=True)
    if support is None:
        return tokens.all()
    kept = tokens.over(support)
    return (kept, tokens.all()) if full else kept


@check_keywords(HINTS, bias="linear_bias")
@layer_over_devices("ids", "teacher_log_p")
def linear_topk_kl(
    x: ArrayT | Numbers,
    linear_weight: Any,
    ids: Any,
    teacher_log_p: Any,
    mapping: Mapping | str = _SOFTMAX,
    *,
    tail: Tail = "ignore",
    direction: Direction = "forward",
    temperature: Any = None,
    linear_bias: Any = None,
    transform: Callable[[Any], Any] | None = None,
    mask: Mask = None,
    chunk: int | None = None,
) -> ArrayT:
    """The divergence of a student from a teacher whose k largest log-probabilities are known, from the student's hidden states and weight.

    Use it to distil a language model: the student's scores are computed a part at a time. For scores that exist already use
    `anymax.topk_kl`.

    Parameters
    ----------
    ids
        The teacher's classes, integers [..., k]; -1 where a row has fewer than k.
    teacher_log_p
        The teacher's log-probabilities of these classes, in the shape of ids: natural logarithms, normalised over all classes.
    mapping
        The student's map.
    tail
        The treatment of the teacher's other classes: "ignore" leaves them out, and the divergence can then be below 0; "one
        class" merges them into one class, on both sides.
    direction
        "forward" is `sum t (log t - log p)`, which covers the teacher's classes; "reverse" is `sum p (log p - log t)`, which
        draws the student to the teacher's most likely ones. In reverse the teacher's tail is at least its rounding error.
    temperature
        Divides the student's scores, before the transform: a number of at least 0, or one value above 0 for each row. The
        teacher's log-probabilities must be those at this temperature; the result is not multiplied by its square.

    Returns
    -------
    Array
        One number for each row, an array of the kind of x; fp32 for half precision. +inf where the student's probability is 0
        for a class of the teacher, or in reverse the teacher's for a class of the student.

    Examples
    --------
    >>> import numpy as np, anymax
    >>> x, weight = [[1.0, 0.0]], [[2.0, 0.0], [0.5, 2.0], [0.0, 1.0], [0.0, 0.0]]
    >>> anymax.linear_topk_kl(x, weight, [[0, 1]], np.log([[0.7, 0.2]]), tail="one class").round(4)
    array([0.0302])
    """
    who = "linear_topk_kl"
    arguments = LayerArguments(who, x, linear_weight, mapping, linear_bias, mask, transform, chunk, temperature)
    layer, transforms = read_layer(arguments)
    xp, lead, n = namespace(layer.x), layer.lead, layer.seen_classes
    refuse_sharded(who, None, ids=ids, teacher_log_p=teacher_log_p)
    teacher = Teacher.read(who, layer.x, lead, n, -1, ids, teacher_log_p, tail, direction, xp)
    classes = xp.reshape(teacher.ids, (layer.rows, teacher.ids.shape[-1]))
    per_row = RowTerms(who, transforms, rest=teacher.needs_rest)
    columns = bridge(layer.x).layers.values(arguments.job(layer, per_row, classes), per_row.empty_rows(classes))
    return teacher.of_columns(xp.reshape(columns, (*lead, columns.shape[-1])), xp)


def read_layer(arguments: LayerArguments, layer: Layer | None = None) -> tuple[Layer, tuple[Callable[[Any], Any], ...]]:
    """The layer, at its temperature, and the transforms of its scores. layer: the operands, if they are read already."""
    who, temperature, transform = arguments.who, arguments.temperature, arguments.transform
    layer = arguments.layer() if layer is None else layer
    check_draw(layer.mapping, who)
    layer.refuse_with_sink(who, temperature=temperature, transform=transform)
    transforms = row_transforms(who, transform)
    if temperature is None:
        return layer, transforms
    layer, first = with_temperature(who, layer, temperature, arguments.invariant)
    return layer, (*first, *transforms)


@dataclasses.dataclass(frozen=True)
class _Tokens:
    """The classes of the rows of a layer, and what to compute for them."""

    job: Job
    per_row: RowTerms
    index: Array  # [rows], -1 for none
    padding: Array  # [rows], True where the target is the mark of padding

    @classmethod
    def of(cls, arguments: LayerArguments, target: Any, support: Any, *, entropy: bool) -> _Tokens:
        who, (layer, transforms) = arguments.who, read_layer(arguments)
        layer.refuse_with_sink(who, support=support)
        xp = namespace(layer.x)
        target = indices_of_rows(who, target, layer, xp)
        index, _ = class_of_each_row(who, target, layer, None, xp)
        per_row = RowTerms(who, transforms, entropy=entropy)
        job = arguments.job(layer, per_row, index[:, None])
        padding = xp.reshape(target == PADDING, (layer.rows,))
        if support is not None or not eager(layer.x):  # else these rows are not computed, or nothing is differentiated
            job = dataclasses.replace(job, layer=layer.with_rows(~padding, xp))
        return cls(job, per_row, index, padding)

    def all(self) -> tuple[Any, Any]:
        """log p and the entropy over all classes."""
        layer, per_row, xp = self.job.layer, self.per_row, namespace(self.index)
        empty = self.padding if per_row.entropy else per_row.empty_rows(self.index[:, None])
        columns = bridge(layer.x).layers.values(self.job, empty)
        return self._as_given(columns[:, 0], columns[:, 1] if per_row.entropy else None, xp)

    def _as_given(self, log_p: Array, entropy: Array | None, xp: Namespace) -> tuple[Any, Any]:
        """In the shape of the rows as given. Padding has no entropy either."""
        layer = self.job.layer
        if entropy is not None:
            entropy = layer.as_given(xp.where(self.padding, xp.zeros_like(entropy), entropy), xp)
        return layer.as_given(log_p, xp), entropy

    def over(self, support: Any) -> tuple[Any, Any]:
        """log p and the entropy over the classes of each row's support; no other rows of the weight are read."""
        return bridge(self.job.layer.x).layers.outside_graphs(self._of_support, support)

    def _of_support(self, support: Any) -> tuple[Any, Any]:
        who, layer, xp = self.per_row.who, self.job.layer, namespace(self.index)
        terms = self._terms(sized_support(who, layer.x, layer.rows, layer.classes, support, xp), xp)
        return self._as_given(terms.log_p[:, 0], None if terms.entropy is None else terms.entropy[:, 0], xp)

    def _terms(self, support: tuple[Array, Array], xp: Namespace) -> Any:
        layer, per_row, (ids, offsets) = self.job.layer, self.per_row, support
        who = per_row.who
        classes, there, spot = places_of(who, (layer.rows,), layer.classes, self.index[:, None], ids, offsets, xp)
        with quiet(layer.x):
            s = scores_of_support(layer, per_row, classes, there, xp)
            return terms_of(layer.mapping, s, spot, xp, entropy=per_row.entropy)


def scores_of_support(layer: Layer, per_row: PerRow, classes: Array, there: Array, xp: Namespace) -> Array:
    """The transformed scores of some classes of each row, [rows, width], -inf where there is none."""
    if layer.keep is not None:  # of classes whose bias is -inf
        there = there & take(xp.broadcast_to(layer.keep, (layer.rows, layer.classes)), classes, xp)
    s = layer.scaled(bridge(layer.x).layers.gathered(layer, classes), xp)
    return per_row.transformed(xp.where(there, s, -math.inf * xp.ones_like(s)))


document(globals(), linear_log_prob, linear_loss)
