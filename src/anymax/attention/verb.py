"""`attention`, `explain_attention`: what a caller says, and the order in which it is done."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from .. import kernels
from .._array import Array, Namespace, beside, is_array, like, namespace, number, upcast
from .._mapping import Mapping
from .._options import allowed, answering
from . import implementations
from .call import Call, checked
from .scores import lie, same_device

_WORDS = {
    "temperature": "say scale=1 / (T * sqrt(features)), or transform=anymax.temperature(T)",
    "tau": "say scale=1 / (T * sqrt(features)), or transform=anymax.temperature(T)",
    "T": "say scale=1 / (T * sqrt(features)), or transform=anymax.temperature(T)",
    "p": "say dropout_p=",
    "alpha": "it belongs to the map, as in mapping=anymax.Entmax(alpha=1.3)",
}


@answering(_WORDS, query="q", key="k", value="v", attn_mask="mask")
def attention(
    q: Array,
    k: Array,
    v: Array,
    mapping: Mapping | None = None,
    mask: Array | None = None,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
    bias: Array | None = None,
    dropout_p: float = 0.0,
    generator: Any = None,
    *,
    window: int | tuple[int | None, int | None] | None = None,
    alibi: Any = None,
    softcap: float | None = None,
    lengths: Array | None = None,
    q_lengths: Array | None = None,
    offset: Any = 0,
    sink: Array | None = None,
    transform: Callable[[Array], Array] | None = None,
    mix: tuple[Array, Any] | None = None,
    need_weights: bool = False,
    implementation: str | None = None,
) -> Any:
    """`p(scale q k^T + bias) v` with any map p, in the shapes of `torch.nn.functional.scaled_dot_product_attention`.

    q: [..., H, L, D]; k, v: [..., H, S, D]; the map acts on the S scores of each query. A query with nothing to attend to gives
    zeros. `enable_gqa` lets several heads of q share one of k and v. An alpha for each head has shape [H, 1, 1]; it may be learned.

    mask: boolean, True = keep, or real and added to the scores. bias: added to the scores (a prior in logarithms, say).
    is_causal: query i attends to keys up to offset + i. offset: where the first query stands among the keys, S - L for new queries
    at the end of a cache; one for all or one for each batch. window: keys up to so many places to the (left, right) of the query.
    lengths, q_lengths: how many keys and queries of each batch are real; the others are masked, and give zeros.
    alibi: True, or a slope for each head, times the distance of query and key, taken from the scores.
    softcap: c tanh(scores / c), before bias and mask. sink: one more score for each head, of a key without a value.
    transform: of the masked scores, such as `transforms.scalable()`, `temperature(T)`, `prior(scale=...)` or `topk(8)`.
    mix: (prior, weight), mixed into p after the map where a query may attend: `(1 - weight) p + weight prior`.
    dropout_p: of the probabilities, from `generator`: an integer seed or the framework's own (torch: its global one by default).
    need_weights: return (output, p), with p [..., H, L, S] as the map and `mix` gave it, before dropout, without the sink.
    implementation: "sdpa" (torch's own), "triton" (a GPU's kernels for softmax, sparsemax, entmax and budget), "blockwise" (never the
    whole matrix), "linear" (Taylor(2) in linear time, see `linear_attention`) or "reference"; by default the first that serves the call.

    Second derivatives of a softmax that torch's own attention served do not exist; ask for "blockwise" or "reference".

    The order is: scale, softcap, bias, alibi, mask, transform, sink, map, mix, dropout.

    >>> import numpy as np
    >>> from anymax import Sparsemax, attention
    >>> q, k, v = np.eye(2), np.array([[3.0, 0.0], [0.0, 1.0]]), np.array([[1.0], [5.0]])
    >>> attention(q, k, v, Sparsemax(), scale=1.0)
    array([[1.],
           [5.]])
    """
    asked = implementations.named(implementation)
    call, plain = checked(
        q, k, v, mapping, mask=mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, bias=bias, dropout_p=dropout_p,
        generator=generator, window=window, alibi=alibi, softcap=softcap, lengths=lengths, q_lengths=q_lengths, offset=offset,
        sink=sink, transform=transform, need_weights=need_weights,
    )  # fmt: skip
    xp, dtype = namespace(call.q), call.q.dtype
    with plain:
        out, p = implementations.choose(call, asked).run(call)
        if mix is not None:
            out, p = _mixed(call, out, p, mix, xp)
    out = out if out.dtype == dtype else xp.astype(out, dtype)
    if not need_weights:
        return out
    return out, p if p.dtype == dtype else xp.astype(p, dtype)


@answering(_WORDS, query="q", key="k", value="v", attn_mask="mask")
def explain_attention(q: Array, k: Array, v: Array, *args: Any, **options: Any) -> kernels.Explanation:
    """Which implementation serves this call of `attention`, with its arguments, and why not those before it. Print it to read it.

    Nothing is computed: only what the implementations say of the call is collected.

    >>> import numpy as np
    >>> from anymax import Sparsemax, explain_attention
    >>> q = np.zeros((2, 3, 4))
    >>> explain_attention(q, q, q, Sparsemax(), is_causal=True)
    Sparsemax()
      attention   reference
                  (sdpa refuses: torch has attention with softmax, not with sparsemax)
                  (triton refuses: it serves torch tensors on a GPU)
                  (blockwise refuses: it serves torch tensors; XLA fuses the formula on its own, and NumPy has the reference)
                  (linear refuses: only Taylor softmax of order 2 has features of finite size, not sparsemax)
    """
    signature = inspect.signature(attention)
    given = signature.bind(q, k, v, *args, **allowed("explain_attention", tuple(signature.parameters), options, _WORDS))
    given.apply_defaults()
    asked = implementations.named(given.arguments.pop("implementation"))
    del given.arguments["mix"]  # whoever serves, it is mixed in afterwards
    call, plain = checked(**given.arguments)
    with plain:
        chosen, refusals = implementations.explained(call, asked)
    return kernels.Explanation(call.scores.mapping, (("attention", chosen.name, refusals),))


def _mixed(call: Call, out: Array, p: Any, mix: Any, xp: Namespace) -> tuple[Array, Any]:
    """The prior after the map: p enters the output linearly, so that no implementation need know of it."""
    if not isinstance(mix, (tuple, list)) or len(mix) != 2:
        raise TypeError(f"attention: mix must be a pair (prior, weight), got {type(mix).__name__}")
    prior = beside(mix[0], call.q, "mix", xp)
    same_device(prior, call.q, "the prior of mix")
    prior = lie(prior, call.scores.shape, "the prior of mix")
    v = upcast(call.v, xp)
    prior = xp.broadcast_to(like(prior, v, xp), call.scores.shape)
    keep = call.scores.attended(prior, xp)
    prior = prior if keep is None else xp.where(keep, prior, xp.zeros_like(prior))
    weight = number(mix[1])
    if is_array(weight):
        weight = beside(weight, call.q, "mix", xp)
        same_device(weight, call.q, "the weight of mix")
        weight = like(lie(weight, (*call.scores.shape[:-1], 1), "the weight of mix"), v, xp)
    elif isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight <= 1:
        raise ValueError(f"attention: the weight of mix must be a number from 0 to 1 or an array, got {weight!r}")
    out = (1.0 - weight) * upcast(out, xp) + weight * implementations.values(prior, v, call.groups)
    return out, None if p is None else (1.0 - weight) * upcast(p, xp) + weight * prior
