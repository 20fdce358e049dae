"""The state of the C++ engine in a test: its instruction set and its threads; and calls in a process of their own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap

from anymax.kernels import native


@contextlib.contextmanager
def instructions(isa):
    before = native.isa()
    assert native.load().set_isa(isa)
    try:
        yield
    finally:
        native.load().set_isa(before)


@contextlib.contextmanager
def threads(count):
    """So many of the engine's own, and of torch's where it is there."""
    torch = sys.modules.get("torch")
    before, of_torch = native.get_num_threads(), torch and torch.get_num_threads()
    native.set_num_threads(count)
    if torch:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        native.set_num_threads(before)
        if torch:
            torch.set_num_threads(of_torch)


def by_threads(counts, call):
    """What the call gives with each of these numbers of threads."""
    results = []
    for count in counts:
        with threads(count):
            results.append(call())
    return results


def in_a_child(code, *options, **env):
    """What a process of its own prints."""
    out = subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(code)], env={**os.environ, **env},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    return out.stdout.strip()
