"""Each loss beside Fenchel-Young's against its formula, and against other packages."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import plainly
import pytest
from kinds import KINDS, back, every_kind
from loss_cases import LOSSES, MAPS, plain, rng, tolerance

import anymax as A
from anymax import Entmax, NormMax, PerturbMax, Sigsoftmax, Softmax, Sparsemax, Taylor

torch = pytest.importorskip("torch")
F = torch.nn.functional


# -- the kin ---------------------------------------------------------------------------------------------------------------------------


def test_nll_of_a_class_outside_the_support_is_inf():
    assert A.nll(Sparsemax(), [0.0, 5.0], 0) == math.inf
    assert A.nll(Sparsemax(), [0.0, 5.0], 1) == 0.0


def test_nll_does_not_underflow():
    np.testing.assert_allclose(A.nll(Softmax(), np.float32([0, 800]), 0), 800)
    np.testing.assert_allclose(A.nll(Sigsoftmax(), np.float32([-300, 300]), 0), 900, rtol=1e-6)


def test_gradient_of_stop_gradient_loss_in_jax():
    jax = pytest.importorskip("jax")
    x = rng(27).normal(size=5).astype(np.float32)
    got = jax.grad(lambda v: A.stop_gradient_loss(Taylor(2), v, 3))(jax.numpy.asarray(x))
    np.testing.assert_allclose(got, plainly.taylor(x) - np.eye(5)[3], atol=1e-6)


def multilabel(x, y, left_out):
    """log(1 + sum exp of the others) + log(1 + sum exp(-x) of the labels), of the classes that are not left out."""
    y, e = np.where(left_out, 0.0, y), np.exp(np.where(left_out, 0.0, x))
    return np.log1p(((1 - y) * e * ~left_out).sum(-1)) + np.log1p((y / e).sum(-1))


SCORES, HARD, SHARES = rng(28).normal(size=(4, 6)) * 3, rng(29).uniform(size=(4, 6)) < 0.4, rng(31).uniform(size=(4, 6))
HARD[2:] = [[True], [False]]
NO, SECOND = np.zeros((4, 6), bool), np.tile(np.arange(6) == 1, (4, 1))
MULTILABEL = {  # name: (targets, keywords, what is left out)
    "hard": (HARD * 1.0, {"reduction": "none"}, NO),
    "mean": (HARD * 1.0, {}, NO),
    "integers": (HARD * 1, {}, NO),
    "shares": (SHARES, {"reduction": "none"}, NO),
    "ignored": (np.where(SECOND, -100, SHARES), {"reduction": "none"}, SECOND),
    "another ignore_index": (np.where(SECOND, 7, SHARES), {"ignore_index": 7}, SECOND),
    "masked": (np.where(SECOND, 0.0, SHARES), {"mask": ~SECOND}, SECOND),
    "a score of -inf": (np.where(SECOND, 0.0, SHARES), {}, SECOND),
}


@every_kind
@pytest.mark.parametrize("row", MULTILABEL)
def test_multilabel_softmax_loss_is_its_formula(row, kind):
    y, given, left_out = MULTILABEL[row]
    x, want = np.where(left_out & (row == "a score of -inf"), -math.inf, SCORES), multilabel(SCORES, y, left_out)
    make, given = KINDS[kind], {k: KINDS[kind](v) if k == "mask" else v for k, v in given.items()}
    got = A.multilabel_softmax_loss(make(x), make(y), **given)
    np.testing.assert_allclose(back(got), want if "reduction" in given else want.mean(), rtol=10 * tolerance(kind))
    if kind == "torch":
        free = make(x).requires_grad_()
        A.multilabel_softmax_loss(free, make(y), **given).sum().backward()
        slope = plainly.numeric_gradient(lambda v: np.sum(A.multilabel_softmax_loss(v, y, **MULTILABEL[row][1])), x)
        np.testing.assert_allclose(free.grad, np.where(left_out, 0.0, slope), rtol=1e-7, atol=1e-8)


def test_multilabel_softmax_loss_of_large_scores():
    np.testing.assert_allclose(A.multilabel_softmax_loss([1e4, -1e4], [0, 1]), 2e4)


KEPT = {
    "k": ({"k": 2}, [1, 3]),
    "all": ({"k": 9}, [*range(5)]),
    "p": ({"p": 0.5}, [1]),
    "p of 1": ({"p": 1.0}, [*range(5)]),
}


@every_kind
@pytest.mark.parametrize("t", [0, 1, 4])
@pytest.mark.parametrize("row", KEPT)
def test_sparse_softmax_loss_is_logsumexp_of_the_kept_less_the_target(row, t, kind):
    """Finite, with a full gradient, also for a target outside of the kept classes."""
    x, make, (given, kept) = np.array([0.3, 2.0, -1.0, 1.5, 0.0]), KINDS[kind], KEPT[row]
    free = make(x).requires_grad_() if kind == "torch" else make(x)
    got = A.sparse_softmax_loss(free, make(np.array(t)), **given)
    np.testing.assert_allclose(back(got), plainly.logsumexp(x[kept]) - x[t], rtol=10 * tolerance(kind))
    if kind == "torch":
        got.backward()
        p = np.zeros(5)
        p[kept] = plainly.softmax(x[kept])
        np.testing.assert_allclose(free.grad, p - np.eye(5)[t], atol=1e-12)


@pytest.mark.parametrize("margin", [0.2, A.margins.ArcFace(0.3)], ids=str)
@pytest.mark.parametrize("name", ["softmax", "sparsemax", "entmax-1.5", "entmax-3", "taylor-2"])
def test_margin_loss_is_the_loss_of_the_shifted_cosines(name, margin):
    c, t = rng(32).uniform(-0.9, 0.9, (4, 5)), np.array([0, 4, 2, 2])
    shifted, own = c.copy(), (range(4), t)
    shifted[own] = c[own] - 0.2 if margin == 0.2 else np.cos(np.arccos(c[own]) + 0.3)
    want = plain(
        LOSSES[("nll-" if name == "taylor-2" else "fenchel_young-") + name], 12.0 * shifted, t, reduction="none"
    )
    got = A.margin_loss(MAPS[name], c, t, margin=margin, scale=12.0, reduction="none")
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-10)


def test_margin_loss_ignores_and_weighs():
    c = rng(33).uniform(-1, 1, (4, 5))
    w = rng(34).uniform(0.5, 2, 5)
    t = np.array([0, -100, 2, -100])
    got = A.margin_loss(Sparsemax(), c, t, w)
    want = A.margin_loss(Sparsemax(), c[[0, 2]], t[[0, 2]], w)
    np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize("noise", ["normal", "gumbel", "uniform", "laplace", "logistic", "exponential"])
def test_perturb_max_loss_is_the_mean_of_the_maximum(noise):
    """`E max(x + eps) - x_t - E eps`, by two million draws."""
    x = np.array([0.5, -0.2, 0.1, 0.9])
    g = rng(35)
    draw = {
        "normal": g.normal, "gumbel": g.gumbel, "laplace": g.laplace, "logistic": g.logistic, "exponential": g.exponential,
        "uniform": g.uniform,
    }[noise]  # fmt: skip
    mean = {"gumbel": np.euler_gamma, "exponential": 1.0, "uniform": 0.5}.get(noise, 0.0)
    value = (x + draw(size=(500_000, 4))).max(-1)
    want = value.mean() - x[1] - mean
    got = float(A.perturb_max_loss(x, 1, noise=noise))
    assert abs(got - want) < 5 * value.std() / math.sqrt(len(value))


def test_perturb_max_loss_with_gumbel_noise_is_cross_entropy():
    x = rng(36).normal(size=(3, 5))
    t = np.array([0, 4, 1])
    np.testing.assert_allclose(A.perturb_max_loss(x, t, noise="gumbel"), A.cross_entropy(x, t), rtol=1e-10)
    np.testing.assert_allclose(
        A.perturb_max_loss(x, t, noise="gumbel", scale=2.0), 2 * A.cross_entropy(x / 2, t), rtol=1e-10
    )


@pytest.mark.parametrize(
    "sugar",
    [
        (A.sparsemax_loss, {}, Sparsemax()), (A.entmax_loss, {"alpha": 1.3}, Entmax(1.3)), (A.entmax_loss, {}, Entmax(1.5)),
        (A.entmax15_loss, {}, Entmax(1.5)), (A.normmax_loss, {"alpha": 3.0}, NormMax(3.0)), (A.normmax_loss, {}, NormMax(2.0)),
        (A.perturb_max_loss, {}, PerturbMax()), (A.perturb_max_loss, {"noise": "uniform", "scale": 2.0}, PerturbMax("uniform", scale=2.0)),
    ],
)  # fmt: skip
def test_sugar(sugar):
    f, given, mapping = sugar
    x, t, w = rng(37).normal(size=(4, 5)), np.array([0, 4, -100, 2]), rng(38).uniform(0.5, 2, 5)
    assert f(x, t, w, reduction="sum", label_smoothing=0.1, **given) == A.fenchel_young(
        mapping, x, t, w, reduction="sum", label_smoothing=0.1
    )


def test_sugar_of_taylor():
    x, t = rng(37).normal(size=(4, 5)), np.array([0, 4, 1, 2])
    assert A.taylor_softmax_loss(x, t, order=4) == A.nll(Taylor(4), x, t)
    assert A.taylor_softmax_loss(x, t) == A.nll(Taylor(2), x, t)


# -- other packages ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "theirs",
    [
        ("sparsemax_loss", Sparsemax(), {}), ("sparsemax_bisect_loss", Sparsemax(), {}), ("entmax15_loss", Entmax(1.5), {}),
        ("entmax_bisect_loss", Entmax(1.25), {"alpha": 1.25}), ("entmax_bisect_loss", Entmax(1.8), {"alpha": 1.8}),
        ("normmax_bisect_loss", NormMax(2.0), {"alpha": 2.0}), ("normmax_bisect_loss", NormMax(1.5), {"alpha": 1.5}),
    ],
    ids=lambda row: f"{row[0]}-{row[1]!r}",
)  # fmt: skip
def test_the_entmax_package_agrees(theirs):
    entmax = pytest.importorskip("entmax")
    f, mapping, given = theirs
    x = torch.tensor(rng(39).normal(size=(6, 7)) * 2)
    t = torch.tensor([0, 6, 2, 2, 3, 1])
    a, b = (x.clone().requires_grad_() for _ in range(2))
    want = getattr(entmax, f)(a, t, **given)
    got = A.fenchel_young(mapping, b, t, reduction="none")
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    want.sum().backward()
    got.sum().backward()
    torch.testing.assert_close(b.grad, a.grad, rtol=1e-8, atol=1e-8)


@pytest.mark.whole
def test_optax_agrees_on_the_sparsemax_loss():
    optax = pytest.importorskip("optax")
    jnp = pytest.importorskip("jax.numpy")
    x = jnp.asarray(rng(40).normal(size=(6, 7)).astype(np.float32) * 2)
    t = jnp.asarray([0, 6, 2, 2, 3, 1])
    np.testing.assert_allclose(
        A.sparsemax_loss(x, t, reduction="none"), optax.losses.multiclass_sparsemax_loss(x, t), rtol=1e-5, atol=1e-6
    )
    s = jnp.linspace(-2.0, 2.0, 9)
    pairs = jnp.stack([jnp.zeros(9), s], -1)
    got = A.sparsemax_loss(pairs, jnp.ones(9, jnp.int32), reduction="none")
    np.testing.assert_allclose(got, optax.losses.sparsemax_loss(s, jnp.ones(9)), rtol=1e-5, atol=1e-6)


@dataclasses.dataclass(frozen=True, eq=False)
class Cubic(A.Separable):
    """entmax of 3, with 1/6 q^3 + 1/4 for (q^3 - q) / 6: one regulariser on the simplex."""

    name = "cubic"
    facts = A.Facts(monotone=True, shift_invariant=True, sparse=True, has_potential=True)

    def omega_terms(self, q, xp):
        return q**3 / 6.0 + 0.25

    def link(self, t, xp):
        return xp.sqrt(2.0 * xp.where(t > 0, t, 0.0 * t))

    def slope(self, q, xp):
        return 0.5 * q * q

    def curvature(self, q, xp):
        return q


def test_omega_terms_need_not_vanish_at_a_vertex():
    """One loss, for indices and for one-hot rows."""
    x = np.array([[1.0, 0.9, 0.3, -2.0], [0.0, 0.0, 0.0, 0.0]])
    want = A.entmax_loss(x, np.array([0, 1]), alpha=3.0, reduction="none")
    for target in (np.array([0, 1]), np.eye(4)[[0, 1]]):
        np.testing.assert_allclose(A.fenchel_young(Cubic(), x, target, reduction="none"), want, rtol=1e-12)
