"""Output layers: losses, log p and thresholds of scores that are never all held, against the same of all scores in fp64."""

from __future__ import annotations

import math

import numpy as np
import pytest
from kinds import KINDS, back, every_kind
from laws import close
from linear_cases import (
    CLASSES,
    FEATURES,
    INF,
    MAPS,
    NAN,
    QUICK,
    ROWS,
    dense,
    made,
    operands,
    tolerance,
    torch_operands,
)

import anymax as A
from anymax import Budget, Entmax, PerturbMax, Sigsoftmax, Softmax, Sparsemax, SparseSoftmax

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


@pytest.mark.whole(lambda kind: kind not in ("numpy", "torch"))
@every_kind
@pytest.mark.parametrize("mapping", [Entmax(1.0), PerturbMax("gumbel")], ids=repr)
def test_softmax_by_another_name_has_the_loss_of_softmax(mapping, kind):
    x, weight, bias, y, factors, _ = operands()
    soft = np.random.default_rng(3).dirichlet(np.full(CLASSES, 0.1), ROWS)
    a, w, b, f = made(kind, x, weight, bias, factors)
    for target in (y, soft):
        t = KINDS[kind](target)
        own, want = (
            back(A.linear_loss(a, w, t, each, linear_bias=b, weight=f, label_smoothing=0.2))
            for each in (mapping, Softmax())
        )
        close(own, want, tolerance(kind))


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
    from anymax.linear import torch_candidate_scores, torch_values
    from anymax.linear.job import Job
    from anymax.linear.layer import Layer
    from anymax.linear.per_row import RowLoss

    layer = Layer.of("test", *free[:2], mapping, None, None)
    held = torch_candidate_scores.candidates_of(Job(layer, RowLoss(), y), torch_values._bound(mapping))
    assert held.full.any()
    assert name == "topk" or not held.full.all()
    got = A.linear_loss(*free[:2], y, mapping, linear_bias=free[2])
    want = dense(mapping, free[0] @ free[1].T + free[2], y)
    close(got.detach(), want.detach(), 1e-10)
    for a, b in zip(torch.autograd.grad(got, free), torch.autograd.grad(want, free)):
        close(a, b, 1e-10)
    found, wanted = A.linear.linear_threshold(*free[:2], mapping), A.threshold(mapping, (free[0] @ free[1].T).detach())
    close(found.tau.detach(), wanted.tau, 1e-10)
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


OF_A_MASKED_CLASS = {
    "mask": lambda keep: {"mask": keep},
    "bias": lambda keep: {"linear_bias": keep.to(float).log()},
    "mask of rows": lambda keep: {"mask": keep.expand(ROWS, -1)},
    "chunk": lambda keep: {"mask": keep, "chunk": 11},
    "weight": lambda keep: {"mask": keep, "weight": keep + 1.0},
    "least": lambda keep: {"mask": keep, "least": 0.01},
}


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("given", OF_A_MASKED_CLASS)
@pytest.mark.parametrize("name", ["softmax", "sparsemax", "topk"])
def test_the_loss_of_a_masked_class_is_infinite_and_has_no_gradient_in_its_score(name, given, smoothing):
    """A target without a share, smoothing of 1, has the loss of all other classes."""
    torch, (x, weight, _), y = torch_operands()
    if given == "least" and name != "softmax":
        return
    keep = torch.arange(CLASSES) != y[0]
    some, given = y != y[0], OF_A_MASKED_CLASS[given](keep) | {"label_smoothing": smoothing, "reduction": "none"}
    got = A.linear_loss(x, weight, y, MAPS[name], **given)
    masked = (x @ weight.T).detach().masked_fill(~keep, -INF)
    want = dense(MAPS[name], masked[some], y[some], given.get("weight"), label_smoothing=smoothing, reduction="none")
    close(got[some].detach(), want, 1e-10)
    if smoothing < 1:
        assert (got[~some] == INF).all()
    elif "weight" not in given:
        other = torch.where(some, y, y[some][0])
        close(got.detach(), dense(MAPS[name], masked, other, label_smoothing=1.0, reduction="none"), 1e-10)
    got.sum().backward()
    assert not weight.grad[y[0]].any()
    assert weight.grad.isfinite().all()


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
