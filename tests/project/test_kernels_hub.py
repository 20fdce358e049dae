"""The package for the `kernels` hub of Hugging Face (packaging/kernels): its text, and its own tests with torch and Triton alone."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
HERE = ROOT / "packaging" / "kernels"
if not HERE.is_dir():
    pytest.skip("packaging is in the repository only", allow_module_level=True)

_spec = importlib.util.spec_from_file_location("kernels_hub_generate", HERE / "generate.py")
generator = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generator)

# imports as a bare environment has them: files of the package get the standard library, torch and triton, and nobody gets anymax
BARE = """
import os, sys

FOLDER, ALONE = os.environ["HUB_FOLDER"], os.environ["HUB_ALONE"] == "1"
GIVEN = {*sys.stdlib_module_names, "torch", "triton", "pytest", "_pytest"}


class Bare:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        ours = frame.f_code.co_filename.startswith(FOLDER)
        known = top in GIVEN or top.startswith("_anymax_") or top == "tests"
        if top == "anymax" or (ALONE and top == "numpy") or (ours and not known):
            raise ModuleNotFoundError(f"{name} is not in a bare environment (wanted by {frame.f_code.co_filename})", name=name)


sys.meta_path.insert(0, Bare())
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = generator.generate(tmp_path_factory.mktemp("hub") / "anymax")
    generator.build(folder, ("cuda", "rocm", "cpu"))
    return folder


def bare(package, code, *, interpreted, alone=False, folder="cuda"):
    """Runs code in a process with the imports of a bare environment; `alone`: without NumPy, which the interpreter needs."""
    given = {
        "HUB_FOLDER": str(package), "HUB_ALONE": str(int(alone)), "ANYMAX_KERNEL": str(package / "build" / f"torch-{folder}"),
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    env = {**os.environ, **given}
    env.pop("TRITON_INTERPRET", None)
    if interpreted:
        env["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-c", BARE + code]
    return subprocess.run(command, env=env, cwd=package, capture_output=True, text=True, timeout=1500, check=False)


# -- its text ---------------------------------------------------------------------------------------------------------------------------


def sources(package):
    found = {path.relative_to(package).as_posix(): path.read_text() for path in package.glob("*/**/*.py")}
    return {name: text for name, text in found.items() if not name.startswith(("build/torch-rocm", "build/torch-cpu"))}


# what Python 3.9 does not have, by the call or the name; `ast.parse` knows its grammar
LATER = {("zip", "strict"), ("dataclass", "slots"), ("dataclass", "kw_only")}
LATER_NAMES = {
    "pairwise", "bit_count", "TypeAlias", "ParamSpec", "Self", "NotRequired", "StrEnum", "EllipsisType", "NoneType",
    "batched",
}  # fmt: skip


def later_than_39(text):
    """What the code of a file does at run time that Python 3.9 can't."""
    tree = ast.parse(text, feature_version=(3, 9))
    notes = set()
    for node in ast.walk(tree):
        parts = [getattr(node, name, None) for name in ("annotation", "returns")]
        notes |= {id(n) for part in parts if part is not None for n in ast.walk(part)}
    lazy = "from __future__ import annotations" in text
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            yield from (f"{name}({word.arg}=)" for word in node.keywords if (name, word.arg) in LATER)
            kinds = node.args[1:] if name in ("isinstance", "issubclass") else []
            yield from (ast.unparse(n) for kind in kinds for n in ast.walk(kind) if isinstance(n, ast.BinOp))
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple):
            starred = any(isinstance(n, ast.Starred) for n in node.slice.elts)
            if starred and not ast.get_source_segment(text, node.slice).startswith("("):
                yield ast.unparse(node)
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
        names = [a.name for a in node.names] if isinstance(node, ast.ImportFrom) else [name]
        yield from (n for n in names if n in LATER_NAMES)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) and not (lazy and id(node) in notes):
            sides = {ast.unparse(side) for side in (node.left, node.right)}
            if sides & {"None", *(n for n in vars(builtins) if isinstance(getattr(builtins, n), type))}:
                yield ast.unparse(node)
        if isinstance(node, ast.Match):
            yield "match"


@pytest.mark.whole
def test_python_39_reads_and_runs_it(package):
    texts = sources(package)
    assert len(texts) > 60
    stray = {name: found for name, text in texts.items() if (found := list(later_than_39(text)))}
    assert not stray


@pytest.mark.whole
def test_what_python_39_lacks_is_seen():
    bad = (
        "import itertools\nT = int | None\nzip([], strict=True)\nitertools.pairwise([])\ndef f(x: int | None): ...\n"
        "isinstance(T, A | B)\nT[*T, 1]\nT[(*T, 1)]\n"
    )
    assert sorted(later_than_39(bad)) == ["A | B", "T[*T, 1]", "int | None", "int | None", "pairwise", "zip(strict=)"]
    assert len(list(later_than_39("from __future__ import annotations\n" + bad))) == 5
    with pytest.raises(SyntaxError):
        list(later_than_39("match 1:\n    case 1: pass\n"))


@pytest.mark.whole
def test_imports_are_relative_or_of_torch_triton_and_the_standard_library(package):
    for name, text in sources(package).items():
        known = {*sys.stdlib_module_names, "torch", "triton"}
        known |= {"pytest"} if name.startswith("tests/") else {"kernels"} if name.startswith("benchmarks/") else set()
        here = (package / name).parent
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                assert {a.name.split(".")[0] for a in node.names} <= known, name
            elif isinstance(node, ast.ImportFrom) and not node.level:
                assert node.module.split(".")[0] in known, name
            elif isinstance(node, ast.ImportFrom):
                folder = here
                for _ in range(node.level - 1):
                    folder = folder.parent
                target = folder.joinpath(*(node.module or "").split(".")) if node.module else folder
                assert target.with_suffix(".py").is_file() or target.is_dir() or target.name == "_ops", (name, target)
                assert folder.is_relative_to(package / name.split("/")[0])


@pytest.mark.whole
def test_the_kernels_are_copied_as_they_are(package):
    inside = package / "torch-ext" / "anymax" / "_kernels"
    copied = [path for path in inside.rglob("*.py") if path.name != "__init__.py"]
    assert len(copied) > 25
    for path in copied:
        assert path.read_bytes() == (generator.ENGINE / path.relative_to(inside)).read_bytes()
    assert not {path.stem for path in copied} & {"ragged", "sinkhorn", "layer", "linked", "engine", "arrays"}


@pytest.mark.whole
def test_operations_are_in_the_namespace_of_the_build(package):
    """As kernel-builder checks it: each name in a decorator of torch.library comes from `add_op_namespace_prefix`."""
    found = 0
    for name, text in sources(package).items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "custom_op":
                found += 1
                assert ast.unparse(node.args[0]).startswith("add_op_namespace_prefix("), name
    assert found == 2 * 8
    assert not (package / "torch-ext" / "anymax" / "_ops.py").exists()  # kernel-builder writes it
    assert not (package / "torch-ext" / "anymax" / "anymax").exists()


@pytest.mark.whole
def test_layers_have_no_state(package):
    tree = ast.parse((package / "torch-ext" / "anymax" / "layers.py").read_text())
    layers = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert len(layers) == 6
    for layer in layers:
        assert [node.name for node in layer.body if isinstance(node, ast.FunctionDef)] == ["forward"]
        given = [n.target.id for n in layer.body if isinstance(n, ast.AnnAssign) and n.value is not None]
        assert given == ["can_torch_compile"]


@pytest.mark.whole
def test_it_has_the_files_of_the_hub(package):
    names = {
        "build.toml", "flake.nix", "CARD.md", "LICENSE", "benchmarks/benchmark.py", "tests/__init__.py",
        "torch-ext/anymax/__init__.py",
    }  # fmt: skip
    assert all((package / name).is_file() for name in names)
    assert 'repo-id = "OWNER/anymax"' in (package / "build.toml").read_text()
    with pytest.raises(SystemExit, match="is not empty"):
        generator.generate(package)


# -- at work ------------------------------------------------------------------------------------------------------------------------------

LOADER = """
import importlib, importlib.util, json
from pathlib import Path


def load():
    folder = Path(os.environ["ANYMAX_KERNEL"])
    name = json.loads((folder / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
"""


ALONE = """
import torch

kernel = load()
assert "numpy" not in sys.modules and not [n for n in sys.modules if n.split(".")[0] == "anymax"]
assert all(hasattr(kernel, name) for name in kernel.__all__)
x = torch.zeros(2, 3)
for call in (kernel.softmax, lambda x: kernel.cross_entropy(x, torch.zeros(2, dtype=torch.int64)), lambda x: kernel.route(x, 1)):
    try:
        call(x)
    except ValueError as error:
        assert "these are kernels for GPUs (CUDA, ROCm), and the tensors are on cpu" in str(error)
    else:
        raise AssertionError("a tensor on the CPU was taken")
names = importlib.import_module(kernel.__name__ + "._ops")
assert names._OPS_NAME == kernel.__name__.replace("_cuda_", f"_{names.get_backend()}_")
print("loaded", kernel.__name__)
"""


def test_it_loads_without_numpy(package):
    out = bare(package, LOADER + ALONE, interpreted=False, alone=True)
    assert "loaded _anymax_cuda_" in out.stdout, out.stderr[-2000:]


@pytest.mark.whole
def test_two_builds_live_in_one_process(package, tmp_path):
    """Their operations have names of their own, as where two versions are loaded."""
    shutil.copytree(package, tmp_path / "other")
    init = tmp_path / "other" / "torch-ext" / "anymax" / "__init__.py"
    init.write_text(init.read_text() + "\nOTHER = True\n")
    shutil.rmtree(tmp_path / "other" / "build")
    generator.build(tmp_path / "other", ("cuda",))
    code = f"""
import torch

first = load()
os.environ["ANYMAX_KERNEL"] = {str(tmp_path / "other" / "build" / "torch-cuda")!r}
second = load()
assert first.__name__ != second.__name__
x = torch.tensor([[1.0, 0.5, -1.0]])
f = torch.compile(lambda x: first.sparsemax(x) - second.sparsemax(x), backend="aot_eager", fullgraph=True)
assert not f(x).any()
print("both")
"""
    out = bare(package, LOADER + code, interpreted=True)
    assert "both" in out.stdout, out.stderr[-2000:]


def run_its_tests(package, words):
    code = f"""
import pytest
sys.exit(pytest.main(["tests", "-q", "-x", "-p", "no:cacheprovider", "-k", {words!r}]))
"""
    out = bare(package, code, interpreted=True)
    assert out.returncode == 0, out.stdout[-3000:] + out.stderr[-1000:]
    assert " passed" in out.stdout


BRIEF = (  # what sees the faults of tools/faults.py
    "test_p_and_its_gradient and taylor or masks and topk or losses and gradient and sparsemax and False "
    "or test_routers and sigmoid and True"
)
GROUPS = {"brief": BRIEF, "rows": f"test_rows and not ({BRIEF})", "others": f"not test_rows and not ({BRIEF})"}


@pytest.mark.long
@pytest.mark.whole(lambda group: group != "brief")
@pytest.mark.weekly(lambda group: group == "rows")
@pytest.mark.parametrize("group", GROUPS)
def test_its_own_tests_pass_in_a_bare_environment(package, group):
    run_its_tests(package, GROUPS[group])


@pytest.mark.whole
def test_an_import_of_numpy_is_seen(package, tmp_path):
    """The bare environment is one: a file of the package that imports NumPy or anymax fails."""
    for what in ("numpy", "anymax"):
        made = tmp_path / what
        made.mkdir()
        (made / "stray.py").write_text(f"import {what}\n")
        out = bare(made, "sys.path.insert(0, FOLDER)\nimport stray\n", interpreted=False)
        assert f"{what} is not in a bare environment" in out.stderr


@pytest.mark.whole
def test_it_is_a_kernel_for_the_library_kernels(package):
    """Its own readers of build.toml, metadata and digests, its loader, and what it checks of layers."""
    pytest.importorskip("kernels")
    pytest.importorskip("kernels._rust")
    code = """
import torch
from pathlib import Path
import kernels
from kernels._rust import Build, Digest, Metadata
from kernels import LocalLayerRepository, Mode, kernelize, register_kernel_mapping, use_kernel_mapping
from kernels.layer import replace_kernel_forward_from_hub

folder = Path(sys.argv[1])
assert str(Build.open(folder).general.backends)
for backend in ("cuda", "rocm", "cpu"):
    variant = folder / "build" / f"torch-{backend}"
    metadata = Metadata.read_from_file(variant / "metadata.json")
    metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, variant))
kernel = kernels.get_local_kernel(folder, backend="cpu", trust_remote_code=True)
model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Softmax(-1))
replace_kernel_forward_from_hub(torch.nn.Softmax, "Softmax")
x = torch.randn(3, 4)
want = model(x)
with use_kernel_mapping({"Softmax": {"cpu": LocalLayerRepository(folder, layer_name="Softmax")}}, inherit_mapping=False):
    model = kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device="cpu")
assert "layers" in model[1].forward.__func__.__module__
torch.testing.assert_close(model(x), want)
print("kernelized", kernel.__name__)
"""
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", "import sys\n" + code, str(package)]
    out = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert "kernelized _anymax_cpu_" in out.stdout, out.stderr[-3000:]
