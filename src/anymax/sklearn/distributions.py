"""`LabelDistributionClassifier`: proportions of the classes for each row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import sparse
from sklearn.utils.validation import _check_sample_weight

from .._core.options import documented_like
from . import losses
from .blocks import here
from .classes import MappingClassifier
from .parameters import not_below_zero

if TYPE_CHECKING:
    from typing import Self

    from numpy.typing import ArrayLike

    from .classes import Rows


class LabelDistributionClassifier(MappingClassifier):
    """A linear classifier whose targets are distributions: each row of Q holds the proportions of the classes, and sums to 1.

    Use it for mixtures, votes of several judges, or labels with a degree. It fits p = map(X W + b) to Q with the map's loss, which is 0
    only if p equals Q; a sparse map can match proportions that are exactly 0. Martins and Astudillo 2016, section 4.1. (If y holds one
    class per row, it works as `MappingClassifier`.)

    Parameters
    ----------
    mapping, alpha, C, l2, tol, max_iter, fit_intercept, class_weight, solver, warm_start, verbose
        As in `MappingClassifier`.
        The class weight of a row is the mean of the class weights, weighted by its proportions; "balanced" needs one class per row.
    random_state, penalty, n_jobs, smoothing
        As in `MappingClassifier`.

    Attributes
    ----------
    classes_ : array [classes]
        The column numbers of Q, or the classes if y held one class per row.
    And those of `MappingClassifier`
        `coef_` has a row for each class; only one for two classes if the map is shift-invariant.

    Examples
    --------
    >>> import numpy as np
    >>> X, Q = np.array([[0.0], [1.0], [2.0]]), np.array([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]])
    >>> model = LabelDistributionClassifier(C=1000).fit(X, Q)
    >>> model.predict_proba(X).round(2)
    array([[1. , 0. ],
           [0.5, 0.5],
           [0. , 1. ]])
    >>> model.score(X, Q) > -1e-3
    True
    """

    @documented_like(MappingClassifier.fit)
    def fit(self, X: Rows, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train the classifier.

        Parameters
        ----------
        X
            The features, [rows, features], as for `MappingClassifier.fit`.
        y
            The proportions Q, [rows, classes], at least 0 and with rows that sum to 1, dense or sparse; or one class per row.
        """
        self.mapping_ = self._check()
        rows, target = self._rows(X, y)
        if _one_a_row(target):
            self._fit_classes(rows, target, sample_weight)
            return self
        q = _proportions(target)
        k = q.shape[1]
        self.classes_ = np.arange(k)
        weights = self._weights(rows, q, sample_weight)
        share, l2 = self._shares(weights, rows.dtype)
        one = k == 2 and self.mapping_.facts.shift_invariant
        loss = (losses.BinarySharesLoss if one else losses.SharesLoss)(self.mapping_, q, share)
        self._descend(rows, loss, l2, 1 if one else k, losses.bend(self.mapping_, k), share)
        return self

    @documented_like(MappingClassifier.partial_fit)
    def partial_fit(
        self, X: Rows, y: ArrayLike, classes: ArrayLike | None = None, sample_weight: ArrayLike | None = None
    ) -> Self:
        """Train on more rows, starting from where the last call, or `fit`, ended; see `MappingClassifier.partial_fit`.

        Parameters
        ----------
        y
            The proportions, [rows, classes]; or one class per row.
        classes
            For proportions the column numbers, optional; otherwise all classes that y will ever contain, required in the first
            call.
        """
        first = not hasattr(self, "classes_")
        self.mapping_ = self._check()
        rows, target = self._rows(X, y, reset=first)
        if _one_a_row(target):
            self._stream_classes(rows, target, classes, sample_weight, first)
            return self
        q = _proportions(target)
        k = q.shape[1]
        known = self._known_classes(np.arange(k) if classes is None else classes, first)
        if len(known) != k:
            raise ValueError(f"y has the proportions of {k} classes, and classes={classes!r} has {len(known)}")
        self.classes_ = known
        one = k == 2 and self.mapping_.facts.shift_invariant
        kind = losses.BinarySharesLoss if one else losses.SharesLoss
        weights = self._weights(rows, q, sample_weight)
        self._stream(rows, weights, lambda at, share: kind(self.mapping_, q[at], share), 1 if one else k)
        return self

    def _weights(self, X: Any, q: Any, sample_weight: Any) -> np.ndarray:
        weights = _check_sample_weight(here(sample_weight), X, dtype=np.float64, ensure_non_negative=True)
        if self.class_weight is None:
            return weights
        if not isinstance(self.class_weight, dict):
            raise ValueError(
                f"class_weight={self.class_weight!r}: of proportions it is a dict of column: weight, or None"
            )
        k = q.shape[1]
        stray = [name for name in self.class_weight if name not in range(k)]
        if stray:
            raise ValueError(f"class_weight names the class {stray[0]!r}; the classes are the columns 0 to {k - 1}")
        factors = np.array([float(self.class_weight.get(name, 1.0)) for name in range(k)])
        return weights * (q @ not_below_zero(self.class_weight, factors))

    def score(self, X: Rows, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Minus the mean Jensen-Shannon divergence between `predict_proba(X)` and the proportions y, from -log 2 to 0.

        Parameters
        ----------
        X
            The features, [rows, features].
        y
            The proportions, [rows, classes]; with one class per row the score is the accuracy.
        sample_weight
            A factor of at least 0 for each row, 1 by default.

        Returns
        -------
        float
            A float; larger is better.
        """
        y, sample_weight = here(y), here(sample_weight)
        if _one_a_row(y if sparse.issparse(y) else np.asarray(y)):
            return super().score(X, y, sample_weight)
        q, p = _proportions(y).toarray(), np.asarray(here(self.predict_proba(X)), np.float64)
        if p.shape != q.shape:
            raise ValueError(
                f"y has the shape {q.shape}, and the probabilities have {p.shape}; both are [rows, classes]"
            )
        weights = None if sample_weight is None else np.asarray(sample_weight, np.float64)
        return -float(np.average(divergence(p, q), weights=weights))


def divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The Jensen-Shannon divergence of each row, from 0 to log 2."""
    middle = 0.5 * (p + q)
    safe = np.where(middle > 0, middle, 1.0)
    halves = [r * np.log(np.where(r > 0, r, safe) / safe) for r in (p, q)]
    return np.maximum(0.5 * (halves[0] + halves[1]).sum(axis=1), 0.0)


def _one_a_row(target: Any) -> bool:
    return not sparse.issparse(target) and (target.ndim == 1 or target.shape[1] == 1)


def _proportions(target: Any) -> Any:
    """The targets as CSR, each row divided by its sum."""
    q = sparse.csr_matrix(target, dtype=np.float64, copy=True)
    q.sum_duplicates()
    q.eliminate_zeros()
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
