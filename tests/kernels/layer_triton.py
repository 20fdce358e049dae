"""Output layers on a GPU against all scores by the reference. On a GPU it runs for real: `pytest tests/kernels/layer_triton.py`.

Without one, test_triton.py runs this file in Triton's interpreter, where the CPU takes the sizes and ways of a GPU. What needs no kernel is
tested in test_linear_gpu.py.
"""

from __future__ import annotations

import pytest
import row_cases
from triton_place import DEVICE, REAL, WARNINGS

torch = pytest.importorskip("torch")

import anymax as am
from anymax.kernels import engine_of
from anymax.kernels.tasks import LAYER
from anymax.kernels.triton import ENGINE
from anymax.kernels.triton import layer as gpu
from anymax.linear import torch_blocks, torch_products

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


def test_what_the_kernels_refuse():
    x, weight, _, _ = operands()
    assert engine_of(LAYER, (weight,), x) is ENGINE
    assert engine_of(LAYER, (weight.double(),), x.double()) is None
    with am.use("reference"):
        assert engine_of(LAYER, (weight,), x) is None
