"""Maps, losses and samples of ragged rows (segments), one after another or in any order, as in graphs, sets and packed sequences."""

from .bridge import BRIDGE as _PLAIN
from .bridge import SegmentBridge
from .layout import Segments
from .loss import segment_loss
from .verbs import (
    segment_apply,
    segment_entropy,
    segment_log_apply,
    segment_logsumexp,
    segment_sample,
    segment_support,
    segment_threshold,
)

__all__ = [
    "Segments", "segment_apply", "segment_entropy", "segment_log_apply", "segment_logsumexp", "segment_loss",
    "segment_sample", "segment_support", "segment_threshold",
]  # fmt: skip


def segment_bridge(framework: str) -> SegmentBridge:
    """The part for segments of a framework's bridge."""
    if framework == "torch":
        from . import torch  # late: only where torch is loaded already

        return torch.BRIDGE
    if framework == "jax":
        from . import jax  # late: only where jax is loaded already

        return jax.BRIDGE
    return _PLAIN
