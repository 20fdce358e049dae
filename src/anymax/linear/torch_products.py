"""PyTorch: products of a sparse matrix (row, class, value) of an output layer with its weight and its features."""

from __future__ import annotations

import itertools

import torch

from ..kernels.engine import Engine
from . import torch_blocks

Tensor = torch.Tensor

_SPARSE = 48  # a sparse product takes less time than one of all if at most one entry in so many is not 0
_GROUP = 32  # neighbouring entries that are skipped together if all are 0


def entries_of(dense: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """(row, column, value) of the entries that are not 0, where a sparse product takes less time; None on a GPU, which would wait."""
    if torch_blocks.on_gpu(dense):
        return None
    most, flat = dense.numel() // _SPARSE, dense.view(-1)
    even = flat[: flat.shape[0] // _GROUP * _GROUP].view(-1, _GROUP)
    used = ((even.amax(1) != 0) | (even.amin(1) != 0)).nonzero()[:, 0]
    if used.shape[0] > most:
        return None
    of_used, place = even[used].nonzero(as_tuple=True)
    at = torch.cat([used[of_used] * _GROUP + place, flat[even.numel() :].nonzero()[:, 0] + even.numel()])
    if at.shape[0] > most:
        return None
    row = at // dense.shape[1]
    return row, at - row * dense.shape[1], flat[at]


def at_a_time(rows: Tensor, each: int = 1) -> int:
    """How many rows of features, or groups of `each` rows, to gather or compute at a time."""
    return max(1, torch_blocks.sizes_of(rows).gathered // max(each * rows.shape[1], 1))


def added_to_rows(
    dx: Tensor | None, row: Tensor, cls: Tensor, value: Tensor, x: Tensor, weight: Tensor, engine: Engine | None
) -> Tensor:
    """dx, if there is one, plus the sparse matrix (row, cls, value) times the weight; the rows ascend."""
    if engine is not None:
        dx = torch.zeros(x.shape, dtype=x.dtype, device=x.device) if dx is None else dx
        engine.add_products(dx, starts(row, x.shape[0]), cls, value, weight)
        return dx
    if weight.dtype is not x.dtype:  # narrower: neither the factors nor the sums may be rounded to its dtype
        used, cls = torch.unique(cls, return_inverse=True)
        weight = weight[used].to(x.dtype)
    product = _bags(weight, cls, starts(row, x.shape[0])[:-1], value)
    return product if dx is None else dx.add_(product)


def add_to_classes(dw: Tensor, row: Tensor, cls: Tensor, value: Tensor, x: Tensor, engine: Engine | None) -> None:
    """Add the transpose of the sparse matrix (row, cls, value) times the features to dw."""
    order = cls.argsort(stable=True)
    row, cls, value = row[order], cls[order], value[order]
    if engine is not None:
        engine.add_products(dw, starts(cls, dw.shape[0]), row, value, x)
        return
    for a, b in _whole(cls, at_a_time(x)):
        if dw.dtype == value.dtype:
            dw.index_add_(0, cls[a:b], x[row[a:b]].mul_(value[a:b, None]))
        else:  # summed before rounding
            classes, sizes = torch.unique_consecutive(cls[a:b], return_counts=True)
            dw[classes] += _bags(x, row[a:b], sizes.cumsum(0) - sizes, value[a:b]).to(dw.dtype)


def starts(ordered: Tensor, count: int) -> Tensor:
    """Where each number from 0 to `count` begins in ascending numbers below `count`."""
    return torch.searchsorted(ordered, torch.arange(count + 1, device=ordered.device))


def _bags(rows: Tensor, index: Tensor, starts: Tensor, factor: Tensor) -> Tensor:
    """Sums of rows times factors, over the indices from each start to the next."""
    return torch.nn.functional.embedding_bag(index, rows, starts, mode="sum", per_sample_weights=factor.to(rows.dtype))


def _whole(cls: Tensor, step: int) -> list[tuple[int, int]]:
    """Pieces of ascending classes, about `step` long, that divide no class."""
    n = cls.shape[0]
    if n <= step:
        return [(0, n)] if n else []
    starts = torch.arange(step, n, step, device=cls.device)
    ends = torch.unique(torch.searchsorted(cls, cls[starts])).tolist()
    edges = [0, *(e for e in ends if e), n]
    return list(itertools.pairwise(edges))
