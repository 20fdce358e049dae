"""Class indices as a caller gives them: what is a class, what is left out, and what is out of range."""

from __future__ import annotations

from .._array import Array, Namespace, eager, known

PADDING = -100  # a class that is left out, in targets and tokens; the default of `ignore_index`


def class_indices(
    what: str, index: Array, n: int, ignore_index: int | None, xp: Namespace, *, hides: bool = False, pads: bool = False
) -> tuple[Array, Array]:
    """(the class of each sample, -1 where it is left out; True where it is); an error if an index is known to be out of range.

    hides: the map hides a class, for which -1 stands unless it is `ignore_index`; it becomes n, the last of all classes. pads: `PADDING`
    is left out too.
    Where values may not be read, an index out of range becomes a number above all classes, which makes the loss of its sample NaN.
    """
    hides = hides and ignore_index != -1
    stray = refuse_strays(what, index, n, ignore_index, xp, hides=hides, pads=pads)
    if ignore_index is not None:
        ignored = index == ignore_index
    else:
        ignored = xp.zeros_like(stray) if hides else index == -1
    ignored = ignored | (index == PADDING) if pads else ignored
    index = xp.where(index == -1, n * xp.ones_like(index), index) if hides else index
    index = index if known(stray) else xp.where(stray, (n + hides) * xp.ones_like(index), index)
    return xp.where(ignored, -xp.ones_like(index), index), ignored


def known_index(what: str, index: Array, n: int, xp: Namespace) -> tuple[Array, Array | None]:
    """(the indices, -1 for none; None); an error if one is known to be out of range.

    Where values may not be read, an index out of range becomes -1, and the second is True there: its result should be NaN.
    """
    stray = refuse_strays(what, index, n, None, xp)
    return (index, None) if known(stray) else (xp.where(stray, -xp.ones_like(index), index), stray)


def refuse_strays(
    what: str, index: Array, n: int, ignore_index: int | None, xp: Namespace, *, hides: bool = False, waits: bool = False,
    pads: bool = False,
) -> Array:  # fmt: skip
    """True where an index is neither a class, 0 to n - 1, nor `ignore_index`; an error if one is known.

    ignore_index: None for -1, which means no class. hides: -1 stands for the class that the map hides. waits: read the indices also where
    that waits for a GPU. pads: `PADDING` is allowed too.
    """
    none = -1 if ignore_index is None else ignore_index
    outside = (index < (-1 if hides else 0)) | (index >= n)
    readable = eager(outside) if waits else known(outside)
    if readable and not bool(xp.any(outside)):
        return outside
    stray = outside & (index != none)
    stray = stray & (index != PADDING) if pads else stray
    if readable and bool(xp.any(stray)):
        none_of = ["-1 for none of them"] if hides else ["-1 for none"] if ignore_index is None else []
        allowed = [f"from 0 to {n - 1}", *none_of, *([] if ignore_index is None else [f"ignore_index={none}"])]
        allowed += [f"{PADDING} to leave it out"] if pads else []
        raise IndexError(
            f"{what}: class indices must be {', '.join(allowed[:-1])}, or {allowed[-1]}, got values from {int(xp.min(index))} to "
            f"{int(xp.max(index))}"
        )
    return stray


def pads_row(index: Array, xp: Namespace) -> Array:
    """Which rows have `PADDING` as each of their classes [..., m], [..., 1]."""
    padding = index == PADDING
    return xp.all(padding, axis=-1, keepdims=True) & xp.any(padding, axis=-1, keepdims=True)
