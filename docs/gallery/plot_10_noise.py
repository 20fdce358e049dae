"""
Noise
=====

Perturb-max is the probability that a score is the largest once noise is added. With Gumbel noise that is softmax;
bounded noise gives exact zeros. Each noise has its usual scale: uniform noise lies between 0 and 1, so its curve is the
steepest, and logistic noise has the largest variance and the flattest curve.
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
# every temperature, the nearest vertex is a sample from softmax: the shares of 200,000 samples stand at the vertices,
# and 600 of the samples are drawn. Softmax gives 50.6 %, 30.7 % and 18.6 %.

scores = np.broadcast_to(np.array([1.0, 0.5, 0.0]), (200_000, 3))
corners = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, np.sqrt(0.75)]])
figure, axes = plt.subplots(1, 3, figsize=(10, 3.6), layout="constrained")
for temperature, ax in zip((0.2, 1.0, 5.0), axes):
    p = anymax.gumbel_softmax(scores, temperature, generator=np.random.default_rng(0))
    nearest = p.argmax(axis=-1)
    for i, (x, y) in enumerate(corners):
        share, drawn = (nearest == i).mean(), p[:600][nearest[:600] == i] @ corners
        ax.scatter(*drawn.T, s=8, marker="osD"[i], color=plot.style.COLOURS[i], alpha=0.6)
        ax.text(
            x,
            y + (0.05 if y else -0.05),
            f"class {i + 1}: {share:.1%}",
            ha="center",
            va="bottom" if y else "top",
        )
    ax.plot(*np.vstack([corners, corners[:1]]).T, color="grey", linewidth=0.8)
    ax.set(
        title=f"temperature {temperature:g}",
        aspect="equal",
        xlim=(-0.25, 1.25),
        ylim=(-0.2, 1.0),
    )
    ax.set_axis_off()
print("softmax:", anymax.softmax(scores[0]).round(2))
