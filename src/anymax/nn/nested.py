"""Nested tensors of torch, one sequence of its own length for each batch: padded, and made from padded ones again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def lengths_of(x: Any) -> Tensor:
    """The lengths of the sequences of a nested tensor [N, its own, features]."""
    if x.layout == torch.jagged:
        return x.offsets().diff()
    return torch.tensor([len(sequence) for sequence in x.unbind()], device=x.device)


def padded(x: Tensor) -> tuple[Tensor, Tensor]:
    """A nested tensor as [N, length of the longest, features], padded with zeros, and the places of its own entries, True = own."""
    dense = torch.nested.to_padded_tensor(x, 0.0)
    return dense, torch.arange(dense.shape[1], device=dense.device) < lengths_of(x)[:, None]


def nested_as(dense: Tensor, own: Tensor, like: Any) -> Tensor:
    """The entries at the places `own` of [N, length, features], as a nested tensor with the layout and lengths of `like`."""
    if like.layout == torch.jagged:
        return torch.nested.nested_tensor_from_jagged(dense[own], like.offsets())
    rows = [row[:n] for row, n in zip(dense, own.sum(-1).tolist(), strict=True)]
    return torch.nested.as_nested_tensor(rows)
