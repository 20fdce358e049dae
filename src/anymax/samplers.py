"""Samples: classes drawn from a map, and the relaxed samples of Gumbel-softmax. Randomness is always an argument.

`generator` is a `numpy.random.Generator` for NumPy and array-API arrays, a `torch.Generator` for torch, a key for
JAX, or an integer seed for any. Indices come in the namespace's default integer dtype, with `num_samples` as a new
first axis. A masked class is never drawn; a row with no class to draw (all masked, or with NaN or +inf) gives -1.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ._array import (
    Array,
    Namespace,
    asarray,
    check_axis,
    finite_scores,
    floating,
    from_last,
    is_jax,
    is_torch,
    namespace,
    number,
    pick_axis,
    positions,
    quiet,
    running_sum,
    stop_gradient,
    to_last,
    upcast,
)
from ._mapping import Mapping
from ._names import as_mapping
from ._noises import draw
from ._options import answering
from ._random import uniform
from .functional import apply
from .mappings import Softmax
from .transforms import noise as noisy
from .transforms import temperature as tempered


@answering(logits="x", key="generator")
def gumbel_max(
    x: Any, *, generator: Any, axis: int | None = None, dim: int | None = None, num_samples: int | None = None
) -> Array:
    """Indices distributed as softmax(x): `argmax(x + Gumbel noise)`. Gumbel 1954; Maddison et al. 2014.

    >>> gumbel_max([0.0, 1.0, -float("inf")], generator=0, num_samples=6)
    array([1, 0, 1, 1, 1, 0])
    """
    return perturb_argmax(x, "gumbel", generator=generator, axis=axis, dim=dim, num_samples=num_samples)


@answering(logits="x", key="generator")
def perturb_argmax(
    x: Any,
    noise: Any = "normal",
    scale: float = 1.0,
    *,
    generator: Any,
    axis: int | None = None,
    dim: int | None = None,
    num_samples: int | None = None,
) -> Array:
    """Indices distributed as the map PerturbMax(noise): `argmax(x + scale * noise)`.

    noise: "gumbel", "normal", "logistic", "laplace", "exponential", "uniform" on [0, 1], or a `Noise` of your own.

    >>> perturb_argmax([0.0, 3.0], "uniform", generator=0)
    array(1)
    """
    scale = number(scale)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"perturb_argmax: scale must be a number, got {scale!r}")
    if not 0 <= scale < math.inf:
        raise ValueError(f"perturb_argmax: scale must be at least 0 and finite, got {scale}")
    rows, xp = _rows(x, pick_axis(axis, dim))
    y, keep, poisoned = finite_scores(stop_gradient(upcast(rows, xp)), xp)
    shape = tuple(y.shape) if num_samples is None else (_count(num_samples), *y.shape)
    with quiet(y):
        z = y + scale * draw(noise, shape, y, generator)
    index = xp.argmax(xp.where(keep, z, -math.inf * xp.ones_like(z)), axis=-1)
    dead = (poisoned | ~xp.any(keep, axis=-1, keepdims=True))[..., 0]
    return xp.where(dead, -xp.ones_like(index), index)


@answering({"eps": "leave it out"}, logits="x", tau="temperature", key="generator")
def gumbel_softmax(
    x: Any,
    temperature: Any = 1.0,
    *,
    hard: bool = False,
    generator: Any,
    axis: int | None = None,
    dim: int | None = None,
    mapping: Mapping | None = None,
) -> Array:
    """A relaxed sample, differentiable in x: `softmax((x + Gumbel noise) / temperature)`, or any other map of it.

    hard: the one-hot of its largest entry, with the gradient of the relaxed sample (straight-through); temperature 0 is one-hot with
    gradient 0. As `torch.nn.functional.gumbel_softmax`. Jang et al. 2017; Maddison et al. 2017.

    >>> gumbel_softmax([1.0, 2.0, 0.5], hard=True, generator=0)
    array([0., 0., 1.])
    """
    if not isinstance(hard, bool):
        raise TypeError(f"gumbel_softmax: hard must be True or False, got {hard!r}")
    axis = pick_axis(axis, dim)
    x = asarray(x)
    xp = namespace(x)
    x = floating(x, xp)
    z = tempered(temperature)(noisy("gumbel", generator=generator)(upcast(x, xp)))
    p = apply(Softmax() if mapping is None else as_mapping(mapping, "gumbel_softmax"), z, axis)
    if hard:
        axis = check_axis(axis, x.ndim)
        rows = to_last(p, axis, xp)
        first = xp.expand_dims(xp.argmax(stop_gradient(rows), axis=-1), axis=-1)
        one = xp.astype((positions(rows, first.dtype, xp) == first) & ~(rows <= 0), p.dtype)
        p = from_last(one, axis, xp) + (p - stop_gradient(p))  # the bracket is 0, and exactly so
    return p if p.dtype == x.dtype else xp.astype(p, x.dtype)


@answering(logits="x", key="generator")
def sample(
    mapping: Mapping,
    x: Any,
    *,
    generator: Any,
    num_samples: int | None = None,
    axis: int | None = None,
    dim: int | None = None,
    mask: Any = None,
) -> Array:
    """Indices distributed as the probabilities p(x) of any map, by its inverse distribution function.

    A class of probability exactly 0 is never drawn, so a sparse map samples from its support.

    >>> from anymax.mappings import Sparsemax
    >>> sample(Sparsemax(), [1.0, 0.5, -3.0], generator=0, num_samples=6)
    array([0, 0, 0, 0, 1, 1])
    """
    mapping, axis = as_mapping(mapping, "sample"), pick_axis(axis, dim)
    x = asarray(x)
    rows, xp = _rows(x, axis)
    axis = check_axis(axis, x.ndim)
    p = apply(mapping, stop_gradient(from_last(upcast(rows, xp), axis, xp)), axis, mask=mask)
    p = stop_gradient(to_last(p, axis, xp))
    index = _invert(p, 1 if num_samples is None else _count(num_samples), generator, xp)
    if num_samples is None:
        return index[..., 0]
    last = index.ndim - 1
    return xp.permute_dims(index, (last, *range(last)))


def _invert(p: Array, size: int, generator: Any, xp: Namespace) -> Array:
    """`size` indices a row, [..., size], each the first whose cumulative probability exceeds a uniform number."""
    wide = p.dtype if is_jax(p) or (is_torch(p) and p.device.type == "mps") else xp.float64
    upto = running_sum(p, xp, wide)
    u = uniform((*p.shape[:-1], size), upto, generator)
    index = _first_above(upto, u * upto[..., -1:], xp)
    # Parallel sums need not be monotone in the last bit, so that a class of mass 0 could be met: move on to the next
    # with mass
    rank = running_sum(p > 0, xp, xp.int32)
    wanted = xp.take_along_axis(rank, index, axis=-1) - xp.astype(xp.take_along_axis(p, index, axis=-1) > 0, xp.int32)
    last = rank[..., -1:] - 1
    index = _first_above(rank, xp.where(wanted < last, wanted, last), xp)
    dead = xp.isnan(upto[..., -1:]) | (rank[..., -1:] == 0)
    return xp.where(dead, -xp.ones_like(index), index)


def _first_above(ascending: Array, level: Array, xp: Namespace) -> Array:
    """The first index of each row whose value is above each of its levels, by bisection; the last if none is."""
    n = ascending.shape[-1]
    low = xp.zeros_like(level, dtype=xp.asarray(0).dtype)
    high = low + (n - 1)
    for _ in range(int(n).bit_length()):
        middle = (low + high) // 2
        above = xp.take_along_axis(ascending, middle, axis=-1) > level
        high = xp.where(above, middle, high)
        low = xp.where(above | (middle >= high), low, middle + 1)
    return high


def _rows(x: Any, axis: int) -> tuple[Array, Namespace]:
    x = asarray(x)
    xp = namespace(x)
    x = floating(x, xp)
    axis = check_axis(axis, x.ndim)
    if x.shape[axis] == 0:
        raise ValueError(
            f"axis {axis} of the scores is empty: there is no class to draw; got the shape {tuple(x.shape)}"
        )
    return to_last(x, axis, xp), xp


def _count(num_samples: Any) -> int:
    if isinstance(num_samples, bool) or not isinstance(num_samples, (int, np.integer)) or num_samples < 0:
        raise TypeError(f"num_samples: expected None or a non-negative integer, got {num_samples!r}")
    return int(num_samples)
