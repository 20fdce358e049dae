"""A router's rows: scores to the ids of the k largest values plus bias, in groups, and to their weights, in one pass."""

# pyright: reportAssignmentType=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# type checkers can't read the code that Triton traces

from __future__ import annotations

import triton
import triton.language as tl

NONE = tl.constexpr(1 << 30)  # beyond every place


@triton.jit
def value_of(x, SCORING: tl.constexpr):
    """The value of each score by itself; -inf gives 0, but for "scores", where a score is its value."""
    if SCORING == "sigmoid":
        e = tl.exp(-tl.abs(x))
        return tl.where(x < 0, e, 1.0) / (1.0 + e)
    elif SCORING == "sqrtsoftplus":
        low = x < -30.0
        y = tl.where(low, 0.0, x)
        e = tl.exp(-tl.abs(y))
        log1p = tl.where(e < 1e-4, e * (1.0 - 0.5 * e), tl.log(1.0 + e))
        return tl.where(low, tl.exp(0.5 * x), tl.sqrt(tl.maximum(y, 0.0) + log1p))
    else:
        return x


@triton.jit
def first_of(at, where, AXIS: tl.constexpr):
    """The first place at which a condition holds."""
    return tl.min(tl.where(where, at, NONE), AXIS, keep_dims=True)


@triton.jit
def router_rows(
    X, BIAS, INDEX, WEIGHT, n, size, stride, factor,
    k: tl.constexpr, groups: tl.constexpr, kept: tl.constexpr, most: tl.constexpr, SCORING: tl.constexpr, BIASED: tl.constexpr,
    NORM: tl.constexpr, WEIGHTS: tl.constexpr, G: tl.constexpr, S: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """One row. G x S lanes hold its groups, of `size` classes each; K lanes hold what is chosen."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, G)[:, None]
    inner = tl.arange(0, S)[None, :]
    at = group * size + inner
    inside = (inner < size) & (at < n)
    x = tl.load(X + row * stride + at, mask=inside, other=float("-inf")).to(tl.float32)
    nan = tl.max(tl.max((x != x).to(tl.int32), 1, keep_dims=True), 0, keep_dims=True) > 0
    x = tl.where(x != x, float("-inf"), x)
    live = x > float("-inf")
    if SCORING == "softmax":
        high = tl.max(tl.max(x, 1, keep_dims=True), 0, keep_dims=True)
        nan = nan | (high == float("inf"))
        shift = tl.where((high > float("-inf")) & (high < float("inf")), high, 0.0)
        e = tl.where(live, tl.exp(x - shift), 0.0)
        sums = tl.sum(tl.sum(e, 1, keep_dims=True), 0, keep_dims=True)
        value = e / tl.where(sums > 0, sums, 1.0)
    else:
        value = value_of(x, SCORING)
    key = x if SCORING == "softmax" and not BIASED and groups == 1 else value
    if BIASED:
        key = key + tl.load(BIAS + at, mask=inside, other=0.0).to(tl.float32)
    key = tl.where(live, key, float("-inf"))
    key = tl.where(x == float("inf"), x, key)
    if kept < groups:
        left = key
        sums = tl.max(left, 1, keep_dims=True)
        for _ in tl.static_range(most - 1):
            first = first_of(inner, left == tl.max(left, 1, keep_dims=True), 1)
            left = tl.where(inner == first, float("-inf"), left)
            more = tl.max(left, 1, keep_dims=True)
            sums = sums + tl.where(more > float("-inf"), more, 0.0)
        stays = group < 0
        for _ in tl.static_range(kept):
            best = tl.max(sums, 0, keep_dims=True)
            first = first_of(group, (sums == best) & (sums > float("-inf")), 0)
            stays = stays | (group == first)
            sums = tl.where(group == first, float("-inf"), sums)
        key = tl.where(stays, key, float("-inf"))
    # softmax of all, normalised, is softmax of the chosen scores
    CHOSEN_ALONE: tl.constexpr = SCORING == "softmax" and NORM
    taken = tl.where(live, x, 0.0) if CHOSEN_ALONE else value
    lanes = tl.arange(0, K)[None, :]
    found = tl.full([1, K], -1, tl.int32)
    weight = tl.full([1, K], 0.0, tl.float32)
    for i in range(k):
        best = tl.max(tl.max(key, 1, keep_dims=True), 0, keep_dims=True)
        first = tl.min(first_of(at, (key == best) & (best > float("-inf")), 1), 0, keep_dims=True)
        here = at == first
        there = first < NONE
        found = tl.where((lanes == i) & there, first, found)
        if WEIGHTS:
            mine = tl.sum(tl.sum(tl.where(here, taken, 0.0), 1, keep_dims=True), 0, keep_dims=True)
            weight = tl.where((lanes == i) & there, mine, weight)
        key = tl.where(here, float("-inf"), key)
    store = lanes < k
    tl.store(INDEX + row * k + lanes, tl.where(nan, -1, found).to(tl.int64), mask=store)
    if WEIGHTS:
        if CHOSEN_ALONE:
            some = found >= 0
            high = tl.max(tl.where(some, weight, float("-inf")), 1, keep_dims=True)
            weight = tl.where(some, tl.exp(weight - tl.where(high > float("-inf"), high, 0.0)), 0.0)
        if NORM:
            sums = tl.sum(weight, 1, keep_dims=True)
            weight = weight / tl.where(sums > 0, sums, 1.0)
        tl.store(WEIGHT + row * k + lanes, tl.where(nan, float("nan"), weight * factor), mask=store)
