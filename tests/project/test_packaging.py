"""What is installed: names, version, import time, pins that must agree."""

import ctypes
import fnmatch
import importlib.machinery
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import anymax
from anymax.kernels import library, link
from anymax.mappings import CATALOGUE

ROOT = Path(__file__).parents[2]

PUBLIC = """
    Mapping Separable RatioMap Facts Noise Sinkhorn
    apply log_apply softmax log_softmax logsumexp sparsemax entmax entmax15 taylor_softmax sparse_softmax sigsoftmax
    perturb_max normmax budget threshold
    fenchel_young nll cross_entropy sparsemax_loss entmax_loss entmax15_loss sparse_softmax_loss taylor_softmax_loss normmax_loss
    perturb_max_loss accuracy_loss smoothed_nll stop_gradient_loss multilabel_softmax_loss margin_loss
    transforms margins temperature mask prior normalize topk topp minp cosine compose mix
    sample gumbel_max gumbel_softmax
    soft_rank soft_sort soft_permutation
    attention attention_varlen linear_attention LinearState
    Segments segment_apply segment_log_apply segment_logsumexp segment_threshold segment_loss segment_sample segment_entropy
    segment_support linear_loss linear_log_prob linear_log_prob_entropy linear_topk_kl contrastive_loss
    log_prob log_prob_entropy topk_kl
    jacobian entropy support facts logit_gap check_mapping
    choose explain explain_attention use show_config __version__
""".split()
MOST = 110  # names in the root; what is rarer is in its module
MOVED = {
    "transforms": "epsilon_cutoff eta logit_bias repetition_penalty scalable topnsigma typical xtc",
    "sampling": "gumbel_topk perturb_argmax speculative_accept topk_log_prob",
    "likelihood": "kl",
    "inspection": "jacobian_norm",
    "kernels": "warm_up",
    "thresholds": "Threshold",
    "linear": "linear_threshold",
}
TRANSFORMS = "temperature mask prior normalize topk topp minp scalable cosine compose mix".split()


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_public_names_are_these():
    """A name that comes or goes is a decision: it belongs in this list and in the changelog. The maps are those of the catalogue."""
    assert sorted(anymax.__all__) == sorted([*PUBLIC, *(kind.__name__ for kind in CATALOGUE)])
    assert all(hasattr(anymax.transforms, name) for name in TRANSFORMS)


def test_the_root_is_small_and_says_where_its_former_names_are():
    assert len(anymax.__all__) <= MOST
    for home, names in MOVED.items():
        for name in names.split():
            assert getattr(getattr(anymax, home), name).__name__ == name
            with pytest.raises(AttributeError, match=rf"anymax\.{name} is now anymax\.{home}\.{name}$"):
                getattr(anymax, name)


def test_public_names_exist():
    for name in anymax.__all__:
        assert hasattr(anymax, name), name
    assert {"hf", "nn", "plot"} <= set(dir(anymax)) - set(anymax.__all__), "a star import must not load a framework"


def test_dir_shows_only_public_names_that_exist():
    assert set(anymax.__all__) <= set(dir(anymax))


@pytest.mark.skipif(not (ROOT / "CHANGELOG.md").exists(), reason="only in the repository")
def test_other_files_name_the_same_version():
    """Those that a release has to change; GOVERNANCE.md says so."""
    assert f"\nversion: {anymax.__version__}\n" in read("CITATION.cff")
    assert f'version: "{anymax.__version__}"' in read("packaging/conda/recipe.yaml")
    wanted = re.findall(
        r'"(numpy|array-api-compat)(\S+)"', re.search(r"^dependencies = (.*)$", read("pyproject.toml"), flags=re.M)[1]
    )
    assert len(wanted) == 2
    for name, bound in wanted:
        assert f"- {name} {bound}\n" in read("packaging/conda/recipe.yaml")


def test_version_is_single_sourced():
    from anymax._version import __version__

    assert anymax.__version__ == __version__
    assert importlib.metadata.version("anymax") == __version__
    changelog = ROOT / "CHANGELOG.md"
    if changelog.exists():
        assert f"## [{__version__}]" in changelog.read_text(encoding="utf-8")


def test_import_loads_no_framework_and_no_extra():
    loaded = run("import sys, anymax; print(*sorted({name.partition('.')[0] for name in sys.modules}))").split()
    heavy = {"torch", "jax", "jaxlib", "cupy", "scipy", "sklearn", "matplotlib", "click", "rich", "triton", "pandas"}
    assert not heavy & set(loaded)


def test_import_takes_under_50_ms_more_than_numpy(tmp_path):
    """Processor time, the least of several runs: other work on the machine can only add to it. The first writes the bytecode. On a machine
    where numpy itself takes over 80 ms, 0.6 of that."""
    code = "from time import process_time as t; a = t(); import numpy; b = t(); import anymax; print(b - a, t() - b)"
    times = []
    for _ in range(12):
        of_numpy, of_anymax = map(
            float, run(code, PYTHONPYCACHEPREFIX=str(tmp_path), PYTHONDONTWRITEBYTECODE="").split()
        )
        times.append((of_anymax, of_numpy))
        if of_anymax < max(0.05, 0.6 * of_numpy):
            return
    pytest.fail("importing anymax after numpy takes {:.3f} s at least, and numpy {:.3f}".format(*min(times)))


def test_dependencies_are_numpy_and_array_api_compat_only():
    needed = [r for r in importlib.metadata.requires("anymax") or [] if "extra ==" not in r]
    assert sorted(re.match(r"[\w-]+", r)[0].lower().replace("_", "-") for r in needed) == ["array-api-compat", "numpy"]


def test_package_says_that_it_is_typed():
    assert (Path(anymax.__file__).parent / "py.typed").exists()


@pytest.mark.skipif(not (ROOT / ".pre-commit-config.yaml").exists(), reason="only in the repository")
def test_pins_agree():
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    for tool, repository in (("ruff", "ruff-pre-commit"), ("pyright", "pyright-python")):
        pin = re.search(rf'"{tool}(?:\[\w+\])?==([\d.]+)"', pyproject)
        rev = re.search(rf"{repository}\n\s+rev: v([\d.]+)", hooks)
        assert pin
        assert rev
        assert pin[1] == rev[1]


def test_constraints_pin_every_dependency():
    """Of the library and of all extras, transitive ones come with them, to a release within the extra's range."""
    lines = [line for line in read("constraints.txt").splitlines() if line and not line.startswith("#")]
    pins = {canonicalize_name(pin.name): str(pin.specifier) for pin in map(Requirement, lines)}
    assert len(pins) == len(lines), "one release for all Pythons and systems"
    project = tomllib.loads(read("pyproject.toml"))["project"]
    extras = project["optional-dependencies"]
    for text in (*project["dependencies"], *(text for extra in extras.values() for text in extra)):
        asked = Requirement(text)
        if asked.name != "anymax":
            pin = re.fullmatch(r"==([\w.]+)", pins.get(canonicalize_name(asked.name), ""))
            assert pin, f"constraints.txt has no {asked.name}: `python -m tools.pins` writes it anew"
            assert asked.specifier.contains(pin[1]), f"{text}, and constraints.txt has {pin[1]}"


# -- the workflows ----------------------------------------------------------------------------------------------------------


def workflows() -> dict[str, str]:
    read("constraints.txt")  # only in the repository
    return {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / ".github" / "workflows").glob("*.yml")}


def test_actions_are_pinned_by_digest():
    """A tag or a branch of another repository can be moved, and its code runs here; a digest can't. The tag stands beside it."""
    pins, seen = {}, 0
    for name, text in workflows().items():
        for used, said in re.findall(r"^[ -]*uses: (\S+)(?: # (\S+))?$", text, flags=re.M):
            if used.startswith("./"):
                continue
            action, _, digest = used.partition("@")
            assert re.fullmatch(r"[0-9a-f]{40}", digest), f"{name}: {used}"
            assert re.fullmatch(r"v\d+\.\d+\.\d+", said), f"{name}: {used} is which release?"
            assert pins.setdefault(action, (digest, said)) == (digest, said), f"{name}: {action} is pinned twice"
            seen += 1
        assert len(re.findall(r"\buses:", text)) == len(re.findall(r"^[ -]*uses: \S+(?: # \S+)?$", text, flags=re.M)), (
            name
        )
    assert seen > 40
    assert "package-ecosystem: github-actions" in read(".github/dependabot.yml")


def test_nothing_is_published_before_the_tests():
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load(workflows()["wheels"])["jobs"]
    publishing = {
        name: job
        for name, job in jobs.items()
        if any(
            "pypi-publish" in step.get("uses", "") or "npm publish" in step.get("run", "")
            for step in job.get("steps", ())
        )
    }
    assert set(publishing) == {"publish", "publish-npm"}
    on_a_tag = "startsWith(github.ref, 'refs/tags/v')"
    for job in publishing.values():
        assert set(job["needs"]) == {"check", "tests"}
        assert job["if"] == on_a_tag
        assert job["permissions"]["id-token"] == "write"
        assert set(job["permissions"].values()) <= {"read", "write"}
    assert jobs["tests"] == {"if": on_a_tag, "uses": "./.github/workflows/ci.yml"}
    called = yaml.safe_load(workflows()["ci"])
    assert "workflow_call" in called[True]  # YAML reads `on` so
    assert any("npm publish --provenance" in step.get("run", "") for step in jobs["publish-npm"]["steps"])
    for name, text in workflows().items():
        assert yaml.safe_load(text)["permissions"] == {"contents": "read"}, name


def test_what_is_published_is_built_with_the_date_of_its_commit():
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load(workflows()["wheels"])["jobs"]
    for name in ("sdist", "wheel", "pure"):
        steps = jobs[name]["steps"]
        dated = [
            i for i, step in enumerate(steps) if "SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)" in step.get("run", "")
        ]
        sent = [i for i, step in enumerate(steps) if "upload-artifact" in step.get("uses", "")]
        assert dated == [1], name
        assert len(sent) == 1, name
        assert not any("twine" in step.get("run", "") for step in steps[: sent[0]]), name
    linux = tomllib.loads(read("pyproject.toml"))["tool"]["cibuildwheel"]["linux"]
    assert linux["environment-pass"] == ["SOURCE_DATE_EPOCH"]


# -- the compiled library ---------------------------------------------------------------------------------------------------


def read(name: str) -> str:
    path = ROOT / name
    if not path.exists():
        pytest.skip(f"{name} is only in the repository")
    return path.read_text(encoding="utf-8")


def test_the_library_is_found_where_it_lies(monkeypatch, tmp_path):
    """An editable install has two folders, that of the sources and that of the library; no library is no error."""
    folders = [tmp_path / "sources", tmp_path / "compiled"]
    for folder in folders:
        folder.mkdir()
    monkeypatch.delenv("ANYMAX_LIBRARY", raising=False)
    monkeypatch.delitem(sys.modules, "anymax._engine", raising=False)
    monkeypatch.setattr(
        sys,
        "meta_path",
        [f for f in sys.meta_path if "Editable" not in type(f).__name__ and "Scikit" not in type(f).__name__],
    )
    monkeypatch.setattr(anymax, "__path__", [str(folder) for folder in folders])
    assert library.path() is None
    file = folders[1] / f"_engine{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    file.touch()
    importlib.invalidate_caches()
    assert library.path() == str(file)
    named = tmp_path / "mine.so"
    named.touch()
    monkeypatch.setenv("ANYMAX_LIBRARY", str(named))
    assert library.path() == str(named)
    monkeypatch.setenv("ANYMAX_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(FileNotFoundError, match="unset the variable"):
        library.path()


def test_a_library_that_is_none_is_said_to_be_none(monkeypatch, tmp_path):
    (tmp_path / "mine.so").write_text("no library at all")
    monkeypatch.setenv("ANYMAX_LIBRARY", str(tmp_path / "mine.so"))
    assert "can't be loaded" in library.load.__wrapped__()


def test_without_a_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(library, "path", lambda: None)
    said = library.load.__wrapped__()
    for words in ("C++ compiler", "Python's headers", "the reference is used", "install anymax again"):
        assert words in said
    cmake = read("CMakeLists.txt")
    for words in ("apt install g++", "apt install python3-dev"):
        assert words in cmake
    assert cmake.count("The reference engine serves meanwhile.") == 2


def test_the_library_is_that_of_the_header():
    path = library.path()
    if path is None:
        pytest.skip("installed without the compiled library")
    header = read("csrc/anymax.h")
    version = re.search(r"define ANYMAX_ABI (\d+)", header)
    assert version
    assert library.load().ABI == library.ABI == int(version[1])
    opened = ctypes.CDLL(path)
    assert opened.anymax_abi() == int(version[1])
    names = re.findall(r"^ANYMAX_API .*?(anymax_\w+)\(", header, flags=re.M)
    assert len(names) >= 10
    assert not [name for name in names if not hasattr(opened, name)]


def test_the_codes_of_python_are_those_of_the_header():
    header = read("csrc/anymax.h")

    def codes(kind):
        body = re.search(rf"enum anymax_{kind} \{{(.*?)\}};", header, flags=re.S)[1]
        return [
            name.lower()
            for name in re.findall(r"ANYMAX_(?!MAPS|OPS)(\w+) = \d+", re.sub(r"/\*.*?\*/", "", body, flags=re.S))
        ]

    assert [name.replace("perturb_max", "perturb") for name in link.MAPS] == codes("map")
    assert list(link.MAPS.values()) == list(range(len(link.MAPS)))
    assert list(link.NOISES) == codes("noise")
    assert len(link.CODES) == len(codes("op"))
    assert list(link.CODES.values()) == list(range(len(link.CODES)))
    rows = re.findall(r"^    \{ANYMAX_\w+, (.*)\},", read("csrc/maps.hpp"), flags=re.M)
    assert len(rows) == len(link.MAPS)
    for name, row in zip(link.MAPS, rows, strict=True):
        _, family, low, high, _, _, log, _, *slope = row.split(", ")
        assert family.lower() == link.KINDS[name].family, name
        assert log == str(link.KINDS[name].log).lower(), name
        assert (slope == ["true"]) == (name in link.WITH_SLOPE), name
        if name in link.RANGES:
            assert float(low) <= max(link.RANGES[name][0], 1.0000000000000002 * (name == "normmax")), name
            assert float(high) >= link.RANGES[name][1], name


def test_the_wheel_is_for_any_python():
    """With the library for any Python from 3.11 on, on this platform; without it for any machine as well."""
    wheel = importlib.metadata.distribution("anymax").read_text("WHEEL")
    assert wheel
    tags = re.findall(r"^Tag: (.*)$", wheel, flags=re.M)
    if any(file.name.startswith("_engine.") for file in importlib.metadata.files("anymax") or []):
        assert "Root-Is-Purelib: false" in wheel
        assert all(tag.startswith("cp311-abi3-") for tag in tags), tags
    else:
        assert {tag.partition("-")[0] for tag in tags} <= {"py3", "cp311"}, tags


def test_the_sources_of_the_library_are_shipped():
    pyproject, ignored = read("pyproject.toml"), read(".gitignore").splitlines()
    excluded = re.search(r"^sdist\.exclude = \[(.*)\]$", pyproject, flags=re.M)
    assert excluded
    patterns = [p.strip("/") for p in re.findall(r'"(.+?)"', excluded[1]) + ignored if p]
    needed = [Path("CMakeLists.txt"), Path("pyproject.toml"), Path("LICENSE"), Path("README.md")]
    needed += [path.relative_to(ROOT) for name in ("csrc", "cmake", "src") for path in (ROOT / name).rglob("*.[chp]*")]
    assert {"csrc", "cmake", "src"} <= {path.parts[0] for path in needed}
    assert not [
        (str(path), pattern)
        for path in needed
        for pattern in patterns
        if "__pycache__" not in path.parts and any(fnmatch.fnmatch(part, pattern) for part in path.parts)
    ]


def test_cmake_names_every_source_and_no_other():
    cmake = read("CMakeLists.txt")
    named = set(re.findall(r"(?:csrc/doors|cmake)/\w+\.cpp", cmake))
    assert 'csrc/units/*.cpp"' in cmake
    assert 'csrc/doors/python/*.cpp"' in cmake
    named |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").glob("units/*.cpp")}
    assert named == {
        path.relative_to(ROOT).as_posix()
        for files in ("csrc/doors/*.cpp", "csrc/units/*.cpp", "cmake/*.cpp")
        for path in ROOT.glob(files)
    }


def test_the_units_of_cmake_are_those_of_the_dispatcher():
    cmake, cross = read("CMakeLists.txt"), read("tools/cross.sh")
    flags = {
        name: options.split() for name, options in re.findall(r"^set\(ANYMAX_FLAGS_(\w+) ?(.*)\)$", cmake, flags=re.M)
    }
    built = {unit for line in re.findall(r"set\(candidates (.*)\)", cmake) for unit in line.upper().split()}
    known = set(re.findall(r"defined\(ANYMAX_HAVE_(\w+)\)", read("csrc/doors/abi.cpp")))
    assert set(flags) == built
    assert known == built | {"SIMD128"}, "WebAssembly is built by tools/cross.sh"
    crossed = re.findall(r'^ +build \$target \S+ (?:"([^"]+)"|(\w+))', cross, flags=re.M)
    assert {unit for several, one in crossed for unit in (several or one).upper().split()} == known
    assert not any("fast-math" in line for line in re.findall(r"^set\(ANYMAX_FLAGS.*$", cmake, flags=re.M))
    assert not flags["BASELINE"]
    assert not flags["NEON"]
    assert set(flags["AVX2"]) < set(flags["AVX512"]) | {"-mavx2"}, "what a machine with AVX-512 has besides"
