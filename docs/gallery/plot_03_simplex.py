"""
Three classes
=============

The largest of three probabilities, over all scores that sum to 0. White lines separate the regions in which one,
two or three classes have a probability above 0: "2 of 3" means that one class has a probability of exactly 0. Softmax
has no line, since all three classes keep a probability everywhere, and neither has the softmax of the two largest
scores, which drops one class everywhere. The dashed triangle is the simplex itself; sparsemax does not move the points
inside it.
"""

import matplotlib.pyplot as plt

from anymax import Entmax, NormMax, PerturbMax, Softmax, Sparsemax, SparseSoftmax, plot

maps = (
    Softmax(),
    Entmax(1.5),
    Sparsemax(),
    NormMax(2.0),
    SparseSoftmax(k=2),
    PerturbMax("uniform"),
)
figure, axes = plt.subplots(2, 3, figsize=(10, 6.6), layout="constrained")
for mapping, ax in zip(maps, axes.flat):
    plot.simplex(mapping, extent=2.6, resolution=241, ax=ax).title.set_fontsize("medium")
    ax.label_outer()
