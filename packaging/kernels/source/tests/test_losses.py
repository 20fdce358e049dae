"""Losses of class indices against plain formulas in fp64."""

from __future__ import annotations

import math

import pytest
import torch

from .formulas import MAPS, scores

pytestmark = pytest.mark.kernels_ci


def loss_of(name, x, p, y):
    """sum p x + entropy(p) - x_y of each row, where entropy is that of the map."""
    x_y = x.gather(-1, y[:, None])[:, 0]
    if name in ("softmax", "topk"):
        return torch.where(p > 0, x, -math.inf).logsumexp(-1) - x_y
    alpha = {"sparsemax": 2.0, "entmax-1.5": 1.5}[name]
    entropy = ((p - p**alpha) / (alpha * (alpha - 1))).sum(-1)
    return (p * x).sum(-1) + entropy - x_y


@pytest.mark.parametrize("name", ["softmax", "sparsemax", "entmax-1.5", "topk"])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_loss_and_its_gradient(kernel, device, name, compiled):
    kind, given, formula = MAPS[name]
    x, y = scores(5, 8).float().double(), torch.tensor([0, 7, -100, 3, 3])
    p = formula(x)
    counted = y >= 0
    rows = loss_of(name, x, p, y.clamp(min=0)).masked_fill(~counted, 0.0)
    slope = (p - torch.nn.functional.one_hot(y.clamp(min=0), 8)) * counted[:, None]
    wants = {"none": (rows, slope), "sum": (rows.sum(), slope), "mean": (rows.sum() / 4, slope / 4)}
    for reduction, (value, gradient) in wants.items():
        if compiled and reduction != "mean":
            continue

        def loss(x, reduction=reduction):
            return kernel.fenchel_young(x, y.to(device), kind, reduction=reduction, **given)

        leaf = x.float().to(device).requires_grad_()
        got = (torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else loss)(leaf)
        torch.testing.assert_close(got.detach().cpu().double(), value, rtol=0, atol=5e-6)
        got.sum().backward()
        torch.testing.assert_close(leaf.grad.cpu().double(), gradient, rtol=0, atol=3e-6)
        with torch.no_grad():
            torch.testing.assert_close(loss(leaf), got)


def test_classes_on_another_axis_and_long_rows(kernel, device):
    x, y = scores(2, 3, 4).float(), torch.randint(3, (2, 4), generator=torch.Generator().manual_seed(0))
    leaf = x.to(device, copy=True).requires_grad_()
    got = kernel.cross_entropy(leaf, y.to(device), dim=1)
    got.backward()
    again = x.clone().requires_grad_()
    want = torch.nn.functional.cross_entropy(again, y)
    want.backward()
    torch.testing.assert_close(got.cpu(), want)
    torch.testing.assert_close(leaf.grad.cpu(), again.grad)
    x, y = scores(3, 20_000, scale=3.0).float(), torch.tensor([5, 19_999, 7])
    leaf = x.to(device, copy=True).requires_grad_()
    kernel.sparsemax_loss(leaf, y.to(device), reduction="sum").backward()
    p = MAPS["sparsemax"][2](x.double())
    want = p - torch.nn.functional.one_hot(y, 20_000)
    torch.testing.assert_close(leaf.grad.cpu().double(), want, rtol=0, atol=3e-6)


def test_what_is_refused(kernel, device):
    x, y = scores(2, 5).float().to(device), torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="reduction is one of none, mean, sum"):
        kernel.cross_entropy(x, y, reduction="avg")
    with pytest.raises(ValueError, match="map is one of softmax, sparsemax, entmax, budget, normmax, topk, topp"):
        kernel.fenchel_young(x, y, "taylor")
    with pytest.raises(TypeError, match="target is int64 or int32"):
        kernel.cross_entropy(x, x)
    with pytest.raises(ValueError, match="shape of x without dim"):
        kernel.cross_entropy(x, y[:1])
