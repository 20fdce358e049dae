"""The noises of Perturb Max: log F and the log of the reverse hazard h = f/F, accurate in both tails, in array-API code.

A law has its own coordinate v; `location` is added only to samples, since Perturb Max is shift-invariant. Its values are not
differentiated: the map has its derivatives in closed form, from h and h'.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from .._array import (
    Array,
    Namespace,
    device_of,
    in_blocks,
    is_double,
    is_torch,
    log,
    namespace,
    quiet,
    safe,
    takes_blocks,
)
from .generators import gumbel, in_parts, normal, uniform

_LOG2, _HALF_LOG_2PI, _ROOT_HALF = math.log(2.0), 0.5 * math.log(2.0 * math.pi), math.sqrt(0.5)

_WRONG_QUANTILE = "Noise: quantile must be finite and increase on (0, 1), and must accept NumPy arrays"

# (1 + 2w) erfcx(w) in powers of r = (w - 3.75) / (w + 3.75), w >= 0: a truncated Chebyshev series, fitted with 40 digits.
# Relative error 9e-16 in fp64 (24 terms), 3e-7 in fp32 (11 terms).
_ERFCX = {
    True: (
        1.2375126308378275, -0.14024059858554697, 0.0035854154854790257, 0.0822767384901452, -0.10880393014244462,
        0.09230432116037748, -0.05869339857664935, 0.028362277418956364, -0.009746579683265203, 0.001755625852895578,
        0.0002937143780446766, -0.0002901540805420362, 5.1646529742613335e-05, 2.2384239158309724e-05,
        -1.143804803494536e-05, -9.735599024300036e-07, 1.7419821605685549e-06, -5.721822408015812e-08,
        -2.4857126394415325e-07, 2.3263504032644517e-08, 3.197926733604639e-08, -3.744208176587683e-09,
        -2.623107459747668e-09, 3.11143001991097e-10,
    ),
    False: (
        1.2375125885009766, -0.1402430683374405, 0.0035862703807651997, 0.08232656866312027, -0.10881426930427551,
        0.09202113002538681, -0.05864685773849487, 0.029025573283433914, -0.009844494983553886, 0.00105959118809551,
        0.0003963076160289347,
    ),
}  # fmt: skip


def erfcx(w: Array, xp: Namespace) -> Array:
    """exp(w^2) erfc(w) for w >= 0."""
    r = (w - 3.75) / (w + 3.75)
    terms = _ERFCX[is_double(w)]
    total = terms[-1] * xp.ones_like(r)
    for term in terms[-2::-1]:
        total = total * r + term
    return total / (1.0 + 2.0 * w)


def log_sigmoids(v: Array, xp: Namespace) -> tuple[Array, Array]:
    """log of 1 / (1 + e^-v) and of 1 / (1 + e^v), each with its full relative precision."""
    near = xp.log1p(xp.exp(-xp.abs(v)))
    positive, zero = v > 0, xp.zeros_like(v)
    return xp.where(positive, zero, v) - near, xp.where(positive, -v, zero) - near


def constant(values: Any, like: Array, xp: Namespace) -> Array:
    """Numbers as an array of the kind, dtype and device of `like`."""
    return xp.asarray(values, dtype=like.dtype, **device_of(like))


class Law(ABC):
    """A noise for Perturb Max."""

    support: tuple[float, float] = (-math.inf, math.inf)
    mean: float | None = 0.0
    location: float = 0.0
    kinks: tuple[float, ...] = ()  # points inside the support where f bends

    @property
    def edges(self) -> tuple[float, ...]:
        """The lower end of the support and, if finite, the upper one; empty for the whole line."""
        lower, upper = self.support
        if lower == -math.inf and upper == math.inf:
            return ()
        return (lower,) if upper == math.inf else (lower, upper)

    @abstractmethod
    def core(self, v: Array, xp: Namespace) -> tuple[Array, Array]:
        """(log F, log h). Above the support h is the constant h(upper); the map cuts it off."""

    @abstractmethod
    def bend(self, v: Array, h: Array, xp: Namespace) -> Array:
        """h'."""

    @abstractmethod
    def level(self, depth: Array, xp: Namespace) -> Array:
        """The v with log F(v) = -depth < 0: the quantile, with full precision at either end."""


class Gumbel(Law):
    mean = 0.5772156649015329

    def core(self, v: Array, xp: Namespace) -> tuple[Array, Array]:
        v = xp.where(v > -80.0, v, -80.0 * xp.ones_like(v))
        return -xp.exp(-v), -v

    def bend(self, v: Array, h: Array, xp: Namespace) -> Array:
        return -h

    def level(self, depth: Array, xp: Namespace) -> Array:
        return -xp.log(depth)


class Normal(Law):
    def core(self, v: Array, xp: Namespace) -> tuple[Array, Array]:
        square = -0.5 * v * v
        half = 0.5 * erfcx(xp.abs(v) * _ROOT_HALF, xp)  # 1 - F(|v|) = half * exp(-v^2/2)
        below = v < 0
        log_half = xp.log(half)
        log_f = xp.where(below, log_half + square, xp.log1p(-half * xp.exp(square)))
        return log_f, xp.where(below, -log_half, square - log_f) - _HALF_LOG_2PI

    def bend(self, v: Array, h: Array, xp: Namespace) -> Array:
        return -h * (v + h)

    def level(self, depth: Array, xp: Namespace) -> Array:
        """A rational start (Hastings; 5e-4), then two steps of Halley's method on log F in the lower half."""
        upper = depth < _LOG2
        depth = xp.where(upper, -xp.log(-xp.expm1(-depth)), depth)
        r = xp.sqrt(2.0 * depth)
        v = (2.515517 + r * (0.802853 + r * 0.010328)) / (1.0 + r * (1.432788 + r * (0.189269 + r * 0.001308))) - r
        for _ in range(2):
            log_f, log_h = self.core(v, xp)
            h = xp.exp(log_h)
            step = (log_f + depth) / h
            v = v - step / (1.0 + 0.5 * step * (v + h))  # h'/h = -(v + h)
        return xp.where(upper, -v, v)


class Logistic(Law):
    def core(self, v: Array, xp: Namespace) -> tuple[Array, Array]:
        return log_sigmoids(v, xp)

    def bend(self, v: Array, h: Array, xp: Namespace) -> Array:
        return -h * (1.0 - h)

    def level(self, depth: Array, xp: Namespace) -> Array:
        return -depth - xp.log(-xp.expm1(-depth))


class Laplace(Law):
    kinks = (0.0,)

    def core(self, v: Array, xp: Namespace) -> tuple[Array, Array]:
        below = v < 0
        log_f = xp.where(below, v - _LOG2, xp.log1p(-0.5 * xp.exp(-xp.abs(v))))
        return log_f, xp.where(below, xp.zeros_like(v), -v - _LOG2 - log_f)

    def bend(self, v: Array, h: Array, xp: Namespace) -> Array:
        return xp.where(v < 0, xp.zeros_like(v), -h * (1.0 + h))

    def level(self, depth: Array, xp: Namespace) -> Array:
        return xp.where(depth > _LOG2, _LOG2 - depth, -xp.log(-2.0 * xp.expm1(-depth)))


class Exponential(Law):
    support = (0.0, math.inf)
    mean = 1.0

    def core(self, v: Array, xp: Namespace) -> tuple[Array, Array]:
        inside = v > 0
        v = safe(v, inside, 1.0, xp)
        small = v < 1.0
        log_f = xp.where(small, xp.log(-xp.expm1(-v)), xp.log1p(-xp.exp(-safe(v, ~small, 1.0, xp))))
        return xp.where(inside, log_f, -math.inf * xp.ones_like(v)), -v - log_f

    def bend(self, v: Array, h: Array, xp: Namespace) -> Array:
        return -h * (1.0 + h)

    def level(self, depth: Array, xp: Namespace) -> Array:
        deep = depth > _LOG2
        return xp.where(deep, -xp.log1p(-xp.exp(-safe(depth, deep, 1.0, xp))), -xp.log(-xp.expm1(-depth)))


class Uniform(Law):
    """Uniform on [0, 1], shifted to [-1, 0]: v has its full precision near the upper end, where the maximum lies."""

    support = (-1.0, 0.0)
    location = 1.0
    mean = 0.5

    def core(self, v: Array, xp: Namespace) -> tuple[Array, Array]:
        inside = v > -1.0
        log_f = xp.log1p(safe(xp.where(v < 0, v, xp.zeros_like(v)), inside, 0.0, xp))
        return xp.where(inside, log_f, -math.inf * xp.ones_like(v)), -log_f

    def bend(self, v: Array, h: Array, xp: Namespace) -> Array:
        return -h * h

    def level(self, depth: Array, xp: Namespace) -> Array:
        return xp.expm1(-depth)


NOISES: dict[str, Law] = {
    "gumbel": Gumbel(),
    "normal": Normal(),
    "logistic": Logistic(),
    "uniform": Uniform(),
    "laplace": Laplace(),
    "exponential": Exponential(),
}


@dataclasses.dataclass(frozen=True)
class Noise(Law):
    """A noise of your own for `PerturbMax`: `cdf` and `pdf`, or only `quantile`.

    Its tails may have any weight. The total variation error in fp64 is 1e-12 for Student's t with 3 degrees of freedom, and for Cauchy if
    the scores are a few units apart; it is up to 1e-7 for Cauchy with many scores that are hundreds apart. If the probabilities, before
    they are normalised, do not sum to 1 within 1e-3, an error suggests more `nodes`.
    The second derivatives of the map use a central difference of f/F: error about 1e-9 in fp64, 1e-3 in fp32.

    Parameters
    ----------
    cdf
        The distribution function F. Like the other functions it takes an array of the scores' kind, of any shape, and
        returns the same.
    pdf
        The density f.
    log_cdf
        log F, instead of `cdf` if the upper tail matters (1 - F below the rounding of 1).
    quantile
        The inverse of F, instead of the others; also called once with a NumPy array. F is then interpolated (monotone cubic
        in logit F, 8,193 knots), with an error of about 2e-8 for smooth densities.
    support
        The two ends of the noise; `pdf` must be finite there, and is the limit from inside.
    mean
        E[eps]; None to integrate it; `math.inf` or NaN if it does not exist, and then there is no loss.
    kinks
        The points between the ends where `pdf` jumps or bends.

    Examples
    --------
    >>> import numpy as np
    >>> cauchy = anymax.Noise(quantile=lambda q: np.tan(np.pi * (q - 0.5)), mean=math.nan)
    >>> anymax.perturb_max([2.0, 1.0, -1.0], noise=cauchy).round(3)
    array([0.583, 0.311, 0.106])
    """

    cdf: Callable[[Array], Array] | None = None
    pdf: Callable[[Array], Array] | None = None
    log_cdf: Callable[[Array], Array] | None = None
    quantile: Callable[[Array], Array] | None = None
    support: tuple[float, float] = (-math.inf, math.inf)
    mean: float | None = None
    kinks: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for field in ("cdf", "pdf", "log_cdf", "quantile"):
            f = getattr(self, field)
            if f is not None and not callable(f):
                raise TypeError(f"Noise({field}={f!r}): expected a function of an array")
        has_cdf = self.cdf is not None or self.log_cdf is not None
        if (self.pdf is None) == has_cdf or not (has_cdf or self.quantile is not None):
            given = [f for f in ("cdf", "pdf", "log_cdf", "quantile") if getattr(self, f) is not None]
            raise TypeError(
                f"Noise: give both cdf (or log_cdf) and pdf, or only quantile; got {given or 'none of them'}"
            )
        object.__setattr__(self, "support", tuple(map(float, self.support)))  # a list could not be hashed
        object.__setattr__(self, "kinks", tuple(map(float, self.kinks)))
        lower, upper = self.support
        if not lower < upper:
            raise ValueError(f"Noise: support must be (lower, upper) with lower < upper, got {self.support!r}")
        object.__setattr__(self, "kinks", tuple(float(k) for k in self.kinks if lower < k < upper))

    def core(self, v: Array, xp: Namespace) -> tuple[Array, Array]:
        lower, upper = self.support
        inside = v > lower
        v = xp.where(v < upper, v, min(upper, 1e300) * xp.ones_like(v)) if upper < math.inf else v
        v = safe(v, inside, self._inner, xp)
        if self.pdf is None:
            log_f, log_h = self._from_table(v, xp)
        else:
            with quiet(v):
                f = self.pdf(v)
                log_f = self.log_cdf(v) if self.log_cdf is not None else log(self.cdf(v), xp)  # type: ignore[misc]
            floor = math.log(float(xp.finfo(v.dtype).smallest_normal))
            log_h = log(f, xp) - xp.where(log_f > floor, log_f, floor * xp.ones_like(v))
        return xp.where(inside, log_f, -math.inf * xp.ones_like(v)), log_h

    @property
    def _inner(self) -> float:
        lower, upper = self.support
        if lower == -math.inf:
            return min(upper, 1.0) - 1.0
        return lower + (1.0 if upper == math.inf else 0.5 * (upper - lower))

    def bend(self, v: Array, h: Array, xp: Namespace) -> Array:
        size = float(xp.finfo(v.dtype).eps) ** (1.0 / 3.0)
        lower, upper = self.support
        ends = [xp.where((s > lower) & (s < upper), s, v) for s in (v + size, v - size)]
        rise = xp.exp(self.core(ends[0], xp)[1]) - xp.exp(self.core(ends[1], xp)[1])
        run = ends[0] - ends[1]
        return xp.where(run > 0, rise / safe(run, run > 0, 1.0, xp), xp.zeros_like(v))

    def level(self, depth: Array, xp: Namespace) -> Array:
        if self.quantile is not None:  # it may be infinite at 1
            below = 1.0 - 0.5 * float(xp.finfo(depth.dtype).eps)
            q = xp.exp(-depth)
            v = self.quantile(xp.where(q < below, q, below * xp.ones_like(q)))
            if np.shape(v) != np.shape(q):
                raise ValueError(_WRONG_QUANTILE)
            return v
        lower, upper = self.support  # bisection in asinh(v), which covers every scale
        ends = (math.asinh(max(lower, -1e12)), math.asinh(min(upper, 1e12)))
        low, high = (end * xp.ones_like(depth) for end in ends)
        for _ in range(60 if is_double(depth) else 32):
            middle = 0.5 * (low + high)
            under = self.core(xp.sinh(middle), xp)[0] <= -depth
            low, high = xp.where(under, middle, low), xp.where(under, high, middle)
        return xp.sinh(0.5 * (low + high))

    def _from_table(self, v: Array, xp: Namespace) -> tuple[Array, Array]:
        knots, values, slopes = (constant(a, v, xp) for a in _table(self.quantile))
        flat = xp.reshape(v, (-1,))
        last = knots.shape[0] - 1
        k = xp.clip(xp.searchsorted(knots, flat) - 1, 0, last - 1)
        x0, x1, y0, y1, m0, m1 = (xp.take(a, i, axis=0) for a in (knots, values, slopes) for i in (k, k + 1))
        width = x1 - x0
        t = (flat - x0) / width
        s = xp.clip(t, 0.0, 1.0)
        a, b = m0 * width - (y1 - y0), (y1 - y0) - m1 * width
        y = y0 + s * (y1 - y0) + s * (1.0 - s) * (a * (1.0 - s) + b * s)
        slope = ((y1 - y0) + (1.0 - 2.0 * s) * (a * (1.0 - s) + b * s) + s * (1.0 - s) * (b - a)) / width
        y = xp.reshape(y + (t - s) * width * slope, v.shape)  # a straight line beyond the table: exponential tails
        log_f, log_above = log_sigmoids(y, xp)
        return log_f, log_above + log(xp.reshape(slope, v.shape), xp)  # f = F (1 - F) dy/dv


@functools.lru_cache(maxsize=32)
def _table(quantile: Callable[[Array], Array]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Knots v, logit F(v) and its slopes, by Fritsch and Carlson's rule, which keeps F increasing."""
    y = np.linspace(-34.0, 34.0, 8193)
    t = 1.0 / (1.0 + np.exp(-y))
    with quiet(t):
        v = np.asarray(quantile(t), dtype=np.float64)
    v = v if v.shape == t.shape else np.full_like(t, np.nan)
    good = np.isfinite(v)
    v, y = v[good], y[good]
    # the logit near t = 1 is only as good as 1 - t, and equal quantiles would be a jump: keep knots that are well apart
    noise = np.finfo(np.float64).eps * (1.0 + np.exp(np.clip(y, None, 36.0))) * 64.0
    keep, last = [0], 0
    for i in range(1, v.shape[0]):
        if v[i] - v[last] > 1e-9 * (1.0 + abs(v[i])) and noise[i] < 0.5:
            keep.append(i)
            last = i
    if len(keep) < 2 or np.any(np.diff(v) < 0):
        raise ValueError(_WRONG_QUANTILE)
    v, y = v[keep], y[keep]
    width, secant = np.diff(v), np.diff(y) / np.diff(v)
    slopes = np.empty_like(v)
    slopes[0], slopes[-1] = secant[0], secant[-1]
    w1, w2 = 2.0 * width[1:] + width[:-1], width[1:] + 2.0 * width[:-1]
    slopes[1:-1] = (w1 + w2) / (w1 / secant[:-1] + w2 / secant[1:])
    return v, y, slopes


def find(noise: Any) -> Law:
    """The law of this name, or the user's `Noise`."""
    if isinstance(noise, Noise):
        return noise
    if not isinstance(noise, str):
        raise TypeError(f"noise: expected a name or a Noise(...), got {type(noise).__name__}")
    if noise not in NOISES:
        raise ValueError(f"noise {noise!r} is unknown; use one of {', '.join(NOISES)}, or a Noise(...) of your own")
    return NOISES[noise]


def draw(noise: Any, shape: tuple[int, ...], like: Array, generator: Any) -> Array:
    """Independent noises of that shape, of the kind, dtype (fp32 or fp64) and device of `like`; by the inverse cdf, except normal ones."""
    law = find(noise)
    if isinstance(law, Normal):
        return normal(shape, like, generator)
    if isinstance(law, Gumbel) and (drawn := gumbel(shape, like, generator)) is not None:
        return drawn
    xp = namespace(like)
    u = uniform(shape, like, generator)  # the mass above, precise near 0: the upper tail decides a maximum
    return law.level(-xp.log1p(-u), xp) + law.location


def with_noise(
    function: Callable[..., Array], noise: Any, x: Array, size: int, generator: Any, *others: Array
) -> Array:
    """`function(x, noises, *others)` with `size` noises for each row of x, as `draw` has them; some rows at a time where x takes blocks."""
    lead = tuple(x.shape[:-1])
    if not takes_blocks(x, *others):
        return function(x, draw(noise, (*lead, size), x, generator), *others)
    if isinstance(find(noise), Normal) and is_torch(x):  # its numbers depend on how many follow
        return in_blocks(function, x, draw(noise, (*lead, size), x, generator), *others)
    sources = in_parts(generator, x, math.prod(lead))

    def of_block(rows: Array, *others: Array) -> Array:
        return function(rows, draw(noise, (rows.shape[0], size), rows, sources(rows.shape[0])), *others)

    return in_blocks(of_block, x, *others)
