"""The command line's program in a process of its own, and what its commands need."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")


needs_plot = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
needs_tour = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "sklearn", "matplotlib")),
    reason="needs torch, scikit-learn and matplotlib",
)


def program(*args, cwd, **environment):
    """The program in a process of its own, without a terminal."""
    return subprocess.run(
        [sys.executable, "-m", "anymax", *args],
        cwd=cwd,
        env={**os.environ, "PYTHONUTF8": "1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )


def done(call, *words, **options):
    """What a command prints that succeeds without a word on stderr."""
    code, out, err = call(*words, **options)
    assert (code, err) == (0, "")
    return out


def document(call, *words):
    """The JSON that a command prints."""
    return json.loads(done(call, *words, "--json"))
