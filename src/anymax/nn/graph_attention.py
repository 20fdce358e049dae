"""The module `anymax.nn.GraphAttention`: a layer of graph networks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from .._array import check_flag, dense, eager, is_ragged
from .._attention import operands
from .._core.mapping import Mapping
from .._core.options import check_keywords
from ..segments import segment_apply
from .attention_pool import weighted_sums
from .base import OfMapping, check_sizes, or_softmax

Fill = Literal["add", "sum", "mean", "min", "max", "mul"]
_REDUCTIONS: dict[str, str] = {"add": "sum", "sum": "sum", "mean": "mean", "min": "amin", "max": "amax", "mul": "prod"}


class GraphAttention(OfMapping):
    """Attention of the nodes of a graph to their neighbours, with any map: `GATv2Conv` of PyTorch Geometric with a `mapping`.

    With a sparse map, a node ignores some of its edges entirely. The arguments, weights and results are those of `GATv2Conv` (Brody,
    Alon and Yahav 2022), whose `state_dict` it loads.

    The score of an edge from j to i is `a^T leaky_relu(W_l x_j + W_r x_i + W_e e_ij)`, for each head; the output of node i is the sum of
    `p_ij W_l x_j` over its incoming edges, where p is the map of their scores.

    Parameters
    ----------
    in_channels
        The number of features of a node; a pair (of sources, of targets) for a bipartite graph.
    out_channels
        The number of output features of each head.
    heads
        The number of heads.
    mapping
        The map from the scores of a node's edges to weights, such as `Sparsemax()`, or its name; softmax by default. An
        alpha for each head has the shape (heads,).
    concat
        Return the features of all heads, `heads * out_channels`; False returns their mean.
    negative_slope
        The slope of the leaky ReLU below 0.
    add_self_loops
        Let each node attend to itself too; existing self-loops are replaced.
    edge_dim
        The number of features of an edge, if edges have features.
    fill_value
        The features of the added self-loops: a number, a tensor, or how to compute them from the features of the node's
        incoming edges: "mean", "add", "min", "max" or "mul".
    bias
        Whether there are biases.
    share_weights
        Use one matrix for sources and targets.
    residual
        Add a linear function of the node's own features to the output.

    Examples
    --------
    >>> import torch
    >>> from anymax import Sparsemax, nn
    >>> layer = nn.GraphAttention(8, 4, heads=2, mapping=Sparsemax())
    >>> x, edge_index = torch.randn(3, 8), torch.tensor([[0, 1, 2], [1, 2, 1]])
    >>> out, (edges, weights) = layer(x, edge_index, return_attention_weights=True)
    >>> out.shape, edges.shape, weights.shape
    (torch.Size([3, 8]), torch.Size([2, 6]), torch.Size([6, 2]))
    """

    prefix = "map_"
    lin_edge: nn.Linear | None
    res: nn.Linear | None
    bias: Tensor | None

    @check_keywords()
    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        mapping: Mapping | str | None = None,
        *,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        edge_dim: int | None = None,
        fill_value: float | Tensor | Fill = "mean",
        bias: bool = True,
        share_weights: bool = False,
        residual: bool = False,
        learn: str | None = None,
        bounds: tuple[float, float] = (1.0, 2.0),
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(or_softmax(mapping), learn, bounds)
        sides = in_channels if isinstance(in_channels, (tuple, list)) else (in_channels, in_channels)
        if len(sides) != 2:
            raise ValueError(f"GraphAttention: in_channels must be an integer or a pair of them, got {in_channels!r}")
        sizes = {
            "in_channels": sides[0],
            "in_channels of targets": sides[1],
            "out_channels": out_channels,
            "heads": heads,
        }
        check_sizes("GraphAttention", **sizes if edge_dim is None else {**sizes, "edge_dim": edge_dim})
        operands.check_dropout("GraphAttention", "dropout", dropout)
        if isinstance(fill_value, str) and fill_value not in _REDUCTIONS:
            raise ValueError(
                f"GraphAttention: fill_value must be a number, a tensor or one of {', '.join(_REDUCTIONS)}, got {fill_value!r}"
            )
        if share_weights and sides[0] != sides[1]:
            raise ValueError(
                f"GraphAttention: share_weights needs as many features of sources as of targets, got in_channels={in_channels!r}"
            )
        for name, value in (("concat", concat), ("add_self_loops", add_self_loops), ("bias", bias), ("residual", residual),
                            ("share_weights", share_weights)):  # fmt: skip
            check_flag("GraphAttention", name, value)
        self.in_channels, self.out_channels, self.heads = in_channels, out_channels, heads
        self.concat, self.negative_slope, self.dropout = concat, negative_slope, dropout
        self.add_self_loops, self.edge_dim, self.fill_value = add_self_loops, edge_dim, fill_value
        self.share_weights, self.residual = share_weights, residual
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        inner, outer = heads * out_channels, out_channels * (heads if concat else 1)
        self.lin_l = nn.Linear(sides[0], inner, bias=bias, **factory_kwargs)
        self.lin_r = self.lin_l if share_weights else nn.Linear(sides[1], inner, bias=bias, **factory_kwargs)
        self.att = nn.Parameter(torch.empty(1, heads, out_channels, **factory_kwargs))
        self.lin_edge = None if edge_dim is None else nn.Linear(edge_dim, inner, bias=False, **factory_kwargs)
        self.res = nn.Linear(sides[1], outer, bias=False, **factory_kwargs) if residual else None
        self.register_parameter("bias", nn.Parameter(torch.empty(outer, **factory_kwargs)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises the weights again, as `GATv2Conv` does."""
        for layer in (self.lin_l, self.lin_r, self.lin_edge, self.res):
            if layer is not None:
                layer.reset_parameters()
                nn.init.xavier_uniform_(layer.weight)
        bound = math.sqrt(6.0 / (self.heads + self.out_channels))
        nn.init.uniform_(self.att, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: Tensor,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Tensor | tuple[Tensor, tuple[Tensor, Tensor]]:
        """The features of the nodes, [nodes, heads * out_channels], or [nodes, out_channels] without `concat`.

        Parameters
        ----------
        x
            The features of the nodes, [nodes, in_channels]; for a bipartite graph a pair (sources, targets).
        edge_index
            The edges, integers [2, edges]: the source and the target of each, in any order.
        edge_attr
            The features of the edges, [edges, edge_dim], or [edges] if edge_dim is 1.
        return_attention_weights
            Return (output, (edges, weights)), where the edges are those used, with self-loops at the end, and the weights,
            [edges, heads], are those of the map, before dropout.
        """
        left, right = self._nodes(x)
        n_sources, n_targets = left.shape[0], right.shape[0]
        _check_edges(edge_index, n_sources, n_targets)
        edge_attr = self._edge_features(edge_attr, edge_index)
        if self.add_self_loops:
            edge_index, edge_attr = self._with_loops(edge_index, edge_attr, min(n_sources, n_targets))
        source, target = edge_index[0], edge_index[1]
        x_l = self.lin_l(left).unflatten(-1, (self.heads, self.out_channels))
        shared = self.share_weights and left is right
        x_r = x_l if shared else self.lin_r(right).unflatten(-1, (self.heads, self.out_channels))
        x_j = x_l[source]
        mixed = x_j + x_r[target]
        if self.lin_edge is not None and edge_attr is not None:
            mixed = mixed + self.lin_edge(edge_attr).unflatten(-1, (self.heads, self.out_channels))
        scores = (nn.functional.leaky_relu(mixed, self.negative_slope) * self.att).sum(-1)
        weights = segment_apply(self.mapping, scores, index=target, num_segments=n_targets)
        used = nn.functional.dropout(weights, self.dropout, self.training)
        out = weighted_sums(x_j, used, target, n_targets)
        out = out.flatten(1) if self.concat else out.mean(1)
        if self.res is not None:
            out = out + self.res(right)
        if self.bias is not None:
            out = out + self.bias
        return (out, (edge_index, weights)) if return_attention_weights else out

    def _nodes(self, x: Any) -> tuple[Tensor, Tensor]:
        both = tuple(x) if isinstance(x, (tuple, list)) else (x, x)
        if len(both) != 2:
            raise ValueError(
                f"GraphAttention: x must be a tensor or a pair (of sources, of targets), got {len(both)} of them"
            )
        for a, layer in zip(both, (self.lin_l, self.lin_r), strict=True):
            if not isinstance(a, Tensor):
                raise TypeError(f"GraphAttention: x must be a tensor or a pair of tensors, got {type(a).__name__}")
            dense(a, "GraphAttention: x", "call to_dense()")
            if a.ndim != 2 or a.shape[1] != layer.in_features:
                raise ValueError(
                    f"GraphAttention: x must have the shape [nodes, {layer.in_features}], got {tuple(a.shape)}"
                )
        return both[0], both[1]

    def _edge_features(self, edge_attr: Tensor | None, edge_index: Tensor) -> Tensor | None:
        if edge_attr is None:
            return None
        if self.edge_dim is None:
            raise ValueError("GraphAttention: it was made without edge features; give edge_dim= to use edge_attr")
        edge_attr = edge_attr[:, None] if edge_attr.ndim == 1 else edge_attr
        if tuple(edge_attr.shape) != (edge_index.shape[1], self.edge_dim):
            raise ValueError(
                f"GraphAttention: edge_attr must have the shape {(edge_index.shape[1], self.edge_dim)}, got {tuple(edge_attr.shape)}"
            )
        return edge_attr

    def _with_loops(self, edge_index: Tensor, edge_attr: Tensor | None, nodes: int) -> tuple[Tensor, Tensor | None]:
        """The edges without their self-loops, then a self-loop for each node."""
        other = edge_index[0] != edge_index[1]
        edge_index = edge_index[:, other]
        loops = torch.arange(nodes, device=edge_index.device, dtype=edge_index.dtype).expand(2, -1)
        if edge_attr is not None:
            edge_attr = edge_attr[other]
            edge_attr = torch.cat([edge_attr, self._filled(edge_attr, edge_index[1], nodes)])
        return torch.cat([edge_index, loops], 1), edge_attr

    def _filled(self, edge_attr: Tensor, target: Tensor, nodes: int) -> Tensor:
        """The features of the self-loops, [nodes, edge_dim]."""
        size = (nodes, edge_attr.shape[1])
        if isinstance(self.fill_value, Tensor):
            return self.fill_value.to(edge_attr).expand(size)
        if not isinstance(self.fill_value, str):
            return edge_attr.new_full(size, self.fill_value)
        inside = target < nodes  # a bipartite graph may have more targets than sources
        target, edge_attr = target[inside], edge_attr[inside]
        start = edge_attr.new_ones(size) if self.fill_value == "mul" else edge_attr.new_zeros(size)
        index = target[:, None].expand_as(edge_attr)
        return start.scatter_reduce(0, index, edge_attr, _REDUCTIONS[self.fill_value], include_self=False)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, heads={self.heads}, {super().extra_repr()}"

    if TYPE_CHECKING:

        @overload
        def __call__(
            self, x: Tensor | tuple[Tensor, Tensor], edge_index: Tensor, edge_attr: Tensor | None = None,
            return_attention_weights: Literal[False] | None = None,
        ) -> Tensor: ...  # fmt: skip

        @overload
        def __call__(
            self, x: Tensor | tuple[Tensor, Tensor], edge_index: Tensor, edge_attr: Tensor | None = None, *,
            return_attention_weights: Literal[True],
        ) -> tuple[Tensor, tuple[Tensor, Tensor]]: ...  # fmt: skip

        def __call__(self, *args: Any, **options: Any) -> Any: ...


def _check_edges(edge_index: Any, n_sources: int, n_targets: int) -> None:
    if not isinstance(edge_index, Tensor):
        raise TypeError(
            f"GraphAttention: edge_index must be a tensor of integers [2, edges], got {type(edge_index).__name__}"
        )
    if is_ragged(edge_index):
        raise TypeError(
            "GraphAttention: edge_index is not a sparse tensor: it has the source and the target of each edge, integers [2, edges]"
        )
    if edge_index.ndim != 2 or edge_index.shape[0] != 2:
        raise ValueError(f"GraphAttention: edge_index must have the shape [2, edges], got {tuple(edge_index.shape)}")
    if edge_index.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"GraphAttention: edge_index must be integers of 32 or 64 bits, got {edge_index.dtype}")
    if not edge_index.shape[1] or not eager(edge_index):
        return
    for row, (side, n) in enumerate((("sources", n_sources), ("targets", n_targets))):
        low, high = (int(a) for a in edge_index[row].aminmax())
        if low < 0 or high >= n:
            wrong = int(((edge_index[row] < 0) | (edge_index[row] >= n)).nonzero()[0])
            raise IndexError(
                f"GraphAttention: edge_index[{row}, {wrong}] is {int(edge_index[row, wrong])}, and x has {n} {side}, "
                f"{f'0 to {n - 1}' if n else 'none'}"
            )
