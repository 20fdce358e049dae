"""log p, entropy and divergences of tokens, from hidden states and the weight of an output layer."""

from __future__ import annotations

import importlib.util
import math

import numpy as np
import pytest
from kinds import KINDS, back
from laws import close
from linear_cases import MAPS, made, operands, tolerance, torch_operands
from refusals import each, refuses

import anymax as A

INF, NAN = math.inf, math.nan
ALL_KINDS = [k for k in KINDS if k != "strict"]
TERMS = ("softmax", "sparsemax", "entmax15", "entmax1", "topk", "normmax", "taylor", "squares")


def teacher_of(scores, k, rng, missing=True):
    """k classes of each row and their log-probabilities under other scores; one row has a class fewer."""
    other = scores + rng.normal(size=scores.shape)
    log_p = A.log_softmax(other)
    ids = np.argsort(-log_p, axis=-1)[:, :k]
    if missing:
        ids[2, -1] = -1
    return ids, np.where(ids < 0, -INF, np.take_along_axis(log_p, ids, -1))


def dense_kl(scores, ids, t, tail, direction):
    """The divergence as it is written, of softmax, row by row."""
    out = []
    for s, i, a in zip(scores, ids, t):
        p = np.exp(s - s.max()) / np.exp(s - s.max()).sum()
        q, p_given = np.exp(a[i >= 0]), p[i[i >= 0]]
        if tail == "one class":
            q, p_given = np.append(q, 1 - q.sum()), np.append(p_given, 1 - p_given.sum())
        first, second = (q, p_given) if direction == "forward" else (p_given, q)
        out.append((first * (np.log(first) - np.log(second))).sum())
    return np.array(out)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_log_p_and_entropy_are_those_of_trl(dtype):
    """Its two functions, read from the installed package; nothing else of it is imported."""
    torch, (x, weight, _), y = torch_operands(dtype, seed=3)
    if importlib.util.find_spec("trl") is None:
        pytest.skip("trl is not installed")
    from benchmarks.token_statistics import functions_of

    names = "selective_log_softmax", "entropy_from_logits"
    log_softmax, entropy_of = functions_of("trl", "trainer/utils.py", *names, is_triton_available=lambda: False)
    y = y.clamp(min=0)
    scores = x @ weight.T
    got, want = A.linear_log_prob_entropy(x, weight, y), (log_softmax(scores, y), entropy_of(scores))
    allowed = 1e-4 if dtype == "float32" else 1e-10
    for a, b in zip(got, want):
        close(a.detach(), b.detach(), allowed)
    g = torch.linspace(-1.0, 1.0, len(y), dtype=x.dtype)
    ours, theirs = (
        torch.autograd.grad(((a - 0.1 * b) * g).sum(), (x, weight), retain_graph=True) for a, b in (got, want)
    )
    for a, b in zip(ours, theirs):
        close(a, b, allowed)


@pytest.mark.whole(lambda kind, name: kind == "jax" or name not in ("softmax", "entmax15"))
@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("name", TERMS)
def test_log_p_and_entropy_are_those_of_the_scores(kind, name):
    x, weight, bias, y, _, keep = operands(seed=4)
    y[1] = -1
    keep[y[y >= 0]] = True
    mapping = MAPS[name]
    a, w, b, t, m = made(kind, x, weight, bias, y, keep)
    for temperature in (None, 0.7, np.linspace(0.5, 2.0, len(x))):
        scores = x @ weight.T + bias
        scores = scores if temperature is None else scores / np.reshape(temperature, (-1, 1))
        want = A.log_prob_entropy(mapping, scores, y, mask=keep)
        T = KINDS[kind](temperature) if isinstance(temperature, np.ndarray) else temperature
        got = A.linear_log_prob_entropy(a, w, t, mapping, linear_bias=b, mask=m, temperature=T, chunk=16)
        one = A.linear_log_prob(a, w, t, mapping, linear_bias=b, mask=m, temperature=T)
        for g, of in ((got[0], want[0]), (got[1], want[1]), (one, want[0])):
            close(np.exp(back(g)), np.exp(of), tolerance(kind))


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("entropy", [False, True])
def test_gradients_are_those_of_the_scores(name, entropy):
    torch, free, y = torch_operands(seed=1)
    x, weight, bias = free
    y[3] = -1
    gen = torch.Generator().manual_seed(0)
    g = torch.randn(2, len(y), dtype=torch.float64, generator=gen)
    mapping = MAPS[name]

    def total(log_p, h):
        return (torch.where(log_p == -INF, 0.0, log_p) * g[0]).sum() + (h * g[1]).sum() * entropy

    got = total(*A.linear_log_prob_entropy(x, weight, y, mapping, linear_bias=bias, temperature=1.3, chunk=16))
    want = total(*A.log_prob_entropy(mapping, (x @ weight.T + bias) / 1.3, y))
    for one, other in zip(torch.autograd.grad(got, free), torch.autograd.grad(want, free)):
        close(one, other, 1e-9)


@pytest.mark.whole(lambda kind, tail: kind == "jax" and tail == "ignore")
@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("tail", ["ignore", "one class"])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_divergence_from_a_teacher(kind, tail, direction):
    x, weight, bias, *_ = operands(seed=2)
    scores = x @ weight.T + bias
    ids, t = teacher_of(scores, 5, np.random.default_rng(0))
    want = dense_kl(scores, ids, t, tail, direction)
    options = {"tail": tail, "direction": direction}
    a, w, b, i, log_p, s = made(kind, x, weight, bias, ids, t, scores)
    close(back(A.linear_topk_kl(a, w, i, log_p, linear_bias=b, chunk=16, **options)), want, tolerance(kind))
    close(back(A.topk_kl(s, i, log_p, **options)), want, tolerance(kind))


@pytest.mark.whole
@pytest.mark.parametrize("tail", ["ignore", "one class"])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_gradient_of_the_divergence(tail, direction):
    torch, free, _ = torch_operands(seed=2)
    x, weight, bias = free
    ids, t = (torch.tensor(a) for a in teacher_of((x @ weight.T + bias).detach().numpy(), 5, np.random.default_rng(0)))
    options = {"tail": tail, "direction": direction}
    got = A.linear_topk_kl(x, weight, ids, t, linear_bias=bias, chunk=16, **options)
    want = A.topk_kl(x @ weight.T + bias, ids, t, **options)
    close(got.detach(), want.detach(), 1e-10)
    g = torch.linspace(-1, 2, len(got), dtype=torch.float64)
    for one, other in zip(torch.autograd.grad(got, free, g), torch.autograd.grad(want, free, g)):
        close(one, other, 1e-9)
    assert torch.autograd.gradcheck(
        lambda *a: A.linear_topk_kl(*a[:2], ids, t, linear_bias=a[2], chunk=16, **options), free, atol=1e-6
    )


@pytest.mark.parametrize("tail", ["ignore", "one class"])
@pytest.mark.parametrize("name", ["sparsemax", "entmax15", "taylor"])
def test_divergence_of_a_student_of_another_map(name, tail):
    torch, free, _ = torch_operands(seed=5)
    x, weight, _ = free
    weight = (0.05 * weight).detach().requires_grad_()  # so that every class has a probability above 0
    mapping = MAPS[name]
    p = A.apply(mapping, x @ weight.T)
    ids = torch.argsort(p, descending=True)[:, :4]
    t = torch.log(torch.tensor([[0.4, 0.2, 0.1, 0.05]], dtype=torch.float64).expand(len(x), 4))
    got = A.linear_topk_kl(x, weight, ids, t, mapping, tail=tail)
    given = p.gather(1, ids)
    want = (t.exp() * (t - given.log())).sum(1)
    if tail == "one class":
        want = want + 0.25 * (math.log(0.25) - torch.log(1 - given.sum(1)))
    close(got.detach(), want.detach(), 1e-10)
    for one, other in zip(torch.autograd.grad(got.sum(), (x, weight)), torch.autograd.grad(want.sum(), (x, weight))):
        close(one, other, 1e-9)


@pytest.mark.whole(lambda kind: kind == "jax")
@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("name", ["softmax", "sparsemax", "entmax15"])
def test_of_a_support(kind, name):
    x, weight, bias, y, *_ = operands(seed=6)
    rng = np.random.default_rng(1)
    kept = [np.unique(np.append(rng.integers(60, size=size), y[i])) for i, size in enumerate((4, 1, 9, 3, 0, 6, 20))]
    kept[3] = np.setdiff1d(np.arange(10), y[3])  # a token outside its support
    kept[4] = np.array([], int)  # and a row that has none
    ids, offsets = np.concatenate(kept), np.append(0, np.cumsum([len(k) for k in kept]))
    mask = np.zeros((len(x), 60), bool)
    for row, k in zip(mask, kept):
        row[k] = True
    want = A.log_prob_entropy(MAPS[name], (x @ weight.T + bias) / 0.8, y, mask=mask)
    full = A.log_prob_entropy(MAPS[name], (x @ weight.T + bias) / 0.8, y)
    a, w, b, t, i, o = made(kind, x, weight, bias, y, ids, offsets)
    call = {"linear_bias": b, "temperature": 0.8, "support": (i, o)}
    got = A.linear_log_prob_entropy(a, w, t, MAPS[name], **call)
    both = A.linear_log_prob_entropy(a, w, t, MAPS[name], full=True, **call)
    for pair, of in ((got, want), (both[0], want), (both[1], full)):
        for g, value in zip(pair, of):
            close(np.exp(back(g)), np.exp(value), 2e-5 if kind == "jax" else 1e-9)
    assert back(got[0])[3] == -INF
    assert back(got[0])[4] == -INF
    assert back(got[1])[4] == 0


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_forms_of_a_support(kind):
    """Rows of one width may be traced in JAX, as their sizes are known."""
    x, weight, bias, y, *_ = operands(seed=6)
    rng = np.random.default_rng(1)
    lists = [np.unique(np.append(rng.integers(60, size=size), y[i])) for i, size in enumerate((4, 1, 9, 3, 0, 6, 20))]
    lists[3], lists[4] = np.setdiff1d(np.arange(10), y[3]), lists[4][:0]
    padded = np.stack([np.append(a, -np.ones(30 - len(a), int)) for a in lists])
    a, w, b, t, ids, offsets, rows = made(
        kind, x, weight, bias, y, np.concatenate(lists).astype(np.int32), np.cumsum([0, *map(len, lists)]), padded
    )

    def statistics(support, a=a):
        return A.linear_log_prob_entropy(a, w, t, linear_bias=b, support=support)

    want = statistics((ids, offsets))
    for support in ([one.tolist() for one in lists], rows, padded):
        for got, one in zip(statistics(support), want):
            np.testing.assert_array_equal(back(got), back(one))
    close(np.exp(back(A.linear_log_prob(a, w, t, linear_bias=b, support=rows))), np.exp(back(want[0])), 1e-6)
    if kind == "jax":
        import jax

        def total(a, rows):
            log_p, h = statistics(rows, a)
            return (jax.numpy.where(log_p > -INF, log_p, 0.0) + h).sum()

        for one, other in zip(jax.jit(statistics)(rows, a), want):
            close(np.exp(back(one)), np.exp(back(other)), 2e-5)
        close(back(jax.jit(jax.grad(total))(a, rows)), back(jax.grad(total)(a, (ids, offsets))), 2e-4)


@pytest.mark.parametrize("kind", [*ALL_KINDS, *(["jax jit"] if "jax" in KINDS else [])])
def test_a_transform_of_each_score_goes_with_a_support(kind):
    """Under JAX the support is a constant of the traced function, in its own arrays or NumPy's."""
    x, weight, bias, y, *_ = operands(seed=6)
    ids, offsets = np.concatenate([[i, 3 + i, 40] for i in range(len(x))]), np.arange(0, 3 * len(x) + 1, 3)
    mask = np.zeros((len(x), 60), bool)
    mask[np.repeat(np.arange(len(x)), 3), ids] = True
    cap = A.compose(A.transforms.softcap(2.0), A.temperature(0.7))
    want = A.log_prob_entropy("softmax", cap(x @ weight.T + bias), y, mask=mask)
    a, w, b, t, *support = made(kind.removesuffix(" jit"), x, weight, bias, y, ids, offsets)
    for given in (support, (ids, offsets)):

        def call(a, given=given):
            return A.linear_log_prob_entropy(a, w, t, linear_bias=b, support=tuple(given), transform=cap)

        if kind.endswith("jit"):
            call = pytest.importorskip("jax").jit(call)
        for got, value in zip(call(a), want, strict=True):
            close(np.exp(back(got)), np.exp(value), 2e-5 if "jax" in kind else 1e-9)


@pytest.mark.parametrize("name", ["softmax", "sparsemax", "entmax15"])
def test_a_token_outside_its_support_has_a_gradient_and_others_stay_finite(name):
    torch, free, y = torch_operands(seed=6)
    x, weight, _ = free
    ids = (y[:, None] + torch.tensor([[3, 7, 11, 20]])) % 60
    ids[0, 2] = y[0]
    offsets = torch.arange(0, 4 * len(x) + 1, 4)
    log_p, h = A.linear_log_prob_entropy(x, weight, y, MAPS[name], support=(ids.flatten(), offsets))
    assert (log_p[1:] == -INF).all()
    assert torch.isfinite(log_p[0])
    for g in torch.autograd.grad(log_p.sum() + h.sum(), (x, weight)):
        assert torch.isfinite(g).all()
    outside = torch.ones(60, dtype=torch.bool).index_fill(0, ids.flatten(), False)
    assert not g[outside].any()  # no other row of the weight is touched


def test_rows_that_are_lost_stay_alone():
    torch, free, y = torch_operands(seed=3)
    x, weight, _ = free
    mask = torch.ones(len(x), 60, dtype=torch.bool)
    mask[1] = False
    with torch.no_grad():
        x[2, 0] = NAN
    log_p, h = A.linear_log_prob_entropy(x, weight, y, mask=mask, chunk=16)
    assert log_p[1] == -INF
    assert h[1] == 0
    assert log_p[2].isnan()
    assert h[2].isnan()
    rest = [0, 3, 4, 5, 6]
    (gx,) = torch.autograd.grad(log_p[rest].sum() + h[rest].sum() + h[1], x)
    assert torch.isfinite(gx[rest]).all()
    assert not gx[1].any()
    want = A.log_prob_entropy("softmax", (x @ weight.T)[rest], y[rest])
    close(log_p[rest].detach(), want[0].detach(), 1e-10)
    close(h[rest].detach(), want[1].detach(), 1e-10)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dtypes(dtype):
    torch, free, y = torch_operands(dtype, seed=8)
    x, weight, bias = free
    log_p, h = A.linear_log_prob_entropy(x, weight, y, linear_bias=bias, chunk=16)
    assert log_p.dtype == h.dtype == torch.float32
    want = A.log_prob_entropy("softmax", (x @ weight.T + bias).double(), y)
    tol = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 6e-2}[dtype]
    close(log_p.detach().double(), want[0].detach(), tol)
    close(h.detach().double(), want[1].detach(), tol)
    for g, a in zip(torch.autograd.grad(log_p.sum() + h.sum(), free), free):
        assert g.dtype == a.dtype
        assert torch.isfinite(g).all()


def test_entropy_of_a_sure_row_is_small_and_exact():
    """The entropy of a row whose largest score is far above is a sum of tiny terms, without cancellation."""
    import mpmath

    torch = pytest.importorskip("torch")
    x = torch.tensor([[1.0]])
    s = torch.tensor([[40.0], [20.0], [19.0], [0.0]])
    log_p, h = A.linear_log_prob_entropy(x, s, torch.tensor([0]))
    e = [mpmath.exp(mpmath.mpf(float(v))) for v in s]
    p = [v / sum(e) for v in e]
    want = -sum(q * mpmath.log(q) for q in p)
    assert abs(float(h) / float(want) - 1) < 1e-5
    assert abs(float(log_p) / float(mpmath.log(p[0])) - 1) < 1e-5


@pytest.mark.whole
def test_second_derivatives():
    torch, free, y = torch_operands(seed=9, rows=3, classes=11)
    y[1] = -1

    def terms(*operands):
        log_p, h = A.linear_log_prob_entropy(*operands[:2], y, linear_bias=operands[2], chunk=4)
        return log_p.sum() + 2.0 * h.sum()

    assert torch.autograd.gradgradcheck(terms, free, atol=1e-5)


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("name", ["softmax", "entmax15"])
def test_compiles_without_a_graph_break(name):
    torch, free, y = torch_operands("float32", seed=9)
    ids, t = (
        torch.tensor(a)
        for a in teacher_of((free[0] @ free[1].T).detach().numpy(), 3, np.random.default_rng(0), missing=False)
    )

    def step(x, weight, bias):
        log_p, h = A.linear_log_prob_entropy(x, weight, y, MAPS[name], linear_bias=bias)
        kl = A.linear_topk_kl(x, weight, ids, t, linear_bias=bias, tail="one class", direction="reverse")
        return log_p.clamp(min=-100).sum() + h.sum() + kl.sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    close(compiled(*free).detach(), step(*free).detach(), 1e-4)
    for one, other in zip(torch.autograd.grad(compiled(*free), free), torch.autograd.grad(step(*free), free)):
        close(one, other, 1e-4)


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_a_support_under_a_compiler_breaks_the_graph():
    torch, free, y = torch_operands(seed=6)
    x, weight, _ = free
    ids = torch.stack([(y + i) % 60 for i in (0, 3, 7)], 1).flatten()
    offsets = torch.arange(0, 3 * len(x) + 1, 3)

    def step(x, weight):
        log_p, h = A.linear_log_prob_entropy(x.tanh(), weight, y, support=(ids, offsets))
        return (log_p + h).sum()

    compiled = torch.compile(step, backend="aot_eager")
    close(compiled(x, weight).detach(), step(x, weight).detach(), 1e-9)
    grads = (torch.autograd.grad(f(x, weight), (x, weight)) for f in (compiled, step))
    for one, other in zip(*grads, strict=True):
        close(one, other, 1e-9)


def test_jax_under_jit_and_grad():
    jax = pytest.importorskip("jax")
    x, weight, _, y, *_ = operands(seed=4)

    def total(a, w):
        log_p, h = A.linear_log_prob_entropy(a, w, y, temperature=0.9, chunk=16)
        return log_p.sum() + h.sum()

    def dense(a, w):
        log_p, h = A.log_prob_entropy("softmax", a @ w.T / 0.9, y)
        return log_p.sum() + h.sum()

    for one, other in zip(jax.jit(jax.grad(total, (0, 1)))(x, weight), jax.grad(dense, (0, 1))(x, weight)):
        close(np.asarray(one), np.asarray(other), 1e-4)


X, WEIGHT, _, Y, *_ = operands()
ZEROS, TWICE = np.zeros((len(X), 1)), (np.zeros((len(X), 2), int), np.log(np.full((len(X), 2), 0.1)))
WRONG = {
    "full": (lambda: A.linear_log_prob_entropy(X, WEIGHT, Y, full=True), ValueError, "full=True applies to a support"),
    "temperatures": (
        lambda: A.linear_log_prob_entropy(X, WEIGHT, Y, temperature=np.ones(3)), ValueError, "expected a number, or one value for each row",
    ),
    "a negative temperature": (
        lambda: A.linear_log_prob_entropy(X, WEIGHT, Y, temperature=-1.0), ValueError, "temperature must be at least 0",
    ),
    "temperatures of 0": (
        lambda: A.linear_log_prob_entropy(X, WEIGHT, Y, temperature=np.zeros(len(X))), ValueError, "temperature of 0 in some rows",
    ),
    "direction": (
        lambda: A.linear_topk_kl(X, WEIGHT, Y[:, None], ZEROS, direction="backward"),
        ValueError, "direction must be 'forward' or 'reverse'",
    ),
    "twice": (lambda: A.linear_topk_kl(X, WEIGHT, *TWICE), ValueError, "a row names a class twice"),
    "tau": (lambda: A.linear_log_prob_entropy(X, WEIGHT, Y, tau=2.0), TypeError, "say temperature="),
    "a mask with a support": (
        lambda: A.linear_log_prob_entropy(X, WEIGHT, Y, support=(Y, np.arange(len(X) + 1)), mask=np.ones(60, bool)),
        ValueError, "with a support a mask has no meaning",
    ),
}  # fmt: skip


@each(WRONG)
def test_what_is_refused(call, error, words):
    refuses(call, error, words)


def test_a_temperature_of_0_is_the_largest_class():
    x, weight, *_ = operands()
    best = (x @ weight.T).argmax(-1)
    log_p, h = A.linear_log_prob_entropy(x, weight, best, temperature=0)
    close(log_p, np.zeros(len(x)), 1e-12)
    close(h, np.zeros(len(x)), 1e-12)


@pytest.mark.parametrize("temperature", [0.7, "rows", "learned"])
def test_a_bias_of_minus_infinity_masks_at_every_temperature(temperature):
    torch, free, y = torch_operands(seed=6)
    x, weight, bias = free
    with torch.no_grad():
        bias[::3] = -INF
    y = (y // 3 * 3 + 1) % 60
    ids = (y[:, None] + torch.arange(6)) % 60
    support = ids.flatten(), torch.arange(0, 6 * len(x) + 1, 6)
    T = {
        "rows": torch.full((len(x),), 0.7, dtype=torch.float64),
        "learned": torch.tensor(0.7, dtype=torch.float64),
    }.get(temperature, temperature)
    T = T.requires_grad_() if isinstance(T, torch.Tensor) else T
    call = {"linear_bias": bias, "temperature": T}
    both = A.linear_log_prob_entropy(x, weight, y, support=support, full=True, **call)
    scores = (x @ weight.T + bias) / 0.7
    for got, want in zip(
        both, (A.log_prob_entropy("softmax", scores, y, support=support), A.log_prob_entropy("softmax", scores, y))
    ):
        for one, other in zip(got, want):
            close(one.detach(), other.detach(), 1e-9)
    if isinstance(T, torch.Tensor):
        assert torch.isfinite(torch.autograd.grad(both[1][0].sum() + both[0][1].sum(), T)[0]).all()


def test_a_temperature_of_0_in_a_tensor_and_tiny_ones_in_half_precision():
    torch, free, y = torch_operands("float16", seed=8)
    best = (free[0] @ free[1].T).argmax(-1)
    for temperature in (torch.tensor(0.0), 1e-4, torch.tensor(1e-4)):
        log_p, _ = A.linear_log_prob_entropy(*free[:2], best, temperature=temperature)
        close(log_p.detach(), torch.zeros(len(y)), 1e-3)


def test_a_temperature_in_half_precision_is_not_rounded():
    torch, free, y = torch_operands("bfloat16", seed=8)
    want = A.log_prob("softmax", (free[0].double() @ free[1].double().T) / 0.7, y).detach()
    for temperature in (0.7, torch.tensor(0.7), torch.full((len(y),), 0.7)):
        got = A.linear_log_prob(*free[:2], y, temperature=temperature).detach().double()
        exact = not torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()
        close(got, want, 1e-5 if exact else 5e-2)


@pytest.mark.parametrize(
    "options",
    [{"transform": A.transforms.softcap(2.0)}, {"suppress": 0.5, "mapping": "sparsemax"}, {"mapping": "taylor"}],
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_row_without_a_target_touches_no_other(options, reduction):
    torch, free, y = torch_operands(seed=3)
    x, weight, _ = free
    y[2] = -100
    with torch.no_grad():
        x[2] = NAN
    loss = A.linear_loss(x, weight, y, reduction=reduction, **options).sum()
    for g in torch.autograd.grad(loss, (x, weight)):
        assert torch.isfinite(g).all()
