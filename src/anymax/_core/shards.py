"""torch's DTensor: tells which tensors are spread over devices. `distributed/torch_dtensor.py` computes with them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from .handed import handed

# verbs that refuse DTensors but exist in anymax.distributed
_APART = ("sample", "linear_log_prob", "linear_log_prob_entropy", "linear_loss", "linear_topk_kl")


def sharded(x: Any) -> bool:
    """True for a DTensor."""
    return isinstance(x, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def refuse(who: str, x: Any, **others: Any) -> None:
    """An error, for a verb that takes no DTensor, if x or another operand is one."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    for name, value in others.items():
        if sharded(value):
            apart = f", or {name}.to_local() to anymax.distributed.{who}, if its classes lie on several devices"
            raise TypeError(
                f"{who} takes no DTensor as {name}; give {name}.full_tensor()"
                f"{apart if who in _APART and name.startswith('linear_') else ''}"
            )
    if sharded(x):
        apart = f"; anymax.distributed.{who} takes classes that lie on several devices, as x.to_local() with group="
        raise TypeError(
            f"{who} takes no DTensor; give each device its own rows, x.to_local() (with their targets), or all of them, x.full_tensor()"
            f"{apart if who in _APART else ''}"
        )


def over_devices() -> Any:
    """The module that handles DTensors, which is loaded when the first one appears."""
    return handed.over_devices()


def scores_over_devices(
    verb: str, whole: Callable[..., Any], mapping: Any, x: Any, axis: Any, mask: Any, dtype: Any
) -> Any:
    """`whole(mapping, x, axis, mask=mask)` of a DTensor cast to dtype, with the shape of x. verb: its name.

    `whole` computes the rows of a device that has all classes, `anymax.distributed` those of which each device has a part.
    """
    on_device = lambda mapping, rows, mask: whole(mapping, rows, axis, mask=mask)  # noqa: E731
    return over_devices().like_scores(verb, on_device, mapping, x, axis, mask, dtype)


def rows_over_devices(
    verb: str,
    whole: Callable[..., Any],
    mapping: Any,
    x: Any,
    axis: Any,
    mask: Any,
    keepdims: bool | None = None,
    **given: Any,
) -> Any:
    """The same for results with one number per row, in a list; `given` are further arguments with one value per row."""
    on_device = functools.partial(whole, axis=axis, **({} if keepdims is None else {"keepdims": keepdims}))
    return over_devices().of_rows(verb, on_device, mapping, x, axis, mask, bool(keepdims), **given)
