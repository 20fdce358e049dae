"""The module `anymax.nn.MarginHead`: a classifier on the sphere; several processes may share its classes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import distributed, functional, losses, transforms
from .._array import POSITIVE, check_number, check_scalar, compiling, differentiates, is_integer, namespace, upcast
from .._core.classes import refuse_strays
from .._core.mapping import Mapping
from .._core.typing import Reduction
from ..autodiff import bridge
from ..autodiff.agreement import Agreement, described, fail_together
from ..autodiff.choose_group import as_group
from ..autodiff.group import Group
from ..distributed import ShardKeywords
from ..distributed.verbs import loss_of_kind as sharded_loss
from ..linear.verbs import margin_linear_loss
from ..losses import margins
from ..losses.margins import check_centers, nearest_centers
from .base import OfMapping, check_sizes, or_softmax

_MANY = 1 << 22  # from so many cosines on, they are not stored
_IGNORED = -2  # the index of rows that are left out, in a step with other indices; -1 is the class that a map hides


class MarginHead(OfMapping):
    """A classifier on the sphere: cosines of embeddings and class centres, a margin for the target, and the loss of a map.

    It is for embeddings that are compared by their angles (faces, speakers, products). Train with `head(embeddings, target)`, and predict
    by the largest of `head.probabilities(embeddings)`.

    With a group the gradient of the embeddings is that of the mean over the rows of all processes. DistributedDataParallel divides
    gradients by the number of processes, `size`: after it, pass `embeddings * size - (embeddings * (size - 1)).detach()`.

    It takes embeddings [N, in_features] and class indices [N], and returns the loss: one number, or [N] with `reduction="none"`; fp32 for
    half precision.

    Parameters
    ----------
    in_features
        The number of features of an embedding.
    num_classes
        The number of classes; each has a centre, a row of `weight`, or several.
    mapping
        The map of the loss, or its name; softmax by default.
    margin
        A number m, which means `margins.AM(m)`, or a margin such as `margins.ArcFace(0.5)`.
    scale
        The factor of the cosines, since scores from -1 to 1 are too small for most maps.
    group
        The processes that share the classes, as in `anymax.distributed.apply`; each has about an equal part of the centres.
        Each passes its own batch, of any size, as in data-parallel training. Processes exchange the embeddings but not the
        scores. The loss is over the rows of all processes, and is the same on each.
    sample_rate
        The share of this process's classes, from 0 to 1, that a training step uses: the classes of the batch, and others
        drawn at random (An et al., Partial FC, 2022). Evaluation uses all classes.
    sub_centers
        How many centres each class has, as in sub-center ArcFace (Deng et al. 2020): an embedding counts for the nearest of them, so
        that a class may have several clusters, one of them for wrong labels. Those of class c are the rows `c * sub_centers` and
        following of `weight`.

    Examples
    --------
    >>> import torch
    >>> from anymax import Sparsemax, margins, nn
    >>> head = nn.MarginHead(8, 5, Sparsemax(), margin=margins.ArcFace(0.3), scale=4.0)
    >>> embeddings = torch.randn(2, 8)
    >>> head(embeddings, torch.tensor([0, 3])).shape, head.probabilities(embeddings).shape
    (torch.Size([]), torch.Size([2, 5]))
    """

    prefix = "map_"  # the head itself has a `scale` and a `weight`

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        mapping: Mapping | str | None = None,
        margin: float | Callable[..., Any] = 0.35,
        scale: float = 30.0,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        group: Any = None,
        sample_rate: float = 1.0,
        sub_centers: int = 1,
    ) -> None:
        check_sizes("MarginHead", in_features=in_features, num_classes=num_classes)
        super().__init__(or_softmax(mapping), None, (1.0, 2.0))
        self.margin = margins.as_margin(margin)
        hint = "cosines lie from -1 to 1, and are multiplied by it"
        self.scale = check_number("MarginHead", "scale", scale, POSITIVE, hint)
        self.options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction}
        sample_rate = check_scalar(
            "MarginHead: sample_rate", sample_rate, lambda v: 0 < v <= 1, "a number above 0 and at most 1"
        )
        self.num_classes, self.sample_rate = num_classes, sample_rate
        self.sub_centers = check_centers("MarginHead", sub_centers)
        self.group = None if group is None else as_group("MarginHead", group, None, torch.empty(0))
        self._rank, size = (0, 1) if self.group is None else (self.group.rank, self.group.size)
        self.starts = [num_classes * i // size for i in range(size + 1)]
        self.class_start = self.starts[self._rank]
        classes = self.starts[self._rank + 1] - self.class_start
        self.weight = nn.Parameter(torch.empty(classes * self.sub_centers, in_features))
        nn.init.normal_(self.weight, std=1.0 / math.sqrt(in_features))

    def cosines(self, embeddings: Tensor) -> Tensor:
        """The cosines of the embeddings and this process's class centres, [N, classes], from -1 to 1, without the margin.

        Of several centres of a class it is that of the nearest.
        """
        return self._cosines(embeddings, self.weight)

    def _cosines(self, embeddings: Tensor, weight: Tensor) -> Tensor:
        return nearest_centers(transforms.cosine(weight)(embeddings), self.sub_centers, -1)

    @property
    def _hides(self) -> bool:
        """True if -1 is a class, which the map hides."""
        return self.mapping.hidden is not None

    @property
    def _classes(self) -> int:
        """How many classes this process has."""
        return self.weight.shape[0] // self.sub_centers

    def scores(self, embeddings: Tensor) -> Tensor:
        """The cosines times the scale, [N, classes].

        They have the order of the probabilities only if the map is monotone (not for Taylor softmax and x^2).
        """
        return self.scale * self.cosines(embeddings)

    def probabilities(self, embeddings: Tensor) -> Tensor:
        """The probabilities of this process's classes, [N, classes], without the margin.

        With a group every process must pass the same embeddings.
        """
        if self.group is None:
            return functional.apply(self.mapping, self.scores(embeddings))
        return self._agreed(embeddings, lambda _: self._part_of_probabilities(embeddings))

    def _part_of_probabilities(self, embeddings: Tensor) -> Tensor:
        shard = ShardKeywords(group=self.group, class_start=self.class_start)
        return distributed.apply(self.mapping, self.scores(embeddings), **shard)

    def forward(self, embeddings: Tensor, target: Tensor) -> Tensor:
        """The loss of embeddings [N, in_features] with the classes `target` [N], with the margin; many cosines are not stored.

        With a group the rows of all processes are one batch; `reduction="none"` returns all losses, in the order of the processes.
        """
        if self.group is not None:
            return self._agreed(embeddings, lambda sizes: self._loss_of_some_classes(embeddings, target, sizes), target)
        if self.training and self.sample_rate < 1:
            return self._loss_of_some_classes(embeddings, target)
        rows, centres = math.prod(embeddings.shape[:-1]), self.weight.shape[0]
        many = rows * centres >= _MANY and not self._hides  # the margin does not act on that class
        if isinstance(self.margin, margins.Margin) and many:
            x, unit = (nn.functional.normalize(a, dim=-1, eps=1e-8) for a in (embeddings, self.weight))
            return margin_linear_loss(
                x, unit, target, self.mapping, self.margin, self.scale, self.sub_centers, **self.options
            )
        return self._margin_loss(upcast(self.cosines(embeddings), namespace(embeddings)), target, self.options)

    def _margin_loss(self, cosines: Tensor, target: Tensor, options: dict[str, Any]) -> Tensor:
        return losses.margin_loss(
            self.mapping, cosines, target, margin=self.margin, scale=self.scale, axis=-1, **options
        )

    def _agreed(self, embeddings: Tensor, run: Callable[[list[int]], Tensor], target: Tensor | None = None) -> Tensor:
        """`run(rows of each process)`, after the processes have compared their calls; without a target all have the same rows."""
        if compiling():
            return bridge(embeddings).layers.outside_graphs(self._compared, embeddings, run, target)
        return self._compared(embeddings, run, target)

    def _compared(self, embeddings: Tensor, run: Callable[[list[int]], Tensor], target: Tensor | None) -> Tensor:
        assert self.group is not None
        agreement = Agreement("MarginHead", self.group, self.weight, room="nn.")

        def compared() -> list[int]:
            if embeddings.ndim != 2 or embeddings.shape[1] != self.weight.shape[1]:
                raise ValueError(
                    f"MarginHead: expected embeddings [N, {self.weight.shape[1]}], got the shape {tuple(embeddings.shape)}"
                )
            if target is not None:
                self._integers(embeddings, target)
            agreement.say_mapping(self.mapping)
            margin = str(self.margin) if isinstance(self.margin, margins.Margin) else "a function"
            agreement.say(
                call="a loss" if target is not None else f"probabilities of {embeddings.shape[0]} rows",
                num_classes=self.num_classes, in_features=self.weight.shape[1],
                sub_centers=self.sub_centers, margin=margin, scale=described(self.scale), **self.options,
                sample_rate=self.sample_rate if self.training else 1.0,
                embeddings=f"{'learned, ' if differentiates(embeddings) else ''}{embeddings.dtype}",
                weight=f"{'learned, ' if differentiates(self.weight) else ''}{self.weight.dtype}",
            )  # fmt: skip
            return agreement.settle(embeddings.shape[0])

        return run(fail_together(agreement, compared))

    def _loss_of_some_classes(self, embeddings: Tensor, target: Tensor, sizes: list[int] | None = None) -> Tensor:
        """The loss where this process has a part of the classes, or a step uses a part of them. sizes: the rows of each process."""
        target = self._integers(embeddings, target)
        if self.group is not None:
            assert sizes is not None
            embeddings, target = _exchanged(self.group, embeddings, target, sizes)
        left_out = self.options["ignore_index"]
        ignored, options = target == left_out, {**self.options, "ignore_index": _IGNORED}
        xp, n = namespace(target), self.num_classes
        # after the exchange, so that every process raises the error
        stray = refuse_strays("MarginHead", target, n, left_out, xp, hides=self._hides, waits=True)
        # since other classes may get the index `ignore_index` below
        target = torch.where(ignored, _IGNORED, torch.where(stray, n, target))
        weight, starts, count = self.weight, self.starts, self.sub_centers
        if self.training and self.sample_rate < 1:
            chosen, target, starts = self._sampled(target)
            weight = weight.unflatten(0, (-1, count))[chosen].flatten(0, 1) if count > 1 else weight[chosen]
        start = starts[self._rank]
        mine = target - start
        mine = torch.where((mine >= 0) & (mine < weight.shape[0] // count) & ~ignored, mine, -1)
        # no rounding between the margin and the loss
        wide = upcast(self._cosines(embeddings, weight), namespace(embeddings))
        if self.group is None:
            return self._margin_loss(wide, target, options)
        scores = self.margin(wide, mine, -1) * self.scale if weight.shape[0] else wide
        mapping = self.mapping
        shard = ShardKeywords(group=self.group, class_start=start, class_count=starts[-1])
        return sharded_loss(mapping.own_loss, mapping, scores, target, axis=-1, **shard, **options)

    def _integers(self, embeddings: Tensor, target: Tensor) -> Tensor:
        """The targets as 64-bit integers; an error unless there is one for each embedding."""
        if not isinstance(target, Tensor) or not is_integer(target):
            got = target.dtype if isinstance(target, Tensor) else type(target).__name__
            raise TypeError(f"MarginHead: target must be class indices, a tensor of integers, got {got}")
        if target.shape != embeddings.shape[:-1]:
            raise ValueError(
                f"MarginHead: embeddings of shape {tuple(embeddings.shape)} need a target of shape {tuple(embeddings.shape[:-1])}, "
                f"got {tuple(target.shape)}"
            )
        return target.long()

    def _sampled(self, target: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """(this process's classes in this step, the targets as indices among the classes of all processes in this step, where those of
        each process start).

        The classes of the batch come first; every process knows those of the others, since all have all targets.
        """
        known = target >= 0
        wanted = torch.unique(target[known])
        edges = torch.searchsorted(wanted, torch.tensor(self.starts, device=target.device)).tolist()
        starts, shift = [0], torch.zeros_like(wanted)
        for r, (low, high) in enumerate(zip(self.starts, self.starts[1:])):
            shift[edges[r] : edges[r + 1]] = starts[-1] - edges[r]
            size = max(math.ceil(self.sample_rate * (high - low)), edges[r + 1] - edges[r])
            starts.append(starts[-1] + size)
        rank = self._rank
        mine = wanted[edges[rank] : edges[rank + 1]] - self.class_start
        order = torch.rand(self._classes, device=target.device)
        order[mine] = 2.0
        others = order.argsort()[: starts[rank + 1] - starts[rank] - mine.shape[0]]
        at = torch.searchsorted(wanted, target).clamp(max=max(wanted.shape[0] - 1, 0))
        moved = at + shift[at] if wanted.shape[0] else at
        return torch.cat([mine, others]), torch.where(known, moved, target), starts

    def extra_repr(self) -> str:
        words = (
            f"{self.weight.shape[1]} -> {self.num_classes}, {super().extra_repr()}, {self.margin}, scale={self.scale}"
        )
        if self.group is not None:
            words += f", classes {self.class_start} to {self.class_start + self._classes - 1}"
        if self.sub_centers > 1:
            words += f", sub_centers={self.sub_centers}"
        return words if self.sample_rate == 1 else f"{words}, sample_rate={self.sample_rate}"

    if TYPE_CHECKING:

        def __call__(self, embeddings: Tensor, target: Tensor) -> Tensor: ...


def _exchanged(group: Group, embeddings: Tensor, target: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """The rows of all processes, which have these numbers of rows."""
    more = max(sizes) - embeddings.shape[0]
    padded = torch.cat([embeddings, embeddings.new_zeros(more, embeddings.shape[1])])
    rows = group.vary(group.stack(padded))
    targets = group.stack(torch.cat([target, target.new_zeros(more)]))
    every = [(rows[i][:n], targets[i][:n]) for i, n in enumerate(sizes)]
    return torch.cat([e for e, _ in every]), torch.cat([t for _, t in every])
