"""Output layers: losses, log-probabilities and thresholds of `x @ weight.T + bias`, whose scores are never held all at once.

`layer` holds the operands and computes scores for some rows at a time; a `job` says what to compute from them, with the targets; `bridge`
loops over the rows, `torch` and `jax` with a gradient. torch has four methods:

- softmax: logsumexp, a block of classes at a time (`torch_softmax`);
- a sparse separable map, or top-k: each row keeps a few candidates, whose gradient is a sparse product (`torch_candidates`);
- any other map: a group of rows at a time (`torch_groups`);
- inside torch.compile: these three as opaque operations (`torch_compiled`).

`torch_methods` chooses one. `torch_values` computes the results from what the first two give. In `contrastive` the weight is the other side
of pairs, and `torch_contrastive` has the blocks of both directions.
"""

from .bridge import BRIDGE as _PLAIN
from .bridge import LayerBridge
from .divergences import linear_kl
from .likelihoods import linear_log_prob, linear_log_prob_entropy, linear_topk_kl
from .verbs import explain_linear_loss, linear_loss, linear_threshold

__all__ = [
    "explain_linear_loss",
    "linear_kl",
    "linear_log_prob",
    "linear_log_prob_entropy",
    "linear_loss",
    "linear_threshold",
    "linear_topk_kl",
]


def layer_bridge(framework: str) -> LayerBridge:
    """The part of a framework's bridge for output layers."""
    if framework == "torch":
        from . import torch  # late: torch is loaded already

        return torch.BRIDGE
    if framework == "jax":
        from . import jax  # late: jax is loaded already

        return jax.BRIDGE
    return _PLAIN
