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


def js(expression):
    """What a request says by an expression of JavaScript."""
    return {"js": expression}


def sent(a):
    """An array as a request has it: JSON has no NaN and no infinity."""
    kind = {"float32": "Float32Array", "float64": "Float64Array"}[str(a.dtype)]
    words = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
    return {"kind": kind, "numbers": [words.get(str(v), v) for v in a.ravel().astype(float).tolist()]}


def request(call, x, *more, of=None, **options):
    """A call on an array, whose last axis has the classes, or on what is said of it; `of`: the map."""
    if isinstance(x, np.ndarray):
        options = {"classes": x.shape[-1], **options}
        x = sent(x)
    return {"call": call, "x": x, "more": list(more), "options": options} | ({} if of is None else {"map": of})


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


def for_loss(dtype):
    x = scores(dtype)[:5]
    x[4] = 1.0
    return x


ROWS = {"narrow": scores, "wide": wide}
DTYPES = ("float32", "float64")
TARGETS = np.array([0, 6, 2, 1, -100])
SLOPE = np.random.default_rng(6).normal(0, 1, (6, 7))  # of what comes after the probabilities
U = np.random.default_rng(7).random((12, 50))
U[:, 0], U[:, 1] = 0.0, 1.0
GAPS, NOISE_SCALE = [1.0, 8.0, 12.0, 30.0, 60.0, 150.0], 0.75
FAR = {  # log p of the lower of two classes, `d` scales apart
    "normal": lambda d: mp.ncdf(-d / mp.sqrt(2)),
    "logistic": lambda d: (mp.exp(-d) * (d - 1) + mp.exp(-2 * d)) / (1 - mp.exp(-d)) ** 2,
    "laplace": lambda d: mp.exp(-d) * (1 + d / 2) / 2,
    "gumbel": lambda d: 1 / (1 + mp.exp(d)),
}
SEVERAL = np.array([0.0, -0.5, -25.0, 0.0, -40.0])
OWN = {  # functions that are named for a map
    "softmax": ({}, anymax.Softmax()),
    "sparsemax": ({}, anymax.Sparsemax()),
    "entmax": ({"alpha": 1.3}, anymax.Entmax(1.3)),
    "sparseSoftmax": ({"k": 5}, anymax.SparseSoftmax(k=5)),
}
NOTHING = np.zeros(0, np.float32)
EMPTY = {"apply": [], "logApply": [], "vjp": [sent(NOTHING)], "logVjp": [sent(NOTHING)], "loss": [[]], "sample": []}
SAME_TARGETS = {  # integers of any size, as small ones
    "[0n, 2n]": [0, 2],
    "BigInt64Array.of(1n, -5n)": [1, -1],
    "[-(2 ** 63) - 4096, 1]": [-1, 1],
    "[-(2n ** 64n), 1]": [-1, 1],
    "[-(2n ** 64n) + 1n, 1]": [-1, 1],
}
TWO_ROWS, SIX = np.array([[0.6, 0.5, 0.4], [2, 0, 1]]), sent(np.zeros(6, np.float32))
WRONG_TARGETS = {
    "[3n, 0]": "3", "[2n ** 64n, 0]": str(2**64), "[NaN, 0]": "NaN", "['1', 0]": "1", "[undefined, 0]": "undefined",
    "[Symbol.iterator, 0]": "Symbol(",
}  # fmt: skip
WRONG = {  # words -> request
    'there is no map "spasemax"; the maps are softmax, sparsemax, entmax': request("apply", SIX, of="spasemax"),
    "alpha is -1; it has to be a finite number above 0": request("apply", SIX, of={"name": "entmax", "alpha": -1}),
    "softmax: there is no option alpha; it takes none": request("apply", SIX, of={"name": "softmax", "alpha": 1}),
    "k is undefined; it has to be a finite number above 0": request("apply", SIX, of="budget"),
    "k is 7, and there are 6 classes": request("apply", SIX, of={"name": "budget", "k": 7}),
    "give exactly one of k and p": request("apply", SIX, of="sparse_softmax"),
    "order is 3; it has to be an even integer": request("apply", SIX, of={"name": "taylor", "order": 3}),
    '"normal", "logistic"': request("apply", SIX, of={"name": "perturb_max", "noise": "cauchy"}),
    "the scores are of the kind Array; give a Float32Array": request("softmax", [1, 2]),
    "classes is 4 and there are 6 scores": request("softmax", SIX, classes=4),
    "there is no option axis; the options are classes": request("softmax", SIX, axis=1),
    "there are 2 targets and 3 rows": request("loss", SIX, [0, 1], of="softmax", classes=2),
    "a target is 6; it has to be an integer below 6": request("loss", SIX, [6], of="softmax"),
    "taylor has no Fenchel-Young loss": request("loss", SIX, [0], of="taylor"),
    "sigsoftmax has none": request("threshold", SIX, of="sigsoftmax"),
    "is Float64Array of 6 and the scores Float32Array of 6": request("vjp", SIX, sent(np.zeros(6)), of="softmax"),
    "draws is -1": request("sample", SIX, of="softmax", draws=-1),
    "scale is half": request("lossGradient", SIX, [0], of="softmax", scale="half"),
    "random is 5; it has to be a function": request("sample", SIX, of="softmax", random=5),
} | {
    f"sample: random gave {value}; it has to give numbers from 0 to 1": request("sample", SIX, of="softmax", random=js(f"() => {value}"))
    for value in ("NaN", "1.5", "-0.1", "undefined")
} | {
    f"a target is {said}": request("loss", TWO_ROWS, js(given), of="softmax") for given, said in WRONG_TARGETS.items()
}  # fmt: skip


def asked():
    """Every request of this file, by the words of the test that asks it."""
    for name, (_, given) in MAPS.items():
        for dtype in DTYPES:
            for rows, made in ROWS.items():
                yield ("p", name, rows, dtype), request("apply", made(dtype), of=given)
                yield ("log p", name, rows, dtype), request("logApply", made(dtype), of=given)
            slope, x = sent(SLOPE.astype(dtype)), for_loss(dtype)
            for call in ("vjp", "logVjp"):
                yield (call, name, dtype), request(call, scores(dtype)[:6], slope, of=given)
            yield ("loss", name, dtype), request("loss", x, TARGETS.tolist(), of=given)
            yield ("lossGradient", name, dtype), request("lossGradient", x, TARGETS.tolist(), of=given, scale=0.25)
            yield ("threshold", name, dtype), request("threshold", x, of=given)
        yield ("drawn", name), request("sample", scores("float32"), of=given, draws=50, random=U.ravel().tolist())
    for noise in FAR:
        for dtype in DTYPES:
            x = np.array([[0, -gap, -np.inf] for gap in GAPS], dtype)
            of = {"name": "perturb_max", "noise": noise, "scale": NOISE_SCALE}
            yield ("far below", noise, dtype), request("logApply", x, of=of)
    yield "far below several", request("logApply", SEVERAL, of="perturb_max")
    yield "not integrated", request("logApply", np.array([0.0, -1e5, -np.inf]), of="perturb_max")
    yield from ((("own", call), request(call, wide("float64"), **given)) for call, (given, _) in OWN.items())
    yield "logSoftmax", request("logSoftmax", wide("float64"))
    yield "one row", request("softmax", sent(np.array([1.0, 2.0])))
    yield from ((("empty", call), request(call, sent(NOTHING), *more, of="sparsemax")) for call, more in EMPTY.items())
    for given, small in SAME_TARGETS.items():
        yield ("target", given), request("loss", TWO_ROWS, js(given), of="softmax")
        yield ("small target", given), request("loss", TWO_ROWS, small, of="softmax")
    yield "a half", request("sample", np.array([0.6, 0.5, 0.4]), of="softmax", random=js("() => 0.5"))
    yield from ((("wrong", words), wrong) for words, wrong in WRONG.items())


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder in which `import "anymax"` finds the package, as npm puts it there."""
    folder = tmp_path_factory.mktemp("project")
    npm.make(folder / "node_modules" / "anymax")
    (folder / "npm.mjs").write_bytes((Path(__file__).parent / "npm.mjs").read_bytes())
    return folder


def run_node(folder, script, requests=()):
    if shutil.which("node") is None:
        pytest.skip("needs Node")
    (folder / "script.mjs").write_text(script, encoding="utf-8")
    done = subprocess.run(
        ["node", folder / "script.mjs"], input=json.dumps(requests), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def replies(installed):
    """The answers to all requests, in one run of Node."""
    script = """
    import { readFileSync } from "node:fs";
    import { load } from "anymax";
    import { answer } from "./npm.mjs";
    console.log(JSON.stringify(await answer(load, JSON.parse(readFileSync(0, "utf8")))));
    """
    every = dict(asked())
    return dict(zip(every, json.loads(run_node(installed, script, list(every.values()))), strict=True))


def got(reply, shape=None):
    assert "refused" not in reply, reply
    numbers = np.array([float(str(v).replace("Infinity", "inf")) for v in reply["numbers"]], reply["kind"][:-5].lower())
    return numbers if shape is None else numbers.reshape(shape)


def reference(function, x, *more):
    """In double precision, from the formulas and not from kernels compiled from the same sources."""
    with anymax.use("reference"), np.errstate(all="ignore"):
        return function(x.astype(np.float64), *(m.astype(np.float64) if m.dtype.kind == "f" else m for m in more))


def close(found, wanted, dtype, what, scale=1.0):
    assert str(found.dtype) == dtype, what
    tolerance = {"float32": 3e-6, "float64": 2e-11}[dtype]
    assert np.array_equal(np.isfinite(found), np.isfinite(wanted)), (what, found, wanted)
    assert np.allclose(found, wanted, rtol=tolerance, atol=tolerance * scale, equal_nan=True), (what, found - wanted)


each_map, each_dtype = pytest.mark.parametrize("name", MAPS), pytest.mark.parametrize("dtype", DTYPES)


@each_map
@each_dtype
@pytest.mark.parametrize("rows", ROWS)
def test_probabilities(replies, name, dtype, rows):
    x, mapping = ROWS[rows](dtype), MAPS[name][0]
    p, wanted = got(replies["p", name, rows, dtype], x.shape), reference(functools.partial(anymax.apply, mapping), x)
    close(p, wanted, dtype, name)
    log_p = got(replies["log p", name, rows, dtype], x.shape)
    wanted_log = reference(functools.partial(anymax.log_apply, mapping), x)
    assert np.isneginf(log_p[np.isneginf(wanted_log)]).all()
    if name in ("softmax", "entmax at 1"):
        close(log_p, wanted_log, dtype, name, scale=100)
    near = wanted > (1e-3 if name == "perturbed" else 1e-30 if dtype == "float32" else 1e-300)  # quadrature
    close(log_p[near], wanted_log[near], dtype, name, scale=10_000 if name == "perturbed" else 100)


@pytest.mark.whole
@each_map
@each_dtype
def test_gradients(replies, name, dtype):
    mapping, x, g = MAPS[name][0], scores(dtype)[:6], SLOPE.astype(dtype)
    wanted = reference(lambda x, g: np.einsum("ri,rij->rj", g, anymax.jacobian(mapping, x)), x, g)
    close(got(replies["vjp", name, dtype], x.shape), wanted, dtype, name, scale=10)

    def pulled_back(x, g):
        p = anymax.apply(mapping, x)
        return np.einsum("ri,rij->rj", np.where(p > 0, g / np.where(p > 0, p, 1), 0), anymax.jacobian(mapping, x))

    found, plain = got(replies["logVjp", name, dtype], x.shape), [0, 1, 3, 4, 5]  # p underflows in the other row, here
    assert np.isfinite(found).all()
    close(found[plain], reference(pulled_back, x, g)[plain], dtype, name, scale=300)


@pytest.mark.whole
@each_map
@each_dtype
def test_losses(replies, name, dtype):
    mapping, x = MAPS[name][0], for_loss(dtype)
    reply, slope, tau = (replies[call, name, dtype] for call in ("loss", "lossGradient", "threshold"))
    has_loss = mapping.facts.has_potential and name != "budget"
    assert ("refused" in reply) == ("refused" in slope) == (not has_loss)
    if has_loss:
        wanted = reference(lambda x: anymax.fenchel_young(mapping, x, TARGETS, reduction="none"), x)
        close(got(reply), wanted, dtype, name, scale=50)
        p = reference(functools.partial(anymax.apply, mapping), x)
        wanted = 0.25 * (p - (TARGETS[:, None] == np.arange(7))) * (TARGETS >= 0)[:, None]
        close(got(slope, x.shape), wanted, dtype, name)
    assert ("refused" in tau) == (not mapping.has_threshold)
    if mapping.has_threshold:
        close(got(tau), reference(lambda x: anymax.threshold(mapping, x).tau, x), dtype, name, scale=10)


@each_map
def test_draws_are_an_inversion(replies, name):
    """A number draws the first class whose cumulative sum exceeds it, never one of probability 0; a row without a class draws -1."""
    drawn = got(replies["drawn", name], U.shape)
    p = reference(functools.partial(anymax.apply, MAPS[name][0]), scores("float32"))
    for row, numbers, classes in zip(p, U, drawn, strict=True):
        if not row.sum() > 0:
            assert (classes == -1).all()
            continue
        assert (row[classes] > 0).all()
        upto = np.cumsum(row) / row.sum()
        at = np.clip(numbers, 0, 1 - 1e-12)
        low = np.where(classes > 0, upto[np.maximum(classes - 1, 0)], 0)
        assert ((low <= at + 1e-6) & (at <= upto[classes] + 1e-6)).all()


@each_dtype
@pytest.mark.parametrize("noise", FAR)
def test_log_p_of_a_perturbed_class_far_below_another(replies, noise, dtype):
    """p of such a class is 0 in double precision, and log p is finite: of two classes it has a closed form."""
    log_p = got(replies["far below", noise, dtype], (len(GAPS), 3))
    wanted = [float(mp.log(FAR[noise](mp.mpf(d) / NOISE_SCALE))) for d in GAPS]
    np.testing.assert_allclose(log_p[:, 1], wanted, rtol=1e-4, atol=1e-5)
    assert np.isneginf(log_p[:, 2]).all()


@pytest.mark.whole
def test_log_p_of_a_perturbed_class_far_below_several(replies):
    x = SEVERAL
    with mp.workdps(30):

        def density(u, i):
            return mp.npdf(u - x[i]) * mp.fprod(mp.ncdf(u - v) for j, v in enumerate(x) if j != i)

        wanted = [float(mp.log(mp.quad(lambda u, i=i: density(u, i), range(-36, 12, 3)))) for i in range(5)]
    np.testing.assert_allclose(got(replies["far below several"]), wanted, rtol=1e-5)


def test_log_p_far_below_what_is_integrated_is_finite(replies):
    log_p = got(replies["not integrated"])
    assert -1e11 < log_p[1] < -1e4
    assert np.isneginf(log_p[2])


@pytest.mark.parametrize("given", SAME_TARGETS)
def test_integers_of_any_size_are_targets(replies, given):
    assert got(replies["target", given]).tolist() == got(replies["small target", given]).tolist()


def test_a_number_draws_a_class(replies):
    assert got(replies["a half"]).tolist() == [1]


@pytest.mark.parametrize("call", OWN)
def test_names_of_their_own(replies, call):
    x = wide("float64")
    wanted = reference(functools.partial(anymax.apply, OWN[call][1]), x)
    close(got(replies["own", call], x.shape), wanted, "float64", call)


def test_log_softmax_and_one_row(replies):
    x = wide("float64")
    close(got(replies["logSoftmax"], x.shape), reference(anymax.log_softmax, x), "float64", "logSoftmax")
    close(got(replies["one row"]), anymax.softmax(np.array([1.0, 2.0])), "float64", "one row")


@pytest.mark.parametrize("call", EMPTY)
def test_nothing_gives_nothing(replies, call):
    assert got(replies["empty", call]).size == 0


@pytest.mark.parametrize("words", WRONG)
def test_what_is_refused(replies, words):
    reply = replies["wrong", words]
    assert words in reply.get("refused", reply)
    assert reply["kind"] in ("TypeError", "RangeError")


# -- the package as it is made, at work ------------------------------------------------------------------------------


@pytest.mark.whole
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


@pytest.mark.whole
def test_the_readme_prints_what_it_says(installed):
    blocks = re.findall(r"```js\n(.*?)```", (SOURCES / "README.md").read_text(encoding="utf-8"), flags=re.S)
    assert len(blocks) == 2
    show = "console.log = (v) => process.stdout.write(Array.from(v, (t) => Number(t.toFixed(3))).join(' ') + '\\n');\n"
    for block in blocks:
        assert run_node(installed, show + block).splitlines() == re.findall(
            r"console\.log\(.*\); // (.*)$", block, flags=re.M
        )


def test_many_calls_leave_the_memory_as_it_is(installed):
    """A call gives back what it takes of the engine's memory, or keeps it for the next; results of before stay as they are."""
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
    const p = anymax.softmax(x);
    anymax.entmax(x, { classes: 100 });  // what it keeps for the next call, it takes once
    const before = memory.buffer.byteLength;
    for (let i = 0; i < 300; i++) {
      anymax.entmax(x, { classes: 100 });
      try { anymax.loss("taylor", x, [0]); } catch {}
    }
    const after = memory.buffer.byteLength, many = anymax.sparsemax(new Float32Array(8_000_000), { classes: 100 });
    const right = [after === before, memory.buffer.byteLength > before, p[7] === Math.fround(1e-5), Math.abs(many[0] - 0.01) < 1e-8];
    console.log(JSON.stringify([...right, await load() === await load()]));
    """
    assert json.loads(run_node(installed, script)) == [True] * 5


@pytest.mark.whole
@pytest.mark.skipif(chromium.path() is None, reason="needs Chromium")
def test_in_chromium(installed):
    """The module for browsers fetches the engine from beside it, and answers as in Node."""
    x = scores("float32")
    requests = [request("apply", x, of=given) for _, given in MAPS.values()]
    requests += [request("sample", x, of=given, draws=2, random=[0.3] * 24) for _, given in MAPS.values()]
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
    """All but Ranks and Fusedmax, whose rows have no link, Bounded, whose classes have bounds, Softpick, whose rows have no fixed sum, and
    Ratio's relu, a user's function."""
    text = (installed / "node_modules" / "anymax" / "codes.mjs").read_text(encoding="utf-8")
    tables = {name: json.loads(body) for name, body in re.findall(r"export const (\w+) = (.*);", text)}
    assert list(tables["MAP"].values()) == list(link.MAPS.values())
    assert tables["NOISE"] == link.NOISES
    assert len(tables["OP"]) == len(link.CODES)
    names = set(re.findall(r"^  (\w+): \{", (SOURCES / "maps.mjs").read_text(encoding="utf-8"), flags=re.M))
    others = {"ranks", "fusedmax", "bounded", "softpick"}
    assert names == {kind.name for kind in anymax.mappings.CATALOGUE if kind.kernel} - others
    types = re.search(r"type Name = (.*);", (SOURCES / "anymax.d.ts").read_text(encoding="utf-8"))
    assert set(re.findall(r'"(\w+)"', types[1])) == names
    assert names == set(re.findall(r"^\| `(\w+)` \|", (SOURCES / "README.md").read_text(encoding="utf-8"), flags=re.M))


@pytest.mark.whole
def test_the_types_name_every_function(installed):
    script = 'import { load } from "anymax"; console.log(JSON.stringify(Object.keys(await load())));'
    types = (SOURCES / "anymax.d.ts").read_text(encoding="utf-8").partition("interface Anymax")[2]
    named = re.findall(r"^  (?:readonly )?(\w+)(?:<.*?>)?[(:]", types, flags=re.M)
    assert sorted(named) == sorted(json.loads(run_node(installed, script)))


@pytest.mark.whole
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
