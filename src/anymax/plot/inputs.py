"""What pictures show: the maps that they are given, and the maps and scores that they have by default."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .._array import on_host
from .._core.mapping import Mapping
from .._core.names import as_mapping
from ..mappings import Entmax, NormMax, PerturbMax, Sigsoftmax, Softmax, Sparsemax, Taylor

Maps = Mapping | str | Iterable[Mapping | str]  # a map or its name, or several

THREE = (Softmax(), Entmax(1.5), Sparsemax())
USUAL = (*THREE, NormMax(2.0), Taylor(2), Sigsoftmax(), PerturbMax())
SCORES = (0.8, 0.5, 0.2, -1.0)  # the Jacobian shows three classes that compete, and one that is out


def maps_of(mappings: Maps | None, default: Sequence[Mapping]) -> list[Mapping]:
    """One map or several as a list, their parameters as NumPy arrays, for NumPy scores."""
    mappings = default if mappings is None else mappings
    several = mappings if isinstance(mappings, Iterable) and not isinstance(mappings, str) else [mappings]
    return [_plain(as_mapping(m, "anymax.plot")) for m in several]


def some_maps(who: str, mappings: Maps | None, default: Sequence[Mapping]) -> list[Mapping]:
    """As `maps_of`; an error in the name of `who` if there are none."""
    maps = maps_of(mappings, default)
    if not maps:
        raise ValueError(f"anymax.plot.{who}: got no mappings; pass at least one, as in [Softmax()]")
    return maps


def row_of(who: str, x: Any) -> np.ndarray:
    """One row of scores; an error in the name of `who` for more."""
    x = on_host(x).astype(float)
    if x.ndim != 1:
        raise ValueError(f"plot.{who} draws one row of scores, got an array of shape {x.shape}; choose a row")
    return x


def _plain(mapping: Mapping) -> Mapping:
    return mapping.replace(**{name: on_host(value) for name, value in mapping.params().items()})
