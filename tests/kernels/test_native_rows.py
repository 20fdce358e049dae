"""The compiled engine's probabilities against the reference: every map, dtype, layout and length of rows."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
from cases import each
from engine_state import instructions
from native_cases import (
    CELLS,
    DTYPES,
    ENGINE,
    SERVED,
    bound,
    close,
    each_served,
    holds,
    layouts,
    mapped,
    named,
    serves,
)
from row_cases import EXTREME, LAYOUTS, reference, rows, torch

import anymax as am
from anymax.kernels import native


@pytest.mark.whole(lambda cell: not cell.soon)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_engine_gives_what_the_reference_does(cell):
    holds(cell)


WITHOUT_A_LOSS = {"Taylor", "Sigsoftmax", "Ratio", "Bounded", "Softpick"}
WITHOUT_LOG = {c.row for c in SERVED} - {"Softmax", "Sigsoftmax", "SparseSoftmax"}
EMPTY = {  # what is left to plain operations, by the names of maps
    "forward": set(),
    "vjp": set(),
    "log_forward": WITHOUT_LOG,
    "log_vjp": WITHOUT_LOG,
    "threshold": WITHOUT_A_LOSS,
    "index_loss": WITHOUT_A_LOSS,
}


@pytest.mark.parametrize("op", EMPTY)
def test_which_cells_of_the_table_are_empty(op):
    assert {c.row for c in SERVED if not serves(op, c)} == EMPTY[op]
    missing = {c.row for c in SERVED} - EMPTY[op] - {cell.case.row for cell in CELLS if cell.op == op}
    assert missing == ({"PerturbMax"} if op == "threshold" else set())  # it is in test_native_calls.py


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@each(named("softmax", "entmax-1.5", "taylor-2", "sparse_softmax-k2", "perturb_max-normal"))
def test_layouts(case, dtype, layout):
    plain = rows(40, dtype, batch=(3, 20))
    x = LAYOUTS[layout](plain)
    before = x.clone()
    want = ENGINE.forward(case.mapping, x.contiguous())
    got = ENGINE.forward(case.mapping, x)
    assert torch.equal(x, before)
    close(got, want, bound(case, want, dtype))
    p, g = LAYOUTS[layout](want.clone()), LAYOUTS[layout](rows(40, dtype, batch=(3, 20), seed=5))
    want = ENGINE.vjp(case.mapping, x.contiguous(), p.contiguous(), g.contiguous())
    got = ENGINE.vjp(case.mapping, x, p, g)
    close(got, want, 4 * bound(case, want, dtype))


@pytest.mark.parametrize("axis", [0, 1, 2])
@each(named("softmax", "sparsemax", "sparse_softmax-k2"))
def test_axes_of_numpy(case, axis):
    x = np.random.default_rng(2).normal(size=(5, 33, 7)).astype(np.float32)
    for view in (x, x[::-1, ::2], np.asfortranarray(x), x.transpose(2, 0, 1)):
        with am.use("reference"):
            want = am.apply(case.mapping, view.astype(np.float64), axis)
        view = view.copy() if view is x else view
        view.setflags(write=False)
        with am.use("native"):
            got = am.apply(case.mapping, view, axis)
        np.testing.assert_allclose(got, want, rtol=0, atol=6e-7)


@each_served
def test_masks_without_a_copy(case):
    x = rows(50, "float32", batch=(4, 3))
    keep = torch.rand(3, 50, generator=torch.Generator().manual_seed(0)) > 0.4
    keep[1] = False
    keep[2, 10:] = True
    got = am.apply(mapped(case), x, mask=keep)
    want = reference(lambda t: am.apply(mapped(case), t, mask=keep), x)
    close(got, want, bound(case, want, "float32"))
    assert not bool(got[:, 1].any())
    assert not bool(got[~keep.expand_as(got)].any())


# -- exact zeros and ones ----------------------------------------------------------------------------------------------

ENGINES = pytest.mark.parametrize("engine", ["native", "reference"])


def _by(engine):
    return am.use(engine) if engine == "reference" else contextlib.nullcontext()


def _apart(n, k, dtype):
    """Rows whose k largest scores lie 1 and more above the others, many of them hardly more."""
    rng, count = np.random.default_rng(n), min(300, 40_000 // n)
    x = torch.tensor(rng.normal(size=(count, n)) * 3).to(getattr(torch, dtype)).double().numpy()
    for row, more in zip(x, np.where(rng.random(count) < 0.7, 0.0, rng.exponential(size=count) * 0.01), strict=True):
        order = np.argsort(-row)
        row[order[:k]] += max(1.0 - (row[order[k - 1]] - row[order[k]]), 0.0) + more
    x = torch.tensor(x).to(getattr(torch, dtype))
    ordered = -np.sort(-x.double().numpy(), 1).astype(np.longdouble)
    x = x[torch.tensor(ordered[:, k - 1] - ordered[:, k] >= 1.0)]
    return x, torch.zeros_like(x).scatter(1, x.topk(k).indices, 1.0)


@pytest.mark.whole(lambda dtype, n: dtype != "float32" and n != 60)
@ENGINES
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n", "k"), [(2, 1), (8, 3), (30, 5), (60, 20), (100, 50), (200, 10), (500, 40), (1000, 3), (5000, 300)]
)
def test_a_budget_of_scores_that_lie_apart_is_ones_and_zeros(n, k, dtype, engine):
    x, want = _apart(n, k, dtype)
    each = torch.full((len(x), 1), float(k), dtype=torch.float64)
    with _by(engine):
        assert torch.equal(am.apply(am.Budget(k), x), want)
        assert torch.equal(am.apply(am.Budget(k), x.T.contiguous(), axis=0), want.T)
        assert torch.equal(am.apply(am.Budget(each), x), want)
        assert torch.equal(am.segment_apply(am.Budget(k), x.flatten(), lengths=[n] * len(x)), want.flatten())
        assert torch.equal(am.log_apply(am.Budget(k), x), want.log())
        tau, support = am.threshold(am.Budget(k), x)
    assert (support == k).all()
    if dtype == "float64":
        assert torch.equal((x > tau[:, None]).double(), want)


def _support_on_a_grid(x, k):
    """The classes of sparsemax (k = 1) and budget with a probability, of whole scores in quarters: in whole numbers."""
    out = np.zeros(x.shape, bool)
    for row, to in zip(x, out, strict=True):
        ends = np.unique(np.concatenate([row, row - 4]))  # tau is one of these, or between two of them
        sums = np.clip(row - ends[:, None], 0, 4).sum(1)
        to[:] = row > ends[np.flatnonzero(sums >= 4 * k)[-1]]
    return out


@pytest.mark.whole(lambda n: n in (30, 600))
@ENGINES
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("k", [1, 2, 7])
@pytest.mark.parametrize("n", [8, 30, 100, 600, 2000])
def test_zeros_at_a_threshold_that_is_a_score(n, k, dtype, engine):
    scores = np.round(np.random.default_rng(n + k).normal(size=(min(300, 40_000 // n), n)) * 5).astype(int)
    x, want = torch.tensor(scores / 4, dtype=getattr(torch, dtype)), torch.tensor(_support_on_a_grid(scores, k))
    with _by(engine):
        assert torch.equal(am.apply(am.Budget(k), x) > 0, want)
        if k == 1:
            assert torch.equal(am.apply(am.Sparsemax(), x) > 0, want)
            assert torch.equal(am.apply(am.Sparsemax(), x.T.contiguous(), axis=0) > 0, want.T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 3), (100, 100), (1000, 50), (5000, 4000), (40000, 10)])
def test_largest(dtype, n, k):
    x = rows(n, dtype, batch=(4,))
    value, index = ENGINE.largest(x, k)
    order = torch.argsort(x.double(), dim=-1, descending=True, stable=True)[:, :k]
    assert torch.equal(index, order)
    assert torch.equal(value, x.gather(-1, order))


def test_largest_of_masked_rows():
    x = torch.tensor([[-torch.inf, 1.0, -torch.inf, 2.0], [-torch.inf] * 4])
    value, index = ENGINE.largest(x, 3)
    assert index.tolist() == [[3, 1, 0], [0, 1, 2]]
    assert value[0].tolist() == [2.0, 1.0, -torch.inf]


@each_served
def test_strange_rows_touch_no_other(case):
    x = rows(300, "float32", batch=(8,))
    want = ENGINE.forward(mapped(case), x)
    y = x.clone()
    y[1, 5] = torch.nan
    y[3, 299] = torch.inf
    y[5] = -torch.inf
    got = ENGINE.forward(mapped(case), y)
    assert bool(got[1].isnan().all())
    assert bool(got[3].isnan().all())
    assert not bool(got[5].any())
    assert torch.equal(got[[0, 2, 4, 6, 7]], want[[0, 2, 4, 6, 7]])


@each_served
def test_huge_tiny_and_equal_scores(case):
    for row in EXTREME:
        x = torch.tensor([row])
        if case.mass > len(row):
            continue
        p = ENGINE.forward(mapped(case), x)
        assert bool(p.isfinite().all()), row
        mass = 0.0 if case.positive_row and max(row) <= 0.0 else case.mass
        total = float(p.double().sum())
        if isinstance(case.mapping, am.Softpick):  # of which scores below 0 take a part
            assert -1e-6 < total < mass + 1e-6, row
        else:
            assert abs(total - mass) < 1e-6, row


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1.0, 1e15, 1e17, -1e17, 1e30, -1e30])
def test_a_budget_of_tied_scores_of_any_size(size, dtype):
    for n in (1, 2, 5, 9, 31, 40, 200):
        x = np.full((17, n), size, dtype)
        x[3] = np.linspace(-1, 1, n)
        for k in (0.1, 0.97, 2.5):
            if k <= n:
                total = ENGINE.forward(am.Budget(k), x).astype(float).sum(-1)
                np.testing.assert_allclose(total, k, rtol=1e-5)


@pytest.mark.parametrize("isa", native.load().isas())
@pytest.mark.parametrize("mapping", [am.Softmax(), am.SparseSoftmax(k=60)], ids=repr)
def test_no_probability_is_subnormal_far_below_the_largest(mapping, isa):
    """Numbers that are not normal cost most processors a hundred cycles each; 2 ^ -127 is exp(-88.03)."""
    with instructions(isa):
        for n in (10, 64, 700):
            x = torch.linspace(-88.1, -104.0, n).repeat(6, 1)
            x[:, 0] = 0.0
            p = ENGINE.forward(mapping, x)
            assert torch.equal(p, torch.eye(n)[:1].expand(6, n)), n


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("shape", [(0, 5), (4, 0, 6)])
def test_no_rows_with_a_parameter_each(shape, kind):
    make = torch.from_numpy if kind == "torch" else np.asarray
    x = make(np.zeros(shape, np.float32))
    few, nucleus = lambda a: am.SparseSoftmax(k=a), lambda a: am.SparseSoftmax(p=a / 4)
    for mapping in (lambda a: am.Entmax(a + 0.5), am.NormMax, am.Budget, few, nucleus):
        for size in ((1,) * len(shape), (*shape[:-1], 1)):
            m = mapping(make(np.full(size, 2.0)))
            assert ENGINE.forward(m, x).shape == shape
            assert ENGINE.vjp(m, x, x, x).shape == shape
            assert ENGINE.threshold(m, x).shape == (*shape[:-1], 1)
    assert ENGINE.logsumexp(x).shape == (*shape[:-1], 1)


def test_tiny_rows_in_great_number():
    x = torch.randn(200_003, 4)
    with am.use("reference"):
        want = am.sparsemax(x[-1000:])
    got = am.sparsemax(x)
    torch.testing.assert_close(got[-1000:], want, rtol=0, atol=3e-7)
    assert float((got.sum(-1) - 1).abs().max()) < 3e-7


@pytest.mark.whole(lambda mapping: not isinstance(mapping, am.Softmax))
@pytest.mark.parametrize("mapping", [am.Softmax(), am.Sparsemax(), am.Entmax(1.5), am.SparseSoftmax(k=100)], ids=repr)
def test_a_row_of_a_million(mapping):
    x = torch.randn(1, 1_000_003, generator=torch.Generator().manual_seed(0))
    want = reference(lambda t: am.apply(mapping, t), x)
    assert float((am.apply(mapping, x).double() - want).abs().sum()) < 3e-7


@pytest.mark.parametrize("dtype", DTYPES)
def test_logsumexp(dtype):
    x = rows(700, dtype, batch=(3, 4))
    x[0, 0] = -torch.inf
    got, want = am.logsumexp(x, 1), torch.logsumexp(x.double(), 1)
    torch.testing.assert_close(got.double(), want, rtol=2 * torch.finfo(x.dtype).eps, atol=1e-6)
    free = x.clone().requires_grad_()
    am.logsumexp(free).sum().backward()  # plain operations, with their gradient
    torch.testing.assert_close(free.grad, am.softmax(x), rtol=1e-2, atol=1e-2)


def test_bfloat16_of_numpy():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.random.default_rng(0).normal(size=(4, 30)).astype(ml_dtypes.bfloat16)
    want = am.sparsemax(torch.tensor(x.astype(np.float32)).bfloat16()).float().numpy()
    for scores, axis in ((x, -1), (x.T.copy(), 0), (x.T, 0)):
        p = native.load().forward(am.Sparsemax(), scores, axis, None, None)
        assert p.dtype == x.dtype
        assert p.shape == scores.shape
        np.testing.assert_array_equal(np.moveaxis(p, axis, -1).astype(np.float32), want)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize(
    "mapping", [am.Softmax(), am.Sparsemax(), am.Entmax(1.3), am.Taylor(2), am.Budget(2)], ids=repr
)
def test_any_axis_layout_mask_and_out(kind, mapping):
    """Masks that are broadcast, five axes of rows that no two strides can say, results with any strides: all as in C order, by rows."""
    g = np.random.default_rng(0)
    make = torch.from_numpy if kind == "torch" else np.asarray
    x = g.normal(size=(2, 3, 4, 5, 6)).astype(np.float32)
    for axis in (-1, 0, 2, -2):
        rows_ = np.ascontiguousarray(np.moveaxis(x, axis, -1))
        for mask in (None, g.random((4, 1, 6)) < 0.9, g.random(x.shape) < 0.9, np.array(True)):
            keep = None if mask is None else np.moveaxis(np.broadcast_to(mask, x.shape), axis, -1)
            if isinstance(mapping, am.Budget) and mask is not None and keep.sum(-1).min() < 2:
                continue
            want = am.apply(mapping, rows_ if keep is None else np.where(keep, rows_, np.float32(-np.inf)))
            for scores in layouts(x):
                if kind == "torch" and min(scores.strides) < 0:
                    continue
                masked = None if mask is None else make(mask)
                p = native.load().forward(mapping, make(scores), axis, masked, None)
                np.testing.assert_allclose(np.moveaxis(np.asarray(p), axis, -1), want, rtol=1e-6, atol=1e-7)
                for place in layouts(np.empty_like(x)):
                    if kind == "torch" and min(place.strides) < 0:
                        continue
                    out = make(place)
                    assert native.load().forward(mapping, make(scores), axis, masked, out) is out
                    np.testing.assert_array_equal(np.asarray(out), np.asarray(p))


@pytest.mark.parametrize("low", [-50.0, -1000.0, -9000.0, -20000.0])
def test_a_budget_in_doubles_is_as_good_beside_a_score_far_below(low):
    x = np.random.default_rng(0).normal(size=(20, 32)) * 0.3
    x[:, 0] = low
    p = am.budget(x, 2.0)
    with am.use("reference"):
        assert abs(p - am.budget(x, 2.0)).max() < 2e-15


@pytest.mark.parametrize("n", [2, 20, 128, 1000, 5000])
@pytest.mark.parametrize("p", [1e-6, 0.3, 0.9, 0.999])
def test_of_ties_at_the_end_of_a_nucleus_the_first_are_kept(n, p):
    x = torch.cat([torch.zeros(3, n), (torch.randn(20, n) * 3).round()])
    got = am.sparse_softmax(x, p=p)
    saved = am.sparse_softmax(x.requires_grad_(), p=p)
    with am.use("reference"):
        less, want, more = (am.sparse_softmax(x.detach().double(), p=q) for q in (p * (1 - 3e-7), p, p * (1 + 3e-7)))
    firm = ((less > 0) == (more > 0)).all(-1)  # rounding does not move the end
    assert firm.any()
    assert torch.equal(got[firm] > 0, want[firm] > 0)
    assert torch.equal(saved[firm] > 0, want[firm] > 0)
    torch.testing.assert_close(got[firm].double(), want[firm], atol=2e-7, rtol=0)


PAST = (am.Softmax(), am.Sparsemax(), am.Entmax(4 / 3), am.Budget(5), am.SparseSoftmax(k=3), am.SparseSoftmax(k=30))


@pytest.mark.whole(lambda n: n in (33, 1000))
@pytest.mark.parametrize("n", [33, 100, 128, 1000, 32001])
def test_results_written_past_the_caches_are_those_of_their_pieces(n):
    rows = (36 << 20) // (4 * n)  # more than the cache of most machines, three quarters of which is enough
    x = torch.randn(rows * n + 3)[3:].view(rows, n)  # rows that begin anywhere
    out = torch.empty(rows * n + 1)[1:].view(rows, n)
    for mapping in PAST:
        am.apply(mapping, x, out=out)
        for piece in torch.arange(rows).tensor_split(5):
            assert torch.equal(out[piece], am.apply(mapping, x[piece])), mapping


MIDDLING = (
    *(am.Entmax(alpha) for alpha in (4 / 3, 1.25, 1.2, 1.1, 1.45, 1.7, 1.95)),
    *(am.NormMax(alpha) for alpha in (2.0, 1.3, 40.0)),
    *(am.Budget(k) for k in (1, 2.5, 16, 1e-3)),
    *(am.SparseSoftmax(k=k) for k in (5, 15, 32)),
)


@pytest.mark.whole(lambda n: n not in (33, 128, 500, 2048))
@pytest.mark.parametrize("n", [33, 64, 100, 128, 129, 256, 500, 1000, 2048])
@pytest.mark.parametrize("mapping", MIDDLING, ids=repr)
def test_rows_of_middling_length_are_right_to_the_last_digits(mapping, n):
    g = np.random.default_rng(n)
    for size in (0.02, 0.5, 1.0, 8.0, 100.0):
        x = (g.normal(size=(37, n)) * size).astype("float32")
        x[3] = -np.inf
        x[4, : n // 2 - 1] = -np.inf  # one score more than half is left
        x[5] = 5.0
        x[6, 1] = np.nan
        x[7, n // 2 :] = -1e30
        x[8] += 1000.0
        x[9, 3] = np.inf
        x[10] = g.standard_cauchy(n) * size
        x[11] = np.round(x[11] * 4) / 4  # ties
        p = am.apply(mapping, x)
        want = am.apply(mapping, x.astype("float64"))
        np.testing.assert_array_equal(np.isnan(p), np.isnan(want))
        np.testing.assert_allclose(p, want, rtol=2e-6, atol=4e-7)
        for row in (0, 2, 8, 10, 11, 17, 30):  # whatever is beside it
            np.testing.assert_array_equal(am.apply(mapping, x[row : row + 1])[0], p[row])
        out = x.copy()
        np.testing.assert_array_equal(am.apply(mapping, out, out=out), p)


@pytest.mark.parametrize("offset", [1e8, 1e17, -1e20, 3e38])
@pytest.mark.parametrize("k", [1e-6, 0.1, 1.0, 2.5, 30.0])
def test_a_budget_of_scores_of_any_size_is_spent(k, offset):
    for n in (100, 165, 1000):
        x = (np.random.default_rng(n).normal(size=(3, n)) + offset).astype("float32")
        np.testing.assert_allclose(am.budget(x, k).sum(-1), k, rtol=1e-5)


@pytest.mark.parametrize("kind", ["float32", "float64"])
@pytest.mark.parametrize("rows", ["normal", "far apart", "ties", "sorted"])
@pytest.mark.parametrize("p", [0.3, 0.9, 0.999])
def test_where_a_long_nucleus_ends(p, rows, kind):
    """In a row of three pieces; by sums in doubles, of which a sum of the engine may be a rounding error away."""
    x = np.random.default_rng(5).standard_normal(150_000)
    x = {"normal": x, "far apart": 4 * x, "ties": np.round(x, 2), "sorted": np.sort(x)}[rows].astype(kind)
    kept = np.flatnonzero(ENGINE.forward(am.SparseSoftmax(p=p), x[None])[0])
    order = np.argsort(-x, kind="stable")
    upto = np.cumsum(np.exp((x - x.max()).astype("float64"))[order])
    error = {"float32": 3e-6, "float64": 1e-12}[kind] * upto[-1]
    assert set(kept) == set(order[: len(kept)])
    assert upto[len(kept) - 1] >= p * upto[-1] - error
    assert upto[len(kept) - 2] < p * upto[-1] + error


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_nucleus_of_a_thread_that_takes_small_numbers_for_0(dtype):
    """As XLA's threads do: where the nucleus ends at scores of 0, no number lies between 0 and the smallest normal one."""
    if torch is None:
        pytest.skip("torch is not installed")
    g = np.random.default_rng(0)
    rows = [
        np.full(100, -np.inf),
        np.full(100, -np.inf),
        np.full(300, -50.0),
        g.integers(-2, 3, 70),
        g.integers(-1, 2, 2000),
    ]
    rows[0][:3], rows[1][:3], rows[2][:9] = 0.0, [0.0, 1.0, 0.0], 0.0
    for row, p in itertools.product(rows, (0.3, 0.5, 0.8, 0.9)):
        x = torch.tensor(np.asarray(row, dtype))[None]
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor keeps them")
        try:
            flushed = am.sparse_softmax(x, p=p)
        finally:
            torch.set_flush_denormal(False)
        assert torch.equal(flushed, am.sparse_softmax(x, p=p))
        torch.testing.assert_close(flushed.sum(), torch.ones((), dtype=x.dtype))
