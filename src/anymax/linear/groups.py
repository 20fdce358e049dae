"""Scores of an output layer by groups of rows, in every framework: what is asked of them is one number a row, or several.

NumPy, and calls without a gradient, go group by group. For a gradient torch and JAX make the scores of each group again (`layer_torch`,
`layer_jax`). Where something traces torch's calls, all scores are made at once, in plain operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .._array import Array, is_jax, is_torch, namespace
from .layer import Layer, dots, rows_at_a_time

_PIECE = 1 << 20  # features that are gathered at a time


def by_rows(
    layer: Layer, ask: Callable[..., Any], target: Array | None, weight: Array | None, chunk: int | None
) -> Any:
    """`ask(part of the layer, its scores, their target, weight)` of all rows."""
    if is_jax(layer.x):
        from . import jax_groups as leaf  # late: only where jax is loaded already

        return leaf.by_rows(layer, ask, target, weight, rows_at_a_time(layer, chunk))
    if is_torch(layer.x):
        from . import torch_backward as leaf  # late: only where torch is loaded already

        if not leaf.serves(layer, target, weight):
            return ask(layer, layer.scores(), target, weight)
        if leaf.wants_gradient(layer):
            from . import torch_groups  # late: as above

            return torch_groups.by_rows(layer, ask, target, weight, chunk)
    step = rows_at_a_time(layer, chunk)
    parts = []
    for i in range(0, layer.rows, step) if layer.rows else (0,):
        where = slice(i, min(i + step, layer.rows))
        part = layer.part(where)
        parts.append(ask(part, part.scores(), None if target is None else target[where, ...], weight))
    if len(parts) == 1:
        return parts[0]
    xp = namespace(layer.x)
    if isinstance(parts[0], tuple):
        return tuple(xp.concat(list(each)) for each in zip(*parts))
    return xp.concat(parts)


def gathered(layer: Layer, classes: Array) -> Array:
    """The scores of some classes of each row, [rows, width], fp32 or fp64: no other row of the weight is touched."""
    if is_torch(layer.x):
        from . import torch_backward as leaf  # late: only where torch is loaded already

        return leaf.gathered(layer, classes)
    if is_jax(layer.x):
        from . import jax_groups as leaf  # late: only where jax is loaded already

        return leaf.gathered(layer, classes, _PIECE)
    xp = namespace(layer.x)
    step = max(1, _PIECE // max(1, math.prod(classes.shape[1:]) * layer.x.shape[1]))
    parts = [
        dots(layer.part(slice(i, end := min(i + step, layer.rows))), classes[i:end, ...], xp)
        for i in range(0, max(layer.rows, 1), step)
    ]
    return xp.concat(parts)
