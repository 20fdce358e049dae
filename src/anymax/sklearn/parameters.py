"""What the parameters of an estimator mean: a map, a number; a sentence where they mean nothing."""

from __future__ import annotations

import dataclasses
import math
from numbers import Real
from typing import Any

from .. import _names
from .._mapping import Mapping

NO_MAP = ("sigmoid", "zlpr")


def mapping_of(mapping: Any, alpha: Any, others: tuple[str, ...] = ()) -> Mapping | str:
    """The map that the parameters `mapping` and `alpha` mean."""
    if isinstance(mapping, str):
        if mapping in others:
            if alpha is not None:
                raise ValueError(
                    f"alpha={alpha!r}: {mapping!r} has no alpha; leave it None, or choose mapping='entmax'"
                )
            return mapping
        try:
            name, own = _names.read(mapping)
            found = _names.make(name, own)
        except _names.UnknownMap as error:
            more = f", or {' and '.join(others)}" if others else ""
            raise ValueError(f"mapping={mapping!r}: {error}{more}; or give a map") from None
        except (TypeError, ValueError) as error:
            raise ValueError(f"mapping={mapping!r}: {error}") from None
        if alpha is not None and "alpha" in own:
            raise ValueError(f"alpha={alpha!r}: {mapping!r} says its alpha already; choose mapping={name!r}")
    else:
        found = _names.as_mapping(mapping, "mapping")
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
    if getattr(found, "mass", 1.0) != 1.0:
        raise ValueError(f"mapping={found!r} sums to {found.mass:g}; a classifier needs a map that sums to 1")  # type: ignore[attr-defined]
    return found


def number_of(name: str, value: Any, low: float, open_end: bool, words: str) -> float:
    ok = isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)  # type: ignore[arg-type]
    if not ok or value < low or (open_end and value == low):
        raise ValueError(f"{name}={value!r}: expected {words}")
    return float(value)
