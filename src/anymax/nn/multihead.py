"""The arguments of `nn.Attention`: checks of query, key and value, torch's masks, and added keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .._array import dense
from .._attention import is_causal_bias, kept_by


def check(arrays: tuple[Tensor, Tensor, Tensor], sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Raises an error if query, key and value do not fit the weights, which have this dtype."""
    for name, a, size in zip(("query", "key", "value"), arrays, sizes):
        if not isinstance(a, Tensor):
            raise TypeError(f"Attention: {name} must be a tensor, got {type(a).__name__}")
        dense(a, f"Attention: {name}", "pad it and say key_padding_mask=")
        if a.ndim and a.shape[-1] != size:
            raise ValueError(f"Attention: {name} must have {size} features, got the shape {tuple(a.shape)}")
        if not a.is_floating_point() or (a.dtype != dtype and not _autocasts(a)):
            raise TypeError(f"Attention: {name} must have the dtype of the weights, {dtype}, got {a.dtype}")
    if arrays[0].ndim not in (2, 3) or len({a.ndim for a in arrays}) > 1:
        shapes = [str(tuple(a.shape)) for a in arrays]
        raise ValueError(
            "Attention: query, key and value must all have two dimensions, or all three with a batch, got "
            f"{shapes[0]}, {shapes[1]} and {shapes[2]}"
        )


def _autocasts(a: Tensor) -> bool:
    return torch.amp.is_autocast_available(a.device.type) and torch.is_autocast_enabled(a.device.type)


def slopes(alibi: bool | Tensor | Sequence[float], heads: int) -> bool | nn.Parameter | tuple[float, ...]:
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


def masks(q: Tensor, k: Tensor, *torch_masks: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
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


def more_keys(
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
