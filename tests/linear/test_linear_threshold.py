"""Output layers: tau with its derivatives, and the loss of tau squared."""

from __future__ import annotations

import numpy as np
import pytest
from kinds import KINDS, back
from laws import close
from linear_cases import CLASSES, MAPS, ROWS, dense, made, operands, same, torch_operands

import anymax as A
from anymax import Bounded, Budget, Elementwise, Entmax, NormMax, Sink, Softmax, Sparsemax

THRESHOLDS = {name: mapping for name, mapping in MAPS.items() if mapping.has_threshold} | {
    "budget": Budget(5), "sigmoids": Budget(2, shape="sigmoid"), "laplace": Budget(2, shape="laplace"), "bounded": Bounded(0.3),
    "bounded15": Bounded(0.3, alpha=1.5), "normmax3": NormMax(3.0), "entmax25": Entmax(2.5), "sink": Sink(Entmax(1.5), 0.5),
}  # fmt: skip


@pytest.mark.whole(lambda name: name not in ("softmax", "entmax15", "budget"))
@pytest.mark.parametrize("name", THRESHOLDS)
def test_the_gradient_of_tau_is_that_of_finite_differences(name):
    """In all ways of torch: blocks of classes, candidates, all scores of some rows."""
    torch, free, _ = torch_operands(rows=4, classes=12)
    x = free[0].detach() @ free[1].detach().T + free[2].detach()
    scores = x.requires_grad_()
    assert torch.autograd.gradcheck(lambda s: A.threshold(THRESHOLDS[name], s).tau, scores)
    assert torch.autograd.gradgradcheck(lambda s: A.threshold(THRESHOLDS[name], s).tau, scores)
    for chunk in (None, 5):
        ask = lambda x, w, b: A.linear.linear_threshold(x, w, THRESHOLDS[name], linear_bias=b, chunk=chunk).tau  # noqa: B023, E731
        assert torch.autograd.gradcheck(ask, free)
    assert torch.autograd.gradgradcheck(ask, free, fast_mode=True)


@pytest.mark.parametrize("name", ["softmax", "entmax15", "topk", "normmax", "sigmoids", "sink"])
def test_the_gradient_of_tau_of_a_layer_is_that_of_all_scores(name):
    torch, free, _ = torch_operands(rows=90, classes=300, sigma=1.5)
    keep = torch.tensor(np.random.default_rng(2).random((90, 300)) < 0.5)
    keep[3] = False
    for mask, transform, chunk in (
        (None, None, None),
        (keep, None, None),
        (None, None, 64),
        (None, A.transforms.softcap(2.0), None),
    ):
        if transform is not None and name == "sink":
            continue
        options = {"mask": mask, "transform": transform, "chunk": chunk}
        got = A.linear.linear_threshold(*free[:2], THRESHOLDS[name], linear_bias=free[2], **options)
        s = free[0] @ free[1].T + free[2]
        want = A.threshold(THRESHOLDS[name], s if transform is None else transform(s), mask=mask)
        assert (got.support == want.support).all()
        assert mask is None or name == "sink" or got.tau[3] == want.tau[3] == -float("inf")
        same(got.tau, want.tau, free, 1e-10)


@pytest.mark.whole(lambda inner: inner not in ("softmax", "sparsemax", "budget"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inner", ["softmax", "sparsemax", "entmax15", "topk", "normmax", "budget", "bounded"])
def test_the_sink_is_no_class_of_the_support(kind, inner):
    """In each way of torch, whether the sink has a probability or not, and with every class of a row masked."""
    x, weight, bias, *_ = operands()
    keep = np.random.default_rng(2).random((ROWS, CLASSES)) < 0.5
    keep[3] = False
    make = KINDS[kind]
    s = make(x @ weight.T + bias)
    for score in (0.5, 30.0, -np.inf):
        mapping = Sink(THRESHOLDS[inner], score)
        for mask, chunk in ((None, None), (keep, None), (keep[0], 16)):
            mask = None if mask is None else make(mask)
            got = A.linear.linear_threshold(
                *map(make, (x, weight)), mapping, linear_bias=make(bias), mask=mask, chunk=chunk
            )
            want = A.threshold(mapping, s, mask=mask)
            np.testing.assert_array_equal(back(got.support), back(want.support))
            np.testing.assert_allclose(back(got.tau), back(want.tau), rtol=1e-5, atol=1e-5)


def test_the_gradient_of_tau_is_p_or_the_sensitivities():
    """For softmax p; for sparsemax even over the support; for entmax the square roots of p, divided by their sum."""
    torch, free, _ = torch_operands()
    s = (free[0] @ free[1].T).detach().requires_grad_()
    p = {name: A.apply(MAPS[name], s.detach()) for name in ("softmax", "sparsemax", "entmax15", "topk", "normmax")}
    want = {
        "softmax": p["softmax"], "sparsemax": (p["sparsemax"] > 0).double(), "entmax15": p["entmax15"].sqrt(), "topk": p["topk"],
        "normmax": p["normmax"],
    }  # fmt: skip
    for name, weights in want.items():
        got = torch.autograd.grad(A.threshold(MAPS[name], s).tau.sum(), s)[0]
        close(got, weights / weights.sum(1, keepdim=True), 1e-10, name)


@pytest.mark.parametrize(
    ("make", "low"),
    [
        (Entmax, 1.1), (lambda a: Entmax(a + 0.9), 1.1), (NormMax, 1.2), (Budget, 1.2), (lambda k: Budget(k, shape="sigmoid"), 1.2),
        (lambda u: Bounded(u - 0.7), 1.0), (lambda t: Elementwise(tau=t), 0.0), (lambda t: Sink(Entmax(1.5), t), 0.0),
    ],
)  # fmt: skip
def test_tau_has_a_gradient_in_the_parameters(make, low):
    torch, free, _ = torch_operands(rows=4, classes=6)
    value = (low + torch.tensor([[0.1], [0.25], [0.4], [0.6]], dtype=torch.float64)).requires_grad_()
    s = (free[0] @ free[1].T).detach().requires_grad_()
    ask = lambda value, s: A.threshold(make(value), s).tau  # noqa: E731
    assert torch.autograd.gradcheck(ask, (value, s))
    assert torch.autograd.gradgradcheck(ask, (value, s))
    if make is Entmax:
        both = lambda value, x, w: A.linear.linear_threshold(x, w, make(value)).tau  # noqa: E731
        assert torch.autograd.gradcheck(both, (value, *free[:2]))


def test_alpha_of_1_among_others_has_the_tau_of_softmax():
    torch, free, _ = torch_operands(rows=2, classes=6)
    alpha = torch.tensor([[1.0], [1.5]], dtype=torch.float64, requires_grad=True)
    s = (free[0] @ free[1].T).detach().requires_grad_()
    tau = A.threshold(Entmax(alpha), s).tau
    close(tau[0].detach(), s[0].detach().logsumexp(0), 1e-10)
    (g,) = torch.autograd.grad(tau.sum(), s)
    close(g[0], s[0].detach().softmax(0), 1e-10)


def test_rows_that_are_lost_or_masked():
    torch, free, _ = torch_operands()
    with torch.no_grad():
        free[0][1, 2] = float("nan")
    keep = torch.ones(ROWS, CLASSES, dtype=torch.bool)
    keep[4] = False
    for name in ("softmax", "sparsemax", "sigmoids", "normmax", "topk"):
        tau, support = A.linear.linear_threshold(*free[:2], THRESHOLDS[name], mask=keep)
        assert tau[1].isnan()
        assert tau[4] == -float("inf")
        assert support[4] == 0
        sound = [0, 2, 3, 5, 6]
        (g,) = torch.autograd.grad(tau[[*sound, 4]].sum(), free[0])
        assert torch.isfinite(g[sound]).all()
        assert not g[4].any()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's forward mode
@pytest.mark.parametrize("name", ["softmax", "entmax15", "normmax"])
def test_torch_func(name):
    torch, free, _ = torch_operands(rows=3, classes=8)
    x, weight, bias = (a.detach() for a in free)
    tau = lambda row: A.linear.linear_threshold(row, weight, MAPS[name], linear_bias=bias).tau  # noqa: E731
    got = torch.func.vmap(torch.func.grad(tau))(x)
    want = torch.autograd.grad(A.threshold(MAPS[name], free[0] @ free[1].T + free[2]).tau.sum(), free[0])[0]
    close(got, want, 1e-10)
    close(torch.func.jacfwd(tau)(x[0]), want[0], 1e-10)


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("name", ["softmax", "sparsemax"])
def test_compiled(name):
    torch, free, _ = torch_operands("float32")
    step = lambda x, w: A.linear.linear_threshold(x, w, MAPS[name]).tau.square().sum()  # noqa: E731
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    same(compiled(*free[:2]), step(*free[:2]), free[:2], 1e-5)


@pytest.mark.skipif("jax" not in KINDS, reason="needs JAX")
@pytest.mark.whole
@pytest.mark.parametrize("name", ["softmax", "entmax15", "normmax", "topk", "sigmoids", "sink"])
def test_jax(name):
    import jax

    torch, free, _ = torch_operands("float32", classes=20)
    x, weight, bias = made("jax", *(back(a) for a in free))
    ask = lambda x, w, b: A.linear.linear_threshold(x, w, THRESHOLDS[name], linear_bias=b).tau.sum()  # noqa: E731
    own = A.linear.linear_threshold(*free[:2], THRESHOLDS[name], linear_bias=free[2]).tau.sum()
    for a, b in zip(jax.jit(jax.grad(ask, (0, 1, 2)))(x, weight, bias), torch.autograd.grad(own, free)):
        close(back(a), b, 1e-4)
    each = jax.vmap(jax.grad(lambda s: A.threshold(THRESHOLDS[name], s).tau))(x)
    s = free[0].detach().requires_grad_()
    close(back(each), torch.autograd.grad(A.threshold(THRESHOLDS[name], s).tau.sum(), s)[0], 1e-5)


# -- the loss of tau squared -----------------------------------------------------------------------------------------------------------


@pytest.mark.whole
def test_second_derivatives_of_z_loss():
    torch, free, y = torch_operands(rows=3, classes=9)
    for mapping in (Softmax(), Entmax(1.5), Sparsemax()):
        loss = lambda *o: A.linear_loss(*o[:2], y % 9, mapping, linear_bias=o[2], z_loss=0.3)  # noqa: B023, E731
        assert torch.autograd.gradcheck(loss, free)
        assert torch.autograd.gradgradcheck(loss, free)


def test_the_module():
    torch = pytest.importorskip("torch")
    head = A.nn.LinearLoss(4, 30, Entmax(1.5), bias=True, z_loss=0.2)
    x, y = torch.randn(6, 4), torch.randint(30, (6,))
    tau = A.threshold(head.mapping, head.scores(x)).tau
    want = dense(head.mapping, head.scores(x), y) + 0.2 * (tau**2).mean()
    close(head(x, y).detach(), want.detach(), 1e-5)
