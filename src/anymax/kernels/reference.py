"""The reference engine: the maps' own array-API code. It computes every call."""

from __future__ import annotations

from typing import Any

from .._array import (
    Array,
    floating,
    in_blocks,
    is_jax,
    namespace,
    poison,
    quiet,
    takes_blocks,
    upcast,
)
from .._core.mapping import Mapping
from .._core.parameters import lost_rows, sound
from .._core.separable import Separable
from .engine import Engine

_FOLLOWS = {"loss": "a formula of p", "index_loss": "a formula of p", "log_vjp": "follows from log p"}


class Reference(Engine):
    name = "reference"

    def refuse(self, op: str, mapping: Mapping, x: Any) -> str | None:
        return None

    def forward(self, mapping: Mapping, x: Array, mask: Array | None = None, out: Array | None = None) -> Array:
        return _in_blocks(mapping, x) if _takes_blocks(mapping, x) else _p_of(mapping, mapping.forward, x)

    def log_forward(self, mapping: Mapping, x: Array) -> Array | None:
        return _in_compute_dtype(_of_sound(mapping, mapping.log_forward), x)

    def differentiable(self, mapping: Mapping, x: Array, held: Array | None = None) -> Array:
        return _p_of(mapping, lambda x, xp: mapping.differentiable(x, xp, held), x)

    def vjp(self, mapping: Mapping, x: Array, p: Array, g: Array, saved: Any = None) -> Array:
        return _in_compute_dtype(mapping.vjp, x, p, g)

    def jvp(self, mapping: Mapping, x: Array, p: Array, v: Array) -> Array:
        return _in_compute_dtype(mapping.jvp, x, p, v)

    def param_jvp(self, mapping: Mapping, name: str, x: Array, p: Array, v: Array) -> Array:
        """The change of p where a parameter changes by v; `Mapping.param_jvp`."""
        p = self._unrounded(mapping, x, p)
        return _in_compute_dtype(lambda x, p, v, xp: mapping.param_jvp(name, x, p, v, xp), x, p, v)

    def slope(self, mapping: Mapping, name: str, x: Array, p: Array, g: Array, saved: Any = None) -> Array:
        xp = namespace(p)
        with quiet(p):
            p = self._unrounded(mapping, x, p)
            return mapping.param_vjp(name, upcast(x, xp), upcast(p, xp), upcast(g, xp), xp)

    def _unrounded(self, mapping: Mapping, x: Array, p: Array) -> Array:
        """p, computed again where half precision has rounded that of a map whose derivative asks which classes have their bound."""
        wide = upcast(x, namespace(x))
        return self.differentiable(mapping, wide) if mapping.per_class and wide.dtype != p.dtype else p

    def loss_slope(self, mapping: Mapping, name: str, x: Array, p: Array) -> Array:
        """The derivative of `loss` by a parameter, float32 or float64; `Mapping.loss_slope`."""
        xp = namespace(p)
        with quiet(p):
            return mapping.loss_slope(name, upcast(x, xp), upcast(p, xp), xp)

    def plan(self, op: str, mapping: Mapping, x: Array) -> str | None:
        """What p and its gradient cost in array code, and from what the rest follows; XLA compiles that of JAX."""
        if op not in ("forward", "vjp"):
            plain = op == "log_forward" and type(mapping).log_forward is Mapping.log_forward
            return "the logarithm of p" if plain else _FOLLOWS.get(op, "a formula")
        if is_jax(x):
            return "XLA compiles the formula under jit"
        if mapping.iterative:
            return "iterates, 20 to 1,000 times a kernel's time"
        return "5 to 100 times a kernel's time"

    def loss(self, mapping: Mapping, x: Array, p: Array, y: Array) -> Array:
        out = _in_compute_dtype(mapping.loss, x, p, y)
        bad = lost_rows(mapping) if mapping.params() else None
        return out if bad is None else poison(out, bad, namespace(out))

    def threshold(self, mapping: Mapping, x: Array) -> Array:
        xp = namespace(x)
        with quiet(x):
            return mapping.threshold(sound(mapping, upcast(x, xp), xp), xp)


def _p_of(mapping: Mapping, method: Any, x: Array) -> Array:
    """p(x) by a method of the map."""
    return _in_compute_dtype(_of_sound(mapping, method), x, cast=mapping.in_dtype_of)


def _of_sound(mapping: Mapping, method: Any) -> Any:
    """A method of the map, whose result is NaN in rows with a parameter that is out of its range."""
    return (lambda x, xp: method(sound(mapping, x, xp), xp)) if mapping.params() else method


def _in_compute_dtype(method: Any, x: Array, *others: Array, cast: Any = None) -> Array:
    xp = namespace(x)
    x = floating(x, xp)
    with quiet(x):
        out = method(upcast(x, xp), *(upcast(a, xp) for a in others), xp)
    if out is None or out.dtype == x.dtype:
        return out
    return cast(out, x, xp) if cast else xp.astype(out, x.dtype)


def _takes_blocks(mapping: Mapping, x: Array) -> bool:
    """True for a solver, which iterates over the rows."""
    return isinstance(mapping, Separable) and takes_blocks(x, *mapping.params().values())


def _in_blocks(mapping: Mapping, x: Array) -> Array:
    """p(x), some rows at a time. A row does not depend on the others."""
    params = mapping.params()

    def of_block(rows: Array, *values: Array) -> Array:
        part = mapping.laid_out(**dict(zip(params, values, strict=True)))
        return _p_of(part, part.forward, rows)

    return in_blocks(of_block, x, *params.values())


ENGINE = Reference()
