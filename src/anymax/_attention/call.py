"""The arguments of one call of `attention`, checked; torch's autocast and causal biases are translated here."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

from .._array import (
    Array,
    autocast,
    beside,
    check_flag,
    check_scalar,
    device_of,
    dtype_name,
    fit_axes,
    in_memory,
    is_array,
    is_boolean,
    is_floating,
    is_int,
    is_number,
    known,
    namespace,
    number,
)
from .._core.mapping import Mapping, no_threshold
from .._core.names import as_mapping
from .._core.tables import Default
from .._core.typing import AnyArray
from ..mappings import Sink, Softmax
from ..transforms.base import is_function, not_transform
from . import operands
from .scores import Scores, alibi_slopes

ImplementationName = Literal["sdpa", "triton", "blockwise", "linear", "reference"]


class AttentionOptions(TypedDict, total=False):
    """The keyword-only options of `attention`. The words are those that kinds of attention share.

    Parameters
    ----------
    q
        The queries, [..., H, L, D]: floating-point numbers of 16 bits or more, in an array of NumPy, torch or JAX.
    k
        The keys, [..., H, S, D], of the same kind and dtype.
    v
        The values, [..., H, S, Dv].
    is_causal
        Query i attends to the keys up to offset + i only.
    scale
        The factor of q k^T, a number or an array; 1 / sqrt(D) by default.
    enable_gqa
        Let several heads of q share one head of k and v; the number of heads of k must divide that of q.
    dropout_p
        The share of the weights that is set to 0, from 0 to below 1; for training.
    window
        How many keys before and after itself a query attends to: a number, or a pair (before, after) with None for no
        limit.
    softcap
        A number c above 0; the scores become c tanh(scores / c).
    lengths
        How many keys of each batch are real, as integers; the others are padding and are masked.
    """

    window: int | tuple[int | None, int | None] | None
    alibi: bool | AnyArray | None
    softcap: float | None
    lengths: AnyArray | None
    q_lengths: AnyArray | None
    offset: Annotated[int | AnyArray, Default(0)]
    sink: AnyArray | None
    transform: Callable[[Any], Any] | None
    mix: tuple[AnyArray, float | AnyArray] | None
    implementation: ImplementationName | None


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of `attention` beside q, k and v, as the caller gave them."""

    mapping: Mapping | str | None = None
    mask: Any = None
    is_causal: bool = False
    scale: float | AnyArray | None = None
    enable_gqa: bool = False
    bias: AnyArray | None = None
    dropout_p: float = 0.0
    generator: Any = None
    _: dataclasses.KW_ONLY
    window: int | tuple[int | None, int | None] | None = None
    alibi: bool | AnyArray | None = None
    softcap: float | None = None
    lengths: AnyArray | None = None
    q_lengths: AnyArray | None = None
    offset: int | AnyArray = 0
    sink: AnyArray | None = None
    transform: Callable[[Any], Any] | None = None
    mix: tuple[AnyArray, float | AnyArray] | None = None
    need_weights: bool = False
    return_threshold: bool = False
    implementation: ImplementationName | None = None


class AttentionCall(NamedTuple):
    """The checked arguments of one call of `attention`."""

    q: Array
    k: Array
    v: Array
    scores: Scores
    groups: int  # heads of q for each head of k
    dropout_p: float
    generator: Any
    need_weights: bool
    return_threshold: bool


class Result(NamedTuple):
    """What an implementation computes: the output, and where the call asks for them the weights and the threshold of each query."""

    out: Array
    weights: Any = None  # [..., H, L, S]
    tau: Any = None  # [..., H, L]


def checked(q: Array, k: Array, v: Array, options: Options) -> AttentionCall:
    """The checked call, with q, k and v in the dtype of torch's autocast, as torch's own attention has them."""
    if is_array(options.mapping):
        raise TypeError("attention: after q, k and v comes the map; give a mask as mask=")
    if isinstance(options.mask, (int, float)):
        raise TypeError(
            f"attention: mask must be an array, got {options.mask!r}; a parameter of the map goes with it, as in anymax.Entmax(alpha=1.3)"
        )
    mapping = Softmax() if options.mapping is None else as_mapping(options.mapping, "attention")
    if isinstance(mapping, Sink):
        if options.sink is not None:
            raise ValueError(f"attention: {mapping!r} has a sink, and sink= gives another; give one of them")
        if mapping.bound is not None:
            raise TypeError(
                f"attention: {mapping!r}: in attention the sink has the bound of the keys; leave bound= out"
            )
        mapping, options = mapping.inner, dataclasses.replace(options, sink=mapping.score)
    for name in ("is_causal", "enable_gqa", "need_weights", "return_threshold"):
        check_flag("attention", name, getattr(options, name))
    dropout_p = operands.check_dropout("attention", "dropout_p", number(options.dropout_p))
    q, k, v = (autocast(in_memory(a, name)) for a, name in ((q, "q"), (k, "k"), (v, "v")))
    groups, shape = operands.check("attention", q, k, v, options.enable_gqa)
    if is_causal_bias(options.mask):
        options = _without_causal_bias(options, q, shape)
    scores = _scores(q, shape, mapping, options)
    if shape[-1]:
        mapping.check(shape[-1] + (options.sink is not None))
    if options.return_threshold and not mapping.has_threshold:
        raise TypeError(no_threshold(mapping))
    return AttentionCall(
        q, k, v, scores, groups, float(dropout_p), options.generator, options.need_weights, options.return_threshold
    )


def _scores(q: Array, shape: tuple[int, ...], mapping: Mapping, options: Options) -> Scores:
    """The options that make the scores, checked, their arrays with the axes of the scores."""
    arrays: dict[str, Array] = {}
    xp, fitting = namespace(q), operands.Fitting("attention", q, shape)
    factor = 1.0
    scale, softcap, offset = (number(value) for value in (options.scale, options.softcap, options.offset))
    transform = options.transform
    if scale is None:
        factor = 1.0 / math.sqrt(q.shape[-1]) if q.shape[-1] else 1.0
    elif is_array(scale):
        arrays["scale"] = fitting.real(scale, "scale")
    elif is_number(scale):
        factor = float(scale)
    else:
        raise TypeError(f"attention: scale must be a number or an array, got {scale!r}")
    if options.bias is not None:
        arrays["bias"] = fitting.real(options.bias, "bias")
    if options.mask is not None:
        mask = beside(options.mask, q, "mask", xp)
        if is_boolean(mask):
            arrays["keep"] = fitting.array(mask, "mask")
        elif is_floating(mask):
            arrays["additive"] = fitting.real(mask, "mask")
        else:
            raise TypeError(
                f"attention: mask must be boolean (True = keep) or real (added to the scores), got {dtype_name(mask)}"
            )
    if options.alibi is not None and options.alibi is not False:
        own = options.alibi is True
        slopes = xp.asarray(alibi_slopes(fitting.heads), **device_of(q)) if own else options.alibi
        arrays["slopes"] = fitting.by_head(slopes, "alibi")
    if options.sink is not None:
        arrays["sink"] = fitting.by_query(options.sink, "sink")
    for name, value in (("lengths", options.lengths), ("q_lengths", options.q_lengths)):
        if value is not None:
            arrays[name] = fitting.by_batch(value, name)
            _in_range(name, arrays[name], shape)
    if is_array(offset):
        arrays["offset"] = fitting.by_batch(offset, "offset")
        offset = 0
    elif not is_int(offset):
        raise TypeError(f"attention: offset must be an integer or an array of integers, got {options.offset!r}")
    if softcap is not None:
        softcap = check_scalar("attention: softcap", softcap, lambda v: 0 < v < math.inf, "a finite number above 0")
    left, right = _window(options.window)
    if transform is not None and not is_function(transform):
        hint = "; a map is given as mapping=" if isinstance(transform, Mapping) else ""
        raise TypeError(
            f"attention: transform must be a function scores -> scores such as anymax.temperature(2.0), got "
            f"{not_transform(transform)}{hint}"
        )
    for name, value in mapping.params().items():
        value = beside(value, q, name, xp)
        mapping.check_width(name, fit_axes(value, shape, f"attention: {mapping.name}: {name}"))
    return Scores(shape, mapping, transform, factor, softcap, bool(options.is_causal), left, right, int(offset), arrays)


def _window(window: Any) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    sides = (window, window) if not isinstance(window, (tuple, list)) else tuple(window)
    ok = len(sides) == 2 and all(s is None or (is_int(number(s)) and s >= 0) for s in sides)
    if not ok:
        raise ValueError(
            f"attention: window must be a number of keys or a pair (left, right) of such numbers, None for no limit, got {window!r}"
        )
    left, right = (None if s is None else int(s) for s in sides)
    return left, right


def _in_range(name: str, value: Array, shape: tuple[int, ...]) -> None:
    xp = namespace(value)
    if not known(value) or not math.prod(value.shape):
        return
    most, whose = (shape[-1], "keys") if name == "lengths" else (shape[-2], "queries")
    low, high = int(xp.min(value)), int(xp.max(value))
    if low < 0 or high > most:
        raise ValueError(
            f"attention: {name} must be from 0 to {most}, the number of {whose}, got values from {low} to {high}"
        )


# -- torch's causal biases --------------------------------------------------------------------------------------------------


def is_causal_bias(mask: Any) -> bool:
    """True for torch's `causal_lower_right` and `causal_upper_left`: only their sizes count, their elements are not a mask."""
    bias = sys.modules.get("torch.nn.attention.bias")
    return bias is not None and isinstance(mask, bias.CausalBias)


def offset_of(mask: Any) -> int:
    """The position of a causal bias's first query among its keys."""
    return mask.seq_len_kv - mask.seq_len_q if mask.variant.name == "LOWER_RIGHT" else 0


def kept_by(mask: Any, device: Any) -> Array:
    """The causal bias as a boolean mask, True = keep."""
    torch = sys.modules["torch"]
    seen = torch.ones(mask.seq_len_q, mask.seq_len_kv, dtype=torch.bool, device=device)
    return seen.tril(offset_of(mask))


def _without_causal_bias(options: Options, q: Array, shape: tuple[int, ...]) -> Options:
    """The options without the causal bias: other options, or a boolean mask, do what it does."""
    mask = options.mask
    rows, keys = mask.seq_len_q, mask.seq_len_kv
    if (rows, keys) != shape[-2:]:
        raise ValueError(
            f"attention: the mask is a causal bias for {rows} queries and {keys} keys, and there are {shape[-2]} and {shape[-1]}"
        )
    if not options.is_causal and options.window is None and options.alibi in (None, False):
        return dataclasses.replace(options, mask=None, is_causal=True, offset=offset_of(mask))
    # a mask, since the caller's window or ALiBi counts positions from the caller's offset
    return dataclasses.replace(options, mask=kept_by(mask, q.device))
