"""The texts that a causal model reads, and the rows of the hidden states at which their tokens are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .._array import is_array, shown
from .._core.mapping import Mapping
from .head import Head

Tensor = torch.Tensor


class Texts(NamedTuple):
    """What a causal model is called with."""

    who: str  # the verb
    input_ids: Tensor  # [texts, length]
    attention_mask: Tensor | None
    inputs: dict[str, Any]  # all others

    @classmethod
    def read(cls, who: str, input_ids: Any, attention_mask: Any, inputs: dict[str, Any] | None) -> Texts:
        if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or input_ids.is_floating_point():
            raise ValueError(f"{who}: input_ids must be tokens, integers [texts, length], got {shown(input_ids)}")
        if attention_mask is not None and tuple(attention_mask.shape) != tuple(input_ids.shape):
            raise ValueError(
                f"{who}: attention_mask of shape {tuple(attention_mask.shape)}: expected that of input_ids, {tuple(input_ids.shape)}"
            )
        inputs = inputs or {}
        if taken := {"input_ids", "attention_mask", "use_cache", "labels"} & set(inputs):
            raise TypeError(f"{who}: inputs has {', '.join(sorted(taken))}; give it as an argument, or leave it out")
        return cls(who, input_ids, attention_mask, inputs)

    @property
    def length(self) -> int:
        return self.input_ids.shape[1]

    def predicted(self, last: int) -> Tensor | None:
        """Which of the last tokens of each text are no padding, and are predicted from none; None where there is no mask."""
        if self.attention_mask is None:
            return None
        real = self.attention_mask != 0
        return real[:, self.length - last :] & real[:, self.length - last - 1 : -1]

    def run(self, head: Head, compute: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[tuple[Tensor, ...], Any]:
        return head.run(compute, input_ids=self.input_ids, attention_mask=self.attention_mask, **self.inputs)


def by_rows(mapping: Any, options: dict[str, Any]) -> bool:
    """Whether the map or an option may have an entry for each row, so that no row can be left out."""
    arrays = [*options.values(), *(mapping.params().values() if isinstance(mapping, Mapping) else ())]
    return options.get("support") is not None or any(is_array(v) for v in arrays)
