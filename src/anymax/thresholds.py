"""The threshold tau of each row, and two smooth maxima: `logsumexp`, which is the threshold of softmax, and `mellowmax`."""

from __future__ import annotations

import math
from typing import Any, Generic, NamedTuple

from . import _array, kernels
from ._array import (
    Array,
    as_dtype,
    differentiates,
    is_array,
    namespace,
    pick_axis,
    quiet,
    stop_gradient,
    take,
    upcast,
)
from ._core.mapping import Mapping, no_threshold
from ._core.names import as_mapping
from ._core.options import check_keywords
from ._core.rows import Rows, as_one_class, hide, like_scores, prepare_axes
from ._core.shards import rows_over_devices, sharded
from ._core.tables import document, documented_like
from ._core.typing import ApplyOptions, ArrayT, Axes, Mask, Numbers, Parameter
from .autodiff import bridge
from .mappings import Softmax


class Threshold(NamedTuple, Generic[ArrayT]):
    """The result of `threshold`, for each row: tau, and the size of the support, the classes with a probability above 0.

    Parameters
    ----------
    tau
        The threshold, for which `p_i = link(x_i - tau)`.
    support
        The size of the row's support: how many classes have p_i > 0. `anymax.support` says which.

    Examples
    --------
    >>> tau, support = anymax.threshold(anymax.Sparsemax(), [[2.0, 1.5, -1.0], [9.0, 0.0, 0.0]])
    >>> support
    array([2, 1])
    """

    tau: ArrayT
    support: ArrayT


@check_keywords()
def threshold(
    mapping: Mapping | str,
    x: ArrayT | Numbers,
    axis: Axes = -1,
    *,
    dim: Axes = None,
    mask: Mask = None,
    keepdims: bool = False,
    keepdim: bool = False,
) -> Threshold[ArrayT]:
    """The threshold tau of each row, and how many classes have a probability above 0.

    tau determines p, as `p_i = link(x_i - tau)`: the link is exp for softmax (tau is logsumexp), `max(t, 0)` for sparsemax,
    `max((alpha-1) t, 0)^(1/(alpha-1))` for entmax, `min(max(t, 0), 1)` for budget. For normmax and sparse softmax tau is the potential,
    whose gradient is p.

    Parameters
    ----------
    mapping
        A map with a threshold: softmax, sparsemax, entmax, budget, normmax, sparse softmax, or your own.
    mask
        Booleans that broadcast to x, True = keep; tau of a row without classes is -inf.
    keepdims, keepdim
        True to keep the axis of the classes, with size 1.

    Returns
    -------
    Threshold[Array]
        A `Threshold`, the pair (tau, support): tau in the dtype of x, support as integers. tau has a gradient, which for softmax is p,
        and for other separable maps the sensitivity of each class, 1 / omega''(p_i), divided by the sum of these.

    Examples
    --------
    >>> anymax.threshold(anymax.Sparsemax(), [2.0, 1.5, -1.0])
    Threshold(tau=np.float64(1.25), support=np.int64(2))
    """
    mapping = as_mapping(mapping, "threshold")
    if not mapping.has_threshold:
        raise TypeError(no_threshold(mapping))
    axis, keepdims = pick_axis(axis, dim), keepdims or keepdim
    if sharded(x):
        axis = _array.axis_or_all(axis, x.ndim)
        return Threshold(*rows_over_devices("threshold", threshold, mapping, x, axis, mask, keepdims))
    call = prepare_axes(mapping, x, axis, mask, least=0).with_a_class().over_all()
    rows, xp = call.rows, namespace(call.rows)
    p = bridge(rows).apply(call.mapping.frozen(), stop_gradient(rows))
    tau, size = tau_of(call.mapping, rows, xp), _support_size(call.seen(p), xp)
    tau = like_scores(as_dtype(tau, rows.dtype, xp), call.scores)
    return Threshold(call.restore_one(tau, keepdims), call.restore_one(size, keepdims))


_COUNTED = 1 << 20  # entries to count at a time, since torch and NumPy convert them to integers of 8 bytes


def _support_size(p: Array, xp: Any) -> Array:
    """How many entries of each row are above 0, [..., 1]."""
    size, n = math.prod(p.shape), p.shape[-1]
    if size <= 4 * _COUNTED or not _array.known(p):
        return xp.sum(_array.counts(p > 0, xp), axis=-1, keepdims=True)
    p, lead = xp.reshape(p, (-1, n)), p.shape[:-1]
    high, wide = max(1, _COUNTED // n), min(n, _COUNTED)
    parts = [
        sum(_support_size(p[i : i + high, j : j + wide], xp) for j in range(0, n, wide))
        for i in range(0, p.shape[0], high)
    ]
    return xp.reshape(xp.concat(parts), (*lead, 1))


def tau_of(mapping: Mapping, rows: Array, xp: Any) -> Array:
    """tau of rows of scores, [..., 1], single or double, with its derivatives in the scores and the map's parameters."""
    framework = bridge(rows)
    moves = differentiates(rows) or any(differentiates(value) for value in mapping.params().values())
    if moves and mapping.is_softmax:
        tau = logsumexp(upcast(rows, xp), axis=-1, keepdims=True)
        tau = xp.where(tau == -math.inf, stop_gradient(tau), tau)  # a masked row has no derivative
        return _array.poison(tau, tau == math.inf, xp)
    tau = framework.threshold(mapping.frozen(), stop_gradient(rows))
    if not moves:
        return tau
    x = upcast(rows, xp)
    with quiet(rows):
        moving = mapping.moving_threshold(x, framework.apply(mapping, x), xp)
        moving = xp.where(xp.isfinite(moving), moving, xp.zeros_like(moving))  # of a masked row it is -inf, as tau is
        return tau + as_dtype(moving - stop_gradient(moving), tau.dtype, xp)


def tau_and_support(mapping: Mapping, rows: Array, xp: Any, hidden: Array | None = None) -> tuple[Array, Array]:
    """`tau_of`, and how many classes have a probability, [..., 1] each. hidden: the place of a class that does not count, [..., 1]."""
    p = bridge(rows).apply(mapping.frozen(), stop_gradient(rows))
    size = _support_size(p, xp)
    size = size if hidden is None else size - xp.astype(take(p, hidden, xp) > 0, size.dtype)
    return tau_of(mapping, rows, xp), size


@check_keywords()
def logsumexp(
    x: ArrayT | Numbers,
    axis: Axes = -1,
    *,
    dim: Axes = None,
    temperature: Parameter = 1.0,
    mask: Mask = None,
    keepdims: bool = False,
    keepdim: bool = False,
) -> ArrayT:
    """The smooth maximum `T log sum_i exp(x_i / T)` of scores, with the temperature T.

    Use it to normalise log-probabilities, or as a maximum with a gradient, which is softmax(x / T). It exceeds the maximum by at most
    T log n.

    Parameters
    ----------
    temperature
        T, a number of at least 0, or an array with one value per row; 0 gives the maximum itself.
    mask
        Booleans that broadcast to x, True = keep; a row without classes gives -inf.

    Returns
    -------
    Array
        One number for each row, as an array of the kind and dtype of x; for a single row of NumPy a scalar.

    Examples
    --------
    >>> anymax.logsumexp([2.0, 1.0, -1.0]).round(3)
    np.float64(2.349)
    """
    hint = "0 gives the maximum"
    temperature = _array.check_number("logsumexp", "temperature", temperature, _array.AT_LEAST_0, hint)
    axis, keepdims = pick_axis(axis, dim), keepdims or keepdim
    if sharded(x):
        axis = _array.axis_or_all(axis, x.ndim)
        verb = lambda _, rows, **options: logsumexp(rows, **options)  # noqa: E731
        return rows_over_devices("logsumexp", verb, Softmax(), x, axis, mask, keepdims, temperature=temperature)[0]
    if (one := as_one_class(x, axis)) is not None:
        return logsumexp(one, temperature=temperature, mask=mask)
    call = prepare_axes(Softmax(), x, axis, mask, least=0).with_a_class()
    rows, xp = call.rows, namespace(call.rows)
    out = None
    if not is_array(temperature) and temperature == 1 and not _array.differentiates(rows) and not _array.compiling():
        engine = kernels.compiled("threshold", Softmax(), rows)
        out = None if engine is None else engine.logsumexp(rows)
    if out is None:
        with quiet(rows):
            out = _smooth_max(upcast(rows, xp), _temperature(call, temperature), xp)
    return call.restore_one(like_scores(as_dtype(out, rows.dtype, xp), call.scores), keepdims)


def _temperature(call: Rows, temperature: Any) -> Any:
    return _array.nan_outside(call.parameter(temperature, "temperature"), _array.AT_LEAST_0)


def _smooth_max(s: Array, t: Any, xp: Any) -> Array:
    high = _array.top(s, xp)
    tiny = float(xp.finfo(s.dtype).smallest_normal)  # below it 1 / t overflows: return the limit, the maximum
    if not is_array(t) and t < tiny:
        return high
    cold = t < tiny if is_array(t) else None
    t = t if cold is None else _array.safe(t, ~cold, 1.0, xp)
    finite = (high < xp.inf) & (high > -xp.inf)
    anchor = stop_gradient(xp.where(finite, high, xp.zeros_like(high)))
    keep = s > -xp.inf
    _, rest = _array.exp_and_rest(s, xp.where(keep, s - anchor, xp.zeros_like(s)) / t, keep, xp)
    smooth = anchor + t * xp.log1p(rest)
    return xp.where(finite if cold is None else finite & ~cold, smooth, high)


@check_keywords({"temperature": "say omega=, its reciprocal"})
@documented_like(logsumexp)
def mellowmax(
    x: ArrayT | Numbers,
    omega: Parameter = 1.0,
    axis: Axes = -1,
    *,
    dim: Axes = None,
    mask: Mask = None,
    keepdims: bool = False,
    keepdim: bool = False,
) -> ArrayT:
    """The smooth maximum `log(mean_i exp(omega x_i)) / omega` of scores, which lies between their mean and their maximum.

    Use it as the backup of a value in reinforcement learning: unlike `logsumexp` it is a mean of equal scores, and a non-expansion. Its
    gradient is softmax(omega x). Asadi and Littman 2017.

    Parameters
    ----------
    omega
        A number, or an array with one value per row. A large one gives the maximum, 0 the mean, and a negative one a smooth minimum.
    mask
        Booleans that broadcast to x, True = keep; the mean is over the classes that are kept. A row without classes gives -inf.

    Examples
    --------
    >>> from anymax.thresholds import mellowmax
    >>> [float(mellowmax([3.0, 1.0], omega).round(3)) for omega in (0.0, 1.0, 100.0)]
    [2.0, 2.434, 2.993]
    >>> float(mellowmax([2.0, 2.0]))
    2.0
    """
    omega = _array.check_number("mellowmax", "omega", omega, _array.NOT_NAN, "0 gives the mean")
    axis, keepdims = pick_axis(axis, dim), keepdims or keepdim
    if sharded(x):
        axis = _array.axis_or_all(axis, x.ndim)
        verb = lambda _, rows, **options: mellowmax(rows, **options)  # noqa: E731
        return rows_over_devices("mellowmax", verb, Softmax(), x, axis, mask, keepdims, omega=omega)[0]
    call = prepare_axes(Softmax(), x, axis, mask, least=0).with_a_class()
    rows, xp = call.rows, namespace(call.rows)
    with quiet(rows):
        out = _mellow(upcast(rows, xp), call.parameter(omega, "omega"), xp)
    return call.restore_one(like_scores(as_dtype(out, rows.dtype, xp), call.scores), keepdims)


def _mellow(s: Array, omega: Any, xp: Any) -> Array:
    y, keep, poisoned = _array.finite_scores(s, xp)
    count = _array.total(xp.astype(keep, s.dtype), xp)
    one = xp.ones_like(count)
    count = xp.where(count > 0, count, one)
    omega = omega * one
    sign = xp.where(omega < 0, -one, one)  # a smooth minimum is minus a smooth maximum of -x
    y, w = sign * y, sign * omega
    high = _array.top(hide(stop_gradient(y), keep), xp)
    anchor = xp.where(high > -math.inf, high, xp.zeros_like(high))
    below = xp.where(keep, y - anchor, xp.zeros_like(y))
    # if the exponents are small, log(mean exp) would lose what is left after the division by omega
    near = ~(w * -xp.min(stop_gradient(below), axis=-1, keepdims=True) > 1.0)
    v, d = _array.safe(w, near, 0.0, xp), _array.safe(below, near, 0.0, xp)
    mean = _array.total(xp.where(keep, _array.expm1_over(v, d, xp), xp.zeros_like(d)), xp) / count
    t = 1.0 / _array.safe(w, ~near, 1.0, xp)
    far = _smooth_max(hide(_array.safe(below, ~near, 0.0, xp), keep), t, xp) - t * xp.log(count)
    out = sign * (anchor + xp.where(near, _array.log1p_over(v, mean, xp), far))
    return xp.where(poisoned | (high == -math.inf), _array.top(s, xp), out)


document(globals(), threshold, ApplyOptions)
