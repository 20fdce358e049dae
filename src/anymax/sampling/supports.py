"""Draws in one pass of an engine together with the support of each row, the classes that could be drawn."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .._array import (
    Array,
    adopt,
    asarray,
    is_array,
    is_large,
    known,
    listed,
    namespace,
    on_host,
    quiet,
    row_blocks,
    takes_blocks,
)
from .._core.mapping import Mapping
from ..functional import apply
from ..functional.bounds import less_rounding
from ..kernels.decode import Decoded, Step
from ..transforms.applying import Pass
from ..transforms.scaling import divided
from .results import Support, support_of

_SURE = 80.0  # how far below the largest score a class still has a probability in fp32


def with_support(read: Pass, mapping: Mapping, x: Array, u: Array, log_prob: bool) -> tuple[Decoded, Support]:
    """The draws for the numbers u [..., size] from scores in fp32 or fp64, and the support of each row."""
    if not is_large(x) or not known(x):
        return _of_all(read, mapping, x, u, log_prob)
    steps, cuts = tuple(step for step, _ in read.steps), any(truncates for _, truncates in read.steps)
    parts = mapping.parts
    by_tau = not steps and parts.zero_below_threshold and not is_array(parts.full_up_to) and not parts.full_up_to
    if not cuts and not by_tau:
        return _of_all(read, mapping, x, u, log_prob)
    drawn = read.engine.decode(mapping, x, steps, u=u, log_p=log_prob, keep=cuts, tau=by_tau)
    host = on_host(x)
    if cuts:
        candidates = on_host(drawn.keep)
    else:
        with np.errstate(invalid="ignore"):
            candidates = host > less_rounding(on_host(drawn.tau).astype(host.dtype), np)[..., None]
    support = _of_candidates(read, mapping, host, candidates)
    if support is None:
        return _of_all(read, mapping, x, u, log_prob)
    return drawn._replace(keep=None), Support(*(adopt(a, x, namespace(x)) for a in support))


def _of_candidates(read: Pass, mapping: Mapping, x: np.ndarray, candidates: np.ndarray) -> Support | None:
    """The support of rows whose other classes have no probability; None if so many have one that all may be computed as well."""
    *lead, n = x.shape
    x = x.reshape(-1, n)
    ids, begins = listed(candidates.reshape(x.shape), np)
    if mapping.is_softmax and _none_underflows(read, x, ids, begins, tuple(lead)):
        return Support(ids, begins)
    size = np.diff(begins)
    width = max(int(size.max()), mapping.least_classes)
    if not ids.size:
        return Support(ids, begins)
    if 4 * width > n:
        return None
    place = begins[:-1, None] + np.arange(width)
    there = place < begins[1:, None]
    classes = ids[np.minimum(place, ids.size - 1)]
    scores = np.where(there, np.take_along_axis(x, classes, axis=-1), np.asarray(-math.inf, x.dtype))
    temperatures = [_by_rows(step.value, tuple(lead)) for step, truncates in read.steps if not truncates]
    drawable = apply(mapping, _warmed(scores, temperatures)) > 0
    return Support(classes[drawable], np.concatenate([[0], np.cumsum(np.count_nonzero(drawable, axis=-1))]))


def _none_underflows(read: Pass, x: np.ndarray, ids: np.ndarray, begins: np.ndarray, lead: tuple[int, ...]) -> bool:
    """True if softmax surely gives each of these classes a probability, since their scores are near each other."""
    there = np.diff(begins) > 0
    scores = x.reshape(-1)[ids + np.repeat(x.shape[-1] * np.arange(x.shape[0]), np.diff(begins))]
    first = begins[:-1][there]
    spread = np.zeros((x.shape[0], 1))
    with quiet(x):  # scores that are infinite, or far apart
        spread[there, 0] = np.maximum.reduceat(scores, first) - np.minimum.reduceat(scores, first)
    for step, truncates in read.steps:
        if not truncates:
            spread = spread / np.maximum(_by_rows(step.value, lead), np.finfo(np.float32).tiny)
    return bool(np.all(spread < _SURE))


def _by_rows(value: Any, lead: tuple[int, ...]) -> Any:
    """A step's number, or its numbers in the order of the rows, [rows, 1]."""
    return np.broadcast_to(on_host(value), (*lead, 1)).reshape(-1, 1) if is_array(value) else value


def _warmed(x: Array, temperatures: list[Any]) -> Array:
    """The scores that are left after truncations, divided by the temperatures before and after them."""
    for T in temperatures:
        with quiet(x):
            x = divided(x, T, namespace(x))
    return x


def _of_all(read: Pass, mapping: Mapping, x: Array, u: Array, log_prob: bool) -> tuple[Decoded, Support]:
    """The draws and the support from p of all classes, some rows at a time where x takes blocks."""
    engine, xp = read.engine, namespace(x)
    steps, warm = tuple(step for step, _ in read.steps), [not truncates for _, truncates in read.steps]

    def of_rows(x: Array, u: Array, steps: tuple[Step, ...]) -> tuple[Decoded, Support]:
        part = engine.decode(mapping, x, steps, u=u, log_p=log_prob, left=True)
        left = _warmed(part.left, [step.value for step, divides in zip(steps, warm, strict=True) if divides])
        return part._replace(left=None), support_of(apply(mapping, left), xp)

    if not takes_blocks(x):
        return of_rows(x, u, steps)
    by_row = [k for k, step in enumerate(steps) if is_array(step.value)]
    own = [asarray(steps[k].value) for k in by_row]
    drawn, supports = [], []
    for rows, numbers, *values in row_blocks(x, u, *own, large=8):
        of_block = dict(zip(by_row, values, strict=True))
        some = tuple(step._replace(value=of_block.get(k, step.value)) for k, step in enumerate(steps))
        part, support = of_rows(rows, numbers, some)
        drawn.append(part)
        supports.append(support)
    index, log_p = (
        None if part[0] is None else xp.reshape(xp.concat(part, axis=0), u.shape)
        for part in ([d.index for d in drawn], [d.log_p for d in drawn])
    )
    return drawn[0]._replace(index=index, log_p=log_p), _joined(supports, xp)


def _joined(parts: list[Support], xp: Any) -> Support:
    """The support of all rows, from those of some rows at a time."""
    offsets, before = [parts[0].offsets[:1]], 0
    for part in parts:
        offsets.append(part.offsets[1:] + before)
        before += int(part.offsets[-1])
    return parts[0] if len(parts) == 1 else Support(xp.concat([part.ids for part in parts]), xp.concat(offsets))
