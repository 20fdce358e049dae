"""p, log p, thresholds and their gradients against plain formulas in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from torch.library import opcheck

from .formulas import MAPS, entmax, scores, slopes

each_map = pytest.mark.parametrize("name", MAPS)
pytestmark = pytest.mark.kernels_ci


@each_map
def test_p_and_its_gradient(kernel, device, name):
    kind, given, formula = MAPS[name]
    x, g = scores(3, 9), scores(3, 9, seed=1)
    leaf = x.float().to(device).requires_grad_()
    p = kernel.apply(leaf, kind, **given)
    tol = 1e-4 if "perturb" in name else 2e-6
    torch.testing.assert_close(p.detach().cpu().double(), formula(x.float().double()), rtol=0, atol=tol)
    p.backward(g.float().to(device))
    want = slopes(formula, x.float().double(), g.float().double())
    torch.testing.assert_close(leaf.grad.cpu().double(), want, rtol=0, atol=20 * tol)
    with torch.no_grad():
        assert torch.equal(kernel.apply(leaf, kind, **given), p)


@pytest.mark.parametrize("name", ["softmax", "sparsemax", "entmax-1.5", "topk", "sigsoftmax"])
def test_masks_axes_and_strange_rows(kernel, device, name):
    kind, given, formula = MAPS[name]
    x = scores(6, 2, 5).float()
    keep = scores(6, 2, 5, seed=3) < 0.9
    keep[:4, 0, 0] = True
    keep[:, 1, 1] = False
    want = torch.zeros_like(x, dtype=torch.float64)
    for i in range(2):
        for j in range(5):
            at = keep[:, i, j].nonzero().flatten()
            if len(at) and not (kind == "topk" and len(at) < 3):
                want[at, i, j] = formula(x.double()[at, i, j])
            elif len(at):
                want[at, i, j] = x.double()[at, i, j].softmax(-1)
    leaf = x.to(device, copy=True).requires_grad_()
    p = kernel.apply(leaf, kind, dim=0, mask=keep.to(device), **given)
    torch.testing.assert_close(p.detach().cpu().double(), want, rtol=0, atol=2e-6)
    p.square().sum().backward()
    assert not leaf.grad.cpu()[~keep].any()
    again = x.masked_fill(~keep, -math.inf).to(device).requires_grad_()
    kernel.apply(again, kind, dim=0, **given).square().sum().backward()
    torch.testing.assert_close(leaf.grad, again.grad)


def test_a_row_of_nan_stays_alone(kernel, device):
    x = scores(3, 7).float().to(device)
    x[1, 2] = math.nan
    p = kernel.sparsemax(x)
    assert p.isnan().any(-1).tolist() == [False, True, False]
    assert p[1].isnan().all()


def test_an_alpha_for_each_row(kernel, device):
    x, alpha = scores(3, 8).float(), torch.tensor([[1.2], [1.5], [2.0]])
    p = kernel.entmax(x.to(device), alpha.to(device)).cpu().double()
    want = torch.stack([entmax(row, float(a)) for row, a in zip(x.double(), alpha)])
    torch.testing.assert_close(p, want, rtol=0, atol=5e-6)
    with pytest.raises(ValueError, match="alpha gets no gradient here"):
        kernel.entmax(x.to(device), alpha.to(device).requires_grad_())


def test_long_rows_and_half_precision(kernel, device):
    x = scores(2, 3000, scale=3.0).to(torch.float16).to(device).requires_grad_()
    p = kernel.entmax15(x)
    torch.testing.assert_close(p.cpu().double(), entmax(x.detach().cpu().double(), 1.5), rtol=1e-3, atol=1e-3)
    g = scores(2, 3000, seed=1).to(torch.float16).to(device)
    p.backward(g)
    s = p.detach().cpu().double().sqrt()
    wide = g.cpu().double()
    want = s * (wide - (s * wide).sum(-1, keepdim=True) / s.sum(-1, keepdim=True))
    torch.testing.assert_close(x.grad.cpu().double(), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("name", "given"), [("softmax", {}), ("topk", {"k": 3}), ("topp", {"p": 0.8})])
def test_log_p(kernel, device, name, given):
    formula = MAPS[name][2]
    x, g = scores(3, 9), scores(3, 9, seed=1)
    leaf = x.float().to(device).requires_grad_()
    log_p = kernel.log_apply(leaf, name, **given)
    want = formula(x.float().double()).log()
    torch.testing.assert_close(log_p.detach().cpu().double(), want, rtol=0, atol=5e-6)
    g = g.masked_fill(want == -math.inf, 0.0)
    log_p.backward(g.float().to(device))
    p = want.exp()
    torch.testing.assert_close(
        leaf.grad.cpu().double(), (g - p * g.sum(-1, keepdim=True)).float().double(), rtol=0, atol=1e-5
    )


def test_thresholds(kernel, device):
    x = scores(4, 11).float().to(device)
    torch.testing.assert_close(kernel.threshold(x, "softmax"), x.logsumexp(-1, keepdim=True), rtol=0, atol=3e-6)
    tau = kernel.threshold(x.T, "sparsemax", dim=0)
    assert tau.shape == (1, 4)
    torch.testing.assert_close((x.T - tau).clamp(min=0), kernel.sparsemax(x.T, dim=0), rtol=0, atol=3e-6)


@pytest.mark.parametrize("name", ["sparsemax", "entmax-1.5", "sigsoftmax"])
def test_compiled_without_breaks(kernel, device, name):
    kind, given, _ = MAPS[name]
    x = scores(3, 9).float().to(device)

    def total(x):
        return kernel.apply(x.sin(), kind, **given).square().sum()

    for shape in (x, x[:2, :5].clone()):
        grads = []
        for f in (total, torch.compile(total, backend="aot_eager", fullgraph=True)):
            leaf = shape.clone().requires_grad_()
            f(leaf).backward()
            grads.append(leaf.grad)
        torch.testing.assert_close(*grads)


def test_operations_are_what_their_schemas_say(kernel, device):
    x = scores(3, 9).float().to(device)
    operations = sys_ops(kernel)
    opcheck(operations.rows, (x, None, "entmax", 1.5, None, 0, 0, False), test_utils=("test_schema", "test_faketensor"))
    opcheck(
        operations.rows_grad,
        (x, x, x, "softmax", 0.0, None, 0, 0, False),
        test_utils=("test_schema", "test_faketensor"),
    )
    index = torch.zeros(3, dtype=torch.int64, device=device)
    opcheck(operations.loss, (x, index, "softmax", 0.0, None, -100), test_utils=("test_schema", "test_faketensor"))


def sys_ops(kernel):
    import importlib

    return importlib.import_module(f"{kernel.__name__}._ops").ops


def test_what_is_refused(kernel, device):
    x = scores(2, 5).float().to(device)
    with pytest.raises(ValueError, match="map is one of softmax, sparsemax"):
        kernel.apply(x, "softmin")
    with pytest.raises(TypeError, match="entmax takes alpha, not k"):
        kernel.apply(x, "entmax", alpha=1.5, k=2)
    with pytest.raises(TypeError, match="entmax needs alpha="):
        kernel.apply(x, "entmax")
    with pytest.raises(ValueError, match="takes order of taylor from 2"):
        kernel.apply(x, "taylor", order=1)
    with pytest.raises(ValueError, match="order of taylor is even"):
        kernel.apply(x, "taylor", order=3)
    with pytest.raises(ValueError, match=r"k of topk is an integer, not 2\.5"):
        kernel.sparse_softmax(x, k=2.5)
    with pytest.raises(ValueError, match="budget of 6 can't be spent on 5 classes"):
        kernel.budget(x, 6)
    with pytest.raises(TypeError, match=r"not torch\.float64"):
        kernel.softmax(x.double())
    with pytest.raises(TypeError, match="mask: booleans"):
        kernel.softmax(x, mask=x)
    with pytest.raises(ValueError, match="map is one of softmax, topk, topp, sigsoftmax, not 'sparsemax'"):
        kernel.log_apply(x, "sparsemax")
    with pytest.raises(ValueError, match="map is one of softmax, topk, topp, not 'sigsoftmax'"):
        kernel.log_apply(x.clone().requires_grad_(), "sigsoftmax")
    with pytest.raises(ValueError, match="noise is one of normal, logistic"):
        kernel.apply(x, "perturb_max", noise="cauchy")
    with pytest.raises(ValueError, match="dim is an axis of x"):
        kernel.softmax(x, dim=2)
    leaf = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(kernel.sparsemax(leaf).square().sum(), leaf)
    assert not g.requires_grad
    with pytest.raises(RuntimeError, match="first derivatives"):
        torch.autograd.grad(kernel.sparsemax(leaf).square().sum(), leaf, create_graph=True)
