"""The link of a map (`link`), found once for each map."""

from __future__ import annotations

from typing import Any

from .._array import is_array
from .._core.mapping import Mapping
from .link import KINDS, MAPS, MOST_NODES, NOISES, Link, out_of_range


def link_of(mapping: Mapping) -> Link | str:
    """The link of a mapping, or a sentence that says why it has none. The mapping caches it."""
    try:
        return mapping._link
    except AttributeError:
        if not isinstance(mapping, Mapping):
            return "it takes maps"
        link = _find(mapping)
        object.__setattr__(mapping, "_link", link)
        return link


def found_link(mapping: Mapping) -> Link:
    """The link of a mapping that an engine has not refused."""
    link = link_of(mapping)
    assert not isinstance(link, str), link
    return link


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
        if (nodes or 0) > MOST_NODES:
            return f"it takes up to {MOST_NODES} nodes, not {nodes}"
        if is_array(scale):
            return Link(kind, MAPS[kind], 0.0, scale, NOISES[noise], nodes or 0)
        if reason := out_of_range(kind, scale):
            return reason
        return Link(kind, MAPS[kind], float(scale), None, NOISES[noise], nodes or 0)
    bounded: Any = mapping
    upper = bounded.upper if kind == "bounded" else None
    upper = upper if upper is None or is_array(upper) else float(upper)
    attribute = KINDS[kind].parameter
    value: Any = getattr(mapping, attribute) if attribute else 0.0
    if is_array(value):
        return Link(kind, MAPS[kind], 0.0, value, 0, 0, upper)
    if attribute and (reason := out_of_range(kind, value)):
        return reason
    return Link(kind, MAPS[kind], float(value), None, 0, 0, upper)
