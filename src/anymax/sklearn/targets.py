"""The targets of the rows: one class, a set of labels, or proportions; and the weights that `class_weight` gives them."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse
from sklearn.utils.multiclass import type_of_target


def one_a_row(target: Any) -> bool:
    """True for one class per row, False for a matrix [rows, classes]."""
    return not sparse.issparse(target) and (target.ndim == 1 or target.shape[1] == 1)


_BINARIZE = "sklearn.preprocessing.MultiLabelBinarizer().fit_transform(y) makes one of lists or sets of labels"


def refuse_sets(y: Any) -> None:
    """An error for lists or sets of labels, which scikit-learn cannot read."""
    first = y[0] if isinstance(y, (list, tuple)) and y else None
    if not isinstance(first, (list, tuple, set, frozenset)):
        return
    kind = type(first).__name__
    lengths = {len(row) for row in y if isinstance(row, (list, tuple, set, frozenset))}
    if isinstance(first, (set, frozenset)) or len(lengths) > 1 or any(isinstance(label, str) for label in first):
        raise ValueError(
            f"y holds a {kind} of labels for each row: expected an indicator matrix [rows, labels] of 0 and 1; {_BINARIZE}"
        )


def indicator(y: Any) -> Any:
    """Sets of labels as a CSR matrix of ones."""
    kind = type_of_target(y)
    if kind != "multilabel-indicator":
        raise ValueError(f"y is of type {kind!r}: expected an indicator matrix [rows, labels] of 0 and 1; {_BINARIZE}")
    labels = _csr(y)
    if (labels.data != 1).any():
        stray = labels.data[labels.data != 1][0]
        raise ValueError(f"y holds {stray.item()!r}: expected an indicator matrix [rows, labels] of 0 and 1")
    labels.data = np.ones(len(labels.data), np.int8)
    return labels


def proportions(y: Any) -> Any:
    """Proportions as a CSR matrix, each row divided by its sum."""
    q = _csr(y, np.float64)
    if q.nnz and not (np.isfinite(q.data).all() and q.data.min() > 0):
        stray = q.data[~(q.data > 0) | ~np.isfinite(q.data)][0]
        raise ValueError(f"y holds {float(stray)!r}: expected proportions from 0, whose rows sum to 1")
    sums = np.asarray(q.sum(axis=1)).reshape(-1)
    wrong = np.flatnonzero(np.abs(sums - 1) > 1e-3)
    if len(wrong):
        raise ValueError(
            f"row {wrong[0]} of y sums to {sums[wrong[0]]:g}: expected proportions that sum to 1; "
            "y / y.sum(axis=1, keepdims=True) makes them"
        )
    q.data /= np.repeat(sums, np.diff(q.indptr))
    return q


def _csr(y: Any, dtype: Any = None) -> Any:
    """A copy of y in which each entry that is not 0 stands once."""
    matrix = sparse.csr_matrix(y, dtype=dtype, copy=True)
    matrix.sum_duplicates()
    matrix.eliminate_zeros()
    return matrix


# -- weights ------------------------------------------------------------------------------------------------------------------


def total_of(weights: np.ndarray) -> float:
    """The sum of the rows' weights; raise if it is 0."""
    total = float(weights.sum())
    if not total > 0:
        raise ValueError("sample_weight (with class_weight) is zero for every row; at least one row must count")
    return total


def balanced(mass: np.ndarray, total: float) -> np.ndarray:
    """The factors that give classes of these masses the same total weight."""
    return total / (len(mass) * np.where(mass > 0, mass, 1.0))


def label_weights(class_weight: Any, labels: Any, weights: np.ndarray) -> np.ndarray:
    """One factor for each row: the mean of its labels' weights, 1 for a row without labels."""
    count = np.diff(labels.indptr)
    if isinstance(class_weight, str) and class_weight == "balanced":
        mass = labels.T @ weights
        each = balanced(mass, mass.sum())
    elif isinstance(class_weight, dict):
        each = column_weights(class_weight, labels.shape[1], "label", "labels")
    else:
        raise ValueError(f"class_weight={class_weight!r}: expected a dict of label: weight, 'balanced' or None")
    return np.where(count > 0, (labels @ each) / np.maximum(count, 1), 1.0)


def column_weights(class_weight: dict[Any, float], k: int, one: str, many: str) -> np.ndarray:
    """The factors of k columns, 1 for a column that the dict does not name; `one` and `many` are the columns' names in errors."""
    stray = [name for name in class_weight if name not in range(k)]
    if stray:
        raise ValueError(f"class_weight names the {one} {stray[0]!r}; the {many} are the columns 0 to {k - 1}")
    return not_below_zero(class_weight, np.array([float(class_weight.get(name, 1.0)) for name in range(k)]))


def not_below_zero(class_weight: Any, factors: np.ndarray) -> np.ndarray:
    """The factors of the classes; raise if one is below 0."""
    if not (factors >= 0).all():
        raise ValueError(f"class_weight={class_weight!r}: expected numbers from 0")
    return factors
