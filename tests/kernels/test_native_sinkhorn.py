"""Sinkhorn by the C++ engine against the plain steps in float64: every instruction set, small matrices together and single ones."""

from __future__ import annotations

import array_api_compat.torch as xp
import numpy as np
import pytest
from engine_state import by_threads, instructions

torch = pytest.importorskip("torch")

import anymax as am
from anymax.kernels import engine_of, native
from anymax.kernels.native import ENGINE
from anymax.kernels.tasks import SINKHORN
from anymax.kernels.tasks import Sinkhorn as Task
from anymax.transport import Sinkhorn, plain
from anymax.transport.problem import Given, problem

if isinstance(native.load(), str):
    pytest.skip(f"no compiled library: {native.load()}", allow_module_level=True)
native.engine_for(torch.empty(0))  # the engine takes tensors in whichever test comes first


@pytest.fixture(params=native.load().isas())
def isa(request):
    with instructions(request.param):
        yield request.param


def draw(*shape, seed=0, sigma=1.0):
    return sigma * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sums(*shape, total=None, seed=0):
    a = 0.1 + torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return a if total is None else a * (total / a.sum(-1, keepdim=True))


def wide(task, x, g):
    """P and the gradient of the scores, by autograd through plain steps in float64."""
    x = x.detach().double().clone().requires_grad_()
    rows, columns = (None if a is None else a.double() for a in (task.rows, task.columns))
    if rows is not None and columns is not None:  # totals that are equal in float32
        columns = columns * (rows.sum(-1, keepdim=True) / columns.sum(-1, keepdim=True))
    p = plain.steps(problem(Given(x, rows, columns, task.temperature), xp), task.iterations, xp)
    p.backward(g.double())
    return p.detach(), x.grad


def holds(task, x, g, bound):
    p, slope = ENGINE.sinkhorn(task, x), ENGINE.sinkhorn(task, x, g)
    want, want_slope = wide(task, x, g)
    assert (p - want).abs().max() <= bound * want.abs().max()
    assert (slope - want_slope).abs().max() <= 10 * bound * max(1.0, want_slope.abs().max())
    assert not torch.isnan(slope).any()


SHAPES = [(b, 4, 4) for b in (1, 2, 16, 53)] + [(37, n, m) for n, m in ((1, 1), (8, 8), (2, 7), (7, 3))]
SHAPES += [(19, 9, 9), (3, 70, 33), (5, 3, 20), (33, 33, 33), (17, 40, 8), (18, 64, 40)]
SOON = {"float32": [(53, 4, 4), (37, 7, 3), (19, 9, 9), (17, 40, 8)], "float64": [(16, 4, 4), (37, 2, 7), (5, 3, 20)]}


@pytest.mark.whole(lambda shape, dtype: shape not in SOON[dtype])
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_forward_and_backward(shape, dtype):
    kind, eps = getattr(torch, dtype), {"float32": 2.0**-23, "float64": 2.0**-52}[dtype]
    x, g = draw(*shape).to(kind), draw(*shape, seed=1).to(kind)
    rows = sums(*shape[:-1]).to(kind)
    columns = sums(shape[0], shape[-1], total=rows.double().sum(-1, keepdim=True), seed=1).to(kind)
    same = sums(shape[1], total=2.0).to(kind), sums(shape[2], total=2.0, seed=1).to(kind)
    for given in ((None, None), (rows, columns), (rows, None), (None, columns), same):
        for iterations, temperature in ((1, 1.0), (20, 1.0), (6, 0.3)):
            holds(Task(*given, iterations, temperature), x, g, 40 * eps)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("shape", [(35, 4, 4), (35, 6, 5), (4, 30, 40)], ids=str)
def test_large_scores_and_masks_among_others(shape):
    """Some matrices of a vector go by themselves: their entries are far apart or masked, or their sums."""
    x, g = draw(*shape), draw(*shape, seed=1)
    x[::3] *= 400.0
    x[1::5][torch.rand(x[1::5].shape, generator=torch.Generator().manual_seed(2)) < 0.3] = -torch.inf
    x[2] = -torch.inf
    x[3, 0], x[3, :, 0] = -torch.inf, -torch.inf
    holds(Task(None, None, 20, 1.0), x, g, 1e-12)
    rows = sums(*shape[:-1])
    rows[0, 0], rows[-1, -1] = 1e-9, 0.0
    columns = sums(shape[0], shape[-1], total=rows.sum(-1, keepdim=True))
    given = draw(*shape), rows, columns, 7, 1.0
    holds(Task(*given[1:]), given[0], g, 1e-12)
    # a step of 80 or more between potentials: entries are computed anew
    steep = (
        torch.linspace(0, 3000, shape[-1], dtype=torch.float64).flip(-1)
        * torch.linspace(-1, 1, shape[-2], dtype=torch.float64)[:, None]
    )
    holds(Task(None, None, 9, 1.0), x.clamp(-3, 3) + steep, g, 1e-11)
    holds(Task(None, None, 9, 1.0), (x.clamp(-3, 3) + steep / 10).float(), g.float(), 5e-5)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("iterations", [40, 400])
def test_factors_that_grow_without_end(iterations):
    """Sums that a mask does not allow: each iteration doubles some factors, until they go to the potentials."""
    x, g = draw(5, 3, 3), draw(5, 3, 3, seed=1)
    x[:, :2, 1:] = -torch.inf
    holds(Task(None, None, iterations, 1.0), x.float(), g.float(), 1e-5)
    holds(Task(None, None, iterations, 1.0), x, g, 1e-12)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_limit_and_what_it_lacks(dtype):
    for shape in ((35, 4, 4), (35, 3, 8), (3, 40, 50)):
        x = draw(*shape).to(dtype)
        x[0] *= 100.0  # too slow for so few iterations
        tolerance = 4e-7 if dtype is torch.float32 else 1e-12
        p, left = ENGINE.sinkhorn_limit(Task(None, None, 300, 1.0), x, tolerance)
        assert left.shape == shape[:1]
        assert left[0] > tolerance
        assert (left[1:] <= tolerance).all()
        assert ((p.sum(-1) - 1).abs()[1:] <= 2 * tolerance).all()
        assert ((p.sum(-2) - shape[1] / shape[2]).abs() <= 2 * tolerance).all()
        alone, _ = ENGINE.sinkhorn_limit(Task(None, None, 300, 1.0), x[7:8].clone(), tolerance)
        torch.testing.assert_close(alone, p[7:8], rtol=1e-5 if dtype is torch.float32 else 1e-10, atol=0)


def test_a_matrix_does_not_depend_on_the_others_of_its_vector():
    x = draw(16, 4, 4).float()
    other = x.clone()
    other[1:] = draw(15, 4, 4, seed=5, sigma=3.0).float()
    for call in (lambda a: Sinkhorn(20)(a), lambda a: Sinkhorn(None)(a)):
        assert torch.equal(call(x)[0], call(other)[0])


def test_threads_change_nothing():
    x, g = draw(5000, 4, 4).float(), draw(5000, 4, 4, seed=1).float()
    task = Task(None, None, 20, 1.0)
    found = by_threads((1, 2), lambda: (ENGINE.sinkhorn(task, x), ENGINE.sinkhorn(task, x, g)))
    assert all(torch.equal(a, b) for a, b in zip(*found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(300, 300), (257, 401), (70, 1000), (2000, 40)])
def test_threads_that_share_one_matrix_change_nothing(isa, shape, dtype):
    x, g = draw(*shape).to(dtype), draw(*shape, seed=1).to(dtype)
    x[3], x[5:40:7, ::3] = -torch.inf, -torch.inf
    for temperature in (1.0, 0.01, 0.002):  # factors that leave their range, too
        task = Task(None, None, 5, temperature)
        found = by_threads((1, 2, 3), lambda task=task: (ENGINE.sinkhorn(task, x), ENGINE.sinkhorn(task, x, g)))
        assert not torch.isnan(found[0][0]).any()
        assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    x[-1, -1] = torch.nan
    assert all(torch.isnan(p).all() for p in by_threads((1, 2), lambda: ENGINE.sinkhorn(task, x)))


def test_numpy_and_strides():
    x = draw(9, 4, 5).numpy()
    want = Sinkhorn(5)(x)
    for given in (np.asfortranarray(x), np.repeat(x, 2, 1)[:, ::2], x[::-1][::-1]):
        np.testing.assert_array_equal(Sinkhorn(5)(given), want)
    with am.use("reference"):
        np.testing.assert_allclose(Sinkhorn(5)(x), want, rtol=1e-12)


def test_what_the_engine_refuses():
    x = torch.zeros(2, 4, 4)
    task = Task(None, None, 3, 1.0)
    assert engine_of(SINKHORN, task, x) is ENGINE
    assert "it takes float32 and float64" in ENGINE.refuse_task(SINKHORN, task, x.half())
    with am.use("reference"):
        assert engine_of(SINKHORN, task, x) is None
    engine, out = native.engine_for(x), torch.full_like(x, torch.nan)
    for given in (
        (x, torch.ones(3), None, None, out), (x, None, torch.ones(2, 3), None, out), (x, None, None, torch.zeros(2, 4), out),
        (x, None, None, None, torch.zeros(2, 4)), (x.mT, None, None, None, out), (x[0, 0], None, None, None, out[0, 0]),
        (x, torch.ones(4).double(), None, None, out), (x, None, None, None, out.double()),
    ):  # fmt: skip
        if given[0] is not x.mT:
            assert engine.sinkhorn(*given, 3, 1.0, 0.0, None) is None
    assert torch.isnan(out).all()
    for wrong in ((0, 1.0, 0.0), (3, 0.0, 0.0), (3, -1.0, 0.0), (3, 1.0, -1.0), (3, 1.0, 0.1)):
        with pytest.raises((RuntimeError, ValueError)):
            engine.sinkhorn(x, None, None, None, out, *wrong, None)
