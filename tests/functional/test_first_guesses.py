"""What newcomers try first: a map that is called, names for maps, names of other libraries, classes along axis 1; and what happens now."""

import copy
import dataclasses
import importlib
import inspect
import pickle
import pkgutil
import re
import subprocess
import sys
import warnings

import numpy as np
import pytest
from kinds import KINDS, back, jax_in_the_whole_battery

import anymax as am
from anymax import Entmax, PerturbMax, Ratio, Softmax, Sparsemax, SparseSoftmax
from anymax._core import names
from anymax._core.providers import providers
from anymax.losses import targets
from anymax.mappings import CATALOGUE

X = np.array([[2.0, 1.0, 0.1], [0.5, 0.4, -1.0]])
Y = np.array([0, 2])
each_kind = pytest.mark.parametrize("kind", KINDS)


def same(a, b):
    np.testing.assert_array_equal(back(a), back(b))


# -- a map is called as `apply` ----------------------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("mapping", [Softmax(), Sparsemax(), Entmax(1.3), SparseSoftmax(k=2), Ratio.square()])
def test_a_map_is_called_like_apply(kind, mapping):
    x, keep = KINDS[kind](X), KINDS[kind](X > -1)
    p = mapping(x)
    assert type(p) is type(x)
    same(p, am.apply(mapping, x))
    same(mapping(x, 0), am.apply(mapping, x, axis=0))
    same(mapping(x, dim=0, mask=keep), am.apply(mapping, x, 0, mask=keep))
    assert mapping(x, dtype=x.dtype).dtype == x.dtype


def test_a_called_map_writes_to_out():
    out = np.empty_like(X)
    assert Sparsemax()(X, out=out) is out
    same(out, am.sparsemax(X))


@pytest.mark.parametrize("kind", CATALOGUE)
def test_a_callable_map_is_still_data(kind):
    mapping = Ratio.relu() if kind is Ratio else kind(**kind.example)
    assert callable(mapping)
    assert hash(mapping) == hash(copy.copy(mapping))
    assert pickle.loads(pickle.dumps(mapping)) == mapping == copy.deepcopy(mapping)
    assert dataclasses.is_dataclass(mapping)
    with pytest.raises(dataclasses.FrozenInstanceError):
        mapping.name = "other"
    np.testing.assert_allclose(mapping(X), am.apply(mapping, X))


def test_a_called_map_passes_every_transform_of_torch():
    torch = pytest.importorskip("torch")
    x = torch.tensor(X, requires_grad=True)
    p = Sparsemax()(x)
    p[1, 0].backward()
    assert x.grad.abs().sum() > 0
    x = torch.tensor(X)
    same(torch.func.vmap(Sparsemax())(x), am.sparsemax(x))
    np.testing.assert_allclose(torch.func.jacrev(Entmax(1.5))(x[0]), am.jacobian(Entmax(1.5), x[0]), atol=1e-12)
    compiled = torch.compile(lambda v: Sparsemax()(v), fullgraph=True, backend="eager")
    np.testing.assert_allclose(compiled(x), am.sparsemax(x), atol=1e-12)


def test_a_called_map_passes_every_transform_of_jax():
    jax = pytest.importorskip("jax")
    x = jax.numpy.asarray(X, "float32")
    same(jax.jit(Sparsemax())(x), am.sparsemax(x))
    same(jax.vmap(Sparsemax())(x), am.sparsemax(x))
    assert jax.jacobian(Sparsemax())(x[0]).shape == (3, 3)


def test_a_map_is_no_function_of_a_score_in_pictures():
    from anymax.plot import inputs

    assert [m.name for m in inputs.maps_of(Sparsemax(), ())] == ["sparsemax"]


def test_a_map_in_sequential_is_an_activation():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="is not a Module subclass"):
        torch.nn.Sequential(torch.nn.Linear(3, 3), Sparsemax())  # torch's own words: it takes modules alone
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), am.nn.Activation("sparsemax"))
    np.testing.assert_allclose(model(torch.ones(2, 3)).sum(-1).detach(), 1, rtol=1e-6)


# -- the name of a map, wherever a map is taken --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mapping"),
    [
        ("softmax", Softmax()),
        ("entmax:alpha=1.3", Entmax(1.3)),
        ("entmax15", Entmax(1.5)),
        ("Entmax-15", Entmax(1.5)),
        ("SparseSoftmax: k = 2", SparseSoftmax(k=2)),
        ("sparse_softmax:p=0.9", SparseSoftmax(p=0.9)),
        ("perturb-max:noise=gumbel,scale=2", PerturbMax("gumbel", scale=2)),
        ("taylor_softmax:order=4", am.Taylor(4)),
        ("square", Ratio.square()),
    ],
)
def test_a_name_means_a_map(name, mapping):
    assert names.as_mapping(name) == mapping
    same(am.apply(name, X), mapping(X))


def test_a_name_is_read_once(monkeypatch):
    monkeypatch.setattr(names, "_by_spec", {})
    monkeypatch.setattr(names, "_MOST", 3)
    assert names.named("entmax:alpha=1.3") is names.named("entmax:alpha=1.3")
    for _ in range(2):
        with pytest.raises(ValueError, match="beta"):
            names.named("entmax:beta=1.3")
    for k in range(1, 6):
        assert names.named(f"sparse_softmax:k={k}") == SparseSoftmax(k=k)
        assert len(names._by_spec) <= 3


def test_every_map_without_a_function_has_its_name():
    for kind in CATALOGUE:
        if kind is not Ratio:
            words = ",".join(f"{key}={value}" for key, value in kind.example.items())
            assert names.as_mapping(f"{kind.name}:{words}" if words else kind.name) == kind(**kind.example)


@jax_in_the_whole_battery
@each_kind
def test_names_wherever_a_map_is_taken(kind):
    x, y = KINDS[kind](X), KINDS[kind](Y)
    name, m = "entmax:alpha=1.3", Entmax(1.3)
    for verb in (am.apply, am.log_apply, am.jacobian, am.inspection.jacobian_norm):
        same(verb(name, x), verb(m, x))
    for got, want in zip(am.threshold(name, x), am.threshold(m, x), strict=True):
        same(got, want)
    for verb in (am.fenchel_young, am.nll, am.smoothed_nll, am.accuracy_loss, am.stop_gradient_loss):
        same(verb(name, x, y), verb(m, x, y))
    same(am.margin_loss(name, x / 9, y), am.margin_loss(m, x / 9, y))
    same(am.apply(name, x, axis=(0, 1)), m(x, axis=(0, 1)))
    same(am.sample(name, x, generator=0), am.sample(m, x, generator=0))
    same(am.gumbel_softmax(x, generator=0, mapping=name), am.gumbel_softmax(x, generator=0, mapping=m))
    same(am.attention(x, x, x, name), am.attention(x, x, x, m))
    assert am.choose("forward", name, x) is am.choose("forward", m, x)
    assert am.explain(name, x) == am.explain(m, x)
    assert am.explain_attention(x, x, x, name) == am.explain_attention(x, x, x, m)
    assert am.facts(name) == m.facts


def test_names_in_modules_pictures_and_checks():
    assert "sparse" in am.check_mapping("sparsemax") or am.check_mapping("sparsemax") == am.check_mapping(Sparsemax())
    torch = pytest.importorskip("torch")
    x, y = torch.tensor(X), torch.tensor(Y)
    same(am.nn.Loss("sparsemax")(x, y), am.sparsemax_loss(x, y))
    same(am.nn.Activation("entmax:alpha=1.3")(x), am.entmax(x, alpha=1.3))
    assert am.nn.Activation("entmax", learn="alpha").mapping.alpha.requires_grad
    assert am.nn.Attention(6, 2, "sparsemax").mapping == Sparsemax()
    assert am.nn.MarginHead(3, 4, "sparsemax").mapping == Sparsemax()
    pytest.importorskip("matplotlib")
    from anymax import plot

    assert [line.get_label() for line in plot.curves(["softmax", Sparsemax()]).lines[:2]] == ["softmax", "sparsemax"]
    assert plot.curves("sparsemax").lines


def test_a_name_under_a_gradient_and_under_a_compiler():
    torch = pytest.importorskip("torch")
    x = torch.tensor(X, requires_grad=True)
    am.apply("sparsemax", x).square().sum().backward()
    other = torch.tensor(X, requires_grad=True)
    am.sparsemax(other).square().sum().backward()
    same(x.grad, other.grad)
    compiled = torch.compile(lambda v: am.apply("entmax:alpha=1.3", v), fullgraph=True, backend="eager")
    np.testing.assert_allclose(compiled(torch.tensor(X)), am.entmax(X, alpha=1.3), atol=1e-12)


def test_a_map_of_ones_own_in_the_catalogue_has_its_name(monkeypatch):
    @dataclasses.dataclass(frozen=True, eq=False)
    class Sharper(Sparsemax):
        by: float
        name = "sharper"

        def forward(self, x, xp):
            return super().forward(self.by * x, xp)

    monkeypatch.setattr(providers, "catalogue", (*CATALOGUE, Sharper))
    np.testing.assert_allclose(am.apply("sharper:by=2", X), am.sparsemax(2 * X))
    with pytest.raises(ValueError, match="sharper needs by; write sharper:by="):
        am.apply("sharper", X)


class Model:
    def __call__(self, x):
        return x


NO_MAP = {
    "class": (Sparsemax, "got the class Sparsemax; add (): Sparsemax()"),
    "class that needs": (Ratio, "got the class Ratio; add (): Ratio(u=...)"),
    "function": (am.sparsemax, "got the function sparsemax; give its map, by name: 'sparsemax'"),
    "function, 1.5": (am.entmax15, "got the function entmax15; give its map, by name: 'entmax15'"),
    "maker": (
        am.topk,
        "got the function topk, which makes a transform; that goes before a map: say transform=topk(...), or put the scores",
    ),
    "after a map": (am.mix, "got the function mix, which goes after a map: mix(p, prior, weight)"),
    "other function": (np.exp, "got the function exp; a function u of your own, u(x) >= 0, is the map anymax.Ratio(u)"),
    "scores": (X, "got ndarray of shape (2, 3); the mapping comes first, the scores after it"),
    "None": (None, "got None"),
    "number": (1.5, "got 1.5"),
    "list": ([Sparsemax()], "got [Sparsemax()]"),
    "pair": ((1.0, 2.0), "got (1.0, 2.0)"),
    "tuple": ((1, 2, 3, 4, 5, 6), "got (1, 2, 3, 4, 5, 6)"),
    "model": (Model(), "a value of the type Model"),
}
TAKE_A_MAP = {
    "apply": am.apply, "log_apply": am.log_apply, "jacobian": am.jacobian, "threshold": am.threshold, "explain": am.explain,
    "sample": lambda m, x: am.sample(m, x, generator=0), "choose": lambda m, x: am.choose("forward", m, x),
    "fenchel_young": lambda m, x: am.fenchel_young(m, x, Y), "nll": lambda m, x: am.nll(m, x, Y),
    "smoothed_nll": lambda m, x: am.smoothed_nll(m, x, Y),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "given"), [("numpy", given) for given in NO_MAP] + [(kind, "class") for kind in KINDS if kind != "numpy"]
)
@pytest.mark.parametrize("verb", TAKE_A_MAP)
def test_what_is_no_map_says_what_to_write(verb, kind, given):
    value, words = NO_MAP[given]
    with pytest.raises(TypeError, match=f"expected a mapping such as.*{re.escape(words)}"):
        TAKE_A_MAP[verb](value, KINDS[kind](X))


# -- names of other libraries ----------------------------------------------------------------------------------------------------------


@each_kind
def test_attention_takes_torchs_names(kind):
    q, k, v = (KINDS[kind](X + i) for i in range(3))
    seen = KINDS[kind](np.array([[True, False], [True, True]]))
    same(am.attention(query=q, key=k, value=v), am.attention(q, k, v))
    same(am.attention(q, k, value=v, attn_mask=seen), am.attention(q, k, v, mask=seen))
    added = KINDS[kind](np.array([[0.0, -np.inf], [0.5, 0.0]]))
    same(am.attention(q, k, v, attn_mask=added), am.attention(q, k, v, mask=added))
    same(am.linear_attention(query=q, key=k, value=v), am.linear_attention(q, k, v))
    assert am.explain_attention(query=q, key=k, value=v) == am.explain_attention(q, k, v)


def test_attention_by_torchs_names_is_torchs():
    torch = pytest.importorskip("torch")
    q, k, v = torch.randn(3, 2, 4, 5, 8, generator=torch.Generator().manual_seed(0))
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    names = {"query": q, "key": k, "value": v, "attn_mask": seen, "dropout_p": 0.0, "is_causal": False, "scale": 0.3}
    want = torch.nn.functional.scaled_dot_product_attention(**names)
    torch.testing.assert_close(am.attention(**names), want)


def test_samplers_take_the_names_of_torch_and_jax():
    same(am.gumbel_softmax(logits=X, tau=0.5, generator=0), am.gumbel_softmax(X, 0.5, generator=0))
    same(am.gumbel_max(logits=X, generator=0), am.gumbel_max(X, generator=0))
    if "jax" in KINDS:
        import jax

        x, key = jax.numpy.asarray(X), jax.random.key(0)
        same(am.sample("softmax", x, key=key), am.sample("softmax", x, generator=key))


@each_kind
def test_losses_take_the_names_of_torch_and_tensorflow(kind):
    x, y = KINDS[kind](X), KINDS[kind](Y)
    same(am.cross_entropy(input=x, target=y), am.cross_entropy(x, y))
    same(am.sparsemax_loss(logits=x, labels=y, reduction="sum"), am.sparsemax_loss(x, y, reduction="sum"))
    same(am.fenchel_young("entmax", logits=x, labels=y), am.fenchel_young("entmax", x, y))
    same(am.margin_loss("softmax", input=x / 9, target=y), am.margin_loss("softmax", x / 9, y))
    same(am.multilabel_softmax_loss(logits=x, labels=x > 0), am.multilabel_softmax_loss(x, x > 0))


# -- the second argument: the parameter of a map that has one, else the axis ----------------------------------------------------------


def test_the_second_argument():
    same(am.softmax(X, 0), am.softmax(X, axis=0))
    same(am.sparsemax(X, 0), am.sparsemax(X, axis=0))
    same(am.entmax(X, 1.3), am.entmax(X, alpha=1.3))
    same(am.entmax(X, 1.3, 0), am.entmax(X, alpha=1.3, axis=0))
    same(am.taylor_softmax(X, 4, 0), am.taylor_softmax(X, order=4, axis=0))
    same(am.budget(X, 2, 0), am.budget(X, k=2, axis=0))


# -- classes along axis 1 or along the last --------------------------------------------------------------------------------------------


@pytest.fixture
def not_yet_warned(monkeypatch):
    monkeypatch.setattr(targets, "_warned", False)


LOSSES = {
    "cross_entropy": am.cross_entropy,
    "sparsemax_loss": am.sparsemax_loss,
    "taylor_softmax_loss": am.taylor_softmax_loss,
    "smoothed_nll": lambda x, y, **o: am.smoothed_nll(Softmax(), x, y, **o),
    "margin_loss": lambda x, y, **o: am.margin_loss(Softmax(), x / 9, y, **o),
}


@each_kind
@pytest.mark.parametrize("name", LOSSES)
def test_shapes_that_leave_the_axis_open_warn_once(kind, name, not_yet_warned):
    loss, x = LOSSES[name], KINDS[kind](np.zeros((2, 4, 4)))
    y = KINDS[kind](np.zeros((2, 4), int))
    with pytest.warns(UserWarning, match=r"shape \(2, 4, 4\): the classes are axis 1.*say axis=1 or axis=-1") as seen:
        _ = loss(x, y), loss(x, y)
    assert [w.filename for w in seen] == [__file__]


@pytest.mark.parametrize(
    ("shape", "target", "options"),
    [
        ((2, 4, 4), (2, 4), {"axis": 1}),
        ((2, 4, 4), (2, 4), {"axis": -1}),
        ((2, 4, 4), (2, 4), {"dim": 2}),
        ((2, 4, 5), (2, 5), {}),
        ((4, 4), (4,), {}),
        ((2, 3, 4, 4), (2, 4, 4), {}),
        ((2, 4, 4), (2, 4, 4), {}),  # a distribution
    ],
)
def test_other_shapes_do_not_warn(shape, target, options, not_yet_warned):
    y = np.zeros(target, int) if len(target) < len(shape) else np.full(target, 0.25)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        am.cross_entropy(np.zeros(shape), y, **options)


def test_no_warning_while_a_compiler_looks(not_yet_warned):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        if "jax" in KINDS:
            import jax

            x, y = jax.numpy.zeros((2, 4, 4)), jax.numpy.zeros((2, 4), int)
            jax.jit(am.cross_entropy)(x, y)
            jax.grad(lambda v: am.sparsemax_loss(v, y))(x)
        if "torch" in KINDS:
            import torch

            x, y = torch.zeros(2, 4, 4), torch.zeros(2, 4, dtype=torch.int64)
            torch.compile(am.cross_entropy, backend="eager")(x, y)
            torch.func.grad(lambda v: am.sparsemax_loss(v, y))(x)
    assert not targets._warned


@pytest.mark.parametrize("word", ["float32", np.float32, np.dtype("float32"), "torch", "jax"])
@each_kind
def test_a_dtype_in_the_words_of_any_framework(kind, word):
    if word in ("torch", "jax"):
        module = pytest.importorskip(word if word == "torch" else "jax.numpy")
        word = module.float32
    if kind == "strict":
        pytest.skip("takes its own dtypes")
    p = am.softmax(KINDS[kind](X), dtype=word)
    assert str(p.dtype).endswith("float32")


@pytest.mark.whole(lambda module: module in ("hf", "sklearn"))
@pytest.mark.parametrize(
    ("module", "missing", "words"),
    [
        ("nn", "torch", "anymax.nn needs torch; install it with: pip install 'anymax[torch]'"),
        ("hf", "torch", "anymax.hf needs torch; install it with: pip install 'anymax[hf,torch]'"),
        ("hf", "transformers", "anymax.hf needs transformers 5 or later; install it with: pip install 'anymax[hf]'"),
        ("sklearn", "sklearn", "anymax.sklearn needs scikit-learn; install it with: pip install 'anymax[sklearn]'"),
        ("plot", "matplotlib", "anymax.plot needs matplotlib; install it with: pip install 'anymax[plot]'"),
    ],
)
def test_a_module_without_its_package_says_what_to_install(module, missing, words):
    """In a process of its own: modules that are loaded stay loaded."""
    code = f"""
import sys
sys.modules[{missing!r}] = None
import anymax
import importlib
try:
    importlib.import_module("anymax.{module}")
    anymax.plot.curves()
except ImportError as error:
    print(error)
if {module!r} != "plot":
    assert not hasattr(anymax, {module!r})
    try:
        anymax.{module}
    except AttributeError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.splitlines()) == {words}


ALONE = """
import importlib.abc, inspect, pkgutil, pydoc, sys

class Alone(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in ("numpy", "array_api_compat", "anymax"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Alone())
import anymax

absent = ["hf", "nn", "numpyro", "sklearn", "vllm"]  # of what `dir(anymax)` lists
public = [name for _, name, _ in pkgutil.iter_modules(anymax.__path__) if not name.startswith("_")]
lacking = []
for name in ["anymax", *(f"anymax.{name}" for name in public)]:
    try:
        assert len(pydoc.render_doc(name)) > 500
    except pydoc.ErrorDuringImport as error:
        assert "install it with: pip install 'anymax[" in str(error), error
        lacking.append(name)
    else:
        assert {each for each, _ in inspect.getmembers(sys.modules[name])} >= {*dir(sys.modules[name])} - {*absent}, name
print(*lacking)
"""


def test_help_with_numpy_alone():
    """`help`, `pydoc` and `inspect.getmembers` go over all names."""
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [f"anymax.{name}" for name in ("hf", "nn", "numpyro", "sklearn", "vllm")]


@pytest.mark.whole(lambda name: name in (".hf", ".nn", ".numpyro", ".sklearn", ".vllm"))
@pytest.mark.parametrize(
    "name", [f".{m.name}" for m in pkgutil.iter_modules(am.__path__) if not m.name.startswith("_")]
)
def test_every_name_that_a_module_lists_is_there(name):
    module = importlib.import_module(name, "anymax")
    listed = set(dir(module))
    assert {each for each, _ in inspect.getmembers(module)} == listed >= set(getattr(module, "__all__", ()))


# -- options in the wrong place ----------------------------------------------------------------------------------------------------


def test_a_map_of_ones_own_takes_any_names():
    class Scaled(Sparsemax):
        def __init__(self, **options):
            object.__setattr__(self, "options", options)

    assert Scaled(dim=2).options == {"dim": 2}


@each_kind
def test_entropy_of_what_does_not_sum_to_1_warns(kind):
    with pytest.warns(
        UserWarning, match=r"a row does not sum to 1; for scores.*anymax\.entropy\(anymax\.softmax\(x\)\)"
    ) as seen:
        am.entropy(KINDS[kind](np.array([[0.5, 0.9, 0.8]])))
    assert [w.filename for w in seen] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for p in (am.softmax(X), am.budget(X, 2), X[:1] * 0, np.array([[np.nan, 1.0]])):
            am.entropy(KINDS[kind](p))


def test_help_begins_with_calls_that_run():
    """`help(anymax)` shows the docstring first: about 20 lines, with the calls that most people need."""
    text = am.__doc__
    assert len(text.splitlines()) <= 22
    calls = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    assert len(calls) == 10
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 6))
    q = rng.normal(size=(1, 1, 4, 6))
    given = {"anymax": am, "x": x, "scores": x, "target": np.array([0, 1, 2, 3]), "h": rng.normal(size=(4, 3))}
    given |= {"W": rng.normal(size=(6, 3)), "q": q, "k": q, "v": q, "index": np.array([0, 0, 1, 1])}
    for call in calls:
        exec(call, given)


@pytest.mark.parametrize("kind", KINDS)
def test_axis_none_is_the_whole_array(kind):
    """As in scipy.special.softmax and jax.nn.softmax; what works along one axis says so."""
    x = np.linspace(-1, 1, 12).reshape(3, 4)
    given, e = KINDS[kind](x), np.exp(x)
    np.testing.assert_allclose(back(am.softmax(given, axis=None)), e / e.sum(), rtol=1e-5)
    np.testing.assert_allclose(back(am.softmax(given)), e / e.sum(-1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(back(am.softmax(given, dim=0)), e / e.sum(0), rtol=1e-5)
    np.testing.assert_allclose(back(am.log_softmax(given, axis=None)), np.log(e / e.sum()), rtol=1e-4)
    np.testing.assert_allclose(back(am.logsumexp(given, axis=None)), np.log(e.sum()), rtol=1e-5)
    for verb in (
        am.sparsemax,
        am.entmax,
        am.entmax15,
        am.sigsoftmax,
        am.taylor_softmax,
        am.normmax,
        am.perturb_max,
        Sparsemax(),
    ):
        np.testing.assert_allclose(back(verb(given, axis=None)).sum(), 1.0, rtol=1e-5)
    assert back(am.threshold("sparsemax", given, axis=None).support) == (am.sparsemax(x.ravel()) > 0).sum()
    assert back(am.sample("softmax", given, axis=None, generator=0, num_samples=5)).shape == (5,)
    for verb in (am.softmax, am.log_softmax, am.taylor_softmax, Sparsemax(), am.logsumexp, am.soft_rank):
        np.testing.assert_array_equal(back(verb(given, dim=None)), back(verb(given)))  # not given
        np.testing.assert_array_equal(back(verb(given, axis=None, dim=None)), back(verb(given, axis=None)))
    if kind == "torch":
        np.testing.assert_array_equal(am.nn.Activation("softmax", dim=None)(given), am.softmax(given))
    for one_axis in (
        lambda **axis: am.topk(2, **axis)(given),
        lambda **axis: am.segment_apply("softmax", given, lengths=[3], **axis),
    ):
        with pytest.raises(
            TypeError, match="axis: expected an integer, got None; several axes, or None for all, have no"
        ):
            one_axis(axis=None)
