"""Checks of the parameters of estimators: maps and numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.base import BaseEstimator

from .._array import is_int, number
from .._core import names
from .._core.mapping import Mapping
from ..functional.draws import one_draw

if TYPE_CHECKING:
    from typing import Self

NO_MAP = ("sigmoid", "zlpr")


def mapping_of(mapping: Any, alpha: Any, others: tuple[str, ...] = ()) -> Mapping | str:
    """The map given by the parameters `mapping` and `alpha`."""
    if isinstance(mapping, str):
        if mapping in others:
            if alpha is not None:
                raise ValueError(
                    f"alpha={alpha!r}: {mapping!r} has no alpha; leave it None, or choose mapping='entmax'"
                )
            return mapping
        try:
            name, in_name = names.read(mapping)
            found = names.make(name, in_name)
        except names.UnknownMap as error:
            more = f", or {' and '.join(others)}" if others else ""
            raise ValueError(f"mapping={mapping!r}: {error}{more}; or give a map") from None
        except (TypeError, ValueError) as error:
            raise ValueError(f"mapping={mapping!r}: {error}") from None
        if alpha is not None and "alpha" in in_name:
            raise ValueError(f"alpha={alpha!r}: {mapping!r} says its alpha already; choose mapping={name!r}")
    else:
        found = names.as_mapping(mapping, "mapping")
    if alpha is not None:
        if not any(field.name == "alpha" for field in dataclasses.fields(found)):  # type: ignore[arg-type]
            raise ValueError(f"alpha={alpha!r}: {found.name} has no alpha; leave it None, or choose mapping='entmax'")
        found = found.replace(alpha=alpha)
    if found.params():
        raise ValueError(
            f"mapping={found!r}: its {' and '.join(found.params())} is an array; a classifier takes one number for all rows"
        )
    if found.facts.sparse and not found.facts.has_potential:
        raise ValueError(
            f"mapping={found!r} gives exact zeros and has no Fenchel-Young loss: -log p is infinite there, without a gradient; choose a "
            "sparse map with a loss ('sparsemax', 'entmax15', ...) or a dense one ('taylor', 'sigsoftmax', ...)"
        )
    if not found.sums_to_one:
        lowest, highest = found.sums(None, np)
        words = f"{lowest:g}" if lowest is highest else f"{lowest:g} to {highest:g}"
        words += ", and to less where its upper bounds do" if one_draw(found) == "share" and lowest == 1.0 else ""
        raise ValueError(f"mapping={found!r} sums to {words}; a classifier needs a map that sums to 1")
    return found


def parameters_of(mapping: Any) -> dict[str, Any]:
    """The parameters of a map, which is given itself or by name; empty for anything else."""
    if isinstance(mapping, str):
        try:
            mapping = mapping_of(mapping, None, NO_MAP)
        except ValueError:
            return {}
    if not isinstance(mapping, Mapping):
        return {}
    return {field.name: getattr(mapping, field.name) for field in dataclasses.fields(mapping)}  # type: ignore[arg-type]


def with_parameters(mapping: Any, changes: dict[str, Any]) -> Mapping:
    """A new map with changed parameters, since maps are frozen."""
    known = parameters_of(mapping)
    for name in changes:
        if name not in known:
            raise ValueError(
                f"mapping__{name}: {mapping!r} has no parameter {name!r}; it has {', '.join(known) or 'none'}"
            )
    return names.as_mapping(mapping, "mapping").replace(**changes)


class MapParameters(BaseEstimator):
    """An estimator with a map as a parameter: the map's parameters are set and searched by name, like a nested estimator's.

    Maps are frozen and may be shared, so setting a parameter replaces the map.
    """

    mapping: Any

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The parameters by name; those of the map are `mapping__alpha`, ...

        Parameters
        ----------
        deep
            Whether to include those of the map.

        Returns
        -------
        dict[str, Any]
            A dict.
        """
        of_map = parameters_of(self.mapping) if deep else {}
        return super().get_params(deep=deep) | {f"mapping__{name}": value for name, value in of_map.items()}

    def set_params(self, **params: Any) -> Self:
        """Set parameters by name; `mapping__alpha=1.3` replaces the map by one with this alpha.

        Parameters
        ----------
        params
            The parameters.

        Returns
        -------
        Self
            The classifier itself.
        """
        of_map = {name: params.pop(name) for name in list(params) if name.startswith("mapping__")}
        super().set_params(**params)
        if of_map:
            self.mapping = with_parameters(self.mapping, {name[9:]: value for name, value in of_map.items()})
        return self


@contextlib.contextmanager
def threads(n_jobs: Any) -> Iterator[None]:
    """Limit BLAS to n_jobs threads; None sets no limit, -1 means one per processor."""
    if n_jobs is None:
        yield
        return
    if not is_int(number(n_jobs)) or n_jobs == 0:
        raise ValueError(f"n_jobs={n_jobs!r}: expected a number of threads from 1, -1 for one a processor, or None")
    import threadpoolctl  # late: needed only with n_jobs

    count = int(n_jobs)
    count = count if count > 0 else max((os.cpu_count() or 1) + 1 + count, 1)
    with threadpoolctl.threadpool_limits(count):
        yield


def number_of(name: str, value: Any, words: str, zero: bool = True, most: float = math.inf) -> float:
    """The value as a float; an error that expects `words` unless it is a number from 0, or without `zero` above 0, to `most`."""
    ok = isinstance(value, Real) and not isinstance(value, bool) and (value >= 0 if zero else value > 0)  # type: ignore[operator]
    if not (ok and value <= most):
        raise ValueError(f"{name}={value!r}: expected {words}")
    return float(value)
