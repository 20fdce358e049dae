"""The module `anymax.nn.Attention`: `nn.MultiheadAttention` with a map."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from .._array import autocast_dtype, check_flag, dense
from .._attention import attention, is_causal_bias, kept_by, operands
from .._attention.call import ImplementationName
from .._attention.scores import transforms_of
from .._core.mapping import Mapping
from .._core.options import check_keywords
from .adaptive_scale import AdaptiveScale
from .base import OfMapping, check_integer, or_softmax
from .nested import nested_as, padded


class Attention(OfMapping):
    """Multi-head attention with any map: `nn.MultiheadAttention` with a `mapping`. It loads the weights of `nn.MultiheadAttention`.

    Put it where a model has `nn.MultiheadAttention`, to let each head attend to a few positions and give the others a weight of exactly
    0. Masks follow torch here: True hides. In `anymax.attention`, which it calls, True keeps.

    Parameters
    ----------
    embed_dim
        The number of features of the queries and the output, a multiple of num_heads.
    num_heads
        The number of heads.
    mapping
        The map from scores to weights, or its name; softmax by default. An alpha for each head has the shape (heads, 1, 1).
    bias
        Whether the projections have biases.
    add_bias_kv
        Add a learned key and value, which no mask hides.
    add_zero_attn
        Add a key and a value of zeros, which no mask hides.
    kdim, vdim
        The number of features of keys and values; `embed_dim` by default.
    batch_first
        Inputs are [N, L, E] rather than [L, N, E].
    kv_heads
        The number of heads of keys and values, which must divide num_heads; num_heads by default.
    alibi
        True, or a slope for each head, [num_heads]: the slope times the distance between query and key is subtracted from
        the score; True uses the slopes of ALiBi, and a slope of 0 leaves a head without positions.
    sink
        Add a learned score for each head, of a key without a value; it has no column in the weights.
    gate
        Multiply each feature of the heads' outputs by a sigmoid of the query, `sigmoid(gate_proj(query))`, before the output projection
        (gated attention); "head" has one factor for each head. A head can then give nothing without a sink.
    transform
        A function of the masked scores, such as `scalable(beta=nn.Parameter(...))`, whose parameters the module registers;
        or an `AdaptiveScale`, which computes the transform from the queries.
    implementation
        As in `anymax.attention`.

    Examples
    --------
    >>> import torch
    >>> from anymax import Entmax, nn
    >>> attend = nn.Attention(16, 4, Entmax(torch.full((4, 1, 1), 1.5)), batch_first=True, learn="alpha")
    >>> x = torch.randn(2, 5, 16)
    >>> out, weights = attend(x, x, x, is_causal=True, average_attn_weights=False)
    >>> out.shape, weights.shape
    (torch.Size([2, 5, 16]), torch.Size([2, 4, 5, 5]))
    """

    prefix = "map_"
    place = "for dropout, say dropout=0.1"
    in_proj_bias: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None
    sink: Tensor | None
    slopes: Tensor | None
    in_proj_weight: nn.Parameter
    q_proj_weight: nn.Parameter
    k_proj_weight: nn.Parameter
    v_proj_weight: nn.Parameter

    @check_keywords(
        {
            "alpha": 'write Attention(..., mapping="entmax:alpha=1.5")',
            **dict.fromkeys(
                ("need_weights", "is_causal", "causal", "attn_mask", "key_padding_mask"), "it goes to the call"
            ),
            "heads": "say num_heads=",
            "features": "say embed_dim=",
        }
    )
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        mapping: Mapping | str | None = None,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        kv_heads: int | None = None,
        window: int | tuple[int | None, int | None] | None = None,
        softcap: float | None = None,
        alibi: bool | Tensor | Sequence[float] = False,
        sink: bool = False,
        gate: bool | Literal["head"] = False,
        transform: Callable[[Any], Any] | None = None,
        learn: str | None = None,
        bounds: tuple[float, float] = (1.0, 2.0),
        implementation: ImplementationName | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(or_softmax(mapping), learn, bounds)
        shared = num_heads if kv_heads is None else kv_heads
        _check_sizes(embed_dim, num_heads, shared, kdim or 1, vdim or 1)
        operands.check_dropout("Attention", "dropout", dropout)
        slopes = _slopes_of(alibi, num_heads)
        if gate != "head" and not isinstance(gate, bool):
            raise ValueError(f'Attention: gate must be True, False or "head", got {gate!r}')
        if (add_bias_kv or add_zero_attn) and (window is not None or slopes is not False):
            raise ValueError(
                "Attention: the keys of add_bias_kv and add_zero_attn stand nowhere, so that they go with neither window nor alibi"
            )
        self.embed_dim, self.num_heads, self.kv_heads = embed_dim, num_heads, shared
        self.head_dim = embed_dim // num_heads
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        self.dropout, self.batch_first = dropout, batch_first
        self.implementation: ImplementationName | None = implementation
        self.add_zero_attn = add_zero_attn
        self.adaptive = transform if isinstance(transform, AdaptiveScale) else None
        if self.adaptive is not None and (self.adaptive.embed_dim, self.adaptive.num_heads) != (embed_dim, num_heads):
            raise ValueError(
                f"Attention: its AdaptiveScale must have its {embed_dim} features and {num_heads} heads, got "
                f"{self.adaptive.embed_dim} and {self.adaptive.num_heads}"
            )
        self.register_parameter("slopes", slopes if isinstance(slopes, nn.Parameter) else None)
        self.alibi = slopes if self.slopes is None else True
        self.options: dict[str, Any] = {
            "window": window, "softcap": softcap, "transform": transform if self.adaptive is None else None,
        }  # fmt: skip
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        self._register_weights(bias, add_bias_kv, sink, factory_kwargs)
        gates = num_heads if gate == "head" else embed_dim
        self.gate_proj = nn.Linear(embed_dim, gates, bias=bias, **factory_kwargs) if gate else None
        for n, part in enumerate(transforms_of(transform) or ()):
            for name, value in part.params:
                if isinstance(value, nn.Parameter):
                    self.register_parameter(f"transform_{n}_{name}", value)
        self.register_forward_pre_hook(_unchanged)
        self.reset_parameters()

    def _register_weights(self, bias: bool, add_bias_kv: bool, sink: bool, factory_kwargs: dict[str, Any]) -> None:
        inner, embed_dim = self.kv_heads * self.head_dim, self.embed_dim
        self._packed = self.kdim == self.vdim == embed_dim
        # what torch's code asks a module whose weights it reads
        self._qkv_same_embed_dim = self._packed and inner == embed_dim
        shapes = {
            "in_proj_weight": (embed_dim + 2 * inner, embed_dim), "q_proj_weight": (embed_dim, embed_dim),
            "k_proj_weight": (inner, self.kdim), "v_proj_weight": (inner, self.vdim),
        }  # fmt: skip
        for name, shape in shapes.items():
            self._register(name, self._packed == (name == "in_proj_weight"), shape, factory_kwargs)
        self._register("in_proj_bias", bias, (embed_dim + 2 * inner,), factory_kwargs)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory_kwargs)
        for name in ("bias_k", "bias_v"):
            self._register(name, add_bias_kv, (1, 1, inner), factory_kwargs)
        self.register_parameter("sink", nn.Parameter(torch.zeros(self.num_heads, **factory_kwargs)) if sink else None)

    def _register(self, name: str, there: bool, shape: tuple[int, ...], factory_kwargs: dict[str, Any]) -> None:
        """Register a parameter, still without values, or None, as torch does for a name that is not used."""
        self.register_parameter(name, nn.Parameter(torch.empty(shape, **factory_kwargs)) if there else None)

    def reset_parameters(self) -> None:
        """Initialises the weights again, as `nn.MultiheadAttention` does."""
        for weight in self._weights():
            nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        for extra in (self.bias_k, self.bias_v):
            if extra is not None:
                nn.init.xavier_normal_(extra)
        if self.gate_proj is not None:
            nn.init.xavier_uniform_(self.gate_proj.weight)
            if self.gate_proj.bias is not None:
                nn.init.zeros_(self.gate_proj.bias)

    def _weights(self) -> list[nn.Parameter]:
        if self._packed:
            return [self.in_proj_weight]
        return [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        sizes = [self.embed_dim, *[self.kv_heads * self.head_dim] * 2]
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.split(sizes)
        if self._packed and query is key is value:
            parts = nn.functional.linear(query, self.in_proj_weight, self.in_proj_bias).split(sizes, -1)
        else:
            weights = self.in_proj_weight.split(sizes) if self._packed else self._weights()
            parts = [nn.functional.linear(*one) for one in zip((query, key, value), weights, biases)]
        return [p.unflatten(-1, (-1, self.head_dim)).transpose(-3, -2) for p in parts]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(output, weights), as from `nn.MultiheadAttention.forward`.

        Parameters
        ----------
        query
            [L, N, embed_dim], [N, L, embed_dim] with `batch_first`, or [L, embed_dim]. With `batch_first` query, key and
            value may also be nested tensors, as from `nn.TransformerEncoder`; the output then is one, and weights are padded.
        key, value
            [S, N, kdim] and [S, N, vdim], with the same variants.
        key_padding_mask
            [N, S], True = padding, which is hidden; or numbers to add to the scores.
        need_weights
            Return the weights; if False their matrix is not needed, and the second result is None.
        attn_mask
            [L, S] or [N * heads, L, S], True = hidden; or numbers to add to the scores.
        average_attn_weights
            Return the mean over the heads, [N, L, S], instead of [N, heads, L, S].
        is_causal
            Hide later keys; ignored if there is an `attn_mask`.
        """
        same = query is key is value
        is_causal = check_flag("Attention", "is_causal", is_causal)
        if any(isinstance(a, Tensor) and a.is_nested for a in (query, key, value)):
            _check_nested((query, key, value), self.batch_first, (key_padding_mask, attn_mask))
            return self._of_nested(query, key, value, need_weights, average_attn_weights, is_causal)
        sizes = (self.embed_dim, self.kdim, self.vdim)
        _check_inputs((query, key, value), sizes, self._weights()[0].dtype)
        if query.ndim == 3 and not self.batch_first:
            query, key, value = (a.transpose(0, 1) for a in (query, key, value))
        q, k, v = self._project(query, query if same else key, query if same else value)
        alibi: Any = self.alibi if self.slopes is None else self.slopes
        if isinstance(alibi, tuple):
            alibi = torch.tensor(alibi, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        options = self.options if self.adaptive is None else {**self.options, "transform": self.adaptive(query)}
        keep, added = _masks_of(q, k, attn_mask, key_padding_mask)
        is_causal = is_causal and attn_mask is None
        if self.bias_k is not None or self.add_zero_attn:
            if is_causal:
                seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
                keep, is_causal = seen if keep is None else keep & seen, False
            biases = None if self.bias_k is None or self.bias_v is None else (self.bias_k, self.bias_v)
            k, v, keep, added = _with_more_keys(k, v, biases, self.add_zero_attn, keep, added)
        found: Any = attention(
            q, k, v, self.mapping, mask=keep, bias=added, is_causal=is_causal,
            enable_gqa=self.kv_heads != self.num_heads, dropout_p=self.dropout if self.training else 0.0, sink=self.sink,
            alibi=alibi, need_weights=need_weights, implementation=self.implementation, **options,
        )  # fmt: skip
        out, weights = found if need_weights else (found, None)
        out = out.transpose(-3, -2)
        if self.gate_proj is not None:
            out = out * self.gate_proj(query).sigmoid().unflatten(-1, (self.num_heads, -1))
        out = self.out_proj(out.flatten(-2))
        if query.ndim == 3 and not self.batch_first:
            out = out.transpose(0, 1)
        return out, weights.mean(-3) if weights is not None and average_attn_weights else weights

    def _of_nested(
        self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool, average: bool, is_causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        """`forward` for nested tensors: an output like the query, and padded weights, 0 where a query or a key is padding."""
        q, own = padded(query)
        k, there = (q, own) if key is query else padded(key)
        v = q if value is query else k if value is key else padded(value)[0]
        out, weights = self.forward(q, k, v, ~there, need_weights, None, average, is_causal)
        if weights is not None:
            weights = weights * (own[:, :, None] if average else own[:, None, :, None])
        return nested_as(out, own, query), weights

    def merge_masks(self, *given: Any) -> NoReturn:
        """Raises an error: torch's fused encoder layer asks for the masks before it computes softmax in place of the map."""
        raise RuntimeError(
            "Attention: torch's fused encoder layer has only softmax, and the hook by which this module keeps it away is gone; say "
            "torch.backends.mha.set_fastpath_enabled(False)"
        )

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}, {super().extra_repr()}"

    if TYPE_CHECKING:

        def __call__(
            self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None, need_weights: bool = True,
            attn_mask: Tensor | None = None, average_attn_weights: bool = True, is_causal: bool = False,
        ) -> tuple[Tensor, Tensor | None]: ...  # fmt: skip


def _unchanged(module: nn.Module, inputs: Any) -> None:
    """A hook that changes nothing: torch's fused encoder layer, which has only softmax, calls `forward` where a module has a hook."""


# -- the arguments ------------------------------------------------------------------------------------------------------------


def _check_sizes(embed_dim: int, num_heads: int, kv_heads: int, kdim: int, vdim: int) -> None:
    sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "kv_heads": kv_heads, "kdim": kdim, "vdim": vdim}
    for name, size in sizes.items():
        check_integer("Attention", name, size)
    if num_heads < 1 or embed_dim % num_heads or kv_heads < 1 or num_heads % kv_heads:
        raise ValueError(
            f"Attention: embed_dim must be a multiple of num_heads and that of kv_heads, got {embed_dim}, {num_heads} and {kv_heads}"
        )


def _check_inputs(arrays: tuple[Tensor, Tensor, Tensor], sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Raises an error if query, key and value do not fit the weights, which have this dtype."""
    for name, a, size in zip(("query", "key", "value"), arrays, sizes):
        if not isinstance(a, Tensor):
            raise TypeError(f"Attention: {name} must be a tensor, got {type(a).__name__}")
        dense(a, f"Attention: {name}", "pad it and say key_padding_mask=")
        if a.ndim and a.shape[-1] != size:
            raise ValueError(f"Attention: {name} must have {size} features, got the shape {tuple(a.shape)}")
        if not a.is_floating_point() or (a.dtype != dtype and autocast_dtype(a) is None):
            raise TypeError(f"Attention: {name} must have the dtype of the weights, {dtype}, got {a.dtype}")
    if arrays[0].ndim not in (2, 3) or len({a.ndim for a in arrays}) > 1:
        shapes = [str(tuple(a.shape)) for a in arrays]
        raise ValueError(
            "Attention: query, key and value must all have two dimensions, or all three with a batch, got "
            f"{shapes[0]}, {shapes[1]} and {shapes[2]}"
        )


def _check_nested(arrays: tuple[Tensor, Tensor, Tensor], batch_first: bool, masks: tuple[Any, Any]) -> None:
    """Raises an error if some of query, key and value are nested tensors, and not all, or if what is beside them does not fit."""
    if not all(isinstance(a, Tensor) and a.is_nested and a.dim() == 3 for a in arrays):
        raise TypeError(
            "Attention: query, key and value must all be nested tensors [N, its own length, features], or none; pad them, and say "
            "key_padding_mask="
        )
    if not batch_first:
        raise ValueError("Attention: nested tensors have the batch first; make the module with batch_first=True")
    if any(mask is not None for mask in masks):
        raise ValueError(
            "Attention: nested tensors go with neither key_padding_mask nor attn_mask; pad them for a mask of your own"
        )


def _slopes_of(alibi: bool | Tensor | Sequence[float], heads: int) -> bool | nn.Parameter | tuple[float, ...]:
    """The slope of each head, as numbers, which a cast of the module does not round, or as a parameter; or True for those of ALiBi."""
    if isinstance(alibi, bool):
        return alibi
    values = alibi if isinstance(alibi, Tensor) else torch.tensor(alibi, dtype=torch.float64, device="cpu")
    if tuple(values.shape) != (heads,) or not values.is_floating_point():
        raise ValueError(
            f"Attention: alibi must be True, False or a real slope for each of the {heads} heads, got {values.dtype} "
            f"of the shape {tuple(values.shape)}"
        )
    return values if isinstance(values, nn.Parameter) else tuple(values.tolist())


def _masks_of(q: Tensor, k: Tensor, *torch_masks: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(boolean mask with True = keep, numbers to add) from attn_mask and key_padding_mask, where True hides. q and k are
    [..., heads, length, features]."""
    keep = added = None
    heads = q.shape[-3]
    shapes = ((q.shape[-2], k.shape[-2]), (*q.shape[:-3], k.shape[-2]))
    for name, mask, shape in zip(("attn_mask", "key_padding_mask"), torch_masks, shapes):
        if mask is None:
            continue
        if not isinstance(mask, Tensor):
            raise TypeError(f"Attention: {name} must be a tensor, got {type(mask).__name__}")
        if is_causal_bias(mask):
            mask = ~kept_by(mask, q.device)
        batches = q.shape[0] if q.ndim == 4 else 1
        each = (batches * heads, *shape) if name == "attn_mask" else shape
        if tuple(mask.shape) not in (shape, each):
            allowed = f"{shape} or {each}" if each != shape else f"{shape}"
            raise ValueError(f"Attention: {name} must have the shape {allowed}, got {tuple(mask.shape)}")
        if name == "key_padding_mask":
            mask = mask[..., None, None, :]
        elif mask.ndim == 3 and q.ndim == 4:
            mask = mask.unflatten(0, (-1, heads))
        if mask.dtype == torch.bool:
            keep = ~mask if keep is None else keep & ~mask
        elif mask.is_floating_point():
            added = mask if added is None else added + mask
        else:
            raise TypeError(f"Attention: {name} must be boolean or real, got {mask.dtype}")
    return keep, added


def _with_more_keys(
    k: Tensor, v: Tensor, biases: tuple[Tensor, Tensor] | None, zero: bool, *masks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Keys and values with those of add_bias_kv and add_zero_attn at the end, and masks that do not hide these."""
    one = (*k.shape[:-2], 1, k.shape[-1])
    more = []
    if biases is not None:
        more.append([b.view(k.shape[-3], 1, -1).to(k.dtype).expand(one) for b in biases])
    if zero:
        more.append([k.new_zeros(one)] * 2)
    k, v = (torch.cat([a, *(pair[n] for pair in more)], -2) for n, a in enumerate((k, v)))
    keep, added = (
        None if mask is None else nn.functional.pad(mask, (0, len(more)), value=shown)
        for mask, shown in zip(masks, (True, 0.0))
    )
    return k, v, keep, added
