"""`Case`: a map with the rows on which the laws test it; and how a law says that it is broken."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .._array import Array, is_array
from .._core.facts import Facts
from .._core.mapping import Mapping
from ..functional import apply


class BrokenLaw(AssertionError):
    """A law of the contract does not hold; the message says where."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A map with test rows and helpers for the laws, in float64 on NumPy."""

    mapping: Mapping
    n: int
    seed: int

    def rows(self, count: int, sigma: float = 1.0, n: int | None = None, dtype: Any = np.float64) -> np.ndarray:
        rng = np.random.default_rng([self.seed, count, int(100 * sigma)])
        return (sigma * rng.standard_normal((count, self.n if n is None else n))).astype(dtype)

    def p(self, x: Array) -> np.ndarray:
        return np.asarray(apply(self.mapping, x))

    @property
    def facts(self) -> Facts:
        return self.mapping.facts

    @property
    def widths(self) -> tuple[int, ...]:
        """The numbers of classes to try: only `n` if a parameter has one value per class."""
        return (self.n,) if self.by_class else tuple(n for n in (1, 2, self.n, 63) if self._takes(n))

    def _takes(self, n: int) -> bool:
        try:
            self.mapping.check(n)
        except ValueError:
            return False
        return True

    @property
    def by_class(self) -> bool:
        return any(is_array(v) and v.ndim and v.shape[-1] != 1 for v in self.mapping.params().values())

    def smooth(self, count: int = 6, masked: int = 0) -> list[np.ndarray]:
        """Rows whose support does not change nearby, so that finite differences are derivatives; each has `masked` masked classes."""
        e = 1e-4 * np.eye(self.n)
        hidden = np.arange(self.n) % 3 < 1 if masked else np.zeros(self.n, bool)
        hidden = hidden & (np.cumsum(hidden) <= masked)

        def constant(x: np.ndarray) -> bool:
            p, most = self.p(np.concatenate([x[None], x + e, x - e])), self.ceiling(x)
            inside = (p > 0) & (p < most) if most is not None else p > 0
            return bool((inside == inside[0]).all())

        rows = np.where(hidden, -math.inf, np.concatenate([self.rows(count), self.rows(count, 0.3)]))
        return [x for x in rows if constant(x)]

    def ceiling(self, x: np.ndarray) -> Any:
        return self.mapping.ceiling(x, np)

    def slopes(self, function: Callable[[np.ndarray], Any], x: np.ndarray, h: float = 1e-5) -> np.ndarray:
        """d function / dx_j by central differences, with the classes last; `function` takes rows."""
        step = h * np.eye(len(x))
        out = np.asarray(function(np.concatenate([x + step, x - step]))).astype(np.float64)
        return np.moveaxis(out[: len(x)] - out[len(x) :], 0, -1) / (2 * h)


def need(condition: Any, words: str) -> None:
    """An error unless the condition holds everywhere."""
    if not bool(np.all(condition)):
        raise BrokenLaw(words)


def near(a: Any, b: Any, atol: float, words: str) -> None:
    """An error unless a and b are equal to `atol`."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    worst = float(np.max(np.abs(a - b), initial=0.0)) if a.shape == b.shape else math.inf
    need(worst <= atol, f"{words} (off by {worst:.3g}, allowed {atol:.3g})")
