"""Puts the sampler of this room into the place of vLLM's functions for CPUs, and takes it out again."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from typing import Any

import torch
from torch import Tensor

from . import sampler

READ_AT = "0.33.0"  # the version of vLLM whose source this room was written against
MODULE = "vllm.v1.sample.ops.topk_topp_sampler"
# what is replaced, and the parameters that it had in that version
FUNCTIONS = {
    "apply_top_k_top_p_pytorch": ("logits", "k", "p", "allow_cpu_sync"),
    "apply_top_k_top_p_triton": ("logits", "k", "p", "mask_value", "has_topp_only_rows"),
}
OPTIONAL = ("apply_top_k_top_p_triton",)  # where vLLM has Triton
METHODS = {
    "forward_cpu": ("self", "logits", "generators", "k", "p"),
    "forward_native": ("self", "logits", "generators", "k", "p"),
}
_replaced: list[tuple[Any, str, Any]] = []  # (what it is in, its name, vLLM's own)


def install() -> None:
    """Sample on the CPU without a sort: put `apply_top_k_top_p` and `sample` into the place of vLLM's functions, in this process.

    Call it before the engine is made. vLLM runs an engine in a process of its own: there, vLLM calls it as a plugin, an entry point of the
    group `vllm.general_plugins`. Scores on other devices, and fp64 Gumbel noise, stay with vLLM. `uninstall` undoes it; a second call does
    nothing.

    It was written against vLLM 0.33.0, and refuses a version whose functions have other parameters.

    Raises
    ------
    RuntimeError
        The installed vLLM has no such function, or one with other parameters.
    """
    if _replaced:
        return
    module = importlib.import_module(MODULE)
    kind = module.TopKTopPSampler
    found = [(module, name, _read(module, name, takes)) for name, takes in FUNCTIONS.items() if _there(module, name)]
    methods = [(kind, name, _read(kind, name, takes)) for name, takes in METHODS.items()]
    for owner, name, theirs in found:
        setattr(owner, name, _truncate(theirs))
    for owner, name, theirs in methods:
        setattr(owner, name, _draw(theirs))
    _replaced.extend(found + methods)


def uninstall() -> None:
    """Put vLLM's own functions back. An engine that was made in between keeps the draw that it was made with."""
    while _replaced:
        owner, name, theirs = _replaced.pop()
        setattr(owner, name, theirs)


def _there(module: Any, name: str) -> bool:
    return name not in OPTIONAL or name in vars(module)


def _read(owner: Any, name: str, takes: tuple[str, ...]) -> Any:
    """vLLM's own function, if it has the parameters that it had."""
    theirs = vars(owner).get(name)
    has = None if theirs is None else tuple(inspect.signature(theirs).parameters)
    if has != takes:
        vllm = importlib.import_module("vllm")
        said = "is not there" if has is None else f"takes ({', '.join(has)})"
        raise RuntimeError(
            f"anymax.vllm.install: {owner.__name__}.{name} of vLLM {vllm.__version__} {said}; this was written against vLLM {READ_AT}, "
            f"where it takes ({', '.join(takes)}). Call anymax.vllm.sample yourself, or use another version of anymax"
        )
    return theirs


def _truncate(theirs: Any) -> Any:
    takes = inspect.signature(theirs)

    @functools.wraps(theirs)
    def truncated(*given: Any, **options: Any) -> Tensor:
        said = takes.bind(*given, **options).arguments
        if said["logits"].device.type != "cpu" or said.get("mask_value", -math.inf) != -math.inf:
            return theirs(*given, **options)
        return sampler.apply_top_k_top_p(said["logits"], said["k"], said["p"])

    return truncated


def _draw(theirs: Any) -> Any:
    @functools.wraps(theirs)
    def drawn(
        self: Any, logits: Tensor, generators: dict[int, Any], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if logits.device.type != "cpu" or self.use_fp64_gumbel:
            return theirs(self, logits, generators, k, p)
        if not self.logprobs_mode.startswith("processed"):
            return sampler.sample(logits, k, p, generators), None
        logits = sampler.apply_top_k_top_p(logits, k, p)
        index = sampler.sample(logits, generators=generators)
        return index, logits if self.logprobs_mode == "processed_logits" else logits.log_softmax(
            -1, dtype=torch.float32
        )

    return drawn
