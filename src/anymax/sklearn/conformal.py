"""`SupportConformalClassifier`: sets of classes that hold the true one as often as asked."""

from __future__ import annotations

import math
import warnings
from fractions import Fraction
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.base import ClassifierMixin, clone, is_classifier
from sklearn.frozen import FrozenEstimator
from sklearn.utils import _safe_indexing, check_random_state, column_or_1d, get_tags, indexable
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _num_samples, assert_all_finite, check_is_fitted, validate_data

from .._array import is_int, number
from .._core.mapping import Mapping
from .classes import MappingClassifier
from .levels import entering, power_of
from .losses import pair
from .parameters import MapParameters, mapping_of, number_of

if TYPE_CHECKING:
    from typing import Self

    from numpy.typing import ArrayLike

    from .classes import Rows


class SupportConformalClassifier(ClassifierMixin, MapParameters):
    """Prediction sets with a coverage that is guaranteed: the support of sparsemax or entmax at a calibrated temperature.

    Use it where one class is not enough and "the true class is among these, nine times out of ten" is. Split conformal prediction: on
    rows that the classifier was not trained on it finds the least temperature at which the support of `map(scores / T)` holds the
    true class as often as asked. If those rows and new ones are exchangeable, the set of a new row holds its class with a probability
    of at least `coverage`, whatever the classifier. A set is never empty. Campos et al. 2025 (arXiv 2502.14773).

    Parameters
    ----------
    estimator : classifier, default=None
        Any classifier of scikit-learn's kind with `decision_function` (one score a class) or `predict_proba`; None is
        `MappingClassifier("softmax")`. A clone of it is trained on a part of the rows. One that is trained already is given as
        `sklearn.frozen.FrozenEstimator(model)`, and then all rows of `fit` calibrate: they must be others than it was trained on.
    mapping : str or Mapping, default="entmax15"
        Sparsemax, or entmax with alpha above 1, or its name. With alpha near 1 a class is judged by the lead of the best one over it, at 2
        by the sum of the leads of all better ones.
    alpha : float, default=None
        The alpha of entmax, in place of its own; `set_params(mapping__alpha=1.3)` sets that of the map.
    coverage : float, default=0.9
        How often a set is to hold the true class, above 0 and below 1.
    calibration : float or int, default=0.3
        The share of the rows of `fit`, or their number, that calibrate in place of training.
    random_state : int, RandomState or None, default=0
        Which rows these are.

    Attributes
    ----------
    classes_ : array [classes]
        The classes, sorted: those of the rows of `fit`; of a frozen classifier its own.
    estimator_ : classifier
        The trained classifier.
    temperature_ : float
        The calibrated temperature. 0 means that the best class alone is enough, and inf that there are too few rows to calibrate with
        for this coverage: every set holds all classes.
    calibration_scores_ : array [rows that calibrate]
        For each of these rows the temperature above which its class is in the support, in ascending order.
    mapping_ : Mapping
        The map that `mapping` and `alpha` meant.
    n_features_in_ : int
        The features seen by `fit`.
    feature_names_in_ : array [features]
        Their names, where X had names.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> y = rng.integers(0, 4, 600)
    >>> X = np.eye(4)[y] + 0.6 * rng.normal(size=(600, 4))
    >>> model = SupportConformalClassifier(coverage=0.95).fit(X[:400], y[:400])
    >>> sets = model.predict_set(X[400:])
    >>> sets.shape, sets.dtype, bool(sets.any(axis=1).all())
    ((200, 4), dtype('bool'), True)
    >>> bool(sets[np.arange(200), y[400:]].mean() > 0.9)
    True
    """

    classes_: np.ndarray
    estimator_: Any
    temperature_: float
    calibration_scores_: np.ndarray
    mapping_: Mapping
    n_features_in_: int
    feature_names_in_: np.ndarray

    def __init__(
        self,
        estimator: Any = None,
        *,
        mapping: str | Mapping = "entmax15",
        alpha: float | None = None,
        coverage: float = 0.9,
        calibration: float | int = 0.3,
        random_state: Any = 0,
    ) -> None:
        self.estimator = estimator
        self.mapping = mapping
        self.alpha = alpha
        self.coverage = coverage
        self.calibration = calibration
        self.random_state = random_state

    def fit(self, X: Rows, y: ArrayLike) -> Self:
        """Train the classifier on a part of the rows, and calibrate on the others.

        X: the rows, as the classifier takes them.
        y: the class of each row, numbers or strings, at least two of them.

        Returns the classifier itself.
        """
        self.mapping_, c = self._map()
        coverage = _coverage(self.coverage)
        if not is_classifier(self._inner()):
            raise TypeError(
                f"estimator={self.estimator!r} is no classifier; give one of scikit-learn's kind, with decision_function or predict_proba"
            )
        target: Any = column_or_1d(y, warn=True)
        check_classification_targets(target)
        assert_all_finite(target, input_name="y")
        x: Any = X
        validate_data(self, x, skip_check_array=True)
        x, target = indexable(x, target)
        rows = np.arange(len(target))
        if isinstance(self.estimator, FrozenEstimator):
            self.estimator_, self.classes_ = self.estimator, np.asarray(self.estimator.classes_)
            strange = target[~np.isin(target, self.classes_)]
            if len(strange):
                raise ValueError(
                    f"y holds the class {strange[:1].tolist()[0]!r}, which the frozen classifier does not know; leave such rows out, and "
                    "the coverage is that of the classes that it knows"
                )
        else:
            self.classes_ = np.unique(target)
            order = check_random_state(self.random_state).permutation(len(target))
            held = self._held(len(target))
            rows, train = np.sort(order[:held]), np.sort(order[held:])
            inner: Any = clone(self._inner())
            self.estimator_ = inner.fit(_safe_indexing(x, train), target[train])
        reached = entering(c, self._scores(_safe_indexing(x, rows)))
        index = np.searchsorted(self.classes_, target[rows])
        self.calibration_scores_ = np.sort(reached[np.arange(len(rows)), index])
        self.temperature_ = self._temperature(coverage)
        if math.isinf(self.temperature_) and _rank(len(rows), coverage) > len(rows):
            least = math.ceil(coverage / (1 - coverage))
            warnings.warn(
                f"{len(rows)} rows that calibrate are too few for a coverage of {float(coverage):g}, which needs {least}: every set holds "
                "all classes. Give more rows, a larger `calibration`, or a smaller `coverage`",
                UserWarning,
                stacklevel=2,
            )
        return self

    def predict_set(self, X: Rows, coverage: float | None = None) -> np.ndarray:
        """For each row the classes that are in its set: the best one, and as many more as the coverage takes.

        A class is in the set where its own temperature is at most the calibrated one: the support of the map just above that.

        X: the rows, as for `fit`.
        coverage: another one than that of the classifier, above 0 and below 1; it needs no new fit.

        Returns a boolean array [rows, classes], in the order of `classes_`.
        """
        check_is_fitted(self)
        known = self.temperature_ if coverage is None else self._temperature(_coverage(coverage))
        c = power_of(self.mapping_)
        assert c is not None
        return entering(c, self._checked(X)) <= known

    def predict(self, X: Rows) -> np.ndarray:
        """The class with the largest score for each row of X, [rows]; of ties the first in `classes_`. It is in the row's set."""
        best = np.argmax(self._checked(X), axis=1)
        return self.classes_[best]

    def decision_function(self, X: Rows) -> np.ndarray:
        """The scores that the sets are made from, [rows, classes]; for two classes that of the second over the first, [rows].

        They are the classifier's `decision_function`, or where it has none the logarithms of its `predict_proba`.
        """
        z = self._checked(X)
        return z[:, 1] - z[:, 0] if z.shape[1] == 2 else z

    # -- its parts ------------------------------------------------------------------------------------------------------------

    def _inner(self) -> Any:
        return MappingClassifier("softmax") if self.estimator is None else self.estimator

    def _map(self) -> tuple[Mapping, float]:
        found = mapping_of(self.mapping, self.alpha)
        assert isinstance(found, Mapping)
        c = power_of(found)
        if c is None:
            raise ValueError(
                f"mapping={self.mapping!r}: expected sparsemax, or entmax with alpha above 1 ('entmax15', Entmax(1.3)); the support of "
                "another map is not known in closed form, or is always all classes"
            )
        return found, c

    def _held(self, n: int) -> int:
        """How many rows calibrate."""
        given, words = self.calibration, "a share above 0 and below 1, or a number of rows from 1"
        share, rows = number_of("calibration", given, 0.0, True, words), is_int(number(given))
        if share >= 1 and not rows:
            raise ValueError(f"calibration={given!r}: expected {words}")
        held = int(given) if rows else max(1, round(n * share))
        if held >= n:
            raise ValueError(
                f"calibration={given!r} with n_samples={n}: no row is left to train the classifier; give more rows, or a trained "
                "classifier as sklearn.frozen.FrozenEstimator(model)"
            )
        return held

    def _temperature(self, coverage: Fraction) -> float:
        rank = _rank(len(self.calibration_scores_), coverage)
        return float(self.calibration_scores_[rank - 1]) if rank <= len(self.calibration_scores_) else math.inf

    def _checked(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        if getattr(X, "ndim", 2) == 1 and "n_features_in_" in vars(self):
            raise ValueError(
                f"X has one axis, [{_num_samples(X)}], expected [rows, features]. Reshape your data: X.reshape(1, -1) is one row"
            )
        validate_data(self, X, skip_check_array=True, reset=False)
        return self._scores(X)

    def _scores(self, X: Any) -> np.ndarray:
        """[rows, classes]; of a class that no training row had, -inf."""
        model, inner = self.estimator_, np.asarray(self.estimator_.classes_)
        decide, probable = getattr(model, "decision_function", None), getattr(model, "predict_proba", None)
        if decide is not None:
            z = np.asarray(decide(X))
            z = pair(z[:, None]) if z.ndim == 1 and len(inner) == 2 else z
        elif probable is not None:
            with np.errstate(divide="ignore"):
                z = np.log(np.asarray(probable(X)))
        else:
            raise TypeError(
                f"estimator={self.estimator!r} has neither decision_function nor predict_proba; a conformal set needs a score a class"
            )
        if z.shape != (_num_samples(X), len(inner)):
            raise ValueError(
                f"the scores of {type(model).__name__} have the shape {z.shape}, expected one for each of {len(inner)} classes; of a "
                "support vector machine decision_function_shape='ovr' gives them"
            )
        if np.isnan(z).any():
            raise ValueError(
                f"the scores of {type(model).__name__} hold NaN; a conformal set needs a number for each class"
            )
        if len(inner) == len(self.classes_):
            return z.astype(np.float64)
        out = np.full((len(z), len(self.classes_)), -np.inf)
        out[:, np.searchsorted(self.classes_, inner)] = z
        return out

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags = get_tags(self._inner()).input_tags
        return tags


def _coverage(value: Any) -> Fraction:
    """Exactly the decimal number that was written: 0.9 of 10 is 9, and no more."""
    ok = isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) < 1
    if not ok:
        raise ValueError(f"coverage={value!r}: expected a number above 0 and below 1")
    return Fraction(repr(float(value)))


def _rank(n: int, coverage: Fraction) -> int:
    """Which of n calibration scores, in ascending order from 1, is the temperature; n + 1 is none of them."""
    return math.ceil((n + 1) * coverage)
