"""Output layers: losses, log-probabilities and thresholds of `x @ weight.T + bias`, whose scores are never held all at once.

`layer` holds the operands and computes scores for some rows at a time; `per_row` says what to compute from them; `bridge` loops over the
rows, `torch` and `jax` with a gradient. torch has three methods: groups of rows, for any map (`torch_groups`); the few scores that each
row keeps (`torch_values`, `torch_candidates`, `torch_backward`); and opaque operations inside torch.compile (`torch_compiled`).
"""

from .bridge import BRIDGE as _PLAIN
from .bridge import LayerBridge
from .verbs import linear_log_prob, linear_loss, linear_threshold, margin_linear_loss

__all__ = ["linear_log_prob", "linear_loss", "linear_threshold", "margin_linear_loss"]


def layer_bridge(framework: str) -> LayerBridge:
    """The part of a framework's bridge for output layers."""
    if framework == "torch":
        from . import torch  # late: torch is loaded already

        return torch.BRIDGE
    if framework == "jax":
        from . import jax  # late: jax is loaded already

        return jax.BRIDGE
    return _PLAIN
