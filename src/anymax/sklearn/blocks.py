"""Rows that lie in blocks of a Dask array or data frame, on one machine or many: training reads the blocks and keeps none of them.

A linear model needs few things of its data: products with it, the squares of its columns, some of its rows. `Blocks` answers these
as an array would, each by one `dask.compute` over the blocks, and so the objective and its optimiser are those of data in memory.
Dask is found by the type of what is given, and never imported for anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.utils import check_array

_FAN = 16  # sums of blocks are added by so many, on the workers


def is_dask(x: Any) -> bool:
    """A Dask array, data frame or series."""
    return type(x).__module__.partition(".")[0] in ("dask", "dask_expr")


def _dask() -> Any:
    import dask  # late: an optional extra, and loaded already where there is such an array

    return dask


def here(y: Any) -> Any:
    """Targets and weights of rows: of Dask's kind they are computed, others stay as they are."""
    return y.compute() if is_dask(y) else y


def names_of(x: Any) -> Any:
    """What scikit-learn reads the number of features and their names from, for `validate_data(..., skip_check_array=True)`."""
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
    """A Dask array of two axes, all columns in one block."""
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
    """The rows of a Dask array or data frame as `objective.Linear` asks for them; results lie on the machine that asks."""

    def __init__(self, blocks: list[Any], lengths: Sequence[int], columns: int, dtype: Any) -> None:
        self.blocks, self.ends = blocks, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.shape, self.dtype = (int(self.ends[-1]), columns), np.dtype(dtype)

    @classmethod
    def of(cls, x: Any) -> Blocks:
        """From a Dask array or data frame; each block is looked at once for numbers that are not finite."""
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
        """`task(block, sent[i])` of each block, or their sum."""
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
        """These rows, here."""
        found = self.only(np.arange(self.shape[0])[rows])
        parts = found._each(_itself, [None] * len(found.blocks), False)
        return sparse.vstack(parts, "csr") if sparse.issparse(parts[0]) else np.concatenate(parts)

    def only(self, rows: np.ndarray) -> Blocks:
        """These rows, in this order within a block, where they are; `rows` are indices or a mask."""
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
    """The transpose of blocks, or of their squares: `@` adds the products of all blocks."""

    def __init__(self, blocks: Blocks, task: Callable[..., Any]) -> None:
        self.blocks, self.task = blocks, task

    def __matmul__(self, r: np.ndarray) -> np.ndarray:
        return self.blocks._each(self.task, self.blocks._cut(r), True)


class _Squares:
    def __init__(self, blocks: Blocks) -> None:
        self.T = _Product(blocks, _squares)


def only(x: Any, rows: np.ndarray) -> Any:
    """These rows of an array, or of blocks without computing them."""
    return x.only(rows) if isinstance(x, Blocks) else x[rows]


def parts(x: Any) -> Iterator[tuple[np.ndarray, Any]]:
    """Indices of rows and the rows: all of an array at once, of blocks one after the other."""
    if not isinstance(x, Blocks):
        yield np.arange(x.shape[0]), x
        return
    for block, low, high in zip(x.blocks, x.ends, x.ends[1:]):
        yield np.arange(low, high), _dask().compute(block)[0]


def _sent(parts: Sequence[Any]) -> Sequence[Any]:
    """What the blocks are multiplied by. A cluster's workers have it directly, and its scheduler does not see it."""
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
    """`answer` of each block of a Dask array or data frame, as a Dask array; nothing is computed."""
    x = _array(x)
    like = answer(np.zeros((1, x.shape[1]), dtype))

    def task(block: Any) -> Any:
        return answer(_checked(block, [np.float64, np.float32]))

    if like.ndim == 1:
        return x.map_blocks(task, drop_axis=1, dtype=like.dtype, meta=like[:0])
    return x.map_blocks(task, chunks=(x.chunks[0], (like.shape[1],)), dtype=like.dtype, meta=like[:0])
