"""torch's DTensor: tells which tensors are spread over devices. `distributed/torch_dtensor.py` computes with them."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeGuard, TypeVar, cast

from .names import as_mapping
from .providers import providers
from .tables import show_options

# verbs that refuse DTensors but exist in anymax.distributed
_APART = ("sample",)


def sharded(x: Any) -> TypeGuard[Any]:
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


F = TypeVar("F", bound=Callable[..., Any])


_OPERANDS = ("x", "linear_weight", "x_ref", "linear_weight_ref")  # of output layers


def layer_over_devices(*of_rows: str) -> Callable[[F], F]:
    """A decorator of a verb (x, linear_weight, ..., mapping) of output layers: a call with a DTensor goes to the module that computes it.

    of_rows: the names of its arguments whose first axes are those of the rows of x.
    """

    def decorate(verb: F) -> F:
        show_options(verb)
        count = sum(name in _OPERANDS for name in inspect.signature(verb).parameters)

        @functools.wraps(verb)
        def call(*args: Any, **options: Any) -> Any:
            operands = (*args[:count], *map(options.get, _OPERANDS))
            if "torch.distributed.tensor" not in sys.modules or not any(map(sharded, operands)):
                return verb(*args, **options)
            who, arguments = verb.__name__, inspect.signature(verb).bind(*args, **options).arguments
            x, weight, mapping = arguments.pop("x"), arguments.pop("linear_weight"), arguments.pop("mapping", "softmax")
            rows = {name: arguments.pop(name) for name in of_rows if name in arguments}
            layers = providers.layers_over_devices()
            return layers.layer(who, verb, x, weight, rows, as_mapping(mapping, who), arguments)

        return cast(F, call)

    return decorate


def over_devices() -> Any:
    """The module that handles DTensors, which is loaded when the first one appears."""
    return providers.over_devices()


def scores_over_devices(
    verb: str, whole: Callable[..., Any], mapping: Any, x: Any, axis: Any, mask: Any, dtype: Any
) -> Any:
    """`whole(mapping, x, axis, mask=mask)` for a DTensor x, which is cast to dtype; the result has its shape. verb: the name for errors.

    `whole` computes the rows of a device that has all classes, `anymax.distributed` those of which each device has a part.
    """
    on_device = lambda mapping, rows, mask: whole(mapping, rows, axis, mask=mask)  # noqa: E731
    return over_devices().like_scores(verb, on_device, mapping, x, axis, mask, dtype)


def transform_over_devices(transform: Any, x: Any) -> Any:
    """A transform of a DTensor: each device transforms its rows. One whose draws or parameters belong to all rows together is refused."""
    if transform.random or not transform.by_rows:
        refuse(transform.name, x)
    return over_devices().transformed(transform, x)


def rows_over_devices(
    verb: str,
    whole: Callable[..., Any],
    mapping: Any,
    x: Any,
    axis: Any,
    mask: Any,
    keepdims: bool | None = None,
    **per_row: Any,
) -> Any:
    """Results with one number per row, in a list, as `scores_over_devices` computes scores. per_row: further arguments with one value
    per row."""
    on_device = functools.partial(whole, axis=axis, **({} if keepdims is None else {"keepdims": keepdims}))
    return over_devices().of_rows(verb, on_device, mapping, x, axis, mask, bool(keepdims), **per_row)
