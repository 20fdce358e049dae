"""Learned parameters (an alpha, a budget) in segments, output layers and shards: by the engines, with the derivatives of rows."""

import math

import numpy as np
import pytest
import torch

import anymax

LENGTHS = (3, 0, 1, 5, 4)
ENTRIES = sum(LENGTHS)
MAPS = (
    ("entmax", anymax.Entmax, 1.3),
    ("entmax at its limit", anymax.Entmax, 1.0),
    ("entmax above 2", anymax.Entmax, 2.5),
    ("normmax", anymax.NormMax, 2.2),
    ("budget", anymax.Budget, 0.8),
)
EACH_MAP = pytest.mark.parametrize(("kind", "value"), [m[1:] for m in MAPS], ids=[m[0] for m in MAPS])


def _scores(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape) * 1.5


def _sizes(kind, value, count):
    """One value for each of a number of rows, near the given one."""
    steps = np.linspace(0.0, 0.1 if kind is anymax.Budget else 0.4, count)
    return value + steps


def _central(f, at, h=1e-5):
    """The derivatives of a number by each entry of an array, by central differences."""
    out = np.zeros_like(at)
    for i in np.ndindex(at.shape):
        step = np.zeros_like(at)
        step[i] = h
        out[i] = (f(at + step) - f(at - step)) / (2 * h)
    return out


# -- segments --------------------------------------------------------------------------------------------------------------


def _order(kind):
    """The segments as sorted lengths, or as an index in no order."""
    index = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    return anymax.Segments.of(lengths=LENGTHS) if kind == "sorted" else anymax.Segments.of(
        np.random.default_rng(1).permutation(index), num_segments=len(LENGTHS)
    )


@EACH_MAP
@pytest.mark.parametrize("layout", ["sorted", "unsorted"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("each", [False, True], ids=["one for all", "one a segment"])
def test_segments_have_the_derivative_of_finite_differences(kind, value, layout, axis, each):
    segments, shape = _order(layout), (ENTRIES, 2) if axis == 0 else (2, ENTRIES)
    x, g = _scores(*shape), _scores(*shape, seed=1)
    at = _sizes(kind, value, len(LENGTHS)) if each else np.array(value)
    at = at[:, None] if each and axis == 0 else at
    if kind is anymax.Entmax and value == 1.0:
        at = at + 1e-9  # differences need both sides of it
    apply = lambda a: anymax.segment_apply(kind(a), x, index=segments, axis=axis)  # noqa: E731
    expected = _central(lambda a: float((apply(a) * g).sum()), at)
    a, scores = (torch.tensor(v, requires_grad=True) for v in (at, x))
    p = anymax.segment_apply(kind(a), scores, index=segments, axis=axis)
    assert type(p.grad_fn).__name__ == "_ApplyBackward"  # by the engine
    (p * torch.tensor(g)).sum().backward()
    np.testing.assert_allclose(a.grad, expected, rtol=2e-6, atol=2e-8)
    fixed = torch.tensor(x, requires_grad=True)
    (anymax.segment_apply(kind(a.detach()), fixed, index=segments, axis=axis) * torch.tensor(g)).sum().backward()
    np.testing.assert_allclose(scores.grad, fixed.grad, atol=1e-14)


def _targets(segments, axis):
    """An entry of each segment; the empty one is ignored, and one more."""
    places = [-100 if not n else int(np.nonzero(segments.index == s)[0][n // 2]) for s, n in enumerate(LENGTHS)]
    places[2] = -100
    both = np.stack([places, [max(t, -100) for t in places]], 1 if axis == 0 else 0)
    return both


@pytest.mark.parametrize(("kind", "value"), [m[1:] for m in MAPS[:4]], ids=[m[0] for m in MAPS[:4]])
@pytest.mark.parametrize("layout", ["sorted", "unsorted"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("each", [False, True], ids=["one for all", "one a segment"])
def test_the_loss_of_segments_has_the_derivative_of_finite_differences(kind, value, layout, axis, each):
    segments, shape = _order(layout), (ENTRIES, 2) if axis == 0 else (2, ENTRIES)
    x, target = _scores(*shape), _targets(segments, axis)
    at = _sizes(kind, value, len(LENGTHS)) if each else np.array(value)
    at = at[:, None] if each and axis == 0 else at
    if kind is anymax.Entmax and value == 1.0:
        at = at + 1e-9
    loss = lambda a, x: anymax.segment_loss(kind(a), x, target, index=segments, axis=axis)  # noqa: E731
    expected = _central(lambda a: float(loss(a, x)), at)
    a, scores = (torch.tensor(v, requires_grad=True) for v in (at, x))
    value = anymax.segment_loss(kind(a), scores, torch.tensor(target), index=segments, axis=axis)
    value.backward()
    np.testing.assert_allclose(a.grad, expected, rtol=2e-6, atol=2e-8)
    fixed = torch.tensor(x, requires_grad=True)
    loss(kind(a.detach()).params()[next(iter(kind(a.detach()).params()))], fixed) if False else None
    anymax.segment_loss(kind(a.detach()), fixed, torch.tensor(target), index=segments, axis=axis).backward()
    np.testing.assert_allclose(scores.grad, fixed.grad, atol=1e-14)


@EACH_MAP
def test_a_learned_parameter_of_segments_has_second_derivatives(kind, value):
    segments = _order("unsorted")
    x, a = (torch.tensor(v, requires_grad=True) for v in (_scores(ENTRIES), _sizes(kind, value + 0.01, len(LENGTHS))))
    f = lambda x, a: anymax.segment_apply(kind(a), x, index=segments)  # noqa: E731
    assert torch.autograd.gradcheck(f, (x, a), atol=1e-6)
    assert torch.autograd.gradgradcheck(f, (x, a), atol=1e-6)
    if kind is not anymax.Budget:
        target = torch.tensor(_targets(segments, 0)[:, 0])
        g = lambda x, a: anymax.segment_loss(kind(a), x, target, index=segments)  # noqa: E731
        assert torch.autograd.gradcheck(g, (x, a), atol=1e-6)
        assert torch.autograd.gradgradcheck(g, (x, a), atol=1e-6)
