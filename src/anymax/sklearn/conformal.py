"""`SupportConformalClassifier`: prediction sets that contain the true class with a chosen probability."""

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
from .._core.tables import documented_like
from .classes import MappingClassifier
from .levels import entering
from .losses import exponent_of, zero_first
from .parameters import MapParameters, mapping_of, number_of

if TYPE_CHECKING:
    from typing import Self

    from numpy.typing import ArrayLike

    from .classes import Rows


class SupportConformalClassifier(ClassifierMixin, MapParameters):
    """Prediction sets with guaranteed coverage: the support of sparsemax or entmax at a calibrated temperature.

    Use it when you need "the true class is one of these, nine times out of ten" rather than a single class. This is split conformal
    prediction: on rows that the classifier was not trained on, it finds the smallest temperature T at which the support of
    `map(scores / T)` contains the true class often enough. If those rows and new rows are exchangeable, the set of a new row contains
    its class with a probability of at least `coverage`, for any classifier. No set is empty. Campos et al. 2025 (arXiv 2502.14773).

    Parameters
    ----------
    estimator : classifier, default=None
        Any scikit-learn classifier with `decision_function` (one score per class) or `predict_proba`; None means
        `MappingClassifier("softmax")`. A clone of it is trained on part of the rows. Pass a trained classifier as
        `sklearn.frozen.FrozenEstimator(model)`: `fit` then calibrates with all its rows, which must not be training rows.
    mapping : str or Mapping, default="entmax15"
        Sparsemax, or entmax with alpha above 1, or its name. With alpha near 1 a class is judged by how far the best score exceeds its
        own, with alpha = 2 by the sum over all better scores.
    alpha : float, default=None
        Replaces the alpha of entmax; `set_params(mapping__alpha=1.3)` sets it in the map.
    coverage : float, default=0.9
        The least probability that a set contains the true class, above 0 and below 1.
    calibration : float or int, default=0.3
        The share or the number of the rows of `fit` that calibrate instead of train.
    random_state : int, RandomState or None, default=0
        Seeds the choice of these rows.

    Attributes
    ----------
    classes_ : array [classes]
        The classes, sorted: those of y, or those of a frozen classifier.
    estimator_ : classifier
        The trained classifier.
    temperature_ : float
        The calibrated temperature. 0 means that the best class alone is enough; inf means that every set contains all classes, as when
        too few rows calibrate for this coverage.
    calibration_scores_ : array [rows that calibrate]
        The temperature above which the class of each of these rows is in the support, in ascending order.
    mapping_ : Mapping
        The map given by `mapping` and `alpha`.
    n_features_in_ : int
        The number of features seen by `fit`.
    feature_names_in_ : array [features]
        Their names, if X had names.

    Examples
    --------
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

    @documented_like(MappingClassifier.fit)
    def fit(self, X: Rows, y: ArrayLike) -> Self:
        """Train the classifier on part of the rows, and calibrate on the others.

        Parameters
        ----------
        X
            The rows, in any form that the classifier accepts.
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
        rows = self._trained(x, target)
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

    def _trained(self, x: Any, target: np.ndarray) -> np.ndarray:
        """Set `estimator_` and `classes_`; return the rows that are left to calibrate, which are all for a frozen classifier."""
        if isinstance(self.estimator, FrozenEstimator):
            self.estimator_, self.classes_ = self.estimator, np.asarray(self.estimator.classes_)
            strange = target[~np.isin(target, self.classes_)]
            if len(strange):
                raise ValueError(
                    f"y holds the class {strange[:1].tolist()[0]!r}, which the frozen classifier does not know; leave such rows out, and "
                    "the coverage is that of the classes that it knows"
                )
            return np.arange(len(target))
        self.classes_ = np.unique(target)
        order = check_random_state(self.random_state).permutation(len(target))
        held = self._held(len(target))
        train = np.sort(order[held:])
        inner: Any = clone(self._inner())
        self.estimator_ = inner.fit(_safe_indexing(x, train), target[train])
        return np.sort(order[:held])

    def predict_set(self, X: Rows, coverage: float | None = None) -> np.ndarray:
        """The set of each row: the best class, and as many others as the coverage needs.

        It is the support of the map at a temperature just above the calibrated one.

        Parameters
        ----------
        X
            The rows, as for `fit`.
        coverage
            Replaces the classifier's coverage, above 0 and below 1; no new fit is needed.

        Returns
        -------
        np.ndarray
            A boolean array [rows, classes], in the order of `classes_`.
        """
        check_is_fitted(self)
        known = self.temperature_ if coverage is None else self._temperature(_coverage(coverage))
        c: Any = exponent_of(self.mapping_)  # a number, as `_map` has seen
        return entering(c, self._checked(X)) <= known

    def predict(self, X: Rows) -> np.ndarray:
        """The class with the largest score for each row of X, [rows]; in a tie the first in `classes_`. The set contains it."""
        z = self._checked(X)  # before `classes_`, which only a fitted classifier has
        return self.classes_[np.argmax(z, axis=1)]

    def decision_function(self, X: Rows) -> np.ndarray:
        """The scores behind the sets, [rows, classes]; for two classes the second minus the first, [rows].

        They are the classifier's `decision_function`, or the logarithms of its `predict_proba` if it has no `decision_function`.
        """
        z = self._checked(X)
        return z[:, 1] - z[:, 0] if z.shape[1] == 2 else z

    # -- helpers -------------------------------------------------------------------------------------------------------------

    def _inner(self) -> Any:
        return MappingClassifier("softmax") if self.estimator is None else self.estimator

    def _map(self) -> tuple[Mapping, float]:
        misses = isinstance(self.alpha, Real) and 0 < self.alpha < 1
        hint = f"; for {100 * self.alpha:g} % misses write coverage={1 - self.alpha:g}" if misses else ""  # type: ignore[operator]
        try:
            found = mapping_of(self.mapping, self.alpha)
        except ValueError as error:
            raise ValueError(f"{error}{hint}") from None
        assert isinstance(found, Mapping)
        c = exponent_of(found)
        if c is None or c <= 0:
            raise ValueError(
                f"mapping={self.mapping!r}: expected sparsemax, or entmax with alpha above 1 ('entmax15', Entmax(1.3)); the support of "
                f"another map is not known in closed form, or is always all classes{hint}"
            )
        return found, c

    def _held(self, n: int) -> int:
        """The number of rows that calibrate."""
        calibration, words = self.calibration, "a share above 0 and below 1, or a number of rows from 1"
        share, rows = number_of("calibration", calibration, words, zero=False), is_int(number(calibration))
        if share >= 1 and not rows:
            raise ValueError(f"calibration={calibration!r}: expected {words}")
        held = int(calibration) if rows else max(1, round(n * share))
        if held >= n:
            raise ValueError(
                f"calibration={calibration!r} with n_samples={n}: no row is left to train the classifier; give more rows, or a trained "
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
        """The scores, [rows, classes]; -inf for a class that no training row had."""
        model, inner = self.estimator_, np.asarray(self.estimator_.classes_)
        decide, probable = getattr(model, "decision_function", None), getattr(model, "predict_proba", None)
        if decide is not None:
            z = np.asarray(decide(X))
            z = zero_first(z[:, None]) if z.ndim == 1 and len(inner) == 2 else z
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
    """The coverage as the decimal number that was written, so that 0.9 * 10 is exactly 9."""
    if not (isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) < 1):
        raise ValueError(f"coverage={value!r}: expected a number above 0 and below 1")
    return Fraction(repr(float(value)))


def _rank(n: int, coverage: Fraction) -> int:
    """The rank, from 1, of the temperature among n ascending calibration scores; n + 1 if there is no such score."""
    return math.ceil((n + 1) * coverage)
