"""Truncations, draws and log-probabilities by the C++ engine in one pass over the rows (csrc/decode/)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from .._array import Array, is_array, is_torch
from .._core.mapping import Mapping
from . import native
from .arrays import arrays_of, dtype_of, empty_like
from .choice import refuse_other
from .link import NEED_SCORES
from .linked import link_of

STEPS = {
    "temperature": 0, "topk": 1, "topp": 2, "minp": 3, "topnsigma": 4, "epsilon_cutoff": 5, "eta": 6, "typical": 7, "xtc": 8,
}  # the codes of csrc/anymax.h, which a test compares  # fmt: skip
MOST = 64  # the most steps of a pass
# a row's share may be 0, a smaller one rounded to the scores' dtype; the engine's least share keeps as many
_SHARES = ("topp", "minp", "epsilon_cutoff", "eta", "typical")
_LEAST_SHARE = 5e-324


class Step(NamedTuple):
    """One truncation, or a temperature: its name, its value (a number, or one per row, [..., 1]), and the fewest classes it keeps."""

    name: str
    value: Any
    least: int = 1


class Decoded(NamedTuple):
    """The requested results, as arrays of the scores' kind; the others are None."""

    keep: Any  # bool, like the scores
    left: Any  # like the scores, -inf where a class is left out
    index: Any  # int64 [..., draws]
    log_p: Any  # float64 [..., draws]
    entropy: Any  # float64 [...]
    tau: Any  # float64 [...]: the threshold of the classes that are left, logsumexp for softmax


def refuse(mapping: Mapping, x: Array, steps: int = 0) -> str | None:
    """Why the engine can't run a pass of so many steps; None if it can."""
    if reason := refuse_other(native.ENGINE.name) or native.refuse_array(x):
        return reason
    link = link_of(mapping)
    if isinstance(link, str):
        return link
    if link.kind in NEED_SCORES:
        return f"it samples only maps with a threshold, and {link.kind} has none"
    if link.params is not None:
        return "it takes one parameter of a map for all rows"
    if steps > MOST:
        return f"it takes up to {MOST} steps, not {steps}"
    return "it takes rows of at least one class" if not x.ndim or not x.shape[-1] else None


def run(
    mapping: Mapping,
    x: Array,
    steps: tuple[Step, ...] = (),
    *,
    keep: bool = False,
    left: bool = False,
    in_place: bool = False,
    u: Array | None = None,
    given: Array | None = None,
    log_p: bool = False,
    entropy: bool = False,
    tau: bool = False,
) -> Decoded:
    """One pass over rows whose classes are last; `refuse` must not refuse it.

    Parameters
    ----------
    in_place
        `left` is written into x, which is contiguous fp32 or fp64; nothing else may be asked for but `keep`.
    u
        Numbers from 0 to 1, float64 [..., draws]: a class is drawn for each.
    given
        Classes to use in place of draws, int64 [..., draws].
    """
    framework = arrays_of(x)
    x = framework.contiguous(x.detach() if is_torch(x) else x)
    batch = tuple(x.shape[:-1])
    table = np.array([[STEPS[s.name], s.least, math.nan if is_array(s.value) else s.value] for s in steps], np.float64)
    values = None
    if any(is_array(s.value) for s in steps):
        each = [np.broadcast_to(_numbers(s), (*batch, 1)).reshape(-1) for s in steps]
        values = np.ascontiguousarray(np.stack(each, axis=-1), dtype=np.float64)
    index = chances = None
    draws = (*batch, 0)
    if u is not None:
        u, draws = framework.contiguous(u), (*batch, u.shape[-1])
        index = framework.empty(draws, "int64")
    elif given is not None:
        index, draws = framework.contiguous(given), (*batch, given.shape[-1])
    if index is not None and (log_p or u is None):
        chances = framework.empty(draws, "float64")
    out = Decoded(
        framework.empty(tuple(x.shape), "bool") if keep else None,
        x if in_place else empty_like(x) if left else None,
        index,
        chances,
        framework.empty(batch, "float64") if entropy else None,
        framework.empty(batch, "float64") if tau else None,
    )
    if not math.prod(batch):
        return out
    if not draws[-1]:
        u = index = chances = None
    made = native.engine_for(x).decode(
        mapping, x, table.reshape(-1, 3), values, out.keep, u, index, chances, out.entropy, out.left, out.tau
    )
    if made is None:
        raise RuntimeError(f"the native engine can't run a pass over {dtype_of(x)} {tuple(x.shape)}")
    return out


def _numbers(step: Step) -> np.ndarray:
    value = np.asarray(step.value.detach().cpu() if is_torch(step.value) else step.value, dtype=np.float64)
    return np.maximum(value, _LEAST_SHARE) if step.name in _SHARES else value
