"""Soft ranks, soft sorting and soft permutations."""

from __future__ import annotations

import math
from typing import Any

from .._array import (
    POSITIVE,
    Array,
    as_dtype,
    check_flag,
    check_number,
    finite_scores,
    floats,
    is_array,
    namespace,
    nan_outside,
    pick_axis,
    poison,
    take,
    upcast,
)
from .._core.mapping import Mapping
from .._core.names import as_mapping
from .._core.options import check_keywords
from .._core.rows import hide, like_scores, prepare_axes
from .._core.shards import refuse as refuse_sharded
from .._core.tables import document
from .._core.typing import ApplyOptions, ArrayT, Axes, Mask, Numbers, Parameter
from ..mappings.ranks import HOW_SOFT, Ranks, Regularization, SoftSorted
from .verbs import apply

_DIRECTION = {"direction": "say descending=True for 'DESCENDING'"}


@check_keywords(_DIRECTION, values="x")
def soft_rank(
    x: ArrayT | Numbers,
    regularization: Regularization = "l2",
    regularization_strength: Parameter = 1.0,
    axis: Axes = -1,
    *,
    descending: bool = False,
    dim: Axes = None,
    mask: Mask = None,
) -> ArrayT:
    """The soft rank of each score, from 1 for the smallest to n for the largest, with a gradient.

    Use it to train by ranks, such as for Spearman's correlation. It is `apply(anymax.Ranks(...), x)`, called as in torchsort; the ranks of
    a row sum to `n (n + 1) / 2`. Blondel, Teboul, Berthet and Djolonga 2020.

    Parameters
    ----------
    regularization
        "l2" (squared distance, and whole ranks once the scores lie the strength apart) or "kl" (relative entropy).
    regularization_strength
        How soft the ranks are, a number above 0, or an array with one value per row; it has a gradient.
    descending
        True gives the rank 1 to the largest score.
    mask
        Booleans that broadcast to x, True = keep. A masked class gets the rank 0, and the others are ranked among themselves.

    Returns
    -------
    Array
        The ranks, an array of the shape, kind and dtype of x; integers become floats, and lists become NumPy arrays.

    Examples
    --------
    >>> anymax.soft_rank([5.0, 1.0, 2.0], regularization_strength=2.0)
    array([3.  , 1.25, 1.75])
    >>> anymax.soft_rank([5.0, 1.0, 2.0], descending=True)
    array([1., 3., 2.])
    """
    refuse_sharded("soft_rank", x)
    descending = check_flag("soft_rank", "descending", descending)
    check_number("soft_rank", "regularization_strength", regularization_strength, POSITIVE, HOW_SOFT)
    mapping = Ranks(regularization_strength, regularization)
    scores, xp = floats(x)
    if descending:
        scores = xp.where(xp.abs(scores) == math.inf, scores, -scores)  # +inf stays what makes a row NaN
    return apply(mapping, scores, axis, dim=dim, mask=mask)


@check_keywords(_DIRECTION, values="x")
def soft_sort(
    x: ArrayT | Numbers,
    regularization: Regularization = "l2",
    regularization_strength: Parameter = 1.0,
    axis: Axes = -1,
    *,
    descending: bool = False,
    dim: Axes = None,
    mask: Mask = None,
) -> ArrayT:
    """The scores in soft order, the smallest first: near the sorted scores, and with a gradient that neighbours share.

    Use it for losses of order statistics, such as a trimmed mean. Scores that lie closer than `1 / regularization_strength` allows stay
    apart; the larger the strength, the more scores are averaged. It is called as in torchsort (Blondel et al. 2020).

    Parameters
    ----------
    regularization_strength
        How soft the order is, a number above 0, or an array with one value per row; it has a gradient.
    descending
        True puts the largest score first.
    mask
        Booleans that broadcast to x, True = keep. The places of masked classes come last, as 0.

    Returns
    -------
    Array
        The scores in soft order, an array of the shape, kind and dtype of x; integers become floats, and lists NumPy arrays.

    Examples
    --------
    >>> anymax.soft_sort([5.0, 1.0, 2.0], regularization_strength=0.1)
    array([1., 2., 5.])
    >>> anymax.soft_sort([5.0, 1.0, 2.0]).round(3)
    array([1.667, 2.667, 3.667])
    """
    refuse_sharded("soft_sort", x)
    return apply(SoftSorted(regularization_strength, regularization, descending), x, axis, dim=dim, mask=mask)


@check_keywords(_DIRECTION, values="x")
def soft_permutation(
    x: ArrayT | Numbers,
    mapping: Mapping | str = "softmax",
    temperature: Parameter = 1.0,
    axis: Axes = -1,
    *,
    descending: bool = False,
    dim: Axes = None,
    mask: Mask = None,
) -> ArrayT:
    """A soft permutation matrix: row i says which score is the i-th in order, `mapping(-|sort(x)_i - x_j| / temperature)`.

    Use it to sort other things by the scores, `soft_permutation(x) @ v`, and for a loss on places. Each row is a distribution of the
    map: softmax has no zeros, sparsemax and entmax choose among few near scores. As the temperature falls it becomes the permutation.
    SoftSort, Prillo and Eisenschlos 2020.

    Parameters
    ----------
    mapping
        The map of each row, such as `anymax.Sparsemax()`, or its name.
    temperature
        How soft the places are, a number above 0, or an array with one value per row; it has a gradient.
    axis, dim
        The axis of the scores, the last one by default. In the result the places are along it, and the scores along a new axis
        after it. Several axes are treated as one, and both are last.
    mask
        Booleans that broadcast to x, True = keep. The columns of masked classes are 0, and so are the rows of the last places.

    Returns
    -------
    Array
        The matrices, [..., n, n] for scores [..., n], an array of the kind and dtype of x.

    Examples
    --------
    >>> anymax.soft_permutation([5.0, 1.0, 2.0], "sparsemax", temperature=0.5)
    array([[0., 1., 0.],
           [0., 0., 1.],
           [1., 0., 0.]])
    """
    refuse_sharded("soft_permutation", x)
    mapping = as_mapping(mapping, "soft_permutation")
    descending = check_flag("soft_permutation", "descending", descending)
    check_number("soft_permutation", "temperature", temperature, POSITIVE, HOW_SOFT)
    call = prepare_axes(mapping, x, pick_axis(axis, dim), mask)
    axis, xp = call.axis, namespace(call.rows)
    z = _distances(
        call.rows, nan_outside(call.parameter(temperature, "soft_permutation: temperature"), POSITIVE), descending
    )
    params = {name: value[..., None, :] if value.ndim else value for name, value in call.mapping.params().items()}
    p = as_dtype(apply(call.mapping.laid_out(**params), z), call.rows.dtype, xp)
    lead = list(range(p.ndim - 2))
    order = (*lead[:axis], p.ndim - 2, p.ndim - 1, *lead[axis:])
    return like_scores(p if axis == len(lead) else xp.permute_dims(p, order), call.scores)


def _distances(rows: Array, temperature: Any, descending: bool) -> Array:
    """`-|sort(x)_i - x_j| / T`, [..., i, j]; -inf where a place or a class is masked."""
    xp = namespace(rows)
    y, keep, poisoned = finite_scores(upcast(rows, xp), xp)
    by = xp.where(keep, -y if descending else y, math.inf * xp.ones_like(y))
    order = xp.argsort(by, axis=-1)
    gap = xp.abs(take(y, order, xp)[..., :, None] - y[..., None, :])
    z = -gap / (temperature[..., None] if is_array(temperature) and temperature.ndim else temperature)
    z = hide(z, keep[..., None, :] & take(keep, order, xp)[..., :, None])
    return poison(z, poisoned[..., None], xp)


document(globals(), soft_rank, ApplyOptions)
