"""This process's part of the classes as rows, and the first collective, in which the processes also tell each other how they stand."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

from .. import _array
from .._array import Array, Namespace, asarray, check_axis, floating, is_array, is_torch, namespace, to_last, upcast
from .._mapping import Mapping, one_a_row
from .._names import as_mapping
from .._rows import aligned, hide, kept, restore_axis
from ._group import Group, as_group

_BASE = 1 << 12  # of numbers that are sent as two digits: exact in fp32 up to 2^36


@dataclasses.dataclass
class Call:
    """What a verb is asked, before anything is computed."""

    who: str
    mapping: Mapping
    x: Any
    axis: int
    mask: Any
    group: Group
    start: int | None
    count: int | None
    temperature: Any = 1.0  # by which the scores are divided: a number above 0, or an array with one value a row
    words: str = ""  # of the options that must be the same everywhere

    @classmethod
    def of(
        cls, who: str, mapping: Any, x: Any, axis: int, mask: Any, group: Any, axis_name: Any, start: Any, count: Any
    ) -> Call:
        mapping = as_mapping(mapping, who)
        group = as_group(who, group, axis_name, x)
        for name, value in (("class_start", start), ("class_count", count)):
            if value is not None:
                _array.check_integer(who, name, value, "a number of classes, or None")
                if value < 0:
                    raise ValueError(f"{who}({name}={value}): expected a number from 0 on")
        if not group.strict and not is_torch(x) and start is not None:
            raise TypeError(f"{who}: in JAX the classes lie in the order of the axis; leave class_start= out")
        return cls(who, mapping, x, axis, mask, group, start, count)

    def first(self, shard: Shard) -> Any:
        """The number of this process's first class; a collective, once, where the caller does not say it."""
        if self.start is None:
            if not self.group.strict:
                return shard.n * self.group.rank
            sizes = self.group.stack(shard.xp.asarray([shard.n], **place_of(shard.rows)))
            self.start = int(shard.xp.sum(sizes[: self.group.rank]))
        return self.start

    def rows(self) -> Shard:
        who, x = f"anymax.distributed.{self.who}", asarray(self.x)
        xp = namespace(x)
        x = floating(x, xp)
        axis = check_axis(self.axis, x.ndim)
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
            rows = hide(rows, kept(rows, _array.beside(self.mask, x, "mask", xp), axis, xp))
        if not n:  # one class that is masked stands for none
            rows = xp.concat(
                [rows, -xp.inf * xp.ones((*rows.shape[:-1], 1), dtype=rows.dtype, **place_of(rows))], axis=-1
            )
        params = {k: aligned(v, rows, axis, f"{self.mapping.name}: {k}") for k, v in self.mapping.params().items()}
        common = self.mapping.replace(**params)
        for name, value in common.params().items():
            common.check_width(name, value)
        temperature = one_a_row(aligned(self.temperature, rows, axis, "temperature"), "temperature")
        # here, and nowhere else, what learns is taken for a process's own use: what follows is common only where it says so
        mapping = common.replace(**{k: self.group.owned(v) for k, v in params.items()})
        if is_array(temperature) or temperature != 1.0:
            rows = divided(rows, self.group.owned(temperature), xp)
        return Shard(self.group, mapping, common, temperature, rows, xp, axis, dtype, n, _array.narrow(x))

    def meet(self, columns: int, make: Callable[[Shard], tuple[list[Array], int]]) -> Met:
        """The first collective: columns [..., 1] of each process, and how many candidates it has in its fullest row."""
        if not self.group.strict:
            shard = self.rows()
            made, _ = make(shard)
            columns = len(made)
            stacked = self.group.stack(shard.xp.concat(made, axis=-1))
            sizes = [shard.n] * self.group.size
            starts = [shard.n * i for i in range(self.group.size)]
            return Met(shard, [stacked[..., i : i + 1] for i in range(columns)], sizes, starts, None, None, 0)
        try:
            shard = self.rows()
            made, most = make(shard)
            assert len(made) == columns
            payload = shard.xp.concat(made, axis=-1)
        except Exception:
            self._fail(columns)
            raise
        head = [
            1,
            *_digits(shard.n),
            *_digits(self.start or 0),
            self.start is not None,
            *_digits(self.count or 0),
            *_digits(most),
        ]
        head = [*head, *_digits(zlib.crc32(f"{self.who} {self._said()}".encode()))]
        stacked, heads = self._exchange(payload, head)
        return self._told(shard, stacked, heads, columns)

    def _said(self) -> str:
        fixed = {k: v for k, v in self.mapping.constants().items() if isinstance(v, (int, float, str, type(None)))}
        return f"{self.mapping.name} {fixed} {self.words}"

    def _fail(self, columns: int) -> None:
        """Tells the others that this process can't go on, as far as it knows what they expect."""
        x = self.x
        if not is_array(x) or not x.ndim or not isinstance(self.axis, int) or not -x.ndim <= self.axis < x.ndim:
            return
        xp = namespace(x)
        dtype = xp.float64 if x.dtype == xp.float64 else xp.float32
        lead = [s for i, s in enumerate(x.shape) if i != self.axis % x.ndim]
        self._exchange(xp.zeros((*lead, columns), dtype=dtype, **place_of(x)), [0] * _HEAD)

    def _exchange(self, payload: Array, head: list[Any]) -> tuple[Array, list[list[int]]]:
        xp, shape = namespace(payload), tuple(payload.shape)
        told = xp.asarray([float(v) for v in head], dtype=payload.dtype, **place_of(payload))
        both = self.group.stack(xp.concat([xp.reshape(payload, (-1,)), told]))
        heads = [[int(v) for v in row] for row in both[:, -len(head) :].tolist()]
        return xp.reshape(both[:, : -len(head)], (self.group.size, *shape)), heads

    def _told(self, shard: Shard, stacked: Array, heads: list[list[int]], columns: int) -> Met:
        who = f"anymax.distributed.{self.who}"
        failed = [i for i, head in enumerate(heads) if not head[0]]
        if failed:
            raise RuntimeError(f"{who}: process {failed[0]} of the group has failed; its own error says why")
        if len({tuple(head[-2:]) for head in heads}) > 1:
            raise RuntimeError(f"{who}: the processes of the group ask for different things; here: {self._said()}")
        sizes = [_number(head[1:3]) for head in heads]
        given = [bool(head[5]) for head in heads]
        if any(given) and not all(given):
            raise ValueError(f"{who}: class_start is given on some processes only; give it on all of them, or on none")
        starts = [_number(head[3:5]) if all(given) else sum(sizes[:i]) for i, head in enumerate(heads)]
        # empty shards come first among those that start together
        order = sorted(range(len(heads)), key=lambda i: (starts[i], sizes[i]))
        at = 0
        for i in order:
            if starts[i] != at and sizes[i]:
                raise ValueError(
                    f"{who}: the shards must follow each other; they start at {starts} and have {sizes} classes"
                )
            at += sizes[i]
        counts = {_number(head[6:8]) for head in heads} - {0}
        if counts - {at}:
            raise ValueError(
                f"{who}: class_count={min(counts - {at})}, and the shards have {at} classes together: {sizes}"
            )
        if not at:
            raise ValueError(f"{who}: there are no classes on any process; at least one is needed")
        shard.mapping.check(at)
        stacked = stacked if order == sorted(order) else stacked[order]
        most = max(_number(head[8:10]) for head in heads)
        return Met(
            shard,
            [stacked[..., i : i + 1] for i in range(columns)],
            sizes,
            starts,
            order,
            order.index(self.group.rank),
            most,
        )


_HEAD = 12


def _digits(value: int) -> list[int]:
    return list(divmod(value, _BASE))


def _number(digits: list[int]) -> int:
    return digits[0] * _BASE + digits[1]


def place_of(x: Array) -> dict[str, Any]:
    return {"device": x.device} if is_torch(x) else {}


def divided(rows: Array, by: Any, xp: Namespace) -> Array:
    """Scores by a number above 0; of what is masked nothing comes to its gradient."""
    keep = xp.isfinite(rows)
    return xp.where(keep, xp.where(keep, rows, xp.zeros_like(rows)) / by, rows)


@dataclasses.dataclass
class Shard:
    """Scores of this process with the classes last, in the dtype to compute in; masked classes are -inf."""

    group: Group
    mapping: Mapping  # for what this process computes of its own classes: the gradients of its parameters are added up
    common: Mapping  # for what all processes compute alike, from what is common
    temperature: Any  # common
    rows: Array
    xp: Any
    axis: int
    dtype: Any
    n: int  # 0 where the one class of `rows` stands for none
    narrow: bool

    def back(self, p: Array) -> Array:
        """A result of the shape of the rows, as the scores came."""
        p = p if self.n else p[..., :0]
        p = p if p.dtype == self.dtype else self.xp.astype(p, self.dtype)
        return restore_axis(p, self.axis)

    def one(self, value: Array, keepdims: bool) -> Array:
        """A result of one number a row."""
        value = (
            value if value.dtype == self.dtype or not _array.is_floating(value) else self.xp.astype(value, self.dtype)
        )
        value = restore_axis(value, self.axis)
        return value if keepdims else self.xp.squeeze(value, axis=self.axis)


@dataclasses.dataclass
class Met:
    """What the first collective has told."""

    shard: Shard
    columns: list[Array]  # each [size, ..., 1], common, in the order of the classes
    sizes: list[int]
    starts: list[int]
    order: list[int] | None  # of the processes by their classes; None: as they are
    block: int | None  # the place of this process in that order
    most: int

    @property
    def count(self) -> int:
        return sum(self.sizes)

    @property
    def start(self) -> Any:
        """The number of this process's first class."""
        return (
            self.starts[0] + self.shard.group.rank * self.sizes[0]
            if self.block is None
            else self.starts[self.shard.group.rank]
        )

    def stack(self, a: Array) -> Array:
        """A further collective: [size, ...] in the order of the classes."""
        out = self.shard.group.stack(a)
        return out if self.order is None or self.order == sorted(self.order) else out[self.order]

    def mine(self, stacked: Array) -> Array:
        return self.shard.group.mine(stacked, self.block)
