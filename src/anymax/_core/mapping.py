"""The contract of a map: `Mapping`, and the two families that write most of it once, `Separable` and `RatioMap`.

A mapping is frozen data. Its methods work on rows: the classes are the last axis, the dtype is the one to compute in, -inf
marks a masked entry. Axes, masks, dtypes, frameworks and engines are the business of the verbs above.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from .._array import (
    Array,
    Namespace,
    counts,
    descending,
    differentiates,
    dot,
    finish,
    finite_scores,
    is_array,
    known,
    known_any,
    known_largest,
    like,
    poison,
    running_sum,
    safe,
    stop_gradient,
    take,
    top,
    total,
)
from . import handed
from .facts import Facts
from .solve import Totals, root, totals
from .typing import ArrayT, Axes, LogOptions, Numbers

if TYPE_CHECKING:
    from typing import Self


class Mapping(ABC):
    """A map from scores to probabilities: frozen data, checked when it is made. The base class of every map.

    Functions such as `apply`, `fenchel_young` and `attention` take it. To write one of your own derive from `Separable` or `RatioMap`,
    which do most of the work, or else give `facts`, `forward` and `vjp` (and `omega`, where the Jacobian is symmetric); hold it to
    `anymax.check_mapping`.

    >>> mapping = anymax.Entmax(alpha=1.5)
    >>> mapping.replace(alpha=1.7), mapping.facts.sparse
    (Entmax(alpha=1.7), True)
    """

    __slots__ = ("_link",)  # what the engines have found that it is in their words (kernels/link.py)
    _link: Any

    name: ClassVar[str]
    formula: ClassVar[str] = ""  # p in plain text, for tables and notebooks
    kernel: ClassVar[str | None] = None  # the name of a scalar link that compiled engines know; see `__init_subclass__`
    instead: ClassVar[str] = "nll"  # the loss to use where no Fenchel-Young loss exists
    traced: bool = False  # True where only automatic differentiation of `differentiable` knows the derivative
    iterative: bool = False  # True where `forward` iterates, and `hold` gives the outcome
    mass: Any = 1.0  # what p sums to: a number, or an array with one value a row
    array_field: ClassVar[str | None] = (
        None  # the parameter of which every number runs the same program, as an array does
    )
    needs_scores: bool = True  # False where `vjp` needs p and not x
    # the parameters that show the map where none are given; needed for a field without a default
    example: ClassVar[dict[str, Any]] = {}
    # those that may vary along the classes; others have one value a row
    per_class: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        """Kernel and formula hold for the class that names them: one that inherits them and overrides a method is served by its own."""
        super().__init_subclass__(**options)
        owner = next(c for c in cls.__mro__ if "kernel" in vars(c))
        fields = [f.name for f in dataclasses.fields(owner)] if dataclasses.is_dataclass(owner) else []
        free = "name formula kernel facts instead example check no_potential no_constant"
        spared = {*free.split(), *fields}
        if owner is not cls and any(
            not a.startswith("__") and a not in spared and getattr(cls, a, None) is not getattr(owner, a)
            for a in dir(owner)
        ):
            cls.kernel = None
            if "formula" not in vars(cls):
                cls.formula = ""

    def __call__(
        self, x: ArrayT | Numbers, axis: Axes = None, *, out: Any = None, **options: Unpack[LogOptions]
    ) -> ArrayT:
        """`apply(mapping, x, axis, ...)`: p(x) along the last axis, or along `axis`; the options are those of `apply`."""
        return handed.call(self.name, self, x, axis, out, options)

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

    def log_forward(self, x: Array, xp: Namespace) -> Array | None:
        """log p(x), -inf where p is 0, where it can be had more exactly than as the logarithm of p."""
        return None

    def differentiable(self, x: Array, xp: Namespace, held: Array | None = None) -> Array:
        """p(x) in plain operations whose first and second derivatives, in x and in every parameter, are exact.

        `held` is what `hold` returned, where it was computed elsewhere (by a kernel, or by an opaque operation).
        """
        return self.forward(x, xp)

    def hold(self, x: Array, xp: Namespace) -> Array:
        """The numbers of each row, [..., m], that `differentiable` takes as constants: the outcome of its iteration."""
        raise TypeError(f"{self.name} has no iteration")

    def as_softmax(self) -> Any:
        """The temperature T with which this map is `softmax(x / T)`, a number or an array; None for a map that is no softmax."""
        return None

    @property
    def is_softmax(self) -> bool:
        """True where p is the softmax of the scores as they are."""
        t = self.as_softmax()
        return type(t) is float and t == 1.0

    # -- the threshold ---------------------------------------------------------------------------------------------------

    def threshold(self, x: Array, xp: Namespace) -> Array:
        """tau, [..., 1], the one number of each row from which p follows."""
        raise TypeError(self.no_threshold())

    @property
    def has_threshold(self) -> bool:
        return type(self).threshold is not Mapping.threshold

    def no_threshold(self) -> str:
        having = [kind.name for kind in handed.catalogue if kind.threshold is not Mapping.threshold]
        return f"{self.name} has no threshold; {', '.join(having[:-1])} and {having[-1]} have one"

    # -- the loss of a map with a potential -----------------------------------------------------------------------------

    def omega(self, q: Array, xp: Namespace) -> Array:
        """The regulariser Omega(q), [..., 1], up to a constant that makes it 0 at a vertex."""
        raise TypeError(self.no_potential())

    def omega_slope(self, q: Array, xp: Namespace) -> Array:
        """The gradient of Omega at q, on its support."""
        raise TypeError(self.no_potential())

    def loss(self, x: Array, p: Array, y: Array, xp: Namespace) -> Array:
        """`Omega*(x) - <x, y>`, [..., 1], with p = p(x); the Fenchel-Young loss is this plus `constant(y)`.

        Written as `<p - y, x - c> - Omega(p)` with c = <y, x>, so that no large numbers cancel. Since p maximises
        `psi(p) = <p, x> - Omega(p)`, the gradient p - y comes from psi at a constant p; the last term is 0, has gradient 0, and its
        second derivatives complete those of psi. A parameter that changes the feasible set (a mass, an upper bound) moves the maximum
        in a way that this leaves out: a map that has one adds that derivative, as `Budget.loss` does.
        """
        x, _, _ = finite_scores(x, xp)
        mass = total(y, xp)
        c = stop_gradient(dot(y, x, xp) / xp.where(mass == 0, xp.ones_like(mass), mass))
        held = stop_gradient(p)
        value = dot(held - y, x - c, xp) - self.omega(held, xp)
        if held is p or not differentiates(p):
            return value
        pull = x - stop_gradient(x)
        if self.params():
            inside = held > 0
            bend = self.omega_slope(held, xp)
            pull = pull - xp.where(inside, bend - stop_gradient(bend), xp.zeros_like(bend))
        return value + 0.5 * dot(pull, p - held, xp)

    def constant(self, y: Array, xp: Namespace) -> Array:
        """The part of the loss that depends on the target alone: Omega(y), 0 for a single class."""
        return self.omega(y, xp)

    def no_potential(self) -> str:
        return (
            f"{self.name} has no Fenchel-Young loss, because its Jacobian is not symmetric; "
            f"use anymax.{self.instead} with this mapping instead"
        )

    def no_constant(self, smoothed: bool) -> str | None:
        """Why there is no Omega(y) of a distribution, which label smoothing made one where `smoothed`; None where there is."""
        return None

    def check(self, n: int) -> None:
        """An error if the map can't serve rows of n classes."""

    @property
    def least_classes(self) -> int:
        """How many classes a row needs for its probabilities to reach `mass`; one with fewer gives each of them 1."""
        most = known_largest(self.mass) if is_array(self.mass) else self.mass
        return math.ceil(most) if most is not None and math.isfinite(most) else 1

    @property
    def sums_to_one(self) -> bool:
        return not is_array(self.mass) and self.mass == 1.0

    # -- data ---------------------------------------------------------------------------------------------------------

    def check_width(self, name: str, value: Array) -> None:
        """An error if a parameter, in the layout of the rows, varies along the classes and the map doesn't declare that it may."""
        if name not in self.per_class:
            one_a_row(value, f"{self.name}: {name}")

    def params(self) -> dict[str, Array]:
        """The parameters that are arrays (a learnable or per-row alpha, say), by name."""
        return {f.name: v for f in dataclasses.fields(self) if is_array(v := getattr(self, f.name))}  # type: ignore[arg-type]

    def replace(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes) if changes else self  # type: ignore[type-var]

    def frozen(self) -> Self:
        """The same map with its parameters as constants of differentiation."""
        return self.replace(**{k: stop_gradient(v) for k, v in self.params().items()})

    def constants(self) -> dict[str, Any]:
        """The parameters that are not arrays."""
        arrays = self.params()
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in arrays}  # type: ignore[arg-type]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)

    def _repr_html_(self) -> str:
        """What a notebook shows: name, parameters, formula, promises and a picture."""
        return handed.notebook_page(self)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        mine, theirs = vars(self), vars(other)
        return mine.keys() == theirs.keys() and all(
            mine[k] is theirs[k] or (not is_array(mine[k]) and not is_array(theirs[k]) and mine[k] == theirs[k])
            for k in mine
        )

    def __hash__(self) -> int:
        return hash((type(self), *(id(v) if is_array(v) else v for v in vars(self).values())))


def one_a_row(value: Any, name: str) -> Any:
    """`value`, in the layout of the rows, if it has one number for all classes of a row; an error otherwise."""
    if is_array(value) and value.ndim and value.shape[-1] != 1:
        raise ValueError(
            f"{name} of shape {tuple(value.shape)} (classes last) varies along the classes; it must have size 1 there, one value for "
            "each row"
        )
    return value


def positive(p: Array) -> Array:
    """The support of p. NaN counts as supported, so that a poisoned row has a NaN gradient, not a silent 0."""
    return ~(p <= 0)


class Separable(Mapping):
    """`p = argmax <p, x> - sum_i omega(p_i)` on the simplex: `p_i = link(x_i - tau)`, tau such that the row sums to `mass`.

    A member gives `omega_terms(q)`, `link(t)`, `slope(q) = omega'(q)` and `curvature(q) = omega''(q)`; it may give a closed
    form `closed(y, keep, xp)` of the level, which the tests hold to the generic solver. The link grows without bound, or its
    upper bound is said by `ceiling`: a link that falls short of the mass is an error.

    >>> @dataclasses.dataclass(frozen=True, eq=False)
    ... class Squares(anymax.Separable):  # sparsemax
    ...     name = "squares"
    ...     facts = anymax.Facts(monotone=True, shift_invariant=True, sparse=True, has_potential=True, margin=1.0)
    ...     def omega_terms(self, q, xp): return 0.5 * q * q
    ...     def link(self, t, xp): return xp.where(t > 0, t, 0.0 * t)
    ...     def slope(self, q, xp): return q
    ...     def curvature(self, q, xp): return xp.ones_like(q)
    >>> anymax.apply(Squares(), [2.0, 1.5, -1.0])
    array([0.75, 0.25, 0.  ])
    """

    iterative = True
    needs_scores = False
    steep: bool = False  # True where the link has infinite slope at the edge of the support

    @abstractmethod
    def omega_terms(self, q: Array, xp: Namespace) -> Array: ...

    @abstractmethod
    def link(self, t: Array, xp: Namespace) -> Array: ...

    @abstractmethod
    def slope(self, q: Array, xp: Namespace) -> Array: ...

    @abstractmethod
    def curvature(self, q: Array, xp: Namespace) -> Array: ...

    def closed(self, y: Array, keep: Array, xp: Namespace) -> Array | None:
        return None

    def ceiling(self, x: Array, xp: Namespace) -> Any:
        """The largest probability of each class, where the link is bounded: a number, or an array that broadcasts to rows; None: no bound.

        A row whose ceilings sum to less than the mass gets its ceilings.
        """
        return None

    def sensitivity(self, p: Array, xp: Namespace) -> Array:
        """s = 1 / omega''(p) on the support and below the ceiling, else 0: dp_i/dt_i."""
        inside, most = positive(p), self.ceiling(p, xp)
        inside = inside if most is None else inside & ~(p >= most)
        # a constant curvature knows nothing of p: 0 p hands on its NaN
        return xp.where(inside, 1.0 / self.curvature(safe(p, inside, 1.0, xp), xp) + 0.0 * p, xp.zeros_like(p))

    # -- the level: the argument of the link at the anchor ----------------------------------------------------------------

    def solve(self, x: Array, keep: Array, xp: Namespace) -> tuple[Array, Array]:
        """(anchor, level), both [..., 1], constants of differentiation."""
        most = self.ceiling(x, xp)
        if most is not None:
            return self._below(most, x, keep, xp)
        anchor = row_top(x, keep, xp)
        y = x - anchor
        # running sums over a long row may round the closed form away by any amount: a start for Newton, not the answer
        return anchor, self.search(y, keep, xp, self.closed(y, keep, xp))

    def search(
        self, y: Array, keep: Array, xp: Namespace, start: Array | None = None, totals: Totals = totals
    ) -> Array:
        """The level by the generic solver, for rows whose maximum is 0; `start` is what is already known of it, `totals` adds up."""
        (count,), mass = totals([xp.astype(keep, y.dtype)], xp), like(self.mass, y, xp)
        high = self.slope(xp.ones_like(count) * mass, xp)
        return self._between(self._lowest(count, mass, xp), high, y, keep, count > 0, xp, start, totals)

    def _lowest(self, count: Array, mass: Any, xp: Namespace) -> Array:
        """A level at which the largest score, and so every score, has at most its even share of the mass."""
        one = xp.ones_like(count)
        share = mass / xp.where(count > 0, count, one)
        return self.slope(xp.where(share < 1.0, share, one) * one, xp)

    def _between(
        self,
        low: Array,
        high: Array,
        y: Array,
        keep: Array,
        reachable: Array,
        xp: Namespace,
        start: Array | None = None,
        totals: Totals = totals,
    ) -> Array:
        mass, one = like(self.mass, y, xp), xp.ones_like(high)

        def evaluate(level: Array) -> tuple[Array, Array]:
            p = xp.where(keep, self.link(y + level, xp), xp.zeros_like(y))
            sum_p, rate = totals([p, self.sensitivity(p, xp)], xp)
            residual = sum_p - mass
            return residual, -residual / xp.where(rate > 0, rate, one)

        level = root(evaluate, low, high, xp, start=start)
        at_end = reachable & ~(level < high - 1e-3 * xp.abs(high))
        if known(at_end) and not bool(xp.any(at_end)):
            return level
        short = at_end & (evaluate(high)[0] < -1e-2 * mass)
        if known_any(short, xp):
            raise ValueError(
                f"{self!r}: its link doesn't reach the sum {_brief(self.mass)} at the upper end of the search for the threshold; if its "
                "probabilities have an upper bound, define ceiling(), and else see that slope() is the inverse of link()"
            )
        return poison(level, short, xp)

    def _below(self, most: Any, x: Array, keep: Array, xp: Namespace) -> tuple[Array, Array]:
        """(anchor, level) under a ceiling. The anchor is the first class, in the order in which a rising level fills them, at which the
        full ones reach the mass: it is in the support, and from there nothing cancels."""
        mass, none = like(self.mass, x, xp), -math.inf * xp.ones_like(x)
        count = xp.sum(counts(keep, xp), axis=-1, keepdims=True)
        last = xp.where(count > 0, count, xp.ones_like(count)) - 1
        high = row_top(x, keep, xp)
        low = self._lowest(xp.astype(count, x.dtype), mass, xp) - high  # the opposite of a threshold
        if not is_array(most) or most.ndim == 0 or most.shape[-1] == 1:
            ordered, each = descending(xp.where(keep, x, none), xp), most * xp.ones_like(high)
            needed, n = xp.ceil(mass / each), x.shape[-1] + 1
            rank = counts(xp.where(needed < n, needed, n * xp.ones_like(needed)), xp) - 1
            rank = xp.where(rank > 0, rank, xp.zeros_like(rank))
            reachable = (count > 0) & (rank <= last)
            anchor = take(ordered, xp.where(rank < last, rank, last), xp)
            anchor = xp.where(anchor > -math.inf, anchor, xp.zeros_like(anchor))
            one = xp.where(
                each < mass, each, mass * xp.ones_like(each)
            )  # no class has more than the mass, which may be tiny
            end, edge = self.slope(one, xp), self.slope(xp.zeros_like(each), xp)  # fewer than the mass at the edge
        else:
            most = most * xp.ones_like(x)
            key = xp.where(keep, x - self.slope(most, xp), none)  # full above this threshold
            order = xp.argsort(-key, axis=-1)
            full = running_sum(xp.take_along_axis(xp.where(keep, most, xp.zeros_like(most)), order, axis=-1), xp)
            rank = xp.sum(counts(full < mass, xp), axis=-1, keepdims=True)
            reachable = (count > 0) & (rank <= last)
            first = take(order, xp.where(rank < last, rank, last), xp)
            anchor = xp.where(count > 0, take(xp.where(keep, x, xp.zeros_like(x)), first, xp), xp.zeros_like(high))
            end, edge = self.slope(take(most, first, xp), xp), none[..., :1]
        low = low + anchor
        low = xp.where(edge > low, edge, low)
        return anchor, self._between(low, end, x - anchor, keep, reachable, xp)

    def at(self, x: Array, anchor: Array, level: Array, xp: Namespace) -> Array:
        return self.link(x - anchor + level, xp)

    def rate(self, p: Array, level: Array, xp: Namespace) -> Array:
        """dp_i / dlevel."""
        return self.sensitivity(p, xp)

    def threshold(self, x: Array, xp: Namespace) -> Array:
        """tau, [..., 1], with p = link(x - tau)."""
        y, keep, poisoned = finite_scores(x, xp)
        anchor, level = self.solve(y, keep, xp)
        tau = xp.where(xp.any(keep, axis=-1, keepdims=True), anchor - level, -math.inf * xp.ones_like(level))
        return poison(tau, poisoned, xp)

    # -- the contract -----------------------------------------------------------------------------------------------------

    def forward(self, x: Array, xp: Namespace) -> Array:
        y, keep, poisoned = finite_scores(x, xp)
        anchor, level = self.solve(y, keep, xp)
        p = xp.where(keep, self.at(y, anchor, level, xp), xp.zeros_like(y))
        return finish(p + self.remainder(p, level, xp), keep, poisoned | xp.isnan(level), xp)

    def hold(self, x: Array, xp: Namespace) -> Array:
        y, keep, _ = finite_scores(x, xp)
        return xp.concat(self.solve(y, keep, xp), axis=-1)

    def differentiable(self, x: Array, xp: Namespace, held: Array | None = None) -> Array:
        """Two Newton steps on a constant level: the first carries the first derivative, the second the second."""
        ends: Array = stop_gradient(self.frozen().hold(stop_gradient(x), xp)) if held is None else held
        y, keep, poisoned = finite_scores(x, xp)
        return self.on_level(y, keep, poisoned, ends[..., :1], ends[..., 1:], xp)

    def on_level(
        self, y: Array, keep: Array, poisoned: Array, anchor: Array, level: Array, xp: Namespace, totals: Totals = totals
    ) -> Array:  # fmt: skip
        mass = like(self.mass, y, xp)
        for _ in range(2):
            p = xp.where(keep, self.at(y, anchor, level, xp), xp.zeros_like(y))
            sum_p, rate = totals([p, stop_gradient(self.rate(p, level, xp))], xp)
            rate = stop_gradient(rate)
            level = level + (mass - sum_p) / xp.where(rate > 0, rate, xp.ones_like(rate))
        p = xp.where(keep, self.at(y, anchor, level, xp), xp.zeros_like(y))
        return finish(p + stop_gradient(self.remainder(p, level, xp, totals)), keep, poisoned | xp.isnan(level), xp)

    def remainder(self, p: Array, level: Array, xp: Namespace, totals: Totals = totals) -> Array:
        """One Newton step in p: what rounding the level to the working precision has lost, given back along dp/dlevel."""
        rate = self.rate(p, level, xp)
        sum_p, sum_rate = totals([p, rate], xp)
        lost = like(self.mass, p, xp) - sum_p
        change = lost * rate / xp.where(sum_rate > 0, sum_rate, xp.ones_like(sum_rate))
        change, most = xp.where(change > -p, change, -p), self.ceiling(p, xp)
        return change if most is None else xp.where(change < most - p, change, most - p)

    def vjp(self, x: Array, p: Array, g: Array, xp: Namespace) -> Array:
        s = self.sensitivity(p, xp)
        if self.steep:
            # One entry may outweigh all others by many orders: measured from its own g, nothing cancels.
            largest = xp.finfo(s.dtype).max ** 0.75
            s = xp.where(s > largest, largest * xp.ones_like(s), s)
            g = g - take(g, xp.argmax(stop_gradient(s), axis=-1, keepdims=True), xp)
        rate = total(s, xp)
        return s * (g - dot(s, g, xp) / xp.where(rate == 0, xp.ones_like(rate), rate))

    def omega(self, q: Array, xp: Namespace) -> Array:
        """The sum of `omega_terms`, less the affine function that makes it 0 at every vertex: no term is to be normalised."""
        zero = xp.zeros_like(q[..., :1])
        base = self.omega_terms(zero, xp)
        rise = self.omega_terms(zero + 1.0, xp) - base
        return total(self.omega_terms(q, xp) - base - rise * q, xp)

    def omega_slope(self, q: Array, xp: Namespace) -> Array:
        return self.slope(safe(q, q > 0, 1.0, xp), xp)


class RatioMap(Mapping):
    """`p_i = u(x_i) / sum_j u(x_j)` for a non-negative function u; `J^T g = u'/Z * (g - <p, g>)`.

    A member gives `weights`, which returns u and its derivative. For a function of your own without a class see `Ratio`.

    >>> @dataclasses.dataclass(frozen=True, eq=False)
    ... class Softplus(anymax.RatioMap):
    ...     name = "softplus"
    ...     facts = anymax.Facts(monotone=True, shift_invariant=False, sparse=False, has_potential=False)
    ...     def weights(self, x, keep, xp): return xp.logaddexp(x, 0.0 * x), 1.0 / (1.0 + xp.exp(-x))
    >>> anymax.apply(Softplus(), [2.0, 0.0, -2.0]).round(3)
    array([0.722, 0.235, 0.043])
    """

    @abstractmethod
    def weights(self, x: Array, keep: Array, xp: Namespace) -> tuple[Array, Array]:
        """(u(x), u'(x)), both times any positive factor that is constant in the row and taken as a constant."""

    def _parts(self, x: Array, xp: Namespace) -> tuple[Array, Array, Array, Array]:
        y, keep, poisoned = finite_scores(x, xp)
        u, du = self.weights(y, keep, xp)
        u, du = (xp.where(keep, a, xp.zeros_like(y)) for a in (u, du))
        z = total(u, xp)
        z = xp.where(z == 0, xp.ones_like(z), z)
        return u / z, du / z, keep, poisoned

    def forward(self, x: Array, xp: Namespace) -> Array:
        p, _, keep, poisoned = self._parts(x, xp)
        return finish(p, keep, poisoned, xp)

    def vjp(self, x: Array, p: Array, g: Array, xp: Namespace) -> Array:
        _, du, keep, poisoned = self._parts(x, xp)
        return finish(du * (g - dot(p, g, xp)), keep, poisoned, xp)

    def jvp(self, x: Array, p: Array, v: Array, xp: Namespace) -> Array:
        _, du, keep, poisoned = self._parts(x, xp)
        w = xp.where(keep, du * v, xp.zeros_like(v))
        return finish(w - p * total(w, xp), keep, poisoned, xp)


def _brief(value: Any) -> str:
    return f"{list(value.shape)} of each row" if is_array(value) else f"{value:g}"


def row_top(x: Array, keep: Array, xp: Namespace) -> Array:
    """The maximum of the kept entries, [..., 1], and 0 for a row with none."""
    high = top(xp.where(keep, x, -math.inf * xp.ones_like(x)), xp)
    return xp.where(high > -math.inf, high, xp.zeros_like(high))
