"""log p of classes, entropies and divergences, and `nn.Categorical`: against SciPy, torch's distributions, and finite differences."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
import scipy.special
import scipy.stats
from kinds import KINDS, back, every_kind, generator, jax_in_the_whole_battery

import anymax as A
from anymax import Budget, Entmax, NormMax, PerturbMax, Ratio, Sigsoftmax, Softmax, Sparsemax, SparseSoftmax, Taylor
from anymax.likelihood.softmax_plain import blocks

INF = math.inf
MAPS = {
    "softmax": Softmax(), "sparsemax": Sparsemax(), "entmax15": Entmax(1.5), "entmax3": Entmax(3.0), "topk": SparseSoftmax(k=4),
    "topp": SparseSoftmax(p=0.8), "budget": Budget(2), "normmax": NormMax(2.0), "taylor": Taylor(2), "sigsoftmax": Sigsoftmax(),
    "relu": Ratio.relu(), "normal": PerturbMax("normal"),
}  # fmt: skip
every_map = pytest.mark.parametrize("name", MAPS)
briefly = pytest.mark.whole(lambda name, kind: kind in ("jax", "strict") and name not in ("softmax", "sparsemax"))


def scores(rows=6, n=7, seed=0, sigma=0.7):
    return np.random.default_rng(seed).normal(0.3, sigma, (rows, n))


def probabilities(mapping, x):
    p = A.apply(mapping, np.asarray(x, np.float64))
    sums = p.sum(-1, keepdims=True)
    return p / np.where(sums > 0, sums, 1)


def tolerance(kind):
    return 3e-6 if kind == "jax" else 1e-12


# -- values -----------------------------------------------------------------------------------------------------------


@briefly
@every_kind
@every_map
def test_log_prob_and_entropy_are_those_of_p(name, kind):
    x, y = scores(), np.array([0, 1, 2, 3, 6, -1])
    p = probabilities(MAPS[name], x)
    with np.errstate(divide="ignore"):
        want = np.log(np.take_along_axis(p, y[:, None], -1))[:, 0]
    want[-1] = 0.0
    c = KINDS[kind]
    log_p, h = A.log_prob_entropy(MAPS[name], c(x), c(y))
    np.testing.assert_allclose(back(log_p), want, atol=tolerance(kind), rtol=tolerance(kind))
    np.testing.assert_allclose(back(h), scipy.stats.entropy(p, axis=-1), atol=tolerance(kind))
    np.testing.assert_allclose(
        back(A.log_prob(MAPS[name], c(x), c(y))), want, atol=tolerance(kind), rtol=tolerance(kind)
    )


@jax_in_the_whole_battery
@every_kind
def test_axes_samples_and_masks(kind):
    c, rng = KINDS[kind], np.random.default_rng(0)
    x, keep = rng.normal(size=(2, 7, 3)), rng.uniform(size=(1, 7, 3)) < 0.7
    keep[0, 0] = True
    y = rng.integers(0, 7, (5, 2, 3))
    log_p = scipy.special.log_softmax(np.where(keep, x, -INF), axis=1)
    want = np.stack([np.take_along_axis(log_p, s[:, None], 1)[:, 0] for s in y])
    for verb in (A.log_prob, lambda *a, **k: A.log_prob_entropy(*a, **k)[0]):
        got = back(verb(Softmax(), c(x), c(y), axis=1, mask=c(keep)))
        np.testing.assert_allclose(got, want, atol=tolerance(kind), rtol=1e-5)
        got = back(verb(Softmax(), c(x), c(y[0]), dim=-2, mask=c(keep)))
        np.testing.assert_allclose(got, want[0], atol=tolerance(kind), rtol=1e-5)
    flat = rng.integers(0, 14, 3)
    got = back(A.log_prob(Sparsemax(), c(x), c(flat), axis=(0, 1)))
    np.testing.assert_allclose(
        got, back(A.log_prob(Sparsemax(), c(x.reshape(14, 3)), c(flat), axis=0)), atol=tolerance(kind)
    )
    assert A.log_prob(Softmax(), c(x[0, :, 0]), c(np.array(3))).shape == ()
    assert A.log_prob(Softmax(), c(x[0, :, 0]), c(np.array([[3, 1], [0, 2]]))).shape == (2, 2)
    assert A.log_prob(Softmax(), c(x[:0]), c(y[0, :0]), axis=1).shape == (0, 3)


@briefly
@every_kind
@pytest.mark.parametrize("name", ["softmax", "sparsemax", "taylor"])
def test_transforms_and_temperatures(name, kind):
    c, x, y = KINDS[kind], scores(), np.array([0, 1, 2, 3, 4, 5])
    mapping = MAPS[name]
    t = np.array([0.5, 1.0, 2.0, 0.7, 3.0, 1.0])[:, None]
    cases = {
        "number": ({"temperature": 0.5}, x / 0.5),
        "one a row": ({"temperature": c(t)}, x / t),
        "top k": ({"transform": A.topk(3)}, np.where(x >= np.sort(x)[:, -3:-2], x, -INF)),
        "both": (
            {"temperature": 2, "transform": A.compose(A.topk(3), A.temperature(0.5))},
            np.where(x >= np.sort(x)[:, -3:-2], x, -INF),
        ),
        "own": ({"transform": lambda s: s * 2.0}, x * 2.0),
    }
    for options, z in cases.values():
        p = probabilities(mapping, z)
        with np.errstate(divide="ignore"):
            want = np.log(np.take_along_axis(p, y[:, None], -1))[:, 0]
        log_p, h = A.log_prob_entropy(mapping, c(x), c(y), **options)
        np.testing.assert_allclose(back(log_p), want, atol=2 * tolerance(kind), rtol=2 * tolerance(kind))
        np.testing.assert_allclose(back(h), scipy.stats.entropy(p, axis=-1), atol=2 * tolerance(kind))
    first = {
        k: v.T if k == "temperature" and not isinstance(v, (int, float)) else v
        for k, v in cases["one a row"][0].items()
    }
    np.testing.assert_allclose(
        back(A.log_prob(mapping, c(x.T), c(y), axis=0, transform=A.topk(3), **first)),
        back(A.log_prob(mapping, c(x), c(y), transform=A.topk(3), **cases["one a row"][0])),
        atol=tolerance(kind),
    )
    cold = back(A.log_prob(mapping, c(x), c(x.argmax(-1)), temperature=0))
    np.testing.assert_allclose(cold, 0.0)


@briefly
@every_kind
@pytest.mark.parametrize("name", ["softmax", "sparsemax", "entmax15", "relu"])
def test_a_support_masks_all_others(name, kind):
    """As CSR, which has no order; the last row is empty, and one asks for a class that is not in it."""
    c, x, y = KINDS[kind], scores(), np.array([0, 5, 2, 3, 6, 1])
    lists = [[3, 0, 6], [5], [1, 2, 4, 0], [0, 1], [6, 5, 4, 3, 2, 1, 0], []]
    ids, offsets = np.concatenate([np.array(a, int) for a in lists]), np.cumsum([0, *map(len, lists)])
    keep = np.zeros(x.shape, bool)
    for row, kept in zip(keep, lists):
        row[kept] = True
    p = probabilities(MAPS[name], np.where(keep, x, -INF))
    with np.errstate(divide="ignore"):
        want = np.log(np.take_along_axis(p, y[:, None], -1))[:, 0]
    assert want[3] == want[5] == -INF
    log_p, h = A.log_prob_entropy(MAPS[name], c(x), c(y), support=(c(ids), c(offsets)))
    np.testing.assert_allclose(back(log_p), want, atol=tolerance(kind), rtol=tolerance(kind))
    np.testing.assert_allclose(back(h), [scipy.stats.entropy(q) if q.any() else 0.0 for q in p], atol=tolerance(kind))
    three = back(A.log_prob(MAPS[name], c(x), c(np.stack([y] * 3)), support=(ids, offsets)))
    np.testing.assert_allclose(three, np.stack([want] * 3), atol=tolerance(kind), rtol=tolerance(kind))
    if kind == "jax":
        import jax

        traced = jax.jit(lambda *a: A.log_prob(MAPS[name], *a[:2], support=a[2:]))(c(x), c(y), c(ids), c(offsets))
        np.testing.assert_allclose(back(traced), want, atol=tolerance(kind), rtol=tolerance(kind))


@briefly
@every_kind
@every_map
def test_strange_rows(name, kind):
    """Masked classes, a row without any, NaN and +inf in rows of their own."""
    x = np.array([[0.1, -INF, 0.5], [-INF, -INF, -INF], [0.3, math.nan, 0.2], [0.3, INF, 0.2], [0.4, 0.3, 0.2]])
    y = np.array([1, 0, 0, 0, 2])
    p = probabilities(MAPS[name], x)
    c = KINDS[kind]
    log_p, h = (back(v) for v in A.log_prob_entropy(MAPS[name], c(x), c(y)))
    assert log_p[0] == log_p[1] == -INF
    assert np.isnan(log_p[2:4]).all()
    assert np.isnan(h[2:4]).all()
    assert h[1] == 0.0
    np.testing.assert_allclose(h[[0, 4]], scipy.stats.entropy(p[[0, 4]], axis=-1), atol=tolerance(kind))
    assert back(A.log_prob(MAPS[name], c(x[1]), c(np.array(-1)))) == 0.0


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "strict"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["softmax", "sparsemax"])
def test_half_precision_gives_fp32(name, dtype, kind):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    exact = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
    x, y = scores(4, 50, sigma=3.0).astype(exact), np.array([0, 1, 2, 3])
    given = KINDS[kind](x.astype(np.float32))
    given = getattr(given, "to", getattr(given, "astype", None))(
        getattr(__import__("torch"), dtype) if kind == "torch" else exact
    )
    log_p, h = A.log_prob_entropy(MAPS[name], given, KINDS[kind](y))
    p = probabilities(MAPS[name], x.astype(np.float64))
    assert "float32" in str(log_p.dtype)
    assert "float32" in str(h.dtype)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(back(log_p), np.log(p[range(4), y]), rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(back(h), scipy.stats.entropy(p, axis=-1), rtol=2e-6, atol=2e-6)
    assert "float32" in str(A.log_prob(MAPS[name], given, KINDS[kind](y)).dtype)


@every_kind
def test_a_common_offset_changes_nothing(kind):
    """lse of scores near 1e4 has three digits behind the point in fp32; log p has all of them."""
    x = np.round(scores(4, 500) * 1024).astype(np.float32) / 1024
    y, c = np.arange(4), KINDS[kind]
    near, far = (A.log_prob_entropy(Softmax(), c(x + np.float32(shift)), c(y)) for shift in (0, 8192))
    for a, b in zip(near, far):
        np.testing.assert_allclose(back(b), back(a), rtol=1e-6)


@pytest.mark.parametrize("kind", [k for k in ("numpy", "torch") if k in KINDS])
def test_rows_in_pieces_are_the_same_rows(kind, monkeypatch):
    """Blocks of any size, over leading axes that no view makes one."""
    from anymax.likelihood import softmax_plain

    rng = np.random.default_rng(0)
    whole = KINDS[kind](rng.normal(size=(3, 5, 11)))
    x, y = whole[:, 1:], KINDS[kind](rng.integers(0, 11, (3, 4)))
    want = A.log_prob_entropy(Softmax(), x, y)
    for size in (1, 12, 40, 100):
        monkeypatch.setattr(softmax_plain, "_BLOCK", size)
        if kind == "torch":
            from anymax.likelihood import softmax_torch

            monkeypatch.setitem(softmax_torch._LIMITS, "cpu", size)
        for a, b in zip(A.log_prob_entropy(Softmax(), x, y), want):
            np.testing.assert_allclose(back(a), back(b), rtol=1e-14)
        if kind == "torch":
            leaf = whole.clone().requires_grad_()
            log_p, h = A.log_prob_entropy(Softmax(), leaf[:, 1:], y)
            (log_p + 2 * h).sum().backward()
            p = whole[:, 1:].softmax(-1)
            one = p.new_zeros(p.shape).scatter_(-1, y[..., None], 1.0)
            np.testing.assert_allclose(leaf.grad[:, 1:], one - p - 2 * p * (p.log() + want[1][..., None]), atol=1e-14)


@pytest.mark.parametrize("temperature", [None, 0.5])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_engines_and_plain_operations_agree(dtype, temperature, engine):
    """Values and gradients of the pass of our own on torch, by the engine's kernels and without, and of plain operations."""
    torch = pytest.importorskip("torch")
    import array_api_compat.torch as xp

    from anymax.likelihood import softmax_plain, softmax_torch

    x = torch.tensor(scores(8, 33, sigma=3.0)).to(getattr(torch, dtype))
    x[1], x[2, :30], x[3, 5], x[4, 6] = -INF, -INF, math.nan, INF
    y, ids = torch.arange(8), torch.arange(8)[:, None] + torch.tensor([[0, 9, 20, 25]])
    scale = 1.0 if temperature is None else 1.0 / temperature
    tolerances = {"float64": (1e-13, 1e-13), "float32": (1e-5, 2e-6), "bfloat16": (1e-2, 1e-2)}[dtype]
    for index, entropy, rest in ((y[:, None], True, False), (ids, False, True), (ids, False, False), (ids, True, True)):
        leaves, found = [x.clone().requires_grad_() for _ in range(2)], []
        for leaf, terms in zip(leaves, (softmax_torch.terms, lambda *a: softmax_plain.plain(*a, xp))):
            found.append([part for part in terms(leaf, index, scale, entropy, rest) if part is not None])
            value = sum((i + 1) * torch.where(part > -INF, part, 0.0).sum() for i, part in enumerate(found[-1]))
            value.backward()
        for ours, plain in zip(*found):
            assert ours.dtype == plain.dtype
            torch.testing.assert_close(
                ours,
                plain,
                rtol=min(tolerances[0], 1e-5),
                atol=tolerances[1] if dtype != "bfloat16" else 2e-6,
                equal_nan=True,
            )
        ours, plain = (leaf.grad for leaf in leaves)
        assert ours.dtype == x.dtype
        assert ours[3:5].isnan().all()
        sound = [0, 1, 2, 5, 6, 7]
        torch.testing.assert_close(ours[sound], plain[sound], rtol=tolerances[0], atol=tolerances[1])


def test_blocks_cover_each_row_once():
    for lead in ((), (0,), (7,), (3, 5), (2, 0, 4), (2, 3, 4)):
        for limit in (1, 7, 10, 30, 10_000):
            seen = np.zeros(lead, int)
            for part in blocks(lead, 6, limit):
                seen[part] += 1
                assert seen[part].size * 6 <= max(limit, 6)
            assert (seen == 1).all()


def test_errors_say_what_is_wrong():
    x, y = scores(), np.arange(6)
    good = (np.array([0, 1, 2]), np.array([0, 1, 1, 1, 2, 2, 3]))
    cases = [
        (lambda: A.log_prob(Softmax(), x, y + 2), IndexError, "from 0 to 6, or -1 for none, got values from 2 to 7"),
        (lambda: A.log_prob(Softmax(), x, y - 2), IndexError, "from -2 to 3"),
        (lambda: A.log_prob(Softmax(), x, y.astype(float)), TypeError, r"integers\), got float64"),
        (
            lambda: A.log_prob(Softmax(), x, y[:5]),
            ValueError,
            r"y of shape \(5,\): expected one class for each row, of shape \(6,\)",
        ),
        (lambda: A.log_prob(3, x, y), TypeError, "such as 'sparsemax', got 3"),
        (lambda: A.log_prob("softmaxx", x, y), ValueError, "there is no map 'softmaxx'"),
        (lambda: A.log_prob(Softmax(), x, y, temperature=-1.0), ValueError, "at least 0"),
        (
            lambda: A.log_prob(Softmax(), x, y, temperature=x),
            ValueError,
            "temperature of shape .* one value for each row",
        ),
        (lambda: A.log_prob(Softmax(), x, y, transform=3), TypeError, "log_prob: transform must be a function"),
        (
            lambda: A.log_prob(Softmax(), x, y, transform=lambda s: s[:, :3]),
            ValueError,
            r"gave ndarray of float64 \(6, 3\)",
        ),
        (lambda: A.log_prob(Softmax(), x, y, support=good[0]), TypeError, r"support must be \(ids, offsets\)"),
        (lambda: A.log_prob(Softmax(), x, y, support=(good[0], good[1][:-1])), ValueError, "7 integers for 6 rows"),
        (lambda: A.log_prob(Softmax(), x, y, support=(good[0], good[1] + 1)), ValueError, "rise from 0 to 3"),
        (lambda: A.log_prob(Softmax(), x, y, support=(good[0] + 6, good[1])), IndexError, "from 0 to 6, got 6 to 8"),
        (lambda: A.log_prob(Softmax(), x, y, support=([1, 1, 2], [0, 2, 2, 2, 2, 2, 3])), ValueError, "a class twice"),
        (lambda: A.likelihood.kl(Softmax(), x, Softmax(), x[:5]), ValueError, "one shape"),
        (lambda: A.topk_kl(x, [[0]] * 6, [[-0.1]] * 6, tail="drop"), ValueError, "'ignore' or 'one class', got 'drop'"),
        (lambda: A.topk_kl(x, [[0, 1]] * 6, [[-0.1]] * 6), ValueError, "one shape"),
        (lambda: A.topk_kl(x, [[0.0]] * 6, [[-0.1]] * 6), TypeError, "ids must be integers"),
        (lambda: A.topk_kl(x, [[0, 0]] * 6, [[-1.0, -1.0]] * 6), ValueError, "a class twice"),
        (
            lambda: A.topk_kl(x, [[0, 1]] * 6, [[-0.1, -0.1]] * 6),
            ValueError,
            "sum to at most 1 in each row; the largest sum is 1.8",
        ),
        (lambda: A.topk_kl(x, [[7]] * 6, [[-0.1]] * 6), IndexError, "topk_kl: ids"),
        (lambda: A.topk_kl(x, [[0]] * 5, [[-0.1]] * 5), ValueError, "does not belong to scores"),
    ]
    for call, kind, words in cases:
        with pytest.raises(kind, match=words):
            call()


# -- divergences ----------------------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize(
    "names", [("softmax", "softmax"), ("sparsemax", "entmax15"), ("topk", "softmax"), ("budget", "taylor")]
)
def test_kl_is_scipys(names, kind):
    """Also where it is +inf: SciPy's is, where q lacks a class of p."""
    first, second = (MAPS[n] for n in names)
    x, y = scores(), scores(seed=1)
    x[2], y[2, 3:] = -INF, -INF
    p, q = probabilities(first, x), probabilities(second, y)
    want = scipy.special.rel_entr(p, q).sum(-1)
    got = back(A.likelihood.kl(first, KINDS[kind](x), second, KINDS[kind](y)))
    np.testing.assert_allclose(got, want, atol=tolerance(kind), rtol=2 * tolerance(kind))
    assert got[2] == 0.0
    turned = back(A.likelihood.kl(first, KINDS[kind](x.T), second, KINDS[kind](y.T), axis=0))
    np.testing.assert_allclose(turned, got, atol=tolerance(kind), rtol=tolerance(kind))
    np.testing.assert_allclose(
        back(A.likelihood.kl(first, KINDS[kind](x[:2]), first, KINDS[kind](x[:2]))), 0.0, atol=tolerance(kind)
    )


@every_kind
@pytest.mark.parametrize("tail", ["ignore", "one class"])
def test_topk_kl_by_its_formula(tail, kind):
    c, n, k, t = KINDS[kind], 40, 5, 1.7
    x, teacher = scores(6, n, sigma=2.0), scipy.special.log_softmax(scores(6, n, 1, 2.0), axis=-1)
    ids = np.argsort(-teacher, -1)[:, :k]
    ids[2, 3:] = -1
    given = np.where(ids < 0, -1.0, np.take_along_axis(teacher, ids, -1))
    log_p = scipy.special.log_softmax(x / t, axis=-1)
    want = []
    for row in range(6):
        kept = ids[row][ids[row] >= 0]
        a, b = np.exp(teacher[row, kept]), np.exp(log_p[row, kept])
        value = scipy.special.rel_entr(a, b).sum()
        want.append(value + (scipy.special.rel_entr(1 - a.sum(), 1 - b.sum()) if tail == "one class" else 0.0))
    got = back(A.topk_kl(c(x), c(ids), c(given), tail=tail, temperature=t))
    np.testing.assert_allclose(got, want, rtol=30 * tolerance(kind), atol=tolerance(kind))
    turned = back(A.topk_kl(c(x.T), c(ids.T), c(given.T), tail=tail, temperature=t, axis=0))
    np.testing.assert_allclose(turned, got, rtol=3e-6)
    everything = np.tile(np.arange(n), (6, 1))
    whole = scipy.special.rel_entr(np.exp(teacher), scipy.special.softmax(x, -1)).sum(-1)
    np.testing.assert_allclose(back(A.topk_kl(c(x), c(everything), c(teacher), tail=tail)), whole, rtol=1e-4)


@every_kind
def test_the_rest_has_all_its_digits(kind):
    """p of all the others is 3e-9, which 1 - p of the named can't say in fp32."""
    x = np.array([[20.0, 0.0, 0.1, 0.2]], np.float32)
    teacher = np.log(np.array([[1 - 1e-3]], np.float32))
    rest = 1e-3 * (
        math.log(1e-3) - (scipy.special.logsumexp([0.0, 0.1, 0.2]) - scipy.special.logsumexp([20.0, 0.0, 0.1, 0.2]))
    )
    got = back(A.topk_kl(KINDS[kind](x), KINDS[kind](np.array([[0]])), KINDS[kind](teacher), tail="one class"))
    np.testing.assert_allclose(got, (1 - 1e-3) * math.log(1 - 1e-3) + rest, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_tail_of_a_rounded_teacher_is_kept(dtype):
    """Off by no more than the rounding of its numbers can explain, in value and slope, where 1 - sum p is large and where it is not."""
    torch = pytest.importorskip("torch")
    tails = torch.logspace(-4, math.log10(0.5), 12, dtype=torch.double)[:, None]
    p = (1 - tails) * torch.tensor([0.9, 0.06, 0.03, 0.009, 0.001], dtype=torch.double)
    x = torch.tensor(scores(1, 9, sigma=2.0)).repeat(12, 1).requires_grad_()
    ids = torch.arange(5).repeat(12, 1)
    q = torch.softmax(x, -1)
    rest = q[:, 5:].sum(-1, keepdim=True)
    want = torch.xlogy(p, p / q[:, :5]).sum(-1) + torch.xlogy(tails, tails / rest)[:, 0]
    (slope,) = torch.autograd.grad(want.sum(), x)
    kind = getattr(torch, dtype)
    got = A.topk_kl(x, ids, p.log().to(kind), tail="one class")
    (pulled,) = torch.autograd.grad(got.sum(), x)
    lost = -torch.xlogy(p, p).sum(-1) * torch.finfo(kind).eps / 2 + 1e-6
    assert ((got - want).abs() <= 2 * lost * (2 + (tails / rest).log().abs()[:, 0])).all()
    assert ((pulled - slope).abs() <= 2 * lost[:, None]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_rounded_teacher_that_names_all_has_no_tail(dtype):
    """The logarithms of 1/3 and 1/150 are rounded to one side all, which the sum shows."""
    torch = pytest.importorskip("torch")
    for n in (2, 3, 7, 150):
        teacher = torch.full((1, n), -math.log(n)).to(getattr(torch, dtype))
        got = A.topk_kl(torch.zeros(1, n), torch.arange(n)[None], teacher, tail="one class")
        assert abs(float(got)) < 5 * float(torch.finfo(teacher.dtype).eps) * math.log(n)


@every_kind
def test_a_teacher_with_a_class_that_the_student_has_not(kind):
    c = KINDS[kind]
    x = c(np.array([[0.0, -INF, 1.0], [0.0, 1.0, -INF], [0.0, -INF, -INF]]))
    ids, t = c(np.array([[0, 1], [0, 1], [0, -1]])), c(np.log(np.array([[0.5, 0.4], [0.5, 0.5], [0.5, 0.4]])))
    assert list(back(A.topk_kl(x, ids, t)) == INF) == [True, False, False]
    assert list(back(A.topk_kl(x, ids, t, tail="one class")) == INF) == [True, False, True]


# -- gradients ----------------------------------------------------------------------------------------------------------------


def torch_scores(name, seed=0):
    torch = pytest.importorskip("torch")
    x = torch.tensor(scores(4, 6, seed, 0.3) + (0.5 if name == "relu" else 0.0))
    return torch, x, A.apply(MAPS[name], x).argmax(-1)


@every_map
def test_gradients_of_both(name):
    torch, x, y = torch_scores(name)
    x.requires_grad_()
    both = lambda x: A.log_prob_entropy(MAPS[name], x, y)  # noqa: E731
    assert torch.autograd.gradcheck(both, x)
    assert torch.autograd.gradcheck(lambda x: A.log_prob(MAPS[name], x, y), x)
    if name not in ("normal", "normmax"):  # whose second derivatives finite differences of 1e-6 do not see
        assert torch.autograd.gradgradcheck(both, x)


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.5}, {"transform": "topk"}, {"support": True}, {"temperature": 2.0, "transform": "topk"}],
)
@pytest.mark.parametrize("name", ["softmax", "entmax15"])
def test_gradients_through_the_options(name, options):
    torch, x, y = torch_scores(name)
    options = dict(options)
    if "transform" in options:
        options["transform"] = A.topk(4)
    if "support" in options:
        ids = torch.stack([y, (y + 1) % 6, (y + 3) % 6], -1)
        options["support"] = (ids.flatten(), torch.arange(5) * 3)
    x.requires_grad_()
    both = lambda x: A.log_prob_entropy(MAPS[name], x, y, **options)  # noqa: E731
    assert torch.autograd.gradcheck(both, x)
    assert torch.autograd.gradgradcheck(both, x)


@pytest.mark.parametrize("tail", ["ignore", "one class"])
def test_gradients_of_topk_kl(tail):
    torch = pytest.importorskip("torch")
    x = torch.tensor(scores(4, 9)).requires_grad_()
    ids = torch.tensor([[0, 1], [8, 2], [3, -1], [4, 7]])
    t = torch.log(torch.tensor([[0.5, 0.2], [0.1, 0.1], [0.9, 0.3], [0.3, 0.4]], dtype=torch.double)).requires_grad_()
    value = lambda x, t: A.topk_kl(x, ids, t, tail=tail, temperature=1.5)  # noqa: E731
    assert torch.autograd.gradcheck(value, (x, t))
    assert torch.autograd.gradgradcheck(value, (x, t))


@pytest.mark.parametrize("names", [("softmax", "softmax"), ("sparsemax", "softmax"), ("topk", "sigsoftmax")])
def test_gradients_of_kl(names):
    torch, x, _ = torch_scores(names[0])
    y = torch_scores(names[1], 1)[1]
    value = lambda x, y: A.likelihood.kl(MAPS[names[0]], x, MAPS[names[1]], y)  # noqa: E731
    assert torch.autograd.gradcheck(value, (x.requires_grad_(), y.requires_grad_()))


@pytest.mark.parametrize("kind", [k for k in ("torch", "jax") if k in KINDS])
def test_the_entropys_gradient_where_p_is_0(kind):
    """-p (log p + H) exactly, masked and underflowed classes included."""
    x = np.array([[0.0, 1.0, -INF, -2000.0, 0.5], [0.0, -INF, -INF, -INF, -INF], [-INF] * 5, [3.0] * 5])
    p = probabilities(Softmax(), x)
    with np.errstate(divide="ignore"):
        log_p = np.where(p > 0, np.log(np.where(p > 0, p, 1)), 0)
    h = -(p * log_p).sum(-1, keepdims=True)
    want, y = -p * (log_p + h), np.zeros(4, int)
    if kind == "torch":
        import torch

        leaf = torch.tensor(x, requires_grad=True)
        A.log_prob_entropy(Softmax(), leaf, torch.tensor(y))[1].sum().backward()
        got = leaf.grad
    else:
        import jax

        got = jax.grad(lambda x: A.log_prob_entropy(Softmax(), x, y)[1].sum())(KINDS[kind](x))
    np.testing.assert_allclose(back(got), want, atol=1e-6 if kind == "jax" else 1e-14)


@briefly
@pytest.mark.parametrize("kind", [k for k in ("torch", "jax") if k in KINDS])
@pytest.mark.parametrize("name", ["softmax", "sparsemax", "entmax15", "topk", "relu", "taylor", "normal"])
def test_off_the_support_the_gradient_is_that_of_the_loss(name, kind):
    """-inf, and e_y - p: of a class that the map leaves out, and of one that is masked, which itself has none."""
    x = np.array([[2.0, 1.9, -3.0, 1.8, 1.7], [2.0, 1.9, -INF, 1.8, 1.7]])
    y = np.array([2, 2])
    if name in ("softmax", "taylor", "normal"):
        x, y = x[1:], y[1:]
    p = probabilities(MAPS[name], x)
    want = (np.arange(5) == 2) * (x > -INF) - p
    if kind == "torch":
        import torch

        leaf = torch.tensor(x, requires_grad=True)
        value = A.log_prob(MAPS[name], leaf, torch.tensor(y))
        value.sum().backward()
        got = leaf.grad
        both = A.log_prob_entropy(MAPS[name], leaf, torch.tensor(y))[0]
        np.testing.assert_allclose(torch.autograd.grad(both.sum(), leaf)[0], want, atol=2e-6)
    else:
        import jax

        value = A.log_prob(MAPS[name], KINDS[kind](x), y)
        got = jax.grad(lambda x: A.log_prob(MAPS[name], x, y).sum())(KINDS[kind](x))
    assert (back(value) == -INF).all()
    np.testing.assert_allclose(back(got), want, atol=2e-6)


@pytest.mark.parametrize("kind", [k for k in ("torch", "jax") if k in KINDS])
def test_where_nothing_was_drawn_there_is_no_gradient(kind):
    x, y = np.array([[0.3, 0.2], [-INF, -INF], [math.nan, 1.0], [0.1, 0.2]], np.float32), np.array([-1, -1, -1, 1])
    if kind == "torch":
        import torch

        leaf = torch.tensor(x, requires_grad=True)
        A.log_prob(Softmax(), leaf, torch.tensor(y)).sum().backward()
        got = back(leaf.grad)
    else:
        import jax

        got = back(jax.grad(lambda x: A.log_prob(Softmax(), x, y).sum())(KINDS[kind](x)))
    assert (got[:2] == 0).all()
    np.testing.assert_allclose(got[3], [-0.4750208, 0.4750208], rtol=1e-5)


@jax_in_the_whole_battery
@pytest.mark.parametrize("kind", [k for k in ("torch", "jax") if k in KINDS])
def test_an_infinite_divergence_has_a_gradient(kind):
    """Of the second side that of the log p that are lost: `sum p (q - e)` over the lost classes."""
    x, y = np.array([[1.0, 0.5, 0.0]]), np.array([[3.0, 0.0, -INF]])
    p, q = probabilities(Softmax(), x), probabilities(Sparsemax(), y)
    want = p[:, 1:].sum() * q - p * np.array([[0.0, 1.0, 0.0]])
    if kind == "torch":
        import torch

        a, b = torch.tensor(x, requires_grad=True), torch.tensor(y, requires_grad=True)
        value = A.likelihood.kl(Softmax(), a, Sparsemax(), b)
        value.sum().backward()
        ga, gb = a.grad, b.grad
    else:
        import jax

        value = A.likelihood.kl(Softmax(), KINDS[kind](x), Sparsemax(), KINDS[kind](y))
        ga, gb = jax.grad(lambda a, b: A.likelihood.kl(Softmax(), a, Sparsemax(), b).sum(), (0, 1))(
            KINDS[kind](x), KINDS[kind](y)
        )
    assert (back(value) == INF).all()
    assert np.isfinite(back(ga)).all()
    np.testing.assert_allclose(back(gb), want, atol=1e-6)


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", ["softmax", "entmax15", "taylor"])
def test_jax_agrees_with_torch(name):
    jax = pytest.importorskip("jax")
    torch, x, y = torch_scores(name)
    leaf = x.clone().requires_grad_()
    log_p, h = A.log_prob_entropy(MAPS[name], leaf, y)
    want = torch.autograd.grad((log_p + 0.5 * h).sum(), leaf)[0]

    def value(x):
        log_p, h = A.log_prob_entropy(MAPS[name], x, np.asarray(y))
        return (log_p + 0.5 * h).sum()

    given = jax.numpy.asarray(x.numpy(), dtype="float32")
    for grad in (jax.grad(value), jax.jit(jax.grad(value))):
        np.testing.assert_allclose(back(grad(given)), want, atol=2e-5)
    each = jax.vmap(lambda x, y: A.log_prob_entropy(MAPS[name], x, y)[1])(given, jax.numpy.asarray(y.numpy()))
    np.testing.assert_allclose(back(each), back(h), atol=2e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile's own making
@pytest.mark.parametrize("name", ["softmax", "entmax15"])
def test_transforms_of_torch(name):
    torch, x, y = torch_scores(name)
    mapping = MAPS[name]
    both = lambda x, y: A.log_prob_entropy(mapping, x, y)  # noqa: E731
    want = both(x, y)
    for got in (torch.func.vmap(both)(x, y), torch.compile(both, backend="aot_eager", fullgraph=True)(x, y)):
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b)
    one = lambda x, y: sum(both(x, y))  # noqa: E731
    leaf = x.clone().requires_grad_()
    gradient = torch.autograd.grad(one(leaf, y).sum(), leaf)[0]
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(one))(x, y), gradient)
    direction = torch.tensor(scores(4, 6, 5))
    change = torch.func.jvp(lambda x: one(x, y), (x,), (direction,))[1]
    torch.testing.assert_close(change, (gradient * direction).sum(-1))


def test_memory_of_softmax():
    """Forward no array like the scores, backward one, whatever the allocator does: sizes of the storages that live at once."""
    torch = pytest.importorskip("torch")
    x = torch.randn(64, 20_000, requires_grad=True)
    y = torch.zeros(64, dtype=torch.long)
    size = x.numel() * 4

    def peak(f):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
            out = f()
        held = most = 0
        for event in seen.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                most = max(most, held)
        return out, most

    A.log_prob_entropy(Softmax(), x, y)
    (log_p, h), forward = peak(lambda: A.log_prob_entropy(Softmax(), x, y))
    assert forward < 0.7 * size
    _, backward = peak(lambda: torch.autograd.grad((log_p + h).sum(), x))
    assert backward < 1.7 * size
    _, whole = peak(lambda: torch.autograd.grad(torch.distributions.Categorical(logits=x).entropy().sum(), x))
    assert whole > 3 * size, "the measure sees what it should"


def test_memory_of_numpy():
    x, y = np.random.default_rng(0).normal(size=(64, 20_000)).astype(np.float32), np.zeros(64, int)
    A.log_prob_entropy(Softmax(), x[:2], y[:2])
    tracemalloc.start()
    A.log_prob_entropy(Softmax(), x, y)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2 * x.nbytes


# -- nn.Categorical -------------------------------------------------------------------------------------------------------------


def categorical(name="softmax", shape=(3, 2, 5), seed=0, **options):
    torch = pytest.importorskip("torch")
    x = torch.tensor(np.random.default_rng(seed).normal(0.3, 0.7, shape))
    return torch, x, A.nn.Categorical(MAPS[name], x, **options)


@every_map
def test_categorical_is_consistent(name):
    """What torch's own tests ask of a distribution: shapes, logits, probs, log_prob of the support, entropy, perplexity, mode."""
    torch, _, d = categorical(name)
    assert isinstance(d, torch.distributions.Categorical)
    assert d.batch_shape == (3, 2)
    assert d.event_shape == ()
    assert d.param_shape == (3, 2, 5)
    torch.testing.assert_close(d.probs.sum(-1), torch.ones(3, 2, dtype=torch.double))
    torch.testing.assert_close(d.logits.exp(), d.probs)
    values = d.enumerate_support()
    assert values.shape == (5, 3, 2)
    assert d.enumerate_support(expand=False).shape == (5, 1, 1)
    torch.testing.assert_close(d.log_prob(values).movedim(0, -1), d.logits)
    torch.testing.assert_close(d.log_prob(d.enumerate_support(expand=False)).movedim(0, -1), d.logits)
    torch.testing.assert_close(d.entropy(), torch.special.entr(d.probs).sum(-1))
    torch.testing.assert_close(d.perplexity(), d.entropy().exp())
    assert torch.equal(d.mode, d.probs.argmax(-1))
    assert d.mean.isnan().all()
    assert d.variance.shape == (3, 2)
    assert d.support.check(values).all()
    for shape in ((), (4,), (2, 3)):
        drawn = d.sample(shape)
        assert drawn.shape == (*shape, 3, 2)
        assert drawn.dtype == torch.int64
        assert d.log_prob(drawn).shape == (*shape, 3, 2)
        assert (d.log_prob(drawn) > -INF).all()
    assert "Categorical(scores: torch.Size([3, 2, 5]))" in repr(d)


@pytest.mark.parametrize("name", ["softmax", "sparsemax", "taylor"])
def test_categorical_draws_with_its_probabilities(name):
    torch, _, d = categorical(name, (2, 5))
    torch.manual_seed(0)
    drawn = d.sample((20_000,))
    for row in range(2):
        counts, p = np.bincount(drawn[:, row], minlength=5), back(d.probs[row])
        assert counts[p == 0].sum() == 0
        assert scipy.stats.chisquare(counts[p > 0], 20_000 * p[p > 0]).pvalue > 1e-4
    torch.manual_seed(0)
    assert torch.equal(d.sample((20_000,)), drawn)
    a, b = (d.sample((50,), generator=generator("torch", 3)) for _ in range(2))
    assert torch.equal(a, b)


def test_categorical_expands_without_copies():
    torch, x, d = categorical("sparsemax", (3, 1, 5))
    plain = d.expand((4, 3, 2))
    assert plain.batch_shape == (4, 3, 2)
    assert plain.scores.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    torch.testing.assert_close(plain.probs, d.probs.expand(4, 3, 2, 5))
    made = d.expand((4, 3, 2))  # now that the probabilities are there
    torch.testing.assert_close(made.entropy(), d.entropy().expand(4, 3, 2))
    values = made.sample()
    torch.testing.assert_close(made.log_prob(values), d.log_prob(values))
    one_a_row = A.nn.Categorical(Entmax(torch.tensor([[1.2], [1.5], [2.0]])), x[:, 0])
    torch.testing.assert_close(one_a_row.expand((2, 3)).probs[1], one_a_row.probs)
    with pytest.raises(RuntimeError):
        d.expand((4, 2, 2))
    mixed = torch.distributions.MixtureSameFamily(
        A.nn.Categorical(Sparsemax(), x[:, 0]), torch.distributions.Normal(torch.zeros(3, 5), torch.ones(3, 5))
    )
    assert mixed.sample().shape == (3,)
    assert mixed.log_prob(torch.zeros(3)).isfinite().all()


def test_categorical_log_prob_broadcasts_as_torchs():
    torch, x, d = categorical("softmax", (3, 1, 5))
    ref = torch.distributions.Categorical(logits=x)
    for shape in ((), (1,), (2,), (3, 2), (3, 1), (7, 3, 2), (4, 1, 1, 1)):
        value = torch.randint(5, shape, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(d.log_prob(value), ref.log_prob(value))


class MaskedByLargeNumbers:
    """sb3-contrib's MaskableCategorical: logits of -1e8 where masked, and an entropy that leaves these out."""

    def __init__(self, logits, masks):
        torch = pytest.importorskip("torch")
        self.masks = masks
        self.base = torch.distributions.Categorical(
            logits=torch.where(masks, logits, torch.tensor(-1e8, dtype=logits.dtype))
        )

    def entropy(self):
        p_log_p = self.base.logits * self.base.probs
        return -p_log_p.where(self.masks, p_log_p.new_zeros(())).sum(-1)


def test_masks_as_sb3_contrib_has_them():
    torch = pytest.importorskip("torch")
    x = torch.tensor(scores(6, 5))
    keep = torch.tensor(np.random.default_rng(0).uniform(size=(6, 5)) < 0.6)
    keep[:, 2], keep[1] = True, True
    ours, theirs = A.nn.Categorical(Softmax(), x, mask=keep), MaskedByLargeNumbers(x, keep)
    torch.testing.assert_close(ours.probs, theirs.base.probs)
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    drawn = ours.sample((500,))
    assert keep.gather(-1, drawn.movedim(0, -1)).all()
    torch.testing.assert_close(ours.log_prob(drawn), theirs.base.log_prob(drawn))
    assert (ours.log_prob((~keep).long().argmax(-1))[~keep.all(-1)] == -INF).all()
    gradients = []
    for make in (lambda x: A.nn.Categorical(Softmax(), x, mask=keep), lambda x: MaskedByLargeNumbers(x, keep)):
        leaf = x.clone().requires_grad_()
        made = make(leaf)
        log_prob = made.log_prob if hasattr(made, "log_prob") else made.base.log_prob
        gradients.append(torch.autograd.grad(log_prob(drawn[0]).sum() + made.entropy().sum(), leaf)[0])
    torch.testing.assert_close(*gradients)
    assert (gradients[0][~keep] == 0).all()


def test_a_row_that_keeps_no_class():
    torch = pytest.importorskip("torch")
    x = torch.zeros(2, 3, requires_grad=True)
    d = A.nn.Categorical(Softmax(), x, mask=torch.tensor([[False] * 3, [True] * 3]), validate_args=True)
    assert d.sample((4,))[:, 0].tolist() == [-1] * 4
    assert d.mode.tolist() == [-1, 0]
    assert d.probs[0].tolist() == [0.0] * 3
    assert d.entropy()[0] == 0
    value = d.log_prob(torch.tensor([-1, 1]))
    assert value.tolist() == [0.0, pytest.approx(-math.log(3))]
    assert d.log_prob(torch.tensor([1, 1]))[0] == -INF
    (value.sum() + d.entropy().sum()).backward()
    assert (x.grad[0] == 0).all()
    with pytest.raises(ValueError, match="within the support"):
        d.log_prob(torch.tensor([0, -1]))


@pytest.mark.parametrize("name", ["softmax", "sparsemax"])
def test_a_number_that_is_no_class_is_never_a_probability(name):
    """Without validation too: an error as torch's own, NaN where no value can be asked for; -1 is no class, and says so."""
    torch, x, _ = categorical(name)
    d = A.nn.Categorical(MAPS[name], x, validate_args=False)
    for stray in (5, -2):
        value = torch.zeros(3, 2, dtype=torch.long)
        value[1, 0] = stray
        with pytest.raises(IndexError, match=f"value: class indices must be from 0 to 4, or -1 for none, .*{stray}"):
            d.log_prob(value)
        unseen = torch.func.vmap(lambda v: d.log_prob(v))(value[None])[0]
        assert unseen.isnan().nonzero().tolist() == [[1, 0]]
    assert d.log_prob(torch.tensor(-1)).tolist() == [[0.0] * 2] * 3


@pytest.mark.parametrize("lead", [(0,), (2, 0)])
def test_a_batch_without_rows(lead):
    torch = pytest.importorskip("torch")
    d = A.nn.Categorical(Sparsemax(), torch.zeros(*lead, 5), validate_args=True)
    assert d.sample((3,)).shape == d.log_prob(d.sample((3,))).shape == (3, *lead)
    assert d.entropy().shape == d.mode.shape == torch.distributions.kl_divergence(d, d).shape == lead


def test_categorical_takes_transforms_and_says_what_is_wrong():
    torch, x, _ = categorical()
    d = A.nn.Categorical(Softmax(), x, transform=A.compose(A.temperature(0.5), A.topk(2)))
    assert ((d.probs > 0).sum(-1) == 2).all()
    torch.testing.assert_close(d.logits.amax(-1), A.log_apply(SparseSoftmax(k=2), x / 0.5).amax(-1))
    for bad, words in ((math.nan, "scores"), (INF, "scores")):
        strange = x.clone()
        strange[0, 0, 0] = bad
        with pytest.raises(ValueError, match=words):
            A.nn.Categorical(Softmax(), strange, validate_args=True)
        A.nn.Categorical(Softmax(), strange, validate_args=False)
    with pytest.raises(TypeError, match="scores must be a tensor"):
        A.nn.Categorical(Softmax(), [0.0, 1.0])
    with pytest.raises(TypeError, match="expected a mapping"):
        A.nn.Categorical(x, x)
    d = A.nn.Categorical(Softmax(), x, validate_args=True)
    for value, words in (
        (torch.tensor(5), "within the support"),
        (torch.zeros(4, dtype=torch.long), "not broadcastable"),
    ):
        with pytest.raises(ValueError, match=words):
            d.log_prob(value)
    with pytest.raises(TypeError, match="generator"):
        d.sample(generator=np.random.default_rng(0))


def test_divergences_of_torch():
    torch, x, _ = categorical(shape=(6, 5))
    y = torch.tensor(scores(6, 5, 3))
    kl = torch.distributions.kl_divergence
    soft = torch.distributions.Categorical
    ours = [A.nn.Categorical(m, s) for m in (Softmax(), Sparsemax()) for s in (x, y)]
    torch.testing.assert_close(kl(ours[0], ours[1]), kl(soft(logits=x), soft(logits=y)))
    torch.testing.assert_close(kl(ours[2], soft(logits=y)), kl(soft(probs=ours[2].probs), soft(logits=y)))
    back_again = kl(soft(logits=x), ours[3])
    torch.testing.assert_close(back_again, kl(soft(logits=x), soft(probs=ours[3].probs)))
    assert (back_again == INF).any()
    sparse = soft(probs=ours[3].probs)
    torch.testing.assert_close(kl(ours[2], ours[3]), kl(ours[2], sparse))
    torch.testing.assert_close(kl(ours[3], ours[3]), torch.zeros(6, dtype=torch.double), atol=1e-12, rtol=0)
    wide = kl(A.nn.Categorical(Softmax(), x[:, None]), A.nn.Categorical(Softmax(), y))
    assert wide.shape == (6, 6)
    with pytest.raises(ValueError, match="5 and 4 classes"):
        kl(ours[0], A.nn.Categorical(Softmax(), y[:, :4]))


def test_a_policy_learns():
    """REINFORCE with an entropy bonus on masked actions: it finds the best that is allowed, and no number is NaN."""
    torch = pytest.importorskip("torch")
    for mapping in (Softmax(), Sparsemax(), Entmax(1.5)):
        scores_, reward = torch.zeros(1, 4, requires_grad=True), torch.tensor([0.0, 0.5, 1.0, 2.0])
        keep, source = torch.tensor([True, True, True, False]), generator("torch", 0)
        step = torch.optim.Adam([scores_], lr=0.05)
        for _ in range(200):
            policy = A.nn.Categorical(mapping, scores_, mask=keep)
            action = policy.sample((16,), generator=source)
            gain = reward[action] - reward[action].mean()
            loss = -(gain * policy.log_prob(action)).mean() - 0.01 * policy.entropy().mean()
            step.zero_grad()
            loss.backward()
            step.step()
        assert policy.mode.item() == 2
        assert policy.probs[0, 2] > 0.9
        assert scores_.grad.isfinite().all()
