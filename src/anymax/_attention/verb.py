"""`attention` and `explain_attention`, the public functions."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

from .. import kernels
from .._array import (
    Array,
    Namespace,
    as_dtype,
    as_written,
    beside,
    check_scalar,
    fit_axes,
    is_array,
    like,
    namespace,
    upcast,
)
from .._core.mapping import Mapping
from .._core.options import check_keywords
from .._core.tables import document, documented_like
from .._core.typing import AnyArray, ArrayT
from . import implementations
from .call import AttentionCall, AttentionOptions, Options, checked

_WORDS = {
    "temperature": "say scale=1 / (T * sqrt(features)), or transform=anymax.temperature(T)",
    "tau": "say scale=1 / (T * sqrt(features)), or transform=anymax.temperature(T)",
    "T": "say scale=1 / (T * sqrt(features)), or transform=anymax.temperature(T)",
    "top_k": "say transform=anymax.topk(50)",
    "alpha": "it belongs to the map, as in mapping=anymax.Entmax(alpha=1.3)",
}


@overload
def attention(
    q: ArrayT, k: ArrayT, v: ArrayT, mapping: Mapping | str | None = None, mask: AnyArray | None = None, is_causal: bool = False,
    scale: float | AnyArray | None = None, enable_gqa: bool = False, bias: AnyArray | None = None, dropout_p: float = 0.0,
    generator: Any = None, *, need_weights: Literal[False] = False, return_threshold: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> ArrayT: ...  # fmt: skip


@overload
def attention(
    q: ArrayT, k: ArrayT, v: ArrayT, mapping: Mapping | str | None = None, mask: AnyArray | None = None, is_causal: bool = False,
    scale: float | AnyArray | None = None, enable_gqa: bool = False, bias: AnyArray | None = None, dropout_p: float = 0.0,
    generator: Any = None, *, need_weights: Literal[True], return_threshold: Literal[False] = False, **options: Unpack[AttentionOptions],
) -> tuple[ArrayT, ArrayT]: ...  # fmt: skip


@overload
def attention(
    q: ArrayT, k: ArrayT, v: ArrayT, mapping: Mapping | str | None = None, mask: AnyArray | None = None, is_causal: bool = False,
    scale: float | AnyArray | None = None, enable_gqa: bool = False, bias: AnyArray | None = None, dropout_p: float = 0.0,
    generator: Any = None, *, need_weights: Literal[False] = False, return_threshold: Literal[True], **options: Unpack[AttentionOptions],
) -> tuple[ArrayT, ArrayT]: ...  # fmt: skip


@overload
def attention(
    q: ArrayT, k: ArrayT, v: ArrayT, mapping: Mapping | str | None = None, mask: AnyArray | None = None, is_causal: bool = False,
    scale: float | AnyArray | None = None, enable_gqa: bool = False, bias: AnyArray | None = None, dropout_p: float = 0.0,
    generator: Any = None, *, need_weights: Literal[True], return_threshold: Literal[True], **options: Unpack[AttentionOptions],
) -> tuple[ArrayT, ArrayT, ArrayT]: ...  # fmt: skip


@overload
def attention(
    q: ArrayT, k: ArrayT, v: ArrayT, mapping: Mapping | str | None = None, mask: AnyArray | None = None, is_causal: bool = False,
    scale: float | AnyArray | None = None, enable_gqa: bool = False, bias: AnyArray | None = None, dropout_p: float = 0.0,
    generator: Any = None, *, need_weights: bool, return_threshold: Literal[False] = False, **options: Unpack[AttentionOptions],
) -> ArrayT | tuple[ArrayT, ArrayT]: ...  # fmt: skip


@overload
def attention(
    q: ArrayT, k: ArrayT, v: ArrayT, mapping: Mapping | str | None = None, mask: AnyArray | None = None, is_causal: bool = False,
    scale: float | AnyArray | None = None, enable_gqa: bool = False, bias: AnyArray | None = None, dropout_p: float = 0.0,
    generator: Any = None, *, need_weights: bool = False, return_threshold: bool, **options: Unpack[AttentionOptions],
) -> ArrayT | tuple[ArrayT, ...]: ...  # fmt: skip


@check_keywords(_WORDS, query="q", key="k", value="v", attn_mask="mask")
def attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    mapping: Mapping | str | None = None,
    mask: AnyArray | None = None,
    is_causal: bool = False,
    scale: float | AnyArray | None = None,
    enable_gqa: bool = False,
    bias: AnyArray | None = None,
    dropout_p: float = 0.0,
    generator: Any = None,
    *,
    need_weights: bool = False,
    return_threshold: bool = False,
    **options: Unpack[AttentionOptions],
) -> ArrayT | tuple[ArrayT, ...]:
    """Attention `p(scale q k^T + bias) v`, where p is any map, not only softmax.

    It takes the shapes of `torch.nn.functional.scaled_dot_product_attention`, on NumPy, torch and JAX. Its fourth argument is the map, so
    give a mask by name, as `mask=` or `attn_mask=`. With a sparse map each query
    attends to a few keys, and the others get a weight of exactly 0. `anymax.nn.Attention` is the torch module, `anymax.hf` is for
    models of transformers, and `explain_attention` says which implementation a call gets.

    The order is: scale, softcap, bias, alibi, mask, transform, sink, map, mix, dropout. The output of a query without a key is 0.
    torch's own attention ("sdpa") has no second derivatives; choose "blockwise" or "reference" for them.

    Parameters
    ----------
    mapping
        The map from the S scores of a query to its weights, such as `Sparsemax()`, or its name, such as "entmax:alpha=1.3";
        softmax by default. An alpha for each head has the shape [H, 1, 1], and may be learned.
    mask
        Boolean, True = keep, or numbers that are added to the scores; it broadcasts to [..., H, L, S]. A mask of padding
        is [batch, 1, 1, S].
    bias
        Numbers that are added to the scores, such as the logarithm of a prior.
    generator
        The source of dropout's random numbers: an integer seed, or the framework's own generator or key. NumPy and torch
        use their global generator by default.
    alibi
        True, or a slope for each head, [H], or for each head of each batch, [..., H]: the slope times the distance between
        query and key is subtracted from the score.
    softcap
        A number c above 0; the scores become c tanh(scores / c), before bias and mask.
    q_lengths
        How many queries of each batch are real; the output of the others is 0.
    offset
        The position of the first query among the keys: S - L for new queries at the end of a cache. A number, or one for
        each batch.
    sink
        The score of one more key for each head, [H], or for each query, [..., H, L, 1], with a value vector of 0: it takes the
        weight that no other key should get. The map `Sink` is the same.
    transform
        A function of the masked scores, such as `temperature(2.0)`, `scalable()`, `prior(scale=...)` or `topk(8)`.
    mix
        (prior, weight), mixed into the weights where a query may attend: `(1 - weight) p + weight prior`.
    need_weights
        Return the weights too.
    return_threshold
        Return the threshold of each query too, [..., H, L], as `anymax.threshold` gives it for the scores; for softmax logsumexp, with
        which attention over parts of the keys is merged. It has a gradient; for half precision it is in fp32.
    implementation
        "sdpa" (torch's own), "triton" (GPU kernels for softmax, sparsemax, entmax and budget), "blockwise" (never holds the
        whole matrix), "linear" (`Taylor(2)` in linear time, see `linear_attention`) or "reference"; by default the first
        that can compute the call and is expected to be fast.

    Returns
    -------
    Array | tuple[Array, ...]
        The output, [..., H, L, Dv], of the kind and dtype of q; with `need_weights` also the weights, [..., H, L, S], those after map and
        mix, before dropout and without the sink; with `return_threshold` also the thresholds, which come last.

    Examples
    --------
    >>> import numpy as np
    >>> from anymax import Sparsemax, attention
    >>> q, k, v = np.eye(2), np.array([[3.0, 0.0], [0.0, 1.0]]), np.array([[1.0], [5.0]])
    >>> attention(q, k, v, Sparsemax(), scale=1.0)
    array([[1.],
           [5.]])
    """
    arguments = Options(
        mapping, mask, is_causal, scale, enable_gqa, bias, dropout_p, generator, need_weights=need_weights,
        return_threshold=return_threshold, **options,
    )  # fmt: skip
    asked = implementations.named(arguments.implementation)
    call = checked(q, k, v, arguments)
    xp, dtype = namespace(call.q), call.q.dtype
    with as_written(call.q):
        out, p, tau = implementations.choose(call, asked).run(call)
        if arguments.mix is not None:
            out, p = _mixed(call, out, p, arguments.mix, xp)
    results = [as_dtype(out, dtype, xp)]
    results += [as_dtype(p, dtype, xp)] if call.need_weights else []
    results += [tau] if call.return_threshold else []
    return results[0] if len(results) == 1 else tuple(results)


@check_keywords(_WORDS, query="q", key="k", value="v", attn_mask="mask")
@documented_like(attention)
def explain_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    mapping: Mapping | str | None = None,
    mask: AnyArray | None = None,
    is_causal: bool = False,
    scale: float | AnyArray | None = None,
    enable_gqa: bool = False,
    bias: AnyArray | None = None,
    dropout_p: float = 0.0,
    generator: Any = None,
    *,
    need_weights: bool = False,
    return_threshold: bool = False,
    **options: Unpack[AttentionOptions],
) -> kernels.Explanation:
    """Which implementation computes a call of `attention`, and why those before it do not.

    Use it when attention is slower, or takes more memory, than you expect. It computes no attention. `anymax.explain` does the same for
    the other functions.

    Parameters
    ----------
    q
        The queries, [..., H, L, D]; their values don't matter, so zeros of the right shape, dtype and device will do.
    k
        The keys, [..., H, S, D].
    mapping, mask, is_causal, scale, enable_gqa, bias, dropout_p, generator
        As in `attention`.
    window, alibi, softcap, lengths, q_lengths, offset, sink, transform, mix, need_weights, return_threshold, implementation
        As in `attention`.

    Returns
    -------
    kernels.Explanation
        An `Explanation`: the chosen implementation, and why each one before it was passed over; print it to read it.

    Examples
    --------
    >>> import numpy as np
    >>> from anymax import Sparsemax, explain_attention
    >>> q = np.zeros((2, 3, 4))
    >>> explain_attention(q, q, q, Sparsemax(), is_causal=True)
    Sparsemax()
      attention  reference
          not sdpa: torch has attention with softmax, not with sparsemax
          not triton: it takes torch tensors on a GPU
          not blockwise: it takes torch tensors; XLA fuses the formula on its own, and NumPy has the reference
          not linear: only Taylor softmax of order 2 has features of finite size, not sparsemax
    <BLANKLINE>
    reference: array operations, which hold the matrix of all scores
    To force another: attention(..., implementation=NAME).
    """
    arguments = Options(
        mapping, mask, is_causal, scale, enable_gqa, bias, dropout_p, generator, need_weights=need_weights,
        return_threshold=return_threshold, **options,
    )  # fmt: skip
    asked = implementations.named(arguments.implementation)
    call = checked(q, k, v, arguments)
    with as_written(call.q):
        chosen, refusals = implementations.explained(call, asked)
    return kernels.Explanation(call.scores.mapping, (("attention", chosen.name, refusals),), verbose=True)


def _mixed(call: AttentionCall, out: Array, p: Any, mix: Any, xp: Namespace) -> tuple[Array, Any]:
    """Mixes the prior in after the map: the output is linear in p, so no implementation needs to know the prior."""
    if not isinstance(mix, (tuple, list)) or len(mix) != 2:
        raise TypeError(f"attention: mix must be a pair (prior, weight), got {type(mix).__name__}")
    prior = beside(mix[0], call.q, "the prior of mix", xp)
    prior = fit_axes(prior, call.scores.shape, "attention: the prior of mix")
    v = upcast(call.v, xp)
    prior = xp.broadcast_to(like(prior, v, xp), call.scores.shape)
    keep = call.scores.attended(prior, xp)
    prior = prior if keep is None else xp.where(keep, prior, xp.zeros_like(prior))
    weight = mix[1]
    if is_array(weight):
        weight = beside(weight, call.q, "the weight of mix", xp)
        weight = like(fit_axes(weight, (*call.scores.shape[:-1], 1), "attention: the weight of mix"), v, xp)
    else:
        weight = check_scalar(
            "attention: the weight of mix", weight, lambda v: 0 <= v <= 1, "a number from 0 to 1 or an array"
        )
    out = (1.0 - weight) * upcast(out, xp) + weight * implementations.values(prior, v, call.groups)
    return out, None if p is None else (1.0 - weight) * upcast(p, xp) + weight * prior


document(globals())
