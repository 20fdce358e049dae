"""The contract of a map: `Mapping`. `Separable` and `RatioMap`, in their own files, implement most of it for two families.

A mapping is frozen data. Its methods work on rows: the classes are the last axis, the dtype is the one to compute in, -inf
marks a masked entry. The verbs take care of axes, masks, dtypes, frameworks and engines.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from .._array import (
    Array,
    Namespace,
    Ranges,
    check_number,
    compiling,
    differentiates,
    dot,
    finite_scores,
    is_array,
    is_number,
    poison,
    rows_out_of_range,
    stop_gradient,
    top,
    total,
    unchecked,
)
from .facts import Facts
from .options import check_fields
from .over_processes import OverProcesses
from .providers import providers
from .typing import ApplyOptions, ArrayT, Axes, Draw, LossKind, Numbers

if TYPE_CHECKING:
    from typing import Self

    from .separable import Separable


_ONE = 1.0
_MAKES_P = ("forward", "weights", "link")  # the methods from which p follows, of all kinds of maps
# what describes one formula of p: a subclass that names no kernel inherits none of it, and has the defaults of `Mapping`
_OF_P = (
    "kernel", "formula", "as_softmax", "as_entmax", "exponents", "most_kept", "nucleus", "zero_below_threshold", "learns",
    "loss_learns", "learns_by_sums", "score_change",
)  # fmt: skip


class Mapping(OverProcesses, ABC):
    """A map from scores to probabilities, the base class of every map. It is frozen data, checked at construction.

    Functions such as `apply`, `fenchel_young` and `attention` take one. To write your own map, derive from `Separable` or `RatioMap`,
    which do most of the work, or implement `facts`, `forward` and `vjp` (and `omega` if the Jacobian is symmetric). Test it with
    `anymax.check_mapping`.

    Examples
    --------
    >>> mapping = anymax.Entmax(alpha=1.5)
    >>> mapping.replace(alpha=1.7), mapping.facts.sparse
    (Entmax(alpha=1.7), True)
    """

    __slots__ = ("_link", "_tables")  # the map in the engines' terms, cached (kernels/linked.py and kernels/tables.py)
    _link: Any
    _tables: Any

    name: ClassVar[str]
    formula: ClassVar[str] = ""  # p in plain text, for tables and notebooks
    kernel: ClassVar[str | None] = None  # the name of a scalar link that compiled engines know
    traced: bool = False  # True if the derivative comes from automatic differentiation of `differentiable` alone
    iterative: bool = False  # True if `forward` iterates; `hold` gives the outcome of the iteration
    most_kept: int | None = None  # only so many classes, those with the largest scores, have p > 0
    may_vanish: bool = False  # True if a row of finite scores may have no probabilities at all, and p sums to 0
    hides_a_class: ClassVar[bool] = False  # True if p is that of all but one class: `Rows.over_all` has it as the last
    # True if Omega(y) does not exist for every y (see `no_constant`): the map's own loss leaves it out
    omits_constant: ClassVar[bool] = False
    hidden_has_own: bool = False  # True if the hidden class has other parameters than its score
    # the parameter that JAX passes as an array, so that one compiled program fits all its values
    array_field: ClassVar[str | None] = None
    needs_scores: bool = True  # False if `vjp` needs p only, not x
    loss_from_scores: ClassVar[bool] = False  # True if `loss` uses only the scores, not p
    # parameters to show the map with if none are given; needed for a field without a default
    example: ClassVar[dict[str, Any]] = {}
    # the parameters that may vary along the classes; others have one value per row
    per_class: ClassVar[tuple[str, ...]] = ()
    bounds_classes: ClassVar[bool] = False  # True if the caller gives each class an upper bound
    # the parameters in which the derivatives of p, and of the loss, follow from p alone: `param_jvp`, `param_vjp`, `loss_slope`
    learns: tuple[str, ...] = ()
    loss_learns: tuple[str, ...] = ()
    # of the parameters that may be arrays: a row whose parameter is out of its range, and could not be read, becomes NaN
    ranges: ClassVar[Ranges] = {}

    def __new__(cls, *args: Any, **fields: Any) -> Self:
        if fields:
            check_fields(cls, fields)
        return object.__new__(cls)

    def __init_subclass__(cls, **options: Any) -> None:
        """A kernel holds for the class that names it: a subclass may have another p, so it runs its own methods.

        If a subclass overrides the method that gives p, but not `log_forward`, its log p is the logarithm of that p.
        """
        super().__init_subclass__(**options)
        members = cls.__dict__
        stale = [] if "kernel" in members else list(_OF_P)
        stale += ["log_forward"] if any(name in members for name in _MAKES_P) else []
        for name in stale:
            if name not in members:
                setattr(cls, name, getattr(Mapping, name))

    def __call__(self, x: ArrayT | Numbers, axis: Axes = -1, **options: Unpack[ApplyOptions]) -> ArrayT:
        """`apply(mapping, x, axis, ...)`: p(x) along the last axis, or along `axis`; the options are those of `apply`."""
        return providers.call(self.name, self, x, axis, options)

    @property
    @abstractmethod
    def facts(self) -> Facts: ...

    @abstractmethod
    def forward(self, x: Array, xp: Namespace) -> Array:
        """p(x)."""

    @abstractmethod
    def vjp(self, x: Array, p: Array, g: Array, xp: Namespace) -> Array:
        """J^T g, from plain operations on x, p and g, so that it can be differentiated again."""

    def jvp(self, x: Array, p: Array, v: Array, xp: Namespace) -> Array:
        """J v; the same as `vjp` for a map with a potential, whose Jacobian is symmetric."""
        return self.vjp(x, p, v, xp)

    def param_jvp(self, name: str, x: Array, p: Array, v: Array, xp: Namespace) -> Array:
        """The change of p where a parameter of `learns` changes by v, [..., 1] or [..., n]; plain operations on x and p = p(x)."""
        change = self.score_change(name, x, xp)
        if change is None:
            raise TypeError(f"{self.name} has no derivative by {name} in closed form")
        return self.jvp(x, p, change * v, xp)

    def param_vjp(self, name: str, x: Array, p: Array, g: Array, xp: Namespace) -> Array:
        """`<g, dp / d parameter>`, [..., 1], or one for each class of a parameter of `per_class`."""
        change = self.score_change(name, x, xp)
        if change is not None:
            return dot(self.vjp(x, p, g, xp), change, xp)
        return dot(self.param_jvp(name, x, p, xp.ones_like(p[..., :1]), xp), g, xp)

    def score_change(self, name: str, x: Array, xp: Namespace) -> Array | None:
        """The change of the scores, [..., n], that changes p as a change of 1 of a parameter does; None if there is none.

        With it the derivative by the parameter follows from J^T g, which an engine computes for the scores anyway.
        """
        return None

    @property
    def scales_scores(self) -> bool:
        """True if the parameters of `learns` do what a change of the scores does."""
        return type(self).score_change is not Mapping.score_change

    def loss_slope(self, name: str, x: Array, p: Array, xp: Namespace) -> Array:
        """The derivative of `loss`, which is `Omega*(x) - <x, y>`, by a parameter of `loss_learns`, with p = p(x); [..., 1] or [..., n]."""
        raise TypeError(f"{self.name} has no derivative of the loss by {name} in closed form")

    def log_forward(self, x: Array, xp: Namespace) -> Array | None:
        """log p(x), -inf where p is 0; None if it is no more accurate than the logarithm of p."""
        return None

    def differentiable(self, x: Array, xp: Namespace, held: Array | None = None) -> Array:
        """p(x) in plain operations whose first and second derivatives, in x and in every parameter, are exact.

        `held` is the result of `hold` if it was computed elsewhere (by a kernel, or by an opaque operation).
        """
        return self.forward(x, xp)

    def hold(self, x: Array, xp: Namespace) -> Array:
        """The outcome of the iteration for each row, [..., m]; `differentiable` takes it as a constant.

        A map that wraps another, say one with p = other(f(x)), forwards all three: `iterative = True`, `hold(x)` is
        `other.hold(f(x))`, and `differentiable(x, held)` is `other.differentiable(f(x), held)`. Programs then contain the iteration of
        the other map as one opaque operation and are not traced through it.
        """
        raise TypeError(f"{self.name} has no iteration")

    def held_size(self, n: Any) -> Any:
        """How many numbers `hold` gives for a row of n classes."""
        return 2

    def as_softmax(self) -> Any:
        """The temperature T, a number or an array, if this map is `softmax(x / T)`; None if it is not a softmax."""
        return None

    @property
    def is_softmax(self) -> bool:
        """True if p is the softmax of the scores, with temperature 1."""
        t = self.as_softmax()
        return is_number(t) and t == 1

    def as_entmax(self) -> Any:
        """The alpha at which this map is alpha-entmax, a number or an array: 1 for softmax, 2 for sparsemax; None if it is not one."""
        return None

    def as_separable(self) -> Separable | None:
        """This map, if it is `Separable`: its p is `link(x - tau)`."""
        return None

    def ceiling(self, x: Array, xp: Namespace) -> Any:
        """The upper bound of p for each class: a number, or an array that broadcasts to rows; None if there is none below the sum."""
        return None

    def corner(self, x: Array, xp: Namespace) -> Array | None:
        """The limit of p as the scores are scaled up; None if the largest scores get the whole sum there, each up to its `ceiling`."""
        return None

    # -- the threshold ---------------------------------------------------------------------------------------------------

    def threshold(self, x: Array, xp: Namespace) -> Array:
        """tau, [..., 1]: one number per row, from which p follows."""
        raise TypeError(self.no_threshold())

    def moving_threshold(self, x: Array, p: Array, xp: Namespace) -> Array:
        """A number, [..., 1], with the derivatives of tau by the scores and the parameters; it may differ from tau by a constant.

        Derivatives also run through `p = p(x)`. Override it if `threshold` stops them, as one that iterates does.
        """
        return self.threshold(x, xp)

    def moving_potential(self, x: Array, p: Array, xp: Namespace) -> Array:
        """The same for the potential Omega*(x), whose gradient is p."""
        p0 = stop_gradient(p)
        return self.loss(x, p, p0, xp) + dot(p0, finite_scores(x, xp)[0], xp)

    @property
    def has_threshold(self) -> bool:
        return type(self).threshold is not Mapping.threshold

    def no_threshold(self) -> str:
        having = [kind.name for kind in providers.catalogue if kind.threshold is not Mapping.threshold]
        return f"{self.name} has no threshold; {', '.join(having[:-1])} and {having[-1]} have one"

    # -- the loss, which a map with a potential has -----------------------------------------------------------------------

    @property
    def own_loss(self) -> LossKind:
        """The loss to train with, which `losses.verbs.loss_of_kind` computes: "nll" for a map that has no Fenchel-Young loss."""
        if not self.facts.has_potential:
            return "nll"
        return "without_constant" if self.omits_constant else "fenchel_young"

    def omega(self, q: Array, xp: Namespace) -> Array:
        """The regulariser Omega(q), [..., 1], up to a constant that makes it 0 at a vertex."""
        raise TypeError(self.no_potential())

    def omega_slope(self, q: Array, xp: Namespace) -> Array:
        """The gradient of Omega at q, on its support."""
        raise TypeError(self.no_potential())

    def loss(self, x: Array, p: Array, y: Array, xp: Namespace) -> Array:
        """`Omega*(x) - <x, y>`, [..., 1], with p = p(x); the Fenchel-Young loss is this plus `constant(y)`.

        It is computed as `<p - y, x - c> - Omega(p)`, so that no large numbers cancel: c is the mean of x under y where p and y must have
        one sum, and 0 for a map whose rows differ in their sums. Since p maximises
        `psi(p) = <p, x> - Omega(p)`, the gradient p - y comes from psi at a constant p. The last term is 0, has gradient 0, and its
        second derivatives complete those of psi. If a parameter changes the feasible set (a mass, an upper bound), the derivative
        in it is not complete here, and the map must add the rest, as `Budget.loss` does.
        """
        x, keep, _ = finite_scores(x, xp)
        lowest, highest = self.sums(keep, xp)
        mass = total(y, xp)
        c = stop_gradient(dot(y, x, xp) / xp.where(mass == 0, xp.ones_like(mass), mass)) if lowest is highest else 0.0
        p0 = stop_gradient(p)
        value = dot(p0 - y, x - c, xp) - self.omega(p0, xp)
        if p0 is p or not differentiates(p):
            return value
        pull = x - stop_gradient(x)
        if self.params():
            inside = p0 > 0
            bend = self.omega_slope(p0, xp)
            pull = pull - xp.where(inside, bend - stop_gradient(bend), xp.zeros_like(bend))
        return value + 0.5 * dot(pull, p - p0, xp)

    def constant(self, y: Array, xp: Namespace) -> Array:
        """The part of the loss that depends on the target only: Omega(y), which is 0 for a single class."""
        return self.omega(y, xp)

    def no_potential(self) -> str:
        return (
            f"{self.name} has no Fenchel-Young loss, because its Jacobian is not symmetric; "
            f"use anymax.{self.own_loss} with this mapping instead"
        )

    def no_constant(self, smoothed: bool) -> str | None:
        """Why Omega(y) does not exist for a distribution y (`smoothed`: label smoothing made y one); None if it exists."""
        return None

    def check(self, n: int) -> None:
        """Raise an error if the map is not defined for rows of n classes."""

    @property
    def over_all(self) -> Mapping:
        """The map of all classes, with the one that a map may hide."""
        return self

    def with_hidden(self, x: Array, xp: Namespace) -> tuple[Mapping, Array]:
        """(map, rows): the rows with one class more, the hidden one, at the end, and the map of all classes. For `Rows.over_all`."""
        raise TypeError(f"{self.name} hides no class")

    def for_one_more(self, x: Array, bound: Any, xp: Namespace) -> Mapping:
        """The map of rows like x with one class more, the last. `bound` is its own upper bound, if the map `bounds_classes`, or None."""
        for name, value in self.params().items():
            if value.ndim and value.shape[-1] != 1 and name in self.per_class:
                raise TypeError(
                    f"Sink(mapping={self.name}): {name} has one value for each class, and the sink has none; give one value for all classes"
                )
        return self

    # -- what p sums to ----------------------------------------------------------------------------------------------------

    def sums(self, keep: Array | None, xp: Namespace) -> tuple[Any, Any]:
        """(lowest, highest): p of a row sums to no less and no more; one object twice if the scores do not change the sum.

        `keep` is [..., n], False where a class is masked; None stands for rows with as many classes as needed. Each result is a number, or
        an array [..., 1]. Losses refuse targets with other sums. A row without classes, or one of a map that `may_vanish`, may sum to 0.
        """
        return _ONE, _ONE

    @property
    def sums_to_one(self) -> bool:
        """True if p of every row with classes, whichever of them are masked, sums to 1, so that it is a distribution."""
        return True

    @property
    def one_draw(self) -> Draw:
        """How p gives the distribution of one draw from a row. What draws, and what has log p of a draw, follows it.

        "p": by itself. "share": divided by its sum, which the scores do not change. "rest": by itself, and what it leaves of 1 is the
        probability of none of the classes. "none": not at all, as `check_draw` says. For a map that hides a class it is said of p of
        all classes, those of `over_all`; a draw of the hidden one is a draw of none.
        """
        whole = self.over_all
        if whole.sums_to_one:
            return "p"
        lowest, highest = whole.sums(None, None)  # type: ignore[arg-type]  # without rows there is nothing to compute
        if lowest is highest:
            return "share"
        return "none" if is_array(highest) or highest > 1.0 else "rest"

    @property
    def may_draw_none(self) -> bool:
        """True if one draw from a row with classes may be none of them."""
        return self.hides_a_class or self.one_draw == "rest"

    def check_draw(self, who: str) -> None:
        """Raise an error if p is not the distribution of one draw."""
        if not self.sums_to_one and self.one_draw == "none":
            raise ValueError(
                f"{who}: {self!r} gives each class a number of its own, and a row no distribution, so there is no single draw; where each "
                "number is a probability, draw each class by itself, as in random(p.shape) < p"
            )

    @property
    def least_classes(self) -> int:
        """How many classes a row needs for its probabilities to reach their sum; in a row with fewer each class gets 1."""
        return 1

    # -- data ---------------------------------------------------------------------------------------------------------

    def check_width(self, name: str, value: Array) -> None:
        """An error if a parameter, in the layout of the rows, varies along the classes and is not in `per_class`."""
        if name not in self.per_class:
            one_a_row(value, f"{self.name}: {name}")

    def params(self) -> dict[str, Array]:
        """The parameters that are arrays (a learnable or per-row alpha, say), by name."""
        return {f.name: v for f in dataclasses.fields(self) if is_array(v := getattr(self, f.name))}  # type: ignore[arg-type]

    def replace(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes) if changes else self  # type: ignore[type-var]

    def laid_out(self, **arrays: Any) -> Self:
        """The same map with its arrays in another layout, dtype or framework. Their values, checked before, are not read again."""
        if not arrays or compiling():
            return self.replace(**arrays)
        with unchecked():
            return self.replace(**arrays)

    def check_ranges(self, hint: str, *names: str) -> None:
        """An error for a parameter that is no number or real array, or is known to be out of its range; numbers become Python's.

        `__post_init__` of a map calls it. hint: what the parameters are, or what else to do.
        """
        for name in names:
            value = check_number(type(self).__name__, name, getattr(self, name), self.ranges[name], hint)
            object.__setattr__(self, name, value)

    def sound(self, x: Array, xp: Namespace) -> Array:
        """The rows, NaN where a parameter is out of its range, so that p, its derivatives and all that follows from it are NaN, too."""
        bad = self.lost()
        return x if bad is None else poison(x, bad, xp)

    def lost(self) -> Array | None:
        """Where rows have a parameter out of its range, [..., 1] or of no dimension; None if it is known that none has."""
        values = self.params()
        return rows_out_of_range((values[name], allowed) for name, allowed in self.ranges.items() if name in values)

    def frozen(self) -> Self:
        """The same map with its parameters as constants for differentiation."""
        return self.laid_out(**{k: stop_gradient(v) for k, v in self.params().items()})

    def constants(self) -> dict[str, Any]:
        """The parameters that are not arrays."""
        arrays = self.params()
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in arrays}  # type: ignore[arg-type]

    @classmethod
    def rebuilt(cls, fields: dict[str, Any]) -> Self:
        """The map with these `params` and `constants`, by their names."""
        return cls(**fields)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)

    def _repr_html_(self) -> str:
        """The page that a notebook shows: name, parameters, formula, facts and a picture."""
        return providers.notebook_page(self)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        names = [f.name for f in dataclasses.fields(self)]  # type: ignore[arg-type]  # Dynamo of torch 2.11 reads no vars(self)
        pairs = [(getattr(self, name), getattr(other, name)) for name in names]
        return all(a is b or (not is_array(a) and not is_array(b) and a == b) for a, b in pairs)

    def __hash__(self) -> int:
        return hash((type(self), *(id(v) if is_array(v) else v for v in vars(self).values())))


def one_a_row(value: Any, name: str) -> Any:
    """`value`, in the layout of the rows, or an error if it varies along the classes."""
    if is_array(value) and value.ndim and value.shape[-1] != 1:
        raise ValueError(
            f"{name} of shape {tuple(value.shape)} (classes last) varies along the classes; it must have size 1 there, one value for "
            "each row"
        )
    return value


def positive(p: Array) -> Array:
    """True on the support of p, and where p is NaN, so that a poisoned row has a NaN gradient, not a silent 0."""
    return ~(p <= 0)


def missing_mass(mass: Array, whole: Any, xp: Namespace) -> Array:
    """`whole - mass`, [..., 1], for the sum of a row; 0 where rounding of this sum may be all of it."""
    missing = whole - mass
    return xp.where(missing > 8.0 * xp.finfo(mass.dtype).eps * whole, missing, xp.zeros_like(missing))


def with_missing_mass(q: Array, whole: Any, xp: Namespace) -> Array:
    """q with one more class, the last, which completes the sum of the row to `whole`."""
    return xp.concat([q, missing_mass(total(q, xp), whole, xp)], axis=-1)


def row_top(x: Array, keep: Array, xp: Namespace) -> Array:
    """The maximum of the kept entries, [..., 1]; 0 for a row without kept entries."""
    high = top(xp.where(keep, x, -math.inf * xp.ones_like(x)), xp)
    return xp.where(high > -math.inf, high, xp.zeros_like(high))
