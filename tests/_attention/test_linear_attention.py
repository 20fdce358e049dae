"""Linear attention: the same numbers as the whole matrix of Taylor softmax of order 2, at any length, in pieces, and for decoding."""

from __future__ import annotations

import functools
import importlib
import math

import numpy as np
import pytest
from kinds import KINDS, back, every_kind

import anymax as A
from anymax import LinearState, Taylor, linear_attention
from anymax.kernels import native

torch = pytest.importorskip("torch")
linear = importlib.import_module("anymax._attention.linear")


def arrays(q=(2, 4, 9, 5), k=None, v=None, seed=0):
    g = np.random.default_rng(seed)
    k = q if k is None else k
    v = (*k[:-1], 3) if v is None else v
    return [g.normal(size=s) for s in (q, k, v)]


@pytest.fixture(params=[1, 3, 256, None], ids=lambda c: f"chunks of {c}" if c else "compiled")
def chunk(request, monkeypatch):
    """Plain operations in chunks of so many positions, or the compiled engine."""
    kind = request.node.callspec.params.get("kind")
    if request.param != 3 and kind == "jax":
        pytest.skip("one length of a scan is as good as another, and each is compiled")
    if request.param is None:
        if kind == "strict":
            pytest.skip("the engine takes no strict arrays")
        yield
        return
    for name in ("_CHUNK", "_LEAST"):
        monkeypatch.setattr(linear, name, request.param)
    with A.use("reference"):
        yield


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


CASES = {  # name -> (shape of q, shape of k, options)
    **{f"{a} and {b}": ((2, 4, a, 5), (2, 4, b, 5), {}) for a, b in ((9, 9), (5, 11), (11, 5), (1, 7), (7, 1))},
    "shared heads, lengths": ((2, 4, 7, 5), (2, 2, 9, 5), {"enable_gqa": True, "lengths": np.array([4, 0])}),
    "no heads": ((6, 5), (6, 5), {}),
    "no keys": ((6, 5), (0, 5), {}),
    "no queries": ((0, 5), (6, 5), {}),
    "shared heads without keys": ((3, 4, 5, 2), (3, 2, 0, 2), {"enable_gqa": True}),
}


@pytest.mark.whole(
    lambda case, kind, chunk: kind == "jax" or (chunk, kind) == (256, "strict") or (chunk == 1 and case[0] != "s")
)
@every_kind
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_linear_is_the_matrix(case, causal, kind, chunk):
    make, tol = KINDS[kind], 2e-5 if kind == "jax" else 1e-10
    q, k, options = CASES[case]
    plain = arrays(q, k)
    own = {name: make(value) if name == "lengths" else value for name, value in options.items()}
    for call, more in (
        (linear_attention, {}),
        (functools.partial(A.attention, mapping=Taylor(2), implementation="linear"), {"scale": 0.4}),
    ):
        if more and kind == "strict":
            continue
        out = call(*map(make, plain), is_causal=causal, **own, **more)
        assert type(out) is type(make(plain[0]))
        want = A.attention(*plain, Taylor(2), is_causal=causal, implementation="reference", **options, **more)
        np.testing.assert_allclose(back(out), want, atol=tol)


@pytest.mark.whole(lambda kind, chunk: kind == "jax" or (chunk == 256 and kind != "torch"))
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
    for causal in (False, True):
        results = []
        for implementation in ("linear", "reference"):
            leaves = [torch.tensor(a, requires_grad=True) for a in arrays((1, 4, 7, 5), (1, 2, 8, 5))]
            out = A.attention(*leaves, Taylor(2), is_causal=causal, enable_gqa=True, implementation=implementation)
            results.append((out, torch.autograd.grad(out.sin().sum(), leaves)))
        torch.testing.assert_close(results[0], results[1])


def test_derivatives_of_the_second_order():
    leaves = [torch.tensor(a, requires_grad=True) for a in arrays((1, 1, 3, 2))]
    assert torch.autograd.gradgradcheck(lambda *a: linear_attention(*a, is_causal=True), leaves)
    want = A.attention(*leaves, Taylor(2))
    torch.testing.assert_close(torch.func.vmap(linear_attention)(*leaves), want)


@pytest.mark.whole
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
    q, k, v = (torch.tensor(a, dtype=torch.float32) for a in arrays((1, 2, 300, 16)))
    exact = A.attention(q.double(), k.double(), v.double(), Taylor(2), is_causal=True)
    for dtype, tol in ((torch.float32, 2e-6), (torch.bfloat16, 2e-2)):
        out = linear_attention(q.to(dtype), k.to(dtype), v.to(dtype), is_causal=True)
        assert out.dtype == dtype
        assert float((out.double() - exact).abs().max()) < tol * math.sqrt(16)


def test_memory_of_a_chunk(monkeypatch):
    """Neither the matrix nor the features of all positions are ever there."""
    q, k, v = (torch.randn(1, 1, 4096, 16, requires_grad=True) for _ in range(3))
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        linear_attention(q, k, v, is_causal=True).sum().backward()
    assert max(e.cpu_memory_usage for e in profile.function_events) < 4e6  # features of all: 2.5e6 numbers


# -- the compiled engine ------------------------------------------------------------------------------------------------------------

compiled = pytest.mark.skipif(isinstance(native.load(), str), reason="the library is not here")
ISAS = [] if isinstance(native.load(), str) else native.load().isas()


def refused(*args, **options):
    raise AssertionError("plain operations were asked for")


def served(call):
    """What the engine alone makes of it: an error where it refuses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "_plain", refused)
        return call()


@pytest.fixture(params=ISAS)
def isa(request):
    before = native.isa()
    native.load().set_isa(request.param)
    yield
    native.load().set_isa(before)


@compiled
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("causal", [False, True])
def test_engine_is_the_matrix(isa, dtype, causal):
    tol = {"atol": 2e-6, "rtol": 2e-5} if dtype is np.float32 else {"atol": 1e-13, "rtol": 1e-12}
    for shape in ((1, 1, 1), (3, 20, 2), (1, 150, 64), (2, 289, 17), (4, 7, 5), (1, 12, 96)):
        for keys, values in ((shape[1], 3), (1, 16), (300, 64), (20, 70), (0, 4)):
            q, k, v = (a.astype(dtype) for a in arrays(shape, (*shape[:1], keys, shape[2]), (*shape[:1], keys, values)))
            want = A.attention(*(a.astype(float) for a in (q, k, v)), Taylor(2), is_causal=causal)
            out = served(lambda q=q, k=k, v=v: linear_attention(q, k, v, is_causal=causal))
            assert out.dtype == dtype
            np.testing.assert_allclose(out, want, **tol)


Q, K, V = arrays((2, 6, 40, 12), (2, 3, 33, 12))
STRIDED = np.flip(Q, -1)[..., ::2, :], K.swapaxes(-1, -2)[:, [0] * 6, :, :].swapaxes(-1, -2), V[:, [1] * 6]
TAKEN = {  # name -> (arrays, options)
    "shared heads, lengths": ((Q, K, V), {"enable_gqa": True, "lengths": np.array([33, 5])}),
    "shared heads, lengths, causal": ((Q, K, V), {"enable_gqa": True, "is_causal": True, "lengths": np.array([0, 20])}),
    "one key for all heads": ((Q, K[:, :1], V[:, :1]), {"scale": -0.7}),
    "a scale of each head": (
        (Q, K[0, :1], V[0, :1]),
        {"is_causal": True, "scale": np.linspace(0.1, 1, 6)[:, None, None]},
    ),
    "no batch": ((Q[0, :3], K[0], V[0]), {"lengths": 7}),
    "no heads": ((Q[0, 0], K[0, 0], V[0, 0]), {"lengths": 7, "is_causal": True}),
    "strides": (STRIDED, {}),
}


@compiled
@pytest.mark.parametrize("dtype", ["numpy", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("case", TAKEN)
def test_engine_takes_what_attention_takes(case, dtype):
    operands, options = TAKEN[case]
    scale = options.get("scale")
    with A.use("reference"):
        scaled = operands[0] * (1.0 if scale is None else scale), *operands[1:]
        want = A.attention(*scaled, Taylor(2), **options | {"scale": None if scale is None else 1.0})
    if dtype != "numpy":
        operands = [torch.from_numpy(a.copy()).to(getattr(torch, dtype)) for a in operands]
        options = options | ({"scale": torch.from_numpy(scale)} if isinstance(scale, np.ndarray) else {})
    out = served(lambda: linear_attention(*operands, **options))
    assert out.dtype == operands[0].dtype
    if dtype in ("numpy", "float64"):
        np.testing.assert_allclose(back(out), want, atol=1e-12)
    else:
        with A.use("reference"):
            torch.testing.assert_close(out, linear_attention(*operands, **options), atol=1e-2, rtol=1e-2)


LEARNED = {  # name -> (shape of q, shape of k, features of v, options)
    "few": ((2, 5, 3), (2, 7, 3), 4, {"scale": -0.4}),
    "many": ((1, 2, 300, 16), (1, 2, 290, 16), 17, {}),
    "shared heads": ((2, 4, 50, 17), (2, 2, 160, 17), 5, {"enable_gqa": True}),
    "shared heads, lengths": (
        (2, 4, 160, 17),
        (2, 2, 150, 17),
        33,
        {"enable_gqa": True, "lengths": torch.tensor([150, 40])},
    ),
    "no key": ((1, 2, 20, 64), (1, 2, 9, 64), 64, {"lengths": torch.tensor([0])}),
    "one key for all heads": ((2, 3, 10, 6), (2, 1, 12, 6), 3, {}),
}


@compiled
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-10), (torch.float32, 2e-4)], ids=str)
@pytest.mark.parametrize("case", LEARNED)
def test_gradients_of_the_engine(case, dtype, tol, causal, isa):
    q, k, v, options = LEARNED[case]
    leaves = [torch.from_numpy(a).to(dtype).requires_grad_() for a in arrays(q, k, (*k[:-1], v))]
    ours = served(lambda: linear_attention(*leaves, is_causal=causal, **options))
    plain = A.attention(*leaves, Taylor(2), is_causal=causal, implementation="reference", **options)
    got, want = ((out, *torch.autograd.grad(out.sin().sum(), leaves)) for out in (ours, plain))
    for one, other in zip(got, want):
        torch.testing.assert_close(one, other, atol=tol * (1 + float(other.detach().abs().max())), rtol=0)


@compiled
def test_gradients_of_the_engine_in_part_and_again():
    q, k, v = (torch.from_numpy(a) for a in arrays((2, 9, 3)))
    all_three = [a.clone().requires_grad_() for a in (q, k, v)]
    want = torch.autograd.grad(linear_attention(*all_three, is_causal=True).cos().sum(), all_three)
    for which in range(3):
        one = [a.clone().requires_grad_(i == which) for i, a in enumerate((q, k, v))]
        (got,) = torch.autograd.grad(linear_attention(*one, is_causal=True).cos().sum(), one[which])
        torch.testing.assert_close(got, want[which])
    out = linear_attention(*all_three, is_causal=True)
    several = torch.from_numpy(np.random.default_rng(1).normal(size=(3, *out.shape)))
    (batch,) = torch.autograd.grad(out, all_three[0], several, is_grads_batched=True, retain_graph=True)
    assert not batch.requires_grad
    for got, g in zip(batch, several):
        torch.testing.assert_close(got, torch.autograd.grad(out, all_three[0], g, retain_graph=True)[0])
    shared = q.clone().requires_grad_()  # one array as all three, broadcast over a batch as well
    out = linear_attention(shared.expand(4, 2, 9, 3), shared, shared)
    again = A.attention(shared.expand(4, 2, 9, 3), shared, shared, Taylor(2), implementation="reference")
    torch.testing.assert_close(torch.autograd.grad(out.sum(), shared), torch.autograd.grad(again.sum(), shared))
    for causal in (False, True):
        leaves = [torch.from_numpy(a).requires_grad_() for a in arrays((2, 4, 2))]
        f = functools.partial(linear_attention, is_causal=causal, lengths=torch.tensor([3, 0]))
        leaves = [a[:, None].detach().requires_grad_() for a in leaves]
        assert torch.autograd.gradcheck(f, leaves)
        assert torch.autograd.gradgradcheck(f, leaves)
    half = [a.to(torch.bfloat16).requires_grad_() for a in (q, k, v)]
    grads = torch.autograd.grad(linear_attention(*half, is_causal=True).float().cos().sum(), half)
    for got, exact in zip(grads, want):
        assert got.dtype is torch.bfloat16
        torch.testing.assert_close(got.double(), exact, atol=0.05, rtol=0.05)


@compiled
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated:DeprecationWarning")
def test_engine_is_left_where_somebody_looks_on():
    q, k, v = (torch.from_numpy(a) for a in arrays((2, 3, 20, 4)))
    want = linear_attention(q, k, v, is_causal=True)
    scale = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    assert linear_attention(q, k, v, is_causal=True, scale=scale).requires_grad
    with torch.no_grad():
        assert not linear_attention(q.clone().requires_grad_(), k, v).requires_grad
    torch.testing.assert_close(torch.func.vmap(lambda *a: linear_attention(*a, is_causal=True))(q, k, v), want)
    torch.testing.assert_close(linear_attention(torch._neg_view(-q), k, v, is_causal=True), want)
    _, slope = torch.func.jvp(lambda q: linear_attention(q, k, v, is_causal=True), (q,), (torch.ones_like(q),))
    assert slope.abs().sum() > 0


@compiled
@pytest.mark.parametrize("causal", [False, True])
def test_one_poisoned_query_and_one_late_key(causal):
    q, k, v = (a.astype(np.float32) for a in arrays((2, 150, 8)))
    sound = linear_attention(q, k, v, is_causal=causal)
    q[0, 7, 3], q[1, 149, 0] = np.nan, np.inf
    out = linear_attention(q, k, v, is_causal=causal)
    assert np.isnan(out[0, 7]).all()
    assert np.isnan(out[1, 149]).all()
    out[0, 7], out[1, 149] = sound[0, 7], sound[1, 149]
    np.testing.assert_array_equal(out, sound)
    if causal:  # what a query does not see does not touch it, not even in the same chunk
        q, k, v = (a.astype(np.float32) for a in arrays((2, 150, 8)))
        k[0, 101], v[1, 3] = np.nan, np.inf
        out = linear_attention(q, k, v, is_causal=True)
        np.testing.assert_array_equal(out[0, :101], sound[0, :101])
        np.testing.assert_array_equal(out[1, :3], sound[1, :3])
        assert np.isnan(out[0, 101:]).all()
        assert not np.isfinite(out[1, 3:]).any()


@compiled
def test_engine_gives_the_same_with_any_number_of_threads():
    before = torch.get_num_threads()
    try:
        for heads in (1, 2, 3, 5):
            q, k, v = (torch.from_numpy(a) for a in arrays((heads, 500, 16)))
            results = []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                results.append([linear_attention(q, k, v, is_causal=causal) for causal in (False, True)])
            for other in results[1:]:
                assert all(torch.equal(a, b) for a, b in zip(other, results[0]))
    finally:
        torch.set_num_threads(before)


def test_a_state_is_never_changed():
    q, k, v = (torch.from_numpy(a) for a in arrays((9, 49)))
    state = LinearState.of(k, v)
    before = state.memory.clone()
    state.step(q[:1], k[:1], v[:1])
    state.extend(k, v)
    assert torch.equal(state.memory, before)
