"""The limit of Sinkhorn's iteration: by the C++ engine where it can, and what it leaves unfinished by array code."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .._array import Array, Namespace, finish
from ..kernels import engine_of, tasks
from . import plain
from .problem import Problem

ROUNDS = 1000  # the most iterations of the engine; Newton's method of the array code is faster then


def limit(p: Problem, xp: Namespace) -> Array:
    """P at convergence, a constant."""
    x = xp.where(p.keep, p.z, -math.inf * xp.ones_like(p.z))
    task = tasks.Sinkhorn(p.rows[..., 0], p.columns[..., 0, :], ROUNDS, 1.0)
    engine = engine_of(tasks.SINKHORN_LIMIT, task, x)
    if engine is None:
        return plain.limit(p, xp)
    tolerance = plain.tolerance(p.z)
    found, left = engine.sinkhorn_limit(task, x, tolerance)
    slow = np.nonzero(left.reshape(-1) > tolerance)[0]
    if len(slow):
        at: Any = xp.asarray(slow)
        n, m = x.shape[-2:]
        each = [xp.broadcast_to(a, (*x.shape[:-2], *a.shape[-2:])) for a in p]
        some = Problem(*(xp.reshape(a, (-1, *a.shape[-2:]))[at] for a in each))
        flat = xp.reshape(found, (-1, n, m))
        flat[at] = plain.limit(some, xp)
        found = xp.reshape(flat, x.shape)
    return finish(found, p.keep, p.poisoned, xp)
