"""The logits processor: a transform and a map for each request of a batch, for both model runners of vLLM."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from .batch import LOG, Batch, Request
from .spec import Spec, read

KEY = "anymax"  # in `SamplingParams.extra_args`
# of its runners, V2 and V1
INTERFACES = ("vllm.v1.worker.gpu.sample.logits_processor", "vllm.v1.sample.logits_processor")


class Processor:
    """For `vllm serve --logits-processors anymax.vllm:LogitsProcessor`: transforms and a map for each request.

    A request says what it wants in `SamplingParams.extra_args["anymax"]`, over HTTP in `vllm_xargs`, in the words of `anymax.vllm.read`.
    Rows whose requests name the same transforms and the same map go through one call, with their own numbers; rows that ask for nothing
    are not touched. With a map, the logits become log p, which vLLM's softmax turns into the probabilities of that map.

    It runs before vLLM's temperature, min-p, top-k and top-p, so leave these at their defaults and give them here. Random numbers, of
    `xtc` and `noise`, come from the request's seed, or from torch's global generator if it has none.

    Parameters
    ----------
    vllm_config, of_batch, is_pin_memory
        What vLLM gives: under model runner V2 its view of the requests, under V1 a device and whether memory is pinned.

    Examples
    --------
    >>> from vllm import LLM, SamplingParams  # doctest: +SKIP
    >>> llm = LLM(model, logits_processors=["anymax.vllm:LogitsProcessor"])  # doctest: +SKIP
    >>> params = SamplingParams(extra_args={"anymax": ["temperature:T=0.7", "entmax:alpha=1.5"]})  # doctest: +SKIP
    >>> llm.generate("Once upon a time", params)  # doctest: +SKIP
    """

    vocabulary: ClassVar[int | None] = None
    """How many classes the model has: `validate_params` refuses a request that names others, where its process knows them.

    An engine of this process says it. `vllm serve` has its engine in another one: there, serve a subclass that says it."""

    def __init__(self, vllm_config: Any, of_batch: Any, is_pin_memory: bool | None = None) -> None:
        self._states: Any = of_batch  # under V2 its view of the requests, under V1 a device
        self._batch = Batch()
        config = None if vllm_config is None else vllm_config.model_config
        known = of_batch.vocab_size if is_pin_memory is None else config and config.get_vocab_size()
        if known is not None:  # of several models in a process, the largest
            type(self).vocabulary = max(known, self.vocabulary or 0)

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """A ValueError for a request that asks for what there is not; vLLM answers it with HTTP 400."""
        spec = _asked(sampling_params)
        if spec is not None and cls.vocabulary is not None:
            spec.check(cls.vocabulary)

    def apply(self, logits: Tensor, ctx: Any = None) -> Tensor:
        """The logits after what each request asks for. `ctx` is V2's layout of the batch."""
        if ctx is None:
            return self._batch.apply(logits, range(logits.shape[0]), self._listed)
        places = ctx.idx_mapping_np.tolist()
        if logits.shape[0] != len(places):  # drafts: several rows of a request
            places = ctx.expanded_idx_mapping.tolist()
        return self._batch.apply(logits, places, lambda rows, which: self._on_device(ctx, rows, which))

    # -- model runner V2 -------------------------------------------------------------------------------------------------------

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """A request comes into a slot; False if it asks for nothing."""
        request = _request(sampling_params)
        self._batch.put(req_idx, request)
        return request is not None

    def _on_device(self, ctx: Any, rows: Sequence[int], which: str) -> Tensor:
        """The tokens of rows, drafts of this step included: position i of a sequence is column i, and what is not asked for is -1."""
        device = ctx.pos.device
        index = torch.tensor(rows, device=device)
        slots = ctx.expanded_idx_mapping.long()
        ends = ctx.pos.long() + 1  # a row's own input is its last token
        length = int(ends.max())
        tokens = self._states.all_token_ids.gpu[slots, :length].long()
        drafts = ctx.expanded_local_pos.long()
        # a draft is the input of its row, and of none before
        for back in range(int(drafts.max()) if len(drafts) else 0):
            rows_of_drafts = torch.nonzero(drafts > back).flatten()
            tokens[rows_of_drafts, ends[rows_of_drafts] - 1 - back] = ctx.input_ids[rows_of_drafts - back].long()
        column = torch.arange(length, device=device)
        asked = column < ends[:, None]
        prompt = self._states.prompt_len.gpu[slots].long()[:, None]
        if which != "all":
            asked &= (column < prompt) == (which == "prompt")
        return torch.where(asked, tokens, -1)[index]

    # -- model runner V1 -------------------------------------------------------------------------------------------------------

    def is_argmax_invariant(self) -> bool:
        """False: a bias, a penalty or `xtc` may change the largest, so greedy requests go through it too."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Requests leave, come and move, in this order."""
        if batch_update is None:
            return
        for place in batch_update.removed:
            self._batch.put(place, None)
        for place, params, prompt, output in batch_update.added:
            self._batch.put(place, _request(params, (prompt or [], output)))
        for here, there, direction in batch_update.moved:
            self._batch.move(here, there, swap=direction.name == "SWAP")

    def _listed(self, rows: Sequence[int], which: str) -> Tensor:
        """The tokens of rows; a request's lists grow while it runs."""
        lists = []
        for row in rows:
            prompt, output = self._batch.requests[row].history
            lists.append([*(prompt if which != "output" else ()), *(output if which != "prompt" else ())])
        longest = max(map(len, lists))
        return torch.tensor([[*tokens, *[-1] * (longest - len(tokens))] for tokens in lists], dtype=torch.int64)


def _asked(sampling_params: Any) -> Spec | None:
    """What a request asks for; None if it asks for nothing."""
    given = (sampling_params.extra_args or {}).get(KEY)
    if given is None:
        return None
    spec = read(given)
    return spec if spec.parts or spec.mapping is not None else None


def _request(sampling_params: Any, history: Any = None) -> Request | None:
    """The request for the engine; None if it asks for nothing, or for what `validate_params` should have refused."""
    try:
        spec = _asked(sampling_params)
    except Exception as error:  # in the engine, which goes on for the others
        LOG.warning("anymax: a request is left as it is: %s", error)
        return None
    return None if spec is None else Request(spec, sampling_params.seed, history)


def over(interfaces: Sequence[type]) -> type[Processor]:
    """The processor as a class that derives from these abstract classes of vLLM, by which vLLM knows it.

    Model runner V2 names its requests by slots, and says at each step which row belongs to which; V1 keeps the rows of a batch in the
    order of its requests, and says how they move.
    """
    return type("LogitsProcessor", (Processor, *interfaces), {"__doc__": Processor.__doc__, "__module__": __name__})


def interfaces() -> tuple[type, ...]:
    """vLLM's abstract classes, those that the installed version has; none where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        return ()
    return tuple(importlib.import_module(name).LogitsProcessor for name in INTERFACES if _exists(name))


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent that an older version does not have
        return False


LogitsProcessor = over(interfaces())
