"""Truncations whose level follows the row: p-less, top-H and min-k."""

from __future__ import annotations

from typing import Any, ClassVar

from .._array import NOT_NEGATIVE, SHARE, Array, Namespace, Ranges, check_flag, pick_axis
from .._core.typing import Parameter
from .._random.truncation import mink_count, pless_level, toph_count, toph_hundred_count
from .base import Transform, makes_transform, of_scores
from .entropy import softmax_entropy
from .truncation import ByLevel, EpsilonCutoff, Truncation, min_keep_of


@makes_transform
def pless(norm: bool = False, min_keep: int = 1, *, axis: int = -1, dim: int | None = None) -> Transform:
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
    norm = check_flag("pless", "norm", norm, of_scores("pless", norm))
    return _PLess((("norm", norm), ("min_keep", min_keep_of("pless", min_keep))), pick_axis(axis, dim))


class _PLess(ByLevel):
    name = "pless"

    def level_of(self, x: Array, xp: Namespace, norm: bool, min_keep: int) -> Array:
        return pless_level(x, xp, norm)

    def other(self, level: Array) -> Truncation:
        return EpsilonCutoff((("epsilon", level), ("min_keep", dict(self.params)["min_keep"])))


@makes_transform
def toph(a: Parameter = 0.4, min_keep: int = 1, *, axis: int = -1, dim: int | None = None) -> Transform:
    """Keep the most probable classes whose own entropy is at most `a` times the entropy of the row.

    The entropy of the kept classes is that of their probabilities divided by their sum; it grows with each class. Baghaei Potraghloo et
    al. 2025 (top-H decoding).

    The option `top_h` of transformers differs, and `from_config` does as it does: it looks at the 100 most probable classes only, and
    compares the sum of their terms `-p log p`, without dividing by the sum of their probabilities.

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
    _TopH.check(a=a)
    return _TopH((("a", a), ("min_keep", min_keep_of("toph", min_keep))), pick_axis(axis, dim))


class _TopH(ByLevel):
    name = "toph"
    aligned = ("a",)
    ranges: ClassVar[Ranges] = {"a": SHARE}

    def level_of(self, x: Array, xp: Namespace, a: Any, min_keep: int) -> Array:
        return toph_count(x, a, softmax_entropy(x, xp), xp, min_keep)


@makes_transform
def toph_of_transformers(a: Parameter, *, axis: int = -1, dim: int | None = None) -> Transform:
    """The option `top_h` of transformers: `toph` over the 100 most probable classes, with the sum of their terms -p log p.

    `from_config` makes it; the one of the paper is `toph`.

    Parameters
    ----------
    a
        The share of the sum, above 0 and at most 1, or an array with one value per row: [..., 1]. Among equal scores at the edge the
        first are kept.

    Examples
    --------
    >>> import numpy as np
    >>> from anymax.transforms import adaptive
    >>> np.exp(adaptive.toph_of_transformers(0.7)(np.log([0.5, 0.3, 0.1, 0.1]))).round(3)  # terms 0.35, 0.36, 0.23 and 0.23
    array([0.5, 0.3, 0. , 0. ])
    """
    _TopHOfTransformers.check(a=a)
    return _TopHOfTransformers((("a", a),), pick_axis(axis, dim))


class _TopHOfTransformers(ByLevel):
    name = "toph_of_transformers"
    aligned = ("a",)
    ranges: ClassVar[Ranges] = {"a": SHARE}

    def level_of(self, x: Array, xp: Namespace, a: Any) -> Array:
        return toph_hundred_count(x, a, xp)


@makes_transform
def mink(tau: Parameter = 3.0, min_keep: int = 1, *, axis: int = -1, dim: int | None = None) -> Transform:
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
    _MinK.check(tau=tau)
    return _MinK((("tau", tau), ("min_keep", min_keep_of("mink", min_keep))), pick_axis(axis, dim))


class _MinK(ByLevel):
    name = "mink"
    aligned = ("tau",)
    ranges: ClassVar[Ranges] = {"tau": NOT_NEGATIVE}

    def level_of(self, x: Array, xp: Namespace, tau: Any, min_keep: int) -> Array:
        return mink_count(x, tau, xp, min_keep)
