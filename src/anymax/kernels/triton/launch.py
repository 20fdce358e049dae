"""Launches the kernels on torch tensors: strides, parameters, plans. Nothing here waits for the device."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any, NamedTuple

import torch
import triton

from .._rows import disjoint, merged
from ..link import Link
from .backward import backward_parts, backward_rows
from .dense import dense_parts, dense_rows
from .perturb import perturb_rows
from .plans import SOLVING, few_lanes, loosened, packed, plan, shallow, span
from .separable import separable_rows
from .tile import survey_parts
from .truncated import truncated_rows

Tensor = torch.Tensor

POWERS = {1.25: 4, 4 / 3: 3, 1.5: 2, 2.0: 1}  # alpha -> r = 1 / (alpha - 1)
_AXES = 3  # the row strides that a kernel takes


class _Rows:
    """Operands of one shape as the kernels take them: as few row axes as possible, the classes last. n and the row strides are in units,
    so that the compiler knows a divisor of them."""

    def __init__(self, x: Tensor, **operands: Tensor) -> None:
        n = x.shape[-1]
        batch = tuple(x.shape[:-1])
        self.count = self.all = math.prod(batch)
        self.held = {"x": x, **operands}
        self.back: Tensor | None = None  # the output, where a kernel writes to a contiguous copy
        axes = self._merge(batch)
        if len(axes) > _AXES:  # more strides than a kernel takes: contiguous copies
            for key, a in self.held.items():
                if len(merged(batch, [a.stride()[:-1]])) > 1:
                    if key == "out":
                        self.back = a
                        self.held[key] = torch.empty_like(a, memory_format=torch.contiguous_format)
                    else:
                        self.held[key] = a.contiguous()
            axes = self._merge(batch)
        inner = max(0, len(axes) - 1)
        axes = axes + [(1, (0,) * len(self.held))] * (_AXES - len(axes))
        self.sizes = (axes[1][0], axes[2][0])
        steps = [step for _, steps in axes for step in steps]
        self.unit = math.gcd(n, *steps, 16)
        pack = 16 // x.element_size()
        self.shift = self._shift(axes, pack) if self.unit % pack else 0
        self.n, self.classes = n // self.unit, n
        self.columns = n + (pack - 1 if self.shift else 0)
        self.strides = {
            key: (*(steps[i] // self.unit for _, steps in axes), a.stride(-1))
            for i, (key, a) in enumerate(self.held.items())
        }
        self.bounds = (x, x)  # placeholders: only segments have bounds
        self.far = any((n - 1) * abs(s[-1]) >= 2**31 for s in self.strides.values())
        self.sideways = n > 1 and any(
            a.stride(-1) != 1 and axes[inner][1][i] == 1 for i, a in enumerate(self.held.values())
        )

    def _merge(self, batch: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
        return merged(batch, [a.stride()[:-1] for a in self.held.values()])

    def _shift(self, axes: list[tuple[int, tuple[int, ...]]], pack: int) -> int:
        """Whether unaligned rows are read in aligned packs of 16 bytes: 0 no, 1 yes, 2 yes except for the last row, since the memory may
        end within its last pack."""
        n, size, open_ = self.held["x"].shape[-1], self.held["x"].element_size(), False
        if not packed(n, pack):
            return 0
        first = None
        for i, (key, a) in enumerate(self.held.items()):
            if key == "mask":  # it is read without packs
                continue
            steps = [step[i] for _, step in axes]
            places = [step % pack for step in steps]
            first = first or places
            if places != first or a.stride(-1) != 1 or a.element_size() != size or a.data_ptr() % 16:
                return 0
            last = a.storage_offset() + n + sum((count - 1) * step for (count, _), step in zip(axes, steps))
            if -(-last // pack) * 16 > a.untyped_storage().nbytes():
                if any(count > 1 and step < pack for (count, _), step in zip(axes, steps)):
                    return 0
                open_ = True
        return 2 if open_ else 1

    def finish(self) -> None:
        if self.back is not None:
            self.back.copy_(self.held["out"])


class Cut(NamedTuple):
    """Segments of about the same length; the entries of all segments lie one after another."""

    ptr: Tensor  # int64 [all segments + 1], the bounds
    ids: Tensor  # int32, the indices of these segments
    longest: int


class _Segments:
    """`_Rows` for operands [entries, heads]: a row is one head of a segment, which begins anywhere. Otherwise the kernels see `all` rows,
    with the heads of a segment side by side, and compute `count` of them."""

    back = None

    def __init__(self, cut: Cut, x: Tensor, **operands: Tensor) -> None:
        heads = x.shape[1]
        self.count, self.all = cut.ids.shape[0] * heads, (cut.ptr.shape[0] - 1) * heads
        self.held = {"x": x, **operands}
        self.sizes, self.unit, self.shift, self.bounds = (1, heads), 1, 0, (cut.ptr, cut.ids)
        # a power of two, so that few kernels are compiled
        self.n = self.classes = self.columns = triton.next_power_of_2(max(cut.longest, 1))
        self.strides = {key: (0, 0, a.stride(1), a.stride(0)) for key, a in self.held.items()}
        self.far = any(self.n * abs(s[-1]) >= 2**31 for s in self.strides.values())
        self.sideways = False  # the heads of a segment are in one program or in the next ones, so the cache has them

    def finish(self) -> None:
        pass


@functools.lru_cache(maxsize=1)
def _wave() -> int:
    return 64 if torch.version.hip else 32


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


_numbers: dict[Any, Tensor] = {}  # parameters from the host, copied to the device, by device and contents
_captured: dict[Any, Tensor] = {}  # those that a captured graph reads, which are never freed


def _capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _per_row(value: Any, x: Tensor, less: float = 0.0, cut: Cut | None = None) -> Tensor:
    """value - less, computed in fp64, as one fp32 number per row; for segments (`cut`) value is [segments, heads]."""
    if isinstance(value, torch.Tensor) and value.device == x.device:
        value = (value.detach().to(torch.float64) - less).to(torch.float32)
    else:  # copies are cached: a copy waits for the device, and a graph can't capture it
        host = torch.as_tensor(value).detach().to(torch.float64) - less
        if host.numel() == 1:
            value = torch.full((1,), float(host), dtype=torch.float32, device=x.device)
        else:
            key = (x.device, tuple(host.shape), host.numpy().tobytes())
            if key not in _numbers:
                if len(_numbers) >= 64:
                    _numbers.clear()
                _numbers[key] = _captured[key] if key in _captured else host.to(torch.float32).to(x.device)
            value = _numbers[key]
            if _capturing(x):
                _captured[key] = value
    value = value.expand(*x.shape[:-1], 1) if cut is None else value
    return value.reshape(-1).contiguous()


class Saved(NamedTuple):
    """The live lanes of each row, for the backward of a sparse map: a list of up to `few`, and how many there are."""

    memory: Tensor  # int32: [rows, few] lanes, then [rows] counts
    few: int
    depth: int
    span: int
    lanes: int
    shifted: bool  # lanes count columns, not classes


class _Call:
    """A kernel's call on rows, with its plan."""

    def __init__(
        self, kernel: str, x: Tensor, rows: _Rows | _Segments, *, one_row: bool = False, cut: bool = False
    ) -> None:
        self.x, self.rows = x, rows
        self.plan = p = plan(
            kernel, rows.count, rows.columns, one_row, rows.sideways, _wave(), cut and not one_row, x.element_size()
        )
        if isinstance(rows, _Segments):
            self.plan = p = loosened(p)
        elif rows.shift:
            self.plan = p = shallow(p)
        self.shape: tuple[int, ...] = (rows.all, rows.n, span(p, rows.columns))
        self.parts = p.parts
        self.tile = {"FAR": rows.far, "UNIT": rows.unit, "SHIFT": rows.shift, "R": p.R, "K": p.K, "L": p.L}

    def __call__(
        self, function: Any, pointers: tuple, numbers: tuple, options: dict[str, Any], parts: int = 1, warps: int = 0
    ) -> None:
        grid = (triton.cdiv(self.rows.count, self.plan.R), parts)
        with on_device_of(self.x):
            function[grid](*pointers, *self.shape, *numbers, num_warps=warps or self.plan.warps, **options)


def budget_or_alpha(link: Link) -> tuple[str, int, float, bool, float]:
    """(LINK, P, SLOPE, NORM, param) of a threshold map."""
    if link.kind == "sparsemax":
        return "power", 1, 1.0, False, 1.0
    if link.kind == "budget":
        return "budget", 1, 1.0, False, link.param
    if link.kind == "normmax":
        if link.param == 2.0:
            return "power", 2, 1.0, True, 1.0
        return ("any" if link.param < 2.0 else "edge"), 1, 1.0, True, link.param - 1.0
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
    ignore: int = -1,
    keep_lanes: bool = False,
    cut: Cut | None = None,
) -> Saved | None:
    """Runs a forward or a loss kernel: mode "p", "log", "loss", "grad", "tau" or "logsumexp". Returns the live lanes for `keep_lanes`.

    `scale`: one number, or one per row; rows whose index is `ignore` are left out. `cut`: the rows are segments of x [entries, heads].
    `out` may be x itself, but must not overlap x otherwise.
    """
    operands = {}
    if mask is not None:
        operands["mask"] = mask.expand(x.shape).view(torch.uint8)
    if out is not None:
        operands["out"] = out
    rows = _Rows(x, **operands) if cut is None else _Segments(cut, x, **operands)
    x = rows.held["x"]
    keep, result = rows.held.get("mask", x), rows.held.get("out", x)
    strides = (*rows.strides["x"], *rows.strides.get("mask", rows.strides["x"]))
    steps = (*rows.sizes, *strides, *rows.strides.get("out", rows.strides["x"]), ignore)
    other = (
        x if index is None else index.contiguous(),
        x if scale is None else scale.contiguous(),
        x if value is None else value,
        x if state is None else state,
    )
    each = scale is not None and scale.ndim > 0
    common = {
        "MODE": mode, "MASKED": mask is not None, "SAVE": state is not None, "EACH": each, "RAGGED": cut is not None
    }  # fmt: skip
    first = {"MASKED": mask is not None, "FAR": rows.far, "UNIT": rows.unit, "SHIFT": rows.shift}
    writes = mode in ("p", "log", "grad")
    if link.kind in ("softmax", "sigsoftmax", "taylor"):
        order = int(link.param) if link.kind == "taylor" else 0
        call = _Call("dense", x, rows, cut=cut is None and (mode == "grad" or link.kind != "taylor"))
        parts, sums = 0 if mode == "grad" else call.parts, x
        if parts:
            sums = torch.empty(rows.count * parts * 2, dtype=torch.float64, device=x.device)
            split = {"LINK": link.kind, **first, "PARTS": parts, "K": call.plan.K, "L": call.plan.L}
            call(dense_parts, (x, keep, sums), (*rows.sizes, *strides), split, parts)
        options = {**common, "LINK": link.kind, "ORDER": order, "PARTS": parts, **call.tile, "WHOLE": call.plan.whole}
        pointers, numbers = (x, keep, result, *other, sums, *rows.bounds), (*steps, rows.count)
        call(dense_rows, pointers, numbers, options, call.parts or 1 if writes else 1)
        rows.finish()
        return None
    per_row = link.params is not None
    params = x
    if per_row:
        params = _per_row(link.params, x, 1.0 if link.kind == "entmax" else 0.0, cut)
    kernel: Any
    if link.kind in ("topk", "topp"):
        family, kernel, param = "truncated" if link.kind == "topk" else "nucleus", truncated_rows, link.param
        kind = {"BY": "count" if link.kind == "topk" else "exp", "LOGS": mode == "log"}
        one_row, shared = False, link.kind == "topk"
    else:
        name, r, slope, norm, param = budget_or_alpha(link)
        exact = mode not in ("p", "grad") or x.dtype == torch.float32
        family = "logarithmic" if name != "power" else "separable"
        if family == "separable" and r > 1 and mode == "p" and not (exact or keep_lanes):
            family = "halves"
        kernel = separable_rows
        kind = {"LINK": name, "P": r, "SLOPE": slope, "NORM": norm, "EXACT": exact}
        one_row, shared = per_row and name == "any", True
    call = _Call(family, x, rows, one_row=one_row, cut=cut is None and (shared or mode == "grad"))
    parts = 0 if mode == "grad" else call.parts
    few, depth = few_lanes(call.plan, rows.columns) if not (one_row or mode == "grad") else (0, 1)
    saved = None
    lists = counts = tops = x
    late = few > 0 and out is not None and not disjoint(x, result)  # zeros go to x only after its scores are read
    if few:
        lists = torch.empty(rows.count * (few + 1), dtype=torch.int32, device=x.device)
        counts = lists[rows.count * few :]
        if keep_lanes:
            saved = Saved(lists, few, depth, call.shape[2], call.plan.L, rows.shift > 0)
    options = {
        **common, **kind, "PER_ROW": per_row, "FEW": few, "DEPTH": depth, "LATE": late, "KEEP": saved is not None,
        "PARTS": parts, **call.tile, "WHOLE": call.plan.whole,
    }  # fmt: skip
    numbers = (*steps, float(param), rows.count)
    if not parts:
        call(
            kernel,
            (x, keep, result, params, *other, lists, counts, tops, *rows.bounds),
            numbers,
            options,
            call.parts or 1,
        )
    else:  # one program a row solves it; then one program a part writes the rows with many live lanes
        tops = torch.empty(rows.count * parts * call.plan.L, dtype=torch.float32, device=x.device)
        fill = None if late or not (few and writes) else -math.inf if mode == "log" else 0.0
        split = {"FILL": fill, **first, "PARTS": parts, "K": call.plan.K, "L": call.plan.L, "WIDE": call.plan.wide(x)}
        call(survey_parts, (x, keep, result, tops), steps[:-1], split, parts)
        if writes:
            other = (*other[:3], torch.empty(rows.count * 4, dtype=torch.float32, device=x.device))
            options["SAVE"] = True
        pointers = (x, keep, result, params, *other, lists, counts, tops, *rows.bounds)
        call(kernel, pointers, numbers, options, warps=SOLVING)
        if writes:
            call(kernel, pointers, numbers, {**options, "MODE": "write", "KEEP": False, "SAVE": False}, parts)
    rows.finish()
    return saved


_OF_PARTS = ("SENSE", "FAR", "UNIT", "SHIFT", "FEW", "PARTS", "K", "L")  # options of `backward_parts`


def backward(
    link: Link, logs: bool, x: Tensor | None, p: Tensor, g: Tensor, out: Tensor, saved: Saved | None = None,
    cut: Cut | None = None,
) -> None:  # fmt: skip
    """J^T g of p, or of log p with `logs`; `cut` as in `run`. `out` must not overlap the other tensors."""
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
    operands = {"g": g, "out": out}
    if sense in ("taylor", "sigsoftmax"):
        assert x is not None
        operands["scores"] = x
    rows = _Rows(p, **operands) if cut is None else _Segments(cut, p, **operands)
    p, g = rows.held["x"], rows.held["g"]
    scores = rows.held.get("scores", p)
    params = _per_row(link.params, p, 1.0, cut) if per_row else p
    steps = (
        *rows.strides.get("scores", rows.strides["x"]),
        *rows.strides["x"],
        *rows.strides["g"],
        *rows.strides["out"],
    )
    steep = sense == "any" and (per_row or param > 1.0)
    sums = sense not in ("norm", "taylor") and not steep  # writing a row needs only its two sums
    call = _Call("backward", p, rows, cut=cut is None and sums)
    lists = counts = p
    few, depth, lanes, spread = 0, 1, 1, call.shape[2]
    if saved is not None and saved.shifted == (rows.shift > 0) and not (steep or call.plan.whole) and call.plan.R == 1:
        few, depth, spread, lanes = saved[1:5]
        lists, counts = saved.memory, saved.memory[rows.count * few :]
    options = {
        "SENSE": sense,
        "ORDER": order,
        "STEEP": steep,
        "PER_ROW": per_row,
        "FEW": few,
        "DEPTH": depth,
        "LANES": lanes,
        "PARTS": call.parts,
        "RAGGED": cut is not None,
    }
    parted = p
    if call.parts:
        parted = torch.empty(rows.count * call.parts * 2, dtype=torch.float64, device=p.device)
        both = (*rows.strides["x"], *rows.strides["g"])
        split = {key: value for key, value in {**options, **call.tile}.items() if key in _OF_PARTS}
        call(backward_parts, (p, g, parted, counts), (*rows.sizes, *both, float(param)), split, call.parts)
    call(
        backward_rows, (scores, p, g, rows.held["out"], params, lists, counts, parted, *rows.bounds),
        (spread, *rows.sizes, *steps, float(param), rows.count),
        {**options, **call.tile, "WHOLE": call.plan.whole}, call.parts or 1,
    )  # fmt: skip
    rows.finish()


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
    """p of perturb max, or J^T g if g is given. `ends`: see `perturb_rows`."""
    operands = {"out": out}
    if g is not None:
        operands["g"] = g
    if mask is not None:
        operands["mask"] = mask.expand(x.shape).view(torch.uint8)
    rows = _Rows(x, **operands)
    x = rows.held["x"]
    other = {key: (rows.held.get(key, x), rows.strides.get(key, rows.strides["x"])) for key in ("mask", "g", "out")}
    pointers = (x, *(other[key][0] for key in ("mask", "g", "out")))
    numbers = (
        nodes, *rows.sizes, *rows.strides["x"], *(s for key in ("mask", "g", "out") for s in other[key][1]),
        float(link.param), *ends,
    )  # fmt: skip
    options = {"BACK": g is not None, "NOISE": noise, "MASKED": mask is not None, "Q": 1 << (nodes - 1).bit_length()}
    call = _Call("perturb", x, rows)
    call.shape = call.shape[:2]
    del call.tile["SHIFT"]
    call(perturb_rows, pointers, numbers, {**options, **call.tile})
    rows.finish()
