"""
Jacobians
=========

How each probability answers to each score. Exact zeros are white: a class outside of the support neither gives nor
takes.
"""

import matplotlib.pyplot as plt
import numpy as np

import anymax
from anymax import Entmax, Softmax, Sparsemax, SparseSoftmax, plot

x = [0.8, 0.5, 0.2, -1.0]
figure, axes = plt.subplots(2, 2, figsize=(9, 7.5), layout="constrained")
for mapping, ax in zip(
    (Softmax(), Entmax(1.5), Sparsemax(), SparseSoftmax(k=2)), axes.flat
):
    plot.jacobian(mapping, x, ax=ax)

# %%
# Its size, half the sum of the absolute entries, as one score leaves four others behind. That of softmax is never
# above 1 and fades; that of sparsemax is the number of supported classes less 1, and then nothing.

lead = np.linspace(-1.0, 5.0, 241)
rows = np.stack(
    [lead, *([0.0, -0.2, -0.4, -0.6][i] + 0.0 * lead for i in range(4))], axis=-1
)
figure, ax = plt.subplots(figsize=(6.4, 4), layout="constrained")
for i, mapping in enumerate((Softmax(), Entmax(1.5), Sparsemax())):
    size = anymax.jacobian_norm(mapping, rows)
    ax.plot(
        lead,
        size,
        label=plot.label(mapping),
        color=plot.COLOURS[i],
        linestyle=plot.DASHES[i],
        linewidth=2,
    )
ax.set(xlabel="score of the first class", ylabel="half the L1 norm of the Jacobian")
ax.legend()
