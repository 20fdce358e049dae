"""The formulas of the losses, `formula(mapping, scores, target, options)`, for scores along one axis that are not a DTensor."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from .._array import Array, decides, dot, namespace, quiet, stop_gradient, total, upcast
from .._core.mapping import Mapping, no_potential
from .._core.rows import hide
from .._core.typing import LossKind
from ..autodiff import bridge
from ..functional.draws import check_draw, log_p_of_draw, log_p_of_draw_at, p_of_draw
from .batch import Batch, with_all_classes
from .indices import index_loss, loss_of_rows
from .margins import with_margin
from .options import EACH_ROW, LossOptions, cast
from .targets import has_constant, not_below_zero


def over_all(formula: Callable[..., Array]) -> Callable[..., Array]:
    """A formula that gets the class that a map hides as the last one."""

    @functools.wraps(formula)
    def call(mapping: Mapping, scores: Any, target: Any, options: LossOptions, **more: Any) -> Array:
        if mapping.hidden is not None:
            mapping, scores, target, options = with_all_classes(mapping, scores, target, options)
        return formula(mapping, scores, target, options, **more)

    return call


def by_row(rows: Callable[[Batch], Array], weighted: bool = False) -> Callable[..., Array]:
    """The formula of a loss from the one of each row; `weighted` means that `rows` includes the class weights."""

    @over_all
    def formula(mapping: Mapping, scores: Any, target: Any, options: LossOptions) -> Array:
        batch = Batch.of(mapping, scores, target, options)
        with quiet(batch.rows):
            return batch.reduce(rows(batch), weighted)

    return formula


def smoothed_nll(epsilon: float, batch: Batch) -> Array:
    check_draw(batch.mapping, "smoothed_nll")
    xp, p = batch.xp, p_of_draw(batch.mapping, batch.rows, batch.xp)
    n = total(xp.astype(batch.keep, p.dtype), xp)
    log_p = xp.log((p + epsilon) / (1.0 + n * epsilon))
    return -batch.of_target(hide(log_p, batch.keep), batch.keep)


def accuracy_loss(batch: Batch) -> Array:
    return -dot(batch.y, batch.p(), batch.xp)


def stop_gradient_loss(batch: Batch) -> Array:
    p = bridge(batch.rows).apply(batch.mapping, stop_gradient(batch.rows))
    x = batch.xp.where(batch.keep, batch.rows, batch.xp.zeros_like(batch.rows))
    return dot(stop_gradient(p) - batch.y, x, batch.xp)


@over_all
def fenchel_young(
    mapping: Mapping, scores: Any, target: Any, options: LossOptions, with_constant: bool = True
) -> Array:
    """Omega*(x) + Omega(y) - <x, y>."""
    out = index_loss(mapping, scores, target, options)
    if out is not None:
        return out
    if not mapping.facts.has_potential:
        raise TypeError(no_potential(mapping))
    batch = Batch.of(mapping, scores, target, options)
    with_constant = with_constant and has_constant(mapping, batch.indices, options)
    mapping, x, y, xp = batch.mapping, batch.rows, batch.y, batch.xp
    masked = xp.any((y > 0) & ~batch.keep, axis=-1, keepdims=True)
    batch.check_sums(masked)
    shared = not batch.indices or options.smoothing  # engines give a masked class index the gradient -1
    if shared and (not decides(masked) or bool(xp.any(masked))):
        x = hide(x, batch.keep)  # no gradient at a masked class, whatever its share
    value = bridge(x).loss(mapping, x, y)  # Omega*(x) - <x, y>, whose gradient is p - y
    with quiet(x):
        if with_constant:
            value = value + mapping.constant(y, xp)  # Omega(y)
        checked = ~(masked | batch.poisoned | batch.ignored)
        value = not_below_zero(mapping, value, checked, batch.terms, x.shape[-1], xp)
        value = value + xp.where(masked, math.inf * xp.ones_like(value), xp.zeros_like(value))
        return batch.reduce(value)


without_constant = functools.partial(fenchel_young, with_constant=False)


@over_all
def nll(mapping: Mapping, scores: Any, target: Any, options: LossOptions) -> Array:
    """-<y, log p>."""
    check_draw(mapping, "nll")
    out = index_loss(mapping, scores, target, options) if mapping.is_softmax else None  # there it is the same loss
    return nll_by_row(mapping, scores, target, options) if out is None else out


def minus_log_p(batch: Batch) -> Array:
    if batch.place is not None:  # no array of all classes where p suffices
        log_p = log_p_of_draw_at(batch.mapping, batch.rows, batch.place, batch.xp)
        return -batch.of_place(log_p, log_p > -math.inf)
    log_p = log_p_of_draw(batch.mapping, batch.rows, batch.xp)
    return -batch.of_target(log_p, log_p > -math.inf)


nll_by_row = by_row(minus_log_p, weighted=True)
FORMULAS: dict[LossKind, Callable[..., Array]] = {
    "fenchel_young": fenchel_young, "without_constant": without_constant, "nll": nll,
}  # fmt: skip


def loss_of_class(kind: LossKind, mapping: Mapping, rows: Array, index: Array) -> Array:
    """The loss of each row, [...], in fp32 or fp64; index: a class of each row that has been checked, -1 for none, with the loss 0."""
    value = loss_of_rows(mapping, rows, index) if kind != "nll" or mapping.is_softmax else None
    return FORMULAS[kind](mapping, upcast(rows, namespace(rows)), index, EACH_ROW) if value is None else value


def margin_loss(margin: Any, scale: Any, mapping: Mapping, cosines: Any, target: Any, options: LossOptions) -> Array:
    """The loss of `scale * margin(cosines, target)`; neither acts on the class that a map hides."""
    scores, target, axis, dtype = with_margin(margin, scale, cosines, target, options)
    return cast(FORMULAS[mapping.own_loss](mapping, scores, target, options._replace(axis=axis)), dtype)
