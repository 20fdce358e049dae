"""Strides of rows, and the memory that tensors span."""

from __future__ import annotations

from typing import Any


def merged(shape: tuple[int, ...], strides: list[tuple[int, ...]]) -> list[tuple[int, tuple[int, ...]]]:
    """The rows by as few axes as possible: (size, stride in each operand) for each."""
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


def span(a: Any) -> tuple[int, int]:
    """The addresses of a tensor's lowest entry and of the end of its highest. (Two storages may share memory.)"""
    size = a.element_size()
    reach = [(n - 1) * s * size for n, s in zip(a.shape, a.stride())]
    return a.data_ptr() + sum(r for r in reach if r < 0), a.data_ptr() + sum(r for r in reach if r > 0) + size


def disjoint(a: Any, b: Any) -> bool:
    """True if two tensors surely share no memory; a meta tensor has none."""
    if a.is_meta or b.is_meta:
        return True
    (low, high), (other_low, other_high) = span(a), span(b)
    return high <= other_low or other_high <= low
