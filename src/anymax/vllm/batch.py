"""The requests of a batch and what they ask for: rows that ask for the same kind of thing go through one call together."""

from __future__ import annotations

import dataclasses
import logging
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

LOG = logging.getLogger("vllm.anymax")  # a child of vLLM's own logger, whose handlers print it

# (rows of the batch, "all", "prompt" or "output") -> [rows, length], -1 where a row has fewer
TokensOf = Callable[[Sequence[int], str], Tensor]


@dataclasses.dataclass(eq=False)
class Request:
    """What one request asks for, and what it keeps from token to token."""

    spec: Spec
    seed: int | None = None
    history: Any = None  # where its tokens are
    sources: dict[int, torch.Generator] = dataclasses.field(default_factory=dict)  # of each part that draws
    refused: bool = False  # True once it can't be served; its rows stay as they are

    def asks(self, n: int) -> bool:
        """True if it asks for something that can be done to rows of n classes."""
        if not self.refused:
            try:
                self.spec.check(n)
            except Exception as error:
                self.refuse(error, n)
        return not self.refused and bool(self.spec.parts or self.spec.mapping is not None)

    def refuse(self, error: Exception, n: int) -> None:
        """Leaves the rows of this request as they are from now on, and says so once, in vLLM's log."""
        self.refused = True
        LOG.warning(
            "anymax: a request can't be served over %d classes, so its logits stay as they are: %s: %s; it asked for %s",
            *(n, type(error).__name__, error, self.spec.shown()),
        )

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


@dataclasses.dataclass(eq=False)
class Group:
    """Rows whose requests name the same transforms and the same map."""

    rows: tuple[int, ...]
    index: Tensor | None  # the rows; None: all of the batch, in its order
    requests: tuple[Request, ...]  # one a row
    made: Any = None  # the transform, once it is made, if it is the same at each token

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.requests[0].spec.parts

    def scores(self, x: Tensor, tokens_of: TokensOf) -> Tensor:
        """The rows after what their requests ask for."""
        return _scores(x, self._transform(x, tokens_of), self.requests[0].spec.mapping).to(x.dtype)

    def _transform(self, x: Tensor, tokens_of: TokensOf) -> Any:
        if self.made is not None:
            return self.made
        made = compose(*(self._part(place, x, tokens_of) for place in range(len(self.parts))))
        if not any(part.tokens or "generator" in part.takes for part in self.parts):
            self.made = made
        return made

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
        """The logits [rows, classes] after what the requests at these places ask for; row i belongs to the request at places[i].

        A request that can't be served leaves its rows as they are, and the others go on: an error here would end the engine for all.
        """
        if not self.requests:
            return logits
        known = (tuple(places), logits.device)
        if self._groups is None or self._groups[0] != known:
            self._groups = known, self._grouped(places, logits)
        for group in self._groups[1]:
            logits = self._served(group, logits, tokens_of)
        return logits

    def _served(self, group: Group, logits: Tensor, tokens_of: TokensOf) -> Tensor:
        try:
            y = group.scores(logits if group.index is None else logits[group.index], tokens_of)
        except Exception as error:
            self._groups = None
            each = list(dict.fromkeys(group.requests))
            if len(each) == 1:
                each[0].refuse(error, logits.shape[-1])
                return logits
            for request in each:  # which of them is it?
                rows = [row for row, mine in zip(group.rows, group.requests, strict=True) if mine is request]
                alone = Group(tuple(rows), torch.tensor(rows, device=logits.device), (request,) * len(rows))
                logits = self._served(alone, logits, tokens_of)
            return logits
        if group.index is None:
            return y
        logits[group.index] = y
        return logits

    def _grouped(self, places: Sequence[int], logits: Tensor) -> list[Group]:
        by_kind: dict[Any, list[int]] = {}
        for row, place in enumerate(places):
            request = self.requests.get(place)
            if request is not None and request.asks(logits.shape[-1]):
                by_kind.setdefault(_kind(request.spec), []).append(row)
        groups = []
        for rows in by_kind.values():
            requests = tuple(self.requests[places[row]] for row in rows)
            index = None if len(rows) == len(places) else torch.tensor(rows, device=logits.device)
            groups.append(Group(tuple(rows), index, requests))
        return groups


def _scores(x: Tensor, transform: Any, mapping: Mapping | None) -> Tensor:
    """The scores after a transform; with a map log p instead."""
    if mapping is None or isinstance(mapping, Softmax):  # what comes after takes scores of softmax
        return transform(x)
    given = read_rows("anymax.vllm", mapping, x, transform=transform).over_all()
    rows, mapping = given.rows, given.mapping
    if mapping.facts.sparse and mapping.sums_to_one and rows.device.type == "cpu" and not rows.requires_grad:
        return given.seen(_log_of_few(apply(mapping, rows)))
    return given.seen(log_p_of_draw(mapping, rows, xp))


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
