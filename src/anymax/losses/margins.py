"""Margins lower the target's cosine before the loss, so that training must push it further.

Every margin is a case of `psi(theta) = cos(m1 theta + m2) - m3`, where theta is the angle to the target's class. It is continued past
pi so that it keeps decreasing: with `phi = m1 theta + m2` and `k = floor(phi / pi)`, `psi = (-1)^k cos(phi) - 2k - m3`.

The gradient is that of psi. With respect to the cosine it can grow like 1/sin(theta) near theta = 0; with respect to the embedding it
does not, since the chain rule multiplies by sin(theta). At cos = +-1 it is `m1^2 |cos(phi)|`, the limit if there is one.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from .._array import (
    POSITIVE,
    Array,
    Namespace,
    adopt,
    as_dtype,
    asarray,
    beside,
    check_axis,
    check_integer,
    check_number,
    counts,
    dtype_name,
    eager,
    floats,
    from_last,
    is_integer,
    is_number,
    like,
    namespace,
    nan_outside,
    number,
    positions,
    quiet,
    safe,
    stop_gradient,
    take,
    to_last,
    upcast,
)
from .._core.mapping import Mapping
from .._core.shards import refuse as refuse_sharded
from .._core.typing import AnyArray, ArrayT, Numbers
from .options import LossOptions, result_dtype
from .targets import ask_for_axis

TOLERANCE = 1e-2  # how far rounding, also to bf16, may push a cosine out of [-1, 1]


class Margin(ABC):
    """A function `(cosines, target, axis=-1) -> cosines` that lowers the target's cosine and changes nothing else.

    Use it to train embeddings that are compared by their angles (faces, speakers, products): the target must win by a margin, so the
    classes move apart. Give it to `anymax.margin_loss` or `anymax.nn.MarginHead`, or call it yourself. Your own margin is a frozen
    dataclass with the property `parts`, the three numbers of `cos(m1 theta + m2) - m3`.

    Examples
    --------
    >>> import dataclasses
    >>> @dataclasses.dataclass(frozen=True)
    ... class Both(Margin):
    ...     m: float = 0.25
    ...
    ...     @property
    ...     def parts(self):
    ...         return 1.0, self.m, self.m
    >>> Both()([[1.0, 0.5]], [0]).round(4)
    array([[0.7189, 0.5   ]])
    """

    @property
    @abstractmethod
    def parts(self) -> tuple[float, float, float]:
        """(m1, m2, m3) of `cos(m1 theta + m2) - m3`: the factor of the angle, at least 1; the angle that is added, in radians; the
        number that is subtracted from the cosine."""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if not is_number(value):
                raise TypeError(f"{self!r}: {f.name} must be a number")
            if not -math.inf < value < math.inf:
                raise ValueError(f"{self!r}: {f.name} must be finite")
        if self.parts[0] < 1:
            raise ValueError(f"{self!r}: the factor of the angle must be at least 1")
        angle = self.parts[1]
        if abs(angle) > 2 * math.pi:
            raise ValueError(
                f"{self!r}: the angle is in radians and must be at most 2 pi; {angle:g} degrees are {math.radians(angle):.4g}"
            )

    def __call__(self, cosines: ArrayT | Numbers, target: AnyArray | Numbers | int, axis: int = -1) -> ArrayT:
        """The cosines, with the margin applied to the target's entry of each row.

        Parameters
        ----------
        cosines
            From -1 to 1, an array of NumPy, torch or JAX with the classes along `axis`; `transforms.cosine` computes them.
        target
            The index of each row's class, integers in the shape of the cosines without `axis`; a row with a negative index is
            not changed.
        axis
            The axis of the classes.

        Returns
        -------
        Array
            An array of the kind, shape and dtype of the cosines, which passes on their gradient.

        Examples
        --------
        >>> ArcFace(0.5)([[1.0, 0.5], [0.5, 1.0]], [0, -1]).round(4)
        array([[0.8776, 0.5   ],
               [0.5   , 1.    ]])
        """
        x, xp = floats(cosines, "cosines")
        axis = check_axis(axis, x.ndim)
        rows = to_last(x, axis, xp)
        index = _indices(target, rows, xp)
        valid = (index >= 0) & (index < rows.shape[-1])
        chosen = upcast(take(rows, xp.where(valid, index, xp.zeros_like(index)), xp), xp)
        if eager(x) and eager(index):
            _check(chosen, index, valid, rows.shape[-1], xp)
        with quiet(x):
            moved = _psi(chosen, *self.parts, xp)
        moved = as_dtype(moved, x.dtype, xp)
        return from_last(xp.where(positions(rows, index.dtype, xp) == index, moved, rows), axis, xp)


@dataclasses.dataclass(frozen=True)
class AM(Margin):
    """The additive margin, also called CosFace: `cos(theta) - m`.

    The simplest margin, and a good first choice: it does not change the gradient of the cosine. `CosFace` is another name for it. Wang
    et al. 2018 ("Additive margin softmax" and "CosFace").

    Parameters
    ----------
    m
        is subtracted from the target's cosine; a finite number, usually 0.2 to 0.5.

    Examples
    --------
    >>> AM(0.25)([[0.75, 0.5]], [0])
    array([[0.5, 0.5]])
    """

    m: float = 0.35

    @property
    def parts(self) -> tuple[float, float, float]:
        return 1.0, 0.0, self.m


CosFace = AM


@dataclasses.dataclass(frozen=True)
class ArcFace(Margin):
    """The additive angular margin: `cos(theta + m)`, continued past pi so that it keeps decreasing.

    The margin is the same angle for every embedding, which makes classes compact; the usual choice for faces. Deng et al. 2019.

    Parameters
    ----------
    m
        is added to the angle, in radians, from -2 pi to 2 pi; usually 0.3 to 0.5.

    Examples
    --------
    >>> ArcFace(0.5)([[1.0, 0.5]], [0]).round(4)
    array([[0.8776, 0.5   ]])
    """

    m: float = 0.5

    @property
    def parts(self) -> tuple[float, float, float]:
        return 1.0, self.m, 0.0


@dataclasses.dataclass(frozen=True)
class SphereFace(Margin):
    """The multiplicative angular margin: `(-1)^k cos(m theta) - 2k`, which is `cos(m theta)` continued past pi.

    The first of the angular margins. It is the strictest for embeddings that are far from their class, and harder to train than
    `ArcFace`. Liu et al. 2017.

    Parameters
    ----------
    m
        The factor of the angle, any real number from 1; usually 2 to 4.

    Examples
    --------
    >>> SphereFace(2)([[0.5, 0.0]], [0]).round(4)
    array([[-0.5,  0. ]])
    """

    m: float = 4.0

    @property
    def parts(self) -> tuple[float, float, float]:
        return self.m, 0.0, 0.0


@dataclasses.dataclass(frozen=True)
class Combined(Margin):
    """All three margins at once: `cos(m1 theta + m2) - m3`, continued past pi.

    `AM`, `ArcFace` and `SphereFace` are special cases; use it to tune between them. Deng et al. 2019, section 2.2.

    Parameters
    ----------
    m1
        The factor of the angle, at least 1.
    m2
        is added to the angle, in radians.
    m3
        is subtracted from the cosine.

    Examples
    --------
    >>> Combined(m3=0.25)([[0.75, 0.5]], [0])
    array([[0.5, 0.5]])
    """

    m1: float = 1.0
    m2: float = 0.0
    m3: float = 0.0

    @property
    def parts(self) -> tuple[float, float, float]:
        return self.m1, self.m2, self.m3


def as_margin(margin: float | Callable[..., Any]) -> Callable[..., Any]:
    """The margin that an argument means: a number m is AM(m), and a margin is returned unchanged.

    Use it in functions that take both, like `anymax.margin_loss`.

    Parameters
    ----------
    margin
        A number, a margin such as `ArcFace(0.5)`, or any function `(cosines, target, axis) -> cosines`.

    Returns
    -------
    Callable[..., Any]
        A function `(cosines, target, axis) -> cosines`.

    Examples
    --------
    >>> as_margin(0.25)
    AM(m=0.25)
    """
    margin = number(margin)
    if is_number(margin):
        return AM(float(margin))
    if callable(margin) and not isinstance(margin, (type, Mapping)):
        return margin
    raise TypeError(
        f"margin: expected a number (the m of AM) or a margin such as ArcFace(0.5) or SphereFace(4), got {margin!r}"
    )


def nearest_centers(cosines: Array, count: int, axis: int) -> Array:
    """The largest cosine of each class, of `count` centers that stand next to each other along the axis; of equal ones the first moves."""
    if count == 1:
        return cosines
    axis = check_axis(axis, cosines.ndim)
    xp, n = namespace(cosines), cosines.shape[axis]
    if n % count:
        raise ValueError(
            f"cosines: {n} along axis {axis} are no multiple of sub_centers={count}, the centers of each class"
        )
    rows = to_last(cosines, axis, xp)
    rows = xp.reshape(rows, (*rows.shape[:-1], n // count, count))
    first = xp.argmax(stop_gradient(rows), axis=-1, keepdims=True)
    return from_last(xp.take_along_axis(rows, first, axis=-1)[..., 0], axis, xp)


def of_nearest_centers(who: str, cosines: Any, count: Any, options: LossOptions) -> Any:
    """The cosines of the classes from those of `count` centers of each, as a loss takes them."""
    if check_centers(who, count) == 1:
        return cosines
    refuse_sharded(f"{who} with sub_centers=", None, cosines=cosines)
    x, _ = floats(cosines, "cosines")
    axis = options.class_axis(x)
    if isinstance(axis, (tuple, list)):
        raise ValueError(f"{who}: sub_centers= needs one axis of the classes, got axis={tuple(axis)}")
    return nearest_centers(x, count, axis)


def check_centers(who: str, count: Any) -> int:
    """The option `sub_centers`, checked."""
    count = check_integer(who, "sub_centers", count, "an integer, the number of centers of each class")
    if count < 1:
        raise ValueError(f"{who}: sub_centers must be at least 1, the number of centers of each class, got {count}")
    return count


def with_margin(
    margin: Any, scale: Any, cosines: Any, target: Any, options: LossOptions
) -> tuple[Array, Array, Any, Any]:
    """(`scale * margin(cosines, target)` in fp32 or fp64, the target, the axis of the classes, the dtype of a loss)."""
    cosines, xp = floats(cosines, "cosines")
    axis = options.class_axis(cosines)
    dtype, cosines = result_dtype(cosines), upcast(cosines, xp)  # no rounding between the margin and the loss
    target = beside(target, cosines, "target", xp)
    ask_for_axis(cosines, target, options.axis)
    counted = counts(target, xp) if is_integer(target) else target  # the margin refuses what is no index
    counted = xp.where(counted == options.ignore_index, xp.full_like(counted, -1), counted)
    scale = check_number("margin_loss", "scale", scale, POSITIVE, "cosines lie from -1 to 1, and are multiplied by it")
    scaled = as_margin(margin)(cosines, counted, axis) * nan_outside(like(scale, cosines, xp), POSITIVE)
    return scaled, target, axis, dtype


def _psi(c: Array, m1: float, m2: float, m3: float, xp: Namespace) -> Array:
    one = xp.ones_like(c)
    excess = stop_gradient(xp.where(c > 1, c - 1.0, xp.where(c < -1, c + 1.0, xp.zeros_like(c))))
    masked = c == -math.inf
    c = safe(c, ~masked, 0.0, xp) - safe(excess, ~masked, 0.0, xp)  # clipped to [-1, 1] with derivative 1
    if m1 == 1 and m2 == 0:
        out = c
    else:
        square = (1.0 - c) * (1.0 + c)
        inside = ~(square <= 0)
        end = c
        c = xp.where(inside, c, stop_gradient(c))
        s = xp.where(inside, xp.sqrt(safe(square, inside, 1.0, xp)), xp.zeros_like(c))  # sin(theta)
        k0 = math.floor(m2 / math.pi)
        if m1 == 1:  # needs no angle: phi crosses one multiple of pi, at theta = (k0 + 1) pi - m2
            past = stop_gradient(c) < math.cos((k0 + 1) * math.pi - m2)
            phi_cos, k = math.cos(m2) * c - math.sin(m2) * s, xp.where(past, (k0 + 1.0) * one, float(k0) * one)
        else:
            phi = m1 * xp.atan2(s, c) + m2
            phi_cos, k = xp.cos(phi), xp.floor(stop_gradient(phi) / math.pi)
        out = (1.0 - 2.0 * (k - 2.0 * xp.floor(k / 2.0))) * phi_cos - 2.0 * k
        # at the ends the angle has no derivative: use the limit of psi', or the absolute value of its finite part
        at_one, at_minus_one = (m1**2 * abs(math.cos(m1 * angle + m2)) for angle in (0.0, math.pi))
        slope = xp.where(c > 0, at_one * one, at_minus_one * one)
        out = out + xp.where(inside, xp.zeros_like(c), slope * (end - stop_gradient(end)))
    return xp.where(masked, -math.inf * one, out - m3)


def _indices(target: Array, rows: Array, xp: Namespace) -> Array:
    """The target as signed indices, [..., 1], of the kind of `rows`."""
    target = asarray(target, "target")
    if not is_integer(target):
        raise TypeError(f"target: a margin needs class indices of an integer dtype, got {dtype_name(target)}")
    if tuple(target.shape) != tuple(rows.shape[:-1]):
        raise ValueError(
            f"target: expected the shape of the cosines without their class axis, {tuple(rows.shape[:-1])}, "
            f"got {tuple(target.shape)}"
        )
    if namespace(target) is not xp:
        target = adopt(target, rows, xp)
    return xp.expand_dims(xp.astype(target, xp.asarray(0).dtype), axis=-1)


def _check(chosen: Array, index: Array, valid: Array, n: int, xp: Namespace) -> None:
    """Raise for a class or a cosine out of range. Only targets are read, in one comparison; more are needed only for the error."""
    size = xp.abs(xp.where(valid & (chosen != -math.inf), chosen, xp.zeros_like(chosen)))
    large = size > 1 + TOLERANCE
    if not bool(xp.any(large | (index >= n))):
        return
    if bool(xp.any(index >= n)):
        raise ValueError(f"target: class {int(xp.max(index))} is out of range for {n} classes; use 0 to {n - 1}")
    worst = float(xp.max(xp.where(large, size, xp.zeros_like(size))))
    raise ValueError(
        f"expected cosines in [-1, 1], got one of size {worst:.4g}; use transforms.cosine(weight) to make cosines of "
        "embeddings, and give the scale to the loss, not to the cosines"
    )
