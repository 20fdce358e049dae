"""PyTorch: an output layer of any map by groups of rows, whose scores are computed again for the gradient, or with it in the forward pass.

`_operands` lists what a result depends on. The backward pass takes them from the graph, so that a change in between is an error. Tensors
that a user's function reads are not seen.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import array_api_compat.torch as xp
import torch

from .._array import recorded, wide_dtype
from ..autodiff.saving import params_of, with_params
from ..autodiff.torch_adapter import operation
from ..autodiff.torch_rows import KINDS, untraced
from ..kernels import engine_of
from ..kernels.tasks import LAYER
from . import torch_blocks
from .bridge import TILE, in_tiles, in_turn, joined, padded, rows_of_tile
from .job import Job
from .layer import Layer, rows_at_a_time
from .torch_products import add_to_classes, added_to_rows, entries_of

Tensor = torch.Tensor

_Gradient = list[Tensor | None]  # by x, weight, bias and the tensors of the map


def _groups_forward(how: tuple[Job, int], operands: Any, wants: Any) -> tuple[Any, tuple[()]]:
    """The result for each row, a group of rows at a time."""
    job, step = how
    return _results(_with(job, operands), step), ()


def _groups_backward(how: tuple[Job, int], operands: Any, kept: Any, grads: Any, wants: Any) -> Any:
    """It computes the scores of each group again."""
    job, step = how
    _, gradient, _ = _gradient(_with(job, operands), step, grads[0], wants)
    return _of_operands(gradient, operands)


def _groups_plain(how: tuple[Job, int], operands: Any, kept: Any) -> Any:
    return _with(how[0], operands).result()


_groups = operation("RowGroups", _groups_forward, _groups_backward, _groups_plain, of_map=True, one_result=True)


@dataclasses.dataclass
class _Ahead:
    """A factor times the sum of the results of all rows. The forward pass computes the gradient too, so that no score is computed twice."""

    job: Job
    step: int
    factor: Tensor
    ready: _Gradient | None = None
    predicted: Tensor | None = None  # the classes of a loss that predicts them


def _ahead_forward(how: _Ahead, operands: Any, wants: Any) -> tuple[Tensor, tuple[()]]:
    value, how.ready, how.predicted = _gradient(_with(how.job, operands), how.step, how.factor, wants)
    return value, ()


def _ahead_backward(how: _Ahead, operands: Any, kept: Any, grads: Any, wants: Any) -> Any:
    # autograd keeps this gradient without a copy, so a second call computes it again
    ready, how.ready = how.ready, None
    if ready is None:
        ready = _gradient(_with(how.job, operands), how.step, how.factor, wants)[1]
    for a in ready:
        if a is not None:
            _scale(a, grads[0])
    return _of_operands(ready, operands)


def _ahead_plain(how: _Ahead, operands: Any, kept: Any) -> Tensor:
    value = _with(how.job, operands).result()
    return how.factor * (value[0] if isinstance(value, tuple) else value).sum()


_ahead = operation("RowsAhead", _ahead_forward, _ahead_backward, _ahead_plain, of_map=True)


def _of_operands(gradient: _Gradient, operands: Any) -> tuple[Any, ...]:
    """The gradient as `operation` takes it."""
    dx, dw, db, *dparams = gradient
    each = iter([d for d in dparams if d is not None])
    return dx, dw, db, *(None,) * (len(operands) - 4), lambda _: next(each)


def _gradient(job: Job, step: int, g: Tensor, wants: Any) -> tuple[Tensor, _Gradient, Tensor | None]:
    """The sum of g times the results, g for each row or for all, its gradient, a group of rows at a time, and the results without one."""
    layer = job.layer
    x, weight, bias, params = layer.x, layer.weight, layer.bias, params_of(layer.mapping)
    dtype = wide_dtype(x, torch)
    dx = torch.empty_like(x) if wants[0] else None
    dw: Tensor | None = None
    db = torch.zeros(weight.shape[0], dtype=dtype, device=x.device) if wants[2] else None
    dparams = [torch.zeros_like(p) if want else None for p, want in zip(params, wants[len(wants) - len(params) :])]
    total = torch.zeros((), dtype=dtype, device=x.device)
    sparse, constants = layer.mapping.facts.sparse, []
    for where, part in job.parts(step):
        ds, value, constant = _score_gradients(part, g[where] if g.ndim else g, db, [_part(d, where) for d in dparams])
        total += value
        constants += constant
        entries = entries_of(ds) if sparse and ds.dtype is dtype else None
        if entries is None:
            if dx is not None:
                dx[where] = ds @ weight.to(ds.dtype)
            if wants[1]:
                alone = where.stop - where.start == layer.rows
                dw = _with_product(dw, ds, part.layer.x, x.dtype if alone else dtype)
        else:
            if dx is not None:
                dx[where] = added_to_rows(None, *entries, part.layer.x, weight, None)
            if wants[1]:
                dw = torch.zeros(weight.shape, dtype=dtype) if dw is None else dw
                add_to_classes(dw, *entries, part.layer.x, None)
        del ds  # before the scores of the next group
    dw = None if dw is None else dw.to(weight.dtype)
    db = None if db is None or bias is None else db.to(bias.dtype)
    return total, [dx, dw, db, *dparams], torch.cat(constants) if constants else None


def _scale(a: Tensor, g: Tensor) -> None:
    """a *= g, a number, without a pass over `a` if it is 1. To read it on a GPU would wait."""
    engine = engine_of(LAYER, (), a) if a.is_contiguous() else None
    if engine is not None:
        engine.scale(a, g)
    elif torch_blocks.on_gpu(a) or bool(g != 1):
        a.mul_(g)


def _part(each: Tensor | None, rows: slice) -> Tensor | None:
    """Some rows of a tensor; a single number is returned unchanged."""
    return each if each is None or not each.ndim else each[rows]


def _score_gradients(
    job: Job, g: Tensor, db: Tensor | None, dparams: list[Tensor | None]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The gradient in the scores of some rows, the sum of g times their results, and the results without a gradient; adds the gradients
    by bias and parameters, None for a parameter without."""
    whole, constants = _scores(job), []  # a piece at a time becomes its gradient
    # in half precision that of a row takes the first half of its memory
    ds = whole if whole.dtype is job.layer.x.dtype else whole.view(job.layer.x.dtype)[:, : whole.shape[1]]
    total = torch.zeros((), dtype=g.dtype, device=g.device)
    for where, piece, s in _pieces(job, whole):
        with torch.enable_grad():
            s.requires_grad_()
            free = [
                value.detach().requires_grad_(d is not None)
                for value, d in zip(params_of(piece.layer.mapping) if dparams else (), dparams, strict=True)
            ]
            value = job.per_row(with_params(piece.layer.mapping, free), s, piece.target, job.class_weight)
            if isinstance(value, tuple):  # the other has no gradient
                value, constant = value
                constants.append(constant)
            free = [value for value in free if value.requires_grad]
            scale = (g[where] if g.ndim else g).to(value.dtype)
            weighted = (scale * value).sum()  # a number: with a gradient given to it torch.autograd.grad loads sympy
            slope, *rest = torch.autograd.grad(weighted, [s, *free], allow_unused=True)
        total = total + weighted.detach()
        ds[where] = 0.0 if slope is None else slope
        if piece.layer.keep is not None:
            ds[where].masked_fill_(~piece.layer.keep, 0)
        if db is not None:
            db += ds[where].sum(0, dtype=db.dtype)
        for dparam, d in zip((d for d in dparams if d is not None), rest):
            if d is not None:
                (dparam[where] if dparam.ndim else dparam).add_(d)
    return ds, total, constants


def _scores(job: Job) -> Tensor:
    """The scores of some rows, before the mask, in memory that the caller may write to; nothing here is recorded."""
    layer = job.layer
    x = layer.x.clone() if job.invariant else layer.x  # for MKL bits depend on where a row begins in memory
    out = layer.x.new_empty((layer.rows, layer.classes)) if layer.product_rounds else None
    s = torch_blocks.product(x, layer.weight.to(x.dtype), out)
    s = s if layer.bias is None else s.add_(layer.bias)
    return s if layer.rounded_to is None else s.copy_(layer.rounded(s, xp))


def _pieces(job: Job, s: Tensor) -> Iterator[tuple[slice, Job, Tensor]]:
    """The pieces of some rows: where they are, their part of the job, and of the scores `s`, in which masked classes become -inf."""
    most = job.layer.rows if job.invariant else torch_blocks.sizes_of(s).piece // job.layer.classes
    for where, piece in job.parts(max(1, most)):
        part = s[where]
        if piece.layer.keep is not None:
            part.masked_fill_(~piece.layer.keep, -math.inf)
        yield where, piece, part


def _results(job: Job, step: int) -> Any:
    """The results of all rows, from the scores of `step` rows at a time."""
    parts = []
    for _, part in job.parts(step):
        for _, piece, s in _pieces(part, _scores(part)):
            parts.append(job.per_row(piece.layer.mapping, s, piece.target, job.class_weight))
    return joined(parts)


def _with_product(dw: Tensor | None, ds: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """dw, if there is one, plus `ds.T @ x`, summed in `dtype`, some classes at a time if that is not the product's."""
    if ds.dtype is dtype:
        return ds.t() @ x if dw is None else dw.addmm_(ds.t(), x)
    dw = torch.zeros((ds.shape[1], x.shape[1]), dtype=dtype, device=x.device) if dw is None else dw
    step = max(1, torch_blocks.sizes_of(x).piece // max(x.shape[1], 1))
    for a in range(0, ds.shape[1], step):
        dw[a : a + step] += ds[:, a : a + step].t() @ x
    return dw


def _operands(job: Job) -> tuple[Any, ...]:
    """All that the result depends on."""
    layer = job.layer
    tensors = layer.x, layer.weight, layer.bias, layer.keep, job.target, job.class_weight
    return *tensors, *job.per_row.arrays(), layer.mapping


def _with(job: Job, operands: Any) -> Job:
    """The job with the operands that `_operands` lists."""
    x, weight, bias, keep, target, class_weight, *arrays, mapping = operands
    layer = dataclasses.replace(job.layer, x=x, weight=weight, bias=bias, keep=keep, mapping=mapping)
    return dataclasses.replace(
        job, layer=layer, per_row=job.per_row.with_arrays(arrays), target=target, class_weight=class_weight
    )


def runs_eagerly(layer: Layer, *others: Any) -> bool:
    """True for eager calls on plain tensors, without tracing, if none of `others` requires a gradient."""
    if torch.compiler.is_compiling() or not untraced():
        return False
    for a in (layer.x, layer.weight, layer.bias, layer.keep, *others):
        if a is not None and (type(a) not in KINDS or a.layout is not torch.strided or a.is_meta):
            return False
    return not recorded(*others)


def rows_with_a_class(without_class: Tensor) -> Tensor | None:
    """The indices of the other rows; None if these are all.

    A GPU makes the caller wait here, once a call. That costs less than to compute the rows of a batch that have no target.
    """
    return (~without_class).nonzero(as_tuple=True)[0] if bool(without_class.any()) else None


def with_a_class(job: Job, without_class: Tensor, compute: Callable[[Job], Any]) -> Any:
    """`compute(job)` for the rows that have a class, and 0 for the others, which are not computed."""
    rows = rows_with_a_class(without_class)
    if rows is None:
        return compute(job)
    value = compute(job.rows_at(rows))
    if isinstance(value, tuple):
        return tuple(among_all(job, rows, a) for a in value)
    return among_all(job, rows, value)


def among_all(job: Job, rows: Tensor, value: Tensor) -> Tensor:
    """The results of these rows, and 0 for the others, or -1 if they are classes."""
    none = 0 if value.dtype.is_floating_point else -1
    return value.new_full((job.layer.rows, *value.shape[1:]), none).index_copy(0, rows, value)


def by_rows(job: Job) -> Any:
    """The result for all rows, a group at a time, with its gradient.

    If something traces the calls, all scores are computed at once, in plain operations.
    """
    return in_tiles(job, rows_of_group(job), _by_rows) if job.invariant and job.layer.rows else _by_rows(job)


def _by_rows(job: Job) -> Any:
    layer = job.layer
    if not runs_eagerly(layer, job.target, job.class_weight):
        return _plainly(job)
    if not layer.recorded():
        return _results(job, rows_of_group(job))
    if not layer.rows or transforms_learn(job):
        return _plainly(job)
    return _groups((job, rows_of_group(job)), *_operands(job))


def _plainly(job: Job) -> Any:
    """The result in operations that are recorded or traced."""
    return in_turn(job, rows_of_group(job)) if job.invariant else job.result()


def rows_of_group(job: Job) -> int:
    """How many rows `by_rows` takes at a time; on a GPU there may be as many scores as the weight has numbers."""
    if job.invariant:
        return _tile(job.layer) if runs_eagerly(job.layer) else TILE
    layer, group = job.layer, torch_blocks.sizes_of(job.layer.x).group
    return rows_at_a_time(layer, job.chunk, max(group, layer.weight.numel()) if torch_blocks.on_gpu(layer.x) else group)


def _tile(layer: Layer) -> int:
    with torch.no_grad():
        how = str(layer.x.device), torch.get_num_threads()
        return rows_of_tile(layer, lambda x, w: torch_blocks.product(x, w.to(x.dtype)), *how)


def total(job: Job, step: int, factor: Tensor) -> tuple[Tensor, Tensor | None]:
    """The factor times the sum of the results of all rows, with a gradient that the forward pass computes, and what classes they predict.

    step: how many at a time.
    """
    rows = job.layer.rows
    if job.invariant:
        job = padded(job, step)
        assert job.target is not None
        more = torch.arange(job.layer.rows, device=job.target.device) >= rows
        job = dataclasses.replace(job, target=job.target.masked_fill(more, -1))
    how = _Ahead(job, step, factor)
    value = _ahead(how, *_operands(job))
    return value, None if how.predicted is None else how.predicted[:rows]


def transforms_learn(job: Job) -> bool:
    """True if the transforms, or functions among them, have tensors that require a gradient; a row of zeros shows it."""
    if not job.per_row.transforms:
        return False
    x = job.layer.x
    row = torch.zeros((1, job.layer.classes), dtype=wide_dtype(x, torch), device=x.device)
    return job.per_row.transformed(row).requires_grad
