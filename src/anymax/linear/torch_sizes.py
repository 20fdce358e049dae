"""PyTorch: how much of an output layer is computed at a time: small parts that stay in the cache of a CPU, large ones on a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch

Tensor = torch.Tensor


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
