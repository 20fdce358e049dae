"""Hugging Face transformers: attention with any map, in every model that uses transformers' attention interface.

>>> import anymax.hf  # doctest: +SKIP
>>> anymax.hf.register()  # doctest: +SKIP
>>> AutoModel.from_pretrained(name, attn_implementation="anymax_entmax15")  # doctest: +SKIP

The parameters of the map are in the model's config, which is saved with it, as the dict `config.anymax`: `{"alpha": 1.3}` for all heads, or
a list with a number for each head; `"temperature": T` and `"scalable": {"beta": ..., "gamma": ..., "delta": ...}` transform the scores. If
an attention module has an attribute `anymax`, such as `anymax.nn.Activation(Entmax(1.5), learn="alpha")`, its layer uses that map.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import sys
from collections.abc import Callable
from typing import Any

try:
    import array_api_compat.torch as xp
    import torch
    from torch import Tensor
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "anymax.hf needs torch; install it with: pip install 'anymax[hf,torch]'", name=error.name
    ) from None

from . import transforms
from ._attention import attention
from ._core.mapping import Mapping
from ._random.generators import going_on
from .likelihood.terms import log_p_rows, read
from .mappings import CATALOGUE, Entmax, Softmax
from .nn.base import OfMapping
from .nn.categorical import global_generator
from .sampling import samplers
from .transforms.applying import unseeded

try:
    import transformers
    from transformers.generation.configuration_utils import GenerationMode
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
except ImportError as error:
    raise ImportError("anymax.hf needs transformers 5 or later; install it with: pip install 'anymax[hf]'") from error

__all__ = ["NAMES", "LogitsProcessor", "attend", "register", "sample"]

_PREFIX = "anymax_"
_TRANSFORMS = ("temperature", "scalable")
_KINDS: dict[str, Any] = {kind.name: kind for kind in CATALOGUE if kind.name != "ratio"}
_KINDS["entmax15"] = functools.partial(Entmax, alpha=1.5)
_PARTLY_OWN = (
    "bigbird_pegasus",
    "git",
    "informer",
    "longt5",
    "pegasus_x",
)  # models with some attention that bypasses the interface
_ALWAYS_MASKED: set[type] = set()  # configs of models whose layers may have a wrong `is_causal`
NAMES: tuple[str, ...] = tuple(_PREFIX + name for name in sorted(_KINDS))  # the names for `attn_implementation`


def __dir__() -> list[str]:
    return __all__


def register() -> tuple[str, ...]:
    """Registers the maps with transformers, for names such as `attn_implementation="anymax_sparsemax"`.

    Call it before you create a model; a second call does no harm. It works for every model that uses transformers' attention interface
    (Llama, BERT, T5, ...). A model with its own attention code (Bloom, DeBERTa) would silently use softmax, so from then on these names
    are an error for it.

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
    _refuse_own_code()
    return NAMES


def _mask(*args: Any, config: Any = None, allow_is_causal_skip: bool = True, **options: Any) -> Tensor | None:
    """torch's mask, True = keep, or None where a layer's `is_causal` is enough.

    Where layers share keys (Gemma 4), some queries are dropped later, and only a mask tells which.
    """
    skip = (
        allow_is_causal_skip and type(config) not in _ALWAYS_MASKED and not getattr(config, "num_kv_shared_layers", 0)
    )
    return sdpa_mask(*args, config=config, allow_is_causal_skip=skip, **options)


def _refuse_own_code() -> None:
    """Makes the names an error for models with their own attention code, which would use softmax and add boolean masks as numbers."""
    kind = transformers.PreTrainedModel
    inner = kind.get_correct_attn_implementation
    if getattr(inner, "refuses_own_code", False):
        return

    @functools.wraps(inner)
    def checked(self: Any, requested_attention: str | None, *args: Any, **options: Any) -> str:
        if requested_attention in NAMES and (_own_code(type(self)) or self.config.model_type in _PARTLY_OWN):
            raise ValueError(
                f"{requested_attention}: {type(self).__name__} has attention code of its own; the models that work are those "
                "whose attention goes through transformers' attention interface, such as Llama, BERT and T5"
            )
        if not (self._supports_sdpa or self._supports_attention_backend):
            _ALWAYS_MASKED.add(type(self.config))
        return inner(self, requested_attention, *args, **options)

    checked.refuses_own_code = True  # type: ignore[attr-defined]
    kind.get_correct_attn_implementation = checked


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
    sinks, block_indices, cache
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
    for what, argument in (("sinks for each query", sinks), ("blocks of keys", block_indices)):
        if argument is not None:
            raise ValueError(f"{name}: {type(module).__name__} has {what}, which anymax does not support; use 'eager'")
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
        scale=scaling, enable_gqa=query.shape[1] != key.shape[1], dropout_p=dropout, softcap=softcap, sink=s_aux,
        transform=transform, need_weights=weights,
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
    if kind == "sparse_softmax" and not values:
        raise ValueError(f"{name}: say how many keys to keep in the model's config, as in anymax={{'k': 8}}")
    try:
        return _KINDS[kind](**{k: _number(v, query) for k, v in values.items()}), transform
    except TypeError as error:
        raise TypeError(f"{name}: the model's config has anymax={config.anymax!r}, and {error}") from None


def _number(value: Any, query: Tensor) -> Any:
    """A number as it is, or a list as a tensor with one for each head."""
    if not isinstance(value, (list, tuple)):
        return value
    if len(value) != query.shape[1]:
        raise ValueError(f"the model's config has {len(value)} numbers in anymax for {query.shape[1]} heads")
    return torch.tensor(value, dtype=torch.float32, device=query.device).reshape(-1, 1, 1)


# -- decoding ------------------------------------------------------------------------------------------------------------------


def _chosen(who: str, transform: Any, mapping: Mapping | None) -> tuple[Any, Mapping]:
    """The transform and the map; a map may be given as the transform."""
    if isinstance(transform, Mapping):
        if mapping is not None:
            raise TypeError(
                f"{who}: got two maps, {transform!r} and {mapping!r}; give a transform and a map, or one of them"
            )
        transform, mapping = None, transform
    mapping = Softmax() if mapping is None else mapping
    if not isinstance(mapping, Mapping):
        raise TypeError(f"{who}: mapping must be a map such as anymax.Entmax(1.5), got {mapping!r}")
    if transform is not None and (not callable(transform) or isinstance(transform, type)):
        raise TypeError(
            f"{who}: transform must be a function scores -> scores such as anymax.topp(0.9), or a map such as anymax.Entmax(1.5); got "
            f"{transform!r}"
        )
    return transform, mapping


def _log_p(who: str, transform: Any, mapping: Mapping, scores: Tensor) -> Tensor:
    rows, mapping, _ = read(who, mapping, scores, transform, None, -1, None)
    return log_p_rows(mapping, rows, xp)


class LogitsProcessor(transformers.LogitsProcessor):
    """For `model.generate(logits_processor=[...])`: turns the scores into log p of a map after a transform.

    Sampling then draws with the map's probabilities, greedy search takes the most probable token, and beam search adds log p of the
    kept tokens. `anymax.hf.sample` draws the tokens too, from a seed.

    `generate` continues after it: with `do_sample=True` pass `top_k=0`, since its default is 50. The penalties and bans of its options
    come first.

    Parameters
    ----------
    transform
        A transform of the scores: one of `anymax.transforms`, several in `compose(...)`, or your own function; or a map. A
        seed in it, as in `xtc(generator=1)`, is used once; the random numbers continue from token to token and from call to
        call.
    mapping
        The map, softmax by default. A map that changes with a common offset of the scores (`Taylor`, `Ratio`) is an error
        in beam search, which passes log-probabilities instead of scores.

    Examples
    --------
    >>> import anymax.hf
    >>> cut = anymax.hf.LogitsProcessor(anymax.compose(anymax.temperature(0.7), anymax.topp(0.9)))
    >>> tokens = model.generate(prompt, do_sample=True, top_k=0, logits_processor=[cut])  # doctest: +SKIP
    """

    def __init__(self, transform: Any = None, mapping: Mapping | None = None) -> None:
        self.transform, self.mapping = _chosen("LogitsProcessor", transform, mapping)
        self._applied: tuple[torch.device, Any] | None = None  # the transform with generators on that device
        if not self.mapping.facts.shift_invariant:
            _refuse_beams()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._applied is None or self._applied[0] != scores.device:
            self._applied = scores.device, unseeded(self.transform, scores)
        return _log_p("LogitsProcessor", self._applied[1], self.mapping, scores)

    def __repr__(self) -> str:
        return f"LogitsProcessor(transform={self.transform!r}, mapping={self.mapping!r})"


def _refuse_beams() -> None:
    """Makes beam search an error for maps that are not shift-invariant. It passes log-probabilities, but a processor can't detect that,
    since earlier processors may have changed them."""
    kind: Any = transformers.GenerationMixin
    inner = kind._beam_search
    if getattr(inner, "refuses_offsets", False):
        return

    @functools.wraps(inner)
    def checked(self: Any, input_ids: Tensor, logits_processor: Any, *args: Any, **options: Any) -> Any:
        for one in logits_processor:
            if isinstance(one, LogitsProcessor) and not one.mapping.facts.shift_invariant:
                raise ValueError(
                    f"LogitsProcessor: {one.mapping!r} changes with a common offset of the scores, and these are log-probabilities, as "
                    "beam search hands them on; use a map such as Softmax or Entmax, or sample"
                )
        return inner(self, input_ids, logits_processor, *args, **options)

    checked.refuses_offsets = True  # type: ignore[attr-defined]
    kind._beam_search = checked


def sample(
    transform: Any = None, mapping: Mapping | None = None, *, generator: Any = None, streamer: Any = None
) -> Callable[..., Any]:
    """For `model.generate(custom_generate=...)`: draws each token by `anymax.sample`.

    Unlike `LogitsProcessor`, which leaves the draw to torch.multinomial, it uses one uniform number a token, and a seed makes it
    reproducible.

    Parameters
    ----------
    transform
        A transform of the scores: one of `anymax.transforms`, several in `compose(...)`, or your own function; or a map. A
        seed in it, as in `xtc(generator=1)`, acts like one in `generator`: each token has its own numbers.
    mapping
        The map, softmax by default.
    generator
        A `torch.Generator` on the device of the scores, which advances from call to call, or an integer seed, which starts
        again with each call of `generate`; or a list of these, one for each sequence. By default torch's global generator,
        which `transformers.set_seed` sets.
    streamer
        A streamer of transformers, which gets the tokens as they come; pass it here, not to `generate`.

    Returns
    -------
    Callable[..., Any]
        A function for `custom_generate`. It takes all options of `generate` except beams and drafts (`assistant_model`,
        `prompt_lookup_num_tokens`), which are errors. Leave `do_sample` out, since with it `generate` first applies its own
        `top_k`, 50 by default. Several sequences for each prompt need it: `do_sample=True, top_k=0,
        num_return_sequences=3`. With `output_scores=True, return_dict_in_generate=True` the scores are log p.

    Examples
    --------
    >>> import anymax.hf
    >>> draw = anymax.hf.sample(anymax.topp(0.9), anymax.Entmax(1.5), generator=0)
    >>> tokens = model.generate(prompt, custom_generate=draw, max_new_tokens=20)  # doctest: +SKIP
    """
    transform, mapping = _chosen("sample", transform, mapping)
    chosen = mapping

    def decode(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        if (generation_config.num_beams or 1) > 1:
            raise ValueError(
                f"anymax.hf.sample draws one token at a time, not num_beams={generation_config.num_beams}; for beams use "
                "logits_processor=[anymax.hf.LogitsProcessor(...)]"
            )
        arguments = sys._getframe(1).f_locals  # the arguments of `generate`, which does not pass these two on
        mode = generation_config.get_generation_mode(arguments.get("assistant_model"))
        if mode == GenerationMode.ASSISTED_GENERATION:
            raise ValueError(
                "anymax.hf.sample draws one token at a time, and takes no drafts; leave assistant_model, prompt_lookup_num_tokens and "
                "assistant_early_exit out, or use logits_processor=[anymax.hf.LogitsProcessor(...)]"
            )
        if arguments.get("streamer") is not None:
            raise ValueError(
                "anymax.hf.sample: generate does not hand its streamer on; say anymax.hf.sample(..., streamer=...)"
            )
        config = copy.copy(generation_config)
        config.do_sample = False  # `_Draw` leaves one token above -inf, which greedy search takes
        keep = bool(config.return_dict_in_generate and config.output_scores)
        source = global_generator(input_ids.device) if generator is None else going_on(generator, input_ids)
        draw = _Draw(unseeded(transform, input_ids), chosen, source, keep)
        out = model._sample(
            input_ids,
            logits_processor=transformers.LogitsProcessorList([*logits_processor, draw]),
            stopping_criteria=stopping_criteria,
            generation_config=config,
            streamer=streamer,
            **model_kwargs,
        )
        if keep:
            out.scores = tuple(draw.scores[: len(out.scores)])
        return out

    return decode


class _Draw(transformers.LogitsProcessor):
    """A processor that draws a token, and gives it the score 0 and all others -inf."""

    def __init__(self, transform: Any, mapping: Mapping, generator: Any, keep: bool) -> None:
        self.transform, self.mapping, self.generator, self.keep = transform, mapping, generator, keep
        self.scores: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        mapping, rows, transform = self.mapping, scores, self.transform
        if self.keep:
            rows, mapping, _ = read("sample", mapping, rows, transform, None, -1, None)
            transform = None
        token: Tensor = samplers.sample(mapping, rows, transform=transform, generator=self.generator)
        if bool((token < 0).any()):
            row = int((token < 0).nonzero()[0])
            raise ValueError(
                f"anymax.hf.sample: sequence {row} has no token to draw: all are masked by the processors before, or a score is NaN or +inf"
            )
        if self.keep:
            self.scores.append(log_p_rows(mapping, rows, xp))
        return torch.full_like(scores, -math.inf).scatter_(-1, token[:, None], 0.0)
