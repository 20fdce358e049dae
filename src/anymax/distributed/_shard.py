"""This process's scores as rows, and the first collective, in which the processes also check that their calls agree."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple, TypedDict

from .. import _array
from .._array import (
    Array,
    Namespace,
    asarray,
    check_axis,
    differentiates,
    floating,
    is_array,
    is_torch,
    namespace,
    pick_axis,
    stop_gradient,
    to_last,
    upcast,
)
from .._core.mapping import Mapping, one_a_row
from .._core.names import as_mapping
from .._core.rows import align_mask, aligned, hide, restore_axis
from ..losses.options import LossOptions
from ._agreement import HERE, Head, Talk
from ._group import Form, Group


class ShardKeywords(TypedDict, total=False):
    """The keywords that say which classes this process has; `anymax.distributed.apply` describes them."""

    group: Any
    axis_name: Any
    class_start: int | None
    class_count: int | None


class Arguments(NamedTuple):
    """The arguments of a verb, as given."""

    who: str
    mapping: Any
    x: Any
    axis: Any
    dim: Any
    mask: Any
    group: Any = None
    axis_name: Any = None
    class_start: Any = None
    class_count: Any = None

    def call(self, talk: Talk, classes_last: bool = True) -> ShardedCall:
        default: Any = -1 if classes_last else None
        axis = LossOptions(axis=pick_axis(self.axis, self.dim, default)).class_axis(self.x)
        return ShardedCall.of(talk, self.mapping, self.x, axis, self.mask, self.class_start, self.class_count)


@dataclasses.dataclass
class ShardedCall:
    """The arguments of a verb, checked; nothing is computed yet."""

    talk: Talk
    mapping: Mapping
    x: Any
    axis: int
    mask: Any
    start: int | None
    count: int | None
    temperature: Any = 1.0  # divides the scores: a number above 0, or an array with one value per row
    counted: bool = False  # True if the caller gives classes by their index over all processes

    @classmethod
    def of(cls, talk: Talk, mapping: Any, x: Any, axis: int, mask: Any, start: Any, count: Any) -> ShardedCall:
        who, group = talk.who, talk.group
        mapping = as_mapping(mapping, who)
        for name, value in (("class_start", start), ("class_count", count)):
            if value is not None:
                _array.check_integer(who, name, value, "a number of classes, or None")
                if value < 0:
                    raise ValueError(f"{who}({name}={value}): expected a number from 0 on")
        if not group.strict and not is_torch(x) and start is not None:
            raise TypeError(f"{who}: in JAX the classes lie in the order of the axis; leave class_start= out")
        return cls(talk, mapping, x, check_axis(axis, x.ndim), mask, start, count)

    @property
    def who(self) -> str:
        return self.talk.who

    @property
    def group(self) -> Group:
        return self.talk.group

    def first(self, shard: Shard) -> Any:
        """The index of this process's first class, for a call that is `counted`."""
        return shard.n * self.group.rank if self.start is None else self.start

    def _rows(self) -> Shard:
        who, x = f"anymax.distributed.{self.who}", asarray(self.x)
        xp = namespace(x)
        x = floating(x, xp)
        axis = self.axis
        for name in self.mapping.per_class:
            value = getattr(self.mapping, name)
            if is_array(value) and value.ndim and value.shape[-1] != 1:
                raise ValueError(
                    f"{who}: {name} of {self.mapping.name} varies along the classes, which are on several processes here"
                )
        rows = to_last(x, axis, xp)
        dtype, rows = rows.dtype, upcast(rows, xp)
        n = rows.shape[-1]
        if self.mask is not None and n:
            rows = hide(rows, align_mask(rows, _array.beside(self.mask, x, "mask", xp), axis, xp))
        if not n:  # one masked class represents no classes
            rows = xp.concat(
                [rows, -xp.inf * xp.ones((*rows.shape[:-1], 1), dtype=rows.dtype, **place_of(rows))], axis=-1
            )
        params = {k: aligned(v, rows, axis, f"{self.mapping.name}: {k}") for k, v in self.mapping.params().items()}
        common = self.mapping.replace(**params)
        for name, value in common.params().items():
            common.check_width(name, value)
        temperature = one_a_row(aligned(self.temperature, rows, axis, "temperature"), "temperature")
        # parameters vary from here on; only those of `common` are common
        mapping = common.replace(**{k: self.group.vary_parameter(v) for k, v in params.items()})
        if is_array(temperature) or temperature != 1.0:
            rows = divided(rows, self.group.vary_parameter(temperature), xp)
        return Shard(self.group, mapping, common, temperature, rows, xp, axis, dtype, n, _array.narrow(x))

    def shard(self, columns: int) -> Shard:
        """This process's rows; `columns` are so many [..., 1] that it sends in the first collective."""
        if self.group.strict:
            self._say()
            if self.counted and self.start is None:
                self._place(columns)
        return self._rows()

    def meet(self, shard: Shard, head: list[Array], extra: list[Array], most: int) -> Met:
        """The first collective: columns [..., 1], those of the method and those of the verb, and the candidates of the fullest row."""
        columns = shard.xp.concat([*head, *extra], axis=-1)
        if not self.group.strict:
            stacked = self.group.stack(columns)
            sizes = [shard.n] * self.group.size
            starts = [shard.n * i for i in range(self.group.size)]
            return Met(shard, stacked, len(head), sizes, starts, None, None, 0)
        stacked, heads = self.talk.exchange(columns, self._head(shard.n, most))
        assert stacked is not None
        return self._met(shard, stacked, len(head), heads)

    def _say(self) -> None:
        """Record what all calls must have in common: the map, its parameters and the rows."""
        x, mapping = self.x, self.mapping
        fixed = {k: v for k, v in mapping.constants().items() if isinstance(v, (int, float, str, type(None)))}
        self.talk.say(map=f"{mapping.name}({', '.join(f'{k}={v!r}' for k, v in fixed.items())})")
        self.talk.say(**{f"{mapping.name}'s_{k}": described(v) for k, v in mapping.params().items()})
        self.talk.say(rows=f"of shape {self.lead}", dtype=str(x.dtype), temperature=described(self.temperature))

    def _sizes(self, size: int) -> list[int]:
        """How many classes each process has, by a collective that also compares the calls."""
        return [head.size for head in self.talk.exchange(None, self._head(size))[1]]

    def agree(self, size: int) -> list[int]:
        """Compare the calls and return `_sizes`, if there is nothing else to agree on."""
        self._say()
        sizes = self._sizes(size)
        self.talk.open = False
        return sizes

    @property
    def lead(self) -> tuple[int, ...]:
        """The shape of the rows, without the axis of the classes."""
        return tuple(s for i, s in enumerate(self.x.shape) if i != self.axis % self.x.ndim)

    def _head(self, size: int, most: int = 0) -> Head:
        return Head(HERE, size, self.start, self.count or 0, most)

    def _place(self, columns: int) -> None:
        """Find this process's first class, if the caller does not give it, by a collective, after which all calls are known."""
        sizes = self._sizes(self.x.shape[self.axis])
        self.start = sum(sizes[: self.group.rank])
        self.talk.form = form_of(math.prod(self.lead), columns, self.x)

    def _met(self, shard: Shard, stacked: Array, width: int, heads: list[Head]) -> Met:
        """The result of the first collective; an error if the shards do not follow each other."""
        who = f"anymax.distributed.{self.who}"
        sizes = [head.size for head in heads]
        starts = [sum(sizes[:i]) if head.start is None else head.start for i, head in enumerate(heads)]
        # empty shards come first among those that start together
        order = sorted(range(len(heads)), key=lambda i: (starts[i], sizes[i]))
        at = 0
        for i in order:
            if starts[i] != at and sizes[i]:
                raise ValueError(
                    f"{who}: the shards must follow each other; they start at {starts} and have {sizes} classes"
                )
            at += sizes[i]
        counts = {head.count for head in heads} - {0}
        if counts - {at}:
            raise ValueError(
                f"{who}: class_count={min(counts - {at})}, and the shards have {at} classes together: {sizes}"
            )
        if not at:
            raise ValueError(f"{who}: there are no classes on any process; at least one is needed")
        shard.mapping.check(at)
        stacked = stacked if order == sorted(order) else stacked[order]
        most = max(head.most for head in heads)
        return Met(shard, stacked, width, sizes, starts, order, order.index(self.group.rank), most)


def described(value: Any) -> str:
    """A parameter, as the processes compare it."""
    if not is_array(value):
        return repr(value)
    return f"{'a learned' if differentiates(value) else 'an'} array of shape {tuple(value.shape)}"


def form_of(rows: int, columns: int, x: Array) -> Form:
    """The form of so many columns of so many rows, in the dtype to compute in."""
    xp = namespace(x)
    return Form(rows * columns, _array.wide_dtype(x, xp))


def place_of(x: Array) -> dict[str, Any]:
    return {"device": x.device} if is_torch(x) else {}


def divided(rows: Array, by: Any, xp: Namespace) -> Array:
    """Scores divided by a number above 0; masked scores add nothing to its gradient."""
    keep = xp.isfinite(rows)
    return xp.where(keep, xp.where(keep, rows, xp.zeros_like(rows)) / by, rows)


@dataclasses.dataclass
class Shard:
    """The scores of this process with the classes last, in the dtype to compute in; masked classes are -inf."""

    group: Group
    mapping: Mapping  # for this process's classes: the gradients of its parameters are added up
    common: Mapping  # for what all processes compute from common values
    temperature: Any  # common
    rows: Array
    xp: Any
    axis: int
    dtype: Any
    n: int  # 0 where the one class of `rows` represents no classes
    narrow: bool

    def high(self) -> Array:
        """The maximum of each row, [..., 1], a constant."""
        return stop_gradient(self.xp.max(self.rows, axis=-1, keepdims=True))

    def back(self, p: Array) -> Array:
        """A result with the shape of the rows, in the axis order and dtype of the scores."""
        p = p if self.n else p[..., :0]
        p = p if p.dtype == self.dtype else self.xp.astype(p, self.dtype)
        return restore_axis(p, self.axis)

    def one(self, value: Array, keepdims: bool) -> Array:
        """A result with one number per row."""
        value = (
            value if value.dtype == self.dtype or not _array.is_floating(value) else self.xp.astype(value, self.dtype)
        )
        value = restore_axis(value, self.axis)
        return value if keepdims else self.xp.squeeze(value, axis=self.axis)


class Met:
    """The results of the first collective: columns [size, ..., 1], common, in the order of the classes."""

    def __init__(
        self, shard: Shard, stacked: Array, width: int, sizes: list[int], starts: list[int], order: list[int] | None, block: int | None,
        most: int,
    ) -> None:  # fmt: skip
        self.shard, self.xp = shard, shard.xp
        columns = [stacked[..., i : i + 1] for i in range(stacked.shape[-1])]
        self.head, self.extra = columns[:width], columns[width:]  # of the method, and of the verb
        self.sizes, self.starts = sizes, starts  # the number of classes of each process, and its first one, by rank
        self.count = sum(sizes)
        self.order = order  # the processes in the order of their classes; None: by rank
        self.block = block  # the place of this process in that order
        self.most = most  # candidates in the fullest row of any process
        xp, highs = shard.xp, self.head[0]
        self.highs = highs  # the maximum of each process, which may be infinite or NaN
        self.finite = xp.isfinite(highs)
        self.anchors = stop_gradient(xp.where(self.finite, highs, xp.zeros_like(highs)))
        self.poisoned = xp.any(xp.isnan(highs) | (highs == math.inf), axis=0)  # [..., 1]
        high = stop_gradient(xp.max(xp.where(self.finite, highs, -math.inf * xp.ones_like(highs)), axis=0))
        self.empty = high == -math.inf  # [..., 1]: True for a row without classes
        self.high = xp.where(
            self.empty, xp.zeros_like(high), high
        )  # [..., 1]: the maximum, 0 where it is not finite; a constant

    @property
    def start(self) -> Any:
        """The index of this process's first class."""
        return (
            self.starts[0] + self.shard.group.rank * self.sizes[0]
            if self.block is None
            else self.starts[self.shard.group.rank]
        )

    def stack(self, a: Array) -> Array:
        """A further collective: [size, ...] in the order of the classes."""
        out = self.shard.group.stack(a)
        return out if self.order is None or self.order == sorted(self.order) else out[self.order]

    def collect(self, columns: list[Array]) -> list[Array]:
        """`stack` of columns [..., 1] at once, each [size, ..., 1]; none if there are none."""
        if not columns:
            return []
        stacked = self.stack(self.xp.concat(columns, axis=-1))
        return [stacked[..., i : i + 1] for i in range(len(columns))]

    def mine(self, stacked: Array) -> Array:
        return self.shard.group.mine(stacked, self.block)
