"""torch modules for any map: activations, losses and output layers, attention, graphs and pools, routers, and `Categorical`.

`Activation("entmax", learn="alpha")` learns alpha and keeps it inside `bounds`. A tensor in a map becomes a buffer of the module, and an
`nn.Parameter` its parameter: `Activation(Entmax(alpha=nn.Parameter(...)))` learns alpha without bounds.
In a map that is in no module, a parameter is in nobody's `parameters()`.

A map is data, not a module. In `torch.nn.Sequential` use an `Activation`, as in `Sequential(Linear(20, 5), Activation("sparsemax"))`.
"""

from __future__ import annotations

try:
    import torch as torch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "anymax.nn needs torch; install it with: pip install 'anymax[torch]'", name=error.name
    ) from None

from typing import TYPE_CHECKING

from .._attention.call import AttentionOptions
from .._core.elsewhere import answering
from .._core.tables import document
from .._core.typing import LossKeywords
from .adaptive_scale import AdaptiveScale
from .attention import Attention
from .attention_pool import AttentionPool
from .base import OfMapping
from .categorical import Categorical
from .graph_attention import GraphAttention
from .linear_loss import LinearLoss
from .margin_head import MarginHead
from .modules import Activation, Loss
from .router import Router

__all__ = [
    "Activation", "AdaptiveScale", "Attention", "AttentionPool", "Categorical", "GraphAttention", "LinearLoss", "Loss", "MarginHead",
    "Router",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__ = answering(__name__, __all__)

for _kind in (
    Activation, AdaptiveScale, Attention, AttentionPool, Categorical, GraphAttention, LinearLoss, Loss, MarginHead, Router,
):  # fmt: skip
    _kind.__module__ = __name__  # the public path, by which pickles find them

document(globals(), OfMapping, AttentionOptions, LossKeywords)


def __dir__() -> list[str]:
    return __all__
