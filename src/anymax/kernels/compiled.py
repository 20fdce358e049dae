"""`Compiled`: the functions of the C++ engine, the module `anymax._engine`, for readers and type checkers (csrc/doors/python/)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from .._array import Array
from .._core.mapping import Mapping
from .link import Link

Map = Mapping | Link  # a link computes any call; a mapping only one for which no other engine is demanded


class Compiled(Protocol):
    """Functions on arrays return None, and have written nothing, where an argument is unusual: another kind of array or dtype, shapes that
    do not fit, a mode of torch that must see plain operations. Python then prepares the arguments, or chooses another engine."""

    ABI: int

    def forward(self, mapping: Map, x: Array, axis: int | None, mask: Any, out: Array | None, /) -> Array | None: ...

    def forward_saving(
        self, mapping: Map, x: Array, axis: int | None, mask: Any, out: Array | None, capacity: int, /
    ) -> tuple[Array, Array | None] | None:
        """p, and the memory of `NonZeros`; see `Native.forward_saving`."""
        ...

    def quick(self, mapping: Map, x: Array, axis: int | None, mask: Any, out: Array | None, /) -> Array | None:
        """`forward` of a tensor on the CPU without a gradient; for all else what the bound function `unusual` returns."""
        ...

    def log_forward(self, mapping: Map, x: Array, axis: int, mask: Any, out: Array | None, /) -> Array | None: ...

    def vjp(
        self, mapping: Map, x: Array | None, p: Array, g: Array, axis: int, saved: Array | None, number: Array | None = None, /
    ) -> Array | None:  # fmt: skip
        """J^T g. Writes to `number` the sum over the rows of `<g, dp/dparam>`."""
        ...

    def quick_backward(
        self, call: tuple[Any, ...], saved: tuple[Array | None, ...], g: Array, /
    ) -> tuple[Array, None] | None:
        """`Engine.quick_backward`."""
        ...

    def log_vjp(
        self, mapping: Map, x: Array | None, log_p: Array, g: Array, axis: int, saved: None, /
    ) -> Array | None: ...

    def loss(
        self, mapping: Map, x: Array, index: Array, value: Array, axis: int, ignored: int, reduction: int, save: bool,
        slope: Array | None = None, /,
    ) -> tuple[int, Array | None] | None:  # fmt: skip
        """Writes `value`, and to `slope` the derivative of each row's loss by the parameter; where it has no axes, their sum. Returns how
        many rows count, and the memory for `loss_grad`."""
        ...

    def slope(
        self, mapping: Map, x: Array | None, p: Array, g: Array, axis: int, saved: Array | None, value: Array | None, /
    ) -> Any:
        """Writes `<g, dp/dparam>` of each row to `value`; of `Bounded`, without `value`, returns the same by the bound of each class."""
        ...

    def loss_grad(
        self, mapping: Map, x: Array, index: Array, scale: Array, axis: int, factor: float, saved: Array | None, /
    ) -> Array | None: ...

    def threshold(self, link: Link, x: Array, tau: Array, /) -> bool | None: ...

    def largest(self, x: Array, k: int, value: Array, positions: Array, /) -> bool | None: ...

    def order(self, x: Array, out: Array, order: Array | None, strength: np.ndarray, how: int, /) -> bool | None:
        """Writes `out`, and `order` as `order.Order` has it; `strength` is float64, one number or one a row; `how`: 1 sorted scores, not
        ranks, 2 descending, 4 kl."""
        ...

    def order_vjp(
        self, x: Array | None, p: Array, g: Array, order: Array, out: Array, strength: np.ndarray, how: int, /
    ) -> bool | None: ...

    def fused(self, x: Array, strength: np.ndarray, out: Array, begins: Array | None, /) -> bool | None:
        """Writes p of Fusedmax to `out`, and `begins` as `fused.Groups` has it; `strength` is float64 with one number, or one a row."""
        ...

    def fused_vjp(
        self, x: Array, p: Array, g: Array, begins: Array, out: Array, slope: np.ndarray | None, /
    ) -> bool | None:
        """Writes J^T g to `out`, and `<g, dp / dstrength>` of each row to `slope`, float64."""
        ...

    def choose(self, x: Array, k: int, groups: int, kept: int, most: int, index: Array, /) -> bool | None:
        """Writes the ids of the k largest scores, as `selection.chosen` has them."""
        ...

    def plan(self, link: Link, x: Array, op: int, /) -> str | None: ...

    def decode(
        self, mapping: Map, x: Array, steps: np.ndarray, values: np.ndarray | None, keep: Any, u: Any, index: Any, log_p: Any,
        entropy: Any, left: Any, tau: Any, support: bool, /,
    ) -> Any:  # fmt: skip
        """Writes those from `keep` on that are not None, as `decode.Decoded` has them, and returns its `support` if that is asked for."""
        ...

    def gumbel(self, pairs: Array, out: Array, /) -> bool | None:
        """Writes `out`, as `noise.gumbel` has it."""
        ...

    def torch_uniform(self, generator: Any, out: Any, /) -> bool | None:
        """Writes what torch.rand draws from its generator on a CPU to float32 `out`, and that its state goes on."""
        ...

    def segments(
        self, link: Link, op: int, ptr: np.ndarray, order: np.ndarray | None, axis: int, x: Any, p: Any, g: Any, out: Any, index: Any,
        scale: Any, result: Any, saved: Any, slope: Any = None, /,
    ) -> bool | None:  # fmt: skip
        """Writes `out`, a number for each entry, or `result`, one for each segment, and beside that of a loss `slope`."""
        ...

    def sort_segments(
        self, index: np.ndarray, ptr: np.ndarray, order: np.ndarray | None, threads_of_torch: bool, /
    ) -> int:
        """Writes `ptr` and `order`. Returns the number of entries if they are in order already (then `order` is not written), 0 if they
        are not, and -1 - i if index i is out of range; without `order` 0 in both of these cases."""
        ...

    def linear(
        self, q: Array, k: Array, v: Array, out: Array, lengths: np.ndarray | None, below: Any, g: Any, dq: Any, dk: Any, dv: Any,
        groups: int, causal: bool, scale: float, threads: int, /,
    ) -> bool | None:  # fmt: skip
        """Writes `out` and `below`; with `g` it reads them and writes the gradients."""
        ...

    def sinkhorn(
        self, x: Array, rows: Array | None, columns: Array | None, g: Array | None, out: Array, iterations: int, temperature: float,
        tolerance: float, left: np.ndarray | None, /,
    ) -> bool | None:  # fmt: skip
        """Writes P to `out`, with the gradient `g` of P that of the scores; with a tolerance above 0 `left`, what sums of rows lack."""
        ...

    def tabled(
        self, cells: np.ndarray, numbers: np.ndarray, x: Array, g: Array | None, out: Array | None, tau: Array | None, /
    ) -> bool | None:
        """Writes `out` and `tau`; with `g` it reads probabilities and writes the gradient."""
        ...

    def ratio(
        self, weights: np.ndarray, slopes: np.ndarray | None, numbers: np.ndarray, x: Array, g: Array | None, out: Array,
        left: np.ndarray, /,
    ) -> bool | None:  # fmt: skip
        """Writes p of the scores, or with `g` the gradient, and where a row is left to the caller."""
        ...

    def bind(self, functions: dict[str, Any], /) -> None:
        """Hand over Python's functions and objects that it uses, by name."""
        ...

    def borrow_pool(self, library: str, /) -> bool:
        """Use torch's threads, from this library of torch, in calls whose pool is 1; False if it has none to lend."""
        ...

    def xla_handler(self) -> Any: ...

    def isa(self) -> str: ...

    def isas(self) -> list[str]: ...

    def set_isa(self, name: str, /) -> bool: ...

    get_num_threads: Callable[[], int]
    set_num_threads: Callable[[int], None]
