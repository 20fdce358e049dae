"""
Temperature
===========

Four fixed scores, divided by a temperature :math:`T`. As :math:`T` falls, softmax approaches the one-hot argmax and
never reaches it. Sparsemax drops one class after the other, each at a temperature that is a sum of score differences
(dotted), and is one-hot once :math:`T` is at most the lead of the best score.
"""

import matplotlib.pyplot as plt
import numpy as np

import anymax
from anymax import Entmax, Softmax, Sparsemax, plot, transforms

x = np.array([1.0, 0.6, 0.1, -0.5])
temperatures = np.geomspace(0.1, 20.0, 300)
figure, axes = plt.subplots(1, 3, figsize=(9, 3.4), layout="constrained", sharey=True)
for mapping, ax in zip((Softmax(), Entmax(1.5), Sparsemax()), axes):
    p = anymax.apply(
        mapping, transforms.temperature(temperatures[:, None])(np.broadcast_to(x, (300, 4)))
    )
    for i in range(4):
        style = {
            "color": plot.style.COLOURS[i],
            "linestyle": plot.style.DASHES[i],
            "linewidth": 2,
        }
        ax.plot(temperatures, p[:, i], label=f"score {x[i]:g}", **style)
    ax.set(xscale="log", xlabel="temperature", title=plot.title(mapping))
axes[0].set_ylabel("probability")
axes[0].legend()
for k in range(1, 4):
    axes[2].axvline(np.sum(x[: k + 1] - x[k]), color="grey", linewidth=0.8, linestyle=":")
