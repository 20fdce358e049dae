"""Layers without a state of their own, whose `forward` may take the place of that of a layer with the same fields."""

from __future__ import annotations

import torch

from . import losses, rows


class Softmax(torch.nn.Module):
    """In the place of `torch.nn.Softmax`."""

    can_torch_compile: bool = True

    dim: int | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return rows.softmax(input, -1 if self.dim is None else self.dim)


class LogSoftmax(torch.nn.Module):
    """In the place of `torch.nn.LogSoftmax`."""

    can_torch_compile: bool = True

    dim: int | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return rows.log_softmax(input, -1 if self.dim is None else self.dim)


class Sparsemax(torch.nn.Module):
    """In the place of `entmax.Sparsemax`."""

    can_torch_compile: bool = True

    dim: int

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        return rows.sparsemax(X, self.dim)


class Entmax15(torch.nn.Module):
    """In the place of `entmax.Entmax15`."""

    can_torch_compile: bool = True

    dim: int

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        return rows.entmax15(X, self.dim)


class EntmaxBisect(torch.nn.Module):
    """In the place of `entmax.EntmaxBisect`, for a number as alpha."""

    can_torch_compile: bool = True

    alpha: float
    dim: int

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        return rows.entmax(X, self.alpha, self.dim)


class CrossEntropyLoss(torch.nn.Module):
    """In the place of `torch.nn.CrossEntropyLoss` of class indices, without weights and smoothing."""

    can_torch_compile: bool = True

    ignore_index: int
    reduction: str
    label_smoothing: float
    weight: torch.Tensor | None

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.weight is not None or self.label_smoothing:
            raise ValueError("CrossEntropyLoss: the kernel has no weights and no label smoothing")
        dim = 1 if input.ndim > 1 else 0
        loss = losses.cross_entropy(input, target, dim, self.ignore_index, self.reduction)
        return loss.to(input.dtype)
