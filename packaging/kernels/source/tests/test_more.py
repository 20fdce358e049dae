"""Routers, Sinkhorn, segments and layers against plain operations."""

from __future__ import annotations

import pytest
import torch

from .formulas import MAPS, scores, slopes

pytestmark = pytest.mark.kernels_ci


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus", "scores"])
@pytest.mark.parametrize("normalise", [True, False])
def test_routers(kernel, device, scoring, normalise):
    x = scores(6, 16).float()
    value = {
        "softmax": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid, "scores": lambda x: x,
        "sqrtsoftplus": lambda x: torch.nn.functional.softplus(x).sqrt(),
    }[scoring](x)  # fmt: skip
    bias = scores(16, seed=2).float()
    places = (value + bias).topk(4).indices
    want = value.gather(-1, places)
    if normalise and scoring == "softmax":
        want = x.gather(-1, places).softmax(-1)
    elif normalise:
        sums = want.sum(-1, keepdim=True)
        want = want / torch.where(sums > 0, sums, 1.0)
    words = {"scoring": scoring, "bias": bias.to(device), "normalise": normalise, "factor": 2.5}
    ids, weights = kernel.route(x.to(device), 4, **words)
    assert torch.equal(ids.cpu(), places)
    torch.testing.assert_close(weights.cpu(), 2.5 * want, rtol=1e-5, atol=1e-5)
    leaf = x.to(device, copy=True).requires_grad_()
    again, learned = kernel.route(leaf, 4, **words)
    assert torch.equal(again, ids)
    torch.testing.assert_close(learned.detach(), weights, rtol=1e-5, atol=1e-5)
    (g,) = torch.autograd.grad(learned.square().sum(), leaf)
    assert bool((g != 0).any())


def test_routers_of_groups(kernel, device):
    x = scores(5, 16).float()
    value = x.sigmoid()
    best = value.view(5, 4, 4).topk(2).values.sum(-1).topk(2).indices
    keep = torch.zeros(5, 4).scatter_(1, best, 1.0).bool().repeat_interleave(4, 1)
    ids, _ = kernel.route(x.to(device), 3, scoring="sigmoid", groups=4, keep_groups=2)
    assert torch.equal(ids.cpu(), value.masked_fill(~keep, -1.0).topk(3).indices)
    with pytest.raises(ValueError, match="groups divide the experts"):
        kernel.route(x.to(device), 3, groups=3)
    with pytest.raises(ValueError, match="scoring is one of"):
        kernel.route(x.to(device), 3, scoring="tanh")


def test_sinkhorn(kernel, device):
    x, g = scores(7, 4, 4).float(), scores(7, 4, 4, seed=1).float()

    def plain(x):
        for _ in range(8):
            x = x - x.logsumexp(-1, keepdim=True)
            x = x - x.logsumexp(-2, keepdim=True)
        return x.exp()

    wide = (x.double() / 0.7).requires_grad_()
    want = plain(wide)
    want.backward(g.double())
    leaf = x.to(device, copy=True).requires_grad_()
    got = kernel.sinkhorn(leaf, 8, 0.7)
    torch.testing.assert_close(got.detach().cpu().double(), want.detach(), rtol=0, atol=2e-6)
    got.backward(g.to(device))
    torch.testing.assert_close(leaf.grad.cpu().double(), wide.grad / 0.7, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="4 x 4"):
        kernel.sinkhorn(leaf[:, :3])


@pytest.mark.parametrize("name", ["softmax", "entmax-1.5", "taylor"])
def test_segments(kernel, device, name):
    kind, given, formula = MAPS[name]
    lengths = [4, 0, 1, 37, 6]
    x, g = scores(48, 2), scores(48, 2, seed=1)
    layout = kernel.segment_layout(lengths, device)
    leaf = x.float().to(device).requires_grad_()
    p = kernel.segment_apply(leaf, layout, kind, **given)
    p.backward(g.float().to(device))
    start = 0
    for n in lengths:
        own = slice(start, start + n)
        if n:
            rows, slope = x.float().double()[own].T, g.float().double()[own].T
            torch.testing.assert_close(p.detach().cpu().double()[own], formula(rows).T, rtol=0, atol=3e-6)
            want = slopes(formula, rows, slope).T
            torch.testing.assert_close(leaf.grad.cpu().double()[own], want, rtol=0, atol=5e-5)
        start += n
    with pytest.raises(ValueError, match="no kernel for segments of perturb_max"):
        kernel.segment_apply(leaf, layout, "perturb_max")


def test_layers_take_the_place_of_others(kernel, device):
    """As `kernels.kernelize` puts them: their forward, on a layer with the fields that it reads."""
    x, y = scores(3, 6).float().to(device), torch.tensor([1, 0, 5], device=device)
    for ours, theirs in (
        (kernel.layers.Softmax, torch.nn.Softmax(-1)),
        (kernel.layers.LogSoftmax, torch.nn.LogSoftmax(0)),
    ):
        torch.testing.assert_close(ours.forward(theirs, x), theirs(x))
    loss = torch.nn.CrossEntropyLoss()
    torch.testing.assert_close(kernel.layers.CrossEntropyLoss.forward(loss, x, y), loss(x, y))
    with pytest.raises(ValueError, match="no label smoothing"):
        kernel.layers.CrossEntropyLoss.forward(torch.nn.CrossEntropyLoss(label_smoothing=0.1), x, y)

    class Other(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.dim, self.alpha = -1, 1.5

    for name, want in (
        ("Sparsemax", kernel.sparsemax(x)),
        ("Entmax15", kernel.entmax15(x)),
        ("EntmaxBisect", kernel.entmax15(x)),
    ):
        assert torch.equal(getattr(kernel.layers, name).forward(Other(), x), want)
