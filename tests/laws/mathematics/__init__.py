"""The checks of docs/mathematics.md: one function a statement, under the statement's name, one module a part of the page.

A check holds the statement to definitions that share no code with the library (`oracles`, SymPy, quadrature, finite differences,
brute force), and the library to the statement.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

CHECKS: dict[str, Callable[[], None]] = {}


def checks(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(check: Callable[[], None]) -> Callable[[], None]:
        assert name not in CHECKS, f"two checks of {name}"
        CHECKS[name] = check
        return check

    return register


def rows(n: int = 5, count: int = 20, spread: float = 1.5, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, spread, (count, n))


def simplex(n: int = 5, count: int = 200, seed: int = 1) -> np.ndarray:
    """Distributions inside the simplex, on its faces, and its vertices."""
    rng = np.random.default_rng(seed)
    q = rng.dirichlet(np.ones(n), count)
    q[::3] *= rng.uniform(size=q[::3].shape) < 0.5
    q[::3, 0] += q[::3].sum(-1) == 0
    return np.concatenate([q / q.sum(-1, keepdims=True), np.eye(n)])


def numbers(oracle: Callable, x: np.ndarray) -> np.ndarray:
    """An oracle of mpmath numbers on every row, as float64."""
    return np.array([[float(v) for v in oracle(row)] for row in np.atleast_2d(x)]).reshape(np.shape(x))


def gradient(f: Callable[[np.ndarray], float], x: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """Central differences of fourth order."""
    out = np.zeros_like(x)
    for i in range(len(x)):
        e = np.zeros_like(x)
        e[i] = step
        out[i] = (8 * (f(x + e) - f(x - e)) - (f(x + 2 * e) - f(x - 2 * e))) / (12 * step)
    return out


def differences(f: Callable[[np.ndarray], np.ndarray], x: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """The Jacobian [i, j] = df_i / dx_j, in the same way."""
    columns = []
    for j in range(len(x)):
        e = np.zeros_like(x)
        e[j] = step
        columns.append((8 * (f(x + e) - f(x - e)) - (f(x + 2 * e) - f(x - 2 * e))) / (12 * step))
    return np.stack(columns, axis=-1)


def lse(x: np.ndarray) -> float:
    return float(np.log(np.sum(np.exp(x))))


def subsets(n: int):
    """All non-empty sets of indices below n."""
    return itertools.chain.from_iterable(itertools.combinations(range(n), k) for k in range(1, n + 1))


def root(f: Callable[[float], float], low: float, high: float) -> float:
    """The root of a decreasing function by bisection."""
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if f(middle) > 0 else (low, middle)
    return 0.5 * (low + high)
