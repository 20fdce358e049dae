"""The contract of a map: `Mapping`. `Separable` and `RatioMap`, in their own files, implement most of it for two families.

A mapping is frozen data. Its methods work on rows: the classes are the last axis, the dtype is the one to compute in, -inf
marks a masked entry. The verbs take care of axes, masks, dtypes, frameworks and engines.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from .._array import (
    Array,
    Namespace,
    Ranges,
    compiling,
    differentiates,
    dot,
    finite_scores,
    is_array,
    stop_gradient,
    top,
    total,
    unchecked,
)
from .facts import Facts
from .options import check_fields, check_positions
from .parameters import one_a_row
from .parts import Parts
from .providers import providers
from .typing import ApplyOptions, ArrayT, Axes, LossKind, Numbers

if TYPE_CHECKING:
    from typing import Self


_ONE = 1.0
_MAKES_P = ("forward", "weights", "link")  # the methods from which p follows, of all kinds of maps
# what describes one formula of p: a subclass that names no kernel inherits none of it, and has what its family says
_OF_P = ("formula", "is_softmax", "parts", "learns", "score_change")


class Hidden(ABC):
    """How the class joins the rows that a map hides."""

    __slots__ = ()

    @abstractmethod
    def over_all(self, mapping: Any) -> Mapping:
        """The map of all classes."""

    @abstractmethod
    def join(self, mapping: Any, x: Array, xp: Namespace) -> tuple[Mapping, Array]:
        """(map, rows): the rows with one class more, the hidden one, at the end, and the map of all classes. For `Rows.over_all`."""


class Mapping(ABC):
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
    is_softmax: bool = False  # True if p is the softmax of the scores, with temperature 1
    parts: Parts = Parts()  # what follows from parts of a row
    hidden: ClassVar[Hidden | None] = None  # if p is that of all but one class: how this class joins the rows
    # the parameter that JAX passes as an array, so that one compiled program fits all its values
    array_field: ClassVar[str | None] = None
    needs_scores: bool = True  # False if `vjp` needs p only, not x
    loss_from_scores: ClassVar[bool] = False  # True if `loss` uses only the scores, not p
    # parameters to show the map with if none are given; needed for a field without a default
    example: ClassVar[dict[str, Any]] = {}
    # the parameters that may vary along the classes; others have one value per row
    per_class: ClassVar[tuple[str, ...]] = ()
    # the parameters in which the derivatives of p follow from p alone, by `param_jvp` and `param_vjp`; and those of the loss, if the
    # map has `loss_slope`
    learns: tuple[str, ...] = ()
    # of the parameters that may be arrays: a row whose parameter is out of its range, and could not be read, becomes NaN
    ranges: ClassVar[Ranges] = {}

    # -- a map must give -----------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def facts(self) -> Facts: ...

    @abstractmethod
    def forward(self, x: Array, xp: Namespace) -> Array:
        """p(x)."""

    @abstractmethod
    def vjp(self, x: Array, p: Array, g: Array, xp: Namespace) -> Array:
        """J^T g, from plain operations on x, p and g, so that it can be differentiated again."""

    # -- a map may give: derivatives, where its own are quicker or more exact ------------------------------------------

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

    def ceiling(self, x: Array, xp: Namespace) -> Any:
        """The upper bound of p for each class: a number, or an array that broadcasts to rows; None if there is none below the sum."""
        return None

    def in_dtype_of(self, p: Array, x: Array, xp: Namespace) -> Array:
        """p, which was computed in a wider dtype, in that of x."""
        return xp.astype(p, x.dtype)

    def corner(self, x: Array, xp: Namespace) -> Array | None:
        """The limit of p as the scores are scaled up; None if the largest scores get the whole sum there, each up to its `ceiling`."""
        return None

    # -- a map may give: the threshold ---------------------------------------------------------------------------------

    def threshold(self, x: Array, xp: Namespace) -> Array:
        """tau, [..., 1]: one number per row, from which p follows."""
        raise TypeError(no_threshold(self))

    def moving_threshold(self, x: Array, p: Array, xp: Namespace) -> Array:
        """A number, [..., 1], with the derivatives of tau by the scores and the parameters; it may differ from tau by a constant.

        Derivatives also run through `p = p(x)`. Override it if `threshold` stops them, as one that iterates does.
        """
        return self.threshold(x, xp)

    @property
    def has_threshold(self) -> bool:
        return type(self).threshold is not Mapping.threshold

    # -- a map may give: the loss, where it has a potential ------------------------------------------------------------

    @property
    def own_loss(self) -> LossKind:
        """The loss to train with, which `losses.verbs.loss_of_kind` computes: "nll" for a map that has no Fenchel-Young loss.

        It is "without_constant" for a map whose Omega(y) does not exist for every y, as `no_constant` says.
        """
        return "fenchel_young" if self.facts.has_potential else "nll"

    def omega(self, q: Array, xp: Namespace) -> Array:
        """The regulariser Omega(q), [..., 1], up to a constant that makes it 0 at a vertex."""
        raise TypeError(no_potential(self))

    def omega_slope(self, q: Array, xp: Namespace) -> Array:
        """The gradient of Omega at q, on its support."""
        raise TypeError(no_potential(self))

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

    def no_constant(self, smoothed: bool) -> str | None:
        """Why Omega(y) does not exist for a distribution y (`smoothed`: label smoothing made y one); None if it exists."""
        return None

    def check(self, n: int) -> None:
        """Raise an error if the map is not defined for rows of n classes."""

    # -- a map may give: what p sums to --------------------------------------------------------------------------------

    def sums(self, keep: Array | None, xp: Namespace) -> tuple[Any, Any]:
        """(lowest, highest): p of a row sums to no less and no more; one object twice if the scores do not change the sum.

        `keep` is [..., n], False where a class is masked; None stands for rows with as many classes as needed. Each result is a number, or
        an array [..., 1]. Losses refuse targets with other sums. A row without classes may sum to 0, and so may one whose
        weights are all 0, of a sparse `RatioMap`.
        """
        return _ONE, _ONE

    @property
    def sums_to_one(self) -> bool:
        """True if p of every row with classes, whichever of them are masked, sums to 1, so that it is a distribution."""
        return True

    @property
    def least_classes(self) -> int:
        """How many classes a row needs for its probabilities to reach their sum; in a row with fewer each class gets 1."""
        return 1

    # -- the library asks; a map inherits these ------------------------------------------------------------------------

    __match_args__: ClassVar[tuple[str, ...]] = ()  # a dataclass has its parameters here

    def __new__(cls, *args: Any, **fields: Any) -> Self:
        if fields:
            check_fields(cls, fields)
        if len(args) > len(cls.__match_args__):
            check_positions(cls, args)
        return object.__new__(cls)

    def __init_subclass__(cls, **options: Any) -> None:
        """A kernel holds for the class that names it: a subclass may have another p, so it runs its own methods.

        If a subclass overrides the method that gives p, but not `log_forward`, its log p is the logarithm of that p.
        """
        super().__init_subclass__(**options)
        members = cls.__dict__
        stale: dict[str, Any] = {}
        if "kernel" not in members:
            bases = (base for base in cls.__mro__[1:] if issubclass(base, Mapping) and inspect.isabstract(base))
            family = next(bases)  # Separable, say
            stale = {name: getattr(family, name) for name in _OF_P} | {"kernel": None}
            if cls.kernel is None:  # the class that it derives from has said `parts` of its own formulas
                del stale["parts"]
            elif isinstance(cls.parts, Parts) and cls.parts.loss_of_whole_target:  # as its loss still does
                stale["parts"] = Parts(loss_of_whole_target=True)
        if any(name in members for name in _MAKES_P):
            stale["log_forward"] = Mapping.log_forward
        for name, value in stale.items():
            if name not in members:
                setattr(cls, name, value)

    def __call__(self, x: ArrayT | Numbers, axis: Axes = -1, **options: Unpack[ApplyOptions]) -> ArrayT:
        """`apply(mapping, x, axis, ...)`: p(x) along the last axis, or along `axis`; the options are those of `apply`."""
        return providers.call(self.name, self, x, axis, options)

    # a call without x, as in `mapping(input=...)`, is to reach the checks of options
    __call__.__defaults__ = (None, -1)

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


def scales_scores(mapping: Mapping) -> bool:
    """True if the parameters of `learns` do what a change of the scores does, `Mapping.score_change`."""
    return type(mapping).score_change is not Mapping.score_change


def loss_learns(mapping: Mapping) -> tuple[str, ...]:
    """The parameters in which the derivative of the loss follows from p alone, `Mapping.loss_slope`."""
    return mapping.learns if type(mapping).loss_slope is not Mapping.loss_slope else ()


def no_threshold(mapping: Mapping) -> str:
    having = [kind.name for kind in providers.catalogue if kind.threshold is not Mapping.threshold]
    return f"{mapping.name} has no threshold; {', '.join(having[:-1])} and {having[-1]} have one"


def no_potential(mapping: Mapping) -> str:
    return (
        f"{mapping.name} has no Fenchel-Young loss, because its Jacobian is not symmetric; "
        f"use anymax.{mapping.own_loss} with this mapping instead"
    )


def over_all(mapping: Mapping) -> Mapping:
    """The map of all classes, with the one that a map may hide."""
    return mapping if mapping.hidden is None else mapping.hidden.over_all(mapping)


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
