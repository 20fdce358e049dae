"""A teacher whose k largest log-probabilities are known, and the divergence of a student from it."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, get_args

from .. import _array
from .._array import (
    Array,
    Namespace,
    as_dtype,
    counts,
    is_floating,
    is_integer,
    known,
    known_any,
    quiet,
    stop_gradient,
    to_last,
    total,
)
from .._core.classes import refuse_strays
from .._core.rows import hide
from .terms import divergences

Tail = Literal["ignore", "one class"]
Direction = Literal["forward", "reverse"]


class Teacher(NamedTuple):
    """The teacher's classes and their log-probabilities, [..., k], and what becomes of its other classes."""

    who: str  # the function that is called, for errors
    ids: Array  # -1 where a row has fewer
    log_p: Array
    tail: Tail
    direction: Direction

    @classmethod
    def read(
        cls, who: str, rows: Array, lead: tuple[int, ...], n: int, axis: int, ids: Any, log_p: Any, tail: Any, direction: Any,
        xp: Namespace,
    ) -> Teacher:  # fmt: skip
        """rows: an array of the student's kind and device. Its scores have n classes at `axis` and, without them, the shape `lead`."""
        _one_of(who, "tail", tail, Tail)
        check_direction(who, direction)
        ids, t = (_array.beside(a, rows, name, xp) for a, name in ((ids, "ids"), (log_p, "teacher_log_p")))
        if not is_integer(ids) or not is_floating(t):
            raise TypeError(
                f"{who}: ids must be integers, the teacher's classes, and teacher_log_p floating-point numbers, got {ids.dtype} and "
                f"{t.dtype}"
            )
        ndim = len(lead) + 1
        axis = _array.check_axis(axis, ndim)
        if tuple(ids.shape) != tuple(t.shape) or ids.ndim != ndim or not ids.shape[axis]:
            raise ValueError(
                f"{who}: ids and teacher_log_p must have one shape, that of the scores with k in the place of the classes; got "
                f"{tuple(ids.shape)} and {tuple(t.shape)}"
            )
        ids, t = counts(to_last(ids, axis, xp), xp), to_last(t, axis, xp)
        if tuple(ids.shape[:-1]) != lead:
            raise ValueError(
                f"{who}: ids of shape {tuple(ids.shape)} (k last) does not belong to scores of shape {(*lead, n)} (classes last)"
            )
        refuse_strays(f"{who}: ids", ids, n, None, xp)
        _refuse_twice(who, ids, xp)
        return cls(who, ids, t, tail, direction)

    @property
    def needs_rest(self) -> bool:
        """Whether the divergence needs the student's log p of all other classes together."""
        return self.tail == "one class"

    def of_columns(self, columns: Array, xp: Namespace) -> Array:
        """`divergence` from the student's terms side by side, as `Terms.columns` gives them."""
        k = self.ids.shape[-1]
        return self.divergence(columns[..., :k], columns[..., k:] if self.needs_rest else None, xp)

    def divergence(self, student: Array, rest: Array | None, xp: Namespace) -> Array:
        """The divergence [...] of a student from its log-probabilities of the teacher's classes, [..., k], and of all others, [..., 1]."""
        with quiet(student):
            dtype, t = self.log_p.dtype, as_dtype(self.log_p, student.dtype, xp)
            there = self.ids >= 0
            t = hide(t, there)
            sums, noise = total(xp.exp(t), xp), _noise_of_sum(t, dtype, xp)
            if known_any((t > 1e-3) | (sums > 1.01 + noise), xp):
                raise ValueError(
                    f"{self.who}: teacher_log_p: expected log-probabilities, at most 0, whose exponentials sum to at most 1 in each row; "
                    f"the largest sum is {float(xp.max(stop_gradient(sums))):g}"
                )
            reverse = self.direction == "reverse"
            if reverse:
                value = total(divergences(hide(student, there), t, xp), xp)
            else:
                value = total(divergences(t, student, xp), xp)
            if rest is not None:
                others = 1.0 - sums
                # the student has a tail, so that the teacher's must not be empty: it is at least the rounding error
                if reverse:
                    others = xp.where(others > noise, others, noise)
                    value = value + divergences(rest, xp.log(others), xp)
                else:  # if the teacher gives all classes, `others` is 0
                    others = xp.where(others > noise, others, xp.zeros_like(others))
                    value = value + divergences(_array.log(others, xp), rest, xp)
        return _array.as_scalar(value[..., 0])


def check_direction(who: str, direction: Any) -> None:
    _one_of(who, "direction", direction, Direction)


def _one_of(who: str, name: str, value: Any, allowed: Any) -> None:
    if value not in get_args(allowed):
        raise ValueError(f"{who}: {name} must be {' or '.join(map(repr, get_args(allowed)))}, got {value!r}")


def _noise_of_sum(log_p: Array, dtype: Any, xp: Namespace) -> Array:
    """The rounding error that the sum of p can have if log p [..., m] was rounded to `dtype`: p changes by p |log p| times the relative
    error of log p, which is half an eps."""
    log_p = stop_gradient(log_p)
    eps = float(xp.finfo(log_p.dtype).eps)
    dtype_eps = max(eps, float(xp.finfo(dtype).eps))
    return (
        0.5 * dtype_eps * -total(xp.where(log_p > -math.inf, xp.exp(log_p) * log_p, xp.zeros_like(log_p)), xp)
        + 16.0 * eps
    )


def _refuse_twice(who: str, ids: Array, xp: Namespace) -> None:
    if not known(ids) or ids.shape[-1] < 2 or not math.prod(ids.shape):
        return
    ordered = xp.sort(ids, axis=-1)
    if known_any((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0), xp):
        raise ValueError(f"{who}: ids: a row names a class twice; give each class once, and -1 where a row has fewer")
