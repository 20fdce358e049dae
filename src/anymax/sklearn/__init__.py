"""Linear classifiers with scikit-learn's interface, each trained with the loss of its map (extra `sklearn`).

`MappingClassifier` is `LogisticRegression` with the map as a parameter. `MultiLabelMappingClassifier` predicts sets of labels,
`LabelDistributionClassifier` predicts proportions, and `SupportConformalClassifier` predicts sets with guaranteed coverage.
"""

from typing import TYPE_CHECKING

from .._core.elsewhere import answering

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

if not TYPE_CHECKING:
    __getattr__ = answering(__name__, __all__)

for _kind in (MappingClassifier, MultiLabelMappingClassifier, LabelDistributionClassifier, SupportConformalClassifier):
    _kind.__module__ = __name__  # pickle finds the class by this public path
