"""Maps, losses and samples of ragged rows (segments), one after another or in any order, as in graphs, sets and packed sequences."""

from collections.abc import Callable

from .._array import Array
from .._core.mapping import Mapping
from ..kernels import choose_ragged
from ..kernels.engine import SegmentsAlong
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


def unpadded(framework: str) -> Callable[..., Array | None]:
    """The operations of engines on segments, with the derivatives of a framework."""
    if framework == "torch":
        from . import torch  # late: only where torch is loaded already

        return torch.unpadded
    if framework == "jax":
        from . import jax  # late: only where jax is loaded already

        return jax.unpadded
    return _without_derivatives


def _without_derivatives(
    op: str, mapping: Mapping, x: Array, along: SegmentsAlong, *target_rank: Array
) -> Array | None:
    engine = choose_ragged(op, mapping, x, along)
    return engine and engine.result(op, mapping, x, *target_rank)
