"""The verbs on segments: rows of unequal length, one after another or in any order, as in graphs, sets and packed sequences."""

from .layout import Segments
from .loss import segment_loss
from .verbs import (
    apply_tensor,
    segment_apply,
    segment_entropy,
    segment_log_apply,
    segment_logsumexp,
    segment_sample,
    segment_support,
    segment_threshold,
)

__all__ = [
    "Segments", "apply_tensor", "segment_apply", "segment_entropy", "segment_log_apply", "segment_logsumexp", "segment_loss",
    "segment_sample", "segment_support", "segment_threshold",
]  # fmt: skip
