"""Training on a Dask array or data frame, on one machine or many, without loading all of it at once.

A linear model needs products with its data, squared columns and selected rows. `Blocks` provides these with the interface of an
array, each by one `dask.compute`, so the objective and the optimiser are the same as for data in memory. Dask is imported only when
the data are Dask's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.utils import check_array

_FAN = 16  # partial sums added in one task, on the workers


def is_dask(x: Any) -> bool:
    """True for a Dask array, data frame or series."""
    return type(x).__module__.partition(".")[0] in ("dask", "dask_expr")


def _dask() -> Any:
    import dask  # late: an optional extra, which a Dask array has already imported

    return dask


def here(y: Any) -> Any:
    """Targets or weights in memory: Dask's are computed, others are returned unchanged."""
    return y.compute() if is_dask(y) else y


def names_of(x: Any) -> Any:
    """A stand-in for x, from which `validate_data(..., skip_check_array=True)` reads the number and names of the features."""
    if type(x).__module__.startswith(("dask.dataframe", "dask_expr")):
        return x._meta
    return np.empty((0, _two_axes(x).shape[1]))


def _two_axes(x: Any) -> Any:
    if x.ndim != 2:
        raise ValueError(
            f"X is a Dask array with {x.ndim} {'axis' if x.ndim == 1 else 'axes'}: expected 2, [rows, features]; x.reshape(-1, 1) makes "
            "one feature"
        )
    return x


def _array(x: Any) -> Any:
    """x as a Dask array of two axes, with all columns in one block."""
    if type(x).__module__.startswith(("dask.dataframe", "dask_expr")):
        x = x.to_dask_array()
    return x.rechunk({1: -1}) if len(_two_axes(x).chunks[1]) > 1 else x


def _checked(block: Any, dtype: Any) -> Any:
    return check_array(block, accept_sparse="csr", dtype=dtype, ensure_min_samples=0, input_name="X")  # type: ignore[arg-type]


def _rows(block: Any, dtype: Any) -> int:
    return int(_checked(block, dtype).shape[0])


def _ready(block: Any, dtype: Any) -> Any:
    return sparse.csr_matrix(block, dtype=dtype) if sparse.issparse(block) else np.ascontiguousarray(block, dtype=dtype)


def _itself(block: Any, _: None) -> Any:
    return block


def _times(block: Any, w: np.ndarray) -> np.ndarray:
    return np.asarray(block @ w)


def _pulled(block: Any, r: np.ndarray) -> np.ndarray:
    return np.asarray(block.T @ r)


def _squares(block: Any, r: np.ndarray) -> np.ndarray:
    return np.asarray((block.multiply(block) if sparse.issparse(block) else block * block).T @ r)


def _picked(block: Any, rows: np.ndarray) -> Any:
    return block[rows]


def _sum(parts: Sequence[np.ndarray]) -> np.ndarray:
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


class Blocks:
    """The rows of a Dask array or data frame, with the operations that `objective.Linear` uses; products are local arrays."""

    def __init__(self, blocks: list[Any], lengths: Sequence[int], columns: int, dtype: Any) -> None:
        self.blocks, self.ends = blocks, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.shape, self.dtype = (int(self.ends[-1]), columns), np.dtype(dtype)

    @classmethod
    def of(cls, x: Any) -> Blocks:
        """Take a Dask array or data frame; raise if a block holds numbers that are not finite."""
        dask = _dask()

        x = _array(x)
        dtype = np.float32 if x.dtype == np.float32 else np.float64
        count, ready = dask.delayed(_rows, pure=False), dask.delayed(_ready, pure=False)
        blocks = list(x.to_delayed().ravel())
        lengths = dask.compute(*[count(block, dtype) for block in blocks])
        blocks = [ready(block, dtype) for block in blocks]
        if not sum(lengths):
            raise ValueError("X is a Dask array of 0 rows (n_samples=0); at least 1 is needed")
        return cls(blocks, lengths, int(x.shape[1]), dtype)

    def _each(self, task: Callable[..., Any], sent: Sequence[Any], total: bool) -> Any:
        """`task(block, sent[i])` for each block i, or the sum of the results."""
        dask = _dask()

        ask, add = dask.delayed(task, pure=False), dask.delayed(_sum, pure=False)
        parts = [ask(block, part) for block, part in zip(self.blocks, _sent(sent))]
        while total and len(parts) > 1:
            parts = [add(parts[i : i + _FAN]) for i in range(0, len(parts), _FAN)]
        found = dask.compute(*parts)
        return found[0] if total else found

    def _cut(self, r: np.ndarray) -> list[np.ndarray]:
        return [r[low:high] for low, high in zip(self.ends, self.ends[1:])]

    def __matmul__(self, w: np.ndarray) -> np.ndarray:
        return np.concatenate(self._each(_times, [w] * len(self.blocks), False))

    @property
    def T(self) -> _Product:
        return _Product(self, _pulled)

    def multiply(self, other: Blocks) -> _Squares:
        if other is not self:
            raise TypeError("the rows of blocks are multiplied by themselves only")
        return _Squares(self)

    def __getitem__(self, rows: slice | np.ndarray) -> Any:
        """These rows as a local array, in ascending order of their indices."""
        found = self.only(np.arange(self.shape[0])[rows])
        parts = found._each(_itself, [None] * len(found.blocks), False)
        return sparse.vstack(parts, "csr") if sparse.issparse(parts[0]) else np.concatenate(parts)

    def only(self, rows: np.ndarray) -> Blocks:
        """The rows with these indices, or where this mask is True, in ascending order; nothing is computed."""
        dask = _dask()

        rows = np.flatnonzero(rows) if rows.dtype == bool else np.sort(rows)
        cuts = np.searchsorted(rows, self.ends)
        pick = dask.delayed(_picked, pure=False)
        parts, lengths = [], []
        for i, block in enumerate(self.blocks):
            mine = rows[cuts[i] : cuts[i + 1]] - self.ends[i]
            if len(mine):
                parts.append(pick(block, mine))
                lengths.append(len(mine))
        return Blocks(parts, lengths, self.shape[1], self.dtype)


class _Product:
    """The transpose of the blocks, or of their squares; `@` adds up the products of all blocks."""

    def __init__(self, blocks: Blocks, task: Callable[..., Any]) -> None:
        self.blocks, self.task = blocks, task

    def __matmul__(self, r: np.ndarray) -> np.ndarray:
        return self.blocks._each(self.task, self.blocks._cut(r), True)


class _Squares:
    def __init__(self, blocks: Blocks) -> None:
        self.T = _Product(blocks, _squares)


def only(x: Any, rows: np.ndarray) -> Any:
    """These rows of x; rows of `Blocks` are not computed."""
    return x.only(rows) if isinstance(x, Blocks) else x[rows]


def parts(x: Any) -> Iterator[tuple[np.ndarray, Any]]:
    """Pairs of row indices and rows: one pair for an array, one for each block of `Blocks`."""
    if not isinstance(x, Blocks):
        yield np.arange(x.shape[0]), x
        return
    for block, low, high in zip(x.blocks, x.ends, x.ends[1:]):
        yield np.arange(low, high), _dask().compute(block)[0]


def _sent(parts: Sequence[Any]) -> Sequence[Any]:
    """The factors of the blocks. On a cluster they go straight to the workers, not through the scheduler."""
    dask = _dask()

    scheduler = dask.base.get_scheduler()
    client = getattr(scheduler, "__self__", None)
    if client is None or not type(client).__module__.startswith("distributed"):
        return [dask.delayed(part, pure=False) for part in parts]
    if len(parts) > 1 and parts[0] is parts[-1]:
        (one,) = client.scatter([parts[0]], broadcast=True, hash=False)
        return [one] * len(parts)
    return client.scatter(list(parts), hash=False)


def lazily(x: Any, answer: Callable[[Any], Any], dtype: Any) -> Any:
    """`answer(block)` for each block of a Dask array or data frame, as a Dask array that is not computed yet."""
    x = _array(x)
    like = answer(np.zeros((1, x.shape[1]), dtype))

    def task(block: Any) -> Any:
        return answer(_checked(block, [np.float64, np.float32]))

    if like.ndim == 1:
        return x.map_blocks(task, drop_axis=1, dtype=like.dtype, meta=like[:0])
    return x.map_blocks(task, chunks=(x.chunks[0], (like.shape[1],)), dtype=like.dtype, meta=like[:0])
