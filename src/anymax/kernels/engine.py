"""The contract of an engine: every operation that a caller may ask for, inherited or refused by one sentence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple, NoReturn

from .._array import Array
from .._core.mapping import Mapping

# what `choose` takes and `explain` goes over
OPS = ("forward", "log_forward", "vjp", "log_vjp", "loss", "index_loss", "threshold")
BELOW = -(2**63)  # as `ignored` of an index loss: rows of any index below 0 are left out


class IndexLoss(NamedTuple):
    """The loss of class indices, single or double, reduced as was asked for; and what its gradient takes from the forward pass."""

    value: Array
    saved: Any  # for `index_loss_grad` of the same engine
    count: Any = None  # of the rows that a mean is taken over: an int, or a tensor on a GPU; None where nobody asks


class Engine(ABC):
    """Computes the operations of maps on rows, whose classes are the last axis, in the caller's dtype.

    A caller asks `refuse` first, or `kernels.choose`, which does; the operations trust the answer. Where no compiled engine has
    "log_vjp" or "index_loss", callers compose them of the others.
    """

    name: ClassVar[str]  # as `anymax.use` takes it
    ops: ClassVar[tuple[str, ...]] = OPS  # those that it has
    compiled: ClassVar[bool] = False  # True for kernels of our own, which have in one pass what others compose
    takes_mask: ClassVar[bool] = False  # True where a mask and `out` go with the scores
    takes_strides: ClassVar[bool] = False  # True where the compiled library takes arrays as they come, along any axis

    def __repr__(self) -> str:
        return f"<anymax engine {self.name}>"

    @abstractmethod
    def refuse(self, op: str, mapping: Mapping, x: Any) -> str | None:
        """Why the engine doesn't serve an operation on arrays like x; None where it does."""

    def lacks(self, op: str) -> str:
        """What `refuse` says of an operation that the engine does not have."""
        return f"it has {', '.join(self.ops)}, not {op}"

    def _refused(self, op: str) -> NoReturn:
        raise RuntimeError(f"the engine {self.name} has no {op} of its own: its callers compose it of the others")

    @abstractmethod
    def forward(self, mapping: Mapping, x: Array, mask: Array | None = None, out: Array | None = None) -> Array:
        """p(x); where `takes_mask`, `mask` (boolean, broadcast to x) leaves classes out, and `out` takes the result."""

    def forward_saving(
        self, mapping: Mapping, x: Array, mask: Array | None = None, out: Array | None = None
    ) -> tuple[Array, Any]:
        """p(x), and what `vjp` of the same engine may take as `saved`, or None."""
        return self.forward(mapping, x, mask, out), None

    def write(self, mapping: Mapping, x: Array, mask: Array | None, out: Any) -> bool:
        """Writes p(x) to `out`, which may be x itself; False, and nothing is written, where the engine can't."""
        return False

    def log_forward(self, mapping: Mapping, x: Array) -> Array | None:
        """log p(x); None where the map has no form of its own for it."""
        self._refused("log_forward")

    def vjp(self, mapping: Mapping, x: Array, p: Array, g: Array, saved: Any = None) -> Array:
        """J^T g."""
        self._refused("vjp")

    def log_vjp(self, mapping: Mapping, x: Array, log_p: Array, g: Array) -> Array:
        """The same for log p: `g - p sum g` on the classes that have a probability."""
        self._refused("log_vjp")

    def loss(self, mapping: Mapping, x: Array, p: Array, y: Array) -> Array:
        """`Omega*(x) - <x, y>`, [..., 1]; x is finite here, p = p(x)."""
        self._refused("loss")

    def index_loss(
        self,
        mapping: Mapping,
        x: Array,
        index: Array,
        *,
        save: bool,
        axis: int = -1,
        ignored: int = BELOW,
        reduction: str = "none",
    ) -> IndexLoss | None:
        """The losses for class indices, or their sum or mean, in one pass; `save`: a gradient will be asked for.

        Rows of the index `ignored`, below 0, are left out; without it those of any below 0. None where the engine does not have it in
        one pass for these arrays, this axis or this reduction, or where another index is no class.
        """
        return None

    def index_loss_grad(
        self,
        mapping: Mapping,
        x: Array,
        index: Array,
        scale: Array,
        saved: Any,
        *,
        axis: int = -1,
        ignored: int = BELOW,
        factor: float = 1.0,
    ) -> Array | None:
        """`factor scale (p - y)`, scale one a row or one for all, from what `index_loss` saved; None as there."""
        return None

    def threshold(self, mapping: Mapping, x: Array) -> Array:
        """tau of each row, [..., 1], single or double; logsumexp for softmax."""
        self._refused("threshold")

    def logsumexp(self, x: Array) -> Array:
        """The threshold of softmax, but +inf for a row with +inf."""
        self._refused("logsumexp")

    def largest(self, x: Array, k: int) -> tuple[Array, Array] | None:
        """The k largest scores of each row, the largest first, and their indices; None where the framework's own serves as well."""
        return None

    def plan(self, op: str, mapping: Mapping, x: Array) -> str | None:
        """How the engine goes about an operation on rows like x; None where it does not say."""
        return None
