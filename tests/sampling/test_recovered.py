"""`recovered_tokens`, and drafts without probabilities: the exact distributions, by enumeration of the uniform numbers."""

import itertools
import math

import numpy as np
import pytest
from kinds import KINDS, back, every_kind, generator, jax_in_the_whole_battery
from refusals import each, refuses

from anymax.sampling import decoding, recovered_tokens, speculative_accept

Q = np.array([[0.5, 0.5, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]])
P = np.array([[0.25, 0.25, 0.25, 0.25], [0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25]])
GRID = (np.arange(960) + 0.5) / 960  # midpoints: every sum of twentieths, divided by its total, falls between two


def drawn(monkeypatch, u, function, *arguments):
    """The function's results for rows of given uniform numbers, [rows, numbers]."""
    monkeypatch.setattr(
        decoding, "uniforms", lambda like, size, source, xp: np.broadcast_to(u, (*like.shape[:-1], size))
    )
    return function(*arguments)


def share(tokens, n=4):
    return np.bincount(np.ravel(tokens), minlength=n) / np.size(tokens)


def residual(p, q):
    rest = np.maximum(p - q, 0.0)
    return p if rest.sum() == 0 else rest / rest.sum()


def test_the_distribution_of_recovered_tokens(monkeypatch):
    tokens = np.array([0, 3, 1])
    q, p, t = (np.broadcast_to(a, (len(GRID), *a.shape)) for a in (Q, P, tokens))
    got = drawn(monkeypatch, GRID[:, None], recovered_tokens, q, p, t)
    for i in range(3):
        np.testing.assert_allclose(share(got[:, i]), residual(P[i], Q[i]), atol=2 / len(GRID))
    got = drawn(monkeypatch, GRID[:, None], recovered_tokens, None, p, t)
    for i in range(3):
        certain = np.eye(4)[tokens[i]]
        np.testing.assert_allclose(share(got[:, i]), residual(P[i], certain), atol=2 / len(GRID))
        assert not (got[:, i] == tokens[i]).any()


@pytest.mark.parametrize("given", [True, False])
def test_accepted_and_recovered_tokens_have_the_distribution_of_the_target(monkeypatch, given):
    """Each token x of the draft, with probability q(x): accepted with min(1, p / q), else replaced by the recovered one. Without
    probabilities the draft is any token, and its probability 1."""
    for i, x in itertools.product(range(3), range(4)):
        q = Q[i] if given else np.eye(4)[x]
        if not q[x]:
            continue
        mixed = np.zeros(4)
        for y in range(4) if given else (x,):
            accepted = min(1.0, P[i, y] / q[y]) if q[y] else 0.0
            p, t = np.broadcast_to(P[i], (len(GRID), 1, 4)), np.full((len(GRID), 1), y)
            table = np.broadcast_to(q, p.shape) if given else None
            rest = share(drawn(monkeypatch, GRID[:, None], recovered_tokens, table, p, t))
            mixed += q[y] * (accepted * np.eye(4)[y] + (1 - accepted) * rest)
        np.testing.assert_allclose(mixed, P[i], atol=2 / len(GRID))


def test_a_draft_without_probabilities_is_accepted_exactly(monkeypatch):
    """A certain draft of two tokens and the target's next: the first token that is kept, or drawn, has the distribution p."""
    u = np.array(list(itertools.product((np.arange(70) + 0.5) / 70, repeat=2)))
    u = np.stack([u[:, 0], np.zeros(len(u)), u[:, 1]], axis=-1)
    p = np.broadcast_to(P[[1, 0, 2]], (len(u), 3, 4))
    tokens = np.broadcast_to(np.array([1, 2]), (len(u), 2))
    got = drawn(monkeypatch, u, speculative_accept, None, p, tokens)
    first = np.where(got.count > 0, 1, got.token)
    np.testing.assert_allclose(share(first), P[1], atol=1e-12)
    one_hot = np.broadcast_to(np.eye(4)[[1, 2]], (len(u), 2, 4))
    same = drawn(monkeypatch, u, speculative_accept, one_hot, p, tokens)
    np.testing.assert_array_equal(got.count, same.count)
    np.testing.assert_array_equal(got.token, same.token)


@jax_in_the_whole_battery
@every_kind
def test_kinds(kind):
    c = KINDS[kind]
    tokens = np.array([0, 3, 1])
    for q in (Q, None):
        got = back(recovered_tokens(None if q is None else c(q), c(P), c(tokens), generator=generator(kind)))
        assert got.shape == (3,)
        assert all(residual(P[i], np.eye(4)[tokens[i]] if q is None else Q[i])[t] > 0 for i, t in enumerate(got))
        out = speculative_accept(None if q is None else c(q), c(P), c(tokens), generator=generator(kind))
        assert 0 <= int(out.count) <= 3


def test_seeds_shorter_drafts_and_no_rejection():
    q, p = np.stack([Q, Q]), np.stack([P, P])
    together = recovered_tokens(q, p, [[0, 3, 1], [1, -1, -1]], generator=[5, 6])
    alone = [
        recovered_tokens(a, b, t, generator=s).tolist() for a, b, t, s in zip(q, p, ([0, 3, 1], [1, -1, -1]), (5, 6))
    ]
    assert together.tolist() == alone
    # at -1, and where p is nowhere above q, the token is drawn from the target
    n = 4000
    many = recovered_tokens(np.tile(Q, (n, 1, 1)), np.tile(P, (n, 1, 1)), np.tile([-1, -1, 2], (n, 1)), generator=0)
    for i in range(3):
        np.testing.assert_allclose(share(many[:, i]), P[i], atol=4 * math.sqrt(0.25 / n))


@pytest.mark.whole
def test_under_jit():
    jax = pytest.importorskip("jax")
    key, tokens = jax.random.key(0), jax.numpy.asarray([0, 3, 1])
    for q in (jax.numpy.asarray(Q), None):
        want = recovered_tokens(q, jax.numpy.asarray(P), tokens, generator=key)
        got = jax.jit(lambda p, q=q: recovered_tokens(q, p, tokens, generator=key))(jax.numpy.asarray(P))
        np.testing.assert_array_equal(got, want)


def of(*arguments):
    return lambda: recovered_tokens(*arguments, generator=0)


REFUSED = {
    "tokens that are too few": (of(Q, P, [0, 1]), ValueError, "recovered_tokens: p_draft .* must belong together"),
    "targets that are too few": (of(Q, P[:2], [0, 1, 2]), ValueError, "must belong together"),
    "a target after the draft": (of(Q, np.vstack([P, P[:1]]), [0, 1, 2]), ValueError, "p_target .*T, classes.* must belong together"),
    "tokens that are too few for no draft": (of(None, P, [0, 1]), ValueError, r"got None, \(3, 4\) and \(2,\)"),
    "a token too high": (of(Q, P, [0, 1, 4]), ValueError, "a token is out of range for 4 classes"),
    "fractions for tokens": (of(Q, P, [0.0, 1.0, 2.0]), TypeError, "tokens must be integers"),
    "one row": (of(Q[0], P[0], [0]), ValueError, "p_target must be .*T, classes"),
    "no classes": (of(None, np.zeros((3, 0)), [0, 1, 2]), ValueError, "has no classes"),
    "a token alone": (of(None, P, 3), ValueError, "must belong together"),
}  # fmt: skip


@each(REFUSED)
def test_what_is_refused(call, error, words):
    refuses(call, error, words)
