"""Pictures of maps, of their losses and of the results of models; each function draws on `ax` and returns it.

matplotlib is imported at the first call (extra `plot`). `two_classes` and `maps` draw maps and losses, `models` draws results of models,
`style` has the colours, and `notebook` is the page that a notebook shows for a map.
"""

from typing import TYPE_CHECKING

from .._core.elsewhere import answering
from .maps import bars, jacobian, simplex
from .models import attention, calibration, reliability, support_histogram
from .two_classes import curve, curves, losses, rivals
from .words import label, title

__all__ = [
    "attention", "bars", "calibration", "curve", "curves", "jacobian", "label", "losses", "reliability", "rivals", "simplex",
    "support_histogram", "title",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__ = answering(__name__, __all__)

for _picture in (attention, bars, calibration, curves, jacobian, losses, reliability, simplex, support_histogram):
    _picture.__module__ = __name__  # the public path
