"""The two operations of a group for JAX devices inside `jax.shard_map`; JAX itself tracks what varies over the devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .group import Group

_GATHERS_COMMON = jax.__version_info__ >= (0, 10)  # before, all_gather has no to="invarying"


class JaxGroup(Group):
    """The devices along a named axis."""

    def __init__(self, who: str, axis_name: Any) -> None:
        try:
            self.rank = jax.lax.axis_index(axis_name)
        except NameError:
            raise NameError(
                f"{who}: there is no axis {axis_name!r} here; call it inside jax.shard_map over a mesh that has it"
            ) from None
        self.axis = axis_name
        self.size = int(jax.lax.psum(1, axis_name))
        self.checked = _varies(self.rank)

    def stack(self, a: Any) -> Any:
        if not self.checked:
            return jax.lax.all_gather(a, self.axis)
        if _GATHERS_COMMON:
            return jax.lax.all_gather(a, self.axis, to="invarying")
        here = jnp.arange(self.size).reshape((self.size,) + (1,) * a.ndim) == self.rank
        return jax.lax.psum(jnp.where(here, a[None], jnp.zeros_like(a)[None]), self.axis)

    def vary(self, a: Any) -> Any:
        return a

    def mine(self, stacked: Any, block: Any) -> Any:
        return jax.lax.dynamic_index_in_dim(stacked, self.rank, keepdims=False)

    def largest(self, a: Any, k: int) -> Any:
        return jax.lax.top_k(a, k)[1]

    def put(self, a: Any, places: Any, values: Any) -> Any:
        return jnp.put_along_axis(a, places, values, axis=-1, inplace=False)


def _varies(rank: Any) -> bool:
    """True if shard_map tracks which values vary over the devices (check_vma), and uses that to transpose."""
    kind = jax.typeof(rank)
    axes = getattr(kind, "vma", None)
    return bool(getattr(getattr(kind, "mat", None), "varying", ()) if axes is None else axes)
