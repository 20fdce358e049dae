"""Terms of rows for policies, decoders and distillation: log p of given classes, entropy, and log p of all other classes."""

from __future__ import annotations

import math
from typing import Any

from .. import _array
from .._array import (
    Array,
    Namespace,
    as_dtype,
    dot,
    known,
    known_any,
    namespace,
    quiet,
    stop_gradient,
    take,
    total,
    upcast,
    wider,
)
from .._core.classes import PADDING
from .._core.mapping import Mapping, missing_mass, with_missing_mass
from .._core.names import as_mapping
from .._core.rows import Rows, prepare_axes
from .._core.shards import refuse as refuse_sharded
from ..autodiff import bridge
from ..functional.draws import check_draw, log_p_of_draw, may_draw_none, one_draw, sum_of
from ..inspection import entropy as entropy_of
from ..mappings import Softmax
from ..transforms import temperature as tempered
from ..transforms.applying import transformed
from .softmax_plain import Terms, at_classes

_SOFTMAX = Softmax()


def read(who: str, mapping: Mapping | str, x: Any, axis: Any = -1, mask: Any = None, transform: Any = None) -> Rows:
    """The rows after the transforms, over the classes that the caller sees."""
    return read_scaled(who, mapping, x, axis, mask, transform, None)[0]


def read_scaled(
    who: str, mapping: Mapping | str, x: Any, axis: Any, mask: Any, transform: Any, temperature: Any
) -> tuple[Rows, float]:
    """`read` for scores that a temperature divides, and the factor by which the caller must still multiply the rows."""
    mapping = as_mapping(mapping, who)
    check_draw(mapping, who)
    refuse_sharded(who, x)
    call = prepare_axes(mapping, x, axis, mask)
    rows, xp = call.rows, namespace(call.rows)
    temperature = None if temperature is None else _array.number(temperature)
    if type(temperature) in (int, float) and temperature > 1e-30 and call.mapping.is_softmax and transform is None:
        return call, 1.0 / temperature
    if temperature is not None:
        rows = tempered(call.parameter(temperature, "temperature"))(upcast(rows, xp))
    if transform is not None:
        rows = transformed(who, transform, rows, call.axis, xp)
    return call if rows is call.rows else call._replace(rows=rows), 1.0


def terms_of(
    mapping: Mapping, rows: Array, index: Array, xp: Namespace, *, scale: float = 1.0, entropy: bool = False, rest: bool = False
) -> Terms:  # fmt: skip
    """log p of classes [..., m], and on request the entropy of each row or log p of all other classes, in fp32 or fp64.

    All functions of this room get them here. The indices -1 and `PADDING` mean no class and give 0; any other index that is not a class
    gives NaN, unless the caller has refused it.
    """
    n = rows.shape[-1]
    none = index < 0
    outside = none | (index >= n)
    at = xp.where(outside, n * xp.ones_like(index), index)
    if mapping.is_softmax:
        out = None
        if not entropy and not rest and scale == 1.0 and index.shape[-1] == 1:
            out = _by_loss(mapping, rows, xp.where(none, -xp.ones_like(at), at)[..., 0])
        out = bridge(rows).terms(rows, at, scale=scale, entropy=entropy, rest=rest) if out is None else out
    else:
        out = _of_map(mapping, rows, at, entropy, rest, xp)
    if known(outside) and not bool(xp.any(outside)):
        return out
    log_p = xp.where(none, xp.zeros_like(out.log_p), out.log_p)
    stray = outside & (index != -1) & (index != PADDING)
    return out._replace(log_p=_array.poison(log_p, stray, xp))


def _by_loss(mapping: Mapping, rows: Array, index: Array) -> Terms | None:
    """By an engine that computes softmax's loss of class indices in one pass; not if a class may be masked: there a loss has a gradient.

    JAX's program of the terms is one pass too.
    """
    if _array.is_jax(rows):
        return None
    if _array.differentiates(rows) and not known(rows):
        return None
    value = bridge(rows).index_loss(mapping, rows, index)
    if value is None or (_array.differentiates(rows) and known_any(value == math.inf, namespace(rows))):
        return None
    return Terms(-value[..., None], None, None)


def _of_map(mapping: Mapping, rows: Array, index: Array, entropy: bool, rest: bool, xp: Namespace) -> Terms:
    """For other maps: from log p if the map has a formula for it, else from p."""
    s, n = upcast(rows, xp), rows.shape[-1]
    inside = index < n
    at = xp.where(inside, index, (n - 1) * xp.ones_like(index))
    with quiet(s):
        log_p = bridge(s).log(mapping, s)
        p: Any = bridge(s).apply(mapping, s) if log_p is None else None
        value = _array.log(take(p, at, xp), xp) if log_p is None else take(log_p, at, xp)
        lost = inside & (value == -math.inf)
        moves = any(map(_array.differentiates, (s, *mapping.params().values())))
        pulled = moves and not (known(lost) and not bool(xp.any(lost)))
        draw = one_draw(mapping)
        p = xp.exp(log_p) if p is None and (entropy or rest or pulled or draw == "share") else p
        if draw == "share":
            whole = sum_of(p, xp)
            value, p = xp.where(lost, value, value - xp.log(whole)), p / whole
        if pulled:
            # the value is infinite, but the gradient e_y - p is not; it does not depend on a parameter of the map
            y, _, _ = _array.finite_scores(s, xp)
            pull = take(y, at, xp) - dot(stop_gradient(p), y, xp)
            value = xp.where(lost, stop_gradient(value) + (pull - stop_gradient(pull)), value)
        h = others = None
        if entropy:
            h = entropy_of(with_missing_mass(p, 1.0, xp) if draw == "rest" else p)[..., None]
        if rest:
            mass = total(xp.where(at_classes(index, p, xp), xp.zeros_like(p), p), xp)
            others = _array.log(mass + missing_mass(total(p, xp), 1.0, xp) if draw == "rest" else mass, xp)
    return Terms(value, h, others)


def kl_rows(mapping_p: Mapping, x: Array, mapping_q: Mapping, y: Array, xp: Namespace) -> Array:
    """`sum p (log p - log q)` of rows, without the axis of the classes; a draw of none of them is one more outcome."""
    x, y = upcast(x, xp), upcast(y, xp)
    y = as_dtype(y, x.dtype, xp)
    with quiet(x):
        log_p, log_q = log_p_of_draw(mapping_p, x, xp, none=True), log_p_of_draw(mapping_q, y, xp, none=True)
        outcomes = max(log_p.shape[-1], log_q.shape[-1])
        log_p, log_q = (wider(a, outcomes, -math.inf, xp) for a in (log_p, log_q))
        return kl_of_sums([total(a, xp) for a in kl_sums(log_p, log_q, y, xp)])[..., 0]


def kl_sums(log_p: Array, log_q: Array, y: Array, xp: Namespace, always: bool = False) -> list[Array]:
    """Arrays whose sums along the classes give `sum p (log p - log q)`, by `kl_of_sums`: one, or four if the divergence may be infinite
    while its gradient in the scores y of q is not.

    always: four of them whatever the values.
    """
    each = divergences(log_p, log_q, xp)
    lost = each == math.inf
    if not always and (not _array.differentiates(y) or (known(lost) and not bool(xp.any(lost)))):
        return [each]
    p, q = (stop_gradient(xp.exp(a)) for a in (log_p, log_q))
    s = wider(_array.finite_scores(y, xp)[0], log_q.shape[-1], 0.0, xp)
    s = s - stop_gradient(s)  # 0, with a gradient
    p = xp.where(lost, p, xp.zeros_like(p))
    return [each, p, q * s, p * s]


def kl_of_sums(sums: list[Array]) -> Array:
    value, *pull = sums
    if not pull:
        return value
    p, mean, score = pull
    return value + (stop_gradient(p) * mean - score)


def refuse_draws_of_none(who: str, mapping: Mapping) -> None:
    """An error for a map from which a draw may be none of the classes."""
    if may_draw_none(mapping):
        raise ValueError(
            f"{who}: {mapping!r} gives the classes no distribution: a draw may be none of them; make its sink one of the classes"
        )


def divergences(log_p: Array, log_q: Array, xp: Namespace) -> Array:
    """p (log p - log q), 0 where p is 0 and +inf where only q is 0, with derivatives that are never NaN."""
    positive, lost = log_p != -math.inf, log_q == -math.inf
    zero = xp.zeros_like(log_p)
    a, b = xp.where(positive, log_p, zero), xp.where(positive & ~lost, log_q, zero)
    each = xp.where(positive, xp.exp(a) * (a - b), zero)
    return xp.where(positive & lost, each + math.inf, each)
