"""Decoding: a processor of scores for transformers' `generate`, and a sampler in its place."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import array_api_compat.torch as xp
import torch
import transformers
from torch import Tensor
from transformers.generation.configuration_utils import GenerationMode

from .._core.mapping import Mapping
from .._core.names import as_mapping
from .._core.options import check_keywords
from .._random.generators import global_source, going_on
from ..functional.draws import check_draw, log_p_of_draw
from ..likelihood.terms import read
from ..mappings import Softmax
from ..sampling import samplers
from ..transforms.applying import unseeded
from ..transforms.base import is_function, not_transform
from .checks import within

_GENERATE: Any = transformers.GenerationMixin.generate  # type: ignore[attr-defined]
_BEAM_SEARCH: Any = transformers.GenerationMixin._beam_search  # type: ignore[attr-defined]
_NO_DRAFTS = (
    "anymax.hf.sample draws one token at a time, and takes no drafts; leave assistant_model, prompt_lookup_num_tokens and "
    "assistant_early_exit out, or use logits_processor=[anymax.hf.LogitsProcessor(...)]"
)


def _chosen(who: str, transform: Any, mapping: Mapping | str | None) -> tuple[Any, Mapping]:
    """The transform and the map; a map may be given as the transform."""
    if isinstance(transform, Mapping):
        if mapping is not None:
            raise TypeError(
                f"{who}: got two maps, {transform!r} and {mapping!r}; give a transform and a map, or one of them"
            )
        transform, mapping = None, transform
    mapping = Softmax() if mapping is None else as_mapping(mapping, who)
    if isinstance(transform, str):
        raise TypeError(
            f"{who}: transform must be a function scores -> scores; the name of a map is mapping={transform!r}"
        )
    if transform is not None and not is_function(transform):
        raise TypeError(
            f"{who}: transform must be a function scores -> scores such as anymax.topp(0.9), several of them, as in "
            f"anymax.compose(anymax.topk(50), anymax.topp(0.9)), or a map such as anymax.Entmax(1.5); got {not_transform(transform)}"
        )
    check_draw(mapping, who)
    return transform, mapping


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
        The map, or its name; softmax by default. A map that changes with a common offset of the scores (`Taylor`, `Ratio`) is an error
        in beam search, which passes log-probabilities instead of scores.

    Examples
    --------
    >>> import anymax.hf
    >>> cut = anymax.hf.LogitsProcessor(anymax.compose(anymax.temperature(0.7), anymax.topp(0.9)))
    >>> tokens = model.generate(prompt, do_sample=True, top_k=0, logits_processor=[cut])  # doctest: +SKIP
    """

    @check_keywords()
    def __init__(self, transform: Any = None, mapping: Mapping | str | None = None) -> None:
        self.transform, self.mapping = _chosen("LogitsProcessor", transform, mapping)
        self._applied: tuple[torch.device, Any] | None = None  # the transform with generators on that device

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        # the scores don't tell, since earlier processors may have changed them
        if not self.mapping.facts.shift_invariant and within(_BEAM_SEARCH) is not None:
            raise ValueError(
                f"LogitsProcessor: {self.mapping!r} changes with a common offset of the scores, and these are log-probabilities, as "
                "beam search hands them on; use a map such as Softmax or Entmax, or sample"
            )
        if self._applied is None or self._applied[0] != scores.device:
            self._applied = scores.device, unseeded(self.transform, scores)
        given = read("LogitsProcessor", self.mapping, scores, transform=self._applied[1]).over_all()
        return given.seen(log_p_of_draw(given.mapping, given.rows, xp))

    def __repr__(self) -> str:
        return f"LogitsProcessor(transform={self.transform!r}, mapping={self.mapping!r})"


@check_keywords({"logits_processor": "call it first: custom_generate=anymax.hf.sample(...)"})
def sample(
    transform: Any = None, mapping: Mapping | str | None = None, *, generator: Any = None, streamer: Any = None
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
        The map, or its name; softmax by default.
    generator
        A `torch.Generator` on the device of the scores, which advances from call to call, or an integer seed, which starts
        again with each call of `generate`; or a list of these, one for each sequence. By default torch's global generator,
        which `transformers.set_seed` sets.
    streamer
        A streamer of transformers, which gets the tokens as they come. One that you pass to `generate` gets the prompt too.

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
    return _TokenByToken(transform, mapping, generator, streamer)


@dataclasses.dataclass(frozen=True, eq=False)
class _TokenByToken:
    """What `sample` returns: `generate` calls it with the scores' processors and the stopping criteria."""

    transform: Any
    mapping: Mapping
    generator: Any
    streamer: Any

    def __call__(
        self,
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
        given = within(_GENERATE) or {}  # which keeps two of its arguments to itself
        assisted = generation_config.get_generation_mode(given.get("assistant_model"))
        if assisted == GenerationMode.ASSISTED_GENERATION:
            raise ValueError(_NO_DRAFTS)
        streamers = [s for s in (self.streamer, given.get("streamer")) if s is not None]
        if len(streamers) > 1:
            raise ValueError("anymax.hf.sample: generate has a streamer and sample has one; give one of them")
        config = copy.copy(generation_config)
        config.do_sample = False  # `_Draw` leaves one token above -inf, which greedy search takes
        keep = bool(config.return_dict_in_generate and config.output_scores)
        generator = self.generator
        source = global_source(input_ids.device) if generator is None else going_on(generator, input_ids)
        draw = _Draw(unseeded(self.transform, input_ids), self.mapping, source, keep)
        out = model._sample(
            input_ids,
            logits_processor=transformers.LogitsProcessorList([*logits_processor, draw]),
            stopping_criteria=stopping_criteria,
            generation_config=config,
            streamer=streamers[0] if streamers else None,
            **model_kwargs,
        )
        if keep:
            out.scores = tuple(draw.scores[: len(out.scores)])
        return out


class _Draw(transformers.LogitsProcessor):
    """A processor that draws a token, and gives it the score 0 and all others -inf."""

    def __init__(self, transform: Any, mapping: Mapping, generator: Any, keep: bool) -> None:
        self.transform, self.mapping, self.generator, self.keep = transform, mapping, generator, keep
        self.scores: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        given = read("sample", self.mapping, scores, transform=self.transform) if self.keep else None
        rows, transform = (scores, self.transform) if given is None else (given.rows, None)
        token: Tensor = samplers.sample(self.mapping, rows, transform=transform, generator=self.generator)
        if bool((token < 0).any()):
            row = int((token < 0).nonzero()[0])
            raise ValueError(
                f"anymax.hf.sample: sequence {row} has no token to draw: all are masked by the processors before, or a score is NaN or +inf"
            )
        if given is not None:
            given = given.over_all()
            self.scores.append(given.seen(log_p_of_draw(given.mapping, given.rows, xp)))
        return torch.full_like(scores, -math.inf).scatter_(-1, token[:, None], 0.0)
