r"""
From softmax to sparsemax
=========================

The probabilities of five fixed scores against :math:`\alpha`. At 1 they are those of softmax, at 2 those of
sparsemax. One class after the other drops to 0.
"""

import matplotlib.pyplot as plt
import numpy as np

import anymax
from anymax import plot

x = np.array([1.2, 0.9, 0.4, -0.2, -1.0])
alphas = np.linspace(1.0, 3.0, 201)
p = anymax.entmax(np.broadcast_to(x, (201, 5)), alpha=alphas[:, None])

figure, (ax, below) = plt.subplots(
    2, 1, figsize=(6.4, 6), layout="constrained", sharex=True, height_ratios=(3, 1)
)
for i in range(5):
    style = {
        "color": plot.style.COLOURS[i],
        "linestyle": plot.style.DASHES[i % 4],
        "linewidth": 2,
    }
    ax.plot(alphas, p[:, i], label=f"score {x[i]:g}", **style)
ax.set(ylabel="probability")
ax.legend()
below.step(
    alphas, anymax.support(p).sum(axis=-1), color=plot.style.COLOURS[0], where="post"
)
below.set(xlabel=r"$\alpha$", ylabel="classes above 0", yticks=range(1, 6))
