"""What samplers share: the log p and the support that `sample` returns, and the tables of their options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import numpy as np

from .._array import Array, Namespace, adopt, eager, is_torch, known, listed, on_host, stop_gradient
from .._core.tables import Default
from .._core.typing import Axes

Invalid = Literal["argmax", "raise"] | None  # what becomes of -1


class DrawOptions(TypedDict, total=False):
    """The keyword-only options of `gumbel_max` and `perturb_argmax`."""

    generator: Any
    axis: Annotated[Axes, Default(-1)]
    dim: Axes
    num_samples: int | None
    invalid: Invalid


class SampleOptions(DrawOptions, total=False):
    """The keyword-only options of `sample` on which its result's type does not depend; other samplers have some of them.

    Parameters
    ----------
    mapping
        The map, such as `Softmax()`, or its name, such as "softmax".
    x
        The scores; -inf masks a class.
    axis, dim
        The axis of the classes, the last by default; a tuple of axes is treated as one axis, in which a class is an index as
        after a reshape, and None stands for all axes.
    mask
        Boolean, broadcastable to x, True = keep; applied before the transforms.
    transform
        What is applied to the scores first: one of `anymax.transforms`, several in `compose(...)`, or your own function. Those
        of `anymax.transforms` work along `axis`.
    generator
        A generator or key, an integer seed, or a list of these, one per row; by default the global one of NumPy or torch.
    invalid
        What to give where there is no class, as in a row that is all masked, or with NaN or +inf: None gives -1. "argmax" gives a class
        that can be looked up at once: that of the largest score, as argmax says. "raise" is an error, and is not possible in traced code.
    """

    transform: Callable[[Any], Any] | None
    mask: Any


class Support(NamedTuple):
    """The support of each row, the classes that could be drawn: those of row i are `ids[offsets[i]:offsets[i + 1]]`, in ascending order."""

    ids: Any
    offsets: Any


class Sample(NamedTuple):
    """The result of `sample` with `return_log_prob` or `return_support`; a field that was not requested is None.

    Parameters
    ----------
    index
        The classes, -1 where a row has none.
    log_prob
        Their log p, over the classes that the transform keeps.
    full_log_prob
        Their log p without the truncations of the transform.
    support
        The support of each row, the classes that could be drawn, as a list.
    """

    index: Any
    log_prob: Any = None
    full_log_prob: Any = None
    support: Support | None = None


def support_of(p: Array, xp: Namespace) -> Support:
    """The classes of each row whose probability is above 0."""
    if not eager(p):
        raise TypeError(
            "return_support: how many classes there are depends on the scores; leave it out where they are traced (jit)"
        )
    p = xp.reshape(p, (-1, p.shape[-1]))
    if is_torch(p) and known(p):  # NumPy compares eight times as quickly
        return Support(*(adopt(a, p, xp) for a in listed(on_host(p) > 0, np)))
    return Support(*listed(p > 0, xp))


def check_invalid(who: str, invalid: Any) -> None:
    if invalid not in (None, "argmax", "raise"):
        raise ValueError(f"{who}: invalid must be None, which gives -1, 'argmax' or 'raise', got {invalid!r}")


def validated(who: str, index: Array, rows: Array, invalid: Invalid, xp: Namespace) -> Array:
    """Classes [..., m] with what `invalid` says in place of each -1; the rows [..., classes] are the scores, or probabilities."""
    if invalid is None:
        return index
    if invalid == "argmax":
        best = xp.expand_dims(xp.argmax(stop_gradient(rows), axis=-1), axis=-1)
        return xp.where(index < 0, xp.astype(best, index.dtype), index)
    if not eager(index):
        raise TypeError(
            f"{who}: invalid='raise' reads the classes, which is not possible where they are traced (jit, torch.compile, vmap); say "
            "invalid='argmax', or look for -1 in the result"
        )
    if bool(xp.any(index < 0)):
        flat = xp.reshape(xp.any(index < 0, axis=-1), (-1,))
        row = int(xp.argmax(xp.astype(flat, index.dtype)))
        raise ValueError(
            f"{who}: row {row}, in C order, has no class to give: its classes are masked, or too few have a probability above 0, or it has "
            "NaN or +inf; invalid='argmax' gives the class of the largest score there, and invalid=None gives -1"
        )
    return index
