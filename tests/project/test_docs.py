"""The documentation site: every example runs, every row of the migration tables holds, the generated pages are whole."""

import doctest
import importlib
import json
import math
import re
import tomllib
import types
from pathlib import Path

import numpy as np
import pytest
from cases import CASES

import anymax
from anymax.mappings import CATALOGUE

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
if not DOCS.is_dir():
    pytest.skip("the pages are in the repository only", allow_module_level=True)

from generator import (
    api,
    build,
    choose,
    docstrings,
    evidence,
    maps,
    measured,
    migrating,
    site,
    speed,
    text,
)

pytestmark = pytest.mark.whole

# -- examples -------------------------------------------------------------------------------------------------------------

PAGES = sorted(DOCS.glob("*.md"))
WIDTH = 88  # what the site shows of a line without scrolling
FENCE = re.compile(r"^(`{3,})(?:python|pycon)\n(.*?)^\1", flags=re.M | re.S)
NEEDS = ("torch", "jax", "matplotlib", "sklearn", "transformers", "entmax", "dask")


def blocks(page):
    return [code for _, code in FENCE.findall(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.stem)
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    """In one scope, from top to bottom: what follows `>>>` prints what the page says, other blocks run."""
    monkeypatch.chdir(tmp_path)
    code = blocks(page)
    for package in NEEDS:
        if re.search(
            rf"\b(import|from) {package}\b|anymax\.{'nn' if package == 'torch' else package}\b", "\n".join(code)
        ):
            pytest.importorskip(package)
    scope = {"__name__": page.stem}
    said = []
    for i, block in enumerate(code, start=1):
        where = f"{page.name}, example {i}"
        if block.lstrip().startswith(">>>"):
            test = doctest.DocTestParser().get_doctest(block, scope, where, str(page), 0)
            runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
            runner.run(test, out=said.append, clear_globs=False)
            scope.update(test.globs)
        else:
            exec(compile(block, where, "exec"), scope)
    assert not said, "".join(said)


def test_a_wrong_example_is_seen(tmp_path):
    page = tmp_path / "wrong.md"
    page.write_text("```pycon\n>>> 1 + 1\n3\n```\n", encoding="utf-8")
    with pytest.raises(AssertionError, match="Expected"):
        test_the_examples_of_a_page_run(page, tmp_path, pytest.MonkeyPatch())


def test_no_line_of_an_example_is_clipped():
    """ruff wraps code at this width (`docs/ruff.toml`), but not comments, strings and other languages."""
    fenced = re.compile(r"^(`{3,})(?:python|pycon|text|bash)\n(.*?)^\1", flags=re.M | re.S)
    included = {"changelog", "contributing"}
    for page in [page for page in PAGES if page.stem not in included] + [DOCS / "many_machines.py"]:
        body = page.read_text(encoding="utf-8")
        code = [body] if page.suffix == ".py" else [block for _, block in fenced.findall(body)]
        wide = [line for block in code for line in block.splitlines() if len(line) > WIDTH]
        assert not [line for line in wide if not line.startswith(('"""', "TypeError:", "IndexError:"))], page.name


def test_there_are_examples():
    assert {"index", "start", "choose", "numerics", "attention", "decoding", "huggingface", "sklearn", "zh"} <= {
        p.stem for p in PAGES if blocks(p)
    }


# -- migration ------------------------------------------------------------------------------------------------------------

ROWS = [(table, row) for table in migrating.tables() if table["package"] for row in table["rows"]]


def torch_inputs():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    made = {name: torch.tensor(rng.normal(size=shape)) for name, shape in SHAPES.items()}
    leaves = [made[name].requires_grad_() for name in ("x", "e", "q4", "k4", "v4", "s")]
    made |= {
        "y": torch.tensor([0, 1, 2, 3, 4, 2]), "w": torch.tensor(rng.uniform(0.5, 2.0, 5)), "q": torch.tensor(rng.dirichlet(np.ones(5), 6)),
        "keep": torch.tensor(rng.uniform(size=(6, 5)) < 0.7).scatter(1, torch.zeros(6, 1, dtype=torch.int64), True),
        "alpha": torch.tensor(rng.uniform(1.1, 1.9, (6, 1))), "g": torch.Generator().manual_seed(0),
        "index": torch.tensor([0, 0, 2, 1, 2, 2]), "ptr": torch.tensor([0, 2, 3, 6]),
    }  # fmt: skip
    made["onehot"] = torch.nn.functional.one_hot(made["y"], 5).double()
    return made | {"torch": torch, "F": torch.nn.functional, "nn": torch.nn, "math": math}, leaves


SHAPES = {
    "x": (6, 5), "e": (6, 8), "W": (5, 8), "q4": (2, 2, 4, 8), "k4": (2, 2, 4, 8), "v4": (2, 2, 4, 8), "bias": (4, 4),
    "s": (2, 4, 8),
}  # fmt: skip


def jax_inputs():
    jax = pytest.importorskip("jax")
    rng = np.random.default_rng(0)
    y = np.array([0, 1, 2, 3, 4, 2])
    made = {
        "x": rng.normal(size=(6, 5)), "q": rng.dirichlet(np.ones(5), 6), "onehot": np.eye(5)[y],
        "t": rng.normal(size=6) * 2, "x3": rng.normal(size=(2, 3, 4)),
    }  # fmt: skip
    made = {name: jax.numpy.asarray(v, dtype="float32") for name, v in made.items()}
    made |= {"y": jax.numpy.asarray(y), "sign": jax.numpy.asarray([0, 1, 0, 1, 1, 0]), "key": jax.random.key(0)}
    made["index"] = jax.numpy.asarray([0, 0, 2, 1, 2, 2])
    made["y3"] = jax.numpy.asarray([[0, 3, 1], [2, 2, 0]])
    made["keep"] = jax.numpy.asarray(rng.uniform(size=(6, 5)) < 0.7).at[:, 0].set(True)
    made["argmax_onehot"] = lambda s: jax.nn.one_hot(jax.numpy.argmax(s, axis=-1), 5)
    return made | {"jax": jax, "jnp": jax.numpy}


def numpy_inputs():
    rng = np.random.default_rng(0)
    made = {name: rng.normal(size=shape) for name, shape in {"x": (6, 5), "x3": (2, 3, 4), "t": 5}.items()}
    made |= {"onehot": np.eye(5)[2]}
    made |= {"w": rng.uniform(0.5, 2.0, 5), "q": rng.dirichlet(np.ones(5), 6), "np": np}
    return made | {"a": rng.dirichlet(np.ones(6)), "b": rng.dirichlet(np.ones(5))}


INPUTS = {"jax": jax_inputs, "numpy": numpy_inputs}


def names(package):
    module = pytest.importorskip(package)
    known = {"anymax": anymax, package: module}
    if package == "scipy":
        for part in ("special", "stats", "optimize"):
            importlib.import_module(f"scipy.{part}")
    if package == "fast_soft_sort":
        importlib.import_module("fast_soft_sort.pytorch_ops")
    if package == "pytorch_metric_learning":
        known["losses"] = importlib.import_module("pytorch_metric_learning.losses")
    return known


def called(code, scope, arguments):
    """The value of an expression; a module is called with the row's arguments, on weights that both sides share."""
    value = eval(code, scope)
    if arguments is None:
        return value
    if isinstance(value, scope["nn"].Module):
        value = value.double()
        for name, given in (("W", scope["W"].T), ("weight", scope["W"])):
            if getattr(value, name, None) is not None:
                getattr(value, name).data = given.clone()
        if "in_proj_weight" in value.state_dict():
            value.load_state_dict(scope.setdefault("shared", value.state_dict()))
    out = value(*eval(f"({arguments},)", scope))
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(("table", "row"), ROWS, ids=[row["old"][:60] for _, row in ROWS])
def test_a_row_of_the_migration_tables(table, row):
    scope, leaves = torch_inputs() if table["inputs"] == "torch" else (INPUTS[table["inputs"]](), None)
    scope |= names(table["package"])
    if table["inputs"] == "torch":
        scope["torch"].manual_seed(0)
    old, new = (called(row[side], scope, row.get("call")) for side in ("old", "new"))
    assert tuple(old.shape) == tuple(new.shape)
    a, b = (np.asarray(v.detach() if leaves else v) for v in (old, new))
    check = row.get("check", "gradient")
    if check == "distribution":
        for p in (a, b):
            np.testing.assert_allclose(p.sum(-1), 1.0, rtol=1e-12)
            assert set(np.unique(p.round(12))) == {0.0, 1.0}
        return
    if check == "index":
        assert b.dtype.kind == "i"
        assert ((b >= 0) & (b < 5)).all()
        return
    tolerance = row.get("tolerance", 1e-9 if leaves else 2e-5)
    np.testing.assert_allclose(b, a, rtol=tolerance, atol=tolerance)
    assert np.abs(a).max() > 1e-3
    if check == "gradient" and leaves:
        probe = scope["torch"].tensor(np.random.default_rng(1).normal(size=a.shape))
        theirs, ours = (scope["torch"].autograd.grad(v, leaves, probe, allow_unused=True) for v in (old, new))
        assert any(g is not None for g in ours)
        for mine, his in zip(ours, theirs):
            if mine is not None or his is not None:
                np.testing.assert_allclose(mine, his, rtol=100 * tolerance, atol=100 * tolerance)


def test_a_wrong_row_is_seen():
    pytest.importorskip("torch")
    table = {"package": "torch", "inputs": "torch"}
    with pytest.raises(AssertionError):
        test_a_row_of_the_migration_tables(table, {"old": "F.softmax(x, dim=-1)", "new": "anymax.sparsemax(x)"})
    with pytest.raises(AssertionError):  # the same value, another gradient
        test_a_row_of_the_migration_tables(
            table, {"old": "F.softmax(x, dim=-1)", "new": "anymax.softmax(x.detach()) + 0 * x"}
        )


# -- what is generated ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """All generated pages, without pictures; the examples of every map and transform run on the way, in three frameworks."""
    for package in ("torch", "jax", "matplotlib", "rich"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("generated")
    build.write(folder, pictures=False)
    return folder


def page_of(generated, name):
    return (generated / name).read_text(encoding="utf-8")


def test_every_map_has_a_page_with_its_facts(generated):
    found = maps.pages()
    assert [page.kind for page in found] == list(CATALOGUE)
    for page in found:
        body = page_of(generated, f"maps/{page.kind.name}.md")
        assert body.startswith(f"# {page.kind.__name__}\n")
        assert [t for t in re.findall(r"^## (.+)", body, flags=re.M) if t in maps.ALLOWED] == list(maps.ALLOWED)
        for framework in ("NumPy", "PyTorch", "JAX"):
            assert f"{{tab-item}} {framework}" in body
        assert f"| Exact zeros | {'yes' if page.mapping.facts.sparse else 'no'} |" in body
        assert body.index(">>> anymax.apply(") < body.index("{image}") < body.index("## Definition")
        assert f"[{page.kind.__name__}]({page.kind.name}.md)" in page_of(generated, "maps/index.md")


def test_examples_print_what_the_library_computes(generated):
    loss = anymax.sparsemax_loss(
        np.array([[2.0, 1.0, 0.1, -1.0], [0.5, 0.4, 0.3, -np.inf]]), np.array([0, 1]), reduction="none"
    )
    assert str(loss.round(3)) in page_of(generated, "maps/sparsemax.md")
    for path in generated.rglob("*.md"):
        for output in re.findall(r"^```text\n(.*?)^```", path.read_text(encoding="utf-8"), flags=re.M | re.S):
            assert output.strip(), path
            assert "nan" not in output, path


@pytest.mark.parametrize("page", maps.pages(), ids=lambda page: page.kind.name)
def test_the_page_of_a_map_opens_with_a_call(page):
    block = FENCE.search(maps.call(page))[2]
    test = doctest.DocTestParser().get_doctest(block, {}, page.kind.name, None, 0)
    results = doctest.DocTestRunner(verbose=False).run(test)
    assert results.attempted == 3
    assert not results.failed


def test_a_page_says_why_there_is_no_kernel():
    """Of every map without one it said that the functions are the reader's."""
    own = type("Own", (anymax.Sparsemax,), {"link": lambda self, t, xp: anymax.Sparsemax.link(self, t, xp)})()
    assert maps.engines(own) == "none: its formulas run as they are"
    assert maps.engines(anymax.Ratio.square()) == "none: the functions are yours"
    assert maps.engines(anymax.Sparsemax()) == "CPU and GPU"


def test_learnable_parameters():
    found = {page.kind.__name__: maps.learnable(page.mapping) for page in maps.pages()}
    assert found["Entmax"] == ["alpha"]
    assert found["Budget"] == ["k"]
    assert found["PerturbMax"] == ["scale"]
    assert found["Softmax"] == found["Taylor"] == []


def test_the_api_reference_has_every_public_name(generated):
    listed = {name for found in api.names().values() for name in found}
    assert {f"anymax.{name}" for name in {*anymax.__all__} - {"__version__", "margins", "transforms"}} <= listed
    for page, found in api.names().items():
        body = page_of(generated, f"api/{page}.md")
        for name in found:
            assert re.search(rf":: {re.escape(name)}$", body, flags=re.M), name


def test_a_map_without_prose_is_named(monkeypatch):
    unwritten = type("Unwritten", (anymax.Softmax,), {"name": "unwritten"})
    monkeypatch.setattr(maps, "CATALOGUE", (*maps.CATALOGUE, unwritten))
    with pytest.raises(FileNotFoundError, match=r"write docs/maps/unwritten\.md"):
        maps.pages()


def test_prose_with_other_sections_is_named(tmp_path):
    page = tmp_path / "one.md"
    page.write_text("example: Softmax()\n\nWords.\n\n## Definition\n\nSo.\n\n## Papers\n\nSome.\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"missing: \['Paper'\]; unknown: \['Papers'\]"):
        text.read(page, ("Definition", "Paper"), ("Definition", "Paper"))


# -- figures come from the results ------------------------------------------------------------------------------------------

needs_benchmarks = pytest.mark.skipif(
    not measured.runs(), reason="the results of the benchmarks are in the repository only"
)


@needs_benchmarks
def test_costs_are_those_of_the_results():
    run = measured.main_run()
    body = measured.costs()
    readings = {(r["group"], r["name"], r["peer"]): r for r in run.readings}
    reading = readings["forward", "sparsemax 1024x1024 normal", "torch.softmax"]
    row = next(line for line in body.splitlines() if line.startswith("| `sparsemax` |"))
    assert row.split("|")[2].strip() == ("noisy" if reading["noisy"] else f"{reading['ratio']:.2f}")
    assert run.facts["hardware"]["cpu"] in body


def test_noise_is_not_a_figure():
    assert measured.ratio({"ratio": 0.5, "noisy": True}) == "noisy"
    assert measured.ratio({"ratio": 0.5, "noisy": False}) == "0.50"
    assert measured.ratio({"ratio": None, "noisy": False, "message": "needs torch"}) == "needs torch"


@needs_benchmarks
def test_pictures_of_performance(tmp_path):
    """Of each run with every figure, for the light and for the dark theme."""
    pytest.importorskip("matplotlib")
    body = speed.every(tmp_path)
    drawn = list(tmp_path.glob("*.svg"))
    assert drawn
    for path in drawn:
        assert f"/generated/{path.name}" in body
        assert "sparsemax 1024x1024" in path.read_text(encoding="utf-8")
    assert len(drawn) == 2 * len([path for path in drawn if not path.stem.endswith("-dark")])


@pytest.mark.skipif(not measured.accuracy(), reason="the results of the benchmarks are in the repository only")
def test_errors_are_those_of_the_results_and_within_the_bounds_of_the_tests():
    body, bounds = measured.errors(), {case.id: case for case in CASES}
    for row in measured.accuracy()[-1]["errors"]:
        assert f"| `{row['case']}`" in body
        case = bounds[row["case"]]
        if case.tv is None:
            assert row["fp32"]["ulps"] <= case.ulps
            assert row["fp64"]["ulps"] <= case.ulps64
        else:
            assert row["fp32"]["tv"] <= case.tv[0]
            assert row["fp64"]["tv"] <= case.tv[1]


def needs():
    """(row of a table on the decision page, the need that it comes from)."""
    every = tomllib.loads(choose.NEEDS.read_text(encoding="utf-8"))
    assert every.keys() == {"change", "keep"}
    rows = [row for table, own in every.items() for row in zip(choose.needs(table).splitlines()[2:], own, strict=True)]
    return [(line, need) for line, need in rows if "page" not in need]


def test_the_figures_of_the_decision_page_are_those_of_the_results():
    every = {name: {claim["key"]: one.together for claim, one in found} for name, found in evidence.judged().items()}
    seen = set()
    for row, need in needs():
        name = need["experiment"]
        tests = json.loads((evidence.RESULTS / f"{name}.json").read_text(encoding="utf-8"))["tests"]
        assert row.endswith(f"[experiment](../experiments/results/{name}.md) |")
        for shown, part in zip(row.split(" | ")[-2].split(";<br>"), need["effect"], strict=True):
            if isinstance(part, str):
                assert shown == part
                continue
            meant = [t for t in tests if t["claim"] == part["claim"] and part["test"] in t["what"]]
            found = min(meant, key=lambda test: len(test["what"]))["found"]
            verdict = every[name][part["claim"]]
            seen.add(verdict)
            words, undecided = shown.removesuffix(": undecided"), verdict not in ("confirmed", "contradicted")
            assert (words != shown) == undecided
            if "{}" not in part["says"]:
                assert words == part["says"]
                continue
            (interval,) = re.findall(r" \((\S+) to (\S+)\)", words)
            decimals = len(interval[0].partition(".")[2])
            says, bounds = part["says"], [found[k] for k in ("mean", "low", "high")]
            if found["mean"] < 0 and re.search(r"\{\} points? (above|higher|more)", says):
                bounds = [-bounds[0], -bounds[2], -bounds[1]]
                for more, less in (("{} points above", "{} points below"), ("{} points higher", "{} points lower")):
                    says = says.replace(more, less)
                says = says.replace("{} points more", "{} points less")
            mean, *ends = (f"{bound:z.{decimals}f}".replace("-", "−") for bound in bounds)
            assert list(interval) == [ends[0], "100" if "{} %" in says and bounds[2] > 100 else ends[1]]
            assert words.replace(" ({} to {})".format(*interval), "") == says.replace("{}", mean)
            assert found["high"] - found["low"] > 9 * 10**-decimals, "too few digits for the interval"
    assert seen == {"confirmed", "contradicted", "undecided"}


def test_no_figure_is_typed_into_a_need():
    said = [part if isinstance(part, str) else part["says"] for _, need in needs() for part in need["effect"]]
    assert not [words for words in said if re.search(r"\d\.\d(?!-entmax)|\d to −?\d", words)]


NEED = {"for": "sparsity", "map": "`Sparsemax()`", "loss": "any", "experiment": "one"}


@pytest.fixture
def one_need(tmp_path, monkeypatch):
    """Of one need: its row, with an experiment of two claims, whose verdicts are given."""

    def row(effect, a="confirmed", b="contradicted", **other):
        def test(claim, what, mean, verdict):
            found = {"mean": mean, "low": mean - 0.5, "high": mean + 0.5}
            return {"claim": claim, "what": what, "found": found, "at_least": 0.0, "verdict": verdict}

        tests = [test("a", "zeros, digits", 9.0, "confirmed"), test("a", "zeros, text", 8.0, "confirmed")]
        tests += [test("b", "gain, far", -9.0, "contradicted"), test("b", "gain, near", -1.0, "contradicted")]
        claims = [{"key": "a", "verdict": "confirmed"}, {"key": "b", "verdict": "contradicted"}]
        judged = [(claim, types.SimpleNamespace(together=one)) for claim, one in zip(claims, (a, b))]
        monkeypatch.setattr(evidence, "found", lambda: [{"name": "one", "claims": claims, "tests": tests}])
        monkeypatch.setattr(evidence, "judged", lambda: {"one": judged})
        monkeypatch.setattr(choose, "NEEDS", tmp_path / "needs.toml")
        lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in (NEED | other).items())
        parts = (
            part if isinstance(part, str) else "{" + ", ".join(f"{k} = {v!r}" for k, v in part.items()) + "}"
            for part in effect
        )
        choose.NEEDS.write_text(f"[[change]]\n{lines}effect = [{', '.join(parts)}]\n", encoding="utf-8")
        return choose.needs("change").splitlines()[-1]

    return row


def test_a_need_says_whether_its_effect_is_decided(one_need):
    zeros = {"claim": "a", "test": "digits", "says": "{} % are 0"}
    gain = {"claim": "b", "test": "gain, far", "says": "it changes by {}"}
    assert one_need([zeros, gain]) == (
        "| sparsity | `Sparsemax()` | any | 9.0 % (8.5 to 9.5) are 0;<br>it changes by −9.0 (−9.5 to −8.5) "
        "| [experiment](../experiments/results/one.md) |"
    )
    for verdict in ("undecided", "not tested"):
        assert "| 9.0 % (8.5 to 9.5) are 0: undecided |" in one_need([zeros], a=verdict)
        with pytest.raises(ValueError, match="expected a figure, since the claim 'a' is undecided"):
            one_need([zeros | {"says": "most are 0"}], a=verdict)
    assert "| most are 0 |" in one_need([zeros | {"says": "most are 0"}])
    worse = gain | {"says": "it is {} points above the other"}
    assert "it is 9.0 points (8.5 to 9.5) below the other" in one_need([worse])


@pytest.mark.parametrize(
    ("effect", "other", "words"),
    [
        ({"claim": "a", "test": "images"}, {}, "0 tests of the claim 'a' have the words 'images', expected one: a: zeros, digits; "),
        ({"claim": "a", "test": "zeros"}, {}, "2 tests of .*: zeros, digits; zeros, text"),
        ({"claim": "c", "test": "zeros"}, {}, "0 tests of the claim 'c' .*b: gain, far"),
        ({"claim": "b", "test": "gain, near"}, {}, "another test contradicts the claim 'b'; name it: gain, far"),
        ({"claim": "a", "test": "digits", "says": "{} of {}"}, {}, "expected one {} at most, where the figure goes"),
        ({"claim": "a", "test": "digits", "unit": "%"}, {}, "expected the keys claim, says, test, got claim, says, test, unit"),
        ({"claim": "a", "test": "digits"}, {"experiment": "two"}, "two has no saved results; there are one"),
        ({"claim": "a", "test": "digits"}, {"page": "two"}, "expected the keys for, loss, map, page, got"),
        ({"claim": "a", "test": "digits"}, {"do": "two"}, "expected the keys effect, experiment, for, loss, map, got"),
    ],
)  # fmt: skip
def test_a_need_without_results_is_named(one_need, effect, other, words):
    with pytest.raises(ValueError, match=words) as error:
        one_need([{"says": "{} % are 0"} | effect], **other)
    assert "needs.toml, sparsity: " in str(error.value)


def test_the_figures_of_the_answer_on_graphs_are_those_of_the_results():
    tables = json.loads((evidence.RESULTS / "graphs.json").read_text(encoding="utf-8"))["tables"]
    (row,) = [r for t in tables if t["title"] == "Accuracy" for r in t["rows"] if r["noisy edges"] == "67 %"]
    said = evidence.answer("graphs").introduction
    for words, name in (
        ("classifies {} % of the test nodes correctly", "without edges"),
        ("1.5-entmax classifies {} %", "1.5-entmax"),
        ("softmax {} %", "softmax"),
        ("sparsemax {} %", "sparsemax"),
    ):
        assert words.format(f"{row[name]['mean']:.0f}") in " ".join(said.split()), name


def test_the_answers_rest_on_the_verdicts():
    """Where a result has changed, its answer is to be read again."""
    for name, experiment in evidence.judged().items():
        now = ", ".join(f"{claim['key']} {one.together}" for claim, one in experiment)
        assert evidence.answer(name).keys["verdicts"] == now, f"read docs/answers/{name}.md again"
    assert {path.stem for path in evidence.ANSWERS.glob("*.md")} == set(evidence.judged())


def test_evidence_is_whatever_was_found(tmp_path, monkeypatch):
    answers = tmp_path / "answers"
    answers.mkdir()
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    monkeypatch.setattr(evidence, "ANSWERS", answers)
    assert evidence.index() == "No experiment has been saved yet."
    claim = {"key": "a", "claim": "Zeros help | p_t > 0.", "source": "a paper", "verdict": "contradicted"}
    for name, quick in (("one", False), ("two", True)):
        (tmp_path / f"{name}.json").write_text(
            json.dumps({"name": name, "quick": quick, "claims": [claim]}), encoding="utf-8"
        )
        (tmp_path / f"{name}.md").write_text(
            "# Title\n\nWe cannot say.\n\n## Data\n\nIt cost $5, see [it](a.json), [me](one.md).\n\n## Claims\n\nAll.\n\n"
            "## Tests\n\n| test | figure |\n| --- | ---: |\n| it | 1 |\n\n![words](one.png)\n\n| a |\n",
            encoding="utf-8",
        )
    (tmp_path / "one.png").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"write docs/answers/one\.md"):
        evidence.index()
    (answers / "one.md").write_text("question: Do zeros help?\n\nWe cannot say.\n", encoding="utf-8")
    undecided = "{bdg-muted}`undecided`"
    row = "| [Do zeros help?](../experiments/results/one.md) | We cannot say. | 1 undecided |"
    assert row in evidence.index()
    assert "two" not in evidence.index()
    out = tmp_path / "out"
    out.mkdir()
    (out / "stale.md").write_text("# Stale\n", encoding="utf-8")
    evidence.write(out)
    assert sorted(p.name for p in out.iterdir()) == ["one.md", "one.png"]
    page = (out / "one.md").read_text(encoding="utf-8")
    assert page.startswith("# Title\n\n**Do zeros help?**\n\nWe cannot say.\n\n:::{div} claims\n\n| claim |")
    assert f"| {undecided} contradicted when judged alone |" in page
    assert "| Zeros help \\| p\\_t \\> 0.<br>*a paper* |" in page
    tests = ":::{div} tests\n\n| test | figure |\n| --- | ---: |\n| it | 1 |\n\n:::\n\n![words](one.png)\n\n| a |\n"
    assert page.endswith(f"It cost \\$5, see it, [me](one.md).\n\n## Tests\n\n{tests}")


def test_an_answer_begins_with_a_whole_sentence():
    assert evidence.beginning("No. It\nloses 1.5 points: a lot. Or more.") == "No. It loses 1.5 points: a lot."
    assert (
        evidence.beginning("It depends on the length of the training: here. It does.")
        == "It depends on the length of the training: here."
    )


def test_an_evidence_page_shows_the_test_on_which_a_verdict_rests():
    def test(mean, low, high, verdict, claim="a"):
        return {"claim": claim, "found": {"mean": mean, "low": low, "high": high}, "at_least": 0.0, "verdict": verdict}

    near, far = test(1.0, 0.5, 1.5, "confirmed"), test(9.0, 8.0, 10.0, "confirmed")
    worse, worst = test(-1.0, -1.5, -0.5, "contradicted"), test(-9.0, -10.0, -8.0, "contradicted")
    other, single = test(1.0, 0.9, 1.1, "confirmed", "b"), test(0.5, None, None, "undecided")
    for verdict, tests, shown in (
        ("confirmed", [far, near, other], near),
        ("contradicted", [near, worse, worst], worst),
        ("undecided", [far, single], single),
        ("undecided", [other], None),
    ):
        assert evidence.telling({"key": "a", "verdict": verdict}, tests) == shown


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["`x_i` and *a* of p_ here."], ["``x_i`` and \\*a\\* of p\\_ here."]),
        (["See `x", "y`s."], ["See ``x", "y``\\ s."]),
        ([">>> f(*a)", "1 * 2"], [">>> f(*a)", "1 * 2"]),
        (
            ["Parameters", "----------", "a_, b", "    One *.", "", "Examples", "--------", ">>> a_ * b"],
            ["Parameters", "----------", "a\\_, b", "    One \\*.", "", "Examples", "--------", ">>> a_ * b"],
        ),
    ],
)
def test_docstrings_are_plain_english(given, meant):
    assert docstrings.plain(given) == meant


def test_signatures_name_types_as_they_are_written():
    def shown(what, thing):
        return docstrings.signature(None, what, "", thing, None, None, None)

    assert shown("function", anymax.log_softmax) == (
        "(x: ArrayT | Numbers, axis: Axes = -1, *, dim: Axes = None, mask: Mask = None, dtype: DType = None)", "ArrayT",
    )  # fmt: skip
    assert shown("class", anymax.Entmax) == ("(alpha: Parameter = 1.5)", None)
    assert shown("class", anymax.thresholds.Threshold) == ("(tau: ArrayT, support: ArrayT)", None)
    assert shown("method", anymax.Entmax.replace) is None


# -- the built site ---------------------------------------------------------------------------------------------------------


def test_no_page_names_another_server(generated):
    """In the sources: no asset of a foreign host; links to papers are links."""
    sources = [*DOCS.rglob("*.md"), *generated.rglob("*.md"), *(DOCS / "_static").iterdir(), DOCS / "conf.py"]
    for path in sources:
        body = path.read_text(encoding="utf-8")
        assert not re.search(r"cdn|jsdelivr|unpkg|googleapis", body, flags=re.I), path
        assert not re.search(r"""(src|@import|url\()\s*[=(]?\s*["']?https?:""", body), path


def test_what_is_wrong_with_a_built_page_is_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<html><head><script src="https://cdn.example/x.js"></script><link rel="stylesheet" href="//fonts.example/a.css">'
        '</head><body id="top"><a href="b.html#there">b</a><a href="b.html#gone">b</a><a href="c.html">c</a>'
        '<a href="https://arxiv.org/abs/1">paper</a><img src="no.png"><a href="#top">up</a></body></html>',
        encoding="utf-8",
    )
    (tmp_path / "b.html").write_text(
        '<html><body><p id="there" style="background:url(http://x.example/y)">b</p></body></html>'
    )
    (tmp_path / "s.css").write_text(
        '@import "https://fonts.example/b.css"; p { background: url(http://x.example/z.png) }'
    )
    wrong = site.problems(tmp_path)
    for words in (
        "cdn.example",
        "fonts.example/a.css",
        "b.html#gone",
        "c.html",
        "no.png",
        "x.example/y",
        "fonts.example/b",
        "z.png",
    ):
        assert any(words in line for line in wrong), words
    assert len(wrong) == 8
    (tmp_path / "a.html").write_text("<html><body><a href='b.html#there'>b</a></body></html>")
    (tmp_path / "b.html").write_text('<html><body><p id="there">b</p></body></html>')
    (tmp_path / "s.css").unlink()
    assert site.problems(tmp_path) == []
