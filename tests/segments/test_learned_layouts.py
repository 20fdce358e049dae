"""Learned parameters (an alpha, a budget) in segments, output layers and shards: by the engines, with the derivatives of rows."""

import math

import numpy as np
import pytest
import torch

import anymax

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch.compile

LENGTHS = (3, 0, 1, 5, 4)
ENTRIES = sum(LENGTHS)
MAPS = (
    ("entmax", anymax.Entmax, 1.3),
    ("entmax at its limit", anymax.Entmax, 1.0),
    ("entmax above 2", anymax.Entmax, 2.5),
    ("normmax", anymax.NormMax, 2.2),
    ("budget", anymax.Budget, 0.8),
)
EACH_MAP = pytest.mark.parametrize(("kind", "value"), [m[1:] for m in MAPS], ids=[m[0] for m in MAPS])


def _scores(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape) * 1.5


def _sizes(kind, value, count):
    """One value for each of a number of rows, near the given one."""
    steps = np.linspace(0.0, 0.1 if kind is anymax.Budget else 0.4, count)
    return value + steps


def _central(f, at, h=1e-5):
    """The derivatives of a number by each entry of an array, by central differences."""
    out = np.zeros_like(at)
    for i in np.ndindex(at.shape):
        step = np.zeros_like(at)
        step[i] = h
        out[i] = (f(at + step) - f(at - step)) / (2 * h)
    return out


# -- segments --------------------------------------------------------------------------------------------------------------


def _order(kind):
    """The segments as sorted lengths, or as an index in no order."""
    index = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    if kind == "sorted":
        return anymax.Segments.of(lengths=LENGTHS)
    return anymax.Segments.of(np.random.default_rng(1).permutation(index), num_segments=len(LENGTHS))


def _targets(segments, axis):
    """An entry of each segment; the empty one is ignored, and one more."""
    places = [-100 if not n else int(np.nonzero(segments.index == s)[0][n // 2]) for s, n in enumerate(LENGTHS)]
    places[2] = -100
    return np.stack([places, places], 1 if axis == 0 else 0)


@EACH_MAP
@pytest.mark.parametrize("verb", ["apply", "loss"])
@pytest.mark.parametrize("layout", ["sorted", "unsorted"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("each", [False, True], ids=["one for all", "one a segment"])
def test_segments_have_the_derivative_of_finite_differences(kind, value, layout, axis, each, verb):
    if verb == "loss" and kind is anymax.Budget:
        pytest.skip("an entry is no target of it")
    segments, shape = _order(layout), (ENTRIES, 2) if axis == 0 else (2, ENTRIES)
    x, g, target = _scores(*shape), _scores(*shape, seed=1), _targets(segments, axis)
    at = _sizes(kind, value, len(LENGTHS)) if each else np.array(value)
    at = at[:, None] if each and axis == 0 else at
    if kind is anymax.Entmax and value == 1.0:
        at = at + 1e-9  # differences need both sides of it

    def number(a, x):
        make = torch.tensor if isinstance(x, torch.Tensor) else np.asarray
        if verb == "loss":
            return anymax.segment_loss(kind(a), x, make(target), index=segments, axis=axis)
        p = anymax.segment_apply(kind(a), x, index=segments, axis=axis)
        # by the engine
        assert make is np.asarray or not p.requires_grad or type(p.grad_fn).__name__ == "SegmentApplyBackward"
        return (p * make(g)).sum()

    a, scores, fixed = (torch.tensor(v, requires_grad=True) for v in (at, x, x))
    number(a, scores).backward()
    np.testing.assert_allclose(a.grad, _central(lambda a: float(number(a, x)), at), rtol=2e-6, atol=2e-8)
    number(a.detach(), fixed).backward()
    np.testing.assert_allclose(scores.grad, fixed.grad, atol=1e-14)


@pytest.mark.whole
@EACH_MAP
def test_a_learned_parameter_of_segments_has_second_derivatives(kind, value):
    segments = _order("unsorted")
    x, a = (torch.tensor(v, requires_grad=True) for v in (_scores(ENTRIES), _sizes(kind, value + 0.01, len(LENGTHS))))
    f = lambda x, a: anymax.segment_apply(kind(a), x, index=segments)  # noqa: E731
    assert torch.autograd.gradcheck(f, (x, a), atol=1e-6)
    assert torch.autograd.gradgradcheck(f, (x, a), atol=1e-6)
    if kind is not anymax.Budget:
        target = torch.tensor(_targets(segments, 0)[:, 0])
        g = lambda x, a: anymax.segment_loss(kind(a), x, target, index=segments)  # noqa: E731
        assert torch.autograd.gradcheck(g, (x, a), atol=1e-6)
        assert torch.autograd.gradgradcheck(g, (x, a), atol=1e-6)


def test_nan_in_one_segment_leaves_the_parameters_of_the_others():
    x, a = torch.tensor(_scores(ENTRIES)), torch.full((len(LENGTHS),), 1.3, dtype=torch.float64, requires_grad=True)
    x[1] = math.nan
    p = anymax.segment_apply(anymax.Entmax(a), x, lengths=LENGTHS)
    (p * torch.tensor(_scores(ENTRIES, seed=1))).sum().backward()
    assert a.grad[0].isnan()
    assert torch.isfinite(a.grad[1:]).all()
    assert a.grad[3] != 0.0
    x[1] = 0.0
    whole = torch.full((), 1.3, dtype=torch.float64, requires_grad=True)
    p = anymax.segment_apply(anymax.Entmax(whole), x, lengths=LENGTHS)
    p.sum().backward()
    assert abs(whole.grad) < 1e-14  # p sums to 1 for any alpha


def test_an_ignored_segment_has_no_part_in_the_gradient_of_a_parameter():
    x, a = torch.tensor(_scores(ENTRIES)), torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    target = torch.tensor(_targets(_order("sorted"), 0)[:, 0])
    losses = lambda x: anymax.segment_loss(anymax.Entmax(a), x, target, lengths=LENGTHS, reduction="none")[[0, 3, 4]]  # noqa: E731
    wanted = torch.autograd.grad(losses(x).sum(), a)[0]
    x[LENGTHS[0]] = math.nan  # the third segment, whose target is ignored
    torch.testing.assert_close(torch.autograd.grad(losses(x).sum(), a)[0], wanted)


def test_a_learned_parameter_of_segments_under_options_of_torch():
    x, segments = torch.tensor(_scores(ENTRIES), dtype=torch.float32), _order("unsorted")
    g = torch.tensor(_scores(3, ENTRIES, seed=1), dtype=torch.float32)
    a = torch.tensor(1.3, requires_grad=True)
    f = lambda a: anymax.segment_apply(anymax.Entmax(a), x, index=segments)  # noqa: E731
    one = [torch.autograd.grad(f(a), a, part)[0] for part in g]
    batched = torch.autograd.grad(f(a), a, g, is_grads_batched=True)[0]
    torch.testing.assert_close(batched, torch.stack(one), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.func.jacrev(f)(a.detach()) @ g[0], one[0], rtol=1e-4, atol=1e-5)
    half = torch.autograd.grad(
        anymax.segment_apply(anymax.Entmax(a), x.bfloat16(), index=segments), a, g[0].bfloat16()
    )[0]
    torch.testing.assert_close(half, one[0], rtol=0.05, atol=0.02)
    log_p = lambda a: anymax.segment_log_apply(anymax.Entmax(a), x.double(), index=segments).clamp(min=-50.0)  # noqa: E731
    a64 = a.detach().double().requires_grad_()
    assert torch.autograd.gradcheck(log_p, (a64,), atol=1e-5)


def test_segments_of_an_engine_that_is_asked_for():
    x, a = torch.tensor(_scores(ENTRIES)), torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    with anymax.use("native"):
        p = anymax.segment_apply(anymax.Entmax(a), x, lengths=LENGTHS)
        assert type(p.grad_fn).__name__ == "SegmentApplyBackward"
        score = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        # the wider rows are native
        anymax.segment_apply(anymax.Sink(anymax.Entmax(1.5), score=score), x, lengths=LENGTHS)
    with anymax.use("reference"):
        q = anymax.segment_apply(anymax.Entmax(a), x, lengths=LENGTHS)
        assert type(q.grad_fn).__name__ != "SegmentApplyBackward"
    g = torch.tensor(_scores(ENTRIES, seed=1))
    by_engine, by_formula = (torch.autograd.grad(out, a, g)[0] for out in (p, q))
    torch.testing.assert_close(by_engine, by_formula, rtol=1e-9, atol=1e-12)


@pytest.mark.whole
@pytest.mark.parametrize("each", [False, True], ids=["one for all", "one a segment"])
def test_compiled_segments_learn_a_parameter(each):
    x, segments = torch.tensor(_scores(ENTRIES), requires_grad=True), _order("unsorted")
    a = torch.tensor(_sizes(anymax.Entmax, 1.3, len(LENGTHS)) if each else 1.3, dtype=torch.float64, requires_grad=True)
    g = torch.tensor(_scores(ENTRIES, seed=1))
    f = lambda x, a: (anymax.segment_apply(anymax.Entmax(a), x, index=segments) * g).sum()  # noqa: E731
    expected = torch.autograd.grad(f(x, a), (x, a))
    found = torch.autograd.grad(torch.compile(f, fullgraph=True, backend="aot_eager")(x, a), (x, a))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("kind", "value", "each"),
    [
        (anymax.Entmax, 1.3, True),
        pytest.param(anymax.Entmax, 1.0, False, marks=pytest.mark.whole),
        (anymax.NormMax, 2.2, False),
        pytest.param(anymax.Budget, 0.8, True, marks=pytest.mark.whole),
    ],
)
def test_segments_of_jax_have_the_derivatives_of_torch(kind, value, each):
    jax = pytest.importorskip("jax")
    from jax.test_util import check_grads

    with jax.enable_x64(True):
        index = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
        index = np.random.default_rng(1).permutation(index)
        x, g = _scores(ENTRIES), _scores(ENTRIES, seed=1)
        at = _sizes(kind, value, len(LENGTHS)) if each else np.asarray(value)
        tensors = [torch.tensor(v, requires_grad=True) for v in (x, at)]
        segments = anymax.Segments.of(index, num_segments=len(LENGTHS))
        p = anymax.segment_apply(kind(tensors[1]), tensors[0], index=segments)
        expected = torch.autograd.grad(p, tensors, torch.tensor(g))

        def f(x, a, index):
            return (anymax.segment_apply(kind(a), x, index=index, num_segments=len(LENGTHS))[:ENTRIES] * g).sum()

        for gradient in (jax.grad(f, (0, 1)), jax.jit(jax.grad(f, (0, 1)))):
            for found, wanted in zip(gradient(x, at, jax.numpy.asarray(index)), expected):
                np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-11)
        stray = jax.numpy.asarray(np.concatenate([index, [-1]]))  # under jit it is an entry of no segment
        of_stray = lambda a, i: f(jax.numpy.append(x, 1.0), a, i)  # noqa: E731
        more = jax.jit(jax.grad(of_stray))(at, stray)
        np.testing.assert_allclose(more, expected[1], rtol=1e-9, atol=1e-11)
        if kind is anymax.Entmax and each:
            check_grads(lambda x, a: f(x, a, segments), (x, at), order=2, modes=("fwd", "rev"), atol=1e-5, rtol=1e-5)


# -- output layers ---------------------------------------------------------------------------------------------------------


def test_log_p_of_an_output_layer_gives_a_parameter_the_gradient_of_finite_differences():
    x, weight = torch.tensor(_scores(5, 3)), torch.tensor(_scores(40, 3, seed=1) * 0.3)
    target = anymax.apply(anymax.Entmax(1.3), x @ weight.T).argmax(-1)
    f = lambda a: float(anymax.linear_log_prob(x, weight, target, anymax.Entmax(float(a))).sum())  # noqa: E731
    a = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    anymax.linear_log_prob(x, weight, target, anymax.Entmax(a)).sum().backward()
    np.testing.assert_allclose(a.grad, _central(f, np.array(1.3)), rtol=1e-6)


def test_only_the_parameters_that_are_wanted_are_differentiated(monkeypatch):
    from anymax.linear.job import RowLoss

    seen, call = [], RowLoss.__call__

    def watched(self, mapping, *given):
        seen.append(mapping.alpha.requires_grad)
        return call(self, mapping, *given)

    monkeypatch.setattr(RowLoss, "__call__", watched)
    x, weight = torch.tensor(_scores(8, 3), requires_grad=True), torch.tensor(_scores(20, 3, seed=1))
    a = torch.tensor(1.3, dtype=torch.float64)
    for learns in (False, True):
        anymax.linear_loss(x, weight, torch.arange(8), anymax.Entmax(a.requires_grad_(learns))).backward()
        assert set(seen) == {learns}
        seen.clear()


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_an_output_layer_with_a_learned_parameter_has_second_derivatives(reduction):
    x, weight = (torch.tensor(_scores(*s, seed=i), requires_grad=True) for i, s in enumerate([(3, 2), (7, 2)]))
    a = torch.tensor([[1.3], [1.6], [1.2]], dtype=torch.float64, requires_grad=True)
    target = torch.tensor([1, -100, 4])
    f = lambda x, w, a: anymax.linear_loss(x, w, target, anymax.Entmax(a), reduction=reduction)  # noqa: E731
    assert torch.autograd.gradcheck(f, (x, weight, a), atol=1e-6)
    assert torch.autograd.gradgradcheck(f, (x, weight, a), atol=1e-6)


# -- shards ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("many", [False, True], ids=["few candidates", "many candidates"])
@pytest.mark.parametrize("each", [False, True], ids=["one for all", "one a row"])
def test_shards_give_a_parameter_the_gradient_of_one_process(many, each, monkeypatch):
    from processes import together

    from anymax import distributed
    from anymax.distributed import methods

    if many:
        monkeypatch.setattr(methods, "MANY", 0)
    x, g = torch.tensor(_scores(3, 20)), torch.tensor(_scores(3, 20, seed=1))
    target = torch.tensor([2, -100, 17])
    at = torch.tensor(_sizes(anymax.Entmax, 1.3, 3)[:, None] if each else 1.3, dtype=torch.float64)
    a = at.clone().requires_grad_()
    wanted = [
        torch.autograd.grad((anymax.apply(anymax.Entmax(a), x) * g).sum(), a)[0],
        torch.autograd.grad(anymax.fenchel_young(anymax.Entmax(a), x, target, axis=-1), a)[0],
    ]

    def one(group):
        mine = slice(group.rank * 10, group.rank * 10 + 10)
        a = at.clone().requires_grad_()
        p = distributed.apply(anymax.Entmax(a), x[:, mine], axis=-1, group=group)
        loss = distributed.fenchel_young(anymax.Entmax(a), x[:, mine], target, axis=-1, group=group)
        return [torch.autograd.grad(v, a)[0] for v in ((p * g[:, mine]).sum(), loss)]

    for found in together(2, one):
        for got, want in zip(found, wanted):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
