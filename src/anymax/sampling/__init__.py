"""Draws from the probabilities of a map: `sample`, Gumbel's methods, and the steps of decoding."""

from typing import TYPE_CHECKING

from .._core.elsewhere import answering
from .decoding import Accepted, TopK, gumbel_topk, recovered_tokens, speculative_accept, topk_log_prob
from .most_probable import Top, top
from .results import Sample, Support
from .samplers import gumbel_max, gumbel_softmax, perturb_argmax, sample

__all__ = [
    "Accepted", "Sample", "Support", "Top", "TopK", "gumbel_max", "gumbel_softmax", "gumbel_topk", "perturb_argmax", "recovered_tokens",
    "sample", "speculative_accept", "top", "topk_log_prob",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__ = answering(__name__, __all__)
