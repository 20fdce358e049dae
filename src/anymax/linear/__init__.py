"""Output layers: losses, log-probabilities and thresholds of `x @ weight.T + bias`, whose scores are never held all at once.

`layer` holds the operands and makes scores for some rows at a time; `ask` says what is asked of them; `bridge` goes over the rows, `torch`
and `jax` with a gradient. In torch it is made without the scores: for any map by groups of rows (`torch_groups`), for maps with few
candidates from these alone (`torch_kept`, `torch_candidates`, `torch_backward`), and inside torch.compile (`torch_compiled`).
"""

from .bridge import BRIDGE as _PLAIN
from .bridge import LayerBridge
from .verbs import linear_log_prob, linear_loss, linear_threshold, margin_linear_loss

__all__ = ["linear_log_prob", "linear_loss", "linear_threshold", "margin_linear_loss"]


def layer_bridge(framework: str) -> LayerBridge:
    """The part for output layers of a framework's bridge."""
    if framework == "torch":
        from . import torch  # late: only where torch is loaded already

        return torch.BRIDGE
    if framework == "jax":
        from . import jax  # late: only where jax is loaded already

        return jax.BRIDGE
    return _PLAIN
