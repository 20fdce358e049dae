"""Checks that q, k and v fit together, and that the other arrays fit them, for every kind of attention."""

from __future__ import annotations

from typing import Any, NamedTuple

from .._array import (
    Array,
    beside,
    check_scalar,
    dense,
    device_of,
    dtype_name,
    fit_axes,
    framework,
    is_array,
    is_floating,
    is_integer,
    like,
    namespace,
    narrow,
    upcast,
)


def check(who: str, q: Array, k: Array, v: Array, enable_gqa: bool) -> tuple[int, tuple[int, ...]]:
    """The number of heads of q that share one head of k and v, and the shape of the scores."""
    for name, a in (("q", q), ("k", k), ("v", v)):
        dense_array(who, name, a, "pad it and say lengths=")
        if a.ndim < 2:
            raise ValueError(
                f"{who}: {name} needs at least two dimensions, [..., length, features], got {tuple(a.shape)}"
            )
    one_framework(who, q, k, v)
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"{who}: q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if not is_floating(q) or narrow(q):
        raise TypeError(
            f"{who}: q, k and v must be real floating-point arrays of 16 bits or more, got {q.dtype}; convert them first"
        )
    if not device_of(q) == device_of(k) == device_of(v):
        raise ValueError(f"{who}: q, k and v must be on one device, got {q.device}, {k.device} and {v.device}")
    same_features(who, q, k)
    same_length(who, k, v)
    groups = _groups(who, q, k, v) if enable_gqa else 1
    shape = _scores_shape(who, q, k, groups)
    _check_values(who, v, shape, groups)
    return groups, shape


def one_framework(who: str, q: Array, k: Array, v: Array) -> None:
    if type(q) is type(k) is type(v):
        return
    kinds = [framework(a) for a in (q, k, v)]
    if len({*kinds}) > 1:
        raise TypeError(
            f"{who}: q, k and v must be of one framework, got arrays of {kinds[0]}, {kinds[1]} and {kinds[2]}"
        )


def same_features(who: str, q: Array, k: Array) -> None:
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"{who}: q has {q.shape[-1]} features and k has {k.shape[-1]}; they must agree")


def same_length(who: str, k: Array, v: Array) -> None:
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"{who}: k has length {k.shape[-2]} and v has {v.shape[-2]}; they must agree")


def check_dropout(who: str, name: str, value: Any) -> float:
    """The share of the weights that are dropped, if it is one."""
    return check_scalar(f"{who}: {name}", value, lambda v: 0.0 <= v < 1.0, "a number of at least 0 and below 1")


def dense_array(who: str, name: str, a: Any, instead: str) -> Array:
    """An operand, if it is an array; an error that says what to do `instead` if it is sparse or nested."""
    if not is_array(a):
        hint = f"; give numpy.asarray({name})" if isinstance(a, (list, tuple)) else ""
        raise TypeError(f"{who}: {name} must be an array, got {type(a).__name__}{hint}")
    return dense(a, f"{who}: {name}", instead)


def _groups(who: str, q: Array, k: Array, v: Array) -> int:
    heads = [a.shape[-3] if a.ndim > 2 else 0 for a in (q, k, v)]
    if 0 in heads or heads[0] % heads[1] or heads[1] != heads[2]:
        raise ValueError(
            f"{who}: with enable_gqa the heads of q must be a multiple of those of k and v, got "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    return heads[0] // heads[1]


def _scores_shape(who: str, q: Array, k: Array, groups: int) -> tuple[int, ...]:
    a, b = list(q.shape[:-2]), list(k.shape[:-2])
    if groups > 1:
        b[-1] = a[-1]
    if a == b:
        return (*a, q.shape[-2], k.shape[-2])
    rank = max(len(a), len(b))
    a, b = [1] * (rank - len(a)) + a, [1] * (rank - len(b)) + b
    if any(m != n and 1 not in (m, n) for m, n in zip(a, b)):
        hint = "; with fewer heads of k and v, say enable_gqa=True" if a[:-1] == b[:-1] else ""
        raise ValueError(f"{who}: q of shape {tuple(q.shape)} and k of shape {tuple(k.shape)} do not broadcast{hint}")
    return (*(n if m == 1 else m for m, n in zip(a, b)), q.shape[-2], k.shape[-2])


def _check_values(who: str, v: Array, shape: tuple[int, ...], groups: int) -> None:
    lead = list(shape[:-2])
    if groups > 1:
        lead[-1] //= groups
    if lead != list(v.shape[:-2]):
        fit_axes(v, (*lead, *v.shape[-2:]), f"{who}: v", f", as scores of shape {shape} need it", "")


# -- arrays beside them -----------------------------------------------------------------------------------------------------


class Fitting(NamedTuple):
    """Fits the other arrays of a call to its scores: to the framework and device of q, and to the axes of the scores."""

    who: str
    q: Array
    shape: tuple[int, ...]  # [..., heads, queries, keys]

    @property
    def heads(self) -> int:
        return self.shape[-3] if len(self.shape) > 2 else 1

    def array(self, value: Any, name: str) -> Array:
        """`value`, on the device of q, with the axes of the scores."""
        value = beside(value, self.q, name, namespace(self.q))
        return fit_axes(value, self.shape, f"{self.who}: {name}")

    def real(self, value: Any, name: str) -> Array:
        """Real numbers in the dtype of the scores."""
        xp = namespace(self.q)
        value = beside(value, self.q, name, xp)
        if is_integer(value):
            value = xp.astype(value, self.q.dtype)
        if not is_floating(value):
            raise TypeError(f"{self.who}: {name} must be real, got {dtype_name(value)}")
        return like(self.array(value, name), upcast(self.q[..., :0], xp), xp)

    def by_head(self, value: Any, name: str) -> Array:
        """One number for each head, [heads], or for each head of each batch, [..., heads], with the axes of the scores."""
        xp = namespace(self.q)
        value = beside(value, self.q, name, xp)
        each = self.shape[:-2] or (1,)
        if value.ndim > len(each) or any(a != 1 and a != b for a, b in zip(value.shape[::-1], each[::-1])):
            of_batch = f", or for each head of each batch, shape {each}" if len(each) > 1 else ""
            raise ValueError(
                f"{self.who}: {name} must have one number for each head, shape ({self.heads},){of_batch}, got {tuple(value.shape)}"
            )
        return self.real(xp.reshape(value, (*value.shape, 1, 1) if len(self.shape) > 2 else (1, 1)), name)

    def by_query(self, value: Any, name: str) -> Array:
        """One number for each head, [heads], or with the axes of the scores one for each query, [..., heads or 1, queries or 1, 1]."""
        value = beside(value, self.q, name, namespace(self.q))
        if value.ndim <= 1:
            return self.by_head(value, name)
        if value.ndim > len(self.shape) or value.shape[-1] != 1:
            raise ValueError(
                f"{self.who}: {name} must have one number for each head, shape ({self.heads},), or for each query, shape "
                f"{(*self.shape[:-1], 1)}, got {tuple(value.shape)}"
            )
        return self.real(value, name)

    def by_batch(self, value: Any, name: str) -> Array:
        """One integer for each batch, as [..., 1, 1, 1]."""
        xp = namespace(self.q)
        value = beside(value, self.q, name, xp)
        if not is_integer(value):
            raise TypeError(f"{self.who}: {name} must be integers, got {dtype_name(value)}")
        batch, lead = self.shape[:-3], tuple(value.shape)
        if len(lead) > len(batch) or any(a != 1 and a != b for a, b in zip(lead, batch[len(batch) - len(lead) :])):
            raise ValueError(
                f"{self.who}: {name} must have one number for each batch, shape {batch}, or be a single one, got shape {lead}"
            )
        tail = min(3, len(self.shape)) if lead else len(self.shape)
        return self.array(xp.reshape(value, (*lead, *(1,) * tail)), name)
