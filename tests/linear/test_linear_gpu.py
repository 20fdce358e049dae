"""Output layers as a GPU computes them, on the CPU: its sizes and its choices, against all scores in fp64.

Half precision is not computed in fp32 there; the scores are in fp32 all the same.
"""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")

import anymax as am
from anymax.linear import layer, torch_blocks, torch_candidates, torch_groups, torch_softmax

ROWS, FEATURES, CLASSES = 40, 24, 90
MAPS = {"softmax": am.Softmax(), "sparsemax": am.Sparsemax(), "entmax15": am.Entmax(1.5)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
maps, dtypes = pytest.mark.parametrize("name", MAPS), pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    """Small sizes, so that there are several groups, parts of them and blocks."""
    monkeypatch.setattr(torch_blocks, "on_gpu", lambda x: True)
    monkeypatch.setattr(layer, "on_cpu", lambda x: False)
    small = {"small": CLASSES, "group": CLASSES, "piece": 7 * CLASSES, "block": ROWS * 32}
    monkeypatch.setattr(torch_blocks, "GPU", torch_blocks.GPU._replace(**small))


@pytest.fixture
def ways(monkeypatch):
    """The names of the functions that computed a gradient, in order."""
    called = []
    for module, name in (
        (torch_groups, "_gradient"),
        (torch_softmax, "_others_back"),
        (torch_candidates, "candidates_back"),
        (torch_softmax, "candidates_back"),
    ):
        compute = getattr(module, name)

        def counted(*given, name=name, compute=compute):
            called.append(name)
            return compute(*given)

        monkeypatch.setattr(module, name, counted)
    return called


@dataclasses.dataclass(frozen=True)
class Operands:
    """Features, weight and bias of the dtype, and a class for each row."""

    free: list
    y: torch.Tensor

    @classmethod
    def of(cls, dtype="float32", sigma=0.4):
        draw = torch.Generator().manual_seed(0)
        make = lambda *shape: torch.randn(shape, generator=draw).to(DTYPES[dtype])  # noqa: E731
        free = make(ROWS, FEATURES), sigma * make(CLASSES, FEATURES), make(CLASSES)
        y = torch.randint(CLASSES, (ROWS,), generator=draw)
        y[[3, 4, 39]] = -100
        return cls([a.requires_grad_() for a in free], y)

    def scores(self):
        """In fp64, but for the rounding of fp32."""
        x, weight, bias = (a.detach() if a.dtype is torch.float32 else a.detach().double() for a in self.free)
        return (x @ weight.T + bias).double().requires_grad_()

    def gradients(self, value, s):
        """Those by features, weight and bias, of a function of the scores."""
        slope = torch.autograd.grad(value, s)[0].nan_to_num()
        x, weight, _ = (a.detach().double() for a in self.free)
        return slope @ weight, slope.T @ x, slope.sum(0)


def loss_of(name):
    return am.nll if name == "softmax" else am.fenchel_young


def compare(got, want, dtype, values=1):
    """The first `values` are in fp32 at least; the others are rounded, as are the slopes that they come from."""
    for place, (a, b) in enumerate(zip(got, want, strict=True)):
        b = b.detach()
        size = max(1.0, float(b.abs().max()))
        bound = 2e-5 if place < values else {"float32": 2e-5, "bfloat16": 2.0**-6, "float16": 2.0**-9}[dtype]
        torch.testing.assert_close(a.detach().double(), b, rtol=0, atol=bound * size)


KEEP = torch.rand(CLASSES, generator=torch.Generator().manual_seed(1)) < 0.7
OF_ROWS = torch.rand(ROWS, CLASSES, generator=torch.Generator().manual_seed(2)) < 0.7
OPTIONS = {
    "plain": {}, "smoothed": {"label_smoothing": 0.1}, "weighted": {"weight": True}, "masked": {"mask": KEEP},
    "rows": {"mask": OF_ROWS}, "all": {"weight": True, "mask": KEEP, "label_smoothing": 0.2},
}  # fmt: skip


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("options", OPTIONS)
@dtypes
@maps
def test_the_loss_and_its_gradients_are_those_of_all_scores(name, dtype, options, reduction):
    these, mapping, given = Operands.of(dtype), MAPS[name], dict(OPTIONS[options])
    y = these.y
    if "mask" in given:
        y = torch.where(given["mask"].expand(ROWS, -1).gather(1, y.clamp(min=0)[:, None])[:, 0], y, -100)
    if "weight" in given:
        given["weight"] = torch.linspace(0.25, 2.0, CLASSES).to(DTYPES[dtype])
    s = these.scores()
    want = loss_of(name)(
        mapping, s, y, reduction=reduction, **{k: v.double() if k == "weight" else v for k, v in given.items()}
    )
    factors = torch.linspace(0.5, 2.0, want.numel()).reshape(want.shape)
    x, weight, bias = these.free
    got = am.linear_loss(x, weight, y, mapping, linear_bias=bias, reduction=reduction, **given)
    found = torch.autograd.grad((got * factors.to(got.dtype)).sum(), these.free)
    assert [a.dtype for a in found] == [DTYPES[dtype]] * 3
    compare(found, these.gradients((want * factors).sum(), s), dtype, values=0)
    assert got.dtype is torch.float32
    torch.testing.assert_close(got.detach().double(), want.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "dtype", "options", "way"),
    [
        ("softmax", "float32", {}, "ahead"), ("softmax", "bfloat16", {}, "ahead"), ("softmax", "float16", {}, "blocks"),
        ("softmax", "bfloat16", {"reduction": "none"}, "blocks"), ("softmax", "bfloat16", {"chunk": 16}, "blocks"),
        ("softmax", "float32", {"least": 0.01}, "candidates"), ("softmax", "bfloat16", {"least": 0.01}, "ahead"),
        ("softmax", "bfloat16", {"least": 0.01, "reduction": "none"}, "blocks"),
        ("softmax", "bfloat16", {"least": 0.01, "chunk": 32}, "candidates"),
        ("softmax", "bfloat16", {"z_loss": 0.1}, "ahead"), ("sparsemax", "bfloat16", {"suppress": 0.5}, "ahead"),
        ("sparsemax", "float32", {"suppress": 0.5}, "ahead"), ("sparsemax", "float32", {}, "candidates"),
        ("sparsemax", "bfloat16", {}, "ahead"), ("sparsemax", "bfloat16", {"reduction": "none"}, "groups"),
        ("sparsemax", "float16", {}, "groups"), ("entmax15", "bfloat16", {"chunk": 32}, "candidates"),
        ("entmax15", "float32", {"reduction": "none"}, "candidates"),
    ],
)  # fmt: skip
def test_the_way_is_the_one_that_is_told(name, dtype, options, way, ways):
    """And the loss of each dtype and option is that of all scores."""
    these = Operands.of(dtype, sigma=1.0)
    x, weight, bias = these.free
    given = {"linear_bias": bias, **options}
    told = am.linear.explain_linear_loss(x, weight, these.y, MAPS[name], **given)
    value = am.linear_loss(x, weight, these.y, MAPS[name], **given)
    assert (ways != []) == (way == "ahead"), ways
    torch.autograd.grad(value.sum(), these.free)
    chunk, rows = options.get("chunk", 64), ROWS // 2 if way == "ahead" else FEATURES
    assert [told, ways[0]] == {
        "ahead": [f"all 90 scores of {rows} rows at a time, with their gradient in the forward pass", "_gradient"],
        "groups": [f"all 90 scores of {rows} rows at a time, computed again for the gradient", "_gradient"],
        "blocks": [f"the scores of {chunk} classes and 40 rows at a time, computed again for the gradient", "_others_back"],
        "candidates": [
            f"the scores of {chunk} classes and 40 rows at a time"
            + ("; each row keeps those that may have a probability, and only these have a gradient" if name != "softmax" else
               "; if few classes of each row are above least=, only these have a gradient, else all, computed again"),
            "candidates_back",
        ],
    }[way]  # fmt: skip
    assert len(ways) == 1
    if "least" in options or "z_loss" in options or "suppress" in options:
        return
    want = loss_of(name)(MAPS[name], these.scores(), these.y, reduction=options.get("reduction", "mean"))
    bound = 2e-5 + 2 * torch.finfo(value.dtype).eps
    torch.testing.assert_close(value.detach(), want.detach().to(value.dtype), rtol=bound, atol=2e-5)


@pytest.mark.parametrize("options", [{}, {"chunk": 32}, {"chunk": 32, "label_smoothing": 0.1}], ids=str)
@dtypes
def test_classes_below_least_may_have_no_gradient(dtype, options):
    """In half precision only where the caller says `chunk`: there are three products of all scores otherwise."""
    these = Operands.of(dtype, sigma=1.0)
    x, weight, bias = these.free
    given = {"linear_bias": bias, "reduction": "none", **options}
    value = am.linear_loss(x, weight, these.y, least=1e-4, **given)
    s = these.scores()
    want = am.cross_entropy(s, these.y, reduction="none", label_smoothing=options.get("label_smoothing", 0.0))
    torch.testing.assert_close(value.detach().double(), want.detach(), rtol=2e-5, atol=2e-5)
    found = torch.autograd.grad(value.sum(), these.free)
    compare(found, these.gradients(want.sum(), s), "bfloat16", values=0)


@dtypes
@maps
def test_a_gradient_for_each_factor(name, dtype):
    """The factor of the caller is not read, since that would wait for a GPU."""
    these = Operands.of(dtype)
    x, weight, _ = these.free
    loss = am.linear_loss(x, weight, these.y, MAPS[name])
    want = torch.autograd.grad(am.linear_loss(x, weight, these.y, MAPS[name]), these.free[:2])
    for factor in (3.0, -1.0, 1.0):
        for a, b in zip(torch.autograd.grad(factor * loss, these.free[:2], retain_graph=True), want):
            torch.testing.assert_close(a, factor * b, rtol=0.02 if dtype == "bfloat16" else 1e-5, atol=1e-6)


@dtypes
@maps
def test_a_row_of_nan_touches_no_other_and_an_ignored_one_nothing(name, dtype):
    these = Operands.of(dtype)
    x, weight, bias = these.free
    bad = x.detach().clone()
    bad[[3, 4]] = torch.nan  # ignored
    clean = x.detach().clone().requires_grad_()
    got, want = (
        torch.autograd.grad(am.linear_loss(a, weight, these.y, MAPS[name], linear_bias=bias), (a, weight, bias))
        for a in (bad.requires_grad_(), clean)
    )
    for a, b in zip(got, want):
        assert torch.equal(a, b)
    with torch.no_grad():
        bad[7, 2] = torch.nan
    got, want = (am.linear_loss(a, weight, these.y, MAPS[name], reduction="none") for a in (bad, clean))
    keep = torch.arange(ROWS) != 7
    assert got[7].isnan()
    torch.testing.assert_close(got[keep], want[keep])
    slopes = [torch.autograd.grad(value[keep].sum(), of)[0] for value, of in ((got, bad), (want, clean))]
    torch.testing.assert_close(slopes[0][keep], slopes[1][keep])


@dtypes
@pytest.mark.parametrize("masked", [False, True])
@maps
def test_log_p_and_entropy(name, masked, dtype):
    these = Operands.of(dtype, sigma=0.2)
    x, weight, bias = these.free
    s = these.scores()
    y = torch.where(these.y < 0, -1, torch.where(torch.arange(ROWS) % 2 == 0, s.argmax(1), these.y))
    mask = {"mask": OF_ROWS.clone()} if masked else {}
    if masked:
        mask["mask"][5] = False
    with torch.no_grad():
        tau, size = am.linear.linear_threshold(x, weight, MAPS[name], linear_bias=bias, **mask)
        alone = am.linear_log_prob(x, weight, y, MAPS[name], linear_bias=bias, **mask)
    log_p, h = am.linear_log_prob_entropy(x, weight, y, MAPS[name], linear_bias=bias, **mask)
    with am.use("reference"):
        of_all = am.threshold(MAPS[name], s.detach(), **mask)
        want, of_h = am.log_prob_entropy(MAPS[name], s, y, **mask)
    assert torch.equal(size, of_all.support)
    torch.testing.assert_close(tau.double(), of_all.tau, rtol=0, atol=2e-5)
    assert bool(((log_p > -torch.inf) == (want > -torch.inf)).all())
    some = want > -torch.inf
    assert 10 < int(some.sum()) < ROWS or (name == "softmax" and not masked)
    sums = [(torch.where(some, a, 0.0) + b).sum() for a, b in ((log_p, h), (want, of_h))]
    compare([alone[some], log_p[some], h], [want[some], want[some], of_h], dtype, values=3)
    compare(torch.autograd.grad(sums[0], these.free), these.gradients(sums[1], s), dtype, values=0)


OF_EACH = torch.linspace(0.6, 1.7, ROWS)  # no power of two, by which bf16 divides without rounding
TEMPERED = {
    "log p": lambda x, w, b, y, m, t: am.linear_log_prob(x, w, y, m, linear_bias=b, temperature=t),
    "entropy": lambda x, w, b, y, m, t: am.linear_log_prob_entropy(x, w, y, m, linear_bias=b, temperature=t)[1],
    "blocks": lambda x, w, b, y, m, t: am.linear_log_prob(x, w, y, m, linear_bias=b, temperature=t, chunk=16),
    "support": lambda x, w, b, y, m, t: am.linear_log_prob(x, w, y, m, linear_bias=b, temperature=t, support=SOME),
    "teacher": lambda x, w, b, y, m, t: am.linear_topk_kl(x, w, y[:, None], torch.full((ROWS, 1), -0.5), m, linear_bias=b, temperature=t),
    "divergence": lambda x, w, b, y, m, t: am.linear_kl(x, w, x.detach(), w.detach() * 0.5, m, linear_bias=b, temperature=t),
}  # fmt: skip
SOME = torch.stack([torch.randperm(CLASSES, generator=torch.Generator().manual_seed(3))[:30] for _ in range(ROWS)])


@pytest.mark.parametrize("temperature", [0.7, OF_EACH], ids=["number", "rows"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("verb", TEMPERED)
@maps
def test_a_temperature_does_not_round_features(name, verb, dtype, temperature):
    """It multiplies the scores, in fp32."""
    these, mapping = Operands.of(dtype, sigma=0.1), MAPS[name]
    y = these.scores().argmax(1) if verb != "support" else SOME[:, 0]
    got = TEMPERED[verb](*these.free, y, mapping, temperature)
    wide = [a.detach().double().requires_grad_() for a in these.free]
    with am.use("reference"):
        warmth = temperature.double() if isinstance(temperature, torch.Tensor) else temperature
        want = TEMPERED[verb](*wide, y, mapping, warmth)
    some = want > -torch.inf
    assert bool(some.any())
    compare([got[some]], [want[some]], dtype)
    pairs = (torch.where(some, a, 0.0).sum() for a in (got, want))
    found, right = (torch.autograd.grad(a, free) for a, free in zip(pairs, (these.free, wide)))
    compare(found, right, "bfloat16", values=0)  # rounded more than once


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("temperature", [0.7, OF_EACH], ids=["number", "rows"])
def test_a_compiled_temperature_does_not_round_features(temperature):
    x, weight, bias = (these := Operands.of("bfloat16", sigma=0.1)).free
    y = these.y.clamp(min=0)
    call = lambda: am.linear_log_prob_entropy(x, weight, y, linear_bias=bias, temperature=temperature)  # noqa: E731
    want, got = call(), torch.compile(call, backend="aot_eager", fullgraph=True)()
    slopes = [torch.autograd.grad(sum(value).sum(), these.free) for value in (want, got)]
    for a, b in zip((*want, *slopes[0]), (*got, *slopes[1]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.whole
@pytest.mark.parametrize("temperature", [0.7, OF_EACH], ids=["number", "rows"])
def test_a_temperature_in_jax_does_not_round_features(temperature):
    """Nor does one that learns."""
    jax = pytest.importorskip("jax")
    these = Operands.of("bfloat16", sigma=0.1)
    y = these.y.clamp(min=0)
    warmth = torch.as_tensor(temperature, dtype=torch.float64).requires_grad_()
    log_p = (these.scores().detach() / warmth.reshape(-1, 1)).log_softmax(1).gather(1, y[:, None])[:, 0]
    wide = [jax.numpy.asarray(a.detach().float().numpy()).astype("bfloat16") for a in these.free]
    x, weight, bias = wide

    def call(t):
        return am.linear_log_prob(x, weight, jax.numpy.asarray(y.numpy()), linear_bias=bias, temperature=t)

    t = jax.numpy.asarray(warmth.detach().float().numpy())
    for compute in (call, jax.jit(call)):
        assert abs(torch.tensor(compute(t).tolist()) - log_p.detach()).max() < 2e-5
    slope = torch.tensor(jax.grad(lambda t: call(t).sum())(t).tolist())
    torch.testing.assert_close(slope.double(), torch.autograd.grad(log_p.sum(), warmth)[0], rtol=1e-4, atol=1e-4)


@dtypes
@maps
def test_a_student_of_a_teacher(name, dtype):
    these = Operands.of(dtype, sigma=0.2)
    x, weight, bias = these.free
    s = these.scores()
    log_p, ids = s.detach().log_softmax(1).flip(0).topk(5, 1)
    ids[2, 3] = -1
    given = {
        "tail": "one class" if name == "softmax" else "ignore",
        "direction": "forward" if name == "softmax" else "reverse",
    }
    got = am.linear_topk_kl(x, weight, ids, log_p.float(), MAPS[name], linear_bias=bias, **given)
    with am.use("reference"):
        want = am.linear_topk_kl(s, torch.eye(CLASSES, dtype=s.dtype), ids, log_p, MAPS[name], **given)
    some = torch.isfinite(want)
    assert int(some.sum()) > 5
    compare([got[some]], [want[some]], dtype)
    sums = [torch.where(some, a, 0.0).sum() for a in (got, want)]
    compare(torch.autograd.grad(sums[0], these.free), these.gradients(sums[1], s), dtype, values=0)


def peak(call):
    """The most bytes that torch has allocated at the same time during a call whose results are kept."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = call()
    now = most = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    assert kept
    return most


@pytest.mark.parametrize("rows", [64, 200])
@pytest.mark.parametrize(("dtype", "score_dtype"), [("float32", None), ("bfloat16", None), ("bfloat16", "bfloat16")])
@maps
def test_the_memory_above_weight_and_gradients_is_that_of_the_weight(name, dtype, score_dtype, rows, monkeypatch):
    """In half precision it is twice that, since scores are in fp32, unless the caller wants them rounded; and twice that once more if there
    are more rows than features, since the gradient of the weight is summed in fp32; where the CPU has products of bf16, torch packs the
    weight for them, too."""
    monkeypatch.setattr(torch_blocks, "GPU", torch_blocks.GPU._replace(piece=1 << 13, block=1 << 13, gathered=1 << 13))
    features, classes = 64, 3000
    x, weight, bias = (
        torch.randn(*shape).div(4).to(DTYPES[dtype]).requires_grad_()
        for shape in ((rows, features), (classes, features), (classes,))
    )
    y, mask = torch.randint(classes, (rows,)), torch.arange(classes) != 5
    y[y == 5] = 0

    def step():
        loss = am.linear_loss(x, weight, y, MAPS[name], linear_bias=bias, mask=mask, score_dtype=score_dtype)
        return torch.autograd.grad(loss, (x, weight, bias))

    step()
    above = peak(step) - x.nbytes - weight.nbytes - bias.nbytes
    summed = dtype == "bfloat16" and rows > features
    wide = dtype == "bfloat16" and score_dtype is None
    assert above < ((3.0 if summed else 1.6) + wide) * weight.nbytes
