"""The k largest of a row: the same classes in every framework, engine and dtype, and the probabilities at them."""

from __future__ import annotations

import contextlib
import math
import warnings

import numpy as np
import pytest
from kinds import KINDS, back, every_kind, readonly
from refusals import each, one_sentence, said

import anymax as A
from anymax._array import namespace
from anymax.kernels.selection import chosen
from anymax.kernels.tasks import Groups
from anymax.sampling import gumbel_topk, top, topk_log_prob
from anymax.transforms import topk

INF = math.inf


def by(engine):
    return contextlib.nullcontext() if engine is None else A.use(engine)


def tied(rows, n, seed=0, dtype=np.float32, grid=4):
    """Scores with ties, zeros of both signs, masked entries, one row masked altogether and one of a single entry."""
    rng = np.random.default_rng(seed)
    x = np.round(rng.normal(size=(rows, n)) * grid) / grid
    x[rng.random(x.shape) < 0.15] = -INF
    x[0] = -INF
    x[1, 1:] = -INF
    return readonly(x.astype(dtype))


def defined(x, k, groups=None):
    """The ids by a stable sort in fp64: groups by their sums, then scores; -1 where there is none."""
    x = np.array(back(x), np.float64)
    if groups is not None:
        count, keep, most = groups
        blocks = x.reshape(len(x), count, -1)
        largest = -np.sort(-blocks, axis=-1)[..., :most]
        live = largest > -INF
        sums = np.where(live[..., 0], np.where(live, largest, 0.0).sum(-1), -INF)
        kept = np.argsort(-sums, axis=-1, kind="stable")[:, :keep]
        inside = np.zeros(sums.shape, bool)
        np.put_along_axis(inside, kept, True, -1)
        x = np.where(np.repeat(inside & live[..., 0], blocks.shape[-1], axis=-1), x, -INF)
    index = np.argsort(-x, axis=-1, kind="stable")[:, :k]
    return np.where(np.take_along_axis(x, index, -1) == -INF, -1, index)


SHAPES = {  # classes, k, groups
    "few": (17, 5, None), "all": (8, 8, None), "experts": (256, 8, None), "many of them": (300, 60, None),
    "eight groups": (256, 8, Groups(8, 4, 2)), "by the largest": (256, 8, Groups(8, 4, 1)), "of 40": (320, 8, Groups(8, 4, 2)),
    "of five": (60, 6, Groups(12, 4, 5)), "one each": (12, 3, Groups(12, 4, 1)), "uneven": (21, 4, Groups(3, 2, 2)),
    "more than are left": (24, 9, Groups(4, 1, 2)), "three": (96, 8, Groups(3, 2, 3)),
}  # fmt: skip


@pytest.mark.soon(lambda kind, shape, engine: shape == "few" and engine is None)
@pytest.mark.parametrize("engine", [None, "reference"])
@pytest.mark.parametrize("shape", SHAPES)
@every_kind
def test_ids_are_those_of_the_definition(kind, shape, engine):
    n, k, groups = SHAPES[shape]
    for dtype in (np.float32, np.float64) if kind != "jax" else (np.float32,):
        x = KINDS[kind](tied(200, n, dtype=dtype))
        if engine is None:
            got = chosen(x, k, namespace(x), groups)
        else:
            with by(engine):
                got = chosen(x, k, namespace(x), groups)
        np.testing.assert_array_equal(back(got), defined(back(x), k, groups))


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("engine", [None, "reference"])
@pytest.mark.parametrize("shape", SHAPES)
def test_halves_are_compared_in_fp32(shape, engine, half):
    torch = pytest.importorskip("torch")
    n, k, groups = SHAPES[shape]
    x = torch.tensor(tied(200, n, grid=64)).to(getattr(torch, half))  # sums of two have more digits than a half
    with by(engine):
        got = chosen(x, k, namespace(x), groups)
    np.testing.assert_array_equal(back(got), defined(x.double(), k, groups))


@pytest.mark.parametrize("engine", [None, "reference"])
@every_kind
def test_strange_rows(kind, engine):
    x = KINDS[kind](np.array([[1.0, INF, 3.0, INF], [math.nan, 1.0, 2.0, 3.0], [-INF] * 4, [1.0, 2.0, -INF, 0.0]]))
    xp = namespace(x)
    with by(engine):
        assert back(chosen(x, 3, xp)).tolist() == [[1, 3, 2], [-1] * 3, [-1] * 3, [1, 0, 3]]
        assert back(chosen(x, 3, xp, Groups(2, 1, 2))).tolist() == [[1, 0, -1], [-1] * 3, [-1] * 3, [1, 0, -1]]
        out = top("softmax", x, 3)
        assert back(out.index)[:3].tolist() == [[-1] * 3] * 3
        p = back(out.p)
        assert np.isnan(p[:2]).all()
        assert (p[2] == 0).all()
        assert np.isfinite(p[3]).all()


def test_empty_batches():
    assert top("softmax", np.zeros((0, 5)), 2).index.shape == (0, 2)


WRONG = said(
    ValueError,
    (lambda: top("softmax", [1.0, 2.0], 3), "k must be from 1 to the number of classes, 2; got 3"),
    (lambda: top("softmax", [1.0, 2.0], index=[[0]]), "does not belong to scores"),
    (lambda: top("softmax", [1.0, 2.0], 2, index=[1]), "k=2 and index has 1"),
    (lambda: topk(2, groups=2), "keep_groups must be an integer of at least 1 where there are groups"),
    (lambda: topk(2, keep_groups=2), "belong to groups="),
    (lambda: topk(2, groups=2, keep_groups=3), "at most groups, 2, got 3"),
    (lambda: topk(2, groups=2, keep_groups=1, group_by="sum"), '"max" or how many'),
    (lambda: topk(2, groups=2, keep_groups=1)([1.0, 2.0, 3.0]), "3 classes can't be split into 2"),
    (lambda: topk(2, groups=2, keep_groups=1, group_by=3)(np.ones(4)), "more scores than a group has, 2"),
    (lambda: topk(2, by=np.ones(3))(np.ones(4)), "does not broadcast"),
    (lambda: topk(np.array([[2], [0]])), "k must be at least 1"),
) | said(
    TypeError,
    (lambda: top("softmax", [1.0, 2.0]), "give k, how many classes to return, or index="),
    (lambda: top("softmax", [1.0, 2.0], index=[0.0]), "index must be integers"),
    (lambda: topk(np.array([[2.0]])), "k must be an integer"),
) | said(
    IndexError,
    (lambda: top("softmax", [1.0, 2.0], index=[2]), "from 0 to 1, or -1 for none"),
)  # fmt: skip


@each(WRONG)
def test_what_is_refused(call, error, words):
    one_sentence(call, error, words)


# -- the transform -----------------------------------------------------------------------------------------------------------------


def kept(x, ids):
    out = np.full(x.shape, -INF, x.dtype)
    for row, index in enumerate(ids):
        index = index[index >= 0]
        out[row, index] = x[row, index]
    return out


@pytest.mark.parametrize("engine", [None, "reference"])
@pytest.mark.parametrize("shape", [name for name, (_, _, groups) in SHAPES.items() if groups])
@every_kind
def test_the_transform_keeps_the_chosen_ones(kind, shape, engine):
    """By other scores and in groups, -inf elsewhere; what is masked stays so, whatever the other scores are."""
    n, k, groups = SHAPES[shape]
    x, other = tied(50, n, seed=1), np.round(np.random.default_rng(2).normal(size=n) * 4).astype(np.float32) / 4
    keys = np.where(x == -INF, -INF, np.broadcast_to(other, x.shape))
    c = KINDS[kind]
    words = {"groups": groups.count, "keep_groups": groups.keep, "group_by": groups.most if groups.most > 1 else "max"}
    with by(engine):
        np.testing.assert_array_equal(back(topk(k, by=other, **words)(c(x))), kept(x, defined(keys, k, groups)))
        np.testing.assert_array_equal(back(topk(k, by=other)(c(x))), kept(x, defined(keys, k)))
        np.testing.assert_array_equal(back(topk(k, **words)(c(x))), kept(x, defined(x, k, groups)))


@pytest.mark.parametrize("engine", [None, "reference"])
@every_kind
def test_k_may_differ_between_rows(kind, engine):
    x, k = tied(40, 9), np.arange(40)[:, None] % 11 + 1
    with by(engine):
        y = back(topk(k)(KINDS[kind](x)))
        least = back(topk(k, min_keep=4)(KINDS[kind](x)))
        other = back(topk(k, by=-np.arange(9.0))(KINDS[kind](x)))
    for row in range(40):
        alone = x[row : row + 1]
        np.testing.assert_array_equal(y[row : row + 1], kept(alone, defined(alone, k[row, 0])))
        np.testing.assert_array_equal(least[row : row + 1], kept(alone, defined(alone, max(k[row, 0], 4))))
        first = np.where(alone == -INF, -INF, -np.arange(9.0))
        np.testing.assert_array_equal(other[row : row + 1], kept(alone, defined(first, k[row, 0])))


# -- top, and what else chooses -------------------------------------------------------------------------------------------------------

MAPS = {
    "softmax": A.Softmax(), "sparsemax": A.Sparsemax(), "entmax15": A.Entmax(1.5), "budget": A.Budget(2), "topk": A.SparseSoftmax(k=3),
    "taylor": A.Taylor(), "square": A.Ratio.square(), "sigmoid": A.Ratio.sigmoid(), "normmax": A.NormMax(2.0),
}  # fmt: skip


@pytest.mark.parametrize("name", MAPS)
@every_kind
def test_top_gives_the_probabilities_of_apply(kind, name):
    x = np.random.default_rng(3).normal(size=(20, 9)).astype(np.float32)
    x[0, 2:] = -INF
    mapping, c = MAPS[name], KINDS[kind]
    index, p = (back(a) for a in top(mapping, c(x), 4))
    want = back(A.apply(mapping, c(x)))
    for row in range(20):
        order = np.argsort(-(x if mapping.facts.monotone else want)[row], kind="stable")[:4]
        order = np.where((x[row, order] == -INF) | ((want[row, order] == 0) & (name != "softmax")), -1, order)
        assert index[row].tolist() == order.tolist()
        np.testing.assert_array_equal(p[row], np.where(order < 0, 0.0, want[row, order]))
    across = top(mapping, c(x.T), 4, axis=0)
    np.testing.assert_array_equal(back(across.index).T, index)
    np.testing.assert_array_equal(back(across.p).T, p)


def test_top_after_a_transform_and_a_mask():
    x, mask = np.array([[3.0, 2.0, 1.0, 0.0]]), np.array([False, True, True, True])
    index, p = top("softmax", x, 3, topk(2, by=np.array([0.0, 1.0, 2.0, 3.0])), mask=mask)
    assert index.tolist() == [[2, 3, -1]]
    np.testing.assert_allclose(p, [[*A.softmax([1.0, 0.0]), 0.0]])


@pytest.mark.parametrize("name", ["softmax", "entmax15", "taylor"])
def test_replayed_classes_have_their_gradient(name):
    """A class that is given by index has p and its derivative, chosen or not; -1 has neither."""
    torch = pytest.importorskip("torch")
    x = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    index = torch.tensor([[4, 0, -1]] * 6)
    p = top(MAPS[name], x, index=index).p
    want = A.apply(MAPS[name], x)
    assert torch.equal(p[:, :2], want[:, [4, 0]])
    assert not p[:, 2].any()
    (got,) = torch.autograd.grad(p.sum(), x)
    (wanted,) = torch.autograd.grad(want[:, [4, 0]].sum(), x)
    torch.testing.assert_close(got, wanted)
    assert got.abs().sum() > 0


@pytest.mark.parametrize("name", ["softmax", "sparsemax", "entmax15", "taylor"])
def test_derivatives_of_torch(name):
    torch = pytest.importorskip("torch")
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    f = lambda x: top(MAPS[name], x, 3).p  # noqa: E731
    assert torch.autograd.gradcheck(f, x)
    assert torch.autograd.gradgradcheck(f, x)
    assert torch.allclose(torch.vmap(f)(x.detach()), f(x.detach()))
    a = torch.tensor(1.4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: top(A.Entmax(a), x.detach(), 3).p, a)


@pytest.mark.whole
@pytest.mark.parametrize("groups", [None, 2])
def test_under_torch_compile(groups):
    torch = pytest.importorskip("torch")
    words = {} if groups is None else {"groups": 2, "keep_groups": 1}
    x = torch.randn(8, 6, requires_grad=True)
    f = lambda x: top("softmax", x, 2, topk(2, by=-x, **words))  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = torch.compile(f, backend="aot_eager", fullgraph=True)(x)
    want = f(x)
    assert torch.equal(got.index, want.index)
    torch.testing.assert_close(got.p, want.p)
    torch.testing.assert_close(
        torch.autograd.grad(got.p.square().sum(), x)[0], torch.autograd.grad(want.p.square().sum(), x)[0]
    )


@pytest.mark.whole
def test_in_jax():
    jax = pytest.importorskip("jax")
    x = jax.numpy.asarray(np.random.default_rng(4).normal(size=(5, 7)).astype(np.float32))
    f = lambda x: top("entmax15", x, 3)  # noqa: E731
    got, want = jax.jit(f)(x), top("entmax15", back(x), 3)
    np.testing.assert_array_equal(got.index, want.index)
    np.testing.assert_allclose(got.p, want.p, atol=1e-6)
    g = jax.jit(jax.grad(lambda x: (f(x).p ** 2).sum()))(x)
    h = jax.grad(lambda x: (jax.numpy.take_along_axis(A.apply("entmax15", x), want.index, -1) ** 2).sum())(x)
    np.testing.assert_allclose(g, h, atol=1e-6)
    np.testing.assert_array_equal(jax.vmap(f)(x).index, want.index)
    # its own order has -0.0 below 0.0
    assert back(top("softmax", jax.numpy.asarray([-0.0, 0.0, -0.0]), 3).index).tolist() == [0, 1, 2]


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_top_of_halves_is_in_their_dtype(half):
    torch = pytest.importorskip("torch")
    x = torch.randn(9, 12, generator=torch.Generator().manual_seed(2)).to(getattr(torch, half))
    got, want = top("softmax", x, 4), top("softmax", x.float(), 4)
    assert got.p.dtype == x.dtype
    assert torch.equal(got.index, want.index)
    assert torch.equal(got.p, want.p.to(x.dtype))


@every_kind
def test_what_else_chooses_chooses_alike(kind):
    """topk_log_prob and gumbel_topk: ties to the smaller index, by the engine and by the reference."""
    x = KINDS[kind](tied(60, 11, seed=5))
    want = defined(back(x), 4)
    for engine in (None, "reference"):
        with by(engine):
            best = topk_log_prob("softmax", x, 4)
        np.testing.assert_array_equal(back(best.index), want)
        assert (np.isneginf(back(best.log_prob)) == (want < 0)).all()
    key = {"torch": 0, "numpy": 0, "strict": 0}.get(kind)
    if key is not None:
        drawn = [gumbel_topk(x, 4, generator=key).index]
        with A.use("reference"):
            drawn.append(gumbel_topk(x, 4, generator=key).index)
        np.testing.assert_array_equal(back(drawn[0]), back(drawn[1]))
