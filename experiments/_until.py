"""Training until held-out rows say that it is over, at several patiences at once, with weights averaged over the last steps."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import nn

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Patient:
    """How a training goes on until held-out rows say that it is over: the rate rises for `rising` steps and then stays."""

    patiences: tuple[int, ...]
    most: int
    batch: int = 32
    rising: int = 64
    decay: float = 0.99


@dataclasses.dataclass
class Stop(Generic[T]):
    """What a patience gave: the best epoch, what was kept of it, and the epoch at which the patience was over.

    ended: it was over before the epochs were. Else the best may lie beyond them, and says nothing.
    """

    patience: int
    epoch: int
    kept: T
    after: int
    ended: bool


class Watch(Generic[T]):
    """Sees the held-out error of each epoch; each patience is over when so many epochs bring no lower error."""

    def __init__(self, patiences: Sequence[int]) -> None:
        self.waiting = sorted(patiences)
        self.stops: list[Stop[T]] = []
        self.errors: list[float] = []
        self.best, self.kept = 0, None

    def better(self, error: float) -> bool:
        """Whether this epoch is the best yet, so that `keep` must follow."""
        self.errors.append(error)
        if error < min(self.errors[:-1], default=math.inf):
            self.best = len(self.errors)
            return True
        return False

    def keep(self, what: T) -> None:
        self.kept = what

    def over(self, most: int) -> bool:
        """Whether the last patience is over, or the epochs are."""
        now = len(self.errors)
        while self.waiting and (now - self.best >= self.waiting[0] or now >= most):
            ended = now - self.best >= self.waiting[0]
            assert self.kept is not None
            self.stops.append(Stop(self.waiting.pop(0), self.best, self.kept, now, ended))
        return not self.waiting


class Averaged:
    """A copy of a model whose weights are the mean of the model's over about the last 1 / (1 - decay) steps."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model: Any = copy.deepcopy(model).eval()
        self.decay, self.steps = decay, 0
        self._pairs = list(zip(self.model.parameters(), model.parameters(), strict=True))

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        decay = min(self.decay, self.steps / (self.steps + 10.0))
        for mean, now in self._pairs:
            if now.requires_grad:
                mean.lerp_(now, 1.0 - decay)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}
