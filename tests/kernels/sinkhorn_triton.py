"""Sinkhorn of 4 x 4 matrices on a GPU against the plain steps in float64.

On a GPU it runs for real: `pytest tests/kernels/sinkhorn_triton.py`.
Without one, test_triton.py runs this file in Triton's interpreter.
"""

from __future__ import annotations

import array_api_compat.torch as xp
import pytest
from triton_place import DEVICE, REAL, WARNINGS

torch = pytest.importorskip("torch")

from anymax.kernels.tasks import SINKHORN
from anymax.kernels.tasks import Sinkhorn as Task
from anymax.kernels.triton import ENGINE, sinkhorn_kernels
from anymax.transport import Sinkhorn, plain
from anymax.transport.problem import Given, problem

pytestmark = WARNINGS
COUNT = 100_003 if REAL else 300


def draw(count, seed=0, sigma=2.0):
    return sigma * torch.randn((count, 4, 4), generator=torch.Generator().manual_seed(seed))


def wide(x, g, iterations, temperature=1.0):
    """P and the gradient of x by autograd through plain steps in float64."""
    x = x.double().requires_grad_()
    p = plain.steps(problem(Given(x, None, None, temperature), xp), iterations, xp)
    p.backward(g.double())
    return p.detach(), x.grad


def both(x, g, iterations, temperature=1.0):
    x, g = x.to(DEVICE), g.to(DEVICE)
    return tuple(sinkhorn_kernels.run(x, way, iterations, temperature).cpu() for way in (None, g))


@pytest.mark.parametrize("iterations", [1, 2, 20])
@pytest.mark.parametrize("sigma", [0.5, 30.0])
def test_sinkhorn_forward_and_backward(iterations, sigma, monkeypatch):
    monkeypatch.setattr(sinkhorn_kernels, "PROGRAMS", 2)  # a program takes several blocks
    x, g = draw(COUNT, sigma=sigma), draw(COUNT, 1)
    p, slope = both(x, g, iterations, 0.7)
    want, want_slope = wide(x, g, iterations, 0.7)
    assert (p - want).abs().max() < 1e-5
    assert (slope - want_slope).abs().max() < 5e-5 * want_slope.abs().max()
    assert (p.sum(-2) - 1).abs().max() < 1e-6


def test_sinkhorn_masks_and_poison():
    x, g = draw(40), draw(40, 1)
    x[:20][torch.rand((20, 4, 4), generator=torch.Generator().manual_seed(2)) < 0.3] = -torch.inf
    x[3] = -torch.inf
    x[4, 1] = -torch.inf
    x[5, :, 2] = -torch.inf
    x[30, 1, 2], x[35, 0, 0] = torch.nan, torch.inf
    p, slope = both(x, g, 5)
    want, want_slope = wide(x, g, 5)
    torch.testing.assert_close(p.double(), want, rtol=1e-5, atol=1e-6, equal_nan=True)
    sound = ~torch.isnan(want[:, 0, 0])
    assert sound.sum() == 38
    torch.testing.assert_close(slope.double()[sound], want_slope[sound], rtol=1e-4, atol=1e-5)
    assert torch.isfinite(slope[sound]).all()


@pytest.mark.skipif(not REAL, reason="which tensors the kernels take")
def test_sinkhorn_of_tensors_on_the_gpu():
    x = draw(1000).to(DEVICE).requires_grad_()
    assert ENGINE.refuse_task(SINKHORN, Task(None, None, 20, 1.0), x) is None
    g = draw(1000, 1).to(DEVICE)
    Sinkhorn()(x).backward(g)
    torch.testing.assert_close(x.grad.cpu().double(), wide(x.detach().cpu(), g.cpu(), 20)[1], rtol=1e-3, atol=1e-5)
    half = x.detach().bfloat16()
    assert torch.equal(Sinkhorn()(half), Sinkhorn()(half.float()).bfloat16())
