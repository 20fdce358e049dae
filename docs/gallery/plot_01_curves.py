"""
Two classes
===========

With the scores :math:`(t, 0)` a map of two classes is a curve. For softmax it is the sigmoid, for sparsemax the hard
sigmoid; Taylor softmax rises again on the left, where its polynomial does.
"""

from anymax import Budget, Entmax, plot

plot.curves()

# %%
# Several maps of one family are a list. The higher :math:`\alpha` is, the sooner entmax is exactly 0 or 1: from a
# lead of :math:`1 / (\alpha - 1)` on.

plot.curves([Entmax(alpha) for alpha in (1.0, 1.25, 1.5, 2.0, 4.0)])

# %%
# A budget of 1 is sparsemax. A budget of 0.5 shares half as much in the same way.

plot.curves([Budget(1.0), Budget(0.5)])
