"""The support of rows whose classes are split over processes: each of them gathers the scores of its own classes of the support."""

from __future__ import annotations

from typing import Any, NamedTuple

from .._array import Array, Namespace, counts, take, total, upcast
from .._core.rows import with_a_class
from ..autodiff import bridge
from ..likelihood.support import padded, place_among, sized_support
from ..linear.layer import Layer


class SupportPart(NamedTuple):
    """The classes of each row's support that lie on this process, and the row's own class among them."""

    classes: Array  # [rows, width + 1], by their places on this process; the last one is empty
    there: Array  # True where there is one
    here: Array  # [rows, 1], True if the row's own class lies on this process
    at: Array  # [rows, 1], its place in `classes`: the last one if it is not in the support
    count: int  # of the classes of all processes
    width: int  # of the widest support of a row over all processes, and 1 more

    @classmethod
    def of(
        cls, who: str, layer: Layer, index: Array, support: Any, start: Any, count: int, known: bool, xp: Namespace
    ) -> SupportPart:
        """index: [rows, 1], counted over all processes. start: this process's first class. known: it is a number, as in torch."""
        n, (ids, offsets) = layer.classes, sized_support(who, layer.x, layer.rows, count, support, xp)
        classes, there = padded(
            who, (layer.rows,), count, ids, offsets, xp
        )  # the same on all processes, as are its errors
        width = classes.shape[-1]
        classes, local = classes - start, index - start
        there = there & (classes >= 0) & (classes < n)
        if known:  # the classes of this process come first, and no more columns are gathered than it needs
            most = int(xp.max(total(counts(there, xp), xp))) if layer.rows else 0
            first = xp.argsort(~there, axis=-1, stable=True)[:, : most + 1]
            classes, there = take(classes, first, xp), take(there, first, xp)
        at = place_among(classes, there, local, xp)
        return cls(
            xp.where(there, classes, xp.zeros_like(classes)), there, (local >= 0) & (local < n), at, count, width
        )

    def part(self, where: slice) -> SupportPart:
        """The part of these rows."""
        rows = (self.classes[where, ...], self.there[where, ...], self.here[where, ...], self.at[where, ...])
        return SupportPart(*rows, self.count, self.width)

    def scores(self, layer: Layer, xp: Namespace) -> Array:
        """The scores of these classes, -inf where there is none; no other row of the weight has a gradient."""
        if not layer.classes:
            return with_a_class(upcast(layer.scores(), xp))
        s = bridge(layer.x).layers.gathered(layer, self.classes)
        return xp.where(self.there, s, -xp.inf * xp.ones_like(s))
