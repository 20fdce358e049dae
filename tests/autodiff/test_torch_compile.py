"""torch.compile in one graph, torch.export and ONNX: the compiled program gives what eager gives."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from cases import takes_an_index, whole
from laws import close

from anymax.functional.draws import one_draw

torch = pytest.importorskip("torch")

import anymax as A
from anymax import Budget, Entmax, NormMax, PerturbMax, Ratio, Sigsoftmax, Softmax, Sparsemax, SparseSoftmax, Taylor, nn
from anymax._random import nodes

# torch's own, inside Dynamo, forward AD and the ONNX exporter
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*is deprecated:FutureWarning"),
]

MAPS = whole(
    {
        "softmax": Softmax(),
        "sparsemax": Sparsemax(),
        "entmax1.5": Entmax(1.5),
        "entmax1.25": Entmax(1.25),
        "entmax3": Entmax(3.0),
        "budget": Budget(1.5),
        "budget_laplace": Budget(1.5, "laplace"),
        "normmax": NormMax(2.0),
        "taylor": Taylor(2),
        "sigsoftmax": Sigsoftmax(),
        "ratio": Ratio.sigmoid(),
        "sparse_softmax_k": SparseSoftmax(k=3),
        "sparse_softmax_p": SparseSoftmax(p=0.8),
        "perturb_max": PerturbMax(),
    }
)
every_map = pytest.mark.parametrize("name", MAPS)
few = pytest.mark.parametrize("name", ["softmax", "entmax1.25", "budget", "taylor"])
T = torch.tensor([0, 3, 2])


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def scores(seed=0, shape=(3, 6)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def compiled(f, backend="aot_eager", **options):
    return torch.compile(f, fullgraph=True, backend=backend, **options)


@pytest.mark.parametrize("name", [name for name, mapping in MAPS.items() if mapping.iterative])
def test_how_many_numbers_are_held(name):
    """What a program takes for the result of `hold`, before it has values."""
    x = scores().numpy()
    with np.errstate(all="ignore"):  # as for formulas inside the library
        for n in (3, 6):
            assert MAPS[name].hold(x[:, :n], np).shape == (3, MAPS[name].held_size(n))


def of(name):
    return lambda x: A.apply(MAPS[name], x)


def loss_of(name, smoothing=0.1):
    mapping = MAPS[name]
    if mapping.facts.has_potential and takes_an_index(mapping):
        smoothing = 0.0 if "sparse_softmax" in name else smoothing
        return lambda x: A.fenchel_young(mapping, x, T, label_smoothing=smoothing)
    if one_draw(mapping) == "none":
        return lambda x: A.accuracy_loss(mapping, x, T)
    return lambda x: A.smoothed_nll(mapping, x, T, epsilon=1e-3)


def value_and_gradient(f, x):
    x = x.clone().requires_grad_()
    y = f(x)
    (y * torch.arange(y.numel()).reshape(y.shape).add(1)).sum().backward()
    return y.detach(), x.grad


def same(f, g, x, tolerance=2e-6):
    for a, b in zip(value_and_gradient(f, x), value_and_gradient(g, x)):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# -- compile ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.whole
@every_map
def test_forward_and_backward_in_one_graph(name):
    f = of(name)
    g = compiled(f)
    x = scores()
    torch.testing.assert_close(g(x), f(x), rtol=1e-6, atol=1e-6)
    same(g, f, x)
    masked = x.clone()
    masked[0, 1] = masked[1] = -torch.inf
    same(g, f, masked)


@pytest.mark.whole
@pytest.mark.parametrize("name", [n for n in MAPS if n != "perturb_max"])  # which compiles for long
def test_loss_forward_and_backward_in_one_graph(name):
    same(compiled(loss_of(name)), loss_of(name), scores(1), 1e-5)


@pytest.mark.whole
@few
def test_loss_of_class_indices_in_one_graph(name):
    same(compiled(loss_of(name, 0.0)), loss_of(name, 0.0), scores(1), 1e-5)


@pytest.mark.whole
@few
def test_dynamic_shapes(name):
    f = of(name)
    frames = torch._dynamo.utils.counters["frames"]
    g = compiled(f, dynamic=True)
    for n, batch in ((6, 3), (9, 2), (17, 5)):
        same(g, f, scores(2, (batch, n)), 1e-5)
    assert frames["total"] <= 2  # no graph for each shape


@pytest.mark.whole
@few
def test_compiled_transforms(name):
    f, x, v = of(name), scores(3), scores(4)

    def square(x):
        return (f(x) ** 2).sum()

    torch.testing.assert_close(compiled(torch.func.grad(square))(x), torch.func.grad(square)(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(compiled(torch.func.vmap(f))(x), f(x), rtol=1e-5, atol=1e-6)

    def push(x, v):
        return torch.func.jvp(f, (x,), (v,))[1]

    torch.testing.assert_close(compiled(push)(x, v), push(x, v), rtol=1e-5, atol=1e-5)


@pytest.mark.whole
@pytest.mark.parametrize("alpha", [1.0, 2.5])
def test_a_learnable_alpha(alpha):
    def pair(compile_it):
        module = nn.Activation(Entmax(alpha=torch.nn.Parameter(torch.tensor(alpha))))
        run = compiled(module) if compile_it else module
        x = scores(5).requires_grad_()
        (run(x) * torch.arange(6)).sum().backward()
        return x.grad, module.alpha.grad

    for a, b in zip(pair(True), pair(False)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.whole
def test_an_alpha_learned_inside_bounds():
    module = nn.Loss(Entmax(1.5), learn="alpha")
    run = compiled(module)
    loss = run(scores(6), T)
    loss.backward()
    got = module.raw_alpha.grad.clone()
    module.raw_alpha.grad = None
    module(scores(6), T).backward()
    torch.testing.assert_close(got, module.raw_alpha.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.whole
def test_modules_and_attention():
    q, k, v = (scores(i, (2, 4, 6)) for i in range(3))
    for mapping in (Softmax(), Entmax(1.5)):
        f = lambda q, m=mapping: A.attention(q, k, v, m, is_causal=True)  # noqa: E731
        same(compiled(f), f, q, 1e-5)


def test_halves_and_autocast():
    f = of("entmax1.25")
    x = scores(7).bfloat16()
    assert compiled(f)(x).dtype == torch.bfloat16
    torch.testing.assert_close(compiled(f)(x), f(x))


# -- export -----------------------------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self, mapping):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(5, 6)
        self.head = nn.Activation(mapping)

    def forward(self, x):
        return self.head(self.layer(x))


@pytest.mark.whole(lambda name: name != "softmax")
@pytest.mark.weekly(lambda name: name not in ("softmax", "sparsemax", "entmax1.25", "sparse_softmax_k", "fusedmax-0.3"))
@every_map
def test_export(name):
    model = Model(MAPS[name]).eval()
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, (scores(9, (3, 5)),), dynamic_shapes={"x": {0: batch}}, strict=False)
    for rows in (2, 3, 11):
        x = scores(10, (rows, 5))
        torch.testing.assert_close(program.module()(x), model(x), rtol=1e-5, atol=2e-6)
    # plain operations only
    assert not [n for n in program.graph.nodes if "anymax" in str(n.target) and n.op == "call_function"]


@pytest.mark.whole
@pytest.mark.parametrize("name", ["sparsemax", "entmax1.5", "taylor"])
def test_strict_export(name):
    model, x = Model(MAPS[name]).eval(), scores(9, (3, 5))
    program = torch.export.export(model, (x,), strict=True)
    torch.testing.assert_close(program.module()(x), model(x), rtol=1e-5, atol=2e-6)


@pytest.mark.whole
@pytest.mark.weekly(lambda name: name in ("entmax1.25", "budget"))
@pytest.mark.parametrize(
    "name", ["softmax", "sparsemax", "entmax1.5", "entmax1.25", "sparse_softmax_k", "taylor", "budget"]
)
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:onnxscript", "ignore::DeprecationWarning:onnx_ir", "ignore::DeprecationWarning:copyreg"
)
def test_onnx(name, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model, path = Model(MAPS[name]).eval(), tmp_path / "model.onnx"
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, (scores(11, (3, 5)),), dynamic_shapes={"x": {0: batch}}, strict=False)
    small = len(program.graph.nodes) < 500  # the exporter's optimiser is slow on an unrolled iteration
    torch.onnx.export(program, (), str(path), dynamo=True, verbose=False, input_names=["x"], optimize=small)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for rows in (3, 7):
        x = scores(12, (rows, 5))
        (got,) = session.run(None, {"x": x.numpy()})
        torch.testing.assert_close(torch.tensor(got), model(x).detach(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    "f",
    [
        lambda q: A.linear_attention(q, q, q, is_causal=True),
        lambda q: A.attention(q, q, q, Taylor(2), implementation="linear"),
    ],
    ids=["linear_attention", "attention"],
)
def test_linear_attention_in_one_graph(f):
    q = scores(14, (2, 9, 3))
    torch.testing.assert_close(compiled(f)(q), f(q))


@pytest.mark.parametrize("noise", ["gumbel", pytest.param("uniform", marks=pytest.mark.whole)])
def test_a_loss_of_perturbed_maxima_in_one_graph(noise):
    """A default is a symbol; the nodes of Gauss and Legendre, which no tracer can make, are there before it comes."""
    f, x = lambda x: A.perturb_max_loss(x, T, noise=noise, nodes=8), scores(15)
    torch.testing.assert_close(compiled(f, "eager", dynamic=True)(x), f(x))
    assert nodes._GAUSS


def test_a_size_from_the_sum_of_a_map_is_no_symbol():
    x, mapping = scores(16).requires_grad_(), Sparsemax()
    f = lambda x: A.entmax(x.sum() * x.new_ones(max(4, mapping.least_classes)), 1.3)  # noqa: E731
    assert compiled(f, dynamic=True)(x).shape == (4,)


@pytest.mark.whole
def test_packed_sequences_with_free_sizes_and_a_gradient():
    bounds, q = torch.tensor([0, 2, 6], dtype=torch.int32), scores(16, (6, 1, 3)).requires_grad_()
    f = lambda q, bounds: A.attention_varlen(q, q, q, bounds, bounds, 4, 4, mapping=Sparsemax())  # noqa: E731
    got, want = (torch.autograd.grad(g(q, bounds).square().sum(), q) for g in (compiled(f, dynamic=True), f))
    torch.testing.assert_close(got, want)


KEEP = torch.tensor([True, True, False, True, True])
ALPHA = torch.tensor([[1.2], [1.5], [1.9]])
CALLS = {
    "logsumexp": lambda x: A.logsumexp(x, dim=-1, keepdim=True),
    "threshold": lambda x: A.threshold(Sparsemax(), x).tau,
    "axes": lambda x: A.softmax(x, dim=(0, 1)),
    "mask": lambda x: A.softmax(x, mask=KEEP),
    "mask of a list": lambda x: A.sparsemax(x, mask=[True, True, False, True, True]),
    "mask over axes": lambda x: A.sparsemax(x, mask=KEEP, dim=(0, 1)),
    "alpha": lambda x: A.entmax(x, ALPHA),
    "loss": lambda x: A.sparsemax_loss(x, T, axis=-1, ignore_index=-1),
    "lengths": lambda x: A.attention(*3 * [x[:, None, :, None]], Sparsemax(), lengths=torch.tensor([3, 5, 1])),
    "alibi": lambda x: A.attention(*3 * [x[:, None, :, None]], Sparsemax(), alibi=torch.tensor([0.5])),
}


@pytest.mark.whole
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_what_has_a_size_of_its_own_beside_sizes_that_are_free(name, dynamic):
    """Without a gradient, in one graph; a mask of 5 classes says that the free size of the scores is 5."""
    f, x = CALLS[name], scores(13, (3, 5))
    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(f, fullgraph=True, backend="eager", dynamic=dynamic)(x), f(x))


@pytest.mark.whole
def test_functions_compile_with_the_options_of_their_signatures():
    """Not only a function around them: `__signature__` is nothing to the tracer; and a named tuple comes out as one."""
    x, keep = scores(), scores(1) > -1.0
    for f, more in ((A.softmax, {}), (A.entmax, {"alpha": 1.3}), (A.budget, {"k": 2})):
        want = f(x, dim=0, mask=keep, **more)
        torch.testing.assert_close(compiled(f, "eager")(x, dim=0, mask=keep, **more), want)
    want = A.entmax_loss(x, T, reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(compiled(A.entmax_loss, "eager")(x, T, reduction="sum", label_smoothing=0.1), want)
    found = compiled(A.threshold, "eager")(Sparsemax(), x)
    assert type(found) is A.thresholds.Threshold
    torch.testing.assert_close(found.tau, A.threshold(Sparsemax(), x).tau)


# -- operands that are no tensors, and maps made inside ------------------------------------------------------------------------


Q = scores(1, (2, 4, 5, 4))
ATTENTION = A.nn.Attention(8, 2, A.Sink("sparsemax", score=0.3))
PACKED = torch.tensor([0, 3, 5])
EIGHT = scores(2, (4, 8))
WHOLE = {
    "a sink made inside": lambda: A.attention(Q, Q, Q, A.Sink("softmax", score=0.5)),
    "a number": lambda: A.attention(Q, Q, Q, sink=0.2),
    "an array": lambda: A.attention(Q, Q, Q, sink=np.arange(4.0)),
    "packed": lambda: A.attention_varlen(*[Q[0].movedim(0, 1)] * 3, PACKED, PACKED, 3, 3, mapping=A.Sink()),
    "nn.Attention": lambda: ATTENTION(*[EIGHT[None]] * 3)[0].detach(),
    "Sink()": lambda: A.apply(A.Sink(), EIGHT),
    "mask": lambda: A.apply("sparsemax", EIGHT, mask=np.arange(8) > 2),
    "target": lambda: A.sparsemax_loss(EIGHT, np.array([0, 1, 2, 3])),
    "target and weight": lambda: A.linear_loss(EIGHT, EIGHT, np.array([0, 1, 2, 3]), weight=np.arange(1.0, 5.0)),
    "a distribution": lambda: A.fenchel_young("sparsemax", EIGHT, np.full((4, 8), 0.125, "float32")),
}  # fmt: skip


@pytest.mark.whole(lambda name: name in ("a number", "nn.Attention", "Sink()", "target and weight"))
@pytest.mark.parametrize("name", WHOLE)
def test_numbers_and_arrays_beside_tensors_compile_whole(name):
    close(compiled(WHOLE[name], "eager")(), WHOLE[name](), 1e-5)


@pytest.mark.whole
def test_inductor_computes_the_same():
    """Maps, losses, attention and an output layer in one program, which gcc compiles."""
    w, y, q = scores(3, (8, 8)), torch.tensor([0, 1, 2, 3]), scores(4, (1, 2, 4, 4))

    def f(x, q):
        maps = (
            "softmax",
            "entmax15",
            A.Entmax(1.3),
            A.Budget(2),
            "taylor",
            A.SparseSoftmax(k=2),
            A.Sink("sparsemax", 0.2),
        )
        loss = (
            A.cross_entropy(x, y) + A.entmax15_loss(x, y) + A.nll("taylor", x, y) + A.linear_loss(x, w, y, "entmax15")
        )
        out = A.attention(q, q, q, "entmax15", is_causal=True) + A.attention(q, q, q, sink=0.2)
        ragged = A.segment_apply("entmax15", x[:, 0], index=y // 2, num_segments=2)
        return sum((A.apply(m, x) ** 2).sum() for m in maps) + loss + (out**2).sum() + (ragged**2).sum()

    got, want = ([a.requires_grad_() for a in (EIGHT.clone(), q.clone())] for _ in range(2))
    a, b = torch.compile(f, fullgraph=True)(*got), f(*want)
    close(a.detach(), b.detach(), 1e-4)
    for d, e in zip(torch.autograd.grad(a, got), torch.autograd.grad(b, want)):
        close(d, e, 1e-4)
