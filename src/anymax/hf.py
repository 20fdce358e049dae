"""Hugging Face transformers: attention with any map in every model that goes through transformers' attention interface.

>>> import anymax.hf  # doctest: +SKIP
>>> anymax.hf.register()  # doctest: +SKIP
>>> AutoModel.from_pretrained(name, attn_implementation="anymax_entmax15")  # doctest: +SKIP

The parameters of the map come from the model's config, as `config.anymax`, a dict that is saved with it: `{"alpha": 1.3}` for all heads,
a list for one number a head; `"temperature": T` and `"scalable": {"beta": ..., "gamma": ..., "delta": ...}` transform the scores.
A layer whose attention module has an attribute `anymax`, such as `anymax.nn.Activation(Entmax(1.5), learn="alpha")`, uses the map
of that, learned.
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
from .transforms.base import unseeded

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
)  # models some of whose attention asks nobody
_ALWAYS_MASKED: set[type] = set()  # configs of models that don't vouch for `is_causal` of their layers
NAMES: tuple[str, ...] = tuple(_PREFIX + name for name in sorted(_KINDS))  # what `attn_implementation` may be


def __dir__() -> list[str]:
    return __all__


def register() -> tuple[str, ...]:
    """Make the maps known to transformers, so that `attn_implementation="anymax_sparsemax"` and its like are names of attention.

    Call it once, before a model is made; a second call does no harm. Every model whose attention goes through transformers' attention
    interface is served (Llama, BERT, T5, ...). One with attention code of its own (Bloom, DeBERTa) is an error from then on where it
    is given one of these names, since it would go on with softmax.

    Returns `NAMES`, the names that `attn_implementation` may then be.

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
        # without a mask function of the same name, transformers would pass no mask at all
        AttentionMaskInterface.register(name, _mask)
    _refuse_own_code()
    return NAMES


def _mask(*args: Any, config: Any = None, allow_is_causal_skip: bool = True, **options: Any) -> Tensor | None:
    """torch's mask, True = keep, or None where `is_causal` of a layer says as much.

    Where layers share keys (Gemma 4), queries are left out later, and only a mask tells which.
    """
    skip = (
        allow_is_causal_skip and type(config) not in _ALWAYS_MASKED and not getattr(config, "num_kv_shared_layers", 0)
    )
    return sdpa_mask(*args, config=config, allow_is_causal_skip=skip, **options)


def _refuse_own_code() -> None:
    """transformers takes any name that is registered: such models would go on with softmax, and add the masks up as numbers."""
    kind = transformers.PreTrainedModel
    inner = kind.get_correct_attn_implementation
    if getattr(inner, "refuses_own_code", False):
        return

    @functools.wraps(inner)
    def checked(self: Any, requested_attention: str | None, *args: Any, **options: Any) -> str:
        if requested_attention in NAMES and (_own_code(type(self)) or self.config.model_type in _PARTLY_OWN):
            raise ValueError(
                f"{requested_attention}: {type(self).__name__} has attention code of its own; the models that are served are those "
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
    except (KeyError, OSError, TypeError):  # of a notebook: nobody can tell, and its author knows
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
    """The attention function that `register` gives to transformers; call it only from attention code of your own.

    The signature is that of transformers' attention interface. The map is that of the module's attribute `anymax`, if it has one, else
    that of `name` with the parameters of `module.config.anymax`.

    name: one of `NAMES`, such as "anymax_sparsemax".
    module: the attention layer; its `config`, `is_causal` and `anymax` are read.
    query: [B, heads, L, D].
    key, value: [B, heads of keys, S, D].
    attention_mask: the mask from transformers, which holds a sliding window, if any: boolean, True = keep, or numbers to be added.
    scaling: the factor of the scores; 1 / sqrt(D) by default.
    dropout: the share of the weights that is set to 0.
    is_causal: whether later keys are hidden where there is no mask; by default what the module says.
    position_bias: numbers that are added to the scores (T5).
    softcap: a number c; the scores become c tanh(scores / c) (Gemma 2).
    s_aux: one more score for each head, of a key without a value (gpt-oss).
    indices: the keys that a query may see, [B, L, count], where the model has chosen them (DeepSeek-V3.2).
    sinks, block_indices, cache: not served; an error says so.
    output_attentions: return the weights too.
    others: what other implementations need, positions for one; not used.

    Returns (output [B, L, heads, D], weights [B, heads, L, S] or None).

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
        raise ValueError(f"{name}: the paged cache of continuous batching is not served; use generate() or 'sdpa'")
    for what, given in (("sinks for each query", sinks), ("blocks of keys", block_indices)):
        if given is not None:
            raise ValueError(f"{name}: {type(module).__name__} has {what}, which are not served; use 'eager'")
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
    """(True = keep, added): a mask in numbers, of a user's own, has the lowest number of its dtype where it hides."""
    if mask is None or mask.dtype == torch.bool:
        return mask, position_bias
    keep = mask > 0.5 * torch.finfo(mask.dtype).min
    added = mask.masked_fill(~keep, 0.0)
    return keep, added if position_bias is None else added + position_bias


def _of(name: str, module: torch.nn.Module, config: Any, query: Tensor) -> tuple[Mapping, Any]:
    """The map and the transform of a layer."""
    given = getattr(config, "anymax", None)
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise TypeError(
            f"{name}: the model's config has anymax={given!r}; it must be a dict of the map's parameters, such as {{'alpha': 1.3}}"
        )
    given = dict(given)
    parts = []
    for key in _TRANSFORMS:
        value = given.pop(key, None)
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
    if kind == "sparse_softmax" and not given:
        raise ValueError(f"{name}: say how many keys to keep in the model's config, as in anymax={{'k': 8}}")
    try:
        return _KINDS[kind](**{k: _number(v, query) for k, v in given.items()}), transform
    except TypeError as error:
        raise TypeError(f"{name}: the model's config has anymax={config.anymax!r}, and {error}") from None


def _number(value: Any, query: Tensor) -> Any:
    """A number, or one for each head."""
    if not isinstance(value, (list, tuple)):
        return value
    if len(value) != query.shape[1]:
        raise ValueError(f"the model's config has {len(value)} numbers in anymax for {query.shape[1]} heads")
    return torch.tensor(value, dtype=torch.float32, device=query.device).reshape(-1, 1, 1)


# -- decoding ------------------------------------------------------------------------------------------------------------------


def _chosen(who: str, transform: Any, mapping: Mapping | None) -> tuple[Any, Mapping]:
    """The transform and the map; a map may stand in the place of the transform."""
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
    """For `model.generate(logits_processor=[...])`: the scores become log p of a map after a transform.

    So sampling draws with the map's probabilities, greedy search takes the most probable token, and beam search adds up log p over the
    tokens that are kept. `sample` draws the tokens too, from a seed.

    transform: what the scores go through first: one of `anymax.transforms`, several in `compose(...)`, or a function of your own. A map may
        stand in its place.
        A seed in it, as in `xtc(generator=1)`, begins the numbers once; they go on from token to token and from call to call.
    mapping: the map, softmax by default.
        One whose probabilities change with a common offset of the scores (`Taylor`, `Ratio`) is an error in beam search, which hands on
        log-probabilities in the place of the scores.

    `generate` itself goes on after it: with `do_sample=True` say `top_k=0`, since its default is 50. Penalties and bans of its options come
    before.

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
    """Beam search hands its processors log-probabilities, which others before ours may have changed: by then nobody can tell."""
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
    """For `model.generate(custom_generate=...)`: each token is drawn by `anymax.sample`.

    Against `LogitsProcessor`, which leaves the draw to torch.multinomial: one uniform number a token, reproducible from a seed alone.

    transform: what the scores go through first: one of `anymax.transforms`, several in `compose(...)`, or a function of your own. A map may
        stand in its place.
        A seed in it, as in `xtc(generator=1)`, is like one in `generator`: each token has its own numbers.
    mapping: the map, softmax by default.
    generator: a `torch.Generator` on the device of the scores, which moves on from call to call, or an integer seed, which begins anew with
        each call of `generate`; or a list of these, one a sequence. By default torch's global generator, which `transformers.set_seed`
        sets.
    streamer: of transformers, for the tokens as they come; give it here, and not to `generate`.

    Returns a function for `custom_generate`. All of `generate`'s options hold, but for beams and drafts (`assistant_model`,
    `prompt_lookup_num_tokens`), which are errors. Leave `do_sample` out: with it `generate` would cut by its own `top_k`, 50 by default,
    first. Several sequences of each prompt need it: `do_sample=True, top_k=0, num_return_sequences=3`. With `output_scores=True,
    return_dict_in_generate=True` the scores are log p.

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
        given = sys._getframe(1).f_locals  # the arguments of `generate`, which drops these two without a word
        mode = generation_config.get_generation_mode(given.get("assistant_model"))
        if mode == GenerationMode.ASSISTED_GENERATION:
            raise ValueError(
                "anymax.hf.sample draws one token at a time, and takes no drafts; leave assistant_model, prompt_lookup_num_tokens and "
                "assistant_early_exit out, or use logits_processor=[anymax.hf.LogitsProcessor(...)]"
            )
        if given.get("streamer") is not None:
            raise ValueError(
                "anymax.hf.sample: generate does not hand its streamer on; say anymax.hf.sample(..., streamer=...)"
            )
        config = copy.copy(generation_config)
        config.do_sample = False  # of what the draw leaves, the largest is the token that was drawn
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
    """0 for the token that is drawn, -inf for all others."""

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
