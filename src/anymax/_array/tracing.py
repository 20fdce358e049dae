"""Detects tracing and differentiation: whether values may be read, and whether a derivative is taken; and loops that can be traced."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from .kinds import Array, Namespace, is_jax, is_torch, namespace, torch_loaded


def compiling() -> bool:
    """True while torch.compile traces. It then warns of functools' caches, and treats NumPy arrays as tensors without strides."""
    torch = torch_loaded()
    return torch is not None and torch.compiler.is_compiling()


def exporting(x: Array) -> bool:
    """True for a tensor under torch.export, where sizes may be symbols that must not be specialised to numbers."""
    return is_torch(x) and torch_exports()


def torch_exports() -> bool:
    """True under torch.export; torch must be loaded. Before 2.12, torch.compile traces torch's own `is_exporting()` as True."""
    return sys.modules["torch"].compiler._is_exporting_flag


def eager(x: Array) -> bool:
    """True if values of `x` may be read: it is not traced, and no functional transform is active."""
    if is_torch(x):
        torch = sys.modules["torch"]
        if torch.compiler.is_compiling() or torch_exports():
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
    """True if a dispatch mode of torch is on: fake tensors, make_fx (also before dispatch), a counter of operations.

    Call it only if torch is loaded. It runs in every call with a torch tensor, so the functions that it needs are looked up once.
    """
    stack, included, before = _asked_of_torch or ask_torch()
    return stack() > 0 or included(before)


def ask_torch() -> tuple[Any, Any, Any]:
    """Look up what `modes` needs: the number of active modes, the test for a dispatch key, the key of a trace before dispatch."""
    global _asked_of_torch
    c = sys.modules["torch"]._C
    _asked_of_torch = c._len_torch_dispatch_stack, c._dispatch_tls_is_dispatch_key_included, c.DispatchKey.PreDispatch
    return _asked_of_torch


def known(x: Array) -> bool:
    """True if values of x can be read at no cost: not while tracing, and not if reading would wait for a GPU."""
    return eager(x) and not (is_torch(x) and (x.device.type != "cpu" or modes()))


def decides(x: Array) -> bool:
    """True if a value of x may choose a branch: it is known, and torch.jit is not tracing, which would record one branch only."""
    return known(x) and not (is_torch(x) and sys.modules["torch"].jit.is_tracing())


def at_least(size: Any, least: int) -> bool:
    """True if a size is so large, and no symbol in a program for any size."""
    return type(size) is int and size >= least


def plain_number(x: Array) -> float | None:
    """The number in a float tensor of torch without axes, where plainly nothing traces or changes calls; None for any other array."""
    torch = torch_loaded()
    if torch is None or torch.compiler.is_compiling() or type(x) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if x.ndim or not x.is_cpu or x.dtype not in (torch.float32, torch.float64) or x.layout is not torch.strided:
        return None
    c = torch._C
    if torch_exports() or c._are_functorch_transforms_active() or c._is_tracing() or modes():
        return None
    return x.item()


def on_cpu(x: Array) -> bool:
    """True for an array in the memory of a CPU; while JAX traces, if it computes on a CPU by default."""
    if is_torch(x):
        return x.device.type == "cpu"
    if is_jax(x):
        return (
            all(d.platform == "cpu" for d in x.devices()) if eager(x) else sys.modules["jax"].default_backend() == "cpu"
        )
    return True


def known_any(condition: Array, xp: Namespace) -> bool:
    """True if some entry is known to be True."""
    return known(condition) and bool(xp.any(condition))


def known_largest(x: Array) -> float | None:
    """The largest entry, if it may be read and may choose a branch (`decides`); else, or if x is empty, None."""
    if not decides(x) or not math.prod(x.shape):
        return None
    most = namespace(x).max(stop_gradient(x))
    return float(most) if known(most) else None  # under jax.jit the result of an operation on a constant is traced


def on_constants(x: Array, *values: Any) -> contextlib.AbstractContextManager:
    """A context for operations on `values`, constants of x's framework; their results may be read in it, also while JAX traces.

    If one of the values is traced, so are results of it.
    """
    if not is_jax(x):
        return contextlib.nullcontext()
    jax = sys.modules["jax"]
    if any(isinstance(value, jax.core.Tracer) for value in values):
        return jax.ensure_compile_time_eval()
    return jax.core.eval_context()  # the other one leaves what jax.shard_map runs without jit


# -- whether a derivative is taken ----------------------------------------------------------------------------------------------


def transformed() -> bool:
    """True under the transforms of torch.func and in forward mode, which no tensor shows. Call it only if torch is loaded."""
    torch = sys.modules["torch"]
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def recorded(*values: Any) -> bool:
    """True if autograd records operations on one of these values; only a tensor of torch is recorded."""
    torch = torch_loaded()
    if torch is None or not torch.is_grad_enabled():
        return False
    for value in values:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return True
    return False


def differentiates(x: Array) -> bool:
    """True if a derivative through x is taken (autograd, a transform, forward mode) or may be (JAX, or x is traced)."""
    if not is_torch(x):
        return is_jax(x)
    return recorded(x) or transformed() or not eager(x)


def plain_backward(*grads: Array | None) -> bool:
    """True if a backward pass of torch must use plain operations, because it is itself differentiated or gets a batch of gradients."""
    if sys.modules["torch"].is_grad_enabled() or transformed():
        return True
    for g in grads:
        if g is not None and batched(g):
            return True
    return False


def batched(g: Array) -> bool:
    """True if g is a batch of gradients in one backward pass, from torch's `is_grads_batched` or from torch.vmap around it."""
    c: Any = sys.modules["torch"]._C
    return c._functorch.is_batchedtensor(g) or c._functorch.is_legacy_batchedtensor(g)


def stop_gradient(x: Any) -> Any:
    """`x` as a constant for differentiation."""
    if is_torch(x):
        return x.detach()
    if is_jax(x):
        constant = sys.modules["jax"].lax.stop_gradient(x)
        # of a number of Python under jax.grad JAX 0.10 gives a number
        return constant if is_jax(constant) else sys.modules["jax"].numpy.asarray(constant, x.dtype)
    return x


def quiet(x: Array) -> contextlib.AbstractContextManager:
    """A context for our formulas: NumPy's floating-point warnings are off, since infinities are part of our contract, and JAX may
    promote ranks even if the user has forbidden it (jax_numpy_rank_promotion)."""
    if is_torch(x):
        return contextlib.nullcontext()
    return sys.modules["jax"].numpy_rank_promotion("allow") if is_jax(x) else np.errstate(all="ignore")


def repeat(body: Callable[[Array], Array], state: Array, count: int) -> Array:
    """`state = body(state)`, so many times; one loop in a program of JAX, whatever the count."""
    if is_jax(state):
        return sys.modules["jax"].lax.fori_loop(0, count, lambda _, s: body(s), state)
    for _ in range(count):
        state = body(state)
    return state


def loop(cond: Any, body: Any, state: tuple, limit: int, traced: int) -> tuple:
    """Repeat `state = body(state)` while `cond(state)` holds for any row, at most `limit` times.

    With JAX this is one `while_loop`. Where no value can be read, as in a trace of torch, it runs `traced` rounds.
    `body` must not change a row that has converged.
    """
    x = state[0]
    if is_jax(x):
        jax = sys.modules["jax"]
        # JAX before 0.8 needs a state of one type
        counted = (jax.numpy.asarray(0), state if hasattr(jax.lax, "pcast") else alike(*state))
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


def alike(*arrays: Array) -> tuple[Array, ...]:
    """JAX's arrays with one type: within shard_map, an array that varies over devices has another type than one that does not."""
    varying = [_varying(a) for a in arrays]
    every = frozenset().union(*varying)
    return tuple(_to_vary(a, tuple(every - axes)) if every - axes else a for a, axes in zip(arrays, varying))


def _to_vary(a: Array, axes: tuple[Any, ...]) -> Array:
    lax = sys.modules["jax"].lax
    return lax.pcast(a, axes, to="varying") if hasattr(lax, "pcast") else lax.pvary(a, axes)  # before JAX 0.8


def _varying(a: Array) -> frozenset[Any]:
    """The axes of the mesh along which shard_map knows that `a` may differ from device to device."""
    kind = getattr(sys.modules["jax"], "typeof", lambda a: None)(a)
    axes = getattr(kind, "vma", None)
    return getattr(getattr(kind, "manual_axis_type", None), "varying", frozenset()) if axes is None else axes
