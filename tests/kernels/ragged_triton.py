"""Ragged rows on a GPU against a loop over the segments by the reference.

On a GPU it runs for real: `pytest tests/kernels/ragged_triton.py`.
Without one, test_triton.py runs this file in Triton's interpreter.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import row_cases
from triton_place import DEVICE, REAL, WARNINGS

torch = pytest.importorskip("torch")

import anymax as am
from anymax.kernels.engine import SegmentsAlong
from anymax.kernels.triton import launch, plans, ragged, segments

pytestmark = WARNINGS

LENGTHS = [4, 0, 5, 1, 3, 37, 0]
LONG = [3, 300, 0, 20, 1] if not REAL else [3, 40_000, 0, 3000, 1]
MAPS = row_cases.MAPS | {
    "budget": am.Budget(2.5), "normmax-3": am.NormMax(3.0), "top-k": am.SparseSoftmax(k=2), "top-p": am.SparseSoftmax(p=0.8),
}  # fmt: skip
each_map = pytest.mark.parametrize("name", MAPS)
each_few = pytest.mark.parametrize("name", ["softmax", "entmax-1.5", "budget", "top-k"])
EPS = {"float32": 2.0**-20, "bfloat16": 2.0**-7, "float16": 2.0**-9}
STEPS = plans.Plan(1, 2, 64, False, 4)  # a long segment, on a small scale


@pytest.fixture(autouse=True)
def _asked():
    with am.use("triton") if not REAL else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def long_ones():
    """Segments of more than 16 entries go by in steps, with few or many lanes that have a probability."""
    before = plans.FEW, segments._LENGTHS, segments._SPARE
    plans.FEW, segments._LENGTHS, segments._SPARE = 16, (16,), 0
    families, plan = dict(plans.FAMILIES), plans.plan

    def stepped(kernel, rows, n, *words):
        return STEPS if n > 16 else plan(kernel, rows, n, *words)

    launch.plan = stepped
    try:
        yield
    finally:
        launch.plan = plan
        plans.FEW, segments._LENGTHS, segments._SPARE = before
        assert families == plans.FAMILIES


def scores(count, *heads, dtype="float32", seed=0):
    return row_cases.rows(count, dtype, heads, seed=seed, device=DEVICE).movedim(-1, 0).contiguous()


def by_segment(verb, index, *tensors):
    """verb(rows ...) of each segment and head by the reference in fp64, of the shape of the first."""
    out = torch.zeros(tensors[0].shape, dtype=torch.float64, device=DEVICE)
    with am.use("reference"):
        for s in range(int(index.max()) + 1):
            own = np.flatnonzero(index == s)
            for head in np.ndindex(*tensors[0].shape[1:]):
                if len(own):
                    out[(own, *head)] = verb(*(t.double()[(own, *head)] for t in tensors))
    return out


def index_of(lengths, shuffled=False):
    index = np.repeat(np.arange(len(lengths)), lengths)
    return np.random.default_rng(1).permutation(index) if shuffled else index


def rowwise(mapping):
    """Of rows that may have fewer entries than a budget: then each has 1."""
    mass = getattr(mapping, "mass", 1.0)
    return lambda x: torch.ones_like(x) if len(x) <= mass and mass > 1 else am.apply(mapping, x)


def close(got, want, atol):
    assert got.shape == want.shape
    assert float((got.double() - want.double()).abs().max()) <= atol


@each_map
def test_p_is_that_of_the_rows(name):
    mapping, index = MAPS[name], index_of(LENGTHS, shuffled=True)
    x = scores(len(index), 3)
    want = by_segment(rowwise(mapping), index, x)
    close(am.segment_apply(mapping, x, index=index, num_segments=len(LENGTHS)), want, 2e-6)


@each_few
def test_p_of_one_head(name):
    mapping, x = MAPS[name], scores(sum(LENGTHS))
    want = by_segment(rowwise(mapping), index_of(LENGTHS), x)
    close(am.segment_apply(mapping, x, lengths=LENGTHS), want, 2e-6)


@each_map
def test_long_segments_go_by_in_steps(name):
    mapping, index = MAPS[name], index_of(LONG)
    x = scores(len(index), 1 if name == "top-p" else 2)
    x[5:8] = 9.0  # few lanes of one segment have a probability
    with long_ones():
        got = am.segment_apply(mapping, x, lengths=LONG)
    close(got, by_segment(rowwise(mapping), index, x), 5e-6)


def test_long_segments_in_place():
    index = index_of(LONG)
    x = scores(len(index), 2)
    x[5:8] = 9.0
    want = by_segment(lambda row: am.apply(am.Sparsemax(), row), index, x)
    with long_ones():
        engine = ragged.TritonSegments(SegmentsAlong(am.Segments.of(lengths=LONG), 0))
        entries = engine.entries(am.Sparsemax(), x)
        entries.each(lambda cut: launch.run("p", entries.link, x, out=x, cut=cut))
    close(x, want, 2e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@each_few
def test_halves(name, dtype):
    mapping, index = MAPS[name], index_of(LENGTHS, shuffled=True)
    x = scores(len(index), 2, dtype=dtype)
    got = am.segment_apply(mapping, x, index=index)
    assert got.dtype == x.dtype
    close(got, by_segment(rowwise(mapping), index, x), EPS[dtype])


@pytest.mark.parametrize(
    ("name", "long"),
    [*((name, False) for name in MAPS), *((name, True) for name in ("softmax", "entmax-3", "normmax-2", "taylor"))],
)
def test_gradients(name, long):
    mapping, lengths = MAPS[name], LONG if long else LENGTHS
    index = index_of(lengths, shuffled=not long)
    x = scores(len(index), 2).requires_grad_()
    g = scores(len(index), 2, seed=9)
    with long_ones() if long else contextlib.nullcontext():
        p = am.segment_apply(mapping, x, index=index, num_segments=len(lengths))
        assert type(p.grad_fn).__name__ == "SegmentApplyBackward"
        (got,) = torch.autograd.grad(p, x, g)

    def slope(x, g):
        free = x.clone().requires_grad_()
        out = rowwise(mapping)(free)
        return torch.autograd.grad(out, free, g)[0] if out.requires_grad else torch.zeros_like(x)

    want = by_segment(slope, index, x.detach(), g)
    close(got, want, 2e-5 * max(1.0, float(want.abs().max())))


@pytest.mark.parametrize("name", ["softmax", "top-k", "top-p", "sigsoftmax", "sparsemax"])
def test_logarithms(name):
    mapping, index = MAPS[name], index_of(LENGTHS, shuffled=True)
    x = scores(len(index), 2).requires_grad_()
    log_p = am.segment_log_apply(mapping, x, index=index, num_segments=len(LENGTHS))
    want = by_segment(lambda row: am.log_apply(mapping, row), index, x.detach())
    assert torch.equal(log_p == -torch.inf, want == -torch.inf)
    some = want > -torch.inf
    close(log_p.detach()[some], want[some], 4e-6)
    g = torch.where(some, scores(len(index), 2, seed=9).double(), 0.0)
    (got,) = torch.autograd.grad(log_p, x, g.float())

    def slope(x, g):
        free = x.clone().requires_grad_()
        out = am.log_apply(mapping, free)
        return torch.autograd.grad(out, free, torch.where(out > -torch.inf, g, 0.0))[0]

    want = by_segment(slope, index, x.detach(), g)
    if name != "sparsemax":
        close(got, want, 2e-5 * max(1.0, float(want.abs().max())))


@pytest.mark.parametrize(
    ("name", "long"),
    [
        *((name, False) for name in ("softmax", "sparsemax", "entmax-1.7", "normmax-2", "top-k")),
        ("softmax", True),
        ("sparsemax", True),
    ],
)
def test_losses_and_thresholds(name, long):
    mapping, lengths = MAPS[name], LONG if long else LENGTHS
    index, ptr = index_of(lengths), np.concatenate([[0], np.cumsum(lengths)])
    x = scores(len(index), 2).requires_grad_()
    t = torch.as_tensor(np.stack([ptr[:-1], ptr[1:] - 1], 1), device=DEVICE)  # the first and the last entry
    t[np.asarray(lengths) == 0] = -100
    t[0] = -100
    with long_ones() if long else contextlib.nullcontext():
        value = am.segment_loss(mapping, x, t, lengths=lengths, reduction="none")
        # a GPU's rows of NaN are set after it
        made = [value.grad_fn, *(parent for parent, _ in value.grad_fn.next_functions)]
        assert "SegmentIndexLossBackward" in [type(function).__name__ for function in made]
        (got,) = torch.autograd.grad(
            (value * (1.0 + torch.arange(value.numel(), device=DEVICE).view_as(value))).sum(), x
        )
        tau, support = am.segment_threshold(mapping, x.detach(), lengths=lengths)
        level = am.segment_logsumexp(x.detach(), lengths=lengths)
    y = x.detach().double().requires_grad_()
    with am.use("reference"):
        want = am.segment_loss(mapping, y, t, lengths=lengths, reduction="none")
        (slope,) = torch.autograd.grad(
            (want * (1.0 + torch.arange(want.numel(), device=DEVICE).view_as(want))).sum(), y
        )
        taus, supports = am.segment_threshold(mapping, y.detach(), lengths=lengths)
        levels = am.segment_logsumexp(y.detach(), lengths=lengths)
    close(value.detach(), want.detach(), 2e-5)
    close(got, slope, 1e-5 * max(1.0, float(slope.abs().max())))
    for a, b in ((tau, taus), (level, levels)):
        assert torch.equal(a == -torch.inf, b == -torch.inf)
        close(a[b > -torch.inf], b[b > -torch.inf], 1e-5)
    assert torch.equal(support, supports)


@each_few
def test_strange_segments_touch_no_other(name):
    x = scores(sum(LENGTHS), 2)
    want = am.segment_apply(MAPS[name], x, lengths=LENGTHS)
    y = x.clone()
    y[1, 0], y[10, 1], y[20, 0] = torch.nan, torch.inf, -torch.inf
    y[9] = -torch.inf  # all of a segment
    got = am.segment_apply(MAPS[name], y, lengths=LENGTHS)
    index = index_of(LENGTHS)
    assert bool(got[index == 0][:, 0].isnan().all())
    assert bool(got[index == 4][:, 1].isnan().all())
    assert not bool(got[9].any())
    assert not bool(got[20, 0])
    assert torch.equal(got[index == 2], want[index == 2])
    assert torch.equal(got[index == 0][:, 1], want[index == 0][:, 1])
    assert torch.equal(got[index == 5][:, 1], want[index == 5][:, 1])


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_any_axis_and_strides(axis):
    shape = [2, 3, 2]
    shape[axis] = sum(LENGTHS)
    x = scores(*shape)
    with am.use("reference"):
        want = am.segment_apply("entmax15", x.double(), lengths=LENGTHS, axis=axis)
    for y in (x, x.transpose(0, 2).contiguous().transpose(0, 2), x.repeat_interleave(2, 1)[:, ::2]):
        got = am.segment_apply("entmax15", y, lengths=LENGTHS, axis=axis)
        close(got, want, 2e-6)
    x = x.requires_grad_()
    (got,) = torch.autograd.grad((am.segment_apply("entmax15", x, lengths=LENGTHS, axis=axis) ** 2).sum(), x)
    y = x.detach().double().requires_grad_()
    with am.use("reference"):
        (want,) = torch.autograd.grad((am.segment_apply("entmax15", y, lengths=LENGTHS, axis=axis) ** 2).sum(), y)
    close(got, want, 1e-5)


@pytest.mark.parametrize("kind", [am.Entmax, am.Budget, lambda v: am.SparseSoftmax(p=v / 3)], ids=["alpha", "k", "p"])
def test_a_parameter_of_each_segment(kind):
    each = torch.linspace(1.1, 2.7, len(LENGTHS) * 2, device=DEVICE).reshape(-1, 2)
    x = scores(sum(LENGTHS), 2)
    got = am.segment_apply(kind(each), x, lengths=LENGTHS)
    with am.use("reference"):
        want = am.segment_apply(kind(each.double()), x.double(), lengths=LENGTHS)
    close(got, want, 5e-6)


def test_no_entries():
    x = scores(0, 2)
    assert am.segment_apply("sparsemax", x, lengths=[0, 0]).shape == (0, 2)
    tau, support = am.segment_threshold("sparsemax", x, lengths=[0, 0])
    assert tau.tolist() == [[-torch.inf] * 2] * 2
    assert not bool(support.any())


def test_what_it_refuses_is_served_by_padded_rows():
    x, mapping = scores(5), am.PerturbMax("logistic", nodes=16)
    engine = ragged.TritonSegments(SegmentsAlong(am.Segments.of(lengths=[3, 2]), 0))
    assert "perturb_max" in engine.refuse("forward", mapping, x)
    assert "float64" in engine.refuse("forward", am.Sparsemax(), x.double())
    with am.use("reference"):
        assert "reference is asked for" in engine.refuse("forward", am.Sparsemax(), x)
        want = am.segment_apply(mapping, x.double(), lengths=[3, 2])
    close(am.segment_apply(mapping, x, lengths=[3, 2]), want, 1e-3)


def test_segments_are_launched_by_their_lengths():
    rng = np.random.default_rng(0)
    lengths = np.concatenate([rng.integers(0, 17, 60_000), rng.integers(17, 65, 100), [900, 20_000, 0]])
    made = segments.launches(torch.as_tensor(np.concatenate([[0], np.cumsum(lengths)])))
    assert all(one.ids.dtype == torch.int32 for one in made)
    made = [one._replace(ids=one.ids.numpy()) for one in made]
    assert sorted(np.concatenate([one.ids for one in made]).tolist()) == list(range(len(lengths)))
    assert [one.longest for one in made] == [16, 900, 20_000]  # the 100 go with the one of 900 entries
    for one in made:
        assert one.longest == lengths[one.ids].max()
        assert (np.diff(one.ids) > 0).all()
    (empty,) = segments.launches(torch.zeros(4, dtype=torch.int64))
    assert (empty.ids.tolist(), empty.longest) == ([0, 1, 2], 0)
    assert segments.launches(torch.zeros(1, dtype=torch.int64)) == ()
