"""PyTorch: softmax of the scores of all pairs, along the rows and along the columns, a block of scores at a time.

Columns after those of the pairs are negatives of the rows, and have no loss of their own.

Both directions share the blocks. The first blocks are saved for the gradient, which computes the others again; the gradient of the
gradient holds all scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from .._array import wide_dtype
from ..autodiff.torch_adapter import operation
from ..mappings import Softmax
from .layer import Layer
from .torch_blocks import BlockSize, ScoreBlocks, logsumexp
from .torch_groups import runs_eagerly

Tensor = torch.Tensor

_SOFTMAX = Softmax()
_SIZE = BlockSize(1024, 2048)
_SAVED = 1 << 25  # the most scores that are saved for the gradient, 128 MB in fp32


def both_ways(a: Tensor, b: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """The cross-entropies of the scores `a @ b.T` whose targets are on the diagonal, of the rows and of as many columns; None if traced.

    keep: False where a score is masked, none on the diagonal.
    """
    return _both_ways(None, a, b, keep) if a.shape[0] and runs_eagerly(_layer(a, b, keep)) else None


def _forward(_: None, operands: Any, wants: Any) -> tuple[tuple[Tensor, ...], Any]:
    a, b, keep = operands
    dtype, n = wide_dtype(a, torch), a.shape[0]
    of_pairs, rows = (torch.empty(n, dtype=dtype, device=a.device) for _ in range(2))
    tiles = math.ceil(n / _SIZE.rows)
    columns = of_pairs.new_empty((n, tiles))
    room, saved = _SAVED if any(wants) else 0, []
    for number, (tile, scores) in enumerate(_tiles(a, b, keep)):
        of_blocks = []
        for i, j in _SIZE.parts(scores.layer):
            room -= scores.layer.rows * (j - i)
            s = scores.block(i, j, torch.empty_like(scores.memory(i, j)) if room >= 0 else None)
            if room >= 0:
                saved.append(s)
            pairs, diagonal = _diagonal(s, tile, i, j)
            of_pairs[pairs] = diagonal.to(dtype)
            of_blocks.append(logsumexp(s, dtype))
            if i < n:
                columns[i:j, number] = logsumexp(s[:, : n - i].t().contiguous(), dtype)[:, 0]
        rows[tile] = torch.cat(of_blocks, 1).logsumexp(1)
    levels = rows, columns.logsumexp(1)
    return tuple(_not_negative(level - of_pairs) for level in levels), (*levels, *saved)


def _backward(_: None, operands: Any, kept: Any, grads: Any, wants: Any) -> Any:
    (a, b, keep), (rows, columns, *saved) = operands, kept
    of_rows, of_columns = (torch.zeros_like(rows) if g is None else g.to(rows.dtype) for g in grads)
    more = b.shape[0] - a.shape[0]
    columns = torch.nn.functional.pad(columns, (0, more), value=math.inf)  # negatives have no loss
    of_columns = torch.nn.functional.pad(of_columns, (0, more))
    da, db = torch.zeros_like(a, dtype=rows.dtype), torch.zeros_like(b, dtype=rows.dtype)
    blocks = iter(saved)
    for tile, scores in _tiles(a, b, keep):
        for i, j in _SIZE.parts(scores.layer):
            s = next(blocks, None)
            s = scores.block(i, j) if s is None else s
            p = s.to(rows.dtype)
            q = (p - columns[None, i:j]).exp_().mul_(of_columns[None, i:j])
            q.addcmul_((p - rows[tile, None]).exp_(), of_rows[tile, None])
            pairs, diagonal = _diagonal(q, tile, i, j)
            diagonal -= of_rows[pairs] + of_columns[pairs]
            q = q.to(a.dtype)
            da[tile] += q @ scores.weight(i, j)
            db[i:j] += q.t() @ scores.layer.x
    return da.to(a.dtype), db.to(b.dtype), None


def _layer(a: Tensor, b: Tensor, keep: Tensor | None) -> Layer:
    return Layer(a, b, None, keep, _SOFTMAX, (a.shape[0],), a.dtype)


def _tiles(a: Tensor, b: Tensor, keep: Tensor | None) -> Iterator[tuple[slice, ScoreBlocks]]:
    """Some rows at a time, and the blocks of their scores."""
    layer = _layer(a, b, keep)
    buffer = _SIZE.buffer(layer)
    for tile, part in layer.parts(_SIZE.rows):
        yield tile, ScoreBlocks(part, _SIZE, None, buffer)


def _diagonal(s: Tensor, tile: slice, i: int, j: int) -> tuple[slice, Tensor]:
    """The pairs whose score, that of a row and its own column, is in this block; and a view of these scores."""
    first, last = max(tile.start, i), max(min(tile.stop, j), max(tile.start, i))
    return slice(first, last), s[first - tile.start : last - tile.start, first - i : last - i].diagonal()


def _not_negative(value: Tensor) -> Tensor:
    """The value, 0 where rounding made it negative."""
    return torch.where(value < 0, 0.0, value)


def _plain(_: None, operands: Any, kept: Any) -> tuple[Tensor, Tensor]:
    a, b, keep = operands
    s = _layer(a, b, keep).scores()
    return s.logsumexp(1) - s.diagonal(), s[:, : a.shape[0]].logsumexp(0) - s.diagonal()


_both_ways = operation("BothWays", _forward, _backward, _plain)
