"""torch: chooses the method that computes an output layer."""

from __future__ import annotations

import enum
import math

import array_api_compat.torch as xp
import torch

from .._array import known, wide_dtype
from .._core.mapping import Mapping
from .._core.separable import Separable
from .._core.ways import Way, way_of
from . import torch_blocks
from .job import Job, RowLoss, RowTerms
from .torch_blocks import BlockSize, holds_scores, rows_in_memory, sizes_of
from .torch_groups import rows_of_group, runs_eagerly, transforms_learn

Tensor = torch.Tensor

# fewer rows in a group do not pay: adding up the weight's gradient takes longer than computing the scores again
_LEAST_ROWS = 24


class LayerMethod(enum.Enum):
    """How to compute an output layer; the value says which scores are held at a time, and what their gradient takes."""

    AHEAD = "all {all} scores of {rows} rows at a time, with their gradient in the forward pass"
    GROUPS = "all {all} scores of {rows} rows at a time, computed again for the gradient"
    SOFTMAX = "the scores of {classes} classes and {rows} rows at a time, computed again for the gradient"
    LIKELY = (
        "the scores of {classes} classes and {rows} rows at a time; if few classes of each row are above least=, only these have a "
        "gradient, else all, computed again"
    )
    CANDIDATES = (
        "the scores of {classes} classes and {rows} rows at a time; each row keeps those that may have a probability, and only these "
        "have a gradient"
    )

    def words(self, job: Job, ahead: int | None) -> str:
        """Its value, with the sizes of the job. ahead: as in `choose`."""
        rows, classes, _ = BlockSize.of(job.layer, job.chunk)
        if self is LayerMethod.GROUPS:
            rows = rows_of_group(job)
        elif self is LayerMethod.AHEAD and ahead is not None:
            rows = ahead
        words = self.value
        if self is LayerMethod.SOFTMAX and holds_scores(job.layer, job.chunk):
            words = words.replace("computed again", "held")
        return words.format(all=job.layer.classes, rows=rows, classes=classes)


def choose(job: Job, ahead: int | None = None) -> LayerMethod:
    """The method that takes least time. ahead: the result of `rows_ahead`, if the caller wants no more than the sum of all results."""
    if job.invariant:
        return LayerMethod.GROUPS if ahead is None else LayerMethod.AHEAD
    layer, per_row = job.layer, job.per_row
    x, softmax = layer.x, layer.mapping.is_softmax
    full_precision, gpu = x.dtype is wide_dtype(x, torch), torch_blocks.on_gpu(x)
    # All three products of all scores take less time than one of them and the candidates. Measured on an H200 in bf16, with 4,096 rows
    # and features and 32,000 classes: from all scores, with torch's cross-entropy, the loss and its gradients take 4.5 ms. They took 9.5
    # to 15.5 ms with Triton kernels that computed scores and used them at once: these multiplied at 165 TFLOP/s, torch's products at 700
    # to 800. That is why scores come from torch's products on a GPU too.
    three_products = gpu and not full_precision and job.chunk is None
    likely = isinstance(per_row, RowLoss) and bool(per_row.min_probability) and not three_products
    all_scores = LayerMethod.GROUPS
    if ahead is not None:
        all_scores = LayerMethod.AHEAD
        if job.reference is not None:
            return all_scores
        if softmax:
            least_time = (full_precision or gpu) and not likely
        else:
            least_time = full_precision and not gpu and ahead * layer.classes <= sizes_of(x).group
        if least_time:
            return all_scores
    if not layer.rows or per_row.needs_all_scores(layer) or not runs_eagerly(layer, job.class_weight):
        return all_scores
    if softmax:
        return LayerMethod.LIKELY if likely else LayerMethod.SOFTMAX
    several = isinstance(per_row, RowTerms) and job.target is not None and job.target.shape[1] > 1
    candidates = not several and not three_products and layer.factor is None and _few_candidates(layer.mapping, x)
    return LayerMethod.CANDIDATES if candidates else all_scores


def rows_ahead(job: Job) -> int | None:
    """How many rows `LayerMethod.AHEAD` takes at a time.

    None where there is no gradient to compute, where too few rows of scores fit into memory, or where the caller says `chunk`.
    """
    layer = job.layer
    rows = layer.rows
    if (
        (job.chunk is not None and not job.invariant)
        or not rows
        or not runs_eagerly(layer, job.target, job.class_weight, reference=job.reference)
    ):
        return None
    if not job.recorded() or transforms_learn(job):
        return None
    if any(
        each.weight.dtype is torch.float16 for each in job.layers
    ):  # too narrow for a gradient before the caller's factor
        return None
    if job.invariant:
        return rows_of_group(job)
    step = rows_in_memory(*job.layers)
    if step < min(rows, _LEAST_ROWS):
        return None
    return -(-rows // -(-rows // step))  # groups of the same size


def _few_candidates(mapping: Mapping, x: Tensor) -> bool:
    """True if a row has few candidates: they lie within a known distance of its maximum, or the map keeps a number of classes."""
    if way_of(mapping, x, xp) is not Way.CANDIDATES or not mapping.sums_to_one:
        return False
    if mapping.parts.most_kept is not None:
        return True
    # to read parameters on a GPU would wait
    if not isinstance(mapping, Separable) or not all(map(known, mapping.params().values())):
        return False
    mapping = mapping.frozen()
    one = torch.ones_like(next(iter(mapping.params().values()), torch.ones(1)))
    if mapping.ceiling(one, xp) is not None:
        return False
    reach = mapping.slope(one, xp) - mapping.slope(0.0 * one, xp)
    return bool(((reach > 0) & (reach < math.inf)).all())
