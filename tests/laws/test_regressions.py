"""Defects that reviews found, each held by the smallest case that shows it."""

import abc
import contextlib
import copy
import math

import numpy as np
import pytest
from kinds import KINDS, back

import anymax as am
from anymax import Budget, Entmax, NormMax, PerturbMax, Ratio, Softmax, Sparsemax, SparseSoftmax
from anymax.functional import verbs
from anymax.kernels import native

torch = pytest.importorskip("torch")


def test_attention_in_half_precision_does_not_overflow():
    g = torch.Generator().manual_seed(0)
    q = (torch.randn(1, 2, 4, 128, generator=g) * 40).half()
    k = q.clone()
    assert (q.float() @ k.float().mT).abs().max() > 65504  # the scores themselves do
    out = am.attention(q, k, q)
    assert out.dtype == torch.float16
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("loss", [am.cross_entropy, lambda x, y: am.smoothed_nll(Softmax(), x, y, epsilon=0.1)])
def test_gradient_in_a_soft_target_where_it_is_zero(loss):
    x = torch.tensor([[0.5, -0.2, 1.0]], dtype=torch.float64)
    y = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(loss(x, y), y)
    assert (grad > 0).all()
    if loss is am.cross_entropy:
        torch.testing.assert_close(grad, -torch.log_softmax(x, -1))


@pytest.mark.whole(lambda k: k != 1.7)
@pytest.mark.parametrize("shape", ["linear", "sigmoid", "laplace"])
@pytest.mark.parametrize("k", [1.0, 1.7, 2.4])
def test_budget_loss_has_its_gradient_in_k(k, shape):
    x = torch.tensor([[1.3, 0.9, 0.13, -0.4, 0.05]], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([[0.4, 0.25, 0.15, 0.1, 0.1]], dtype=torch.float64) * k
    k = torch.tensor([[k]], dtype=torch.float64, requires_grad=True)

    def conjugate(x, k):  # with the target held, the loss is Omega* up to a constant
        return am.fenchel_young(Budget(k, shape), x, y)

    assert torch.autograd.gradcheck(conjugate, (x, k))
    assert torch.autograd.gradgradcheck(conjugate, (x, k), atol=1e-6)


@pytest.mark.parametrize("shape", ["sigmoid", "laplace"])
def test_a_budget_of_another_shape_has_no_kernel_of_the_linear_one(shape):
    mapping, x = Budget(2, shape), np.array([3.0, 1.0, 0.5, -9.0])
    assert am.choose("forward", mapping, x).name == "reference"
    assert not mapping.parts.zero_below_threshold
    assert mapping.formula != Budget.formula
    assert mapping.replace(shape="linear").kernel == "budget"
    assert (am.budget(x, 2, shape=shape) > 0).all()
    np.testing.assert_array_equal(am.apply(f"budget:k=2,shape={shape}", x), am.budget(x, 2, shape=shape))
    with pytest.raises(ValueError, match=r"shape must be one of 'linear', 'sigmoid', 'laplace', got 'normal'"):
        Budget(2, "normal")


@pytest.mark.parametrize("kind", ["native", "reference", "functorch", "jax", "segments"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_no_class_of_a_budget_is_rounded_up_to_its_bound(dtype, kind):
    """There it would have no gradient: below 1 by less than half a unit, it has that of any class between 0 and 1."""
    some = 0
    for n, k in ((10, 3), (100, 30), (1000, 100), (300, 200)):
        draw = torch.Generator().manual_seed(n)
        x, g = (torch.randn(60_000 // n, n, generator=draw).to(dtype) for _ in range(2))
        y = x.double().requires_grad_()
        exact = am.apply(Budget(k), y)
        (want,) = torch.autograd.grad(exact, y, g.double())
        some += int(((exact < 1) & (exact.to(dtype) == 1)).sum())
        p, got = _budget(kind, Budget(k), x, g)
        assert torch.equal(p == 1, exact == 1)
        torch.testing.assert_close(p.double(), exact, rtol=0, atol=0.5 * torch.finfo(dtype).eps)
        torch.testing.assert_close(got.double(), want, rtol=0, atol=float(g.abs().max()) * torch.finfo(dtype).eps)
    assert some > 9


def test_no_class_of_a_budget_by_itself_is_rounded_up_to_its_bound():
    x = torch.tensor([1.0, 0.5, 2.0], dtype=torch.bfloat16, requires_grad=True)
    p = am.apply(am.Elementwise(Budget(2), tau=0.001), x)
    (g,) = torch.autograd.grad(p.sum(), x)
    assert p.tolist() == [0.99609375, 0.498046875, 1.0]
    assert g.tolist() == [1.0, 1.0, 0.0]


def _budget(kind, mapping, x, g):
    """(p, the gradient) of tensors in half precision."""
    if kind == "jax":
        jax = pytest.importorskip("jax")
        a, b = (jax.numpy.asarray(t.float().numpy()).astype(str(t.dtype)[6:]) for t in (x, g))
        p, back_ = jax.vjp(lambda x: am.apply(mapping, x), a)
        return (torch.tensor(np.asarray(t.astype("float32"))) for t in (p, back_(b)[0]))
    x = x.clone().requires_grad_()
    f = lambda x: am.apply(mapping, x)  # noqa: E731
    if kind == "segments":
        lengths = [x.shape[1]] * len(x)
        f = lambda x: am.segment_apply(mapping, x.reshape(-1), lengths=lengths).reshape(x.shape)  # noqa: E731
    if kind == "functorch":
        p, back_ = torch.func.vjp(f, x.detach())
        return p, back_(g)[0]
    with am.use("reference") if kind == "reference" else contextlib.nullcontext():
        p = f(x)
        return p.detach(), torch.autograd.grad(p, x, g)[0]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: am.budget(x, 2, shape="sigmoid"),
        lambda x: am.budget(x, 2, shape="laplace"),
        lambda x: am.perturb_max(x, "logistic", scale=0.7),
        lambda x: am.normmax(x, 2.5),
        lambda x: am.entmax(x, 1.31),
        lambda x: am.taylor_softmax(x, 4),
    ],
    ids=["sigmoid", "laplace", "perturb_max", "normmax", "entmax", "taylor"],
)
def test_the_map_of_a_repeated_call_is_made_once(call):
    x = np.zeros(3)
    call(x)
    made = verbs._cached_map.cache_info()
    call(x)
    now = verbs._cached_map.cache_info()
    assert (now.misses, now.hits) == (made.misses, made.hits + 1)


def test_a_map_may_derive_from_an_abstract_class_that_is_no_map():
    class Named(abc.ABC):
        @abc.abstractmethod
        def title(self): ...

    class Titled(Named, am.Sparsemax):
        name = "titled"

        def title(self):
            return self.name

    np.testing.assert_array_equal(am.apply(Titled(), [2.0, 1.5, -1.0]), [0.75, 0.25, 0.0])
    assert Titled().kernel is None


@pytest.mark.parametrize("shape", ["sigmoid", "laplace"])
def test_a_score_on_the_threshold_of_a_budget_has_its_derivative(shape):
    """The middle of a symmetric row lies on its threshold, where F is steepest."""
    x = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
    k = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    plain = am.jacobian(Budget(1.5, shape), x)
    traced = torch.func.jacrev(lambda x: am.apply(Budget(1.5, shape), x))(x)
    torch.testing.assert_close(traced, plain)
    (slope,) = torch.autograd.grad(am.apply(Budget(k, shape), x)[1], k)
    s = torch.diagonal(plain)
    assert 0.2 < slope < 1.0
    assert (s > 0.05).all()


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint16", "uint64"])
def test_targets_of_any_integer_type(dtype):
    x = np.random.default_rng(0).normal(size=(3, 200)).astype(np.float32)
    t = np.array([1, 5, 100])
    want = am.cross_entropy(x, t)
    for scores in (x, torch.tensor(x)):
        np.testing.assert_allclose(float(am.cross_entropy(scores, t.astype(dtype))), want, rtol=1e-5)
    if dtype == "uint8":
        t = np.array([1, 156, 100], dtype)  # 156 is -100 modulo 256
        np.testing.assert_allclose(
            float(am.cross_entropy(torch.tensor(x), torch.tensor(t))), am.cross_entropy(x, t.astype(int)), rtol=1e-5
        )


def test_sigmoid_ratio_of_very_negative_scores():
    p = am.apply(Ratio.sigmoid(), np.array([-40.0, -41.0], np.float32))
    np.testing.assert_allclose(p, [1 / (1 + math.exp(-1)), 1 / (1 + math.e)], rtol=1e-5)


def test_alpha_is_not_rounded_to_half_precision():
    x = torch.tensor([[0.3, -0.2, 0.5]]).bfloat16()
    row = am.entmax(x, torch.tensor([[1.3]]))
    assert torch.equal(row, am.entmax(x, torch.tensor(1.3)))
    assert torch.equal(row, am.entmax(x.float(), torch.tensor([[1.3]])).bfloat16())


def test_normmax_close_to_one():
    x = np.array([0.0, -3e-4])
    want = am.normmax(x, 1.001)
    np.testing.assert_allclose(am.normmax(x.astype(np.float32), 1.001), want, atol=3e-7)


@pytest.mark.parametrize("mapping", [Softmax(), Sparsemax(), Entmax(1.5), NormMax(2.0), SparseSoftmax(k=2)])
def test_losses_of_extreme_finite_scores(mapping):
    x = np.array([[3e38, -3e38, 1.0]], np.float32)
    assert am.fenchel_young(mapping, x, np.array([0])) == 0


def test_alpha_closed_over_by_jit():
    jax = pytest.importorskip("jax")
    alpha = jax.numpy.array([[1.3], [1.5]])
    x, t = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32), np.array([0, 1])
    np.testing.assert_allclose(
        jax.jit(lambda x: am.entmax_loss(x, t, alpha=alpha))(x),
        am.entmax_loss(x, t, alpha=np.asarray(alpha)),
        rtol=1e-5,
    )
    jax.jit(lambda x: am.temperature(alpha)(x))(x)


def test_margin_loss_ignores_any_index():
    c = np.array([[0.9, 0.1, 0.2], [0.3, 0.5, 0.1]])
    one = am.margin_loss(Sparsemax(), c[:1], np.array([0]))
    np.testing.assert_allclose(am.margin_loss(Sparsemax(), c, np.array([0, 255]), ignore_index=255), one)


def test_margin_loss_in_half_precision_rounds_once():
    g = torch.Generator().manual_seed(0)
    c, t = torch.rand(64, 10, generator=g).bfloat16(), torch.zeros(64, dtype=torch.int64)
    out = am.margin_loss(Softmax(), c, t, reduction="none")
    want = am.margin_loss(Softmax(), c.float(), t, reduction="none")
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, want.bfloat16())


def test_numpy_scalars_are_numbers():
    x, half = np.array([1.0, 2.0], np.float32), np.float32(0.5)
    for out in (am.temperature(half)(x), am.minp(half)(x), am.topp(half)(x), am.logsumexp(x, temperature=half)):
        assert out.dtype == np.float32
    am.entropy(am.softmax(x), "renyi", half)
    am.logit_gap(half, np.int64(10))
    am.cross_entropy(x, 0, label_smoothing=half)
    am.margin_loss(Softmax(), np.array([[0.3, 0.4]]), np.array([0]), margin=half, scale=np.float64(8.0))
    am.entmax(torch.tensor(x), np.array(1.5))


def test_targets_and_masks_that_are_not_of_torch():
    x = torch.tensor([[1.0, -1.0]])
    want = am.multilabel_softmax_loss(x, torch.tensor([[1.0, 0.0]]))
    assert am.multilabel_softmax_loss(x, [[1, 0]]) == want
    q = torch.randn(1, 3, 4)
    keep = np.tril(np.ones((3, 3), bool))
    torch.testing.assert_close(am.attention(q, q, q, mask=keep, is_causal=True), am.attention(q, q, q, is_causal=True))


def test_margin_head_of_a_map_with_a_scale():
    head = am.nn.MarginHead(4, 5, PerturbMax(scale=torch.nn.Parameter(torch.tensor(1.0))))
    head(torch.randn(3, 4), torch.tensor([0, 1, 2])).backward()
    assert head.map_scale.grad is not None
    assert copy.deepcopy(head).probabilities(torch.randn(2, 4)).shape == (2, 5)


def test_losses_on_meta_tensors():
    assert (
        am.cross_entropy(torch.empty(3, 4, device="meta"), torch.empty(3, device="meta", dtype=torch.int64)).shape == ()
    )


def test_a_noise_with_a_list_as_support_can_be_hashed():
    law = am.Noise(cdf=lambda v: v, pdf=lambda v: 0 * v + 1, support=[0.0, 1.0], mean=0.5)
    assert hash(law) is not None


def test_renyi_entropy_at_one_is_shannons():
    p = am.softmax([1.0, 2.0, 0.0])
    np.testing.assert_allclose(am.entropy(p, "renyi", np.array(1.0)), am.entropy(p))


def test_logsumexp_keeps_a_small_rest():
    """SciPy's issue 18295; the largest score alone would round it away."""
    x, want = np.array([[0.0, -40.0], [-40.0, 0.0]]), math.exp(-40)
    for out in (
        am.logsumexp(x),
        am.logsumexp(x * 2, temperature=2.0) / 2,
        am.logsumexp(torch.from_numpy(x).requires_grad_()).detach(),
    ):
        np.testing.assert_allclose(np.asarray(out), [want, want], rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_temperature_that_the_dtype_can_not_hold_is_zero(kind):
    """1e-46 is 0 in fp32, and 0 / 0 was NaN; so was an array of temperatures with a 0."""
    c = KINDS[kind]
    x = np.array([[1.0, 2.0, 0.0], [3.0, -np.inf, 3.0]], np.float32)
    for t in (1e-46, 1e-40, 0.0):
        np.testing.assert_array_equal(back(am.logsumexp(c(x), temperature=t)), [2.0, 3.0])
        np.testing.assert_array_equal(back(am.softmax(am.temperature(t)(c(x)))), [[0, 1, 0], [0.5, 0, 0.5]])
    t = c(np.array([[0.0], [1.0]], np.float32))
    np.testing.assert_allclose(back(am.logsumexp(c(x), temperature=t)), [2.0, 3.0 + np.log(2.0)], rtol=1e-6)
    if kind == "torch":
        v = c(x).requires_grad_()
        am.logsumexp(v, temperature=t).sum().backward()
        np.testing.assert_allclose(v.grad, [[0, 1, 0], [0.5, 0, 0.5]], atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1e-20, 1e-9, 1e-3])
def test_a_budget_of_next_to_nothing(kind, k):
    """1e-20 in fp32 gave zeros: the solver stopped at the rounding of 1."""
    for row, want in (([1.0, 2.0, 0.0], [0, k, 0]), ([2.0, 2.0, 0.0], [k / 2, k / 2, 0])):
        p = back(am.budget(KINDS[kind](np.array(row, np.float32)), k))
        np.testing.assert_allclose(p, want, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_budget_beyond_the_classes_is_an_error_in_an_array_too(kind):
    x, make = KINDS[kind](np.zeros((2, 7))), KINDS[kind]
    for k in (9.0, make(np.array(9.0)), make(np.array([[2.0], [9.0]]))):
        for call in (
            lambda k: am.budget(x, k),
            lambda k: am.threshold(am.Budget(k), x),
            lambda k: am.fenchel_young(am.Budget(k), x, make(np.ones((2, 7)))),
        ):
            with pytest.raises(ValueError, match=r"Budget\(k=9.0\): k classes can't be chosen of 7; k must be at most"):
                call(k)
    assert np.all(back(am.budget(x[:0, :], make(np.array(7.0)))) == 1.0)
    p = back(am.budget(x, make(np.array([[2.0], [7.0]])), mask=make(np.arange(7) > 3)))  # the mask leaves three
    np.testing.assert_allclose(p[:, 4:], [[2 / 3] * 3, [1.0] * 3], rtol=1e-6)


@pytest.mark.parametrize("kind", [k for k in ("numpy", "torch", "jax") if k in KINDS])
def test_segments_with_fewer_entries_than_their_budget_give_each_of_them_one(kind):
    make = KINDS[kind]
    k, x = make(np.array([3.0, 1.0])), make(np.zeros(4))
    for call in (am.segment_apply, lambda *a, **b: np.exp(back(am.segment_log_apply(*a, **b)))):
        want = [1.0, 1.0, 0.5, 0.5]
        np.testing.assert_allclose(back(call(am.Budget(k), x, index=[0, 0, 1, 1])), want, rtol=1e-6)
        with am.use("reference"):  # of rows that are padded to three classes
            np.testing.assert_allclose(back(call(am.Budget(k), x, index=[0, 0, 1, 1])), want, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_of_classes_is_whole_in_an_array_too(kind):
    make = KINDS[kind]
    for k in ([[2.5], [2.0]], [[0.5], [2.0]]):
        with pytest.raises(ValueError, match=r"SparseSoftmax\(k=...\): every entry must be a whole number from 1 on"):
            am.sparse_softmax(make(np.zeros((2, 4))), k=make(np.array(k)))


def test_a_number_of_classes_that_is_not_whole_is_nan_where_it_may_not_be_asked_for():
    x, k = torch.zeros(3, 4), torch.tensor([[2.5], [0.0], [2.0]])
    want = torch.tensor([[math.nan] * 4, [math.nan] * 4, [0.5, 0.5, 0.0, 0.0]])
    torch.testing.assert_close(torch.vmap(lambda x, k: am.sparse_softmax(x, k=k))(x, k), want, equal_nan=True)
    if not isinstance(native.load(), str):
        mapping = am.SparseSoftmax(k=torch.ones(3, 1))
        mapping.k.copy_(k)
        torch.testing.assert_close(native.ENGINE.forward(mapping, x), want, equal_nan=True)
