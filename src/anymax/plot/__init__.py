"""Pictures of maps, of their losses and of the results of models; each function draws on `ax` and returns it.

matplotlib is imported at the first call (extra `plot`). `maps` draws maps and losses, `models` draws results of models, `style` has the
colours, and `notebook` is the page that a notebook shows for a map.
"""

from __future__ import annotations

from .maps import CLASSIC as CLASSIC
from .maps import USUAL as USUAL
from .maps import bars, curves, jacobian, losses, simplex
from .maps import curve as curve
from .maps import rivals as rivals
from .models import attention, calibration, reliability, support_histogram
from .style import COLOURS as COLOURS
from .style import DASHES as DASHES
from .style import DIVERGING as DIVERGING
from .style import MARKERS as MARKERS
from .style import SEQUENTIAL as SEQUENTIAL
from .style import pyplot as pyplot
from .words import label as label
from .words import title as title

__all__ = [
    "attention",
    "bars",
    "calibration",
    "curves",
    "jacobian",
    "losses",
    "reliability",
    "simplex",
    "support_histogram",
]

for _picture in (attention, bars, calibration, curves, jacobian, losses, reliability, simplex, support_histogram):
    _picture.__module__ = __name__  # the public path
