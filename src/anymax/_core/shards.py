"""torch's DTensor: which tensors are spread over devices, and where verbs send them.

`distributed/torch_dtensor.py` says what becomes of them, and nothing else does.
"""

from __future__ import annotations

import sys
from typing import Any

from . import handed

_APART = ("sample", "linear_loss")  # those of them that anymax.distributed has too


def sharded(x: Any) -> bool:
    """True for a DTensor."""
    return isinstance(x, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def refuse(who: str, x: Any, **others: Any) -> None:
    """An error where a verb does not take a DTensor, as x or as another operand by its name."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    for name, value in others.items():
        if sharded(value):
            raise TypeError(f"{who} takes no DTensor as {name}; give {name}.full_tensor()")
    if sharded(x):
        apart = f"; anymax.distributed.{who} takes classes that lie on several devices, as x.to_local() with group="
        raise TypeError(
            f"{who} takes no DTensor; give each device its own rows, x.to_local() (with their targets), or all of them, x.full_tensor()"
            f"{apart if who in _APART else ''}"
        )


def over_devices() -> Any:
    """What serves DTensors, loaded for the first of them."""
    return handed.over_devices()
