"""PyTorch: how much of an output layer is computed at a time, and its scores a block of classes at a time.

Parts are small on a CPU, to stay in its cache, and large on a GPU.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import array_api_compat.torch as xp
import torch

from .. import kernels
from .._array import wide_dtype
from ..kernels.tasks import DECODE
from ..likelihood.softmax_plain import LOWEST
from ..mappings import Softmax
from .layer import Layer

Tensor = torch.Tensor

_SOFTMAX = Softmax()

GROUP = 64  # neighbouring scores that are skipped together if their maximum is below the bound


class Sizes(NamedTuple):
    """The sizes of one kind of device, in scores unless it says otherwise."""

    small: int  # held at a time whatever the size of the weight
    little: int  # held at a time if they take no more memory than the weight
    share: int  # beyond these, rows of scores are held that take 1 / share of the weight's memory
    group: int  # of a group of rows whose scores are computed again for the gradient
    piece: int  # of a piece of a group, whose gradient is computed at a time
    block_rows: int  # the most rows of a block of some rows and classes
    block_classes: int  # its most classes
    block: int  # its most scores
    block_share: int  # it has at most 1 / block_share of all scores
    converted: int  # rows of such a block converted from half precision at a time
    products: int  # products of features computed at a time
    gathered: int  # features gathered at a time for a sparse product


CPU = Sizes(
    small=1 << 18, little=1 << 24, share=2, group=1 << 23, piece=1 << 20, block_rows=1024, block_classes=2048, block=1 << 25,
    block_share=48, converted=128, products=1 << 15, gathered=1 << 18,
)  # fmt: skip
GPU = Sizes(
    small=1 << 25, little=0, share=1, group=1 << 27, piece=1 << 25, block_rows=8192, block_classes=1 << 25, block=1 << 25,
    block_share=1, converted=1 << 25, products=1 << 24, gathered=1 << 25,
)  # fmt: skip


def on_gpu(x: Tensor) -> bool:
    """True for a tensor on a GPU, or on any device other than the CPU. Tests replace it, so that the CPU computes as a GPU does."""
    return x.device.type != "cpu"


def sizes_of(x: Tensor) -> Sizes:
    return GPU if on_gpu(x) else CPU


def rows_in_memory(layer: Layer, *others: Layer) -> int:
    """For how many rows all scores may be held: in as much memory as the weights, or in a share of it, unless that is little."""
    n, sizes, widths = layer.classes, sizes_of(layer.x), [each.x.shape[1] for each in (layer, *others)]
    features = sum(widths) // len(widths)
    return max(features // sizes.share, min(features, sizes.little // n), sizes.small // n)


def holds_scores(layer: Layer, chunk: int | None) -> bool:
    """True if softmax's scores are held from the forward to the backward pass, and not computed twice."""
    return chunk is None and layer.rows <= rows_in_memory(layer)


def product(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """`x @ weight.T` of operands of one dtype, summed in fp32 or fp64 and returned so, or in the dtype of `out`.

    `torch.mm(out_dtype=)` has no derivative: this is not for products that autograd records.
    """
    dtype = wide_dtype(x, torch) if out is None else out.dtype
    if out is None:
        out = x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)
    if x.dtype is dtype:
        return torch.mm(x, weight.t(), out=out)
    if _multiplies_into(dtype, x.dtype, x.device.type):
        return torch.mm(x, weight.t(), out_dtype=dtype, out=out)
    x, step = x.to(dtype), max(1, sizes_of(x).gathered // max(weight.shape[1], 1))
    for a in range(0, weight.shape[0], step):
        out[:, a : a + step] = x @ weight[a : a + step].to(dtype).t()
    return out


@functools.cache
def _multiplies_into(dtype: torch.dtype, operands: torch.dtype, device: str) -> bool:
    """True if this torch can do so on the device: not before 2.8, and not on a CPU. Else the operands are cast, a part at a time."""
    one = torch.ones((16, 16), dtype=operands, device=device)
    try:
        torch.mm(one, one, out_dtype=dtype, out=one.to(dtype))
    except (RuntimeError, TypeError):
        return False
    return True


class BlockSize(NamedTuple):
    """How many rows and classes a block of scores has."""

    rows: int
    classes: int
    rounded_to: torch.dtype | None = None  # of the layer

    @classmethod
    def of(cls, layer: Layer, chunk: int | None) -> BlockSize:
        rows, n, sizes = layer.rows, layer.classes, sizes_of(layer.x)
        tile = min(rows, sizes.block_rows)
        if chunk is not None:
            return cls(max(tile, 1), min(chunk, n), layer.rounded_to)
        if rows * n <= max(sizes.small, min(layer.weight.numel() // sizes.share, sizes.little)):
            # each block makes threads wait for each other, which takes long on a busy machine
            return cls(max(rows, 1), n, layer.rounded_to)
        wanted = min(rows * n // sizes.block_share, sizes.block) // tile
        return cls(tile, min(n, max(GROUP, min(wanted // GROUP * GROUP, sizes.block_classes))), layer.rounded_to)

    def dtype_of(self, x: Tensor) -> torch.dtype:
        """That of scores in memory: of half precision only if the product rounds them to it."""
        return x.dtype if x.dtype is self.rounded_to else wide_dtype(x, torch)

    def buffer(self, layer: Layer) -> Tensor:
        """Memory for one block of the layer's scores."""
        return layer.x.new_empty(min(layer.rows, self.rows) * self.classes, dtype=self.dtype_of(layer.x))

    def parts(self, layer: Layer) -> list[tuple[int, int]]:
        """Where the blocks of classes begin and end."""
        n = layer.classes
        return [(a, min(a + self.classes, n)) for a in range(0, n, self.classes)]


class ScoreBlocks:
    """The scores of some rows, block by block, in a buffer that all blocks share.

    target: a class of each row, [rows], or several, [rows, m]; -1 means none.
    """

    def __init__(
        self, layer: Layer, blocks: BlockSize, target: Tensor | None = None, buffer: Tensor | None = None
    ) -> None:
        self.layer, self.buffer = layer, blocks.buffer(layer) if buffer is None else buffer
        # the part of the weight that was last used, in the dtype of the product
        self.converted = (0, 0), layer.weight[:0]
        self.order = self.sorted = torch.empty(0)
        if target is not None:
            self.several = target.shape[1] if target.ndim > 1 else 1
            self.sorted, self.order = target.reshape(-1).sort()
            self.ends = dict(
                zip(
                    (edges := [0, *(b for _, b in blocks.parts(layer))]),
                    torch.searchsorted(self.sorted, torch.tensor(edges, device=target.device)).tolist(),
                )
            )

    def numbers(self, a: int, b: int, out: Tensor | None = None) -> Tensor:
        """The products of features and weights of the classes a to b, in the dtype of the buffer. out: other memory for them."""
        return product(self.layer.x, self.weight(a, b), self.memory(a, b) if out is None else out)

    def block(self, a: int, b: int, out: Tensor | None = None) -> Tensor:
        """The scores of the classes a to b, in the dtype of the buffer. out: other memory for them."""
        layer, s = self.layer, self.numbers(a, b, out)
        if layer.bias is not None:
            s += layer.bias[a:b]
        if layer.rounded_to is not None:
            s = s.copy_(layer.rounded(s, xp))
        if layer.factor is not None:
            s = s.mul_(layer.factor)
        if layer.keep is not None:
            s.masked_fill_(~layer.keep[:, a:b], -math.inf)
        return s

    def memory(self, a: int, b: int) -> Tensor:
        """The part of the buffer that the scores of the classes a to b take."""
        return self.buffer[: self.layer.rows * (b - a)].view(self.layer.rows, b - a)

    def weight(self, a: int, b: int) -> Tensor:
        """The weight of the classes a to b, in the dtype of the product."""
        if self.converted[0] != (a, b):
            self.converted = (a, b), self.layer.weight[a:b].to(self.layer.x.dtype)
        return self.converted[1]

    def targets(self, a: int, b: int) -> tuple[Tensor, Tensor, Tensor]:
        """The rows that have a target among the classes a to b, which of their targets it is, and its place among these classes."""
        i, j = self.ends[a], self.ends[b]
        order = self.order[i:j]
        return order // self.several, order % self.several, self.sorted[i:j] - a


# -- softmax of a block ------------------------------------------------------------------------------------------------------------


def logsumexp_entropy(s: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """logsumexp of each row and the entropy of its softmax, [rows, 1]; 0 for a row without classes."""
    engine = kernels.engine_of(DECODE, _SOFTMAX, s)
    if engine is not None:
        result = engine.decode(_SOFTMAX, s, entropy=True, tau=True)
        return result.tau[:, None].to(dtype), result.entropy[:, None].to(dtype)
    s = s.to(dtype)
    level = s.logsumexp(1, keepdim=True)
    below = (s - torch.where(level == -math.inf, 0.0, level)).clamp_(min=LOWEST)
    return level, -(below.exp() * below).sum(1, keepdim=True)


def logsumexp(s: Tensor, dtype: torch.dtype) -> Tensor:
    """logsumexp of each row, [rows, 1]."""
    engine = kernels.compiled("threshold", _SOFTMAX, s)
    if engine is not None:
        return engine.threshold(_SOFTMAX, s).to(dtype)
    return s.to(dtype).logsumexp(1, keepdim=True)
