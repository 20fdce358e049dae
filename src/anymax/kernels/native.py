"""The C++ engine (`anymax._engine`) for NumPy arrays and torch tensors on the CPU (JAX: the engine `xla`).

It takes arrays of any strides, with the classes along any axis; csrc/doors/python/ lays them out. This file has its refusals and
the contract's operations, on rows whose classes are last; callbacks.py what it calls in Python.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

import numpy as np

from .._array import Array, ask_torch, is_array, is_jax, is_torch, namespace, top, upcast
from .._array.memory import SMALLEST
from .._core.mapping import Mapping, scales_scores
from . import callbacks, choice, decode, library
from .arrays import DTYPES, SIZES, arrays_of, dtype_of, empty_like, refuse_tensor, refuse_width, room_in, wide
from .compiled import Compiled
from .engine import BELOW, REDUCTIONS, Engine, IndexLoss
from .library import get_num_threads as get_num_threads
from .library import pool
from .library import set_num_threads as set_num_threads
from .link import (
    CODES,
    KINDS,
    NEED_SCORES,
    SOFTMAX,
    WITH_SLOPE,
    Link,
    out_of_range,
    refuse_link,
)
from .linked import found_link, link_of
from .support import NonZeros, non_zeros_in
from .tasks import DECODE, LINEAR_ATTENTION, SELECT, SINKHORN, SINKHORN_LIMIT, LinearAttention, Selection, Sinkhorn

_AXES = 32  # the most axes of an array


# -- the engine ------------------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def load() -> Compiled | str:
    """The engine, or a sentence that says why there is none."""
    engine = library.load()
    if not isinstance(engine, str):
        engine.bind({
            "link_of": link_of, "forced": choice.quickest(), "pool": pool, "result": callbacks.result, "room": callbacks.room,
            "copied": callbacks.copied, "store": callbacks.store, "bits": callbacks.bits, "ndarray": np.ndarray,
            "empty_like": np.empty_like, "smallest": SMALLEST,
        })  # fmt: skip
        quick = {
            "quick_forward": engine.forward, "quick_saving": engine.forward_saving, "quick_vjp": engine.vjp,
            "quick_backward": engine.quick_backward,
            "quick_index_loss": engine.loss, "quick_loss_grad": engine.loss_grad,
        }  # fmt: skip
        for name, function in quick.items():  # the library's own functions, so that Python calls nothing between
            setattr(ENGINE, name, function)
    return engine


def isa() -> str | None:
    """The instruction set that the engine uses on this machine: avx512, avx2, neon or baseline."""
    engine = load()
    return None if isinstance(engine, str) else engine.isa()


_knows_torch = False


def engine_for(x: Array) -> Compiled:
    """The engine, ready for arrays like x."""
    engine = load()
    assert not isinstance(engine, str), engine
    if is_torch(x) and not _knows_torch:
        tell_of_torch(engine)
    return engine


def _empty_strided() -> Any:
    """What torch.compile's programs allocate by on a CPU, in half of the time of torch.empty_like; None where tensors may have names, which
    it does not copy."""
    torch = sys.modules["torch"]
    names = getattr(torch.Tensor, "rename", None)
    return None if names else getattr(torch._C._dynamo.guards, "_empty_strided_cpu", None)


def tell_of_torch(engine: Compiled) -> None:
    global _knows_torch
    torch = sys.modules["torch"]
    stack, included, before = ask_torch()
    kinds = {
        "f32": "float32", "f64": "float64", "bf16": "bfloat16", "f16": "float16", "i32": "int32", "i64": "int64", "boolean": "bool",
    }  # fmt: skip
    engine.bind({
        "parameter": torch.nn.Parameter, "torch_empty_like": torch.empty_like, "is_neg": torch.Tensor.is_neg,
        "empty_strided": _empty_strided(), "transforms": torch._C._are_functorch_transforms_active,
        "recording": torch.is_grad_enabled,
        "modes": stack, "functions": torch._C._len_torch_function_stack, "included": included, "before": before,
        "tracing": torch._C._is_tracing, "forward_ad": vars(torch.autograd.forward_ad),
        "strided": torch.strided, **{code: getattr(torch, kind) for code, kind in kinds.items()},
        "exchange": getattr(torch.Tensor, "__dlpack_c_exchange_api__", None),  # since torch 2.10
        "tensor": torch.Tensor,
    })  # fmt: skip
    _knows_torch = True


# -- which maps, which arrays -------------------------------------------------------------------------------------------------------


def refuse_array(x: Any) -> str | None:
    """Why the library can't take arrays like x; None if it can."""
    lib = load()
    if isinstance(lib, str):
        return lib
    if is_jax(x):
        return "it takes NumPy and torch; JAX calls the same library through XLA, which is the engine xla"
    if getattr(x, "ndim", 0) > _AXES:
        return f"it takes arrays of up to {_AXES} axes, not {x.ndim}"
    if reason := refuse_width(x):
        return reason
    if is_torch(x):
        return refuse_tensor(x)
    if type(x) is not np.ndarray:
        return f"it takes arrays of NumPy, torch (CPU) and JAX, not {type(x).__module__}.{type(x).__name__}"
    if x.dtype.name not in DTYPES or not x.dtype.isnative:
        return f"it takes float32, float64, float16 and bfloat16 in the machine's byte order, not {x.dtype}"
    return None


# -- the engine's operations ------------------------------------------------------------------------------------------------------------


def broadcast(link: Link, x: Array, shape: tuple[int, ...]) -> Link:
    """The link with its array of parameters in this shape, float64 and contiguous."""
    arrays = arrays_of(x)
    params = arrays.broadcast(arrays.cast(link.params, "float64", x), shape)
    return link._replace(params=arrays.contiguous(params))


def _link(mapping: Mapping, x: Array) -> Link:
    link = found_link(mapping)
    if is_array(link.upper):
        link = link._replace(upper=arrays_of(x).cast(link.upper, wide(x), x))
    if link.params is None:
        return link
    number = one_for_all(link)
    # each class gets 1 of an array
    more = number is not None and number.kind == "budget" and number.param > x.shape[-1]
    return broadcast(link, x, (*x.shape[:-1], 1)) if number is None or more else number


def one_for_all(link: Link) -> Link | None:
    """The link with its only parameter as a number; None if it has several, or one that is out of range: then its rows become NaN."""
    if math.prod(link.params.shape) != 1:
        return None
    value = link.params.item()
    # sooner than by `_replace`
    return None if out_of_range(link.kind, value) else Link(*link[:2], value, None, *link[4:])


def not_computed(what: str, *arrays: Array | None, engine: str = "the native engine") -> RuntimeError:
    """The error for arrays that an engine answers with None, since `refuse` did not check them."""
    words = ", ".join(f"{dtype_of(a)} {tuple(a.shape)}" for a in arrays if a is not None)
    return RuntimeError(f"{engine} can't compute {what} on {words}")


def _done(answer: Any, what: str, *arrays: Array | None) -> Any:
    """The engine's answer; an error if it is None."""
    if answer is None:
        raise not_computed(what, *arrays)
    return answer


def _gradient(mapping: Mapping, scores: Array | None, x: Array, p: Array, g: Array) -> Array:
    """g in the dtype of p, with which a backward pass goes over the scores, if it needs them, and p."""
    if p.shape != g.shape or (scores is not None and (x.shape != p.shape or x.dtype != p.dtype)):
        words = ", ".join(f"{n} {dtype_of(a)} {tuple(a.shape)}" for n, a in (("x", x), ("p", p), ("g", g)))
        raise ValueError(
            f"the backward of {mapping.name} takes x, p and g of one shape, and x and p of one dtype; got {words}"
        )
    return arrays_of(p).cast(g, dtype_of(p), p) if dtype_of(g) != dtype_of(p) else g


def _backward(log: bool, mapping: Mapping, x: Array, p: Array, g: Array, saved: NonZeros | None) -> Array:
    link = _link(mapping, p)
    scores = x if link.kind in NEED_SCORES else None
    g = _gradient(mapping, scores, x, p, g)
    engine = engine_for(p)
    if log:
        return _done(engine.log_vjp(link, scores, p, g, -1, None), "log_vjp", scores, p, g)
    return _done(engine.vjp(link, scores, p, g, -1, saved and saved.memory), "vjp", scores, p, g)


def refuse_parameter(mapping: Mapping, link: Link, name: str) -> None:
    """An error unless the library has the derivative by this parameter."""
    if link.kind not in WITH_SLOPE or name not in (KINDS[link.kind].parameter, *mapping.per_class):
        known = ", ".join(f"{KINDS[kind].parameter} of {kind}" for kind in WITH_SLOPE)
        raise ValueError(f"the native engine has the derivatives by {known}, not by {name} of {mapping.name}")


def _numbers(link: Link, x: Array, what: str) -> Array:
    """tau of each row, [..., 1]."""
    tau = room_in(arrays_of(x), (*x.shape[:-1], 1), wide(x))
    _done(engine_for(x).threshold(link, x, tau), what, x)
    return tau


class Native(Engine):
    name = "native"
    ops = ("forward", "log_forward", "vjp", "log_vjp", "index_loss", "threshold", "slope")
    tasks = (DECODE, SELECT, SINKHORN, SINKHORN_LIMIT, LINEAR_ATTENTION)
    compiled = takes_mask = True
    needs_saved = False

    def refuse(self, op: str, mapping: Mapping, x: Any) -> str | None:
        lib = load()
        if isinstance(lib, str):
            return lib
        if op not in self.ops:
            return self.lacks(op)
        if reason := refuse_link(op, link_of(mapping)) or refuse_array(x):
            return reason
        link = found_link(mapping)
        given = [a for a in (link.params, link.upper) if is_torch(a)] if is_torch(x) else []
        return next((reason for a in given if (reason := refuse_tensor(a))), None)

    def forward(self, mapping: Mapping, x: Array, mask: Array | None = None, out: Array | None = None) -> Array:
        return _done(engine_for(x).forward(_link(mapping, x), x, -1, mask, out), "p(x)", x, mask, out)

    def write(self, mapping: Mapping, x: Array, mask: Array | None, out: Any) -> bool:
        return engine_for(x).forward(_link(mapping, x), x, -1, mask, out) is not None

    def forward_saving(
        self, mapping: Mapping, x: Array, mask: Array | None = None, out: Array | None = None, capacity: int = -1
    ) -> tuple[Array, NonZeros | None]:
        """p(x), and up to `capacity` non-zeros a row; below 0 the engine chooses, and saves none for a dense map or a small call."""
        answer = engine_for(x).forward_saving(_link(mapping, x), x, -1, mask, out, capacity)
        p, memory = _done(answer, "p(x)", x, mask, out)
        return p, None if memory is None else non_zeros_in(memory, p, -1)

    def forward_learning(self, mapping: Mapping, x: Array, mask: Array | None = None) -> tuple[Array, NonZeros | None]:
        """In half precision with all non-zeros, whose values are floats."""
        whole = SIZES[dtype_of(x)] == 2 and not mapping.needs_scores
        return self.forward_saving(mapping, x, mask, None, x.shape[-1] if whole else -1)

    def forward_non_zeros(self, mapping: Mapping, x: Array, out: Array) -> tuple[Array, NonZeros | None]:
        return self.forward_saving(mapping, x, out=out)

    def log_forward(self, mapping: Mapping, x: Array) -> Array:
        return _done(engine_for(x).log_forward(_link(mapping, x), x, -1, None, None), "log p(x)", x)

    def vjp(self, mapping: Mapping, x: Array, p: Array, g: Array, saved: Any = None) -> Array:
        return _backward(False, mapping, x, p, g, saved)

    def slope(self, mapping: Mapping, name: str, x: Array, p: Array, g: Array, saved: Any = None) -> Array:
        """`<g, dp/d name>` of each row, [..., 1], float32 or float64; of each class, [..., n], by the bounds of `Bounded`."""
        if scales_scores(mapping):
            return super().slope(mapping, name, x, p, g, saved)
        link = _link(mapping, p)
        refuse_parameter(mapping, link, name)
        scores, memory = x if link.kind in NEED_SCORES else None, saved and saved.memory
        value: Array | None = None
        if name in mapping.per_class:
            if wide(p) != dtype_of(p):  # the result has the dtype of p, and is to be summed over rows
                x, g, memory = upcast(x, namespace(x)), upcast(g, namespace(g)), None
                scores, p = x, self.forward(mapping, x)
        else:
            value = room_in(arrays_of(p), (*p.shape[:-1], 1), wide(p))
        g = _gradient(mapping, scores, x, p, g)
        made = _done(engine_for(p).slope(link, scores, p, g, -1, memory, value), f"the derivative by {name}", p, g)
        return made if value is None else value

    def log_vjp(self, mapping: Mapping, x: Array, log_p: Array, g: Array) -> Array:
        return _backward(True, mapping, x, log_p, g, None)

    def index_loss(
        self, mapping: Mapping, x: Array, index: Array, *, save: bool, axis: int = -1, ignored: int = BELOW, reduction: str = "none",
        slope: bool = False,
    ) -> IndexLoss | None:  # fmt: skip
        if type(axis) is not int or not -x.ndim <= axis < x.ndim:
            return None
        link = _link(mapping, x)
        if axis != -1 and link.params is not None:
            return None
        arrays = arrays_of(x)
        index = arrays.cast(index, "int64", x) if dtype_of(index) != "int64" else index
        rows = tuple(n for i, n in enumerate(x.shape) if i != axis % x.ndim)
        value = room_in(arrays, () if reduction != "none" else rows, wide(x))
        loss_slope = room_in(arrays, rows, wide(x)) if slope and link.kind in WITH_SLOPE else None
        answer = engine_for(x).loss(link, x, index, value, axis, ignored, REDUCTIONS[reduction], save, loss_slope)
        return answer and IndexLoss(value, answer[1], answer[0], loss_slope)

    def index_loss_grad(
        self, mapping: Mapping, x: Array, index: Array, scale: Array, saved: Array | None, *, axis: int = -1, ignored: int = BELOW,
        factor: float = 1.0,
    ) -> Array | None:  # fmt: skip
        scale = arrays_of(x).cast(scale, wide(x), x) if dtype_of(scale) != wide(x) else scale
        return engine_for(x).loss_grad(_link(mapping, x), x, index, scale, axis, factor, saved)

    def threshold(self, mapping: Mapping, x: Array) -> Array:
        return _numbers(_link(mapping, x), x, "a threshold")

    def logsumexp(self, x: Array) -> Array:
        tau = _numbers(SOFTMAX, x, "logsumexp")
        xp = namespace(x)
        lost = xp.isnan(tau)
        return xp.where(lost, upcast(top(x, xp), xp), tau) if bool(xp.any(lost)) else tau

    def largest(self, x: Array, k: int) -> tuple[Array, Array]:
        """Equal scores are in the order of their positions."""
        arrays = arrays_of(x)
        batch, n = tuple(x.shape[:-1]), x.shape[-1]
        if not 1 <= k <= n:
            raise ValueError(f"k must be from 1 to the number of classes, {n}, got {k!r}")
        value, positions = room_in(arrays, (*batch, k), dtype_of(x)), room_in(arrays, (*batch, k), "int64")
        _done(engine_for(x).largest(arrays.contiguous(x), k, value, positions), "the largest scores", x)
        return value, positions

    def plan(self, op: str, mapping: Mapping, x: Array) -> str | None:
        """The plan and the instruction set, such as "tile avx512" (csrc/plan.hpp)."""
        return engine_for(x).plan(_link(mapping, x), x, CODES[op]) if math.prod(x.shape) else None

    def refuse_task(self, op: str, task: Any, x: Any) -> str | None:
        if op not in self.tasks:
            return super().refuse_task(op, task, x)
        if reason := refuse_array(x):
            return reason
        if op == DECODE:
            link = link_of(task)
            if isinstance(link, str):
                return link
            if link.kind in NEED_SCORES:
                return f"it samples only maps with a threshold, and {link.kind} has none"
            if link.params is not None:
                return "it takes one parameter of a map for all rows"
            return "it takes rows of at least one class" if not x.ndim or not x.shape[-1] else None
        if op == SELECT:
            return None if x.ndim and 1 <= task[0] <= x.shape[-1] else "it chooses from 1 to all classes of rows"
        if op == LINEAR_ATTENTION:
            for a in task:
                if reason := refuse_array(a):
                    return reason
            return None
        return None if dtype_of(x) in _SINKHORN else f"it takes {' and '.join(_SINKHORN)}, not {x.dtype}"

    def decode(
        self,
        mapping: Mapping,
        x: Array,
        steps: tuple[decode.Step, ...] = (),
        *,
        keep: bool = False,
        left: bool = False,
        in_place: bool = False,
        u: Array | None = None,
        given: Array | None = None,
        log_p: bool = False,
        entropy: bool = False,
        tau: bool = False,
        support: bool = False,
    ) -> decode.Decoded:
        framework = arrays_of(x)
        x = framework.contiguous(x.detach() if is_torch(x) else x)
        batch = tuple(x.shape[:-1])
        table = np.array(
            [[decode.STEPS[s.name], s.least, math.nan if is_array(s.value) else s.value] for s in steps], np.float64
        )
        values = None
        if any(is_array(s.value) for s in steps):
            each = [np.broadcast_to(decode.numbers(s), (*batch, 1)).reshape(-1) for s in steps]
            values = np.ascontiguousarray(np.stack(each, axis=-1), dtype=np.float64)
        index = chances = None
        draws = (*batch, 0)
        if u is not None:
            u, draws = framework.contiguous(u), (*batch, u.shape[-1])
            index = framework.empty(draws, "int64")
        elif given is not None:
            index, draws = framework.contiguous(given), (*batch, given.shape[-1])
        if index is not None and (log_p or u is None):
            chances = framework.empty(draws, "float64")
        out = decode.Decoded(
            framework.empty(tuple(x.shape), "bool") if keep else None,
            x if in_place else empty_like(x) if left else None,
            index,
            chances,
            framework.empty(batch, "float64") if entropy else None,
            framework.empty(batch, "float64") if tau else None,
        )
        if not math.prod(batch) and not support:
            return out
        if not draws[-1]:
            u = index = chances = None
        answer = engine_for(x).decode(
            mapping,
            x,
            table.reshape(-1, 3),
            values,
            out.keep,
            u,
            index,
            chances,
            out.entropy,
            out.left,
            out.tau,
            support,
        )
        if answer is None:
            raise not_computed("a pass", x)
        return out._replace(support=answer) if support else out

    def select(self, task: Selection, x: Array) -> Array | None:
        arrays, (k, groups) = arrays_of(x), task
        index = room_in(arrays, (*x.shape[:-1], k), "int64")
        if not math.prod(x.shape):
            return index
        done = engine_for(x).choose(arrays.contiguous(x), k, *groups, index)
        return None if done is None else index

    def sinkhorn(self, task: Sinkhorn, x: Array, g: Array | None = None) -> Array:
        return _sinkhorn(task, x, g)

    def sinkhorn_limit(self, task: Sinkhorn, x: Array, tolerance: float) -> tuple[Array, np.ndarray]:
        left = np.zeros(tuple(x.shape[:-2]), np.float64)
        return _sinkhorn(task, x, None, tolerance, left), left

    def linear_attention(
        self, task: LinearAttention, q: Array, k: Array, v: Array, save: bool = False
    ) -> tuple[Array, Array | None]:
        framework, dtype = arrays_of(q), dtype_of(q)
        shape = tuple(q.shape[:-1])
        out = room_in(framework, (*shape, v.shape[-1]), dtype)
        below = room_in(framework, shape, dtype) if save else None
        _linear(task, q, k, v, out, below)
        return out, below

    def linear_attention_vjp(
        self, task: LinearAttention, q: Array, k: Array, v: Array, out: Array, below: Array, g: Array, wants_q: bool, wants_k: bool
    ) -> tuple[Array | None, Array | None, Array | None]:  # fmt: skip
        framework = arrays_of(q)
        dq = framework.empty_like(framework.contiguous(q)) if wants_q else None
        dk, dv = (framework.empty_like(framework.contiguous(a)) if wants_k else None for a in (k, v))
        _linear(task, q, k, v, out, below, framework.contiguous(g), dq, dk, dv)
        return dq, dk, dv


# -- the engine's tasks -----------------------------------------------------------------------------------------------------------------

_SINKHORN = ("float32", "float64")


def _sinkhorn(
    task: Sinkhorn, x: Array, g: Array | None, tolerance: float = 0.0, left: np.ndarray | None = None
) -> Array:
    framework = arrays_of(x)
    scores: Any = framework.contiguous(x.detach() if is_torch(x) else x)
    g = None if g is None else framework.contiguous(g)
    out = empty_like(scores)
    if 0 not in x.shape:
        rows, columns = (_sums(value, scores) for value in (task.rows, task.columns))
        numbers = task.iterations, float(task.temperature), tolerance
        answer = engine_for(scores).sinkhorn(scores, rows, columns, g, out, *numbers, left)
        if answer is None:
            raise not_computed("Sinkhorn", scores)
    return out


def _sums(value: Array | None, x: Array) -> Array | None:
    """The sums of all matrices, [n] where they have the same, or of each, in C order."""
    if value is None:
        return None
    sums: Any = value.detach() if is_torch(value) else value
    framework, size = arrays_of(x), sums.shape[-1]
    if all(n == 1 for n in sums.shape[:-1]):
        return framework.contiguous(namespace(sums).reshape(sums, (size,)))
    return framework.contiguous(framework.broadcast(sums, (*x.shape[:-2], size)))


def _linear(
    task: LinearAttention, q: Array, k: Array, v: Array, out: Array, below: Array | None, *gradients: Array | None
) -> None:
    framework, lengths = arrays_of(q), task.lengths
    if lengths is not None:
        lengths = np.ascontiguousarray(np.clip(lengths, 0, k.shape[-2]), np.int64)
    q, k, v = (framework.contiguous(a) for a in (q, k, v))
    g, dq, dk, dv = gradients or (None,) * 4
    threads = sys.modules["torch"].get_num_threads() if pool(is_torch(q)) else get_num_threads()
    answer = engine_for(q).linear(
        q, k, v, out, lengths, below, g, dq, dk, dv, task.groups, task.causal, float(task.scale), threads
    )
    if answer is None:
        raise not_computed("linear attention", q, k, v)


ENGINE = Native()
