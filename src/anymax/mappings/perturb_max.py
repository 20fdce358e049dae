"""Perturb Max: the probability that a perturbed score is the largest, by one quadrature for all classes in O(nQ)."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any, ClassVar

from .._array import (
    POSITIVE,
    Array,
    Namespace,
    Ranges,
    asarray,
    differentiates,
    dot,
    eager,
    finish,
    finite_scores,
    floating,
    is_array,
    is_int,
    is_jax,
    known_any,
    like,
    log,
    namespace,
    number,
    poison,
    positions,
    safe,
    stop_gradient,
    total,
    upcast,
)
from .._core.facts import Facts
from .._core.mapping import Mapping, row_top
from .._core.parameters import check_ranges
from .._core.parts import PartedConstant, Parts
from .._core.typing import Parameter
from .._random.nodes import CHUNK, Chunk, Nodes, first, softplus
from .._random.noises import Law, Noise, constant, draw, find

_MOST_NODES = 10_000  # beyond, nothing is gained but time
_FAR = 1e15  # a score this far below the top counts as masked; its square is finite in fp32


_NOTHING = PartedConstant(lambda m, y, xp: [], lambda m, terms, xp: 0.0)


@dataclasses.dataclass(frozen=True, eq=False)
class PerturbMax(Mapping):
    """Perturb-max: `p_i = P[argmax(x + scale * eps) = i]` for independent noises eps.

    Use it for a model of noisy choice, such as probit. It is the map of `Omega*(x) = E max(x + scale * eps)`; with Gumbel noise it is
    exactly softmax(x / scale). Monotone and shift-invariant; sparse if the noise is bounded: with "uniform", scores `scale` or more
    below the top get exactly 0. Su, https://kexue.fm/archives/10145 (Perturb Max); Karpukhin et al., EXACT: How to Train Your Accuracy
    (2022).

    p is computed by quadrature with one set of nodes for all classes. Total variation error at n = 2, 10, 1000, fp32 / fp64 (and
    longdouble): normal 1e-7 / 6e-14; logistic 4e-7 / 1e-9; laplace 2e-7 / 2e-10; exponential 1e-7 / 1e-13; uniform 1e-7 / 1e-12 up to
    n = 24, beyond that 4e-6 / 2e-6. The first and second derivatives are as accurate as p; there are no higher ones.

    Parameters
    ----------
    noise
        "gumbel", "normal", "logistic", "laplace", "exponential" or "uniform" on [0, 1], or your own `anymax.Noise`.
    nodes
        The number of quadrature points, an integer from 8 to 10,000; None takes 32 in fp32 and 64 in fp64. Noises with kinks use
        panels of 8 Gauss points: `nodes` / 4 panels (`nodes` for "uniform" with more than 24 classes), and one for each
        kink of the 24 highest scores. Your own `Noise` uses `nodes` such panels.
    scale
        The factor of the noise, a number above 0, or an array that broadcasts to the scores with size 1 along the classes.

    Examples
    --------
    >>> anymax.apply(anymax.PerturbMax(noise="normal"), [2.0, 1.0, -1.0]).round(3)
    array([0.756, 0.237, 0.007])
    """

    # p_i = INT G h_i du with h = f/F and G(u) = prod_j F(u - x_j), for noise with the cdf F and the density f.

    name: ClassVar[str] = "perturb_max"
    formula = "pᵢ = P[argmax(x + ε) = i]"
    kernel = "perturb_max"
    iterative = True
    learns = ("scale",)
    ranges: ClassVar[Ranges] = {"scale": POSITIVE}

    noise: str | Noise = "normal"
    nodes: int | None = None
    scale: Parameter = 1.0

    def __post_init__(self) -> None:
        find(self.noise)
        check_ranges(self, "for no noise at all use a hard argmax", "scale")
        q = number(self.nodes)
        if q is not None and (not is_int(q) or not 8 <= q <= _MOST_NODES):
            raise ValueError(
                f"PerturbMax(nodes={q!r}): expected None or an integer from 8 to {_MOST_NODES}; 32 suits fp32, 64 fp64"
            )
        object.__setattr__(self, "nodes", q)

    @property
    def law(self) -> Law:
        return find(self.noise)

    @property
    def facts(self) -> Facts:
        lower, upper = self.law.support
        width = upper - lower
        scale: Any = self.scale
        if is_array(scale):
            scale = float(stop_gradient(scale).max()) if eager(scale) and math.prod(scale.shape) else None
        bounded = width < math.inf
        margin = width * scale if bounded and scale is not None else None
        return Facts(monotone=True, shift_invariant=True, sparse=bounded, has_potential=True, margin=margin)

    @property
    def is_softmax(self) -> bool:  # type: ignore[override]
        return not self._quadrature and not is_array(self.scale) and self.scale == 1

    @property
    def parts(self) -> Parts:  # type: ignore[override]
        return Parts(temperature=None if self._quadrature else self.scale, constant=_NOTHING)

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
        return xp.concat(self._nodes.place(z, xp), axis=-1)

    def log_forward(self, x: Array, xp: Namespace) -> Array:
        """log p, from nodes that reach lower: accurate to about 1e-6 down to p = 1e-25 (normal); below that a finite lower bound."""
        z, keep, poisoned, _, _ = self._rows(x, xp)
        if self._quadrature:
            out = self._shares(stop_gradient(z), _change(z), xp, logs=True)
        else:
            out = z - xp.log(total(xp.exp(z), xp))
        return finish(out, keep, poisoned, xp, masked=-math.inf)

    def vjp(self, x: Array, p: Array, g: Array, xp: Namespace) -> Array:
        """`INT G h_i (g_i sum h - sum h g) du / scale`: symmetric, and every row of the Jacobian sums to 0.

        A class whose p is 0 takes no part, not even where its g is infinite.
        """
        z, keep, poisoned, _, scale = self._rows(x, xp)
        keep = keep & ~(p == 0)
        g = xp.where(keep, g, xp.zeros_like(g))
        if self._quadrature:
            out = self._product(stop_gradient(z), _change(z), g, xp)
        else:
            p = _softmax(z, xp)
            out = p * (g - dot(p, g, xp))
        return finish(out / scale, keep, poisoned, xp)

    def score_change(self, name: str, x: Array, xp: Namespace) -> Array:
        """p depends on x / scale, so the scale changes it as a change of `-x / scale` does, less a constant of the row."""
        z, keep, _, _, _ = self._rows(x, xp)
        return xp.where(keep & (z > -_FAR), -z, xp.zeros_like(z))

    def loss_slope(self, name: str, x: Array, p: Array, xp: Namespace) -> Array:
        """`E max(z + eps) - E eps - <p, z>` for z = x / scale: the loss is that of z, times the scale."""
        z, keep, poisoned, _, _ = self._rows(x, xp)
        out = self._excess(z, xp) - dot(p, xp.where(keep, z, xp.zeros_like(z)), xp)
        return poison(out, poisoned, xp)

    def expected_max(self, x: Array, xp: Namespace) -> Array:
        """E max(x + scale * eps), [..., 1]; its gradient is p. -inf for a row without classes."""
        z, keep, poisoned, high, scale = self._rows(x, xp)
        out = high + scale * (self._mean(z, xp) + self._excess(z, xp))
        out = xp.where(xp.any(keep, axis=-1, keepdims=True), out, -math.inf * xp.ones_like(out))
        return poison(out, poisoned, xp)

    def loss(self, x: Array, p: Array, y: Array, xp: Namespace) -> Array:
        """`E max(x + eps) - E eps - <y, x>`, [..., 1], with gradient p - y: the Fenchel-Young loss if y is one-hot, else the y-weighted
        mean of those of the classes. It is the sum of <y, max(x) - x> and INT F(u - max) - G(u) du, so nothing cancels.
        """
        mean = self.law.mean
        if mean is not None and not -math.inf < mean < math.inf:
            raise TypeError(
                f"perturb_max has no loss, because the noise's mean is {mean}; use anymax.nll with it instead"
            )
        z, keep, poisoned, _, scale = self._rows(x, xp)
        if mean is None and self._nodes.heavy:
            self._integrated_mean(xp.zeros_like(stop_gradient(z)[..., :1]), xp)
        # a masked target gives an infinite loss; other masked entries must not give 0 * inf
        lost = xp.any(~keep & (y > 0), axis=-1, keepdims=True)
        gap = -dot(y, xp.where(keep, z, xp.zeros_like(z)), xp)
        out = scale * (gap + self._excess(z, xp))
        out = out + xp.where(lost, math.inf * xp.ones_like(out), xp.zeros_like(out))
        return poison(out, poisoned, xp)

    def constant(self, y: Array, xp: Namespace) -> Array:
        """0: the loss for a distribution y is the y-weighted mean of the losses of the classes, and no minimum is subtracted."""
        return xp.zeros_like(y[..., :1])

    def omega(self, q: Array, xp: Namespace) -> Array:
        raise TypeError("perturb_max: Omega has no closed form, it is the conjugate of expected_max(x); use loss(...)")

    # -- other ways to the same p ---------------------------------------------------------------------------------------

    def quantile_form(self, x: Array, nodes: int = 64) -> Array:
        """The mean of `prod_{j != i} F(x_i - x_j + eps)` over the noise's quantiles (q + 1/2) / nodes, in O(n^2 nodes).

        This is Su's formula, for comparison: its rows do not sum to 1, and for n = 1000 it needs thousands of nodes.
        """
        given = asarray(x)
        xp = namespace(given)
        x = floating(given, xp)
        z, keep, poisoned, _, _ = self._rows(upcast(x, xp), xp)
        out = xp.zeros_like(z)
        step = max(1, CHUNK // max(1, math.prod(z.shape) * z.shape[-1]))
        depth = [-math.log((q + 0.5) / nodes) for q in range(nodes)]
        for i in range(0, nodes, step):
            eps = self.law.level(constant(depth[i : i + step], z, xp), xp)
            eps = xp.reshape(eps, (-1,) + (1,) * z.ndim)
            v = z[..., :, None] - z[..., None, :] + eps[..., None]
            others = total(self.law.core(v, xp)[0], xp)[..., 0] - self.law.core(eps, xp)[0]
            out = out + xp.sum(xp.exp(others), axis=0)
        return xp.astype(finish(out / nodes, keep, poisoned, xp), x.dtype)

    def monte_carlo(self, x: Array, samples: int, generator: Any) -> Array:
        """The frequency of each argmax among `samples` samples; the standard error is sqrt(p (1 - p) / samples)."""
        given = asarray(x)
        xp = namespace(given)
        x = floating(given, xp)
        z, keep, poisoned, _, _ = self._rows(stop_gradient(upcast(x, xp)), xp)
        step = max(1, CHUNK // max(1, math.prod(z.shape)))
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
        """Independent noise of this shape (not multiplied by `scale`), with the kind, dtype and device of `like`, by the inverse cdf.

        `generator`: a numpy.random.Generator, a torch.Generator, a JAX key or a seed; None is the global generator of NumPy or torch.
        """
        return draw(self.noise, shape, like, generator)

    # -- rows -------------------------------------------------------------------------------------------------------------

    @property
    def _nodes(self) -> Nodes:
        return Nodes(self.law, self.nodes)

    @property
    def _quadrature(self) -> bool:
        return self.noise != "gumbel"  # G h_i du = softmax(x)_i dG: Gumbel needs no nodes

    def _rows(self, x: Array, xp: Namespace) -> tuple[Array, Array, Array, Array, Any]:
        """(z, keep, poisoned, high, scale): z is (x - high) / scale, with the maximum exactly 0 and masked entries at -_FAR."""
        y, keep, poisoned = finite_scores(x, xp)
        high = row_top(y, keep, xp)
        scale = like(self.scale, y, xp)
        empty = ~xp.any(keep, axis=-1, keepdims=True)  # a row of zeros is harmless, and `finish` clears it
        z = xp.where(keep | empty, (y - high) / scale, -_FAR * xp.ones_like(y))
        return xp.where(z > -_FAR, z, -_FAR * xp.ones_like(y)), keep, poisoned, high, scale

    def _mean(self, z: Array, xp: Namespace) -> Any:
        """E eps; for a `Noise` without `mean` by quadrature, as upper end - INT F du."""
        if self.law.mean is not None:
            return self.law.mean
        zero, nodes = xp.zeros_like(stop_gradient(z)[..., :1]), self._nodes
        if nodes.heavy:
            return self._integrated_mean(zero, xp)
        low, high = nodes.ends(zero, nodes.tail(zero), nodes.tail(zero), xp)
        rule = nodes.rule(zero, low, high, nodes.tail(zero), 2 * nodes.count(zero), xp)
        return high - xp.sum(rule.w * xp.exp(self.law.core(rule.u, xp)[0]), axis=0)

    def _integrated_mean(self, zero: Array, xp: Namespace) -> Array:
        """The mean INT v dF as an integral over y = logit F; an error if it does not converge."""
        nodes = self._nodes
        y, step = nodes.logits(zero, nodes.tail(zero), 2 * nodes.count(zero), xp)
        parts = self.law.level(softplus(-y, xp), xp) * xp.exp(-softplus(y, xp) - softplus(-y, xp))
        edge = xp.abs(parts[0]) + xp.abs(parts[-1])
        if known_any(edge > 1e-3 * (1.0 + xp.max(xp.abs(parts))), xp):
            raise TypeError(
                "perturb_max has no loss, because its noise has no mean: the integral does not converge; use anymax.nll with it "
                "instead, or give Noise(mean=...) if it has one"
            )
        return step * xp.sum(parts)

    # -- the integrals ------------------------------------------------------------------------------------------------------
    # Let d be the change of z: its value is 0, and derivatives go through it. If u moves with class i,
    # p_i = INT h_i exp(sum_j log F(u - z_j + d_i - d_j)) du. f itself is not differentiated, so its jumps are harmless.

    def _shares(self, z: Array, d: Array | None, xp: Namespace, held: Array | None = None, logs: bool = False) -> Array:
        nodes = self._nodes
        rule = nodes.deep(z, xp) if logs else nodes.bulk(z, xp, held)
        parts = []
        for c in nodes.sweep(z, rule, xp, d is not None):
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
            return out - _logsumexp(first(out, xp), xp)[..., None]
        out = sum(parts[1:], parts[0])
        out = xp.where(out > 0, out, xp.zeros_like(out))
        mass = total(out, xp)
        if isinstance(self.law, Noise):  # tests check the error of the others
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
        nodes = self._nodes
        for c in nodes.sweep(z, nodes.bulk(z, xp), xp, d is not None):
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
        """E max(z + eps) - E eps = INT F(u) - G(u) du >= 0, [..., 1]; the maximum of z is 0."""
        if not self._quadrature:
            return xp.log(total(xp.exp(z), xp))
        d, z = _change(z), stop_gradient(z)
        nodes = self._nodes
        tail = nodes.tail(z)
        out = xp.zeros_like(z[..., :1])
        low = self.law.level(constant([-math.log(tail)], z, xp), xp) + out
        rule = nodes.rule(z, low, nodes.ends(z, tail, tail, xp)[1], tail, 2 * nodes.count(z), xp)
        for c in nodes.sweep(z, rule, xp, d is not None):
            inside = c.log_f > -math.inf  # at a node that is rounded to the end of the support F and G are 0
            rest = xp.where(inside, c.log_g, xp.zeros_like(c.log_g)) - safe(c.log_f, inside, 0.0, xp)
            if d is not None:
                rest = rest + total(0.5 * c.h1 * d * d - c.h * d, xp)
            out = out - xp.sum(c.w * xp.exp(c.log_f) * xp.expm1(xp.where(rest < 0, rest, 0.0 * rest)), axis=0)
        return out


def _shift(c: Chunk, d: Array, xp: Namespace) -> Array:
    """`sum_j log F(v_j + d_i - d_j) - log F(v_j)` to second order, in O(n)."""
    first = d * total(c.h, xp) - total(c.h * d, xp)
    return first + 0.5 * (d * d * total(c.h1, xp) - 2.0 * d * total(c.h1 * d, xp) + total(c.h1 * d * d, xp))


def _change(z: Array) -> Array | None:
    """z minus z as a constant, which is 0 and has the derivatives of z; None if nothing will be differentiated."""
    return z - stop_gradient(z) if differentiates(z) else None


def _softmax(z: Array, xp: Namespace) -> Array:
    e = xp.exp(z)
    return e / total(e, xp)


def _logsumexp(a: Array, xp: Namespace) -> Array:
    """logsumexp over the first axis; -inf for a column of -inf."""
    high = stop_gradient(xp.max(a, axis=0))
    high = xp.where(high > -math.inf, high, xp.zeros_like(high))
    return high + log(xp.sum(xp.exp(a - high), axis=0), xp)
