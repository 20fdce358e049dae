"""The contract of a transform: `Transform`, a function on rows with its parameters; and `Composed`, several transforms in sequence.

A transform is frozen data: a name, named parameters, an axis. An engine may read these instead of calling it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypedDict

import numpy as np

from .._array import (
    Array,
    Namespace,
    Range,
    Ranges,
    adopt,
    all_finite,
    any_of_row,
    as_dtype,
    check_axis,
    differentiates,
    dtype_name,
    duplicate,
    eager,
    entries_out_of_range,
    floating,
    floats,
    framework,
    from_last,
    in_blocks,
    in_range,
    is_array,
    is_boolean,
    is_floating,
    is_integer,
    is_large,
    is_number,
    like,
    namespace,
    narrow,
    number,
    poison,
    quiet,
    safe,
    stop_gradient,
    takes_blocks,
    to_last,
    upcast,
)
from .._array import compiling as _compiling
from .._core.mapping import Mapping
from .._core.names import not_map
from .._core.options import check_keywords
from .._core.rows import hide
from .._core.shards import sharded, transform_over_devices
from .._core.tables import Default, Function, share_words
from .._core.typing import ArrayT, Numbers
from ..kernels import decode, engine_of
from ..kernels.engine import Engine
from ..kernels.tasks import DECODE
from ..mappings import Softmax

if TYPE_CHECKING:
    from typing import Self

_SOFTMAX = Softmax()
_MAKERS = __name__.rpartition(".")[0]  # this package, and the module of the verbs of maps
_VERBS = f"{_MAKERS.partition('.')[0]}.functional.verbs"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Transform(ABC):
    """A function on rows of scores, and its parameters. Each transform of this package is a subclass that defines `rows`.

    A function of your own needs a subclass only where some scores of a row are absent: over a support, and if the classes are on several
    processes. Then say that it changes each score by itself, with `elementwise`.

    Examples
    --------
    >>> class Halved(anymax.transforms.Transform):
    ...     name = "halved"
    ...     elementwise = True
    ...
    ...     def rows(self, x, xp):
    ...         return x / 2
    >>> Halved()([2.0, 4.0])
    array([1., 2.])

    >>> from anymax import topp
    >>> cut = topp(0.9)
    >>> cut.name, cut.params, cut.axis
    ('topp', (('p', 0.9), ('min_keep', 1)), -1)
    """

    params: tuple[tuple[str, Any], ...] = ()
    axis: int = -1
    # True if rows that it leaves as they are have a value out of its range, as `from_config` writes it
    with_neutral: bool = False

    name: ClassVar[str]  # the name of the factory
    aligned: ClassVar[tuple[str, ...]] = ()  # the parameters that broadcast to the scores; others are passed unchanged
    # True if it needs all rows at once, since what it draws for a row depends on the row's index
    whole: ClassVar[bool] = False
    blocks_itself: ClassVar[bool] = (
        False  # True if `rows` takes some rows at a time where that is quicker; else its caller does
    )
    truncates: ClassVar[bool] = False  # True if it masks classes by their scores and does not change the others
    random: ClassVar[bool] = False  # True if it adds random numbers
    elementwise: ClassVar[bool] = False  # True if it changes each score by itself
    step: ClassVar[str | None] = None  # the engine's equivalent step (kernels/decode.py)
    # of its numbers: the rows of one that is out of range, and could not be read, become NaN
    ranges: ClassVar[dict[str, Range]] = {}

    @abstractmethod
    def rows(self, x: Array, xp: Namespace, **params: Any) -> Array:
        """The new scores. The classes are the last axis of x; `params` are the parameters, aligned to x."""

    def level(self, x: Array, **params: Any) -> Any:
        """The value that the engine's step takes: one number, or one per row. By default the first parameter."""
        return params[self.params[0][0]]

    def __call__(self, x: ArrayT | Numbers) -> ArrayT:
        if sharded(x):
            return transform_over_devices(self, x)
        scores, xp = floats(x)
        axis = check_axis(self.axis, scores.ndim)
        y = to_last(upcast(scores, xp), axis, xp)
        with quiet(scores):
            cut = _in_one_pass((self,), y, axis, xp) if self.truncates and self.step else None
            y = self.aligned_rows(y, axis, xp) if cut is None else cut
        y = y if y.dtype == scores.dtype or narrow(scores) else xp.astype(y, scores.dtype)
        return from_last(y, axis, xp)

    def aligned_rows(self, x: Array, axis: int, xp: Namespace) -> Array:
        """`rows` with the parameters aligned to rows whose classes were at `axis`; NaN where a parameter is out of its range."""
        params = self.align(x, axis, xp)
        apart = is_large(x) and self.by_rows and not self.blocks_itself
        y = by_blocks(self.rows, x, xp, params) if apart else self.rows(x, xp, **params)
        own = dict(self.params)
        for name, allowed in self._ranges.items():
            bad = entries_out_of_range(own[name], allowed)  # as given: a cast may lose a small number
            if bad is not None:
                y = poison(y, any_of_row(_align(bad, y, axis, xp)), xp)
        return y

    def align(self, rows: Array, axis: int, xp: Namespace) -> dict[str, Any]:
        """The parameters by name, aligned to rows whose classes have been moved from `axis` to the end."""
        return {k: _align(v, rows, axis, xp) if k in self.aligned else v for k, v in self.params}

    @property
    def _ranges(self) -> Ranges:
        return {} if self.with_neutral else self.ranges

    @classmethod
    def check(cls, advice: str = "", /, **values: Any) -> None:
        """An error for a parameter that is no number or real array, or is known to be out of its range."""
        for name, value in values.items():
            check_range(cls.name, name, value, cls.ranges[name], advice, of_scores(cls.name, value))

    def is_step(self, rows: Array, params: dict[str, Any]) -> bool:
        """True if the engine has an equivalent step for these parameters."""
        ranges = self._ranges
        return self.step is not None and all(
            _one_a_row(v, rows) and _finite(v) and (k not in ranges or in_range(v, ranges[k]))
            for k, v in params.items()
            if k in self.aligned
        )

    def as_step(self, rows: Array, params: dict[str, Any]) -> decode.Step:
        """The equivalent step of the engine, if `is_step`. It may draw random numbers: call it once, and only if the step will run."""
        return decode.Step(str(self.step), self.level(rows, **params), params.get("min_keep", 1))

    def replace(self, **params: Any) -> Self:
        """The same transform with new values for these parameters."""
        return dataclasses.replace(self, params=tuple((k, params.get(k, v)) for k, v in self.params))

    def __repr__(self) -> str:
        words = [f"{k}={brief(v)}" for k, v in self.params if v is not None and (k, v) != ("min_keep", 1)]
        words += [f"axis={self.axis}"] if self.axis != -1 else []
        return f"{self.name}({', '.join(words)})"

    @property
    def by_rows(self) -> bool:
        """True if some of the rows can be transformed alone, with their part of the parameters."""
        return not self.whole and all(k in self.aligned or not is_array(v) for k, v in self.params)

    @property
    def by_classes(self) -> bool:
        """True if some of the classes can be transformed alone: each score by itself, with parameters that do not differ between them."""
        return self.elementwise and all(not is_array(v) or not v.ndim or v.shape[-1] == 1 for _, v in self.params)

    def _key(self) -> tuple:
        return type(self), self.axis, tuple((k, id(v) if is_array(v) else v) for k, v in self.params)

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Transform) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())


class TransformOptions(TypedDict, total=False):
    """The options that all transforms share.

    Parameters
    ----------
    axis, dim
        The axis of the classes, the last by default.

    Returns
    -------
    Transform
        A function scores -> scores.
    """

    axis: Annotated[int, Default(-1)]
    dim: int | None


def makes_transform(function: Function) -> Function:
    """Decorate a function that makes a transform: its docstring gets what all of them share, and a call with scores is answered."""
    advice = f"it makes a function of scores, as in {function.__name__}(...)(x)"
    function = check_keywords({"": advice})(function)
    share_words(function, TransformOptions)
    return function


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Composed:
    """Transforms in sequence, applied from left to right.

    Examples
    --------
    >>> from anymax import compose, temperature, topk
    >>> [part.name for part in compose(temperature(0.7), topk(50)).transforms]
    ['temperature', 'topk']
    """

    transforms: tuple[Callable[[Array], Array], ...]

    def __call__(self, x: ArrayT | Numbers) -> ArrayT:
        scores, xp = floats(x)
        y = upcast(scores, xp)  # once, so that nothing is rounded to half precision in between
        for parts in _together(self.transforms):
            y = _cut(parts, y, xp)
        return y if y.dtype == scores.dtype or narrow(scores) else xp.astype(y, scores.dtype)

    def __eq__(self, other: object) -> bool:
        return self.transforms == other.transforms if isinstance(other, Composed) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.transforms)

    def __repr__(self) -> str:
        return f"compose({', '.join(map(repr, self.transforms))})"


def _together(transforms: tuple[Any, ...]) -> list[list[Any]]:
    """Consecutive truncations along the same axis in one list, which the engine runs in one pass; each other transform alone."""
    out: list[list[Any]] = []  # torch.compile traces no itertools.groupby
    before = False
    for t in transforms:
        truncates = _truncates(t)
        if truncates and before and t.axis == out[-1][-1].axis:
            out[-1].append(t)
        else:
            out.append([t])
        before = truncates
    return out


def is_function(t: Any) -> bool:
    """True for what a caller may give as a transform: a function of scores, which a class, a map, its verb or a maker is not."""
    if type(t) is FunctionType and (t.__module__ or "").startswith((_MAKERS, _VERBS)):
        return t.__name__ == "log_softmax" or "." in t.__qualname__  # inside another function
    return callable(t) and not isinstance(t, (type, Mapping))


def not_transform(t: Any) -> str:
    """What stands where a transform should be, and what to write, for an error."""
    if isinstance(t, FunctionType) and (t.__module__ or "").startswith(_MAKERS):
        return f"the function {t.__name__}, which makes a transform; call it: {t.__name__}(...)"
    return not_map(t) if isinstance(t, (FunctionType, type)) else repr(t)


def _truncates(t: Any) -> bool:
    return isinstance(t, Transform) and t.truncates and t.step is not None


def _cut(parts: list[Any], y: Array, xp: Namespace) -> Array:
    if len(parts) > 1:
        axis = check_axis(parts[0].axis, y.ndim)
        cut = _in_one_pass(tuple(parts), to_last(y, axis, xp), axis, xp)
        if cut is not None:
            return from_last(cut, axis, xp)
    for t in parts:
        y = put_through("compose", t, y, reshapes=True)
    return y


def _in_one_pass(parts: tuple[Transform, ...], rows: Array, axis: int, xp: Namespace) -> Array | None:
    """The engine's result for these truncations; None if it can't run all of them. The classes were at `axis` and are last."""
    engine = engine_of(DECODE, _SOFTMAX, rows) if len(parts) <= decode.MOST else None
    if engine is None:
        return None
    params = [t.align(rows, axis, xp) for t in parts]
    if not all(t.is_step(rows, values) for t, values in zip(parts, params, strict=True)):
        return None
    return by_steps(engine, rows, tuple(t.as_step(rows, values) for t, values in zip(parts, params, strict=True)))


def by_steps(engine: Engine, rows: Array, steps: tuple[decode.Step, ...]) -> Array:
    """The scores that truncations of an engine leave."""
    if differentiates(rows):  # masked_fill passes on gradients
        return rows.masked_fill(~engine.decode(_SOFTMAX, rows, steps, keep=True).keep, -math.inf)
    return engine.decode(_SOFTMAX, rows, steps, left=True).left


def put_through(who: str, t: Callable[[Array], Array], x: Array, *, own: bool = False, reshapes: bool = False) -> Array:
    """t(x), checked to have the shape and kind of x, in the dtype of x. Every verb applies transforms with this function.

    A user's function gets a copy, which it may change in place; no copy is made if x is `own`, a new array for it alone.
    """
    xp = namespace(x)
    out = t(x if own or isinstance(t, (Transform, Composed)) else duplicate(x, xp))
    fits = is_array(out) and framework(out) == framework(x) and (is_floating(out) or is_integer(out))
    if not fits or not (reshapes or tuple(out.shape) == tuple(x.shape)):
        got = f" of {dtype_name(out)} {tuple(out.shape)}" if is_array(out) else ""
        raise ValueError(
            f"{who}: transform must give back scores of the shape and kind that it got, {tuple(x.shape)} of {dtype_name(x)}, but "
            f"gave {type(out).__name__}{got}"
        )
    return as_dtype(out, x.dtype, xp)


# -- rows ----------------------------------------------------------------------------------------------------------------------


def by_blocks(function: Callable[..., Array], x: Array, xp: Namespace, params: dict[str, Any]) -> Array:
    """`function(x, xp, **params)` with the classes last, some rows at a time where x takes blocks."""
    arrays = [v for v in params.values() if is_array(v)]
    if not takes_blocks(x, *arrays):
        return function(x, xp, **params)
    by_row = {k: v for k, v in params.items() if is_array(v) and v.ndim > 1}

    def of_block(rows: Array, *values: Array) -> Array:
        return function(rows, xp, **{**params, **dict(zip(by_row, values, strict=True))})

    return in_blocks(of_block, x, *by_row.values())


def on_kept(x: Array, function: Callable[[Array], Array], xp: Namespace) -> Array:
    """`function(x)` at entries that are not masked; masked ones stay masked and pass on no derivative."""
    if all_finite(x, xp):
        return function(x)
    keep = x != -math.inf
    return hide(function(safe(x, keep, 0.0, xp)), keep)


# -- parameters ------------------------------------------------------------------------------------------------------------


def as_parameter(value: Any, x: Array, xp: Namespace) -> Any:
    """A parameter as an array of the kind, device and dtype of `x`; numbers are returned unchanged."""
    return like(from_numpy(value, x, xp), x, xp)


def from_numpy(value: Any, x: Array, xp: Namespace) -> Any:
    """A NumPy parameter as an array of the kind and device of `x`."""
    if isinstance(value, (np.ndarray, np.generic)) and not isinstance(x, np.ndarray):
        return adopt(value, x, xp)
    return value


def _align(value: Any, x: Array, axis: int, xp: Namespace) -> Any:
    """A parameter aligned to scores whose class axis has been moved last."""
    if isinstance(value, (int, float)) and abs(value) > float(xp.finfo(x.dtype).max):
        return math.copysign(math.inf, value)  # as in an array that is cast
    if value is None or isinstance(value, (int, float, tuple)):
        return value
    # a value that overflows the dtype of the scores becomes infinite
    with contextlib.nullcontext() if _compiling() else quiet(value):
        value = from_numpy(value, x, xp)
        value = value if is_boolean(value) else like(value, x, xp)
    if value.ndim < 2 or axis == x.ndim - 1:
        return value
    if value.ndim > x.ndim:
        raise ValueError(
            f"a parameter of shape {tuple(value.shape)} does not broadcast to scores with {x.ndim} dimensions"
        )
    return to_last(xp.reshape(value, (1,) * (x.ndim - value.ndim) + tuple(value.shape)), axis, xp)


def _one_a_row(value: Any, rows: Array) -> bool:
    return not is_array(value) or not value.ndim or (value.ndim <= rows.ndim and value.shape[-1] == 1)


def _finite(value: Any) -> bool:
    return bool(namespace(value).all(namespace(value).isfinite(value))) if is_array(value) else math.isfinite(value)


def check_range(who: str, name: str, value: Any, allowed: Range, advice: str = "", hint: str = "") -> None:
    """Check that a parameter is a number or a real array, and that its values are in range if they can be read (`_array/ranges.py`).

    The error may say more after the words on the range (`advice`), and at its end (`hint`).
    """
    value = number(value)
    if not (is_number(value) or is_array(value)):
        raise TypeError(
            f"{who}: {name} must be a number or an array, {allowed.words}; got {value!r}{of_scores(who, value)}"
        )
    if is_array(value):
        value = floating(value, namespace(value), name)
    if not in_range(value, allowed):
        raise ValueError(f"{who}: {name} must be {allowed.words}{advice}; got {brief(value)}{hint}")


def of_scores(who: str, value: Any) -> str:
    """The end of an error about a parameter that looks like scores, which a transform takes once it is made."""
    scores = value.ndim and value.shape[-1] != 1 if is_array(value) else isinstance(value, (list, tuple))
    return f"; {who} makes a function of scores, as in {who}(...)(x)" if scores else ""


def brief(value: Any) -> str:
    if not is_array(value):
        return repr(value)
    if value.ndim == 0 and eager(value) and "key" not in dtype_name(value):
        return f"{float(stop_gradient(value)):g}"
    return f"{dtype_name(value)}{list(value.shape)}"
