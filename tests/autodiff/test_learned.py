"""Parameters that are learned: their derivatives follow from p, so an engine computes p, on torch and on JAX."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from forty_digits import slopes
from torch_cases import its_own_warnings

import anymax as A
from anymax import kernels

torch = pytest.importorskip("torch")
pytestmark = its_own_warnings

D = torch.float64
ROW = np.array([0.4, -0.2, 0.93, -1.0, 0.1, 0.93])  # with two equal scores
G = np.array([0.3, -1.0, 0.7, 0.2, 1.1, -0.4])
ENTMAX = [0.5, 1.0, 1 + 1e-12, 1 + 1e-9, 1 + 1e-6, 1.0001, 1.001, 1.01, 1.25, 1.5, 1.7, 2.0, 2.5, 4.0, 10.0]
NORMMAX = [1.05, 1.5, 2.0, 3.0]
BUDGET = [0.4, 1.0, 2.3, 4.5]
EACH = [
    *((A.Entmax, "alpha", a) for a in ENTMAX),
    *((A.NormMax, "alpha", a) for a in NORMMAX),
    *((A.Budget, "k", k) for k in BUDGET),
]
each = pytest.mark.parametrize(("kind", "name", "value"), EACH, ids=lambda v: getattr(v, "__name__", str(v)))


# -- values -----------------------------------------------------------------------------------------------------------------------


@each
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["fp64", "fp32"])
def test_against_forty_digits(kind, name, value, dtype, tolerance):
    """By the engine, for one value for all and one a row, of scores that are learned, too, and of fixed ones."""
    parts, want_loss = slopes(kind, value, tuple(ROW))
    want = float(parts @ G)
    x, g = (torch.tensor(np.stack([v, v[::-1]]), dtype=dtype) for v in (ROW, G))
    for shape in ((), (2, 1)):
        for learned in (False, True):
            a = torch.full(shape, value, dtype=dtype, requires_grad=True)
            s = x.clone().requires_grad_(learned)
            p = A.apply(kind(a), s)
            assert type(p.grad_fn).__name__ == "ApplyBackward"
            p.backward(g)
            got = a.grad if shape else a.grad / 2
            near = tolerance * max(1.0, abs(want))
            np.testing.assert_allclose(got, np.full(shape, want), rtol=0, atol=near)
            if learned:
                fixed = x.clone().requires_grad_()
                A.apply(kind(value if not shape else a.detach()), fixed).backward(g)
                torch.testing.assert_close(s.grad, fixed.grad, rtol=0, atol=tolerance)
            if kind is not A.Budget:
                a.grad = None
                A.fenchel_young(kind(a), s, torch.tensor([0, 3]), reduction="sum").backward()
                got = a.grad if shape else a.grad / 2
                np.testing.assert_allclose(
                    got, np.full(shape, want_loss), rtol=0, atol=tolerance * max(1.0, abs(want_loss))
                )


@pytest.mark.parametrize("value", NORMMAX)
def test_the_loss_of_a_distribution(value):
    """Its derivative by the parameter is that of Omega* alone, where the target is a vertex; of entmax: test_torch_parameters.py."""
    a = torch.tensor(value, dtype=D, requires_grad=True)
    y = torch.eye(6, dtype=D)[2]
    A.fenchel_young(A.NormMax(a), torch.tensor(ROW, dtype=D), y).backward()
    np.testing.assert_allclose(a.grad, slopes(A.NormMax, value, tuple(ROW))[1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    ("kind", "value"), [(A.Entmax, 1.3), (A.NormMax, 2.0), (A.Budget, 2.3)], ids=["entmax", "normmax", "budget"]
)
def test_half_precision_keeps_floats_for_the_derivative(kind, value, dtype):
    """p is rounded to half precision; the derivative is not that of the rounded p, but for classes that fp16 rounds to 0."""
    rng = np.random.default_rng(0)
    x, g = (torch.tensor(rng.normal(size=(4, 60))).to(dtype) for _ in range(2))
    found = []
    for other in (dtype, D):
        a = torch.tensor(value, dtype=torch.float32 if other is dtype else D, requires_grad=True)
        A.apply(kind(a), x.to(other)).backward(g.to(other))
        found.append(float(a.grad))
    assert abs(found[0] - found[1]) < (2e-5 if dtype is torch.bfloat16 else 2e-4) * max(1.0, abs(found[1]))


# -- edges ------------------------------------------------------------------------------------------------------------------------


def grad_by(mapping_of, x, g, shape=(), value=1.4, **options):
    a = torch.full(shape, value, dtype=x.dtype, requires_grad=True)
    A.apply(mapping_of(a), x, **options).backward(g)
    return a.grad


@pytest.mark.parametrize(
    ("kind", "value"), [(A.Entmax, 1.4), (A.NormMax, 2.0), (A.Budget, 1.0)], ids=["entmax", "normmax", "budget"]
)
def test_strange_rows(kind, value):
    """NaN in one row is a NaN for that row's own parameter; masked rows and rows of one class have a derivative of 0."""
    x, g = torch.tensor(np.stack([ROW] * 4)), torch.tensor(np.stack([G] * 4))
    plain = grad_by(kind, x, g, (4, 1), value)
    x[1, 2] = np.nan
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[2] = False
    mask[3, 1:] = False
    got = grad_by(kind, x, g, (4, 1), value, mask=mask)
    assert got[0] == plain[0]
    assert got[1].isnan()
    assert got[2] == 0.0
    assert got[3] == 0.0  # a single class has all that it may have


@pytest.mark.parametrize("shape", [(), (4, 1)], ids=str)
@pytest.mark.parametrize("engine", [None, "reference"])
@pytest.mark.parametrize("kind", [A.Entmax, A.NormMax, A.Budget, A.Bounded])
def test_a_row_of_nan_that_does_not_count(kind, engine, shape):
    """Its gradient is 0, and so is what it adds to that of a parameter of all rows."""
    target, weight, others = torch.tensor([2, 0, 5, 0]), torch.tensor(ROW, dtype=D).diag(), [0, 2, 3]
    of = lambda x: target[others] if len(x) == 3 else target  # noqa: E731
    verbs = [
        lambda m, x: A.apply(m, x)[..., :3],
        lambda m, x: A.log_apply(m, x).clamp(min=-5),
        lambda m, x: A.log_prob(m, x, of(x)).clamp(min=-5),
        lambda m, x: A.nll(m, x, of(x), reduction="none").clamp(max=5),
    ]
    if not shape:
        in_one_row = lambda x: {"x": x.reshape(-1), "lengths": [6] * len(x)}  # noqa: E731
        verbs.append(lambda m, x: A.segment_apply(m, **in_one_row(x)).reshape(x.shape)[..., :3])
        verbs.append(lambda m, x: A.segment_log_apply(m, **in_one_row(x)).reshape(x.shape).clamp(min=-5))
        entries = lambda x: of(x) + 6 * torch.arange(len(x))  # noqa: E731
        if kind is not A.Budget:
            verbs.append(lambda m, x: A.segment_loss(m, target=entries(x), reduction="none", **in_one_row(x)))
    if kind is not A.Budget:
        one_hot = torch.nn.functional.one_hot
        verbs.append(lambda m, x: A.fenchel_young(m, x, one_hot(of(x), 6).to(D), reduction="none"))
        verbs.append(lambda m, x: A.fenchel_young(m, x, of(x), reduction="none"))
        verbs.append(lambda m, x: A.linear_loss(x, weight, of(x), m, reduction="none"))
    context = contextlib.nullcontext() if engine is None else A.use(engine)
    for verb in verbs:
        found = []
        for rows in (range(4), others):
            x = torch.tensor(np.stack([ROW, G, -ROW, -G]))
            x[1, 2] = np.nan
            x = x[list(rows)].requires_grad_()
            a = torch.full(shape, 1.4, dtype=D)[list(rows) if shape else ()].requires_grad_()
            with context:
                value = verb(kind(a), x)
                found.append(torch.autograd.grad((value[others] if len(rows) == 4 else value).sum(), a)[0])
        torch.testing.assert_close(found[0][others] if shape else found[0], found[1], rtol=1e-12, atol=1e-12)
        assert not shape or found[0][1] == 0


def test_a_mask_is_minus_infinity():
    x, g = torch.tensor(np.stack([ROW, -ROW])), torch.tensor(np.stack([G, G]))
    mask = torch.tensor([[True, False, True, True, True, True], [True, True, True, False, True, False]])
    hidden = x.masked_fill(~mask, -torch.inf)
    assert torch.equal(grad_by(A.Entmax, x, g, (2, 1), mask=mask), grad_by(A.Entmax, hidden, g, (2, 1)))


def test_any_axis_and_any_shape_of_the_parameter():
    rng = np.random.default_rng(0)
    x, g = (torch.tensor(rng.normal(size=(3, 7, 4))) for _ in range(2))
    each = grad_by(A.Entmax, x, g, (3, 1, 4), axis=1)
    assert each.shape == (3, 1, 4)
    np.testing.assert_allclose(grad_by(A.Entmax, x, g, (3, 1, 1), axis=1), each.sum(2, keepdim=True), rtol=1e-12)
    np.testing.assert_allclose(grad_by(A.Entmax, x, g, (4,), axis=1), each.sum((0, 1)), rtol=1e-12)
    np.testing.assert_allclose(grad_by(A.Entmax, x, g, (), axis=1), each.sum(), rtol=1e-12)


@pytest.mark.parametrize(("kind", "value"), [(A.Entmax, 1.4), (A.NormMax, 2.0)], ids=["entmax", "normmax"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_rows_that_the_loss_leaves_out(kind, value, reduction):
    rng = np.random.default_rng(0)
    x, t = torch.tensor(rng.normal(size=(5, 9))), torch.tensor([0, -100, 3, 8, -100])
    found = []
    for rows, target in ((x, t), (x[[0, 2, 3]], t[[0, 2, 3]])):
        a = torch.tensor(value, dtype=D, requires_grad=True)
        A.fenchel_young(kind(a), rows, target, reduction=reduction).sum().backward()
        found.append(float(a.grad))
    assert abs(found[0] - found[1]) < 1e-12


# -- second derivatives, and the ways of torch and JAX --------------------------------------------------------------------------------

WAYS = [(A.Entmax, 1.3), (A.Entmax, 2.4), (A.NormMax, 2.0), (A.Budget, 2.3)]
ways = pytest.mark.parametrize(("kind", "value"), WAYS, ids=["entmax", "steep", "normmax", "budget"])


@ways
@pytest.mark.whole
def test_first_and_second_derivatives_of_torch(kind, value):
    x = torch.tensor(np.stack([ROW[:4], ROW[2:]]), requires_grad=True)
    t = torch.tensor([0, 1])
    for shape in ((), (2, 1)):
        a = torch.full(shape, value, dtype=D, requires_grad=True)
        calls = [lambda x, a: A.apply(kind(a), x)]
        if kind is not A.Budget:
            calls += [
                lambda x, a: A.fenchel_young(kind(a), x, t),
                lambda x, a: A.fenchel_young(kind(a), x, torch.eye(4, dtype=D)[t]),
            ]
        for call in calls:
            assert torch.autograd.gradcheck(call, (x, a))
            assert torch.autograd.gradgradcheck(call, (x, a))


@ways
@pytest.mark.whole
def test_first_and_second_derivatives_of_jax(kind, value):
    """Along a direction of scores and parameters, by differences of the values and of the gradient."""
    jax = pytest.importorskip("jax")
    with jax.enable_x64(True):
        x, t, a = jax.numpy.asarray([ROW[:4], ROW[2:]]), jax.numpy.asarray([0, 1]), jax.numpy.full((2, 1), value)
        weights, way = (
            jax.numpy.asarray([G[:4], G[2:]]),
            (jax.numpy.asarray([G[2:], G[:4]]), jax.numpy.asarray([[0.3], [-0.8]])),
        )

        def both(x, a):
            out = (A.apply(kind(a), x) * weights).sum()
            return out if kind is A.Budget else out + (A.fenchel_young(kind(a), x, t) * weights[:, 0]).sum()

        value_of, grad = jax.jit(both), jax.jit(jax.grad(both, (0, 1)))
        second = jax.jit(lambda x, a: jax.jvp(grad, (x, a), way)[1])(x, a)
        h = 1e-6
        ends = [(x + s * h * way[0], a + s * h * way[1]) for s in (1, -1)]
        slope = sum((g * v).sum() for g, v in zip(grad(x, a), way))
        np.testing.assert_allclose(slope, (value_of(*ends[0]) - value_of(*ends[1])) / (2 * h), rtol=1e-7, atol=1e-8)
        for got, above, below in zip(second, grad(*ends[0]), grad(*ends[1])):
            np.testing.assert_allclose(got, (above - below) / (2 * h), rtol=1e-6, atol=1e-7)


@ways
def test_jax_computes_p_by_the_engine(kind, value):
    """The program of the gradient has the engine's call and no loop."""
    jax = pytest.importorskip("jax")
    if not isinstance(kernels.choose("forward", kind(value), jax.numpy.zeros(3)), type(kernels.xla.ENGINE)):
        pytest.skip("the library is not compiled")
    x = jax.numpy.asarray([ROW, ROW], dtype="float32")
    made = jax.jit(jax.grad(lambda a: (A.apply(kind(a), x) ** 2).sum())).lower(jax.numpy.float32(value)).as_text()
    assert "custom_call" in made
    assert "while" not in made


@ways
@pytest.mark.whole
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while it traces
def test_compiled_by_torch(kind, value):
    x, g = torch.tensor(np.stack([ROW, -ROW])), torch.tensor(np.stack([G, G]))
    found = []
    for wrap in (lambda f: f, lambda f: torch.compile(f, backend="aot_eager", fullgraph=True)):
        a = torch.full((2, 1), value, dtype=D, requires_grad=True)
        s = x.clone().requires_grad_()
        wrap(lambda s, a: A.apply(kind(a), s))(s, a).backward(g)
        found.append((a.grad, s.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


# -- what is said of it -----------------------------------------------------------------------------------------------------------------


def engines(mapping, x):
    return {op: name for op, name, _ in A.explain(mapping, x).rows}


def test_explain_tells_the_engine_of_a_learned_parameter():
    x = torch.zeros(2, 5)
    compiled = not isinstance(kernels.native.load(), str)
    for kind, value in WAYS:
        found = engines(kind(torch.tensor(value, requires_grad=True)), x)
        assert (found["forward"] == "native") == compiled
        assert "slope" in found
        assert "slope" not in engines(kind(value), x)
    plain = A.Elementwise(A.Entmax(torch.tensor(1.5, requires_grad=True)))
    said = A.explain(plain, x, verbose=True)
    assert engines(plain, x)["forward"] == "reference"
    assert "has a gradient; plain operations have it" in str(said)
    with torch.no_grad():
        assert "has a gradient" not in str(A.explain(plain, x, verbose=True))


def test_an_engine_that_is_asked_for_refuses_what_it_can_not_differentiate():
    x = torch.zeros(2, 5)
    mapping = A.Budget(torch.tensor(2.0, requires_grad=True), shape="sigmoid")
    assert A.apply(mapping, x).requires_grad
    plain = A.Elementwise(A.Entmax(torch.tensor(1.5, requires_grad=True)))
    with A.use("native"), pytest.raises(RuntimeError, match="can't compute forward"):
        A.apply(plain, x)


def test_more_classes_to_choose_than_there_are():
    """A number that is learned is checked as one that is not."""
    k = torch.tensor(5.0, requires_grad=True)
    with pytest.raises(ValueError, match="can't be chosen of 3"):
        A.budget(torch.zeros(2, 3, requires_grad=True), k)


def test_a_row_without_classes_that_a_loss_leaves_out():
    x, t = torch.tensor([[1.0, 0.5, 0.0, 2.0], [-torch.inf] * 4]), torch.tensor([1, -100])
    for shape in ("linear", "sigmoid"):
        k = torch.tensor(1.0, requires_grad=True)
        A.fenchel_young(A.Budget(k, shape), x, t, ignore_index=-100, reduction="sum").backward()
        whole = k.grad.clone()
        k.grad = None
        A.fenchel_young(A.Budget(k, shape), x[:1], t[:1], reduction="sum").backward()
        assert torch.equal(k.grad, whole)
