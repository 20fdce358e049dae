r"""
How many classes are left
=========================

How many of 100 classes have a probability above 0, over 2,000 rows of normal scores with a standard deviation of 2.
Sparsemax keeps the fewest, and a lower :math:`\alpha` keeps more. Softmax keeps all 100.
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
# Large supports are counted in steps. Of 1,000 classes, entmax 1.1 keeps most; the nucleus of top-p, the fewest classes
# with a softmax probability of 0.9 together, has about a quarter of them.

wide = np.random.default_rng(1).normal(size=(500, 1000))
plot.support_histogram(
    {
        "entmax 1.1": anymax.entmax(2.0 * wide, alpha=1.1),
        "top-p 0.9": anymax.sparse_softmax(2.0 * wide, p=0.9),
    }
)
