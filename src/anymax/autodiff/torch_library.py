"""Register operations with torch."""

from __future__ import annotations

import sys
from typing import Any

_registered: dict[str, Any] = {}


def library(leaf: str) -> Any:
    """A library in which a file registers its operations. It first removes what an interrupted import of the file left behind."""
    torch = sys.modules["torch"]
    if leaf in _registered:
        _registered[leaf]._destroy()
    _registered[leaf] = torch.library.Library("anymax", "FRAGMENT")
    return _registered[leaf]
