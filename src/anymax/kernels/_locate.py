"""Where the compiled library is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

NAME = {"win32": "anymax.dll", "cygwin": "anymax.dll", "darwin": "libanymax.dylib"}.get(sys.platform, "libanymax.so")


def library_path() -> Path | None:
    """The file that the environment variable ANYMAX_LIBRARY names, or the one that was installed; None in a pure Python install.

    The package's `__path__` has one folder, or two in an editable install: that of the sources, and that of what was compiled.
    """
    named = os.environ.get("ANYMAX_LIBRARY")
    if named:
        path = Path(named)
        if not path.is_file():
            raise FileNotFoundError(
                f"ANYMAX_LIBRARY is {named!r}, and there is no such file: give the path of {NAME}, or unset the variable"
            )
        return path
    for folder in sys.modules[__name__.rpartition(".")[0]].__path__:
        path = Path(folder) / NAME
        if path.is_file():
            return path
    return None
