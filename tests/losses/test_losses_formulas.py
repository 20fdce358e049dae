"""Each loss beside Fenchel-Young's against its formula, and against other packages."""

from __future__ import annotations

import math

import numpy as np
import plainly
import pytest
from kinds import KINDS, back, every_kind
from loss_cases import FENCHEL, MAPS, WITHOUT, every_map, on_kinds, rng, tolerance

import anymax as A
from anymax import Entmax, NormMax, PerturbMax, Sigsoftmax, Softmax, Sparsemax, Taylor

torch = pytest.importorskip("torch")
F = torch.nn.functional


# -- the kin ---------------------------------------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("name", WITHOUT)
def test_nll_is_minus_log_p(name, kind):
    p_of = {
        "taylor": plainly.taylor,
        "sigsoftmax": plainly.sigsoftmax,
        "ratio_square": lambda x: x * x / (x * x).sum(),
        "softpick": lambda x: np.maximum(np.expm1(x), 0.0) / np.abs(np.expm1(x)).sum(),
        "ratio_sigmoid": lambda x: plainly.sigmoid(x) / plainly.sigmoid(x).sum(),
    }[name]
    x = rng(19).normal(size=(4, 5)) * 2
    t = np.array([0, 4, 2, 2])
    soft = rng(20).dirichlet(np.ones(5), 4)
    w = rng(21).uniform(0.5, 2, 5)
    with np.errstate(divide="ignore"):  # softpick has zeros
        logs = np.log(np.stack([p_of(r) for r in x]))
    make, tol = KINDS[kind], 10 * tolerance(kind)
    np.testing.assert_allclose(
        back(A.nll(MAPS[name], make(x), make(t), make(w), reduction="none")), -logs[range(4), t] * w[t], rtol=tol
    )
    np.testing.assert_allclose(
        back(A.nll(MAPS[name], make(x), make(t), make(w))), -(logs[range(4), t] * w[t]).sum() / w[t].sum(), rtol=tol
    )
    np.testing.assert_allclose(back(A.nll(MAPS[name], make(x), make(soft))), -(soft * logs).sum(-1).mean(), rtol=tol)


def test_nll_of_a_class_outside_the_support_is_inf():
    assert A.nll(Sparsemax(), [0.0, 5.0], 0) == math.inf
    assert A.nll(Sparsemax(), [0.0, 5.0], 1) == 0.0


def test_nll_does_not_underflow():
    np.testing.assert_allclose(A.nll(Softmax(), np.float32([0, 800]), 0), 800)
    np.testing.assert_allclose(A.nll(Sigsoftmax(), np.float32([-300, 300]), 0), 900, rtol=1e-6)


@every_kind
def test_smoothed_nll_is_its_formula(kind):
    x = rng(22).normal(size=(4, 5)) * 2
    t = np.array([0, 4, 2, 2])
    eps = 0.01
    p = np.stack([plainly.entmax(r, 2.0) for r in x])
    want = -np.log((p[range(4), t] + eps) / (1 + 5 * eps))
    make = KINDS[kind]
    got = A.smoothed_nll(Sparsemax(), make(x), make(t), epsilon=eps, reduction="none")
    np.testing.assert_allclose(back(got), want, rtol=10 * tolerance(kind))
    soft = rng(23).dirichlet(np.ones(5), 4)
    got = A.smoothed_nll(Sparsemax(), make(x), make(soft), epsilon=eps)
    np.testing.assert_allclose(
        back(got), -(soft * np.log((p + eps) / (1 + 5 * eps))).sum(-1).mean(), rtol=10 * tolerance(kind)
    )


@on_kinds(["softmax", "sparsemax", "entmax3", "normmax", "taylor"])
def test_accuracy_loss_is_minus_p(name, kind):
    p_of = {"taylor": plainly.taylor}.get(name) or FENCHEL[name][1]
    x = rng(24).normal(size=(4, 5))
    t = np.array([0, 4, 2, 2])
    w = rng(25).uniform(0.5, 2, 5)
    p = np.stack([p_of(r) for r in x])[range(4), t]
    make, tol = KINDS[kind], 10 * tolerance(kind)
    np.testing.assert_allclose(
        back(A.accuracy_loss(MAPS[name], make(x), make(t), reduction="none")), -p, rtol=tol, atol=tol
    )
    np.testing.assert_allclose(
        back(A.accuracy_loss(MAPS[name], make(x), make(t), make(w))), -(w[t] * p).sum() / w[t].sum(), rtol=tol
    )


def test_accuracy_loss_of_perturb_max_counts_wins():
    """-P[argmax(x + noise) = t], by half a million draws."""
    x = np.array([0.3, -0.4, 1.0])
    draws = x + rng(26).normal(size=(500_000, 3))
    want = -(draws.argmax(-1) == 2).mean()
    assert abs(float(A.accuracy_loss(PerturbMax("normal"), x, 2)) - want) < 3e-3


@every_map
def test_gradient_of_stop_gradient_loss_is_p_minus_y(name):
    x = torch.tensor(rng(27).normal(size=(4, 5)), requires_grad=True)
    t = torch.tensor([0, 4, -100, 2])
    A.stop_gradient_loss(MAPS[name], x, t, reduction="sum").backward()
    y = torch.tensor(np.eye(5)[[0, 4, 0, 2]])
    want = (A.apply(MAPS[name], x.detach()) - y) * (t != -100)[:, None]
    torch.testing.assert_close(x.grad, want)


def test_gradient_of_stop_gradient_loss_in_jax():
    jax = pytest.importorskip("jax")
    x = rng(27).normal(size=5).astype(np.float32)
    got = jax.grad(lambda v: A.stop_gradient_loss(Taylor(2), v, 3))(jax.numpy.asarray(x))
    np.testing.assert_allclose(got, plainly.taylor(x) - np.eye(5)[3], atol=1e-6)


@every_kind
def test_multilabel_softmax_loss_is_its_formula(kind):
    x = rng(28).normal(size=(4, 6)) * 3
    y = (rng(29).uniform(size=(4, 6)) < 0.4).astype(float)
    y[3] = 0.0
    y[2] = 1.0
    want = np.log1p((np.exp(x) * (1 - y)).sum(-1)) + np.log1p((np.exp(-x) * y).sum(-1))
    make, tol = KINDS[kind], 10 * tolerance(kind)
    np.testing.assert_allclose(back(A.multilabel_softmax_loss(make(x), make(y), reduction="none")), want, rtol=tol)
    np.testing.assert_allclose(back(A.multilabel_softmax_loss(make(x), make(y))), want.mean(), rtol=tol)
    np.testing.assert_allclose(
        back(A.multilabel_softmax_loss(make(x), make(y.astype(np.int64)))), want.mean(), rtol=tol
    )


def test_multilabel_softmax_loss_soft_ignored_masked_and_far():
    x = rng(30).normal(size=(3, 5))
    y = rng(31).uniform(size=(3, 5))
    want = np.log1p((np.exp(x) * (1 - y)).sum(-1)) + np.log1p((np.exp(-x) * y).sum(-1))
    np.testing.assert_allclose(A.multilabel_softmax_loss(x, y, reduction="none"), want, rtol=1e-12)
    ignored = y.copy()
    ignored[:, 1] = -100
    rest = [0, 2, 3, 4]
    short = A.multilabel_softmax_loss(x[:, rest], y[:, rest], reduction="none")
    np.testing.assert_allclose(A.multilabel_softmax_loss(x, ignored, reduction="none"), short, rtol=1e-12)
    other = np.where(ignored == -100, 7, ignored)
    np.testing.assert_allclose(A.multilabel_softmax_loss(x, other, ignore_index=7, reduction="none"), short, rtol=1e-12)
    masked, zero = x.copy(), y.copy()
    masked[:, 1], zero[:, 1] = -math.inf, 0.0
    np.testing.assert_allclose(A.multilabel_softmax_loss(masked, zero, reduction="none"), short, rtol=1e-12)
    a = torch.tensor(masked, requires_grad=True)
    A.multilabel_softmax_loss(a, torch.tensor(zero)).backward()
    assert a.grad.isfinite().all()
    np.testing.assert_allclose(A.multilabel_softmax_loss([1e4, -1e4], [0, 1]), 2e4)
    a = torch.tensor(x, requires_grad=True)
    A.multilabel_softmax_loss(a, torch.tensor(y)).backward()
    want = plainly.numeric_gradient(lambda v: A.multilabel_softmax_loss(v, y), x)
    np.testing.assert_allclose(a.grad.numpy(), want, atol=1e-8)


@every_kind
@pytest.mark.parametrize("t", [0, 1, 2, 3, 4])
def test_sparse_softmax_loss_is_logsumexp_of_the_kept_less_the_target(t, kind):
    """Finite, with a full gradient, also for a target outside of the kept classes."""
    x = np.array([0.3, 2.0, -1.0, 1.5, 0.0])
    make, tol = KINDS[kind], tolerance(kind)
    for given, kept in (({"k": 2}, [1, 3]), ({"k": 9}, range(5)), ({"p": 0.5}, [1, 3]), ({"p": 1.0}, range(5))):
        if given == {"p": 0.5}:
            p = plainly.topp_softmax(x, 0.5)
            kept = np.flatnonzero(p)
        want = plainly.logsumexp(x[list(kept)]) - x[t]
        np.testing.assert_allclose(
            back(A.sparse_softmax_loss(make(x), make(np.array(t)), **given)), want, rtol=10 * tol
        )
        if kind == "torch":
            a = torch.tensor(x, requires_grad=True)
            A.sparse_softmax_loss(a, torch.tensor(t), **given).backward()
            p = np.zeros(5)
            p[list(kept)] = plainly.softmax(x[list(kept)])
            np.testing.assert_allclose(a.grad.numpy(), p - np.eye(5)[t], atol=1e-12)


@pytest.mark.parametrize("name", ["softmax", "sparsemax", "entmax1.5", "entmax3", "taylor"])
def test_margin_loss_is_the_loss_of_the_shifted_cosines(name):
    c = rng(32).uniform(-1, 1, (4, 5))
    t = np.array([0, 4, 2, 2])
    shifted = 12.0 * (c - 0.2 * np.eye(5)[t])
    got = A.margin_loss(MAPS[name], c, t, margin=0.2, scale=12.0, reduction="none")
    if name == "taylor":
        want = [-math.log(plainly.taylor(r)[i]) for r, i in zip(shifted, t)]
    else:
        _, p_of, omega = FENCHEL[name]
        want = [plainly.fenchel_young(p_of(r), omega, r, np.eye(5)[i]) for r, i in zip(shifted, t)]
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)
    angle = np.arccos(c[range(4), t]) + 0.3
    arc = c.copy()
    arc[range(4), t] = np.cos(angle)
    if (angle < math.pi).all() and name != "taylor":
        got = A.margin_loss(MAPS[name], c, t, margin=A.margins.ArcFace(0.3), scale=12.0, reduction="none")
        want = [plainly.fenchel_young(p_of(r), omega, r, np.eye(5)[i]) for r, i in zip(12.0 * arc, t)]
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
    np.testing.assert_allclose(
        A.taylor_softmax_loss(x, t), -np.mean([math.log(plainly.taylor(r)[i]) for r, i in zip(x, t)]), rtol=1e-12
    )


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


def test_omega_terms_need_not_vanish_at_a_vertex():
    """1/6 q^3 and (q^3 - q)/6 are one regulariser on the simplex: one loss, for indices and for one-hot rows."""
    import dataclasses

    from anymax import Facts, Separable

    @dataclasses.dataclass(frozen=True, eq=False)
    class Cubic(Separable):
        name = "cubic"

        @property
        def facts(self):
            return Facts(monotone=True, shift_invariant=True, sparse=True, has_potential=True)

        def omega_terms(self, q, xp):
            return q**3 / 6.0 + 0.25

        def link(self, t, xp):
            return xp.sqrt(2.0 * xp.where(t > 0, t, 0.0 * t))

        def slope(self, q, xp):
            return 0.5 * q * q

        def curvature(self, q, xp):
            return q

    x = np.array([[1.0, 0.9, 0.3, -2.0], [0.0, 0.0, 0.0, 0.0]])
    want = A.entmax_loss(x, np.array([0, 1]), alpha=3.0, reduction="none")
    for target in (np.array([0, 1]), np.eye(4)[[0, 1]]):
        np.testing.assert_allclose(A.fenchel_young(Cubic(), x, target, reduction="none"), want, rtol=1e-12)
