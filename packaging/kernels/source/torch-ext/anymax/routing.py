"""Routers of mixtures of experts: the ids of the chosen experts and their weights, in one pass."""

from __future__ import annotations

from typing import Any

import torch

from ._kernels.triton import router
from ._links import check
from ._ops import add_op_namespace_prefix, ops

Tensor = torch.Tensor


@torch.library.custom_op(
    add_op_namespace_prefix("route"),
    mutates_args=(),
    schema=(
        "(Tensor x, int k, int groups, int kept, int most, str scoring, Tensor? bias, bool weights, bool normalise, float factor)"
        " -> (Tensor, Tensor)"
    ),
)
def _route(
    x: Tensor, k: int, groups: int, kept: int, most: int, scoring: str, bias: Tensor | None, weights: bool, normalise: bool,
    factor: float,
) -> Any:  # fmt: skip
    return router.choose(x, k, (groups, kept, most), scoring, bias, weights, normalise, factor)


@_route.register_fake
def _(
    x: Tensor, k: int, groups: int, kept: int, most: int, scoring: str, bias: Tensor | None, weights: bool, normalise: bool,
    factor: float,
) -> Any:  # fmt: skip
    shape = (*x.shape[:-1], k)
    return x.new_empty(shape, dtype=torch.int64), x.new_empty(shape if weights else (0,), dtype=torch.float32)


def route(
    x: Tensor,
    k: int,
    *,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    groups: int = 1,
    keep_groups: int | None = None,
    group_by: int = 2,
    normalise: bool = True,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(ids int64 [..., k], weights fp32 [..., k]) of the k experts of scores x [..., experts]; an id is -1 where none is left.

    scoring: "softmax", "sigmoid" (DeepSeek-V3), "sqrtsoftplus" or "scores". bias: [experts], added for the choice and not to the weights.
    Of `groups` groups, `keep_groups` are kept, by the sum of their `group_by` largest values. normalise: the weights are divided by their
    sum. factor: what they are multiplied by at last. The gradient of the weights goes to x.
    """
    if scoring not in router.SCORINGS:
        raise ValueError(f"route: scoring is one of {', '.join(router.SCORINGS)}, not {scoring!r}")
    check("route", x)
    experts, kept = x.shape[-1], keep_groups or groups
    if groups < 1 or experts % groups or not 1 <= kept <= groups or not 1 <= k <= kept * (experts // groups):
        raise ValueError(
            f"route: {k} of {experts} experts, {kept} of {groups} groups: groups divide the experts, and k fits into those that are kept"
        )
    sizes = groups, kept, min(max(1, group_by), experts // groups)
    if not router.takes(x, k, sizes):
        raise ValueError(
            f"route: the kernel takes up to {router.MOST_CLASSES} experts, k and groups up to {router.MOST_CHOSEN}, group_by up to "
            f"{router.MOST_ADDED}"
        )
    if bias is not None:
        bias = bias.detach().to(x.device, torch.float32).expand(experts).contiguous()
    learns = x.requires_grad and torch.is_grad_enabled()
    ids, weights = ops.route(x.detach(), k, *sizes, scoring, bias, not learns, normalise, factor)
    return ids, _weights(x, ids, scoring, normalise) * factor if learns else weights


def _weights(x: Tensor, ids: Tensor, scoring: str, normalise: bool) -> Tensor:
    """The weights in plain operations, which autograd differentiates."""
    x, some = x.float(), ids >= 0
    at = ids.clamp(min=0)
    chosen = x.gather(-1, at)
    if scoring == "softmax" and normalise:  # softmax of all, normalised, is softmax of the chosen scores
        return torch.where(some, chosen, -torch.inf).softmax(-1).masked_fill(~some, 0.0)
    if scoring == "softmax":
        weights = x.softmax(-1).gather(-1, at)
    elif scoring == "sigmoid":
        weights = chosen.sigmoid()
    elif scoring == "sqrtsoftplus":
        weights = torch.nn.functional.softplus(chosen).sqrt()
    else:
        weights = chosen
    weights = torch.where(some, weights, 0.0)
    if not normalise:
        return weights
    sums = weights.sum(-1, keepdim=True)
    return weights / torch.where(sums > 0, sums, 1.0)
