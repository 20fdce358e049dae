"""`Sink`: one class more whose probability is not given, against the inner map on rows that have it."""

import math

import numpy as np
import pytest
import torch
from kinds import KINDS, back

import anymax as am

INNER = ("softmax", "sparsemax", "entmax15", "sigsoftmax", "sparse_softmax:k=2", "normmax:alpha=2", "budget:k=2")
X = np.random.default_rng(0).standard_normal((5, 4)) * 1.5
SCORE = 0.3


def wide(x=X, score=SCORE):
    return np.concatenate([x, np.broadcast_to(score, (*x.shape[:-1], 1))], -1)


def loss_of(mapping):
    return am.fenchel_young if mapping.facts.has_potential else am.nll


def test_softmax_one():
    """exp(x_i) / (1 + sum exp(x)), also where no exponential can be computed."""
    want = np.exp(X) / (1 + np.exp(X).sum(-1, keepdims=True))
    np.testing.assert_allclose(am.apply(am.Sink(), X), want, rtol=1e-14)
    np.testing.assert_allclose(
        am.apply(am.Sink(), [[2000.0, 1999.0], [-2000.0, -1.0]])[1], [0.0, 1 / (1 + math.e)], atol=1e-16
    )
    np.testing.assert_allclose(am.log_apply(am.Sink(), [-2000.0, -1999.0]), [-2000.0, -1999.0])


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("kind", KINDS)
def test_p_and_log_p_are_those_of_the_wider_row(inner, kind):
    mapping, x = am.Sink(inner, SCORE), X.copy()
    x[1, 2] = -math.inf
    x[3] = -math.inf
    want = am.apply(inner, wide(x))[:, :-1]
    wide_enough = back(KINDS[kind](np.zeros(1))).dtype == np.float64
    rtol = 1e-12 if wide_enough else 1e-5
    np.testing.assert_allclose(
        back(am.apply(mapping, KINDS[kind](x))), want, rtol=rtol, atol=1e-6 if not wide_enough else 0
    )
    assert (want[3] == 0).all()
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(
            back(am.log_apply(mapping, KINDS[kind](x))),
            np.log(want),
            rtol=10 * rtol,
            atol=1e-5 if not wide_enough else 0,
        )


@pytest.mark.parametrize("inner", INNER[:-1])
def test_losses_take_minus_one_for_none_of_these(inner):
    mapping = am.Sink(inner, SCORE)
    target, other = np.array([0, -1, 3, -100, -1]), np.array([0, 4, 3, -100, 4])
    for loss in (loss_of(mapping), am.nll, am.accuracy_loss, am.stop_gradient_loss):
        for options in ({}, {"reduction": "none"}, {"label_smoothing": 0.1} if "k=" not in inner else {}):
            got, want = (
                loss(mapping, X, target, **options),
                loss(inner, wide(), other, **options),
            )
            np.testing.assert_allclose(got, want, rtol=1e-13)
    weight = np.array([1.0, 2.0, 0.5, 3.0])
    got = loss_of(mapping)(mapping, X, target, weight=weight)
    np.testing.assert_allclose(got, loss_of(mapping)(inner, wide(), other, weight=np.append(weight, 1.0)), rtol=1e-13)
    ignored = loss_of(mapping)(mapping, X, np.array([0, -1, 3, -1, -1]), ignore_index=-1)
    np.testing.assert_allclose(ignored, loss_of(mapping)(inner, wide(), np.array([0, -100, 3, -100, -100])), rtol=1e-13)
    assert loss_of(mapping)(mapping, X.T[..., None], np.full((4, 1), -1), axis=1).shape == ()


def test_a_target_may_leave_some_to_the_sink():
    y = np.abs(X) / np.abs(X).sum(-1, keepdims=True) * np.array([[0.0], [0.3], [1.0], [0.7], [0.5]])
    whole = np.concatenate([y, 1 - y.sum(-1, keepdims=True)], -1)
    for inner in ("softmax", "sparsemax", "entmax15"):
        got = am.fenchel_young(am.Sink(inner, SCORE), X, y, reduction="none")
        np.testing.assert_allclose(got, am.fenchel_young(inner, wide(), whole, reduction="none"), atol=1e-13)
    p = am.apply(am.Sink("sparsemax", SCORE), X)
    np.testing.assert_allclose(
        am.fenchel_young(am.Sink("sparsemax", SCORE), X, p, reduction="none"), np.zeros(5), atol=1e-14
    )


@pytest.mark.parametrize("inner", INNER[:4])
def test_gradients_in_the_scores_the_sink_and_alpha(inner):
    x = torch.tensor(X, requires_grad=True)
    score = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None].requires_grad_()
    f = lambda x, s: am.apply(am.Sink(inner, s), x)  # noqa: E731
    assert torch.autograd.gradcheck(f, (x, score))
    assert torch.autograd.gradgradcheck(f, (x, score))
    target = torch.tensor([0, -1, 3, 2, -1])
    loss = lambda x, s: loss_of(am.Sink(inner))(am.Sink(inner, s), x, target)  # noqa: E731
    assert torch.autograd.gradcheck(loss, (x, score))
    alpha = torch.tensor([[1.3]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, s: am.apply(am.Sink(am.Entmax(a), s), x), (alpha, score))


def test_learned_parameters_of_a_module():
    module = am.nn.Activation(
        am.Sink(am.Entmax(torch.nn.Parameter(torch.tensor(1.3))), torch.nn.Parameter(torch.tensor(0.5)))
    )
    assert len(dict(module.named_parameters())) == 2
    x = torch.tensor(X, dtype=torch.float32)
    torch.testing.assert_close(module(x), am.apply(am.Sink(am.Entmax(1.3), 0.5), x))
    module(x).sum().backward()
    assert all(p.grad is not None and p.grad.abs() > 0 for p in module.parameters())


@pytest.mark.whole
def test_under_compile_vmap_and_jax():
    mapping, x = am.Sink("entmax15", SCORE), torch.tensor(X)
    want = am.apply(mapping, x)
    torch.testing.assert_close(torch.compile(lambda x: am.apply(mapping, x), fullgraph=True, backend="eager")(x), want)
    torch.testing.assert_close(torch.vmap(lambda x: am.apply(mapping, x))(x), want)
    jax = pytest.importorskip("jax")
    y = jax.numpy.asarray(X)
    got = jax.jit(lambda y, s: am.apply(am.Sink("entmax15", s), y))(y, jax.numpy.float32(SCORE))
    np.testing.assert_allclose(got, want, atol=1e-5)
    slope = jax.grad(lambda s: am.fenchel_young(am.Sink("entmax15", s), y, jax.numpy.asarray([0, -1, 3, 2, -1])))(SCORE)
    s = torch.tensor(SCORE, dtype=torch.float64, requires_grad=True)
    am.fenchel_young(am.Sink("entmax15", s), x, torch.tensor([0, -1, 3, 2, -1])).backward()
    np.testing.assert_allclose(slope, s.grad, rtol=1e-4)


@pytest.mark.parametrize(("scores", "autocast"), [("float16", "bfloat16"), ("bfloat16", "float16")])
def test_under_an_autocast_of_another_half(scores, autocast):
    """torch has no rule for joining arrays of both."""
    x, dtype = torch.tensor(X).to(getattr(torch, scores)), getattr(torch, autocast)
    calls = (
        lambda: am.apply(am.Sink(), x),
        lambda: am.fenchel_young(am.Sink("sparsemax"), x, torch.tensor([0, -1, 3, 2, -1])),
        lambda: am.segment_apply(am.Sink(), x[:, 0], index=torch.tensor([0, 0, 1, 1, 1]), num_segments=2),
    )
    for call in calls:
        with torch.autocast("cpu", dtype):
            got = call()
        torch.testing.assert_close(got.double(), call().double(), rtol=0.01, atol=0.01)


def test_a_draw_of_the_sink_is_minus_one():
    """As often as its probability says, also where the classes left are cut, and with its log p."""
    x = np.tile([-1.0, 0.0, -3.0], (40_000, 1))
    p = am.apply(am.Sink(), x[0])
    drawn = am.sample(am.Sink(), x, generator=1)
    share = [(drawn == i).mean() for i in (-1, 0, 1, 2)]
    np.testing.assert_allclose(share, [1 - p.sum(), *p], atol=0.01)
    cut = am.sample(am.Sink(), x, generator=2, transform=am.topk(1), return_log_prob=True)
    assert set(np.unique(cut.index)) == {-1, 1}
    half = math.log(0.5)
    np.testing.assert_allclose(cut.log_prob, half)
    np.testing.assert_allclose(cut.full_log_prob, np.where(cut.index < 0, math.log(1 - p.sum()), np.log(p[1])))
    every = am.sample("sparsemax", x[:3], generator=1, num_samples=7)
    assert every.shape == (7, 3)
    kept = am.sample(am.Sink("sparsemax"), [[-0.5, -0.2, -9.0], [-9.0, -9.0, -9.0]], generator=3, return_support=True)
    np.testing.assert_array_equal(kept.support.ids, [0, 1])
    np.testing.assert_array_equal(kept.support.offsets, [0, 2, 2])
    assert kept.index[1] == -1
    assert am.sample(am.Sink(), torch.full((2, 3), -50.0), generator=0).tolist() == [-1, -1]


def test_a_hard_relaxed_draw_of_the_sink_is_no_class():
    x = torch.zeros(4000, 2, requires_grad=True)
    hard = am.gumbel_softmax(x, mapping=am.Sink(), hard=True, generator=torch.Generator().manual_seed(0))
    assert set(hard.sum(-1).tolist()) == {0.0, 1.0}
    hard[:, 0].sum().backward()
    assert x.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="gives the classes no distribution"):
        am.nn.Categorical(am.Sink(), x)
    with pytest.raises(ValueError, match=r"gumbel_softmax: .* a number of its own"):
        am.gumbel_softmax(x, mapping=am.Elementwise(), hard=True)


def test_log_prob_entropy_and_kl():
    y = np.array([0, -1, 3, 2, -1])
    for inner in ("softmax", "entmax15"):
        mapping = am.Sink(inner, SCORE)
        log_p, h = am.log_prob_entropy(mapping, X, y)
        want, of = am.log_prob_entropy(inner, wide(), np.where(y < 0, 4, y))
        np.testing.assert_allclose(log_p, want, rtol=1e-13)
        np.testing.assert_allclose(h, of, rtol=1e-13)
    full = np.concatenate([X, np.full((5, 1), -math.inf)], -1)
    np.testing.assert_allclose(
        am.likelihood.kl("softmax", X, am.Sink(), X),
        am.likelihood.kl("softmax", full, "softmax", wide(score=0.0)),
        rtol=1e-12,
    )
    assert (am.likelihood.kl(am.Sink(), X, "softmax", X) == math.inf).all()
    best = am.sampling.topk_log_prob(am.Sink(score=SCORE), X, 2)
    np.testing.assert_allclose(best.log_prob, -np.sort(-am.log_apply("softmax", wide())[:, :-1], -1)[:, :2], rtol=1e-13)


def test_thresholds_and_segments():
    for inner in ("softmax", "sparsemax"):
        got, want = am.threshold(am.Sink(inner, SCORE), X), am.threshold(inner, wide())
        np.testing.assert_allclose(got.tau, want.tau, rtol=1e-14)
    flat, lengths = X.ravel(), [3, 0, 7, 10]
    score = np.array([0.5, 0.0, -1.0, 2.0])
    got, at = am.segment_apply(am.Sink("sparsemax", score), flat, lengths=lengths), 0
    for n, s in zip(lengths, score):
        np.testing.assert_allclose(
            got[at : at + n], am.apply(am.Sink("sparsemax", s), flat[at : at + n]) if n else [], atol=1e-15
        )
        at += n
    lone = am.segment_sample(am.Sink(score=50.0), flat, lengths=lengths, generator=0)
    assert (lone == -1).all()
    value = am.segment_loss(am.Sink("sparsemax", SCORE), flat, [2, -1, -1, 15], lengths=lengths, reduction="none")
    parts = [flat[:3], flat[3:3], flat[3:10], flat[10:]]
    for v, part, t in zip(value, parts, (2, -1, -1, 5)):
        want = am.fenchel_young(am.Sink("sparsemax", SCORE), part, t) if part.size else 0.0
        np.testing.assert_allclose(v, want, atol=1e-14)


@pytest.mark.parametrize("inner", ["softmax", "entmax15", "sigsoftmax"])
def test_output_layers(inner):
    gen = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(s, generator=gen, dtype=torch.float64).requires_grad_() for s in ((4, 5), (7, 5), (7,)))
    score = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    mapping, t = am.Sink(inner, score), torch.tensor([-1, 2, -100, 5])
    got = am.linear_loss(x, w, t, mapping, linear_bias=b)
    want = loss_of(mapping)(mapping, x @ w.T + b, t)
    torch.testing.assert_close(got, want)
    pairs = zip(torch.autograd.grad(got, (x, w, b, score)), torch.autograd.grad(want, (x, w, b, score)))
    for a, c in pairs:
        torch.testing.assert_close(a, c)
    y = torch.tensor([-1, 2, 3, -1])
    torch.testing.assert_close(am.linear_log_prob(x, w, y, mapping), am.log_prob(mapping, x @ w.T, y))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [2, 1.6, np.array([[2.0], [1.2]])], ids=str)
def test_a_target_of_an_output_layer_sums_to_what_the_map_does(kind, k):
    """The sink has what is left of this sum, as in the loss of scores."""
    make, rng = KINDS[kind], np.random.default_rng(3)
    x, w = rng.standard_normal((2, 5)), rng.standard_normal((3, 5))
    y = np.array([[1.0, 0.6, 0.0], [0.0, 0.3, 0.9]])
    mapping = am.Sink(am.Budget(make(k) if isinstance(k, np.ndarray) else k), 0.3)
    for reduction in ("mean", "none"):
        want = am.fenchel_young(mapping, make(x @ w.T), make(y), reduction=reduction)
        got = am.linear_loss(make(x), make(w), make(y), mapping, reduction=reduction)
        np.testing.assert_allclose(back(got), back(want), rtol=2e-6, atol=1e-7)
    for wrong in ([[1.0, 1.0, 1.0], [0.0, 0.3, 0.9]], [[-0.1, 1.0, 0.6], [0.0, 0.3, 0.9]]):
        with pytest.raises(ValueError, match="expected rows of non-negative numbers"):
            am.linear_loss(x, w, wrong, am.Sink(am.Budget(2)))


W = np.random.default_rng(1).standard_normal((4, 4))
SUPPORT = np.tile([0, 1, 2], 5), np.arange(0, 16, 3)  # the first three classes of each row
BY_INDEX = {  # what takes class indices: of the scores x, or of an output layer with the scores x @ W
    "fenchel_young": lambda m, x, t, **o: am.fenchel_young(m, x, t, reduction="none", **o),
    "nll": lambda m, x, t, **o: am.nll(m, x, t, reduction="none", **o),
    "linear_loss": lambda m, x, t, **o: am.linear_loss(x, W, t, m, reduction="none", **o),
    "log_prob": lambda m, x, t: am.log_prob(m, x, t),
    "log_prob of a support": lambda m, x, t: am.log_prob(m, x, t, support=SUPPORT),
    "linear_log_prob": lambda m, x, t: am.linear_log_prob(x, W, t, m),
}


@pytest.mark.parametrize("verb", BY_INDEX)
@pytest.mark.parametrize("mapping", [am.Sink(), am.Sink("entmax15", 0.5), am.Softmax(), am.Entmax(1.5)], ids=repr)
def test_an_index_out_of_range_is_an_error_or_nan(verb, mapping):
    """The number of classes too, which is the place of the sink in the wider rows; -1 is a class only of a map with a sink."""
    jax = pytest.importorskip("jax")
    jnp, compute, sink = jax.numpy, BY_INDEX[verb], isinstance(mapping, am.Sink)
    strays = (4, 5, -2, 8 if sink or "log_prob" in verb else -1)
    allowed = "from 0 to 3, (or )?-1 for none of them" if sink else "from 0 to 3, (or )?(-1 for none|ignore_index=-100)"
    for stray in strays:
        with pytest.raises(IndexError, match=rf"{allowed}.*, got values from {min(stray, 1)} to {max(stray, 1)}"):
            compute(mapping, X, np.array([1, 1, stray, 1, 1]))
    jitted = jax.jit(lambda t: compute(mapping, jnp.asarray(X), t))
    np.testing.assert_array_equal(np.isnan(jitted(jnp.array([1, *strays]))), [False, True, True, True, True])
    if sink:
        value = compute(mapping, X, np.array([-1, 2, 2, 0, -1]))
        np.testing.assert_allclose(jitted(jnp.array([-1, 2, 2, 0, -1])), value, rtol=1e-5)
        assert np.all(value[[0, 4]] != 0.0)


@pytest.mark.parametrize("verb", ["fenchel_young", "linear_loss"])
def test_the_index_to_ignore_may_be_any(verb):
    """The sink is not ignored where that index is its place in the wider rows; where it is -1 the sink has no index."""
    t, compute = np.array([-1, 2, 0, 3, -1]), BY_INDEX[verb]
    want = compute(am.Sink(), X, t)
    assert np.all(want > 0.0)
    for index in (4, 5, -7):
        left_out = compute(am.Sink(), X, np.where(t == 2, index, t), ignore_index=index)
        np.testing.assert_allclose(left_out, want * [1, 0, 1, 1, 1], rtol=1e-14)
    np.testing.assert_allclose(compute(am.Sink(), X, t, ignore_index=-1), want * [0, 1, 1, 1, 0], rtol=1e-14)


def test_attention_has_the_same_sink():
    gen = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn((2, 3, 6, 4), generator=gen, dtype=torch.float64) for _ in range(3))
    head = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    query = torch.randn((2, 3, 6, 1), generator=gen, dtype=torch.float64).requires_grad_()
    for inner in ("softmax", "entmax15"):
        for score, sink in ((head[:, None, None], head), (query, query), (0.5, 0.5)):
            got = am.attention(q, k, v, am.Sink(inner, score), is_causal=True)
            torch.testing.assert_close(got, am.attention(q, k, v, inner, sink=sink, is_causal=True))
            scores = (q @ k.mT / 2).masked_fill(~torch.ones(6, 6).tril().bool(), -torch.inf)
            torch.testing.assert_close(got, am.apply(am.Sink(inner, score), scores) @ v)
            if not isinstance(score, float):
                blocks = am.attention(q, k, v, inner, sink=sink, is_causal=True, implementation="blockwise")
                torch.testing.assert_close(blocks, got)
                a, b = (torch.autograd.grad(out.square().sum(), sink)[0] for out in (blocks, got))
                torch.testing.assert_close(a, b)
    layer = am.nn.Attention(8, 2, am.Sink("sparsemax", torch.nn.Parameter(torch.zeros(2, 1, 1))), batch_first=True)
    out, _ = layer(*[torch.randn(1, 5, 8, generator=gen)] * 3)
    out.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_a_sink_by_name():
    assert am.apply("sink:mapping=sparsemax,score=1", [1.5, 0.0]).tolist() == [0.75, 0.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bound", [None, 0.3, np.array([[0.3], [0.05]])])
def test_a_bound_for_each_class_and_for_the_sink(kind, bound):
    """The sink is one more class of Bounded, whose bound is given or 1."""
    x, upper = np.array([[3.0, 1.0, 2.0, -1.0], [0.0, 0.5, 1.0, 2.0]]), np.array([0.3, 0.2, 0.4, 0.1])
    last = np.broadcast_to(1.0 if bound is None else bound, (2, 1))
    wide = np.concatenate([np.broadcast_to(upper, (2, 4)), last], -1)
    make = KINDS[kind]
    mapping = am.Sink(am.Bounded(make(upper)), bound=make(bound) if isinstance(bound, np.ndarray) else bound)
    want = am.apply(am.Bounded(wide), np.concatenate([x, np.zeros((2, 1))], -1))[:, :-1]
    np.testing.assert_allclose(back(am.apply(mapping, make(x))), want, atol=1e-6)
    if bound is not None:  # one bound for all classes, and another for the sink
        alike = np.concatenate([np.full((2, 4), 0.4), last], -1)
        want = am.apply(am.Bounded(alike), np.concatenate([x, np.zeros((2, 1))], -1))[:, :-1]
        np.testing.assert_allclose(am.apply(am.Sink(am.Bounded(0.4), bound=bound), x), want)
