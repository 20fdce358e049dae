"""torch's DTensor: which tensors are spread over devices, and where verbs send them.

What becomes of them is said in `distributed/_dtensor.py`, and nowhere else.
"""

from __future__ import annotations

import sys
from typing import Any

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
    """What serves DTensors: a floor above, and loaded for the first of them."""
    from ..distributed import _dtensor  # late: as above

    return _dtensor
