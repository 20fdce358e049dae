"""p, log p and thresholds of rows: one pass forward, one pass backward."""

from __future__ import annotations

from typing import Any

import torch

from ._kernels.link import NEED_SCORES
from ._kernels.triton import launch
from ._links import Words, check, check_classes, link_of, words_of
from ._ops import add_op_namespace_prefix, ops

Tensor = torch.Tensor

_LINK = "str kind, float param, Tensor? params, int noise, int nodes, bool logs"


# -- operations of torch, for compilers -----------------------------------------------------------------------------------------------


@torch.library.custom_op(
    add_op_namespace_prefix("rows"), mutates_args=(), schema=f"(Tensor x, Tensor? mask, {_LINK}) -> Tensor"
)
def _rows(x: Tensor, mask: Tensor | None, *link: Any) -> Tensor:
    *words, logs = link
    return _forward(x, mask, Words(*words), logs)


@_rows.register_fake
def _(x: Tensor, mask: Tensor | None, *link: Any) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op(
    add_op_namespace_prefix("rows_grad"), mutates_args=(), schema=f"(Tensor x, Tensor p, Tensor g, {_LINK}) -> Tensor"
)
def _rows_grad(x: Tensor, p: Tensor, g: Tensor, *link: Any) -> Tensor:
    *words, logs = link
    return _backward(x, p, g, Words(*words), logs)


@_rows_grad.register_fake
def _(x: Tensor, p: Tensor, g: Tensor, *link: Any) -> Tensor:
    return torch.empty_like(p)


def _forward(x: Tensor, mask: Tensor | None, words: Words, logs: bool) -> Tensor:
    out = torch.empty_like(x)
    launch.run("log" if logs else "p", link_of(words), x, mask=mask, out=out)
    return out


def _backward(x: Tensor, p: Tensor, g: Tensor, words: Words, logs: bool, saved: Any = None) -> Tensor:
    out = torch.empty_like(p)
    launch.backward(link_of(words), logs, x, p, g, out, saved)
    return out


# -- derivatives ------------------------------------------------------------------------------------------------------------------------


def once() -> None:
    """Raises where the gradient of a gradient is asked for."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "anymax: these kernels have first derivatives; the package anymax (PyPI) has the second ones"
        )


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor | None, words: Words, logs: bool) -> Tensor:
        if logs:
            p, memory = _forward(x, mask, words, True), None
        else:
            p, memory = launch.p_saving(link_of(words), x, mask)
        ctx.call = words, logs
        ctx.lanes = None if memory is None else memory._replace(memory=None)
        ctx.save_for_backward(p, x if words.kind in NEED_SCORES else None, None if memory is None else memory.memory)
        return p

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        once()
        p, x, memory = ctx.saved_tensors
        saved = None if memory is None else ctx.lanes._replace(memory=memory)
        return _backward(p if x is None else x, p, grads[0], *ctx.call, saved), None, None, None


class _Opaque(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor, mask: Tensor | None, kind: str, param: float, params: Tensor | None, noise: int, nodes: int, logs: bool
    ) -> Tensor:  # fmt: skip
        return ops.rows(x, mask, kind, param, params, noise, nodes, logs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, _, kind, param, params, noise, nodes, logs = inputs
        ctx.link = kind, param, noise, nodes, logs
        ctx.save_for_backward(x if kind in NEED_SCORES else output, output, params)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, p, params = ctx.saved_tensors
        kind, param, noise, nodes, logs = ctx.link
        return ops.rows_grad(x, p, grads[0], kind, param, params, noise, nodes, logs), *(None,) * 7


def _call(who: str, x: Tensor, mask: Tensor | None, words: Words, logs: bool, dim: int) -> Tensor:
    check_classes(who, words, x.shape[dim])
    last = dim in (-1, x.ndim - 1)
    rows = x if last else x.movedim(dim, -1)
    if mask is not None:
        mask = mask.expand(x.shape)
        mask = mask if last else mask.movedim(dim, -1)
    if words.params is not None and not last and words.params.ndim:
        words = words._replace(params=words.params.expand(*x.shape[:dim], 1, *x.shape[dim:][1:]).movedim(dim, -1))
    learns = x.requires_grad and torch.is_grad_enabled()
    if torch.compiler.is_compiling():
        # the gradient reads the scores, which then say what is masked
        if mask is not None and words.kind in NEED_SCORES:
            rows, mask = rows.masked_fill(~mask, -torch.inf), None
        out = _Opaque.apply(rows, mask, *words, logs)
    elif learns:
        if mask is not None and words.kind in NEED_SCORES:
            rows, mask = rows.masked_fill(~mask, -torch.inf), None
        out = _Eager.apply(rows, mask, words, logs)
    else:
        out = _forward(rows, mask, words, logs)
    return out if last else out.movedim(-1, dim)


# -- functions ----------------------------------------------------------------------------------------------------------------------------


def apply(
    x: Tensor,
    map: str = "softmax",
    *,
    alpha: Any = None,
    k: Any = None,
    p: Any = None,
    order: int | None = None,
    noise: str | None = None,
    scale: float | None = None,
    dim: int = -1,
    mask: Tensor | None = None,
) -> Tensor:
    """The probabilities of the scores x along `dim`, in the dtype of x, with their gradient.

    map: "softmax", "sparsemax", "entmax" (alpha), "budget" (k: the sum; each p is at most 1), "normmax" (alpha), "topk" (k), "topp" (p),
    "taylor" (order), "sigsoftmax" or "perturb_max" (noise: "normal" or "logistic"; scale). alpha and the k of a budget may be tensors that
    broadcast to x with size 1 along `dim`. mask: boolean, True for the classes that take part; a score of -inf is masked, too.
    """
    words = words_of("apply", "forward", map, noise, alpha=alpha, k=k, p=p, order=order, scale=scale)
    check("apply", x, mask, dtypes=_with_bool(mask))
    return _call("apply", x, mask, words, False, _axis("apply", x, dim))


def log_apply(
    x: Tensor, map: str = "softmax", *, k: Any = None, p: Any = None, dim: int = -1, mask: Tensor | None = None
) -> Tensor:
    """The logarithms of the probabilities of "softmax", "topk" (k), "topp" (p) or "sigsoftmax" (no gradient), with their gradient."""
    learns = x.requires_grad and torch.is_grad_enabled()
    words = words_of("log_apply", "log_vjp" if learns else "log_forward", map, k=k, p=p)
    check("log_apply", x, mask, dtypes=_with_bool(mask))
    return _call("log_apply", x, mask, words, True, _axis("log_apply", x, dim))


def threshold(x: Tensor, map: str = "sparsemax", *, alpha: Any = None, k: Any = None, dim: int = -1) -> Tensor:
    """tau of p = link(x - tau), fp32 with size 1 along `dim`, without a gradient; for softmax it is log sum exp."""
    words = words_of("threshold", "threshold", map, alpha=alpha, k=k)
    check("threshold", x)
    dim = _axis("threshold", x, dim)
    check_classes("threshold", words, x.shape[dim])
    rows = x.detach().movedim(dim, -1)
    tau = launch.numbers(rows, *rows.shape[:-1], 1)
    launch.run("tau", link_of(words), rows, value=tau)
    return tau.movedim(-1, dim)


def softmax(x: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    return apply(x, "softmax", dim=dim, mask=mask)


def log_softmax(x: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    return log_apply(x, "softmax", dim=dim, mask=mask)


def sparsemax(x: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """The nearest point of the simplex (Martins and Astudillo, 2016)."""
    return apply(x, "sparsemax", dim=dim, mask=mask)


def entmax(x: Tensor, alpha: Any = 1.5, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """alpha-entmax (Peters, Niculae and Martins, 2019): softmax at alpha 1, sparsemax at 2."""
    return apply(x, "entmax", alpha=alpha, dim=dim, mask=mask)


def entmax15(x: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    return apply(x, "entmax", alpha=1.5, dim=dim, mask=mask)


def budget(x: Tensor, k: Any, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """The nearest point with entries in [0, 1] that sum to k: a relaxed choice of k classes."""
    return apply(x, "budget", k=k, dim=dim, mask=mask)


def sparse_softmax(
    x: Tensor, k: int | None = None, p: float | None = None, dim: int = -1, mask: Tensor | None = None
) -> Tensor:
    """Softmax over the k largest scores, or over the fewest that hold the mass p."""
    if (k is None) == (p is None):
        raise TypeError("sparse_softmax: give one of k= and p=")
    return apply(x, "topp" if k is None else "topk", k=k, p=p, dim=dim, mask=mask)


def _with_bool(mask: Tensor | None) -> Any:
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"mask: booleans, True for the classes that take part, not {mask.dtype}")
    return ("float32", "bfloat16", "float16", *(("bool",) if mask is not None else ()))


def _axis(who: str, x: Tensor, dim: int) -> int:
    if not x.ndim or not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{who}: dim is an axis of x, which has {x.ndim}, not {dim}")
    return dim % x.ndim
