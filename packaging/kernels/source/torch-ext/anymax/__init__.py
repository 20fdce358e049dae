"""Every map from scores to probabilities as kernels in Triton: softmax, sparsemax, entmax, top-k and top-p, budgets; with their gradients,
losses, attention and routers.

These are the GPU kernels of the package anymax, which has them for CPUs and JAX too, with second derivatives, samplers and more.
"""

from __future__ import annotations

from . import layers
from ._attention import attention
from .losses import cross_entropy, entmax15_loss, entmax_loss, fenchel_young, sparsemax_loss
from .routing import route
from .rows import apply, budget, entmax, entmax15, log_apply, log_softmax, softmax, sparse_softmax, sparsemax, threshold
from .segments import segment_apply, segment_layout
from .transport import sinkhorn

__all__ = [
    "apply",
    "attention",
    "budget",
    "cross_entropy",
    "entmax",
    "entmax15",
    "entmax15_loss",
    "entmax_loss",
    "fenchel_young",
    "layers",
    "log_apply",
    "log_softmax",
    "route",
    "segment_apply",
    "segment_layout",
    "sinkhorn",
    "softmax",
    "sparse_softmax",
    "sparsemax",
    "sparsemax_loss",
    "threshold",
]
