"""The torch modules: who owns a tensor, what survives a copy, and that they learn."""

from __future__ import annotations

import copy
import io
import math
import pickle

import numpy as np
import pytest
from cases import takes_an_index, whole

torch = pytest.importorskip("torch")

import anymax as A
from anymax import (
    Bounded,
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
MAPS = whole(
    {
        "softmax": Softmax(),
        "sparsemax": Sparsemax(),
        "entmax1.5": Entmax(1.5),
        "entmax1.25": Entmax(1.25),
        "normmax": NormMax(2.0),
        "budget": Budget(1.0),
        "taylor": Taylor(2),
        "sigsoftmax": Sigsoftmax(),
        "ratio": Ratio.sigmoid(),
        "sparse_softmax": SparseSoftmax(k=2),
        "perturb_max": PerturbMax(),
    }
)


def scores(seed=0, shape=(4, 5)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def names(module):
    return [n for n, _ in module.named_parameters()], [n for n, _ in module.named_buffers()]


# -- who owns a tensor ------------------------------------------------------------------------------------------------


def test_a_number_is_a_constant_a_tensor_a_buffer_a_parameter_a_parameter():
    assert names(nn.Activation(Entmax(1.5))) == ([], [])
    assert names(nn.Activation(Entmax(torch.tensor(1.5)))) == ([], ["alpha"])
    assert names(nn.Activation(Entmax(Parameter(torch.tensor(1.5))))) == (["alpha"], [])
    assert names(nn.Activation(Budget(Parameter(torch.tensor(2.0))))) == (["k"], [])
    assert names(nn.Activation(PerturbMax(scale=Parameter(torch.tensor(1.0))))) == (["scale"], [])
    assert names(nn.Activation(Entmax(1.5), learn="alpha")) == (["raw_alpha"], [])
    assert names(nn.Loss(Softmax(), torch.ones(3))) == ([], ["weight"])
    assert names(nn.Loss(Entmax(Parameter(torch.tensor(1.5))))) == (["alpha"], [])
    assert names(nn.MarginHead(4, 3)) == (["weight"], [])


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
    ("make", "words"),
    [
        (lambda: nn.Activation(Entmax(1.5), learn="beta"), "no number of that name"),
        (lambda: nn.Activation(Sparsemax(), learn="alpha"), "no number of that name"),
        (lambda: nn.Activation(PerturbMax("normal"), learn="noise"), "no number of that name"),
        (lambda: nn.Activation(Entmax(2.5), learn="alpha"), r"strictly inside bounds=\(1\.0, 2\.0\)"),
        (lambda: nn.Activation(Entmax(1.0), learn="alpha"), "strictly inside"),
        (lambda: nn.Activation(Entmax(1.5), learn="alpha", bounds=(2.0, 1.0)), "strictly inside"),
        (
            lambda: nn.Loss(Entmax(1.5), learn="alpha", bounds=(-1.0, 2.0)),
            r"alpha in its range, above 0 and finite, got \(-1\.0, 2\.0\)",
        ),
        (lambda: nn.Loss(NormMax(1.5), learn="alpha", bounds=(0.5, 2.0)), "alpha in its range, above 1 and finite"),
        (lambda: nn.Activation(Entmax(1.5), learn="alpha", bounds=(1.0, math.inf)), "above 0 and finite"),
        (lambda: nn.Activation(Bounded(0.5, 1.5), learn="alpha", bounds=(1.0, 3.0)), "in its range, from 1 to 2, got"),
        (lambda: nn.Activation(SparseSoftmax(k=2), learn="k", bounds=(1, 3)), "have no derivative by k"),
        (lambda: nn.Loss(SparseSoftmax(p=0.5), learn="p", bounds=(0, 1)), "have no derivative by p"),
        (lambda: nn.Activation(Taylor(2), learn="order", bounds=(1, 3)), "have no derivative by order"),
        (lambda: nn.Activation(PerturbMax(nodes=32), learn="nodes", bounds=(8, 99)), "have no derivative by nodes"),
        (lambda: nn.Attention(4, 2, SparseSoftmax(k=2), learn="k", bounds=(1, 3)), "have no derivative by k"),
    ],
)
def test_errors_of_learning(make, words):
    with pytest.raises(ValueError, match=words):
        make()


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


def test_a_module_needs_a_mapping():
    for make in (nn.Activation, nn.Loss):
        with pytest.raises(TypeError, match="expected a mapping"):
            make(2)
        with pytest.raises(TypeError, match="expected a mapping"):
            make(Sparsemax)


# -- copies -----------------------------------------------------------------------------------------------------------


def examples():
    return {
        "plain": nn.Activation(Sparsemax(), dim=0),
        "parameter": nn.Activation(Entmax(Parameter(torch.tensor(1.4)))),
        "buffer": nn.Activation(Entmax(torch.tensor([[1.0], [1.2], [1.5], [3.0]]))),
        "learned": nn.Activation(Entmax(1.4), learn="alpha"),
        "ratio": nn.Activation(Ratio.square()),
        "perturb": nn.Activation(PerturbMax("laplace", scale=0.5)),
        "loss": nn.Loss(Entmax(1.3), torch.arange(1.0, 6.0), label_smoothing=0.1),
        "learned loss": nn.Loss(Entmax(1.3), learn="alpha"),
        "head": nn.MarginHead(5, 3, Sparsemax(), margin=A.margins.ArcFace(0.3), scale=8.0),
    }


def outcome(module):
    x, t = scores(4), torch.tensor([0, 1, 2, 0])
    return module(x) if isinstance(module, nn.Activation) else module(x, t)


def through_file(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("name", examples())
@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), through_file], ids=["deepcopy", "pickle", "file"]
)
def test_copies(name, way):
    module = examples()[name]
    twin = way(module)
    assert type(twin) is type(module)
    assert repr(twin) == repr(module)
    torch.testing.assert_close(outcome(twin), outcome(module))
    assert not set(map(id, twin.parameters())) & set(map(id, module.parameters()))
    for (n, a), (m, b) in zip(module.named_parameters(), twin.named_parameters()):
        assert n == m
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", examples())
def test_state_dict(name):
    module, other = examples()[name], examples()[name]
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(1.1)
    missing = other.load_state_dict(module.state_dict())
    assert not missing.missing_keys
    assert not missing.unexpected_keys
    torch.testing.assert_close(outcome(other), outcome(module))
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))


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


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plain", "Activation(Sparsemax(), dim=0)"), ("parameter", "Activation(Entmax(alpha=<tensor>), dim=-1)"),
        ("learned", "Activation(Entmax(alpha learned in (1.0, 2.0)), dim=-1)"), ("loss", "Loss(Entmax(alpha=1.3))"),
        ("head", "MarginHead(5 -> 3, Sparsemax(), ArcFace(m=0.3), scale=8.0)"),
    ],
)  # fmt: skip
def test_repr(name, words):
    got = repr(examples()[name])
    if name == "head":
        assert got.startswith("MarginHead(5 -> 3, Sparsemax(), ")
        assert "0.3" in got
        assert "scale=8.0" in got
    else:
        assert got == words


# -- learning ---------------------------------------------------------------------------------------------------------


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
