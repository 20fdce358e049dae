"""The error for an unknown option, and what to do instead; `tables` has the options themselves."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from .._array import is_array
from .spelling import nearest
from .tables import Function, show_options

_OPTIONS_ELSEWHERE = (  # an option, its names in other libraries, and what to write after `option=`
    ("mapping", "map activation scoring", ""),
    ("target", "labels y y_true", ""),
    ("weight", "weights class_weight pos_weight", ", one factor for each class"),
    ("label_smoothing", "smoothing", ""),
    ("reduction", "size_average", "'mean' or reduction='sum'"),
    ("reduction", "reduce", "'none' for one loss a sample"),
    ("temperature", "tau T", ""),
    ("omega", "beta", ""),
    ("chunk", "options", ""),
    ("dim", "axis", ""),
    # masks and lengths
    ("mask", "where attn_mask", ", True = keep"),
    ("lengths", "key_padding_mask", ", or mask= of the shape [batch, 1, 1, keys], True = keep"),
    ("mask", "key_padding_mask", ", True = keep"),
    ("lengths", "key_value_seq_lengths", ""),
    ("q_lengths", "query_seq_lengths", ""),
    # attention
    ("is_causal", "causal", ""),
    ("scale", "softmax_scale", ""),
    ("window", "window_size local_window_size", "(left, right), None for no limit"),
    ("alibi", "alibi_slopes", ""),
    ("bias", "attn_bias", ""),
    ("dropout_p", "dropout p", ""),
    ("need_weights", "return_attn_probs output_attentions", "True"),
    ("heads", "num_heads", ""),
    ("kv_heads", "num_kv_heads num_key_value_heads n_kv_heads", ""),
    ("features", "embed_dim", ""),
    # samples
    ("generator", "seed", ", which takes an integer too"),
    ("generator", "rng key", ""),
    ("num_samples", "size n_samples n", ""),
    ("k", "top_k budget n", ""),
    ("p", "top_p", ""),
    # segments
    ("ptr", "cu_seqlens offsets indptr", ""),
    ("num_segments", "dim_size num_nodes", ""),
    # routers
    ("k", "num_experts_per_tok", ""),
    ("groups", "n_group num_group", ""),
    ("keep_groups", "topk_group", ""),
    ("scoring", "scoring_func mapping map", ""),
    ("bias", "e_score_correction_bias expert_bias", ""),
    ("norm_topk_prob", "renormalize", ""),
    ("routed_scaling_factor", "route_scale", ""),
    ("capacity", "expert_capacity", ""),
    ("counts", "tokens_per_expert", ""),
    ("tokens", "total_num_tokens", ""),
    ("iterations", "n_iters n_iter num_iters max_iter numItermax", ""),
    # others
    ("temperature", "reg epsilon", ""),
)

_INSTEAD = {  # options of other libraries that we have not, and what to do
    "mapping": "anymax.apply and anymax.fenchel_young take any map",
    "k": "leave it out, since any number of classes may have a probability",
    "n_iter": "leave it out, since the answer is exact",
    "ensure_sum_one": "leave it out, since it always is",
    "tau": "divide the scores by it",
    "temperature": "divide the scores by it",
    "T": "divide the scores by it",
    "beta": "multiply the scores by it",
    "b": "add log(b) to the scores",
    "alpha": "only entmax, bounded and normmax have it, as in anymax.Entmax(alpha=1.3)",
    "return_support_size": "see anymax.threshold, which has it",
    "input": "the scores come first, without a name",
    "logits": "the scores come first, without a name",
    "y_pred": "the scores come first, without a name",
    "from_logits": "leave it out, since the scores are logits",
    "average_attn_weights": "need_weights=True gives the weights of each head; average them",
    "num_heads": "q, k and v have the shape [batch, heads, length, features]; anymax.nn.Attention splits heads",
}


# what to write, by the name of each function that takes a map; "" where the map comes first
_PLACES: dict[str, str] = {}


def place_of_map(who: str) -> str:
    """Where the map stands among the arguments of a function, for an error; "" where it comes first."""
    return _PLACES.get(who, "")


def _note_place(who: str, takes: tuple[str, ...], without_a_name: int, required: tuple[str, ...]) -> None:
    """Note where the map of a function stands. Of two functions with one name the first counts, that of `import anymax`."""
    for name in ("mapping", "scoring"):
        if name in takes:
            place = takes.index(name)
            named = place >= without_a_name
            arguments = (*(required if named else takes[:place]), f"{name}=..." if named else name)
            _PLACES.setdefault(who, f"write {who}({', '.join(arguments)})" if place else "")


def option_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """The options of a function of (map, scores, axis). Call it once, since reading a signature takes 20 us.

    Examples
    --------
    >>> option_names(anymax.log_apply)
    ('axis', 'dim', 'mask', 'dtype')
    """
    return "axis", *(p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY)


def check_options(who: str, takes: tuple[str, ...], options: Any, hints: dict[str, str] | None = None) -> Any:
    """`options`, or an error in the name of `who` if one of them is not in `takes`.

    Examples
    --------
    >>> check_options("sparsemax", ("axis", "mask"), {"where": True})
    Traceback (most recent call last):
    TypeError: sparsemax has no option 'where' (say mask=, True = keep); its options are axis, mask
    """
    for name in options:
        if name not in takes:
            raise _unknown_option(who, takes, name, hints or {})
    return options


def _unknown_option(
    who: str, takes: tuple[str, ...], name: str, hints: dict[str, str], options: tuple[str, ...] = ()
) -> TypeError:
    """The error; hints: the advice of `who`, before that of all; options: those of `takes` that may be left out."""
    elsewhere = (
        f"say {ours}={how}" for ours, theirs, how in _OPTIONS_ELSEWHERE if ours in takes and name in theirs.split()
    )
    near = nearest(name, takes)
    hint = (
        hints.get(name)
        or _by_a_transform(takes, name)
        or next(elsewhere, "")
        or _INSTEAD.get(name)
        or (f"did you mean {near}=?" if near else "")
    )
    rest = f"its options are {', '.join(options or takes)}" if takes else "it takes none"
    return TypeError(f"{who} has no option {name!r}{f' ({hint})' if hint else ''}; {rest}")


_TRANSFORMS = {  # what a transform does here and an option elsewhere; and the name of our option, where there is one
    "top_k": ("anymax.topk(50)", "k"), "top_p": ("anymax.topp(0.9)", "p"), "min_p": ("anymax.minp(0.1)", ""),
    "temperature": ("anymax.temperature(0.7)", "temperature"), "T": ("anymax.temperature(0.7)", "temperature"),
    "repetition_penalty": ("anymax.transforms.repetition_penalty(tokens, 1.2)", ""),
}  # fmt: skip


def _by_a_transform(takes: tuple[str, ...], name: str) -> str | None:
    """Advice for an option that is a transform here; None if there is none, or an option of ours does it."""
    transform, ours = _TRANSFORMS.get(name, ("", ""))
    if not transform or ours in takes:
        return None
    if "transform" in takes:
        return f"write transform={transform}"
    return None if name in ("temperature", "T") else f"put the scores through {transform} first"


def takes_transforms(names: Iterable[str]) -> Callable[[Function], Function]:
    """Decorate a function of transforms, which have these names, so that one given as an option raises an error that says what to write."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*transforms: Any, **options: Any) -> Any:
            for name, value in options.items():
                write = (
                    f"anymax.transforms.{name}({value!r})"
                    if name in names
                    else _TRANSFORMS.get(name, ("transforms", ""))[0]
                )
                who = function.__name__
                raise TypeError(f"{who} takes transforms, and no options, got {name}={value!r}; write {who}({write})")
            return function(*transforms)

        return call  # type: ignore[return-value]

    return decorate


_FIELD_HINTS = {  # names that newcomers give to a map when they construct it
    **dict.fromkeys(("dim", "axis"), "it goes to the call, as in anymax.apply(mapping, x, dim=1)"),
    **dict.fromkeys(("mask", "out", "dtype"), "it goes to the call, as in anymax.apply(mapping, x, mask=keep)"),
    **dict.fromkeys(("temperature", "tau", "T"), "divide the scores by it, as in mapping(anymax.temperature(2.0)(x))"),
    "learn": "anymax.nn.Activation and anymax.nn.Loss take it, as in learn='alpha'",
}


def check_fields(kind: type, names: Iterable[str]) -> None:
    """An error if a map of the class `kind` is constructed with a name that it does not take.

    Examples
    --------
    >>> check_fields(anymax.Sparsemax, {"dim": -1})
    Traceback (most recent call last):
    TypeError: Sparsemax has no option 'dim' (it goes to the call, as in anymax.apply(mapping, x, dim=1)); it takes none
    """
    if not inspect.isfunction(kind.__init__):
        return
    (_, *takes), _, open_ended = _parameters(kind.__init__)
    for name in names:
        if not open_ended and name not in takes:
            raise _unknown_option(kind.__name__, tuple(takes), name, _FIELD_HINTS)


def check_positions(kind: type, values: tuple[Any, ...]) -> None:
    """An error if a map of the class `kind` is constructed with more values than it takes without a name."""
    if not inspect.isfunction(kind.__init__):
        return
    (_, *takes), most, _ = _parameters(kind.__init__)
    if len(values) > most - 1 and not kind.__init__.__code__.co_flags & inspect.CO_VARARGS:
        takes = takes[: most - 1]
        many = f"{len(takes)} without a name ({', '.join(takes)})" if takes else "no arguments"
        example = f"{kind.__name__}({', '.join(f'{name}=...' for name in takes)})"
        raise TypeError(f"{kind.__name__} takes {many}, got {len(values)}; to apply it to scores x, write {example}(x)")


def check_keywords(hints: dict[str, str] | None = None, /, **aliases: str) -> Callable[[Function], Function]:
    """Decorate a function so that an unknown keyword raises an error that names the right one; a function with `**options` raises its own.
    A missing argument, such as the map, raises one that says what to write.

    Parameters
    ----------
    hints
        Advice for a keyword, before that of `_OPTIONS_ELSEWHERE` and `_INSTEAD`; under "", advice for too many values without a name.
    aliases
        The names that other libraries use for its parameters; their values are passed on under our name.

    Examples
    --------
    >>> @check_keywords(key="k")
    ... def scores(q, k): ...
    >>> scores(1, query=2)
    Traceback (most recent call last):
    TypeError: scores has no option 'query'; its options are q, k
    """

    def decorate(function: Function) -> Function:
        show_options(function)
        names, most, open_ended = _parameters(function)
        who, words = function.__qualname__.removesuffix(".__init__"), hints or {}
        bound, required = int("self" in names), _required(function)
        least = len(required)
        takes = names[bound:]
        optional = tuple(name for name in takes if name not in required)
        _note_place(who, takes, most - bound, required[bound:])

        def renamed(args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
            out = {}
            for name, value in options.items():
                ours = aliases.get(name, name)
                if not open_ended and ours not in takes:
                    raise _unknown_option(who, takes, name, words, optional)
                if ours in out or (name in aliases and (ours in options or ours in takes[: len(args) - bound])):
                    raise TypeError(f"{who}: {name}= is another name of {ours}, which is given too; give only one")
                out[ours] = value
            return out

        def too_many(count: int) -> TypeError:
            first, rest = takes[: most - bound], takes[most - bound :]
            others = f"; name the others: {'=, '.join(rest)}=" if rest else ""
            advice = f"; {words['']}" if "" in words else others
            if not takes:
                return TypeError(f"{who} takes no arguments, got {count}{advice}")
            return TypeError(f"{who} takes {len(first)} without a name ({', '.join(first)}), got {count}{advice}")

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if len(args) > most:
                raise too_many(len(args) - bound)
            if options:
                options = renamed(args, options)
            if len(args) < least and any(name not in options for name in required[len(args) :]):
                raise _lacking(who, required[bound:], args[bound:], options)
            return function(*args, **options)

        return call  # type: ignore[return-value]

    return decorate


def _required(function: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters that must be given, and may be given without a name, in order."""
    code = function.__code__
    if not hasattr(function, "__signature__") and not hasattr(function, "__wrapped__"):
        return code.co_varnames[: code.co_argcount - len(function.__defaults__ or ())]  # type: ignore[attr-defined]
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty)


def _lacking(who: str, required: tuple[str, ...], args: tuple[Any, ...], options: dict[str, Any]) -> TypeError:
    """The error for arguments that are missing: the map, if it is, or if scores stand in its place."""
    missing = [name for name in required[len(args) :] if name not in options]
    call = f"{who}({', '.join('anymax.Softmax()' if name.startswith('mapping') else name for name in required)})"
    if required[0].startswith("mapping"):
        if missing[0] == required[0]:
            return TypeError(f"{who}: the map is missing; write {call}")
        first: Any = args[0] if args else None
        shape = f" of shape {tuple(first.shape)}" if is_array(first) else None
        if shape is not None or isinstance(first, (list, tuple)):
            got = f"{type(first).__name__}{shape or ''}"
            return TypeError(f"{who}: the map is missing, since {got} comes first; write {call}")
    return TypeError(f"{who}: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; write {call}")


def _parameters(function: Callable[..., Any]) -> tuple[tuple[str, ...], int, bool]:
    """The names of its parameters, how many may be given without a name, and whether it has `**options`."""
    code = function.__code__
    # a signature takes 20 us to read; hasattr is what torch.compile traces, also in torch 2.11
    if not hasattr(function, "__signature__") and not hasattr(function, "__wrapped__"):
        named = code.co_argcount + code.co_kwonlyargcount
        return code.co_varnames[:named], code.co_argcount, bool(code.co_flags & inspect.CO_VARKEYWORDS)
    parameters = inspect.signature(function).parameters.values()
    names = tuple(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)
    most = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    return names, most, len(names) < len(parameters)
