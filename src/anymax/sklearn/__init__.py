"""Linear classifiers of scikit-learn's kind, trained with the own loss of any map (extra `sklearn`).

`MappingClassifier` is `LogisticRegression` with the map for a parameter, and `MultiLabelMappingClassifier` predicts sets of labels.
"""

from .classes import MappingClassifier
from .labels import MultiLabelMappingClassifier

__all__ = ["MappingClassifier", "MultiLabelMappingClassifier"]

for _kind in (MappingClassifier, MultiLabelMappingClassifier):
    _kind.__module__ = __name__  # the public path, by which pickles find them
