"""The arguments of a verb, and the first collective, in which the processes also check that their calls agree."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

from .. import _array
from .._array import (
    Array,
    asarray,
    check_axis,
    compiling,
    floating,
    is_array,
    namespace,
    pick_axis,
    stop_gradient,
    to_last,
    upcast,
    wider,
)
from .._core.mapping import Mapping
from .._core.names import as_mapping
from .._core.options import check_options
from .._core.parameters import one_a_row, sound
from .._core.rows import align_mask, aligned, hide
from .._core.typing import Mask, SampleKeywords
from ..autodiff.agreement import HERE, Agreement, Head, described, fail_together
from ..autodiff.choose_group import as_group
from ..autodiff.group import Group, Message
from ..losses.options import LossOptions
from ..mappings.sink import Sink
from ..transforms.base import Transform, put_through
from .shard import Places, Shard, Shards, columns_of, divided


class ShardKeywords(TypedDict, total=False):
    """The options that say which classes this process has; every verb takes them.

    Parameters
    ----------
    group
        The processes that share the classes, for torch: a `ProcessGroup`, a `DeviceMesh` of one dimension, or a pair (mesh,
        dimension); None is all processes.
    axis_name
        The same for JAX: the name of a mesh axis, inside `jax.shard_map`.
    class_start
        The index of this process's first class; by default the processes have their classes in the order of their ranks.
    class_count
        The number of classes on all processes; checked if given.
    """

    group: Any
    axis_name: Any
    class_start: int | None
    class_count: int | None


class _OfScores(TypedDict, total=False):
    dim: int | None
    mask: Mask


class ScoresKeywords(_OfScores, ShardKeywords, total=False):
    """The options of verbs of scores, beside the axis.

    Parameters
    ----------
    mapping
        The map, such as `anymax.Sparsemax()`, or its name; the same on every process.
    x
        This process's part of the scores, a torch tensor or a JAX array; in torch the parts may differ in size or be empty.
        -inf marks a masked class; a NaN or +inf on any process makes the row NaN on all.
    axis, dim
        The axis of the classes, the last one by default.
    mask
        Booleans that broadcast to this process's scores, True = keep.

    Returns
    -------
    Array
        p of this process's classes, with the shape and dtype of x. Its gradient is correct if every process calls
        `backward`.
    """


class _OfLoss(TypedDict, total=False):
    axis: int | None
    dim: int | None
    mask: Mask


class ShardedLossKeywords(_OfLoss, SampleKeywords, ShardKeywords, total=False):
    """The options of losses of scores.

    Parameters
    ----------
    scores
        This process's part of the scores; see `x` of `anymax.distributed.apply`.
    target
        Class indices, counted over all processes and the same on each, or this process's part of distributions (floating
        point, of the shape of its scores). With a `Sink`, -1 is the sink, which has what a distribution leaves.
    weight
        One factor for each class of this process; a mean then weights each sample by the factor of its target, as in torch.
    axis, dim
        The axis of the classes: by default 1, as in torch, and 0 for a vector of scores.
    ignore_index
        The class index of samples that are left out; a mean does not count them.
    reduction
        "mean" over the samples, their "sum", or "none" for one value per sample.
    label_smoothing
        The share of the target, from 0 to 1, that is spread evenly over the unmasked classes of all processes.

    Returns
    -------
    Array
        The loss, the same on every process: one number in the dtype of the scores; with `reduction="none"` one for each
        sample. In a backward pass every process must pass it the same gradient.
    """


class Arguments(NamedTuple):
    """The arguments of a verb, not yet checked."""

    who: str
    mapping: Any
    x: Any
    axis: Any = None
    dim: Any = None
    mask: Any = None
    group: Any = None
    axis_name: Any = None
    class_start: Any = None
    class_count: Any = None

    @classmethod
    def of(cls, who: str, mapping: Any, x: Any, /, **options: Any) -> Arguments:
        """The arguments, with the keywords checked."""
        return cls(who, mapping, x, **check_options(who, cls._fields[3:], options))

    def call(self, agreement: Agreement, classes_last: bool = True) -> ShardedCall:
        default: Any = -1 if classes_last else None
        axis = pick_axis(self.axis, self.dim, None)
        axis = LossOptions(axis=default if axis is None else axis).class_axis(self.x)
        return ShardedCall.of(agreement, self.mapping, self.x, axis, self.mask, self.class_start, self.class_count)


@dataclasses.dataclass
class ShardedCall:
    """The arguments of a verb, checked; nothing is computed yet."""

    agreement: Agreement
    mapping: Mapping
    x: Any
    axis: int
    mask: Any
    start: int | None
    count: int | None
    hides: bool  # the map hides a class, for which an index of -1 stands
    temperature: Any = 1.0  # divides the scores: a number above 0, or an array with one value per row
    transforms: tuple[Transform, ...] = ()  # of the scores after that, each score by itself

    @classmethod
    def of(
        cls, agreement: Agreement, mapping: Any, x: Any, axis: int, mask: Any, start: Any, count: Any
    ) -> ShardedCall:
        who, group = agreement.who, agreement.group
        mapping = as_mapping(mapping, who)
        for name, value in (("class_start", start), ("class_count", count)):
            if value is not None:
                _array.check_integer(who, name, value, "a number of classes, or None")
                if value < 0:
                    raise ValueError(f"{who}({name}={value}): expected a number from 0 on")
        if not group.strict and start is not None:
            raise TypeError(f"{who}: in JAX the classes lie in the order of the axis; leave class_start= out")
        return cls(agreement, mapping, x, check_axis(axis, x.ndim), mask, start, count, mapping.hidden is not None)

    def constant(self) -> ShardedCall:
        """The call as a constant of differentiation."""
        return dataclasses.replace(self, mapping=self.mapping.frozen(), x=stop_gradient(self.x))

    @property
    def who(self) -> str:
        return self.agreement.who

    @property
    def group(self) -> Group:
        return self.agreement.group

    def first(self, shard: Shard) -> Any:
        """The index of this process's first class, for columns with `indices`."""
        return shard.n * self.group.rank if self.start is None else self.start

    def _rows(self) -> Shard:
        """This process's scores and the map, aligned to each other."""
        x = asarray(self.x)
        xp = namespace(x)
        x = floating(x, xp)
        axis = self.axis
        rows = to_last(x, axis, xp)
        dtype, rows = rows.dtype, upcast(rows, xp)
        n = rows.shape[-1]
        if self.mask is not None and n:
            rows = hide(rows, align_mask(rows, _array.beside(self.mask, x, "mask", xp), axis, xp))
        arrays = self.mapping.params()
        of_classes = tuple(k for k, v in arrays.items() if self._along(k, v) and self._varies(v))
        params = {k: aligned(v, rows, axis, f"{self.mapping.name}: {k}") for k, v in arrays.items()}
        if not n:  # one masked class represents no classes
            rows = wider(rows, 1, -math.inf, xp)
            params = {k: wider(v, 1, 0.0, xp) if k in of_classes else v for k, v in params.items()}
        common = self.mapping.laid_out(**params)
        for name, value in params.items():
            common.check_width(name, value)
        temperature = one_a_row(aligned(self.temperature, rows, axis, "temperature"), "temperature")
        temperature = _array.nan_outside(temperature, _array.ABOVE_0)
        # parameters vary from here on; only those of `common` and `seen` are common
        varied = {k: v if k in of_classes else self.group.vary_parameter(v) for k, v in params.items()}
        mapping = common.laid_out(**varied)
        if is_array(temperature) or temperature != 1.0:
            rows = divided(rows, self.group.vary_parameter(temperature), xp)
        for t in self.transforms:
            learned = {k: self.group.vary_parameter(v) for k, v in t.params if is_array(v)}
            rows = put_through(self.who, t.replace(**learned), rows, own=True)
        rows = sound(mapping, rows, xp)
        shard = Shard(self.group, mapping, common, temperature, rows, xp, axis, dtype, n, common, of_classes)
        if self.hides:
            if of_classes or (isinstance(common, Sink) and common.bound is not None):
                raise TypeError(
                    f"{self.who}: {common!r}: over processes give one upper bound for all classes and the sink"
                )
            shard.join_hidden(self._has_hidden(n))
        return shard

    def _along(self, name: str, value: Array) -> bool:
        """True for a parameter of the map that has the axis of the classes, and may have one value for each."""
        return name in self.mapping.per_class and value.ndim >= self.x.ndim - self.axis % self.x.ndim

    def _varies(self, value: Array) -> bool:
        """True for one that is split like the scores. That of a single class here may be common: the other processes know (`_split`)."""
        width = value.shape[self.axis - self.x.ndim]  # counted from the end, as arrays broadcast
        return width != 1 or self.x.shape[self.axis] == 1

    @property
    def _split(self) -> int:
        """For each such parameter a digit of base 4: 1 if it has one value for each class, 2 if one for all, 0 if either may be true."""
        out = 0
        for name in reversed(self.mapping.per_class):
            value = self.mapping.params().get(name)
            mine = 0
            if value is not None and self._along(name, value) and self.x.shape[self.axis] != 1:
                mine = 1 if self._varies(value) else 2
            out = 4 * out + mine
        return out

    def _common_after_all(self, heads: list[Head]) -> list[str]:
        """The parameters that have one value for all classes, as a process with more than one class, or with none, knows."""
        out = []
        for i, name in enumerate(self.mapping.per_class):
            said = {head.split // 4**i % 4 for head in heads}
            if {1, 2} <= said:
                raise ValueError(
                    f"{self.agreement.name}: {name} of {self.mapping.name} has one value for each class on some processes, and one for all "
                    "classes on others; give all processes their part of it, or all of them the same number"
                )
            if 2 in said:
                out.append(name)
        return out

    def _has_hidden(self, n: int) -> Any:
        """True on one process: the last in the order of the classes."""
        if not self.group.strict or self.start is None:
            return self.group.rank == self.group.size - 1
        return n > 0 and self.start + n == self.count

    def shard(self, columns: int, indices: bool) -> Shard:
        """This process's rows. columns: how many [..., 1] it sends in the first collective. indices: `first` will be called."""
        if self.group.strict:
            self._describe()
            last_unknown = self.hides and self.start is not None and self.count is None
            if (indices and self.start is None) or last_unknown:
                self._find_start(columns)
        return self._rows()

    def first_collective(self, shard: Shard, head: list[Array], extra: list[Array], most: int) -> Shards:
        """The first collective: columns [..., 1], those of the method and those of the verb, and the candidates of the fullest row."""
        columns = shard.xp.concat([*head, *extra], axis=-1)
        if not self.group.strict:
            places = Places.equal(self.group, shard.n, shard.hides)
            return Shards(shard, places, columns_of(self.group.stack(columns)), width=len(head))
        stacked, heads = self.agreement.exchange(columns, self._head(shard.n, most))
        assert stacked is not None
        places = self._places(heads)
        shard.make_common(self._common_after_all(heads))
        shard.seen.check(sum(places.sizes))
        most = max(head.most for head in heads)
        return Shards(shard, places, columns_of(places.in_order(stacked)), width=len(head), most=most)

    def _describe(self) -> None:
        """Record what all calls must have in common: the map, its parameters and the rows."""
        x, mapping = self.x, self.mapping
        self.agreement.say_mapping(mapping, [k for k, v in mapping.params().items() if self._along(k, v)])
        self.agreement.say(rows=f"of shape {self.lead}", dtype=str(x.dtype), temperature=described(self.temperature))
        said = (f"{t.name}({', '.join(f'{k}={described(v)}' for k, v in t.params)})" for t in self.transforms)
        self.agreement.say(transform=", ".join(said) or "not given")

    def agree(self, size: int) -> Places:
        """Compare the calls, and find where the classes lie, if there is nothing else to agree on."""
        self._describe()
        places = self._places(self.agreement.exchange(None, self._head(size))[1])
        self.agreement.open = False
        return places

    @property
    def lead(self) -> tuple[int, ...]:
        """The shape of the rows, without the axis of the classes."""
        return tuple(s for i, s in enumerate(self.x.shape) if i != self.axis % self.x.ndim)

    def _head(self, size: int, most: int = 0) -> Head:
        return Head(HERE, size, self.start, self.count or 0, most, self._split)

    def _find_start(self, columns: int) -> None:
        """Find this process's first class, and how many there are, as far as the caller does not give them, by a collective.

        After it all calls are known.
        """
        _, heads = self.agreement.exchange(None, self._head(self.x.shape[self.axis]))
        sizes = [head.size for head in heads]
        if self.start is None:
            self.start = sum(sizes[: self.group.rank])
        if self.count is None:
            self.count = sum(sizes)
        self.agreement.message = message_of(math.prod(self.lead), columns, self.x)

    def _places(self, heads: list[Head]) -> Places:
        """Where the classes lie, as the processes say; an error if the shards do not follow each other."""
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
        hidden = None
        if self.hides:  # as `_has_hidden` says
            hidden = len(heads) - 1 if heads[0].start is None else [i for i in order if sizes[i]][-1]
        return Places(sizes, starts[self.group.rank], order, order.index(self.group.rank), hidden)


def message_of(rows: int, columns: int, x: Array) -> Message:
    """The message of so many columns of so many rows, in the dtype to compute in."""
    xp = namespace(x)
    return Message(rows * columns, _array.wide_dtype(x, xp))


def eagerly(verb: Callable[..., Any], arguments: Arguments, *more: Any) -> Any:
    """Run a verb outside of torch.compile's graphs, since the scores decide how much is sent."""
    if not compiling():
        return _together(verb, arguments, *more)
    from ..autodiff.torch_graphs import outside_graphs  # late: only now is torch sure to be loaded

    return outside_graphs(_together, verb, arguments, *more)


def _together(verb: Callable[..., Any], arguments: Arguments, *more: Any) -> Any:
    """Run a verb; if one process fails, all do."""
    agreement = Agreement(
        arguments.who, as_group(arguments.who, arguments.group, arguments.axis_name, arguments.x), arguments.x
    )
    return fail_together(agreement, lambda: verb(arguments, agreement, *more))
