"""Sinkhorn of NumPy arrays, and of any other array that is not torch's or JAX': by an engine, or in array-API code."""

from __future__ import annotations

from .._array import Array, namespace
from ..kernels import engine_of, tasks
from . import plain
from .assignment import assignment
from .limit import limit
from .problem import Given, check_totals, problem


def plan(given: Given, iterations: int | None) -> Array:
    """P."""
    xp = namespace(given.x)
    if iterations is None:
        return limit(problem(given, xp, balanced=True), xp)
    task = tasks.Sinkhorn(given.rows, given.columns, iterations, given.temperature)
    engine = engine_of(tasks.SINKHORN, task, given.x)
    if engine is not None:
        check_totals(given, xp)
        return engine.sinkhorn(task, given.x)
    return plain.steps(problem(given, xp), iterations, xp)


def assigned(x: Array) -> Array:
    """The assignment with the largest total for each matrix."""
    return namespace(x).asarray(assignment(x), dtype=x.dtype)
