"""The two operations of a group for torch.distributed, each with its adjoint, so that derivatives of any order are correct."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from .._array import differentiates, shown
from .group import Expected, Group, Message

Tensor = torch.Tensor


class TorchGroup(Group):
    """The processes of a `ProcessGroup`."""

    def __init__(self, group: Any) -> None:
        # not the group itself: a graph that outlives the group must not keep its threads running
        self.name: str = group.group_name
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.expected = _EXPECTED.setdefault(group, first_expected())

    strict = True

    def stack(self, a: Tensor) -> Tensor:
        return _Stack.apply(a, self) if differentiates(a) else self.gathered(a)

    def vary(self, a: Tensor) -> Tensor:
        return _Vary.apply(a, self) if differentiates(a) else a

    def mine(self, stacked: Tensor, block: Any) -> Tensor:
        return stacked[block]

    def largest(self, a: Tensor, k: int) -> Tensor:
        return a.topk(k, dim=-1).indices

    def put(self, a: Tensor, places: Tensor, values: Tensor) -> Tensor:
        return a.scatter(-1, places, values)

    # -- what communicates ---------------------------------------------------------------------------------------------------

    def gathered(self, a: Tensor) -> Tensor:
        if not a.numel():
            return a.new_empty((self.size, *a.shape))
        flat = a.detach().contiguous().reshape(1, -1)
        out = self._run(torch.ops._c10d_functional.all_gather_into_tensor, flat, self.size, self.name)
        return out.reshape(self.size, *a.shape)

    def summed(self, a: Tensor) -> Tensor:
        if not a.numel():
            return a.clone()
        return self._run(torch.ops._c10d_functional.all_reduce, a.detach().contiguous(), "sum", self.name)

    def texts(self, text: str, like: Tensor) -> list[str]:
        data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=like.device)
        sizes = self.gathered(torch.tensor([data.numel()], device=like.device))[:, 0].tolist()
        padded = torch.nn.functional.pad(data, (0, max(sizes) + 1 - data.numel()))
        return [bytes(row[:n].tolist()).decode() for row, n in zip(self.gathered(padded), sizes, strict=True)]

    def _run(self, collective: Any, *args: Any) -> Tensor:
        wait = torch.ops._c10d_functional.wait_tensor
        try:
            return wait(collective(*args))
        except RuntimeError as error:
            if "Could not resolve the process group" in str(error):
                raise RuntimeError(
                    "anymax.distributed: the group of this graph has been destroyed; call backward before destroy_process_group"
                ) from error
            raise RuntimeError(
                f"anymax.distributed: process {self.rank} of {self.size} waited for the others in vain: one has ended, has failed "
                f"before it came here, or calls with other shapes ({str(error).splitlines()[0]})"
            ) from error


def first_expected() -> Expected:
    """For a group that has had no call."""
    return Expected(Message(0, torch.float32))


_EXPECTED: weakref.WeakKeyDictionary[Any, Expected] = weakref.WeakKeyDictionary()  # for each ProcessGroup


class _OfGroup(torch.autograd.Function):
    """A function of a tensor and a group; only the tensor has a gradient."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.group = inputs[1]


class _Stack(_OfGroup):
    """Varying to common: every process gets the values of all. The adjoint takes the part of this process."""

    @staticmethod
    def forward(a: Tensor, group: TorchGroup) -> Tensor:
        return group.gathered(a)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Part.apply(grads[0], ctx.group), None


class _Part(_OfGroup):
    """Common to varying: takes this process's part of a common value."""

    @staticmethod
    def forward(a: Tensor, group: TorchGroup) -> Tensor:
        return a[group.rank].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Stack.apply(grads[0], ctx.group), None


class _Vary(_OfGroup):
    """Common to varying, unchanged. The adjoint is the sum over the processes."""

    @staticmethod
    def forward(a: Tensor, group: TorchGroup) -> Tensor:
        return a.view_as(a)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Sum.apply(grads[0], ctx.group), None


class _Sum(_OfGroup):
    """Varying to common: the sum over the processes."""

    @staticmethod
    def forward(a: Tensor, group: TorchGroup) -> Tensor:
        return group.summed(a)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Vary.apply(grads[0], ctx.group), None


def torch_group(who: str, group: Any) -> TorchGroup:
    """The group for a ProcessGroup, a DeviceMesh of one dimension, a pair (mesh, dimension), or None for all processes."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(f"{who}: there are no processes yet; call torch.distributed.init_process_group first")
    argument = group
    if group is None:
        group = dist.group.WORLD
    mesh, dim = group if isinstance(group, tuple) and len(group) == 2 else (group, None)
    if isinstance(mesh, dist.device_mesh.DeviceMesh):
        if dim is None and mesh.ndim != 1:
            raise ValueError(
                f"{who}: group is a mesh of {mesh.ndim} dimensions; give one of them, as mesh['classes'] or (mesh, 'classes')"
            )
        group = mesh.get_group(dim)
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{who}: group must be a ProcessGroup, a DeviceMesh of one dimension or a pair (mesh, dimension), got {shown(argument)}"
        )
    if dist.get_rank(group) < 0:
        raise ValueError(f"{who}: this process is not in the group that is given")
    return TorchGroup(group)
