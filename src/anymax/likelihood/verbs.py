"""The distribution that a map makes of scores: log p of given classes, entropy, and divergences, for policies, decoders and distillation.

No array of log-probabilities is made for softmax, forward or backward. What has no probability is -inf, with a gradient that is a number:
that of the map's loss, `e_y - p` for the class y. An entropy's derivative is exact where p is 0.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from .. import _array
from .._array import (
    Array,
    Namespace,
    counts,
    eager,
    is_floating,
    is_integer,
    is_torch,
    known,
    known_any,
    namespace,
    pick_axis,
    quiet,
    stop_gradient,
    to_last,
    total,
)
from .._core.mapping import Mapping
from .._core.names import as_mapping
from .._core.rows import hide
from .._core.shards import over_devices, sharded
from .._core.typing import ArrayT, Axes, Numbers
from ..mappings import Softmax
from .softmax_plain import named
from .terms import check_classes, divergences, kl_rows, read, terms_of

_SOFTMAX = Softmax()


def log_prob(
    mapping: Mapping,
    x: ArrayT | Numbers,
    y: Any,
    *,
    support: Any = None,
    transform: Any = None,
    temperature: Any = None,
    axis: Axes = None,
    dim: Axes = None,
    mask: Any = None,
) -> ArrayT:
    """log p of given classes, for any map, after any transforms of the scores.

    For a policy's actions and a language model's tokens: the one number a row that a ratio of importance needs. A trainer that
    restricts itself to what its sampler kept gives `support`, or the sampler's own `transform`.

    mapping: the map, such as `Softmax()`.
    x: the scores; -inf masks a class.
    y: the classes, integers of the shape of x without the axis of the classes, or with more axes before these, as
        `sample(num_samples=...)` gives them. -1, which is what `sample` gives where a row has no class, has log p 0 and no gradient,
        so that padding adds nothing to a sum. (`sample` itself gives -inf there: leave the row out of a ratio of the two.)
    support: the classes of each row that count, as `(ids, offsets)`: those of row i, in C order, are
        `ids[offsets[i]:offsets[i + 1]]`, as vLLM and `sample(return_support=True)` give them. All others are masked.
    transform: what the scores go through first: one of `anymax.transforms`, several in `compose(...)`, or a function of your own.
        Those of `anymax.transforms` go along `axis`, whichever it is.
    temperature: divides the scores, before the transform: a number of at least 0, or an array of them, one a row.
    axis: the axis of the classes, the last by default; `dim` is another name of it. Several axes are one row, and y counts along them as
        a reshape would.
    mask: boolean, broadcastable to x, True = keep; before the transforms.

    Returns an array of the kind of x and of the shape of y; fp32 for scores of half precision. -inf where p is 0: its gradient is that of
    the map's loss, `e_y - p` (0 for a class that is masked), so that it leads back to the support. NaN in a row with NaN or +inf.
    A map whose probabilities sum to k (`Budget`) is divided by it, as `sample` draws.

    >>> import anymax
    >>> anymax.log_prob(anymax.Sparsemax(), [[1.0, 0.5, -2.0], [0.0, 0.0, 3.0]], [1, 0]).round(3)
    array([-1.386,    -inf])
    """
    return _log_prob("log_prob", mapping, x, y, support, transform, temperature, pick_axis(axis, dim), mask, False)[0]


def log_prob_entropy(
    mapping: Mapping,
    x: ArrayT | Numbers,
    y: Any,
    *,
    support: Any = None,
    transform: Any = None,
    temperature: Any = None,
    axis: Axes = None,
    dim: Axes = None,
    mask: Any = None,
) -> tuple[ArrayT, ArrayT]:
    """log p of given classes and the entropy of each row, made together, as is the gradient of both.

    For a policy's loss with an entropy bonus. For softmax on torch the forward pass makes no array of the size of the scores, and the
    backward pass one, the gradient.

    mapping, x, y, support, transform, temperature, axis, dim, mask: as for `log_prob`.

    Returns (log_prob, entropy): log_prob as `log_prob` gives it, entropy `-sum p log p` of the shape of x without the axis of the classes,
    over the classes that are left. Its gradient is exact where p is 0, and it is 0 for a row without classes.

    >>> import anymax
    >>> log_p, h = anymax.log_prob_entropy(anymax.Softmax(), [[0.0, 0.0, -float("inf")]], [0])
    >>> log_p.round(3), h.round(3)
    (array([-0.693]), array([0.693]))
    """
    who = "log_prob_entropy"
    log_p, h = _log_prob(who, mapping, x, y, support, transform, temperature, pick_axis(axis, dim), mask, True)
    return log_p, h


def _log_prob(
    who: str, mapping: Mapping, x: Any, y: Any, support: Any, transform: Any, temperature: Any, axis: Any, mask: Any,
    entropy: bool,
) -> tuple[Any, Any]:  # fmt: skip
    if sharded(x):
        return _on_devices(who, mapping, x, y, support, transform, temperature, axis, mask)
    rows, mapping, scale = read(who, mapping, x, transform, temperature, axis, mask)
    xp = namespace(rows)
    index, shape = _classes(who, y, rows, xp)
    if support is not None:
        mapping, rows, index = _supported(who, mapping, rows, index, support, xp)
    log_p, h, _ = terms_of(mapping, rows, index, xp, scale=scale, entropy=entropy)
    last = log_p.ndim - 1
    log_p = (
        log_p[..., 0] if log_p.shape[-1] == 1 and len(shape) == last else xp.permute_dims(log_p, (last, *range(last)))
    )
    return xp.reshape(log_p, shape), None if h is None else h[..., 0]


def _on_devices(
    who: str, mapping: Any, x: Any, y: Any, support: Any, transform: Any, temperature: Any, axis: Any, mask: Any
) -> tuple[Any, Any]:
    """Of a DTensor, where nothing but the map comes between scores and probabilities."""
    if support is not None or transform is not None or temperature is not None:
        raise TypeError(f"{who}: a DTensor goes without support, transform and temperature; change the scores first")
    whole = lambda m, x, **given: log_prob_entropy(m, x, axis=axis, **given)  # noqa: E731
    log_p, h = over_devices().of_rows("log_prob_entropy", whole, as_mapping(mapping, who), x, axis, mask, y=y)
    return log_p, h


def kl(
    mapping_p: Mapping,
    x: ArrayT | Numbers,
    mapping_q: Mapping,
    y: Any,
    *,
    axis: Axes = None,
    dim: Axes = None,
    mask: Any = None,
) -> ArrayT:
    """The divergence of Kullback and Leibler between two distributions, `sum_i p_i (log p_i - log q_i)`, each of a map of its own.

    For distillation and for the distance of a policy from a reference; both sides have their gradients. With a teacher that gives its
    largest log-probabilities only, `topk_kl`.

    mapping_p: the map of the first scores, such as `Softmax()`.
    x: the first scores; -inf masks a class.
    mapping_q: the map of the second scores.
    y: the second scores, of the shape of x.
    axis: the axis of the classes, the last by default, or several that are one row; `dim` is another name of it.
    mask: boolean, broadcastable to x, True = keep, for both.

    Returns an array of the kind of x and of its shape without the axis of the classes; fp32 for scores of half precision. +inf where p has
    a class that q has not, with a gradient that is a number (that of `log_prob`); 0 for a row without classes.

    >>> import anymax
    >>> x = [[1.0, 0.8, -3.0]]
    >>> anymax.likelihood.kl(anymax.Sparsemax(), x, anymax.Softmax(), x).round(3)
    array([0.015])
    >>> anymax.likelihood.kl(anymax.Softmax(), x, anymax.Sparsemax(), x)
    array([inf])
    """
    axis = pick_axis(axis, dim)
    rows, mapping_p, _ = read("kl", mapping_p, x, None, None, axis, mask)
    xp = namespace(rows)
    others, mapping_q, _ = read("kl", mapping_q, _array.beside(y, rows, "y", xp), None, None, axis, mask)
    if tuple(rows.shape) != tuple(others.shape):
        raise ValueError(
            f"kl: the two scores must have one shape, got {tuple(rows.shape)} and {tuple(others.shape)} (classes last)"
        )
    return kl_rows(mapping_p, rows, mapping_q, others, xp)


def topk_kl(
    x: ArrayT | Numbers,
    ids: Any,
    teacher_log_p: Any,
    *,
    tail: Literal["ignore", "one class"] = "ignore",
    temperature: Any = None,
    axis: int | None = None,
    dim: int | None = None,
    mask: Any = None,
) -> ArrayT:
    """The divergence of a student's softmax from a teacher whose k largest log-probabilities are known, `sum t (log t - log p)`.

    For distillation from a teacher's top k, saved or asked for. One pass over the scores and one for their gradient, without an array of
    log-probabilities.

    x: the student's scores; -inf masks a class.
    ids: the teacher's classes, integers with k in the place of the axis of the classes; -1 where a row has fewer.
    teacher_log_p: the teacher's log-probabilities of these, of the shape of ids, natural logarithms, as they are among all classes.
    tail: what becomes of the teacher's other classes: "ignore" leaves them out, and the divergence may then be below 0; "one class" takes
        them together as one, on both sides. What the rounding of the log-probabilities can explain (in bf16 up to .4 % times the entropy of
        those given) counts as none.
    temperature: divides the student's scores: a number above 0, or an array of them, one a row. The teacher's log-probabilities are to
        be those at this temperature; nothing is multiplied by its square.
    axis: the axis of the classes, the last by default; `dim` is another name of it.
    mask: boolean, broadcastable to x, True = keep.

    Returns an array of the kind of x and of its shape without the axis of the classes; fp32 for scores of half precision. +inf where the
    teacher has a class that the student has not.

    >>> import numpy as np, anymax
    >>> teacher = np.log([[0.7, 0.2]])
    >>> anymax.topk_kl([[2.0, 0.5, 0.0, 0.0]], [[0, 1]], teacher, tail="one class").round(4)
    array([0.0302])
    """
    if tail not in ("ignore", "one class"):
        raise ValueError(f"topk_kl: tail must be 'ignore' or 'one class', got {tail!r}")
    axis = pick_axis(axis, dim)
    rows, _, scale = read("topk_kl", _SOFTMAX, x, None, temperature, axis, mask)
    xp = namespace(rows)
    ids, t = (_array.beside(a, rows, name, xp) for a, name in ((ids, "ids"), (teacher_log_p, "teacher_log_p")))
    if not is_integer(ids) or not is_floating(t):
        raise TypeError(
            f"topk_kl: ids must be integers, the teacher's classes, and teacher_log_p floating-point numbers, got {ids.dtype} and {t.dtype}"
        )
    axis = _array.check_axis(axis, rows.ndim)
    if tuple(ids.shape) != tuple(t.shape) or ids.ndim != rows.ndim or not ids.shape[axis]:
        raise ValueError(
            f"topk_kl: ids and teacher_log_p must have one shape, that of the scores with k in the place of the classes; got "
            f"{tuple(ids.shape)} and {tuple(t.shape)}"
        )
    ids, t = counts(to_last(ids, axis, xp), xp), to_last(t, axis, xp)
    if tuple(ids.shape[:-1]) != tuple(rows.shape[:-1]):
        raise ValueError(
            f"topk_kl: ids of shape {tuple(ids.shape)} (k last) does not belong to scores of shape {tuple(rows.shape)} (classes last)"
        )
    check_classes("topk_kl: ids", ids, rows.shape[-1], xp)
    _check_twice(ids, xp)
    rest = tail == "one class"
    log_p, _, log_rest = terms_of(_SOFTMAX, rows, ids, xp, scale=scale, rest=rest)
    given = t.dtype
    with quiet(rows):
        t = t if t.dtype == log_p.dtype else xp.astype(t, log_p.dtype)
        t = xp.where(ids < 0, -math.inf * xp.ones_like(t), t)
        sums, noise = total(xp.exp(t), xp), _noise_of_sum(t, given, xp)
        if known_any((t > 1e-3) | (sums > 1.01 + noise), xp):
            raise ValueError(
                "teacher_log_p: expected log-probabilities, at most 0, whose exponentials sum to at most 1 in each row; the largest sum is "
                f"{float(xp.max(stop_gradient(sums))):g}"
            )
        value = total(divergences(t, log_p, xp), xp)
        if log_rest is not None:  # a teacher that names all has no other classes
            left = xp.where(sums < 1.0 - noise, 1.0 - sums, xp.zeros_like(sums))
            value = value + divergences(_array.log(left, xp), log_rest, xp)
    return value[..., 0]


# -- what the user says --------------------------------------------------------------------------------------------------------


def _classes(who: str, y: Any, rows: Array, xp: Namespace) -> tuple[Array, tuple[int, ...]]:
    """Classes [..., m] of each row, and the shape that the answer shall have."""
    y = _array.beside(y, rows, "y", xp)
    if not is_integer(y):
        raise TypeError(f"{who}: y must be class indices (integers), got {y.dtype}")
    lead, shape = tuple(rows.shape[:-1]), tuple(y.shape)
    first = len(shape) - len(lead)
    if first < 0 or shape[first:] != lead:
        raise ValueError(
            f"{who}: y of shape {shape}: expected one class for each row, of shape {lead}, or with axes of samples before these"
        )
    y = counts(y, xp)
    check_classes(f"{who}: y", y, rows.shape[-1], xp)
    if not first:
        return y[..., None], shape
    y = xp.reshape(y, (math.prod(shape[:first]), *lead))
    return xp.permute_dims(y, (*range(1, y.ndim), 0)), shape


def _noise_of_sum(log_p: Array, given: Any, xp: Namespace) -> Array:
    """How far the sum of p [..., m] can be off by rounding, where log p was given in the dtype `given`: p log p is the slope of p in the
    relative error of log p, half an eps."""
    log_p = stop_gradient(log_p)
    eps = float(xp.finfo(log_p.dtype).eps)
    given_eps = max(eps, float(xp.finfo(given).eps))
    return (
        0.5 * given_eps * -total(xp.where(log_p > -math.inf, xp.exp(log_p) * log_p, xp.zeros_like(log_p)), xp)
        + 16.0 * eps
    )


def _check_twice(ids: Array, xp: Namespace) -> None:
    if not known(ids) or ids.shape[-1] < 2 or not math.prod(ids.shape):
        return
    ordered = xp.sort(ids, axis=-1)
    if known_any((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0), xp):
        raise ValueError("ids: a row names a class twice; give each class once, and -1 where a row has fewer")


def _supported(
    who: str, mapping: Mapping, rows: Array, index: Array, support: Any, xp: Namespace
) -> tuple[Mapping, Array, Array]:
    """The scores of each row's support side by side, with a masked class at the end for all that are not in it; places of the classes."""
    *lead, n = rows.shape
    ids, offsets = support_of(who, rows, math.prod(lead), n, support, xp)
    if not eager(ids) or any(v.ndim and v.shape[-1] != 1 for v in mapping.params().values()):
        return mapping, hide(rows, _member(ids, offsets, tuple(rows.shape), xp)), index
    kept, there, spot = places_of(who, tuple(lead), n, index, ids, offsets, xp)
    scores = _array.take(rows, kept, xp)
    return mapping, xp.where(there, scores, -math.inf * xp.ones_like(scores)), spot


def support_of(who: str, rows: Array, count: int, n: int, support: Any, xp: Namespace) -> tuple[Array, Array]:
    """The ids and the offsets of a support of `count` rows of n classes, as arrays of the kind of `rows`."""
    if not isinstance(support, (tuple, list)) or len(support) != 2:
        raise TypeError(
            f"{who}: support must be (ids, offsets), as sample(return_support=True) gives it, got {type(support).__name__}"
        )
    ids, offsets = (_array.beside(a, rows, name, xp) for a, name in zip(support, ("support: ids", "support: offsets")))
    if not (is_integer(ids) and is_integer(offsets)) or ids.ndim != 1 or tuple(offsets.shape) != (count + 1,):
        raise ValueError(
            f"{who}: support must be ids, one axis of class indices (integers), and offsets, {count + 1} integers for {count} rows; got "
            f"{ids.dtype} {tuple(ids.shape)} and {offsets.dtype} {tuple(offsets.shape)}"
        )
    ids, offsets = counts(ids, xp), counts(offsets, xp)
    size = offsets[1:] - offsets[:-1]
    if known(offsets) and known(ids):
        if int(offsets[0]) or int(offsets[-1]) != ids.shape[0] or bool(xp.any(size < 0)):
            raise ValueError(f"{who}: support: offsets must rise from 0 to {ids.shape[0]}, the number of ids")
        if known_any((ids < 0) | (ids >= n), xp):
            raise IndexError(
                f"{who}: support: ids must be from 0 to {n - 1}, got {int(xp.min(ids))} to {int(xp.max(ids))}"
            )
    return ids, offsets


def places_of(
    who: str, lead: tuple[int, ...], n: int, index: Array, ids: Array, offsets: Array, xp: Namespace
) -> tuple[Array, Array, Array]:
    """The classes of each row's support side by side, [..., width + 1]; whether there is one; the places of classes [..., m] among them.

    The last is none, and the place of a class that is not in the support."""
    size, count = offsets[1:] - offsets[:-1], math.prod(lead)
    wide = int(xp.max(size)) if count else 0
    place = {"device": ids.device} if is_torch(ids) else {}
    step = xp.reshape(xp.arange(wide + 1, dtype=ids.dtype, **place), (1, wide + 1))
    there = step < size[:, None]
    at = xp.where(there, offsets[:-1][:, None] + step, xp.zeros_like(step))
    kept = xp.take(ids, xp.reshape(at, (-1,)), axis=0) if ids.shape[0] else xp.zeros_like(at)
    shape = (*lead, wide + 1)
    kept, there = xp.reshape(kept, shape), xp.reshape(there, shape)
    if wide > 1:
        ordered = xp.sort(xp.where(there, kept, n + step), axis=-1)
        if known_any(ordered[..., 1:] == ordered[..., :-1], xp):
            raise ValueError(f"{who}: support: a row has a class twice")
    # the place of each class asked for; `wide`, where nothing is, for one that is not there
    hit = (xp.expand_dims(kept, axis=-2) == xp.expand_dims(index, axis=-1)) & xp.expand_dims(there, axis=-2)
    spot = xp.sum(
        xp.where(hit, xp.reshape(step, (1,) * len(lead) + (1, wide + 1)), xp.zeros_like(kept[..., None, :])), axis=-1
    )
    found = xp.where(xp.any(hit, axis=-1), spot, wide * xp.ones_like(index))
    stray = xp.where(index < 0, index, (wide + 1) * xp.ones_like(index))
    return kept, there, xp.where((index < 0) | (index >= n), stray, found)


def _member(ids: Array, offsets: Array, shape: tuple[int, ...], xp: Namespace) -> Array:
    """The support as a mask of the rows, where shapes may not depend on values."""
    *lead, n = shape
    count = math.prod(lead)
    place = {"device": ids.device} if is_torch(ids) else {}
    row = xp.searchsorted(offsets[1:], xp.arange(ids.shape[0], dtype=ids.dtype, **place), side="right")
    flat = xp.reshape(row * n + ids, (1, -1))
    like = xp.zeros((1, count * n), **place)
    return xp.reshape(named(xp.astype(flat, ids.dtype), like, xp), shape)
