"""A pass over rows: its steps (truncations and temperatures) and its results. `Engine.decode` runs it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .._array import on_host

STEPS = {
    "temperature": 0, "topk": 1, "topp": 2, "minp": 3, "topnsigma": 4, "epsilon_cutoff": 5, "eta": 6, "typical": 7, "xtc": 8,
}  # the codes of csrc/anymax.h, which a test compares  # fmt: skip
MOST = 64  # the most steps of a pass
# a row's share may be 0, a smaller one rounded to the scores' dtype; the engine's least share keeps as many
_SHARES = ("topp", "minp", "epsilon_cutoff", "eta", "typical")
_LEAST_SHARE = 5e-324


class Step(NamedTuple):
    """One truncation, or a temperature: its name, its value (a number, or one per row, [..., 1]), and the fewest classes it keeps."""

    name: str
    value: Any
    least: int = 1


class Decoded(NamedTuple):
    """The requested results, as arrays of the scores' kind; the others are None."""

    keep: Any  # bool, like the scores
    left: Any  # like the scores, -inf where a class is left out
    index: Any  # int64 [..., draws]
    log_p: Any  # float64 [..., draws]
    entropy: Any  # float64 [...]
    tau: Any  # float64 [...]: the threshold of the classes that are left, logsumexp for softmax
    support: Any = None  # ids and offsets of the classes that could be drawn, as `sampling.results.Support` has them


def numbers(step: Step) -> np.ndarray:
    """The value of a step in float64."""
    value = on_host(step.value).astype(np.float64)
    return np.maximum(value, _LEAST_SHARE) if step.name in _SHARES else value
