"""Margins of cosine losses: what `margin_loss` and `nn.MarginHead` take off the score of the target."""

from typing import TYPE_CHECKING

from ._core.elsewhere import answering
from .losses.margins import AM, ArcFace, Combined, CosFace, Margin, SphereFace, as_margin

__all__ = ["AM", "ArcFace", "Combined", "CosFace", "Margin", "SphereFace", "as_margin"]

if not TYPE_CHECKING:
    __getattr__ = answering(__name__, __all__)
