"""What a release sends: the checks of a wheel, the conda recipe, the files that say who and how."""

import re
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import anymax

ROOT = Path(__file__).parents[2]
if not (ROOT / "tools" / "wheel.py").exists():
    pytest.skip("only in the repository", allow_module_level=True)

from tools import conda, npm, wheel


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


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


def test_everything_that_is_sent_names_the_same_version():
    assert f'"version": "{anymax.__version__}"' in read("packaging/npm/package.json")
    assert f'version: "{anymax.__version__}"' in read("packaging/conda/recipe.yaml")
    assert '  "files": ["*.mjs", "*.d.ts", "anymax.wasm", "NOTICE.txt"]' in read("packaging/npm/package.json")
    assert {path.name for path in npm.SOURCES.iterdir()} == set(npm.WRITTEN)


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
        "tools/wheel.py",
        "tools/npm.py --pack",
        "tools/conda.py",
        "packaging/npm/package.json",
        "repository-code",
        "CODEOWNERS",
    ):
        assert place in governance, place
    for name in re.findall(r"`((?:tools|packaging|src|\.github)/[\w./-]+)`", governance):
        assert (ROOT / name).exists(), name
