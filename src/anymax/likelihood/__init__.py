"""Log-probabilities of classes, entropies and divergences."""

from .verbs import kl, log_prob, log_prob_entropy, topk_kl

__all__ = ["kl", "log_prob", "log_prob_entropy", "topk_kl"]
