"""Transforms: functions scores -> scores that compose with every map and every verb.

Each factory returns a frozen callable. A transform keeps -inf (a masked entry) where it is, lets a NaN touch its own
row only, and is differentiable in the scores it keeps. Parameters that are arrays broadcast against the scores as
NumPy does; one of a single dimension runs along `axis`.

>>> import numpy as np
>>> compose(temperature(0.5), topk(2))(np.array([1.0, 3.0, 2.0]))
array([-inf,   6.,   4.])
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ._array import (
    Array,
    Namespace,
    asarray,
    dtype_name,
    finish,
    finite_scores,
    floating,
    is_array,
    is_torch,
    known,
    namespace,
    pick_axis,
    power,
    safe,
    stop_gradient,
    top,
    total,
    upcast,
)
from ._mapping import Mapping
from ._noises import draw, find
from ._transform import Composed, Transform, cast, check_range
from ._truncate import topk_keep, topp_keep


def compose(*transforms: Callable[[Array], Array]) -> Composed:
    """Apply transforms left to right; `compose()` changes nothing. Any function scores -> scores may take part.

    >>> compose(temperature(2.0), compose(topk(3), minp(0.1)))
    compose(temperature(T=2.0), topk(k=3), minp(p=0.1))
    """
    flat: list[Callable[[Array], Array]] = []
    for t in transforms:
        if not callable(t) or isinstance(t, (type, Mapping)):
            hint = "; a map comes after the transforms, and gives probabilities" if isinstance(t, Mapping) else ""
            raise TypeError(f"compose: expected functions scores -> scores such as temperature(2.0), got {t!r}{hint}")
        flat.extend(t.transforms if isinstance(t, Composed) else (t,))
    return Composed(tuple(flat))


def temperature(T: Any, *, axis: int | None = None, dim: int | None = None) -> Transform:
    """`x / T`: T > 1 flattens the distribution, T < 1 sharpens it. T is a number or an array (per row: [..., 1]).

    T = 0 is the limit, argmax: the largest scores become 0 and the others are masked, so that every map gives equal shares to the
    largest; its gradient is 0.

    >>> temperature(2.0)([1.0, 3.0])
    array([0.5, 1.5])
    >>> temperature(0)([1.0, 3.0])
    array([-inf,   0.])
    """
    check_range("temperature", "T", T, lambda v: v >= 0, "at least 0")
    return Transform(_temperature, (("T", T),), pick_axis(axis, dim))


def _temperature(x: Array, xp: Namespace, T: Any) -> Array:
    tiny = float(xp.finfo(x.dtype).smallest_normal)  # below it 1 / T is infinite
    if not is_array(T):
        return _on_kept(x, lambda y: y / T, xp) if tiny <= T else _largest(x, xp)
    cold = tiny > T
    if known(cold) and not bool(xp.any(cold)):
        return _on_kept(x, lambda y: y / T, xp)
    warm = _on_kept(x, lambda y: y / safe(T, ~cold, 1.0, xp), xp)
    return xp.where(cold, _largest(x, xp), warm)


def _largest(x: Array, xp: Namespace) -> Array:
    """0 at the largest scores of a row, -inf elsewhere; a row with NaN or +inf stays as it is."""
    y, keep, poisoned = finite_scores(x, xp)
    high = top(xp.where(keep, y, -math.inf * xp.ones_like(y)), xp)
    out = xp.where(keep & (y == high), 0.0 * y, -math.inf * xp.ones_like(y))
    return xp.where(poisoned, x, out)


def scalable(
    beta: Any = 1.0,
    gamma: Any = 1.0,
    delta: Any = 0.0,
    n: Any = None,
    *,
    axis: int | None = None,
    dim: int | None = None,
) -> Transform:
    """`(delta + beta log(n)^gamma) x`: a temperature that follows the length n of the row, so that long rows do not flatten.

    n is the number of entries that are not masked (under a causal mask: the keys that the query sees), or what is given. The default
    is scalable softmax, with beta to be learned, one a head: [heads, 1, 1] (Nakanishi 2025); delta and gamma make it
    the adaptive form of Vasylenko et al. 2025.

    >>> scalable(beta=0.5)([1.0, 2.0, 4.0, 8.0]).round(4)
    array([0.6931, 1.3863, 2.7726, 5.5452])
    """
    for name, value in (("beta", beta), ("gamma", gamma), ("delta", delta)):
        check_range("scalable", name, value, lambda v: v == v, "a number, not NaN")
    if n is not None:
        check_range("scalable", "n", n, lambda v: v >= 1, "at least 1")
    params = (("beta", beta), ("gamma", gamma), ("delta", delta), ("n", n))
    return Transform(_scalable, params, pick_axis(axis, dim))


def _scalable(x: Array, xp: Namespace, beta: Any, gamma: Any, delta: Any, n: Any) -> Array:
    if n is None:
        n = total(xp.astype(x != -math.inf, x.dtype), xp)
    grown = power(xp.log(xp.where(n > 1, n, xp.ones_like(n))), gamma, xp) if is_array(n) else _grown(n, gamma)
    return _on_kept(x, lambda y: y * (delta + beta * grown), xp)


def _grown(n: float, gamma: Any) -> Any:
    return math.log(n) ** gamma if n > 1 else 0.0


def mask(keep: Any, *, axis: int | None = None, dim: int | None = None) -> Transform:
    """-inf where `keep` is False, so that every map gives these entries probability 0.

    >>> mask([True, False])([1.0, 3.0])
    array([  1., -inf])
    """
    keep = asarray(keep, "keep")
    if "bool" not in dtype_name(keep):
        raise TypeError(f"mask: keep must be boolean (True = keep the entry), got {dtype_name(keep)}; write keep != 0")
    return Transform(_mask, (("keep", keep),), pick_axis(axis, dim))


def _mask(x: Array, xp: Namespace, keep: Array) -> Array:
    return xp.where(keep, x, -math.inf * xp.ones_like(x))


def prior(log_p: Any = None, scale: Any = None, *, axis: int | None = None, dim: int | None = None) -> Transform:
    """Prior knowledge before the map: `scale * x + log_p`, either or both. For the form after the map see `mix`.

    With softmax, `log_p` multiplies the probabilities by p and renormalises (logit adjustment: log class frequencies).

    >>> prior(log_p=[0.0, -1.0])([2.0, 2.0])
    array([2., 1.])
    """
    if log_p is None and scale is None:
        raise TypeError("prior(): give log_p=<added to the scores>, scale=<multiplies the scores>, or both")
    log_p, scale = (v if v is None or isinstance(v, (int, float)) else asarray(v, "prior") for v in (log_p, scale))
    for name, value in (("log_p", log_p), ("scale", scale)):
        if value is not None:
            check_range("prior", name, value, lambda v: v == v, "a number, not NaN")
    return Transform(_prior, (("log_p", log_p), ("scale", scale)), pick_axis(axis, dim))


def _prior(x: Array, xp: Namespace, log_p: Any, scale: Any) -> Array:
    def move(y: Array) -> Array:
        y = y if scale is None else y * scale
        return y if log_p is None else y + log_p

    return _on_kept(x, move, xp)


def normalize(kind: str = "l2", *, axis: int | None = None, dim: int | None = None) -> Transform:
    """Divide each row by `sum |x|` ("l1"), `sqrt(sum x^2)` ("l2") or `max x` ("max"). A row of zeros stays zeros.
    "standard" is the standard score, `(x - mean) / deviation` with the deviation of all entries (division by their number).

    "max" divides by the largest score where that is positive. Where it is not, dividing by it would turn the order
    round (or divide by 0), so such a row is divided by its largest absolute value.

    >>> normalize("l1")([1.0, -3.0])
    array([ 0.25, -0.75])
    >>> normalize("max")([[1.0, 4.0], [-4.0, -2.0]])
    array([[ 0.25,  1.  ],
           [-1.  , -0.5 ]])
    >>> normalize("standard")([1.0, 3.0, -math.inf])
    array([ -1.,   1., -inf])
    """
    if kind not in ("l1", "l2", "max", "standard"):
        raise ValueError(f"normalize: {kind!r} is not known; use 'l1', 'l2', 'max' or 'standard'")
    return Transform(_normalize, (("kind", kind),), pick_axis(axis, dim))


def _normalize(x: Array, xp: Namespace, kind: str) -> Array:
    y, keep, poisoned = finite_scores(x, xp)
    if kind == "standard":  # nor do the scores' offset and factor matter to it
        centred = _scaled(_centred(_scaled(y, xp)[0], keep, xp), xp)
        y, zero = _centred(centred[0], keep, xp), centred[2]
        weight = xp.astype(keep, y.dtype)
        square = total(weight * y * y, xp) / safe(total(weight, xp), ~zero, 1.0, xp)
        return finish(y / xp.sqrt(safe(square, ~zero, 1.0, xp)), keep, poisoned, xp, masked=-math.inf)
    z, _, zero = _scaled(y, xp)  # all three are blind to a common factor
    if kind == "l1":
        norm = total(xp.abs(z), xp)
    elif kind == "l2":
        square = total(z * z, xp)
        norm = xp.sqrt(safe(square, ~zero, 1.0, xp))
    else:
        high = top(xp.where(keep, z, -math.inf * xp.ones_like(z)), xp)
        norm = xp.where(high > 0, high, -xp.min(z, axis=-1, keepdims=True))
    out = z / safe(norm, ~zero, 1.0, xp)
    if kind == "max":  # a tiny maximum beside large negative scores must not overflow to -inf, which means masked
        lowest = float(xp.finfo(x.dtype).min)
        out = xp.where(out < lowest, lowest * xp.ones_like(out), out)
    return finish(out, keep, poisoned, xp, masked=-math.inf)


def _centred(y: Array, keep: Array, xp: Namespace) -> Array:
    """Less the mean of the kept entries; 0 elsewhere. A row of equal scores gives zeros."""
    weight = xp.astype(keep, y.dtype)
    count = total(weight, xp)
    high = stop_gradient(top(xp.where(keep, y, -math.inf * xp.ones_like(y)), xp))
    y = xp.where(
        keep, y - xp.where(high > -math.inf, high, xp.zeros_like(high)), xp.zeros_like(y)
    )  # equal scores: exactly 0
    mean = total(y, xp) / xp.where(count > 0, count, xp.ones_like(count))
    return xp.where(keep, y - mean, xp.zeros_like(y))


def topk(k: int, *, axis: int | None = None, dim: int | None = None) -> Transform:
    """Keep the k largest scores, exactly k (ties: the first ones), and mask the others; all, where k is larger.

    >>> topk(2)([3.0, 1.0, 3.0, 3.0])
    array([  3., -inf,   3., -inf])
    """
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)):
        raise TypeError(f"topk: k must be an integer, the number of scores to keep, got {k!r}")
    if k < 1:
        raise ValueError(f"topk: k must be at least 1, got {k}")
    return Transform(_topk, (("k", int(k)),), pick_axis(axis, dim))


def _topk(x: Array, xp: Namespace, k: int) -> Array:
    return _mask(x, xp, topk_keep(x, k, xp))


def topp(p: Any, *, axis: int | None = None, dim: int | None = None) -> Transform:
    """Keep the nucleus: the fewest largest scores whose softmax mass reaches p, at least one. Holtzman et al. 2020.

    >>> topp(0.7)([2.0, 1.0, 0.0])
    array([  2.,   1., -inf])
    """
    check_range("topp", "p", p, lambda v: (v > 0) & (v <= 1), "above 0 and at most 1")
    return Transform(_topp, (("p", p),), pick_axis(axis, dim))


def _topp(x: Array, xp: Namespace, p: Any) -> Array:
    return _mask(x, xp, topp_keep(x, p, xp))


def minp(p: Any, *, axis: int | None = None, dim: int | None = None) -> Transform:
    """Keep the scores whose softmax probability is at least p times the largest. Nguyen et al. 2024.

    A threshold on the scores, `x >= max x + log p`.

    >>> minp(0.2)([2.0, 1.0, 0.0])
    array([  2.,   1., -inf])
    """
    check_range("minp", "p", p, lambda v: (v > 0) & (v <= 1), "above 0 and at most 1")
    return Transform(_minp, (("p", p),), pick_axis(axis, dim))


def _minp(x: Array, xp: Namespace, p: Any) -> Array:
    y = stop_gradient(x)
    log_p = stop_gradient(xp.log(p)) if is_array(p) else math.log(p)
    return _mask(x, xp, ~(y - top(y, xp) < log_p))


def topnsigma(n: Any, *, axis: int | None = None, dim: int | None = None) -> Transform:
    """Keep the scores within n standard deviations of the largest: `x >= max x - n std x`. Tang et al. 2024.

    The standard deviation is that of the row's finite entries (division by their number, not by one less).

    >>> topnsigma(1.0)([4.0, 3.5, 0.0])
    array([ 4. ,  3.5, -inf])
    """
    check_range("topnsigma", "n", n, lambda v: v >= 0, "at least 0")
    return Transform(_topnsigma, (("n", n),), pick_axis(axis, dim))


def _topnsigma(x: Array, xp: Namespace, n: Any) -> Array:
    y, keep, poisoned = finite_scores(stop_gradient(x), xp)
    weight = xp.astype(keep, y.dtype)
    count = total(weight, xp)
    count = xp.where(count > 0, count, xp.ones_like(count))
    high = top(xp.where(keep, y, -math.inf * xp.ones_like(y)), xp)
    y = y - xp.where(high > -math.inf, high, xp.zeros_like(high))
    size = top(xp.abs(y * weight), xp)
    unit = xp.where(size > 0, size, xp.ones_like(size))  # squares of large scores must not overflow
    z = y / unit
    mean = total(z * weight, xp) / count
    deviation = xp.sqrt(total(weight * (z - mean) ** 2, xp) / count)
    return _mask(x, xp, ~(z < -(stop_gradient(n) * deviation)) | poisoned)


def cosine(weight: Array, eps: float = 1e-8, *, axis: int | None = None, dim: int | None = None) -> Transform:
    """Embeddings [..., d] to cosine scores [..., C], for `weight` [C, d], a row a class. Lengths below eps count as eps.

    >>> import numpy as np
    >>> cosine(np.array([[1.0, 0.0], [3.0, 4.0]]))([2.0, 0.0])
    array([1. , 0.6])
    """
    weight = asarray(weight, "weight")
    if weight.ndim != 2:
        raise ValueError(f"cosine: weight must have the shape [classes, features], got {tuple(weight.shape)}")
    floating(weight, namespace(weight), "weight")
    check_range("cosine", "eps", eps, lambda v: v > 0, "above 0")
    return Transform(_cosine, (("weight", weight), ("eps", eps)), pick_axis(axis, dim))


def _cosine(x: Array, xp: Namespace, weight: Array, eps: float) -> Array:
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"cosine: the embeddings have {x.shape[-1]} features and weight has {weight.shape[1]}; "
            "weight must be [classes, features] and axis the embeddings' axis of features"
        )
    return xp.matmul(_unit(x, eps, xp), xp.matrix_transpose(_unit(cast(weight, x, xp), eps, xp)))


def _unit(x: Array, eps: float, xp: Namespace) -> Array:
    z, size, zero = _scaled(x, xp)
    norm = xp.sqrt(safe(total(z * z, xp), ~zero, 1.0, xp))
    long = ~(norm * size < eps) & ~zero
    return xp.where(long, z / norm, x / eps)


def noise(
    kind: Any = "gumbel", scale: Any = 1.0, *, generator: Any, axis: int | None = None, dim: int | None = None
) -> Transform:
    """Add `scale` times independent noise: "gumbel", "normal", "logistic", "laplace", "exponential", "uniform" on [0, 1].

    A NumPy or torch generator moves on with each call; a JAX key or an integer seed gives the same noise at each.

    >>> noise("normal", 0.1, generator=0)([1.0, 2.0]).round(4)
    array([1.0126, 1.9868])
    """
    check_range("noise", "scale", scale, lambda v: v >= 0, "at least 0")
    find(kind)  # an unknown kind is an error here
    params = (("kind", kind), ("scale", scale), ("generator", generator))
    return Transform(_add_noise, params, pick_axis(axis, dim), whole=True)  # a row's noise depends on its place


def _add_noise(x: Array, xp: Namespace, kind: Any, scale: Any, generator: Any) -> Array:
    return x + scale * draw(kind, tuple(x.shape), x, generator)


def mix(p: Array, prior: Any, weight: Any) -> Array:
    """Prior knowledge after the map: `(1 - weight) p + weight prior`. The forms before it are `prior`.

    >>> mix([0.75, 0.25], [0.5, 0.5], 0.5)
    array([0.625, 0.375])
    """
    p = asarray(p, "p")
    xp = namespace(p)
    p = floating(p, xp, "p")
    check_range("mix", "weight", weight, lambda v: (v >= 0) & (v <= 1), "from 0 to 1")
    q = upcast(p, xp)
    prior, weight = cast(prior if is_torch(prior) else asarray(prior, "prior"), q, xp), cast(weight, q, xp)
    out = (1.0 - weight) * q + weight * prior
    return out if out.dtype == p.dtype else xp.astype(out, p.dtype)


# -- helpers ---------------------------------------------------------------------------------------------------------


def _on_kept(x: Array, function: Callable[[Array], Array], xp: Namespace) -> Array:
    """`function(x)`, with masked entries masked still and no derivative through them."""
    keep = x != -math.inf
    out = function(safe(x, keep, 0.0, xp))
    return xp.where(keep, out, -math.inf * xp.ones_like(out))


def _scaled(x: Array, xp: Namespace) -> tuple[Array, Array, Array]:
    """Rows divided by their largest absolute value, so that no square overflows; that value; True where it is 0."""
    size = stop_gradient(top(xp.abs(x), xp))
    zero = size == 0
    size = xp.where(zero, xp.ones_like(size), size)
    # XLA divides by multiplying with the reciprocal, which for the largest numbers would be subnormal and so 0
    quarter = xp.where(size > 1e30, 0.25 * xp.ones_like(size), xp.ones_like(size))
    return (x * quarter) / (size * quarter), size, zero
