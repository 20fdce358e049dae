"""torch.compile: functions that it must not trace."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch


def outside_graphs(f: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """`f(*args, **named)`, which torch.compile does not trace."""
    if torch.compiler.is_compiling() or "torch._dynamo" in sys.modules:
        from .torch_untraced import untraced_call  # late: it loads Dynamo, which takes seconds

        return untraced_call(f, *args, **named)
    return f(*args, **named)
