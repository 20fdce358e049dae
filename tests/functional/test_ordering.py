"""Soft ranks, soft sorting and soft permutations, against isotonic regression, the definitions of the papers, and other packages."""

import itertools
import math
import re

import laws
import numpy as np
import oracles
import pytest
from kinds import KINDS, back

import anymax as am
from anymax import Ranks, soft_permutation, soft_rank, soft_sort
from anymax.kernels import native, order
from anymax.mappings.ranks import SoftSorted

INF = math.inf
pytestmark = [
    # torch's own, in forward AD
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # and in Dynamo
]
every_kind = pytest.mark.parametrize("kind", KINDS)
either = pytest.mark.parametrize("regularization", ["l2", "kl"])
engines = pytest.mark.parametrize("engine", ["order", "reference"])
WIDTHS = (1, 2, 3, 7, 47, 48, 49, 130, 333)  # the sort of the engine changes its way at 48
STRENGTHS = (0.0103, 0.103, 1.03, 30.3)


def on(engine):
    if engine == "order" and am.choose("forward", Ranks(), np.zeros(2)).name != "order":
        pytest.skip("the engine is not compiled")
    return am.use(engine)


def projection(z, w, kl):
    """The projection of z on the permutahedron of w (kl: its logarithm, of exp(w) by exp(z)); pooling in longdouble, two rules a block."""
    by = np.argsort(-z, kind="stable")
    s, w = z[by].astype(np.longdouble), np.sort(w)[::-1].astype(np.longdouble)
    lse = lambda a: a.max() + np.log(np.exp(a - a.max()).sum())  # noqa: E731
    value = (lambda b: lse(s[b]) - lse(w[b])) if kl else (lambda b: (s[b] - w[b]).mean())
    blocks = []
    for j in range(len(s)):
        blocks.append([j])
        while len(blocks) > 1 and value(blocks[-2]) <= value(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    out = np.empty(len(s), np.longdouble)
    for b in blocks:
        out[by[b]] = s[b] - value(b)
    return out.astype(float)


def rank_of(x, strength, kl, descending=False):
    w = np.arange(len(x), 0.0, -1.0)
    z = (-x if descending else x) / strength
    return np.exp(projection(z, np.log(w), True)) if kl else projection(z, w, False)


def sort_of(x, strength, kl, descending=False):
    sign = 1.0 if descending else -1.0
    w = np.arange(len(x), 0.0, -1.0) / strength
    return sign * projection(w, sign * x, kl)


# -- values ---------------------------------------------------------------------------------------------------------------


def test_the_values_of_fast_soft_sorts_readme():
    x = [[5.0, 1.0, 2.0], [2.0, 1.0, 5.0]]
    laws.close(soft_sort(x, regularization_strength=1.0), [[5 / 3, 8 / 3, 11 / 3]] * 2, 1e-15)
    laws.close(soft_sort(x, regularization_strength=0.1), [[1, 2, 5]] * 2, 0)
    laws.close(soft_rank(x, regularization_strength=2.0), [[3, 1.25, 1.75], [1.75, 1.25, 3]], 0)
    laws.close(soft_rank(x, regularization_strength=1.0), [[3, 1, 2], [2, 1, 3]], 0)


@engines
@either
@pytest.mark.parametrize("n", WIDTHS)
def test_values(engine, regularization, n):
    kl = regularization == "kl"
    with on(engine):
        for strength, down in itertools.product(STRENGTHS, (False, True)):
            x = laws.scores(n, seed=n)
            options = {"regularization": regularization, "regularization_strength": strength, "descending": down}
            laws.close(soft_rank(x, **options), rank_of(x, strength, kl, down), 1e-11 * n, strength, down)
            atol = 1e-12 * max(1.0, n / strength)
            laws.close(soft_sort(x, **options), sort_of(x, strength, kl, down), atol, strength, down)


def test_isotonic_regression_of_scikit_learn():
    isotonic = pytest.importorskip("sklearn.isotonic")
    for n, strength in itertools.product(WIDTHS, STRENGTHS):
        x = laws.scores(n, seed=n + 1)
        by = np.argsort(-x)
        s = x[by] / strength
        want = np.empty(n)
        want[by] = s - isotonic.isotonic_regression(s - np.arange(n, 0.0, -1.0), increasing=False)
        laws.close(soft_rank(x, regularization_strength=strength), want, 1e-12 * n / min(strength, 1.0))


@either
def test_no_mixture_of_orderings_is_better(regularization):
    """Against all mixtures of pairs of orderings of three classes, and p itself is one of three."""
    orders = np.array(list(itertools.permutations([1.0, 2.0, 3.0])))
    mixed = [t * a + (1 - t) * b for a, b in itertools.combinations(orders, 2) for t in np.linspace(0, 1, 101)]
    inside = np.array([t * m + (1 - t) * np.full(3, 2.0) for m in mixed for t in np.linspace(0, 1, 21)])
    for x, strength in itertools.product(laws.scores(6, 3, seed=3), (0.3, 1.0)):
        omega = lambda q: 0.5 * (q * q).sum(-1) if regularization == "l2" else (q * np.log(q)).sum(-1)  # noqa: E731
        value = lambda q, x=x, strength=strength, omega=omega: q @ x - strength * omega(q)  # noqa: E731
        p = am.apply(Ranks(strength, regularization), x)
        best = inside[np.argmax(value(inside))]
        assert value(p) >= value(best) - 1e-12
        laws.close(p, best, 0.05)


@engines
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_that_are_hard_to_sort(engine, dtype):
    """Ties, numbers that differ in their last digits, zeros of both signs, and rows in order already."""
    rng = np.random.default_rng(0)
    rows = [
        np.zeros(300), np.repeat(rng.normal(size=30), 10), rng.integers(0, 3, 300) * 1.0, np.arange(300.0), -np.arange(300.0),
        1e4 + rng.normal(size=300) * 1e-2, rng.permutation(300) * 1e-9 + 1.0, np.where(rng.random(300) < 0.5, 0.0, -0.0),
        np.where(rng.random(300) < 0.5, 1e30, -1e30), rng.normal(size=300) * 1e-30,
    ]  # fmt: skip
    with on(engine):
        for row in rows:
            x = row.astype(dtype)
            p = am.apply(Ranks(1e-3), x).astype(float)
            laws.close(p.sum(), 300 * 301 / 2, 300 * 301 * np.finfo(dtype).eps)
            assert (np.diff(p[np.argsort(x, kind="stable")]) >= -1e-4).all()
            for value in np.unique(x)[:40]:
                laws.close(p[x == value], np.full((x == value).sum(), p[x == value][0]), 1e-3)
            if np.abs(x).max() < 1e9:  # else gaps of scores are wider than those of the places
                laws.close(soft_sort(x, regularization_strength=1e-9), np.sort(x), 1e-5 * np.abs(x).max())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_all_threads_share_a_long_row_and_nothing_depends_on_them(dtype):
    from engine_state import by_threads

    if isinstance(native.load(), str):
        pytest.skip("the engine is not compiled")
    x = np.random.default_rng(0).permutation(600_000).astype(dtype) - 300_000
    np.testing.assert_array_equal(soft_rank(x, regularization_strength=1e-12), x + 300_001)
    np.testing.assert_array_equal(soft_sort(x, regularization_strength=1e-12), np.sort(x))
    x = np.random.default_rng(0).normal(size=600_000).astype(dtype)
    x[::7], x[1::7], x[2::7] = -INF, 0.0, -0.0
    for strength in (1e-4, 1.0):
        for verb in (soft_rank, soft_sort):
            one, *others = by_threads((1, 2, 3), lambda: verb(x, regularization_strength=strength))  # noqa: B023
            for other in others:
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_threads_of_torch_share_a_long_row(dtype):
    """They divide it where they like."""
    pytest.importorskip("torch")
    from engine_state import in_a_child

    if isinstance(native.load(), str):
        pytest.skip("the engine is not compiled")
    assert in_a_child(OF_TORCH.format(dtype=dtype), OMP_NUM_THREADS="2").split() == ["True"] * 6


@engines
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_large_scores_that_tie_share_their_ranks(engine, dtype):
    """Their mean is an ulp from them, which divided by the strength is no small number."""
    x = np.round(np.random.default_rng(0).normal(size=64) * 2).astype(dtype) * (1e6 if dtype == "float32" else 1e16)
    places = np.argsort(np.argsort(x, kind="stable"), kind="stable") + 1.0
    want = np.array([places[x == value].mean() for value in x])
    with on(engine):
        laws.close(soft_rank(x, regularization="kl", regularization_strength=1e-3), want, 1e-4)


OF_TORCH = """
import torch, anymax
for n in (262_145, 300_000, 500_000):
    x = torch.randn(n, dtype=torch.{dtype}, generator=torch.Generator().manual_seed(n))
    for verb in (anymax.soft_rank, anymax.soft_sort):
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(verb(x, regularization_strength=1e-3))
        print(torch.equal(*results))
"""


@engines
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_far_scores_have_exponentials_of_zero(engine, dtype):
    """exp(z) exp(w) of a row is 0 where z and w both go down to -600, in fp32 to -88."""
    x = np.array([0.0, -101.0, -198.0, -297.0, -396.0, -495.0], dtype)
    with on(engine):
        np.testing.assert_array_equal(soft_sort(x, "kl", 0.01, descending=True), [0, -100, -198, -297, -396, -495])
        for scale, strength, seed in itertools.product((88.0, 1e3), (0.005, 0.1, 1.0), range(4)):
            rng = np.random.default_rng(seed)
            x = (scale * rng.normal(size=7)).astype(dtype)
            x[4:] = x[:3] + 0.3 * rng.normal(size=3)
            for down in (False, True):
                want, close = x.astype(float), 4.0 * np.finfo(dtype).eps * (np.abs(x).max() + 7 / strength)
                laws.close(soft_sort(x, "kl", strength, descending=down), sort_of(want, strength, True, down), close)


@pytest.mark.parametrize(
    "made",
    [lambda: Ranks(0.7), lambda: Ranks(0.7, "kl"), lambda: SoftSorted(30.0), lambda: SoftSorted(30.0, "kl", True)],
)
@pytest.mark.whole(lambda dtype: dtype == "float64")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_engine_is_the_reference(made, dtype):
    torch = pytest.importorskip("torch")
    mapping, rng = made(), np.random.default_rng(1)
    for n in WIDTHS:
        x = rng.normal(size=(6, n)).astype(dtype)
        x[1, n // 2 :] = -INF
        x[2] = -INF
        x[3, n // 2], x[4, 0] = INF, math.nan
        g, found = torch.tensor(rng.normal(size=x.shape).astype(dtype)), {}
        for engine in ("order", "reference"):
            with on(engine):
                t = torch.tensor(x).requires_grad_()
                p = am.apply(mapping, t)
                found[engine] = p.detach().numpy(), *(a.numpy() for a in torch.autograd.grad(p, t, g))
        atol = (2e-5 if dtype == "float32" else 1e-12) * n
        for got, want in zip(found["order"], found["reference"]):
            assert np.array_equal(np.isnan(got), np.isnan(want))
            assert np.isnan(got[3:5]).all()
            laws.close(np.nan_to_num(got), np.nan_to_num(want), atol, n)
        laws.same(found["order"][0][2], np.zeros(n))


@either
def test_each_row_has_its_own_strength_which_is_learned(regularization):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(4)
    x, g = rng.normal(size=(30, 11)), rng.normal(size=(30, 11))
    x[:9][rng.random((9, 11)) < 0.3] = -INF
    strength = rng.uniform(0.1, 3.0, (30, 1))
    x[21, 4] = np.nan
    found = {}
    for engine in ("order", "reference"):
        with on(engine):
            rows = torch.tensor(x, requires_grad=True)
            each = torch.tensor(strength, requires_grad=True)
            p = am.apply(Ranks(each, regularization), rows)
            found[engine] = [p.detach(), *torch.autograd.grad(p, [rows, each], torch.tensor(g))]
    assert found["order"][0][21].isnan().all()
    for got, want in zip(found["order"], found["reference"]):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-11)
    h = 1e-6 * strength
    near = [am.apply(Ranks(strength + step, regularization), x) for step in (-h, h)]
    with np.errstate(invalid="ignore"):
        slope = ((near[1] - near[0]) * g).sum(-1, keepdims=True) / (2 * h)
    np.testing.assert_allclose(found["order"][2], slope, rtol=1e-4, atol=1e-5)


def test_what_the_engine_refuses():
    jnp, engine, x = pytest.importorskip("jax").numpy, order.ENGINE, np.zeros((2, 3))
    if isinstance(native.load(), str):
        pytest.skip("the engine is not compiled")
    assert engine.refuse("forward", Ranks(), x) is engine.refuse("vjp", SoftSorted(), x) is None
    for op, mapping, scores, words in (
        ("forward", am.Sparsemax(), x, "its maps are soft ranks and soft sorting"),
        ("loss", Ranks(), x, "it has no loss (soft targets), only p, gradient of p"),
        ("forward", Ranks(np.ones((2, 1), int)), x, "its strength: it takes float32, float64"),
        ("forward", Ranks(), jnp.zeros(3), "JAX calls the same library through XLA"),
    ):
        assert words in engine.refuse(op, mapping, scores), words
    assert re.search(
        r"\n  p +order: sorts .*\n  log p +reference: .*\n  gradient of p +order: sorts ", str(am.explain(Ranks(), x))
    )


def test_a_saved_order_that_is_none_is_refused():
    torch = pytest.importorskip("torch")
    with on("order"):
        x = torch.randn(3, 60)
        p, saved = am.choose("forward", Ranks(), x).forward_saving(Ranks(), x)
        assert isinstance(saved, order.Order)
        saved.memory[1, 3] = 60
        with pytest.raises(RuntimeError, match="the native engine refused the gradient of an order"):
            am.choose("vjp", Ranks(), x).vjp(Ranks(), x, p, p, saved)


# -- arrays ---------------------------------------------------------------------------------------------------------------


@every_kind
def test_axes_masks_and_halves(kind):
    x = laws.scores(2, 5, 3, seed=4).astype(np.float32)
    keep = laws.scores(2, 5, 3, seed=5) > -0.8
    for verb in (soft_rank, soft_sort):
        whole = back(verb(KINDS[kind](x), axis=1))
        masked = back(verb(KINDS[kind](x), dim=1, mask=KINDS[kind](keep)))
        for i, j in itertools.product(range(2), range(3)):
            laws.close(whole[i, :, j], verb(x[i, :, j]), 1e-6)
            kept = keep[i, :, j]
            want = np.zeros(5)
            want[np.nonzero(kept)[0] if verb is soft_rank else slice(kept.sum())] = verb(x[i, kept, j])
            laws.close(masked[i, :, j], want, 1e-6)
    p = back(soft_permutation(KINDS[kind](x), "sparsemax", 0.3, axis=1, mask=KINDS[kind](keep)))
    assert p.shape == (2, 5, 5, 3)
    for i, j in itertools.product(range(2), range(3)):
        kept = keep[i, :, j]
        want = np.zeros((5, 5))
        want[: kept.sum(), kept] = soft_permutation(x[i, kept, j], "sparsemax", 0.3)
        laws.close(p[i, :, :, j], want, 1e-6)


def test_halves_lists_and_empty_batches():
    torch = pytest.importorskip("torch")
    x = torch.randn(4, 9)
    for verb in (soft_rank, soft_sort, soft_permutation):
        for dtype in (torch.float16, torch.bfloat16):
            out = verb(x.to(dtype))
            assert out.dtype == dtype
            torch.testing.assert_close(out.float(), verb(x.to(dtype).float()), rtol=1e-2, atol=1e-2)
        assert verb(x[:0]).shape[0] == 0
        assert verb(np.array([[3, 1, 2]])).dtype == np.float64
    assert soft_rank([[3, 1, 2]]).tolist() == [[3, 1, 2]]


def test_one_strength_a_row():
    torch = pytest.importorskip("torch")
    x, strength = torch.randn(3, 8, dtype=torch.float64), torch.tensor([[0.1], [1.0], [5.0]], dtype=torch.float64)
    for verb, kl in itertools.product((soft_rank, soft_sort), ("l2", "kl")):
        got = verb(x, kl, strength)
        for i in range(3):
            torch.testing.assert_close(got[i], verb(x[i], kl, float(strength[i])))
    temperatures = soft_permutation(x, am.Entmax(torch.tensor([[1.2], [1.5], [2.0]])), strength)
    for i, alpha in enumerate((1.2, 1.5, 2.0)):
        torch.testing.assert_close(
            temperatures[i], soft_permutation(x[i], am.Entmax(alpha), float(strength[i])), rtol=1e-5, atol=1e-6
        )


# -- derivatives ------------------------------------------------------------------------------------------------------------


DERIVED = {  # of scores and strengths
    "soft_rank": soft_rank,
    "soft_rank, down": lambda x, kl, s: soft_rank(x, kl, s, descending=True),
    "soft_sort": soft_sort,
    "soft_sort, down": lambda x, kl, s: soft_sort(x, kl, s, descending=True),
    "soft_permutation": lambda x, kl, s: soft_permutation(x, "softmax", s),
}
ROWS = [
    row for row in itertools.product(DERIVED, ("l2", "kl"), (0.2, 1.0, 5.0)) if row[:2] != ("soft_permutation", "kl")
]
SHORT = {("soft_rank", "l2", 1.0), ("soft_sort, down", "kl", 1.0), ("soft_permutation", "l2", 1.0)}


@pytest.mark.whole
@pytest.mark.parametrize(("verb", "regularization", "strength"), ROWS)
def test_first_and_second_derivatives(verb, regularization, strength):
    torch = pytest.importorskip("torch")
    x = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    s = torch.tensor(strength, dtype=torch.float64, requires_grad=True)
    f = lambda x, s: DERIVED[verb](x, regularization, s)  # noqa: E731
    assert torch.autograd.gradcheck(f, (x, s), check_forward_ad="permutation" not in verb)
    assert torch.autograd.gradgradcheck(f, (x, s))
    if verb == "soft_permutation":
        return
    g = lambda x: f(x, strength)  # noqa: E731
    assert torch.autograd.gradcheck(g, x)
    assert torch.autograd.gradgradcheck(g, x)
    want = torch.autograd.functional.jacobian(g, x)
    torch.testing.assert_close(torch.func.jacrev(g)(x), want)
    torch.testing.assert_close(torch.func.jacfwd(g)(x), want)
    torch.testing.assert_close(torch.func.vmap(g)(x), g(x))


@pytest.mark.whole
@either
def test_compiled(regularization):
    torch = pytest.importorskip("torch")
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    for verb in (soft_rank, soft_sort):
        f = lambda x, verb=verb: verb(x, regularization, 0.5)  # noqa: E731
        g = torch.compile(f, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(g(x), f(x))
        (got, want) = (
            torch.autograd.grad(h(t).square().sum(), t)[0] for h in (g, f) for t in [x.clone().requires_grad_()]
        )
        torch.testing.assert_close(got, want)
    p = torch.compile(soft_permutation, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(p, soft_permutation(x))


@pytest.mark.whole
@either
def test_jax(regularization):
    jax = pytest.importorskip("jax")
    x = laws.scores(3, 7, seed=6).astype(np.float32)
    for verb, down in ((soft_rank, False), (soft_sort, True)):
        f = lambda x, verb=verb, down=down: verb(x, regularization, 0.5, descending=down)  # noqa: E731
        laws.close(jax.jit(f)(x), f(x), 1e-5)
        laws.close(jax.vmap(f)(x), f(x), 1e-5)
        want = np.stack([oracles.differences(lambda a, f=f: f(a), row.astype(float)) for row in x])
        laws.close(jax.vmap(jax.jacrev(f))(x), want, 2e-4)
        laws.close(jax.vmap(jax.jacfwd(f))(x), want, 2e-4)
        again = jax.grad(lambda x, f=f: (jax.grad(lambda x: (f(x) ** 3).sum())(x) ** 2).sum())(x[0])
        assert np.isfinite(again).all()
    assert soft_permutation(jax.numpy.asarray(x)).shape == (3, 7, 7)


# -- the loss, and other verbs ----------------------------------------------------------------------------------------------


@either
def test_the_ranking_loss(regularization):
    """0 for scores in the order of the target with gaps, its gradient is p - y, and class indices are refused."""
    mapping, y = Ranks(0.5, regularization), np.array([[3.0, 1.0, 2.0, 4.0]])
    right = np.array([[30.0, 10.0, 20.0, 40.0]])
    laws.close(am.fenchel_young(mapping, right, y), 0.0, 1e-12)
    wrong = -right
    assert am.fenchel_young(mapping, wrong, y) > 10
    x = laws.scores(1, 4, seed=8)
    slope = oracles.differences(lambda v: np.asarray(am.fenchel_young(mapping, v, y)), x)
    laws.close(np.reshape(slope, (1, 4)), am.apply(mapping, x) - y, 1e-8)
    tied = np.array([[2.5, 1.0, 2.5, 4.0]])
    assert am.fenchel_young(mapping, x, tied) > 0
    with pytest.raises(ValueError, match="sums to 3 or more, a class index to 1; give the target as a row of numbers"):
        am.fenchel_young(mapping, x, np.array([1]))
    with pytest.raises(ValueError, match="that sum to what the probabilities of their row sum to"):
        am.fenchel_young(mapping, x, np.array([[1.0, 0.0, 0.0, 0.0]]))
    keep = np.array([[True, False, True, True]])
    masked = am.fenchel_young(mapping, np.where(keep, x, -INF), np.array([[2.0, 0.0, 1.0, 3.0]]))
    laws.close(masked, am.fenchel_young(mapping, x[keep][None], np.array([[2.0, 1.0, 3.0]])), 1e-14)


@every_kind
def test_a_hard_sample_of_ranks_is_an_ordering(kind):
    x = KINDS[kind](laws.scores(5, 6, seed=9).astype(np.float32))
    generator = 0
    if kind == "jax":
        generator = pytest.importorskip("jax").random.key(0)
    hard = back(am.gumbel_softmax(x, hard=True, mapping=Ranks(0.3), generator=generator))
    soft = back(am.gumbel_softmax(x, mapping=Ranks(0.3), generator=generator))
    assert np.array_equal(np.sort(hard, axis=-1), np.broadcast_to(np.arange(1.0, 7.0), (5, 6)))
    assert all(np.corrcoef(a, b)[0, 1] > 0.9 for a, b in zip(hard, soft))


def test_ranks_of_segments():
    x, lengths = laws.scores(9, seed=10), [4, 0, 5]
    p = am.segment_apply(Ranks(0.5), x, lengths=lengths)
    laws.close(p[:4], am.apply(Ranks(0.5), x[:4]), 1e-13)
    laws.close(p[4:], am.apply(Ranks(0.5), x[4:]), 1e-13)


def test_a_cold_soft_permutation_is_the_permutation():
    x = laws.scores(3, 6, seed=11)
    for mapping, down in itertools.product(("softmax", "sparsemax", am.Entmax(1.5)), (False, True)):
        p = soft_permutation(x, mapping, 1e-6, descending=down)
        want = np.sort(x, axis=-1)[:, ::-1] if down else np.sort(x, axis=-1)
        laws.close(np.einsum("bij,bj->bi", p, x), want, 1e-12)
        laws.close(p.sum(-1), np.ones((3, 6)), 1e-12)
    want = np.exp(-np.abs(np.sort(x)[:, :, None] - x[:, None, :]) / 0.3)
    laws.close(soft_permutation(x, temperature=0.3), want / want.sum(-1, keepdims=True), 1e-14)


@pytest.mark.parametrize("verb", [soft_rank, soft_sort, soft_permutation])
def test_a_boolean_of_numpy_is_one(verb):
    x = [3.0, 1.0, 2.0]
    laws.close(verb(x, descending=np.True_), verb(x, descending=True), 0.0)


# -- other packages, where they are installed: `pip install torchsort`, or a folder of peers on the path ---------------------------


@either
@pytest.mark.parametrize("strength", [0.1, 1.0, 10.0])
def test_torchsort_itself(regularization, strength):
    torch, peer = pytest.importorskip("torch"), pytest.importorskip("torchsort")
    x = torch.randn(8, 10, dtype=torch.float64, requires_grad=True)
    for ours, theirs in ((soft_rank, peer.soft_rank), (soft_sort, peer.soft_sort)):
        got, want = (
            ours(x, regularization, strength),
            theirs(x, regularization=regularization, regularization_strength=strength),
        )
        torch.testing.assert_close(got, want)
        g = torch.randn(8, 10, dtype=torch.float64)
        torch.testing.assert_close(*(torch.autograd.grad(out, x, g, retain_graph=True)[0] for out in (got, want)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("descending", [False, True])
def test_infinity_makes_its_row_nan(kind, descending):
    x = KINDS[kind](np.array([[1.0, math.inf, 2.0], [1.0, -math.inf, 2.0]]))
    for verb in (soft_rank, soft_sort):
        out = back(verb(x, descending=descending))
        assert np.isnan(out).all(1).tolist() == [True, False], verb
        assert not np.isnan(out[1]).any(), verb
