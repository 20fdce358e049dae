"""Output layers: losses, log-probabilities and thresholds of `x @ weight.T + bias`, whose scores are never held all at once.

`layer` is the layer and its groups of rows, `ask` what is asked of their scores, `groups` goes over them in every framework. The files named
for torch make the gradient without the scores: of any map by groups of rows (`torch_groups`), of maps with few candidates from these alone
(`torch_kept`, `torch_candidates`, `torch_backward`), and inside torch.compile (`torch_compiled`).
"""

from .verbs import linear_log_prob, linear_loss, linear_threshold, margin_linear_loss

__all__ = ["linear_log_prob", "linear_loss", "linear_threshold", "margin_linear_loss"]
