"""The arguments of a verb, and the first collective, in which the processes also check that their calls agree."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

from .. import _array
from .._array import (
    Array,
    Namespace,
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

_EACH, _ONE = 1, 2  # a parameter has one value for each class, or one for all classes


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


@dataclasses.dataclass(frozen=True)
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

    def shard(self) -> Shard:
        """This process's scores and the map, aligned to each other."""
        x = asarray(self.x)
        xp = namespace(x)
        x = floating(x, xp)
        rows = to_last(x, self.axis, xp)
        dtype, n = rows.dtype, rows.shape[-1]
        rows = upcast(rows, xp)
        if self.mask is not None and n:
            rows = hide(rows, align_mask(rows, _array.beside(self.mask, x, "mask", xp), self.axis, xp))
        local, shared, of_classes = self._maps(rows)
        rows = rows if n else wider(rows, 1, -math.inf, xp)  # one masked class represents no classes
        rows, temperature = self._divided(rows, xp)
        for t in self.transforms:
            learned = {k: self.group.vary_parameter(v) for k, v in t.params if is_array(v)}
            rows = put_through(self.who, t.replace(**learned), rows, own=True)
        rows = sound(local, rows, xp)
        first = n * self.group.rank if self.start is None else self.start
        shard = Shard(self.group, local, shared, shared, temperature, rows, xp, self.axis, dtype, n, first, of_classes)
        if not self.hides:
            return shard
        if of_classes or (isinstance(shared, Sink) and shared.bound is not None):
            raise TypeError(f"{self.who}: {shared!r}: over processes give one upper bound for all classes and the sink")
        return shard.with_hidden(self._has_hidden(n))

    def _maps(self, rows: Array) -> tuple[Mapping, Mapping, tuple[str, ...]]:
        """(`Shard.local`, `Shard.shared`, `Shard.of_classes`), with the parameters aligned to the rows."""
        params = self.mapping.params()
        if not params:
            return self.mapping, self.mapping, ()
        of_classes = tuple(k for k, v in params.items() if self._along(k, v) and self._varies(v))
        params = {k: aligned(v, rows, self.axis, f"{self.mapping.name}: {k}") for k, v in params.items()}
        if not rows.shape[-1]:
            params |= {k: wider(params[k], 1, 0.0, namespace(rows)) for k in of_classes}
        shared = self.mapping.laid_out(**params)
        for name, value in params.items():
            shared.check_width(name, value)
        varied = {k: v if k in of_classes else self.group.vary_parameter(v) for k, v in params.items()}
        return shared.laid_out(**varied), shared, of_classes

    def _divided(self, rows: Array, xp: Namespace) -> tuple[Array, Any]:
        """(the rows divided by the temperature; this: a number, or one value per row, NaN where it is not above 0)."""
        if isinstance(self.temperature, (int, float)) and self.temperature == 1.0:
            return rows, self.temperature
        temperature = one_a_row(aligned(self.temperature, rows, self.axis, "temperature"), "temperature")
        temperature = _array.nan_outside(temperature, _array.ABOVE_0)
        return divided(rows, self.group.vary_parameter(temperature), xp), temperature

    def _along(self, name: str, value: Array) -> bool:
        """True for a parameter of the map that has the axis of the classes, and may have one value for each."""
        return name in self.mapping.per_class and value.ndim >= self.x.ndim - self.axis % self.x.ndim

    def _varies(self, value: Array) -> bool:
        """True for one that is split like the scores. That of a single class here may be common: the other processes know (`_split`)."""
        width = value.shape[self.axis - self.x.ndim]  # counted from the end, as arrays broadcast
        return width != 1 or self.x.shape[self.axis] == 1

    @property
    def _split(self) -> int:
        """Two bits for each such parameter: `_EACH` or `_ONE`, or 0 if either may be true."""
        out = 0
        for i, name in enumerate(self.mapping.per_class):
            value = self.mapping.params().get(name)
            if value is not None and self._along(name, value) and self.x.shape[self.axis] != 1:
                out |= (_EACH if self._varies(value) else _ONE) << 2 * i
        return out

    def _with_one_value(self, heads: list[Head]) -> list[str]:
        """The parameters that have one value for all classes, as a process with more than one class, or with none, knows."""
        out = []
        for i, name in enumerate(self.mapping.per_class):
            said = {head.split >> 2 * i & 3 for head in heads}
            if {_EACH, _ONE} <= said:
                raise ValueError(
                    f"{self.agreement.name}: {name} of {self.mapping.name} has one value for each class on some processes, and one for all "
                    "classes on others; give all processes their part of it, or all of them the same number"
                )
            if _ONE in said:
                out.append(name)
        return out

    def _has_hidden(self, n: int) -> Any:
        """True on one process: the last in the order of the classes."""
        if not self.group.strict or self.start is None:
            return self.group.rank == self.group.size - 1
        return n > 0 and self.start + n == self.count

    def placed(self, columns: int, indices: bool) -> ShardedCall:
        """The call with the place of this process's classes, as far as it must be known before the first collective.

        columns: how many [..., 1] the process sends there. indices: `Shard.first` will be read.
        """
        if not self.group.strict:
            return self
        self._describe()
        last_unknown = self.hides and self.start is not None and self.count is None
        return self._found(columns) if (indices and self.start is None) or last_unknown else self

    def first_collective(self, shard: Shard, head: list[Array], extra: list[Array], most: int) -> Shards:
        """The first collective: columns [..., 1], those of the method and those of the verb, and the candidates of the fullest row."""
        columns = shard.xp.concat([*head, *extra], axis=-1)
        if not self.group.strict:
            places = Places.equal(self.group, shard.n, shard.hides)
            return Shards(shard, places, columns_of(self.group.stack(columns)), width=len(head))
        stacked, heads = self.agreement.exchange(columns, self._head(shard.n, most))
        assert stacked is not None
        places = self._places(heads)
        names = self._with_one_value(heads)
        shard = shard.with_one_value(names) if names else shard
        shard.caller.check(sum(places.sizes))
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
        return self._places(self.agreement.compare(self._head(size)))

    @property
    def lead(self) -> tuple[int, ...]:
        """The shape of the rows, without the axis of the classes."""
        return tuple(s for i, s in enumerate(self.x.shape) if i != self.axis % self.x.ndim)

    def _head(self, size: int, most: int = 0) -> Head:
        return Head(HERE, size, self.start, self.count or 0, most, self._split)

    def _found(self, columns: int) -> ShardedCall:
        """The call with this process's first class, and how many there are, as a collective says unless the caller does.

        After it all calls are known.
        """
        _, heads = self.agreement.exchange(None, self._head(self.x.shape[self.axis]))
        sizes = [head.size for head in heads]
        self.agreement.expect(message_of(math.prod(self.lead), columns, self.x))
        start = sum(sizes[: self.group.rank]) if self.start is None else self.start
        return dataclasses.replace(self, start=start, count=sum(sizes) if self.count is None else self.count)

    def _places(self, heads: list[Head]) -> Places:
        """Where the classes lie, as the processes say; an error if the shards do not follow each other."""
        who = self.agreement.name
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
