"""Strides of rows."""

from __future__ import annotations


def merged(shape: tuple[int, ...], strides: list[tuple[int, ...]]) -> list[tuple[int, tuple[int, ...]]]:
    """Axes of the rows as few as possible: (size, stride of each operand)."""
    out: list[tuple[int, tuple[int, ...]]] = []
    for i, size in enumerate(shape):
        if size == 1:
            continue
        steps = tuple(s[i] for s in strides)
        if out and all(before == step * size for before, step in zip(out[-1][1], steps)):
            out[-1] = (out[-1][0] * size, steps)
        else:
            out.append((size, steps))
    return out
