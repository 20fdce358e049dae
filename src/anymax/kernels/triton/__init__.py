"""The GPU engine: row kernels in Triton for torch tensors on CUDA and ROCm. Triton is imported with the first such tensor.

Each family of maps has one kernel, with the link as a compile-time name: `separable` (sparsemax, entmax, budget, normmax), `truncated`
(top-k, top-p), `dense` (softmax, sigsoftmax, Taylor), `perturb`; and there are `backward` and `slope`. The kernels compute in fp32 on fp32,
bf16 and fp16, with any strides and without a copy for a mask. Under TRITON_INTERPRET=1 `anymax.use("triton")` runs on the CPU, slowly, for
tests.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from typing import Any

from ..._array import Array, is_jax, is_torch, nan_outside
from ..._core.mapping import Mapping, scales_scores
from ..._random.nodes import NODES
from .. import arrays
from .._rows import disjoint
from ..choice import asked
from ..engine import BELOW, Engine, IndexLoss
from ..link import KINDS, SOFTMAX, SPARSE, Link
from ..linked import found_link, link_of
from ..tasks import LAYER, ROUTE, SCORES, SELECT, SINKHORN, ScoreBlock, Selection, Sinkhorn
from . import limits

_MOST_SERVED = 1024
_served: dict[Any, bool] = {}  # see `Triton.quick`


@functools.lru_cache(maxsize=1)
def load() -> Any:
    """The module that launches the kernels, or a sentence that says why there is none."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton), so torch's own operations are used on this device"
    try:
        return importlib.import_module(f"{__name__}.launch")
    except Exception as error:  # whatever a half-installed triton raises
        return f"triton can't be loaded ({type(error).__name__}: {error})".splitlines()[0]


def _interpreted() -> bool:
    """True where Triton's interpreter runs the CPU's calls, for tests: TRITON_INTERPRET is set and the caller names this engine."""
    if asked() != Triton.name:
        return False
    launch = load()
    return not isinstance(launch, str) and launch.triton.knobs.runtime.interpret


def triton_link(mapping: Mapping) -> Link | str:
    """The link of a mapping as these kernels take it, or a sentence that says why it has none."""
    link = link_of(mapping)
    if isinstance(link, str):
        return link
    link = limits.taken(link, mapping.name)
    if isinstance(link, Link) and link.kind == "perturb_max" and not link.nodes:
        return link._replace(nodes=NODES)
    return link


def refuse_map(op: str, mapping: Mapping) -> str | None:
    """Why the kernels can't compute an operation of a map; None if they can, for the tensors that they take."""
    return limits.refuse(op, triton_link(mapping))


def refuse_attention(mapping: Mapping) -> str | None:
    """Why the attention kernels can't take a map; None if they can."""
    known = limits.ATTENTION
    if mapping.kernel in known:
        return None
    return f"it has no kernel for {mapping.name}, but for {', '.join(known[:-1])} and {known[-1]}"


def prepared(mapping: Mapping) -> tuple[Any, Link]:
    launch, link = load(), triton_link(mapping)
    assert not isinstance(launch, str), launch
    assert not isinstance(link, str), link
    if link.params is not None and link.kind != "entmax":  # whose kernels find an alpha out of range; the others, NaN
        link = link._replace(params=nan_outside(link.params, mapping.ranges[str(KINDS[link.kind].parameter)]))
    return launch, link


def _backward(mapping: Mapping, logs: bool, x: Array, p: Array, g: Array, saved: Any = None) -> Array:
    launch, link = prepared(mapping)
    out = sys.modules["torch"].empty_like(p)
    launch.backward(link, logs, x, p, g, out, saved)
    return out


def _apart(mapping: Mapping, x: Array, mask: Array | None, out: Array) -> bool:
    """True where `out` has a place for each entry and shares no memory with an operand, except with x if their strides agree."""
    if any(n > 1 and not s for n, s in zip(out.shape, out.stride())):
        return False
    same = out.data_ptr() == x.data_ptr() and out.stride() == x.stride()
    read = [a for a in (mask, *mapping.params().values()) if is_torch(a)]
    return all(disjoint(out, a) for a in (read if same else [x, *read]))


def _refuse_place(x: Any) -> str | None:
    """Why the kernels can't take an array where it is; None if they can."""
    if not is_torch(x):
        if is_jax(x):
            return "it takes torch; on a GPU, JAX compiles the formula itself"
        return f"it takes torch tensors on a GPU, these scores are of {type(x).__module__.split('.')[0]}"
    if x.device.type != "cuda" and not (x.device.type == "cpu" and _interpreted()):
        return f"it takes tensors on a GPU (CUDA, ROCm), these are on {x.device}"
    return None


class Triton(Engine):
    name = "triton"
    ops = ("forward", "log_forward", "vjp", "log_vjp", "index_loss", "threshold", "slope")
    tasks = (SELECT, ROUTE, SINKHORN, LAYER, SCORES)
    compiled = takes_mask = on_gpu = True

    def refuse(self, op: str, mapping: Mapping, x: Any) -> str | None:
        if reason := _refuse_place(x):
            return reason
        if op not in self.ops:
            return self.lacks(op)
        reason = refuse_map(op, mapping) or arrays.refuse_tensor(x, x.device.type, limits.DTYPES)
        params = None if reason else found_link(mapping).params
        if params is not None and is_torch(params):
            reason = arrays.refuse_tensor(params, params.device.type, ("float64", "int64", "int32", *limits.DTYPES))
        if reason is not None:
            return reason
        launch = load()
        return launch if isinstance(launch, str) else None

    def quick(self, op: str, mapping: Mapping, *tensors: Array) -> bool:
        """True where it takes an eager call on these plain tensors on a GPU, alike in dtype and device: what `refuse` says, kept."""
        x = tensors[0]
        if asked() not in (None, Triton.name) or any(a.is_neg() or a.layout is not x.layout for a in tensors):
            return False
        link = link_of(mapping)
        if isinstance(link, str) or link.params is not None:
            return False
        key = op, link, x.dtype, x.layout, x.device
        served = _served.get(key)
        if served is None:
            if len(_served) >= _MOST_SERVED:
                _served.clear()
            _served[key] = served = self.refuse(op, mapping, x) is None
        return served

    def forward(self, mapping: Mapping, x: Array, mask: Array | None = None, out: Array | None = None) -> Array:
        launch, link = prepared(mapping)
        p = sys.modules["torch"].empty_like(x) if out is None else out
        launch.run("p", link, x, mask=mask, out=p)
        return p

    def forward_saving(
        self, mapping: Mapping, x: Array, mask: Array | None = None, out: Array | None = None
    ) -> tuple[Array, Any]:
        """p(x), and for a sparse map of long rows the lanes with the support, so that the backward reads p and g only there."""
        launch, link = prepared(mapping)
        if out is not None or link.kind not in SPARSE:
            return self.forward(mapping, x, mask, out), None
        return launch.p_saving(link, x, mask)

    def write(self, mapping: Mapping, x: Array, mask: Array | None, out: Any) -> bool:
        if self.refuse("forward", mapping, out) is not None or not _apart(mapping, x, mask, out):
            return False
        self.forward(mapping, x, mask, out)
        return True

    def log_forward(self, mapping: Mapping, x: Array) -> Array:
        launch, link = prepared(mapping)
        out = sys.modules["torch"].empty_like(x)
        launch.run("log", link, x, out=out)
        return out

    def vjp(self, mapping: Mapping, x: Array, p: Array, g: Array, saved: Any = None) -> Array:
        return _backward(mapping, False, x, p, g, saved)

    def slope(self, mapping: Mapping, name: str, x: Array, p: Array, g: Array, saved: Any = None) -> Array:
        """In fp32, from p alone: it does not need what a forward saved."""
        if scales_scores(mapping):
            return super().slope(mapping, name, x, p, g, saved)
        launch, link = prepared(mapping)
        out = launch.numbers(p, *p.shape[:-1], 1)
        launch.slope(link, p, g, out)
        return out

    def log_vjp(self, mapping: Mapping, x: Array, log_p: Array, g: Array) -> Array:
        return _backward(mapping, True, x, log_p, g)

    def index_loss(
        self, mapping: Mapping, x: Array, index: Array, *, save: bool, axis: int = -1, ignored: int = BELOW, reduction: str = "none",
        slope: bool = False,
    ) -> IndexLoss | None:  # fmt: skip
        """In fp32; an index that is no class makes the loss NaN."""
        if index.device != x.device or (axis != -1 and mapping.params()):
            return None
        index, ignored = (index.clamp(min=-1), -1) if ignored == BELOW else (index, ignored)
        launch, link = prepared(mapping)
        return IndexLoss(*launch.loss(link, x, index, ignored, reduction, axis, save))

    def index_loss_grad(
        self, mapping: Mapping, x: Array, index: Array, scale: Array, saved: Any, *, axis: int = -1, ignored: int = BELOW,
        factor: float = 1.0,
    ) -> Array | None:  # fmt: skip
        launch, link = prepared(mapping)
        assert saved is not None
        index, ignored = (index.clamp(min=-1), -1) if ignored == BELOW else (index, ignored)
        return launch.loss_grad(link, x, index, scale, saved, ignored, axis, factor)

    def threshold(self, mapping: Mapping, x: Array) -> Array:
        """tau of each row; NaN for a row with NaN or +inf."""
        launch, link = prepared(mapping)
        tau = launch.numbers(x, *x.shape[:-1], 1)
        launch.run("tau", link, x, value=tau)
        return tau

    def logsumexp(self, x: Array) -> Array:
        launch = load()
        assert not isinstance(launch, str), launch
        out = launch.numbers(x, *x.shape[:-1], 1)
        launch.run("logsumexp", SOFTMAX, x, value=out)
        return out

    def refuse_task(self, op: str, task: Any, x: Any) -> str | None:
        if op not in self.tasks:
            return super().refuse_task(op, task, x)
        if reason := _refuse_place(x):
            return reason
        launch = load()
        if isinstance(launch, str):
            return launch
        dtypes = limits.DTYPES if op != SINKHORN else ("float32",)
        for a in (x, *task) if op == LAYER else (x,):
            if reason := arrays.refuse_tensor(a, x.device.type, dtypes):
                return reason
        if op in (LAYER, SCORES):
            return None
        return _refuse_matrices(task, x) if op == SINKHORN else _refuse_rows(task, x)

    def select(self, task: Selection, x: Array) -> Array:
        return _part("router").choose(x, *task)[0]

    def route(
        self, task: Selection, x: Array, scoring: str, bias: Array | None, *, weights: bool, normalise: bool, factor: float
    ) -> tuple[Array, Array] | None:  # fmt: skip
        if scoring not in _part("router").SCORINGS:
            return None
        return _part("router").choose(x, *task, scoring, bias, weights, normalise, factor)

    def sinkhorn(self, task: Sinkhorn, x: Array, g: Array | None = None) -> Array:
        x, g = x.detach().contiguous(), None if g is None else g.contiguous()
        return _part("sinkhorn_kernels").run(x, g, task.iterations, task.temperature)

    def add_products(self, out: Any, starts: Any, index: Any, value: Any, rows: Any) -> None:
        _part("layer").add_products(out, starts, index, value, rows)

    def scale(self, a: Any, g: Any) -> None:
        _part("layer").scale(a, g)

    def score_terms(
        self, block: ScoreBlock, weights: Any, *, entropy: bool, best: bool
    ) -> tuple[Any, Any]:  # fmt: skip
        return _part("layer").terms(block, weights, entropy, best)

    def score_loss_grad(self, mapping: Mapping, x: Any, index: Any, scale: Any, saved: Any, out: Any) -> None:
        launch, link = prepared(mapping)
        launch.loss_grad(link, x, index.clamp(min=-1), scale, saved, -1, -1, out=out)

    def score_slopes(self, block: ScoreBlock, out: Any, of_row: Any, weights: Any, *, mixed: bool) -> None:
        _part("layer").slopes(block, out, of_row, weights, mixed)


def _part(name: str) -> Any:
    """A module of this folder that loads Triton."""
    return importlib.import_module(f"{__name__}.{name}")


def _refuse_rows(task: Selection, x: Array) -> str | None:
    """Why the kernel of routers can't take these rows; None if it can."""
    if not x.ndim or not 1 <= task[0] <= x.shape[-1]:
        return "it chooses from 1 to all classes of rows"
    router = _part("router")
    if router.takes(x, *task):
        return None
    return f"it takes up to {router.MOST_CLASSES} classes, k and groups up to {router.MOST_CHOSEN}, group_by up to {router.MOST_ADDED}"


def _refuse_matrices(task: Sinkhorn, x: Array) -> str | None:
    """Why the kernels can't take these matrices; None if they can: many of 4 x 4, one a thread, as hyper-connections mix by."""
    if tuple(x.shape[-2:]) != (4, 4):
        return f"on a GPU it takes matrices of 4 x 4, not {x.shape[-2]} x {x.shape[-1]}"
    return "on a GPU it takes equal sums" if task.rows is not None or task.columns is not None else None


ENGINE = Triton()


def warm_up(mapping: Mapping, shape: tuple[int, ...], dtype: Any, device: Any) -> None:
    """Runs each operation of the mapping once on contiguous scores of this shape, with and without a mask."""
    torch = sys.modules["torch"]
    x = torch.zeros(shape, dtype=dtype, device=device)

    def has(op: str) -> bool:
        return refuse_map(op, mapping) is None

    with torch.no_grad():
        for mask in (None, torch.ones(shape[-1], dtype=torch.bool, device=device)):
            ENGINE.forward(mapping, x, mask)
            same = x.clone()
            ENGINE.forward(mapping, same, mask, same)
            p, saved = ENGINE.forward_saving(mapping, x, mask)
        ENGINE.vjp(mapping, x, p, x, saved)
        ENGINE.vjp(mapping, x, p, x)
        if has("slope"):
            ENGINE.slope(mapping, str(KINDS[prepared(mapping)[1].kind].parameter), x, p, x)
        if has("log_forward"):
            log_p = ENGINE.log_forward(mapping, x)
            if has("log_vjp"):
                ENGINE.log_vjp(mapping, x, log_p, x)
        if prepared(mapping)[1].kind == "softmax":
            ENGINE.logsumexp(x)
        if has("index_loss"):
            index = torch.zeros(shape[:-1], dtype=torch.int64, device=device)
            for save in (False, True):
                loss = ENGINE.index_loss(mapping, x, index, save=save, ignored=-100, reduction="mean")
            assert loss is not None
            for scale in (loss.value, loss.value.expand(shape[:-1])):
                ENGINE.index_loss_grad(mapping, x, index, scale, loss.saved, ignored=-100)
        if has("threshold"):
            ENGINE.threshold(mapping, x)
