r"""
How far apart scores must be
============================

Cross-entropy over :math:`n` classes can only be as small as the spread of the scores allows: a loss of :math:`l`
needs a spread of :math:`\log(n - 1) - \log(e^l - 1)`, although any lead is enough to be right. The entmax loss is 0
from a lead of :math:`1 / (\alpha - 1)` on, for any number of classes.
"""

import matplotlib.pyplot as plt
import numpy as np

import anymax
from anymax import plot

losses = np.geomspace(0.001, 3.0, 200)
figure, ax = plt.subplots(figsize=(6.4, 4.4), layout="constrained")
for i, n in enumerate((10, 1000, 100_000)):
    style = {
        "color": plot.style.COLOURS[i],
        "linestyle": plot.style.DASHES[i],
        "linewidth": 2,
    }
    ax.plot(
        losses, anymax.logit_gap(losses, n), label=f"cross-entropy, {n:,} classes", **style
    )
ax.axhline(
    2.0,
    color=plot.style.COLOURS[3],
    linestyle=plot.style.DASHES[3],
    label="entmax 1.5: the loss is 0 from here on",
)
ax.set(xscale="log", xlabel="loss", ylabel="spread of the scores", ylim=(0, 26))
ax.legend(loc="upper right")
