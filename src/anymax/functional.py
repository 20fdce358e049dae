"""`apply(mapping, x)`, and one line of sugar for each map."""

from __future__ import annotations

import functools
import math
import sys
from typing import Any, NamedTuple

import numpy as np

from . import _array, kernels
from ._array import (
    Array,
    asarray,
    check_axis,
    floating,
    from_last,
    is_array,
    is_torch,
    namespace,
    pick_axis,
    quiet,
    stop_gradient,
    to_last,
    torch_loaded,
    upcast,
)
from ._axes import Axes, Joined
from ._mapping import Mapping, one_a_row
from ._options import allowed, names
from ._shards import by_rows, sharded
from ._shards import refuse as refuse_sharded
from .autodiff import bridge, plain
from .kernels import reference, short
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
    x: Any,
    axis: Axes = None,
    *,
    dim: Axes = None,
    mask: Any = None,
    out: Any = None,
    dtype: Any = None,
) -> Array:
    """p(x): the probabilities of a map, along one axis, as an array of the caller's kind and dtype.

    axis: the axis of the classes, the last by default, or a tuple of axes whose entries are one row; `dim` is another name of it.
    mask: boolean, broadcastable to x, True = keep; a masked class has probability 0, a row without classes is all 0.
    out: an array to write the result to (NumPy, torch), where no gradient is asked for.
    dtype: cast the scores first, as in `torch.softmax`.
    """
    if (
        mask is None
        and dtype is None
        and (axis is None or dim is None)
        and (axis is dim or _is_last(x, dim if axis is None else axis, None))
        and (link := _short(mapping)) is not None
    ):
        quick = _QUICK.get(type(x)) or _learned(x)
        p = None if quick is None else quick(link, x, out)
        if p is not None:
            return p
    axis = pick_axis(axis, dim)
    if sharded(x):
        _check_mapping(mapping)
        p = by_rows(lambda m, x, mask: apply(m, x, axis, mask=mask, dtype=dtype), mapping, x, axis, mask)
        return _store(p, out)
    if isinstance(axis, (tuple, list)):
        joined, mapping, mask = _join(mapping, x, axis, mask)
        return _store(joined.apart(apply(mapping, joined.scores, mask=mask, dtype=dtype)), out)
    x, rows, mapping, axis, keep = _split(mapping, x, axis, mask, dtype)
    leaf = bridge(rows)
    if keep is not None and not (hasattr(leaf, "masks") and leaf.masks(mapping, rows)):
        rows, keep = _hide(rows, keep), None
    to = _array.in_memory(out, "out")
    engine = None if to is None or rows.dtype != x.dtype else _writer(to, rows, axis, mapping, keep)
    if engine is not None:
        engine.forward(mapping, rows, keep, to_last(to, axis, namespace(rows)))
        return leaf.wrote(out) if is_torch(out) else out
    p = leaf.apply(mapping, rows) if keep is None else leaf.apply(mapping, rows, keep)
    return _store(_like(_restore_axis(p, axis), x), out)


def _like(out: Array, x: Array) -> Array:
    """In the dtype of the scores: rows of 8 bits are fp32 all the way, and rounded once, here."""
    return namespace(x).astype(out, x.dtype) if _array.narrow(x) else out


_QUICK: dict[type, Any] = {np.ndarray: plain.quick}  # the short way of each kind of array that has one
_compiling = _array.compiling


def _short(mapping: Any) -> Any:
    if _compiling() or not isinstance(mapping, Mapping) or mapping.params():
        return None
    return short.link(mapping)


def _is_last(x: Any, axis: Any, options: Any) -> bool:
    """True where a call asks for the last axis by number, under either name, and for nothing else."""
    if options:
        if axis is not None or len(options) > 1 or "dim" not in options:
            return False
        axis = options["dim"]
    return type(axis) is int and (axis == -1 or axis == getattr(x, "ndim", 0) - 1)


def _learned(x: Any) -> Any:
    """The short way of a framework whose first array has come; None where x is of no kind that has one."""
    global _compiling
    leaf = bridge(x)
    if type(x) not in leaf.KINDS:
        return None
    _QUICK.update(dict.fromkeys(leaf.KINDS, leaf.quick))
    _compiling = getattr(leaf, "compiling", _compiling)
    return leaf.quick


def _writer(out: Any, rows: Array, axis: int, mapping: Mapping, keep: Array | None) -> Any:
    """The compiled engine that can write to `out` itself, if any: no gradient, same kind, shape and dtype, no partial overlap."""
    if type(out) is not type(rows) or out.dtype != rows.dtype or not isinstance(out, (np.ndarray, *_tensor())):
        return None
    xp = namespace(rows)
    if tuple(out.shape) != tuple(from_last(rows, axis, xp).shape) or math.prod(out.shape) == 0:
        return None
    if is_torch(out) and (_tracked(rows) or _tracked(out) or out.device != rows.device or _closed(out)):
        return None
    engine = kernels.choose("forward", mapping, rows)
    if engine not in kernels.COMPILED or engine.refuse("forward", mapping, out) is not None:
        return None
    turned = to_last(out, axis, xp)
    (place, *_), steps = _span(turned), _strides(turned)
    dense = 0 not in [s for s, n in zip(steps, turned.shape) if n > 1]
    if not dense or not (is_torch(out) or out.flags.writeable):
        return None
    same = place == _span(rows)[0] and steps == _strides(rows)
    read = [a for a in (keep, *mapping.params().values()) if type(a) is type(out)]
    return engine if all(_apart(out, a) for a in (read if same else [rows, *read])) else None


def _closed(out: Array) -> bool:
    """True for a tensor of inference mode outside of it, whose refusal torch words itself."""
    return out.is_inference() and not sys.modules["torch"].is_inference_mode_enabled()


def _strides(a: Array) -> tuple[int, ...]:
    return tuple(a.stride()) if is_torch(a) else a.strides


def _span(a: Array) -> tuple[int, int, int]:
    """The address of the first entry, of the lowest, and the end of the highest. Two storages of torch may be one piece of memory."""
    place, size = (a.data_ptr(), a.element_size()) if is_torch(a) else (a.ctypes.data, a.itemsize)
    unit = size if is_torch(a) else 1
    reach = [(n - 1) * s * unit for n, s in zip(a.shape, _strides(a))] if math.prod(a.shape) else []
    return place, place + sum(r for r in reach if r < 0), place + sum(r for r in reach if r > 0) + size


def _apart(a: Array, b: Array) -> bool:
    _, low, high = _span(a)
    _, other_low, other_high = _span(b)
    return high <= other_low or other_high <= low


def _tensor() -> tuple[type, ...]:
    torch = torch_loaded()
    return () if torch is None else (torch.Tensor,)


def log_apply(
    mapping: Mapping, x: Any, axis: Axes = None, *, dim: Axes = None, mask: Any = None, dtype: Any = None
) -> Array:
    """log p(x), -inf where p is exactly 0; without underflow where the map has a form of its own for it."""
    axis = pick_axis(axis, dim)
    if sharded(x):
        _check_mapping(mapping)
        return by_rows(lambda m, x, mask: log_apply(m, x, axis, mask=mask, dtype=dtype), mapping, x, axis, mask)
    if isinstance(axis, (tuple, list)):
        joined, mapping, mask = _join(mapping, x, axis, mask)
        return joined.apart(log_apply(mapping, joined.scores, mask=mask, dtype=dtype))
    x, rows, mapping, axis = prepare(mapping, x, axis, mask, dtype)
    return _like(_restore_axis(log_rows(mapping, rows), axis), x)


def log_rows(mapping: Mapping, rows: Array) -> Array:
    """log p of rows whose classes are the last axis."""
    leaf = bridge(rows)
    out = leaf.log(mapping, rows) if hasattr(leaf, "log") else None
    out = reference.log_forward(mapping, rows) if out is None else out
    if out is not None:
        return out
    xp = namespace(rows)
    p = bridge(rows).apply(mapping, upcast(rows, xp))
    with quiet(p):
        out = _array.log(p, xp)
    return out if out.dtype == rows.dtype else xp.astype(out, rows.dtype)


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
    if not hasattr(mapping, "threshold"):
        raise TypeError(f"{_name(mapping)} has no threshold; softmax, sparsemax, entmax, budget and normmax have one")
    axis, keepdims = pick_axis(axis, dim), keepdims or keepdim
    refuse_sharded("threshold", x)
    if isinstance(axis, (tuple, list)):
        joined, mapping, mask = _join(mapping, x, axis, mask)
        found = threshold(mapping, joined.scores, mask=mask, keepdims=keepdims)
        return Threshold(*(joined.apart(v, summed=True) for v in found)) if keepdims else found
    x, rows, mapping, axis = prepare(mapping, x, axis, mask, None)
    xp = namespace(rows)
    tau = _tau(mapping.frozen(), stop_gradient(rows), xp)
    p = bridge(rows).apply(mapping.frozen(), stop_gradient(rows))
    size = _support_size(p, xp)
    tau = tau if tau.dtype == rows.dtype else xp.astype(tau, rows.dtype)
    tau, size = _like(_restore_axis(tau, axis), x), _restore_axis(size, axis)
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
    x: Any,
    axis: Axes = None,
    *,
    dim: Axes = None,
    temperature: Any = 1.0,
    mask: Any = None,
    keepdims: bool = False,
    keepdim: bool = False,
) -> Array:
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
        joined, _, mask = _join(Softmax(), x, axis, mask)
        temperature = joined.beside(temperature, "temperature")
        out = logsumexp(joined.scores, temperature=temperature, mask=mask, keepdims=keepdims)
        return joined.apart(out, summed=True) if keepdims else out
    x, rows, _, axis = prepare(Softmax(), x, axis, mask, None)
    xp = namespace(rows)
    s = upcast(rows, xp)
    plain = not is_array(temperature) and temperature == 1 and not _tracked(rows) and not _compiling()
    out = None
    engine = kernels.compiled("threshold", Softmax(), rows) if plain else None
    if engine is not None and hasattr(engine, "logsumexp"):
        out = engine.logsumexp(rows)
    elif engine is not None:
        out = engine.threshold(Softmax(), rows)
        if bool(xp.any(xp.isnan(out))):  # the threshold of a row with +inf is NaN, its logsumexp +inf
            out = xp.where(xp.isnan(out), _array.top(s, xp), out)
    if out is None:
        with quiet(rows):
            out = _smooth_max(s, one_a_row(_aligned(temperature, s, axis, "temperature"), "temperature"), xp)
    out = _like(_restore_axis(out if out.dtype == rows.dtype else xp.astype(out, rows.dtype), axis), x)
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
_SOFTMAX, _SPARSEMAX, _ENTMAX15 = (short.link(m) for m in (Softmax(), Sparsemax(), Entmax(1.5)))


@functools.lru_cache(maxsize=256)
def _entmax(alpha: float) -> Any:
    return short.link(Entmax(alpha))


_TOPK: dict[int, Any] = {}  # of each k; quicker to ask than a cache of functools


def _topk(k: int) -> Any:
    link = short.link(SparseSoftmax(k=k))
    if len(_TOPK) < 1024:
        _TOPK[k] = link
    return link


# -- sugar -------------------------------------------------------------------------------------------------------------------


def softmax(x: Any, axis: Axes = None, *, out: Any = None, **options: Any) -> Array:
    """`exp(x_i) / sum_j exp(x_j)`; see `Softmax` and, for the options, `apply`."""
    if (
        ((axis is None and not options) or _is_last(x, axis, options))
        and not _compiling()
        and (quick := _QUICK.get(type(x))) is not None
    ):
        p = quick(_SOFTMAX, x, out)
        if p is not None:
            return p
    return apply(Softmax(), x, axis, out=out, **allowed("softmax", _APPLY, options))


def log_softmax(x: Any, axis: Axes = None, **options: Any) -> Array:
    """`x_i - logsumexp(x)`."""
    return log_apply(Softmax(), x, axis, **allowed("log_softmax", _LOG_APPLY, options))


def sparsemax(x: Any, axis: Axes = None, *, out: Any = None, **options: Any) -> Array:
    """The nearest point of the simplex; see `Sparsemax` and, for the options, `apply`."""
    if (
        ((axis is None and not options) or _is_last(x, axis, options))
        and not _compiling()
        and (quick := _QUICK.get(type(x))) is not None
    ):
        p = quick(_SPARSEMAX, x, out)
        if p is not None:
            return p
    return apply(Sparsemax(), x, axis, out=out, **allowed("sparsemax", _APPLY, options))


def entmax(x: Any, alpha: Any = 1.5, axis: Axes = None, *, out: Any = None, **options: Any) -> Array:
    """alpha-entmax, from softmax (1) to sparsemax (2) and beyond; see `Entmax` and, for the options, `apply`."""
    if (
        ((axis is None and not options) or _is_last(x, axis, options))
        and type(alpha) is float
        and not _compiling()
        and (quick := _QUICK.get(type(x))) is not None
        and (link := _entmax(alpha)) is not None
    ):
        p = quick(link, x, out)
        if p is not None:
            return p
    return apply(Entmax(alpha), x, axis, out=out, **allowed("entmax", _APPLY, options))


def entmax15(x: Any, axis: Axes = None, *, out: Any = None, **options: Any) -> Array:
    """1.5-entmax."""
    if (
        ((axis is None and not options) or _is_last(x, axis, options))
        and not _compiling()
        and (quick := _QUICK.get(type(x))) is not None
    ):
        p = quick(_ENTMAX15, x, out)
        if p is not None:
            return p
    return apply(Entmax(1.5), x, axis, out=out, **allowed("entmax15", _APPLY, options))


def taylor_softmax(x: Any, order: int = 2, axis: Axes = None, **options: Any) -> Array:
    """exp by its Taylor polynomial of even order; see `Taylor` and, for the options, `apply`."""
    return apply(Taylor(order), x, axis, **allowed("taylor_softmax", _APPLY, options))


def sparse_softmax(
    x: Any, axis: Axes = None, *, k: int | None = None, p: Any = None, out: Any = None, **options: Any
) -> Array:
    """Softmax over the k largest scores, or over the nucleus of mass p; see `SparseSoftmax` and `apply`."""
    if (
        ((axis is None and not options) or _is_last(x, axis, options))
        and p is None
        and type(k) is int
        and not _compiling()
        and (quick := _QUICK.get(type(x))) is not None
        and (link := _TOPK.get(k) or _topk(k)) is not None
    ):
        q = quick(link, x, out)
        if q is not None:
            return q
    options = allowed("sparse_softmax", _APPLY, options)
    return apply(SparseSoftmax(k=k, p=p), x, axis, out=out, **options)


def sigsoftmax(x: Any, axis: Axes = None, **options: Any) -> Array:
    """`exp(x_i) sigmoid(x_i)`, normalised; see `Sigsoftmax` and, for the options, `apply`."""
    return apply(Sigsoftmax(), x, axis, **allowed("sigsoftmax", _APPLY, options))


def perturb_max(
    x: Any,
    noise: Any = "normal",
    axis: Axes = None,
    *,
    nodes: int | None = None,
    scale: Any = 1.0,
    **options: Any,
) -> Array:
    """P[argmax(x + scale * noise) = i]; see `PerturbMax` and, for the options, `apply`."""
    return apply(PerturbMax(noise, nodes=nodes, scale=scale), x, axis, **allowed("perturb_max", _APPLY, options))


def normmax(x: Any, alpha: Any = 2.0, axis: Axes = None, **options: Any) -> Array:
    """The map of the alpha-norm; see `NormMax` and, for the options, `apply`."""
    return apply(NormMax(alpha), x, axis, **allowed("normmax", _APPLY, options))


def budget(x: Any, k: Any, axis: Axes = None, **options: Any) -> Array:
    """k units of probability, at most 1 for each class; see `Budget` and, for the options, `apply`."""
    return apply(Budget(k), x, axis, **allowed("budget", _APPLY, options))


# -- axes, masks and dtypes, once for every verb ---------------------------------------------------------------------------------


def _join(mapping: Mapping, x: Any, axes: Any, mask: Any) -> tuple[Joined, Mapping, Any]:
    """The scores, the mapping and the mask for rows along several axes, which become the last."""
    _check_mapping(mapping)
    joined = Joined.of(x, axes)
    params = {name: joined.beside(v, f"{mapping.name}: {name}") for name, v in mapping.params().items() if v.ndim}
    mapping = mapping.replace(**params) if params else mapping
    return joined, mapping, None if mask is None else joined.beside(asarray(mask, "mask"), "mask")


def prepare(mapping: Mapping, x: Any, axis: int, mask: Any, dtype: Any) -> tuple[Array, Array, Mapping, int]:
    """(scores, rows with the classes last and masked, the mapping aligned to them, axis >= 0)."""
    x, rows, mapping, axis, keep = _split(mapping, x, axis, mask, dtype)
    return x, rows if keep is None else _hide(rows, keep), mapping, axis


def _split(
    mapping: Mapping, x: Any, axis: int, mask: Any, dtype: Any
) -> tuple[Array, Array, Mapping, int, Array | None]:
    """The same with the mask beside the rows, broadcastable to them."""
    _check_mapping(mapping)
    x = asarray(x)
    xp = namespace(x)
    if dtype is not None:
        x = xp.astype(x, dtype)
        if not _array.is_floating(x):
            raise TypeError(f"dtype: expected a floating-point dtype, got {dtype!r}")
    x = floating(x, xp)
    if x.ndim == 0:
        raise ValueError("scores: expected at least one dimension, the classes, got a 0-d array")
    axis = check_axis(axis, x.ndim)
    n = x.shape[axis]
    if n == 0:
        raise ValueError(f"scores of shape {tuple(x.shape)} have no classes along axis {axis}; at least one is needed")
    mapping.check(n)
    rows = to_last(upcast(x, xp) if _array.narrow(x) else x, axis, xp)
    keep = None
    if mask is not None:
        keep = asarray(mask, "mask") if not is_torch(x) or is_array(mask) else xp.asarray(mask, device=x.device)
        keep = _kept(rows, keep, axis, xp)
    params = mapping.params()
    if params:
        mapping = mapping.replace(**{k: _aligned(v, rows, axis, f"{mapping.name}: {k}") for k, v in params.items()})
        for k, v in mapping.params().items():
            mapping.check_width(k, v)
    return x, rows, mapping, axis, keep


def _check_mapping(mapping: Any) -> None:
    if not isinstance(mapping, Mapping):
        got = f"{type(mapping).__name__} of shape {tuple(mapping.shape)}" if is_array(mapping) else repr(mapping)
        raise TypeError(f"expected a mapping such as anymax.Sparsemax() as the first argument, got {got}")


def _kept(rows: Array, mask: Array, axis: int, xp: Any) -> Array:
    if str(mask.dtype).rsplit(".", 1)[-1].strip("'<>") not in ("bool", "bool_"):
        raise TypeError(
            f"mask: expected a boolean array, True = keep, got {mask.dtype}; for additive masks, add them to the scores"
        )
    if not is_torch(mask) and type(mask) is not type(rows):
        mask = _array.adopt(mask, rows, xp)
    return _to_rows(mask, rows, axis, "mask", xp)


def mask_rows(rows: Array, mask: Array, axis: int, xp: Any) -> Array:
    return _hide(rows, _kept(rows, mask, axis, xp))


def _hide(rows: Array, keep: Array) -> Array:
    xp = namespace(rows)
    return xp.where(keep, rows, -xp.inf * xp.ones_like(rows))


def _aligned(value: Any, rows: Array, axis: int, name: str) -> Any:
    """A parameter in the layout and dtype of the rows."""
    if not is_array(value):
        return value
    if value.ndim == 0:  # of NumPy: a number; else the array itself, which every dtype adopts
        return value.item() if isinstance(value, np.ndarray) else value
    xp = namespace(rows)
    value = _array.like(value, upcast(rows[..., :1], xp), xp)  # not in half precision
    return _to_rows(value, rows, axis, name, xp)


def _to_rows(value: Array, rows: Array, axis: int, name: str, xp: Any) -> Array:
    """`value`, broadcastable against the scores, with the class axis moved to the end as in the rows."""
    shape = list(rows.shape)
    shape.insert(axis, shape.pop())
    given = (1,) * (rows.ndim - value.ndim) + tuple(value.shape)
    if value.ndim > rows.ndim or any(a != 1 and a != b for a, b in zip(given, shape, strict=True)):
        hint = "" if value.ndim != 1 else f"; one value for each row has shape {(*value.shape, 1)}"
        raise ValueError(
            f"{name} of shape {tuple(value.shape)} does not broadcast to scores of shape {tuple(shape)}{hint}"
        )
    value = xp.reshape(value, given) if value.ndim < rows.ndim else value
    return to_last(value, axis, xp)


def _restore_axis(rows: Array, axis: int) -> Array:
    return from_last(rows, axis, namespace(rows))


def _store(p: Array, out: Any) -> Array:
    if out is None:
        return p
    if not (is_torch(p) or hasattr(p, "flags")):
        raise TypeError(f"out: {type(p).__name__} is immutable; out= is for NumPy arrays and torch tensors")
    if type(_array.in_memory(out, "out")) is not type(p):
        raise TypeError(f"out: expected a writable {type(p).__name__}, got {type(out).__name__}")
    if tuple(out.shape) != tuple(p.shape) or out.dtype != p.dtype:
        raise ValueError(f"out: expected shape {tuple(p.shape)} and {p.dtype}, got {tuple(out.shape)} and {out.dtype}")
    if is_torch(p):
        if p.requires_grad:
            raise ValueError("out= can't be used where a gradient is asked for; call it under torch.no_grad()")
        return out.copy_(p)
    out[...] = p
    return out


def _name(mapping: Any) -> str:
    return mapping.name if isinstance(mapping, Mapping) else repr(mapping)
