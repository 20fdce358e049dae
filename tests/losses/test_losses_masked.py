"""Losses of ignored samples and of masked classes: nothing that is left out can change a value or a gradient."""

from __future__ import annotations

import math

import numpy as np
import pytest
from kinds import KINDS, back, every_kind
from loss_cases import LOSSES, MAPS, POTENTIAL, every_loss, every_potential, on_kinds, rng

import anymax as A

torch = pytest.importorskip("torch")
F = torch.nn.functional


# -- ignored samples -------------------------------------------------------------------------------------------------------------


@every_kind
@every_loss
def test_a_batch_of_ignored_samples_is_zero(loss, kind):
    if kind in ("jax", "strict") and loss not in ("fenchel_young-entmax1.25", "nll-softmax"):
        pytest.skip("once is enough")
    x = rng(9).normal(size=(3, 4))
    x[1, 2] = math.nan  # an ignored row may hold anything
    x, t = KINDS[kind](x), KINDS[kind](np.full(3, -100))
    for reduction in ("mean", "sum", "none"):
        assert not back(LOSSES[loss](x, t, reduction=reduction)).any()


@every_loss
def test_gradient_of_ignored_samples_is_zero(loss):
    x = rng(9).normal(size=(3, 4))
    x[1, 2] = x[2] = -math.inf
    x = torch.tensor(x, requires_grad=True)
    LOSSES[loss](x, torch.tensor([-100, -100, -100])).backward()
    assert not x.grad.any()
    assert not x.grad.isnan().any()


@every_potential
def test_an_ignored_sample_counts_for_nothing(name):
    x = rng(10).normal(size=(4, 5))
    for ignored in (-100, 3, 77):
        t = np.array([0, ignored, 2, ignored])
        got = A.fenchel_young(POTENTIAL[name], x, t, ignore_index=ignored)
        want = A.fenchel_young(POTENTIAL[name], x[[0, 2]], t[[0, 2]])
        np.testing.assert_allclose(got, want, rtol=1e-12)


# -- masks ----------------------------------------------------------------------------------------------------------------------


@every_loss
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_masked_class_changes_nothing(loss, smoothing):
    """The loss, and its gradient, with a class at -inf are those with the class removed."""
    if smoothing and ("sparse_softmax" in loss):
        pytest.skip("no k-sparse map reaches a smoothed target")
    x = rng(11).normal(size=(4, 6))
    t = np.array([0, 5, 2, 4])
    hidden = 3
    rest = [0, 1, 2, 4, 5]
    f = LOSSES[loss]
    given = {"reduction": "none", "label_smoothing": smoothing}
    a = torch.tensor(x[:, rest], requires_grad=True)
    want = f(a, torch.tensor([0, 4, 2, 3]), **given)
    want.sum().backward()
    masked = x.copy()
    masked[:, hidden] = -math.inf
    keep = torch.arange(6) != hidden
    for scores, mask in ((masked, None), (x, keep), (x, keep.expand(4, 6))):
        b = torch.tensor(scores, requires_grad=True)
        got = f(b, torch.tensor(t), mask=mask, **given)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
        got.sum().backward()
        torch.testing.assert_close(b.grad[:, rest], a.grad, rtol=1e-8, atol=1e-11)
        assert not b.grad[:, hidden].any()
        assert not b.grad.isnan().any()


@pytest.mark.parametrize(
    "loss", [loss for loss in LOSSES if loss not in ("sparse_softmax_loss", "fenchel_young-sparse_softmax_p")]
)
def test_a_masked_class_changes_nothing_for_soft_targets(loss):
    x = rng(11).normal(size=(2, 5))
    y = np.array([[0.5, 0, 0, 0.5, 0], [0, 0, 0, 1.0, 0]])
    masked = x.copy()
    masked[:, [1, 4]] = -math.inf
    rest = [0, 2, 3]
    given = {"reduction": "none"}
    np.testing.assert_allclose(
        LOSSES[loss](masked, y, **given), LOSSES[loss](x[:, rest], y[:, rest], **given), rtol=1e-9, atol=1e-12
    )


@on_kinds(POTENTIAL)
def test_a_masked_target_is_inf_without_nan_in_the_gradient(name, kind):
    x = rng(12).normal(size=(3, 4))
    x[1, 2] = -math.inf
    value = back(A.fenchel_young(POTENTIAL[name], KINDS[kind](x), KINDS[kind](np.array([0, 2, 1])), reduction="none"))
    assert value[1] == math.inf
    assert np.isfinite(value[[0, 2]]).all()
    if kind == "torch":
        a = torch.tensor(x, requires_grad=True)
        A.fenchel_young(POTENTIAL[name], a, torch.tensor([0, 2, 1])).backward()
        assert not a.grad.isnan().any()
    if kind == "jax":
        import jax

        g = jax.grad(lambda v: A.fenchel_young(POTENTIAL[name], v, np.array([0, 2, 1])))(KINDS[kind](x))
        assert not np.isnan(g).any()


@pytest.mark.parametrize("name", [name for name, mapping in MAPS.items() if mapping.one_draw != "none"])
@pytest.mark.parametrize("loss", [A.nll, A.smoothed_nll])
def test_a_masked_target_is_inf_for_the_logarithms(name, loss):
    x = torch.tensor(rng(12).normal(size=(3, 4)))
    x[1, 2] = -math.inf
    x.requires_grad_()
    value = loss(MAPS[name], x, torch.tensor([0, 2, 1]), reduction="none")
    assert value[1] == math.inf
    value.sum().backward()
    assert not x.grad.isnan().any()


def test_a_masked_target_is_inf_as_in_torch():
    x = torch.tensor([[0.0, -math.inf, 1.0]])
    assert F.cross_entropy(x, torch.tensor([1])) == math.inf
    assert A.cross_entropy(x, torch.tensor([1])) == math.inf


@on_kinds(POTENTIAL)
def test_a_poisoned_row_is_nan_and_no_other(name, kind):
    x = rng(13).normal(size=(4, 4))
    x[1, 0], x[2, 3] = math.nan, math.inf
    value = back(
        A.fenchel_young(POTENTIAL[name], KINDS[kind](x), KINDS[kind](np.array([0, 1, 2, 3])), reduction="none")
    )
    assert np.isnan(value[[1, 2]]).all()
    assert np.isfinite(value[[0, 3]]).all()


@every_potential
def test_a_poisoned_row_has_a_nan_gradient_and_no_other(name):
    x = torch.tensor(rng(13).normal(size=(3, 4)))
    x[1, 0] = math.nan
    x.requires_grad_()
    A.fenchel_young(POTENTIAL[name], x, torch.tensor([0, 1, 2]), reduction="sum").backward()
    assert x.grad[1].isnan().any()
    assert x.grad[[0, 2]].isfinite().all()
