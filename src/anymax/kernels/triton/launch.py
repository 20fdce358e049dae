"""From torch tensors to kernels: strides, parameters, plans. Nothing here waits for the device."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

import torch
import triton

from .._rows import merged
from ..native import Link
from .backward import backward_rows
from .dense import dense_rows
from .perturb import perturb_rows
from .plans import few_lanes, plan
from .separable import separable_rows
from .truncated import truncated_rows

Tensor = torch.Tensor

POWERS = {1.25: 4, 4 / 3: 3, 1.5: 2, 2.0: 1}  # alpha -> r = 1 / (alpha - 1)
_AXES = 3  # strides that a kernel takes for the rows


class _Rows:
    """Operands of one shape as the kernels see them: row axes as few as possible, the classes last."""

    def __init__(self, x: Tensor, **operands: Tensor) -> None:
        self.n = x.shape[-1]
        batch = tuple(x.shape[:-1])
        self.count = math.prod(batch)
        self.held = {"x": x, **operands}
        axes = self._merge(batch)
        if len(axes) > _AXES:  # no more than three strides: rows one after another
            for key, a in self.held.items():
                if len(merged(batch, [a.stride()[:-1]])) > 1 and key != "out":
                    self.held[key] = a.contiguous()
            axes = self._merge(batch)
        inner = max(0, len(axes) - 1)
        axes = axes + [(1, (0,) * len(self.held))] * (_AXES - len(axes))
        self.sizes = (axes[1][0], axes[2][0])
        self.strides = {
            key: (*(steps[i] for _, steps in axes), a.stride(-1)) for i, (key, a) in enumerate(self.held.items())
        }
        self.far = any((self.n - 1) * abs(s[-1]) >= 2**31 for s in self.strides.values())
        self.sideways = any(s[-1] != 1 and s[inner] == 1 for s in self.strides.values()) and self.n > 1

    def _merge(self, batch: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
        return merged(batch, [a.stride()[:-1] for a in self.held.values()])


@functools.lru_cache(maxsize=1)
def _wave() -> int:
    return 64 if torch.version.hip else 32


def _device(x: Tensor) -> contextlib.AbstractContextManager:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _per_row(value: Any, x: Tensor) -> Tensor:
    """One number a row, fp64."""
    value = torch.as_tensor(value, device=x.device).detach().to(torch.float64)
    return value.expand(*x.shape[:-1], 1).reshape(-1).contiguous()


def _launch(
    kernel: str, function: Any, x: Tensor, rows: _Rows, one_row: bool, args: tuple, options: dict[str, Any]
) -> None:
    p = plan(kernel, rows.count, rows.n, one_row, rows.sideways, _wave())
    options = {**options, "FAR": rows.far, "R": p.R, "K": p.K, "L": p.L}
    if kernel != "perturb":
        options["WHOLE"] = p.whole
    if kernel in ("separable", "truncated"):
        few, depth = few_lanes(p, rows.n) if not (one_row or options["MODE"] == "grad") else (0, 1)
        lists = torch.empty(rows.count * few, dtype=torch.int32, device=x.device) if few else x
        args = (*args[:8], lists, *args[8:])
        options |= {"FEW": few, "DEPTH": depth}
    with _device(x):
        function[(triton.cdiv(rows.count, p.R),)](*args, num_warps=p.warps, **options)


def _budget_or_alpha(link: Link) -> tuple[str, int, float, bool, float]:
    """(LINK, P, SLOPE, NORM, param) of a threshold map."""
    if link.kind == "sparsemax":
        return "power", 1, 1.0, False, 1.0
    if link.kind == "budget":
        return "budget", 1, 1.0, False, link.param
    if link.kind == "normmax":
        return ("any" if link.param <= 2.0 else "edge"), 1, 1.0, True, link.param - 1.0
    if link.params is None:
        r = next((r for alpha, r in POWERS.items() if abs(link.param - alpha) < 1e-15), None)
        if r is not None:
            return "power", r, 1.0 / r, False, link.param - 1.0
        if link.param > 2.0:
            return "steep", 1, 1.0, False, link.param - 1.0
    return "any", 1, 1.0, False, link.param - 1.0


def run(
    mode: str,
    link: Link,
    x: Tensor,
    *,
    mask: Tensor | None = None,
    out: Tensor | None = None,
    index: Tensor | None = None,
    scale: Tensor | None = None,
    value: Tensor | None = None,
    state: Tensor | None = None,
) -> None:
    """One call of a forward or a loss kernel: mode "p", "log", "loss", "grad" or "tau"."""
    operands = {}
    if mask is not None:
        operands["mask"] = mask.expand(x.shape).view(torch.uint8)
    if out is not None:
        operands["out"] = out
    rows = _Rows(x, **operands)
    x = rows.held["x"]
    keep, result = rows.held.get("mask", x), rows.held.get("out", x)
    shape = (rows.count, rows.n, *rows.sizes)
    steps = (
        *rows.strides["x"],
        *rows.strides.get("mask", rows.strides["x"]),
        *rows.strides.get("out", rows.strides["x"]),
    )
    other = (
        x if index is None else index.contiguous(),
        x if scale is None else scale.contiguous(),
        x if value is None else value,
        x if state is None else state,
    )
    common = {"MODE": mode, "MASKED": mask is not None, "SAVE": state is not None}
    if link.kind in ("softmax", "sigsoftmax", "taylor"):
        order = int(link.param) if link.kind == "taylor" else 0
        args = (x, keep, result, *other, *shape, *steps)
        return _launch("dense", dense_rows, x, rows, False, args, {**common, "LINK": link.kind, "ORDER": order})
    per_row = link.params is not None
    params = x
    if per_row:
        params = _per_row(link.params, x)
        if link.kind == "entmax":
            params = params - 1.0
    if link.kind in ("topk", "topp"):
        args = (x, keep, result, params, *other, *shape, *steps, float(link.param))
        by = "count" if link.kind == "topk" else "exp"
        return _launch("truncated", truncated_rows, x, rows, False, args, {**common, "BY": by, "PER_ROW": per_row})
    name, r, slope, norm, param = _budget_or_alpha(link)
    args = (x, keep, result, params, *other, *shape, *steps, float(param))
    options = {**common, "LINK": name, "P": r, "SLOPE": slope, "NORM": norm, "PER_ROW": per_row}
    return _launch("separable", separable_rows, x, rows, per_row and name == "any", args, options)


def backward(link: Link, logs: bool, x: Tensor, p: Tensor, g: Tensor, out: Tensor) -> None:
    """J^T g, of log p where `logs`."""
    kind, order, param = link.kind, 0, 1.0
    if logs:
        sense = "log"
    elif kind in ("softmax", "topk", "topp"):
        sense = "own"
    elif kind == "taylor":
        sense, order = "taylor", int(link.param)
    elif kind in ("sigsoftmax", "budget"):
        sense = kind
    elif kind == "sparsemax":
        sense = "one"
    elif kind == "normmax":
        sense, param = "norm", link.param - 1.0
    else:
        param = link.param - 1.0
        sense = {1.0: "own", 1.5: "root", 2.0: "one"}.get(link.param, "any") if link.params is None else "any"
    per_row = sense == "any" and link.params is not None
    rows = _Rows(p, g=g, out=out, **({"scores": x} if sense in ("taylor", "sigsoftmax") else {}))
    p, g = rows.held["x"], rows.held["g"]
    scores = rows.held.get("scores", p)
    params = _per_row(link.params, p) - 1.0 if per_row else p
    steps = (
        *rows.strides.get("scores", rows.strides["x"]),
        *rows.strides["x"],
        *rows.strides["g"],
        *rows.strides["out"],
    )
    args = (scores, p, g, rows.held["out"], params, rows.count, rows.n, *rows.sizes, *steps, float(param))
    steep = sense == "any" and (per_row or param > 1.0)
    options = {"SENSE": sense, "ORDER": order, "STEEP": steep, "PER_ROW": per_row}
    _launch("backward", backward_rows, p, rows, False, args, options)


def perturb(
    link: Link,
    noise: str,
    ends: tuple[float, ...],
    nodes: int,
    x: Tensor,
    g: Tensor | None,
    out: Tensor,
    mask: Tensor | None,
) -> None:
    """p, or J^T g where g is given. `ends`: see `perturb_rows`."""
    operands = {"out": out}
    if g is not None:
        operands["g"] = g
    if mask is not None:
        operands["mask"] = mask.expand(x.shape).view(torch.uint8)
    rows = _Rows(x, **operands)
    x = rows.held["x"]
    other = {key: (rows.held.get(key, x), rows.strides.get(key, rows.strides["x"])) for key in ("mask", "g", "out")}
    args = (
        x, *(other[key][0] for key in ("mask", "g", "out")), rows.count, rows.n, nodes, *rows.sizes, *rows.strides["x"],
        *(s for key in ("mask", "g", "out") for s in other[key][1]), float(link.param), *ends,
    )  # fmt: skip
    options = {"BACK": g is not None, "NOISE": noise, "MASKED": mask is not None, "Q": 1 << (nodes - 1).bit_length()}
    _launch("perturb", perturb_rows, x, rows, False, args, options)
