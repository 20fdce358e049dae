"""Margins of cosine losses: what `margin_loss` and `nn.MarginHead` subtract from the score of the target."""

from .losses.margins import AM, ArcFace, Combined, Margin, SphereFace

__all__ = ["AM", "ArcFace", "Combined", "Margin", "SphereFace"]
