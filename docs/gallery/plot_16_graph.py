"""
A graph and its pruned edges
============================

Attention on a graph gives each node a distribution over its neighbours. Each node is a row of its own length, and `anymax.segment_apply`
applies any map to such rows. About half of the edges here join nodes of one community. The others are noise: they join nodes of different
communities. The score of an edge is the similarity of its ends. Softmax keeps all edges; sparsemax and 1.5-entmax give many edges a
weight of exactly 0, and most of these are noise.
"""

import matplotlib.pyplot as plt
import numpy as np

import anymax
from anymax import plot

rng = np.random.default_rng(3)
size, communities = 16, 3
label = np.repeat(np.arange(communities), size)
nodes = len(label)
angle = 2 * np.pi * (np.arange(communities) + 0.25) / communities
turn = 2 * np.pi * np.tile(np.arange(size), communities) / size
place = 2.1 * np.stack([np.cos(angle), np.sin(angle)], 1)[label]
place += np.stack([np.cos(turn), np.sin(turn)], 1) * rng.uniform(0.85, 1.15, nodes)[:, None]

same = label[:, None] == label
p = np.where(same, 3 / size, 3 / (nodes - size))
i, j = np.nonzero(np.triu(rng.random((nodes, nodes)) < p, 1))
source, target = np.concatenate([i, j]), np.concatenate([j, i])  # each edge both ways
noise = label[source] != label[target]

features = 1.2 * rng.standard_normal((communities, 8))[label] + rng.standard_normal(
    (nodes, 8)
)
scores = (features[source] * features[target]).sum(1) / np.sqrt(8)

# %%
# The target of an edge says in which row the edge is. The edges may come in any order; `Segments.of` sorts them once for all maps.

rows = anymax.Segments.of(target, num_segments=nodes)
names = {"softmax": "softmax", "entmax15": "1.5-entmax", "sparsemax": "sparsemax"}
weights = {name: anymax.segment_apply(name, scores, index=rows) for name in names}
for name, w in weights.items():
    zero = w == 0
    print(
        f"{names[name]:>10}: weight 0 on {zero[noise].mean():.0%} of the noisy edges and {zero[~noise].mean():.0%} of the true ones"
    )

# %%
# An edge is drawn as dark as the larger of its two weights, and dashed where both are exactly 0.

figure, axes = plt.subplots(1, 3, figsize=(13, 4.9), layout="constrained")
for ax, (name, w) in zip(axes, weights.items()):
    larger = np.maximum(w[: len(i)], w[len(i) :])
    for a, b, weight in zip(i, j, larger):
        style = {
            "color": "#C9302C",
            "linestyle": (0, (2, 2)),
            "linewidth": 0.9,
            "alpha": 0.75,
        }
        if weight > 0:
            style = {
                "color": "#303030",
                "linewidth": 0.4 + 2.6 * weight,
                "alpha": 0.25 + 0.75 * weight,
            }
        ax.plot(*place[[a, b]].T, zorder=1, **style)
    for c in range(communities):
        ax.scatter(
            *place[label == c].T,
            s=42,
            color=plot.style.COLOURS[c],
            edgecolor="white",
            zorder=2,
        )
    ax.set(
        title=f"{names[name]}: {(larger == 0).sum()} of {len(i)} edges pruned",
        xticks=[],
        yticks=[],
        aspect="equal",
    )
    ax.spines[:].set_visible(False)

# %%
# How many of its neighbours each node attends to.

figure, ax = plt.subplots(figsize=(7, 4), layout="constrained")
for k, (name, w) in enumerate(weights.items()):
    kept = anymax.segment_support(w, index=rows)
    ax.plot(
        np.sort(kept)[::-1],
        color=plot.style.COLOURS[k],
        linestyle=plot.style.DASHES[k],
        linewidth=2,
        label=names[name],
    )
ax.set(xlabel="nodes, sorted", ylabel="neighbours with a weight above 0", ylim=(0, None))
ax.legend()
