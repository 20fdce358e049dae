"""Several centers of each class: losses, the module, and pytorch-metric-learning's SubCenterArcFaceLoss."""

from __future__ import annotations

import math

import numpy as np
import pytest
from kinds import KINDS, back, every_kind
from laws import close
from linear_cases import same
from refusals import each, refuses

import anymax as A
from anymax import Entmax, Softmax, Sparsemax, Taylor
from anymax.margins import AM, ArcFace

ROWS, CLASSES, COUNT = 6, 5, 3


def cosines():
    rng = np.random.default_rng(0)
    return rng.uniform(-0.9, 0.9, (ROWS, CLASSES * COUNT)), rng.integers(CLASSES, size=ROWS)


@every_kind
@pytest.mark.parametrize("mapping", [Softmax(), Sparsemax(), Taylor(2)], ids=repr)
def test_the_nearest_center_counts(mapping, kind):
    c, y = cosines()
    nearest = np.array([[max(row[i * COUNT : (i + 1) * COUNT]) for i in range(CLASSES)] for row in c])
    given = {"margin": ArcFace(0.3), "scale": 8.0}
    want = A.margin_loss(mapping, nearest, y, axis=-1, **given)
    make = KINDS[kind]
    got = A.margin_loss(mapping, make(c), make(y), axis=-1, sub_centers=COUNT, **given)
    close(back(got), want, 1e-5)
    first = A.margin_loss(mapping, make(c.T.copy()), make(y), axis=0, sub_centers=COUNT, **given)
    close(back(first), want, 1e-5)
    keep = np.arange(CLASSES) != (y[0] + 1) % CLASSES
    keep[y] = True
    want = A.margin_loss(mapping, nearest, y, axis=-1, mask=keep, reduction="none", **given)
    got = A.margin_loss(
        mapping, make(c), make(y), axis=-1, mask=make(keep), reduction="none", sub_centers=COUNT, **given
    )
    close(back(got), want, 1e-5)


def test_of_equal_centers_the_first_moves():
    torch = pytest.importorskip("torch")
    c = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(A.margin_loss(Softmax(), c, torch.tensor([1]), sub_centers=2, margin=0.0), c)
    assert (g != 0).tolist() == [[True, False, True, False]]


@pytest.mark.whole
def test_derivatives():
    torch = pytest.importorskip("torch")
    c, y = cosines()
    c, y = torch.tensor(c, requires_grad=True), torch.tensor(y)
    for mapping in (Softmax(), Entmax(1.5)):
        loss = lambda c: A.margin_loss(mapping, c, y, sub_centers=COUNT, margin=ArcFace(0.3), scale=4.0)  # noqa: B023, E731
        assert torch.autograd.gradcheck(loss, c)
        assert torch.autograd.gradgradcheck(loss, c)


def refused(classes, **given):
    return lambda: A.margin_loss(Softmax(), np.zeros((2, classes)), [0, 1], **given)


REFUSED = {
    "a remainder": (refused(5, sub_centers=2), ValueError, "5 along axis 1 are no multiple of sub_centers=2"),
    "none": (refused(4, sub_centers=0), ValueError, "must be at least 1, the number of centers of each class, got 0"),
    "a fraction": (refused(4, sub_centers=1.5), TypeError, "sub_centers"),
    "several axes": (refused(4, sub_centers=2, axis=(0, 1)), ValueError, "needs one axis of the classes"),
}


@each(REFUSED)
def test_what_is_refused(call, error, words):
    refuses(call, error, words)


# -- the module ------------------------------------------------------------------------------------------------------------------


def head_and_batch(mapping=None, margin=None, **given):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    head = A.nn.MarginHead(8, 20, mapping, ArcFace(0.2) if margin is None else margin, 8.0, sub_centers=COUNT, **given)
    return torch, head, torch.randn(9, 8), torch.randint(20, (9,))


def test_the_module():
    torch, head, x, y = head_and_batch()
    assert head.weight.shape == (60, 8)
    assert head.cosines(x).shape == head.probabilities(x).shape == (9, 20)
    unit = [torch.nn.functional.normalize(a, dim=-1) for a in (x, head.weight)]
    want = A.margin_loss(
        Softmax(), (unit[0] @ unit[1].T).view(9, 20, COUNT).amax(-1), y, margin=ArcFace(0.2), scale=8.0
    )
    same(head(x, y), want, [head.weight], 1e-5)
    assert str(head).endswith("scale=8.0, sub_centers=3)")


@pytest.mark.parametrize("mapping", [Softmax(), Entmax(1.5), Taylor(2)], ids=repr)
def test_a_large_head_holds_no_cosines(mapping, monkeypatch):
    _, head, x, y = head_and_batch(mapping)
    y[2] = -100
    want = head(x, y)
    from anymax.nn import margin_head

    monkeypatch.setattr(margin_head, "_MANY", 100)
    monkeypatch.setattr(A.nn.MarginHead, "cosines", None)
    for options in ({}, {"reduction": "none"}):
        head.options |= options
        got = head(x, y)
        same(got if not got.ndim else got.sum() / 8, want, [head.weight], 1e-5)
    with pytest.raises(IndexError, match="from 0 to 19"):
        head(x, y + 20)


def test_a_sample_of_the_classes():
    torch, head, x, y = head_and_batch(sample_rate=0.5)
    y = y % 4
    value = head(x, y)
    (g,) = torch.autograd.grad(value, head.weight)
    used = g.view(20, COUNT, 8).abs().sum((1, 2)) > 0
    assert used.sum() <= 10
    assert used[y.unique()].all()
    head.sample_rate = 1.0 - 1e-9  # all classes, by the way of a sample
    sampled = head(x, y)
    close(sampled.detach(), head.eval()(x, y).detach(), 1e-5)


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_half_precision(half):
    torch, head, x, y = head_and_batch()
    want = head(x, y)
    head, x = head.to(getattr(torch, half)), x.to(getattr(torch, half))
    got = head(x, y)
    assert got.dtype is torch.float32
    close(got.detach(), want.detach(), 0.1)


def test_against_pytorch_metric_learning():
    torch = pytest.importorskip("torch")
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    torch.manual_seed(0)
    theirs = losses.SubCenterArcFaceLoss(
        num_classes=20, embedding_size=8, margin=math.degrees(0.2), scale=8.0, sub_centers=COUNT
    )
    x, y = torch.randn(9, 8, requires_grad=True), torch.randint(20, (9,))
    head = A.nn.MarginHead(8, 20, margin=ArcFace(0.2), scale=8.0, sub_centers=COUNT)
    with torch.no_grad():
        head.weight.copy_(theirs.W.T)
    got, want = head(x, y), theirs(x, y)
    close(got.detach(), want.detach(), 1e-4)
    g, of_weight = torch.autograd.grad(got, (x, head.weight))
    h, of_theirs = torch.autograd.grad(want, (x, theirs.W))
    close(g, h, 1e-4)
    close(of_weight, of_theirs.T, 1e-4)


def test_over_two_processes():
    torch, head, x, y = head_and_batch(margin=AM(0.1))
    from processes import together

    def one(group):
        part = A.nn.MarginHead(8, 20, None, AM(0.1), 8.0, sub_centers=COUNT, group=group)
        with torch.no_grad():
            part.weight.copy_(head.weight[group.rank * 30 : (group.rank + 1) * 30])
        own = slice(0, 4) if group.rank == 0 else slice(4, 9)
        return part(x[own], y[own]).detach()

    for value in together(2, one):
        close(value, head(x, y).detach(), 1e-5)
