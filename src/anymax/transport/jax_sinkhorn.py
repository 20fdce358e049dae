"""Sinkhorn of JAX arrays: one compiled program for each shape and number of iterations, or the limit."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from .._array import Array, stop_gradient
from . import plain
from .assignment import assignment
from .problem import Given, Problem, problem


def plan(given: Given, iterations: int | None) -> Array:
    """P with its derivatives; the checks read the sums, so they come before the program."""
    posed = problem(given, jnp, balanced=iterations is None)
    if iterations is not None:
        return _steps(posed, iterations)
    held, left = _converged(Problem(*map(stop_gradient, posed)))
    return _differentiable(posed, plain.warned(held, left, posed.z))


_converged = jax.jit(functools.partial(plain.converged, xp=jnp))
_differentiable = jax.jit(functools.partial(plain.differentiable, xp=jnp))
_steps = jax.jit(functools.partial(plain.steps, xp=jnp), static_argnums=(1,))


def assigned(x: Array) -> Array:
    """The assignment with the largest total for each matrix, computed by the host, in programs too."""
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda a: assignment(np.asarray(a)).astype(x.dtype), shape, x, vmap_method="broadcast_all")
