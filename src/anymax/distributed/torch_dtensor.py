"""torch's DTensor: each device computes its rows; `anymax.distributed` computes classes that are split over devices.

Only this file knows placements. Rows on several devices need no communication. If the classes are split along several dimensions of
the mesh, they stay split along one, and are gathered along the others first. Partial scores are refused.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .. import _array
from .._array import check_axis, is_array, is_integer
from .._core.mapping import Mapping
from .._core.typing import LossKind
from ..autodiff.torch_graphs import outside_graphs
from ..losses.options import LossOptions, class_weights, result_dtype
from ..losses.targets import counted_weight
from ..transforms.base import Transform
from . import verbs
from .call import ShardKeywords

Tensor = torch.Tensor
# the verbs and the kinds of losses for classes that are split over devices; for all others the classes are gathered
BY_SHARDS: dict[str, Callable[..., Any]] = {
    "apply": verbs.apply,
    "log_apply": verbs.log_apply,
    "threshold": verbs.threshold,
    "logsumexp": lambda mapping, x, **options: verbs.logsumexp(x, **options),
    "log_prob": lambda mapping, x, keepdims, **options: verbs.log_prob(mapping, x, **options),
    "log_prob_entropy": lambda mapping, x, keepdims, **options: verbs.log_prob_entropy(mapping, x, **options),
    **{kind: functools.partial(verbs.loss_of_kind, kind) for kind in get_args(LossKind)},
}
WHOLE = Replicate()


def _tuple_of(axes: Any, x: DTensor) -> tuple[int, ...]:
    """The axes of the classes, from 0 on."""
    axes = axes if isinstance(axes, (tuple, list)) else (-1 if axes is None else axes,)
    return tuple(check_axis(a, x.ndim) for a in axes)


def as_tensor(a: Any, device: Any) -> Tensor:
    """A torch tensor, or an array or list as one on this device."""
    return a if isinstance(a, Tensor) else torch.as_tensor(np.asarray(a), device=device)


def whole_tensor(a: Any, device: Any) -> Tensor:
    """`as_tensor`, with all of it on each device."""
    a = as_tensor(a, device)
    return a.full_tensor() if isinstance(a, DTensor) else a


def split_axis(place: Any, ndim: int) -> int | None:
    """The axis that a placement splits, from 0 on; None for one that splits none, or not in equal parts as `Shard` does."""
    return place.dim % ndim if type(place) is Shard else None


class Layout:
    """The placements of scores, and this device's part of the scores."""

    def __init__(self, who: str, x: DTensor, axes: Any, split: bool) -> None:
        self.who, self.axes = who, _tuple_of(axes, x)
        self.mesh, self.shape, self.places = x.device_mesh, x.shape, []
        self.along: int | None = None  # the dimension of the mesh along which the classes stay split
        for dim, place in enumerate(x.placements):
            if isinstance(place, Partial) or place.is_partial():
                raise TypeError(
                    f"{who}: the scores are Partial: each device has a summand of them, and no function of a summand is one of the sum; "
                    "call x.redistribute(placements=[Replicate()]) (or Shard(...)) first"
                )
            axis = split_axis(place, x.ndim)
            if axis is not None and axis not in self.axes:
                self.places.append(Shard(axis))
            elif axis is not None and split and len(self.axes) == 1 and self.along is None and x.shape[self.axes[0]]:
                self.along = dim
                self.places.append(Shard(self.axes[0]))
            else:
                self.places.append(WHOLE)
        self.local = x.redistribute(placements=self.places).to_local()

    @property
    def shard(self) -> ShardKeywords:
        """The classes of this device, as keywords of `anymax.distributed`."""
        group, count = (self.mesh, self.along), self.shape[self.axes[0]]
        return ShardKeywords(group=group, class_start=self.start, class_count=count)

    @property
    def start(self) -> int:
        """The index of this device's first class."""
        axis = self.axes[0]
        _, offset = compute_local_shape_and_global_offset(self.shape, self.mesh, self.places)
        return min(offset[axis], self.shape[axis])

    def local_part(self, a: Any, name: str, dropped: bool = False, learns: bool = False) -> Any:
        """This device's part of `a`, a DTensor or the same on every device, which broadcasts to the scores (`dropped`: to the rows).

        `learns`: `a` is a parameter, whose gradients arrive already added up along the classes.
        """
        if not is_array(a) or (a.ndim == 0 and not isinstance(a, Tensor)):
            return a
        a = self.everywhere(as_tensor(a, self.mesh.device_type))
        self.refuse_partial(name, a)
        shape = [n for i, n in enumerate(self.shape) if i not in self.axes] if dropped else list(self.shape)
        lead = len(shape) - a.ndim
        there, back = [], []
        for dim, place in enumerate(self.places):
            at = None
            if isinstance(place, Shard) and not (dropped and place.dim in self.axes):
                at = place.dim - (sum(i < place.dim for i in self.axes) if dropped else 0) - lead
            # an axis of size 1 broadcasts, but is split like that of the scores if that also has size 1
            varies = at is not None and at >= 0 and (a.shape[at] != 1 or self.shape[place.dim] == 1)
            there.append(Shard(at) if varies else WHOLE)
            summed = isinstance(place, Shard) and not varies and not (learns and dim == self.along)
            back.append(Partial() if summed else there[-1])
        return a.redistribute(placements=there).to_local(grad_placements=back)

    def refuse_partial(self, name: str, a: DTensor) -> None:
        if any(p.is_partial() for p in a.placements):
            raise TypeError(f"{self.who}: {name} is Partial: each device has a summand; redistribute it first")

    def everywhere(self, a: Tensor) -> DTensor:
        """`a`, which is the same on every device if it is not a DTensor."""
        if isinstance(a, DTensor):
            return a
        return DTensor.from_local(a, self.mesh, [WHOLE] * self.mesh.ndim, run_check=False)

    def rows(self, a: Tensor, first: int = 0) -> Tensor:
        """This device's part of an array that has the axes of the rows behind the `first` ones."""
        return self.everywhere(a).redistribute(placements=self.of_rows(first=first)).to_local()

    def mask(self, mask: Any) -> Any:
        return None if mask is None else self.local_part(_array.asarray(mask, "mask"), "mask")

    def mapping(self, mapping: Mapping) -> Mapping:
        params = {}
        for name, value in mapping.params().items():
            # where each device has one class, `anymax.distributed` takes what has the axis of the classes for a value of this class
            along = name in mapping.per_class and value.ndim >= len(self.shape) - self.axes[0]
            alone = self.along is not None and self.shape[self.axes[0]] == self.mesh.size(self.along)
            params[name] = self.local_part(value, f"{mapping.name}: {name}", learns=not (along and alone))
        return mapping.replace(**params)

    def class_weights(self, w: Tensor) -> Tensor:
        """The weights of all classes, in their own dtype; an error unless there is one for each class."""
        return class_weights(w, w.new_empty((1, self.shape[self.axes[0]])), torch)

    def per_class(self, p: Tensor) -> DTensor:
        """A result with the shape of the scores."""
        return self._dtensor(p, self.places, tuple(self.shape))

    def per_row(self, value: Tensor, keepdims: bool = False, first: tuple[int, ...] = ()) -> DTensor:
        """A result with one number per row, or with more axes before the rows."""
        if keepdims:
            shape = tuple(1 if i in self.axes else n for i, n in enumerate(self.shape))
        else:
            shape = tuple(n for i, n in enumerate(self.shape) if i not in self.axes)
        return self._dtensor(value, self.of_rows(keepdims, len(first)), (*first, *shape))

    def of_rows(self, keepdims: bool = False, first: int = 0) -> list[Any]:
        """The placements of a result with one number per row."""
        out = []
        for place in self.places:
            if isinstance(place, Shard) and place.dim not in self.axes:
                less = 0 if keepdims else sum(i < place.dim for i in self.axes)
                out.append(Shard(place.dim - less + first))
            else:
                out.append(WHOLE)
        return out

    def _dtensor(self, local: Tensor, places: Any, shape: tuple[int, ...]) -> DTensor:
        stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return DTensor.from_local(
            local.contiguous(), self.mesh, places, run_check=False, shape=torch.Size(shape), stride=stride
        )


def _outside_graphs(f: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function of (who, whole, mapping, x, axes, ...): outside of torch.compile's graphs if x is split along the axes."""

    @functools.wraps(f)
    def call(who: str, whole: Any, mapping: Mapping, x: DTensor, axes: Any, *args: Any, **named: Any) -> Any:
        classes = _tuple_of(axes, x)
        split = any(isinstance(p, Shard) and p.dim % x.ndim in classes for p in x.placements)
        run = functools.partial(outside_graphs, f) if split else f
        return run(who, whole, mapping, x, axes, *args, **named)

    return call


@_outside_graphs
def like_scores(
    verb: str, whole: Callable[..., Tensor], mapping: Mapping, x: DTensor, axes: Any, mask: Any, dtype: Any
) -> DTensor:
    """p or log p, by `whole(mapping, rows, mask)` if each device has all classes, else by the verb of this name."""
    cast: Any = x if dtype is None else x.to(_array.asked_for(dtype, x))
    layout = Layout(verb, cast, axes, True)
    mapping, keep = layout.mapping(mapping), layout.mask(mask)
    if layout.along is None:
        return layout.per_class(whole(mapping, layout.local, keep))
    return layout.per_class(BY_SHARDS[verb](mapping, layout.local, layout.axes[0], mask=keep, **layout.shard))


@_outside_graphs
def of_rows(
    verb: str, whole: Callable[..., Any], mapping: Mapping, x: DTensor, axes: Any, mask: Any, keepdims: bool = False, target: Any = None,
    **parameters: Any,
) -> list[DTensor]:  # fmt: skip
    """Results with one number per row, by `whole(mapping, rows, **local)` if each device has all classes, else by the verb.

    Parameters
    ----------
    target
        The classes of each row, with any more axes before the rows.
    parameters
        Values with one number per row.
    """
    layout = Layout(verb, x, axes, verb in BY_SHARDS)
    local: dict[str, Any] = {k: layout.local_part(v, k, learns=True) for k, v in parameters.items()}
    local["mask"] = layout.mask(mask)
    first: tuple[int, ...] = ()
    if target is not None:
        target = as_tensor(target, x.device)
        first = tuple(target.shape[: max(target.ndim - (x.ndim - len(layout.axes)), 0)])
        local["target"] = layout.rows(target, len(first))
    mapping = layout.mapping(mapping)
    if layout.along is None:
        out = whole(mapping, layout.local, **local)
    else:
        out = BY_SHARDS[verb](mapping, layout.local, axis=layout.axes[0], keepdims=keepdims, **local, **layout.shard)
    out = out if isinstance(out, tuple) else (out,)
    return [layout.per_row(v, keepdims, first if i == 0 else ()) for i, v in enumerate(out)]


def transformed(transform: Transform, x: DTensor) -> DTensor:
    """The scores after a transform; one that does not change each score by itself gathers the classes first."""
    layout = Layout(transform.name, x, transform.axis, transform.by_classes)
    here = transform.replace(**{k: layout.local_part(v, f"{transform.name}: {k}") for k, v in transform.params})
    return layout.per_class(here(layout.local))


def loss(
    who: str, kind: LossKind | None, whole: Callable[..., Tensor], mapping: Mapping, x: DTensor, target: Any,
    options: LossOptions,
) -> DTensor:  # fmt: skip
    """A loss: each device computes its rows, then they are reduced. With class indices a mean divides by the sum of their weights."""
    return _loss(who, whole, mapping, x, options.class_axis(x), kind, target, options)


@_outside_graphs
def _loss(
    who: str, whole: Callable[..., Tensor], mapping: Mapping, x: DTensor, axes: Any, kind: LossKind | None, target: Any,
    options: LossOptions,
) -> DTensor:  # fmt: skip
    verb, w = None if kind is None else BY_SHARDS[kind], options.weight
    layout = Layout(who, x, axes, verb is not None)
    target = as_tensor(target, x.device)
    indices = is_integer(target)
    t = layout.local_part(target, "target", dropped=indices)
    if w is not None:
        w = whole_tensor(w, x.device)
    axis: Any = layout.axes
    axis = axis if len(axis) > 1 else axis[0]
    each = options._replace(weight=w, axis=axis, mask=layout.mask(options.mask), reduction="none")
    mapping = layout.mapping(mapping)
    if layout.along is None:
        value = whole(mapping, layout.local, t, each)
    else:
        assert verb is not None
        if w is not None:
            w = layout.class_weights(w)
            each = each._replace(weight=w[layout.start : layout.start + layout.local.shape[axis]])
        value = verb(mapping, layout.local, t, **each.keywords(), **layout.shard)
    return layout.per_row(value) if options.reduction == "none" else reduced(layout, value, t, w, options)


def reduced(layout: Layout, value: Tensor, t: Tensor, w: Any, options: LossOptions) -> DTensor:
    """The sum or mean of the losses of this device's rows and all others. w: class weights, of all classes."""
    mesh, xp = layout.mesh, _array.namespace(value)
    summed = [Partial() if isinstance(p, Shard) else WHOLE for p in layout.of_rows()]
    dtype, value = result_dtype(value), value if value.dtype == torch.float64 else value.float()
    norm = None  # of all rows
    if options.reduction == "mean" and is_integer(t):
        w = None if w is None else torch.cat([w, w.new_ones(1)])  # the last one for a class that a map hides
        index = _array.counts(t, xp)
        counted = counted_weight(index, index == options.ignore_index, w, value.dtype, xp)
        total = DTensor.from_local(counted.sum(), mesh, summed, run_check=False)
        norm = total.redistribute(placements=[WHOLE] * mesh.ndim).to_local()
    elif options.reduction == "mean":
        count = math.prod([n for i, n in enumerate(layout.shape) if i not in layout.axes])
        norm = torch.full((), float(count), dtype=value.dtype, device=value.device)
    return DTensor.from_local(options.reduce(value, norm, dtype, xp), mesh, summed, run_check=False)
