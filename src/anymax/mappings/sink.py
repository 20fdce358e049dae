"""Sink: another map with one class more, whose probability is not given."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from .._array import (
    AT_LEAST_0,
    Array,
    Namespace,
    Range,
    Ranges,
    as_dtype,
    is_array,
    nan_outside,
    without_autocast,
)
from .._core.facts import Facts
from .._core.mapping import Hidden, Mapping, with_missing_mass
from .._core.names import as_mapping
from .._core.of_another import OfAnother
from .._core.parameters import check_ranges
from .._core.rows import Rows
from .._core.typing import LossKind, Parameter
from .bounded import Bounded

_SCORE = Range(-math.inf, math.inf, "low")  # -inf: no sink


class _Hidden(Hidden):
    def over_all(self, mapping: Sink) -> Mapping:
        return mapping.inner

    def join(self, mapping: Sink, x: Array, xp: Namespace) -> tuple[Mapping, Array]:
        score = mapping.score if is_array(mapping.score) else mapping.score + xp.zeros_like(x[..., :1])
        score = xp.broadcast_to(as_dtype(score, x.dtype, xp), (*x.shape[:-1], 1))
        with without_autocast(x):  # which has no rule for arrays of fp16 beside bf16
            return mapping.of_all(x, nan_outside(mapping.bound, AT_LEAST_0), xp), xp.concat([x, score], axis=-1)


_HIDDEN = _Hidden()


@dataclasses.dataclass(frozen=True, eq=False)
class Sink(OfAnother):
    """Another map with one class more, a sink, whose probability is not given: the others sum to less than 1 where no score is high.

    Use it for "none of these", as an output or in attention: with softmax and a score of 0 it is softmax-one, `exp(x_i) / (1 + sum_j
    exp(x_j))`; with a learned score for each head it is the attention sink of gpt-oss. In a loss, the class index -1 is the sink; a draw
    of the sink is -1, too.

    Parameters
    ----------
    mapping
        The map of the classes and the sink, or its name; its probabilities must sum to the same number in every row.
    score
        The score of the sink, a number or an array that broadcasts to the scores with size 1 along the classes; a tensor may
        be learned. -inf stands for no sink.
    bound
        The most that the sink may get, for a `Bounded` map: a number or an array as the score is. By default it is the bound of
        all classes, and where each class has its own the sink has none.

    Examples
    --------
    >>> anymax.apply(anymax.Sink(), [0.0, -1.0, -2.0]).round(3)
    array([0.399, 0.147, 0.054])
    >>> anymax.apply(anymax.Sink("sparsemax", score=1.0), [[0.5, -1.0], [-1.0, -2.0]])
    array([[0.25, 0.  ],
           [0.  , 0.  ]])
    >>> anymax.sample(anymax.Sink(score=9.0), [0.0, -1.0], generator=0)
    np.int64(-1)
    """

    mapping: Mapping | str = "softmax"
    score: Parameter = 0.0
    bound: Parameter | None = None

    name = "sink"
    formula = "pᵢ = P(x₁, …, xₙ, s)ᵢ for a map P"
    hidden: ClassVar[Hidden] = _HIDDEN
    own_ranges: ClassVar[Ranges] = {"score": _SCORE, "bound": AT_LEAST_0}

    def __post_init__(self) -> None:
        inner = as_mapping(self.mapping, "Sink")
        lowest, highest = inner.sums(None, None)
        if lowest is not highest:
            raise ValueError(
                f"Sink(mapping={inner!r}): the probabilities of the inner map must sum to the same number in every row, and these sum to "
                f"{lowest:g} to {highest:g}; nest no sinks"
            )
        object.__setattr__(self, "mapping", inner)
        check_ranges(self, "the score of the class that is not given", "score")
        if self.bound is not None:
            if not isinstance(inner, Bounded):
                raise TypeError(
                    f"Sink(mapping={inner!r}, bound=...): only a map with upper bounds, such as Bounded(0.5), takes a bound of the sink"
                )
            check_ranges(self, "the most that the sink may get", "bound")

    def of_all(self, x: Array, bound: Any, xp: Namespace) -> Mapping:
        """The map of rows like x with the sink as one class more, the last. bound: its upper bound, or None."""
        inner = self.inner
        if isinstance(inner, Bounded):
            return inner.with_a_class(x, bound, xp)
        for name in inner.per_class:
            value: Any = getattr(inner, name)
            if is_array(value) and value.ndim and value.shape[-1] != 1:
                raise TypeError(
                    f"Sink(mapping={inner.name}): {name} has one value for each class, and the sink has none; "
                    "give one value for all classes"
                )
        return inner

    @property
    def facts(self) -> Facts:
        return dataclasses.replace(self.inner.facts, shift_invariant=False, margin=None)

    def check(self, n: int) -> None:
        self.inner.check(n + 1)

    # -- sums --------------------------------------------------------------------------------------------------------------

    @property
    def own_loss(self) -> LossKind:
        return self.inner.own_loss

    def sums(self, keep: Array | None, xp: Namespace) -> tuple[Any, Any]:
        """The sink takes at most its upper bound of the sum."""
        _, most = self.inner.sums(None, xp)
        bound = None if keep is None else self._ceiling_of_sink(keep, xp)
        if bound is None:
            return 0.0, most
        rest = most - bound
        return (xp.where(rest > 0, rest, xp.zeros_like(rest)) if is_array(rest) else max(0.0, rest)), most

    def _ceiling_of_sink(self, keep: Array, xp: Namespace) -> Any:
        like = xp.astype(keep, xp.result_type(xp.asarray(0.0).dtype, *(v.dtype for v in self.params().values())))
        most = self.of_all(like, self.bound, xp).ceiling(xp.concat([like, like[..., :1]], axis=-1), xp)
        return most[..., -1:] if is_array(most) and most.ndim else most

    @property
    def sums_to_one(self) -> bool:
        return False

    @property
    def least_classes(self) -> int:
        return max(1, self.inner.least_classes - 1)

    def ceiling(self, x: Array, xp: Namespace) -> Any:
        return self.inner.ceiling(x, xp)

    # -- the contract, by the wider rows -------------------------------------------------------------------------------------

    @property
    def traced(self) -> bool:  # type: ignore[override]
        return self.inner.traced

    @property
    def iterative(self) -> bool:  # type: ignore[override]
        return self.inner.iterative

    def _over_all(self, x: Array) -> Rows:
        return Rows(x, x, self, x.ndim - 1).over_all()

    def forward(self, x: Array, xp: Namespace) -> Array:
        call = self._over_all(x)
        return call.seen(call.mapping.forward(call.rows, xp))

    def log_forward(self, x: Array, xp: Namespace) -> Array | None:
        call = self._over_all(x)
        log_p = call.mapping.log_forward(call.rows, xp)
        return None if log_p is None else call.seen(log_p)

    def hold(self, x: Array, xp: Namespace) -> Array:
        call = self._over_all(x)
        return call.mapping.hold(call.rows, xp)

    def differentiable(self, x: Array, xp: Namespace, held: Array | None = None) -> Array:
        call = self._over_all(x)
        return call.seen(call.mapping.differentiable(call.rows, xp, held))

    def _product(self, transposed: bool, x: Array, g: Array, xp: Namespace) -> Array:
        call = self._over_all(x)
        g = xp.concat([g, xp.zeros_like(g[..., :1])], axis=-1)
        # the sink's p, which is exactly 0 off the support, is no difference of sums
        p = call.mapping.differentiable(call.rows, xp)
        product = call.mapping.vjp if transposed else call.mapping.jvp
        return call.seen(product(call.rows, p, g, xp))

    def vjp(self, x: Array, p: Array, g: Array, xp: Namespace) -> Array:
        return self._product(True, x, g, xp)

    def jvp(self, x: Array, p: Array, v: Array, xp: Namespace) -> Array:
        return self._product(False, x, v, xp)

    @property
    def has_threshold(self) -> bool:
        return self.inner.has_threshold

    def threshold(self, x: Array, xp: Namespace) -> Array:
        call = self._over_all(x)
        return call.mapping.threshold(call.rows, xp)

    # -- the loss ------------------------------------------------------------------------------------------------------------

    def with_sink(self, q: Array, xp: Namespace) -> Array:
        """q with the probability of the sink as the last class."""
        return with_missing_mass(q, self.inner.sums(None, xp)[1], xp)

    def omega(self, q: Array, xp: Namespace) -> Array:
        return self.inner.omega(self.with_sink(q, xp), xp)

    def loss(self, x: Array, p: Array, y: Array, xp: Namespace) -> Array:
        call = self._over_all(x)
        p = call.mapping.differentiable(call.rows, xp)
        return call.mapping.loss(call.rows, p, self.with_sink(y, xp), xp)

    def constant(self, y: Array, xp: Namespace) -> Array:
        return self.inner.constant(self.with_sink(y, xp), xp)

    def no_constant(self, smoothed: bool) -> str | None:
        return self.inner.no_constant(smoothed)
