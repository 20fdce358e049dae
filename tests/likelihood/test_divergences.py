"""Kullback-Leibler divergences, of whole rows and of a teacher's largest classes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
from distribution_cases import INF, MAPS, probabilities, scores, tolerance
from kinds import KINDS, back, every_kind, jax_in_the_whole_battery

import anymax as A


@jax_in_the_whole_battery
@every_kind
@pytest.mark.parametrize(
    "names", [("softmax", "softmax"), ("sparsemax", "entmax15"), ("topk", "softmax"), ("budget", "taylor")]
)
def test_kl_is_scipys(names, kind):
    """Also where it is +inf: SciPy's is, where q lacks a class of p."""
    first, second = (MAPS[n] for n in names)
    x, y = scores(), scores(seed=1)
    x[2], y[2, 3:] = -INF, -INF
    p, q = probabilities(first, x), probabilities(second, y)
    want = scipy.special.rel_entr(p, q).sum(-1)
    got = back(A.likelihood.kl(first, KINDS[kind](x), second, KINDS[kind](y)))
    np.testing.assert_allclose(got, want, atol=tolerance(kind), rtol=2 * tolerance(kind))
    assert got[2] == 0.0
    turned = back(A.likelihood.kl(first, KINDS[kind](x.T), second, KINDS[kind](y.T), axis=0))
    np.testing.assert_allclose(turned, got, atol=tolerance(kind), rtol=tolerance(kind))
    np.testing.assert_allclose(
        back(A.likelihood.kl(first, KINDS[kind](x[:2]), first, KINDS[kind](x[:2]))), 0.0, atol=tolerance(kind)
    )


@jax_in_the_whole_battery
@every_kind
@pytest.mark.parametrize("tail", ["ignore", "one class"])
def test_topk_kl_by_its_formula(tail, kind):
    c, n, k, t = KINDS[kind], 40, 5, 1.7
    x, teacher = scores(6, n, sigma=2.0), scipy.special.log_softmax(scores(6, n, 1, 2.0), axis=-1)
    ids = np.argsort(-teacher, -1)[:, :k]
    ids[2, 3:] = -1
    given = np.where(ids < 0, -1.0, np.take_along_axis(teacher, ids, -1))
    log_p = scipy.special.log_softmax(x / t, axis=-1)
    want = []
    for row in range(6):
        kept = ids[row][ids[row] >= 0]
        a, b = np.exp(teacher[row, kept]), np.exp(log_p[row, kept])
        value = scipy.special.rel_entr(a, b).sum()
        want.append(value + (scipy.special.rel_entr(1 - a.sum(), 1 - b.sum()) if tail == "one class" else 0.0))
    got = back(A.topk_kl(c(x), c(ids), c(given), tail=tail, temperature=t))
    np.testing.assert_allclose(got, want, rtol=30 * tolerance(kind), atol=tolerance(kind))
    turned = back(A.topk_kl(c(x.T), c(ids.T), c(given.T), tail=tail, temperature=t, axis=0))
    np.testing.assert_allclose(turned, got, rtol=3e-6)
    everything = np.tile(np.arange(n), (6, 1))
    whole = scipy.special.rel_entr(np.exp(teacher), scipy.special.softmax(x, -1)).sum(-1)
    np.testing.assert_allclose(back(A.topk_kl(c(x), c(everything), c(teacher), tail=tail)), whole, rtol=1e-4)


@every_kind
def test_the_rest_has_all_its_digits(kind):
    """p of all the others is 3e-9, which 1 - p of the named can't say in fp32."""
    x = np.array([[20.0, 0.0, 0.1, 0.2]], np.float32)
    teacher = np.log(np.array([[1 - 1e-3]], np.float32))
    rest = 1e-3 * (
        math.log(1e-3) - (scipy.special.logsumexp([0.0, 0.1, 0.2]) - scipy.special.logsumexp([20.0, 0.0, 0.1, 0.2]))
    )
    got = back(A.topk_kl(KINDS[kind](x), KINDS[kind](np.array([[0]])), KINDS[kind](teacher), tail="one class"))
    np.testing.assert_allclose(got, (1 - 1e-3) * math.log(1 - 1e-3) + rest, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_tail_of_a_rounded_teacher_is_kept(dtype):
    """Off by no more than the rounding of its numbers can explain, in value and slope, where 1 - sum p is large and where it is not."""
    torch = pytest.importorskip("torch")
    tails = torch.logspace(-4, math.log10(0.5), 12, dtype=torch.double)[:, None]
    p = (1 - tails) * torch.tensor([0.9, 0.06, 0.03, 0.009, 0.001], dtype=torch.double)
    x = torch.tensor(scores(1, 9, sigma=2.0)).repeat(12, 1).requires_grad_()
    ids = torch.arange(5).repeat(12, 1)
    q = torch.softmax(x, -1)
    rest = q[:, 5:].sum(-1, keepdim=True)
    want = torch.xlogy(p, p / q[:, :5]).sum(-1) + torch.xlogy(tails, tails / rest)[:, 0]
    (slope,) = torch.autograd.grad(want.sum(), x)
    kind = getattr(torch, dtype)
    got = A.topk_kl(x, ids, p.log().to(kind), tail="one class")
    (pulled,) = torch.autograd.grad(got.sum(), x)
    lost = -torch.xlogy(p, p).sum(-1) * torch.finfo(kind).eps / 2 + 1e-6
    assert ((got - want).abs() <= 2 * lost * (2 + (tails / rest).log().abs()[:, 0])).all()
    assert ((pulled - slope).abs() <= 2 * lost[:, None]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_rounded_teacher_that_names_all_has_no_tail(dtype):
    """The logarithms of 1/3 and 1/150 are rounded to one side all, which the sum shows."""
    torch = pytest.importorskip("torch")
    for n in (2, 3, 7, 150):
        teacher = torch.full((1, n), -math.log(n)).to(getattr(torch, dtype))
        got = A.topk_kl(torch.zeros(1, n), torch.arange(n)[None], teacher, tail="one class")
        assert abs(float(got)) < 5 * float(torch.finfo(teacher.dtype).eps) * math.log(n)


@jax_in_the_whole_battery
@every_kind
def test_a_teacher_with_a_class_that_the_student_has_not(kind):
    c = KINDS[kind]
    x = c(np.array([[0.0, -INF, 1.0], [0.0, 1.0, -INF], [0.0, -INF, -INF]]))
    ids, t = c(np.array([[0, 1], [0, 1], [0, -1]])), c(np.log(np.array([[0.5, 0.4], [0.5, 0.5], [0.5, 0.4]])))
    assert list(back(A.topk_kl(x, ids, t)) == INF) == [True, False, False]
    assert list(back(A.topk_kl(x, ids, t, tail="one class")) == INF) == [True, False, True]
