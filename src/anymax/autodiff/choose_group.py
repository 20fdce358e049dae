"""The group of processes for an array, by its framework."""

from __future__ import annotations

from typing import Any

from .._array import is_jax, is_torch, shown
from .group import Group


def as_group(who: str, group: Any, axis_name: Any, x: Any) -> Group:
    """The group for scores like x."""
    if isinstance(group, Group):
        return group
    if is_torch(x):
        if axis_name is not None:
            raise TypeError(f"{who}: axis_name= is for JAX; for torch give group=, a ProcessGroup or a DeviceMesh")
        from .torch_group import torch_group  # late: torch is loaded already, since x is a tensor

        return torch_group(who, group)
    if is_jax(x):
        if group is not None or axis_name is None:
            raise TypeError(
                f"{who}: for JAX say axis_name=, the axis of the mesh along which the classes lie, inside jax.shard_map"
            )
        from .jax_group import JaxGroup  # late: as above

        return JaxGroup(who, axis_name)
    raise TypeError(
        f"{who}: expected this process's part of the scores, a torch tensor with group= or a JAX array with axis_name=, got {shown(x)}"
    )
