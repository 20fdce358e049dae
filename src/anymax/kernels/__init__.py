"""The engines. `choose` returns the first of `ENGINES` that does not refuse an operation; the reference never refuses.

`engine.py` is their contract.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterable
from typing import Any

from .._array import Array, asarray, compiling, namespace
from .._core.mapping import Mapping, scales_scores
from .._core.names import as_mapping
from .._core.options import check_keywords
from .._core.rows import prepare
from .._core.typing import AnyArray, DType, Numbers
from .._core.ways import Way, way_of
from . import choice, framework, fused, native, order, ragged, reference, tabled, triton, xla
from .choice import asked, unlearned
from .engine import OPS, SLOPE, Engine, SegmentsAlong, SegmentsEngine
from .explanation import Explanation
from .noise import noise_maker as noise_maker
from .noise import torch_uniform as torch_uniform
from .tasks import DECODE, LAYER, LINEAR_ATTENTION, ROUTE, SCORES, SELECT, SINKHORN, SINKHORN_LIMIT
from .triton import ragged as triton_ragged

ENGINES: tuple[Engine, ...] = (
    native.ENGINE,
    order.ENGINE,
    fused.ENGINE,
    tabled.ENGINE,
    triton.ENGINE,
    framework.ENGINE,
    xla.ENGINE,
    reference.ENGINE,
)
RAGGED: tuple[type[SegmentsEngine], ...] = (ragged.NativeSegments, triton_ragged.TritonSegments)
_OF_TASKS = {
    op: tuple(engine for engine in ENGINES if op in engine.tasks)
    for op in (DECODE, SELECT, ROUTE, SINKHORN, SINKHORN_LIMIT, LINEAR_ATTENTION, LAYER, SCORES)
}


def names() -> tuple[str, ...]:
    return tuple(engine.name for engine in ENGINES)


def _by_name(name: str, source: str) -> Engine:
    for engine in ENGINES:
        if engine.name == name:
            return engine
    raise ValueError(f"{source}: there is no engine {name!r}; the engines are {', '.join(names())}")


def forced() -> Engine | None:
    """The engine that `use` or the environment variable ANYMAX_ENGINE names, if any."""
    name = asked()
    return _by_name(name, "anymax.use" if choice.forced.get() else "ANYMAX_ENGINE") if name else None


class _Use(contextlib.ContextDecorator):
    """The context manager of `use`. It warns if it is discarded without having been entered."""

    def __init__(self, name: str) -> None:
        self.name, self.tokens = name, []
        self.idle = True

    def __enter__(self) -> None:
        self.idle = False
        self.tokens.append(choice.forced.set(self.name))

    def __exit__(self, *raised: object) -> None:
        choice.forced.reset(self.tokens.pop())

    def _recreate_cm(self) -> _Use:  # a decorated function may run in several threads, each with its own tokens
        self.idle = False
        return _Use(self.name)

    def __repr__(self) -> str:
        return f"<anymax.use({self.name!r}), which takes effect inside of a `with` statement>"

    def __del__(self) -> None:
        if self.idle:
            said = f"anymax.use({self.name!r}) alone does nothing: write `with anymax.use({self.name!r}):` and the calls inside of it"
            warnings.warn(
                f"{said}, or set ANYMAX_ENGINE={self.name} for the whole process", RuntimeWarning, stacklevel=2
            )


def use(name: str) -> contextlib.AbstractContextManager[None]:
    """A context in which one engine computes every call; a call that it refuses is an error.

    Use it to compare engines, or to find out whether one of them is at fault. It applies inside a `with` statement, to the thread that
    enters it; the environment variable `ANYMAX_ENGINE` applies to the whole process. Without `with` it only warns.

    Parameters
    ----------
    name
        "native" (the compiled CPU engine), "order" (the same for soft ranks and soft sorting), "fused" (for Fusedmax), "tabled" (for maps
        without a kernel), "triton" (GPU kernels), "framework" (torch's own softmax), "xla" (JAX) or "reference" (array-API code, which
        computes every call).

    Returns
    -------
    contextlib.AbstractContextManager[None]
        A context manager.

    Examples
    --------
    >>> with anymax.use("reference"):
    ...     anymax.softmax([0.0, 0.0])
    array([0.5, 0.5])
    """
    _by_name(name, "anymax.use")
    return _Use(name)


def _refusal(engine: Engine, op: str, mapping: Mapping, x: Any) -> str | None:
    """Why an engine can't compute an operation, with the derivatives that are asked for; None if it can."""
    learning = None if engine is reference.ENGINE or op == SLOPE else unlearned(op, mapping, x)
    return learning or engine.refuse(_asked_of_engines(op, mapping), mapping, x)


def _asked_of_engines(op: str, mapping: Mapping) -> str:
    """The operation from which `op` follows: the derivative by a parameter that scales the scores from J^T g."""
    return "vjp" if op == SLOPE and scales_scores(mapping) else op


def compiled(op: str, mapping: Mapping, x: Array) -> Engine | None:
    """The compiled engine that has an operation in one pass; None where the caller must compose it ("log_forward", "index_loss")."""
    name = asked()
    for engine in ENGINES:
        if engine.compiled and name in (None, engine.name) and _refusal(engine, op, mapping, x) is None:
            return engine
    return None


def engine_of(op: str, task: Any, x: Array) -> Engine | None:
    """The engine that computes one of the operations of tasks.py on arrays like x; None where the caller must compose it, and while
    torch.compile traces."""
    if compiling():
        return None
    name, on_gpu = choice.forced.get() or choice.environment, getattr(x, "is_cuda", False)  # `asked()`, a call less
    for engine in _OF_TASKS[op]:
        mine = engine.on_gpu == on_gpu if name is None else name == engine.name
        if mine and engine.refuse_task(op, task, x) is None:
            return engine
    return None


def choose_ragged(op: str, mapping: Mapping, x: Array, along: SegmentsAlong) -> SegmentsEngine | None:
    """The engine that computes an operation on segments of arrays like x; None if there is none, so that rows must be padded."""
    able = (engine for kind in RAGGED if (engine := kind(along)).refuse(op, mapping, x) is None)
    return next(able, None) if along.segments.known else None


def choose(op: str, mapping: Mapping | str, x: AnyArray) -> Engine:
    """The engine that computes an operation of a map on scores like x.

    It is for programs; `explain` prints the engines of all operations.

    Parameters
    ----------
    op
        "forward", "log_forward", "vjp", "log_vjp" (the gradient of log p), "loss", "index_loss" (the loss of class indices,
        with its gradient), "threshold" or "slope" (the derivative of p by a parameter, times a gradient).
    mapping
        The map, such as `anymax.Sparsemax()`, or its name.
    x
        An array of scores with the classes last; only its kind, dtype and number of classes matter, not its values.

    Returns
    -------
    Engine
        The engine; its `name` is a name that `use` takes.

    Examples
    --------
    >>> import numpy as np
    >>> with anymax.use("reference"):
    ...     anymax.choose("forward", anymax.Sparsemax(), np.zeros(3)).name
    'reference'
    """
    if op not in (*OPS, SLOPE):
        raise ValueError(f"there is no operation {op!r}; the operations are {', '.join((*OPS, SLOPE))}")
    mapping = as_mapping(mapping, "choose")
    x = asarray(x) if isinstance(x, (list, tuple, str)) else x
    only = forced()
    if only is not None:
        reason = _refusal(only, op, mapping, x)
        if reason is not None:
            raise RuntimeError(f"engine {only.name!r} was asked for and can't compute {op} of {mapping!r}: {reason}")
        return only
    return next(engine for engine in ENGINES if _refusal(engine, op, mapping, x) is None)


@check_keywords()
def explain(mapping: Mapping | str, x: AnyArray | Numbers, *, verbose: bool = False) -> Explanation:
    """Which engine computes each operation of a map on scores like x, and why the engines before it do not.

    Use it where a call is slower than you expect: with `verbose=True` it prints the reason, such as a dtype or a parameter.

    Parameters
    ----------
    mapping
        The map, such as `anymax.Sparsemax()`, or its name.
    x
        Scores with the classes last; only their kind, dtype and number of classes matter, not their values.
    verbose
        Whether to print why each engine before the chosen one does not compute the operation, too.

    Returns
    -------
    Explanation
        An `Explanation`; print it to read it. Its `rows` have the reasons in any case.

    Examples
    --------
    >>> print(anymax.explain(anymax.Sparsemax(), [2.0, 1.0]))
    Sparsemax()
      p                     ...
    """
    mapping = as_mapping(mapping, "explain")
    scores: Array = asarray(x)
    if mapping.hidden is not None:  # the engines get rows over all classes
        given = prepare(mapping, scores, -1, least=0).over_all()
        return dataclasses.replace(explain(given.mapping, given.rows, verbose=verbose), mapping=mapping)
    rows, plans = [], []
    ops = (*OPS, SLOPE) if any(name in mapping.learns for name in mapping.params()) else OPS
    only = forced()
    for op in ops if mapping.has_threshold else (o for o in ops if o != "threshold"):
        if only is not None and (refused := _refusal(only, op, mapping, scores)) is not None:
            rows.append((op, "none", ((only.name, refused),)))
            plans.append(None)
            continue
        engine = choose(op, mapping, scores)
        plans.append(engine.plan(_asked_of_engines(op, mapping), mapping, scores))
        refusals = []
        for other in ENGINES:
            if other is engine:
                break
            reason = _refusal(other, op, mapping, scores)
            refusals.append((other.name, reason or f"engine {engine.name!r} was asked for"))
        rows.append((op, engine.name, tuple(refusals)))
    gathers_all = way_of(mapping, scores, namespace(scores)) is Way.ALL
    return Explanation(mapping, tuple(rows), tuple(plans), verbose, gathers_all)


def warm_up(
    mapping: Mapping | str,
    shapes: Iterable[int] | Iterable[Iterable[int]],
    dtypes: DType | Iterable[DType] = ("float32",),
    device: Any = "cuda",
) -> None:
    """Compiles the GPU kernels that calls of a map will need, for torch.

    Use it before you capture a CUDA graph or measure latency: otherwise a kernel is compiled at its first call, which takes seconds.
    It compiles p(x), log p(x), the losses of class indices and their gradients, with a mask and without.

    Parameters
    ----------
    mapping
        The map, such as `anymax.Entmax(1.5)`.
    shapes
        The shape of the scores, with the classes last, or several shapes.
    dtypes
        The dtype of the scores, as a name or a `torch.dtype`, or several.
    device
        The GPU, as a torch device.

    Examples
    --------
    >>> anymax.kernels.warm_up(anymax.Entmax(1.5), [(4096, 1024), (8, 50_257)], ["float32", "bfloat16"])  # doctest: +SKIP
    """
    mapping = as_mapping(mapping, "warm_up")
    launch = triton.load()
    if isinstance(launch, str):
        raise RuntimeError(f"warm_up: the GPU engine can't run: {launch}")
    torch = launch.torch
    kinds = [dtypes] if isinstance(dtypes, (str, torch.dtype)) else list(dtypes)
    one = isinstance(shapes, (tuple, list)) and all(type(n) is int for n in shapes)
    sizes: list[Any] = [shapes] if one else list(shapes)
    for kind in kinds:
        dtype = getattr(torch, kind, None) if isinstance(kind, str) else kind
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"warm_up: expected dtypes such as 'bfloat16' or torch.bfloat16, got {kind!r}")
        for shape in sizes:
            shape = tuple(shape)
            if not shape or min(shape) < 1:
                raise ValueError(f"warm_up: expected shapes of scores, the classes last, got {shape}")
            mapping.check(shape[-1])
            reason = triton.ENGINE.refuse("forward", mapping, torch.empty(1, dtype=dtype, device=device))
            if reason is not None:
                raise RuntimeError(f"warm_up: the GPU engine can't compute {mapping!r}: {reason}")
            triton.warm_up(mapping, shape, dtype, device)
