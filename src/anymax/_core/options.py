"""Options that a function passes on to another: their signatures and docstrings, and the error for an unknown option."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from .typing import Axes, Mask, Reduction

Function = TypeVar("Function", bound=Callable[..., Any])

_HINTS = {  # names in other libraries, and what to do here
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
    """The options of a function of (map, scores, axis). Call it once, since reading a signature takes 20 us."""
    return "axis", *(p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY)


def allowed(who: str, takes: tuple[str, ...], options: Any, hints: dict[str, str] | None = None) -> Any:
    """The options, or an error in the name of `who` if one of them is not in `takes`."""
    for name in options:
        if name not in takes:
            raise TypeError(unknown(who, takes, name, {**_HINTS, **(hints or {})}))
    return options


def unknown(who: str, takes: tuple[str, ...], name: str, hints: dict[str, str]) -> str:
    """The error message for an unknown option."""
    said = hints.get(name)
    if said is None:
        import difflib  # late: needed only for this error

        near = difflib.get_close_matches(name, takes, 1)
        said = f"did you mean {near[0]}=?" if near else None
    return f"{who} has no option {name!r}{f' ({said})' if said else ''}; its options are {', '.join(takes)}"


def answering(hints: dict[str, str] | None = None, /, **others: str) -> Callable[[Function], Function]:
    """A function that says, of a keyword that it has not, which of its own is meant.

    others: further names of its parameters, as other libraries have them: what is said under such a name is taken.
    hints: what to say of a keyword, where that differs from what all functions say of it.
    """

    def wrap(function: Function) -> Function:
        who, words = function.__qualname__.removesuffix(".__init__"), {**_HINTS, **(hints or {})}
        spelt, code = vars(function).get("__signature__"), function.__code__  # a signature takes a while to make
        names = spelt.parameters if spelt else code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        takes = tuple(p for p in names if p != "self")
        bound = int("self" in code.co_varnames[:1])
        more = not spelt and bool(code.co_flags & inspect.CO_VARKEYWORDS)
        most = sys.maxsize if code.co_flags & inspect.CO_VARARGS else code.co_argcount

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

        def too_many(given: int) -> TypeError:
            first, rest = takes[: most - bound], takes[most - bound :]
            others = f"; name the others: {'=, '.join(rest)}=" if rest else ""
            return TypeError(f"{who} takes {len(first)} without a name ({', '.join(first)}), got {given}{others}")

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if len(args) > most:
                raise too_many(len(args) - bound)
            return function(*args, **(own(args, options) if options else options))

        return call  # type: ignore[return-value]

    return wrap


# -- docstrings and signatures -------------------------------------------------------------------------------------------------


def spelled(home: Callable[..., Any]) -> Callable[[Function], Function]:
    """What `home` says of its options is said of this function's too: in its signature for `**options`, and in its docstring.

    The docstring gets the lines `name: text` of `home` for each parameter that it does not describe itself, and what is returned
    where it does not say so. The function is the same object: a call costs nothing more.
    """

    def spell(function: Function) -> Function:
        code = function.__code__
        parameters: Iterable[str] = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if code.co_flags & inspect.CO_VARKEYWORDS:
            own, theirs, last = inspect.signature(function), _keywords(home), code.co_argcount
            given = {p.name: p for p in own.parameters.values()}
            first = [given.pop(name) for name in code.co_varnames[:last]]
            after = [given.pop(name, p) for name, p in theirs.items() if name not in code.co_varnames[:last]]
            alone = list(given.values())[:-1]  # the last is `**options`
            own = inspect.Signature([*first, *alone, *after], return_annotation=own.return_annotation)
            function.__signature__ = own  # type: ignore[attr-defined]
            parameters = own.parameters
        if function.__doc__ and home.__doc__:  # `python -OO` has none
            function.__doc__ = said(function.__doc__).with_all(said(home.__doc__), parameters)
        return function

    return spell


@functools.cache
def _keywords(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return {p.name: p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}


class Said(NamedTuple):
    """The parts of a docstring: prose, the lines of each argument by name, the result, and the examples with what follows them."""

    prose: list[str]
    arguments: dict[str, str]
    returns: list[str]
    examples: list[str]

    def with_all(self, home: Said, parameters: Iterable[str]) -> str:
        """The docstring as one text, with the lines of `home` for parameters that are not described here."""
        blocks = [self.arguments.get(name) or home.arguments.get(name) for name in parameters]
        lines = "\n".join(dict.fromkeys(filter(None, blocks)))  # once if two names share their lines
        return "\n\n".join([*self.prose, *filter(None, [lines]), *(self.returns or home.returns), *self.examples])


@functools.cache
def said(text: str) -> Said:
    """The parts of a docstring, as it is indented."""
    out = Said([], {}, [], [])
    for part in text.split("\n\n"):
        part, start = part.rstrip(), part.lstrip()
        if out.examples or start.startswith(">>>"):
            out.examples.append(part)
        elif start.startswith("Returns "):
            out.returns.append(part)
        elif out.prose and _about(start):
            _read(part, out.arguments)
        else:
            out.prose.append(part)
    return out


def _about(line: str) -> list[str]:
    """The arguments that a line `name: text` or `name, name: text` describes."""
    names, colon, _ = line.partition(": ")
    if colon and names.isidentifier():
        return [names]
    many = names.split(", ")
    return many if colon and all(map(str.isidentifier, many)) else []


def _read(part: str, arguments: dict[str, str]) -> None:
    """Add the lines of each argument to `arguments`; its further lines are indented."""
    margin, now = len(part) - len(part.lstrip()), []
    for line in part.split("\n"):
        further = line[margin:].startswith(" ")
        now = now if further else _about(line[margin:])
        for name in now:
            arguments[name] = f"{arguments[name]}\n{line}" if further else line


def loss(
    mapping: Any,
    scores: Any,
    target: Any,
    weight: Any = None,
    *,
    axis: Axes = None,
    dim: Axes = None,
    mask: Mask = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> None:
    """The parameters of every loss. `spelled` reads this docstring; the function is never called.

    mapping: the map, such as `anymax.Sparsemax()` or `anymax.Entmax(alpha=1.3)`.
    scores: the scores, an array of NumPy, torch or JAX, or lists of numbers; -inf marks a masked class.
    target: class indices (integers, of the shape of the scores without the axis of the classes), or distributions over the
        classes (floating point, of the shape of the scores).
    weight: one factor for each class; a mean is then weighted by the factor of each sample's target, as in torch.
    axis: the axis of the classes: by default 1, as in torch, and 0 for a vector of scores; a tuple of axes is read as one row
        of all their entries.
    dim: another name for `axis`.
    mask: booleans that broadcast to the scores, True = keep. A masked class has probability 0; if it is the target, a loss
        without an upper bound is +inf.
    ignore_index: the class index of samples that are left out; a mean does not count them.
    reduction: "mean" over the samples, their "sum", or "none" for one value per sample.
    label_smoothing: the share of the target, from 0 to 1, that is spread evenly over the unmasked classes.

    Returns the loss, one number of the kind and dtype of the scores; with `reduction="none"` one for each sample.
    """
