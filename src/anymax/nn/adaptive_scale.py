"""`AdaptiveScale`: the temperature of attention, learned as a function of the query and the number of keys that it sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .._array import is_number
from .._core.options import check_keywords
from ..transforms import scalable
from ..transforms.base import Transform
from .base import check_sizes


class AdaptiveScale(nn.Module):
    """The scale `delta + beta log(n)^gamma` of attention scores, with beta and gamma learned as functions of the query, for each head.

    It is for attention over longer contexts than those of training; with `Entmax(1.5)` it is the adaptive-scaled entmax of Vasylenko et
    al. 2026. n is the number of keys that a query sees. Give it to `Attention` as its transform; or call it on the queries' hidden
    states, and give the result, a `scalable`, to `anymax.attention`. If one factor for each head is enough, use
    `scalable(beta=nn.Parameter(...))` instead.

    It takes hidden states [..., L, embed_dim], and returns a transform of the scores [..., num_heads, L, S]. beta is `softplus(w_b h)` and
    gamma is `gamma_range tanh(w_g h)`. A query that sees one key has the scale delta.

    Parameters
    ----------
    embed_dim
        The number of features of the hidden states.
    num_heads
        The number of heads of the queries.
    only
        The indices of the heads to scale, all by default. The paper leaves out heads with ALiBi, whose distances would be
        scaled too.
    gamma_range
        Gamma is between minus and plus this number.
    delta
        The part of the scale that does not depend on the length.
    bias
        Whether the learned functions have biases.

    Examples
    --------
    >>> import torch
    >>> from anymax import attention, nn
    >>> scale, x = nn.AdaptiveScale(8, 2), torch.randn(1, 5, 8)
    >>> q, k, v = torch.randn(3, 1, 2, 5, 4)
    >>> attention(q, k, v, "entmax15", is_causal=True, transform=scale(x)).shape
    torch.Size([1, 2, 5, 4])
    >>> attend = nn.Attention(8, 2, "entmax15", transform=nn.AdaptiveScale(8, 2), batch_first=True)
    >>> attend(x, x, x, is_causal=True)[0].shape
    torch.Size([1, 5, 8])
    """

    @check_keywords({"gamma": "say gamma_range=", "beta": "it is learned; transforms.scalable takes one of your own"})
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        only: Sequence[int] | None = None,
        gamma_range: float = 2.0,
        delta: float = 1.0,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes("AdaptiveScale", embed_dim=embed_dim, num_heads=num_heads)
        for name, value in (("gamma_range", gamma_range), ("delta", delta)):
            if not is_number(value):
                raise TypeError(f"AdaptiveScale: {name} must be a number, got {value!r}")
            if not 0.0 <= value < float("inf"):
                raise ValueError(f"AdaptiveScale: {name} must be finite and at least 0, got {value!r}")
        scaled = list(range(num_heads) if only is None else only)
        if not scaled or len(set(scaled)) < len(scaled) or not set(scaled) <= set(range(num_heads)):
            raise ValueError(
                f"AdaptiveScale: only must name some of the {num_heads} heads, 0 to {num_heads - 1}, each once, got {only!r}"
            )
        self.embed_dim, self.num_heads, self.gamma_range, self.delta = embed_dim, num_heads, gamma_range, delta
        self.only = None if only is None else tuple(scaled)
        self.projection = nn.Linear(embed_dim, 2 * len(scaled), bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Transform:
        """The `scalable` for hidden states [..., L, embed_dim]: a transform of the scores [..., num_heads, L, S]."""
        if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[-1] != self.embed_dim:
            got = f"the shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"AdaptiveScale: expected hidden states [..., L, {self.embed_dim}], got {got}")
        raw = self.projection(x).unsqueeze(-1).transpose(-3, -2)  # [..., 2 scaled heads, L, 1]
        beta, gamma = raw.chunk(2, -3)
        beta, gamma = nn.functional.softplus(beta), self.gamma_range * torch.tanh(gamma)
        if self.only is None:
            return scalable(beta, gamma, self.delta)
        deltas = [self.delta if head in self.only else 1.0 for head in range(self.num_heads)]
        delta = torch.tensor(deltas, dtype=beta.dtype, device=beta.device)[:, None, None]
        return scalable(self._spread(beta), self._spread(gamma), delta)

    def _spread(self, values: Tensor) -> Tensor:
        """The values for all heads, with 0 for heads that are not scaled."""
        of_head = dict(zip(self.only or (), values.unbind(-3)))
        zeros = torch.zeros_like(values[..., 0, :, :])
        return torch.stack([of_head.get(head, zeros) for head in range(self.num_heads)], -3)

    def extra_repr(self) -> str:
        only = "" if self.only is None else f", only={self.only}"
        return f"{self.embed_dim}, {self.num_heads}{only}, gamma_range={self.gamma_range:g}, delta={self.delta:g}"

    if TYPE_CHECKING:

        def __call__(self, x: Tensor) -> Transform: ...
