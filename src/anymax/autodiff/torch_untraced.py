"""A call that torch.compile does not trace. The decorator loads Dynamo: import this module only where that is loaded, or compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(reason="its shapes, or what it sends, depend on values")
def untraced_call(f: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """`f(*args, **named)`."""
    return f(*args, **named)
