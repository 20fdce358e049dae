"""`Sinkhorn`, the map of matrices."""

from __future__ import annotations

import dataclasses
from typing import Any

from .._array import (
    POSITIVE,
    Array,
    check_integer,
    check_number,
    namespace,
    quiet,
)
from .._core.matrix_map import MatrixMap
from .._core.options import check_keywords
from .._core.typing import ArrayT, Mask, Numbers, Parameter
from ..autodiff import bridge
from .problem import read


@dataclasses.dataclass(frozen=True, eq=False)
class Sinkhorn(MatrixMap):
    """The matrix `P_ij = exp(x_ij / temperature + f_i + g_j)` whose rows and columns have given sums, by Sinkhorn's iteration.

    Use it for soft assignments, optimal transport with an entropy term, and the mixing matrices of hyper-connections. It is the plan P
    that maximises `<P, x> - temperature sum P log P`; as the temperature goes to 0 it becomes an optimal assignment. Sinkhorn & Knopp
    1967; Cuturi 2013; mHC: Xie et al. 2025.

    Each iteration scales the rows and then the columns, so after a few iterations the columns have their sums exactly and the rows
    nearly. With `axes=(-1, -2)` the columns are scaled first and the rows last. It is a map of matrices, not of rows, so call it; functions
    such as `apply` refuse it.

    Parameters
    ----------
    iterations
        The number of iterations, at least 1, whose gradient is that of these iterations; or None to iterate until the sums are right, to
        4e-7 of their value in float32 and 1e-12 in float64, with the gradient of the limit.
    temperature
        Divides the scores: a number above 0, or an array that broadcasts to them, which has a gradient.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([[2.0, 0.0], [1.0, 0.0]])
    >>> p = anymax.Sinkhorn(iterations=None)(x)
    >>> p.round(3), p.sum(axis=0), p.sum(axis=1)
    (array([[0.622, 0.378],
           [0.378, 0.622]]), array([1., 1.]), array([1., 1.]))
    >>> anymax.Sinkhorn(iterations=1)(x, rows=[0.5, 1.5], columns=[1.0, 1.0]).round(3)
    array([[0.287, 0.129],
           [0.713, 0.871]])
    """

    iterations: int | None = 20
    temperature: Parameter = 1.0

    def __post_init__(self) -> None:
        if self.iterations is not None:
            hint = "an integer of at least 1, or None to iterate until the sums are right"
            count = check_integer("Sinkhorn", "iterations", self.iterations, hint)
            if count < 1:
                raise ValueError(f"Sinkhorn(iterations={count}): iterations must be {hint}")
            object.__setattr__(self, "iterations", count)
        hint = "the scores are divided by it"
        object.__setattr__(
            self, "temperature", check_number("Sinkhorn", "temperature", self.temperature, POSITIVE, hint)
        )

    @check_keywords({"dim": "say axes=, of rows and columns", "axis": "say axes=, of rows and columns"})
    def __call__(
        self,
        x: ArrayT | Numbers,
        axes: tuple[int, int] = (-2, -1),
        *,
        rows: Any = None,
        columns: Any = None,
        mask: Mask = None,
    ) -> ArrayT:
        """The matrices P of the scores x.

        Parameters
        ----------
        x
            The scores, an array of NumPy, torch or JAX with two axes or more, or lists of numbers. -inf marks an entry that is 0; a matrix
            with NaN or +inf becomes NaN.
        axes
            The axis along which the rows are numbered, and that of the columns. The sums of the first are made right first.
        rows, columns
            The sums of rows [..., n] and of columns [..., m], at least 0, with one total (to 1e-6 of it in float64, else 1e-4); they have
            gradients. By default each row sums to 1 and the columns to equal shares of the total; if one is given, the other has equal
            shares of its total. What has no entry left by the mask is 0 and does not count.
        mask
            Booleans that broadcast to x, True = keep.

        Returns
        -------
        Array
            P, an array of the shape, kind and dtype of x; integers become floats, and lists become NumPy arrays.
        """
        given, layout = read("Sinkhorn", x, axes, rows, columns, mask, self.temperature)
        xp = namespace(given.x)
        with quiet(given.x):
            return layout.restore(by_framework(given.x).plan(given, self.iterations), xp)


def by_framework(x: Array) -> Any:
    """The module that has `plan` and `assigned` for the framework of x."""
    name = bridge(x).framework
    if name == "torch":
        from . import torch_sinkhorn as module  # late: torch is loaded already
    elif name == "jax":
        from . import jax_sinkhorn as module  # late: JAX is loaded already
    else:
        from . import numpy_sinkhorn as module  # late: beside the others
    return module
