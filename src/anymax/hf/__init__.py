"""Hugging Face transformers: attention with any map, in every model that uses transformers' attention interface.

>>> import anymax.hf  # doctest: +SKIP
>>> anymax.hf.register()  # doctest: +SKIP
>>> AutoModel.from_pretrained(name, attn_implementation="anymax_entmax15")  # doctest: +SKIP

The parameters of the map are in the model's config, which is saved with it, as the dict `config.anymax`: `{"alpha": 1.3}` for all heads, or
a list with a number for each head; `"temperature": T` and `"scalable": {"beta": ..., "gamma": ..., "delta": ...}` transform the scores. If
an attention module has an attribute `anymax`, such as `anymax.nn.Activation(Entmax(1.5), learn="alpha")`, its layer uses that map.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    import torch as torch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "anymax.hf needs torch; install it with: pip install 'anymax[hf,torch]'", name=error.name
    ) from None
try:
    from transformers.masking_utils import AttentionMaskInterface as AttentionMaskInterface
except ImportError as error:
    raise ImportError("anymax.hf needs transformers 5 or later; install it with: pip install 'anymax[hf]'") from error

from .._core.elsewhere import answering
from .attention import NAMES, attend, register
from .decoding import LogitsProcessor, sample
from .tokens import TokenStatistics, token_statistics
from .training import compute_loss, loss

__all__ = [
    "NAMES",
    "LogitsProcessor",
    "TokenStatistics",
    "attend",
    "compute_loss",
    "loss",
    "register",
    "sample",
    "token_statistics",
]


if not TYPE_CHECKING:
    __getattr__ = answering(__name__, __all__)


def __dir__() -> list[str]:
    return __all__
