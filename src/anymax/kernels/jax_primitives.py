"""Primitives of JAX: those that the compiled library computes on a CPU (csrc/doors/xla_ffi.cpp), and those linear in an operand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .._array import Array
from .._core.mapping import Mapping
from .._core.static import Static
from .._random.nodes import node_count
from . import library, native
from .link import CODES, Link
from .linked import found_link

Function = Callable[..., Any]
# JAX's cache of executables on disk refers to the handler by this name, so it changes with the library's interface
TARGET = f"anymax_{library.ABI}"


@functools.cache
def problem() -> str | None:
    """Registers the handler with XLA; returns why XLA can't call the library, or None."""
    engine = native.load()
    if isinstance(engine, str):
        return engine
    try:
        jax.ffi.register_ffi_target(TARGET, engine.xla_handler(), platform="cpu")
        jax.ffi.register_ffi_target_as_batch_partitionable(TARGET)
    except Exception as error:
        return f"XLA refused the library's handler ({str(error).splitlines()[0]})"
    return None


def _define(name: str, shapes: Function, formula: Function, batch: Function | None) -> tuple[Primitive, Any]:
    """A primitive with several results, and the lowering of its formula. A batch is computed as one more leading axis, unless `batch`
    is given."""
    primitive = Primitive(name)
    primitive.multiple_results = True

    def rows(operands: Any, dims: Any, **facts: Any) -> Any:
        out = primitive.bind(*to_front(operands, dims), **facts)
        return out, [0] * len(out)

    lowered: Any = mlir.lower_fun(formula, multiple_results=True)
    primitive.def_impl(_outside_of_jit(primitive))
    primitive.def_abstract_eval(shapes)
    batching.primitive_batchers[primitive] = rows if batch is None else functools.partial(batch, primitive)
    mlir.register_lowering(primitive, lowered)
    return primitive, lowered


def by_library(
    name: str, shapes: Function, formula: Function, attributes: Function, batch: Function | None = None,
    sharding: Function = lambda ctx: None,
) -> Primitive:  # fmt: skip
    """A primitive that the library's handler computes on a CPU, with these attributes; the formula does elsewhere, and for `jax.export`,
    whose programs must run without the library."""
    primitive, lowered = _define(name, shapes, formula, batch)

    def on_cpu(ctx: Any, *operands: Any, **facts: Any) -> Any:
        if getattr(ctx.module_context.lowering_parameters, "for_export", False):
            return lowered(ctx, *operands, **facts)
        rule = jax.ffi.ffi_lowering(TARGET, extra_attributes=sharding(ctx))
        return rule(ctx, *operands, **attributes(**facts))

    mlir.register_lowering(primitive, on_cpu, platform="cpu")
    return primitive


def link_for(mapping: Mapping, x: Array) -> Link:
    """The link of a map as a constant of programs for scores like x; the map's parameters are operands."""
    link = found_link(mapping)
    return link._replace(params=None, nodes=node_count(link.nodes, x))


def handler_attributes(op: str, static: Static, link: Link) -> dict[str, Any]:
    """The attributes of the handler for an operation of a map; `static` names the parameters that are operands."""
    codes = {"op": CODES["index_loss" if op == "index_loss_slope" else op], "map": link.code, "noise": link.noise}
    numbers = {**codes, "nodes": link.nodes, "per_row": len(static.names)}
    return {**{key: np.int64(value) for key, value in numbers.items()}, "param": np.float64(link.param)}


def linear_primitive(
    name: str, at: int, shape: Function, value: Function, plain: Function, batch: Function | None = None
) -> Callable[..., Array]:
    """A function with one result, which is linear in operand `at`. The keyword `transposed` swaps that operand and the result.

    `value` computes it. `plain` does so by operations that JAX differentiates, for the derivatives in the other operands.
    """
    primitive, _ = _define(
        name, lambda *a, **facts: [shape(*a, **facts)], lambda *a, **facts: [value(*a, **facts)], batch
    )

    def with_vector(operands: Any, vector: Any, facts: dict[str, Any]) -> Any:
        return primitive.bind(*operands[:at], vector, *operands[at + 1 :], **facts)[0]

    def jvp(primals: Any, tangents: Any, **facts: Any) -> Any:
        total = tangents[at] if is_zero(tangents[at]) else with_vector(primals, tangents[at], facts)
        moved = [i for i, tangent in enumerate(tangents) if i != at and not is_zero(tangent)]
        if moved:

            def of_moved(*values: Array) -> Array:
                given = dict(zip(moved, values))
                return plain(*(given.get(i, a) for i, a in enumerate(primals)), **facts)

            change = jax.jvp(of_moved, [primals[i] for i in moved], [tangents[i] for i in moved])[1]
            total = ad.add_tangents(total, change)
        return primitive.bind(*primals, **facts), [total]

    def transpose(cotangents: Any, *operands: Any, transposed: bool, **facts: Any) -> Any:
        (cotangent,), out = cotangents, [None] * len(operands)
        if not is_zero(cotangent):
            cotangent = with_vector(operands, cotangent, {"transposed": not transposed, **facts})
        return [*out[:at], cotangent, *out[at + 1 :]]

    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    return lambda *operands, **facts: primitive.bind(*operands, **facts)[0]


def is_zero(tangent: Any) -> bool:
    return isinstance(tangent, (SymbolicZero, ad.Zero))


def _outside_of_jit(primitive: Any) -> Any:
    """An eager implementation of a primitive, which runs it as a compiled program.

    It compiles under `jax.disable_jit` too, and checks `debug_nans` itself, since either would otherwise call the primitive again,
    without end.
    """

    @functools.cache
    def compiled(**facts: Any) -> Any:
        return jax.jit(functools.partial(primitive.bind, **facts))

    def run(*operands: Array, **facts: Any) -> Any:
        with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
            out = compiled(**facts)(*operands)
        debugged = jax.config.jax_debug_nans  # type: ignore[attr-defined]
        if debugged and any(bool(jax.numpy.isnan(a).any()) for a in jax.tree.leaves(out)):
            raise FloatingPointError(f"invalid value (nan) encountered in {primitive.name}")
        return out

    return run


def to_front(operands: Any, dims: Any) -> list[Array]:
    """The operands of vmap with the mapped axis first in each."""
    size = next(a.shape[d] for a, d in zip(operands, dims) if d is not None)
    return [
        jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(operands, dims)
    ]
