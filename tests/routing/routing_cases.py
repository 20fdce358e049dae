"""Routers as data, and one oracle by NumPy in fp64 that shares no code."""

from __future__ import annotations

import math

import numpy as np

INF = math.inf


def softmax(x):
    e = np.exp(x - np.maximum(x.max(-1, keepdims=True), -1e300))
    return e / np.maximum(e.sum(-1, keepdims=True), 1e-300)


def sparsemax(x):
    def of_row(x):
        z = np.sort(x[x > -INF])[::-1]
        if not z.size:
            return np.zeros_like(x)
        size = max(i for i in range(1, len(z) + 1) if 1 + i * z[i - 1] > z[:i].sum())
        return np.maximum(x - (z[:size].sum() - 1) / size, 0)

    return np.apply_along_axis(of_row, -1, x)


VALUES = {
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "sqrtsoftplus": lambda x: np.sqrt(np.logaddexp(0, x)),
    "softmax": softmax,
    "sparsemax": sparsemax,
}


def routes(x, k, scoring="softmax", bias=0.0, by=None, groups=1, keep_groups=1, group_by=2, norm_topk_prob=False,
           routed_scaling_factor=1.0):  # fmt: skip
    """(experts, weights) [tokens, k] as the papers say it, by sorting; -1 and 0 where a token has fewer: -inf is no expert."""
    x = np.asarray(x, np.float64)
    x = np.where(np.isnan(x).any(-1, keepdims=True), -INF, x)  # a token with NaN has no expert
    v = VALUES[scoring](x)
    there = (x > -INF) & ((v > 0) | (scoring != "sparsemax"))
    key = np.where(there, v + bias if by is None else by, -INF)
    blocks = key.reshape(len(x), groups, -1)
    most = -np.sort(-blocks, -1)[..., : 1 if group_by == "max" else group_by]
    sums = np.where(most[..., 0] > -INF, np.where(most > -INF, most, 0).sum(-1), -INF)
    rank = (-sums).argsort(-1, kind="stable").argsort(-1)
    key = np.where((rank < keep_groups)[..., None], blocks, -INF).reshape(key.shape)
    best = (-key).argsort(-1, kind="stable")[:, :k]
    found = np.take_along_axis(key, best, -1) > -INF
    weight = np.where(found, np.take_along_axis(v, best, -1), 0)
    total = weight.sum(-1, keepdims=True)
    weight = weight / np.where(total > 0, total, 1) if norm_topk_prob else weight
    return np.where(found, best, -1), routed_scaling_factor * weight


def loads(x, k, b, scoring, **groups):
    """How many tokens choose each expert."""
    index, _ = routes(x, k, scoring, b, **groups)
    return np.bincount(index[index >= 0], minlength=x.shape[1])


RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 24)).astype(np.float32)
BIAS = RNG.normal(size=24).astype(np.float32) * 0.2
PAPERS = {
    "deepseek-v3": {
        "scoring": "sigmoid", "bias": BIAS, "groups": 4, "keep_groups": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    },
    "deepseek-v2": {"scoring": "softmax", "groups": 4, "keep_groups": 2, "group_by": "max", "routed_scaling_factor": 16.0},
    "three of a group": {"scoring": "sqrtsoftplus", "groups": 3, "keep_groups": 2, "group_by": 3},
    "deepseek-v4": {"scoring": "sqrtsoftplus", "bias": BIAS, "norm_topk_prob": True, "routed_scaling_factor": 1.5},
    "mixtral": {"scoring": "softmax", "norm_topk_prob": True},
    "jamba": {"scoring": "softmax"},
    "ernie": {"scoring": "softmax", "bias": BIAS * 0.1, "norm_topk_prob": True},
    "llama 4": {"scoring": "sigmoid"},
}  # fmt: skip

# scores with ties that halves hold exactly, beside biases and other scores that tie too
OF_12 = np.round(4 * np.random.default_rng(1).normal(size=12)) / 8
BY = np.round(4 * np.random.default_rng(2).normal(size=(40, 12))) / 8
TIED = {
    "k of all": {},
    "bias": {"bias": OF_12},
    "by": {"by": BY},
    "groups": {"groups": 4, "keep_groups": 2, "norm_topk_prob": True},
    "bias in groups": {"bias": OF_12, "groups": 4, "keep_groups": 2, "group_by": 3},
    "largest of groups": {"bias": OF_12, "groups": 3, "keep_groups": 1, "group_by": "max", "norm_topk_prob": True},
    "by in groups": {"by": BY, "groups": 6, "keep_groups": 5, "group_by": 2},
}
DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "int64")


def tied(dtype):
    """[40, 12], with masked experts where the dtype has -inf."""
    rng = np.random.default_rng(4)
    x = np.round(4 * rng.normal(size=(40, 12))) / 2
    if "int" in dtype:
        return np.round(x)
    x[rng.random(x.shape) < 0.3] = -INF
    x[7] = -INF
    return x


def made(words, make):
    """The words of a call, their arrays by `make`."""
    return {name: make(value) if isinstance(value, np.ndarray) else value for name, value in words.items()}
