"""Packed sequences: `attention_varlen` against a loop over the sequences by `attention`, in every framework."""

import itertools

import numpy as np
import pytest
from kinds import KINDS, back, every_kind, generator, jax_in_the_whole_battery

from anymax import (
    Budget,
    Entmax,
    Segments,
    Softmax,
    Sparsemax,
    SparseSoftmax,
    Taylor,
    attention,
    attention_varlen,
    temperature,
    topk,
)
from anymax._attention import packed

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # of torch.compile
]

H, D, DV = 4, 6, 5
# one has no queries, one no keys; two are of one class
CU_Q, CU_K = [0, 3, 3, 10, 11, 30, 34], [0, 5, 7, 7, 20, 41, 48]
TOTAL_Q, TOTAL_K, SEQUENCES = CU_Q[-1], CU_K[-1], len(CU_Q) - 1
MAPS = [Softmax(), Sparsemax(), Entmax(1.3), SparseSoftmax(k=3), Taylor(2)]
by_map = pytest.mark.parametrize("mapping", MAPS, ids=repr)
OPTIONS = [
    {}, {"is_causal": True}, {"window": (2, 1)}, {"window": 3, "is_causal": True}, {"alibi": True}, {"alibi": np.arange(4) / 8},
    {"softcap": 1.5}, {"scale": 0.7}, {"sink": np.array([0.5, -1.0, 0.0, 2.0])}, {"transform": temperature(2.0)}, {"transform": topk(2)},
    {"scale": np.linspace(0.5, 2.0, H).reshape(H, 1, 1)}, {"enable_gqa": True, "is_causal": True},
]  # fmt: skip
by_option = pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")


def operands(seed=0, dtype=np.float64, heads=H, queries=TOTAL_Q, keys=TOTAL_K):
    rng = np.random.default_rng(seed)
    shapes = ((queries, H, D), (keys, heads, D), (keys, heads, DV))
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def one_by_one(q, k, v, cu_q, cu_k, mapping=None, of=lambda i: {}, **options):
    """attention(sequence) one after the other, in NumPy or torch; `of` gives the options of a sequence by its number."""
    outs = []
    for i, ((a, b), (c, d)) in enumerate(zip(itertools.pairwise(cu_q), itertools.pairwise(cu_k), strict=True)):
        own = {"offset": (d - c) - (b - a), "mapping": mapping, **options, **of(i)}
        outs.append(attention(*(x.swapaxes(0, 1) for x in (q[a:b], k[c:d], v[c:d])), **own).swapaxes(0, 1))
    return np.concatenate(outs) if isinstance(outs[0], np.ndarray) else pytest.importorskip("torch").cat(outs)


@pytest.fixture(params=["classes", "alone"])
def ways(request, monkeypatch):
    """Short sequences padded together, as they are; and each alone, as long ones are."""
    if request.param == "alone":
        monkeypatch.setattr(packed, "_ALONE", 1)


@pytest.mark.whole(lambda mapping, options: mapping != Sparsemax() and options != {"is_causal": True})
@by_option
@by_map
def test_it_is_a_loop_over_sequences(mapping, options, ways):
    q, k, v = operands(heads=2 if "enable_gqa" in options else H)
    want = one_by_one(q, k, v, CU_Q, CU_K, mapping, **options)
    got = attention_varlen(q, k, v, CU_Q, CU_K, mapping=mapping, **options)
    assert got.shape == (TOTAL_Q, H, DV)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)
    assert np.abs(want).max() > 0.1


@pytest.mark.whole(lambda kind, dtype: kind == "jax" or dtype == "float16")
@every_kind
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_framework_and_dtype(kind, dtype):
    if kind == "strict" and dtype == "float16":
        pytest.skip("array_api_strict has no float16")
    q, k, v = operands(dtype=dtype)
    for options in ({}, {"is_causal": True, "mapping": "sparsemax"}):
        got = attention_varlen(
            *map(KINDS[kind], (q, k, v)), KINDS[kind](np.array(CU_Q)), KINDS[kind](np.array(CU_K)), **options
        )
        assert type(got) is type(KINDS[kind](q))
        assert str(got.dtype).endswith(dtype)
        want = one_by_one(*(a.astype(np.float64) for a in (q, k, v)), CU_Q, CU_K, **options)
        np.testing.assert_allclose(back(got).astype(np.float64), want, atol=4e-3 if dtype == "float16" else 2e-6)


OFFSETS, ALPHA = np.array([4, 1, 2, -3, 4, 0]), np.linspace(1.1, 2.0, SEQUENCES)
SLOPES = np.linspace(0.0, 1.5, SEQUENCES * H).reshape(SEQUENCES, H)
OF_EACH = {  # name -> (options, those of a sequence by its number)
    **{f"offset {n}": ({"offset": n, "is_causal": True}, lambda i, n=n: {"offset": n}) for n in (0, 2, -1)},
    "offsets": ({"offset": OFFSETS, "is_causal": True}, lambda i: {"offset": int(OFFSETS[i])}),
    "offsets of a window": ({"offset": OFFSETS, "window": 2}, lambda i: {"offset": int(OFFSETS[i])}),
    "offsets of slopes": ({"offset": OFFSETS, "alibi": True}, lambda i: {"offset": int(OFFSETS[i])}),
    "slopes": ({"alibi": SLOPES}, lambda i: {"alibi": SLOPES[i]}),
    "slopes in lists": ({"alibi": SLOPES.tolist()}, lambda i: {"alibi": SLOPES[i]}),
    "alphas": ({"mapping": Entmax(ALPHA.reshape(-1, 1, 1, 1))}, lambda i: {"mapping": Entmax(ALPHA[i])}),
    "scales": ({"scale": 1 / ALPHA.reshape(-1, 1, 1, 1)}, lambda i: {"scale": 1 / ALPHA[i]}),
    "alphas of heads": ({"mapping": Entmax(ALPHA[:H].reshape(H, 1, 1))}, lambda i: {}),
}


@pytest.mark.parametrize("case", OF_EACH)
def test_a_number_for_each_sequence(case, ways):
    options, of = OF_EACH[case]
    options = {"mapping": Sparsemax(), **options}
    got = attention_varlen(*operands(), CU_Q, CU_K, **options)
    shared = {key: value for key, value in options.items() if key not in of(0)}
    np.testing.assert_allclose(got, one_by_one(*operands(), CU_Q, CU_K, of=of, **shared), atol=1e-12)


@jax_in_the_whole_battery
@every_kind
def test_slopes_of_any_array(kind):
    make = KINDS[kind]
    got = attention_varlen(*map(make, operands()), CU_Q, CU_K, mapping=Sparsemax(), alibi=make(SLOPES))
    want = attention_varlen(*operands(), CU_Q, CU_K, mapping=Sparsemax(), alibi=SLOPES)
    np.testing.assert_allclose(back(got), want, atol=5e-6 if kind == "jax" else 1e-13)


def test_keys_have_the_bounds_of_queries_by_default_and_segments_serve():
    q, k, v = operands(keys=TOTAL_Q)
    want = one_by_one(q, k, v, CU_Q, CU_Q, Sparsemax())
    for bounds in (CU_Q, np.array(CU_Q, np.int32), Segments.of(ptr=CU_Q)):
        np.testing.assert_allclose(attention_varlen(q, k, v, bounds, mapping="sparsemax"), want, atol=1e-13)


def test_names_of_flash_attention_and_of_torch():
    q, k, v = operands()
    want = attention_varlen(q, k, v, CU_Q, CU_K, is_causal=True, scale=0.3, alibi=np.ones(H))
    got = attention_varlen(q, k, v, CU_Q, CU_K, 19, 21, causal=True, softmax_scale=0.3, alibi_slopes=np.ones(H))
    np.testing.assert_array_equal(got, want)
    got = attention_varlen(query=q, key=k, value=v, cu_seq_q=CU_Q, cu_seq_k=CU_K, max_q=19, max_k=np.int64(21))
    np.testing.assert_array_equal(got, attention_varlen(q, k, v, CU_Q, CU_K))


def test_fewer_keys_than_a_map_of_k_needs():
    """As for segments: each of them gets 1."""
    q, k, v = operands()
    got = attention_varlen(q, k, v, CU_Q, CU_K, mapping=Budget(3))
    np.testing.assert_allclose(got[3:10], 0)  # no keys
    own = attention_varlen(q[:3], k[5:7], v[5:7], [0, 3], [0, 2], mapping=Budget(3))
    np.testing.assert_allclose(own, np.broadcast_to(v[5:7].sum(0), own.shape))


def test_empty_calls():
    q, k, v = operands()
    for bounds in ([0], [0, 0], [0, 0, 0]):
        got = attention_varlen(q[:0], k[:0], v[:0], bounds, mapping="sparsemax")
        assert got.shape == (0, H, DV)
    np.testing.assert_array_equal(attention_varlen(q, k[:0], v[:0], [0, TOTAL_Q], [0, 0]), np.zeros((TOTAL_Q, H, DV)))


def test_nan_stays_in_its_sequence(ways):
    """Padding is made of zeros, and not of the first entry."""
    q, k, v = (a[:n] for a, n in zip(operands(), (7, 12, 12), strict=True))
    at_q, at_k = [0, 4, 7], [0, 7, 12]  # of one class
    want = attention_varlen(q, k, v, at_q, at_k, mapping="sparsemax")
    for n in range(3):
        bad = [a.copy() for a in (q, k, v)]
        bad[n][0] = np.nan
        got = attention_varlen(*bad, at_q, at_k, mapping="sparsemax")
        assert np.isnan(got[0]).all()
        np.testing.assert_array_equal(got[4:], want[4:])


# -- dropout --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "strict"])  # the same as NumPy's
def test_dropout(kind):
    make = KINDS[kind]
    ends = np.arange(0, 401, 4)
    q, k = (make(np.zeros((400, 1, 2), np.float32)) for _ in range(2))
    v = make(np.ones((400, 1, 1), np.float32))
    call = lambda g: back(attention_varlen(q, k, v, ends, dropout_p=0.5, generator=g))  # noqa: E731
    out = call(generator(kind))
    assert set((out * 2).round(6).ravel()) == {0, 1, 2, 3, 4}
    assert abs(out.mean() - 1.0) < 0.1
    np.testing.assert_array_equal(out, call(generator(kind)))
    np.testing.assert_array_equal(call(3), call(3))


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "strict"])
def test_two_batches_drop_other_entries(kind):
    make = KINDS[kind]
    n = 64
    ends = [0, n, n + n // 4]  # of two classes
    q, k = (make(np.zeros((ends[-1], 1, 2), np.float32)) for _ in range(2))
    v = make(np.concatenate([np.eye(n, dtype=np.float32), np.eye(n, dtype=np.float32)[: n // 4]])[:, None])
    for g in (generator(kind), 5):
        out = back(attention_varlen(q, k, v, ends, dropout_p=0.5, generator=g))[:, 0]
        first, second = out[0, : n // 4] > 0, out[n, : n // 4] > 0  # of one seed these would be the same numbers
        assert (first != second).any()


# -- torch ----------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@pytest.mark.whole(lambda mapping: mapping not in (Softmax(), Entmax(1.3)))
@by_map
@pytest.mark.parametrize("causal", [False, True])
def test_gradients(mapping, causal, torch, ways):
    mapping = Sparsemax() if isinstance(mapping, SparseSoftmax) else mapping
    leaves = [torch.tensor(a, requires_grad=True) for a in operands()]
    g = torch.randn(TOTAL_Q, H, DV, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    outs = (f(*leaves, CU_Q, CU_K, mapping=mapping, is_causal=causal) for f in (attention_varlen, one_by_one))
    torch.testing.assert_close(*(torch.autograd.grad(out, leaves, g) for out in outs))


@pytest.mark.whole
def test_second_derivatives_and_alpha(torch):
    q, k, v = (torch.tensor(a[:3, :2, :2], requires_grad=True) for a in operands())
    alpha = torch.tensor([1.3, 1.7], dtype=torch.float64, requires_grad=True)

    def call(q, k, v, alpha):
        return attention_varlen(q, k, v, [0, 1, 3], mapping=Entmax(alpha.reshape(2, 1, 1)))

    assert torch.autograd.gradcheck(call, (q, k, v, alpha))
    assert torch.autograd.gradgradcheck(lambda *a: call(*a, alpha.detach()), (q, k, v))


@pytest.mark.whole
def test_compile(torch):
    q, k, v = (torch.tensor(a, dtype=torch.float32) for a in operands())
    call = torch.compile(
        lambda q, k, v, a, b: attention_varlen(q, k, v, a, b, 19, 21, mapping="sparsemax", is_causal=True),
        fullgraph=True,
    )
    got = call(q, k, v, torch.tensor(CU_Q), torch.tensor(CU_K))
    torch.testing.assert_close(got, attention_varlen(q, k, v, CU_Q, CU_K, mapping="sparsemax", is_causal=True))


@pytest.mark.whole
def test_compile_with_bounds_in_the_program(torch):
    q = torch.tensor(operands()[0], dtype=torch.float32)[:, :2]
    call = torch.compile(
        lambda q: attention_varlen(q, q, q, list(CU_Q), max_seqlen_q=19), fullgraph=True, backend="eager"
    )
    torch.testing.assert_close(call(q), attention_varlen(q, q, q, CU_Q))


# -- JAX ------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def jax():
    return pytest.importorskip("jax")


def test_jit_with_known_bounds_and_gradient(jax):
    q, k, v = (a.astype(np.float32) for a in operands())
    call = lambda *a: attention_varlen(*a, CU_Q, CU_K, mapping="sparsemax")  # noqa: E731
    want = one_by_one(q, k, v, CU_Q, CU_K, Sparsemax())
    np.testing.assert_allclose(jax.jit(call)(q, k, v), want, atol=2e-6)
    torch = pytest.importorskip("torch")
    got = jax.jit(jax.grad(lambda *a: (call(*a) ** 2).sum(), argnums=(0, 1, 2)))(*map(jax.numpy.asarray, (q, k, v)))
    leaves = [torch.tensor(a, requires_grad=True) for a in (q, k, v)]
    (call(*leaves) ** 2).sum().backward()
    for one, leaf in zip(got, leaves, strict=True):
        np.testing.assert_allclose(one, leaf.grad, atol=1e-5)


def test_one_length_for_the_same_traced_bounds(jax):
    q = operands()[0].astype(np.float32)
    got = jax.jit(lambda q, bounds: attention_varlen(q, q, q, bounds, max_seqlen_q=19))(q, jax.numpy.asarray(CU_Q))
    np.testing.assert_allclose(got, attention_varlen(q, q, q, CU_Q), atol=2e-6)


@pytest.mark.parametrize("offset", [None, 0], ids=str)
def test_jit_with_traced_bounds(jax, offset):
    q, k, v = (a.astype(np.float32) for a in operands())

    @jax.jit
    def call(q, k, v, at_q, at_k):
        return attention_varlen(q, k, v, at_q, at_k, 19, 21, mapping="sparsemax", is_causal=True, offset=offset)

    given = {} if offset is None else {"offset": offset}
    want = one_by_one(q, k, v, CU_Q, CU_K, Sparsemax(), is_causal=True, **given)
    np.testing.assert_allclose(call(q, k, v, np.array(CU_Q), np.array(CU_K)), want, atol=2e-6)
    other_q, other_k = [0, 1, 2, 3, 20, 30, 34], [0, 2, 4, 7, 25, 40, 48]
    want = one_by_one(q, k, v, other_q, other_k, Sparsemax(), is_causal=True, **given)
    np.testing.assert_allclose(call(q, k, v, np.array(other_q), np.array(other_k)), want, atol=2e-6)
    assert call._cache_size() == 1


def test_traced_bounds_that_do_not_fit_give_nan(jax):
    q, k, v = (jax.numpy.asarray(a, dtype="float32") for a in operands())
    call = jax.jit(lambda a, b: attention_varlen(q, k, v, a, b, 18, 20))  # the fifth sequence has 19 and 21
    got = np.asarray(call(np.array(CU_Q), np.array(CU_K)))
    want = one_by_one(*map(np.asarray, (q, k, v)), CU_Q, CU_K)
    np.testing.assert_allclose(got[:11], want[:11], atol=2e-6)
    assert np.isnan(got[11:30]).all()
    short = np.asarray(call(np.array([*CU_Q[:-1], 31]), np.array(CU_K)))
    assert np.isnan(short[31:]).all()
    assert not np.isnan(short[:11]).any()
    with pytest.raises(TypeError, match="max_seqlen_q=, the length"):
        jax.jit(lambda a: attention_varlen(q, q, q[..., :DV], a))(np.array(CU_Q))
    with pytest.raises(TypeError, match="traced by JAX, and q is of another framework"):
        jax.jit(lambda a: attention_varlen(*operands(), a, CU_K, 19, 21))(np.array(CU_Q))
