"""torch's DTensor: rows lie on several devices, and each device serves its own.

Classes that lie on several devices are brought together first, as `torch.softmax` does; the result is then whole along them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ._array import Array, asarray, check_axis, is_array, is_torch
from ._mapping import Mapping
from ._typing import Axes


def sharded(x: Any) -> bool:
    """True for a DTensor."""
    return isinstance(x, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def refuse(who: str, x: Any) -> None:
    """An error where a verb does not take a DTensor."""
    if sharded(x):
        raise TypeError(
            f"{who} takes no DTensor; give each device its own rows, x.to_local() (with their targets), or all of them, x.full_tensor()"
        )


def by_rows(verb: Callable[[Mapping, Array, Any], Array], mapping: Mapping, x: Any, axes: Axes, mask: Any) -> Array:
    """`verb(mapping, x, mask)`, an array of the shape of x, by each device for its own rows."""
    tensor = sys.modules["torch.distributed.tensor"]
    whole = tensor.Replicate()
    given = axes if isinstance(axes, (tuple, list)) else (-1 if axes is None else axes,)
    classes = {check_axis(a, x.ndim) for a in given}
    places = [p if isinstance(p, tensor.Shard) and p.dim % x.ndim not in classes else whole for p in x.placements]
    mesh = x.device_mesh

    def own(a: Any) -> Any:
        """The part of an array that broadcasts to the scores which belongs to the rows of this device."""
        if not is_array(a) or (a.ndim == 0 and not is_torch(a)):
            return a
        a = a if is_torch(a) else sys.modules["torch"].as_tensor(np.asarray(a), device=x.device)
        a = a if sharded(a) else tensor.DTensor.from_local(a, mesh, [whole] * mesh.ndim, run_check=False)
        lead = x.ndim - a.ndim
        there = [tensor.Shard(p.dim - lead) if _along(p, a, lead) else whole for p in places]
        summed = [tensor.Partial() if p is not whole and t is whole else t for p, t in zip(places, there)]
        return a.redistribute(placements=there).to_local(grad_placements=summed)

    mapping = mapping.replace(**{name: own(value) for name, value in mapping.params().items()})
    local = x.redistribute(placements=places).to_local()
    out = verb(mapping, local, None if mask is None else own(asarray(mask, "mask")))
    stride = tuple(math.prod(x.shape[i + 1 :]) for i in range(x.ndim))
    return tensor.DTensor.from_local(out.contiguous(), mesh, places, run_check=False, shape=x.shape, stride=stride)


def _along(place: Any, a: Array, lead: int) -> bool:
    """True where an array varies along the axis that is shared out."""
    return hasattr(place, "dim") and place.dim >= lead and a.shape[place.dim - lead] > 1
