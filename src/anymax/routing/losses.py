"""Losses beside that of a model: they keep the load of experts even, and the scores of a router small."""

from __future__ import annotations

from typing import Any, Literal, get_args

from .. import _array
from .._array import Array, Namespace, is_integer, poison, stop_gradient, sums_at, upcast
from .._core.classes import known_index
from .._core.mapping import Mapping
from .._core.options import check_keywords
from .._core.typing import AnyArray, Numbers
from ..thresholds import logsumexp
from .choice import read_router

Per = Literal["batch", "sequence"]


@check_keywords(
    {
        "top_k": "it is the last axis of index",
        "num_experts": "it is the last axis of scores",
        "probs": "they come first, with scoring=None",
    },
    logits="scores",
)
def load_balancing_loss(
    scores: AnyArray | Numbers,
    index: Any = None,
    scoring: Mapping | str | None = "softmax",
    *,
    counts: Any = None,
    tokens: Any = None,
    per: Per = "batch",
    mask: Any = None,
) -> Any:
    """The loss that evens out the load of experts: large where the experts that many tokens chose have large values.

    It has a gradient in the scores, not in the choice. Multiply it by a small number and add it to the loss of the model. `balance`
    does the same by a bias, without a gradient.

    Parameters
    ----------
    scores
        The outputs of the gate, [..., experts].
    index
        The experts that each token went to, integers [..., k], -1 for none, as `route` gives them. Where values can't be read (on a
        GPU, in traced code) an index that is out of range makes the loss NaN; elsewhere it is an error.
    scoring
        As in `route`. Its values are divided by their sum in each row. None: the scores are the shares P already.
    counts
        Instead of index, how many tokens chose each expert: [experts], or for each sequence [..., experts]. Give those of all
        processes or micro-batches together, and the mean of their losses is the loss of all tokens.
    tokens
        The number of tokens that `counts` are of, by default those of the scores.
    per
        "batch": `E sum_e f_e P_e` over all tokens, where f_e is the number of choices of expert e divided by that of tokens, and P_e
        its mean share. Even loads give k. It is Switch's loss (Fedus et al. 2022), for any k as transformers has it.
        "sequence": `E / k sum_e f_e P_e` over the tokens of each sequence, the last axis of tokens, and the mean of these. Even
        loads give 1. It is the sequence-wise loss of DeepSeek-V3.
    mask
        Boolean, [...], True = keep: tokens that are padding count neither in f nor in P.

    Returns
    -------
    Array
        One number, fp32 or fp64.

    Examples
    --------
    >>> import numpy as np
    >>> from anymax.routing import load_balancing_loss, route
    >>> scores = np.array([[4.0, 0.0], [3.0, 0.0], [0.0, 5.0]])
    >>> load_balancing_loss(scores, route(scores, 1).index).round(3)
    np.float64(1.098)

    The same of the mean shares and the counts that each process knows:

    >>> load_balancing_loss(scores, counts=np.array([2, 1])).round(3)
    np.float64(1.098)
    """
    if per not in get_args(Per):
        raise ValueError(f"load_balancing_loss: per must be {' or '.join(map(repr, get_args(Per)))}, got {per!r}")
    if (index is None) == (counts is None) or (counts is None and tokens is not None):
        raise TypeError(
            "load_balancing_loss: give index, the experts of each token, or counts=, how many tokens chose each expert; tokens= belongs "
            "to counts="
        )
    read, call, xp = read_router("load_balancing_loss", scores, scoring or "softmax", -1, None, None)
    rows = upcast(call.rows, xp)
    n, axes = rows.shape[-1], rows.ndim - 1
    keep = token_mask("load_balancing_loss", mask, rows, xp)
    lead = 0 if per == "batch" else max(axes - 1, 0)
    lead_shape, over = tuple(rows.shape[:lead]), tuple(range(lead, axes))
    size = _of_tokens(keep, rows, over, xp)
    if index is not None:
        counted, k = _counted(index, rows, keep, lead_shape, xp)
        f = counted / size
    else:
        counted = xp.astype(_array.beside(counts, rows, "counts", xp), rows.dtype)
        if tuple(counted.shape) != (*lead_shape, n):
            raise ValueError(
                f"load_balancing_loss: counts must have the shape {(*lead_shape, n)}, a number for each expert, got {tuple(counted.shape)}"
            )
        f = stop_gradient(counted) / (size if tokens is None else tokens)
        k = xp.sum(f, axis=-1)
    shares = rows if scoring is None else read.shares(rows, xp)
    if keep is not None:
        shares = xp.where(keep, shares, xp.zeros_like(shares))
    mean = xp.sum(shares, axis=over) / size if over else shares
    value = xp.sum(f * mean, axis=-1) * n
    return value if per == "batch" else xp.mean(value / k)


def _counted(index: Any, rows: Array, keep: Array | None, lead: tuple[int, ...], xp: Namespace) -> tuple[Array, int]:
    """(how many tokens chose each expert, [*lead, experts], NaN where an index is out of range and can't be read; k)."""
    index, n = _array.beside(index, rows, "index", xp), rows.shape[-1]
    if not is_integer(index) or tuple(index.shape[:-1]) != tuple(rows.shape[:-1]):
        raise ValueError(
            f"load_balancing_loss: index must be integers [..., k] beside scores of shape {tuple(rows.shape)}, got {index.dtype} "
            f"{tuple(index.shape)}"
        )
    index = _array.counts(index, xp)
    index = index if keep is None else xp.where(keep, index, -xp.ones_like(index))
    index, stray = known_index("load_balancing_loss: index", index, n, xp)
    counted = xp.astype(sums_at(xp.reshape(index, (*lead, -1)), None, n, xp), rows.dtype)
    if stray is not None:
        counted = poison(counted, xp.any(xp.reshape(stray, (*lead, -1)), axis=-1, keepdims=True), xp)
    return counted, index.shape[-1]


def _of_tokens(keep: Array | None, rows: Array, over: tuple[int, ...], xp: Namespace) -> Any:
    """How many tokens are kept, [..., 1], at least 1."""
    if keep is None:
        size = 1
        for axis in over:
            size *= rows.shape[axis]
        return max(size, 1)
    size = xp.sum(xp.astype(keep, rows.dtype), axis=over)
    return xp.where(size > 0, size, xp.ones_like(size))


def token_mask(who: str, mask: Any, rows: Array, xp: Namespace) -> Array | None:
    """The mask of tokens as [..., 1]."""
    if mask is None:
        return None
    mask = _array.beside(mask, rows, "mask", xp)
    if not _array.is_boolean(mask):
        raise TypeError(f"{who}: mask must be boolean, True = keep, got {mask.dtype}")
    mask = _array.fit_axes(mask, tuple(rows.shape[:-1]), f"{who}: mask", to="tokens of shape ")
    return xp.broadcast_to(xp.expand_dims(mask, axis=-1), (*rows.shape[:-1], 1))


@check_keywords(logits="scores")
def router_z_loss(scores: AnyArray | Numbers, *, mask: Any = None) -> Any:
    """The mean square of logsumexp of the scores, which keeps them small. Zoph et al. 2022.

    Parameters
    ----------
    scores
        The outputs of the gate, [..., experts].
    mask
        Boolean, [...], True = keep: tokens that are padding do not count.

    Returns
    -------
    Array
        One number, fp32 or fp64.

    Examples
    --------
    >>> from anymax.routing import router_z_loss
    >>> router_z_loss([[1.0, 1.0], [0.0, 0.0]]).round(3)
    np.float64(1.674)
    """
    _, call, xp = read_router("router_z_loss", scores, "softmax", -1, None, None)
    rows = upcast(call.rows, xp)
    z = logsumexp(rows, keepdims=True)
    keep = token_mask("router_z_loss", mask, rows, xp)
    if keep is None:
        return xp.mean(z * z)
    size = xp.sum(xp.astype(keep, z.dtype))
    z = xp.where(keep, z, xp.zeros_like(z))
    return xp.sum(z * z) / xp.where(size > 0, size, xp.ones_like(size))
