"""`apply(mapping, x)`, and one line of sugar for each map."""

from __future__ import annotations

import functools
import math
import sys
from typing import Any, NamedTuple, Unpack

import numpy as np

from . import _array, kernels
from ._array import (
    Array,
    is_array,
    is_torch,
    namespace,
    pick_axis,
    quiet,
    stop_gradient,
    to_last,
    upcast,
)
from ._mapping import Mapping, one_a_row
from ._options import allowed, names
from ._rows import aligned, check_mapping, hide, join, like_scores, prepare, restore_axis, split
from ._shards import by_rows, sharded
from ._shards import refuse as refuse_sharded
from ._typing import ApplyOptions, ArrayT, Axes, LogOptions, Numbers
from .autodiff import bridge
from .kernels import reference
from .mappings import (
    Budget,
    Entmax,
    NormMax,
    PerturbMax,
    Sigsoftmax,
    Softmax,
    Sparsemax,
    SparseSoftmax,
    Taylor,
)


class Threshold(NamedTuple):
    """tau, the one number per row with `p_i = link(x_i - tau)`, and the number of classes with p_i > 0."""

    tau: Array
    support: Array


def apply(
    mapping: Mapping,
    x: ArrayT | Numbers,
    axis: Axes = None,
    *,
    dim: Axes = None,
    mask: Any = None,
    out: Any = None,
    dtype: Any = None,
) -> ArrayT:
    """p(x): the probabilities of a map, along one axis, as an array of the caller's kind and dtype.

    axis: the axis of the classes, the last by default, or a tuple of axes whose entries are one row; `dim` is another name of it.
    mask: boolean, broadcastable to x, True = keep; a masked class has probability 0, a row without classes is all 0.
    out: an array to write the result to (NumPy, torch), where no gradient is asked for.
    dtype: cast the scores first, as in `torch.softmax`.
    """
    named = axis if dim is None else dim if axis is None else ()
    if dtype is None and (p := _quickly(mapping, x, named, mask, out)) is not None:
        return p
    axis = pick_axis(axis, dim)
    if sharded(x):
        check_mapping(mapping)
        p = by_rows(lambda m, x, mask: apply(m, x, axis, mask=mask, dtype=dtype), mapping, x, axis, mask)
        return _store(p, out)
    if isinstance(axis, (tuple, list)):
        joined, mapping, mask = join(mapping, x, axis, mask)
        return _store(joined.apart(apply(mapping, joined.scores, mask=mask, dtype=dtype)), out)
    scores, rows, mapping, axis, keep = split(mapping, x, axis, mask, dtype)
    leaf = bridge(rows)
    if keep is not None and not leaf.masks(mapping, rows):
        rows, keep = hide(rows, keep), None
    if out is not None and rows.dtype == scores.dtype:
        to = _array.in_memory(out, "out")
        if (
            type(to) is type(rows)
            and to.ndim == scores.ndim
            and leaf.into(mapping, rows, keep, to_last(to, axis, namespace(rows)))
        ):
            return out
    return _store(like_scores(restore_axis(leaf.apply(mapping, rows, keep), axis), scores), out)


_QUICK: dict[type, Any] = {}  # what serves calls as they come, or answers None, for each kind of array that has it
_compiling = _array.compiling
_dynamo = _array.compiling  # the same, as quickly as it can be asked: the tracer of torch.compile reads this as True


def _quickly(mapping: Any, x: Any, axis: Any, mask: Any, out: Any) -> Array | None:
    """p(x) by an engine that takes the call as it is, if there is one."""
    if _dynamo():
        return None
    quick = _QUICK.get(type(x)) or _learned(x)
    return None if quick is None else quick(mapping, x, axis, mask, out)


def _learned(x: Any) -> Any:
    """The same of a framework whose first array has come; None where x is of no kind that has it."""
    global _compiling, _dynamo
    leaf = bridge(x)
    if type(x) not in leaf.KINDS:
        return None
    quick = leaf.ready()
    if quick is not None:
        _QUICK.update(dict.fromkeys(leaf.KINDS, quick))
    if is_torch(x):
        _compiling, _dynamo = leaf.compiling, leaf.dynamo
    return quick


def log_apply(
    mapping: Mapping, x: ArrayT | Numbers, axis: Axes = None, *, dim: Axes = None, mask: Any = None, dtype: Any = None
) -> ArrayT:
    """log p(x), -inf where p is exactly 0; without underflow where the map has a form of its own for it."""
    axis = pick_axis(axis, dim)
    if sharded(x):
        check_mapping(mapping)
        return by_rows(lambda m, x, mask: log_apply(m, x, axis, mask=mask, dtype=dtype), mapping, x, axis, mask)
    if isinstance(axis, (tuple, list)):
        joined, mapping, mask = join(mapping, x, axis, mask)
        return joined.apart(log_apply(mapping, joined.scores, mask=mask, dtype=dtype))
    x, rows, mapping, axis = prepare(mapping, x, axis, mask, dtype)
    return like_scores(restore_axis(log_rows(mapping, rows), axis), x)


def log_rows(mapping: Mapping, rows: Array) -> Array:
    """log p of rows whose classes are the last axis."""
    out = own_log_rows(mapping, rows)
    if out is not None:
        return out
    xp = namespace(rows)
    p = bridge(rows).apply(mapping, upcast(rows, xp))
    with quiet(p):
        out = _array.log(p, xp)
    return out if out.dtype == rows.dtype else xp.astype(out, rows.dtype)


def own_log_rows(mapping: Mapping, rows: Array) -> Array | None:
    """The same where the map has a form of its own for it, without underflow."""
    out = bridge(rows).log(mapping, rows)
    return reference.log_forward(mapping, rows) if out is None else out


def threshold(
    mapping: Mapping,
    x: Any,
    axis: Axes = None,
    *,
    dim: Axes = None,
    mask: Any = None,
    keepdims: bool = False,
    keepdim: bool = False,
) -> Threshold:
    """The threshold tau of each row and the size of its support.

    `p_i = link(x_i - tau)`: for softmax tau is logsumexp and the link exp, for sparsemax relu, for entmax
    `relu((alpha-1) t)^(1/(alpha-1))`, for budget clip(t, 0, 1); for normmax and sparse softmax tau is the potential.
    keepdims: keep the axis as one of size 1; `keepdim` is another name of it.
    """
    if not isinstance(mapping, Mapping) or not mapping.has_threshold:
        name = mapping.name if isinstance(mapping, Mapping) else repr(mapping)
        raise TypeError(f"{name} has no threshold; softmax, sparsemax, entmax, budget and normmax have one")
    axis, keepdims = pick_axis(axis, dim), keepdims or keepdim
    refuse_sharded("threshold", x)
    if isinstance(axis, (tuple, list)):
        joined, mapping, mask = join(mapping, x, axis, mask)
        found = threshold(mapping, joined.scores, mask=mask, keepdims=keepdims)
        return Threshold(*(joined.apart(v, summed=True) for v in found)) if keepdims else found
    x, rows, mapping, axis = prepare(mapping, x, axis, mask, None)
    xp = namespace(rows)
    tau = _tau(mapping.frozen(), stop_gradient(rows), xp)
    p = bridge(rows).apply(mapping.frozen(), stop_gradient(rows))
    size = _support_size(p, xp)
    tau = tau if tau.dtype == rows.dtype else xp.astype(tau, rows.dtype)
    tau, size = like_scores(restore_axis(tau, axis), x), restore_axis(size, axis)
    return Threshold(tau, size) if keepdims else Threshold(xp.squeeze(tau, axis=axis), xp.squeeze(size, axis=axis))


_COUNTED = 1 << 20  # entries at a time: torch and NumPy make integers of eight bytes of all that they are to count


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


def _tau(mapping: Mapping, rows: Array, xp: Any) -> Array:
    engine = None if _compiling() else kernels.compiled("threshold", mapping, rows)
    if engine is not None:
        return engine.threshold(mapping, rows)
    with quiet(rows):
        return mapping.threshold(upcast(rows, xp), xp)  # type: ignore[attr-defined]


def logsumexp(
    x: ArrayT | Numbers,
    axis: Axes = None,
    *,
    dim: Axes = None,
    temperature: Any = 1.0,
    mask: Any = None,
    keepdims: bool = False,
    keepdim: bool = False,
) -> ArrayT:
    """`T log sum exp(x / T)`, the smooth maximum; its limit as T -> 0 is max(x), which T = 0 gives exactly.

    keepdims: keep the axis as one of size 1; `keepdim` is another name of it.
    """
    temperature = _array.number(temperature)
    if not is_array(temperature):
        if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
            raise TypeError(f"logsumexp: temperature must be a number or an array, got {temperature!r}")
        if not temperature >= 0:
            raise ValueError(f"logsumexp: temperature must not be negative, got {temperature!r}")
    axis, keepdims = pick_axis(axis, dim), keepdims or keepdim
    refuse_sharded("logsumexp", x)
    if isinstance(axis, (tuple, list)):
        joined, _, mask = join(Softmax(), x, axis, mask)
        temperature = joined.beside(temperature, "temperature")
        out = logsumexp(joined.scores, temperature=temperature, mask=mask, keepdims=keepdims)
        return joined.apart(out, summed=True) if keepdims else out
    x, rows, _, axis = prepare(Softmax(), x, axis, mask, None)
    xp = namespace(rows)
    s = upcast(rows, xp)
    plain = not is_array(temperature) and temperature == 1 and not _tracked(rows) and not _compiling()
    out = None
    engine = kernels.compiled("threshold", Softmax(), rows) if plain else None
    if engine is not None:
        out = engine.logsumexp(rows)
    if out is None:
        with quiet(rows):
            out = _smooth_max(s, one_a_row(aligned(temperature, s, axis, "temperature"), "temperature"), xp)
    out = like_scores(restore_axis(out if out.dtype == rows.dtype else xp.astype(out, rows.dtype), axis), x)
    return out if keepdims else xp.squeeze(out, axis=axis)


def _tracked(x: Array) -> bool:
    """True where a gradient is asked for."""
    return is_torch(x) and x.requires_grad and sys.modules["torch"].is_grad_enabled()


def _smooth_max(s: Array, t: Any, xp: Any) -> Array:
    high = _array.top(s, xp)
    tiny = float(xp.finfo(s.dtype).smallest_normal)  # below it 1 / t is infinite: the limit, the maximum
    if not is_array(t) and t < tiny:
        return high
    cold = t < tiny if is_array(t) else None
    t = t if cold is None else _array.safe(t, ~cold, 1.0, xp)
    finite = (high < xp.inf) & (high > -xp.inf)
    anchor = stop_gradient(xp.where(finite, high, xp.zeros_like(high)))
    keep = s > -xp.inf
    below = xp.where(keep, s - anchor, xp.zeros_like(s)) / t
    first = xp.argmax(s, axis=-1, keepdims=True)
    alone = _array.positions(s, first.dtype, xp) == first
    rest = _array.total(xp.where(keep, xp.where(alone, xp.expm1(below), xp.exp(below)), xp.zeros_like(s)), xp)
    smooth = anchor + t * xp.log1p(rest)  # the largest alone would round a small rest away
    return xp.where(finite if cold is None else finite & ~cold, smooth, high)


_APPLY, _LOG_APPLY = names(apply), names(log_apply)
_SOFTMAX, _SPARSEMAX, _ENTMAX15 = Softmax(), Sparsemax(), Entmax(1.5)


@functools.lru_cache(maxsize=256, typed=True)  # 2.0 is no order
def _kept_map(kind: Any, value: Any) -> Mapping:
    return kind(value)


def _made(kind: Any, value: Any) -> Mapping:
    """kind(value); one that is kept where that is a number as calls have it over and over."""
    return _kept_map(kind, value) if type(value) in (float, int) and not _dynamo() else kind(value)


def _sugar(name: str, mapping: Mapping, x: Any, axis: Any, out: Any, options: Any) -> Array:
    """`apply` in the name of a function of its own."""
    if options:
        return apply(mapping, x, axis, out=out, **allowed(name, _APPLY, options))
    if not _dynamo() and (quick := _QUICK.get(type(x))) is not None:
        p = quick(mapping, x, axis, None, out)
        if p is not None:
            return p
    return apply(mapping, x, axis, out=out)


# -- sugar -------------------------------------------------------------------------------------------------------------------


def softmax(x: ArrayT | Numbers, axis: Axes = None, *, out: Any = None, **options: Unpack[LogOptions]) -> ArrayT:
    """`exp(x_i) / sum_j exp(x_j)`; see `Softmax` and, for the options, `apply`."""
    return _sugar("softmax", _SOFTMAX, x, axis, out, options)


def log_softmax(x: ArrayT | Numbers, axis: Axes = None, **options: Unpack[LogOptions]) -> ArrayT:
    """`x_i - logsumexp(x)`."""
    return log_apply(_SOFTMAX, x, axis, **allowed("log_softmax", _LOG_APPLY, options))


def sparsemax(x: ArrayT | Numbers, axis: Axes = None, *, out: Any = None, **options: Unpack[LogOptions]) -> ArrayT:
    """The nearest point of the simplex; see `Sparsemax` and, for the options, `apply`."""
    return _sugar("sparsemax", _SPARSEMAX, x, axis, out, options)


def entmax(
    x: ArrayT | Numbers, alpha: Any = 1.5, axis: Axes = None, *, out: Any = None, **options: Unpack[LogOptions]
) -> ArrayT:
    """alpha-entmax, from softmax (1) to sparsemax (2) and beyond; see `Entmax` and, for the options, `apply`."""
    return _sugar("entmax", _made(Entmax, alpha), x, axis, out, options)


def entmax15(x: ArrayT | Numbers, axis: Axes = None, *, out: Any = None, **options: Unpack[LogOptions]) -> ArrayT:
    """1.5-entmax."""
    return _sugar("entmax15", _ENTMAX15, x, axis, out, options)


def taylor_softmax(x: ArrayT | Numbers, order: int = 2, axis: Axes = None, **options: Unpack[ApplyOptions]) -> ArrayT:
    """exp by its Taylor polynomial of even order; see `Taylor` and, for the options, `apply`."""
    return apply(_made(Taylor, order), x, axis, **allowed("taylor_softmax", _APPLY, options))


def sparse_softmax(
    x: ArrayT | Numbers,
    axis: Axes = None,
    *,
    k: int | None = None,
    p: Any = None,
    out: Any = None,
    **options: Unpack[LogOptions],
) -> ArrayT:
    """Softmax over the k largest scores, or over the nucleus of mass p; see `SparseSoftmax` and `apply`."""
    if options:
        allowed("sparse_softmax", _APPLY, options)  # before the map misses what was meant to be k or p
    mapping = _made(SparseSoftmax, k) if p is None else SparseSoftmax(k=k, p=p)
    return _sugar("sparse_softmax", mapping, x, axis, out, options)


def sigsoftmax(x: ArrayT | Numbers, axis: Axes = None, **options: Unpack[ApplyOptions]) -> ArrayT:
    """`exp(x_i) sigmoid(x_i)`, normalised; see `Sigsoftmax` and, for the options, `apply`."""
    return apply(Sigsoftmax(), x, axis, **allowed("sigsoftmax", _APPLY, options))


def perturb_max(
    x: ArrayT | Numbers,
    noise: Any = "normal",
    axis: Axes = None,
    *,
    nodes: int | None = None,
    scale: Any = 1.0,
    **options: Unpack[ApplyOptions],
) -> ArrayT:
    """P[argmax(x + scale * noise) = i]; see `PerturbMax` and, for the options, `apply`."""
    return apply(PerturbMax(noise, nodes=nodes, scale=scale), x, axis, **allowed("perturb_max", _APPLY, options))


def normmax(x: ArrayT | Numbers, alpha: Any = 2.0, axis: Axes = None, **options: Unpack[ApplyOptions]) -> ArrayT:
    """The map of the alpha-norm; see `NormMax` and, for the options, `apply`."""
    return apply(_made(NormMax, alpha), x, axis, **allowed("normmax", _APPLY, options))


def budget(x: ArrayT | Numbers, k: Any, axis: Axes = None, **options: Unpack[ApplyOptions]) -> ArrayT:
    """k units of probability, at most 1 for each class; see `Budget` and, for the options, `apply`."""
    return apply(_made(Budget, k), x, axis, **allowed("budget", _APPLY, options))


def _store(p: Array, out: Any) -> Array:
    if out is None:
        return p
    tensor = p if is_torch(p) else None
    if tensor is None and not isinstance(p, np.ndarray):
        raise TypeError(f"out: {type(p).__name__} is immutable; out= is for NumPy arrays and torch tensors")
    if type(_array.in_memory(out, "out")) is not type(p):
        raise TypeError(f"out: expected a writable {type(p).__name__}, got {type(out).__name__}")
    if tuple(out.shape) != tuple(p.shape) or out.dtype != p.dtype:
        raise ValueError(f"out: expected shape {tuple(p.shape)} and {p.dtype}, got {tuple(out.shape)} and {out.dtype}")
    if tensor is not None:
        if tensor.requires_grad:
            raise ValueError("out= can't be used where a gradient is asked for; call it under torch.no_grad()")
        return out.copy_(tensor)
    out[...] = p
    return out
