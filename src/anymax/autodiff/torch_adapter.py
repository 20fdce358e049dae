"""PyTorch: the one adapter of derivatives. It makes what torch records, or sees as opaque, from functions that know nothing of autograd.

- `operation`: eager calls, from a forward pass, a backward pass and the plain formula, by which a backward pass that is itself
  differentiated is computed. Saved tensors are checked when the graph returns them (saving.py);
- `opaque`: an operation of `torch.ops.anymax`, which torch.compile does not trace;
- `traced_operation`: opaque operations with a backward pass.

Neither function has a `jvp`, since torch.compile refuses that; `torch.library.register_autograd` would give wrong forward-mode derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .._array import plain_backward
from .saving import As, params_of, restored, with_params
from .torch_parameters import gradients

Tensor = torch.Tensor


# -- eager calls --------------------------------------------------------------------------------------------------------------------


def operation(
    name: str,
    forward: Callable[..., tuple[Any, Sequence[Tensor | None]]],
    backward: Callable[..., Sequence[Any] | None],
    plain: Callable[..., Any] | None = None,
    *,
    of_map: bool = False,
    one_result: bool = False,
    saves: int | None = None,
) -> Callable[..., Any]:
    """An operation for eager calls, `call(how, *operands)`, which autograd records.

    Parameters
    ----------
    name
        It names the function in the graph.
    forward
        ``forward(how, operands, wants)`` returns the result, or a tuple of results, and the tensors to save beside the operands. `how` is
        anything but tensors, and each of `operands` a tensor or None.
    backward
        ``backward(how, operands, kept, grads, wants)`` returns the gradients by the operands, or None where only the plain formula has
        them.
    plain
        ``plain(how, operands, kept)`` returns the results by operations that can be differentiated. Without it, `backward` takes
        batches of gradients, and its own derivative is taken.
    of_map
        The last operand is a map. Its tensors are saved, and may have gradients: in the place of the map, `backward` returns a function
        from the name of a parameter to its gradient for each row.
    one_result
        Only the first result has a gradient.
    saves
        The number of the operands that are saved, but for the map; all, if it is not given. `backward` and `plain` get no others.
    """

    def again(how: Any, tensors: Any, kept: Any, grads: Any, wants: Any) -> tuple[Tensor | None, ...]:
        """The gradients by the plain formula, which can be differentiated again."""

        def formula(*free: Any) -> Any:
            assert plain is not None, name
            if of_map:
                of_call, mapping, before = how
                out = plain(of_call, (*free[:before], with_params(mapping, free[before:])), kept)
            else:
                out = plain(how, free, kept)
            return out if isinstance(out, tuple) else (out,)

        by_tensor = plain_grads(formula, tensors, grads, wants)
        return *by_tensor, *(None for _ in wants[len(tensors) :])

    class Operation(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, how: Any, *tensors: Any) -> Any:
            ctx.set_materialize_grads(False)
            ctx.how, operands = how, tensors
            if of_map:
                how, mapping, count = how
                operands = *tensors[:count], mapping
                if saves is not None:
                    ctx.how, tensors = (how, mapping, saves), (*tensors[:saves], *tensors[count:])
            elif saves is not None:
                tensors = tensors[:saves]
            out, kept = forward(how, operands, ctx.needs_input_grad[1:])
            if one_result and isinstance(out, tuple):
                ctx.mark_non_differentiable(*out[1:])
            ctx.count, saved = len(tensors), (*tensors, *kept)
            ctx.save_for_backward(*saved)
            ctx.saved_as = [None if t is None else As.of(t) for t in saved]
            return out

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            how, count, wants = ctx.how, ctx.count, ctx.needs_input_grad[1:]
            for g in grads:
                if g is not None:
                    break
            else:
                return None, *(None for _ in wants)
            saved = [t if was is None else restored(t, was) for t, was in zip(ctx.saved_tensors, ctx.saved_as)]
            tensors, kept = saved[:count], saved[count:]
            mapping, operands = None, tensors
            if of_map:
                how, mapping, before = how
                mapping = with_params(mapping, tensors[before:])
                operands = *tensors[:before], mapping
            by_operand = None
            if plain is None or not plain_backward(*grads):
                by_operand = backward(how, operands, kept, grads, wants)
            if by_operand is None:
                return None, *again(ctx.how, tensors, kept, grads, wants)
            if mapping is not None:
                *by_operand, slope = by_operand
                learned = wants[len(by_operand) :]
                by_operand = (*by_operand, *gradients(mapping, learned, slope)) if learned else by_operand
            return None, *by_operand

    function = type(name, (Operation,), {})
    apply: Callable[..., Any] = function.apply
    if not of_map:
        return apply

    def call(how: Any, *operands: Any) -> Any:
        *tensors, mapping = operands
        return apply((how, mapping, len(tensors)), *tensors, *params_of(mapping))

    return call


def plain_grads(
    function: Callable[..., Iterable[Tensor | None]],
    tensors: Sequence[Tensor | None],
    grads: Iterable[Tensor | None],
    wants: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of `function` by the tensors that are wanted, 0 where it does not depend on one; they can be differentiated again,
    and `grads` may be batched."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # a view, so that a tensor that was computed from another of these does not count as a part of that one
        free = [
            a if a is None or not want else a.view_as(a) if a.requires_grad else a.detach().requires_grad_()
            for a, want in zip(tensors, wants)
        ]
        out = function(*free)
        pairs = [(a, g) for a, g in zip(out, grads) if a is not None and g is not None and a.requires_grad]
        wanted = [a for a, want in zip(free, wants) if a is not None and want]
        derivatives = torch.autograd.grad(
            [a for a, _ in pairs], wanted, [g for _, g in pairs], create_graph=again, allow_unused=True
        )
    each = (torch.zeros_like(a) if d is None else d for a, d in zip(wanted, derivatives))
    return [None if a is None or not want else next(each) for a, want in zip(free, wants)]


# -- opaque operations --------------------------------------------------------------------------------------------------------------

_libraries: dict[str, Any] = {}


def like(x: Tensor, *others: Any) -> Tensor:
    """What a fake tensor of a result with the shape and dtype of the first operand looks like."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def opaque(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any] = like, vmap: Callable[..., Any] | None = None
) -> None:
    """Register `torch.ops.anymax.<name>`, where the schema begins with the name.

    Parameters
    ----------
    schema
        That of the operation; exported programs hold it.
    run
        It computes the results: contiguous, and none of them an operand.
    fake
        The results without values.
    vmap
        The rule of `torch.library.register_vmap`.
    """
    name = schema.partition("(")[0]
    if name in _libraries:  # an interrupted import left it behind
        _libraries[name]._destroy()
    library = _libraries[name] = torch.library.Library("anymax", "FRAGMENT")
    library.define(schema)
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"anymax::{name}", fake, lib=library)
    if vmap is not None:
        torch.library.register_vmap(f"anymax::{name}", vmap, lib=library)


def traced_operation(
    name: str,
    run: Callable[..., Any],
    backward: Callable[..., Sequence[Tensor | None]],
    save: Callable[..., Sequence[Tensor | None]] | None = None,
) -> Callable[..., Any]:
    """Opaque operations with a backward pass, `call(how, *tensors)`, which torch.compile traces.

    Parameters
    ----------
    name
        It names the function in the graph.
    run
        ``run(how, *tensors)`` returns the result, or a tuple of results, of which the first has a gradient.
    backward
        ``backward(how, saved, g, wants)`` returns the gradients by the tensors.
    save
        ``save(how, tensors, result)`` returns the tensors to save, by default those of the call.
    """

    class Traced(torch.autograd.Function):
        @staticmethod
        def forward(how: Any, *tensors: Any) -> Any:  # type: ignore[override]
            return run(how, *tensors)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.how, *tensors = inputs
            if isinstance(output, tuple):
                ctx.mark_non_differentiable(*output[1:])
            ctx.save_for_backward(*(tensors if save is None else save(ctx.how, tensors, output)))

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return None, *backward(ctx.how, ctx.saved_tensors, grads[0], ctx.needs_input_grad[1:])

    return type(name, (Traced,), {}).apply
