"""What is installed and what a release sends: version, import time, pins that must agree, the library, wheels, the conda recipe."""

import ctypes
import fnmatch
import importlib.machinery
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import anymax
from anymax.kernels import library

ROOT = Path(__file__).parents[2]
if not (ROOT / "tools" / "wheel.py").exists():
    pytest.skip("only in the repository", allow_module_level=True)

from tools import conda, npm, wheel

pytestmark = pytest.mark.whole


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_everything_that_is_sent_names_the_same_version():
    """GOVERNANCE.md says what a release has to change."""
    recipe, package = read("packaging/conda/recipe.yaml"), read("packaging/npm/package.json")
    assert f"\nversion: {anymax.__version__}\n" in read("CITATION.cff")
    assert f'version: "{anymax.__version__}"' in recipe
    assert f'"version": "{anymax.__version__}"' in package
    assert '  "files": ["*.mjs", "*.d.ts", "anymax.wasm", "NOTICE.txt"]' in package
    assert {path.name for path in npm.SOURCES.iterdir()} == set(npm.WRITTEN)
    wanted = re.findall(
        r'"(numpy|array-api-compat)(\S+)"', re.search(r"^dependencies = (.*)$", read("pyproject.toml"), flags=re.M)[1]
    )
    assert len(wanted) == 2
    assert all(f"- {name} {bound}\n" in recipe for name, bound in wanted)


def test_version_is_single_sourced():
    from anymax._version import __version__

    assert anymax.__version__ == __version__
    assert importlib.metadata.version("anymax") == __version__
    assert f"## [{__version__}]" in read("CHANGELOG.md")


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


def test_pins_agree():
    pyproject, hooks = read("pyproject.toml"), read(".pre-commit-config.yaml")
    for tool, repository in (
        ("ruff", "ruff-pre-commit"),
        ("clang-format", "mirrors-clang-format"),
        ("pyright", "pyright-python"),
    ):
        pin = re.search(rf'"{tool}(?:\[\w+\])?==([\d.]+)"', pyproject)
        rev = re.search(rf"{repository}\n\s+rev: v([\d.]+)", hooks)
        assert pin[1] == rev[1], tool


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

    def publishes(step):
        return "pypi-publish" in step.get("uses", "") or "npm publish" in step.get("run", "")

    publishing = {name: job for name, job in jobs.items() if any(map(publishes, job.get("steps", ())))}
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


def test_the_library_is_found_where_it_lies(monkeypatch, tmp_path):
    """An editable install has two folders, that of the sources and that of the library; no library is no error."""
    folders = [tmp_path / "sources", tmp_path / "compiled"]
    for folder in folders:
        folder.mkdir()
    monkeypatch.delenv("ANYMAX_LIBRARY", raising=False)
    monkeypatch.delitem(sys.modules, "anymax._engine", raising=False)
    finders = [f for f in sys.meta_path if not re.search("Editable|Scikit", type(f).__name__)]
    monkeypatch.setattr(sys, "meta_path", finders)
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
    sent = [path for path in needed if "__pycache__" not in path.parts]
    assert not [(path, p) for path in sent for p in patterns if any(fnmatch.fnmatch(part, p) for part in path.parts)]


# -- what a release sends -------------------------------------------------------------------------------------------------


def made(folder, name="cp311-abi3-manylinux_2_28_x86_64", without=(), **more):
    """A wheel with as much in it as the checks ask for."""
    path = folder / f"anymax-{anymax.__version__}-{name}.whl"
    files = dict.fromkeys((*wheel.OWED, f"anymax-{anymax.__version__}.dist-info/licenses/LICENSE"), "")
    files |= {"anymax/_engine.abi3.so": ""} | {
        key.replace("__", "/").replace("_dot_", "."): v for key, v in more.items()
    }
    with zipfile.ZipFile(path, "w") as file:
        for one, text in files.items():
            if one not in without:
                file.writestr(one, text)
    return path


def test_a_wheel_as_it_should_be_has_no_fault(tmp_path):
    assert wheel.faults(made(tmp_path)) == []
    assert wheel.faults(made(tmp_path, "py3-none-any", without=["anymax/_engine.abi3.so"])) == []
    assert wheel.faults(made(tmp_path, "cp314-cp314t-win_amd64")) == []


def test_the_faults_of_a_wheel(tmp_path):
    def said(*given, **more):
        [fault] = wheel.faults(made(tmp_path, *given, **more))
        return fault

    assert "3,000,000 is the most" in said(anymax__big_dot_py="x" * 3_000_000)
    assert "it was not repaired" in said("cp311-abi3-linux_x86_64")
    assert "its name should be" in said("cp312-cp312-manylinux_2_28_x86_64")
    assert "it has no anymax/py.typed" in said(without=["anymax/py.typed"])
    assert "licenses/LICENSE" in said(without=[f"anymax-{anymax.__version__}.dist-info/licenses/LICENSE"])
    assert "it has 0 compiled modules" in said(without=["anymax/_engine.abi3.so"])
    assert "it has 1 compiled modules" in said("py3-none-any")
    assert "it has tests/test_x.py, which no user needs" in said(tests__test_x_dot_py="")
    assert "it has anymax/explorer/app.mjs" in said(anymax__explorer__app_dot_mjs="")


def test_a_wheel_is_built_by_the_settings_of_cibuildwheel():
    ours = tomllib.loads(read("pyproject.toml"))["tool"]["cibuildwheel"]
    found = wheel.settings()
    assert found["test-command"] == ours["test-command"]
    assert found["environment"]["ANYMAX_MUST_COMPILE"] == "1"
    workflow = read(".github/workflows/wheels.yml")
    assert workflow.count("python tools/wheel.py") >= 3
    assert not re.findall(r"^(?:repair-wheel-command|build-frontend)", read("pyproject.toml"), flags=re.M), (
        "tools/wheel.py knows cibuildwheel's defaults alone"
    )


def test_the_recipe_of_a_release_has_an_address_and_a_digest(tmp_path):
    archive = tmp_path / f"anymax-{anymax.__version__}.tar.gz"
    archive.write_bytes(b"")
    text = conda.recipe(archive)
    assert "path: ../.." not in text
    assert "sha256: e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855\n" in text  # of no bytes
    assert "url: https://pypi.org/packages/source/a/anymax/anymax-${{ version }}.tar.gz\n" in text
    assert text.endswith(read("packaging/conda/recipe.yaml").partition("path: ../..")[2])
    with pytest.raises(SystemExit, match=r"anymax-9\.tar\.gz is not the release"):
        conda.recipe(tmp_path / "anymax-9.tar.gz")


def test_the_previous_releases_are_before_ours():
    pins = dict(re.findall(r"^([\w-]+)==([\d.]+)", read("constraints.txt"), flags=re.M))
    previous = [Requirement(line) for line in read(".github/previous.txt").splitlines() if not line.startswith("#")]
    assert {asked.name for asked in previous} == {"torch", "jax", "jaxlib"}
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    for asked in previous:
        [line] = re.findall(r"==([\d.]+)\.\*", str(asked.specifier))
        ours = tuple(map(int, pins[asked.name].split(".")[:2]))
        assert tuple(map(int, line.split("."))) < ours, f"{asked}, and constraints.txt has {pins[asked.name]}"
        if asked.name in extras:
            assert Requirement(extras[asked.name][0]).specifier.contains(f"{line}.0"), (
                f"pyproject.toml does not allow {asked}"
            )
    assert ".github/previous.txt" in read(".github/workflows/ci.yml")


def test_the_files_that_say_who_and_how():
    assert re.search(r"^\*\s+@", read(".github/CODEOWNERS"), flags=re.M)
    assert "# repository-code:" in read("CITATION.cff")
    governance = read("GOVERNANCE.md")
    for place in (
        "tools/wheel.py", "tools/npm.py --pack", "tools/conda.py", "packaging/npm/package.json", "repository-code",
        "CODEOWNERS",
    ):  # fmt: skip
        assert place in governance, place
    for name in re.findall(r"`((?:tools|packaging|src|\.github)/[\w./-]+)`", governance):
        assert (ROOT / name).exists(), name
