"""NormMax of any alpha: its norm is that of p over the largest, whose powers are numbers where those of p are none."""

import numpy as np
import oracles
import pytest
from row_cases import torch

import anymax as am
from anymax import NormMax
from anymax.kernels import native, reference

ENGINES = [reference.ENGINE] if isinstance(native.load(), str) else [reference.ENGINE, native.ENGINE]
ALPHAS = (1.01, 1.5, 2.0, 4.0, 16.0, 60.0, 80.0, 200.0, 1000.0)
ROWS = {
    "3 apart": lambda random: np.array([1.0, 0.5, 0.3]),
    "20 normal": lambda random: random.normal(size=20),
    "256 alike": lambda random: random.normal(size=256) * 1e-3,
    "1000 normal": lambda random: random.normal(size=1000),
    "1000 alike": lambda random: random.normal(size=1000) * 1e-3,
}
DTYPES = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-8}

each_engine = pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
each_alpha = pytest.mark.parametrize("alpha", ALPHAS)


def operands(row, dtype):
    """Scores, and a gradient whose mean by p is not near to 0."""
    random = np.random.default_rng(5)
    x = ROWS[row](random)
    return torch.tensor(x)[None].to(dtype), torch.tensor(random.normal(size=x.size) + 0.5)[None].to(dtype)


@each_engine
@each_alpha
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", DTYPES)
def test_the_derivatives_are_those_of_300_digits(engine, alpha, row, name):
    x, g = operands(row, getattr(torch, name))
    mapping, eps = NormMax(alpha), DTYPES[name]
    p = engine.forward(mapping, x, None)
    want, slope = oracles.normmax_derivatives(p[0].tolist(), g[0].tolist(), alpha)
    lost = DTYPES["float32" if name == "bfloat16" else name] * (8.0 + alpha) + eps
    part = float(g.abs().max()) / (alpha - 1.0)  # of the parts that J^T g is a sum of
    got = engine.vjp(mapping, x, p, g)[0].double().numpy()
    assert np.abs(got - want).max() <= lost * max(part, np.abs(want).max())
    assert abs(float(engine.slope(mapping, "alpha", x, p, g)) - slope) <= lost * part


@each_engine
@each_alpha
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", ["float64", "float32"])
def test_the_loss_and_its_derivative_by_alpha(engine, alpha, row, name):
    (x, _), eps = operands(row, getattr(torch, name)), DTYPES[name]
    free = torch.tensor(alpha, dtype=x.dtype, requires_grad=True)
    alpha, exact = float(free.detach()), x.double().numpy()[0]
    p = reference.ENGINE.forward(NormMax(alpha), x.double(), None)[0].numpy()
    norm, rise = oracles.normmax_norm(p, alpha)
    want = float(p @ (exact - exact[1])) - float(norm) + 1.0
    with am.use(engine.name):
        learned = am.fenchel_young(NormMax(free), x, torch.tensor([1]))
        learned.backward()
        known = am.fenchel_young(NormMax(alpha), x, torch.tensor([1]))
    assert abs(float(known) - want) <= 8 * eps
    assert abs(float(learned.detach()) - want) <= 8 * eps
    assert abs(float(free.grad) + float(rise)) <= (8.0 + alpha) * eps * max(float(norm), abs(float(rise)))


def masked(mapping, x):
    """Every second class of rows twice as long."""
    keep = torch.tensor([True, False]).repeat(x.shape[-1])
    return am.apply(mapping, torch.repeat_interleave(x, 2, -1), mask=keep)[:, ::2]


LAYOUTS = {
    "rows": am.apply,
    "columns": lambda mapping, x: am.apply(mapping, x.T.contiguous(), axis=0).T,
    "masked": masked,
    "segments": lambda mapping, x: am.segment_apply(mapping, x.reshape(-1), lengths=[x.shape[-1]] * len(x)).reshape(
        x.shape
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("alpha", [16.0, 80.0, 1000.0])
def test_every_layout_has_the_gradient_of_a_row(alpha, layout):
    x, g = (torch.tensor(np.random.default_rng(i).normal(size=(3, 400))) for i in (0, 1))
    x = (x * 1e-3).requires_grad_()
    p = LAYOUTS[layout](NormMax(alpha), x)
    got = torch.autograd.grad(p, x, g)[0]
    for i in range(3):
        want = np.array(oracles.normmax_derivatives(p[i].tolist(), g[i].tolist(), alpha)[0])
        assert np.abs(got[i].numpy() - want).max() <= 2e-16 * (8 + alpha) * np.abs(want).max()
