"""The floors of the house: what may import what, what a name means, and how long a file may be."""

import ast
import functools
import inspect
import pathlib
import re
import sys

import pytest

import anymax as am

ROOT = pathlib.Path(am.__file__).parent
REPOSITORY = pathlib.Path(__file__).parents[2]

# The rooms of the house from the ground up: a file imports from its own room and from floors below, in functions too.
FLOORS = (
    ("_version", "_array"),
    ("_core", "_random"),
    ("mappings",),
    ("kernels",),
    ("autodiff", "transforms"),
    ("functional", "transport"),
    ("losses", "thresholds", "inspection"),
    ("likelihood", "segments", "contract"),
    ("sampling", "_attention", "linear"),
    ("_config", "distributed", "margins", "routing"),
    ("nn", "sklearn", "plot"),
    ("hf", "vllm", "numpyro", "cli"),
    ("__init__", "__main__"),
)
HEIGHT = {name: height for height, names in enumerate(FLOORS) for name in names}
ROOT_FILES = 12  # files in the root: the public faces


@functools.cache
def modules():
    return {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path for path in ROOT.rglob("*.py")}


def nodes_of(path):
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imports(name, path):
    """(module of ours or top-level package, is it ours?) of every import of a file, those in functions and `sys.modules` included."""
    return list(_imports(name, path))


def _imports(name, path):
    package, nodes = name.split(".")[:-1], nodes_of(path)
    for_types = {
        n
        for b in nodes
        if isinstance(b, ast.If) and "TYPE_CHECKING" in ast.dump(b.test) and not isinstance(b.test, ast.UnaryOp)
        for statement in b.body
        for n in ast.walk(statement)
    }
    for node in nodes:
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.split(".")[0], False
        elif isinstance(node, ast.ImportFrom):
            if not node.level:
                yield node.module.split(".")[0], False
                continue
            base = package[: len(package) - node.level + 1]
            target = base + (node.module.split(".") if node.module else [])
            for alias in node.names:
                inside = ".".join([*target, alias.name])
                yield (inside if _known(inside) else ".".join(target) or "__init__"), True
    for target in re.findall(r"""sys\.modules(?:\.get\(|\[)\s*["']anymax\.([\w.]+)""", path.read_text()):
        yield target, True


def _known(name):
    return (ROOT / (name.replace(".", "/") + ".py")).exists() or (ROOT / name.replace(".", "/")).is_dir()


def floor(name):
    return HEIGHT[name.split(".")[0]]


def test_every_module_stands_on_a_floor():
    assert {name.split(".")[0] for name in modules()} == set(HEIGHT)


def uphill(name, path):
    """The imports of a file that go to a floor above its own, or to another room of its floor that imports this room."""
    return [f"{name} imports {target}" for target, ours in imports(name, path) if ours and floor(target) > floor(name)]


def test_imports_run_downhill():
    assert not [line for name, path in modules().items() for line in uphill(name, path)]


def circle_of(graph):
    """The names along a circle of a graph, name -> names; None where there is none."""
    done, path = set(), []

    def visit(name):
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return None
        path.append(name)
        for target in sorted(graph.get(name, ())):
            found = visit(target)
            if found:
                return found
        path.pop()
        done.add(name)
        return None

    return next((found for name in sorted(graph) if (found := visit(name))), None)


def test_there_are_no_circles():
    """Of files; an import in a function counts."""
    found = modules()

    def file(target):
        return target if target in found else f"{target}.__init__"

    graph = {
        name: {file(target) for target, ours in imports(name, path) if ours} - {name} for name, path in found.items()
    }
    assert circle_of(graph) is None
    rooms = {}
    for name, targets in graph.items():
        room = name.split(".")[0]
        rooms.setdefault(room, set()).update({target.split(".")[0] for target in targets} - {room})
    assert circle_of(rooms) is None


def test_the_benchmarks_have_no_circles():
    """Late imports count: a circle that waits is one all the same."""
    graph = {}
    for path in (REPOSITORY / "benchmarks").glob("*.py"):
        nodes = [n for n in nodes_of(path) if isinstance(n, ast.ImportFrom) and n.level]
        named = [{n.module} if n.module else {a.name for a in n.names} for n in nodes]
        graph[path.stem] = set().union(*named) - {path.stem}
    assert len(graph) > 5
    assert circle_of(graph) is None


def test_a_planted_circle_is_seen():
    assert circle_of({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]
    assert circle_of({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None


def test_the_root_holds_the_public_faces():
    files = sorted(path.name for path in ROOT.glob("*.py"))
    assert len(files) <= ROOT_FILES, files
    assert {name for name in files if name.startswith("_") and not name.startswith("__")} == {
        "_config.py",
        "_version.py",
    }


def test_no_name_is_a_package_and_something_else():
    for path in ROOT.iterdir():
        if (path / "__init__.py").exists() and path.name in vars(am):
            assert vars(am)[path.name] is sys.modules[f"anymax.{path.name}"]


# A framework is imported by files that are named for it, and by these.
LEAVES = {
    "torch": ("nn", "hf", "vllm", "autodiff.saving", "kernels.triton"),
    "jax": ("kernels.xla", "numpyro"),
    "numpyro": ("numpyro",),
    "matplotlib": ("plot",),
    "transformers": ("hf",),
    "triton": ("kernels.triton",),
    "sklearn": ("sklearn",),
    "dask": ("sklearn",),
}
TOOLS = {"kernels.library": {"threadpoolctl"}, "sklearn": {"threadpoolctl", "distributed", "scipy", "pandas"}}


def may_import(name, package):
    if package in {*sys.stdlib_module_names, "numpy", "array_api_compat", "typing_extensions"} or name.startswith(
        "cli."
    ):
        return True
    if re.search(rf"(^|[._]){package}($|_)", name.rsplit(".", 1)[-1]):
        return True
    homes = (*LEAVES.get(package, ()), *(home for home, tools in TOOLS.items() if package in tools))
    return any(name == home or name.startswith((f"{home}.", f"{home}_")) for home in homes)


def strays(name, path):
    return [f"{name} imports {what}" for what, ours in imports(name, path) if not ours and not may_import(name, what)]


def test_frameworks_only_in_leaves():
    assert not [line for name, path in modules().items() for line in strays(name, path)]


# Who may load a file of ours that is named for a framework, beside files that are: bridges and their parts, engines, and choices that go
# by more than the framework (a group of processes, an implementation of attention).
LOADERS = {
    "autodiff.__init__", "segments.__init__", "likelihood.__init__", "linear.__init__", "autodiff.choose_group", "distributed.call",
    "__init__", "_config", "kernels.__init__", "kernels.triton", "segments.layout", "_attention.implementations",
    "_attention.linear", "numpyro", "transport.sinkhorn", "transport.gumbel",
}  # fmt: skip
NAMED = re.compile(r"(^|[._])(torch|jax|dtensor|triton|xla)($|_)")


def test_bridge_alone_chooses_by_the_framework():
    stray = [
        f"{name} imports {target}"
        for name, path in modules().items()
        for target, ours in imports(name, path)
        if ours and NAMED.search(target.rsplit(".", 1)[-1]) and not NAMED.search(name.rsplit(".", 1)[-1])
        if name not in LOADERS and name.rsplit(".", 1)[0] not in LOADERS
    ]
    assert not stray


# The adapter; two calls that take so little time that their functions are written out; those of a group and of hooks, which have no engine.
WITH_FUNCTIONS = {"autodiff.torch_adapter", "autodiff.torch_rows", "autodiff.torch", "autodiff.torch_group", "hf.head"}


def test_one_adapter_makes_derivatives_for_torch():
    sources = {name: path.read_text() for name, path in modules().items()}
    assert {name for name, text in sources.items() if "autograd.Function)" in text} == WITH_FUNCTIONS
    assert {name for name, text in sources.items() if "register_fake" in text} == {"autodiff.torch_adapter"}


def overridden(bridge):
    """(operation, its signature in the contract, its signature here) of what a bridge, or a part of one, has of its own."""
    contract = type(bridge).__mro__[1]
    for name, function in vars(type(bridge)).items():
        if callable(function):
            yield name, *(list(inspect.signature(f).parameters) for f in (getattr(contract, name), function))


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_a_bridge_and_its_parts_have_one_contract(framework):
    xp = pytest.importorskip("jax.numpy" if framework == "jax" else framework)
    bridge = am.autodiff.bridge(xp.zeros(2))
    assert bridge.framework == framework
    for part in (bridge, bridge.layers):
        for name, contract, own in overridden(part):
            assert own == contract, f"{framework}: {name}"
    assert list(inspect.signature(bridge.segments).parameters) == ["op", "mapping", "x", "along", "target_rank"]
    parameters = inspect.signature(bridge.terms).parameters
    named = {name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert (list(parameters)[:2], named - {"xp"}) == (["x", "index"], {"scale", "entropy", "rest"})


def test_rows_are_widened_in_one_place():
    """A class that a map hides joins the rows in `Rows.over_all`; what is below knows no such map."""
    named = {(name, n.attr) for name, path in modules().items() for n in nodes_of(path) if isinstance(n, ast.Attribute)}
    low = ("_core.", "kernels.", "autodiff.")
    asking = {name for name, attribute in named if attribute == "hidden" and name.startswith(low)}
    assert asking == {"_core.mapping", "_core.rows", "kernels.__init__"}


def test_a_provider_that_is_not_set_is_an_internal_error():
    from anymax._core.providers import Providers

    providers = Providers()
    with pytest.raises(RuntimeError, match=r"internal error: call is used before the end of anymax/__init__\.py"):
        providers.call("softmax", None)
    providers.call = print
    with pytest.raises(RuntimeError, match=r"must set providers\.catalogue, providers\.notebook_page"):
        providers.check()


def test_kernels_do_not_know_maps():
    for name, path in modules().items():
        if name.startswith("kernels"):
            assert not [t for t, ours in imports(name, path) if ours and t.startswith("mappings")]


# hasattr is for objects of other packages: module -> the names it is called on there. Maps, engines and bridges have base classes with
# defaults, so neither hasattr nor getattr with a default is called on them.
OURS = {"mapping", "m", "found", "engine", "bridge", "leaf", "link", "transform", "link_of(mapping)"}
ASKED = {
    "_array.kinds": {"torch", "x"}, "_array.dtypes": {"xp"}, "_array.tracing": {"jax.lax", "lax"},
    "contract.on_numpy": {"m"}, "contract.on_frameworks": {"jax"}, "kernels.library": {"threadpoolctl", "os"},
    "transforms.configs": {"kind"},  # vLLM's SamplingParams is a msgspec.Struct
    "hf.head": {"model", "config"}, "_core.options": {"function"},
    "nn.base": {"self"},  # torch's Module has names of its own, which a parameter of a map may have too
    "sklearn.classes": {"self"}, "sklearn.labels": {"self"}, "sklearn.distributions": {"self"},  # as scikit-learn has it: fitted or not
}  # fmt: skip


def asked_by_name(path):
    """The objects on which a file calls `hasattr` or `dir`, and those of ours on which it calls `vars`, or `getattr` with a default."""
    for node in nodes_of(path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            call, what = node.func.id, ast.unparse(node.args[0])
            of_ours = what in OURS and (call == "vars" or (call == "getattr" and len(node.args) == 3))
            if call in ("hasattr", "dir") or of_ours:
                yield what


def compared(path):
    """The comparisons by which a file finds out which map or which engine it has: of `.kernel`, and of an engine with another."""
    for node in nodes_of(path):
        if isinstance(node, ast.Compare):
            sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
            names = {side.split(".")[-1] for side in sides} if "None" not in sides else set()
            if names & {"kernel", "engine", "_engine", "ENGINE", "RAGGED"}:
                yield ast.unparse(node)


def test_no_contract_by_name():
    asked = {name: {*asked_by_name(path)} - ASKED.get(name, set()) for name, path in modules().items()}
    assert not {name: what for name, what in asked.items() if what}, "by hasattr, dir, vars, or getattr with a default"


def test_only_engines_know_which_map_and_which_engine_it_is():
    found = {name: [*compared(path)] for name, path in modules().items() if not name.startswith("kernels")}
    assert not {name: what for name, what in found.items() if what}


LONGEST = 500  # lines of a file, but for tables of data


def long_files(root):
    """The sources of more than LONGEST lines."""
    kinds = {".py", ".mjs", ".h", ".hpp", ".cpp"}
    files = [path for folder in ("src", "csrc") for path in (root / folder).rglob("*") if path.suffix in kinds]
    return {path.relative_to(root).as_posix() for path in files if len(path.read_text().splitlines()) > LONGEST}


@pytest.mark.skipif(not (REPOSITORY / "csrc").exists(), reason="only in the repository")
def test_no_file_is_long():
    """A file that has become shorter leaves the list."""
    assert not long_files(REPOSITORY)


def test_a_planted_long_file_is_seen(tmp_path):
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "all.hpp").write_text("// more\n" * (LONGEST + 1))
    (tmp_path / "csrc" / "some.hpp").write_text("// less\n" * LONGEST)
    assert long_files(tmp_path) == {"csrc/all.hpp"}


EMITTED = re.compile(r"\bemit(?:_over|_pieces)?\((?:[^;{}]|\n)*?(\[[^\]]*\])\(int64_t")


def emitted_by_reference(text):
    """How lambdas that write a row capture, but for those by value (core/rows.hpp says why)."""
    return [capture for capture in EMITTED.findall(text) if "&" in capture]


@pytest.mark.skipif(not (REPOSITORY / "csrc").exists(), reason="only in the repository")
def test_what_writes_a_row_captures_by_value():
    texts = {path: path.read_text() for path in (REPOSITORY / "csrc").rglob("*.hpp")}
    assert sum(len(EMITTED.findall(text)) for text in texts.values()) >= 8
    assert not {path.name for path, text in texts.items() if emitted_by_reference(text)}


def test_a_planted_capture_by_reference_is_seen():
    assert emitted_by_reference("emit_over(\n    out, e,\n    [&](int64_t i) ANYMAX_EACH { return e[i]; });") == ["[&]"]
    assert not emitted_by_reference("emit(out, scratch, team, [=](int64_t i) ANYMAX_EACH { return e[i]; });")


NAMED_TUPLE = ("_replace", "_asdict", "_fields", "_make")  # public methods of a NamedTuple


def private_uses(name, path):
    """The private names of other files of ours that a file imports, or takes as attributes of what it imports."""
    room, ours = name.split(".")[0], set()

    def private(word):
        return word.startswith("_") and not word.startswith("__") and word not in NAMED_TUPLE

    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.level:
            target = name.split(".")[: -node.level] + (node.module.split(".") if node.module else [])
            for alias in node.names:
                ours.add(alias.asname or alias.name)
                inside = ".".join([*target, alias.name])
                files = inside.split(".") if _known(inside) else target  # a file `_x.py` is for its own room
                if (private(alias.name) and not _known(inside)) or (
                    files[:1] != [room] and any(map(private, files[1:]))
                ):
                    yield f"{name} imports {inside}"
    for node in nodes_of(path):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in ours
            and private(node.attr)
        ):
            yield f"{name} uses {node.value.id}.{node.attr}"


def test_no_file_uses_a_private_name_of_another():
    assert not [line for name, path in modules().items() for line in private_uses(name, path)]


PLANTED = {  # what is wrong -> (the check, a file, what the check says of it)
    "a comparison of maps and engines": (
        compared,
        "m.kernel == 'softmax' or engine is native.ENGINE or engine is None or load() is _engine",
        ["m.kernel == 'softmax'", "engine is native.ENGINE", "load() is _engine"],
    ),
    "dir and vars of a map": (asked_by_name, "dir(mapping), vars(mapping), vars(other)", ["mapping", "mapping"]),
    "hasattr of a map": (asked_by_name, "mapping.loss() if hasattr(mapping, 'loss') else None", ["mapping"]),
    "getattr of a map": (
        asked_by_name,
        "getattr(mapping, 'mass', 1.0) + getattr(config, 'mass', 1.0) + getattr(mapping, 'mass')",
        ["mapping"],
    ),
    "an import of a floor above": (
        lambda path: uphill("_core.solve", path),
        "from ..mappings.entmax import Entmax\ndef f():\n from .. import functional\n sys.modules['anymax.segments'].f()",
        [f"_core.solve imports {target}" for target in ("mappings.entmax", "functional", "segments")],
    ),
    "a framework below": (lambda path: strays("_core.solve", path), "import torch, numpy", ["_core.solve imports torch"]),
    "a private name": (
        lambda path: private_uses("linear.verbs", path),
        ("from .. import _array\nfrom ..kernels import _rows\nfrom ..kernels._memory import recycler\n"
        "from ..kernels.link import Link, _find\nfrom . import _groups\n"
        "_array._foreign(Link._replace(), Link._fields, _array.like)"),
        [
            f"linear.verbs {what}"
            for what in (
                "imports kernels._rows", "imports kernels._memory.recycler", "imports kernels.link._find", "imports linear._groups",
                "uses _array._foreign",
            )
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", PLANTED)
def test_what_is_planted_is_seen(what, tmp_path):
    check, text, said = PLANTED[what]
    path = tmp_path / "planted.py"
    path.write_text(text)
    assert list(check(path)) == said


# What `from .. import` brings into the root and is no public name.
INTERNAL = set(
    "annotations Any TYPE_CHECKING mappings functional kernels likelihood segments providers elsewhere".split()
)
MODULES = "distributed hf linear nn numpyro plot routing sampling segments sklearn transport vllm".split()


def test_all_is_what_is_public():
    assert len(set(am.__all__)) == len(am.__all__)
    assert not {"hf", "nn", "plot"} & set(am.__all__), "a star import must not load a framework"
    assert all(getattr(am, name) is not None for name in am.__all__)
    nodes = [node for node in ast.parse((ROOT / "__init__.py").read_text()).body if isinstance(node, ast.ImportFrom)]
    imported = {alias.asname or alias.name for node in nodes for alias in node.names} - INTERNAL
    assert "*" in imported
    assert imported - {"*"} | set(am.mappings.__all__) | set(am._LATE_NAMES) == set(am.__all__)
    assert dir(am) == sorted([*am.__all__, *MODULES])
    with pytest.raises(AttributeError, match="no attribute 'softmaxx'"):
        am.softmaxx  # noqa: B018


# In `kernels.triton` these alone know maps and arrays: they hand links to the rest, which other packages can have without ours.
AT_THE_DOOR = {f"kernels.triton.{name}" for name in ("__init__", "ragged")}
BELOW_THE_DOOR = {"kernels.link", "kernels._rows"}


def test_the_gpu_kernels_know_links_torch_and_triton_alone():
    allowed = {*sys.stdlib_module_names, "torch", "triton"}
    deep = {n: path for n, path in modules().items() if n.startswith("kernels.triton.") or n in BELOW_THE_DOOR}
    stray = [
        f"{name} imports {target}"
        for name, path in deep.items()
        if name not in AT_THE_DOOR
        for target, ours in imports(name, path)
        if not (target.startswith("kernels.triton") or target in BELOW_THE_DOOR if ours else target in allowed)
        or target in AT_THE_DOOR
    ]
    assert len(deep) > 20
    assert not stray
