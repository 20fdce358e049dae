"""The operands of an output layer as rows: features, weight, bias, mask and map; the scores are computed a part at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from .. import _array
from .._array import (
    Array,
    Namespace,
    as_dtype,
    as_scalar,
    asarray,
    autocast_dtype,
    floating,
    is_array,
    namespace,
    on_cpu,
    recorded,
    shown,
    stop_gradient,
    upcast,
    widest,
    without_autocast,
)
from .._core.mapping import Mapping
from .._core.names import as_mapping
from .._core.rows import Rows, aligned
from .._core.shards import refuse as refuse_sharded
from ..autodiff import bridge

_GROUP = 1 << 22  # scores of a group of rows


class ByRow(NamedTuple):
    """The arrays of a layer that have an entry for each row."""

    x: Array
    keep: Array | None
    params: dict[str, Array]  # of the map, by name
    factor: Array | None


@dataclasses.dataclass(frozen=True)
class Layer:
    """The operands of the scores `factor * (x @ weight.T + bias)`, and a map, whose parameters are numbers or have one value per row."""

    x: Array  # [rows, features]
    weight: Array  # [classes, features], in the dtype of x, or on torch's CPU a narrower one
    bias: Array | None  # [classes]
    keep: Array | None  # [1 or rows, classes], boolean
    mapping: Mapping
    lead: tuple[int, ...]  # the shape of the rows as given
    dtype: Any  # of the result: fp32 or fp64
    hides: bool = False  # the last class is one that the caller's map hides; the index -1 stands for it
    rounded_to: Any = None  # a dtype of half precision to which scores are rounded; None: they are in fp32 or fp64
    factor: Array | None = (
        None  # [rows, 1], a constant in fp32: a temperature beside features in half precision, which it would round
    )

    @property
    def rows(self) -> int:
        return self.x.shape[0]

    @property
    def classes(self) -> int:
        return self.weight.shape[0]

    @property
    def seen_classes(self) -> int:
        """How many classes the caller gave."""
        return self.classes - 1 if self.hides else self.classes

    def hidden_class(self, xp: Namespace) -> Array | None:
        """The class that the caller's map hides, for each row; None without one."""
        if not self.hides:
            return None
        last = xp.full((self.rows,), self.classes - 1, dtype=xp.int32, **_array.device_of(self.x))
        return _array.counts(last, xp)

    def refuse_with_sink(self, who: str, **options: Any) -> None:
        """Refuse what would act on the class that a map hides as on the others."""
        if self.hides and (names := [name for name, value in options.items() if value is not None]):
            raise ValueError(
                f"{who}: {' and '.join(names)} can't be given with a sink here; make the scores, and use the verbs of scores"
            )

    @classmethod
    def of(
        cls, who: str, x: Any, weight: Any, mapping: Any, bias: Any, mask: Any, of_shard: bool = False, score_dtype: Any = None
    ) -> Layer:  # fmt: skip
        """of_shard: other processes have more classes, so this one may have few or none. A class that the map hides joins the scores."""
        if isinstance(x, (str, Mapping)):
            raise TypeError(f"{who}: expected features first, got {x!r}; the mapping comes after the target")
        mapping = as_mapping(mapping, who, "the mapping belongs here; a bias is linear_bias=")
        refuse_sharded(who, x, linear_weight=weight, linear_bias=bias)
        x, weight, bias = _operands(who, x, weight, bias, of_shard)
        xp, lead, (n, features) = namespace(x), tuple(x.shape[:-1]), weight.shape
        if not of_shard:
            mapping.check(n)
        rounded_to = None if score_dtype is None else _rounded_to(who, score_dtype, (x, weight, bias), xp)
        x, weight, bias = _in_dtype_of_product(x, weight, bias, xp, of_shard)
        params = {
            k: _one_a_row(aligned(v, x[..., :1], x.ndim - 1, f"{mapping.name}: {k}"), lead, f"{mapping.name}: {k}", xp)
            for k, v in mapping.params().items()
        }
        mapping = mapping.laid_out(**params) if params else mapping
        keep = _mask_of_rows(who, mask, x, (*lead, n), xp)
        if hides := mapping.hidden is not None and not of_shard:
            mapping, weight, bias, keep = _with_sink(who, mapping, weight, bias, keep, xp)
        dtype = dtype_of_result(x, xp)
        return cls(
            xp.reshape(x, (math.prod(lead), features)), weight, bias, keep, mapping, lead, dtype, hides, rounded_to
        )

    def as_given(self, each: Array, xp: Namespace) -> Array:
        """One number of each row, [rows] or [rows, 1], in the shape of the rows as given."""
        return as_scalar(xp.reshape(each, self.lead))

    def by_row(self) -> ByRow:
        """The arrays that have an entry for each row."""
        keep = None if self.keep is None or self.keep.shape[0] == 1 else self.keep
        return ByRow(self.x, keep, {k: v for k, v in self.mapping.params().items() if v.ndim}, self.factor)

    def with_operands(self, x: Array, weight: Array, bias: Array | None) -> Layer:
        """The layer with other features, weight and bias."""
        return dataclasses.replace(self, x=x, weight=weight, bias=bias)

    def with_rows(self, there: Array, xp: Namespace) -> Layer:
        """The layer with features 0 in the other rows, [rows] of booleans, so that nothing of these reaches a gradient."""
        x = xp.where(there[:, None], self.x, xp.zeros_like(self.x))
        return self.with_operands(x, self.weight, self.bias)

    def times(self, factor: Any, xp: Namespace) -> Layer:
        """The layer with its scores times a factor, a number or [rows, 1], which neither features nor weights see."""
        ones = xp.ones((self.rows, 1), dtype=self.dtype, **_array.device_of(self.x))
        bias, keep = self._finite_bias(xp)
        return dataclasses.replace(self, factor=ones * factor, bias=bias, keep=keep)

    def _finite_bias(self, xp: Namespace) -> tuple[Array | None, Array | None]:
        """(the bias with 0 in place of -inf, of which a multiple may be NaN, the mask with these classes)."""
        if self.bias is None:
            return None, self.keep
        masked = self.bias == -math.inf
        keep = ~masked[None, :] if self.keep is None else self.keep & ~masked
        return xp.where(masked, xp.zeros_like(self.bias), self.bias), keep

    def scaled_rows(self, factor: Array, xp: Namespace) -> Layer:
        """The layer with the scores of each row times a factor, [rows, 1]; a bias becomes one more feature."""
        x = as_dtype(upcast(self.x, xp) * factor, self.x.dtype, xp)
        bias, keep = self._finite_bias(xp)
        if bias is None:
            return self.with_operands(x, self.weight, None)
        x, weight = (
            xp.concat([x, as_dtype(factor, x.dtype, xp)], axis=1),
            xp.concat([self.weight, bias[:, None]], axis=1),
        )
        return dataclasses.replace(self.with_operands(x, weight, None), keep=keep)

    def rows_at(self, where: Any, by_row: ByRow | None = None) -> Layer:
        """Some of the rows: a slice, or their indices. by_row: the result of `by_row`, for many parts."""
        x, keep, params, factor = self.by_row() if by_row is None else by_row
        keep = self.keep if keep is None else some_rows(keep, where)
        mapping = (
            self.mapping.laid_out(**{k: some_rows(v, where) for k, v in params.items()}) if params else self.mapping
        )
        factor = None if factor is None else some_rows(factor, where)
        return dataclasses.replace(self, x=some_rows(x, where), keep=keep, mapping=mapping, factor=factor)

    def groups(self, step: int) -> list[slice]:
        """Where the rows are, `step` at a time; one group without rows if there are none."""
        rows = self.rows
        return [slice(i, min(i + step, rows)) for i in range(0, max(rows, 1), step)]

    def parts(self, step: int) -> Iterator[tuple[slice, Layer]]:
        """`groups`, and the part of each."""
        groups = self.groups(step)
        if len(groups) == 1:
            yield groups[0], self
            return
        by_row = self.by_row()
        for where in groups:
            yield where, self.rows_at(where, by_row)

    def constant(self) -> Layer:
        """The layer as a constant of differentiation."""
        x, weight, bias = (stop_gradient(a) for a in (self.x, self.weight, self.bias))
        return dataclasses.replace(self, x=x, weight=weight, bias=bias, mapping=self.mapping.frozen())

    def recorded(self) -> bool:
        """True if autograd of torch records operations on the layer."""
        return recorded(self.x, self.weight, self.bias, *self.mapping.params().values())

    def unmasked_classes(self, xp: Namespace) -> Array | None:
        """Which classes are not masked, [1 or rows, classes]; None: all of them."""
        if self.bias is None:
            return self.keep
        free = self.bias != -math.inf
        if bool(xp.all(free)):
            return self.keep
        return free[None, :] if self.keep is None else self.keep & free

    @property
    def product_rounds(self) -> bool:
        """True if a product in the dtype of the operands gives the rounded scores."""
        return self.rounded_to is not None and self.x.dtype == self.rounded_to and bridge(self.x).layers.rounds_products

    def rounded(self, s: Array, xp: Namespace) -> Array:
        """Scores with the values that the caller's dtype can hold, in the dtype that they have."""
        if self.rounded_to is None or s.dtype == self.rounded_to:
            return s
        return as_dtype(as_dtype(s, self.rounded_to, xp), s.dtype, xp)

    def scaled(self, s: Array, xp: Namespace) -> Array:
        """Scores [rows, any], rounded if they shall be, times the factor of their row, which does not round them again."""
        return s if self.factor is None else upcast(s, xp) * self.factor

    def scores(self) -> Array:
        """All scores, [rows, classes], in fp32 or fp64 unless the product rounds them; a masked class has -inf."""
        xp = namespace(self.x)
        weight = as_dtype(self.weight, self.x.dtype, xp)  # features may be wider
        with without_autocast(self.x):
            if self.product_rounds:
                s = xp.matmul(self.x, weight.T)
            else:
                s = bridge(self.x).layers.product(self.x, weight)
        s = self.scaled(self.rounded(s if self.bias is None else s + self.bias, xp), xp)
        return s if self.keep is None else xp.where(self.keep, s, -math.inf * xp.ones_like(s))


def _rounded_to(who: str, score_dtype: Any, operands: tuple[Array | None, ...], xp: Namespace) -> Any:
    """The dtype of half precision that a caller wants for the scores of these operands, None for their full precision."""
    product = xp.zeros((0,), dtype=_dtype_of_product(xp, operands), **_array.device_of(operands[0]))
    wanted = _array.asked_for(score_dtype, product, "score_dtype")
    full = upcast(product, xp).dtype
    if wanted == full:
        return None
    if wanted != product.dtype:
        name, kind = _array.dtype_name(product), _array.dtype_name(upcast(product, xp))
        kinds = kind if name == kind else f"{kind}, or {name} to round them,"
        raise ValueError(f"{who}: score_dtype must be {kinds} for scores of a product in {name}, got {score_dtype!r}")
    return wanted


def _operands(who: str, x: Any, weight: Any, bias: Any, of_shard: bool) -> tuple[Array, Array, Array | None]:
    """x, weight and bias as arrays of one kind and device, and of shapes that fit each other."""
    x = asarray(x, "x")
    xp = namespace(x)
    x = floating(x, xp, "x")
    if callable(weight):
        raise TypeError(f"{who}: linear_weight is {shown(weight)}; give its .weight, and linear_bias= its .bias")
    weight = floating(_array.beside(weight, x, "linear_weight", xp), xp, "linear_weight")
    if x.ndim < 1 or weight.ndim != 2 or weight.shape[-1] != x.shape[-1]:
        whose = "this process's part of " if of_shard else ""
        order = "; the weight comes before the target" if weight.ndim == 1 else ""
        raise ValueError(
            f"{who}: expected features [..., features] and {whose}a linear_weight [classes, features], got {tuple(x.shape)} and "
            f"{tuple(weight.shape)}{order}"
        )
    n = weight.shape[0]
    if n == 0 and not of_shard:
        raise ValueError(
            f"{who}: a linear_weight of shape {tuple(weight.shape)} has no classes; at least one is needed"
        )
    if bias is not None:
        bias = floating(_array.beside(bias, x, "linear_bias", xp), xp, "linear_bias")
        if tuple(bias.shape) != (n,):
            raise ValueError(
                f"{who}: a linear_bias of shape {tuple(bias.shape)}: expected one number per class, ({n},)"
            )
    return x, weight, bias


def one_dtype(xp: Namespace, *operands: Array | None) -> tuple[Any, ...]:
    """The operands of a product in one dtype, that of `_dtype_of_product`; half precision on a CPU as fp32, so that no score is rounded."""
    dtype = _dtype_of_product(xp, operands)
    same = (None if a is None else as_dtype(a, dtype, xp) for a in operands)
    return tuple(a if a is None or not on_cpu(a) else upcast(a, xp) for a in same)


def dtype_of_result(x: Array, xp: Namespace) -> Any:
    """The dtype of losses and thresholds of scores that are products with x: fp32 for half precision, which would round a loss to 2 or 3
    digits; else that of x."""
    return upcast(x[..., :0], xp).dtype


def _dtype_of_product(xp: Namespace, operands: tuple[Array | None, ...]) -> Any:
    """The dtype of torch's autocast if it is on, else the widest of the operands."""
    arrays = [a for a in operands if a is not None]
    autocast = autocast_dtype(arrays[0])
    if autocast is not None and arrays[0].dtype != xp.float64:
        return autocast
    return widest(xp, *arrays)


def _in_dtype_of_product(
    x: Array, weight: Array, bias: Array | None, xp: Namespace, of_shard: bool
) -> tuple[Array, Array, Array | None]:
    """The operands as `one_dtype` gives them; but on a CPU a narrower weight may stay as it is, and its classes are converted a part
    at a time. of_shard: the classes are on several processes; then a few rows at a time add to one gradient of the weight, in fp32."""
    if of_shard or not on_cpu(x) or not bridge(x).layers.takes_narrow_weights:
        return one_dtype(xp, x, weight, bias)
    dtype = _dtype_of_product(xp, (x, weight, bias))
    weight = weight if autocast_dtype(x) is None else as_dtype(weight, dtype, xp)
    bias = None if bias is None else upcast(as_dtype(bias, dtype, xp), xp)
    return upcast(as_dtype(x, dtype, xp), xp), weight, bias


def _one_a_row(value: Any, lead: tuple[int, ...], name: str, xp: Namespace) -> Any:
    """A parameter as a number, or as an array [rows, 1]."""
    if not is_array(value) or not value.ndim:
        return value
    if value.shape[-1] != 1:
        raise ValueError(
            f"{name} of shape {tuple(value.shape)} (classes last) varies along the classes; an output layer takes one value per row"
        )
    return xp.reshape(xp.broadcast_to(value, (*lead, 1)), (-1, 1))


def _with_sink(
    who: str, mapping: Mapping, weight: Array, bias: Array | None, keep: Array | None, xp: Namespace
) -> tuple[Mapping, Array, Array, Array | None]:
    """The map, the weight, the bias and the mask with the class that the map hides as the last: no weight, and its score as the bias."""
    row = weight[:1, :]
    none = upcast(xp.zeros_like(weight[:, 0])[None, :], xp)  # a score of half precision would be rounded
    score = mapping.params().get("score")
    if score is not None and math.prod(score.shape) != 1:
        raise ValueError(
            f"{who}: {mapping!r} has a score for each row; in an output layer a sink has one score for all rows"
        )
    call = Rows(none, none, mapping, 1).over_all()
    known: Array = upcast(xp.zeros_like(weight[:, 0]) if bias is None else bias, xp)
    bias = xp.concat([known, as_dtype(call.rows[0, -1:], known.dtype, xp)])
    keep = None if keep is None else xp.concat([keep, xp.ones_like(keep[:, :1])], axis=-1)
    return call.mapping, xp.concat([weight, xp.zeros_like(row)]), bias, keep


def _mask_of_rows(who: str, mask: Any, x: Array, shape: tuple[int, ...], xp: Namespace) -> Array | None:
    """The mask as [1 or rows, classes]."""
    if mask is None:
        return None
    mask = _array.beside(mask, x, "mask", xp)
    if not _array.is_boolean(mask):
        raise TypeError(
            f"mask: expected a boolean array, True = keep, got {mask.dtype}; what is to be added to the scores is a linear_bias"
        )
    mask = _array.fit_axes(mask, shape, "mask")
    if all(size == 1 for size in mask.shape[:-1]):
        return xp.broadcast_to(xp.reshape(mask, (1, mask.shape[-1])), (1, shape[-1]))
    return xp.reshape(xp.broadcast_to(mask, shape), (math.prod(shape[:-1]), shape[-1]))


def check_chunk(who: str, chunk: Any) -> int | None:
    """The option `chunk`, checked: how many classes to compute at a time."""
    if chunk is None:
        return None
    chunk = _array.check_integer(who, "chunk", chunk, "an integer, the number of classes at a time")
    if chunk < 1:
        raise ValueError(f"{who}: chunk must be at least 1, the number of classes at a time, got {chunk}")
    return chunk


def some_rows(a: Array, where: Any) -> Array:
    """Some rows of an array: a slice, or their indices."""
    return a[where, ...] if isinstance(where, slice) else namespace(a).take(a, where, axis=0)


def rows_at_a_time(layer: Layer, chunk: int | None, group: int = _GROUP) -> int:
    """How many rows to compute at a time: those with `chunk` scores per row of the layer, or with `group` scores."""
    scores = layer.rows * chunk if chunk is not None else group
    return max(1, min(layer.rows, scores // layer.classes))


def dots(x: Array, weight: Array, bias: Array | None, classes: Array, xp: Any) -> Array:
    """The scores of these classes of each row, all rows at once, in plain operations."""
    s = xp.matmul(upcast(weight[classes], xp), upcast(x, xp)[:, :, None])[:, :, 0]
    return s if bias is None else s + upcast(bias[classes], xp)
