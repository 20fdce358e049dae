"""`MultiLabelMappingClassifier`: a set of labels per row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Mapping as Mapped
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from scipy import sparse

from .._core.mapping import Mapping
from .._core.tables import documented_like
from . import losses
from .blocks import only
from .classes import MappingClassifier
from .levels import SCORES
from .parameters import NO_MAP, mapping_of, number_of
from .sets import WEIGHTS
from .targets import indicator, label_weights, one_a_row, refuse_sets, total_of
from .tuning import PENALTY, LabelTuning

if TYPE_CHECKING:
    from typing import Self

    from numpy.typing import ArrayLike

    from .classes import Rows


_LAST = 1000  # rows whose predictions `partial_fit` remembers


class MultiLabelMappingClassifier(LabelTuning):
    """A linear classifier that predicts a set of labels for each row.

    Use it for rows that may have several labels, or none. By default each label has a logistic regression of its own, and the sets of
    the training rows are known: a known set replaces the labels above a threshold if it is worth about as much. With a map, the target
    of a row is the uniform distribution over its labels, `y / sum(y)`, where y is an indicator matrix [rows, labels], dense or sparse. A
    row without labels belongs to an extra class "none", whose score is 0; if "none" is the most probable class, the empty set is
    predicted. Otherwise a label is predicted if its probability is above 0, or above a threshold; the scale of the scores or the
    threshold is tuned by cross-validation. Martins and Astudillo 2016, section 4.2. (If y holds one class per row, it works as
    `MappingClassifier`.)

    Parameters
    ----------
    alpha, l2, tol, max_iter, fit_intercept, class_weight, solver, warm_start, verbose
        As in `MappingClassifier`.
    C : float or "cv", default="cv"
        The weight of the loss relative to the penalty. "cv" is 0.3; if the decision is "sets", it is 0.3 or 1, whichever tunes better.
    penalty, n_jobs, smoothing : as in `MappingClassifier`
        The class weight of a row is the mean of its labels' weights. Smoothing changes `predict_proba`, but no predicted set.
    mapping : str or Mapping, default="auto"
        A map or its name, or one of two baselines that have no map and train on every row: "sigmoid", a logistic regression
        for each label, and "zlpr", the softmax loss of `anymax.multilabel_softmax_loss`, Su et al. 2022. "auto" is "sigmoid", or
        "entmax15" if y holds one class per row, or you give decision="support", a `scale` or `none`.
    decision : {"auto", "support", "threshold", "sets"}, default="auto"
        "support": the labels are those with `map(scale * scores) > 0`; "threshold": those with `map(scores) > threshold`. "sets", for
        "sigmoid": the labels above the threshold, or a set that a training row has. A set is worth the sum of its labels' scores
        over the threshold, and it may count how much more often it occurs than by chance; the best set is taken if it is worth at most
        a slack less than the labels above the threshold. "auto": "support" for a sparse map; "sets" if `mapping`, `threshold`, `grid` and
        `scoring` are left as they are, but not in `partial_fit`; else "threshold".
    threshold : float or "cv", default="cv"
        From 0 to 1. "cv" tunes it by cross-validation on the training rows, over all thresholds that change a decision.
    scale : float or "cv", default="cv"
        The factor of the scores if the decision is "support": the larger, the fewer labels. "cv" tunes it in the same way.
    none : bool or "auto", default="auto"
        For a map, whether to add the class "none", which has the remaining probability and predicts the empty set. "auto" adds it if a
        training row has no label, and always in `partial_fit`. Without it, rows without labels are left out.
    grid : sequence of numbers, default=None
        The values that "cv" tries, instead of all that change a decision.
    scoring : {"auto", "f1_micro", "f1_macro", "f1_samples", "f1_of_means", "accuracy"} or callable(y_true, y_pred), default="auto"
        The score that "cv" maximises over all rows, each predicted by a model that did not see it. "auto" is "f1_micro", and for the
        decision "sets" micro-F1 plus a third of "accuracy"; that decision also takes these two. "accuracy" is the share of rows whose
        set is exactly right. "f1_of_means" is the harmonic mean of the labels' mean precision and mean recall, the "macro-F1" of Martins
        and Astudillo. A function is tried at 200 values at most.
    cv : int or splitter, default=3
        The number of folds, a scikit-learn splitter, or pairs of rows that train and rows that test, as indices or masks. Rows of
        weight 0 are left out; all others count alike in what is tuned.
    random_state : int or None, default=0
        Seeds the shuffling of the rows before the split, if cv is an int, and in `partial_fit`.

    Attributes
    ----------
    decision_ : str
        "support", "threshold" or "sets"; "argmax" if y held one class per row.
    threshold_ : float
        The threshold, if the decision is "threshold" or "sets".
    rule_ : object
        Threshold, lift, slack and known sets, if the decision is "sets".
    scale_ : float
        The scale, if the decision is "support".
    none_ : bool
        Whether there is a class "none".
    C_ : float
        The number that C is, or was tuned to; with `l2` or penalty=None nothing uses it.
    cv_results_ : dict
        The values that "cv" tried, or about 200 of them with the best one, and the score of each.
    And those of `MappingClassifier`
        `classes_` holds the column numbers of y.

    Examples
    --------
    >>> import numpy as np
    >>> X = np.repeat(np.eye(3), 8, axis=0)
    >>> Y = (X @ [[1, 0, 0], [1, 1, 0], [0, 1, 1]]).astype(int)
    >>> MultiLabelMappingClassifier(C=10).fit(X, Y).predict(np.eye(3))
    array([[1, 0, 0],
           [1, 1, 0],
           [0, 1, 1]])
    """

    _usual_c = "cv"
    C_: float
    decision_: str
    threshold_: float
    scale_: float
    none_: bool
    cv_results_: dict[str, np.ndarray]

    def __init__(
        self,
        mapping: str | Mapping = "auto",
        *,
        alpha: float | None = None,
        C: float | Literal["cv"] = "cv",
        l2: float | None = None,
        tol: float = 1e-4,
        max_iter: int = 1000,
        fit_intercept: bool = True,
        class_weight: Mapped[Any, float] | Literal["balanced"] | None = None,
        solver: Literal["lbfgs", "lbfgs-scipy"] = "lbfgs",
        warm_start: bool = False,
        verbose: int = 0,
        decision: Literal["auto", "support", "threshold", "sets"] = "auto",
        threshold: float | Literal["cv"] = "cv",
        scale: float | Literal["cv"] = "cv",
        none: bool | Literal["auto"] = "auto",
        grid: Iterable[float] | None = None,
        scoring: Literal["auto", "f1_micro", "f1_macro", "f1_samples", "f1_of_means", "accuracy"]
        | Callable[[Any, Any], float] = "auto",
        cv: Any = 3,
        random_state: Any = 0,
        penalty: Literal["l2"] | None = "l2",
        n_jobs: int | None = None,
        smoothing: float = 0.0,
    ) -> None:
        super().__init__(
            mapping, alpha=alpha, l2=l2, tol=tol, max_iter=max_iter, fit_intercept=fit_intercept,
            class_weight=class_weight, solver=solver, warm_start=warm_start, verbose=verbose, random_state=random_state,
            penalty=penalty, n_jobs=n_jobs, smoothing=smoothing,
        )  # fmt: skip
        self.C = C
        self.decision = decision
        self.threshold = threshold
        self.scale = scale
        self.none = none
        self.grid = grid
        self.scoring = scoring
        self.cv = cv

    # -- training -------------------------------------------------------------------------------------------------------------

    @documented_like(MappingClassifier.fit)
    def fit(self, X: Rows, y: Rows, sample_weight: ArrayLike | None = None) -> Self:
        """Train the classifier, and tune its scale or threshold if that is "cv".

        Parameters
        ----------
        y
            The labels, an indicator matrix [rows, labels] of 0 and 1, dense or sparse; or one class per row.
        """
        self.mapping_ = self._check()
        rows, target = self._data(X, y)
        self._forget()
        if self._one_a_row(target):
            self.decision_, self.indicator_, self.none_ = "argmax", None, False
            self._fit_classes(rows, target, sample_weight)
            return self
        labels = indicator(target)
        self.indicator_ = "sparse" if sparse.issparse(target) else "dense"
        self.classes_ = np.arange(labels.shape[1])
        weights = self._label_row_weights(rows, labels, sample_weight)
        total_of(weights)
        counted, labelled = weights > 0, np.diff(labels.indptr) > 0
        self.none_ = self._has_none(not labelled[counted].all())
        if (self._has_map or self._is_auto) and not labelled[counted].any():
            raise ValueError("y has no label in any row; at least one row must have one")
        if self._has_map and not self.none_:
            counted &= labelled
        self.decision_ = self._decision()
        given = self.decision_ != "sets" and self._take_given_level()
        splits = [] if given else self._splits(rows, counted)
        if not counted.all():
            rows, labels, weights = only(rows, counted), labels[counted], weights[counted]
        features = self._features(rows, labels, weights)
        near = None if given else self._tune(rows, labels, weights, features, splits)
        self._fit_labels(rows, labels, weights, near, features)
        return self

    def _data(self, X: Any, y: Any, reset: bool = True) -> tuple[Any, Any]:
        refuse_sets(y)
        return super()._data(X, y, reset)

    def _one_a_row(self, target: Any) -> bool:
        one = one_a_row(target)
        if one and self._is_auto:
            self.mapping_ = mapping_of("entmax15", None)
        if one and not self._has_map:
            raise ValueError(
                f"mapping={self.mapping_!r} is for an indicator matrix [rows, labels]; y is one class per row"
            )
        return one

    def _label_row_weights(self, X: Any, labels: Any, sample_weight: Any) -> np.ndarray:
        weights = self._row_weights(X, sample_weight)
        return weights if self.class_weight is None else weights * label_weights(self.class_weight, labels, weights)

    def _check(self) -> Any:
        self._check_training()
        if self.decision not in ("auto", "support", "threshold", "sets"):
            raise ValueError(f"decision={self.decision!r}: expected 'auto', 'support', 'threshold' or 'sets'")
        if self.threshold != "cv":
            self._threshold_of("threshold", self.threshold, "a number from 0 to 1, or 'cv' to tune it")
        if self.scale != "cv":
            number_of("scale", self.scale, "a positive number, or 'cv' to tune it", zero=False)
        if not callable(self.scoring) and self.scoring not in ("auto", *SCORES):
            raise ValueError(f"scoring={self.scoring!r}: expected 'auto', {', '.join(map(repr, SCORES))} or a function")
        if self.none not in (True, False, "auto"):
            raise ValueError(
                f"none={self.none!r}: expected True, False or 'auto', which is True where a row has no label"
            )
        self.C_ = PENALTY if self.C == "cv" else float(self.C)
        mapping = mapping_of(self._usual() if self._is_auto else self.mapping, self.alpha, NO_MAP)
        if self.none != "auto" and not isinstance(mapping, Mapping):
            raise ValueError(f"none={self.none!r}: {self.mapping!r} predicts the empty set as it is; leave none='auto'")
        if self.decision == "support" and not (isinstance(mapping, Mapping) and mapping.facts.sparse):
            raise ValueError(
                f"decision='support': {self.mapping!r} is never 0; use decision='threshold' or a sparse map"
            )
        if self.decision == "sets" and self._is_auto and self.scale != "cv":
            raise ValueError(f"decision='sets' with scale={self.scale!r}: a scale is for a map; leave scale='cv'")
        if self.decision == "sets" and self._is_auto and self.none != "auto":
            raise ValueError(
                f"decision='sets' with none={self.none!r}: known sets may be empty as they are; leave none='auto'"
            )
        if self.decision == "sets" and mapping != "sigmoid":
            raise ValueError(f"decision='sets' with mapping={self.mapping!r}: it needs mapping='sigmoid'")
        if self.decision == "sets" and self.scoring not in WEIGHTS:
            raise ValueError(
                f"decision='sets' with scoring={self.scoring!r}: expected {', '.join(map(repr, WEIGHTS))}; use decision='threshold'"
            )
        return mapping

    def _strength(self) -> float:
        return self.C_

    @property
    def _is_auto(self) -> bool:
        return isinstance(self.mapping, str) and self.mapping == "auto"

    def _usual(self) -> str:
        """The map, or "sigmoid", that "auto" stands for; options that only a map has choose one."""
        sparse_map = self.decision == "support" or self.scale != "cv" or self.none != "auto"
        return "entmax15" if sparse_map else "sigmoid"

    def _decision(self) -> str:
        if self.decision != "auto":
            return self.decision
        if self._has_map and self.mapping_.facts.sparse:
            return "support"
        plain = self._is_auto and self.threshold == "cv" and self.grid is None and self.scoring == "auto"
        return "sets" if plain else "threshold"

    def _has_none(self, wanted: bool) -> bool:
        return self._has_map and bool(wanted if self.none == "auto" else self.none)

    def _shifts(self) -> bool:
        return self._has_map and not self.none_ and super()._shifts()

    # -- training, a few rows at a time --------------------------------------------------------------------------------------

    @documented_like(MappingClassifier.partial_fit)
    def partial_fit(
        self, X: Rows, y: Rows, classes: ArrayLike | None = None, sample_weight: ArrayLike | None = None
    ) -> Self:
        """Train on more rows, starting from where the last call, or `fit`, ended; see `MappingClassifier.partial_fit`.

        A threshold or scale of "cv" is tuned on the last thousand rows, each predicted before the model saw it.

        Parameters
        ----------
        y
            The labels, an indicator matrix [rows, labels]; or one class per row.
        classes
            For a matrix its column numbers, optional; otherwise all classes that y will ever contain, required in the first
            call.
        """
        first = not hasattr(self, "classes_")
        self.mapping_ = self._check()
        rows, target = self._data(X, y, reset=first)
        if self._one_a_row(target):
            if not first and self.indicator_ is not None:
                raise ValueError(
                    f"y is one class per row; that of the first call was an indicator matrix of {len(self.classes_)} labels"
                )
            self.decision_, self.indicator_, self.none_ = "argmax", None, False
            self._stream_classes(rows, target, classes, sample_weight, first)
            return self
        labels = indicator(target)
        if not first and (self.indicator_ is None or labels.shape[1] != len(self.classes_)):
            before = "one class per row" if self.indicator_ is None else f"a matrix of {len(self.classes_)} labels"
            raise ValueError(
                f"y is an indicator matrix of {labels.shape[1]} labels; that of the first call was {before}"
            )
        if classes is not None and not np.array_equal(np.asarray(classes), np.arange(labels.shape[1])):
            raise ValueError(
                f"classes={classes!r}: the classes of an indicator matrix are its columns, 0 to {labels.shape[1] - 1}; leave them out"
            )
        if first:
            self.classes_, self.none_ = np.arange(labels.shape[1]), self._has_none(True)
        if self.decision == "sets":
            raise ValueError(
                "decision='sets' looks at all rows at once, which partial_fit never sees; use decision='threshold'"
            )
        self.indicator_, self.decision_ = "sparse" if sparse.issparse(target) else "dense", self._decision()
        if self.decision_ == "sets":
            self.decision_ = "threshold"
        self._no_balance()
        weights = self._label_row_weights(rows, labels, sample_weight)
        if self._has_map and not self.none_:
            weights = np.where(np.diff(labels.indptr) > 0, weights, 0.0)
        self._stream_labels(rows, labels, weights)
        return self

    def _stream_labels(self, X: Any, labels: Any, weights: np.ndarray) -> None:
        last: list[tuple[np.ndarray, np.ndarray]] = [] if "stream_" not in vars(self) else self.last_
        model = self._model

        def seen(rows: np.ndarray, z: np.ndarray) -> None:
            counted = weights[rows] > 0
            last.append((z[counted], labels[rows[counted]].toarray() > 0))
            while sum(len(z) for z, _ in last[1:]) >= _LAST:
                last.pop(0)

        def loss_of(rows: np.ndarray, share: np.ndarray) -> Any:
            counted = share > 0  # a row without labels may have no loss, and then has the weight 0
            return losses.LossOfSomeRows(counted, model.loss(labels[rows[counted]], share[counted]))

        self._stream(X, weights, loss_of, labels.shape[1], seen)
        self.last_ = last
        if last or getattr(self, self._tuned()) != "cv":
            self._forget()
        if not self._take_given_level() and last:
            z, truth = (np.concatenate(part) for part in zip(*last))
            self._choose(self._ranks(z), truth, self._levels_to_try())

    # -- use ------------------------------------------------------------------------------------------------------------------

    def _chosen(self, z: np.ndarray) -> np.ndarray:
        """True at the labels that the scores select."""
        model = self._model
        if self.decision_ == "sets":
            return self.rule_.chosen(z)
        if self.decision_ == "support":
            chosen = model.p(z * z.dtype.type(self.scale_)) > 0
        else:
            chosen = model.p(z) > self.threshold_
        return chosen & ~model.empty(z)

    def predict(self, X: Rows) -> Any:
        """The labels of each row of X as an indicator matrix, dense or sparse (CSR) like the y of `fit`."""
        return super().predict(X)

    def decision_function(self, X: Rows) -> np.ndarray:
        """The scores of the rows of X before the map, [rows, labels]."""
        return super().decision_function(X)

    def predict_proba(self, X: Rows) -> np.ndarray:
        """map(scores) of the rows of X, [rows, labels]: the share of each label in its row; for "sigmoid" the probability of each label.

        A class "none" has the rest to 1.

        For "zlpr" it is the sigmoid of the score: above 1/2 if the loss favours the label, but not a calibrated probability.
        """
        return super().predict_proba(X)

    def predict_log_proba(self, X: Rows) -> np.ndarray:
        """The logarithm of `predict_proba`, -inf where it is exactly 0."""
        return super().predict_log_proba(X)

    def _decided(self, z: np.ndarray) -> np.ndarray:
        return super()._decided(z) if self.indicator_ is None else z

    def _probable(self, z: np.ndarray) -> np.ndarray:
        if self.indicator_ is None:
            return super()._probable(z)
        return self._smooth(self._model.p(z), self._model.outcomes(z.shape[1]))

    def _log_probable(self, z: np.ndarray) -> np.ndarray:
        if self.smoothing or self.indicator_ is None:
            return super()._log_probable(z)
        return self._model.log_p(z)

    def _predicted(self, z: np.ndarray) -> Any:
        if self.indicator_ is None:
            return super()._predicted(z)
        chosen = self._chosen(z).astype(np.int64)
        return sparse.csr_matrix(chosen) if self.indicator_ == "sparse" else chosen

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags
