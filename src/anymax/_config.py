"""The configuration for a bug report: versions, engines, instruction set, threads."""

from __future__ import annotations

import os
import sys
from typing import Any, Literal, overload

import numpy as np

from . import kernels
from ._version import __version__
from .kernels import native, triton
from .mappings import Softmax

PACKAGES = ("numpy", "array-api-compat", "torch", "jax", "triton", "scikit-learn", "transformers", "matplotlib")
VARIABLES = (
    "ANYMAX_ENGINE", "ANYMAX_ISA", "ANYMAX_KEPT_MB", "ANYMAX_LIBRARY", "ANYMAX_NUM_THREADS", "OMP_NUM_THREADS", "TRITON_INTERPRET",
)  # fmt: skip


def config() -> dict[str, Any]:
    """The configuration as a dictionary."""
    import platform  # late, like importlib.metadata below, to keep `import anymax` fast

    refused = native.ENGINE.refuse("forward", Softmax(), np.zeros((1, 2), np.float32))
    gpu = triton.load()
    return {
        "anymax": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "engines": {
            "native": refused or f"{native.isa()}, {native.get_num_threads()} threads of its own",
            "triton": gpu if isinstance(gpu, str) else "for tensors on a GPU",
            "asked for": kernels.asked(),
        },
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def _version(name: str) -> str | None:
    from importlib import metadata  # late

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@overload
def show_config(mode: Literal["stdout"] = "stdout") -> None: ...
@overload
def show_config(mode: Literal["dicts"]) -> dict[str, Any]: ...
def show_config(mode: str = "stdout") -> dict[str, Any] | None:
    """Prints the versions of anymax and of the packages it works with, and its engines, their instruction set and threads.

    Use it for a bug report. It imports no framework except Triton, if that is installed.

    Parameters
    ----------
    mode
        "stdout" prints; "dicts" returns a dictionary, as in `numpy.show_config`.

    Returns
    -------
    dict[str, Any] | None
        None, or the dictionary.

    Examples
    --------
    >>> anymax.show_config("dicts")["packages"]["numpy"].count(".")
    2
    """
    if mode not in ("stdout", "dicts"):
        raise ValueError(f"show_config: mode must be 'stdout' or 'dicts', got {mode!r}")
    found = config()
    if mode == "dicts":
        return found
    sys.stdout.write(text(found))
    return None


def text(found: dict[str, Any], indent: str = "") -> str:
    """The result of `config` as lines of text."""
    lines = []
    for key, value in found.items():
        if isinstance(value, dict):
            lines.append(f"{indent}{key}:\n{text(value, indent + '  ')}" if value else "")
        else:
            lines.append(f"{indent}{key}: {value}\n" if value is not None else "")
    return "".join(lines)
