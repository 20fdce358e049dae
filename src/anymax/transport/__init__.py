"""Transport: matrices whose rows and columns both have given sums. `Sinkhorn` is the map, `gumbel_sinkhorn` draws from it."""

from typing import TYPE_CHECKING

from .._core.elsewhere import answering
from .gumbel import gumbel_sinkhorn
from .sinkhorn import Sinkhorn

__all__ = ["Sinkhorn", "gumbel_sinkhorn"]

if not TYPE_CHECKING:
    __getattr__ = answering(__name__, __all__)
