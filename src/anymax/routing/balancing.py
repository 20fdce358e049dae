"""Biases that even out the load of experts."""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal, NamedTuple, get_args

from .. import _array
from .._array import (
    Array,
    Namespace,
    decides,
    known_largest,
    positions,
    quiet,
    running_sum,
    stop_gradient,
    sums_at,
    top,
    upcast,
)
from .._core.mapping import Mapping
from .._core.options import check_keywords
from .._core.rows import hide
from .._core.typing import AnyArray, Numbers
from .._random.draws import at, check_k
from .._random.truncation import group_levels
from ..autodiff import bridge
from ..autodiff.agreement import Agreement, fail_together
from ..autodiff.choose_group import as_group
from ..autodiff.group import Group
from ..kernels.selection import chosen
from ..kernels.tasks import Groups
from ..transforms.truncation import check_groups, fit_groups
from .choice import eligible, read_router

Method = Literal["quantile", "sign"]
SENT = 512  # the numbers of each expert that a process sends


@check_keywords({"tau": "say step="}, logits="scores", top_k="k")
def balance(
    scores: AnyArray | Numbers,
    k: int,
    bias: Any = None,
    scoring: Mapping | str = "softmax",
    *,
    groups: int | None = None,
    keep_groups: int | None = None,
    group_by: int | str = 2,
    mask: Any = None,
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
    k, scoring, groups, keep_groups, group_by, mask
        As in `route`. An expert that is masked, or -inf, for all tokens has no share and keeps its bias; one that only some tokens may
        go to has a share of at most these. The experts of padding are all masked: `mask=real[..., None]`. Tokens with NaN do not count.
    bias
        The bias so far, one number for each expert; zeros by default.
    method
        "quantile" finds the bias with which each expert gets its share of these tokens, in turns (Su 2026): for each token and expert
        the threshold that the value plus bias has to pass, then for each expert the number b with which the right number of
        tokens have a value plus b above it. The threshold lies between the k-th and the next value plus bias of the token, or is
        what brings the expert's group among those that are kept. "sign" adds `step` where an expert got fewer tokens than its share
        and subtracts it where it got more, as in DeepSeek-V3.
    iterations
        How many turns. A few reach loads that are even to a few tokens, with groups some more (ten to thirty from a bias of 0).
    step
        The step of the sign rule, which "quantile" does not need.
    group, axis_name
        Processes with tokens of their own, a group of torch or, in JAX, an axis of the mesh: the bias is that of all tokens, and the
        same on all processes. One collective a turn: each process sends the thresholds of up to 512 portions of its tokens for
        each expert, which are exact for up to 512 tokens. In torch one more compares the calls: another k, step, bias or number of
        experts on a process is the same error on all.

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
    options = {
        "method": method, "iterations": iterations, "step": step, "groups": groups, "keep_groups": keep_groups, "group_by": group_by,
    }  # fmt: skip
    if group is None and axis_name is None:
        return _balanced(scores, k, bias, scoring, mask, None, **options)
    x = _array.asarray(scores)
    return bridge(x).layers.outside_graphs(_together, x, k, bias, scoring, mask, group, axis_name, options)


def _together(
    x: Array, k: Any, bias: Any, scoring: Any, mask: Any, group: Any, axis_name: Any, options: dict[str, Any]
) -> Any:
    """The bias of the tokens of all processes, which compare their calls first; if one fails, all do."""
    agreement = Agreement("balance", as_group("balance", group, axis_name, x), x, room="routing.")
    return fail_together(agreement, lambda: _balanced(x, k, bias, scoring, mask, agreement, **options))


def _balanced(
    scores: Any,
    k: Any,
    bias: Any,
    scoring: Any,
    mask: Any,
    agreement: Agreement | None,
    *,
    method: Any,
    iterations: Any,
    step: Any,
    groups: Any,
    keep_groups: Any,
    group_by: Any,
) -> Array:
    if method not in get_args(Method):
        raise ValueError(f"balance: method must be {' or '.join(map(repr, get_args(Method)))}, got {method!r}")
    if not _array.is_int(_array.number(iterations)) or iterations < 1:
        raise ValueError(f"balance: iterations must be an integer of at least 1, got {iterations!r}")
    if method == "quantile" and step != 0.001:
        raise ValueError('balance: step belongs to method="sign"; quantiles need none')
    read, call, xp = read_router("balance", scores, scoring, -1, None, mask)
    rows = stop_gradient(upcast(call.rows, xp))
    n = rows.shape[-1]
    k = check_k("balance", k, n)
    split = fit_groups("balance", check_groups("balance", groups, keep_groups, group_by), n)
    if bias is None:
        b = xp.zeros((1, n), dtype=rows.dtype, **_array.device_of(rows))
    else:
        bias = _array.beside(bias, rows, "bias", xp)
        if tuple(bias.shape) != (n,):
            raise ValueError(
                f"balance: bias must have one number for each of {n} experts, got the shape {tuple(bias.shape)}"
            )
        b = xp.reshape(stop_gradient(_array.as_dtype(bias, rows.dtype, xp)), (1, n))
    if agreement is not None:
        agreement.say_mapping(read.mapping)
        agreement.same |= {f"{name} of {read.mapping.name}": v for name, v in read.mapping.params().items()}
        agreement.same["bias"] = b
        agreement.say(
            experts=n, k=k, dtype=str(rows.dtype), scoring=read.name, groups=split, method=method, iterations=iterations, step=step,
        )  # fmt: skip
        agreement.settle()
    if k == n:
        return b[0, :]
    values = read.constants(rows, xp)
    key = eligible(values, values == 0 if read.gives_zeros else None, rows, xp)
    with quiet(key):
        batch = _Batch.of(key, k, split, None if agreement is None else agreement.group, xp)
        for _ in range(iterations):
            b = batch.by_sign(b, step) if method == "sign" else batch.by_quantiles(b)
    return b[0, :]


class _Batch(NamedTuple):
    """The tokens of a batch, and how their experts are chosen."""

    key: Array  # [tokens, experts], the values; -inf where the token can't go to the expert
    k: int
    split: Groups | None
    group: Group | None  # the processes with further tokens
    full: bool  # every token may go to every expert, as far as values are known
    xp: Namespace

    @classmethod
    def of(cls, key: Array, k: int, split: Groups | None, group: Group | None, xp: Namespace) -> _Batch:
        n = key.shape[-1]
        key = xp.reshape(key, (-1, n))
        plain = (split is None or k < split.keep * (n // split.count)) and decides(key)
        if plain and bool(xp.isfinite(xp.sum(key))):
            return cls(key, k, split, group, True, xp)
        return cls(hide(key, ~xp.isnan(top(key, xp))), k, split, group, False, xp)  # a row with NaN goes nowhere

    def by_sign(self, b: Array, step: Any) -> Array:
        key, xp = self.key, self.xp
        index = xp.reshape(chosen(key + b, self.k, xp, self.split), (-1,))
        load = xp.astype(sums_at(index, None, key.shape[-1], xp), key.dtype)
        if self.full:
            room = key.shape[0] * xp.ones_like(load)
        else:
            room = xp.sum(xp.astype(key > -math.inf, key.dtype), axis=0)
        if self.group is not None:
            both = xp.sum(self.group.stack(xp.stack([load, room])), axis=0)
            load, room = both[0, :], both[1, :]
        return b + step * xp.expand_dims(xp.sign(_shares(xp.sum(load), room, xp) - load), axis=0)

    def by_quantiles(self, b: Array) -> Array:
        """With it each expert is above its thresholds for as many tokens as its share."""
        xp, (tokens, n) = self.xp, self.key.shape
        if self.group is None and not tokens:
            return b
        above, choices = self._above(b)
        if self.group is None and self.full:
            level = _level(above, tokens * self.k / n, xp)
            return xp.reshape(xp.mean(level) - level, (1, n))
        if self.group is None:
            sizes = xp.ones_like(above)
        else:
            above, sizes, choices = _of_all(above, choices, self.k / n, self.group, xp)
        there = (sizes > 0) & (above > -math.inf)
        finite = there & (above < math.inf)
        share = _shares(choices, xp.sum(xp.where(there, sizes, xp.zeros_like(sizes)), axis=-1), xp)
        # infinities become the largest and the smallest number
        high, low = (
            f(xp.where(finite, above, edge * xp.ones_like(above)), axis=-1, keepdims=True)
            for f, edge in ((xp.max, -math.inf), (xp.min, math.inf))
        )
        above = xp.where(finite, above, xp.where(there, high, low))
        share = xp.expand_dims(share, axis=-1)
        level = _level(above, share, xp) if self.group is None else _level_of_all(above, sizes, share, xp)
        reachable = xp.any(finite, axis=-1)  # the bias of others does not matter
        level = xp.where(reachable, level, xp.zeros_like(level))
        count = xp.sum(xp.astype(reachable, b.dtype))
        level = xp.sum(level) / xp.where(count > 0, count, xp.ones_like(count)) - level
        return xp.where(xp.expand_dims(reachable, axis=0), xp.reshape(level, (1, n)), b)

    def _above(self, b: Array) -> tuple[Array, Array]:
        """(how far the value of each expert lies above the threshold of each token, [experts, tokens]; how many choices there are)."""
        key, xp, k = self.key, self.xp, self.k
        biased = key + b
        index = chosen(biased, k + 1, xp, self.split)
        edge = at(biased, index, xp)
        edge = edge if self.full else xp.where(index < 0, -math.inf * xp.ones_like(edge), edge)
        last, after = edge[:, k - 1 : k], edge[:, k:]
        alpha = xp.where(after > -math.inf, 0.5 * (last + after), after)
        if self.split is not None and self.split.keep < self.split.count:
            # the sum of a group moves with the bias of all that are added
            past = (biased - group_levels(biased, *self.split, xp)) / self.split.most
            alpha = xp.maximum(alpha, biased - past)
        above = key - alpha
        above = above if self.full else xp.where(xp.isfinite(key), above, key)
        return xp.permute_dims(above, (1, 0)), xp.sum(xp.astype(index[:, :k] >= 0, key.dtype))


def _level(above: Array, share: Any, xp: Namespace) -> Array:
    """The level that `share` entries of each row are above, [rows]."""
    most = share if isinstance(share, float) else known_largest(share)
    width = above.shape[-1] if most is None else min(above.shape[-1], int(most) + 2)
    largest = at(above, chosen(above, width, xp), xp) if width < above.shape[-1] else _array.descending(above, xp)
    return _between(largest, xp.ones_like(largest), share, xp)[:, 0]


def _level_of_all(above: Array, sizes: Array, share: Any, xp: Namespace) -> Array:
    """The same of entries that stand for `sizes` entries each; those of none come last."""
    order = xp.where(sizes > 0, above, -math.inf * xp.ones_like(above))
    order = xp.argsort(order, axis=-1, descending=True, stable=True)
    above, sizes = (_array.take(a, order, xp) for a in (above, sizes))
    return _between(above, sizes, share, xp)[:, 0]


def _shares(choices: Any, room: Array, xp: Namespace) -> Array:
    """How many of all choices each expert should get, [experts]: as many as the others, but at most `room`."""
    n = room.shape[0]
    rising = xp.sort(room)
    left = n - _array.positions(rising, room.dtype, xp)
    # when the experts with the least room are full
    level = xp.max((choices - (running_sum(rising, xp) - rising)) / left)
    return xp.minimum(room, level)


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


def _of_all(above: Array, choices: Array, part: float, group: Group, xp: Namespace) -> tuple[Array, Array, Array]:
    """(numbers of all processes, [experts, numbers], how many entries each stands for, how many choices all make).

    Each sends the middles of portions of its entries, which are finer above the level that it expects.
    """
    n, tokens = above.shape
    bounds = _portions(tokens, part)
    pairs = list(itertools.pairwise(bounds))
    as_sent: dict[str, Any] = {"dtype": above.dtype, **_array.device_of(above)}
    sizes = xp.asarray([float(z - a) for a, z in pairs], **as_sent)
    if tokens:
        descending = _array.descending(above, xp)
        # of an empty portion any entry will do
        first, last = (
            xp.take(
                descending, xp.asarray([min(max(i, 0), tokens - 1) for i in at], **_array.device_of(above)), axis=-1
            )
            for at in ([(a + z - 1) // 2 for a, z in pairs], [(a + z) // 2 for a, z in pairs])
        )
        middle = 0.5 * (first + last)
        middle = xp.where(xp.isfinite(middle), middle, last)
    else:
        middle = xp.zeros((n, SENT), **as_sent)
    # [processes, n * SENT + SENT + 1]
    got = group.stack(xp.concat([xp.reshape(middle, (-1,)), sizes, xp.reshape(choices, (1,))]))
    middles = xp.permute_dims(xp.reshape(got[:, : n * SENT], (-1, n, SENT)), (1, 0, 2))
    sizes = xp.broadcast_to(xp.reshape(got[:, n * SENT : -1], (1, -1)), (n, got.shape[0] * SENT))
    return xp.reshape(middles, (n, -1)), sizes, xp.sum(got[:, -1])


def _portions(tokens: int, part: float) -> list[int]:
    """Bounds of SENT portions of the entries in descending order: half of them in the first `4 part`, of equal size where they can be."""
    if tokens <= SENT:
        return [min(i, tokens) for i in range(SENT + 1)]
    half, fine = SENT // 2, min(tokens, max(SENT // 2, int(4 * part * tokens)))
    first = [fine * i // half for i in range(half)]
    return first + [fine + (tokens - fine) * i // (SENT - half) for i in range(SENT - half + 1)]
