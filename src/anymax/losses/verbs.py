"""Losses of every map: Fenchel-Young losses and others, with the signature of `torch.nn.functional.cross_entropy`.

`options.py` documents and reads the shared options. The classes are axis 1, as in torch, while maps use the last
axis. Class indices for scores of shape (N, T, C) with T = C fit both, so a call without `axis` then warns, once. A tuple of axes is read
as one axis, as if the scores were reshaped in that order. A masked class (-inf) that is not the target changes nothing; a mean over
nothing is 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Unpack

from .. import _array
from .._array import Array
from .._core.mapping import Mapping
from .._core.names import as_mapping
from .._core.shards import over_devices, sharded
from .._core.typing import AnyArray, ArrayT, LossKeywords, LossKind, Numbers, Parameter, Target, Weight
from .._random.noises import Noise
from ..mappings import Entmax, NormMax, PerturbMax, Softmax, Sparsemax, SparseSoftmax, Taylor
from . import formulas
from .batch import one_axis
from .margins import of_nearest_centers
from .options import LossOptions, is_loss, name_of_kind

Formula = Callable[..., Array]
"""`formula(mapping, scores, target, options)`, as in `formulas`."""

_SOFTMAX, _SPARSEMAX, _ENTMAX15 = Softmax(), Sparsemax(), Entmax(1.5)


@is_loss
def fenchel_young(
    mapping: Mapping | str,
    scores: ArrayT | Numbers,
    target: Target,
    weight: Weight = None,
    **options: Unpack[LossKeywords],
) -> ArrayT:
    """The Fenchel-Young loss of a map, `Omega*(x) + Omega(y) - <x, y>`: convex, and 0 exactly where p(x) is the target y.

    The loss to train a map with: its gradient in the scores is p - y. Softmax, sparsemax, entmax, budget, normmax, sparse softmax
    and perturb-max have one; for other maps it raises an error that names the loss to use (Blondel, Martins and Niculae 2020).

    Examples
    --------
    >>> anymax.fenchel_young(anymax.Sparsemax(), [[2.0, 1.5, -1.0], [3.0, 0.0, 0.0]], [0, 0])
    np.float64(0.03125)
    """
    return _loss("fenchel_young", "fenchel_young", mapping, scores, target, weight, options)


@is_loss
def nll(
    mapping: Mapping | str,
    scores: ArrayT | Numbers,
    target: Target,
    weight: Weight = None,
    **options: Unpack[LossKeywords],
) -> ArrayT:
    """The negative log-likelihood of a map, `-log p_t` of the target: +inf where its probability is exactly 0.

    For maps without exact zeros. With softmax it is the cross-entropy; a sparse map is better trained with `fenchel_young`. p_t is that
    of one draw, as in `anymax.log_prob`: with `Budget(k)` p divided by k. A map that gives no distribution (`Elementwise`) is an error.

    Examples
    --------
    >>> anymax.nll(anymax.Sigsoftmax(), [[2.0, 1.0, -1.0]], [0]).round(3)
    np.float64(0.278)
    """
    return _loss("nll", "nll", mapping, scores, target, weight, options)


@is_loss
def smoothed_nll(
    mapping: Mapping | str,
    scores: ArrayT | Numbers,
    target: Target,
    weight: Weight = None,
    *,
    epsilon: float = 1e-6,
    **options: Unpack[LossKeywords],
) -> ArrayT:
    """The negative log-likelihood made finite for sparse maps, `-log((p_t + epsilon) / (1 + n epsilon))`, n the unmasked classes.

    For comparison, and to evaluate: it is not convex, and has nearly no gradient where p_t is 0. Train with `fenchel_young`.

    Parameters
    ----------
    epsilon
        What is added to every probability, a number above 0.

    Examples
    --------
    >>> anymax.smoothed_nll(anymax.Sparsemax(), [[2.0, 0.0]], [1], epsilon=1e-6).round(2)
    np.float64(13.82)
    """
    epsilon = _array.check_scalar("smoothed_nll: epsilon", epsilon, lambda v: 0 < v < math.inf, "a positive number")
    formula = formulas.by_row(functools.partial(formulas.smoothed_nll, epsilon), weighted=True)
    return _loss("smoothed_nll", formula, mapping, scores, target, weight, options)


@is_loss
def accuracy_loss(
    mapping: Mapping | str,
    scores: ArrayT | Numbers,
    target: Target,
    weight: Weight = None,
    **options: Unpack[LossKeywords],
) -> ArrayT:
    """Minus the probability of the target, `-p_t`: the accuracy made smooth, from -1 to 0.

    Use it to fine-tune for accuracy: its gradient vanishes where the answer is far off, so train with another loss first.

    Examples
    --------
    >>> anymax.accuracy_loss(anymax.Sparsemax(), [[2.0, 1.5, -1.0]], [0])
    np.float64(-0.75)
    """
    return _loss("accuracy_loss", formulas.by_row(formulas.accuracy_loss), mapping, scores, target, weight, options)


@is_loss
def stop_gradient_loss(
    mapping: Mapping | str,
    scores: ArrayT | Numbers,
    target: Target,
    weight: Weight = None,
    **options: Unpack[LossKeywords],
) -> ArrayT:
    """A value whose gradient in the scores is p - y, for any map: `<p - y, x>` with p taken as a constant.

    Use it to train a map without a Fenchel-Young loss as if it had one. The value itself means nothing: a smaller one is not better.
    Watch `nll` or the accuracy instead.

    Examples
    --------
    >>> anymax.stop_gradient_loss(anymax.Taylor(2), [[2.0, 1.0, -1.0]], [0]).round(3)
    np.float64(-0.5)
    """
    return _loss(
        "stop_gradient_loss", formulas.by_row(formulas.stop_gradient_loss), mapping, scores, target, weight, options
    )


@is_loss
def margin_loss(
    mapping: Mapping | str,
    cosines: ArrayT | Numbers,
    target: Target,
    weight: Weight = None,
    *,
    margin: float | Callable[..., Array] = 0.35,
    scale: Parameter = 30.0,
    sub_centers: int = 1,
    **options: Unpack[LossKeywords],
) -> ArrayT:
    """The loss of `scale * margin(cosines, target)`: the target's cosine is made smaller, so that training must push it further.

    For embeddings, of faces and speakers say. It is the Fenchel-Young loss where the map has one, and `nll` otherwise.

    Parameters
    ----------
    cosines
        The cosines of embeddings and classes, from -1 to 1, as `anymax.transforms.cosine` gives them.
    target
        Class indices, integers of the shape of the cosines without the axis of the classes.
    margin
        A number m, for `cos(theta) - m` (AM-Softmax, CosFace), or a margin such as `anymax.margins.ArcFace(0.5)`.
    scale
        The factor of the cosines after the margin, a number or an array.
    sub_centers
        How many centers each class has, as in sub-center ArcFace (Deng et al. 2020): a sample counts for the nearest of them, so that
        a class may have several clusters, one of them for wrong labels. The cosines of a class then stand next to each other.

    Examples
    --------
    >>> anymax.margin_loss(anymax.Softmax(), [[0.8, 0.3]], [0], margin=0.35, scale=10.0).round(3)
    np.float64(0.201)
    >>> two_each = [[0.1, 0.8, 0.3, -0.2]]
    >>> anymax.margin_loss(anymax.Softmax(), two_each, [0], margin=0.35, scale=10.0, sub_centers=2).round(3)
    np.float64(0.201)
    """
    read = LossOptions.read("margin_loss", weight, {**options})
    cosines = of_nearest_centers("margin_loss", cosines, sub_centers, read)
    formula = functools.partial(formulas.margin_loss, margin, scale)
    return _loss("margin_loss", formula, mapping, cosines, target, weight, options)


# -- sugar -------------------------------------------------------------------------------------------------------------------


@is_loss
def cross_entropy(
    scores: ArrayT | Numbers, target: Target, weight: Weight = None, **options: Unpack[LossKeywords]
) -> ArrayT:
    """The cross-entropy of softmax, `logsumexp(x) - <x, y>`, as `torch.nn.functional.cross_entropy`.

    The default loss of a classifier; it falls to 0 only as the scores grow without bound.

    Examples
    --------
    >>> anymax.cross_entropy([[2.0, 1.0, -1.0]], [0]).round(3)
    np.float64(0.349)
    """
    return _loss("cross_entropy", "nll", _SOFTMAX, scores, target, weight, options)


@is_loss
def sparsemax_loss(
    scores: ArrayT | Numbers, target: Target, weight: Weight = None, **options: Unpack[LossKeywords]
) -> ArrayT:
    """The Fenchel-Young loss of sparsemax: exactly 0 once the target's score leads all others by 1.

    Use it to train a classifier whose probabilities are `sparsemax`; for two classes it is the modified Huber loss (Martins and
    Astudillo 2016).

    Examples
    --------
    >>> anymax.sparsemax_loss([[2.0, 1.5, -1.0]], [0])
    np.float64(0.0625)
    """
    return _loss("sparsemax_loss", "fenchel_young", _SPARSEMAX, scores, target, weight, options)


@is_loss
def entmax_loss(
    scores: ArrayT | Numbers,
    target: Target,
    weight: Weight = None,
    *,
    alpha: Parameter = 1.5,
    **options: Unpack[LossKeywords],
) -> ArrayT:
    """The Fenchel-Young loss of alpha-entmax: 0 once the target leads all others by 1 / (alpha - 1), for alpha above 1.

    Use it to train a classifier whose probabilities are `entmax`; alpha may be learned with the weights.

    Parameters
    ----------
    alpha
        A number above 0, or an array that broadcasts to the scores with size 1 along the classes.

    Examples
    --------
    >>> anymax.entmax_loss([[2.0, 1.0, -1.0]], [0], alpha=1.5).round(3)
    np.float64(0.062)
    """
    return _loss("entmax_loss", "fenchel_young", Entmax(alpha), scores, target, weight, options)


@is_loss
def entmax15_loss(
    scores: ArrayT | Numbers, target: Target, weight: Weight = None, **options: Unpack[LossKeywords]
) -> ArrayT:
    """The Fenchel-Young loss of 1.5-entmax, `entmax_loss` with alpha = 1.5: 0 once the target leads all others by 2.

    Use it to train a classifier whose probabilities are `entmax15`.

    Examples
    --------
    >>> anymax.entmax15_loss([[2.0, 1.0, -1.0]], [0]).round(3)
    np.float64(0.062)
    """
    return _loss("entmax15_loss", "fenchel_young", _ENTMAX15, scores, target, weight, options)


@is_loss
def sparse_softmax_loss(
    scores: ArrayT | Numbers,
    target: Target,
    weight: Weight = None,
    *,
    k: int | AnyArray | None = None,
    p: Parameter | None = None,
    **options: Unpack[LossKeywords],
) -> ArrayT:
    """The loss of sparse softmax, `logsumexp over the kept classes - <x, y>`: finite also where the target is not kept.

    Use it to fine-tune with many classes, where only the likeliest ones need a gradient (Sun et al. 2021). Give either k or p.

    Parameters
    ----------
    k
        The number of classes that are kept, at least 1; an array has one value per row.
    p
        The softmax mass that is kept, above 0 and at most 1; an array has one value per row.

    Examples
    --------
    >>> anymax.sparse_softmax_loss([[2.0, 1.0, -1.0]], [0], k=2).round(3)
    np.float64(0.313)
    """
    mapping = SparseSoftmax(k=k, p=p)
    return _loss("sparse_softmax_loss", "without_constant", mapping, scores, target, weight, options)


@is_loss
def taylor_softmax_loss(
    scores: ArrayT | Numbers, target: Target, weight: Weight = None, *, order: int = 2, **options: Unpack[LossKeywords]
) -> ArrayT:
    """The negative log-likelihood of Taylor softmax, `-log p_t`.

    Use it to train a classifier whose probabilities are `taylor_softmax`, which has no Fenchel-Young loss.

    Parameters
    ----------
    order
        The degree of the Taylor polynomial, an even number from 2.

    Examples
    --------
    >>> anymax.taylor_softmax_loss([[2.0, 1.0, -1.0]], [0]).round(3)
    np.float64(0.47)
    """
    return _loss("taylor_softmax_loss", "nll", Taylor(order), scores, target, weight, options)


@is_loss
def normmax_loss(
    scores: ArrayT | Numbers,
    target: Target,
    weight: Weight = None,
    *,
    alpha: Parameter = 2.0,
    **options: Unpack[LossKeywords],
) -> ArrayT:
    """The Fenchel-Young loss of normmax: 0 once the target's score leads all others by 1.

    Use it to train a classifier whose probabilities are `normmax`.

    Parameters
    ----------
    alpha
        The order of the norm, a number above 1 or an array with one value per row.

    Examples
    --------
    >>> anymax.normmax_loss([[2.0, 1.8, -1.0]], [0]).round(3)
    np.float64(0.2)
    """
    return _loss("normmax_loss", "fenchel_young", NormMax(alpha), scores, target, weight, options)


@is_loss
def perturb_max_loss(
    scores: ArrayT | Numbers,
    target: Target,
    weight: Weight = None,
    *,
    noise: str | Noise = "normal",
    nodes: int | None = None,
    scale: Parameter = 1.0,
    **options: Unpack[LossKeywords],
) -> ArrayT:
    """The Fenchel-Young loss of perturb-max, `E max(x + noise) - x_t` less the mean of the noise.

    Use it to train a classifier whose probabilities are `perturb_max`: a probit model for normal noise.

    Parameters
    ----------
    noise
        "gumbel", "normal", "logistic", "laplace", "exponential" or "uniform" on [0, 1], or an `anymax.Noise` of your own.
    nodes
        The points of the quadrature, at least 8; None takes 32 in fp32 and 64 in fp64.
    scale
        The factor of the noise, a number above 0 or an array with one value per row.

    Examples
    --------
    >>> anymax.perturb_max_loss([[2.0, 1.0, -1.0]], [0], noise="normal").round(3)
    np.float64(0.203)
    """
    mapping = PerturbMax(noise, nodes=nodes, scale=scale)
    return _loss("perturb_max_loss", "fenchel_young", mapping, scores, target, weight, options)


def loss_of_kind(kind: LossKind, mapping: Mapping, scores: Any, target: Any, weight: Any = None, **options: Any) -> Any:
    """The loss of a kind, such as `mapping.own_loss`."""
    return _loss(name_of_kind(kind), kind, mapping, scores, target, weight, options)


def _loss(
    who: str, which: LossKind | Formula, mapping: Any, scores: Any, target: Any, weight: Any, keywords: Any
) -> Any:
    """A loss of one of the kinds, or of a formula, with the options of the caller.

    All losses pass DTensors on here.
    """
    kind, formula = (None, which) if callable(which) else (which, formulas.FORMULAS[which])
    mapping, options = as_mapping(mapping, who), LossOptions.read(who, weight, keywords)
    if sharded(scores):
        whole = functools.partial(_along, formula)
        return over_devices().loss(who, kind, whole, mapping, scores, target, options)
    return _along(formula, mapping, scores, target, options)


def _along(formula: Formula, mapping: Mapping, scores: Any, target: Any, options: LossOptions) -> Array:
    """Apply a formula to scores that are not a DTensor, along one axis or several."""
    if isinstance(options.axis, (tuple, list)):
        mapping, scores, target, options = one_axis(mapping, scores, target, options)
    return formula(mapping, scores, target, options)
