"""The solvers, our L-BFGS and SciPy's, and the warning where they do not converge."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy import optimize

from . import lbfgs
from .objective import Linear


def descend(model: Linear, solver: str, tol: float, max_iter: int, verbose: int) -> tuple[int, str | None]:
    """Move the model to its optimum; return the number of iterations, and a warning if it was not reached."""
    if solver == "lbfgs":
        iterations, converged, exhausted = lbfgs.minimize(model, tol, max_iter, say if verbose else None)
        worst = model.steepest()
    else:
        iterations, converged, exhausted, worst = _scipy(model, tol, max_iter, verbose)
    return iterations, None if converged else complaint_of(iterations, exhausted, worst, tol, model.w.dtype)


def _scipy(model: Linear, tol: float, max_iter: int, verbose: int) -> tuple[int, bool, bool, float]:
    """SciPy's L-BFGS-B, in the coordinates of W."""
    shape, dtype = model.w.shape, model.w.dtype

    def value(flat: np.ndarray) -> tuple[float, np.ndarray]:
        model.put(flat.reshape(shape).astype(dtype))
        return model.value, model.slope().reshape(-1).astype(np.float64)

    count = 0

    def callback(intermediate_result: Any) -> None:
        nonlocal count
        count += 1
        if verbose:
            say(count, float(intermediate_result.fun), model.steepest())

    options = {"maxiter": max_iter, "gtol": tol, "ftol": 0.0, "maxfun": 15000 + 2 * max_iter}
    found = optimize.minimize(
        value, model.w.reshape(-1), jac=True, method="L-BFGS-B", options=options, callback=callback
    )
    model.put(found.x.reshape(shape).astype(dtype))
    model.slope()
    worst = model.steepest()
    return int(found.nit), worst <= tol, found.nit < max_iter, worst


def say(iteration: int, value: float, worst: float) -> None:
    print(f"iteration {iteration}: objective {value:.8g}, largest gradient {worst:.3g}")  # noqa: T201


def complaint_of(iterations: int, exhausted: bool, worst: float, tol: float, dtype: Any) -> str:
    """The warning of a solver that did not converge."""
    if not math.isfinite(worst):
        return (
            f"after {iterations} iterations the gradient of the loss is {worst}, and training can't go on: the map gives no finite "
            "-log p or p for these scores (anymax.check_mapping looks at a map of your own)"
        )
    reached = f"the largest entry of the gradient is {worst:.3g}, tol={tol:g}"
    if exhausted:
        return (
            f"after {iterations} iterations rounding in {np.dtype(dtype).name} lets the objective fall no further: {reached}. "
            "Scale the features (sklearn.preprocessing.StandardScaler), give float64, or allow a larger tol"
        )
    return (
        f"max_iter={iterations} iterations were not enough: {reached}. Increase max_iter, or scale the features "
        "(sklearn.preprocessing.StandardScaler)"
    )
