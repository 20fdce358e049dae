"""Top-k and top-p of a batch in the place of vLLM's own functions, and the draw after them: one selection a row, without a sort."""

from __future__ import annotations

from typing import Any

import array_api_compat.torch as xp
import numpy as np
import torch
from torch import Tensor

from .._random.draws import uniforms
from ..kernels import decode, engine_of
from ..kernels.tasks import DECODE
from ..mappings import Softmax
from ..sampling import samplers
from ..sampling.results import validated
from ..transforms import compose, topk, topp

_SOFTMAX = Softmax()
_BLOCK = 2**20  # classes that are copied at a time, few enough for a cache
_LEAST = 2.0**-100  # a mass so small that the largest score alone holds it


def apply_top_k_top_p(logits: Tensor, k: Tensor | None, p: Tensor | None, has_topp_only_rows: bool = True) -> Tensor:
    """Mask all logits but the k largest, then all but the nucleus of mass p, with one k and one p for each row.

    It has the signature of vLLM's function of this name, and `install` puts it into its place on a CPU. Unlike that function, it does not
    sort the row.

    Parameters
    ----------
    logits
        [rows, classes], of any floating dtype. They may be changed in place, as by vLLM.
    k
        Integers [rows]: how many of the largest to keep. Below 1, or with as many classes or more, a row keeps all. None: no row has one.
    p
        Numbers [rows]: the softmax mass to keep. From 1 on a row keeps all; at 0 and below it keeps the largest score. None: no row has
        one.
    has_topp_only_rows
        vLLM's hint for its kernels, without an effect here.

    Returns
    -------
    Tensor
        The logits, -inf where they are masked. Of equal scores at the edge the first stay; a row with NaN or +inf is left as it is.

    Examples
    --------
    >>> import torch
    >>> logits = torch.log(torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]))
    >>> apply_top_k_top_p(logits, torch.tensor([2, 3]), torch.tensor([1.0, 0.4])) > -torch.inf
    tensor([[ True,  True, False],
            [ True, False, False]])
    """
    steps = _steps(logits, k, p)
    if not steps or not logits.numel():
        return logits
    engine = None if logits.requires_grad else engine_of(DECODE, _SOFTMAX, logits)
    if engine is None:
        return compose(*_transforms(steps, logits.device))(logits)
    logits = logits.detach()
    if logits.dtype in (torch.float32, torch.float64) and logits.is_contiguous():
        return engine.decode(_SOFTMAX, logits, steps, in_place=True).left
    size = max(_BLOCK // logits.shape[-1], 1)
    for begin in range(0, logits.shape[0], size):
        rows = slice(begin, begin + size)
        part = logits[rows]
        own = part.to(torch.promote_types(part.dtype, torch.float32), memory_format=torch.contiguous_format, copy=True)
        own = engine.decode(
            _SOFTMAX, own, tuple(s._replace(value=_of(s.value, rows)) for s in steps), in_place=True
        ).left
        part.copy_(own)
    return logits


def _of(value: np.ndarray, rows: slice) -> np.ndarray:
    return value if len(value) == 1 else value[rows]


def sample(
    logits: Tensor, k: Tensor | None = None, p: Tensor | None = None, generators: dict[int, torch.Generator] | None = None
) -> Tensor:  # fmt: skip
    """Draw a class of each row after top-k and top-p, in one pass that writes neither probabilities nor noise.

    Parameters
    ----------
    logits
        [rows, classes]; they are not changed.
    k, p
        As for `apply_top_k_top_p`.
    generators
        The generators of rows that have their own, by row, as in vLLM: a seeded request gets the same tokens in every batch. Other rows
        use torch's global generator. Each draw takes one number from its generator.

    Returns
    -------
    Tensor
        int64 [rows]. A row from which nothing can be drawn, since all its scores are masked or one is NaN or +inf, gets the class that
        torch's argmax names: the token goes into an embedding at once.

    Examples
    --------
    >>> import torch
    >>> logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]] * 2))
    >>> seeded = {1: torch.Generator().manual_seed(0)}
    >>> sample(logits, torch.tensor([1, 3]), None, seeded)
    tensor([0, 2])
    """
    steps = _steps(logits, k, p)
    source = None
    if generators:
        source = [generators.get(row) for row in range(logits.shape[0])]
    engine = engine_of(DECODE, _SOFTMAX, logits)
    if engine is not None:
        index = engine.decode(_SOFTMAX, logits, steps, u=uniforms(logits, 1, source, xp)).index[..., 0]
    else:
        transform = compose(*_transforms(steps, logits.device))
        index = samplers.sample(_SOFTMAX, logits.detach(), transform=transform, generator=source)
    if bool((index < 0).any()):
        return validated("sample", index[:, None], logits, "argmax", xp)[..., 0]
    return index


def _steps(logits: Tensor, k: Tensor | None, p: Tensor | None) -> tuple[decode.Step, ...]:
    """The truncations with one value a row; a row without one has a value that keeps all."""
    n, steps = logits.shape[-1], []
    if k is not None:
        values = _read("k", k, logits)
        steps.append(decode.Step("topk", np.where(values < 1, n, np.minimum(values, n))[:, None]))
    if p is not None:
        mass = _read("p", p, logits)
        steps.append(decode.Step("topp", np.where(mass < 1.0, np.maximum(mass, _LEAST), 1.0)[:, None]))
    return tuple(steps)


def _read(name: str, value: Tensor, logits: Tensor) -> np.ndarray:
    if value.ndim != 1 or logits.ndim != 2 or value.shape[0] not in (1, logits.shape[0]):
        raise ValueError(
            f"apply_top_k_top_p: {name} must have one value for each row of logits [rows, classes], got {tuple(value.shape)} for logits of "
            f"{tuple(logits.shape)}"
        )
    return value.detach().cpu().double().numpy()


def _transforms(steps: tuple[decode.Step, ...], device: Any) -> list[Any]:
    """The same steps as transforms, for what no engine takes."""
    out = []
    for step in steps:
        value = torch.from_numpy(step.value).to(device)
        out.append(topk(value.long()) if step.name == "topk" else topp(value))
    return out
