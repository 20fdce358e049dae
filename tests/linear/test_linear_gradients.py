"""Output layers: derivatives of all kinds and orders, dtypes, and what torch traces."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from laws import close
from linear_cases import CLASSES, MAPS, ROWS, SEVERAL, dense, operands, same, torch_operands

import anymax as A
from anymax import Entmax, NormMax, PerturbMax, Softmax


@pytest.mark.whole(lambda name: name not in ("softmax", "entmax15", "taylor"))
@pytest.mark.parametrize("name", SEVERAL)
def test_the_gradient_of_the_gradient(name):
    torch, (x, weight, bias), y = torch_operands(rows=3, classes=9)
    mapping = MAPS[name]

    def loss(x, weight, bias):
        return A.linear_loss(x, weight, y, mapping, linear_bias=bias, label_smoothing=0.1, reduction="none", chunk=4)

    assert torch.autograd.gradgradcheck(loss, (x, weight, bias), eps=1e-6, atol=2e-5, fast_mode=True)


@pytest.mark.whole(lambda name: name != "entmax15")
@pytest.mark.parametrize("name", ["softmax", "sparsemax", "entmax15", "topk", "taylor"])
def test_gradients_of_jax(name):
    jax = pytest.importorskip("jax")
    torch, free, y = torch_operands("float32")
    want = torch.autograd.grad(A.linear_loss(*free[:2], y, MAPS[name], linear_bias=free[2], label_smoothing=0.1), free)
    ours = [jax.numpy.asarray(a.detach().numpy()) for a in free]

    @jax.jit
    def loss(x, weight, bias):
        return A.linear_loss(
            x, weight, jax.numpy.asarray(y.numpy()), MAPS[name], linear_bias=bias, label_smoothing=0.1, chunk=26
        )

    for a, b in zip(jax.grad(loss, (0, 1, 2))(*ours), want):
        close(a, b, 1e-5)


@pytest.mark.whole
def test_second_derivatives_of_jax():
    jax = pytest.importorskip("jax")
    x, weight, _, y, *_ = (np.asarray(a, np.float32) if a.dtype == float else a for a in operands(rows=3, classes=9))
    with A.use("reference"):
        ours = jax.hessian(lambda x: A.linear_loss(x, weight, jax.numpy.asarray(y), Softmax(), chunk=3))(
            jax.numpy.asarray(x)
        )
    want = jax.hessian(lambda x: A.cross_entropy(x @ weight.T, jax.numpy.asarray(y)))(jax.numpy.asarray(x))
    close(ours, want, 1e-5)


EACH = np.linspace(0.0, 0.4, ROWS)[:, None]
PARAMETERS = {
    "alpha": (Entmax, 1.3),
    "alpha a row": (Entmax, 1.3 + EACH),
    "alpha at 1": (Entmax, 1.0),
    "alpha from 1 on": (Entmax, 1.0 + EACH),
    "normmax": (NormMax, 2.2),
    "normmax a row": (NormMax, 2.2 + EACH),
    "scale": (lambda scale: PerturbMax(scale=scale), 1.2),  # of a map that needs whole rows
}


@pytest.mark.parametrize("given", [{}, {"chunk": 13}, {"reduction": "none"}], ids=str)
@pytest.mark.parametrize("row", PARAMETERS)
def test_a_parameter_is_learned(row, given):
    make, value = PARAMETERS[row]
    torch, free, y = torch_operands()
    y[3] = -100
    one = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    got = A.linear_loss(*free[:2], y, make(one), linear_bias=free[2], **given)
    want = dense(make(one), free[0] @ free[1].T + free[2], y, reduction=given.get("reduction", "mean"))
    same(got, want, [one, *free], 1e-9)


@pytest.mark.whole(
    lambda name, dtype: (name, dtype) not in (("softmax", "bfloat16"), ("entmax15", "float16"), ("taylor", "float32"))
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["softmax", "entmax15", "sparsemax", "topk", "taylor"])
def test_dtypes(name, dtype):
    """Against fp64 on the same rounded operands: scores in half precision carry their own rounding, as those of `x @ weight.T` do."""
    torch, free, y = torch_operands(dtype, sigma=0.4)
    wide = [a.detach().double().requires_grad_() for a in free]
    got = A.linear_loss(*free[:2], y, MAPS[name], linear_bias=free[2], label_smoothing=0.1, chunk=17)
    want = dense(MAPS[name], wide[0] @ wide[1].T + wide[2], y, label_smoothing=0.1)
    assert got.dtype is torch.float32
    close(got.detach().double(), want.detach(), 16 * torch.finfo(free[0].dtype).eps)
    for a, b in zip(torch.autograd.grad(got, free), torch.autograd.grad(want, wide)):
        assert a.dtype is free[0].dtype
        close(a.double(), b, 16 * torch.finfo(free[0].dtype).eps)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_small_probabilities_may_be_left_out(smoothing):
    torch, free, y = torch_operands()
    p = torch.softmax((free[0] @ free[1].T + free[2]).detach(), -1)
    given = {"linear_bias": free[2], "label_smoothing": smoothing}
    exact = A.linear_loss(*free[:2], y, **given)
    for least, chunk in ((0.01, None), (0.05, 13)):
        got = A.linear_loss(*free[:2], y, least=least, chunk=chunk, **given)
        close(got.detach(), exact.detach(), 1e-12)
        target = torch.nn.functional.one_hot(y, CLASSES).double()
        d = torch.where((p >= least) | (target > 0), p, 0) - (1 - smoothing) * target - smoothing / CLASSES
        want = d @ free[1].detach() / ROWS, d.T @ free[0].detach() / ROWS, d.sum(0) / ROWS
        assert 0 < int((p < least).sum()) < p.numel()
        for a, b in zip(torch.autograd.grad(got, free), want):
            close(a, b, 1e-10)
    flat = 1e-6 * free[0]  # all are kept
    same(A.linear_loss(flat, free[1], y, least=0.001), A.linear_loss(flat, free[1], y), [free[1]], 1e-12)
    assert torch.autograd.gradcheck(lambda x: A.linear_loss(x, free[1], y, least=1e-300), free[0], fast_mode=True)


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script.*is deprecated:DeprecationWarning",
    "ignore:.*should not be instantiated:DeprecationWarning",
)
@pytest.mark.whole
@pytest.mark.parametrize("name", ["softmax", "entmax15", "topk", "taylor"])
def test_torch_compile(name, monkeypatch):
    """An operation of ours, forward and backward, which does not hold the scores."""
    torch, free, y = torch_operands("float32")
    from anymax.linear import torch_compiled

    calls, made = [], torch_compiled._values
    monkeypatch.setattr(torch_compiled, "_values", lambda *given: calls.append(1) or made(*given))
    y[2] = -100
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss(x, weight, bias):
        return A.linear_loss(x, weight, y, MAPS[name], linear_bias=bias, label_smoothing=0.1)

    want = A.linear_loss(*free[:2], y, MAPS[name], linear_bias=free[2], label_smoothing=0.1)
    same(loss(*free), want, free, 1e-5)
    assert len(calls) == 2


def test_no_field_of_a_loss_is_lost_in_a_compiled_layer():
    """An operation is told of it, or plain operations compute the loss. A further field fails here until it is in one of the lists."""
    pytest.importorskip("torch")
    from anymax.linear.job import RowLoss
    from anymax.linear.torch_compiled import LossNumbers
    from anymax.losses.options import EACH_ROW
    from anymax.losses.penalties import RowPenalties

    told = {
        "who": "f", "transforms": (A.transforms.softcap(2.0),), "min_probability": 0.1, "options": EACH_ROW._replace(smoothing=0.1),
        "penalties": RowPenalties(0.1, 0.2),
    }  # fmt: skip
    plain = {"margin": A.margins.AM(0.1), "scale": 2.0, "sub_centers": 2, "predicts": True}
    assert {*told, *plain} == {f.name for f in dataclasses.fields(RowLoss)}
    losses = {name: RowLoss(**{name: value}) for name, value in (told | plain).items()}
    losses |= {name: RowLoss(penalties=RowPenalties(**{name: 0.1})) for name in RowPenalties._fields}
    options = {"weight": 1, "axis": 0, "mask": 1, "ignore_index": 0, "reduction": "sum"}
    assert {*options, "smoothing"} == set(EACH_ROW._fields)
    losses |= {name: RowLoss(options=EACH_ROW._replace(**{name: value})) for name, value in options.items()}
    for name, loss in losses.items():
        numbers = LossNumbers.of(loss)
        if name in plain or name in options:
            assert numbers is None, name
        else:
            assert numbers is not None, name
            again = LossNumbers.unpacked(numbers.packed())
            assert again.per_row(loss.who, loss.transforms, loss.min_probability) == loss


@pytest.mark.whole
@pytest.mark.parametrize("grad", [True, False])
def test_torch_compile_where_no_gradient_is_asked_for(grad):
    torch, free, y = torch_operands("float32")
    x, weight, bias = free if grad else (a.detach() for a in free)
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend="eager")
    def evaluate():
        return (
            A.linear_loss(x, weight, y, "sparsemax", linear_bias=bias),
            A.linear_log_prob(x, weight, y, linear_bias=bias),
        )

    with torch.no_grad():
        got = evaluate()
    assert not got[0].requires_grad
    close(got[0], A.linear_loss(x, weight, y, "sparsemax", linear_bias=bias).detach(), 1e-5)
    close(got[1], A.linear_log_prob(x, weight, y, linear_bias=bias).detach(), 1e-5)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", ["softmax", "entmax15"])
def test_transforms_of_torch_func(name):
    torch, free, y = torch_operands()
    x, weight, _ = (a.detach() for a in free)
    loss = lambda w, x, y: A.linear_loss(x, w, y, MAPS[name])  # noqa: E731
    close(torch.func.grad(loss)(weight, x, y), torch.autograd.grad(loss(free[1], x, y), free[1])[0], 1e-10)
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weight, x, y)
    close(each.mean(0), torch.autograd.grad(loss(free[1], x, y), free[1])[0], 1e-10)
    _, change = torch.func.jvp(lambda w: loss(w, x, y), (weight,), (torch.ones_like(weight),))
    close(change, torch.autograd.grad(loss(free[1], x, y), free[1])[0].sum(), 1e-10)


def test_hooks_and_a_graph_that_is_kept():
    torch, free, y = torch_operands()
    for name in ("softmax", "entmax15", "taylor"):
        with torch.autograd.graph.save_on_cpu():
            value = A.linear_loss(*free[:2], y, MAPS[name], linear_bias=free[2])
        first = torch.autograd.grad(value, free, retain_graph=True)
        for a, b in zip(first, torch.autograd.grad(value, free)):
            close(a, b, 0)
        only = torch.autograd.grad(
            A.linear_loss(free[0].detach(), free[1], y, MAPS[name], linear_bias=free[2]), free[1]
        )[0]
        close(only, first[1], 1e-12)


@pytest.mark.parametrize("name", ["softmax", "taylor"])
def test_a_gradient_of_the_forward_pass_can_be_asked_for_twice(name):
    torch, free, y = torch_operands()
    loss = A.linear_loss(free[0], free[1], y, MAPS[name], linear_bias=free[2])
    assert "forward pass" in A.linear.explain_linear_loss(free[0], free[1], y, MAPS[name], linear_bias=free[2])
    want = torch.autograd.grad(dense(MAPS[name], free[0] @ free[1].T + free[2], y), free)
    for factor in (3.0, -1.0, 1.0):
        got = torch.autograd.grad(factor * loss, free, retain_graph=True)
        for one, other in zip(got, want):
            close(one, factor * other, 1e-9)
            one.mul_(7.0)  # the caller's own


def test_a_weight_that_changed_after_the_forward_pass_is_an_error():
    torch, free, y = torch_operands()
    loss = A.linear_loss(free[0], free[1], y)
    with torch.no_grad():
        free[1].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("scale", [0.01, 3.0], ids=["many in the support", "few"])
@pytest.mark.parametrize("name", ["sparsemax", "entmax15"])
def test_all_scores_of_a_sparse_map_with_their_gradient(name, scale, monkeypatch):
    """Groups of rows whose gradient is nearly all 0 take sparse products, the others products with all classes."""
    torch = pytest.importorskip("torch")
    from anymax.linear import torch_groups

    made = []
    monkeypatch.setattr(
        torch_groups, "entries_of", lambda ds, of=torch_groups.entries_of: made.append(of(ds)) or made[-1]
    )
    draw = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, generator=draw) for shape in ((400, 8), (701, 8), (701,))
    )
    free = [a.requires_grad_() for a in (scale * x, weight, scale * bias)]
    free[0].data[3] = torch.nan
    y = torch.randint(701, (400,), generator=draw)
    y[1] = -100
    factors = torch.linspace(0.5, 2.0, 701, dtype=torch.float64)
    loss = A.linear_loss(free[0], free[1], y, name, linear_bias=free[2], weight=factors, reduction="sum")
    assert loss.isnan()
    kept = torch.arange(400) != 3
    loss = A.linear_loss(free[0][kept], free[1], y[kept], name, linear_bias=free[2], weight=factors)
    same(loss, A.fenchel_young(name, free[0][kept] @ free[1].T + free[2], y[kept], weight=factors), free, 1e-11)
    assert len(made) > 2
    assert all((few is None) == (scale < 1) for few in made)


def test_the_entries_that_are_not_0():
    torch = pytest.importorskip("torch")
    from anymax.linear.torch_products import entries_of

    dense = torch.zeros(13, 37)  # no multiple of what is looked at together
    at = [(0, 0), (0, 36), (5, 7), (12, 35), (12, 36)]
    for k, (i, j) in enumerate(at):
        dense[i, j] = torch.nan if k == 2 else -1.0 - k
    row, column, value = entries_of(dense)
    assert list(zip(row.tolist(), column.tolist(), strict=True)) == at
    assert value.isnan().tolist() == [False, False, True, False, False]
    assert value[[0, 1, 3, 4]].tolist() == [-1.0, -2.0, -4.0, -5.0]
    assert [a.shape[0] for a in entries_of(torch.zeros(4, 3))] == [0, 0, 0]
    dense[4, :6] = 1.0
    assert entries_of(dense) is None  # 11 of 481 are too many
