"""Where Perturb Max puts its nodes: `INT G h du` by few points that serve all classes.

Smooth noises have trapezoid points between the ends of G; noises with kinks have panels of Gauss nodes between them; noises whose tails
may be of any weight have such panels around each of the highest scores.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .._array import (
    Array,
    Namespace,
    counts,
    descending,
    eager,
    exporting,
    is_double,
    log,
    total,
)
from .noises import Law, Noise, constant

NODES, NODES_OF_DOUBLES = 32, 64  # where no number is given
CHUNK = 2**17  # entries [nodes, ..., n] held at once; what fits a core's cache is twice as fast as 2^20
_PANEL = 8  # Gauss nodes a panel
_BUMPS = 8  # scores with panels around them under heavy tails: the next has G <= 2^-8, or lies among them
_STEEP = 9.0  # logits of F up to which these panels are of equal length; beyond, where less is left to miss, they grow
_KINKS = 24  # scores whose kinks are edges of panels: for Laplace, the k-th has G <= 2^-k


def node_count(asked: int | None, x: Array) -> int:
    """The nodes of the quadrature of `PerturbMax` for scores like x: the number that was given, or what the digits of x need."""
    return asked or (NODES_OF_DOUBLES if is_double(x) else NODES)


class Rule(NamedTuple):
    """Nodes and weights, [nodes, ..., 1]. Where the noise has kinks also each node's panel: its left and right end, then the
    coefficients, [power, nodes, ..., 1], of the polynomials that `_gauss` gives."""

    u: Array
    w: Array
    panels: tuple[Array, ...] | None = None


class Chunk(NamedTuple):
    """Some nodes: w, log G, log F of the top score, [nodes, ..., 1]; log h, h and, if asked for, h', [nodes, ..., n]."""

    w: Array
    log_g: Array
    log_f: Array
    log_h: Array
    h: Array
    h1: Any


@dataclasses.dataclass(frozen=True)
class Nodes:
    """The nodes of a noise; `asked`: how many the user wants. z are rows with their maximum at 0, [..., n]."""

    law: Law
    asked: int | None

    def ends(self, z: Array, deep: float, tail: float, xp: Namespace) -> tuple[Array, Array]:
        """u with G(u) <= deep and u with G(u) >= 1 - tail, [..., 1].

        Both lie where k equal scores would put them, for a k in 1..n that depends on the spread of the row. k is found by
        halving a table on a geometric scale, so five rounds suffice for any n.
        """
        n = z.shape[-1]
        shape = (2,) + (1,) * z.ndim  # both ends at once: the lower one climbs its table, the upper one descends
        depth = (-math.log(deep), -math.log1p(-tail))
        tables = self.law.level(constant([a / n ** (j / 32.0) for a in depth for j in range(33)], z, xp), xp)
        goal, sign = (xp.reshape(constant(a, z, xp), shape) for a in (depth, (1.0, -1.0)))
        way = counts(sign, xp)
        k = counts(xp.zeros_like(z[None, ..., :1]), xp) + xp.where(way > 0, 0 * way, 65 + 0 * way)
        for step in (16, 8, 4, 2, 1):
            log_g = total(self.law.core(_pick(tables, k + step * way, xp) - z[None, ...], xp)[0], xp)
            k = xp.where(sign * (log_g + goal) <= 0, k + step * way, k)
        ends = _pick(tables, k, xp)
        return ends[0, ...], ends[1, ...]

    @property
    def heavy(self) -> bool:
        """True where tails may be of any weight: a noise of the user's, but for one between two finite ends."""
        return isinstance(self.law, Noise) and len(self.law.edges) < 2

    def place(self, z: Array, xp: Namespace) -> tuple[Array, Array]:
        """The ends between which `bulk` has its nodes."""
        return self.ends(z, self.tail(z), self.tail(z), xp)

    def logits(self, z: Array, deep: float, count: int, xp: Namespace) -> tuple[Array, float]:
        """y = log G / (1 - G) at equal steps, [count], from G = deep to where the tail is left out for any number of equal scores."""
        low, high = math.log(deep), -math.log(self.tail(z)) + math.log(z.shape[-1])
        step = (high - low) / (count - 1)
        return constant([low + step * i for i in range(count)], z, xp), step

    def count(self, z: Array) -> int:
        return node_count(self.asked, z)

    def tail(self, z: Array) -> float:
        """The mass of G left out at either end: below the error of the nodes."""
        return 1e-13 if self.count(z) >= 64 and is_double(z) else 1e-9

    def around(self, z: Array, low: Array, high: Array, deep: float, xp: Namespace) -> Array:
        """Edges of panels from low to high, [..., panels + 1], by the quantiles of the noise around each of the highest scores.

        Under a heavy tail G is not small at a score far below the highest, and f is as sharp there as at the highest. Of two scores'
        quantiles at one place those of the nearer score count; of all that count, equally many fall into each panel.
        """
        count, tops = self.count(z), descending(z, xp, _BUMPS)
        flat = (*z.shape[:-1], tops.shape[-1] * (count + 1))
        a, b = (math.asinh(y / _STEEP) for y in (math.log(deep), math.log(z.shape[-1]) - math.log(self.tail(z))))
        y = [_STEEP * math.sinh(a + (b - a) * i / count) for i in range(count + 1)]
        levels = self.law.level(constant([math.log1p(math.exp(-v)) for v in (*y, 0.0)], z, xp), xp)
        middle = levels[-1:]  # the median: scores are as near as their medians
        between, end = 0.5 * (tops[..., :-1] + tops[..., 1:]), math.inf * xp.ones_like(z[..., :1])
        above, below = (xp.concat(parts, axis=-1)[..., None] for parts in ((end, between), (between, -end)))
        at = tops[..., None] + (levels[:-1] - middle)
        edges = at + middle
        counted = (at <= above) & (at > below) & (edges > low[..., None]) & (edges < high[..., None])
        edges = xp.reshape(xp.where(counted, edges, high[..., None]), flat)
        edges = xp.sort(xp.concat([low, high, edges], axis=-1), axis=-1)
        last = 1.0 + total(xp.reshape(xp.astype(counted, z.dtype), flat), xp)  # the place of `high`
        place = last * constant([i / count for i in range(count + 1)], z, xp)
        left = counts(xp.where(place < last, place, last - 1.0), xp)
        share = place - xp.astype(left, z.dtype)
        return (
            xp.take_along_axis(edges, left, axis=-1) * (1.0 - share)
            + xp.take_along_axis(edges, left + 1, axis=-1) * share
        )

    def rule(self, z: Array, low: Array, high: Array, deep: float, count: int, xp: Namespace) -> Rule:
        """Nodes for INT du from low, where F <= deep, to high, [..., 1], where log G and its derivatives are wanted."""
        law, column = self.law, (-1,) + (1,) * z.ndim
        if self.heavy:
            return self.panels(z, self.around(z, low, high, deep, xp), xp)
        if not law.edges and not law.kinks:
            s, w = [k / (count - 1) for k in range(count)], [1.0 / (count - 1)] * count
            w[0] = w[-1] = 0.5 * w[0]
            s, w = (xp.reshape(constant(a, z, xp), column) for a in (s, w))
            return Rule(low * (1.0 - s) + high * s, (high - low) * w)
        ragged = law.edges[1:] and z.shape[-1] > _KINKS  # the lower scores' ends fall inside panels: error O(width^2)
        cuts = count if ragged else count // 4
        # near a lower end h = 1/v, which scores close to the top nearly reach: smaller panels there
        s = constant([(k / cuts) ** (3 if len(law.edges) == 1 else 1) for k in range(cuts + 1)], z, xp)
        return self.panels(z, low * (1.0 - s) + high * s, xp)

    def panels(self, z: Array, edges: Array, xp: Namespace) -> Rule:
        """Gauss nodes between these edges, [..., panels + 1], and the kinks of the highest scores."""
        law, low, high, all_edges = self.law, edges[..., :1], edges[..., -1:], [edges]
        for kink in law.kinks + law.edges[1:]:
            at = descending(z, xp, _KINKS) + kink
            at = xp.where(at > low, at, low)
            all_edges.append(xp.where(at < high, at, high))
        ends = first(xp.sort(xp.concat(all_edges, axis=-1), axis=-1), xp)[..., None]  # [panels + 1, ..., 1]
        left, right = (xp.repeat(a, _PANEL, axis=0) for a in (ends[:-1, ...], ends[1:, ...]))
        panels = ends.shape[0] - 1
        t, w, *polynomials = (_tile(constant(a, z, xp), panels, z.ndim, xp) for a in panel_nodes())
        half = 0.5 * (right - left)
        return Rule(left + half * (1.0 + t), half * w, (left, right, *polynomials))

    def bulk(self, z: Array, xp: Namespace, held: Array | None = None) -> Rule:
        low, high = self.place(z, xp) if held is None else (held[..., :1], held[..., 1:])
        return self.rule(z, low, high, self.tail(z), self.count(z), xp)

    def deep(self, z: Array, xp: Namespace) -> Rule:
        """Nodes for log p: they begin lower."""
        deep = 1e-30
        return self.rule(z, *self.ends(z, deep, self.tail(z), xp), deep, 2 * self.count(z), xp)

    def sweep(self, z: Array, rule: Rule, xp: Namespace, bend: bool) -> Iterator[Chunk]:
        law = self.law
        # a traced loop is unrolled: few large chunks, which a compiler fuses; one for any batch where that is a symbol
        nodes = rule.u.shape[0]
        step = nodes if exporting(z) else max(1, (CHUNK if eager(z) else 128 * CHUNK) // max(1, math.prod(z.shape)))
        lowest = None if rule.panels is None else rule.panels[0][:1, ...]
        for i in range(0, nodes, step):
            some = slice(i, min(i + step, nodes))
            u, w = rule.u[some, ...], rule.w[some, ...]
            log_f, log_h = law.core(u - z, xp)
            h = xp.exp(log_h)
            h1 = law.bend(u - z, h, xp) if bend else None
            if law.edges and rule.panels:
                here = (..., some, *(slice(None),) * z.ndim)
                left, right, integrals, values = (a[here] for a in rule.panels)
                half = 0.5 * (right - left)
                half = xp.where(half > 0, half, xp.ones_like(half))
                if law.edges[1:]:
                    # each class ends at its own z + upper: its weights integrate the panel's polynomial up to there
                    end = z + law.edges[1]
                    t = xp.clip((end - left) / half - 1.0, -1.0, 1.0)
                    inside = (end > left) & (end < right)
                    part = xp.where(inside, _horner(integrals, t), xp.astype(end >= right, z.dtype))
                    if h1 is not None:  # f falls to 0 there: a delta in h', which the panel's polynomial evaluates
                        jump = xp.exp(law.core(law.edges[1] * xp.ones_like(half), xp)[1])
                        fall = xp.where(
                            (end > left) & (end <= right), jump * _horner(values, t) / half, xp.zeros_like(h1)
                        )
                        h1 = part * h1 - fall
                    h = part * h
                    log_h = log(h, xp)
                if h1 is not None:  # f rises from 0 at the top score: the opposite delta, where the first panel starts
                    start = (left == lowest) & (right > left) & (z == 0)
                    h1 = h1 + xp.where(start, h * _horner(values, -xp.ones_like(half)) / half, xp.zeros_like(h))
            yield Chunk(w, total(log_f, xp), law.core(u, xp)[0], log_h, h, h1)


def softplus(y: Array, xp: Namespace) -> Array:
    """log(1 + exp(y)): -log of the logistic function of -y."""
    return xp.log1p(xp.exp(-xp.abs(y))) + xp.where(y > 0, y, xp.zeros_like(y))


def first(a: Array, xp: Namespace) -> Array:
    """The last axis first; torch.vmap has no rule for moveaxis."""
    return xp.permute_dims(a, (a.ndim - 1, *range(a.ndim - 1)))


def _pick(table: Array, index: Array, xp: Namespace) -> Array:
    return xp.reshape(xp.take(table, xp.reshape(index, (-1,)), axis=0), index.shape)


def _horner(powers: Array, t: Array) -> Array:
    out = powers[-1, ...]
    for k in range(powers.shape[0] - 2, -1, -1):
        out = out * t + powers[k, ...]
    return out


def _tile(a: Array, panels: int, ndim: int, xp: Namespace) -> Array:
    """[..., _PANEL] as [..., panels * _PANEL, 1, ...]: the same in every panel, for scores of `ndim` axes."""
    shape = tuple(a.shape[:-1])
    many = xp.broadcast_to(a[..., None, :], (*shape, panels, _PANEL))
    return xp.reshape(many, (*shape, panels * _PANEL, *(1,) * ndim))


def panel_nodes() -> tuple[Any, ...]:
    """The nodes of `_gauss`. Call this before compiling, since no compiler can trace `_gauss`."""
    if not _GAUSS:
        _GAUSS.append(_gauss())
    return _GAUSS[0]


def _gauss() -> tuple[Any, ...]:
    """Nodes and weights of Gauss and Legendre on [-1, 1]; by power, the integrals from -1 to t of the nodes' Lagrange
    polynomials and those polynomials themselves, both over the weights."""
    nodes, weights = np.polynomial.legendre.leggauss(_PANEL)
    values = np.linalg.inv(np.vander(nodes, increasing=True)) / weights  # [power, node]
    integrals = np.polynomial.polynomial.polyint(values, lbnd=-1.0, axis=0)
    return tuple(a.tolist() for a in (nodes, weights, integrals, values))


_GAUSS: list[tuple[Any, ...]] = []  # made at the first use: numpy.polynomial is slow to import
