"""Transforms that keep some classes, chosen by their scores, and mask the others. Kept scores are not changed."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np

from .._array import (
    Array,
    Namespace,
    finite_scores,
    is_array,
    is_int,
    namespace,
    number,
    pick_axis,
    stop_gradient,
    top,
    total,
)
from .._core.rows import hide
from .._core.typing import Parameter
from .._random.generators import listed, uniform
from .._random.truncation import (
    cutoff_keep,
    mink_keep,
    pless_keep,
    toph_keep,
    topk_keep,
    topp_keep,
    typical_keep,
    xtc_keep,
)
from .base import Transform, brief, check_range, makes_transform, of_scores

_MASS = "above 0 and at most 1"
_INSIDE = "above 0 and below 1"
_MOST = 2**31 - 1  # positions are counted in 32 bits


class Truncation(Transform):
    """A transform that masks classes by their scores; `keep` of a subclass chooses the classes that stay."""

    truncates = True

    @abstractmethod
    def keep(self, x: Array, xp: Namespace, **params: Any) -> Array:
        """True where a score is kept; same arguments as `rows`."""

    def rows(self, x: Array, xp: Namespace, **params: Any) -> Array:
        return hide(x, self.keep(x, xp, **params))


@makes_transform
def topk(k: int, min_keep: int = 1, *, axis: int | None = None, dim: int | None = None) -> Transform:
    """Keep exactly the k largest scores and mask the others; keep all if there are fewer than k.

    The simplest truncation, and the cheapest. `topp` and `minp` adapt the number of classes to each row.

    Parameters
    ----------
    k
        How many scores to keep, at least 1. Among equal scores the first are kept.
    min_keep
        Keep at least this many, even if k is smaller.

    Examples
    --------
    >>> topk(2)([3.0, 1.0, 3.0, 3.0])
    array([  3., -inf,   3., -inf])
    """
    if not is_int(number(k)):
        raise TypeError(
            f"topk: k must be an integer, the number of scores to keep, got {brief(k)}{of_scores('topk', k)}"
        )
    if k < 1:
        raise ValueError(f"topk: k must be at least 1, got {k}")
    return _TopK((("k", max(int(k), _min_keep("topk", min_keep))),), pick_axis(axis, dim))


class _TopK(Truncation):
    name = step = "topk"

    def keep(self, x: Array, xp: Namespace, k: int) -> Array:
        return topk_keep(x, k, xp)


@makes_transform
def topp(p: Parameter, min_keep: int = 1, *, axis: int | None = None, dim: int | None = None) -> Transform:
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
    check_range("topp", "p", p, lambda v: (v > 0) & (v <= 1), _MASS)
    return _TopP((("p", p), ("min_keep", _min_keep("topp", min_keep))), pick_axis(axis, dim))


class _TopP(Truncation):
    name = step = "topp"
    aligned = ("p",)

    def keep(self, x: Array, xp: Namespace, p: Any, min_keep: int) -> Array:
        return topp_keep(x, p, xp, min_keep)


@makes_transform
def minp(p: Parameter, min_keep: int = 1, *, axis: int | None = None, dim: int | None = None) -> Transform:
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
    check_range("minp", "p", p, lambda v: (v > 0) & (v <= 1), _MASS)
    return _MinP((("p", p), ("min_keep", _min_keep("minp", min_keep))), pick_axis(axis, dim))


class _MinP(Truncation):
    name = step = "minp"
    aligned = ("p",)

    def keep(self, x: Array, xp: Namespace, p: Any, min_keep: int) -> Array:
        y = stop_gradient(x)
        log_p = stop_gradient(xp.log(p)) if is_array(p) else math.log(p)
        keep = ~(y - top(y, xp) < log_p)
        return keep if min_keep == 1 else keep | topk_keep(y, min_keep, xp)


@makes_transform
def topnsigma(n: Parameter, *, axis: int | None = None, dim: int | None = None) -> Transform:
    """Keep the scores within n standard deviations of the largest: `x >= max x - n std x`.

    It keeps the same classes at every temperature. Tang et al. 2024.

    Parameters
    ----------
    n
        How many deviations, at least 0, or an array with one value per row: [..., 1]. The standard deviation is the
        population one of the entries that are not masked (division by their number).

    Examples
    --------
    >>> topnsigma(1.0)([4.0, 3.5, 0.0])
    array([ 4. ,  3.5, -inf])
    """
    check_range("topnsigma", "n", n, lambda v: v >= 0, "at least 0")
    return _TopNSigma((("n", n),), pick_axis(axis, dim))


class _TopNSigma(Truncation):
    name = step = "topnsigma"
    aligned = ("n",)

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
def typical(mass: Parameter = 0.9, min_keep: int = 1, *, axis: int | None = None, dim: int | None = None) -> Transform:
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
    check_range("typical", "mass", mass, lambda v: (v > 0) & (v <= 1), _MASS)
    return _Typical((("mass", mass), ("min_keep", _min_keep("typical", min_keep))), pick_axis(axis, dim))


class _Typical(Truncation):
    name = step = "typical"
    aligned = ("mass",)

    def keep(self, x: Array, xp: Namespace, mass: Any, min_keep: int) -> Array:
        return typical_keep(x, mass, xp, min_keep)


@makes_transform
def epsilon_cutoff(
    epsilon: Parameter, min_keep: int = 1, *, axis: int | None = None, dim: int | None = None
) -> Transform:
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
    check_range("epsilon_cutoff", "epsilon", epsilon, lambda v: (v > 0) & (v < 1), _INSIDE)
    return _EpsilonCutoff(
        (("epsilon", epsilon), ("min_keep", _min_keep("epsilon_cutoff", min_keep))), pick_axis(axis, dim)
    )


class _EpsilonCutoff(Truncation):
    name = step = "epsilon_cutoff"
    aligned = ("epsilon",)
    by_entropy: ClassVar[bool] = False  # True if the cutoff is lower for rows with a large entropy

    def keep(self, x: Array, xp: Namespace, epsilon: Any, min_keep: int) -> Array:
        return cutoff_keep(x, epsilon, xp, min_keep, by_entropy=self.by_entropy)


@makes_transform
def eta(epsilon: Parameter, min_keep: int = 1, *, axis: int | None = None, dim: int | None = None) -> Transform:
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
    check_range("eta", "epsilon", epsilon, lambda v: (v > 0) & (v < 1), _INSIDE)
    return _Eta((("epsilon", epsilon), ("min_keep", _min_keep("eta", min_keep))), pick_axis(axis, dim))


class _Eta(_EpsilonCutoff):
    name = step = "eta"
    by_entropy = True


@makes_transform
def xtc(
    threshold: Parameter = 0.1,
    probability: Parameter = 0.5,
    *,
    generator: Any = None,
    axis: int | None = None,
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
    check_range("xtc", "threshold", threshold, lambda v: (v >= 0) & (v <= 1), "from 0 to 1")
    check_range("xtc", "probability", probability, lambda v: (v >= 0) & (v <= 1), "from 0 to 1")
    params = (("threshold", threshold), ("probability", probability), ("generator", listed(generator)))
    return _XTC(params, pick_axis(axis, dim))


class _XTC(Truncation):
    name = step = "xtc"
    aligned = ("threshold", "probability")
    whole = True  # which rows are changed depends on their places

    def keep(self, x: Array, xp: Namespace, threshold: Any, probability: Any, generator: Any) -> Array:
        return xtc_keep(x, self.level(x, threshold=threshold, probability=probability, generator=generator), xp)

    def level(self, x: Array, threshold: Any, probability: Any, generator: Any) -> Array:
        """The smallest probability of a top choice, [..., 1]: the threshold, or infinity for a row that is not to change."""
        xp, u = namespace(x), uniform((*x.shape[:-1], 1), x, generator)
        level = threshold + xp.zeros_like(u)
        least = xp.finfo(u.dtype).smallest_normal  # for a threshold of 0: every class with p > 0
        level = xp.where(level > least, level, least * xp.ones_like(u))
        return stop_gradient(xp.where(u <= stop_gradient(probability), level, math.inf * xp.ones_like(u)))


@makes_transform
def pless(norm: bool = False, min_keep: int = 1, *, axis: int | None = None, dim: int | None = None) -> Transform:
    """Keep the classes whose softmax probability is at least `sum p^2`, the chance that two draws agree.

    It has no level to choose: a flat row keeps many classes and a peaked one few. Tan et al. 2025 (p-less sampling).

    Parameters
    ----------
    norm
        True for p-less-norm, which keeps more: the level is `(n sum p^2 - 1) / (n - 1)`, with n the number of classes that are not
        masked.
    min_keep
        Keep at least this many of the largest, and all that equal the last of these.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.log([0.6, 0.3, 0.1])  # sum p^2 = 0.46
    >>> np.exp(pless()(x)).round(3)
    array([0.6, 0. , 0. ])
    >>> np.exp(pless(norm=True)(x)).round(3)  # (3 * 0.46 - 1) / 2 = 0.19
    array([0.6, 0.3, 0. ])
    """
    if not isinstance(norm, (bool, np.bool_)):
        raise TypeError(f"pless: norm must be True or False, got {brief(norm)}{of_scores('pless', norm)}")
    return _PLess((("norm", bool(norm)), ("min_keep", _min_keep("pless", min_keep))), pick_axis(axis, dim))


class _PLess(Truncation):
    name = "pless"

    def keep(self, x: Array, xp: Namespace, norm: bool, min_keep: int) -> Array:
        return pless_keep(x, xp, min_keep, norm)


@makes_transform
def toph(a: Parameter = 0.4, min_keep: int = 1, *, axis: int | None = None, dim: int | None = None) -> Transform:
    """Keep the most probable classes whose own entropy is at most `a` times the entropy of the row.

    The entropy of the kept classes is that of their probabilities divided by their sum; it grows with each class. Baghaei Potraghloo et
    al. 2025 (top-H decoding).

    The option `top_h` of transformers differs: it looks at the 100 most probable classes only, and compares the sum of their terms
    `-p log p`, without dividing by the sum of their probabilities.

    Parameters
    ----------
    a
        The share of the entropy, above 0 and at most 1 (which keeps all), or an array with one value per row: [..., 1]. Among
        equal scores at the edge the first are kept.
    min_keep
        Keep at least this many of the largest.

    Examples
    --------
    >>> import numpy as np
    >>> np.exp(toph(0.7)(np.log([0.5, 0.3, 0.1, 0.1]))).round(3)  # entropies 0, 0.66, 0.94 and 1.17; the limit is 0.82
    array([0.5, 0.3, 0. , 0. ])
    """
    check_range("toph", "a", a, lambda v: (v > 0) & (v <= 1), _MASS)
    return _TopH((("a", a), ("min_keep", _min_keep("toph", min_keep))), pick_axis(axis, dim))


class _TopH(Truncation):
    name = "toph"
    aligned = ("a",)

    def keep(self, x: Array, xp: Namespace, a: Any, min_keep: int) -> Array:
        return toph_keep(x, a, xp, min_keep)


@makes_transform
def mink(tau: Parameter = 3.0, min_keep: int = 1, *, axis: int | None = None, dim: int | None = None) -> Transform:
    """Keep the scores before the steepest drop: with the scores sorted, the first k, where `(x_k - x_(k+1)) / k` is largest.

    The drop is at the same place at every temperature. Ding et al. 2026 (min-k sampling).

    Parameters
    ----------
    tau
        Keep at least `tau / (max x - min x)` classes, rounded down, so that a flat row keeps many: a number of at least 0, or an array
        with one value per row: [..., 1]. This number grows with the temperature; 0 leaves the drop alone.
    min_keep
        Keep at least this many of the largest; among equal scores the first.

    Examples
    --------
    >>> mink()([5.0, 4.5, 1.0, 0.5, 0.0])  # the drops are 0.5, 1.75, 0.17 and 0.13
    array([ 5. ,  4.5, -inf, -inf, -inf])
    """
    check_range("mink", "tau", tau, lambda v: (v >= 0) & (v < math.inf), "at least 0 and finite")
    return _MinK((("tau", tau), ("min_keep", _min_keep("mink", min_keep))), pick_axis(axis, dim))


class _MinK(Truncation):
    name = "mink"
    aligned = ("tau",)

    def keep(self, x: Array, xp: Namespace, tau: Any, min_keep: int) -> Array:
        return mink_keep(x, tau, xp, min_keep)


def _min_keep(who: str, min_keep: Any) -> int:
    if not is_int(number(min_keep)) or min_keep < 1:
        raise ValueError(
            f"{who}: min_keep must be an integer of at least 1, the number of classes to keep, got {min_keep!r}"
        )
    return min(int(min_keep), _MOST)
