"""Ragged rows: every verb on segments against a loop over them by the verb on rows, in every framework."""

import contextlib
import itertools
import math

import numpy as np
import pytest

import anymax
from anymax import (
    Budget,
    Entmax,
    NormMax,
    PerturbMax,
    Segments,
    Sigsoftmax,
    Softmax,
    Sparsemax,
    SparseSoftmax,
    Taylor,
    segment_apply,
    segment_entropy,
    segment_log_apply,
    segment_logsumexp,
    segment_loss,
    segment_sample,
    segment_support,
    segment_threshold,
)
from anymax.kernels import native

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
jnp = jax.numpy

# torch's own, inside forward AD and Dynamo
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
JAX = pytest.param("jax", marks=pytest.mark.whole)

LENGTHS = [4, 0, 5, 1, 3, 17, 0]
ENTRIES, COUNT = sum(LENGTHS), len(LENGTHS)
PTR = np.concatenate([[0], np.cumsum(LENGTHS)])
SORTED = np.repeat(np.arange(COUNT), LENGTHS)
SHUFFLED = np.random.default_rng(1).permutation(SORTED)
MAPS = [
    Softmax(), Sparsemax(), Entmax(1.5), Entmax(1.3), Entmax(3.0), Budget(1.0), NormMax(2.0), SparseSoftmax(k=2),
    SparseSoftmax(p=0.8), Taylor(2), Sigsoftmax(), PerturbMax("normal"),
]  # fmt: skip
by_map = pytest.mark.parametrize("mapping", MAPS, ids=repr)
FEW = [Softmax(), Sparsemax(), Entmax(1.3)]
by_few = pytest.mark.parametrize("mapping", FEW, ids=repr)
compiled = pytest.mark.skipif(isinstance(native.load(), str), reason="no engine")


def scores(*heads, dtype="float32", seed=0):
    return (np.random.default_rng(seed).normal(size=(ENTRIES, *heads)) * 2).astype(dtype)


def by_segment(x, index, verb):
    """verb(row) of each segment and head, of the shape of x."""
    out = np.empty_like(x)
    for s in range(COUNT):
        own = np.nonzero(index == s)[0]
        for head in np.ndindex(*x.shape[1:]):
            if len(own):
                out[(own, *head)] = verb(np.ascontiguousarray(x[(own, *head)]))
    return out


def each_segment(x, index, verb, empty, dtype=None):
    """verb(row) of each segment and head, [segments, heads ...]."""
    out = np.full((COUNT, *x.shape[1:]), empty, x.dtype if dtype is None else dtype)
    for s in range(COUNT):
        own = np.nonzero(index == s)[0]
        for head in np.ndindex(*x.shape[1:]):
            if len(own):
                out[(s, *head)] = verb(np.ascontiguousarray(x[(own, *head)]))
    return out


# -- p, and the ways to say which entries belong together ----------------------------------------------------------------------------------


@compiled
@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [((), "float32"), ((8,), "float32"), ((2, 3), "float32"), ((2, 3), "float64"), ((8,), "float16")],
    ids=str,
)
@by_map
def test_p_is_that_of_the_rows_to_the_last_bit(mapping, heads, dtype):
    x = scores(*heads, dtype=dtype)
    want = by_segment(x, SHUFFLED, lambda row: anymax.apply(mapping, row))
    got = segment_apply(mapping, x, index=SHUFFLED, num_segments=COUNT)
    np.testing.assert_array_equal(got, want)
    assert got.dtype == x.dtype
    want = by_segment(x, SORTED, lambda row: anymax.apply(mapping, row))
    for given in ({"index": SORTED}, {"ptr": PTR}, {"lengths": LENGTHS}, {"index": Segments.of(ptr=PTR)}):
        np.testing.assert_array_equal(segment_apply(mapping, x, **given), want)


@by_map
def test_p_by_padded_rows(mapping):
    x = scores(3, dtype="float64")
    with anymax.use("reference"):
        want = by_segment(x, SHUFFLED, lambda row: anymax.apply(mapping, row))
        got = segment_apply(mapping, x, index=SHUFFLED, num_segments=COUNT)
    np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-13)


@compiled
@pytest.mark.parametrize("long", [2049, 5000, 270_000])
@by_few
def test_long_segments(mapping, long):
    lengths = [3, long, 0, 2048, 7]
    ptr = np.concatenate([[0], np.cumsum(lengths)])
    x = np.random.default_rng(0).normal(size=(sum(lengths), 2)).astype(np.float32)
    order = np.random.default_rng(1).permutation(len(x))
    index = np.empty(len(x), int)
    index[order] = np.repeat(np.arange(5), lengths)
    mixed = np.empty_like(x)
    mixed[Segments.of(index).order] = x
    p, q = segment_apply(mapping, x, ptr=ptr), segment_apply(mapping, mixed, index=index)
    np.testing.assert_array_equal(q[Segments.of(index).order], p)
    tau, shuffled = segment_threshold(mapping, x, ptr=ptr).tau, segment_threshold(mapping, mixed, index=index).tau
    np.testing.assert_array_equal(shuffled, tau)
    for s, (a, b) in enumerate(itertools.pairwise(ptr)):
        for h in range(2):
            row = x[a:b, h].copy()
            np.testing.assert_array_equal(p[a:b, h], anymax.apply(mapping, row) if b > a else row)
            assert tau[s, h] == (anymax.threshold(mapping, row).tau if b > a else -np.inf)


@compiled
def test_results_do_not_depend_on_threads():
    lengths = np.random.default_rng(0).pareto(0.8, 4000).astype(int)
    x = np.random.default_rng(1).normal(size=int(lengths.sum())).astype(np.float32)
    index = np.random.default_rng(2).permutation(np.repeat(np.arange(4000), lengths))
    before = native.get_num_threads()
    try:
        made = []
        for count in (1, 2, 5):
            native.set_num_threads(count)
            made.append((segment_apply("entmax15", x, lengths=lengths), segment_apply("sparsemax", x, index=index)))
    finally:
        native.set_num_threads(before)
    for sorted_, shuffled in made[1:]:
        np.testing.assert_array_equal(sorted_, made[0][0])
        np.testing.assert_array_equal(shuffled, made[0][1])


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_the_axis_of_the_entries(axis):
    x = np.moveaxis(scores(2, 3), 0, axis)
    want = np.moveaxis(segment_apply("sparsemax", np.ascontiguousarray(np.moveaxis(x, axis, 0)), ptr=PTR), 0, axis)
    np.testing.assert_array_equal(segment_apply("sparsemax", x, ptr=PTR, axis=axis), want)
    np.testing.assert_array_equal(segment_apply("sparsemax", x, ptr=PTR, dim=axis), want)
    tau, _ = segment_threshold("sparsemax", x, ptr=PTR, axis=axis)
    assert tau.shape[axis] == COUNT


def test_arrays_that_lie_apart():
    wide = scores(6)
    for x in (wide[:, ::2], wide[::-1], np.asfortranarray(wide), wide[:, 2]):
        np.testing.assert_array_equal(
            segment_apply("softmax", x, ptr=PTR), segment_apply("softmax", np.ascontiguousarray(x), ptr=PTR)
        )


def test_nan_and_infinity_stay_in_their_segment():
    x = scores(2)
    x[PTR[2], 0], x[PTR[4], 1], x[PTR[0] : PTR[1], 0] = np.nan, np.inf, -np.inf
    for engine in (None, "reference"):
        if engine:
            with anymax.use(engine):
                p = segment_apply("sparsemax", x, ptr=PTR)
        else:
            p = segment_apply("sparsemax", x, ptr=PTR)
        lost = np.isnan(p)
        assert lost[PTR[2] : PTR[3], 0].all()
        assert lost[PTR[4] : PTR[5], 1].all()
        assert lost.sum() == LENGTHS[2] + LENGTHS[4]
        assert (p[PTR[0] : PTR[1], 0] == 0).all()


def test_no_entries_and_no_segments():
    for given in ({"ptr": [0]}, {"lengths": []}, {"lengths": [0, 0]}, {"index": [], "num_segments": 3}):
        assert segment_apply("softmax", np.zeros((0, 2), np.float32), **given).shape == (0, 2)
    assert segment_logsumexp(np.zeros((0, 2)), lengths=[0, 0]).tolist() == [[-np.inf] * 2] * 2
    assert segment_entropy(np.zeros(0), lengths=[0]).tolist() == [0.0]
    assert segment_sample("softmax", np.zeros(0), lengths=[0], generator=0).tolist() == [-1]
    assert segment_loss("softmax", np.zeros(0), [-100], lengths=[0]) == 0.0


NO_ENTRIES = {
    "apply": lambda m, x: segment_apply(m, x, lengths=[0, 0]),
    "apply, no segments": lambda m, x: segment_apply(m, x, lengths=[]),
    "log_apply": lambda m, x: segment_log_apply(m, x, lengths=[0, 0]),
    "loss": lambda m, x: segment_loss(m, x, torch.tensor([-100, -100]), lengths=[0, 0]),
    "loss of distributions": lambda m, x: segment_loss(m, x, torch.zeros(0), lengths=[0, 0]),
}


@pytest.mark.parametrize("verb", NO_ENTRIES)
def test_no_entries_are_a_part_of_the_graph(verb):
    for mapping in (Sparsemax(), Entmax(torch.tensor(1.5, requires_grad=True))):
        x = torch.zeros(0, requires_grad=True)
        NO_ENTRIES[verb](mapping, x).sum().backward()
        assert x.grad is not None
        for parameter in mapping.params().values():
            NO_ENTRIES[verb](mapping, torch.zeros(0)).sum().backward()
            assert parameter.grad == 0


def test_no_entries_have_a_graph_in_what_has_one_number_a_segment():
    for verb in (segment_entropy, segment_logsumexp):
        for lengths in ([0, 0], []):
            x = torch.zeros(0, requires_grad=True)
            verb(x, lengths=lengths).sum().backward()
            assert x.grad is not None
    t = torch.tensor(2.0, requires_grad=True)
    segment_logsumexp(torch.zeros(0), temperature=t, lengths=[0]).nan_to_num(neginf=0.0).sum().backward()
    assert t.grad == 0
    with pytest.raises(ValueError, match="kind must be"):
        segment_entropy(torch.zeros(0), "rank", lengths=[0])


@pytest.mark.parametrize("verb", [segment_apply, segment_log_apply, segment_loss, segment_logsumexp])
def test_entries_without_heads(verb):
    given = {segment_loss: ("softmax", torch.zeros(2, 0, dtype=torch.int64)), segment_logsumexp: ()}.get(
        verb, ("softmax",)
    )
    x = torch.zeros(4, 0, requires_grad=True)
    out = verb(*given[:1], x, *given[1:], lengths=[1, 3])
    out.sum().backward()
    assert x.grad.shape == (4, 0)


# -- a value for each segment -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["numpy", "padded", "torch", JAX])
@pytest.mark.parametrize("shape", ["segments", "segments and heads", "heads"])
def test_a_parameter_of_each_segment(kind, shape):
    x = scores(2, dtype="float64")
    size = {"segments": (COUNT, 1), "segments and heads": (COUNT, 2), "heads": (1, 2)}[shape]
    alpha = np.random.default_rng(3).uniform(1.1, 2.5, size)
    place = {"numpy": np.asarray, "padded": np.asarray, "torch": torch.tensor, "jax": jnp.asarray}[kind]
    with anymax.use("reference") if kind == "padded" else contextlib.nullcontext():
        got = np.asarray(segment_apply(Entmax(place(alpha)), place(x), index=place(SHUFFLED), num_segments=COUNT))
    full = np.broadcast_to(alpha, (COUNT, 2))
    for s in range(COUNT):
        for h in range(2):
            own = np.nonzero(s == SHUFFLED)[0]
            if len(own):
                want = anymax.apply(Entmax(np.array([full[s, h]])), np.ascontiguousarray(x[own, h]))
                np.testing.assert_allclose(got[own, h], want, atol=1e-12 if kind != "jax" else 2e-6)


def test_a_budget_of_each_segment():
    k = np.array([2.0, 1.0, 3.5, 1.0, 2.0, 10.0, 4.0])
    p = segment_apply(Budget(k), scores(), ptr=PTR)
    np.testing.assert_allclose(np.add.reduceat(p, PTR[[0, 2, 3, 4, 5]]), [2.0, 3.5, 1.0, 2.0, 10.0], rtol=1e-5)
    # more than there are entries: each gets 1
    for engine in ("native", "reference"):
        if engine == "reference" or not isinstance(native.load(), str):
            with anymax.use(engine):
                assert segment_apply(Budget(3), [1.0, 0.0, 2.0, 5.0, 4.0, 0.0], lengths=[2, 4])[:2].tolist() == [
                    1.0,
                    1.0,
                ]


def test_a_learned_parameter_of_each_segment():
    alpha = torch.full((COUNT,), 1.5, dtype=torch.float64, requires_grad=True)
    x = torch.tensor(scores(dtype="float64"))
    assert torch.autograd.gradcheck(lambda a: segment_apply(Entmax(a), x, ptr=PTR), (alpha,))


def test_a_temperature_of_each_segment():
    rows, t = Segments.of(SHUFFLED, num_segments=COUNT), np.linspace(0.5, 2.0, COUNT)
    x = scores(dtype="float64")
    want = each_segment(x, SHUFFLED, anymax.logsumexp, -np.inf)
    np.testing.assert_allclose(segment_logsumexp(x, index=rows), want)
    warm = t * segment_logsumexp(x / rows.spread(t), index=rows)
    np.testing.assert_allclose(segment_logsumexp(x, index=rows, temperature=t), warm)
    assert rows.spread(torch.tensor(t)).shape == (ENTRIES,)


# -- the other verbs --------------------------------------------------------------------------------------------------------------------


@by_map
def test_log_p(mapping):
    x = scores(2, dtype="float64")
    want = by_segment(x, SHUFFLED, lambda row: anymax.log_apply(mapping, row))
    for engine in (None, "reference"):
        with anymax.use(engine or "reference") if engine else np.errstate():
            got = segment_log_apply(mapping, x, index=SHUFFLED, num_segments=COUNT)
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)
    got = segment_log_apply(mapping, torch.tensor(x), index=SHUFFLED, num_segments=COUNT)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mapping", [m for m in MAPS if m.has_threshold], ids=repr)
def test_thresholds(mapping):
    x = scores(2, dtype="float64")
    want = each_segment(x, SHUFFLED, lambda row: anymax.threshold(mapping, row).tau, -np.inf)
    size = each_segment(x, SHUFFLED, lambda row: anymax.threshold(mapping, row).support, 0, int)
    for make in (np.asarray, torch.tensor):
        tau, support = segment_threshold(mapping, make(x), index=SHUFFLED, num_segments=COUNT)
        np.testing.assert_allclose(tau, want, rtol=1e-9)
        np.testing.assert_array_equal(support, size)
    p = segment_apply(mapping, x, index=SHUFFLED, num_segments=COUNT)
    np.testing.assert_array_equal(segment_support(p, index=SHUFFLED, num_segments=COUNT), size)


def test_logsumexp():
    x = scores(2)
    x[PTR[2], 0], x[PTR[4], 1], x[PTR[0] : PTR[1], 0] = np.nan, np.inf, -np.inf
    want = each_segment(x, SORTED, anymax.logsumexp, -np.inf)
    for make in (np.asarray, torch.tensor):
        np.testing.assert_allclose(segment_logsumexp(make(x), ptr=PTR), want, rtol=1e-6)
    t = torch.tensor(scores(), requires_grad=True)
    segment_logsumexp(t, ptr=PTR)[torch.tensor(LENGTHS) > 0].sum().backward()
    np.testing.assert_allclose(t.grad, segment_apply("softmax", t.detach(), ptr=PTR), atol=1e-6)


@pytest.mark.parametrize(("kind", "alpha"), [("shannon", None), ("renyi", 3.0), ("renyi2", None), ("tsallis", 1.5)])
def test_entropy(kind, alpha):
    p = segment_apply("sparsemax", scores(2, dtype="float64"), index=SHUFFLED, num_segments=COUNT)
    want = each_segment(p, SHUFFLED, lambda row: anymax.entropy(row, kind, alpha), 0.0)
    for make in (np.asarray, torch.tensor):
        got = segment_entropy(make(p), kind, alpha, index=SHUFFLED, num_segments=COUNT)
        np.testing.assert_allclose(got, want, atol=1e-12)
    if alpha is not None:
        each = np.linspace(1.2, 3.0, COUNT)[:, None]
        got = segment_entropy(p, kind, each, index=SHUFFLED, num_segments=COUNT)
        want = [anymax.entropy(p[SHUFFLED == 5, 1], kind, float(each[5, 0]))]
        np.testing.assert_allclose(got[5, 1], want[0])


@pytest.mark.parametrize("kind", ["numpy", "torch", JAX])
def test_samples(kind):
    x = {"numpy": np.asarray, "torch": torch.tensor, "jax": jnp.asarray}[kind](scores(2))
    p = np.asarray(segment_apply("sparsemax", x, index=SHUFFLED, num_segments=COUNT))
    drawn = np.asarray(
        segment_sample("sparsemax", x, index=SHUFFLED, num_segments=COUNT, generator=0, num_samples=4000)
    )
    assert drawn.shape == (4000, COUNT, 2)
    for s in range(COUNT):
        for h in range(2):
            own = np.nonzero(s == SHUFFLED)[0]
            found = drawn[:, s, h]
            if not len(own):
                assert (found == -1).all()
                continue
            share = np.array([(found == e).mean() for e in own])
            assert share.sum() == pytest.approx(1.0)
            assert (share[p[own, h] == 0] == 0).all()
            np.testing.assert_allclose(share, p[own, h], atol=0.04)
    one = segment_sample("sparsemax", x, index=SHUFFLED, num_segments=COUNT, generator=0)
    assert tuple(one.shape) == (COUNT, 2)


# -- the loss -----------------------------------------------------------------------------------------------------------------------------


def targets(rng=5, heads=()):
    out = np.full((COUNT, *heads), -100)
    draw = np.random.default_rng(rng)
    for s in range(COUNT):
        own = np.nonzero(s == SHUFFLED)[0]
        for head in np.ndindex(*heads):
            if len(own):
                out[(s, *head)] = draw.choice(own)
    return out


@pytest.mark.parametrize("mapping", [m for m in MAPS if m.facts.has_potential], ids=repr)
def test_losses_of_entries(mapping):
    x, t = scores(2, dtype="float64"), targets(heads=(2,))
    want = np.zeros((COUNT, 2))
    for s in range(COUNT):
        for h in range(2):
            own = np.nonzero(s == SHUFFLED)[0]
            if len(own):
                place = int(np.nonzero(own == t[s, h])[0][0])
                want[s, h] = anymax.fenchel_young(mapping, x[own, h], place, axis=0)
    given = {"index": SHUFFLED, "num_segments": COUNT}
    for make in (np.asarray, torch.tensor):
        got = segment_loss(mapping, make(x), make(t), reduction="none", **given)
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-11)
    with anymax.use("reference"):
        got = segment_loss(mapping, x, t, reduction="none", **given)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-11)
    hot = np.zeros_like(x)
    hot[t[LENGTHS_ABOVE_0], [[0, 1]]] = 1.0
    if not isinstance(mapping, SparseSoftmax):
        got = segment_loss(mapping, x, hot, reduction="none", **given)
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)
        assert segment_loss(mapping, x, hot, **given) == pytest.approx(want.sum() / np.count_nonzero(t != -100))
    count = np.count_nonzero(t != -100)
    assert segment_loss(mapping, x, t, **given) == pytest.approx(want.sum() / count)
    assert segment_loss(mapping, x, t, reduction="sum", **given) == pytest.approx(want.sum())


LENGTHS_ABOVE_0 = np.array(LENGTHS) > 0


@by_few
def test_the_gradient_of_a_loss(mapping):
    x = torch.tensor(scores(2, dtype="float64"), requires_grad=True)
    t = torch.tensor(targets(heads=(2,)))
    given = {"index": SHUFFLED, "num_segments": COUNT}
    loss = lambda x: segment_loss(mapping, x, t, **given)  # noqa: E731
    (got,) = torch.autograd.grad(loss(x), x)
    y = torch.zeros_like(x).scatter_(0, t[t[:, 0] >= 0], 1.0)
    p = segment_apply(mapping, x.detach(), **given)
    torch.testing.assert_close(got, (p - y) / int((t >= 0).sum()))
    assert torch.autograd.gradgradcheck(loss, (x,))


@pytest.mark.whole
def test_the_gradient_of_a_loss_in_jax():
    x, t, given = scores(2), targets(heads=(2,)), {"index": SHUFFLED, "num_segments": COUNT}
    free = torch.tensor(x, requires_grad=True)
    (want,) = torch.autograd.grad(segment_loss("sparsemax", free, torch.tensor(t), **given), free)
    got = jax.grad(lambda x: segment_loss("sparsemax", x, jnp.asarray(t), **given))(jnp.asarray(x))
    np.testing.assert_allclose(got, want, atol=1e-6)


# -- torch --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.thin(3)
@by_map
def test_derivatives(mapping):
    x = torch.tensor(scores(2, dtype="float64"), requires_grad=True)
    f = lambda x: segment_apply(mapping, x, index=SHUFFLED, num_segments=COUNT)  # noqa: E731
    v = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (got,) = torch.autograd.grad(f(x), x, v)
    with anymax.use("reference"):
        (want,) = torch.autograd.grad(f(x), x, v)
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)
    _, change = torch.func.jvp(f, (x.detach(),), (v,))
    w = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (back,) = torch.autograd.grad(f(x), x, w)
    torch.testing.assert_close((change * w).sum(), (back * v).sum())


@pytest.mark.thin(6)
@by_map
def test_second_derivatives(mapping):
    x = torch.tensor(scores(dtype="float64")[: PTR[5]], requires_grad=True)
    f = lambda x: segment_apply(mapping, x, ptr=PTR[:6])  # noqa: E731
    assert torch.autograd.gradgradcheck(f, (x,))
    log = lambda x: segment_log_apply(mapping, x, ptr=PTR[:6])  # noqa: E731
    if isinstance(mapping, (Softmax, Sigsoftmax)):
        assert torch.autograd.gradcheck(log, (x,))
        assert torch.autograd.gradgradcheck(log, (x,))


@compiled
@by_map
def test_a_gradient_is_that_of_the_rows_to_the_last_bit(mapping):
    for heads, index in (((), SHUFFLED), ((), SORTED), ((8,), SHUFFLED)):
        x = scores(*heads)
        g = scores(*heads, seed=9)
        t = torch.tensor(x, requires_grad=True)
        (got,) = torch.autograd.grad(segment_apply(mapping, t, index=index, num_segments=COUNT), t, torch.tensor(g))
        for s in range(COUNT):
            own = np.nonzero(index == s)[0]
            for head in np.ndindex(*heads):
                if len(own):
                    row = torch.tensor(x[(own, *head)], requires_grad=True)
                    (want,) = torch.autograd.grad(anymax.apply(mapping, row), row, torch.tensor(g[(own, *head)]))
                    np.testing.assert_array_equal(got[(own, *head)], want)


def test_vmap():
    x = torch.tensor(scores(3))
    want = segment_apply("sparsemax", x, ptr=PTR)
    got = torch.func.vmap(lambda x: segment_apply("sparsemax", x, ptr=PTR), in_dims=1, out_dims=1)(x)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    x = torch.tensor(scores(2)).to(dtype).requires_grad_()
    p = segment_apply("sparsemax", x, ptr=PTR)
    assert p.dtype == dtype
    want = by_segment(x.detach().float().numpy(), SORTED, anymax.sparsemax)
    np.testing.assert_array_equal(p.detach().float(), torch.tensor(want).to(dtype).float())
    p.sum().backward()
    assert x.grad.dtype == dtype


@pytest.mark.whole
@by_few
def test_under_torch_compile(mapping):
    x, w = torch.tensor(scores(2), requires_grad=True), torch.tensor(scores(2, seed=3))
    index, ptr = torch.tensor(SHUFFLED), torch.tensor(PTR)
    rows = Segments.of(index)
    ways = [
        (lambda x, i: segment_apply(mapping, x, index=i, num_segments=COUNT), index),
        (lambda x, i: segment_apply(mapping, x, ptr=i), ptr),
        (lambda x, i: segment_apply(mapping, x, index=rows), index),
    ]
    for f, given in ways:
        torch._dynamo.reset()
        c = torch.compile(f, fullgraph=True)
        torch.testing.assert_close(c(x, given), f(x, given))
        (got,), (want,) = (torch.autograd.grad((way(x, given) * w).sum(), x) for way in (c, f))
        torch.testing.assert_close(got, want)
    bad = index.clone()
    bad[4] = COUNT
    torch._dynamo.reset()
    with pytest.raises(IndexError, match=r"index\[4\]"):
        torch.compile(ways[0][0], fullgraph=True)(x, bad)


VERBS = [
    pytest.param(v, marks=pytest.mark.whole)
    for v in ("log_apply", "logsumexp", "threshold", "loss", "sample", "entropy")
]


@pytest.mark.whole
def test_lists_under_torch_compile():
    torch._dynamo.reset()
    f = lambda x: segment_apply("softmax", x, lengths=[1, 3])  # noqa: E731
    x = torch.tensor([0.5, 1.0, 0.25, 0.0])
    torch.testing.assert_close(torch.compile(f, fullgraph=True, backend="eager")(x), f(x))


@pytest.mark.parametrize("verb", ["support", *VERBS])
def test_every_verb_under_torch_compile(verb):
    index, x = torch.tensor([1, 0, 1, 1]), torch.tensor([0.5, -math.inf, 0.25, 0.25])
    given = {"loss": (x, torch.tensor([-100, 2])), "sample": (torch.where(x == 0.5, x, -math.inf),)}.get(verb, (x,))
    given = (
        (x.clip(min=0),) if verb in ("entropy", "support") else given if verb == "logsumexp" else ("softmax", *given)
    )

    def f(index):
        return getattr(anymax, f"segment_{verb}")(*given, index=index, num_segments=2)

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(f, fullgraph=True, backend="eager")(index), f(index))


@pytest.mark.whole
@pytest.mark.parametrize("mapping", FEW[:2], ids=repr)
def test_export(mapping):
    class Module(torch.nn.Module):
        def forward(self, x, index):
            return segment_apply(mapping, x, index=index, num_segments=COUNT)

    x, index = torch.tensor(scores(2)), torch.tensor(SHUFFLED)
    program = torch.export.export(Module(), (x, index))
    torch.testing.assert_close(program.module()(x, index), Module()(x, index), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", [(), (3,)], ids=str)
@by_few
def test_nested_tensors(mapping, heads):
    parts = [torch.randn(n, *heads, generator=torch.Generator().manual_seed(n)) for n in (3, 1, 5)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    p = segment_apply(mapping, nested)
    assert p.layout is torch.jagged
    for part, own in zip(parts, p.unbind(), strict=True):
        torch.testing.assert_close(own, anymax.apply(mapping, part, 0))
    torch.testing.assert_close(anymax.apply(mapping, nested, 1).values(), p.values())
    if heads:
        dense = anymax.apply(mapping, nested)
        torch.testing.assert_close(dense.values(), anymax.apply(mapping, nested.values()))
    else:
        torch.testing.assert_close(anymax.apply(mapping, nested).values(), p.values())
    (g,) = torch.autograd.grad(p.values().pow(2).sum(), nested)
    plain = torch.cat(parts).requires_grad_()
    (want,) = torch.autograd.grad(segment_apply(mapping, plain, lengths=[3, 1, 5]).pow(2).sum(), plain)
    torch.testing.assert_close(g.values(), want)
    with pytest.raises(ValueError, match="axis 0"):
        anymax.apply(mapping, nested, 0)
    with pytest.raises(TypeError, match="knows its segments"):
        segment_apply(mapping, nested, ptr=[0, 9])
    log = segment_log_apply(mapping, nested)
    torch.testing.assert_close(log.values().exp(), p.values())


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@by_few
def test_sparse_tensors(mapping):
    dense = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0))
    keep = torch.rand(4, 3, 6, generator=torch.Generator().manual_seed(1)) < 0.4
    keep[1, 1] = False
    want = anymax.apply(mapping, dense, mask=keep)
    x = (dense * keep).to_sparse().requires_grad_()
    p = anymax.apply(mapping, x)
    assert p.layout is torch.sparse_coo
    torch.testing.assert_close(p.to_dense(), want)
    torch.sparse.sum(p * p.detach()).backward()
    assert x.grad.layout is torch.sparse_coo
    flat = (dense * keep)[0].to_sparse_csr()
    p = segment_apply(mapping, flat)
    assert p.layout is torch.sparse_csr
    torch.testing.assert_close(p.to_dense(), want[0])
    assert p._nnz() == flat._nnz()  # zeros of the map stay entries, and absent ones absent
    free = flat.clone().requires_grad_()
    anymax.apply(mapping, free).values().pow(2).sum().backward()
    assert free.grad.layout is torch.sparse_csr
    with pytest.raises(ValueError, match="last axis"):
        anymax.apply(mapping, flat, 0)


def test_nested_and_sparse_tensors_where_there_is_no_such_result():
    nested = torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)
    for call in (
        lambda: segment_logsumexp(nested, ptr=[0, 2]),
        lambda: segment_loss("softmax", torch.eye(2).to_sparse(), [0, 1]),
        lambda: segment_entropy(torch.eye(2).to_sparse_csr()),
    ):
        with pytest.raises(TypeError, match="takes a dense tensor"):
            call()


# -- JAX ----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.thin(6)
@by_map
def test_jax(mapping):
    x = scores(2)
    want = by_segment(x, SHUFFLED, lambda row: anymax.apply(mapping, row))
    got = segment_apply(mapping, jnp.asarray(x), index=jnp.asarray(SHUFFLED), num_segments=COUNT)
    np.testing.assert_allclose(got, want, atol=3e-6)


@pytest.mark.thin(3)
@by_few
def test_jit_and_gradients(mapping):
    x = scores(2)
    want = by_segment(x, SHUFFLED, lambda row: anymax.apply(mapping, row))
    index = jnp.asarray(SHUFFLED)
    f = lambda x, i: segment_apply(mapping, x, index=i, num_segments=COUNT)  # noqa: E731
    np.testing.assert_allclose(f(jnp.asarray(x), index), want, atol=3e-6)
    np.testing.assert_allclose(jax.jit(f)(jnp.asarray(x), index), want, atol=3e-6)
    w = jnp.asarray(scores(2, seed=4))
    slope = jax.grad(lambda x, i: (f(x, i) * w).sum())
    np.testing.assert_allclose(slope(jnp.asarray(x), index), jax.jit(slope)(jnp.asarray(x), index), atol=1e-5)
    t = torch.tensor(x, requires_grad=True)
    (g,) = torch.autograd.grad(
        segment_apply(mapping, t, index=SHUFFLED, num_segments=COUNT), t, torch.tensor(np.array(w))
    )
    np.testing.assert_allclose(slope(jnp.asarray(x), index), g, atol=2e-5)


@pytest.mark.thin(2)
@pytest.mark.parametrize("given", ["ptr", "lengths"])
def test_jit_of_bounds(given):
    x, value = jnp.asarray(scores()), jnp.asarray(PTR if given == "ptr" else LENGTHS)
    f = jax.jit(lambda x, v: segment_apply("sparsemax", x, **{given: v}))
    np.testing.assert_allclose(f(x, value), segment_apply("sparsemax", x, ptr=PTR), atol=1e-6)
    np.testing.assert_allclose(
        jax.vmap(lambda x: segment_apply("softmax", x, ptr=PTR), 1, 1)(jnp.asarray(scores(3))),
        segment_apply("softmax", scores(3), ptr=PTR),
        atol=1e-6,
    )


@pytest.mark.whole
def test_the_other_verbs_under_jit():
    x, index = jnp.asarray(scores(2)), jnp.asarray(SHUFFLED)
    given = {"index": SHUFFLED, "num_segments": COUNT}
    for verb in (
        segment_logsumexp,
        lambda x, **o: segment_threshold("entmax15", x, **o),
        lambda x, **o: segment_entropy(segment_apply("sparsemax", x, **o), **o),
        lambda x, **o: segment_support(segment_apply("sparsemax", x, **o), **o),
        lambda x, **o: segment_log_apply("softmax", x, **o),
        lambda x, **o: segment_sample("softmax", x, generator=jax.random.key(0), **o),
        lambda x, **o: segment_loss("sparsemax", x, jnp.asarray(targets(heads=(2,))), **o),
    ):
        got = jax.jit(lambda x, i, verb=verb: verb(x, index=i, num_segments=COUNT))(x, index)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, verb(x, **given))


@pytest.mark.parametrize("mapping", ["softmax", "sparsemax"])
def test_an_index_out_of_range_under_jit_is_nan(mapping):
    index = SHUFFLED.copy()
    index[3], index[7] = -1, COUNT
    f = jax.jit(lambda x, i: segment_apply(mapping, x, index=i, num_segments=COUNT))
    p = np.asarray(f(jnp.asarray(scores()), jnp.asarray(index)))
    assert np.nonzero(np.isnan(p))[0].tolist() == [3, 7]


def test_jit_asks_for_the_number_of_segments():
    with pytest.raises(TypeError, match="num_segments="):
        jax.jit(lambda x, i: segment_apply("softmax", x, index=i))(jnp.zeros(3), jnp.zeros(3, int))


# -- what the packages ask of their own softmax --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["numpy", "torch", JAX])
def test_the_cases_of_torch_geometric(kind):
    make = {"numpy": np.asarray, "torch": torch.tensor, "jax": jnp.asarray}[kind]
    src, index, ptr = make([1.0, 1.0, 1.0, 1.0]), make([0, 0, 1, 2]), make([0, 2, 3, 4])
    for given in ({"index": index}, {"ptr": ptr}, {"index": index, "num_segments": 5}):
        np.testing.assert_allclose(segment_apply("softmax", src, **given), [0.5, 0.5, 1.0, 1.0])
    src = scores(16)[:4]
    want = segment_apply("softmax", src, ptr=[0, 2, 3, 4])
    for axis, shape in ((0, (4, 16)), (1, (16, 4)), (1, (2, 4, 8)), (-1, (2, 8, 4))):
        moved = np.moveaxis(src, 0, -1).reshape([n for i, n in enumerate(shape) if i != axis % len(shape)] + [4])
        moved = np.moveaxis(moved, -1, axis)
        p = np.asarray(segment_apply("softmax", make(moved), index=index, axis=axis))
        np.testing.assert_allclose(np.moveaxis(p, axis, -1).reshape(16, 4).T, want, atol=1e-6)


@pytest.mark.parametrize("make", [np.asarray, torch.tensor], ids=["numpy", "torch"])
def test_the_cases_of_torch_scatter(make):
    src, index = np.array([0.2, 0, 0.2, -2.1, 3.2, 7, -1, -np.inf]), [0, 1, 0, 1, 1, 2, 4, 4]
    parts = {0: [0.2, 0.2], 1: [0, -2.1, 3.2], 2: [7], 4: [-1, -np.inf]}
    p, log_p = (verb("softmax", make(src), index=index) for verb in (segment_apply, segment_log_apply))
    for s, part in parts.items():
        own = np.nonzero(np.array(index) == s)[0]
        np.testing.assert_allclose(np.asarray(p)[own], anymax.softmax(part))
        np.testing.assert_allclose(np.asarray(log_p)[own], anymax.log_softmax(part))
    want = [anymax.logsumexp(parts[s]) if s in parts else -np.inf for s in range(5)]
    np.testing.assert_allclose(segment_logsumexp(make(src), index=index), want)


def test_the_cases_of_jraph_and_dgl():
    logits, index = jnp.arange(6.0), jnp.asarray([0, 0, 1, 1, 1, 3])
    for f in (segment_apply, jax.jit(segment_apply, static_argnames=("mapping", "num_segments"))):
        p = f(mapping="softmax", x=logits, index=index, num_segments=4)
        np.testing.assert_allclose(jax.ops.segment_sum(p, index, 4), [1.0, 1.0, 0.0, 1.0], atol=1e-6)
    # edge_softmax of a graph whose edges are in no order, by the node that they come to
    to, score = torch.tensor([1, 2, 1, 0, 2]), torch.ones(5, 1)
    p = segment_apply("softmax", score, index=to, num_segments=3)
    np.testing.assert_allclose(p[:, 0], [0.5, 0.5, 0.5, 1.0, 0.5])


# -- segments, and bad input -------------------------------------------------------------------------------------------------------------


def test_what_segments_are():
    rows = Segments.of(SHUFFLED, num_segments=COUNT)
    np.testing.assert_array_equal(rows.ptr, PTR)
    np.testing.assert_array_equal(rows.lengths, LENGTHS)
    np.testing.assert_array_equal(rows.order, np.argsort(SHUFFLED, kind="stable"))
    np.testing.assert_array_equal(rows.order[rows.inverse], np.arange(ENTRIES))
    np.testing.assert_array_equal(rows.index, SHUFFLED)
    assert Segments.of(rows) is rows
    assert Segments.of(SORTED).order is None
    assert repr(rows) == f"Segments(num_segments={COUNT}, num_entries={ENTRIES})"
    given = PTR.copy()
    rows = Segments.of(ptr=given)
    given[1] = 9
    np.testing.assert_array_equal(rows.ptr, PTR)


def test_an_index_is_sorted_without_an_engine_too(monkeypatch):
    monkeypatch.setattr(native, "load", lambda: "none")
    for index in (SHUFFLED, SORTED):
        rows = Segments.of(index, num_segments=COUNT)
        np.testing.assert_array_equal(rows.ptr, PTR)
        np.testing.assert_array_equal(
            np.arange(ENTRIES) if rows.order is None else rows.order, np.argsort(index, kind="stable")
        )
    with pytest.raises(IndexError, match=r"index\[1\] is 7"):
        Segments.of([0, 7], num_segments=7)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({}, TypeError, "exactly one of index="),
        ({"index": [0], "ptr": [0, 1]}, TypeError, "got index= and ptr="),
        (
            {"index": [0, 3, 1], "num_segments": 3},
            IndexError,
            r"index\[1\] is 3; .* 0 to 2 \(num_segments=3 is too small\)",
        ),
        ({"index": [0, 0, -2]}, IndexError, r"index\[2\] is -2"),
        ({"index": [0.0, 1.0, 1.0]}, TypeError, "index must be integers, got float64"),
        ({"index": [[0, 0, 1]]}, ValueError, "one axis"),
        ({"index": [0, 0]}, ValueError, "2 entries in all, and x of shape .* has 3"),
        ({"ptr": [0, 2, 1, 3]}, ValueError, r"ptr\[2\] is 1, below ptr\[1\], 2"),
        ({"ptr": [1, 3]}, ValueError, r"ptr\[0\] is 1"),
        ({"ptr": []}, ValueError, "ptr is empty"),
        ({"ptr": [0, 2]}, ValueError, "2 entries in all"),
        ({"lengths": [4, -1]}, ValueError, r"lengths\[1\] is -1"),
        ({"lengths": [1, 1]}, ValueError, "2 entries in all, and x of shape"),
        ({"lengths": [1, 2], "num_segments": 1}, ValueError, "num_segments=1, and lengths has 2"),
        ({"index": [0, 0, 1], "num_segments": -1}, TypeError, "from 0 on"),
        ({"index": [0, 0, 1], "num_segments": 2.0}, TypeError, "from 0 on"),
        ({"index": [0, 2**40, 1]}, ValueError, r"index\[1\] is 1099511627776, and at most"),
        (
            {"index": [0, 0, 1], "num_segments": 2**62},
            ValueError,
            r"at most 2147483647 segments are supported; number them",
        ),
        ({"lengths": [2**62, 2**62, 3]}, ValueError, r"the lengths sum to 9.223e\+18, beyond 64 bits"),
        ({"index": [0, 0, 1], "axis": 2}, ValueError, "axis 2 is out of range"),
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [np.asarray, torch.tensor], ids=["numpy", "torch"])
def test_bad_segments(given, error, said, make):
    x = make([1.0, 2.0, 3.0])
    with pytest.raises(error, match=said):
        segment_apply("softmax", x, **given)


def test_bad_targets_and_options():
    x = [1.0, 2.0, 3.0]
    with pytest.raises(IndexError, match=r"target\[1\] is 0, for segment 1: it is an entry of another segment"):
        segment_loss("softmax", x, [1, 0], lengths=[2, 1])
    with pytest.raises(IndexError, match=r"target\[0\] is 3, for segment 0: the entries are 0 to 2"):
        segment_loss("softmax", x, [3, 2], lengths=[2, 1])
    with pytest.raises(ValueError, match="expected an entry for each segment"):
        segment_loss("softmax", x, [0], lengths=[2, 1])
    with pytest.raises(TypeError, match="no Fenchel-Young loss"):
        segment_loss("taylor", x, [0, 2], lengths=[2, 1])
    with pytest.raises(ValueError, match="does not broadcast"):
        segment_apply(Entmax(np.array([1.5, 1.5, 1.5])), x, lengths=[2, 1])
    with pytest.raises(TypeError, match="-inf"):
        segment_apply("softmax", x, lengths=[2, 1], mask=[True] * 3)
    with pytest.raises(TypeError, match="num_samples"):
        segment_sample("softmax", x, lengths=[2, 1], num_samples=1.5)
