"""
Proportions of labels
=====================

A document has one to three topics in equal shares, and words drawn from them. A linear model is trained on the
proportions, once with the loss of softmax and once with that of sparsemax. Sparsemax can say that a topic is absent;
softmax cannot. The distance is the Jensen-Shannon divergence, averaged over documents.
"""

import matplotlib.pyplot as plt
import numpy as np

import anymax
from anymax import Softmax, Sparsemax, plot

topics = 10


def documents(count, length, rng):
    words = rng.dirichlet(np.full(topics, 0.3), size=topics)
    shares = np.zeros((count, topics))
    for share in shares:
        chosen = rng.choice(topics, size=rng.integers(1, 4), replace=False)
        share[chosen] = 1 / len(chosen)
    counts = np.stack([rng.multinomial(length, share @ words) for share in shares])
    return counts / length, shares


def train(mapping, x, y, steps=300, rate=20.0):
    weights, speed = np.zeros((topics, topics)), np.zeros((topics, topics))
    for _ in range(steps):  # the gradient of every Fenchel-Young loss is p - y
        gradient = x.T @ (anymax.apply(mapping, x @ weights) - y) / len(x)
        speed = 0.9 * speed - rate * gradient
        weights = weights + speed
    return weights


def divergence(p, q):
    middle = (p + q) / 2
    logs = [
        a * np.log(np.where(a > 0, a / np.where(a > 0, middle, 1.0), 1.0)) for a in (p, q)
    ]
    return 0.5 * sum(logs).sum(axis=-1).mean()


lengths = (50, 200, 1000, 4000)
found = {"softmax": [], "sparsemax": []}
for length in lengths:
    x, y = documents(1000, length, np.random.default_rng(0))
    for name, mapping in (("softmax", Softmax()), ("sparsemax", Sparsemax())):
        weights = train(mapping, x[:600], y[:600])
        p = anymax.apply(mapping, x[600:] @ weights)
        found[name].append(divergence(p, y[600:]))

figure, ax = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
for i, (name, values) in enumerate(found.items()):
    ax.plot(
        lengths,
        values,
        label=name,
        color=plot.style.COLOURS[i],
        linestyle=plot.style.DASHES[i],
        marker="os"[i],
        linewidth=2,
    )
ax.set(
    xscale="log",
    yscale="log",
    xlabel="words in a document",
    ylabel="distance to the true proportions",
)
ax.legend()

# %%
# How many topics the model finds in the longest documents.

print("true topics in a document:", (y[600:] > 0).sum(axis=1).mean(), "on average")
plot.support_histogram({"true": y[600:], "sparsemax": p})
