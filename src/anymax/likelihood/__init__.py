"""Log-probabilities of classes, entropies and divergences."""

from collections.abc import Callable

from .._array import Array
from .divergence import plain as _plain_divergence
from .softmax_plain import Terms
from .softmax_plain import terms as _plain_terms
from .verbs import kl, log_prob, log_prob_entropy, topk_kl

__all__ = ["kl", "log_prob", "log_prob_entropy", "topk_kl"]


def softmax_terms(framework: str) -> Callable[..., Terms]:
    """The part for the terms of softmax of a framework's bridge."""
    if framework == "torch":
        from . import softmax_torch  # late: only where torch is loaded already

        return softmax_torch.terms
    if framework == "jax":
        from . import softmax_jax  # late: only where jax is loaded already

        return softmax_jax.terms
    return _plain_terms


def softmax_divergence(framework: str) -> Callable[..., Array]:
    """The part for the divergence of two softmaxes of a framework's bridge."""
    if framework == "torch":
        from . import divergence_torch  # late: only where torch is loaded already

        return divergence_torch.divergence
    return _plain_divergence
