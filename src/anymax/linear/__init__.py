"""Output layers: losses, log-probabilities and thresholds of `x @ weight.T + bias`, whose scores are never held all at once.

`layer` holds the operands and makes scores for some rows at a time; `ask` says what is asked of them; `groups` goes over the rows in
every framework. The files named for torch make the gradient without the scores: for any map by groups of rows (`torch_groups`), for maps
with few candidates from these alone (`torch_kept`, `torch_candidates`, `torch_backward`), and inside torch.compile (`torch_compiled`).
"""

from .verbs import linear_log_prob, linear_loss, linear_threshold, margin_linear_loss

__all__ = ["linear_log_prob", "linear_loss", "linear_threshold", "margin_linear_loss"]
