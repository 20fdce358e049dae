"""Choose by the framework: the group of processes for a kind of array, and the call of a verb, which torch.compile does not trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._array import compiling, is_jax, is_torch, shown
from .agreement import Agreement, fail_together
from .call import Arguments
from .group import Group


def as_group(who: str, group: Any, axis_name: Any, x: Any) -> Group:
    """The group for scores like x."""
    if isinstance(group, Group):
        return group
    if is_torch(x):
        if axis_name is not None:
            raise TypeError(f"{who}: axis_name= is for JAX; for torch give group=, a ProcessGroup or a DeviceMesh")
        from .torch import torch_group  # late: torch is loaded already, since x is a tensor

        return torch_group(who, group)
    if is_jax(x):
        if group is not None or axis_name is None:
            raise TypeError(
                f"{who}: for JAX say axis_name=, the axis of the mesh along which the classes lie, inside jax.shard_map"
            )
        from .jax import JaxGroup  # late: as above

        return JaxGroup(who, axis_name)
    raise TypeError(
        f"{who}: expected this process's part of the scores, a torch tensor with group= or a JAX array with axis_name=, got {shown(x)}"
    )


def eagerly(verb: Callable[..., Any], arguments: Arguments, *given: Any) -> Any:
    """Run a verb outside of torch.compile's graphs, since the scores decide how much is sent."""
    if not compiling():
        return _together(verb, arguments, *given)
    from ..autodiff.torch_graphs import outside_graphs  # late: only now is torch sure to be loaded

    return outside_graphs(_together, verb, arguments, *given)


def _together(verb: Callable[..., Any], arguments: Arguments, *given: Any) -> Any:
    """Run a verb; if one process fails, all do."""
    agreement = Agreement(
        arguments.who, as_group(arguments.who, arguments.group, arguments.axis_name, arguments.x), arguments.x
    )
    return fail_together(agreement, lambda: verb(arguments, agreement, *given))
