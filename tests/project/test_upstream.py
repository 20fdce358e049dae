"""What is meant for other projects: the files of a pull request to optax, in its own tests and beside ours."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import anymax

FOLDER = Path(__file__).parents[2] / "docs" / "upstream" / "optax"
if not FOLDER.exists():
    pytest.skip("only in the repository", allow_module_level=True)
jax = pytest.importorskip("jax")
pytest.importorskip("optax")
jnp = jax.numpy
pytestmark = pytest.mark.whole

import oracles

PLACED = """
import importlib.util, sys
import optax.losses
spec = importlib.util.spec_from_file_location("optax.losses._entmax", sys.argv.pop(1) + "/_entmax.py")
module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
optax.losses._entmax, optax.losses.entmax, optax.losses.multiclass_entmax_loss = module, module.entmax, module.multiclass_entmax_loss
"""  # as the pull request leaves optax


@pytest.fixture(scope="module")
def entmax():
    spec = importlib.util.spec_from_file_location("upstream_entmax", FOLDER / "_entmax.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(code, *words):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PLACED + code, str(FOLDER), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


def test_its_own_tests_pass():
    code = """
spec = importlib.util.spec_from_file_location("__main__", sys.argv.pop(1) + "/_entmax_test.py")
test = sys.modules["__main__"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(test)
"""
    said = run(code, str(FOLDER))
    assert "\nOK" in said
    assert "Ran 0 tests" not in said


def test_the_example_of_its_docstring():
    said = run("import doctest; print(doctest.testmod(module))")
    assert "TestResults(failed=0, attempted=4)" in said


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_it_has_the_probabilities_of_50_digits(entmax, alpha):
    x = np.random.default_rng(0).normal(0, 2, (4, 9)).astype(np.float32)
    p = jax.jit(entmax.entmax)(x, alpha)
    oracle = oracles.entmax(alpha)
    wanted = [np.array(oracle(row.astype(float)), float) for row in x]
    np.testing.assert_allclose(p, wanted, atol=3e-6)


def test_loss_and_gradients_are_ours(entmax):
    x = np.random.default_rng(1).normal(0, 2, (6, 8)).astype(np.float32)
    labels = np.array([0, 1, 7, 3, 3, 2])
    for alpha in (1.0, 1.3, 2.0):

        def theirs(x, alpha):
            return entmax.multiclass_entmax_loss(x, labels, alpha).sum()

        def ours(x, alpha):
            return anymax.entmax_loss(x, labels, alpha=alpha, reduction="sum")

        found, wanted = (
            jax.value_and_grad(f, (0, 1))(jnp.asarray(x), jnp.full((6, 1), alpha, jnp.float32)) for f in (theirs, ours)
        )
        np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
        np.testing.assert_allclose(found[1][0], wanted[1][0], atol=1e-5)
        np.testing.assert_allclose(found[1][1], wanted[1][1], rtol=1e-3, atol=1e-4)
