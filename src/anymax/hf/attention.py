"""Attention with any map in every model that uses transformers' attention interface."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from .. import transforms
from .._attention import attention
from .._core.mapping import Mapping
from .._core.options import check_keywords
from ..mappings import CATALOGUE, Entmax
from ..nn.base import OfMapping
from .checks import check_first

_PREFIX = "anymax_"
_TRANSFORMS = ("temperature", "scalable")
# ranks are no weights of keys, a bound is that of a known class, and a ratio takes functions, which a config can't hold
_NO_ATTENTION = ("bounded", "ranks", "ratio")
_KINDS: dict[str, Any] = {kind.name: kind for kind in CATALOGUE if kind.name not in _NO_ATTENTION}
_KINDS["entmax15"] = functools.partial(Entmax, alpha=1.5)
# models with some attention that bypasses the interface
_PARTLY_OWN = ("bigbird_pegasus", "git", "informer", "longt5", "pegasus_x")
_ALWAYS_MASKED: set[type] = set()  # configs of models whose layers may have a wrong `is_causal`
NAMES: tuple[str, ...] = tuple(_PREFIX + name for name in sorted(_KINDS))  # the names for `attn_implementation`


@check_keywords({"": "it registers all maps for attention; name one as attn_implementation='anymax_sparsemax'"})
def register() -> tuple[str, ...]:
    """Registers the maps for attention with transformers, for names such as `attn_implementation="anymax_sparsemax"`.

    Call it before you create a model; a second call does no harm. It works for every model that uses transformers' attention interface
    (Llama, BERT, T5, ...). A model with its own attention code (Bloom, DeBERTa) would silently use softmax, so it raises an
    error for these names from then on.

    Returns
    -------
    tuple[str, ...]
        `NAMES`, the registered names.

    Examples
    --------
    >>> import torch, transformers
    >>> from anymax import hf
    >>> "anymax_entmax15" in hf.register()
    True
    >>> config = transformers.BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=9)
    >>> config.anymax = {"alpha": 1.3}  # for all heads; a list is one number for each
    >>> model = transformers.BertModel._from_config(config, attn_implementation="anymax_entmax").eval()
    >>> model(torch.tensor([[1, 2, 3]])).last_hidden_state.shape
    torch.Size([1, 3, 16])
    """
    for name in NAMES:
        transformers.AttentionInterface.register(name, functools.partial(attend, name))
        # without a mask function of the same name, transformers would pass no mask
        AttentionMaskInterface.register(name, _mask)
    check_first(transformers.PreTrainedModel, "get_correct_attn_implementation", _refuse_own_code)
    return NAMES


def _mask(*args: Any, config: Any = None, allow_is_causal_skip: bool = True, **options: Any) -> Tensor | None:
    """torch's mask, True = keep, or None where a layer's `is_causal` is enough.

    Where layers share keys (Gemma 4), some queries are dropped later, and only a mask tells which.
    """
    skip = (
        allow_is_causal_skip and type(config) not in _ALWAYS_MASKED and not getattr(config, "num_kv_shared_layers", 0)
    )
    return sdpa_mask(*args, config=config, allow_is_causal_skip=skip, **options)


def _refuse_own_code(model: Any, requested_attention: str | None, *args: Any, **options: Any) -> None:
    """An error for models with attention code of their own, which would use softmax and add boolean masks as numbers."""
    if requested_attention in NAMES and (_own_code(type(model)) or model.config.model_type in _PARTLY_OWN):
        raise ValueError(
            f"{requested_attention}: {type(model).__name__} has attention code of its own; the models that work are those "
            "whose attention goes through transformers' attention interface, such as Llama, BERT and T5"
        )
    if not (model._supports_sdpa or model._supports_attention_backend):
        _ALWAYS_MASKED.add(type(model.config))


def _own_code(kind: type) -> bool:
    try:
        inspect.getsource(sys.modules[kind.__module__])
    except (KeyError, OSError, TypeError):  # no source, as in a notebook: it is up to the author
        return False
    return not kind._can_set_attn_implementation()  # type: ignore[attr-defined]


def attend(
    name: str,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    sinks: Tensor | None = None,
    block_indices: Tensor | None = None,
    cache: Any = None,
    output_attentions: bool | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function that `register` gives to transformers; call it only from your own attention code.

    It has the signature of transformers' attention interface. The map is that of the module's attribute `anymax` if it has one, else
    the map `name` with the parameters of `module.config.anymax`.

    Parameters
    ----------
    name
        One of `NAMES`, such as "anymax_sparsemax".
    module
        The attention layer, with its attributes `config`, `is_causal` and `anymax`.
    query
        [B, heads, L, D].
    key, value
        [B, heads of keys, S, D].
    attention_mask
        The mask from transformers, including a sliding window: boolean, True = keep, or numbers to add to the scores.
    scaling
        The factor of the scores; 1 / sqrt(D) by default.
    dropout
        The share of the weights that is set to 0.
    is_causal
        Whether to hide later keys if there is no mask; by default the module's `is_causal`.
    position_bias
        Numbers to add to the scores (T5).
    softcap
        A number c; the scores become c tanh(scores / c) (Gemma 2).
    s_aux
        One extra score for each head, of a key without a value (gpt-oss).
    indices
        The keys that a query may see, [B, L, count], if the model selects them (DeepSeek-V3.2).
    sinks
        The same for each query, [B, heads, L, 1] (Inkling 2).
    block_indices, cache
        Not supported; they are an error.
    output_attentions
        Return the weights too.
    others
        Arguments of other implementations, such as positions; ignored.

    Returns
    -------
    tuple[Tensor, Tensor | None]
        (output [B, L, heads, D], weights [B, heads, L, S] or None).

    Examples
    --------
    >>> import torch
    >>> layer = torch.nn.Module()
    >>> q = torch.zeros(1, 2, 3, 4)
    >>> out, weights = attend("anymax_sparsemax", layer, q, q, q, None, output_attentions=True)
    >>> out.shape, weights[0, 0]
    (torch.Size([1, 3, 2, 4]), tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333]]))
    """
    if cache is not None:
        raise ValueError(f"{name}: the paged cache of continuous batching is not supported; use generate() or 'sdpa'")
    if block_indices is not None:
        raise ValueError(
            f"{name}: {type(module).__name__} has blocks of keys, which anymax does not support; use 'eager'"
        )
    if sinks is not None and s_aux is not None:
        raise ValueError(
            f"{name}: {type(module).__name__} gives sinks for each head and for each query; give one of them"
        )
    config = getattr(module, "config", None)
    mapping, transform = _of(name, module, config, query)
    length = query.shape[-2]
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    keep, bias = _masks(attention_mask, position_bias)
    if indices is not None:
        chosen = torch.zeros(*indices.shape[:-1], key.shape[-2], dtype=torch.bool, device=key.device)
        chosen = chosen.scatter(-1, indices.long(), True)[:, None]
        keep = chosen if keep is None else keep & chosen
    weights = bool(getattr(config, "output_attentions", False) if output_attentions is None else output_attentions)
    found: Any = attention(
        query, key, value, mapping, mask=keep, bias=bias, is_causal=bool(causal) and attention_mask is None and length > 1,
        scale=scaling, enable_gqa=query.shape[1] != key.shape[1], dropout_p=dropout, softcap=softcap,
        sink=s_aux if sinks is None else sinks, transform=transform, need_weights=weights,
    )  # fmt: skip
    out, p = found if weights else (found, None)
    return out.transpose(1, 2).contiguous(), p


def _masks(mask: Tensor | None, position_bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(boolean mask with True = keep, numbers to add). A user's mask of numbers hides a key by the lowest number of its dtype."""
    if mask is None or mask.dtype == torch.bool:
        return mask, position_bias
    keep = mask > 0.5 * torch.finfo(mask.dtype).min
    added = mask.masked_fill(~keep, 0.0)
    return keep, added if position_bias is None else added + position_bias


def _of(name: str, module: torch.nn.Module, config: Any, query: Tensor) -> tuple[Mapping, Any]:
    """The map and the transform of a layer."""
    values = getattr(config, "anymax", None)
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise TypeError(
            f"{name}: the model's config has anymax={values!r}; it must be a dict of the map's parameters, such as {{'alpha': 1.3}}"
        )
    values = dict(values)
    parts = []
    for key in _TRANSFORMS:
        value = values.pop(key, None)
        if value is None or value is False:
            continue
        options = (
            {"T": value} if key == "temperature" and not isinstance(value, dict) else {} if value is True else value
        )
        if not isinstance(options, dict):
            raise TypeError(
                f"{name}: the model's config has {key}={value!r} in anymax; it must be True or a dict of its parameters"
            )
        parts.append(getattr(transforms, key)(**{k: _number(v, query) for k, v in options.items()}))
    transform = transforms.compose(*parts) if parts else None
    owned = getattr(module, "anymax", None)
    if isinstance(owned, OfMapping):
        return owned.mapping, transform
    kind = name.removeprefix(_PREFIX)
    if name not in NAMES:
        raise ValueError(f"{name!r} is not the name of a map for attention; the names are {', '.join(NAMES)}")
    if kind == "sparse_softmax" and not values:
        raise ValueError(f"{name}: say how many keys to keep in the model's config, as in anymax={{'k': 8}}")
    numbers = {k: _number(v, query) for k, v in values.items()}
    try:
        return _KINDS[kind](**numbers), transform
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: the model's config has anymax={values!r}, and {error}") from None


def _number(value: Any, query: Tensor) -> Any:
    """A number as it is, or a list as a tensor with one for each head."""
    if not isinstance(value, (list, tuple)):
        return value
    if len(value) != query.shape[1]:
        raise ValueError(f"the model's config has {len(value)} numbers in anymax for {query.shape[1]} heads")
    return torch.tensor(value, dtype=torch.float32, device=query.device).reshape(-1, 1, 1)
