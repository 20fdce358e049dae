"""Output layers: the dtypes of operands, gradients and results."""

from __future__ import annotations

import numpy as np
import pytest
from kinds import every_kind, jax_in_the_whole_battery
from laws import close
from linear_cases import MAPS, made, operands, same, torch_operands

import anymax as A
from anymax.linear.layer import Layer


@pytest.mark.parametrize("name", ["softmax", "entmax15", "topk", "taylor"])
def test_dtypes_may_differ(name):
    """The product is computed in the widest of them, so the loss is exact; each operand gets its gradient in its own dtype."""
    torch, free, y = torch_operands()
    for dtypes in (
        ("bfloat16", "float32", "float16"),
        ("float32", "bfloat16", "bfloat16"),
        ("float64", "float32", "bfloat16"),
    ):
        own = [a.detach().to(getattr(torch, d)).requires_grad_() for a, d in zip(free, dtypes)]
        exact = [a.detach().double().requires_grad_() for a in own]
        for options in ({}, {"chunk": 16}, {"reduction": "none"}, {"label_smoothing": 0.1, "chunk": 16}):
            got = A.linear_loss(*own[:2], y, MAPS[name], linear_bias=own[2], **options)
            want = A.linear_loss(*exact[:2], y, MAPS[name], linear_bias=exact[2], **options)
            assert got.dtype is (torch.float64 if "float64" in dtypes else torch.float32)
            close(got.detach(), want.detach(), 1e-5, (dtypes, options))
            gradients = torch.autograd.grad(got.sum(), own), torch.autograd.grad(want.sum(), exact)
            for a, b, of in zip(*gradients, own):
                assert a.dtype is of.dtype
                close(a.double(), b, 1e-5 + torch.finfo(of.dtype).eps, (dtypes, options))
        ask = lambda *o: A.linear_log_prob(*o[:2], y, MAPS[name], linear_bias=o[2]).clamp(min=-1e3)  # noqa: E731
        close(ask(*own).detach(), ask(*exact).detach(), 1e-4, dtypes)


OF_HALVES = {
    "the loss of each row": lambda x, w, y, m: A.linear_loss(x, w, y, m, reduction="none"),
    "their mean": lambda x, w, y, m: A.linear_loss(x, w, y, m),
    "blocks of classes": lambda x, w, y, m: A.linear_loss(x, w, y, m, chunk=50),
    "smoothed": lambda x, w, y, m: A.linear_loss(x, w, y, m, label_smoothing=0.1),
    "transformed": lambda x, w, y, m: A.linear_loss(x, w, y, m, transform=A.temperature(0.7)),
    "log p": lambda x, w, y, m: A.linear_log_prob(x, w, y, m),
    "at a temperature": lambda x, w, y, m: A.linear_log_prob(x, w, y, m, temperature=0.7),
    "entropy": lambda x, w, y, m: A.linear_log_prob_entropy(x, w, y, m)[1],
    "threshold": lambda x, w, y, m: A.linear.linear_threshold(x, w, m).tau,
    "a teacher": lambda x, w, y, m: A.linear_topk_kl(x, w, y[:, None], x[:, :1] * 0 - 0.5, m),
    "a reference": lambda x, w, y, m: A.linear_kl(x, w, 0.5 * x.detach(), w.detach(), m, beta=0.3),
    "a sink": lambda x, w, y, m: A.linear_loss(x / 64, w, y, A.Sink(m, score=0.3), reduction="none"),
    "pairs": lambda x, w, y, m: A.contrastive_loss(x, w[: x.shape[0]], mapping=m, temperature=3.0, reduction="none"),
    "over processes": lambda x, w, y, m: A.distributed.linear_loss(x, w, y, m, reduction="none"),
    "log p over processes": lambda x, w, y, m: A.distributed.linear_log_prob(x, w, y, m, temperature=0.7, chunk=7),
}


@pytest.mark.whole(lambda dtype: dtype == "float16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "autocast"])
@pytest.mark.parametrize("name", ["softmax", "entmax15"])
@pytest.mark.parametrize("verb", OF_HALVES)
def test_no_score_of_half_precision_is_rounded_on_a_cpu(verb, name, dtype, one_process):
    """Values are those of fp64 to 2e-5, and gradients are off by their own rounding."""
    torch, compute, mapping = pytest.importorskip("torch"), OF_HALVES[verb], MAPS[name]
    torch.manual_seed(0)
    half = torch.bfloat16 if dtype == "autocast" else getattr(torch, dtype)
    own = [(torch.randn(shape) / 4).to(half) for shape in ((24, 64), (300, 64))]
    own[0] *= 16
    exact = [a.double().requires_grad_() for a in own]
    y = (exact[0] @ exact[1].T).argmax(1)
    free = [(a.float() if dtype == "autocast" else a).requires_grad_() for a in own]
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        got = compute(*free, y, mapping)
    want = compute(*exact, y, mapping)
    assert got.dtype is torch.float32
    close(got.detach().double(), want.detach(), 2e-5)
    for a, b in zip(torch.autograd.grad(got.sum(), free), torch.autograd.grad(want.sum(), exact)):
        assert (a - b).norm() <= 1.6 * (b.to(half) - b).norm(), "more than rounded"


@pytest.mark.whole(lambda given: "chunk" not in given)
@pytest.mark.parametrize("given", [{}, {"chunk": 50}, {"temperature": 0.7}], ids=str)
def test_no_score_of_half_precision_is_rounded_by_jax_on_a_cpu(given):
    """A loss in several groups of rows too, whose gradients of the weight are added in fp32."""
    jax, torch = pytest.importorskip("jax"), pytest.importorskip("torch")
    draw = np.random.default_rng(0)
    own = [
        jax.numpy.asarray(draw.normal(size=shape) * f, "bfloat16") for shape, f in (((24, 64), 4), ((300, 64), 0.25))
    ]
    exact = [torch.tensor(np.asarray(a, np.float64), requires_grad=True) for a in own]
    y = draw.integers(300, size=24)

    @jax.jit
    def log_p(*free):
        value = A.linear_log_prob(*free, jax.numpy.asarray(y), **given)
        return value.sum(), value

    gradients, got = jax.grad(log_p, (0, 1), has_aux=True)(*own)
    want = torch.log_softmax(exact[0] @ exact[1].T / given.get("temperature", 1.0), 1)[torch.arange(24), y]
    close(np.asarray(got, np.float64), want.detach(), 2e-5)
    for a, b in zip(gradients, torch.autograd.grad(want.sum(), exact)):
        rounded = (b.to(torch.bfloat16) - b).norm()
        assert np.linalg.norm(np.asarray(a, np.float64) - b.numpy()) <= 1.3 * rounded, "more than rounded"


@pytest.mark.whole(lambda way, name: way == "compiled" and name != "entmax15")
@pytest.mark.parametrize("name", ["softmax", "entmax15", "taylor"])
@pytest.mark.parametrize("way", ["compiled", "vmap"])
def test_half_precision_is_traced(way, name):
    """torch.compile traces the dtype of the product of bf16 too."""
    torch, free, y = torch_operands("float32")
    x, weight, _ = (a.detach().bfloat16() for a in free)
    loss = lambda x, y: A.linear_loss(x, weight, y, MAPS[name], reduction="none")  # noqa: E731
    if way == "compiled":
        got = torch.compile(loss, backend="eager", fullgraph=True)(x, y)
    else:
        got = torch.func.vmap(lambda a, b: loss(a[None], b[None])[0])(x, y)
    want = A.linear_loss(x.double(), weight.double(), y, MAPS[name], reduction="none")
    close(got.double(), want, 1e-5)


@pytest.mark.parametrize("half", [False, True], ids=["one dtype", "dtypes that differ"])
def test_autocast_is_that_of_a_linear_layer(half):
    torch, free, y = torch_operands("float32")
    free[0] = free[0].detach().bfloat16().requires_grad_() if half else free[0]
    with torch.autocast("cpu", torch.bfloat16):
        got = A.linear_loss(*free[:2], y, linear_bias=free[2])
        want = torch.nn.functional.cross_entropy(torch.nn.functional.linear(*free), y)
    assert got.dtype is want.dtype is torch.float32
    same(got, want, free, 2e-2)


@jax_in_the_whole_battery
@every_kind
def test_losses_of_half_precision_are_in_single_precision(kind):
    """So are those of all other verbs here, and the loss of 40 classes has more digits than bf16 can hold."""
    x, weight, _, y, *_ = operands()
    if kind == "strict":
        pytest.skip("has no half precision")
    half, (a, w, t) = "bfloat16" if kind != "numpy" else "float16", made(kind, x, weight, y)
    a, w = (v.astype(half) if kind != "torch" else v.bfloat16() for v in (a, w))
    sums = {"mapping": "taylor", "reduction": "sum"}
    for given in ({}, {"reduction": "none"}, {"chunk": 16}, {"mapping": "sparsemax"}, sums):
        assert "float32" in str(A.linear_loss(a, w, t, **given).dtype)
    for verb in (A.linear_log_prob, lambda a, w, t: A.linear.linear_threshold(a, w).tau):
        assert "float32" in str(verb(a, w, t).dtype)


def test_off_the_cpu_a_loss_of_half_precision_is_in_single_precision():
    """There the operands stay in half precision."""
    torch = pytest.importorskip("torch")
    x, weight = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((4, 6), (9, 6)))
    layer = Layer.of("linear_loss", x, weight, "softmax", None, None)
    assert layer.x.dtype is torch.bfloat16
    assert layer.dtype is torch.float32


def test_the_loss_of_a_margin_head_is_in_single_precision():
    torch = pytest.importorskip("torch")
    head = A.nn.MarginHead(6, 50)
    x, y = torch.randn(9, 6), torch.randint(50, (9,))
    want = head(x, y)
    got = head.bfloat16()(x.bfloat16(), y)
    assert got.dtype is torch.float32
    close(got.detach(), want.detach(), 0.1)


@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_scores_that_are_rounded_are_not_rounded_again_by_a_temperature(kind, monkeypatch):
    """A support of all classes has the log p of none, as on a GPU, where a temperature is a factor of the scores."""
    from anymax.linear import arguments

    torch = pytest.importorskip("torch")
    monkeypatch.setattr(arguments, "_rounds", lambda layer, scale: True)
    x, w = (
        (torch.randn(shape, generator=torch.Generator().manual_seed(i)) * 2).bfloat16()
        for i, shape in enumerate([(6, 16), (9, 16)])
    )
    want = torch.log_softmax((x.float() @ w.float().T).bfloat16().double() / 0.7, 1)[:, 0]
    operands, y = (x, w), torch.zeros(6, dtype=torch.int64)
    ids, offsets = torch.arange(9).repeat(6), 9 * torch.arange(7)
    if kind == "jax":
        jax = pytest.importorskip("jax").numpy
        operands = [jax.asarray(a.float().numpy(), "bfloat16") for a in operands]
        y, ids, offsets = (jax.asarray(a.numpy(), "int32") for a in (y, ids, offsets))
    for support in (None, (ids, offsets)):
        got = A.linear_log_prob(*operands, y, temperature=0.7, score_dtype="bfloat16", support=support)
        close(np.asarray(got, np.float64), want.numpy(), 1e-5)


def test_an_infinite_temperature_keeps_masked_classes_masked(monkeypatch):
    from anymax.linear import arguments

    torch = pytest.importorskip("torch")
    monkeypatch.setattr(arguments, "_rounds", lambda layer, scale: True)
    x, w = torch.ones(2, 4).bfloat16().requires_grad_(), torch.arange(12.0).reshape(3, 4).bfloat16().requires_grad_()
    bias = torch.tensor([0.0, -torch.inf, 0.0])
    s = torch.nn.functional.linear(x.float(), w.float()) / torch.tensor([[torch.inf], [1.0]])
    want = torch.log_softmax(s.masked_fill(bias == -torch.inf, -torch.inf), 1)[:, 0]
    for mapping in ("softmax", "taylor"):
        for support in (None, (torch.arange(3).repeat(2), torch.tensor([0, 3, 6]))):
            got = A.linear_log_prob(
                x, w, torch.zeros(2, dtype=torch.int64), mapping, linear_bias=bias, temperature=torch.tensor([torch.inf, 1.0]),
                support=support,
            )  # fmt: skip
            assert got.isfinite().all()
            assert all(g.isfinite().all() for g in torch.autograd.grad(got.sum(), (x, w)))
            if mapping == "softmax":
                close(got.detach(), want.detach(), 1e-5)
