"""Looking at maps: their Jacobian, their entropies and support, and what they promise."""

from __future__ import annotations

import math
from typing import Any

from . import _array
from ._array import Array, asarray, floating, is_array, namespace, pick_axis, quiet, shown, total, upcast
from ._mapping import Facts, Mapping
from ._names import as_mapping
from ._options import answering
from ._rows import prepare
from .autodiff import bridge


@answering()
def jacobian(mapping: Mapping, x: Any, axis: int | None = None, *, dim: int | None = None, mask: Any = None) -> Array:
    """dp_i / dx_j of every row, shape [..., n, n], from the map's own formula (i and j are the last two axes)."""
    x, rows, mapping, axis = prepare(as_mapping(mapping, "jacobian"), x, pick_axis(axis, dim), mask, None)
    xp = namespace(rows)
    s = upcast(rows, xp)
    n = rows.shape[-1]
    p = bridge(s).apply(mapping, s)
    eye = xp.eye(n, dtype=s.dtype, device=s.device) if _array.is_torch(s) else xp.eye(n, dtype=s.dtype)
    wide = xp.broadcast_to(s[..., None, :], (*s.shape[:-1], n, n))
    p = xp.broadcast_to(p[..., None, :], (*s.shape[:-1], n, n))
    params = {k: v[..., None, :] if is_array(v) and v.ndim else v for k, v in mapping.params().items()}
    with quiet(s):
        out = mapping.replace(**params).vjp(wide, p, xp.broadcast_to(eye, wide.shape), xp) + 0.0  # no -0
    return out if out.dtype == rows.dtype else xp.astype(out, rows.dtype)


@answering()
def jacobian_norm(
    mapping: Mapping, x: Any, axis: int | None = None, *, dim: int | None = None, mask: Any = None
) -> Array:
    """Half the L1 norm of the Jacobian: `1 - sum p_i^2` for softmax, which vanishes as p nears a vertex."""
    j = jacobian(mapping, x, axis, dim=dim, mask=mask)
    xp = namespace(j)
    return 0.5 * xp.sum(xp.abs(j), axis=(-2, -1))


@answering()
def entropy(
    p: Any, kind: str = "shannon", alpha: Any = None, *, axis: int | None = None, dim: int | None = None
) -> Array:
    """The entropy of distributions: Shannon, Renyi or Tsallis, in natural units; 0 log 0 is 0.

    "shannon": `-sum p log p`. "renyi": `log(sum p^alpha) / (1 - alpha)`, "renyi2" with alpha = 2, where `sum p^2 = exp(-H)`.
    "tsallis": `(1 - sum p^alpha) / (alpha (alpha - 1))`, the one behind entmax: Shannon at alpha = 1, Gini's at 2.
    """
    alpha = _array.number(alpha)
    kinds = {
        "shannon": 1.0,
        "renyi": 2.0 if alpha is None else alpha,
        "renyi2": 2.0,
        "tsallis": 1.5 if alpha is None else alpha,
    }
    p = _probabilities("entropy", p)
    if not isinstance(kind, str) or kind not in kinds:
        hint = f"; did you mean axis={kind}?" if type(kind) is int else ""
        raise ValueError(f"entropy: kind must be one of {', '.join(sorted(kinds))}, got {shown(kind)}{hint}")
    if alpha is not None and kind in ("shannon", "renyi2"):
        raise TypeError(f"entropy: {kind!r} takes no alpha; use 'renyi' or 'tsallis'")
    order = kinds[kind]
    if not is_array(order) and (
        isinstance(order, bool) or not isinstance(order, (int, float)) or not 0 < order < math.inf
    ):
        raise ValueError(f"entropy: alpha must be a positive number, got {order!r}")
    xp = namespace(p)
    p = floating(p, xp, "p")
    axis = _array.check_axis(pick_axis(axis, dim), p.ndim)
    q = upcast(_array.to_last(p, axis, xp), xp)
    with quiet(q):
        if not is_array(order) and order == 1:
            h = -total(_array.xlogx(q, xp), xp)
        elif kind == "tsallis":
            inside = q > 0
            s = _array.safe(q, inside, 1.0, xp)
            terms = s * _array.expm1_over(order - 1.0, xp.log(s), xp) / order
            h = -total(xp.where(inside, terms, xp.zeros_like(q)), xp)
        else:
            h = xp.log(total(_array.power(q, order, xp), xp)) / (1.0 - order)
            if is_array(order):
                h = xp.where(order == 1, -total(_array.xlogx(q, xp), xp), h)
        h = xp.where(xp.any(xp.isnan(q), axis=-1, keepdims=True), math.nan * xp.ones_like(h), h)
    h = xp.squeeze(h, axis=-1) + 0.0  # no -0
    return h if h.dtype == p.dtype else xp.astype(h, p.dtype)


def support(p: Any) -> Array:
    """True where p_i > 0."""
    p = _probabilities("support", p)
    return floating(p, namespace(p), "p") > 0


def _probabilities(who: str, p: Any) -> Array:
    if isinstance(p, (Mapping, str)):
        raise TypeError(
            f"{who}: expected probabilities, got {p!r}; a map gives them: anymax.{who}(anymax.apply({p!r}, x))"
        )
    return asarray(p, "p")


def facts(mapping: Mapping) -> Facts:
    """What a map promises; `tests/test_facts.py` checks each entry numerically."""
    return as_mapping(mapping, "facts").facts


def logit_gap(loss: Any, n: int) -> Any:
    """The least `max x - min x` at which the cross-entropy over n classes can be `loss`: `log(n-1) - log(exp(loss) - 1)`.

    It grows with log n: with many classes softmax must drive its scores far apart, which invites over-fitting.
    """
    n, loss = _array.number(n), _array.number(loss)
    if isinstance(n, bool) or not isinstance(n, int) or n < 2:
        raise ValueError(f"logit_gap: n must be an integer of at least 2, the number of classes, got {n!r}")
    if not is_array(loss):
        if isinstance(loss, bool) or not isinstance(loss, (int, float)) or not loss > 0:
            raise ValueError(f"logit_gap: loss must be a positive number, got {loss!r}")
        # log(exp(l) - 1) = l + log(1 - exp(-l)), which does not overflow
        return math.log(n - 1) - loss - math.log(-math.expm1(-loss))
    xp = namespace(loss)
    loss = floating(loss, xp, "loss")
    with quiet(loss):
        return math.log(n - 1) - loss - xp.log(-xp.expm1(-loss))
