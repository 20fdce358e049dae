"""May values be read? Not while a compiler, an export, a transform or a mode traces. Is a derivative taken? And loops."""

from __future__ import annotations

import contextlib
import math
import sys
from typing import Any

import numpy as np

from .kinds import Array, Namespace, is_jax, is_torch, namespace, torch_loaded


def compiling() -> bool:
    """True while torch.compile traces. It then warns of a functools cache, and treats NumPy arrays as tensors without strides."""
    torch = torch_loaded()
    return torch is not None and torch.compiler.is_compiling()


def exporting(x: Array) -> bool:
    """True under torch.export, where the sizes of an array may be symbols that must stay free."""
    return is_torch(x) and sys.modules["torch"].compiler.is_exporting()


def eager(x: Array) -> bool:
    """True if the values of `x` may be read: nothing traces or transforms it."""
    if is_torch(x):
        torch = sys.modules["torch"]
        if torch.compiler.is_compiling() or torch.compiler.is_exporting():
            return False
        active = getattr(torch._C, "_are_functorch_transforms_active", None)
        if active is not None and active():
            return False
        return type(x) in (torch.Tensor, torch.nn.Parameter) and not x.is_meta
    if is_jax(x):
        return not isinstance(x, sys.modules["jax"].core.Tracer)
    return True


_asked_of_torch: tuple[Any, Any, Any] | None = None


def modes() -> bool:
    """True where a dispatch mode of torch is on: of fake tensors, make_fx (before dispatch too), a counter of operations.

    Only where torch is loaded. Every call of a torch tensor asks this, so the functions that answer it are looked up once.
    """
    stack, included, before = _asked_of_torch or ask_torch()
    return stack() > 0 or included(before)


def ask_torch() -> tuple[Any, Any, Any]:
    """What `modes` asks of torch: the number of modes on, whether dispatch has a key, and the key of a trace before dispatch."""
    global _asked_of_torch
    c = sys.modules["torch"]._C
    _asked_of_torch = c._len_torch_dispatch_stack, c._dispatch_tls_is_dispatch_key_included, c.DispatchKey.PreDispatch
    return _asked_of_torch


def known(x: Array) -> bool:
    """True if the values of x may be read at no cost: nothing traces it, and no GPU has to be waited for."""
    return eager(x) and not (is_torch(x) and (x.device.type != "cpu" or modes()))


def decides(x: Array) -> bool:
    """True if the values of x may decide which code runs: they are known, and torch.jit does not record the decision."""
    return known(x) and not (is_torch(x) and sys.modules["torch"].jit.is_tracing())


def known_any(condition: Array, xp: Namespace) -> bool:
    """True if the entries are known and some entry is True."""
    return known(condition) and bool(xp.any(condition))


def known_largest(x: Array) -> float | None:
    """The largest entry, if it may be read and may decide which code runs; else, or without entries, None."""
    if not decides(x) or not math.prod(x.shape):
        return None
    most = namespace(x).max(stop_gradient(x))
    return float(most) if known(most) else None  # under jax.jit a result is traced even if its operands are constants


# -- whether a derivative is taken: every verb asks here ------------------------------------------------------------------------


def transformed() -> bool:
    """True under the transforms of torch.func and in forward mode, whose tangents no tensor shows. Only where torch is loaded."""
    torch = sys.modules["torch"]
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def recorded(*values: Any) -> bool:
    """True if autograd records operations on one of these; arrays that are not tensors of torch don't count."""
    torch = torch_loaded()
    if torch is None or not torch.is_grad_enabled():
        return False
    for value in values:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return True
    return False


def differentiates(x: Array) -> bool:
    """True if a derivative through x is, or may be, taken: by a graph, a transform, forward mode, or a trace that does not tell."""
    if not is_torch(x):
        return is_jax(x)
    return recorded(x) or transformed() or not eager(x)


def plain_backward(*grads: Array | None) -> bool:
    """True if a backward pass of torch must be made of plain operations: it is itself differentiated, or its gradients are a batch."""
    if sys.modules["torch"].is_grad_enabled() or transformed():
        return True
    for g in grads:
        if g is not None and batched(g):
            return True
    return False


def batched(g: Array) -> bool:
    """True if one backward pass gets a batch of gradients: by `is_grads_batched` of torch, or by torch.vmap around it."""
    c: Any = sys.modules["torch"]._C
    return c._functorch.is_batchedtensor(g) or c._functorch.is_legacy_batchedtensor(g)


def stop_gradient(x: Any) -> Any:
    """`x` as a constant of differentiation."""
    if is_torch(x):
        return x.detach()
    if is_jax(x):
        return sys.modules["jax"].lax.stop_gradient(x)
    return x


def quiet(x: Array) -> contextlib.AbstractContextManager:
    """For formulas of ours: NumPy's floating-point warnings off, since infinities are part of our contract, and arrays of
    fewer axes allowed where JAX has been told to forbid them (jax_numpy_rank_promotion)."""
    if is_torch(x):
        return contextlib.nullcontext()
    return sys.modules["jax"].numpy_rank_promotion("allow") if is_jax(x) else np.errstate(all="ignore")


def loop(cond: Any, body: Any, state: tuple, limit: int, traced: int) -> tuple:
    """Repeat `state = body(state)` while `cond(state)` holds for any row, at most `limit` times.

    Under JAX's tracing this is one `while_loop`; under torch's, where no value can be asked for, `traced` rounds.
    `body` must leave a row that has converged as it is.
    """
    x = state[0]
    if is_jax(x):
        jax = sys.modules["jax"]
        counted = (jax.numpy.asarray(0), _together(state, jax))
        return jax.lax.while_loop(
            lambda s: (s[0] < limit) & jax.numpy.any(cond(s[1])), lambda s: (s[0] + 1, body(s[1])), counted
        )[1]
    if not eager(x):
        for _ in range(traced):
            state = body(state)
        return state
    xp = namespace(x)
    for _ in range(limit):
        if not bool(xp.any(cond(state))):
            break
        state = body(state)
    return state


def _together(state: tuple, jax: Any) -> tuple:
    """The state, marked as varying over the devices of shard_map if a part of it is. JAX before 0.8 does not mark new arrays itself."""
    if hasattr(jax.lax, "pcast"):
        return state
    axes = [getattr(jax.typeof(a), "vma", frozenset()) for a in state]
    every = frozenset().union(*axes)
    return tuple(jax.lax.pvary(a, tuple(every - own)) if every - own else a for a, own in zip(state, axes))
