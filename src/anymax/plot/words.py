"""How pictures, tables and file names call a map."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from .._array import is_array, on_host
from .._core.mapping import Mapping
from .._core.names import function_name


def label(mapping: Mapping) -> str:
    """The name of a map with the parameters that distinguish it.

    Use it in legends, tables and file names; `title` writes the parameters as mathematics.

    Parameters
    ----------
    mapping
        The map, such as `Entmax(1.5)`; parameters with their default are left out, except the first.

    Returns
    -------
    str
        A string.

    Examples
    --------
    >>> anymax.plot.label(anymax.Entmax(1.5)), anymax.plot.label(anymax.Softmax()), anymax.plot.label(anymax.PerturbMax("gumbel"))
    ('entmax alpha=1.5', 'softmax', 'perturb_max noise=gumbel')
    """
    words = [mapping.name]
    for name, value in distinguishing(mapping):
        if is_array(value):
            words.append(f"{name}={np.round(on_host(value), 3).tolist()}")
        elif isinstance(value, Mapping):
            words.append(label(value))
        elif callable(value):
            words += [function_name(value)] if name == "u" else []
        else:
            words.append(f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}")
    return " ".join(words)


def distinguishing(mapping: Mapping) -> Iterator[tuple[str, Any]]:
    """The names and values of the parameters that distinguish a map: the first, arrays, and those that differ from their default; what
    follows from `u` of a ratio map is left out."""
    for i, field in enumerate(dataclasses.fields(mapping)):  # type: ignore[arg-type]
        value = getattr(mapping, field.name)
        if (
            value is not None
            and field.name not in ("du", "sparse")
            and (i == 0 or is_array(value) or value != field.default)
        ):
            yield field.name, value


SYMBOLS = {"alpha": r"\alpha"}  # of parameters that mathematics writes differently


def title(mapping: Mapping) -> str:
    """`label` with its parameters as mathematics, for matplotlib.

    Use it in titles and legends.

    Parameters
    ----------
    mapping
        The map, such as `Entmax(1.5)`.

    Returns
    -------
    str
        A string with the parameters between dollar signs.

    Examples
    --------
    >>> print(anymax.plot.title(anymax.Entmax(1.5)))
    entmax $\\alpha = 1.5$
    """
    name, *words = label(mapping).split()
    pairs = [word.partition("=") for word in words]
    return " ".join([name, *(_symbol(key, value) if sep else key for key, sep, value in pairs)])


def _symbol(key: str, value: str) -> str:
    symbol = SYMBOLS.get(key, key if len(key) == 1 else "")
    return f"${symbol} = {value}$" if symbol else f"{key}={value}"
