"""`top`: the k most probable classes of each row and their probabilities, without the rest of the row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .. import _array
from .._array import (
    Array,
    Namespace,
    counts,
    from_last,
    is_integer,
    namespace,
    pick_axis,
    poison,
    stop_gradient,
    upcast,
)
from .._core.classes import known_index
from .._core.mapping import Mapping
from .._core.names import as_mapping
from .._core.options import check_keywords
from .._core.rows import prepare_axes
from .._core.shards import refuse as refuse_sharded
from .._core.tables import document
from .._core.typing import AnyArray, Axes, Numbers
from .._random.draws import at, check_k
from ..autodiff import bridge
from ..kernels.selection import chosen
from ..transforms.applying import transformed
from .results import Invalid, SampleOptions, check_invalid, validated


class Top(NamedTuple):
    """k classes of each row and their probabilities; -1 and 0 where a row has fewer, -1 and NaN in a row with NaN or +inf."""

    index: Any
    p: Any


@check_keywords(logits="x")
def top(
    mapping: Mapping | str,
    x: AnyArray | Numbers,
    k: int | None = None,
    transform: Callable[[Any], Any] | None = None,
    *,
    index: Any = None,
    axis: Axes = -1,
    dim: Axes = None,
    mask: Any = None,
    invalid: Invalid = None,
) -> Top:
    """The k most probable classes of each row and their probabilities, compact and differentiable.

    For routers, retrieval and reports: `torch.topk(anymax.apply(mapping, x), k)` in one call, without a sort of the row, and with the same
    classes in every framework and dtype. The probabilities are those that `apply` gives; they are not divided by their sum, which
    `anymax.routing.route` does.

    Parameters
    ----------
    k
        How many classes to return, from 1 to the number of classes.
    index
        Classes to return instead, integers with any number of them in the place of the classes, -1 for none: the choice of an
        earlier call, to get its probabilities, and their gradient, for other scores. A class may be masked; its p is 0.

    Returns
    -------
    Top
        A named tuple (index, p), both with k in the place of the number of classes. The largest score comes first, and among equal
        ones the one with the smaller index; half precision is compared in fp32. (A map that is not monotone is ordered by p.) -1
        and 0 follow where a row has fewer classes: the others are masked, or the map gives them exactly 0. p has the dtype of the
        scores and gradients in them and in the map's parameters.

    Examples
    --------
    >>> from anymax.sampling import top
    >>> best = top("softmax", [[0.0, 2.0, 1.0]], k=2)
    >>> best.index, best.p.round(3)
    (array([[1, 2]]), array([[0.665, 0.245]]))
    >>> top("sparsemax", [3.0, 1.0, 0.0], k=2)
    Top(index=array([ 0, -1]), p=array([1., 0.]))

    The probabilities of the classes that were chosen for other scores:

    >>> top("softmax", [[1.0, 1.0, 1.0]], index=best.index).p.round(3)
    array([[0.333, 0.333]])
    """
    refuse_sharded("top", x)
    check_invalid("top", invalid)
    if invalid is not None and index is not None:
        raise ValueError("top: invalid= is about classes that are chosen, and index= gives them; leave one of them out")
    call = prepare_axes(as_mapping(mapping, "top"), x, pick_axis(axis, dim), mask)
    xp = namespace(call.rows)
    rows = upcast(call.rows, xp)
    if transform is not None:
        rows = transformed("top", transform, rows, call.axis, xp)
    if index is None:
        if k is None:
            raise TypeError("top: give k, how many classes to return, or index=, the classes")
        place, stray, count = None, None, check_k("top", k, rows.shape[-1])
    else:
        (place, stray), count = read_index("top", index, rows, call.axis, k, xp), 0
    over_all = call.over_all(rows)
    p = over_all.seen(bridge(rows).apply(over_all.mapping, over_all.rows))
    facts = call.mapping.facts
    if place is None:
        place = chosen(rows if facts.monotone else stop_gradient(p), count, xp)
        p_top = at(p, place, xp)
        # -1: masked, a map's zero, or a row with NaN or +inf, whose p is NaN
        kept = place >= 0
        shown = kept & ((p_top > 0) if facts.sparse or not facts.monotone else ~xp.isnan(p_top))
    else:
        kept = shown = place >= 0
        p_top = at(p, place, xp)
    p_top = xp.where(kept | xp.isnan(p_top), p_top, xp.zeros_like(p_top))
    p_top = p_top if stray is None else poison(p_top, stray, xp)
    place = validated("top", xp.where(shown, place, -xp.ones_like(place)), call.rows, invalid, xp)
    p_top = _array.as_dtype(p_top, call.scores.dtype, xp)
    return Top(from_last(place, call.axis, xp), from_last(p_top, call.axis, xp))


def read_index(who: str, index: Any, rows: Array, axis: int, k: Any, xp: Namespace) -> tuple[Array, Array | None]:
    """(given classes [..., m] in the layout of the rows, -1 for none; where values can't be read, True at those that are no class).

    An error if one is known to be no class; where values can't be read it is -1 here, and its result should be NaN.
    """
    index = _array.beside(index, rows, "index", xp)
    if not is_integer(index):
        raise TypeError(f"{who}: index must be integers, the classes to return, got {index.dtype}")
    lead = list(rows.shape[:-1])
    shape = list(index.shape)
    if len(shape) != rows.ndim or shape[:axis] + shape[axis + 1 :] != lead:
        lead.insert(axis, "any number")
        raise ValueError(
            f"{who}: index of shape {tuple(index.shape)} does not belong to scores whose classes are axis {axis}: {tuple(lead)}"
        )
    index = counts(_array.to_last(index, axis, xp), xp)
    if k is not None and k != index.shape[-1]:
        raise ValueError(f"{who}: k={k} and index has {index.shape[-1]} classes a row; give one of them")
    return known_index(f"{who}: index", index, rows.shape[-1], xp)


document(globals(), SampleOptions)
