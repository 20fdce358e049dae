"""torch's DTensor: which tensors are spread over devices, and where verbs send them.

`distributed/torch_dtensor.py` says what becomes of them, and nothing else does.
"""

from __future__ import annotations

import sys
from typing import Any

from . import handed

_APART = ("sample", "linear_loss")  # verbs without DTensors that anymax.distributed has


def sharded(x: Any) -> bool:
    """True for a DTensor."""
    return isinstance(x, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def refuse(who: str, x: Any, **others: Any) -> None:
    """An error if x or an operand, given by name, is a DTensor, for a verb that takes none."""
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
    """The module that handles DTensors, imported with the first of them."""
    return handed.over_devices()
