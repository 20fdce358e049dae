"""Which way the rows of a call take in the CPU engine (csrc/plan.hpp), asked of the C ABI, and what is worth saving."""

import ctypes

import pytest
from abi import Call, Support, View

from anymax.kernels import library as engine

FORWARD, LOG, VJP, LOG_VJP, LOSS, LOSS_GRAD, THRESHOLD, LARGEST = range(8)
MAPS = (
    "softmax",
    "sparsemax",
    "entmax",
    "budget",
    "normmax",
    "topk",
    "topp",
    "taylor",
    "sigsoftmax",
    "perturb",
    "relu",
)
DTYPES = ("float32", "float64", "bfloat16", "float16")


@pytest.fixture(scope="module")
def library():
    path = engine.path()
    if path is None:
        pytest.skip("installed without the compiled library")
    library = ctypes.CDLL(str(path))
    library.anymax_plan.restype = library.anymax_isa.restype = ctypes.c_char_p
    library.anymax_plan.argtypes = [ctypes.POINTER(Call)]
    library.anymax_saves.restype = ctypes.c_int64
    library.anymax_saves.argtypes = [ctypes.c_int32, ctypes.c_int32, ctypes.c_double, ctypes.c_int64, ctypes.c_int64]
    return library


def plan(library, op, name, param, n, dtype="float32", saved=False, tau=False, cls=1, inner=1, **more):
    """Nothing is read through the operands: any address stands for one."""
    call = Call(
        op=op, map=MAPS.index(name), dtype=DTYPES.index(dtype), outer=4, inner=inner, n=n, param=param, nodes=16, **more
    )
    call.x = call.p = call.g = call.out = View(64, n * inner, 1, cls)
    call.support = Support(64, 64, 64, 8) if saved else Support()
    call.tau = 64 if tau else None
    said = library.anymax_plan(call)
    if said is None:
        return None
    way, _, isa = said.decode().rpartition(" ")
    assert isa == library.anymax_isa().decode()
    return way


# (what is asked, its way where lanes can be moved by a mask, its way where they can't)
TABLE = (
    ((FORWARD, "softmax", 0, 10), "tile", "tile"),
    ((FORWARD, "softmax", 0, 33), "row", "row"),
    ((FORWARD, "sparsemax", 0, 32), "tile", "tile"),
    ((FORWARD, "sparsemax", 0, 33), "batch", "tile"),
    ((FORWARD, "entmax", 1.5, 2048), "batch", "row: sweep"),
    ((FORWARD, "entmax", 1.5, 2048, "bfloat16"), "batch", "row: sweep"),
    ((FORWARD, "entmax", 1.5, 2048, "float64"), "row: sweep", "row: sweep"),
    ((FORWARD, "entmax", 1.5, 2049), *2 * ("row: sweep where most of it is a candidate, else candidates",)),
    ((FORWARD, "entmax", 4 / 3, 500, "float64"), "row: sweep", "row: sweep"),
    ((FORWARD, "entmax", 1.3, 128), "batch", "tile"),
    ((FORWARD, "entmax", 1.3, 129), "batch", "row: candidates"),
    ((FORWARD, "entmax", 1.01, 129), "row: candidates", "row: candidates"),
    ((FORWARD, "entmax", 1.0, 129), "row", "row"),
    ((FORWARD, "entmax", 3.0, 10), "row: candidates", "row: candidates"),
    ((FORWARD, "normmax", 50.0, 500), "batch", "row: candidates"),
    ((FORWARD, "normmax", 60.0, 500), "row: candidates", "row: candidates"),
    ((FORWARD, "topk", 5, 500), "batch", "row: candidates"),
    ((FORWARD, "topk", 200, 500), "row: counting", "row: counting"),
    ((FORWARD, "topp", 0.9, 500), "row: weighing", "row: weighing"),
    ((FORWARD, "budget", 3.0, 32), "tile", "tile"),
    ((FORWARD, "budget", 300.0, 500), "row: candidates", "row: candidates"),
    ((FORWARD, "perturb", 1.0, 10), "row", "row"),
    ((FORWARD, "relu", 0, 10), "row", "row"),
    ((VJP, "entmax", 1.5, 200), "dense backward", "dense backward"),
    ((VJP, "entmax", 1.5, 320), "dense backward", "dense backward"),
    ((VJP, "entmax", 1.5, 321), "row", "row"),
    ((VJP, "entmax", 1.5, 200, "float64"), "row", "row"),
    ((VJP, "entmax", 1.5, 200, "float32", True), "saved backward", "saved backward"),
    ((VJP, "entmax", 1.5, 9000, "float32", True), "saved backward", "saved backward"),
    ((VJP, "entmax", 3.0, 200, "float32", True), "row", "row"),
    ((VJP, "entmax", 3.0, 200), "row", "row"),
    ((VJP, "normmax", 1.4, 200), "row", "row"),
    ((LOSS, "softmax", 0, 128), "tile of losses", "tile of losses"),
    ((LOSS, "entmax", 1.5, 128), "batch of losses", "tile of losses"),
    ((LOSS, "entmax", 1.5, 129, "float64"), "row: candidates", "row: candidates"),
    ((LOSS, "entmax", 1.3, 500, "float32", False, True), "row: candidates", "row: candidates"),  # with a threshold
    ((LOSS_GRAD, "sparsemax", 0, 129), "row: candidates", "row: candidates"),
    ((LOSS_GRAD, "sparsemax", 0, 129, "float32", True), "saved gradient", "saved gradient"),
    ((THRESHOLD, "sparsemax", 0, 128), "tile of losses", "tile of losses"),
    ((LARGEST, "topk", 5, 500), "row", "row"),
    ((LOG, "softmax", 0, 10), "row", "row"),
)


@pytest.mark.parametrize(
    ("asked", "packs", "plain"), TABLE, ids=lambda v: "-".join(map(str, v)) if isinstance(v, tuple) else ""
)
def test_each_rule_and_its_limits(library, asked, packs, plain):
    isa = library.anymax_isa().decode()
    assert plan(library, *asked) == (packs if isa in ("avx2", "avx512") else plain)


def test_a_row_goes_alone_where_each_has_its_own_parameter(library):
    assert plan(library, FORWARD, "entmax", 1.5, 10, params=64) == "row"
    assert plan(library, FORWARD, "entmax", 1.5, 10) == "tile"


def test_a_call_that_would_be_refused_has_no_plan(library):
    assert plan(library, FORWARD, "entmax", -1.0, 10) is None
    assert plan(library, FORWARD, "taylor", 3.0, 10) is None
    assert plan(library, FORWARD, "normmax", 1.0, 10) is None
    assert plan(library, LOSS, "taylor", 2.0, 10) is None
    assert plan(library, LOG, "sparsemax", 0.0, 10) is None
    assert plan(library, LOG, "entmax", 1.0, 10) == "row"
    assert plan(library, FORWARD, "softmax", 0.0, 0) is None
    assert plan(library, LARGEST, "topk", 11.0, 10) is None
    assert plan(library, FORWARD, "taylor", 2.0, 10, params=64) is None


def test_what_is_worth_saving(library):
    def saves(op, name, param, rows, n):
        return library.anymax_saves(op, MAPS.index(name), param, rows, n)

    assert saves(FORWARD, "softmax", 0, 4096, 1000) == 0
    assert saves(FORWARD, "entmax", 1.5, 4096, 1000) == 125
    assert saves(FORWARD, "entmax", 1.5, 16, 1000) == 0  # small
    assert saves(FORWARD, "entmax", 1.5, 4096, 255) == 0  # short
    assert saves(FORWARD, "entmax", 1.4, 4096, 767) == 0
    assert saves(FORWARD, "entmax", 1.4, 4096, 768) == 96
    assert saves(FORWARD, "entmax", 1.25, 4096, 4096) == 512
    assert saves(FORWARD, "entmax", 1.2, 4096, 32000) == 0  # hardly sparse
    assert saves(FORWARD, "topk", 100, 4096, 1000) == 0
    assert saves(FORWARD, "budget", 100, 4096, 1000) == 0
    assert saves(LOSS, "softmax", 0, 8, 128) == 0  # found anew as quickly
    assert saves(LOSS, "softmax", 0, 8, 129) == 1  # its threshold
    assert saves(LOSS, "entmax", 1.5, 8, 128) == 0
    assert saves(LOSS, "entmax", 1.3, 8, 128) == 128
    assert saves(LOSS, "entmax", 1.5, 8, 32000) == 1000
    assert saves(LOSS, "perturb", 1.0, 8, 32000) == 0
    assert saves(FORWARD, "softmax", 0, 8, 0) == 0
    assert library.anymax_saves(99, 0, 0.0, 8, 8) == -1
    assert library.anymax_saves(FORWARD, 99, 0.0, 8, 8) == -1
