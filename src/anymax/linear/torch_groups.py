"""PyTorch: an output layer of any map by groups of rows, whose scores are computed again for the gradient, or with it in the forward pass.

A job with a reference has two layers, and a group has the scores of both. `_operands` lists what a result depends on. The backward pass
takes them from the graph, so that a change in between is an error. Tensors that a user's function reads are not seen.
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
from . import torch_blocks, torch_scores
from .bridge import TILE, in_tiles, in_turn, joined, padded, rows_of_tile
from .job import Job
from .layer import Layer, rows_at_a_time
from .torch_products import add_to_classes, added_to_rows, entries_of

Tensor = torch.Tensor

# by x, weight and bias, those of the reference, None if there is none, and the tensors of the map
_Gradient = list[Tensor | None]
_LAYER = 3  # how many of these belong to a layer


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
    of_layers = gradient[: 2 * _LAYER]
    each = iter([d for d in gradient[2 * _LAYER :] if d is not None])
    return *of_layers, *(None,) * (len(operands) - 1 - 2 * _LAYER), lambda _: next(each)


@dataclasses.dataclass
class _OfLayer:
    """The gradient of a layer, to which each group of rows adds its part."""

    dtype: torch.dtype  # of the sums
    wants: Any  # by x, weight and bias
    dx: Tensor | None
    dw: Tensor | None
    db: Tensor | None

    @classmethod
    def of(cls, layer: Layer, wants: Any) -> _OfLayer:
        x, dtype = layer.x, wide_dtype(layer.x, torch)
        db = torch.zeros(layer.classes, dtype=dtype, device=x.device) if wants[2] else None
        return cls(dtype, wants, torch.empty_like(x) if wants[0] else None, None, db)

    def add(self, where: slice, ds: Tensor, layer: Layer, rows: int) -> None:
        """The part of a group of rows, by the gradient in its scores. rows: of all groups."""
        weight, x = layer.weight, layer.x
        entries = entries_of(ds) if layer.mapping.facts.sparse and ds.dtype is self.dtype else None
        if entries is None:
            if self.dx is not None:
                self.dx[where] = ds @ weight.to(ds.dtype)
            if self.wants[1]:
                alone = where.stop - where.start == rows
                self.dw = _with_product(self.dw, ds, x, x.dtype if alone else self.dtype)
        else:
            if self.dx is not None:
                self.dx[where] = added_to_rows(None, *entries, x, weight, None)
            if self.wants[1]:
                self.dw = torch.zeros(weight.shape, dtype=self.dtype) if self.dw is None else self.dw
                add_to_classes(self.dw, *entries, x, None)

    def ready(self, layer: Layer) -> _Gradient:
        dw = None if self.dw is None else self.dw.to(layer.weight.dtype)
        return [self.dx, dw, None if self.db is None or layer.bias is None else self.db.to(layer.bias.dtype)]


def _gradient(job: Job, step: int, g: Tensor, wants: Any) -> tuple[Tensor, _Gradient, Tensor | None]:
    """The sum of g times the results, g for each row or for all, its gradient, a group of rows at a time, and the results without one."""
    x, params = job.layer.x, params_of(job.layer.mapping)
    each = [_OfLayer.of(layer, wants[i * _LAYER : (i + 1) * _LAYER]) for i, layer in enumerate(job.layers)]
    dparams = [torch.zeros_like(p) if want else None for p, want in zip(params, wants[len(wants) - len(params) :])]
    total, constants = torch.zeros((), dtype=each[0].dtype, device=x.device), []
    for where, part in job.parts(step):
        scores, value, constant = _score_gradients(
            part, g[where] if g.ndim else g, each, [_part(d, where) for d in dparams]
        )
        total += value
        constants += constant
        for of_layer, layer in zip(each, part.layers):
            ds = scores.pop(0)
            if any(of_layer.wants):
                of_layer.add(where, ds, layer, job.layer.rows)
            del ds  # before the scores of the next group
    of_layers = [d for of_layer, layer in zip(each, job.layers) for d in of_layer.ready(layer)]
    gradient = [*of_layers, *(None,) * (2 * _LAYER - len(of_layers)), *dparams]
    return total, gradient, torch.cat(constants) if constants else None


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
    job: Job, g: Tensor, layers: list[_OfLayer], dparams: list[Tensor | None]
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """The gradients in the scores of some rows, for each of the layers that wants one, the sum of g times their results, and the results
    without a gradient; adds the gradients by bias and parameters, None for a parameter without."""
    engine = torch_scores.engine_of_blocks(job.layer) if any(layers[0].wants) else None
    if engine is not None and torch_scores.is_of_short_rows(job):
        numbers = _scores(job.layer, job.invariant, products=True)
        ds, value, constants = torch_scores.WholeRows.of(engine, job, numbers).gradient(g)
        if layers[0].db is not None:
            layers[0].db += ds.sum(0, dtype=layers[0].dtype)
        return [ds], value, constants
    whole = [_scores(layer, job.invariant) for layer in job.layers]  # a piece at a time becomes its gradient
    # in half precision that of a row takes the first half of its memory
    scores = [
        s if s.dtype is layer.x.dtype else s.view(layer.x.dtype)[:, : s.shape[1]] for s, layer in zip(whole, job.layers)
    ]
    constants = []
    total = torch.zeros((), dtype=g.dtype, device=g.device)
    wanted = [any(of_layer.wants) for of_layer in layers]
    writes = engine if engine is not None and not dparams and torch_scores.is_own_loss(engine, job) else None
    for where, piece, parts in _pieces(job, whole):
        if writes is not None:
            ds = scores[0][where]
            total = total + torch_scores.own_loss_gradient(writes, piece, parts[0], g[where] if g.ndim else g, ds)
            if layers[0].db is not None:
                layers[0].db += ds.sum(0, dtype=layers[0].dtype)
            continue
        with torch.enable_grad():
            for s, want in zip(parts, wanted):
                s.requires_grad_(want)
            free = [
                value.detach().requires_grad_(d is not None)
                for value, d in zip(params_of(piece.layer.mapping) if dparams else (), dparams, strict=True)
            ]
            value = piece.of_scores(with_params(piece.layer.mapping, free), *parts)
            if isinstance(value, tuple):  # the other has no gradient
                value, constant = value
                constants.append(constant)
            free = [value for value in free if value.requires_grad]
            scale = (g[where] if g.ndim else g).to(value.dtype)
            weighted = (scale * value).sum()  # a number: with a gradient given to it torch.autograd.grad loads sympy
            of_scores = [s for s in parts if s.requires_grad]
            slopes = list(torch.autograd.grad(weighted, [*of_scores, *free], allow_unused=True))
        total = total + weighted.detach()
        for ds, layer, of_layer, want in zip(scores, piece.layers, layers, wanted):
            if not want:
                continue
            slope = slopes.pop(0)
            ds[where] = 0.0 if slope is None else slope if layer.factor is None else slope * layer.factor
            if layer.keep is not None:
                ds[where].masked_fill_(~layer.keep, 0)
            if of_layer.db is not None:
                of_layer.db += ds[where].sum(0, dtype=of_layer.dtype)
        for dparam, d in zip((d for d in dparams if d is not None), slopes):
            if d is not None:
                (dparam[where] if dparam.ndim else dparam).add_(d)
    return scores, total, constants


def _scores(layer: Layer, invariant: bool, products: bool = False) -> Tensor:
    """The scores of some rows, before the mask, in memory that the caller may write to; nothing here is recorded. products: these alone,
    without what makes scores of them."""
    x = layer.x.clone() if invariant else layer.x  # for MKL bits depend on where a row begins in memory
    out = layer.x.new_empty((layer.rows, layer.classes)) if layer.product_rounds else None
    s = torch_blocks.product(x, layer.weight.to(x.dtype), out)
    if products:
        return s
    s = s if layer.bias is None else s.add_(layer.bias)
    s = s if layer.rounded_to is None else s.copy_(layer.rounded(s, xp))
    return s if layer.factor is None else s.mul_(layer.factor)


def _pieces(job: Job, scores: list[Tensor]) -> Iterator[tuple[slice, Job, list[Tensor]]]:
    """The pieces of some rows: where they are, their part of the job, and of the scores of its layers, in which masked classes are -inf."""
    most = job.layer.rows if job.invariant else torch_blocks.sizes_of(scores[0]).piece // job.layer.classes
    for where, piece in job.parts(max(1, most)):
        parts = [s[where] for s in scores]
        for s, layer in zip(parts, piece.layers):
            if layer.keep is not None:
                s.masked_fill_(~layer.keep, -math.inf)
        yield where, piece, parts


def _results(job: Job, step: int) -> Any:
    """The results of all rows, from the scores of `step` rows at a time."""
    parts = []
    for _, part in job.parts(step):
        engine = torch_scores.engine_of_blocks(part.layer)
        if engine is not None and torch_scores.is_of_short_rows(part):
            numbers = _scores(part.layer, job.invariant, products=True)
            parts.append(torch_scores.WholeRows.of(engine, part, numbers).result())
            continue
        for _, piece, scores in _pieces(part, [_scores(layer, job.invariant) for layer in part.layers]):
            parts.append(piece.of_scores(piece.layer.mapping, *scores))
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
    """All that the result depends on, those of `_Gradient` first."""
    layer, other = job.layer, job.reference
    of_layer = layer.x, layer.weight, layer.bias
    of_other = (None,) * _LAYER if other is None else (other.x, other.weight, other.bias)
    more = (
        layer.keep,
        layer.factor,
        *((None, None) if other is None else (other.keep, other.factor)),
        job.target,
        job.class_weight,
    )
    return *of_layer, *of_other, *more, *job.per_row.arrays(), layer.mapping


def _with(job: Job, operands: Any) -> Job:
    """The job with the operands that `_operands` lists."""
    x, weight, bias, x2, weight2, bias2, keep, factor, keep2, factor2, target, class_weight, *arrays, mapping = operands
    layer = dataclasses.replace(job.layer, x=x, weight=weight, bias=bias, keep=keep, mapping=mapping, factor=factor)
    other = job.reference
    if other is not None:
        other = dataclasses.replace(
            other, x=x2, weight=weight2, bias=bias2, keep=keep2, mapping=mapping, factor=factor2
        )
    per_row = job.per_row.with_arrays(arrays)
    return dataclasses.replace(
        job, layer=layer, per_row=per_row, target=target, class_weight=class_weight, reference=other
    )


def runs_eagerly(layer: Layer, *others: Any, reference: Layer | None = None) -> bool:
    """True for eager calls on plain tensors, without tracing, if none of `others` requires a gradient."""
    if torch.compiler.is_compiling() or not untraced():
        return False
    of_reference = () if reference is None else (reference.x, reference.weight, reference.bias, reference.keep)
    for a in (layer.x, layer.weight, layer.bias, layer.keep, *of_reference, *others):
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
    if not runs_eagerly(layer, job.target, job.class_weight, reference=job.reference):
        return _plainly(job)
    if not job.recorded():
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
        return min(map(_tile, job.layers)) if runs_eagerly(job.layer, reference=job.reference) else TILE
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
