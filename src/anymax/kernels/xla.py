"""The compiled kernels as one primitive of JAX.

On a CPU it is lowered to the library's FFI handler (`csrc/doors/xla_ffi.cpp`). On other devices, and for `jax.export`, whose programs must
run without this library, it is lowered to the reference engine.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from .._array import Array, dtype_name, eager, is_jax, namespace, upcast, wide_name
from .._core.mapping import Mapping
from .._core.static import Static
from .._random.nodes import node_count
from . import arrays, library, native
from .engine import BELOW, Engine, IndexLoss
from .link import CODES, WITHOUT_LOSS, Link, link_of
from .reference import ENGINE as reference


@functools.cache
def problem() -> str | None:
    """Registers the handler with XLA; returns why XLA can't call the library, or None."""
    import jax

    engine = native.load()
    if isinstance(engine, str):
        return engine
    try:
        jax.ffi.register_ffi_target(TARGET, engine.xla_handler(), platform="cpu")
        jax.ffi.register_ffi_target_as_batch_partitionable(TARGET)
    except Exception as error:
        return f"XLA refused the library's handler ({str(error).splitlines()[0]})"
    return None


# JAX's cache of executables on disk refers to the handler by this name, so it changes with the library's interface
TARGET = f"anymax_{library.ABI}"


class Xla(Engine):
    name = "xla"
    ops = ("forward", "vjp", "index_loss")
    compiled = True

    def refuse(self, op: str, mapping: Mapping, x: Any) -> str | None:
        if not is_jax(x):
            return f"it takes JAX arrays, these scores are of {type(x).__module__.split('.')[0]}"
        if op not in self.ops:
            return self.lacks(op)
        link = link_of(mapping)
        if isinstance(link, str):
            return link
        if op == "index_loss" and link.kind in WITHOUT_LOSS:
            return f"{link.kind} has no such operation"
        if dtype_name(x) not in arrays.DTYPES:
            return f"it takes float32, float64, float16 and bfloat16, not {dtype_name(x)}"
        if reason := arrays.refuse_width(x):
            return reason
        if eager(x) and any(device.platform != "cpu" for device in x.devices()):
            return "it takes arrays on the CPU, these are on another device"
        return problem()

    def forward(self, mapping: Mapping, x: Array, mask: Array | None = None, out: Array | None = None) -> Array:
        return _bind("forward", mapping, x)[0]

    def vjp(self, mapping: Mapping, x: Array, p: Array, g: Array, saved: Any = None) -> Array:
        return _bind("vjp", mapping, *((x, p, g) if mapping.needs_scores else (p, g)))[0]

    def index_loss(
        self,
        mapping: Mapping,
        x: Array,
        index: Array,
        *,
        save: bool,
        axis: int = -1,
        ignored: int = BELOW,
        reduction: str = "none",
    ) -> IndexLoss | None:
        plain = axis == -1 and ignored == BELOW and reduction == "none"
        return IndexLoss(*_bind("index_loss", mapping, x, index)) if plain else None

    def index_loss_grad(
        self,
        mapping: Mapping,
        x: Array,
        index: Array,
        scale: Array,
        saved: Any,
        *,
        axis: int = -1,
        ignored: int = BELOW,
        factor: float = 1.0,
    ) -> Array | None:
        plain = axis == -1 and ignored == BELOW and factor == 1.0
        return _bind("index_loss_grad", mapping, x, saved, index, scale)[0] if plain else None


ENGINE = Xla()


def _bind(op: str, mapping: Mapping, *operands: Array) -> list[Array]:
    link = link_of(mapping)
    assert not isinstance(link, str), link
    nodes = node_count(link.nodes, operands[0])
    facts = link._replace(params=None, nodes=nodes)
    return _primitive().bind(*_beside(operands, mapping.params()), op=op, static=Static(mapping), link=facts)


def _beside(operands: tuple[Array, ...], params: dict[str, Array]) -> tuple[Array, ...]:
    """The operands and the parameters, which are broadcast to one number per row."""
    if not params:
        return operands
    jnp = sys.modules["jax"].numpy
    x, wide = operands[0], wide_name(operands[0])
    return alike(*operands, *(jnp.broadcast_to(a, (*x.shape[:-1], 1)).astype(wide) for a in params.values()))


def alike(*arrays: Array) -> tuple[Array, ...]:
    """The arrays with one type: within shard_map, an array that varies over devices has another type than one that does not."""
    varying = [_varying(a) for a in arrays]
    every = frozenset().union(*varying)
    if all(axes == every for axes in varying):
        return arrays
    return tuple(_to_vary(a, tuple(every - axes)) if every - axes else a for a, axes in zip(arrays, varying))


def _to_vary(a: Array, axes: tuple[Any, ...]) -> Array:
    lax = sys.modules["jax"].lax
    return lax.pcast(a, axes, to="varying") if hasattr(lax, "pcast") else lax.pvary(a, axes)  # before JAX 0.8


def _varying(a: Array) -> frozenset[Any]:
    """The axes of the mesh along which shard_map knows that `a` may differ from device to device."""
    kind = getattr(sys.modules["jax"], "typeof", lambda a: None)(a)
    axes = getattr(kind, "vma", None)
    return getattr(getattr(kind, "manual_axis_type", None), "varying", frozenset()) if axes is None else axes


def to_front(operands: Any, dims: Any) -> list[Array]:
    """The operands of vmap with the mapped axis first in each."""
    jnp = sys.modules["jax"].numpy
    size = next(a.shape[d] for a, d in zip(operands, dims) if d is not None)
    return [
        jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(operands, dims)
    ]


def _formula(*operands: Array, op: str, static: Static, link: Link) -> list[Array]:
    """The primitive by the reference engine."""
    count = len(operands) - len(static.names)
    mapping = static.mapping(dict(zip(static.names, operands[count:])))
    x, *others = operands[:count]
    if op == "forward":
        return [reference.forward(mapping, x)]
    if op == "vjp":
        return [reference.vjp(mapping, x, *operands[count - 2 : count])]
    p = reference.forward(mapping, upcast(x, namespace(x)))
    if op == "index_loss":
        value = plain_loss(mapping, x, p, others[0])
        return [value, value]
    return [plain_slope(x, p, *others[1:])]


def one_hot(index: Array, x: Array) -> Array:
    """The target of each row as a distribution; zeros for an index below 0."""
    jax = sys.modules["jax"]
    return jax.nn.one_hot(index, x.shape[-1], dtype=wide_name(x))


def plain_loss(mapping: Mapping, x: Array, p: Array, index: Array, loss: Any = reference.loss) -> Array:
    """The loss of class indices by plain operations."""
    jnp = sys.modules["jax"].numpy
    y = one_hot(index, x)
    value = loss(mapping, upcast(x, jnp), p, y)[..., 0]
    value = jnp.where(jnp.any((y > 0) & (x == -jnp.inf), axis=-1), jnp.inf, jnp.where(value > 0, value, 0.0))
    high = jnp.max(x, axis=-1)
    poisoned = jnp.isnan(high) | (high == jnp.inf) | (index >= x.shape[-1])
    return jnp.where(index < 0, 0.0, jnp.where(poisoned, jnp.nan, value))


def plain_slope(x: Array, p: Array, index: Array, scale: Array) -> Array:
    """The gradient of `plain_loss`, times a factor for each row."""
    jnp = sys.modules["jax"].numpy
    index = index[..., None]
    slope = jnp.where(index >= x.shape[-1], jnp.nan, p - one_hot(index[..., 0], x))
    return jnp.where(index < 0, 0.0, scale[..., None] * slope).astype(x.dtype)


def _by_rows(ctx: Any) -> dict[str, Any] | None:
    """Attributes that allow both of XLA's partitioners to put rows on different devices, but not the classes of one row."""
    import jax
    from jax.interpreters import mlir

    arrays = (*ctx.avals_in, *ctx.avals_out)
    shapes = [a.shape for a in arrays]
    if not all(isinstance(size, int) for shape in shapes for size in shape):
        return None
    rows = len(shapes[0]) - 1
    words: dict[str, Any] = {"num_batch_dims": mlir.ir.StringAttr.get(str(rows))}
    out = {"mhlo.frontend_attributes": mlir.ir.DictAttr.get(words)}
    if not getattr(jax.config, "jax_use_shardy_partitioner", False):
        return out
    from jax.extend.mlir.dialects import sdy

    def axes(i: int) -> Any:
        """The axes of array i: all arrays share those of the rows, and its classes have their own."""
        own = [len(sizes)] if len(shapes[i]) > rows else []
        sizes.extend(shapes[i][rows:])
        return sdy.TensorMappingAttr.get([sdy.DimMappingAttr.get([k]) for k in (*range(rows), *own)])

    sizes, count = [*shapes[0][:-1]], len(ctx.avals_in)
    mapped = [axes(i) for i in range(len(arrays))]
    rule = sdy.OpShardingRuleAttr.get(sizes, mapped[:count], mapped[count:], is_custom=True)
    return {**out, "sdy.sharding_rule": rule}


def outside_of_jit(primitive: Any) -> Any:
    """An eager implementation of a primitive, which runs it as a compiled program.

    It compiles under `jax.disable_jit` too, and checks `debug_nans` itself, since either would otherwise call the primitive again,
    without end.
    """
    import jax

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


@functools.cache
def _primitive() -> Any:
    import jax
    import numpy as np
    from jax.extend.core import Primitive
    from jax.interpreters import batching, mlir

    primitive = Primitive("anymax")
    primitive.multiple_results = True

    def shapes(x: Any, *others: Any, op: str, **facts: Any) -> Any:
        if op != "index_loss":
            return [x.update(weak_type=False)]
        wide = np.dtype(wide_name(x))
        return [others[0].update(dtype=wide, weak_type=False)] * 2  # the index has the shape of the rows

    def batch(operands: Any, dims: Any, **facts: Any) -> Any:
        out = primitive.bind(*to_front(operands, dims), **facts)
        return out, [0] * len(out)

    formula = mlir.lower_fun(_formula, multiple_results=True)

    def on_cpu(ctx: Any, *operands: Any, op: str, static: Static, link: Link) -> Any:
        if getattr(ctx.module_context.lowering_parameters, "for_export", False):
            return formula(ctx, *operands, op=op, static=static, link=link)
        numbers = {"op": CODES[op], "map": link.code, "noise": link.noise, "nodes": link.nodes}
        attributes = {k: np.int64(v) for k, v in (*numbers.items(), ("per_row", len(static.names)))}
        rule = jax.ffi.ffi_lowering(TARGET, extra_attributes=_by_rows(ctx))
        return rule(ctx, *operands, param=np.float64(link.param), **attributes)

    primitive.def_impl(outside_of_jit(primitive))
    primitive.def_abstract_eval(shapes)
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, formula)
    mlir.register_lowering(primitive, on_cpu, platform="cpu")
    return primitive
