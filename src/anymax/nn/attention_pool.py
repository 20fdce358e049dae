"""The module `anymax.nn.AttentionPool`: it reduces each set of vectors to one vector."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from .._array import dense
from .._core.mapping import Mapping
from .._core.options import check_keywords
from ..segments import Segments, segment_apply
from ..segments.layout import read
from .base import OfMapping, check_sizes, or_softmax


def weighted_sums(x: Tensor, weights: Tensor, index: Tensor, n: int) -> Tensor:
    """The weighted sum of x [entries, ..., features] over each segment, [n, ..., features]."""
    weighted = x * weights[..., None]
    return weighted.new_zeros((n, *weighted.shape[1:])).index_add(0, index, weighted)


class AttentionPool(OfMapping):
    """A weighted sum over each segment, with any map: a set of vectors, of any size, becomes one vector.

    It is for sets, baskets, graphs and packed sequences, where a mean would count unimportant entries too. The scores are the products of
    the entries with a learned query, or are given by the caller.

    Parameters
    ----------
    mapping
        The map from the scores of a segment to weights, such as `Sparsemax()`, or its name; softmax by default.
    features
        The number of features of an entry, for a learned query; without it `forward` needs scores.
    heads
        How many queries to learn, each with its own sum; None for one query, without an axis of heads.
    device, dtype
        The device and dtype of the query.

    Examples
    --------
    >>> import torch
    >>> from anymax import nn
    >>> pool = nn.AttentionPool("sparsemax")
    >>> x, scores = torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([2.0, 2.0, 0.0])
    >>> pool(x, scores, lengths=[2, 1])
    tensor([[2.],
            [5.]])
    >>> nn.AttentionPool("entmax15", 8, heads=2)(torch.randn(5, 8), index=torch.tensor([1, 0, 1, 1, 0])).shape
    torch.Size([2, 2, 8])
    """

    prefix = "map_"
    query: Tensor | None

    @check_keywords({"dim": "say features=", "gate_nn": "give its results as scores"})
    def __init__(
        self,
        mapping: Mapping | str | None = None,
        features: int | None = None,
        heads: int | None = None,
        *,
        learn: str | None = None,
        bounds: tuple[float, float] = (1.0, 2.0),
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(or_softmax(mapping), learn, bounds)
        sizes = {"features": features, "heads": heads}
        check_sizes("AttentionPool", **{name: size for name, size in sizes.items() if size is not None})
        if heads is not None and features is None:
            raise ValueError(
                "AttentionPool: heads are those of a learned query, which needs features=; scores may have heads"
            )
        self.features, self.heads = features, heads
        query = None
        if features is not None:
            shape = (features,) if heads is None else (heads, features)
            query = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.register_parameter("query", query)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises the query again."""
        if self.query is not None:
            nn.init.normal_(self.query, std=1.0 / math.sqrt(self.query.shape[-1]))

    def forward(
        self,
        x: Tensor,
        scores: Tensor | None = None,
        *,
        index: Tensor | Segments | None = None,
        ptr: Any = None,
        lengths: Any = None,
        num_segments: int | None = None,
        return_attention_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The sums, [segments, features], or [segments, heads, features] if the query or the scores have heads.

        Parameters
        ----------
        x
            The vectors, [entries, features]; or a jagged nested tensor of torch, which knows its segments.
        scores
            [entries] or [entries, heads], instead of those of the learned query; -inf leaves an entry out.
        index, ptr, lengths, num_segments
            Which entries belong together, as in `anymax.segment_apply`. An empty segment gives zeros.
        return_attention_weights
            Return the pair (sums, weights); the weights have the shape of the scores.
        """
        if not isinstance(x, Tensor):
            raise TypeError(f"AttentionPool: x must be a tensor, got {type(x).__name__}")
        nested: Any = x
        if x.is_nested and x.layout is torch.jagged and all(a is None for a in (index, ptr, lengths, num_segments)):
            x, ptr = nested.values(), nested.offsets()
        dense(x, "AttentionPool: x", "of a jagged nested one without holes leave out index, ptr and lengths")
        if x.ndim != 2 or (self.features is not None and x.shape[1] != self.features):
            raise ValueError(
                f"AttentionPool: x must have the shape [entries, {self.features or 'features'}], got {tuple(x.shape)}"
            )
        if scores is None:
            if self.query is None:
                raise TypeError("AttentionPool: it was made without a query; give scores, or features= when making it")
            scores = x @ self.query.mT if self.query.ndim == 2 else x @ self.query
        elif not isinstance(scores, Tensor) or scores.ndim not in (1, 2) or scores.shape[0] != x.shape[0]:
            got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ValueError(
                f"AttentionPool: scores must have the shape ({x.shape[0]},) or ({x.shape[0]}, heads), got {got}"
            )
        rows = read("AttentionPool", index, ptr, lengths, num_segments)
        weights = segment_apply(self.mapping, scores, index=rows)
        entries = x if weights.ndim == 1 else x[:, None]
        out = weighted_sums(entries, weights.to(x.dtype), rows.index_of(x), rows.num_segments)
        return (out, weights) if return_attention_weights else out

    def extra_repr(self) -> str:
        words = "" if self.features is None else f", features={self.features}, heads={self.heads}"
        return f"{super().extra_repr()}{words}"

    if TYPE_CHECKING:

        @overload
        def __call__(
            self, x: Tensor, scores: Tensor | None = None, *, index: Tensor | Segments | None = None, ptr: Any = None,
            lengths: Any = None, num_segments: int | None = None, return_attention_weights: Literal[False] = False,
        ) -> Tensor: ...  # fmt: skip

        @overload
        def __call__(
            self, x: Tensor, scores: Tensor | None = None, *, index: Tensor | Segments | None = None, ptr: Any = None,
            lengths: Any = None, num_segments: int | None = None, return_attention_weights: Literal[True],
        ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

        def __call__(self, *args: Any, **options: Any) -> Any: ...
