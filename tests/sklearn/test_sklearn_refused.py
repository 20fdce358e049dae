"""What the estimators refuse, and the words that say what to do."""

import functools
import re

import numpy as np
import pytest
from refusals import each, refuses
from sklearn_data import blobs, labels

pytest.importorskip("sklearn")

from sklearn.linear_model import LinearRegression
from sklearn.naive_bayes import GaussianNB
from sklearn.svm import SVC

import anymax as am
from anymax.sklearn import (
    LabelDistributionClassifier,
    MappingClassifier,
    MultiLabelMappingClassifier,
    SupportConformalClassifier,
)

X, Y = blobs(30, 4, 3)
FOUR_X, FOUR = blobs(30, 6, 4)
MANY_X, MANY = labels()
NO_LOSS = r"exact zeros and has no Fenchel-Young loss.*choose a sparse map with a loss"


class Silent(GaussianNB):
    predict_proba = predict_log_proba = None


class Doubtful(GaussianNB):
    def predict_proba(self, X):
        return np.full((len(X), len(self.classes_)), np.nan)


# (options, words): of a fit on three classes
CLASSES = [
    ({"mapping": "softmaxx"}, r"no map 'softmaxx' \(did you mean 'softmax'\?\); the maps are softmax, sparsemax"),
    ({"mapping": 3}, "or a name such as 'sparsemax', got 3"),
    ({"mapping": "ratio"}, "ratio needs a function; choose one of square, sigmoid, relu, stablemax, or give"),
    ({"mapping": "entmax:alpha=1.5", "alpha": 1.2}, "says its alpha already; choose mapping='entmax'"),
    ({"mapping": "softmax", "alpha": 1.2}, "softmax has no alpha"),
    ({"mapping": "entmax15", "alpha": 1.2}, "choose mapping='entmax'"),
    ({"mapping": am.Budget(2)}, "sums to 2; a classifier needs a map that sums to 1"),
    ({"mapping": am.Entmax(np.array([1.5]))}, "its alpha is an array"),
    ({"C": 0}, "C=0: expected a positive number"),
    ({"C": 2.0, "l2": 0.1}, "give one of them"),
    ({"l2": -1}, "l2=-1: expected a number from 0"),
    ({"tol": float("nan")}, "tol=nan"),
    ({"max_iter": 1.5}, "max_iter=1.5: expected an integer"),
    ({"penalty": "l1"}, "penalty='l1': expected 'l2', or None for no penalty"),
    ({"penalty": None, "C": 2.0}, "without a penalty there is no weight of it"),
    ({"n_jobs": 0}, "n_jobs=0: expected a number of threads from 1, -1 for one a processor, or None"),
    ({"smoothing": 1.5}, "smoothing=1.5: expected a number from 0 to 1"),
    ({"solver": "sgd"}, "expected 'lbfgs' or 'lbfgs-scipy'"),
    ({"mapping": am.Ratio.relu()}, NO_LOSS),
    ({"mapping": am.Ratio.square()}, NO_LOSS),
]
CONFORMAL = [
    ({"coverage": 1.0}, r"coverage=1.0: expected a number above 0 and below 1"),
    ({"coverage": "most"}, "coverage='most': expected a number"),
    ({"mapping": "softmax"}, "mapping='softmax': expected sparsemax, or entmax with alpha above 1"),
    ({"mapping": am.Entmax(0.5)}, "expected sparsemax, or entmax with alpha above 1"),
    ({"mapping": "entmax", "alpha": 1.0}, "expected sparsemax, or entmax with alpha above 1"),
    ({"mapping": "sparsmax"}, "did you mean 'sparsemax'"),
    ({"alpha": 0.1}, "choose mapping='entmax'; for 10 % misses write coverage=0.9$"),
    ({"mapping": "entmax", "alpha": 0.05}, "with alpha above 1.*; for 5 % misses write coverage=0.95$"),
    ({"calibration": 1.0}, "calibration=1.0: expected a share above 0 and below 1, or a number of rows"),
    ({"calibration": 0}, "calibration=0: expected a share"),
    ({"calibration": 30}, "calibration=30 with n_samples=30: no row is left to train"),
    ({"estimator": SVC(decision_function_shape="ovo")}, "decision_function_shape='ovr' gives them"),
    ({"estimator": LinearRegression()}, r"estimator=LinearRegression\(\) is no classifier"),
    ({"estimator": Silent()}, "has neither decision_function nor predict_proba"),
    ({"estimator": Doubtful()}, "the scores of Doubtful hold NaN"),
]
# (options, y or None for labels as they should be, words)
LABELS = [
    ({"decision": "top"}, None, "decision='top': expected 'auto', 'support', 'threshold' or 'sets'"),
    (
        {"mapping": "softmax", "decision": "sets"},
        None,
        "decision='sets' with mapping='softmax': it needs mapping='sigmoid'",
    ),
    (
        {"decision": "sets", "scoring": "f1_macro"},
        None,
        "expected 'auto', 'f1_micro', 'accuracy'; use decision='threshold'",
    ),
    ({"mapping": "softmax", "decision": "support"}, None, "is never 0; use decision='threshold' or a sparse map"),
    ({"threshold": -0.1}, None, "a number from 0 to 1, or 'cv' to tune it"),
    ({"threshold": 2}, None, "threshold=2: expected a number from 0 to 1, or 'cv'"),
    ({"grid": [0.5, 2]}, None, "grid=2: expected numbers from 0 to 1"),
    ({"decision": "sets", "threshold": 0}, None, "threshold=0: with decision='sets' it is above 0 and below 1"),
    ({"decision": "sets", "grid": [0.5, 1]}, None, "grid=1: with decision='sets' it is above 0 and below 1"),
    (
        {"decision": "sets", "scale": 1.0},
        None,
        "decision='sets' with scale=1.0: a scale is for a map; leave scale='cv'",
    ),
    (
        {"decision": "sets", "none": True},
        None,
        "decision='sets' with none=True: known sets may be empty as they are; leave none='auto'",
    ),
    ({"mapping": "sigmoid", "none": True}, None, "none=True: 'sigmoid' predicts the empty set as it is"),
    ({"mapping": "zlpr", "none": False}, None, "none=False: 'zlpr' predicts the empty set as it is"),
    ({"scale": 0}, None, "a positive number, or 'cv'"),
    ({"scoring": "f1"}, None, "scoring='f1': expected 'auto', 'f1_micro'"),
    ({"grid": []}, None, "grid is empty"),
    ({"mapping": "zlpr", "alpha": 2}, None, "'zlpr' has no alpha"),
    ({"class_weight": {9: 1.0}}, None, "names the label 9; the labels are the columns 0 to 4"),
    ({"class_weight": {1: -1.0}}, None, r"class_weight=\{1: -1.0\}: expected numbers from 0"),
    ({"cv": 1}, None, "cross-validation needs 2 folds .*; give threshold=<number> to do without"),
    ({"cv": 1, "decision": "sets"}, None, "give decision='threshold' and threshold=<number> to do without"),
    ({"cv": 1, "decision": "sets", "threshold": 0.5}, None, "give decision='threshold' to do without"),
    ({"cv": [(range(9), range(0))]}, None, "has no row of weight above 0 that tests"),
    ({"cv": [(range(0), range(9))]}, None, "has a fold without a row of weight above 0 that trains"),
    ({"class_weight": dict.fromkeys(range(5), 0.0)}, None, "is zero for every row; at least one row must count"),
    ({}, np.zeros((150, 5), int), "y has no label in any row"),
    ({}, np.full((150, 5), 2), "y holds 2: expected an indicator matrix"),
    ({"mapping": "sigmoid"}, np.arange(150) % 3, "is for an indicator matrix"),
    ({}, [["a", "b"]] * 75 + [["a"]] * 75, r"of labels for each row: .*MultiLabelBinarizer\(\).fit_transform\(y\)"),
    ({}, [["a", "b"]] * 150, "a list of labels for each row"),
    ({}, [{1, 2}] * 150, "a set of labels for each row"),
    ({"mapping": am.Ratio.relu()}, None, NO_LOSS),
    ({"mapping": am.Ratio.square()}, None, NO_LOSS),
]
# (options, proportions, words)
PROPORTIONS = [
    ({}, np.full((150, 4), 0.5), "row 0 of y sums to 2: expected proportions that sum to 1"),
    ({}, np.full((150, 4), [2.0, -1.0, 0.0, 0.0]), "y holds -1.0: expected proportions from 0"),
    ({"class_weight": "balanced"}, np.eye(4)[[0] * 150], "of proportions it is a dict of column: weight, or None"),
    ({"class_weight": {7: 1.0}}, np.eye(4)[[0] * 150], "names the class 7; the classes are the columns 0 to 3"),
]
# (calls, the last of which is wrong, words)
PARTIAL_FIT = [
    ([{"classes": None}], r"the first call of partial_fit needs all classes .*\(X, y, classes=\[...\]\)"),
    ([{"classes": [0, 1]}], "y holds the class 2, which the first call of partial_fit did not name"),
    ([{"classes": [7]}], "has one class; a classifier needs at least 2"),
    ([{"classes": [0, 1, 2]}, {"classes": [0, 1, 2, 3]}], "are not those of the first call"),
    ([{"classes": [0, 1, 2], "class_weight": "balanced"}], "found from all rows at once"),
    ([{"classes": [0, 1, 2]}, {"columns": 3}], "X has 3 features, but MappingClassifier is expecting 4"),
]


def fitted(kind, options, x, y):
    return kind(**options).fit(x, y)


def in_parts(calls):
    model = MappingClassifier()
    for call in calls:
        model.class_weight = call.get("class_weight")
        model.partial_fit(X[:, : call.get("columns", 4)], Y, classes=call.get("classes"))


def rows():
    of = (
        (MappingClassifier, X, Y, [(options, None, words) for options, words in CLASSES]),
        (SupportConformalClassifier, FOUR_X, FOUR, [(options, None, words) for options, words in CONFORMAL]),
        (MultiLabelMappingClassifier, MANY_X, MANY, LABELS),
        (LabelDistributionClassifier, MANY_X, None, PROPORTIONS),
    )
    for kind, x, usual, table in of:
        for options, y, words in table:
            said = ", ".join(f"{key}={value!r}" for key, value in options.items())
            call = functools.partial(fitted, kind, options, x, usual if y is None else y)
            name = re.sub(" at 0x[0-9a-f]+", "", f"{kind.__name__}({said}): {words[:40]}")
            yield name, (call, (ValueError, TypeError), words)
    for calls, words in PARTIAL_FIT:
        yield f"partial_fit {calls}", (functools.partial(in_parts, calls), ValueError, words)


def of_labels(y, **options):
    """A second call, where the first was an indicator matrix of 5 labels."""
    model = MultiLabelMappingClassifier().partial_fit(MANY_X, MANY, classes=range(5))
    model.partial_fit(MANY_X, y, **options)


def of_one_label():
    model = MultiLabelMappingClassifier().partial_fit(MANY_X, MANY[:, 0], classes=[0, 1])
    model.partial_fit(MANY_X, MANY)


def covered(**options):
    x, y = blobs(60, 4, 3)
    SupportConformalClassifier().fit(x, y).predict_set(x, **options)


def of_one_row():
    MultiLabelMappingClassifier().fit(MANY_X, MANY, sample_weight=np.eye(150)[0])


LATER = {  # calls after the first
    "one row counts": (of_one_row, ValueError, "cv=3 with n_samples=1 of weight above 0: cross-validation needs"),
    "another coverage": (lambda: covered(coverage=0), ValueError, "coverage=0: expected a number above 0 and below 1"),
    "fewer labels": (lambda: of_labels(MANY[:, :4]), ValueError, "a matrix of 5 labels"),
    "one class after label sets": (
        lambda: of_labels(MANY[:, 0]),
        ValueError,
        "y is one class per row; that of the first call was an indicator matrix of 5 labels",
    ),
    "classes of label sets": (
        lambda: of_labels(MANY, classes=[3, 4]),
        ValueError,
        "the classes of an indicator matrix are its columns, 0 to 4",
    ),
    "label sets after one class": (of_one_label, ValueError, "that of the first call was one class per row"),
}
WRONG = dict(rows()) | LATER


@each(WRONG)
def test_errors_say_what_to_do(call, error, words):
    refuses(call, error, words)


def test_no_row_hides_another():
    assert len(WRONG) == sum(map(len, (CLASSES, CONFORMAL, LABELS, PROPORTIONS, PARTIAL_FIT, LATER)))
