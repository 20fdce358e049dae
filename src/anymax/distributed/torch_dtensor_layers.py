"""torch's DTensor: output layers whose weight or features are spread over devices.

Rows on several devices need no communication but for the gradient of the weight. If the classes are split along several dimensions of the
mesh, or along one that splits the rows too, the weight is gathered along all but one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Shard

from .._array import is_array, is_integer, namespace
from .._core.mapping import Mapping
from .._core.names import as_mapping
from ..autodiff.torch_graphs import outside_graphs
from ..likelihood.support import is_pair, read_support
from ..losses.options import LossOptions
from ..transforms import Composed, Transform
from . import layer_verbs
from .torch_dtensor import WHOLE, Layout, as_tensor, reduced, split_axis, whole_tensor

Tensor = torch.Tensor


class LayerLayout(Layout):
    """The placements of the scores of an output layer, and this device's part of features and weight."""

    def __init__(self, who: str, x: Tensor, weight: Tensor, *others: Any) -> None:
        self.who, self.axes, self.along, self.places = who, (x.ndim - 1,), None, []
        self.mesh = next(a.device_mesh for a in (weight, x, *others) if isinstance(a, DTensor))
        self.shape = torch.Size((*x.shape[:-1], weight.shape[0]))
        x, weight = self.everywhere(x), self.everywhere(weight)
        for name, a in (("x", x), ("linear_weight", weight)):
            self.refuse_partial(name, a)
        of_x, of_weight, back = [], [], []  # the placements of both, and of the gradient of the weight
        for dim, (p, q) in enumerate(zip(x.placements, weight.placements)):
            of_rows = split_axis(p, x.ndim)
            rows = of_rows is not None and of_rows != x.ndim - 1
            if rows:
                self.places.append(Shard(of_rows))
            elif split_axis(q, 2) == 0 and self.along is None:
                self.along = dim
                self.places.append(Shard(x.ndim - 1))
            else:
                self.places.append(WHOLE)
            of_x.append(self.places[-1] if rows else WHOLE)
            of_weight.append(Shard(0) if dim == self.along else WHOLE)
            back.append(Partial() if rows else of_weight[-1])
        self.local = x.redistribute(placements=of_x).to_local(grad_placements=of_x)
        self.per_class_places = of_weight, back
        self.weight = self.classes(weight)

    def classes(self, a: Tensor) -> Tensor:
        """This device's part of the weight or the bias."""
        places, back = self.per_class_places
        return self.everywhere(a).redistribute(placements=places).to_local(grad_placements=back)

    def support(self, support: Any) -> tuple[Tensor, Tensor]:
        """The support of this device's rows, from that of all rows, whose classes keep their indices."""
        lead, n, device = self.shape[:-1], self.shape[-1], self.mesh.device_type
        if is_pair(support):
            support = tuple(whole_tensor(a, device) for a in support)
        elif is_array(support):
            support = whole_tensor(support, device)
        ids, offsets = read_support(self.who, self.local, lead.numel(), n, support, namespace(self.local))
        rows = self.rows(torch.arange(lead.numel(), device=ids.device).reshape(lead)).reshape(-1)
        sizes = offsets.diff()[rows]
        upto = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
        first = (offsets[:-1][rows] - upto[:-1]).repeat_interleave(sizes)
        return ids[first + torch.arange(len(first), device=ids.device)], upto

    def transform(self, transform: Any) -> Any:
        """The transform, with this device's part of its parameters."""
        if isinstance(transform, Composed):
            return Composed(tuple(self.transform(t) for t in transform.transforms))
        if not isinstance(transform, Transform):
            return transform
        return transform.replace(
            **{k: self.local_part(v, f"{transform.name}: {k}", learns=True) for k, v in transform.params}
        )

    def results(self, out: Any) -> Any:
        """A result with one number per row, or a tuple of them."""
        return tuple(map(self.results, out)) if isinstance(out, tuple) else self.per_row(out)


def layer(
    who: str, whole: Callable[..., Any], x: Any, weight: Any, of_rows: dict[str, Any], mapping: Any, options: Any
) -> Any:
    """An output layer by `whole` if each device has all classes, else by the function of this name in `anymax.distributed`.

    of_rows: the targets, the classes and log-probabilities of a teacher, or the features of a reference, by the names of the arguments.
    """
    return outside_graphs(_layer, who, whole, x, weight, of_rows, mapping, options)


def _layer(
    who: str, whole: Callable[..., Any], x: Any, weight: Any, of_rows: dict[str, Any], mapping: Any, options: Any
) -> Any:
    layout = LayerLayout(who, x, weight, of_rows.get("x_ref"), options.get("linear_weight_ref"))
    local = {k: v for k, v in options.items() if v is not None}
    for name in ("linear_bias", "linear_weight_ref", "linear_bias_ref"):
        if name in local:
            local[name] = layout.classes(as_tensor(local[name], layout.mesh.device_type))
    if "mask" in local:
        local["mask"] = layout.mask(local["mask"])
    if "support" in local:
        local["support"] = layout.support(local["support"])
    if "transform" in local:
        local["transform"] = layout.transform(local["transform"])
    if isinstance(local.get("temperature"), Tensor) and local["temperature"].ndim:
        local["temperature"] = layout.rows(local["temperature"])
    call: Any = whole
    if layout.along is not None:
        call = functools.partial(getattr(layer_verbs, who), **layout.shard)
        default = {
            p.name: p.default for p in inspect.signature(whole).parameters.values()
        }  # of options that are not there
        local = {k: v for k, v in local.items() if not (isinstance(v, (int, float)) and v == default.get(k))}
    run = functools.partial(call, layout.local, layout.weight, mapping=layout.mapping(mapping))
    if who == "linear_loss":
        return _loss(layout, run, mapping, of_rows["target"], local)
    rows = {k: layout.rows(as_tensor(a, layout.mesh.device_type)) for k, a in of_rows.items() if a is not None}
    if who == "linear_kl":
        return _divergence(layout, run, rows, local)
    return layout.results(run(**rows, **local))


def _divergence(layout: LayerLayout, run: Any, rows: dict[str, Tensor], keywords: dict[str, Any]) -> DTensor:
    given = {"reduction": keywords.pop("reduction", "none")}
    options, where = LossOptions.read(layout.who, None, given), rows.get("where")
    value = run(**rows, **keywords)
    if options.reduction == "none":
        return layout.per_row(value)
    index = torch.zeros_like(value, dtype=torch.int64)
    t = index if where is None else torch.where(where, index, options.ignore_index)
    return reduced(layout, value, t, None, options)


def _loss(layout: LayerLayout, run: Any, mapping: Mapping, target: Any, keywords: dict[str, Any]) -> Any:
    target = as_tensor(target, layout.mesh.device_type)
    indices = is_integer(target)
    t = layout.rows(target) if indices else layout.local_part(target, "target")
    options = LossOptions.read(
        layout.who, None, {k: keywords[k] for k in ("reduction", "ignore_index") if k in keywords}
    )
    w = keywords.pop("weight", None)
    if w is not None:
        w = layout.class_weights(whole_tensor(w, layout.mesh.device_type))
        first = 0 if layout.along is None else layout.start
        keywords["weight"] = w[first : first + layout.weight.shape[0]]
    value = run(t, **(keywords | {"reduction": "none"}))
    value, *predicted = value if isinstance(value, tuple) else (value,)
    loss = layout.per_row(value) if options.reduction == "none" else reduced(layout, value, t, w, options)
    return (loss, layout.per_row(predicted[0])) if predicted else loss


class PairsLayout(Layout):
    """The placements of pairs of embeddings, and this device's pairs, split along at most one dimension of the mesh.

    b may have more rows than a: negatives, which each device has as a whole.
    """

    def __init__(self, who: str, a: Tensor, b: Tensor) -> None:
        self.who, self.axes, self.along, self.shape = who, (1,), None, a.shape
        self.mesh = next(v.device_mesh for v in (a, b) if isinstance(v, DTensor))
        n, ab = a.shape[0], (self.everywhere(a), self.everywhere(b))
        for name, v in zip("ab", ab):
            self.refuse_partial(name, v)
        split = [any(split_axis(v.placements[dim], 2) == 0 for v in ab) for dim in range(self.mesh.ndim)]
        self.along = split.index(True) if any(split) else None
        self.places = [Shard(0) if dim == self.along else WHOLE for dim in range(self.mesh.ndim)]
        first, second = ab
        self.negatives = None
        if second.ndim == 2 and second.shape[0] > n:
            back = [Partial() if dim == self.along else WHOLE for dim in range(self.mesh.ndim)]
            every = self.everywhere(second[n:]).redistribute(placements=[WHOLE] * self.mesh.ndim)
            self.negatives = every.to_local(grad_placements=back)
            second = self.everywhere(second[:n])
        self.local, self.partners = (
            v.redistribute(placements=self.places).to_local(grad_placements=self.places) for v in (first, second)
        )

    def keep(self, mask: Any) -> Any:
        """This device's rows of the mask of pairs."""
        if mask is None:
            return None
        mask = self.everywhere(as_tensor(mask, self.mesh.device_type))
        by_row = mask.ndim == 2 and mask.shape[0] == self.shape[0]
        return mask.redistribute(placements=self.places if by_row else [WHOLE] * self.mesh.ndim).to_local()


def pairs(who: str, whole: Callable[..., Any], arguments: Any) -> DTensor:
    """The loss of pairs by `whole`, with the group of the devices over which they are split."""
    return outside_graphs(_pairs, who, whole, arguments)


def _pairs(who: str, whole: Callable[..., Any], arguments: Any) -> DTensor:
    a, b = arguments.a, arguments.b
    a, b = (as_tensor(v, next(t for t in (a, b) if isinstance(t, DTensor)).device) for v in (a, b))
    layout, mapping = PairsLayout(who, a, b), as_mapping(arguments.mapping, who)
    mapping = mapping.laid_out(**{k: layout.local_part(v, f"{mapping.name}: {k}") for k, v in mapping.params().items()})
    local = arguments._replace(
        a=layout.local, b=layout.partners, mapping=mapping, mask=layout.keep(arguments.mask), negatives=layout.negatives,
        temperature=layout.local_part(arguments.temperature, "temperature"),
    )  # fmt: skip
    value = whole(local, None if layout.along is None else (layout.mesh, layout.along))
    if value.ndim:
        return layout.per_row(value)
    return DTensor.from_local(value, layout.mesh, [WHOLE] * layout.mesh.ndim, run_check=False)
