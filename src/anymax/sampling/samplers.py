"""Classes drawn from a map, and the relaxed samples of Gumbel-softmax.

`generator` is a `numpy.random.Generator` for NumPy and array-API arrays, a `torch.Generator` for torch, a key for JAX, or an integer
seed for any of them. It may also be a list of these, one per row (for JAX also an array of keys); then the result of a row depends
only on its generator and its scores. The default is the global generator of NumPy or torch (`numpy.random.seed`,
`torch.manual_seed`); JAX has none, so a key is required. Indices have the namespace's default integer dtype, with `num_samples` as a
new first axis. A masked class is never drawn; a row without a class to draw (all masked, or with NaN or +inf) gives -1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, Unpack, overload

import numpy as np

from .._array import (
    Array,
    Namespace,
    all_finite,
    as_dtype,
    as_scalar,
    axis_or_all,
    check_axis,
    check_flag,
    finite_scores,
    floats,
    from_last,
    is_number,
    like,
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
from .._core.axes import on_one_axis
from .._core.mapping import Mapping, with_missing_mass
from .._core.names import as_mapping
from .._core.options import check_keywords
from .._core.rows import hide, join, prepare, prepare_axes, with_a_class
from .._core.shards import refuse as refuse_sharded
from .._core.tables import document, documented_like
from .._core.typing import AnyArray, ArrayT, Axes, Numbers, Parameter
from .._random.draws import at, count_of, invert, uniforms
from .._random.noises import Noise, with_noise
from ..functional import apply
from ..functional.draws import check_draw, log_p_of_draw, may_draw_none, one_draw
from ..mappings import Softmax
from ..transforms import noise as noisy
from ..transforms import temperature as tempered
from ..transforms.applying import Pass, cut_and_full, read_steps, transforms_along
from .results import (
    DrawOptions,
    Invalid,
    Sample,
    SampleOptions,
    check_invalid,
    support_of,
    validated,
)
from .supports import with_support


@overload
def gumbel_max(x: np.ndarray[Any, Any] | Numbers, **options: Unpack[DrawOptions]) -> np.ndarray[Any, Any]: ...
@overload
def gumbel_max(x: ArrayT, **options: Unpack[DrawOptions]) -> ArrayT: ...
@check_keywords(logits="x", key="generator")
def gumbel_max(
    x: Any,
    *,
    generator: Any = None,
    axis: Axes = -1,
    dim: Axes = None,
    num_samples: int | None = None,
    invalid: Invalid = None,
) -> Any:
    """Indices distributed as softmax(x): `argmax(x + Gumbel noise)`.

    It needs one random number per class; `sample` needs one per row. Gumbel 1954; Maddison et al. 2014.

    Parameters
    ----------
    num_samples
        How many to draw from each row, as a new first axis.

    Returns
    -------
    Any
        Integers, an array of the kind of x without the axis of the classes; -1 where a row has no class.

    Examples
    --------
    >>> gumbel_max([0.0, 1.0, -float("inf")], generator=0, num_samples=6)
    array([1, 0, 1, 1, 1, 0])
    """
    refuse_sharded("gumbel_max", x)
    return perturb_argmax(
        x, "gumbel", generator=generator, axis=axis, dim=dim, num_samples=num_samples, invalid=invalid
    )


@overload
def perturb_argmax(
    x: np.ndarray[Any, Any] | Numbers, noise: str | Noise = "normal", scale: float = 1.0, **options: Unpack[DrawOptions]
) -> np.ndarray[Any, Any]: ...
@overload
def perturb_argmax(
    x: ArrayT, noise: str | Noise = "normal", scale: float = 1.0, **options: Unpack[DrawOptions]
) -> ArrayT: ...
@check_keywords(logits="x", key="generator")
@documented_like(gumbel_max)
def perturb_argmax(
    x: Any,
    noise: str | Noise = "normal",
    scale: float = 1.0,
    *,
    generator: Any = None,
    axis: Axes = -1,
    dim: Axes = None,
    num_samples: int | None = None,
    invalid: Invalid = None,
) -> Any:
    """Indices distributed as the map PerturbMax(noise): `argmax(x + scale * noise)`.

    `perturb_max(x, noise)` gives the probabilities.

    Parameters
    ----------
    noise
        "gumbel", "normal", "logistic", "laplace", "exponential", "uniform" on [0, 1], or your own `Noise`.
    scale
        The factor of the noise, a number of at least 0.

    Examples
    --------
    >>> perturb_argmax([0.0, 3.0], "uniform", generator=0)
    np.int64(1)
    """
    refuse_sharded("perturb_argmax", x)
    scale = number(scale)
    if not is_number(scale):
        raise TypeError(f"perturb_argmax: scale must be a number, got {scale!r}")
    if not 0 <= scale < math.inf:
        raise ValueError(f"perturb_argmax: scale must be at least 0 and finite, got {scale}")
    check_invalid("perturb_argmax", invalid)
    x, xp = floats(x)
    x, axis = on_one_axis(x, pick_axis(axis, dim))
    rows = to_last(x, axis, xp)
    _check_classes("perturb_argmax", rows, axis, invalid)
    rows = with_a_class(stop_gradient(upcast(rows, xp)))
    n, size = rows.shape[-1], count_of(num_samples)

    def of_block(some: Array, added: Array) -> Array:
        added = scale * xp.reshape(added, (*some.shape[:-1], size, n))
        if all_finite(some, xp):
            return xp.argmax(xp.expand_dims(some, axis=-2) + added, axis=-1)
        y, keep, poisoned = finite_scores(some, xp)
        keep = xp.expand_dims(keep, axis=-2)
        index = xp.argmax(hide(xp.expand_dims(y, axis=-2) + added, keep), axis=-1)
        return xp.where(poisoned | ~xp.any(keep, axis=-1), -xp.ones_like(index), index)

    with quiet(rows):
        index = with_noise(of_block, noise, rows, size * n, generator)
    index = validated("perturb_argmax", index, rows, invalid, xp)
    return _samples_first(index, num_samples, xp)


@check_keywords({"eps": "leave it out"}, logits="x", tau="temperature", key="generator")
def gumbel_softmax(
    x: ArrayT | Numbers,
    temperature: Parameter = 1.0,
    *,
    hard: bool = False,
    generator: Any = None,
    axis: Axes = -1,
    dim: Axes = None,
    mapping: Mapping | str | None = None,
) -> ArrayT:
    """A relaxed sample, differentiable in x: `softmax((x + Gumbel noise) / temperature)`, or another map instead of softmax.

    Use it for a discrete choice inside a model that is trained by gradients, like `torch.nn.functional.gumbel_softmax`. Jang et al.
    2017; Maddison et al. 2017.

    Parameters
    ----------
    temperature
        A number of at least 0, or an array with one value per row; 0 is one-hot with gradient 0.
    hard
        Return the one-hot vector of the sample's largest entry, with the gradient of the relaxed sample (straight-through).
        For a map with an upper bound on probabilities, the largest entries get the bound until the sum is reached: with
        `Budget(k)` the k largest are 1.
    mapping
        The map, or its name; softmax by default.

    Returns
    -------
    Array
        Probabilities, an array of the kind, shape and dtype of x.

    Examples
    --------
    >>> gumbel_softmax([1.0, 2.0, 0.5], hard=True, generator=0)
    array([0., 0., 1.])
    """
    refuse_sharded("gumbel_softmax", x)
    hard = check_flag("gumbel_softmax", "hard", hard)
    axis, chosen = pick_axis(axis, dim), Softmax() if mapping is None else as_mapping(mapping, "gumbel_softmax")
    scores, xp = floats(x)
    axis = axis_or_all(axis, scores.ndim)
    if isinstance(axis, (tuple, list)):
        joined, chosen, _ = join(chosen, scores, axis, None)
        temperature = joined.lay_out(number(temperature), "temperature")
        return joined.restore(
            gumbel_softmax(joined.scores, temperature, hard=hard, generator=generator, mapping=chosen)
        )
    axis = check_axis(axis, scores.ndim)
    z = tempered(temperature)(noisy("gumbel", generator=generator, axis=axis)(upcast(scores, xp)))
    p = apply(chosen, z, axis)
    if hard:
        corner = _corner(chosen, stop_gradient(z), to_last(stop_gradient(p), axis, xp), axis, xp)
        p = from_last(corner, axis, xp) + (p - stop_gradient(p))  # the bracket is exactly 0
    return as_dtype(p, scores.dtype, xp)


def _corner(mapping: Mapping, z: Array, p: Array, axis: int, xp: Namespace) -> Array:
    """The limit of the rows of p as the scores z are scaled up: most often the largest scores get the whole sum, each up to its bound."""
    call = prepare(mapping.frozen(), z, axis, least=0)
    if not call.rows.shape[-1]:
        return p
    call = call.over_all()
    rows, aligned = call.rows, call.mapping
    if call.caller is not None:
        return call.seen(_corner(aligned, rows, apply(aligned, rows), -1, xp))
    if (corner := aligned.corner(rows, xp)) is not None:
        return corner
    check_draw(mapping, "gumbel_softmax")
    if (most := aligned.ceiling(rows, xp)) is None:
        first = xp.expand_dims(xp.argmax(p, axis=-1), axis=-1)
        return xp.astype((positions(p, first.dtype, xp) == first) & ~(p <= 0), p.dtype)
    order = xp.argsort(rows, axis=-1, descending=True, stable=True)
    room = xp.take_along_axis(
        xp.where(rows > -math.inf, most * xp.ones_like(rows), xp.zeros_like(rows)), order, axis=-1
    )
    whole = like(aligned.sums(rows > -math.inf, xp)[1], rows, xp)
    left = whole - (running_sum(room, xp) - room)  # what the classes before leave of the sum
    share = xp.where(left < room, left, room)
    share = xp.where(share > 0, share, xp.zeros_like(share))
    return xp.take_along_axis(share, xp.argsort(order, axis=-1), axis=-1)


@overload
def sample(
    mapping: Mapping | str,
    x: np.ndarray[Any, Any] | Numbers,
    *,
    return_log_prob: Literal[False] = False,
    return_support: Literal[False] = False,
    **options: Unpack[SampleOptions],
) -> np.ndarray[Any, Any]: ...
@overload
def sample(
    mapping: Mapping | str,
    x: ArrayT,
    *,
    return_log_prob: Literal[False] = False,
    return_support: Literal[False] = False,
    **options: Unpack[SampleOptions],
) -> ArrayT: ...
@overload
def sample(
    mapping: Mapping | str,
    x: AnyArray | Numbers,
    *,
    return_log_prob: Literal[True],
    return_support: bool = False,
    **options: Unpack[SampleOptions],
) -> Sample: ...
@overload
def sample(
    mapping: Mapping | str,
    x: AnyArray | Numbers,
    *,
    return_log_prob: bool = False,
    return_support: Literal[True],
    **options: Unpack[SampleOptions],
) -> Sample: ...
@overload
def sample(
    mapping: Mapping | str,
    x: ArrayT | Numbers,
    *,
    return_log_prob: bool = False,
    return_support: bool = False,
    **options: Unpack[SampleOptions],
) -> ArrayT | Sample: ...
@check_keywords(
    {
        "replacement": "draws are independent; anymax.sampling.gumbel_topk draws classes that differ",
    },
    logits="x",
    key="generator",
)
def sample(
    mapping: Mapping | str,
    x: Any,
    *,
    transform: Callable[[Any], Any] | None = None,
    generator: Any = None,
    num_samples: int | None = None,
    axis: Axes = -1,
    dim: Axes = None,
    mask: Any = None,
    return_log_prob: bool = False,
    return_support: bool = False,
    invalid: Invalid = None,
) -> Any:
    """Classes drawn with the probabilities of any map, after any transforms of the scores.

    Use it to sample tokens or actions: `sample(Softmax(), logits, transform=compose(temperature(0.7), topk(50), topp(0.95)))`. It takes
    one uniform number per row and inverts the distribution function. A class with probability 0 is never drawn, so a sparse map samples
    from its support.

    Parameters
    ----------
    generator
        A generator or key, an integer seed, or a list of these, one per row; by default the global one of NumPy or torch.
        With one generator, row i (in C order of the other axes) takes its i-th number, or with `num_samples` = S the S
        numbers from i * S on. So a draw does not depend on the rows after it, except with torch on a GPU, where the numbers
        depend on how many are drawn.
    num_samples
        How many to draw from each row, independently, as a new first axis.
    return_log_prob
        Also return `log_prob` and `full_log_prob` of the classes that were drawn, as constants for differentiation.
        `log_prob` is normalised over the classes that the transform keeps (vLLM's "processed" log p), for a trainer that uses
        the same support. `full_log_prob` is normalised over all classes, without the truncations of the transform (topk,
        topp, minp, topnsigma, typical, eta, epsilon_cutoff, xtc). Both contain penalties, biases, temperatures, your own
        functions, and the truncation of the map itself, such as `SparseSoftmax`. They are fp32 for scores in half precision,
        and log(p / k) for a map whose probabilities sum to k (`Budget`). They are -inf in a row that is all masked, and NaN
        in one with NaN or +inf. Leave such rows out of importance ratios: `anymax.log_prob` of their -1 is 0.
    return_support
        Also return the support of each row, the classes that could be drawn, as `ids` and `offsets`; not under `jax.jit`.

    Returns
    -------
    Any
        Integers, an array of the kind of x without the axis of the classes, -1 where a row has no class; or, with
        `return_log_prob` or `return_support`, a named tuple (index, log_prob, full_log_prob, support).

    Examples
    --------
    >>> from anymax import Softmax, compose, temperature, topk, topp
    >>> sample(Softmax(), [1.0, 0.5, -3.0], generator=0, num_samples=6)
    array([1, 0, 0, 0, 1, 1])
    >>> cut = compose(temperature(0.7), topk(2), topp(0.9))
    >>> drawn = sample(Softmax(), [1.0, 0.5, -3.0], transform=cut, generator=0, return_log_prob=True, return_support=True)
    >>> int(drawn.index), float(drawn.log_prob.round(3)), float(drawn.full_log_prob.round(3)), drawn.support.ids
    (0, -0.398, -0.401, array([0, 1]))
    """
    mapping, axis = as_mapping(mapping, "sample"), pick_axis(axis, dim)
    refuse_sharded("sample", x)
    check_invalid("sample", invalid)
    call = prepare_axes(mapping, x, axis, mask, least=0)
    axis, xp = call.axis, namespace(call.rows)
    _check_classes("sample", call.rows, axis, invalid)
    call = call.with_a_class()
    rows, mapping, size = call.rows, call.mapping.frozen(), count_of(num_samples)
    check_draw(mapping, "sample")
    outside = may_draw_none(mapping)  # the last index is none of the classes
    parts = transforms_along(transform, axis, rows.ndim, "sample")
    read = None if outside else read_steps(parts, rows, axis, mapping)
    parts = parts if read is None else read.parts
    cut = full = stop_gradient(rows)
    if parts:
        cut, full = cut_and_full("sample", parts, upcast(cut, xp), axis, return_log_prob)
    if outside:  # the transforms have not seen a class that the map hides
        constant = call._replace(mapping=mapping)
        over_all = constant.over_all(cut)
        full = over_all.rows if full is cut else constant.over_all(full).rows
        cut, mapping = over_all.rows, over_all.mapping
        read = read_steps((), cut, -1, mapping) if over_all.hides and not return_support else None
    if read is None:
        drawn = _by_inversion(mapping, cut, full, size, generator, return_log_prob, return_support, outside)
    else:
        drawn = _in_one_pass(read, mapping, cut, full, size, generator, return_log_prob, return_support)
    if invalid is not None:
        drawn = drawn._replace(index=validated("sample", drawn.index, call.rows, invalid, xp))
    if outside:  # which is no lost row
        drawn = drawn._replace(index=xp.where(drawn.index == rows.shape[-1], -xp.ones_like(drawn.index), drawn.index))
    index, log_prob, full_log_prob = (None if v is None else _samples_first(v, num_samples, xp) for v in drawn[:3])
    return Sample(index, log_prob, full_log_prob, drawn.support) if return_log_prob or return_support else index


def _by_inversion(
    mapping: Mapping, cut: Array, full: Array, size: int, generator: Any, log_prob: bool, support: bool, outside: bool
) -> Sample:
    """Samples by the inverse of the distribution function, [..., size]. outside: the last index is none of the classes, in no support."""
    xp = namespace(cut)
    p = stop_gradient(apply(mapping, upcast(cut, xp)))
    p = with_missing_mass(p, 1.0, xp) if one_draw(mapping) == "rest" else p
    index = invert(p, uniforms(p, size, generator, xp), xp)
    log_p = _log_prob(mapping, cut, index, xp) if log_prob else None
    full_log_p = log_p if full is cut or not log_prob else _log_prob(mapping, full, index, xp)
    return Sample(index, log_p, full_log_p, support_of(p[..., : p.shape[-1] - outside], xp) if support else None)


def _in_one_pass(
    read: Pass,
    mapping: Mapping,
    cut: Array,
    full: Array,
    size: int,
    generator: Any,
    log_prob: bool,
    support: bool,
) -> Sample:
    """Samples from the engine, [..., size]; the engine runs the transforms as steps."""
    xp = namespace(cut)
    every = tuple(step for step, _ in read.steps)
    u, listed = uniforms(cut, size, generator, xp), None
    if support:
        drawn, listed = with_support(read, mapping, upcast(cut, xp), u, log_prob)
    else:
        drawn = read.engine.decode(mapping, cut, every, u=u, log_p=log_prob)
    if not log_prob:
        return Sample(drawn.index, support=listed)
    without_cuts = tuple(step for step, truncates in read.steps if not truncates)
    same = full is cut and len(without_cuts) == len(every)
    full_log_p = drawn.log_p if same else read.engine.decode(mapping, full, without_cuts, given=drawn.index).log_p
    wide = upcast(cut[..., :0], xp).dtype
    return Sample(drawn.index, xp.astype(drawn.log_p, wide), xp.astype(full_log_p, wide), listed)


def _log_prob(mapping: Mapping, rows: Array, index: Array, xp: Namespace) -> Array:
    """log p at the indices, a constant for differentiation."""
    return at(stop_gradient(log_p_of_draw(mapping, upcast(rows, xp), xp, none=True)), index, xp)


def _samples_first(index: Array, num_samples: int | None, xp: Namespace) -> Array:
    """The indices [..., samples] with the samples as the first axis, or without that axis if `num_samples` is None."""
    if num_samples is None:
        return as_scalar(index[..., 0])
    last = index.ndim - 1
    return xp.permute_dims(index, (last, *range(last)))


def _check_classes(who: str, rows: Array, axis: int, invalid: Invalid) -> None:
    if invalid == "argmax" and not rows.shape[-1]:
        raise ValueError(f"{who}: axis {axis} of the scores is empty, so that invalid='argmax' has no class to give")


document(globals(), SampleOptions)
