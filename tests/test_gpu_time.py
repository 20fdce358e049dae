"""The model of the GPU kernels' times: lines counted in Triton's interpreter, instructions from the compiler's listing."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
if not (ROOT / "tools" / "gpu_time.py").exists():
    pytest.skip("the tools are in the repository only", allow_module_level=True)
pytest.importorskip("torch")
pytest.importorskip("triton")
sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]

from tools import gpu_static, gpu_time

FILE = "here.py"
SOURCE = """
def kernel(x):
    a = load(
        x
    )
    for t in range(9):
        b = a + t
        if b:
            a = deeper(b)
    return a

def deeper(x):
    while x:
        x = halved(x)
    return x
"""


@pytest.fixture
def here(monkeypatch, tmp_path):
    (tmp_path / FILE).write_text(SOURCE)
    monkeypatch.setattr(gpu_time, "HOME", tmp_path)
    gpu_time.source.cache_clear()
    yield
    gpu_time.source.cache_clear()


def test_lines_of_a_source_are_those_of_its_statements(here):
    begins, loops, functions = gpu_time.source(FILE)
    assert [begins[line] for line in (3, 4, 5, 7, 9)] == [3, 3, 3, 7, 9]
    assert [(loop.line, list(loop.lines), loop.body) for loop in loops] == [(6, [7, 8, 9], (7, 8)), (13, [14], (14,))]
    assert (functions[9], functions[14]) == ("kernel", "deeper")


def chain(*lines):
    return tuple((FILE, line) for line in lines)


HITS = {
    chain(3): 1.0,
    chain(6): 10.0,
    chain(7): 9.0,
    chain(8): 9.0,
    chain(9): 2.0,
    chain(9, 13): 6.0,
    chain(9, 14): 4.0,
}


def test_turns_of_a_loop_are_counted_by_the_statements_of_its_body(here):
    loops = gpu_time.source(FILE)[1]
    assert gpu_time.turns(FILE, (), loops[0], HITS) == 9.0
    assert gpu_time.turns(FILE, chain(9), loops[1], HITS) == 4.0
    assert gpu_time.turns(FILE, chain(3), loops[1], HITS) == 0.0


def test_what_is_not_come_to_does_not_run(here):
    assert gpu_time.run_by(chain(9), HITS) == 2.0
    assert gpu_time.run_by(chain(10), HITS) == 0.0  # of a function that was entered
    assert (
        gpu_time.run_by(chain(7, 14), HITS) == 9.0
    )  # of one that the interpreter did not enter there: as often as the call
    assert gpu_time.run_by((), HITS) is None


def test_instructions_count_as_often_as_their_lines_run(here):
    code = ["MOV", "MUFU.EX2", "FADD", "HGMMA.64x32x16.F32.BF16", "FADD", "BRA `(.L_x_1)", "MOV"]
    chains = [chain(3), chain(7), chain(7), chain(9, 14), chain(10), chain(6), chain(10)]
    loops = (gpu_static.Loop(1, 6, 1, 5, 0, 0, False),)
    found = gpu_time.work(gpu_static.Listing(code, chains, loops), HITS)
    # outside once, the line after the loop not at all; inside nine times but for what runs less often
    assert found.issued == 1 + 9 + 9 + 4 + 0 + 9 + 0
    assert found.special == 9
    assert found.products == 4 * 16


def test_a_listing_says_of_each_instruction_where_it_came_from():
    text = """
        //## File "/a/tile.py", line 5 inlined at "/a/dense.py", line 7
        //## File "/a/dense.py", line 7
        /*0000*/  MOV R1, R2 ;
        /*0010*/  FADD R1, R1, R2 ;
.L_x_0:
        //## File "/a/dense.py", line 9
        /*0020*/  EXIT ;
    """
    listing = gpu_static.listed(text)
    assert listing.code == ["MOV R1, R2 ;", "FADD R1, R1, R2 ;", "EXIT ;"]
    both = (("dense.py", 7), ("tile.py", 5))
    assert listing.chains == [both, both, (("dense.py", 9),)]


def test_every_case_has_a_prediction_and_the_page_is_of_the_record():
    rows = gpu_time.load()
    assert {(row["group"], row["name"]) for row in rows} == {(case.group, case.name) for case in gpu_time.cases()}
    assert gpu_time.PAGE.read_text(encoding="utf-8") == "\n".join([*gpu_time.page(rows), ""]), (
        "python -m tools.gpu_time --only '^$' makes the page"
    )


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_a_case_from_the_interpreter_to_microseconds(compiler, tmp_path):
    names = "gpu forward/(softmax|entmax15) 65536x128 normal bfloat16"
    words = [sys.executable, "-m", "tools.gpu_time", "--part", "count", "--only", names, "--folder", str(tmp_path)]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {}
    for case in gpu_time.cases():
        if f"{case.group}/{case.name}" in (
            "gpu forward/softmax 65536x128 normal bfloat16", "gpu forward/entmax15 65536x128 normal bfloat16",
        ):  # fmt: skip
            lines = json.loads(gpu_time.lines_of(case, tmp_path).read_text(encoding="utf-8"))
            took, ((_, figures, of, _),) = gpu_time.seconds(case, lines)
            assert case.moved / gpu_static.COPY < took < 1e-3
            found[case.name.split()[0]] = of.issued / figures.instructions
    assert 0.5 < found["softmax"] <= 1.0  # it has no loop
    assert found["softmax"] < found["entmax15"] < 5.0  # it has Newton's, of a few turns
