"""Output layers on a GPU against all scores by the reference. On a GPU it runs for real: `pytest tests/kernels/layer_triton.py`.

Without one, test_triton.py runs this file in Triton's interpreter, where the CPU takes the sizes and ways of a GPU. What needs no kernel is
tested in test_linear_gpu.py.
"""

from __future__ import annotations

import math

import pytest
import row_cases
from triton_place import DEVICE, REAL, WARNINGS

torch = pytest.importorskip("torch")

import anymax as am
from anymax.kernels import engine_of
from anymax.kernels.tasks import LAYER, SCORES, ScoreBlock
from anymax.kernels.triton import ENGINE, plans
from anymax.kernels.triton import layer as gpu
from anymax.linear import layer, torch_blocks, torch_products

pytestmark = WARNINGS

ROWS, FEATURES, CLASSES = 19, 40, 139
MAPS = row_cases.some("softmax", "sparsemax", "entmax-1.5", "entmax-1.25", "entmax-1.7", "entmax-3")
# the interpreter cuts bf16 off
EPS = {"float32": 2.0**-23, "bfloat16": 2.0**-8 if REAL else 2.0**-7, "float16": 2.0**-11}


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    """Few classes a block, so that there are several."""
    monkeypatch.setattr(torch_blocks, "GPU", torch_blocks.GPU._replace(small=ROWS, block=ROWS * 64))
    if REAL:
        yield
        return
    monkeypatch.setattr(torch_blocks, "on_gpu", lambda x: True)
    monkeypatch.setattr(layer, "on_cpu", lambda x: False)
    with am.use("triton"):
        yield


def operands(dtype="float32", seed=0, sigma=1.0):
    """Features and weights on a grid, so that every dtype holds the same ones; the last has the scores of half precision too."""
    draw = torch.Generator().manual_seed(seed)
    grid = lambda *shape: (torch.randn(shape, generator=draw) * 4).round() / 4  # noqa: E731
    x, weight, bias = grid(ROWS, FEATURES), grid(CLASSES, FEATURES) * (sigma / 4), grid(CLASSES)
    t = torch.randint(CLASSES, (ROWS,), generator=draw)
    t[3] = -100
    return (*(a.to(DEVICE, getattr(torch, dtype)) for a in (x, weight, bias)), t.to(DEVICE))


def step(mapping, x, weight, bias, t, of_class=None, **options):
    """The loss of each row, and the gradients of a sum of them."""
    options |= {} if of_class is None else {"weight": of_class.to(x.dtype)}
    free = [a.detach().requires_grad_() for a in (x, weight, bias) if a is not None]
    value = am.linear_loss(
        free[0], free[1], t, mapping, linear_bias=free[2] if len(free) > 2 else None, reduction="none", **options
    )
    factors = torch.linspace(0.5, 2.0, len(value), device=value.device, dtype=value.dtype)
    return [value.detach(), *torch.autograd.grad((value * factors).sum(), free)]


def wide(mapping, x, weight, bias, t, **options):
    with am.use("reference"):
        return step(mapping, *(None if a is None else a.double() for a in (x, weight, bias)), t, **options)


def compare(got, want, tolerance):
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert float((a.double() - b).abs().max()) <= tolerance * max(1.0, float(b.abs().max()))


@pytest.fixture
def products(monkeypatch):
    """The launches of the sparse product, as many entries of a list."""
    launches, kernel = [], gpu.layer_products

    class Counter:
        def __getitem__(self, grid):
            launches.append(grid)
            return kernel[grid]

    monkeypatch.setattr(gpu, "layer_products", Counter())
    return launches


@pytest.mark.parametrize(
    ("name", "bias"), [*((name, True) for name in MAPS), ("softmax", False), ("entmax-1.5", False)]
)
def test_the_loss_and_its_gradients_are_those_of_all_scores(name, bias, products):
    x, weight, b, t = operands()
    given = (x, weight, b if bias else None, t)
    compare(step(MAPS[name], *given), wide(MAPS[name], *given), 2e-5)
    assert len(products) == (0 if name == "softmax" else 2)


@pytest.mark.parametrize("masked", [False, True])
def test_log_p_and_entropy_and_their_gradients_are_those_of_all_scores(masked):
    x, weight, b, t = operands()
    t[3] = -1
    mask = torch.rand(ROWS, CLASSES, generator=torch.Generator().manual_seed(1)).to(DEVICE) < 0.7
    mask[5] = False
    options = {"mask": mask} if masked else {}

    def terms(x, weight, b):
        free = [a.detach().requires_grad_() for a in (x, weight, b)]
        log_p, h = am.linear_log_prob_entropy(free[0], free[1], t, linear_bias=free[2], temperature=0.8, **options)
        found = torch.where(log_p == -torch.inf, 0.0, log_p)
        factors = torch.linspace(0.5, 2.0, ROWS, device=h.device, dtype=h.dtype)
        return [found.detach(), h.detach(), *torch.autograd.grad((found * factors).sum() - (h * factors).sum(), free)]

    got = terms(x, weight, b)
    with am.use("reference"):
        want = terms(*(a.double() for a in (x, weight, b)))
    compare(got, want, 3e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["softmax", "entmax-1.5"])
def test_halves(name, dtype):
    given = operands(dtype)
    got, want = step(MAPS[name], *given), wide(MAPS[name], *given)
    assert [a.dtype for a in got[1:]] == [given[0].dtype] * 3
    size = float((given[0].double() @ given[1].double().T).abs().max())
    compare(got[:1], want[:1], 2 * EPS[dtype] * size)
    compare(got[1:], want[1:], 8 * EPS[dtype] * size)


@pytest.mark.parametrize("options", ["smoothing", "weight", "mask", "rows"])
@pytest.mark.parametrize("name", ["softmax", "entmax-1.5"])
def test_options(name, options):
    x, weight, bias, t = operands()
    draw = torch.Generator().manual_seed(1)
    keep = (torch.rand(CLASSES, generator=draw) < 0.7).to(DEVICE)
    if options == "rows":
        keep = (torch.rand(ROWS, CLASSES, generator=draw) < 0.7).to(DEVICE)
        keep[5] = False
    given = {
        "smoothing": {"label_smoothing": 0.1},
        "weight": {"weight": torch.rand(CLASSES, generator=draw).to(DEVICE)},
        "mask": {"mask": keep, "label_smoothing": 0.1},
        "rows": {"mask": keep},
    }[options]
    if "mask" in given:
        t = torch.where(keep.expand(ROWS, -1).gather(1, t.clamp(min=0)[:, None])[:, 0], t, -100)
    if "weight" in given:
        given = {"of_class": given["weight"]}
    compare(step(MAPS[name], x, weight, bias, t, **given), wide(MAPS[name], x, weight, bias, t, **given), 2e-5)


def written_over(new):
    """`new` with numbers in new memory that show if they are read: no classes, and no scores."""
    return lambda *args, **options: (out := new(*args, **options)).fill_(1e30 if out.is_floating_point() else 2**30)


@pytest.mark.parametrize("name", ["softmax", "sparsemax"])
def test_a_row_of_nan_or_infinity_touches_no_other(name, monkeypatch):
    x, weight, bias, t = operands()
    y = x.clone()
    y[2, 5], y[7, 0] = torch.nan, torch.inf
    with monkeypatch.context() as patch:
        for name_of in ("empty", "empty_like"):
            patch.setattr(torch, name_of, written_over(getattr(torch, name_of)))
        got, want = step(MAPS[name], y, weight, bias, t), step(MAPS[name], x, weight, bias, t)
    assert bool(got[0][[2, 7]].isnan().all())
    assert bool(got[1][2].isnan().all())
    others = [i for i in range(ROWS) if i not in (2, 7)]
    torch.testing.assert_close(got[0][others], want[0][others], rtol=0, atol=1e-6)
    torch.testing.assert_close(got[1][others], want[1][others], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["softmax", "sparsemax"])
def test_log_p_and_thresholds(name):
    x, weight, bias, t = operands()
    scores = x.double() @ weight.double().T + bias.double()
    t = torch.where(t % 2 == 1, scores.argmax(1), t.clamp(min=0))  # some have a probability, others not
    tau, size = am.linear.linear_threshold(x, weight, MAPS[name], linear_bias=bias)
    log_p = am.linear_log_prob(x, weight, t, MAPS[name], linear_bias=bias)
    with am.use("reference"):
        taus, sizes = am.threshold(MAPS[name], scores)
        want = am.log_prob(MAPS[name], scores, t)
    compare([tau], [taus], 1e-5)
    assert torch.equal(size, sizes)
    assert torch.equal(log_p == -torch.inf, want == -torch.inf)
    some = want > -torch.inf
    assert bool(some.any())
    compare([log_p[some]], [want[some]], 1e-4)


def test_a_sparse_product_of_a_transposed_weight_of_more_than_2_31_numbers():
    """Its features are 2^30 numbers apart; memory of which only these are read."""
    memory = torch.empty(2**31 + 1, dtype=torch.bfloat16, device=DEVICE)
    rows = memory.as_strided((1, 3), (1, 2**30)).copy_(torch.tensor([[1.0, 2.0, 3.0]]))
    out, one = torch.zeros(1, 3, device=DEVICE), torch.ones(1, device=DEVICE)
    gpu.add_products(out, torch.tensor([0, 1], device=DEVICE), torch.tensor([0], device=DEVICE), one, rows)
    assert out.tolist() == [[1.0, 2.0, 3.0]]


def test_a_sparse_product():
    draw = torch.Generator().manual_seed(0)
    dense = torch.randn(7, 30, generator=draw) * (torch.rand(7, 30, generator=draw) < 0.6)
    dense[2] = 0.0
    rows = torch.randn(30, 300, generator=draw).to(DEVICE)
    dense = dense.to(DEVICE)
    row, index = dense.nonzero(as_tuple=True)
    out = torch.full((7, 300), torch.nan, device=DEVICE)
    out[[0, 1, 3, 4, 5, 6]] = 1.0
    gpu.add_products(out, torch_products.starts(row, 7), index, dense[row, index], rows)
    want = 1.0 + dense.double() @ rows.double()
    assert bool(out[2].isnan().all())  # what has no entry is not touched
    keep = [0, 1, 3, 4, 5, 6]
    compare([out[keep]], [want[keep]], 1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_times_a_number(dtype, monkeypatch):
    monkeypatch.setattr(gpu, "_LANES", 64)
    monkeypatch.setattr(gpu, "_PROGRAMS", 3)
    a = torch.randn(7, 130, generator=torch.Generator().manual_seed(0)).to(DEVICE, getattr(torch, dtype))
    for number in (1.0, -0.5):
        got = a.clone()
        gpu.scale(got, torch.tensor(number, device=DEVICE))
        assert torch.equal(got, a * number)
    gpu.scale(a[:0], torch.tensor(2.0, device=DEVICE))


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_the_factor_of_a_loss_is_read_by_a_kernel(factor, monkeypatch):
    calls, scale = [], gpu.scale
    monkeypatch.setattr(gpu, "scale", lambda a, g: calls.append(1) or scale(a, g))
    x, weight, bias, t = operands()
    free = [a.requires_grad_() for a in (x.repeat(1, 2), weight.repeat(1, 2), bias)]
    loss = lambda y, w, b, **of: factor * am.linear_loss(y, w, t, linear_bias=b, **of)  # noqa: E731
    got = torch.autograd.grad(loss(*free), free)
    assert len(calls) == 3
    with am.use("reference"):
        compare(got, torch.autograd.grad(loss(*(a.double() for a in free)), free), 2e-5)


# -- blocks of scores ----------------------------------------------------------------------------------------------------------------

BLOCKS = {
    "plain": {},
    "bias": {"bias"},
    "masked": {"keep"},
    "classes": {"classes", "bias"},
    "all": {"bias", "keep", "factor", "cap"},
}
FIRST, CAP = 100, 3.0


def block_of(given, dtype="float32", n=4500):
    """A block of 5 rows, of which one has no class in it, one none at all, and one is masked but for its class; and its scores in fp64."""
    draw = torch.Generator().manual_seed(0)
    numbers = (2.0 * torch.randn(5, n, generator=draw)).to(getattr(torch, dtype))
    index = torch.tensor([FIRST + 7, FIRST + n - 1, FIRST + n, -1, FIRST])
    bias = torch.randn(n, generator=draw).to(numbers.dtype) if "bias" in given else None
    keep = torch.rand(5, n, generator=draw) < 0.7 if "keep" in given else None
    factor = torch.rand(5, 1, generator=draw) + 0.5 if "factor" in given else None
    s = numbers.float()
    if bias is not None:
        s = (s + bias.float()).to(numbers.dtype).float()
    if factor is not None:
        s = (s * factor).to(numbers.dtype).float()
    s = s.double()
    if keep is not None:
        keep[0, 7], keep[4] = False, torch.arange(n) == 0
    elif "classes" in given:
        keep = torch.arange(n)[None] % 7 != 3
        numbers[1, 3], numbers[2, 10] = math.nan, math.inf  # of masked classes
    if keep is not None:
        s = s.masked_fill(~keep, -math.inf)
    cap = CAP if "cap" in given else 0.0
    there = [None if a is None else a.to(DEVICE) for a in (numbers, bias, keep, factor, index)]
    return ScoreBlock(*there, FIRST, cap), (cap * (s / cap).tanh()).where(s > -math.inf, s) if cap else s


def others_of(s, index):
    """The scores but for that of each row's class, which is the other result."""
    classes = torch.arange(s.shape[1])[None] == index.cpu()[:, None] - FIRST
    return s.masked_fill(classes, -math.inf), torch.where(classes, s, -math.inf).amax(1)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("n", [4500, 70])
@pytest.mark.parametrize("given", BLOCKS)
def test_the_terms_of_a_block(given, n, dtype):
    block, s = block_of(BLOCKS[given], dtype, n)
    weights = torch.rand(n, generator=torch.Generator().manual_seed(1))
    weights[s[4] == -math.inf] = 0.0
    terms, best = ENGINE.score_terms(block, weights.to(DEVICE), entropy=True, best=True)
    others, of_target = others_of(s, block.index)
    level = others.logsumexp(1)
    q = (others - level[:, None]).exp().nan_to_num(0.0)
    entropy = -torch.where(q > 0, q * (others - level[:, None]), 0.0).sum(1)
    weighted = torch.where(weights == 0, 0.0, s * weights).sum(1)
    want = torch.stack([of_target, level, entropy, torch.where(weighted.isinf(), 0.0, weighted)], 1)
    got = terms.cpu().double()
    got[:, 3] = torch.where(weighted.isinf(), 0.0, got[:, 3])
    assert torch.equal(got == -math.inf, want == -math.inf)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=2e-5)
    assert best.cpu().tolist() == s.argmax(1).tolist()


@pytest.mark.parametrize("out", ["apart", "over", "narrowed"])
@pytest.mark.parametrize("given", BLOCKS)
def test_the_gradient_of_a_block_is_written_over_it(given, out):
    block, s = block_of(BLOCKS[given])
    draw, n = torch.Generator().manual_seed(2), s.shape[1]
    weights, of_row = torch.rand(n, generator=draw), torch.randn(5, 5, generator=draw)
    others, _ = others_of(s, block.index)
    level = others.logsumexp(1, keepdim=True)
    of_row[:, :1] = torch.where(level == -math.inf, math.inf, level)
    _, a, e, b, c = (of_row[:, i : i + 1].double() for i in range(5))
    log_q = (others - of_row[:, :1]).clamp(min=-1e4)
    want = log_q.exp() * (a - b * log_q)
    want = torch.where(torch.arange(n)[None] == block.index.cpu()[:, None] - FIRST, e, want) + c * weights
    if block.cap:
        want *= torch.where(s > -math.inf, 1.0 - (s / CAP) ** 2, 1.0)
    if block.factor is not None:
        want *= block.factor.cpu()
    memory = torch.empty_like(block.numbers) if out == "apart" else block.numbers
    to = memory.view(torch.float16)[:, :n] if out == "narrowed" else memory
    ENGINE.score_slopes(block, to, of_row.to(DEVICE), weights.to(DEVICE), mixed=True)
    tolerance = 2e-3 if out == "narrowed" else 2e-5
    torch.testing.assert_close(to.cpu().double(), want, rtol=tolerance, atol=tolerance)


def test_a_row_of_a_block_is_the_same_alone_and_beside_one_of_nan_or_infinity():
    block, _ = block_of({"bias", "factor"})
    block.numbers[1, 5], block.numbers[2, 0] = math.nan, math.inf
    terms, _ = ENGINE.score_terms(block, None, entropy=True, best=False)
    assert bool(terms[[1, 2], 1].isnan().all())
    assert bool(terms[[1, 2], 2].isnan().all())
    for row in (0, 3, 4):
        one = slice(row, row + 1)
        alone = block._replace(numbers=block.numbers[one].clone(), factor=block.factor[one], index=block.index[one])
        of_one, _ = ENGINE.score_terms(alone, None, entropy=True, best=False)
        assert torch.equal(of_one[0, :3], terms[row, :3])


SPARSE = row_cases.some("sparsemax", "entmax-1.5", "top-k")
ROW_PLANS = {"whole": None, "steps": plans.Plan(1, 2, 32, False, 1), "parts": plans.Plan(1, 2, 32, False, 1, 4)}


@pytest.mark.parametrize("plan", ROW_PLANS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", SPARSE)
def test_the_gradient_of_a_sparse_map_is_written_over_its_scores(name, dtype, plan, monkeypatch):
    """Where few scores of a row may have a probability it reads no others, as in row 0; row 1 is lost, row 2 left out, and in row 3 many
    scores have one."""
    monkeypatch.setattr(plans, "FEW", 16)
    if plan != "whole":
        for family in plans.FAMILIES:
            monkeypatch.setitem(plans.forced, family, ROW_PLANS[plan])
    s = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    s[0, ::50] += 6.0
    s[1, 3] = math.nan
    s[3] *= 0.01
    t, g = torch.tensor([0, 5, -1, 299], device=DEVICE), torch.linspace(0.5, 2.0, 4, device=DEVICE)
    loss = ENGINE.index_loss(SPARSE[name], s, t, save=True)
    want = ENGINE.index_loss_grad(SPARSE[name], s, t, g, loss.saved).to(getattr(torch, dtype))
    assert bool(want[1].isnan().all())
    out = s if dtype == "float32" else s.view(torch.float16)[:, :300]
    ENGINE.score_loss_grad(SPARSE[name], s, t, g, loss.saved, out)
    torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "options", "reduction"),
    [
        ("sparsemax", "plain", "mean"), ("sparsemax", "weight", "mean"), ("sparsemax", "rows", "mean"), ("sparsemax", "rows", "none"),
        ("sparsemax", "invariant", "mean"), ("top-k", "plain", "none"),
    ],
)  # fmt: skip
def test_a_sparse_map_has_one_kernel_for_its_gradient(name, options, reduction, monkeypatch):
    """It writes that of half precision; a masked target has an infinite loss, and no gradient."""
    written, write = [], type(ENGINE).score_loss_grad
    monkeypatch.setattr(type(ENGINE), "score_loss_grad", lambda *given: written.append(1) or write(*given))
    (*operands_, t), draw, given = operands("float16"), torch.Generator().manual_seed(1), {}
    if options == "rows":
        given = {"mask": (torch.rand(ROWS, CLASSES, generator=draw) < 0.7).to(DEVICE)}
        given["mask"].scatter_(1, t.clamp(min=0)[:, None], True)
    of_class = {"of_class": torch.rand(CLASSES, generator=draw).to(DEVICE)} if options == "weight" else {}
    given |= {"invariant": True} if options == "invariant" else {}
    if reduction == "mean":
        x, weight, bias = (a.requires_grad_() for a in operands_)
        class_weight = {"weight": of_class["of_class"].half()} if of_class else {}
        value = am.linear_loss(x, weight, t, SPARSE[name], linear_bias=bias, **given, **class_weight)
        got = [value.detach(), *torch.autograd.grad(value, (x, weight, bias))]
        wide_ = [a.detach().double().requires_grad_() for a in operands_]
        with am.use("reference"):
            class_weight = {k: v.double() for k, v in class_weight.items()}
            value = am.linear_loss(*wide_[:2], t, SPARSE[name], linear_bias=wide_[2], **given, **class_weight)
        want = [value.detach(), *torch.autograd.grad(value, wide_)]
    else:
        got = step(SPARSE[name], *operands_, t, **given, **of_class)
        want = wide(SPARSE[name], *operands_, t, **given, **{k: v.double() for k, v in of_class.items()})
    compare(got[:1], want[:1], 2e-3 if of_class else 1e-5)  # class weights in half precision
    compare(got[1:], want[1:], 8 * EPS["float16"])
    assert written


@pytest.fixture
def passes(monkeypatch):
    """The kernels that have read a block of scores, in order."""
    launches = []
    for name in ("layer_terms", "layer_slopes"):

        class Counter:
            def __init__(self, kernel, name):
                self.kernel, self.name = kernel, name

            def __getitem__(self, grid):
                launches.append(self.name)
                return self.kernel[grid]

        monkeypatch.setattr(gpu, name, Counter(getattr(gpu, name), name))
    return launches


ROW = torch.linspace(0.6, 1.5, ROWS)
LOSSES = {
    "plain": {}, "smoothing": {"label_smoothing": 0.1}, "z_loss": {"z_loss": 0.1}, "weight": {"weight": True, "label_smoothing": 0.1},
    "softcap": {"transform": am.transforms.softcap(5.0), "label_smoothing": 0.1, "z_loss": 0.1}, "mask": {"mask": True, "z_loss": 0.1},
    "smoothed mask": {"mask": True, "label_smoothing": 0.1}, "rows": {"mask": "rows"},
    "predicted": {"return_predicted": True, "mask": "rows"},
    "invariant": {"invariant": True, "label_smoothing": 0.1}, "chunk": {"chunk": 32}, "least": {"least": 0.02},
    "fallback": {"label_smoothing": 1.0},
}  # fmt: skip


@pytest.mark.parametrize(("reduction", "dtype"), [("mean", "float32"), ("mean", "bfloat16"), ("none", "float16")])
@pytest.mark.parametrize("options", LOSSES)
def test_a_loss_reads_its_scores_by_two_kernels(options, reduction, dtype, passes):
    *operands_, t = operands(dtype)
    draw, given = torch.Generator().manual_seed(1), dict(LOSSES[options])
    if "mask" in given:
        shape = (ROWS, CLASSES) if given["mask"] == "rows" else (CLASSES,)
        given["mask"] = (torch.rand(shape, generator=draw) < 0.7).to(DEVICE)
        t = torch.where(given["mask"].expand(ROWS, -1).gather(1, t.clamp(min=0)[:, None])[:, 0], t, -100)
    if "weight" in given:
        given["weight"] = torch.rand(CLASSES, generator=draw).to(DEVICE)

    def step(x, weight, bias):
        free = [a.detach().requires_grad_() for a in (x, weight, bias)]
        value = am.linear_loss(free[0], free[1], t, linear_bias=free[2], reduction=reduction, **given)
        value, *predicted = value if isinstance(value, tuple) else (value,)
        factors = torch.linspace(0.5, 2.0, value.numel(), device=value.device, dtype=value.dtype)
        return [value.detach(), *torch.autograd.grad((value * factors).sum(), free)], predicted

    got, predicted = step(*operands_)
    with am.use("reference"):
        given.pop("least", None)
        want, best = step(*(a.double() for a in operands_))
    compare(got[:1], want[:1], 5e-6)
    left_out = 0.1 if options == "least" and dtype == "float32" else 0.0  # of a gradient; in half precision nothing is
    compare(got[1:], want[1:], left_out + (2e-5 if dtype == "float32" else 4 * EPS[dtype]))
    assert [a.tolist() for a in predicted] == [a.tolist() for a in best]
    elsewhere = options == "fallback" or (options == "least" and dtype == "float32")
    assert set(passes) == (set() if elsewhere else {"layer_terms", "layer_slopes"})


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("options", ["number", "rows", "softcap", "chunk", "invariant", "score_dtype"])
def test_log_p_and_entropy_read_their_scores_by_two_kernels(options, dtype, passes):
    x, weight, bias, t = operands(dtype)
    t[3] = -1
    given = {
        "number": {"temperature": 0.8}, "rows": {"temperature": ROW.to(DEVICE)}, "chunk": {"chunk": 32, "temperature": 0.8},
        "softcap": {"transform": am.transforms.softcap(5.0), "temperature": ROW.to(DEVICE)},
        "invariant": {"invariant": True, "temperature": 0.8}, "score_dtype": {"score_dtype": dtype, "temperature": 0.8},
    }[options]  # fmt: skip

    def terms(x, weight, b, **given):
        free = [a.detach().requires_grad_() for a in (x, weight, b)]
        log_p, h = am.linear_log_prob_entropy(free[0], free[1], t, linear_bias=free[2], **given)
        factors = torch.linspace(0.5, 2.0, ROWS, device=h.device, dtype=h.dtype)
        found = torch.where(log_p == -torch.inf, 0.0, log_p)
        return [found.detach(), h.detach(), *torch.autograd.grad((found * factors).sum() - (h * factors).sum(), free)]

    got = terms(x, weight, bias, **given)
    with am.use("reference"):
        given.pop("score_dtype", None)
        want = terms(*(a.double() for a in (x, weight, bias)), **given)
    rounded = options == "score_dtype" and dtype == "float16"
    compare(got[:2], want[:2], 0.02 if rounded else 1e-5)
    compare(got[2:], want[2:], 0.02 if rounded else 3e-5 if dtype == "float32" else 4 * EPS["float16"])
    assert set(passes) == {"layer_terms", "layer_slopes"}


def test_what_the_kernels_refuse():
    x, weight, _, _ = operands()
    assert engine_of(LAYER, (weight,), x) is ENGINE
    assert engine_of(LAYER, (weight.double(),), x.double()) is None
    assert engine_of(SCORES, None, x) is ENGINE
    assert engine_of(SCORES, None, x.double()) is None
    with am.use("reference"):
        assert engine_of(LAYER, (weight,), x) is None
