"""
Noise
=====

Perturb-max is the probability that a score is the largest once noise is added. With Gumbel noise that is softmax;
bounded noise gives exact zeros.
"""

import matplotlib.pyplot as plt
import numpy as np

import anymax
from anymax import PerturbMax, plot

plot.curves(
    [PerturbMax(noise) for noise in ("gumbel", "normal", "logistic", "laplace", "uniform")]
)

# %%
# Gumbel-softmax: relaxed samples of three classes. The lower the temperature, the nearer they are to a vertex. At
# every temperature, the nearest vertex is a sample from softmax.

scores = np.broadcast_to(np.array([1.0, 0.5, 0.0]), (600, 3))
corners = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, np.sqrt(0.75)]])
figure, axes = plt.subplots(1, 3, figsize=(9, 3.2), layout="constrained")
for temperature, ax in zip((0.2, 1.0, 5.0), axes):
    p = anymax.gumbel_softmax(scores, temperature, generator=np.random.default_rng(0))
    nearest = p.argmax(axis=-1)
    for i in range(3):
        chosen = nearest == i
        ax.scatter(
            *(p[chosen] @ corners).T,
            s=8,
            marker="osD"[i],
            color=plot.style.COLOURS[i],
            alpha=0.6,
            label=f"class {i + 1}: {chosen.mean():.0%}",
        )
    ax.plot(*np.vstack([corners, corners[:1]]).T, color="grey", linewidth=0.8)
    ax.set(title=f"temperature {temperature:g}", aspect="equal")
    ax.set_axis_off()
    ax.legend(fontsize=8, loc="upper right", framealpha=0.6)
print("softmax:", anymax.softmax(scores[0]).round(2))
