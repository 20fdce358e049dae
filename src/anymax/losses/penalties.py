"""What an output layer adds to the loss of each row: tau squared, and the second loss of Sparsemax+, which lowers the scores of the
classes to which a sparse map gives probability 0."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from .._array import Array, check_scalar, device_of, is_integer, namespace, stop_gradient, take
from .._core.mapping import Mapping, no_threshold
from .._core.rows import hide
from ..autodiff import bridge
from ..thresholds import logsumexp

LogSums = tuple[Array, Array, Array]
"""The score of the target of each row, and logsumexp of all classes and of those that have a probability or are the target."""


class RowPenalties(NamedTuple):
    """The factors; false if all are 0."""

    z_loss: float = 0.0
    suppress: float = 0.0

    def __bool__(self) -> bool:
        return any(self)

    @classmethod
    def read(cls, who: str, mapping: Mapping, hides: bool, z_loss: Any, suppress: Any) -> RowPenalties:
        """The factors, checked. hides: the caller's map hides one of the classes of this map."""
        if type(z_loss) is type(suppress) is float and not z_loss and not suppress:
            return NO_PENALTIES
        out = cls(
            *(
                float(
                    check_scalar(f"{who}: {name}", value, lambda v: 0 <= v < math.inf, "a finite number of at least 0")
                )
                for name, value in zip(cls._fields, (z_loss, suppress))
            )
        )
        if out.z_loss and not mapping.has_threshold:
            raise ValueError(f"{who}: z_loss= is the factor of tau squared, and {no_threshold(mapping)}")
        if out.suppress and not mapping.facts.sparse:
            raise ValueError(
                f"{who}: suppress= applies to maps that give classes probability 0, such as sparsemax; leave it out with {mapping!r}"
            )
        if out.suppress and hides:
            raise ValueError(
                f"{who}: suppress= lowers the scores of classes with probability 0, and the sink is none of them; leave one of the two out"
            )
        return out

    def need_indices(self, who: str, target: Array) -> None:
        """Refuse `suppress` with a target that has no class indices."""
        if self.suppress and not is_integer(target):
            raise TypeError(f"{who}: target: suppress= needs class indices of an integer dtype, got {target.dtype}")

    def of(self, none: Any, tau: Callable[[], Array], log_sums: Callable[[], LogSums] | None = None) -> Array:
        """Their sum for each row, 0 where `none` is True. tau: may be -inf in a row without classes. log_sums: needed for `suppress`."""
        penalty: Any = 0.0
        if self.z_loss:
            t = tau()
            xp = namespace(t)
            t = xp.where(none | (t == -math.inf), xp.zeros_like(t), t)
            penalty = self.z_loss * t * t
        if self.suppress:
            assert log_sums is not None
            score, whole, kept = log_sums()
            xp = namespace(score)
            share = xp.exp(stop_gradient(score - whole))
            value = (1.0 - share) * (whole - kept)
            penalty = penalty + self.suppress * xp.where(none, xp.zeros_like(value), value)
        return penalty


NO_PENALTIES = RowPenalties()


def log_sums(mapping: Mapping, s: Array, target: Array) -> LogSums:
    """Those of scores [rows, n] in fp32 or fp64, for class indices [rows]; the last two are equal in a row without classes."""
    xp = namespace(s)
    index = xp.where(target < 0, xp.zeros_like(target), target)[:, None]
    lost = xp.all(s == -math.inf, axis=-1, keepdims=True)  # the derivative of logsumexp is not a number there
    s = xp.where(lost, xp.zeros_like(s), s)
    p = bridge(s).apply(mapping, stop_gradient(s))
    places = xp.arange(s.shape[-1], dtype=index.dtype, **device_of(s))
    counts = (stop_gradient(p) != 0) | (places == index)  # NaN counts, so that it stays
    return take(s, index, xp)[:, 0], logsumexp(s), logsumexp(hide(s, counts | lost))
