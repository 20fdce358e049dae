"""Linear attention: the same numbers as the whole matrix of Taylor softmax of order 2, at any length, in pieces, and for decoding."""

from __future__ import annotations

import importlib
import math

import numpy as np
import pytest
from kinds import KINDS, back, every_kind

import anymax as A
from anymax import LinearState, Taylor, linear_attention

linear = importlib.import_module("anymax.linear_attention")


def arrays(q=(2, 4, 9, 5), k=None, v=None, seed=0):
    g = np.random.default_rng(seed)
    k = q if k is None else k
    v = (*k[:-1], 3) if v is None else v
    return [g.normal(size=s) for s in (q, k, v)]


@pytest.fixture(params=[1, 3, 256], ids=lambda c: f"chunks of {c}")
def chunk(request, monkeypatch):
    if request.param != 3 and request.node.callspec.params.get("kind") == "jax":
        pytest.skip("one length of a scan is as good as another, and each is compiled")
    for name in ("_CHUNK", "_LEAST"):
        monkeypatch.setattr(linear, name, request.param)


@every_kind
@pytest.mark.parametrize("d", [1, 2, 7])
def test_features_are_the_polynomial(d, kind):
    make = KINDS[kind]
    q, k = np.random.default_rng(d).normal(size=(2, 6, d))
    phi, psi = (back(linear.taylor_features(make(a))) for a in (q, k))
    assert phi.shape == (6, 1 + d + d * (d + 1) // 2)
    s = q @ k.T
    np.testing.assert_allclose(phi @ psi.T, 1 + s + s * s / 2, atol=1e-5)
    np.testing.assert_allclose(back(linear.taylor_features(make(q[0]))), phi[0], atol=1e-6)


@every_kind
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(9, 9), (5, 11), (11, 5), (1, 7), (7, 1)])
def test_linear_is_the_matrix(lengths, causal, kind, chunk):
    make, tol = KINDS[kind], 2e-5 if kind == "jax" else 1e-10
    q, k, v = arrays((2, 4, lengths[0], 5), (2, 4, lengths[1], 5))
    want = A.attention(q, k, v, Taylor(2), is_causal=causal)
    out = linear_attention(*map(make, (q, k, v)), is_causal=causal)
    assert type(out) is type(make(q))
    np.testing.assert_allclose(back(out), want, atol=tol)
    if kind != "strict":
        again = A.attention(*map(make, (q, k, v)), Taylor(2), is_causal=causal, scale=0.4, implementation="linear")
        np.testing.assert_allclose(back(again), A.attention(q, k, v, Taylor(2), is_causal=causal, scale=0.4), atol=tol)


@every_kind
@pytest.mark.parametrize("causal", [False, True])
def test_shared_heads_and_lengths(causal, kind, chunk):
    make = KINDS[kind]
    q, k, v = arrays((2, 4, 7, 5), (2, 2, 9, 5))
    real = np.array([4, 0])
    options = {"is_causal": causal, "enable_gqa": True}
    want = A.attention(q, k, v, Taylor(2), lengths=real, **options)
    out = linear_attention(*map(make, (q, k, v)), lengths=make(real), **options)
    np.testing.assert_allclose(back(out), want, atol=2e-5)
    assert not back(out)[1].any()  # no key at all
    again = A.attention(*map(make, (q, k, v)), Taylor(2), lengths=make(real), implementation="linear", **options)
    np.testing.assert_allclose(back(again), want, atol=2e-5)


def test_without_heads_and_without_keys():
    q, k, v = arrays((6, 5))
    np.testing.assert_allclose(linear_attention(q, k, v), A.attention(q, k, v, Taylor(2)), atol=1e-12)
    np.testing.assert_allclose(
        linear_attention(q, k, v, is_causal=True), A.attention(q, k, v, Taylor(2), is_causal=True), atol=1e-12
    )
    assert not linear_attention(q, k[:0], v[:0]).any()
    assert linear_attention(q[:0], k, v).shape == (0, 3)
    assert linear_attention(q[:0], k, v, is_causal=True).shape == (0, 3)


@every_kind
def test_a_state_decodes_token_by_token(kind, chunk):
    make = KINDS[kind]
    q, k, v = arrays((2, 4, 10, 5), (2, 2, 10, 5))
    want = A.attention(q, k, v, Taylor(2), is_causal=True, enable_gqa=True)
    q, k, v = map(make, (q, k, v))
    state = LinearState.of(k[:, :, :4, :], v[:, :, :4, :])
    assert tuple(state.memory.shape) == (2, 2, 4, 1 + 5 + 15)
    before = back(state.memory).copy()
    out, later = state.step(q[:, :, 4:7, :], k[:, :, 4:7, :], v[:, :, 4:7, :])
    np.testing.assert_allclose(back(out), want[:, :, 4:7], atol=2e-5)
    for t in range(7, 10):
        out, later = later.step(*(a[:, :, t : t + 1, :] for a in (q, k, v)))
        np.testing.assert_allclose(back(out), want[:, :, t : t + 1], atol=2e-5)
        assert tuple(later.memory.shape) == tuple(state.memory.shape)
    np.testing.assert_array_equal(back(state.memory), before)
    all_at_once = LinearState.of(k[:, :, :4, :], v[:, :, :4, :]).extend(k[:, :, 4:, :], v[:, :, 4:, :])
    np.testing.assert_allclose(back(all_at_once.memory), back(later.memory), rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(back(later.attend(q))[:, :, -1], want[:, :, -1], atol=2e-5)


def test_gradients_in_torch(chunk):
    torch = pytest.importorskip("torch")
    for causal in (False, True):
        results = []
        for implementation in ("linear", "reference"):
            leaves = [torch.tensor(a, requires_grad=True) for a in arrays((1, 4, 7, 5), (1, 2, 8, 5))]
            out = A.attention(*leaves, Taylor(2), is_causal=causal, enable_gqa=True, implementation=implementation)
            results.append((out, torch.autograd.grad(out.sin().sum(), leaves)))
        torch.testing.assert_close(results[0], results[1])


def test_derivatives_of_the_second_order():
    torch = pytest.importorskip("torch")
    leaves = [torch.tensor(a, requires_grad=True) for a in arrays((1, 1, 3, 2))]
    assert torch.autograd.gradgradcheck(lambda *a: linear_attention(*a, is_causal=True), leaves)
    want = A.attention(*leaves, Taylor(2))
    torch.testing.assert_close(torch.func.vmap(linear_attention)(*leaves), want)


def test_gradients_and_jit_in_jax(chunk):
    jax = pytest.importorskip("jax")
    q, k, v = (jax.numpy.asarray(a) for a in arrays((1, 2, 8, 3)))
    for causal in (False, True):
        f = lambda *a, causal=causal: (linear_attention(*a, is_causal=causal) ** 2).sum()  # noqa: E731
        g = lambda *a, causal=causal: (A.attention(*a, Taylor(2), is_causal=causal) ** 2).sum()  # noqa: E731
        for got, want in zip(jax.jit(jax.grad(f, (0, 1, 2)))(q, k, v), jax.grad(g, (0, 1, 2))(q, k, v)):
            np.testing.assert_allclose(got, want, atol=1e-4)
    state = LinearState.of(k, v)
    out, _ = jax.jit(LinearState.step)(state, q[:, :, :1], k[:, :, :1], v[:, :, :1])
    assert np.isfinite(out).all()


def test_half_precision_and_error():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.tensor(a, dtype=torch.float32) for a in arrays((1, 2, 300, 16)))
    exact = A.attention(q.double(), k.double(), v.double(), Taylor(2), is_causal=True)
    for dtype, tol in ((torch.float32, 2e-6), (torch.bfloat16, 2e-2)):
        out = linear_attention(q.to(dtype), k.to(dtype), v.to(dtype), is_causal=True)
        assert out.dtype == dtype
        assert float((out.double() - exact).abs().max()) < tol * math.sqrt(16)


def test_memory_of_a_chunk(monkeypatch):
    """Neither the matrix nor the features of all positions are ever there."""
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(1, 1, 4096, 16, requires_grad=True) for _ in range(3))
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        linear_attention(q, k, v, is_causal=True).sum().backward()
    assert max(e.cpu_memory_usage for e in profile.function_events) < 4e6  # features of all: 2.5e6 numbers


WRONG = {
    "order": (lambda: linear_attention(*arrays(), Taylor(4)), ValueError, "order 2 alone is served, not of order 4"),
    "map": (lambda: linear_attention(*arrays(), A.Softmax()), ValueError, "only Taylor softmax of order 2"),
    "list": (lambda: linear_attention([1.0], *arrays()[1:]), TypeError, "q must be an array"),
    "features": (lambda: linear_attention(*arrays((2, 3, 4), (2, 3, 5))), ValueError, "q has 4 features and k has 5"),
    "length": (lambda: linear_attention(*arrays((3, 4), (3, 4), (5, 4))), ValueError, "k has length 3 and v has 5"),
    "heads": (lambda: linear_attention(*arrays((4, 3, 4), (2, 3, 4))), ValueError, "say enable_gqa=True"),
    "groups": (
        lambda: linear_attention(*arrays((3, 3, 4), (2, 3, 4)), enable_gqa=True), ValueError, "must be a multiple of those of k and v",
    ),
    "lengths": (lambda: linear_attention(*arrays(), lengths=np.ones(2)), TypeError, "lengths must be integers"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_errors(case):
    call, error, words = WRONG[case]
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shapes", [((2, 3, 70, 48), (2, 3, 70, 48)), ((2, 3, 7, 50), (1, 3, 9, 50)), ((3, 9, 49), (9, 49))], ids=str
)
def test_wide_heads_go_one_by_one(shapes, causal):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(a) for a in arrays(*shapes))
    want = A.attention(q, k, v, Taylor(2), is_causal=causal)
    np.testing.assert_allclose(linear_attention(q, k, v, is_causal=causal), want, atol=1e-12)
    tracked = linear_attention(q.requires_grad_(), k, v, is_causal=causal)  # another way, with a graph
    np.testing.assert_allclose(tracked.detach(), want, atol=1e-12)
    state = LinearState.of(k, v)
    before = state.memory.clone()
    state.step(q.detach()[..., :1, :], k[..., :1, :], v[..., :1, :])
    state.extend(k, v)
    assert torch.equal(state.memory, before)


def test_heads_that_do_not_fit_are_an_error():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(s) for s in ((2, 4, 5, 48), (3, 4, 5, 48), (3, 4, 5, 48)))
    with pytest.raises((ValueError, RuntimeError)):
        linear_attention(q, k, v)
    assert linear_attention(q[:0], k[:0], v[:0]).shape == (0, 4, 5, 48)
