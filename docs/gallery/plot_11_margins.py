"""
Margins
=======

A margin lowers the target's cosine before the loss, so that the same angle counts as a larger one. Where a cosine
would rise again, the curve keeps falling.
"""

import matplotlib.pyplot as plt
import numpy as np

import anymax
from anymax import Entmax, Softmax, Sparsemax, margins, plot

degrees = np.linspace(0.0, 180.0, 361)
cosines = np.cos(np.radians(degrees))[:, None]
target = np.zeros(len(degrees), dtype=int)

figure, ax = plt.subplots(figsize=(6.4, 4.4), layout="constrained")
rules = {
    "no margin": margins.AM(0.0),
    "AM, CosFace: 0.35": margins.AM(0.35),
    "ArcFace: 0.5": margins.ArcFace(0.5),
    "SphereFace: 2": margins.SphereFace(2.0),
}
for i, (name, rule) in enumerate(rules.items()):
    style = {
        "color": plot.style.COLOURS[i],
        "linestyle": plot.style.DASHES[i],
        "linewidth": 2,
    }
    ax.plot(degrees, rule(cosines, target)[:, 0], label=name, **style)
ax.set(
    xlabel="angle between embedding and class, in degrees",
    ylabel="cosine that the loss sees",
    xlim=(0, 180),
)
ax.legend()

# %%
# The loss of a target against one other class at 90 degrees, with a margin of 0.35 and a scale of 10. The loss of a
# sparse map is exactly 0 once the target leads by enough; that of softmax never is.

pair = np.concatenate([cosines, 0.0 * cosines], axis=-1)
figure, ax = plt.subplots(figsize=(6.4, 4), layout="constrained")
for i, mapping in enumerate((Softmax(), Entmax(1.5), Sparsemax())):
    loss = anymax.margin_loss(
        mapping, pair, target, margin=0.35, scale=10.0, reduction="none"
    )
    ax.plot(
        degrees,
        loss,
        label=plot.title(mapping),
        color=plot.style.COLOURS[i],
        linestyle=plot.style.DASHES[i],
        linewidth=2,
    )
ax.set(
    xlabel="angle between embedding and its class, in degrees",
    ylabel="loss",
    xlim=(0, 120),
    ylim=(-0.2, 8),
)
ax.legend()
