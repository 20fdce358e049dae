"""The assignment of rows to columns with the largest total of scores, by shortest augmenting paths (Jonker & Volgenant 1987)."""

from __future__ import annotations

import math

import numpy as np


def assignment(x: np.ndarray) -> np.ndarray:
    """The permutation matrices [..., n, n], 1 where a row is given a column, that have the largest sum of scores x.

    Where the scores that are -inf leave rows or columns without one, these stay empty, and the others are assigned. A matrix with NaN or
    +inf gives NaN.
    """
    out = np.zeros(x.shape, np.float64)
    n = x.shape[-1]
    flat, results = x.reshape(-1, n, n), out.reshape(-1, n, n)
    for scores, result in zip(flat, results):
        if np.isnan(scores).any() or (scores == math.inf).any():
            result[...] = math.nan
            continue
        kept = scores > -math.inf
        high = scores.max(where=kept, initial=-math.inf)
        costs = np.where(kept, high - scores.astype(np.float64), 0.0) if kept.any() else np.zeros((n, n))
        # as much as all of the kept ones together: a masked entry is taken only where there is no other way
        costs[~kept] = (costs.max() + 1.0) * (n + 1)
        rows, columns = np.arange(n), _cheapest(costs)
        result[rows, columns] = kept[rows, columns]
    return out


def _cheapest(costs: np.ndarray) -> np.ndarray:
    """The column of each row in the cheapest assignment. Each row in turn takes the cheapest path of exchanges to a free column."""
    n = len(costs)
    by_row, by_column = np.zeros(n), np.zeros(n)  # the dual solution: by_row + by_column <= costs
    row_of, column_of = np.full(n, -1), np.full(n, -1)
    for start in range(n):
        length, before = np.full(n, math.inf), np.full(n, -1)
        done = np.zeros(n, bool)
        row, least = start, 0.0
        while True:
            reduced = least + costs[row] - by_row[row] - by_column
            shorter = ~done & (reduced < length)
            length[shorter], before[shorter] = reduced[shorter], row
            column = int(np.argmin(np.where(done, math.inf, length)))
            least = length[column]
            done[column] = True
            if row_of[column] < 0:
                break
            row = row_of[column]
        seen = done & (row_of >= 0)
        by_row[start] += least
        by_row[row_of[seen]] += least - length[seen]
        by_column[done] -= least - length[done]
        while True:
            row = before[column]
            row_of[column], column_of[row], column = row, column, column_of[row]
            if row == start:
                break
    return column_of
