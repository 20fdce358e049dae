"""The kernel under test, the device, and the maps by plain formulas in fp64.

The kernel is the folder of `ANYMAX_KERNEL`, or else what build/ has for this torch. On a GPU the kernels run for real; with
TRITON_INTERPRET=1 they run in Triton's interpreter on the CPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

REAL = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = "cuda" if REAL else "cpu"


def pytest_configure(config: Any) -> None:
    config.addinivalue_line("markers", "kernels_ci: a test for the continuous integration of kernels")
    # of the interpreter, for -inf - -inf and the like
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.*")


def load() -> Any:
    backend = "rocm" if torch.version.hip is not None else "cuda"
    folder = os.environ.get("ANYMAX_KERNEL") or Path(__file__).parents[1] / "build" / f"torch-{backend}"
    name = json.loads((Path(folder) / "metadata.json").read_text())["id"]
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(folder) / "__init__.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def kernel() -> Any:
    if not REAL and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("neither a GPU nor TRITON_INTERPRET=1")
    return load()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device(DEVICE)
