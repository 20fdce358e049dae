"""Output layers: losses, log p and thresholds of scores that are never all held, against the same of all scores in fp64, and finite
differences."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest
from kinds import KINDS, back, every_kind
from laws import close

import anymax as A
from anymax import Budget, Entmax, NormMax, PerturbMax, Ratio, Sigsoftmax, Softmax, Sparsemax, SparseSoftmax, Taylor

INF, NAN = math.inf, math.nan
ROWS, FEATURES, CLASSES = 7, 5, 60


@dataclasses.dataclass(frozen=True, eq=False)
class Squares(A.Separable):
    """Sparsemax, as a map of a user's own."""

    name = "squares"
    facts = A.Facts(monotone=True, shift_invariant=True, sparse=True, has_potential=True, margin=1.0)

    def omega_terms(self, q, xp):
        return 0.5 * q * q

    def link(self, t, xp):
        return xp.where(t > 0, t, 0.0 * t)

    def slope(self, q, xp):
        return q

    def curvature(self, q, xp):
        return xp.ones_like(q)


MAPS = {
    "softmax": Softmax(), "sparsemax": Sparsemax(), "entmax15": Entmax(1.5), "entmax1": Entmax(1.0), "entmax3": Entmax(3.0),
    "entmax08": Entmax(0.8), "topk": SparseSoftmax(k=4), "topp": SparseSoftmax(p=0.8), "normmax": NormMax(2.0), "squares": Squares(),
    "taylor": Taylor(2), "sigsoftmax": Sigsoftmax(), "relu": Ratio.square(), "normal": PerturbMax("normal"),
}  # fmt: skip
QUICK = (
    "softmax",
    "sparsemax",
    "entmax15",
    "entmax1",
    "entmax3",
    "topk",
    "squares",
)  # those that never need a whole row
SEVERAL = ("softmax", "entmax1", "sparsemax", "entmax15", "topk", "normmax", "taylor")
every_map = pytest.mark.parametrize("name", MAPS)


def tolerance(kind):
    return 2e-5 if kind == "jax" else 1e-10


def operands(seed=0, rows=ROWS, classes=CLASSES, sigma=0.8):
    rng = np.random.default_rng(seed)
    x, weight, bias = (
        rng.normal(size=(rows, FEATURES)),
        sigma * rng.normal(size=(classes, FEATURES)),
        rng.normal(size=classes),
    )
    return x, weight, bias, rng.integers(classes, size=rows), rng.uniform(0.3, 2.0, classes), rng.random(classes) < 0.8


def dense(mapping, scores, target, weight=None, **options):
    """The loss of all scores, as the map has it."""
    options = {"axis": -1, **options}
    if isinstance(mapping, SparseSoftmax):
        return A.sparse_softmax_loss(scores, target, weight, k=mapping.k, p=mapping.p, **options)
    loss = A.fenchel_young if mapping.facts.has_potential and not isinstance(mapping, Softmax) else A.nll
    return loss(mapping, scores, target, weight, **options)


def made(kind, *arrays):
    return [KINDS[kind](a) if isinstance(a, np.ndarray) else a for a in arrays]


# -- values -----------------------------------------------------------------------------------------------------------------

OPTIONS = {
    "plain": ((), {}), "smoothed": ((), {"label_smoothing": 0.1}), "weighted": (("weight",), {"reduction": "sum"}),
    "masked": (("mask",), {"reduction": "none"}), "all": (("weight", "mask"), {"label_smoothing": 0.3}),
}  # fmt: skip


# torch has ways of its own for each option, of a map that never needs a whole row; the others make the scores, and take the loss of these
CASES = [
    *(("torch", name, options) for name in MAPS for options in (OPTIONS if name in QUICK else ("plain", "all"))),
    *((kind, name, "all") for kind in KINDS if kind != "torch" for name in ("softmax", "topp", "taylor")),
    *(("numpy", name, "masked") for name in ("softmax", "normmax")),
]
BRIEF = [
    *(("torch", name, "all") for name in MAPS), *(("torch", name, "plain") for name in ("softmax", "entmax15", "topk")),
    ("numpy", "softmax", "all"), ("numpy", "taylor", "all"), ("jax", "softmax", "all"),
]  # fmt: skip


@pytest.mark.whole(lambda kind, name, options: (kind, name, options) not in BRIEF)
@pytest.mark.parametrize(("kind", "name", "options"), [case for case in CASES if case[0] in KINDS])
def test_the_loss_is_that_of_all_scores(kind, name, options):
    mapping, (x, weight, bias, y, factors, keep) = MAPS[name], operands()
    y[2] = -100
    keep[y[y >= 0]] = True
    arrays, given = OPTIONS[options]
    arrays = {key: {"weight": factors, "mask": keep}[key] for key in arrays}
    want = dense(mapping, x @ weight.T + bias, y, **arrays, **given)
    for chunk in (None, 16):
        a, w, t, b = made(kind, x, weight, y, bias)
        own = {key: KINDS[kind](value) for key, value in arrays.items()}
        got = A.linear_loss(a, w, t, mapping, linear_bias=b, chunk=chunk, **own, **given)
        close(back(got), want, tolerance(kind), chunk)


@pytest.mark.whole(lambda name, kind: kind != "torch" or name == "topp")
@every_kind
@pytest.mark.parametrize("name", ["softmax", "sparsemax", "topp", "taylor"])
def test_soft_targets(name, kind):
    mapping, (x, weight, bias, _, factors, _) = MAPS[name], operands()
    soft = np.random.default_rng(3).dirichlet(np.full(CLASSES, 0.1), ROWS)
    want = dense(mapping, x @ weight.T + bias, soft, factors)
    a, w, t, b, f = made(kind, x, weight, soft, bias, factors)
    close(back(A.linear_loss(a, w, t, mapping, linear_bias=b, weight=f)), want, tolerance(kind))
    if name in ("softmax", "sparsemax"):
        want = dense(mapping, x @ weight.T, soft, label_smoothing=0.2, reduction="none")
        close(
            back(A.linear_loss(a, w, t, mapping, label_smoothing=0.2, reduction="none", chunk=20)),
            want,
            tolerance(kind),
        )


def test_a_budget_of_classes():
    x, weight, bias, *_ = operands()
    several = (np.random.default_rng(5).random((ROWS, CLASSES)).argsort(1) < 3) * 1.0
    want = A.fenchel_young(Budget(3), x @ weight.T + bias, several)
    for kind in set(KINDS) & {"numpy", "torch"}:
        a, w, b, t = made(kind, x, weight, bias, several)
        close(back(A.linear_loss(a, w, t, Budget(3), linear_bias=b, chunk=11)), want, 1e-10)


@pytest.mark.thin(4)
@pytest.mark.whole(lambda kind: kind == "jax")
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (k, name)
        for k in KINDS
        if k != "strict"
        for name in (MAPS if k == "torch" else ("softmax", "entmax15", "taylor"))
    ],
)
def test_log_p_and_the_threshold(kind, name):
    mapping, (x, weight, bias, y, _, keep) = MAPS[name], operands(1)
    scores = x @ weight.T + bias
    y[0] = -1
    a, w, t, b, k = made(kind, x, weight, y, bias, keep)
    for chunk in (None, 16):
        got = A.linear_log_prob(a, w, t, mapping, linear_bias=b, mask=k, chunk=chunk)
        close(
            np.nan_to_num(back(got), neginf=-1e9),
            np.nan_to_num(A.log_prob(mapping, scores, y, mask=keep), neginf=-1e9),
            10 * tolerance(kind),
        )
        if mapping.has_threshold:
            tau, support = A.linear.linear_threshold(a, w, mapping, linear_bias=b, mask=k, chunk=chunk)
            want = A.threshold(mapping, scores, mask=keep)
            close(back(tau), want.tau, tolerance(kind))
            np.testing.assert_array_equal(back(support), want.support)


@pytest.mark.whole(lambda kind: kind == "jax")
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "strict"])
def test_a_support_touches_its_rows_of_the_weight_only(kind):
    x, weight, bias, y, *_ = operands(2)
    rng = np.random.default_rng(7)
    rows = [np.unique([*rng.integers(CLASSES, size=5), *([y[i]] if i else [])]) for i in range(ROWS)]
    ids, offsets = np.concatenate(rows), np.cumsum([0, *map(len, rows)])
    if y[0] in rows[0]:
        y[0] = next(c for c in range(CLASSES) if c not in rows[0])
    holes = np.where(np.isin(np.arange(CLASSES), ids)[:, None], weight, NAN)
    a, w, t, b, i, o = made(kind, x, holes, y, bias, ids, offsets)
    for name in ("softmax", "entmax15", "sigsoftmax"):
        want = A.log_prob(MAPS[name], x @ weight.T + bias, y, support=(ids, offsets))
        got = back(A.linear_log_prob(a, w, t, MAPS[name], linear_bias=b, support=(i, o)))
        assert got[0] == -INF
        close(np.maximum(got, -1e9), np.maximum(want, -1e9), 10 * tolerance(kind))
    if kind == "torch":
        free = [v.clone().requires_grad_() for v in (a, w, b)]
        A.linear_log_prob(free[0], free[1], t, Softmax(), linear_bias=free[2], support=(i, o))[1:].sum().backward()
        full = [v.clone().requires_grad_() for v in (a, *made(kind, weight, bias))]
        A.log_prob(Softmax(), full[0] @ full[1].T + full[2], t, support=(i, o))[1:].sum().backward()
        for got, want in zip(free, full):
            close(got.grad, want.grad, 1e-10)


# -- gradients ------------------------------------------------------------------------------------------------------------------


def torch_operands(dtype="float64", seed=0, **sizes):
    torch = pytest.importorskip("torch")
    x, weight, bias, y, *_ = operands(seed, **sizes)
    free = [torch.tensor(a, dtype=getattr(torch, dtype)).requires_grad_() for a in (x, weight, bias)]
    return torch, free, torch.tensor(y)


@pytest.mark.parametrize(("name", "options"), [*((name, "all") for name in MAPS), *((name, "plain") for name in QUICK)])
def test_gradients_by_finite_differences(name, options):
    torch, (x, weight, bias), y = torch_operands(rows=4, classes=12)
    mapping = MAPS[name]
    factors = torch.linspace(0.5, 2.0, 12, dtype=torch.float64)
    given = {} if options == "plain" else {"weight": factors, "label_smoothing": 0.2}
    y[1] = -100

    def loss(x, weight, bias):
        return A.linear_loss(x, weight, y, mapping, linear_bias=bias, reduction="none", chunk=5, **given)

    assert torch.autograd.gradcheck(loss, (x, weight, bias), eps=1e-6, atol=2e-6, fast_mode=True)


@pytest.mark.whole(lambda name: name not in ("softmax", "entmax15", "taylor"))
@pytest.mark.parametrize("name", SEVERAL)
def test_the_gradient_of_the_gradient(name):
    torch, (x, weight, bias), y = torch_operands(rows=3, classes=9)
    mapping = MAPS[name]

    def loss(x, weight, bias):
        return A.linear_loss(x, weight, y, mapping, linear_bias=bias, label_smoothing=0.1, reduction="none", chunk=4)

    assert torch.autograd.gradgradcheck(loss, (x, weight, bias), eps=1e-6, atol=2e-5, fast_mode=True)


@pytest.mark.thin(4)
@every_map
def test_gradients_of_log_p(name):
    """Where p is 0 it is that of the loss, e_y - p."""
    torch, free, y = torch_operands(rows=5)
    mapping = MAPS[name]
    got = torch.autograd.grad(
        A.linear_log_prob(*free[:2], y, mapping, linear_bias=free[2], chunk=7).clamp(min=-30).sum(), free
    )
    scores = free[0] @ free[1].T + free[2]
    want = torch.autograd.grad(A.log_prob(mapping, scores, y).clamp(min=-30).sum(), free)
    for a, b in zip(got, want):
        close(a, b, 1e-9, name)
    if name in ("sparsemax", "entmax15"):
        lost = A.log_prob(mapping, scores, y) == -INF
        assert lost.any()
        given = lost.double()
        bias = torch.autograd.grad(
            A.linear_log_prob(*free[:2], y, mapping, linear_bias=free[2], chunk=7), free[2], given
        )[0]
        p = A.apply(mapping, scores.detach())
        close(bias, (torch.nn.functional.one_hot(y, CLASSES) - p)[lost].sum(0), 1e-9)


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


def test_alpha_is_learned():
    torch, free, y = torch_operands()
    for shape in ((), (ROWS, 1)):
        alpha = torch.full(shape, 1.4, dtype=torch.float64, requires_grad=True)
        got = torch.autograd.grad(A.linear_loss(*free[:2], y, Entmax(alpha), chunk=13), [alpha, *free[:2]])
        want = torch.autograd.grad(dense(Entmax(alpha), free[0] @ free[1].T, y), [alpha, *free[:2]])
        for a, b in zip(got, want):
            close(a, b, 1e-9)
    scale = torch.tensor(1.2, dtype=torch.float64, requires_grad=True)  # of a map that needs whole rows
    got = torch.autograd.grad(A.linear_loss(*free[:2], y, PerturbMax(scale=scale), chunk=13), [scale, *free[:2]])
    want = torch.autograd.grad(dense(PerturbMax(scale=scale), free[0] @ free[1].T, y), [scale, *free[:2]])
    for a, b in zip(got, want):
        close(a, b, 1e-9)


@pytest.mark.thin(4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["softmax", "entmax15", "sparsemax", "topk", "taylor"])
def test_dtypes(name, dtype):
    """Against fp64 on the same rounded operands: scores in half precision carry their own rounding, as those of `x @ weight.T` do."""
    torch, free, y = torch_operands(dtype, sigma=0.4)
    wide = [a.detach().double().requires_grad_() for a in free]
    got = A.linear_loss(*free[:2], y, MAPS[name], linear_bias=free[2], label_smoothing=0.1, chunk=17)
    want = dense(MAPS[name], wide[0] @ wide[1].T + wide[2], y, label_smoothing=0.1)
    assert got.dtype is free[0].dtype
    eps = torch.finfo(free[0].dtype).eps
    close(got.detach().double(), want.detach(), 16 * eps)
    for a, b in zip(torch.autograd.grad(got, free), torch.autograd.grad(want, wide)):
        assert a.dtype is free[0].dtype
        close(a.double(), b, 16 * eps)


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
    flat = A.linear_loss(1e-6 * free[0], free[1], y, least=0.001)  # all are kept
    close(
        torch.autograd.grad(flat, free[1])[0],
        torch.autograd.grad(A.linear_loss(1e-6 * free[0], free[1], y), free[1])[0],
        1e-12,
    )
    assert torch.autograd.gradcheck(lambda x: A.linear_loss(x, free[1], y, least=1e-300), free[0], fast_mode=True)


def test_autocast_is_that_of_a_linear_layer():
    torch, free, y = torch_operands("float32")
    with torch.autocast("cpu", torch.bfloat16):
        got = A.linear_loss(*free[:2], y, Softmax(), linear_bias=free[2])
        want = torch.nn.functional.cross_entropy(torch.nn.functional.linear(*free), y)
    assert got.dtype is want.dtype is torch.float32
    close(got.detach(), want.detach(), 2e-2)
    assert torch.autograd.grad(got, free)[1].dtype is torch.float32


# -- rows out of the ordinary ------------------------------------------------------------------------------------------------------


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", QUICK)
def test_many_rows_and_blocks(name):
    """More rows than a tile of them, and blocks that the library chooses."""
    torch, free, y = torch_operands(rows=1100, classes=300, sigma=1.5)
    y[::7] = -100
    got = A.linear_loss(*free[:2], y, MAPS[name], linear_bias=free[2])
    want = dense(MAPS[name], free[0] @ free[1].T + free[2], y)
    close(got.detach(), want.detach(), 1e-10)
    for a, b in zip(torch.autograd.grad(got, free), torch.autograd.grad(want, free)):
        close(a, b, 1e-10)


@pytest.mark.parametrize("name", ["sparsemax", "entmax15", "topk"])
def test_rows_whose_support_is_large_are_served_in_groups(name):
    """At the start of training all scores are near 0, and most classes have a probability; some rows may be ahead of the others."""
    torch, free, y = torch_operands(rows=80, classes=4096, sigma=1.0)
    with torch.no_grad():
        free[0][::2] *= 1e-4
        free[2].zero_()
    mapping = MAPS[name] if name != "topk" else SparseSoftmax(k=500)
    from anymax.linear import torch_kept, torch_values
    from anymax.linear.layer import Layer

    layer = Layer.of("test", *free[:2], mapping, None, None)
    held = torch_kept.kept(layer, y, torch_values._bound(mapping), False, None)
    assert held.full.any()
    assert name == "topk" or not held.full.all()
    got = A.linear_loss(*free[:2], y, mapping, linear_bias=free[2])
    want = dense(mapping, free[0] @ free[1].T + free[2], y)
    close(got.detach(), want.detach(), 1e-10)
    for a, b in zip(torch.autograd.grad(got, free), torch.autograd.grad(want, free)):
        close(a, b, 1e-10)
    found, wanted = A.linear.linear_threshold(*free[:2], mapping), A.threshold(mapping, (free[0] @ free[1].T).detach())
    close(found.tau, wanted.tau, 1e-10)
    assert (found.support == wanted.support).all()


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", QUICK)
def test_a_row_of_nan_poisons_no_other(name):
    torch, free, y = torch_operands()
    with torch.no_grad():
        free[0][1, 2], free[0][4, 0] = NAN, INF
    got = A.linear_loss(*free[:2], y, MAPS[name], reduction="none", chunk=9)
    assert got.isnan().nonzero()[:, 0].tolist() == [1, 4]
    sound = [i for i in range(ROWS) if i not in (1, 4)]
    want = dense(MAPS[name], (free[0] @ free[1].T)[sound], y[sound], reduction="none")
    close(got[sound].detach(), want.detach(), 1e-10)
    for a, b in zip(torch.autograd.grad(got[sound].sum(), free[:2]), torch.autograd.grad(want.sum(), free[:2])):
        assert not a[sound].isnan().any() if a.shape[0] == ROWS else True
        close(
            a[sound] if a.shape[0] == ROWS else torch.zeros(1),
            b[sound] if a.shape[0] == ROWS else torch.zeros(1),
            1e-10,
        )


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", QUICK)
def test_masks_of_rows_and_classes(name):
    torch, free, y = torch_operands()
    rng = np.random.default_rng(2)
    keep = torch.tensor(rng.random((ROWS, CLASSES)) < 0.5).scatter(1, y[:, None], True)
    keep[3] = False
    keep[3, y[3]] = True  # one class alone
    y[5] = -100
    keep[5] = False
    bias = free[2].detach().clone()
    bias[[c for c in range(CLASSES) if c not in y.tolist()][:9]] = -INF
    bias.requires_grad_()
    for given in ({"mask": keep}, {"mask": keep, "label_smoothing": 0.1}, {"label_smoothing": 0.1}):
        if "topk" in name and "label_smoothing" in given and "mask" in given:
            continue
        got = A.linear_loss(*free[:2], y, MAPS[name], linear_bias=bias, chunk=11, reduction="none", **given)
        want = dense(MAPS[name], free[0] @ free[1].T + bias, y, reduction="none", **given)
        close(got.detach(), want.detach(), 1e-10, given)
        for a, b in zip(
            torch.autograd.grad(got.sum(), [*free[:2], bias]), torch.autograd.grad(want.sum(), [*free[:2], bias])
        ):
            close(a, b, 1e-10, given)


@pytest.mark.parametrize("name", ["softmax", "sparsemax", "topk"])
def test_a_masked_target_pulls_as_it_does_in_all_scores(name):
    """Its score, the largest of its row, says nothing of what may have a probability."""
    torch, free, y = torch_operands()
    y[0] = (free[0] @ free[1].T)[0].argmax()
    with torch.no_grad():
        free[1][y[0]] *= 5
    scores, keep = free[0] @ free[1].T, torch.ones(ROWS, CLASSES, dtype=torch.bool)
    keep[0, y[0]] = False
    got = A.linear_log_prob(*free[:2], y, MAPS[name], mask=keep, chunk=7)
    want = A.log_prob(MAPS[name], scores, y, mask=keep)
    assert got[0] == want[0] == -INF
    ones = torch.ones_like(want)
    for a, b in zip(torch.autograd.grad(got, free[:2], ones), torch.autograd.grad(want, free[:2], ones)):
        close(a, b, 1e-10)


@pytest.mark.whole(lambda kind: kind == "jax")
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "strict"])
@pytest.mark.parametrize("name", ["softmax", "sparsemax", "taylor"])
def test_shapes(name, kind):
    x, weight, _, y, *_ = operands()
    w = KINDS[kind](weight)
    for lead in ((), (1,), (2, 3), (0,), (0, 2)):
        rows = math.prod(lead)
        a, t = made(kind, x[:rows].reshape(*lead, FEATURES), y[:rows].reshape(lead))
        want = (
            dense(MAPS[name], x[:rows] @ weight.T, y[:rows], reduction="none").reshape(lead) if rows else np.zeros(lead)
        )
        got = A.linear_loss(a, w, t, MAPS[name], reduction="none")
        assert tuple(got.shape) == lead
        close(back(got), want, 2e-5)
        close(back(A.linear_loss(a, w, t, MAPS[name])), want.mean() if rows else 0.0, 2e-5)
    if kind == "torch":
        import torch

        free = torch.tensor(x, requires_grad=True)
        A.linear_loss(free, w, torch.full((ROWS,), -100), MAPS[name]).backward()
        assert not free.grad.any()


def test_ties_are_broken_by_position_as_in_all_scores():
    torch, free, _ = torch_operands(rows=4, classes=40)
    with torch.no_grad():  # whole numbers, whose products are exact
        free[0].round_()
        free[1][:] = torch.arange(1.0, 1.0 + FEATURES)
    y = torch.tensor([0, 5, 39, 12])
    for mapping in (SparseSoftmax(k=6), Sparsemax(), Softmax()):
        got = torch.autograd.grad(A.linear_loss(*free[:2], y, mapping, chunk=7), free[:2])
        want = torch.autograd.grad(dense(mapping, free[0] @ free[1].T, y), free[:2])
        for a, b in zip(got, want):
            close(a, b, 1e-10)


# -- transforms, margins, modules --------------------------------------------------------------------------------------------------


@pytest.mark.whole(lambda kind: kind == "jax")
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "strict"])
def test_transforms(kind):
    x, weight, _, y, *_ = operands()
    transform = A.compose(A.temperature(0.7), A.topk(9))
    a, w, t = made(kind, x, weight, y)
    for mapping in (Softmax(), Sparsemax()):
        want = A.log_prob(mapping, x @ weight.T, y, transform=transform)
        close(np.exp(back(A.linear_log_prob(a, w, t, mapping, transform=transform))), np.exp(want), 1e-5)
        want = dense(mapping, A.temperature(2.0)(x @ weight.T), y)
        close(back(A.linear_loss(a, w, t, mapping, transform=A.temperature(2.0), chunk=20)), want, 1e-5)


@pytest.mark.thin(4)
@pytest.mark.parametrize("margin", [A.margins.AM(0.3), A.margins.ArcFace(0.5)], ids=str)
@pytest.mark.parametrize("name", [*QUICK, "taylor"])
def test_margins(name, margin):
    from anymax.linear.verbs import margin_linear_loss

    torch, free, y = torch_operands()
    y[3] = -100
    unit = [torch.nn.functional.normalize(a, dim=-1) for a in free[:2]]
    got = margin_linear_loss(*unit, y, MAPS[name], margin, 8.0, ignore_index=-100, reduction="mean")
    want = A.margin_loss(MAPS[name], unit[0] @ unit[1].T, y, margin=margin, scale=8.0, axis=-1)
    close(got.detach(), want.detach(), 1e-10)
    for a, b in zip(torch.autograd.grad(got, free[:2], retain_graph=True), torch.autograd.grad(want, free[:2])):
        close(a, b, 1e-9)


def test_a_large_margin_head_holds_no_cosines(monkeypatch):
    torch = pytest.importorskip("torch")
    from anymax.nn import margin_head

    for name in ("softmax", "entmax15", "normmax"):
        torch.manual_seed(0)
        head = A.nn.MarginHead(6, 50, MAPS[name], A.margins.ArcFace(0.2), 8.0)
        x, y = torch.randn(9, 6), torch.randint(50, (9,))
        want = head(x, y)
        gradient = torch.autograd.grad(want, head.weight)[0]
        with monkeypatch.context() as patch:
            patch.setattr(margin_head, "_MANY", 100)
            patch.setattr(A.nn.MarginHead, "cosines", None)
            got = head(x, y)
        close(got.detach(), want.detach(), 1e-5)
        close(torch.autograd.grad(got, head.weight)[0], gradient, 1e-5)


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


# -- torch: what traces ------------------------------------------------------------------------------------------------------------


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

    got, want = loss(*free), A.linear_loss(*free[:2], y, MAPS[name], linear_bias=free[2], label_smoothing=0.1)
    close(got.detach(), want.detach(), 1e-5)
    for a, b in zip(torch.autograd.grad(got, free), torch.autograd.grad(want, free)):
        close(a, b, 1e-5)
    assert len(calls) == 2


@pytest.mark.parametrize("grad", [pytest.param(True, marks=pytest.mark.whole), False])
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
    "another width": (lambda: A.linear_loss(X, [[1.0]], [0, 0]), ValueError, r"expected features \[..., features\]"),
    "a bias of another width": (lambda: A.linear_loss(X, W, [0, 0], linear_bias=[1.0]), ValueError, "one number per class"),
    "no classes": (lambda: A.linear_loss(X, np.zeros((0, 2)), [0, 0]), ValueError, "at least one is needed"),
    "no class": (lambda: A.linear_loss(X, W, [0, 3]), IndexError, "from 0 to 2"),
    "too few targets": (lambda: A.linear_loss(X, W, [0]), ValueError, r"of shape \(2,\)"),
    "a distribution of another shape": (lambda: A.linear_loss(X, W, [0.5, 0.5]), ValueError, "class indices must be integers"),
    "smoothing of 2": (lambda: A.linear_loss(X, W, [0, 1], label_smoothing=2), ValueError, "from 0 to 1"),
    "a least probability of 1": (lambda: A.linear_loss(X, W, [0, 1], least=1.0), ValueError, "from 0 to below 1"),
    "a least probability of sparsemax": (lambda: A.linear_loss(X, W, [0, 1], Sparsemax(), least=0.1), ValueError, "to softmax only"),
    "an unknown reduction": (lambda: A.linear_loss(X, W, [0, 1], reduction="average"), ValueError, "reduction must be"),
    "a fraction of a class": (lambda: A.linear_loss(X, W, [0, 1], chunk=2.5), TypeError, "the number of classes at a time"),
    "no classes at a time": (lambda: A.linear_loss(X, W, [0, 1], chunk=0), ValueError, "at least 1"),
    "a map of another kind": (lambda: A.linear_loss(X, W, [0, 1], "sparsmax"), ValueError, "did you mean 'sparsemax'"),
    "noise": (lambda: A.linear_loss(X, W, [0, 1], transform=A.transforms.noise()), ValueError, "draws random numbers"),
    "a temperature of each row": (
        lambda: A.linear_loss(X, W, [0, 1], transform=A.temperature(np.ones((2, 1)))), ValueError, "parameters that differ between rows",
    ),
    "an alpha of each class": (lambda: A.linear_loss(X, W, [0, 1], Entmax(np.full(3, 1.5))), ValueError, "does not broadcast"),
    "a float mask": (lambda: A.linear_loss(X, W, [0, 1], mask=[1.0, 0.0, 1.0]), TypeError, "boolean array"),
    "a mask of another width": (lambda: A.linear_loss(X, W, [0, 1], mask=[True] * 2), ValueError, "does not broadcast"),
    "axis": (lambda: A.linear_loss(X, W, [0, 1], axis=1), TypeError, "its last axis"),
    "a map without a threshold": (lambda: A.linear.linear_threshold(X, W, Taylor(2)), TypeError, "has no threshold"),
    "a support and a mask": (
        lambda: A.linear_log_prob(X, W, [0, 1], support=([0, 1], [0, 1, 2]), mask=[True] * 3), ValueError, "neither mask nor transform",
    ),
    "targets of log p that are too few": (lambda: A.linear_log_prob(X, W, [0]), ValueError, r"\(integers\) of shape \(2,\)$"),
    "a bias in the place of the map": (lambda: A.linear_loss(X, W, [0, 1], np.ones(3)), TypeError, "a bias is linear_bias="),
    "torch's name of x": (lambda: A.linear_loss(input=X, linear_weight=W, target=[0, 1]), TypeError, r"'input' \(say x=\)"),
    "a bias without its name": (
        lambda: A.linear_loss(X, W, [0, 1], "softmax", [1.0] * 3), TypeError,
        r"takes 4 without a name \(x, linear_weight, target, mapping\), got 5; name the others: linear_bias=, weight=",
    ),
    "floats for classes": (lambda: A.linear_log_prob(X, W, [0.0, 1.0]), TypeError, "class indices"),
    "five classes to keep of three": (lambda: A.linear_loss(X, W, [0, 1], Budget(5)), ValueError, "5"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    call, kind, said = REFUSED[case]
    with pytest.raises(kind, match=said):
        call()


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
        with pytest.raises(ValueError, match="is on meta and x on cpu; move one of them"):
            A.linear_loss(free[0], target=y, mapping=MAPS[name], **given)
    if MAPS[name].has_threshold:
        assert A.linear.linear_threshold(x, weight, MAPS[name], linear_bias=bias).tau.shape == y.shape


def test_dtypes_that_differ_are_refused():
    _, free, y = torch_operands()
    with pytest.raises(TypeError, match="must have one dtype"):
        A.linear_loss(free[0].float(), free[1], y)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_bound_is_rounded_down(dtype):
    torch = pytest.importorskip("torch")
    from anymax.linear import torch_candidates

    x = torch.linspace(-3.0, 3.0, 1001)
    low = torch_candidates._rounded_down(x, getattr(torch, dtype))
    above = torch.nextafter(low, torch.full_like(low, math.inf))
    assert bool(((low.float() <= x) & (x < above.float())).all())


def leaves(rows):
    torch = pytest.importorskip("torch")
    g = torch.Generator().manual_seed(0)
    x, weight, bias = torch.randn(rows, 4, generator=g), torch.randn(9, 4, generator=g), torch.randn(9, generator=g)
    return [a.requires_grad_() for a in (x, weight, bias)], torch.randint(9, (rows,), generator=g)


@pytest.mark.parametrize("mapping", [Softmax(), Sparsemax()], ids=repr)
def test_more_rows_than_a_tile(mapping):
    import torch

    free, target = leaves(1500)
    got = torch.autograd.grad(A.linear_loss(free[0], free[1], target, mapping, linear_bias=free[2], chunk=4), free)
    want = torch.autograd.grad(A.fenchel_young(mapping, free[0] @ free[1].T + free[2], target), free)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_bias_of_minus_infinity_beside_a_mask():
    import torch

    (x, weight, bias), _ = leaves(6)
    bias.data[3] = -math.inf
    keep = torch.arange(9) != 5
    tau, size = A.linear.linear_threshold(x, weight, "softmax", linear_bias=bias, mask=keep)
    scores = torch.where(keep, x @ weight.T + bias, -math.inf)
    torch.testing.assert_close(tau, torch.logsumexp(scores, -1))
    assert size.tolist() == [7] * 6


@pytest.mark.parametrize("mapping", [Softmax(), Sigsoftmax()], ids=repr)
def test_a_transform_without_a_slope_at_masked_scores(mapping):
    """Its derivative at -inf is infinite; the gradient of a masked class is 0 all the same."""
    import torch

    free, target = leaves(6)
    keep = torch.arange(9) != 5
    target[target == 5] = 0

    def steep(s):
        return s - s.square()

    got = A.linear_loss(free[0], free[1], target, mapping, linear_bias=free[2], mask=keep, transform=steep)
    scores = torch.where(keep, free[0] @ free[1].T + free[2], -math.inf)
    want = A.nll(mapping, steep(scores), target)
    torch.testing.assert_close(got, want)
    for a, b in zip(torch.autograd.grad(got, free), torch.autograd.grad(want, free)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
