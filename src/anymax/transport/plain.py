"""Sinkhorn's iteration in array-API code: n steps in the log domain, the limit, and the derivatives of the limit.

With potentials f of rows and g of columns, `P = exp(z + f + g)`. A step sets f so that the rows have their sums, then g so that the
columns have theirs. The last half step is a softmax along the columns, so their sums are exact at any scale of the scores.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

from .._array import Array, Namespace, device_of, finish, is_double, known_largest, loop, repeat, stop_gradient
from .problem import Problem

POTENTIALS, FACTORS, NEWTON = 2000, 100, 100  # the most rounds of each phase of `limit`
LEVEL = 50  # the most rounds at one temperature on the way to that of the call
_NARROW, _COOLING = 30.0, 2.0
_NEAR = 1e-2  # the change of a potential from which on factors of the entries are enough


def tolerance(z: Array) -> float:
    """The largest relative error of a row's sum at which the iteration has converged."""
    return 1e-12 if is_double(z) else 4e-7


def _sum_of_exp(p: Problem, other: Array, axis: int, xp: Namespace) -> tuple[Array, Array, Array]:
    """(e, sum, high): exp(z + other - high) of kept entries, their sum along the axis, 1 where it has no entry."""
    s = p.z + other
    high = xp.max(xp.where(p.keep, stop_gradient(s), -math.inf * xp.ones_like(s)), axis=axis, keepdims=True)
    live = high > -math.inf
    high = xp.where(live, high, xp.zeros_like(high))
    e = xp.where(p.keep, xp.exp(xp.where(p.keep, s - high, xp.zeros_like(s))), xp.zeros_like(s))
    sums = xp.sum(e, axis=axis, keepdims=True)
    return e, xp.where(live, sums, xp.ones_like(sums)), high


def _potential(p: Problem, other: Array, axis: int, xp: Namespace) -> Array:
    """The potential that gives the sums along `axis`, 0 where there is nothing to sum."""
    mass = p.rows if axis == -1 else p.columns
    _, sums, high = _sum_of_exp(p, other, axis, xp)
    there = mass > 0
    return xp.where(there, xp.log(xp.where(there, mass, xp.ones_like(mass))) - high - xp.log(sums), xp.zeros_like(high))


def steps(p: Problem, iterations: int, xp: Namespace) -> Array:
    """P after so many steps, in operations that can be differentiated."""

    def step(g: Array) -> Array:
        return _potential(p, _potential(p, g, -1, xp), -2, xp)

    g = repeat(step, xp.zeros_like(p.z[..., :1, :]), iterations - 1)
    e, sums, _ = _sum_of_exp(p, _potential(p, g, -1, xp), -2, xp)
    return finish(p.columns * e / sums, p.keep, p.poisoned, xp)


# -- the limit ----------------------------------------------------------------------------------------------------------------------


def limit(p: Problem, xp: Namespace) -> Array:
    """P at convergence, a constant."""
    return warned(*converged(Problem(*map(stop_gradient, p)), xp), p.z)


def converged(p: Problem, xp: Namespace) -> tuple[Array, Array]:
    """(P at convergence, by how much a row's sum is still wrong): first potentials in the log domain, then factors of entries that are
    fixed, which round less. Where the iteration is slow, as at low temperatures, Newton's method ends it.
    """
    there, one = p.rows > 0, xp.ones_like(p.z[..., :, :1])
    begin = xp.where(p.poisoned, xp.zeros_like(one[..., :1, :]), xp.ones_like(one[..., :1, :]))

    def largest(change: Array) -> Array:
        return xp.max(xp.where(there, xp.abs(change), xp.zeros_like(change)), axis=-2, keepdims=True)

    def potentials(state: tuple) -> tuple:
        f, g, left, hot, rounds = state
        at = p._replace(z=p.z / hot)
        new_f = _potential(at, g, -1, xp)
        new_g = _potential(at, new_f, -2, xp)
        going = left > _NEAR
        now = largest(new_f - f)
        cools = (hot > 1.0) & ((now <= _NEAR) | (rounds >= LEVEL))
        colder = xp.where(cools, xp.where(hot > _COOLING, hot / _COOLING, xp.ones_like(hot)), hot)
        new_f, new_g, rounds = (
            (hot / colder) * new_f,
            (hot / colder) * new_g,
            xp.where(cools, 0.0 * rounds, rounds + 1.0),
        )
        now = xp.where(colder > 1.0, xp.ones_like(now), xp.where(cools, xp.ones_like(now), now))
        return xp.where(going, new_f, f), xp.where(going, new_g, g), xp.where(going, now, left), colder, rounds

    # a temperature at which the scores of a matrix lie within _NARROW, which then falls to 1: a good start at low temperatures
    hot = -xp.min(p.z, axis=(-2, -1), keepdims=True) / _NARROW
    hot = xp.where(hot > 1.0, hot, xp.ones_like(hot))
    f, g = xp.zeros_like(one), xp.zeros_like(p.z[..., :1, :])
    f, g, *_ = loop(lambda s: s[2] > _NEAR, potentials, (f, g, begin, hot, xp.zeros_like(hot)), POTENTIALS, 100)
    s = p.z + f + g
    entries = xp.where(p.keep, xp.exp(xp.where(p.keep, s, xp.zeros_like(s))), xp.zeros_like(s))
    enough = tolerance(p.z)

    def columns_of(u: Array) -> Array:
        """The factors of columns that go with factors u of rows."""
        return _over(p.columns, xp.sum(entries * u, axis=-2, keepdims=True), xp)

    def wrong(u: Array) -> tuple[Array, Array]:
        """The factors of rows that come next, and by how much they differ from u."""
        new = _over(p.rows, xp.sum(entries * columns_of(u), axis=-1, keepdims=True), xp)
        return new, largest(new / xp.where(there, u, one) - 1.0)

    def factors(state: tuple) -> tuple:
        u, left = state
        new, now = wrong(u)
        going = left > enough
        return xp.where(going, new, u), xp.where(going, now, left)

    def newton(state: tuple) -> tuple:
        u, left = state
        plan = entries * u * columns_of(u)
        f, _ = _solver(plan, xp)(p.rows - xp.sum(plan, axis=-1, keepdims=True), xp.zeros_like(p.columns))
        most = largest(f)
        f = f / xp.where(most > 1.0, most, xp.ones_like(most))
        new = u * xp.exp(f)
        going = (left > enough) & xp.all(xp.isfinite(new), axis=-2, keepdims=True)
        u = xp.where(going, new, u)
        return u, xp.where(going, wrong(u)[1], left)

    def unfinished(state: tuple) -> Array:
        return state[1] > enough

    state = loop(unfinished, factors, (xp.where(there, one, xp.zeros_like(one)), begin), FACTORS, 100)
    u, left = loop(unfinished, newton, state, NEWTON, 10)
    return finish(entries * u * columns_of(u), p.keep, p.poisoned, xp), left


def warned(found: Array, left: Array, z: Array) -> Array:
    """P as it is, after a warning where it has not converged."""
    most = known_largest(left)
    if most is not None and most > 2.5 * tolerance(z):
        warnings.warn(
            f"Sinkhorn(iterations=None): the sums of some rows are still wrong by {most:.1e} of their value; raise the "
            "temperature, give a number of iterations, or check that the mask leaves a way to reach these sums",
            RuntimeWarning,
            stacklevel=2,
        )
    return found


def _over(mass: Array, sums: Array, xp: Namespace) -> Array:
    there = sums > 0
    return xp.where(there, mass / xp.where(there, sums, xp.ones_like(sums)), xp.zeros_like(sums))


def differentiable(p: Problem, held: Array, xp: Namespace) -> Array:
    """The limit, `held`, with its first and second derivatives in scores and sums.

    Its value is that of `held`. Two steps of Newton's method for the potentials, with the matrix of their equations held constant, carry
    the derivatives: each step makes one order exact.
    """
    size = xp.where(p.poisoned, xp.zeros_like(held), held)
    size = xp.where(p.keep, size, xp.zeros_like(size))
    solve = _solver(size, xp)
    entries = size * xp.exp(p.z - stop_gradient(p.z))
    out = entries
    f, g = 0.0, 0.0
    for _ in range(2):
        a, b = solve(
            _changed(p.rows - xp.sum(out, axis=-1, keepdims=True)),
            _changed(p.columns - xp.sum(out, axis=-2, keepdims=True)),
        )
        f, g = f + a, g + b
        out = entries * xp.exp(f + g)
    return finish(out, p.keep, p.poisoned, xp)


def slopes(p: Problem, held: Array, g: Array, xp: Namespace) -> tuple[Array, Array, Array]:
    """The gradients of z, rows and columns from the gradient g of the limit, `held`."""
    size = xp.where(p.keep, held, xp.zeros_like(held))
    weighed = xp.where(size > 0, size * g, xp.zeros_like(size))
    rows, columns = _solver(size, xp)(xp.sum(weighed, axis=-1, keepdims=True), xp.sum(weighed, axis=-2, keepdims=True))
    return weighed - size * (rows + columns), rows, columns


def _changed(a: Array) -> Array:
    """0 with the derivatives of a."""
    return a - stop_gradient(a)


def _solver(size: Array, xp: Namespace) -> Callable[[Array, Array], tuple[Array, Array]]:
    """`solve(r, c)`: potentials f, g with `sum_j P (f + g) = r`, `sum_i P (f + g) = c`, by an inverse as large as the shorter side.

    The equations have a solution for each part of the kept entries that is connected, up to a constant. The common constant is fixed by
    adding its direction to the matrix, those of other parts by a multiple of the identity as small as rounding.
    """
    if size.shape[-1] > size.shape[-2]:
        turned = _solver(xp.matrix_transpose(size), xp)

        def solve_turned(r: Array, c: Array) -> tuple[Array, Array]:
            b, a = turned(xp.matrix_transpose(c), xp.matrix_transpose(r))
            return xp.matrix_transpose(a), xp.matrix_transpose(b)

        return solve_turned
    rows, columns = xp.sum(size, axis=-1, keepdims=True), xp.sum(size, axis=-2, keepdims=True)
    total = xp.sum(rows, axis=-2, keepdims=True)
    total = xp.where(total > 0, total, xp.ones_like(total))
    least = 1e-30 * total  # a sum below it is that of entries that have underflowed
    by_row = _over(xp.ones_like(rows), xp.where(rows > least, rows, xp.zeros_like(rows)), xp)
    there = columns > least
    root = xp.where(there, columns, xp.ones_like(columns)) ** -0.5
    m = size.shape[-1]
    scaled = size * root
    q = xp.where(there, columns, xp.zeros_like(columns)) ** 0.5 / total**0.5
    eye = xp.eye(m, dtype=size.dtype, **device_of(size))
    eye = xp.reshape(eye, (1,) * (size.ndim - 2) + (m, m))
    tiny = (2.3e-16 if is_double(size) else 1.2e-7) * m
    matrix = (1.0 + tiny) * eye + xp.matrix_transpose(q) * q - xp.matrix_transpose(scaled) @ (by_row * scaled)
    inverse = stop_gradient(xp.linalg.inv(matrix))

    def solve(r: Array, c: Array) -> tuple[Array, Array]:
        right = (c - xp.sum(size * (r * by_row), axis=-2, keepdims=True)) * root
        g = (right @ inverse) * root
        f = (r - xp.sum(size * g, axis=-1, keepdims=True)) * by_row
        return f, g

    return solve
