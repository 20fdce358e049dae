"""Taylor softmax: softmax with a Taylor polynomial instead of exp."""

from __future__ import annotations

import dataclasses
import math

from .._array import Array, Namespace, check_integer, stop_gradient, top
from .._core.facts import Facts
from .._core.ratio_map import RatioMap


@dataclasses.dataclass(frozen=True, eq=False)
class Taylor(RatioMap):
    """Taylor softmax: p_i in proportion to `f(x_i)`, f the Taylor polynomial of exp, `1 + x + x^2/2` for order 2.

    Use it for long tails, which are polynomial instead of exponential. It is neither monotone (for order 2, f decreases below x = -1)
    nor shift-invariant, so the maximum must not be subtracted; scaling by the row's largest |x| keeps the result finite. It has no
    Fenchel-Young loss; train with `taylor_softmax_loss`, -log p_t. de Brebisson and Vincent 2015.

    Parameters
    ----------
    order
        The degree of the polynomial, an even number from 2 to 170: only these are positive everywhere.

    Examples
    --------
    >>> anymax.apply(anymax.Taylor(order=2), [1.0, 0.0]).round(4)
    array([0.7143, 0.2857])
    """

    order: int = 2

    name = "taylor"
    formula = "pᵢ ∝ 1 + xᵢ + xᵢ²/2 (+ …, even order)"
    kernel = "taylor"

    def __post_init__(self) -> None:
        k = check_integer("Taylor", "order", self.order, "an even integer such as 2 or 4")
        object.__setattr__(self, "order", k)
        if k > 170:
            raise ValueError(
                f"Taylor(order={k}): the order must be at most 170, the last whose coefficient 1 / order! is a normal number; such "
                "polynomials are exp to rounding near 0: use Softmax()"
            )
        if k < 2 or k % 2:
            raise ValueError(
                f"Taylor(order={k}): the order must be even and at least 2, because only the even Taylor polynomials of exp "
                f"are positive everywhere; use {'2' if k < 3 else f'{k - 1} or {k + 1}'}"
            )

    @property
    def facts(self) -> Facts:
        return Facts(monotone=False, shift_invariant=False, sparse=False, has_potential=False)

    def weights(self, x: Array, keep: Array, xp: Namespace) -> tuple[Array, Array]:
        """`f_k(x) / M^k` and its derivative, M = max(1, max |x| / 4), by Horner's rule in x / M and 1 / M, which is not subnormal."""
        size = 0.25 * stop_gradient(top(xp.abs(xp.where(keep, x, xp.zeros_like(x))), xp))
        m = xp.where(size > 1, size, xp.ones_like(size))
        v, s = x / m, 1.0 / m
        return _horner(v, s, self.order, xp), _horner(v, s, self.order - 1, xp) * s


def _horner(v: Array, s: Array, order: int, xp: Namespace) -> Array:
    """`sum_{j <= order} v^j s^(order-j) / j!`; for even orders clipped at 0, since rounding could make it negative."""
    out = xp.ones_like(v) / math.factorial(order)
    scale = s
    for j in range(order - 1, -1, -1):
        out = out * v + scale / math.factorial(j)
        scale = scale * s
    return xp.where(out > 0, out, xp.zeros_like(out)) if order % 2 == 0 else out
