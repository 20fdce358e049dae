"""The torch modules: who owns a tensor, what survives a copy, and that they learn."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
from cases import takes_an_index, whole

torch = pytest.importorskip("torch")

import anymax as A
from anymax import (
    Budget,
    Entmax,
    NormMax,
    PerturbMax,
    Ratio,
    Sigsoftmax,
    Softmax,
    Sparsemax,
    SparseSoftmax,
    Taylor,
    nn,
)

Parameter = torch.nn.Parameter
MAPS = whole({
    "softmax": Softmax(), "sparsemax": Sparsemax(), "entmax1.5": Entmax(1.5), "entmax1.25": Entmax(1.25), "normmax": NormMax(2.0),
    "budget": Budget(1.0), "taylor": Taylor(2), "sigsoftmax": Sigsoftmax(), "ratio": Ratio.sigmoid(), "sparse_softmax": SparseSoftmax(k=2),
    "perturb_max": PerturbMax(),
})  # fmt: skip


def scores(seed=0, shape=(4, 5)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def names(module):
    return [n for n, _ in module.named_parameters()], [n for n, _ in module.named_buffers()]


# -- who owns a tensor ------------------------------------------------------------------------------------------------


def scalar(value):
    return Parameter(torch.tensor(value))


OWNED = {  # name -> (the module, the names of its parameters, of its buffers)
    "a number": (lambda: nn.Activation(Entmax(1.5)), [], []),
    "a tensor": (lambda: nn.Activation(Entmax(torch.tensor(1.5))), [], ["alpha"]),
    "a parameter": (lambda: nn.Activation(Entmax(scalar(1.5))), ["alpha"], []),
    "a parameter k": (lambda: nn.Activation(Budget(scalar(2.0))), ["k"], []),
    "a parameter of noise": (lambda: nn.Activation(PerturbMax(scale=scalar(1.0))), ["scale"], []),
    "a learned number": (lambda: nn.Activation(Entmax(1.5), learn="alpha"), ["raw_alpha"], []),
    "a weight": (lambda: nn.Loss(Softmax(), torch.ones(3)), [], ["weight"]),
    "a loss": (lambda: nn.Loss(Entmax(scalar(1.5))), ["alpha"], []),
    "a head": (lambda: nn.MarginHead(4, 3), ["weight"], []),
}


@pytest.mark.parametrize("name", OWNED)
def test_a_number_is_a_constant_a_tensor_a_buffer_a_parameter_a_parameter(name):
    make, parameters, buffers = OWNED[name]
    assert names(make()) == (parameters, buffers)


@pytest.mark.parametrize("name", MAPS)
def test_modules_are_the_functions(name):
    mapping, x, t = MAPS[name], scores(), torch.tensor([0, 4, -100, 2])
    torch.testing.assert_close(nn.Activation(mapping)(x), A.apply(mapping, x))
    torch.testing.assert_close(nn.Activation(mapping, dim=0)(x), A.apply(mapping, x, 0))
    mask = x < 1
    torch.testing.assert_close(nn.Activation(mapping)(x, mask), A.apply(mapping, x, mask=mask))
    if not takes_an_index(mapping):
        return
    loss = A.fenchel_young if mapping.facts.has_potential else A.nll
    w = torch.rand(5, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(nn.Loss(mapping, w, reduction="sum")(x, t), loss(mapping, x, t, w, reduction="sum"))
    torch.testing.assert_close(
        nn.Loss(mapping, ignore_index=4)(x[:2], t[:2]), loss(mapping, x[:2], t[:2], ignore_index=4)
    )
    if name != "sparse_softmax":
        torch.testing.assert_close(
            nn.Loss(mapping, label_smoothing=0.1, dim=-1)(x, t), loss(mapping, x, t, label_smoothing=0.1, axis=-1)
        )
    torch.testing.assert_close(nn.Loss(mapping, dim=0)(x.T, t), loss(mapping, x, t))


def test_one_alpha_for_each_head():
    alpha = Parameter(torch.tensor([1.0, 1.5, 2.0]).reshape(3, 1, 1))
    module = nn.Activation(Entmax(alpha))
    x = scores(1, (2, 3, 4, 5))
    p = module(x)
    for h, a in enumerate((1.0, 1.5, 2.0)):
        torch.testing.assert_close(p[:, h], A.entmax(x[:, h], a))
    (p * torch.arange(5)).sum().backward()
    assert (module.alpha.grad != 0).all()


def test_the_parameter_is_the_users_own():
    alpha = Parameter(torch.tensor(1.5))
    module = nn.Activation(Entmax(alpha))
    assert module.alpha is alpha
    with torch.no_grad():
        alpha.fill_(2.0)
    torch.testing.assert_close(module(scores()), A.sparsemax(scores()))


# -- a learnable parameter inside its bounds --------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [1e-2, 1e3, -1e3, 1e8])
def test_alpha_stays_inside_its_bounds_under_a_hostile_optimiser(rate):
    module = nn.Activation(Entmax(1.3), learn="alpha", bounds=(1.0, 2.0))
    x = scores(2)
    for _ in range(5):
        module.zero_grad()
        (module(x) * torch.arange(5)).sum().backward()
        assert module.raw_alpha.grad.isfinite()
        with torch.no_grad():
            module.raw_alpha -= rate * module.raw_alpha.grad.sign()
        assert 1.0 <= float(module.mapping.alpha.detach()) <= 2.0
        assert module(x).isfinite().all()


def test_learning_starts_where_it_was_told():
    assert abs(float(nn.Activation(Entmax(1.3), learn="alpha").mapping.alpha.detach()) - 1.3) < 1e-6
    start = torch.tensor([1.1, 1.9]).reshape(2, 1, 1)
    module = nn.Activation(Entmax(start), learn="alpha")
    torch.testing.assert_close(module.mapping.alpha.detach(), start)
    assert names(module) == (["raw_alpha"], [])


def test_learning_alpha_finds_it():
    """The map that made the targets is found again."""
    torch.manual_seed(0)
    x = scores(3, (64, 6)) * 2
    y = A.entmax(x, 1.7)
    module = nn.Activation(Entmax(1.2), learn="alpha", bounds=(1.0, 3.0))
    optimiser = torch.optim.Adam(module.parameters(), lr=0.1)
    for _ in range(100):
        optimiser.zero_grad()
        (module(x) - y).pow(2).sum().backward()
        optimiser.step()
    assert abs(float(module.mapping.alpha.detach()) - 1.7) < 1e-2


@pytest.mark.parametrize(
    ("mapping", "name", "bounds"),
    [
        (NormMax(1.5), "alpha", (1.0, 2.0)),
        (PerturbMax(), "scale", (0.0, 2.0)),
        (Budget(2), "k", (0.0, 3.0)),
        (Entmax(0.5), "alpha", (0.0, 1.0)),
    ],
)
@pytest.mark.parametrize("raw", [-1e4, 1e4])
def test_a_learned_number_stays_in_the_range_of_its_map(mapping, name, bounds, raw):
    """Also where its sigmoid rounds to a bound that is no number of the map."""
    module = nn.Activation(mapping, learn=name, bounds=bounds)
    with torch.no_grad():
        next(module.parameters()).fill_(raw)
    value = float(module.mapping.params()[name].detach())
    assert mapping.ranges[name].has(value)
    assert abs(value - bounds[raw > 0]) < 1e-6
    assert module(scores()).isfinite().all()


# -- copies -----------------------------------------------------------------------------------------------------------


N, EDGES = 4, torch.tensor([[0, 1, 2, 3, 3, 1, 0], [1, 2, 3, 0, 1, 1, 2]])
SLOPES = {"alibi": [1.0, 1 / 3, 0.0, 0.0], "batch_first": True}
EXAMPLES = {  # name -> (the module, what it is given beside [4, 5] numbers, how it begins to say what it is)
    "plain": (lambda: nn.Activation(Sparsemax(), dim=0), {}, "Activation(Sparsemax(), dim=0)"),
    "parameter": (lambda: nn.Activation(Entmax(scalar(1.4))), {}, "Activation(Entmax(alpha=<tensor>), dim=-1)"),
    "buffer": (lambda: nn.Activation(Entmax(torch.tensor([[1.0], [1.2], [1.5], [3.0]]))), {}, "Activation(Entmax("),
    "learned": (lambda: nn.Activation(Entmax(1.4), learn="alpha"), {}, "Activation(Entmax(alpha learned in (1.0, 2.0)), dim=-1)"),
    "ratio": (lambda: nn.Activation(Ratio.square()), {}, "Activation(Ratio"),
    "perturb": (lambda: nn.Activation(PerturbMax("laplace", scale=0.5)), {}, "Activation(PerturbMax("),
    "loss": (lambda: nn.Loss(Entmax(1.3), torch.arange(1.0, 6.0), label_smoothing=0.1), {"target": "classes"}, "Loss(Entmax(alpha=1.3))"),
    "learned loss": (lambda: nn.Loss(Entmax(1.3), learn="alpha"), {"target": "classes"}, "Loss(Entmax(alpha learned"),
    "head": (
        lambda: nn.MarginHead(5, 3, Sparsemax(), margin=A.margins.ArcFace(0.3), scale=8.0), {"target": "classes"},
        "MarginHead(5 -> 3, Sparsemax(), ArcFace(m=0.3), scale=8.0)",
    ),
    "attention": (lambda: nn.Attention(5, 1, Entmax(torch.tensor(1.3)), sink=True), {"key": "x", "value": "x"}, "Attention("),
    "learned attention": (
        lambda: nn.Attention(5, 1, Entmax(torch.full((1, 1, 1), 1.5)), learn="alpha"), {"key": "x", "value": "x"}, "Attention(",
    ),
    "attention with all": (
        lambda: nn.Attention(
            6, 3, Entmax(scalar([[[1.1]], [[1.5]], [[2.0]]])), kdim=5, vdim=5, kv_heads=1, window=(3, 0), softcap=5.0, alibi=True,
            sink=True, transform=A.compose(A.transforms.scalable(beta=scalar([[[0.3]], [[0.6]], [[0.9]]]))),
        ), {"query": "wide", "key": "x", "value": "x"}, "Attention(",
    ),
    "adaptive attention": (
        lambda: nn.Attention(5, 1, "entmax15", transform=nn.AdaptiveScale(5, 1, delta=0.5)), {"key": "x", "value": "x"}, "Attention(",
    ),
    "graph": (
        lambda: nn.GraphAttention(5, 3, 2, mapping=Entmax(1.3), share_weights=True), {"edge_index": EDGES},
        "GraphAttention(\n  5, 3, heads=2, Entmax(alpha=1.3)",
    ),
    "learned graph": (
        lambda: nn.GraphAttention(5, 3, 2, mapping=Entmax(torch.full((2,), 1.5)), learn="alpha"), {"edge_index": EDGES}, "GraphAttention(",
    ),
    "pool": (lambda: nn.AttentionPool(Entmax(1.5), 5, 2, learn="alpha"), {"lengths": [3, 0, 1]}, "AttentionPool("),
}  # fmt: skip


def made(name):
    torch.manual_seed(0)
    return EXAMPLES[name][0]()


def outcome(name, module, dtype=torch.float32):
    x = scores(4).to(dtype)
    given = {"x": x, "wide": torch.cat([x, x[:, :1]], 1), "classes": torch.tensor([0, 1, 2, 0])}
    more = {key: given[value] if isinstance(value, str) else value for key, value in EXAMPLES[name][1].items()}
    if isinstance(module, (nn.Loss, nn.MarginHead)):
        return module(x, *more.values())
    out = module(**more) if "query" in more else module(x, **more)
    return out[0] if isinstance(out, tuple) else out


def through_file(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)), "file": through_file}


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("way", WAYS)
def test_copies(name, way):
    module = made(name)
    twin = WAYS[way](module)
    assert type(twin) is type(module)
    assert repr(twin) == repr(module)
    torch.testing.assert_close(outcome(name, twin), outcome(name, module))
    assert not set(map(id, twin.parameters())) & set(map(id, module.parameters()))
    for (n, a), (m, b) in zip(module.named_parameters(), twin.named_parameters(), strict=True):
        assert n == m
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", EXAMPLES)
def test_state_dict(name):
    module, other = made(name), made(name)
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(1.1)
    missing = other.load_state_dict(through_file(module.state_dict()))
    assert not missing.missing_keys
    assert not missing.unexpected_keys
    torch.testing.assert_close(outcome(name, other), outcome(name, module))


@pytest.mark.parametrize("name", [name for name in EXAMPLES if list(made(name).parameters())])
def test_every_parameter_learns(name):
    module = made(name)
    outcome(name, module).square().sum().backward()
    for n, p in module.named_parameters():
        assert p.grad.isfinite().all(), n
        assert p.grad.any(), n


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in EXAMPLES if "loss" not in name and name != "head"])
def test_half_precision(name, dtype):
    module = made(name)
    got = outcome(name, copy.deepcopy(module).to(dtype), dtype)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), outcome(name, module), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("name", EXAMPLES)
def test_repr(name):
    assert repr(made(name)).startswith(EXAMPLES[name][2])


def test_copies_share_what_was_shared():
    twin = through_file(made("graph"))
    assert twin.lin_l is twin.lin_r


DROPPING = {
    "attention": lambda: nn.Attention(5, 1, Entmax(1.5), dropout=0.5),
    "graph": lambda: nn.GraphAttention(5, 3, 2, mapping=Entmax(1.5), dropout=0.5),
}


@pytest.mark.parametrize("name", DROPPING)
def test_dropout_is_of_training(name):
    module = DROPPING[name]()
    assert not torch.allclose(outcome(name, module), outcome(name, module))
    module.eval()
    assert torch.equal(outcome(name, module), outcome(name, module))


def test_moving_the_dtype_moves_the_tensors():
    module = nn.Activation(Entmax(Parameter(torch.tensor(1.4)))).double()
    assert module.alpha.dtype == torch.float64
    assert module(scores().double()).dtype == torch.float64
    assert nn.Activation(Entmax(torch.tensor(1.4))).half().alpha.dtype == torch.float16
    assert nn.Activation(Entmax(torch.tensor(1.4)))(scores().double()).dtype == torch.float64
    assert (
        nn.Loss(Softmax(), torch.ones(5)).double()(scores().double(), torch.zeros(4, dtype=torch.int64)).dtype
        == torch.float64
    )
    assert nn.Activation(Entmax(torch.tensor(1.4))).to("meta").alpha.is_meta


# -- learning ---------------------------------------------------------------------------------------------------------


@pytest.mark.whole(lambda name: name not in ("softmax", "sparsemax", "taylor", "sigsoftmax", "budget"))
@pytest.mark.parametrize("name", [name for name, mapping in MAPS.items() if takes_an_index(mapping)])
def test_training_a_tiny_model_reduces_the_loss(name):
    torch.manual_seed(0)
    centres = torch.randn(4, 6) * 2
    t = torch.arange(4).repeat(16)
    x = centres[t] + 0.3 * torch.randn(64, 6)
    model, loss = torch.nn.Linear(6, 4), nn.Loss(MAPS[name])
    torch.nn.init.normal_(model.weight, std=0.05)
    torch.nn.init.constant_(model.bias, 0.5)  # where Taylor and sigsoftmax are increasing
    optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
    worth = []
    for _ in range(60):
        optimiser.zero_grad()
        value = loss(model(x), t)
        value.backward()
        optimiser.step()
        worth.append(float(value.detach()))
    assert worth[-1] < 0.5 * worth[0]
    assert (nn.Activation(MAPS[name])(model(x)).argmax(-1) == t).float().mean() > 0.9


@pytest.mark.parametrize(
    "mapping", [Sparsemax(), Entmax(1.5), Taylor(2), SparseSoftmax(k=2), SparseSoftmax(p=0.8)], ids=str
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_every_module_trains_a_map_with_the_same_loss(mapping, smoothing):
    """Dense scores, an output layer and a margin head: `Mapping.own_loss` is the one answer, also for targets that p can't reach."""
    torch.manual_seed(0)
    x, t = torch.randn(5, 6), torch.tensor([0, 3, 1, 1, 2])
    layer = nn.LinearLoss(6, 7, mapping, label_smoothing=smoothing)
    s = x @ layer.weight.T if layer.bias is None else x @ layer.weight.T + layer.bias
    value = nn.Loss(mapping, label_smoothing=smoothing)(s, t)
    torch.testing.assert_close(value, layer(x, t))
    head = A.margin_loss(mapping, s, t, margin=0.0, scale=1.0, label_smoothing=smoothing)
    torch.testing.assert_close(value, head)
    assert value >= 0
    if isinstance(mapping, SparseSoftmax):
        torch.testing.assert_close(
            value, A.sparse_softmax_loss(s, t, k=mapping.k, p=mapping.p, label_smoothing=smoothing)
        )


@pytest.mark.parametrize("mapping", [None, Sparsemax(), Entmax(1.5), Taylor(2), SparseSoftmax(k=2)], ids=str)
@pytest.mark.parametrize("margin", [0.1, A.margins.ArcFace(0.2), A.margins.SphereFace(2)], ids=str)
def test_margin_head(mapping, margin):
    torch.manual_seed(0)
    head = nn.MarginHead(6, 4, mapping, margin=margin, scale=8.0)
    x, t = torch.randn(5, 6), torch.tensor([0, 3, 1, 1, 2])
    w = head.weight.detach().numpy()
    cosines = (x.numpy() / np.linalg.norm(x, axis=1)[:, None]) @ (w / np.linalg.norm(w, axis=1)[:, None]).T
    np.testing.assert_allclose(head.cosines(x).detach(), cosines, atol=1e-6)
    np.testing.assert_allclose(head.scores(x).detach(), 8 * cosines, atol=1e-5)
    want = A.margin_loss(head.mapping, cosines, t.numpy(), margin=margin, scale=8.0)
    np.testing.assert_allclose(head(x, t).detach(), want, rtol=1e-5, atol=1e-6)
    optimiser = torch.optim.SGD(head.parameters(), lr=0.05)
    before = float(head(x, t).detach())
    for _ in range(20):
        optimiser.zero_grad()
        head(x, t).backward()
        optimiser.step()
    assert float(head(x, t).detach()) < before
    ignored = nn.MarginHead(6, 4, mapping, margin=margin)
    assert float(ignored(x, torch.full((5,), -100)).detach()) == 0
