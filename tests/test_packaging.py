"""What is installed: names, version, import time, pins that must agree."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import anymax

ROOT = Path(__file__).parents[1]

PUBLIC = """
    Softmax Sparsemax Entmax Budget NormMax Taylor Sigsoftmax Ratio SparseSoftmax PerturbMax
    Mapping Separable RatioMap Facts Noise Threshold
    apply log_apply softmax log_softmax logsumexp sparsemax entmax entmax15 taylor_softmax sparse_softmax sigsoftmax
    perturb_max normmax budget threshold
    fenchel_young nll cross_entropy sparsemax_loss entmax_loss entmax15_loss sparse_softmax_loss taylor_softmax_loss normmax_loss
    perturb_max_loss accuracy_loss smoothed_nll stop_gradient_loss multilabel_softmax_loss margin_loss
    transforms margins temperature mask prior normalize topk topp minp topnsigma cosine compose mix
    sample gumbel_max gumbel_softmax perturb_argmax attention
    jacobian jacobian_norm entropy support facts logit_gap
    choose explain use __version__
""".split()
TRANSFORMS = "temperature mask prior normalize topk topp minp cosine compose mix".split()


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_public_names_are_these():
    """A name that comes or goes is a decision: it belongs in this list and in the changelog."""
    assert sorted(anymax.__all__) == sorted(PUBLIC)
    assert all(hasattr(anymax.transforms, name) for name in TRANSFORMS)


def test_public_names_exist():
    for name in anymax.__all__:
        assert hasattr(anymax, name), name
    assert {"nn", "plot"} <= set(dir(anymax)) - set(anymax.__all__), "a star import must not load a framework"


def test_dir_shows_only_public_names_that_exist():
    assert set(anymax.__all__) <= set(dir(anymax))


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
    """Processor time, the least of several runs: other work on the machine can only add to it. The first writes the bytecode."""
    code = "import time, numpy; t = time.process_time(); import anymax; print(time.process_time() - t)"
    times = []
    for _ in range(12):
        times.append(float(run(code, PYTHONPYCACHEPREFIX=str(tmp_path), PYTHONDONTWRITEBYTECODE="")))
        if times[-1] < 0.05:
            return
    pytest.fail(f"importing anymax after numpy takes {min(times) * 1000:.0f} ms at least")


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
