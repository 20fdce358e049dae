"""The method by which a map is computed over the processes, and the probabilities by each method."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from .. import _array
from .._array import Array, Namespace, differentiates, like, stop_gradient, total
from .._core.mapping import Mapping
from .._core.ratio_map import RatioMap
from .._core.separable import Separable
from .._random.truncation import topp_keep
from ..functional import apply, log_apply
from ..mappings import Softmax
from ._exponential import Part, Whole, exponents
from ._exponential import columns as of_exponents
from ._exponential import log_p as exponential_log_p
from ._exponential import p as exponential_p
from ._group import jax
from ._shard import Met, Shard, ShardedCall
from ._small import FIXED, Small, above, bound, candidates, fullest, gathered, narrowed

MANY = 4096  # candidates per row over all processes, above which thresholds are searched by sums over the processes


def way(mapping: Mapping, xp: Namespace, rows: Array) -> str:
    """ "sums", "ratio", "nucleus", "candidates", "search" or "whole"."""
    if exponents(mapping, rows[..., :0], xp) is not None:
        return "sums"
    if isinstance(mapping, RatioMap):
        return "ratio"
    if mapping.nucleus is not None:
        return "nucleus"
    if mapping.zeros_stay:
        return "candidates"
    return "search" if _searches(mapping, rows, xp) else "whole"


def _searches(mapping: Mapping, rows: Array, xp: Namespace) -> bool:
    """True if sums alone find the level: no ceiling, no steep edge, no other kind of search."""
    return isinstance(mapping, Separable) and mapping.sums_suffice(rows, xp)


@dataclasses.dataclass
class Solved:
    """The combined problem of each row, for exactly one of the methods."""

    call: ShardedCall
    met: Met
    way: str
    extra: list[Array]  # further columns of the first collective, [size, ..., 1]
    poisoned: Array  # [..., 1]
    part: Part | None = None
    whole: Whole | None = None
    small: Small | None = None
    kept: Array | None = None  # for the small problem: the classes of the nucleus
    weights: tuple[Array, Array] | None = None  # for a ratio map: v, and its sum
    level: tuple[Array, Array] | None = None  # for a search: anchor and level
    later: list[Array] = dataclasses.field(default_factory=list)  # further columns of the second collective

    @property
    def shard(self) -> Shard:
        return self.met.shard

    @property
    def high(self) -> Array:
        """The maximum of each row, 0 where it is not finite; a constant."""
        return Whole.of(self.met.columns[0], 0.0 * self.met.columns[0], self.shard.xp).high

    def inner(self) -> tuple[Mapping, Array]:
        """The map and the scores of the small problem, common."""
        assert self.small is not None
        z, xp = self.small.z, self.shard.xp
        if self.kept is None:
            return self.shard.common, z
        return Softmax(), xp.where(self.kept, z, -math.inf * xp.ones_like(z))

    def own_inner(self) -> tuple[Mapping, Array]:
        """`inner` for the probabilities of this process's classes: its gradients add up over the processes."""
        z = self.shard.group.own(self.inner()[1])
        return (self.shard.mapping if self.kept is None else Softmax()), z

    # -- probabilities ---------------------------------------------------------------------------------------------------

    def p(self) -> Array:
        """p of this process's classes."""
        shard, group = self.shard, self.shard.group
        xp = shard.xp
        if self.way == "sums":
            assert self.part is not None
            assert self.whole is not None
            return exponential_p(shard, self.part, self.whole)
        if self.way == "ratio":
            v, z = self.weights  # type: ignore[misc]
            out = v / group.own(z)
        elif self.level is not None:
            out = self._on_level()
        else:
            assert self.small is not None
            out = self.small.spread(apply(*self.own_inner()), 0.0)
        return xp.where(self.poisoned, math.nan, out)

    def log_p(self) -> Array:
        shard, group = self.shard, self.shard.group
        xp = shard.xp
        if self.way == "sums":
            assert self.part is not None
            assert self.whole is not None
            return exponential_log_p(shard, self.part, self.whole)
        if self.small is not None:
            out = self.small.spread(log_apply(*self.own_inner()), -math.inf)
            return xp.where(self.poisoned, math.nan, out)
        if self.way == "ratio":
            v, z = self.weights  # type: ignore[misc]
            out = _array.log(v, xp) - xp.log(group.own(z))
            return xp.where(self.poisoned, math.nan, out)
        return _array.log(self.p(), xp)

    def _on_level(self) -> Array:
        shard, xp = self.shard, self.shard.xp
        mapping: Any = shard.mapping
        anchor, level = self.level  # type: ignore[misc]
        y, keep, _ = _array.finite_scores(shard.rows, xp)
        keep = keep & xp.isfinite(shard.rows)
        add = summing(self.met)
        if differentiates(shard.rows) or any(differentiates(v) for v in mapping.params().values()):
            return mapping.on_level(y, keep, self.poisoned, anchor, level, xp, add)
        p = xp.where(keep, mapping.at(y, anchor, level, xp), xp.zeros_like(y))
        return p + mapping.remainder(p, level, xp, add)


def summing(met: Met) -> Any:
    """Sums over the classes of all processes, several in one collective."""

    def totals(parts: list[Array], xp: Namespace) -> list[Array]:
        both = xp.concat([total(a, xp) for a in parts], axis=-1)
        sums = met.shard.group.own(xp.sum(met.stack(both), axis=0))
        return [sums[..., i : i + 1] for i in range(len(parts))]

    return totals


# -- the combined problem ----------------------------------------------------------------------------------------------------------


def solve(
    call: ShardedCall, finish: Callable[[Solved], Any], extra: int = 0, more: Any = None, later: Any = None
) -> Any:
    """Combine all that is common about a row, and return `finish` of it.

    more(shard, a, anchor): `extra` further columns [..., 1] of the first collective; a are the exponents where the map has them, else
    the scores, and anchor the finite maximum of this process. later(solved): columns of the second one.
    """
    state: dict[str, Any] = {}

    def first(shard: Shard) -> tuple[list[Array], int]:
        xp, rows = shard.xp, shard.rows
        state["way"] = kind = way(shard.mapping, xp, rows)
        a, most = rows, 0
        if kind in ("sums", "nucleus"):
            a = exponents(shard.mapping, rows, xp) if kind == "sums" else rows
            state["part"] = part = Part.of(a, xp)
            columns = of_exponents(part)
        else:
            high = stop_gradient(xp.max(rows, axis=-1, keepdims=True))
            columns = [high, _second(shard, kind, state)]
            if "some" in state and shard.group.strict:
                most = int(fullest(state["some"], xp))
        anchor = xp.where(xp.isfinite(columns[0]), columns[0], xp.zeros_like(columns[0]))
        columns += more(shard, a, anchor) if more else []
        if "some" in state and not shard.group.strict:  # one more column, which decides the method
            columns.append(total(xp.astype(state["some"], high.dtype), xp))
        return columns, most

    met = call.meet(2 + extra, first)
    shard, xp = met.shard, met.shard.xp
    fixed = _fixed(shard) if "some" in state and not shard.group.strict else shard.rows.shape[-1]
    if fixed >= shard.rows.shape[-1]:
        return finish(_brought(call, met, state, extra, later, fixed))
    if shard.mapping.most_kept is not None:  # a row never has more
        return finish(_brought(call, met, state, extra, later, fixed))
    fits = xp.max(met.columns[-1]) <= fixed
    return jax().lax.cond(
        fits,
        lambda: finish(_brought(call, met, state, extra, later, fixed)),
        lambda: finish(_brought(call, met, state, extra, later, None)),
    )


def _fixed(shard: Shard) -> int:
    """How many candidates each JAX device sends."""
    mapping, n = shard.mapping, shard.rows.shape[-1]
    return min(FIXED if mapping.most_kept is None else mapping.most_kept, n)


def _brought(call: ShardedCall, met: Met, state: dict[str, Any], extra: int, later: Any, fixed: int | None) -> Solved:
    """The later collectives. fixed: in JAX the number of candidates per device, or None if there are more."""
    xp, kind = met.shard.xp, state["way"]
    highs = met.columns[0]
    poisoned = xp.any(xp.isnan(highs) | (highs == math.inf), axis=0)
    out = Solved(call, met, kind, met.columns[2 : 2 + extra], poisoned)
    if kind == "ratio":
        return _ratio(out, later)
    columns = later(out) if later else []
    if kind in ("sums", "nucleus"):
        out.part, out.whole = state["part"], Whole.of(highs, met.columns[1], xp)
    if kind == "sums":
        if columns:
            stacked = met.stack(xp.concat(columns, axis=-1))
            out.later = [stacked[..., i : i + 1] for i in range(len(columns))]
    elif kind == "nucleus":
        _nucleus(out, columns)
    else:
        _gather(out, state.get("some"), columns, fixed)
    return out


def _second(shard: Shard, kind: str, state: dict[str, Any]) -> Array:
    """The second column: a threshold, or for a ratio map the score with the largest weight."""
    xp, rows = shard.xp, shard.rows
    nothing = -math.inf * xp.ones_like(rows[..., :1])
    if kind == "candidates":
        tau, state["some"] = candidates(shard)
        return tau
    if kind == "search":
        y, keep, _ = _array.finite_scores(stop_gradient(rows), xp)
        anchor, level = shard.mapping.frozen().solve(y, keep, xp)  # type: ignore[attr-defined]
        return xp.where(xp.any(keep, axis=-1, keepdims=True) & xp.isfinite(level), anchor - level, nothing)
    if kind == "ratio":
        keep = xp.isfinite(rows)
        y = stop_gradient(xp.where(keep, rows, xp.zeros_like(rows)))
        u = shard.mapping.frozen().weights(y, keep, xp)[0]  # type: ignore[attr-defined]
        u = xp.where(keep, u, -xp.ones_like(u))
        best = xp.take_along_axis(y, xp.argmax(stop_gradient(u), axis=-1, keepdims=True), axis=-1)
        return xp.where(xp.any(keep, axis=-1, keepdims=True), best, nothing)
    return nothing


def _ratio(out: Solved, later: Any) -> Solved:
    """Weights relative to the largest. `weights` may scale a row freely, so the row gets the best score of each process added."""
    shard, xp = out.shard, out.shard.xp
    rows, refs = shard.rows, out.met.columns[1]
    refs = xp.moveaxis(stop_gradient(refs)[..., 0], 0, -1)  # [..., size]
    both = xp.concat([rows, xp.broadcast_to(refs, (*rows.shape[:-1], refs.shape[-1]))], axis=-1)
    keep = xp.isfinite(both)
    u = shard.mapping.weights(xp.where(keep, both, xp.zeros_like(both)), keep, xp)[0]  # type: ignore[attr-defined]
    u = xp.where(keep, u, xp.zeros_like(u))
    n = rows.shape[-1]
    largest = stop_gradient(xp.max(u[..., n:], axis=-1, keepdims=True))
    v = u[..., :n] / xp.where(largest > 0, largest, xp.ones_like(largest))
    out.weights = v, xp.ones_like(largest)
    columns = later(out) if later else []
    stacked = out.met.stack(xp.concat([total(v, xp), *columns], axis=-1))
    z = xp.sum(stacked[..., :1], axis=0)
    out.weights = v, xp.where(z == 0, xp.ones_like(z), z)
    out.later = [stacked[..., i + 1 : i + 2] for i in range(len(columns))]
    return out


def _nucleus(out: Solved, columns: list[Array]) -> None:
    """Gather the classes that can be in the nucleus: a class qualifies if n such classes would hold at least 1 - p of the mass."""
    met, shard, xp = out.met, out.shard, out.shard.xp
    assert out.part is not None
    assert out.whole is not None
    mapping: Any = shard.mapping
    share = stop_gradient(out.part.e) * xp.exp(out.part.anchor - out.whole.high)
    z, level = stop_gradient(out.whole.z), stop_gradient(like(mapping.nucleus, shard.rows, xp))
    some = (share * met.count >= 0.99 * (1.0 - level) * z) & (share > 0)
    some = some | ((share >= 0) & xp.isfinite(shard.rows) & (level >= 1.0 + 0.0 * z))
    if shard.group.strict:
        told = met.stack(xp.reshape(xp.astype(fullest(some, xp), shard.rows.dtype), (1,)))
        k = max(1, int(xp.max(told)))
    else:
        k = shard.rows.shape[-1]
    out.small, out.later = gathered(met, some, k, columns)
    out.kept = topp_keep(out.small.z, mapping.nucleus, xp, mass=z)


def _gather(out: Solved, some: Array | None, columns: list[Array], fixed: int | None) -> None:
    met, shard, xp = out.met, out.shard, out.shard.xp
    n, whole = shard.rows.shape[-1], some is None
    if some is None:
        some, k = xp.ones_like(shard.rows) > 0, max(1, *met.sizes)
        many = out.way == "search" and met.count > MANY
    else:
        some = some & above(shard.rows, bound(met, 1, xp), xp)
        if shard.group.strict:
            some, k = narrowed(met, some)
            many = k * shard.group.size > MANY
        else:
            k, many = n if fixed is None else fixed, fixed is None
    if many and _searches(shard.mapping, shard.rows, xp):
        out.level = _search(out)
        if columns:
            stacked = met.stack(xp.concat(columns, axis=-1))
            out.later = [stacked[..., i : i + 1] for i in range(len(columns))]
        return
    out.small, out.later = gathered(met, some, k, columns, whole)


def _search(out: Solved) -> tuple[Array, Array]:
    """The level by Newton's method; each step needs one sum over the processes."""
    shard, xp = out.shard, out.shard.xp
    mapping: Any = shard.mapping.frozen()
    anchor = out.high
    rows = stop_gradient(shard.rows)
    keep = xp.isfinite(rows)
    y = xp.where(keep, rows - anchor, xp.zeros_like(rows))
    return anchor, mapping.search(y, keep, xp, _start(out, mapping, anchor), summing(out.met))


def _start(out: Solved, mapping: Any, anchor: Array) -> Array | None:
    """A bound of the level from the processes' own thresholds: the largest of them is below the common one."""
    xp = out.shard.xp
    tau = bound(out.met, 1, xp)
    if out.way != "search":
        shift = mapping.level_to_tau(tau, xp)
        if _array.is_array(shift):
            return None
        tau = tau + shift
    return xp.where(tau > -math.inf, anchor - tau, xp.zeros_like(anchor))
