"""Linear classifiers of scikit-learn's kind, trained with the own loss of any map (extra `sklearn`).

`MappingClassifier` is `LogisticRegression` with the map for a parameter, and `MultiLabelMappingClassifier` predicts sets of labels.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

import numpy as np
from scipy import optimize, sparse
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import f1_score, precision_score, recall_score
from sklearn.model_selection import KFold, check_cv
from sklearn.utils import column_or_1d
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from . import _linear
from ._array import quiet
from ._lbfgs import minimize
from ._mapping import Mapping
from .functional import apply, log_apply
from .mappings import CATALOGUE, Entmax

__all__ = ["MappingClassifier", "MultiLabelMappingClassifier"]

_NAMES: dict[str, type[Mapping]] = {kind.name: kind for kind in CATALOGUE}
_NO_MAP = ("sigmoid", "zlpr")


def _mapping(mapping: Any, alpha: Any, others: tuple[str, ...] = ()) -> Mapping | str:
    """The map that the parameters `mapping` and `alpha` mean."""
    if isinstance(mapping, str):
        if mapping in others:
            if alpha is not None:
                raise ValueError(
                    f"alpha={alpha!r}: {mapping!r} has no alpha; leave it None, or choose mapping='entmax'"
                )
            return mapping
        if mapping == "entmax15":
            found: Any = Entmax(1.5)
            if alpha is not None:
                raise ValueError(f"alpha={alpha!r}: 'entmax15' is entmax with alpha=1.5; choose mapping='entmax'")
        elif mapping in _NAMES:
            kind = _NAMES[mapping]
            try:
                found = kind()
            except TypeError:
                raise ValueError(
                    f"mapping={mapping!r} needs a parameter; give the map itself, as in mapping=anymax.{kind.__name__}(...)"
                ) from None
        else:
            names = ", ".join((*_NAMES, "entmax15", *others))
            raise ValueError(f"mapping={mapping!r}: there is no such map; the names are {names}, or give a Mapping")
    else:
        found = mapping
    if not isinstance(found, Mapping):
        raise TypeError(
            f"mapping={mapping!r}: expected a name such as 'sparsemax' or a map such as anymax.Sparsemax(), got {type(mapping).__name__}"
        )
    if alpha is not None:
        if not any(field.name == "alpha" for field in dataclasses.fields(found)):  # type: ignore[arg-type]
            raise ValueError(f"alpha={alpha!r}: {found.name} has no alpha; leave it None, or choose mapping='entmax'")
        found = found.replace(alpha=alpha)
    if found.params():
        raise ValueError(
            f"mapping={found!r}: its {' and '.join(found.params())} is an array; a classifier takes one number for all rows"
        )
    if found.facts.sparse and not found.facts.has_potential:
        raise ValueError(
            f"mapping={found!r} gives exact zeros and has no Fenchel-Young loss: -log p is infinite there, without a gradient; choose a "
            "sparse map with a loss ('sparsemax', 'entmax15', ...) or a dense one ('taylor', 'sigsoftmax', ...)"
        )
    if getattr(found, "mass", 1.0) != 1.0:
        raise ValueError(f"mapping={found!r} sums to {found.mass:g}; a classifier needs a map that sums to 1")  # type: ignore[attr-defined]
    return found


def _number(name: str, value: Any, low: float, open_end: bool, words: str) -> float:
    ok = isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)  # type: ignore[arg-type]
    if not ok or value < low or (open_end and value == low):
        raise ValueError(f"{name}={value!r}: expected {words}")
    return float(value)


class MappingClassifier(ClassifierMixin, BaseEstimator):
    """A linear classifier: p = map(X W + b), trained with the map's own loss and an L2 penalty; convex.

    It minimises `C sum_i w_i loss(y_i, x_i W + b) + ||W||^2 / 2`, as `sklearn.linear_model.LogisticRegression` does: with
    `mapping="softmax"` its solution is the same. The loss is the Fenchel-Young loss where the map has one, and -log p (not convex)
    for Taylor softmax, sigsoftmax and ratio maps. Two classes have one column of scores z, and p = map((0, z)).

    Parameters
    ----------
    mapping : str or Mapping, default="sparsemax"
        A map such as `anymax.Sparsemax()`, or its name: "softmax", "sparsemax", "entmax15", "entmax", "normmax", ...
    alpha : float, default=None
        The alpha of a map that has one (entmax, normmax), in place of its own.
    C : float, default=1.0
        The weight of the loss against the penalty. `inf` is no penalty.
    l2 : float, default=None
        Another way to say it, in place of C: mean loss + `l2 / 2 ||W||^2`. The same as `C = 1 / (l2 * sum(sample_weight))`.
    tol : float, default=1e-4
        Training ends when no entry of the gradient of the mean objective is larger.
    max_iter : int, default=100
    fit_intercept : bool, default=True
        The intercept is not penalised.
    class_weight : dict, "balanced" or None
    solver : {"lbfgs", "lbfgs-scipy"}, default="lbfgs"
        L-BFGS in coordinates that know the scales of the features, or SciPy's L-BFGS-B as it is.
    warm_start : bool, default=False
        Begin where the last fit ended.
    verbose : int, default=0
        1 prints a line for each iteration.

    Attributes
    ----------
    classes_, coef_ [classes or 1, features], intercept_, n_iter_, mapping_, n_features_in_, feature_names_in_

    >>> import numpy as np
    >>> X, y = np.array([[0.0], [1.0], [2.0], [3.0]]), np.array(["a", "a", "b", "b"])
    >>> MappingClassifier(C=100).fit(X, y).predict_proba([[0.0], [1.5]]).round(3)
    array([[1. , 0. ],
           [0.5, 0.5]])
    """

    def __init__(
        self,
        mapping: Any = "sparsemax",
        *,
        alpha: Any = None,
        C: float = 1.0,
        l2: float | None = None,
        tol: float = 1e-4,
        max_iter: int = 100,
        fit_intercept: bool = True,
        class_weight: Any = None,
        solver: str = "lbfgs",
        warm_start: bool = False,
        verbose: int = 0,
    ) -> None:
        self.mapping = mapping
        self.alpha = alpha
        self.C = C
        self.l2 = l2
        self.tol = tol
        self.max_iter = max_iter
        self.fit_intercept = fit_intercept
        self.class_weight = class_weight
        self.solver = solver
        self.warm_start = warm_start
        self.verbose = verbose

    # -- training -------------------------------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Train on X [rows, features], dense or CSR, and the class of each row."""
        self.mapping_ = self._check()
        X, y = self._rows(X, y)
        self._fit_classes(X, y, sample_weight)
        return self

    def _check(self) -> Any:
        """The map, after a look at all parameters."""
        self._numbers()
        return _mapping(self.mapping, self.alpha)

    def _numbers(self) -> None:
        _number("C", self.C, 0.0, True, "a positive number, or inf for no penalty")
        if self.l2 is not None:
            _number("l2", self.l2, 0.0, False, "a number from 0, or None to use C")
            if self.C != 1.0:
                raise ValueError(f"C={self.C!r} and l2={self.l2!r} say the same thing in two ways; give one of them")
        _number("tol", self.tol, 0.0, False, "a number from 0")
        if not isinstance(self.max_iter, Integral) or self.max_iter < 0:
            raise ValueError(f"max_iter={self.max_iter!r}: expected an integer from 0")
        if self.solver not in ("lbfgs", "lbfgs-scipy"):
            raise ValueError(f"solver={self.solver!r}: expected 'lbfgs' or 'lbfgs-scipy'")

    def _rows(self, X: Any, y: Any) -> tuple[Any, Any]:
        X, y = validate_data(
            self, X, y, accept_sparse="csr", dtype=[np.float64, np.float32], accept_large_sparse=True, multi_output=True,
            y_numeric=False,
        )  # fmt: skip
        if not sparse.issparse(X) and not (X.flags.c_contiguous or X.flags.f_contiguous):
            X = np.ascontiguousarray(X)
        return X, y

    def _fit_classes(self, X: Any, y: Any, sample_weight: Any) -> None:
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        self.classes_, index = np.unique(y, return_inverse=True)
        k = len(self.classes_)
        if k < 2:
            raise ValueError(f"y has one class, {self.classes_[0]!r}; a classifier needs at least 2 classes")
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        weights = weights * _class_weights(self.class_weight, self.classes_, y, index, weights)[index]
        share, l2 = self._shares(weights, X.dtype)
        mapping, index = self.mapping_, index.astype(np.int64)
        one = k == 2 and mapping.facts.shift_invariant
        loss = (_linear.BinaryLoss if one else _linear.IndexLoss)(mapping, index, share)
        self._descend(X, loss, l2, 1 if one else k, _linear.bend(mapping, k), share, mapping.facts.shift_invariant)

    def _shares(self, weights: np.ndarray, dtype: Any) -> tuple[np.ndarray, float]:
        total = weights.sum()
        if not total > 0:
            raise ValueError("sample_weight (with class_weight) is zero for every row; at least one row must count")
        l2 = float(self.l2) if self.l2 is not None else 1.0 / (float(self.C) * total)
        return (weights / total).astype(dtype), l2

    def _descend(
        self, X: Any, loss: Any, l2: float, k: int, curvature: float, share: np.ndarray, shift_invariant: bool
    ) -> None:
        d, intercept = X.shape[1], bool(self.fit_intercept)
        start = np.zeros((d + intercept, k), X.dtype)
        if self.warm_start and hasattr(self, "coef_"):
            if self.coef_.shape != (k, d):
                raise ValueError(
                    f"warm_start: the last fit had coefficients of shape {self.coef_.shape}, this one needs {(k, d)}; "
                    "set warm_start=False or fit a clone"
                )
            start[:d] = self.coef_.T
            if intercept:
                start[d] = self.intercept_
        model = _linear.Linear(X, loss, l2, start, intercept, curvature, share)
        if self.solver == "lbfgs":
            iterations, converged, exhausted = minimize(model, self.tol, self.max_iter, _say if self.verbose else None)
            worst = model.steepest()
        else:
            iterations, converged, exhausted, worst = _scipy(model, self.tol, self.max_iter, self.verbose)
        if not converged:
            warnings.warn(_complaint(iterations, exhausted, worst, self.tol, X.dtype), ConvergenceWarning, stacklevel=4)
        w = model.w
        if shift_invariant and k > 1:  # what all classes have in common moves no loss and only adds to the penalty
            w = w - w.mean(axis=1, keepdims=True)
        self.coef_ = np.ascontiguousarray(w[:d].T)
        self.intercept_ = w[d].copy() if intercept else np.zeros(k, X.dtype)
        self.n_iter_ = np.array([iterations], np.int32)

    # -- use ------------------------------------------------------------------------------------------------------------------

    def _scores(self, X: Any) -> np.ndarray:
        """[rows, columns of coef_]."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=[np.float64, np.float32], reset=False)
        return np.asarray(X @ self.coef_.T) + self.intercept_

    def _class_scores(self, X: Any) -> np.ndarray:
        z = self._scores(X)
        return _linear.pair(z) if z.shape[1] == 1 else z

    def decision_function(self, X: Any) -> np.ndarray:
        """The scores before the map, [rows, classes]; for two classes that of the second over the first, [rows]."""
        z = self._scores(X)
        if z.shape[1] == 1:
            return z[:, 0]
        return z[:, 1] - z[:, 0] if len(self.classes_) == 2 else z

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probabilities of the classes; exactly 0 where a sparse map says so."""
        z = self._class_scores(X)
        return apply(self.mapping_, z)

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Their logarithms, -inf where the probability is exactly 0."""
        z = self._class_scores(X)
        with quiet(z):
            return log_apply(self.mapping_, z)

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each row."""
        z = self._class_scores(X)
        best = z if self.mapping_.facts.monotone else apply(self.mapping_, z)
        return self.classes_[np.argmax(best, axis=1)]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


class MultiLabelMappingClassifier(MappingClassifier):
    """A linear classifier that predicts a set of labels: the map is trained on the even distribution over the labels of a row.

    y is an indicator matrix [rows, labels], dense or sparse; `predict` gives one of the same kind. The target of a row is
    `y / sum(y)`; rows without a label take no part. Martins and Astudillo 2016, section 4.2. (With one class a row in y, it is a
    `MappingClassifier`.) Two baselines have no map: "sigmoid", a logistic regression for each label, and "zlpr", the softmax loss
    of `anymax.multilabel_softmax_loss`, Su et al. 2022; they train on every row.

    Parameters that `MappingClassifier` does not have
    -------------------------------------------------
    decision : {"auto", "support", "threshold"}, default="auto"
        "support": the labels are those with `map(scale * scores) > 0`; "threshold": those with `map(scores) > threshold`;
        "auto": "support" for a sparse map.
    threshold : float or "cv", default="cv"
        "cv" tries `grid` by cross-validation on the training rows.
    scale : float or "cv", default="cv"
    grid : sequence of numbers, default=None
        What "cv" tries; None: scales 1, 1.5, ..., 5; thresholds 1/n to 10/n of n labels, for "sigmoid" 0.05, 0.1, ..., 0.5, for
        "zlpr" 0.05, ..., 0.95.
    scoring : {"f1_micro", "f1_macro", "f1_samples", "f1_of_means"} or callable(y_true, y_pred), default="f1_micro"
        What "cv" makes large, over all rows, each predicted by a model that did not see it. "f1_of_means" is the harmonic mean of
        the labels' mean precision and mean recall, the "macro-F1" of Martins and Astudillo.
    cv : int or splitter, default=5
    random_state : int or None, default=0
        Shuffles the rows before they are split, where cv is an int.

    Attributes
    ----------
    Also: decision_ ("support", "threshold" or "argmax"), threshold_ or scale_, cv_results_ (what was tried, with its score).

    >>> import numpy as np
    >>> X = np.repeat(np.eye(3), 8, axis=0)
    >>> Y = (X @ [[1, 0, 0], [1, 1, 0], [0, 1, 1]]).astype(int)
    >>> MultiLabelMappingClassifier(C=10).fit(X, Y).predict(np.eye(3))
    array([[1, 0, 0],
           [1, 1, 0],
           [0, 1, 1]])
    """

    threshold_: float
    scale_: float

    def __init__(
        self,
        mapping: Any = "sparsemax",
        *,
        alpha: Any = None,
        C: float = 1.0,
        l2: float | None = None,
        tol: float = 1e-4,
        max_iter: int = 100,
        fit_intercept: bool = True,
        class_weight: Any = None,
        solver: str = "lbfgs",
        warm_start: bool = False,
        verbose: int = 0,
        decision: str = "auto",
        threshold: float | str = "cv",
        scale: float | str = "cv",
        grid: Iterable[float] | None = None,
        scoring: Any = "f1_micro",
        cv: Any = 5,
        random_state: Any = 0,
    ) -> None:
        super().__init__(
            mapping, alpha=alpha, C=C, l2=l2, tol=tol, max_iter=max_iter, fit_intercept=fit_intercept,
            class_weight=class_weight, solver=solver, warm_start=warm_start, verbose=verbose,
        )  # fmt: skip
        self.decision = decision
        self.threshold = threshold
        self.scale = scale
        self.grid = grid
        self.scoring = scoring
        self.cv = cv
        self.random_state = random_state

    # -- training -------------------------------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Train on X [rows, features], dense or CSR, and an indicator matrix [rows, labels], dense or sparse."""
        self.mapping_ = self._check()
        X, y = self._rows(X, y)
        if not sparse.issparse(y) and (y.ndim == 1 or y.shape[1] == 1):
            if self.mapping_ in _NO_MAP:
                raise ValueError(
                    f"mapping={self.mapping_!r} is for an indicator matrix [rows, labels]; y is one class a row"
                )
            self.decision_, self.indicator_ = "argmax", None
            self._fit_classes(X, y, sample_weight)
            return self
        labels = _indicator(y)
        self.indicator_ = "sparse" if sparse.issparse(y) else "dense"
        self.classes_ = np.arange(labels.shape[1])
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        if self.class_weight is not None:
            weights = weights * _label_weights(self.class_weight, labels, weights)
        if self.mapping_ not in _NO_MAP:
            some = np.diff(labels.indptr) > 0
            if not some.any():
                raise ValueError("y has no label in any row; at least one row must have one")
            if not some.all():
                X, labels, weights = X[some], labels[some], weights[some]
        self.decision_ = self._decision()
        self._tune(X, labels, weights)
        self._fit_labels(X, labels, weights)
        return self

    def _check(self) -> Any:
        self._numbers()
        if self.decision not in ("auto", "support", "threshold"):
            raise ValueError(f"decision={self.decision!r}: expected 'auto', 'support' or 'threshold'")
        for name, low, open_end, words in (
            ("threshold", 0.0, False, "a number from 0, or 'cv' to tune it"),
            ("scale", 0.0, True, "a positive number, or 'cv' to tune it"),
        ):
            if getattr(self, name) != "cv":
                _number(name, getattr(self, name), low, open_end, words)
        if not callable(self.scoring) and self.scoring not in _SCORES:
            raise ValueError(f"scoring={self.scoring!r}: expected {', '.join(map(repr, _SCORES))} or a function")
        mapping = _mapping(self.mapping, self.alpha, _NO_MAP)
        if self.decision == "support" and (mapping in _NO_MAP or not mapping.facts.sparse):  # type: ignore[union-attr]
            raise ValueError(
                f"decision='support': {self.mapping!r} is never 0; use decision='threshold' or a sparse map"
            )
        return mapping

    def _decision(self) -> str:
        if self.decision != "auto":
            return self.decision
        return "support" if self.mapping_ not in _NO_MAP and self.mapping_.facts.sparse else "threshold"

    def _fit_labels(self, X: Any, labels: Any, weights: np.ndarray) -> np.ndarray:
        share, l2 = self._shares(weights, X.dtype)
        k = labels.shape[1]
        if self.mapping_ == "sigmoid":
            loss, curvature = _linear.SigmoidLoss(labels, share), 0.25
        elif self.mapping_ == "zlpr":
            loss, curvature = _linear.ZlprLoss(labels, share), 1.0 / (k + 1)
        else:
            loss, curvature = _linear.LabelLoss(self.mapping_, labels, share), _linear.bend(self.mapping_, k)
        shift_invariant = self.mapping_ not in _NO_MAP and self.mapping_.facts.shift_invariant
        self._descend(X, loss, l2, k, curvature, share, shift_invariant)
        return share

    def _tune(self, X: Any, labels: Any, weights: np.ndarray) -> None:
        """Set `threshold_` or `scale_`."""
        name = "scale" if self.decision_ == "support" else "threshold"
        for other in ("scale_", "threshold_", "cv_results_"):
            if hasattr(self, other):
                delattr(self, other)
        if getattr(self, name) != "cv":
            setattr(self, f"{name}_", float(getattr(self, name)))
            return
        grid = self._grid(name, labels.shape[1])
        if isinstance(self.cv, Integral):
            n = len(weights)
            if self.cv < 2 or n < 2:
                raise ValueError(
                    f"cv={self.cv!r} with n_samples={n}: cross-validation needs 2 folds and 2 rows at least; "
                    f"give {name}=<number> to do without"
                )
            state = self.random_state
            splits = KFold(min(int(self.cv), n), shuffle=True, random_state=state).split(X)
        else:
            splits = check_cv(self.cv).split(X)  # type: ignore[union-attr,call-arg]
        parts = []
        for train, test in splits:
            part = self.__class__(**{**self.get_params(deep=False), "warm_start": False, "verbose": 0})
            part.mapping_ = self.mapping_
            with warnings.catch_warnings():  # the last fit, on all rows, warns
                warnings.simplefilter("ignore", ConvergenceWarning)
                part._fit_labels(X[train], labels[train], weights[train])
            parts.append((test, np.asarray(X[test] @ part.coef_.T) + part.intercept_))
        rows = np.concatenate([test for test, _ in parts])
        z, truth = np.concatenate([z for _, z in parts]), labels[rows]
        score: Any = self.scoring if callable(self.scoring) else _SCORES[self.scoring]
        scores = [float(score(truth, sparse.csr_matrix(self._chosen(z, level).astype(np.int64)))) for level in grid]
        setattr(self, f"{name}_", grid[int(np.argmax(scores))])
        self.cv_results_ = {name: np.asarray(grid), "score": np.asarray(scores)}

    def _grid(self, name: str, k: int) -> list[float]:
        if self.grid is not None:
            grid = [_number("grid", g, 0.0, name == "scale", "numbers that a " + name + " can be") for g in self.grid]
            if not grid:
                raise ValueError("grid is empty; give the numbers to try, or None for the usual ones")
            return grid
        if name == "scale":
            return [1.0 + 0.5 * i for i in range(9)]
        if self.mapping_ in _NO_MAP:
            return [0.05 * i for i in range(1, 11 if self.mapping_ == "sigmoid" else 20)]
        return [i / k for i in range(1, 11) if i < k] or [0.5]

    # -- use ------------------------------------------------------------------------------------------------------------------

    def _chosen(self, z: np.ndarray, level: float) -> np.ndarray:
        """Which labels the scores mean, boolean; `level` is the scale or the threshold."""
        if self.decision_ == "support":
            return apply(self.mapping_, z * z.dtype.type(level)) > 0
        return self._probabilities(z) > level

    def _probabilities(self, z: np.ndarray) -> np.ndarray:
        return _linear.sigmoid(z) if self.mapping_ in _NO_MAP else apply(self.mapping_, z)

    def predict(self, X: Any) -> Any:
        """The labels of each row as an indicator matrix, dense or sparse (CSR) as the y of `fit` was."""
        check_is_fitted(self)
        if self.indicator_ is None:
            return super().predict(X)
        z = self._scores(X)
        chosen = self._chosen(z, self.scale_ if self.decision_ == "support" else self.threshold_).astype(np.int64)
        return sparse.csr_matrix(chosen) if self.indicator_ == "sparse" else chosen

    def decision_function(self, X: Any) -> np.ndarray:
        """The scores before the map, [rows, labels]."""
        check_is_fitted(self)
        return super().decision_function(X) if self.indicator_ is None else self._scores(X)

    def predict_proba(self, X: Any) -> np.ndarray:
        """map(scores), [rows, labels]: the share of each label in its row; of "sigmoid" the probability of each label.

        For "zlpr" it is the sigmoid of the score, above 1/2 where the loss wants the label, and not a calibrated probability.
        """
        check_is_fitted(self)
        return super().predict_proba(X) if self.indicator_ is None else self._probabilities(self._scores(X))

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """The logarithm of `predict_proba`, -inf where it is exactly 0."""
        check_is_fitted(self)
        if self.indicator_ is None:
            return super().predict_log_proba(X)
        z = self._scores(X)
        if self.mapping_ in _NO_MAP:
            return -np.logaddexp(0, -z)
        with quiet(z):
            return log_apply(self.mapping_, z)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags


# -- targets and weights ------------------------------------------------------------------------------------------------------


def _indicator(y: Any) -> Any:
    """y as CSR of ones."""
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


def _class_weights(
    class_weight: Any, classes: np.ndarray, y: np.ndarray, index: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """One factor for each class; "balanced" counts the rows by their weights."""
    if isinstance(class_weight, str) and class_weight == "balanced":
        mass = np.bincount(index, weights, len(classes))
        return weights.sum() / (len(classes) * np.where(mass > 0, mass, 1.0))
    return compute_class_weight(class_weight, classes=classes, y=y)


def _label_weights(class_weight: Any, labels: Any, weights: np.ndarray) -> np.ndarray:
    """One factor for each row: the mean of its labels' weights, 1 for a row without a label."""
    k = labels.shape[1]
    count = np.diff(labels.indptr)
    if isinstance(class_weight, str) and class_weight == "balanced":
        mass = labels.T @ weights
        each = mass.sum() / (k * np.where(mass > 0, mass, 1.0))
    elif isinstance(class_weight, dict):
        stray = [label for label in class_weight if label not in range(k)]
        if stray:
            raise ValueError(f"class_weight names the label {stray[0]!r}; the labels are the columns 0 to {k - 1}")
        each = np.array([float(class_weight.get(label, 1.0)) for label in range(k)])
    else:
        raise ValueError(f"class_weight={class_weight!r}: expected a dict of label: weight, 'balanced' or None")
    return np.where(count > 0, (labels @ each) / np.maximum(count, 1), 1.0)


_SILENT: dict[str, Any] = {"zero_division": 0}


def _f1(average: str) -> Any:
    return lambda truth, found: f1_score(truth, found, average=average, **_SILENT)


def _f1_of_means(truth: Any, found: Any) -> float:
    precision = precision_score(truth, found, average="macro", **_SILENT)
    recall = recall_score(truth, found, average="macro", **_SILENT)
    return 2 * precision * recall / (precision + recall) if precision + recall > 0 else 0.0


_SCORES = {
    "f1_micro": _f1("micro"),
    "f1_macro": _f1("macro"),
    "f1_samples": _f1("samples"),
    "f1_of_means": _f1_of_means,
}


# -- the solvers ----------------------------------------------------------------------------------------------------------------


def _scipy(model: _linear.Linear, tol: float, max_iter: int, verbose: int) -> tuple[int, bool, bool, float]:
    """SciPy's L-BFGS-B, in the coordinates of W."""
    shape, dtype = model.w.shape, model.w.dtype

    def value(flat: np.ndarray) -> tuple[float, np.ndarray]:
        model.put(flat.reshape(shape).astype(dtype))
        return model.value, model.slope().reshape(-1).astype(np.float64)

    count = 0

    def callback(intermediate_result: Any) -> None:
        nonlocal count
        count += 1
        if verbose:
            _say(count, float(intermediate_result.fun), model.steepest())

    options = {"maxiter": max_iter, "gtol": tol, "ftol": 0.0, "maxfun": 15000 + 2 * max_iter}
    found = optimize.minimize(
        value, model.w.reshape(-1), jac=True, method="L-BFGS-B", options=options, callback=callback
    )
    model.put(found.x.reshape(shape).astype(dtype))
    model.slope()
    worst = model.steepest()
    return int(found.nit), worst <= tol, found.nit < max_iter, worst


def _say(iteration: int, value: float, worst: float) -> None:
    print(f"iteration {iteration}: objective {value:.8g}, largest gradient {worst:.3g}")  # noqa: T201


def _complaint(iterations: int, exhausted: bool, worst: float, tol: float, dtype: Any) -> str:
    if not math.isfinite(worst):
        return (
            f"after {iterations} iterations the gradient of the loss is {worst}, and training can't go on: the map gives no finite "
            "-log p or p for these scores (anymax.check_mapping looks at a map of your own)"
        )
    reached = f"the largest entry of the gradient is {worst:.3g}, tol={tol:g}"
    if exhausted:
        return (
            f"after {iterations} iterations rounding in {np.dtype(dtype).name} lets the objective fall no further: {reached}. "
            "Scale the features (sklearn.preprocessing.StandardScaler), give float64, or allow a larger tol"
        )
    return (
        f"max_iter={iterations} iterations were not enough: {reached}. Increase max_iter, or scale the features "
        "(sklearn.preprocessing.StandardScaler)"
    )
