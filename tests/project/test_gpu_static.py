"""What the compiler makes of the GPU kernels at their real plans: nothing is spilled.

The record in benchmarks/results has it of all of them, by the oldest and by the newest Triton; here it is held to the bars, and to the
sources that it was made of. Some of its kernels are compiled again.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import anymax as am
from anymax.kernels import triton as engine

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.whole,
    pytest.mark.skipif(isinstance(engine.load(), str), reason="triton can't be loaded"),
    pytest.mark.skipif(not (ROOT / "tools").exists(), reason="the tools are in the repository only"),
    pytest.mark.filterwarnings("ignore"),  # of the compiler
]
if (ROOT / "tools").exists():
    from tools import gpu_cases, gpu_static

# -- the record -----------------------------------------------------------------------------------------------------------------------

AGAIN = "make it again: python -m tools.gpu_static --check (CONTRIBUTING.md, The GPU kernels)"


@pytest.fixture(scope="module")
def rows():
    return gpu_static.load()


def test_the_record_meets_the_bars(rows):
    assert [said for row in rows if (said := gpu_static.fault(row))] == []
    assert gpu_static.unused(rows) == []


@pytest.fixture
def uninterpreted():
    from triton import knobs

    if knobs.runtime.interpret:
        pytest.skip("the interpreter has replaced the compiler")


def test_the_record_is_of_these_sources(rows, uninterpreted):
    assert gpu_static.stale(rows) == [], AGAIN
    assert len({row.triton for row in rows}) == 2


class Pool:
    """In the place of processes; `made`: the jobs that it was given."""

    def __init__(self):
        self.made = []

    def imap(self, function, jobs):
        self.made = list(jobs)
        return map(function, jobs)


def test_a_record_is_made_brought_up_to_date_and_told_apart_from_other_sources(
    tmp_path, monkeypatch, capsys, uninterpreted
):
    import triton

    def fake(job):
        _, name, place = job
        return gpu_static.Row(**SOUND | {"triton": triton.__version__, "key": keys[name, place], "case": name})

    def made(version, **options):
        monkeypatch.setattr(triton, "__version__", version)
        pool = Pool()
        return gpu_static.check(pool, **options), len(pool.made), capsys.readouterr().out

    keys = {at: key for key, at in gpu_static.wanted(True).items()}
    keys |= {at: key for key, at in gpu_static.wanted(False).items()}
    monkeypatch.setattr(gpu_static, "made_of", fake)
    monkeypatch.setattr(gpu_static, "RECORD", tmp_path / "record.csv")
    everything, some = (len(gpu_static.wanted(every)) for every in (True, False))
    status, count, said = made("3.9.0", only="attention")
    assert status == 0
    assert 0 < count < everything
    assert "the oldest Triton is missing" in said
    assert f"{everything - count} kernels are missing" in said
    assert made("3.9.0")[1] == everything - count
    assert made("3.4.0")[:2] == (0, some)
    rows = gpu_static.load()
    assert gpu_static.stale(rows) == []
    assert made("3.9.0")[1] == 0
    gpu_static.save([dataclasses.replace(rows[0], key="of another plan"), *rows[1:]])
    (line,) = gpu_static.stale(gpu_static.load())
    assert line == f"Triton {rows[0].triton}: 1 kernels are missing, 1 are of other sources"
    assert made(rows[0].triton)[:2] == (0, 1)
    assert made("3.10.0")[:2] == (0, everything)  # in the place of the other new one
    assert {row.triton for row in gpu_static.load()} == {"3.4.0", "3.10.0"}
    monkeypatch.setattr(gpu_static, "made_of", lambda job: "it does not compile")
    status, count, said = made("3.11.0")
    assert (status, count) == (1, everything)
    assert "it does not compile" in said


# -- what it is held to ---------------------------------------------------------------------------------------------------------------

SOUND = {
    "kernel": "dense_rows", "target": "sm_90", "warps": 4, "registers": 64, "stack": 0, "spills": 0, "shared": 0, "barriers": 0,
    "instructions": 500, "wide_loads": 8, "loads": 8, "triton": "3.9.0", "key": "", "case": "forward/some 1x2", "mode": "p",
    "plan": "1, 8, 1024",
}  # fmt: skip


@pytest.mark.parametrize("fault", [{"stack": 8}, {"spills": 2}, {"stack": 8, "spills": 2}])
def test_a_kernel_that_misses_a_bar_is_told(fault, monkeypatch):
    sound, row = gpu_static.Row(**SOUND), gpu_static.Row(**SOUND | fault)
    assert gpu_static.fault(sound) is None
    assert f"{row.stack} bytes of stack (allowed: 0), {row.spills} spills" in gpu_static.fault(row)
    one = gpu_static.Leave("^forward/some", 8, "a test")
    monkeypatch.setattr(gpu_static, "LEAVE", (one,))
    assert gpu_static.fault(row) is None
    assert "allowed: 8" in gpu_static.fault(dataclasses.replace(row, stack=16))
    assert gpu_static.unused([row]) == []
    assert gpu_static.unused([sound]) == [one]
    assert sound.programs == 8


def test_a_key_follows_the_source_the_plan_and_the_types(monkeypatch, uninterpreted):
    from anymax.kernels.triton import plans

    def key(shape=(64, 8192), dtype=torch.bfloat16):
        make = lambda: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
        case = gpu_cases.Case("", lambda: engine.ENGINE.forward(am.Softmax(), make(), None, make()))
        (launch,) = gpu_cases.launched(case, "sm_90")
        return gpu_static.key_of(launch)

    first = key()
    assert key((128, 8192)) == first  # another number of rows
    assert key(dtype=torch.float32) != first
    assert key((64, 8190)) != first  # is divided by other numbers
    monkeypatch.setitem(plans.FAMILIES, "dense", dataclasses.replace(plans.FAMILIES["dense"], held=4096))
    assert key() != first
    monkeypatch.undo()
    assert key() == first
    monkeypatch.setattr(gpu_static, "words", lambda module: "other source")
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
        gpu_static.words.cache_clear()
        return gpu_static.words("kernels_of_a_test.one")

    try:
        first = words()
        two = tmp_path / "kernels_of_a_test" / "two.py"
        two.write_text('"""What it is."""\n\ndef f():  # a comment\n    """A docstring."""\n\n    return 1\n')
        assert words() == first
        two.write_text("def f():\n    return 2\n")
        assert words() != first
    finally:
        gpu_static.words.cache_clear()


def test_instructions_are_counted_without_the_padding():
    text = """
.L_x_0:
        /*0000*/ LDG.E.128 R4, [R2.64] ;
        /*0010*/ @P0 BRA `(.L_x_0) ;
        /*0020*/ EXIT ;
.L_x_2:
        /*0030*/ BRA `(.L_x_2);
        /*0040*/ NOP;
"""
    assert gpu_static.instructions(text) == ["LDG.E.128 R4, [R2.64] ;", "@P0 BRA `(.L_x_0) ;", "EXIT ;"]


# -- compiled again -------------------------------------------------------------------------------------------------------------------

CASES = {  # case -> programs that a multiprocessor holds, at least
    "forward/softmax 65536x128 bfloat16": 8,
    "forward/softmax 4096x8192 bfloat16": 2,
    "forward/entmax15 65536x128 bfloat16": 8,
    "forward/top-k 4096x1024 bfloat16": 8,
    "backward/entmax15 4096x8192 bfloat16": 2,
    "loss/entmax15 4096x8192 bfloat16": 2,
    "ragged/entmax15 up to 16 x 8 heads": 8,
    "layer/support bfloat16": 8,
    "attention/entmax15 d64": 2,
}


@pytest.mark.parametrize("name", CASES)
def test_the_compilers_figures(name, rows, compiler):
    import triton

    kept = {(row.triton, row.key): row for row in rows}
    assert gpu_static.launches(name)
    for place in range(len(gpu_static.launches(name))):
        row = gpu_static.made_of((gpu_static.MAIN, name, place))
        assert not isinstance(row, str), row
        assert gpu_static.fault(row) is None
        assert row.programs >= CASES[name], row
        same = kept.get((triton.__version__, row.key))
        assert same in (None, dataclasses.replace(row, case=same.case if same else ""))


def test_a_kernel_that_does_not_compile_is_told(monkeypatch):
    def refuses(target, launch):
        raise RuntimeError("out of resource: registers")

    monkeypatch.setattr(gpu_static, "compiled", refuses)
    said = gpu_static.made_of(("sm_90", "forward/softmax 4096x1024 bfloat16", 0))
    assert said == "forward/softmax 4096x1024 bfloat16 dense_rows sm_90: RuntimeError: out of resource: registers"
