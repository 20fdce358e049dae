"""Names of other packages, misspellings and first guesses: the error says what to write, and what it says exists and runs."""

import re
import subprocess
import sys
import time

import numpy as np
import pytest

import anymax as am
from anymax._core import elsewhere, names

NAMES = {  # of other packages, misspelled or guessed -> what is said
    "entmax_bisect": "anymax.entmax(x, alpha=1.3)",
    "sparsemax_bisect": "anymax.sparsemax(x)",
    "normmax_bisect": "anymax.normmax(x, alpha=2)",
    "budget_bisect": "anymax.budget(x, k=2)",
    "SparsemaxLoss": "anymax.nn.Loss(anymax.Sparsemax())",
    "Entmax15": "anymax.nn.Activation(anymax.Entmax(1.5), dim=-1)",
    "Entmax15Loss": "anymax.nn.Loss(anymax.Entmax(1.5)",
    "EntmaxBisect": "anymax.nn.Activation(anymax.Entmax(1.3))",
    "entmax_bisect_loss": "anymax.entmax_loss(x, y, alpha=1.3",
    "CrossEntropyLoss": "anymax.nn.Loss(anymax.Softmax())",
    "MultiheadAttention": "anymax.nn.Attention(8, 2",
    "scaled_dot_product_attention": "anymax.attention(q4, k4, v4)",
    "dot_product_attention": "the heads come before the positions",
    "Sparsemx": "did you mean anymax.Sparsemax?",
    "flash_attn_func": "anymax.attention(q, k, v, is_causal=True)",
    "flash_attn_varlen_func": "anymax.attention_varlen(",
    "flex_attention": "anymax.attention(q, k, v, mask=..., bias=...)",
    "segment_softmax": 'anymax.segment_apply("softmax", x, index=index',
    "scatter_softmax": 'anymax.segment_apply("softmax", src, index=index)',
    "top_p": "anymax.topp(0.9)",
    "top_k": "anymax.topk(50)",
    "min_p": "anymax.minp(0.1)",
    "TopKLogitsWarper": "anymax.topk(50)",
    "linear_cross_entropy": "anymax.linear_loss(e, W, y)",
    "softmax_cross_entropy_with_integer_labels": "anymax.cross_entropy(x, y",
    "multiclass_sparsemax_loss": "anymax.sparsemax_loss(x, y",
    "projection_simplex": "anymax.sparsemax",
    "selective_log_softmax": 'anymax.log_prob("softmax", logits, ids)',
    "kl_div": "anymax.likelihood.kl(",
    "multinomial": "anymax.sample(anymax.Softmax(), x",
    "ArcFaceLoss": "anymax.nn.MarginHead(",
    "log_sparsemax": "write anymax.log_apply('sparsemax', x)",
    "ArcFace": "it is anymax.margins.ArcFace",
    "sparsmax": "did you mean anymax.sparsemax?",
    "sparse_max": "did you mean anymax.sparsemax?",
    "logsoftmax": "did you mean anymax.log_softmax?",
    "Entmx": "did you mean anymax.Entmax?",
    "transforms.temprature": "did you mean anymax.transforms.temperature?",
    "transforms.top_k": "anymax.topk(50)",
    "margins.Arcface": "did you mean anymax.margins.ArcFace?",
    "sampling.gumbel_top_k": "did you mean anymax.sampling.gumbel_topk?",
    "distributed.log_softmax": "anymax.log_softmax(x",
    "info_nce": "anymax.contrastive_loss(h, h, temperature=0.07)",
    "cut_cross_entropy": "anymax.linear_loss(h, W, y)",
    "token_log_probs": "anymax.linear_log_prob(h, W, y)",
    "topk_softmax": "write anymax.sparse_softmax(x, k=3) for topk_softmax(x, 3)",
    "TopK": "anymax.SparseSoftmax(k=3)",
    "maps": "anymax.mappings.CATALOGUE",
    "list_maps": "anymax inventory prints all maps",
    "get_map": 'anymax.apply("entmax:alpha=1.3", x)',
    "hardmax": "anymax.softmax(anymax.temperature(0)(x))",
    "argmax": "use the argmax of your framework",
    "F": "its functions are in the package itself",
    "sigmoid": 'anymax.apply(anymax.Elementwise("sigmoid"), x)',
    "softmin": "anymax.softmax(-x, dim=-1)",
    "Softmax2d": "anymax.softmax(x, axis=-3)",
    "NLLLoss": "it takes scores, not log p",
    "BCEWithLogitsLoss": 'anymax.nn.Loss(anymax.Elementwise("sigmoid"))',
    "binary_cross_entropy_with_logits": 'anymax.fenchel_young(anymax.Elementwise("sigmoid"), x, keep * 1.0)',
    "taylor": "write anymax.apply('taylor', x)",
    "square": "write anymax.apply('square', x)",
    "bounded": "write anymax.apply('bounded:upper=0.4', x)",
    "bounded_attention": "write anymax.attention(q, k, v, 'bounded:upper=0.4')",
    "softmax1": "write anymax.apply(anymax.Sink(), x) for softmax1(x)",
    "quiet_softmax": "write anymax.apply(anymax.Sink(), x)",
    "focal_loss": "there is no function for it",
    "choice": 'anymax.sample("softmax", x, generator=g)',
    "set_seed": 'anymax.sample("softmax", x, generator=0)',
    "inventory": "anymax inventory prints all maps",
    "compare": "anymax compare 2 1 0 prints",
    "distributions": "anymax.nn.Categorical(mapping, scores)",
    "export": "torch.export.export(model, (x,))",
    "jax": "functions take arrays of NumPy, torch and JAX alike",
    "nn.EntmaxLoss": "anymax.nn.Loss(anymax.Entmax(1.5))",
    "categorical": 'anymax.sample("softmax", x, generator=key)',
    "sparse_categorical_crossentropy": "anymax.cross_entropy(x, y, axis=-1",
    "masked_softmax": "anymax.softmax(x, mask=keep)",
    "temperature_softmax": "anymax.temperature(0.7)",
    "nucleus_sampling": "anymax.topp(0.9)",
    "top_k_top_p_filtering": "anymax.compose(anymax.topk(50), anymax.topp(0.9))",
    "beam_search": "anymax.sampling.topk_log_prob(",
    "alpha_entmax": "anymax.entmax(x, alpha=1.3)",
    "project_simplex": "anymax.sparsemax(x)",
    "softmax_loss": "anymax.cross_entropy(x, y)",
    "sdpa": "anymax.attention(q, k, v)",
    "edge_softmax": 'anymax.segment_apply("softmax", x, index=targets)',
    "engines": "anymax.explain(",
    "set_engine": 'write with anymax.use("reference")',
    "LogisticRegression": "anymax.sklearn.MappingClassifier()",
    "MappingClassifier": "it is anymax.sklearn.MappingClassifier",
    "LogitsProcessor": "it is anymax.hf.LogitsProcessor",
    "curves": "it is anymax.plot.curves",
    "arcface": "did you mean anymax.margins.ArcFace?",
    "project_onto_simplex": "write anymax.sparsemax(x) for ",
    "set_backend": "the kind of x decides",
    "scatter": "write anymax.segment_apply(",
    "SparsemaxClassifier": 'anymax.sklearn.MappingClassifier("sparsemax")',
    "tsallis": "write anymax.entmax(x, alpha=1.3) for tsallis(x, 1.3)",
    "sparsemax_attention": "write anymax.attention(q, k, v, 'sparsemax')",
    "entmax15_attention": "write anymax.attention(q, k, v, 'entmax15')",
    "nn.Softmax": "anymax.nn.Activation(anymax.Softmax())",
    "nn.CrossEntropyLoss": "anymax.nn.Loss(anymax.Softmax())",
    "nn.MultiheadAttention": "anymax.nn.Attention(",
    "nn.LogSoftmax": "anymax.log_softmax(x)",
    "nn.functional": "its functions are in the package itself",
    "nn.AdaptiveLogSoftmaxWithLoss": "anymax.nn.LinearLoss(",
    "nn.Activtion": "did you mean anymax.nn.Activation?",
    "nn.sparsemax": "anymax.sparsemax",
    "nn.Entmax": "anymax.nn.Activation(anymax.Entmax(...)) for the module",
    "Activation": "it is anymax.nn.Activation",
}


@pytest.mark.parametrize("path", NAMES)
def test_a_name_of_another_package_says_what_it_is_here(path):
    if path.startswith("nn.") or path == "Activation":
        pytest.importorskip("torch")
    module, _, name = path.rpartition(".")
    module = getattr(am, module) if module else am
    assert not hasattr(module, name)
    with pytest.raises(AttributeError) as raised:
        getattr(module, name)
    assert NAMES[path] in str(raised.value)
    assert str(raised.value).startswith(f"module {module.__name__!r} has no attribute {name!r}; ")
    assert raised.value.name == name


NOT_RUN = [table for table in elsewhere.tables() if not table["package"]]


def test_every_name_in_an_answer_exists():
    """The rows of packages run in test_docs.py; of the others every name of anymax is looked up."""
    for row in (row for table in NOT_RUN for row in table["rows"]):
        for path in re.findall(r"\banymax((?:\.\w+)*)", row["new"] + row.get("note", "")):
            if path.startswith((".nn", ".hf")):
                pytest.importorskip("torch")
            if path.startswith(".hf"):
                pytest.importorskip("transformers")
            value = am
            for name in filter(None, path.split(".")):
                value = getattr(value, name)


@pytest.mark.parametrize("row", NOT_RUN[-1]["rows"], ids=[row["old"] for row in NOT_RUN[-1]["rows"]])
def test_the_answer_to_a_first_guess_runs(row):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 6))
    q = rng.normal(size=(1, 1, 4, 6))
    given = {
        "anymax": am,
        "np": np,
        "x": x,
        "y": np.array([0, 1, 2, 3]),
        "keep": x > -1,
        "q": q,
        "k": q,
        "v": q,
        "g": 0,
        "h": q[0, 0],
        "W": rng.normal(size=(6, 6)),
        "ids": np.array([[0, 1]] * 4),
        "log_q": np.log([[0.5, 0.2]] * 4),
    }
    if "lengths" in row["new"]:
        given["x"] = x[0]
    exec(row["new"], given)


def test_a_module_that_is_not_loaded_is_read_for_its_names():
    code = "import sys, anymax\ntry: anymax.MappingClassifier\nexcept AttributeError as e: print(e, 'sklearn' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("it is anymax.sklearn.MappingClassifier False")


def test_the_names_in_the_text_of_a_module_are_its_own(monkeypatch):
    for module in ("plot", "distributed", "linear", "transforms"):
        names = getattr(am, module).__all__
        monkeypatch.delitem(sys.modules, f"anymax.{module}")
        assert elsewhere.listed(f"anymax.{module}") == names
        monkeypatch.undo()


def test_a_name_like_no_other_gets_no_advice():
    for name in ("zzz", "_private", "__wrapped__"):
        with pytest.raises(AttributeError, match=rf"^module 'anymax' has no attribute '{name}'$"):
            getattr(am, name)


def _by_estimator(name):
    pytest.importorskip("sklearn")
    from anymax.sklearn import MappingClassifier

    MappingClassifier(name).fit([[0.0], [1.0]], [0, 1])


def _by_module(name):
    pytest.importorskip("torch")
    from anymax.nn import Activation

    Activation(name)


def _by_command(name):
    testing = pytest.importorskip("click.testing")
    pytest.importorskip("rich")
    from anymax.cli.commands import program

    done = testing.CliRunner().invoke(program, ["compare", "2", "1", "-m", name])
    assert done.exit_code == 2, done.output
    raise ValueError(done.output)


def _by_attribute(name):
    with pytest.raises(AttributeError) as error:
        getattr(am, name)
    assert "did you mean" not in str(error.value)
    am.Sink(name)


READERS = {
    "apply": lambda name: am.apply(name, [1.0, 2.0]),
    "explain": lambda name: am.explain(name, np.ones(3)),
    "loss": lambda name: am.nll(name, np.ones((1, 3)), [0]),
    "a map in a map": am.Sink,
    "strength of a prior": lambda name: am.prior(log_p=[0.0, 1.0], strength=name),
    "module": _by_module,
    "estimator": _by_estimator,
    "command": _by_command,
    "attribute": _by_attribute,
    "option": lambda name: am.apply("softmax", [1.0], **{name: 1}),
    "field of a config": lambda name: am.transforms.from_config({name: 1}),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "name", ["_" * 1600 + "!", "a" * 40_000, "sink:mapping=" * 330, "sink:mapping=" * 70, "softmax" + "x" * 60]
)
def test_a_long_name_is_refused_at_once(reader, name):
    """A name is measured before it is compared with those that are known; maps within maps are counted before they are read."""
    for _ in range(2):  # the first may import
        started = time.perf_counter()
        with pytest.raises((ValueError, TypeError)) as error:
            READERS[reader](name)
    assert time.perf_counter() - started < 1.0
    if reader not in ("option", "field of a config"):
        assert re.search(
            r"at most (64|1000) characters|at most 4 maps stand in each other", " ".join(str(error.value).split())
        )


def test_maps_within_maps_by_name_are_read_up_to_four():
    assert am.apply("sink:mapping=entmax:alpha=1.3,score=0.5", [1.0, 2.0]).shape == (2,)


@pytest.mark.parametrize(
    ("word", "value"),
    [("9" * 19, 1e19), ("-" + "9" * 19, -1e19), ("1" + "0" * 400, np.inf), ("-1" + "0" * 400, -np.inf)],
)
def test_an_integer_beyond_64_bits_is_read_as_a_float(word, value):
    assert names.number(word) == value
    assert isinstance(names.number(word), float)
    assert names.number("9223372036854775807") == 2**63 - 1
