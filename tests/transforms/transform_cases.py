"""Scores and transforms for the transforms' tests."""

from __future__ import annotations

import math

import numpy as np
import pytest
from kinds import readonly

from anymax.transforms import (
    compose,
    cosine,
    dry,
    dynamic_temperature,
    epsilon_cutoff,
    eta,
    logit_bias,
    mask,
    mink,
    minp,
    noise,
    normalize,
    pless,
    prior,
    repetition_penalty,
    scalable,
    sequence_bias,
    softcap,
    temperature,
    toph,
    topk,
    topnsigma,
    topp,
    typical,
    xtc,
)

INF = math.inf


def scores(n=9, rows=60, seed=0, dtype=np.float32, ties=True):
    """Rows with many ties, masked entries, one masked altogether and one of a single entry."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-3, 4, (rows, n)) / 2 if ties else rng.normal(0, 2, (rows, n))
    x = x.astype(dtype)
    x[rng.random(x.shape) < 0.2] = -INF
    x[0] = -INF
    x[1, 1:] = -INF
    return readonly(x)


ALL = {
    "temperature": temperature(2.0),
    "temperature[]": temperature(np.array([[2.0], [1.0], [0.5]])),
    "mask": mask(np.array([True] * 4 + [False])),
    "prior": prior(np.linspace(-1, 1, 5), np.linspace(1, 2, 5)),
    "l1": normalize("l1"),
    "l2": normalize("l2"),
    "max": normalize("max"),
    "standard": normalize("standard"),
    "temperature 0": temperature(0),
    "topk": topk(3),
    "topk[]": topk(np.array([[3], [1], [2]]), min_keep=2),
    "topk by": topk(3, by=np.array([0.5, 0.5, -1.0, 2.0, 0.0])),
    "topk of groups": topk(2, by=np.linspace(1, -1, 5), groups=5, keep_groups=3, group_by="max"),
    "topp": topp(0.8),
    "minp": minp(0.1),
    "topnsigma": topnsigma(1.5),
    "scalable": scalable(0.7, 1.2, 0.1),
    "softcap": softcap(1.5),
    "cosine": cosine(np.random.default_rng(0).normal(size=(5, 5))),
    "noise": noise("gumbel", 0.5, generator=7),
    "topp 3": topp(0.3, min_keep=3),
    "minp 3": minp(0.9, min_keep=3),
    "typical": typical(0.6, min_keep=2),
    "epsilon": epsilon_cutoff(0.2),
    "eta": eta(0.3, min_keep=2),
    "xtc": xtc(0.15, 1.0, generator=7),
    "pless": pless(),
    "pless norm": pless(norm=True, min_keep=2),
    "toph": toph(0.6),
    "toph 3": toph(0.3, min_keep=3),
    "mink": mink(1.0),
    "mink 3": mink(0.0, min_keep=3),
    "dry": dry([0, 2, 4, 2, 0, -1, 2], 0.5, 1.5, 1),
    "dynamic": dynamic_temperature(0.5, 2.0, 1.3),
    "penalty": repetition_penalty([0, 2, 2, -1], 1.3, 0.2, 0.1),
    "bias": logit_bias({1: 0.5, 3: -2}),
    "bias[]": logit_bias(np.linspace(-1, 1, 5)),
    "sequences": sequence_bias([4, 2, 0, -1], {(2, 0, 1): -INF, (4,): -1.5}),
    "compose": compose(temperature(0.7), topk(4), normalize("l2")),
}
everyone = pytest.mark.parametrize("name", ALL)
