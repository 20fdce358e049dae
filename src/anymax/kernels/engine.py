"""The contract of engines: every operation that a caller may use, on rows of one length or on segments (`SegmentsEngine`)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

import numpy as np

from .._array import Array, dot, like, namespace, upcast
from .._core.mapping import Mapping
from .choice import refuse_other
from .decode import Decoded, Step
from .support import NonZeros
from .tasks import LinearAttention, ScoreBlock, Selection, Sinkhorn

if TYPE_CHECKING:
    from ..segments.layout import Segments

# the operations of `choose` and `explain`
OPS = ("forward", "log_forward", "vjp", "log_vjp", "loss", "index_loss", "threshold")
SLOPE = "slope"  # the operation of maps whose arrays of parameters may be learned
WORDS = {
    "forward": "p", "log_forward": "log p", "vjp": "gradient of p", "log_vjp": "gradient of log p", "loss": "loss (soft targets)",
    "index_loss": "loss (class indices)", "threshold": "threshold", SLOPE: "gradient of a parameter",
}  # fmt: skip  # what each computes, as a user calls it
REDUCTIONS = {"none": 0, "sum": 1, "mean": 2}
BELOW = -(2**63)  # `ignored` of an index loss: leave out rows with any index below 0


class IndexLoss(NamedTuple):
    """The loss of class indices, float32 or float64, reduced or not, and what its gradient needs from the forward pass."""

    value: Array
    saved: Any  # for `index_loss_grad` of the same engine
    count: Any = None  # the number of rows in a mean: an int, a tensor on a GPU, or None
    slope: Any = None  # the derivative of each row's loss by the parameter, where it was asked for


def slope_by_scale(mapping: Mapping, name: str, x: Array, p: Array, lowest: Array) -> Array:
    """The derivative of each row's loss by a parameter that scales the scores, [..., 1], with p = p(x).

    The loss is the parameter times that of the scores divided by it. `lowest` is its value for the largest score, which loses no digits
    in a sure row.
    """
    xp = namespace(x)
    x, p = upcast(x, xp), upcast(p, xp)
    change = mapping.score_change(name, x, xp)
    assert change is not None, mapping
    lowest = xp.where(lowest == math.inf, xp.zeros_like(lowest), lowest)  # a row without classes
    return lowest[..., None] / like(mapping.params()[name], x, xp) + dot(p, change, xp)


class Engine(ABC):
    """Computes the operations of maps on rows, whose classes are the last axis, in the caller's dtype.

    A caller first calls `refuse`, or `kernels.choose`, which does; the operations do not check again. Where no compiled engine has
    "log_vjp" or "index_loss", callers compose it from other operations.
    """

    name: ClassVar[str]  # as `anymax.use` takes it
    ops: ClassVar[tuple[str, ...]] = OPS  # the operations of maps that it has
    tasks: ClassVar[tuple[str, ...]] = ()  # the others, by the names of tasks.py
    on_gpu: ClassVar[bool] = False  # whether its tasks are for tensors on a GPU, or for other arrays
    compiled: ClassVar[bool] = False  # True for our own kernels, which do in one pass what callers compose elsewhere
    takes_mask: ClassVar[bool] = False  # True where `forward` uses `mask` and `out`
    needs_saved: ClassVar[bool] = True  # False where `index_loss_grad` can do without what `index_loss` saves

    def __repr__(self) -> str:
        return f"<anymax engine {self.name}>"

    @abstractmethod
    def refuse(self, op: str, mapping: Mapping, x: Any) -> str | None:
        """Why the engine can't compute an operation on arrays like x; None if it can."""

    def lacks(self, op: str) -> str:
        """The answer of `refuse` for an operation that the engine does not have."""
        return f"it has no {WORDS[op]}, only {', '.join(WORDS[one] for one in self.ops)}"

    def _refused(self, op: str) -> NoReturn:
        raise RuntimeError(f"the engine {self.name} does not implement {op}; compose it from other operations")

    @abstractmethod
    def forward(self, mapping: Mapping, x: Array, mask: Array | None = None, out: Array | None = None) -> Array:
        """p(x). An engine with `takes_mask` leaves classes out by `mask` (boolean, broadcast to x) and writes the result to `out`."""

    def forward_saving(
        self, mapping: Mapping, x: Array, mask: Array | None = None, out: Array | None = None
    ) -> tuple[Array, Any]:
        """p(x), and the `saved` argument for `vjp` of the same engine, or None."""
        return self.forward(mapping, x, mask, out), None

    def forward_learning(self, mapping: Mapping, x: Array, mask: Array | None = None) -> tuple[Array, Any]:
        """`forward_saving` for a parameter that is learned: where p is rounded to half precision, the derivative needs more of it."""
        return self.forward_saving(mapping, x, mask)

    def forward_non_zeros(self, mapping: Mapping, x: Array, out: Array) -> tuple[Array, NonZeros | None]:
        """p(x), written to `out` where the engine can, and its non-zeros where the engine has found them."""
        return self.forward(mapping, x, out=out), None

    def write(self, mapping: Mapping, x: Array, mask: Array | None, out: Any) -> bool:
        """Writes p(x) to `out`, which may be x itself; returns False and writes nothing if the engine can't."""
        return False

    def log_forward(self, mapping: Mapping, x: Array) -> Array | None:
        """log p(x); None where the map has no formula for it other than the logarithm of p."""
        self._refused("log_forward")

    def vjp(self, mapping: Mapping, x: Array, p: Array, g: Array, saved: Any = None) -> Array:
        """J^T g."""
        self._refused("vjp")

    def slope(self, mapping: Mapping, name: str, x: Array, p: Array, g: Array, saved: Any = None) -> Array:
        """`<g, dp / d parameter>` of each row, [..., 1], or one for each class of a parameter of `per_class`; float32 or float64.

        That of a parameter with a `score_change` follows from J^T g.
        """
        xp = namespace(x)
        change = mapping.score_change(name, upcast(x, xp), xp)
        if change is None:
            self._refused(SLOPE)
        return dot(upcast(self.vjp(mapping, x, p, g, saved), xp), change, xp)

    def log_vjp(self, mapping: Mapping, x: Array, log_p: Array, g: Array) -> Array:
        """`vjp` of log p: `g - p sum g` on the classes whose probability is not 0."""
        self._refused("log_vjp")

    def loss(self, mapping: Mapping, x: Array, p: Array, y: Array) -> Array:
        """`Omega*(x) - <x, y>`, [..., 1], for finite x and p = p(x)."""
        self._refused("loss")

    def index_loss(
        self, mapping: Mapping, x: Array, index: Array, *, save: bool, axis: int = -1, ignored: int = BELOW, reduction: str = "none",
        slope: bool = False,
    ) -> IndexLoss | None:  # fmt: skip
        """The losses of class indices, or their sum or mean, in one pass; `save`: keep what the gradient needs.

        `slope` asks for the derivative of each row's loss by the parameter; an engine that has none leaves it None.

        Rows with the index `ignored`, which is below 0, are left out; by default rows with any index below 0. None where the engine
        has no one-pass loss for these arrays, this axis or this reduction, or where another index is not a class.
        """
        return None

    def loss_slope(self, mapping: Mapping, name: str, x: Array, p: Array) -> Array:
        """The derivative of each row's loss by a parameter that scales the scores, [..., 1], with p = p(x)."""
        loss = self.index_loss(mapping, x, namespace(x).argmax(x, axis=-1), save=False)
        assert loss is not None, mapping
        return slope_by_scale(mapping, name, x, p, loss.value)

    def index_loss_grad(
        self, mapping: Mapping, x: Array, index: Array, scale: Array, saved: Any, *, axis: int = -1, ignored: int = BELOW,
        factor: float = 1.0,
    ) -> Array | None:  # fmt: skip
        """`factor scale (p - y)`, with one scale or one per row, from what `index_loss` saved; None where it can't."""
        return None

    # -- arrays as the user and autograd give them, which nobody has checked: None for an unusual call, and by default for all -------------

    def quick_forward(self, mapping: Any, x: Array, axis: int | None, mask: Any, out: Array | None, /) -> Array | None:
        """p(x) along any axis."""
        return None

    def quick_saving(
        self, mapping: Any, x: Array, axis: int | None, mask: Any, out: Array | None, capacity: int, /
    ) -> tuple[Array, Array | None] | None:
        """`quick_forward`, and the memory of what `quick_vjp` reads."""
        return None

    def quick_vjp(
        self, mapping: Any, x: Array | None, p: Array, g: Array, axis: int, saved: Array | None, number: Array | None = None, /
    ) -> Array | None:  # fmt: skip
        """J^T g. Writes to `number` the derivative by a parameter that is one number for all rows."""
        return None

    def quick_backward(self, call: Any, saved: Any, g: Array, /) -> tuple[Array, None] | None:
        """The gradients of p(x) by x, and None beside them, for the call (mapping, axis) and what it saved, where that is p alone."""
        return None

    def quick_index_loss(
        self, mapping: Any, x: Array, index: Array, value: Array, axis: int, ignored: int, reduction: int, save: bool,
        slope: Array | None = None, /
    ) -> tuple[int, Array | None] | None:  # fmt: skip
        """`index_loss`: writes `value`, and returns the count and what it saved. The reductions are those of `REDUCTIONS`."""
        return None

    def quick_loss_grad(
        self, mapping: Any, x: Array, index: Array, scale: Array, axis: int, factor: float, saved: Any, /
    ) -> Array | None:
        """`index_loss_grad`."""
        return None

    def threshold(self, mapping: Mapping, x: Array) -> Array:
        """tau of each row, [..., 1], float32 or float64; logsumexp for softmax."""
        self._refused("threshold")

    def logsumexp(self, x: Array) -> Array:
        """`threshold` of softmax, except that it is +inf for a row with +inf."""
        self._refused("logsumexp")

    def largest(self, x: Array, k: int) -> tuple[Array, Array] | None:
        """The k largest scores of each row, the largest first, and their indices; None if the framework's top-k is as fast."""
        return None

    def plan(self, op: str, mapping: Mapping, x: Array) -> str | None:
        """How the engine computes an operation on rows like x, in a few words, or None."""
        return None

    # -- tasks, of which a caller gets the engine by `kernels.engine_of` -----------------------------------------------------------------

    def refuse_task(self, op: str, task: Any, x: Any) -> str | None:
        """Why the engine can't compute one of the operations of tasks.py on arrays like x; None if it can."""
        return f"it has no {op}"

    def decode(
        self,
        mapping: Mapping,
        x: Array,
        steps: tuple[Step, ...] = (),
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
    ) -> Decoded:
        """One pass over rows whose classes are last, with up to `decode.MOST` steps.

        Parameters
        ----------
        in_place
            `left` is written into x, which is contiguous fp32 or fp64; nothing else may be asked for but `keep`.
        u
            Numbers from 0 to 1, float64 [..., draws]: a class is drawn for each.
        given
            Classes to use in place of draws, int64 [..., draws].
        support
            Whether the classes that could be drawn are listed.
        """
        self._refused("decode")

    def select(self, task: Selection, x: Array) -> Array | None:
        """The ids of the k largest scores, as `selection.chosen` has them; None where it can't."""
        self._refused("select")

    def route(
        self, task: Selection, x: Array, scoring: str, bias: Array | None, *, weights: bool, normalise: bool, factor: float
    ) -> tuple[Array, Array] | None:  # fmt: skip
        """A router in one kernel: ids and weights, [..., k] each, without a derivative; None where it has no such scoring.

        scoring: "sigmoid", "sqrtsoftplus" or "softmax". bias: one number for each class. weights: whether they are asked for.
        """
        self._refused("route")

    def sinkhorn(self, task: Sinkhorn, x: Array, g: Array | None = None) -> Array:
        """P; with the gradient g of P that of the scores, for which P is iterated once more."""
        self._refused("sinkhorn")

    def sinkhorn_limit(self, task: Sinkhorn, x: Array, tolerance: float) -> tuple[Array, np.ndarray]:
        """P once the sums of all rows are within the tolerance, or the iterations are over; and for each matrix what they lack, [...]."""
        self._refused("sinkhorn_limit")

    def linear_attention(
        self, task: LinearAttention, q: Array, k: Array, v: Array, save: bool = False
    ) -> tuple[Array, Array | None]:
        """The output for q [..., heads * groups, L, D], k and v [..., heads, S, D or Dv]; with `save` the denominators, for its vjp."""
        self._refused("linear_attention")

    def linear_attention_vjp(
        self, task: LinearAttention, q: Array, k: Array, v: Array, out: Array, below: Array, g: Array, wants_q: bool, wants_k: bool
    ) -> tuple[Array | None, Array | None, Array | None]:  # fmt: skip
        """The gradients of q, k and v from the results of `linear_attention`; those of k and v are computed together."""
        self._refused("linear_attention_vjp")

    def add_products(self, out: Any, starts: Any, index: Any, value: Any, rows: Any) -> None:
        """For an output layer: out[i] += sum of `value[e] rows[index[e]]` over e from starts[i] to starts[i + 1]."""
        self._refused("add_products")

    def scale(self, a: Any, g: Any) -> None:
        """For an output layer: a *= g, for a contiguous array and a number on its device, without a pass over `a` if it is 1."""
        self._refused("scale")

    def score_terms(
        self, block: ScoreBlock, weights: Any, *, entropy: bool, best: bool
    ) -> tuple[Any, Any]:  # fmt: skip
        """For an output layer's softmax, fp32 [rows, 4]: the score of each row's class, -inf if it is not in the block; of all others here
        logsumexp, and with `entropy` that of their softmax; and with `weights`, one a class, <scores, weights>. With `best` also the class
        with the largest score of each row, counted from the first of the block; -1 for a row without classes."""
        self._refused("score_terms")

    def score_loss_grad(self, mapping: Mapping, x: Any, index: Any, scale: Any, saved: Any, out: Any) -> None:
        """Write `index_loss_grad` of rows [rows, classes] to `out`, which may be in their memory: each row then begins where it did."""
        self._refused("score_loss_grad")

    def score_slopes(self, block: ScoreBlock, out: Any, of_row: Any, weights: Any, *, mixed: bool) -> None:
        """Write the gradient in the numbers of a block to `out`, which may be their memory: by the numbers of a row [rows, 5], logsumexp of
        the others, +inf for none, a, e, b, c, it is e for the row's class, q (a - b log q) for the others, where q is their softmax; b
        counts only if `mixed`; and c times `weights` more."""
        self._refused("score_slopes")


class SegmentsAlong(NamedTuple):
    """The segments of a call, and the axis of their entries."""

    segments: Segments
    axis: int


class SegmentsEngine(Engine):
    """Computes the operations of maps on the segments of an array, without padding. `rows` is its engine for rows of one length.

    Callers get it from `kernels.choose_ragged`. Scores and probabilities have the entries along the axis of `along`; parameters of a
    map, indices and results with a number for each segment have the segments last.
    """

    rows: ClassVar[Engine]

    def __init__(self, along: SegmentsAlong) -> None:
        self.along = along

    def refuse(self, op: str, mapping: Mapping, x: Any) -> str | None:
        return refuse_other(self.rows.name) or self.rows.refuse(op, mapping, x)

    @abstractmethod
    def log_forward(self, mapping: Mapping, x: Array) -> Array:
        """log p(x)."""

    @abstractmethod
    def index_loss(
        self, mapping: Mapping, x: Array, index: Array, *, save: bool, slope: bool = False, **of_rows: Any
    ) -> IndexLoss:
        """The loss of each segment for the rank of its target, its place within the segment; 0 for one that is `LEFT_OUT`.

        `of_rows` are the options of `Engine.index_loss` that segments do not have.
        """

    def result(self, op: str, mapping: Mapping, x: Array, *target_rank: Array) -> Array:
        """The result of "forward", "log_forward", "threshold" or, with the rank of each target in its segment, "index_loss"."""
        if op == "index_loss":
            return self.index_loss(mapping, x, *target_rank, save=False).value
        method = {"forward": self.forward, "log_forward": self.log_forward, "threshold": self.threshold}[op]
        return method(mapping, x)
