"""Routers of mixtures of experts: the experts of each token and their weights, losses of their load, and biases that even it out.

    index, weight = route(scores, 8, "sigmoid", bias=b, groups=8, keep_groups=4, norm_topk_prob=True)  # DeepSeek-V3
    index, weight = route(scores, 2, norm_topk_prob=True)  # Mixtral, gpt-oss
    loss = load_balancing_loss(scores, index)
    b = balance(scores, 8, b, "sigmoid")

Scores are the outputs of the gate, [..., experts]; NumPy, torch and JAX arrays. Equal scores go to the expert with the smaller number, and
half precision is compared in fp32, so that every framework and dtype chooses the same experts.
"""

from typing import TYPE_CHECKING

from .._core.elsewhere import answering
from .balancing import balance
from .capacity import Capacity, limit_capacity
from .choice import Routes, SupportRoutes, expert_choice, route, route_support
from .losses import load_balancing_loss, router_z_loss

__all__ = [
    "Capacity", "Routes", "SupportRoutes", "balance", "expert_choice", "limit_capacity", "load_balancing_loss", "route",
    "route_support", "router_z_loss",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__ = answering(__name__, __all__)
