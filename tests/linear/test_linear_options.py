"""Output layers: margins, modules, memory, what torch traces, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from laws import close
from linear_cases import MAPS, QUICK, dense, operands, same, torch_operands
from refusals import each, refuses

import anymax as A
from anymax import Budget, Entmax, Softmax, Sparsemax, Taylor

# -- margins, modules --------------------------------------------------------------------------------------------------


@pytest.mark.whole(lambda name, margin: (name == "softmax") != (margin == A.margins.AM(0.3)))
@pytest.mark.parametrize("margin", [A.margins.AM(0.3), A.margins.ArcFace(0.5)], ids=str)
@pytest.mark.parametrize("name", [*QUICK, "taylor"])
def test_margins(name, margin):
    from anymax.linear.verbs import margin_linear_loss

    torch, free, y = torch_operands()
    y[3] = -100
    unit = [torch.nn.functional.normalize(a, dim=-1) for a in free[:2]]
    got = margin_linear_loss(*unit, y, MAPS[name], margin, 8.0, ignore_index=-100, reduction="mean")
    want = A.margin_loss(MAPS[name], unit[0] @ unit[1].T, y, margin=margin, scale=8.0, axis=-1)
    same(got, want, free[:2], 1e-9)


def test_a_large_margin_head_holds_no_cosines(monkeypatch):
    torch = pytest.importorskip("torch")
    from anymax.nn import margin_head

    for name in ("softmax", "entmax15", "normmax"):
        torch.manual_seed(0)
        head = A.nn.MarginHead(6, 50, MAPS[name], A.margins.ArcFace(0.2), 8.0)
        x, y = torch.randn(9, 6), torch.randint(50, (9,))
        want = head(x, y)
        with monkeypatch.context() as patch:
            patch.setattr(margin_head, "_MANY", 100)
            patch.setattr(A.nn.MarginHead, "cosines", None)
            got = head(x, y)
        same(got, want, [head.weight], 1e-5)


def test_the_module():
    torch = pytest.importorskip("torch")
    head = A.nn.LinearLoss(
        4, 30, Entmax(1.5), bias=True, weight=torch.linspace(1, 2, 30), label_smoothing=0.1, learn="alpha"
    )
    assert {k for k, _ in head.named_parameters()} == {"weight", "bias", "raw_alpha"}
    assert str(head) == "LinearLoss(4 -> 30, Entmax(alpha learned in (1.0, 2.0)), bias=True)"
    x, y = torch.randn(2, 3, 4), torch.randint(30, (2, 3))
    want = dense(head.mapping, head.scores(x).reshape(6, 30), y.reshape(6), head.class_weight, label_smoothing=0.1)
    close(head(x, y).detach(), want.detach(), 1e-5)
    with pytest.raises(TypeError, match="divide x by it; with a bias"):
        A.nn.LinearLoss(3, 3, temperature=2.0)
    head(x, y).backward()
    assert all(p.grad is not None and p.grad.any() for p in head.parameters())
    close(head.log_prob(x, y).detach().exp(), A.log_prob(head.mapping, head.scores(x), y).detach().exp(), 1e-5)
    other = A.nn.LinearLoss(4, 30, Entmax(1.5), bias=True, weight=torch.ones(30), learn="alpha")
    other.load_state_dict(head.state_dict())
    close(other.class_weight, head.class_weight, 0)
    tied = torch.nn.Embedding(30, 4)
    head.weight = tied.weight
    head(tied(y), y).backward()
    assert tied.weight.grad.any()


# -- memory --------------------------------------------------------------------------------------------------------------------------

MEMORY = """
import torch, anymax
rows, features, classes = 512, 16, 65536
mapping = {mapping}
x = torch.randn(rows, features, requires_grad=True)
weight = (torch.randn(classes, features) / 4 ** 0.5).requires_grad_()
y = torch.randint(classes, (rows,))

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024

def now():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

anymax.linear_loss(x[:8], weight[:99], y[:8] % 99, mapping).backward()
x.grad = weight.grad = None
open("/proc/self/clear_refs", "w").write("5")
before = now()
anymax.linear_loss(x, weight, y, mapping).backward()
print((peak() - before - weight.nbytes - x.nbytes) / (4 * rows * classes))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.whole
@pytest.mark.parametrize(
    "mapping", ["anymax.Entmax(1.5)", "anymax.Softmax()", "anymax.Sparsemax()", "anymax.SparseSoftmax(k=8)"]
)
def test_memory_is_a_tenth_of_the_scores(mapping):
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", MEMORY.format(mapping=mapping)], capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
    assert float(done.stdout) < 0.1


# -- what is refused ----------------------------------------------------------------------------------------------------------------

X, W = [[1.0, 0.0], [0.0, 2.0]], [[2.0, 0.0], [0.0, 2.0], [1.0, 1.0]]
REFUSED = {
    "weight after target": (lambda: A.linear_loss(X, [0, 0], [[1.0]]), ValueError, "the weight comes before the target"),
    "a layer for a weight": (lambda: A.linear_loss(X, abs, [0, 0]), TypeError, r"; give its \.weight, and linear_bias= its \.bias"),
    "another width": (lambda: A.linear_loss(X, [[1.0]], [0, 0]), ValueError, r"expected features \[..., features\]"),
    "a bias of another width": (lambda: A.linear_loss(X, W, [0, 0], linear_bias=[1.0]), ValueError, "one number per class"),
    "no classes": (lambda: A.linear_loss(X, np.zeros((0, 2)), [0, 0]), ValueError, "at least one is needed"),
    "no class": (lambda: A.linear_loss(X, W, [0, 3]), IndexError, "from 0 to 2"),
    "too few targets": (lambda: A.linear_loss(X, W, [0]), ValueError, r"of shape \(2,\)"),
    "a distribution of another shape": (lambda: A.linear_loss(X, W, [0.5, 0.5]), ValueError, "class indices must be integers"),
    "smoothing of 2": (lambda: A.linear_loss(X, W, [0, 1], label_smoothing=2), ValueError, "^linear_loss: label_smoothing.*from 0 to 1"),
    "a least probability of 1": (lambda: A.linear_loss(X, W, [0, 1], least=1.0), ValueError, "from 0 to below 1"),
    "a least probability of sparsemax": (lambda: A.linear_loss(X, W, [0, 1], Sparsemax(), least=0.1), ValueError, "to softmax only"),
    "a sink to suppress": (lambda: A.linear_loss(X, W, [0, 1], A.Sink(Sparsemax()), suppress=0.1), ValueError, "the sink is none of"),
    "an unknown reduction": (lambda: A.linear_loss(X, W, [0, 1], reduction="average"), ValueError, "^linear_loss: reduction must be"),
    "a fraction of a class": (lambda: A.linear_loss(X, W, [0, 1], chunk=2.5), TypeError, "the number of classes at a time"),
    "no classes at a time": (lambda: A.linear_loss(X, W, [0, 1], chunk=0), ValueError, "at least 1"),
    "a map of another kind": (lambda: A.linear_loss(X, W, [0, 1], "sparsmax"), ValueError, "did you mean 'sparsemax'"),
    "noise": (lambda: A.linear_loss(X, W, [0, 1], transform=A.transforms.noise()), ValueError, "draws random numbers"),
    "a temperature below 0": (
        lambda: A.linear_log_prob(X, W, [0, 1], temperature=np.array([-1.0, 2.0])), ValueError, r"at least 0; got float64\[2\]$",
    ),
    "weights of a mixture below 0": (
        lambda: A.mix(X, X, np.array([-1.0, 2.0])), ValueError, r"mix: weight must be from 0 to 1; got float64\[2\]$",
    ),
    "a temperature of each row": (
        lambda: A.linear_loss(X, W, [0, 1], transform=A.temperature(np.ones((2, 1)))), ValueError, "parameters that differ between rows",
    ),
    "an alpha of each class": (lambda: A.linear_loss(X, W, [0, 1], Entmax(np.full(3, 1.5))), ValueError, "does not broadcast"),
    "a float mask": (lambda: A.linear_loss(X, W, [0, 1], mask=[1.0, 0.0, 1.0]), TypeError, "boolean array"),
    "a mask of another width": (lambda: A.linear_loss(X, W, [0, 1], mask=[True] * 2), ValueError, "does not broadcast"),
    "axis": (lambda: A.linear_loss(X, W, [0, 1], axis=1), TypeError, "its last axis"),
    "a map without a threshold": (lambda: A.linear.linear_threshold(X, W, Taylor(2)), TypeError, "has no threshold"),
    "a support and a mask": (
        lambda: A.linear_log_prob(X, W, [0, 1], support=([0, 1], [0, 1, 2]), mask=[True] * 3), ValueError, "with a support a mask has no",
    ),
    "a support and a truncation": (
        lambda: A.linear_log_prob(X, W, [0, 1], support=([0, 1], [0, 1, 2]), transform=A.topk(1)), ValueError, "as the support$",
    ),
    "targets of log p that are too few": (lambda: A.linear_log_prob(X, W, [0]), ValueError, r"\(integers\) of shape \(2,\)$"),
    "a bias in the place of the map": (lambda: A.linear_loss(X, W, [0, 1], np.ones(3)), TypeError, "a bias is linear_bias="),
    "torch's name of x": (lambda: A.linear_loss(input=X, linear_weight=W, target=[0, 1]), TypeError, r"'input' \(say x=\)"),
    "a bias without its name": (
        lambda: A.linear_loss(X, W, [0, 1], "softmax", [1.0] * 3), TypeError,
        r"takes 4 without a name \(x, linear_weight, target, mapping\), got 5; name the others: linear_bias=, weight=",
    ),
    "floats for classes": (lambda: A.linear_log_prob(X, W, [0.0, 1.0]), TypeError, "class indices"),
    "z_loss of taylor": (
        lambda: A.linear_loss(X, W, [0, 1], "taylor", z_loss=1.0), ValueError,
        "z_loss= is the factor of tau squared, and taylor has no threshold",
    ),
    "suppress of softmax": (lambda: A.linear_loss(X, W, [0, 1], suppress=1.0), ValueError, "to maps that give classes probability 0"),
    "suppress of a distribution": (
        lambda: A.linear_loss(X, W, np.full((2, 3), 1 / 3), "sparsemax", suppress=1.0), TypeError, "suppress= needs class indices",
    ),
    "a negative z_loss": (lambda: A.linear_loss(X, W, [0, 1], z_loss=-1.0), ValueError, "z_loss must be a finite number of at least 0"),
    "five classes to keep of three": (lambda: A.linear_loss(X, W, [0, 1], Budget(5)), ValueError, "5"),
}  # fmt: skip


@each(REFUSED)
def test_what_is_refused(call, error, words):
    refuses(call, error, words)


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", ["softmax", "entmax15"])
def test_jit_trace(name):
    torch, free, y = torch_operands("float32")
    x, weight, bias = (a.detach() for a in free)
    for ask in (
        lambda x: A.linear_loss(x, weight, y, MAPS[name], linear_bias=bias),
        lambda x: A.linear_log_prob(x, weight, y, MAPS[name]),
        lambda x: A.linear.linear_threshold(x, weight, MAPS[name]).tau,
    ):
        traced = torch.jit.trace(ask, x, check_trace=False)
        torch.testing.assert_close(traced(x / 8), ask(x / 8))


@pytest.mark.parametrize("name", ["softmax", "entmax15", "topk", "taylor"])
def test_shapes_without_values(name):
    torch, free, y = torch_operands("float32")
    x, weight, bias = (a.detach().to("meta").requires_grad_() for a in free)
    loss = A.linear_loss(x, weight, y.to("meta"), MAPS[name], linear_bias=bias)
    assert loss.shape == ()
    assert [g.shape for g in torch.autograd.grad(loss, (x, weight, bias))] == [a.shape for a in free]
    assert A.linear_log_prob(x, weight, y.to("meta"), MAPS[name]).shape == y.shape
    for given in ({"linear_weight": weight}, {"linear_weight": free[1], "linear_bias": bias}):
        with pytest.raises(ValueError, match="is on meta, the call's other arrays are on cpu; move one of them"):
            A.linear_loss(free[0], target=y, mapping=MAPS[name], **given)
    if MAPS[name].has_threshold:
        assert A.linear.linear_threshold(x, weight, MAPS[name], linear_bias=bias).tau.shape == y.shape


# -- further losses -----------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_a_compiled_soft_cap_holds_no_scores():
    torch, free, y = torch_operands("float32", seed=3)
    cap, seen = A.transforms.softcap(2.0), []

    def step(x, w):
        entropy = A.linear_log_prob_entropy(x, w, y, transform=cap)[1]
        return (
            A.linear_loss(x, w, y, z_loss=0.5, transform=cap)
            + A.linear_loss(x, w, y, "sparsemax", transform=cap)
            + A.linear_loss(x, w, y, "sparsemax", suppress=0.5)
            + entropy.sum()
        )

    def backend(graph, _):
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    same(compiled(*free[:2]), step(*free[:2]), free[:2], 1e-5)
    assert not any("matmul" in str(target) for target in seen)


def test_a_masked_row_and_a_lost_one_with_further_losses():
    torch, free, y = torch_operands(seed=3)
    x, weight, _ = free
    mask = torch.ones(len(x), 60, dtype=torch.bool)
    mask[1] = False
    y[1] = -100
    with torch.no_grad():
        x[2, 0] = float("nan")
    for mapping, options in ((Sparsemax(), {"suppress": 0.7}), (Softmax(), {"z_loss": 0.3})):
        value = A.linear_loss(x, weight, y, mapping, mask=mask, reduction="none", **options)
        assert value[1] == 0
        assert value[2].isnan()
        (g,) = torch.autograd.grad(value[[0, 1, 3, 4, 5, 6]].sum(), x)
        assert torch.isfinite(g[[0, 1, 3, 4, 5, 6]]).all()


def test_what_a_loss_will_do_can_be_read():
    torch, free, y = torch_operands("float32")
    told = lambda *a, **k: A.linear.explain_linear_loss(*free[:2], y, *a, **k)  # noqa: E731
    assert told() == "all 60 scores of 7 rows at a time, with their gradient in the forward pass"
    assert told(chunk=16) == "the scores of 16 classes and 7 rows at a time, computed again for the gradient"
    assert told("sparsemax") == told()
    for options in ({"chunk": 16}, {"reduction": "none"}):
        assert "each row keeps those" in told("sparsemax", **options)
    x, weight = torch.zeros(600, 1024, requires_grad=True), torch.zeros(20_000, 1024, requires_grad=True)
    plan = A.linear.explain_linear_loss(x, weight, torch.zeros(600, dtype=torch.int64), "sparsemax")
    assert "each row keeps those" in plan  # all scores of some rows would take too much memory
    assert told("taylor", reduction="none").endswith("computed again for the gradient")
    with pytest.raises(TypeError, match="chunks"):
        told(chunks=3)


def test_equal_class_weights_change_no_mean():
    x, weight, _, y, *_ = operands()
    for mapping, options in (("softmax", {"z_loss": 0.3}), ("sparsemax", {"suppress": 0.7})):
        want = A.linear_loss(x, weight, y, mapping, **options)
        close(A.linear_loss(x, weight, y, mapping, weight=np.full(60, 10.0), **options), want, 1e-12)


@pytest.mark.parametrize("name", ["softmax", "entmax15", "normmax"])
def test_class_weights_of_a_one_hot_target_are_those_of_its_index(name):
    x, w, _, y, weight, _ = operands()
    given = {"weight": weight, "z_loss": 0.3, "label_smoothing": 0.1, "reduction": "none"}
    one_hot = np.eye(60)[y]
    close(A.linear_loss(x, w, one_hot, MAPS[name], **given), A.linear_loss(x, w, y, MAPS[name], **given), 1e-12)


def test_suppression_of_a_row_whose_biases_mask_all():
    torch, free, y = torch_operands(seed=3)
    bias = torch.full((60,), -float("inf"), dtype=torch.float64)
    value = A.linear_loss(*free[:2], y, "sparsemax", linear_bias=bias, suppress=0.5, reduction="none")
    for g in torch.autograd.grad(value[torch.isfinite(value)].sum(), free[:2]):
        assert torch.isfinite(g).all()
