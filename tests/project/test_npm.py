"""The npm package: the WebAssembly engine on typed arrays, held to the reference in Node and in Chromium."""

import functools
import http.server
import json
import re
import shutil
import subprocess
import tarfile
import threading
from pathlib import Path

import chromium
import mpmath as mp
import numpy as np
import pytest

import anymax
from anymax.kernels import link

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "packaging" / "npm"
if not SOURCES.exists():
    pytest.skip("only in the repository", allow_module_level=True)

from tools import explorer, npm

node = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")

MAPS = {
    "softmax": (anymax.Softmax(), "softmax"),
    "sparsemax": (anymax.Sparsemax(), {"name": "sparsemax"}),
    "entmax": (anymax.Entmax(1.5), "entmax"),
    "entmax at 1": (anymax.Entmax(1.0), {"name": "entmax", "alpha": 1}),
    "entmax below 1": (anymax.Entmax(0.6), {"name": "entmax", "alpha": 0.6}),
    "entmax between": (anymax.Entmax(1.27), {"name": "entmax", "alpha": 1.27}),
    "entmax above 2": (anymax.Entmax(3.5), {"name": "entmax", "alpha": 3.5}),
    "budget": (anymax.Budget(2), {"name": "budget", "k": 2}),
    "normmax": (anymax.NormMax(), "normmax"),
    "top-k": (anymax.SparseSoftmax(k=3), {"name": "sparse_softmax", "k": 3}),
    "top-p": (anymax.SparseSoftmax(p=0.7), {"name": "sparse_softmax", "p": 0.7}),
    "taylor": (anymax.Taylor(4), {"name": "taylor", "order": 4}),
    "sigsoftmax": (anymax.Sigsoftmax(), "sigsoftmax"),
    "perturbed": (anymax.PerturbMax("logistic", scale=0.8), {"name": "perturb_max", "noise": "logistic", "scale": 0.8}),
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder in which `import "anymax"` finds the package, as npm puts it there."""
    folder = tmp_path_factory.mktemp("project")
    npm.make(folder / "node_modules" / "anymax")
    return folder


def run_node(folder, script, requests=()):
    (folder / "script.mjs").write_text(script, encoding="utf-8")
    done = subprocess.run(
        ["node", folder / "script.mjs"], input=json.dumps(requests), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def ask(installed):
    (installed / "npm.mjs").write_bytes((Path(__file__).parent / "npm.mjs").read_bytes())
    script = """
    import { readFileSync } from "node:fs";
    import { load } from "anymax";
    import { answer } from "./npm.mjs";
    console.log(JSON.stringify(await answer(load, JSON.parse(readFileSync(0, "utf8")))));
    """
    return lambda *requests: json.loads(run_node(installed, script, requests))


def sent(a):
    """An array as a request has it: JSON has no NaN and no infinity."""
    kind = {"float32": "Float32Array", "float64": "Float64Array"}[str(a.dtype)]
    words = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
    return {"kind": kind, "numbers": [words.get(str(v), v) for v in a.ravel().astype(float).tolist()]}


def got(reply, shape=None):
    assert "refused" not in reply, reply
    numbers = np.array([float(str(v).replace("Infinity", "inf")) for v in reply["numbers"]], reply["kind"][:-5].lower())
    return numbers if shape is None else numbers.reshape(shape)


def scores(dtype):
    """Rows for all that a row may be: plain, tied, far apart, masked, all masked, with NaN and with infinity."""
    x = np.random.default_rng(4).normal(0, 1.5, (12, 7)).astype(dtype)
    x[1] = 0.5
    x[2] *= 500
    x[3, 2:] = -np.inf
    x[4, 1::2] = -np.inf
    x[5] = -np.inf
    x[6, 3] = np.nan
    x[7, 0] = np.inf
    return x


def wide(dtype):
    return np.random.default_rng(5).normal(0, 1, (3, 1000)).astype(dtype)


def requests_of(call, x, more=(), **options):
    return [
        {"call": call, "map": given, "x": sent(x), "more": list(more), "options": {"classes": x.shape[-1], **options}}
        for _, given in MAPS.values()
    ]


def reference(function, x, *more):
    """In double precision, from the formulas and not from kernels compiled from the same sources."""
    with anymax.use("reference"), np.errstate(all="ignore"):
        return function(x.astype(np.float64), *(m.astype(np.float64) if m.dtype.kind == "f" else m for m in more))


def close(found, wanted, dtype, what, scale=1.0):
    assert str(found.dtype) == dtype, what
    tolerance = {"float32": 3e-6, "float64": 2e-11}[dtype]
    assert np.array_equal(np.isfinite(found), np.isfinite(wanted)), (what, found, wanted)
    assert np.allclose(found, wanted, rtol=tolerance, atol=tolerance * scale, equal_nan=True), (what, found - wanted)


@node
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_probabilities(ask, dtype):
    for x in (scores(dtype), wide(dtype)):
        replies = ask(*requests_of("apply", x), *requests_of("logApply", x))
        for (name, (mapping, _)), reply, log in zip(MAPS.items(), replies, replies[len(MAPS) :], strict=False):
            p, wanted = got(reply, x.shape), reference(functools.partial(anymax.apply, mapping), x)
            close(p, wanted, dtype, name)
            log_p, wanted_log = got(log, x.shape), reference(functools.partial(anymax.log_apply, mapping), x)
            assert np.isneginf(log_p[np.isneginf(wanted_log)]).all(), name
            if name in ("softmax", "entmax at 1"):
                close(log_p, wanted_log, dtype, name, scale=100)
            near = wanted > (1e-3 if name == "perturbed" else 1e-30 if dtype == "float32" else 1e-300)  # quadrature
            close(log_p[near], wanted_log[near], dtype, name, scale=10_000 if name == "perturbed" else 100)


@node
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients(ask, dtype):
    x = scores(dtype)[:6]
    g = np.random.default_rng(6).normal(0, 1, x.shape).astype(dtype)
    replies = ask(*requests_of("vjp", x, [sent(g)]), *requests_of("logVjp", x, [sent(g)]))
    for (name, (mapping, _)), reply in zip(MAPS.items(), replies, strict=False):
        wanted = reference(lambda x, g: np.einsum("ri,rij->rj", g, anymax.jacobian(mapping, x)), x, g)  # noqa: B023
        close(got(reply, x.shape), wanted, dtype, name, scale=10)
    for (name, (mapping, _)), reply in zip(MAPS.items(), replies[len(MAPS) :], strict=True):

        def pulled_back(x, g, mapping=mapping):
            p = anymax.apply(mapping, x)
            return np.einsum("ri,rij->rj", np.where(p > 0, g / np.where(p > 0, p, 1), 0), anymax.jacobian(mapping, x))

        found, plain = (
            got(reply, x.shape),
            [0, 1, 3, 4, 5],
        )  # in the other row p underflows, here and not in the kernels
        assert np.isfinite(found).all(), name
        close(found[plain], reference(pulled_back, x, g)[plain], dtype, name, scale=300)


@node
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_losses(ask, dtype):
    x, targets = scores(dtype)[:5], np.array([0, 6, 2, 1, -100])
    x[4] = 1.0
    options = {"scale": 0.25}
    losses = ask(*requests_of("loss", x, [targets.tolist()]))
    gradients = ask(*requests_of("lossGradient", x, [targets.tolist()], **options))
    thresholds = ask(*requests_of("threshold", x))
    for (name, (mapping, _)), reply, slope, tau in zip(MAPS.items(), losses, gradients, thresholds, strict=True):
        has_loss = mapping.facts.has_potential and name != "budget"
        assert ("refused" in reply) == ("refused" in slope) == (not has_loss), name
        if has_loss:
            wanted = reference(lambda x: anymax.fenchel_young(mapping, x, targets, reduction="none"), x)  # noqa: B023
            close(got(reply), wanted, dtype, name, scale=50)
            p = reference(functools.partial(anymax.apply, mapping), x)
            wanted = 0.25 * (p - (targets[:, None] == np.arange(7))) * (targets >= 0)[:, None]
            close(got(slope, x.shape), wanted, dtype, name)
        assert ("refused" in tau) == (not mapping.has_threshold), name
        if mapping.has_threshold:
            close(got(tau), reference(lambda x: anymax.threshold(mapping, x).tau, x), dtype, name, scale=10)  # noqa: B023


@node
def test_draws_are_an_inversion(ask):
    """A number draws the first class whose cumulative sum exceeds it, never one of probability 0; a row without a class draws -1."""
    x = scores("float32")
    u = np.random.default_rng(7).random((len(x), 50))
    u[:, 0], u[:, 1] = 0.0, 1.0
    for (name, (mapping, _)), reply in zip(
        MAPS.items(), ask(*requests_of("sample", x, draws=50, random=u.ravel().tolist())), strict=True
    ):
        drawn = got(reply, u.shape)
        p = reference(functools.partial(anymax.apply, mapping), x)
        for row, numbers, classes in zip(p, u, drawn, strict=True):
            if not row.sum() > 0:
                assert (classes == -1).all(), name
                continue
            assert (row[classes] > 0).all(), name
            upto = np.cumsum(row) / row.sum()
            at = np.clip(numbers, 0, 1 - 1e-12)
            low = np.where(classes > 0, upto[np.maximum(classes - 1, 0)], 0)
            assert ((low <= at + 1e-6) & (at <= upto[classes] + 1e-6)).all(), name


@node
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_log_p_of_a_perturbed_class_far_below_another(ask, dtype):
    """p of such a class is 0 in double precision, and log p is finite: of two classes it has a closed form."""
    formulas = {
        "normal": lambda d: mp.ncdf(-d / mp.sqrt(2)),
        "logistic": lambda d: (mp.exp(-d) * (d - 1) + mp.exp(-2 * d)) / (1 - mp.exp(-d)) ** 2,
        "laplace": lambda d: mp.exp(-d) * (1 + d / 2) / 2,
        "gumbel": lambda d: 1 / (1 + mp.exp(d)),
    }
    scale, gaps = 0.75, np.array([1.0, 8.0, 12.0, 30.0, 60.0, 150.0], dtype)
    x = np.stack([0 * gaps, -gaps, np.full_like(gaps, -np.inf)], -1)
    more = {"x": sent(x), "options": {"classes": 3}}
    replies = ask(
        *({"call": "logApply", "map": {"name": "perturb_max", "noise": n, "scale": scale}, **more} for n in formulas)
    )
    for (noise, formula), reply in zip(formulas.items(), replies, strict=True):
        log_p = got(reply, x.shape)
        wanted = [float(mp.log(formula(mp.mpf(float(d)) / scale))) for d in gaps]
        np.testing.assert_allclose(log_p[:, 1], wanted, rtol=1e-4, atol=1e-5, err_msg=noise)
        assert np.isneginf(log_p[:, 2]).all()


@node
def test_log_p_of_a_perturbed_class_far_below_several(ask):
    x = np.array([0.0, -0.5, -25.0, 0.0, -40.0])
    [reply] = ask({"call": "logApply", "map": "perturb_max", "x": sent(x)})
    with mp.workdps(30):

        def density(u, i):
            return mp.npdf(u - x[i]) * mp.fprod(mp.ncdf(u - v) for j, v in enumerate(x) if j != i)

        wanted = [float(mp.log(mp.quad(lambda u, i=i: density(u, i), range(-36, 12, 3)))) for i in range(5)]
    np.testing.assert_allclose(got(reply), wanted, rtol=1e-5)


@node
def test_log_p_far_below_what_is_integrated_is_finite(ask):
    [reply] = ask({"call": "logApply", "map": "perturb_max", "x": sent(np.array([0.0, -1e5, -np.inf]))})
    log_p = got(reply)
    assert -1e11 < log_p[1] < -1e4
    assert np.isneginf(log_p[2])


@node
def test_integers_of_any_size_are_targets(installed):
    script = """
    import { load } from "anymax";
    const { loss } = await load(), x = Float64Array.of(0.6, 0.5, 0.4, 2, 0, 1), classes = 3;
    const of = (targets) => {
      try { return Array.from(loss("softmax", x, targets, { classes })); } catch (error) { return error.message; }
    };
    const same = (a, b) => JSON.stringify(of(a)) === JSON.stringify(of(b));
    console.log(JSON.stringify([
      same([0n, 2n], [0, 2]), same(BigInt64Array.of(1n, -5n), [1, -1]), same([-(2 ** 63) - 4096, 1], [-1, 1]),
      same([-(2n ** 64n), 1], [-1, 1]), same([-(2n ** 64n) + 1n, 1], [-1, 1]),
      of([3n, 0]), of([2n ** 64n, 0]), of([NaN, 0]), of(["1", 0]), of([undefined, 0]), of([Symbol.iterator, 0]),
    ]));
    """
    *right, over, far, nan, word, nothing, symbol = json.loads(run_node(installed, script))
    assert right == [True] * 5
    for said, value in (
        (over, "3"),
        (far, str(2**64)),
        (nan, "NaN"),
        (word, "1"),
        (nothing, "undefined"),
        (symbol, "Symbol("),
    ):
        assert f"a target is {value}" in said


@node
def test_random_numbers_are_numbers(installed):
    script = """
    import { load } from "anymax";
    const { sample } = await load(), x = Float64Array.of(0.6, 0.5, 0.4), told = [];
    for (const random of [() => NaN, () => 1.5, () => -0.1, () => undefined, () => 0.5, 5]) {
      try { told.push(Array.from(sample("softmax", x, { random }))); } catch (error) { told.push(error.message); }
    }
    console.log(JSON.stringify(told));
    """
    *wrong, right, number = json.loads(run_node(installed, script))
    assert right == [1]
    for said, value in zip(wrong, ("NaN", "1.5", "-0.1", "undefined"), strict=True):
        assert said == f"sample: random gave {value}; it has to give numbers from 0 to 1"
    assert "random is 5; it has to be a function" in number


def test_a_folder_of_others_is_not_emptied(tmp_path):
    """`--out` names a folder, and an error in it must not cost its files."""
    npm.make(tmp_path / "npm")
    npm.make(tmp_path / "npm")  # its own
    theirs = tmp_path / "npm" / "thesis.tex"
    theirs.write_text("years")
    with pytest.raises(
        SystemExit, match=r"has thesis\.tex, which is not of the package; give a folder that is new or empty"
    ):
        npm.make(tmp_path / "npm")
    assert theirs.read_text() == "years"
    assert (tmp_path / "npm" / "anymax.mjs").exists()
    with pytest.raises(SystemExit, match="is a file"):
        npm.make(theirs)
    (tmp_path / "empty").mkdir()
    npm.make(tmp_path / "empty")
    assert {file.name for file in (tmp_path / "empty").iterdir()} == {*npm.WRITTEN, *npm.MADE}


@node
def test_names_of_their_own(ask):
    x = wide("float64")
    shape = {"x": sent(x), "options": {"classes": 1000}}
    calls = {
        "softmax": ({}, anymax.Softmax()),
        "sparsemax": ({}, anymax.Sparsemax()),
        "entmax": ({"alpha": 1.3}, anymax.Entmax(1.3)),
        "sparseSoftmax": ({"k": 5}, anymax.SparseSoftmax(k=5)),
    }
    replies = ask(*({**shape, "call": call, "options": {"classes": 1000, **own}} for call, (own, _) in calls.items()))
    for reply, (_, mapping) in zip(replies, calls.values(), strict=True):
        close(got(reply, x.shape), reference(functools.partial(anymax.apply, mapping), x), "float64", mapping.name)
    [logs, plain] = ask({**shape, "call": "logSoftmax"}, {"call": "softmax", "x": sent(np.array([1.0, 2.0]))})
    close(got(logs, x.shape), reference(anymax.log_softmax, x), "float64", "logSoftmax")
    close(got(plain), anymax.softmax(np.array([1.0, 2.0])), "float64", "one row")


@node
def test_nothing_gives_nothing(ask):
    for call, more in (
        ("apply", []),
        ("logApply", []),
        ("vjp", ["x"]),
        ("logVjp", ["x"]),
        ("loss", [[]]),
        ("sample", []),
    ):
        empty = sent(np.zeros(0, np.float32))
        [reply] = ask({"call": call, "map": "sparsemax", "x": empty, "more": [empty if m == "x" else m for m in more]})
        assert got(reply).size == 0, call


@node
def test_what_is_refused(ask):
    x = sent(np.zeros(6, np.float32))
    wrong = {
        "there is no map \"spasemax\"; the maps are softmax, sparsemax, entmax": {"call": "apply", "map": "spasemax", "x": x},
        "alpha is -1; it has to be a finite number above 0": {"call": "apply", "map": {"name": "entmax", "alpha": -1}, "x": x},
        "softmax: there is no option alpha; it takes none": {"call": "apply", "map": {"name": "softmax", "alpha": 1}, "x": x},
        "k is undefined; it has to be a finite number above 0": {"call": "apply", "map": "budget", "x": x},
        "k is 7, and there are 6 classes": {"call": "apply", "map": {"name": "budget", "k": 7}, "x": x},
        "give exactly one of k and p": {"call": "apply", "map": "sparse_softmax", "x": x},
        "order is 3; it has to be an even integer": {"call": "apply", "map": {"name": "taylor", "order": 3}, "x": x},
        '"normal", "logistic"': {"call": "apply", "map": {"name": "perturb_max", "noise": "cauchy"}, "x": x},
        "the scores are of the kind Array; give a Float32Array": {"call": "softmax", "x": [1, 2]},
        "classes is 4 and there are 6 scores": {"call": "softmax", "x": x, "options": {"classes": 4}},
        "there is no option axis; the options are classes": {"call": "softmax", "x": x, "options": {"axis": 1}},
        "there are 2 targets and 3 rows": {"call": "loss", "map": "softmax", "x": x, "more": [[0, 1]], "options": {"classes": 2}},
        "a target is 6; it has to be an integer below 6": {"call": "loss", "map": "softmax", "x": x, "more": [[6]]},
        "taylor has no Fenchel-Young loss": {"call": "loss", "map": "taylor", "x": x, "more": [[0]]},
        "sigsoftmax has none": {"call": "threshold", "map": "sigsoftmax", "x": x},
        "is Float64Array of 6 and the scores Float32Array of 6": {"call": "vjp", "map": "softmax", "x": x, "more": [sent(np.zeros(6))]},
        "draws is -1": {"call": "sample", "map": "softmax", "x": x, "options": {"draws": -1}},
        "scale is half": {"call": "lossGradient", "map": "softmax", "x": x, "more": [[0]], "options": {"scale": "half"}},
    }  # fmt: skip
    for (words, _), reply in zip(wrong.items(), ask(*wrong.values()), strict=True):
        assert words in reply.get("refused", reply), (words, reply)
        assert reply["kind"] in ("TypeError", "RangeError"), words


@node
def test_the_readme_prints_what_it_says(installed):
    blocks = re.findall(r"```js\n(.*?)```", (SOURCES / "README.md").read_text(encoding="utf-8"), flags=re.S)
    assert len(blocks) == 2
    show = "console.log = (v) => process.stdout.write(Array.from(v, (t) => Number(t.toFixed(3))).join(' ') + '\\n');\n"
    for block in blocks:
        assert run_node(installed, show + block).splitlines() == re.findall(
            r"console\.log\(.*\); // (.*)$", block, flags=re.M
        )


@node
def test_many_calls_leave_the_memory_as_it_is(installed):
    """What a call takes of the engine's memory it gives back, an error or not; memory that grows leaves results of before as they are."""
    script = """
    import { readFile } from "node:fs/promises";
    import { createRequire } from "node:module";
    import { load } from "anymax";
    let memory;
    const made = WebAssembly.instantiate;
    WebAssembly.instantiate = async (...given) => { const made_ = await made(...given); memory = made_.exports.memory; return made_; };
    const file = createRequire(import.meta.url).resolve("anymax/anymax.wasm");
    const anymax = await load(await readFile(file));
    const x = new Float32Array(100_000).fill(1);
    const p = anymax.softmax(x), before = memory.buffer.byteLength;
    for (let i = 0; i < 300; i++) {
      anymax.entmax(x, { classes: 100 });
      try { anymax.loss("taylor", x, [0]); } catch {}
    }
    const after = memory.buffer.byteLength, many = anymax.sparsemax(new Float32Array(8_000_000), { classes: 100 });
    const right = [after === before, memory.buffer.byteLength > before, p[7] === Math.fround(1e-5), Math.abs(many[0] - 0.01) < 1e-8];
    console.log(JSON.stringify([...right, await load() === await load()]));
    """
    assert json.loads(run_node(installed, script)) == [True] * 5


@pytest.mark.skipif(chromium.path() is None, reason="needs Chromium")
def test_in_chromium(installed):
    """The module for browsers fetches the engine from beside it, and answers as in Node."""
    x = scores("float32")
    requests = [*requests_of("apply", x), *requests_of("sample", x, draws=2, random=[0.3] * 24)]
    (installed / "npm.mjs").write_bytes((Path(__file__).parent / "npm.mjs").read_bytes())
    (installed / "index.html").write_text(
        '<!doctype html><script type="importmap">{"imports": {"anymax": "./node_modules/anymax/browser.mjs"}}</script>'
        '<script type="module">import { load } from "anymax"; import { answer } from "./npm.mjs";'
        f"window.answers = answer(load, {json.dumps(requests)}); document.documentElement.dataset.ready = 'true';</script>",
        encoding="utf-8",
    )

    class Quiet(http.server.SimpleHTTPRequestHandler):
        extensions_map = {".mjs": "text/javascript", ".html": "text/html", "": "application/octet-stream"}  # noqa: RUF012

        def log_message(self, *words): ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=installed))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    browser = chromium.Chromium()
    try:
        browser.open(f"http://127.0.0.1:{server.server_port}/index.html")
        replies = browser.js("window.answers")
    finally:
        browser.close()
        server.shutdown()
        server.server_close()
    for (name, (mapping, _)), reply, drawn in zip(MAPS.items(), replies, replies[len(MAPS) :], strict=False):
        close(got(reply, x.shape), reference(functools.partial(anymax.apply, mapping), x), "float32", name)
        assert got(drawn).shape == (24,), name


# -- the package as it is sent ---------------------------------------------------------------------------------------


def test_the_package_knows_every_map_of_the_kernels(installed):
    """All but Ranks, whose rows are sorted and have no link, Bounded, whose classes have bounds, and Ratio's relu, a user's function."""
    text = (installed / "node_modules" / "anymax" / "codes.mjs").read_text(encoding="utf-8")
    tables = {name: json.loads(body) for name, body in re.findall(r"export const (\w+) = (.*);", text)}
    assert list(tables["MAP"].values()) == list(link.MAPS.values())
    assert tables["NOISE"] == link.NOISES
    assert len(tables["OP"]) == len(link.CODES)
    names = set(re.findall(r"^  (\w+): \{", (SOURCES / "maps.mjs").read_text(encoding="utf-8"), flags=re.M))
    assert names == {kind.name for kind in anymax.mappings.CATALOGUE if kind.kernel} - {"ranks", "bounded"}
    types = re.search(r"type Name = (.*);", (SOURCES / "anymax.d.ts").read_text(encoding="utf-8"))
    assert set(re.findall(r'"(\w+)"', types[1])) == names
    assert names == set(re.findall(r"^\| `(\w+)` \|", (SOURCES / "README.md").read_text(encoding="utf-8"), flags=re.M))


@node
def test_the_types_name_every_function(installed):
    script = 'import { load } from "anymax"; console.log(JSON.stringify(Object.keys(await load())));'
    types = (SOURCES / "anymax.d.ts").read_text(encoding="utf-8").partition("interface Anymax")[2]
    named = re.findall(r"^  (?:readonly )?(\w+)(?:<.*?>)?[(:]", types, flags=re.M)
    assert sorted(named) == sorted(json.loads(run_node(installed, script)))


@pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm")
def test_the_archive_has_what_it_should(tmp_path, capsys):
    npm.make(tmp_path / "npm")
    assert npm.packed(tmp_path / "npm") == 0
    said = capsys.readouterr().out
    files = [*npm.WRITTEN, *npm.MADE]
    assert said.splitlines()[:-1] == sorted(files)
    [archive] = tmp_path.glob("*.tgz")
    assert archive.name == f"anymax-{anymax.__version__}.tgz"
    assert archive.stat().st_size <= npm.MOST
    with tarfile.open(archive) as file:
        assert sorted(file.getnames()) == sorted(f"package/{name}" for name in files)
        held = file.extractfile("package/anymax.wasm").read()
    assert held == explorer.wasm_of(explorer.INDEX.read_text(encoding="utf-8"))
    assert held[:4] == b"\0asm"
