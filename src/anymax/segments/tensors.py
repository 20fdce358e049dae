"""torch tensors that contain their segments: nested ones (jagged), and sparse ones (COO, CSR) with rows along the last axis."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from .._array import Array, check_axis, is_int, is_ragged, pick_axis

_OWN = object()  # the axis of a tensor's own segments, where none is named


def refuse(who: str, x: Any) -> None:
    """Raise for a nested or sparse tensor, in verbs that return no tensor like it."""
    if is_ragged(x):
        said = (
            "x.values() and ptr=x.offsets()" if x.is_nested else "x.values() and ptr=x.crow_indices() of a CSR tensor"
        )
        raise TypeError(
            f"{who} takes a dense tensor and its segments; of a {'nested' if x.is_nested else 'sparse'} one give {said}"
        )


def apply(
    who: str, verb: Callable[..., Any], mapping: Any, x: Any, *, axis: Any = _OWN, dim: Any = None, **segments: Any
) -> Array:
    """The verb on the values and the segments of x, as a tensor like x."""
    if any(a is not None for a in segments.values()):
        raise TypeError(
            f"{who}: a {'nested' if x.is_nested else 'sparse'} tensor knows its segments; leave out index, ptr and lengths"
        )
    if axis is None and dim is None:
        check_axis(axis, x.ndim)
    return rows(who, verb, None, mapping, x, pick_axis(None if axis is _OWN else axis, dim, None))


def rows(
    who: str, verb: Callable[..., Any], dense: Callable[..., Any] | None, mapping: Any, x: Any, axis: Any
) -> Array:
    """The verb along an axis of x; `dense` is for rows of a nested tensor that are not ragged."""
    torch = sys.modules["torch"]
    if axis is not None and (not is_int(axis) or not -x.ndim <= axis < x.ndim):
        raise ValueError(f"{who}: axis must be an integer from {-x.ndim} to {x.ndim - 1}, got {axis!r}")
    if x.is_nested:
        return _nested(torch, who, verb, dense, mapping, x, axis)
    if axis not in (None, -1, x.ndim - 1):
        raise ValueError(f"{who}: rows of a sparse tensor lie along its last axis, got axis={axis}; transpose it")
    if x.layout is torch.sparse_csr and x.ndim == 2:
        p = verb(mapping, x.values(), ptr=x.crow_indices())
        return torch.sparse_csr_tensor(x.crow_indices(), x.col_indices(), p, x.shape, check_invariants=False)
    if x.layout is torch.sparse_coo and x.dense_dim() == 0:
        x = x.coalesce()  # sorted by rows
        at, values = x.indices(), x.values()
        row, count = torch.zeros_like(at[0]), 1
        for i, size in zip(at[:-1], x.shape[:-1], strict=True):
            row, count = row * size + i, count * size
        p = verb(mapping, values, index=row, num_segments=count)
        return torch.sparse_coo_tensor(at, p, x.shape, is_coalesced=True, check_invariants=False)
    raise TypeError(
        f"{who} takes sparse tensors of the layouts torch.sparse_coo, without dense axes, and torch.sparse_csr with two axes; "
        f"got {x.layout} of shape {tuple(x.shape)}; call to_sparse_coo()"
    )


def _nested(torch: Any, who: str, verb: Any, dense: Any, mapping: Any, x: Any, axis: Any) -> Array:
    if x.layout is not torch.jagged:
        raise TypeError(f"{who} takes nested tensors of the layout torch.jagged; make it with layout=torch.jagged")
    ragged = x._ragged_idx
    axis = (ragged if dense is None else x.ndim - 1) if axis is None else axis % x.ndim
    if axis == 0:
        raise ValueError(
            f"{who}: axis 0 of a nested tensor is its batch; rows lie along its ragged axis, {ragged}, or a later one"
        )
    if x.lengths() is not None:
        raise TypeError(f"{who} takes nested tensors without holes; call contiguous()")
    if axis == ragged:
        p = verb(mapping, x.values(), ptr=x.offsets(), axis=ragged - 1)
    elif dense is None:
        raise ValueError(
            f"{who}: the segments of this nested tensor lie along its ragged axis, {ragged}; got axis={axis}"
        )
    else:
        p = dense(mapping, x.values(), axis - 1)
    return torch.nested.nested_tensor_from_jagged(
        p, offsets=x.offsets(), jagged_dim=ragged, min_seqlen=x._maybe_min_seqlen, max_seqlen=x._maybe_max_seqlen
    )
