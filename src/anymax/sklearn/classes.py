"""`MappingClassifier`: one class per row."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from collections.abc import Mapping as Mapped
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from scipy import sparse
from sklearn.base import ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import accuracy_score
from sklearn.utils import check_consistent_length, check_random_state, column_or_1d
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from .._array import quiet
from .._core.mapping import Mapping
from .._core.tables import documented_like
from ..functional import apply, log_apply
from . import losses
from .blocks import Blocks, here, is_dask, lazily, names_of, parts
from .objective import Linear
from .parameters import MapParameters, mapping_of, number_of, threads
from .solvers import descend
from .stochastic import Stream
from .targets import balanced, not_below_zero, total_of

if TYPE_CHECKING:
    from typing import Self, TypeAlias

    from numpy.typing import ArrayLike

    Rows: TypeAlias = "ArrayLike | sparse.spmatrix | sparse.sparray"


class MappingClassifier(ClassifierMixin, MapParameters):
    """A linear classifier: p = map(X W + b), trained with the map's loss and an L2 penalty.

    With the default map it is `sklearn.linear_model.LogisticRegression`. Use it when you want another loss, or probabilities that can be
    exactly 0. It minimises `C sum_i w_i loss(y_i, x_i W + b) + ||W||^2 / 2`. If the map has a Fenchel-Young
    loss, this is the loss, and the problem is convex. For Taylor softmax, sigsoftmax and ratio maps the loss is -log p, which is not
    convex. With two classes and a shift-invariant map there is one column of scores z, and p = map((0, z)).

    Parameters
    ----------
    mapping : str or Mapping, default="softmax"
        A map such as `anymax.Sparsemax()`, or its name: "softmax", "sparsemax", "entmax15", "entmax", "normmax", ...
        The page "scikit-learn" of the documentation says when a sparse map pays.
    alpha : float, default=None
        Replaces the alpha of the map (entmax, normmax). You can also set parameters of the map like those of a nested estimator:
        `set_params(mapping__alpha=1.3)`, or in the grid of a search.
    C : float, default=1.0
        The weight of the loss relative to the penalty; `inf` means no penalty.
    l2 : float, default=None
        Used instead of C: minimise mean loss + `l2 / 2 ||W||^2`. Equal to `C = 1 / (l2 * sum(sample_weight))`.
    tol : float, default=1e-4
        Training ends when no entry of the gradient of the mean objective exceeds this.
    max_iter : int, default=1000
        The maximal number of iterations; a `ConvergenceWarning` says if they were not enough.
    fit_intercept : bool, default=True
        Whether there is an intercept b; it is not penalised.
    class_weight : dict, "balanced" or None, default=None
        A factor for the rows of each class; "balanced" gives all classes the same total weight.
    solver : {"lbfgs", "lbfgs-scipy"}, default="lbfgs"
        "lbfgs" is L-BFGS with a preconditioner from the features; "lbfgs-scipy" is SciPy's L-BFGS-B.
    warm_start : bool, default=False
        Start from the coefficients of the last fit.
    verbose : int, default=0
        1 prints a line for each iteration.
    random_state : int, RandomState or None, default=0
        Seeds the order in which `partial_fit` visits its rows; `fit` does not use it.
    penalty : "l2" or None, default="l2"
        None means no penalty, as does C=inf.
    n_jobs : int or None, default=None
        The maximal number of BLAS threads during training; -1 means one per processor, None leaves it to BLAS.
    smoothing : float, default=0.0
        The weight of the uniform distribution that is mixed into `predict_proba`. With a sparse map the true class can have the
        probability 0, which makes the log-loss infinite; 0.01 keeps it finite and changes no prediction.

    Attributes
    ----------
    classes_ : array [classes]
        The classes, sorted.
    coef_ : array [classes or 1, features]
        W, one row for each class; only one for two classes if the map is shift-invariant.
    intercept_ : array [classes or 1]
        b; zeros without an intercept.
    n_iter_ : array [1]
        The number of iterations; after `partial_fit` the number of steps of all its calls.
    weight_ : float
        The total weight of the training rows.
    mapping_ : Mapping
        The map given by `mapping` and `alpha`.
    n_features_in_ : int
        The number of features seen by `fit`.
    feature_names_in_ : array [features]
        Their names, if X had names.

    Examples
    --------
    >>> import numpy as np
    >>> X, y = np.array([[0.0], [1.0], [2.0], [3.0]]), np.array(["a", "a", "b", "b"])
    >>> model = MappingClassifier("entmax15", C=100).fit(X, y)
    >>> model.predict_proba([[0.0], [1.5]]).round(3)
    array([[1. , 0. ],
           [0.5, 0.5]])
    >>> model.predict([[3.0]]).tolist()
    ['b']
    """

    classes_: np.ndarray
    coef_: np.ndarray
    intercept_: np.ndarray
    n_iter_: np.ndarray
    weight_: float
    n_features_in_: int
    feature_names_in_: np.ndarray
    _usual_c: ClassVar[float | str] = 1.0  # the default C, for which l2 or penalty=None can be given
    mapping_: Any  # a Mapping; a string for the two baselines of `MultiLabelMappingClassifier`, which have no map

    def __init__(
        self,
        mapping: str | Mapping = "softmax",
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
        self.random_state = random_state
        self.penalty = penalty
        self.n_jobs = n_jobs
        self.smoothing = smoothing

    # -- training -------------------------------------------------------------------------------------------------------------

    def fit(self, X: Rows, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train the classifier.

        Parameters
        ----------
        X
            The features, [rows, features], in fp32 or fp64: an array, a data frame, or a sparse matrix.
        y
            The class of each row, as numbers or strings; at least two different classes.
        sample_weight
            A factor of at least 0 for each row, 1 by default.

        Returns
        -------
        Self
            The classifier itself.
        """
        self.mapping_ = self._check()
        rows, classes = self._data(X, y)
        self._fit_classes(rows, classes, sample_weight)
        return self

    def _check(self) -> Any:
        """Check all parameters and return the map."""
        self._check_training()
        return mapping_of(self.mapping, self.alpha)

    def _check_training(self) -> None:
        if self._usual_c != self.C:
            number_of("C", self.C, "a positive number, or inf for no penalty", zero=False)
        if self.l2 is not None:
            number_of("l2", self.l2, "a number from 0, or None to use C")
            if self._usual_c != self.C:
                raise ValueError(f"C={self.C!r} and l2={self.l2!r} say the same thing in two ways; give one of them")
        number_of("tol", self.tol, "a number from 0")
        if self.penalty not in ("l2", None):
            raise ValueError(f"penalty={self.penalty!r}: expected 'l2', or None for no penalty; there is no other here")
        if self.penalty is None and (self._usual_c != self.C or self.l2 is not None):
            raise ValueError(
                f"penalty=None with C={self.C!r} and l2={self.l2!r}: without a penalty there is no weight of it; leave them out"
            )
        self._uniform_weight()
        if not isinstance(self.max_iter, Integral) or self.max_iter < 0:
            raise ValueError(f"max_iter={self.max_iter!r}: expected an integer from 0")
        if self.solver not in ("lbfgs", "lbfgs-scipy"):
            raise ValueError(f"solver={self.solver!r}: expected 'lbfgs' or 'lbfgs-scipy'")

    def _data(self, X: Any, y: Any, reset: bool = True) -> tuple[Any, Any]:
        """X as an array, a CSR matrix or `Blocks`, and y in memory."""
        if is_dask(X):
            y = validate_data(self, "no_validation", here(y), multi_output=True)
            validate_data(self, names_of(X), skip_check_array=True, reset=reset)
            blocks = Blocks.of(X)
            check_consistent_length(blocks, y)
            return blocks, y
        X, y = validate_data(
            self, X, here(y), accept_sparse="csr", dtype=[np.float64, np.float32], accept_large_sparse=True,
            multi_output=True, y_numeric=False, reset=reset,
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
            raise ValueError(f"y has one class, {self.classes_.tolist()[0]!r}; a classifier needs at least 2 classes")
        weights = self._row_weights(X, sample_weight)
        if isinstance(self.class_weight, str) and self.class_weight == "balanced":
            factors = balanced(np.bincount(index, weights, k), weights.sum())
        else:
            factors = self._factors(y)
        share, l2 = self._shares(weights * factors[index], X.dtype)
        loss = self._loss_of(losses.IndexLoss, index.astype(np.int64), share)
        self._descend(X, loss, l2, self._columns(), losses.bend(self.mapping_, k), share)

    def _row_weights(self, X: Any, sample_weight: Any) -> np.ndarray:
        return _check_sample_weight(here(sample_weight), X, dtype=np.float64, ensure_non_negative=True)

    def _factors(self, y: np.ndarray) -> np.ndarray:
        """The factors that a dict gives the classes; y holds each class."""
        factors = compute_class_weight(self.class_weight, classes=self.classes_, y=y)
        return not_below_zero(self.class_weight, factors)

    def _columns(self) -> int:
        """The number of scores of a row: one for two classes, if the map depends on their difference alone."""
        k = len(self.classes_)
        return 1 if k == 2 and self.mapping_.facts.shift_invariant else k

    def _loss_of(self, kind: Callable[..., losses.Loss], target: Any, share: np.ndarray) -> losses.Loss:
        loss = kind(self.mapping_, target, share)
        return losses.ZeroFirst(loss) if self._columns() < len(self.classes_) else loss

    def _shares(self, weights: np.ndarray, dtype: Any) -> tuple[np.ndarray, float]:
        total = self.weight_ = total_of(weights)
        return (weights / total).astype(dtype), self._penalty(total)

    def _penalty(self, weight: float) -> float:
        """The l2 of the mean objective for rows of this total weight."""
        if self.penalty is None:
            return 0.0
        return float(self.l2) if self.l2 is not None else 1.0 / (self._strength() * weight)

    def _strength(self) -> float:
        """C as a number."""
        return float(self.C)

    def _descend(
        self, X: Any, loss: Any, l2: float, k: int, curvature: float, share: np.ndarray, near: np.ndarray | None = None
    ) -> None:
        """Minimise the loss and keep the coefficients; `near` is a W to start from if there is none of a last fit."""
        start = self._start(X.shape[1], k, X.dtype, bool(self.warm_start), near)
        with threads(self.n_jobs):
            model = Linear(X, loss, l2, start, bool(self.fit_intercept), curvature, share)
            iterations, complaint = descend(model, self.solver, self.tol, self.max_iter, self.verbose)
        self._end(model.w, iterations, complaint, 5)

    def _end(self, w: np.ndarray, iterations: int, complaint: str | None, depth: int) -> None:
        if complaint is not None:
            warnings.warn(complaint, ConvergenceWarning, stacklevel=depth)
        vars(self).pop("stream_", None)
        self._keep(w, iterations)

    def _start(self, d: int, k: int, dtype: Any, warm: bool, near: np.ndarray | None = None) -> np.ndarray:
        """The W to start from, [features, classes] and a row of intercepts if there are any: the last coefficients, `near`, or zeros."""
        start = np.zeros((d + bool(self.fit_intercept), k), dtype)
        if warm and hasattr(self, "coef_"):
            if self.coef_.shape != (k, d):
                raise ValueError(
                    f"warm_start: the last fit had coefficients of shape {self.coef_.shape}, this one needs {(k, d)}; "
                    "set warm_start=False or fit a clone"
                )
            start[:d] = self.coef_.T
            if self.fit_intercept:
                start[d] = self.intercept_
        elif near is not None:
            start[: len(near)] = near
        return start

    def _shifts(self) -> bool:
        """Whether adding a constant to all scores of a row leaves the loss unchanged."""
        return self.mapping_.facts.shift_invariant

    def _keep(self, w: np.ndarray, iterations: int) -> None:
        k, intercept = w.shape[1], bool(self.fit_intercept)
        d = len(w) - intercept
        if k > 1 and self._shifts():  # a shift common to all classes changes no loss and only adds to the penalty
            w = w - w.mean(axis=1, keepdims=True)
        self.coef_ = np.ascontiguousarray(w[:d].T)
        self.intercept_ = w[d].copy() if intercept else np.zeros(k, w.dtype)
        self.n_iter_ = np.array([iterations], np.int32)

    # -- training, a few rows at a time --------------------------------------------------------------------------------------

    @documented_like(fit)
    def partial_fit(
        self, X: Rows, y: ArrayLike, classes: ArrayLike | None = None, sample_weight: ArrayLike | None = None
    ) -> Self:
        """Train on more rows, starting from where the last call, or `fit`, ended.

        The rows are visited once, in small batches and in random order. There is no learning rate to tune: a step is the distance
        covered so far over the root of the summed squared gradients, with each feature scaled by its spread. The result approaches
        that of `fit` on all rows the more often they are seen. C counts the rows of all calls; if you pass the same rows repeatedly,
        use l2, which does not depend on their number.

        Parameters
        ----------
        X
            The features, [rows, features], as for `fit`.
        y
            The class of each row.
        classes
            All classes that y will ever contain; required in the first call, optional later.
        """
        first = not hasattr(self, "classes_")
        self.mapping_ = self._check()
        rows, y = self._data(X, y, reset=first)
        self._stream_classes(rows, y, classes, sample_weight, first)
        return self

    def _stream_classes(self, X: Any, y: Any, classes: Any, sample_weight: Any, first: bool) -> None:
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        known = self._known_classes(classes, first)
        stray = y[~np.isin(y, known)]
        if len(stray):
            raise ValueError(
                f"y holds the class {stray[:1].tolist()[0]!r}, which the first call of partial_fit did not name; name all classes there: "
                "partial_fit(X, y, classes=[...])"
            )
        self.classes_ = known
        index = np.searchsorted(known, y).astype(np.int64)
        weights = self._row_weights(X, sample_weight)
        self._no_balance()
        self._stream(
            X, weights * self._factors(known)[index],
            lambda rows, share: self._loss_of(losses.IndexLoss, index[rows], share), self._columns(),
        )  # fmt: skip

    def _known_classes(self, classes: Any, first: bool) -> np.ndarray:
        if first and classes is None:
            raise ValueError(
                "the first call of partial_fit needs all classes that will ever come: partial_fit(X, y, classes=[...])"
            )
        known = self.classes_ if classes is None else np.unique(np.asarray(classes))
        if len(known) < 2:
            raise ValueError(f"classes={classes!r} has one class; a classifier needs at least 2 classes")
        if not first and not np.array_equal(known, self.classes_):
            raise ValueError(
                f"classes={classes!r} are not those of the first call, {self.classes_!r}; leave them out from the second on"
            )
        return known

    def _no_balance(self) -> None:
        if isinstance(self.class_weight, str):
            raise ValueError(
                f"class_weight={self.class_weight!r} is found from all rows at once, which partial_fit never sees; give a dict of "
                "class: weight, or sample_weight"
            )

    def _stream(
        self, X: Any, weights: np.ndarray, loss_of: Callable[..., Any], k: int, seen: Callable[..., Any] | None = None
    ) -> None:
        stream: Stream | None = vars(self).get("stream_")
        dtype = X.dtype if stream is None else self.coef_.dtype
        if stream is None:
            start = self._start(X.shape[1], k, X.dtype, True)
            self.stream_ = stream = Stream(start, bool(self.fit_intercept), vars(self).get("weight_", 0.0))
        seed = check_random_state(self.random_state).randint(2**31)
        with threads(self.n_jobs):
            for rows, x in parts(X):
                order = np.random.default_rng([seed, stream.steps]).permutation(len(rows))
                stream.go(
                    x, weights[rows], lambda at, share, rows=rows: loss_of(rows[at], share), self._penalty, order,
                    None if seen is None else lambda at, z, rows=rows: seen(rows[at], z),
                )  # fmt: skip
        self.weight_ = stream.weight
        self._keep(stream.mean_w.astype(dtype), stream.steps)

    # -- use ------------------------------------------------------------------------------------------------------------------

    def _answer(self, X: Any, of_scores: Callable[[np.ndarray], Any]) -> Any:
        """`of_scores(z)` for the scores z of X, [rows, rows of coef_]; for Dask's X a lazy Dask array."""
        check_is_fitted(self)
        if is_dask(X):
            validate_data(self, names_of(X), skip_check_array=True, reset=False)
            return lazily(X, partial(self._of_block, of_scores), self.coef_.dtype)
        X = validate_data(self, X, accept_sparse="csr", dtype=[np.float64, np.float32], reset=False)
        return self._of_block(of_scores, X)

    def _of_block(self, of_scores: Callable[[np.ndarray], Any], X: Any) -> Any:
        return of_scores(np.asarray(X @ self.coef_.T) + self.intercept_)

    def decision_function(self, X: Rows) -> np.ndarray:
        """The scores of the rows of X, before the map, [rows, classes]; for two classes the second minus the first, [rows]."""
        return self._answer(X, self._decided)

    def predict_proba(self, X: Rows) -> np.ndarray:
        """The probabilities of the classes for the rows of X, [rows, classes], in the order of `classes_`.

        They can be exactly 0 if the map is sparse and there is no smoothing.
        """
        return self._answer(X, self._probable)

    def predict_log_proba(self, X: Rows) -> np.ndarray:
        """The logarithms of the probabilities for the rows of X, [rows, classes]; -inf where the probability is exactly 0."""
        return self._answer(X, self._log_probable)

    def predict(self, X: Rows) -> np.ndarray:
        """The most probable class of each row of X, [rows]; in a tie the first in `classes_`."""
        return self._answer(X, self._predicted)

    def score(self, X: Rows, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """The accuracy of `predict`: the share of the rows of X whose predicted class, or set of labels, equals y."""
        return accuracy_score(here(y), here(self.predict(X)), sample_weight=here(sample_weight))

    def _decided(self, z: np.ndarray) -> np.ndarray:
        if z.shape[1] == 1:
            return z[:, 0]
        return z[:, 1] - z[:, 0] if len(self.classes_) == 2 else z

    def _uniform_weight(self) -> float:
        """The weight of the uniform distribution."""
        return number_of("smoothing", self.smoothing, "a number from 0 to 1", most=1.0)

    def _smooth(self, p: np.ndarray, classes: int) -> np.ndarray:
        weight = self._uniform_weight()
        factor = 1.0 - weight
        return p if factor == 1.0 else p * p.dtype.type(factor) + p.dtype.type(weight / classes)

    def _probable(self, z: np.ndarray) -> np.ndarray:
        return self._smooth(apply(self.mapping_, _all_classes(z)), len(self.classes_))

    def _log_probable(self, z: np.ndarray) -> np.ndarray:
        if self.smoothing:
            return np.log(self._probable(z))
        z = _all_classes(z)
        with quiet(z):
            return log_apply(self.mapping_, z)

    def _predicted(self, z: np.ndarray) -> Any:
        z = _all_classes(z)
        best = z if self.mapping_.facts.monotone else apply(self.mapping_, z)
        return self.classes_[np.argmax(best, axis=1)]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


def _all_classes(z: np.ndarray) -> np.ndarray:
    return losses.zero_first(z) if z.shape[1] == 1 else z
