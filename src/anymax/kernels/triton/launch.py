"""Launches the row kernels on torch tensors: which kernel, its options, its plan. Nothing here waits for the device."""

from __future__ import annotations

import functools
import math
import statistics
from typing import Any, NamedTuple

import torch
import triton

from .._rows import disjoint
from ..link import SPARSE, Link, noise_of
from . import plans, replay
from .backward import backward_parts, backward_rows
from .dense import dense_parts, dense_rows
from .links import Form
from .operands import Cut, Laid, RaggedRows, lay_out, on_device_of, per_row
from .perturb import perturb_rows
from .plans import LISTED, SOLVING, few_lanes, loosened, plan, shallow, span, unpaired
from .separable import separable_rows
from .slope import slope_rows
from .survey import (
    survey_parts,
)
from .tile import (
    Few,
    Tile,
)
from .truncated import truncated_rows, weigh_parts

Tensor = torch.Tensor

POWERS = {1.25: 4, 4 / 3: 3, 1.5: 2, 2.0: 1}  # alpha -> r = 1 / (alpha - 1)
_TAIL = 1e-9  # the mass that the quadrature of perturb max leaves out at either end
_wave = 64 if torch.version.hip else 32


class Lanes(NamedTuple):
    """The live lanes of each row, for the backward of a sparse map: a list of up to `few`, and how many there are.

    `memory` is int32: from `first` on the lists [rows, few], then the counts [rows]. A loss has its `state` before, fp32 [rows, 4]."""

    memory: Tensor
    few: Few
    span: int
    shifted: bool  # lanes count columns, not classes
    first: int = 0

    @property
    def state(self) -> Tensor:
        return self.memory[: self.first].view(torch.float32)

    def listed(self, call: _Call, count: int) -> tuple[Tensor, Tensor, Few, int] | None:
        """(lists, counts, few, span) for a call on `count` rows; None if it takes rows whole, or has other columns."""
        if call.plan.whole or call.plan.R > 1 or self.shifted != (call.rows.shift > 0):
            return None
        lists = self.memory[self.first :]
        return lists, lists[count * self.few.FEW :], self.few, self.span


class _Call:
    """A kernel's call on rows, with its plan; `parts`: how many programs share a row, or 0."""

    def __init__(self, kernel: str, rows: Laid, *, one_row: bool = False, parted: bool = False) -> None:
        self.x, self.rows = rows.held["x"], rows
        size, parted = self.x.element_size(), parted and not one_row
        p = plan(kernel, rows.count, rows.columns, one_row, rows.sideways, _wave, parted, size)
        p = unpaired(p) if "mask" in rows.held else p
        self.plan = p = loosened(p) if isinstance(rows, RaggedRows) else shallow(p) if rows.shift else p
        self.parts, self.span = p.parts, span(p, rows.columns)
        ragged = isinstance(rows, RaggedRows)
        self.tile = Tile(False, rows.long_offsets, rows.shift, rows.unit, ragged, p.R, p.K, p.L, p.whole)
        self.masked = self.tile._replace(MASKED="mask" in rows.held)  # of the scores

    def __call__(
        self, function: Any, pointers: tuple, numbers: tuple, options: dict[str, Any], parts: int = 1, warps: int = 0
    ) -> None:
        shape = (self.rows.all, self.rows.n, self.span)
        with on_device_of(self.x, *pointers):
            options = {**options, "num_warps": warps or self.plan.warps}
            replay.launch(function, self.grid(parts), (*pointers, *shape, *numbers), options)

    def grid(self, parts: int = 1) -> tuple[int, int]:
        return triton.cdiv(self.rows.count, self.plan.R), parts

    def empty(self, numbers: int, dtype: torch.dtype) -> Tensor:
        """Memory for so many numbers of each row."""
        return replay.empty(self.rows.count * numbers, dtype, self.x.device)


def form_of(link: Link, exact: bool) -> tuple[Form, float]:
    """The form of a threshold map, and alpha - 1 or the budget."""
    each = link.params is not None
    if link.kind == "sparsemax":
        return Form("power", EXACT=exact), 1.0
    if link.kind == "budget":
        return Form("budget", EXACT=exact, PER_ROW=each), link.param
    param = link.param - 1.0
    if link.kind == "normmax":
        name = "power" if param == 1.0 else "any" if param < 1.0 else "edge"
        return Form(name, 2 if param == 1.0 else 1, NORM=True), param
    if each:
        return Form("any", EXACT=exact, PER_ROW=True, ABOVE=Form("steep", EXACT=exact)), param
    r = next((r for alpha, r in POWERS.items() if abs(link.param - alpha) < 1e-15), None)
    if r is not None:
        return Form("power", r, 1.0 / r, EXACT=exact), param
    return Form("steep" if param > 1.0 else "any", EXACT=exact), param


def apart(link: Link, x: Tensor, cut: Cut | None, needed: bool) -> tuple[Link, Tensor | None]:
    """(the link, without the parameters of its rows; these as the kernels take them)."""
    less = 1.0 if link.kind in ("entmax", "normmax") else 0.0
    return link._replace(params=True), per_row(link.params, x, less, cut) if needed else None


# -- forward passes and losses --------------------------------------------------------------------------------------------------


class _Forward:
    """A forward pass or a loss, as the kernels of all families take it."""

    def __init__(
        self, mode: str, link: Link, rows: Laid, cut: Cut | None, targets: dict[str, Tensor | None], ignore: int
    ) -> None:
        self.mode, self.link, self.rows, self.cut = mode, link, rows, cut
        self.writes = mode in ("p", "log", "grad")
        self.x = x = rows.held["x"]
        self.tensors = tuple(map(rows.tensor, ("x", "mask", "out")))
        self.targets = tuple(x if a is None else a for a in targets.values())  # index, scale, value, state
        self.read = rows.steps("x", "mask")
        self.steps = (*rows.sizes, *self.read, *rows.steps("out"))
        self.numbers = (*self.steps, ignore)
        scale = targets["scale"]
        each = scale is not None and scale.ndim > 0
        self.options = {"MODE": mode, "SAVE": targets["state"] is not None, "EACH": each}


def run(
    mode: str, link: Link, x: Tensor, *, mask: Tensor | None = None, out: Tensor | None = None, index: Tensor | None = None,
    scale: Tensor | None = None, value: Tensor | None = None, state: Tensor | Lanes | None = None, ignore: int = -1,
    keep_lanes: bool = False, cut: Cut | None = None,
) -> Lanes | None:  # fmt: skip
    """Runs a forward or a loss kernel: mode "p", "log", "loss", "grad", "tau" or "logsumexp". Returns the live lanes for `keep_lanes`;
    those of a loss have the state too, and are the state of its "grad".

    `scale`: one number, or one per row; rows whose index is `ignore` are left out. `cut`: the rows are segments of x [entries, heads].
    `out` may be x itself, but must not overlap x otherwise.
    """
    if cut is None and not x.numel():
        return None
    link, each = (link, None) if link.params is None else apart(link, x, cut, True)
    call = functools.partial(_run, mode, link, each, x, mask, out, index, scale, value, state, ignore, keep_lanes, cut)
    lanes, held = (state._replace(memory=None), state.memory) if isinstance(state, Lanes) else (None, state)
    key = mode, link, ignore, keep_lanes, lanes, cut and cut.padded
    given = (x, mask, out, index, scale, value, held, each, *(cut[:2] if cut else ()))
    return call() if plans.forced else replay.repeated(key, given, call)


def _run(
    mode: str, link: Link, each: Tensor | None, x: Tensor, mask: Tensor | None, out: Tensor | None, index: Tensor | None,
    scale: Tensor | None, value: Tensor | None, state: Tensor | Lanes | None, ignore: int, keep_lanes: bool, cut: Cut | None,
) -> Lanes | None:  # fmt: skip
    if link.kind == "perturb_max":
        return _perturb(link, each, x, None, None, out, mask)
    index, scale = (None if a is None else a.contiguous() for a in (index, scale))
    known, state = (state, state.state) if isinstance(state, Lanes) else (None, state)
    targets = {"index": index, "scale": scale, "value": value, "state": state}
    job = _Forward(mode, link, lay_out(cut, x, mask=mask, out=out), cut, targets, ignore)
    saved = _dense(job) if link.kind in ("softmax", "sigsoftmax", "taylor") else _solve(job, each, keep_lanes, known)
    job.rows.finish()
    return saved


def _dense(job: _Forward) -> None:
    rows, x, kind = job.rows, job.x, job.link.kind
    order = int(job.link.param) if kind == "taylor" else 0
    call = _Call("dense", rows, parted=job.cut is None and (job.mode == "grad" or kind != "taylor"))
    parts, sums = 0 if job.mode == "grad" else call.parts, x
    if parts:
        sums = call.empty(parts * 2, torch.float64)
        split = {"LINK": kind, "PARTS": parts, "TILE": call.masked}
        call(dense_parts, (*job.tensors[:2], sums), (*rows.sizes, *job.read), split, parts)
    options = {**job.options, "LINK": kind, "ORDER": order, "PARTS": parts, "TILE": call.masked}
    pointers = (*job.tensors, *job.targets, sums, *rows.bounds)
    call(dense_rows, pointers, (*job.numbers, rows.count), options, call.parts or 1 if job.writes else 1)


class _Solver(NamedTuple):
    """How the rows of a map with a threshold are solved."""

    family: str  # of plans
    kernel: Any
    options: dict[str, Any]
    param: float
    one_row: bool = False  # True if a program takes one row


def _solver(job: _Forward, keep_lanes: bool) -> _Solver:
    link, mode = job.link, job.mode
    if link.kind in ("topk", "topp"):
        by, family = ("count", "truncated") if link.kind == "topk" else ("exp", "nucleus")
        options = {"BY": by, "LOGS": mode == "log", "PER_ROW": link.params is not None}
        return _Solver(family, truncated_rows, options, link.param)
    exact = mode not in ("p", "grad") or job.x.dtype == torch.float32
    form, param = form_of(link, exact)
    short = form.P > 1 and mode == "p" and not (exact or keep_lanes)
    family = "logarithmic" if form.LINK != "power" else "halves" if short else "separable"
    return _Solver(family, separable_rows, {"FORM": form}, param, form.ABOVE is not None)


def _solve(job: _Forward, each: Tensor | None, keep_lanes: bool, known: Lanes | None) -> Lanes | None:
    """One program a row; or, for long rows, one program that solves it and then one for each part that writes its many live lanes.
    `known`: the lanes that a loss kept, for its gradient."""
    solver, rows, link, mode = _solver(job, keep_lanes), job.rows, job.link, job.mode
    x, _, result = job.tensors
    params = x if each is None else each
    over = "out" in rows.held and not disjoint(x, result)
    # the parts of a row, each with a program, would be written while others are read
    parted = job.cut is None and not (over and mode == "grad")
    call = _Call(solver.family, rows, one_row=solver.one_row, parted=parted)
    parts = 0 if mode == "grad" else call.parts
    targets, saved, lists, counts, few, list_span = job.targets, None, x, x, Few(), call.span
    truncated, weigh = solver.kernel is truncated_rows, link.kind == "topp"
    if mode == "grad":
        if known is not None and (found := known.listed(call, rows.count)) is not None:
            lists, counts, few, list_span = found
        few = few._replace(LATE=over)
    else:
        most, depth = (0, 1) if solver.one_row else few_lanes(call.plan, rows.columns)
        few = Few(most, depth, call.plan.L, parts, min(LISTED, most * depth) if truncated else 0)
        # zeros go to x only after its scores are read; and to a row that may keep most of them, only where it does not
        late = most > 0 and ((weigh and not parts) or over)
        if most:
            stated = 4 if keep_lanes and mode == "loss" else 0
            first, memory = stated * rows.count, call.empty(stated + most + 1, torch.int32)
            made = Lanes(memory, few._replace(PARTS=0), list_span, rows.shift > 0, first)
            lists, counts = memory[first:], memory[first + rows.count * most :]
            saved = made if keep_lanes else None
            if first:
                targets = (*targets[:3], made.state)
        few = few._replace(KEEP=saved is not None, LATE=late)
    options = {**job.options, **solver.options, "FEW": few, "TILE": call.masked}
    numbers = (list_span, *job.numbers, float(solver.param), rows.count)
    between = (call.empty(few.MOST, torch.int32) if few.MOST and mode != "grad" else x,) if truncated else ()
    if not parts:
        pointers = (*job.tensors, params, *targets, lists, counts, *between, x, *rows.bounds)
        call(solver.kernel, pointers, numbers, options, call.parts or 1)
        return saved
    tops = call.empty(parts * (call.plan.L + 8), torch.float32)
    fill = None if few.LATE or not (few.FEW and job.writes) else -math.inf if mode == "log" else 0.0
    wide = call.plan.wide(x)
    tile = call.masked._replace(K=call.plan.K * call.plan.L // wide, L=wide)
    split = {"FILL": fill, "PARTS": parts, "LANES": call.plan.L, "WEIGH": weigh, "TILE": tile}
    call(survey_parts, (*job.tensors, tops), job.steps, split, parts)
    if weigh:
        split = {"PER_ROW": each is not None, "PARTS": parts, "TILE": call.masked}
        laid = (*rows.sizes, *job.read, float(solver.param))
        call(weigh_parts, (*job.tensors[:2], params, tops), laid, split, parts)
    if job.writes:
        targets, options["SAVE"] = (*targets[:3], call.empty(4, torch.float32)), True
    pointers = (*job.tensors, params, *targets, lists, counts, *between, tops, *rows.bounds)
    call(solver.kernel, pointers, numbers, options, warps=SOLVING)
    if job.writes:
        options |= {"MODE": "write", "FEW": few._replace(KEEP=False), "SAVE": False}
        call(solver.kernel, pointers, numbers, options, parts)
    return saved


# -- backward passes --------------------------------------------------------------------------------------------------------------


def _sense(link: Link, logs: bool) -> tuple[str, float]:
    """(SENSE, param) of the backward kernels."""
    if logs:
        return "log", 1.0
    if link.kind in ("softmax", "topk", "topp"):
        return "own", 1.0
    if link.kind in ("taylor", "sigsoftmax", "budget"):
        return link.kind, 1.0
    if link.kind == "sparsemax":
        return "one", 1.0
    if link.kind == "normmax":
        return "norm", link.param - 1.0
    known = {1.0: "own", 1.5: "root", 2.0: "one"} if link.params is None else {}
    return known.get(link.param, "any"), link.param - 1.0


def backward(
    link: Link, logs: bool, x: Tensor | None, p: Tensor, g: Tensor, out: Tensor, saved: Lanes | None = None,
    cut: Cut | None = None,
) -> None:  # fmt: skip
    """J^T g of p, or of log p with `logs`; `cut` as in `run`. `out` must not overlap the other tensors."""
    if cut is None and not p.numel():
        return
    link, each = (link, None) if link.params is None else apart(link, p, cut, link.kind in ("entmax", "perturb_max"))
    call = functools.partial(_backward, link, each, logs, x, p, g, out, saved, cut)
    lanes, held = (None, None) if saved is None else (saved._replace(memory=None), saved.memory)
    if plans.forced:
        call()
    else:
        given = (p, g, out, x, held, each, *(cut[:2] if cut else ()))
        replay.repeated((link, logs, lanes, cut and cut.padded), given, call)


def _backward(
    link: Link, own: Tensor | None, logs: bool, x: Tensor | None, p: Tensor, g: Tensor, out: Tensor, saved: Lanes | None, cut: Cut | None,
) -> None:  # fmt: skip
    if link.kind == "perturb_max":
        _perturb(link, own, x, p, g, out, None)
        return
    sense, param = _sense(link, logs)
    each = sense == "any" and own is not None
    rows = lay_out(cut, p, g=g, out=out, scores=x if sense in ("taylor", "sigsoftmax") else None)
    p, g = rows.held["x"], rows.held["g"]
    params = own if each else p
    steep = sense in ("any", "norm") and (each or param > 1.0)
    sums = sense not in ("norm", "taylor") and not steep  # writing a row needs only its two sums
    call = _Call("backward", rows, parted=cut is None and sums)
    lists = counts = parted = p
    few, spread = Few(), call.span
    if saved is not None and (sense == "norm" or not steep) and (found := saved.listed(call, rows.count)) is not None:
        lists, counts, few, spread = found
    few = few._replace(PARTS=call.parts, KEEP=False, LATE=False)
    if call.parts:
        parted = call.empty(call.parts * 2, torch.float64)
        split = {"SENSE": sense, "FEW": few, "TILE": call.tile}
        numbers = (*rows.sizes, *rows.steps("x", "g"), float(param))
        call(backward_parts, (p, g, parted, counts), numbers, split, call.parts)
    order = int(link.param) if sense == "taylor" else 0
    options = {"SENSE": sense, "ORDER": order, "STEEP": steep, "PER_ROW": each, "FEW": few, "TILE": call.tile}
    pointers = (rows.tensor("scores"), p, g, rows.held["out"], params, lists, counts, parted, *rows.bounds)
    numbers = (spread, *rows.sizes, *rows.steps("scores", "x", "g", "out"), float(param), rows.count)
    call(backward_rows, pointers, numbers, options, call.parts or 1)
    rows.finish()


def slope(link: Link, p: Tensor, g: Tensor, out: Tensor) -> None:
    """<g, dp/dparam> of each row, written to `out` [rows], contiguous fp32: of entmax, normmax and budget."""
    if not p.numel():
        out.zero_()
        return
    link, own = (link, None) if link.params is None else apart(link, p, None, link.kind != "budget")
    call = functools.partial(_slope, link, own, p, g, out)
    if plans.forced:
        call()
    else:
        replay.repeated(("slope", link), (p, g, out, own), call)


def _slope(link: Link, own: Tensor | None, p: Tensor, g: Tensor, out: Tensor) -> None:
    each, c = own is not None and link.kind != "budget", 0.0 if link.kind == "budget" else link.param - 1.0
    rows = lay_out(None, p, g=g)
    p, g = rows.held["x"], rows.held["g"]
    params = own if each else p
    call = _Call("slope", rows)
    form = "each" if each else "late" if c >= 0.5 else "early"
    options = {"MAP": link.kind, "FORM": form, "STEEP": each or c > 1.0, "PER_ROW": each, "TILE": call.tile}
    call(slope_rows, (p, g, out, params), (*rows.sizes, *rows.steps("x", "g"), float(c)), options)


# -- operations, for the engine -----------------------------------------------------------------------------------------------------


class Loss(NamedTuple):
    value: Tensor  # fp32, reduced or not
    state: Any  # what `loss_grad` needs
    count: Tensor | None = None  # the number of rows in a mean


def p_saving(link: Link, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Lanes | None]:
    """p(x), and for a sparse map of long rows the lanes with the support, so that the backward reads p and g only there."""
    p = torch.empty_like(x)
    return p, run("p", link, x, mask=mask, out=p, keep_lanes=link.kind in SPARSE)


def loss(link: Link, x: Tensor, index: Tensor, ignored: int, reduction: str, axis: int, save: bool) -> Loss:
    """The loss of class indices: one kernel, then one sum, then the division of a mean. An index that is no class makes it NaN; rows
    whose index is `ignored` are left out.

    It saves four numbers per row, from which the gradient is written; for a sparse map of long rows also the lanes with the support.
    """
    rows = _to_last(x, axis)
    batch = rows.shape[:-1]
    both = numbers(x, 2, *batch)  # the loss of each row, and 1 if it counts, else 0
    state = numbers(x, *batch, 4) if save else None
    keeps = save and link.kind in SPARSE
    lanes = run("loss", link, rows, index=index, value=both, state=state, ignore=ignored, keep_lanes=keeps)
    state = lanes or state
    if reduction == "none":
        return Loss(both[0], state)
    sums = both.flatten(1).sum(1)
    if reduction == "sum":
        return Loss(sums[0], state)
    count = sums[1].clamp(min=1.0)
    return Loss(sums[0] / count, state, count)


def loss_grad(
    link: Link, x: Tensor, index: Tensor, scale: Tensor, state: Any, ignored: int, axis: int, factor: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`factor scale (p - y)`. Reads and writes each row once, without a search. Where the loss saved lanes, it reads only those. out: of
    the shape of rows, apart from x, or in its memory, so that each row begins where that of x does and its numbers are no longer.

    To write p - y in the loss already would move more: n forward and 2 n backward, in reads and writes of n scores, would be 2 n
    forward and 2 n backward (a factor in place would spoil a graph that is used again), and p - y would be held in between."""
    rows = _to_last(x, axis)
    out = torch.empty_like(rows) if out is None else out
    scale = scale.to(torch.float32) if factor == 1.0 else scale.to(torch.float32) * factor
    scale = scale.expand(rows.shape[:-1]) if scale.ndim else scale
    run("grad", link, rows, out=out, index=index, scale=scale, state=state, ignore=ignored)
    return out if rows is x else out.movedim(-1, axis)


def numbers(x: Tensor, *shape: int) -> Tensor:
    """An uninitialized fp32 tensor on the device of x."""
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _to_last(x: Tensor, axis: int) -> Tensor:
    return x if axis in (-1, x.ndim - 1) else x.movedim(axis, -1)


# -- perturb max ------------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _ends(noise: str, n: int) -> tuple[float, ...]:
    """The levels at which one class, and n equal classes, have G = _TAIL, and -log G; then the same for G = 1 - _TAIL."""
    deep, shallow = -math.log(_TAIL), -math.log1p(-_TAIL)
    low1, low_n, up1, up_n = (level(noise, depth) for depth in (deep, deep / n, shallow, shallow / n))
    return low1, low_n, deep, up1, up_n, shallow


def level(noise: str, depth: float) -> float:
    """The number at which -log F of a normal or logistic noise is `depth`."""
    above = -math.expm1(-depth)  # 1 - F, exact where it is small
    if noise == "logistic":
        return -depth - math.log(above)
    standard = statistics.NormalDist()
    return standard.inv_cdf(math.exp(-depth)) if above > 0.5 else -standard.inv_cdf(above)


def _perturb(
    link: Link, own: Tensor | None, x: Any, p: Tensor | None, g: Tensor | None, out: Any, mask: Tensor | None
) -> None:
    """p of perturb max, or J^T g if p and g are given."""
    noise, nodes = noise_of(link), link.nodes
    rows = lay_out(None, x, out=out, p=p, g=g, mask=mask)
    call, operands = _Call("perturb", rows), ("x", "mask", "p", "g", "out")
    weights = x if call.plan.whole else call.empty(2 * nodes, torch.float32)
    each, scales = own is not None, x if own is None else own
    numbers = (nodes, *rows.sizes, *rows.steps(*operands), float(link.param), *_ends(noise, x.shape[-1]))
    options = {
        "BACK": g is not None, "PER_ROW": each, "NOISE": noise, "TILE": call.masked._replace(SHIFT=0), "PLAIN": call.tile._replace(SHIFT=0),
        "num_warps": call.plan.warps,
    }  # fmt: skip
    pointers = (*map(rows.tensor, operands), weights, scales)
    with on_device_of(x, *pointers):
        replay.launch(perturb_rows, call.grid(), (*pointers, rows.all, rows.n, *numbers), options)
    rows.finish()
