"""
Two classes
===========

With the scores (t, 0) a map of two classes is a curve. Softmax has the sigmoid here, sparsemax the hard sigmoid,
and Taylor softmax turns round where its polynomial does.
"""

from anymax import Budget, Entmax, plot

plot.curves()

# %%
# A family is a list of maps. The higher alpha, the sooner entmax is exactly 0 or 1: from a lead of 1 / (alpha -
# 1) on.

plot.curves([Entmax(alpha) for alpha in (1.0, 1.25, 1.5, 2.0, 4.0)])

# %%
# A budget of 1 is sparsemax. Half a unit of probability is shared in the same way, at half the height.

plot.curves([Budget(1.0), Budget(0.5)])
