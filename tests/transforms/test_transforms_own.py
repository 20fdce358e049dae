"""Functions of a user's own as transforms, in the verbs that take one."""

from __future__ import annotations

import numpy as np
import pytest
from kinds import KINDS, back
from scipy.special import softmax as scipy_softmax

import anymax as A
from anymax.transforms import compose

VERBS = {
    "sample": lambda x, t: A.sample("softmax", x, transform=t, generator=0),
    "topk_log_prob": lambda x, t: A.sampling.topk_log_prob("softmax", x, 2, t),
    "gumbel_topk": lambda x, t: A.sampling.gumbel_topk(x, 2, transform=t, generator=0),
    "log_prob": lambda x, t: A.log_prob("softmax", x, np.zeros(len(x), int), transform=t),
    "linear_log_prob": lambda x, t: A.linear_log_prob(x, np.eye(3), np.zeros(len(x), int), "softmax", transform=t),
    "attention": lambda x, t: A.attention(x[:2], x, x, transform=t),
}
NO_SCORES = (
    lambda s: s.T,
    lambda s: s[:1],
    lambda s: None,
    lambda s: 3,
    lambda s: s.tolist(),
    lambda s: s > 0,
    lambda s: KINDS["torch"](s),
)


@pytest.mark.parametrize("verb", VERBS)
def test_a_transform_must_give_back_scores(verb):
    x = np.arange(12.0).reshape(4, 3)
    refused = f"{verb}: transform must give back scores of the shape and kind that it got"
    for t in NO_SCORES:
        with pytest.raises(ValueError, match=refused):
            VERBS[verb](x, t)
    np.testing.assert_array_equal(np.stack(VERBS[verb](x, lambda s: s.astype(int))), np.stack(VERBS[verb](x, np.trunc)))


@pytest.mark.parametrize("verb", [*VERBS, "compose"])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_transform_in_place_leaves_the_scores_alone(kind, verb):
    def doubled(s):
        s *= 2
        return s

    x = KINDS[kind](np.arange(12.0).reshape(4, 3) ** 2 % 5)
    before, apply = back(x).copy(), VERBS.get(verb, lambda x, t: compose(t)(x))
    got, want = apply(x, doubled), apply(x, lambda s: 2 * s)
    np.testing.assert_array_equal(back(x), before)
    for a, b in zip(got, want):
        np.testing.assert_array_equal(back(a), back(b))


def test_a_transform_in_place_has_a_gradient():
    torch = pytest.importorskip("torch")
    x = torch.tensor([[0.0, 1.0, 3.0]], requires_grad=True)
    A.log_prob("softmax", x, [0], transform=lambda s: s.mul_(2)).sum().backward()
    want = 2 * (np.eye(3)[0] - scipy_softmax([0.0, 2.0, 6.0]))
    np.testing.assert_allclose(x.grad[0], want, atol=1e-6)
