"""The training of labels and what turns their scores into sets, by folds; `MultiLabelMappingClassifier` adds the rest."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from numbers import Integral
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import KFold, check_cv

from .._core.mapping import Mapping
from .blocks import only
from .classes import MappingClassifier
from .each import Features, fit_each
from .label_models import BASELINES, MapModel, SigmoidModel
from .levels import best, lasting
from .parameters import number_of, threads
from .sets import WEIGHTS, KnownSets, SetRule, probability, score_of, thresholds, tuned
from .solvers import say

_BLOCK = 1 << 15  # scores whose ranks are computed at a time
PENALTY, _PENALTIES = 0.3, (0.3, 1.0)
_FOLD = 10  # the tolerance of a fold, in that of the fit, where labels are trained apart


class LabelTuning(MappingClassifier):
    """What `fit` of `MultiLabelMappingClassifier` does once the labels are an indicator matrix."""

    threshold: Any
    scale: Any
    grid: Iterable[float] | None
    scoring: str | Callable[[Any, Any], float]
    cv: Any
    decision: str
    decision_: str
    threshold_: float
    none_: bool
    C_: float
    cv_results_: dict[str, np.ndarray]

    @property
    def _has_map(self) -> bool:
        """False for "sigmoid" and "zlpr"."""
        return isinstance(self.mapping_, Mapping)

    @property
    def _model(self) -> MapModel | SigmoidModel:
        return MapModel(self.mapping_, self.none_) if self._has_map else BASELINES[self.mapping_]

    def _features(self, X: Any, labels: Any, weights: np.ndarray) -> Features | None:
        """What all fits of a logistic regression for each label share; None where the labels are trained together."""
        if self._has_map or self.mapping_ != "sigmoid" or self.solver != "lbfgs":
            return None
        return Features(X, weights, labels.shape[1], bool(self.fit_intercept))

    def _fit_labels(
        self, X: Any, labels: Any, weights: np.ndarray, near: np.ndarray | None = None, features: Features | None = None
    ) -> None:
        share, l2 = self._shares(weights, X.dtype)
        k, model = labels.shape[1], self._model
        if features is None:
            self._descend(X, model.loss(labels, share), l2, k, model.curvature(k), share, near)
            return
        start = self._start(X.shape[1], k, X.dtype, bool(self.warm_start), near)
        with threads(self.n_jobs):
            w, iterations, complaint = fit_each(
                X, labels, share, l2, start, not start.any(), features, self.tol, self.max_iter,
                say if self.verbose else None,
            )  # fmt: skip
        self._end(w, iterations, complaint, 4)

    def _tuned(self) -> str:
        """The parameter that turns scores into sets."""
        return "scale" if self.decision_ == "support" else "threshold"

    def _take_given_level(self) -> bool:
        """Set `threshold_` or `scale_` to the number that the user gave; False for "cv"."""
        name = self._tuned()
        given = getattr(self, name)
        if given != "cv":
            setattr(self, f"{name}_", float(given))
        return given != "cv"

    def _forget(self) -> None:
        """Drop what the last fit tuned."""
        for name in ("scale_", "threshold_", "cv_results_", "rule_"):
            vars(self).pop(name, None)

    def _tune(
        self, X: Any, labels: Any, weights: np.ndarray, features: Features | None, splits: list[Any]
    ) -> np.ndarray | None:
        """Set what turns scores into sets; return the mean W of the folds: the fit on all rows starts near its end."""
        to_try = self._levels_to_try()
        if self.decision_ == "sets":
            return self._tune_sets(X, labels, weights, features, splits, to_try)
        near, ranks = np.zeros(()), []
        for train, test in splits:
            z, w = self._fold(X, labels, weights, train, test, features)
            near = near + w / len(splits)
            ranks.append(self._ranks(z))
        truth = np.concatenate([labels[test].astype(np.bool_).toarray() for _, test in splits])
        of_all = np.concatenate(ranks)
        ranks.clear()
        self._choose(of_all, truth, to_try)
        return near

    def _tune_sets(
        self,
        X: Any,
        labels: Any,
        weights: np.ndarray,
        features: Features | None,
        splits: list[Any],
        to_try: list[float] | None,
    ) -> np.ndarray:
        """Set C_, the threshold and the rule; return the mean W of the folds."""
        most = labels.shape[1] * X.shape[1]  # with these the sets cost less than the fits
        known = [KnownSets(labels[train], most) for train, _ in splits]
        of_all, count = KnownSets(labels, most), np.diff(labels.indptr)
        wanted = sum(int(count[test].sum()) for _, test in splits)
        if self.threshold != "cv":
            to_try = [float(self.threshold)]
        fixed = self.C != "cv" or self.l2 is not None or self.penalty is None
        top, chosen, found_near = -np.inf, self.C_, np.zeros(())
        w: list[Any] = [None] * len(splits)
        for penalty in (self.C_,) if fixed else _PENALTIES:
            self.C_ = penalty
            scores = []
            for i, (train, test) in enumerate(splits):
                z, w[i] = self._fold(X, labels, weights, train, test, features, w[i])
                scores.append(z.astype(np.float32))
                del z  # before the next fit
            levels = np.array([score_of(p) for p in to_try]) if to_try else thresholds(scores, wanted)
            tests = (labels[test] for _, test in splits)
            rule, best_of = tuned(zip(scores, tests, known), levels, WEIGHTS[str(self.scoring)])
            del scores, tests
            if best_of.max() > top:
                top, chosen, found_near = best_of.max(), self.C_, np.mean(w, axis=0)
                self.rule_, self.threshold_ = SetRule(of_all, *rule), probability(rule[0])
                self.cv_results_ = {"threshold": np.array([probability(level) for level in levels]), "score": best_of}
        self.C_ = chosen
        return found_near

    def _fold(
        self,
        X: Any,
        labels: Any,
        weights: np.ndarray,
        train: np.ndarray,
        test: np.ndarray,
        features: Features | None,
        near: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The scores of the rows that test a model of those that train it, and its W."""
        tol = self.tol if features is None else _FOLD * self.tol
        part = self.__class__(**{**self.get_params(deep=False), "warm_start": False, "verbose": 0, "tol": tol})
        part.mapping_, part.none_, part.C_ = self.mapping_, self.none_, self.C_
        with warnings.catch_warnings():  # only the final fit, on all rows, warns
            warnings.simplefilter("ignore", ConvergenceWarning)
            some = labels[train] if features is None else labels[train].tocsc()
            part._fit_labels(only(X, train), some, weights[train], near, features)
        z = np.asarray(only(X, test) @ part.coef_.T) + part.intercept_
        return z, np.vstack([part.coef_.T, part.intercept_]) if self.fit_intercept else part.coef_.T

    def _splits(self, X: Any, counted: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Pairs of rows that train and rows that test, numbered among those that are counted; a splitter splits all."""
        if isinstance(self.cv, Integral):
            n = int(counted.sum())
            if self.cv < 2 or n < 2:
                said = " and ".join(self._instead())
                raise ValueError(
                    f"cv={self.cv!r} with n_samples={n} of weight above 0: cross-validation needs 2 folds and 2 rows at least; "
                    f"give {said} to do without"
                )
            return list(KFold(min(int(self.cv), n), shuffle=True, random_state=self.random_state).split(range(n)))
        place, splits = np.where(counted, np.cumsum(counted) - 1, -1), []
        for split in check_cv(self.cv).split(X):  # type: ignore[union-attr,call-arg]
            train, test = (np.sort(rows[rows >= 0]) for rows in (place[part] for part in split))  # also of masks
            if not len(train):
                raise ValueError(f"cv={self.cv!r} has a fold without a row of weight above 0 that trains")
            if len(test):
                splits.append((train, test))
        if not splits:
            raise ValueError(f"cv={self.cv!r} has no row of weight above 0 that tests")
        return splits

    def _instead(self) -> list[str]:
        """The parameters that spare cross-validation."""
        of_sets = ["decision='threshold'"] if self.decision == "sets" else []
        return of_sets + ([f"{self._tuned()}=<number>"] if getattr(self, self._tuned()) == "cv" else [])

    def _ranks(self, z: np.ndarray) -> np.ndarray:
        """The numbers that a level is compared with, from the scores of rows that the model did not see."""
        model, step = self._model, max(1, _BLOCK // z.shape[1])

        def ranks(z: np.ndarray) -> np.ndarray:
            if self.decision_ == "support" and isinstance(model, MapModel):
                mapping = model.mapping
                found = model.of_labels(lambda z: lasting(mapping, z), z)
            else:
                found = model.p(z)
            return np.where(model.empty(z), 0.0, found)

        return np.concatenate([ranks(z[at : at + step]) for at in range(0, len(z), step)] or [z])

    def _choose(self, ranks: np.ndarray, truth: np.ndarray, to_try: list[float] | None) -> None:
        """Set `threshold_` or `scale_`."""
        name = self._tuned()
        scoring = "f1_micro" if self.scoring == "auto" else self.scoring
        level, found = best(ranks, truth, scoring, to_try, name == "scale")
        setattr(self, f"{name}_", float(level))
        self.cv_results_ = {name: found["level"], "score": found["score"]}

    def _threshold_of(self, name: str, value: Any, words: str) -> float:
        threshold = number_of(name, value, words, most=1.0)
        if self.decision == "sets" and not 0 < threshold < 1:
            raise ValueError(f"{name}={value!r}: with decision='sets' it is above 0 and below 1")
        return threshold

    def _levels_to_try(self) -> list[float] | None:
        if self.grid is None:
            return None
        name = self._tuned()
        if name == "scale":
            grid = [number_of("grid", g, "numbers that a scale can be", zero=False) for g in self.grid]
        else:
            grid = [self._threshold_of("grid", g, "numbers from 0 to 1") for g in self.grid]
        if not grid:
            raise ValueError("grid is empty; give the numbers to try, or None for all that change a decision")
        return grid
