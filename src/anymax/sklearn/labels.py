"""`MultiLabelMappingClassifier`: a set of labels a row."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from collections.abc import Mapping as Mapped
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from scipy import sparse
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import f1_score, precision_score, recall_score
from sklearn.model_selection import KFold, check_cv
from sklearn.utils.multiclass import type_of_target
from sklearn.utils.validation import _check_sample_weight

from .._array import quiet
from .._mapping import Mapping
from ..functional import apply, log_apply
from . import losses
from .blocks import here, only
from .classes import MappingClassifier
from .parameters import NO_MAP, mapping_of, number_of

if TYPE_CHECKING:
    from typing import Self

    from numpy.typing import ArrayLike

    from .classes import Rows


class MultiLabelMappingClassifier(MappingClassifier):
    """A linear classifier that predicts a set of labels for each row.

    For rows that may have several labels, or none. The map is trained on the even distribution over the labels of a row,
    `y / sum(y)`, where y is an indicator matrix [rows, labels], dense or sparse; rows without a label take no part. A label is
    predicted where its probability is above 0, or above a threshold; the scale or the threshold is tuned by cross-validation.
    Martins and Astudillo 2016, section 4.2. (With one class a row in y, it is a `MappingClassifier`.)

    Parameters
    ----------
    alpha, C, l2, tol, max_iter, fit_intercept, class_weight, solver, warm_start, verbose : as in `MappingClassifier`
        The class weight of a row is the mean of those of its labels.
    mapping : str or Mapping, default="sparsemax"
        A map or its name, as there; or one of two baselines that have no map and train on every row: "sigmoid", a logistic regression
        for each label, and "zlpr", the softmax loss of `anymax.multilabel_softmax_loss`, Su et al. 2022.
    decision : {"auto", "support", "threshold"}, default="auto"
        "support": the labels are those with `map(scale * scores) > 0`; "threshold": those with `map(scores) > threshold`;
        "auto": "support" for a sparse map.
    threshold : float or "cv", default="cv"
        "cv" tries `grid` by cross-validation on the training rows.
    scale : float or "cv", default="cv"
        The factor of the scores where the decision is "support": the larger, the fewer labels. "cv" tunes it likewise.
    grid : sequence of numbers, default=None
        What "cv" tries; None: scales 1, 1.5, ..., 5; thresholds 1/n to 10/n of n labels, for "sigmoid" 0.05, 0.1, ..., 0.5, for
        "zlpr" 0.05, ..., 0.95.
    scoring : {"f1_micro", "f1_macro", "f1_samples", "f1_of_means"} or callable(y_true, y_pred), default="f1_micro"
        What "cv" makes large, over all rows, each predicted by a model that did not see it. "f1_of_means" is the harmonic mean of
        the labels' mean precision and mean recall, the "macro-F1" of Martins and Astudillo.
    cv : int or splitter, default=5
        The folds, or a splitter of scikit-learn's.
    random_state : int or None, default=0
        Shuffles the rows before they are split, where cv is an int.

    Attributes
    ----------
    decision_ : str
        "support" or "threshold"; "argmax" where y had one class a row.
    threshold_ : float
        The threshold, where the decision is "threshold".
    scale_ : float
        The scale, where the decision is "support".
    cv_results_ : dict
        What "cv" tried, and the score of each.
    And those of `MappingClassifier`
        classes_ holds the numbers of the columns of y.

    >>> import numpy as np
    >>> X = np.repeat(np.eye(3), 8, axis=0)
    >>> Y = (X @ [[1, 0, 0], [1, 1, 0], [0, 1, 1]]).astype(int)
    >>> MultiLabelMappingClassifier(C=10).fit(X, Y).predict(np.eye(3))
    array([[1, 0, 0],
           [1, 1, 0],
           [0, 1, 1]])
    """

    decision_: str
    threshold_: float
    scale_: float
    cv_results_: dict[str, np.ndarray]

    def __init__(
        self,
        mapping: str | Mapping = "sparsemax",
        *,
        alpha: float | None = None,
        C: float = 1.0,
        l2: float | None = None,
        tol: float = 1e-4,
        max_iter: int = 100,
        fit_intercept: bool = True,
        class_weight: Mapped[Any, float] | Literal["balanced"] | None = None,
        solver: Literal["lbfgs", "lbfgs-scipy"] = "lbfgs",
        warm_start: bool = False,
        verbose: int = 0,
        decision: Literal["auto", "support", "threshold"] = "auto",
        threshold: float | Literal["cv"] = "cv",
        scale: float | Literal["cv"] = "cv",
        grid: Iterable[float] | None = None,
        scoring: Literal["f1_micro", "f1_macro", "f1_samples", "f1_of_means"]
        | Callable[[Any, Any], float] = "f1_micro",
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

    def fit(self, X: Rows, y: Rows, sample_weight: ArrayLike | None = None) -> Self:
        """Train the classifier, and tune its scale or threshold where that is asked for.

        X: the features, [rows, features], of fp32 or fp64; an array, a frame of pandas, or a sparse matrix.
        y: the labels, an indicator matrix [rows, labels] of 0 and 1, dense or sparse; or one class a row.
        sample_weight: a factor from 0 for each row, 1 by default.

        Returns the classifier itself.
        """
        self.mapping_ = self._check()
        rows, target = self._rows(X, y)
        if not sparse.issparse(target) and (target.ndim == 1 or target.shape[1] == 1):
            if self.mapping_ in NO_MAP:
                raise ValueError(
                    f"mapping={self.mapping_!r} is for an indicator matrix [rows, labels]; y is one class a row"
                )
            self.decision_, self.indicator_ = "argmax", None
            self._fit_classes(rows, target, sample_weight)
            return self
        labels = _indicator(target)
        self.indicator_ = "sparse" if sparse.issparse(target) else "dense"
        self.classes_ = np.arange(labels.shape[1])
        weights = _check_sample_weight(here(sample_weight), rows, dtype=np.float64, ensure_non_negative=True)
        if self.class_weight is not None:
            weights = weights * _label_weights(self.class_weight, labels, weights)
        if self.mapping_ not in NO_MAP:
            some = np.diff(labels.indptr) > 0
            if not some.any():
                raise ValueError("y has no label in any row; at least one row must have one")
            if not some.all():
                rows, labels, weights = only(rows, some), labels[some], weights[some]
        self.decision_ = self._decision()
        self._tune(rows, labels, weights)
        self._fit_labels(rows, labels, weights)
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
                number_of(name, getattr(self, name), low, open_end, words)
        if not callable(self.scoring) and self.scoring not in _SCORES:
            raise ValueError(f"scoring={self.scoring!r}: expected {', '.join(map(repr, _SCORES))} or a function")
        mapping = mapping_of(self.mapping, self.alpha, NO_MAP)
        if self.decision == "support" and (mapping in NO_MAP or not mapping.facts.sparse):  # type: ignore[union-attr]
            raise ValueError(
                f"decision='support': {self.mapping!r} is never 0; use decision='threshold' or a sparse map"
            )
        return mapping

    def _decision(self) -> str:
        if self.decision != "auto":
            return self.decision
        return "support" if self.mapping_ not in NO_MAP and self.mapping_.facts.sparse else "threshold"

    def _fit_labels(self, X: Any, labels: Any, weights: np.ndarray) -> np.ndarray:
        share, l2 = self._shares(weights, X.dtype)
        k = labels.shape[1]
        if self.mapping_ == "sigmoid":
            loss, curvature = losses.SigmoidLoss(labels, share), 0.25
        elif self.mapping_ == "zlpr":
            loss, curvature = losses.ZlprLoss(labels, share), 1.0 / (k + 1)
        else:
            loss, curvature = losses.LabelLoss(self.mapping_, labels, share), losses.bend(self.mapping_, k)
        shift_invariant = self.mapping_ not in NO_MAP and self.mapping_.facts.shift_invariant
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
        for train, test in ((np.sort(train), np.sort(test)) for train, test in splits):
            part = self.__class__(**{**self.get_params(deep=False), "warm_start": False, "verbose": 0})
            part.mapping_ = self.mapping_
            with warnings.catch_warnings():  # the last fit, on all rows, warns
                warnings.simplefilter("ignore", ConvergenceWarning)
                part._fit_labels(only(X, train), labels[train], weights[train])
            parts.append((test, np.asarray(only(X, test) @ part.coef_.T) + part.intercept_))
        rows = np.concatenate([test for test, _ in parts])
        z, truth = np.concatenate([z for _, z in parts]), labels[rows]
        score: Any = self.scoring if callable(self.scoring) else _SCORES[self.scoring]
        scores = [float(score(truth, sparse.csr_matrix(self._chosen(z, level).astype(np.int64)))) for level in grid]
        setattr(self, f"{name}_", grid[int(np.argmax(scores))])
        self.cv_results_ = {name: np.asarray(grid), "score": np.asarray(scores)}

    def _grid(self, name: str, k: int) -> list[float]:
        if self.grid is not None:
            grid = [number_of("grid", g, 0.0, name == "scale", "numbers that a " + name + " can be") for g in self.grid]
            if not grid:
                raise ValueError("grid is empty; give the numbers to try, or None for the usual ones")
            return grid
        if name == "scale":
            return [1.0 + 0.5 * i for i in range(9)]
        if self.mapping_ in NO_MAP:
            return [0.05 * i for i in range(1, 11 if self.mapping_ == "sigmoid" else 20)]
        return [i / k for i in range(1, 11) if i < k] or [0.5]

    # -- use ------------------------------------------------------------------------------------------------------------------

    def _chosen(self, z: np.ndarray, level: float) -> np.ndarray:
        """Which labels the scores mean, boolean; `level` is the scale or the threshold."""
        if self.decision_ == "support":
            return apply(self.mapping_, z * z.dtype.type(level)) > 0
        return self._probabilities(z) > level

    def _probabilities(self, z: np.ndarray) -> np.ndarray:
        return losses.sigmoid(z) if self.mapping_ in NO_MAP else apply(self.mapping_, z)

    def predict(self, X: Rows) -> Any:
        """The labels of each row of X as an indicator matrix, dense or sparse (CSR) as the y of `fit` was."""
        return super().predict(X)

    def decision_function(self, X: Rows) -> np.ndarray:
        """The scores of the rows of X before the map, [rows, labels]."""
        return super().decision_function(X)

    def predict_proba(self, X: Rows) -> np.ndarray:
        """map(scores) of the rows of X, [rows, labels]: the share of each label in its row; of "sigmoid" the probability of each label.

        For "zlpr" it is the sigmoid of the score, above 1/2 where the loss wants the label, and not a calibrated probability.
        """
        return super().predict_proba(X)

    def predict_log_proba(self, X: Rows) -> np.ndarray:
        """The logarithm of `predict_proba`, -inf where it is exactly 0."""
        return super().predict_log_proba(X)

    def _decided(self, z: np.ndarray) -> np.ndarray:
        return super()._decided(z) if self.indicator_ is None else z

    def _probable(self, z: np.ndarray) -> np.ndarray:
        return super()._probable(z) if self.indicator_ is None else self._probabilities(z)

    def _log_probable(self, z: np.ndarray) -> np.ndarray:
        if self.indicator_ is not None and self.mapping_ in NO_MAP:
            return -np.logaddexp(0, -z)
        if self.indicator_ is None:
            return super()._log_probable(z)
        with quiet(z):
            return log_apply(self.mapping_, z)

    def _predicted(self, z: np.ndarray) -> Any:
        if self.indicator_ is None:
            return super()._predicted(z)
        chosen = self._chosen(z, self.scale_ if self.decision_ == "support" else self.threshold_).astype(np.int64)
        return sparse.csr_matrix(chosen) if self.indicator_ == "sparse" else chosen

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags


# -- targets, weights, scores -------------------------------------------------------------------------------------------------


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
