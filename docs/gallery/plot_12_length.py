r"""
Long rows
=========

One score of 4 among :math:`n` scores of 0. Under softmax its probability falls as :math:`n` grows. Scalable softmax
multiplies the scores by :math:`\log n` and keeps it. Sparsemax and entmax give it a probability of 1 at any length,
because it leads by more than :math:`1 / (\alpha - 1)`.

With normal noise on all scores (means of 20 rows), the largest of many others comes close. Sparse maps then share
the probability among these few, and not among all.
"""

import matplotlib.pyplot as plt
import numpy as np

import anymax
from anymax import plot, transforms

lengths = np.unique(np.geomspace(2, 30_000, 20).astype(int))
maps = {
    "softmax": anymax.softmax,
    r"scalable softmax, $0.43 \log n$": lambda x: anymax.softmax(
        transforms.scalable(beta=0.43)(x)
    ),
    "entmax 1.5": anymax.entmax15,
    "sparsemax": anymax.sparsemax,
}


def scores(n, noise):
    x = noise * np.random.default_rng(n).normal(size=(20, n))
    x[:, 0] += 4.0
    return x


figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained", sharey=True)
for noise, ax in zip((0.0, 0.7), axes):
    for i, (name, p) in enumerate(maps.items()):
        share = [p(scores(n, noise))[:, 0].mean() for n in lengths]
        style = {
            "color": plot.style.COLOURS[i],
            "linestyle": plot.style.DASHES[i],
            "marker": "osD^"[i],
            "markersize": 4,
        }
        ax.plot(lengths, share, label=name, **style)
    ax.set(xscale="log", xlabel="length of the row")
axes[0].set(ylabel="probability of the one score", title="the others are 0")
axes[1].set_title("noise of 0.7 on all scores")
axes[0].legend(loc="center right", fontsize="small")
