"""
Attention
=========

The same queries and keys under three maps. Exact zeros are hatched: these words do not enter the result at all.
"""

import matplotlib.pyplot as plt
import numpy as np

import anymax
from anymax import Entmax, Softmax, Sparsemax, plot

rng = np.random.default_rng(0)
words = "a cat that sees a bird on the fence sits still".split()
q, k, v = (1.4 * rng.normal(size=(len(words), 8)) for _ in range(3))

figure, axes = plt.subplots(1, 3, figsize=(11, 3.8), layout="constrained")
for mapping, ax in zip((Softmax(), Entmax(1.5), Sparsemax()), axes):
    _, weights = anymax.attention(q, k, v, mapping, is_causal=True, need_weights=True)
    plot.attention(weights, queries=words, keys=words, ax=ax)
    ax.set_title(f"{plot.title(mapping)}: {ax.get_title()}")

# %%
# One picture for each head, here with :math:`\alpha` = 1, 1.25, 1.5 and 2, in a window of four words.

alpha = np.array([1.0, 1.25, 1.5, 2.0]).reshape(4, 1, 1)
heads = [np.broadcast_to(a, (4, *a.shape)) for a in (q, k, v)]
_, weights = anymax.attention(*heads, Entmax(alpha), window=4, need_weights=True)
for ax, a in zip(plot.attention(weights).flat, alpha.flat):
    ax.set_title(rf"$\alpha = {a:g}$")
