"""Options that a function passes on to another: their signatures and docstrings, and the error for an unknown option."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

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
    "alpha": "only entmax and normmax take it, as in anymax.Entmax(alpha=1.3)",
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
    """Decorate a function so that an unknown keyword raises an error that names the right one.

    Parameters
    ----------
    others
        The names that other libraries use for its parameters; their values are passed on under our name.
    hints
        Advice for a keyword, in place of the general advice in `_HINTS`.
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
    """Copy the documentation and the signature of `home`'s options to this function.

    `**options` becomes keywords in its signature. Its docstring gets the parameters that it does not describe itself, and the section
    on what is returned if it has none. The function is the same object, so a call costs nothing more.
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
            function.__doc__ = joined(sections(function.__doc__), sections(home.__doc__), parameters)
        return function

    return spell


@functools.cache
def _keywords(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return {p.name: p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}


@functools.cache
def sections(text: str) -> dict[str, list[str]]:
    """The lines of a docstring in NumPy's style by the titles of its sections; what stands before the first has the title ""."""
    lines = inspect.cleandoc(text).split("\n")
    now: list[str] = []
    found = {"": now}
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if line and below == "-" * len(line):
            now = found[line] = []
        elif line.strip("-") or not line:
            now.append(line)
    return found


def entries(lines: Iterable[str]) -> dict[str, str]:
    """The text of each parameter by its name, in a section of them; parameters that share a line share their text."""
    blocks: list[list[str]] = []
    for line in filter(None, lines):
        if line[0] == " ":
            blocks[-1].append(line)
        else:
            blocks.append([line])
    return {name: "\n".join(block) for block in blocks for name in block[0].partition(" : ")[0].split(", ")}


def joined(own: dict[str, list[str]], home: dict[str, list[str]], parameters: Iterable[str]) -> str:
    """The docstring `own` with what `home` has on the other parameters, and on what is returned."""
    described = {**entries(home.get("Parameters", ())), **entries(own.get("Parameters", ()))}
    both = dict.fromkeys(
        described[name] for name in parameters if name in described
    )  # once, where two names share their lines
    rest = {title: lines for title, lines in own.items() if title not in ("", "Parameters")}
    parts = {"": own[""], "Parameters": both, "Returns": home.get("Returns", ()), **rest}
    texts = {title: "\n".join(lines).strip("\n") for title, lines in parts.items()}
    return "\n\n".join(
        f"{title}\n{'-' * len(title)}\n{text}" if title else text for title, text in texts.items() if text
    )


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

    Parameters
    ----------
    mapping
        The map, such as `anymax.Sparsemax()` or `anymax.Entmax(alpha=1.3)`.
    scores
        The scores, an array of NumPy, torch or JAX, or lists of numbers; -inf marks a masked class.
    target
        Class indices (integers, of the shape of the scores without the axis of the classes), or distributions over the
        classes (floating point, of the shape of the scores).
    weight
        One factor for each class; a mean is then weighted by the factor of each sample's target, as in torch.
    axis, dim
        The axis of the classes: by default 1, as in torch, and 0 for a vector of scores; a tuple of axes is read as one row
        of all their entries.
    mask
        Booleans that broadcast to the scores, True = keep. A masked class has probability 0; if it is the target, a loss
        without an upper bound is +inf.
    ignore_index
        The class index of samples that are left out; a mean does not count them.
    reduction
        "mean" over the samples, their "sum", or "none" for one value per sample.
    label_smoothing
        The share of the target, from 0 to 1, that is spread evenly over the unmasked classes.

    Returns
    -------
    None
        The loss, one number of the kind and dtype of the scores; with `reduction="none"` one for each sample.
    """
