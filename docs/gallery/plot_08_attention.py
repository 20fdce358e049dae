"""
Attention
=========

The same queries and keys under three maps. Each word sees itself and the words before it; the words that a causal mask
leaves out are one plain colour. Among those that are seen, exact zeros are hatched: these words do not enter the result
at all. Softmax has none.
"""

import matplotlib.pyplot as plt
import numpy as np

import anymax
from anymax import Entmax, Softmax, Sparsemax, plot

rng = np.random.default_rng(0)
words = "a cat that sees a bird on the fence sits still".split()
q, k, v = (1.4 * rng.normal(size=(len(words), 8)) for _ in range(3))

causal = np.tri(len(words), dtype=bool)  # row: the query; True: it may see the key
figure, axes = plt.subplots(1, 3, figsize=(12, 4.2), layout="constrained")
for mapping, ax in zip((Softmax(), Entmax(1.5), Sparsemax()), axes):
    _, weights = anymax.attention(q, k, v, mapping, mask=causal, need_weights=True)
    plot.attention(weights, queries=words, keys=words, mask=causal, ax=ax)
    ax.set_title(f"{plot.title(mapping)}: {ax.get_title()}")

# %%
# One picture for each head, here with :math:`\alpha` = 1, 1.25, 1.5 and 2, in a window of four words before and after
# each query. The larger :math:`\alpha` is, the more of the words in the window get a weight of exactly 0.

alpha = np.array([1.0, 1.25, 1.5, 2.0]).reshape(4, 1, 1)
heads = [np.broadcast_to(a, (4, *a.shape)) for a in (q, k, v)]
_, weights = anymax.attention(*heads, Entmax(alpha), window=4, need_weights=True)
position = np.arange(len(words))
near = np.abs(position[:, None] - position) <= 4
for ax, a, w in zip(plot.attention(weights, mask=near).flat, alpha.flat, weights):
    ax.set_title(rf"$\alpha = {a:g}$: {(w[near] == 0).mean():.0%} zeros")
