"""PyTorch: one wrapping that backward, double backward, forward mode, torch.func, compile and export all accept.

Four ways through, chosen at each call:
- eager: an `autograd.Function` around the engines, with `setup_context` and without `jvp` (which torch.compile refuses); its backward
  is in plain operations when it is itself differentiated;
- compiled: the same with opaque operations (`torch.ops.anymax`), so that the compiler need not trace an iteration;
- functorch transforms, forward mode, or a parameter that wants a gradient: `Mapping.differentiable`, plain operations around
  the held outcome of the iteration;
- export: the plain formula, with an iteration of fixed length where there is one.
"""

from __future__ import annotations

import ast
from typing import Any, cast

import array_api_compat.torch as xp
import numpy as np
import torch

from .. import kernels
from .._array import floating, modes, upcast
from .._mapping import Mapping
from ..kernels import native, reference, short
from ..kernels._memory import MANY, kept
from ..mappings import CATALOGUE
from . import library
from .saving import As, hooked, restored, save, saved

Tensor = torch.Tensor

_KINDS = {kind.__name__: kind for kind in CATALOGUE}
_LIBRARY = library(__name__)
_LIBRARY.define("forward(Tensor x, Tensor[] params, str spec) -> Tensor")
_LIBRARY.define("vjp(Tensor x, Tensor p, Tensor g, Tensor[] params, str spec) -> Tensor")
_LIBRARY.define("hold(Tensor x, Tensor[] params, str spec) -> Tensor")


# -- a mapping as a string and its tensors, for the operations' schemas ---------------------------------------------------


def _spec(mapping: Mapping) -> str | None:
    """The mapping without its tensors, in words that `_restore` understands; None for a kind with functions of the user's."""
    if _KINDS.get(type(mapping).__name__) is not type(mapping):
        return None
    words = [type(mapping).__name__]
    for key, value in mapping.constants().items():
        if not (value is None or isinstance(value, (bool, int, float, str))):
            return None
        if isinstance(value, float):  # a symbol under torch.compile(dynamic=True): the ratio makes it a number again
            over, under = value.as_integer_ratio()
            value = over / under
        words.append(f"{key}={value!r}")
    for key in mapping.params():
        words.append(key)
    return ";".join(words)


def _restore(spec: str, params: list[Tensor]) -> Mapping:
    kind, *words = spec.split(";")
    values = iter(params)
    return _KINDS[kind](
        **{k: ast.literal_eval(v) if sep else next(values) for k, sep, v in (w.partition("=") for w in words)}
    )


def _apart(out: Tensor, *inputs: Tensor) -> Tensor:
    """As an operation must return it: contiguous, and none of its inputs."""
    return out.clone() if any(out is a for a in inputs) else out.contiguous()


def _forward_op(x: Tensor, params: list[Tensor], spec: str) -> Tensor:
    mapping = _restore(spec, params)
    return _apart(kernels.choose("forward", mapping, x).forward(mapping, x), x)


def _vjp_op(x: Tensor, p: Tensor, g: Tensor, params: list[Tensor], spec: str) -> Tensor:
    mapping = _restore(spec, params)
    x, p = (a if a.dtype == g.dtype else a.to(g.dtype) for a in (x, p))  # hooks of saved tensors may have changed them
    return _apart(kernels.choose("vjp", mapping, x).vjp(mapping, x, p, g), x, p, g)


def _hold_op(x: Tensor, params: list[Tensor], spec: str) -> Tensor:
    return _restore(spec, params).hold(upcast(floating(x, xp), xp), xp).clone(memory_format=torch.contiguous_format)


def _forward_fake(x: Tensor, params: list[Tensor], spec: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _vjp_fake(x: Tensor, p: Tensor, g: Tensor, params: list[Tensor], spec: str) -> Tensor:
    return torch.empty_like(p, memory_format=torch.contiguous_format)


def _hold_fake(x: Tensor, params: list[Tensor], spec: str) -> Tensor:
    dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    return x.new_empty((*x.shape[:-1], 2), dtype=dtype)


for _name, _impl, _fake in (
    ("forward", _forward_op, _forward_fake),
    ("vjp", _vjp_op, _vjp_fake),
    ("hold", _hold_op, _hold_fake),
):
    _LIBRARY.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"anymax::{_name}", _fake, lib=_LIBRARY)


def _hold_vmap(info: Any, in_dims: Any, x: Tensor, params: list[Tensor], spec: str) -> tuple[Tensor, int]:
    """All batches in one call: the batch becomes the first axis of the scores, and of the parameters that have it."""
    x_dim, param_dims, _ = in_dims
    x = x.expand(info.batch_size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
    moved = []
    for value, dim in zip(params, param_dims, strict=True):
        if dim is not None:
            value = value.movedim(dim, 0)
            value = value.reshape(value.shape[0], *([1] * (x.ndim - value.ndim)), *value.shape[1:])
        moved.append(value)
    return torch.ops.anymax.hold(x, moved, spec), 0


torch.library.register_vmap("anymax::hold", _hold_vmap, lib=_LIBRARY)


# -- the autograd functions -------------------------------------------------------------------------------------------------


class _Apply(torch.autograd.Function):
    """p(x), eager: never under a transform, so that `forward` may keep what it likes, and costs a third."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mapping: Mapping, mask: Tensor | None) -> Tensor:
        engine = kernels.choose("forward", mapping, x)
        ctx.mapping = mapping
        if engine in kernels.COMPILED and not hooked():
            p, support = engine.forward_saving(mapping, x, mask)
        else:
            p, support = engine.forward(mapping, x, *([] if mask is None else [mask])), None
        ctx.kind, ctx.sizes = type(support), support and support[1:]
        save(ctx, x if mapping.needs_scores else p, p, *(support[:1] if support else ()))
        return p

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, p, *memory = saved(ctx)
        return _vjp(ctx.mapping, x, p, grads[0], ctx.kind(*memory, *ctx.sizes) if memory else None), None, None


def _vjp(mapping: Mapping, x: Tensor, p: Tensor, g: Tensor, support: Any = None) -> Tensor:
    if torch.is_grad_enabled():  # the backward pass is itself to be differentiated
        return reference.vjp(mapping, x, p, g)
    engine = kernels.choose("vjp", mapping, g)  # g may be a batch of torch.vmap where p is not
    if engine in kernels.COMPILED and support is not None and g.shape == p.shape:
        return engine.vjp(mapping, x, p, g, support)
    return engine.vjp(mapping, x, p, g)


class _Log(torch.autograd.Function):
    """log p(x), eager, by a compiled engine."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mapping: Mapping, engine: Any) -> Tensor:
        log_p = engine.log_forward(mapping, x)
        ctx.mapping = mapping
        save(ctx, x, log_p)
        return log_p

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, log_p = saved(ctx)
        (g,) = grads
        engine = None if torch.is_grad_enabled() else kernels.compiled("log_vjp", ctx.mapping, g)
        if engine is None:
            with torch.enable_grad():
                free = x if x.requires_grad else x.detach().requires_grad_()
                out = reference.log_forward(ctx.mapping, free)
            return torch.autograd.grad(cast(Tensor, out), free, g, create_graph=torch.is_grad_enabled())[0], None, None
        return engine.log_vjp(ctx.mapping, x, log_p, g), None, None


class _IndexLoss(torch.autograd.Function):
    """The loss for class indices, eager: one pass forward, one backward, and only the non-zeros of p in between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, mapping: Mapping, engine: Any, reduction: str = "none") -> Tensor:
        value, support, tau = engine.index_loss(mapping, x, index, engine is not native or not hooked())
        ctx.mapping, ctx.engine, ctx.sizes, ctx.reduction = mapping, engine, support and support[1:], reduction
        save(ctx, x, index, tau, support and support[0])
        return _reduced(value, reduction)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, index, tau, memory = saved(ctx)
        (g,) = grads
        if ctx.reduction != "none":
            g = (g / index.numel() if ctx.reduction == "mean" else g).expand(index.shape)
        support = None if memory is None else native.Saved(memory, *ctx.sizes)
        return _index_gradient(ctx.mapping, ctx.engine, x, index, g, support, tau), *(None,) * 4


class _DeviceLoss(torch.autograd.Function):
    """The loss for class indices on a GPU, reduced: which samples count is the kernel's to say, so that no index is waited for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, mapping: Mapping, ignore: int, reduction: str) -> Tensor:
        value, count, state = kernels.triton.reduced_loss(mapping, x, index, ignore, reduction, True)
        ctx.call = mapping, ignore
        save(ctx, x, index, state, count)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,), (x, index, state, count), (mapping, ignore) = grads, saved(ctx), ctx.call
        g = g if count is None else g / count
        if _grad():
            counted = (index != ignore) & (index >= 0)
            index = torch.where(counted, index.to(torch.int64), -1)
        return _index_gradient(mapping, kernels.triton, x, index, g, None, state, ignore), None, None, None, None


def _index_gradient(
    mapping: Mapping, engine: Any, x: Tensor, index: Tensor, g: Tensor, support: Any, tau: Any, ignore: int | None = None
) -> Tensor:
    if ignore is not None and not _grad():
        return engine.index_loss_grad(mapping, x, index, g, support, tau, ignore)
    if _grad() or engine.refuse("vjp", mapping, g) is not None:
        y = torch.zeros_like(x).scatter_(-1, index.clamp(min=0, max=x.shape[-1] - 1)[..., None], 1.0)
        counted = (index >= 0)[..., None]
        return (g[..., None] * torch.where(counted, apply(mapping, x) - y, torch.zeros_like(x))).to(x.dtype)
    return engine.index_loss_grad(mapping, x, index, g, support, tau)


class _QuickLoss(torch.autograd.Function):
    """What `quick_loss` has made, with its backward as short as its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, made: tuple[Tensor, Any, Tensor | None, Any, Any, float]) -> Tensor:
        value, support, memory, *ctx.call = made
        ctx.sizes, ctx.dtype, ctx.shape = support and support[1:], x.dtype, x.shape
        ctx.save_for_backward(x, index, memory)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,), (x, index, memory), ((mapping, code, param), call, factor) = grads, ctx.saved_tensors, ctx.call
        lazy = g.is_neg() or x.is_neg() or (memory is not None and memory.is_neg())
        if not (lazy or _grad() or _asked() is not None):
            capacity = ctx.sizes[1] if ctx.sizes else 0
            scale = g if factor else g.contiguous()
            out = call(code | native.LOSS_GRAD, param, x, None, index, scale, memory, capacity, factor)
            if out is not None:
                return out, None, None
        x, index = restored(x, As(ctx.dtype, ctx.shape, _CPU)), restored(index, As(torch.int64, ctx.shape[:-1], _CPU))
        support, tau = _support(memory, ctx.sizes), None
        if memory is not None and not ctx.sizes:
            tau = restored(memory, As(ctx.dtype, ctx.shape[:-1], _CPU))
        g = (g * factor).expand(index.shape) if factor else g
        return _index_gradient(mapping, native, x, index, g, support, tau), None, None


_CPU = torch.device("cpu")


def _support(memory: Tensor | None, sizes: Any) -> native.Saved | None:
    """The saved support of these sizes."""
    if memory is None or not sizes:
        return None
    return native.Saved(restored(memory, As(torch.int32, (native.saved_size(*sizes),), _CPU)), *sizes)


def _reduced(value: Tensor, reduction: str) -> Tensor:
    return value if reduction == "none" else value.mean() if reduction == "mean" else value.sum()


class _Compiled(torch.autograd.Function):
    """p(x) as opaque operations, for torch.compile."""

    @staticmethod
    def forward(x: Tensor, spec: str, needs_scores: bool, *params: Tensor) -> Tensor:
        return torch.ops.anymax.forward(x, params, spec)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, ctx.spec, ctx.needs_scores, *params = inputs
        ctx.count = len(params)
        ctx.save_for_backward(x if ctx.needs_scores else output, output, *params)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, p, *params = ctx.saved_tensors
        return torch.ops.anymax.vjp(x, p, grads[0], params, ctx.spec), None, None, *([None] * ctx.count)


class _Loss(torch.autograd.Function):
    """`Omega*(x) - <x, y>`, eager: the gradient is p - y, and no derivative of the solver is taken."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, mapping: Mapping) -> tuple[Tensor, Tensor]:
        p = kernels.choose("forward", mapping, x).forward(mapping, x)
        return kernels.choose("loss", mapping, x).loss(mapping, x, p, y), p

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, y, ctx.mapping = inputs
        ctx.mark_non_differentiable(output[1])
        save(ctx, x, y, output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, y, p = saved(ctx)
        if torch.is_grad_enabled():
            p = apply(ctx.mapping, x)
        return grads[0] * (p - y), None, None


# -- the bridge ---------------------------------------------------------------------------------------------------------------


def _transformed() -> bool:
    """True under torch.func transforms and in forward mode."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def _learns(mapping: Mapping) -> bool:
    if not torch.is_grad_enabled():
        return False
    for value in mapping.params().values():
        if isinstance(value, Tensor) and value.requires_grad:
            return True
    return False


def _traced(mapping: Mapping) -> bool:
    """True where plain operations are to be seen: under torch.compile, a mode, a transform, or for a parameter that learns."""
    return compiling() or modes() or _transformed() or _learns(mapping)


def _implicit(mapping: Mapping, x: Tensor) -> Tensor:
    spec = _spec(mapping) if mapping.iterative and not torch.compiler.is_exporting() else None
    if spec is None:
        return reference.differentiable(mapping, x)
    frozen = [value.detach() for value in mapping.params().values()]
    return reference.differentiable(mapping, x, torch.ops.anymax.hold(x.detach(), frozen, spec))


def apply(mapping: Mapping, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """p(x). A mask comes only where `masks` said yes."""
    if _transformed() or _learns(mapping) or mapping.traced:
        return _implicit(mapping, x)
    wants = torch.is_grad_enabled() and x.requires_grad
    if torch.compiler.is_exporting():
        return reference.differentiable(mapping, x) if wants else reference.forward(mapping, x)
    if torch.compiler.is_compiling() or modes():  # a mode may trace, or have no numbers: opaque operations serve it too
        spec = _spec(mapping) if mapping.iterative else None
        if spec is None:
            return reference.differentiable(mapping, x)
        params = list(mapping.params().values())
        if wants:
            return _Compiled.apply(x, spec, mapping.needs_scores, *params)
        return torch.ops.anymax.forward(x, params, spec)
    if wants:
        return _Apply.apply(x, mapping, mask)
    engine = kernels.choose("forward", mapping, x)
    return engine.forward(mapping, x) if mask is None else engine.forward(mapping, x, mask)


def masks(mapping: Mapping, x: Tensor) -> bool:
    """True where the engine of this call takes a mask beside the scores."""
    if _traced(mapping) or mapping.needs_scores:
        return False
    return kernels.choose("forward", mapping, x) in kernels.COMPILED


def log(mapping: Mapping, x: Tensor) -> Tensor | None:
    """log p(x) by a compiled engine; None: it is for the reference."""
    if _traced(mapping):
        return None
    engine = kernels.compiled("log_forward", mapping, x)
    if engine is None:
        return None
    if torch.is_grad_enabled() and x.requires_grad:
        return _Log.apply(x, mapping, engine)
    return engine.log_forward(mapping, x)


def index_loss(mapping: Mapping, x: Tensor, index: Tensor) -> Tensor | None:
    """The loss of each row for its class index (below 0: none), fp32 or fp64; None: no engine has it in one pass."""
    if _traced(mapping):
        return None
    engine = kernels.compiled("index_loss", mapping, x)
    if engine is None:
        return None
    if torch.is_grad_enabled() and x.requires_grad:
        return _IndexLoss.apply(x, index, mapping, engine)
    return engine.index_loss(mapping, x, index, False)[0]


def device_loss(mapping: Mapping, x: Tensor, index: Tensor, ignore: int, reduction: str) -> Tensor | None:
    """The reduced loss of rows for class indices on a GPU, fp32, in few launches; None: another engine serves."""
    if _traced(mapping) or kernels.compiled("index_loss", mapping, x) is not kernels.triton:
        return None
    if torch.is_grad_enabled() and x.requires_grad:
        return _DeviceLoss.apply(x, index, mapping, ignore, reduction)
    return kernels.triton.reduced_loss(mapping, x, index, ignore, reduction, False)[0]


def loss(mapping: Mapping, x: Tensor, y: Tensor) -> Tensor:
    plain = _transformed() or _learns(mapping) or (torch.is_grad_enabled() and y.requires_grad)
    if not plain and not torch.compiler.is_compiling() and not modes():
        if torch.is_grad_enabled() and x.requires_grad:
            return _Loss.apply(x, y, mapping)[0]
        p = kernels.choose("forward", mapping, x).forward(mapping, x)
        return kernels.choose("loss", mapping, x).loss(mapping, x, p, y)
    # Under torch.compile one derivative is all there is, and that one treats p as a constant.
    once = torch.compiler.is_compiling() and not _transformed()
    p = apply(mapping.frozen(), x.detach()) if once else apply(mapping, x)
    return reference.loss(mapping, x, p, y)


# -- the short way: plain tensors, the last axis, nothing asked for beside ---------------------------------------------------

_asked = kernels.asked
compiling = torch.compiler.is_compiling
_grad, _tracing = torch.is_grad_enabled, torch._C._get_tracing_state
_forward_ad = torch.autograd.forward_ad

_SERVED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _int32(count: int) -> Tensor:
    if count < MANY:
        return torch.empty(count, dtype=torch.int32, device="cpu")
    return torch.from_numpy(kept.take((count,), np.int32, 4 * count))


KINDS = (torch.Tensor, torch.nn.Parameter)  # the kinds of array that `quick` takes


def quick(link: tuple[Mapping, int, float], x: Tensor, out: Tensor | None = None) -> Tensor | None:
    """p(x) along the last axis in as few steps as Python has; None where anything is out of the ordinary. Not for `compiling`."""
    if _forward_ad._current_level >= 0 or _asked() is not None or x.is_neg():
        return None
    call = short.tensors
    if not call and (call is False or not (short.ready() and (call := short.tensors))):
        return None
    _, code, param = link
    if x.requires_grad and _grad():
        if out is not None or modes() or _tracing() is not None or _transformed() or not _plain(x):
            return None
        return _Quick.apply(x, link, call)
    if out is None:
        return call(code, param, x, None)
    if type(out) is not Tensor or out.requires_grad or out.is_neg():
        return None
    if out.is_inference() and not torch.is_inference_mode_enabled():
        return None
    return wrote(call(code, param, x, out))


def wrote(out: Tensor | None) -> Tensor | None:
    """Tells autograd that these numbers are new: a graph that saved the old ones says so."""
    if out is not None and not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return out


def _plain(x: Tensor) -> bool:
    """True where x has numbers of its own that the library can read: what torch.func makes, and meta tensors, have none."""
    try:
        return (
            x.is_cpu and x.is_contiguous() and x.dtype in _SERVED and 0 < x.nbytes <= native.LARGE and x.data_ptr() != 0
        )
    except (RuntimeError, NotImplementedError):
        return False


def quick_loss(mapping: Mapping, x: Tensor, index: Tensor, reduction: str) -> Tensor | None:
    """The loss of plain rows for plain class indices, all of which are classes; None where anything is out of the ordinary."""
    if compiling() or type(x) not in KINDS or type(index) is not Tensor or not 1 <= x.ndim <= 2:
        return None
    if x.dtype not in (torch.float32, torch.float64) or index.dtype is not torch.int64 or index.shape != x.shape[:-1]:
        return None
    if not (x.is_cpu and index.is_cpu and x.numel()) or _traced(mapping) or _asked() is not None or x.is_neg():
        return None
    wants = _grad() and x.requires_grad
    link = None if mapping.params() else short.link(mapping)
    call = short.tensors or (short.tensors is None and short.ready() and short.tensors)
    if link and call and x.ndim == 2:
        _, code, param = link
        rows, n = x.shape
        support = memory = None
        if wants and not native.few(mapping, n) and not hooked():
            if native.sparse(code >> 8):
                support = native.saving(rows, native.loss_capacity(n), 2 if x.dtype is torch.float64 else 1, _int32)
                memory = support.memory
            elif code == 0:  # softmax
                memory = torch.empty(rows, dtype=x.dtype, device="cpu")
        factor = 0.0 if reduction == "none" else 1.0 / rows if reduction == "mean" else 1.0
        value = torch.empty(() if factor else rows, dtype=x.dtype, device="cpu")
        if (
            call(code | native.LOSS, param, x, value, index, None, memory, support.capacity if support else 0, factor)
            is not None
        ):
            return _QuickLoss.apply(x, index, (value, support, memory, link, call, factor)) if wants else value
    if native.refuse("index_loss", mapping, x) is not None:
        return None
    low, high = torch.aminmax(index)
    if low.item() < 0 or high.item() >= x.shape[-1]:  # left out, or a mistake
        return None
    if wants:
        return _IndexLoss.apply(x, index, mapping, native, reduction)
    return _reduced(native.index_loss(mapping, x, index, False)[0], reduction)


class _Quick(torch.autograd.Function):
    """p(x) of a plain tensor, with its backward as short as its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, link: tuple[Mapping, int, float], call: Any) -> Tensor:
        mapping, code, param = link
        n = x.shape[-1]
        rows = x.numel() // n
        words = 2 if x.dtype is torch.float64 else 1
        size = native.capacity(code >> 8, param, rows, n)
        size = 0 if size and hooked() else size
        support = native.saving(rows, size, words, _int32) if size else None
        p = call(code, param, x, None, None, None, support and support.memory, size)
        if p is None:
            p, support, size = reference.forward(mapping, x), None, 0
        ctx.call = mapping, call, code | native.VJP, param, size, support and support[1:]
        ctx.save_for_backward(p, x if mapping.needs_scores else support and support.memory)
        return p

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,), (p, other), (mapping, call, code, param, capacity, sizes) = grads, ctx.saved_tensors, ctx.call
        x, memory = (other, None) if mapping.needs_scores else (p, other)
        lazy = g.is_neg() or p.is_neg() or (other is not None and other.is_neg())
        if not (lazy or _grad() or _asked() is not None):
            out = call(code, param, x, None, p, g, memory, capacity)
            if out is not None:
                return out, None, None
        was = As(g.dtype, g.shape, _CPU)
        p = restored(p, was)
        x = restored(x, was) if mapping.needs_scores else p
        return _vjp(mapping, x, p, g, _support(memory, sizes)), None, None
