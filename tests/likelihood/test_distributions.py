"""log p of classes and entropies: against SciPy, and the plain operations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
from distribution_cases import INF, MAPS, briefly, every_map, log_of, probabilities, scores, tolerance
from kinds import KINDS, back, every_kind, jax_in_the_whole_battery
from refusals import each, refuses

import anymax as A
from anymax import Softmax, Sparsemax
from anymax.likelihood.softmax_plain import blocks


@briefly
@every_kind
@every_map
def test_log_prob_and_entropy_are_those_of_p(name, kind):
    x, y = scores(), np.array([0, 1, 2, 3, 6, -1])
    p = probabilities(MAPS[name], x)
    want = log_of(p, y)
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


@pytest.mark.whole(lambda name, kind: kind == "jax" or (kind == "strict" and name not in ("softmax", "sparsemax")))
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
        want = log_of(p, y)
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


@pytest.mark.whole(lambda name, kind: kind == "jax" or (kind == "strict" and name not in ("softmax", "sparsemax")))
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
    want = log_of(p, y)
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


@every_kind
def test_forms_of_a_support(kind):
    """(ids, offsets) of any integers, a list for each row, rows of one width: they say the same."""
    c, x, y = KINDS[kind], scores(), np.array([[0, 5, 2], [3, 6, 1]])
    x = x.reshape(2, 3, 7)
    lists = [[3, 0, 6], [5], [1, 2, 4, 0], [0, 1], [6, 5, 4, 3, 2, 1, 0], []]
    ids, offsets = np.concatenate([np.array(a, int) for a in lists]), np.cumsum([0, *map(len, lists)])
    padded = np.array([(a + [-1] * 7)[:7] for a in lists], np.int32)
    padded[0] = [-1, 3, -1, 0, 6, -1, -1]  # wherever it stands

    def log_p(support):
        return back(A.log_prob("softmax", c(x), c(y), support=support))

    want = log_p((c(ids), c(offsets)))
    assert want[1, 0] == want[1, 2] == -INF
    forms = {
        "vLLM's": (c(ids.astype(np.int32)), c(offsets.astype(np.int64))),
        "NumPy's": (ids.astype(np.int32), offsets),
        "numbers": (ids.tolist(), offsets.tolist()),
        "lists": lists,
        "tuples": [tuple(a) for a in lists],
        "a list for each text": [lists[:3], lists[3:]],
        "lists with -1": padded.tolist(),
        "rows": c(padded.reshape(2, 3, 7)),
        "flat rows": padded,
        "rows for each text": [padded[:3], lists[3:]],
    }
    two = [np.array([3, 0, 6]), np.array([5, 0, 1])]  # a list of two arrays has the ids of two rows, no offsets
    got, other = (A.log_prob("softmax", c(x[0, :2]), c(y[0, :2]), support=s) for s in (two, [a.tolist() for a in two]))
    np.testing.assert_array_equal(back(got), back(other))
    for name, support in forms.items():
        np.testing.assert_array_equal(log_p(support), want, err_msg=name)
    if kind == "jax":
        import jax

        traced = jax.jit(lambda x, y, s: A.log_prob("softmax", x, y, support=s))(c(x), c(y), c(padded))
        np.testing.assert_allclose(back(traced), want, atol=tolerance(kind), rtol=tolerance(kind))


def test_two_lists_are_those_of_two_rows():
    """In a tuple they are ids and offsets."""
    x, lists = scores()[:2], [[4, 5, 6], [0, 1, 3]]
    close = np.testing.assert_allclose
    close(A.log_prob("softmax", x, [4, 0], support=lists), A.log_prob("softmax", x, [4, 0], support=np.array(lists)))
    assert A.log_prob("softmax", x, [4, 0], support=tuple(lists))[1] == -INF


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
    log_p, h = (back(v) for v in A.log_prob_entropy(MAPS[name], c(x), c(np.array([-100, -100, -100, 0, -1]))))
    assert not log_p[[0, 1, 2, 4]].any()
    assert not h[:3].any()
    np.testing.assert_allclose(h[4], scipy.stats.entropy(p[4]), atol=tolerance(kind))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while it traces
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["softmax", "entmax15"])
def test_padding_has_no_gradient(name, compiled):
    """Not even where its scores are NaN; of several targets, if all are padding."""
    torch = pytest.importorskip("torch")
    x = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[0, 1, 2] = math.nan
    y = torch.tensor([[[1, -100, -1], [-100, 2, 2]], [[0, -100, -1], [0, 1, -100]]])
    x.requires_grad_()
    f = lambda x: A.log_prob_entropy(MAPS[name], x, y)  # noqa: E731
    log_p, h = (torch.compile(f, backend="aot_eager") if compiled else f)(x)
    assert (h != 0).tolist() == [[True, False, True], [True] * 3]
    assert not log_p[:, 0, 1].any()
    (g,) = torch.autograd.grad(log_p.nan_to_num(0, 0, 0).sum() + h.sum(), x)
    assert torch.isfinite(g).all()
    assert g.abs().sum(-1).bool().tolist() == [[True, False, True], [True] * 3]
    assert A.log_prob_entropy(MAPS[name], x, y[:0])[1][1].all()


@jax_in_the_whole_battery
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
    np.testing.assert_allclose(back(log_p), log_of(p, y), rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(back(h), scipy.stats.entropy(p, axis=-1), rtol=2e-6, atol=2e-6)
    assert "float32" in str(A.log_prob(MAPS[name], given, KINDS[kind](y)).dtype)


@jax_in_the_whole_battery
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
        for leaf, terms in zip(leaves, (softmax_torch.terms, lambda *a, **o: softmax_plain.plain(*a, xp, **o))):
            found.append(
                [part for part in terms(leaf, index, scale=scale, entropy=entropy, rest=rest) if part is not None]
            )
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


X, Y, IDS, OFFSETS = scores(), np.arange(6), np.array([0, 1, 2]), np.array([0, 1, 1, 1, 2, 2, 3])
WRONG = {
    "y too large": (lambda: A.log_prob(Softmax(), X, Y + 2), IndexError, "from 0 to 6, -1 for none, or -100 to .* from 2 to 7"),
    "y too small": (lambda: A.log_prob(Softmax(), X, Y - 2), IndexError, "from -2 to 3"),
    "y of floats": (lambda: A.log_prob(Softmax(), X, Y.astype(float)), TypeError, r"integers\), got float64"),
    "y of another shape": (
        lambda: A.log_prob(Softmax(), X, Y[:5]), ValueError, r"target of shape \(5,\): expected one class for each row, of shape \(6,\)",
    ),
    "no map": (lambda: A.log_prob(3, X, Y), TypeError, "such as 'sparsemax', got 3"),
    "an unknown map": (lambda: A.log_prob("softmaxx", X, Y), ValueError, "there is no map 'softmaxx'"),
    "a negative temperature": (lambda: A.log_prob(Softmax(), X, Y, temperature=-1.0), ValueError, "at least 0"),
    "temperatures of classes": (
        lambda: A.log_prob(Softmax(), X, Y, temperature=X), ValueError, "temperature of shape .* one value for each row",
    ),
    "no transform": (lambda: A.log_prob(Softmax(), X, Y, transform=3), TypeError, "log_prob: transform must be a function"),
    "a transform of classes": (
        lambda: A.log_prob(Softmax(), X, Y, transform=lambda s: s[:, :3]), ValueError, r"gave ndarray of float64 \(6, 3\)",
    ),
    "support, a pair": (lambda: A.log_prob(Softmax(), X, Y, support=IDS), TypeError, r"support must be \(ids, offsets\)"),
    "support, floats": (
        lambda: A.log_prob(Softmax(), X, Y, support=X), TypeError, r"integers \[\.\.\., k\], .* got float64 \(6, 7\)",
    ),
    "support, lists": (lambda: A.log_prob(Softmax(), X, Y, support=[[1]] * 5), ValueError, "the ids of 5 rows, and there are 6"),
    "support, halves": (lambda: A.log_prob(Softmax(), X, Y, support=[[0.5]] * 6), TypeError, "integers"),
    "support, names": (lambda: A.log_prob(Softmax(), X, Y, support=[["a"]] * 6), TypeError, "integers"),
    "support, padded": (lambda: A.log_prob(Softmax(), X, Y, support=Y[:5, None]), ValueError, "the ids of 5 rows"),
    "support, padded classes": (lambda: A.log_prob(Softmax(), X, Y, support=Y[:, None] + 3), IndexError, "from 0 to 6, got 3 to 8"),
    "support, a list twice": (lambda: A.log_prob(Softmax(), X, Y, support=[[1, 1]] * 6), ValueError, "a class twice"),
    "support, rows": (lambda: A.log_prob(Softmax(), X, Y, support=(IDS, OFFSETS[:-1])), ValueError, "7 integers for 6 rows"),
    "support, falling": (lambda: A.log_prob(Softmax(), X, Y, support=(IDS, OFFSETS + 1)), ValueError, "rise from 0 to 3"),
    "support, classes": (lambda: A.log_prob(Softmax(), X, Y, support=(IDS + 6, OFFSETS)), IndexError, "from 0 to 6, got 6 to 8"),
    "support, twice": (lambda: A.log_prob(Softmax(), X, Y, support=([1, 1, 2], [0, 2, 2, 2, 2, 2, 3])), ValueError, "a class twice"),
    "kl, shapes": (lambda: A.likelihood.kl(Softmax(), X, Softmax(), X[:5]), ValueError, "one shape"),
    "tail": (lambda: A.topk_kl(X, [[0]] * 6, [[-0.1]] * 6, tail="drop"), ValueError, "'ignore' or 'one class', got 'drop'"),
    "ids, shape": (lambda: A.topk_kl(X, [[0, 1]] * 6, [[-0.1]] * 6), ValueError, "one shape"),
    "ids of floats": (lambda: A.topk_kl(X, [[0.0]] * 6, [[-0.1]] * 6), TypeError, "ids must be integers"),
    "ids, twice": (lambda: A.topk_kl(X, [[0, 0]] * 6, [[-1.0, -1.0]] * 6), ValueError, "a class twice"),
    "a teacher's sum": (
        lambda: A.topk_kl(X, [[0, 1]] * 6, [[-0.1, -0.1]] * 6), ValueError, "sum to at most 1 in each row; the largest sum is 1.8",
    ),
    "ids, classes": (lambda: A.topk_kl(X, [[7]] * 6, [[-0.1]] * 6), IndexError, "topk_kl: ids"),
    "rows of a teacher": (lambda: A.topk_kl(X, [[0]] * 5, [[-0.1]] * 5), ValueError, "does not belong to scores"),
}  # fmt: skip


@each(WRONG)
def test_errors_say_what_is_wrong(call, error, words):
    refuses(call, error, words)
