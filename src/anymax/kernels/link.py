"""`Link`: the codes and numbers by which an engine knows a map, found once for each map."""

from __future__ import annotations

from typing import Any, NamedTuple

from .._array import Array, is_array
from .._core.mapping import Mapping

# The codes of csrc/anymax.h and csrc/maps.hpp, which a test compares. Engines need them where nothing was compiled, too.
CODES = {
    "forward": 0, "log_forward": 1, "vjp": 2, "log_vjp": 3, "index_loss": 4, "index_loss_grad": 5, "threshold": 6, "largest": 7,
}  # fmt: skip
MAPS = {
    "softmax": 0, "sparsemax": 1, "entmax": 2, "budget": 3, "normmax": 4, "topk": 5, "topp": 6,
    "taylor": 7, "sigsoftmax": 8, "perturb_max": 9, "relu": 10,
}  # fmt: skip
NOISES = {"normal": 0, "logistic": 1, "uniform": 2, "laplace": 3, "gumbel": 4}
NEED_SCORES = ("taylor", "sigsoftmax", "perturb_max", "relu")
SPARSE = ("sparsemax", "entmax", "budget", "normmax", "topk", "topp")
WITHOUT_LOG = ("sparsemax", "entmax", "budget", "normmax", "taylor", "perturb_max", "relu")
WITHOUT_LOSS = ("taylor", "sigsoftmax", "relu")
_PARAMETERS = {"entmax": "alpha", "budget": "k", "normmax": "alpha", "topk": "k", "topp": "p", "taylor": "order"}
# the parameters that the library takes (csrc/maps.hpp has its own ranges); the reference computes the others
RANGES = {  # thresholds are found to the rounding of 1, which is too coarse for a budget below 1e-6
    "entmax": (1e-300, 1e300), "budget": (1e-6, 1e300), "normmax": (1.0, 9e299), "topk": (1, 9e15), "topp": (1e-300, 1.0),
    "perturb_max": (1e-300, 1e300), "taylor": (2, 64),
}  # fmt: skip
_NODES = 4096
MOST_CLASSES = 2**31 - 1025  # the longest row: ANYMAX_MOST_CLASSES of csrc/core/unit.h, which a test compares


class Link(NamedTuple):
    """A map for an engine. csrc/doors/python/calls.cpp reads it item by item."""

    kind: str
    code: int
    param: float
    params: Array | None  # one per row
    noise: int
    nodes: int  # 0: the default of the dtype


SOFTMAX = Link("softmax", MAPS["softmax"], 0.0, None, 0, 0)


def link_of(mapping: Mapping) -> Link | str:
    """The link of a mapping, or a sentence that says why it has none. The mapping caches it."""
    try:
        return mapping._link
    except AttributeError:
        if not isinstance(mapping, Mapping):
            return "it takes maps"
        found = _find(mapping)
        object.__setattr__(mapping, "_link", found)
        return found


def _find(mapping: Mapping) -> Link | str:
    kind = mapping.kernel
    if kind == "sparse_softmax":
        sparse: Any = mapping
        kind = "topk" if sparse.p is None else "topp"
    elif kind == "entmax" and mapping.is_softmax:
        kind = "softmax"
    if kind not in MAPS:
        return f"it has no kernel for {mapping.name}"
    if kind == "perturb_max":
        noise, nodes, scale = (getattr(mapping, a) for a in ("noise", "nodes", "scale"))
        if not isinstance(noise, str) or noise not in NOISES:
            return f"it has no kernel for the noise {noise!r}; it knows {', '.join(NOISES)}"
        if is_array(scale):
            return "it takes one scale of the noise for all rows"
        if (nodes or 0) > _NODES:
            return f"it takes up to {_NODES} nodes, not {nodes}"
        if reason := _out_of_range(kind, "scale", scale):
            return reason
        return Link(kind, MAPS[kind], float(scale), None, NOISES[noise], nodes or 0)
    attribute = _PARAMETERS.get(kind)
    value: Any = getattr(mapping, attribute) if attribute else 0.0
    if is_array(value):
        return Link(kind, MAPS[kind], 0.0, value, 0, 0)
    if attribute and (reason := _out_of_range(kind, attribute, value)):
        return reason
    return Link(kind, MAPS[kind], float(value), None, 0, 0)


def noise_of(link: Link) -> str:
    """The name of the noise of `PerturbMax`."""
    return tuple(NOISES)[link.noise]


def _out_of_range(kind: str, attribute: str, value: float) -> str | None:
    low, high = RANGES[kind]
    return None if low <= value <= high else f"it takes {attribute} of {kind} from {low:g} to {high:g}, not {value:g}"
