"""What the tests of the compiled engine share: the maps that it computes, rows of scores, and the bounds of errors."""

from __future__ import annotations

import numpy as np
import pytest
from cases import CASES, each, on

import anymax as am
from anymax.kernels import linked, native

if isinstance(native.load(), str):
    pytest.skip(f"no compiled library: {native.load()}", allow_module_level=True)
torch = pytest.importorskip("torch")
native.engine_for(torch.empty(0))  # the engine takes tensors in whichever test comes first


SERVED = tuple(c for c in CASES if not isinstance(linked.link_of(c.mapping), str))
each_served = each(SERVED)


def serves(op, case):
    """True if the engine has this operation of a map that it knows."""
    return native.ENGINE.refuse(op, case.mapping, torch.zeros(3)) is None


DTYPES = ("float32", "float64", "bfloat16", "float16")
SPARSE = tuple(c for c in SERVED if c.row in ("Sparsemax", "Entmax", "Budget", "NormMax", "SparseSoftmax"))


def tensor(a, dtype):
    return torch.as_tensor(np.asarray(a)).to(getattr(torch, dtype))


def rows(case, n, dtype, batch=(6,), sigma=2.0, seed=0):
    """Scores on a grid of 1/8, so that every dtype holds the same ones; no ties where the map breaks them by position."""
    rng = np.random.default_rng([seed, n])
    x = rng.normal(size=(*batch, n)) * sigma
    return tensor(np.round(x * 8) / 8, dtype)


def reference(f, *tensors):
    """The same call by the reference in fp64."""
    with am.use("reference"):
        return f(*(t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in tensors))


def bound(case, want, dtype):
    """What the reference itself is allowed, and one ulp more."""
    eps = {"float32": 2.0**-23, "float64": 2.0**-52, "bfloat16": 2.0**-8, "float16": 2.0**-10}[dtype]
    top = float(want.abs().max()) if want.numel() else 1.0
    if dtype in ("float32", "float64"):
        if case.tv is not None:
            return 2 * case.tv[dtype == "float64"] + eps * top
        return (1 + (case.ulps64 if dtype == "float64" else case.ulps)) * eps * top
    return eps * top + 4e-7


def mapped(case, dtype="float32"):
    """The case's mapping for torch; perturb-max with the nodes that this dtype gets, of which the reference in fp64 takes more."""
    mapping = on(case.mapping, torch.as_tensor)
    return mapping.replace(nodes=64 if dtype == "float64" else 32) if case.row == "PerturbMax" else mapping


def layouts(a):
    """The same numbers as they can lie in memory."""
    wide = np.repeat(a, 2, -1)
    yield from (a, np.asfortranarray(a), wide[..., ::2], np.ascontiguousarray(a[..., ::-1])[..., ::-1])
    yield np.ascontiguousarray(np.moveaxis(a, 0, -1)).transpose(a.ndim - 1, *range(a.ndim - 1))


FEW = [am.Softmax(), am.Sparsemax(), am.Entmax(1.5), am.Entmax(2.0), am.Entmax(1.0)]
