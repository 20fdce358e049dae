"""Losses of every map: Fenchel-Young losses, -log p and its kin, margins, and the loss of several labels."""

from .multilabel import multilabel_softmax_loss
from .verbs import (
    accuracy_loss,
    cross_entropy,
    entmax15_loss,
    entmax_loss,
    fenchel_young,
    margin_loss,
    nll,
    normmax_loss,
    perturb_max_loss,
    smoothed_nll,
    sparse_softmax_loss,
    sparsemax_loss,
    stop_gradient_loss,
    taylor_softmax_loss,
)

__all__ = [
    "accuracy_loss", "cross_entropy", "entmax15_loss", "entmax_loss", "fenchel_young", "margin_loss", "multilabel_softmax_loss", "nll",
    "normmax_loss", "perturb_max_loss", "smoothed_nll", "sparse_softmax_loss", "sparsemax_loss", "stop_gradient_loss",
    "taylor_softmax_loss",
]  # fmt: skip
