"""The GPU engine: row kernels in Triton for torch tensors on CUDA and ROCm. Triton is imported with the first such tensor, never before.

One kernel a family, the link a compile-time name: `separable` (sparsemax, entmax, budget, normmax), `truncated` (top-k, top-p), `dense`
(softmax, sigsoftmax, Taylor), `perturb`; and `backward`. fp32 inside; fp32, bf16 and fp16 outside; any strides, masks without a copy.
Under TRITON_INTERPRET=1 `anymax.use("triton")` serves tensors on the CPU as well, slowly, for tests.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import sys
from typing import Any

from ..._array import Array, is_jax, is_torch
from ..._core.mapping import Mapping
from .. import native
from ..choice import asked
from ..link import SPARSE, Link
from ..link import link_of as known_link

name = "triton"

_OPS = ("forward", "log_forward", "vjp", "log_vjp", "index_loss", "threshold")
_DTYPES = ("float32", "bfloat16", "float16")
_NOISES = ("normal", "logistic")
_WITHOUT_LOSS = ("taylor", "sigsoftmax", "perturb_max")
_WITH_LOG = ("softmax", "topk", "topp", "sigsoftmax")
_TAIL = 1e-9  # the mass that the quadrature of perturb max leaves out at either end


@functools.lru_cache(maxsize=1)
def load() -> Any:
    """The module that launches the kernels, or the sentence that says why there is none."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton), so plain operations of torch serve on this device"
    try:
        return importlib.import_module(f"{__name__}.launch")
    except Exception as error:  # whatever a half-installed triton raises
        return f"triton can't be loaded ({type(error).__name__}: {error})".splitlines()[0]


def _interpreted() -> bool:
    """True where the interpreter of Triton is to serve the CPU, for tests: it was asked for by both names."""
    if asked() != name:
        return False
    launch = load()
    return not isinstance(launch, str) and launch.triton.knobs.runtime.interpret


def link_of(mapping: Mapping) -> Link | str:
    """The mapping in the kernels' words, or the sentence that says why it has none."""
    link = known_link(mapping)
    if isinstance(link, str):
        return link
    if link.kind == "relu":
        return f"it has no kernel for {mapping.name}"
    if link.kind == "perturb_max":
        noise = str(getattr(mapping, "noise", ""))
        if noise == "gumbel" and link.param == 1.0:
            return link._replace(kind="softmax", param=0.0)
        if noise not in _NOISES:
            return f"it has no kernel for the noise {noise!r} at scale {link.param:g}; it knows {', '.join(_NOISES)}"
    if link.kind == "entmax" and link.params is None and link.param == 1.0:
        return link._replace(kind="softmax")
    if link.kind == "normmax" and link.params is not None:
        return "it takes one alpha of normmax for all rows"
    if link.kind == "topk" and link.params is not None:
        return "it takes one k for all rows"
    if link.kind == "taylor" and link.param > 16:
        return f"it goes to order 16, not {link.param:g}"
    return link


def refuse(op: str, mapping: Mapping, x: Any) -> str | None:
    if not is_torch(x):
        if is_jax(x):
            return "it serves torch; on a GPU, JAX compiles the formula itself"
        return f"it serves torch tensors on a GPU, these scores are of {type(x).__module__.split('.')[0]}"
    if x.device.type != "cuda" and not (x.device.type == "cpu" and _interpreted()):
        return f"it serves tensors on a GPU (CUDA, ROCm), these are on {x.device}"
    if op not in _OPS:
        return f"it has {', '.join(_OPS)}, not {op}"
    link = link_of(mapping)
    if isinstance(link, str):
        return link
    if op in ("log_forward", "log_vjp") and link.kind not in _WITH_LOG:
        return f"it takes log p of {link.kind} from p"
    if op == "log_vjp" and link.kind == "sigsoftmax":
        return "it has no backward of log p for sigsoftmax"
    if op in ("index_loss", "threshold") and link.kind in _WITHOUT_LOSS:
        return f"{link.kind} has no such operation in one pass"
    if op == "threshold" and link.kind == "entmax" and link.params is not None:
        return "it gives thresholds of entmax for one alpha only"
    reason = native.refuse_tensor(x, x.device.type, _DTYPES)
    if reason is None and link.params is not None and is_torch(link.params):
        reason = native.refuse_tensor(link.params, link.params.device.type, ("float64", "int64", "int32", *_DTYPES))
    if reason is not None:
        return reason
    launch = load()
    return launch if isinstance(launch, str) else None


def output_layer(*operands: Array | None) -> Any:
    """The module that has the kernels of output layers; None where they don't serve these features, weight and bias."""
    given = [a for a in operands if a is not None]
    kind = given[0].device.type
    if asked() not in (None, name) or (kind != "cuda" and not (kind == "cpu" and _interpreted())):
        return None
    if isinstance(load(), str) or any(native.refuse_tensor(a, kind, _DTYPES) is not None for a in given):
        return None
    return importlib.import_module(f"{__name__}.layer")


def _prepared(mapping: Mapping) -> tuple[Any, Link]:
    launch, link = load(), link_of(mapping)
    assert not isinstance(launch, str), launch
    assert not isinstance(link, str), link
    return launch, link


def forward(mapping: Mapping, x: Array, mask: Array | None = None, out: Array | None = None) -> Array:
    """p(x); `mask` (boolean, broadcast to x) leaves classes out, `out` takes the result: x itself, or memory that is not read."""
    launch, link = _prepared(mapping)
    p = sys.modules["torch"].empty_like(x) if out is None else out
    if x.numel():
        if link.kind == "perturb_max":
            launch.perturb(link, *_quadrature(mapping, x), x, None, p, mask)
        else:
            launch.run("p", link, x, mask=mask, out=p)
    return p


def _quadrature(mapping: Mapping, x: Array) -> tuple[str, tuple[float, ...], int]:
    """(noise, ends, nodes) of perturb max on rows like x."""
    noise, nodes = str(getattr(mapping, "noise", "")), getattr(mapping, "nodes", None) or 32
    return noise, _ends(noise, x.shape[-1]), nodes


@functools.lru_cache(maxsize=256)
def _ends(noise: str, n: int) -> tuple[float, ...]:
    """The levels where a class alone, and n equal ones, have G = _TAIL; the same for 1 - _TAIL; each with -log G."""
    import numpy as np

    from ..._random.noises import find

    law = find(noise)
    deep, shallow = -math.log(_TAIL), -math.log1p(-_TAIL)
    at = np.asarray([deep, deep / n, shallow, shallow / n])
    low1, low_n, up1, up_n = (float(v) for v in law.level(at, np))
    return low1, low_n, deep, up1, up_n, shallow


def forward_saving(mapping: Mapping, x: Array, mask: Array | None = None) -> tuple[Array, Any]:
    """p(x), and for a sparse map of long rows the lanes that have the support: the backward reads p and g there alone."""
    launch, link = _prepared(mapping)
    if not x.numel() or link.kind not in SPARSE:
        return forward(mapping, x, mask), None
    p = sys.modules["torch"].empty_like(x)
    return p, launch.run("p", link, x, mask=mask, out=p, keep_lanes=True)


def log_forward(mapping: Mapping, x: Array) -> Array:
    launch, link = _prepared(mapping)
    out = sys.modules["torch"].empty_like(x)
    if x.numel():
        launch.run("log", link, x, out=out)
    return out


def vjp(mapping: Mapping, x: Array, p: Array, g: Array, saved: Any = None) -> Array:
    """J^T g."""
    return _backward(mapping, False, x, p, g, saved)


def log_vjp(mapping: Mapping, x: Array, log_p: Array, g: Array) -> Array:
    """The same for log p: `g - p sum g` on the classes that have a probability."""
    return _backward(mapping, True, x, log_p, g)


def _backward(mapping: Mapping, logs: bool, x: Array, p: Array, g: Array, saved: Any = None) -> Array:
    launch, link = _prepared(mapping)
    out = sys.modules["torch"].empty_like(p)
    if p.numel():
        if link.kind == "perturb_max":
            launch.perturb(link, *_quadrature(mapping, x), x, g, out, None)
        else:
            launch.backward(link, logs, x, p, g, out, saved)
    return out


def index_loss(mapping: Mapping, x: Array, index: Array, save: bool) -> tuple[Array, None, Array | None]:
    """The loss of each row for a class index (below 0: 0), fp32; with the four numbers a row that `index_loss_grad` writes it from."""
    both, state = _losses(mapping, x, index.clamp(min=-1), -1, save)
    return both[0], None, state


def reduced_loss(
    mapping: Mapping, x: Array, index: Array, ignore: int, reduction: str, save: bool
) -> tuple[Array, Array | None, Array | None]:
    """(loss, number of samples of a mean, numbers of the rows): samples of the index `ignore` are left out, an index that is no class
    makes it NaN. In few launches: the kernel, one sum, and what a mean wants."""
    both, state = _losses(mapping, x, index, ignore, save)
    if reduction == "none":
        return both[0], None, state
    sums = both.flatten(1).sum(1)
    if reduction == "sum":
        return sums[0], None, state
    count = sums[1].clamp(min=1.0)
    return sums[0] / count, count, state


def _losses(mapping: Mapping, x: Array, index: Array, ignore: int, save: bool) -> tuple[Array, Array | None]:
    """[2, ...]: the loss of each row, and 1 where it counts; and the numbers of the rows."""
    launch, link = _prepared(mapping)
    torch = sys.modules["torch"]
    both = torch.empty((2, *x.shape[:-1]), dtype=torch.float32, device=x.device)
    state = torch.empty((*x.shape[:-1], 4), dtype=torch.float32, device=x.device) if save else None
    if both.numel():
        launch.run("loss", link, x, index=index, value=both, state=state, ignore=ignore)
    return both, state


def index_loss_grad(
    mapping: Mapping, x: Array, index: Array, scale: Array, saved: Any, state: Array | None, ignore: int = -1
) -> Array:
    """`scale (p - y)`, scale one a row or one for all: one read, one write, no search."""
    launch, link = _prepared(mapping)
    torch = sys.modules["torch"]
    out = torch.empty_like(x)
    assert state is not None
    if x.numel():
        scale = scale.to(torch.float32)
        scale = scale.expand(x.shape[:-1]) if scale.ndim else scale
        launch.run("grad", link, x, out=out, index=index, scale=scale, state=state, ignore=ignore)
    return out


def threshold(mapping: Mapping, x: Array) -> Array:
    """tau of each row, [..., 1], fp32; NaN for a poisoned one."""
    launch, link = _prepared(mapping)
    return _number(launch, "tau", link, x)


def logsumexp(x: Array) -> Array:
    """The threshold of softmax, but +inf for a row with +inf."""
    launch = load()
    assert not isinstance(launch, str), launch
    return _number(launch, "logsumexp", Link("softmax", 0, 0.0, None, 0, 0), x)


def _number(launch: Any, mode: str, link: Link, x: Array) -> Array:
    torch = sys.modules["torch"]
    out = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    if out.numel():
        launch.run(mode, link, x, value=out)
    return out


def warm_up(mapping: Mapping, shape: tuple[int, ...], dtype: Any, device: Any) -> None:
    """Makes each call that this mapping has on contiguous scores of this shape once, with and without a mask."""
    torch = sys.modules["torch"]
    x = torch.zeros(shape, dtype=dtype, device=device)
    link = _prepared(mapping)[1]
    with torch.no_grad():
        for mask in (None, torch.ones(shape[-1], dtype=torch.bool, device=device)):
            forward(mapping, x, mask)
            same = x.clone()
            forward(mapping, same, mask, same)
            p, saved = forward_saving(mapping, x, mask)
        vjp(mapping, x, p, x, saved)
        vjp(mapping, x, p, x)
        if link.kind in _WITH_LOG:
            log_p = log_forward(mapping, x)
            if link.kind != "sigsoftmax":
                log_vjp(mapping, x, log_p, x)
        if link.kind == "softmax":
            logsumexp(x)
        if link.kind not in _WITHOUT_LOSS:
            index = torch.zeros(shape[:-1], dtype=torch.int64, device=device)
            for save in (False, True):
                value, _, state = reduced_loss(mapping, x, index, -100, "mean", save)
            for scale in (value, value.expand(shape[:-1])):
                index_loss_grad(mapping, x, index, scale, None, state, -100)
            if not (link.kind == "entmax" and link.params is not None):
                threshold(mapping, x)
