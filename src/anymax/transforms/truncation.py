"""Transforms that keep some classes, chosen by their scores, and mask the others. Kept scores are not changed."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar

from .._array import (
    ABOVE_0,
    AT_LEAST_1,
    INSIDE,
    SHARE,
    UNIT,
    Array,
    Namespace,
    Ranges,
    finite_scores,
    fit_axes,
    floats,
    is_array,
    is_int,
    is_integer,
    namespace,
    number,
    pick_axis,
    stop_gradient,
    top,
    total,
)
from .._core.rows import hide
from .._core.typing import AnyArray, Numbers, Parameter
from .._random.generators import listed, uniform
from .._random.truncation import cutoff_keep, group_keep, topk_keep, topp_keep, typical_keep, xtc_keep
from ..kernels import engine_of
from ..kernels.selection import chosen_mask, masked_as
from ..kernels.tasks import DECODE, Groups
from ..mappings import Softmax
from .base import Transform, brief, by_blocks, by_steps, makes_transform, of_scores

_SOFTMAX = Softmax()
_MOST = 2**31 - 1  # positions are counted in 32 bits


def _off(value: Any) -> str:
    """For 0 and -1, which configs have for "off": what to write for that."""
    value = number(value)
    off = isinstance(value, (int, float)) and value in (0, -1)
    return f" (a config's {value:g} for off is no transform: leave it out, or use from_config)" if off else ""


class Truncation(Transform):
    """A transform that masks classes by their scores; `keep` of a subclass chooses the classes that stay."""

    truncates = True

    @abstractmethod
    def keep(self, x: Array, xp: Namespace, **params: Any) -> Array:
        """True where a score is kept; same arguments as `rows`."""

    def rows(self, x: Array, xp: Namespace, **params: Any) -> Array:
        return hide(x, self.keep(x, xp, **params))


class ByLevel(Truncation):
    """A truncation that is another one with a number for each row."""

    blocks_itself = True

    @abstractmethod
    def level_of(self, x: Array, xp: Namespace, **params: Any) -> Array:
        """The number of each row, [..., 1], a constant for differentiation; same arguments as `rows`."""

    def other(self, level: Array) -> Truncation:
        """The other one: by default `topk`, and the level is how many classes it keeps."""
        return _TopK((("k", level), ("min_keep", 1)))

    def keep(self, x: Array, xp: Namespace, **params: Any) -> Array:
        other = self.other(self.level_of(x, xp, **params))
        return other.keep(x, xp, **dict(other.params))

    def rows(self, x: Array, xp: Namespace, **params: Any) -> Array:
        level = by_blocks(self.level_of, stop_gradient(x), xp, params)
        other, engine = self.other(level), engine_of(DECODE, _SOFTMAX, x)
        if engine is not None:
            return by_steps(engine, x, (other.as_step(x, dict(other.params)),))
        return by_blocks(other.rows, x, xp, dict(other.params))


@makes_transform
def topk(
    k: int | AnyArray,
    min_keep: int = 1,
    *,
    by: AnyArray | Numbers | None = None,
    groups: int | None = None,
    keep_groups: int | None = None,
    group_by: int | str = 2,
    axis: int = -1,
    dim: int | None = None,
) -> Transform:
    """Keep exactly the k largest scores and mask the others; keep all if there are fewer than k.

    The simplest truncation, and the cheapest. `topp` and `minp` adapt the number of classes to each row. With `by` and `groups` it is the
    choice of a router, which `anymax.routing.route` makes in fewer steps.

    Parameters
    ----------
    k
        How many scores to keep, at least 1, or an array of integers with one value per row: [..., 1]. Among equal scores the
        first are kept.
    min_keep
        Keep at least this many, even if k is smaller.
    by
        Other scores, which broadcast to the scores: the k largest of these are chosen, and the scores at these places are
        kept. To choose with a bias, give `scores + bias`. It is a constant for differentiation.
    groups, keep_groups
        Split the classes into so many blocks of equal size, and choose only from the `keep_groups` blocks with the largest
        sums; in a tie from the first.
    group_by
        The sum of a group is that of its so many largest scores, 2 as in DeepSeek-V3; "max": its largest score, as in
        DeepSeek-V2.

    Examples
    --------
    >>> topk(2)([3.0, 1.0, 3.0, 3.0])
    array([  3., -inf,   3., -inf])

    The class with the largest score is in a group that is not kept:

    >>> topk(2, groups=2, keep_groups=1)([3.0, 1.0, 2.5, 2.0])
    array([-inf, -inf,  2.5,  2. ])
    """
    min_keep = min_keep_of("topk", min_keep)
    given: Any = k
    one = is_array(given) and (given.ndim > 0 or not is_int(number(given)))
    if one and is_integer(given):
        _TopK.check(k=given)
    elif one or not is_int(number(given)):
        raise TypeError(
            f"topk: k must be an integer, the number of scores to keep, got {brief(given)}{of_scores('topk', given)}"
        )
    elif given < 1:
        raise ValueError(f"topk: k must be at least 1{_off(given)}, got {given}")
    params = (("k", given), ("min_keep", min_keep)) if one else (("k", max(int(given), min_keep)),)
    split = check_groups("topk", groups, keep_groups, group_by)
    if by is None and split is None:
        return _TopK(params, pick_axis(axis, dim))
    by = None if by is None else floats(by, "topk: by")[0]
    of_groups = (("groups", groups), ("keep_groups", keep_groups), ("group_by", None if split is None else group_by))
    return _TopKBy((*params, ("by", by), *of_groups), pick_axis(axis, dim))


def check_groups(who: str, groups: Any, keep_groups: Any, group_by: Any) -> Groups | None:
    """What a caller says of groups; None if there are none."""
    if groups is None:
        if keep_groups is not None or group_by != 2:
            raise ValueError(
                f"{who}: keep_groups and group_by belong to groups=, the number of groups, which is missing"
            )
        return None
    for name, value in (("groups", groups), ("keep_groups", keep_groups)):
        if not is_int(number(value)) or value < 1:
            raise ValueError(f"{who}: {name} must be an integer of at least 1 where there are groups, got {value!r}")
    if keep_groups > groups:
        raise ValueError(f"{who}: keep_groups must be at most groups, {groups}, got {keep_groups}")
    if group_by != "max" and (not is_int(number(group_by)) or group_by < 1):
        raise ValueError(
            f'{who}: group_by must be "max" or how many of a group\'s largest scores are added, got {group_by!r}'
        )
    return Groups(int(groups), int(keep_groups), 1 if group_by == "max" else int(group_by))


def fit_groups(who: str, groups: Groups | None, n: int) -> Groups | None:
    """The groups, or an error if n classes can't be split so."""
    if groups is None:
        return None
    if n % groups.count:
        raise ValueError(f"{who}: {n} classes can't be split into {groups.count} groups of equal size")
    if groups.most > n // groups.count:
        raise ValueError(
            f"{who}: group_by={groups.most} asks for more scores than a group has, {n // groups.count}; "
            'use fewer, or group_by="max"'
        )
    return groups


class _TopK(Truncation):
    name = step = "topk"
    aligned = ("k",)
    ranges: ClassVar[Ranges] = {"k": AT_LEAST_1}

    def keep(self, x: Array, xp: Namespace, k: Any, min_keep: int = 1) -> Array:
        return topk_keep(x, _at_least(k, min_keep, xp), xp)


class _TopKBy(Truncation):
    name = "topk"
    aligned = ("k", "by")
    ranges: ClassVar[Ranges] = _TopK.ranges

    def keep(
        self, x: Array, xp: Namespace, k: Any, by: Any, groups: Any, keep_groups: Any, group_by: Any, min_keep: int = 1
    ) -> Array:
        x, key = stop_gradient(x), x
        if by is not None:
            by = xp.broadcast_to(fit_axes(stop_gradient(by), tuple(x.shape), "topk: by"), x.shape)
            key = masked_as(by, x, xp)
        n = x.shape[-1]
        split = None if groups is None else check_groups("topk", groups, keep_groups, group_by)
        split = fit_groups("topk", split, n)
        if not is_array(k) and k < n and (mask := chosen_mask(key, k, xp, split)) is not None:
            return mask
        if split is not None and split.keep < split.count:
            key = hide(key, group_keep(key, *split, xp))
        return topk_keep(key, _at_least(k, min_keep, xp), xp)


def _at_least(k: Any, least: int, xp: Namespace) -> Any:
    return xp.where(k > least, k, least * xp.ones_like(k)) if is_array(k) else max(k, least)


@makes_transform
def topp(p: Parameter, min_keep: int = 1, *, axis: int = -1, dim: int | None = None) -> Transform:
    """Keep the nucleus: the fewest largest scores whose softmax mass reaches p, at least one.

    The usual truncation of a sampler. Holtzman et al. 2020.

    Parameters
    ----------
    p
        The mass, above 0 and at most 1 (which keeps all), or an array with one value per row: [..., 1]. Among equal scores
        at the edge the first are kept.
    min_keep
        Keep at least this many of the largest.

    Examples
    --------
    >>> topp(0.7)([2.0, 1.0, 0.0])
    array([  2.,   1., -inf])
    """
    _TopP.check(p=p)
    return _TopP((("p", p), ("min_keep", min_keep_of("topp", min_keep))), pick_axis(axis, dim))


class _TopP(Truncation):
    name = step = "topp"
    aligned = ("p",)
    ranges: ClassVar[Ranges] = {"p": SHARE}

    def keep(self, x: Array, xp: Namespace, p: Any, min_keep: int) -> Array:
        return topp_keep(x, p, xp, min_keep)


@makes_transform
def minp(p: Parameter, min_keep: int = 1, *, axis: int = -1, dim: int | None = None) -> Transform:
    """Keep the scores whose softmax probability is at least p times the largest: `x >= max x + log p`.

    It is a threshold on the scores and needs no sum. At high temperatures it keeps fewer unlikely classes than `topp`. Nguyen et al.
    2024.

    Parameters
    ----------
    p
        The share of the largest probability, above 0 and at most 1, or an array with one value per row: [..., 1].
    min_keep
        Keep at least this many of the largest; among equal scores the first.

    Examples
    --------
    >>> minp(0.2)([2.0, 1.0, 0.0])
    array([  2.,   1., -inf])
    """
    _MinP.check(_off(p), p=p)
    return _MinP((("p", p), ("min_keep", min_keep_of("minp", min_keep))), pick_axis(axis, dim))


class _MinP(Truncation):
    name = step = "minp"
    aligned = ("p",)
    ranges: ClassVar[Ranges] = {"p": SHARE}

    def keep(self, x: Array, xp: Namespace, p: Any, min_keep: int) -> Array:
        y = stop_gradient(x)
        log_p = stop_gradient(xp.log(p)) if is_array(p) else math.log(p)
        keep = ~(y - top(y, xp) < log_p)
        return keep if min_keep == 1 else keep | topk_keep(y, min_keep, xp)


@makes_transform
def topnsigma(n: Parameter, *, axis: int = -1, dim: int | None = None) -> Transform:
    """Keep the scores within n standard deviations of the largest: `x >= max x - n std x`.

    It keeps the same classes at every temperature. Tang et al. 2024.

    Parameters
    ----------
    n
        How many deviations, above 0, or an array with one value per row: [..., 1]. The standard deviation is the
        population one of the entries that are not masked (division by their number). 0, which is "off" in llama.cpp, is an
        error: leave the transform out, or write `topk(1)` for the largest score alone.

    Examples
    --------
    >>> topnsigma(1.0)([4.0, 3.5, 0.0])
    array([ 4. ,  3.5, -inf])
    """
    _TopNSigma.check(_off(n), n=n)
    return _TopNSigma((("n", n),), pick_axis(axis, dim))


class _TopNSigma(Truncation):
    name = step = "topnsigma"
    aligned = ("n",)
    ranges: ClassVar[Ranges] = {"n": ABOVE_0}

    def keep(self, x: Array, xp: Namespace, n: Any) -> Array:
        y, keep, poisoned = finite_scores(stop_gradient(x), xp)
        weight = xp.astype(keep, y.dtype)
        count = total(weight, xp)
        count = xp.where(count > 0, count, xp.ones_like(count))
        high = top(hide(y, keep), xp)
        y = y - xp.where(high > -math.inf, high, xp.zeros_like(high))
        size = top(xp.abs(y * weight), xp)
        unit = xp.where(size > 0, size, xp.ones_like(size))  # squares of large scores must not overflow
        z = y / unit
        mean = total(z * weight, xp) / count
        deviation = xp.sqrt(total(weight * (z - mean) ** 2, xp) / count)
        return ~(z < -(stop_gradient(n) * deviation)) | poisoned


@makes_transform
def typical(mass: Parameter = 0.9, min_keep: int = 1, *, axis: int = -1, dim: int | None = None) -> Transform:
    """Keep the typical classes: the fewest with -log p nearest to the entropy of the row whose softmax mass reaches `mass`.

    Use it for text that is neither dull nor odd; it may mask the most probable class. Meister et al. 2023.

    Parameters
    ----------
    mass
        The mass, above 0 and at most 1 (which keeps all), or an array with one value per row: [..., 1]. If several classes
        at the edge are equally near, all of them are kept.
    min_keep
        Keep at least this many of the nearest.

    Examples
    --------
    >>> import numpy as np
    >>> np.exp(typical(0.5)(np.log([0.4, 0.2, 0.2, 0.2]))).round(3)
    array([0. , 0.2, 0.2, 0.2])
    """
    _Typical.check(mass=mass)
    return _Typical((("mass", mass), ("min_keep", min_keep_of("typical", min_keep))), pick_axis(axis, dim))


class _Typical(Truncation):
    name = step = "typical"
    aligned = ("mass",)
    ranges: ClassVar[Ranges] = {"mass": SHARE}

    def keep(self, x: Array, xp: Namespace, mass: Any, min_keep: int) -> Array:
        return typical_keep(x, mass, xp, min_keep)


@makes_transform
def epsilon_cutoff(epsilon: Parameter, min_keep: int = 1, *, axis: int = -1, dim: int | None = None) -> Transform:
    """Keep the classes whose softmax probability is at least epsilon.

    It masks only the tail; `eta` has a lower threshold for rows with a large entropy. Hewitt et al. 2022.

    Parameters
    ----------
    epsilon
        The smallest probability, above 0 and below 1, or an array with one value per row: [..., 1]; usually 0.0003 to
        0.0009.
    min_keep
        Keep at least this many of the largest, and all that equal the last of these, so that a flat row stays whole.

    Examples
    --------
    >>> import numpy as np
    >>> np.exp(epsilon_cutoff(0.1)(np.log([0.87, 0.099, 0.001, 0.03]))).round(3)
    array([0.87, 0.  , 0.  , 0.  ])
    """
    EpsilonCutoff.check(epsilon=epsilon)
    return EpsilonCutoff(
        (("epsilon", epsilon), ("min_keep", min_keep_of("epsilon_cutoff", min_keep))), pick_axis(axis, dim)
    )


class EpsilonCutoff(Truncation):
    name = step = "epsilon_cutoff"
    aligned = ("epsilon",)
    ranges: ClassVar[Ranges] = {"epsilon": INSIDE}
    by_entropy: ClassVar[bool] = False  # True if the cutoff is lower for rows with a large entropy

    def keep(self, x: Array, xp: Namespace, epsilon: Any, min_keep: int) -> Array:
        return cutoff_keep(x, epsilon, xp, min_keep, by_entropy=self.by_entropy)


@makes_transform
def eta(epsilon: Parameter, min_keep: int = 1, *, axis: int = -1, dim: int | None = None) -> Transform:
    """Keep the classes whose softmax probability is at least `min(epsilon, sqrt(epsilon) exp(-entropy))`.

    It is `epsilon_cutoff` with a lower threshold for rows with a large entropy. Hewitt et al. 2022.

    Parameters
    ----------
    epsilon
        A number above 0 and below 1, or an array with one value per row: [..., 1]; usually 0.0003 to 0.002.
    min_keep
        Keep at least this many of the largest, and all that equal the last of these.

    Examples
    --------
    >>> import numpy as np
    >>> np.exp(eta(0.0625)(np.log([0.01, 0.04, 0.9, 0.05]))).round(3)
    array([0. , 0. , 0.9, 0. ])
    """
    _Eta.check(epsilon=epsilon)
    return _Eta((("epsilon", epsilon), ("min_keep", min_keep_of("eta", min_keep))), pick_axis(axis, dim))


class _Eta(EpsilonCutoff):
    name = step = "eta"
    by_entropy = True


@makes_transform
def xtc(
    threshold: Parameter = 0.1,
    probability: Parameter = 0.5,
    *,
    generator: Any = None,
    axis: int = -1,
    dim: int | None = None,
) -> Transform:
    """Exclude the top choices: at random, mask all classes with probability `threshold` or more except the least probable of them.

    Use it for less predictable text that stays coherent; a row with fewer than two such classes is not changed. The sampler of
    llama.cpp and text-generation-webui (p-e-w, 2024).

    Parameters
    ----------
    threshold
        The smallest probability of a top choice, from 0 to 1, or an array, one per row: [..., 1]; above 0.5 nothing is
        masked. Of several least probable classes the last is kept.
    probability
        How often a row is changed, from 0 to 1, or an array, one per row: [..., 1].
    generator
        A generator or key, an integer seed, or a list of these, one per row; by default the global one of NumPy or torch.
        Row i, in C order, is changed if the i-th number from it is at most `probability`. A sampler with the same seed uses
        the same numbers, so give this transform another seed. A seed or a JAX key changes the same rows in each call, so
        give a generator in a loop over tokens.

    Examples
    --------
    >>> import numpy as np
    >>> np.exp(xtc(0.1, 1.0, generator=0)(np.log([0.4, 0.3, 0.2, 0.06, 0.04]))).round(3)
    array([0.  , 0.  , 0.2 , 0.06, 0.04])
    """
    _XTC.check(threshold=threshold, probability=probability)
    params = (("threshold", threshold), ("probability", probability), ("generator", listed(generator)))
    return _XTC(params, pick_axis(axis, dim))


class _XTC(Truncation):
    name = step = "xtc"
    aligned = ("threshold", "probability")
    ranges: ClassVar[Ranges] = {"threshold": UNIT, "probability": UNIT}
    whole = True  # which rows are changed depends on their indices

    def keep(self, x: Array, xp: Namespace, threshold: Any, probability: Any, generator: Any) -> Array:
        return xtc_keep(x, self.level(x, threshold=threshold, probability=probability, generator=generator), xp)

    def level(self, x: Array, threshold: Any, probability: Any, generator: Any) -> Array:
        """The smallest probability of a top choice, [..., 1]: the threshold, or infinity for a row that is not to change."""
        xp, u = namespace(x), uniform((*x.shape[:-1], 1), x, generator)
        level = threshold + xp.zeros_like(u)
        least = xp.finfo(u.dtype).smallest_normal  # for a threshold of 0: every class with p > 0
        level = xp.where(level > least, level, least * xp.ones_like(u))
        return stop_gradient(xp.where(u <= stop_gradient(probability), level, math.inf * xp.ones_like(u)))


def min_keep_of(who: str, min_keep: Any) -> int:
    if not is_int(number(min_keep)) or min_keep < 1:
        raise ValueError(
            f"{who}: min_keep must be an integer of at least 1, the number of classes to keep, got {brief(min_keep)}"
            + of_scores(who, min_keep)
        )
    return min(int(min_keep), _MOST)
