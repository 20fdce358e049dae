"""Routers on a GPU against the reference. On a GPU it runs for real: `pytest tests/kernels/router_triton.py`.

Without one, test_triton.py runs this file in Triton's interpreter.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from triton_place import DEVICE, REAL, WARNINGS

torch = pytest.importorskip("torch")

import anymax as am
from anymax._array import namespace
from anymax.kernels import engine_of
from anymax.kernels.selection import chosen
from anymax.kernels.tasks import SELECT, WHOLE, Groups
from anymax.kernels.triton import ENGINE
from anymax.routing import route
from anymax.sampling import top

pytestmark = WARNINGS

SHAPES = {
    "few": (17, 5, None), "experts": (256, 8, None), "eight groups": (256, 8, Groups(8, 4, 2)), "of 40": (320, 8, Groups(8, 4, 2)),
    "by the largest": (64, 4, Groups(8, 3, 1)), "five of three": (60, 6, Groups(12, 4, 3)), "uneven": (21, 4, Groups(3, 2, 2)),
    "more than are left": (24, 9, Groups(4, 1, 2)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _by_triton():
    with am.use("triton"):
        yield


def tied(rows, n, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    x = np.round(rng.normal(size=(rows, n)) * 4) / 4
    x[rng.random(x.shape) < 0.15] = -math.inf
    x[0], x[1, 1:], x[2, 3] = -math.inf, -math.inf, math.nan
    return torch.tensor(x, dtype=getattr(torch, dtype), device=DEVICE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_ids_are_those_of_the_reference(shape, dtype):
    n, k, groups = SHAPES[shape]
    x = tied(12, n, dtype)
    assert engine_of(SELECT, (k, WHOLE), x) is ENGINE
    got = chosen(x, k, namespace(x), groups)
    with am.use("reference"):
        want = chosen(x.cpu(), k, namespace(x), groups)
    assert torch.equal(got.cpu(), want)


CASES = {
    "deepseek-v3": {
        "scoring": "sigmoid", "groups": 4, "keep_groups": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "bias": True,
    },
    "deepseek-v2": {"groups": 4, "keep_groups": 2, "group_by": "max", "routed_scaling_factor": 16.0},
    "deepseek-v4": {"scoring": "sqrtsoftplus", "norm_topk_prob": True, "bias": True},
    "mixtral": {"norm_topk_prob": True}, "jamba": {}, "ernie": {"norm_topk_prob": True, "bias": True}, "llama 4": {"scoring": "sigmoid"},
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_routes_are_those_of_the_reference(case, dtype):
    """The weights too, with a gradient and without one."""
    draw = torch.Generator().manual_seed(1)
    x = (3.0 * torch.randn(9, 48, generator=draw)).to(DEVICE, getattr(torch, dtype))
    x[1, :40], x[2], x[3, 5] = -math.inf, -math.inf, math.nan
    words = dict(CASES[case])
    if words.pop("bias", False):
        words["bias"] = (0.2 * torch.randn(48, generator=draw)).to(DEVICE)
    got, leaf = route(x, 5, **words), x.clone().requires_grad_()
    with_gradient = route(leaf, 5, **words)
    with am.use("reference"):
        want = route(x, 5, **words)
        other = x.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(route(other, 5, **words).weight[4:].square().sum(), other)
    for made in (got, with_gradient):
        assert torch.equal(made.index, want.index)
        torch.testing.assert_close(made.weight.detach(), want.weight, rtol=2e-6, atol=1e-7, equal_nan=True)
    (g,) = torch.autograd.grad(with_gradient.weight[4:].square().sum(), leaf)
    torch.testing.assert_close(g, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_any_axis_strides_and_what_falls_back():
    x = tied(10, 24)
    across = x.T.contiguous()
    assert torch.equal(route(across, 3, axis=0).index.T, route(x, 3).index)
    wide = torch.stack([x, x], -1)[..., 0]  # classes two apart
    assert torch.equal(route(wide, 3).index, route(x, 3).index)
    each = torch.linspace(0, 1, 10, device=DEVICE)[:, None] * torch.ones(10, 24, device=DEVICE)
    assert torch.equal(route(x, 3, "sigmoid", bias=each).index, route(x, 3, "sigmoid", by=x.sigmoid() + each).index)
    assert route(x[:0], 3).index.shape == (0, 3)
    long = torch.randn(2, 5000, device=DEVICE)
    assert "up to 4096 classes" in ENGINE.refuse_task(SELECT, (3, WHOLE), long)
    assert torch.equal(route(long, 3).index, torch.sort(long, dim=-1, descending=True, stable=True).indices[:, :3])
    p = top("softmax", x[4:], 3)
    torch.testing.assert_close(p.p, x[4:].float().softmax(-1).topk(3).values, rtol=1e-5, atol=1e-6)
    if not REAL:
        with am.use("native"):
            assert engine_of(SELECT, (3, WHOLE), x) is not ENGINE
    assert engine_of(SELECT, (3, WHOLE), x.double()) is None
    assert engine_of(SELECT, (3, WHOLE), x.cpu().numpy()) is None
