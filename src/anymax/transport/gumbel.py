"""`gumbel_sinkhorn`: relaxed random permutations."""

from __future__ import annotations

from typing import Any

from .._array import as_dtype, asarray, check_flag, floating, namespace, stop_gradient, upcast
from .._core.options import check_keywords
from .._core.typing import ArrayT, Mask, Numbers, Parameter
from ..transforms import noise
from .problem import read
from .sinkhorn import Sinkhorn, by_framework


@check_keywords(key="generator", seed="generator")
def gumbel_sinkhorn(
    x: ArrayT | Numbers,
    temperature: Parameter = 1.0,
    *,
    iterations: int | None = 20,
    hard: bool = False,
    generator: Any = None,
    axes: tuple[int, int] = (-2, -1),
    mask: Mask = None,
) -> ArrayT:
    """A relaxed random permutation, differentiable in x: `Sinkhorn(iterations, temperature)(x + Gumbel noise)`.

    Use it to learn a matching or an order inside a model that is trained by gradients. Mena et al. 2018.

    Parameters
    ----------
    x
        The scores, an array of NumPy, torch or JAX with two axes or more, or lists of numbers.
    temperature
        A number above 0, or an array that broadcasts to x; the smaller it is, the nearer is the result to a permutation.
    iterations
        As in `Sinkhorn`.
    hard
        Return the permutation matrix with the largest total of noisy scores, with the gradient of the relaxed sample (straight-through).
        The matrices must be square. It is found on the CPU, in time that grows with the cube of their size.
    generator
        A generator or key, or an integer seed; by default the global one of NumPy or torch.
    axes, mask
        As in a call of `Sinkhorn`.

    Returns
    -------
    Array
        An array of the kind, shape and dtype of x.

    Examples
    --------
    >>> import numpy as np
    >>> gumbel_sinkhorn(np.zeros((3, 3)), 0.1, hard=True, generator=0)
    array([[0., 0., 1.],
           [1., 0., 0.],
           [0., 1., 0.]])
    """
    hard = check_flag("gumbel_sinkhorn", "hard", hard)
    given = asarray(x)
    xp = namespace(given)
    given = floating(given, xp)
    read("gumbel_sinkhorn", given, axes, None, None, mask)  # raises for wrong axes before anything is drawn
    z = noise("gumbel", generator=generator, axis=axes[1])(upcast(given, xp))
    p: Any = Sinkhorn(iterations, temperature)(z, axes, mask=mask)
    if hard:
        square, layout = read("gumbel_sinkhorn", stop_gradient(z), axes, None, None, mask)
        if square.x.shape[-1] != square.x.shape[-2]:
            raise ValueError(
                f"gumbel_sinkhorn(hard=True): a permutation needs as many rows as columns, got {square.x.shape[-2]} and "
                f"{square.x.shape[-1]}; leave hard out, or pad the scores with a constant"
            )
        corner = layout.restore(by_framework(square.x).assigned(square.x), xp)
        p = corner + (p - stop_gradient(p))  # the bracket is exactly 0
    return as_dtype(p, given.dtype, xp)
