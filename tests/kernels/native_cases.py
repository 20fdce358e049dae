"""What the tests of the compiled engine share: the maps that it computes, its operations with their oracles, and the table of both."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from cases import CASES, each, on
from row_cases import reference, rows, tensor, torch

import anymax as am
from anymax import kernels
from anymax.kernels import linked, native

if isinstance(native.load(), str):
    pytest.skip(f"no compiled library: {native.load()}", allow_module_level=True)
native.engine_for(torch.empty(0))  # the engine takes tensors in whichever test comes first

ENGINE, PLAIN = native.ENGINE, kernels.reference.ENGINE
DTYPES = ("float32", "float64", "bfloat16", "float16")
EPS = {"float32": 2.0**-23, "float64": 2.0**-52, "bfloat16": 2.0**-8, "float16": 2.0**-10}
SERVED = tuple(c for c in CASES if not isinstance(linked.link_of(c.mapping), str))
FEW = [am.Softmax(), am.Sparsemax(), am.Entmax(1.5), am.Entmax(2.0), am.Entmax(1.0)]
each_served = each(SERVED)


def named(*ids):
    return tuple(c for c in SERVED if c.id in ids)


def of_rows(*names):
    return tuple(c for c in SERVED if c.row in names)


def serves(op, case):
    """True if the engine has this operation of a map that it knows."""
    return ENGINE.refuse(op, case.mapping, torch.zeros(3)) is None


SPARSE = of_rows("Sparsemax", "Entmax", "Budget", "NormMax", "SparseSoftmax")
LOSSES = tuple(c for c in SERVED if c.mapping.facts.has_potential and c.mass == 1.0 and serves("index_loss", c))


def bound(case, want, dtype):
    """What the reference itself is allowed, and one ulp more."""
    top = float(want.abs().max()) if want.numel() else 1.0
    if dtype in ("float32", "float64"):
        wide = dtype == "float64"
        if case.tv is not None:
            return 2 * case.tv[wide] + EPS[dtype] * top
        return (1 + (case.ulps64 if wide else case.ulps)) * EPS[dtype] * top
    return EPS[dtype] * top + 4e-7


def mapped(case, dtype="float32"):
    """The case's mapping for torch; perturb-max with the nodes that this dtype gets, of which the reference in fp64 takes more."""
    mapping = on(case.mapping, torch.as_tensor)
    return mapping.replace(nodes=64 if dtype == "float64" else 32) if case.row == "PerturbMax" else mapping


def close(got, want, atol):
    """Infinities are equal, and NaN is near nothing."""
    torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=atol)


def layouts(a):
    """The same numbers as they can lie in memory."""
    wide = np.repeat(a, 2, -1)
    yield from (a, np.asfortranarray(a), wide[..., ::2], np.ascontiguousarray(a[..., ::-1])[..., ::-1])
    yield np.ascontiguousarray(np.moveaxis(a, 0, -1)).transpose(a.ndim - 1, *range(a.ndim - 1))


# -- the scores -----------------------------------------------------------------------------------------------------------------


def normal(n, dtype, f=lambda z: z, count=3):
    return tensor(f(np.random.default_rng(n).normal(size=(count, n))), dtype)


def masked(n, dtype):
    x = rows(n, dtype, sigma=1.0)
    x[0, 0] = -torch.inf
    return x


SCORES = {
    "grid": rows,
    "gentle": lambda n, dtype: rows(n, dtype, sigma=1.0),
    "masked": masked,
    "targets": lambda n, dtype: rows(n, dtype, batch=(9 if n <= 70 else 5,)),
    "flat": lambda n, dtype: normal(n, dtype, lambda z: z * 0.02),
    "peaked": lambda n, dtype: normal(n, dtype, lambda z: z * 8.0),
    "nearly flat": lambda n, dtype: normal(n, dtype, lambda z: z * 1e-4),
    "the same": lambda n, dtype: normal(n, dtype, lambda z: z * 0.0),
    "two kinds": lambda n, dtype: normal(n, dtype, lambda z: (z > 0) * 0.1),
    "a ramp": lambda n, dtype: normal(n, dtype, lambda z: np.linspace(0.0, 0.1, z.size).reshape(z.shape)),
    "one above a shelf": lambda n, dtype: normal(n, dtype, lambda z: z * 0.01 + (np.arange(z.shape[-1]) == 7)),
}  # fmt: skip
ALIKE = ("flat", "nearly flat", "the same", "two kinds", "a ramp", "one above a shelf")


# -- the operations: what the engine gives, what the reference in fp64 gives, and how far apart they may be -----------------------


def gradient(x):
    return rows(x.shape[-1], str(x.dtype)[6:], batch=x.shape[:-1], seed=9)


def taught(mapping, x, part):
    """The loss of each row, or the gradient of their sum; the fifth row is to be ignored."""
    free = x.clone().requires_grad_()
    t = torch.arange(len(x)) % x.shape[-1]
    t[4] = -100
    loss = am.fenchel_young(mapping, free, t, reduction="none")
    return torch.autograd.grad(loss.sum(), free)[0] if part else loss.detach()


def finite_log_vjp(mapping, x, g):
    """By autograd through the reference's log p, of which the infinite ones take no part."""
    free = x.clone().requires_grad_()
    log_p = am.log_apply(mapping, free)
    return torch.autograd.grad(torch.where(torch.isfinite(log_p), log_p, 0.0), free, g)[0].nan_to_num()


def engines_log_vjp(mapping, x):
    log_p = ENGINE.log_forward(mapping, x)
    return ENGINE.log_vjp(mapping, x, log_p, torch.where(torch.isfinite(log_p), gradient(x), 0.0))


def relative(**eps):
    return lambda case, want, dtype: eps[dtype] * max(1.0, float(want.abs().max()))


def of_a_loss(case, want, dtype):
    eps = {"float32": 1e-6, "float64": 1e-12, "float16": 2e-3}[dtype]
    return eps if case.tv is None else max(eps, 20 * case.tv[dtype == "float64"])


class Op(NamedTuple):
    got: Callable  # (mapping, x)
    want: Callable  # (mapping, x), in fp64
    near: Callable  # (case, want, dtype)


OPS = {
    "forward": Op(ENGINE.forward, lambda m, x: reference(lambda t: am.apply(m, t), x), bound),
    "mass": Op(lambda m, x: ENGINE.forward(m, x).double().sum(-1), lambda m, x: torch.ones(x.shape[:-1]), lambda *_: 2e-6),
    "vjp": Op(
        lambda m, x: ENGINE.vjp(m, x, ENGINE.forward(m, x), gradient(x)),
        lambda m, x: reference(lambda *t: PLAIN.vjp(m, *t), x, ENGINE.forward(m, x), gradient(x)),
        relative(float32=3e-6, float64=1e-13, bfloat16=2e-2),
    ),
    "log_forward": Op(ENGINE.log_forward, PLAIN.log_forward, lambda *_: 1e-11),
    "log_vjp": Op(engines_log_vjp, lambda m, x: reference(lambda *t: finite_log_vjp(m, *t), x, gradient(x)), lambda *_: 1e-9),
    "threshold": Op(
        ENGINE.threshold, lambda m, x: reference(lambda t: am.threshold(m, t, keepdims=True).tau, x), lambda *_: 1e-10
    ),
    "index_loss": Op(
        lambda m, x: taught(m, x, 0),
        lambda m, x: reference(lambda t: taught(m, t, 0), x),
        lambda case, want, dtype: of_a_loss(case, want, dtype) * max(1.0, float(want.max())),
    ),
    "index_loss_grad": Op(lambda m, x: taught(m, x, 1), lambda m, x: reference(lambda t: taught(m, t, 1), x), of_a_loss),
}  # fmt: skip


# -- the table ----------------------------------------------------------------------------------------------------------------------


class Cell(NamedTuple):
    op: str
    scores: str
    case: object
    dtype: str
    n: int
    least: float  # the oracle is no more exact than that
    soon: bool  # in the short battery

    def __str__(self):
        return f"{self.op}-{self.scores}-{self.case.id}-{self.dtype}-{self.n}"


# of each kind of kernel the maps whose rows go by themselves
FIRST = named(
    "softmax", "sparsemax", "entmax-1", "entmax-1.1", "entmax-4/3", "entmax-1.5", "entmax-3", "entmax-array-1.75", "budget-2",
    "budget-2.5", "bounded-1-1.5", "normmax-2", "normmax-4", "taylor-2", "sigsoftmax", "ratio-relu", "sparse_softmax-k2",
    "sparse_softmax-k5", "sparse_softmax-p0.9", "perturb_max-normal",
)  # fmt: skip
F32, F64, BF16, F16 = DTYPES
WITH_LOG = of_rows("Softmax", "Sigsoftmax", "SparseSoftmax")
WITH_A_LEVEL = tuple(c for c in SERVED if c.mapping.has_threshold and c.row != "PerturbMax" and serves("threshold", c))


class Sweep(NamedTuple):
    ops: tuple
    scores: tuple
    cases: tuple
    dtypes: tuple
    lengths: tuple
    soon: dict  # {dtype: lengths} in the short battery, of these maps:
    first: tuple = FIRST
    least: float = 0.0  # in fp64 the oracle is no more exact than that

    def cells(self):
        for op, scores, dtype, n, case in itertools.product(
            self.ops, self.scores, self.dtypes, self.lengths, self.cases
        ):
            if case.mass <= n:  # else there are fewer classes than the budget
                soon = case in self.first and n in self.soon.get(dtype, ())
                yield Cell(op, scores, case, dtype, n, self.least if dtype == F64 else 0.0, soon)


NORMED = of_rows("Entmax", "NormMax", "Sparsemax")
TABLE = (
    Sweep(
        ("forward",), ("grid",), SERVED, DTYPES, (1, 2, 5, 8, 17, 33, 128, 129, 1000, 2049, 5000),
        {F32: (2, 17, 33, 1000, 2049), F64: (2, 5, 17, 128, 5000), BF16: (2, 128), F16: (1, 5000)},
    ),
    Sweep(("forward",), ("flat", "peaked"), SERVED, (F32, F64), (3000,), {F32: (3000,)}),
    Sweep(("forward",), ALIKE, SPARSE, (F32, F64), (100, 1500, 20_000), {F32: (1500,)}, least=1e-14),
    Sweep(("mass",), ALIKE, NORMED, (F32, F64), (100, 1500, 20_000), {F32: (1500,)}),
    Sweep(
        ("vjp",), ("gentle",), SERVED, (F32, F64, BF16), (3, 8, 40, 300, 3000), {F32: (3, 40, 3000), F64: (8,), BF16: (300,)}
    ),
    Sweep(("log_forward", "log_vjp"), ("masked",), WITH_LOG, (F64,), (3, 100, 3000), {F64: (3, 100, 3000)}),
    Sweep(("threshold",), ("grid",), WITH_A_LEVEL, (F64,), (60,), {F64: (60,)}, WITH_A_LEVEL),
    Sweep(
        ("index_loss", "index_loss_grad"), ("targets",), LOSSES, (F32, F64, F16), (2, 9, 70, 700, 4000),
        {F32: (70, 4000), F64: (2, 70), F16: (9, 700)}, (*FIRST, *named("entmax-1.25")),
    ),
)  # fmt: skip
CELLS = tuple(cell for sweep in TABLE for cell in sweep.cells())


def holds(cell):
    """The one assertion of all cells."""
    op, mapping = OPS[cell.op], mapped(cell.case, cell.dtype)
    x = SCORES[cell.scores](cell.n, cell.dtype)
    got, want = op.got(mapping, x), op.want(mapping, x)
    assert cell.op == "mass" or got.dtype == x.dtype
    close(got, want, max(op.near(cell.case, want, cell.dtype), cell.least))
