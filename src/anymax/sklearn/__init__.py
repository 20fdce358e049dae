"""Linear classifiers of scikit-learn's kind, trained with the own loss of any map (extra `sklearn`).

`MappingClassifier` is `LogisticRegression` with the map for a parameter, `MultiLabelMappingClassifier` predicts sets of labels,
`LabelDistributionClassifier` proportions, and `SupportConformalClassifier` sets that hold the true class as often as asked.
"""

try:
    from .classes import MappingClassifier
    from .conformal import SupportConformalClassifier
    from .distributions import LabelDistributionClassifier
    from .labels import MultiLabelMappingClassifier
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in ("sklearn", "scipy"):
        raise
    raise ModuleNotFoundError(
        "anymax.sklearn needs scikit-learn; install it with: pip install 'anymax[sklearn]'", name=error.name
    ) from None

__all__ = [
    "MappingClassifier", "MultiLabelMappingClassifier", "LabelDistributionClassifier", "SupportConformalClassifier",
]  # fmt: skip

for _kind in (MappingClassifier, MultiLabelMappingClassifier, LabelDistributionClassifier, SupportConformalClassifier):
    _kind.__module__ = __name__  # the public path, by which pickles find them
