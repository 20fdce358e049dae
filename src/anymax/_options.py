"""Options that a function hands on to another: a sentence where a name is none of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

_HINTS = {  # what other libraries call it, and what to do here
    "k": "leave it out, since any number of classes may have a probability",
    "n_iter": "leave it out, since the answer is exact",
    "ensure_sum_one": "leave it out, since it always is",
    "where": "say mask=, True = keep",
    "tau": "divide the scores by it",
    "temperature": "divide the scores by it",
    "top_k": "say k=",
    "top_p": "say p=",
    "budget": "say k=",
    "return_support_size": "see anymax.threshold, which has it",
}


def names(function: Callable[..., Any]) -> tuple[str, ...]:
    """The options of a function of (map, scores, axis); ask once, since a signature takes 20 us to read."""
    return "axis", *(p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY)


def allowed(who: str, takes: tuple[str, ...], options: Any) -> Any:
    """The options, all of them among the names in `takes`; an error in the name of `who` otherwise."""
    for name in options:
        if name not in takes:
            hint = f" ({_HINTS[name]})" if name in _HINTS else ""
            raise TypeError(f"{who} has no option {name!r}{hint}; its options are {', '.join(takes)}")
    return options
