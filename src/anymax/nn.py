"""torch modules, generic over maps: `Activation`, `Loss`, `Attention`, `MarginHead`; and the distribution `Categorical`.

A tensor in a mapping becomes a buffer of the module, an `nn.Parameter` a parameter of it: `Activation(Entmax(alpha=nn.Parameter(...)))`
learns alpha. `learn="alpha"` does so inside `bounds`, whatever the optimiser does.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from . import functional, losses, margins, transforms
from ._categorical import Categorical
from ._mapping import Mapping
from ._typing import Axes
from .attention import attention, is_causal_bias, kept_by, operands
from .attention.scores import transforms_of
from .mappings import Softmax as _Softmax

__all__ = ["Activation", "Attention", "Categorical", "Loss", "MarginHead"]


def __dir__() -> list[str]:
    return __all__


class _OfMapping(nn.Module):
    """A module that owns the tensors of a mapping."""

    prefix = ""  # of the tensors' names

    def __init__(self, mapping: Mapping, learn: str | None, bounds: tuple[float, float]) -> None:
        super().__init__()
        if not isinstance(mapping, Mapping):
            raise TypeError(f"expected a mapping such as anymax.Sparsemax(), got {mapping!r}")
        self._kind = type(mapping)
        self._fixed = mapping if learn is None and not mapping.params() else None
        self._constants = mapping.constants()
        self._tensors = tuple(mapping.params())
        self.learn, self.bounds = learn, bounds
        for name, value in mapping.params().items():
            if name == learn:
                continue
            if isinstance(value, nn.Parameter):
                self.register_parameter(self.prefix + name, value)
            else:
                self.register_buffer(self.prefix + name, torch.as_tensor(value))
        if learn is not None:
            self._make_learnable(mapping, learn, bounds)

    def _make_learnable(self, mapping: Mapping, learn: str, bounds: tuple[float, float]) -> None:
        low, high = bounds
        start = getattr(mapping, learn, None)
        if start is None or isinstance(start, (str, bool)):
            raise ValueError(f"learn={learn!r}: {mapping!r} has no number of that name")
        start = torch.as_tensor(start, dtype=torch.get_default_dtype()).detach()
        if not (low < high and bool(((start > low) & (start < high)).all())):
            raise ValueError(
                f"learn={learn!r}: the start must lie strictly inside bounds={bounds}, got {start.tolist()}"
            )
        self._constants.pop(learn, None)
        self._tensors = tuple(t for t in self._tensors if t != learn)
        self.register_parameter(f"raw_{learn}", nn.Parameter(torch.logit((start - low) / (high - low))))

    @property
    def mapping(self) -> Mapping:
        """The mapping with the module's current tensors."""
        if self._fixed is not None:
            return self._fixed
        values = {name: getattr(self, self.prefix + name) for name in self._tensors}
        if self.learn is not None:
            low, high = self.bounds
            values[self.learn] = low + (high - low) * torch.sigmoid(getattr(self, f"raw_{self.learn}"))
        return self._kind(**self._constants, **values)

    def extra_repr(self) -> str:
        words = [f"{k}={v!r}" for k, v in self._constants.items()] + [f"{k}=<tensor>" for k in self._tensors]
        if self.learn is not None:
            words.append(f"{self.learn} learned in {self.bounds}")
        return f"{self._kind.__name__}({', '.join(words)})"


class Activation(_OfMapping):
    """p(x) along `dim`.

    learn: the name of a parameter ("alpha") to learn inside `bounds` by a sigmoid; give the mapping a tensor, say of shape
    (heads, 1, 1), for one value a head.
    """

    def __init__(
        self, mapping: Mapping, dim: Axes = -1, *, learn: str | None = None, bounds: tuple[float, float] = (1.0, 2.0)
    ) -> None:
        super().__init__(mapping, learn, bounds)
        self.dim = dim

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return functional.apply(self.mapping, x, self.dim, mask=mask)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dim={self.dim}"


class Loss(_OfMapping):
    """The map's loss: Fenchel-Young where it has a potential, else `nll`. Options as in `nn.CrossEntropyLoss`.

    A Fenchel-Young loss is 0 where y = p(x): with label smoothing or a distribution as target it lies below the cross-entropy
    by a constant, the entropy of the target, and a class weight multiplies the whole loss of a sample.
    """

    weight: Tensor | None

    def __init__(
        self,
        mapping: Mapping,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        dim: Axes = None,
        learn: str | None = None,
        bounds: tuple[float, float] = (1.0, 2.0),
    ) -> None:
        super().__init__(mapping, learn, bounds)
        self.register_buffer("weight", weight)
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "reduction": reduction,
            "label_smoothing": label_smoothing,
            "axis": dim,
        }

    def forward(self, scores: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        mapping = self.mapping
        loss = losses.fenchel_young if mapping.facts.has_potential else losses.nll
        return loss(mapping, scores, target, self.weight, mask=mask, **self.options)


class Attention(_OfMapping):
    """Multi-head attention with any map: `nn.MultiheadAttention` with a `mapping`, and its weights load as they are.

    Masks are those of `nn.MultiheadAttention`, where True hides; alone `is_causal=True` hides later keys without a mask. The other
    options are those of `anymax.attention`: window, softcap, alibi (True), sink (True: one learned score a head) and transform,
    whose parameters (`scalable(beta=nn.Parameter(...))`) the module owns. kv_heads: fewer heads of keys and values than of queries.
    An alpha for each head has shape (heads, 1, 1). add_bias_kv, add_zero_attn: one more key and value for all, learned or zero, that no
    mask hides; a sink is the latter with a learned score and no column in the weights.
    """

    prefix = "map_"
    _qkv_same_embed_dim = (
        False  # so that torch's fused encoder layer, which knows softmax alone, leaves it to `forward`
    )
    in_proj_bias: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None
    sink: Tensor | None
    in_proj_weight: nn.Parameter
    q_proj_weight: nn.Parameter
    k_proj_weight: nn.Parameter
    v_proj_weight: nn.Parameter

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        mapping: Mapping | None = None,
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
        alibi: bool = False,
        sink: bool = False,
        transform: Any = None,
        learn: str | None = None,
        bounds: tuple[float, float] = (1.0, 2.0),
        implementation: str | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(_Softmax() if mapping is None else mapping, learn, bounds)
        shared = num_heads if kv_heads is None else kv_heads
        sizes = {
            "embed_dim": embed_dim,
            "num_heads": num_heads,
            "kv_heads": shared,
            "kdim": kdim or 1,
            "vdim": vdim or 1,
        }
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int):
                raise TypeError(f"Attention: {name} must be an integer, got {size!r}")
        if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0.0 <= dropout < 1.0:
            raise ValueError(f"Attention: dropout must be a number of at least 0 and below 1, got {dropout!r}")
        if (add_bias_kv or add_zero_attn) and (window is not None or alibi):
            raise ValueError(
                "Attention: the keys of add_bias_kv and add_zero_attn stand nowhere, so that they go with neither window nor alibi"
            )
        if num_heads < 1 or embed_dim % num_heads or shared < 1 or num_heads % shared:
            raise ValueError(
                f"Attention: embed_dim must be a multiple of num_heads and that of kv_heads, got {embed_dim}, {num_heads} and {shared}"
            )
        self.embed_dim, self.num_heads, self.kv_heads = embed_dim, num_heads, shared
        self.head_dim = embed_dim // num_heads
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        self.dropout, self.batch_first, self.implementation = dropout, batch_first, implementation
        self.add_zero_attn = add_zero_attn
        self.options: dict[str, Any] = {
            "window": window, "softcap": softcap, "alibi": True if alibi else None, "transform": transform,
        }  # fmt: skip
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        inner = shared * self.head_dim
        self._packed = self.kdim == self.vdim == embed_dim
        shapes = {
            "in_proj_weight": (embed_dim + 2 * inner, embed_dim), "q_proj_weight": (embed_dim, embed_dim),
            "k_proj_weight": (inner, self.kdim), "v_proj_weight": (inner, self.vdim),
        }  # fmt: skip
        for name, shape in shapes.items():  # the others are None, as torch's
            there = self._packed == (name == "in_proj_weight")
            self.register_parameter(name, nn.Parameter(torch.empty(shape, **made)) if there else None)
        self.register_parameter(
            "in_proj_bias", nn.Parameter(torch.empty(embed_dim + 2 * inner, **made)) if bias else None
        )
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **made)
        for name in ("bias_k", "bias_v"):
            self.register_parameter(name, nn.Parameter(torch.empty(1, 1, inner, **made)) if add_bias_kv else None)
        self.register_parameter("sink", nn.Parameter(torch.zeros(num_heads, **made)) if sink else None)
        for n, part in enumerate(transforms_of(transform) or ()):
            for name, value in part.params:
                if isinstance(value, nn.Parameter):
                    self.register_parameter(f"transform_{n}_{name}", value)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The start of `nn.MultiheadAttention`."""
        for weight in self._weights():
            nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        for extra in (self.bias_k, self.bias_v):
            if extra is not None:
                nn.init.xavier_normal_(extra)

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
        """As `nn.MultiheadAttention.forward`; `need_weights=False` spares the matrix of weights."""
        same = query is key is value
        is_causal = operands.flag("Attention", "is_causal", is_causal)
        dtype = self._weights()[0].dtype
        for name, a, size in (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)):
            if not isinstance(a, Tensor):
                raise TypeError(f"Attention: {name} must be a tensor, got {type(a).__name__}")
            operands.dense("Attention", name, a, "pad it and say key_padding_mask=")
            if a.ndim and a.shape[-1] != size:
                raise ValueError(f"Attention: {name} must have {size} features, got the shape {tuple(a.shape)}")
            if not a.is_floating_point() or (a.dtype != dtype and not _autocasts(a)):
                raise TypeError(f"Attention: {name} must have the dtype of the weights, {dtype}, got {a.dtype}")
        if query.ndim not in (2, 3) or key.ndim != query.ndim or value.ndim != query.ndim:
            raise ValueError(
                f"Attention: query, key and value must all have two dimensions, or all three with a batch, got {tuple(query.shape)}, "
                f"{tuple(key.shape)} and {tuple(value.shape)}"
            )
        if query.ndim == 3 and not self.batch_first:
            query, key, value = (a.transpose(0, 1) for a in (query, key, value))
        q, k, v = self._project(query, query if same else key, query if same else value)
        keep, added = self._masks(q, k, attn_mask, key_padding_mask)
        is_causal = is_causal and attn_mask is None
        if self.bias_k is not None or self.add_zero_attn:
            if is_causal:
                seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
                keep, is_causal = seen if keep is None else keep & seen, False
            k, v, keep, added = self._more_keys(k, v, keep, added)
        found = attention(
            q, k, v, self.mapping, mask=keep, bias=added, is_causal=is_causal,
            enable_gqa=self.kv_heads != self.num_heads, dropout_p=self.dropout if self.training else 0.0, sink=self.sink,
            need_weights=need_weights, implementation=self.implementation, **self.options,
        )  # fmt: skip
        out, weights = found if need_weights else (found, None)
        out = self.out_proj(out.transpose(-3, -2).flatten(-2))
        if query.ndim == 3 and not self.batch_first:
            out = out.transpose(0, 1)
        return out, weights.mean(-3) if weights is not None and average_attn_weights else weights

    def _more_keys(
        self, k: Tensor, v: Tensor, *masks: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Keys and values with those of add_bias_kv and add_zero_attn at the end, and masks that leave them open."""
        one = (*k.shape[:-2], 1, k.shape[-1])
        more = []
        if self.bias_k is not None and self.bias_v is not None:
            more.append([b.view(self.kv_heads, 1, -1).to(k.dtype).expand(one) for b in (self.bias_k, self.bias_v)])
        if self.add_zero_attn:
            more.append([k.new_zeros(one)] * 2)
        k, v = (torch.cat([a, *(pair[n] for pair in more)], -2) for n, a in enumerate((k, v)))
        keep, added = (
            None if mask is None else nn.functional.pad(mask, (0, len(more)), value=shown)
            for mask, shown in zip(masks, (True, 0.0))
        )
        return k, v, keep, added

    def _masks(self, q: Tensor, k: Tensor, *masks: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """(True = keep, added) from torch's masks, in which True hides."""
        keep = added = None
        shapes = ((q.shape[-2], k.shape[-2]), (*q.shape[:-3], k.shape[-2]))
        for name, mask, shape in zip(("attn_mask", "key_padding_mask"), masks, shapes):
            if mask is None:
                continue
            if not isinstance(mask, Tensor):
                raise TypeError(f"Attention: {name} must be a tensor, got {type(mask).__name__}")
            if is_causal_bias(mask):
                mask = ~kept_by(mask, q.device)
            batches = q.shape[0] if q.ndim == 4 else 1
            each = (batches * self.num_heads, *shape) if name == "attn_mask" else shape
            if tuple(mask.shape) not in (shape, each):
                allowed = f"{shape} or {each}" if each != shape else f"{shape}"
                raise ValueError(f"Attention: {name} must have the shape {allowed}, got {tuple(mask.shape)}")
            if name == "key_padding_mask":
                mask = mask[..., None, None, :]
            elif mask.ndim == 3 and q.ndim == 4:
                mask = mask.unflatten(0, (-1, self.num_heads))
            if mask.dtype == torch.bool:
                keep = ~mask if keep is None else keep & ~mask
            elif mask.is_floating_point():
                added = mask if added is None else added + mask
            else:
                raise TypeError(f"Attention: {name} must be boolean or real, got {mask.dtype}")
        return keep, added

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}, {super().extra_repr()}"


def _autocasts(a: Tensor) -> bool:
    return torch.amp.is_autocast_available(a.device.type) and torch.is_autocast_enabled(a.device.type)


class MarginHead(_OfMapping):
    """A classifier on the sphere: cosines of embeddings and class centres, a margin for the target, the map's loss.

    `forward(embeddings, target)` is the loss to train with; predict by the largest of `probabilities(embeddings)`. `scores(embeddings)`
    are the scaled cosines; their order is that of the probabilities for monotone maps only (not for Taylor and x^2).
    """

    prefix = "map_"  # the head has a scale and a weight of its own

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        mapping: Mapping | None = None,
        margin: Any = 0.35,
        scale: float = 30.0,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__(_Softmax() if mapping is None else mapping, None, (1.0, 2.0))
        self.margin = margins.as_margin(margin)
        self.scale = scale
        self.options = {"ignore_index": ignore_index, "reduction": reduction}
        self.weight = nn.Parameter(torch.empty(num_classes, in_features))
        nn.init.normal_(self.weight, std=1.0 / math.sqrt(in_features))

    def cosines(self, embeddings: Tensor) -> Tensor:
        return transforms.cosine(self.weight)(embeddings)

    def scores(self, embeddings: Tensor) -> Tensor:
        return self.scale * self.cosines(embeddings)

    def probabilities(self, embeddings: Tensor) -> Tensor:
        return functional.apply(self.mapping, self.scores(embeddings))

    def forward(self, embeddings: Tensor, target: Tensor) -> Tensor:
        cosines = self.cosines(embeddings)
        return losses.margin_loss(
            self.mapping, cosines, target, margin=self.margin, scale=self.scale, axis=-1, **self.options
        )

    def extra_repr(self) -> str:
        classes, features = self.weight.shape
        return f"{features} -> {classes}, {super().extra_repr()}, {self.margin}, scale={self.scale}"
