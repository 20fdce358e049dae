"""What samplers share: the log p and the support that `sample` returns, and the documentation of their parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

from .._array import Array, Namespace, device_of, eager, running_sum


class Support(NamedTuple):
    """The classes that could be drawn: those of row i are `ids[offsets[i]:offsets[i + 1]]`, in ascending order."""

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
        The classes that could be drawn.
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
    keep = xp.reshape(p > 0, (-1, p.shape[-1]))
    ids = xp.nonzero(keep)[1]
    size = xp.sum(xp.astype(keep, ids.dtype), axis=-1, dtype=ids.dtype)
    return Support(ids, xp.concat([xp.zeros((1,), dtype=ids.dtype, **device_of(p)), running_sum(size, xp)]))


def every_sampler(
    mapping: Any,
    x: Any,
    *,
    axis: Any = None,
    dim: Any = None,
    mask: Any = None,
    transform: Any = None,
    generator: Any = None,
) -> None:
    """The parameters that samplers share; read by `documented_like`, and never called.

    Parameters
    ----------
    mapping
        The map, such as `Softmax()`, or its name, such as "softmax".
    x
        The scores; -inf masks a class.
    axis, dim
        The axis of the classes, the last by default.
    mask
        Boolean, broadcastable to x, True = keep; applied before the transforms.
    transform
        What is applied to the scores first: one of `anymax.transforms`, several in `compose(...)`, or your own function. Those
        of `anymax.transforms` work along `axis`.
    generator
        A generator or key, an integer seed, or a list of these, one per row; by default the global one of NumPy or torch.
    """
