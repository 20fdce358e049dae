"""Ratio: the map of any non-negative function, normalised."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from .._array import Array, Namespace, known_any, namespace, stop_gradient, top
from .._core.facts import Facts
from .._core.mapping import Mapping, row_top
from .._core.ratio_map import RatioMap


@dataclasses.dataclass(frozen=True, eq=False)
class Ratio(RatioMap):
    """Ratio: `p_i = u(x_i) / sum_j u(x_j)` for your own function u >= 0.

    Use it to try another function instead of exp. `Ratio.square()` (x^2), `Ratio.sigmoid()`, `Ratio.relu()` and
    `Ratio.stablemax()` are predefined. It is not shift-invariant; train with `nll`, since it has no Fenchel-Young loss. A row in
    which every u is 0 gives zeros.

    Parameters
    ----------
    u
        A function that takes an array of scores, of the caller's framework, and returns one number of at least 0 for each.
    du
        Its derivative, in the same form. Without it torch and JAX differentiate through u itself, and NumPy arrays have no
        derivative.
    monotone
        True if u grows with x; `facts` then says that the map is monotone.
    sparse
        True if u can be 0; `facts` then says that the map gives exact zeros.

    Examples
    --------
    >>> anymax.apply(anymax.Ratio(lambda x: x**4, lambda x: 4 * x**3), [1.0, 2.0, -2.0]).round(3)
    array([0.03 , 0.485, 0.485])
    """

    u: Callable[[Array], Array]
    du: Callable[[Array], Array] | None = None
    monotone: bool = False
    sparse: bool = False

    name = "ratio"
    formula = "pᵢ ∝ u(xᵢ), any u ≥ 0"

    def __post_init__(self) -> None:
        for field, f in (("u", self.u), ("du", self.du)):
            if (not callable(f) or isinstance(f, Mapping)) and not (field == "du" and f is None):
                raise TypeError(f"Ratio({field}={f!r}): expected a function of an array of scores")
        if type(self) is Ratio and self.u is _relu and self.du is _drelu:
            object.__setattr__(self, "kernel", "relu")

    @property
    def facts(self) -> Facts:
        return Facts(monotone=self.monotone, shift_invariant=False, sparse=self.sparse, has_potential=False)

    @property
    def traced(self) -> bool:
        """True if the derivative comes from automatic differentiation alone."""
        return self.du is None

    def weights(self, x: Array, keep: Array, xp: Namespace) -> tuple[Array, Array]:
        u = self.u(x)
        if getattr(u, "shape", None) != x.shape:
            raise ValueError(
                f"Ratio: u must return one value for each score; scores of shape {tuple(x.shape)} "
                f"gave {getattr(u, 'shape', type(u).__name__)}"
            )
        if known_any(keep & (u < 0), xp):
            raise ValueError("Ratio: u returned a negative value; p = u / sum(u) needs u(x) >= 0 for every score")
        high = row_top(stop_gradient(u), keep, xp)
        scale = xp.where(high > 0, high, xp.ones_like(high))  # the sum of large weights must not overflow
        return u / scale, xp.zeros_like(x) if self.du is None else self.du(x) / scale

    def vjp(self, x: Array, p: Array, g: Array, xp: Namespace) -> Array:
        self._need_du()
        return super().vjp(x, p, g, xp)

    def jvp(self, x: Array, p: Array, v: Array, xp: Namespace) -> Array:
        self._need_du()
        return super().jvp(x, p, v, xp)

    def _need_du(self) -> None:
        if self.du is None:
            raise TypeError("Ratio: a derivative was asked for, but du was not given; use Ratio(u, du)")

    @classmethod
    def square(cls) -> Ratio:
        """u = x^2."""
        return cls(_square, _dsquare, sparse=True)

    @classmethod
    def sigmoid(cls) -> Ratio:
        """u = 1 / (1 + exp(-x)); monotone."""
        return cls(_sigmoid, _dsigmoid, monotone=True)

    @classmethod
    def relu(cls) -> Ratio:
        """u = max(x, 0); monotone. A row without positive scores gives zeros."""
        return cls(_relu, _drelu, monotone=True, sparse=True)

    @classmethod
    def stablemax(cls) -> Ratio:
        """u = x + 1 above 0, 1 / (1 - x) below; monotone. It grows no faster than x, so that confident rows keep a gradient."""
        return cls(_stablemax, _dstablemax, monotone=True)


def _size(x: Array) -> Array:
    """About the largest |x| of the row, 1 for a row of zeros. (x / size)^2 gives the same p and does not overflow."""
    xp = namespace(x)
    size = stop_gradient(top(xp.abs(x), xp))
    size = xp.where(size > 1, 0.25 * size, size)  # XLA multiplies by 1 / size, which must not be subnormal
    return xp.where(size > 0, size, xp.ones_like(size))


def _square(x: Array) -> Array:
    v = x / _size(x)
    return v * v


def _dsquare(x: Array) -> Array:
    size = _size(x)
    return 2.0 * (x / size) / size


def _sigmoid(x: Array) -> Array:
    xp = namespace(x)
    e = xp.exp(-xp.abs(x))  # (1 + tanh(x/2)) / 2 would lose the small values
    return xp.where(x < 0, e, xp.ones_like(e)) / (1.0 + e)


def _dsigmoid(x: Array) -> Array:
    e = namespace(x).exp(-namespace(x).abs(x))
    return e / ((1.0 + e) * (1.0 + e))


def _stablemax(x: Array) -> Array:
    xp = namespace(x)
    size = 1.0 + xp.abs(x)
    return xp.where(x < 0, 1.0 / size, size)


def _dstablemax(x: Array) -> Array:
    xp = namespace(x)
    size = 1.0 + xp.abs(x)
    return xp.where(x < 0, 1.0 / size / size, xp.ones_like(x))


def _relu(x: Array) -> Array:
    xp = namespace(x)
    return xp.where(x > 0, x, xp.zeros_like(x))


def _drelu(x: Array) -> Array:
    return namespace(x).astype(x > 0, x.dtype)
