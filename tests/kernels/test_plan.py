"""Which way the rows of a call take in the CPU engine (csrc/plan.hpp), asked of the C ABI, and what is worth saving."""

import ctypes
import re
from pathlib import Path

import pytest
from abi import Call, Support, View

from anymax.kernels import library as engine

FORWARD, LOG, VJP, LOG_VJP, LOSS, LOSS_GRAD, THRESHOLD, LARGEST = range(8)
MAPS = "softmax sparsemax entmax budget normmax topk topp taylor sigsoftmax perturb relu bounded softpick".split()
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
    return way.partition(" (")[0]


# (what is asked, its way where lanes can be moved by a mask, its way where they can't)
TABLE = (
    ((FORWARD, "softmax", 0, 10), "tile: all classes", "tile: all classes"),
    ((FORWARD, "softmax", 0, 33), "row: all classes", "row: all classes"),
    ((FORWARD, "sparsemax", 0, 32), "tile: all classes", "tile: all classes"),
    ((FORWARD, "sparsemax", 0, 33), "batch: candidates", "tile: all classes"),
    ((FORWARD, "entmax", 1.5, 4096), "batch: candidates", "row: all classes"),
    ((FORWARD, "entmax", 1.5, 4096, "bfloat16"), "batch: candidates", "row: all classes"),
    ((FORWARD, "entmax", 1.5, 2048, "float64"), "row: all classes", "row: all classes"),
    ((FORWARD, "entmax", 1.5, 4097), *2 * ("row: all classes or candidates",)),
    ((FORWARD, "entmax", 4 / 3, 500, "float64"), "row: all classes", "row: all classes"),
    ((FORWARD, "entmax", 1.3, 128), "batch: candidates", "tile: all classes"),
    ((FORWARD, "entmax", 1.3, 129), "batch: candidates", "row: candidates"),
    ((FORWARD, "entmax", 1.01, 129), "row: candidates", "row: candidates"),
    ((FORWARD, "entmax", 1.0, 129), "row: all classes", "row: all classes"),
    ((FORWARD, "entmax", 3.0, 10), "row: candidates", "row: candidates"),
    ((FORWARD, "normmax", 50.0, 500), "batch: candidates", "row: candidates"),
    ((FORWARD, "normmax", 60.0, 500), "row: candidates", "row: candidates"),
    ((FORWARD, "topk", 5, 500), "batch: candidates", "row: candidates"),
    ((FORWARD, "topk", 200, 500), "row: all classes", "row: all classes"),
    ((FORWARD, "topp", 0.9, 500), "row: all classes or candidates", "row: all classes or candidates"),
    ((FORWARD, "budget", 3.0, 32), "tile: all classes", "tile: all classes"),
    ((FORWARD, "budget", 300.0, 500), "row: candidates", "row: candidates"),
    ((FORWARD, "perturb", 1.0, 10), "row: all classes", "row: all classes"),
    ((FORWARD, "relu", 0, 10), "row: all classes", "row: all classes"),
    ((FORWARD, "softpick", 1e-8, 10), "row: all classes", "row: all classes"),
    ((FORWARD, "bounded", 1.5, 1000), "row: all classes or candidates", "row: all classes or candidates"),
    ((VJP, "entmax", 1.5, 200), "batch: all classes", "batch: all classes"),
    ((VJP, "entmax", 1.5, 320), "batch: all classes", "batch: all classes"),
    ((VJP, "entmax", 1.5, 321), "row: all classes", "row: all classes"),
    ((VJP, "entmax", 1.25, 1023), "batch: all classes", "batch: all classes"),
    ((VJP, "entmax", 1.25, 1024), "row: all classes", "row: all classes"),
    ((VJP, "entmax", 1.25, 1000, "bfloat16"), "row: all classes", "row: all classes"),
    ((VJP, "entmax", 1.5, 200, "float64"), "row: all classes", "row: all classes"),
    ((VJP, "entmax", 1.5, 200, "float32", True), "batch: saved support", "batch: saved support"),
    ((VJP, "entmax", 1.5, 9000, "float32", True), "batch: saved support", "batch: saved support"),
    ((VJP, "entmax", 3.0, 200, "float32", True), "row: saved support", "row: saved support"),
    ((VJP, "entmax", 3.0, 200), "row: all classes", "row: all classes"),
    ((VJP, "normmax", 1.4, 200), "row: all classes", "row: all classes"),
    ((LOSS, "softmax", 0, 128), "tile: all classes", "tile: all classes"),
    ((LOSS, "entmax", 1.5, 128), "batch: candidates", "tile: all classes"),
    ((LOSS, "entmax", 1.5, 129, "float64"), "row: candidates", "row: candidates"),
    ((LOSS, "entmax", 1.3, 500, "float32", False, True), "batch: candidates", "row: candidates"),  # with a threshold
    ((LOSS, "entmax", 1.5, 500, "bfloat16"), "batch: candidates", "row: candidates"),
    ((LOSS, "topp", 0.9, 500), *2 * ("row: all classes or candidates",)),
    ((LOSS, "topp", 0.9, 500, "float32", False, True), *2 * ("row: candidates",)),
    ((FORWARD, "topk", 20, 100), "batch: all classes", "tile: all classes"),
    ((LOSS_GRAD, "sparsemax", 0, 129), "row: candidates", "row: candidates"),
    ((LOSS_GRAD, "sparsemax", 0, 129, "float32", True), "row: saved support", "row: saved support"),
    ((THRESHOLD, "sparsemax", 0, 128), "tile: all classes", "tile: all classes"),
    ((LARGEST, "topk", 5, 500), "row: all classes", "row: all classes"),
    ((LOG, "softmax", 0, 10), "tile: all classes", "tile: all classes"),
    ((LOG, "softmax", 0, 129), "row: all classes", "row: all classes"),
    ((LOG, "softmax", 0, 32, "float64"), "tile: all classes", "row: all classes"),
    ((LOG, "softmax", 0, 64), "tile: all classes", "row: all classes"),
    ((LOG, "softmax", 0, 65, "float64"), "row: all classes", "row: all classes"),
    ((LOSS, "entmax", 1.3, 10), "batch: candidates", "row: candidates"),
    ((VJP, "entmax", 1.5, 200, "bfloat16"), "batch: all classes", "batch: all classes"),
    ((LOG, "entmax", 1.0, 10), "tile: all classes", "tile: all classes"),
    # these would be refused
    *(
        (asked, None, None)
        for asked in (
            (FORWARD, "entmax", -1.0, 10), (FORWARD, "taylor", 3.0, 10), (FORWARD, "normmax", 1.0, 10), (LOSS, "taylor", 2.0, 10),
            (LOG, "sparsemax", 0.0, 10), (FORWARD, "softmax", 0.0, 0), (LARGEST, "topk", 11.0, 10),
        )
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "packs", "plain"), TABLE, ids=lambda v: "-".join(map(str, v)) if isinstance(v, tuple) else ""
)
def test_each_rule_and_its_limits(library, asked, packs, plain):
    isa = library.anymax_isa().decode()
    assert plan(library, *asked) == (packs if isa in ("avx2", "avx512") else plain)


def test_rows_with_parameters_of_their_own(library):
    assert plan(library, FORWARD, "entmax", 1.5, 10, params=64) == "each row by the rule of its parameter"
    assert plan(library, FORWARD, "entmax", 1.5, 10) == "tile: all classes"
    assert plan(library, FORWARD, "taylor", 2.0, 10, params=64) is None


SAVED = (  # operation, map, parameter, rows, classes -> how many numbers of a row are worth saving
    ((FORWARD, "softmax", 0, 4096, 1000), 0),
    ((FORWARD, "entmax", 1.5, 4096, 1000), 125),
    ((FORWARD, "entmax", 1.5, 16, 1000), 0),  # small
    ((FORWARD, "entmax", 1.5, 4096, 320), 0),  # short
    ((FORWARD, "entmax", 1.5, 4096, 321), 40),
    ((FORWARD, "entmax", 1.4, 4096, 1023), 0),
    ((FORWARD, "entmax", 1.4, 4096, 1024), 128),
    ((FORWARD, "entmax", 1.25, 4096, 4096), 512),
    ((FORWARD, "entmax", 1.2, 4096, 32000), 0),  # hardly sparse
    ((FORWARD, "topk", 100, 4096, 1000), 0),
    ((FORWARD, "budget", 100, 4096, 1000), 0),
    ((LOSS, "softmax", 0, 8, 128), 0),  # found anew as quickly
    ((LOSS, "softmax", 0, 8, 129), 1),  # its threshold
    ((LOSS, "entmax", 1.5, 8, 128), 0),
    ((LOSS, "entmax", 1.3, 8, 128), 128),
    ((LOSS, "entmax", 1.5, 8, 32000), 1000),
    ((LOSS, "perturb", 1.0, 8, 32000), 0),
    ((FORWARD, "softmax", 0, 8, 0), 0),
    ((99, "softmax", 0.0, 8, 8), -1),
    ((FORWARD, 99, 0.0, 8, 8), -1),
)


@pytest.mark.parametrize(
    ("asked", "numbers"), SAVED, ids=lambda v: "-".join(map(str, v)) if isinstance(v, tuple) else ""
)
def test_what_is_worth_saving(library, asked, numbers):
    op, name, *rest = asked
    assert library.anymax_saves(op, MAPS.index(name) if name in MAPS else name, *rest) == numbers


def test_the_whole_decision_is_told(library):
    call = Call(op=FORWARD, map=MAPS.index("normmax"), dtype=0, outer=4, inner=1, n=20, param=1.5, nodes=16)
    call.x = call.out = View(64, 20, 1, 1)
    isa = library.anymax_isa().decode()
    assert library.anymax_plan(call).decode() == f"tile: all classes (norm, 1 to 128 classes) {isa}"
    call.param, call.map = 1.0, MAPS.index("entmax")
    assert library.anymax_plan(call).decode() == f"tile: all classes (exponential, 1 to 32 classes) {isa}"


def test_the_limits_stand_in_one_file():
    """A length at which something changes is a constant of csrc/limits.hpp, or of plan.hpp where it is counted in vectors."""
    number = r"(\d\d+|\d+ \* )"
    length = r"\b(n|rows|classes|entries|elements|bytes|grain)\b"
    limit = re.compile(
        rf"{length}( \* \d+)? (<|>|<=|>=) {number}|(?<![-+*/] )\b\d\d+ (<|>|<=|>=) {length}|\bn \* \d+ (<|>)"
    )
    source = Path(__file__).parents[2] / "csrc"
    lines = {
        f.relative_to(source).as_posix(): f.read_text().splitlines()
        for f in sorted(source.rglob("*.[hc]pp"))
        if f.name != "limits.hpp" and f.parent.name != "wasm"
    }
    assert {"shapes", "units", "decode", "perturb", "doors", "doors/python", "core", "links", "linear"} <= {
        str(Path(name).parent) for name in lines
    }
    found = [(name, line.strip()) for name, all_lines in lines.items() for line in all_lines if limit.search(line)]
    assert found == []
