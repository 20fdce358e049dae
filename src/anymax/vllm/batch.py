"""The requests of a batch and what they ask for: rows that ask for the same kind of thing go through one call together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor

from .._array import is_number
from .._core.mapping import Mapping
from .._random.generators import torch_source
from ..functional import apply
from ..functional.draws import log_p_of_draw
from ..likelihood.terms import read as read_rows
from ..mappings import Softmax
from ..transforms import compose
from .spec import Part, Spec

# (rows of the batch, "all", "prompt" or "output") -> [rows, length], -1 where a row has fewer
TokensOf = Callable[[Sequence[int], str], Tensor]


@dataclasses.dataclass(eq=False)
class Request:
    """What one request asks for, and what it keeps from token to token."""

    spec: Spec
    seed: int | None = None
    history: Any = None  # where its tokens are
    sources: dict[int, torch.Generator] = dataclasses.field(default_factory=dict)  # of each part that draws

    def source(self, place: int, like: Tensor) -> torch.Generator | None:
        """The generator of a part that draws random numbers; None: torch's global one. It goes on from token to token."""
        part = self.spec.parts[place]
        seed = dict(part.given).get("generator")
        if seed is None and self.seed is not None:
            seed = (self.seed * 0x9E3779B9 + place + 1) % 2**63  # far from the seed itself, which draws the tokens
        if seed is None:
            return None
        if place not in self.sources:
            self.sources[place] = torch_source(like, seed)
        return self.sources[place]


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows whose requests name the same transforms and the same map."""

    rows: tuple[int, ...]
    index: Tensor | None  # the rows; None: all of the batch, in its order
    requests: tuple[Request, ...]  # one a row
    made: Any  # the transform, if it is the same at each token

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.requests[0].spec.parts

    def transform(self, x: Tensor, tokens_of: TokensOf) -> Any:
        if self.made is not None:
            return self.made
        return compose(*(self._part(place, x, tokens_of) for place in range(len(self.parts))))

    def _part(self, place: int, x: Tensor, tokens_of: TokensOf) -> Any:
        part, changes = self.parts[place], _together(self.requests, place, x.device)
        if "generator" in part.takes:
            sources = [request.source(place, x) for request in self.requests]
            changes["generator"] = sources if any(source is not None for source in sources) else None
        if part.tokens:
            tokens = tokens_of(self.rows, part.tokens)
            changes["tokens"] = torch.where(tokens < x.shape[-1], tokens, -1)  # what stands for an image is no class
        return part.make(**changes)


class Batch:
    """The requests by their places, and the groups that they form."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self._groups: tuple[Any, list[Group]] | None = None

    def put(self, place: int, request: Request | None) -> None:
        """The request at a place; None: what is there asks for nothing."""
        if request is None:
            self.requests.pop(place, None)
        else:
            self.requests[place] = request
        self._groups = None

    def move(self, here: int, there: int, swap: bool) -> None:
        moved, other = self.requests.get(here), self.requests.get(there)
        self.put(there, moved)
        self.put(here, other if swap else None)

    def apply(self, logits: Tensor, places: Sequence[int], tokens_of: TokensOf) -> Tensor:
        """The logits [rows, classes] after what the requests at these places ask for; row i belongs to the request at places[i]."""
        if not self.requests:
            return logits
        known = (tuple(places), logits.device)
        if self._groups is None or self._groups[0] != known:
            self._groups = known, self._grouped(places, logits)
        for group in self._groups[1]:
            x = logits if group.index is None else logits[group.index]
            y = _scores(x, group.transform(x, tokens_of), group.requests[0].spec.mapping).to(logits.dtype)
            if group.index is None:
                logits = y
            else:
                logits[group.index] = y
        return logits

    def _grouped(self, places: Sequence[int], logits: Tensor) -> list[Group]:
        by_kind: dict[Any, list[int]] = {}
        for row, place in enumerate(places):
            request = self.requests.get(place)
            if request is not None and (request.spec.parts or request.spec.mapping is not None):
                by_kind.setdefault(_kind(request.spec), []).append(row)
        groups = []
        for rows in by_kind.values():
            requests = tuple(self.requests[places[row]] for row in rows)
            parts = requests[0].spec.parts
            index = None if len(rows) == len(places) else torch.tensor(rows, device=logits.device)
            made = None
            if not any(part.tokens or "generator" in part.takes for part in parts):
                made = compose(*(part.make(**_together(requests, i, logits.device)) for i, part in enumerate(parts)))
            groups.append(Group(tuple(rows), index, requests, made))
        return groups


def _scores(x: Tensor, transform: Any, mapping: Mapping | None) -> Tensor:
    """The scores after a transform; with a map log p instead."""
    if mapping is None or isinstance(mapping, Softmax):  # what comes after takes scores of softmax
        return transform(x)
    rows, mapping = read_rows("anymax.vllm", mapping, x, transform=transform)
    if mapping.facts.sparse and mapping.sums_to_one and rows.device.type == "cpu" and not rows.requires_grad:
        return _log_of_few(apply(mapping, rows))
    return log_p_of_draw(mapping, rows, xp)


def _log_of_few(p: Tensor) -> Tensor:
    """log p where most are 0: a logarithm of 0 takes many times as long as one of another number."""
    flat = p.flatten()
    out = torch.full_like(flat, -math.inf)
    some = torch.nonzero(flat).flatten()  # NaN too
    out[some] = flat[some].log()
    return out.view_as(p)


def _kind(spec: Spec) -> Any:
    """What rows of one call have in common: all but the numbers that may differ from row to row."""
    parts = []
    for part in spec.parts:
        aligned = part.make(**({"tokens": [0]} if part.tokens else {})).aligned
        common = tuple((k, None if _one_a_row(k, v, aligned) else v) for k, v in part.given)
        parts.append((part.name, common))
    return tuple(parts), None if spec.mapping is None else repr(spec.mapping)


def _one_a_row(name: str, value: Any, aligned: tuple[str, ...]) -> bool:
    return name == "generator" or (name in aligned and is_number(value))


def _together(requests: Sequence[Request], place: int, device: Any) -> dict[str, Any]:
    """The parameters that differ between the rows, as arrays [rows, 1]."""
    every = [dict(request.spec.parts[place].given) for request in requests]
    out = {}
    for name, value in every[0].items():
        values = [given[name] for given in every]
        if name != "generator" and any(v != value for v in values):
            dtype = torch.int64 if all(isinstance(v, int) for v in values) else torch.float64
            out[name] = torch.tensor(values, dtype=dtype, device=device)[:, None]
    return out
