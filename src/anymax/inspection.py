"""What a map is and gives: its Jacobian, entropy, support and facts."""

from __future__ import annotations

import math
import warnings
from typing import Any, overload

import numpy as np

from . import _array
from ._array import (
    Array,
    Namespace,
    as_dtype,
    as_scalar,
    device_of,
    floating,
    floats,
    is_array,
    known_any,
    namespace,
    pick_axis,
    quiet,
    shown,
    total,
    upcast,
)
from ._core.axes import on_one_axis
from ._core.facts import Facts
from ._core.mapping import Mapping
from ._core.names import as_mapping
from ._core.options import check_keywords
from ._core.rows import prepare_axes
from ._core.shards import refuse as refuse_sharded
from ._core.tables import document
from ._core.typing import AnyArray, ApplyOptions, ArrayT, Axes, Entropy, Mask, Numbers, Parameter
from .autodiff import bridge
from .mappings.entmax import tsallis_terms


@check_keywords()
def jacobian(
    mapping: Mapping | str, x: ArrayT | Numbers, axis: Axes = -1, *, dim: Axes = None, mask: Mask = None
) -> ArrayT:
    """The derivatives dp_i / dx_j of a map, for every row, from the map's own formula.

    Use it to see how each probability depends on each score. To train, let torch or JAX differentiate `apply`, which never forms the
    matrix.

    Parameters
    ----------
    mask
        Booleans that broadcast to x, True = keep; the rows and columns of masked classes are 0.

    Returns
    -------
    Array
        An array of shape [..., n, n], of the kind and dtype of x, with the axes i and j last. Several axes are one row of n
        classes, in C order.

    Examples
    --------
    >>> anymax.jacobian(anymax.Sparsemax(), [2.0, 1.5, -1.0])
    array([[ 0.5, -0.5,  0. ],
           [-0.5,  0.5,  0. ],
           [ 0. ,  0. ,  0. ]])
    """
    refuse_sharded("jacobian", x)
    call = prepare_axes(as_mapping(mapping, "jacobian"), x, pick_axis(axis, dim), mask, least=0)
    rows, xp = call.rows, namespace(call.rows)
    if not rows.shape[-1]:
        return xp.zeros((*rows.shape[:-1], 0, 0), dtype=rows.dtype, **device_of(rows))
    s, mapping, n = upcast(rows, xp), call.mapping, rows.shape[-1]
    over_all = call.over_all(s)
    p = over_all.seen(bridge(s).apply(over_all.mapping, over_all.rows))
    eye = xp.eye(n, dtype=s.dtype, **device_of(s))
    wide = xp.broadcast_to(s[..., None, :], (*s.shape[:-1], n, n))
    p = xp.broadcast_to(p[..., None, :], (*s.shape[:-1], n, n))
    params = {k: v[..., None, :] if is_array(v) and v.ndim else v for k, v in mapping.params().items()}
    with quiet(s):
        out = mapping.laid_out(**params).vjp(wide, p, xp.broadcast_to(eye, wide.shape), xp) + 0.0  # no -0
    return as_dtype(out, rows.dtype, xp)


@check_keywords()
def jacobian_norm(
    mapping: Mapping | str, x: ArrayT | Numbers, axis: Axes = -1, *, dim: Axes = None, mask: Mask = None
) -> ArrayT:
    """Half the sum of |dp_i / dx_j| over i and j, for every row: how much of a gradient passes through the map.

    Use it to find rows where training stalls: for softmax it is `1 - sum p_i^2`, which goes to 0 as one probability goes to 1.

    Returns
    -------
    Array
        One number for each row, as an array of the kind and dtype of x.

    Examples
    --------
    >>> anymax.inspection.jacobian_norm(anymax.Softmax(), [[0.0, 0.0], [4.0, 0.0]]).round(3)
    array([0.5  , 0.035])
    """
    refuse_sharded("jacobian_norm", x)
    j = jacobian(mapping, x, axis, dim=dim, mask=mask)
    xp = namespace(j)
    return 0.5 * xp.sum(xp.abs(j), axis=(-2, -1))


@check_keywords()
def entropy(
    p: ArrayT | Numbers,
    kind: Entropy = "shannon",
    alpha: Parameter | None = None,
    *,
    axis: Axes = -1,
    dim: Axes = None,
) -> ArrayT:
    """The entropy of distributions, by Shannon, Renyi or Tsallis, in natural units; 0 log 0 is 0.

    Use it to see how sure a model is; for scores, apply a map first.

    Parameters
    ----------
    p
        Probabilities, an array of NumPy, torch or JAX, or lists of numbers. Unlike in SciPy, they are not divided by their
        sum, since some maps do not sum to 1. A number below 0 or above 1 is an error, except on a GPU and in compiled
        code, which do not check; a row whose sum is not a whole number gives a warning.
    kind
        "shannon", `-sum p log p`; "renyi", `log(sum p^alpha) / (1 - alpha)`; "renyi2", Renyi's with alpha = 2; or
        "tsallis", `(1 - sum p^alpha) / (alpha (alpha - 1))`, the entropy of entmax: Shannon's at alpha = 1, half of Gini's
        at 2.
    alpha
        The order of "renyi" (2 by default) and "tsallis" (1.5), a number above 0 or an array with one value per row.

    Returns
    -------
    Array
        One number for each distribution, as an array of the kind and dtype of p.

    Examples
    --------
    >>> anymax.entropy([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]).round(4)
    array([0.6931, 0.    ])
    """
    (array, xp), order = _probabilities("entropy", p), _order(kind, _array.number(alpha))
    array, axis = on_one_axis(array, pick_axis(axis, dim))
    q = upcast(_array.to_last(array, axis, xp), xp)
    with quiet(q):
        _refuse_scores("entropy", q, xp)
        _warn_of_scores(q, xp)
        h = _tsallis(q, order, xp) if kind == "tsallis" else _renyi(q, order, xp)
        h = xp.where(xp.any(xp.isnan(q), axis=-1, keepdims=True), math.nan * xp.ones_like(h), h)
    h = xp.squeeze(h, axis=-1) + 0.0  # no -0
    return as_scalar(as_dtype(h, array.dtype, xp))


def _refuse_scores(who: str, q: Array, xp: Namespace) -> None:
    """An error if a number is no probability: it is probably a score."""
    if known_any((q < -1e-3) | (q > 1.01), xp):
        raise ValueError(
            f"{who}: expected probabilities, from 0 to 1, got numbers from {float(xp.min(q)):g} to {float(xp.max(q)):g}; for scores, "
            f"apply a map first: anymax.{who}(anymax.apply(mapping, x)). Outputs that may pass 1, as of Elementwise and Ranks, are none"
        )


def _warn_of_scores(q: Array, xp: Namespace) -> None:
    """Warn if a row sums neither to 1 nor, as those of `Budget(k)`, to another whole number: scores may lie between 0 and 1 too."""
    mass = total(q, xp)
    if known_any(xp.abs(mass - xp.round(mass)) > 0.02, xp):
        warnings.warn(
            "entropy: a row does not sum to 1; for scores, apply a map first: anymax.entropy(anymax.softmax(x))",
            stacklevel=4,  # the caller of `entropy`, which is decorated
        )


_ORDERS = {"shannon": 1.0, "renyi": 2.0, "renyi2": 2.0, "tsallis": 1.5}  # by default


def _order(kind: Any, alpha: Any) -> Any:
    """The order of an entropy, checked."""
    if not isinstance(kind, str) or kind not in _ORDERS:
        hint = f"; did you mean axis={kind}?" if type(kind) is int else ""
        raise ValueError(f"entropy: kind must be one of {', '.join(sorted(_ORDERS))}, got {shown(kind)}{hint}")
    if alpha is None:
        return _ORDERS[kind]
    if kind in ("shannon", "renyi2"):
        raise TypeError(f"entropy: {kind!r} takes no alpha; use 'renyi' or 'tsallis'")
    alpha = _array.check_number("entropy", "alpha", alpha, _array.POSITIVE, "the order of the entropy")
    return _array.nan_outside(alpha, _array.POSITIVE)


def _shannon(q: Array, xp: Namespace) -> Array:
    return -total(_array.xlogx(q, xp), xp)


def _renyi(q: Array, order: Any, xp: Namespace) -> Array:
    if not is_array(order) and order == 1:
        return _shannon(q, xp)
    h = xp.log(total(_array.power(q, order, xp), xp)) / (1.0 - order)
    return xp.where(order == 1, _shannon(q, xp), h) if is_array(order) else h


def _tsallis(q: Array, order: Any, xp: Namespace) -> Array:
    if not is_array(order) and order == 1:
        return _shannon(q, xp)
    return -total(tsallis_terms(q, order, xp), xp)


@overload
def support(p: np.ndarray[Any, Any] | Numbers) -> np.ndarray[Any, np.dtype[np.bool_]]: ...
@overload
def support(p: ArrayT) -> ArrayT: ...
@check_keywords({"": "for scores write anymax.support(anymax.apply(mapping, x))"})
def support(p: Any) -> Any:
    """The support of each row, its classes with a probability above 0, as a mask.

    Use it to see which classes a sparse map keeps; `threshold` counts them, and `sample(return_support=True)` lists them.

    Parameters
    ----------
    p
        Probabilities, an array of NumPy, torch or JAX, or lists of numbers. A number below 0 or above 1 is an error, except
        on a GPU and in compiled code, which do not check.

    Returns
    -------
    Any
        An array of booleans, with the shape and kind of p.

    Examples
    --------
    >>> anymax.support(anymax.sparsemax([2.0, 1.5, -1.0]))
    array([ True,  True, False])
    """
    p, xp = _probabilities("support", p)
    with quiet(p):
        _refuse_scores("support", p, xp)
    return p > 0


def _probabilities(who: str, p: Any) -> tuple[Array, Namespace]:
    if isinstance(p, (Mapping, str)):
        raise TypeError(
            f"{who}: expected probabilities, got {p!r}; a map gives them: anymax.{who}(anymax.apply({p!r}, x))"
        )
    return floats(p, "p")


@check_keywords()
def facts(mapping: Mapping | str) -> Facts:
    """The properties of a map: whether it is monotone, shift-invariant and sparse, and whether it has a Fenchel-Young loss, and its margin.

    Use it to choose between maps, and in code that takes any map. The tests check each property numerically; `check_mapping` does so for
    your own map.

    Parameters
    ----------
    mapping
        The map, such as `anymax.Sparsemax()`, or its name.

    Returns
    -------
    Facts
        An `anymax.Facts`; its docstring explains each entry.

    Examples
    --------
    >>> anymax.facts(anymax.Sparsemax()).margin
    1.0
    """
    return as_mapping(mapping, "facts").facts


@overload
def logit_gap(loss: float, n: int) -> float: ...
@overload
def logit_gap(loss: ArrayT, n: int) -> ArrayT: ...
def logit_gap(loss: float | AnyArray, n: int) -> Any:
    """The smallest `max x - min x` for which the cross-entropy over n classes can be `loss`: `log(n-1) - log(exp(loss) - 1)`.

    Use it to see how far apart the scores of softmax must be. The gap grows with log n, which invites overfitting with many classes;
    sparse maps reach the loss 0 at a fixed gap, their margin (see `facts`).

    Parameters
    ----------
    loss
        The cross-entropy to reach, a number above 0 or an array.
    n
        The number of classes, at least 2.

    Returns
    -------
    Any
        The gap, a number for a number, and an array of the same kind for an array.

    Examples
    --------
    >>> round(anymax.logit_gap(0.01, 50_000), 2)
    15.42
    """
    n, value = _array.number(n), _array.number(loss)
    if not _array.is_int(n) or n < 2:
        raise ValueError(f"logit_gap: n must be an integer of at least 2, the number of classes, got {n!r}")
    if not is_array(value):
        _array.check_scalar("logit_gap: loss", value, lambda v: v > 0, "a positive number")
        # log(exp(l) - 1) = l + log(1 - exp(-l)), which does not overflow
        return math.log(n - 1) - value - math.log(-math.expm1(-value))
    xp = namespace(value)
    value = floating(value, xp, "loss")
    with quiet(value):
        return math.log(n - 1) - value - xp.log(-xp.expm1(-value))


document(globals(), jacobian, ApplyOptions)
