"""`OverProcesses`: what `anymax.distributed` asks of a map whose classes lie on several processes."""

from __future__ import annotations

from typing import Any, ClassVar

from .._array import Array, Namespace


class OverProcesses:
    """A part of `Mapping`. The defaults are right for every map, whose classes are then gathered; better values reduce communication."""

    __slots__ = ()

    name: ClassVar[str]
    zeros_stay: bool = False  # True if p_i = 0 stays 0 when classes are added
    zero_below_threshold: bool = False  # True if p_i > 0 exactly where x_i > `threshold`
    # in a row of at most this many classes each p_i is its upper bound, and `threshold` is not unique
    full_up_to: Any = 0.0
    nucleus: Any = None  # if p is softmax over a nucleus: the softmax mass of the nucleus
    # the parameters of `learns` for which `param_jvp` takes `totals` and is otherwise computed class by class
    learns_by_sums: tuple[str, ...] = ()
    by_weights: bool = False  # True if p is `weights` divided by their sum, as `RatioMap` has it
    each_alone: bool = False  # True if p_i and its term of the loss depend on x_i alone
    # True if `loss` is `Omega*(x) - <x, y>` plus a term in y, so that it needs all of y
    loss_of_whole_target: bool = False

    def exponents(self, x: Array, xp: Namespace) -> Array | None:
        """a(x) with p = softmax(a), -inf where masked; None if there is no such a, or if it is the scores themselves."""
        return None

    def constant_terms(self, y: Array, xp: Namespace) -> list[Array] | None:
        """The numbers [..., 1] that each process contributes to `constant_of`; None if `constant` needs all of y."""
        return None

    def constant_of(self, terms: list[Array], xp: Namespace) -> Array:
        """`constant` of all classes, from the terms of all processes, each [processes, ..., 1]."""
        raise TypeError(f"{self.name} has no constant_terms")
