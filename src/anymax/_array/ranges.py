"""The range of a parameter: one rule for numbers and arrays, in every map, transform, loss and option.

A parameter out of its range is an error where its values can be read (`readable`), and NaN where they can't be. They can be read if it is a
number, an array of NumPy, or a tensor or JAX array on the CPU that no compiler or function transform traces. Under torch.compile,
torch.export, torch.vmap, jax.jit and jax.vmap, with fake tensors, and on a GPU, where reading would wait for the device, nothing is read:
the rows whose own parameter is out of range are NaN, and the others are as always.

A map or a transform reads its parameters once, when it is made. Where one changes in place later, as a learned parameter does in a step of
an optimizer, a call gives NaN, or an error if the values are read in it anyway; never a number. NaN is out of every range.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from .convert import asarray, is_number, number, shown
from .dtypes import dtype_name, floating, is_floating, is_integer
from .kinds import Array, is_array, is_jax, is_torch, namespace
from .tracing import compiling, decides, eager, on_cpu, plain_number, stop_gradient


class Range(NamedTuple):
    """The numbers that a parameter may be, from `low` to `high`; an end itself only if it is `closed`."""

    low: float
    high: float
    closed: str = ""  # "low", "high" or "both": these ends are in the range
    whole: bool = False  # True if it must be a whole number, too

    def holds(self, value: Any) -> Any:
        """True where numbers of an array are in the range; NaN is in none."""
        above = value >= self.low if self.closed in ("low", "both") else value > self.low
        below = value <= self.high if self.closed in ("high", "both") else value < self.high
        ok = above & below
        return ok & (value == namespace(value).floor(value)) if self.whole else ok

    def has(self, value: float) -> bool:
        """True if the number is in the range. torch.compile(dynamic=True) makes a symbol of it, which can only be compared."""
        above = value >= self.low if self.closed in ("low", "both") else value > self.low
        below = value <= self.high if self.closed in ("high", "both") else value < self.high
        return above and below and (not self.whole or value == math.floor(value))

    @property
    def words(self) -> str:
        """What the number must be, to be said after "must be"."""
        low, high, low_in, high_in = (
            self.low,
            self.high,
            self.closed in ("low", "both"),
            self.closed in ("high", "both"),
        )
        if self.whole:
            return f"a whole number from {low:g} on"
        if low == -math.inf:
            return (
                "finite" if not self.closed else "a number, not NaN" if high_in else "a number below infinity, not NaN"
            )
        if low_in and high_in and high < math.inf:
            return f"from {low:g} to {high:g}"
        said = f"{'at least' if low_in else 'above'} {low:g}"
        if high == math.inf:
            return said if high_in else f"{said} and finite"
        return f"{said} and {'at most' if high_in else 'below'} {high:g}"


Ranges = dict[str, Range]  # by the names of parameters

FINITE = Range(-math.inf, math.inf)
NOT_NAN = Range(-math.inf, math.inf, "both")
POSITIVE = Range(0.0, math.inf)
NOT_NEGATIVE = Range(0.0, math.inf, "low")
ABOVE_0 = Range(0.0, math.inf, "high")  # infinity is allowed, too
AT_LEAST_0 = Range(0.0, math.inf, "both")
AT_LEAST_1 = Range(1.0, math.inf, "both")
SHARE = Range(0.0, 1.0, "high")  # of the probability: above 0 and at most 1
UNIT = Range(0.0, 1.0, "both")
INSIDE = Range(0.0, 1.0)


class _Unchecked(threading.local):
    """See `unchecked`; `depth` is how many of these contexts a thread is in."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


_UNCHECKED = _Unchecked()


def unchecked() -> contextlib.AbstractContextManager[None]:
    """A context in which maps are made again from parameters that were checked before: their values are not read."""
    return _UNCHECKED


def readable(value: Array) -> bool:
    """True if the values of an array may be read to check them: it is not traced, and reading does not wait for another device."""
    if isinstance(value, np.ndarray):
        return not compiling()
    if is_jax(value):
        return eager(value) and on_cpu(value) and value.is_fully_addressable
    return decides(value)


def in_range(value: Any, allowed: Range) -> bool:
    """False if a number, or an entry of an array whose values can be read, is out of the range."""
    if not is_array(value):
        return allowed.has(value)
    if compiling() or _UNCHECKED.depth or not readable(value):
        return True
    value = stop_gradient(value) if not is_jax(value) else np.asarray(value)  # a constant under jax.jit is no tracer
    return _all_in(value, allowed)


_FEW = 16  # so many numbers are compared sooner one by one


def _all_in(value: Array, allowed: Range) -> bool:
    """True if all entries of an array whose values can be read are in the range."""
    if (isinstance(value, np.ndarray) or is_torch(value)) and math.prod(value.shape) <= _FEW:
        return all(map(allowed.has, value.reshape(-1).tolist()))
    return bool(namespace(value).all(allowed.holds(value)))


def check_number(owner: str, name: str, value: Any, allowed: Range, hint: str) -> Any:
    """The parameter, if it is a real array or a number, and in its range as far as its values can be read.

    Scalars of NumPy become numbers of Python, which adopt the dtype of any scores.
    """
    if is_array(value):
        if not _UNCHECKED.depth and (found := plain_number(value)) is not None and allowed.has(found):
            return value
        value = asarray(value, name)
        if not (is_floating(value) or is_integer(value)):
            raise TypeError(f"{owner}({name}=...): expected a real array, got one of {dtype_name(value)}")
        if not in_range(value, allowed):
            raise ValueError(f"{owner}({name}=...): every entry must be {allowed.words} ({hint}), got {value!r}")
        return value
    value = number(value)
    if not is_number(value):
        rows = "; for one in each row give an array such as np.array([[1.2], [1.5]])" if type(value) is list else ""
        raise TypeError(f"{owner}({name}=...): expected a number or an array, got {shown(value)}{rows}")
    if not allowed.has(value):
        raise ValueError(f"{owner}({name}={value!r}): {name} must be {allowed.words} ({hint})")
    return value


def entries_out_of_range(value: Any, allowed: Range) -> Array | None:
    """Where an array is out of the range, in its shape; None for a number, which was checked, and if it is known that no entry is."""
    if not is_array(value):
        return None
    if isinstance(value, np.ndarray) and compiling():  # it was read before, and torch can't trace its dtype
        return None
    value = stop_gradient(value)
    if decides(value) and not is_jax(value) and _all_in(value, allowed):
        return None
    xp = namespace(value)
    bad = ~allowed.holds(value if is_floating(value) else floating(value, xp))
    return None if decides(bad) and not bool(xp.any(bad)) else bad


def rows_out_of_range(values: Iterable[tuple[Any, Range]]) -> Array | None:
    """Where rows have a parameter out of its range, [..., 1] or of no dimension; None if it is known that none has.

    The parameters are aligned to the rows: numbers, or arrays with one value for each row, or for each class.
    """
    out = None
    for value, allowed in values:
        bad = entries_out_of_range(value, allowed)
        if bad is not None:
            bad = any_of_row(bad)
            out = bad if out is None else out | bad
    return out


def any_of_row(bad: Array) -> Array:
    """True for each row with a True entry, [..., 1]."""
    return bad if not bad.ndim or bad.shape[-1] == 1 else namespace(bad).any(bad, axis=-1, keepdims=True)


def nan_outside(value: Any, allowed: Range) -> Any:
    """A parameter with NaN in place of what is out of its range, for a formula that passes NaN on; numbers were checked."""
    bad = entries_out_of_range(value, allowed)
    if bad is None:
        return value
    xp, value = namespace(value), floating(value, namespace(value))
    return value + xp.where(bad, math.nan * xp.ones_like(value), xp.zeros_like(value))
