"""`LabelDistributionClassifier`: proportions of the classes for each row."""

from __future__ import annotations

from collections.abc import Mapping as Mapped
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from scipy import sparse

from .._core.mapping import Mapping
from .._core.tables import documented_like
from . import losses
from .blocks import here
from .classes import MappingClassifier
from .targets import column_weights, one_a_row, proportions

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
    mapping : str or Mapping, default="entmax15"
        A map or its name. Softmax can't match proportions that are 0; 1.5-entmax can.
    alpha, C, l2, tol, max_iter, fit_intercept, class_weight, solver, warm_start, verbose
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

    def __init__(
        self,
        mapping: str | Mapping = "entmax15",
        *,
        alpha: float | None = None,
        C: float = 1.0,
        l2: float | None = None,
        tol: float = 1e-4,
        max_iter: int = 1000,
        fit_intercept: bool = True,
        class_weight: Mapped[Any, float] | Literal["balanced"] | None = None,
        solver: Literal["lbfgs", "lbfgs-scipy"] = "lbfgs",
        warm_start: bool = False,
        verbose: int = 0,
        random_state: Any = 0,
        penalty: Literal["l2"] | None = "l2",
        n_jobs: int | None = None,
        smoothing: float = 0.0,
    ) -> None:
        super().__init__(
            mapping, alpha=alpha, C=C, l2=l2, tol=tol, max_iter=max_iter, fit_intercept=fit_intercept,
            class_weight=class_weight, solver=solver, warm_start=warm_start, verbose=verbose, random_state=random_state,
            penalty=penalty, n_jobs=n_jobs, smoothing=smoothing,
        )  # fmt: skip

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
        rows, target = self._data(X, y)
        if one_a_row(target):
            self._fit_classes(rows, target, sample_weight)
            return self
        q = proportions(target)
        k = q.shape[1]
        self.classes_ = np.arange(k)
        share, l2 = self._shares(self._weights(rows, q, sample_weight), rows.dtype)
        loss = self._loss_of(losses.SharesLoss, q, share)
        self._descend(rows, loss, l2, self._columns(), losses.bend(self.mapping_, k), share)
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
        rows, target = self._data(X, y, reset=first)
        if one_a_row(target):
            self._stream_classes(rows, target, classes, sample_weight, first)
            return self
        q = proportions(target)
        k = q.shape[1]
        known = self._known_classes(np.arange(k) if classes is None else classes, first)
        if len(known) != k:
            raise ValueError(f"y has the proportions of {k} classes, and classes={classes!r} has {len(known)}")
        self.classes_ = known
        weights = self._weights(rows, q, sample_weight)
        loss_of = lambda at, share: self._loss_of(losses.SharesLoss, q[at], share)  # noqa: E731
        self._stream(rows, weights, loss_of, self._columns())
        return self

    def _weights(self, X: Any, q: Any, sample_weight: Any) -> np.ndarray:
        weights = self._row_weights(X, sample_weight)
        if self.class_weight is None:
            return weights
        if not isinstance(self.class_weight, dict):
            raise ValueError(
                f"class_weight={self.class_weight!r}: of proportions it is a dict of column: weight, or None"
            )
        return weights * (q @ column_weights(self.class_weight, q.shape[1], "class", "classes"))

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
        if one_a_row(y if sparse.issparse(y) else np.asarray(y)):
            return super().score(X, y, sample_weight)
        q, p = proportions(y).toarray(), np.asarray(here(self.predict_proba(X)), np.float64)
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
