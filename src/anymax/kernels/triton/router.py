"""Launches the kernel of routers (`router_rows`) on torch tensors."""

from __future__ import annotations

import math

import torch
import triton

from .operands import on_device_of
from .router_rows import router_rows

Tensor = torch.Tensor

SCORINGS = ("scores", "sigmoid", "sqrtsoftplus", "softmax")
MOST_CLASSES, MOST_CHOSEN, MOST_ADDED = 4096, 32, 8  # beyond these a sort by torch is as fast, or a program too long
_WARP_LANES = 1024  # the most lanes of a row that one warp holds


def takes(x: Tensor, k: int, groups: tuple[int, int, int]) -> bool:
    """True for rows that the kernel takes."""
    count, kept, most = groups
    lanes = triton.next_power_of_2(count) * triton.next_power_of_2(max(1, x.shape[-1] // count))
    return lanes <= MOST_CLASSES and k <= MOST_CHOSEN and kept <= MOST_CHOSEN and most <= MOST_ADDED


def choose(
    x: Tensor,
    k: int,
    groups: tuple[int, int, int],
    scoring: str = "scores",
    bias: Tensor | None = None,
    weights: bool = False,
    normalise: bool = False,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(ids int64 [..., k], weights fp32 [..., k], empty without `weights`); the scores [..., n] are in fp32 or halves.

    groups: how many, how many are kept, how many of a group's largest values are added. bias: fp32 [n].
    """
    *lead, n = x.shape
    rows = x.reshape(-1, n)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    count, kept, most = groups
    index = torch.empty((*lead, k), dtype=torch.int64, device=x.device)
    weight = torch.empty((*lead, k) if weights else (0,), dtype=torch.float32, device=x.device)
    if not math.prod(lead):
        return index, weight
    G, S = triton.next_power_of_2(count), triton.next_power_of_2(n // count)
    with on_device_of(x, bias):
        router_rows[rows.shape[0],](
            rows, rows if bias is None else bias, index, weight, n, n // count, rows.stride(0), factor,
            k=k, groups=count, kept=kept, most=most, SCORING=scoring, BIASED=bias is not None, NORM=normalise, WEIGHTS=weights,
            G=G, S=S, K=triton.next_power_of_2(k), num_warps=1 if G * S <= _WARP_LANES else 4,
        )  # fmt: skip
    return index, weight
