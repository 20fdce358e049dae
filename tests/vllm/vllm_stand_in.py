"""A stand-in for what `anymax.vllm` touches of vLLM, as read in version 0.33.0: the two interfaces, and the functions of its CPU sampler.

It has the names, the parameters and the meaning, and none of the code. Where vLLM is installed, `test_vllm.py` holds it to the real thing.
"""

import abc
import dataclasses
import enum
import sys
import types
from typing import Any

import torch

VERSION = "0.33.0"


@dataclasses.dataclass
class SamplingParams:
    temperature: float = 1.0
    seed: int | None = None
    extra_args: dict[str, Any] | None = None


# -- model runner V1 -----------------------------------------------------------------------------------------------------------


class MoveDirectionality(enum.Enum):
    UNIDIRECTIONAL = enum.auto()
    SWAP = enum.auto()


@dataclasses.dataclass(frozen=True)
class BatchUpdate:
    batch_size: int
    removed: Any  # places
    added: Any  # (place, params, prompt tokens or None, the list of output tokens, which grows)
    moved: Any  # (from, to, direction)


class ForV1(abc.ABC):
    @classmethod
    def validate_params(cls, sampling_params): ...

    @abc.abstractmethod
    def __init__(self, vllm_config, device, is_pin_memory): ...

    @abc.abstractmethod
    def apply(self, logits): ...

    @abc.abstractmethod
    def is_argmax_invariant(self): ...

    @abc.abstractmethod
    def update_state(self, batch_update): ...


# -- model runner V2 -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LogitsProcRequestState:
    device: Any
    max_num_reqs: int
    vocab_size: int
    all_token_ids: Any  # .gpu [slots, longest]
    prompt_len: Any  # .gpu [slots]
    prefill_len: Any
    total_len: Any


@dataclasses.dataclass(frozen=True)
class LogitsContext:
    expanded_idx_mapping: Any  # [rows]: the slot of each row
    idx_mapping: Any  # [requests]
    idx_mapping_np: Any
    expanded_local_pos: Any  # [rows]: which of its request's rows it is
    input_ids: Any  # [rows]
    pos: Any  # [rows]
    seq_lens_upper_bound_np: Any


class ForV2(abc.ABC):
    def __init__(self, vllm_config, req_states): ...

    @classmethod
    def validate_params(cls, sampling_params): ...

    def add_request(self, req_idx, sampling_params):
        return True

    def apply_staged_writes(self): ...

    @abc.abstractmethod
    def apply(self, logits, ctx): ...


# -- the sampler ---------------------------------------------------------------------------------------------------------------


def modules():
    """name -> module, as vLLM has them: what `install` finds."""
    sampler = types.ModuleType("vllm.v1.sample.ops.topk_topp_sampler")

    def apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=False):
        return "vllm's own"

    class TopKTopPSampler(torch.nn.Module):
        def __init__(self, logprobs_mode="raw_logprobs", use_fp64_gumbel=False):
            super().__init__()
            self.logprobs_mode, self.use_fp64_gumbel = logprobs_mode, use_fp64_gumbel
            self.forward = self.forward_cpu

        def forward_cpu(self, logits, generators, k, p):
            return "vllm's own draw", None

        def forward_native(self, logits, generators, k, p):
            return "vllm's own draw", None

    sampler.apply_top_k_top_p_pytorch, sampler.TopKTopPSampler = apply_top_k_top_p_pytorch, TopKTopPSampler
    vllm = types.ModuleType("vllm")
    vllm.__version__ = VERSION
    parents = {f"vllm.{name}": types.ModuleType(f"vllm.{name}") for name in ("v1", "v1.sample", "v1.sample.ops")}
    return {"vllm": vllm, **parents, sampler.__name__: sampler}


def put(monkeypatch):
    """The stand-in as the module `vllm`; the sampler's module."""
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return sys.modules["vllm.v1.sample.ops.topk_topp_sampler"]
