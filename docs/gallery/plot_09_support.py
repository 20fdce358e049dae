r"""
How many classes are left
=========================

The size of the support over 2,000 rows of 100 normal scores. Sparsemax keeps the fewest; a
lower :math:`\alpha` keeps more.
"""

import numpy as np

import anymax
from anymax import plot

x = 2.0 * np.random.default_rng(0).normal(size=(2000, 100))
plot.support_histogram(
    {
        "sparsemax": anymax.sparsemax(x),
        "entmax 1.5": anymax.entmax15(x),
        "entmax 1.25": anymax.entmax(x, alpha=1.25),
    }
)

# %%
# Large supports are counted in bins. Entmax 1.1 of 1,000 classes, beside the nucleus that holds a softmax
# probability of 0.9.

wide = np.random.default_rng(1).normal(size=(500, 1000))
plot.support_histogram(
    {
        "entmax 1.1": anymax.entmax(2.0 * wide, alpha=1.1),
        "top-p 0.9": anymax.sparse_softmax(2.0 * wide, p=0.9),
    }
)
