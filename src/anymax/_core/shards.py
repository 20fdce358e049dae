"""torch's DTensor: tells which tensors are spread over devices. `distributed/torch_dtensor.py` computes with them."""

from __future__ import annotations

import sys
from typing import Any

from . import handed

_APART = ("sample", "linear_loss")  # verbs that refuse DTensors but exist in anymax.distributed


def sharded(x: Any) -> bool:
    """True for a DTensor."""
    return isinstance(x, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def refuse(who: str, x: Any, **others: Any) -> None:
    """An error, for a verb that takes no DTensor, if x or another operand is one."""
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
    """The module that handles DTensors, which is loaded when the first one appears."""
    return handed.over_devices()
