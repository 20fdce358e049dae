"""
Losses of two classes
=====================

The loss against the lead of the target's score, divided by its value where the two scores are equal. For softmax it
is the logistic loss, for sparsemax the modified Huber loss: quadratic near the answer, linear far from it, and 0
once the target leads by 1.
"""

from anymax import Entmax, NormMax, PerturbMax, Softmax, Sparsemax, Taylor, plot

plot.losses()

# %%
# Without the division, and without the classic losses. Taylor softmax has no loss of its own, so its negative
# log-likelihood is drawn: it falls again on the far left, where the target becomes more probable as its score
# falls.

plot.losses(
    [Softmax(), Sparsemax(), NormMax(2.0), PerturbMax("normal"), Taylor(2)],
    classic=False,
    scaled=False,
)

# %%
# Entmax reaches 0 at a lead of :math:`1 / (\alpha - 1)`.

plot.losses([Entmax(alpha) for alpha in (1.25, 1.5, 2.0, 3.0)], classic=False)
