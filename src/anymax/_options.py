"""Options that a function hands on to another: a sentence where a name is none of them."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])

_HINTS = {  # what other libraries call it, and what to do here
    "k": "leave it out, since any number of classes may have a probability",
    "n_iter": "leave it out, since the answer is exact",
    "ensure_sum_one": "leave it out, since it always is",
    "where": "say mask=, True = keep",
    "attn_mask": "say mask=, True = keep",
    "tau": "divide the scores by it",
    "temperature": "divide the scores by it",
    "T": "divide the scores by it",
    "beta": "multiply the scores by it",
    "b": "add log(b) to the scores",
    "alpha": "of the maps entmax and normmax have one, as in anymax.Entmax(alpha=1.3)",
    "top_k": "say k=",
    "top_p": "say p=",
    "budget": "say k=",
    "return_support_size": "see anymax.threshold, which has it",
    "input": "the scores come first, without a name",
    "logits": "the scores come first, without a name",
    # losses
    "labels": "say target=",
    "y": "say target=",
    "size_average": "say reduction='mean' or reduction='sum'",
    "reduce": "say reduction='none' for one loss a sample",
    "weights": "say weight=, one factor for each class",
    "class_weight": "say weight=, one factor for each class",
    "pos_weight": "say weight=, one factor for each class",
    "smoothing": "say label_smoothing=",
    # attention
    "causal": "say is_causal=",
    "softmax_scale": "say scale=",
    "window_size": "say window=(left, right), None for no limit",
    "local_window_size": "say window=(left, right), None for no limit",
    "alibi_slopes": "say alibi=",
    "attn_bias": "say bias=",
    "dropout": "say dropout_p=",
    "key_padding_mask": "say lengths=, or mask= of the shape [batch, 1, 1, keys], True = keep",
    "query_seq_lengths": "say q_lengths=",
    "key_value_seq_lengths": "say lengths=",
    "return_attn_probs": "say need_weights=True",
    "output_attentions": "say need_weights=True",
    "average_attn_weights": "need_weights=True gives the weights of each head; average them",
    "num_heads": "q, k and v have the shape [batch, heads, length, features]; anymax.nn.Attention splits heads",
    # samples
    "seed": "say generator=, which takes an integer too",
    "rng": "say generator=",
    "key": "say generator=",
    "size": "say num_samples=",
    "n_samples": "say num_samples=",
}


def names(function: Callable[..., Any]) -> tuple[str, ...]:
    """The options of a function of (map, scores, axis); ask once, since a signature takes 20 us to read."""
    return "axis", *(p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY)


def allowed(who: str, takes: tuple[str, ...], options: Any, hints: dict[str, str] | None = None) -> Any:
    """The options, all of them among the names in `takes`; an error in the name of `who` otherwise."""
    for name in options:
        if name not in takes:
            raise TypeError(unknown(who, takes, name, {**_HINTS, **(hints or {})}))
    return options


def unknown(who: str, takes: tuple[str, ...], name: str, hints: dict[str, str]) -> str:
    """The sentence for an option that there is not."""
    said = hints.get(name)
    if said is None:
        import difflib  # late: for a name that is wrong

        near = difflib.get_close_matches(name, takes, 1)
        said = f"did you mean {near[0]}=?" if near else None
    return f"{who} has no option {name!r}{f' ({said})' if said else ''}; its options are {', '.join(takes)}"


def answering(hints: dict[str, str] | None = None, /, **others: str) -> Callable[[_F], _F]:
    """A function that says, of a keyword that it has not, which of its own is meant.

    others: further names of its parameters, as other libraries have them: what is said under such a name is taken.
    hints: what to say of a keyword, where that differs from what all functions say of it.
    """

    def wrap(function: _F) -> _F:
        who, parameters = function.__qualname__.removesuffix(".__init__"), inspect.signature(function).parameters
        takes, more = (
            tuple(p for p in parameters if p != "self"),
            any(p.kind is p.VAR_KEYWORD for p in parameters.values()),
        )
        words = {**_HINTS, **(hints or {})}

        def own(args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
            out = {}
            for name, value in options.items():
                meant = others.get(name, name)
                if meant not in takes and not more:
                    raise TypeError(unknown(who, takes, name, words))
                if meant in out or (name in others and (meant in options or meant in takes[: len(args)])):
                    raise TypeError(f"{who}: {name}= is another name of {meant}, which is given too; give only one")
                out[meant] = value
            return out

        def call(*args: Any, **options: Any) -> Any:
            return function(*args, **(own(args, options) if options else options))

        # with the globals of the function, by which doctest tells whose examples these are
        made = types.FunctionType(call.__code__, function.__globals__, function.__name__, None, call.__closure__)  # type: ignore[attr-defined]
        return functools.update_wrapper(made, function)  # type: ignore[return-value]

    return wrap
