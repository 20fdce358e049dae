"""`apply(mapping, x)`, and a function for each map."""

from __future__ import annotations

import functools
from typing import Any, Unpack

import numpy as np

from .. import _array
from .._array import Array, as_scalar, axis_or_all, is_ragged, is_torch, namespace, pick_axis, to_last
from .._core.mapping import Mapping
from .._core.names import as_mapping
from .._core.options import check_keywords, check_options, option_names
from .._core.providers import providers
from .._core.rows import Rows, as_one_class, hide, join, like_scores, prepare_axes, restore_axis, split
from .._core.shards import scores_over_devices, sharded
from .._core.tables import document, documented_like
from .._core.typing import AnyArray, ApplyOptions, ArrayT, Axes, DType, LogOptions, Mask, Numbers, Parameter
from .._random.noises import Noise
from ..autodiff import bridge
from ..mappings import (
    Budget,
    Entmax,
    NormMax,
    PerturbMax,
    Sigsoftmax,
    Softmax,
    Sparsemax,
    SparseSoftmax,
    Taylor,
)


@check_keywords()
def apply(
    mapping: Mapping | str,
    x: ArrayT | Numbers,
    axis: Axes = -1,
    *,
    dim: Axes = None,
    mask: Mask = None,
    out: ArrayT | None = None,
    dtype: DType = None,
) -> ArrayT:
    """The probabilities p(x) that a map gives to scores.

    The most common maps also have functions (`softmax`, `sparsemax`, `entmax`, ...); `apply` takes every map, also your own.

    Examples
    --------
    >>> anymax.apply(anymax.Sparsemax(), [[2.0, 1.5, -1.0], [0.0, 0.0, -1.0]])
    array([[0.75, 0.25, 0.  ],
           [0.5 , 0.5 , 0.  ]])
    """
    if isinstance(mapping, str):
        mapping = as_mapping(mapping)
    named = axis if dim is None else pick_axis(axis, dim)
    if dtype is None and named is not None and (p := _quick_path(mapping, x, named, mask, out)) is not None:
        return p
    return _full_path(as_mapping(mapping, "apply"), x, named, mask, out, dtype)


def _full_path(mapping: Mapping, x: Any, axis: Any, mask: Any, out: Any, dtype: Any) -> Any:
    """`apply` for all arguments; no engine takes them as they are."""
    if axis is None:
        x = _array.asarray(x)
        axis = axis_or_all(axis, x.ndim)
    if is_ragged(x) and mask is None and out is None and dtype is None and not isinstance(axis, (tuple, list)):
        return providers.apply_to_ragged(mapping, x, axis)
    if sharded(x):
        return _store(scores_over_devices("apply", apply, mapping, x, axis, mask, dtype), out)
    if isinstance(axis, (tuple, list)):
        joined, mapping, mask = join(mapping, x, axis, mask)
        return _store(joined.restore(apply(mapping, joined.scores, mask=mask, dtype=dtype)), out)
    if (one := as_one_class(x, axis)) is not None:
        return _store(_alone(apply(mapping, one, mask=mask, dtype=dtype)), out)
    scores, rows, mapping, axis, keep = split(mapping, x, axis, mask, dtype, least=0)
    if not rows.shape[-1]:
        return _store(scores * scores, out)  # its derivatives have derivatives, as those of torch.softmax do
    if mapping.hidden is not None:
        call = Rows(scores, rows if keep is None else hide(rows, keep), mapping, axis).over_all()
        return _store(call.restore(bridge(call.rows).apply(call.mapping, call.rows)), out)
    framework = bridge(rows)
    if keep is not None and not framework.masks(mapping, rows):
        rows, keep = hide(rows, keep), None
    if out is not None and rows.dtype == scores.dtype:
        to = _array.in_memory(out, "out")
        if (
            type(to) is type(rows)
            and to.ndim == scores.ndim
            and framework.write(mapping, rows, keep, to_last(to, axis, namespace(rows)))
        ):
            return out
    return _store(like_scores(restore_axis(framework.apply(mapping, rows, keep), axis), scores), out)


def _alone(p: Array) -> Any:
    """The result of one class, for scores without axes."""
    return as_scalar(namespace(p).reshape(p, ()))


_QUICK: dict[type, Any] = {}  # by type of array, what `Bridge.quick` returns: a function for simple calls
_dynamo = _array.compiling  # replaced by the fastest check; torch.compile evaluates it to True while tracing


def _quick_path(mapping: Any, x: Any, axis: Any, mask: Any, out: Any) -> Array | None:
    """p(x) by an engine that takes the arguments as they are; None if there is none."""
    if _dynamo() or isinstance(mapping, tuple):  # the engine reads a tuple as a link
        return None
    quick = _QUICK.get(type(x)) or _register_quick(x)
    return None if quick is None else quick(mapping, x, axis, mask, out)


def _register_quick(x: Any) -> Any:
    """Fill in and return the entry of `_QUICK` for the type of x, at its first array; None if its framework has none."""
    global _dynamo
    framework = bridge(x)
    if type(x) not in framework.kinds:
        return None
    _dynamo = framework.compiling() or _dynamo
    quick = framework.quick()
    if quick is not None:
        _QUICK.update(dict.fromkeys(framework.kinds, quick))
    return quick


@check_keywords()
@documented_like(LogOptions)
def log_apply(
    mapping: Mapping | str,
    x: ArrayT | Numbers,
    axis: Axes = -1,
    *,
    dim: Axes = None,
    mask: Mask = None,
    dtype: DType = None,
) -> ArrayT:
    """The logarithms of the probabilities p(x), -inf where p is exactly 0.

    It is more accurate than the logarithm of `apply` where p is tiny: softmax, sparse softmax, sigsoftmax and perturb-max compute
    log p directly, without underflow.

    Examples
    --------
    >>> anymax.log_apply(anymax.Softmax(), [0.0, -1000.0])
    array([    0., -1000.])
    """
    mapping, axis = as_mapping(mapping, "log_apply"), pick_axis(axis, dim)
    if sharded(x):
        return scores_over_devices("log_apply", log_apply, mapping, x, axis_or_all(axis, x.ndim), mask, dtype)
    if (one := as_one_class(x, axis)) is not None:
        return _alone(log_apply(mapping, one, mask=mask, dtype=dtype))
    call = prepare_axes(mapping, x, axis, mask, dtype, least=0)
    if not call.rows.shape[-1]:
        return call.restore(call.rows * call.rows)
    call = call.over_all()
    return call.restore(bridge(call.rows).log_p(call.mapping, call.rows))


_APPLY, _LOG_APPLY = option_names(apply), option_names(log_apply)
_SOFTMAX, _SPARSEMAX, _ENTMAX15 = Softmax(), Sparsemax(), Entmax(1.5)


_REPEATED = frozenset((float, int, str, type(None)))  # kinds of parameters that calls repeat


@functools.lru_cache(maxsize=256, typed=True)  # typed, since Taylor accepts 2 and rejects 2.0
def _cached_map(kind: type[Mapping], value: Any, **more: Any) -> Mapping:
    return kind(value, **more)


def _map_of(kind: type[Mapping], value: Any, **more: Any) -> Mapping:
    """kind(value, ...), from a cache if no parameter is an array.

    Functions without a parameter have the axis where the others have `value`, so an error hints at it.
    """
    repeated = type(value) in _REPEATED and (not more or _REPEATED.issuperset(map(type, more.values())))
    try:
        return _cached_map(kind, value, **more) if repeated and not _dynamo() else kind(value, **more)
    except (TypeError, ValueError) as error:
        hint = f"; did you mean axis={value}?" if type(value) is int and value < 2 else ""
        raise type(error)(f"{error}{hint}") from None


def call(name: str, mapping: Mapping, x: Any, axis: Any, options: Any) -> Array:
    """`apply` for the function `name`, which errors about options mention."""
    out = None
    if options:
        out = options.pop("out", None)
        if options:
            return apply(mapping, x, axis, out=out, **check_options(name, _APPLY, options))
    if axis is not None and not _dynamo() and (quick := _QUICK.get(type(x))) is not None:
        p = quick(mapping, x, axis, None, out)
        return _full_path(mapping, x, axis, None, out, None) if p is None else p
    return apply(mapping, x, axis, out=out)


# -- a function for each map ---------------------------------------------------------------------------------------------------


def softmax(x: ArrayT | Numbers, axis: Axes = -1, **options: Unpack[ApplyOptions]) -> ArrayT:
    """The softmax `exp(x_i) / sum_j exp(x_j)` of scores: every class keeps some probability.

    The default choice; `sparsemax`, `entmax` and `sparse_softmax` give exact zeros. Its loss is `cross_entropy`.

    Examples
    --------
    >>> anymax.softmax([2.0, 1.0, -1.0]).round(3)
    array([0.705, 0.259, 0.035])
    """
    return call("softmax", _SOFTMAX, x, axis, options)


def log_softmax(x: ArrayT | Numbers, axis: Axes = -1, **options: Unpack[LogOptions]) -> ArrayT:
    """The logarithm of the softmax, `x_i - logsumexp(x)`, which never underflows.

    Use it for log-likelihoods, and instead of the logarithm of `softmax`.

    Examples
    --------
    >>> anymax.log_softmax([2.0, 1.0, -1.0]).round(3)
    array([-0.349, -1.349, -3.349])
    """
    return log_apply(_SOFTMAX, x, axis, **check_options("log_softmax", _LOG_APPLY, options))


def sparsemax(x: ArrayT | Numbers, axis: Axes = -1, **options: Unpack[ApplyOptions]) -> ArrayT:
    """The distribution nearest to the scores, `p_i = max(x_i - tau, 0)`: most classes get exactly 0.

    Use it if few classes matter and you want to see which. Its loss is `sparsemax_loss`; its map is `Sparsemax` (Martins and
    Astudillo 2016). `entmax` is less sparse.

    Examples
    --------
    >>> anymax.sparsemax([2.0, 1.5, -1.0])
    array([0.75, 0.25, 0.  ])
    """
    return call("sparsemax", _SPARSEMAX, x, axis, options)


def entmax(
    x: ArrayT | Numbers,
    alpha: Parameter = 1.5,
    axis: Axes = -1,
    **options: Unpack[ApplyOptions],
) -> ArrayT:
    """alpha-entmax: the family from softmax (alpha = 1) to sparsemax (alpha = 2), with exact zeros for alpha above 1.

    Start with alpha = 1.5, or learn alpha. Its loss is `entmax_loss`; its map is `Entmax`, which has the formula (Peters, Niculae and
    Martins 2019).

    Parameters
    ----------
    alpha
        A number above 0, or an array that broadcasts to x with size 1 along the classes; a tensor may be learned.

    Examples
    --------
    >>> anymax.entmax([2.0, 1.0, -1.0], alpha=1.5).round(3)
    array([0.831, 0.169, 0.   ])
    """
    return call("entmax", _map_of(Entmax, alpha), x, axis, options)


def entmax15(x: ArrayT | Numbers, axis: Axes = -1, **options: Unpack[ApplyOptions]) -> ArrayT:
    """1.5-entmax, halfway between softmax and sparsemax: `entmax` with alpha = 1.5.

    Use it for a sparse attention or output layer that still trains as smoothly as softmax. Its loss is `entmax15_loss`.

    Examples
    --------
    >>> anymax.entmax15([2.0, 1.0, -1.0]).round(3)
    array([0.831, 0.169, 0.   ])
    """
    return call("entmax15", _ENTMAX15, x, axis, options)


def taylor_softmax(x: ArrayT | Numbers, order: int = 2, axis: Axes = -1, **options: Unpack[ApplyOptions]) -> ArrayT:
    """Softmax with its Taylor polynomial for exp, `1 + x + x^2/2` for order 2: long tails, no exact zeros.

    Use it if softmax is overconfident. It is not shift-invariant, and scores far below 0 get a large probability. Its loss is
    `taylor_softmax_loss`; its map is `Taylor` (de Brebisson and Vincent 2015).

    Parameters
    ----------
    order
        The degree of the polynomial, an even number from 2.

    Examples
    --------
    >>> anymax.taylor_softmax([2.0, 1.0, -1.0]).round(3)
    array([0.625, 0.312, 0.062])
    """
    return apply(_map_of(Taylor, order), x, axis, **check_options("taylor_softmax", _APPLY, options))


def sparse_softmax(
    x: ArrayT | Numbers,
    axis: Axes = -1,
    *,
    k: int | AnyArray | None = None,
    p: Parameter | None = None,
    **options: Unpack[ApplyOptions],
) -> ArrayT:
    """Softmax over the k largest scores, or over the fewest classes whose softmax mass reaches p; the others get exactly 0.

    Use it to fine-tune or to decode with many classes; classes that are left out get no gradient. Give either k or p. Its loss is
    `sparse_softmax_loss`; its map is `SparseSoftmax` (Sun et al. 2021).

    Parameters
    ----------
    k
        The number of classes to keep, at least 1; an array has one value per row.
    p
        The mass to keep, above 0 and at most 1; an array has one value per row.

    Examples
    --------
    >>> anymax.sparse_softmax([2.0, 1.0, -1.0], k=2).round(3)
    array([0.731, 0.269, 0.   ])
    """
    if (
        type(k) is int and p is None and (not options or options.keys() == {"out"}) and not _dynamo()
    ):  # the common call, from a cache
        return call("sparse_softmax", _cached_map(SparseSoftmax, k), x, axis, options)
    # first, since a misspelt k or p is a better error than a missing one
    check_options("sparse_softmax", ("k", "p", *_APPLY), options)
    if k is None and p is None and type(axis) is int and axis != -1:
        raise TypeError(f"sparse_softmax: give k=<number of classes to keep> or p=<mass>; did you mean k={axis}?")
    return call("sparse_softmax", SparseSoftmax(k=k, p=p), x, axis, options)


def sigsoftmax(x: ArrayT | Numbers, axis: Axes = -1, **options: Unpack[ApplyOptions]) -> ArrayT:
    """Probabilities in proportion to `exp(x_i) sigmoid(x_i)`: a softmax whose logarithm is not linear in the scores.

    Use it in the output layer of a language model that is narrow for its vocabulary. It is not shift-invariant. Its loss is `nll`;
    its map is `Sigsoftmax` (Kanai et al. 2018).

    Examples
    --------
    >>> anymax.sigsoftmax([2.0, 1.0, -1.0]).round(3)
    array([0.757, 0.231, 0.012])
    """
    return apply(Sigsoftmax(), x, axis, **check_options("sigsoftmax", _APPLY, options))


def perturb_max(
    x: ArrayT | Numbers,
    noise: str | Noise = "normal",
    axis: Axes = -1,
    *,
    nodes: int | None = None,
    scale: Parameter = 1.0,
    **options: Unpack[ApplyOptions],
) -> ArrayT:
    """The probability that each score is the largest after noise is added: `P[argmax(x + scale * noise) = i]`.

    Use it for a model of noisy choice, such as probit. It is computed by quadrature, not by sampling; Gumbel noise gives softmax. Its
    loss is `perturb_max_loss`; its map is `PerturbMax`.

    Parameters
    ----------
    noise
        "gumbel", "normal", "logistic", "laplace", "exponential" or "uniform" on [0, 1], or your own `anymax.Noise`.
    nodes
        The number of quadrature points, at least 8; None takes 32 in fp32 and 64 in fp64.
    scale
        The factor of the noise, a number above 0 or an array with one value per row.

    Examples
    --------
    >>> anymax.perturb_max([2.0, 1.0, -1.0], noise="normal").round(3)
    array([0.756, 0.237, 0.007])
    """
    mapping = _map_of(PerturbMax, noise, nodes=nodes, scale=scale)
    return apply(mapping, x, axis, **check_options("perturb_max", _APPLY, options))


def normmax(x: ArrayT | Numbers, alpha: Parameter = 2.0, axis: Axes = -1, **options: Unpack[ApplyOptions]) -> ArrayT:
    """Normmax, `argmax <p, x> - ||p||_alpha`: exact zeros, and nearly equal shares for the classes that are kept.

    Use it to choose a set of classes and treat them alike. Its loss is `normmax_loss`; its map is `NormMax` (Blondel, Martins and
    Niculae 2020).

    Parameters
    ----------
    alpha
        The order of the norm, a number above 1 or an array with one value per row; a larger alpha gives more equal shares.

    Examples
    --------
    >>> anymax.normmax([2.0, 1.8, -1.0], alpha=2.0).round(3)
    array([0.571, 0.429, 0.   ])
    """
    return apply(_map_of(NormMax, alpha), x, axis, **check_options("normmax", _APPLY, options))


def budget(
    x: ArrayT | Numbers, k: Parameter, axis: Axes = -1, *, shape: str = "linear", **options: Unpack[ApplyOptions]
) -> ArrayT:
    """A relaxed top-k: k units of probability shared among the classes, at most 1 for each, `p_i = min(max(x_i - tau, 0), 1)`.

    Use it to choose k of n classes, as a layer with a gradient. Its loss is `fenchel_young`; its map is `Budget`.

    Parameters
    ----------
    k
        The sum of p, a number of at least 0 or an array with one value per row.
    shape
        "linear" has exact zeros and ones; "sigmoid" and "laplace", distribution functions instead of the cut at 0 and 1, have
        neither.

    Examples
    --------
    >>> anymax.budget([2.0, 1.0, 0.5, -1.0], k=2)
    array([1.  , 0.75, 0.25, 0.  ])
    >>> anymax.budget([2.0, 1.0, 0.5, -1.0], k=2, shape="sigmoid").round(3)
    array([0.793, 0.585, 0.461, 0.16 ])
    """
    if k is None:
        raise TypeError("budget: k is missing; write budget(x, k)")
    mapping = _map_of(Budget, k) if shape == "linear" else _map_of(Budget, k, shape=shape)
    return apply(mapping, x, axis, **check_options("budget", _APPLY, options))


document(globals(), ApplyOptions)

# a call without x, as in `softmax(logits=...)`, is to reach the checks of options; signatures show no default
for _verb in (
    softmax,
    log_softmax,
    sparsemax,
    entmax,
    entmax15,
    taylor_softmax,
    sparse_softmax,
    sigsoftmax,
    perturb_max,
    normmax,
):
    _verb.__defaults__ = (None, *(_verb.__defaults__ or ()))
budget.__defaults__ = (None, None, *(budget.__defaults__ or ()))


def _store(p: Array, out: Any) -> Array:
    """p in `out`, if there is one."""
    if out is None:
        return p
    if not is_torch(p) and not isinstance(p, np.ndarray):
        raise TypeError(f"out: {type(p).__name__} is immutable; out= is for NumPy arrays and torch tensors")
    if type(_array.in_memory(out, "out")) is not type(p):
        raise TypeError(f"out: expected a writable {type(p).__name__}, got {type(out).__name__}")
    if tuple(out.shape) != tuple(p.shape) or out.dtype != p.dtype:
        raise ValueError(f"out: expected shape {tuple(p.shape)} and {p.dtype}, got {tuple(out.shape)} and {out.dtype}")
    if isinstance(p, np.ndarray):
        out[...] = p
        return out
    if p.requires_grad:
        raise ValueError("out= can't be used where a gradient is asked for; call it under torch.no_grad()")
    return out.copy_(p)
