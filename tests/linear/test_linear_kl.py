"""The divergence between two output layers, from the hidden states and the weight of each."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from kinds import KINDS, back
from laws import close
from linear_cases import CLASSES, MAPS, ROWS, made, operands, tolerance
from refusals import each, refuses

import anymax as A
from anymax.likelihood import divergence

INF = math.inf
ALL_KINDS = [k for k in KINDS if k != "strict"]
BETAS = (0.0, 0.3, 1.0)
MAPS_OF_ALL = ("softmax", "entmax08", "taylor", "sigsoftmax")  # each class has a probability
DENSE_AND_SPARSE = (*MAPS_OF_ALL, "sparsemax", "entmax15", "topk", "normmax", "squares")
COUNTS = np.array([1, 1, 0, 1, 1, 0, 1], bool)
WARM = np.linspace(0.5, 2.0, ROWS)


def pair(seed=0, small=1.0):
    """x, weight and bias of a student and of a reference with fewer features."""
    x, weight, bias, *_ = operands(seed)
    rng = np.random.default_rng(seed + 50)
    of_reference = rng.normal(size=(ROWS, 4)), small * rng.normal(size=(CLASSES, 4)), small * rng.normal(size=CLASSES)
    return x, small * weight, small * bias, *of_reference


def written(p, q, beta):
    """The divergence of q from p, probabilities of student and teacher, as it is written, row by row."""

    def kl(a, b):
        there = a > 0
        return (a[there] * np.log(a[there] / b[there])).sum()

    with np.errstate(divide="ignore"):
        if beta in (0.0, 1.0):
            return np.array([kl(a, b) if beta else kl(b, a) for a, b in zip(p, q)])
        return np.array([beta * kl(b, m) + (1 - beta) * kl(a, m) for a, b, m in zip(p, q, (1 - beta) * p + beta * q)])


def torch_pair(seed=0, small=1.0, dtype="float64"):
    torch = pytest.importorskip("torch")
    return torch, [torch.tensor(a, dtype=getattr(torch, dtype)).requires_grad_() for a in pair(seed, small)]


def ours(x, weight, bias, x_ref, weight_ref, bias_ref, mapping="softmax", **options):
    return A.linear_kl(x, weight, x_ref, weight_ref, mapping, linear_bias=bias, linear_bias_ref=bias_ref, **options)


def plain(x, weight, bias, x_ref, weight_ref, bias_ref, mapping="softmax", beta=0.0, each=lambda s: s):
    """The same of all scores, with torch's derivatives. each: what changes the scores of both."""
    s, t = each(x @ weight.T + bias), each(x_ref @ weight_ref.T + bias_ref)
    p, q = A.apply(mapping, s), A.apply(mapping, t)
    m = q if beta == 1 else p if beta == 0 else (1 - beta) * p + beta * q

    def kl(a):
        return (a * ((a + (a == 0)).log() - (m + (a == 0)).log())).sum(-1)

    return kl(q) if beta == 0 else kl(p) if beta == 1 else beta * kl(q) + (1 - beta) * kl(p)


# -- values --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.whole(lambda kind, name: kind == "jax" and name != "softmax")
@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("name", DENSE_AND_SPARSE)
def test_it_is_that_of_all_scores(kind, name):
    x, weight, bias, y, weight_ref, bias_ref = pair(1, 0.5)
    keep = np.arange(CLASSES) % 7 != 3
    mapping = MAPS[name]
    for beta, temperature in itertools.product(BETAS, (None, 0.7, WARM)):
        t = 1.0 if temperature is None else np.reshape(temperature, (-1, 1))
        p, q = (A.apply(mapping, s / t, mask=keep) for s in (x @ weight.T + bias, y @ weight_ref.T + bias_ref))
        T = KINDS[kind](temperature) if isinstance(temperature, np.ndarray) else temperature
        got = ours(
            *made(kind, x, weight, bias, y, weight_ref, bias_ref),
            mapping,
            beta=beta,
            temperature=T,
            mask=made(kind, keep)[0],
            chunk=16,
        )
        want = written(p, q, beta)
        assert np.array_equal(back(got) == INF, want == INF)
        close(np.exp(-back(got)), np.exp(-want), tolerance(kind))


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_rows_that_do_not_count(kind, reduction):
    """They may hold anything; they are 0, and a mean leaves them out."""
    x, weight, bias, y, weight_ref, bias_ref = pair(2)
    each_row = ours(x, weight, bias, y, weight_ref, bias_ref, beta=0.5)
    want = np.where(COUNTS, each_row, 0.0)
    want = {"none": want, "sum": want.sum(), "mean": want.sum() / COUNTS.sum()}[reduction]
    x, y = x.copy(), y.copy()
    x[2], y[5] = np.nan, INF
    parts = made(kind, x, weight, bias, y, weight_ref, bias_ref)
    got = ours(*parts, beta=0.5, where=made(kind, COUNTS)[0], reduction=reduction)
    close(back(got), want, tolerance(kind))
    none = ours(*parts, beta=0.5, where=made(kind, COUNTS & False)[0], reduction=reduction)
    close(back(none), np.zeros_like(want), 1e-30)


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("name", ["softmax", "entmax15"])
def test_over_a_support(kind, name):
    """Both are renormalised over the classes of each row's support, as by a mask of all others."""
    x, weight, bias, y, weight_ref, bias_ref = pair(3, 0.3)
    rng = np.random.default_rng(0)
    kept = [np.sort(rng.permutation(CLASSES)[: 3 + i]) for i in range(ROWS)]
    mask = np.zeros((ROWS, CLASSES), bool)
    for i, ids in enumerate(kept):
        mask[i, ids] = True
    support = tuple(made(kind, np.concatenate(kept), np.cumsum([0, *map(len, kept)])))
    cap = A.transforms.softcap(2.0)
    for beta, reduction in itertools.product(BETAS, ("none", "mean")):
        options = {"beta": beta, "reduction": reduction, "transform": cap, "where": COUNTS, "temperature": 0.8}
        want = ours(x, weight, bias, y, weight_ref, bias_ref, MAPS[name], mask=mask, **options)
        got = ours(
            *made(kind, x, weight, bias, y, weight_ref, bias_ref), MAPS[name], support=support,
            **(options | {"where": made(kind, COUNTS)[0]}),
        )  # fmt: skip
        close(np.exp(-back(got)), np.exp(-want), tolerance(kind))


def test_directions_are_the_ends_of_beta():
    x, weight, bias, y, weight_ref, bias_ref = pair()
    p, q = A.softmax(x @ weight.T + bias), A.softmax(y @ weight_ref.T + bias_ref)
    of = (x, weight, bias, y, weight_ref, bias_ref)
    for options in ({}, {"direction": "forward"}, {"beta": 0}, {"beta": 0.0, "direction": "forward"}):
        close(ours(*of, **options), (q * np.log(q / p)).sum(-1), 1e-12)
    for options in ({"direction": "reverse"}, {"beta": 1}):
        close(ours(*of, **options), (p * np.log(p / q)).sum(-1), 1e-12)
    # near the ends Jensen-Shannon's is beta times them
    close(ours(*of, beta=1e-7) / 1e-7, ours(*of), 1e-3)
    close(ours(*of, beta=1 - 1e-7) / 1e-7, ours(*of, direction="reverse"), 1e-3)


@pytest.mark.parametrize("beta", BETAS)
def test_the_formulas_of_trl_and_liger(beta):
    """As both libraries write them: log M by logaddexp, and kl_div of logarithms; a mean over the labels that are not -100."""
    torch, free = torch_pair(4)
    labels = torch.tensor([3, 1, -100, 5, 9, -100, 0])
    x, weight, bias, y, weight_ref, bias_ref = free
    log_s = torch.log_softmax((x @ weight.T + bias) / 0.9, -1)
    log_t = torch.log_softmax((y @ weight_ref.T + bias_ref) / 0.9, -1)
    kl_div = torch.nn.functional.kl_div
    if beta == 0:
        of_trl = kl_div(log_s, log_t, reduction="none", log_target=True)
        of_liger = log_t.exp() * (log_t - log_s)
    elif beta == 1:
        of_trl = kl_div(log_t, log_s, reduction="none", log_target=True)
        of_liger = log_s.exp() * (log_s - log_t)
    else:
        log_m = torch.logaddexp(log_s + math.log(1 - beta), log_t + math.log(beta))
        of_trl = beta * kl_div(log_m, log_t, reduction="none", log_target=True) + (1 - beta) * kl_div(
            log_m, log_s, reduction="none", log_target=True
        )
        s, t = log_s.exp(), log_t.exp()
        log_m = ((1 - beta) * s + beta * t).log()
        of_liger = beta * t * log_t + (1 - beta) * s * log_s - ((1 - beta) * s + beta * t) * log_m
    got = ours(*free, beta=beta, temperature=0.9, where=labels != -100, reduction="mean")
    for each_class in (of_trl, of_liger):
        want = each_class[labels != -100].sum() / (labels != -100).sum()
        close(got.detach(), want.detach(), 1e-12)
        gradients = (torch.autograd.grad(v, free, retain_graph=True) for v in (got, want))
        for a, b in zip(*gradients):
            close(a, b, 1e-10)


# -- where a probability is 0 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_sparse_maps_are_infinitely_far_where_a_support_lacks_a_class(kind):
    x, weight = np.array([[2.0, 0.0], [0.1, 0.0]]), np.array([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])
    y = np.array([[0.1, 0.0], [0.1, 0.0]])
    given = made(kind, x, weight, y, weight)
    # the student's first row has one class, the teacher's has three
    forward, reverse, js = (back(A.linear_kl(*given, "sparsemax", beta=b)) for b in BETAS[::2] + (0.4,))
    assert forward[0] == INF
    assert 0 < reverse[0] < INF
    assert 0 < js[0] < math.log(2)
    for value in (forward, reverse, js):
        close(value[1], 0.0, 1e-6)


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("name", ["softmax", "sparsemax"])
def test_the_gradient_of_an_infinite_divergence_is_finite(name, beta):
    """It is that of `likelihood.kl`: in the scores of the second that of its classes, and mass times q - p of those that it lacks."""
    torch, free = torch_pair(5)
    x, weight, bias, y, weight_ref, bias_ref = free
    with torch.no_grad():
        (bias_ref if beta else bias)[4] = -INF  # of the second distribution
    s, t = x @ weight.T + bias, y @ weight_ref.T + bias_ref
    first, second = (s, t) if beta else (t, s)
    value = ours(*free, MAPS[name], beta=beta)
    if name == "softmax":
        assert (value == INF).all()
    inner = (x, weight, y, weight_ref)
    got = torch.autograd.grad(value.sum(), inner)
    want = torch.autograd.grad(A.likelihood.kl(MAPS[name], first, MAPS[name], second).sum(), inner, retain_graph=True)
    p, q = A.apply(MAPS[name], first).detach(), A.apply(MAPS[name], second)
    has = q > 0
    scores = torch.where(second == -INF, 0.0, second)
    lost = torch.where(has, 0.0, p)
    pull = (lost.sum(-1, keepdim=True) * q.detach() * scores).sum() - (lost * scores).sum()
    written = pull - (torch.where(has, p, 0.0) * torch.where(has, q, 1.0).log()).sum()
    of_second = slice(2, 4) if beta else slice(0, 2)
    for a, b in (*zip(got, want), *zip(got[of_second], torch.autograd.grad(written, inner[of_second]))):
        assert torch.isfinite(a).all()
        close(a, b, 1e-9)


def test_masked_classes_and_rows_without_classes():
    torch, free = torch_pair(6)
    mask = torch.ones(ROWS, CLASSES, dtype=torch.bool)
    mask[1], mask[:, 5] = False, False
    for beta, reduction in itertools.product(BETAS, ("none", "mean")):
        value = ours(*free, beta=beta, mask=mask, reduction=reduction)
        assert torch.isfinite(value).all()
        if reduction == "none":
            assert value[1] == 0
        gradients = torch.autograd.grad(value.sum(), free)
        for g in gradients:
            assert torch.isfinite(g).all()
        assert not gradients[1][5].any()
        assert not gradients[0][1].any()


def test_nan_stays_in_its_row():
    torch, free = torch_pair(6)
    with torch.no_grad():
        free[3][2, 0] = math.nan
    for beta in BETAS:
        assert ours(*free, beta=beta).isnan().tolist() == [i == 2 for i in range(ROWS)]


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_sink_is_one_more_class(kind):
    x, weight, bias, y, weight_ref, bias_ref = pair(7, 0.3)
    more = lambda s: np.concatenate([s, np.full((ROWS, 1), 0.4)], -1)  # noqa: E731
    p, q = (A.softmax(more(s)) for s in (x @ weight.T + bias, y @ weight_ref.T + bias_ref))
    for beta in BETAS:
        got = ours(*made(kind, x, weight, bias, y, weight_ref, bias_ref), A.Sink("softmax", 0.4), beta=beta)
        close(back(got), written(p, q, beta), tolerance(kind))


# -- gradients -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("name", MAPS_OF_ALL[:3])
@pytest.mark.parametrize("beta", BETAS)
def test_gradients_of_both_sides(beta, name, reduction, chunk):
    torch, free = torch_pair(8, 0.5)
    got = ours(*free, MAPS[name], beta=beta, reduction=reduction, chunk=chunk)
    want = plain(*free, MAPS[name], beta)
    g = torch.linspace(-1.0, 2.0, ROWS, dtype=torch.float64)
    want = {"none": want, "sum": want.sum(), "mean": want.mean()}[reduction]
    close(got.detach(), want.detach(), 1e-11)
    got, want = ((v * g).sum() if reduction == "none" else 1.7 * v for v in (got, want))
    for some in (free, free[:3], free[3:], free[1:2], free[5:]):
        for a, b in zip(*(torch.autograd.grad(v, some, retain_graph=True) for v in (got, want))):
            close(a, b, 1e-9)


@pytest.mark.parametrize("name", ["sparsemax", "entmax15", "topk"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_gradients_of_sparse_maps(name, reduction):
    """Jensen-Shannon's divergence is finite whatever the supports."""
    torch, free = torch_pair(8)
    got = ours(*free, MAPS[name], beta=0.4, reduction=reduction).sum()
    want = plain(*free, MAPS[name], 0.4)
    want = want.mean() if reduction == "mean" else want.sum()
    for a, b in zip(torch.autograd.grad(got, free), torch.autograd.grad(want, free)):
        close(a, b, 1e-9)


@pytest.mark.parametrize("beta", BETAS)
def test_finite_differences(beta):
    torch, free = torch_pair(9, 0.5)
    for mapping in ("softmax", MAPS["entmax08"]):
        f = lambda *o, m=mapping: ours(*o, m, beta=beta, chunk=16, temperature=1.3)  # noqa: E731
        assert torch.autograd.gradcheck(f, free, atol=1e-6, fast_mode=True)
        assert torch.autograd.gradgradcheck(f, free, atol=1e-5, fast_mode=True)


@pytest.mark.parametrize("beta", BETAS)
def test_a_frozen_side_costs_no_product(beta):
    """Two products give the scores; each side that learns takes two more."""
    torch, free = torch_pair(10)
    want = torch.autograd.grad(plain(*free, beta=beta).mean(), free)
    for learns, most in ((free, 6), (free[:3], 4), (free[3:], 4), (free[:1], 3), (free[1:2], 3), (free[2:3], 2)):
        for a in free:
            a.requires_grad_(any(a is b for b in learns))
        with torch.autograd.profiler.profile() as record:
            ours(*free, beta=beta, reduction="mean").backward()
        assert sum(e.count for e in record.key_averages() if e.key == "aten::mm") == most
        for a, of in zip(free, want):
            assert (a.grad is not None) == a.requires_grad
            if a.requires_grad:
                close(a.grad, of, 1e-10)
            a.grad = None


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_no_more_scores_at_a_time_than_the_chunk_says(reduction, monkeypatch):
    _, free = torch_pair(11)
    from anymax.linear import torch_groups

    rows, scores = [], torch_groups._scores
    monkeypatch.setattr(torch_groups, "_scores", lambda layer, how: rows.append(layer.rows) or scores(layer, how))
    ours(*free, beta=0.5, chunk=2 * CLASSES // ROWS + 1, reduction=reduction).sum().backward()
    of_pass = [2, 2] * (ROWS // 2) + [1, 1]
    assert rows == 2 * of_pass


def test_what_learns_beside_the_operands():
    """The parameter of a map, a temperature of each row, and a cap, which count for both sides."""
    torch, free = torch_pair(12, 0.5)
    alpha, warmth, cap = (torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in (0.8, WARM, 2.0))
    leaves = [*free, alpha, warmth, cap]
    transform = A.transforms.softcap(cap)
    for beta in BETAS:
        got = ours(*free, A.Entmax(alpha), beta=beta, temperature=warmth, transform=transform, chunk=16)
        want = plain(*free, A.Entmax(alpha), beta, lambda s: transform(s / warmth[:, None]))
        close(got.detach(), want.detach(), 1e-10)
        for a, b in zip(torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(want.sum(), leaves)):
            close(a, b, 1e-8)
        by_row = torch.linspace(0.7, 0.9, ROWS, dtype=torch.float64)[:, None].requires_grad_()
        for reduction in ("sum", "none"):
            got = ours(
                *free, A.Entmax(by_row), beta=beta, reduction=reduction, chunk=16 if reduction == "none" else None
            ).sum()
            want = plain(*free, A.Entmax(by_row), beta).sum()
            for a, b in zip(*(torch.autograd.grad(v, [*free, by_row]) for v in (got, want))):
                close(a, b, 1e-8)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_the_gradient_of_rows_that_do_not_count(reduction):
    torch, free = torch_pair(13)
    with torch.no_grad():
        free[0][2], free[3][5] = math.nan, INF
    counts = torch.tensor(COUNTS)
    value = ours(*free, beta=0.5, where=counts, reduction=reduction).sum()
    used = [a[counts] if i in (0, 3) else a for i, a in enumerate(free)]
    want = plain(*used, beta=0.5)
    want = want.sum() if reduction == "none" else want.mean()
    close(value.detach(), want.detach(), 1e-12)
    for a, b in zip(torch.autograd.grad(value, free), torch.autograd.grad(want, free, retain_graph=True)):
        assert torch.isfinite(a).all()
        close(a, b, 1e-10)
    # where rows are not dropped, as by functional transforms, nothing of them may reach the weight
    of_weight = torch.func.grad(
        lambda w: ours(free[0], w, *free[2:], beta=0.5, where=counts, reduction=reduction).sum()
    )
    close(of_weight(free[1].detach()).detach(), torch.autograd.grad(want, free[1], retain_graph=True)[0], 1e-10)
    value = ours(*free, beta=0.5, where=counts & False, reduction=reduction).sum()
    assert all(not g.any() for g in torch.autograd.grad(value, free))


@pytest.mark.whole
@pytest.mark.parametrize("where", [False, True])
def test_jax(where):
    """Under jit, some rows at a time, with gradients of both sides."""
    jax = pytest.importorskip("jax")
    torch, free = torch_pair(14)
    counts = COUNTS if where else None
    for beta, chunk in itertools.product(BETAS, (None, 16)):
        options = {"beta": beta, "reduction": "mean", "chunk": chunk}
        with jax.enable_x64(True):
            leaves = tuple(jax.numpy.asarray(back(a)) for a in free)
            f = lambda *o, more=options: ours(*o, where=counts, **more)  # noqa: E731
            value, gradients = jax.jit(jax.value_and_grad(f, tuple(range(6))))(*leaves)
        want = ours(*free, where=None if counts is None else torch.tensor(counts), **options)
        close(back(value), want.detach(), 1e-11)
        for a, b in zip(gradients, torch.autograd.grad(want, free)):
            close(back(a), b, 1e-9)


# -- under torch.compile, in half precision ------------------------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("name", ["softmax", "entmax08"])
def test_torch_compile(name, beta):
    """One graph, which holds no scores, forward and backward, with a frozen teacher and one that learns."""
    torch, free = torch_pair(15, 0.5)
    counts, seen = torch.tensor(COUNTS), []

    def backend(graph, inputs):
        from torch._dynamo.backends.debugging import aot_eager

        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return aot_eager(graph, inputs)

    def f(*o):
        return ours(*o, MAPS[name], beta=beta, where=counts, transform=A.transforms.softcap(3.0), reduction="mean")

    for learns in (free, free[:3]):
        given = [a if any(a is b for b in learns) else a.detach() for a in free]
        torch.compiler.reset()
        got, want = torch.compile(f, backend=backend, fullgraph=True)(*given), f(*given)
        close(got.detach(), want.detach(), 1e-12)
        for a, b in zip(torch.autograd.grad(got, learns), torch.autograd.grad(want, learns)):
            close(a, b, 1e-10)
    assert not any("matmul" in str(target) for target in seen)
    support = torch.arange(CLASSES).repeat(ROWS), CLASSES * torch.arange(ROWS + 1)
    torch.compiler.reset()
    of_support = torch.compile(lambda *o: ours(*o, MAPS[name], beta=beta, support=support), backend="eager")
    close(of_support(*free).detach(), ours(*free, MAPS[name], beta=beta).detach(), 1e-10)


@pytest.mark.parametrize(
    "dtypes", [("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "bfloat16"), ("bfloat16", "float32")]
)
def test_half_precision(dtypes):
    """Scores are fp32, and gradients are rounded once; student and teacher may differ."""
    torch, free = torch_pair(16)
    own = [a.detach().to(getattr(torch, dtypes[i // 3])).requires_grad_() for i, a in enumerate(free)]
    exact = [a.detach().double().requires_grad_() for a in own]
    for beta, reduction in itertools.product(BETAS, ("none", "mean")):
        got = ours(*own, beta=beta, reduction=reduction)
        assert got.dtype is torch.float32
        want = ours(*exact, beta=beta, reduction=reduction)
        close(got.detach().double(), want.detach(), 1e-5)
        for a, b, of in zip(torch.autograd.grad(got.sum(), own), torch.autograd.grad(want.sum(), exact), own):
            assert a.dtype is of.dtype
            close(a.double(), b, 1e-5 + torch.finfo(of.dtype).eps * float(b.abs().max()))


def test_the_shape_of_the_rows_is_that_of_the_features():
    torch, free = torch_pair(17)
    x, weight, bias, y, weight_ref, bias_ref = free
    want = ours(*free).detach()
    got = ours(x[:6].reshape(2, 3, -1), weight, bias, y[:6].reshape(2, 3, -1), weight_ref, bias_ref)
    close(got.detach(), want[:6].reshape(2, 3), 1e-12)
    one = ours(x[0], weight, bias, y[0], weight_ref, bias_ref)
    assert one.shape == ()
    none = ours(x[:0], weight, bias, y[:0], weight_ref, bias_ref, reduction="mean")
    assert none == 0
    assert all(not g.any() for g in torch.autograd.grad(none, free))


def test_a_gpu_takes_larger_groups(monkeypatch):
    """There nothing may be read from the scores."""
    torch, free = torch_pair(18, 0.5)
    from anymax.likelihood import divergence_torch
    from anymax.linear import torch_blocks

    monkeypatch.setattr(torch_blocks, "on_gpu", lambda x: True)
    monkeypatch.setattr(divergence_torch, "_has_none", lambda log_p: True)
    for beta, reduction in itertools.product(BETAS, ("none", "mean")):
        got, want = ours(*free, beta=beta, reduction=reduction).sum(), plain(*free, beta=beta)
        want = want.mean() if reduction == "mean" else want.sum()
        for a, b in zip(torch.autograd.grad(got, free), torch.autograd.grad(want, free)):
            close(a, b, 1e-10)


def test_very_far_scores():
    """No class is lost by rounding that both can hold."""
    s, t = np.array([[0.0, -300.0, -800.0]]), np.array([[-500.0, 0.0, -900.0]])
    eye = np.eye(3)
    close(A.linear_kl(s, eye, t, eye), [300.0], 1e-12)
    close(A.linear_kl(s, eye, t, eye, beta=1), [500.0], 1e-12)
    close(A.linear_kl(s, eye, t, eye, beta=0.5), [math.log(2)], 1e-12)
    torch = pytest.importorskip("torch")
    given = [torch.tensor(a, dtype=torch.float32) for a in (s, eye, t, eye)]
    for beta, want in ((0, 300.0), (1, 500.0), (0.5, math.log(2))):
        close(A.linear_kl(*given, beta=beta), [want], 1e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_the_pass_of_softmax_is_the_plain_formula(beta):
    """By values, by gradients, and where a class has no probability on one side or on both."""
    torch = pytest.importorskip("torch")
    gen = torch.Generator().manual_seed(0)
    s, t = (torch.randn(4, 9, dtype=torch.float64, generator=gen) for _ in range(2))
    s[1, 2] = t[1, 2] = s[2, 3] = t[3, 4] = -INF
    s, t = s.requires_grad_(), t.requires_grad_()
    own, other = (f(s, t, beta) for f in (lambda *o: divergence.bridge(s).divergence(*o), divergence.plain))
    assert torch.equal(own == INF, other == INF)
    close(torch.exp(-own.detach()), torch.exp(-other.detach()), 1e-12)
    for a, b in zip(*(torch.autograd.grad(v.sum(), (s, t)) for v in (own, other))):
        close(a, b, 1e-10)


# -- errors --------------------------------------------------------------------------------------------------------------------------

X, WEIGHT, BIAS, Y, REF, _ = pair()
GIVEN = (X, WEIGHT, Y, REF)
WRONG = {
    "classes": (
        lambda: A.linear_kl(X, WEIGHT, Y, REF[:50]), ValueError, "linear_weight has 60 classes and linear_weight_ref 50: .* its first rows",
    ),
    "rows": (lambda: A.linear_kl(X, WEIGHT, Y[:5], REF), ValueError, r"x has rows of shape \(7,\) and x_ref \(5,\)"),
    "features": (
        lambda: A.linear_kl(X, WEIGHT, Y, WEIGHT), ValueError, r"linear_kl, of the reference: expected features .*\(7, 4\) and \(60, 5\)",
    ),
    "bias": (lambda: A.linear_kl(*GIVEN, linear_bias_ref=BIAS[:5]), ValueError, "of the reference: a linear_bias of shape"),
    "beta": (lambda: A.linear_kl(*GIVEN, beta=1.5), ValueError, "beta must be a number from 0, .* to 1, .* got 1.5"),
    "beta of words": (lambda: A.linear_kl(*GIVEN, beta="js"), ValueError, "beta must be a number from 0"),
    "direction": (lambda: A.linear_kl(*GIVEN, direction="back"), ValueError, "direction must be 'forward' or 'reverse', got 'back'"),
    "both": (lambda: A.linear_kl(*GIVEN, direction="reverse", beta=0.5), ValueError, "both say which divergence; leave one out"),
    "reduction": (lambda: A.linear_kl(*GIVEN, reduction="batchmean"), ValueError, "reduction must be 'mean', 'sum' or 'none'"),
    "labels": (lambda: A.linear_kl(*GIVEN, where=np.arange(7)), TypeError, "where must be booleans.*of labels write where=labels != -100"),
    "where": (lambda: A.linear_kl(*GIVEN, where=COUNTS[:3]), ValueError, r"where of shape \(3,\): expected a boolean for each row"),
    "target": (lambda: A.linear_kl(*GIVEN, target=np.arange(7)), TypeError, "no option 'target'.*where=labels != -100"),
    "a map in the place of a reference": (
        lambda: A.linear_kl(X, WEIGHT, "softmax", REF), TypeError, "expected the features x_ref of the reference, got 'softmax'",
    ),
    "no reference": (lambda: A.linear_kl(X, WEIGHT), TypeError, "x_ref"),
    "a map without a draw": (
        lambda: A.linear_kl(*GIVEN, A.Elementwise("relu")), ValueError, "gives each class a number of its own",
    ),
    "a mask with a support": (
        lambda: A.linear_kl(*GIVEN, support=(np.arange(7), np.arange(8)), mask=np.ones(60, bool)), ValueError, "a mask has no meaning",
    ),
    "a sink and a temperature": (
        lambda: A.linear_kl(*GIVEN, A.Sink(), temperature=2.0), ValueError, "temperature can't be given with a sink",
    ),
}  # fmt: skip


@each(WRONG)
def test_mistakes(call, error, words):
    refuses(call, error, words)


def test_a_learned_temperature_has_no_gradient_of_rows_that_do_not_count():
    torch = pytest.importorskip("torch")
    x, weight = torch.randn(3, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    x[1] = torch.nan
    temperature = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    counts = torch.tensor([True, False, True])
    value = A.linear_kl(x, weight, x, weight * 0.5, where=counts, temperature=temperature).sum()
    assert torch.autograd.grad(value, temperature)[0].isfinite()
