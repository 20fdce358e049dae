"""Scores, and the test of draws against probabilities."""

from __future__ import annotations

import math

import numpy as np
from kinds import readonly
from scipy import stats

from anymax.transforms import compose, minp, temperature, topk, topp

INF = math.inf
N = 20_000


def agrees(index, p):
    """Counts against probabilities: nothing of probability 0, everything within five standard deviations, chi-square."""
    counts = np.bincount(index, minlength=len(p))
    assert counts.sum() == len(index)
    assert counts[p == 0].sum() == 0
    n = len(index)
    assert (np.abs(counts - n * p) <= 5 * np.sqrt(n * p * (1 - p)) + 1e-9).all(), (counts / n, p)
    assert stats.chisquare(counts[p > 0], n * p[p > 0] / p.sum()).pvalue > 1e-6


X = readonly(
    np.array([[0.3, -0.5, 1.1, -INF, 0.2], [2.0, 1.9, -3.0, -INF, -INF], [0.0, 0.0, 0.0, 0.0, 0.0]], np.float32)
)


CUT = compose(temperature(0.7), topk(6), topp(0.9), minp(0.02))


def vocabulary(rows=6, n=40, seed=0):
    x = np.random.default_rng(seed).normal(0, 1.5, (rows, n)).astype(np.float32)
    x[:, 3] = -INF
    return x
