"""
Jacobians
=========

How each probability changes with each score. Exact zeros are white: a class outside the support affects no other
class and is affected by none.
"""

import matplotlib.pyplot as plt
import numpy as np

import anymax
from anymax import Entmax, Softmax, Sparsemax, SparseSoftmax, plot

x = [0.8, 0.5, 0.2, -1.0]
maps = (Softmax(), Entmax(1.5), Sparsemax(), SparseSoftmax(k=2))
bound = max(np.abs(anymax.jacobian(mapping, x)).max() for mapping in maps)
figure, axes = plt.subplots(2, 2, figsize=(9, 7.5), layout="constrained")
for mapping, ax in zip(maps, axes.flat):
    plot.jacobian(mapping, x, bound=bound, ax=ax)

# %%
# The size of the Jacobian, half the sum of its absolute entries, while one score leaves four others behind. For
# softmax it stays below 1 and fades away; for sparsemax it is the number of classes in the support less 1, and ends
# at 0.

lead = np.linspace(-1.0, 5.0, 241)
rows = np.stack(
    [lead, *([0.0, -0.2, -0.4, -0.6][i] + 0.0 * lead for i in range(4))], axis=-1
)
figure, ax = plt.subplots(figsize=(6.4, 4), layout="constrained")
for i, mapping in enumerate((Softmax(), Entmax(1.5), Sparsemax())):
    size = anymax.inspection.jacobian_norm(mapping, rows)
    ax.plot(
        lead,
        size,
        label=plot.title(mapping),
        color=plot.style.COLOURS[i],
        linestyle=plot.style.DASHES[i],
        linewidth=2,
    )
ax.set(xlabel="score of the first class", ylabel="half the L1 norm of the Jacobian")
ax.legend()
