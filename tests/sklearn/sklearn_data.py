"""Data for the estimators' tests."""

import pytest

pytest.importorskip("sklearn")

from sklearn.datasets import make_classification, make_multilabel_classification

TIGHT = {"tol": 1e-9, "max_iter": 2000}


def blobs(n=120, d=6, k=4, seed=0):
    return make_classification(
        n, d, n_informative=d - 1, n_redundant=1, n_classes=k, n_clusters_per_class=1, class_sep=0.7, random_state=seed
    )


def labels(n=150, d=8, k=5, seed=1):
    return make_multilabel_classification(n, d, n_classes=k, n_labels=2, allow_unlabeled=False, random_state=seed)
