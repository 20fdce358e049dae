"""What the compiler makes of the GPU kernels at their real plans: nothing spilled, wide loads, several programs at a time.

The record in benchmarks/results has it of all of them, for every target and by the oldest and the newest Triton; here it is held to the
bars, and to the sources that it was made of. Some of its kernels are compiled again.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import anymax as am
from anymax.kernels import triton as engine

ROOT = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.skipif(isinstance(engine.load(), str), reason="triton can't be loaded"),
    pytest.mark.skipif(not (ROOT / "tools").exists(), reason="the tools are in the repository only"),
    pytest.mark.filterwarnings("ignore"),  # of the compiler
]
if (ROOT / "tools").exists():
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))  # tools are no part of the package
    from tools import gpu_cases, gpu_code, gpu_record

# -- the record -----------------------------------------------------------------------------------------------------------------------

AGAIN = "make it again: python -m tools.gpu_static --check (CONTRIBUTING.md, The GPU kernels)"


@pytest.fixture(scope="module")
def rows():
    return gpu_record.load()


def test_the_record_meets_the_bars(rows):
    assert [line for row in rows for line in gpu_record.faults(row)] == []


def test_the_record_has_the_oldest_and_the_newest_triton_and_every_target(rows):
    found = {}
    for row in rows:
        found.setdefault(row.triton, set()).add(row.target)
    old = {text for text in found if gpu_record.older(text)}
    assert {".".join(text.split(".")[:2]) for text in old} == set(gpu_record.OLDER)
    (newest,) = set(found) - old
    assert found[newest] == set(gpu_record.TARGETS)
    assert gpu_record.version(newest) > max(map(gpu_record.version, old))


@pytest.fixture
def uninterpreted():
    from triton import knobs

    if knobs.runtime.interpret:
        pytest.skip("the interpreter has replaced the compiler")


def test_the_record_is_of_these_sources(rows, uninterpreted):
    assert gpu_record.stale(rows) == [], AGAIN
    text = gpu_record.PAGE.read_text(encoding="utf-8")
    assert text == "\n".join([*gpu_record.page(rows), ""]), AGAIN


def test_a_way_home_from_a_block_behind_all_others_is_no_loop():
    labels = {".L_x_0": 1, ".L_x_1": 5, ".L_x_2": 7}
    code = [
        "MOV R1, c[0x0][0x28]", "FADD R2, R2, 1", "@P0 BRA `(.L_x_0)", "BSSY B0, `(.L_x_1)", "@!P1 BRA `(.L_x_2)",
        "STG.E [R4.64], R2", "EXIT", "DADD R2, R2, R2", "BRA `(.L_x_1)",
    ]  # fmt: skip
    follow = gpu_code.flow(code, labels)
    assert follow == [[1], [2], [3, 1], [4], [5, 7], [6], [], [8], [5]]
    assert not gpu_code.reached(follow, 2, 1)  # a loop: its end is come to through its beginning alone
    assert gpu_code.reached(follow, 8, 5)
    code[8] = "BSYNC B0"
    assert gpu_code.flow(code, labels)[8] == [5]
    said = gpu_code.flow(["BRA.DIV UR4, `(.L_x_0)", "FADD", "@!UP0 BRA `(.L_x_0)", "EXIT"], labels)
    assert said == [[1, 1], [2], [3, 1], []]


class Pool:
    """In the place of processes; `made`: the jobs that it was given."""

    def __init__(self):
        self.made = []

    def imap(self, function, jobs):
        self.made = list(jobs)
        return map(function, jobs)


@pytest.mark.whole
def test_a_record_is_made_brought_up_to_date_and_told_apart_from_other_sources(
    tmp_path, monkeypatch, capsys, uninterpreted
):
    import triton

    def fake(job):
        target, key, name, place = job
        row = gpu_record.Row(**SOUND | {"target": target, "triton": triton.__version__, "key": key})
        return dataclasses.replace(gpu_record.named(row, name, place), wide_loads=64)

    def made(version, **options):
        monkeypatch.setattr(triton, "__version__", version)
        pool = Pool()
        return gpu_record.check(pool, **options), len(pool.made), capsys.readouterr().out

    monkeypatch.setattr(gpu_record, "made_of", fake)
    monkeypatch.setattr(gpu_record, "RECORD", tmp_path / "record.csv")
    monkeypatch.setattr(gpu_record, "PAGE", tmp_path / "page.md")
    everything, some = (len(gpu_record.wanted(every)) for every in (True, False))
    status, count, said = made("3.9.0", only="attention")
    assert status == 0
    assert 0 < count < some
    assert "the page is written when" in said
    status, more, said = made("3.9.0")
    assert (status, count + more) == (0, everything + 2 * some)
    assert "Triton 3.4, the oldest that a supported torch brings, is missing" in said
    assert not gpu_record.PAGE.exists()
    assert made("3.4.0")[:2] == (0, some)
    assert made("3.6.0")[:2] == (0, some)
    rows = gpu_record.load()
    assert gpu_record.stale(rows) == []
    text = gpu_record.PAGE.read_text(encoding="utf-8")
    assert text == "\n".join([*gpu_record.page(rows), ""])
    for words in (
        "## sm_90, Triton 3.9.0",
        "| 3.4.0 | sm_90 |",
        "| forward/softmax 4096x8192 bfloat16 | dense_rows p |",
    ):
        assert words in text
    assert made("3.9.0")[1] == 0
    assert made("3.7.0")[0] == 2  # the record is of a newer one
    gpu_record.save([dataclasses.replace(rows[0], key="of another plan"), *rows[1:]])
    (line,) = gpu_record.stale(gpu_record.load())
    assert line == f"Triton {rows[0].triton}, {rows[0].target}: 1 kernels are missing, 1 are of other sources"
    assert made(rows[0].triton)[:2] == (0, 1)
    assert made("3.9.0")[:2] == (0, 0)
    assert gpu_record.stale(gpu_record.load()) == []
    monkeypatch.setattr(gpu_record, "made_of", lambda job: "it does not compile")
    status, count, said = made("3.10.0")  # a new one, by which nothing compiles
    assert (status, count) == (1, everything + 2 * some)
    assert "it does not compile" in said


# -- what it is held to ---------------------------------------------------------------------------------------------------------------

SOUND = {
    "kernel": "dense_rows", "target": "sm_90", "warps": 4, "registers": 64, "stack": 0, "shared": 0, "barriers": 0, "instructions": 500,
    "fp64_in_loops": 0, "wide_loads": 8, "loads": 8, "triton": "3.9.0", "key": "", "case": "forward/some 1x2",
    "mode": "p", "plan": "1, 8, 1024", "vectors": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({}, None),
        ({"stack": 8}, "8 bytes of a thread do not fit"),
        ({"registers": 255, "warps": 8}, "holds 1 programs"),
        ({"shared": 200 << 10}, "holds 1 programs"),
        ({"fp64_in_loops": 1}, "1 fp64 instructions in loops"),
        ({"wide_loads": 4}, r"4 loads of 128 bits \(at least: 8\)"),
    ],
)
def test_a_kernel_that_misses_a_bar_is_told(fault, words, monkeypatch):
    row = gpu_record.Row(**SOUND | fault)
    said = gpu_record.faults(row)
    if words is None:
        assert said == []
        return
    (line,) = said
    assert re.search(words, line)
    one = gpu_record.Leave("^forward/some", "a test", 8, 1, 1, True)
    monkeypatch.setattr(gpu_record, "LEAVE", (one,))
    assert gpu_record.faults(row) == []
    assert gpu_record.unused([row]) == []
    assert gpu_record.unused([gpu_record.Row(**SOUND)]) == [one]


def test_a_key_follows_the_source_the_plan_and_the_types(monkeypatch, uninterpreted):
    from anymax.kernels.triton import plans

    def key(shape=(64, 8192), dtype=torch.bfloat16):
        make = lambda: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
        case = gpu_cases.Case("", lambda: engine.ENGINE.forward(am.Softmax(), make(), None, make()))
        (launch,) = gpu_cases.launched(case, "sm_90")
        return gpu_record.key_of(launch)

    first = key()
    assert key((128, 8192)) == first  # another number of rows
    assert key(dtype=torch.float32) != first
    assert key((64, 8190)) != first  # is divided by other numbers
    monkeypatch.setitem(plans.FAMILIES, "dense", dataclasses.replace(plans.FAMILIES["dense"], held=4096))
    assert key() != first
    monkeypatch.undo()
    assert key() == first
    monkeypatch.setattr(gpu_record, "words", lambda module: "other source")
    assert key() != first


def test_the_source_of_a_kernel_is_that_of_all_its_modules(tmp_path, monkeypatch):
    (tmp_path / "kernels_of_a_test").mkdir()
    for name, text in {
        "__init__": "",
        "one": "from .two import f\n\n\ndef g():\n    return f()\n",
        "two": "def f():\n    return 1\n",
    }.items():
        (tmp_path / "kernels_of_a_test" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    def words():
        gpu_record.words.cache_clear()
        return gpu_record.words("kernels_of_a_test.one")

    try:
        first = words()
        two = tmp_path / "kernels_of_a_test" / "two.py"
        two.write_text('"""What it is."""\n\ndef f():  # a comment\n    """A docstring."""\n\n    return 1\n')
        assert words() == first
        two.write_text("def f():\n    return 2\n")
        assert words() != first
    finally:
        gpu_record.words.cache_clear()


def test_a_loop_is_told_from_its_branch_back():
    """Of what nvdisasm prints: a loop over tiles, which reads memory, in a solver's."""
    text = """
.L_x_0:
        /*0000*/ FADD R1, R1, 1 ;
.L_x_1:
        /*0010*/ LDG.E.128 R4, [R2.64] ;
        /*0020*/ DADD R6, R6, R4 ;
        /*0030*/ @P0 BRA `(.L_x_1) ;
        /*0040*/ @P1 BRA `(.L_x_0) ;
        /*0050*/ EXIT ;
.L_x_2:
        /*0060*/ BRA `(.L_x_2);
        /*0070*/ NOP;
"""
    code, loops = gpu_code.listed(text)
    assert len(code) == 6
    assert loops == (gpu_code.Loop(0, 0, True), gpu_code.Loop(1, 1, False))
    assert [loop.tiles for loop in loops] == [False, True]
    assert gpu_record.Row(**SOUND).per_processor == 8


# -- compiled again -------------------------------------------------------------------------------------------------------------------

CASES = {  # case, target -> programs that a multiprocessor holds, at least
    ("forward/softmax 65536x128 bfloat16", "sm_90"): 8,
    ("forward/softmax 4096x8192 bfloat16", "sm_90"): 2,
    ("forward/entmax15 65536x128 bfloat16", "sm_90"): 8,
    ("forward/sparsemax 4096x1024 bfloat16", "sm_80"): 8,
    ("forward/entmax15 4096x8192 bfloat16", "sm_100"): 2,
    ("backward/entmax15 4096x8192 bfloat16", "sm_90"): 2,
    ("loss/entmax15 4096x8192 bfloat16", "sm_90"): 2,
    ("ragged/entmax15 up to 16 x 8 heads", "sm_90"): 8,
    ("ragged/entmax15 up to 40000 x 8 heads", "sm_90"): 1,
    ("layer/entmax15 bfloat16", "sm_90"): 1,
    ("layer/softmax bfloat16", "sm_90"): 1,
    ("layer/support bfloat16", "sm_90"): 4,
    ("attention/entmax15 d64", "sm_90"): 2,
    ("decoding/entmax15 d128", "sm_90"): 1,
}
QUICK = list(CASES)[:2]


@pytest.mark.whole(lambda name, target: (name, target) not in QUICK)
@pytest.mark.parametrize(("name", "target"), CASES)
def test_the_compilers_figures(name, target, rows, compiler):
    import triton

    kept = {(row.triton, row.target, row.key): row for row in rows}
    launches = gpu_record.launches(name)
    assert launches
    for place, launch in enumerate(launches):
        key = gpu_record.key_of(launch)
        row = gpu_record.made_of((target, key, name, place))
        assert not isinstance(row, str), row
        assert gpu_record.faults(row) == []
        assert row.per_processor >= CASES[name, target], row
        same = kept.get((triton.__version__, target, key))
        assert same in (None, dataclasses.replace(row, case=same.case if same else ""))


def test_a_kernel_that_does_not_compile_is_told(monkeypatch):
    def refuses(target, launch):
        raise RuntimeError("out of resource: registers")

    monkeypatch.setattr(gpu_record, "compiled", refuses)
    said = gpu_record.made_of(("sm_90", "key", "forward/softmax 4096x1024 bfloat16", 0))
    assert said == "forward/softmax 4096x1024 bfloat16 dense_rows sm_90: RuntimeError: out of resource: registers"


def test_the_newest_compiler_makes_no_kernel_much_longer_than_the_one_of_most_images(rows):
    """Triton decides which thread has which numbers of a tile: where a newer one decides otherwise, as 3.7 did, a kernel may grow."""
    rows = [row for row in rows if row.target == gpu_record.MAIN]
    newest = max((row.triton for row in rows), key=gpu_record.version)
    before = {row.key: row.instructions for row in rows if row.triton.startswith("3.6.")}
    longer = {
        row.name: row.instructions / before[row.key] for row in rows if row.triton == newest and row.key in before
    }
    assert len(longer) > 100
    assert [name for name, ratio in longer.items() if ratio > 1.5] == []
