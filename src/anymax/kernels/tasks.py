"""The tasks of engines: operations beside p of a map and what follows from it, each with a name and options. `engine_of` has the engine."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._array import Array

# the operations; the arguments of `Engine.refuse_task` beside the array x
DECODE = "decode"  # the map: a pass of truncations, draws and log-probabilities over rows
SELECT, ROUTE = "select", "route"  # `Selection`
SINKHORN, SINKHORN_LIMIT = "sinkhorn", "sinkhorn_limit"  # `Sinkhorn`
LINEAR_ATTENTION = "linear_attention"  # the other operands, beside the queries
LAYER = "layer"  # the other operands, beside the rows of an output layer
SCORES = "scores"  # `ScoreBlock`, beside its numbers


class Groups(NamedTuple):
    """Equal blocks of the classes: only the classes of the blocks with the largest sums are chosen from."""

    count: int
    keep: int  # how many of them are chosen from
    most: int  # the sum of a group is that of so many of its largest scores


WHOLE = Groups(1, 1, 1)
# How many of the largest scores of each row, and from which classes; a plain tuple, since most calls make one.
Selection = tuple[int, Groups]


class Sinkhorn(NamedTuple):
    """The sums of matrices [..., n, m] that are asked for, [..., n] and [..., m] (None: equal shares), and how often to iterate."""

    rows: Array | None
    columns: Array | None
    iterations: int
    temperature: float


class ScoreBlock(NamedTuple):
    """The scores of an output layer for some rows and classes: numbers, and what makes scores of them."""

    numbers: Array  # [rows, classes], products of features and weights
    bias: Array | None  # [classes], which is added; in half precision the sum is rounded
    keep: Array | None  # [1 or rows, classes], False where a score is masked
    factor: Array | None  # [rows, 1], fp32: it multiplies the sum
    index: Array  # [rows], the class of each row, -1 for none, counted from the first class of the layer
    first: int  # the class of the first column
    cap: float  # of the scores, 0 for none: `cap tanh(score / cap)`


class LinearAttention(NamedTuple):
    """The options of attention with Taylor softmax of order 2 in linear time."""

    groups: int  # heads of q for each head of k and v
    scale: float
    causal: bool
    lengths: np.ndarray | None  # how many keys of each head are real
