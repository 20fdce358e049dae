"""Biases that even out the load of experts."""

from __future__ import annotations

from typing import Any, Literal, get_args

from .. import _array
from .._array import Array, Namespace, positions, quiet, running_sum, stop_gradient, upcast
from .._core.mapping import Mapping
from .._core.options import check_keywords
from .._core.typing import AnyArray, Numbers
from .._random.draws import at, check_k
from ..autodiff.choose_group import as_group
from ..kernels.selection import chosen
from .choice import per_expert, read_router
from .counting import loads

Method = Literal["quantile", "sign"]
SENT = 512  # the numbers of each expert that a process sends


@check_keywords({"tau": "say step="}, logits="scores", top_k="k")
def balance(
    scores: AnyArray | Numbers,
    k: int,
    bias: Any = None,
    scoring: Mapping | str = "softmax",
    *,
    method: Method = "quantile",
    iterations: int = 1,
    step: float = 0.001,
    group: Any = None,
    axis_name: Any = None,
) -> Any:
    """A new bias for `route`, with which the tokens of these scores load the experts more evenly than with the old one.

    Call it after a step of training on the scores of the batch. It needs no loss and no gradient (Wang et al. 2024).

    Parameters
    ----------
    scores
        The outputs of the gate, [..., experts]; all leading axes are tokens.
    k, scoring
        As in `route`.
    bias
        The bias so far, one number for each expert; zeros by default.
    method
        "quantile" finds the bias with which each expert gets its share of these tokens, in turns (Su 2026): alpha, a threshold of
        each token between its k-th and its next value plus bias, then for each expert the number b with which the right number of
        tokens have a value plus b above alpha. "sign" adds `step` where an expert got fewer tokens than the mean and subtracts
        it where it got more, as in DeepSeek-V3.
    iterations
        How many turns; a few reach loads that are even to a few tokens.
    step
        The step of the sign rule, which "quantile" does not need.
    group, axis_name
        Processes with tokens of their own, a group of torch or, in JAX, an axis of the mesh: the bias is that of all tokens, and the
        same on all processes. One collective a turn: each process sends the thresholds of up to 512 portions of its tokens for
        each expert, which are exact for up to 512 tokens.

    Returns
    -------
    Array
        The bias, one number for each expert, fp32 or fp64. Its mean is 0 for "quantile": adding a number to all changes no choice.

    Examples
    --------
    >>> import numpy as np
    >>> from anymax.routing import balance, route
    >>> scores = np.array([[3.0, 0.0], [2.0, 0.0], [1.0, 0.0], [4.0, 0.0]])
    >>> bias = balance(scores, 1)
    >>> np.bincount(route(scores, 1, bias=bias).index[:, 0])
    array([2, 2])
    """
    if method not in get_args(Method):
        raise ValueError(f"balance: method must be {' or '.join(map(repr, get_args(Method)))}, got {method!r}")
    if not _array.is_int(_array.number(iterations)) or iterations < 1:
        raise ValueError(f"balance: iterations must be an integer of at least 1, got {iterations!r}")
    if method == "quantile" and step != 0.001:
        raise ValueError('balance: step belongs to method="sign"; quantiles need none')
    read, given, xp = read_router("balance", scores, scoring, -1, None, None)
    rows = upcast(given.rows, xp)
    n = rows.shape[-1]
    k = check_k("balance", k, n)
    values = xp.reshape(read.constants(rows, xp), (-1, n))
    if bias is None:
        b = xp.zeros_like(values[:1, :]) if values.shape[0] else xp.sum(values, axis=0, keepdims=True)
    else:
        b = per_expert(given, bias, "bias", xp)
        if _array.asarray(bias).ndim != 1:
            raise ValueError(
                f"balance: bias must have one number for each of {n} experts, got the shape {tuple(_array.asarray(bias).shape)}"
            )
        b = xp.reshape(xp.astype(_array.beside(bias, rows, "bias", xp), values.dtype), (1, n))
    b = stop_gradient(b)
    if k == n:
        return b[0, :]
    processes = None if group is None and axis_name is None else as_group("balance", group, axis_name, rows)
    with quiet(values):
        for _ in range(iterations):
            b = (
                _by_sign(values, k, b, step, processes, xp)
                if method == "sign"
                else _by_quantiles(values, k, b, processes, xp)
            )
    return b[0, :]


def _by_sign(values: Array, k: int, b: Array, step: float, processes: Any, xp: Namespace) -> Array:
    n = values.shape[-1]
    load = xp.astype(loads(xp.reshape(chosen(values + b, k, xp), (-1,)), n, xp), values.dtype)
    if processes is not None:
        load = xp.sum(processes.stack(load), axis=0)
    return b + step * xp.sign(xp.mean(load) - load)


def _by_quantiles(values: Array, k: int, b: Array, processes: Any, xp: Namespace) -> Array:
    tokens, n = values.shape
    if processes is None and not tokens:
        return b
    biased = values + b
    edge = at(biased, chosen(biased, k + 1, xp), xp) if tokens else biased
    alpha = 0.5 * (edge[:, k - 1 : k] + edge[:, k : k + 1])
    above = xp.permute_dims(values - alpha, (1, 0))  # [experts, tokens]
    if processes is None:
        few = min(tokens, int(tokens * k / n) + 2)
        level = _between(at(above, chosen(above, few, xp), xp), xp.ones_like(above[:, :few]), tokens * k / n, xp)
    else:
        level = _of_all(above, k / n, processes, xp)
    b = -xp.permute_dims(level, (1, 0))
    return b - xp.mean(b)


def _between(descending: Array, sizes: Array, count: Any, xp: Namespace) -> Array:
    """The level that `count` entries are above, [..., 1]: between two of the rows' values, each of which stands for `sizes` entries."""
    middle = running_sum(sizes, xp) - 0.5 * sizes
    place = positions(descending, xp.int32, xp)
    last = descending.shape[-1] - 1
    low = xp.sum(xp.astype(middle <= count, xp.int32), axis=-1, keepdims=True) - 1
    low = xp.where(low < 0, xp.zeros_like(low), low)
    high = xp.where(low < last, low + 1, low)
    pick = lambda a, at: xp.sum(xp.where(place == at, a, xp.zeros_like(a)), axis=-1, keepdims=True)  # noqa: E731
    a, z, m, w = pick(descending, low), pick(descending, high), pick(middle, low), pick(middle, high)
    gap = xp.where(w > m, w - m, xp.ones_like(m))
    share = (count - m) / gap
    share = xp.where(share < 0, xp.zeros_like(share), xp.where(share > 1, xp.ones_like(share), share))
    return a + (z - a) * share


def _of_all(above: Array, part: float, processes: Any, xp: Namespace) -> Array:
    """The level of all processes: each sends the middles of portions of its entries, which are finer above the level it expects."""
    n, tokens = above.shape
    bounds = _portions(tokens, part)
    descending = at(above, chosen(above, tokens, xp), xp) if tokens else above
    starts, ends = bounds[:-1], bounds[1:]
    sent = [
        0.5 * (descending[:, (a + z - 1) // 2] + descending[:, (a + z) // 2])
        if z > a
        else xp.zeros((n,), dtype=above.dtype, **_array.device_of(above))
        for a, z in zip(starts, ends, strict=True)
    ]
    sizes = xp.asarray(
        [float(z - a) for a, z in zip(starts, ends, strict=True)], dtype=above.dtype, **_array.device_of(above)
    )
    sizes = xp.broadcast_to(xp.reshape(sizes, (1, SENT)), (n, SENT))
    message = xp.stack([xp.stack(sent, axis=-1), sizes])
    got = processes.stack(message)  # [processes, 2, experts, SENT]
    values, sizes = (xp.reshape(xp.permute_dims(got[:, i], (1, 0, 2)), (n, -1)) for i in (0, 1))
    values = xp.where(sizes > 0, values, -xp.inf * xp.ones_like(values))
    order = xp.argsort(values, axis=-1, descending=True, stable=True)
    values, sizes = (_array.take(a, order, xp) for a in (values, sizes))
    values = xp.where(
        sizes > 0, values, xp.min(xp.where(sizes > 0, values, xp.inf * xp.ones_like(values)), axis=-1, keepdims=True)
    )
    return _between(values, sizes, part * xp.sum(sizes, axis=-1, keepdims=True), xp)


def _portions(tokens: int, part: float) -> list[int]:
    """Bounds of SENT portions of the entries in descending order: half of them in the first `4 part`, of equal size where they can be."""
    if tokens <= SENT:
        return [min(i, tokens) for i in range(SENT + 1)]
    half, fine = SENT // 2, min(tokens, max(SENT // 2, int(4 * part * tokens)))
    first = [fine * i // half for i in range(half)]
    return first + [fine + (tokens - fine) * i // (SENT - half) for i in range(SENT - half + 1)]
