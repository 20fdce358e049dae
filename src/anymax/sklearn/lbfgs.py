"""L-BFGS for linear models: few products with the data, cheap evaluations along a line.

The inner products of the two-loop recursion are kept in small tables, so that an iteration reads its m pairs of vectors only
twice. Nocedal 1980; Nocedal and Wright 2006, chapters 3 and 7; Hager and Zhang 2005 for steps so small that rounding hides the
decrease.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

MEMORY = 10  # pairs
_ARMIJO, _CURVATURE = 1e-4, 0.5
_LOOKS = 25  # evaluations along one line
_IDLE = 30  # iterations that may pass without a gain above rounding
_REFIT, _AGAIN = 20, 3  # iterations before new coordinates are chosen, and the factor to each next time


class Problem(Protocol):
    """A function with a current point, which moves along lines; vectors are flat arrays."""

    value: float

    def gradient(self) -> np.ndarray:
        """The gradient at the point, in the coordinates of the directions; a new array."""
        ...

    def steepest(self) -> float:
        """The largest entry of the gradient, in the user's coordinates; known after `gradient`."""
        ...

    def aim(self, direction: np.ndarray) -> None:
        """Set the direction of the line for `look` and `move`."""
        ...

    def look(self, step: float) -> tuple[float, float]:
        """The value at `step` on the line and its derivative along it."""
        ...

    def move(self, step: float) -> None:
        """Move to the point of the last look, which was at `step`."""
        ...

    def refit(self) -> bool:
        """Choose new coordinates in which the function is well conditioned at the point; False if it keeps the old ones."""
        ...


class Outcome(NamedTuple):
    iterations: int
    converged: bool
    exhausted: bool  # rounding prevents a further decrease


def minimize(
    problem: Problem, tol: float, max_iter: int, report: Callable[[int, float, float], Any] | None = None
) -> Outcome:
    """Iterate until no entry of the gradient exceeds `tol`, nor the expected decrease `tol` times the value."""
    g = problem.gradient()
    pairs, refit = _Pairs(g), _REFIT
    lowest, flattest, idle = math.inf, math.inf, 0
    for k in range(max_iter):
        if report is not None:
            report(k, problem.value, problem.steepest())
        if k == refit:
            refit *= _AGAIN
            if problem.refit():
                pairs.forget()
                g = problem.gradient()
        direction, slope = pairs.direction(g)
        if problem.steepest() <= tol and -0.5 * slope <= tol * abs(problem.value):
            return Outcome(k, True, False)
        step = _step(problem, direction, slope)
        if step is None and pairs.count:  # rounding may have spoilt the pairs: try once without them
            pairs.forget()
            direction, slope = pairs.direction(g)
            step = _step(problem, direction, slope)
        if step is None:
            return Outcome(k, False, True)
        problem.move(step)
        last, g = g, problem.gradient()
        value, worst = problem.value, problem.steepest()
        gains = value < lowest - np.finfo(g.dtype).eps * abs(value) or worst < 0.9 * flattest
        idle = 0 if gains else idle + 1
        lowest, flattest = min(lowest, value), min(flattest, worst)
        if idle == _IDLE and worst > tol:
            return Outcome(k + 1, False, True)
        pairs.add(step, slope, last, g)
    if report is not None:
        report(max_iter, problem.value, problem.steepest())
    _, slope = pairs.direction(g)
    return Outcome(max_iter, problem.steepest() <= tol and -0.5 * slope <= tol * abs(problem.value), False)


def _step(problem: Problem, direction: np.ndarray, slope: float) -> float | None:
    if not slope < 0:
        return None
    problem.aim(direction)
    return search(problem.look, problem.value, slope, 1.0, float(np.finfo(direction.dtype).eps))


def search(
    look: Callable[[float], tuple[float, float]], value: float, slope: float, step: float, eps: float = 2.3e-16
) -> float | None:
    """The last step evaluated: it satisfies the strong Wolfe conditions, or at least lowers the value; None if no step does.

    Between two ends the next step is where the secant of the derivative is 0: the functions here are convex or nearly so.
    """
    low, slope_low, high, slope_high = 0.0, slope, math.inf, math.nan
    slack = 4 * eps * abs(value)  # the rounding error of the value, below which the derivative alone decides
    drops = 0  # moves of the upper end in a row: beside a kink the secant alone would hardly move it
    for _ in range(_LOOKS):
        f, d = look(step)
        finite = math.isfinite(f) and math.isfinite(d)
        falls = finite and (
            f <= value + _ARMIJO * step * slope or (f <= value + slack and d <= (2 * _ARMIJO - 1) * slope)
        )
        if falls and abs(d) <= -_CURVATURE * slope:
            return step
        if falls and d < 0:
            drops = 0
            before, slope_before = low, slope_low
            low, slope_low = step, d
            if high == math.inf:
                bend = (d - slope_before) / (step - before)
                ahead = step - d / bend if bend > 0 else math.inf
                step = min(max(ahead, 2.0 * step), 10.0 * step)
                continue
        else:
            drops += 1
            high, slope_high = step, d if finite else math.nan
        width = high - low
        if slope_high > 0:
            guess = low - slope_low * width / (slope_high - slope_low)
            step = min(max(guess, low + 0.1 * width), high - (0.1 if drops < 4 else 0.9) * width)
        else:
            step = low + (0.5 if finite else 0.1) * width
        if not low < step < high:
            break
    if low > 0:  # lower than the start, though not flat enough
        look(low)
        return low
    return None


class _Pairs:
    """The last steps and changes of the gradient, as rows, and their inner products."""

    def __init__(self, like: np.ndarray) -> None:
        self.s = np.empty((MEMORY, like.size), like.dtype)  # directions; the step itself is `steps` times as long
        self.y = np.empty((MEMORY, like.size), like.dtype)
        self.steps = np.zeros(MEMORY)
        self.sy = np.zeros((MEMORY, MEMORY))  # sy[i, j] = s_i . y_j for pairs j no older than i
        self.yy = np.zeros((MEMORY, MEMORY))
        self.sg, self.yg = np.zeros(MEMORY), np.zeros(MEMORY)  # inner products with the gradient
        self.forget()

    def forget(self) -> None:
        self.count, self.slot = 0, 0
        self.order: list[int] = []  # slots, the oldest first

    def direction(self, g: np.ndarray) -> tuple[np.ndarray, float]:
        """Minus the approximate inverse Hessian times g, in the slot of the next pair, and its inner product with g."""
        self.slot = self.order[0] if self.count == MEMORY else self.count
        out = self.s[self.slot]
        if not self.count:
            np.negative(g, out=out)
            return out, -float(np.dot(g, g))
        order = self.order
        upper, yy = np.triu(self.sy[order][:, order]), self.yy[order][:, order]
        # the first loop, a_i = s_i . (g - sum over newer j of a_j y_j) / s_i . y_i
        a = np.linalg.solve(upper, self.sg[order])
        scale = upper[-1, -1] / yy[-1, -1]
        b = upper.diagonal() * a - scale * (self.yg[order] - yy @ a)
        along = np.linalg.solve(upper.T[::-1, ::-1], b[::-1])[::-1]  # the second loop, a_i - b_i: the coefficients of s
        coefficients, back = np.zeros(MEMORY), np.zeros(MEMORY)
        coefficients[order] = -along * self.steps[order]
        back[order] = scale * a
        used = self.count
        new = coefficients[:used].astype(g.dtype) @ self.s[:used]  # computed before the slot is overwritten
        new += back[:used].astype(g.dtype) @ self.y[:used]
        new -= scale * g if scale != 1 else g
        out[:] = new
        return out, float(np.dot(out, g))

    def add(self, step: float, slope: float, last: np.ndarray, g: np.ndarray) -> None:
        """Store the pair of the last step. Without positive curvature, which only rounding can cause, forget all pairs."""
        k = self.slot
        order = [i for i in self.order if i != k]
        before_s, before_y = self.sg.copy(), self.yg.copy()
        self.steps[k] = step
        np.subtract(g, last, out=self.y[k])
        used = max(self.count, k + 1)
        self.sg[:used] = (self.s[:used] @ g).astype(np.float64) * self.steps[:used]
        self.yg[:used] = self.y[:used] @ g
        curvature = float(self.sg[k]) - step * slope
        square = float(np.dot(self.y[k], self.y[k]))
        if not (curvature > 0 and square > 0):
            self.forget()
            return
        self.sy[order, k] = self.sg[order] - before_s[order]
        self.yy[order, k] = self.yy[k, order] = self.yg[order] - before_y[order]
        self.sy[k, k], self.yy[k, k] = curvature, square
        self.order = [*order, k]
        self.count = len(self.order)
