"""Launches the attention kernels: parameters, plans, lists of blocks. Nothing here waits for the device.

Queries are [B, H, L, D], keys and values [B, H', S, D or E], where H' divides H. `arrays` has the other arguments that vary: "bias",
"additive" and "keep" on four axes, with size 1 where they do not vary; "param" on [B or 1, H or 1, L or 1]; "ranges" int32 [B, 3], the
number of keys, the number of queries and the offset of each batch; "heads" fp32 [H, 2], slope and sink of each head; "seed" int64 [1].
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..link import Link
from . import attention_plans, replay
from .attention_backward import attention_bias, attention_keys, attention_queries
from .attention_forward import attention_centres, attention_forward
from .attention_operands import Arrays, Call, Steps, View
from .attention_plans import KEPT, LISTED, SKIPPED, BlockPlan, Split, blocks, split
from .attention_split import SOLVED, attention_merge, attention_parts, attention_solve, attention_values
from .launch import POWERS
from .links import Form
from .operands import on_device_of
from .plans import SOLVING

Tensor = torch.Tensor

# Below this |sum p - 1| the next Newton step is the last: (for a smooth rate, for one that jumps at the edge of the support). A step leaves
# about the square of the error, which in half precision is below the rounding of p.
_ENOUGH = {"half": (5e-2, 1e-3), "single": (2e-4, 2e-6)}
_CLOSE = {"half": (5e-3, 1e-3), "single": (1e-6, 2e-6)}  # below this no step is needed: what is left after the last one
_ROOT = 1e-3  # from this alpha - 1 on, p = u^(1 / (alpha - 1)) with u in fp32 is exact enough for half precision
_SMOOTH = 0.67  # above this alpha - 1 the rate almost jumps at the edge of the support


class Job(NamedTuple):
    """The arguments of a call that are not tensors."""

    link: str  # "softmax", "power" (alpha - 1 = 1 / power), "any" (alpha below 2), "mixed" (any alpha, one per row) or "budget"
    power: int
    param: float  # alpha - 1, or the budget
    scale: float
    softcap: float  # 0: none
    causal: bool
    left: int  # -1: no limit
    right: int
    offset: int
    dropout_p: float
    alibi: bool
    sink: bool


def attention_form(link: Link | str) -> tuple[str, int, float]:
    """(link, power, param) of `Job`, from the link of the row kernels."""
    assert not isinstance(link, str), link
    if link.kind in ("softmax", "budget"):
        return link.kind, 1, link.param
    if link.params is not None:
        return "mixed", 1, 0.0
    alpha = 2.0 if link.kind == "sparsemax" else link.param
    for known, power in POWERS.items():
        if abs(alpha - known) < 1e-15:
            return "power", power, 1.0 / power
    return ("any" if alpha < 2.0 else "mixed"), 1, alpha - 1.0


class Saved(NamedTuple):
    """The tensors for the backward: (top, z) of each query, and the blocks with a probability; see `attention_forward`."""

    state: Tensor
    lists: Tensor
    counts: Tensor
    flags: Tensor


def sizes(
    job: Job, q: Tensor, k: Tensor, v: Tensor, save: bool
) -> tuple[BlockPlan, dict[str, tuple[tuple[int, ...], torch.dtype]]]:
    """(blocks, shape and dtype of each part of `Saved`)."""
    batch, heads, rows, d = q.shape
    keys = k.shape[-2]
    long = job.link == "mixed" or job.softcap > 0.0 or job.dropout_p > 0.0
    plan = blocks(max(d, v.shape[-1]), q.element_size(), rows, torch.version.hip is not None, long)
    tall, wide = -(-rows // plan.M), -(-keys // plan.N)
    held = save and job.link != "softmax"
    index = torch.int16 if max(tall, wide) < 2**15 else torch.int32
    return plan, {
        "state": ((batch, heads, rows, 2) if save else (0,), torch.float64),
        "lists": ((batch, heads, tall, _most(wide) + 32) if held else (0,), index),
        "counts": ((batch, heads, tall) if held else (0,), torch.int32),
        "flags": ((batch, heads, -(-wide // (32 * _coarse(wide))), tall) if held else (0,), torch.int32),
    }


def _cdiv(n: int, size: int) -> int:
    """n / size, rounded up. Triton's `cdiv`, which kernels can call too, takes ten times as long."""
    return -(-n // size)


def even(a: Tensor) -> Tensor:
    """Half precision padded to a multiple of 16 features, since kernels move vectors of 16 bytes."""
    return a if a.element_size() > 2 or a.shape[-1] % 16 == 0 else torch.nn.functional.pad(a, (0, -a.shape[-1] % 16))


def _features(a: Tensor) -> int:
    """The columns of a tile, a power of two. In half precision at least 64: on Hopper, Triton 3.6 multiplies wrongly by a tile of 32
    columns if four warps share the work (seen: values after the first 16 keys)."""
    return max(16 if a.dtype.itemsize > 2 else 64, 1 << (a.shape[3] - 1).bit_length())


def _most(wide: int) -> int:
    """The most entries of a list of blocks; the limit keeps memory linear in the length."""
    return min(wide, LISTED)


def _coarse(wide: int) -> int:
    """How many blocks of keys share a bit of the flags."""
    return -(-wide // LISTED)


def forward(job: Job, q: Tensor, k: Tensor, v: Tensor, arrays: dict[str, Tensor], save: bool) -> tuple[Tensor, Saved]:
    """The output [B, H, L, E], and the tensors for the backward, which are empty without `save`."""
    q, k, v = (_in_line(a) for a in (q, k, v))
    plan, parts = sizes(job, q, k, v, save)
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    saved = Saved(
        **{
            n: (torch.zeros if n == "flags" else torch.empty)(s, dtype=t, device=q.device)
            for n, (s, t) in parts.items()
        }
    )
    if out.numel():
        call = functools.partial(_forward, job, q, k, v, arrays, out, saved, save, plan)
        _repeated((job, save, *arrays), (q, k, v, out, *saved, *arrays.values()), call)
    return out, saved


def _repeated(key: Any, tensors: tuple[Tensor, ...], call: Callable[[], None]) -> None:
    """`call`, or the launches of one like it; see `replay.repeated`."""
    if attention_plans.forced_blocks or attention_plans.forced_split:
        call()
    else:
        replay.repeated(key, tensors, call)


def _forward(
    job: Job, q: Tensor, k: Tensor, v: Tensor, arrays: dict[str, Tensor], out: Tensor, saved: Saved, save: bool, plan: BlockPlan
) -> None:  # fmt: skip
    if not save:
        shared = k.shape[1] == 1 or (k.stride(1) == 0 and v.stride(1) == 0)  # all heads have the same keys
        few = (k[:, :1], v[:, :1]) if shared else (k, v)
        cut = _cut(job, q, *few)
        if cut is not None:
            _forward_split(job, q, *few, arrays, out, cut)
            return
    lists, wide = saved.lists, _cdiv(k.shape[2], plan.N)
    tiles = _cdiv(q.shape[2], plan.M) * q.shape[0] * q.shape[1]
    if not save and job.link != "softmax":
        lists = replay.empty(tiles * (_most(wide) + 32), lists.dtype, q.device)
    common, options = _common(job, q, k, v, arrays, _folds(job, q, arrays) and not job.sink)
    skip = _plain(job, arrays) and job.link not in ("softmax", "budget") and k.shape[2] >= SKIPPED
    centres = radii = q
    capped = {"maxnreg": plan.registers} if plan.registers else {}
    with on_device_of(q, k, v, *arrays.values()):
        if skip:
            programs = k.shape[0] * k.shape[1] * wide
            centres = replay.empty(programs * k.shape[3], k.dtype, k.device)
            radii = replay.empty(programs, torch.float32, k.device)
            _launch(attention_centres, programs, *common, centres, radii, N=plan.N, D=options["D"], num_warps=4)
        _launch(
            attention_forward, tiles, *common, out, saved.state, lists, saved.counts, saved.flags, centres, radii, _error(_ENOUGH, job, q),
            _error(_CLOSE, job, q), _most(wide), _coarse(wide), **options, SAVE=save, SKIP=skip,
            M=plan.M, N=plan.N, num_warps=plan.warps, num_stages=plan.stages, **capped,
        )  # fmt: skip


def _cut(job: Job, q: Tensor, k: Tensor, v: Tensor) -> Split | None:
    """How programs share the keys of a call without gradients, or None."""
    return split(
        max(q.shape[3], v.shape[3]), q.element_size(), k.shape[0] * k.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2],
        _processors(q.device), torch.version.hip is not None, job.link == "softmax",
    )  # fmt: skip


def _forward_split(
    job: Job, q: Tensor, k: Tensor, v: Tensor, arrays: dict[str, Tensor], out: Tensor, cut: Split
) -> None:
    common, options = _common(job, q, k, v, arrays, _folds(job, q, arrays) and job.link == "softmax")
    batch, each, rows, _ = q.shape
    groups = each // k.shape[1]
    queries, keys, e = batch * each * rows, k.shape[2], v.shape[3]
    wide, parts = _cdiv(keys, cut.N), cut.parts
    new = functools.partial(replay.empty, device=q.device)
    sums = new(queries * parts * 2, torch.float64)
    partial = new(queries * parts * e, torch.float32)
    tiles = batch * k.shape[1] * _cdiv(groups * rows, cut.M) * parts
    launch = {"M": cut.M, "N": cut.N, "num_warps": cut.warps, "num_stages": cut.stages}
    options["FORM"] = options["FORM"]._replace(
        EXACT=True
    )  # with one number more for a row the solver has no register free
    form = {name: options[name] for name in ("FORM", "VIEW")}
    with on_device_of(q, k, v, *arrays.values()):
        if job.link == "softmax":
            scores = tops = state = sums
        else:
            scores, tops = new(queries * wide * cut.N, torch.float32), new(queries * wide, torch.float32)
            state = new(queries * SOLVED.value, torch.float64)
        _launch(attention_parts, tiles, *common, scores, tops, sums, partial, parts, **options, **launch)
        if job.link != "softmax":
            lists = new(queries * _cdiv(wide, parts) * parts, torch.int32)
            _launch(
                attention_solve, queries, *common, scores, tops, sums, lists, state, parts, _error(_ENOUGH, job, q), **form, M=cut.M,
                N=cut.N, W=cut.solve_tops, C=cut.solve_scores, num_warps=SOLVING,
            )  # fmt: skip
            _launch(
                attention_values, tiles, *common, scores, tops, sums, lists, state, partial, parts, **form, E=options["E"],
                W=cut.value_tops, **launch,
            )  # fmt: skip
        _launch(
            attention_merge, queries, *common, sums, state, partial, out, parts, **form, E=options["E"], C=cut.merged, num_warps=4,
        )  # fmt: skip


def backward(
    job: Job,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arrays: dict[str, Tensor],
    out: Tensor,
    saved: Saved,
    g: Tensor,
    wants: set[str],
) -> dict[str, Tensor]:
    """The gradients of q, k and v ("q", "k", "v") and of the arrays that `wants` names, each with the shape of its input.

    Those of k and v are not computed where `wants` names neither.
    """
    q, k, v = (_in_line(a) for a in (q, k, v))
    plan, _ = sizes(job, q, k, v, True)
    found = {n: torch.empty_like(a, memory_format=torch.contiguous_format) for n, a in (("q", q), ("k", k), ("v", v))}
    if not q.numel() or not out.numel():
        for a in found.values():
            a.zero_()
        return found | {n: torch.zeros_like(arrays[n]) for n in wants if n in arrays}
    g = g.to(q.dtype).contiguous()
    for name in sorted(wants & {"bias", "additive"}):
        found[name] = torch.empty_like(arrays[name], memory_format=torch.contiguous_format)
    batch, heads, rows, _ = q.shape
    learned = (batch, heads, rows, 3) if wants & {"heads", "param"} else (0,)
    sums = torch.empty(learned, dtype=torch.float32, device=q.device)
    keyless = not wants & {"k", "v"}
    call = functools.partial(_backward, job, q, k, v, arrays, out, saved, g, found, sums, keyless, plan)
    _repeated((job, keyless, *found, *arrays), (q, k, v, out, *saved, g, sums, *found.values(), *arrays.values()), call)
    if "heads" in wants:
        found["heads"] = torch.stack(
            [
                sums[..., place].sum(2) if there else sums.new_zeros(batch, heads)
                for place, there in ((1, job.alibi), (0, job.sink))
            ],
            -1,
        )
    if "param" in wants:
        own = sums[..., 2].double()
        shape = arrays["param"].shape
        own = own.sum([n for n in range(3) if shape[n] == 1], keepdim=True) if 1 in shape else own
        found["param"] = own.to(arrays["param"].dtype)
    return found


def _backward(
    job: Job, q: Tensor, k: Tensor, v: Tensor, arrays: dict[str, Tensor], out: Tensor, saved: Saved, g: Tensor,
    found: dict[str, Tensor], sums: Tensor, keyless: bool, plan: BlockPlan,
) -> None:  # fmt: skip
    common, options = _common(job, q, k, v, arrays, _folds(job, q, arrays) and job.link != "softmax" and not job.sink)
    batch, heads, rows, _ = q.shape
    tall, wide = _cdiv(rows, plan.M), _cdiv(k.shape[2], plan.N)
    plane = batch * heads * rows
    numbers = replay.empty(4 * plane, torch.float32, q.device)
    launch = {"M": plan.M, "N": plan.N, "num_warps": plan.warps, "num_stages": plan.stages}
    capped = {"maxnreg": plan.registers} if plan.registers else {}
    with on_device_of(q, k, v, g, *arrays.values()):
        _launch(
            attention_queries, tall * batch * heads, *common, out, saved.state, saved.lists, saved.counts, g, found["q"], numbers,
            sums, plane, _most(wide), **options, LEARN=sums.numel() > 0, **launch,
        )  # fmt: skip
        if not keyless:
            lists, programs = saved.lists, wide * batch * k.shape[1]
            if job.link != "softmax":
                lists = replay.empty(programs * KEPT, torch.int32, q.device)
            _launch(
                attention_keys, programs, *common, saved.state, lists, saved.flags, g, found["k"], found["v"], numbers, plane,
                _coarse(wide), **options, T=plan.part or plan.M, SIZE=KEPT, **launch, **capped,
            )  # fmt: skip
        for into in (found[n] for n in ("additive", "bias") if n in found):
            alone = [n == 1 for n in into.shape]
            programs = math.prod(1 if one else n for one, n in zip(alone, (batch, heads, tall, wide)))
            summed = {f"ALL_{axis}": one for axis, one in zip("BHIJ", alone)}
            _launch(
                attention_bias, programs, *common, saved.state, saved.flags, g, into, numbers, plane, batch, _coarse(wide),
                Steps(*into.stride()), **summed, **options, **launch,
            )  # fmt: skip


def _link(job: Job, q: Tensor) -> str:
    """The link for the kernels, which depends on the dtype."""
    return "root" if job.link == "any" and q.element_size() == 2 and job.param >= _ROOT else job.link


def _plain(job: Job, arrays: dict[str, Tensor]) -> bool:
    """True if a score is scale q k^T, with nothing added."""
    return not (job.softcap or job.alibi or "bias" in arrays or "additive" in arrays)


def _folds(job: Job, q: Tensor, arrays: dict[str, Tensor]) -> bool:
    """True if the scale is needed only within exponents or slopes, see `units`: the highest q k^T is then the highest score. In fp32 the
    slope of a threshold map is that of the map, which needs no rounding."""
    known = job.link == "softmax" or (q.element_size() == 2 and _link(job, q) in ("power", "root"))
    return known and _plain(job, arrays) and job.scale > 0.0


def _error(table: dict[str, tuple[float, float]], job: Job, q: Tensor) -> float:
    smooth, edged = table["half" if q.element_size() < 4 else "single"]
    edge = job.link in ("mixed", "budget") or job.param > _SMOOTH
    return edged if edge else smooth


@functools.lru_cache(maxsize=64)
def _processors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU; 132 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def _launch(kernel: Any, programs: int, *args: Any, **options: Any) -> None:
    replay.launch(kernel, (programs,), args, options)


def _in_line(a: Tensor) -> Tensor:
    """`a`, copied unless its rows are contiguous and, in half precision, aligned for vectors of 16 bytes."""
    if a.stride(-1) != 1 and a.shape[-1] != 1:
        return a.contiguous()
    if a.element_size() == 2 and (
        a.storage_offset() % 8 or any(n > 1 and step % 16 for n, step in zip(a.shape[:-1], a.stride()))
    ):
        return a.clone(memory_format=torch.contiguous_format)
    return a


def _steps(a: Tensor | None) -> Steps:
    """The strides, with 0 for an axis of size 1."""
    return Steps(0, 0, 0) if a is None else Steps(*(0 if n == 1 else s for n, s in zip(a.shape, a.stride())))


def _common(
    job: Job, q: Tensor, k: Tensor, v: Tensor, arrays: dict[str, Tensor], fold: bool
) -> tuple[tuple[Arrays, Call], dict[str, Any]]:
    """The arguments and compile-time constants that all kernels share."""
    bias, add, keep, param = (arrays.get(n) for n in ("bias", "additive", "keep", "param"))
    there = {n: a.view(torch.uint8) if a.dtype == torch.bool else a for n, a in arrays.items()}
    addresses = Arrays(q, k, v, *(there.get(n, q) for n in Arrays._fields[3:]))
    steps = Arrays(*map(_steps, (q, k, v, bias, add, keep, param)))
    call = Call(
        q.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3],
        steps, job.offset, max(job.left, 0), max(job.right, 0), float(job.scale), float(job.softcap or 1.0), float(job.param),
        float(job.dropout_p),
    )  # fmt: skip
    exact = q.element_size() > 2
    form = Form(_link(job, q), job.power, 1.0 / job.power, EXACT=exact, PER_ROW=param is not None)
    view = View(
        job.causal, job.left >= 0, job.right >= 0, "ranges" in arrays, job.softcap > 0.0, job.alibi, job.sink,
        bias is not None, add is not None, keep is not None, job.dropout_p > 0.0, fold,
    )  # fmt: skip
    return (addresses, call), {"FORM": form, "VIEW": view, "D": _features(q), "E": _features(v)}
