"""DRY against brute force: all sequences that end a row of tokens, looked up one by one."""

from __future__ import annotations

import numpy as np
import pytest
from kinds import KINDS, back, every_kind, jax_in_the_whole_battery
from transform_cases import INF

from anymax.transforms import compose, dry, temperature


def penalties(tokens, n, multiplier, base, allowed, breakers=()):
    """What each class loses. `follows` has the length of the longest end of the tokens that each class has followed."""
    tokens = [t for t in tokens if t >= 0]
    follows = dict.fromkeys(range(n), 0)
    for length in range(1, min(len(tokens), 51)):
        end = tokens[-length:]
        if set(end) & set(breakers):
            break
        for start in range(len(tokens) - length):
            if tokens[start : start + length] == end:
                follows[tokens[start + length]] = max(follows[tokens[start + length]], length)
    return np.array(
        [multiplier * base ** (k - allowed) if k >= allowed and c not in breakers else 0.0 for c, k in follows.items()]
    )


def rows_of_tokens(rows, length, n, seed):
    """Tokens of a small alphabet, full of repetitions, with -1 at the left, at the right and in between."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, n, (rows, length))
    tokens[rows // 2 :] = rng.integers(0, 2, (rows - rows // 2, length))
    tokens[0, :] = -1
    tokens[1, :4] = -1
    tokens[2, -4:] = -1
    tokens[3, ::3] = -1
    tokens[4, :] = 1
    return tokens


@jax_in_the_whole_battery
@every_kind
@pytest.mark.parametrize("allowed", [1, 2, 4])
@pytest.mark.parametrize("breakers", [(), (0,), (1, 3)])
def test_dry_is_the_brute_force(kind, allowed, breakers):
    n, c = 5, KINDS[kind]
    tokens = rows_of_tokens(24, 17, 4, allowed)
    x = np.random.default_rng(0).normal(size=(24, n)).astype(np.float32)
    x[5, 1] = -INF
    multiplier = np.linspace(0, 1, 24, dtype=np.float32)[:, None]
    want = np.stack([r - penalties(t, n, m, 1.3, allowed, breakers) for r, t, (m,) in zip(x, tokens, multiplier)])
    got = back(dry(tokens, c(multiplier), 1.3, allowed, breakers)(c(x)))
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)
    one = back(dry(tokens[7].tolist(), 0.8, 1.3, allowed, breakers)(c(x)))
    np.testing.assert_allclose(one, x - penalties(tokens[7], n, 0.8, 1.3, allowed, breakers), rtol=2e-6, atol=1e-6)
    np.testing.assert_array_equal(got.dtype, x.dtype)


def test_dry_along_another_axis_and_in_a_composition():
    tokens = rows_of_tokens(6, 12, 3, 1)
    x = np.random.default_rng(1).normal(size=(6, 4))
    want = dry(tokens)(x)
    assert np.array_equal(dry(tokens, axis=0)(x.T), want.T)
    assert np.array_equal(compose(dry(tokens), temperature(0.5))(x), want / 0.5)
    assert np.array_equal(dry(np.zeros((6, 0), int))(x), x)
    assert np.array_equal(dry([])(x), x)


def test_a_long_repetition_counts_as_50_and_does_not_mask():
    tokens = [1] * 300
    x = np.zeros(3)
    np.testing.assert_allclose(dry(tokens)(x)[1], -0.8 * 1.75**48)
    y = dry(tokens, base=1e9)(x.astype(np.float32))
    assert np.isfinite(y).all()
    assert y[1] < -1e15
    assert np.array_equal(dry(tokens, allowed_length=51)(x), x)


def test_dry_is_differentiable_in_its_parameters():
    torch = pytest.importorskip("torch")
    x = torch.zeros(2, 4, dtype=torch.float64)
    m = torch.tensor([[0.5], [0.8]], dtype=torch.float64, requires_grad=True)
    b = torch.tensor([[1.5], [1.8]], dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([[0, 1, 2, 0, 1, 2, 0], [3, 3, 3, 3, 3, 3, 3]])
    assert torch.autograd.gradcheck(lambda m, b: dry(tokens, m, b)(x), (m, b))
    sharp = torch.autograd.grad(dry(tokens.repeat(1, 20), m, 1e12 * b)(x.float()).sum(), (m, b))
    assert all(torch.isfinite(g).all() for g in sharp)
