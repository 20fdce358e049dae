"""Perturb Max: the probability that a perturbed score is the largest, by one shared quadrature in O(nQ)."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np

from .._array import (
    Array,
    Namespace,
    asarray,
    check_number,
    counts,
    descending,
    differentiates,
    dot,
    dtype_name,
    eager,
    exporting,
    finish,
    finite_scores,
    floating,
    is_array,
    is_jax,
    known_any,
    like,
    log,
    namespace,
    poison,
    positions,
    safe,
    stop_gradient,
    total,
    upcast,
)
from .._mapping import Facts, Mapping, row_top
from .._noises import Law, Noise, constant, draw, find

_FAR = 1e15  # a score this far below the top counts as masked; its square is finite in fp32
_CHUNK = 2**17  # entries [nodes, ..., n] held at once; what fits a core's cache is twice as fast as 2^20
_PANEL = 8  # Gauss nodes a panel
_KINKS = 24  # scores whose kinks are edges of panels: for Laplace, the k-th has G <= 2^-k


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


@dataclasses.dataclass(frozen=True, eq=False)
class PerturbMax(Mapping):
    """`p_i = P[argmax(x + scale * eps) = i]` for independent noises eps with cdf F and density f.

    It maximises `<p, x> - Omega(p)` with `Omega*(x) = E max(x + scale * eps)`; Gumbel noise is softmax(x / scale) exactly.
    With h = f/F and G(u) = prod_j F(u - x_j), `p_i = INT G h_i du`: one set of nodes serves all classes. Monotone and
    shift-invariant; sparse where the noise is bounded: "uniform" (on [0, 1]) gives exact zeros `scale` below the top.
    Smooth noises take `nodes` trapezoid points (None: 32 in fp32, 64 in fp64). "uniform", "laplace", "exponential" and
    noises with `support` or `kinks` take panels of 8 Gauss points, `nodes` / 4 of them and one for each kink of the 24
    highest scores; "uniform" of n > 24 takes `nodes` of them. Total variation error at n = 2, 10, 1000, fp32 / fp64:
    normal 1e-7 / 6e-14; logistic 4e-7 / 1e-9; laplace 2e-7 / 2e-10; exponential 1e-7 / 1e-13; uniform 1e-7 / 1e-12
    up to n = 24, beyond that 4e-6 / 2e-6. The first and second derivatives are as accurate as p; there are no higher ones.

    Su, https://kexue.fm/archives/10145 (Perturb Max); Karpukhin et al., EXACT: How to Train Your Accuracy (2022).
    """

    name: ClassVar[str] = "perturb_max"
    kernel = "perturb_max"
    iterative = True

    noise: str | Noise = "normal"
    nodes: int | None = None
    scale: Any = 1.0

    def __post_init__(self) -> None:
        find(self.noise)
        object.__setattr__(
            self, "scale", check_number("PerturbMax", "scale", self.scale, 0.0, "for no noise at all use a hard argmax")
        )
        q = self.nodes
        if q is not None and (isinstance(q, bool) or not isinstance(q, int) or q < 8):
            raise ValueError(f"PerturbMax(nodes={q!r}): expected None or an integer from 8; 32 suits fp32, 64 fp64")

    @property
    def law(self) -> Law:
        return find(self.noise)

    @property
    def facts(self) -> Facts:
        lower, upper = self.law.support
        width = upper - lower
        scale = (
            self.scale
            if not is_array(self.scale)
            else float(stop_gradient(self.scale).max())
            if eager(self.scale)
            else None
        )
        bounded = math.isfinite(width)
        margin = width * scale if bounded and scale is not None else None
        return Facts(monotone=True, shift_invariant=True, sparse=bounded, has_potential=True, margin=margin)

    # -- the contract -------------------------------------------------------------------------------------------------

    def forward(self, x: Array, xp: Namespace) -> Array:
        z, keep, poisoned, _, _ = self._rows(x, xp)
        p = self._shares(stop_gradient(z), None, xp) if self._quadrature else _softmax(z, xp)
        return finish(p, keep, poisoned, xp)

    def differentiable(self, x: Array, xp: Namespace, held: Array | None = None) -> Array:
        z, keep, poisoned, _, _ = self._rows(x, xp)
        p = self._shares(stop_gradient(z), _change(z), xp, held) if self._quadrature else _softmax(z, xp)
        return finish(p, keep, poisoned, xp)

    def hold(self, x: Array, xp: Namespace) -> Array:
        """The two numbers that place the nodes, [..., 2]."""
        z = stop_gradient(self._rows(x, xp)[0])
        return xp.concat(self._place(z, xp), axis=-1)

    def log_forward(self, x: Array, xp: Namespace) -> Array:
        """log p, with lower nodes: right to about 1e-6 down to p = 1e-25 (normal); below that a finite lower bound."""
        z, keep, poisoned, _, _ = self._rows(x, xp)
        if self._quadrature:
            out = self._shares(stop_gradient(z), _change(z), xp, logs=True)
        else:
            out = z - xp.log(total(xp.exp(z), xp))
        return finish(out, keep, poisoned, xp, masked=-math.inf)

    def vjp(self, x: Array, p: Array, g: Array, xp: Namespace) -> Array:
        """`INT G h_i (g_i sum h - sum h g) du / scale`: symmetric, and every row of the Jacobian sums to 0."""
        z, keep, poisoned, _, scale = self._rows(x, xp)
        g = xp.where(keep, g, xp.zeros_like(g))
        if self._quadrature:
            out = self._product(stop_gradient(z), _change(z), g, xp)
        else:
            p = _softmax(z, xp)
            out = p * (g - dot(p, g, xp))
        return finish(out / scale, keep, poisoned, xp)

    def expected_max(self, x: Array, xp: Namespace) -> Array:
        """E max(x + scale * eps), [..., 1]; its gradient is p. -inf for a row with no class."""
        z, keep, poisoned, high, scale = self._rows(x, xp)
        out = high + scale * (self._mean(z, xp) + self._excess(z, xp))
        out = xp.where(xp.any(keep, axis=-1, keepdims=True), out, -math.inf * xp.ones_like(out))
        return poison(out, poisoned, xp)

    def loss(self, x: Array, p: Array, y: Array, xp: Namespace) -> Array:
        """`E max(x + eps) - E eps - <y, x>`, [..., 1], with gradient p - y: for y one-hot the Fenchel-Young loss, else the
        y-weighted mean of those. As the sum of <y, max(x) - x> and INT F(u - max) - G(u) du nothing cancels.
        """
        mean = self.law.mean
        if mean is not None and not math.isfinite(mean):
            raise TypeError(
                f"perturb_max has no loss, because the noise's mean is {mean}; use anymax.nll with it instead"
            )
        z, keep, poisoned, _, scale = self._rows(x, xp)
        if mean is None and self._heavy:
            self._integrated_mean(xp.zeros_like(stop_gradient(z)[..., :1]), xp)
        # a masked target: an infinite loss; any other masked entry must not meet 0 * inf
        lost = xp.any(~keep & (y > 0), axis=-1, keepdims=True)
        gap = -dot(y, xp.where(keep, z, xp.zeros_like(z)), xp)
        out = scale * (gap + self._excess(z, xp))
        out = xp.where(lost, math.inf * xp.ones_like(out), out)
        return poison(out, poisoned, xp)

    def constant(self, y: Array, xp: Namespace) -> Array:
        """0: the loss of a distribution y is the y-weighted mean of its classes' losses, not less their best value."""
        return xp.zeros_like(y[..., :1])

    def omega(self, q: Array, xp: Namespace) -> Array:
        raise TypeError("perturb_max: Omega has no closed form, it is the conjugate of expected_max(x); use loss(...)")

    # -- other ways to the same p ---------------------------------------------------------------------------------------

    def quantile_form(self, x: Array, nodes: int = 64) -> Array:
        """The mean of `prod_{j != i} F(x_i - x_j + eps)` over the noise's quantiles (q + 1/2) / nodes, in O(n^2 nodes).

        Su's form, for comparison: its rows do not sum to 1, and for n = 1000 it needs thousands of nodes.
        """
        given = asarray(x)
        xp = namespace(given)
        x = floating(given, xp)
        z, keep, poisoned, _, _ = self._rows(upcast(x, xp), xp)
        out = xp.zeros_like(z)
        step = max(1, _CHUNK // max(1, math.prod(z.shape) * z.shape[-1]))
        depth = [-math.log((q + 0.5) / nodes) for q in range(nodes)]
        for i in range(0, nodes, step):
            eps = self.law.level(constant(depth[i : i + step], z, xp), xp)
            eps = xp.reshape(eps, (-1,) + (1,) * z.ndim)
            v = z[..., :, None] - z[..., None, :] + eps[..., None]
            others = total(self.law.core(v, xp)[0], xp)[..., 0] - self.law.core(eps, xp)[0]
            out = out + xp.sum(xp.exp(others), axis=0)
        return xp.astype(finish(out / nodes, keep, poisoned, xp), x.dtype)

    def monte_carlo(self, x: Array, samples: int, generator: Any) -> Array:
        """The frequency of each argmax among that many samples; error sqrt(p (1 - p) / samples)."""
        given = asarray(x)
        xp = namespace(given)
        x = floating(given, xp)
        z, keep, poisoned, _, _ = self._rows(stop_gradient(upcast(x, xp)), xp)
        step = max(1, _CHUNK // max(1, math.prod(z.shape)))
        hits = xp.zeros_like(z)
        for i in range(0, samples, step):
            count = min(step, samples - i)
            if is_jax(z):
                generator, now = sys.modules["jax"].random.split(generator)
            else:
                now = generator
            noisy = z[None, ...] + self.sample_noise((count, *z.shape), z, now)
            best = xp.argmax(noisy, axis=-1, keepdims=True)
            hits = hits + xp.sum(xp.astype(best == positions(noisy, best.dtype, xp), z.dtype), axis=0)
        return xp.astype(finish(hits / samples, keep, poisoned, xp), x.dtype)

    def sample_noise(self, shape: tuple[int, ...], like: Array, generator: Any) -> Array:
        """Independent noises of that shape (not times `scale`), of the kind, dtype and device of `like`, by the inverse cdf.

        `generator`: a numpy.random.Generator, a torch.Generator, a JAX key, or a seed; there is no global randomness.
        """
        return draw(self.noise, shape, like, generator)

    # -- rows -------------------------------------------------------------------------------------------------------------

    @property
    def _quadrature(self) -> bool:
        return self.noise != "gumbel"  # G h_i du = softmax(x)_i dG: Gumbel needs no nodes

    def _rows(self, x: Array, xp: Namespace) -> tuple[Array, Array, Array, Array, Any]:
        """(z, keep, poisoned, high, scale): z is (x - high) / scale, its maximum exactly 0, masked entries at -_FAR."""
        y, keep, poisoned = finite_scores(x, xp)
        high = row_top(y, keep, xp)
        scale = like(self.scale, y, xp)
        empty = ~xp.any(keep, axis=-1, keepdims=True)  # a row of zeros is harmless, and `finish` clears it
        z = xp.where(keep | empty, (y - high) / scale, -_FAR * xp.ones_like(y))
        return xp.where(z > -_FAR, z, -_FAR * xp.ones_like(y)), keep, poisoned, high, scale

    def _mean(self, z: Array, xp: Namespace) -> Any:
        """E eps; by quadrature for a Noise that doesn't say: upper end - INT F du."""
        if self.law.mean is not None:
            return self.law.mean
        zero = xp.zeros_like(stop_gradient(z)[..., :1])
        if self._heavy:
            return self._integrated_mean(zero, xp)
        low, high = self._ends(zero, self._tail(zero), self._tail(zero), xp)
        rule = self._rule(zero, low, high, 2 * self._count(zero), xp)
        return high - xp.sum(rule.w * xp.exp(self.law.core(rule.u, xp)[0]), axis=0)

    def _integrated_mean(self, zero: Array, xp: Namespace) -> Array:
        """INT v dF over y = logit F; an error where it does not converge."""
        y, step = self._logits(zero, self._tail(zero), 2 * self._count(zero), xp)
        parts = self.law.level(_softplus(-y, xp), xp) * xp.exp(-_softplus(y, xp) - _softplus(-y, xp))
        edge = xp.abs(parts[0]) + xp.abs(parts[-1])
        if known_any(edge > 1e-3 * (1.0 + xp.max(xp.abs(parts))), xp):
            raise TypeError(
                "perturb_max has no loss, because its noise has no mean: the integral does not converge; use anymax.nll with it "
                "instead, or give Noise(mean=...) if it has one"
            )
        return step * xp.sum(parts)

    # -- the nodes --------------------------------------------------------------------------------------------------------

    def _ends(self, z: Array, deep: float, tail: float, xp: Namespace) -> tuple[Array, Array]:
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
    def _heavy(self) -> bool:
        """True where tails may be of any weight: a noise of the user's, but for one between two finite ends."""
        return isinstance(self.law, Noise) and len(self.law.edges) < 2

    def _place(self, z: Array, xp: Namespace) -> tuple[Array, Array]:
        """What `_bulk` builds its nodes from: the ends, or where these would lie too far out, the column of `_quantiles`, twice."""
        if not self._heavy:
            return self._ends(z, self._tail(z), self._tail(z), xp)
        n = z.shape[-1]
        medians = self.law.level(constant([math.log(2.0) / n ** (j / 8.0) for j in range(9)], z, xp), xp)
        k = counts(xp.zeros_like(z[..., :1]), xp)
        for step in (4, 2, 1, 1):
            log_g = total(self.law.core(_pick(medians, k + step, xp) - z, xp)[0], xp)
            k = xp.where(log_g <= -math.log(2.0), k + step, k)
        k = xp.astype(k, z.dtype)
        return k, k

    def _logits(self, z: Array, deep: float, count: int, xp: Namespace) -> tuple[Array, float]:
        """y = log G / (1 - G) at equal steps, [count], from G = deep to where the tail is left out for any number of equal scores."""
        low, high = math.log(deep), -math.log(self._tail(z)) + math.log(z.shape[-1])
        step = (high - low) / (count - 1)
        return constant([low + step * i for i in range(count)], z, xp), step

    def _quantiles(self, z: Array, deep: float, k: Array, count: int, xp: Namespace) -> tuple[Array, Array]:
        """Nodes u and weights du, [count, ..., 1], at equal steps of y where G is that of n^(k/8) equal scores.

        In y the integrand falls as exp(-|y|) on either side, however heavy the tails of the noise are.
        """
        y, step = self._logits(z, deep, count, xp)
        equal = constant([z.shape[-1] ** (j / 8.0) for j in range(9)], z, xp)[:, None]
        u = self.law.level(_softplus(-y, xp)[None, :] / equal, xp)  # [9, count]
        w = (
            step * xp.exp(-_softplus(y, xp)[None, :] - self.law.core(u, xp)[1]) / equal
        )  # du/dy = (1 - G) / (h times the number)
        w = xp.where(xp.isfinite(w), w, xp.zeros_like(w))
        index = xp.reshape(counts(k, xp), (-1,))
        shape = (*k.shape[:-1], count)
        return tuple(_first(xp.reshape(xp.take(a, index, axis=0), shape), xp)[..., None] for a in (u, w))  # type: ignore[return-value]

    def _count(self, z: Array) -> int:
        return self.nodes or (64 if dtype_name(z) == "float64" else 32)

    def _tail(self, z: Array) -> float:
        """The mass of G left out at either end: below the error of the nodes."""
        return 1e-13 if self._count(z) >= 64 and dtype_name(z) == "float64" else 1e-9

    def _heavy_rule(self, z: Array, deep: float, k: Array, count: int, xp: Namespace) -> Rule:
        """Nodes for INT du by the quantiles of G."""
        if not self.law.edges and not self.law.kinks:
            return Rule(*self._quantiles(z, deep, k, count, xp))
        ends = self._quantiles(z, deep, k, count // 4 + 1, xp)[0]
        return self._panels(z, xp.permute_dims(ends[..., 0], (*range(1, z.ndim), 0)), xp)

    def _rule(self, z: Array, low: Array, high: Array, count: int, xp: Namespace) -> Rule:
        """Nodes for INT du from low to high, [..., 1], where log G and its derivatives are wanted."""
        law, column = self.law, (-1,) + (1,) * z.ndim
        if not law.edges and not law.kinks:
            s, w = [k / (count - 1) for k in range(count)], [1.0 / (count - 1)] * count
            w[0] = w[-1] = 0.5 * w[0]
            s, w = (xp.reshape(constant(a, z, xp), column) for a in (s, w))
            return Rule(low * (1.0 - s) + high * s, (high - low) * w)
        ragged = law.edges[1:] and z.shape[-1] > _KINKS  # the lower scores' ends fall inside panels: error O(width^2)
        cuts = count if ragged else count // 4
        # near a lower end h = 1/v, which scores close to the top nearly reach: smaller panels there
        s = constant([(k / cuts) ** (3 if len(law.edges) == 1 else 1) for k in range(cuts + 1)], z, xp)
        return self._panels(z, low * (1.0 - s) + high * s, xp)

    def _panels(self, z: Array, edges: Array, xp: Namespace) -> Rule:
        """Gauss nodes between these edges, [..., panels + 1], and the kinks of the highest scores."""
        law, low, high, all_edges = self.law, edges[..., :1], edges[..., -1:], [edges]
        for kink in law.kinks + law.edges[1:]:
            at = descending(z, xp)[..., : min(_KINKS, z.shape[-1])] + kink
            at = xp.where(at > low, at, low)
            all_edges.append(xp.where(at < high, at, high))
        ends = _first(xp.sort(xp.concat(all_edges, axis=-1), axis=-1), xp)[..., None]  # [panels + 1, ..., 1]
        left, right = (xp.repeat(a, _PANEL, axis=0) for a in (ends[:-1, ...], ends[1:, ...]))
        panels = ends.shape[0] - 1
        t, w, *polynomials = (_tile(constant(a, z, xp), panels, z.ndim, xp) for a in _panel_nodes())
        half = 0.5 * (right - left)
        return Rule(left + half * (1.0 + t), half * w, (left, right, *polynomials))

    def _bulk(self, z: Array, xp: Namespace, held: Array | None = None) -> Rule:
        low, high = self._place(z, xp) if held is None else (held[..., :1], held[..., 1:])
        if self._heavy:
            return self._heavy_rule(z, self._tail(z), low, 4 * self._count(z), xp)
        return self._rule(z, low, high, self._count(z), xp)

    def _sweep(self, z: Array, rule: Rule, xp: Namespace, bend: bool) -> Iterator[Chunk]:
        law = self.law
        # a traced loop is unrolled: few large chunks, which a compiler fuses; one for any batch where that is a symbol
        nodes = rule.u.shape[0]
        step = nodes if exporting(z) else max(1, (_CHUNK if eager(z) else 128 * _CHUNK) // max(1, math.prod(z.shape)))
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

    # -- the integrals ------------------------------------------------------------------------------------------------------
    # With d the change of z, here 0 but differentiated, and u moved along with class i,
    # p_i = INT h_i exp(sum_j log F(u - z_j + d_i - d_j)) du: f itself is not differentiated, so jumps of f are harmless.

    def _shares(self, z: Array, d: Array | None, xp: Namespace, held: Array | None = None, logs: bool = False) -> Array:
        if logs:
            rule = (
                self._heavy_rule(z, 1e-30, self._place(z, xp)[0], 4 * self._count(z), xp)
                if self._heavy
                else self._rule(z, *self._ends(z, 1e-30, self._tail(z), xp), 2 * self._count(z), xp)
            )
        else:
            rule = self._bulk(z, xp, held)
        parts = []
        for c in self._sweep(z, rule, xp, d is not None):
            log_wg = log(c.w, xp) + c.log_g
            if d is None and not logs:
                parts.append(xp.sum(xp.exp(log_wg) * c.h, axis=0))
                continue
            change = 0.0 if d is None else _shift(c, d, xp)
            if logs:
                parts.append(_logsumexp(log_wg + c.log_h + change, xp))
            else:
                parts.append(xp.sum(xp.exp(log_wg) * c.h * xp.exp(change), axis=0))
        if logs:
            out = _logsumexp(xp.stack(parts), xp)
            return out - _logsumexp(_first(out, xp), xp)[..., None]
        out = sum(parts[1:], parts[0])
        out = xp.where(out > 0, out, xp.zeros_like(out))
        mass = total(out, xp)
        if isinstance(self.law, Noise):  # the others are held to their error by tests
            lost = xp.abs(mass - 1.0) > 1e-3
            if known_any(lost, xp):
                raise ValueError(
                    f"PerturbMax: the nodes miss the noise: the probabilities sum to {float(mass[lost][0]):.3g} before they are "
                    "normalised. Are cdf and pdf (with support and kinks) those of one law? If so raise nodes=, or use quantile_form "
                    "or monte_carlo"
                )
            mass = poison(mass, lost, xp)
        return out / mass

    def _product(self, z: Array, d: Array | None, g: Array, xp: Namespace) -> Array:
        out, norm = xp.zeros_like(z), xp.zeros_like(z[..., :1])
        for c in self._sweep(z, self._bulk(z, xp), xp, d is not None):
            wg = xp.exp(log(c.w, xp) + c.log_g)
            sum_h = total(c.h, xp)
            norm = norm + xp.sum(wg * sum_h, axis=0)
            slope = g * sum_h - total(c.h * g, xp)
            if d is not None:
                slope = slope + d * g * total(c.h1, xp) - g * total(c.h1 * d, xp) - d * total(c.h1 * g, xp)
                slope = (slope + total(c.h1 * g * d, xp)) * xp.exp(_shift(c, d, xp))
            out = out + xp.sum(wg * c.h * slope, axis=0)
        return out / norm

    def _excess(self, z: Array, xp: Namespace) -> Array:
        """E max(z + eps) - E eps = INT F(u) - G(u) du >= 0, [..., 1], z with its maximum at 0."""
        if not self._quadrature:
            return xp.log(total(xp.exp(z), xp))
        d, z = _change(z), stop_gradient(z)
        tail = self._tail(z)
        out = xp.zeros_like(z[..., :1])
        if self._heavy:
            rule = self._heavy_rule(z, tail, out, 4 * self._count(z), xp)
        else:
            low = self.law.level(constant([-math.log(tail)], z, xp), xp) + out
            rule = self._rule(z, low, self._ends(z, tail, tail, xp)[1], 2 * self._count(z), xp)
        for c in self._sweep(z, rule, xp, d is not None):
            inside = c.log_f > -math.inf  # else F and G are 0: a node rounded to the end of the support
            rest = xp.where(inside, c.log_g, xp.zeros_like(c.log_g)) - safe(c.log_f, inside, 0.0, xp)
            if d is not None:
                rest = rest + total(0.5 * c.h1 * d * d - c.h * d, xp)
            out = out - xp.sum(c.w * xp.exp(c.log_f) * xp.expm1(xp.where(rest < 0, rest, 0.0 * rest)), axis=0)
        return out


def _softplus(y: Array, xp: Namespace) -> Array:
    """log(1 + exp(y)): -log of the logistic function of -y."""
    return xp.log1p(xp.exp(-xp.abs(y))) + xp.where(y > 0, y, xp.zeros_like(y))


def _shift(c: Chunk, d: Array, xp: Namespace) -> Array:
    """`sum_j log F(v_j + d_i - d_j) - log F(v_j)` to second order, in O(n)."""
    first = d * total(c.h, xp) - total(c.h * d, xp)
    return first + 0.5 * (d * d * total(c.h1, xp) - 2.0 * d * total(c.h1 * d, xp) + total(c.h1 * d * d, xp))


def _change(z: Array) -> Array | None:
    """z minus itself as a constant; None where nothing will be differentiated."""
    return z - stop_gradient(z) if differentiates(z) else None


def _softmax(z: Array, xp: Namespace) -> Array:
    e = xp.exp(z)
    return e / total(e, xp)


def _logsumexp(a: Array, xp: Namespace) -> Array:
    """Over the first axis; -inf for a column of -inf."""
    high = stop_gradient(xp.max(a, axis=0))
    high = xp.where(high > -math.inf, high, xp.zeros_like(high))
    return high + log(xp.sum(xp.exp(a - high), axis=0), xp)


def _first(a: Array, xp: Namespace) -> Array:
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


def _panel_nodes() -> tuple[Any, ...]:
    """Those of `_gauss`."""
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
