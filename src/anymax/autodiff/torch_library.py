"""Where files register their operations with torch."""

from __future__ import annotations

import sys
from typing import Any

_registered: dict[str, Any] = {}


def library(leaf: str) -> Any:
    """Where a leaf registers its operations with torch. What an interrupted import of it has left there is taken back first."""
    torch = sys.modules["torch"]
    if leaf in _registered:
        _registered[leaf]._destroy()
    _registered[leaf] = torch.library.Library("anymax", "FRAGMENT")
    return _registered[leaf]
