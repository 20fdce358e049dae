"""Likelihoods: log p of given classes, entropy, and divergences, for policies, decoders and distillation.

Softmax needs no array of log-probabilities, forward or backward. log p of a class with p = 0 is -inf, with a finite gradient: that of the
map's loss, `e_y - p` for the class y. The derivative of an entropy is exact where p is 0.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from .. import _array
from .._array import (
    Array,
    Namespace,
    as_scalar,
    axis_or_all,
    counts,
    eager,
    is_integer,
    known_any,
    namespace,
    pick_axis,
    upcast,
)
from .._core.classes import class_indices, pads_row, refuse_strays
from .._core.mapping import Mapping
from .._core.names import as_mapping
from .._core.options import check_keywords
from .._core.shards import rows_over_devices, sharded
from .._core.tables import document
from .._core.typing import ArrayT, Axes, Numbers
from ..mappings import Softmax
from .support import on_support
from .teacher import Direction, Tail, Teacher
from .terms import kl_rows, read, read_scaled, terms_of

_SOFTMAX = Softmax()
_HINTS = {
    "top_k": "give it as transform=",
    "top_p": "give it as transform=",
}


@check_keywords(_HINTS, y="target")
def log_prob(
    mapping: Mapping | str,
    x: ArrayT | Numbers,
    target: Any,
    *,
    support: Any = None,
    transform: Any = None,
    temperature: Any = None,
    axis: Axes = -1,
    dim: Axes = None,
    mask: Any = None,
) -> ArrayT:
    """log p of given classes, for any map, after any transforms of the scores.

    Use it for the actions of a policy or the tokens of a language model; importance ratios need this one number per row. A trainer that
    uses only the classes that its sampler kept gives `support`, or the `transform` of the sampler.

    Parameters
    ----------
    mapping
        The map, such as `Softmax()`.
    x
        The scores; -inf masks a class.
    target
        The classes, integers of the shape of x without the axis of the classes, or with more axes before these, as from
        `sample(num_samples=...)`. For -100, the mark of padding in every target, log p is 0 without a gradient, so that padding
        adds nothing to a sum. So it is for -1, which `sample` returns if a row has no class, but with a `Sink` -1 is the sink.
        (The `log_prob` that `sample` returns is -inf for a row without a class: leave it out of a ratio of the two.)
    support
        The support of each row, the classes that count, as `(ids, offsets)`: those of row i, in C order, are `ids[offsets[i]:offsets[i +
        1]]`, as vLLM and `sample(return_support=True)` return them; or a list with a list of ids for each row; or integers [..., k], with
        -1 where a row has fewer than k. All other classes are masked.
    transform
        What is applied to the scores first: one of `anymax.transforms`, several in `compose(...)`, or your own function. Those
        of `anymax.transforms` work along `axis`.
    temperature
        Divides the scores, before the transform: a number of at least 0, or an array with one value per row.
    axis, dim
        The axis of the classes, the last by default. Several axes are read as one row, in
        which a target is an index as after a reshape.
    mask
        Boolean, broadcastable to x, True = keep; applied before the transforms.

    Returns
    -------
    Array
        An array of the kind of x and of the shape of target; fp32 for scores in half precision. -inf where p is 0, with the
        gradient of the map's loss, `e_y - p` (0 for a masked class), which leads back to the support. NaN in a row with NaN
        or +inf. It is that of one draw, as in `sample`: probabilities that sum to k (`Budget`), or to less than 1 (`Bounded`, where
        the bounds leave too little), are divided by their sum. A map that gives no distribution (`Elementwise`, `Ranks`) is an error.

    Examples
    --------
    >>> import anymax
    >>> anymax.log_prob(anymax.Sparsemax(), [[1.0, 0.5, -2.0], [0.0, 0.0, 3.0]], [1, 0]).round(3)
    array([-1.386,    -inf])
    """
    return _log_prob(
        "log_prob", mapping, x, target, support, transform, temperature, pick_axis(axis, dim), mask, False
    )[0]


@check_keywords(_HINTS, y="target")
def log_prob_entropy(
    mapping: Mapping | str,
    x: ArrayT | Numbers,
    target: Any,
    *,
    support: Any = None,
    transform: Any = None,
    temperature: Any = None,
    axis: Axes = -1,
    dim: Axes = None,
    mask: Any = None,
) -> tuple[ArrayT, ArrayT]:
    """log p of given classes and the entropy of each row, computed together, and so are their gradients.

    Use it for a policy's loss with an entropy bonus. For softmax on torch the forward pass allocates no array of the size of the scores,
    and the backward pass only the gradient.

    Returns
    -------
    tuple[Array, Array]
        (log_prob, entropy): log_prob is the result of `log_prob`; entropy is `-sum p log p` over the classes that are not
        masked, of the shape of x without the axis of the classes. Its gradient is exact where p is 0; the entropy of a row
        without classes is 0. That of a row whose target, or each of several, is -100, is 0 without a gradient, as in
        `linear_log_prob_entropy`; for -1 it counts.

    Examples
    --------
    >>> import anymax
    >>> log_p, h = anymax.log_prob_entropy(anymax.Softmax(), [[0.0, 0.0, -float("inf")]], [0])
    >>> log_p.round(3), h.round(3)
    (array([-0.693]), array([0.693]))
    """
    axis = pick_axis(axis, dim)
    return _log_prob("log_prob_entropy", mapping, x, target, support, transform, temperature, axis, mask, True)


def _log_prob(
    who: str, mapping: Mapping | str, x: Any, target: Any, support: Any, transform: Any, temperature: Any, axis: Any, mask: Any,
    entropy: bool,
) -> tuple[Any, Any]:  # fmt: skip
    if sharded(x):
        if support is not None or transform is not None or temperature is not None:
            raise TypeError(
                f"{who}: a DTensor goes without support, transform and temperature; change the scores first"
            )
        whole = log_prob_entropy if entropy else log_prob
        axis = axis_or_all(axis, x.ndim)
        log_p, *h = rows_over_devices(who, whole, as_mapping(mapping, who), x, axis, mask, target=target)
        return log_p, h[0] if entropy else None
    call, scale = read_scaled(who, mapping, x, axis, mask, transform, temperature)
    rows, hides, xp = call.rows, call.hides, namespace(call.rows)
    index, shape = _classes(who, target, rows, xp, hides=hides)
    padding = pads_row(index, xp) if entropy else None
    if support is not None:
        rows, index = on_support(who, call.mapping, rows, index, support, xp)
    if hides:
        index, _ = class_indices(f"{who}: target", index, rows.shape[-1], None, xp, hides=True, pads=True)
        call = call.over_all(upcast(rows, xp))
        rows = call.rows
    blank = lambda: xp.where(padding, xp.zeros_like(rows), rows)  # noqa: E731
    of = functools.partial(terms_of, call.mapping, index=index, xp=xp, scale=scale, entropy=entropy)
    log_p, h, _ = of(rows if padding is None or eager(rows) else blank())
    if h is not None:
        if known_any(padding & xp.isnan(h), xp):  # else their gradient is NaN, whatever its factor
            log_p, h, _ = of(blank())
        h = xp.where(padding, xp.zeros_like(h), h)
    last = log_p.ndim - 1
    one = log_p.shape[-1] == 1 and len(shape) == last
    log_p = log_p[..., 0] if one else xp.permute_dims(log_p, (last, *range(last)))
    return as_scalar(xp.reshape(log_p, shape)), None if h is None else as_scalar(h[..., 0])


@check_keywords()
def kl(
    mapping_p: Mapping | str,
    x: ArrayT | Numbers,
    mapping_q: Mapping | str,
    y: Any,
    *,
    axis: Axes = -1,
    dim: Axes = None,
    mask: Any = None,
) -> ArrayT:
    """The Kullback-Leibler divergence between two distributions, `sum_i p_i (log p_i - log q_i)`, each from its own map.

    Use it for distillation, and for the distance of a policy from a reference. Both sides get gradients. If only the teacher's largest
    log-probabilities are known, use `topk_kl`.

    Parameters
    ----------
    mapping_p
        The map of the first scores, such as `Softmax()`.
    x
        The first scores; -inf masks a class.
    mapping_q
        The map of the second scores.
    y
        The second scores, of the shape of x.
    axis, dim
        The axis of the classes, the last by default, or several axes that are read as one row.
    mask
        Boolean, broadcastable to x, True = keep; applied to both scores.

    Returns
    -------
    Array
        An array of the kind of x and of its shape without the axis of the classes; fp32 for scores in half precision. +inf
        if q is 0 for a class with p > 0, with a finite gradient (that of `log_prob`); 0 for a row without classes.

    Examples
    --------
    >>> import anymax
    >>> x = [[1.0, 0.8, -3.0]]
    >>> anymax.likelihood.kl(anymax.Sparsemax(), x, anymax.Softmax(), x).round(3)
    array([0.015])
    >>> anymax.likelihood.kl(anymax.Softmax(), x, anymax.Sparsemax(), x)
    array([inf])
    """
    axis = pick_axis(axis, dim)
    p = read("kl", mapping_p, x, axis, mask)
    xp = namespace(p.rows)
    q = read("kl", mapping_q, _array.beside(y, p.rows, "y", xp), axis, mask)
    if tuple(p.rows.shape) != tuple(q.rows.shape):
        raise ValueError(
            f"kl: the two scores must have one shape, got {tuple(p.rows.shape)} and {tuple(q.rows.shape)} (classes last)"
        )
    p = p.over_all(upcast(p.rows, xp)) if p.hides else p
    q = q.over_all(upcast(q.rows, xp)) if q.hides else q
    return as_scalar(kl_rows(p.mapping, p.rows, q.mapping, q.rows, xp))


@check_keywords()
def topk_kl(
    x: ArrayT | Numbers,
    ids: Any,
    teacher_log_p: Any,
    *,
    tail: Tail = "ignore",
    direction: Direction = "forward",
    temperature: Any = None,
    axis: Axes = -1,
    dim: Axes = None,
    mask: Any = None,
) -> ArrayT:
    """The divergence of a student's softmax from a teacher whose k largest log-probabilities are known, `sum t (log t - log p)`.

    Use it for distillation from the top k classes of a teacher. It takes one pass over the scores and one for their gradient, without an
    array of log-probabilities. For the output layer of a language model use `linear_topk_kl`, which computes the scores a part at a time.

    Parameters
    ----------
    x
        The student's scores; -inf masks a class.
    ids
        The teacher's classes, integers with k in place of the number of classes; -1 where a row has fewer.
    teacher_log_p
        The teacher's log-probabilities of these classes, in the shape of ids: natural logarithms, normalised over all
        classes.
    tail
        The treatment of the teacher's other classes: "ignore" leaves them out, and the divergence can then be below 0; "one
        class" merges them into one class, on both sides. A tail that rounding of the log-probabilities can explain (in bf16
        up to .4 % times the entropy of the given ones) counts as empty.
    direction
        "forward" is `sum t (log t - log p)`, which covers the teacher's classes; "reverse" is `sum p (log p - log t)`, which
        draws the student to the teacher's most likely ones. In reverse the teacher's tail is at least its rounding error.
    temperature
        Divides the student's scores: a number above 0, or an array with one value per row. The teacher's log-probabilities
        must be those at this temperature; the result is not multiplied by its square.
    axis, dim
        The axis of the classes, the last by default. Several axes are read as one row, in which ids are indices as after a
        reshape, and k stands last.
    mask
        Boolean, broadcastable to x, True = keep.

    Returns
    -------
    Array
        An array of the kind of x and of its shape without the axis of the classes; fp32 for scores in half precision. +inf
        where the student's probability is 0 for a class of the teacher.

    Examples
    --------
    >>> import numpy as np, anymax
    >>> teacher = np.log([[0.7, 0.2]])
    >>> anymax.topk_kl([[2.0, 0.5, 0.0, 0.0]], [[0, 1]], teacher, tail="one class").round(4)
    array([0.0302])
    """
    who = "topk_kl"
    call, scale = read_scaled(who, _SOFTMAX, x, pick_axis(axis, dim), mask, None, temperature)
    rows = call.rows
    xp, lead, n = namespace(rows), tuple(rows.shape[:-1]), rows.shape[-1]
    teacher = Teacher.read(who, rows, lead, n, call.axis, ids, teacher_log_p, tail, direction, xp)
    log_p, _, log_rest = terms_of(_SOFTMAX, rows, teacher.ids, xp, scale=scale, rest=teacher.needs_rest)
    return teacher.divergence(log_p, log_rest, xp)


# -- reading arguments ---------------------------------------------------------------------------------------------------------


def _classes(who: str, target: Any, rows: Array, xp: Namespace, *, hides: bool) -> tuple[Array, tuple[int, ...]]:
    """The classes [..., m] of each row, and the shape of the result. hides: -1 stands for a class, as in `refuse_strays`."""
    target = _array.beside(target, rows, "target", xp)
    if not is_integer(target):
        raise TypeError(f"{who}: target must be class indices (integers), got {target.dtype}")
    lead, shape = tuple(rows.shape[:-1]), tuple(target.shape)
    first = len(shape) - len(lead)
    if first < 0 or shape[first:] != lead:
        raise ValueError(
            f"{who}: target of shape {shape}: expected one class for each row, of shape {lead}, or with axes of samples before these"
        )
    target = counts(target, xp)
    refuse_strays(f"{who}: target", target, rows.shape[-1], None, xp, hides=hides, pads=True)
    if not first:
        return target[..., None], shape
    target = xp.reshape(target, (math.prod(shape[:first]), *lead))
    return xp.permute_dims(target, (*range(1, target.ndim), 0)), shape


document(globals(), log_prob)
