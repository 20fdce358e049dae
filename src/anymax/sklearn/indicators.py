"""Sets of labels as an indicator matrix, and the weights of their rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse
from sklearn.utils.multiclass import type_of_target

from .parameters import not_below_zero


def indicator(y: Any) -> Any:
    """y as a CSR matrix of ones."""
    kind = type_of_target(y)
    if kind != "multilabel-indicator":
        raise ValueError(
            f"y is of type {kind!r}: expected an indicator matrix [rows, labels] of 0 and 1; "
            "sklearn.preprocessing.MultiLabelBinarizer makes one of sets of labels"
        )
    labels = sparse.csr_matrix(y, copy=True)
    labels.sum_duplicates()
    labels.eliminate_zeros()
    if (labels.data != 1).any():
        stray = labels.data[labels.data != 1][0]
        raise ValueError(f"y holds {stray!r}: expected an indicator matrix [rows, labels] of 0 and 1")
    labels.data = np.ones(len(labels.data), np.int64)
    return labels


def label_weights(class_weight: Any, labels: Any, weights: np.ndarray) -> np.ndarray:
    """One factor for each row: the mean of its labels' weights, 1 for a row without labels."""
    k = labels.shape[1]
    count = np.diff(labels.indptr)
    if isinstance(class_weight, str) and class_weight == "balanced":
        mass = labels.T @ weights
        each = mass.sum() / (k * np.where(mass > 0, mass, 1.0))
    elif isinstance(class_weight, dict):
        stray = [label for label in class_weight if label not in range(k)]
        if stray:
            raise ValueError(f"class_weight names the label {stray[0]!r}; the labels are the columns 0 to {k - 1}")
        each = not_below_zero(class_weight, np.array([float(class_weight.get(label, 1.0)) for label in range(k)]))
    else:
        raise ValueError(f"class_weight={class_weight!r}: expected a dict of label: weight, 'balanced' or None")
    return np.where(count > 0, (labels @ each) / np.maximum(count, 1), 1.0)
