"""The functions of anymax for classes that are split over several processes. Each process passes its own part of the scores, its shard.

Use it for output layers that are split along the classes, as in tensor-parallel language models and classifiers of millions of
identities. In torch the processes are those of `torch.distributed`, or a dimension of a `DeviceMesh`; in JAX they are the devices of
an axis, inside `jax.shard_map`. A call sends a few numbers for each row: docs/many_machines.md has the table. All processes of the
group make the same calls in the same order.
"""

from typing import TYPE_CHECKING

from .._core.elsewhere import answering
from .call import ShardKeywords as ShardKeywords
from .layer_verbs import (
    linear_kl,
    linear_log_prob,
    linear_log_prob_entropy,
    linear_loss,
    linear_threshold,
    linear_topk_kl,
)
from .verbs import apply, fenchel_young, log_apply, log_prob_entropy, logsumexp, nll, sample, threshold

__all__ = [
    "apply", "fenchel_young", "linear_kl", "linear_log_prob", "linear_log_prob_entropy", "linear_loss", "linear_threshold",
    "linear_topk_kl", "log_apply", "log_prob_entropy", "logsumexp", "nll", "sample", "threshold",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__ = answering(__name__, __all__)


def __dir__() -> list[str]:
    return __all__
