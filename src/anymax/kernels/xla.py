"""The engine for JAX, imported without it: programs call the compiled library on a CPU, and elsewhere have the reference's operations."""

from __future__ import annotations

from typing import Any

from .._array import Array, dtype_name, eager, is_jax, on_cpu
from .._core.mapping import Mapping
from . import arrays, fused, order
from .engine import BELOW, Engine, IndexLoss
from .link import WITH_SLOPE, refuse_link
from .linked import found_link, link_of

# the kernels of maps that solve a row whole, and their engines
WHOLE: dict[str | None, Engine] = {**dict.fromkeys(order.KERNELS, order.ENGINE), fused.KERNEL: fused.ENGINE}


class Xla(Engine):
    name = "xla"
    ops = ("forward", "vjp", "index_loss", "slope")
    compiled = True

    def refuse(self, op: str, mapping: Mapping, x: Any) -> str | None:
        if not is_jax(x):
            return f"it takes JAX arrays, these scores are of {type(x).__module__.split('.')[0]}"
        if op not in self.ops:
            return self.lacks(op)
        if mapping.kernel in WHOLE:
            if op not in WHOLE[mapping.kernel].ops:
                return f"{mapping.name} has no such operation"
        elif reason := refuse_link(op, link_of(mapping)):
            return reason
        elif (link := found_link(mapping)).upper is not None:
            return f"it has no kernel for {link.kind}"
        if dtype_name(x) not in arrays.DTYPES:
            return f"it takes float32, float64, float16 and bfloat16, not {dtype_name(x)}"
        if reason := arrays.refuse_width(x):
            return reason
        if eager(x) and not on_cpu(x):
            return "it takes arrays on the CPU, these are on another device"
        from .jax_primitives import problem  # late: jax is loaded already, since x is its array

        return problem()

    def forward(self, mapping: Mapping, x: Array, mask: Array | None = None, out: Array | None = None) -> Array:
        return _bind("forward", mapping, x)[0]

    def vjp(self, mapping: Mapping, x: Array, p: Array, g: Array, saved: Any = None) -> Array:
        return _bind("vjp", mapping, *((x, p, g) if mapping.needs_scores else (p, g)))[0]

    def slope(self, mapping: Mapping, name: str, x: Array, p: Array, g: Array, saved: Any = None) -> Array:
        return _bind("slope", mapping, *((x, p, g) if mapping.kernel in WHOLE else (p, g)))[0]

    def index_loss(
        self, mapping: Mapping, x: Array, index: Array, *, save: bool, axis: int = -1, ignored: int = BELOW, reduction: str = "none",
        slope: bool = False,
    ) -> IndexLoss | None:  # fmt: skip
        plain = axis == -1 and ignored == BELOW and reduction == "none"
        if not plain:
            return None
        if slope and found_link(mapping).kind in WITH_SLOPE:
            value, tau, loss_slope = _bind("index_loss_slope", mapping, x, index)
            return IndexLoss(value, tau, slope=loss_slope)
        return IndexLoss(*_bind("index_loss", mapping, x, index))

    def index_loss_grad(
        self, mapping: Mapping, x: Array, index: Array, scale: Array, saved: Any, *, axis: int = -1, ignored: int = BELOW,
        factor: float = 1.0,
    ) -> Array | None:  # fmt: skip
        plain = axis == -1 and ignored == BELOW and factor == 1.0
        return _bind("index_loss_grad", mapping, x, saved, index, scale)[0] if plain else None


def _bind(op: str, mapping: Mapping, *operands: Array) -> list[Array]:
    if mapping.kernel in WHOLE:
        from . import xla_whole  # late: jax is loaded already

        return [xla_whole.bind(op, mapping, *operands)]
    from . import xla_rows  # late too

    return xla_rows.bind(op, mapping, *operands)


ENGINE = Xla()
