"""From a caller's words to a link of the kernels: the name of a map and its number. And which tensors the kernels take."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from ._kernels.link import KINDS, MAPS, NOISES, Link, out_of_range
from ._kernels.triton import limits

Tensor = torch.Tensor

NODES = 32  # of the quadrature of "perturb_max"
INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1: tests without a GPU
MOST_KEPT = 1024
_kept: dict[Any, Words] = {}  # what was asked for before
NAMES = limits.MAPS


class Words(NamedTuple):
    """A link as the schemas of operations take it."""

    kind: str
    param: float
    params: Tensor | None
    noise: int
    nodes: int


def words_of(who: str, op: str, name: str, noise: str | None = None, **given: Any) -> Words:
    """The link of `name`, with the number that it takes among `given`, for an operation that it has."""
    values = given.values()
    if torch.compiler.is_compiling() or any(isinstance(value, Tensor) for value in values):
        return _words(who, op, name, noise, given)
    key = op, name, noise, *given, *values
    words = _kept.get(key)
    if words is None:
        if len(_kept) >= MOST_KEPT:
            _kept.clear()
        _kept[key] = words = _words(who, op, name, noise, given)
    return words


def _words(who: str, op: str, name: str, noise: str | None, given: dict[str, Any]) -> Words:
    known = [n for n in NAMES if limits.refuse(op, Link(n, MAPS[n], 0.0, None, 0, 0)) is None]
    if name not in known:
        raise ValueError(f"{who}: map is one of {', '.join(known)}, not {name!r}")
    wanted = KINDS[name].parameter
    stray = [key for key, value in given.items() if value is not None and key != wanted]
    if noise is not None and name != "perturb_max":
        stray.append("noise")
    if stray:
        raise TypeError(f"{who}: {name} takes {wanted or 'no number'}, not {', '.join(stray)}")
    value = given.get(wanted) if wanted else 0.0
    if name == "perturb_max":
        noise, value = noise or "normal", 1.0 if value is None else value
        if noise not in limits.NOISES:
            raise ValueError(f"{who}: noise is one of {', '.join(limits.NOISES)}, not {noise!r}")
    if value is None:
        raise TypeError(f"{who}: {name} needs {wanted}=")
    code, steps = (NOISES[noise], NODES) if name == "perturb_max" else (0, 0)
    if isinstance(value, Tensor):
        if value.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{who}: {wanted} gets no gradient here; detach it, or use the package anymax (PyPI)")
        words = Words(name, 0.0, value, code, steps)
    else:
        if reason := out_of_range(name, value) or _odd(name, value):
            raise ValueError(f"{who}: {reason}")
        words = Words(name, float(value), None, code, steps)
    if name == "entmax" and words.params is None and words.param == 1.0:
        return Words("softmax", 0.0, None, 0, 0)
    link = limits.taken(link_of(words), name)
    if reason := link if isinstance(link, str) else limits.refuse(op, link):
        raise ValueError(f"{who}: {reason}")
    return words


def _odd(name: str, value: float) -> str | None:
    """Why a map can't have this number, which is in its range; None if it can."""
    if name == "topk" and value != int(value):
        return f"k of topk is an integer, not {value:g}"
    if name == "taylor" and value % 2:
        return f"order of taylor is even, since only the even polynomials are positive everywhere, not {value:g}"
    if name == "normmax" and value == 1:
        return "alpha of normmax is above 1"
    return None


def check_classes(who: str, words: Words, n: int) -> None:
    if words.kind == "budget" and words.params is None and words.param > n:
        raise ValueError(f"{who}: a budget of {words.param:g} can't be spent on {n} classes")


def link_of(words: Words) -> Link:
    return Link(words.kind, MAPS[words.kind], words.param, words.params, words.noise, words.nodes)


def check(who: str, *tensors: Tensor | None, dtypes: tuple[str, ...] = limits.DTYPES) -> None:
    """Raises unless the kernels take these tensors, the first of which says the device."""
    first = tensors[0]
    assert first is not None
    for a in tensors:
        if a is None:
            continue
        if a.device != first.device:
            raise ValueError(f"{who}: the tensors are on {first.device} and {a.device}; move them to one device")
        if not a.is_cuda and not (a.device.type == "cpu" and INTERPRETED):
            raise ValueError(f"{who}: these are kernels for GPUs (CUDA, ROCm), and the tensors are on {a.device}")
        if str(a.dtype)[6:] not in dtypes:
            raise TypeError(f"{who}: the kernels take {', '.join(dtypes)}, not {a.dtype}")
