"""Rows of scores and their layouts, for the compiled engines on CPUs and GPUs."""

from __future__ import annotations

import numpy as np
import pytest

import anymax as am

torch = pytest.importorskip("torch")


def tensor(a, dtype, device="cpu"):
    return torch.as_tensor(np.asarray(a), device=device).to(getattr(torch, dtype))


def rows(n, dtype="float32", batch=(6,), sigma=2.0, seed=0, device="cpu"):
    """Scores on a grid of 1/8, so that every dtype holds the same ones, ties among them."""
    x = np.random.default_rng([seed, n]).normal(size=(*batch, n)) * sigma
    return tensor(np.round(x * 8) / 8, dtype, device)


def reference(f, *tensors):
    """The same call by the reference in fp64."""
    with am.use("reference"):
        return f(*(t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in tensors))


MAPS = {  # one of each kernel
    "softmax": am.Softmax(), "sparsemax": am.Sparsemax(), "entmax-1.5": am.Entmax(1.5), "entmax-1.25": am.Entmax(1.25),
    "entmax-1.7": am.Entmax(1.7), "entmax-3": am.Entmax(3.0), "budget": am.Budget(3), "normmax-2": am.NormMax(2.0),
    "top-k": am.SparseSoftmax(k=5), "top-p": am.SparseSoftmax(p=0.9), "taylor": am.Taylor(2), "sigsoftmax": am.Sigsoftmax(),
}  # fmt: skip


def some(*names):
    return {name: MAPS[name] for name in names}


BIG, TINY = float(np.finfo(np.float32).max), 1e-45
EXTREME = ([BIG, -BIG, 0.0], [2.9e33], [BIG] * 3, [TINY, -TINY, 0.0], [-BIG] * 3, [1e4, 1e4 - 1, 1e4 - 2])

LAYOUTS = {
    "contiguous": lambda x: x,
    "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
    "padded": lambda x: torch.nn.functional.pad(x, (3, 4))[..., 3:-4],
    "every other class": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "classes first": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "classes in the middle": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "outer axes swapped": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "one row for all": lambda x: x[:1].expand_as(x),
}
