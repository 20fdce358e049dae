"""The contract of a bridge: every operation on the arrays of one framework, and its parts for segments and output layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from .. import _array, kernels
from .._array import Array, as_dtype, namespace, quiet, upcast
from .._core.mapping import Mapping
from .._core.providers import providers
from ..kernels.engine import BELOW
from ..kernels.reference import ENGINE as reference

if TYPE_CHECKING:
    from ..likelihood.softmax_plain import Terms
    from ..linear.bridge import LayerBridge


BRIDGES: dict[type, Bridge] = {}  # by the kinds of array that a loaded bridge names


class Bridge(ABC):
    """Calls the engines for arrays of one framework, with its derivatives. `bridge(x)` chooses it.

    These operations are on rows of scores, with the classes last, in the caller's dtype, and on maps that hide no class (`Rows.over_all`).
    Higher rooms register a function that returns their part for a framework; the part is imported on first use.
    """

    framework: ClassVar[str]  # "numpy", "torch" or "jax"
    kinds: ClassVar[tuple[type, ...]] = ()  # the kinds of array that `quick` takes

    @abstractmethod
    def apply(self, mapping: Mapping, x: Array, mask: Array | None = None) -> Array:
        """p(x). The caller passes a mask only if `masks` returned True."""

    def quick(self) -> Callable[..., Array | None] | None:
        """A function of (mapping, x, axis, mask, out) that gives p(x), or None for an unusual call; None if there is none.

        It takes any x of `kinds` and the arguments as the user gave them, but no tuple for a mapping.
        """
        return None

    def compiling(self) -> Callable[[], bool] | None:
        """The fastest function that tells whether torch.compile traces; None if it does not trace arrays of this framework."""
        return None

    def masks(self, mapping: Mapping, x: Array) -> bool:
        """True if the engine for this call accepts a mask next to the scores."""
        return False

    def write(self, mapping: Mapping, x: Array, mask: Array | None, out: Any) -> bool:
        """Write p(x) to `out`; return False, and write nothing, if no engine can."""
        return False

    def log(self, mapping: Mapping, x: Array) -> Array | None:
        """log p(x); None if the map has no formula for it."""
        return (kernels.compiled("log_forward", mapping, x) or reference).log_forward(mapping, x)

    def log_p(self, mapping: Mapping, x: Array) -> Array:
        """log p(x), by the map's formula for it or as the logarithm of p."""
        out = self.log(mapping, x)
        if out is not None:
            return out
        xp = namespace(x)
        p = self.apply(mapping, upcast(x, xp))
        with quiet(p):
            out = _array.log(p, xp)
        return as_dtype(out, x.dtype, xp)

    def threshold(self, mapping: Mapping, x: Array) -> Array:
        """tau of each row, [..., 1], single or double, without a derivative."""
        engine = None if _array.compiling() else kernels.compiled("threshold", mapping, x)
        return (engine or reference).threshold(mapping, x)

    @abstractmethod
    def loss(self, mapping: Mapping, x: Array, y: Array) -> Array:
        """`Omega*(x) - <x, y>`, [..., 1], for a distribution y."""

    def reduces(self, x: Array) -> bool:
        """True for scores whose losses `index_loss` computes along any axis, with their sum or mean and an index to ignore."""
        return False

    def index_loss(
        self, mapping: Mapping, x: Array, index: Array, axis: int = -1, ignored: int = BELOW, reduction: str = "none"
    ) -> Array | None:
        """The loss of class indices, fp32 or fp64, by an engine that computes it in one pass. Rows with a negative index are left out.

        None if no engine does, or if an index is no class: the caller then composes the loss, or raises the error.
        """
        return None

    def recomputed(self, function: Callable[[int], Array]) -> Callable[[int], Array]:
        """The function, checkpointed: it keeps no intermediate results and computes them again for the gradient."""
        return function

    # -- the parts of rooms above -------------------------------------------------------------------------------------------------

    @property
    def segments(self) -> Callable[..., Array | None]:
        """A function of (op, mapping, x, along, *target_rank): an operation of engines on the segments of x (`SegmentsEngine.result`).

        None if no engine has it; the caller then pads the rows, whose operations have derivatives. Thresholds have no derivative.
        """
        return providers.segments_unpadded(self.framework)

    _layers: LayerBridge | None = None

    @property
    def layers(self) -> LayerBridge:
        """The operations on output layers, whose scores are computed a part at a time."""
        # functools.cached_property has a lock in Python 3.11, which torch.compile can't trace
        layers = self._layers
        if layers is None:
            layers = self._layers = providers.layer_bridge(self.framework)
        return layers

    @property
    def terms(self) -> Callable[..., Terms]:
        """A function of (x, index, *, scale, entropy, rest): log p of classes under softmax(scale x), its entropy, log p of the others."""
        return providers.softmax_terms(self.framework)

    @property
    def divergence(self) -> Callable[[Array, Array, float], Array]:
        """A function of (scores of a student, of a teacher, beta): `likelihood.divergence.divergence_rows` of their softmaxes."""
        return providers.softmax_divergence(self.framework)
