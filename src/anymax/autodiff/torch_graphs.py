"""torch.compile: functions that it must not trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(reason="its shapes, or what it sends, depend on values")
def outside_graphs(f: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """`f(*given, **named)`, which torch.compile does not trace."""
    return f(*args, **named)
