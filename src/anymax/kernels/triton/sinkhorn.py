"""Sinkhorn of many 4 x 4 matrices on a GPU, one a thread: the mixing matrices of hyper-connections."""

from __future__ import annotations

from typing import Any

from ..arrays import refuse_tensor


def refuse(x: Any, rows: Any, columns: Any, asked: str | None) -> str | None:
    """Why the kernels can't take these matrices; None if they can."""
    if asked not in (None, "triton"):
        return f"the engine {asked} is asked for"
    if tuple(x.shape[-2:]) != (4, 4):
        return f"on a GPU it takes matrices of 4 x 4, not {x.shape[-2]} x {x.shape[-1]}"
    if rows is not None or columns is not None:
        return "on a GPU it takes equal sums"
    return refuse_tensor(x, "cuda", ("float32",))


def run(x: Any, g: Any, iterations: int, temperature: float) -> Any:
    """P of the scores x [..., 4, 4], or with the gradient g of P that of x."""
    from . import sinkhorn_kernels  # late: loads Triton

    return sinkhorn_kernels.run(x.contiguous(), None if g is None else g.contiguous(), iterations, temperature)
