"""Margins of cosine losses: what `margin_loss` and `nn.MarginHead` take off the score of the target."""

from .losses.margins import AM, ArcFace, Combined, CosFace, Margin, SphereFace, as_margin

__all__ = ["AM", "ArcFace", "Combined", "CosFace", "Margin", "SphereFace", "as_margin"]
