"""`Parts`: what follows from parts of a row, for classes that lie on several processes or come in blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .._array import Array, Namespace


class PartedConstant(NamedTuple):
    """How the `constant` of a map follows from numbers of each part of the classes: two functions of (map, ..., xp)."""

    terms: Callable[[Any, Array, Namespace], list[Array]]  # of the target's part: the numbers, each [..., 1]
    of: Callable[[Any, list[Array], Namespace], Any]  # `constant` from the terms of all parts, each [parts, ..., 1]


SUMMED = PartedConstant(lambda m, y, xp: [m.constant(y, xp)], lambda m, terms, xp: xp.sum(terms[0], axis=0))


class Parts(NamedTuple):
    """The defaults are right for every map, whose classes are then gathered; better values reduce communication."""

    zeros_stay: bool = False  # True if p_i = 0 stays 0 when classes are added
    zero_below_threshold: bool = False  # True if p_i > 0 exactly where x_i > `threshold`
    # in a row of at most this many classes each p_i is its upper bound, and `threshold` is not unique
    full_up_to: Any = 0.0
    most_kept: int | None = None  # only so many classes, those with the largest scores, have p > 0
    nucleus: Any = None  # if p is softmax over a nucleus: the softmax mass of the nucleus
    by_weights: bool = False  # True if p is `weights` divided by their sum, as `RatioMap` has it
    each_alone: bool = False  # True if p_i and its term of the loss depend on x_i alone
    temperature: Any = None  # T, a number or an array, if p is `softmax(x / T)`
    # (x, xp): a(x) with p = softmax(a), -inf where masked, if there is such an a that is no multiple of x
    exponents: Callable[[Array, Namespace], Array] | None = None
    # the parameters of `learns` for which `param_jvp` takes `totals` and is otherwise computed class by class
    learns_by_sums: tuple[str, ...] = ()
    # True if `loss` is `Omega*(x) - <x, y>` plus a term in y, so that it needs all of y
    loss_of_whole_target: bool = False
    constant: PartedConstant | None = None  # None if `constant` needs all of y
