"""vLLM: a transform and a map for each request, and a sampler for CPUs that does not sort. Written against vLLM 0.33.0.

`LogitsProcessor` is for both model runners: `vllm serve MODEL --logits-processors anymax.vllm:LogitsProcessor`. A request then says what it
wants, in `extra_args` or over HTTP in `vllm_xargs`:

>>> asked = read(["temperature:T=0.7", "topp:p=0.9", "entmax:alpha=1.5"])
>>> [part.name for part in asked.parts], asked.mapping
(['temperature', 'topp'], Entmax(alpha=1.5))

`install` puts `apply_top_k_top_p` and `sample` into the place of vLLM's functions for CPUs. Neither is registered by itself: the page
"Serving with vLLM" has the lines for your own package that do it. Without vLLM, everything but `install` works too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    import torch as torch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "anymax.vllm needs torch; install it with: pip install 'anymax[torch]'", name=error.name
    ) from None

from .._core.elsewhere import answering
from .installing import READ_AT, install, uninstall
from .processor import LogitsProcessor
from .sampler import apply_top_k_top_p, sample
from .spec import Spec, read

__all__ = ["READ_AT", "LogitsProcessor", "Spec", "apply_top_k_top_p", "install", "read", "sample", "uninstall"]

if not TYPE_CHECKING:
    __getattr__ = answering(__name__, __all__)


def __dir__() -> list[str]:
    return __all__
